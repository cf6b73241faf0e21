"""compare.py on small files, as a person or a script would call it."""

import csv
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from harness import REPO, tiny_config
from tensorboardX import SummaryWriter

import compare
import data
import scalars
from metrics import Board
from processes import sole_writer


def write(path, rows: list[dict], end: str = "\n") -> str:
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return str(path)


STEPS = range(1, 100)


def run_of(steps=STEPS, at=()) -> list[dict]:
    """Rows of a run with one evaluation; `at`: (quantity, step) -> another value."""
    rows = []
    for s in steps:
        rows.append({"step": s, "train/CE loss": 8 / s, "optim/step skipped": 0, "throughput/device/TPS": 5.0 * s})
        if s == 50:
            rows.append({"step": s, "eval/lm/all/CE loss": 7.5, "throughput/in-loop eval time (s)": 0.25})
    return [row | {tag: x for (tag, s), x in dict(at).items() if s == row["step"] and tag in row}
            for row in rows]  # fmt: skip


def exact(capsys, *argv) -> tuple[int, dict, str]:
    code = compare.main(["exact", *map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_equal_runs(capsys, tmp_path):
    """The case study's "delta = 0.000 on all 99 logged steps"; a clock's numbers that make equal runs unequal."""
    other = [row | {t: 9.9 for t in row if "device" in t or "(s)" in t} for row in run_of()]
    other[7] |= {"checkpoint/save_duration_s": 3.0}  # in one run only
    a, b = write(tmp_path / "a", run_of()), write(tmp_path / "b", other)
    code, report, err = exact(capsys, a, b)
    assert code == 0 and report["equal"] and err == ""
    assert report["compared"] == {"steps": 99, "first": 1, "last": 99} and report["differing_quantities"] == []
    assert {t: q["compared"] for t, q in report["quantities"].items()} == {
        "train/CE loss": 99, "optim/step skipped": 99, "eval/lm/all/CE loss": 1,
    }  # fmt: skip
    assert report["excluded"] == [
        "checkpoint/save_duration_s", "throughput/device/TPS", "throughput/in-loop eval time (s)",
    ]  # fmt: skip
    assert compare.main(["exact", a, b]) == 0
    assert "equal: delta = 0 over 99 steps, 3 quantities" in capsys.readouterr().out


def test_differences_are_found(capsys, tmp_path):
    """One last bit at one step, a counter, a NaN: the first and the largest, with step and both values."""
    last_bit = 8 / 40 * (1 + 2**-52)
    changes = {("train/CE loss", 40): last_bit, ("train/CE loss", 60): 1.0, ("optim/step skipped", 70): 1,
               ("eval/lm/all/CE loss", 50): None}  # fmt: skip
    a, b = write(tmp_path / "a", run_of()), write(tmp_path / "b", run_of(at=changes))
    code, report, _ = exact(capsys, a, b)
    assert code == 1 and not report["equal"] and len(report["differing_quantities"]) == 3
    ce = report["quantities"]["train/CE loss"]
    assert ce["first_difference"] == {"step": 40, "a": 8 / 40, "b": last_bit, "delta": last_bit - 8 / 40}
    assert (ce["differing"], ce["max_delta_step"]) == (2, 60) and ce["max_delta"] == pytest.approx(1 - 8 / 60)
    assert ce["mean_delta"] == pytest.approx((1 - 8 / 60) / 99)
    assert report["quantities"]["eval/lm/all/CE loss"]["max_delta"] is None  # a number against none
    assert [v["step"] for v in report["values"]] == [40, 50, 60, 70]
    assert compare.main(["exact", a, b, "--show", "1"]) == 1
    out = capsys.readouterr().out
    assert repr(last_bit) in out and "... and 3 more" in out and "different: 3 of 3 quantities over 99 steps" in out
    code, report, _ = exact(capsys, a, b, "--steps", 1, 39, "--all")
    assert code == 0 and report["compared"]["steps"] == 39 and len(report["values"]) == 2 * 39
    code, report, _ = exact(capsys, b, b)  # null equals null, which is said
    assert code == 0 and report["quantities"]["eval/lm/all/CE loss"]["both_null"] == 1
    assert report["quantities"]["train/CE loss"]["both_null"] == 0
    assert compare.main(["exact", b, b]) == 0
    assert "eval/lm/all/CE loss: not a number in both runs at 1 of 1 steps" in capsys.readouterr().out


def test_what_one_run_lacks(capsys, tmp_path):
    """A run that ended early, or lost steps in the middle, or a quantity, and counts as equal."""
    a = write(tmp_path / "a", run_of())
    b = write(tmp_path / "b", run_of(range(1, 90)))
    code, report, _ = exact(capsys, a, b)
    assert code == 1 and report["only_in_a"] == {"steps": 10, "first": 90, "last": 99} and not report["only_in_b"]
    assert report["quantities"]["train/CE loss"]["max_delta"] == 0
    assert compare.main(["exact", b, a]) == 1
    assert "in B only: 10 steps, 90 to 99" in capsys.readouterr().out
    c = write(tmp_path / "c", [row for row in run_of() if row["step"] not in (30, 31)])
    code, report, _ = exact(capsys, c, a)
    assert code == 1 and report["only_in_b"] == {"steps": 2, "first": 30, "last": 31}
    code, report, _ = exact(capsys, a, c)
    assert code == 1 and report["only_in_a"] == {"steps": 2, "first": 30, "last": 31}
    d = write(tmp_path / "d", [row for row in run_of() if "eval/lm/all/CE loss" not in row])
    code, report, _ = exact(capsys, a, d)
    assert code == 1 and report["differing_quantities"] == ["eval/lm/all/CE loss"]
    assert report["quantities"]["eval/lm/all/CE loss"]["only_in"] == {"a": 1, "b": 0}


def test_bad_files_are_one_line(capsys, tmp_path):
    """A step that stands twice and hides a doubled update; NaN, garbage or a missing file shown as a traceback."""
    good = write(tmp_path / "good", run_of())
    row = json.dumps({"step": 1, "train/CE loss": 1.0})
    for name, content, named in (
        ("twice", f"{row}\n{row}\n", "step 1: got 'train/CE loss' twice"),
        ("back", f'{{"step": 2}}\n{row}\n', "got step 1 after step 2"),
        ("nan", '{"step": 1, "x": NaN}\n', "line 1: got"),
        ("text", f"{row}\nwhat\n", "line 2: got 'what"),
        ("no step", f'{row}\n{{"x": 1}}\n', "line 2: got"),
        ("far", f'{row}\n{{"step": {10**30}}}\n', "line 2: got"),
        ("latin", f'{row}\n{{"step": 2, "\udcff": 1}}\n', "byte 47 is not UTF-8"),
    ):
        (tmp_path / name).write_text(content, errors="surrogateescape")
        code, _, err = exact(capsys, good, tmp_path / name)
        assert code == 2 and named in err and err.count("\n") == 1, err
    code, _, err = exact(capsys, good, tmp_path / "nowhere")
    assert code == 2 and "nowhere: got no file" in err
    code, _, err = exact(capsys, good, good, "--steps", 200, 300)
    assert code == 2 and "got no step to compare" in err
    cut = write(tmp_path / "cut", run_of(), end='\n{"step": 100, "train')  # of a run that goes on
    code, _, err = exact(capsys, good, cut)
    assert code == 0 and "line 101: left out" in err


def test_it_starts_at_once_and_streams(tmp_path):
    """An instrument that loads jax, also for a picture or an import, or all of a run of a million steps."""
    a = as_metrics(tmp_path / "a", losses())
    calls = [[], ["exact", a, a], ["detect", a, a, "--png", tmp_path / "x.png"],
             ["import-wandb", as_chart(tmp_path / "c.csv", {"m": losses()}), tmp_path / "out"]]  # fmt: skip
    calls = [[*map(str, argv)] for argv in calls]
    code = f"""
import json, sys, compare
for argv in {calls}:
    assert not argv or compare.main(argv) == 0
    print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})), file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True,
                         text=True, check=True)  # fmt: skip
    loaded = [set(json.loads(line)) for line in run.stderr.splitlines() if line.startswith("[")]
    assert len(loaded) == 4 and not loaded[0] & {"matplotlib", "scipy", "jax"}
    assert not loaded[-1] & {"jax", "jaxlib", "orbax", "grain", "train", "model", "launch"}
    endless = ((step, {"x": step}) for step in iter(int, 1))  # a list of it would never end
    assert next(compare.side_by_side(endless, iter([(0, {"x": 0})]))) == (0, {"x": 0}, {"x": 0})


# ------------------------------------------------------------------------------------------------ curves of any system

CE, HELDOUT, Z = "train/CE loss", "eval/lm/web/CE loss", 0.002


def losses(offset: float = 0.0, seed: int = 0, steps: int = 400, heldout: float | None = None) -> dict[str, dict]:
    """tag -> step -> value of a run; the noise of a step is the same for every `offset`, as if batches were."""
    noise = np.random.default_rng(seed).normal(0, 0.03, steps)
    training = {s: 2 + 6 / s**0.5 + noise[s - 1] + offset for s in range(1, steps + 1)}
    held = offset if heldout is None else heldout
    return {CE: training, HELDOUT: {s: 2.1 + 6 / s**0.5 + held for s in range(40, steps + 1, 40)}}


def as_metrics(path: Path, scalars: dict) -> Path:
    rows = [{"step": s, tag: x} for tag, values in scalars.items() for s, x in values.items()]
    return Path(write(path, sorted(rows, key=lambda row: row["step"])))


def as_maxtext(path: Path, scalars: dict, z: float = Z) -> Path:
    """As its writer logs: the first update is step 0, z-loss is in the losses, and stands beside them."""
    with SummaryWriter(str(path / "tensorboard")) as board:
        names = {CE: ("learning/lm_loss", "learning/z_loss"), HELDOUT: ("eval/avg_loss", "eval/avg_z_loss")}
        for tag, values in scalars.items():
            for step, x in values.items():
                board.add_scalar(names[tag][0], x + z, step - 1)
                board.add_scalar(names[tag][1], z, step - 1)
    return path


def as_olmo_core(path: Path, scalars: dict) -> Path:
    """Under Ai2's names through SummaryWriter, which puts "_" for spaces."""
    with SummaryWriter(str(path)) as board:
        for tag, values in scalars.items():
            for step, x in values.items():
                board.add_scalar(tag, x, step)
    return path


def as_chart(path: Path, runs: dict[str, dict]) -> Path:
    """W&B's export of charts: RUN - TAG, its range, cells that are empty where nothing was logged."""
    columns = {f"{run} - {tag}": values for run, scalars in runs.items() for tag, values in scalars.items()}
    header = [c + end for c in columns for end in ("", "__MIN", "__MAX")]
    steps = sorted({s for values in columns.values() for s in values})
    with open(path, "w", newline="") as f:
        writer = csv.writer(f, quoting=csv.QUOTE_ALL)
        writer.writerow(["Step", *header])
        writer.writerows([s, *(values.get(s, "") for values in columns.values() for _ in range(3))] for s in steps)
    return path


def as_history(path: Path, scalars: dict) -> Path:
    """A run's history, as pandas writes it: an index, W&B's own columns, tags."""
    steps = sorted({s for values in scalars.values() for s in values})
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["", "_step", "_runtime", "_timestamp", *scalars])
        writer.writerows(
            [i, s, 1.5 * i, 1e9 + i, *(values.get(s, "") for values in scalars.values())] for i, s in enumerate(steps)
        )
    return path


def call(capsys, *argv) -> tuple[int, dict, str]:
    code = compare.main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def people(capsys, *argv) -> str:
    """What the same command prints without --json."""
    compare.main([*map(str, argv)])
    return capsys.readouterr().out


def test_curves_of_every_source(capsys, tmp_path):
    """A reader that shifts steps, loses a tag whose spaces became "_", or takes __MAX for the value."""
    a, b = losses(0.05, heldout=0.01), losses()
    base = as_metrics(tmp_path / "base", b)
    sources = [as_metrics(tmp_path / "a", a), as_olmo_core(tmp_path / "core", a), as_history(tmp_path / "h.csv", a),
               as_chart(tmp_path / "c.csv", {"peteish - 7": a}), tmp_path / "imported"]  # fmt: skip
    assert call(capsys, "import-wandb", sources[3], sources[4])[0] == 0
    png = tmp_path / "new" / "curves.png"
    for source in sources:
        code, report, err = call(capsys, "curves", source, base, "--bin", 25, "--png", png)
        (name, d), runs = *report["differences"].items(), report["runs"]
        assert code == 0 and runs[0]["name"] == name and report["baseline"] == "base", err
        assert (runs[0]["points"], runs[0]["first"], runs[0]["last"]) == (400, 1, 400)
        assert runs[0]["heldout"] == {"web": 10} and runs[0]["z_loss"] == "none"
        assert d["training"]["compared"] == 16 and d["heldout"]["web"]["compared"] == 10
        for key in ("mean", "mean_abs", "largest", "at_the_end"):
            assert d["training"][key] == pytest.approx(0.05, abs=1e-5)
            assert d["heldout"]["web"][key] == pytest.approx(0.01, abs=1e-5)
        assert [row["step"] for row in report["landmarks"]] == list(range(40, 401, 40))
        near = [b[CE][s] for s in range(28, 53)]
        assert report["landmarks"][0]["training"]["base"] == pytest.approx(np.mean(near), abs=1e-6)
        assert report["landmarks"][0]["heldout"][name]["web"] == pytest.approx(a[HELDOUT][40], abs=1e-6)
        table = people(capsys, "curves", source, base, "--bin", 25, "--png", png)
        assert f"{b[HELDOUT][400]:.4f}" in table and "held-out web" in table and f"picture: {png}" in table
        assert png.read_bytes()[:4] == b"\x89PNG"
        png.unlink()
    code, report, _ = call(capsys, "curves", as_chart(tmp_path / "two.csv", {"x": a, "y": b}), "--png", png,
                           "--steps", 101, 200, "--landmarks", 150)  # fmt: skip
    assert [r["name"] for r in report["runs"]] == ["x", "y"] and report["bin"] == 5  # a twentieth of 100 steps
    assert report["runs"][1]["first"] == 101 and [row["step"] for row in report["landmarks"]] == [150]
    code, _, err = call(capsys, "curves", base, "--png", png)
    assert code == 2 and "got one run" in err
    code, _, err = call(capsys, "curves", base, tmp_path / "new", "--png", png)
    assert code == 2 and "got nothing to read" in err and "olmo3-7b" in err


def test_bins():
    """A mean over the wrong steps, pairs that are none, an error that is not that of the mean."""
    rng = np.random.default_rng(3)
    steps, common = np.arange(1, 2001), rng.normal(0, 0.5, 2000)
    a, b = ({int(s): x for s, x in zip(steps, common + rng.normal(d, 0.01, 2000), strict=True)} for d in (0.1, 0))
    series = [scalars.Series.of(x, {}, 0) for x in (a, b)]
    bins = compare.compare_bins(*series, 500)
    assert bins.centre.tolist() == [250.5, 750.5, 1250.5, 1750.5] and bins.first.tolist() == [1, 501, 1001, 1501]
    assert bins.delta[1] == pytest.approx(np.mean([a[s] - b[s] for s in range(501, 1001)]))
    expected = 0.01 * math.sqrt(2 / 500)  # what both runs share has cancelled
    assert bins.error == pytest.approx(np.full(4, expected), rel=0.15)
    odd, even = series[0][series[0].steps % 2 == 1], series[1][series[1].steps % 2 == 0]
    bins = compare.compare_bins(odd, even, 500)  # no step in common: means against means
    assert bins.delta == pytest.approx(np.full(4, 0.1), abs=0.15)
    assert bins.error == pytest.approx(np.full(4, 0.5 * math.sqrt(2 / 250)), rel=0.2)
    few = [s[s.steps % 250 == 1] for s in series]  # two steps a bin, which may be close by chance
    assert compare.compare_bins(*few, 500).error.min() > 0.5 * 0.01
    window = scalars.Series.of({1000: 0.7}, {1000: 10}, 0)  # a mean of 10 steps about 1,000
    for pair, sign in (((window, series[1]), 1), ((series[1], window), -1)):
        bins = compare.compare_bins(*pair, 500)
        assert bins.delta.tolist() == pytest.approx([sign * (0.7 - np.mean([b[s] for s in range(750, 1251)]))])
        assert bins.error == pytest.approx([0.5 * math.sqrt(1 / 10 + 1 / 501)], rel=0.1)


def test_z_loss_is_never_compared_with_none(capsys, tmp_path):
    """MaxText's lm_loss (CE + z) beside Ai2's CE loss: a gap of the z-loss, as large as the case study's in stage 2."""
    ours, maxtext = as_metrics(tmp_path / "ours", losses()), as_maxtext(tmp_path / "maxtext", losses())
    arguments = ("--bin", 25, "--png", tmp_path / "x.png")
    code, _, err = call(capsys, "curves", maxtext, ours, *arguments)
    assert code == 2 and "maxtext: got MaxText's loss, which contains the z-loss, beside ours" in err
    assert "--z-loss subtract" in err and not (tmp_path / "x.png").exists()
    code, report, _ = call(capsys, "curves", maxtext, ours, *arguments, "--z-loss", "label")
    assert report["differences"]["maxtext"]["training"]["mean"] == pytest.approx(Z, abs=1e-6)
    assert report["runs"][0]["z_loss"] == "included" and "MaxText's loss (with z-loss)" in report["notes"][0]
    code, report, _ = call(capsys, "curves", maxtext, ours, *arguments, "--z-loss", "subtract")
    assert code == 0 and report["differences"]["maxtext"]["training"]["largest"] == pytest.approx(0, abs=1e-6)
    assert (report["runs"][0]["first"], report["runs"][0]["last"]) == (1, 400)  # its step 0 is our step 1
    assert report["landmarks"][0]["step"] == 40 and report["runs"][0]["heldout"] == {"eval": 10}
    without = as_maxtext(tmp_path / "without", losses(), z=0)
    code, report, _ = call(capsys, "curves", without, ours, *arguments)
    assert code == 0 and report["runs"][0]["z_loss"] == "none"
    bare = {"learning/lm_loss": losses()[CE], "learning/z_loss": dict.fromkeys(losses()[CE], 0.0),
            "eval/avg_loss": losses()[HELDOUT]}  # fmt: skip
    assert call(capsys, "curves", as_history(tmp_path / "bare.csv", bare), ours, *arguments)[0] == 0
    code, report, _ = call(capsys, "curves", maxtext, as_maxtext(tmp_path / "other", losses(0.01)), *arguments)
    assert code == 0 and report["differences"]["maxtext"]["training"]["mean"] == pytest.approx(-0.01, abs=1e-6)
    only = as_chart(tmp_path / "only.csv", {"m": {"learning/lm_loss": losses()[CE]}})  # its z-loss was not exported
    assert call(capsys, "curves", only, ours, *arguments)[0] == 2
    code, _, err = call(capsys, "curves", only, ours, *arguments, "--z-loss", "subtract")
    assert code == 2 and "without learning/z_loss" in err


def test_event_files_as_tensorboard_reads_them(capsys, tmp_path):
    """A restarted run drawn as a zigzag, a live run refused, a flipped bit taken for a loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    for purge, steps, shift in ((None, range(1, 31), 0), (21, range(21, 41), 1), (36, range(36, 51, 2), 2)):
        with SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{shift}") as board:
            for s in steps:
                board.add_scalar(CE, s + shift, s)
        first = min(folder.iterdir())
        os.rename(first, folder / f"events.out.tfevents.{100 + shift}.host")  # in the order of their starts
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars("train/CE_loss")
    got = scalars.read_board(scalars.event_files(folder))["train/CE_loss"]
    assert got == {e.step: e.value for e in shown} and sorted(got) == [*range(1, 36), *range(36, 51, 2)]
    assert got[20] == 20 and got[21] == 22
    newest = max(folder.iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-7])  # its last record is being written
    code, report, err = call(capsys, "curves", folder, folder, "--png", tmp_path / "x.png")
    assert code == 0 and report["runs"][0]["last"] == 48 and "the record has no end yet" in err
    for at in (3, len(whole) - 20):  # a length, a value
        newest.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        code, _, err = call(capsys, "curves", folder, folder)
        assert code == 2 and str(newest) in err and "wrong checksum" in err and err.count("\n") == 1


def test_a_long_event_file_is_read_whole(capsys, tmp_path):
    """A reader that samples: TensorBoard keeps 10,000 points of a tag unless told otherwise, stage 1 logs 141,000. A
    bit that flipped halfway and ends the curve there without a word, as TensorBoard's own reader does."""
    board = Board(tmp_path / "board")
    for step in range(1, 20_001):
        board.write(step, {CE: step})
    board.close()
    files = scalars.event_files(tmp_path / "board")
    assert scalars.read_board(files) == {CE: {step: step for step in range(1, 20_001)}}
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-7])
    assert scalars.read_board(files) == {CE: {step: step for step in range(1, 20_000)}}
    assert "the record has no end yet" in capsys.readouterr().err
    middle = len(whole) // 2
    files[0].write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(data.DataError, match="wrong checksum"):
        scalars.read_board(files)


def test_a_loss_logged_as_a_tensor_is_refused(capsys, tmp_path):
    """TensorFlow 2's summaries hold tensors: read as scalars their losses were 0.0 at every step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.util.tensor_util import make_tensor_proto
    from tensorboardX.record_writer import RecordWriter

    good = as_metrics(tmp_path / "good", losses())
    path = tmp_path / "events.out.tfevents.1"
    writer = RecordWriter(str(path))
    value = Summary.Value(tag=CE, tensor=make_tensor_proto(2.5))
    writer.write(Event(wall_time=1, step=7, summary=Summary(value=[value])).SerializeToString())
    writer.close()
    code, _, err = call(capsys, "curves", path, good, "--png", tmp_path / "x.png")
    assert code == 2 and "step 7: got 'train/CE loss' as tensor" in err and err.count("\n") == 1


def test_references(capsys, tmp_path):
    """A reference that cannot be read; means of steps far apart compared with single steps."""
    for path in sorted(scalars.REFERENCES.glob("*.csv")):
        ((name, source, logged),) = scalars.find_scalars(path.stem)
        assert name == path.stem and set(map(bool, logged.values())) == {True}
        assert scalars.make_run(name, source, logged, "refuse").z_loss == "none"
    ((_, _, logged),) = scalars.find_scalars("olmo3-7b")
    reference = scalars.make_run("", "", logged, "refuse")
    assert reference.training.counts[reference.training.steps == 1_300_000] == [8]
    assert {k: s.values[-1] for k, s in reference.heldout.items()} == {
        "c4_en-validation": 2.4691, "pile-validation": 1.7762, "dolma_common-crawl-validation": 2.6007,
        "wikitext_103-validation": 1.9354,
    }  # fmt: skip
    steps = np.arange(1, 60_001)
    mine = np.interp(steps, reference.training.steps, reference.training.values) + 0.01
    tag = "eval/lm/c4_en-validation/CE loss"
    run = {
        CE: dict(zip(steps.tolist(), mine.tolist(), strict=True)),
        tag: {s: x - 0.01 for s, x in logged[tag].items()},
    }
    code, report, _ = call(
        capsys, "curves", as_metrics(tmp_path / "mine", run), "olmo3-7b", "--png", tmp_path / "x.png"
    )
    d = report["differences"]["mine"]
    assert code == 0 and report["bin"] == 2000 and report["smooth"] == 18000
    assert d["training"]["last"] == 50000 and d["training"]["compared"] == 6 + 4
    assert d["training"]["mean"] == pytest.approx(0.01, abs=2e-3)
    assert d["heldout"]["c4_en-validation"]["mean"] == pytest.approx(-0.01)
    assert [row["step"] for row in report["landmarks"]] == [10_000, 20_000, 30_000, 40_000, 50_000]


def without(scalars: dict, tag: str, *steps: int) -> dict:
    """The same run, in which a loss was not finite at these steps."""
    return scalars | {tag: scalars[tag] | dict.fromkeys(steps)}


def test_a_step_without_a_number_counts_in_no_mean(capsys, tmp_path):
    """A NaN that is left out of its own run's mean only: 0.24 between runs that are the same but for that step; steps that
    are left out without a word; a whole quantity that is null taken for equal."""
    steep = losses()
    steep[CE] |= {s: x + 40 / s for s, x in steep[CE].items()}  # where a step more or less changes a mean most
    a = as_metrics(tmp_path / "a", steep)
    b = as_metrics(tmp_path / "b", without(without(steep, CE, 30, 31, 52), HELDOUT, 120))
    third = as_metrics(tmp_path / "third", without(steep, CE, 47))
    png = ("--png", tmp_path / "x.png")
    for runs in ((a, b), (b, a), (a, b, third)):
        code, report, err = call(capsys, "curves", *runs, "--bin", 20, *png)
        for d in report["differences"].values():
            assert code == 0 and d["training"]["largest"] == d["heldout"]["web"]["largest"] == 0
        for row in report["landmarks"]:
            assert len(set(row["training"].values())) == 1, row
        shown = {r["name"]: r["null"] for r in report["runs"]}
        assert shown["a"] == {} and shown["b"] == {"training": 3, "held-out web": 1}
        assert "b: training loss is not a number at 3 steps, left out of all means" in err
        assert "b: held-out web loss is not a number at 1 step, left out" in err and "a: " not in err
        assert ("third: training loss is not a number at 1 step, left" in err) == (len(runs) == 3)
    code, report, err = call(capsys, "detect", a, b, "--bin", 20, *png)
    assert code == 0 and report["mean"] == {"training": 0, "heldout": 0} and not report["equal"]
    assert "b: training loss is not a number at 3 steps" in err
    code, report, err = call(capsys, "detect", b, b, "--bin", 20, *png)
    assert code == 0 and report["equal"]
    code, report, _ = exact(capsys, a, b)
    q = report["quantities"]
    assert code == 1 and (q[CE]["differing"], q[CE]["both_null"], q[HELDOUT]["differing"]) == (3, 0, 1)
    gone = as_metrics(tmp_path / "gone", without(steep, CE, *range(200, 401)))  # it diverged
    code, report, _ = call(capsys, "curves", gone, a, "--bin", 20, *png)
    assert code == 0 and report["differences"]["gone"]["training"]["last"] < 200
    assert [r["last"] for r in report["runs"]] == [199, 400]
    code, _, err = call(capsys, "detect", gone, a, "--steps", 200, 400, *png)
    assert code == 2 and "got no training loss in steps 200 to 400" in err


# -------------------------------------------------------------------------------------------------- files and mistakes

ODD = ("a b[1]#2%ü*?", "~", "_x$y$", r"$\frac$", "-x")


def test_names_of_runs_and_pictures(capsys, tmp_path, monkeypatch):
    """A name taken for a pattern, for mathematics, or as a reason to leave a run out of the legend; a folder called ~."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(ODD):
        if name != "~":
            as_metrics(tmp_path / name, losses(0.001 * i))
            as_olmo_core(tmp_path / name / "tensorboard", losses(0.001 * i))
    runs = [f"./{name}" for name in ODD if name != "~"]
    png = f"~/{ODD[0]}.png"
    code, report, _ = call(capsys, "curves", *runs, *(f"{run}/tensorboard" for run in runs), "--png", png)
    assert code == 0 and [r["name"] for r in report["runs"]] == [f"{n} {i}" for i in (1, 2) for n in ODD if n != "~"]
    assert (tmp_path / "home" / f"{ODD[0]}.png").read_bytes()[:4] == b"\x89PNG"
    os.rename(tmp_path / ODD[0], tmp_path / "home" / ODD[0])
    assert call(capsys, "detect", f"~/{ODD[0]}", runs[1], "--png", png)[0] == 0
    assert call(capsys, "exact", f"~/{ODD[0]}", f"~/{ODD[0]}/metrics.jsonl", "--json")[0] == 0
    as_chart(tmp_path / "home" / "e.csv", {ODD[0]: losses()})
    code, report, _ = call(capsys, "import-wandb", "~/e.csv", f"~/{ODD[2]}")
    assert code == 0 and len(scalars.event_files(tmp_path / "home" / ODD[2])) == 1
    assert call(capsys, "curves", f"~/{ODD[2]}", runs[1], "--png", png)[0] == 0
    assert not (tmp_path / "~").exists()
    monkeypatch.chdir(tmp_path / "home" / ODD[0])
    code, report, _ = call(capsys, "curves", ".", ".", "--png", png)
    assert code == 0 and report["runs"][0]["name"] == f"{ODD[0]} 1"
    code, _, err = call(capsys, "exact", "gs://bucket/run", ".")
    assert code == 2 and "got a URL, expected a local path" in err and err.count("\n") == 1


def test_a_legend_names_every_run(tmp_path):
    """matplotlib leaves a label that begins with an underscore out of a legend without a word."""
    runs = [scalars.make_run(name, "", losses(), "refuse") for name in ODD]
    _, top, low = compare.new_figure()
    compare.draw_losses(top, runs, 20)
    for i, r in enumerate(runs):
        bins = compare.compare_bins(r.training, runs[0].training, 20)
        compare.draw_differences(low, i, r.name, bins, {}, 20)
    for axes in (top, low):
        texts = " ".join(text.get_text() for text in axes.legend().get_texts())
        assert all(f"{name}: training" in texts for name in ODD)


def test_two_at_once(capsys, tmp_path):
    """Two that write one picture, or import into one folder: what is read afterwards is of one name and of another run."""
    a, png, out = as_metrics(tmp_path / "a", losses()), tmp_path / "x.png", tmp_path / "out"
    export = as_chart(tmp_path / "e.csv", {"m": losses()})
    for output, *argv in ((png, "curves", a, a, "--png", png), (png, "detect", a, a, "--png", png),
                          (out, "import-wandb", export, out)):  # fmt: skip
        with sole_writer(output):
            code, _, err = call(capsys, *argv)
            assert (
                code == 1 and err.count("\n") == 1 and f"{output}: is being written by process {os.getpid()} on" in err
            )
            assert not output.exists()
        assert call(capsys, *argv)[0] == 0 and output.exists()
        png.unlink(missing_ok=True)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "out", "e.csv"}


def test_what_is_killed_leaves_nothing_half(capsys, tmp_path, monkeypatch):
    """Half an import that is read as a run, or that stands in the way of the next; a picture that a full disk cuts off."""
    export = as_chart(tmp_path / "e.csv", {"m": losses(), "n": losses(1.0)})
    killed = """
import os, signal, sys, compare
from tensorboardX.event_file_writer import EventsWriter
close, closed = EventsWriter.close, []
def last(self):
    close(self)
    closed.append(1)
    if len(closed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
EventsWriter.close = last
compare.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", killed, "import-wandb", str(export), str(tmp_path / "out")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPO)}).returncode == -9
    assert not list((tmp_path / "out").glob("**/*tfevents*"))
    assert call(capsys, "import-wandb", export, tmp_path / "out")[0] == 0
    assert len(list((tmp_path / "out").glob("*/*tfevents*"))) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"out", "e.csv"}

    a, png = as_metrics(tmp_path / "a", losses()), tmp_path / "p" / "x.png"
    assert call(capsys, "curves", a, a, "--png", png)[0] == 0
    whole = png.read_bytes()

    def full(self, file, **how):
        file.write(whole[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(png))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    code, _, err = call(capsys, "curves", a, a, "--png", png)
    assert code == 1 and f"{png}: No space left on device" in err and png.read_bytes() == whole
    assert [p.name for p in png.parent.iterdir()] == ["x.png"]


def test_a_bug_of_ours_is_no_wrong_usage(tmp_path, monkeypatch):
    """A mistake in this program that ends as one line and exit code 2, as if the user had made it."""
    a = as_metrics(tmp_path / "a", losses())
    monkeypatch.setattr(compare, "landmarks", lambda runs, width: dict(zip("ab", "a", strict=True)))
    with pytest.raises(ValueError, match="zip"):
        compare.main(["curves", str(a), str(a), "--png", str(tmp_path / "x.png")])


def test_files_that_are_something_else(capsys, tmp_path):
    """Tracebacks out of readers: another protocol buffer, text where a number belongs, a number that is none."""
    from tensorboardX.record_writer import RecordWriter

    good = as_metrics(tmp_path / "good", losses())
    writer = RecordWriter(str(tmp_path / "events.out.tfevents.1"))
    writer.write(b"\xff\xff\xff\xff no event")
    writer.close()
    (tmp_path / "text.jsonl").write_text('{"step": 1, "train/CE loss": "low"}\n')
    (tmp_path / "huge.jsonl").write_text(f'{{"step": 1, "train/CE loss": {10**400}}}\n')
    (tmp_path / "latin.csv").write_bytes(b"Step,r - x\n1,2\xff\n")
    (tmp_path / "far.csv").write_bytes(b"Step,r - train/CE loss\n1e30,2\n")
    for name, named in (
        ("events.out.tfevents.1", "byte 0: got a record that is no TensorBoard event"),
        ("text.jsonl", "step 1: got 'train/CE loss' 'low', expected a number or null"),
        ("huge.jsonl", "step 1: got 'train/CE loss' 1000"),
        ("latin.csv", "is not UTF-8"),
        ("far.csv", "line 2, column 'Step': got '1e30'"),
    ):
        code, _, err = call(capsys, "curves", tmp_path / name, good, "--png", tmp_path / "x.png")
        assert code == 2 and name in err and named in err and err.count("\n") == 1, err
    huge = tmp_path / "huge.jsonl"
    other = tmp_path / "other.jsonl"
    other.write_text('{"step": 1, "train/CE loss": 1.5}\n')
    code, report, _ = exact(capsys, huge, huge)
    assert code == 0
    code, report, _ = exact(capsys, huge, other)
    assert code == 1 and report["quantities"][CE]["max_delta"] is None


@pytest.mark.parametrize(
    "flags",
    [
        ("--bin", "0"), ("--bin", "1" + "0" * 30), ("--bin", "nan"), ("--steps", "-1", "5"), ("--steps", "1", "9" * 20),
        ("--tolerance", "nan"), ("--tolerance", "0"), ("--tolerance", "inf"), ("--alpha", "1"), ("--alpha", "nan"),
        ("--png", "x"), ("--png", "x.xyz"), ("--png", "gs://b/x.png"), ("--png", ""),
    ],
    ids=" ".join,
)  # fmt: skip
def test_numbers_are_checked(capsys, tmp_path, flags):
    """A traceback, or a picture that is refused after minutes of reading."""
    with pytest.raises(SystemExit) as end:
        compare.main(["detect", "nowhere", "nowhere", *flags])
    assert end.value.code == 2 and f"argument {flags[0]}: " in capsys.readouterr().err


def test_values_listed(capsys, tmp_path):
    """--show -1, which lists nothing and says that so many are left out."""
    a = write(tmp_path / "a", run_of())
    with pytest.raises(SystemExit):
        compare.main(["exact", a, a, "--show", "-1"])
    assert compare.main(["exact", a, a, "--show", "0"]) == 0


# -------------------------------------------------------------------------------------------------------- import-wandb


def test_import_wandb(capsys, tmp_path):
    """A tag renamed on its way, a run mixed into another, a file of half an export."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export = as_chart(tmp_path / "e.csv", {"a/1": losses(), "b": losses(1.0)})
    code, report, _ = call(capsys, "import-wandb", export, tmp_path / "out", "--map", f"b - {CE}=my loss",
                           "--map", f"b - {HELDOUT}=")  # fmt: skip
    assert code == 0 and set(report["runs"]) == {"a/1", "b"} and report["runs"]["b"]["tags"] == {"my loss": 400}
    shown = EventAccumulator(str(tmp_path / "out" / "a_1"), size_guidance={"scalars": 0}).Reload()
    assert sorted(shown.Tags()["scalars"]) == [HELDOUT, CE]
    assert [(e.step, e.value) for e in shown.Scalars(HELDOUT)] == [
        (s, pytest.approx(x, rel=1e-6)) for s, x in losses()[HELDOUT].items()
    ]
    code, _, err = call(capsys, "import-wandb", export, tmp_path / "out")
    assert code == 2 and "got a folder with event files" in err


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("Step,r - x\n1,2.5\n2,abc\n", (), "line 3, column 'r - x': got 'abc'"),
        ("# from\nStep,r - x\n1,2.5\n2\n", (), "line 4: got 1 cells, expected 2"),
        ("Step,r - x\n2,2.5\n1,2\n", (), "line 3, column 'Step': got 1 after 2"),
        ("Step,r - x\n1.5,2\n", (), "line 2, column 'Step': got 1.5"),
        ("Step,r - x\n,2\n", (), "line 2, column 'Step': got ''"),
        ("Step,r - x,r - x\n1,2,3\n", (), "line 1: got columns 'r - x' twice"),
        ("time,r - x\n1,2\n", (), "expected each once and one of Step"),
        ("time,r - x\n1,2\n", ("--step-column", "epoch"), "one of epoch"),
        ("Step,r - x\n1,2\n", ("--map", "y=z"), "got no column 'y'"),
        ('Step,r - x\n1,"2\n', (), "line 2: unexpected end of data"),
        ("Step,r - x\n1,\n", (), "got no value"),
        ("", (), "line 1: got columns []"),
    ],
)
def test_a_bad_csv_names_line_and_column(capsys, tmp_path, text, arguments, named):
    """An export with a fault imported in part, or skipped over."""
    (tmp_path / "bad.csv").write_text(text)
    code, _, err = call(capsys, "import-wandb", tmp_path / "bad.csv", tmp_path / "out", *arguments)
    assert code == 2 and named in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------------- detect


def wandering(rng, bins: int, scale: float) -> np.ndarray:
    """A run's own path: what an order or an initialisation of its own does, slowly."""
    return scale * np.convolve(rng.normal(size=bins + 8), np.ones(9) / 3, "valid")


def judged(seed: int, training=0.0, heldout=0.0, bins: int = 60, from_bin: int = 40) -> list[dict]:
    """Two runs of 2,000-step bins with other data orders; from a bin on the first departs by so much."""
    rng = np.random.default_rng(seed)
    departs = np.arange(bins) >= from_bin
    skill = wandering(rng, bins, 0.003)
    centre = np.arange(bins) * 2000 + 1000.0
    error = np.full(bins, 0.03 * math.sqrt(2 / 2000))
    delta = skill + rng.normal(0, error) + training * departs
    held = skill[4::5] + rng.normal(0, 0.002, bins // 5) + heldout * departs[4::5]
    b = compare.Bins(centre, delta, error, centre - 999, centre + 1000)
    lowest, highest = compare.heldout_about(b, centre[4::5] + 1000, held, 2000)
    known = np.isfinite(lowest)
    b, lowest, highest = compare.Bins(*(x[known] for x in b)), lowest[known], highest[known]
    band = compare.find_band(b, lowest, highest, 0.02, 0.001)
    return compare.find_stretches(b, band, np.clip(b.delta, lowest, highest), ["a", "b"])


def test_the_band():
    """Each of the three that may reach farthest: noise, held-out loss and noise, twice held-out loss."""
    centre, z = np.arange(10.0), compare.NormalDist().inv_cdf(1 - 0.001 / 20)

    def low_and_high(delta, error, held, tolerance=0.02):
        b = compare.Bins(centre, np.broadcast_to(delta, 10), np.full(10, error), centre, centre)
        band = compare.find_band(b, np.full(10, held), np.full(10, held), tolerance, 0.001)
        assert band.z == pytest.approx(z)
        return band.low[5], band.high[5]

    assert low_and_high(0, 0.001, 0) == pytest.approx((-0.02, 0.02))
    assert low_and_high(0, 0.01, 0) == pytest.approx((-0.01 * z, 0.01 * z))
    assert low_and_high(0, 0.01, -0.03) == pytest.approx((-0.03 - 0.01 * z, 0.01 * z))
    assert low_and_high(0, 0.001, 0.5) == pytest.approx((-0.02, 1.0))
    ramp = 0.1 * centre
    assert low_and_high(ramp, 0.001, 0) == pytest.approx((-0.02, 0.02))  # what departs steadily is no noise
    wanders = 0.01 * (-1) ** centre  # second differences of 0.04
    noise = z * 0.04 / (0.6745 * math.sqrt(6))
    assert low_and_high(wanders, 0.001, 0) == pytest.approx((-noise, noise))


def test_what_fires():
    """False alarms of clean runs, and of a model that is simply better; the case study's fault (-0.06) not seen."""
    assert not [seed for seed in range(200) if judged(seed)]
    assert not [seed for seed in range(200) if judged(seed, -0.1, -0.07)]  # held-out follows
    assert not [seed for seed in range(200) if judged(seed, 0.0, 0.01)]
    for training, heldout, lower in ((-0.06, 0.0, "a"), (0.06, 0.0, "b"), (-0.06, 0.03, "a"), (-0.2, -0.05, "a")):
        for seed in range(50):
            stretches = judged(seed, training, heldout)
            assert stretches and {s["lower"] for s in stretches} == {lower}
            assert stretches[0]["first"] == 80_001 and stretches[-1]["last"] == 120_000


def test_detect_on_files(capsys, tmp_path):
    """The exit code, the stretch and the picture, as a script meets them."""
    clean = as_metrics(tmp_path / "clean", losses(seed=1))
    again = as_metrics(tmp_path / "again", losses(seed=2))
    png = tmp_path / "d.png"
    code, report, err = call(capsys, "detect", again, clean, "--png", png)
    assert code == 0 and not report["fires"] and report["stretches"] == [] and report["bins_judged"] == 20
    said = people(capsys, "detect", again, clean, "--png", png)
    assert (
        "within noise: training and held-out loss tell the same in 20 bins of 20 steps" in said
        and png.read_bytes()[:4] == b"\x89PNG"
    )
    scalars = losses(seed=2)
    scalars[CE] |= {s: x - 0.1 for s, x in scalars[CE].items() if s > 300}
    faulty = as_metrics(tmp_path / "faulty", scalars)
    code, report, err = call(capsys, "detect", faulty, clean, "--png", png)
    (stretch,) = report["stretches"]
    assert (
        code == 1 and report["fires"] and (stretch["first"], stretch["last"], stretch["lower"]) == (301, 400, "faulty")
    )
    assert stretch["training"] == pytest.approx(-0.1, abs=0.01) and stretch["heldout"] == pytest.approx(0, abs=1e-6)
    said = people(capsys, "detect", faulty, clean, "--png", png)
    assert "has faulty seen its instances before?" in said and "fires: training loss departs" in said
    code, report, _ = call(capsys, "detect", clean, faulty, "--png", png)
    assert code == 1 and report["stretches"][0]["lower"] == "faulty"
    assert call(capsys, "detect", faulty, clean, "--png", png, "--tolerance", 0.2)[0] == 0
    assert call(capsys, "detect", faulty, clean, "--png", png, "--steps", 1, 300)[0] == 0
    spike = losses(seed=2)
    spike[CE][350] -= 3  # one step is no finding
    assert call(capsys, "detect", as_metrics(tmp_path / "spike", spike), clean, "--png", png)[0] == 0
    bare = as_metrics(tmp_path / "bare", {CE: losses()[CE]})
    code, _, err = call(capsys, "detect", bare, clean, "--png", png)
    assert code == 2 and "got no held-out loss of the same set" in err


@pytest.mark.parametrize(
    ("steps", "every"), [(60, 1), (400, 1), (16, 1), (39, 1), (400, 10), (90, 10)], ids=lambda x: str(x)
)
def test_detect_on_equal_runs(capsys, tmp_path, steps, every):
    """A deviation of exactly 0 taken for one that is not known: two runs that are equal bit for bit are refused, as in the
    README's own example; a run of few steps, or of which few are logged, whose bins hold one step each."""
    scalars = losses(steps=steps)
    scalars = {CE: {s: x for s, x in scalars[CE].items() if s % every == 0},
               HELDOUT: {s: 2.1 + 6 / s**0.5 for s in range(every, steps + 1, 5 * every)}}  # fmt: skip
    a, b = as_metrics(tmp_path / "a", scalars), as_metrics(tmp_path / "b", scalars)
    code, report, err = call(capsys, "detect", a, b, "--png", tmp_path / "x.png")
    assert code == 0 and report["equal"] and not report["fires"], err
    said = people(capsys, "detect", a, b, "--png", tmp_path / "x.png")
    assert f"equal: training loss of a and b is the same at all {steps // every} steps" in said
    last = max(scalars[CE])
    scalars[CE][last] = math.nextafter(scalars[CE][last], 9)
    c = as_metrics(tmp_path / "c", scalars)
    code, report, _ = call(capsys, "detect", a, c, "--png", tmp_path / "x.png")
    said = people(capsys, "detect", a, c, "--png", tmp_path / "x.png")
    assert code == 0 and not report["equal"] and "equal:" not in said and "tell the same" in said


def test_a_difference_that_is_the_same_everywhere(capsys, tmp_path):
    """Two runs that differ by one number at every step: their spread is exactly 0 too, and is known."""
    flat = {CE: dict.fromkeys(range(1, 101), 3.0), HELDOUT: dict.fromkeys(range(10, 101, 10), 3.25)}
    a = as_metrics(tmp_path / "a", flat)
    b = as_metrics(tmp_path / "b", flat | {CE: dict.fromkeys(range(1, 101), 2.75)})
    odd = as_metrics(tmp_path / "odd", flat | {CE: dict.fromkeys(range(1, 101, 2), 3.0)})
    even = as_metrics(tmp_path / "even", flat | {CE: dict.fromkeys(range(2, 101, 2), 3.0)})  # no step in common
    png = ("--png", tmp_path / "x.png")
    code, report, _ = call(capsys, "detect", a, b, *png)
    assert code == 1 and report["noise"] == 0 and report["stretches"][0]["training"] == 0.25
    code, report, _ = call(capsys, "detect", odd, even, "--bin", 10, *png)
    assert code == 0 and report["bins_judged"] == 10 and report["noise"] == 0
    code, _, err = call(capsys, "detect", a, a, "--bin", 1, *png)
    assert code == 2 and "more than one training loss" in err


# Trains on an index in turn: clean, clean with another order and other initial parameters, and with the case study's
# fault, each row of the batch a host of its own: the sampler gives host h of W every W-th position from h on, and a
# loader that shards what is sharded already takes every W-th of those, from the h-th on.
THREE_RUNS = """
import sys
import numpy as np
import data, train

right = data.BatchSource.instances_at


def double_sharded(self, position):
    rows, W = self.rows, len(self.rows)
    host = np.arange(W)
    of_host = position // W * W + host
    self.rows = of_host * W + host - position
    try:
        return right(self, position)
    finally:
        self.rows = rows


root, *argv = sys.argv[1:]
for name, seed in (("clean", 0), ("again", 1), ("faulty", 0)):
    data.BatchSource.instances_at = double_sharded if name == "faulty" else right
    sets = ("--set", f"run.seed={seed}", "--set", f"data.seed={seed}", "--run-dir", f"{root}/{name}")
    if code := train.main([*argv, *sets]):
        sys.exit(code)
"""


def test_the_case_studys_fault(capsys, tmp_path):
    """A detector that is silent where a double-sharded loader repeats 26 % of the instances and leaves out 37 %, or that
    fires on a clean epoch. The text is drawn word by word: there are frequencies to learn, and then only memory helps."""
    S, B, V, steps, rng = 32, 8, 4096, 200, np.random.default_rng(1)
    frequency = 1 / (np.arange(V) + 2000)
    for split, instances in (("train", B * steps), ("heldout", 64)):
        words = rng.choice(V, instances * S, p=frequency / frequency.sum()).astype(np.uint32)
        path = tmp_path / split / "words" / "part-00000.npy"
        path.parent.mkdir(parents=True)
        words.tofile(path)
        index = data.build_index([("words", path)], tmp_path, S, tokenizer="none", vocab_size=V, eos_id=0)
        data.write_index(index, tmp_path / f"{split}.json")
    c = tiny_config(tmp_path)
    c["model"] |= {"vocab_size": V, "padded_vocab_size": V, "n_layers": 2, "pattern": "sf", "d_model": 64, "d_ff": 192}
    c["schedule"][0] |= {"warmup_steps": 15, "total_steps": steps, "final_fraction": 0.3}
    c["run"] |= {"steps": steps, "checkpoint_every": steps, "eval_every": 25, "log_every": steps}
    c["data"]["repetition_filter"] = False
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(c))
    (tmp_path / "three.py").write_text(THREE_RUNS)
    command = [sys.executable, tmp_path / "three.py", tmp_path, "--config", tmp_path / "c.yaml", "--hardware", "cpu",
               "--set", f"compilation_cache={tmp_path / 'xla'}", "--set", "microbatch=8"]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(REPO), "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
                        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    subprocess.run([*map(str, command)], env=env, check=True, capture_output=True, timeout=300)
    clean, again, faulty = (tmp_path / name for name in ("clean", "again", "faulty"))
    code, report, _ = call(capsys, "detect", again, clean, "--bin", 25, "--png", tmp_path / "again.png")
    assert code == 0 and report["bins_judged"] == 8 and abs(report["mean"]["training"]) < 0.02
    code, report, _ = call(capsys, "detect", faulty, clean, "--bin", 25, "--png", tmp_path / "faulty.png")
    first, last = report["stretches"][0], report["stretches"][-1]
    assert code == 1 and {s["lower"] for s in report["stretches"]} == {"faulty"}
    assert last["last"] == steps and last["training"] < -0.06 and last["heldout"] > -0.01
    assert first["first"] > 50  # little has been seen twice before


def test_legend_says_what_differs(tmp_path):
    """Two curves of one name, or names that do not tell which learning rate is which."""
    runs = []
    for name, lr in (("a", 3e-4), ("b", 6e-4)):
        as_metrics(tmp_path / name, losses(steps=40))
        science = {
            "optim": {"peak_lr": lr, "beta1": 0.9},
            "run": {"name": name, "seed": 0},
            "hardware": {"microbatch": lr},
        }
        (tmp_path / name / "config.yaml").write_text(json.dumps(science))
        runs.append(tmp_path / name)
    as_metrics(tmp_path / "c", losses(steps=40))
    args = compare.parse_args(["curves", *map(str, [*runs, tmp_path / "c"])])
    found = compare.what_differs(compare.read_runs(args))
    assert found == {"a": "optim.peak_lr 0.0003", "b": "optim.peak_lr 0.0006", "c": ""}
