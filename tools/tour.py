"""A tour in pictures, drawn from the code itself: masks, schedules, shards, order, one layer's traffic, the skip rule.

    python tools/tour.py            six PNGs in docs/tour/, in under a minute; docs/tour.md shows them

A function that ends in _of computes what a picture shows, by the code that trains; `draw_...` only draws it. MaxText's
faulty order is the one thing that is not ours. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # read when jax is imported
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import plan  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import data  # noqa: E402
import model  # noqa: E402
import optim  # noqa: E402
from config import BATCH_AXES, load_config  # noqa: E402
from processes import HERE, run_command, sole_writer  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")  # Okabe and Ito


def tiny_model(**changes) -> model.ModelConfig:
    """Four layers, whose sizes every mesh here divides."""
    sizes = dict(vocab_size=16, padded_vocab_size=16, mask_padded_vocab=False, n_layers=4, d_model=8, n_heads=4,
                 n_kv_heads=4, head_dim=2, d_ff=16, window=6, pattern="sssf", rope_theta=5e5, yarn=None, norm_eps=1e-6,
                 init_std=0.02, compute_dtype="float32", grad_reduce_dtype="float32")  # fmt: skip
    return model.ModelConfig(**sizes | changes)


def execution(attention=model.dense_attention) -> model.Execution:
    return model.Execution(attention, remat=None, scan_unroll=1, loss_chunk=16)


# --------------------------------------------------------------------------------------------- which keys a query sees

S, WINDOW, SHARDS = 24, 6, 4  # of this picture


def keys_of(window: int | None, segments=None) -> np.ndarray:
    """bool [query, key] of one sequence, as model.visible decides."""
    positions = jnp.arange(S)
    segments = None if segments is None else jnp.asarray(segments)[None]
    mask = model.visible(model.Places(positions, positions, segments, segments), window)
    return np.asarray(mask).reshape(S, S)


def context_keys_of(window: int | None) -> np.ndarray:
    """int [query, key]: the context shard that computes this pair, -1 where the query does not see the key."""
    mesh = jax.make_mesh((1, 1, SHARDS, 1), model.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)

    def places(positions_S):
        where = model.locate(model.vary(positions_S), None, window, execution())
        q_pos, k_pos = where.places.q_pos, where.places.k_pos
        return q_pos[None], k_pos[None], model.visible(where.places, where.window)[None]

    mapped = jax.shard_map(places, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False)
    owner = np.full((S, S), -1)
    for shard, (q_pos, k_pos, mask) in enumerate(zip(*map(np.asarray, mapped(jnp.arange(S))), strict=True)):
        q, k = np.nonzero(mask)
        owner[q_pos[q], k_pos[k]] = shard
    return owner


def draw_keys(path: Path) -> None:
    documents = np.repeat([0, 1, 2], [9, 5, S - 14])
    fig, axes = plt.subplots(1, 5, figsize=(13, 3.3), layout="constrained")
    for ax, title, mask in (
        (axes[0], f"sliding layer, window {WINDOW}", keys_of(WINDOW)),
        (axes[1], "full layer", keys_of(None)),
        (axes[2], "full layer, three documents", keys_of(None, documents)),
    ):
        ax.imshow(mask, cmap=ListedColormap(["white", COLORS[0]]), vmin=0, vmax=1)
        ax.set_title(title, fontsize=10)
    for ax, kind, window in ((axes[3], "sliding", WINDOW), (axes[4], "full", None)):
        ax.imshow(context_keys_of(window), cmap=ListedColormap(["white", *COLORS[:SHARDS]]), vmin=-1, vmax=SHARDS - 1)
        ax.set_title(f"{kind}, {SHARDS} context shards", fontsize=10)
    for shard in range(SHARDS):
        axes[4].plot([], [], "s", color=COLORS[shard], label=f"shard {shard}")
    axes[4].legend(fontsize=8, loc="upper right", title="computed by", title_fontsize=8)
    for ax in axes:
        ax.set(xlabel="key", xticks=[0, S // 2, S - 1], yticks=[0, S // 2, S - 1])
    axes[0].set_ylabel("query")
    save(fig, path)


# ------------------------------------------------------------------------------------------------------- learning rate


def learning_rate_of(name: str, points: int = 800) -> tuple[np.ndarray, np.ndarray]:
    """(tokens seen, learning rate) along the run of a recipe."""
    config = load_config(name, "cpu", [])
    steps = np.unique(np.linspace(1, config.run.steps, points).astype(np.int64))
    return steps * config.tokens_a_step, optim.learning_rate(config.optim, config.schedule, steps)


def draw_learning_rate(path: Path) -> None:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", width_ratios=(3, 2))
    for i, (name, label) in enumerate(
        (("stage1", "stage1.yaml: one cosine"), ("stage1_ai2", "stage1_ai2.yaml: as Ai2 ran it"))
    ):
        tokens, lr = learning_rate_of(name)
        left.plot(tokens / 1e12, lr, color=COLORS[i], ls="-" if i else "--", label=label)
    left.set(xlabel="trillions of tokens", ylabel="learning rate", title="stage 1")
    for i, name in enumerate(("stage2", "stage3"), start=2):
        tokens, lr = learning_rate_of(name)
        right.plot(tokens / 1e9, lr, color=COLORS[i], label=f"{name}.yaml")
    right.set(xlabel="billions of tokens", title="stages 2 and 3")
    for ax in (left, right):
        ax.set_ylim(0)
        ax.legend(fontsize=9)
        ax.grid(alpha=0.3)
    save(fig, path)


# ------------------------------------------------------------------------------------------- which device holds what


def blocks_of(shape: tuple[int, int], spec: P, sizes: tuple[int, ...]) -> dict[tuple, list[int]]:
    """((first row, last row), (first column, last column)) -> the devices that hold this block, as jax places it."""
    mesh = jax.make_mesh(sizes, model.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)
    held: dict[tuple, list[int]] = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        bounds = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(device.id)
    return held


def draw_shards(path: Path) -> None:
    config = tiny_model()
    table = model.ledger(config)
    tensors = (
        ("embed [V, D]", table["embed"].shape, table["embed"].spec),
        ("wq of a layer [D, A]", table["wq"].shape[1:], P(*table["wq"].spec[1:])),
        ("tokens of a batch [B, S]", (8, 16), P(BATCH_AXES, "context")),
    )
    meshes = ((2, 2, 1, 2), (1, 2, 2, 2))
    fig, axes = plt.subplots(len(meshes), len(tensors), figsize=(11, 6.4), layout="constrained")
    for row, sizes in zip(axes, meshes, strict=True):
        for ax, (title, shape, spec) in zip(row, tensors, strict=True):
            for i, (((top, bottom), (left, right)), devices) in enumerate(
                sorted(blocks_of(shape, spec, sizes).items())
            ):
                box = plt.Rectangle((left, top), right - left, bottom - top, color=COLORS[i], alpha=0.35, ec="k")
                ax.add_patch(box)
                text = "device " + ", ".join(map(str, devices))
                ax.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=8, wrap=True)
            axis = " x ".join(f"{name} {n}" for name, n in zip(model.AXES, sizes, strict=True) if n > 1)
            ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[], yticks=[])
            ax.set_title(f"{title}\n{axis}", fontsize=9)
    save(fig, path)


# --------------------------------------------------------------------------------------------------- order of the data

INSTANCES, BATCH, HOSTS, BATCHES = 6400, 32, 32, 100


def order_of() -> np.ndarray:
    """[batch, row]: the instances of the first hundred batches, half an epoch, in Ai2's order."""
    order = data.epoch_order("olmo_core", INSTANCES, 34521, 1, None)
    return np.asarray(order[: BATCHES * BATCH]).reshape(BATCHES, BATCH)


def double_sharded_of() -> np.ndarray:
    """The same as a loader reads that shards what is sharded already.

    MaxText's sampler gives host h of H a block of the permutation, from which the loader takes every H-th, from the h-th
    on. So a host is through its block H times too soon, and begins the next epoch's permutation."""
    block, rows = INSTANCES // HOSTS, BATCH // HOSTS
    batches = np.empty((BATCHES, BATCH), np.int64)
    for host in range(HOSTS):
        epoch, position = np.divmod(np.arange(BATCHES * rows) * HOSTS + host, block)
        orders = {e: data.epoch_order("olmo_core", INSTANCES, 34521, int(e) + 1, None) for e in np.unique(epoch)}
        read = [orders[e][host * block + p] for e, p in zip(epoch, position, strict=True)]
        batches[:, host * rows : (host + 1) * rows] = np.reshape(read, (BATCHES, rows))
    return batches


def repeats_of(batches: np.ndarray) -> np.ndarray:
    """bool [batch, row]: this instance has been trained on in an earlier batch or row."""
    first = np.unique(batches, return_index=True)[1]
    again = np.ones(batches.size, bool)
    again[first] = False
    return again.reshape(batches.shape)


def draw_order(path: Path) -> None:
    fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for ax, title, batches in (
        (axes[0], "Ai2's order, and ours", order_of()),
        (axes[1], f"sharded twice, {HOSTS} hosts", double_sharded_of()),
    ):
        number = np.repeat(np.arange(1, BATCHES + 1)[:, None], BATCH, axis=1)
        again = repeats_of(batches)
        ax.plot(number[~again], batches[~again], ".", ms=1.5, color=COLORS[0], label="first time")
        ax.plot(number[again], batches[again], ".", ms=2.5, color=COLORS[5], label="seen before")
        ax.set(xlabel="batch", title=f"{title}: {again.mean():.0%} of the rows seen before")
        ax.legend(fontsize=9, loc="upper right", markerscale=5)
    axes[0].set_ylabel("instance, by its place in the corpus")
    save(fig, path)


# ------------------------------------------------------------------------------------------- traffic along one layer


class Event(NamedTuple):
    """One thing that a device does in a layer."""

    kind: str  # all-gather | reduce-scatter | all-reduce | product
    what: str  # the weight that is moved, or the function of model.py
    shape: tuple[int, ...]  # of its operand, of one device
    size: float  # MB sent, or TFLOP


def layer_of(devices: int = 512) -> tuple[list[Event], list[Event]]:
    """(forward, backward) of one full layer of stage 1 with one sequence a device, in the order of the program."""
    config = load_config("stage1", "v5p", ["mesh={data: 8, fsdp: 32, context: 1, tensor: 2}"])
    mesh, c = plan.abstract_mesh(config, devices), config.model
    table = model.ledger(c)
    specs = {name: P(*table[name].spec[1:]) for name in model.LAYER_TENSORS}
    w = {name: jax.ShapeDtypeStruct(table[name].shape[1:], jnp.float32) for name in model.LAYER_TENSORS}
    S = config.data.sequence_length
    x = jax.ShapeDtypeStruct((devices // 2 * S, c.d_model), c.compute_dtype)  # a sequence for each pair along tensor

    def apply(w, x_ND):
        of_kind = model.geometry(c, jnp.arange(S), None, execution())
        return model.layer(model.vary(x_ND), model.vary(w), *of_kind["f"], c, execution(), 3)

    def mapped(body, *arguments):
        in_specs = (specs, *(P(BATCH_AXES, None),) * (len(arguments) - 1))
        out = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(BATCH_AXES), check_vma=False)
        return events(jax.jit(out).trace(*arguments).jaxpr.jaxpr, mesh)

    forward, both = mapped(apply, w, x), mapped(partial(gradients_of, apply), w, x, x)
    return named(forward, "all-gather"), named(both[len(forward) :], "reduce-scatter")


def named(row: list[Event], kind: str) -> list[Event]:
    """With the names of weights. JAX hands the layer's tensors over by name, and takes them back in reverse."""
    names = iter(sorted((n for n in model.LAYER_TENSORS if n.startswith("w")), reverse=kind == "reduce-scatter"))
    return [event._replace(what=next(names)) if event.kind == kind else event for event in row]


def gradients_of(apply, w, x_ND, dy_ND):
    """All gradients, as one array whose making needs every one of them."""
    dw, dx_ND = jax.vjp(apply, w, x_ND)[1](dy_ND)
    return dx_ND + sum(jnp.sum(g) for g in dw.values()).astype(dx_ND.dtype)


def events(jaxpr, mesh) -> list[Event]:
    found = []
    for eqn, _, path in plan.equations(jaxpr):
        what = plan.where(path).split(" in ")[0]
        name, x = eqn.primitive.name, eqn.invars[0].aval if eqn.invars else None
        n = math.prod(mesh.shape[axis] for axis in plan.named_axes(eqn)) if name in plan.KINDS else 1
        if n > 1:
            sent = plan.bytes_sent(plan.KINDS[name], x.size * x.dtype.itemsize, n)
            found.append(Event(plan.KINDS[name], what, x.shape, sent / 1e6))
        elif name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            flops = 2 * eqn.outvars[0].aval.size * math.prod(x.shape[i] for i in contracted)
            found.append(Event("product", what, x.shape, flops / 1e12))
    return [e for e in found if e.size > 0.05]


def draw_layer(path: Path) -> None:
    fig, axes = plt.subplots(2, 1, figsize=(11, 6.6), layout="constrained")
    style = {"all-gather": COLORS[0], "product": COLORS[7], "all-reduce": COLORS[1], "reduce-scatter": COLORS[5]}
    for ax, title, row in zip(axes, ("forward", "backward"), layer_of(), strict=True):
        other = ax.twinx()
        for i, event in enumerate(row):
            on, sign = (other, 1) if event.kind == "product" else (ax, 1 if event.kind == "all-gather" else -1)
            on.bar(i, sign * event.size, color=style[event.kind], width=0.85)
        most = max(e.size for e in row if e.kind != "product"), max(e.size for e in row if e.kind == "product")
        ax.set(ylim=(-1.15 * most[0], 1.15 * most[0]), ylabel="MB a device sends", title=title)
        ax.set_xticks(
            range(len(row)), [event.what.removesuffix("_block") for event in row], rotation=60, ha="right", fontsize=8
        )
        other.set(ylim=(-1.15 * most[1], 1.15 * most[1]), ylabel="TFLOP of a product")
        ax.axhline(0, color="k", lw=0.6)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=kind) for kind, color in style.items()]
    fig.legend(handles=handles, fontsize=9, ncols=4, loc="outside upper center")
    save(fig, path)


# ---------------------------------------------------------------------------------------------------------- skip rule

SKIP_STEPS, SPIKE, SECOND = 160, 90, 110


def skip_of() -> dict[str, np.ndarray]:
    """By step: a loss with two spikes, the highest loss that the rule accepts, and what it skipped."""
    rng = np.random.default_rng(5)
    losses = (2.6 + 2.0 * np.exp(-np.arange(SKIP_STEPS) / 30) + 0.02 * rng.standard_normal(SKIP_STEPS)).astype(
        np.float32
    )
    losses[[SPIKE, SECOND]] += (1.2, 0.6)
    settings = optim.OptimConfig(1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, skip_window=32, skip_sigma=6.0, max_nonfinite_steps=3)
    tx = optim.skip_step_adamw(settings, (optim.SchedulePiece(None, "constant", 0, 1, 1.0),), {"w": True})
    params = {"w": jnp.ones(1)}
    candidates = jnp.linspace(2.0, 6.0, 4001)

    def update(state, inputs):
        step, loss = inputs
        spikes = jax.vmap(lambda x: optim.is_spike(state.losses, state.recorded, x, settings.skip_sigma))(candidates)
        highest = jnp.max(jnp.where(spikes, -jnp.inf, candidates))
        _, state = tx.update(params, state, params, loss=loss, grad_norm=jnp.float32(1), step=step)
        return state, (highest, state.skipped)

    steps = jnp.arange(1, SKIP_STEPS + 1)
    _, (highest, skipped) = jax.lax.scan(update, tx.init(params), (steps, jnp.asarray(losses)))
    return {"step": np.asarray(steps), "loss": losses, "highest": np.asarray(highest), "skipped": np.asarray(skipped)}


def draw_skip(path: Path) -> None:
    r = skip_of()
    fig, ax = plt.subplots(figsize=(10, 4), layout="constrained")
    judged = r["highest"] < 5.99  # before half a window is there, everything is accepted
    ax.plot(r["step"], r["loss"], ".-", ms=4, lw=0.7, color=COLORS[0], label="loss")
    ax.plot(
        r["step"][judged],
        r["highest"][judged],
        color=COLORS[1],
        label="highest loss that is accepted: mean + 6 std of the window",
    )
    ax.plot(r["step"][r["skipped"]], r["loss"][r["skipped"]], "x", ms=10, mew=2, color=COLORS[5], label="step skipped")
    ax.axvspan(
        r["step"][SPIKE] + 1,
        r["step"][SPIKE] + 32,
        color=COLORS[7],
        alpha=0.2,
        lw=0,
        label="the spike is in the window",
    )
    ax.set(xlabel="step", ylabel="cross-entropy", ylim=(2.4, 5.2))
    ax.legend(fontsize=9)
    ax.grid(alpha=0.3)
    save(fig, path)


# ------------------------------------------------------------------------------------------------------- command line

PICTURES = {"keys": draw_keys, "learning_rate": draw_learning_rate, "shards": draw_shards, "order": draw_order,
            "layer": draw_layer, "skip": draw_skip}  # fmt: skip


def save(fig, path: Path) -> None:
    with data.replacing(path) as f:
        fig.savefig(f, dpi=90, format="png", metadata={"Software": None})  # the same bytes from every version
    plt.close(fig)


def tour(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: got a file, expected a folder; fix: another --out")
    out.mkdir(parents=True, exist_ok=True)
    with sole_writer(out):
        for name, draw in PICTURES.items():
            draw(out / f"{name}.png")
            print(out / f"{name}.png")


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "docs/tour"), help="folder of the pictures; default: docs/tour")
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("tour.py", lambda: tour(data.local_path(args.out)))


if __name__ == "__main__":
    sys.exit(main())
