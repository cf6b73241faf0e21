"""Text to token files: headerless little-endian uint32, an EOS after each document.

    python tools/text_to_tokens.py corpus/ --tokenizer tokenizer.json --out data/mine --label web

Reads plain text (a file is a document) and JSON lines (a line is one), also as .gz or .zst, or folders of them. Links are
followed, each file counts once, and what is passed over is said. The next step is `python data.py index`. Exit codes as
train.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import zstandard
from tokenizers import Tokenizer
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))

from data import EOS, INCOMPLETE, DataError, load_tokenizer, local_path, naming, number, progress_bar
from processes import add_json, run_command, sole_writer

SHARD_TOKENS = 2**28  # 1 GiB of uint32, a multiple of every power-of-two sequence length
PLAIN_TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex")  # a file is a document
JSON_LINES = (".jsonl", ".ndjson", ".json")  # a line is one
PACKED = (".gz", ".zst")
# A .json file that is not compressed is often one of settings.
TEXT_SUFFIXES = tuple(k + p for k in PLAIN_TEXT + JSON_LINES for p in ("", *PACKED) if k + p != ".json")
TEXT_KINDS = f"{', '.join(PLAIN_TEXT + JSON_LINES[:2])}; these and .json also as .gz or .zst"
READ_BYTES = 2**20
ENCODE_CHARACTERS = 2**22  # text handed to the tokenizer's threads at once


def read_bytes(path: Path, progress: tqdm) -> Iterator[bytes]:
    """Chunks of a plain, .gz or .zst file. Members written one after another are joined; a truncated file is an error
    (zstandard's own reader ends silently)."""
    new = {".gz": lambda: zlib.decompressobj(wbits=31), ".zst": lambda: zstandard.ZstdDecompressor().decompressobj()}
    kind, decoder = path.suffix.lower(), None
    with open(path, "rb") as f:
        while chunk := f.read(READ_BYTES):
            progress.update(len(chunk))
            if kind not in new:
                yield chunk
                continue
            # A file may hold several compressed members. A decoder ends with its member, and the next one takes the
            # rest.
            while chunk:
                decoder = decoder or new[kind]()
                try:
                    yield decoder.decompress(chunk)
                except (zlib.error, zstandard.ZstdError) as e:
                    raise DataError(f"{path}: cannot decompress ({e}); fix: copy the file again") from e
                chunk = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise DataError(f"{path}: got a truncated file; fix: copy it again")


def read_lines(path: Path, progress: tqdm) -> Iterator[bytes]:
    begun = []  # pieces of a line that has not ended, joined once: a line may be as long as the file
    for chunk in read_bytes(path, progress):
        piece, *pieces = chunk.split(b"\n")
        begun.append(piece)
        for piece in pieces:
            yield b"".join(begun)
            begun = [piece]
    yield b"".join(begun)


def read_documents(files: Sequence[Path], text_field: str, progress: tqdm) -> Iterator[str]:
    """A file of PLAIN_TEXT is one document, exactly as it is; one of JSON_LINES has one in `text_field` of every line
    that is not blank."""
    for path in files:
        if path.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(PLAIN_TEXT):
            try:
                yield b"".join(read_bytes(path, progress)).decode()
            except UnicodeDecodeError as e:
                raise DataError(f"{path}: byte {e.start} is not UTF-8; fix: convert the file") from e
            continue
        for line_number, line in enumerate(read_lines(path, progress), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:  # malformed JSON or not UTF-8; [[[[...
                raise DataError(f"{path}, line {line_number}: not JSON ({e}); fix: one JSON object a line") from e
            if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                raise DataError(f"{path}, line {line_number}: no text {text_field!r}; fix: --text-field")
            yield row[text_field]


def mark_incomplete(folder: Path) -> Path:
    """The mark that keeps `index` from taking what is in a folder, and below it, for the whole. Its writer removes it when
    all is there; one that is killed does not."""
    mark = folder / INCOMPLETE
    folder.mkdir(parents=True, exist_ok=True)
    with naming(mark), open(mark, "wb") as f:
        f.write(b"a tool is writing this folder, or was ended while it did: then run it again.\n")
        f.flush()
        os.fsync(f.fileno())
    return mark


class ShardWriter:
    """Cuts a stream of tokens into part-00000.npy, ...; no shard has its name before finish() gives them theirs."""

    def __init__(self, folder: Path, shard_tokens: int):
        if not any(folder.glob("part-*.npy")):
            mark_incomplete(folder)
        for leftover in folder.glob("part-*.npy.tmp"):
            leftover.unlink()  # of a run that was killed
        self.folder, self.shard_tokens = folder, shard_tokens
        self.shards, self.file, self.room = [], None, 0

    def append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self.file is None:
                self.shards.append(self.folder / f"part-{len(self.shards):05}.npy")
                self.file, self.room = open(f"{self.shards[-1]}.tmp", "wb"), self.shard_tokens
            with naming(self.shards[-1]):
                self.file.write(tokens[: self.room].astype("<u4"))  # tofile would not say why it fails
            tokens, self.room = tokens[self.room :], self.room - min(self.room, len(tokens))
            if self.room == 0:
                self._close()

    def _close(self) -> None:
        with naming(self.shards[-1]), self.file as f:
            f.flush()
            os.fsync(f.fileno())
        self.file = None

    def finish(self) -> list[Path]:
        """Exchanges the folder's shards for these. Killed anywhere in between it leaves the mark."""
        if self.file is not None:
            self._close()
        # Old and new shards must not be mixed, and no system call exchanges several files at once. So the mark stands
        # while the old ones go and the new ones get their names.
        mark = mark_incomplete(self.folder)
        for stale in self.folder.glob("part-*.npy"):
            stale.unlink()
        for shard in self.shards:
            os.replace(f"{shard}.tmp", shard)
        mark.unlink()
        return self.shards

    def close(self) -> None:
        """Removes what finish() did not name."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # of the write that failed; told already
                self.file.close()
        for shard in self.shards:
            Path(f"{shard}.tmp").unlink(missing_ok=True)


def write_shards(
    documents: Iterable[str], tokenizer: Tokenizer, folder: Path, eos: str = EOS, shard_tokens: int = SHARD_TOKENS
) -> dict:
    """Encodes documents, an EOS after each, into uint32 shards; returns counts. Parallel in the tokenizer's threads.

    Special tokens that stand in the text are encoded as the letters they are made of: only the EOS written here ends a
    document. Empty documents are skipped. Lone surrogates (JSON allows them, UTF-8 does not) become U+FFFD."""
    if (eos_id := tokenizer.token_to_id(eos)) is None:
        raise DataError(f"--eos: got {eos!r}, which the tokenizer does not know; fix: name its end-of-text token")
    if shard_tokens < 1:
        raise DataError(f"--shard-tokens: got {shard_tokens}, expected at least 1")
    # Text from the web may spell "<|endoftext|>". Read as the token it would end a document in its middle.
    tokenizer.encode_special_tokens = True
    counts = dict.fromkeys(("documents", "empty_documents", "repaired_documents", "text_bytes", "tokens", "eos"), 0)
    with contextlib.closing(ShardWriter(folder, shard_tokens)) as writer:

        def encode(texts: list[str]) -> None:
            # One call for many documents: the tokenizer spreads them over its threads and keeps their order.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            tokens = np.array([i for encoding in encodings for i in (*encoding.ids, eos_id)], np.uint32)
            counts["tokens"] += len(tokens)
            counts["eos"] += int(np.count_nonzero(tokens == eos_id))
            writer.append(tokens)

        waiting, characters = [], 0
        for text in documents:
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                size = len(text.encode())
                counts["repaired_documents"] += 1
            if not text:
                counts["empty_documents"] += 1
                continue
            counts["documents"] += 1
            counts["text_bytes"] += size
            waiting.append(text)
            characters += len(text)
            # Documents differ in length, so a batch ends by its characters: that bounds memory and keeps all threads
            # busy.
            if characters >= ENCODE_CHARACTERS:
                encode(waiting)
                waiting, characters = [], 0
        encode(waiting)
        if not counts["documents"]:
            raise DataError(f"no text: got {counts['empty_documents']} empty documents; fix: check the inputs")
        return counts | {"shards": len(writer.finish()), "bytes": 4 * counts["tokens"]}


def tokenize(args: argparse.Namespace) -> dict:
    files = expand(args.inputs, TEXT_SUFFIXES, TEXT_KINDS)
    tokenizer = load_tokenizer(args.tokenizer)
    if args.label and (args.label in (".", "..") or "/" in args.label):
        raise DataError(f"--label: got {args.label}, expected the name of a folder in --out")
    folder = local_path(args.out) / args.label if args.label else local_path(args.out)
    bar = {"total": sum(f.stat().st_size for f in files), "desc": "tokenize", "unit": "B", "unit_scale": True}
    # The lock comes before the look at what is there, or two processes could both find the folder empty.
    with sole_writer(folder), progress_bar(**bar) as progress:
        if any(folder.glob("part-*.npy")) and not args.overwrite:
            raise DataError(f"{folder}: got a folder that holds shards; fix: another --out, or --overwrite")
        documents = read_documents(files, args.text_field, progress)
        counts = write_shards(documents, tokenizer, folder, args.eos, args.shard_tokens)
    return {"out": str(folder), "files": len(files)} | counts


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder, those of linked folders last: each folder once, also where links go round in circles.
    Hidden folders stand for what is in them."""

    def fail(e: OSError):
        raise e  # os.walk would pass over a folder that it may not read

    visited, tops = set(), deque([folder])
    while tops:
        for where, folders, names in os.walk(tops.popleft(), onerror=fail):
            if (real := os.path.realpath(where)) in visited:
                folders.clear()
                continue
            visited.add(real)
            hidden = [name for name in folders if name.startswith(".")]
            folders[:] = [name for name in folders if name not in hidden]
            tops += [path for name in sorted(folders) if (path := Path(where, name)).is_symlink()]
            yield from (Path(where, name) for name in names + hidden)


def expand(inputs: Iterable[str | os.PathLike], suffixes: tuple[str, ...], kinds: str = "") -> list[Path]:
    """The files named, and those below the folders named that have one of the suffixes, sorted within a folder. Links
    are followed. A file counts once, and what is passed over is said. `kinds`: the suffixes for people."""
    files, taken, kinds = [], set(), kinds or ", ".join(suffixes)
    for given in map(local_path, inputs):
        passed = {}  # why -> files
        if not given.is_dir():
            if not given.is_file():
                raise DataError(f"{given}: got no such file or folder; fix: check the path")
            if not given.name.lower().endswith(suffixes):
                raise DataError(f"{given}: got another kind of file, expected one that ends in {kinds}")
        paths = sorted(walk(given)) if given.is_dir() else [given]
        for path in paths:
            if path.name.startswith(".") and path != given:  # a tool's, or a copy that is under way
                why = "hidden"
            elif not path.name.lower().endswith(suffixes):
                why = "".join(path.suffixes[-2 if path.suffix in (".gz", ".zst") else -1 :]) or "without a suffix"
            elif not path.is_file():
                why = "broken links, or no files"
            elif (real := os.path.realpath(path)) in taken:
                why = "taken already"
            else:
                taken.add(real)
                files.append(path)
                continue
            passed.setdefault(why, []).append(os.path.relpath(path, given.parent))
        count = sum(map(len, passed.values()))
        counts = "; ".join(
            f"{len(names)} {why} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for why, names in passed.items()
        )
        if len(paths) == count and "taken already" not in passed:
            raise DataError(f"{given}: got no file, expected some that end in {kinds}; there are {counts or 'none'}")
        if passed:
            print(
                f"text_to_tokens.py: {given}: {len(paths) - count} files taken, {count} passed over: {counts}",
                file=sys.stderr,
            )
    return files


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=f"{TEXT_KINDS}; or folders of them")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--out", required=True, help="folder for part-00000.npy, ...")
    parser.add_argument("--label", help="write to OUT/LABEL; `data.py index` takes a file's folder as its label")
    parser.add_argument("--text-field", default="text", help="field of a JSON line (default: %(default)s)")
    parser.add_argument("--eos", default=EOS, help="token after each document (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=number(1, 2**40), default=SHARD_TOKENS,
                        help="tokens in a shard (default: %(default)s)")  # fmt: skip
    parser.add_argument("--workers", type=number(1, 1024),
                        help="threads (default: all cores); the result does not depend on it")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the shards in the output folder")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    if args.workers:
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read once, when the tokenizer's threads start
    return run_command("text_to_tokens.py", lambda: tokenize(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
