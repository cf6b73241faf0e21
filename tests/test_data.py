"""data.py: index, order, batches, loader, command line. Tiny sizes that all differ: S 16, B 4, V 97."""

import contextlib
import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import (
    EOS_ID,
    REPO,
    VOCABULARY,
    S,
    V,
    alive,
    assert_same,
    call,
    children,
    config,
    ended,
    literal_filter,
    make_index,
    random_tokens,
    run,
    token_file,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import data
import heldout
from data import DataError


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


def test_the_builder_of_an_order_is_killed(tmp_path):
    """Those that wait for a dead builder wait for ever, or take its half for the whole."""
    builder = subprocess.Popen([sys.executable, "-c", ORDER.format(repo=str(REPO), folder=str(tmp_path))],
                               stdout=subprocess.PIPE)  # fmt: skip
    builder.stdout.readline()
    threading.Timer(0.5, builder.kill).start()
    order = data.epoch_order("olmo_core", 1000, 3, 2, tmp_path)
    assert builder.wait() == -signal.SIGKILL
    np.testing.assert_array_equal(order, np.random.default_rng(5).permutation(1000))
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


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
    """Hosts without a file of their own that fall back to all files: instances averaged twice."""
    index = make_index(tmp_path, {"web/only.npy": random_tokens(22 * S)})
    hosts = [data.open_data(config(index, global_batch=8), rows=[2 * h, 2 * h + 1]) for h in range(4)]
    seen = [sum((host.batch_at(p)["instance"].tolist() for p in (0, 8)), []) for host in hosts]
    assert all(len(set(ids)) == 4 for ids in seen) and len(set(sum(seen, []))) == 16
    dropped = set(range(22)) - set(sum(seen, []))
    order = data.epoch_order("olmo_core", 22, 7, 1, None)
    assert dropped == set(order[16:].tolist())


def test_stream_goes_on_with_other_workers_and_hosts(corpus):
    """A position that fits one number of workers and hosts only, or starts again from 0 with another."""
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
sys.path[:0] = [{repo!r}, {repo!r} + "/tools"]
import audit, data
def main():
    assert audit.main(["epoch", {index!r}, "--global-batch", "4", "--workers", "1", "--hosts", "2"]) == 0
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_leaves_nothing_behind(corpus, group):
    """Semaphores that Python complains of after SIGTERM, which ended the command between two instructions. A signal to the
    group that ends workers on their way: Python waits for ever for one that it has half started."""
    command = ["tools/audit.py", "epoch", str(corpus), "--global-batch", "4", "--workers", "2", "--hosts", "4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *command], cwd=REPO, start_new_session=True, **pipes)
    deadline = time.monotonic() + 60
    while len(children(process.pid)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "")


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
        list(heldout.EvaluationBatches(index, None, 4))


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
    with pytest.raises(AssertionError):
        data.open_data(config(corpus)).instances_at(-4)
    for rows in ([], [4], [-1, 0]):
        with pytest.raises(AssertionError):
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


ALONE = """
import sys
import numpy as np
import data
def main():
    config = data.DataConfig("index.json", "olmo_core", 7, 16, 4, True, None, True)
    source = data.open_data(config, order_dir="order")
    assert "jax" not in sys.modules
    expected = [source.batch_at(position)["tokens"] for position in (0, 4)]
    for workers in (0, 1):
        batches = data.loader(source, 0, 8, workers)
        np.testing.assert_array_equal([batch["tokens"] for batch in batches], expected)
if __name__ == "__main__":
    main()
"""


def test_data_py_works_alone(tmp_path):
    """A file that cannot be copied out: index, order, batches or loader need another file of the project."""
    shutil.copy(REPO / "data.py", tmp_path)
    token_file(tmp_path / "web/a.npy", random_tokens(9 * S))
    (tmp_path / "script.py").write_text(ALONE)
    index = ["data.py", "index", "web", "--out", "index.json", "--sequence-length", S, *VOCABULARY]
    for arguments in (index, ["script.py"]):
        subprocess.run([sys.executable, *map(str, arguments)], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


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

    fine = run("verify", out / "new.json")
    assert fine.returncode == 0 and json.loads(fine.stdout) == {"index": str(out / "new.json")} | {
        key: value for key, value in summary.items() if key != "index"
    }
    fine = run("ids", out / "new.json")
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


def test_usage_errors(tmp_path, corpus):
    """A traceback, or exit 0, for what a person mistyped; an example in the help that argparse cannot read."""
    for arguments, message in [
        (["verify", tmp_path / "no.json"], "no.json: got no such file"),
        (["index", tmp_path / "no", "--out", tmp_path / "i.json", "--sequence-length", 8, "--tokenizer", "x",
          "--vocab-size", 9, "--eos-id", 0], "no: got no such file or folder"),
        (["index", corpus, "--out", tmp_path / "i.json", "--sequence-length", 8, "--tokenizer", "x",
          "--vocab-size", 9, "--eos-id", 0], "got no token file, expected some that end in .npy"),
        (["show", corpus, "--step", 0, "--global-batch", 4], "--step: got 0"),
    ]:  # fmt: skip
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not done.stdout
    for verb in ("index", "verify", "show"):
        example = run(verb, "--help").stdout.partition("example:")[2].split()
        assert example[:3] == ["python", "data.py", verb] and data.parse(example[2:]).verb == verb


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


def test_no_room(corpus, tmp_path, monkeypatch, capsys):
    """Hours of writing towards a full disk, where the size is known before the first byte."""
    index = make_index(tmp_path, {"web/a.npy": np.concatenate(ended(5, 9, 16))})
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10))
    for arguments, name in [
        (["pack", index, "--out", tmp_path / "packed", "--workers", 1], "packed"),
        (["order", corpus, "--order-dir", tmp_path / "order"], "order"),
    ]:
        code, _, err = call(capsys, *arguments)
        assert code == 1 and re.search(rf"{name}: needs 0\.00 GB, 0\.00 GB are free; fix: make room", err)
        assert not list((tmp_path / name).glob("*.npy"))


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
        assert call(capsys, "verify", path)[0] == call(capsys, "ids", path)[0] == 0
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


def test_a_link_beside_its_file_counts_once(tmp_path):
    """The instances of a file trained on twice because a link to it lies in the same folder, or the folder refused."""
    for name in ("x.npy", "y.npy"):
        token_file(tmp_path / "web" / name, random_tokens(4 * S))
    (tmp_path / "web/a_link.npy").symlink_to("x.npy")
    assert [path.name for path in data.token_files(tmp_path)] == ["a_link.npy", "y.npy"]


def test_progress_on_a_pipe(monkeypatch, capsys):
    """Minutes of silence, or a screen of bars, where standard error is a file; lines of what takes a second."""
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    for _ in data.progress_bar(range(40), desc="read", unit="file"):
        clock[0] += 1
    lines = [line.strip("\r ") for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if line] == [f"read: {n} of 40 file" for n in (10, 20, 30, 40)]
    for _ in data.progress_bar(range(4), desc="read", unit="file"):
        clock[0] += 1
    assert not capsys.readouterr().err.strip("\r ")


def masked_index(folder: Path, seed: int = 3) -> tuple[str, np.ndarray, np.ndarray]:
    """(index, tokens, mask) of one file with a label mask beside it."""
    tokens, learnt = random_tokens(6 * S, seed), np.random.default_rng(seed).random(6 * S) < 0.5
    path = folder / "chat/token_ids_part_0000.npy"
    path.parent.mkdir(parents=True)
    learnt.tofile(folder / "chat/labels_mask_part_0000.npy")
    return make_index(folder, {"chat/token_ids_part_0000.npy": tokens}), tokens, learnt


def test_label_masks(tmp_path):
    """A mask applied after the shift, to another instance, or to the label at the end; an index that looks the same with
    and without one, or other than before where there is none (a test in test_stored.py holds an index of before)."""
    index, tokens, learnt = masked_index(tmp_path)
    source = data.open_data(config(index), rows=[0, 1, 2])
    batch = source.batch_at(0)
    for row, instance in enumerate(batch["instance"]):
        part = slice(instance * S, (instance + 1) * S)
        np.testing.assert_array_equal(batch["tokens"][row], tokens[part])
        np.testing.assert_array_equal(batch["loss_mask"][row], [*learnt[part][1:], False])
    loaded = data.load_index(index)
    assert data.summarise(loaded)["label_masks"] == 1 and loaded.files[0].mask_hash
    (tmp_path / "chat/labels_mask_part_0000.npy").unlink()
    bare = data.build_index([("chat", tmp_path / loaded.files[0].path)], tmp_path, S, tokenizer="none", vocab_size=V,
                            eos_id=EOS_ID)  # fmt: skip
    data.write_index(bare, tmp_path / "bare.json")
    assert "mask" not in (tmp_path / "bare.json").read_text() and bare.fingerprint != loaded.fingerprint
    assert data.open_data(config(str(tmp_path / "bare.json"))).batch_at(0)["loss_mask"].sum() == 4 * (S - 1)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.unlink(), "got no such file (missing), expected a label mask"),
        (
            lambda p: p.write_bytes(p.read_bytes()[:-1]),
            f"got {6 * S - 1} bytes, expected one for each of {6 * S} tokens",
        ),
        (lambda p: p.write_bytes(b"\2" + p.read_bytes()[1:]), "got a byte 2, expected 0 or 1"),
        (lambda p: p.write_bytes(bytes(6 * S)), "got other first or last 4 KiB than the index says"),
    ],
)
def test_a_mask_that_is_another(tmp_path, capsys, spoil, says):
    """Training on a user's words, in silence, since the mask is that of other tokens."""
    index, *_ = masked_index(tmp_path)
    spoil(tmp_path / "chat/labels_mask_part_0000.npy")
    code, _, err = call(capsys, "verify", index)
    assert code == 2 and "labels_mask_part_0000.npy" in err and says in err
    with pytest.raises(data.DataError, match="labels_mask_part_0000.npy"):
        data.open_data(config(index)).batch_at(0)


def test_show_marks_what_is_learnt(quickstart):
    tokenizer = data.load_tokenizer(quickstart[0] / "out/tokenizer.json")
    ids = tokenizer.encode("ab cd").ids
    learnt = np.zeros(len(ids), bool)
    learnt[-1] = True
    shown = data.marked(tokenizer, np.array(ids), learnt)
    assert shown.endswith("]]") and shown.count("[[") == 1 and shown.replace("[[", "").replace("]]", "") == "ab cd"
    assert data.marked(tokenizer, np.array(ids), ~learnt).startswith("[[")
    assert data.marked(tokenizer, np.array(ids), np.zeros(len(ids), bool)) == "ab cd"


def test_a_mask_that_changes_while_a_run_reads(tmp_path):
    """A mask that another process writes anew, as tokens are noticed; one that is not there when a run begins."""
    index, *_ = masked_index(tmp_path)
    mask = tmp_path / "chat/labels_mask_part_0000.npy"
    source = data.open_data(config(index))
    source.batch_at(0)
    mask.write_bytes(bytes(6 * S))
    with pytest.raises(data.DataError, match="labels_mask_part_0000.npy: got other first or last 4 KiB"):
        source.batch_at(0)
    mask.unlink()
    with pytest.raises(data.DataError, match="labels_mask_part_0000.npy: got no such file"):
        data.open_data(config(index))
