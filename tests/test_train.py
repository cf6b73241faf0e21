"""train.py: resume to the bit, signals, damaged checkpoints, identity, strict configs, and maths that no mesh changes.

What a process does (kill -9, SIGTERM, exit codes) is tried on real processes. They run HOOKED, a script that is
`train.py` and sends itself a signal at an exact place, so that no test depends on how fast the machine is.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from harness import (
    BATCH,
    REPO,
    SEQUENCE,
    STEPS,
    VOCABULARY,
    House,
    assert_same_checkpoint,
    assert_same_run,
    board,
    flip,
    largest,
    refused,
    restore,
    rows,
    schedule_of,
    snapshot,
    steps_in,
    use_devices,
    write_corpus,
)

import data
import model
import train
from checkpoint import read_meta
from config import Config, load_config, local_rows, make_mesh, to_device
from metrics import is_evaluation
from processes import sole_writer


def test_straight_run(straight):
    """Names that are one off; a step or evaluation that is logged twice or not at all; a summary that lies."""
    assert steps_in(straight) == {"4", "8", "12", "16"}
    got = rows(straight)
    assert [r["step"] for r in got if "train/CE loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in got if is_evaluation(r)] == [6, 12, STEPS]
    for step in (4, 16):
        meta = read_meta(straight / "checkpoints" / str(step))
        assert (meta["step"], meta["instances_seen"]) == (step, step * BATCH)
        assert restore(straight, step)["opt_state['count']"] == step
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["step"] == STEPS and summary["tokens"] == STEPS * BATCH * SEQUENCE
    assert summary["ce"] == got[-2]["train/CE loss"] and summary["heldout_ce"] == got[-1]["eval/lm/all/CE loss"]
    assert got[-2]["train/CE loss"] < got[0]["train/CE loss"] - 0.1  # and it learns
    shown = board(straight)
    assert shown["optim/LR (group 0)"] == list(range(1, STEPS + 1))
    assert shown["eval/lm/all/PPL"] == [6, 12, STEPS]


@pytest.mark.parametrize(
    ("kills", "last"),
    [
        ([("step", 3, 0), ("save", 8, 0)], 0),
        ([("save", 4, 3), ("evaluation batch", 3, 0)], 1),
    ],
)
def test_killed_run_continues_to_the_bit(house, straight, tmp_path, kills, last):
    """Law 2: anything that a kill -9 loses or doubles: data position, moments, window, metrics lines, TensorBoard; a
    position that fits one number of loader workers only."""
    for place, number, workers in kills:
        process = house.start(tmp_path, f"loader_workers={workers}", hook=(place, number, signal.SIGKILL))
        _, err = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, err
    house.run(tmp_path, f"loader_workers={last}")
    assert_same_run(tmp_path, straight)
    assert steps_in(tmp_path) == {"4", "8", "12", "16"}  # and no half of a save is left


def test_run_below_an_odd_name(house, straight, tmp_path):
    """A folder with brackets, as sweeps call theirs: what is saved below it is not all there, and a resume sets the only
    good step aside."""
    run_dir = tmp_path / "a b[1]#2%ü*?"
    process = house.start(run_dir, "run.keep_checkpoints=1", hook=("save", 12, signal.SIGKILL))
    assert process.wait(timeout=120) == -signal.SIGKILL, process.communicate()
    assert "8" in steps_in(run_dir)
    _, err = house.run(run_dir, "run.keep_checkpoints=1")
    assert f"resuming from {run_dir / 'checkpoints'}/" in err and "damaged" not in err
    assert_same_run(run_dir, straight)
    assert steps_in(run_dir) == {"16"}


def test_signals_save_the_last_finished_step(house, straight, tmp_path):
    """A signal during the first compile, an evaluation or the loop, or a second one, that is not heeded,
    saves nothing, or leaves out the evaluation that it cut short. One loader worker beside."""
    term, interrupt = signal.SIGTERM, signal.SIGINT
    plan = [
        (("step", 1, term), 143, {"1"}),  # before the first step is compiled
        (("step", 5, term, term), 143, {"1", "4", "5"}),
        (("evaluation batch", 1, term), 143, {"1", "4", "5", "6"}),  # of two batches
        (("evaluation batch", 1, term), 143, {"1", "4", "5", "6"}),  # and again, in the one that makes up for it
        (("step", 9, interrupt), 130, {"1", "4", "5", "6", "8", "9"}),
    ]
    for hook, code, saved in plan:
        _, err = house.run(tmp_path, "loader_workers=1", hook=hook, expect=code)
        newest = max(map(int, saved))
        assert steps_in(tmp_path) == saved, err
        assert f"step {newest} is saved in" in err
        assert "held-out" not in err if newest <= 6 else "step 6: held-out CE" in err
    house.run(tmp_path, "loader_workers=1")
    assert_same_run(tmp_path, straight)


def test_complete_run_is_left_alone(main, straight, tmp_path, capsys):
    """A launcher that starts a finished run again must get exit 0 and the summary, and not one new file."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    before = snapshot(run_dir)
    capsys.readouterr()
    assert main(run_dir) == 0
    out, err = capsys.readouterr()
    assert f"already at step {STEPS} of {STEPS}" in err
    assert json.loads(out)["step"] == STEPS
    assert snapshot(run_dir) == before


def test_killed_between_last_save_and_summary(main, straight, tmp_path, capsys):
    """A run that was extended, and killed after its last save, printing the summary of the shorter run."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    stale = json.loads((run_dir / "summary.json").read_text()) | {"step": 12, "ce": 99.0}
    (run_dir / "summary.json").write_text(json.dumps(stale))
    assert main(run_dir) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["step"], summary["ce"]) == (STEPS, rows(straight)[-2]["train/CE loss"])
    assert rows(run_dir) == rows(straight)  # evaluated already: not again


def test_extended_run_keeps_its_curve(main, straight, tmp_path, capsys):
    """Run.steps that stretches the learning rate; a changed schedule that is not announced."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    assert main(run_dir, "run.steps=20") == 0
    assert "run.steps changes from 16 to 20" in capsys.readouterr().err
    assert main(run_dir, "run.steps=22", "schedule.0.total_steps=60", extra=("--allow", "schedule")) == 0
    assert "schedule.0.total_steps changes from 40 to 60" in capsys.readouterr().err
    assert board(run_dir)["checkpoint/load_duration_s"] == [17, 21]
    got = [r["optim/LR (group 0)"] for r in rows(run_dir) if "train/CE loss" in r]
    old, new = [schedule_of(total) for total in (40, 60)]
    assert got[:20] == pytest.approx([old(s) for s in range(1, 21)], rel=1e-6)
    assert got[20:] == pytest.approx([new(s) for s in (21, 22)], rel=1e-6)


def test_restart_that_ends_below_what_was_logged(main, straight, tmp_path):
    """Points of a dead run that lie past the last checkpoint, shown twice or left behind. A copied
    run without Orbax's markers that counts as incomplete; what an interrupted save has left that is deleted."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir, ignore=shutil.ignore_patterns("commit_success.txt"))
    for step in ("12", "16"):
        shutil.rmtree(run_dir / "checkpoints" / step)
    leftover = run_dir / "checkpoints" / "12.orbax-checkpoint-tmp-7" / "params"
    leftover.mkdir(parents=True)
    assert main(run_dir, "run.steps=10", "run.eval_index=null") == 0
    shown = board(run_dir)
    assert shown["train/CE loss"] == list(range(1, 11)) and shown["eval/lm/all/CE loss"] == [6]
    assert rows(run_dir) == rows(straight)[:11]
    assert steps_in(run_dir) == {"4", "8", "10", leftover.parent.name} and leftover.is_dir()


def test_checkpoint_without_its_data_position(main, straight, tmp_path, capsys):
    """Weights that are restored and data that begins anew, so that its start is seen twice."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for step in ("4", "8"):
        shutil.rmtree(run_dir / "checkpoints" / step)
    metadata = run_dir / "checkpoints" / "12" / "meta" / "metadata"
    meta = json.loads(metadata.read_text())
    del meta["instances_seen"]
    metadata.write_text(json.dumps(meta))
    shutil.rmtree(run_dir / "checkpoints" / "16" / "meta")
    before = snapshot(run_dir / "tensorboard") | {"metrics": (run_dir / "metrics.jsonl").read_bytes()}
    assert main(run_dir) == 1
    err = capsys.readouterr().err
    assert "16 is damaged: item 'meta' cannot be read" in err and "12 is damaged: item 'meta'" in err
    assert "lacks instances_seen" in err and "no usable checkpoint is left" in err
    assert snapshot(run_dir / "tensorboard") | {"metrics": (run_dir / "metrics.jsonl").read_bytes()} == before


def test_logged_learning_rate_is_the_applied_one(house, straight, monkeypatch):
    """A first update at rate 0, or a logged rate that is one step off the one used. With fresh moments Adam's
    first update is -lr * sign(gradient), so the rate can be read off a parameter without decay."""
    got = [r["optim/LR (group 0)"] for r in rows(straight) if "train/CE loss" in r]
    assert got == pytest.approx([schedule_of(40)(s) for s in range(1, STEPS + 1)], rel=1e-6)
    use_devices(monkeypatch, 1)
    before, after, m = one_step(load_config(str(house.config), "cpu", []), steps=1)
    moved = np.abs(after["embed"] - before["embed"]).max()  # no decay on embeddings
    assert float(m["lr"]) == got[0] == pytest.approx(1e-2 / 4)
    assert moved == pytest.approx(1e-2 / 4, rel=1e-3)


def test_profile(main, tmp_path, capsys, monkeypatch):
    """A trace that is empty, never closed, or of other steps than it says; one without the names of the source. One that
    hooks the threads of a save: a hook that cannot be set ends its thread, and Orbax takes that for success."""
    start, hooks = jax.profiler.start_trace, []

    def start_trace(*args, **kwargs):
        start(*args, **kwargs)
        hooks.append(threading.getprofile())

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    for steps in (8, 4):  # the second run ends before its profile would
        run_dir = tmp_path / str(steps)
        assert main(run_dir, f"run.steps={steps}", "run.eval_index=null", extra=("--profile", "2")) == 0
        assert "profile from step 3 on" in capsys.readouterr().err
        traces = list((run_dir / "profile").rglob("*.xplane.pb"))
        assert len(traces) == 1
        trace = traces[0].read_bytes()
        assert all(name in trace for name in (b"model.py", b"attention.py", b"reduce_gradients"))
    assert hooks == [None, None]
    assert main(tmp_path / "other", extra=("--profile", "-1")) == 2
    assert "--profile: got -1" in capsys.readouterr().err


def test_science_changes_on_request_only(main, straight, tmp_path, capsys):
    """A resume with another rate, loss or mask that is one line among others: half of the curve is another recipe's. The
    skip rule's window, whose length is part of the state, blamed on the model."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    before = snapshot(run_dir)
    changes = ("optim.peak_lr=2e-2", "loss.z_loss=0.0", "data.repetition_filter=false", "data.mask_token=5",
               "data.document_mask=true", "model.compute_dtype=bfloat16", "schedule.0.total_steps=60")  # fmt: skip
    for change in changes:
        key = change.partition("=")[0]
        assert main(run_dir, "run.steps=18", change, extra=("--allow", "optim.eps")) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert f"{key}: got " in err and f"--allow {key} if it is meant" in err, err
    for extra in ((), ("--allow", "optim")):
        assert main(run_dir, "run.steps=18", "optim.skip_window=6", extra=extra) == 2
        assert "optim.skip_window: got 6, expected 8 as in the run; the window is a part" in capsys.readouterr().err
    assert main(run_dir, "run.steps=18", extra=("--allow", "optim.peak_rl")) == 2
    assert "--allow optim.peak_rl: unknown key; did you mean 'optim.peak_lr'?" in capsys.readouterr().err
    assert snapshot(run_dir) == before
    allow = ("--allow", "optim", "--allow", "loss.z_loss")
    assert main(run_dir, "run.steps=18", *changes[:2], "run.eval_index=null", extra=allow) == 0
    err = capsys.readouterr().err
    assert "optim.peak_lr changes from 0.01 to 0.02" in err and "loss.z_loss changes from 1e-05 to 0.0" in err
    assert "run.steps changes from 16 to 18" in err


def test_other_data_is_refused(main, straight, tmp_path, capsys):
    """A run that goes on with other tokens, another order or another model under the same name."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other", "train", {"web": 100, "code": 61}, seed=7)
    files = [("web", tmp_path / "other" / "train" / "web" / "part-00000.npy")]
    index = data.build_index(files, tmp_path / "other", 16, tokenizer="none", vocab_size=VOCABULARY, eos_id=0)
    short = tmp_path / "other" / "short.json"
    data.write_index(index, short)
    before = snapshot(run_dir)
    for override, named in (
        (f"data.index={other}", "data.fingerprint: got sha256:"),
        ("data.order=feistel", "data.order: got feistel, expected olmo_core"),
        ("data.seed=1", "data.seed: got 1, expected 34521"),
        ("model.d_ff=48", "model.d_ff: got 48, expected 40"),
        ("model.n_layers=8", "model.n_layers: got 8, expected 4"),
        ("model.window=16", "model.window: got 16, expected 8"),
        (
            f"data.index={short} data.sequence_length=16 run.eval_index=null",
            "data.sequence_length: got 16, expected 32",
        ),
    ):
        assert main(run_dir, "run.steps=20", *override.split()) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert named in err and "checkpoints/16" in err, err
    assert snapshot(run_dir) == before


def instances_of(monkeypatch, call) -> list[list[int]]:
    """The instances that each step of `call()` trains on, as the loop hands them to the device. No evaluation."""
    seen = []

    def spy(batch, *args):
        seen.append(batch["instance"].tolist())
        return to_device(batch, *args)

    with monkeypatch.context() as m:
        m.setattr(train, "to_device", spy)
        assert call() == 0
    return seen


def test_global_batch_changes_in_the_first_epoch(main, tmp_path, capsys, monkeypatch):
    """A position counted in batches points elsewhere when the batch grows. Later: test_epoch_boundary."""
    no_evaluation = "run.eval_index=null"
    assert main(tmp_path, "data.global_batch=4", "run.steps=4", no_evaluation) == 0
    more = ("data.global_batch=8", "run.steps=7", no_evaluation)
    assert main(tmp_path, *more) == 2
    assert "fix: leave them as they were, or --allow data.global_batch" in capsys.readouterr().err
    ids = instances_of(monkeypatch, lambda: main(tmp_path, *more, extra=("--allow", "data.global_batch")))
    assert "data.global_batch changes from 4 to 8" in capsys.readouterr().err
    order = data.olmo_core_permutation(161, 34521, 1)
    assert np.concatenate(ids).tolist() == order[16:40].tolist()
    assert read_meta(tmp_path / "checkpoints" / "7")["instances_seen"] == 40


def test_epoch_boundary(main, tmp_path, capsys, monkeypatch):
    """A resume at the end of an epoch that repeats it, skips the next, or shuffles from history. The
    same position means other instances in later epochs once the batch changes."""
    overrides = ("data.global_batch=40", "run.eval_index=null", "microbatch=40")  # 161 instances: 4 batches, 1 dropped

    def part(steps):
        ids = instances_of(monkeypatch, lambda: main(tmp_path, f"run.steps={steps}", *overrides))
        return [np.concatenate(ids)]

    epochs = part(4) + part(8) + part(12)
    for number, epoch in enumerate(epochs, start=1):
        assert epoch.tolist() == data.olmo_core_permutation(161, 34521, number)[:160].tolist()
        assert len(set(epoch.tolist())) == 160
    assert steps_in(tmp_path) == {"4", "8", "12"}
    assert len(rows(tmp_path)) == 12
    capsys.readouterr()
    assert main(tmp_path, "data.global_batch=8", "run.steps=13", "run.eval_index=null") == 2
    assert "data.global_batch: got 8, expected 40: it can change in the first epoch only" in capsys.readouterr().err


def with_step(monkeypatch, change):
    """compile_train_step whose step calls change(step, params, batch, opt_state) -> (params, batch) first."""
    compile_train_step = train.compile_train_step

    def compile_changed(c, mesh):
        step_fn = compile_train_step(c, mesh)
        return lambda params, state, batch, step: step_fn(*change(int(step), params, state, batch), step)

    monkeypatch.setattr(train, "compile_train_step", compile_changed)


def test_diverged_run_ends_before_it_writes_nan(main, tmp_path, capsys, monkeypatch):
    """Cases 39, 41: one NaN gradient that destroys every weight; a run that goes on, or writes NaN, for ever."""

    def break_from_7(step, params, state, batch):
        if step >= 7:
            params = params | {"final_norm": params["final_norm"] * jnp.nan}
        return params, state, batch

    with_step(monkeypatch, break_from_7)
    assert main(tmp_path, "run.eval_index=null", "run.checkpoint_every=1") == 1
    err = capsys.readouterr().err.splitlines()
    assert "step 9: 3 non-finite steps in a row (optim.max_nonfinite_steps)" in err[-1]
    assert "parameters are those of step 6" in err[-1] and "checkpoints/8" in err[-1]
    assert any("step 7 skipped" in line and "is not finite (1 in a row)" in line for line in err)
    broken = rows(tmp_path)[6:]  # strict JSON: rows() refuses NaN
    assert [r["step"] for r in broken] == [7, 8, 9] and all(r["train/CE loss"] is None for r in broken)
    assert all(r["optim/step_skipped"] == 1 for r in broken)
    saved = restore(tmp_path, 8)
    assert all(np.isfinite(x).all() for name, x in saved.items() if "final_norm" not in name)
    assert np.array_equal(saved["params['wq']"], restore(tmp_path, 6)["params['wq']"])
    assert board(tmp_path)["train/CE loss"] == list(range(1, 10))


def test_nan_in_one_gradient_is_named(house, monkeypatch):
    """The loss is finite, one gradient is not; every parameter survives and the log can say which it was."""
    c = load_config(str(house.config), "cpu", [])
    reduce_gradients = model.reduce_gradients

    def poisoned(grads, config):
        grads = reduce_gradients(grads, config)
        return grads | {"w_up": grads["w_up"] * jnp.nan}

    monkeypatch.setattr(model, "reduce_gradients", poisoned)
    use_devices(monkeypatch, 1)
    before, after, m = one_step(c, steps=1)
    assert np.isfinite(m["ce"]) and np.isnan(m["grad_norm"])
    assert list(model.ledger(c.model))[int(m["first_nonfinite_gradient"])] == "w_up"
    assert all(np.array_equal(before[name], after[name]) for name in before)


def one_step(c: Config, steps: int):
    """(parameters before, parameters after, metrics of the last step) of `steps` steps, as numpy."""
    mesh = make_mesh(c)
    source = data.open_data(c.data, rows=local_rows(mesh, c.data.global_batch))
    params, state = train.init_state(c, mesh)
    before = jax.device_get(params)
    step_fn = train.compile_train_step(c, mesh)
    for step in range(1, steps + 1):
        batch = to_device(source.batch_at((step - 1) * c.data.global_batch), mesh, c, c.data.global_batch)
        params, state, m = step_fn(params, state, batch, np.int32(step))
    return before, jax.device_get(params), jax.device_get(m)


def test_spike_is_skipped_after_a_resume_too(main, tmp_path, monkeypatch, capsys):
    """The rolling window is not in the checkpoint, so that a resumed run trains on a spike that the straight
    run skipped. Skipped means: no parameter, moment or count moves, and the rate goes on by the global step."""

    def spike_at_14(step, params, state, batch):
        if step == 14:  # a wrong answer everywhere, from a model that is much too sure of it
            params = params | {"lm_head": params["lm_head"] * 200}
        return params, state, batch

    with_step(monkeypatch, spike_at_14)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    short = ("run.eval_index=null", "run.checkpoint_every=13")
    assert main(straight, *short) == 0
    assert main(resumed, "run.steps=13", *short) == 0
    assert main(resumed, *short) == 0
    got, again = rows(straight), rows(resumed)
    assert [r["step"] for r in got if r["optim/step_skipped"]] == [14]
    assert got == again
    assert_same_checkpoint(straight, resumed)
    err = capsys.readouterr().err
    assert err.count("step 14 skipped: CE ") == 2 and "more than 6 standard deviations above its last values" in err
    assert restore(straight)["opt_state['count']"] == STEPS - 1
    assert got[13]["optim/LR (group 0)"] == pytest.approx(schedule_of(40)(14), rel=1e-6)


def test_init_from(main, straight, tmp_path, capsys):
    """A path that is never read; a new stage that inherits moments, step or data position."""
    start = ("--init-from", str(straight))
    assert main(tmp_path / "new", "run.steps=1", "run.checkpoint_every=1", extra=start) == 0
    err = capsys.readouterr().err
    assert f"start: parameters of {straight / 'checkpoints' / '16'}, fresh moments" in err
    assert "no checkpoint in" in err
    state = restore(tmp_path / "new", 1)
    assert state["opt_state['count']"] == 1 and state["opt_state['recorded']"] == 1
    assert read_meta(tmp_path / "new" / "checkpoints" / "1")["instances_seen"] == BATCH
    first = rows(tmp_path / "new")[0]
    assert first["train/CE loss"] < rows(straight)[0]["train/CE loss"] - 0.1
    # From step 12 rather than the newest, and again in the same folder: it has checkpoints of its own now.
    at_12 = ("--init-from", str(straight / "checkpoints" / "12"))
    assert main(tmp_path / "new", "run.steps=2", extra=at_12) == 0
    assert "is not used" in capsys.readouterr().err


def test_init_from_what_is_not_there(main, straight, tmp_path, capsys):
    """A typo in the path that starts from fresh weights."""
    for extra, named in (
        (("--init-from", str(tmp_path / "nowhere")), "nowhere: no checkpoint found"),
        (("--init-state", "adam"), "--init-state adam: got no --init-from"),
    ):
        assert main(tmp_path / "new", extra=extra) == 2
        err = capsys.readouterr().err
        assert named in err and "Traceback" not in err
        assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_init_from_another_model(main, straight, tmp_path, capsys):
    """Parameters whose shapes fit by chance: other heads, another window, another RoPE, another epsilon."""
    for override, named in (
        ("model.n_heads=6 model.n_kv_heads=6 model.head_dim=8", "model.n_heads: got 6, expected 4 as there"),
        ("model.window=16", "model.window: got 16, expected 8"),
        ("model.rope_theta=10000.0", "model.rope_theta: got 10000.0, expected 500000.0"),
        ("model.pattern=ssss", "model.pattern: got ssss, expected sssf"),
        ("model.d_ff=48", "model.d_ff: got 48, expected 40"),
    ):
        assert main(tmp_path / "new", *override.split(), extra=("--init-from", str(straight))) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert named in err and f"--init-from {straight / 'checkpoints' / '16'}" in err
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_init_from_a_copy_under_another_number(main, straight, tmp_path, capsys):
    """A copied and renamed checkpoint that is called incomplete or deleted, as one without its marker is."""
    copy = tmp_path / "weights" / "0"
    shutil.copytree(straight / "checkpoints" / "16", copy)
    markers = [*copy.rglob("commit_success.txt")]
    for _ in range(2):
        before = snapshot(copy)
        run_dir = tmp_path / f"new {len(before)}"
        assert main(run_dir, "run.steps=1", "run.eval_index=null", extra=("--init-from", str(copy))) == 0
        assert f"start: parameters of {copy}, fresh moments" in capsys.readouterr().err
        assert snapshot(copy) == before and rows(run_dir)[0]["train/CE loss"] < rows(straight)[0]["train/CE loss"] - 0.1
        for marker in markers:
            marker.unlink(missing_ok=True)
    assert markers


def test_three_stages_on_changing_machines(house, main, straight, tmp_path, capsys, monkeypatch):
    """Stage 1 -> stage 2 -> stage 3, each from the moments of the one before, as commands; a stage that takes over what is not
    its own, goes on where another has ended, or needs more than another hardware file on another machine."""
    short = yaml.safe_load(house.config.read_text())
    linear = {"until": None, "kind": "linear", "warmup_steps": 0, "total_steps": 8, "final_fraction": 0.0}
    short |= {"schedule": [linear], "run": short["run"] | {"name": "stage2", "steps": 3, "eval_index": None}}
    short["data"] |= {"seed": 1337, "global_batch": 4, "repetition_filter": False}
    files = [("long", house.root / "train" / "web" / "part-00000.npy")]
    index = data.build_index(files, house.root, 2 * SEQUENCE, tokenizer="none", vocab_size=VOCABULARY, eos_id=0)
    data.write_index(index, house.root / "long.json")
    long = json.loads(json.dumps(short))
    long["model"]["yarn"] = {"factor": 2.0, "original_length": SEQUENCE, "beta_fast": 32.0, "beta_slow": 1.0}
    long["data"] |= {"sequence_length": 2 * SEQUENCE, "document_mask": True, "index": str(house.root / "long.json")}
    configs = {"stage2": short, "stage3": long}
    for name, content in configs.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    machine = yaml.safe_load((REPO / "configs" / "hardware" / "cpu.yaml").read_text())
    machine |= {"mesh": {"data": 1, "fsdp": 2, "context": 2, "tensor": 1}, "microbatch": 1, "attention": "dense",
                "remat": ["x"], "loader_workers": 0, "compilation_cache": str(house.cache)}  # fmt: skip
    (tmp_path / "another.yaml").write_text(yaml.safe_dump(machine))

    def start(stage: str, run_dir: Path, source: Path, hardware="cpu", devices=1) -> tuple[int, str]:
        use_devices(monkeypatch, devices)
        capsys.readouterr()
        argv = ["--config", str(tmp_path / f"{stage}.yaml"), "--hardware", str(hardware), "--run-dir", str(run_dir)]
        code = train.main([*argv, "--init-from", str(source), "--init-state", "adam"])
        return code, capsys.readouterr().err

    stage1 = tmp_path / "stage1"
    shutil.copytree(straight, stage1)
    code, err = start("stage2", stage1, stage1)  # in the folder of stage 1
    assert code == 2 and "data.seed: got 1337, expected 34521" in err and snapshot(stage1) != {}
    assert start("stage2", tmp_path / "stage2", stage1)[0] == 0
    assert start("stage2", tmp_path / "elsewhere", stage1, tmp_path / "another.yaml", 4)[0] == 0
    here, elsewhere = rows(tmp_path / "stage2"), rows(tmp_path / "elsewhere")
    for a, b in zip(here, elsewhere, strict=True):
        assert a["train/CE loss"] == pytest.approx(b["train/CE loss"], rel=1e-4)
    assert [r["throughput/total tokens"] for r in here] == [4 * SEQUENCE * s for s in (1, 2, 3)]
    assert here[0]["optim/LR (group 0)"] == pytest.approx(1e-2 * 7 / 8, rel=1e-6)
    assert here[0]["train/CE loss"] < rows(straight)[0]["train/CE loss"] - 0.1
    state = restore(tmp_path / "stage2", 3)
    assert state["opt_state['count']"] == STEPS + 3 and state["opt_state['recorded']"] == 3

    code, err = start("stage3", tmp_path / "stage2", tmp_path / "stage2")
    assert code == 2 and "data.sequence_length: got 64, expected 32" in err
    code, err = start("stage3", tmp_path / "stage3", tmp_path / "stage2", tmp_path / "another.yaml", 4)
    assert code == 0 and "model.yarn changes from None to {'factor': 2.0" in err
    assert restore(tmp_path / "stage3", 3)["opt_state['count']"] == STEPS + 6
    assert rows(tmp_path / "stage3")[0]["throughput/total tokens"] == 4 * 2 * SEQUENCE


def test_init_from_a_damaged_checkpoint(main, straight, tmp_path, capsys):
    """Half-read parameters as the start of a new stage."""
    source = tmp_path / "source"
    shutil.copytree(straight, source)
    flip(largest(source / "checkpoints" / "16" / "params"))
    assert main(tmp_path / "new", extra=("--init-from", str(source))) == 1
    assert "checkpoints/16: " in capsys.readouterr().err.splitlines()[-1]


MESHES = {
    "fsdp 4": (4, {"fsdp": 4}),
    "data 2, fsdp 2": (4, {"data": 2, "fsdp": 2}),
    "tensor 2, context 2": (4, {"tensor": 2, "context": 2}),
    "all": (8, {"fsdp": 2, "tensor": 2, "context": 2}),
}


def five_steps(house: House, *overrides: str) -> tuple[list[dict], dict]:
    """Metrics and final parameters. A large eps: Adam's first step is the sign of a gradient, whatever its size, and
    would turn the last bit of a small one into a whole step."""
    c = load_config(str(house.config), "cpu", ["optim.eps=1e-2", *overrides])
    mesh = make_mesh(c)
    source = data.open_data(c.data, rows=local_rows(mesh, c.data.global_batch))
    params, state = train.init_state(c, mesh)
    step_fn, metrics = train.compile_train_step(c, mesh), []
    for step in range(1, 6):
        batch = to_device(source.batch_at((step - 1) * c.data.global_batch), mesh, c, c.data.global_batch)
        params, state, m = step_fn(params, state, batch, np.int32(step))
        metrics.append({name: float(x) for name, x in jax.device_get(m).items()})
    return metrics, jax.device_get(params)


@pytest.fixture(scope="module")
def reference(house):
    with pytest.MonkeyPatch.context() as m:
        use_devices(m, 1)
        return five_steps(house, "microbatch=8")


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_does_not_change_the_maths(house, reference, monkeypatch, mesh):
    """Law 3: a norm over one shard, a part counted twice, a batch cut otherwise."""
    devices, sizes = MESHES[mesh]
    use_devices(monkeypatch, devices)
    sets = [f"mesh.{axis}={sizes.get(axis, 1)}" for axis in model.AXES]
    compare(five_steps(house, *sets), reference)


@pytest.mark.parametrize(
    "sets",
    [
        ("microbatch=1", "remat=[x, q, k, v]", "scan_unroll=1"),
        ("microbatch=2", "attention=dense", "loss_chunk=8"),
        ("microbatch=4", "remat={8: [x]}", "attention_block=16"),
    ],
    ids=lambda s: s[0],
)
def test_machine_does_not_change_the_maths(house, reference, monkeypatch, sets):
    """Law 3: gradients averaged over micro-batches, clipping by micro-batch, a kernel of its own."""
    use_devices(monkeypatch, 1)
    compare(five_steps(house, *sets), reference)


def compare(got, expected) -> None:
    for a, b in zip(got[0], expected[0], strict=True):
        assert a["lr"] == b["lr"] and a["labels"] == b["labels"]
        for name in ("ce", "z_unscaled", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    for name, x in got[1].items():
        np.testing.assert_allclose(x, expected[1][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_run_continues_on_another_mesh(house, straight, tmp_path):
    """A checkpoint that can only be read on the devices that wrote it."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    for step in ("12", "16"):
        shutil.rmtree(run_dir / "checkpoints" / step)
    house.run(run_dir, "mesh={data: 1, fsdp: 2, context: 1, tensor: 2}", devices=4)
    for got, expected in zip(rows(run_dir), rows(straight), strict=True):
        for tag in got:
            assert got[tag] == pytest.approx(expected[tag], rel=2e-2 if "norm" in tag else 1e-3), tag
    assert rows(run_dir)[:9] == rows(straight)[:9]  # steps 1 to 8 and an evaluation are those of the first mesh


def test_run_dir_that_cannot_be(house, main, tmp_path, capsys, monkeypatch):
    """ "gs://bucket/x" through pathlib makes a folder "gs:"; a path below a file is a failure, not a traceback."""
    monkeypatch.chdir(tmp_path)
    for url in ("gs://no-such-bucket/x", "gs:/no-such-bucket/x"):
        assert "got a URL, expected a local path" in refused(capsys, house.argv(url))
    assert list(tmp_path.iterdir()) == []
    assert main(house.config / "run") == 1  # below a file: root cannot write there either
    out, err = capsys.readouterr()
    assert err.startswith("train.py: error: ") and err.count("\n") == 1 and str(house.config) in err


@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_token_files(house, main, tmp_path, capsys, workers):
    """A file that shrank, and an id beyond the vocabulary, which an embedding look-up would clamp in silence."""
    index = write_corpus(tmp_path, "train", {"web": 30}, seed=3)
    tokens = tmp_path / "train" / "web" / "part-00000.npy"
    content = np.fromfile(tokens, np.uint32)
    overrides = (f"data.index={index}", f"loader_workers={workers}", "run.eval_index=null")
    content[300:420] = 97  # in the middle: neither size nor ends of the file change... and these are its first 4 KiB
    content.tofile(tokens)
    assert main(tmp_path / "run", *overrides) == 2
    assert "got other first or last 4 KiB than the index says" in capsys.readouterr().err.splitlines()[-1]
    index = write_index_of(tmp_path, tokens)
    assert main(tmp_path / "run", *overrides) == 2
    assert "got id 97, expected below the vocabulary size 97" in capsys.readouterr().err.splitlines()[-1]
    os.truncate(tokens, 1000)
    assert "got 1000 bytes, the index says" in refused(capsys, house.argv(tmp_path / "run", *overrides))


def write_index_of(root: Path, tokens: Path) -> str:
    index = data.build_index([("web", tokens)], root, SEQUENCE, tokenizer="none", vocab_size=VOCABULARY, eos_id=0)
    data.write_index(index, root / "train.json")
    return str(root / "train.json")


def fail_at(monkeypatch, step: int, error: Exception) -> None:
    """The batch of `step` cannot be put on the devices."""
    calls = iter(range(1, 100))

    def failing(*args):
        if next(calls) == step:
            raise error
        return to_device(*args)

    monkeypatch.setattr(train, "to_device", failing)


def test_bug_in_a_step_is_no_wrong_usage(main, tmp_path, monkeypatch):
    """A ValueError of ours, or of zip and numpy called by us, in the middle of a run that ends as one line and exit code
    2: no traceback, and a launcher never tries again. The step that was done before it is missing from the log."""
    fail_at(monkeypatch, 3, ValueError("zip() argument 2 is shorter than argument 1"))
    with pytest.raises(ValueError, match="zip"):
        main(tmp_path / "run", "run.eval_index=null")
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2]


def test_bad_data_in_the_middle_of_a_run(main, tmp_path, capsys):
    """An id beyond the vocabulary that is met in step 3: one line with its place, as before the first step, but 1."""
    index = write_corpus(tmp_path, "train", {"web": 40}, seed=3)
    tokens = tmp_path / "train" / "web" / "part-00000.npy"
    content = np.fromfile(tokens, np.uint32)
    content[SEQUENCE * data.olmo_core_permutation(40, 34521, 1)[2 * BATCH + 1] + 5] = 97
    content.tofile(tokens)
    index = write_index_of(tmp_path, tokens)
    assert main(tmp_path / "run", f"data.index={index}", "run.eval_index=null", "run.steps=5") == 1
    out, err = capsys.readouterr()
    assert "got id 97, expected below the vocabulary size 97" in err.splitlines()[-1] and "Traceback" not in err
    assert [r["step"] for r in rows(tmp_path / "run")] == [1, 2]


def test_complete_run_whose_log_was_not_copied(main, straight, tmp_path, capsys):
    """KeyError 'train/CE loss', exit code 1, where a complete run has only its checkpoints: a launcher gives up."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight / "checkpoints", run_dir / "checkpoints")
    for _ in range(2):  # the second time the summary is there
        assert main(run_dir, "run.eval_index=null") == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["step"], summary["tokens"]) == (STEPS, STEPS * BATCH * SEQUENCE)
        assert summary["ce"] is summary["heldout_ce"] is summary["skipped_steps"] is summary["curves"] is None
    (run_dir / "summary.json").unlink()
    assert main(run_dir) == 0  # with held-out data: evaluated again
    assert json.loads(capsys.readouterr().out)["heldout_ce"] == rows(straight)[-1]["eval/lm/all/CE loss"]


def test_two_trainers_of_one_run(house, straight, tmp_path):
    """Two processes that write one run: checkpoints of one beside the log of the other."""
    first = house.start(tmp_path / "run", hook=("step", 3, signal.SIGSTOP), log=tmp_path / "log")
    for _ in range(600):
        if (tmp_path / "log").exists() and '"step": 2' in (tmp_path / "log").read_text():
            break
        time.sleep(0.2)
    try:
        _, err = house.run(tmp_path / "run", expect=1)
        assert f"is being written by process {first.pid} on " in err and str(tmp_path / "run") in err
    finally:
        first.send_signal(signal.SIGCONT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert_same_run(tmp_path / "run", straight)
    assert not (tmp_path / ".run.lock").exists()


def test_run_from_another_folder(house, main, straight, tmp_path, capsys, monkeypatch):
    """A config whose index path means something only in the folder where it was written; ~ as a folder's name; a data
    root that does not hold the index; RUN/config.yaml, the record of what was run, that cannot be run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(house.root, tmp_path / "home" / "corpus", ignore=shutil.ignore_patterns("straight", "xla"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    sets = ("data.index=corpus/train.json", "run.eval_index=corpus/heldout.json", "run.steps=2")
    assert main("~/run", *sets) == 2
    err = capsys.readouterr().err
    assert "corpus/train.json: got no such file, expected an index; looked for" in err
    assert str(tmp_path / "elsewhere" / "corpus") in err and str(REPO / "corpus") in err
    assert main("~/run", *sets, extra=("--data-root", "~/corpus")) == 0
    assert f"corpus/train.json is taken from {tmp_path}/home/corpus/train.json" in capsys.readouterr().err
    again = ["--config", "~/run/config.yaml", "--run-dir", "again", "--data-root", "~/corpus"]
    assert train.main(again) == 0
    assert "hardware: as " in capsys.readouterr().err
    assert_same_checkpoint(tmp_path / "home" / "run", tmp_path / "elsewhere" / "again", step=2)
    assert sorted(os.listdir()) == ["again"]
    meta = read_meta(tmp_path / "home" / "run" / "checkpoints" / "2")
    assert meta["data"]["index_path"] == str(tmp_path / "home" / "corpus" / "train.json")


def test_log_and_order_in_a_local_folder(house, straight, tmp_path):
    """Where the run directory is a bucket: random reads of the order and a file that is rewritten at each step. A kill
    between two saves loses what the checkpoint has behind it, or doubles it."""
    local = ("--local-dir", str(tmp_path / "local"))
    run_dir = tmp_path / "bucket" / "run"
    process = house.start(run_dir, hook=("step", 11, signal.SIGKILL), extra=local)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert [r["step"] for r in rows(run_dir) if "train/CE loss" in r] == list(range(1, 9))  # as the save of 8 left it
    house.run(run_dir, extra=local)
    assert_same_run(run_dir, straight)
    assert not (run_dir / "order").exists() and list((tmp_path / "local" / "run" / "order").iterdir())


def test_local_folder_of_two_runs(main, tmp_path, capsys):
    """Two runs of one name in different places, whose logs are written into one local file."""
    with sole_writer(tmp_path / "local" / "run"):
        assert main(tmp_path / "a" / "run", "run.steps=1", extra=("--local-dir", str(tmp_path / "local"))) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "is being written by process" in err and str(tmp_path / "local" / "run") in err
    assert not (tmp_path / "a" / "run").exists()


def test_failure_leaves_nothing_behind(house, tmp_path):
    """Semaphores of the loader's workers that Python complains of below the line that says why the run has ended."""
    shutil.copytree(house.root / "train", tmp_path / "train")
    index = shutil.copy(house.root / "train.json", tmp_path)
    source = data.open_data(load_config(str(house.config), "cpu", []).data)
    later = (int(i) for k in range(5, STEPS) for i in source.instances_at(BATCH * k))
    file, offset = next(source.locate(i) for i in later if 40 < i < 60)  # between what the fingerprint covers
    with open(tmp_path / file.path, "r+b") as f:
        f.seek(4 * (offset + 3))
        f.write((10**6).to_bytes(4, "little"))
    sets = (f"data.index={index}", "run.eval_index=null", "loader_workers=1")
    _, err = house.run(tmp_path / "run", *sets, expect=1)
    assert "got id 1000000" in err.splitlines()[-1]


def test_full_disk_is_an_error(house, tmp_path):
    """Law 6: a background save that fails while the run goes on without checkpoints, and ends with exit code 0."""
    limited = f"ulimit -f 100; exec {sys.executable} {REPO / 'train.py'} " + " ".join(
        shlex.quote(a) for a in house.argv(tmp_path / "run", "compilation_cache=null", "run.eval_index=null")
    )
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(["bash", "-c", limited], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    # Orbax's threads log the other leaves' failures beside it, before or after.
    assert re.search("train.py: error: .*/4: a checkpoint could not be written.*File too large", done.stderr), (
        done.stderr
    )


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="nothing is unwritable for root")
def test_folder_that_cannot_be_written(house, main, straight, tmp_path, capsys):
    """A run that goes on without checkpoints; one that cannot go on when the folder is mended."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight, run_dir)
    before = snapshot(run_dir / "checkpoints")
    (run_dir / "checkpoints").chmod(0o555)
    command = [sys.executable, str(REPO / "train.py"), *house.argv(run_dir, "run.steps=18", "run.eval_index=null")]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *command]
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    (run_dir / "checkpoints").chmod(0o755)
    assert done.returncode == 1 and done.stdout == ""
    assert re.search("train.py: error: .*/18: a checkpoint could not be written: .*Permission denied", done.stderr)
    assert snapshot(run_dir / "checkpoints") == before
    assert main(run_dir, "run.steps=18", "run.eval_index=null") == 0
    assert "resuming from" in capsys.readouterr().err and steps_in(run_dir) == {"4", "8", "12", "16", "18"}


def test_what_a_person_sees(house, tmp_path):
    """A progress bar that is torn by other lines, or whose time left counts the compilation; warnings of libraries."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, str(REPO / "train.py"), *house.argv(tmp_path / "run")]
    process = subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": ""}, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process is
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "100%" in text and "evaluating" in text and "warn" not in text.lower()
    assert (
        f" 1/{STEPS} [" in text and f" 0/{STEPS} [" not in text
    )  # a bar that began earlier would time the compilation
    visible = [line.split("\r")[-1] for line in text.replace("\r\n", "\n").split("\n")]
    assert "{" in visible  # the summary begins on a line of its own
    for line in visible:
        if "held-out CE" in line:
            assert line.strip("\x1b[A ").startswith("step "), line
