"""Sums for grpo.py: problems to train on and to hold out, and conversations to tune a model on first.

    python tools/problems.py --out data/sums

Writes OUT/train.jsonl and OUT/heldout.jsonl ({"prompt": "3 + 4 =", "answer": 7}), and OUT/sft.jsonl, the training problems
with their answers, for chat_to_tokens.py. A hash of the two numbers decides where a sum goes: none is on both sides. Exit
codes as train.py's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

from own_text import share_of

from data import DataError, local_path, number, replacing
from processes import add_json, run_command, sole_writer


def problems(largest: int, held_out: float) -> dict[str, list[dict]]:
    """split -> problems: a + b for all a and b from 0 to `largest`."""
    found = {"train": [], "heldout": []}
    for a in range(largest + 1):
        for b in range(largest + 1):
            found["heldout" if share_of(f"{a} {b}") < held_out else "train"].append(
                {"prompt": f"{a} + {b} =", "answer": a + b}
            )
    return found


def write_problems(args: argparse.Namespace) -> dict:
    out, found = local_path(args.out), problems(args.largest, args.held_out)
    if not all(found.values()):
        raise DataError(f"--held-out: got {args.held_out}, which leaves a side empty; fix: another share, or --largest")
    said = [{"prompt": p["prompt"], "completion": str(p["answer"])} for p in found["train"]]
    with sole_writer(out):
        for name, rows in (*found.items(), ("sft", said)):
            with replacing(out / f"{name}.jsonl") as f:
                f.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    counts = {split: len(rows) for split, rows in found.items()}
    return {"out": str(out), **counts, "verdict": f"next: python tools/chat_to_tokens.py {out / 'sft.jsonl'} ..."}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the three files")
    parser.add_argument("--largest", type=number(1, 1000), default=19, help="of the numbers; default: %(default)s")
    parser.add_argument("--held-out", type=float, default=0.2, metavar="SHARE", help="default: %(default)s")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("problems.py", lambda: write_problems(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
