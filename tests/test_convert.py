"""convert.py: bits survive both ways, logits equal transformers', `check` catches faults, nothing is left half done.

Dimensions are all different, key/value heads are fewer than heads, and norm weights are random: with ones, a norm in
the wrong place could pass. "HF" is a checkpoint that transformers itself made.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import harness
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
import yaml
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.modeling_rope_utils import _compute_yarn_parameters

import convert
import data
import model
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
from config import Config, assemble_config, build, param_shapes, science_dict, shardings, to_device
from processes import HERE, read_yaml
from vocabulary import find_tokenizer

REPO = HERE
SEQUENCE, VOCABULARY, BATCH = 32, 97, 8
YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}


def hf_name(leaf: str, layer: int) -> str:
    return convert.HF_NAMES[leaf][0].format(layer)


UPDATE = hf_name("w_up", 1)  # any tensor that the tests damage

# ------------------------------------------------------------------------------------------------------ checkpoints


def make_hf(folder: Path, dtype=torch.float32, yarn=False, layers=4, shard="1GB", head_dim=10, seed=0) -> Path:
    """A random OLMo 3 as transformers makes and writes it. head_dim 12 makes q_proj and o_proj square."""
    full = {"rope_type": "yarn", **YARN} if yarn else {"rope_type": "default"}
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": full | {"rope_theta": 5e5},
    }
    config = transformers.Olmo3Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=72, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=128, sliding_window=8, rope_parameters=rope,
        rms_norm_eps=1e-6, eos_token_id=0, pad_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = transformers.Olmo3ForCausalLM(config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand_like(p))
    made.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def tiny_config(root: Path) -> dict:
    """The same model as make_hf's, as a recipe."""
    c = harness.tiny_config(root)
    c["model"] |= {"d_model": 48, "n_kv_heads": 2, "head_dim": 10, "d_ff": 72, "init_std": 0.1}
    c["data"]["repetition_filter"] = False
    c["run"] |= {"steps": 4, "eval_index": None, "eval_every": 100}
    return c


def word_tokenizer() -> Tokenizer:
    words = [data.EOS, data.PAD] + [f"w{i}" for i in range(VOCABULARY - 2)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([data.EOS, data.PAD])
    return tokenizer


def process(*arguments, expect: int = 0, devices: int = 1, **environment) -> tuple[str, str]:
    """(stdout, stderr) of a Python process that has to end with `expect`."""
    env = os.environ | {
        "PYTHONPATH": str(REPO), "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **environment,
    }  # fmt: skip
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


class House:
    """A corpus with a tokenizer, a recipe, and a run of four steps that train.py made on one device."""

    def __init__(self, root: Path):
        self.root, rng = root, np.random.default_rng(0)
        tokens = rng.integers(2, VOCABULARY, SEQUENCE * 100).astype(np.uint32)
        (root / "tokens").mkdir()
        tokens.tofile(root / "tokens" / "part-00000.npy")
        word_tokenizer().save(str(root / "tokenizer.json"))
        files = [("web", root / "tokens" / "part-00000.npy")]
        index = data.build_index(
            files, root, SEQUENCE, tokenizer="tokenizer.json", vocab_size=VOCABULARY, eos_id=0, pad_id=1
        )
        data.write_index(index, root / "train.json")
        self.recipe = root / "tiny.yaml"
        self.recipe.write_text(yaml.safe_dump(tiny_config(root)))
        self.run = root / "run"
        self.train(self.run)

    def train(self, run_dir: Path, *extra, expect: int = 0) -> str:
        cache = ("--set", f"compilation_cache={self.root / 'xla'}")
        argv = ["--config", self.recipe, "--hardware", "cpu", "--run-dir", run_dir, *cache, *extra]
        return process(REPO / "train.py", *argv, expect=expect, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")[1]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Two checkpoints of transformers: fp32 with plain RoPE in one file, bf16 with YaRN, 8 layers and many shards."""
    root = tmp_path_factory.mktemp("hf")
    return {
        "plain": make_hf(root / "plain"),
        "yarn": make_hf(root / "yarn", torch.bfloat16, yarn=True, layers=8, shard="50KB"),
    }


@pytest.fixture(scope="module")
def imported(hf, tmp_path_factory):
    root = tmp_path_factory.mktemp("imported")
    for name, folder in hf.items():
        assert convert.main(["from-hf", str(folder), str(root / name)]) == 0
    return {name: root / name for name in hf}


def error_line(err: str) -> str:
    """The one line that says why; before it to-hf may have said that no tokenizer goes along."""
    *before, last = err.splitlines()
    assert all(line.startswith("no tokenizer goes with the weights") for line in before), err
    return last


def run(capsys, *arguments, expect: int = 0) -> tuple[dict | None, str]:
    """A verb in this process: (JSON of stdout, stderr)."""
    capsys.readouterr()
    code = convert.main([*(str(a) for a in arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == expect, err
    return json.loads(out) if out else None, err


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def bits(tree) -> dict[str, tuple]:
    return {name: (x.dtype.name, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tree.items()}


def mesh_of(devices: int):
    auto = (jax.sharding.AxisType.Auto,) * 4
    return jax.make_mesh((1, devices, 1, 1), model.AXES, devices=jax.devices()[:devices], axis_types=auto)


def restore(run_dir, devices: int = 1) -> tuple[dict, Config]:
    """Parameters through train.py's own machinery, in the model that the checkpoint's meta describes."""
    step_folder = find_checkpoint(str(run_dir))
    meta = read_meta(step_folder)
    c = assemble_config(meta["config"], str(step_folder), "cpu", ["model.compute_dtype=float32"])
    return restore_item(step_folder, "params", param_shapes(c, mesh_of(devices))), c


def our_logits(params, m: model.ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """model.logits on one device."""
    execution = model.Execution(model.dense_attention, remat=None, scan_unroll=1, loss_chunk=16)
    f = jax.shard_map(
        lambda params, tokens: model.logits(model.vary(params), model.vary(tokens), None, m, execution),
        mesh=mesh_of(1), in_specs=({n: t.spec for n, t in model.ledger(m).items()}, P()), out_specs=P(model.AXES),
    )  # fmt: skip
    return np.asarray(jax.jit(f)({name: np.asarray(x) for name, x in params.items()}, tokens))


def hf_logits(folder, tokens: np.ndarray) -> np.ndarray:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def some_tokens(length: int = 48) -> np.ndarray:
    return np.random.default_rng(5).integers(VOCABULARY, size=(2, length)).astype(np.int32)


def save_checkpoint(root: Path, run_dir: Path, devices: int, seed: int = 0, **model_keys) -> dict:
    """A checkpoint of random parameters as train.py saves it on a mesh of `devices`; returns the parameters."""
    science = tiny_config(root)
    science["model"] |= model_keys
    c = assemble_config(science, "test", "cpu", [])
    mesh = mesh_of(devices)
    params_to, state_to = shardings(mesh, train.state_specs(c))
    params = jax.jit(partial(model.init_params, c.model), out_shardings=params_to)(seed)
    params = {n: 1.3 * x if "norm" in n else x for n, x in params.items()}
    state = jax.jit(train.optimizer(c).init, out_shardings=state_to)(params)
    meta = {
        "format_version": FORMAT_VERSION, "step": 3, "instances_seen": 24, "tokens_seen": 24 * SEQUENCE,
        "data": {"sequence_length": SEQUENCE},
        "config": science_dict(c), "items": ["params", "opt_state", "meta"],
        "checksums": {"params": checksums(params), "opt_state": checksums(state)},
    }  # fmt: skip
    checkpoints = Checkpoints(run_dir / "checkpoints", None)
    checkpoints.save(3, params, state, meta)
    checkpoints.close()
    return params


# ---------------------------------------------------------------------------------------------- bits survive both ways


@pytest.mark.parametrize("name, dtype", [("plain", "float32"), ("yarn", "bfloat16")])
def test_hf_to_orbax_to_hf_is_bit_exact(hf, imported, tmp_path, capsys, name, dtype):
    """A tensor that is cast, transposed, swapped, cut or permuted on the way (fp32; bf16, GQA, YaRN, shards)."""
    out, _ = run(capsys, "to-hf", imported[name], tmp_path / "back", "--dtype", dtype, "--max-shard-bytes", 60000)
    assert len(out["files"]) > 1
    assert bits(tensors(tmp_path / "back")) == bits(tensors(hf[name]))
    names = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    size = sum(x.nbytes for x in tensors(hf[name]).values())
    assert set(names["weight_map"]) == set(tensors(hf[name])) and names["metadata"]["total_size"] == size
    assert all((tmp_path / "back" / f).stat().st_size < 62000 + 8192 for f in out["files"])


def test_float16_is_bit_exact_and_what_does_not_fit_is_refused(tmp_path, capsys):
    """fp16 read as bf16 (both are 16 bits), or a number beyond 65504 that becomes infinite without a word."""
    folder = make_hf(tmp_path / "hf", torch.float16)
    run(capsys, "from-hf", folder, tmp_path / "run")
    run(capsys, "to-hf", tmp_path / "run", tmp_path / "back", "--dtype", "float16")
    assert bits(tensors(tmp_path / "back")) == bits(tensors(folder))
    big = tensors(folder)
    big[UPDATE] = big[UPDATE].astype(np.float32) + np.float32(70000)
    save_file(big, folder / "model.safetensors", metadata={"format": "pt"})
    run(capsys, "from-hf", folder, tmp_path / "big")
    _, err = run(capsys, "to-hf", tmp_path / "big", tmp_path / "half", "--dtype", "float16", expect=1)
    assert UPDATE in err and "does not fit in float16" in err
    assert not (tmp_path / "half").exists() and not list(tmp_path.glob(".*"))


def test_below_odd_names(hf, tmp_path, capsys):
    """Arrays that are written into another folder, since a library reads the name of the right one otherwise."""
    (tmp_path / "far" / "off").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "off")
    for name in ("a b[1]#2%ü*?", "link/../up"):
        run(capsys, "from-hf", hf["plain"], tmp_path / name)
        run(capsys, "to-hf", tmp_path / name, tmp_path / f"{name} back")
        assert bits(tensors(tmp_path / f"{name} back")) == bits(tensors(hf["plain"]))
    before = sorted(tmp_path.rglob("*"))
    _, err = run(capsys, "from-hf", hf["plain"], tmp_path / "back\\slash", expect=2)
    assert "got a backslash" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("devices", [1, 4])
def test_train_restores_what_from_hf_wrote(hf, imported, devices):
    """A layout that Orbax cannot read, a wrong orientation, or checksums that do not fit."""
    params, c = restore(imported["yarn"], devices)
    theirs = {name: x.astype(np.float32) for name, x in tensors(hf["yarn"]).items()}
    for leaf, turned in (("wk", True), ("wo", False), ("w_gate", True), ("w_down", False)):
        x = theirs[hf_name(leaf, 5)]
        np.testing.assert_array_equal(params[leaf][5], x.T if turned else x)
    np.testing.assert_array_equal(params["embed"][:VOCABULARY], theirs["model.embed_tokens.weight"])
    assert len(params["wq"].sharding.device_set) == devices
    assert read_meta(find_checkpoint(str(imported["yarn"])))["checksums"]["params"] == checksums(params)


def test_from_hf_leaves_what_orbax_leaves(house, imported):
    """A store that today's Orbax happens to read but that is not what it writes: files, metadata and array headers."""

    def arrays(item: Path) -> dict:
        store = convert.ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
        keys = [k for k in store.list().result() if k.endswith(b"/.zarray")]
        return {k.decode(): json.loads(store.read(k).result().value) for k in keys}

    theirs, ours = (find_checkpoint(str(p)) for p in (house.run, imported["plain"]))
    for file in ("_CHECKPOINT_METADATA", "commit_success.txt", "meta/metadata", "meta/commit_success.txt",
                 "params/_METADATA", "params/manifest.ocdbt", "params/commit_success.txt"):  # fmt: skip
        assert (theirs / file).is_file() and (ours / file).is_file(), file
    saved, made = (json.loads((p / "params" / "_METADATA").read_text()) for p in (theirs, ours))
    assert saved == made
    one, two = (json.loads((p / "_CHECKPOINT_METADATA").read_text()) for p in (theirs, ours))
    assert set(one) == set(two) and two["item_handlers"].items() <= one["item_handlers"].items()
    assert {k: v | {"chunks": None} for k, v in arrays(theirs / "params").items()} == {
        k: v | {"chunks": None} for k, v in arrays(ours / "params").items()
    }
    assert arrays(ours / "params")["wq/.zarray"]["chunks"] == [1, 48, 40]


def test_any_mesh_and_any_chunks_export_the_same(house, tmp_path, capsys, monkeypatch):
    """An export that relies on one chunk a layer, on one device's shards, or on the rows that from-hf would cut."""
    monkeypatch.setattr(convert, "ROWS", 32)
    params = save_checkpoint(house.root, tmp_path / "one", 1)
    save_checkpoint(house.root, tmp_path / "eight", 8)
    for name in ("one", "eight"):
        run(capsys, "to-hf", tmp_path / name / "checkpoints" / "3", tmp_path / f"{name}_hf")
    exported = tensors(tmp_path / "one_hf")
    assert bits(exported) == bits(tensors(tmp_path / "eight_hf"))
    np.testing.assert_array_equal(exported[hf_name("wv", 2)], np.asarray(params["wv"][2]).T)
    np.testing.assert_array_equal(exported["model.embed_tokens.weight"], np.asarray(params["embed"])[:VOCABULARY])


def test_narrowing_rounds_to_nearest_even(tmp_path):
    """Truncation to bf16, which is a bias: 1 + 2^-8 lies between two bf16 numbers."""
    tie = np.float32(1.00390625)
    x = np.array([tie, np.nextafter(tie, 2), np.nextafter(tie, 0), 1.01171875, -tie], np.float32)
    y = convert.narrow(x, np.dtype(ml_dtypes.bfloat16), "x").astype(np.float32)
    assert y.tolist() == [1.0, 1.0078125, 1.0, 1.015625, -1.0]


def test_conversions_do_without_torch(hf, tmp_path):
    """bf16 that only torch can read, or an import of torch where none is installed; `check` says so."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import convert; "
    code = blocked + (
        f"a = convert.main(['from-hf', {str(hf['yarn'])!r}, {str(tmp_path / 'run')!r}]); "
        f"b = convert.main(['to-hf', {str(tmp_path / 'run')!r}, {str(tmp_path / 'back')!r}, '--dtype', 'bfloat16']); "
        f"c = convert.main(['check', {str(tmp_path / 'run')!r}, {str(tmp_path / 'back')!r}]); print((a, b, c))"
    )
    out, err = process("-c", code)
    assert out.endswith("(0, 0, 2)\n") and "requirements-dev.txt" in err
    assert bits(tensors(tmp_path / "back")) == bits(tensors(hf["yarn"]))


# ------------------------------------------------------------------------------------------------- logits are the proof


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_an_imported_model_gives_transformers_logits(hf, imported, name):
    """QK-norm a head at a time, a pre-norm block, YaRN on all layers or on none, GQA heads in another order."""
    params, c = restore(imported[name])
    assert params["q_norm"].shape == (c.model.n_layers, c.model.n_heads * c.model.head_dim)
    assert (c.model.yarn is not None) == (name == "yarn")
    tokens = some_tokens()
    ours, theirs = our_logits(params, c.model, tokens), hf_logits(hf[name], tokens)
    np.testing.assert_allclose(ours[..., :VOCABULARY], theirs, atol=1e-4)
    assert ours.shape[-1] == 128 and ours.argmax(-1).max() < VOCABULARY  # padding rows are outside the softmax

    def ce(logits):
        return -np.asarray(jax.nn.log_softmax(logits))[0, np.arange(47), tokens[0, 1:]].mean()

    assert abs(ce(ours[:1, :-1]) - ce(theirs[:1, :-1])) < 1e-5


@pytest.mark.parametrize("form", ["4", "5"])
@pytest.mark.parametrize("yarn", [False, True])
def test_an_exported_model_gives_our_logits(house, tmp_path, capsys, form, yarn):
    """A config.json whose RoPE, window or eps transformers reads as something else, in either form."""
    keys = {"yarn": {"factor": 8.0, "original_length": 16, "beta_fast": 32.0, "beta_slow": 1.0}} if yarn else {}
    save_checkpoint(house.root, tmp_path / "run", 1, **keys)
    run(capsys, "to-hf", tmp_path / "run", tmp_path / "hf", "--transformers", form, "--max-position-embeddings", 128)
    params, c = restore(tmp_path / "run")
    tokens = some_tokens()
    theirs = hf_logits(tmp_path / "hf", tokens)
    np.testing.assert_allclose(our_logits(params, c.model, tokens)[..., :VOCABULARY], theirs, atol=1e-4)


def test_yarn_frequencies_are_transformers():
    """Positions divided by the factor instead of YaRN, or a range that is not rounded: truncate is True."""
    raw = read_yaml(REPO / "configs" / "stage1.yaml")["model"]
    raw |= {"yarn": {"factor": 8.0, "original_length": 8192, "beta_fast": 32.0, "beta_slow": 1.0}}
    m = build(model.ModelConfig, raw, "model")
    hf = convert.hf_config(m, 5, 65536, "float32", {"eos_token_id": 0, "pad_token_id": None})
    config = transformers.AutoConfig.for_model(**hf)
    theirs, factor = _compute_yarn_parameters(config, "cpu", layer_type="full_attention")
    ours, our_factor = model.rope_frequencies(m, yarn=True)
    assert np.abs(ours - theirs.numpy()).max() < 1e-7
    assert factor == our_factor == pytest.approx(1.2079441541679836, abs=1e-15)
    assert not np.allclose(ours[:64], model.rope_frequencies(m, yarn=False)[0])


def test_padding_rows_come_as_zeros_and_do_not_leave(hf, imported, tmp_path, capsys):
    """Rows that are cut or kept without a word: 97 in, 128 inside, 97 out."""
    params, _ = restore(imported["plain"])
    for leaf in convert.VOCABULARY:
        assert params[leaf].shape == (128, 48) and not np.any(params[leaf][VOCABULARY:])
    run(capsys, "to-hf", imported["plain"], tmp_path / "back")
    assert tensors(tmp_path / "back")["lm_head.weight"].shape == (VOCABULARY, 48)


# ------------------------------------------------------------------------------------------------------ configurations


def seven_b(**changes) -> model.ModelConfig:
    raw = read_yaml(REPO / "configs" / "stage1.yaml")["model"] | changes
    return build(model.ModelConfig, raw, "model")


@pytest.mark.parametrize("form", [4, 5])
def test_config_json_of_the_7b(tmp_path, form):
    """Whole numbers where floats are asked for, the class default of rms_norm_eps, a missing key."""
    m = seven_b(yarn={"factor": 8.0, "original_length": 8192, "beta_fast": 32.0, "beta_slow": 1.0})
    ids = {"eos_token_id": 100257, "pad_token_id": 100277}
    written = convert.hf_config(m, form, 65536, "bfloat16", ids)
    convert.write_json(tmp_path / "config.json", written)
    assert ("rope_parameters" in written) == (form == 5)
    assert written["layer_types"] == [
        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    ] * 8  # fmt: skip
    yarn = written["rope_parameters"]["full_attention"] if form == 5 else written["rope_scaling"]
    for value in (yarn["factor"], yarn["beta_fast"], yarn["beta_slow"], written["rms_norm_eps"], written["rope_theta"]):
        assert type(value) is float
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.rms_norm_eps, config.sliding_window, config.vocab_size) == (1e-6, 4096, 100278)
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (100257, 100277, None)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert full["rope_type"] == "yarn" and full["attention_factor"] == 0.1 * np.log(8) + 1
    assert sliding == {"rope_type": "default", "rope_theta": 500000.0} and full["rope_theta"] == 500000.0
    assert convert.model_config(written, "x", "bfloat16") == m  # and back


def refused(hf: dict, key: str, value) -> str:
    changed = {k: v for k, v in hf.items() if not (k == key and value is None)}
    if value is not None:
        changed[key] = value
    with pytest.raises(ValueError) as e:
        convert.model_config(changed, "config.json", "float32")
    return str(e.value)


@pytest.mark.parametrize("key, value", [
    ("model_type", "olmo2"), ("hidden_act", "gelu"), ("attention_bias", True), ("tie_word_embeddings", True),
    ("layer_types", ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 8),
    ("layer_types", ["sliding_attention", "chunked_attention"] * 16), ("layer_types", ["full_attention"] * 31),
    ("rms_norm_eps", None), ("sliding_window", None), ("hidden_size", None), ("rope_theta", None),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}), ("attention_dropout", 0.1), ("num_hidden_layers", "32"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 8.0}),
    ("rope_scaling", {"rope_type": "yarn", **YARN, "attention_factor": 1.0}),
    ("rope_scaling", {"rope_type": "yarn", **YARN, "truncate": False}),
    ("rope_scaling", {"rope_type": "yarn", **YARN, "mscale": 1.0}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 5e5, **YARN}),
    ("rope_parameters", {"sliding_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
                         "full_attention": {"rope_type": "default", "rope_theta": 5e5}}),
    ("rope_parameters", {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "full_attention": {"rope_type": "default", "rope_theta": 5e5}}),
])  # fmt: skip
def test_what_is_no_olmo3_is_refused(key, value):
    """A model that is converted although its maths is not ours; the message names key and value in one line."""
    hf = convert.hf_config(seven_b(), 4, 8192, "float32", {"eos_token_id": 0, "pad_token_id": None})
    assert convert.model_config(hf, "config.json", "bfloat16") == seven_b()
    message = refused(hf, key, value)
    assert "\n" not in message and message.startswith("config.json") and "expected" in message


@pytest.mark.parametrize("layers, pattern", [(4, "sssf"), (8, "sssf"), (6, "sf"), (3, "s"), (2, "f")])
def test_patterns_of_layers(layers, pattern):
    """A cycle that is read wrongly: too long, or shifted."""
    m = seven_b(n_layers=layers, pattern=pattern)
    hf = convert.hf_config(m, 5, 8192, "float32", {"eos_token_id": 0, "pad_token_id": None})
    assert convert.model_config(hf, "x", "bfloat16") == m


def test_a_flat_rope_of_transformers_5_is_read(hf, imported, tmp_path, capsys):
    """rope_parameters that hold for all layers, as transformers 5.0 to 5.12 wrote them."""
    config = json.loads((hf["plain"] / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert convert.model_config(config, "x", "float32") == restore(imported["plain"])[1].model


# ------------------------------------------------------------------------------------------- damaged sources, atomicity


def remove_shard(folder, index):
    (folder / sorted(set(index["weight_map"].values()))[1]).unlink()


def edit_tensor(edit):
    def damage(folder, index):
        path = folder / index["weight_map"][UPDATE]
        content = load_file(path)
        edit(content)
        save_file(content, path, metadata={"format": "pt"})

    return damage


def duplicate(folder, index):
    other = next(s for s in set(index["weight_map"].values()) if s != index["weight_map"][UPDATE])
    content = load_file(folder / other)
    content[UPDATE] = load_file(folder / index["weight_map"][UPDATE])[UPDATE]
    save_file(content, folder / other, metadata={"format": "pt"})


def cut_file(folder, index):
    path = folder / index["weight_map"][UPDATE]
    os.truncate(path, path.stat().st_size - 10)


def stray_file(folder, index):
    save_file({"x": np.zeros(2, np.float32)}, folder / "model-00099-of-00099.safetensors")


@pytest.mark.parametrize("damage, words", [
    (remove_shard, ["absent"]),
    (edit_tensor(lambda c: c.pop(UPDATE)), [UPDATE, "missing"]),
    (edit_tensor(lambda c: c.update({"model.layers.1.mlp.bias": np.zeros(3, np.float32)})), ["mlp.bias"]),
    (edit_tensor(lambda c: c.update({UPDATE: np.ascontiguousarray(c[UPDATE].T)})), [UPDATE, "[48, 72]", "[72, 48]"]),
    (edit_tensor(lambda c: c.update({UPDATE: c[UPDATE].astype(np.int32)})), [UPDATE, "I32"]),
    (duplicate, [UPDATE, "and in"]),
    (cut_file, ["not a whole safetensors file"]),
    (stray_file, ["x: unknown tensor (in model-00099-of-00099.safetensors)"]),
], ids=["shard", "missing", "unknown", "shape", "dtype", "twice", "cut", "stray"])  # fmt: skip
def test_a_damaged_source_is_named_and_nothing_is_left(hf, tmp_path, capsys, damage, words):
    """A tensor that nobody asked for or that is not there, so that weights stay unset."""
    folder = shutil.copytree(hf["yarn"], tmp_path / "hf")
    damage(folder, json.loads((folder / "model.safetensors.index.json").read_text()))
    _, err = run(capsys, "from-hf", folder, tmp_path / "run", expect=2)
    assert all(word in err for word in words), err
    assert err.count("\n") == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_single_file_is_checked_both_ways(hf, tmp_path, capsys):
    """Without an index only the model says which tensors there are."""
    for i, (edit, words) in enumerate((
        (lambda c: c.pop(UPDATE), f"{UPDATE}: missing"),
        (lambda c: c.update({UPDATE.replace("1", "4"): c[UPDATE]}), f"{UPDATE.replace('1', '4')}: unknown tensor"),
    )):  # fmt: skip
        folder = shutil.copytree(hf["plain"], tmp_path / f"hf{i}")
        edit_tensor(edit)(folder, {"weight_map": {UPDATE: "model.safetensors"}})
        _, err = run(capsys, "from-hf", folder, tmp_path / "run", expect=2)
        assert words in err and not (tmp_path / "run").exists() and not list(tmp_path.glob(".*"))


def test_an_existing_destination_is_refused(hf, imported, tmp_path, capsys):
    """Two conversions mixed in one folder, or a run that is written over."""
    (tmp_path / "run").mkdir()
    for verb, source in (("from-hf", hf["plain"]), ("to-hf", imported["plain"])):
        _, err = run(capsys, verb, source, tmp_path / "run", expect=2)
        assert "exists" in err
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("verb, place, signal_number, code", [
    ("from-hf", "OrbaxLeaves.flush", signal.SIGKILL, -9),
    ("to-hf", "CheckSums.compare", signal.SIGKILL, -9),
    ("from-hf", "OrbaxLeaves.flush", signal.SIGTERM, 143),
])  # fmt: skip
def test_a_kill_in_the_middle_leaves_no_destination(hf, imported, tmp_path, verb, place, signal_number, code):
    """A half-written checkpoint that looks whole. SIGTERM also removes what was built; the next conversion removes what
    a kill has left, and nothing else."""
    owner, method = place.split(".")
    source = hf["plain"] if verb == "from-hf" else imported["plain"]
    script = (
        f"import os, sys, convert; f = convert.{place}\n"
        f"def here(*a):\n    os.kill(os.getpid(), {int(signal_number)}); return f(*a)\n"
        f"convert.{owner}.{method} = here\n"
        f"sys.exit(convert.main([{verb!r}, {str(source)!r}, {str(tmp_path / 'out')!r}]))"
    )
    process("-c", script, expect=code)
    left = [p.name for p in tmp_path.iterdir()]
    assert "out" not in left and bool(left) == (signal_number == signal.SIGKILL)
    others = {".out.2.77.tmp", ".outer.77.tmp", ".out.tmp"}  # what conversions to other places build in
    for name in others:
        (tmp_path / name).mkdir()
    assert convert.main([verb, str(source), str(tmp_path / "out")]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"out"} | others  # what the killed one left is gone


HOLDS = """
import sys, time, convert, pathlib
f = convert.{place}
def here(*a):
    until = time.monotonic() + 60
    while not pathlib.Path(sys.argv[3] + " goes on").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return f(*a)
convert.{place} = here
sys.exit(convert.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("verb, place", [("from-hf", "OrbaxLeaves.flush"), ("to-hf", "CheckSums.compare")])
def test_of_two_conversions_at_once_one_goes_on(hf, imported, tmp_path, verb, place):
    """Two processes that both build the same destination: the later rename fails at the end of hours, or mixes them."""
    source, out = hf["plain"] if verb == "from-hf" else imported["plain"], tmp_path / "out"
    command = [sys.executable, "-c", HOLDS.format(place=place), verb, str(source), str(out)]
    how = {"env": os.environ | {"PYTHONPATH": str(REPO)}, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, **how) for _ in range(2)]
    until = time.monotonic() + 50
    while all(p.poll() is None for p in both) and time.monotonic() < until:
        time.sleep(0.05)
    first, second = sorted(both, key=lambda p: p.poll() is None)
    assert first.poll() == 1 and second.poll() is None
    err = error_line(first.stderr.read())
    assert err.startswith(f"convert.py: error: {out}: is being written by process {second.pid} ")
    Path(f"{out} goes on").touch()
    err = second.communicate(timeout=60)[1]
    assert second.returncode == 0, err
    assert {p.name for p in tmp_path.iterdir()} == {"out", "out goes on"}


FULL = """
import resource, signal, sys, convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(convert.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("verb", ["from-hf", "to-hf"])
def test_a_write_that_fails_names_its_place(hf, imported, tmp_path, verb):
    """A disk that fills up in the middle taken for wrong usage (tensorstore says ValueError), or a message that names no
    file. A limit on the size of a file stands for the disk: the write fails in the same place, with EFBIG."""
    source = {"from-hf": hf["plain"], "to-hf": imported["plain"]}[verb]
    _, err = process("-c", FULL, verb, source, tmp_path / "out", expect=1)
    assert "File too large" in error_line(err) and str(tmp_path) in error_line(err)
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_looked_at_before_anything_is_read(hf, imported, tmp_path, capsys, monkeypatch):
    """A conversion of 29 GB that ends after an hour because there never was room: 4 bytes a parameter with padding rows
    for from-hf, the dtype's size without them for to-hf."""
    m = restore(imported["plain"])[1].model
    for verb, source, needed in (
        ("from-hf", hf["plain"], 4 * model.parameter_count(m)),
        ("to-hf", imported["plain"], 2 * model.parameter_count(m, padded=False)),
    ):
        extra = ("--dtype", "bfloat16") if verb == "to-hf" else ()
        for free in (needed - 1, needed):
            usage = shutil._ntuple_diskusage(2**40, 2**40 - free, free)
            monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            if free == needed:
                run(capsys, verb, source, tmp_path / verb, *extra)
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(convert, "progress", lambda *_: pytest.fail("it began"))
                    _, err = run(capsys, verb, source, tmp_path / verb, *extra, expect=1)
                assert error_line(err).startswith(f"convert.py: error: {tmp_path / verb}: needs 0.00 GB")
                assert list(tmp_path.glob("*")) == list(tmp_path.glob("*-*")) and not (tmp_path / verb).exists()


def test_an_error_of_our_own_is_no_wrong_usage(hf, imported, tmp_path, capsys, monkeypatch):
    """A bug after the inputs were checked that ends as one line and exit code 2, which says that the user is wrong."""

    def bug(*_):
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr(convert, "finish_step", bug)
    monkeypatch.setattr(convert, "narrow", bug)
    monkeypatch.setattr(convert, "compare_tensors", bug)
    for arguments in (("from-hf", hf["plain"]), ("to-hf", imported["plain"])):
        with pytest.raises(ValueError, match="zip"):
            convert.main([str(a) for a in (*arguments, tmp_path / "out")])
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="zip"):
        convert.main(["check", str(imported["plain"]), str(hf["plain"]), "--length", "32"])


def test_numbers_that_cannot_be_meant(hf, imported, tmp_path, capsys):
    """An OverflowError, a MemoryError or the end of the machine instead of a line; a gate that nothing can pass."""
    for verb, words in (
        ("check", ("--length", 1)), ("check", ("--sequences", 0)), ("check", ("--length", 10**15)),
        ("check", ("--sequences", 10**25)), ("check", ("--threshold", "nan")), ("check", ("--max-kl", -1)),
        ("to-hf", ("--max-shard-bytes", 0)), ("to-hf", ("--max-position-embeddings", -5)),
    ):  # fmt: skip
        second = hf["plain"] if verb == "check" else tmp_path / "out"
        _, err = run(capsys, verb, imported["plain"], second, *words, expect=2)
        assert words[0] in error_line(err) and "expected" in error_line(err)
    run(capsys, "to-hf", imported["plain"], tmp_path / "out", "--max-shard-bytes", 10**30)


def test_any_name_of_a_folder(hf, imported, tmp_path, capsys, monkeypatch):
    """Names that mean something to a shell, a glob or a URL; ~, which a shell leaves alone behind other text."""
    odd = tmp_path / "a b[1]#2%ü*?"
    odd.mkdir()
    monkeypatch.setenv("HOME", str(odd))
    shutil.copytree(hf["plain"], odd / "hf[12]%41")
    run(capsys, "from-hf", "~/hf[12]%41", "~/in[1]*")
    out, _ = run(capsys, "to-hf", odd / "in[1]*", "~/out{2}#")
    assert out["path"] == str(odd / "out{2}#") and not Path("~").exists()
    assert bits(tensors(odd / "out{2}#")) == bits(tensors(hf["plain"]))
    out, _ = run(capsys, "check", odd / "in[1]*", "~/out{2}#", "--length", 32, "--dtype", "float32")
    assert out["failures"] == []
    params, _ = restore(odd / "in[1]*")
    same, _ = restore(imported["plain"])
    assert bits({n: np.asarray(x) for n, x in params.items()}) == bits({n: np.asarray(x) for n, x in same.items()})
    assert sorted(p.name for p in odd.iterdir()) == ["hf[12]%41", "in[1]*", "out{2}#"]


def test_a_flipped_bit_in_a_checkpoint_is_caught(house, tmp_path, capsys):
    """Numbers that are read as others: the arrays have no checksum of their own, meta has."""
    save_checkpoint(house.root, tmp_path / "run", 1)
    meta = tmp_path / "run" / "checkpoints" / "3" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    content["checksums"]["params"]["['w_up']"] ^= 1 << 20
    meta.write_text(json.dumps(content))
    _, err = run(capsys, "to-hf", tmp_path / "run", tmp_path / "out", expect=1)
    assert "w_up" in err and "damaged" in err and [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory in /proc")
def test_memory_stays_below_the_checkpoint(tmp_path):
    """A conversion that reads the file whole, or holds all that it has not written yet: 0.7 GB of bf16, 1.5 of fp32."""
    m = seven_b(vocab_size=5000, padded_vocab_size=5120, n_layers=60, d_model=640, n_heads=8, n_kv_heads=4, head_dim=72,
                d_ff=2560, init_std=0.02)  # fmt: skip
    folder, dtype, shapes = tmp_path / "hf", np.dtype(ml_dtypes.bfloat16), convert.hf_shapes(m)
    folder.mkdir()
    rng = np.random.default_rng(0)
    made = {}
    for tensor, shape in shapes.items():
        words = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16) & np.uint16(0xBFFF)  # no NaN, no infinity
        made[tensor] = words.view(dtype).reshape(shape)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"eos_token_id": 0, "pad_token_id": None}
    convert.write_json(folder / "config.json", convert.hf_config(m, 5, 8192, "bfloat16", ids))
    script = """
import re, sys, convert
# ru_maxrss would begin with the peak of the process that started this one, and hide what comes below it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = peak()
assert convert.main(["from-hf", sys.argv[1], sys.argv[2]]) == 0
middle = peak()
assert convert.main(["to-hf", sys.argv[2], sys.argv[3], "--dtype", "bfloat16", "--max-shard-bytes", "50000000"]) == 0
print("GREW", middle - before, peak() - before)
"""
    out, _ = process("-c", script, folder, tmp_path / "run", tmp_path / "back")
    grew = [int(n) for n in out.split("GREW")[1].split()]
    assert (folder / "model.safetensors").stat().st_size > 700e6
    assert max(grew) < 1250, (
        grew
    )  # writes in flight are bounded (more of them where the disk is slow), malloc keeps some
    assert bits(tensors(tmp_path / "back")) == bits(tensors(folder))


# --------------------------------------------------------------------------------------------------------------- check


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """A model whose q_proj is square, so that a transpose keeps its shape; and its import."""
    root = tmp_path_factory.mktemp("square")
    folder = make_hf(root / "hf", yarn=True, head_dim=12)
    assert convert.main(["from-hf", str(folder), str(root / "run")]) == 0
    return folder, root / "run"


def test_check_agrees_with_a_right_conversion(square, house, tmp_path, capsys):
    """A gate that never opens; and tokens from a file that are not those in it."""
    folder, run_dir = square
    tokens = house.root / "tokens" / "part-00000.npy"
    out, err = run(capsys, "check", run_dir, folder, "--length", 64, "--sequences", 2, "--tokens", tokens)
    assert out["failures"] == [] and out["tensors"] == {"identical": 47, "different": {}} and out["yarn"]
    assert [b["name"] for b in out["float32"]["blocks"]][3:6] == [
        "block 2 (sliding attention)", "block 3 (full attention)", "final norm",
    ]  # fmt: skip
    assert max(b["difference"] for b in out["float32"]["blocks"]) < 1e-5 and out["float32"]["kl_max"] < 1e-6
    assert out["float32"]["top1_agreement"] == 1.0 and 0 <= out["float32"]["reverse_kl_max"] < 1e-6
    assert 1e-4 < max(b["difference"] for b in out["bfloat16"]["blocks"]) < 0.1
    assert "block 3 (full attention)" in err
    _, err = run(capsys, "check", run_dir, folder, "--length", 64, "--dtype", "bfloat16", "--threshold", 1e-6, expect=1)
    assert "pseudo-random" in err and "block 0 (sliding attention)" in err


@pytest.mark.parametrize("fault, block", [("swapped", 2), ("transposed", 1), ("scaled", 3), ("invisible", None)])
def test_check_names_the_block_of_a_wrong_tensor(square, tmp_path, capsys, fault, block):
    """A conversion that "succeeded" and writes gibberish; a scale that the following norm hides."""
    folder = shutil.copytree(square[0], tmp_path / "hf")
    content = load_file(folder / "model.safetensors")
    gate, up, query = hf_name("w_gate", 2), hf_name("w_up", 2), hf_name("wq", 1)
    norm, out_proj = hf_name("ffn_norm", 3), hf_name("wo", 0)
    if fault == "swapped":
        content[gate], content[up] = content[up], content[gate]
    elif fault == "transposed":
        content[query] = np.ascontiguousarray(content[query].T)
    elif fault == "scaled":
        content[norm] = 2 * content[norm]
    else:
        content[out_proj] = 2 * content[out_proj]
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    argv = ("check", square[1], folder, "--length", 32, "--dtype", "float32", "--json")
    capsys.readouterr()
    assert convert.main([str(a) for a in argv]) == 1
    out, err = capsys.readouterr()
    out = json.loads(out)
    found = out["float32"]["first_block_that_differs"]
    wrong = {"swapped": {gate, up}, "transposed": {query}, "scaled": {norm}, "invisible": {out_proj}}[fault]
    assert set(out["tensors"]["different"]) == wrong and all(w in err for w in wrong)
    if block is None:  # logits alone would have let it pass
        assert found is None and out["float32"]["kl_max"] < 1e-4
    else:
        assert found.startswith(f"block {block} ") and found in err
        if fault == "scaled":
            assert out["float32"]["kl_max"] > 1e-2 and out["float32"]["reverse_kl_max"] > 1e-2


def test_check_refuses_a_missing_tensor_and_another_architecture(square, tmp_path, capsys):
    """transformers fills a missing tensor with random numbers and only warns."""
    folder = shutil.copytree(square[0], tmp_path / "hf")
    content = load_file(folder / "model.safetensors")
    del content[UPDATE]
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    _, err = run(capsys, "check", square[1], folder, expect=2)
    assert f"{UPDATE}: missing" in err
    config = json.loads((square[0] / "config.json").read_text())
    convert.write_json(folder / "config.json", config | {"sliding_window": 9})
    _, err = run(capsys, "check", square[1], folder, expect=2)
    assert "window: got 9, expected 8" in err


def test_check_refuses_transformers_that_is_wrong_for_yarn(square, imported, hf, tmp_path, capsys, monkeypatch):
    """A comparison with a reference that is itself wrong: 5.0 to 5.12 scale the sliding layers, too."""
    folder, run_dir = square
    library = convert.import_reference()[1]  # its lazy module is not the object that `import transformers` bound here
    monkeypatch.setattr(library, "__version__", "5.12.1")
    _, err = run(capsys, "check", run_dir, folder, "--length", 32, "--dtype", "float32", expect=2)
    assert "5.12.1" in err and "--without-yarn" in err and "proves" in err
    out, _ = run(capsys, "check", run_dir, folder, "--length", 32, "--dtype", "float32", "--without-yarn")
    assert not out["yarn"] and out["failures"] == []
    run(capsys, "check", imported["plain"], hf["plain"], "--length", 32, "--dtype", "float32")  # plain RoPE: no matter

    rotary = transformers.models.olmo3.modeling_olmo3.Olmo3RotaryEmbedding
    right = rotary.forward
    monkeypatch.undo()
    monkeypatch.setattr(rotary, "forward", lambda self, x, ids, kind: right(self, x, ids, "full_attention"))
    code = convert.main(["check", str(run_dir), str(folder), "--length", "32", "--dtype", "float32"])
    assert code == 1 and "block 0 (sliding attention) differs" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- whose tokenizer it is


def other_corpus(house, root: Path) -> Path:
    """The house's files under the same names, but another text and other words for the same ids."""
    root.mkdir()
    tokens = np.arange(2, 2 + SEQUENCE * 100, dtype=np.uint32) % VOCABULARY
    tokens.tofile(root / "part.npy")
    Tokenizer(models.WordLevel({f"other{i}": i for i in range(VOCABULARY)}, unk_token="other0")).save(
        str(root / "tokenizer.json")
    )
    words = {"tokenizer": "tokenizer.json", "vocab_size": VOCABULARY, "eos_id": 5, "pad_id": 6}
    data.write_index(data.build_index([("web", root / "part.npy")], root, SEQUENCE, **words), root / "train.json")
    return root


def test_no_other_corpus_lends_its_tokenizer(house, imported, tmp_path, capsys, monkeypatch):
    """A recipe names its index relative to the current folder: from another project's folder the same name is another
    corpus, whose tokenizer turns every id into another word. An imported checkpoint was trained on no index at all."""
    other, run_folder = other_corpus(house, tmp_path / "other"), find_checkpoint(str(house.run))
    meta = read_meta(run_folder)
    assert meta["data"].pop("index_path") == str((house.root / "train.json").resolve())
    meta["config"]["data"]["index"], own = "train.json", meta["data"]

    def found(folder, meta=meta, step_folder=run_folder, given=None):
        monkeypatch.chdir(folder)
        return find_tokenizer(given, step_folder, meta)

    here = found(house.root)
    assert here.tokenizer.id_to_token(7) == "w5" and (here.eos_ids, here.pad_id) == ((0,), 1)
    elsewhere = found(other)
    assert elsewhere.path is None and elsewhere.eos_ids == () and "train.json is another corpus" in elsewhere.why
    assert own["fingerprint"] in elsewhere.why
    assert str(tmp_path / "train.json") in found(tmp_path).why
    meta["data"] = own | {"index_path": str(house.root / "train.json")}
    assert found(other).path == house.root / "tokenizer.json"  # where the run says that its index was
    meta["data"] = own | {"index_path": "/gone/train.json"}
    (tmp_path / "train.json").write_text("{}")
    assert str(tmp_path / "train.json") in found(tmp_path).why and "not an index" in found(tmp_path).why
    assert found(house.root).tokenizer.id_to_token(7) == "w5" and found(other).path is None
    given = found(other, given=str(house.root / "tokenizer.json"))
    assert given.path == house.root / "tokenizer.json" and given.eos_ids == (0,)
    with pytest.raises(data.DataError, match="hf.*tokenizer.json: got no such file.*--tokenizer"):
        found(other, given=str(imported["plain"] / "hf"))

    imported_meta = read_meta(find_checkpoint(str(imported["plain"])))
    assert imported_meta["config"]["data"]["index"] == ""
    for index in ("", "train.json"):  # as from-hf writes it, and as it wrote the recipe's before
        imported_meta["config"]["data"]["index"] = index
        got = found(other, imported_meta, imported["plain"] / "checkpoints" / "0")
        assert got.path is None and got.eos_ids == (0,) and "trained on none" in got.why  # config.json knows the end
    _, err = run(capsys, "to-hf", imported["plain"], tmp_path / "hf")
    assert "no tokenizer goes with the weights" in err and "trained on none" in err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 0


def test_every_end_of_a_text_travels(house, hf, tmp_path, capsys):
    """A model with several ends of a text (chat models) that arrives with one: generate() runs past the others. The one
    of pretraining, config.json's, is the first, after which a text begins."""
    folder = shutil.copytree(hf["plain"], tmp_path / "hf")
    shutil.copyfile(house.root / "tokenizer.json", folder / "tokenizer.json")
    convert.write_json(folder / "generation_config.json", {"eos_token_id": [9, 0], "pad_token_id": 1, "top_p": 0.5})
    run(capsys, "from-hf", folder, tmp_path / "run")
    step_folder = find_checkpoint(str(tmp_path / "run"))
    assert find_tokenizer(None, step_folder, read_meta(step_folder)).eos_ids == (0, 9)
    out, _ = run(capsys, "to-hf", tmp_path / "run", tmp_path / "back")
    assert out["eos_token_id"] == [0, 9]
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert (generation.eos_token_id, generation.pad_token_id, generation.top_p) == ([0, 9], 1, 0.5)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").eos_token_id == [0, 9]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").eos_token == data.EOS
    for wrong, words in (([0, VOCABULARY], f"got {VOCABULARY} as the end"), ("0", "got '0', expected token ids")):
        convert.write_json(tmp_path / "run" / "hf" / "generation_config.json", {"eos_token_id": wrong})
        _, err = run(capsys, "to-hf", tmp_path / "run", tmp_path / "wrong", expect=2)
        assert words in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------ training goes on from conversions


def test_training_starts_from_an_import(house, imported, tmp_path):
    """An import has no moments to keep and is nothing to resume; both are said with the remedy."""
    err = house.train(tmp_path / "fresh", "--init-from", imported["plain"], "--set", "run.steps=2")
    assert "fresh moments" in err
    config = assemble_config(tiny_config(house.root), "test", "cpu", [])
    with pytest.raises(ValueError, match="holds no moments; fix: --init-state params"):
        train.initial_state(config, mesh_of(1), str(imported["plain"]), "adam", {})
    step_folder = find_checkpoint(str(imported["plain"]))
    with pytest.raises(ValueError, match="no optimizer state; fix: .*--init-state params"):
        check_same_run(read_meta(step_folder), config, {}, step_folder, [])


def test_the_verb_that_went_names_its_successor(capsys):
    """Recipes of stages that call convert.py stage2-init and are told nothing but what verbs there are."""
    with pytest.raises(SystemExit) as e:
        convert.main(["stage2-init", "runs/stage1", "runs/warm"])
    assert e.value.code == 2
    assert "train.py --config stage2.yaml --init-from RUN --init-state adam" in capsys.readouterr().err


def test_a_run_makes_the_detour_and_goes_on_bit_for_bit(house, tmp_path, capsys):
    """The whole cycle: train, export, generate with transformers, import, one more step with the old moments."""
    out, _ = run(capsys, "to-hf", house.run, tmp_path / "hf")
    assert (out["eos_token_id"], out["pad_token_id"]) == (0, 1) and "tokenizer.json" in out["tokenizer"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.eos_token, tokenizer.pad_token) == (data.EOS, data.PAD)
    prompt = tokenizer("w7 w8 w9", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[9, 10, 11]] and set(prompt) == {"input_ids", "attention_mask"}
    # transformers 4 takes the names from the file alone, and its generate() refuses any more than these.
    said = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert said["model_input_names"] == ["input_ids", "attention_mask"]
    made = loaded.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert made.shape[1] <= 8 and made.max() < VOCABULARY and loaded.generation_config.eos_token_id == 0
    run(capsys, "from-hf", tmp_path / "hf", tmp_path / "run")
    assert (tmp_path / "run" / "hf" / "tokenizer.json").is_file()
    out, _ = run(capsys, "check", tmp_path / "run", tmp_path / "hf", "--dtype", "float32")
    assert out["tokens"] == "this project's source text"

    c = assemble_config(tiny_config(house.root), "test", "cpu", [])
    mesh = mesh_of(1)
    params_target, state_target = train.state_shapes(c, mesh)
    step_folder = find_checkpoint(str(house.run))
    step, results = train.compile_train_step(c, mesh), []
    batch = next(data.loader(data.open_data(c.data, None, tmp_path / "order"), 4 * BATCH, 5 * BATCH))
    for source in (step_folder, find_checkpoint(str(tmp_path / "run"))):
        params = restore_item(source, "params", params_target)
        state = restore_item(step_folder, "opt_state", state_target)
        on_device = to_device(batch, mesh, c, BATCH)
        params, state, metrics = step(params, state, on_device, np.int32(5))
        results.append(jax.device_get((params, state, metrics)))
    for params, _, _ in results:
        for leaf in convert.VOCABULARY:  # padding rows are outside the softmax; they came back as zeros
            params[leaf] = params[leaf][:VOCABULARY]
    straight, detour = (jax.tree.map(lambda x: np.asarray(x).tobytes(), r) for r in results)
    assert straight == detour
    assert int(results[0][1].count) == 5


def test_evaluate_opens_an_imported_checkpoint(house, imported):
    """A meta whose config evaluate.py cannot assemble, or that names a recipe's index which is not there."""
    argv = ("loss", imported["plain"], "--index", house.root / "train.json", "--batch", 4, "--set",
            f"data.sequence_length={SEQUENCE}", "--hardware", "cpu", "--json")  # fmt: skip
    out, _ = process(REPO / "evaluate.py", *argv)
    assert json.loads(out)["heldout"]["all"]["ce"] > 1
