"""Your own text, whole: tokenizer, held-out split, token files, two indexes and a config to train with.

    python tools/own_text.py notes/ --out data/notes
    python train.py --config data/notes/notes.yaml

Takes what text_to_tokens.py takes: files and folders of plain text (a file is a document) and JSON lines (a line is one),
also as .gz or .zst. The config is quickstart.yaml with this vocabulary and these indexes. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

from quickstart import appears_whole, corpus_rows, train_tokenizer, write_corpus
from text_to_tokens import TEXT_KINDS, TEXT_SUFFIXES, expand, read_documents

from data import EOS, PAD, SEQUENCE_LENGTH, DataError, load_tokenizer, local_path, number, progress_bar, replacing
from processes import HERE, add_json, read_yaml, run_command, run_name_fault, sole_writer, write_yaml

HELD_OUT_SHARE = 0.04  # of the characters, as in the quick start
FEW_DOCUMENTS = 50  # with fewer the end of each document is held out
TOKENIZER_CHARACTERS = 2**26  # that the tokenizer is trained on, at most
BATCH, MOST_STEPS, EPOCHS = 8, 700, 4  # of the config: the quick start's steps, or four epochs of a small text


class Split:
    """Which text is held out. It depends on the texts alone, so a document that stands twice is on one side."""

    def __init__(self, documents: Iterable[str]):
        sizes = {}
        for text in documents:
            sizes[digest(text)] = len(text)
        self.by_end = len(sizes) < FEW_DOCUMENTS
        self.held_out, left = set(), HELD_OUT_SHARE * sum(sizes.values())
        for key in sorted(sizes):  # hashes: in no order that the text knows
            if left <= 0 or self.by_end:
                break
            self.held_out.add(key)
            left -= sizes[key]

    def part(self, split: str, documents: Iterable[str]) -> Iterator[str]:
        for text in documents:
            if self.by_end:
                end = math.ceil(len(text) * (1 - HELD_OUT_SHARE))
                yield text[:end] if split == "train" else text[end:]
            elif (digest(text) in self.held_out) == (split == "heldout"):
                yield text

    def described(self) -> str:
        if self.by_end:
            return f"the last {HELD_OUT_SHARE:.0%} of each document"
        return f"{len(self.held_out):,} documents, {HELD_OUT_SHARE:.0%} of the text"


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


def share_of(text: str) -> float:
    """A number from 0 to 1 that the text alone decides: below a share it is held out."""
    return int.from_bytes(digest(text)[:4], "big") / 2**32


def own_text(args: argparse.Namespace) -> dict:
    out = local_path(args.out)
    if fault := run_name_fault(out.name):
        raise DataError(f"--out {args.out}: {fault}")
    files = expand(args.inputs, TEXT_SUFFIXES, TEXT_KINDS)
    given = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    with sole_writer(out), appears_whole(out) as building:
        return build(building, out, files, given, args)


def build(building: Path, out: Path, files: list[Path], given: Tokenizer | None, args: argparse.Namespace) -> dict:
    size = sum(f.stat().st_size for f in files)

    def documents(what: str) -> Iterator[str]:  # read anew each time: a corpus need not fit in memory
        with progress_bar(total=size, desc=what, unit="B", unit_scale=True) as progress:
            yield from read_documents(files, args.text_field, progress)

    # Hold out first: the tokenizer sees the training text alone, or it would flatter the held-out loss.
    split = Split(documents("split"))
    tokenizer = given or fitting_tokenizer(lambda: split.part("train", documents("tokenizer")), args.vocab_size)
    if given is not None and None in map(given.token_to_id, (EOS, PAD)):
        raise DataError(
            f"--tokenizer {args.tokenizer}: got one without {EOS} or {PAD}; fix: tools/text_to_tokens.py --eos"
        )
    with replacing(building / "tokenizer.json") as f:
        f.write(tokenizer.to_str(pretty=True).encode())
    corpus = {name: {out.name: split.part(name, documents(name))} for name in ("train", "heldout")}
    little = f"too little text for instances of {args.sequence_length} tokens to train on and held out"
    try:
        summary = write_corpus(building, corpus, tokenizer, args.sequence_length)
    except DataError as e:
        if "no instances" not in str(e):
            raise
        raise DataError(f"{little}; fix: more of it, or a smaller --sequence-length") from e
    instances = summary["train"]["instances"]
    if instances < BATCH:
        raise DataError(f"{little}: got {instances}, expected {BATCH} or more; fix: a smaller --sequence-length")
    config, vocab_size = building / f"{out.name}.yaml", max(tokenizer.get_vocab().values()) + 1
    steps = min(MOST_STEPS, EPOCHS * instances // BATCH)
    write_config(config, out, vocab_size, args.sequence_length, steps)
    return {
        "held_out": split.described(),
        "documents": corpus_rows(summary),
        "instances": {name: summary[name]["instances"] for name in ("train", "heldout")},
        "vocabulary": vocab_size,
        "config": str(out / config.name),
        "steps": steps,
        "verdict": f"next: python train.py --config {out / config.name}",
    }


def fitting_tokenizer(documents: Callable[[], Iterator[str]], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` tokens, or of as many as a small text gives."""

    def sample() -> Iterator[str]:
        left = TOKENIZER_CHARACTERS
        for text in documents():
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    return train_tokenizer(sample(), vocab_size, exact=False)


def write_config(path: Path, out: Path, vocab_size: int, sequence_length: int, steps: int) -> None:
    """quickstart.yaml for this text. The learning rate ends with the run, and evaluations come as often as there."""
    config = read_yaml(HERE / "configs/quickstart.yaml")
    config["model"] |= {"vocab_size": vocab_size, "padded_vocab_size": vocab_size + -vocab_size % 128}
    config["model"]["window"] = min(config["model"]["window"], sequence_length)
    config["data"] |= {"index": str(out / "train.json"), "sequence_length": sequence_length}
    config["schedule"][0] |= {"total_steps": steps, "warmup_steps": min(40, steps // 10)}
    every = max(1, steps // 7)
    config["run"] |= {"name": out.name, "steps": steps, "eval_index": str(out / "heldout.json"), "eval_every": every,
                      "checkpoint_every": every, "sample_prompt": ""}  # fmt: skip
    write_yaml(config, path)


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=f"{TEXT_KINDS}; or folders of them")
    parser.add_argument("--out", required=True, help="folder to make, as data/notes; its name is the run's")
    parser.add_argument("--tokenizer", help="a tokenizer.json; default: one is trained on the training text")
    parser.add_argument("--vocab-size", type=number(1, 2**20), default=4096,
                        help="of the tokenizer that is trained; a small text gives less (default: %(default)s)")  # fmt: skip
    parser.add_argument("--sequence-length", type=SEQUENCE_LENGTH, default=512, help="default: %(default)s")
    parser.add_argument("--text-field", default="text", help="field of a JSON line (default: %(default)s)")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("own_text.py", lambda: own_text(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
