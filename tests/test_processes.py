"""train.py on several real processes (jax.distributed, Gloo) and on changing numbers of devices.

Two processes of one device each must give the bits of one process with two devices: a sum of two has one order.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from harness import (
    BATCH,
    SEQUENCE,
    STEPS,
    VOCABULARY,
    assert_same_run,
    free_port,
    logged,
    restore,
    rows,
    start,
    steps_in,
)
from safetensors import safe_open

import convert
import data
import evaluate
import processes
import train
from config import load_config
from metrics import is_evaluation
from processes import HEARTBEAT, Alive

ENDS_WITHIN = 15  # seconds after another process's death, where a collective notices it; otherwise HEARTBEAT


def finish(processes, expect: int = 0) -> list[tuple[str, str]]:
    """(stdout, stderr) of each; all have to end with `expect`."""
    outputs = [p.communicate(timeout=180) for p in processes]
    assert [p.returncode for p in processes] == [expect] * len(processes), outputs
    return outputs


def close_to(got: list[dict], expected: list[dict]) -> None:
    """The same curve up to floating-point order."""
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for tag in a:
            # Training amplifies the last bits: after 15 steps the norm was 1.03e-4 off on one processor.
            assert a[tag] == pytest.approx(b[tag], rel=3e-4 if "norm" in tag else 1e-5), (a["step"], tag)


@pytest.fixture(scope="module")
def two_devices(house) -> Path:
    run_dir = house.root / "two devices"
    house.run(run_dir, devices=2)
    return run_dir


@pytest.fixture(scope="module")
def pair(house) -> tuple:
    """Two processes, of which one gets SIGTERM at step 5, and which are started again."""
    run_dir, logs = house.root / "a pair[1]*?", house.root / "pair logs"
    stopped = finish(start(house, run_dir, hooks={0: ("step", 5, signal.SIGTERM)}), 143)
    steps = steps_in(run_dir)
    return run_dir, logs, stopped, steps, finish(start(house, run_dir, logs=logs))


def test_two_processes_equal_one(house, two_devices, pair):
    """Rows that two hosts both read or neither, a file that both write, results in standard output's noise, a
    preemption that only one of them heeds."""
    run_dir, logs, ((out, err), (other_out, other_err)), steps, again = pair
    assert "is saved in" in err and "step " not in other_err and out == other_out == ""
    stopped = max(map(int, steps))
    assert stopped in (5, 6, 7)
    (out, err), (other_out, other_err) = again
    assert "resuming from" in err and "resuming" not in other_err
    assert json.loads(out)["step"] == STEPS and other_out == ""
    assert len(list((run_dir / "tensorboard").iterdir())) == 2  # one a start
    assert_same_run(run_dir, two_devices)

    fingerprint = data.load_index(house.root / "train.json").fingerprint
    for key, index in (("train", fingerprint), ("heldout", data.load_index(house.root / "heldout.json").fingerprint)):
        read = [{e["read"] for e in process if e["index"] == index} for process in logged(logs, "read")]
        assert read[0] and read[1] and not read[0] & read[1], key
    trained = [sum((e["instances"] for e in process), []) for process in logged(logs, "step")]
    source = data.open_data(load_config(str(house.config), "cpu", []).data)
    expected = [source.instances_at(BATCH * k) for k in range(stopped, STEPS)]
    assert trained == [np.ravel([e[:4] for e in expected]).tolist(), np.ravel([e[4:] for e in expected]).tolist()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other(house, two_devices, tmp_path, victim):
    """A survivor that waits for ever, an exit code 0, a checkpoint of one half. 0 is the coordinator as well."""
    run_dir = tmp_path / "run"
    processes = start(house, run_dir, hooks={victim: ("step", 10, signal.SIGKILL)})
    processes[victim].wait(timeout=120)
    died = time.monotonic()
    _, err = processes[1 - victim].communicate(timeout=120)
    assert time.monotonic() - died < HEARTBEAT + ENDS_WITHIN
    assert processes[1 - victim].returncode not in (0, 2, 143)
    assert "another process has ended" in err or "another task died" in err, err
    assert "8" in steps_in(run_dir) or "4" in steps_in(run_dir)
    finish(start(house, run_dir))
    assert_same_run(run_dir, two_devices)


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_other(house, tmp_path):
    """A survivor that waits for ever for a host whose connections stay open."""
    processes = start(house, tmp_path / "run", hooks={1: ("step", 10, signal.SIGSTOP)})
    try:
        began = time.monotonic()
        _, err = processes[0].communicate(timeout=180)
        assert time.monotonic() - began < HEARTBEAT + 60  # with the start
        assert processes[0].returncode not in (0, 2, 143) and "stopped sending heartbeats" in err
    finally:
        processes[1].kill()


def test_an_error_of_one_process_ends_both(house, tmp_path):
    """The other waits 300 s for an orderly end; the reason is lost among what follows from it."""
    root = tmp_path / "corpus"
    shutil.copytree(house.root / "train", root / "train")
    shutil.copy(house.root / "train.json", root)
    source = data.open_data(load_config(str(house.config), "cpu", []).data)
    rows_of_1 = (int(i) for k in range(5, STEPS) for i in source.instances_at(BATCH * k)[BATCH // 2 :])
    file, offset = next(source.locate(i) for i in rows_of_1 if 40 < i < 60)  # between what the fingerprint covers
    with open(root / file.path, "r+b") as f:
        f.seek(4 * (offset + 3))
        f.write((10**6).to_bytes(4, "little"))
    sets = (f"data.index={root / 'train.json'}", "run.eval_index=null")
    processes = start(house, tmp_path / "run", *sets)
    outputs = [p.communicate(timeout=120) for p in processes]
    assert [p.returncode for p in processes] == [1, 1], outputs
    assert "got id 1000000" in outputs[1][1] and "Traceback" not in outputs[1][1]
    assert "another process has ended" in outputs[0][1] and "Traceback" not in outputs[0][1]


def test_damage_that_one_process_sees(house, two_devices, pair, tmp_path):
    """A part of a checkpoint that only its own process reads: the one goes back a step, the other waits for it."""
    run_dir = tmp_path / "run"
    shutil.copytree(pair[0], run_dir)
    parts = list((run_dir / "checkpoints" / str(STEPS) / "params" / "ocdbt.process_1" / "d").iterdir())
    largest = max(parts, key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    (_, err), _ = finish(start(house, run_dir))
    assert "is damaged: process 1: " in err and f"resuming from {run_dir / 'checkpoints' / '12'}" in err
    assert f"{STEPS}.damaged" in steps_in(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / f"{STEPS}.damaged")
    assert_same_run(run_dir, two_devices)


def test_run_directory_that_is_not_shared(house, tmp_path):
    """Halves of checkpoints on two disks, which nobody can read later."""
    run_dirs = [tmp_path / "a", tmp_path / "b"]
    (_, err), (_, other) = finish(start(house, None, run_dirs=run_dirs), 2)
    for text in (err, other):
        assert f"--run-dir: process 1: {run_dirs[1]} is not the folder that process 0 sees" in text
    assert all(not list(d.glob("checkpoints")) for d in run_dirs)


def test_as_the_cluster_tells(house, tmp_path):
    """A launcher's environment that is not used: every process trains alone, into one folder."""
    port = free_port()
    open_mpi = {"OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{port}", "OMPI_COMM_WORLD_SIZE": "2"}
    processes = [
        house.start(
            tmp_path / "run", "run.steps=4", extra=("--distributed",),
            env=open_mpi | {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)},
        )
        for i in range(2)
    ]  # fmt: skip
    (out, err), (other, _) = finish(processes)
    assert json.loads(out)["step"] == 4 and other == "" and "'fsdp': 2" in err


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--coordinator", "here:1"], ["--num-processes", "all three"]),
        (["--coordinator", "here", "--num-processes", "2", "--process-id", "0"], ["'here'", "HOST:PORT"]),
        (["--coordinator", "here:1", "--num-processes", "2", "--process-id", "2"], ["got 2", "0 to 1"]),
        (["--distributed", "--process-id", "0"], ["--distributed", "one way"]),
        (["--distributed"], ["--distributed", "--coordinator"]),
    ],
)
def test_wrong_flags(house, tmp_path, flags, named):
    """Waiting for minutes for processes that were never named."""
    out, err = house.run(tmp_path / "run", extra=flags, expect=2)
    assert all(word in err for word in named) and len(err.splitlines()) == 1, err


# ------------------------------------------------------------------------------- other numbers of processes and devices


CALM = "optim.eps=1e-2"  # with a small eps Adam turns the last bits of a small gradient into a whole step


@pytest.fixture(scope="module")
def calm(house) -> Path:
    """One device, undisturbed."""
    house.run(house.root / "calm", CALM)
    return house.root / "calm"


def test_the_recipe_is_decoupled_from_the_topology(house, calm, tmp_path):
    """8 devices, then 2, then 4, then two processes of 2: a batch cut otherwise, an instance twice or never, a config
    that has to change, a checkpoint that only its own number of devices can read."""
    run_dir, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    for devices, step in ((8, 5), (2, 9), (4, 13)):
        hook = ("step", step, signal.SIGTERM)
        _, err = house.run(run_dir, CALM, devices=devices, hook=hook, log=logs / str(devices), expect=143)
        assert f"'fsdp': {devices}" in err and f"{BATCH // devices} sequences a device" in err
        assert str(step) in steps_in(run_dir)
    finish(start(house, run_dir, CALM, devices=2, logs=tmp_path / "pair"))
    close_to(rows(run_dir), rows(calm))

    seen = sum(logged(logs, "step"), []) + sum(logged(tmp_path / "pair", "step"), [])
    assert sorted(e["step"] for e in seen) == sorted([*range(1, 14), *2 * [*range(14, STEPS + 1)]])
    source = data.open_data(load_config(str(house.config), "cpu", []).data)
    expected = np.concatenate([source.instances_at(BATCH * k) for k in range(STEPS)])
    assert sorted(sum((e["instances"] for e in seen), [])) == sorted(expected) and len(set(expected)) == len(expected)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_checkpoint_of_two_processes_anywhere(house, pair, monkeypatch, capsys, devices):
    """Evaluation on the devices that wrote the checkpoint only."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert evaluate.main(["loss", str(pair[0]), "--hardware", "cpu", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)["heldout"]["all"]["ce"]
    assert got == pytest.approx(rows(pair[0])[-1]["eval/lm/all/CE loss"], rel=1e-6)


def test_checkpoint_of_two_processes_as_hugging_face(pair, tmp_path):
    """Conversion that takes one process's part for the whole."""
    assert convert.main(["to-hf", str(pair[0]), str(tmp_path / "hf")]) == 0
    with safe_open(tmp_path / "hf" / "model.safetensors", "numpy") as f:
        there = restore(pair[0], STEPS, ["params"])
        np.testing.assert_array_equal(f.get_tensor("model.layers.2.mlp.up_proj.weight"), there["params['w_up']"][2].T)
        np.testing.assert_array_equal(f.get_tensor("lm_head.weight"), there["params['lm_head']"][:VOCABULARY])


def test_data_that_is_filtered_away(house, tmp_path):
    """0/0 on the devices whose instances are all filtered, and NaN for all from there."""
    root = tmp_path / "constant"
    (root / "web").mkdir(parents=True)
    np.full(64 * SEQUENCE, 5, np.uint32).tofile(root / "web" / "part-00000.npy")
    files = [("web", root / "web" / "part-00000.npy")]
    index = data.build_index(files, root, SEQUENCE, tokenizer="none", vocab_size=VOCABULARY, eos_id=0)
    data.write_index(index, root / "train.json")
    sets = (f"data.index={root / 'train.json'}", "run.eval_index=null", "run.steps=3")
    house.run(tmp_path / "run", *sets, devices=4)
    for row in rows(tmp_path / "run"):
        assert row["train/CE loss"] == row["train/Z loss"] == row["optim/total grad norm"] == 0
        assert row["train/masked instances (%)"] == row["train/masked labels (%)"] == 1


@pytest.mark.parametrize("devices, both", [(3, "multiple of the mesh's fsdp size 3"), (16, "data x fsdp = 16")])
def test_devices_that_cannot_share_the_batch(house, straight, tmp_path, devices, both):
    """A batch that is silently cut, padded or repeated when the number of devices does not divide it."""
    _, err = house.run(tmp_path / "run", devices=devices, expect=2)
    assert both in err and len(err.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_four_processes(house, calm, tmp_path):
    """Four processes of which two share their rows (context 2), then two, then one with eight devices."""
    run_dir = tmp_path / "run"
    finish(start(house, run_dir, CALM, "run.steps=8", "mesh.context=2", n=4, logs=tmp_path / "logs"))
    trained = [sum((e["instances"] for e in process), []) for process in logged(tmp_path / "logs", "step")]
    assert trained[0] == trained[1] and trained[2] == trained[3] and not set(trained[0]) & set(trained[2])
    finish(start(house, run_dir, CALM, "run.steps=12", n=2))
    house.run(run_dir, CALM, devices=8)
    got = [r for r in rows(run_dir) if not (is_evaluation(r) and r["step"] == 8)]  # its run.steps was 8
    close_to(got, rows(calm))


def test_port_that_is_taken(house, tmp_path, capsys):
    """A segmentation fault of JAX's coordinator, without a word, where its port is another's."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        several = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "1", "--process-id", "0")
        assert train.main(house.argv(tmp_path / "run", extra=several)) == 1
    err = capsys.readouterr().err
    assert f"port {port} cannot be listened at (Address already in use)" in err and err.count("\n") == 1
    assert train.main(house.argv(tmp_path / "run", extra=(several[0], "127.0.0.1:99999", *several[2:]))) == 2
    assert "got port 99999" in capsys.readouterr().err


def test_signs_of_life(capsys):
    """A launcher that takes a long compilation or evaluation for a hang; a process that hangs and still says that it is
    alive."""
    alive = Alive(every=0.2)
    lines = []

    def said() -> list[str]:
        lines[:] = capsys.readouterr().err.splitlines()
        return lines

    try:
        alive.now("compiling", busy=True)
        until = time.process_time() + 2
        while time.process_time() < until:  # work
            pass
        assert sum(line.startswith("compiling (00:0") for line in said()) >= 2  # the first tells of the new phase alone
        alive.now("evaluating 50 batches")
        for _ in range(20):
            time.sleep(0.05)
            alive.tick()
        assert any(re.match(r"evaluating 50 batches, \d+ done \(00:0", line) for line in said())
        until = time.process_time() + 1
        time.sleep(0.5)  # what was done before is said once more at most
        said()
        while time.process_time() < until:  # spinning is no progress where there is something to count
            pass
        assert said() == []
        alive.now("saving", busy=True)
        time.sleep(0.5)  # the new phase is said
        said()
        time.sleep(1)
        assert said() == []
    finally:
        alive.close()


def test_outline_for_people():
    """A value that only programs could read: sixteen digits, whole hashes, a list of a thousand paths, nested JSON."""
    result = {
        "index": "data/train.json", "tokens": 3286478, "ce": 3.5423293545452403, "yarn": None, "exact": True,
        "files": [f"part-{i}" for i in range(1000)], "fingerprint": "sha256:" + "0123456789ab" * 5 + "cdef",
        "of": {"index": "only for programs"},
        "heldout": {"code": {"ce": 3.3216917276434286, "tokens": 91980}, "all": {"ce": None, "tokens": 7}},
        "float32": {"blocks": [{"name": "embedding", "difference": 0.0}], "kl_mean": 9.122855475597978e-13},
        "verdict": "same model",
    }  # fmt: skip
    lines = processes.outline(result).splitlines()
    assert lines[:7] == [
        "index        data/train.json",
        "tokens       3,286,478",
        "ce           3.5423",
        "yarn         -",
        "exact        yes",
        "files        part-0, part-1, part-2, part-3, part-4, part-5, part-6, part-7, ... 1,000 in all",
        "fingerprint  sha256:0123456789ab...",
    ]
    assert lines[8:12] == [
        "| heldout |     ce | tokens |",
        "| ------- | -----: | -----: |",
        "| code    | 3.3217 | 91,980 |",
        "| all     |      - |      7 |",
    ]
    assert "  | embedding |          0 |" in lines and "  kl mean  9.1229e-13" in lines
    assert lines[-1] == "same model" and "only for programs" not in "".join(lines)


def test_json_holds_the_whole(capsys):
    """Words before or after the JSON; keys that only the outline has."""
    result = {"ce": 3.5423293545452403, "of": {"index": "x"}}
    assert processes.run_command("x.py", lambda: result, True) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert processes.run_command("x.py", lambda: result) == 0
    assert capsys.readouterr().out == "ce  3.5423\n"
