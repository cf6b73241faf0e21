"""Skip-step AdamW, the learning-rate schedule and gradient clipping of OLMo 3, as one optax transformation.

One update, number s (1-based), with f = 0 when the step is skipped and f = 1 otherwise:

    g <- g * min(1, clip_norm / (grad_norm + 1e-6))             clipped by the global norm
    p <- p * (1 - f lr(s) wd)                                   only where the decay mask is True
    m <- m (1 - f (1-beta1)) + g   f (1-beta1)
    v <- v (1 - f (1-beta2)) + g^2 f (1-beta2)
    p <- p - f lr(s)/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps)        t = updates applied, this one included

    f = 1  if  loss and grad_norm are finite
           and loss - mean(losses) <= sigma std(losses)  and  grad_norm - mean(grad_norms) <= sigma std(grad_norms)

The means and unbiased standard deviations run over the last `skip_window` values, without the current one; until
max(2, skip_window // 2) values are there (with the current one) nothing is skipped. `loss` is the cross-entropy
WITHOUT z-loss, `grad_norm` the global norm BEFORE clipping. A skipped step leaves parameters, moments and t alone; the
step number, and with it the learning rate and the data, goes on. Skipped values enter the window if they are finite.

Sources: OLMo-core optim/adamw.py:foreach_adamw_step, optim/skip_step_optimizer.py:SkipStepOptimizer and
optim/scheduler.py:{CosWithWarmup,HalfCosWithWarmup,LinearWithWarmup,ConstantWithWarmup}.

What it is not: it holds no collective. `loss` and `grad_norm` come in as global scalars and everything else is
elementwise, so it runs unchanged on the local shards inside a shard_map. It does not stop a run either: it counts
non-finite steps in a row, and whoever drives it compares that with `max_nonfinite_steps`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

KINDS = ("cosine", "half_cosine", "linear", "constant")
MAX_INT = 2**31 - 1  # steps and counts are int32 on the device


# ------------------------------------------------------------------------------------------------------------ configs


def require(holds: bool, what: str, got: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{what}: got {got!r}, expected {expected}")


def check_fields(section: str, config: Any, rules: tuple) -> None:
    """ValueError for the first rule that a field breaks. A rule: names of fields, what holds for each, the same in words."""
    for names, holds, expected in rules:
        for name in names.split():
            require(holds(getattr(config, name)), f"{section}.{name}", getattr(config, name), expected)


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)  # so not True, which Python counts as 1


def is_whole(x: Any, least: int) -> bool:
    return type(x) is int and least <= x <= MAX_INT


@dataclass(frozen=True)
class OptimConfig:
    """Science, no defaults. OLMo 3 7B: 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, window 128, sigma 6."""

    peak_lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    skip_window: int  # previous values that the skip rule remembers
    skip_sigma: float  # standard deviations above the mean that are still accepted
    max_nonfinite_steps: int  # non-finite steps in a row after which the caller stops the run

    def __post_init__(self):
        rules = (
            ("peak_lr eps clip_norm skip_sigma", lambda x: is_number(x) and x > 0, "a finite number > 0"),
            ("beta1 beta2", lambda x: is_number(x) and 0 <= x < 1, "a number in [0, 1); fix: OLMo 3 uses 0.9, 0.95"),
            ("weight_decay", lambda x: is_number(x) and x >= 0, "a finite number >= 0; fix: 0.0 for no weight decay"),
            ("skip_window", lambda x: is_whole(x, 2), "a whole number >= 2"),
            ("max_nonfinite_steps", lambda x: is_whole(x, 1), "a whole number >= 1; fix: 1 stops at the first"),
        )
        check_fields("optim", self, rules)


@dataclass(frozen=True)
class SchedulePiece:
    """Science, no defaults. A schedule is a tuple of pieces; the first whose `until` is not yet passed rules.

    Every piece is written in absolute steps and in terms of the same `peak_lr`. `half_cosine` is the second half of a
    cosine: its warm-up ends halfway between the peak and the final value (OLMo-core HalfCosWithWarmup).
    """

    until: int | None  # last step (inclusive, 1-based) this piece rules; None = for ever, the last piece and only it
    kind: str  # one of KINDS
    warmup_steps: int  # absolute step at which the warm-up ends; 0 = none
    total_steps: int  # step at which the curve ends; from there on the final value holds
    final_fraction: float  # final learning rate as a fraction of peak_lr

    def __post_init__(self):
        constant, total = self.kind == "constant", self.total_steps
        # In this order: a rule may rely on the types that the rules before it have checked.
        rules = (
            ("until", lambda x: x is None or is_whole(x, 1), "a step >= 1; fix: null, on the last piece alone"),
            ("kind", lambda x: x in KINDS, f"one of {', '.join(KINDS)}"),
            ("total_steps", lambda x: is_whole(x, 1), "a whole number >= 1"),
            ("warmup_steps", lambda x: is_whole(x, 0), "a whole number >= 0; fix: 0 for no warm-up"),
            ("warmup_steps", lambda x: constant or x < total, f"less than total_steps {total}"),
            ("final_fraction", lambda x: is_number(x) and 0 <= x <= 1, "a number in [0, 1]; fix: stage 1 uses 0.1"),
            ("final_fraction", lambda x: not constant or x == 1, "1.0; fix: that, since a constant piece has no decay"),
        )
        check_fields("schedule", self, rules)


def check_schedule(schedule: tuple[SchedulePiece, ...]) -> None:
    """ValueError unless the pieces cover every step from 1 on, each in its turn."""
    *steps, last = [piece.until for piece in schedule] or [0]
    require(last is None, "schedule: until of the last piece", last, "null, so that a piece rules the last step too")
    require(None not in steps, "schedule: until", steps, "a step on every piece but the last")
    require(steps == sorted(set(steps)), "schedule: until", steps, "steps that increase; fix: put the pieces in order")


# ------------------------------------------------------------------------------------------------------ learning rate


def piece_lr(peak: float, piece: SchedulePiece, step, xp, real):
    """Learning rate of one piece at integer array `step`; `xp` is numpy or jax.numpy, `real` its float type."""
    final = peak * piece.final_fraction
    top = final + (peak - final) / 2 if piece.kind == "half_cosine" else peak  # where the warm-up ends
    warmup = (top / max(piece.warmup_steps, 1)) * step.astype(real)
    if piece.kind == "constant":
        return xp.where(step < piece.warmup_steps, warmup, top)
    # left / span runs from 1 (half_cosine: 1/2) down to 0 at total_steps. The difference is taken between integers, and
    # (1 + cos(pi (1-x)))/2 is written sin^2(pi x / 2): nothing cancels, so fp32 keeps its digits to the last step.
    left = xp.maximum(piece.total_steps - step, 0).astype(real)
    span = (piece.total_steps - piece.warmup_steps) * (2 if piece.kind == "half_cosine" else 1)
    shape = (1 / span) * left if piece.kind == "linear" else xp.square(xp.sin((math.pi / 2 / span) * left))
    return xp.where(step < piece.warmup_steps, warmup, final + (peak - final) * shape)


def learning_rate(config: OptimConfig, schedule: tuple[SchedulePiece, ...], step):
    """Learning rate of update number `step`: the global step, absolute, 1 for the first update (so never 0).

    A Python int gives a float and a numpy array an array, both in float64; a jax array (traced or not) gives fp32, at
    every step within 3e-7 of float64 (5e-7 on a cosine that ends at 0). Skipped steps count: pass the trainer's step,
    never Adam's count.
    Source: OLMo-core optim/scheduler.py, evaluated after `global_step += 1` as its trainer does.
    """
    xp, real, integer = (jnp, jnp.float32, jnp.int32) if isinstance(step, jax.Array) else (np, np.float64, np.int64)
    step = xp.asarray(step)
    require(np.issubdtype(step.dtype, np.integer), "step", step.dtype, "an integer; fix: pass the global step")
    if xp is np:  # a traced step has no value to look at
        require(bool(np.all(step >= 1)), "step", step.min(), "at least 1, the first update")
    step = step.astype(integer)
    lr = piece_lr(config.peak_lr, schedule[-1], step, xp, real)
    for piece in reversed(schedule[:-1]):
        lr = xp.where(step <= piece.until, piece_lr(config.peak_lr, piece, step, xp, real), lr)
    return float(lr) if xp is np and lr.ndim == 0 else lr


# ----------------------------------------------------------------------------------------------------------- skip rule
# Values are fp32 scalars; a window is f32[n], oldest value first, filled from the right.


def is_spike(window, recorded, value, sigma: float):
    """True where `value` lies more than `sigma` standard deviations above the mean of the window's recorded values.

    window f32[n], recorded int32 <= n, value f32. Only upward, and never before max(2, n // 2) values are there with
    this one counted. Source: OLMo-core optim/skip_step_optimizer.py:SkipStepOptimizer.get_step_factor.
    """
    n = window.shape[0]
    valid = jnp.arange(n) >= n - recorded
    # Two passes, relative to the newest value: a constant series has a deviation of exactly 0, as in torch's std_mean.
    offset = window - window[-1]
    mean = jnp.sum(jnp.where(valid, offset, 0.0)) / jnp.maximum(recorded, 1)
    squares = jnp.where(valid, jnp.square(offset - mean), 0.0)
    std = jnp.sqrt(jnp.sum(squares) / jnp.maximum(recorded - 1, 1))
    within = value - (window[-1] + mean) <= sigma * std
    # One value has no unbiased deviation. torch gives NaN, and NaN is not <=: windows below 6 always skip step 2.
    within &= recorded >= 2
    active = recorded + 1 >= max(2, n // 2)
    return active & ~within


def record(window, value):
    """The window one value later: the oldest leaves on the left, `value` enters on the right."""
    return jnp.concatenate([window[1:], value[None]])


def clip_coefficient(grad_norm, clip_norm: float):
    """Factor for every gradient, at most 1; the 1e-6 is torch's (nn.utils.clip_grads_with_norm_)."""
    return jnp.minimum(clip_norm / (grad_norm + 1e-6), 1.0)


# ----------------------------------------------------------------------------------------------------------- optimizer


class SkipStepState(NamedTuple):
    """Everything that the next update depends on. Moments are fp32 trees shaped and sharded like the parameters."""

    count: jax.Array  # int32: updates applied; Adam's own t, which a skipped step does not advance
    mu: Any  # fp32 tree
    nu: Any  # fp32 tree
    losses: jax.Array  # f32[skip_window], oldest first, filled from the right
    grad_norms: jax.Array  # f32[skip_window]
    recorded: jax.Array  # int32: how many of them are filled, at most skip_window
    nonfinite_in_a_row: jax.Array  # int32
    skipped: jax.Array  # bool: whether the last update was skipped


def check_leaves(what: str, tree: Any, decay_mask: Any) -> None:
    """ValueError, which names the leaf, unless the leaves of `tree` are those of the mask and all of them are fp32."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    masked = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(decay_mask)}
    alone = sorted(leaves.keys() ^ masked)
    require(not alone, f"{what} or decay mask", alone, "every leaf in both; fix: derive both from one table")
    for name, leaf in leaves.items():
        expected = "float32; fix: cast copies for the matmuls only"
        require(leaf.dtype == jnp.float32, f"{what}{name}", str(leaf.dtype), expected)


def adamw_leaf(config: OptimConfig, decay: bool, p, g, m, v, lr, correction1, correction2):
    """One fp32 leaf with f = 1: new p, m, v. The order of operations is that of OLMo-core's foreach_adamw_step."""
    w1, w2 = np.float32(1 - config.beta1), np.float32(1 - config.beta2)
    if decay:
        p = p * (1 - lr * config.weight_decay)
    m = m * (np.float32(1) - w1) + g * w1
    v = v * (np.float32(1) - w2) + (g * g) * w2
    denominator = jnp.sqrt(v) / jnp.sqrt(correction2) + config.eps
    return p + (m / denominator) * -(lr / correction1), m, v


def skip_step_adamw(
    config: OptimConfig, schedule: tuple[SchedulePiece, ...], decay_mask: Any
) -> optax.GradientTransformationExtraArgs:
    """Skip-step AdamW. `decay_mask` is a tree of bools like the parameters: True where weight decay applies.

    `tx.init(params)`; `updates, state = tx.update(grads, state, params, loss=, grad_norm=, step=)`, then
    `optax.apply_updates(params, updates)`. loss and grad_norm are global fp32 scalars (cross-entropy without z-loss;
    norm before clipping), step the 1-based global step of this update. Leaves may be local shards. Raises ValueError
    for leaves that are not fp32 and for a mask that does not fit the parameters or selects none of them.
    """
    check_schedule(schedule)
    # Text such as "no" counts as True, and would decay.
    bools = all(isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(decay_mask))
    require(bools, "decay mask", decay_mask, "True or False on every leaf")
    # A pattern of names that matches nothing would train without weight decay, and nothing else would show it.
    selected = any(jax.tree.leaves(decay_mask)) or config.weight_decay == 0
    require(selected, "decay mask", "no leaf selected", "at least one; fix: correct it or set weight_decay to 0.0")

    def init(params) -> SkipStepState:
        check_leaves("params", params, decay_mask)
        # Every leaf is built on its own: two that shared a buffer could not both be donated.
        return SkipStepState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(jnp.zeros_like, params),
            nu=jax.tree.map(jnp.zeros_like, params),
            # DIVERGENCE 1: the window is part of the state, and so of every checkpoint. OLMo-core keeps it in Python
            # lists and loses it at each restart: no step is skipped then until half a window has gone by.
            losses=jnp.zeros(config.skip_window, jnp.float32),
            grad_norms=jnp.zeros(config.skip_window, jnp.float32),
            recorded=jnp.zeros((), jnp.int32),
            nonfinite_in_a_row=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.bool_),
        )

    def update(grads, state: SkipStepState, params=None, *, loss, grad_norm, step):
        for what, tree in (("params", params), ("grads", grads), ("state.mu", state.mu), ("state.nu", state.nu)):
            check_leaves(what, tree, decay_mask)
        loss, grad_norm = jnp.asarray(loss), jnp.asarray(grad_norm)
        for what, x in (("loss", loss), ("grad_norm", grad_norm)):
            got, expected = f"{x.dtype}{list(x.shape)}", "float32[]; fix: reduce it over all devices first"
            require(got == "float32[]", what, got, expected)

        # DIVERGENCE 2: a non-finite loss or norm always skips, also while the window is too short to judge; it changes
        # nothing at all and is not recorded. OLMo-core multiplies by f = 0, so that a NaN gradient reaches parameters
        # and moments (0 * NaN = NaN). It records the NaN too, and so skips the next skip_window steps.
        nonfinite = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
        skip = (
            nonfinite
            | is_spike(state.losses, state.recorded, loss, config.skip_sigma)
            | is_spike(state.grad_norms, state.recorded, grad_norm, config.skip_sigma)
        )

        # DIVERGENCE 3: betas, eps and weight decay are the config's, always. OLMo-core takes those of the checkpoint
        # when it loads an optimizer state, whatever the config says.
        lr = learning_rate(config, schedule, jnp.asarray(step))
        count = state.count + 1
        t = count.astype(jnp.float32)
        correction1 = 1 - jnp.power(jnp.float32(config.beta1), t)
        correction2 = 1 - jnp.power(jnp.float32(config.beta2), t)
        clip = clip_coefficient(grad_norm, config.clip_norm)

        def leaf(decay, p, g, m, v):
            new_p, new_m, new_v = adamw_leaf(config, decay, p, g * clip, m, v, lr, correction1, correction2)
            # Selected, never multiplied: 0 * NaN is NaN. x + (-0.0) has the bits of x also for x = -0.0, which
            # x + 0.0 has not (subnormals apart, which XLA may flush in any addition). A step that is taken
            # ends at p + (new_p - p), which is new_p but for half an ulp of the larger of p and new_p - p.
            step_p = jnp.where(skip, -0.0, new_p - p)
            return step_p, jnp.where(skip, m, new_m), jnp.where(skip, v, new_v)

        leaves = jax.tree.map(leaf, decay_mask, params, grads, state.mu, state.nu)
        updates, mu, nu = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), leaves)
        return updates, SkipStepState(
            count=jnp.where(skip, state.count, count),
            mu=mu,
            nu=nu,
            losses=jnp.where(nonfinite, state.losses, record(state.losses, loss)),
            grad_norms=jnp.where(nonfinite, state.grad_norms, record(state.grad_norms, grad_norm)),
            recorded=jnp.where(nonfinite, state.recorded, jnp.minimum(state.recorded + 1, config.skip_window)),
            nonfinite_in_a_row=jnp.where(nonfinite, state.nonfinite_in_a_row + 1, 0),
            skipped=skip,
        )

    return optax.GradientTransformationExtraArgs(init, update)
