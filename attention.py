"""The attention of model.py, computed faster: blockwise on any machine, JAX's Splash kernel on a TPU, cuDNN's on a GPU.

And `rows_in_order`, an embedding whose gradient has the same bits in every run on a GPU.

All have the signature of model.dense_attention once their block sizes are bound: (q, k, v, where, slot) -> heads_out.
Tests hold them equal to it, forward and backward. `choose_attention` binds them as a hardware file says. Imports
model.py alone.

Source: FlashAttention 2 (https://arxiv.org/abs/2307.08691) for the backward pass of a block;
jax.experimental.pallas.ops.tpu.splash_attention and jax.nn.dot_product_attention for the kernels. Dimensions as in
model.py; Q queries of one block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from model import MASKED, Places, Where, dense_attention, save_as, vary, visible

UNROLLED = 8  # ranges of keys of a full layer's blockwise attention, at the price of an eighth more scores


@dataclass(frozen=True)
class SplashConfig:
    """Tiles of the TPU kernel. Larger ones have less overhead and compute more that the mask takes away again."""

    block: int  # queries and keys of one tile, forward
    block_backward: int
    q_layout: str  # in memory: head_dim_minor | seq_minor
    k_layout: str
    v_layout: str

    def __post_init__(self):
        for name in ("block", "block_backward"):
            if getattr(self, name) < 1 or getattr(self, name) % 128:
                raise ValueError(f"splash.{name}: got {getattr(self, name)}, expected a multiple of 128")
        for name in ("q_layout", "k_layout", "v_layout"):
            if getattr(self, name) not in ("head_dim_minor", "seq_minor"):
                raise ValueError(f"splash.{name}: got {getattr(self, name)!r}, expected head_dim_minor or seq_minor")


def choose_attention(name: str, block: int, splash: SplashConfig | None, platform: str) -> tuple[Callable, int]:
    """(attention, number that its keys have to be a multiple of) that a hardware file names. Where the platform is not a
    kernel's own, tpu or gpu, plain XLA operations take its place: slow, for tests."""
    if block < 1:
        raise ValueError(f"attention_block: got {block}, expected a positive number")
    if name == "splash" and splash is None:
        raise ValueError("splash: got null, expected its tiles, since attention is splash")
    choices = {
        "dense": (dense_attention, 1),
        "blockwise": (partial(blockwise_attention, block=block, in_cache=platform == "cpu"), 1),
        "splash": (partial(splash_attention, tiles=splash, interpret=platform != "tpu"), 128),  # tiles: 128 keys wide
        "cudnn": (partial(cudnn_attention, implementation="cudnn" if platform == "gpu" else "xla"), 1),
    }
    if name not in choices:
        raise ValueError(f"attention: got {name!r}, expected one of {', '.join(choices)}")
    return choices[name]


# ---------------------------------------------------------------------------------------------------------- blockwise


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_block(slot: int, window: int | None, q_GRQK, k_GTK, v_GTK, places):
    """Attention of one block of queries to the keys given; `places` are those of this sequence.

    The backward pass makes the probabilities again from the logsumexp of each row, in one pass over the scores, and
    needs no sum over them: that of probs * dprobs is the product of out and dout. Source: FlashAttention 2.
    """
    return _attend_block_fwd(slot, window, q_GRQK, k_GTK, v_GTK, places)[0]


def _attend_block_fwd(slot, window, q_GRQK, k_GTK, v_GTK, places):
    # The R heads of a key's group and the block's queries are rows of one matrix.
    G, R, Q, K = q_GRQK.shape
    scores = jnp.einsum("gqk,gtk->gqt", q_GRQK.reshape(G, R * Q, K), k_GTK, preferred_element_type=jnp.float32)
    scores = jnp.where(visible(places, window), scores.reshape(G, R, Q, -1), MASKED)
    # The division by the sum comes last, on [Q, K] instead of [Q, T]; the logsumexp is all that backward needs.
    peak = jnp.max(scores, axis=-1, keepdims=True)
    exps = jnp.exp(scores - peak)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    exps = exps.astype(v_GTK.dtype).reshape(G, R * Q, -1)
    out = jnp.einsum("gqt,gtk->gqk", exps, v_GTK, preferred_element_type=jnp.float32).reshape(q_GRQK.shape) / total
    out = save_as("heads_out", slot, out.astype(v_GTK.dtype))
    lse = save_as("lse", slot, peak + jnp.log(total))
    return out, (q_GRQK, k_GTK, v_GTK, places, out, lse)


def _attend_block_bwd(slot, window, residuals, dout_GRQK):
    q_GRQK, k_GTK, v_GTK, places, out_GRQK, lse = residuals
    G, R, Q, K = q_GRQK.shape
    q, dout = q_GRQK.reshape(G, R * Q, K), dout_GRQK.reshape(G, R * Q, K)
    # Keys are rows here, queries columns: dk and dv are then plain products. On a CPU, a product with a transposed left
    # side takes up to four times as long.
    scores = jnp.einsum("gtk,gqk->gtq", k_GTK, q, preferred_element_type=jnp.float32).reshape(G, -1, R, Q)
    scores = jnp.where(visible(places, window).T[:, None], scores, MASKED)
    probs = jnp.exp(scores - lse.reshape(G, 1, R, Q))
    dprobs = jnp.einsum("gtk,gqk->gtq", v_GTK, dout, preferred_element_type=jnp.float32).reshape(probs.shape)
    # d scores = probs (d probs - mean), where mean, the sum of probs * d probs over keys, is the product of out and dout.
    mean = jnp.sum(out_GRQK.astype(jnp.float32) * dout_GRQK, axis=-1).reshape(G, 1, R, Q)
    dscores = (probs * (dprobs - mean)).astype(q.dtype).reshape(G, -1, R * Q)
    dv_GTK = jnp.einsum("gtq,gqk->gtk", probs.astype(dout.dtype).reshape(dscores.shape), dout)
    dk_GTK = jnp.einsum("gtq,gqk->gtk", dscores, q)
    dq_GKQ = jnp.einsum("gkt,gtq->gkq", k_GTK.transpose(0, 2, 1), dscores)
    return dq_GKQ.transpose(0, 2, 1).reshape(q_GRQK.shape), dk_GTK, dv_GTK, None


attend_block.defvjp(_attend_block_fwd, _attend_block_bwd)


def blockwise_attention(q, k, v, where: Where, slot: int, block: int, in_cache: bool = False):
    """Query block by query block, over just the keys that causality and the window leave; never [S, T].

    Mapped over sequences; scores are made again in the backward pass. On a CPU this is several times as fast as the
    dense form. XLA may hold the blocks of an unrolled loop all at once. So a long full layer has at most UNROLLED ranges
    of keys, and loops over the blocks that share one. Where the shard decides which keys a block can see, the range is
    chosen while running: what is not visible costs nothing.

    `in_cache`, for a CPU: mapped over groups of heads, too, and a block is an eighth of a short sequence, 64 at least.
    """
    B, S, H, K = q.shape
    T, G, R = k.shape[1], k.shape[2], H // k.shape[2]
    places, window = where.places, where.window
    if in_cache:
        block = min(block, max(64, S // 8))
    # Queries that share one range of keys: a block where a window moves along, else so many that UNROLLED ranges suffice.
    blocks_per_range = math.ceil(S / block / UNROLLED)
    span = block if window is not None else block * blocks_per_range
    attend_keys = partial(attend_block, slot, window)
    if where.offset is None:  # the shard decides: one range for all, and of it what a block needs
        span = S
        attend_keys = partial(up_to_the_last_visible, attend_keys, min(UNROLLED, math.ceil(T / block)))
    # Neither scores nor the slices of k and v are saved for the backward pass.
    outputs = jax.checkpoint_policies.save_only_these_names(f"heads_out{slot}", f"lse{slot}")

    @partial(jax.checkpoint, policy=outputs)
    def one_sequence(args):
        q_GRSK, k_GTK, v_GTK, q_segment, k_segment = args
        out = []
        for start in range(0, S, span):
            stop = min(start + span, S)
            # The keys that these queries may see: bounds known before running, so that the slices are static.
            low, high = key_range(start, stop, T, where)
            k_part, v_part, k_pos = k_GTK[:, low:high], v_GTK[:, low:high], places.k_pos[low:high]
            k_segment_part = part(k_segment, low, high)

            def of_queries(args, k_part=k_part, v_part=v_part, k_pos=k_pos, k_segment=k_segment_part):
                q_GRQK, q_pos, q_segment = args
                return attend_keys(q_GRQK, k_part, v_part, Places(q_pos, k_pos, q_segment, k_segment))

            queries = (q_GRSK[:, :, start:stop], places.q_pos[start:stop], part(q_segment, start, stop))
            if stop - start <= block or (stop - start) % block:
                out.append(of_queries(queries))
                continue
            # Blocks that share their keys run one after the other: unrolled, XLA would hold all their scores at once.
            n = (stop - start) // block
            blocks = [
                None if x is None else jnp.stack(jnp.split(x, n, axis))
                for x, axis in zip(queries, (2, 0, 0), strict=True)
            ]
            out.append(jnp.concatenate(list(lax.map(of_queries, tuple(blocks))), axis=2))
        return jnp.concatenate(out, axis=2)

    heads_first = [q.reshape(B, S, G, R, K).transpose(0, 2, 3, 1, 4), *(x.transpose(0, 2, 1, 3) for x in (k, v))]
    segments = [places.q_segment, places.k_segment]
    if in_cache:
        heads_first = [x.reshape(B * G, 1, *x.shape[2:]) for x in heads_first]
        segments = [None if x is None else jnp.repeat(x, G, axis=0) for x in segments]
    out_BGRSK = lax.map(one_sequence, (*heads_first, *segments)).reshape(B, G, R, S, K)
    return out_BGRSK.transpose(0, 3, 1, 2, 4).reshape(B, S, H, K)


def up_to_the_last_visible(attend_keys, n_ranges: int, q_GRQK, k_GTK, v_GTK, places: Places):
    """attend_keys over the shortest of n ranges of keys, all from the first on, that holds all that is visible."""
    T = k_GTK.shape[1]
    ends = [T * (i + 1) // n_ranges for i in range(n_ranges)]

    def with_keys(end, q_GRQK, k_GTK, v_GTK):
        q_pos, k_pos, q_segment, k_segment = places
        return attend_keys(
            q_GRQK, k_GTK[:, :end], v_GTK[:, :end], Places(q_pos, k_pos[:end], q_segment, part(k_segment, 0, end))
        )

    first_enough = jnp.sum(jnp.max(places.q_pos) >= jnp.array(ends))
    branches = [partial(jax.checkpoint(with_keys, static_argnums=0), end) for end in ends]  # or each saves for all
    return lax.switch(first_enough, branches, q_GRQK, k_GTK, v_GTK)


def part(x, start: int, stop: int):
    return None if x is None else x[start:stop]


def key_range(start: int, stop: int, n_keys: int, where: Where) -> tuple[int, int]:
    """Keys [low, high) that queries [start, stop) can see, as far as that is known before running."""
    if where.offset is None:
        return 0, n_keys
    first = 0 if where.window is None else max(0, start + where.offset - (where.window - 1))
    low = first // 16 * 16  # rows of a multiple of 16 keys are faster than those of a window less one
    return low, min(n_keys, stop + where.offset)


# ------------------------------------------------------------------------------------------------------------- Splash


@cache
def splash_kernel(S: int, T: int, H: int, window: int | None, offset: int | None, tiles: SplashConfig, interpret: bool,
                  saved: str):  # fmt: skip
    """The kernel of one device, or of all context shards behind each other if the queries differ (offset None)."""
    # The mask is never an array: the kernel asks it, tile by tile, which are empty, full or mixed.
    shards = 1
    if window is not None:
        mask = splash_mask.LocalMask((S, T), window_size=(window - 1, 0), offset=offset)
    elif offset is not None:
        mask = splash_mask.CausalMask((S, T), offset)
    else:
        shards, kept = T // S, S - S // 2
        mask = splash_mask.CausalMask((T, T))
        rows = np.arange(T, dtype=np.int32).reshape(shards, S)
        mask.q_sequence = np.concatenate([rows[:, :kept], rows[::-1, kept:]], axis=1).reshape(-1)  # swap_with_mirror
    # A tile is no longer than the queries of one device.
    block, backward = min(tiles.block, S), min(tiles.block_backward, S)
    sizes = splash_kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=backward, block_kv_dkv=backward, use_fused_bwd_kernel=True,
        **{name: splash_kernels.QKVLayout[getattr(tiles, name).upper()] for name in ("q_layout", "k_layout", "v_layout")},
    )  # fmt: skip
    with jax.ensure_compile_time_eval():  # it depends on shapes alone: made once, a constant of the program
        return splash_kernels.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * H), block_sizes=sizes, head_shards=1, q_seq_shards=shards,
            residual_checkpoint_name=saved, interpret=interpret,
        )  # fmt: skip


def splash_attention(q, k, v, where: Where, slot: int, tiles: SplashConfig, interpret: bool = False):
    """JAX's Splash kernel: tiles that the mask leaves empty are skipped, forward and backward in one kernel each.

    It has no types for check_vma, so the shard_map around needs check_vma=False. `interpret`: as plain XLA operations,
    where there is no TPU: slow.
    """
    S, T = q.shape[1], k.shape[1]
    kernel = splash_kernel(S, T, q.shape[2], where.window, where.offset, tiles, interpret, f"heads_out{slot}")
    if where.offset is None:  # the mask differs from shard to shard, so it enters as arguments: take this shard's

        def mine(x, axis: int):
            size = x.shape[axis] // (T // S)
            return lax.dynamic_slice_in_dim(x, lax.axis_index("context") * size, size, axis)

        def of_this_shard(info):
            axes = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}
            parts = {
                name: mine(getattr(info, name), axis) for name, axis in axes.items() if getattr(info, name) is not None
            }
            return info._replace(**parts)

        infos = of_this_shard(kernel.fwd_mask_info), None, of_this_shard(kernel.dkv_mask_info)
        kernel = splash_kernels.SplashAttentionKernel(*infos, **kernel.kwargs)
    places, segments = where.places, None
    if places.q_segment is not None or where.window is not None and where.offset > 0:
        q_segment = jnp.zeros((q.shape[0], S), jnp.int32) if places.q_segment is None else places.q_segment
        k_segment = jnp.zeros((q.shape[0], T), jnp.int32) if places.k_segment is None else places.k_segment
        # A key before the sequence's begin is of no document.
        segments = splash_kernels.SegmentIds(q_segment, jnp.where(places.k_pos < 0, -1, k_segment))
    heads_first = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return jax.vmap(kernel)(*heads_first, segments).transpose(0, 2, 1, 3)


# -------------------------------------------------------------------------------------------------------------- cuDNN


def cudnn_attention(q, k, v, where: Where, slot: int, implementation: str):
    """cuDNN's flash attention (cudnn), or the same by XLA operations with all [S, T] scores (xla).

    Every query sits at its key: no documents, no offset. config.py refuses a recipe that needs them, and flags of XLA
    that let the backward pass add up in an order that changes from run to run. Grouped heads are the kernel's own.
    """
    if where.places.q_segment is not None or where.offset != 0:
        raise ValueError("attention cudnn: got documents or a sequence over devices; fix: attention blockwise")
    return attend_and_keep(where.window, slot, implementation, q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_and_keep(window: int | None, slot: int, implementation: str, q, k, v):
    """Attention whose output and logsumexp have names, so that remat can save what the kernel's backward pass reads.

    jax.nn.dot_product_attention names neither: under jax.checkpoint its forward kernel would run twice.
    """
    return _attend_and_keep_fwd(window, slot, implementation, q, k, v)[0]


def _attend_and_keep_fwd(window, slot, implementation, q, k, v):
    attend = partial(
        jax.nn.dot_product_attention, scale=1.0, is_causal=True, implementation=implementation,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    out, pullback = jax.vjp(attend, q, k, v)
    named = save_as("heads_out", slot, out)

    def keep(x):  # pullback is a tree of what it reads: q, k, v, the output, and of three dimensions the logsumexp
        return named if x is out else save_as("lse", slot, x) if x.ndim == 3 else x

    return named, jax.tree.map(keep, pullback)


def _attend_and_keep_bwd(window, slot, implementation, pullback, dout):
    return pullback(dout)


attend_and_keep.defvjp(_attend_and_keep_fwd, _attend_and_keep_bwd)


# ---------------------------------------------------------------------------------------------- rows of the embedding


def rows_in_order(table_VD, ids_N):
    """table_VD[ids_N], with a gradient that is added up in one order, in fp32.

    Plain autodiff scatters: on a GPU by atomics, whose order differs from run to run, or, where XLA may not, by sorting
    all N D numbers. Here N ids are sorted, the rows of one id are added up as a tree, and each sum is written once.
    """
    return _rows_in_order(table_VD, ids_N, table_VD.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_in_order(table_VD, ids_N, shape):
    return table_VD[ids_N]


def _rows_in_order_bwd(shape, ids_N, dx_ND):
    order_N = jnp.argsort(ids_N)
    ids_N, dx32_ND = ids_N[order_N], dx_ND[order_N].astype(jnp.float32)
    changes = ids_N[1:] != ids_N[:-1]  # from one id to the next

    def add(left, right):  # a sum begins anew where an id does
        (left_new, left), (right_new, right) = left, right
        return left_new | right_new, jnp.where(right_new, right, left + right)

    _, sums_ND = lax.associative_scan(add, (jnp.append(True, changes)[:, None], dx32_ND))
    # The last row of an id has its sum. The others go to rows of their own that the table has not, and are dropped.
    rows_N = jnp.where(jnp.append(changes, True), ids_N, shape[0] + jnp.arange(len(ids_N)))
    zeros_VD = vary(jnp.zeros(shape, dx_ND.dtype))
    return zeros_VD.at[rows_N].set(sums_ND.astype(dx_ND.dtype), mode="drop", unique_indices=True), None


_rows_in_order.defvjp(lambda table_VD, ids_N, shape: (table_VD[ids_N], ids_N), _rows_in_order_bwd)
