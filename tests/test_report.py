"""tools/report.py: the page shows the numbers that the programs print."""

import contextlib
import json
import os
import re
import subprocess
import sys

# Before the harness's libraries are imported: no network.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import harness
import pytest
import report
import yaml
from harness import REPO, STEPS

from metrics import is_evaluation
from processes import sole_writer


@pytest.fixture
def call(house, capfd, monkeypatch):
    """call(*arguments) -> what `report.py` prints; its programs are processes of their own, on one device."""
    monkeypatch.setenv("XLA_FLAGS", "")
    cache = ("--hardware", "cpu", "--set", f"compilation_cache={house.cache}")

    def call(*arguments, expect=0):
        assert report.main([*map(str, arguments), *cache, "--json"]) == expect
        out, err = capfd.readouterr()
        return err if expect else json.loads(out)

    return call


def printed(*command) -> dict:
    done = subprocess.run(
        [sys.executable, *map(str, command), "--json"], capture_output=True, text=True, cwd=REPO, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page(house, straight, call, tmp_path):
    """A page that shows other numbers than the programs print, or lacks a picture."""
    earlier = straight / "checkpoints" / "8"
    shown = call(straight, "--reference", earlier, "--steps", "8,latest", "--out", tmp_path, "--no-record",
                 "--noise-floor", "none", "--limit", 8)  # fmt: skip
    page, numbers = (
        re.sub(" +", " ", (tmp_path / "report.md").read_text()),
        json.loads((tmp_path / "report.json").read_text()),
    )
    assert shown["report"] == str(tmp_path / "report.md") and numbers["step"] == STEPS
    held_out = numbers["Held-out text"]["evaluations"][-1]["heldout"]
    (trained,) = (r for r in harness.rows(straight) if r["step"] == STEPS and is_evaluation(r))
    assert held_out["all"]["ce"] == trained["eval/lm/all/CE loss"]
    found = printed(REPO / "evaluate.py", "kl", straight, earlier, "--noise-floor", "none", "--limit", 8,
                    "--hardware", "cpu")["heldout"]  # fmt: skip
    assert numbers["Token-level KL"]["heldout"] == found
    assert f"| all | 465 | {held_out['all']['ce']:.5g} |" in page
    assert f"| all | 248 | {found['all']['kl']:.5g} |" in page
    assert "No tasks were asked for" in page and "None: no tokenizer" in page
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == [f"## {title}" for title in report.SURFACES]
    for name in ("heldout.png", "curves.png"):
        assert f"({name})" in page and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_everything_is_checked_first(straight, call, tmp_path):
    """A misspelt folder or number that is noticed when other pages are done."""
    for wrong, words in (
        (("--include-path", tmp_path / "none"), "--include-path: got"),
        (("--reference", tmp_path), "no checkpoint found"),
        (("--name", "../x"), "--name: got '../x', expected"),
        (("--limit", 0), "--limit: got 0"),
        (("--task-limit", 2**31), "--task-limit: got 2147483648"),
        (("--cut", "stream", "--window", -1), "--window: got -1"),
    ):
        assert words in call(straight, "--out", tmp_path / "report", *wrong, expect=2)
        assert not (tmp_path / "report").exists()
    with contextlib.suppress(SystemExit):
        report.main([str(straight), "--noise-floor", "transformers"])
        pytest.fail("a floor that is not there any more")


def test_one_writer(straight, call, tmp_path):
    """Two at once that write one page, of which one is lost."""
    page = tmp_path / "page"
    with sole_writer(page):
        assert f"{page}: is being written by" in call(straight, "--out", page, expect=1) and not page.exists()


def test_tasks_and_samples(tmp_path, monkeypatch):
    """Scores or samples on the page that are not those of the commands."""
    monkeypatch.setenv("XLA_FLAGS", "")
    run = harness.text_checkpoint(tmp_path / "model")
    rows = [{"question": f"one {i}", "choices": ["two", "three words", "four"], "answer": i % 3} for i in range(6)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}}, "doc_to_text": "{{question}}",
        "doc_to_target": "answer", "doc_to_choice": "choices",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }  # fmt: skip
    (tmp_path / "choices.yaml").write_text(yaml.safe_dump(task))
    how = ["--tasks", "choices", "--include-path", str(tmp_path), "--hardware", "cpu"]
    args = report.parse_args([str(run), *how, "--task-limit", "4", "--prompt", "def"])
    numbers, page = report.report_tasks(args, tmp_path)
    asked = printed(REPO / "tools" / "lm_eval_adapter.py", run, *how, "--limit", 4)["results"][0]
    assert numbers["tasks"] == asked["tasks"]
    score, page = numbers["tasks"]["choices"], re.sub(" +", " ", page)
    assert (
        f"| choices | 4 | {score['metric']} | {score[score['metric']]:.5g} | {score['acc_norm_stderr']:.5g} |" in page
    )
    numbers, page = report.report_samples(args, tmp_path)
    how = ["--prompt", "def", "--tokens", 120, "--temperature", 0.8, "--top-p", 0.95, "--num", 3, "--hardware", "cpu"]
    assert numbers == printed(REPO / "sample.py", run, *how)
    assert "    def" + numbers["samples"][0]["text"].splitlines()[0] in page
