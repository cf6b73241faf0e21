"""Compare a mesh with one device, break the sharding to see the comparison fail, and measure what sharding is for.

    python bench/sharding.py parity      loss, gradients and parameters by mesh against one device (--all: by variant)
    python bench/sharding.py mutants     the same with deliberately broken copies of the sources
    python bench/sharding.py memory      memory of the training step by number of fsdp devices
    python bench/sharding.py balance     scores that each context shard computes in a full layer

Each prints a Markdown table, or JSON with --json; tests/test_sharding.py asserts all of them. Eight fake CPU devices,
fp32, sizes that are all different: D48 H8 G4 K10 (A80 E40) F112, V97 in 104 rows, window 7, layers sfsf with YaRN.
"""

import argparse
import json
import math
import os
import sys
import time
import types
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# In front of the flags that are set already: of two the last one counts.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import data
import model
import train
from attention import blockwise_attention
from config import architecture, batch_specs, largest_microbatch, load_config, param_specs, shardings, to_device

HERE = Path(__file__).resolve().parent.parent
# Adam's eps: with 1e-8 it would blow up rounding wherever a gradient is itself of rounding size; and as large as a
# usual gradient after clipping, so that an update depends on the gradient's size and not on its sign alone.
OVERRIDES = [
    *("model.vocab_size=97", "model.padded_vocab_size=104", "model.n_layers=4", "model.d_model=48", "model.n_heads=8"),
    *("model.n_kv_heads=4", "model.head_dim=10", "model.d_ff=112", "model.window=7", "model.pattern=sf"),
    "model.yarn={factor: 8.0, original_length: 16, beta_fast: 2.0, beta_slow: 1.0}",  # so short that it changes RoPE
    *("model.init_std=0.08", "data.sequence_length=16", "data.global_batch=8", "data.repetition_filter=false"),
    *("data.document_mask=true", "data.mask_token=96", "optim.eps=1e-3", "optim.clip_norm=0.5", "optim.peak_lr=1e-2"),
    *("loss.z_loss=1e-3", "loss.filtered_in_divisor=true", "loss_chunk=13", "microbatch=8"),
    "schedule=[{until: null, kind: constant, warmup_steps: 0, total_steps: 1, final_fraction: 1.0}]",
    "xla_flags.xla_backend_optimization_level=0",  # compiles in half the time
]
EOS, PAD = 95, 96
SCIENCE = {  # what the reference on one device has as well
    "bare": ["data.document_mask=false", "model.yarn=null"],  # and no row is filtered
    "other": ["data.mask_token=null", "loss.z_loss=0.0", "loss.filtered_in_divisor=false", "model.n_kv_heads=8"],
    "S 15": ["data.sequence_length=15"],
    "S 512": ["data.sequence_length=512", "model.window=100", "model.n_layers=2"],
    "no clip": ["optim.clip_norm=1e9", "optim.eps=1e-2"],
    "latent_moe": [
        *("model.module=latent_moe", "model.n_experts=8", "model.top_k=3", "model.d_latent=20", "model.d_expert=28"),
        *("model.group=2", "model.capacity=1.0", "model.balance_weight=0.05"),  # of a group an expert takes one token
    ],
    "mtp": ["model.module=mtp", "model.mtp_depth=2", "model.mtp_weight=0.4"],
}
FILTERED = {"bare": (), "a device filtered": (2, 3), "all filtered": tuple(range(8))}  # rows; otherwise row 2
HARDWARE = {  # what may not change the result
    "dense": ["attention=dense"],
    **{f"block {n}": ["attention=blockwise", f"attention_block={n}"] for n in (1, 2, 3, 4, 8)},
    **{f"micro {n}": [f"microbatch={n}"] for n in (1, 2)},
    "remat": ["remat=[q, k, v, heads_out, attn_out]"],
    "splash": [
        "attention=splash",
        "splash={block: 128, block_backward: 128, q_layout: seq_minor, k_layout: seq_minor, v_layout: head_dim_minor}",
    ],  # interpreted; it turns check_vma off
    "unchecked": [],  # check_vma=False
}


class Case(NamedTuple):
    mesh: tuple[int, int, int, int]  # data, fsdp, context, tensor
    words: tuple[str, ...]  # keys of SCIENCE, FILTERED and HARDWARE

    def __str__(self):
        return f"{' '.join(map(str, self.mesh))}: {', '.join(self.words)}"


def cases(table: str) -> list[Case]:
    """All cases of each line's meshes with each of its variants; two spaces between the two, semicolons in both."""
    lines = [[part.split("; ") for part in line.strip().split("  ")] for line in table.strip().splitlines()]
    return [Case(tuple(map(int, mesh.split())), tuple(words.split(", ")))
            for meshes, variants in lines for mesh in meshes for words in variants]  # fmt: skip


# A context shard has 8, 5, 4, 3 or 2 positions: its full layers run one switch over ranges of keys (block 3 and 8), or
# a loop over blocks with a switch in each (block 1, 2 and 4). Without clipping: 1, 2, 4 and 8 devices.
CASES = cases("""
    1 2 2 2  block 3, micro 2, remat; block 4, bare, unchecked
    2 2 2 1  dense, micro 1, unchecked
    2 1 2 2  dense, other
    1 2 1 4  dense
    1 1 8 1  block 1
    1 1 3 1  dense, S 15
    2 1 1 1; 2 2 1 1; 2 2 1 2  dense, no clip, unchecked
    1 4 1 1  dense, a device filtered
    1 2 2 1  dense, all filtered
    1 2 2 2  splash, S 512, unchecked
""")
MORE_CASES = cases("""
    1 1 1 1; 8 1 1 1; 1 8 1 1; 2 4 1 1; 2 2 1 1; 1 2 1 1; 1 1 1 4; 1 1 1 2; 1 1 2 1  block 3, micro 1, unchecked
    2 2 2 1; 1 2 2 2; 2 1 2 2; 2 2 1 2; 1 2 1 4  block 2, other, remat; block 8, micro 1, unchecked; dense, bare
    1 1 8 1; 2 1 4 1; 1 1 2 4  block 1, remat, unchecked; dense, other, micro 2
    1 1 3 1; 2 1 3 1; 1 1 5 1  block 1, S 15, unchecked; block 3, S 15
    8 1 1 1; 1 2 2 2  block 8, no clip, micro 1
    1 1 4 1; 2 1 2 2  splash, S 512, unchecked
""")


def make_config(case: Case, *overrides: str):
    chosen = [override for word in case.words for override in (SCIENCE | HARDWARE).get(word, [])]
    mesh = [f"mesh.{axis}={size}" for axis, size in zip(model.AXES, case.mesh, strict=True)]
    return load_config("quickstart.yaml", "cpu", [*OVERRIDES, *mesh, *chosen, *overrides])


def make_mesh(shape):
    auto = (jax.sharding.AxisType.Auto,) * 4
    return jax.make_mesh(shape, model.AXES, axis_types=auto, devices=jax.devices()[: math.prod(shape)])


def make_batch(case: Case, c, seed: int) -> dict[str, np.ndarray]:
    """Random documents; half of row 1 and all but a quarter of row 5 are padding; some rows are filtered."""
    rng = np.random.default_rng(seed)
    B, S = c.data.global_batch, c.data.sequence_length
    tokens = rng.integers(0, EOS, (B, S))
    tokens[rng.random((B, S)) < 0.15] = EOS
    tokens[1, S // 2 :] = tokens[5, S // 4 :] = PAD
    batch = data.finish_batch(tokens, np.arange(B), types.SimpleNamespace(eos_id=EOS), c.data)
    rows = next((FILTERED[word] for word in case.words if word in FILTERED), (2,))
    batch["filtered"][list(rows)] = True
    batch["loss_mask"] &= ~batch["filtered"][:, None]
    return batch


def random_params(c) -> dict[str, np.ndarray]:
    """With random norm weights, as training makes them: with ones, a norm in the wrong place could pass."""
    rng = np.random.default_rng(0)
    noise = {name: rng.standard_normal(t.shape, np.float32) for name, t in architecture(c).ledger(c.model).items()}
    return {k: x * np.float32(c.model.init_std) if k[-4:] != "norm" else 1 + np.float32(0.3) * x
            for k, x in noise.items()}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- parity


def gradients(case: Case, code=train, config=None) -> dict:
    """CE, squared logsumexp and gradients of one batch, from train.gradients inside a shard_map."""
    c, mesh = config or make_config(case), make_mesh(case.mesh)
    batch = make_batch(case, c, 1)
    divisor = batch["loss_mask"].sum() + c.loss.filtered_in_divisor * batch["filtered"].sum() * c.data.sequence_length
    size = largest_microbatch(c, mesh)
    execution = code.make_execution(c, size, "cpu")

    def body(params, batch):
        grads, sums = code.gradients(params, batch, np.float32(max(divisor, 1)), c, execution, size)
        return grads, lax.psum(sums, model.AXES) / max(divisor, 1)

    specs = param_specs(c)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, batch_specs(c)), out_specs=(specs, P()),
                           check_vma="unchecked" not in case.words)  # fmt: skip
    on_mesh = jax.device_put(random_params(c), shardings(mesh, specs))
    batch = to_device(batch, mesh, c, c.data.global_batch)
    grads, sums = jax.tree.map(np.asarray, jax.jit(mapped, compiler_options=c.hardware.xla_flags)(on_mesh, batch))
    return {"CE": sums[0], "z": sums[1], "gradients": grads}


def steps(case: Case, code=train, count: int = 3) -> dict:
    """CE, squared logsumexp and gradient norm of three steps, first moments and parameters after the last."""
    c, mesh = make_config(case), make_mesh(case.mesh)
    step = code.compile_train_step(c, mesh, check_vma="unchecked" not in case.words)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), code.state_shapes(c, mesh)[1])
    params, state = jax.device_put((random_params(c), zeros), shardings(mesh, code.state_specs(c)))
    log = []
    for k in range(1, count + 1):
        batch = to_device(make_batch(case, c, k), mesh, c, c.data.global_batch)
        params, state, metrics = step(params, state, batch, jnp.int32(k))
        log.append([metrics[name] for name in ("ce", "z_unscaled", "grad_norm")])
    ce, z, norm = zip(*log, strict=True)
    moments, params = jax.tree.map(np.asarray, (state.mu, params))
    return {"3 CE": ce, "3 z": z, "3 gradient norms": norm, "moments": moments, "parameters": params}


@cache
def reference(measure, science: tuple[str, ...]) -> dict:
    return measure(Case((1, 1, 1, 1), ("dense", *science)))


def difference(a, b) -> float:
    """Largest difference, relative to the largest magnitude of the reference b; infinite if a is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.nan_to_num(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30), nan=np.inf))


def compare(case: Case, code=train, measures=(gradients, steps)) -> dict:
    """Quantity -> difference from one device; of those that are a tensor each, the worst tensor and its name."""
    science = tuple(word for word in case.words if word not in HARDWARE)
    row = {"mesh": " ".join(map(str, case.mesh)), "variant": ", ".join(case.words)}
    for measure in measures:
        there = reference(measure, science)
        for quantity, here in measure(case, code).items():
            if isinstance(here, dict):
                row[quantity], name = max((difference(here[name], there[quantity][name]), name) for name in here)
                row[f"worst of {quantity}"] = name
            else:
                row[quantity] = difference(here, there[quantity])
    return row


def parity() -> list[dict]:
    return [compare(case) for case in CASES + MORE_CASES]


def by_mesh(rows: list[dict]) -> list[dict]:
    """Of the variants of each mesh the largest difference."""
    table = {}
    for row in rows:
        numbers = {quantity: x for quantity, x in row.items() if isinstance(x, float)}
        best = table.setdefault(row["mesh"], {"data fsdp context tensor": row["mesh"], "variants": 0})
        best |= {quantity: max(x, best.get(quantity, 0.0)) for quantity, x in numbers.items()}
        best["variants"] += 1
    return list(table.values())


# ---------------------------------------------------------------------------------------------------------- mutants


# In the order of their imports: each comes after those that it imports.
SOURCES = ("model", "attention", "config", "train")


class Mutant(NamedTuple):
    broken: str  # what is wrong
    old: str  # stands exactly once in SOURCES
    new: str
    case: str
    measure: object = gradients  # the cheaper one that shows it


GENERAL, FULL = "2 2 2 1  dense, unchecked", "1 2 2 2  dense, unchecked"
TENSOR, CONTEXT = "1 2 1 4  dense, unchecked", "1 1 4 1  dense, unchecked"
SHARE, SUMMED = "return total / divisor / tensor, sums", "lax.psum(grads[name], axes)"
SCATTER, NORM = "dimension=0, tiled=True)", "lax.psum(jnp.sum(jnp.square(g)), model.axes_of(specs[name]))"
HEAD = "dimension=0, tiled=False)"
MUTANTS = [Mutant(*row) for row in (
    ("QK-norm over a device's own heads", 'vary(lax.psum(square_sum, "tensor"))',
     'square_sum * lax.axis_size("tensor")', TENSOR),
    ("rows of the vocabulary over fsdp, then over tensor", '"embed": Tensor((V, D), P(("tensor", "fsdp")',
     '"embed": Tensor((V, D), P(("fsdp", "tensor")', TENSOR, steps),
    ("embedding not summed over tensor", 'vary(lax.psum(x_ND, "tensor"))', "x_ND", TENSOR),
    ("attention not summed over tensor", '"attn_out", slot, vary(lax.psum(out_ND, "tensor"))', '"attn_out", slot, out_ND', TENSOR),
    ("SwiGLU not summed over tensor", '"ffn_out", slot, vary(lax.psum(out_ND, "tensor"))', '"ffn_out", slot, out_ND', TENSOR),
    ("softmax over a device's own rows of the vocabulary", 'vary(lax.psum(sum_C, "tensor"))', "sum_C", TENSOR),
    ("padding rows counted among a device's own", 'jnp.where(lax.axis_index("tensor") * rows + ', "jnp.where(", TENSOR),
    ("loss's gradient not summed over tensor", 'lax.psum(cotangents[0], "tensor")', "cotangents[0]", TENSOR),
    ("gradients not summed over data", SUMMED, "lax.psum(grads[name], axes[1:])", GENERAL),
    ("gradients not summed over context", "tuple(a for a in AXES if a not in axes_of(t.spec))",
     'tuple(a for a in AXES if a not in axes_of(t.spec) and a != "context")', FULL),
    ("gradients summed over fsdp too", SUMMED, 'lax.psum(grads[name], tuple({*axes, "fsdp"}))', FULL),
    ("reduce-scatter averages", SCATTER, f'{SCATTER} / lax.axis_size("fsdp")', FULL),
    ("reduce-scatter of the head averages", HEAD, f'{HEAD} / lax.axis_size("fsdp")', FULL),
    ("share of the loss not divided by tensor", SHARE, "return total / divisor, sums", FULL),
    ("share of the loss summed over the mesh", SHARE,
     "return lax.psum(total / divisor / tensor, model.AXES), sums", FULL),
    ("parameters not marked as varying", "params, code = model.vary(params), ", "code = ", FULL),
    ("nothing marked as varying", "return jax.tree.map(mark, x)", "return x", FULL),
    ("halo one key short", "halo = window - 1", "halo = window - 2", CONTEXT),
    ("halo from the same neighbour at every hop", "passed = passed[:,", "passed = x[:,", "1 1 8 1  dense, unchecked"),
    ("positions start again on every shard", 'lax.axis_index("context") * S + jnp', "jnp", CONTEXT),
    ("positions not exchanged", "swap_with_mirror(positions_S[None])[0]", "positions_S", CONTEXT),
    ("documents not exchanged", "swap_with_mirror(segments_BS) if segments", "segments_BS if segments", CONTEXT),
    ("outputs not exchanged back", "swap_with_mirror(attention(", "(attention(", CONTEXT),
    ("range of keys one short", "jnp.max(places.q_pos) >= ", "jnp.max(places.q_pos) > ", "1 1 8 1  block 1, unchecked"),
    ("labels of one context shard in the divisor", 'dtype=jnp.int32), (*BATCH_AXES, "context"))',
     "dtype=jnp.int32), BATCH_AXES)", CONTEXT, steps),
    ("gradient norm of a device's own shards", NORM, "jnp.sum(jnp.square(g))", FULL, steps),
    ("gradient norm counts copies", NORM, "lax.psum(model.vary(jnp.sum(jnp.square(g))), model.AXES)", GENERAL, steps),
)]  # fmt: skip
# A vary() missing after one psum breaks nothing: unchecked it does nothing, checked jax casts at the next use.
EQUIVALENT = Mutant("one psum not marked as varying", 'vary(lax.psum(square_sum, "tensor"))',
                    'lax.psum(square_sum, "tensor")', FULL)  # fmt: skip


def broken(mutant: Mutant):
    """train.py as a fresh module: one file is broken, it or one that it imports. The files on disk stay as they are."""
    sources = {name: (HERE / f"{name}.py").read_text() for name in SOURCES}
    assert sum(source.count(mutant.old) for source in sources.values()) == 1, f"not there just once: {mutant.old!r}"
    with mock.patch.dict(sys.modules):
        for name, source in sources.items():
            sys.modules[name] = module = types.ModuleType(name)
            module.__file__ = str(HERE / f"{name}.py")
            exec(compile(source.replace(mutant.old, mutant.new), f"broken {name}.py", "exec"), module.__dict__)
    return module


def effect(mutant: Mutant, check_vma: bool, measures=(gradients, steps)) -> dict | None:
    """`compare` of the broken code; None if shard_map refuses it."""
    (case,) = cases(mutant.case)
    if check_vma:
        case = case._replace(words=tuple(word for word in case.words if word != "unchecked"))
    try:
        return compare(case, broken(mutant), measures)
    except (ValueError, TypeError):
        return None


def largest(row: dict) -> float:
    return max(x for x in row.values() if isinstance(x, float))


def all_mutants() -> list[dict]:
    rows = []
    for m in (*MUTANTS, EQUIVALENT):
        checked = effect(m, True, (m.measure,))
        found = {"check_vma=True": "refused" if checked is None else largest(checked)}
        rows.append({"broken": m.broken} | effect(m, False) | found)
    return rows


# ----------------------------------------------------------------------------------------------- memory and balance

LARGER = ["model.n_layers=16", "model.d_model=256", "model.d_ff=1024", "attention=dense"]


def memory(fsdp=(1, 2, 4, 8)) -> list[dict]:
    """MiB that the compiler plans for one device of the training step, where parameters dominate: 13.6 million."""
    rows = []
    for n in fsdp:
        c = load_config("quickstart.yaml", "cpu", [*OVERRIDES, *LARGER, f"mesh.fsdp={n}"])
        case = Case((1, n, 1, 1), ())
        mesh = make_mesh(case.mesh)
        batch = to_device(make_batch(case, c, 1), mesh, c, c.data.global_batch)
        step = train.compile_train_step(c, mesh).lower(*train.state_shapes(c, mesh), batch, jnp.int32(1))
        plan = step.compile().memory_analysis()
        new = plan.output_size_in_bytes - plan.alias_size_in_bytes  # the rest takes the place of arguments
        sizes = {"arguments": plan.argument_size_in_bytes, "temporary": plan.temp_size_in_bytes, "outputs": new}
        row = {"fsdp": n} | {name: size / 2**20 for name, size in (sizes | {"all": sum(sizes.values())}).items()}
        first = rows[0] if rows else row
        rows.append(row | {"share of arguments": row["arguments"] / first["arguments"], "expected": 1 / n})
    return rows


def full_attention(q, k, q_pos, block: int):
    """Blockwise attention of one context shard in a full layer: q [1,S,H,K] at q_pos [S], k (and v) [1,T,H,K]."""
    places = model.Places(q_pos, jnp.arange(k.shape[1]), None, None)
    return blockwise_attention(q, k, k, model.Where(places, window=None, offset=None), 0, block)


def scores_computed(T: int, shards: int, block: int, exchange: bool) -> np.ndarray:
    """[shards] scores (queries x keys) that blockwise attention of a full layer computes, a head and a sequence.

    The source's own code runs, but its lax.switch answers with the number of keys that it would have chosen.
    """
    positions = jnp.arange(T).reshape(shards, 1, -1)
    if exchange:
        positions = jax.vmap(model.swap_with_mirror, axis_name="context")(positions)

    def chosen(index, branches, q, *_):
        return jnp.full(q.shape, jnp.array([branch.args[0] for branch in branches])[index], jnp.float32)

    q, k = jnp.zeros((1, T // shards, 1, 1)), jnp.zeros((1, T, 1, 1))
    with mock.patch.object(lax, "switch", chosen):
        keys = jax.lax.map(lambda q_pos: full_attention(q, k, q_pos, block), positions[:, 0])
    return np.sum(np.asarray(keys, np.float64).reshape(shards, -1), axis=1)


def balance(T: int = 65536, block: int = 1024) -> list[dict]:
    """The busiest shard over the mean, and how many scores are computed for each that is needed."""
    rows = []
    for shards in (2, 4, 8, 16):
        row = {"context shards": shards}
        for name, exchange in (("exchanged", True), ("as they lie", False)):
            scores = scores_computed(T, shards, block, exchange)
            row[f"max / mean, {name}"] = scores.max() / scores.mean()
        rows.append(row | {"computed / needed": scores.sum() / (T * (T + 1) / 2)})
    return rows


def late_over_early(differentiate: bool, T: int = 8192, shards: int = 8, block: int = 256) -> float:
    """Seconds that the last context shard's attention takes over the first's, queries as they lie."""
    q, k = (jax.random.normal(jax.random.key(0), (1, n, 2, 32)) for n in (T // shards, T))
    f = partial(full_attention, block=block)
    f = jax.jit(jax.grad(lambda *args: jnp.sum(full_attention(*args, block) ** 2), (0, 1)) if differentiate else f)
    seconds = {0: [], shards - 1: []}
    for _ in range(6):  # the first one compiles
        for shard, taken in seconds.items():
            start = time.perf_counter()
            jax.block_until_ready(f(q, k, shard * (T // shards) + jnp.arange(T // shards)))
            taken.append(time.perf_counter() - start)
    return min(seconds[shards - 1]) / min(seconds[0])


# ----------------------------------------------------------------------------------------------------- command line


def main() -> None:
    verbs = {"parity": parity, "mutants": all_mutants, "memory": memory, "balance": balance}
    parser = argparse.ArgumentParser(description="Sharding, compared with one device and measured, on fake devices.")
    parser.add_argument("verb", choices=verbs, help="what to print, e.g.  python bench/sharding.py parity")
    parser.add_argument("--all", action="store_true", help="parity: a row for every variant, with the worst tensors")
    parser.add_argument("--json", action="store_true", help="JSON instead of a Markdown table")
    args = parser.parse_args()
    rows = verbs[args.verb]()
    if args.verb == "parity" and not args.all:
        rows = by_mesh(rows)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for cells in (rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print("|", " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells), "|")
    if args.verb == "balance":
        print(f"Seconds, last shard of 8 over the first, as they lie: forward {late_over_early(False):.1f}, "
              f"backward {late_over_early(True):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
