"""tools/pack.py."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pack
import pytest
from corpora import EOS_ID, PAD_ID, REPO, children, config, ended, make_index, random_tokens, run

import data
from data import DataError


def test_best_fit_by_hand():
    """Catches first fit for best fit, last in for first in among equal rooms, documents of one length that change
    places, and a full instance that is opened again."""
    packed = pack.best_fit_decreasing(np.array([3, 6, 10, 7, 6, 1, 3, 4, 4]), 10)
    #         10: full   7 + 3     6 + 4      6 + 4      3, 1: the second 3 finds no room of 3 left
    assert packed == [[2], [3, 0], [1, 7], [4, 8], [6, 5]]
    assert pack.best_fit_decreasing(np.array([12, 10, 9, 1]), 20) == [[0], [1, 2, 3]]  # the fullest, not the first
    assert pack.best_fit_decreasing(np.zeros(0, int), 10) == []


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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")
def test_a_worker_of_pack_is_killed(tmp_path):
    """A worker that is killed for want of memory, or while others start: no end, a traceback, exit 2, which is for usage,
    or a folder that `index` takes for complete."""
    index = make_index(tmp_path, {f"web/{n}.npy": np.concatenate(ended(5, 9, 3 + n, 16)) for n in range(3)})
    arguments = ["pack", index, "--group-size", 1, "--out", tmp_path / "packed", "--workers", 2]
    command = [sys.executable, REPO / "tools/pack.py", *arguments[1:]]
    packing = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (workers := children(packing.pid)) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(workers[0], signal.SIGKILL)
    out, err = packing.communicate(timeout=60)
    assert packing.returncode == 1 and not out, err
    (line,) = (line for line in err.splitlines() if line.startswith("pack.py: error"))
    assert re.search(r"/packed/group-0000\d\.npy: its process was killed", line) and "Traceback" not in err
    with pytest.raises(DataError, match="packed: got a folder that is being written, or whose writer was ended"):
        data.labelled_files([str(tmp_path / "packed")])
    assert run(*arguments).returncode == 0 and not (tmp_path / "packed" / data.INCOMPLETE).exists()
    with pytest.raises(ZeroDivisionError) as caught:  # a fault of ours, which does not pass for the user's
        pack.apart(operator.truediv, 1, 0)
    assert "work(*arguments)" in caught.value.__notes__[0]
