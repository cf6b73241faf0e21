"""A tour in pictures, drawn from the code itself: masks, schedules, shards, order, one layer's traffic, the skip rule.

    python tools/tour.py            six PNGs in docs/tour/, in seconds; docs/tour.md shows them

A function that ends in _of computes what a picture shows, by the code that trains; `draw_...` only draws it. MaxText's
faulty order is the one thing that is not ours. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # read when jax is imported
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (1, 0))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import plan  # noqa: E402
from jax.interpreters.partial_eval import dce_jaxpr  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import data  # noqa: E402
import model  # noqa: E402
import optim  # noqa: E402
from config import batch_specs, load_config  # noqa: E402
from processes import HERE, run_command, sole_writer  # noqa: E402

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")  # Okabe and Ito


def figure(title: str, height: float, rows: int = 1, columns: int = 1, **how):
    """(figure, its axes), 1,000 pixels wide."""
    import matplotlib  # the numbers behind the pictures need none of it

    matplotlib.use("Agg")
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure

    fig = Figure(figsize=(10, height), dpi=100, layout="constrained")
    fig.suptitle(title)
    return fig, fig.subplots(rows, columns, **how)


def mesh_of(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, model.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4)


def named_sizes(mesh) -> str:
    return " x ".join(f"{name} {n}" for name, n in mesh.shape.items())


# --------------------------------------------------------------------------------------------- which keys a query sees

S, WINDOW, SHARDS = 24, 6, 4  # of this picture
DOCUMENTS = np.repeat([0, 1, 2], [9, 5, S - 14])


def keys_of(window: int | None, segments=None, shards: int = SHARDS) -> np.ndarray:
    """int [query, key] of one sequence: the context shard that computes this pair, -1 where no query sees the key."""

    def places(positions_S, segments_BS):
        execution = model.Execution(model.dense_attention, remat=None, scan_unroll=1, loss_chunk=1)
        where = model.locate(model.vary(positions_S), model.vary(segments_BS), window, execution)
        q_pos, k_pos = where.places.q_pos, where.places.k_pos
        return q_pos[None], k_pos[None], model.visible(where.places, where.window).reshape(1, len(q_pos), len(k_pos))

    specs = P("context"), None if segments is None else P(None, "context")
    mesh = mesh_of((1, 1, shards, 1))
    mapped = jax.shard_map(places, mesh=mesh, in_specs=specs, out_specs=P("context"), check_vma=False)
    segments = None if segments is None else jnp.asarray(segments)[None]
    owner = np.full((S, S), -1)
    for shard, (q_pos, k_pos, mask) in enumerate(zip(*map(np.asarray, mapped(jnp.arange(S), segments)), strict=True)):
        q, k = np.nonzero(mask)
        owner[q_pos[q], k_pos[k]] = shard
    return owner


def draw_keys():
    fig, axes = figure("Which keys a query sees, and which context shard computes the pair", 6.6, 2, 3)
    from matplotlib.colors import ListedColormap

    kinds = ((f"sliding layer, window {WINDOW}", WINDOW, None), ("full layer", None, None),
             ("full layer, three documents", None, DOCUMENTS))  # fmt: skip
    for row, shards in zip(axes, (1, SHARDS), strict=True):
        for ax, (title, window, segments) in zip(row, kinds, strict=True):
            colors = ListedColormap(["white", *COLORS[:SHARDS]])
            ax.imshow(keys_of(window, segments, shards), cmap=colors, vmin=-1, vmax=SHARDS - 1)
            ticks = [0, S // 2, S - 1]
            ax.set(title=title if shards == 1 else f"{shards} context shards", xticks=ticks, yticks=ticks)
            ax.set(xlabel="key", ylabel="query")
    for shard in range(SHARDS):
        axes[1, 0].plot([], [], "s", color=COLORS[shard], label=f"shard {shard}")
    axes[1, 0].legend(fontsize=9, loc="upper right")
    return fig


# ------------------------------------------------------------------------------------------------------- learning rate


def learning_rate_of(name: str, points: int = 800) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(tokens seen, learning rate) along the run of a recipe, and the tokens at which one piece follows another."""
    config = load_config(name, "cpu", [])
    joints = [piece.until for piece in config.schedule[:-1]]
    steps = np.unique(np.r_[np.linspace(1, config.run.steps, points).astype(np.int64), joints].astype(np.int64))
    lr = optim.learning_rate(config.optim, config.schedule, steps)
    return steps * config.tokens_a_step, lr, [step * config.tokens_a_step for step in joints]


def draw_learning_rate():
    fig, axes = figure("The learning rate of the three stages", 4, 1, 2, width_ratios=(3, 2))
    recipes = (("stage1", "one cosine", 0, 1e12, "--"), ("stage1_ai2", "Ai2's two parts", 0, 1e12, "-"),
               ("stage2", "linear to zero", 1, 1e9, "-"), ("stage3", "warm-up, linear to zero", 1, 1e9, "-"))  # fmt: skip
    for color, (name, kind, side, unit, line) in zip(COLORS, recipes, strict=False):
        tokens, lr, joints = learning_rate_of(name)
        axes[side].plot(tokens / unit, lr * 1e4, line, color=color, label=f"{name}.yaml: {kind}")
        for joint in joints:
            at = joint / unit, lr[list(tokens).index(joint)] * 1e4
            axes[side].plot(*at, "o", color=color)
            axes[side].annotate(f"{at[0]:.2f}: the second part begins", at, xytext=(-8, -14), ha="right",
                                textcoords="offset points", fontsize=9)  # fmt: skip
    for ax, title, unit in zip(axes, ("stage 1", "stages 2 and 3"), ("trillions", "billions"), strict=True):
        ax.set(title=title, xlabel=f"{unit} of tokens", ylabel="learning rate / 1e-4", ylim=(0, None))
        ax.legend(fontsize=9, loc="upper right")
        ax.grid(alpha=0.3)
    return fig


# ------------------------------------------------------------------------------------------- which device holds what

MESHES = ((2, 2, 1, 2), (1, 2, 2, 2))  # data, fsdp, context, tensor


def tensors_of() -> list[tuple[str, tuple[int, int], P]]:
    """(name, shape, spec) of two matrices and a batch of the quick start, as the ledger and config.py say."""
    config = load_config("quickstart", "cpu", [])
    embed, wq = (model.ledger(config.model)[name] for name in ("embed", "wq"))
    batch = config.data.global_batch, config.data.sequence_length
    return [("embed [V, D]", embed.shape, embed.spec), ("wq of a layer [D, A]", wq.shape[1:], P(*wq.spec[1:])),
            ("tokens of a batch [B, S]", batch, batch_specs(config)["tokens"])]  # fmt: skip


def blocks_of(shape: tuple[int, int], spec: P, sizes: tuple[int, ...]) -> dict[tuple, list[int]]:
    """((first row, end of rows), (first column, end of columns)) -> the devices that hold this block, as jax places it."""
    held: dict[tuple, list[int]] = {}
    for device, index in NamedSharding(mesh_of(sizes), spec).devices_indices_map(shape).items():
        held.setdefault(tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)), []).append(device.id)
    return held


def draw_shards():
    fig, axes = figure("Which of eight devices hold which rows and columns", 6.4, len(MESHES), 3)
    for row, sizes in zip(axes, MESHES, strict=True):
        row[1].set_title(f"mesh: {named_sizes(mesh_of(sizes))}", fontsize=11, pad=24)
        for ax, (title, shape, spec) in zip(row, tensors_of(), strict=True):
            blocks = sorted(blocks_of(shape, spec, sizes).items())
            for color, (((top, bottom), (left, right)), devices) in zip(COLORS, blocks, strict=False):
                ax.fill([left, right, right, left], [top, top, bottom, bottom], color=color, alpha=0.35, ec="k")
                text = "devices " + ", ".join(map(str, devices))
                ax.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=9)
            rows, columns = ({edge for block, _ in blocks for edge in block[i]} for i in (0, 1))
            cut = [axis if isinstance(axis, str) else " and ".join(axis or ("whole",)) for axis in spec]
            ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=sorted(columns), yticks=sorted(rows))
            ax.set(ylabel=f"rows: {cut[0]}", xlabel=f"columns: {cut[1]}")
            ax.text(0.5, 1.03, title, ha="center", transform=ax.transAxes)
    return fig


# --------------------------------------------------------------------------------------------------- order of the data

INSTANCES, BATCH, HOSTS, BATCHES = 6400, 32, 32, 100


def order_of(batches: int = BATCHES) -> np.ndarray:
    """[batch, row]: the instances of the first batches in Ai2's order; 100 are half an epoch."""
    order = data.epoch_order("olmo_core", INSTANCES, 34521, 1, None)
    return np.asarray(order[: batches * BATCH]).reshape(batches, BATCH)


def double_sharded_of(batches: int = BATCHES) -> np.ndarray:
    """The same as a loader reads that shards what is sharded already.

    MaxText's sampler gives host h of H a block of the permutation. Grain's DataLoader with ShardOptions takes every H-th
    of its records, from the h-th on. So a host is through its block H times too soon, and begins the next epoch's.
    Source: the case study's first data bug, which grain.sharding.NoSharding mends.
    """
    block, rows = INSTANCES // HOSTS, BATCH // HOSTS
    read = np.empty((batches, BATCH), np.int64)
    for host in range(HOSTS):
        epoch, position = np.divmod(np.arange(batches * rows) * HOSTS + host, block)
        orders = [data.epoch_order("olmo_core", INSTANCES, 34521, e + 1, None) for e in range(epoch[-1] + 1)]
        read[:, host * rows : (host + 1) * rows] = np.stack(orders)[epoch, host * block + position].reshape(-1, rows)
    return read


def repeats_of(batches: np.ndarray) -> np.ndarray:
    """bool [batch, row]: this instance has been trained on in an earlier batch or row."""
    first = np.unique(batches, return_index=True)[1]
    return ~np.isin(np.arange(batches.size), first).reshape(batches.shape)


def draw_order():
    fig, axes = figure(f"Where the instances of the first {BATCHES} batches lie in the corpus", 4.4, 1, 2, sharey=True)
    for ax, title, batches in ((axes[0], "Ai2's order, and ours", order_of()),
                               (axes[1], f"MaxText's, sharded twice, {HOSTS} hosts", double_sharded_of())):  # fmt: skip
        number, again = np.indices(batches.shape)[0] + 1, repeats_of(batches)
        ax.plot(number[~again], batches[~again], ".", ms=1.5, color=COLORS[0], label="first time")
        ax.plot(number[again], batches[again], ".", ms=3.5, color=COLORS[5], label="trained on before")
        ax.set(xlabel="batch", title=f"{title}: {again.mean():.0%} repeated")
    axes[0].set_ylabel("instance, by its place in the corpus")
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, markerscale=4, fontsize=9)
    return fig


# ------------------------------------------------------------------------------------------- traffic along one layer

LAYER = ("mesh={data: 8, fsdp: 32, context: 1, tensor: 2}", "attention=dense", "model.pattern=f")  # every layer full
DEVICES = 512


class Event(NamedTuple):
    """What a device does once, or several times one after the other, in a layer."""

    phase: str  # forward | recomputed | backward
    kind: str  # all-gather | reduce-scatter | all-reduce | product
    what: str  # the weights of this shape, or the function of model.py
    times: int
    size: float  # of all times: MB sent, or TFLOP


def layer_of() -> list[Event]:
    """One layer of a training step of stage 1, in the order of the program, from the step that plan.py traces.

    Left out: sums of one number a token, below 0.1 MB.
    """
    config = load_config("stage1", "v5p", list(LAYER))
    mesh, layers, table = plan.abstract_mesh(config, DEVICES), config.model.n_layers, model.ledger(config.model)
    of_shape: dict[tuple, list[str]] = {}
    for name in model.LAYER_TENSORS:
        shard = NamedSharding(mesh, table[name].spec).shard_shape(table[name].shape)
        of_shape.setdefault(shard[1:], []).append(name)
    jaxpr = plan.trace_step(config, mesh).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # without what no gradient needs, as plan.py does
    found = []
    for eqn, times, path in plan.equations(jaxpr):
        name, what = eqn.primitive.name, plan.where(path).split(" in ")[0]
        sizes = [mesh.shape[axis] for axis in plan.named_axes(eqn)]
        if times != layers:
            continue  # outside the loop over layers
        if name == "dot_general":
            contracted = math.prod(eqn.invars[0].aval.shape[i] for i in eqn.params["dimension_numbers"][0][0])
            found.append(Event(plan.phase(path), "product", what, 1, 2 * eqn.outvars[0].aval.size * contracted / 1e12))
        elif name in plan.KINDS and (n := math.prod(sizes)) > 1:
            x = eqn.invars[0].aval
            sent = plan.bytes_sent(plan.KINDS[name], x.size * x.dtype.itemsize, n) / 1e6
            shard = min(x, eqn.outvars[0].aval, key=lambda aval: aval.size).shape
            what = what if plan.KINDS[name] == "all-reduce" else " ".join(of_shape[shard])
            found += [Event(plan.phase(path), plan.KINDS[name], what, 1, sent)] if sent >= 0.1 else []
    grouped = [list(same) for _, same in groupby(found, key=lambda e: e[:3])]
    return [e[0]._replace(times=len(e), size=sum(x.size for x in e)) for e in grouped]


def draw_layer():
    mesh = named_sizes(plan.abstract_mesh(load_config("stage1", "v5p", list(LAYER)), DEVICES))
    fig, axes = figure(f"What a device sends and computes in one layer: stage 1 on {mesh}", 7, 2)
    style = {"all-gather": COLORS[0], "all-reduce": COLORS[1], "reduce-scatter": COLORS[5], "product": COLORS[6]}
    found = layer_of()
    forward = [e for e in found if e.phase == "forward"]
    sent, computed = (max(e.size for e in found if (e.kind == "product") == kind) for kind in (False, True))
    axes[0].set_title("forward")
    axes[1].set_title("backward; hatched: made again for it")
    for ax, row in zip(axes, (forward, found[len(forward) :]), strict=True):
        for i, e in enumerate(row):
            up = e.kind != "product"
            height, each = e.size / sent if up else -e.size / computed, e.size / e.times
            text = textwrap.fill(e.what.removesuffix("_block"), 15)
            text += f"\n{e.times} x " + (f"{each:.1f} MB" if up else f"{each:.2f}\nTFLOP")
            ax.bar(i, height, color=style[e.kind], hatch="//" * (e.phase == "recomputed"), ec="white")
            ax.text(i, height, text, ha="center", va="bottom" if up else "top", fontsize=8)
        ax.axhline(0, color="k", lw=0.8)
        ax.set(ylim=(-1.6, 1.6), xlim=(-0.6, len(row) - 0.4), xticks=[], yticks=[], ylabel="computed  |  sent")
    for kind, color in style.items():
        axes[0].bar(0, 0, color=color, label=kind)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


# ---------------------------------------------------------------------------------------------------------- skip rule

SKIP_STEPS, SPIKES, HEIGHTS = 480, (220, 280, 440), (1.2, 0.5, 0.5)  # the second stands in the window of the first


def skip_of() -> dict[str, np.ndarray]:
    """By step, with stage 1's settings: a loss with spikes, the highest loss that the rule accepts (NaN: any), what it
    skipped."""
    settings, steps = load_config("stage1", "cpu", []).optim, jnp.arange(1, SKIP_STEPS + 1)
    noise = 0.02 * np.random.default_rng(5).standard_normal(SKIP_STEPS)
    losses = jnp.asarray(2.6 + 2.0 * np.exp(-np.arange(SKIP_STEPS) / 40) + noise, jnp.float32)
    losses = losses.at[np.array(SPIKES) - 1].add(np.array(HEIGHTS))
    tx = optim.skip_step_adamw(settings, (optim.SchedulePiece(None, "constant", 0, 1, 1.0),), {"w": True})
    params, candidates = {"w": jnp.ones(1)}, jnp.linspace(2.0, 12.0, 10001)

    def update(state, inputs):
        step, loss = inputs
        spikes = jax.vmap(lambda x: optim.is_spike(state.losses, state.recorded, x, settings.skip_sigma))(candidates)
        highest = jnp.where(spikes.any(), jnp.max(jnp.where(spikes, -jnp.inf, candidates)), jnp.nan)
        _, state = tx.update(params, state, params, loss=loss, grad_norm=jnp.float32(1), step=step)
        return state, (highest, state.skipped)

    _, (highest, skipped) = jax.lax.scan(update, tx.init(params), (steps, losses))
    return {"step": np.asarray(steps), "loss": np.asarray(losses), "highest": np.asarray(highest),
            "skipped": np.asarray(skipped)}  # fmt: skip


def draw_skip():
    fig, ax = figure("The skip rule: a spike raises the band while it is in the window", 4.6)
    settings, r = load_config("stage1", "cpu", []).optim, skip_of()
    step, skipped, n = r["step"], r["skipped"], settings.skip_window
    ax.plot(step, r["loss"], ".-", ms=3, lw=0.7, color=COLORS[0], label="loss")
    label = f"highest loss accepted: mean + {settings.skip_sigma:g} std of the last {n}"
    ax.plot(step, r["highest"], color=COLORS[1], label=label)
    ax.plot(step[skipped], r["loss"][skipped], "x", ms=10, mew=2, color=COLORS[5], label="step skipped")
    ax.axvspan(
        SPIKES[0] + 1, SPIKES[0] + n, color=COLORS[6], alpha=0.25, lw=0, label="the first spike is in the window"
    )
    judged = step[np.isfinite(r["highest"])][0]
    ax.axvspan(1, judged, color=COLORS[4], alpha=0.25, lw=0, label="not yet half a window: nothing is skipped")
    ax.set(xlabel="step", ylabel="cross-entropy", ylim=(2.4, 5.2), xlim=(1, SKIP_STEPS))
    ax.legend(fontsize=9, loc="upper right")
    ax.grid(alpha=0.3)
    return fig


# ------------------------------------------------------------------------------------------------------- command line

PICTURES = {"keys": draw_keys, "learning_rate": draw_learning_rate, "shards": draw_shards, "order": draw_order,
            "layer": draw_layer, "skip": draw_skip}  # fmt: skip


def tour(given: str) -> None:
    out = data.local_path(given)
    if not given or any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
        raise ValueError(f"--out {given!r}: got no folder, expected one or a new name; fix: another --out")
    if jax.device_count() < math.prod(MESHES[0]):
        raise ValueError(f"devices: got {jax.device_count()}, expected {math.prod(MESHES[0])}; fix: unset XLA_FLAGS "
                         "and JAX_NUM_CPU_DEVICES")  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with sole_writer(out):
        for name, draw in PICTURES.items():
            with data.replacing(out / f"{name}.png") as f:
                draw().savefig(f, format="png", metadata={"Software": None})  # the same bytes from every version
            print(out / f"{name}.png")


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "docs/tour"), help="folder of the pictures; default: docs/tour")
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("tour.py", lambda: tour(args.out))


if __name__ == "__main__":
    sys.exit(main())
