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

from data import DataError, local_path, number, replacing
from processes import add_json, run_command, sole_writer
from verifiers import python_words


def problems(most: int, held_out: float) -> dict[str, list[dict]]:
    """split -> problems: each word with each number of words from 1 to `most`; and "sft", the answers."""
    words, found = sorted(python_words()), {"train": [], "heldout": [], "sft": []}
    draws = random.Random(0)
    for word in words:
        asked = [{"prompt": f"Write {n} words after {word}.", "words": n} for n in range(1, most + 1)]
        if share_of(word) < held_out:
            found["heldout"] += asked
            continue
        found["train"] += asked
        one = draws.choice(asked)
        answer = ", ".join(draws.sample(words, one["words"]))
        found["sft"].append({"prompt": one["prompt"], "completion": answer})
    return found


def write_problems(args: argparse.Namespace) -> dict:
    out, found = local_path(args.out), problems(args.most, args.held_out)
    if not all(found.values()):
        raise DataError(f"--held-out: got {args.held_out}, which leaves a side empty; fix: another share")
    with sole_writer(out):
        for name, rows in found.items():
            with replacing(out / f"{name}.jsonl") as f:
                f.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    counts = {split: len(rows) for split, rows in found.items()}
    return {"out": str(out), **counts, "verdict": f"next: python tools/chat_to_tokens.py {out / 'sft.jsonl'} ..."}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the three files")
    parser.add_argument("--most", type=number(1, 100), default=4, help="words asked for; default: %(default)s")
    parser.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="default: %(default)s")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("problems.py", lambda: write_problems(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
