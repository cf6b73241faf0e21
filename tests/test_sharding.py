"""Every mesh against one device, every break of the sharding seen, and what sharding is for: memory and balance."""

import ast
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharding
from sharding import CASES, HERE, MORE_CASES, MUTANTS

import model
import train
from config import load_config, shardings, to_device

FILES = sorted(HERE.glob("*.py"))
TOLERANCE = 3e-5  # fp32 sums in another order; measured: 5.5e-6 on one CPU, 1.4e-5 on another
SEEN = 1e-3  # a break that changes no quantity by as much would not be called seen


# ----------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_one_device(case):
    """Catches gradients times or over the number of devices, a local clip, a divisor of one shard, statistics, masks
    or positions of one shard, and any hardware choice that changes three updates. 1, 2, 4 and 8 devices also with
    clipping off: clipping hides a factor that all gradients have in common.
    """
    row = sharding.compare(case, measures=(sharding.steps,))
    assert sharding.largest(row) < TOLERANCE, row


def test_gradients_equal_one_device():
    """Catches what clipping and Adam would hide in an update: gradients that are all wrong by the same factor."""
    row = sharding.compare(CASES[0], measures=(sharding.gradients,))
    assert sharding.largest(row) < TOLERANCE, row


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_everything_equals_one_device(case):
    """The rest of the grid: catches a path of the attention, of accumulation or of recomputation that only some mesh
    takes, also without z-loss, padding, documents, a filtered row, YaRN or grouped heads.
    """
    row = sharding.compare(case)
    assert sharding.largest(row) < TOLERANCE, row


def test_cases_clip_and_skip_nothing():
    """Catches a comparison of nothing: norms that never reach the clip, or a spike rule that stops the updates."""
    reference = sharding.reference(sharding.steps, ())
    assert min(reference["3 gradient norms"]) > 0.5
    start = sharding.random_params(sharding.make_config(CASES[0]))
    assert all(sharding.difference(reference["parameters"][name], x) > 1e-2 for name, x in start.items())


@pytest.mark.parametrize("name", ["wq", "lm_head"])
@pytest.mark.parametrize("replicated", [False, True])
def test_clipping_uses_the_global_norm(monkeypatch, name, replicated):
    """Catches a norm over one device's shards ([3, 0, 4, 0] cut over four devices would become [1, 0, 1, 0], not
    [0.6, 0, 0.8, 0]), one that misses an axis where two of them cut a dimension, and one that counts a replicated
    tensor once a device.
    """
    case = sharding.Case((1, 4, 1, 2), ("dense",))
    c = load_config("quickstart.yaml", "cpu", [*sharding.OVERRIDES, "mesh.tensor=2", "optim.clip_norm=1.0"])
    table, mesh = model.ledger(c.model), sharding.make_mesh(case.mesh)
    grads = {other: np.zeros(t.shape, np.float32) for other, t in table.items()}
    rows = grads[name][:, 0] if name == "lm_head" else grads[name][0, :, 0]  # of V or D; a view
    n = len(rows)
    rows[[0, n // 4, n // 2, 3 * n // 4]] = [3, 0, 0 if replicated else 4, 0]
    if replicated:
        grads["final_norm"][7] = 4
    # The parameters themselves stand in for the gradients.
    monkeypatch.setattr(train, "gradients", lambda params, *_: (params, model.vary(jnp.zeros(2))))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), train.state_shapes(c, mesh)[1])
    params, state = jax.device_put((grads, zeros), shardings(mesh, train.state_specs(c)))
    batch = to_device(sharding.make_batch(case, c, 1), mesh, c, c.data.global_batch)
    _, state, metrics = train.compile_train_step(c, mesh)(params, state, batch, jnp.int32(1))
    assert float(metrics["grad_norm"]) == pytest.approx(5, rel=1e-6)
    for other, moment in state.mu.items():
        clipped = np.asarray(moment) / np.float32(1 - c.optim.beta1)
        np.testing.assert_allclose(clipped, grads[other] / 5, rtol=1e-5, err_msg=other)


def test_everything_filtered_is_zero_on_every_device():
    """Catches 0/0 on a device without labels, which the sums would carry to all of them."""
    case = next(case for case in CASES if "all filtered" in case.words)
    result = sharding.reference(sharding.steps, ("all filtered",)), sharding.steps(case)
    for there in result:
        assert np.all(np.array([there["3 CE"], there["3 z"], there["3 gradient norms"]]) == 0)
        assert all(np.all(moment == 0) for moment in there["moments"].values())
        assert all(np.all(np.isfinite(x)) for x in there["parameters"].values())


# ---------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.broken)
def test_break_is_seen(mutant):
    """Catches a comparison that would not notice: each of these breaks changes a quantity by 1e-3 or more, or
    shard_map refuses it under check_vma, where it is harmless without.
    """
    row = sharding.effect(mutant, False, (mutant.measure,))
    assert sharding.largest(row) > SEEN or sharding.effect(mutant, True, (mutant.measure,)) is None, row


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_one_vary_missing_is_no_break(check_vma):
    """Catches a change of jax that would make every single vary() after a psum matter."""
    row = sharding.effect(sharding.EQUIVALENT, check_vma, (sharding.gradients,))
    assert sharding.largest(row) < TOLERANCE, row


# ----------------------------------------------------------------------------------------------- memory and balance


def test_memory_falls_with_fsdp():
    """Catches parameters or moments that are not cut, a state that is not donated, and weights of all layers that
    stay gathered for the backward pass.
    """
    rows = sharding.memory((1, 2, 8))
    whole = rows[0]["arguments"] / 3  # parameters and two moments
    for row in rows:
        assert row["share of arguments"] == pytest.approx(row["expected"], rel=0.02), row
        assert row["outputs"] < 0.01 * row["arguments"], row
    assert rows[-1]["temporary"] < whole, rows[-1]


def test_mirror_exchange_balances_full_layers():
    """Catches causal work that grows with the shard: without the exchange the last shard has nearly twice the mean."""
    for row in sharding.balance():
        assert row["max / mean, exchanged"] <= 1.15 and row["max / mean, as they lie"] >= 1.4, row
        assert row["computed / needed"] <= 1.15, row


# ------------------------------------------------------------------------------------------------------ the devices


def test_imports_touch_no_device():
    """Catches a device asked for at import: jax.distributed could not start after it, and --help would wait for a TPU.
    With a platform that does not exist, the first touch of a device is an error.
    """
    script = f"import {', '.join(path.stem for path in FILES)}\nimport jax\njax.devices()"
    environment = os.environ | {"JAX_PLATFORMS": "nowhere", "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=HERE)
    assert done.returncode == 1 and "nowhere" in done.stderr.splitlines()[-1]
    assert "line 3, in <module>" in done.stderr, done.stderr  # jax.devices(), not an import


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_counts_local_devices(path):
    """Catches sizes derived from this process's devices: right with one process, a wrong batch or mesh with several."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"local_devices", "local_device_count"}
