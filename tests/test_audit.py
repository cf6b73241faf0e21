"""tools/audit.py."""

import functools
import json
from pathlib import Path

import audit
import numpy as np
import pytest
from corpora import EOS_ID, PAD_ID, S, V, call, config, main, make_index, random_tokens, run

import data


def test_order_verb(corpus, tmp_path, capsys):
    """A file that is some permutation, but not this epoch's, passes; the verb builds another file than the loader's."""
    arguments = ["order", corpus, "--order-dir", str(tmp_path), "--seed", "7", "--epoch", "2"]
    assert main(arguments) == 0
    built = json.loads(capsys.readouterr().out)
    path = Path(built["order"])
    assert (built["done"], built["instances"], built["bytes"]) == ("built", 23, 92)
    np.testing.assert_array_equal(np.fromfile(path, "<u4"), np.random.default_rng(9).permutation(23))
    data.open_data(config(corpus), order_dir=tmp_path).instances_at(20)  # of epoch 2
    assert list(tmp_path.glob("*.npy")) == [path]
    assert main(arguments) == 0 and json.loads(capsys.readouterr().out)["done"] == "checked"
    order = np.fromfile(path, "<u4")
    order[[20, 21]] = order[[21, 20]]
    order.tofile(path)
    assert main(arguments) == 2
    assert f"got instance {order[20]} at position 20, expected {order[21]}; fix: delete it" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-4])
    assert main(arguments) == 2 and "got 88 bytes, expected 92" in capsys.readouterr().err
    assert main([*arguments, "--epoch", "0"]) == 2 and "--epoch: got 0, expected" in capsys.readouterr().err


def test_ids(tmp_path):
    """Another tokenizer's ids: EOS never occurs, padding abounds (OLMo #757); an id outside the vocabulary."""
    plain = run("ids", make_index(tmp_path / "a", {"web/a.npy": random_tokens(5000)}))
    assert plain.returncode == 0 and "WARNING: web/a.npy: EOS 90 is in none of 5000 tokens" in plain.stderr
    padded = np.where(np.arange(5000) % 40 == 0, PAD_ID, random_tokens(5000))
    padded[7] = EOS_ID
    warned = run("ids", make_index(tmp_path / "b", {"web/a.npy": padded}))
    assert warned.returncode == 0 and "WARNING: web/a.npy: 125 of 5000 tokens are padding (91)" in warned.stderr
    assert warned.stderr.count("WARNING") == 1
    padded[[4000, 4500]] = 97, 98
    bad = run("ids", make_index(tmp_path / "c", {"web/a.npy": padded}))
    assert bad.returncode == 2 and "2 ids are not below 97, the first {'offset': 4000, 'id': 97}" in bad.stderr


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
    monkeypatch.setattr(audit, "loader", functools.partial(maxtext_loader, **fault))
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
    assert code == 2 and "got 23 instances, expected at least one batch of 24" in err
