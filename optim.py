"""Skip-step AdamW, the learning-rate schedule and gradient clipping of OLMo 3, as one optax transformation.

One update, number s (1-based), with f = 0 when the step is skipped and f = 1 otherwise:

    g <- g * min(1, clip_norm / (grad_norm + 1e-6))             clipped by the global norm
    p <- p * (1 - f lr(s) wd)                                   only where the decay mask is True
    m <- m (1 - f (1-beta1)) + g   f (1-beta1)
    v <- v (1 - f (1-beta2)) + g^2 f (1-beta2)
    p <- p - f lr(s)/(1 - beta1^t) * m / (sqrt(v)/sqrt(1 - beta2^t) + eps)        t = updates applied, this one included

    f = 1  if  loss - mean(losses) <= sigma std(losses)  and  grad_norm - mean(grad_norms) <= sigma std(grad_norms)

The means and unbiased standard deviations run over the last `skip_window` values, without the current one; until
max(2, skip_window // 2) values are there (with the current one) nothing is skipped. `loss` is the cross-entropy
WITHOUT z-loss, `grad_norm` the global norm BEFORE clipping. A skipped step leaves parameters, moments and t alone; the
step number, and with it the learning rate and the data, goes on. Skipped values do enter the window.

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

# ---------------------------------------------------------------------------------------------------------------------
# Configs


def _require(holds: bool, what: str, got: Any, expected: str, fix: str) -> None:
    if not holds:
        raise ValueError(f"{what}: got {got!r}, expected {expected}; fix: {fix}")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_int(x: Any, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= MAX_INT


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
        for name in ("peak_lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm", "skip_sigma"):
            x = getattr(self, name)
            _require(_is_number(x), f"optim.{name}", x, "a finite number", "YAML reads 1e-8 as text; write 1.0e-8")
        for name in ("peak_lr", "eps", "clip_norm", "skip_sigma"):
            x = getattr(self, name)
            _require(x > 0, f"optim.{name}", x, "a number > 0", "give a positive value")
        for name in ("beta1", "beta2"):
            x = getattr(self, name)
            _require(0 <= x < 1, f"optim.{name}", x, "a number in [0, 1)", "OLMo 3 uses beta1 0.9, beta2 0.95")
        x = self.weight_decay
        _require(x >= 0, "optim.weight_decay", x, "a number >= 0", "use 0.0 for no weight decay")
        for name, least in (("skip_window", 2), ("max_nonfinite_steps", 1)):
            x = getattr(self, name)
            _require(_is_int(x, least), f"optim.{name}", x, f"an integer >= {least}", "give a whole number")


@dataclass(frozen=True)
class SchedulePiece:
    """Science, no defaults. A schedule is a tuple of pieces; the first whose `until` is not yet passed rules.

    Every piece is written in absolute steps and in terms of the same `peak_lr`; `half_cosine` is the second half of a
    cosine, so its warm-up ends halfway between the peak and the final value (OLMo-core HalfCosWithWarmup).
    """

    until: int | None  # last step (inclusive, 1-based) this piece rules; None = for ever, the last piece and only it
    kind: str  # one of KINDS
    warmup_steps: int  # absolute step at which the warm-up ends; 0 = none
    total_steps: int  # step at which the curve ends; from there on the final value holds
    final_fraction: float  # final learning rate as a fraction of peak_lr

    def __post_init__(self):
        x = self.kind
        _require(x in KINDS, "schedule.kind", x, f"one of {', '.join(KINDS)}", "correct the name")
        x, hint = self.until, "write the last step of this piece, or null on the last piece"
        _require(x is None or _is_int(x, 1), "schedule.until", x, "a step >= 1, or null", hint)
        for name, least in (("warmup_steps", 0), ("total_steps", 1)):
            x = getattr(self, name)
            _require(_is_int(x, least), f"schedule.{name}", x, f"an integer >= {least}", "give a whole number of steps")
        x, constant = self.warmup_steps, self.kind == "constant"
        expected = f"less than total_steps {self.total_steps}"
        _require(constant or x < self.total_steps, "schedule.warmup_steps", x, expected, "shorten it or go on longer")
        x = self.final_fraction
        _require(_is_number(x) and 0 <= x <= 1, "schedule.final_fraction", x, "a number in [0, 1]", "0.1 in stage 1")
        hint = "a constant piece stays at peak_lr; write 1.0 or choose another kind"
        _require(not constant or x == 1, "schedule.final_fraction", x, "1.0", hint)


def check_schedule(schedule: tuple[SchedulePiece, ...]) -> None:
    """ValueError unless the pieces cover every step from 1 on, each in its turn."""
    _require(len(schedule) > 0, "schedule", schedule, "at least one piece", "add a piece with `until: null`")
    untils = [piece.until for piece in schedule]
    hint = "give every piece but the last its last step, and the last one null"
    _require(untils[-1] is None, "schedule: until of the last piece", untils[-1], "null", hint)
    for i, until in enumerate(untils[:-1]):
        _require(until is not None, f"schedule: until of piece {i + 1} of {len(untils)}", until, "a step", hint)
    for before, after in zip(untils[:-2], untils[1:-1], strict=True):
        _require(before < after, "schedule: until", untils, "steps that increase", "put the pieces in order")


# ---------------------------------------------------------------------------------------------------------------------
# Learning rate


def _piece_lr(peak: float, piece: SchedulePiece, step, xp, real):
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
    _require(np.issubdtype(step.dtype, np.integer), "step", step.dtype, "an integer type", "pass the global step")
    if xp is np:
        _require(bool(np.all(step >= 1)), "step", step.min(), "at least 1", "the first update is number 1")
    step = step.astype(integer)
    lr = _piece_lr(config.peak_lr, schedule[-1], step, xp, real)
    for piece in reversed(schedule[:-1]):
        lr = xp.where(step <= piece.until, _piece_lr(config.peak_lr, piece, step, xp, real), lr)
    return float(lr) if xp is np and lr.ndim == 0 else lr


# ---------------------------------------------------------------------------------------------------------------------
# The skip rule: fp32 scalars and a window f32[n], oldest value first, filled from the right


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
    # One value has no unbiased deviation: torch gives NaN and the comparison fails. Windows below 6 only (step 2).
    within &= recorded >= 2
    active = recorded + 1 >= max(2, n // 2)
    return active & ~within


def record(window, value):
    """The window one value later: the oldest leaves on the left, `value` enters on the right."""
    return jnp.concatenate([window[1:], value[None]])


def clip_coefficient(grad_norm, clip_norm: float):
    """Factor for every gradient, at most 1; the 1e-6 is torch's (nn.utils.clip_grads_with_norm_)."""
    return jnp.minimum(clip_norm / (grad_norm + 1e-6), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer


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


def _require_float32(what: str, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        hint = "keep master weights, gradients and moments in fp32; cast copies for the matmuls only"
        _require(leaf.dtype == jnp.float32, f"{what}{jax.tree_util.keystr(path)}", str(leaf.dtype), "float32", hint)


def _require_scalar(what: str, x) -> jax.Array:
    x = jnp.asarray(x)
    hint = "pass the global scalar, already reduced over all devices"
    _require(x.shape == () and x.dtype == jnp.float32, what, f"{x.dtype}{list(x.shape)}", "a float32 scalar", hint)
    return x


def _require_same_tree(what: str, tree: Any, params: Any) -> None:
    paths = [{jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)} for t in (tree, params)]
    same = jax.tree.structure(tree) == jax.tree.structure(params)
    got = sorted(paths[0] ^ paths[1]) or str(jax.tree.structure(tree))
    _require(same, f"{what}: leaves on one side only", got, "the tree of the parameters", "derive both from one table")


def _adamw(config: OptimConfig, decay: bool, p, g, m, v, lr, correction1, correction2):
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
    for path, leaf in jax.tree_util.tree_leaves_with_path(decay_mask):
        is_bool = isinstance(leaf, bool | np.bool_)
        _require(is_bool, f"decay mask{jax.tree_util.keystr(path)}", leaf, "True or False", "use Python bools")
    if config.weight_decay > 0:
        selected = any(jax.tree.leaves(decay_mask))
        _require(selected, "decay mask", "no leaf selected", "at least one", "correct it or set weight_decay to 0.0")

    def init(params) -> SkipStepState:
        _require_float32("params", params)
        _require_same_tree("decay mask", decay_mask, params)
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
        _require(params is not None, "params", params, "the parameters", "call tx.update(grads, state, params, ...)")
        for what, tree in (("params", params), ("grads", grads), ("state.mu", state.mu), ("state.nu", state.nu)):
            _require_float32(what, tree)
            _require_same_tree(what, tree, decay_mask)
        loss, grad_norm = _require_scalar("loss", loss), _require_scalar("grad_norm", grad_norm)

        # DIVERGENCE 2: a non-finite loss or norm always skips, also while the window is too short to judge; it changes
        # nothing at all and is not recorded. OLMo-core multiplies by f = 0, so that a NaN gradient reaches parameters
        # and moments (0 * NaN = NaN), and records the NaN, so that the next skip_window steps are skipped too.
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
            new_p, new_m, new_v = _adamw(config, decay, p, g * clip, m, v, lr, correction1, correction2)
            # Selected, never multiplied: 0 * NaN is NaN. x + (-0.0) has the bits of x also for x = -0.0, which
            # x + 0.0 has not (subnormals apart, which XLA may flush in any addition). For a step that is taken,
            # p + (new_p - p) is new_p, or one ulp beside it where new_p is not within a factor of two of p.
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
