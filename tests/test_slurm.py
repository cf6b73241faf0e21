"""tools/slurm.sh with stubs of srun and scontrol: what it starts, what it does with exit codes, a real preempted run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, STEPS, rows, steps_in

# srun, as far as JAX sees it: two tasks on one host with Slurm's variables, SIGTERM to both once the run is under way.
# It exits with the highest code of its tasks, as srun does.
SRUN = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
pathlib.Path("{log}").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
if "{exit_code}":
    sys.exit(int("{exit_code}" or 0))
names = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}}
tasks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | names | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range(2)
]
metrics = pathlib.Path("{metrics}")
while os.environ.get("PREEMPT") and any(task.poll() is None for task in tasks):
    if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        break
    time.sleep(0.01)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> {log}\n'


def stubs(folder: Path, exit_code="", metrics="") -> dict[str, str]:
    """The environment of a job whose srun and scontrol write down what they were asked."""
    folder.mkdir(exist_ok=True)
    texts = {"srun": SRUN, "scontrol": SCONTROL, "python": '#!/bin/sh\nexec {python} "$@"\n'}
    for name, text in texts.items():
        path = folder / name
        path.write_text(
            text.format(python=sys.executable, log=folder / f"{name}.log", exit_code=exit_code, metrics=metrics)
        )
        path.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_exit_codes(tmp_path, code):
    """A wrong config that is requeued for ever, a preempted run that is not, a failed job that Slurm calls completed; an
    argument with a space that falls apart."""
    environment = stubs(tmp_path / "bin", exit_code=str(code))
    arguments = ["--config", "stage1.yaml", "--set", "mesh={data: -1, fsdp: 8, context: 1, tensor: 1}"]
    done = subprocess.run([REPO / "tools/slurm.sh", *arguments], env=environment, cwd=tmp_path)
    assert done.returncode == code
    (asked,) = (tmp_path / "bin/srun.log").read_text().splitlines()
    assert json.loads(asked)[-7:] == ["python", "train.py", "--distributed", *arguments]
    requeued = tmp_path / "bin/scontrol.log"
    assert requeued.exists() == (code == 143)
    assert code != 143 or requeued.read_text() == "requeue 4711\n"


def test_slurm_reads_the_directives():
    """A directive below the first command, which Slurm takes for a comment."""
    lines = (REPO / "tools/slurm.sh").read_text().splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash" and len(directives) == 7 and max(directives) < min(commands)


@pytest.mark.slow
def test_a_preempted_run_goes_on(house, tmp_path):
    """Variables of Slurm that JAX no longer reads, so that every task trains alone; SIGTERM that does not become 143."""
    run_dir = tmp_path / "run"
    environment = stubs(tmp_path / "bin", metrics=run_dir / "metrics.jsonl")
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [REPO / "tools/slurm.sh", *house.argv(run_dir)]

    def job(**more) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=environment | more, cwd=REPO, capture_output=True, text=True, timeout=240)

    first = job(PREEMPT="1")
    assert first.returncode == 143, first.stderr
    assert "'fsdp': 2" in first.stderr and (tmp_path / "bin/scontrol.log").read_text() == "requeue 4711\n"
    assert 0 < max(map(int, steps_in(run_dir))) < STEPS
    second = job(SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["step"] == STEPS and "resuming from" in second.stderr
    trained = [r["step"] for r in rows(run_dir) if "train/CE loss" in r]
    assert trained == list(range(1, STEPS + 1))
    assert (tmp_path / "bin/scontrol.log").read_text() == "requeue 4711\n"
