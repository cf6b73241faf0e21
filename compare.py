"""Compare runs by what they logged: metrics.jsonl of one against metrics.jsonl of another. No jax, no siblings.

    python compare.py exact A B      the difference of every quantity at every step; exit code 0 only if all are 0

A and B are run directories, or files as train.py writes them: one JSON object a line, with "step" and quantities, in
the order of the steps. They are read side by side, a step at a time, so that runs of any length fit in memory.

What a clock decides is left out, since it differs between two runs that compute the same. By name: throughput/device/*
(speeds), and whatever ends in "_s", "(s)" or "time" (durations) or in "timestamp". Everything else is compared, counts
of tokens too. null stands for a number that is not finite: equal to null, and to no number.

Exit codes: 0 all equal; 1 something differs, or is in one run only; 2 wrong usage, or a file that cannot be read.
"""

import argparse
import itertools
import json
import math
import operator
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

CLOCK = re.compile(r"throughput/device/|.*(_s|\(s\)|time|timestamp)$")


# ------------------------------------------------------------------------------------------------------------ reading


def metrics_file(run: str) -> Path:
    path = Path(run) / "metrics.jsonl" if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise ValueError(f"{run}: got no file {path}, expected a run directory or a metrics.jsonl; fix: check the path")
    return path


def no_number(name: str):
    raise ValueError(f"{name} is not JSON")


def read_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """(step, quantities) of every whole line; a last line without its end is still being written, or was cut off."""
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                print(f"compare.py: {path}, line {number}: left out, it has no end yet", file=sys.stderr)
                return
            try:
                row = json.loads(line, parse_constant=no_number)
                yield operator.index(row.pop("step")), row
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"{path}, line {number}: got {line[:60]!r} ({e}), expected a JSON object with a step; "
                                 "fix: cut the file before it") from e  # fmt: skip


def read_steps(path: Path, first: float, last: float) -> Iterator[tuple[int, dict]]:
    """(step, its quantities), ascending. A held-out evaluation stands on its own line behind the training step."""
    before = -1
    for step, rows in itertools.groupby(read_lines(path), key=lambda line: line[0]):
        if step <= before:
            raise ValueError(f"{path}: got step {step} after step {before}, expected them to ascend")
        before, merged = step, {}
        for _, row in rows:
            if twice := merged.keys() & row.keys():
                raise ValueError(f"{path}: step {step}: got {min(twice)!r} twice, expected it once")
            merged |= row
        if first <= step <= last:
            yield step, merged


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
    """|a - b|; None where they differ by more than a number can say (null, text)."""
    if a == b:
        return 0.0
    if any(type(x) not in (int, float) for x in (a, b)) or not math.isfinite(a - b):
        return None
    return abs(a - b)


class Quantity:
    """What was seen of one quantity at the steps that both runs have."""

    def __init__(self):
        self.compared = self.differing = 0
        self.first = None  # difference
        self.largest, self.largest_at, self.total = 0.0, None, 0.0
        self.only_in = {"a": 0, "b": 0}

    def add(self, step: int, a, b) -> float | None:
        self.compared += 1
        delta = difference(a, b)
        if delta != 0:
            self.differing += 1
            self.first = self.first or {"step": step, "a": a, "b": b, "delta": delta}
            if delta is None or (self.largest is not None and delta > self.largest):
                self.largest, self.largest_at = delta, step
            self.total += delta or 0
        return delta

    def report(self) -> dict:
        mean = self.total / self.compared if self.compared else None
        return {"compared": self.compared, "differing": self.differing, "first_difference": self.first,
                "max_delta": self.largest, "max_delta_step": self.largest_at,
                "mean_delta": mean if self.largest is not None else None, "only_in": self.only_in}  # fmt: skip


def exact(args: argparse.Namespace) -> dict:
    """The difference of every quantity at every step. `equal` only if nothing differs and neither lacks anything."""
    span = args.steps or (0, math.inf)
    paths = metrics_file(args.a), metrics_file(args.b)
    quantities: dict[str, Quantity] = {}
    alone = {"a": None, "b": None}  # steps that one run has and the other lacks
    excluded, listed, left_out, compared = set(), [], 0, [0, None, None]
    for step, a, b in side_by_side(*(read_steps(path, *span) for path in paths)):
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
        raise ValueError(f"{args.a}, {args.b}: got no step to compare, expected some; fix: check the files and --steps")
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


# -------------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    p = verbs.add_parser(
        "exact", help="difference of every quantity at every step; exit 0 if all are 0, else 1",
        description=exact.__doc__, epilog="example: python compare.py exact runs/straight runs/killed",
    )  # fmt: skip
    p.add_argument("a", metavar="A", help="a run directory or a metrics.jsonl")
    p.add_argument("b", metavar="B")
    p.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"), help="these alone; default: all")
    p.add_argument("--show", type=int, default=20, metavar="N", help="values listed, at most (default: %(default)s)")
    p.add_argument("--all", action="store_true", help="list every value of every step, also where nothing differs")
    p.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    args = parser.parse_args(argv)
    args.show = None if args.all else args.show
    return args


def main(argv=None) -> int:
    args = parse_args(argv)
    try:
        report = exact(args)
    except (ValueError, OSError) as e:
        print(f"compare.py: error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        print_report(report)
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly under "| head"
    sys.exit(main())
