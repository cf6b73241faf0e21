"""config.py: wrong keys, values and files are one line; sizes, settings of JAX, the dry run."""

import dataclasses
import fnmatch
import glob
import importlib.util
import json
import os
import re
import shutil
import types

import jax
import numpy as np
import pytest
import yaml
from harness import (
    BATCH,
    REPO,
    SEQUENCE,
    STEPS,
    assert_same_checkpoint,
    refused,
    schedule_of,
    use_devices,
)

import config
import model
import processes
import train
from checkpoint import read_meta
from config import load_config, make_mesh, pin_settings


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optim.peak_rl=1", "optim.peak_rl: unknown key; did you mean 'peak_lr'?"),
        ("optimizer.peak_lr=1", "optimizer.peak_lr: unknown key; did you mean 'optim'?"),
        ("run.extra=1", "run.extra: unknown key"),
        ("optim.peak_lr=fast", "optim.peak_lr: got 'fast' (str), expected a number"),
        ("optim.peak_lr=", "optim.peak_lr: got None"),
        ("run.steps=10.5", "run.steps: got 10.5 (float), expected a whole number"),
        ("run.steps=true", "run.steps: got True (bool), expected a whole number"),
        ("run.steps=0", "run.steps: got 0"),
        ("run.steps=3000000000", "run.steps: got 3000000000, expected 1 to 2^31 - 1"),
        ("run.steps=41", "run.steps: got 41, expected at most schedule.0.total_steps 40"),
        ("run.seed=-1", "run.seed: got -1, expected 0 to 2^32 - 1"),
        ("run.seed=4294967296", "run.seed: got 4294967296, expected 0 to 2^32 - 1"),
        ("run.steps", "--set run.steps: got no '='"),
        ("run=5", "run: got 5, expected the keys"),
        ("run.steps.more=5", "--set run.steps.more: run.steps is 16, it has no keys"),
        ("schedule.1.until=5", "--set schedule.1: unknown key"),
        ("schedule.0.until=5", "schedule: until of the last piece: got 5, expected null"),
        ("run.steps={a: 1, a: 2}", "key 'a' stands twice"),
        ("run.steps=[1", "not valid YAML"),
        ("data.repetition_filter=on", "data.repetition_filter: got 'on' (str), expected true or false"),
        ("data.seed=12:30", "data.seed: got '12:30' (str), expected a whole number"),
        ("run.name=../x", "run.name: got '../x'"),
        ("data.order=random", "data.order: got 'random'"),
        ("data.order=sequential", "data.order: got sequential"),
        ("model.window=64", "model.window: got 64, expected at most data.sequence_length 32"),
        ("data.sequence_length=16", "sequence_length: got 16 in the config, 32 in"),
        ("data.global_batch=162", "161 instances of 32 tokens, expected at least one global batch of 162"),
        ("model.vocab_size=96", "got vocab_size 97, expected at most model.vocab_size 96"),
        ("data.index=nowhere.json", "nowhere.json: got no such file, expected an index"),
        ("data.index=gs://bucket/train.json", "got a URL, expected a local path"),
        ("run.eval_index=nowhere.json", "nowhere.json: got no such file, expected an index"),
        ("remat=[x, nothing]", "remat: got 'nothing', expected 'all', or names out of"),
        ("remat=none", "remat: got 'none', expected all, a list of names"),
        ("remat={1: [x]}", "remat: got entries for [1] sequences, expected one for 2 or more"),
        ("microbatch=0", "microbatch: got 0"),
        ("remat=[1]", "remat: got 1, expected 'all', or names out of"),
        ("loader_workers=2147483648", "loader_workers: got 2147483648, expected 0 to 1024"),
        ("model.norm_eps=-1", "model.norm_eps: got -1.0, expected a positive number"),
        ("loss.z_loss=-1", "loss.z_loss: got -1.0, expected 0 or more"),
        ("xla_flags.xla_cpu_prefer_vector_width=", "xla_flags: "),
        ("attention=flash", "attention: got 'flash', expected one of"),
        ("attention=[]", "attention: got [], none of which"),
        ("attention=[cudnn]", "attention: got cudnn, whose gradients differ from run to run"),
        ("mesh.fsdp=3", "mesh: got {'data': 1, 'fsdp': 3"),
        ("xla_flags.xla_no_such_flag=1", "xla_flags: "),
    ],
)
def test_wrong_config_is_one_line(house, main, tmp_path, capsys, override, named):
    """A typo or a wrong type that is ignored, converted in secret, or shown as a traceback in step 1."""
    assert named in refused(capsys, house.argv(tmp_path / "run", override))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("devices", "override", "named"),
    [
        (4, "data.global_batch=10", "global batch: got 10, expected a multiple of data x fsdp = 4"),
        (
            8,
            "mesh={data: 1, fsdp: 1, context: 1, tensor: 8}",
            "n_heads: got 4, expected a multiple of the mesh's tensor",
        ),
        (3, "mesh={data: 1, fsdp: 1, context: 3, tensor: 1}", "sequence_length: got 32, expected a multiple of"),
        (4, "mesh={data: -1, fsdp: -1, context: 1, tensor: 1}", "one of which may be -1"),
        (4, "mesh={data: 2, fsdp: 1, context: 1, tensor: 1}", "for 4 devices, expected sizes whose product is 4"),
    ],
)
def test_sizes_that_cannot_be_cut(house, main, tmp_path, capsys, monkeypatch, devices, override, named):
    """An obscure shape error after minutes of compiling."""
    use_devices(monkeypatch, devices)
    assert named in refused(capsys, house.argv(tmp_path / "run", override))


DETERMINISTIC = "xla_flags={xla_gpu_deterministic_ops: true}"


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        ("stage3", (), "data.document_mask True"),
        ("stage1", ("mesh.context=2",), "mesh.context 2"),
        ("stage1", ("model.compute_dtype=float32",), "model.compute_dtype float32"),
        ("stage1_hd256", (), "model.head_dim 256"),
    ],
)
def test_what_cudnn_cannot_compute(capsys, recipe, overrides, named):
    """A recipe that is computed wrongly, or refused after minutes; another attention taken without a word."""
    with pytest.raises(
        ValueError, match=f"attention: got cudnn, which cannot compute {named}; fix: attention=blockwise"
    ):
        load_config(recipe, "gpu", [DETERMINISTIC, "attention=cudnn", *overrides])
    assert capsys.readouterr().err == ""
    c = load_config(recipe, "gpu", [DETERMINISTIC, "attention=[cudnn, blockwise]", *overrides])
    assert c.hardware.attention == "blockwise"
    assert capsys.readouterr().err == f"attention: blockwise, since cudnn cannot compute {named}\n"
    with pytest.raises(ValueError, match=f"none of which can compute {named}"):
        load_config(recipe, "gpu", [DETERMINISTIC, "attention=[cudnn]", *overrides])


@pytest.mark.parametrize("flag", ["{}", "{xla_gpu_deterministic_ops: false}"])
@pytest.mark.parametrize("attention", ["cudnn", "[blockwise, cudnn]"])
def test_cudnn_adds_up_in_one_order(flag, attention):
    """Law 2: gradients whose last bits change from run to run, so that no resumed run is the same."""
    with pytest.raises(ValueError, match="differ from run to run .* fix: xla_flags.xla_gpu_deterministic_ops=true"):
        load_config("stage1", "gpu", [f"xla_flags={flag}", f"attention={attention}"])
    c = load_config("stage1", "gpu", [DETERMINISTIC, "attention=[cudnn, blockwise]"])
    assert c.hardware.attention == "cudnn"  # the record of the run names what it was computed with


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA GeForce RTX 4090", "gpu", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "gpu", "gpu"),  # two thirds of the memory
        ("TPU v5", "tpu", "v5p"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_hardware_of_a_device(monkeypatch, kind, platform, expected):
    """A GPU that gets the file of another, whose micro-batch does not fit its memory; a file that is not there."""
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind, platform=platform)])
    assert config.detect_hardware() == expected
    assert (REPO / "configs" / "hardware" / f"{expected}.yaml").is_file()


def test_wrong_files_are_one_line(house, main, tmp_path, capsys):
    """A key in the file of the other kind, twice, or missing; a config that is not there."""
    good = yaml.safe_load(house.config.read_text())

    def science(content) -> list[str]:
        path = tmp_path / "science.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return ["--config", str(path), "--hardware", "cpu", "--run-dir", str(tmp_path / "run")]

    text = house.config.read_text()
    for content, named in (
        (good | {"microbatch": 4}, "microbatch: stands in the config file, belongs in the other one"),
        (good | {"modle": 4}, "modle: unknown key; did you mean 'model'?"),
        ({k: v for k, v in good.items() if k != "loss"}, "loss: missing section"),
        (good | {"loss": {"z_loss": 1e-5}}, "loss.filtered_in_divisor: missing"),
        (good | {"loss": None}, "loss: got None, expected the keys"),
        (good | {"schedule": good["schedule"][0]}, "expected a list"),
        (text + "loss: {z_loss: 1e-5}\n", "key 'loss' stands twice"),
        (text.replace("seed: 0", "seed: 0\n  seed: 1"), "key 'seed' stands twice"),
        ("just text", "expected a mapping of sections"),
        ("a: [", "not valid YAML"),
    ):
        assert named in refused(capsys, science(content))
    machine = tmp_path / "machine.yaml"
    machine.write_text((REPO / "configs" / "hardware" / "cpu.yaml").read_text() + "optim: {peak_lr: 1}\n")
    named = "optim: stands in the hardware file, belongs in the other one"
    assert named in refused(capsys, ["--config", str(house.config), "--hardware", str(machine)])
    err = refused(capsys, ["--config", "stage9"])
    assert "config 'stage9': not found" in err and "sft_think, stage1, " in err
    assert "'tpu9': not found" in refused(capsys, ["--config", str(house.config), "--hardware", "tpu9"])


def test_numbers_as_people_write_them(house):
    """PyYAML reads 3e-4 and 1e6 as text."""
    written = {"optim.peak_lr": ("3e-4", 3e-4), "optim.eps": ("1e-8", 1e-8), "model.rope_theta": ("5e5", 5e5),
               "loss.z_loss": ("1E-5", 1e-5), "optim.weight_decay": (".1", 0.1), "optim.skip_sigma": ("6", 6.0)}  # fmt: skip
    c = load_config(str(house.config), "cpu", [f"{key}={text}" for key, (text, _) in written.items()])
    for key, (_, value) in written.items():
        section, name = key.split(".")
        got = getattr(getattr(c, section), name)
        assert got == value and type(got) is float
    assert processes.parse_yaml("{a: true, b: null, c: ~, d: no, e: 017x, f: -3, g: 2., h: 017, i: 3e-4, j: 12:30}", "text") == {
        "a": True, "b": None, "c": None, "d": "no", "e": "017x", "f": -3, "g": 2.0, "h": 17, "i": 3e-4, "j": "12:30"
    }  # fmt: skip


def test_dry_run_checks_and_writes_nothing(house, main, tmp_path, capsys):
    """A dry run that passes where the run would not, or that leaves a folder behind."""
    assert main(tmp_path / "run", extra=("--dry-run",)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens"] == STEPS * BATCH * SEQUENCE and plan["sequences_a_device"] == BATCH
    assert plan["learning_rate_first_last"] == pytest.approx([schedule_of(40)(1), schedule_of(40)(STEPS)])
    for override in ("run.eval_index=nowhere.json", "data.global_batch=162", "xla_flags.nothing=1"):
        refused(capsys, house.argv(tmp_path / "run", override, extra=("--dry-run",)))
    assert not (tmp_path / "run").exists()


def test_largest_seed(house):
    """OverflowError in the first step for a seed that --dry-run lets pass; another seed than the one that was asked for."""
    c = load_config(str(house.config), "cpu", ["run.seed=4294967295"])
    params, _ = train.init_state(c, make_mesh(dataclasses.replace(c)))
    key = jax.random.key(np.uint32(4294967295))
    assert jax.random.key_data(key).tolist() == [0, 4294967295]
    other = model.init_params(c.model, np.uint32(4294967295))
    assert all(np.array_equal(params[name], other[name]) for name in params)


def test_environment_that_changes_nothing(house, straight, tmp_path):
    """Random numbers, precision or dtypes that variables of JAX change, so that a seed means other weights; a screen of
    libtpu's errors on a machine without a TPU; "leaked shared_memory objects" of the loader's workers at the end."""
    env = {"JAX_PLATFORMS": "", "JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0", "JAX_ENABLE_X64": "1",
           "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}  # fmt: skip
    before = set(os.listdir("/dev/shm"))
    _, err = house.run(tmp_path, "run.steps=4", "loader_workers=1", env=env.items())
    assert_same_checkpoint(tmp_path, straight, step=4)
    for name in list(env)[1:]:
        assert re.search(f"^{name}=.* would change the numbers and is not used$", err, re.M), err
    ours = "JAX_|no checkpoint|start: new|[0-9,]+ parameters; mesh|step [0-9]+"
    assert [line for line in err.splitlines() if not re.match(ours, line)] == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}  # Python's arrays
    assert read_meta(tmp_path / "checkpoints" / "4")["environment"] == {}


def test_environment_that_changed_is_said(house, straight, tmp_path):
    """Flags of the compiler, or another version of jax, that change the last bits in the middle of a run."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    path = run_dir / "checkpoints" / "16" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["versions"]["jaxlib"] = "0.9.9"
    path.write_text(json.dumps(meta))
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=1"
    _, err = house.run(run_dir, "run.steps=17", "run.eval_index=null", env=[("XLA_FLAGS", flags)])
    assert (
        "jaxlib changes from 0.9.9 to " in err and "XLA_FLAGS changes from None to --xla_cpu_enable_fast_math=" in err
    )


@pytest.mark.parametrize(
    "there, chips, chosen, expected",
    [
        ([], 0, None, ["cpu"]),
        (["/dev/nvidiactl"], 0, None, []),
        (["/dev/kfd"], 0, None, []),
        (["/dev/vfio/0"], 0, None, []),
        ([], 4, None, []),
        ([], 0, "cpu,tpu", []),
    ],
)
def test_libtpu_is_left_alone_only_where_there_is_nothing_else(monkeypatch, there, chips, chosen, expected):
    """A TPU or a GPU that is not found any more; float32 that a GPU rounds to TF32, with another loss."""
    updates, variables = [], {}
    monkeypatch.setattr(config.os, "environ", variables)
    settings = types.SimpleNamespace(jax_platforms=chosen, update=lambda name, value: updates.append(value))
    monkeypatch.setattr(jax, "config", settings)
    monkeypatch.setattr(config, "PINNED", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(there, pattern))
    monkeypatch.setattr(config.hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (chips, None))
    pin_settings()
    assert updates == expected
    assert variables == ({"NVIDIA_TF32_OVERRIDE": "0"} if "/dev/nvidiactl" in there else {})
