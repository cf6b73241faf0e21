"""launch.py submit, monitor, resume-until-done: against stubs of train.py, xpk, kubectl and gcloud, the real train.py
under kill -9, and the real xpk's dry run.

The launcher is a copy in a folder of its own: what it needs beside it is train.py, which it starts, and data.py and
processes.py, which import no jax.
"""

import ast
import errno
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness import REPO, STEPS, assert_same_run, rows, steps_in, tiny_config, write_corpus

import compare
import data
import launch
import processes
import train
from config import load_config

# --------------------------------------------------------------------------------------------------------- the stubs

# train.py that does what PLAN says, attempt by attempt: lists of "save N", "metrics N", "print TEXT", "sleep S",
# "linger" (until SIGTERM, then save and leave with 143), "deaf" (SIGTERM does nothing), "exit CODE", "kill".
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path

flags = dict(word.split("=", 1) for word in sys.argv[1:])
run, me = Path(flags["--run-dir"]), int(flags.get("--process-id", 0))
count = run / f"attempts.{me}"
attempt = int(count.read_text()) if count.exists() else 0
count.write_text(str(attempt + 1))
for name in (f"argv.{me}", f"argv.{me}.{attempt}"):
    (run / name).write_text(json.dumps(sys.argv[1:]))
(run / f"pid.{me}").write_text(str(os.getpid()))
plan = json.loads(os.environ["PLAN"])[attempt]
plan = plan[me] if isinstance(plan[0], list) else plan


def save(step):
    folder = run / "checkpoints" / step / "meta"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata").touch()


for action in plan:
    what, _, value = action.partition(" ")
    if what == "save":
        save(value)
    elif what == "print":
        print(value, file=sys.stderr, flush=True)
    elif what == "metrics":
        with open(run / "metrics.jsonl", "a") as f:
            f.write("{}\\n")
    elif what == "sleep":
        time.sleep(float(value))
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "linger":
        signal.signal(signal.SIGTERM, lambda *_: (save(value), print("saved", flush=True), os._exit(143)))
        (run / f"up.{me}").touch()
        time.sleep(60)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(int(value))
"""

# xpk, kubectl and gcloud in one: SCENARIO is a list of attempts, each a list of what kubectl sees poll by poll.
CLUSTER = """
import json, os, sys
from pathlib import Path

home, name, words = Path(os.environ["CLUSTER_HOME"]), Path(sys.argv[0]).name, sys.argv[1:]
with open(home / "calls.jsonl", "a") as f:
    f.write(json.dumps([name, *words]) + "\\n")
path = home / "state.json"
state = json.loads(path.read_text()) if path.exists() else {"attempt": int(os.environ.get("ATTEMPT", -1)), "poll": -1}
scenario = json.loads(os.environ["SCENARIO"])


def leave(text="", code=0):
    path.write_text(json.dumps(state))
    print(text, end="", file=sys.stderr if code else sys.stdout)
    sys.exit(code)


def complete(step):
    folder = home / "runs" / "r" / "checkpoints" / str(step) / "meta"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata").touch()


if name == "gcloud":
    found = sorted(map(str, (home / "runs" / "r").glob("checkpoints/*/meta/metadata")))
    if os.environ.get("GCLOUD"):
        leave(os.environ["GCLOUD"], 1)
    if not found:
        leave("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.\\n", 1)
    leave("".join(f"gs:/{p}\\n" for p in found))
if name == "xpk":
    state |= {"attempt": state["attempt"] + 1, "poll": -1}
    first = scenario[state["attempt"]][0]
    if "create" in first:
        scenario[state["attempt"]] = None
        leave("[XPK] " + first.get("say", "it failed") + "\\n", first["create"])
    leave("[XPK] token is " + os.environ.get("HF_TOKEN", "unset") + "\\n")
attempt = scenario[state["attempt"]] if 0 <= state["attempt"] < len(scenario) else [{"gone": 1}]
if "jobset" in words and "get" in words:
    state["poll"] = min(state["poll"] + 1, len(attempt) - 1)
now = attempt[max(0, state["poll"])]
if "create" in now or state.get("deleted") == state["attempt"]:
    now = {"gone": 1}
if "error" in now:
    leave(now["error"] + "\\n", 1)
if "delete" in words:
    state["deleted"] = state["attempt"]
    leave()
if "logs" in words:
    if "no logs" in now:
        leave(now["no logs"] + "\\n", 1)
    stamp = f"2026-12-02T15:30:{now.get('at', 0):02}Z " if "--timestamps" in words else ""  # of when they were written
    own, other = (f"[pod/r-slice-job-{pod}-a1b2c/jax-tpu] {stamp}" for pod in ("0-0", "0-1"))
    lines = [own + line for line in (f"step {now.get('step', '?')}/20\\n" + now.get("log", "")).splitlines()]
    leave("".join(f"{line}\\n" for line in [*lines, *(other + line for line in now.get("other", "").splitlines())]))
if "save" in now:
    complete(now["save"])
if "jobset" in words:
    status = {"terminalState": now["terminal"]} if "terminal" in now else {}
    leave("" if "gone" in now else json.dumps({"spec": {"suspend": now.get("suspend", False)}, "status": status}))
pods = []
for phase, *more in now.get("pods", []):
    kind = {"code": lambda v: {"terminated": {"exitCode": v}}, "wait": lambda v: {"waiting": {"reason": v}}}
    inner = [{"name": "jax-tpu", "state": kind[k](v)} for k, v in more]
    pods.append({"status": {"phase": phase, "containerStatuses": inner}})
leave(json.dumps({"items": pods}))
"""

CONFIG = {"run": {"name": "r", "steps": 20}}


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable} -SE\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Place:
    """A folder with launch.py, a stub of train.py beside it, stubs of the cluster's commands, and the output folder."""

    def __init__(self, root: Path):
        self.root, self.run = root, root / "runs" / "r"
        for folder in ("bin", "runs", "configs"):
            (root / folder).mkdir()
        for name in ("launch.py", "data.py", "processes.py"):
            shutil.copy(REPO / name, root)
        (root / "train.py").write_text(TRAINER)
        (root / "configs" / "r.yaml").write_text(yaml.safe_dump(CONFIG))
        for name in ("xpk", "kubectl", "gcloud"):
            executable(root / "bin" / name, CLUSTER)

    def patch(self, old: str, new: str) -> None:
        """Other seconds in this copy of launch.py."""
        text = (self.root / "launch.py").read_text()
        assert text.count(old) == 1
        (self.root / "launch.py").write_text(text.replace(old, new))

    def env(self, plan=(), scenario=()) -> dict[str, str]:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "PLAN": json.dumps(plan), "SCENARIO": json.dumps(scenario),
                "CLUSTER_HOME": str(self.root)}  # fmt: skip

    def start(self, verb, *flags, plan=(), scenario=(), env=()) -> subprocess.Popen:
        env = os.environ | self.env(plan, scenario) | dict(env)
        common = ("--config", "r", "--poll", "0.02", "--backoff", "0.01", "--max-backoff", "0.04")
        command = [sys.executable, str(self.root / "launch.py"), verb, "--json", *common, *map(str, flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.root, env=env, text=True, **pipes)

    def launch(self, verb, *flags, expect=0, **how) -> tuple[str, str]:
        """(stdout, stderr) of a launcher that has to end with the exit code `expect`."""
        process = self.start(verb, *flags, **how)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expect, err
        assert "Traceback" not in err, err
        return out, err

    def xpk(self, verb, *flags, **how) -> tuple[str, str]:
        return self.launch(verb, "--backend", "xpk", *XPK, *flags, **how)

    def calls(self, *words: str) -> list[list[str]]:
        """Commands that were run, those that hold all `words`."""
        path = self.root / "calls.jsonl"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if set(words) <= set(call)]


XPK = ("--cluster", "c", "--project", "project-1", "--zone", "us-central1-a", "--device-type", "v5p-256",
       "--docker-image", "gcr.io/project-1/olmo:latest", "--run-dir", "runs/r")  # fmt: skip


@pytest.fixture
def place(tmp_path) -> Iterator[Place]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the launcher would inherit that it is ignored
    yield Place(tmp_path)
    signal.signal(signal.SIGHUP, before)


def wait_for(what, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "zombie" not in status.read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Of all threads: Grain starts its workers in one of its own."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


# ------------------------------------------------------------------------------------------------- local, with stubs


@pytest.mark.parametrize(
    ("plan", "flags", "code", "attempts", "says"),
    [
        ([["save 20", "exit 0"]], (), 0, 1, "r: done, step 20 of 20"),
        ([["exit 2"]], (), 2, 1, "exit code 2"),
        ([["save 4", "exit 1"], ["exit 2"]], (), 2, 2, "exit code 2"),
        ([["exit 143"]] * 5 + [["save 20", "exit 0"]], ("--retries", 1), 0, 6, "exit code 143, step 0 of 20"),
        ([["kill"]] * 3, ("--retries", 2), 1, 3, "exit code 137, step 0 of 20; gave up: 2 retries in a row"),
        ([["exit 1"]], ("--retries", 0), 1, 1, "gave up: 0 retries in a row"),
        ([["exit 1"], ["exit 143"], ["exit 1"]], ("--retries", 1), 1, 3, "gave up: 1 retries in a row"),
        (
            [["save 4", "exit 1"], ["save 8", "kill"], ["exit 1"], ["save 12", "exit 1"], ["save 20", "exit 0"]],
            ("--retries", 1), 0, 5, "r: done, step 20 of 20",
        ),
        ([["save 19", "exit 0"]], (), 1, 1, "stands step 19, expected 20; fix: --target, or --watch"),
        ([["save 19", "exit 0"]], ("--target", 19), 0, 1, "r: done, step 19 of 19"),
        ([["save 24", "exit 0"]], ("--set", "run.steps=24"), 0, 1, "r: done, step 24 of 24"),
        ([["save 20", "exit 1"], ["exit 0"]], (), 0, 2, "r: done, step 20 of 20"),  # all but summary.json
    ],
    ids=["done", "usage", "usage later", "preempted", "no progress", "no retries", "mixed", "progress", "short",
         "target", "set", "summary"],
)  # fmt: skip
def test_exit_codes_and_the_budget_of_retries(place, plan, flags, code, attempts, says):
    """A typo that is started eleven times, a preemption that costs a retry, a crash that is retried for ever, retries
    counted in spite of progress, a finished run that is started again (cases 17 and 109)."""
    out, err = place.launch("resume-until-done", *flags, plan=plan, expect=code)
    assert says in err and (place.run / "attempts.0").read_text() == str(attempts)
    if code == 0:
        result = json.loads(out)
        assert result["attempts"] == attempts and result["step"] == result["target"]
    else:
        assert out == ""


def test_retries_are_counted_as_they_are_and_waits_grow(place):
    """ "Attempt 4 of 3"; a wait that stays the same, or grows beyond a day."""
    _, err = place.launch("resume-until-done", "--retries", 4, plan=[["exit 1"]] * 5, expect=1)
    said = [line.partition("again in ")[2] for line in err.splitlines() if "again in" in line]
    assert said == [
        "0.01 s (retry 1 of 4 without a new step)", "0.02 s (retry 2 of 4 without a new step)",
        "0.04 s (retry 3 of 4 without a new step)", "0.04 s (retry 4 of 4 without a new step)",
    ]  # fmt: skip


@pytest.mark.parametrize(("backend", "waits"), [("local", (0.5, 1, 60)), ("xpk", (60, 300, 3600))])
def test_waits_that_nobody_chose(backend, waits, monkeypatch):
    """A cluster that is asked for 512 chips every second."""
    monkeypatch.chdir(REPO)
    args = launch.parse_args(
        ["resume-until-done", "--config", "quickstart", "--backend", backend, *XPK, "--watch", "gs://b/r"]
    )
    launch.check_launch(args)
    assert (args.poll, args.backoff, args.max_backoff) == waits and args.retries == 10


def test_what_is_not_a_complete_step_does_not_count(place):
    """A numbered folder that is empty, a leftover of an interrupted save, one set aside: taken for the last step."""
    for name in ("20", "20.orbax-checkpoint-tmp-7/meta", "20.damaged/meta", "step_20/meta"):
        (place.run / "checkpoints" / name).mkdir(parents=True)
        if name.endswith("meta"):
            (place.run / "checkpoints" / name / "metadata").touch()
    place.launch("resume-until-done", plan=[["save 8", "exit 143"], ["save 20", "exit 0"]])
    assert (place.run / "attempts.0").read_text() == "2"


@pytest.mark.parametrize(
    ("action", "sign"),
    [("sleep 60", "metrics"), ("sleep 60", "print compiling: the same line again"), ("deaf", None)],
    ids=["steps", "lines", "deaf"],
)
def test_stall(place, action, sign):
    """A trainer that hangs, or hangs and does not hear SIGTERM: for ever. One that is slow, or says that it is
    alive while it compiles, evaluates or saves for longer than --stall, is no stall."""
    slow = ["sleep 0.3", sign] * (8 if sign else 0)
    plan = [["save 4", action, "sleep 60"], [*slow, "save 20", "exit 0"]]
    _, err = place.launch("resume-until-done", "--stall", 2, "--grace", 0.5, plan=plan)
    assert err.count("stalled: no sign of life for 2 s") == 1 and (place.run / "attempts.0").read_text() == "2"
    assert ("not ended after 0.5 s: killed" in err) == (action == "deaf")
    assert "--alive-every=0.5" in json.loads((place.run / "argv.0").read_text())


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_launcher_that_is_asked_to_end_lets_the_trainer_save(place, sent, code):
    """Steps since the last checkpoint lost, or a trainer that stays; also when its terminal is closed."""
    process = place.start("resume-until-done", "--processes", 2, plan=[["linger 7"]])
    wait_for(lambda: (place.run / "up.0").exists() and (place.run / "up.1").exists())
    process.send_signal(sent)
    out, err = process.communicate(timeout=20)
    assert (
        process.returncode == code
        and steps_in(place.run) == {"7"}
        and "saved" in err
        and out == ""
        and "Traceback" not in err
    )
    assert not any(alive(int((place.run / f"pid.{i}").read_text())) for i in (0, 1))


def test_a_second_signal_does_not_wait(place):
    """A launcher that cannot be ended while a trainer hangs in its save."""
    process = place.start("resume-until-done", "--grace", 60, plan=[["deaf", "print up", "sleep 60"]])
    wait_for(lambda: "up" in (place.run / "launch.0.log").read_text() if (place.run / "launch.0.log").exists() else 0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130 and not alive(int((place.run / "pid.0").read_text()))


def test_kill_of_the_launcher_takes_the_trainers_along(place):
    """A trainer that nobody watches, and that writes into the run beside the next one (no orphans)."""
    process = place.start("resume-until-done", "--processes", 2, plan=[["deaf", "linger 7"]] * 2)
    wait_for(lambda: (place.run / "up.0").exists() and (place.run / "up.1").exists())
    pids = [int((place.run / f"pid.{i}").read_text()) for i in (0, 1)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(alive, pids)), seconds=5)


def test_nohup(place):
    """A run of weeks that ends with the connection it was started from, although it was told not to."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = place.start("resume-until-done", plan=[["print up", "sleep 0.5", "save 20", "exit 0"]])
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: (place.run / "pid.0").exists())
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=20) == 0


def test_storage_that_fails_for_a_while(place):
    """A mount that is gone for a minute ends the run, or counts as no checkpoint at all."""
    loop = place.run / "checkpoints"
    loop.parent.mkdir()
    loop.symlink_to(loop)  # "Too many levels of symbolic links", for root too
    process = place.start("resume-until-done", plan=[["save 20", "exit 0"]])
    said = process.stderr.readline()
    assert "checkpoints: Too many levels of symbolic links; asking again" in said
    loop.unlink()
    process.communicate(timeout=20)
    assert process.returncode == 0
    loop.rename(place.run / "there")
    loop.symlink_to(loop)
    for verb in ("submit", "resume-until-done"):
        _, err = place.launch(verb, "--stall", 0.1, plan=[[], ["exit 0"]], expect=1)
        assert "so for 0.1 s; nothing was stopped" in err.splitlines()[-1], err


def test_an_attempt_that_cannot_be_started_is_one_of_many(place):
    """A disk that is full for a minute, where the launcher writes its log."""
    log = place.run / "launch.0.log"
    log.mkdir(parents=True)
    _, err = place.launch("resume-until-done", "--retries", 2, expect=1)
    assert err.count("launch.0.log: Is a directory, step 0 of 20") == 3 and "gave up: 2 retries in a row" in err
    log.rmdir()
    place.launch("resume-until-done", plan=[["save 20", "exit 0"]])


def test_two_launchers_of_one_run(place):
    """Two launchers that start one run again and again; a lock that a killed launcher leaves behind, or that its own
    trainer cannot have."""
    with processes.sole_writer(place.run):  # a trainer's, on whatever machine: no launcher is in its way
        first = place.start("resume-until-done", plan=[["linger 7"], ["save 20", "exit 0"]])
        wait_for(lambda: (place.run / "up.0").exists())
        _, err = place.launch("submit", expect=1)
        assert "another launcher is at work here; fix: end it, or monitor it" in err
        assert f"({place.run / 'launch'}: is being written by process {first.pid} on " in err
        first.kill()
        first.communicate()
        place.launch("resume-until-done", plan=[[], ["save 20", "exit 0"]])


def test_where_there_are_no_locks(place, monkeypatch, capsys):
    """A launcher that ends with "[Errno 38] Function not implemented", which names no file; a monitor that says so twice
    a second; two launchers at once."""
    flock, run = data.fcntl.flock, str(place.run)

    def no_lock_there(fd, how):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(run):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return flock(fd, how)

    monkeypatch.setattr(data.fcntl, "flock", no_lock_there)
    monkeypatch.setattr(launch, "HERE", place.root)
    for name, value in place.env([["metrics", "exit 1"], ["save 20", "exit 0"]]).items():
        monkeypatch.setenv(name, value)
    flags = ("--config", "r", "--run-dir", run, "--poll", "0.02", "--backoff", "0.01")
    assert launch.main(["resume-until-done", *flags]) == 0
    err = capsys.readouterr().err
    assert err.count(f"{run}/.launch.lock: no lock here (Function not implemented") == 1
    args = launch.parse_args(["monitor", *flags])
    launch.check_launch(args)
    job = launch.Local(None, None)
    assert launch.local_state(job, args).doing == "gone"
    with processes.sole_writer(launch.launcher_lock(args)):
        assert launch.local_state(job, args).doing == launch.local_state(job, args).doing == "running"
        assert launch.main(["submit", *flags]) == 1
    err = capsys.readouterr().err
    assert "no lock here" not in err and err.count("launch.py: error: another launcher is at work here") == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # another user's run: his lock cannot be taken
    assert launch.main(["monitor", *flags]) == 1
    assert "may not be written, so that whether a launcher is at work" in capsys.readouterr().err


def test_processes(place):
    """A failed process whose fellows wait for it; an error of one that is lost among what follows from it; 0 of one
    taken for the end of all; attempt after attempt at a port that another program has taken."""
    place.patch("LEAVE = 60", "LEAVE = 0.5")
    plan = [[["linger 4"], ["exit 1"]], [["exit 1"], ["exit 143"]], [["save 20", "exit 0"], ["exit 0"]]]
    _, err = place.launch("resume-until-done", "--processes", 2, plan=plan)
    assert "not ended after 0.5 s: killed" in err and "attempt 1: exit code 137" in err
    assert "attempt 2: exit code 1," in err
    argv = [json.loads((place.run / f"argv.{i}").read_text()) for i in (0, 1)]
    assert [flags[-1] for flags in argv] == ["--process-id=0", "--process-id=1"]
    assert argv[0][:-1] == argv[1][:-1] and argv[0][-2] == "--num-processes=2"
    of_attempts = [json.loads((place.run / f"argv.0.{i}").read_text()) for i in range(3)]
    assert len({flags[-3] for flags in of_attempts}) == 3, "a port that somebody else has taken"
    assert all(flags[-3].startswith("--coordinator=127.0.0.1:") for flags in of_attempts)
    place.launch("submit", "--processes", 2, plan=[[], [], [], [["exit 1"], ["exit 2"]]], expect=2)


def test_submit_is_one_attempt_and_every_flag_reaches_the_trainer(place, capsys):
    """A flag that is accepted and without effect, or one of train.py that no launcher knows; an exit code that is
    swallowed."""
    flags = ("--hardware", "cpu", "--data-root", "d d", "--init-from", "a'b", "--init-state", "adam", "--local-dir", "l",
             "--set", "x=[1, 2]", "--set", "data.index=$(x)", "--run-dir", place.run, "--allow", "loss", "--allow", "a.b",
    )  # fmt: skip
    _, err = place.launch("submit", *flags, plan=[["print hello", "exit 143"]], expect=143)
    assert "hello" in err and "hello" in (place.run / "launch.0.log").read_text()
    expected = ["--config=r", f"--run-dir={place.run}", "--hardware=cpu", "--data-root=d d", "--init-from=a'b",
                "--init-state=adam", "--local-dir=l", "--set=x=[1, 2]", "--set=data.index=$(x)", "--allow=loss",
                "--allow=a.b", "--alive-every=60"]  # fmt: skip
    assert json.loads((place.run / "argv.0").read_text()) == expected
    out, _ = place.launch("submit", *flags, "--dry-run")
    assert shlex.split(out) == [sys.executable, str(place.root / "train.py"), *expected]
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])
    known = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.M))
    ours = {"--coordinator", "--num-processes", "--process-id", "--distributed"}  # that the launcher decides
    once = {"--help", "--dry-run", "--profile", "--json"}
    assert known - ours - once == {word.partition("=")[0] for word in expected} and ours | once < known
    assert (place.run / "attempts.0").read_text() == "1"


def test_monitor(place):
    """A monitor that never ends, or reports a dead run as a living one."""
    _, err = place.launch("monitor", expect=2)
    assert "no launcher has been at work here" in err
    launcher = place.start("resume-until-done", plan=[["linger 7"], ["print two", "save 20", "exit 0"]])
    wait_for(lambda: (place.run / "up.0").exists())
    monitor = place.start("monitor")
    time.sleep(0.5)
    assert monitor.poll() is None
    os.kill(int((place.run / "pid.0").read_text()), signal.SIGTERM)
    _, err = monitor.communicate(timeout=20)
    assert monitor.returncode == 0 and "two" in err and "step 20 of 20" in err
    launcher.communicate(timeout=20)
    _, err = place.launch("monitor", "--target", 21, expect=1)
    assert "no launcher is at work, step 20 of 21" in err


# --------------------------------------------------------------------------------------------------- xpk, with stubs

RUNNING, PENDING, SUCCEEDED, FAILED = ["Running"], ["Pending"], ["Succeeded"], ["Failed"]
DONE = {"terminal": "Completed", "pods": [["Succeeded", ["code", 0]]], "save": 20}


def running(step: int, **more) -> dict:
    return {"pods": [RUNNING, RUNNING], "step": step, **more}


def half_there() -> dict:
    return {"pods": [RUNNING, PENDING], "no logs": "container jax-tpu in pod r-1 is waiting to start"}


def failed(*codes: int, **more) -> dict:
    return {"terminal": "Failed", "pods": [["Failed", ["code", code]] for code in codes], **more}


@pytest.mark.parametrize(
    ("scenario", "flags", "code", "says"),
    [
        ([[{"suspend": True}, {"pods": [PENDING]}, running(1), running(9), DONE]], (), 0, "1 of 1 pods|r: done"),
        ([[running(3), {"pods": []}, {"pods": []}], [DONE]], (), 0, "no pod of it is active, step 0 of 20; again in"),
        ([[running(9, save=8), {"pods": [FAILED]}, {"pods": []}], [DONE]], (), 0, "is active, step 8 of 20; again in"),
        ([[running(3), {"pods": []}, running(4), DONE]], (), 0, "r: done, step 20 of 20"),
        ([[running(3), {"gone": 1}], [running(2), DONE]], (), 0, "its JobSet is gone, step 0 of 20; again in"),
        ([[failed(143, 1)]] * 2 + [[failed(143)]] * 5 + [[DONE]], ("--retries", 2), 0, "exit code 143"),
        ([[failed(1, 143)]] * 3, ("--retries", 2), 1, "exit code 1, step 0 of 20; gave up: 2 retries"),
        ([[failed()]] * 2, ("--retries", 1), 1, "exit code 1 (no pod tells)"),
        ([[failed(1, save=n)] for n in (4, 8, 12)] + [[DONE]], ("--retries", 0), 0, "r: done"),
        ([[running(3), failed(1, 2, log="train.py: error: d_modle")]], (), 2, "d_modle|exit code 2"),
        ([[{"pods": [["Pending", ["wait", "ImagePullBackOff"]]]}]] * 2, ("--retries", 1), 1, "start: ImagePullBackOff"),
        ([[{"pods": [["Pending", ["wait", "ContainerCreating"]]]}, DONE]], (), 0, "1 of 1 pods are pending"),
        ([[running(3)], [DONE]], ("--stall", 0.5), 0, "stalled: no sign of life for 0.5 s"),
        ([[running(3, at=n, log="evaluating") for n in range(12)] + [DONE]], ("--stall", 0.5), 0, "step 3, checkpoint"),
        ([[running(3, other=f"{n} errors") for n in range(30)] + [DONE], [DONE]], ("--stall", 0.5), 0, "stalled: no sign"),
        ([[half_there()], [DONE]], ("--stall", 0.5), 0, "1 of 2 pods|stalled: no sign of life for 0.5 s"),
        ([[running(3), half_there()] * 20 + [DONE], [DONE]], ("--stall", 0.5), 0, "step 3, checkpoint 0|stalled"),
        ([[{"suspend": True}] * 14 + [DONE]], ("--stall", 0.5), 0, "in Kueue's queue"),
        ([[running(n) for n in range(10)] + [DONE]], ("--stall", 0.5), 0, "r: step 9, checkpoint 0 of 20"),
        ([[running(3), {"error": "net/http: TLS timeout"}, running(4), DONE]], (), 0, "TLS timeout; asking again"),
        ([[running(3), {"error": "token has expired"}]], ("--stall", 0.5), 1, "so for 0.5 s; nothing was stopped"),
        ([[{**DONE, "save": 19}]], (), 1, "stands step 19, expected 20; fix: --target, or --watch"),
        ([[{"create": 1, "say": "quota"}], [DONE]], (), 0, "quota"),
        ([[{"create": 2, "say": "usage"}]], (), 2, "usage"),
    ],
    ids=["queue", "no pods", "pods failed", "restart", "gone", "preempted", "crash", "unknown", "progress", "usage",
         "image", "creating", "stall", "lines", "another pod", "half of the pods", "no logs", "long queue", "slow", "network", "no network", "short", "create",
         "create usage"],
)  # fmt: skip
def test_until_done_on_a_cluster(place, scenario, flags, code, says):
    """Each path of such a loop, with what it broke elsewhere: no active pods, or no checkpoint yet, and the loop dies;
    a last step that is never reached; kubectl's failure taken for a preemption; a queue taken for a stall."""
    out, err = place.xpk("resume-until-done", *flags, scenario=scenario, expect=code)
    assert all(text in err for text in says.split("|")), err
    assert len(place.calls("xpk", "create")) == len(scenario)
    if code == 0:
        assert json.loads(out)["attempts"] == len(scenario)
    deleted = place.calls("delete")  # one before each new start, where there was something
    assert len(deleted) == len(scenario) - 1 - sum(s[-1].get("gone", 0) or "create" in s[0] for s in scenario[:-1])
    assert all("--cascade=foreground" in call for call in deleted)


def test_a_workload_that_hangs_is_deleted(place):
    """512 chips that wait for each other after the launcher has given up."""
    _, err = place.xpk(
        "resume-until-done", "--stall", 0.5, "--retries", 0, scenario=[[running(3, log="why")]], expect=1
    )
    assert "gave up: 0 retries" in err and "why" in err and len(place.calls("delete")) == 1


def test_a_second_launcher_adopts_the_workload(place):
    """A launcher whose machine was restarted submits the run a second time, or deletes what runs."""
    place.xpk("resume-until-done", scenario=[[running(3), running(4), DONE]], env={"ATTEMPT": "0"})
    assert not place.calls("xpk") and not place.calls("delete")


def test_a_run_that_is_done_is_not_submitted(place):
    """A pod of 128 chips that is taken to learn that there is nothing to do."""
    (place.run / "checkpoints" / "20" / "meta").mkdir(parents=True)
    (place.run / "checkpoints" / "20" / "meta" / "metadata").touch()
    out, _ = place.xpk("resume-until-done")
    assert json.loads(out)["attempts"] == 0 and not place.calls("xpk")


def test_submit_refuses_a_workload_that_exists(place):
    """xpk would offer to delete the one that runs."""
    _, err = place.xpk("submit", scenario=[[running(3)]], env={"ATTEMPT": "0"}, expect=1)
    assert "workload r exists (running 2 pods)" in err and not place.calls("xpk")
    (place.root / "state.json").unlink()
    _, err = place.xpk("submit", scenario=[[running(3)]])
    assert "submitted" in err and len(place.calls("xpk")) == 1


def test_monitor_of_a_workload(place):
    """The last lines of a run that has failed, which are gone with its pods; a monitor that waits for a dead one."""
    scenario = [[{"pods": [PENDING]}, running(3, log="hello\n"), failed(1, log="the reason\n")]]
    _, err = place.xpk("monitor", scenario=scenario, env={"ATTEMPT": "0"}, expect=1)
    assert "hello" in err and "the reason" in err and "failed, exit code 1, step 0 of 20" in err
    assert place.calls("logs", "--follow") and not place.calls("delete")
    _, err = place.xpk("monitor", scenario=[[{"gone": 1}]], env={"ATTEMPT": "0"}, expect=1)
    assert "its JobSet is gone" in err


def test_a_launcher_that_ends_leaves_the_workload(place):
    """Ctrl-C in a terminal that ends a run of weeks."""
    process = place.start("resume-until-done", "--backend", "xpk", *XPK, scenario=[[running(n) for n in range(999)]])
    wait_for(lambda: place.calls("logs"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "Traceback" not in err and not place.calls("delete")


def test_steps_are_read_from_a_bucket(place):
    """ "Nothing there yet" taken for an error, or an error for "nothing there yet"."""
    watch, scenario = ("--watch", "gs://bucket/r/"), [[running(3, save=4), DONE]]
    place.xpk("resume-until-done", *watch, scenario=scenario)
    assert place.calls("gcloud", "gs://bucket/r/checkpoints/*/meta/metadata")
    env = {"GCLOUD": "ERROR: 403 forbidden\n"}
    _, err = place.xpk("resume-until-done", *watch, "--stall", 0.5, scenario=scenario, env=env, expect=1)
    assert "403 forbidden; so for 0.5 s" in err


def test_secrets_stay_out_of_commands_and_logs(place):
    """A token in the pod's command, in the launcher's log or in what xpk prints."""
    secret, other = "hf_qwertyuiop", "pw-1234567"
    file = place.root / "env"
    file.write_text(f"# for the pods\nHF_TOKEN\nPLAIN=a b\nDB_PASSWORD={other}\n")
    how = {"scenario": [[running(3, log=f"{secret} {other}\n"), failed(2, log=f"{secret} {other}\n")]]}
    how["env"] = {"HF_TOKEN": secret}
    _, err = place.xpk("resume-until-done", "--env-file", file, expect=2, **how)
    assert "token is ***" in err and "*** ***" in err
    out, _ = place.xpk("submit", "--env-file", file, "--dry-run", **how)
    assert f"--env-file={file}" in out
    everything = err + out + (place.root / "calls.jsonl").read_text()
    assert secret not in everything and other not in everything
    _, err = place.xpk("submit", "--env-file", file, "--set", f"a.b=x{secret}", expect=2, **how)
    assert "the value of HF_TOKEN stands in a flag" in err and secret not in err
    _, err = place.launch("submit", "--env-file", file, plan=[[f"print {other} {secret}", "exit 0"]], env=how["env"])
    assert "*** ***" in err and other not in err and secret not in err  # here, too


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """refused(*flags) -> the one line that such a submission ends with, in this process, before anything is started."""
    monkeypatch.chdir(place.root)
    for name, value in place.env().items():
        monkeypatch.setenv(name, value)

    def call(*flags: str) -> str:
        argv = ["submit", "--backend", "xpk", "--config", "configs/r.yaml", *XPK, *flags]
        assert launch.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return call


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("HF_TOKEN_X", "HF_TOKEN_X is not set in this environment"),
        (" A=1", "expected NAME=value or NAME"),
        ("export A=1", "expected NAME=value or NAME"),
        ('A=say "x"', "A: its value holds a double quote"),
        ("A=\\n", "A: its value holds"),
    ],
)
def test_environment_that_xpk_would_get_wrong(place, refused, line, says):
    """A variable that xpk leaves out without a word, or that breaks its YAML; the line itself may be a secret."""
    (place.root / "env").write_text(f"OK=1\n{line}\n")
    err = refused("--env-file", "env")
    assert f"env, line 2: {says}" in err and "say" not in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--cluster", "c;reboot"), "--cluster: got 'c;reboot'"),
        (("--project", "p$(x)"), "--project: got"),
        (("--zone", "us-central1"), "--zone: got"),
        (("--workload", "Stage_1"), "--workload: got"),
        (("--workload", "a" * 41), "--workload: got"),
        (("--device-type", "v5p 256"), "--device-type: got"),
        (("--docker-image", "gcr.io/p/x:1 && y"), "--docker-image: got"),
        (("--context", "a b"), "--context: got"),
        (("--xpk=--quiet",), "--xpk: got '--quiet'"),
        (("--xpk=--reservation=a;b",), "--xpk: got"),
        (("--data-root", "a\nb"), "control sign"),
        (("--set", "data.index=$(HF_TOKEN)"), "'$('"),
        (("--set", "run.name=$(HF_TOKEN)"), "run.name: got '$(HF_TOKEN)'"),
        (("--set", "run.name"), "--set run.name: got no '='"),
        (("--slices", "0"), "--slices: got 0, expected 1 to 1000"),
        (("--stall", "0"), "--stall: got 0"),
        (("--run-dir", "gs://b/r"), "--run-dir: gs://b/r: got a URL"),
        (("--watch", "s3://b/r"), "--watch: s3://b/r: got a URL"),
        (("--watch", ""), "--watch: got nothing"),
        (("--env-file", "nothing"), "--env-file: nothing is not a file"),
        (("--run-dir", "/mnt/nowhere/r"), "--watch: /mnt/nowhere/r is not to be seen from here"),
        (("--config", "nothing"), "config 'nothing': not found"),
    ],
    ids=lambda x: " ".join(x)[:40].replace("\n", "") if isinstance(x, tuple) else "",
)
def test_names_are_checked(place, refused, flags, says):
    """xpk puts these into commands of a shell: a name that runs one of its own."""
    assert says in refused(*flags) and not place.calls()


def test_a_flag_that_is_missing_or_a_program(place):
    """A traceback, or a command line with None in it."""
    missing = XPK[:4] + XPK[6:]
    _, err = place.launch("submit", "--backend", "xpk", *missing, expect=2)
    assert "--zone: missing, --backend xpk needs it" in err
    _, err = place.launch("submit", "--backend", "xpk", *XPK[:-2], expect=2)
    assert "--run-dir: missing" in err
    _, err = place.xpk("submit", env={"PATH": "/nowhere"}, expect=2)
    assert "kubectl: not found" in err


def test_dry_run_prints_the_commands(place):
    """A dry run that does something, or shows other commands than are run."""
    flags = ("--set", "data.index=it's", "--slices", 2, "--priority", "high", "--workload", "w", "--xpk=--storage=bucket",
             "--watch", "gs://bucket/r")  # fmt: skip
    out, _ = place.xpk("resume-until-done", *flags, "--dry-run")
    assert not place.calls() and not place.run.exists()
    shown = [shlex.split(line) for line in out.splitlines()]
    place.xpk("resume-until-done", *flags, scenario=[[running(1), {"pods": []}, {"pods": []}], [DONE]])
    assert all(call in shown for call in place.calls()) and {c[0] for c in shown} == {"xpk", "kubectl", "gcloud"}
    assert len(place.calls("xpk")) == 2
    (pod,) = {call[-1].removeprefix("--command=") for call in place.calls("xpk")}
    assert shlex.split(pod) == ["exec", "python3", "train.py", "--distributed", "--config=r", "--run-dir=runs/r",
                                "--set=data.index=it's", "--alive-every=60"]  # fmt: skip
    (create,) = {tuple(call) for call in place.calls("xpk")}
    assert {"--num-slices=2", "--priority=high", "--workload=w", "--storage=bucket", "--cluster=c",
            "--termination-grace-period-seconds=300", "--device-type=v5p-256"} < set(create)  # fmt: skip
    assert all("--context=gke_project-1_us-central1_c" in call for call in place.calls("kubectl"))


@pytest.mark.parametrize("verb", ["submit", "monitor", "resume-until-done"])
def test_these_verbs_need_no_jax(place, verb):
    """Seconds of start-up, and a launcher that does not run where only xpk is installed; a reader of configs in a file
    that brings jax along."""
    code = "import sys, launch; launch.main(sys.argv[1:]); print(sorted({m.split('.')[0] for m in sys.modules}))"
    command = [sys.executable, "-c", code, verb, "--config", "r", "--dry-run"]
    out = subprocess.run(command, cwd=place.root, capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(out.splitlines()[-1]))
    assert {"data", "processes"} <= loaded
    assert not loaded & {"jax", "jaxlib", "orbax", "grain", "train", "model", "optim", "matplotlib"}


# ---------------------------------------------------------------------------------------- what both programs must read

RUN = "run:\n  name: {name}\n  steps: {steps}\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    return tiny_config(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("name", "steps", "sets"),
    [
        ("20261202_1530", "20", ()),
        ("1_000", "20", ()),
        ("12:30", "20", ()),
        ("20261202", "20", ()),
        ("'20261202'", "20", ()),
        ("on", "20", ()),
        ("true", "20", ()),
        ("1e3", "20", ()),
        ("../r", "20", ()),
        ("r", "1e3", ()),
        ("r", "1.0", ()),
        ("r", "'0x10'", ()),
        ("r", "0x10", ()),
        ("r", "010", ()),
        ("r", "0", ()),
        ("r", "-5", ()),
        ("r", "true", ()),
        ("r", "20\n  steps: 30", ()),
        ("r", "20", ("run.steps=1e3",)),
        ("r", "20", ("run.steps=0x10",)),
        ("r", "20", ("run.name=2026_12",)),
        ("r", "20", ("run.name=a b",)),
        ("r", "20", ("run.steps=30", "run.steps=40")),
        ("r", "20", ("run.steps.x=1",)),
        ("r", "20", ("run.stepz=1",)),
        ("r", "20", ("run.name",)),
        ("r", "20", ("run.name=[",)),
        ("r", "20", ("run={name: s, steps: 7, seed: 0, checkpoint_every: 4, keep_checkpoints: null, log_every: 4, "
                     "eval_index: null, eval_every: 6, eval_batches: null, sample_prompt: null}", "run.steps=8")),
        ("r", "20", ("run={name: s}",)),
        ("r", "20", ("run=5",)),
        ("r", "20", ("microbatch=2", "schedule.0.warmup_steps=3")),
    ],
)  # fmt: skip
def test_name_and_steps_are_those_of_train_py(tmp_path, whole, name, steps, sets):
    """Two readers of one file: `20261202_1530` is a name in one and a number in the other, so that the launcher trains a
    second run in another folder, or waits for a step that never comes. What train.py refuses is refused at once."""
    text = yaml.safe_dump({key: value for key, value in whole.items() if key != "run"})
    rest = {key: value for key, value in whole["run"].items() if key not in ("name", "steps")}
    path = tmp_path / "c.yaml"
    path.write_text(
        text + RUN.format(name=name, steps=steps) + "".join(f"  {k}: {json.dumps(v)}\n" for k, v in rest.items())
    )

    def outcome(read):
        try:
            return read()
        except ValueError:
            return "refused"

    def by_train():
        c = load_config(str(path), "cpu", list(sets))
        return c.run.name, c.run.steps

    expected, got = outcome(by_train), outcome(lambda: launch.name_and_steps(str(path), list(sets)))
    if sets == ("run.stepz=1",):  # a key that nobody knows is train.py's to refuse
        assert (expected, got) == ("refused", ("r", 20))
    else:
        assert got == expected
    assert expected == "refused" or type(expected[0]) is str


def test_a_config_that_is_refused_starts_nothing(place, monkeypatch, capsys):
    """A name that becomes a folder elsewhere, or a traceback; a trainer that is started to learn it."""
    monkeypatch.chdir(place.root)
    monkeypatch.setattr(launch, "HERE", place.root)
    (place.root / "open.yaml").write_bytes(b"run: [")
    (place.root / "latin.yaml").write_bytes(b"\xff")
    (place.root / "twice.yaml").write_bytes(b"run: {}\nrun: {}")
    for flags, says in (
        (("--set", "run.name=../x"), "run.name: got '../x', expected text of letters, digits, '.', '_' and '-'"),
        (
            ("--set", "run.name=2026"),
            "run.name: got 2026, expected text of letters, digits, '.', '_' and '-'; fix: put it",
        ),
        (("--set", "run.steps=1e3"), "run.steps: got 1000.0, expected a positive whole number"),
        (("--set", "run=[]"), "run: got [], expected a section with name and steps"),
        (("--set", "run.name=a\x01b"), "not valid YAML"),
        (("--config", "nowhere"), "config 'nowhere': not found"),
        (("--config", "open.yaml"), "not valid YAML"),
        (("--config", "latin.yaml"), "is not UTF-8"),
        (("--config", "twice.yaml"), "stands twice"),
    ):
        assert launch.main(["resume-until-done", "--config", "r", *flags]) == 2
        out, err = capsys.readouterr()
        assert says in err and err.count("\n") == 1 and out == "", err
    assert not any((place.root / "runs").iterdir())


def test_the_record_of_a_run_is_a_config(place):
    """What was run cannot be run again from RUN/config.yaml, which holds the hardware's section as well."""
    record = place.root / "record.yaml"
    record.write_text(
        yaml.safe_dump({**CONFIG, "hardware": {"microbatch": 1}, "run": {"name": "20261202_1530", "steps": 3}})
    )
    out, _ = place.launch("resume-until-done", "--config", record, "--set", "microbatch=2", "--dry-run")
    assert f"--run-dir={Path('runs/20261202_1530')}" in shlex.split(out)


ODD = "a b[1]#2%ü*?"


def test_where_things_are(place, monkeypatch):
    """A folder called "~"; a run directory whose name is taken for a pattern, or for several words."""
    monkeypatch.setenv("HOME", str(place.root))
    (place.root / "~").mkdir()  # no file of this folder is meant
    (place.root / "env").write_text("HF_TOKEN=x\n")
    (place.root / "own.yaml").write_text(yaml.safe_dump(CONFIG))
    flags = ("--config=~/own.yaml", f"--run-dir=~/runs/{ODD}", f"--watch=~/runs/{ODD}", "--env-file=~/env")
    run = place.root / "runs" / ODD
    out, _ = place.launch("resume-until-done", *flags, plan=[["save 4", "exit 1"], ["save 20", "exit 0"]])
    assert json.loads(out)["attempts"] == 2 and steps_in(run) == {"4", "20"}
    assert "step 20 of 20" in place.launch("monitor", *flags)[1]
    assert not any((place.root / "~").iterdir())
    out, _ = place.xpk("submit", *flags, "--dry-run")
    create = shlex.split(out.splitlines()[0])
    assert f"--env-file={place.root / 'env'}" in create  # xpk knows no ~
    assert f"--run-dir=~/runs/{ODD}" in shlex.split(create[-1])  # the pod's home


@pytest.mark.parametrize(
    ("flag", "values", "says"),
    [
        ("--stall", ("nan", "inf", "-1", "1e300"), "expected 0.1 to 31536000"),
        ("--poll", ("0", "nan", "inf"), "expected 0.01 to 31536000"),
        ("--backoff", ("-1", "nan", "inf"), "expected 0 to 31536000"),
        ("--max-backoff", ("nan", "1e18"), "expected 0 to 31536000"),
        ("--grace", ("nan", "-0.5"), "expected 0 to 31536000"),
        ("--retries", ("-1",), "expected 0 to inf"),
        ("--target", ("0", "-3"), "expected 1 to inf"),
        ("--processes", ("0", "1000000000"), "expected 1 to 256"),
    ],
)
def test_numbers_are_checked(place, monkeypatch, capsys, flag, values, says):
    """A hang that is never found (nan is less than nothing), a billion processes, a traceback out of sleep()."""
    monkeypatch.chdir(place.root)
    for value in values:
        assert launch.main(["submit", "--config", "configs/r.yaml", f"{flag}={value}"]) == 2
        out, err = capsys.readouterr()
        assert f"{flag}: got " in err and says in err and err.count("\n") == 1 and out == ""
    assert not any((place.root / "runs").iterdir())


def test_a_bug_of_ours_is_no_wrong_usage(place, monkeypatch):
    """A mistake in this program that ends as one line and exit code 2, as if the user had made it."""
    monkeypatch.chdir(place.root)

    def broken(job, args, follow):
        return dict(zip("ab", "a", strict=True))

    monkeypatch.setattr(launch, "attend", broken)
    monkeypatch.setattr(launch, "HERE", place.root)
    monkeypatch.setenv("PLAN", '[["exit 0"]]')
    with pytest.raises(ValueError, match="zip"):
        launch.main(["submit", "--config", "configs/r.yaml", "--run-dir", str(place.run)])


# ------------------------------------------------------------------------------------------------- the real train.py


def real(house, verb, run_dir, *overrides, extra=(), program=REPO / "launch.py") -> subprocess.Popen:
    """The launcher of this repository with the tiny recipe."""
    sets = (word for s in (f"compilation_cache={house.cache}", *overrides) for word in ("--set", s))
    flags = (
        "--json",
        "--config",
        house.config,
        "--hardware",
        "cpu",
        "--run-dir",
        run_dir,
        "--poll",
        "0.05",
        *sets,
        *extra,
    )
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(program), verb, *map(str, flags)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_until_done_under_kill_9(house, straight, tmp_path, capsys):
    """The launcher is killed, then the trainer: workers and trainers that outlive it, a run that starts again from
    zero, a step lost or trained twice, also with another number of loader workers (processes of their own); a run
    directory whose name is taken for a pattern; equal runs that `detect` cannot judge."""
    run_dir = tmp_path / ODD
    launcher = real(house, "resume-until-done", run_dir, "loader_workers=1")
    wait_for(lambda: steps_logged(run_dir) >= 6 and "4" in steps_in(run_dir), seconds=90)
    below = descendants(launcher.pid)
    assert len(below) >= 2
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(map(alive, below)), seconds=5)
    newest = max(int(name) for name in steps_in(run_dir) if name.isdigit())
    launcher = real(house, "resume-until-done", run_dir, "loader_workers=0")
    (trainer,) = wait_for(lambda: children(launcher.pid))
    os.kill(trainer, signal.SIGKILL)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and json.loads(out)["step"] == STEPS, err
    assert f"attempt 1: exit code 137, step {newest} of {STEPS}; again in 1 s" in err, err
    assert f"resuming from {run_dir / 'checkpoints' / str(newest)}: " in err, err
    assert_same_run(run_dir, straight)
    assert compare.main(["exact", str(run_dir), str(straight)]) == 0
    assert compare.main(["detect", str(run_dir), str(straight), "--png", str(tmp_path / "x.png")]) == 0
    assert "equal: training loss of" in capsys.readouterr().out


# train.py whose second held-out evaluation takes 14 s in its first attempt
SLOW = """
import importlib.util, sys, time
from pathlib import Path

here, repo = Path(__file__).parent, {repo!r}
sys.path[0] = repo  # its data.py, not the copy here
spec = importlib.util.spec_from_file_location("train", repo + "/train.py")
train = sys.modules["train"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
import heldout

by_row, first, calls = heldout.HeldOut.by_row, not (here / "evaluated").exists(), []


def slow(self, params, progress=False, should_stop=lambda: False):
    calls.append(1)
    step = self.step

    def one_batch(*args):
        time.sleep(14 / len(self.batches))
        return step(*args)

    if first and len(calls) == 2:
        self.step = one_batch
    found = by_row(self, params, progress, should_stop)
    self.step = step
    if first and len(calls) == 2:
        (here / "evaluated").touch()
        time.sleep(1)  # here the test stops it
    return found


heldout.HeldOut.by_row = slow
train.exit_with(train.main())
"""


@pytest.mark.slow
def test_signs_of_life(house, straight, tmp_path):
    """A held-out evaluation longer than --stall that is taken for a hang and killed, again and again; a process that is
    stopped for real and is waited for for ever."""
    for name in ("launch.py", "data.py", "processes.py"):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / "train.py").write_text(SLOW.format(repo=str(REPO)))
    run_dir, flags = tmp_path / "run", ("--stall", 12, "--grace", 1)
    launcher = real(house, "resume-until-done", run_dir, extra=flags, program=tmp_path / "launch.py")
    try:
        wait_for(lambda: (tmp_path / "evaluated").exists(), seconds=120)
        (trainer,) = children(launcher.pid)
        os.kill(trainer, signal.SIGSTOP)
        out, err = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0 and json.loads(out)["attempts"] == 2, err
    assert "step 12: evaluating 2 batches, 1 done" in err, err
    assert err.count("stalled: no sign of life for 12 s") == 1 and "attempt 1: stalled" in err
    assert_same_run(run_dir, straight)


@pytest.mark.slow
def test_several_processes_under_kill_9(house, tmp_path):
    """A pair of which one half is started again beside the other half of the attempt before."""
    run_dir, pair = tmp_path / "run", ("--processes", 2)
    launcher = real(house, "resume-until-done", run_dir, extra=pair)
    wait_for(lambda: steps_logged(run_dir) >= 6, seconds=90)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    out, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 0 and json.loads(out)["attempts"] == 2, err
    assert [row["step"] for row in rows(run_dir) if "train/CE loss" in row] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_config_that_train_py_refuses_is_tried_once(house, tmp_path):
    """A typo that is started again all night."""
    process = real(house, "resume-until-done", tmp_path / "run", "model.d_modle=1")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and "model.d_modle: unknown key" in err and "attempt 2" not in err


@pytest.mark.slow
def test_stages_with_one_launcher(house, tmp_path):
    """Stage 1 -> stage 2 -> stage 3 as three commands, each refusing what does not fit."""

    def launch(run_dir, *overrides, extra=(), expect=0):
        process = real(house, "resume-until-done", run_dir, *overrides, extra=extra)
        _, err = process.communicate(timeout=180)
        assert process.returncode == expect, err
        return err

    write_corpus(tmp_path, "midtrain", {"maths": 70}, seed=3)
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    launch(one, "run.steps=8")
    stage2 = (f"data.index={tmp_path / 'midtrain.json'}", "data.seed=1337", "run.steps=6",
              "schedule=[{until: null, kind: linear, warmup_steps: 0, total_steps: 6, final_fraction: 0}]")  # fmt: skip
    adam = ("--init-from", str(one), "--init-state", "adam")
    nowhere = ("--init-from", str(tmp_path / "nowhere"), *adam[2:])
    assert "no checkpoint found" in launch(two, *stage2, extra=nowhere, expect=2)
    assert "data.fingerprint" in launch(one, *stage2, extra=adam, expect=2)  # stage 1's own folder
    assert f"parameters and Adam moments of {one}" in launch(two, *stage2, extra=adam)
    assert [row["step"] for row in rows(two) if "train/CE loss" in row] == [1, 2, 3, 4, 5, 6]
    stage3 = (*stage2, "model.yarn={factor: 2.0, original_length: 16, beta_fast: 32.0, beta_slow: 1.0}", "data.seed=7",
              "data.document_mask=true")  # fmt: skip
    assert "model.yarn" in launch(two, *stage3, expect=2)
    assert f"parameters of {two}" in launch(three, *stage3, extra=("--init-from", str(two)))
    assert {"6"} <= steps_in(three)


# ------------------------------------------------------------------------------------------------------ the real xpk


@pytest.fixture(scope="module")
def real_xpk(tmp_path_factory) -> Path:
    """xpk 1.16 in an environment of its own: its pins (PyYAML, protobuf, packaging) are older than what we test."""
    root = tmp_path_factory.mktemp("xpk")
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    pip = subprocess.run([root / "bin" / "pip", "install", "-q", "xpk==1.16.*"], capture_output=True, text=True)
    if pip.returncode:
        pytest.skip(f"xpk 1.16 cannot be installed here: {pip.stderr.strip().splitlines()[-1]}")
    return root / "bin" / "xpk"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "machine", "vms"),
    [("tpu7x-4x4x4", "tpu7x", 16), ("tpu7x-4x8x8", "tpu7x", 64), ("v5p-256", "tpu-v5p-slice", 32)],
)  # fmt: skip
def test_the_real_xpk_takes_our_command(real_xpk, place, device, machine, vms):
    """A flag that xpk does not have, quotes that its YAML or the pod's shell takes apart, SIGTERM that ends in the
    shell around the trainer, an exit code that the pod loses."""
    (place.root / "env").write_text("HF_TOKEN\nPLAIN=it's {a} b\n")
    odd = 'data.index=it\'s "a" \\ #:{b}*'
    flags = ("--set", odd, "--env-file", place.root / "env", "--slices", 2, "--device-type", device, "--workload", "r",
             "--xpk=--max-restarts=3")  # fmt: skip
    out, _ = place.xpk("submit", *flags, "--dry-run", env={"HF_TOKEN": "hf_qwertyuiop"})
    _, *command = shlex.split(out.splitlines()[0])
    manifest = place.root / "manifest.yaml"
    ours = ["--dry-run", "--skip-validation", "--project-number=1", f"--output-manifest-file={manifest}"]
    home = {"HOME": str(place.root), "HF_TOKEN": "hf_qwertyuiop"}
    ran = subprocess.run([real_xpk, *command, *ours], env=os.environ | home, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    jobset = yaml.safe_load(manifest.read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (jobset["metadata"]["name"], job["replicas"], spec["parallelism"]) == ("r", 2, vms)
    assert spec["template"]["metadata"]["labels"] == {"xpk.google.com/workload": "r"} and container["name"] == "jax-tpu"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3 and container["image"] == "gcr.io/project-1/olmo:latest"
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["priorityClassName"] == "medium"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == machine
    assert container["env"] == [
        {"name": "HF_TOKEN", "value": "hf_qwertyuiop"},
        {"name": "PLAIN", "value": "it's {a} b"},
    ]
    restart = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert restart["operator"] == "NotIn" and 143 in restart["values"] and not {1, 2} & set(restart["values"])

    told = place.root / "told"
    stub = "import os, pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(143))\n"
    stub += f"pathlib.Path({str(told)!r}).write_text('\\0'.join(sys.argv[1:]))\ntime.sleep(60)\n"
    executable(place.root / "bin" / "python3", stub)
    path = {"PATH": f"{place.root / 'bin'}:{os.environ['PATH']}"}
    shell = subprocess.Popen(container["command"], env=os.environ | path, stdout=subprocess.PIPE, text=True)
    words = wait_for(lambda: told.exists() and told.read_text()).split("\0")
    assert words == ["train.py", "--distributed", "--config=r", "--run-dir=runs/r", f"--set={odd}", "--alive-every=60"]
    shell.send_signal(signal.SIGTERM)
    out, _ = shell.communicate(timeout=20)
    assert shell.returncode == 143 and "EXIT_CODE=143" in out
