"""attention.py against model.dense_attention: the same outputs and gradients, by other ways and with less memory."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from test_model import (
    CONFIG,
    DENSE,
    QUICK,
    YARN_TINY,
    difference,
    loss_and_gradients,
    on_mesh,
    random_batch,
    random_params,
    run_copied_out,
    run_logits,
    worst,
)

import model
from attention import SplashConfig, blockwise_attention, choose_attention, rows_in_order
from model import Places, Where

SPLASH = SplashConfig(128, 128, "seq_minor", "seq_minor", "head_dim_minor")


@pytest.mark.parametrize(
    "name, block, parts",
    [
        ("flash", 8, ("attention", "'flash'", "dense", "blockwise", "splash", "cudnn")),
        ("blockwise", 0, ("attention_block", "0", "positive")),
        ("splash", 8, ("splash", "null", "tiles")),
    ],
)
def test_choose_attention_refuses(name, block, parts):
    """Catches an unknown attention, blocks of nothing and a kernel without tiles before anything is compiled."""
    with pytest.raises(ValueError) as e:
        choose_attention(name, block, None, "cpu")
    assert all(part in str(e.value) for part in parts), e.value


def executions(block: int) -> dict[str, model.Execution]:
    """Name -> Execution with blocks of so many queries; Splash is interpreted, cuDNN's is made of XLA operations."""
    chosen = {name: choose_attention(name, block, SPLASH, "cpu") for name in ("dense", "blockwise", "splash", "cudnn")}
    return {name: replace(DENSE, attention=f, key_multiple=n) for name, (f, n) in chosen.items()}


@pytest.mark.parametrize("name", ["dense", "blockwise", "cudnn"])
def test_window_seen_through_attention(name):
    """Catches a key range of the blockwise attention that is short by one key, or a mask that it does not apply."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, 1, 6)), jnp.float32) for _ in range(3))
    where = Where(Places(jnp.arange(12), jnp.arange(12), None, None), 4, 0)
    attention = executions(5)[name].attention
    jacobian = jax.jacobian(lambda v: attention(q, k, v, where, 0).sum((0, 2, 3)))
    jacobian = jax.jit(jacobian, compiler_options=QUICK)(v)
    seen = np.abs(np.asarray(jacobian)).sum((1, 3, 4)) > 0  # [query, key]
    distance = np.subtract.outer(np.arange(12), np.arange(12))
    np.testing.assert_array_equal(seen, (distance >= 0) & (distance < 4))


def assert_equals_dense(name: str, block: int, where: Where, weight, q, k, v):
    """Outputs, and the gradients of their sum times `weight`."""

    def value(name, q, k, v):
        out = executions(block)[name].attention(q, k, v, where, 0)
        return jnp.sum(out * weight), out

    results = [
        jax.jit(jax.value_and_grad(partial(value, name), (0, 1, 2), has_aux=True), compiler_options=QUICK)(q, k, v)
        for name in ("dense", name)
    ]
    ((_, dense), dense_grads), ((_, out), grads) = results
    np.testing.assert_allclose(out, dense, atol=3e-6)
    for a, b in zip(grads, dense_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "S, heads, window, block, documents, earlier, known",
    [
        (16, (4, 4), None, 4, False, 0, True),
        (21, (4, 2), 8, 4, False, 0, True),
        (9, (6, 1), None, 7, True, 0, True),
        (16, (4, 2), 1, 16, True, 0, True),
        (21, (6, 2), 4, 1, False, 0, True),
        (16, (4, 2), 40, 64, True, 0, True),
        (9, (4, 2), 8, 4, True, 7, True),  # a sliding layer with the keys before its shard
        (16, (6, 3), None, 7, True, 11, False),  # a full layer that does not know where its shard lies
        (34, (6, 3), None, 2, True, 0, True),  # more blocks than are unrolled: several share a range of keys
        (35, (4, 4), None, 2, False, 5, False),
    ],
)
def test_blockwise_equals_dense(S, heads, window, block, documents, earlier, known):
    """Catches key ranges, offsets (`earlier` keys of neighbouring shards), ragged last blocks, grouped heads in the
    wrong order, and masks dropped in either attention: outputs and the gradients of q, k and v agree.
    """
    H, G = heads
    T = S + earlier
    rng = np.random.default_rng(S + block)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(2, n, h, 6)), jnp.float32) for n, h in ((S, H), (T, G), (T, G), (S, H))
    )
    k_pos = jnp.arange(T) - min(earlier, 2)  # some keys lie before the sequence and must not be seen
    segments = jnp.asarray(np.cumsum(rng.random((2, T)) < 0.2, axis=1)) if documents else None
    q_segment = None if segments is None else segments[:, earlier:]
    where = Where(Places(k_pos[earlier:], k_pos, q_segment, segments), window, earlier if known else None)

    assert_equals_dense("blockwise", block, where, weight, q, k, v)


def test_blockwise_backward_makes_no_softmax_again():
    """Catches a backward pass that runs the forward pass of the blocks once more instead of keeping out and logsumexp:
    results stay right, the step takes a fifth longer. Only the forward pass looks for the largest score of a row."""
    where = Where(Places(jnp.arange(24), jnp.arange(24), None, None), None, 0)
    x = jax.ShapeDtypeStruct((1, 24, 2, 8), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(blockwise_attention(q, k, v, where, 0, block=8) ** 2)

    assert str(jax.make_jaxpr(loss)(x, x, x)).count("reduce_max") == 3
    assert str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)).count("reduce_max") == 3


def test_blockwise_memory_grows_with_the_sequence_only():
    """Catches blocks of scores that XLA holds all at once: 1.8 GB instead of 0.2 GB at 8192, four times that at 16384."""
    S = 8192
    where = Where(Places(jnp.arange(S), jnp.arange(S), None, None), None, 0)
    shape = jax.ShapeDtypeStruct((1, S, 4, 32), jnp.float32)
    attention = partial(blockwise_attention, where=where, slot=0, block=256)
    f = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v) ** 2), (0, 1, 2))
    compiled = jax.jit(f).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.4e9


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("attention", ["dense", "blockwise", "splash"])
def test_documents_are_isolated(attention, shards):
    """Catches attention across documents, in sliding or full layers: each document's logits are those it has alone, and
    changing one document (which lies on both context shards) moves no other's. Positions need not restart, since RoPE
    depends on distances alone.
    """
    c = replace(CONFIG, pattern="sssf", yarn=YARN_TINY)
    execution = executions(5)[attention]  # 5: blocks end inside documents
    unit = 1
    if attention == "splash":  # at least 128 positions a device
        c, unit = replace(c, head_dim=32, window=70), 32 / 3
    S, first, last = (int(n * unit) for n in (24, 7, 18))
    params, shape = random_params(c), (1, 1, shards, 1)
    tokens = random_batch(c, 2, S)["tokens"]
    segments = np.broadcast_to(np.repeat([0, 1, 2], [first, last - first, S - last]), (2, S)).astype(np.int32)
    packed = run_logits(c, params, tokens, execution, segments, shape)
    alone = run_logits(c, params, tokens[:, first:last])
    assert np.abs(packed[:, first:last, :97] - alone[..., :97]).max() < 2e-5

    changed = tokens.copy()
    changed[:, first:last] = (tokens[:, first:last] + 1) % c.vocab_size
    moved = run_logits(c, params, changed, execution, segments, shape)
    np.testing.assert_array_equal(moved[:, :first], packed[:, :first])
    np.testing.assert_array_equal(moved[:, last:], packed[:, last:])
    assert np.abs(moved[:, first:last] - packed[:, first:last]).max() > 0.1
    unseparated = run_logits(c, params, tokens, execution, None, shape)
    assert np.abs(unseparated[:, last:] - packed[:, last:]).max() > 0.1


@pytest.mark.parametrize("shards, S", [(1, 256), (2, 512), (4, 1024)])
@pytest.mark.parametrize("window", [None, 128, 200])
@pytest.mark.parametrize("documents", [False, True])
def test_splash_equals_dense(shards, S, window, documents):
    """Catches a window of 129 keys, an unscaled score, documents that leak, queries exchanged under another shard's mask, keys
    before the sequence's begin; forward and backward, with more query heads than key heads."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, S, heads, 32)).astype(np.float32) for heads in (4, 2, 2, 4))
    segments = np.cumsum(rng.random((2, S)) < 0.02, axis=1).astype(np.int32) if documents else None

    def run(execution, shards):
        def body(q, k, v, segments, dout):
            positions = model.vary(lax.axis_index("context") * q.shape[1] + jnp.arange(q.shape[1]))
            where = model.locate(positions, segments, window, execution)
            out, vjp = jax.vjp(lambda q, k, v: model.attend(q, k, v, where, execution, 0), q, k, v)
            return out, *vjp(dout)

        specs = [P(None, "context") if x is not None else None for x in (q, k, v, segments, dout)]
        f = on_mesh(body, tuple(specs), P(None, "context"), (1, 1, shards, 1), check_vma=False)
        return f(q / math.sqrt(32), k, v, segments, dout)

    got = run(executions(128)["splash"], shards)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, run(DENSE, 1), strict=True):
        assert difference(a, b) < 1e-5, name


@pytest.mark.parametrize("S, heads, window", [(16, (4, 4), None), (21, (6, 2), 8), (9, (6, 1), 1), (12, (4, 2), 12)])
def test_cudnn_equals_dense(S, heads, window):
    """Catches a window of one key more or less, queries scaled twice, grouped heads in the wrong order, a causal mask
    that is missing: outputs and the gradients of q, k and v."""
    H, G = heads
    rng = np.random.default_rng(S)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(2, S, h, 6)), jnp.float32) for h in (H, G, G, H))
    where = Where(Places(jnp.arange(S), jnp.arange(S), None, None), window, 0)

    assert_equals_dense("cudnn", 4, where, weight, q, k, v)


@pytest.mark.parametrize("remat", [None, ("q", "k", "v", "heads_out", "lse", "ffn_out")], ids=["all", "named"])
def test_a_step_with_cudnn_equals_dense(remat):
    """Catches a gradient that is lost or doubled between the kernel's own derivative and what remat keeps of it."""
    c = replace(CONFIG, pattern="sssf")
    params, batch = random_params(c), random_batch(c, 4, 12)
    execution = replace(executions(4)["cudnn"], remat=remat)
    loss, _, grads = loss_and_gradients(c, params, batch, execution, shape=(1, 2, 1, 2))
    expected, _, expected_grads = loss_and_gradients(c, params, batch, DENSE)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert worst(grads, expected_grads)[0] < 1e-5


@pytest.mark.parametrize("offset, documents", [(3, False), (None, False), (0, True)])
def test_cudnn_refuses_what_it_would_compute_wrongly(offset, documents):
    """Catches documents that leak into each other, and a shard's queries placed at the sequence's begin."""
    segments = jnp.zeros((1, 8), jnp.int32) if documents else None
    where = Where(Places(jnp.arange(8), jnp.arange(8), segments, segments), None, offset)
    x = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(ValueError, match="documents or a sequence over devices; fix: attention blockwise"):
        executions(4)["cudnn"].attention(x, x, x, where, 0)


@pytest.mark.parametrize("ids", [97, 5])
def test_rows_in_order(ids):
    """Catches rows of a token that are lost or written over by another's, or tokens of another device's rows that count:
    with few ids each stands often, and the last one at the end of the sorted ids."""
    params, batch = random_params(CONFIG), random_batch(CONFIG, 4, 12)
    batch["tokens"] %= ids
    expected_loss, _, expected = loss_and_gradients(CONFIG, params, batch, DENSE)
    execution = replace(DENSE, take_rows=rows_in_order)
    loss, _, grads = loss_and_gradients(CONFIG, params, batch, execution, shape=(1, 2, 1, 2))
    assert loss == pytest.approx(expected_loss, rel=1e-6) and worst(grads, expected)[0] < 1e-5


def test_rows_in_order_write_each_sum_once():
    """Catches a scatter that adds: on a GPU its order is another in every run."""

    def gradient(table):
        ids = model.vary(jnp.array([3, 0, 3, 1]))
        return jax.grad(lambda table: jnp.sum(rows_in_order(table, ids) ** 2))(model.vary(table))

    f = on_mesh(gradient, P(), P(), check_vma=False)
    jaxpr = str(f.trace(jnp.ones((5, 4))).jaxpr)
    assert "scatter" in jaxpr and "scatter-add" not in jaxpr
    np.testing.assert_array_equal(f(jnp.ones((5, 4)))[:, 0], [2, 2, 0, 4, 0])


ALONE = """
import jax, jax.numpy as jnp, numpy as np
from attention import choose_attention
from model import Places, Where
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 12, 4, 8))
where = Where(Places(jnp.arange(12), jnp.arange(12), None, None), window=5, offset=0)
dense, blockwise = (choose_attention(name, 4, None, "cpu")[0] for name in ("dense", "blockwise"))
np.testing.assert_allclose(dense(q, k, v, where, 0), blockwise(q, k, v, where, 0), atol=1e-5)
"""


def test_attention_needs_model_alone(tmp_path):
    """Catches an import that ties attention.py to more of this project than model.py."""
    run_copied_out(tmp_path, ALONE, ("attention.py", "model.py"), devices=1)
