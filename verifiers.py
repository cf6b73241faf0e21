"""What a completion is worth, for grpo.py. A config names one as module:function, from here or from a file of yours.

A verifier takes the problem, a line of the problems' file ({"prompt": ..., "answer": ...} and what else it holds), and
the text of the completion. It returns a reward from 0 to 1. It must be pure: a resumed run asks it again.
"""

import ast
import re


def exact(problem: dict, completion: str) -> float:
    """1 if the completion is the answer, but for white space at its ends."""
    return float(completion.strip() == str(problem["answer"]).strip())


def arithmetic(problem: dict, completion: str) -> float:
    """1 if the last whole number of the completion is the answer's."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(problem["answer"]))


def parses_as_python(problem: dict, completion: str) -> float:
    """1 if prompt and completion together are a Python program."""
    try:
        ast.parse(problem["prompt"] + completion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return 1.0


def reasoning_gym(problem: dict, completion: str) -> float:
    """The score of the package's own verifier; "task" names it, "entry" is what it made (pip install reasoning-gym)."""
    import reasoning_gym as gym  # no requirement of this project

    return float(gym.get_score_answer_fn(problem["task"])(answer=completion.strip(), entry=problem["entry"]))
