"""train.py --init-from CKPT --init-state adam: the warm start of a stage, which keeps moments and forgets the rest."""

import json
import shutil
from functools import partial
from pathlib import Path

import harness
import jax
import numpy as np
import pytest

import model
import optim
import train
from checkpoint import FORMAT_VERSION, Checkpoints, check_same_run, checksums, read_meta
from config import Config, assemble_config, science_dict, shardings
from processes import RunFailed

STEP, COUNT = 12, 9  # three of the steps were skipped: Adam's own count is behind
WINDOW = ("losses", "grad_norms", "recorded", "nonfinite_in_a_row", "skipped")
KEPT = ("count", "mu", "nu")


def config_of(root: Path, **optim_keys) -> Config:
    science = harness.tiny_config(root)
    science["optim"] |= optim_keys
    return assemble_config(science, "test", "cpu", [])


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1):
    sizes, auto = (data, fsdp, 1, tensor), (jax.sharding.AxisType.Auto,) * 4
    return jax.make_mesh(sizes, model.AXES, devices=jax.devices()[: data * fsdp * tensor], axis_types=auto)


def made_state(config: Config, mesh) -> tuple[dict, optim.SkipStepState]:
    """Parameters and a full optimizer state in which no two numbers are alike, sharded over the mesh."""
    rng, (params_to, state_to) = np.random.default_rng(0), shardings(mesh, train.state_specs(config))

    def drawn():
        shapes = {name: tensor.shape for name, tensor in model.ledger(config.model).items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    window = {name: rng.random(config.optim.skip_window, np.float32) for name in ("losses", "grad_norms")}
    counts = {"count": np.int32(COUNT), "recorded": np.int32(5), "nonfinite_in_a_row": np.int32(2)}
    state = optim.SkipStepState(
        mu=drawn(), nu={name: x**2 for name, x in drawn().items()}, skipped=np.bool_(True), **counts, **window
    )
    return jax.device_put(drawn(), params_to), jax.device_put(state, state_to)


def save(folder: Path, config: Config, params, state, step: int = STEP, **more) -> Path:
    """A checkpoint as train.py saves it; returns its folder."""
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "instances_seen": step * harness.BATCH,
        "tokens_seen": step * harness.BATCH * harness.SEQUENCE,
        "items": ["params", "opt_state", "meta"],
        "data": {"sequence_length": harness.SEQUENCE},
        "config": science_dict(config),
        "checksums": {"params": checksums(params), "opt_state": checksums(state)},
        **more,
    }
    checkpoints = Checkpoints(folder / "checkpoints", None)
    checkpoints.save(step, params, state, meta)
    checkpoints.close()
    return folder / "checkpoints" / str(step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(checkpoint of one device, what was saved in it)."""
    root = tmp_path_factory.mktemp("saved")
    config = config_of(root)
    params, state = made_state(config, mesh_of())
    return save(root / "run", config, params, state), (params, state)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_warm(state: train.State, saved, skip_window: int = 8) -> None:
    """Parameters, moments and Adam's count are those that were saved; step, data position and window begin anew."""
    params, opt_state = saved
    assert bits(state.params) == bits(params)
    for name in KEPT:
        assert bits(getattr(state.opt_state, name)) == bits(getattr(opt_state, name)), name
    assert (state.step, state.instances_seen, int(state.opt_state.count)) == (0, 0, COUNT)
    assert state.opt_state.losses.shape == state.opt_state.grad_norms.shape == (skip_window,)
    assert not any(np.any(np.asarray(getattr(state.opt_state, name))) for name in WINDOW)


def test_moments_are_kept_bit_for_bit_and_the_window_is_empty(saved, tmp_path, capsys):
    """Moments that are rounded, an Adam that counts anew, a skip rule that judges by the losses of other data."""
    folder, expected = saved
    state = train.initial_state(config_of(tmp_path), mesh_of(), str(folder), "adam", {})
    assert_warm(state, expected)
    assert f"start: parameters and Adam moments of {folder}" in capsys.readouterr().err


def test_fresh_moments_are_fresh(saved, tmp_path):
    """--init-state params that takes moments along, or Adam's count."""
    state = train.initial_state(config_of(tmp_path), mesh_of(), str(saved[0]), "params", {})
    assert bits(state.params) == bits(saved[1][0])
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.parametrize("skip_window", [3, 64])
def test_a_stage_with_another_window(saved, tmp_path, skip_window):
    """A restore that takes the new stage's window for the shape of the old one, and refuses the checkpoint."""
    config = config_of(tmp_path, skip_window=skip_window)
    assert_warm(train.initial_state(config, mesh_of(), str(saved[0]), "adam", {}), saved[1], skip_window)


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_stage_on_another_mesh(saved, tmp_path, sizes):
    """Moments that are whole on each device, or a checkpoint that only its own mesh can read, there and back."""
    config, mesh = config_of(tmp_path), mesh_of(**sizes)
    state = train.initial_state(config, mesh, str(saved[0]), "adam", {})
    assert_warm(state, saved[1])
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu):
        for name, tensor in model.ledger(config.model).items():
            assert tree[name].sharding.is_equivalent_to(jax.NamedSharding(mesh, tensor.spec), tree[name].ndim), name
    folder = save(tmp_path / "run", config, *made_state(config, mesh))
    assert_warm(train.initial_state(config, mesh_of(), str(folder), "adam", {}), saved[1])


def test_without_moments_the_remedy_is_named(saved, tmp_path):
    """A stage that starts with zeros for moments after an import, which has none, without a word."""
    copy = shutil.copytree(saved[0], tmp_path / "checkpoints" / str(STEP))
    shutil.rmtree(copy / "opt_state")
    with pytest.raises(ValueError, match="holds no moments; fix: --init-state params"):
        train.initial_state(config_of(tmp_path), mesh_of(), str(copy), "adam", {})


def test_a_start_that_convert_once_prepared(saved, tmp_path):
    """Checkpoints of the former convert.py stage2-init (step 0, an empty window, meta["stage2_init"]) that nobody can use
    any more, or that are resumed as if they were a run."""
    config, (params, state) = config_of(tmp_path), saved[1]
    empty = {name: np.zeros_like(getattr(state, name)) for name in WINDOW}
    prepared = save(tmp_path / "warm", config, params, state._replace(**empty), 0, stage2_init=True,
                    source={"format": "checkpoint", "path": str(saved[0]), "step": STEP})  # fmt: skip
    assert_warm(train.initial_state(config, mesh_of(), str(tmp_path / "warm"), "adam", {}), saved[1])
    with pytest.raises(ValueError, match="is the start of a stage, not a run; fix: .*--init-state adam"):
        check_same_run(read_meta(prepared), config, {}, prepared, [])


def test_a_flipped_bit_in_the_moments(saved, tmp_path):
    """Moments that are read as other numbers: the arrays have no checksum of their own, meta has."""
    copy = shutil.copytree(saved[0], tmp_path / "checkpoints" / str(STEP))
    path = copy / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["checksums"]["opt_state"][".nu['wq']"] ^= 1 << 20
    path.write_text(json.dumps(meta))
    with pytest.raises(RunFailed, match="nu.*'wq'"):
        train.initial_state(config_of(tmp_path), mesh_of(), str(copy), "adam", {})


def test_the_first_update_uses_the_moments(saved, tmp_path):
    """Moments that are restored and then not used: the first update of the stage has to be Adam's next one."""
    config = config_of(tmp_path)
    state = train.initial_state(config, mesh_of(), str(saved[0]), "adam", {})
    grads = jax.tree.map(lambda x: 0.1 * x, state.params)
    numbers = {"loss": np.float32(2), "grad_norm": np.float32(0.5), "step": np.int32(1)}
    update = jax.jit(partial(train.optimizer(config).update, **numbers))
    _, after = update(grads, state.opt_state, state.params)
    beta1 = config.optim.beta1
    mu = beta1 * np.asarray(saved[1][1].mu["wq"]) + (1 - beta1) * np.asarray(grads["wq"])
    np.testing.assert_allclose(after.mu["wq"], mu, rtol=1e-5, atol=1e-7)
    assert int(after.count) == COUNT + 1 and int(after.recorded) == 1
