"""evaluate.py: the number is the one that training printed, whatever the batch and the devices, token by token."""

import json
import os
import shutil
import subprocess
import sys

import harness
import jax
import numpy as np
import pytest
from harness import SEQUENCE, STEPS
from test_train import flip, largest

import data
import evaluate
import model
import train


@pytest.fixture
def loss(house, straight, monkeypatch, capsys):
    """loss(*arguments) -> what `evaluate.py loss RUN --hardware cpu ...` prints, on one device of this process."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def call(*arguments: str, checkpoint=straight, expect: int = 0):
        capsys.readouterr()
        code = evaluate.main(["loss", str(checkpoint), "--hardware", "cpu", *arguments])
        out, err = capsys.readouterr()
        assert code == expect, err
        return err if expect else json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


def training_said(run_dir, step: int = STEPS) -> dict:
    rows = [r for r in harness.rows(run_dir) if r["step"] == step and train.is_evaluation(r)]
    assert len(rows) == 1
    return rows[0]


def test_the_number_that_training_printed(house, straight, loss):
    """Another mask, another forward pass, z-loss or padding: a held-out loss that is not comparable with the curve."""
    expected = training_said(straight)
    command = [sys.executable, str(train.HERE / "evaluate.py"), "loss", str(straight)]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    printed = json.loads(done.stdout)
    assert done.stderr == ""
    assert printed["step"] == STEPS
    for label in ("all", "web", "code"):
        assert printed["heldout"][label]["ce"] == expected[f"eval/lm/{label}/CE loss"]  # exactly
        assert printed["heldout"][label]["perplexity"] == expected[f"eval/lm/{label}/PPL"]
    assert loss(checkpoint=straight / "checkpoints" / "12")["step"] == 12
    assert loss("--set", "loss.z_loss=1.0")["heldout"] == loss()["heldout"]  # z-loss has no part in it


def test_every_token_counts_once(house, straight, loss):
    """Case 97: averages of averages, a last batch that is dropped or weighs too much, a label that is left out."""
    found = loss("--batch", "4")["heldout"]
    assert {label: r["instances"] for label, r in found.items()} == {"web": 9, "code": 6, "all": 15}
    for r in found.values():
        assert r["tokens"] == r["instances"] * (SEQUENCE - 1)
        assert r["perplexity"] == pytest.approx(np.exp(r["ce"]))
    # The same from the model's logits, one sequence at a time, in float64.
    c = train.load_config(str(house.config), "cpu", [])
    params = train.restore_item(
        straight / "checkpoints" / str(STEPS), "params", train.param_shapes(c, train.make_mesh(c))
    )
    batches = data.EvaluationBatches(house.root / "heldout.json", None, batch=1)
    mesh, specs = train.make_mesh(c), train.param_specs(c)
    spec = jax.sharding.PartitionSpec()
    forward = jax.jit(
        jax.shard_map(
            lambda p, tokens, segments: model.logits(
                model.vary(p), model.vary(tokens), segments, c.model, train.execution(c, 1, "cpu")
            ),
            mesh=mesh, in_specs=(specs, spec, spec), out_specs=jax.sharding.PartitionSpec(model.AXES), check_vma=False,
        )
    )  # fmt: skip
    sums = {"web": [], "code": []}
    for batch, domain in zip(batches, batches.domain, strict=True):
        logits = np.asarray(forward(params, batch["tokens"], None), np.float64).reshape(SEQUENCE, -1)
        logits = logits[:, :97]
        log_z = np.log(np.exp(logits).sum(-1))
        nll = log_z[:-1] - logits[np.arange(SEQUENCE - 1), batch["tokens"][0, 1:]]
        sums[batches.domains[domain]].append(nll.sum())
    for label, instances in (("web", 9), ("code", 6)):
        assert found[label]["ce"] == pytest.approx(sum(sums[label]) / (instances * (SEQUENCE - 1)), rel=1e-6)
    everything = sum(sums["web"]) + sum(sums["code"])
    assert found["all"]["ce"] == pytest.approx(everything / (15 * (SEQUENCE - 1)), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 7, 16])
def test_independent_of_the_batch(loss, batch):
    """Rows of padding that count, or a batch that decides how instances are weighted."""
    expected, got = loss()["heldout"], loss("--batch", str(batch))["heldout"]
    for label in expected:
        assert got[label]["ce"] == pytest.approx(expected[label]["ce"], rel=1e-6)
        assert (got[label]["tokens"], got[label]["instances"]) == (
            expected[label]["tokens"], expected[label]["instances"]
        )  # fmt: skip


@pytest.mark.parametrize("mesh", ["fsdp: -1, tensor: 1, context: 1", "fsdp: 1, tensor: 2, context: -1"])
def test_independent_of_the_devices(loss, monkeypatch, mesh):
    """A row that two devices count, or none."""
    expected = loss()["heldout"]
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    got = loss("--set", f"mesh={{data: 1, {mesh}}}")["heldout"]
    for label in expected:
        assert got[label]["ce"] == pytest.approx(expected[label]["ce"], rel=1e-6)
        assert got[label]["tokens"] == expected[label]["tokens"]


def test_weighted_by_tokens(house, monkeypatch):
    """Case 97 in numbers: 100 tokens at 1.0 and 10 at 3.0 are a perplexity of 3.2603, not 7.389 or 11.40. The forward
    pass is replaced by those losses; what is left is how HeldOut adds up."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    c = train.load_config(str(house.config), "cpu", [])
    held_out = train.HeldOut(c, train.make_mesh(c), c.run.eval_index, None, 4, None)
    counts = iter([[10, 10, 10, 10], [10, 10, 10, 10], [10, 10, 0, 0], [0, 10, 0, 99]])  # the 16th row is padding

    def rows_of(params, batch):
        tokens = np.array(next(counts))
        last = not np.any(np.asarray(batch["loss_mask"])[3])  # only the last batch ends in padding
        return tokens * (3.0 if last else 1.0), tokens

    held_out.step = rows_of
    found = held_out(None)
    assert found["all"]["tokens"] == 110 and found["all"]["instances"] == 15
    assert found["all"]["perplexity"] == pytest.approx(3.2603, abs=1e-4)


def test_diverged_model_gives_null(loss, monkeypatch, recwarn):
    """NaN or Infinity in what should be JSON, and a warning about exp on the way."""
    call = train.HeldOut.__call__

    def diverged(self, *args, **how):
        tokens = np.ones(self.c.data.global_batch, int)
        self.step = lambda params, batch: (1e4 * tokens, tokens)
        return call(self, *args, **how)

    monkeypatch.setattr(train.HeldOut, "__call__", diverged)
    found = loss()["heldout"]
    assert found["all"] == {"ce": 1e4, "perplexity": None, "tokens": 15, "instances": 15}
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]


def test_limit_spreads_over_the_labels(house, straight, loss):
    """The first so many instances of a held-out set are all from its first file."""
    limited = loss("--set", "run.eval_batches=1", "--set", "data.global_batch=8")["heldout"]
    assert limited["all"]["instances"] == 8 and 0 < limited["code"]["instances"] < 6
    whole = loss("--set", "run.eval_batches=1", "--index", str(house.root / "heldout.json"))["heldout"]
    assert whole["all"]["instances"] == 15  # an index of one's own is read whole


def test_what_cannot_be_evaluated(house, straight, loss, tmp_path):
    """A wrong checkpoint, index or batch that gives a number all the same, or a traceback."""
    assert "no checkpoint found" in loss(checkpoint=tmp_path, expect=2)
    assert "--batch: got 0, expected a positive number" in loss("--batch", "0", expect=2)
    assert "got no such file, expected an index" in loss("--index", "nowhere.json", expect=2)
    assert "params: w_down: got ((4, 32, 40)" in loss("--set", "model.d_ff=48", expect=2)
    damaged = tmp_path / "damaged"
    shutil.copytree(straight, damaged)
    flip(largest(damaged / "checkpoints" / "16" / "params"))
    (damaged / "checkpoints" / "12" / "meta" / "metadata").write_text("{")
    shutil.rmtree(damaged / "checkpoints" / "8" / "params")
    for step in (16, 12):
        err = loss(checkpoint=damaged / "checkpoints" / str(step), expect=1)
        # What tensorstore prints from C++ of reads in flight beside the damaged leaf is not ours to catch.
        assert f"checkpoints/{step}: " in err and ("Traceback" not in err or "Event loop is closed" in err)
    assert "no checkpoint found" in loss(checkpoint=damaged / "checkpoints" / "8", expect=2)
