"""Problems for grpo.py: "Write 3 words after able.", to train on and to hold out, and answers to tune a model on first.

    python tools/problems.py --out data/words

Writes OUT/train.jsonl and OUT/heldout.jsonl ({"prompt": ..., "words": 3}), and OUT/sft.jsonl: for each word to train on
one prompt with a random answer, for chat_to_tokens.py. The words are those of Python's own documentation, as
verifiers.python_words gives them. A hash of the prompt's word decides where it goes: none is on both sides. Exit codes as
train.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

from own_text import share_of

from data import local_path, replacing
from processes import add_json, run_command, sole_writer
from verifiers import python_words

MOST, HELD_OUT = 4, 0.1  # words asked for; share of the words


def problems() -> dict[str, list[dict]]:
    """split -> problems: each word with each number of words from 1 to MOST; and "sft", the answers."""
    words, found = sorted(python_words()), {"train": [], "heldout": [], "sft": []}
    draws = random.Random(0)
    for word in words:
        asked = [{"prompt": f"Write {n} words after {word}.", "words": n} for n in range(1, MOST + 1)]
        if share_of(word) < HELD_OUT:
            found["heldout"] += asked
            continue
        found["train"] += asked
        chosen = draws.choice(asked)
        answer = ", ".join(draws.sample(words, chosen["words"]))
        found["sft"].append({"prompt": chosen["prompt"], "completion": answer})
    return found


def write_problems(args: argparse.Namespace) -> dict:
    out, found = local_path(args.out), problems()
    with sole_writer(out):
        for name, rows in found.items():
            with replacing(out / f"{name}.jsonl") as f:
                f.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    counts = {split: len(rows) for split, rows in found.items()}
    return {"out": str(out), **counts, "verdict": f"next: python tools/chat_to_tokens.py {out / 'sft.jsonl'} ..."}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the three files")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("problems.py", lambda: write_problems(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
