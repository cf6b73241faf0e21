"""What runs of three systems logged, as series by step: metrics.jsonl, TensorBoard, CSV exports of W&B, references.

Ours and OLMo-core log cross-entropy alone; MaxText's loss contains the z-loss. `read_runs` brings them under one set of
names and refuses to lay one beside the other unasked. TensorBoard's files are read here, record by record: at a
wrong checksum its own EventAccumulator leaves out the rest of the file without a word. No jax.
"""

import argparse
import contextlib
import csv
import itertools
import json
import math
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import DataError, local_path, os_error, progress_bar

# ------------------------------------------------------------------------------------------------------------ reading


@contextlib.contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """An input that cannot be read is wrong input (exit code 2). An output that cannot be written is not (1)."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as e:
        why = os_error(e) if isinstance(e, OSError) else f"{what}: byte {e.start} is not UTF-8"
        raise DataError(f"{why}; fix: check the file") from e


def metrics_file(run: str) -> Path:
    path = local_path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{run}: got no file {path}, expected a run directory or a metrics.jsonl; fix: check the path")
    return path


def no_number(name: str):
    raise ValueError(f"{name} is not JSON")


def read_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """(step, quantities) of every whole line. A last line without its end is still being written, or lost its rest.

    Stricter than metrics.read_metrics, which reads our own file for a restart: NaN is refused, a line that is left out
    is named."""
    with reading(path), open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                print(f"compare.py: {path}, line {number}: left out, it has no end yet", file=sys.stderr)
                return
            try:
                row = json.loads(line, parse_constant=no_number)
                step = operator.index(row.pop("step"))
                if not 0 <= step < 2**63:
                    raise ValueError(f"step {step}")
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise DataError(f"{path}, line {number}: got {line[:60]!r} ({e}), expected a JSON object with a step; "
                                "fix: cut the file before it") from e  # fmt: skip
            yield step, row


def read_steps(path: Path, first: float, last: float) -> Iterator[tuple[int, dict]]:
    """(step, its quantities), ascending. A held-out evaluation stands on its own line behind the training step."""
    before = -1
    for step, rows in itertools.groupby(read_lines(path), key=lambda line: line[0]):
        if step <= before:
            raise DataError(f"{path}: got step {step} after step {before}, expected them to ascend")
        before, merged = step, {}
        for _, row in rows:
            if twice := merged.keys() & row.keys():
                raise DataError(f"{path}: step {step}: got {min(twice)!r} twice, expected it once")
            merged |= row
        if first <= step <= last:
            yield step, merged


# ------------------------------------------------------------------------------------------------- curves of any system


class System(NamedTuple):
    """How a system names its losses. A tag may have lost its spaces: TensorBoard's writers put "_" in their place."""

    training: re.Pattern
    heldout: re.Pattern  # group 1: the label of the held-out set
    z_losses: tuple[str, str] | None  # tags of the z-loss inside training and inside held-out loss; None: not inside
    shift: int  # updates done when it logs step 0


# OLMo-core: train_module.py, evaluator_callback.py. train.py logs under the same names. They hold cross-entropy alone;
# "train/Z loss" stands beside it. MaxText: max_utils.py:cross_entropy_with_logits adds the z-loss to each token's loss.
# Its lm_loss, perplexity and avg_loss contain the z-loss. It numbers a step by the updates done before.
SYSTEMS = {
    "OLMo-core": System(re.compile(r"train/CE[ _]loss"), re.compile(r"eval/lm/(.+)/CE[ _]loss"), None, 0),
    "MaxText": System(
        re.compile(r"learning/lm_loss"), re.compile(r"(eval)/avg_loss"), ("learning/z_loss", "eval/avg_z_loss"), 1
    ),
}
COUNT = " count"  # a column of ours: over how many steps about its own a value is the mean; absent: one step
WANTED = re.compile("|".join(
    f"(?:{p.pattern}(?:{COUNT})?)" for s in SYSTEMS.values() for p in (s.training, s.heldout, *map(re.compile, s.z_losses or ()))
))  # fmt: skip
REFERENCES = Path(__file__).resolve().parent / "references"

Scalars = dict[str, dict[int, float]]  # tag -> step -> value


def read_metrics(path: Path) -> Scalars:
    scalars: Scalars = {}
    for step, row in progress_bar(read_steps(path, 0, math.inf), desc=str(path), unit="line", leave=False):
        for tag, value in row.items():
            if WANTED.fullmatch(tag):
                if value is not None and (type(value) not in (int, float) or not abs(value) < 2**1024):
                    raise DataError(f"{path}: step {step}: got {tag!r} {value!r}, expected a number or null")
                scalars.setdefault(tag, {})[step] = math.nan if value is None else float(value)
    return scalars


def read_events(path: Path) -> Iterator:
    """Event messages of a TensorBoard file: length (u64), its masked CRC-32C (u32), message, its CRC; little-endian.

    A last record that is not whole is still being written, or its writer was killed. It is left out, with a note."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with reading(path), open(path, "rb") as file:
        while True:
            at, head = file.tell(), file.read(12)
            length = int.from_bytes(head[:8], "little")
            if whole := len(head) == 12:
                if masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
                    raise DataError(f"{path}, byte {at}: got a length with a wrong checksum, expected a TensorBoard event "
                                     "file; fix: cut it off there, or take another copy")  # fmt: skip
                body = file.read(length + 4)
                whole = len(body) == length + 4
            if not whole:
                if head:
                    print(f"compare.py: {path}, byte {at}: left out, the record has no end yet", file=sys.stderr)
                return
            if masked_crc32c(body[:-4]) != int.from_bytes(body[-4:], "little"):
                raise DataError(f"{path}, byte {at}: got a record with a wrong checksum; fix: take another copy")
            try:
                event = Event.FromString(body[:-4])
            except DecodeError as e:
                raise DataError(f"{path}, byte {at}: got a record that is no TensorBoard event ({e})") from e
            yield event


def event_files(folder: Path) -> list[Path]:
    """In the order of their beginning, which their names hold."""
    return sorted(p for p in folder.glob("*tfevents*") if p.is_file())


def read_board(files: list[Path]) -> Scalars:
    """As TensorBoard shows them: steps that a restarted run purges are gone. Of two values of a step the last counts."""
    scalars: Scalars = {}
    for path in files:
        for event in progress_bar(read_events(path), desc=str(path), unit="event", leave=False):
            if event.session_log.status == event.session_log.START:
                for values in scalars.values():
                    for step in [s for s in values if s >= event.step]:
                        del values[step]
            for value in event.summary.value:
                if WANTED.fullmatch(value.tag):
                    if (kind := value.WhichOneof("value")) != "simple_value":  # of a tensor it would be 0.0
                        raise DataError(f"{path}: step {event.step}: got {value.tag!r} as {kind}, expected simple_value; "
                                         "fix: export the run as CSV")  # fmt: skip
                    scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


STEP_COLUMNS = ("Step", "global_step", "_step", "step", "trainer/global_step")
NO_QUANTITY = re.compile(r"(|Unnamed: \d+|_\w+|Wall Time|Relative Time.*|.*__(MIN|MAX))")


def read_csv(path: Path, step_column: str | None = None, names: dict[str, str] | None = None) -> dict[str, Scalars]:
    """Runs of a CSV export of W&B: of a chart ("RUN - TAG" columns) or of a history (TAG columns; the run is "").

    Left out: __MIN and __MAX (the range of RUN - TAG), times, and columns that begin with "_". `names`: column -> tag,
    "" leaves it out. An empty cell was not logged. Lines before the header may be comments (#)."""
    names, runs, before = names or {}, {}, -1
    with reading(path), open(path, encoding="utf-8-sig", newline="") as file:
        skipped = 0
        while (line := file.readline()).startswith("#"):
            skipped += 1
        rows = csv.reader(itertools.chain([line], file), strict=True)
        try:
            header = next(rows, [])
            known = [c for c in ((step_column,) if step_column else STEP_COLUMNS) if c in header]
            if not known or len(set(header)) < len(header):
                got = f"{header}" if not known else f"{[c for c in header if header.count(c) > 1][0]!r} twice"
                raise DataError(f"{path}, line {skipped + 1}: got columns {got}, expected each once and one of "
                                 f"{step_column or ', '.join(STEP_COLUMNS)}; fix: import-wandb --step-column")  # fmt: skip
            if unknown := names.keys() - set(header):
                raise DataError(f"{path}: got no column {min(unknown)!r}, expected one of {header}; fix: --map")
            columns = {}  # position -> (run, tag)
            for i, column in enumerate(header):
                if names.get(column) or not (
                    column in names or column in STEP_COLUMNS or NO_QUANTITY.fullmatch(column)
                ):
                    run, _, tag = column.rpartition(" - ")
                    columns[i] = (run, names.get(column, tag))
            for row in rows:
                where = f"{path}, line {rows.line_num + skipped}"
                if len(row) != len(header):
                    raise DataError(f"{where}: got {len(row)} cells, expected {len(header)}; fix: export it again")
                step = csv_number(row[header.index(known[0])], where, known[0])
                if step != int(step) or step <= before:
                    raise DataError(f"{where}, column {known[0]!r}: got {step:g} after {before}, expected whole numbers "
                                     "that ascend; fix: sort the file by it, and leave one row a step")  # fmt: skip
                before = int(step)
                for i, (run, tag) in columns.items():
                    if row[i] != "":
                        value = csv_number(row[i], where, header[i], finite=False)
                        runs.setdefault(run, {}).setdefault(tag, {})[before] = value
        except csv.Error as e:
            raise DataError(f"{path}, line {rows.line_num + skipped}: {e}, expected CSV; fix: export it again") from e
    if not runs:
        raise DataError(f"{path}: got no value in {header}, expected columns RUN - TAG or TAG; fix: export again")
    return runs


def csv_number(cell: str, where: str, column: str, finite: bool = True) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = None
    if value is None or (finite and not abs(value) < 2**63):  # a step
        raise DataError(f"{where}, column {column!r}: got {cell!r}, expected a number; fix: correct it there, or leave the "
                         f"column out (import-wandb --map '{column}=')")  # fmt: skip
    return value


class Series(NamedTuple):
    """A quantity by step: steps int64, values float64, and how many steps each value is the mean of; equal lengths."""

    steps: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    null: np.ndarray = np.array([], np.int64)  # steps at which the logged value is not a number

    @classmethod
    def of(cls, values: dict[int, float], counts: dict[int, float], shift: int) -> "Series":
        steps = np.array(sorted(s for s, v in values.items() if math.isfinite(v)), np.int64)
        null = np.array(sorted(values.keys() - set(steps.tolist())), np.int64)
        ordered = [[values[s], counts.get(s, 1)] for s in steps.tolist()]
        both = np.array(ordered, np.float64).reshape(-1, 2)
        return cls(steps + shift, both[:, 0], both[:, 1], null + shift)

    def __getitem__(self, which) -> "Series":
        return Series(*(x[which] for x in tuple(self)[:3]), self.null)

    def between(self, first: float, last: float) -> "Series":
        null = self.null[(self.null >= first) & (self.null <= last)]
        return self[(self.steps >= first) & (self.steps <= last)]._replace(null=null)


def numbers_in_all(several: list[Series]) -> list[Series]:
    """Without the steps at which any series is not a number: its mean would lack a step that the others' means hold."""
    null = np.unique(np.concatenate([s.null for s in several]))
    return [s[~np.isin(s.steps, null)] for s in several]


class Run(NamedTuple):
    name: str
    source: str
    system: str
    z_loss: str  # none | included | subtracted
    training: Series
    heldout: dict[str, Series]

    def describe(self) -> dict:
        steps = self.training.steps
        return {"name": self.name, "source": self.source, "system": self.system, "z_loss": self.z_loss,
                "points": len(steps), "first": int(steps[0]), "last": int(steps[-1]),
                "heldout": {label: len(s.steps) for label, s in self.heldout.items()}, "null": self.nulls()}  # fmt: skip

    def nulls(self) -> dict[str, int]:
        """Quantity -> at how many steps it is not a number; without those that always are."""
        named = {"training": self.training} | {f"held-out {label}": s for label, s in self.heldout.items()}
        return {name: len(s.null) for name, s in named.items() if len(s.null)}


def find_scalars(run: str) -> list[tuple[str, str, Scalars]]:
    """(name, source, scalars) of each run that a path or the name of a reference holds: one, but for a CSV of several."""
    path, named = local_path(run), REFERENCES / f"{run}.csv"
    boards = next((f for p in (path, path / "tensorboard") if (f := event_files(p))), []) if path.is_dir() else []
    if (path / "metrics.jsonl").is_file() or path.suffix == ".jsonl":
        return [(path.absolute().name, str(metrics_file(run)), read_metrics(metrics_file(run)))]
    if boards or (path.is_file() and "tfevents" in path.name):
        folder = path.parent if path.name == "tensorboard" else path
        return [(folder.resolve().name, str(path), read_board(boards or [path]))]
    if path.suffix == ".csv" and path.is_file():
        return [(name or path.stem, str(path), scalars) for name, scalars in read_csv(path).items()]
    if not path.exists() and named.is_file():
        return [(run, f"references/{named.name}", read_csv(named)[""])]
    references = ", ".join(sorted(p.stem for p in REFERENCES.glob("*.csv")))
    raise DataError(f"{run}: got nothing to read, expected a run directory, a metrics.jsonl, a folder of TensorBoard event "
                     f"files, a CSV of W&B, or one of {references}; fix: check the path")  # fmt: skip


def make_run(name: str, source: str, scalars: Scalars, z_loss: str) -> Run:
    """One system's names into those of Run. z_loss "subtract": MaxText's own z-loss, taken off step by step."""
    for system, s in SYSTEMS.items():  # noqa: B007
        if tag := next(filter(s.training.fullmatch, scalars), None):
            break
    else:
        known = ", ".join(s.training.pattern.replace("[ _]", " ") for s in SYSTEMS.values())
        raise DataError(f"{source}: got no training loss, expected {known}; fix: check what it logs")
    tags = {"": tag} | {match[1]: t for t in scalars if (match := s.heldout.fullmatch(t))}  # "": training
    contains, series = "none", {}
    z_of_training = scalars.get(s.z_losses[0], {}) if s.z_losses else {}
    without = s.z_losses is None or (z_of_training and not any(z_of_training.values()))  # zeros: trained without
    for label, tag in tags.items():
        values = scalars[tag]
        if not without:  # also where z-loss is not logged: the loss may contain it
            contains, z_tag = "included", s.z_losses[label != ""]
            if z_loss == "subtract":
                z = scalars.get(z_tag, {})
                if missing := values.keys() - z.keys():
                    raise DataError(f"{source}: step {min(missing)}: got {tag} without {z_tag}, expected both; "
                                     "fix: --z-loss label")  # fmt: skip
                contains, values = "subtracted", {step: value - z[step] for step, value in values.items()}
        series[label] = Series.of(values, scalars.get(tag + COUNT, {}), s.shift)
    run = Run(name, source, system, contains, series.pop(""), series)
    if not len(run.training.steps):
        raise DataError(f"{source}: got no finite training loss ({tag}), expected some; fix: check the run")
    return run


def read_runs(args: argparse.Namespace) -> list[Run]:
    """The named runs, within --steps. A loss with z-loss beside a loss without is refused unless asked for."""
    logged = []  # (name, source, scalars)
    for run in args.runs:
        with reading(run):
            logged += find_scalars(run)
    runs = [make_run(*of_run, args.z_loss) for of_run in logged]
    if len(runs) < 2:
        raise DataError(f"{args.runs[0]}: got one run, expected two or more; fix: name another, or a reference")
    if args.z_loss == "refuse" and len({r.z_loss for r in runs}) > 1:
        a, b = (next(r for r in runs if r.z_loss == kind) for kind in ("included", "none"))
        raise DataError(f"{a.name}: got {a.system}'s loss, which contains the z-loss, beside {b.name}, whose loss does not; "
                         "fix: --z-loss subtract takes it off (wrong by a factor under gradient accumulation: MaxText "
                         "logs the sum of the micro-batches'); --z-loss label compares them as they are")  # fmt: skip
    first, last = args.steps or (0, math.inf)
    names = [r.name for r in runs]
    within = []
    for i, r in enumerate(runs):
        training = r.training.between(first, last)
        heldout = {label: s.between(first, last) for label, s in r.heldout.items()}
        if not len(training.steps):
            raise DataError(f"{r.source}: got no training loss in steps {first} to {last}; fix: --steps")
        name = r.name if names.count(r.name) == 1 else f"{r.name} {names[: i + 1].count(r.name)}"
        within.append(r._replace(name=name, training=training, heldout=heldout))
    return within
