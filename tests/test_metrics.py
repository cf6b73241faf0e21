"""metrics.py: Ai2's names, FLOPs and MFU, the files of a run, what is said of skipped steps."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from harness import (
    SEQUENCE,
    board,
    rows,
    snapshot,
)

import data
import metrics
import vocabulary
from config import load_config
from metrics import MetricsLog, Skips, flops_per_token, step_metrics, utilisation


def test_metric_names_are_those_of_the_dashboard(straight):
    """A curve that cannot be laid over Ai2's because its tag is spelt otherwise (facts: OLMo-core's callbacks)."""
    tags = set(board(straight))
    for name in (
        "train/CE loss", "train/PPL", "train/Z loss", "train/Z loss unscaled", "train/masked labels (%)",
        "train/masked instances (%)", "optim/total grad norm", "optim/LR (group 0)", "optim/LR (group 1)",
        "optim/step skipped", "optim/step_skipped", "throughput/total tokens", "perf/total_tokens",
        "throughput/device/TPS", "throughput/device/BPS", "throughput/device/data loading (s)",
        "throughput/device/data loading (%)", "throughput/device/TPS (actual avg)", "throughput/device/flopsPS",
        "throughput/device/BPS (actual avg)", "throughput/device/flopsPS (actual avg)", "throughput/total petaflops",
        "throughput/chinchilla multiple", "throughput/in-loop eval time (s)", "throughput/in-loop eval batches",
        "eval/lm/web/CE loss", "eval/lm/code/PPL", "checkpoint/save_duration_s", "checkpoint/save_async_duration_s",
    ):  # fmt: skip
        assert name in tags
    first = rows(straight)[0]
    assert first["train/Z loss"] == pytest.approx(1e-5 * first["train/Z loss unscaled"])
    assert first["train/PPL"] == pytest.approx(np.exp(first["train/CE loss"]))
    c = load_config("stage1", "cpu", [])
    assert flops_per_token(c) == pytest.approx(4.9377e10, rel=1e-5)  # OLMo-core's number for the 7B at 8192
    assert first["train/masked labels (%)"] == pytest.approx(1 / SEQUENCE)  # a proportion, as in OLMo-core


def test_utilisation_of_the_case_study():
    """FLOPs that leave out the head or count padding rows and norms, a window counted as full, a chip for a device."""
    c = load_config("stage1", "ironwood", [])
    got = utilisation(c, 4 * 8192 / 3.05, "TPU7x")  # 4 sequences a device, 3.05 s a step
    expected = {
        "throughput/device/TFLOPs (full causal)": 513.1,
        "throughput/device/MFU (full causal)": 44.5,
        "throughput/device/MFU (window-correct)": 43.4,
    }
    assert {tag: round(got[tag], 1) for tag in expected} == expected
    assert flops_per_token(c) == pytest.approx(4.9377e10, rel=1e-4)  # OLMo-core's own number
    assert set(utilisation(c, 1e4, "cpu")) == {tag for tag in got if "TFLOPs" in tag}  # no peak, no MFU


def test_padding_is_reported(house, main, tmp_path, capsys, monkeypatch):
    """A pad mask whose share no metric tells, or that counts filtered rows and last positions; data without EOS, or
    with unmasked padding, that training takes without a word."""
    monkeypatch.setattr(vocabulary, "EOS_WITHIN", 600)  # three batches of 8 x 32
    assert main(tmp_path, "run.steps=4", "run.eval_index=null", "data.mask_token=5") == 0
    err = capsys.readouterr().err
    assert "is in none of" not in err and err.count("of the first") == 0  # EOS is there, and there is no pad id
    c = load_config(str(house.config), "cpu", ["data.mask_token=5"])
    source = data.open_data(c.data, order_dir=tmp_path / "order")
    for row, position in zip(rows(tmp_path), range(0, 32, 8), strict=True):
        share = np.mean(source.batch_at(position)["labels"][:, :-1] == 5)
        assert row["train/padding labels (%)"] == pytest.approx(share) and share > 0
        assert row["train/masked labels (%)"] == pytest.approx(1 - (1 - share) * 31 / 32)
    m = {"labels": 2 * 31 - 6, "filtered": 6} | dict.fromkeys(("ce", "z_unscaled", "grad_norm", "lr", "skipped"), 0)
    assert step_metrics(m, 1, 8, c)["train/padding labels (%)"] == pytest.approx(6 / 62)
    assert "train/padding labels (%)" not in step_metrics(m | {"labels": 0, "filtered": 8}, 1, 8, c)

    monkeypatch.setattr(vocabulary.TokenCheck, "__call__", lambda self, tokens: [f"odd: {tokens.shape}"])
    assert main(tmp_path / "odd", "run.steps=1", "run.eval_index=null") == 0
    assert "odd: (8, 32)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["s3:x", "gs:", "%s[1]"])
def test_log_below_any_name(tmp_path, monkeypatch, name):
    """A relative folder whose name begins as an address: TensorBoard's writer asks for a library of that storage."""
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    log = MetricsLog(Path(name), 0, Path(name))
    log.write(1, {"train/CE loss": 2.5})
    log.close()
    assert board(tmp_path / name) == {"train/CE loss": [1]} and rows(tmp_path / name)[0]["step"] == 1


def test_damaged_metrics_file(main, straight, tmp_path, capsys):
    """Zeros that a machine which lost power left behind the checkpoint and that end every start; ones before it that
    cost all lines after them; a file that is gone without a word."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    shutil.rmtree(run_dir / "checkpoints" / "16")
    metrics.write_bytes(b"".join(lines[:5]) + b"\0\xff\n" + b"".join(lines[6:]))
    before = snapshot(run_dir / "checkpoints") | {"metrics": metrics.read_bytes()}
    assert main(run_dir) == 2
    assert f"{metrics}, line 6: got" in capsys.readouterr().err.splitlines()[-1]
    assert snapshot(run_dir / "checkpoints") | {"metrics": metrics.read_bytes()} == before
    metrics.write_bytes(b"".join(lines[:15]) + b"\0\0\n" + b"".join(lines[16:]))  # 12 steps, 2 evaluations
    assert main(run_dir) == 0
    assert f"{metrics}, line 16: got" in capsys.readouterr().err
    assert rows(run_dir) == rows(straight)
    metrics.unlink()
    assert main(run_dir, "run.steps=17") == 0
    assert "holds steps up to 0, the checkpoint those up to 16: a gap remains" in capsys.readouterr().err
    assert [r["step"] for r in rows(run_dir) if "train/CE loss" in r] == [17]


def test_skipped_steps_are_counted_not_poured_out(monkeypatch, capsys):
    """A thousand lines that hide everything else; a model that learns nothing any more, without a word."""
    clock = iter(range(10_000))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock) / 10)
    skips = Skips(sigma=6.0)
    for step in range(1, 201):
        skips(step, skipped=step in (5, 7, 9) or step >= 180, loss=9.0, grad_norm=3.0)
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert [int(re.search(r"step (\d+) skipped", line)[1]) for line in lines] == [5, 183, 187, 195]
    assert "WARNING: 4 steps in a row" in lines[1] and "(6 since the last such line)" in lines[1]
    assert "WARNING" not in lines[0] and "WARNING: 16 steps in a row" in lines[3]


def test_summary_for_people():
    """A number that is not known printed as None; the next command with a prompt that a shell takes apart."""
    summary = {
        "step": 700, "parameters": 1902720, "ce": 3.41, "heldout_ce": 3.5423, "heldout": {"all": 3.5423, "code": 3.3217},
        "tokens": 2867200, "tokens_per_second": 13966.2, "skipped_steps": 1, "sample": "def f(x):\n    return x",
        "sample_prompt": "def f(", "checkpoint": "runs/my run/checkpoints/700", "curves": "runs/my run/curves.png",
    }  # fmt: skip
    assert metrics.summary_text(summary).splitlines() == [
        "1,902,720 parameters, 700 steps, 2,867,200 tokens, 13,966 tokens/s, 1 skipped",
        "training cross-entropy 3.4100 nats a token at the last step",
        "held-out cross-entropy 3.5423 (code 3.3217)",
        "the model writes:",
        "    def f(x):",
        "        return x",
        "picture: runs/my run/curves.png",
        "next: python sample.py 'runs/my run' --prompt 'def f('",
    ]
    bare = {name: None for name in summary} | {"step": 4, "parameters": 9, "tokens": 8, "checkpoint": "r/checkpoints/4"}
    assert metrics.summary_text(bare).splitlines() == [
        "9 parameters, 4 steps, 8 tokens",
        "training cross-entropy unknown nats a token at the last step",
        "no picture: metrics.jsonl has no steps",
        "next: python sample.py r",
    ]


@pytest.mark.parametrize(
    ("labels", "drawn"), [(("all", "code"), ["all"]), (("all", "code", "web"), ["all", "code", "web"])]
)
def test_curves_say_each_thing_once(tmp_path, monkeypatch, labels, drawn):
    """Two curves on each other where a run has one held-out label; a title without the model's size."""
    import matplotlib.pyplot as plt

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    log = MetricsLog(tmp_path, 0, tmp_path)
    for step in range(1, 9):
        log.write(step, {"train/CE loss": 8 / step, "optim/LR (group 0)": 1e-3, "optim/total grad norm": 1.0,
                         "optim/step_skipped": 0})  # fmt: skip
    log.write(8, {f"eval/lm/{label}/CE loss": 2.0 for label in labels})
    log.close()
    metrics.draw_curves(tmp_path, summary={"parameters": 1234567, "tokens": 4096})
    top = figures[0].axes[0]
    texts = [text.get_text() for text in top.get_legend().get_texts()]
    assert texts == ["training, means of 1 steps", *(f"held-out {label}: 2.000 at 8" for label in drawn)]
    assert top.get_title() == f"{tmp_path.name}: 1,234,567 parameters, 4,096 tokens"


def test_tensorboard_shows_a_run(straight):
    """A server that does not start after the set-up, another grouping than Ai2's, a picture that it cannot decode."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(Path(sys.executable).parent / "tensorboard"), "--logdir", str(straight.parent), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/{path}", timeout=10) as answer:
            return answer.read()

    try:
        name, deadline, tags = f"{straight.name}/tensorboard", time.monotonic() + 60, {}
        while not tags.get(name) or not json.loads(get("images/tags")).get(name):
            assert server.poll() is None and time.monotonic() < deadline, server.communicate()[1]
            time.sleep(0.3)
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                tags = json.loads(get("scalars/tags"))
        groups = {tag.split("/")[0] for tag in tags[name]}
        assert groups == {"train", "optim", "throughput", "perf", "eval", "checkpoint"}
        (picture,) = json.loads(get(f"images/images?run={urllib.parse.quote(name, safe='')}&tag=curves&sample=0"))
        assert picture["step"] == 16 and get(f"images/individualImage?{picture['query']}")[:4] == b"\x89PNG"
    finally:
        server.kill()
        server.communicate()
