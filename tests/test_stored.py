"""What commit 09f1f4b wrote is still read: an index, a checkpoint, a prepared stage and an export, all of one tiny run.

tests/stored/09f1f4b.tar.xz holds them with the metrics of the run's four steps; the checkpoint is that of step 2."""

import json
import tarfile
from pathlib import Path

import pytest
from harness import use_devices

import convert
import data
import train
from checkpoint import read_meta

STORED = Path(__file__).parent / "stored" / "09f1f4b.tar.xz"


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Path:
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    use_devices(monkeypatch, 1)
    return tmp_path


def losses(path: Path) -> dict[int, float]:
    rows = map(json.loads, path.read_text().splitlines())
    return {row["step"]: row["train/CE loss"] for row in rows if "train/CE loss" in row}


def test_index(stored):
    """A fingerprint that other code computes otherwise: every run ends at its next start."""
    assert data.load_index("train.json").instances == 40
    assert data.main(["verify", "train.json"]) == 0


def test_checkpoint_goes_on(stored, capsys):
    """A run of weeks that an update of the code ends, or continues with other data, rate or window."""
    assert train.main(["--config", "stored.yaml", "--hardware", "cpu", "--run-dir", "run"]) == 0
    assert f"resuming from {stored}/run/checkpoints/2: 8 instances seen" in capsys.readouterr().err
    expected, got = losses(stored / "metrics_of_4_steps.jsonl"), losses(stored / "run" / "metrics.jsonl")
    assert list(got) == [1, 2, 3, 4] and got == pytest.approx(expected, rel=1e-4)  # another CPU rounds otherwise


@pytest.mark.parametrize("source", ["run", "warm"])
def test_stage_from_its_moments(stored, capsys, source):
    """A stage that was prepared with the former convert.py stage2-init, and is now in nobody's form."""
    flags = ["--init-from", source, "--init-state", "adam", "--set", "run.steps=2", "--set", "run.name=next"]
    assert train.main(["--config", "stored.yaml", "--hardware", "cpu", "--run-dir", "next", *flags]) == 0
    assert "parameters and Adam moments of " in capsys.readouterr().err
    first, before = losses(stored / "next" / "metrics.jsonl")[1], losses(stored / "metrics_of_4_steps.jsonl")
    assert first < before[1]


def test_export(stored, capsys):
    """A Hugging Face folder of ours that can no longer be imported, or comes back as other numbers."""
    assert convert.main(["from-hf", "export", "imported"]) == 0
    sums = [
        read_meta(Path(run) / "checkpoints" / step)["checksums"]["params"]
        for run, step in (("run", "2"), ("imported", "0"))
    ]
    assert sums[0].keys() == sums[1].keys()
    of_matrices = [{name: s[name] for name in s if "embed" not in name and "lm_head" not in name} for s in sums]
    assert of_matrices[0] == of_matrices[1]  # padding rows of the vocabulary do not travel
