"""Tokenizer, token files and indexes from Python's own library: several megabytes of real text without a download.

    python tools/quickstart.py

Trains a byte-level BPE tokenizer on the code and the docstrings of the standard library. Holds out about one file in
25, by a hash of its path. Afterwards: python train.py --config quickstart.yaml. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.append(str(Path(__file__).resolve().parent.parent))

from text_to_tokens import write_shards

from data import (
    EOS,
    PAD,
    SEQUENCE_LENGTH,
    TURN,
    TURN_END,
    DataError,
    Index,
    build_index,
    file_fault,
    labelled_files,
    load_index,
    local_path,
    number,
    progress_bar,
    replacing,
    write_index,
)
from processes import add_json, outline, run_command, sole_writer

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
HELD_OUT_ONE_IN = 25


def split_docstrings(source: str) -> tuple[str, str]:
    """Python source -> (the code without its docstrings, the docstrings): nothing stands in both."""
    lines = source.split("\n")
    docstrings, cut = [], set()
    with warnings.catch_warnings(action="ignore"):  # of invalid escapes in old files
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is None:
            continue
        where = node.body[0]
        before = lines[where.lineno - 1].encode()[: where.col_offset]
        after = lines[where.end_lineno - 1].encode()[where.end_col_offset :]
        if text and not before.strip() and not after.strip():  # alone on its lines; otherwise it stays with the code
            docstrings.append((where.lineno, text))
            cut.update(range(where.lineno, where.end_lineno + 1))
    code = "\n".join(line for number, line in enumerate(lines, start=1) if number not in cut)
    return code, "\n\n".join(text for _, text in sorted(docstrings))


def read_library(root: Path) -> dict[str, dict[str, list[str]]]:
    """split ("train" | "heldout") -> label ("code" | "docs") -> documents. About 4 % of the files are held out, by a
    hash of their path; code and docstrings of a file go to the same side."""
    corpus = {split: {"code": [], "docs": []} for split in ("train", "heldout")}
    paths = [p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts)]
    if not paths:
        raise DataError(f"{root}: got no .py file, expected a folder of them; fix: check --library")
    wrong = []  # a few files of the library are there to be wrong
    for path in progress_bar(sorted(paths), desc="read", unit="file"):
        try:
            code, docs = split_docstrings(path.read_bytes().decode().replace("\r\n", "\n"))
        except (ValueError, SyntaxError, RecursionError):  # no UTF-8, null bytes; another Python; deep nesting
            wrong.append(path.name)
            continue
        # By a hash and not by chance: the same file is held out on every machine and in every version of Python.
        name_hash = int(hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest(), 16)
        split = corpus["heldout" if name_hash % HELD_OUT_ONE_IN == 0 else "train"]
        split["code"].append(code)
        split["docs"].append(docs)
    if wrong:
        first = ", ".join(wrong[:3])
        print(
            f"quickstart.py: {root}: passed over {len(wrong)} of {len(paths)} files, no Python: {first}",
            file=sys.stderr,
        )
    return corpus


def train_tokenizer(documents: Iterable[str], vocab_size: int, exact: bool = True) -> Tokenizer:
    """Byte-level BPE; the same text gives the same tokenizer. A small text gives fewer tokens, unless it is `exact`."""
    # All 256 bytes are tokens, so any text can be encoded. Special tokens come first; those of a conversation wait for one.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not len(alphabet) + 4 <= vocab_size <= 2**20:  # the trainer asks for memory by it
        least = f"{len(alphabet) + 4} (bytes, {EOS}, {PAD}, {TURN}, {TURN_END})"
        raise DataError(f"--vocab-size: got {vocab_size}, expected {least} .. {2**20}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"special_tokens": [EOS, PAD, TURN, TURN_END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, **special))
    if exact and tokenizer.get_vocab_size() != vocab_size:
        raise DataError(f"--vocab-size: got {vocab_size}, the text gives {tokenizer.get_vocab_size()}; fix: less")
    return tokenizer


def quickstart(out: Path, vocab_size: int, sequence_length: int, library: Path) -> dict:
    """Tokenizer, token files and two indexes of a folder of Python source, built aside and renamed when complete."""
    settings = {"vocab_size": vocab_size, "sequence_length": sequence_length}
    if (summary := quickstart_there(out, settings)) is None:
        with sole_writer(out):
            # Look again: another process may have built it between the first look and the lock.
            if (summary := quickstart_there(out, settings)) is None:
                return build_quickstart(out, settings, library)
    return summary


def quickstart_there(out: Path, settings: dict) -> dict | None:
    """What was built at `out`, checked; None if there is nothing."""
    if (out / "quickstart.json").is_file():
        summary = json.loads((out / "quickstart.json").read_bytes())
        for split in ("train", "heldout"):
            index = checked_index(out / f"{split}.json")
            if index.fingerprint != summary[split]["fingerprint"]:
                raise DataError(f"{out}/{split}.json: got another index; fix: delete {out} and run again")
        if settings != summary["settings"]:
            raise DataError(f"{out}: got {summary['settings']} there, {settings} asked for; fix: another --out")
        print(f"quickstart.py: {out} is complete already", file=sys.stderr)
        return summary | {"out": str(out)}
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: got a folder that holds something else; fix: another --out, or delete it")
    return None


def checked_index(path: Path) -> Index:
    """The index, of which all files are there and whole."""
    index = load_index(path)
    if fault := next(
        filter(None, (file_fault(path.parent / file.path, file, index.itemsize) for file in index.files)), None
    ):
        raise DataError(fault)
    return index


@contextlib.contextmanager
def appears_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` to build in, which gets its name at the end: `out` is whole or not there. The caller holds the
    lock of `out`."""
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: got a folder that holds something; fix: another --out, or delete it")
    building = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
    try:
        building.mkdir(parents=True)
        yield building
        os.replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def build_quickstart(out: Path, settings: dict, library: Path) -> dict:
    with appears_whole(out) as building:
        corpus, vocab_size = read_library(library), settings["vocab_size"]
        print("quickstart.py: training the tokenizer", file=sys.stderr)
        # The tokenizer sees the training text alone. Trained on held-out text it would flatter the held-out loss.
        tokenizer = train_tokenizer((text for texts in corpus["train"].values() for text in texts), vocab_size)
        with replacing(building / "tokenizer.json") as f:
            f.write(tokenizer.to_str(pretty=True).encode())
        summary = {"out": str(out), "settings": settings, "python": platform.python_version()}
        summary |= write_corpus(building, corpus, tokenizer, settings["sequence_length"])
        # The summary, with the settings, tells a later run whether what it finds is what it was asked for.
        with replacing(building / "quickstart.json") as f:
            f.write(json.dumps(summary, indent=1).encode() + b"\n")
    return summary


def corpus_rows(summary: dict) -> list[dict]:
    """For people: what `write_corpus` has counted."""
    return [
        {"split": split, "label": label, "documents": counts["documents"], "tokens": counts["tokens"],
         "bytes a token": counts["bytes_per_token"]}
        for split in ("train", "heldout") for label, counts in summary[split].items() if isinstance(counts, dict)
    ]  # fmt: skip


def for_people(summary: dict) -> str:
    instances = ", ".join(f"{split} {summary[split]['instances']:,}" for split in ("train", "heldout"))
    result = {"out": summary["out"], "instances": instances, "texts": corpus_rows(summary)}
    return outline(result | {"verdict": "next: python train.py --config quickstart.yaml"})


def write_corpus(folder: Path, corpus: dict, tokenizer: Tokenizer, sequence_length: int) -> dict:
    """Token files and one index a split, of split -> label -> documents, for FOLDER/tokenizer.json. Returns counts."""
    eos_id, pad_id = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    size = max(tokenizer.get_vocab().values()) + 1
    vocabulary = {"tokenizer": "tokenizer.json", "vocab_size": size, "eos_id": eos_id, "pad_id": pad_id}
    summary = {}
    for split, domains in corpus.items():
        for label, texts in domains.items():  # the label is the folder's name
            bar = progress_bar(texts, desc=f"{split}/{label}", unit="document")
            counts = write_shards(bar, tokenizer, folder / split / label)
            counts["bytes_per_token"] = round(counts["text_bytes"] / counts["tokens"], 3)
            summary.setdefault(split, {})[label] = counts
        files = labelled_files([str(folder / split)])
        index = build_index(files, folder, sequence_length, **vocabulary)
        write_index(index, folder / f"{split}.json")
        summary[split] |= {"instances": index.instances, "fingerprint": index.fingerprint}
    return summary


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="data/quickstart", help="folder to make (default: %(default)s)")
    parser.add_argument("--vocab-size", type=number(1, 2**32), default=4096, help="default: %(default)s")
    parser.add_argument("--sequence-length", type=SEQUENCE_LENGTH, default=512, help="default: %(default)s")
    parser.add_argument("--library", default=sysconfig.get_paths()["stdlib"], help="folder of .py files to read")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command(
        "quickstart.py",
        lambda: quickstart(local_path(args.out), args.vocab_size, args.sequence_length, local_path(args.library)),
        args.json,
        for_people,
    )


if __name__ == "__main__":
    sys.exit(main())
