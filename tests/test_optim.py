"""optim.py: schedules at their edges, checks, skipped steps, dtypes, masks, shards.

tests/test_reference.py compares learning rates, the skip rule and the update with OLMo-core's own code.
"""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optim
from optim import (
    OptimConfig,
    SchedulePiece,
    check_schedule,
    clip_coefficient,
    learning_rate,
    skip_step_adamw,
)

CONFIG = OptimConfig(
    peak_lr=3e-4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    clip_norm=1.0,
    skip_window=128,
    skip_sigma=6.0,
    max_nonfinite_steps=10,
)
STAGE2_PEAK = 0.00020712352850360292
CASE_STUDY = (SchedulePiece(None, "cosine", 2000, 1_414_078, 0.1),)
AI2_STAGE1 = (
    SchedulePiece(597_046, "cosine", 2000, 1_192_093, 0.1),
    SchedulePiece(None, "half_cosine", 597_046, 1_668_931, 0.1),
)
STAGE2 = (SchedulePiece(None, "linear", 0, 47_684, 0.0),)
WARM_SCHEDULE = (SchedulePiece(None, "linear", 10, 500, 0.1),)
CONSTANT = (SchedulePiece(None, "constant", 0, 1, 1.0),)

MASK = {"embed": False, "layer": {"norm": True, "wq": True}}


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(0, 0.02, (97, 48)), jnp.float32),
        "layer": {"norm": jnp.ones(48), "wq": jnp.asarray(rng.normal(0, 0.02, (3, 48, 12)), jnp.float32)},
    }


def make_grads(step, scale=1e-2):
    rng = np.random.default_rng(1000 + step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0, scale, p.shape), jnp.float32), make_params())


def global_norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def make_step(config=CONFIG, schedule=CONSTANT, mask=MASK, jit=True):
    tx = skip_step_adamw(config, schedule, mask)

    def step_fn(params, state, grads, loss, grad_norm, step):
        updates, state = tx.update(grads, state, params, loss=loss, grad_norm=grad_norm, step=step)
        return optax.apply_updates(params, updates), state

    return tx, jax.jit(step_fn) if jit else step_fn


def series(steps, seed=0):
    """A healthy run: losses near 2.5 and norms near 0.3, f32[steps], index 0 unused so that series[k] is step k."""
    rng = np.random.default_rng(seed)
    losses, norms = rng.normal(2.5, 0.05, steps + 1), rng.normal(0.3, 0.02, steps + 1)
    return losses.astype(np.float32), norms.astype(np.float32)


def run(step_fn, params, state, losses, norms, steps, grads_of=make_grads):
    """Updates for each step in `steps`. Returns params, state and the list of skipped steps."""
    skipped = []
    for k in steps:
        args = grads_of(k), jnp.float32(losses[k]), jnp.float32(norms[k]), jnp.int32(k)
        params, state = step_fn(params, state, *args)
        if state.skipped:
            skipped.append(k)
    return params, state, skipped


def assert_same_bits(a, b):
    """Equal as bit patterns, so that -0.0 is not 0.0 and a NaN is itself."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


# ------------------------------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("schedule", "peak", "step", "expected", "rel"),
    [
        (CASE_STUDY, 3e-4, 1, 1.5e-7, 1e-12),
        (CASE_STUDY, 3e-4, 2000, 3e-4, 1e-12),
        (CASE_STUDY, 3e-4, 597_046, 1.979988e-4, 1e-6),
        (CASE_STUDY, 3e-4, 1_414_078, 3e-5, 1e-12),
        (AI2_STAGE1, 3e-4, 476_838, STAGE2_PEAK, 1e-15),  # stage 2 starts from this value
        (AI2_STAGE1, 3e-4, 597_046, 1.6500018e-4, 1e-7),
        (AI2_STAGE1, 3e-4, 1_413_814, 3.932527e-5, 1e-6),
        (STAGE2, STAGE2_PEAK, 1, 2.07119185e-4, 1e-8),
        (STAGE2, STAGE2_PEAK, 47_684, 0.0, 0),
    ],
)
def test_learning_rate_of_published_steps(schedule, peak, step, expected, rel):
    """Fault: a curve one step late (first update with rate 0), a piece in the wrong place, a floor of peak instead."""
    lr = learning_rate(replace(CONFIG, peak_lr=peak), schedule, step)
    assert isinstance(lr, float)
    assert lr == pytest.approx(expected, rel=rel, abs=0)


@pytest.mark.parametrize(
    ("kind", "top", "middle", "end"),
    [("cosine", 1.0, 0.55, 0.1), ("half_cosine", 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1),
     ("linear", 1.0, 0.55, 0.1), ("constant", 1.0, 1.0, 1.0)],
)  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 1, 8])
def test_a_curve_at_its_edges(kind, top, middle, end, warmup):
    """Fault: a warm-up of 0 or 1 that divides by 0, its last step or the last of the curve off by one, a curve that
    goes on past its end, a half cosine that starts from the peak. Rates are in units of the peak."""
    piece, total = SchedulePiece(None, kind, warmup, warmup + 60, end), warmup + 60
    steps = np.array([max(warmup, 1), warmup + 30, total, total + 1, total + 99])
    expected = np.array([top, middle, end, end, end])
    if warmup == 0:
        steps, expected = steps[1:], expected[1:]
    np.testing.assert_allclose(learning_rate(replace(CONFIG, peak_lr=1.0), (piece,), steps), expected, rtol=1e-14)
    if warmup > 1:
        assert learning_rate(replace(CONFIG, peak_lr=1.0), (piece,), warmup - 1) == pytest.approx(top * 7 / 8)


def test_traced_fp32_learning_rate_at_every_step():
    """Fault: cancellation in fp32 (1 + cos near the end, step/total as a rounded fraction). A cosine that ends at 0 is
    the hardest: 4.6e-7 measured."""
    schedule = (replace(CASE_STUDY[0], final_fraction=0.0),)
    steps = np.arange(1, schedule[-1].total_steps + 50)
    exact = learning_rate(CONFIG, schedule, steps)
    traced = np.asarray(jax.jit(lambda s: learning_rate(CONFIG, schedule, s))(jnp.asarray(steps, jnp.int32)))
    assert exact.dtype == np.float64 and traced.dtype == np.float32
    assert np.all(np.abs(traced - exact) <= 5e-7 * exact)  # and so exactly 0 where the rate is 0


def test_pieces_change_over_at_until():
    """Fault: the second piece ruling one step early or late, or its warm-up counted from its own start."""
    first, second = SchedulePiece(10, "cosine", 4, 30, 0.1), SchedulePiece(None, "linear", 20, 50, 0.0)
    for step in (1, 9, 10, 11, 19, 20, 21, 50):
        alone = second if step > 10 else replace(first, until=None)
        for as_type in (int, jnp.int32):
            at = as_type(step)
            assert learning_rate(CONFIG, (first, second), at) == learning_rate(CONFIG, (alone,), at)


def test_learning_rate_refuses_what_is_not_a_step():
    """Fault: a step counted from 0, or a float that was rounded on the way."""
    for step in (0, np.arange(3), 1.0, jnp.float32(3)):
        with pytest.raises(ValueError, match="^step: got .*, expected "):
            learning_rate(CONFIG, CASE_STUDY, step)


# ------------------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peak_lr", 0.0),
        ("peak_lr", "1e-4"),
        ("peak_lr", math.nan),
        ("clip_norm", True),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("clip_norm", 0.0),
        ("skip_window", 1),
        ("skip_window", 128.0),
        ("skip_window", 2**31),
        ("skip_sigma", math.inf),
        ("max_nonfinite_steps", 0),
    ],
)
def test_optim_config_refuses(key, value):
    """Fault: a value that trains silently wrong, such as text that YAML made of 1e-4."""
    with pytest.raises(ValueError, match=f"^optim.{key}: got .*, expected "):
        replace(CONFIG, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("until", 0),
        ("kind", "cosin"),
        ("warmup_steps", -1),
        ("warmup_steps", 50),  # = total_steps: the curve would have no length
        ("total_steps", 0),
        ("total_steps", 1.4e6),
        ("total_steps", "50"),
        ("final_fraction", 1.5),
    ],
)
def test_schedule_piece_refuses(key, value):
    """Fault: an unknown kind or an empty curve (0/0) that shows only in the loss."""
    with pytest.raises(ValueError, match=f"^schedule.{key}: got .*, expected "):
        replace(SchedulePiece(None, "cosine", 5, 50, 0.1), **{key: value})


def test_constant_piece_refuses_a_final_fraction_it_would_ignore():
    """Fault: a config that promises a decay which never comes."""
    with pytest.raises(ValueError, match="final_fraction"):
        SchedulePiece(None, "constant", 5, 50, 0.1)


@pytest.mark.parametrize("untils", [(), (10,), (None, None), (20, 10, None), (10, 10, None), (10, 20)])
def test_schedule_must_cover_every_step_once(untils):
    """Fault: a gap, an overlap or an end in the list of pieces."""
    pieces = tuple(SchedulePiece(until, "cosine", 5, 50, 0.1) for until in untils)
    with pytest.raises(ValueError, match="^schedule: until.*got .*, expected "):
        check_schedule(pieces)
    check_schedule(tuple(SchedulePiece(until, "cosine", 5, 50, 0.1) for until in (10, 20, None)))


# ----------------------------------------------------------------------------------------------------------- skip rule


def skipped_steps(losses, norms, n):
    """Steps (from 1) that the optimizer skips with a window of n."""
    tx = skip_step_adamw(replace(CONFIG, skip_window=n), CONSTANT, {"w": True})
    params = {"w": jnp.ones(3)}

    def body(state, values):
        step, loss, norm = values
        _, state = tx.update(params, state, params, loss=loss, grad_norm=norm, step=step)
        return state, state.skipped

    skipped = jax.jit(lambda *trace: jax.lax.scan(body, tx.init(params), trace)[1])
    return (np.flatnonzero(skipped(jnp.arange(1, len(losses) + 1), losses, norms)) + 1).tolist()


@pytest.mark.parametrize(("n", "first"), [(2, 2), (5, 2), (6, 3), (7, 3), (20, 10), (128, 64)])
def test_first_step_that_can_be_skipped(n, first):
    """Fault: the history of max(2, n // 2) counted without the current value, or with one value too few. Windows below
    6 judge step 2 by one value, which has no deviation: OLMo-core skips that step whatever its value is."""
    always = [2] if n < 6 else []
    for at in (first - 1, first, first + 1):
        for which in (0, 1):
            trace = [values[1:].copy() for values in series(first + 1)]
            trace[which][at - 1] += 1000
            assert skipped_steps(*trace, n) == sorted({*always, *([at] if at >= first else [])}), (at, which)


def test_old_values_leave_a_short_window():
    """Fault: an eviction that is off by one. A huge early value hides a spike while it is among the 6 before it."""
    for at, expected in ((8, []), (9, [9])):
        losses, norms = (values[1:] for values in series(20))
        losses[1] = 1000.0  # step 2, before any is judged: among the 6 before step 8, not among those before step 9
        losses[at - 1] += 5.0
        assert skipped_steps(losses, norms, 6) == expected


# -------------------------------------------------------------------------------------------------------------- update


def test_clipping_uses_the_global_norm():
    """Fault: each shard clipped by its own norm: [3, 0] and [4, 0] would become [1, 0] and [1, 0]."""
    tx = skip_step_adamw(CONFIG, CONSTANT, {"w": True})
    halves = []
    for grads in (jnp.array([3.0, 0.0]), jnp.array([4.0, 0.0])):
        params = {"w": jnp.ones(2)}
        args = {"loss": jnp.float32(1.0), "grad_norm": jnp.float32(5.0), "step": jnp.int32(1)}
        _, state = tx.update({"w": grads}, tx.init(params), params, **args)
        halves.append(state.mu["w"] / (1 - CONFIG.beta1))
    np.testing.assert_allclose(np.concatenate(halves), [0.6, 0.0, 0.8, 0.0], rtol=1e-6)


def test_clip_coefficient_never_enlarges():
    """Fault: small gradients scaled up to the clip norm; 0/0 for a norm of 0."""
    norms = jnp.array([0.0, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(clip_coefficient(norms, 1.0), [1.0, 1.0, 1 / 1.000001, 1 / 2.000001], rtol=1e-7)


def test_weight_decay_reaches_exactly_the_masked_leaves():
    """Fault: norms left out or embeddings decayed. Zero gradients, rate 0.1, decay 0.1: each leaf * 0.99 or unchanged."""
    tx, step_fn = make_step(replace(CONFIG, peak_lr=0.1))
    params = make_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, state = step_fn(params, tx.init(params), zeros, jnp.float32(2.0), jnp.float32(0.0), jnp.int32(1))
    assert_same_bits(new["embed"], params["embed"])
    for name in ("norm", "wq"):
        np.testing.assert_allclose(new["layer"][name], 0.99 * params["layer"][name], rtol=2e-7)


def test_decay_mask_must_fit_and_select_something():
    """Fault: a name pattern that matches nothing, a leaf without an entry."""
    with pytest.raises(ValueError, match="decay mask: got 'no leaf selected'.*; fix: "):
        skip_step_adamw(CONFIG, CONSTANT, {"a": False})
    skip_step_adamw(replace(CONFIG, weight_decay=0.0), CONSTANT, {"a": False})
    with pytest.raises(ValueError, match=r"decay mask.*\['a'\].*\['b'\].*; fix: "):
        skip_step_adamw(CONFIG, CONSTANT, {"a": True}).init({"b": jnp.ones(3)})


def test_only_fp32_is_accepted():
    """Fault: bf16 master weights or moments, which lose every small update; the error names the leaf."""
    tx, step_fn = make_step()
    params = make_params()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"params\['embed'\]: got 'bfloat16', expected float32; fix: "):
        tx.init(half)
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves((state.mu, state.nu))} == {jnp.dtype("float32")}
    scalars = jnp.float32(2.0), jnp.float32(0.3), jnp.int32(1)
    for bad in ((params, state._replace(nu=half), params), (params, state._replace(mu=half), params)):
        with pytest.raises(ValueError, match=r"state.(mu|nu)\['embed'\]: got 'bfloat16'"):
            step_fn(*bad, *scalars)
    with pytest.raises(ValueError, match=r"grads\['embed'\]: got 'bfloat16'"):
        step_fn(params, state, half, *scalars)
    for loss, norm in ((jnp.bfloat16(2.0), jnp.float32(0.3)), (jnp.float32(2.0), jnp.ones(2))):
        with pytest.raises(ValueError, match=r"(loss|grad_norm): got .*, expected float32\[\]"):
            step_fn(params, state, params, loss, norm, jnp.int32(1))


# ------------------------------------------------------------------------------------------------------- skipped steps


@pytest.fixture(scope="module")
def warm():
    """A jitted step, parameters (some -0.0) and state after 70 healthy steps."""
    tx, step_fn = make_step(schedule=WARM_SCHEDULE)
    losses, norms = series(70)
    params, state, skipped = run(step_fn, make_params(), tx.init(make_params()), losses, norms, range(1, 71))
    assert skipped == [] and state.recorded == 70 and state.count == 70
    params["embed"] = params["embed"].at[::7].set(-0.0).at[1::7].set(0.0)
    return step_fn, params, state


@pytest.mark.parametrize("series_name", ["loss", "grad_norm"])
def test_spike_changes_nothing_but_the_window(warm, series_name):
    """Fault: a skip by zero gradients (moments decay, weights decay), or by + 0.0 (turns -0.0 into 0.0)."""
    step_fn, params, state = warm
    loss, norm = (100.0, 0.3) if series_name == "loss" else (2.5, 100.0)
    new_params, new = step_fn(params, state, make_grads(71), jnp.float32(loss), jnp.float32(norm), jnp.int32(71))
    assert new.skipped and new.nonfinite_in_a_row == 0
    assert_same_bits((new_params, new.mu, new.nu, new.count), (params, state.mu, state.nu, state.count))
    assert new.recorded == 71 and new.losses[-1] == np.float32(loss) and new.grad_norms[-1] == np.float32(norm)
    assert_same_bits(new.losses[:-1], state.losses[1:])


@pytest.mark.parametrize("bad", ["nan gradient", "inf loss", "nan loss", "-inf loss", "norm overflow"])
def test_non_finite_step_changes_nothing_at_all(warm, bad):
    """Fault: 0 * NaN in parameters or moments, and a NaN in the window that skips the next 128 steps."""
    step_fn, params, state = warm
    grads, loss = make_grads(71), jnp.float32(2.5)
    if bad == "nan gradient":
        grads["layer"]["wq"] = grads["layer"]["wq"].at[2, 5, 7].set(jnp.nan)
    elif bad == "norm overflow":
        grads["embed"] = grads["embed"].at[3, 4].set(1e20)  # finite, its square is not
    else:
        loss = jnp.float32(bad.split()[0])
    norm = global_norm(grads)
    new_params, new = step_fn(params, state, grads, loss, norm, jnp.int32(71))
    assert new.skipped and new.nonfinite_in_a_row == 1
    assert_same_bits(
        (new_params, new._replace(skipped=state.skipped, nonfinite_in_a_row=state.nonfinite_in_a_row)), (params, state)
    )
    after, healthy = step_fn(new_params, new, make_grads(72), jnp.float32(2.5), jnp.float32(0.3), jnp.int32(72))
    assert not healthy.skipped and healthy.count == 71 and healthy.nonfinite_in_a_row == 0
    assert np.all(np.isfinite(np.concatenate([np.ravel(x) for x in jax.tree.leaves(after)])))


def test_non_finite_step_is_skipped_before_the_window_is_long_enough():
    """Fault: the minimum history of 64 letting a NaN through at step 5, or counting it as history."""
    tx, step_fn = make_step()
    losses, norms = series(70)
    losses[5] = np.nan
    losses[64] += 100  # the 63rd value that is recorded: not judged yet
    params, state, skipped = run(step_fn, make_params(), tx.init(make_params()), losses, norms, range(1, 65))
    assert skipped == [5] and state.count == 63 and state.recorded == 63
    losses[65] += 1000
    assert run(step_fn, params, state, losses, norms, [65])[2] == [65]


def test_non_finite_steps_in_a_row_are_counted(warm):
    """Fault: a guard that gives up and applies the NaN, or a count that a spike or a good step does not reset."""
    step_fn, params, state = warm
    before = params
    for i in range(1, 11):
        params, state = step_fn(params, state, make_grads(i), jnp.float32(jnp.nan), jnp.float32(0.3), jnp.int32(70 + i))
        assert state.nonfinite_in_a_row == i and state.skipped
    assert_same_bits(params, before)
    _, state = step_fn(params, state, make_grads(81), jnp.float32(2.5), jnp.float32(0.3), jnp.int32(81))
    assert state.nonfinite_in_a_row == 0 and not state.skipped


def test_learning_rate_follows_the_step_and_not_adams_count(warm):
    """Fault: a schedule one step behind for every skip. Fresh moments and a unit gradient make the update the rate."""
    step_fn, params, state = warm
    moments = {name: jax.tree.map(jnp.zeros_like, params) for name in ("mu", "nu")}
    state = state._replace(count=jnp.int32(0), **moments)
    ones = jax.tree.map(lambda p: jnp.full_like(p, 1e-2), params)
    zero = jax.tree.map(jnp.zeros_like, params)
    for spike_at in (71, 72, 73):
        _, state = step_fn(zero, state, ones, jnp.float32(jnp.nan), jnp.float32(0.3), jnp.int32(spike_at))
    moved, state = step_fn(zero, state, ones, jnp.float32(2.5), jnp.float32(0.3), jnp.int32(74))
    expected = -learning_rate(CONFIG, WARM_SCHEDULE, 74)
    assert state.count == 1
    np.testing.assert_allclose(moved["embed"], expected, rtol=1e-5)


def test_interrupted_run_equals_the_straight_one():
    """Fault: a window (or count) outside the state: after a restart at 100 a spike at 105 would be applied."""
    tx, step_fn = make_step(schedule=(SchedulePiece(None, "cosine", 10, 150, 0.1),))
    losses, norms = series(130)
    losses[105] += 50
    straight = run(step_fn, make_params(), tx.init(make_params()), losses, norms, range(1, 131))
    params, state, before = run(step_fn, make_params(), tx.init(make_params()), losses, norms, range(1, 101))
    saved = jax.tree.map(np.array, (params, state))  # to host and back, as a checkpoint
    params, state = jax.tree.map(jnp.asarray, saved)
    params, state, after = run(step_fn, params, state, losses, norms, range(101, 131))
    assert before + after == straight[2] == [105]
    assert_same_bits((params, state), straight[:2])


# ---------------------------------------------------------------------------------------------------------- on devices


def test_no_two_leaves_share_a_buffer_and_all_can_be_donated():
    """Fault: one zeros array in two places of the state, which fails (or corrupts) when both are donated."""
    tx, step_fn = make_step(jit=False)
    params = make_params()
    for init in (tx.init, jax.jit(tx.init)):
        state = init(params)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
        assert len(set(pointers)) == len(pointers)
    plain, donating = jax.jit(step_fn), jax.jit(step_fn, donate_argnums=(0, 1))
    losses, norms = series(8)
    expected = run(plain, params, tx.init(params), losses, norms, range(1, 9))
    donated = run(donating, make_params(), tx.init(params), losses, norms, range(1, 9))
    assert_same_bits(donated[:2], expected[:2])


def test_shards_updated_apart_equal_the_whole():
    """Fault: a norm, mean or collective taken over the leaves: each shard would then see its own."""
    tx, step_fn = make_step(mask={"w": True})
    whole = {"w": jnp.asarray(np.random.default_rng(3).normal(0, 0.02, (10, 48)), jnp.float32)}

    def part(tree, rows):
        return jax.tree.map(lambda x: x[rows], tree)

    def grads_of(k):
        return {"w": make_grads(k)["embed"][:10]}

    losses, norms = series(80)
    losses[70], norms[75], losses[77] = 100, 100, np.nan
    expected = run(step_fn, whole, tx.init(whole), losses, norms, range(1, 81), grads_of)
    assert expected[2] == [70, 75, 77]
    for rows in (slice(0, 4), slice(4, 10)):
        shard = part(whole, rows)
        got = run(step_fn, shard, tx.init(shard), losses, norms, range(1, 81), lambda k, r=rows: part(grads_of(k), r))
        assert_same_bits(got[0], part(expected[0], rows))
        assert_same_bits(got[1].mu, part(expected[1].mu, rows))
        assert_same_bits(got[1]._replace(mu=0, nu=0), expected[1]._replace(mu=0, nu=0))


def test_inside_shard_map_scalars_stay_replicated_and_nothing_is_communicated():
    """Fault: a collective in the optimizer, or a window that differs between devices (check_vma refuses that)."""
    tx, step_fn = make_step(mask={"w": True}, jit=False)
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    params = {"w": jnp.ones((6, 48))}
    state = tx.init(params)
    specs = jax.tree.map(lambda _: P(), state)._replace(mu={"w": P("fsdp")}, nu={"w": P("fsdp")})
    tree = {"w": P("fsdp")}
    mapped = jax.shard_map(step_fn, mesh=mesh, in_specs=(tree, specs, tree, P(), P(), P()), out_specs=(tree, specs))
    args = params, state, params, jnp.float32(2.0), jnp.float32(0.3), jnp.int32(1)
    assert_same_bits(jax.jit(mapped)(*args), jax.jit(step_fn)(*args))
    program = str(jax.make_jaxpr(mapped)(*args))
    assert "shard_map" in program
    for name in ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "reduce_scatter"):
        assert name not in program


# A person who copies optim.py alone: five lines to an update.
ALONE = """
import jax.numpy as jnp, optax, optim, sys
config = optim.OptimConfig(0.1, 0.9, 0.95, 1e-8, 0.1, 1.0, skip_window=128, skip_sigma=6.0, max_nonfinite_steps=3)
tx = optim.skip_step_adamw(config, (optim.SchedulePiece(None, "constant", 0, 1, 1.0),), {"w": True})
params = {"w": jnp.array([1.0, 2.0])}
updates, state = tx.update(params, tx.init(params), params, loss=jnp.float32(2), grad_norm=jnp.float32(1), step=1)
print(*optax.apply_updates(params, updates)["w"], *sorted({"model", "data", "config", "train"} & sys.modules.keys()))
"""


def test_it_works_alone_in_an_empty_folder(tmp_path):
    """Fault: an import of another file of ours. Adam's first step is the rate, 0.1, after a decay of a hundredth."""
    shutil.copy(optim.__file__, tmp_path)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert [float(word) for word in done.stdout.split()] == pytest.approx([0.89, 1.88], rel=1e-5)
