"""Pack documents into instances of one length (stage 3): token files whose instances hold whole documents.

    python tools/pack.py data/quickstart/train.json --sequence-length 2048 --out data/packed

Index, order and loader are then those of any token file; the end of an instance is padded. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dataclasses
import errno
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from text_to_tokens import mark_incomplete

from data import (
    ROOT_HELP,
    SEQUENCE_LENGTH,
    DataError,
    Index,
    TokenFile,
    build_index,
    end_with_parent,
    file_fault,
    load_index,
    local_path,
    mask_path,
    number,
    olmo_core_fingerprint,
    patiently,
    progress_bar,
    read_at,
    read_tokens,
    replacing,
    summarise,
    warn,
    write_index,
)
from processes import add_json, check_room, run_command, sole_writer

SCAN_TOKENS = 2**22  # tokens that are looked at at once


@dataclass(frozen=True)
class Packing:
    """How documents are packed into instances (stage 3): OLMo-core data/numpy_dataset.py:NumpyPackedFSLDataset."""

    sequence_length: int
    group_size: int  # files whose documents share instances
    permutation_seed: int  # the files are shuffled before they are grouped
    long_documents: str  # "truncate": the rest is discarded | "fragment": the rest is a document of its own

    def __post_init__(self):
        if self.sequence_length < 2 or self.group_size < 1:
            got = f"{self.sequence_length}, {self.group_size}"
            raise DataError(f"packing sequence_length, group_size: got {got}, expected >= 2, >= 1")

    def groups(self, files: Sequence[TokenFile]) -> list[list[TokenFile]]:
        files = list(files)
        random.Random(self.permutation_seed).shuffle(files)
        return [files[i : i + self.group_size] for i in range(0, len(files), self.group_size)]


def packed_fingerprint(index: Index, packing: Packing) -> str:
    """OLMo-core's fingerprint of the dataset that packs the files of `index` while it reads them."""
    fields = {"long_doc_strategy": packing.long_documents, "bos_token_id": None}
    fields |= {"sequence_length": packing.sequence_length}
    fields |= {"source_group_size": packing.group_size} if packing.group_size > 1 else {}
    files = [file for group in packing.groups(index.files) for file in group]
    return olmo_core_fingerprint(index, "NumpyPackedFSLDataset", fields, files)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Instances, in the order in which they were opened, of documents, in the order in which they were put there.

    The longest document first, into the fullest instance that has room for it, else into a new one. Ties: documents of
    one length as they come, instances with the same room first in, first out. Source: OLMo-core
    data/utils.py:InstancePacker.

    DIVERGENCE 10: documents of one length stay in order; OLMo-core takes them as numpy's unstable sort leaves them, which
    depends on the CPU. The instances hold documents of the same lengths either way."""
    instances, waiting = [], {}  # waiting: free tokens -> the instances that have so many
    rooms = []  # the keys of `waiting`, ascending
    # A bisection of `rooms` finds the fullest instance that fits. A search through all instances would take n^2 steps.
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        if (at := bisect.bisect_left(rooms, length)) == len(rooms):
            room, instance = capacity, len(instances)
            instances.append([])
        else:
            room = rooms[at]
            instance = waiting[room].popleft()
            if not waiting[room]:
                del waiting[room], rooms[at]
        instances[instance].append(document)
        if left := room - length:
            if left not in waiting:
                waiting[left] = deque()
                bisect.insort(rooms, left)
            waiting[left].append(instance)
    return instances


def document_spans(path: Path, index: Index, packing: Packing, counts: dict) -> np.ndarray:
    """int64 [documents, 2]: where the documents of a token file begin and end, none longer than an instance. An EOS
    ends a document; what follows the last one is none."""
    ends, read = [], 0
    for tokens in read_tokens(path, np.dtype(index.dtype).newbyteorder("<"), SCAN_TOKENS):
        if (largest := tokens.max()) >= index.vocab_size:
            what = f"{path}: token {read + int(np.argmax(tokens))}"
            raise DataError(f"{what}: got id {largest}, expected below the vocabulary size {index.vocab_size}")
        counts["pads_in_documents"] += int(np.count_nonzero(tokens == index.pad_id))
        ends.append(read + 1 + np.flatnonzero(tokens == index.eos_id))
        read += len(tokens)
    ends = np.concatenate(ends)
    if not len(ends):
        warn(f"{path}: EOS {index.eos_id} never occurs: no document, left out")
    starts = np.concatenate([[0], ends])[:-1]
    counts["documents"] += len(ends)
    counts["tail_tokens"] += read - int(ends[-1] if len(ends) else 0)
    S, total = packing.sequence_length, int(np.sum(ends - starts))
    # A document longer than an instance: Ai2 keeps its first S tokens, "fragment" keeps all of them in pieces.
    pieces = -(-(ends - starts) // S)
    counts["long_documents"] += int(np.count_nonzero(pieces > 1))
    if packing.long_documents == "fragment":
        first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + S * (np.arange(len(first_piece)) - first_piece)
        ends = np.repeat(ends, pieces)
    spans = np.stack([starts, np.minimum(ends, starts + S)], axis=1)
    packed = int(np.sum(spans[:, 1] - spans[:, 0]))
    counts["packed_tokens"] += packed
    counts["discarded_tokens"] += total - packed
    return spans


def pack_group(paths: Sequence[Path], out: Path, index: Index, packing: Packing) -> dict:
    """Packs the documents of a group of files into `out`, unless it is there from a run that was ended early; counts."""
    names = ("documents", "long_documents", "packed_tokens", "discarded_tokens", "tail_tokens", "pads_in_documents")
    counts, S = dict.fromkeys(names, 0), packing.sequence_length
    # First pass: where the documents are. Memory holds two integers a document, and no tokens.
    spans = [document_spans(path, index, packing, counts) for path in paths]
    file_of = np.repeat(np.arange(len(paths)), [len(s) for s in spans])
    spans = np.concatenate(spans)
    # Which documents share an instance follows from their lengths alone.
    instances = best_fit_decreasing(spans[:, 1] - spans[:, 0], S)
    counts["instances"] = len(instances)
    size = len(instances) * S * index.itemsize
    if not instances or out.exists() and out.stat().st_size == size:
        return counts
    check_room(out.parent, size)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    masked = any(file.mask_hash for file in index.files)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(open(path, "rb")) for path in paths]
        packed = stack.enter_context(replacing(out))
        # Entered last and so complete first: where the token file is there from an earlier run, its mask is too.
        mask = stack.enter_context(replacing(mask_path(out))) if masked else None
        have = [path for path in paths if masked and mask_path(path).is_file()]
        masks = {path: stack.enter_context(open(mask_path(path), "rb")) for path in have}
        # Second pass: copy. The end of an instance that no document fills is padding.
        for documents in instances:
            tokens, learnt, filled = np.full(S, index.pad_id, dtype), np.zeros(S, bool), 0
            for document in documents:
                (start, stop), source = spans[document].tolist(), sources[file_of[document]]
                span = source.fileno(), start * dtype.itemsize, (stop - start) * dtype.itemsize
                content = patiently(lambda span=span: read_at(*span), source.name)
                if len(content) != span[-1]:
                    raise DataError(
                        f"{source.name}: got the end of the file before token {stop}; fix: it was truncated"
                    )
                tokens[filled : filled + stop - start] = np.frombuffer(content, dtype)
                given = masks.get(paths[file_of[document]])
                learnt[filled : filled + stop - start] = given is None or np.frombuffer(
                    read_at(given.fileno(), start, stop - start), bool
                )
                filled += stop - start
            packed.write(tokens)
            if masked:
                mask.write(learnt)
    return counts


def apart(work: Callable, paths: Sequence[Path], out: Path):
    """work(paths, out) in a process of its own, started from any thread: its result, or its exception. (Python's pool of
    processes waits for ever if one of them is killed while another starts.)"""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, work, paths, out))
    try:
        process.start()
        sender.close()
        result, error = receiver.recv()
    except (EOFError, BrokenPipeError) as e:
        what = "its process was killed, perhaps for want of memory; fix: run it again, with fewer --workers"
        raise OSError(errno.ECHILD, what, str(out)) from e
    process.join()
    if error is not None:
        raise error
    return result


def answer(sender, work: Callable, *arguments) -> None:
    end_with_parent(0, 1)
    try:
        sender.send((work(*arguments), None))
    except Exception as e:
        e.add_note(traceback.format_exc())  # it is raised where this is not seen
        sender.send((None, e))


def pack(args: argparse.Namespace) -> dict:
    """Packs the documents of an index's files into token files and an index of their own."""
    source_path, out = local_path(args.index), local_path(args.out)
    source = load_index(source_path)
    root = local_path(args.data_root) if args.data_root else source_path.parent
    length = source.sequence_length if args.sequence_length is None else args.sequence_length
    packing = Packing(length, args.group_size, args.permutation_seed, args.long_documents)
    if source.pad_id is None:
        raise DataError(f"{source_path}: got no padding token, expected one; fix: index again with --pad-id")
    for file in source.files:
        if fault := file_fault(root / file.path, file, source.itemsize):
            raise DataError(fault)
    if length > (tokens := sum(file.bytes for file in source.files) // source.itemsize):
        raise DataError(f"--sequence-length: got {length}, expected at most the {tokens} tokens of {source_path}")
    with sole_writer(out):
        return pack_files(source_path, source, root, packing, out, args.workers)


def pack_files(source_path: Path, source: Index, root: Path, packing: Packing, out: Path, workers: int | None) -> dict:
    # A run that was ended early goes on, if it was the same one: the files it has completed are kept.
    identity = json.dumps({"source": source.fingerprint} | dataclasses.asdict(packing), indent=1).encode()
    note = out / "packing.json"
    filled = out.exists() and any(not path.name.startswith(".") for path in out.iterdir())
    if filled and not (note.is_file() and note.read_bytes() == identity):
        raise DataError(f"{out}: got a folder that holds something else, expected none; fix: another --out")
    with replacing(note) as f:
        f.write(identity)
    # From here until its index is written the folder must not be taken for the whole.
    mark = mark_incomplete(out)

    # A group becomes one file. Groups share nothing, so each is packed in a process of its own.
    groups = packing.groups(source.files)
    outs = [out / f"group-{number:05}.npy" for number in range(len(groups))]
    paths = [[root / file.path for file in group] for group in groups]
    work, run_all = functools.partial(pack_group, index=source, packing=packing), map
    with contextlib.ExitStack() as stack:
        if (workers := min(workers or os.cpu_count(), len(groups))) > 1:  # a thread waits for each worker process
            work = functools.partial(apart, work)
            run_all = stack.enter_context(ThreadPoolExecutor(workers)).map
        counts = list(progress_bar(run_all(work, paths, outs), total=len(groups), desc="pack", unit="group"))
    total = {name: sum(of_group[name] for of_group in counts) for name in counts[0]}
    if not total["documents"]:
        raise DataError(f"{source_path}: got no EOS ({source.eos_id}) in any file, expected one after each document")
    if total["pads_in_documents"]:
        warn(f"{total['pads_in_documents']} tokens are padding ({source.pad_id}) already: data.mask_token takes the loss "
             "of these labels too, where OLMo-core takes only that of what packing adds")  # fmt: skip
    labels = ["+".join(sorted({file.label for file in group})) for group in groups]
    files = [(label, path) for label, path, of_group in zip(labels, outs, counts, strict=True) if of_group["instances"]]
    tokenizer = source.tokenizer
    if (source_path.parent / tokenizer).is_file():
        tokenizer = PurePosixPath(os.path.relpath(source_path.parent / tokenizer, out)).as_posix()
    vocabulary = {"vocab_size": source.vocab_size, "eos_id": source.eos_id, "pad_id": source.pad_id}
    length = packing.sequence_length
    index = build_index(files, out, length, tokenizer=tokenizer, **vocabulary, dtype=source.dtype)
    write_index(index, out / "index.json")
    mark.unlink()
    total["padding_tokens"] = total["instances"] * length - total["packed_tokens"]
    efficiency = total["packed_tokens"] / (total["instances"] * length)
    report = {"index": str(out / "index.json"), "efficiency": round(efficiency, 6)} | total | summarise(index)
    report["olmo_core_fingerprint"] = packed_fingerprint(source, packing)  # there packing is part of the reading
    return report


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", metavar="INDEX", help="of files whose documents end with EOS; only its files are used")
    parser.add_argument("--out", required=True, help="folder for group-00000.npy, ... and index.json")
    parser.add_argument("--sequence-length", type=SEQUENCE_LENGTH, help="default: the index's")
    parser.add_argument("--group-size", type=number(1, 2**31), default=8,
                        help="files packed together (default: %(default)s, as Ai2)")  # fmt: skip
    parser.add_argument("--permutation-seed", type=int, default=123,
                        help="of the files' order before grouping (default: %(default)s, as Ai2)")  # fmt: skip
    parser.add_argument("--long-documents", choices=("truncate", "fragment"), default="truncate",
                        help="discard what is beyond an instance, as Ai2, or make it a document (default: %(default)s)")  # fmt: skip
    parser.add_argument("--workers", type=number(1, 1024),
                        help="processes (default: all cores); the result does not depend on it")  # fmt: skip
    parser.add_argument("--data-root", help=ROOT_HELP)
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("pack.py", lambda: pack(args), args.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # orderly, with what worker processes share
    sys.exit(main())
