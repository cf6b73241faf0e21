"""tools/headerless.py."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import EOS_ID, REPO, S, V, call, config

import data
from data import DataError


def advice(error: str) -> subprocess.CompletedProcess:
    """Runs what an error recommends, to the letter."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = error.partition("; fix: ")[2]
    return subprocess.run(command, shell=True, cwd=REPO, env=env, capture_output=True, text=True)


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
    said = "a real .npy header" if header else "as int64 ids look"
    assert said in str(caught.value)
    if not header:  # an index that was made before this was looked at
        file = data.TokenFile("web/it's [a].npy", "web", len(content), 40, data.survey(path, 4)[2])
        identity = (S, "uint32", "none", V)
        fingerprint = data.fingerprint(*identity, [file])
        data.write_index(data.Index(1, *identity, EOS_ID, None, (file,), fingerprint), tmp_path / "old.json")
        with pytest.raises(DataError, match="as int64 ids look"):
            data.open_data(config(str(tmp_path / "old.json"))).batch_at(0)
        assert call(capsys, "verify", tmp_path / "old.json")[0] == 2
    done = advice(str(caught.value))
    assert done.returncode == 0, done.stderr
    index = data.build_index([("web", path)], tmp_path, S, **known)
    data.write_index(index, tmp_path / "index.json")
    assert call(capsys, "ids", tmp_path / "index.json")[0] == 0
    batch = data.open_data(config(str(tmp_path / "index.json"), global_batch=20), shuffle=False).batch_at(0)
    np.testing.assert_array_equal(batch["tokens"], tokens)
    assert Path(f"{path}.orig").read_bytes() == content
    assert advice(str(caught.value)).returncode != 0 and Path(f"{path}.orig").read_bytes() == content


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.array([5, -1, 7]), "uint32", "got ids -1 .. 7, expected 0 .. 4294967295"),
        (np.array([5, 2**32, 7]), "uint32", "got ids 5 .. 4294967296, expected 0 .. 4294967295"),
        (np.array([5, 2**16, 7]), "uint16", "got ids 5 .. 65536, expected 0 .. 65535"),
        (np.zeros(9, np.float32), "uint32", "got float32, expected integers"),
        (np.zeros(9, bool), "uint32", "got bool, expected integers"),
        (np.array([1, "a"], object), "uint32", "cannot be read"),
        (np.zeros(0, int), "uint32", "got no ids"),
    ],
    ids=["negative", "uint32", "uint16", "float", "bool", "object", "empty"],
)
def test_the_advice_refuses_what_are_no_ids_or_do_not_fit(tmp_path, array, dtype, message):
    """-100, a mask of other libraries, becomes id 4294967196; numbers that are no ids are written as tokens."""
    np.save(tmp_path / "a.npy", array)
    before = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(DataError) as caught:
        data.build_index([("x", tmp_path / "a.npy")], tmp_path, 2, tokenizer="t", vocab_size=V, eos_id=0, dtype=dtype)
    done = advice(str(caught.value))
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.npy", before)]
    np.save(tmp_path / "a.npy", np.array([5, 6, 7]))
    (tmp_path / "a.npy.orig").write_bytes(before)
    assert advice(str(caught.value)).returncode == 2 and (tmp_path / "a.npy.orig").read_bytes() == before
