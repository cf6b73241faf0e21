"""experiments/: each against one device on every mesh, against a plain rendering of its equations, and resumed exactly."""

import signal
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plan
import pytest
import sharding
from harness import REPO, assert_same_run, board, refused, rows, use_devices
from jax.sharding import PartitionSpec as P

import model
from config import architecture, experiment, load_config, make_execution
from heldout import row_losses
from metrics import flops_per_token

FILES = sorted((REPO / "experiments").glob("*.py"))
latent_moe, mtp = map(experiment, ("latent_moe", "mtp"))
TOLERANCE = 3e-5  # as in test_sharding.py; measured: 5.8e-6
SEEN = 1e-3
CASES = sharding.cases("""
    1 2 2 2; 2 2 2 1; 1 2 1 4; 1 1 8 1; 1 8 1 1  mtp, block 2, micro 2, remat; latent_moe, block 2, micro 2, remat
""")
MORE_CASES = sharding.cases("""
    2 1 2 2; 2 2 1 2; 2 1 1 1; 1 2 1 1; 1 1 4 1; 1 1 1 2  mtp, dense, micro 1, unchecked; latent_moe, dense, micro 1, unchecked
    1 2 2 2; 2 1 4 1  mtp, bare, block 4; latent_moe, bare, block 4; mtp, other, dense; latent_moe, other, dense
    1 2 2 1  mtp, all filtered, dense; latent_moe, all filtered, dense
""")


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_gradients_equal_one_device(case):
    """Catches a sum over devices that is missing or doubled in what an experiment adds: the tokens of the neighbour, the
    exchange with the experts, the balance of a whole row, the partial sums along tensor."""
    row = sharding.compare(case, measures=(sharding.gradients,))
    assert sharding.largest(row) < TOLERANCE, row


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_everything_equals_one_device(case):
    """The rest of the grid, with three steps of the optimizer."""
    row = sharding.compare(case)
    assert sharding.largest(row) < TOLERANCE, row


BREAKS = [
    ("mtp", 'lax.ppermute(first_B1, "context", to_the_left)', "jnp.zeros_like(first_B1)", "1 1 8 1"),
    ("mtp", "counts_BS = counts_BS * later_BS", "pass", "1 1 8 1"),
    ("latent_moe", 'vary(lax.psum(sum_NU.astype(x_ND.dtype), "tensor"))', "sum_NU.astype(x_ND.dtype)", "1 2 2 2"),
    ("latent_moe", 'vary(lax.psum((chosen_BX, probs_BX), "context"))', "chosen_BX, probs_BX", "1 2 2 2"),
    ("latent_moe", 'lax.all_to_all(sent_XYU, "fsdp", 0, 1, tiled=True)',
     'sent_XYU.reshape(w["expert_gate"].shape[0], -1, config.d_latent)', "1 2 2 2"),
    ("latent_moe", "Z = N // config.group", "config = dataclasses.replace(config, group=N); Z, Q = 1, Q * (N // 2)", "1 1 8 1"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new", "mesh"), BREAKS, ids=lambda x: str(x)[:40])
def test_break_is_seen(monkeypatch, name, old, new, mesh):
    """Catches a comparison with one device that would not notice, or that compares a file with itself."""
    (case,) = sharding.cases(f"{mesh}  {name}, dense, unchecked")
    if old.startswith("counts"):  # wrong on every mesh alike: compared with the file as it is
        (case,) = sharding.cases(f"1 1 1 1  {name}, dense, unchecked")
    sharding.reference(sharding.gradients, (name,))
    source = (REPO / "experiments" / f"{name}.py").read_text()
    assert source.count(old) == 1
    broken = types.ModuleType(f"experiments.{name}")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(compile("import dataclasses\n" + source.replace(old, new), f"broken {name}", "exec"), broken.__dict__)
    row = sharding.compare(case, measures=(sharding.gradients,))
    assert sharding.largest(row) > SEEN, row


# ------------------------------------------------------------------------------------------ the equations, written plainly


def on_one_device(function, config, *args):
    """function(*args, config, execution) inside a shard_map of one device, as numpy."""
    mesh = sharding.make_mesh((1, 1, 1, 1))
    body = partial(function, config=config.model, execution=make_execution(config, 8, "cpu"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(),) * len(args), out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*args))


def loss_of(word: str, *overrides: str, batch=None):
    """(config, parameters, batch, (total, TokenLoss)) of a tiny experiment on one device."""
    (case,) = sharding.cases(f"1 1 1 1  {word}, dense")
    c = sharding.make_config(case, *overrides)
    params, batch = sharding.random_params(c), batch or sharding.make_batch(case, c, 1)
    on_device = {k: jnp.asarray(x) for k, x in batch.items() if k not in ("filtered", "instance")}
    loss = on_one_device(partial(architecture(c).token_loss, z_loss=0.0), c, params, on_device)
    return c, params, batch, loss


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms_norm(x, weight, eps=1e-6):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def silu(x):
    return x / (1 + np.exp(-x))


def test_mtp_is_its_equations():
    """Catches a token or label that is one off, a mask that counts what has no label, depths in the wrong order, a missing
    norm; a weight or mean that is not the docstring's."""
    (case,) = sharding.cases("1 1 1 1  mtp")
    batch = sharding.make_batch(case, sharding.make_config(case), 1)
    batch["loss_mask"] &= (
        np.random.default_rng(0).random(batch["loss_mask"].shape) < 0.8
    )  # not at the ends of rows alone
    c, params, batch, (total, loss) = loss_of("mtp", batch=batch)
    tokens, mask, segments = batch["tokens"], batch["loss_mask"], batch["segment_ids"]
    B, S = tokens.shape
    labels_of = np.concatenate([tokens, np.zeros_like(tokens)], axis=1)  # t_i, 0 behind the end
    mask_of = np.concatenate([mask, np.zeros_like(mask)], axis=1)

    def trunk(params, tokens, segments, config, execution):
        return model.hidden_states(params, tokens, segments, config, execution)

    def block(x_ND, w, segments, config, execution):
        rope, where = model.geometry(config, jnp.arange(S), segments, execution)["f"]
        return model.layer(x_ND, w, rope, where, config, execution)

    h = on_one_device(trunk, c, params, tokens, segments)
    mean, weighted = np.zeros((B, S)), 0.0
    for k in (1, 2):
        w = {
            name: params[f"mtp_{name}"][k - 1]
            for name in (*model.LAYER_TENSORS, "project", "hidden_norm", "embed_norm")
        }
        embedded = params["embed"][labels_of[:, k : k + S].reshape(-1)]
        pair = np.concatenate([rms_norm(h, w["hidden_norm"]), rms_norm(embedded, w["embed_norm"])], axis=1)
        layer_w = {name: w[name] for name in model.LAYER_TENSORS}
        h = on_one_device(block, c, (pair @ w["project"].T).astype(np.float32), layer_w, segments)
        logits = (rms_norm(h, params["mtp_final_norm"][k - 1]) @ params["lm_head"].T)[:, : c.model.vocab_size]
        ce = -np.log(softmax(logits)[np.arange(B * S), labels_of[:, k + 1 : k + 1 + S].reshape(-1)]).reshape(B, S)
        counts = np.all([mask_of[:, j : j + S] for j in range(k + 1)], axis=0)
        mean += np.where(counts, ce, 0) / 2
        weighted += 0.4 * ce[counts].sum() / 2
    np.testing.assert_allclose(loss.mtp_ce_N, mean, rtol=2e-4, atol=2e-4)
    assert total == pytest.approx(loss.ce_N[mask].sum() + weighted, rel=1e-5)
    assert 0 < (loss.mtp_ce_N != 0).sum() < mask.sum() - 2 * B


def test_without_weight_mtp_is_the_model_alone():
    """Catches an experiment that changes the next-token loss or its gradients, by which all are compared."""
    (case,) = sharding.cases("1 1 2 1  dense")
    base = sharding.gradients(case)
    mtp_case = case._replace(words=("mtp", "dense"))
    c = sharding.make_config(mtp_case, "model.mtp_weight=0.0")
    alone = sharding.make_config(case)
    ours = sharding.gradients(mtp_case, config=c)
    assert ours["CE"] == pytest.approx(base["CE"], rel=1e-6)
    for name in model.ledger(alone.model):
        assert sharding.difference(ours["gradients"][name], base["gradients"][name]) < TOLERANCE, name
    assert all(np.all(x == 0) for name, x in ours["gradients"].items() if name.startswith("mtp_"))


def routed_plainly(x, w, config):
    """Dense: every expert computes every token; a loop gives out the places. (routed part, dropped [N], probabilities)."""
    X, J, Q = config.n_experts, config.top_k, config.places
    probs = softmax(x @ w["w_router"])
    latent = x @ w["w_latent_in"]
    of_expert = [
        (silu(latent @ w["expert_gate"][e]) * (latent @ w["expert_up"][e])) @ w["expert_down"][e].T for e in range(X)
    ]
    result, dropped, taken = np.zeros_like(latent), np.zeros(len(x)), {}
    for n in range(len(x)):
        best = np.argsort(-probs[n], kind="stable")[:J]
        for e in best:
            taken[n // config.group, e] = taken.get((n // config.group, e), 0) + 1
            if taken[n // config.group, e] <= Q:
                result[n] += probs[n, e] / probs[n, best].sum() * of_expert[e][n]
            else:
                dropped[n] += 1 / J
    return result @ w["w_latent_out"].T, dropped, probs


@pytest.mark.parametrize("capacity", [0.4, 1.0, 8 / 3])
def test_routing_equals_the_dense_reference(capacity):
    """Catches tokens that reach another expert, weights of another choice, a place given twice, a token dropped although
    there is room, or kept although there is none; a dropless setting that drops."""
    (case,) = sharding.cases("1 1 1 1  latent_moe, dense")
    c = sharding.make_config(case, f"model.capacity={capacity}", "model.group=8")
    table = latent_moe.ledger(c.model)
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal(table[name].shape[1:], np.float32) * np.float32(0.3) for name in latent_moe.OWN}
    x = rng.standard_normal((32, c.model.d_model), np.float32)
    x[8:16] = x[8] + 0.1 * x[8:16]  # a group in which all want the same experts

    def routed(x, w, config, execution):
        routes = latent_moe.route(x, w["w_router"], config)
        return latent_moe.experts(x, w, routes, config, 0), routes

    got, routes = on_one_device(routed, c, x, w)
    expected, dropped, probs = routed_plainly(x.astype(np.float64), w, c.model)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(np.mean(~routes.fits_NJ, axis=1), dropped, atol=1e-6)
    np.testing.assert_allclose(routes.probs_NX, probs, rtol=1e-4)
    places = routes.place_NJ[routes.fits_NJ]
    assert len(set(places.tolist())) == len(places)
    assert (dropped.sum() == 0) == (capacity > 2)


def test_balance_loss():
    """Catches a balance that is not 1 where all experts get the same, one that is mixed into CE or weighted otherwise than
    the docstring says, and one that filtered rows or the ends of context shards change."""
    c, _, batch, (total, loss) = loss_of("latent_moe")
    *_, (bare_total, bare) = loss_of("latent_moe", "model.balance_weight=0.0")
    mask = batch["loss_mask"]
    np.testing.assert_array_equal(loss.ce_N, bare.ce_N)
    assert bare_total == pytest.approx(bare.ce_N[mask].sum(), rel=1e-6)
    assert total - bare_total == pytest.approx(0.05 * c.model.n_layers * loss.balance_N[mask].sum(), rel=1e-3)
    assert np.all(loss.balance_N == loss.balance_N[:, :1]) and np.all(loss.balance_N > 0.9)
    # Uniform probabilities, whatever is chosen: 1. All tokens certain of the same k: X / k.
    X, J = c.model.n_experts, c.model.top_k
    chosen = np.broadcast_to(np.arange(X) < J, (2 * 16, X))
    for probs, expected in ((np.full((32, X), 1 / X, np.float32), 1.0), (chosen.astype(np.float32) / J, X / J)):
        routes = latent_moe.Routes(None, None, None, jnp.asarray(chosen), jnp.asarray(probs))
        of_rows = on_one_device(lambda config, execution, r=routes: latent_moe.balance(r, 16, config), c)
        np.testing.assert_allclose(of_rows, [expected] * 2, rtol=1e-6)


@pytest.mark.parametrize("word", ["mtp", "latent_moe"])
def test_the_next_token_is_not_seen(word):
    """Catches a leak from the future into the loss that is evaluated: through the tokens that MTP reads ahead, or through
    places in an expert's queue that later tokens take away."""
    c, _, batch, (_, loss) = loss_of(word, "data.document_mask=false")
    tokens = batch["tokens"].copy()
    tokens[:, 9:] = (tokens[:, 9:] + 5) % 90
    changed = batch | {"tokens": tokens, "labels": np.roll(tokens, -1, axis=1)}
    *_, (_, other) = loss_of(word, "data.document_mask=false", batch=changed)
    np.testing.assert_allclose(other.ce_N[:, :8], loss.ce_N[:, :8], rtol=1e-5)
    assert not np.allclose(other.ce_N[:, 9:15], loss.ce_N[:, 9:15], rtol=1e-2)


def test_held_out_loss_is_the_experiments_own():
    """Catches a held-out loss by model.py's layers: of LatentMoE's parameters they read the shared expert alone."""
    c, params, batch, (_, loss) = loss_of("latent_moe")
    piece = {k: jnp.asarray(x) for k, x in batch.items() if k not in ("filtered", "instance")}

    def evaluated(params, piece, config, execution):
        return row_losses(params, piece, c, execution)

    ce, _ = on_one_device(evaluated, c, params, piece)
    np.testing.assert_allclose(ce, np.where(batch["loss_mask"], loss.ce_N, 0).sum(axis=1), rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- as runs, as plans

TINY = {
    "mtp": ("model.module=mtp", "model.mtp_depth=1", "model.mtp_weight=0.1"),
    "latent_moe": ("model.module=latent_moe", "model.n_experts=4", "model.top_k=2", "model.d_latent=16", "model.d_expert=24",
                   "model.group=8", "model.capacity=1.25", "model.balance_weight=0.01"),
}  # fmt: skip
LOGGED = {"mtp": ["train/mtp_ce"], "latent_moe": ["train/balance", "train/dropped"]}


@pytest.mark.parametrize("name", TINY)
def test_killed_run_continues_to_the_bit(house, tmp_path, name):
    """Catches parameters of an experiment that a checkpoint leaves out, and a loss of its own that is not logged, or twice;
    a held-out loss that is not the next token's."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    house.run(straight, *TINY[name])
    process = house.start(killed, *TINY[name], hook=("save", 8, signal.SIGKILL))
    _, err = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, err
    house.run(killed, *TINY[name])
    assert_same_run(killed, straight)
    shown, steps = board(straight), [row for row in rows(straight) if "train/CE loss" in row]
    for tag in LOGGED[name]:
        assert shown[tag] == list(range(1, len(steps) + 1))
        assert all(np.isfinite(row[tag]) for row in steps)
    assert steps[-1]["train/CE loss"] < steps[0]["train/CE loss"]
    held_out = [row["eval/lm/all/CE loss"] for row in rows(straight) if "eval/lm/all/CE loss" in row]
    assert abs(held_out[-1] - steps[-1]["train/CE loss"]) < 0.5


def test_wrong_experiments_are_one_line(house, tmp_path, monkeypatch, capsys):
    """Catches a traceback, or a silent start with another model than was meant."""
    use_devices(monkeypatch, 1)
    argv = partial(house.argv, tmp_path)
    assert "latent_moe, mtp" in refused(capsys, argv("model.module=mpt"))
    assert "model.n_experts: unknown key" in refused(capsys, argv(*TINY["mtp"], "model.n_experts=4"))
    assert "model.mtp_depth: missing" in refused(capsys, argv("model.module=mtp"))
    assert "mtp_depth" in refused(capsys, argv("model.mtp_depth=1"))
    assert "model.group: got 7" in refused(capsys, argv(*TINY["latent_moe"], "model.group=7"))
    assert "n_experts" in refused(capsys, argv(*TINY["latent_moe"], "model.n_experts=0"))


def test_what_knows_model_py_alone_says_so(house):
    """Catches a sample of the shared expert alone."""
    from checkpoint import Opened
    from sample import Sampler

    c = load_config(str(house.config), "cpu", list(TINY["latent_moe"]))
    with pytest.raises(ValueError, match="model.module: got latent_moe"):
        Sampler(Opened(None, {}, c, sharding.make_mesh((1, 1, 1, 1)), None))
    c = load_config(str(house.config), "cpu", list(TINY["mtp"]))
    Sampler(Opened(None, {}, c, sharding.make_mesh((1, 1, 1, 1)), None))


def test_all_to_all_is_counted():
    """Catches a plan that leaves the exchange out, or counts it other than by hand: two each way and layer."""
    (case,) = sharding.cases("1 4 1 1  latent_moe, dense, micro 1, remat")
    c = sharding.make_config(case)
    found = [one for one in plan.collectives(c, 4) if one.kind == "all-to-all"]
    m, tokens = c.model, 2 * 16  # of a device, in two micro-batches
    operand = m.n_experts * (tokens // 2 // m.group * m.places) * m.d_latent * 4
    by_phase = {
        phase: sum(one.times for one in found if one.phase == phase) for phase in ("forward", "recomputed", "backward")
    }
    assert by_phase["forward"] == by_phase["backward"] == 2 * 2 * m.n_layers
    assert 0 < by_phase["recomputed"] <= by_phase["forward"]
    assert {one.sent for one in found} == {operand * 3 // 4} and {one.axes for one in found} == {(("fsdp", 4),)}
    assert {one.where for one in found} == {"experts in layer"}


def test_flops():
    """Catches experts that count although no token of theirs is computed, and a second use of the head that does not."""
    base = load_config("quickstart.yaml", "cpu", [])
    m, S = base.model, base.data.sequence_length
    of = {name: load_config(str(REPO / f"experiments/{name}.yaml"), "cpu", []) for name in ("mtp", "latent_moe")}
    count = {name: flops_per_token(c, "full causal") for name, c in (of | {"base": base}).items()}
    A = m.n_heads * m.head_dim
    layer = 6 * (4 * m.d_model * A + 3 * m.d_model * m.d_ff) + 12 * A * S / 2
    assert count["mtp"] - count["base"] == layer + 6 * (2 * m.d_model**2 + m.vocab_size * m.d_model)
    x = of["latent_moe"].model
    feed_forward = 3 * m.d_model * x.d_ff + m.d_model * (x.n_experts + 2 * x.d_latent)
    feed_forward += x.top_k * 3 * x.d_latent * x.d_expert
    assert count["latent_moe"] - count["base"] == 6 * m.n_layers * (feed_forward - 3 * m.d_model * m.d_ff)
    assert count["latent_moe"] == pytest.approx(count["base"], rel=0.02)  # as its recipe promises


def test_the_promise():
    """Catches an experiment that nobody would copy, and one that has grown into the files that it is built on."""
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 250, path
        for name in ("model", "optim", "data", "train", "metrics", "checkpoint"):
            assert path.stem not in (REPO / f"{name}.py").read_text(), (path, name)
    assert {path.stem for path in FILES} >= {"latent_moe", "mtp"} and mtp.layer is model.layer
