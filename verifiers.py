"""What a completion is worth, for grpo.py. A config names one as module:function, from here or from a file of yours.

A verifier takes the problem, a line of the problems' file ({"prompt": ..., "answer": ...} and what else it holds), and
the text of the completion. It returns a reward from 0 to 1. It must be pure: a resumed run asks it again.
"""

import ast
import re
from collections import Counter
from functools import lru_cache


def exact(problem: dict, completion: str) -> float:
    """1 if the completion is the answer, but for white space at its ends."""
    return float(completion.strip() == str(problem["answer"]).strip())


def arithmetic(problem: dict, completion: str) -> float:
    """1 if the last whole number of the completion is the answer's."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(problem["answer"]))


@lru_cache
def python_words() -> frozenset[str]:
    """Words of three to nine small letters that Python's own documentation has five times or more."""
    from pydoc_data.topics import topics  # half a megabyte of text

    counts = Counter(re.findall(r"\b[a-z]{3,9}\b", " ".join(topics.values())))
    return frozenset(word for word, count in counts.items() if count >= 5)


def words(problem: dict, completion: str) -> float:
    """1 if the completion is as many different words as asked for, commas between them, each one of `python_words`."""
    given = completion.strip().split(", ")
    return float(len(given) == len(set(given)) == problem["words"] and python_words().issuperset(given))


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
