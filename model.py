"""The OLMo 3 transformer and its loss, written for one device's shard of a (data, fsdp, context, tensor) mesh.

    h = x + RMSNorm(Attention(x))        y = h + RMSNorm(SwiGLU(h))        logits = RMSNorm(y_last) @ lm_head.T

The norms are reordered: after attention and feed-forward, before the residual add. QK-norm is over all heads jointly,
before RoPE. Three sliding-window layers and one full layer take turns; YaRN is on the full layers only. The head is
untied, and nothing has a bias. The loss is cross-entropy + z_loss * logsumexp^2, computed chunk by chunk.

Everything below `PARAMETERS` runs inside `jax.shard_map`: arrays are local blocks and every collective is written
out, one per line. How gradients stay right is told at `vary`. The file imports no sibling and can be copied.

A training step on two devices along tensor, with optim.py beside this file (JAX_NUM_CPU_DEVICES=2 on a CPU). Without the
division by tensor's size the gradients are wrong, and the loss that is logged may not tell. Over context shards the labels
must be made of the whole sequence:

    import jax, jax.numpy as jnp, model, optim, optax
    from jax import lax
    from jax.sharding import AxisType, PartitionSpec as P

    config = model.ModelConfig(97, 104, True, 4, 48, 4, 2, 12, 80, 7, "sssf", 5e5, None, 1e-6, 0.02, "float32", "float32")
    execution = model.Execution(model.dense_attention, remat=None, scan_unroll=1, loss_chunk=16)
    mesh = jax.make_mesh((1, 1, 1, 2), model.AXES, axis_types=(AxisType.Auto,) * 4)
    table = model.ledger(config)
    specs, decay = {name: t.spec for name, t in table.items()}, {name: t.decay for name, t in table.items()}
    settings = optim.OptimConfig(1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, skip_window=128, skip_sigma=6.0, max_nonfinite_steps=3)
    tx = optim.skip_step_adamw(settings, (optim.SchedulePiece(None, "constant", 0, 1, 1.0),), decay)

    def step(params, opt_state, tokens):
        mask = jnp.ones(tokens.shape, bool).at[:, -1].set(False)  # the last token has no label
        batch = {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1), "segment_ids": None, "loss_mask": mask}
        labels = lax.psum(jnp.sum(mask), ("data", "fsdp", "context"))  # of the whole batch

        def share(params):  # this device's part of the mean loss: tokens are the same along tensor
            total, _ = model.token_loss(params, model.vary(batch), 0.0, config, execution)
            return total / labels / lax.axis_size("tensor")

        loss, grads = jax.value_and_grad(share)(model.vary(params))  # vary: each device has its own copy
        grads = model.reduce_gradients(grads, config)
        squares = [lax.psum(jnp.sum(g**2), model.axes_of(specs[n])) for n, g in grads.items()]
        loss, norm = lax.psum(loss, model.AXES), jnp.sqrt(sum(squares))
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss, grad_norm=norm, step=jnp.int32(1))
        return optax.apply_updates(params, updates), opt_state, loss

    params = model.init_params(config, seed=0)
    opt_state = tx.init(params)
    in_and_out = (specs, jax.tree.map(lambda _: P(), opt_state)._replace(mu=specs, nu=specs))
    in_specs, out_specs = (*in_and_out, P(("data", "fsdp"), "context")), (*in_and_out, P())
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    params, opt_state, loss = step(params, opt_state, jax.random.randint(jax.random.key(1), (2, 16), 0, 97))

Not here: faster attention (attention.py), the optimizer (optim.py), the batch (data.py), the training loop (train.py).
Source: OLMo-core 2.5, nn/transformer, nn/attention, nn/rope.py, nn/layer_norm.py, nn/functional.

Dimensions, used as shape suffixes (`x_ND`) and, in lower case, in einsum strings:
    B sequences    S query positions   T key positions   N = B*S tokens   C tokens of one loss chunk
    D width        H query heads       G key/value heads   K head dimension   R = H/G   A = H*K   E = G*K
    F feed-forward width   V vocabulary   L layers
A cycle is one pass through the pattern of layers (sssf); a slot is a layer's place in it, 0 to 3. Sizes in suffixes and
bodies are one device's; only a line that begins with "local:" tells how they come from the whole batch's.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "context", "tensor")
# Activations that Execution.remat may name, in the order in which a layer makes them.
SAVED = ("x", "q", "k", "v", "heads_out", "lse", "attn_out", "gate", "up", "ffn_out")
MASKED = -1e30  # finite, so that a masked score times a zero probability is zero and not NaN


# ---------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class YarnConfig:
    """Context extension of the full-attention layers (https://arxiv.org/abs/2309.00071)."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; every number stands in the config file, there are no defaults."""

    vocab_size: int
    padded_vocab_size: int  # rows of embed and lm_head; OLMo pads 100278 to 100352, a multiple of 128
    mask_padded_vocab: bool  # True: padding rows are outside the softmax; False: inside, as OLMo-core trains
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    window: int  # keys that a sliding layer sees, the query's own included
    pattern: str  # one letter a layer of the cycle: s sliding, f full
    rope_theta: float
    yarn: YarnConfig | None
    norm_eps: float
    init_std: float
    compute_dtype: str
    grad_reduce_dtype: str  # in which the reduce-scatter over fsdp adds; OLMo-core: float32

    def __post_init__(self):
        def check(holds: bool, name: str, got, expected: str):
            if not holds:
                raise ValueError(f"model.{name}: got {got}, expected {expected}")

        for name in ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "window"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        rows, heads, n = self.padded_vocab_size, self.n_heads, len(self.pattern)
        check(rows >= self.vocab_size, "padded_vocab_size", rows, f"at least vocab_size {self.vocab_size}")
        check(set(self.pattern) <= {"s", "f"} and n > 0, "pattern", repr(self.pattern), "letters s and f")
        check(self.n_layers % n == 0, "n_layers", self.n_layers, f"a multiple of the pattern's length {n}")
        check(heads % self.n_kv_heads == 0, "n_heads", heads, f"a multiple of n_kv_heads {self.n_kv_heads}")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (RoPE rotates pairs)")
        for name in ("rope_theta", "norm_eps", "init_std"):
            check(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a positive number")
        for name in ("compute_dtype", "grad_reduce_dtype"):
            check(getattr(self, name) in ("float32", "bfloat16"), name, getattr(self, name), "float32 or bfloat16")

    @property
    def kinds(self) -> str:
        """The letter of every attention layer."""
        return self.pattern * (self.n_layers // len(self.pattern))


@dataclass(frozen=True)
class Execution:
    """How the maths is carried out on a machine. Nothing here may change a result beyond floating-point order."""

    attention: Callable  # (q, k, v, where, slot) -> heads_out: dense_attention, or a faster one of attention.py
    remat: tuple[str, ...] | None  # names of activations saved for the backward pass; None ("all" in a file): all of
    # them, but over fsdp no gathered weight
    scan_unroll: int  # cycles of the layer pattern unrolled in the layer loop
    loss_chunk: int  # tokens whose logits exist at once
    key_multiple: int = 1  # the attention wants a number of keys divisible by this; Splash: 128
    take_rows: Callable = operator.getitem  # (table [V, D], ids [N]) -> [N, D]; or attention.rows_in_order

    def __post_init__(self):
        for name in self.remat or ():
            if not isinstance(name, str) or name.rstrip("0123456789") not in SAVED:
                raise ValueError(f"remat: got {name!r}, expected 'all', or names out of {', '.join(SAVED)}, each for all "
                                 "layers of the pattern or, with a number, for one: gate0")  # fmt: skip
        for name in ("scan_unroll", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a positive number")


# ------------------------------------------------------------------------------------------------------- PARAMETERS


class Tensor(NamedTuple):
    """One line of the ledger: what there is to know about a parameter."""

    shape: tuple[int, ...]  # global
    spec: P  # how it is sharded over the mesh
    std: float | None  # of the truncated normal it starts from; None: ones
    decay: bool  # weight decay
    uses: float = 1  # matmuls of a token with it in one pass, for FLOPs; an expert's share where tokens choose


def ledger(config: ModelConfig) -> dict[str, Tensor]:
    """Name -> shape, sharding, initial std, weight decay. Everything about parameters derives from this table.

    Source: OLMo-core nn/transformer/init.py: normal, std 0.02, truncated at 3 std, no depth scaling, norms 1. The
    official scripts decay everything except the embedding, norms and head included.
    """
    # Per-layer tensors are stacked over L. Matrices are stored with the width D first, so that fsdp always shards rows:
    # a shard of columns would be narrower than a TPU tile. For the same reason it shards the vocabulary's rows, within
    # each device's along tensor. convert.py transposes, nothing else does.
    L, D, V, F, std = config.n_layers, config.d_model, config.padded_vocab_size, config.d_ff, config.init_std
    A, E = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "embed": Tensor((V, D), P(("tensor", "fsdp"), None), std, False),
        "wq": Tensor((L, D, A), P(None, "fsdp", "tensor"), std, True),
        "wk": Tensor((L, D, E), P(None, "fsdp", "tensor"), std, True),
        "wv": Tensor((L, D, E), P(None, "fsdp", "tensor"), std, True),
        "wo": Tensor((L, D, A), P(None, "fsdp", "tensor"), std, True),
        "q_norm": Tensor((L, A), P(None, "tensor"), None, True),
        "k_norm": Tensor((L, E), P(None, "tensor"), None, True),
        "attn_norm": Tensor((L, D), P(), None, True),
        "w_gate": Tensor((L, D, F), P(None, "fsdp", "tensor"), std, True),
        "w_up": Tensor((L, D, F), P(None, "fsdp", "tensor"), std, True),
        "w_down": Tensor((L, D, F), P(None, "fsdp", "tensor"), std, True),
        "ffn_norm": Tensor((L, D), P(), None, True),
        "final_norm": Tensor((D,), P(), None, True),
        "lm_head": Tensor((V, D), P(("tensor", "fsdp"), None), std, True),
    }


LAYER_TENSORS = ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "attn_norm", "w_gate", "w_up", "w_down", "ffn_norm")


def axes_of(spec: P) -> tuple[str, ...]:
    """The mesh axes that a spec names, in the mesh's order; two of them may share a dimension."""
    return tuple(axis for axis in AXES if axis in jax.tree.leaves(tuple(spec)))


def parameter_count(config: ModelConfig, padded: bool = True) -> int:
    """Number of parameters; 7B: 7,298,617,344 with the vocabulary's padding rows and 7,298,011,136 without."""
    total = sum(math.prod(t.shape) for t in ledger(config).values())
    return total if padded else total - 2 * (config.padded_vocab_size - config.vocab_size) * config.d_model


def init_params(config: ModelConfig, seed: int, ledger=ledger) -> dict[str, jax.Array]:
    """fp32 parameters from a normal truncated at 3 std. Pure in (config, seed), whatever JAX's random numbers are set
    to: jit it with out_shardings. `ledger`: of a model that is built on this one (experiments/).

    DIVERGENCE 4: OLMo-core draws from torch's generator, whose stream cannot be had here; same distribution.
    """
    params = {}
    for i, (name, t) in enumerate(ledger(config).items()):
        if t.std is None:
            params[name] = jnp.ones(t.shape, jnp.float32)
            continue
        with jax.threefry_partitionable(True):
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), i)
            params[name] = t.std * jax.random.truncated_normal(key, -3.0, 3.0, t.shape, jnp.float32)
    return params


def check_mesh(config: ModelConfig, sizes: dict[str, int], sequence_length: int) -> None:
    """Raise ValueError with both numbers if the model cannot be sharded over the mesh."""
    for name, size, *axes in (
        ("d_model", config.d_model, "fsdp"),
        ("n_heads", config.n_heads, "tensor"),
        ("n_kv_heads", config.n_kv_heads, "tensor"),
        ("d_ff", config.d_ff, "tensor"),
        ("padded_vocab_size", config.padded_vocab_size, "tensor", "fsdp"),
        ("sequence_length", sequence_length, "context"),
    ):
        shards = math.prod(sizes[axis] for axis in axes)
        if size % shards:
            raise ValueError(f"{name}: got {size}, expected a multiple of the mesh's {' x '.join(axes)} size {shards}")


# ------------------------------------------------------------------------------------- collectives and their gradients


def vary(x):
    """Mark x as differing from device to device along every axis, which is how gradients are kept right here.

    Each device differentiates its own disjoint share of the global loss with respect to its own copies of its
    inputs. For that, every input, and the result of every psum that computation goes on from, is marked as varying;
    then the transpose of psum + vary is psum + vary, with check_vma on and off. After the backward pass
    `reduce_gradients` adds up the copies of each replicated tensor.

    Why: let y = vary(psum(x)). Each device's share of the loss depends on its own copy of y, so a change of one x
    changes the shares of all devices. Its gradient is the sum of their gradients of y: a psum again.
    """

    def mark(leaf):
        missing = tuple(a for a in AXES if a not in jax.typeof(leaf).manual_axis_type.varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, x)


def reduce_gradients(grads: dict[str, jax.Array], config: ModelConfig, ledger=ledger) -> dict[str, jax.Array]:
    """Sum each gradient over the axes along which its tensor is replicated (its spec lacks them).

    Over fsdp a matrix's gradient was summed before, by the reduce-scatter of gather_weight or cross_entropy. Along tensor a
    device has its own part of a sharded tensor, and nothing to add up.
    """
    missing = {name: tuple(a for a in AXES if a not in axes_of(t.spec)) for name, t in ledger(config).items()}
    return {name: lax.psum(grads[name], axes) for name, axes in missing.items()}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_weight(w, config: ModelConfig):
    """Cast this device's fp32 shard, then gather it over fsdp: half the bytes move when computing in bf16."""
    w = w.astype(config.compute_dtype)
    if lax.axis_size("fsdp") == 1:
        return w  # XLA copies and transposes for a gather that moves nothing
    return lax.all_gather(w, "fsdp", axis=0, tiled=True)  # [D/fsdp, ..] -> [D, ..]


def _gather_weight_fwd(w, config):
    return gather_weight(w, config), None


def _gather_weight_bwd(config, _, g):
    g = g.astype(config.grad_reduce_dtype)  # plain autodiff would add up in the compute dtype
    g = lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)  # [D, ..] -> [D/fsdp, ..], summed
    return (g.astype(jnp.float32),)


gather_weight.defvjp(_gather_weight_fwd, _gather_weight_bwd)


def gather_vocabulary(w, config: ModelConfig):
    """gather_weight for rows of the vocabulary: [V/(tensor*fsdp), D] -> [V/tensor, D]."""
    # Shards have a dimension of their own. Where they lie one below the other, the TPU compiler pads those of a gradient
    # (7B on 64 shards: 1,568 rows each) and moves them. Layers' shards are smaller, and with such a dimension slower.
    return gather_weight(w[None], config).reshape(-1, w.shape[1])


# ------------------------------------------------------------------------------------------------------- pure maths


def rms_norm(x, weight, eps: float, mean_square=None):
    """RMSNorm over the last dimension in fp32; the weight is multiplied before the cast, as in OLMo-core.

    DIVERGENCE 5: the weight stays fp32; OLMo-core's FSDP rounds it to bf16 first (at most 1 bf16 ulp of the result).
    """
    x32 = x.astype(jnp.float32)
    if mean_square is None:
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    return (weight * (x32 * lax.rsqrt(mean_square + eps))).astype(x.dtype)


def rms_norm_over_tensor(x, weight, eps: float):
    """RMSNorm of a vector that is sharded over tensor: QK-norm spans all heads, not this device's alone."""
    x32 = x.astype(jnp.float32)
    square_sum = jnp.sum(x32 * x32, axis=-1, keepdims=True)
    square_sum = vary(lax.psum(square_sum, "tensor"))  # [N, 1] stays [N, 1]
    return rms_norm(x, weight, eps, square_sum / (x.shape[-1] * lax.axis_size("tensor")))


def rope_frequencies(config: ModelConfig, yarn: bool) -> tuple[np.ndarray, float]:
    """(inverse frequencies [K/2], factor on sin and cos). Source: OLMo-core nn/rope.py; YaRN section 3.2 and 3.4."""
    half = config.head_dim // 2
    inv = (1.0 / config.rope_theta ** (np.arange(half, dtype=np.float64) / half)).astype(np.float32)
    if not yarn:
        return inv, 1.0
    yarn_config = config.yarn

    def dimension_of(rotations: float) -> float:  # the dimension that turns so often over the original length
        turns = yarn_config.original_length / (2 * math.pi * rotations)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    # Dimensions that turn often keep their frequency, those that turn less than once are slowed down by the factor.
    low = max(math.floor(dimension_of(yarn_config.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn_config.beta_slow)), half - 1)
    ramp = np.clip((np.arange(half, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)
    inv = inv / np.float32(yarn_config.factor) * ramp + inv * (1 - ramp)
    return inv.astype(np.float32), 0.1 * math.log(yarn_config.factor) + 1.0


def rope_tables(config: ModelConfig, positions_S, kind: str):
    """(cos, sin) for a layer of this kind, each fp32 [S, 1, K/2], at global positions; [B, S] gives [B, S, 1, K/2]."""
    # Sliding layers keep plain RoPE: no distance in a window is longer than those of pretraining.
    inv, factor = rope_frequencies(config, yarn=kind == "f" and config.yarn is not None)
    angles = positions_S.astype(jnp.float32)[..., None, None] * inv
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x_BSHK, cos, sin):
    """Rotate (first half, second half) pairs in fp32; the convention of Hugging Face and OLMo-core."""
    x32 = x_BSHK.astype(jnp.float32)
    a, b = jnp.split(x32, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)


def save_as(name: str, slot: int, x):
    """Name an activation for Execution.remat; `slot`: the place of its layer in the pattern."""
    return checkpoint_name(x, f"{name}{slot}")


# -------------------------------------------------------------------------------------------------------- attention
# One signature for all: (q [B,S,H,K] divided by sqrt(K), k [B,T,G,K], v [B,T,G,K], where, slot) -> [B,S,H,K].


class Places(NamedTuple):
    """Where queries and keys are. Positions are global and may depend on the shard, so they are arrays."""

    q_pos: jax.Array  # [S]
    k_pos: jax.Array  # [T]; negative: no such token
    q_segment: jax.Array | None  # [B, S]; None: no document mask
    k_segment: jax.Array | None  # [B, T]


class Where(NamedTuple):
    """Which keys a query may see: not later, not beyond the window, not in another document."""

    places: Places
    window: int | None  # None: full attention
    offset: int | None  # query i has the position of key i + offset: 0, or the halo of keys fetched from the left; None
    # if that differs from shard to shard


def visible(places: Places, window: int | None):
    """Boolean mask [S, T], or [B, S, T] with segments."""
    q_pos, k_pos, q_segment, k_segment = places
    distance = q_pos[:, None] - k_pos[None, :]
    mask = (distance >= 0) & (k_pos >= 0)[None, :]
    if window is not None:
        mask &= distance < window  # `window` keys with the query's own: OLMo-core's flash window (window - 1, 0)
    if q_segment is not None:
        mask = mask & (q_segment[..., :, None] == k_segment[..., None, :])
    return mask


def dense_attention(q, k, v, where: Where, slot: int):
    """The equation, with the whole [S, T] of scores in memory: for reading and for testing the others."""
    B, S, H, K = q.shape
    G = k.shape[2]
    q = q.reshape(B, S, G, H // G, K)
    # Scores and softmax in fp32; each group of R query heads shares a key head.
    mask = visible(where.places, where.window)
    mask = mask[:, None, None] if mask.ndim == 3 else mask[None, None, None]
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(v.dtype)
    return save_as("heads_out", slot, jnp.einsum("bgrst,btgk->bsgrk", probs, v).reshape(B, S, H, K))


def locate(positions_S, segments_BS, window: int | None, execution: Execution) -> Where:
    """Where this device's queries and keys are, once `attend` has fetched keys and exchanged queries."""
    shards, S = lax.axis_size("context"), positions_S.shape[0]
    segments = segments_BS is not None
    if shards == 1:
        return Where(Places(positions_S, positions_S, segments_BS, segments_BS), window, 0)
    # A sliding layer: its keys begin `halo` positions before its queries, but not before the first shard can send any.
    if window is not None:
        halo = window - 1
        halo = min(halo + -halo % execution.key_multiple, S * (shards - 1))
        k_pos = positions_S[0] - halo + jnp.arange(halo + S)
        k_segment = with_halo(segments_BS, halo) if segments else None
        return Where(Places(positions_S, k_pos, segments_BS, k_segment), window, halo)
    # A full layer: positions and documents of queries move as `attend` moves the queries themselves.
    q_pos = swap_with_mirror(positions_S[None])[0]
    k_pos = vary(jnp.arange(S * shards))
    q_segment = swap_with_mirror(segments_BS) if segments else None
    k_segment = gather_sequence(segments_BS) if segments else None
    return Where(Places(q_pos, k_pos, q_segment, k_segment), None, None)


def attend(q, k, v, where: Where, execution: Execution, slot: int):
    """Causal attention over the whole sequence, of which this device holds S contiguous positions."""
    attention = partial(execution.attention, where=where, slot=slot)
    if lax.axis_size("context") == 1:
        return attention(q, k, v)
    # A sliding layer fetches the window - 1 keys before its shard from its neighbours.
    if where.window is not None:
        return attention(q, with_halo(k, where.offset), with_halo(v, where.offset))
    # A full layer gathers all keys and exchanges the later half of its queries with the mirror shard. The earlier half
    # of shard i of n sees as many keys as the later half of shard n-1-i lacks: after the exchange all do the same work.
    return swap_with_mirror(attention(swap_with_mirror(q), gather_sequence(k), gather_sequence(v)))


def gather_sequence(x):
    return lax.all_gather(x, "context", axis=1, tiled=True)  # [B, S, ..] -> [B, S*shards, ..]


def with_halo(x, halo: int):
    """[B, S, ..] -> [B, halo + S, ..]: the `halo` positions before this shard come from the neighbours on the left.

    Devices at the left edge receive zeros there; `visible` masks them, since their positions are negative.
    """
    shards, S = lax.axis_size("context"), x.shape[1]
    to_the_right = [(i, i + 1) for i in range(shards - 1)]
    pieces, passed = [x], x
    for missing in range(halo, 0, -S):
        passed = passed[:, max(S - missing, 0) :]  # of the farthest neighbour only what the window still needs
        passed = lax.ppermute(passed, "context", to_the_right)  # [B, <=S, ..] moves one shard to the right
        pieces.insert(0, passed)
    return jnp.concatenate(pieces, axis=1)


def swap_with_mirror(x):
    """[B, S, ..]: the later half of shard i changes places with that of shard n-1-i. Twice is as before."""
    shards, S = lax.axis_size("context"), x.shape[1]
    kept, sent = jnp.split(x, [S - S // 2], axis=1)
    mirror = [(i, shards - 1 - i) for i in range(shards)]
    received = lax.ppermute(sent, "context", mirror)  # [B, S/2, ..] stays [B, S/2, ..]
    return jnp.concatenate([kept, received], axis=1)


# ------------------------------------------------------------------------------------------------------ transformer


def embed_tokens(params, tokens_BS, config: ModelConfig, take_rows: Callable = operator.getitem):
    """Rows of the embedding, [B*S, D] in the compute dtype. Once gathered, the vocabulary is sharded over tensor."""
    with jax.named_scope("embed"):
        table_VD = gather_vocabulary(params["embed"], config)
        # A device looks up the ids that lie in its rows, and puts zeros where the others' lie.
        local_N, mine_N = local_labels(tokens_BS.reshape(-1), table_VD.shape[0])
        x_ND = jnp.where(mine_N[:, None], take_rows(table_VD, local_N), 0)
        return vary(lax.psum(x_ND, "tensor"))  # each row lies on one device; [N, D] stays [N, D]


def attention_block(x_ND, w, rope, where: Where, config: ModelConfig, execution: Execution, slot: int, attention):
    """Attention(x), before its norm. `w`: one layer's tensors, gathered over fsdp; heads are sharded over tensor."""
    with jax.named_scope("attention"):
        S = where.places.q_pos.shape[0]
        # Saved before norm and RoPE: the norm's backward pass would need the product of x and wq again.
        q_NA = save_as("q", slot, x_ND @ w["wq"])
        k_NE = save_as("k", slot, x_ND @ w["wk"])
        v_NE = save_as("v", slot, x_ND @ w["wv"])
        q_NA = rms_norm_over_tensor(q_NA, w["q_norm"], config.norm_eps)
        k_NE = rms_norm_over_tensor(k_NE, w["k_norm"], config.norm_eps)
        q, k, v = (x.reshape(-1, S, x.shape[-1] // config.head_dim, config.head_dim) for x in (q_NA, k_NE, v_NE))
        # The scale of the scores goes into the one rounding that RoPE's result has anyway.
        scale = config.head_dim**-0.5
        cos, sin = rope
        q, k = apply_rope(q, scale * cos, scale * sin), apply_rope(k, cos, sin)  # queries alone are scaled
        heads_NA = attention(q, k, v, where, execution, slot).reshape(q_NA.shape)
        out_ND = jnp.einsum("na,da->nd", heads_NA, w["wo"])
        return save_as("attn_out", slot, vary(lax.psum(out_ND, "tensor")))  # heads summed; [N, D] stays [N, D]


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def swiglu_down(gate_NF, up_NF, w_down):
    """SwiGLU's product and the down projection, [N, D]."""
    return jnp.einsum("nf,df->nd", swiglu(gate_NF, up_NF), w_down)


def _swiglu_down_bwd(residuals, dout_ND):
    gate_NF, up_NF, w_down = residuals
    dproduct_NF = lax.optimization_barrier(dout_ND @ w_down)
    product_NF, product_vjp = jax.vjp(swiglu, gate_NF, up_NF)
    # Each is written once; XLA would make them again inside every matmul that reads them.
    product_NF, dgate_NF, dup_NF = lax.optimization_barrier((product_NF, *product_vjp(dproduct_NF)))
    return dgate_NF, dup_NF, jnp.einsum("nd,nf->df", dout_ND, product_NF)


swiglu_down.defvjp(lambda *args: (swiglu_down(*args), args), _swiglu_down_bwd)


def feed_forward_block(x_ND, w, slot: int):
    """SwiGLU(x), before its norm; the width F is sharded over tensor."""
    with jax.named_scope("feed_forward"):
        gate_NF, up_NF = save_as("gate", slot, x_ND @ w["w_gate"]), save_as("up", slot, x_ND @ w["w_up"])
        out_ND = swiglu_down(gate_NF, up_NF, w["w_down"])
        return save_as("ffn_out", slot, vary(lax.psum(out_ND, "tensor")))  # F summed; [N, D] stays [N, D]


def layer(x_ND, w, rope, where: Where, config: ModelConfig, execution: Execution, slot: int = 0, attention=attend):
    """One block of OLMo 3: the norms stand after the sub-layers, inside the residual branch. `w`: its tensors' shards.
    `attention`: a function that takes the place of `attend` where keys and values are kept from call to call."""
    # Matrices are whole in D on a device only while their layer is computed; norms are small and never sharded in D.
    table = ledger(config)
    w = {name: gather_weight(x, config) if "fsdp" in table[name].spec else x for name, x in w.items()}

    x_ND = save_as("x", slot, x_ND)
    attn_ND = attention_block(x_ND, w, rope, where, config, execution, slot, attention)
    x_ND = x_ND + rms_norm(attn_ND, w["attn_norm"], config.norm_eps)
    ffn_ND = feed_forward_block(x_ND, w, slot)
    return x_ND + rms_norm(ffn_ND, w["ffn_norm"], config.norm_eps)


def geometry(config: ModelConfig, positions_S, segments_BS, execution: Execution) -> dict[str, tuple]:
    """{"s", "f": (cos and sin for RoPE, Where)} of sliding and full layers at these global positions."""
    # A window that covers the whole sequence is full attention, but keeps its layer's own RoPE.
    sequence = positions_S.shape[0] * lax.axis_size("context")
    windows = {"s": config.window if config.window < sequence else None, "f": None}
    return {
        kind: (rope_tables(config, positions_S, kind), locate(positions_S, segments_BS, window, execution))
        for kind, window in windows.items()
    }


def scan_layers(params, x_ND, apply: Callable, config: ModelConfig, kept=None, unroll=1, wrap=lambda cycle: cycle,
                tensors=LAYER_TENSORS):  # fmt: skip
    """(x after all layers, what they keep). `apply(x_ND, w, slot, kind, kept)` -> (x_ND, kept) is one layer. `kept` is a
    list by slot, each entry stacked over the cycles; sampling keeps keys and values there. `tensors`: names of `w`."""
    # A scan over the cycles of the pattern, not over layers, so that the window of each slot is static.
    n = len(config.pattern)

    def cycle(x_ND, inputs):
        w, kept = inputs
        kept = list(kept)
        for slot, kind in enumerate(config.pattern):
            x_ND, kept[slot] = apply(x_ND, {name: x[slot] for name, x in w.items()}, slot, kind, kept[slot])
        return x_ND, kept

    stacked = {name: params[name].reshape(-1, n, *params[name].shape[1:]) for name in tensors}
    return lax.scan(wrap(cycle), x_ND, (stacked, kept or [None] * n), unroll=unroll)


def recompute(body: Callable, config: ModelConfig, execution: Execution, prevent_cse: bool = True) -> Callable:
    """`body`, of which the backward pass finds saved what Execution.remat names. A gathered weight never is: only one or
    two layers are ever whole."""
    saved = execution.remat
    if saved is None and lax.axis_size("fsdp") > 1:
        saved = SAVED
    if saved is None:
        return body
    slots = range(len(config.pattern))
    names = [f"{name}{slot}" for name in saved if not name[-1].isdigit() for slot in slots]
    names += [name for name in saved if name[-1].isdigit()]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)


def hidden_states(params, tokens_BS, segments_BS, config: ModelConfig, execution: Execution):
    """Final hidden states after the last norm, [B*S, D].

    local: tokens [B/(data*fsdp), S/context] int32, segments the same or None, params as the ledger shards them.
    """
    # Positions are global, so that RoPE and masks do not notice how the sequence is sharded.
    S = tokens_BS.shape[1]
    positions_S = vary(lax.axis_index("context") * S + jnp.arange(S))
    of_kind = geometry(config, positions_S, segments_BS, execution)

    def apply(x_ND, w, slot, kind, kept):
        return layer(x_ND, w, *of_kind[kind], config, execution, slot), kept

    # prevent_cse=False: a scan's body cannot be merged with its copy in the backward pass, so no barriers are needed.
    wrap = partial(recompute, config=config, execution=execution, prevent_cse=False)
    x_ND = embed_tokens(params, tokens_BS, config, execution.take_rows)
    x_ND, _ = scan_layers(params, x_ND, apply, config, unroll=execution.scan_unroll, wrap=wrap)
    return rms_norm(x_ND, params["final_norm"], config.norm_eps)


def logits(params, tokens_BS, segments_BS, config: ModelConfig, execution: Execution):
    """fp32 logits [B, S, V/tensor], whole: for inspection and small models. Training and evaluation never do this.

    DIVERGENCE 6: OLMo-core rounds its logits to bf16 before the loss; here they stay fp32.
    """
    x_ND = hidden_states(params, tokens_BS, segments_BS, config, execution)
    return head_logits(x_ND, gather_head(params["lm_head"], config), config).reshape(*tokens_BS.shape, -1)


def gather_head(lm_head, config: ModelConfig):
    """This device's rows of the output matrix, whole in width, in the compute dtype: [V/tensor, D]."""
    return gather_vocabulary(lm_head, config)


def head_logits(x_ND, head_VD, config: ModelConfig):
    """fp32 logits [N, V/tensor] of this device's rows of the vocabulary; padding rows are masked if the config says so."""
    logits_NV = jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32)
    if not config.mask_padded_vocab or config.padded_vocab_size == config.vocab_size:
        return logits_NV
    rows = logits_NV.shape[-1]
    return jnp.where(lax.axis_index("tensor") * rows + jnp.arange(rows) < config.vocab_size, logits_NV, MASKED)


# ------------------------------------------------------------------------------------------------------------- loss


class TokenLoss(NamedTuple):
    """Of every token, masked or not: cross-entropy and squared logsumexp, both fp32 [N]."""

    ce_N: jax.Array
    lse_squared_N: jax.Array


def chunk_loss(x_CD, head_VD, labels_C, config: ModelConfig):
    """Logits of one chunk against this device's rows of the vocabulary -> (CE [C], lse [C], logits [C, V/tensor])."""
    logits_CV = head_logits(x_CD, head_VD, config)
    # The logsumexp over all devices' rows: their largest logit first, so that no exponential overflows.
    peak_C = vary(lax.pmax(lax.stop_gradient(jnp.max(logits_CV, axis=-1)), "tensor"))  # [C] stays [C]
    sum_C = jnp.sum(jnp.exp(logits_CV - peak_C[:, None]), axis=-1)
    sum_C = vary(lax.psum(sum_C, "tensor"))  # [C] stays [C]
    lse_C = peak_C + jnp.log(sum_C)
    # The label's logit lies on one device along tensor; the others add zero.
    local_C, mine_C = local_labels(labels_C, logits_CV.shape[-1])
    target_C = jnp.where(mine_C, jnp.take_along_axis(logits_CV, local_C[:, None], axis=-1)[:, 0], 0.0)
    target_C = vary(lax.psum(target_C, "tensor"))  # [C] stays [C]
    return lse_C - target_C, lse_C, logits_CV


def local_labels(labels_C, rows: int):
    """(id as a row of this device's part of the vocabulary, whether it lies there)."""
    local_C = labels_C - lax.axis_index("tensor") * rows
    return jnp.clip(local_C, 0, rows - 1), (local_C >= 0) & (local_C < rows)


def split_chunks(chunk: int, *arrays):
    """[N, ..] -> [N/chunk, chunk, ..], the last chunk filled with zeros."""
    n = -(-arrays[0].shape[0] // chunk)
    pad = n * chunk - arrays[0].shape[0]
    return [jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(n, chunk, *a.shape[1:]) for a in arrays]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(x_ND, lm_head, labels_N, mask_N, z_loss: float, config: ModelConfig, chunk: int):
    """(sum of mask * (CE + z_loss * lse^2), TokenLoss), the sum over this device's tokens, the same along tensor.

    `mask` is a weight and may have any sign. A token of weight 0 is left out, whatever its logits are, in the sum and in
    the gradients of the others: 0 * inf is NaN.

    Chunk by chunk, so that the fp32 logits [N, V] never exist whole. Only the sum has a gradient.
    Source: OLMo-core nn/functional/cross_entropy_loss.py.
    """
    return loss_by_chunks(x_ND, lm_head, labels_N, mask_N, z_loss, config, chunk, differentiate=False)[0]


def loss_by_chunks(x_ND, lm_head, labels_N, mask_N, z_loss, config, chunk, differentiate: bool):
    """(what `cross_entropy` returns, (dx [N, D], dW fp32 [V/tensor, D]) of the sum, or Nones)."""
    head_VD = gather_head(lm_head, config)

    def body(carry, inputs):
        total, dhead_VD = carry
        x_CD, labels_C, mask_C = inputs
        ce_C, lse_C, logits_CV = chunk_loss(x_CD, head_VD, labels_C, config)
        total = total + jnp.sum(jnp.where(mask_C != 0, mask_C * (ce_C + z_loss * lse_C**2), 0))
        per_token = TokenLoss(ce_C, lse_C**2)
        if not differentiate:
            return (total, None), (per_token, None)
        # dx and dW are made now, while the chunk's logits are at hand: no logits are computed twice.
        local_C, mine_C = local_labels(labels_C, logits_CV.shape[-1])
        one_hot_CV = mine_C[:, None] & (local_C[:, None] == jnp.arange(logits_CV.shape[-1]))
        # d CE / d logits = probs - one_hot, and d lse^2 / d logits = 2 lse probs.
        probs_CV = jnp.exp(logits_CV - lse_C[:, None])
        dlogits_CV = (mask_C * (1 + 2 * z_loss * lse_C))[:, None] * probs_CV - jnp.where(one_hot_CV, mask_C[:, None], 0)
        # A token of weight 0 must not bring an inf or a NaN into dW, where all tokens are added up.
        counts_C1 = mask_C[:, None] != 0
        dlogits_CV = jnp.where(counts_C1, dlogits_CV, 0).astype(config.compute_dtype)
        x_CD = jnp.where(counts_C1, x_CD, 0)
        # dW is added up in fp32 over the chunks, whatever the compute dtype.
        dhead_VD = dhead_VD + jnp.einsum("cv,cd->vd", dlogits_CV, x_CD, preferred_element_type=jnp.float32)
        return (total, dhead_VD), (per_token, dlogits_CV @ head_VD)

    zero = vary((jnp.float32(0), jnp.zeros(head_VD.shape, jnp.float32) if differentiate else None))
    (total, dhead_VD), chunks = lax.scan(body, zero, split_chunks(chunk, x_ND, labels_N, mask_N))
    # From chunks back to tokens, without those that filled the last chunk up.
    per_token, dx_ND = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: x_ND.shape[0]], chunks)
    return (total, per_token), (dx_ND, dhead_VD)


def _cross_entropy_bwd(z_loss, config, chunk, residuals, cotangents):
    dx_ND, dhead_VD = residuals
    # Every device along tensor holds the same sum, and the caller has given each 1/tensor of its gradient: psum restores
    # it. dx is this device's part, from its rows of the vocabulary; the psum in front of it, backward, adds the parts up.
    g = lax.psum(cotangents[0], "tensor")
    dhead_VD = (g * dhead_VD).astype(config.grad_reduce_dtype)
    # Shards have a dimension of their own, as in gather_vocabulary.
    dhead_VD = dhead_VD.reshape(lax.axis_size("fsdp"), -1, dhead_VD.shape[1])
    dhead_VD = lax.psum_scatter(dhead_VD, "fsdp", scatter_dimension=0, tiled=False)  # [fsdp, V/fsdp, D] -> [V/fsdp, D]
    # Before the layers' backward pass: until then a device holds dW whole, in fp32 1.5 GiB of a 7B.
    dx_ND, dhead_VD = lax.optimization_barrier((dx_ND, dhead_VD))
    return vary(((g * dx_ND).astype(dx_ND.dtype), dhead_VD.astype(jnp.float32), None, None))


def _cross_entropy_fwd(x_ND, lm_head, labels_N, mask_N, z_loss, config, chunk):
    return loss_by_chunks(x_ND, lm_head, labels_N, mask_N, z_loss, config, chunk, differentiate=True)


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def token_loss(params, batch, z_loss: float, config: ModelConfig, execution: Execution):
    """(sum over labels of loss_mask * (CE + z_loss * lse^2), TokenLoss [B, S]); see `cross_entropy`.

    local: batch tokens, labels int32, loss_mask bool or float, segment_ids int32 or None, all [B/(data*fsdp), S/context].
    The sum is over this device's tokens and equal on all devices along tensor; nothing is divided here.
    """
    x_ND = hidden_states(params, batch["tokens"], batch["segment_ids"], config, execution)
    with jax.named_scope("loss"):
        labels_N, mask_N = batch["labels"].reshape(-1), batch["loss_mask"].reshape(-1).astype(jnp.float32)
        chunk = min(execution.loss_chunk, x_ND.shape[0])
        total, per_token = cross_entropy(x_ND, params["lm_head"], labels_N, mask_N, z_loss, config, chunk)
    return total, TokenLoss(*(a.reshape(batch["tokens"].shape) for a in per_token))
