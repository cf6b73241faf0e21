"""tools/tour.py: the pictures are drawn, and show what they say."""

import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import plan
import pytest
import tour
from harness import REPO

import model


def test_pictures(tmp_path):
    """A picture that is missing, blank, of another size, or so large that nobody's page loads it; a second run that draws
    other bytes."""
    out = tmp_path / "new" / "out"
    assert tour.main(["--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {f"{name}.png" for name in tour.PICTURES} and len(
        tour.PICTURES
    ) == 6
    for path in out.iterdir():
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[1] == 1000 and 300 < pixels.shape[0] < 900 and path.stat().st_size < 120_000, path
        assert pixels[..., :3].std() > 0.05, path
        stored = matplotlib.image.imread(REPO / "docs/tour" / path.name)
        assert stored.shape == pixels.shape, f"{path.name}: fix: python tools/tour.py"
    before = (out / "keys.png").read_bytes()
    assert tour.main(["--out", str(out)]) == 0 and (out / "keys.png").read_bytes() == before


@pytest.mark.parametrize("name", ["file", "file/below", ""])
def test_a_bad_folder(name, tmp_path, capsys, monkeypatch):
    """A traceback, an exit code that a launcher tries again, or six pictures in the working directory."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert tour.main(["--out", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_few_devices(tmp_path):
    """A traceback out of jax where the environment asks for fewer devices than the meshes have."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, REPO / "tools/tour.py", "--out", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "devices: got 4, expected 8" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [tour.WINDOW, None])
def test_keys(window, documents):
    """A mask that is drawn by another rule; a pair that no shard computes, or one that two do."""
    of, n = tour.DOCUMENTS if documents else np.zeros(tour.S), tour.S
    brute = np.array(
        [[k <= q and (window is None or q - k < window) and of[q] == of[k] for k in range(n)] for q in range(n)]
    )
    for shards in (1, tour.SHARDS):
        owner = tour.keys_of(window, tour.DOCUMENTS if documents else None, shards)
        np.testing.assert_array_equal(owner >= 0, brute)
    work = np.bincount(owner[owner >= 0], minlength=tour.SHARDS)
    assert window is not None or documents or len(set(work)) == 1  # the full layer's is dealt out evenly


def test_learning_rate():
    """A curve in other units, of another recipe's peak, or without the joint of Ai2's two parts."""
    tokens, lr, (joint,) = tour.learning_rate_of("stage1_ai2")
    assert tokens[-1] == 5_929_965_715_456 and joint == 597_046 * 512 * 8192
    np.testing.assert_allclose(
        [lr.max(), lr[list(tokens).index(joint)]], [3e-4, 1.65e-4], rtol=1e-3
    )  # half way to 3e-5
    assert tour.learning_rate_of("stage1")[1][-1] == pytest.approx(3e-5)
    for name, billions in (("stage2", 100), ("stage3", 50)):
        tokens, lr, joints = tour.learning_rate_of(name)
        assert tokens[-1] / 1e9 == pytest.approx(billions, rel=2e-3) and lr[-1] == 0 and joints == []


def test_shards():
    """A block under another device, rows taken for columns, a replica that is missing. By hand, from the strides of a mesh
    data 1 x fsdp 2 x context 2 x tensor 2: device = 4 fsdp + 2 context + tensor."""
    (_, shape, spec), (_, wq_shape, wq_spec), (_, batch, batch_spec) = tour.tensors_of()
    held = tour.blocks_of(shape, spec, (1, 2, 2, 2))
    V, D = shape  # rows of the vocabulary over tensor, and each device's of these over fsdp
    assert held[(V // 2, 3 * V // 4), (0, D)] == [1, 3] and held[(V // 4, V // 2), (0, D)] == [4, 6]
    D, A = wq_shape
    assert tour.blocks_of(wq_shape, wq_spec, (1, 2, 2, 2))[(D // 2, D), (0, A // 2)] == [4, 6]
    B, T = batch
    assert tour.blocks_of(batch, batch_spec, (1, 2, 2, 2))[(0, B // 2), (T // 2, T)] == [2, 3]
    assert sorted(device for devices in held.values() for device in devices) == list(range(8))


def test_order():
    """Repeats that are not marked, or marked where there are none; MaxText's fault modelled otherwise than measured."""
    ours, theirs = tour.order_of(), tour.double_sharded_of()
    assert not tour.repeats_of(ours).any()
    seen = set()
    by_hand = [[i in seen or seen.add(i) is not None for i in row] for row in theirs.tolist()]
    np.testing.assert_array_equal(tour.repeats_of(theirs), by_hand)
    epoch = tour.INSTANCES // tour.BATCH
    assert len(np.unique(tour.order_of(epoch))) == tour.INSTANCES
    visits = np.bincount(tour.double_sharded_of(epoch).reshape(-1), minlength=tour.INSTANCES)
    # Never, once and more often in an epoch, as measured on MaxText itself with 32 hosts.
    np.testing.assert_allclose([np.mean(visits == 0), np.mean(visits == 1), np.mean(visits > 1)],
                               [0.357, 0.385, 0.258], atol=0.015)  # fmt: skip


def test_a_layers_traffic():
    """A weight under another one's bar, a gather that is not there, such as that of the backward pass; a layer that is not
    the one of which tools/plan.py counts the bytes."""
    found = tour.layer_of()
    matrices = {
        name for name, t in model.ledger(tour.load_config("stage1", "v5p", []).model).items() if len(t.shape) == 3
    }
    passes = {"all-gather": ["forward", "recomputed"], "reduce-scatter": ["backward"]}
    for kind, phases in passes.items():
        for phase in phases:
            names = [name for e in found if (e.kind, e.phase) == (kind, phase) for name in e.what.split()]
            assert set(names) == matrices and len(names) == len(matrices)
    assert all(e.times == len(e.what.split()) for e in found if e.kind in passes)
    D, F, A, MB = 4096, 11008, 4096, 1e6
    gathers = [e.size for e in found if e.kind == "all-gather" and e.phase == "forward"]
    assert gathers == pytest.approx([n * D * width / 2 * 2 * 31 / 32 / MB for n, width in ((3, F), (4, A))])  # bf16
    tokens = 2 * 8192
    flops = sum(e.size for e in found if e.kind == "product" and e.what != "dense_attention" and e.phase == "forward")
    assert flops == pytest.approx(2 * tokens * (4 * D * A + 3 * D * F) / 2 / 1e12)  # 2 devices along tensor

    # The step that trains: Splash, and the real pattern. A layer of it sends the same.
    config = tour.load_config("stage1", "v5p", [tour.LAYER[0]])
    of_step = plan.collectives(config, tour.DEVICES)
    for phase in ("forward", "recomputed", "backward"):
        for kind in ("all-gather", "reduce-scatter", "all-reduce"):
            drawn = sum(e.size for e in found if (e.phase, e.kind) == (phase, kind))
            layers = [c for c in of_step if (c.phase, c.kind) == (phase, kind) and c.times >= 32 and c.sent >= 1e5]
            assert drawn == pytest.approx(sum(c.sent_a_step for c in layers) / config.model.n_layers / MB), (
                phase,
                kind,
            )


def test_skips():
    """A band that is not the rule's, a spike that is drawn as skipped and was not."""
    r, (first, second, third) = tour.skip_of(), tour.SPIKES
    settings = tour.load_config("stage1", "cpu", []).optim
    n, at = settings.skip_window, {step: i for i, step in enumerate(r["step"].tolist())}
    assert r["step"][r["skipped"]].tolist() == [first, third]
    assert first < second <= first + n and second + n < third
    for step in (first, second, third):
        before = r["loss"][at[step] - n : at[step]].astype(np.float64)
        band = before.mean() + settings.skip_sigma * before.std(ddof=1)
        assert r["highest"][at[step]] == pytest.approx(band, abs=2e-3)
    assert r["loss"][at[second]] < r["highest"][at[second]]
    # The same loss just before the first spike, which is not in the window yet, is skipped.
    assert r["loss"][at[second]] > r["highest"][at[first]]
    assert np.isnan(r["highest"][: n // 2 - 1]).all() and np.isfinite(r["highest"][n // 2 - 1 :]).all()
