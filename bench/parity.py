"""Compare this project with OLMo-core itself (the package ai2-olmo-core), on the CPU, in fp32, with tiny models.

    python bench/parity.py            a Markdown table: what was compared, with what, the largest difference
    python bench/parity.py --json     the same as JSON
    python bench/parity.py --sizes    how large the declared divergences are that change a loss (README.md)

Every function in COMPARISONS runs both sides and returns a `Comparison`; tests/test_reference.py asserts each of them.
OLMo-core's side is its own code throughout: its configs build the model and the optimizer, its dataset and loader read
the token files, its train module takes the steps. The sizes are small and all different (D48 H4 G2 K14 F80, V97 in
104 rows, window 7, four layers sssf), and the norm weights are random, so that nothing in the wrong place can pass.
Needs requirements-dev.txt.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests", "tools")])

import jax
import jax.numpy as jnp
import numpy as np
import pack
import torch
from jax import lax
from jax.sharding import PartitionSpec as P
from olmo_core.data import DataCollator, NumpyDataLoaderBase, NumpyFSLDataset, TokenizerConfig
from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyPackedFSLDatasetConfig
from olmo_core.data.types import NumpyDatasetDType
from olmo_core.data.utils import InstancePacker, get_labels
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.rope import YaRNRoPEScalingConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import CosWithWarmup, HalfCosWithWarmup, LinearWithWarmup, OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.train.train_module import TransformerTrainModule

import data
import model
import optim
import train
from attention import choose_attention
from config import Config, batch_specs, load_config, make_execution, param_specs, shardings, to_device

CPU = torch.device("cpu")
torch.set_num_threads(1)  # with tensors this small more threads wait for each other: ten times as slow on two cores
QUICK = "xla_flags.xla_backend_optimization_level=0"  # compiles in half the time


class Comparison(NamedTuple):
    quantity: str
    reference: str  # in OLMo-core
    difference: float  # the largest
    tolerance: float


OVERRIDES = [
    *("model.vocab_size=97", "model.padded_vocab_size=104", "model.mask_padded_vocab=false", "model.n_layers=4"),
    *("model.d_model=48", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=14", "model.d_ff=80"),
    *("model.window=7", "model.pattern=sssf", "model.init_std=0.08", "data.sequence_length=32", "data.global_batch=8"),
    *("data.repetition_filter=true", "optim.peak_lr=2e-3", "loss.z_loss=1e-5", "loss.filtered_in_divisor=true"),
    "schedule=[{until: null, kind: cosine, warmup_steps: 20, total_steps: 240, final_fraction: 0.1}]",
    *("microbatch=4", "attention_block=8", "loss_chunk=37"),
]
YARN = model.YarnConfig(factor=8.0, original_length=16, beta_fast=2.0, beta_slow=1.0)  # short: it changes a tiny model
EOS, PAD = 95, 96


def config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", "cpu", [*OVERRIDES, *overrides])


# --------------------------------------------------------------------------------------------------- the two models


def one_device():
    return jax.make_mesh((1,) * 4, model.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=jax.devices()[:1])


@cache
def random_params(c: model.ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Initial parameters with random norm weights."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(np.asarray, jax.jit(partial(model.init_params, c))(seed))
    return {
        name: p + 0.3 * rng.standard_normal(p.shape).astype(np.float32) if name.endswith("norm") else p
        for name, p in params.items()
    }


def to_olmo_core(params: dict) -> dict[str, np.ndarray]:
    """Our tensors under OLMo-core's names and in its layout: torch's Linear weights are (out, in)."""
    names = {
        "attention.w_q": ("wq", True),
        "attention.w_k": ("wk", True),
        "attention.w_v": ("wv", True),
        "attention.w_out": ("wo", False),
        "attention.q_norm": ("q_norm", False),
        "attention.k_norm": ("k_norm", False),
        "attention_norm": ("attn_norm", False),
        "feed_forward.w1": ("w_gate", True),
        "feed_forward.w3": ("w_up", True),
        "feed_forward.w2": ("w_down", False),
        "feed_forward_norm": ("ffn_norm", False),
    }
    out = {"embeddings.weight": params["embed"]}
    out |= {"lm_head.norm.weight": params["final_norm"], "lm_head.w_out.weight": params["lm_head"]}
    for theirs, (ours, transposed) in names.items():
        for i, x in enumerate(np.asarray(params[ours])):
            out[f"blocks.{i}.{theirs}.weight"] = x.T if transposed else x
    return {name: np.asarray(x) for name, x in out.items()}


def olmo_core_model(c: model.ModelConfig, params: dict | None = None) -> torch.nn.Module:
    """OLMo 3 7B's own config, made small and on the CPU, so that everything else about it is Ai2's."""
    kind = TransformerConfig.olmo3_7B(vocab_size=c.padded_vocab_size, attn_backend=AttentionBackendName.torch)
    kind.d_model, kind.n_layers = c.d_model, c.n_layers
    mixer = kind.block.sequence_mixer
    mixer.n_heads, mixer.n_kv_heads, mixer.head_dim = c.n_heads, c.n_kv_heads, c.head_dim
    mixer.sliding_window.pattern = [c.window if letter == "s" else -1 for letter in c.pattern]
    kind.block.feed_forward.hidden_size = c.d_ff
    if c.yarn is not None:
        y = c.yarn
        kind = kind.with_rope_scaling(
            YaRNRoPEScalingConfig(
                factor=y.factor, beta_fast=y.beta_fast, beta_slow=y.beta_slow, old_context_len=y.original_length
            )
        )
    transformer = kind.build(init_device="cpu")
    if params is not None:
        load(transformer, params)
    return transformer


class Small32B(TransformerConfig):
    """olmo3_32B with other sizes put in where it hands its own on, so that the rule for d_ff is Ai2's and is run."""

    @classmethod
    def llama_like(cls, **numbers):
        c = small_32b()
        sizes = {"d_model": c.d_model, "n_layers": c.n_layers, "n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads}
        kind = super().llama_like(**numbers | sizes)
        kind.block.sequence_mixer.sliding_window.pattern = [c.window if letter == "s" else -1 for letter in c.pattern]
        return kind


def small_32b() -> model.ModelConfig:
    """Five query heads a key head, as the 32B has. d_ff: int(8 d / 3) times 27648 / (8 5120 / 3), up to 512s."""
    sizes = ("d_model=80", "n_heads=10", "n_kv_heads=2", "head_dim=8", "d_ff=512")
    return config(*(f"model.{size}" for size in sizes)).model


def load(transformer: torch.nn.Module, params: dict) -> None:
    """Strict: every tensor of the one is a tensor of the other, with the same shape."""
    transformer.load_state_dict({k: torch.tensor(np.array(v)) for k, v in to_olmo_core(params).items()}, strict=True)


@cache
def logits_function(c: model.ModelConfig, attention: str):
    function, _ = choose_attention(attention, block=8, splash=None, platform="cpu")
    execution = model.Execution(function, remat=None, scan_unroll=1, loss_chunk=37)
    specs = {name: t.spec for name, t in model.ledger(c).items()}

    def body(params, tokens):
        return model.logits(model.vary(params), model.vary(tokens), None, c, execution)

    tokens = P(("data", "fsdp"), "context")
    mapped = jax.shard_map(body, mesh=one_device(), in_specs=(specs, tokens), out_specs=P(*tokens, "tensor"))
    return jax.jit(mapped, compiler_options=config(QUICK).hardware.xla_flags)


def compare_logits(yarn: model.YarnConfig | None, their_yarn: model.YarnConfig | None) -> float:
    ours, theirs = (replace(config().model, yarn=y) for y in (yarn, their_yarn))
    params = random_params(theirs)
    tokens = np.random.default_rng(1).integers(0, ours.vocab_size, (3, 40)).astype(np.int32)
    with torch.no_grad():
        reference = olmo_core_model(theirs, params)(torch.tensor(tokens, dtype=torch.long)).numpy()
    return max(
        float(np.abs(np.asarray(logits_function(ours, attention)(params, tokens)) - reference).max())
        for attention in ("dense", "blockwise")
    )


def model_logits() -> Comparison:
    return Comparison("logits", "Transformer of olmo3_7B, made small", compare_logits(None, None), 1e-5)


def model_logits_yarn() -> Comparison:
    return Comparison("logits, YaRN on the full layers", "with_rope_scaling(YaRN)", compare_logits(YARN, YARN), 1e-5)


def model_logits_32b() -> Comparison:
    c = small_32b()
    params, tokens = random_params(c), np.random.default_rng(1).integers(0, c.vocab_size, (3, 40)).astype(np.int32)
    transformer = Small32B.olmo3_32B(c.padded_vocab_size, attn_backend=AttentionBackendName.torch).build(
        init_device="cpu"
    )
    load(transformer, params)
    with torch.no_grad():
        theirs = transformer(torch.tensor(tokens, dtype=torch.long)).numpy()
    worst = max(float(np.abs(logits_function(c, how)(params, tokens) - theirs).max()) for how in ("dense", "blockwise"))
    return Comparison("logits, grouped heads", "Transformer of olmo3_32B, made small", worst, 1e-5)


def recipe_of_7b() -> Comparison:
    """The numbers of configs/stage1_ai2.yaml's model against olmo3_7B and the dolma2 tokenizer."""
    return compare_recipe("stage1_ai2.yaml", TransformerConfig.olmo3_7B)


def recipe_of_32b() -> Comparison:
    """The same of configs/stage1_32b.yaml and olmo3_32B."""
    return compare_recipe("stage1_32b.yaml", TransformerConfig.olmo3_32B)


def compare_recipe(recipe: str, kind: Callable) -> Comparison:
    ours, tokenizer = load_config(recipe, "cpu", []).model, TokenizerConfig.dolma2()
    theirs = kind(tokenizer.padded_vocab_size(), attn_backend=AttentionBackendName.torch)
    mixer, windows = theirs.block.sequence_mixer, theirs.block.sequence_mixer.sliding_window
    pairs = {
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": theirs.vocab_size,
        "n_layers": theirs.n_layers,
        "d_model": theirs.d_model,
        "n_heads": mixer.n_heads,
        "n_kv_heads": mixer.n_kv_heads or mixer.n_heads,
        "head_dim": mixer.head_dim or theirs.d_model // mixer.n_heads,
        "d_ff": theirs.block.feed_forward.hidden_size,
        "rope_theta": mixer.rope.theta,
        "norm_eps": theirs.block.layer_norm.eps,
        "init_std": theirs.init_std,
    }
    wrong = [name for name, value in pairs.items() if getattr(ours, name) != value]
    layers = [ours.window if letter == "s" else -1 for letter in ours.pattern * (ours.n_layers // len(ours.pattern))]
    wrong += [f"layer {i}" for i, w in enumerate(layers) if w != windows._get_window_size(i, theirs.n_layers)]
    wrong += ["parameters"] * (model.parameter_count(ours) != theirs.num_params)
    name = kind.__name__
    return Comparison(f"numbers of the {name.removeprefix('olmo3_')} model that differ {wrong or ''}".strip(),
                      f"{name}, TokenizerConfig.dolma2", len(wrong), 0)  # fmt: skip


def initial_weights() -> Comparison:
    """Another draw (DIVERGENCE 4) of the same distribution: the std of every matrix, in standard errors."""
    c = replace(config().model, init_std=0.02)
    transformer = olmo_core_model(c)
    transformer.init_weights(device=CPU)
    ours = to_olmo_core(jax.tree.map(np.asarray, jax.jit(partial(model.init_params, c))(0)))
    worst = 0.0
    for name, p in transformer.named_parameters():
        a, b = ours[name], p.detach().numpy()
        if name.endswith("norm.weight"):
            worst = max(worst, float(np.abs(a - b).max()) * 1e6)  # ones on both sides
        else:
            assert max(np.abs(a).max(), np.abs(b).max()) <= 0.06
            worst = max(worst, float(abs(a.std() - b.std()) / (b.std() / np.sqrt(a.size))))
    return Comparison("std of the initial matrices, standard errors", "Transformer.init_weights", worst, 4)


# ------------------------------------------------------------------------------------------- the two training steps


class OlmoCore:
    """OLMo-core's train module with what it needs of a trainer: a step counter and a place for metrics."""

    def __init__(self, c: Config, params: dict, microbatch: int = 2):
        S, o, (piece,) = c.data.sequence_length, c.optim, c.schedule
        self.module = TransformerTrainModule(
            olmo_core_model(c.model),
            SkipStepAdamWConfig(
                lr=o.peak_lr,
                betas=(o.beta1, o.beta2),
                eps=o.eps,
                weight_decay=o.weight_decay,
                rolling_interval_length=o.skip_window,
                sigma_factor=o.skip_sigma,
                group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})],
            ),
            rank_microbatch_size=microbatch * S,
            max_sequence_length=S,
            z_loss_multiplier=c.loss.z_loss,
            max_grad_norm=o.clip_norm,
            scheduler=CosWithWarmup(warmup=piece.warmup_steps, alpha_f=piece.final_fraction),
            device=CPU,
        )
        load(self.module.model, params)
        self.metrics = {}
        self.trainer = SimpleNamespace(
            global_step=0,
            max_steps=piece.total_steps,
            device=CPU,
            record_metric=lambda name, value, **_: self.metrics.__setitem__(name, float(value)),
            record_ce_loss=lambda value, **_: self.metrics.__setitem__("CE loss", float(value)),
        )
        self.module._attach_trainer(self.trainer)

    def gradients(self, batch: dict) -> dict[str, np.ndarray]:
        """Of one batch, as OLMo-core's trainer takes them; the losses are in `metrics`."""
        self.metrics.clear()
        self.trainer.global_step += 1  # before the batch, as its Trainer does
        self.module.zero_grads()
        self.module.train_batch(batch)
        return {name: p.grad.numpy().copy() for name, p in self.module.model.named_parameters()}

    def step(self, batch: dict) -> dict[str, float]:
        self.gradients(batch)
        self.module.optim_step()
        return dict(self.metrics)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy() for name, p in self.module.model.named_parameters()}


def metric(metrics: dict, name: str) -> float:
    """OLMo-core's metrics by the end of their names (it prefixes some with a namespace)."""
    (value,) = (v for k, v in metrics.items() if k.split("/")[-1] == name)
    return value


def our_gradients(c: Config, params: dict, batch: dict, divisor: float):
    """(gradients, CE sum, lse^2 sum), by the training step's own function, in micro-batches of 2."""
    specs = param_specs(c)

    def body(params, batch):
        grads, sums = train.gradients(params, batch, jnp.float32(divisor), c, make_execution(c, 2, "cpu"), 2)
        return grads, lax.psum(sums, model.AXES)

    f = jax.shard_map(body, mesh=one_device(), in_specs=(specs, batch_specs(c)), out_specs=(specs, P()))
    on_mesh = to_device(batch, one_device(), c, c.data.global_batch)
    grads, (ce, lse_squared) = jax.tree.map(
        np.asarray, jax.jit(f, compiler_options=c.hardware.xla_flags)(params, on_mesh)
    )
    return grads, float(ce), float(lse_squared)


def apart(ours: dict, theirs: dict) -> float:
    """Largest difference of any tensor, relative to that tensor's largest magnitude."""
    mapped = to_olmo_core(ours)
    assert mapped.keys() == theirs.keys()
    return max(float(np.abs(mapped[k] - theirs[k]).max() / np.abs(theirs[k]).max()) for k in mapped)


@cache
def loss_pair() -> dict[str, float]:
    """One batch of 4 x 16 tokens, its third instance filtered: OLMo-core divides by 45 labels + 16."""
    c = config("data.sequence_length=16", "data.global_batch=4", QUICK)
    params = random_params(c.model)
    tokens = np.random.default_rng(2).integers(0, c.model.vocab_size, (4, 16)).astype(np.int32)
    tokens[2] = 11  # repeats itself
    index = SimpleNamespace(eos_id=EOS)
    ours = data.finish_batch(tokens, np.arange(4), index, c.data)
    # The filter wants 32 repetitions, which 16 tokens cannot hold: the decision is made here, for both.
    ours["filtered"] = np.array([False, False, True, False])
    ours["loss_mask"] &= ~ours["filtered"][:, None]

    batch = {"input_ids": torch.tensor(tokens, dtype=torch.long), "instance_mask": torch.tensor(~ours["filtered"])}
    labels = get_labels(batch).numpy()
    label_differences = np.count_nonzero(np.where(ours["loss_mask"], ours["labels"], -100) != labels)
    reference = OlmoCore(c, params, microbatch=1)
    their_grads = reference.gradients(batch)
    divisor = float(ours["loss_mask"].sum() + 16)
    grads, ce, lse_squared = our_gradients(c, params, ours, divisor)

    # The same through the compiled step, which makes the divisor itself
    mesh = one_device()
    state = jax.device_put((params, train.optimizer(c).init(params)), shardings(mesh, train.state_specs(c)))
    on_mesh = to_device(ours, mesh, c, 4)
    _, _, metrics = train.compile_train_step(c, mesh)(*state, on_mesh, jnp.int32(1))
    their_ce, their_z = metric(reference.metrics, "CE loss"), metric(reference.metrics, "Z loss unscaled")
    return {
        "labels": label_differences,
        "divisor": divisor,
        "ce": max(abs(ce / divisor - their_ce), abs(float(metrics["ce"]) - their_ce)) / their_ce,
        "z": max(abs(lse_squared / divisor - their_z), abs(float(metrics["z_unscaled"]) - their_z)) / their_z,
        "gradients": apart(grads, their_grads),
    }


def loss_labels() -> Comparison:
    """Of the batch of `loss_pair`, and of one in which padding tokens are no labels."""
    c = replace(config().data, sequence_length=16, global_batch=8, mask_token=PAD, repetition_filter=False)
    tokens = np.random.default_rng(3).choice([1, 2, 3, EOS, PAD], (8, 16)).astype(np.int32)
    ours = data.finish_batch(tokens, np.arange(8), SimpleNamespace(eos_id=EOS), c)
    ids = torch.tensor(tokens, dtype=torch.long)
    theirs = get_labels({"input_ids": ids, "label_mask": ids != PAD}).numpy()
    wrong = loss_pair()["labels"] + np.sum(np.where(ours["loss_mask"], ours["labels"], -100) != theirs)
    return Comparison("labels that differ, or that count on one side only", "get_labels", int(wrong), 0)


def loss_cross_entropy() -> Comparison:
    return Comparison("CE / (45 labels + 16 filtered), relative", "train_batch", loss_pair()["ce"], 1e-6)


def loss_z() -> Comparison:
    return Comparison("squared logsumexp over all 104 rows, relative", "train_batch", loss_pair()["z"], 1e-6)


def loss_gradients() -> Comparison:
    return Comparison("all gradients, relative to a tensor's largest", "train_batch", loss_pair()["gradients"], 1e-5)


# ----------------------------------------------------------------------------------------------------- 200 steps

STEPS, SPIKE = 200, 180  # with batches of 8 and 803 instances the spike is in the second epoch
SEED = 34521


def learnable(rng, n: int, vocab_size: int) -> np.ndarray:
    """uint32 [n]: each token follows from the one before it, one in ten is noise."""
    tokens, noise = np.ones(n, np.uint32), rng.random(n) < 0.1
    for i in range(1, n):
        tokens[i] = rng.integers(vocab_size) if noise[i] else (5 * tokens[i - 1] + 3) % vocab_size
    return tokens


def write_corpus(folder: Path, c: Config) -> list[Path]:
    """Three files of a noisy, learnable sequence; five instances repeat one token; the batch of step SPIKE is noise."""
    S, V, rng = c.data.sequence_length, c.model.vocab_size, np.random.default_rng(5)
    sizes = [300 * S + 11, 5, 503 * S + 17]  # odd, and one too short for an instance
    files = np.split(learnable(rng, sum(sizes), V), np.cumsum(sizes)[:-1])

    def instance(n):
        file, local = (files[0], n) if n < 300 else (files[2], n - 300)
        return file[local * S : (local + 1) * S]

    per_epoch = 803 // c.data.global_batch
    epoch, k = divmod(SPIKE - 1, per_epoch)
    spike = data.olmo_core_permutation(803, SEED, epoch + 1).reshape(-1)[k * 8 : (k + 1) * 8]
    for n in spike:
        instance(n)[:] = rng.integers(0, V, S)
    for n in rng.choice(np.setdiff1d(np.arange(803), spike), 5, replace=False):
        instance(n)[:] = n % V
    paths = [folder / f"part-{i}.npy" for i in range(3)]
    for path, file in zip(paths, files, strict=True):
        file.astype("<u4").tofile(path)
    return paths


def our_source(paths: list[Path], folder: Path, c: data.DataConfig, vocab_size: int) -> data.BatchSource:
    index = data.build_index(
        [("x", p) for p in paths],
        folder,
        c.sequence_length,
        tokenizer="t",
        vocab_size=vocab_size,
        eos_id=EOS,
        pad_id=PAD,
    )
    data.write_index(index, folder / "index.json")
    return data.open_data(replace(c, index=str(folder / "index.json")))


def olmo_core_loader(paths: list[Path], folder: Path, c: data.DataConfig, vocab_size: int) -> NumpyDataLoaderBase:
    dataset = NumpyFSLDataset(
        *paths,
        sequence_length=c.sequence_length,
        pad_token_id=PAD,
        eos_token_id=EOS,
        vocab_size=vocab_size,
        dtype=np.uint32,
        max_target_sequence_length=c.sequence_length,
        instance_filter_config=InstanceFilterConfig() if c.repetition_filter else None,
    )
    dataset.work_dir = folder / "work"
    dataset.prepare()
    return NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset,
        global_batch_size=c.global_batch * c.sequence_length,
        collator=DataCollator(pad_token_id=PAD, vocab_size=vocab_size),
        work_dir=folder / "work",
        seed=c.seed,
    )


def olmo_core_batches(loader: NumpyDataLoaderBase):
    """Epoch after epoch, as its Trainer goes through them."""
    epoch = 0
    while True:
        epoch += 1
        loader.reshuffle(epoch)
        yield from loader
        loader.reset()


class Training(NamedTuple):
    """Step by step, ours and theirs; parameters at the end, each in its own layout."""

    ce: np.ndarray  # [STEPS, 2]
    grad_norm: np.ndarray
    lr: np.ndarray
    skipped: np.ndarray
    filtered: np.ndarray
    windows: np.ndarray  # [loss, norm; ours, theirs; 128]: what the skip rule remembers at the end
    ours: dict
    theirs: dict


@cache
def training() -> Training:
    """STEPS updates from the same weights and token files, each side through its own loader, step and optimizer."""
    c, mesh, rows = config(), one_device(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_corpus(folder, c)
        source = our_source(paths, folder, replace(c.data, seed=SEED), c.model.vocab_size)
        batches = olmo_core_batches(olmo_core_loader(paths, folder, replace(c.data, seed=SEED), c.model.vocab_size))
        reference = OlmoCore(c, random_params(c.model))
        step = train.compile_train_step(c, mesh)
        params = jax.tree.map(jnp.array, random_params(c.model))  # a copy: the step donates its state
        state = jax.device_put((params, train.optimizer(c).init(params)), shardings(mesh, train.state_specs(c)))
        for k in range(1, STEPS + 1):
            batch = to_device(source.batch_at((k - 1) * c.data.global_batch), mesh, c, 8)
            *state, m = step(*state, batch, jnp.int32(k))
            theirs = reference.step(next(batches))
            get = partial(metric, theirs)
            rows.append(
                [
                    (float(m["ce"]), get("CE loss")),
                    (float(m["grad_norm"]), get("total grad norm")),
                    (float(m["lr"]), get("LR (group 1)")),
                    (float(m["skipped"]), get("step skipped")),
                    (float(m["filtered"]) / 8, get("masked instances (%)")),
                ]
            )
        series = np.array(rows).transpose(1, 0, 2)
    params, memory = jax.tree.map(np.asarray, state)
    theirs = reference.module.optim
    windows = [[ours, [float(x) for x in latest[-c.optim.skip_window :]]] for ours, latest in
               ((memory.losses, theirs._losses), (memory.grad_norms, theirs._grad_norms))]  # fmt: skip
    return Training(*series, np.array(windows), params, reference.parameters())


def training_ce() -> Comparison:
    ce = training().ce
    return Comparison(f"CE of {STEPS} training steps", "NumpyFSLDataLoader, train_batch, optim_step",
                      float(np.abs(ce[:, 0] - ce[:, 1]).max()), 1e-5)  # fmt: skip


def training_grad_norm() -> Comparison:
    g = training().grad_norm
    return Comparison(f"gradient norm of {STEPS} training steps, relative", "optim_step",
                      float(np.max(np.abs(g[:, 0] / g[:, 1] - 1))), 1e-4)  # fmt: skip


def training_skips() -> Comparison:
    t = training()
    return Comparison("steps skipped, instances filtered by one side alone in them", "optim_step, NumpyFSLDataset",
                      float(np.sum(t.skipped[:, 0] != t.skipped[:, 1]) + np.sum(t.filtered[:, 0] != t.filtered[:, 1])),
                      0)  # fmt: skip


def training_windows() -> Comparison:
    ours, theirs = training().windows.swapaxes(0, 1)
    return Comparison("losses and norms that the skip rule remembers after them", "latest_loss, latest_grad_norm",
                      float(np.abs(ours - theirs).max()), 3e-5)  # fmt: skip


def training_params() -> Comparison:
    ours, theirs = to_olmo_core(training().ours), training().theirs
    return Comparison(f"parameters after {STEPS} steps", "optim_step",
                      max(float(np.abs(ours[k] - theirs[k]).max()) for k in theirs), 1e-4)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ optimizer


def ulps(a, b, scale) -> float:
    """Largest difference in units of the last place of fp32 at the magnitude `scale`."""
    return float(np.max(np.abs(a.astype(np.float64) - b) / np.spacing(scale.astype(np.float32))))


@cache
def optimizer_pair(compiled: bool) -> dict[str, float]:
    """20 updates from the same gradients, clipped about half of the time; update 15 is a spike that both skip.

    Compiled, XLA contracts a*b + c into one rounding, and what it gains there remains in the moments; operation by
    operation the roundings are OLMo-core's. Differences are in ulp of the largest term that went into a value: a first
    moment may be small because its terms cancel.
    """
    c = config("optim.skip_window=16")
    rng, params = np.random.default_rng(7), random_params(c.model)
    reference, tx = OlmoCore(c, params), train.optimizer(c)
    groups = {p: group for group in reference.module.optim.param_groups for p in group["params"]}
    named = dict(reference.module.model.named_parameters())
    update = jax.jit(tx.update) if compiled else tx.update
    state, worst, skips = tx.init(params), dict.fromkeys(("m", "v", "p", "decay"), 0.0), []
    decay = {name: np.full(t.shape, t.decay) for name, t in model.ledger(c.model).items()}
    for name, decays in to_olmo_core(decay).items():
        expected = c.optim.weight_decay if decays.all() else 0.0
        worst["decay"] += groups[named[name]]["weight_decay"] != expected
    terms = {name: np.zeros(p.shape, np.float32) for name, p in to_olmo_core(params).items()}
    largest = {name: np.abs(p) for name, p in to_olmo_core(params).items()}
    for k in range(1, 21):
        size = rng.uniform(0.5, 1.5) / np.sqrt(sum(p.size for p in params.values()))
        grads = {name: (size * rng.standard_normal(p.shape)).astype(np.float32) for name, p in params.items()}
        for name, g in to_olmo_core(grads).items():
            named[name].grad = torch.tensor(np.array(g))
        loss = np.float32(50.0 if k == 15 else 2.0 + 0.01 * rng.standard_normal())
        before = {name: p.copy() for name, p in reference.parameters().items()}
        reference.trainer.global_step = k
        reference.module.optim.latest_loss = torch.tensor(loss)
        reference.module.optim_step()
        norm = np.float32(metric(reference.metrics, "total grad norm"))
        updates, state = update(grads, state, params, loss=loss, grad_norm=norm, step=jnp.int32(k))
        params = jax.tree.map(np.asarray, jax.tree.map(jnp.add, params, updates))
        skips.append((bool(state.skipped), metric(reference.metrics, "step skipped") == 1))
        m, v, p = to_olmo_core(state.mu), to_olmo_core(state.nu), to_olmo_core(params)
        for name, theirs in reference.parameters().items():
            moments = reference.module.optim.state[named[name]]
            their_m, their_v = moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy()
            terms[name] = np.maximum.reduce(
                [terms[name] * 0.9, np.abs(their_m), np.abs(named[name].grad.numpy()) * 0.1]
            )
            worst["m"] = max(worst["m"], ulps(m[name], their_m, terms[name]))
            worst["v"] = max(worst["v"], ulps(v[name], their_v, their_v))
            largest[name] = np.maximum.reduce([largest[name], np.abs(theirs), np.abs(theirs - before[name])])
            worst["p"] = max(worst["p"], ulps(p[name], theirs, largest[name]))
    assert skips[14] == (True, True) and sum(ours for ours, _ in skips) == 1, skips
    return worst | {"skips": sum(ours != theirs for ours, theirs in skips)}


def optimizer_moments() -> Comparison:
    pair = optimizer_pair(compiled=False)
    return Comparison("both moments, 20 updates, ulp", "SkipStepAdamW (foreach)", max(pair["m"], pair["v"]), 0)


def optimizer_params() -> Comparison:
    pair = optimizer_pair(compiled=False)
    return Comparison(
        "parameters, 20 updates, ulp of the largest p or update", "SkipStepAdamW (foreach)", pair["p"], 20
    )


def optimizer_moments_compiled() -> Comparison:
    pair = optimizer_pair(compiled=True)
    return Comparison(
        "both moments, the compiled update, ulp", "SkipStepAdamW (foreach)", max(pair["m"], pair["v"]), 20
    )


def optimizer_params_compiled() -> Comparison:
    return Comparison("parameters, the compiled update, ulp", "SkipStepAdamW (foreach)", optimizer_pair(True)["p"], 40)


def optimizer_groups() -> Comparison:
    pair = optimizer_pair(compiled=True)
    return Comparison("tensors with another weight decay; updates that one side skips", "OptimGroupOverride",
                      pair["decay"] + pair["skips"], 0)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- data

# What OLMo-core 2.5 made of files of 19, 8, 3, 26 tokens at S 4, global batch 4, seed 34521: instances, batch by batch
RECORDED = [[10, 1, 11, 0], [2, 5, 6, 4], [8, 9, 7, 3], [8, 11, 9, 3], [7, 4, 5, 0], [6, 2, 1, 10]]


@cache
def data_pair() -> dict[str, int]:
    """Two epochs of every corpus through both loaders: tokens, instance ids, order files, fingerprints that differ."""
    rng = np.random.default_rng(11)
    corpora = [([19, 8, 3, 26], 4, 4, SEED)]  # files in tokens, S, global batch, seed
    for _ in range(4):
        S = int(rng.integers(5, 40))
        corpora.append((rng.integers(1, 30 * S, int(rng.integers(2, 9))).tolist(), S, int(rng.integers(1, 8)), 17))
    wrong = {"rows": 0, "order": 0, "fingerprint": 0, "batches": 0}
    for sizes, S, B, seed in corpora:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = [folder / f"{chr(97 + i)}.npy" for i in range(len(sizes))]
            for i, (path, n) in enumerate(zip(paths, sizes, strict=True)):
                (1000 * (i + 1) + np.arange(n)).astype("<u4").tofile(path)
            c = replace(config().data, sequence_length=S, global_batch=B, seed=seed, repetition_filter=False)
            source = our_source(paths, folder, c, 10_000)
            source = data.open_data(source.config, order_dir=folder / "ours")
            loader = olmo_core_loader(paths, folder, c, 10_000)
            wrong["fingerprint"] += loader.dataset.fingerprint != data.olmo_core_fingerprint(source.index)
            wrong["order"] += len(loader.dataset) != source.instances
            position = 0
            for epoch in (1, 2):
                loader.reshuffle(epoch)
                for batch in loader:
                    ours = source.batch_at(position)
                    position += B
                    wrong["batches"] += 1
                    wrong["rows"] += np.any(ours["tokens"] != batch["input_ids"].numpy(), axis=1).sum()
                    wrong["rows"] += np.sum(ours["instance"] != batch["index"].numpy())
                    if seed == SEED:
                        wrong["order"] += ours["instance"].tolist() != RECORDED[position // B - 1]
                theirs = loader._global_indices_file
                ours = folder / "ours" / theirs.name
                wrong["order"] += not ours.exists() or ours.read_bytes() != theirs.read_bytes()
                wrong["order"] += position != epoch * source.usable
                loader.reset()
    return wrong


def data_batches() -> Comparison:
    wrong = data_pair()
    return Comparison(f"rows of {wrong['batches']} batches, two epochs of five corpora, that differ",
                      "NumpyFSLDataset, NumpyFSLDataLoader", wrong["rows"], 0)  # fmt: skip


def data_order() -> Comparison:
    return Comparison("order files and epoch lengths that differ", "NumpyFSLDataLoader", data_pair()["order"], 0)


def data_fingerprint() -> Comparison:
    return Comparison("dataset fingerprints that differ", "NumpyFSLDataset.fingerprint", data_pair()["fingerprint"], 0)


def olmo_core_packed(
    paths: list[Path], folder: Path, c: data.DataConfig, packing: pack.Packing, masks: list[Path] | None
) -> NumpyDataLoaderBase:
    """Its packed dataset and loader. Documents of one length in order: numpy's default sort is unstable, and how it
    leaves them depends on the CPU."""
    tokenizer = TokenizerConfig(vocab_size=10_000, eos_token_id=EOS, pad_token_id=PAD)
    dataset = NumpyPackedFSLDatasetConfig(
        paths=[str(p) for p in paths], tokenizer=tokenizer, dtype=NumpyDatasetDType.uint32, generate_doc_lengths=True,
        label_mask_paths=masks and [str(p) for p in masks], sequence_length=packing.sequence_length, source_group_size=packing.group_size,
        source_permutation_seed=packing.permutation_seed, long_doc_strategy=packing.long_documents,
        instance_filter_config=InstanceFilterConfig() if c.repetition_filter else None, work_dir=str(folder / "work"),
    ).build()  # fmt: skip
    with mock.patch.object(np, "argsort", partial(np.argsort, kind="stable")):
        # `prepare` does this in processes of its own, which do not mix with jax.
        for group in dataset._source_path_groups:
            dataset._pack_documents_from_source_into_instances(*group)
    collator = DataCollator(pad_token_id=PAD, vocab_size=10_000)
    return NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset, global_batch_size=c.global_batch * c.sequence_length, collator=collator, work_dir=folder / "work",
        seed=c.seed,
    )  # fmt: skip


@cache
def packed_pair() -> dict[str, int]:
    """An epoch of every corpus, packed, through both loaders: what is different, and how many instances there were."""
    rng, wrong = np.random.default_rng(29), {"rows": 0, "instances": 0, "filtered": 0, "fingerprint": 0, "sorted": 0}
    for n, (S, group, long_documents) in enumerate(
        [(64, 8, "truncate"), (64, 2, "truncate"), (128, 1, "truncate"), (32, 3, "fragment"), (16, 5, "fragment")]
    ):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = [folder / f"{chr(97 + i)}.npy" for i in range(11)]
            for path in paths:
                lengths = np.maximum(1, rng.lognormal(np.log(S / 4), 1, int(rng.integers(1, 60)))).astype(int)
                tokens = rng.integers(2, 90, lengths.sum() + int(rng.integers(0, 5)))
                tokens[np.cumsum(lengths) - 1] = EOS
                tokens.astype("<u4").tofile(path)
                if n % 2:  # of a conversation only some tokens are learnt
                    (rng.random(len(tokens)) < 0.6).tofile(data.mask_path(path))
            packing = pack.Packing(S, group, 100 + n, long_documents)
            c = replace(config().data, sequence_length=S, global_batch=3, repetition_filter=n % 2 == 0)
            theirs = olmo_core_packed(paths, folder, c, packing, [*map(data.mask_path, paths)] if n % 2 else None)
            raw = our_source(paths, folder, replace(c, sequence_length=2), 10_000)
            options = f"--sequence-length={S} --group-size={group} --permutation-seed={100 + n} --workers=1"
            arguments = [raw.config.index, f"--long-documents={long_documents}", *options.split()]
            report = pack.pack(pack.parse_args([*arguments, "--out", str(folder / "packed")]))
            wrong["fingerprint"] += report["olmo_core_fingerprint"] != theirs.dataset.fingerprint
            wrong["instances"] += report["instances"]
            c = replace(c, index=report["index"], document_mask=True, mask_token=PAD)
            ours = data.open_data(c)
            theirs.reshuffle(1)
            for k, batch in enumerate(theirs):
                mine = ours.batch_at(3 * k)
                labels = np.where(mine["loss_mask"], mine["labels"], -100)
                lengths = [np.unique(row, return_counts=True)[1].tolist() for row in mine["segment_ids"]]
                same = [
                    np.array_equal(mine["tokens"][r], batch["input_ids"][r])
                    and np.array_equal(labels[r], get_labels(batch)[r])
                    and lengths[r] == [x for x in batch["doc_lens"][r].tolist() if x]
                    for r in range(3)
                ]
                wrong["rows"] += same.count(False) + int(np.sum(mine["instance"] != batch["index"].numpy()))
                wrong["filtered"] += int(mine["filtered"].sum())
            wrong["rows"] += 3 * (k + 1) != ours.usable
            # With its own sort, whatever that leaves of ties, instances hold documents of the same lengths.
            lengths = rng.integers(1, S + 1, 200)
            ends = np.cumsum(lengths)
            packed, spans, _ = InstancePacker(S).pack_documents(np.stack([ends - lengths, ends], axis=1))
            their_lengths = [[int(spans[d][1] - spans[d][0]) for d in documents] for documents in packed]
            our_lengths = [lengths[documents].tolist() for documents in pack.best_fit_decreasing(lengths, S)]
            wrong["sorted"] += their_lengths != our_lengths
    return wrong


def packed_batches() -> Comparison:
    wrong = packed_pair()
    return Comparison(f"rows of packed batches ({wrong['instances']} instances: tokens, labels, documents) that differ",
                      "NumpyPackedFSLDataset", wrong["rows"] + wrong["sorted"], 0)  # fmt: skip


def packed_fingerprint() -> Comparison:
    return Comparison("fingerprints of packed datasets that differ", "NumpyPackedFSLDataset.fingerprint",
                      packed_pair()["fingerprint"], 0)  # fmt: skip


def repetitive(rng, S: int) -> np.ndarray:
    """int64 [S]: something close to a repetition of about 32 times, anywhere, now and then broken, of few tokens."""
    vocabulary = int(rng.choice([2, 3, 97]))
    tokens = rng.integers(0, vocabulary, S)
    period = int(rng.integers(1, 16))
    length = min(S, period * int(rng.integers(30, 35)) + int(rng.integers(-period, period + 1)))
    start = int(rng.choice([0, S - length, rng.integers(0, S - length + 1)]))
    tokens[start : start + length] = np.resize(rng.integers(0, vocabulary, period), length)
    if rng.random() < 0.3:
        tokens[rng.integers(start, start + length)] = rng.integers(0, vocabulary)
    return tokens


@cache
def filter_pair() -> tuple[int, int, int]:
    """(instances, of them filtered by OLMo-core, decided differently)."""
    rng, settings, decisions = np.random.default_rng(13), InstanceFilterConfig(), []
    for n in range(4000):
        S = int(rng.choice([31, 32, 33, 64, 416, 417, 500, 512]))
        tokens = repetitive(rng, S) if n % 8 else rng.integers(0, 2 + n % 3, S)
        theirs = not NumpyFSLDataset._validate_instance(None, torch.tensor(tokens), settings)
        decisions.append((theirs, bool(data.repetition_filtered(tokens))))
    for period in range(1, 15):  # the edges: 31 and 32 times, whole and one token short, at every phase
        for times in (31, 32):
            for extra in (-1, 0, 1):
                for phase in range(period + 1):
                    length = period * times + extra
                    tokens = np.concatenate([np.full(phase, 90), np.resize(np.arange(period), length), [91, 92]])
                    theirs = not NumpyFSLDataset._validate_instance(None, torch.tensor(tokens), settings)
                    decisions.append((theirs, bool(data.repetition_filtered(tokens))))
    theirs, ours = np.array(decisions).T
    return len(theirs), int(theirs.sum()), int(np.sum(theirs != ours))


def repetition_filter() -> Comparison:
    n, filtered, wrong = filter_pair()
    return Comparison(f"decisions on {n} instances ({filtered} filtered)", "find_periodic_sequences", wrong, 0)


# -------------------------------------------------------------------------------------------- learning rate and skips


@cache
def learning_rate_pair() -> dict[str, float]:
    """Largest relative difference over every step of stage 1 (Ai2's two pieces, the case study's one), 2 and 3, and of
    the 32B's three."""
    stage1, stage1_ai2, stage2, stage3 = (load_config(f"{name}.yaml", "cpu", []) for name in
                                          ("stage1", "stage1_ai2", "stage2", "stage3"))  # fmt: skip
    of_32b = [load_config(f"stage{i}_32b.yaml", "cpu", []) for i in (1, 2, 3)]
    ai2_first, ai2_second = CosWithWarmup(warmup=2000), HalfCosWithWarmup(warmup=597_046)
    linear = partial(LinearWithWarmup, alpha_f=0.0)
    runs = [  # our config and schedule, last step, OLMo-core's learning rate of a step; numbers from Ai2's scripts
        (stage1.optim, stage1.schedule, 1_414_078, lambda s: CosWithWarmup(warmup=2000).get_lr(3e-4, s, 1_414_078)),
        (stage1_ai2.optim, stage1_ai2.schedule, 1_413_814,
         lambda s: (ai2_first.get_lr(3e-4, s, 1_192_093) if s <= 597_046 else ai2_second.get_lr(3e-4, s, 1_668_931))),
        (stage2.optim, stage2.schedule, 47_684,
         lambda s: linear(warmup=0).get_lr(2.0712352850360292e-4, s, 47_684)),
        (stage3.optim, stage3.schedule, 11_921, lambda s: linear(warmup=200).get_lr(2.0712352850360292e-4, s, 11_921)),
    ]  # fmt: skip
    for c, last, total, peak, scheduler in (
        (of_32b[0], 656_000, 707_000, 6e-4, CosWithWarmup(warmup=2000)),
        (of_32b[1], 23_842, 23_842, 0.0002071235285, linear(warmup=0)),
        (of_32b[2], 11_921, 11_921, 0.0002071235285, linear(warmup=200)),
    ):
        runs.append((c.optim, c.schedule, last, partial(scheduler.get_lr, peak, t_max=total)))
    worst = {"float64": 0.0, "float32": 0.0, "steps": 0}
    for settings, schedule, last, reference in runs:
        steps = np.arange(1, last + 1)
        theirs = np.array([reference(s) for s in range(1, last + 1)])
        ours = optim.learning_rate(settings, schedule, steps)
        applied = jax.jit(partial(optim.learning_rate, settings, schedule))(jnp.asarray(steps, jnp.int32))
        zero = theirs == 0
        assert zero.sum() <= 1 and np.all(ours[zero] == 0) and np.all(np.asarray(applied)[zero] == 0)
        for kind, values in (("float64", ours), ("float32", np.asarray(applied, np.float64))):
            worst[kind] = max(worst[kind], float(np.max(np.abs(values[~zero] / theirs[~zero] - 1))))
        worst["steps"] += last
    return worst


def learning_rate_float64() -> Comparison:
    pair = learning_rate_pair()
    return Comparison(f"learning rate at all {pair['steps']:,} steps of all recipes' stages, float64, relative",
                      "CosWithWarmup, HalfCosWithWarmup, LinearWithWarmup", pair["float64"], 1e-9)  # fmt: skip


def learning_rate_float32() -> Comparison:
    return Comparison("learning rate in the fp32 that the step applies, relative", "the same, float64",
                      learning_rate_pair()["float32"], 5e-7)  # fmt: skip


def traces():
    """Losses and gradient norms [T] of runs with spikes around step 64, in a row, downward, plateaus, and none."""
    rng, T = np.random.default_rng(17), 300
    for n in range(16):
        loss = 2 + 3 * np.exp(-np.arange(T) / 40) + rng.choice([0.0, 1e-3, 0.1]) * rng.standard_normal(T)
        norm = np.exp(rng.choice([0.0, 0.2]) * rng.standard_normal(T))
        for series in (loss, norm):
            for at in rng.integers(40, T, rng.integers(0, 5)):
                series[at : at + rng.integers(1, 6)] += rng.choice([-5.0, 0.5, 1.0, 2.0, 20.0])
        loss[62 + n % 3] += 30 * (n % 2)  # step 63, 64 or 65
        if n == 4:
            loss[:] = 2.5  # a deviation of exactly 0
        if n == 5:
            loss[:], norm[:] = 2.5, 0.1
            loss[200] = np.nextafter(np.float32(2.5), np.float32(3))
        if n == 6:
            loss[100:] += 50  # a new plateau, which the inflated deviation accepts in the end
        loss, norm = loss.astype(np.float32), norm.astype(np.float32)
        for at in np.flatnonzero(rng.random(T) < 0.05) if n >= 8 else []:  # just below and just above the threshold
            series = (loss, norm)[rng.integers(2)]
            before = series[max(0, at - 128) : at].astype(np.float64)
            if at >= 60:
                series[at] = before.mean() + 6 * (1 + rng.choice([-1e-3, 1e-3])) * before.std(ddof=1)
        yield loss, norm


@cache
def our_decisions():
    """[T] losses and norms -> [T] skipped, through the optimizer itself around one parameter."""
    c = config()
    tx = optim.skip_step_adamw(c.optim, c.schedule, {"w": True})
    params = {"w": jnp.ones(1, jnp.float32)}

    def one(state, series):
        _, state = tx.update(params, state, params, loss=series[0], grad_norm=series[1], step=jnp.int32(1))
        return state, state.skipped

    return jax.jit(lambda losses, norms: lax.scan(one, tx.init(params), (losses, norms))[1])


def olmo_core_decisions(losses, norms) -> np.ndarray:
    optimizer = SkipStepAdamWConfig(lr=1e-3).build(torch.nn.Linear(1, 1, bias=False))
    skipped = []
    for loss, norm in zip(losses, norms, strict=True):
        optimizer.latest_loss, optimizer.latest_grad_norm = torch.tensor(loss), torch.tensor(norm)
        optimizer.step()
        skipped.append(1 - optimizer.get_step_factor().item())
    return np.array(skipped) == 1


@cache
def skip_pair() -> tuple[int, int, int]:
    """(steps, of them skipped by OLMo-core, decided differently)."""
    both = [(olmo_core_decisions(*t), np.asarray(our_decisions()(*t))) for t in traces()]
    theirs, ours = np.concatenate(both, axis=1)
    return len(theirs), int(theirs.sum()), int(np.sum(theirs != ours))


def skip_rule() -> Comparison:
    n, skipped, wrong = skip_pair()
    return Comparison(f"decisions at {n} steps of 16 traces ({skipped} skipped)", "SkipStepOptimizer", wrong, 0)


COMPARISONS = (
    *(
        recipe_of_7b,
        recipe_of_32b,
        initial_weights,
        model_logits,
        model_logits_32b,
        model_logits_yarn,
        loss_labels,
        loss_cross_entropy,
        loss_z,
        loss_gradients,
    ),
    *(training_ce, training_grad_norm, training_windows, training_params, training_skips),
    *(optimizer_moments, optimizer_params, optimizer_moments_compiled, optimizer_params_compiled, optimizer_groups),
    *(data_batches, data_order, data_fingerprint, packed_batches, packed_fingerprint, repetition_filter),
    *(learning_rate_float64, learning_rate_float32, skip_rule),
)

# ---------------------------------------------------------------------------------- the size of declared divergences


def per_token_ce(logits, tokens) -> np.ndarray:
    """float64 [B, S-1]."""
    logits = np.asarray(logits, np.float64)[:, :-1]
    target = np.take_along_axis(logits, tokens[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    return np.logaddexp.reduce(logits, axis=-1) - target


def to_bfloat16(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def change(a, b) -> str:
    return f"mean {np.mean(a - b):+.1e}, root mean square of a token {np.sqrt(np.mean((a - b) ** 2)):.1e}"


def sizes() -> list[tuple[str, str]]:
    """(divergence, its measured size) of those that can change a loss, on the model that `training` has trained."""
    c = replace(config().model, compute_dtype="bfloat16")
    params = training().ours
    tokens = learnable(np.random.default_rng(19), 16 * 64, c.vocab_size).reshape(16, 64).astype(np.int32)
    ours = np.asarray(logits_function(c, "blockwise")(params, tokens))
    rounded = {name: to_bfloat16(p) if name.endswith("norm") else p for name, p in params.items()}
    rounded_norms = np.asarray(logits_function(c, "blockwise")(rounded, tokens))
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            reference = olmo_core_model(c, params).to(dtype)  # what its FSDP computes with
            theirs[dtype] = per_token_ce(reference(torch.tensor(tokens, dtype=torch.long)).float().numpy(), tokens)
    ce = per_token_ce(ours, tokens)
    rows = [
        ("5: CE with norm weights in fp32 - rounded to bf16", change(ce, per_token_ce(rounded_norms, tokens))),
        ("6: CE with logits in fp32 - rounded to bf16", change(ce, per_token_ce(to_bfloat16(ours), tokens))),
        ("5 and 6: CE in bf16, ours - OLMo-core's", change(ce, theirs[torch.bfloat16])),
        ("for scale: OLMo-core's CE in bf16 - in fp32", change(theirs[torch.bfloat16], theirs[torch.float32])),
    ]
    # 6 again, with as many rows as OLMo 3 has and logits of a usual spread
    rng = np.random.default_rng(23)
    large = 2 * rng.standard_normal((1, 65, 100_352), np.float32)
    labels = rng.integers(0, 100_352, (1, 65))
    np.put_along_axis(large, np.roll(labels, -1, 1)[..., None], 12 + 3 * rng.standard_normal((1, 65, 1)), axis=-1)
    wide = change(per_token_ce(large, labels), per_token_ce(to_bfloat16(large), labels))
    rows.append(("6: the same for 100,352 random logits of spread 2, the label's 12 +- 3", wide))

    # 7: two ranks of two rows each; one of the four instances is filtered, or two thirds of a rank's labels are padding
    c = config("data.sequence_length=16", "data.global_batch=4")
    ids = torch.tensor(tokens[:4, :16], dtype=torch.long)
    mask = torch.ones_like(ids, dtype=torch.bool)
    padded_rows = mask & ((torch.arange(16) < 5) | (torch.arange(4) % 2 == 1)[:, None])
    for what, batch in (
        ("one of four instances filtered", {"instance_mask": torch.tensor([True, True, False, True])}),
        ("rows 0 and 2 are padding from token 5 on", {"label_mask": padded_rows}),
    ):
        batch = {"input_ids": ids} | batch
        losses = []
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2)):
            reference = OlmoCore(c, random_params(c.model))
            reference.gradients({k: v[part].clone() for k, v in batch.items()})
            losses.append(metric(reference.metrics, "CE loss"))
        whole, *ranks = losses
        rows.append((f"7: CE of 4 x 16 tokens, {what}", f"one divisor {whole:.4f}, two ranks {np.mean(ranks):.4f}"))

    losses, norms = 2 + 0.1 * rng.standard_normal((2, 300)).astype(np.float32)
    losses[100] = np.nan
    counts = [int(f(losses, norms).sum()) for f in (our_decisions(), olmo_core_decisions)]
    rows.append(("2: steps skipped for one NaN loss", f"ours {counts[0]}, OLMo-core {counts[1]}"))
    losses[100] = 2
    losses[62] = losses[163] = 50
    again = np.concatenate(
        [olmo_core_decisions(losses[:101], norms[:101]), olmo_core_decisions(losses[101:], norms[101:])]
    )
    ours, theirs = ((np.flatnonzero(x) + 1).tolist() for x in (our_decisions()(losses, norms), again))
    what = "1: spikes at updates 63 and 164, restart after 101: skipped updates"
    rows.append((what, f"ours {ours}, OLMo-core {theirs}"))
    return rows


# ---------------------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare this project with OLMo-core, on the CPU.")
    parser.add_argument("--json", action="store_true", help="JSON instead of a Markdown table")
    parser.add_argument("--sizes", action="store_true", help="the sizes of the declared divergences instead")
    args = parser.parse_args()
    if args.sizes:
        header, rows = ("divergence", "size"), sizes()
    else:
        header, rows = Comparison._fields, [compare() for compare in COMPARISONS]
    if args.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=1, default=float))
        return
    for row in (header, ["---"] * len(header), *rows):
        print("|", " | ".join(x if isinstance(x, str) else f"{x:.2g}" for x in row), "|")


if __name__ == "__main__":
    main()
