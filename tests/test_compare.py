"""compare.py on small files, as a person or a script would call it."""

import json
import subprocess
import sys

import pytest
from harness import REPO

import compare


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
    code, report, _ = exact(capsys, b, b)
    assert code == 0  # null equals null


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
    ):
        (tmp_path / name).write_text(content)
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
    """An instrument that loads jax, or all of a run of a million steps."""
    names = "import sys, compare; print([m for m in ('jax', 'numpy', 'train', 'data') if m in sys.modules])"
    env = {"PYTHONPATH": str(REPO)}
    out = subprocess.run([sys.executable, "-c", names], env=env, capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"
    endless = ((step, {"x": step}) for step in iter(int, 1))  # a list of it would never end
    assert next(compare.side_by_side(endless, iter([(0, {"x": 0})]))) == (0, {"x": 0}, {"x": 0})
