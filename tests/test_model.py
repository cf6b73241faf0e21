"""model.py against transformers' Olmo3ForCausalLM, plain autodiff and one device; then the training step around it.

Dimensions are small and all different, so that a swapped axis cannot pass: D48 H4 G2 K14 (A56 E28) F80 V97 (104).
"""

import hashlib
import math
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
import train
from attention import blockwise_attention
from config import load_config, shardings, to_device
from convert import HF_NAMES, VOCABULARY
from model import Execution, ModelConfig, Places, YarnConfig, dense_attention

YARN_7B = YarnConfig(factor=8.0, original_length=8192, beta_fast=32.0, beta_slow=1.0)
YARN_TINY = replace(YARN_7B, original_length=16, beta_fast=2.0)  # so short that it changes the tiny model's RoPE
CONFIG = ModelConfig(
    vocab_size=97,
    padded_vocab_size=104,
    mask_padded_vocab=True,
    n_layers=4,
    d_model=48,
    n_heads=4,
    n_kv_heads=2,
    head_dim=14,
    d_ff=80,
    window=7,
    pattern="sf",
    rope_theta=5e5,
    yarn=None,
    norm_eps=1e-6,
    init_std=0.08,  # larger than OLMo's 0.02: at this width 0.02 would leave every layer close to the identity
    compute_dtype="float32",
    grad_reduce_dtype="float32",
)
DENSE = Execution(dense_attention, remat=None, scan_unroll=1, loss_chunk=13)
BLOCKWISE, BLOCKS_OF_5, ONE_BLOCK = (
    replace(DENSE, attention=partial(blockwise_attention, block=block)) for block in (8, 5, 64)
)
SEVEN_B = replace(
    CONFIG,
    vocab_size=100278,
    padded_vocab_size=100352,
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_ff=11008,
    window=4096,
    pattern="sssf",
    init_std=0.02,
)
BATCH = P(("data", "fsdp"), "context")
QUICK = {"xla_backend_optimization_level": "0"}  # compiles in half the time; these arrays are tiny
Z_LOSS = 1e-3  # a hundred times the recipe's, so that an error in it shows


# ---------------------------------------------------------------------------------------------------------- helpers


def make_mesh(shape=(1, 1, 1, 1)):
    n, auto = math.prod(shape), (jax.sharding.AxisType.Auto,) * 4
    return jax.make_mesh(shape, model.AXES, axis_types=auto, devices=jax.devices()[:n])


def on_mesh(body, in_specs, out_specs, shape=(1, 1, 1, 1), check_vma=True):
    mapped = jax.shard_map(body, mesh=make_mesh(shape), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped, compiler_options=QUICK)


def specs(c):
    return {name: t.spec for name, t in model.ledger(c).items()}


@cache
def random_params(c, seed=0):
    """Initial parameters, but with random norm weights: with ones, a norm in the wrong place could pass."""
    rng = np.random.default_rng(seed)
    init = jax.jit(partial(model.init_params, c), compiler_options=QUICK)
    params = jax.tree.map(np.asarray, init(seed))
    noise = {k: 0.3 * rng.standard_normal(v.shape).astype(np.float32) for k, v in params.items() if k.endswith("norm")}
    return {k: v + noise.get(k, 0) for k, v in params.items()}


def random_batch(c, B, S, seed=0, documents=False):
    """Shifted labels; row 1 is masked whole, as the repetition filter does, and some tokens of row 0 are."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, c.vocab_size, (B, S)).astype(np.int32)
    mask = np.ones((B, S), bool)
    mask[:, -1] = False
    mask[1] = False
    mask[0, :5] = False
    segments = np.cumsum(rng.random((B, S)) < 0.15, axis=1).astype(np.int32) if documents else None
    return {"tokens": tokens, "labels": np.roll(tokens, -1, 1), "loss_mask": mask, "segment_ids": segments}


@cache
def logits_function(c, execution, documents, shape):
    def body(params, tokens, segments):
        return model.logits(model.vary(params), model.vary(tokens), model.vary(segments), c, execution)

    in_specs = (specs(c), BATCH, BATCH if documents else None)
    out_specs = P(("data", "fsdp"), "context", "tensor")
    return on_mesh(
        body, in_specs, out_specs, shape, check_vma=execution.key_multiple == 1
    )  # Splash has no types for it


def run_logits(c, params, tokens, execution=DENSE, segments=None, shape=(1, 1, 1, 1)):
    return np.asarray(logits_function(c, execution, segments is not None, shape)(params, tokens, segments))


@cache
def loss_function(c, execution, shape, documents, z_loss=Z_LOSS):
    def body(params, batch, divisor):
        def share(params):
            total, per_token = model.token_loss(params, batch, z_loss, c, execution)
            return total / divisor / lax.axis_size("tensor"), per_token.ce_N

        params, batch = model.vary(params), model.vary(batch)
        (loss, ce), grads = jax.value_and_grad(share, has_aux=True)(params)
        # CE is equal along tensor, but marked as varying: its sum over tensor / size is itself
        ce = lax.psum(ce / lax.axis_size("tensor"), "tensor")
        return lax.psum(loss, model.AXES), ce, model.reduce_gradients(grads, c)

    batch_specs = dict.fromkeys(("tokens", "labels", "loss_mask"), BATCH) | {
        "segment_ids": BATCH if documents else None
    }
    return on_mesh(body, (specs(c), batch_specs, P()), (P(), BATCH, specs(c)), shape)


def loss_and_gradients(c, params, batch, execution, divisor=50.0, shape=(1, 1, 1, 1)):
    """(sum / divisor, CE of every token, gradients), taken as the training step takes them."""
    f = loss_function(c, execution, shape, batch["segment_ids"] is not None)
    return jax.tree.map(np.asarray, f(params, batch, np.float32(divisor)))


def difference(a, b):
    """Largest difference, relative to the largest magnitude of the tensor."""
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / max(np.max(np.abs(b)), 1e-30))


def worst(grads, reference):
    assert grads.keys() == reference.keys()
    return max((difference(grads[k], reference[k]), k) for k in grads)


# ----------------------------------------------------------------------------------------- configuration and ledger


@pytest.mark.parametrize(
    "size, total, without_embedding",
    [
        # n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff; totals as OLMo-core's constructors count them
        ((4, 12, 4, 4, 4, 256), 2_448_620, 1_244_396),  # 1M
        ((4, 128, 8, 8, 16, 512), 26_740_864, 13_895_808),  # 14M
        ((8, 384, 8, 8, 48, 1536), 95_957_376, 57_422_208),  # 60M
        ((12, 768, 12, 12, 64, 3072), 267_424_512, 190_354_176),  # 190M
        ((16, 1280, 16, 16, 80, 5120), 676_414_720, 547_964_160),  # 600M
        ((16, 2048, 16, 16, 128, 8192), 1_484_916_736, 1_279_395_840),  # 1B
        ((16, 3328, 16, 16, 208, 13312), 3_503_508_736, 3_169_537_280),  # 3B
        ((32, 4096, 32, 32, 128, 11008), 7_298_617_344, 6_887_575_552),  # 7B
        ((40, 5120, 40, 40, 128, 13824), 13_716_198_400, 13_202_396_160),  # 13B
        ((64, 5120, 40, 8, 128, 27648), 32_234_279_936, 31_720_477_696),  # 32B, grouped keys and values
    ],
)
def test_parameter_counts(size, total, without_embedding):
    """Catches a tensor that is missing, shared, biased, or of a wrong shape (QK-norm per head, GQA widths)."""
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
    c = replace(SEVEN_B, **dict(zip(names, size, strict=True)))
    assert model.parameter_count(c) == total
    assert model.parameter_count(c) - c.padded_vocab_size * c.d_model == without_embedding


def test_parameter_count_without_padding_rows():
    """Catches padding rows counted once or not at all: both embed and lm_head have them."""
    assert model.parameter_count(SEVEN_B) == 7_298_617_344
    assert model.parameter_count(SEVEN_B, padded=False) == 7_298_011_136


def test_ledger_of_7b():
    """Catches a per-head QK-norm, a dimension that a mesh of 128 x 4 cannot cut, and a tensor missing in a list."""
    table = model.ledger(SEVEN_B)
    assert table["q_norm"].shape == (32, 4096) and table["k_norm"].shape == (32, 4096)
    assert model.ledger(CONFIG)["q_norm"].shape == (4, 56) and model.ledger(CONFIG)["k_norm"].shape == (4, 28)
    sizes = {"fsdp": 128, "tensor": 4}
    for name, t in table.items():
        assert len(t.spec) <= len(t.shape), name
        for size, axes in zip(t.shape, t.spec, strict=False):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            assert size % math.prod(sizes[axis] for axis in axes) == 0, (name, size, axes)
    assert set(model.LAYER_TENSORS) == {name for name, t in table.items() if t.shape[0] == 32}


def test_decay_everywhere_but_the_embedding():
    """Catches the usual "no decay on norms" rule: OLMo-core decays norms and head, and spares the embedding alone."""
    assert [name for name, t in model.ledger(CONFIG).items() if not t.decay] == ["embed"]


@pytest.mark.parametrize(
    "change, numbers",
    [
        ({"padded_vocab_size": 96}, ("padded_vocab_size", "96", "97")),
        ({"n_layers": 5}, ("n_layers", "5", "2")),
        ({"n_heads": 5}, ("n_heads", "5", "2")),
        ({"head_dim": 13}, ("head_dim", "13", "even")),
        ({"pattern": "sxf"}, ("pattern", "sxf", "letters s and f")),
        ({"pattern": ""}, ("pattern", "''", "letters s and f")),
        ({"window": 0}, ("window", "0", "positive")),
        ({"d_ff": -80}, ("d_ff", "-80", "positive")),
        ({"compute_dtype": "float16"}, ("compute_dtype", "float16", "bfloat16")),
        ({"grad_reduce_dtype": "int8"}, ("grad_reduce_dtype", "int8", "float32")),
    ],
)
def test_model_config_refuses(change, numbers):
    """Catches a bad architecture that would surface as a shape error deep inside compilation; names both numbers."""
    with pytest.raises(ValueError) as e:
        replace(CONFIG, **change)
    assert str(e.value).startswith(f"model.{numbers[0]}:") and all(n in str(e.value) for n in numbers), e.value


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"remat": ("q", "gata1")}, ("remat", "'gata1'", "gate0")),
        ({"loss_chunk": -1}, ("loss_chunk", "-1", "positive")),
        ({"scan_unroll": 0}, ("scan_unroll", "0", "positive")),
    ],
)
def test_execution_refuses(change, parts):
    """Catches saved names that no activation has, and sizes of zero, before anything is compiled."""
    with pytest.raises(ValueError) as e:
        replace(DENSE, **change)
    assert all(p in str(e.value) for p in parts), e.value


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ({"fsdp": 5}, ("d_model", "48", "fsdp", "5")),
        ({"tensor": 8}, ("n_heads", "4", "tensor", "8")),
        ({"tensor": 4}, ("n_kv_heads", "2", "tensor", "4")),
        ({"context": 3}, ("sequence_length", "16", "context", "3")),
        ({"fsdp": 16}, ("padded_vocab_size", "104", "tensor x fsdp", "16")),
    ],
)
def test_check_mesh_refuses(sizes, parts):
    """Catches a model that cannot be cut over the mesh; the message has the model's number and the mesh's."""
    full = dict.fromkeys(model.AXES, 1) | sizes
    with pytest.raises(ValueError) as e:
        model.check_mesh(CONFIG, full, 16)
    assert all(p in str(e.value) for p in parts), e.value
    model.check_mesh(CONFIG, {"data": 8, "fsdp": 4, "context": 4, "tensor": 2}, 16)


# ------------------------------------------------------------------------------------------------------------- init


def test_init_distribution():
    """Catches another std, a missing cut at 3 std, depth or width scaling, norms that are not one, bf16 parameters."""
    c = replace(CONFIG, d_model=256, d_ff=512, vocab_size=1024, padded_vocab_size=1024, init_std=0.02)
    params = jax.jit(partial(model.init_params, c))(0)
    assert {name: p.shape for name, p in params.items()} == {name: t.shape for name, t in model.ledger(c).items()}
    for name, p in params.items():
        assert p.dtype == jnp.float32
        if name.endswith("norm"):
            assert np.all(p == 1.0), name
            continue
        p = np.asarray(p)
        # a normal cut at 3 std has 0.98658 of its std: 0.01973, as measured on OLMo-core's own initial weights
        assert abs(p.std() - 0.01973) < 0.01973 * 4 / math.sqrt(2 * p.size), (name, p.std())
        assert abs(p.mean()) < 4 * 0.02 / math.sqrt(p.size), (name, p.mean())
        assert 0.05 < np.abs(p).max() <= 0.06, (name, np.abs(p).max())


def test_init_differs_by_seed_and_by_tensor():
    """Catches one key used for several tensors (wq = wk, or equal layers) and a seed that is ignored."""
    init = jax.jit(partial(model.init_params, CONFIG), compiler_options=QUICK)
    zero, one = init(0), init(1)
    first = {name: tuple(np.ravel(p)[:20]) for name, p in zero.items() if not name.endswith("norm")}
    assert len(set(first.values())) == len(first)
    assert all(tuple(np.ravel(one[name])[:20]) != first[name] for name in first)
    assert not np.array_equal(zero["wq"][0], zero["wq"][1])


def test_init_does_not_depend_on_settings():
    """Catches initial weights that follow JAX's settings of random numbers, and ones that are not those of before."""
    digest = "d578b6198b65e376a880443262a1d59451e337b30dfe3855ebf186847d0d1f10"
    for setting in (jax.threefry_partitionable(False), jax.default_prng_impl("rbg"), jax.enable_x64(True)):
        with setting:
            params = jax.jit(partial(model.init_params, CONFIG))(7)
        content = b"".join(np.asarray(params[name]).tobytes() for name in sorted(params))
        assert hashlib.sha256(content).hexdigest() == digest, setting


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 2, 1, 2)])
def test_init_does_not_depend_on_the_sharding(shape):
    """Catches initial weights that change with the machine (a random stream that follows the shards)."""
    init = partial(model.init_params, CONFIG)
    whole = jax.jit(init, compiler_options=QUICK)(3)
    to = {name: NamedSharding(make_mesh(shape), spec) for name, spec in specs(CONFIG).items()}
    cut = jax.jit(init, out_shardings=to, compiler_options=QUICK)(3)
    assert cut["wq"].sharding.num_devices == 8
    for name in whole:
        np.testing.assert_array_equal(np.asarray(cut[name]), np.asarray(whole[name]), err_msg=name)


# ------------------------------------------------------------------------------------- parity with transformers


def hf_model(c, params):
    """transformers' Olmo3ForCausalLM with our parameters, fp32, eager attention, and its mapping name -> transpose."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    plain = {"rope_type": "default", "rope_theta": c.rope_theta}
    full = plain
    if c.yarn is not None:
        full = {
            "rope_type": "yarn",
            "rope_theta": c.rope_theta,
            "factor": c.yarn.factor,
            "original_max_position_embeddings": c.yarn.original_length,
            "beta_fast": c.yarn.beta_fast,
            "beta_slow": c.yarn.beta_slow,
        }
    hf = transformers.Olmo3ForCausalLM(
        transformers.Olmo3Config(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            sliding_window=c.window,
            max_position_embeddings=128,  # factor x original_length, else it warns
            rms_norm_eps=c.norm_eps,
            layer_types=[kinds[k] for k in c.pattern * (c.n_layers // len(c.pattern))],
            rope_parameters={"sliding_attention": plain, "full_attention": full},
            tie_word_embeddings=False,
            pad_token_id=None,  # a padding row would have no gradient
            eos_token_id=1,
            attn_implementation="eager",
        )
    )
    state = {name: np.ascontiguousarray(x.T if transposed else x) for name, x, transposed in hf_tensors(c, params)}
    hf.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()})  # strict: no key may be left
    return hf.eval()


def hf_tensors(c, tree):
    """(Hugging Face's name, what `tree` holds of it without padding rows, whether theirs is the transpose), in turn."""
    for leaf, (name, transposed) in HF_NAMES.items():
        if leaf in model.LAYER_TENSORS:
            yield from ((name.format(i), tree[leaf][i], transposed) for i in range(c.n_layers))
        else:
            yield name, tree[leaf][: c.vocab_size] if leaf in VOCABULARY else tree[leaf], transposed


@pytest.mark.parametrize(
    "change, executions",
    [
        ({"pattern": "sssf", "yarn": YARN_TINY}, [DENSE, BLOCKS_OF_5]),
        ({"pattern": "sssf"}, [BLOCKWISE]),
        ({"n_kv_heads": 4, "yarn": YARN_TINY}, [DENSE, ONE_BLOCK]),
        ({"n_kv_heads": 1}, [BLOCKWISE]),
        ({"window": 64, "yarn": YARN_TINY}, [BLOCKWISE]),  # a window that covers all keeps its layer's plain RoPE
    ],
    ids=["gqa-yarn", "gqa", "mha-yarn", "mqa", "wide-window-yarn"],
)
def test_logits_equal_transformers(change, executions):
    """Catches QK-norm per head, norms before the sub-layers, a window off by one, YaRN on the wrong layers, a
    transposed weight, another RoPE pairing: any of them moves these logits by more than 1e-2. Reached: 3e-6.
    """
    torch = pytest.importorskip("torch")
    c = replace(CONFIG, **change)
    params = random_params(c)
    tokens = np.random.default_rng(1).integers(0, c.vocab_size, (2, 32)).astype(np.int32)
    with torch.no_grad():
        reference = hf_model(c, params)(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(reference).max() > 1  # logits so small that everything agrees would prove nothing
    for execution in executions:
        ours = run_logits(c, params, tokens, execution)
        assert np.abs(ours[..., : c.vocab_size] - reference).max() < 2e-5
        assert np.all(ours[..., c.vocab_size :] == model.MASKED)


def test_loss_and_gradients_equal_torch():
    """Catches a wrong hand-made backward pass (loss, weight gather, remat) in any tensor, and padding rows that join
    the softmax: CE per token is F.cross_entropy of transformers' logits, gradients are torch's autograd.
    """
    torch = pytest.importorskip("torch")
    c = replace(CONFIG, yarn=YARN_TINY)
    params, batch = random_params(c), random_batch(c, 3, 20)
    hf = hf_model(c, params)
    logits = hf(torch.from_numpy(batch["tokens"]).long()).logits.flatten(0, 1)
    labels, mask = (torch.from_numpy(batch[k]).flatten() for k in ("labels", "loss_mask"))
    ce_torch = torch.nn.functional.cross_entropy(logits, labels.long(), reduction="none")
    (mask * (ce_torch + Z_LOSS * torch.logsumexp(logits, -1) ** 2)).sum().div(50.0).backward()

    loss, ce, grads = loss_and_gradients(c, params, batch, BLOCKWISE)
    assert np.abs(ce.ravel() - ce_torch.detach().numpy()).max() < 1e-5
    theirs = {name: p.grad.numpy() for name, p in hf.named_parameters()}
    for name, ours, transposed in hf_tensors(c, grads):
        assert difference(ours, theirs[name].T if transposed else theirs[name]) < 1e-5, name
    for leaf in ("embed", "lm_head"):
        assert not np.any(grads[leaf][c.vocab_size :]), leaf  # padding rows learn nothing


def test_padding_rows_in_the_softmax():
    """Catches padding rows that leave (or enter) the softmax against the config: OLMo-core trains with them inside,
    a loss that is higher by log(sum over all rows / sum over real rows) for the same weights.
    """
    params, batch = random_params(CONFIG), random_batch(CONFIG, 2, 16)
    inside = replace(CONFIG, mask_padded_vocab=False)
    logits = run_logits(inside, params, batch["tokens"]).astype(np.float64)
    assert np.argmax(run_logits(CONFIG, params, batch["tokens"]), -1).max() < 97
    target = np.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
    for c, rows in ((inside, 104), (CONFIG, 97)):
        _, ce, _ = loss_and_gradients(c, params, batch, DENSE)
        np.testing.assert_allclose(ce, np.log(np.exp(logits[..., :rows]).sum(-1)) - target, atol=2e-6)


# ------------------------------------------------------------------------------------------------------------- YaRN


def test_yarn_of_7b():
    """Catches positions / factor, a ramp over other dimensions, un-truncated bounds, a factor squared or forgotten."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import _compute_yarn_parameters

    c = replace(SEVEN_B, yarn=YARN_7B)
    plain, one = model.rope_frequencies(c, yarn=False)
    inv, factor = model.rope_frequencies(c, yarn=True)
    assert one == 1.0 and inv.dtype == np.float32 and inv.shape == (64,)
    np.testing.assert_array_equal(inv[:19], plain[:19])  # low = 18
    np.testing.assert_array_equal(inv[35:], plain[35:] / np.float32(8))  # high = 35
    assert np.all(inv[19:35] < plain[19:35]) and np.all(inv[19:35] > plain[19:35] / 8)
    assert factor == 1.2079441541679836

    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0}
    hf = transformers.Olmo3Config(head_dim=128, hidden_size=4096, num_attention_heads=32, max_position_embeddings=65536)
    hf.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    theirs, theirs_factor = _compute_yarn_parameters(hf, "cpu", layer_type="full_attention")
    assert np.abs(inv - theirs.numpy()).max() < 1e-7
    assert factor == pytest.approx(theirs_factor, abs=1e-12)


def test_rope_tables_have_yarn_in_both_sin_and_cos():
    """Catches a factor on cos alone, fp16-like positions, and a table for local instead of global positions."""
    c = replace(SEVEN_B, yarn=YARN_7B)
    positions = jnp.array([0, 1, 60_000])
    cos, sin = model.rope_tables(c, positions, "f")
    inv, factor = model.rope_frequencies(c, yarn=True)
    angles = np.array([0, 1, 60_000], np.float64)[:, None] * inv
    assert cos.shape == (3, 1, 64) and cos.dtype == jnp.float32
    np.testing.assert_allclose(cos[:, 0], factor * np.cos(angles), atol=6e-3)  # fp32 angles near 6e4 are 4e-3 apart
    np.testing.assert_allclose(cos[:2, 0], factor * np.cos(angles[:2]), atol=1e-6)
    np.testing.assert_allclose(sin[:2, 0], factor * np.sin(angles[:2]), atol=1e-6)


def test_sliding_layers_keep_plain_rope():
    """Catches YaRN on every layer (transformers 5.0 to 5.12 had that): without a full layer it may change nothing."""
    tokens = random_batch(CONFIG, 2, 16)["tokens"]
    params = random_params(CONFIG)
    outputs = {}
    for pattern in ("s", "f"):
        for yarn in (None, YARN_TINY):
            c = replace(CONFIG, pattern=pattern, yarn=yarn)
            outputs[pattern, yarn is not None] = run_logits(c, params, tokens)
    np.testing.assert_array_equal(outputs["s", True], outputs["s", False])
    assert np.abs(outputs["f", True] - outputs["f", False]).max() > 0.01


# -------------------------------------------------------------------------------------------------------- attention


def test_window_counts_the_query_itself():
    """Catches the classic off-by-one: `window` keys with the query's own, not window + 1 (nor window - 1)."""
    positions = jnp.arange(12)
    places = Places(positions, positions, None, None)
    mask = np.asarray(model.visible(places, 8))
    assert mask.sum(1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    assert mask[11].nonzero()[0].tolist() == list(range(4, 12))
    assert np.asarray(model.visible(places, None)).sum(1).tolist() == list(range(1, 13))


def test_swiglu_equals_autodiff():
    """A gradient written by hand that is not that of the function."""
    rng = np.random.default_rng(0)
    gate, up, w, dout = (rng.standard_normal(s).astype(np.float32) for s in ((6, 5), (6, 5), (4, 5), (6, 4)))
    out, vjp = jax.vjp(model.swiglu_down, gate, up, w)
    expected, plain = jax.vjp(lambda g, u, w: (jax.nn.silu(g) * u) @ w.T, gate, up, w)
    assert difference(out, expected) < 1e-6
    for a, b in zip(vjp(dout), plain(dout), strict=True):
        assert difference(a, b) < 1e-6


# ------------------------------------------------------------------------------------------------------------- loss


def chunked(c, x, head, labels, mask, z_loss, chunk, shape=(1, 1, 1, 1)):
    """(loss, CE per token, lse^2 per token, dx, dW) of model.cross_entropy."""

    def body(x, head, labels, mask):
        def f(x, head):
            total, per_token = model.cross_entropy(x, head, labels, mask, z_loss, c, chunk)
            return total / lax.axis_size("tensor"), per_token

        x, head, labels, mask = model.vary((x, head, labels, mask))
        (total, per_token), (dx, dhead) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(x, head)
        ce, lse_squared = (a / lax.axis_size("tensor") for a in per_token)
        per_row = (lax.psum(a, "tensor") for a in (ce, lse_squared, dx))
        return lax.psum(total, model.AXES), *per_row, lax.psum(dhead, ("data", "context"))

    rows, matrix = P(("data", "fsdp", "context")), model.ledger(CONFIG)["lm_head"].spec
    f = on_mesh(body, (rows, matrix, rows, rows), (P(), rows, rows, rows, matrix), shape)
    return [np.asarray(a) for a in f(x, head, labels, mask)]


def test_chunked_loss_equals_plain_autodiff():
    """Catches a chunk lost, counted twice or padded with live tokens, and a hand-made dx or dW that differs from
    autodiff through whole logits, with the z-loss (chunks of 1, 8, all, and remainders).
    """
    N, D, V, z_loss = 30, 48, 104, 0.02  # a large z-loss, so that its gradient counts
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(N, D)).astype(np.float32), 0.2 * rng.normal(size=(V, D)).astype(np.float32)
    labels = rng.integers(0, 97, N).astype(np.int32)
    mask = (rng.random(N) < 0.7).astype(np.float32)

    def plain(x, head):
        logits = (x @ head.T)[:, :97]
        lse = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(mask * (lse - logits[jnp.arange(N), labels] + z_loss * lse**2))

    loss, (dx, dhead) = jax.value_and_grad(plain, argnums=(0, 1))(x, head)
    whole = chunked(CONFIG, x, head, labels, mask, z_loss, N)
    for chunk in (1, 7, 8):
        got = chunked(CONFIG, x, head, labels, mask, z_loss, chunk)
        for a, b in zip(got, whole, strict=True):
            assert difference(a, b) < 1e-6, chunk
        assert got[0] == pytest.approx(float(loss), rel=1e-6)
        assert difference(got[3], dx) < 2e-6 and difference(got[4], dhead) < 2e-6, chunk


def test_masked_tokens_contribute_nothing():
    """Catches a mask that reaches the sum but not the hand-made gradient (or an id outside the vocabulary there)."""
    params, batch = random_params(CONFIG), random_batch(CONFIG, 2, 16)
    loss, _, grads = loss_and_gradients(CONFIG, params, batch, BLOCKWISE)
    other = batch | {"labels": np.where(batch["loss_mask"], batch["labels"], (batch["labels"] + 31) % 97)}
    other_loss, _, other_grads = loss_and_gradients(CONFIG, params, other, BLOCKWISE)
    assert loss == other_loss
    for name in grads:
        np.testing.assert_array_equal(grads[name], other_grads[name], err_msg=name)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masked_tokens_that_overflow_contribute_nothing(shape, dtype):
    """Catches 0 * inf = NaN in the loss, in dx and, for all labels, in dW, where masked tokens have logits, a logsumexp
    or hidden states that are not finite. Catches a weight taken for a bool: of -0.5 or 2, as post-training has."""
    N, D, V, z_loss = 32, 48, 104, 0.02
    c = replace(CONFIG, compute_dtype=dtype)
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(N, D)), (0.2 * rng.normal(size=(V, D))).astype(np.float32)
    x = np.asarray(x, jnp.dtype(dtype))
    labels = rng.integers(0, 97, N).astype(np.int32)
    weights = rng.choice([0.0, 1.0, -0.5, 2.0], N).astype(np.float32)
    masked = np.flatnonzero(weights == 0)
    calm = chunked(c, x, head, labels, weights, z_loss, 3, shape)

    def plain(x, head):
        logits = (x @ head.T)[:, :97]
        lse = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(weights * (lse - logits[jnp.arange(N), labels] + z_loss * lse**2))

    loss, (dx, dhead) = jax.value_and_grad(plain, argnums=(0, 1))(x.astype(np.float32), head)
    close = 2e-6 if dtype == "float32" else 2e-2
    assert calm[0] == pytest.approx(float(loss), rel=close)
    assert difference(calm[3].astype(np.float32), dx) < close and difference(calm[4], dhead) < close

    wild = x.copy()
    for row, value in zip(masked, [np.inf, -np.inf, np.nan, 3e38, -1e38] * N, strict=False):
        wild[row, :: 1 + row % 3] = value
    odd = np.where(weights == 0, -100, labels)
    got = chunked(c, wild, head, odd, weights, z_loss, 3, shape)
    assert len(masked) >= 5 and not np.isfinite(got[1][masked]).any()
    for name, a, b in zip(("loss", "CE", "lse^2", "dx", "dW"), got, calm, strict=True):
        unmasked = np.flatnonzero(weights) if name in ("CE", "lse^2") else ...
        np.testing.assert_array_equal(a[unmasked], b[unmasked], err_msg=name)


def test_weights_of_labels_reach_every_gradient():
    """Catches a loss_mask that is cast to bool, or counted, between the batch and the loss: what is linear in it."""
    mesh, params, batch = (1, 2, 2, 2), random_params(CONFIG), random_batch(CONFIG, 2, 16)
    twice, minus_half = np.zeros((2, 2, 16), np.float32)
    twice[0, 3:9] = twice[1, ::2] = minus_half[0, 10:] = 1
    parts = [2 * twice - 0.5 * minus_half, twice, minus_half]
    both, first, second = (
        loss_and_gradients(CONFIG, params, batch | {"loss_mask": mask}, BLOCKWISE, shape=mesh) for mask in parts
    )
    assert both[0] == pytest.approx(2 * first[0] - 0.5 * second[0], rel=1e-6)
    for name in both[2]:
        assert difference(both[2][name], 2 * first[2][name] - 0.5 * second[2][name]) < 1e-5, name


def test_everything_masked_is_zero():
    """Catches 0/0 = NaN and gradients of masked tokens when a device (or the whole batch) has no label left."""
    batch = random_batch(CONFIG, 2, 16)
    batch["loss_mask"] = np.zeros_like(batch["loss_mask"])
    loss, ce, grads = loss_and_gradients(CONFIG, random_params(CONFIG), batch, BLOCKWISE, divisor=1.0)
    assert loss == 0.0 and np.all(np.isfinite(ce))
    assert all(not np.any(g) for g in grads.values())


@pytest.mark.parametrize("differentiate", [False, True], ids=["evaluation", "training"])
def test_no_whole_logits_are_planned(differentiate):
    """Catches fp32 logits [B, S, V] kept whole: 3.3 GB at 1 x 8192 x 100352, and twice that with their gradient."""
    c = replace(CONFIG, vocab_size=100278, padded_vocab_size=100352, n_layers=2, window=64, pattern="s")
    execution = replace(DENSE, attention=partial(blockwise_attention, block=1024), loss_chunk=256)

    def body(params, tokens):
        params, tokens = model.vary((params, tokens))
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": tokens > 0, "segment_ids": None}

        def loss(params):
            return model.token_loss(params, batch, 1e-5, c, execution)[0]

        if differentiate:
            return model.reduce_gradients(jax.grad(loss)(params), c)
        return lax.psum(loss(params), model.AXES)

    f = on_mesh(body, (specs(c), BATCH), specs(c) if differentiate else P())
    shapes = {name: jax.ShapeDtypeStruct(t.shape, jnp.float32) for name, t in model.ledger(c).items()}
    compiled = f.lower(shapes, jax.ShapeDtypeStruct((1, 8192), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e9


EVALUATE_LONG = """
import resource, sys
import jax, numpy as np
import test_model as t
from dataclasses import replace
c = replace(t.CONFIG, vocab_size=100278, padded_vocab_size=100352, n_layers=2, d_model=16, window=64)
execution = replace(t.DENSE, attention=t.partial(t.blockwise_attention, block=256), loss_chunk=512)
tokens = np.random.default_rng(0).integers(0, 100278, (1, 8192)).astype(np.int32)
def body(params, tokens):
    params, tokens = t.model.vary((params, tokens))
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": tokens >= 0, "segment_ids": None}
    total, _ = t.model.token_loss(params, batch, 1e-5, c, execution)
    return jax.lax.psum(total, t.model.AXES)
loss = t.on_mesh(body, (t.specs(c), t.BATCH), t.P())(jax.jit(lambda: t.model.init_params(c, 0))(), tokens)
print(float(loss) / 8192, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def test_long_evaluation_stays_small():
    """Catches memory that the plan does not show: one evaluation of 8192 tokens and 100352 rows, resident size."""
    env = {"PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu", "PATH": ""}
    code = "import conftest\n" + EVALUATE_LONG
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loss, resident = (float(x) for x in done.stdout.split())
    assert abs(loss - math.log(100278)) < 1.0
    assert resident < 6e9


# ------------------------------------------------------------------------------------------------------------- bf16


def test_bfloat16_is_close_to_float32():
    """Catches a norm, RoPE, softmax or loss that loses its fp32, and a dtype that does not fit inside the scan."""
    params, batch = random_params(CONFIG), random_batch(CONFIG, 2, 16)
    loss, ce, grads = loss_and_gradients(CONFIG, params, batch, BLOCKWISE)
    half = replace(CONFIG, compute_dtype="bfloat16")
    half_loss, half_ce, half_grads = loss_and_gradients(half, params, batch, BLOCKWISE)
    assert half_loss != loss and half_loss == pytest.approx(loss, rel=2e-3)
    assert np.abs(half_ce - ce).max() < 0.06
    for name, g in half_grads.items():
        assert g.dtype == np.float32
        cosine = np.vdot(g, grads[name]) / (np.linalg.norm(g) * np.linalg.norm(grads[name]))
        assert cosine > 0.998, (name, cosine)


def equations(jaxpr):
    """All equations of a jaxpr and of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_chosen_dtype(reduce):
    """Catches a reduce-scatter in bf16 (what plain autodiff of cast + gather does) and a gather of fp32 weights."""
    c = replace(CONFIG, compute_dtype="bfloat16", grad_reduce_dtype=reduce)
    batch = random_batch(c, 2, 16)
    del batch["segment_ids"]

    def body(params, batch):
        params, batch = model.vary((params, batch | {"segment_ids": None}))
        return jax.grad(lambda p: model.token_loss(p, batch, 1e-5, c, BLOCKWISE)[0])(params)

    in_specs = (specs(c), dict.fromkeys(batch, BATCH))
    f = jax.shard_map(body, mesh=make_mesh((1, 2, 1, 1)), in_specs=in_specs, out_specs=specs(c), check_vma=False)
    params = {name: jax.ShapeDtypeStruct(t.shape, jnp.float32) for name, t in model.ledger(c).items()}
    found = list(equations(jax.make_jaxpr(f)(params, batch).jaxpr))
    scatters = [e.invars[0].aval for e in found if e.primitive.name == "reduce_scatter"]
    gathers = [e.invars[0].aval for e in found if e.primitive.name == "all_gather"]
    assert len(scatters) == 2 + 7 * 2  # embed and lm_head; seven matrices of each of the two layers of the cycle
    assert {a.dtype.name for a in scatters} == {reduce}
    assert len(gathers) >= 16 and {a.dtype.name for a in gathers} == {"bfloat16"}


# ---------------------------------------------------------------------------------------------------- recomputation


@pytest.fixture(scope="module")
def one_device():
    """Reference without recomputation: 8 sequences of documents, one filtered, z-loss on, on one device."""
    c = replace(CONFIG, yarn=YARN_TINY)
    params, batch = random_params(c), random_batch(c, 8, 16, documents=True)
    return c, params, batch, loss_and_gradients(c, params, batch, DENSE)


@pytest.mark.parametrize("remat", [("x",), ("q", "k", "v", "heads_out", "attn_out", "gate0", "up1", "ffn_out")])
def test_remat_and_unroll_change_nothing(one_device, remat):
    """Catches an activation recomputed from something else than it was made from, and layers in another order."""
    c, params, batch, (loss, _, grads) = one_device
    execution = replace(BLOCKWISE, remat=remat, scan_unroll=2)
    got_loss, _, got = loss_and_gradients(c, params, batch, execution, shape=(1, 2, 1, 1))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert worst(got, grads)[0] < 1e-5, worst(got, grads)


# ---------------------------------------------------------------------------------------------------- training step

# Adam's eps is large here: with 1e-8 it would blow up rounding where a gradient element is itself of rounding size.
TINY = [
    *("model.vocab_size=97", "model.padded_vocab_size=104", "model.n_layers=4", "model.d_model=48", "model.n_heads=4"),
    *("model.n_kv_heads=2", "model.head_dim=14", "model.d_ff=80", "model.window=7", "model.pattern=sf"),
    *("model.init_std=0.08", "data.sequence_length=16", "data.global_batch=4", "optim.eps=1e-4", "optim.clip_norm=0.5"),
    *("optim.peak_lr=1e-3", "optim.weight_decay=0.1", "loss.z_loss=1e-3", "loss.filtered_in_divisor=true"),
    "schedule=[{until: null, kind: constant, warmup_steps: 0, total_steps: 1, final_fraction: 1.0}]",
    *("attention_block=8", "loss_chunk=13", "microbatch=4", "xla_flags.xla_backend_optimization_level=0"),
]


def tiny(*overrides):
    return load_config("quickstart.yaml", "cpu", [*TINY, *overrides])


def train_batch(c, seed, filtered=()):
    """A batch as data.py makes it; `filtered`: rows that the repetition filter masks."""
    batch = random_batch(c.model, c.data.global_batch, c.data.sequence_length, seed)
    mask = np.ones_like(batch["loss_mask"])
    mask[:, -1] = False
    mask[list(filtered)] = False
    batch["filtered"] = np.isin(np.arange(len(mask)), filtered)
    return batch | {"loss_mask": mask}


def run_steps(c, steps=3, filtered=(2,)):
    """(params, one metrics dict a step) of the compiled training step, as numpy; starts from random_params."""
    mesh = make_mesh()
    step = train.compile_train_step(c, mesh)
    params = random_params(c.model)
    state = (params, train.optimizer(c).init(jax.tree.map(jnp.asarray, params)))
    params, state = jax.device_put(state, shardings(mesh, train.state_specs(c)))
    log = []
    for k in range(1, steps + 1):
        batch = to_device(train_batch(c, k, filtered), mesh, c, c.data.global_batch)
        params, state, metrics = step(params, state, batch, jnp.int32(k))
        log.append(jax.tree.map(float, metrics))
    return jax.tree.map(np.asarray, params), log


def assert_same_run(a, b, tolerance=1e-5):
    for metrics, reference in zip(a[1], b[1], strict=True):
        assert metrics == pytest.approx(reference, rel=tolerance)
    assert worst(a[0], b[0])[0] < tolerance, worst(a[0], b[0])


@pytest.fixture(scope="module")
def reference_run():
    return run_steps(tiny())


@pytest.mark.parametrize("size", [1, 2])
def test_accumulation_changes_nothing(reference_run, size):
    """Catches micro-batches divided by their own counts (one of the four instances is filtered, so counts differ),
    gradients averaged instead of added, and metrics of the last micro-batch alone.
    """
    assert reference_run[1][0]["grad_norm"] > 0.5  # clipping is active
    assert_same_run(run_steps(tiny(f"microbatch={size}")), reference_run)


def test_step_metrics_against_plain_sums():
    """Catches a divisor that is not what loss.filtered_in_divisor says: labels, plus S per filtered instance if true;
    also a gradient norm that is not the norm of the gradients of the loss that is divided so.
    """
    for flag, divisor in (("true", 2 * 15 + 2 * 16), ("false", 2 * 15)):
        c = tiny(f"loss.filtered_in_divisor={flag}")
        params = random_params(c.model)
        batch = train_batch(c, 1, filtered=(0, 3))
        loss, ce, grads = loss_and_gradients(
            c.model, params, {k: v for k, v in batch.items() if k != "filtered"}, DENSE, divisor
        )
        _, (metrics,) = run_steps(c, steps=1, filtered=(0, 3))
        assert (metrics["labels"], metrics["filtered"]) == (30, 2)
        assert metrics["ce"] == pytest.approx(ce[batch["loss_mask"]].sum() / divisor, rel=1e-5)
        total = metrics["ce"] + c.loss.z_loss * metrics["z_unscaled"]
        assert total == pytest.approx(float(loss), rel=1e-5)
        norm = math.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_everything_filtered():
    """Catches 0/0: a batch whose instances are all filtered has loss 0, zero gradients and no NaN; the parameters
    move by weight decay alone.
    """
    c = tiny("loss.filtered_in_divisor=false", "optim.peak_lr=0.1")
    start = random_params(c.model)
    params, (metrics,) = run_steps(c, steps=1, filtered=(0, 1, 2, 3))
    assert metrics["ce"] == 0 and metrics["z_unscaled"] == 0 and metrics["grad_norm"] == 0
    assert metrics["labels"] == 0 and metrics["filtered"] == 4 and metrics["first_nonfinite_gradient"] == -1
    for name, t in model.ledger(c.model).items():
        np.testing.assert_allclose(params[name], start[name] * (0.99 if t.decay else 1.0), rtol=1e-6, err_msg=name)


def test_token_mean_of_unequal_micro_batches():
    """Catches the mean of means: 100 tokens at loss 1.0 and 10 at loss 3.0 are 130/110 = 1.181818, not 2.0."""
    c = tiny("data.sequence_length=110", "data.global_batch=2", "microbatch=1")
    D, V = c.model.d_model, c.model.vocab_size
    params = {name: np.zeros(t.shape, np.float32) for name, t in model.ledger(c.model).items()}
    params["final_norm"][:] = 1
    # All layers add nothing, so a token's logits are its embedding's row, normed, times the head: all 0 but one, x,
    # where CE = log(e^x + V - 1) - x = wanted  <=>  x = log((V - 1) / (e^wanted - 1)).
    batch = {"segment_ids": None, "loss_mask": np.zeros((2, 110), bool)}
    for row, (count, wanted) in enumerate(((100, 1.0), (10, 3.0))):
        params["embed"][row, row] = 10.0
        params["lm_head"][50 + row, row] = math.log((V - 1) / (math.exp(wanted) - 1)) / math.sqrt(D)
        batch["loss_mask"][row, :count] = True
    rows = np.array([[0], [1]], np.int32).repeat(110, 1)
    batch |= {"tokens": rows, "labels": 50 + rows}

    results = []
    for size in (1, 2):
        body = partial(train.gradients, config=c, execution=DENSE, microbatch=size)
        f = on_mesh(
            lambda p, b, body=body: (lambda g, s: (g, lax.psum(s, model.AXES)))(*body(p, b, jnp.float32(110))),
            (specs(c.model), {k: None if v is None else BATCH for k, v in batch.items()}),
            (specs(c.model), P()),
        )
        grads, sums = jax.tree.map(np.asarray, f(params, batch))
        assert sums[0] / 110 == pytest.approx(130 / 110, rel=1e-5)
        results.append(grads)
    assert max(np.abs(g).max() for g in results[0].values()) > 1e-3
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5, atol=1e-7, err_msg=name)


# ----------------------------------------------------------------------------------------------------- copied out


def docstring_example() -> str:
    """The program in model.py's docstring: from its first import to the next line that is not indented."""
    lines = model.__doc__.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("    import ")))
    last = next(i for i in range(first, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return textwrap.dedent("\n".join(lines[first:last]))


def run_copied_out(folder: Path, program: str, sources: tuple[str, ...], devices: int) -> None:
    """Run `program` in a folder that holds these source files alone, with so many CPU devices."""
    for name in sources:
        shutil.copy(Path(model.__file__).with_name(name), folder)
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PATH": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_docstring_example_trains_the_same_on_one_device(tmp_path):
    """Catches an example that no longer runs, a model.py or optim.py that cannot be copied out, and gradients that the
    example's mesh makes wrong: a division or a vary() left out of it. Moments tell more than parameters: the first
    update of Adam is little more than a sign."""
    keep = "\nimport numpy as np\nnp.savez('{}', loss=loss, **{{f'p_{{k}}': v for k, v in params.items()}}, "
    keep += "**{{f'm_{{k}}': v for k, v in opt_state.mu.items()}})"
    program, results = docstring_example(), []
    on_two, on_one = "make_mesh((1, 1, 1, 2)", "make_mesh((1, 1, 1, 1)"
    assert program.count(on_two) == 1
    for devices, text in ((2, program), (1, program.replace(on_two, on_one))):
        run_copied_out(tmp_path, text + keep.format(f"{devices}.npz"), ("model.py", "optim.py"), devices)
        results.append(dict(np.load(tmp_path / f"{devices}.npz")))
    two, one = results
    assert two.keys() == one.keys() and 4 < one["loss"] < 5  # log(97) = 4.57: a model that knows nothing yet
    assert difference(two["loss"], one["loss"]) < 1e-6
    start = model.init_params(replace(CONFIG, head_dim=12, pattern="sssf", init_std=0.02), 0)
    for name in start:
        moment = one[f"m_{name}"]
        assert difference(two[f"m_{name}"], moment) < 1e-5, name
        # Adam divides by the gradient's own size, so an element of rounding size moves by rounding alone.
        clear = np.abs(moment) > 1e-3 * np.abs(moment).max()
        assert difference(two[f"p_{name}"][clear], one[f"p_{name}"][clear]) < 1e-6, name
    assert np.abs(one["p_wq"] - start["wq"]).max() > 5e-4  # the step moved it, by the learning rate of 1e-3 at most


def test_what_is_masked_contributes_nothing():
    """A user's words that are learnt after all: other labels where the mask is 0, and other tokens where nobody looks."""
    batch = random_batch(CONFIG, 3, 20)
    other = {name: None if x is None else x.copy() for name, x in batch.items()}
    other["labels"][~batch["loss_mask"]] = 7
    other["tokens"][:, -1] = 7  # only the last position sees the last token, and it has no label
    other["tokens"][1] = 7  # a row without any
    params = random_params(CONFIG)
    (loss, _, grads), (loss2, _, grads2) = (loss_and_gradients(CONFIG, params, b, BLOCKWISE) for b in (batch, other))
    assert loss == loss2
    for name in grads:
        np.testing.assert_array_equal(grads[name], grads2[name], err_msg=name)
