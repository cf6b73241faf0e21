"""Compare runs by the numbers they logged, which scalars.py reads. No jax.

    python compare.py exact A B            the difference of every quantity at every step; exit 0 only if all are 0
    python compare.py curves A B ...       training and held-out loss of runs of three systems: differences, picture
    python compare.py detect A B           does training loss depart where held-out loss does not? exit 1 if so
    python compare.py import-wandb CSV DIR a CSV export of W&B into TensorBoard

For `exact`, A and B are run directories, or files as train.py writes them: one JSON object a line, with "step" and
quantities, in the order of the steps. They are read side by side, a step at a time: runs of any length fit in memory.
Numbers of a clock are left out, since they differ between two runs that compute the same. Their names are
throughput/device/* (speeds) and end in "_s", "(s)" or "time" (durations) or in "timestamp". Everything else is
compared, counts of tokens too. null stands for a number that is not finite. It equals null, and no number; the report
counts the steps at which both runs hold it.

`curves` and `detect` also read folders of TensorBoard event files (ours, MaxText's, or what import-wandb made of
OLMo-core's), CSV exports of W&B, and references by name: references/NAME.csv. A step at which a run holds null is left
out of all runs that are compared, with a note of how many there are.

Exit codes: 0 all equal, nothing found; 1 something differs, or is in one run only, or `detect` fires, or an output cannot
be written; 2 wrong usage, or a file that cannot be read.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from data import DataError, local_path, os_error, progress_bar, replacing
from metrics import Board
from processes import add_json, add_verb, flatten, outline, read_yaml, sole_writer, table
from scalars import Run, Series, event_files, metrics_file, numbers_in_all, read_csv, read_runs, read_steps

CLOCK = re.compile(r"throughput/device/|.*(_s|\(s\)|time|timestamp)$")


# ---------------------------------------------------------------------------------------------------------------- exact


def side_by_side(a: Iterator, b: Iterator) -> Iterator[tuple[int, dict | None, dict | None]]:
    """(step, quantities of A, of B) for every step of either; None where one has no such step."""
    x, y = next(a, None), next(b, None)
    while x or y:
        step = min(z[0] for z in (x, y) if z)
        of_a = x[1] if x and x[0] == step else None
        of_b = y[1] if y and y[0] == step else None
        yield step, of_a, of_b
        x = x if of_a is None else next(a, None)
        y = y if of_b is None else next(b, None)


# -------------------------------------------------------------------------------------------------------------- exact


def difference(a, b) -> float | None:
    """|a - b|; None where no number tells how far they differ (null, text)."""
    if a == b:
        return 0.0
    if any(type(x) not in (int, float) for x in (a, b)):
        return None
    with contextlib.suppress(OverflowError):  # of whole numbers that are no float
        return abs(a - b) if math.isfinite(a - b) else None
    return None


class Quantity:
    """Counts and differences of a quantity at the steps that both runs have."""

    def __init__(self):
        self.compared = self.differing = self.both_null = 0
        self.first = None  # difference
        self.largest, self.largest_at, self.total = 0.0, None, 0.0
        self.only_in = {"a": 0, "b": 0}

    def add(self, step: int, a, b) -> float | None:
        self.compared += 1
        self.both_null += a is None and b is None
        delta = difference(a, b)
        if delta != 0:
            self.differing += 1
            self.first = self.first or {"step": step, "a": a, "b": b, "delta": delta}
            if delta is None or (self.largest is not None and delta > self.largest):
                self.largest, self.largest_at = delta, step
            self.total += 0 if delta is None else delta
        return delta

    def report(self) -> dict:
        mean = self.total / self.compared if self.compared else None
        return {"compared": self.compared, "differing": self.differing, "first_difference": self.first,
                "max_delta": self.largest, "max_delta_step": self.largest_at,
                "mean_delta": mean if self.largest is not None else None, "both_null": self.both_null,
                "only_in": self.only_in}  # fmt: skip


def exact(args: argparse.Namespace) -> dict:
    """The difference of every quantity at every step. `equal` only if nothing differs and neither run lacks a value."""
    span = args.steps or (0, math.inf)
    paths = metrics_file(args.a), metrics_file(args.b)
    quantities: dict[str, Quantity] = {}
    alone = {"a": None, "b": None}  # steps that one run has and the other lacks
    excluded, listed, left_out, compared = set(), [], 0, [0, None, None]
    rows = side_by_side(*(read_steps(path, *span) for path in paths))
    for step, a, b in progress_bar(rows, desc="compared", unit="step", leave=False):
        if a is None or b is None:
            which = "a" if b is None else "b"
            n, first, _ = alone[which] or (0, step, step)
            alone[which] = [n + 1, first, step]
            continue
        compared = [compared[0] + 1, step if compared[1] is None else compared[1], step]
        for tag in sorted(a.keys() | b.keys()):
            if CLOCK.match(tag):
                excluded.add(tag)
                continue
            seen = quantities.setdefault(tag, Quantity())
            if tag in a and tag in b:
                delta = seen.add(step, a[tag], b[tag])
            else:
                seen.only_in["a" if tag in a else "b"] += 1
                delta = None
            if delta == 0 and args.show is not None:
                continue
            if args.show is not None and len(listed) >= args.show:
                left_out += 1
                continue
            row = (step, tag, a.get(tag, "absent"), b.get(tag, "absent"), delta)
            if args.json:
                listed.append(dict(zip(("step", "quantity", "a", "b", "delta"), row, strict=True)))
            else:
                print_row(*row, head=not listed)
                listed.append(None)
    reports = {tag: q.report() for tag, q in sorted(quantities.items())}
    if not compared[0] and not any(alone.values()):
        raise DataError(f"{args.a}, {args.b}: got no step to compare, expected some; fix: check the files and --steps")
    spans = {
        key: value and dict(zip(("steps", "first", "last"), value, strict=True))
        for key, value in (("compared", compared), ("only_in_a", alone["a"]), ("only_in_b", alone["b"]))
    }
    wrong = [tag for tag, r in reports.items() if r["differing"] or any(r["only_in"].values())]
    return {"a": str(paths[0]), "b": str(paths[1])} | spans | {
        "quantities": reports,
        "excluded": sorted(excluded),
        "differing_quantities": wrong,
        "values": listed if args.json else None,
        "values_left_out": left_out,
        "equal": not wrong and not any(alone.values()),
    }  # fmt: skip


def text(x) -> str:
    return "not a number" if x is None else str(x)


def print_row(step, tag, a, b, delta, head: bool) -> None:
    if head:
        print(f"{'step':>8}  {'quantity':<32} {'A':>24} {'B':>24} {'delta':>12}")
    shown = "-" if delta is None else f"{delta:.3g}"
    print(f"{step:>8}  {tag:<32} {text(a):>24} {text(b):>24} {shown:>12}")


def print_report(r: dict) -> None:
    if r["values_left_out"]:
        print(f"... and {r['values_left_out']} more (--all shows every value)")
    print(
        f"{'quantity':<34} {'steps':>8} {'differ':>8} {'first at':>9} {'max delta':>12} {'at step':>8} {'mean delta':>12}"
    )
    for tag, q in r["quantities"].items():
        first = q["first_difference"]["step"] if q["first_difference"] else "-"
        sizes = ["-" if x is None else f"{x:.3g}" for x in (q["max_delta"], q["mean_delta"])]
        at = "-" if q["max_delta_step"] is None else q["max_delta_step"]
        alone = "".join(f"  {n} steps in {run.upper()} only" for run, n in q["only_in"].items() if n)
        print(
            f"{tag:<34} {q['compared']:>8} {q['differing']:>8} {first:>9} {sizes[0]:>12} {at:>8} {sizes[1]:>12}{alone}"
        )
    for run in ("a", "b"):
        if alone := r[f"only_in_{run}"]:
            print(f"in {run.upper()} only: {alone['steps']} steps, {alone['first']} to {alone['last']}")
    for tag, q in r["quantities"].items():
        if q["both_null"]:
            print(
                f"{tag}: not a number in both runs at {q['both_null']} of {q['compared']} steps, which counts as equal"
            )
    print(f"left out, decided by a clock: {', '.join(r['excluded']) or 'nothing'}")
    n, count = r["compared"]["steps"], len(r["quantities"])
    deltas = [q["max_delta"] for q in r["quantities"].values()]
    if r["equal"]:
        print(f"equal: delta = 0 over {n} steps, {count} quantities")
    else:
        largest = "not a number" if None in deltas else f"{max(deltas, default=0):.3g}"
        print(
            f"different: {len(r['differing_quantities'])} of {count} quantities over {n} steps, largest delta {largest}"
        )


# --------------------------------------------------------------------------------------------------------- differences


class Bins(NamedTuple):
    """The mean of A minus that of B over bins of steps, and its standard error: arrays [bins]."""

    centre: np.ndarray
    delta: np.ndarray
    error: np.ndarray
    first: np.ndarray
    last: np.ndarray


def spread(x: np.ndarray) -> float:
    """Standard deviation of single values about a trend that is slow: from successive differences (von Neumann)."""
    return math.sqrt(float(np.mean(np.diff(x) ** 2)) / 2) if len(x) > 1 else math.nan


def compare_bins(a: Series, b: Series, width: int) -> Bins:
    """Bins hold steps 1 to width, width + 1 to 2 width, ... Steps of both runs are paired where at least half of the
    steps of one are steps of the other: the noise of a common batch cancels. Else means are compared. A value that is a
    mean itself (a reference's) is compared with the other run's mean over `width` steps about it. A step at which
    either series is not a number counts in no bin."""
    rows = []  # of Bins; instead of the error the spread of single steps and how many the difference is worth
    a, b = numbers_in_all([a, b])
    for x, y, sign in ((a, b, 1), (b, a, -1)):
        for i in np.flatnonzero(x.counts > 1):
            near = y[(np.abs(y.steps - x.steps[i]) <= width / 2) & (y.counts == 1)]
            if n := len(near.steps):
                delta, worth = sign * (x.values[i] - near.values.mean()), 1 / (1 / n + 1 / x.counts[i])
                rows.append((x.steps[i], delta, spread(near.values), worth, near.steps[0], near.steps[-1]))
    a, b = a[a.counts == 1], b[b.counts == 1]
    of_a, of_b = (a.steps - 1) // width, (b.steps - 1) // width
    for k in np.intersect1d(of_a, of_b):
        x, y = a[slice(*np.searchsorted(of_a, (k, k + 1)))], b[slice(*np.searchsorted(of_b, (k, k + 1)))]
        steps, in_x, in_y = np.intersect1d(x.steps, y.steps, assume_unique=True, return_indices=True)
        if 2 * len(steps) >= min(len(x.steps), len(y.steps)):
            x, y = x[in_x], y[in_y]
            sd, worth = spread(x.values - y.values), len(steps)
        else:
            known = [sd for sd in (spread(x.values), spread(y.values)) if not math.isnan(sd)]
            sd, worth = max(known, default=math.nan), 1 / (1 / len(x.steps) + 1 / len(y.steps))
        both = np.concatenate([x.steps, y.steps])
        rows.append((both.mean(), x.values.mean() - y.values.mean(), sd, worth, both.min(), both.max()))
    centre, delta, sd, worth, first, last = np.array(sorted(rows), np.float64).reshape(-1, 6).T
    # A bin of few steps does not know its own spread well: at least that of four bins on either side counts.
    near = [sd[max(0, i - 4) : i + 5] for i in range(len(sd))]
    pooled = [math.sqrt(np.nanmean(x**2)) if np.isfinite(x).any() else math.nan for x in near]
    return Bins(centre, delta, np.fmax(sd, pooled) / np.sqrt(worth), first, last)


def shared(a: Series, b: Series) -> tuple[np.ndarray, np.ndarray]:
    """(steps, A - B) at the steps of both."""
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return steps, a.values[in_a] - b.values[in_b]


def bin_width(runs: list[Run], asked: int | None) -> int:
    """2,000 steps, as in the case study; a twentieth of the steps that all runs have, where those are few. At least two
    logged steps lie in a bin: a single step has no spread."""
    if asked is not None:
        return asked
    first, last = max(r.training.steps[0] for r in runs), min(r.training.steps[-1] for r in runs)
    logged = [r.training.steps[r.training.counts == 1] for r in runs]
    apart = max((int(np.median(np.diff(steps))) for steps in logged if len(steps) > 1), default=1)
    return int(max(2 * apart, min(2000, (last - first + 1) // 20)))


def smooth(bins: Bins, span: float) -> np.ndarray:
    """The mean of the bins whose centres lie within span / 2."""
    return np.array([bins.delta[np.abs(bins.centre - c) <= span / 2].mean() for c in bins.centre])


def mean_about(series: Series, step: int, width: int) -> float | None:
    """The mean over `width` steps about a step."""
    near = np.abs(series.steps - step) <= width / 2
    return float(np.average(series.values[near], weights=series.counts[near])) if near.any() else None


# -------------------------------------------------------------------------------------------------------------- curves

Z_LABEL = {"none": "", "included": " (with z-loss)", "subtracted": " (z-loss taken off)"}


def landmarks(runs: list[Run], width: int) -> list[int]:
    """Steps of the table: held-out evaluations that all runs have, if they have training losses about them too, thinned
    to ten; eighths of the common steps if there are none."""
    evaluated = [{int(step) for s in r.heldout.values() for step in s.steps} for r in runs]
    common = sorted(set.intersection(*evaluated))
    trained = [step for step in common if all(mean_about(r.training, step, width) is not None for r in runs)]
    if common := trained or common:
        return common[:: -(-len(common) // 10)][:-1] + common[-1:]
    first, last = max(r.training.steps[0] for r in runs), min(r.training.steps[-1] for r in runs)
    return sorted({int(first + (last - first) * i / 8) for i in range(1, 9)}) if first <= last else []


def curves(args: argparse.Namespace) -> dict:
    """Training and held-out loss of two or more runs, and the difference of each to the last one named.

    By bins of steps (--bin) and at landmarks; a table and a picture. A step at which one run's loss is not a number counts
    in no run that it is compared with."""
    runs = read_runs(args)
    *others, base = runs
    width = bin_width(runs, args.bin)
    span = 9 * width if args.smooth is None else args.smooth
    steps = landmarks(runs, width) if args.landmarks is None else args.landmarks
    fig, top, low = new_figure()
    draw_losses(top, runs, width)
    differences, sizes = {}, []
    for i, r in enumerate(others):
        bins = compare_bins(r.training, base.training, width)
        if not len(bins.delta):
            raise DataError(
                f"{r.name}, {base.name}: got training losses at no common steps; fix: a wider --bin, or --steps"
            )
        held = {label: shared(s, base.heldout[label]) for label, s in r.heldout.items() if label in base.heldout}
        held = {label: (at, delta) for label, (at, delta) in held.items() if len(at)}
        sizes += draw_differences(low, i, r.name, bins, held, width, smooth(bins, span), span)
        differences[r.name] = {
            "training": summary(bins.centre, bins.delta),
            "heldout": {label: summary(*both) for label, both in held.items()},
        }
    training = dict(zip([r.name for r in runs], numbers_in_all([r.training for r in runs]), strict=True))
    table = [{"step": step, "training": {name: mean_about(s, step, width) for name, s in training.items()}, "heldout": {
        r.name: {label: float(s.values[s.steps == step][0]) for label, s in r.heldout.items() if step in s.steps}
        for r in runs}} for step in steps]  # fmt: skip
    finish_differences(low, sizes, base.name)
    picture = save_figure(fig, args.png)
    return {"runs": [r.describe() for r in runs], "baseline": base.name, "bin": width, "smooth": span,
            "differences": differences, "landmarks": table, "picture": picture, "notes": notes(runs)}  # fmt: skip


def summary(steps: np.ndarray, delta: np.ndarray) -> dict:
    at = int(np.argmax(np.abs(delta)))
    return {"compared": len(delta), "first": int(steps[0]), "last": int(steps[-1]), "mean": float(delta.mean()),
            "mean_abs": float(np.abs(delta).mean()), "largest": float(delta[at]), "largest_at": int(steps[at]),
            "at_the_end": float(delta[-1])}  # fmt: skip


def notes(runs: list[Run]) -> list[str]:
    """Facts about the runs that the numbers themselves do not tell."""
    lines = [f"{r.name}: {r.system}'s loss{Z_LABEL[r.z_loss]}" for r in runs if r.z_loss != "none"]
    lines += [f"{r.name}: {what} loss is not a number at {n} step{'s'[:n > 1]}, left out of all means that it would be "
              "compared with" for r in runs for what, n in r.nulls().items()]  # fmt: skip
    if len({r.system for r in runs}) > 1:
        lines.append("MaxText numbers steps from 0: its step s is shown as s + 1, the updates done")
    if any(label.endswith("-validation") for r in runs for label in r.heldout):
        lines.append("OLMo-core's held-out loss counts a label more than each document has, and cuts documents otherwise "
                     "than train.py does: between the two, a constant offset of held-out loss means nothing")  # fmt: skip
    return lines


def print_landmarks(r: dict) -> None:
    """Means of training loss about each landmark, held-out losses at it; differences to the last run."""

    def line(step, kind, values):
        known = [f"{v:>12.4f}" if v is not None else f"{'-':>12}" for v in values]
        deltas = [f"{v - values[-1]:>+12.4f}" if None not in (v, values[-1]) else f"{'-':>12}" for v in values[:-1]]
        print(f"{step:>10,}  {kind:<30}", *known, *deltas)

    runs = [run["name"] for run in r["runs"]]
    names = [name[-12:] for name in runs]
    print(f"{'step':>10}  {'loss':<30}", *(f"{n:>12}" for n in (*names, *(f"d {n[-10:]}" for n in names[:-1]))))
    for row in r["landmarks"]:
        line(row["step"], f"training, mean of {r['bin']:,}", [row["training"][run] for run in runs])
        for label in sorted({label for values in row["heldout"].values() for label in values}):
            line(row["step"], f"held-out {label}"[:30], [row["heldout"][run].get(label) for run in runs])
    if r["differences"]:
        rows = [[f"{name} - {r['baseline']}", kind, d["mean"], d["largest"], d["largest_at"], d["at_the_end"]]
                for name, both in r["differences"].items()
                for kind, d in [("training", both["training"]), *((f"held-out {k}", d) for k, d in both["heldout"].items())]]  # fmt: skip
        print(f"\n{table(('difference', 'loss', 'mean', 'largest', 'at step', 'at the end'), rows)}\n")
    print(f"picture: {r['picture']}")


def bin_means(s: Series, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean step, mean value) of every bin that holds something."""
    _, which, n = np.unique((s.steps - 1) // width, return_inverse=True, return_counts=True)
    return np.bincount(which, s.steps) / n, np.bincount(which, s.values) / n


def markers(*several: dict) -> dict[str, str]:
    """label -> marker of at most four held-out sets; "all" only where it is alone."""
    labels = sorted({label for heldout in several for label in heldout})
    return dict(zip([label for label in labels if label != "all"] or labels, "os^D", strict=False))


def new_figure() -> tuple:
    """Curves above, differences below."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure

    matplotlib.rcParams["text.parse_math"] = False  # a run may be called a$b$
    fig = Figure(figsize=(9, 7), layout="constrained")
    axes = fig.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    return fig, *axes


def save_figure(fig, path: Path) -> str:
    for axes in fig.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with replacing(path) as file:
        fig.savefig(file, dpi=90, format=path.suffix[1:])
    return str(path)


def shown(name: str) -> str:
    """A name for a legend, which leaves out what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def what_differs(runs: list[Run]) -> dict[str, str]:
    """Run -> the first three config keys in which it differs from others, for a legend; "" without a config.yaml."""
    configs = {}
    for r in runs:
        path = Path(r.source).parent / "config.yaml"
        try:
            science = read_yaml(path) if path.is_file() else {}
        except ValueError as e:  # a legend is not worth the comparison
            print(f"{e}: left out of the legend", file=sys.stderr)
            science = {}
        science = {section: keys for section, keys in science.items() if section != "hardware"}
        configs[r.name] = {key: x for key, x in flatten(science).items() if key != "run.name"}
    known = [c for c in configs.values() if c]
    keys = [key for key in dict.fromkeys(itertools.chain(*known)) if len({str(c.get(key)) for c in known}) > 1][:3]
    return {name: ", ".join(f"{key} {c.get(key)}" for key in keys) if c else "" for name, c in configs.items()}


def draw_losses(axes, runs: list[Run], width: int) -> None:
    """From the lowest loss to where nine tenths of the bins lie: the first steps would press the rest flat."""
    training, heldout, sets = [], [], markers(*(r.heldout for r in runs))
    dots, different = {"ls": ":", "lw": 1, "ms": 3.5}, what_differs(runs)
    for i, r in enumerate(runs):
        name = shown(r.name) + (f" ({different[r.name]})" if different[r.name] else "")
        steps, means = bin_means(r.training, width)
        training += means.tolist()
        axes.plot(steps, means, color=f"C{i}", lw=1.4, label=f"{name}: training{Z_LABEL[r.z_loss]}")
        for label in sets.keys() & r.heldout.keys():
            s = r.heldout[label]
            heldout += s.values[len(s.values) // 5 :].tolist()
            axes.plot(s.steps, s.values, **dots, color=f"C{i}", marker=sets[label])
    for label, marker in sets.items():
        axes.plot([], [], **dots, color="0.25", marker=marker, label=f"held-out {label}")
    low, high = min(training + heldout), max([float(np.quantile(training, 0.9)), *heldout])
    margin = 0.06 * (high - low) + 1e-3
    axes.set(ylabel="loss (nats/token)", ylim=(low - margin, high + margin), title=", ".join(r.name for r in runs))
    last = [int(r.training.steps[-1]) for r in runs]
    if max(last) >= 10 * min(last):  # the short run would be a line at the left edge
        axes.set_xscale("log")


def draw_differences(
    axes, number: int, name: str, bins: Bins, heldout: dict, width: int, smoothed=None, span=0
) -> list:
    """Of one run to the last; returns sizes for the limits of the axis, without the first tenth of the bins."""
    color, thin, name = f"C{number}", smoothed is not None, shown(name)
    axes.plot(bins.centre, bins.delta, color=color, lw=0.7, alpha=0.5 if thin else 1, marker="" if thin else ".",
              label=f"{name}: training, means of {width:,} steps")  # fmt: skip
    if thin:
        axes.plot(bins.centre, smoothed, color=color, lw=1.8, label=f"{name}: training, smoothed over {span:,} steps")
    sizes = np.abs(bins.delta[len(bins.delta) // 10 :]).tolist()
    for label, marker in markers(heldout).items():
        steps, delta = heldout[label]
        style = {"color": color if number else "0.25", "ls": ":", "lw": 1, "ms": 3.5, "marker": marker}
        axes.plot(steps, delta, **style, label=f"{name}: held-out {label}")
        sizes += np.abs(delta[len(delta) // 10 :]).tolist()
    return sizes


def finish_differences(axes, sizes: list, base: str) -> None:
    bound = 1.15 * max([*sizes, 1e-6])
    axes.axhline(0, color="k", lw=0.6)
    axes.set(xlabel="step", ylabel=f"difference to {base}", ylim=(-bound, bound))


# -------------------------------------------------------------------------------------------------------------- detect


TOLERANCE = "difference of two clean runs of a recipe (the case study's: 0.012 in training, 0.02 in held-out loss)"


def wander(delta: np.ndarray) -> float:
    """Standard deviation of one value about a line through its neighbours: from the median second difference, so that
    neither a trend nor a few jumps count."""
    return float(np.median(np.abs(np.diff(delta, 2)))) / (0.6745 * math.sqrt(6)) if len(delta) > 4 else 0.0


def detect(args: argparse.Namespace) -> dict:
    """Where does training loss of A depart from B's while held-out loss does not? Exit code 1 if anywhere.

    A bin of steps fires where D leaves the band [low, high]:

        low  = min(-max(T, z N), H - z N, 2 H)    with the lowest H
        high = max( max(T, z N), H + z N, 2 H)    with the highest H

    D  nats/token   mean difference (A - B) of training loss in the bin (--bin steps)
    H  nats/token   difference (A - B) of held-out loss, mean over the sets that both have; every value from the
                    evaluation before the bin to the one after it
    N  nats/token   noise of D: its standard error, or the spread of D - H from bin to bin about a line if that is more
    T  nats/token   --tolerance: what two clean runs may differ by
    z  no unit      normal quantile at which all bins together fire by chance in --alpha of comparisons

    N is taken about a line so that a steady departure is no noise. 2 H is allowed because models differ where held-out
    loss moves by half as much as training loss or more. The run whose training loss is lower where a bin fires has
    probably seen the instances before. Both runs need the same training data: another mix shifts training loss alone.
    Bins farther than a bin from any evaluation are not judged."""
    runs = read_runs(args)
    if len(runs) != 2:
        raise DataError(f"got {len(runs)} runs, expected 2; fix: import-wandb makes a folder of each run of a CSV")
    width = bin_width(runs, args.bin)
    labels, steps, held = heldout_difference(*runs)
    bins = compare_bins(runs[0].training, runs[1].training, width)
    lowest, highest = heldout_about(bins, steps, held, width)
    known = np.isfinite(lowest) & np.isfinite(bins.error)
    if not known.any():
        raise DataError(f"{runs[0].name}, {runs[1].name}: got no bin of {width} steps with a held-out loss near and more "
                         "than one training loss, expected some; fix: a wider --bin, or --steps")  # fmt: skip
    bins, lowest, highest = Bins(*(x[known] for x in bins)), lowest[known], highest[known]
    band = find_band(bins, lowest, highest, args.tolerance, args.alpha)
    stretches = find_stretches(bins, band, np.clip(bins.delta, lowest, highest), [r.name for r in runs])
    fig, top, low = new_figure()
    draw_losses(top, runs, width)
    drawn = labels[0] if len(labels) == 1 else f"mean of {len(labels)} sets"
    sizes = draw_differences(low, 0, runs[0].name, bins, {drawn: (steps, held)}, width)
    finish_differences(low, [*sizes, *np.quantile(np.abs([band.low, band.high]), 0.9, axis=1)], runs[1].name)
    low.fill_between(bins.centre, band.low, band.high, color="0.6", alpha=0.25, lw=0,
                     label="no finding: tolerance, noise, half of it held-out")  # fmt: skip
    for axes, (n, stretch) in itertools.product((top, low), enumerate(stretches)):
        axes.axvspan(stretch["first"], stretch["last"], color="tab:red", alpha=0.12, lw=0,
                     label="training loss departs, held-out loss does not" if n == 0 else None)  # fmt: skip
    return {"runs": [r.describe() for r in runs], "equal": same_curves(*runs), "fires": bool(stretches),
            "stretches": stretches, "bin": width,
            "bins_judged": len(bins.delta), "bins_fired": sum(s["bins"] for s in stretches), "z": band.z,
            "tolerance": args.tolerance, "noise": float(np.median(band.noise)), "heldout_sets": labels,
            "mean": {"training": float(bins.delta.mean()), "heldout": float(held.mean())},
            "picture": save_figure(fig, args.png), "notes": notes(runs)}  # fmt: skip


def same_curves(a: Run, b: Run) -> bool:
    """Every training and held-out loss of one is, bit for bit, in the other."""
    pairs = [(a.training, b.training), *((a.heldout[label], b.heldout.get(label)) for label in a.heldout)]
    same = (y is not None and all(map(np.array_equal, x, y)) for x, y in pairs)
    return a.heldout.keys() == b.heldout.keys() and all(same)


def heldout_difference(a: Run, b: Run) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(sets, steps, A - B) of the evaluations that both have: mean over the sets evaluated at a step; "all" only where
    it is alone."""
    labels = sorted(a.heldout.keys() & b.heldout.keys())
    labels = [label for label in labels if label != "all"] or labels
    by_step: dict[int, list[float]] = {}
    for label in labels:
        for step, delta in zip(*shared(a.heldout[label], b.heldout[label]), strict=True):
            by_step.setdefault(int(step), []).append(delta)
    if not by_step:
        raise DataError(f"{a.name}, {b.name}: got no held-out loss of the same set at the same step "
                         f"({sorted(a.heldout)}, {sorted(b.heldout)}), expected some; fix: evaluate both")  # fmt: skip
    steps = sorted(by_step)
    return labels, np.array(steps), np.array([np.mean(by_step[step]) for step in steps])


def heldout_about(bins: Bins, steps: np.ndarray, held: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) H from the evaluation before a bin to the one after it; NaN farther than `width` from any."""
    bounds = []
    for first, last in zip(bins.first, bins.last, strict=True):
        before, after = np.searchsorted(steps, first) - 1, np.searchsorted(steps, last)
        beyond = steps[0] - last > width or first - steps[-1] > width
        near = [math.nan] if beyond else held[max(before, 0) : after + 1]
        bounds.append((np.min(near), np.max(near)))
    return tuple(np.array(bounds).reshape(-1, 2).T)


class Band(NamedTuple):
    """The band of `detect` and its noise N: arrays [bins], in nats/token; and z. The formula stands in `detect`."""

    low: np.ndarray
    high: np.ndarray
    noise: np.ndarray
    z: float


def find_band(bins: Bins, lowest: np.ndarray, highest: np.ndarray, tolerance: float, alpha: float) -> Band:
    z = NormalDist().inv_cdf(1 - alpha / (2 * len(bins.delta)))  # two sides, and every bin may fire (Bonferroni)
    noise = np.maximum(bins.error, wander(bins.delta - (lowest + highest) / 2))
    floor = np.maximum(tolerance, z * noise)
    low = np.minimum.reduce([-floor, lowest - z * noise, 2 * lowest])
    high = np.maximum.reduce([floor, highest + z * noise, 2 * highest])
    return Band(low, high, noise, z)


def find_stretches(bins: Bins, band: Band, held: np.ndarray, names: list[str]) -> list[dict]:
    """Neighbouring bins outside the band on the same side are one stretch."""
    side = np.where(bins.delta < band.low, -1, np.where(bins.delta > band.high, 1, 0))
    stretches = []
    for group in np.split(np.arange(len(side)), np.flatnonzero(np.diff(side)) + 1):
        if side[group[0]]:
            D = bins.delta[group]
            stretches.append({
                "first": int(bins.first[group[0]]), "last": int(bins.last[group[-1]]), "bins": len(group),
                "lower": names[int(D[0] > 0)], "training": float(D.mean()), "heldout": float(held[group].mean()),
                "largest": float(D[np.argmax(np.abs(D))]),
            })  # fmt: skip
    return stretches


def print_verdict(r: dict) -> None:
    a, b = (run["name"] for run in r["runs"])
    for s in r["stretches"]:
        print(f"steps {s['first']:,} to {s['last']:,}: training loss of {a} - {b} is {s['training']:+.4f} (largest "
              f"{s['largest']:+.4f}), held-out loss {s['heldout']:+.4f}: has {s['lower']} seen its instances before?")  # fmt: skip
    if r["equal"]:
        n, points = len(r["runs"][0]["heldout"]), r["runs"][0]["points"]
        print(f"equal: training loss of {a} and {b} is the same at all {points:,} steps, and so is held-out loss of {n} "
              f"set{'s'[:n > 1]}")  # fmt: skip
    elif not r["fires"]:
        bins = f"{r['bins_judged']} bins of {r['bin']:,} steps"
        print(f"within noise: training and held-out loss tell the same in {bins}: {a} - {b} is "
              f"{r['mean']['training']:+.4f} and {r['mean']['heldout']:+.4f} on average")  # fmt: skip
    else:
        print(
            f"fires: training loss departs and held-out loss does not, in {r['bins_fired']} of {r['bins_judged']} bins"
        )
    print(f"picture: {r['picture']}")


# -------------------------------------------------------------------------------------------------------- import-wandb


def import_wandb(args: argparse.Namespace) -> dict:
    """A CSV export of W&B into TensorBoard event files: a chart's (columns RUN - TAG) or a history's (columns TAG).

    The step column is the first of Step, global_step, _step, step, trainer/global_step (--step-column for another).
    Left out: __MIN and __MAX, which repeat RUN - TAG, times, and columns that begin with "_". --map COLUMN=TAG gives a
    column another tag, --map COLUMN= leaves it out. One run is written to DIR, several to DIR/RUN each. The whole file
    is read first. Of a file with a fault nothing is written; its line and column are named (exit code 2)."""
    out = local_path(args.dir)
    runs = read_csv(local_path(args.csv), args.step_column, dict(args.map))
    folders = {run: re.sub(r"[^\w.-]", "_", run) if len(runs) > 1 else "" for run in runs}  # below DIR
    if len(set(folders.values())) < len(runs):
        raise DataError(f"{args.csv}: got runs {sorted(runs)}, expected names that differ as folders; fix: rename them")
    report = {}
    with sole_writer(out):
        for folder in (out / name for name in folders.values()):
            if event_files(folder):
                raise DataError(
                    f"{folder}: got a folder with event files, expected none; fix: another DIR, or delete it"
                )
        place = Path(os.path.realpath(out))  # DIR may be "."
        unfinished = place.with_name(f".{place.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # an import that was killed left it
        for run, scalars in runs.items():
            board = Board(unfinished / folders[run])
            by_step: dict[int, dict[str, float]] = {}
            for tag, values in scalars.items():
                for step, value in values.items():
                    by_step.setdefault(step, {})[tag] = value
            for step in sorted(by_step):
                board.write(step, by_step[step])
            board.close()
            report[run] = {
                "folder": str(out / folders[run]), "steps": len(by_step), "first": min(by_step), "last": max(by_step),
                "tags": {tag: len(values) for tag, values in scalars.items()},
            }  # fmt: skip
        for name in folders.values():  # complete, one file each
            (out / name).mkdir(parents=True, exist_ok=True)
            for file in event_files(unfinished / name):
                os.replace(file, out / name / file.name)
        shutil.rmtree(unfinished)
    return {"csv": args.csv, "runs": report}


# -------------------------------------------------------------------------------------------------------- command line


def natural(word: str) -> int:
    if not 1 <= (n := int(word)) <= 10**12:
        raise ValueError(word)
    return n


def count(word: str) -> int:
    if not 0 <= (n := int(word)) <= 10**12:
        raise ValueError(word)
    return n


def picture(word: str) -> Path:
    if (path := local_path(word)).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a name that ends in .png, .pdf or .svg")
    return path


def positive(word: str) -> float:
    if not 0 < (x := float(word)) < math.inf:
        raise ValueError(word)
    return x


def share(word: str) -> float:
    if not 0 < (x := float(word)) < 1:
        raise ValueError(word)
    return x


def mapping(word: str) -> tuple[str, str]:
    column, equals, tag = word.rpartition("=")
    if not equals:
        raise ValueError(word)
    return column, tag


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, function, show_people, about: str, example: str) -> argparse.ArgumentParser:
        p = add_verb(verbs, name, about, f"python compare.py {example}", function.__doc__)
        p.set_defaults(function=function, show_people=show_people)
        add_json(p)
        return p

    p = verb("exact", exact, print_report, "difference of every quantity at every step; exit 0 if all are 0, else 1",
             "exact runs/straight runs/killed")  # fmt: skip
    p.add_argument("a", metavar="A", help="a run directory or a metrics.jsonl")
    p.add_argument("b", metavar="B")
    p.add_argument("--steps", type=count, nargs=2, metavar=("FIRST", "LAST"), help="these alone; default: all")
    p.add_argument("--show", type=count, default=20, metavar="N", help="values listed, at most (default: %(default)s)")
    p.add_argument("--all", action="store_true", help="list every value of every step, also where nothing differs")

    sources = "run directory, metrics.jsonl, TensorBoard folder, CSV of W&B, or a reference (olmo3-7b, olmo3-7b-stage2)"
    for p, several in (
        (verb("curves", curves, print_landmarks, "two or more runs, aligned by step: differences, table, picture",
              "curves runs/straight runs/killed --png runs/curves.png"), "+"),
        (verb("detect", detect, print_verdict, "does training loss depart where held-out loss does not? exit 1 if so",
              "detect runs/straight runs/killed --png runs/detect.png"), 2),
    ):  # fmt: skip
        p.add_argument("runs", nargs=several, metavar="RUN", help=sources)
        p.add_argument("--bin", type=natural, metavar="STEPS",
                       help="steps averaged; default: 2000, or a 20th of the steps in common if less, but two at least")  # fmt: skip
        p.add_argument("--steps", type=count, nargs=2, metavar=("FIRST", "LAST"), help="these alone; default: all")
        p.add_argument("--z-loss", choices=("refuse", "subtract", "label"), default="refuse",
                       help="where one loss contains z-loss (MaxText's) and another does not; default: %(default)s")  # fmt: skip
        name = "curves" if several == "+" else "detect"
        p.add_argument("--png", type=picture, default=f"runs/{name}.png", help="default: %(default)s")
        if several == "+":
            p.add_argument("--smooth", type=natural, metavar="STEPS", help="of the thick difference; default: 9 bins")
            p.add_argument("--landmarks", type=natural, nargs="+", metavar="STEP",
                           help="of the table; default: held-out evaluations in common")  # fmt: skip
        else:
            about = f"{TOLERANCE}; default: %(default)s"
            p.add_argument("--tolerance", type=positive, default=0.02, metavar="NATS", help=about)
            about = "chance of firing without cause; default: %(default)s"
            p.add_argument("--alpha", type=share, default=0.001, help=about)

    p = verb("import-wandb", import_wandb, lambda report: print(outline(report)),
             "a CSV export of W&B into TensorBoard event files", "import-wandb export.csv runs/ai2")  # fmt: skip
    p.add_argument("csv", metavar="CSV")
    p.add_argument("dir", metavar="DIR")
    p.add_argument("--step-column", metavar="COLUMN", help="the number of the step; default: see above")
    p.add_argument("--map", type=mapping, action="append", default=[], metavar="COLUMN=TAG", help="repeatable")
    args = parser.parse_args(argv)
    if args.verb == "exact":
        args.show = None if args.all else args.show
    return args


def main(argv=None) -> int:
    args = parse_args(argv)
    try:
        with sole_writer(args.png) if hasattr(args, "png") else contextlib.nullcontext():
            report = args.function(args)
    # Not processes.run_command: there any ValueError is wrong input until the inputs are checked. Here inputs are read
    # and judged in one pass, and a ValueError that is no DataError is our own bug, which keeps its traceback.
    except DataError as e:
        print(f"compare.py: error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"compare.py: error: {os_error(e)}", file=sys.stderr)
        return 1
    for note in report.get("notes", ()):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        args.show_people(report)
    return int(not report["equal"] if args.verb == "exact" else report.get("fires", False))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly under "| head"
    sys.exit(main())
