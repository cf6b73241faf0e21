"""tools/average.py."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import average
import harness
import jax
import numpy as np
import pytest
from harness import REPO, House, text_checkpoint
from safetensors.numpy import load_file

import convert
import data
import evaluate
import model
import optim
import processes
import sample
import train
from checkpoint import (
    FORMAT_VERSION,
    Checkpoints,
    check_same_run,
    checksums,
    find_checkpoint,
    read_meta,
    restore_item,
)
from config import Config, assemble_config, param_shapes, science_dict, shardings
from vocabulary import training_data

COUNTS = (9, 12, 13)  # Adam's, which a skipped step leaves alone


def mesh_of(devices: int = 1):
    auto = (jax.sharding.AxisType.Auto,) * 4
    return jax.make_mesh((1, devices, 1, 1), model.AXES, devices=jax.devices()[:devices], axis_types=auto)


def config_of(root: Path, **model_keys) -> Config:
    science = harness.tiny_config(root)
    science["model"] |= {"n_kv_heads": 2} | model_keys
    return assemble_config(science, "test", "cpu", [])


def save(run_dir: Path, seed: int, devices: int = 1, about: dict | None = None, **model_keys) -> dict[str, dict]:
    """RUN/checkpoints/SEED with numbers of many sizes, on a mesh of `devices`; returns its trees of arrays."""
    c, rng, mesh = config_of(run_dir.parent, **model_keys), np.random.default_rng(seed), mesh_of(devices)

    def drawn() -> dict[str, np.ndarray]:
        shapes = {name: t.shape for name, t in model.ledger(c.model).items()}
        return {
            name: (rng.standard_normal(s) * 10.0 ** rng.integers(-9, 3, s)).astype(np.float32)
            for name, s in shapes.items()
        }

    trees = {"params": drawn(), "mu": drawn(), "nu": {name: np.square(x) for name, x in drawn().items()}}
    window = {name: rng.random(c.optim.skip_window, np.float32) for name in ("losses", "grad_norms")}
    counts = {"count": np.int32(COUNTS[seed]), "recorded": np.int32(5), "nonfinite_in_a_row": np.int32(2)}
    state = optim.SkipStepState(mu=trees["mu"], nu=trees["nu"], skipped=np.bool_(True), **counts, **window)
    params, state = jax.device_put((trees["params"], state), shardings(mesh, train.state_specs(c)))
    meta = {
        "format_version": FORMAT_VERSION, "step": seed, "instances_seen": seed * 8, "tokens_seen": seed * 8 * 32,
        "items": ["params", "opt_state", "meta"], "data": {"sequence_length": 32} | (about or {}), "config": science_dict(c),
        "checksums": {"params": checksums(params), "opt_state": checksums(state)},
    }  # fmt: skip
    checkpoints = Checkpoints(run_dir / "checkpoints", None)
    checkpoints.save(seed, params, state, meta)
    checkpoints.close()
    return trees


def run(capsys, *arguments, expect: int = 0) -> tuple[dict | None, str]:
    capsys.readouterr()
    code = average.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == expect, err
    return json.loads(out) if out else None, err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, two of one run and one of another that a mesh of eight devices has written; their numbers."""
    root = tmp_path_factory.mktemp("saved")
    trees = [save(root / "a", 0), save(root / "a", 1), save(root / "b", 2, devices=8)]
    return [root / "a" / "checkpoints" / "0", root / "a", root / "b"], trees


def numpy_mean(trees: list[dict], kind: str) -> dict[str, bytes]:
    named = {name: np.stack([tree[kind][name] for tree in trees]) for name in trees[0][kind]}
    return {name: np.mean(x, axis=0, dtype=np.float32).tobytes() for name, x in named.items()}


@pytest.mark.parametrize("devices", [1, 4])
def test_the_mean_to_the_bit(saved, tmp_path, capsys, devices):
    """A mean of other numbers than numpy's: a sum in bf16, a weight that is not 1 / n, a source left out or counted twice,
    a layer or rows of the vocabulary in another place, moments that are one source's; read by train.py's own restore."""
    paths, trees = saved
    report, _ = run(capsys, *paths, "--moments", "--out", tmp_path / "mean")
    folder, mesh, c = find_checkpoint(str(tmp_path / "mean")), mesh_of(devices), config_of(tmp_path)
    assert report["checkpoint"] == str(folder) and [s["step"] for s in report["averaged"]] == [0, 1, 2]
    params = restore_item(folder, "params", param_shapes(c, mesh))
    state = restore_item(folder, "opt_state", train.state_shapes(c, mesh)[1])
    for kind, tree in (("params", params), ("mu", state.mu), ("nu", state.nu)):
        assert {name: np.asarray(x).tobytes() for name, x in tree.items()} == numpy_mean(trees, kind), kind
    assert int(state.count) == 11  # of 9, 12 and 13
    rest = [getattr(state, name) for name in ("losses", "grad_norms", "recorded", "nonfinite_in_a_row", "skipped")]
    assert not any(np.any(np.asarray(x)) for x in rest)
    assert read_meta(folder)["checksums"] == {"params": checksums(params), "opt_state": checksums(state)}


def test_it_is_what_orbax_leaves(saved, tmp_path, capsys):
    """A store that today's Orbax happens to read but that is not what it writes: files, metadata and array headers."""
    paths, _ = saved
    run(capsys, *paths, "--moments", "--out", tmp_path / "mean")
    theirs, ours = paths[0], find_checkpoint(str(tmp_path / "mean"))

    def arrays(item: Path) -> dict:
        store = convert.ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
        keys = [k for k in store.list().result() if k.endswith(b"/.zarray")]
        return {k.decode(): json.loads(store.read(k).result().value) | {"chunks": None} for k in keys}

    for item in ("params", "opt_state"):
        saved_by, made = (json.loads((p / item / "_METADATA").read_text()) for p in (theirs, ours))
        assert saved_by["tree_metadata"].keys() == made["tree_metadata"].keys()
        assert saved_by == made and arrays(theirs / item) == arrays(ours / item)
    one, two = (json.loads((p / "_CHECKPOINT_METADATA").read_text()) for p in (theirs, ours))
    assert one["item_handlers"] == two["item_handlers"]


def test_every_command_opens_it(tmp_path, capsys):
    """An average that sample.py, convert.py or evaluate.py cannot open or find the tokenizer of, or read as other numbers."""
    sources = [text_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    run(capsys, *sources, "--out", tmp_path / "mean")
    for source in (*sources, tmp_path / "mean"):
        name = source.parent.name if source.name == "run" else "mean"
        assert convert.main(["to-hf", str(source), str(tmp_path / "hf" / name)]) == 0
    one, two, mean = (load_file(tmp_path / "hf" / name / "model.safetensors") for name in ("one", "two", "mean"))
    assert {k: x.tobytes() for k, x in mean.items()} == {k: ((one[k] + two[k]) / np.float32(2)).tobytes() for k in one}
    assert (tmp_path / "hf" / "mean" / "tokenizer.json").is_file()
    capsys.readouterr()
    argv = ["--prompt", "def main(", "--tokens", "5", "--temperature", "0", "--hardware", "cpu", "--json"]
    assert sample.main([str(tmp_path / "mean"), *argv]) == 0
    assert json.loads(capsys.readouterr().out)
    index = ["--index", str(tmp_path / "one" / "train.json"), "--batch", "8", "--on-training-data"]
    assert evaluate.main(["loss", str(tmp_path / "mean"), *index, "--hardware", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heldout"]["all"]["ce"] > 1


def test_a_stage_starts_from_it(saved, tmp_path, capsys):
    """A next stage that gets other moments than the average's, or train.py --run-dir that goes on with the average as if
    it were a run; and an average without moments that does not say so."""
    paths, trees = saved
    for name, flags in (("mean", ["--moments"]), ("params", [])):
        run(capsys, *paths, *flags, "--out", tmp_path / name)
    c = config_of(tmp_path)
    state = train.initial_state(c, mesh_of(2), str(tmp_path / "mean"), "adam", {})
    assert (state.step, int(state.opt_state.count)) == (0, 11)
    assert {name: np.asarray(x).tobytes() for name, x in state.opt_state.nu.items()} == numpy_mean(trees, "nu")
    for name, words in (("mean", "is the start of a stage, not a run"), ("params", "holds no optimizer state")):
        folder = find_checkpoint(str(tmp_path / name))
        with pytest.raises(ValueError, match=words):
            check_same_run(read_meta(folder), c, {}, folder, [])
    with pytest.raises(ValueError, match="holds no moments; fix: --init-state params"):
        train.initial_state(c, mesh_of(), str(tmp_path / "params"), "adam", {})


def test_meta_names_the_sources(saved, tmp_path, capsys):
    """A model of which nobody can tell any more what it is made of; also an average of averages."""
    paths, _ = saved
    run(capsys, paths[0], paths[2], "--out", tmp_path / "mean")
    run(capsys, tmp_path / "mean", paths[1], "--out", tmp_path / "again")
    meta = read_meta(find_checkpoint(str(tmp_path / "again")))
    assert [s["path"] for s in meta["averaged"]] == [
        str(find_checkpoint(str(p))) for p in (tmp_path / "mean", paths[1])
    ]
    assert [s["step"] for s in meta["averaged"]] == [0, 1]
    assert [s["step"] for s in meta["averaged"][0]["averaged"]] == [0, 2]
    assert meta["averaged"][1]["config"]["run"]["name"] == "tiny" and meta["items"] == ["params", "meta"]
    assert (meta["step"], meta["tokens_seen"]) == (0, 0)


def test_held_out_data_is_compared_with_the_data_of_all_sources(tmp_path, capsys):
    """Held-out text that the second of two runs was trained on, and that passes for unseen."""
    House(tmp_path)
    indices = {name: data.load_index(tmp_path / f"{name}.json") for name in ("train", "heldout")}
    for seed, (name, index) in enumerate(indices.items()):
        about = {"fingerprint": index.fingerprint, "index_path": str(tmp_path / f"{name}.json")}
        save(tmp_path / name / "run", seed, about=about)
    run(capsys, tmp_path / "train" / "run", tmp_path / "heldout" / "run", "--out", tmp_path / "mean")
    folder = find_checkpoint(str(tmp_path / "mean"))
    known = training_data(folder, read_meta(folder))
    assert [known.trained_on(index) for index in indices.values()] == [2, 2]


@pytest.fixture
def mistakes(saved, tmp_path):
    """name -> what is given, and what the one line has to say."""
    paths, _ = saved
    save(tmp_path / "yarn", 1, yarn={"factor": 8.0, "original_length": 8, "beta_fast": 32.0, "beta_slow": 1.0})
    save(tmp_path / "heads", 1, n_heads=2, n_kv_heads=1, head_dim=24)  # the same shapes
    for name, tokenizer in (("words", "sha256:1"), ("others", "sha256:2")):
        save(tmp_path / name, 1, about={"vocabulary": {"tokenizer": tokenizer, "vocab_size": 97, "eos_id": 0}})
    shutil.copytree(paths[2], tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "checkpoints" / "2" / "opt_state")
    (tmp_path / "there").mkdir()
    out = ["--out", tmp_path / "mean"]
    return {
        "one": ([paths[0], *out], r"CKPT: got 1 checkpoint, expected two or more; fix: "),
        "twice": ([paths[1], paths[2], paths[1] / "checkpoints" / "1", *out], r"got \S+/a/checkpoints/1 twice, expected"),
        "another RoPE": ([paths[1], tmp_path / "yarn", *out], r"yarn: model\.yarn\.\w+: got \S+, expected None as in \S+/a; fix"),
        "other heads": ([paths[1], tmp_path / "heads", *out], r"heads: model\.head_dim: got 24, expected 12 as in"),
        "another tokenizer": ([tmp_path / "words", tmp_path / "others", *out], "vocabulary: tokenizer: got sha256:2, expected"),
        "no moments": ([paths[1], tmp_path / "bare", "--moments", *out], r"bare: got no optimizer state, expected moments; fix"),
        "there": ([paths[1], paths[2], "--out", tmp_path / "there"], "got 'something that exists', expected a name that is"),
        "absent": ([paths[1], tmp_path / "nothing", *out], "no checkpoint found"),
    }  # fmt: skip


def test_mistakes_are_refused(mistakes, tmp_path, capsys):
    """A mean of one checkpoint, of different models that have the same shapes, of different tokenizers, or over something
    that exists; a mistake that is met after minutes of work, or that leaves half a folder."""
    with processes.sole_writer(tmp_path / "mean"):  # another average is being made there
        _, err = run(capsys, *mistakes["absent"][0][:1], tmp_path / "words", *mistakes["absent"][0][2:], expect=1)
        assert "mean: is being written by process" in err
    before = sorted(tmp_path.iterdir())
    for name, (arguments, words) in mistakes.items():
        _, err = run(capsys, *arguments, expect=2)
        assert re.search(words, err) and err.count("\n") == 1, (name, err)
    assert [p for p in sorted(tmp_path.iterdir()) if not p.name.endswith(".lock")] == before


@pytest.mark.parametrize(("item", "leaf"), [("params", "['w_up']"), ("opt_state", ".nu['embed']")])
def test_a_damaged_source_is_named_and_nothing_is_left(saved, tmp_path, capsys, item, leaf):
    """Numbers that are not those that were saved, and that go into the mean: the arrays have no checksum of their own."""
    copy = shutil.copytree(saved[0][2], tmp_path / "copy")
    meta = copy / "checkpoints" / "2" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    content["checksums"][item][leaf] ^= 1 << 20
    meta.write_text(json.dumps(content))
    _, err = run(capsys, saved[0][1], copy, "--moments", "--out", tmp_path / "mean", expect=1)
    assert f"copy/checkpoints/2: damaged: item {item!r}: {leaf}" in err
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == ["copy"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory in /proc")
def test_memory_stays_below_a_checkpoint(tmp_path):
    """A mean that reads its sources whole: three of 0.4 GB each, written here first."""
    c = config_of(tmp_path, n_layers=40, d_model=512, d_ff=1024, n_heads=8, n_kv_heads=8, head_dim=64)
    rng, paths = np.random.default_rng(0), [tmp_path / name for name in "abc"]
    for path in paths:
        item = path / "checkpoints" / "1" / "params"
        item.mkdir(parents=True)
        leaves = convert.OrbaxLeaves(item)
        leaves.create(convert.param_leaves(c.model), convert.chunk_shapes(c.model))
        for piece in convert.pieces(c.model):
            leaves.write(piece.leaf, piece.at, rng.random(piece.shape, np.float32))
        leaves.flush()
        meta = {"format_version": FORMAT_VERSION, "step": 1, "instances_seen": 8, "items": ["params", "meta"]}
        meta |= {"data": {"sequence_length": 32}, "config": science_dict(c)}
        convert.finish_step(path / "checkpoints" / "1", meta)
    script = """
import re, sys
sys.path[:0] = [".", "tools"]
import average
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = peak()
assert average.main([*sys.argv[1:4], "--out", sys.argv[4]]) == 0
print("GREW", peak() - before)
"""
    command = [sys.executable, "-c", script, *map(str, paths), str(tmp_path / "mean")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 4 * model.parameter_count(c.model) > 400e6
    assert int(done.stdout.split("GREW")[1]) < 350  # IN_FLIGHT of writes, and a matrix of each source
