"""checkpoint.py: damaged steps are noticed and set aside, names of folders, casts, saves that are not whole."""

import asyncio
import importlib.util
import json
import os
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from harness import (
    BATCH,
    STEPS,
    assert_same_checkpoint,
    flip,
    largest,
    replace_text,
    restore,
    rows,
    steps_in,
    truncate,
)
from orbax.checkpoint._src.asyncio_utils import run_sync

import checkpoint
import model
import train
from checkpoint import FORMAT_VERSION, Checkpoints, DamagedCheckpoint, LiteralPath, check_whole, read_item, read_meta
from config import load_config, make_mesh
from processes import RunFailed

DAMAGE = {
    "empty directory": (lambda s: (shutil.rmtree(s), s.mkdir()), "meta"),
    "no meta": (lambda s: shutil.rmtree(s / "meta"), "meta"),
    "no params": (lambda s: shutil.rmtree(s / "params"), "params"),
    "no opt_state": (lambda s: shutil.rmtree(s / "opt_state"), "opt_state"),
    "flipped bit in the position": (
        lambda s: replace_text(s / "meta" / "metadata", '"instances_seen": 128', '"instances_seen": 120'),
        "meta",
    ),
    "truncated meta": (lambda s: truncate(s / "meta" / "metadata"), "meta"),
    "truncated params": (lambda s: truncate(largest(s / "params")), ""),
    "truncated opt_state": (lambda s: truncate(largest(s / "opt_state")), ""),
    "flipped bit in opt_state": (lambda s: flip(largest(s / "opt_state")), ""),
    "params without a data file": (lambda s: largest(s / "params" / "ocdbt.process_0").unlink(), ""),
    "params without their tree": (lambda s: (s / "params" / "_METADATA").unlink(), "params"),
    "params with half a tree": (lambda s: truncate(s / "params" / "_METADATA"), "params"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_set_aside(main, straight, tmp_path, capsys, kind):
    """Orbax's "latest": a step that cannot be read which stops the run, is read in part, or is deleted. Reads
    that outlive the loop they report to: tracebacks, and once a crash."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    damage, named = DAMAGE[kind]
    newest = run_dir / "checkpoints" / "16"
    damage(newest)
    files = sorted(p.name for p in newest.rglob("*"))
    assert main(run_dir) == 0
    err = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged" in err and named in err and "Traceback" not in err
    assert f"resuming from {run_dir / 'checkpoints' / '12'}: {12 * BATCH} instances" in err
    assert steps_in(run_dir) == {"4", "8", "12", "16", "16.damaged"}
    assert sorted(p.name for p in (run_dir / "checkpoints" / "16.damaged").rglob("*")) == files
    assert [json.dumps(r) for r in rows(run_dir)] == [json.dumps(r) for r in rows(straight)]
    assert_same_checkpoint(run_dir, straight)


def tiny_state():
    params = {"embed": jnp.arange(12.0).reshape(3, 4), "wq": jnp.ones((2, 3, 5))}
    return params, optax.adam(0.1).init(params)[0]


ODD_NAMES = [
    "a b[1]#2%ü*?", "**", "[!a]", "-dash", "{a}$HOME;`x`", "new\nline", "'single\"double", "x~", "..x", " ", "s3:", "gs",
    "a:b|c", "%s%d%20", "1.orbax-checkpoint-tmp", "ocdbt.process_0", "n" * 200,
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_checkpoints_below_any_name(tmp_path, name):
    """A name that a library reads as a pattern, an address or a format: a checkpoint that is reported as saved and lacks
    its arrays, or lies elsewhere, or is never deleted; the leavings of another that was killed taken for one."""
    folder = tmp_path / name / "checkpoints"
    params, state = tiny_state()
    meta = {"format_version": FORMAT_VERSION, "step": 0, "instances_seen": 0, "data": {}, "config": {}}
    (folder / "3.orbax-checkpoint-tmp" / "params.orbax-checkpoint-tmp").mkdir(parents=True)
    for steps in ((1, 2), (3,)):
        checkpoints = Checkpoints(folder, 1)
        for step in steps:
            checkpoints.save(step, params, state._replace(mu=jax.tree.map(lambda x: x + step, params)), meta)  # noqa: B023
        checkpoints.close()
    assert [p.name for p in folder.iterdir()] == ["3"]
    assert read_meta(folder / "3") == meta
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for item, tree in (("params", params), ("opt_state", state._replace(mu=jax.tree.map(lambda x: x + 3, params)))):
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
        jax.tree.map(np.testing.assert_array_equal, read_item(folder / "3", item, target), tree)


def test_checkpoints_behind_a_link(tmp_path):
    """ "link/.." that one library takes for the folder above the link and another for the one above what it points to: the
    arrays of a checkpoint far from its metadata. A link is also the way out where a name is refused."""
    (tmp_path / "far" / "off\\").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "off\\")
    params, state = tiny_state()
    for folder in (tmp_path / "link" / ".." / "up", tmp_path / "link" / "down"):
        checkpoints = Checkpoints(folder, None)
        checkpoints.save(1, params, state, {})
        checkpoints.close()
    for folder in (tmp_path / "far" / "up", tmp_path / "far" / "off\\" / "down"):
        assert (folder / "1" / "params" / "manifest.ocdbt").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["far", "link"]


@pytest.mark.parametrize(
    "path, named",
    [
        ("back\\slash", "a backslash"),
        ("logs:/x", "ends in gs:"),
        ("logs:", "ends in gs:"),
        ("x.__lock/y", "ends in .__lock"),
        (os.fsdecode(b"caf\xe9"), "not UTF-8"),
        ("/gs/bucket/x", "called as a bucket"),
    ],
)
def test_paths_that_orbax_cannot_write(house, main, tmp_path, capsys, path, named):
    """A run of hours that meets at its first save, or never, that its checkpoints cannot lie there; arrays that are
    written into another folder (a backslash)."""
    assert main(tmp_path / path) == 2
    assert named in (err := capsys.readouterr().err.splitlines()[-1]) and "symbolic link" in err
    assert not list(tmp_path.rglob("checkpoints"))


def test_save_that_is_not_whole_is_no_checkpoint(tmp_path, monkeypatch):
    """A listing that does not show what the processes wrote (a name taken for a pattern, a file system that lags): an
    empty checkpoint that is reported as saved, for which the good one before it is deleted; several processes that wait
    20 minutes for each other before they say so."""
    params, state = tiny_state()
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, params, state, {})
    checkpoints.wait()
    monkeypatch.setattr(LiteralPath, "glob", lambda self, pattern: iter(()))
    checkpoints.save(2, params, state, {})
    monkeypatch.setattr(checkpoints.manager, "is_saving_in_progress", lambda: True)  # the others wait for this process
    with pytest.raises(RunFailed, match="/2: a checkpoint could not be written: item 'params' cannot be read: NOT_F"):
        checkpoints.wait()
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2.orbax-checkpoint-tmp"}


def test_chunk_that_is_missing_is_named(tmp_path):
    """A checkpoint without the part of one process: every leaf is listed, the numbers of some are not all there."""
    params, state = tiny_state()
    checkpoints = Checkpoints(tmp_path, None)
    checkpoints.save(1, params, state, {})
    checkpoints.close()
    check_whole(tmp_path / "1" / "params", params)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/1/params/"}}
    ts.KvStore.open(store).result().write("wq/0.0.0", None).result()
    with pytest.raises(DamagedCheckpoint, match="item 'params': wq: got 0 of 1 chunks"):
        check_whole(tmp_path / "1" / "params", params)


def test_reads_end_before_the_loop_they_report_to(monkeypatch):
    """What Orbax does at the first leaf that fails: a loop closed under the other reads, which crashed a process. Event
    loop policies, which warn from Python 3.14 on and are gone in 3.16."""
    asyncio.set_event_loop(None)  # Python's own policy is made at the first need
    for name in ("set_event_loop_policy", "get_event_loop_policy", "DefaultEventLoopPolicy"):
        monkeypatch.delattr(asyncio, name, raising=False)
    spec = importlib.util.spec_from_file_location("checkpoint_without_policies", checkpoint.__file__)
    later = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, later)
    spec.loader.exec_module(later)
    ended = []

    async def other_leaf():
        await asyncio.sleep(0.1)
        ended.append(True)

    async def damaged_leaf():
        raise ValueError("not a chunk")

    async def leaves():
        await asyncio.gather(damaged_leaf(), other_leaf())

    with pytest.raises(later.DamagedCheckpoint, match="not a chunk"):
        later.read_arrays(lambda: run_sync(leaves()))
    assert ended == [True]


def test_directory_that_was_never_saved_is_set_aside(main, straight, tmp_path, capsys):
    """Orbax takes an empty directory "18" for the newest step, and then refuses to save step 17."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    (run_dir / "checkpoints" / "18").mkdir()
    assert main(run_dir, "run.steps=17") == 0
    assert "checkpoints/18 is damaged" in capsys.readouterr().err
    assert steps_in(run_dir) == {"4", "8", "12", "16", "17", "18.damaged"}


def test_only_damaged_checkpoints(house, straight, tmp_path):
    """A run of weeks that starts from zero because its checkpoints cannot be read."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for step in ("4", "8", "12", "16"):
        truncate(largest(run_dir / "checkpoints" / step / "params"))
    for _ in range(2):  # the second start sees no step at all, and must not start from zero either
        out, err = house.run(run_dir, expect=1)
        assert "no usable checkpoint is left" in err and "16.damaged" in err and out == ""
        assert steps_in(run_dir) == {"4.damaged", "8.damaged", "12.damaged", "16.damaged"}
        assert rows(run_dir) == rows(straight)


def test_orbax_refusing_to_save_is_an_error(house, tmp_path):
    """Save() returns False below the newest step; hours without checkpoints."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", None)
    c = load_config(str(house.config), "cpu", [])
    params = model.init_params(c.model, 0)
    opt_state = train.optimizer(c).init(params)
    checkpoints.save(20, params, opt_state, {})
    checkpoints.wait()
    with pytest.raises(RunFailed, match="checkpoints/10: Orbax refused to save, newest step there: 20"):
        checkpoints.save(10, params, opt_state, {})
    checkpoints.close()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_other_dtype_is_refused(main, straight, tmp_path, capsys, item):
    """Orbax casts to what it is asked for without a word: bf16 weights, moments that lost their digits."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    folder = run_dir / "checkpoints" / "16" / item
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(folder)
        changed = tree if item == "params" else tree["nu"]
        changed["wq"] = changed["wq"].astype(jnp.bfloat16)
        shutil.rmtree(folder)
        checkpointer.save(folder, tree)
    capsys.readouterr()
    assert main(run_dir, "run.steps=18") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "wq" in err and "bfloat16" in err and "float32" in err and str(folder) in err
    assert steps_in(run_dir) == {"4", "8", "12", "16"}


def test_other_precision_of_the_computation_casts_nothing(house, main, straight, capsys):
    """Weights, moments or counters that are rounded to what the config computes in, without a word."""
    c = load_config(str(house.config), "cpu", ["model.compute_dtype=bfloat16"])
    checkpoints = Checkpoints(straight / "checkpoints", None)
    identity = read_meta(straight / "checkpoints" / str(STEPS))["data"]
    state = train.restore(c, make_mesh(c), checkpoints, identity, ["model.compute_dtype"])
    trees = state.params, state.opt_state
    assert state.step == STEPS and "model.compute_dtype changes from float32 to bfloat16" in capsys.readouterr().err
    saved = restore(straight)
    leaves = {
        item + jax.tree_util.keystr(path): np.asarray(x)
        for item, tree in zip(("params", "opt_state"), trees, strict=True)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for (name, x), (_, y) in zip(sorted(leaves.items()), sorted(saved.items()), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name
