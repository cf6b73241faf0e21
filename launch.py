"""Launch: start a run here or on a cluster, watch it, and start it again until its last step is saved.

    python launch.py resume-until-done --config quickstart.yaml
    python launch.py submit --backend xpk --config stage1.yaml --hardware v5p ...

`submit` starts train.py once, `monitor` watches it, `resume-until-done` starts it again until its last step is saved:
here (--backend local) or on a cluster through the command lines of xpk and kubectl (--backend xpk). No jax: what a launcher
knows of a run is its exit code, its log and what is on its disk. A launcher has no state of its own; start it again after
anything. What a run asks of a machine is worked out by tools/plan.py.

Exit codes: 0 done; 1 failed; 2 wrong usage or config; 143 after SIGTERM, 130 after Ctrl-C, 129 when the terminal is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import data
from processes import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    HERE,
    Busy,
    find_config,
    parse_override,
    read_yaml,
    refuse_moved_verb,
    run_name_fault,
    set_key,
    sole_writer,
)

EXIT_USAGE = 2  # train.py's, of a config that another attempt would refuse again


# ------------------------------------------------------------------------------------------------ child processes


class UsageError(ValueError):
    """Wrong flags or files; printed as one line, exit code 2."""


class LaunchFailed(RuntimeError):
    """The launcher gives up; printed as one line, exit code 1."""


class StartFailed(LaunchFailed):
    """An attempt could not be started; the next one may."""


class Unanswered(Exception):
    """kubectl, gcloud or a file system failed: nothing is known about the run, least of all that it has ended."""


SECRETS: set[str] = set()  # values that no line of ours may show
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.I)


def say(text: str) -> None:
    for secret in SECRETS:
        text = text.replace(secret, "***")
    print(text, file=sys.stderr, flush=True)


def child(command: list[str], **how) -> subprocess.Popen:
    """Start a command, without a shell. On Linux the kernel kills it when this process ends, also by kill -9.

    At once rather than with time to save: a trainer that lives on would write beside the next one, and loses nothing
    but steps that are computed again. Orders to stop in order go to this process (`end`).
    """
    parent, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def end_with_parent():
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it had ended before that
            os._exit(1)

    # A session of its own: Ctrl-C reaches this process alone, which says SIGTERM.
    how |= {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": prctl and end_with_parent}
    try:
        return subprocess.Popen(command, **how)
    except FileNotFoundError as e:
        raise UsageError(f"{command[0]}: not found; fix: install it, or put it on PATH") from e


def ask(command: list[str], seconds: float = 120) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command; 124 if it does not end in time."""
    process = child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {seconds} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1][:500]


def answer(command: list[str]) -> str:
    code, out, err = ask(command)
    if code:
        raise Unanswered(f"{command[0]} ends with {code}: {last_line(err)}")
    return out


def insist(question, args):
    """The answer to `question`, asked again while services or the network fail, for at most --stall seconds."""
    began = time.monotonic()
    while True:
        try:
            return question()
        except Unanswered as e:
            if time.monotonic() - began > args.stall:
                raise LaunchFailed(f"{e}; so for {args.stall:g} s; nothing was stopped; fix: its cause, then give the "
                                   "same command again") from e  # fmt: skip
            say(f"{e}; asking again")
        time.sleep(args.poll)


# ------------------------------------------------------------------------------------------------------- the run


def trainer_flags(args) -> list[str]:
    """train.py's flags. All that we take are passed on: one that is not would silently be without effect.

    --alive-every: several of the trainer's signs of life fall into --stall."""
    flags = ("config", "run_dir", "hardware", "data_root", "init_from", "init_state", "local_dir")
    given = [(flag, getattr(args, flag)) for flag in flags]
    given += [(flag, value) for flag in ("set", "allow") for value in getattr(args, flag)]
    given.append(("alive_every", f"{min(60, args.stall / 4):g}"))
    return [f"--{flag.replace('_', '-')}={value}" for flag, value in given if value is not None]


def name_and_steps(config: str, overrides: list[str]) -> tuple[str, int]:
    """run.name and run.steps as train.py reads them, of a config or of RUN/config.yaml. All else is for train.py to
    check."""
    path = find_config(config, HERE / "configs")
    raw = read_yaml(path)
    for dotted, value in map(parse_override, overrides):
        if dotted.partition(".")[0] == "run":
            set_key(raw, dotted, value)
    run = raw.get("run")
    if not isinstance(run, dict) or not {"name", "steps"} <= run.keys():
        raise UsageError(f"{path}: run: got {run!r}, expected a section with name and steps")
    if fault := run_name_fault(run["name"]):
        raise UsageError(f"{path}: {fault}")
    if type(run["steps"]) is not int or run["steps"] < 1:
        raise UsageError(f"{path}: run.steps: got {run['steps']!r}, expected a positive whole number")
    return run["name"], run["steps"]


def environment(path: str | None) -> dict[str, str]:
    """Variables of an --env-file as xpk reads it: NAME=value, or NAME alone to take the value from this environment."""
    values = {}
    if path and not Path(path).is_file():
        raise UsageError(f"--env-file: {path} is not a file")
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines() if path else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parsed = re.fullmatch(r"([A-Za-z_]\w*)(?:=(.*))?", line, re.A)
        if not parsed:  # xpk would leave it out without a word
            raise UsageError(f"{path}, line {i}: expected NAME=value or NAME, from the first column on")
        name, value = parsed[1], os.environ.get(parsed[1]) if parsed[2] is None else parsed[2]
        if value is None:
            raise UsageError(f"{path}, line {i}: {name} is not set in this environment")
        if re.search(r'["\\\x00-\x1f\x7f]', value):  # xpk writes it into YAML between double quotes, as it is
            raise UsageError(f"{path}, line {i}: {name}: its value holds a double quote, a backslash or a control sign")
        if len(value) >= 6 and (parsed[2] is None or SECRET_NAME.search(name)):  # a shorter one is in every other line
            SECRETS.add(value)
        values[name] = value
    return values


def steps_on_disk(folder: Path) -> list[str]:
    """Names of what is complete there. glob would take a mount that fails for an empty folder."""
    try:
        return [name for name in os.listdir(folder) if (folder / name / "meta" / "metadata").is_file()]
    except FileNotFoundError:
        return []  # nothing is saved yet
    except OSError as e:
        raise Unanswered(f"{folder}: {e.strerror}") from e


def list_steps(url: str) -> list[str]:
    return ["gcloud", "storage", "ls", f"{url.rstrip('/')}/checkpoints/*/meta/metadata"]


def completed(run_dir: str) -> int:
    """The newest step that is complete in RUN/checkpoints, as train.py names it: N updates are done. 0: none yet."""
    if run_dir.startswith("gs://"):
        code, out, err = ask(list_steps(run_dir))
        if code and "matched no objects" not in err:
            raise Unanswered(f"gcloud ends with {code}: {last_line(err)}")
        names = [path.split("/")[-3] for path in out.split()]
    else:
        names = steps_on_disk(Path(run_dir) / "checkpoints")
    return max((int(name) for name in names if name.isdecimal()), default=0)


class State(NamedTuple):
    doing: str  # gone | waiting (for machines) | running | idle (should run, but nothing of it does) | ended
    why: str = ""
    code: int | None = None  # of an attempt that has ended


class Sign(NamedTuple):
    """A sign of life, if it differs from the one before: train.py prints a line at least every --alive-every seconds
    as long as anything advances, also while it compiles, evaluates, restores or saves."""

    checkpoint: int  # the newest complete step
    news: object  # of its log; None: it cannot be read at the moment
    step: str = "?"  # the newest one in its log


def joint_code(codes: list[int]) -> int:
    """One exit code for the processes of an attempt: 2 if one of them says so, since the others only follow it."""
    codes = [128 - code if code < 0 else code for code in codes]
    failed = [code for code in codes if code not in (0, EXIT_PREEMPTED)]
    return EXIT_USAGE if EXIT_USAGE in codes else failed[0] if failed else max(codes)


# ------------------------------------------------------------------------------------------------- backend local


class Local(NamedTuple):
    """An attempt on this machine."""

    processes: list[subprocess.Popen] | None  # None: those of another launcher
    log: TextIO  # of process 0


def local_commands(args) -> list[list[str]]:
    """One command a process; several meet at a free port."""
    command = [sys.executable, str(HERE / "train.py"), *trainer_flags(args)]
    if args.processes == 1:
        return [command]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        several = [f"--coordinator=127.0.0.1:{s.getsockname()[1]}", f"--num-processes={args.processes}"]
    return [[*command, *several, f"--process-id={i}"] for i in range(args.processes)]


def launcher_lock(args) -> Path:
    """What launchers lock with sole_writer. Not the run directory: that lock is their trainers', who keep apart by
    themselves those that outlive a killed launcher."""
    return Path(args.run_dir) / "launch"


@contextlib.contextmanager
def only_launcher(args) -> Iterator[None]:
    """No other launcher starts this run on this machine while this block runs."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sole_writer(launcher_lock(args), wait=1))  # a monitor takes it for a moment
        except Busy as e:
            holder = data.os_error(e).partition(";")[0]
            raise LaunchFailed(f"another launcher is at work here; fix: end it, or monitor it ({holder})") from e
        yield


def end(processes: list[subprocess.Popen], seconds: float, ask_them: bool = True) -> None:
    """SIGTERM to all, so that they save; kill -9 to what is left after `seconds`, or when a second signal comes."""
    try:
        deadline = time.monotonic() + seconds
        for process in processes if ask_them else ():
            process.terminate()
        for process in processes:
            process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        say(f"not ended after {seconds:g} s: killed")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def local_attempt(args, existing: str) -> Iterator[Local]:
    """Start the trainer's processes, or look at those of another launcher. They have ended when this block is left."""
    folder, env = Path(args.run_dir), os.environ | environment(args.env_file)
    logs = [folder / f"launch.{i}.log" for i in range(args.processes)]
    with contextlib.ExitStack() as stack:
        if existing == "look":
            if not logs[0].is_file():
                raise UsageError(f"{folder}: no launcher has been at work here")
            yield Local(None, stack.enter_context(open(logs[0])))
            return
        processes = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            logs[0].touch()
            shown = stack.enter_context(open(logs[0]))
            shown.seek(0, os.SEEK_END)
            stack.callback(local_follow, Local(processes, shown), args)
            stack.callback(end, processes, args.grace)  # the callback that is named last runs first
            for path, command in zip(logs, local_commands(args), strict=True):
                with open(path, "a") as log:
                    print(f"# {time.strftime('%F %T')} {shlex.join(command)}", file=log, flush=True)
                    streams = {"stdout": log, "stderr": subprocess.STDOUT}
                    processes.append(child(command, **streams, env=env))
        except OSError as e:  # a full disk, or no memory for another process
            raise StartFailed(f"{e.filename or folder}: {e.strerror}") from e
        yield Local(processes, shown)


def local_state(job: Local, args) -> State:
    if job.processes is None:
        if not os.access(args.run_dir, os.W_OK):
            raise LaunchFailed(f"{args.run_dir}: may not be written, so that whether a launcher is at work here cannot be "
                               "told; fix: monitor it as the user who launched it")  # fmt: skip
        try:
            with sole_writer(launcher_lock(args)):
                return State("gone", "no launcher is at work")
        except Busy:
            return State("running")
    codes = [process.poll() for process in job.processes]
    if any(codes) and None in codes:  # the others notice by a collective that fails, or by its heartbeat
        end(job.processes, LEAVE, ask_them=False)
        codes = [process.poll() for process in job.processes]
    if None in codes:
        return State("running")
    code = joint_code(codes)
    return State("ended", f"exit code {code}", code)


LEAVE = 60  # seconds; processes.HEARTBEAT and some more


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise Unanswered(f"{path}: {e.strerror}") from e


def local_sign(args) -> Sign:
    """Process 0's log has its lines, metrics.jsonl its steps."""
    return Sign(
        completed(args.watch), [size_of(Path(args.run_dir) / name) for name in ("launch.0.log", "metrics.jsonl")]
    )


def local_follow(job: Local, args) -> None:
    if text := job.log.read():
        say(text.removesuffix("\n"))


# --------------------------------------------------------------------------------------------------- backend xpk


def xpk_create(args) -> list[str]:
    """The workload. `exec`, because xpk sends SIGTERM to the shell that this runs in; not every bash hands it on."""
    trainer = shlex.join(["python3", "train.py", "--distributed", *trainer_flags(args)])
    flags = {
        "cluster": args.cluster, "project": args.project, "zone": args.zone, "workload": args.workload,
        "device-type": args.device_type, "num-slices": args.slices, "priority": args.priority,
        "docker-image": args.docker_image, "termination-grace-period-seconds": f"{args.grace:.0f}",
        "env-file": args.env_file,
    }  # fmt: skip
    given = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    return ["xpk", "workload", "create", *given, *args.xpk, f"--command=exec {trainer}"]


def kubectl(args, *words: str) -> list[str]:
    """The context is named every time: somebody may change the current one within weeks."""
    return ["kubectl", f"--context={args.context}", "--namespace=default", *words]


def xpk_queries(args) -> dict[str, list[str]]:
    pods = f"--selector=xpk.google.com/workload={args.workload}"
    logs = ("logs", pods, "--container=jax-tpu", "--prefix", "--max-log-requests=1000")
    return {
        "jobset": kubectl(args, "get", "jobset", args.workload, "--ignore-not-found", "--output=json"),
        "pods": kubectl(args, "get", "pods", pods, "--output=json"),
        "tail": kubectl(args, *logs, "--timestamps", "--tail=40"),
        "follow": kubectl(args, *logs, "--tail=40", "--follow"),
        # in the foreground: it returns when the pods are gone, too, so that no old trainer is left beside a new one
        "delete": kubectl(args, "delete", "jobset", args.workload, "--ignore-not-found", "--cascade=foreground"),
    }


def xpk_state(job, args) -> State:
    """What the JobSet and its pods say. Raises Unanswered where kubectl does."""
    queries = xpk_queries(args)
    try:
        jobset = json.loads(answer(queries["jobset"]) or "null")
        pods = json.loads(answer(queries["pods"]))["items"] if jobset else []
    except (json.JSONDecodeError, KeyError) as e:
        raise Unanswered(f"kubectl: not the JSON that was expected: {e}") from e
    if jobset is None:
        return State("gone", "its JobSet is gone")
    containers = [c for pod in pods for c in pod["status"].get("containerStatuses", []) if c["name"] == "jax-tpu"]
    states = [c["state"] for c in containers]
    codes = [state["terminated"]["exitCode"] for state in states if "terminated" in state]
    terminal = jobset.get("status", {}).get("terminalState")
    if terminal == "Completed":
        return State("ended", "completed", 0)
    if terminal:
        code = joint_code([code for code in codes if code] or [1])
        return State("ended", f"{terminal.lower()}, exit code {code}" + ("" if codes else " (no pod tells)"), code)
    if jobset["spec"].get("suspend"):
        return State("waiting", "in Kueue's queue")
    refused = [state["waiting"]["reason"] for state in states if "waiting" in state]
    refused = [reason for reason in refused if reason not in ("ContainerCreating", "PodInitializing")]
    if refused:
        return State("ended", f"a pod cannot start: {refused[0]}", 1)
    phases = Counter(pod["status"]["phase"] for pod in pods)
    pending = f"{phases['Pending']} of {len(pods)} pods are pending" if phases["Pending"] else None
    if phases["Running"]:  # and do nothing until the last of them is there: that is no queue, it can be a stall
        return State("running", pending or f"{len(pods)} pods")
    return State("waiting", pending) if pending else State("idle", "no pod of it is active")


def xpk_sign(args) -> Sign:
    """The last line of process 0, behind the time that it was written at, so that no two are the same.

    There is none while a pod is not there yet, or when its machine is gone; that is no reason to ask until there is."""
    lines = ask(xpk_queries(args)["tail"])[1].splitlines()
    # Index 0 of job 0, which its name ends with: WORKLOAD-JOB-0-0-xxxxx. Another process prints only what goes wrong, and
    # may do so while all hang.
    lines = [line for line in lines if re.match(r"\[pod/\S+-0-0-\w+/", line)] or lines
    steps = re.findall(r"\bstep (\d+)", "\n".join(lines))
    return Sign(completed(args.watch), lines[-1] if lines else None, steps[-1] if steps else "?")


def xpk_follow(job, args) -> None:
    with child(xpk_queries(args)["follow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                say(line.removesuffix("\n"))
        finally:
            process.kill()


def xpk_delete(args) -> None:
    code, _, err = ask(xpk_queries(args)["delete"], seconds=args.grace + 600)
    if code:
        raise StartFailed(f"workload {args.workload} cannot be deleted: kubectl ends with {code}: {last_line(err)}")


@contextlib.contextmanager
def xpk_attempt(args, existing: str) -> Iterator[None]:
    """Submit the workload. One of that name may exist; `existing`: refuse | adopt | replace it, or only look.

    An exception leaves the workload as it is: a launcher that ends does not take a pod's work with it.
    """
    there = insist(lambda: xpk_state(None, args), args)
    adopted = existing == "look" or existing == "adopt" and there.doing not in ("gone", "ended")
    if adopted:
        say(f"workload {args.workload}: {there.doing} {there.why}: watching it")
    elif there.doing != "gone" and existing == "refuse":
        raise LaunchFailed(f"workload {args.workload} exists ({there.doing} {there.why}); fix: monitor it, "
                           "resume-until-done, or another --workload")  # fmt: skip
    else:
        if there.doing != "gone":
            xpk_delete(args)
        say(f"submitting workload {args.workload}")
        # Without --quiet and without standard input: xpk asks before it overwrites, and gets no answer.
        code, out, err = ask(xpk_create(args), seconds=1800)
        say(out + err)
        if code:
            kind = UsageError if code == EXIT_USAGE else StartFailed
            raise kind(f"xpk ends with {code}: {last_line(err or out)}")
    yield None
    if existing in ("adopt", "replace"):
        there = insist(lambda: xpk_state(None, args), args)
        if there.code != 0 and there.doing != "gone":
            say(f"last lines of workload {args.workload}:\n{ask(xpk_queries(args)['tail'])[1]}")
        if there.doing not in ("gone", "ended"):
            xpk_delete(args)  # it stalled, or lost its pods


# ----------------------------------------------------------------------------------------------------- the verbs


class Backend(NamedTuple):
    attempt: Callable  # (args, existing) -> context manager of a job
    state: Callable  # (job, args) -> State
    sign: Callable  # (args) -> Sign
    follow: Callable  # (job, args): shows the log


BACKENDS = {
    "local": Backend(local_attempt, local_state, local_sign, local_follow),
    "xpk": Backend(xpk_attempt, xpk_state, xpk_sign, xpk_follow),
}


def attend(job, args, follow: bool) -> tuple[int | None, str]:
    """Watch one attempt to its end: (exit code, why). The code is None if it was taken away from outside."""
    backend = BACKENDS[args.backend]
    last, sign, since, idle = None, None, time.monotonic(), 0
    while True:
        state = insist(lambda: backend.state(job, args), args)
        if state.why and state != last and state.doing not in ("gone", "ended"):
            say(f"{args.name}: {state.doing}, {state.why}")
        if follow and state.doing not in ("waiting", "idle"):
            backend.follow(job, args)
        last, idle = state, idle + 1 if state.doing == "idle" else 0
        if state.doing in ("gone", "ended") or idle == 2:  # once may be a JobSet that starts its pods again
            return state.code, state.why
        now = insist(lambda: backend.sign(args), args) if state.doing == "running" else None
        if now and sign and now.news is None:
            now = now._replace(news=sign.news, step=sign.step)
        if now is None or now != sign:  # a queue is no stall
            if now and not follow and (sign is None or (now.checkpoint, now.step) != (sign.checkpoint, sign.step)):
                say(f"{args.name}: step {now.step}, checkpoint {now.checkpoint} of {args.target}")
            sign, since = now, time.monotonic()
        elif time.monotonic() - since > args.stall:
            return 1, f"stalled: no sign of life for {args.stall:g} s"
        time.sleep(args.poll)


def run_submit(args) -> int:
    with BACKENDS[args.backend].attempt(args, "refuse") as job:
        if args.backend == "xpk":
            say(f"submitted; python launch.py monitor, with the same flags, shows workload {args.workload}")
            return 0
        code, why = attend(job, args, follow=True)
    say(f"{args.name}: {why}, step {insist(lambda: completed(args.watch), args)} of {args.target}")
    return 1 if code is None else code


def run_monitor(args) -> int:
    with BACKENDS[args.backend].attempt(args, "look") as job:
        code, why = attend(job, args, follow=True)
    step = insist(lambda: completed(args.watch), args)
    say(f"{args.name}: {why}, step {step} of {args.target}")
    return code or int(step < args.target)


def run_until_done(args) -> int:
    """Start, watch, and start again, until the last step is saved. 143 and what was taken away cost no retry."""
    began, attempts, failures, fruitless, existing = time.monotonic(), 0, 0, 0, "adopt"
    step = insist(lambda: completed(args.watch), args)
    while args.backend == "local" or step < args.target:  # here train.py says itself that it is done
        attempts, before = attempts + 1, step
        try:
            with BACKENDS[args.backend].attempt(args, existing) as job:
                code, why = attend(job, args, follow=args.backend == "local")
        except StartFailed as e:
            code, why = 1, str(e)
        step, existing = insist(lambda: completed(args.watch), args), "replace"
        if code == EXIT_USAGE:
            raise UsageError(f"attempt {attempts}: train.py refuses its config or data (exit code 2); see above")
        if code in (0, None) and step >= args.target:
            break
        if code == 0:
            raise LaunchFailed(f"train.py is done, and in {args.watch} stands step {step}, expected {args.target}; "
                               "fix: --target, or --watch")  # fmt: skip
        fruitless = 0 if step > before else fruitless + 1
        failures = 0 if step > before else failures + (code not in (None, EXIT_PREEMPTED))
        outcome = f"attempt {attempts}: {why}, step {step} of {args.target}"
        if failures > args.retries:
            raise LaunchFailed(f"{outcome}; gave up: {args.retries} retries in a row have brought no step")
        wait = min(args.backoff * 2 ** min(max(0, fruitless - 1), 60), args.max_backoff)
        budget = f" (retry {failures} of {args.retries} without a new step)" if failures else ""
        say(f"{outcome}; again in {wait:g} s{budget}")
        time.sleep(wait)
    seconds = round(time.monotonic() - began, 1)
    result = {"step": step, "target": args.target, "attempts": attempts, "seconds": seconds}
    done = f"{args.name}: done, step {step} of {args.target}, {attempts} attempt{'s'[: attempts != 1]}, {seconds:g} s"
    if args.json:
        say(done)  # standard output is for the JSON
    print(json.dumps(result) if args.json else done)
    return 0


def print_commands(args) -> int:
    """--dry-run: what would be run, a line each, as a shell takes it."""
    commands = local_commands(args) if args.backend == "local" else [xpk_create(args), *xpk_queries(args).values()]
    commands += [list_steps(args.watch)] if args.watch.startswith("gs://") else []
    print("\n".join(map(shlex.join, commands)))
    return 0


NAMES = {  # what a flag may be. xpk puts these into commands of a shell, so that nothing else may pass
    "cluster": r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "project": r"([a-z][-a-z0-9.]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
    "zone": r"[a-z]+-[a-z]+[0-9]+-[a-z]",
    "workload": r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "device_type": r"[a-z0-9]+(-[a-z0-9]+)*",
    "docker_image": r"[a-z0-9][A-Za-z0-9._/:@-]*",
    "context": r"[A-Za-z0-9][A-Za-z0-9._:@/-]*",
    "xpk": r"--(storage|spot|on-demand|flex|reservation|max-restarts|scheduler|ramdisk-directory|mtc-enabled|"
           r"docker-image-pull-secret|ttl-seconds-after-finished|debug-dump-gcs|deploy-stacktrace-sidecar|"
           r"enable-debug-logs|skip-validation)(=[A-Za-z0-9._/:@,-]+)?",
}  # fmt: skip


YEAR = 365 * 86400
RANGES = {
    "target": (1, math.inf), "processes": (1, 256), "slices": (1, 1000), "retries": (0, math.inf), "poll": (0.01, YEAR),
    "stall": (0.1, YEAR), "backoff": (0, YEAR), "max_backoff": (0, YEAR), "grace": (0, YEAR),
}  # fmt: skip


def here(flag: str, path: str) -> str:
    """A path as this machine has it; UsageError of a URL."""
    try:
        return str(data.local_path(path))
    except data.DataError as e:
        raise UsageError(f"--{flag}: {e}") from e


def check_launch(args) -> None:
    """Complete the flags and refuse what is wrong with them."""
    for flag, value in vars(args).items():
        if value == "":  # as of a shell's variable that is not set
            raise UsageError(f"--{flag.replace('_', '-')}: got nothing, expected a value")
    args.name, steps = name_and_steps(args.config, args.set)
    args.target = steps if args.target is None else args.target
    xpk = args.backend == "xpk"
    if xpk and args.run_dir is None:
        raise UsageError("--run-dir: missing, expected the folder on shared storage as the pods see it")
    run_dir = here("run-dir", args.run_dir or f"runs/{args.name}")
    args.run_dir = args.run_dir if xpk else run_dir  # ~ is the pod's home there
    args.watch = run_dir if args.watch is None else args.watch
    args.watch = args.watch if args.watch.startswith("gs://") else here("watch", args.watch)
    args.env_file = args.env_file and here("env-file", args.env_file)  # xpk knows no ~
    first = {"poll": 60, "backoff": 300, "max_backoff": 3600} if xpk else {"poll": 0.5, "backoff": 1, "max_backoff": 60}
    for flag, default in first.items():
        setattr(args, flag, default if getattr(args, flag) is None else getattr(args, flag))
    for flag, (least, most) in RANGES.items():
        if not least <= getattr(args, flag) <= most:  # nan is in no range
            raise UsageError(f"--{flag.replace('_', '-')}: got {getattr(args, flag)}, expected {least} to {most}")
    values = environment(args.env_file)
    words = [*trainer_flags(args), *args.xpk]
    for name, value in values.items():
        if value in SECRETS and any(value in word for word in words):
            raise UsageError(f"the value of {name} stands in a flag; fix: read it from the environment")
    if not xpk:
        return
    args.workload = args.workload or re.sub("[^a-z0-9]+", "-", args.name.lower()).strip("-")
    if args.zone and args.project and args.context is None:  # as gcloud names it, of a regional cluster
        args.context = f"gke_{args.project}_{args.zone.rpartition('-')[0]}_{args.cluster}"
    for flag, pattern in NAMES.items():
        for value in args.xpk if flag == "xpk" else [getattr(args, flag)]:
            name = f"--{flag.replace('_', '-')}"
            if value is None:
                raise UsageError(f"{name}: missing, --backend xpk needs it")
            if not re.fullmatch(pattern, value, re.A):
                raise UsageError(f"{name}: got {value!r}, expected {pattern}")
    for word in words:  # it goes through YAML, and Kubernetes fills in $(NAME)
        if re.search(r"[\x00-\x1f\x7f]|\$\(", word):
            raise UsageError(f"{word!r}: got a control sign or '$(', which cannot be passed to a pod")
    if not args.watch.startswith("gs://") and not Path(args.watch).parent.is_dir():
        raise UsageError(f"--watch: {args.watch} is not to be seen from here; fix: the run directory as this machine "
                         "sees it, a folder or gs://BUCKET/...")  # fmt: skip


def run_launch(args) -> int:
    """A verb of the launcher, with what the user can mend as one line; what cannot be is our bug, with its traceback."""
    checked = False
    try:
        check_launch(args)
        checked = True
        if args.dry_run:
            return print_commands(args)
        alone = args.backend == "local" and args.verb != "monitor"
        with only_launcher(args) if alone else contextlib.nullcontext():
            return args.launch(args)
    except (ValueError, LaunchFailed, OSError) as e:
        if checked and isinstance(e, ValueError) and not isinstance(e, UsageError):
            raise
        say(f"launch.py: error: {data.os_error(e) if isinstance(e, OSError) else e}")
        return EXIT_USAGE if isinstance(e, ValueError) else 1


# ----------------------------------------------------------------------------------------------------- command line


def add_launch_verb(verbs, name: str, launch, about: str):
    verb = verbs.add_parser(
        name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{about[0].upper()}{about[1:]}. The three verbs take the same flags.",
        epilog=f"example: python launch.py {name} --config quickstart.yaml --set run.steps=40 --run-dir runs/short",
    )  # fmt: skip
    verb.set_defaults(launch=launch)
    verb.add_argument("--backend", choices=tuple(BACKENDS), default="local", help="where; default: this machine")
    verb.add_argument("--dry-run", action="store_true", help="print the exact commands, run nothing")
    verb.add_argument("--json", action="store_true", help="how resume-until-done ended as JSON, for programs")
    trainer = verb.add_argument_group("passed on to train.py")
    trainer.add_argument("--config", required=True, help="a file, or a name in configs/")
    trainer.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    trainer.add_argument("--run-dir", help="default: runs/<run.name>; with xpk: the folder as the pods see it")
    trainer.add_argument("--data-root")
    trainer.add_argument("--init-from", metavar="CKPT")
    trainer.add_argument("--init-state", choices=("params", "adam"))
    trainer.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    trainer.add_argument("--allow", action="append", default=[], metavar="KEY")
    trainer.add_argument("--local-dir", metavar="DIR")
    run = verb.add_argument_group("the run")
    run.add_argument(
        "--target", type=int, metavar="STEP", help="a complete step that high is success; default: run.steps"
    )
    run.add_argument("--env-file", help="variables for the trainer: NAME=value, or NAME alone to take it from here")
    run.add_argument(
        "--stall",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="without a new line in its log or a checkpoint: hung",
    )
    run.add_argument("--grace", type=float, default=300, metavar="SECONDS", help="to save in after SIGTERM")
    run.add_argument("--poll", type=float, metavar="SECONDS", help="default: 0.5, xpk: 60")
    run.add_argument("--retries", type=int, default=10, metavar="N", help="in a row that bring no step")
    run.add_argument("--backoff", type=float, metavar="SECONDS", help="before the next attempt, doubled while they "
                     "bring no step; default: 1, xpk: 300")  # fmt: skip
    run.add_argument("--max-backoff", type=float, metavar="SECONDS", help="and no more than; default: 60, xpk: 3600")
    run.add_argument("--processes", type=int, default=1, metavar="N", help="of train.py on this machine")
    xpk = verb.add_argument_group("--backend xpk")
    for flag in ("cluster", "project", "zone", "docker-image"):
        xpk.add_argument(f"--{flag}")
    xpk.add_argument("--device-type", help="as xpk names it: v5p-256, tpu7x-4x4x4")
    xpk.add_argument("--slices", type=int, default=1)
    xpk.add_argument("--priority", choices=("very-low", "low", "medium", "high", "very-high"), default="medium")
    xpk.add_argument("--workload", help="default: run.name")
    xpk.add_argument("--watch", help="the run directory as seen from here, a folder or gs://...; default: --run-dir")
    xpk.add_argument("--context", help="kubectl's; default: gke_PROJECT_REGION_CLUSTER")
    xpk.add_argument("--xpk", action="append", default=[], metavar="FLAG", help="one more flag of xpk workload create, "
                     "as in --xpk=--storage=bucket")  # fmt: skip


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    add_launch_verb(verbs, "submit", run_submit, "start train.py once")
    add_launch_verb(verbs, "monitor", run_monitor, "show the log and the end of what another launcher has started")
    add_launch_verb(verbs, "resume-until-done", run_until_done, "start train.py again until its last step is saved")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    new = "python tools/plan.py {}, see its --help"
    refuse_moved_verb("launch.py", argv, {"plan": new.format("compile"), "collectives": new.format("collectives")})
    args = parse_args(argv)
    try:
        return run_launch(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    for order in (signal.SIGTERM, signal.SIGHUP):  # not without cleaning up
        if signal.getsignal(order) != signal.SIG_IGN:  # nohup
            signal.signal(order, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
