"""Token files, index, order, batches and the Grain loader: which tokens does update number k train on?

    token files --index--> index.json --order--> instance ids --loader--> batches

The batch is a pure function. With N instances of S tokens and a global batch of B rows, usable U = (N // B) * B:

    global position  p = instances trained on before this row    (row r of a batch that starts at P has p = P + r)
    epoch            e = p // U + 1                              (the last N mod B positions of an epoch are dropped)
    instance         i = order(e)[p % U]                         (order: a permutation of 0..N-1, from seed and e)

so its tokens depend on index, order, seed, B and position alone: not on hosts, workers, prefetch, history or restarts.
Which labels count depends on the switches of DataConfig besides. With N 10 and B 4: U 8, and p 9 is in epoch 2, place 1.

Token file   headerless little-endian uint32 (uint16 if the index says so); called .npy, as Ai2's are, in name only.
             One document after another, an EOS token after each. No BOS; padding only where tools/pack.py put it.
Label mask   headerless bool, one byte a token of the token file that it lies beside (see `mask_path`): 0 where a token
             is read but not learnt, as a user's words in a conversation. As open-instruct writes them.
Instance     tokens [k*S, (k+1)*S) of one file. It never spans files; the tail of every file is dropped.
Index        JSON, see `Index`. Paths are relative, so data can move; the fingerprint does not depend on where they are.
Batch        see `finish_batch`: tokens, labels, segment_ids, loss_mask, filtered, instance.

Source: OLMo-core 2.5 data/numpy_dataset.py, data/data_loader.py, data/utils.py (instances, order "olmo_core",
fingerprint, repetition filter). Not here: making token files (tools/), mixing by weight, object stores (mount them).
The file imports no sibling, and jax only where Grain does: in `loader` and in the order "feistel".

Dimensions in names: B rows of a batch, S tokens of an instance.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import re
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

INDEX_VERSION = 1
EDGE_BYTES = 4096  # of either end of a file are hashed: enough to notice a swapped file, cheap on 4 TB
NPY_MAGIC = b"\x93NUMPY"
EOS, PAD = "<|endoftext|>", "<|pad|>"  # as dolma2 spells them, too
TURN, TURN_END = "<|im_start|>", "<|im_end|>"  # of a conversation
# Vocabulary size, EOS and PAD of the tokenizers that Ai2's mixes name: one tokenizer under two names.
KNOWN_TOKENIZERS = dict.fromkeys(("allenai/dolma2-tokenizer", "allenai/dolma3-tokenizer"), (100278, 100257, 100277))
CL100K_PATTERN = (  # how dolma2 divides text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
INCOMPLETE = "INCOMPLETE"  # a file of this name: the token files beside and below it are not all there yet
THREADS = 32  # files looked at at once: on a mounted bucket each look is a round trip
# What disks and networks recover from, and the pauses before reading again, in seconds. Everything else fails at once.
TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENETUNREACH}
PAUSES = (0.5, 1, 2, 4, 8, 16)


class DataError(ValueError):
    """Bad input data or data configuration. The command lines print it, a line a fault, and exit with 2."""


@dataclass(frozen=True)
class DataConfig:
    """The science of a run's data: `data:` of configs/<recipe>.yaml. No defaults."""

    index: str
    order: str  # "olmo_core" (Ai2's exact order) | "feistel"; "sequential" is for held-out data
    seed: int
    sequence_length: int
    global_batch: int  # instances
    repetition_filter: bool  # mask the loss of instances that repeat themselves (OLMo 3 32B: yes, 7B: no)
    mask_token: int | None  # no loss where the label is this token
    document_mask: bool  # attention stays inside a document (Ai2: only in stage 3)

    def __post_init__(self):
        if self.order not in ("olmo_core", "feistel", "sequential"):
            raise DataError(f"data.order: got {self.order!r}, expected olmo_core or feistel")
        if self.seed < 0 or self.sequence_length < 2 or self.global_batch < 1:
            got = f"{self.seed}, {self.sequence_length}, {self.global_batch}"
            raise DataError(f"data seed, sequence_length, global_batch: got {got}, expected >= 0, >= 2, >= 1")


# ---- the index


@dataclass(frozen=True)
class TokenFile:
    path: str  # POSIX, relative to the data root
    label: str  # source or domain; held-out losses are grouped by it
    bytes: int
    instances: int  # bytes // itemsize // sequence_length
    edge_hash: str
    mask_hash: str | None = None  # the same of the label mask beside it; None: there is none, every token is learnt


@dataclass(frozen=True)
class Index:
    """The data of a run, in order. As JSON: these fields by name. Wrong contents raise DataError."""

    version: int
    sequence_length: int
    dtype: str  # "uint32" | "uint16"
    tokenizer: str  # a name, or the path of a tokenizer.json relative to the index
    vocab_size: int  # ids are 0..vocab_size-1
    eos_id: int
    pad_id: int | None
    files: tuple[TokenFile, ...]
    fingerprint: str

    def __post_init__(self):
        # Beyond what the dtype holds ids would wrap round to others, without a sign.
        if self.dtype not in ("uint32", "uint16") or self.sequence_length < 2:
            got = f"{self.dtype!r}, {self.sequence_length}"
            raise DataError(f"dtype, sequence_length: got {got}, expected uint32 or uint16, at least 2")
        if self.vocab_size > np.iinfo(self.dtype).max + 1:
            got = f"got {self.dtype} with a vocabulary of {self.vocab_size}"
            raise DataError(f"dtype: {got}; ids would wrap; fix: use uint32")
        for name, token in (("eos_id", self.eos_id), ("pad_id", self.pad_id)):
            if token is not None and not 0 <= token < self.vocab_size:
                raise DataError(f"{name}: got {token}, expected an id below the vocabulary size {self.vocab_size}")
        if len({f.path for f in self.files}) < len(self.files):
            raise DataError(f"files: got {len(self.files)} entries, expected every path once")
        for f in self.files:
            if f.path.startswith("/") or ".." in f.path.split("/"):
                raise DataError(f"{f.path}: expected a path below the data root")
            if f.instances != f.bytes // self.itemsize // self.sequence_length:
                raise DataError(f"{f.path}: {f.instances} instances do not follow from {f.bytes} bytes")
        if self.instances == 0:
            got = f"{sum(f.bytes for f in self.files) // self.itemsize} tokens in {len(self.files)} files"
            expected = f"one file of at least {self.sequence_length} tokens"
            raise DataError(f"no instances: got {got}, expected {expected}; fix: check the paths, or the length")
        # An index that was edited by hand is another corpus under the old name.
        expected = fingerprint(self.sequence_length, self.dtype, self.tokenizer, self.vocab_size, self.files)
        if self.fingerprint != expected:
            raise DataError(f"fingerprint: got {self.fingerprint}, the contents give {expected}; fix: index again")

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def instances(self) -> int:
        return sum(f.instances for f in self.files)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [files + 1]: global ids of file f are offsets[f] .. offsets[f+1] - 1."""
        return np.cumsum([0] + [f.instances for f in self.files], dtype=np.int64)


def fingerprint(sequence_length: int, dtype: str, tokenizer: str, vocab_size: int, files: Sequence[TokenFile]) -> str:
    """sha256 over what decides which tokens an instance holds: names, sizes and the first and last 4 KiB of the files. It
    does not depend on the folder that they lie in. EOS and padding stand beside it in a checkpoint's meta."""
    rows = [[f.label, f.path, f.bytes, f.edge_hash, *([f.mask_hash] if f.mask_hash else [])] for f in files]
    content = json.dumps([sequence_length, dtype, tokenizer, vocab_size, rows], separators=(",", ":"))
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def olmo_core_fingerprint(index: Index, dataset: str = "NumpyFSLDataset", fields: dict | None = None, files=()) -> str:
    """OLMo-core's fingerprint of the same data (numpy_dataset.py:fingerprint, v2.0): file names and sizes, no contents.

    max_target_sequence_length is the sequence length, as in the official scripts from 8192 tokens on. tools/pack.py names
    the dataset that packs while it reads, with fields and files of its own."""
    content = {"vocab_size": index.vocab_size, "pad_token_id": index.pad_id, "eos_token_id": index.eos_id}
    content["dtype"] = f"<class 'numpy.{index.dtype}'>"
    content |= fields or {"max_target_sequence_length": index.sequence_length, "bos_token_id": None}
    text = f"class={dataset}" + "".join(f"{field}={value}," for field, value in content.items())
    text += "".join(f"path={PurePosixPath(f.path).name},size={f.bytes}," for f in files or index.files)
    return hashlib.sha256(text.encode()).hexdigest()


def read_edges(path: str | os.PathLike) -> tuple[int, bytes, bytes]:
    """Size, first and last 4 KiB of a file."""

    def read() -> tuple[int, bytes, bytes]:
        with open(path, "rb", buffering=0) as f:
            fd, size = f.fileno(), os.fstat(f.fileno()).st_size
            return size, read_at(fd, 0, EDGE_BYTES), read_at(fd, max(0, size - EDGE_BYTES), EDGE_BYTES)

    return patiently(read, path)


def survey(where: str | Path, itemsize: int, read_edges: Callable = read_edges) -> tuple[str | None, int, str]:
    """Why a file is not headerless tokens (None if it is), its size, and the sha256 of its first and last 4 KiB."""
    try:
        size, head, tail = read_edges(where)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{where}: got no such file (missing), expected tokens; fix: fetch it, or check the path", 0, ""
    fault = None
    advice = f"python tools/headerless.py {shlex.quote(str(where))}" + (" --to uint16" if itemsize == 2 else "")
    if size == 0:
        fault = "an empty file, expected tokens; fix: fetch it again, or remove it from the list"
    elif head.startswith(NPY_MAGIC):
        fault = f"a real .npy header, expected headerless tokens; fix: {advice}"
    elif size % itemsize:
        fault = f"{size} bytes, expected a multiple of {itemsize} (odd); fix: truncated, or another dtype"
    elif size % (2 * itemsize) == 0 and all(every_second_is_0(edge, itemsize) for edge in (head, tail)):
        fault = f"0 as every second id, as int{16 * itemsize} ids look, expected uint{8 * itemsize}"
        fault += f"; fix: {advice} --from int{16 * itemsize}"
    return fault and f"{where}: got {fault}", size, hashlib.sha256(head + tail).hexdigest()


def mask_path(path: Path | PurePosixPath):
    """Where the label mask of a token file lies: token_ids_part_0000.npy -> labels_mask_part_0000.npy beside it."""
    return path.with_name("labels_mask_" + path.name.removeprefix("token_ids_"))


def survey_mask(path: Path, tokens: int) -> tuple[str | None, str]:
    """Why a label mask is none of so many tokens (None if it is), and the sha256 of its first and last 4 KiB."""
    size, head, tail = read_edges(path)
    fault = None
    if size != tokens:
        fault = f"{size} bytes, expected one for each of {tokens} tokens"
    elif not set(head + tail) <= {0, 1}:
        fault = f"a byte {max(head + tail)}, expected 0 or 1"
    return fault and f"{path}: got {fault}; fix: write it again", hashlib.sha256(head + tail).hexdigest()


def every_second_is_0(content: bytes, itemsize: int) -> bool:
    ids = np.frombuffer(content[: len(content) // itemsize * itemsize], f"<u{itemsize}")
    return len(ids) >= 64 and bool(ids[::2].any()) and not ids[1::2].any()


def build_index(
    files: Iterable[tuple[str, str | os.PathLike]],
    root: str | os.PathLike,
    sequence_length: int,
    *,
    tokenizer: str,
    vocab_size: int,
    eos_id: int,
    pad_id: int | None = None,
    dtype: str = "uint32",
    names: Sequence[str] | None = None,
    read_edges: Callable | None = None,
) -> Index:
    """An index of (label, path) pairs, in the order given. `root` is the folder that its paths will be relative to.
    For files on a server, `names` are those paths and `read_edges` reads the files. One error names all bad files."""
    itemsize, files = np.dtype(dtype).itemsize, list(files)
    names = [relative_name(path, root) for _, path in files] if names is None else names
    # All files are looked at before the first fault is raised: a list of 12,000 is mended once, not file by file.

    def look(file: tuple) -> tuple[str | None, int, str, str | None]:
        if read_edges is not None:  # on a server, where no mask is looked for
            return *survey(file[1], itemsize, read_edges), None
        fault, size, edges = survey(file[1], itemsize)
        mask, of_mask = mask_path(local_path(file[1])), None
        if not fault and mask.is_file():  # what lies beside a token file belongs to it
            fault, of_mask = survey_mask(mask, size // itemsize)
        return fault, size, edges, of_mask

    surveyed = list(in_parallel(look, files, "index"))
    if faults := [fault for fault, *_ in surveyed if fault]:
        raise DataError("\n".join(faults))
    entries = tuple(
        TokenFile(name, label, size, size // itemsize // sequence_length, edges, mask)
        for (label, _), name, (_, size, edges, mask) in zip(files, names, surveyed, strict=True)
    )
    identity = (sequence_length, dtype, tokenizer, vocab_size)
    return Index(INDEX_VERSION, *identity, eos_id, pad_id, entries, fingerprint(*identity, entries))


def relative_name(path: str | os.PathLike, root: str | os.PathLike) -> str:
    """Where a file is below the root. Links keep their names, so that data may lie on several disks."""
    for absolute in (os.path.abspath, os.path.realpath):
        file, folder = PurePosixPath(absolute(local_path(path))), absolute(local_path(root))
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    raise DataError(f"{path}: got a file outside {root}, expected one below it; fix: give --root")


def write_index(index: Index, path: Path) -> None:
    with replacing(local_path(path)) as f:
        content = dataclasses.asdict(index)
        for file in content["files"]:  # an index without masks is the file that it was before there were any
            if file["mask_hash"] is None:
                del file["mask_hash"]
        f.write(json.dumps(content, indent=1).encode() + b"\n")


def find_index(path: str | os.PathLike, data_root: str | os.PathLike | None = None) -> Path:
    """The index that a config names: the path as it is, else below the data root, else beside this file. So a config
    works from every folder. A place other than the first is said."""
    places = [given := local_path(path)]
    if not given.is_absolute():
        if data_root is not None:
            places += [local_path(data_root) / given, local_path(data_root) / given.name]
        places.append(Path(__file__).resolve().parent / given)
    if (existing := next((place for place in places if place.is_file()), None)) is None:
        looked = ", ".join(dict.fromkeys(str(place.absolute()) for place in places))
        fix = f"give another path or --data-root, or python data.py index ... --out {path}"
        raise DataError(f"{path}: got no such file, expected an index; looked for {looked}; fix: {fix}")
    if existing.resolve() != given.resolve():
        print(f"data.py: {path} is taken from {existing}", file=sys.stderr)
    return existing


def load_index(path: str | os.PathLike) -> Index:
    """Reads and checks an index; touches no token file."""
    path = local_path(path)
    if not path.is_file():
        raise DataError(f"{path}: got no such file, expected an index; fix: python data.py index ... --out {path}")
    try:
        fields = json.loads(path.read_bytes())
        if fields["version"] != INDEX_VERSION:
            raise DataError(f"index version: got {fields['version']!r}, expected {INDEX_VERSION}; fix: index again")
        return Index(**fields | {"files": tuple(TokenFile(**f) for f in fields["files"])})
    except DataError as e:
        raise DataError(f"{path}: {e}") from e
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise DataError(f"{path}: not an index ({type(e).__name__}: {e}); fix: index again") from e


def file_fault(path: Path, file: TokenFile, itemsize: int, read: bool = True) -> str | None:
    """How a token file differs from its index entry, or None. read=False looks at its size only."""

    def look() -> int | None:  # not is_file, which takes an error that may pass for a missing file
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    if (size := patiently(look, path)) is None:
        return f"{path}: got no such file (missing), expected {file.bytes} bytes; fix: fetch it, or give --data-root"
    if size != file.bytes:
        kind = "empty" if size == 0 else "odd" if size % itemsize else "short" if size < file.bytes else "long"
        got = f"got {size} bytes, the index says {file.bytes} ({kind})"
        return f"{path}: {got}; fix: fetch or copy the file again, or index again"
    fault, _, edges = survey(path, itemsize) if read else (None, size, file.edge_hash)
    if edges != file.edge_hash:
        return f"{path}: got other first or last 4 KiB than the index says; fix: copy the file again, or index again"
    return fault or (mask_fault(mask_path(path), file, size // itemsize, read) if file.mask_hash else None)


def mask_fault(mask: Path, file: TokenFile, tokens: int, read: bool) -> str | None:
    """How the label mask beside a token file differs from the index entry, or None."""
    try:
        if not read:
            size = patiently(mask.stat, mask).st_size
            return None if size == tokens else f"{mask}: got {size} bytes, expected one for each of {tokens} tokens"
        fault, edges = survey_mask(mask, tokens)
    except (FileNotFoundError, NotADirectoryError):
        return f"{mask}: got no such file (missing), expected a label mask; fix: fetch it"
    if not fault and edges != file.mask_hash:
        return f"{mask}: got other first or last 4 KiB than the index says; fix: copy it again, or index again"
    return fault


# ---- the order


def order_path(order_dir: str | os.PathLike, n: int, seed: int, epoch: int) -> Path:
    """OLMo-core's own name and format (data_loader.py:_global_indices_file): its files can be used here and vice versa."""
    return local_path(order_dir) / f"global_indices_dataset_size{n}_epoch{epoch}_seed{seed}_v1.npy"


def epoch_order(kind: str, n: int, seed: int, epoch: int, order_dir: str | os.PathLike | None):
    """The permutation of 0..n-1 of an epoch (from 1), to be indexed with an array of positions.

    A function of (kind, n, seed, epoch), never of what was read before. With order_dir, "olmo_core" is kept there and
    memory-mapped, so that all processes of a machine share it; with None it is held in memory."""
    if not 0 < n < 2**32 - 1:
        raise DataError(f"instances: got {n}, expected 1 .. 2^32 - 2")
    if kind == "sequential":
        return np.arange(n, dtype=np.uint32)
    if kind == "feistel":
        return FeistelOrder(n, seed, epoch)
    assert kind == "olmo_core", kind
    if order_dir is None:
        return olmo_core_permutation(n, seed, epoch)
    path = order_path(order_dir, n, seed, epoch)
    if not path.exists():
        # One process of a machine builds the file and the others wait for its lock, which its death gives back. Where
        # the file system has no locks each builds it. Either way it gets its name when it is whole: all build the same.
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(lock := path.with_name(f".{path.name}.lock"), "w") as f, contextlib.ExitStack() as at_end:
            with contextlib.suppress(OSError):
                fcntl.flock(f, fcntl.LOCK_EX)
            at_end.callback(lock.unlink, missing_ok=True)
            if not path.exists():
                instances = olmo_core_permutation(n, seed, epoch)
                with replacing(path) as order:
                    order.write(instances)  # tofile would not say why it fails
    if (size := path.stat().st_size) != 4 * n:
        raise DataError(f"{path}: got {size} bytes, expected {4 * n}; fix: delete it, it will be built again")
    return np.memmap(path, dtype="<u4", mode="r")


def olmo_core_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """uint32 [n]: OLMo-core data/data_loader.py:_build_global_indices, chunk size 1. About a minute and 2.7 GiB for the
    724 million instances of stage 1."""
    long = n >= 10_000_000  # more than a second of shuffling: one call of numpy, which tells nothing
    if long:
        print(f"data.py: building the order of {n:,} instances, about a second each 10 million", file=sys.stderr)
    instances = np.arange(n, dtype="<u4")
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(instances)
    if long:
        print("data.py: the order is built", file=sys.stderr)
    return instances


class FeistelOrder:
    """A permutation computed entry by entry, without memory. Grain's index shuffle takes one number a call: 7 us each, so
    4 ms for the 512 rows of a batch, and it has no form that takes an array."""

    def __init__(self, n: int, seed: int, epoch: int):
        import grain  # imports jax: 0.8 s that indexing need not spend

        mixed = np.random.SeedSequence([seed, epoch]).generate_state(1)[0]  # (1, 2) and (2, 1) are not neighbours
        self._instances = grain.MapDataset.range(n).shuffle(seed=int(mixed))

    def __getitem__(self, positions):
        positions, n = np.asarray(positions), len(self._instances)
        if positions.size and not 0 <= positions.min() <= positions.max() < n:
            raise IndexError(f"position outside 0..{n - 1}")  # Grain would go on into another permutation
        return np.array([self._instances[int(p)] for p in positions.flat], np.int64).reshape(positions.shape)


# ---- from tokens to a batch


def finish_batch(
    tokens_BS: np.ndarray, instance_B: np.ndarray, index: Index, config: DataConfig, learnt_BS: np.ndarray | None = None
) -> dict:
    """What a step trains on, from checked token ids:

    tokens       int32 [B, S]
    labels       int32 [B, S]   the next token; 0 at the last position, which has none
    segment_ids  int32 [B, S]   0, or with document_mask the number of EOS tokens before: an EOS ends its own document
    loss_mask    bool  [B, S]   False at the last position, where the label is mask_token or not learnt, and all over a
                                filtered row
    filtered     bool  [B]      the row repeats itself; it stays in the batch, so that no later batch moves
    instance     int64 [B]      global instance ids

    As in OLMo-core the label at an EOS is the first token of the next document, with and without document_mask."""
    tokens = tokens_BS.astype(np.int32)
    # The last position has no label in the row. Its loss is masked, so that every row has S tokens.
    labels, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    labels[:, :-1] = tokens[:, 1:]
    # A row that repeats itself loses its loss and keeps its place: dropping it would move all later batches.
    filtered = repetition_filtered(tokens) if config.repetition_filter else np.zeros(len(tokens), bool)
    loss_mask = np.repeat(~filtered[:, None], tokens.shape[1], axis=1)
    loss_mask[:, -1] = False
    if config.mask_token is not None:
        loss_mask &= labels != config.mask_token
    if learnt_BS is not None:  # a mask is about tokens, and position i has token i + 1 as its label
        loss_mask[:, :-1] &= learnt_BS[:, 1:]
    # An EOS belongs to the document that it ends, so the count begins behind it.
    if config.document_mask:
        is_eos = tokens == index.eos_id
        segment_ids = np.cumsum(is_eos, axis=1, dtype=np.int32) - is_eos
    batch = {"tokens": tokens, "labels": labels, "segment_ids": segment_ids}
    return batch | {"loss_mask": loss_mask, "filtered": filtered, "instance": instance_B}


def repetition_filtered(tokens: np.ndarray, max_period: int = 13, min_times: int = 32) -> np.ndarray:
    """[..., S] -> bool [...]: does a pattern of 1..max_period tokens stand min_times in a row somewhere?

    A match of period p is tokens[i] == tokens[i-p]. m matches in a row span m + p tokens: (m + p) // p times the pattern.
    So the answer is yes if (min_times - 1) * p matches follow one another, for some p.

    Source: OLMo-core data/utils.py:find_periodic_sequences. It looks for whole rows of p tokens that match, then at
    the rows around them. Any 2p - 1 matches cover a whole row, so with min_times >= 3 both rules decide alike."""
    assert min_times >= 3
    rows = tokens.reshape(-1, tokens.shape[-1])
    filtered = np.zeros(len(rows), bool)
    for period in range(1, min(max_period, rows.shape[1] // min_times) + 1):
        need = (min_times - 1) * period
        # A screen, because text rarely repeats itself and comparing all positions is slow. Only every (need // 2)-th
        # position is compared. A run of `need` matches covers two neighbours of that grid. So a row without two
        # neighbours that match holds no such run, and the exact count below is for the few other rows.
        grid = rows[:, period :: need // 2] == rows[:, : -period : need // 2]
        suspects = (grid[:, 1:] & grid[:, :-1]).any(-1) & ~filtered
        for i in np.flatnonzero(suspects):
            mismatches = np.flatnonzero(rows[i, period:] != rows[i, :-period])
            ends = np.concatenate([[-1], mismatches, [rows.shape[1] - period]])
            filtered[i] = np.diff(ends).max() > need  # two mismatches at distance d have d - 1 matches between them
    return filtered.reshape(tokens.shape[:-1])


@dataclass(eq=False)
class BatchSource:
    """Batches by global position. It can be pickled, because Grain's workers get a copy. No file stays open."""

    index: Index
    path: Path  # of the index
    config: DataConfig
    root: Path  # folder that the index's paths start in
    order_dir: str | os.PathLike | None
    rows: np.ndarray  # this host's rows of the global batch
    states: dict[str, tuple[int, int]]  # of each path, masks too, when the run opened it: size, modified at (ns)

    def __post_init__(self):
        self.instances = self.index.instances
        self.batches_per_epoch = self.instances // self.config.global_batch
        self.usable = self.batches_per_epoch * self.config.global_batch
        self._offsets = self.index.offsets
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._orders = {}  # epoch -> permutation, the latest only
        self._checked_files = set()
        self.masked = any(f.mask_hash for f in self.index.files)

    def __getstate__(self):
        return self.__dict__ | {"_orders": {}}  # pickling a memmap would send the whole permutation

    def batch_at(self, position: int) -> dict:
        """This host's rows of the batch that starts at `position`, see `finish_batch`."""
        instances = self.instances_at(position)
        tokens = np.stack([self.read(i) for i in instances])
        learnt = np.stack([self.read_mask(i) for i in instances]) if self.masked else None
        return finish_batch(tokens, instances, self.index, self.config, learnt)

    def instances_at(self, position: int) -> np.ndarray:
        """int64 [rows]: the global instance ids in this host's rows of the batch that starts at `position`."""
        assert position >= 0
        # DIVERGENCE 8: after a change of the batch size the position stays where it was, in instances. OLMo-core counts
        # batches of the new size and rounds down, which trains up to one batch twice. U follows B, so that only in the
        # first epoch the place stays, too: later a change is refused (checkpoint.py:check_same_data).
        # The position alone decides: a restart in epoch 3 needs nothing of what epochs 1 and 2 have read.
        positions = position + self.rows
        instances = np.empty(len(positions), np.int64)
        epochs = positions // self.usable + 1
        for epoch in np.unique(epochs):  # two only in the batch across an epoch's end, after a change of batch size
            if (order := self._orders.get(epoch)) is None:
                config = self.config
                order = epoch_order(config.order, self.instances, config.seed, int(epoch), self.order_dir)
                self._orders = {epoch: order}
            instances[epochs == epoch] = order[positions[epochs == epoch] % self.usable]
        if (largest := instances.max()) >= self.instances:
            raise DataError(f"order in {self.order_dir}: got instance {largest} of {self.instances}; fix: delete it")
        return instances

    def locate(self, instance: int) -> tuple[TokenFile, int]:
        """The file that holds an instance, and the token offset in it."""
        number = int(np.searchsorted(self._offsets, instance, side="right")) - 1  # skips files without instances
        return self.index.files[number], int(instance - self._offsets[number]) * self.index.sequence_length

    def read(self, instance: int) -> np.ndarray:
        """uint [S]: the tokens of an instance, checked."""
        file, offset = self.locate(instance)
        path, S, itemsize = self.root / file.path, self.index.sequence_length, self._dtype.itemsize
        content = self._bytes(file, file.path, offset * itemsize, S * itemsize)
        if len(content) != S * itemsize:
            got = f"{len(content) // itemsize} tokens at offset {offset}"
            raise DataError(f"{path}: got {got}, expected {S}; fix: it was truncated")
        tokens = np.frombuffer(content, self._dtype)
        if tokens.max() >= self.index.vocab_size:  # unsigned still: 4294967295 must not become -1
            bad = int(np.argmax(tokens >= self.index.vocab_size))
            raise DataError(f"{path}: token {offset + bad}: got id {tokens[bad]}, expected below the vocabulary size "
                            f"{self.index.vocab_size}")  # fmt: skip
        return tokens

    def read_mask(self, instance: int) -> np.ndarray:
        """bool [S]: which tokens of an instance are learnt, checked; all of them where a file has no mask."""
        (file, offset), S = self.locate(instance), self.index.sequence_length
        if file.mask_hash is None:
            return np.ones(S, bool)
        name = str(mask_path(PurePosixPath(file.path)))
        content = np.frombuffer(self._bytes(file, name, offset, S), np.uint8)
        if len(content) != S or content.max() > 1:
            got = f"{len(content)} bytes, the largest {content.max(initial=0)}"
            raise DataError(
                f"{self.root / name}: byte {offset}: got {got}, expected {S} of 0 and 1; fix: write it again"
            )
        return content.astype(bool)

    def _bytes(self, file: TokenFile, name: str, start: int, count: int) -> bytes:
        """Of a token file, or of its mask. Both are compared with the index at the first read, and again whenever they have
        changed since."""
        path = self.root / name

        # Plain reads. Under a memory map a file that is truncated kills the process with SIGBUS, and a thousand maps
        # hold a thousand file descriptors.
        def read() -> tuple[bytes, tuple[int, int]]:
            with open(path, "rb", buffering=0) as f:
                content, status = read_at(f.fileno(), start, count), os.fstat(f.fileno())
                return content, (status.st_size, status.st_mtime_ns)

        content, state = patiently(read, path)
        if name not in self._checked_files or state != self.states[name]:
            self._check(file, name, state)
        return content

    def _check(self, file: TokenFile, name: str, state: tuple[int, int]) -> None:
        """Compares a file with the index, at its first read and when it is not what it was when the run began. A time of
        modification alone, which a copy of the same file changes, ends no run."""
        if fault := file_fault(self.root / file.path, file, self._dtype.itemsize):
            raise DataError(fault)
        if state != self.states[name]:
            path, kept = self.root / name, "size and first and last 4 KiB are as indexed"
            warn(f"{path}: was written to since this run began; {kept}: going on")
            self.states[name] = state
        self._checked_files.add(name)


def open_data(
    config: DataConfig,
    data_root: str | os.PathLike | None = None,
    order_dir: str | os.PathLike | None = None,
    rows: Sequence[int] | None = None,
    shuffle: bool = True,
    held_out: bool = False,
) -> BatchSource:
    """Checks index, config and the size of every file. `rows`: this host's rows of the global batch (default: all).

    data_root: where the index's paths start (default: the folder of the index). shuffle=False: instances in order.
    held_out: the index may hold less than one batch."""
    if shuffle and config.order == "sequential":
        raise DataError("data.order: got sequential, expected olmo_core or feistel; fix: shuffle=False asks for it")
    config = config if shuffle else dataclasses.replace(config, order="sequential")
    path = find_index(config.index, data_root)
    index = load_index(path)
    if config.sequence_length != index.sequence_length:
        got = f"got {config.sequence_length} in the config, {index.sequence_length} in {path}"
        raise DataError(f"sequence_length: {got}; fix: build an index for this length")
    if config.mask_token is not None and not 0 <= config.mask_token < index.vocab_size:
        raise DataError(f"mask_token: got {config.mask_token}, expected an id below {index.vocab_size}")
    if not held_out and index.instances < config.global_batch:
        got = f"{index.instances} instances of {config.sequence_length} tokens"
        raise DataError(f"{config.index}: got {got}, expected at least one global batch of {config.global_batch}")
    rows = np.arange(config.global_batch) if rows is None else np.asarray(rows, np.int64)
    assert rows.size and 0 <= rows.min() <= rows.max() < config.global_batch
    root = path.parent if data_root is None else local_path(data_root)

    # Sizes only: 4 TB in thousands of files start in seconds. Contents are compared at the first read of each file.
    def look(file: TokenFile) -> tuple[str | None, dict]:
        names = [file.path, *([str(mask_path(PurePosixPath(file.path)))] if file.mask_hash else [])]
        if fault := file_fault(root / file.path, file, index.itemsize, read=False):
            return fault, {}
        there = {name: patiently((root / name).stat, root / name) for name in names}
        return None, {name: (status.st_size, status.st_mtime_ns) for name, status in there.items()}

    looks = list(in_parallel(look, index.files, "open"))
    if faults := [fault for fault, _ in looks if fault]:
        more = f"; {len(faults) - 1} more files are bad: python data.py verify lists them" if len(faults) > 1 else ""
        raise DataError(faults[0] + more)
    states = {name: state for _, of_file in looks for name, state in of_file.items()}
    return BatchSource(index, path, config, root, order_dir, rows, states)


# ---- the loader


def loader(source: BatchSource, start: int, stop: int, workers: int = 0, prefetch: int = 2):
    """Iterator over source.batch_at(p) for p = start, start + global_batch, ... < stop. Call its close() when done.

    A record is a whole batch, so the stream does not depend on `workers`. With 0 one thread reads up to `prefetch`
    batches ahead; otherwise each worker process does, and sends them through a pipe. A worker takes seconds to start,
    and imports the main script and Grain (so jax, but no device)."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's multiprocessing asks for flags that only absl.app.run would parse
    positions = range(start, stop, source.config.global_batch)
    if positions:
        source.instances_at(start)  # builds the order once, here, rather than in every worker
    # Grain knows positions and nothing else: it shuffles nothing, keeps no state, and a restart begins at any of them.
    batches = grain.MapDataset.range(positions.start, positions.stop, positions.step).map(source.batch_at)
    if workers == 0:
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=max(1, prefetch))))
    batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Not in shared memory: what is on its way when a process ends would stay in /dev/shm.
    through_pipe = grain.experimental.DatasetOptions(min_shm_size=2**62)
    batches = grain.experimental.WithOptionsIterDataset(batches, through_pipe)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=max(1, prefetch))
    return with_workers(iter(batches.mp_prefetch(options, worker_init_fn=end_with_parent)))


TO_THE_GROUP = (signal.SIGINT, signal.SIGTERM)  # what a terminal or a scheduler sends to a process and its workers


def with_workers(batches):
    """The batches. Signals are held back from a worker until `end_with_parent` has said what they mean to it. A worker
    that a signal ends while it starts makes the run fail, or makes Python wait for it for ever."""
    with contextlib.closing(batches):
        multiprocessing.resource_tracker.ensure_running()  # where it starts, it lets the signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_THE_GROUP)
        try:
            first = next(batches, None)  # starts the threads that start the workers
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if first is not None:
            yield first
            yield from batches


def end_with_parent(worker: int, workers: int) -> None:
    """Makes a worker process end within a second of its parent, also after kill -9. (Grain's lived on for 25 s.) It does
    not end before its parent: after a signal to the whole group the parent has time to finish its step and save."""
    parent = multiprocessing.parent_process().pid

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(10))  # SIGALRM, which nothing handles, ends the worker
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_THE_GROUP)

    # A process whose parent has died gets another one. Nothing else tells it of kill -9.
    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- files


def is_url(path: str | os.PathLike) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def local_path(path: str | os.PathLike) -> Path:
    """A pathlib path, with ~ as the home folder, which a shell leaves alone in --out=~/x. Refuses URLs, which pathlib
    would turn into a folder called "gs:"."""
    if is_url(path):
        raise DataError(f"{path}: got a URL, expected a local path; fix: mount it, e.g. with gcsfuse")
    if (expanded := os.path.expanduser(path)).startswith("~"):
        raise DataError(f"{path}: got the home folder of nobody; fix: ./{path}, if a name here begins with ~")
    return Path(expanded)


def os_error(e: OSError) -> str:
    """Which file failed and why, for a person: Python says "[Errno 28] ..." first and the file last."""
    name = e.filename if e.filename2 is None else f"{e.filename} -> {e.filename2}"  # the second: of a copy or a rename
    return f"{name}: {e.strerror}" if e.filename is not None and e.strerror else str(e)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator:
    """A file to write that gets its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError the name of the file that is written: a full disk tells none."""
    try:
        yield
    except OSError as e:
        if e.filename is not None:
            raise
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


def warn(message: str) -> None:
    print(f"data.py: WARNING: {message}", file=sys.stderr)


def progress_bar(items: Iterable | None = None, **how) -> tqdm:
    """tqdm; where standard error is no terminal a line every ten seconds, the first of them after five."""
    if not sys.stderr.isatty():
        text = "{desc}: {n_fmt} of {total_fmt} {unit}\n"
        how |= {"mininterval": 10, "delay": 5, "leave": False, "bar_format": text, "dynamic_ncols": False}
    return tqdm(items, **how)


def in_parallel(work: Callable, items: Sequence, what: str) -> Iterator:
    """work(item) for all items in threads, in the order of the items, with progress. At most THREADS files are open."""
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(work, items)
        yield from progress_bar(results, desc=what, total=len(items), unit="file", leave=False)


def patiently(read: Callable, name: str | os.PathLike):
    """read(), and again after each of PAUSES while it fails in a way that may pass. Errors carry the file's name."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except OSError as e:
            text = e.strerror or str(e)
            if e.errno not in TRANSIENT and not isinstance(e, TimeoutError):
                raise OSError(e.errno, text, str(name)) from e
            if pause is None:
                raise OSError(e.errno, f"{text}, still after {sum(PAUSES):g} s", str(name)) from e
            warn(f"{name}: {text}; reading it again in {pause:g} s")
        time.sleep(pause)


def read_at(fd: int, offset: int, count: int) -> bytes:
    """`count` bytes of an open file, fewer only at its end. (np.fromfile takes an I/O error for the end of the file.)"""
    content = os.pread(fd, count, offset)
    while len(content) < count and (more := os.pread(fd, count - len(content), offset + len(content))):
        content += more
    return content


def read_tokens(path: Path, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """A token file from its start, `count` tokens at a time."""
    with open(path, "rb", buffering=0) as f:
        for offset in itertools.count(0, count * dtype.itemsize):
            content = patiently(lambda at=offset: read_at(f.fileno(), at, count * dtype.itemsize), path)
            if not content:
                return
            yield np.frombuffer(content, dtype)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Truncation, padding and dropout, which the file may ask for, are switched off:
    every text gets all of its tokens, and always the same ones. No other place loads a tokenizer."""
    path = local_path(path)
    if not path.is_file():
        raise DataError(f"{path}: got no such file, expected a tokenizer.json; fix: check --tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # what tokenizers raises is a bare Exception
        raise DataError(f"{path}: not a tokenizer.json ({e})") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for chance in ("dropout", "alpha", "nbest_size"):  # of BPE; of Unigram, which draws among segmentations
        if getattr(tokenizer.model, chance, None) is not None:
            setattr(tokenizer.model, chance, None)
    return tokenizer


# ---- verbs: index | verify | show


def make_index(args: argparse.Namespace) -> dict:
    out = local_path(args.out)
    if out.is_dir():
        raise DataError(f"--out {out}: got a folder, expected a file to write; fix: --out {out}/NAME.json")
    files = labelled_files(args.inputs)
    if args.label:
        files = [(args.label, path) for _, path in files]
    ids = tokenizer_ids(args.tokenizer, out, args.vocab_size, args.eos_id, args.pad_id)
    index = build_index(files, args.root or out.parent, args.sequence_length, **ids, dtype=args.dtype)
    write_index(index, out)
    return {"index": str(out)} | summarise(index)


def tokenizer_ids(name: str, out: Path, vocab_size: int | None, eos_id: int | None, pad_id: int | None) -> dict:
    """What an index at `out` says of its tokenizer: a tokenizer.json, a known name, or the ids that were given."""
    given = (vocab_size, eos_id, pad_id)
    if (path := local_path(name)).is_file() or path.suffix == ".json":
        tokenizer = load_tokenizer(path)
        name = PurePosixPath(os.path.relpath(path.resolve(), out.resolve().parent)).as_posix()
        own = (max(tokenizer.get_vocab().values()) + 1, tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD))
    else:
        own = KNOWN_TOKENIZERS.get(name, (None, None, None))
    vocab_size, eos_id, pad_id = (b if a is None else a for a, b in zip(given, own, strict=True))
    if vocab_size is None or eos_id is None:
        raise DataError(f"got --vocab-size {vocab_size}, --eos-id {eos_id}; fix: give both, or a tokenizer.json")
    return {"tokenizer": name, "vocab_size": vocab_size, "eos_id": eos_id, "pad_id": pad_id}


def labelled_files(inputs: Iterable[str]) -> list[tuple[str, Path]]:
    """`label=path` or `path`, a token file or a folder -> (label, file). Default label: the name of the file's folder."""
    files, taken = [], {}
    for given in inputs:
        label, equals, path = given.partition("=")
        if not equals or "/" in label:
            label, path = "", given
        for file in token_files(local_path(path)):
            if (first := taken.setdefault(os.path.realpath(file), file)) is not file:
                raise DataError(f"{file}: got the same file as {first}, expected every file once; fix: name it once")
            files.append((label or Path(os.path.abspath(file)).parent.name, file))
    return files


def token_files(given: Path) -> list[Path]:
    """A token file, or those of a folder and below, by name; links are followed, hidden files are not tokens."""
    if not given.exists():
        raise DataError(f"{given}: got no such file or folder; fix: check the path")

    def fail(e: OSError):
        raise e  # os.walk would pass over a folder that it may not read

    paths, visited = [] if given.is_dir() else [given], set()
    for folder, folders, names in os.walk(given, followlinks=True, onerror=fail) if given.is_dir() else ():
        if (real := os.path.realpath(folder)) in visited:  # links that go round in circles
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, name) for name in names]
    for mark in [path for path in paths if path.name == INCOMPLETE] or [given.parent / INCOMPLETE]:
        if mark.exists():
            got = f"{mark.parent}: got a folder that is being written, or whose writer was ended"
            raise DataError(f"{got}; fix: run that to its end (text_to_tokens.py: with --overwrite)")
    hidden = (".", "labels_mask_")  # masks are found beside their token files
    tokens = (p for p in paths if p.suffix.lower() == ".npy" and not p.name.startswith(hidden) and p.is_file())
    files = sorted({os.path.realpath(p): p for p in sorted(tokens, reverse=True)}.values())  # a link and its file: once
    if not files:
        raise DataError(f"{given}: got no token file, expected some that end in .npy")
    others = [path for path in set(paths) - set(files) if not path.name.startswith("labels_mask_")]
    if others := sorted(str(path.relative_to(given)) for path in others):
        counts = f"{len(files)} files taken, {len(others)} passed over ({', '.join(others[:3])}, ...)"
        print(f"data.py: {given}: {counts.replace(', ...', '') if len(others) < 4 else counts}", file=sys.stderr)
    return files


def summarise(index: Index) -> dict:
    tokens = sum(f.bytes for f in index.files) // index.itemsize
    return {
        "files": len(index.files),
        "labels": sorted({f.label for f in index.files}),
        "instances": index.instances,
        "tokens": tokens,
        **({"label_masks": masks} if (masks := sum(f.mask_hash is not None for f in index.files)) else {}),
        "dropped_tail_tokens": tokens - index.instances * index.sequence_length,
        "fingerprint": index.fingerprint,
        "olmo_core_fingerprint": olmo_core_fingerprint(index),
    }


def verify(args: argparse.Namespace) -> dict:
    """Raises DataError with one line a bad file."""
    index = load_index(args.index)
    root = local_path(args.data_root) if args.data_root else local_path(args.index).parent

    def look(file: TokenFile) -> str | None:
        try:
            return file_fault(root / file.path, file, index.itemsize)
        except OSError as e:  # cannot be read; the others are looked at all the same
            return str(e)

    if faults := list(filter(None, in_parallel(look, index.files, "verify"))):
        warn(f"{args.index}: {len(faults)} of {len(index.files)} files are bad")
        raise DataError("\n".join(faults))
    return {"index": args.index} | summarise(index)


def show(args: argparse.Namespace) -> dict:
    index = load_index(args.index)
    config = DataConfig(args.index, args.order, args.seed, index.sequence_length, args.global_batch, True, None, False)
    source = open_data(config, args.data_root, args.order_dir)
    own = local_path(args.index).parent / index.tokenizer
    path = args.tokenizer or (own if own.is_file() else None)
    tokenizer = None if path is None else load_tokenizer(path)
    position, rows = (args.step - 1) * args.global_batch, []
    for row, instance in enumerate(source.instances_at(position)[: args.rows]):
        (file, offset), tokens = source.locate(instance), source.read(instance)
        text = None if tokenizer is None else tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        if text is not None and file.mask_hash:
            text = marked(tokenizer, tokens, source.read_mask(instance))
        shown = {"row": row, "position": position + row, "instance": int(instance), "file": file.path, "offset": offset}
        filtered = bool(repetition_filtered(tokens))
        rows.append(shown | {"label": file.label, "filtered": filtered, "text": text})
    return {"step": args.step, "epoch": position // source.usable + 1, "rows": rows}


def marked(tokenizer: Tokenizer, tokens: np.ndarray, learnt: np.ndarray) -> str:
    """The text, with what is learnt in [[ ]]."""
    edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False))  # every second one opens
    parts = np.split(tokens, edges[edges < len(tokens)])
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    return "".join(f"[[{text}]]" if i % 2 else text for i, text in enumerate(texts))


def number(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: beyond these bounds numpy, Grain or the memory give up, each in words of its own."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {text}, expected {least} .. {most}")
        return int(text)

    return parse


SEED, GLOBAL_BATCH, SEQUENCE_LENGTH = number(0, 2**63 - 1), number(1, 2**24), number(2, 2**31)
ROOT_HELP = "folder that the index's paths start in (default: the folder of the index)"
# Verbs of earlier versions, with a flag where it alone has moved -> the tool.
MOVED = {"quickstart": "quickstart.py", "tokenize": "text_to_tokens.py", "tokenizer": "dolma2_tokenizer.py",
         "domains": "domains.py", "pack": "pack.py", "urls": "mixes.py urls", "index --mix": "mixes.py index",
         "audit": "audit.py epoch", "order": "audit.py order", "verify --ids": "audit.py ids"}  # fmt: skip


def add_index_flags(parser: argparse.ArgumentParser) -> None:
    """What an index says besides its files; tools/mixes.py asks for the same."""
    parser.add_argument("--out", required=True, help="the index to write")
    parser.add_argument("--sequence-length", type=SEQUENCE_LENGTH, required=True)
    parser.add_argument("--tokenizer", required=True,
                        help="a name, or a tokenizer.json; that and allenai/dolma3-tokenizer give the next three")  # fmt: skip
    parser.add_argument("--vocab-size", type=number(1, 2**32))
    parser.add_argument("--eos-id", type=number(0, 2**32 - 1))
    parser.add_argument("--pad-id", type=number(0, 2**32 - 1))
    parser.add_argument("--dtype", default="uint32", choices=("uint32", "uint16"), help="default: %(default)s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Index token files, check and look at them."
    parser = argparse.ArgumentParser(prog="data.py", description=about)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, command: Callable, about: str, example: str) -> argparse.ArgumentParser:
        texts = {"help": about, "description": about, "epilog": f"example:\n  {example}"}
        p = verbs.add_parser(name, **texts, formatter_class=argparse.RawDescriptionHelpFormatter)
        p.set_defaults(command=command)
        p.add_argument("--json", action="store_true", help="the whole result as JSON, for programs")
        return p

    p = verb("index", make_index, "Make an index of token files.",
             "python data.py index web=data/mine/web code=data/mine/code --out data/mine/index.json "
             "--sequence-length 512 --tokenizer data/quickstart/tokenizer.json")  # fmt: skip
    p.add_argument("inputs", nargs="+", metavar="[LABEL=]PATH", help="token file, or folder of .npy token files")
    add_index_flags(p)
    p.add_argument("--label", help="one label for all files (default: LABEL=, or the name of the file's folder)")
    p.add_argument("--root", help="folder that the index's paths start in (default: the folder of the index)")

    p = verb("verify", verify, "Check that the files of an index are there and unchanged; exit 2 names every bad one.",
             "python data.py verify data/quickstart/train.json")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--data-root", help=ROOT_HELP)

    p = verb("show", show, "The instances of batch K, which update K trains on: positions (K-1)*B .. K*B-1.",
             "python data.py show data/quickstart/train.json --step 1 --global-batch 8 --rows 2")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--step", type=number(1, 2**38), required=True, help="K, from 1 (if the global batch never changed)")
    p.add_argument("--global-batch", type=GLOBAL_BATCH, required=True, help="B, in instances")
    p.add_argument("--seed", type=SEED, default=34521, help="default: %(default)s, as Ai2")
    p.add_argument("--order", default="olmo_core", help="olmo_core | feistel (default: %(default)s)")
    p.add_argument("--order-dir", help="where the order is cached (default: not at all)")
    p.add_argument("--rows", type=number(1, 2**24), help="the first rows only")
    p.add_argument("--data-root", help=ROOT_HELP)
    p.add_argument("--tokenizer", help="a tokenizer.json to decode with (default: the index's)")

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    for old, new in MOVED.items():
        if arguments[:1] == old.split()[:1] and given.issuperset(old.split()):
            parser.error(f"{old} has moved; fix: python tools/{new}, see its --help")
    return parser.parse_args(arguments)


def for_people(result: dict) -> str:
    if "rows" not in result:  # an index that was made or verified
        counts = ", ".join(f"{result[what]:,} {what}" for what in ("files", "instances", "tokens"))
        return f"{result['index']}: {counts}; {', '.join(result['labels'][:8])}; {result['fingerprint'][:19]}...: as it should be"
    return "\n".join(
        f"--- row {r['row']}: instance {r['instance']:,}, {r['label']}, {r['file']} from token {r['offset']:,} on"
        f"{', filtered' * r['filtered']}\n{r['text'] or ''}"
        for r in result["rows"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        result = args.command(args)
        print(json.dumps(result, indent=1) if args.json else for_people(result))
        return 0
    except (DataError, OSError) as e:  # the second: permissions, a full disk
        wrong_input = isinstance(e, DataError)
        for line in (str(e) if wrong_input else os_error(e)).split("\n"):
            print(f"data.py: error: {line}", file=sys.stderr)
        return 2 if wrong_input else 1


if __name__ == "__main__":
    sys.exit(main())
