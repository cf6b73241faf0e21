"""Kill training runs at random moments, again and again, and report what was lost (nothing may be).

    python bench/chaos.py FOLDER [--campaign NAME ...] [--kills 14] [--seed 0] [--minutes M]     about 7 s a kill
    python bench/chaos.py FOLDER --total                                            the sum of all reports in FOLDER

A campaign trains a tiny model for 40 steps (two epochs, a save every third step, an evaluation every seventh). Each
start draws a number of loader workers, processes and devices, a moment (start-up, restore, compilation, first step, a
step, a save, an evaluation, the summary), and kill -9, SIGTERM or SIGTERM twice. The kill comes from outside, a random
time after the process said that it is there; where it fell is read off what it said last. When a run is complete it is
compared with one that nothing disturbed, and the next begins, until there were enough kills.

Prints a JSON report, appends it to FOLDER/reports.jsonl, and exits with 1 if anything was lost. These count as lost: a
start that does not go on from the newest complete checkpoint; a complete checkpoint that is gone or set aside; a metric
or a final state that differs (bit for bit where the number of devices stays the same); an instance seen twice or never
in an epoch; a step that TensorBoard shows twice or not; a loader worker that lives on; an exit code that lies.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

from harness import BATCH, House, assert_same_checkpoint, board, rows, start

import compare
import data
from config import load_config
from processes import HEARTBEAT

STEPS, SAVES, EVALUATIONS = 40, 3, 7  # two epochs
ENDS_WITHIN = HEARTBEAT + 60  # seconds: for a process whose partner was killed
WORKER_ENDS_WITHIN = 5


class Campaign(NamedTuple):
    topologies: tuple[tuple[int, int], ...]  # (processes, devices of each)
    overrides: tuple[str, ...] = ()
    exact: bool = True  # the number of devices is always the same, so every bit is
    keep: int | None = None  # checkpoints


CAMPAIGNS = {
    "one device": Campaign(((1, 1),)),
    "two devices": Campaign(((1, 2), (2, 1))),  # a sum of two has one order
    "any devices": Campaign(((1, 1), (1, 2), (1, 8), (2, 2), (2, 1), (1, 4)), ("optim.eps=1e-2",), exact=False),
    "one checkpoint": Campaign(((1, 1),), ("run.checkpoint_every=1", "run.keep_checkpoints=1"), keep=1),
}
# Seconds after a process has said that it is there. What begins after a "step" may be a save or an evaluation.
MOMENTS = {"start-up": 4.0, "restore": 0.5, "compilation": 0.5, "first step": 0.05, "step": 0.03, "save": 0.15,
           "evaluation": 0.05, "summary": 0.5}  # fmt: skip

WEIGHT = {"step": 3, "save": 3, "compilation": 2, "evaluation": 2, "summary": 0.5}  # the rest: 1


def descendants(pid: int) -> set[int]:
    try:
        lists = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return set()
    children = {int(child) for words in lists for child in words}
    return children.union(*map(descendants, children))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def seconds_until_gone(pids: set[int]) -> float:
    began = time.monotonic()
    while any(map(alive, pids)) and time.monotonic() - began < 10 * WORKER_ENDS_WITHIN:
        time.sleep(0.05)
    return time.monotonic() - began


def half_saves(run_dir: Path) -> set[tuple]:
    return {(p.name, p.stat().st_ino) for p in (run_dir / "checkpoints").glob("*tmp*")}


class Log:
    """What a process of HOOKED says, as it says it."""

    def __init__(self, path: Path):
        self.path, self.read, self.entries = path, 0, []

    def poll(self) -> list[dict]:
        if self.path.exists():
            with open(self.path) as f:
                f.seek(self.read)
                text = f.read()
            whole = text[: text.rfind("\n") + 1]
            self.read += len(whole)
            self.entries += [e for e in map(json.loads, whole.splitlines()) if "at" in e]
        return self.entries

    def place(self) -> str:
        return self.poll()[-1]["at"] if self.poll() else "start-up"


class Chaos:
    """One campaign: starts, kills and comparisons; `report` counts them, `lost` says what went wrong."""

    def __init__(self, house: House, name, kills: int, seed: int, moments=tuple(MOMENTS), steps=STEPS, minutes=1e6):
        self.deadline = time.monotonic() + 60 * minutes
        self.house, self.campaign, self.kills, self.moments = house, CAMPAIGNS[name], kills, moments
        self.steps = steps
        self.rng = random.Random(f"{name} {seed}")
        self.folder = house.root / f"{name} {seed}"
        self.lost: list[str] = []
        self.running: list[subprocess.Popen] = []
        self.count = Counter(kills=0, starts=0, runs=0, signals=0, recomputed=0, twice=0, never=0, in_flight=0)
        self.moment, self.workers, self.topologies = Counter(), Counter(), Counter()
        self.delta = self.relative = self.orphans = self.stops = 0.0

    def enough(self) -> bool:
        return self.count["kills"] >= self.kills or time.monotonic() > self.deadline

    def sets(self, workers: int) -> list[str]:
        return [f"run.steps={self.steps}", f"run.checkpoint_every={SAVES}", f"run.eval_every={EVALUATIONS}",
                f"loader_workers={workers}", *self.campaign.overrides]  # fmt: skip

    def reference(self) -> Path:
        """The run that nothing disturbs, on the first topology."""
        run_dir = (
            self.house.root
            / f"reference {self.steps} {self.campaign.topologies[0]} {self.campaign.overrides}".replace("/", "")
        )
        if not (run_dir / "summary.json").exists():
            self.house.run(run_dir, *self.sets(0), devices=self.campaign.topologies[0][1])
        return run_dir

    def run(self) -> dict:
        self.reference()
        try:
            while not self.enough() and not self.lost:
                self.one_run(self.folder / str(self.count["runs"]))
        finally:  # Ctrl-C or SIGTERM: leave nobody behind
            for process in self.running:
                process.kill()
        return self.report()

    def report(self) -> dict:
        return {
            "kills": self.count["kills"], "starts": self.count["starts"], "runs_completed": self.count["runs"],
            "sigterms": self.count["signals"], "killed_at": {m: n for m, n in self.moment.items() if n},
            "with_a_save_in_flight": self.count["in_flight"], "loader_workers": dict(self.workers),
            "processes_x_devices": dict(self.topologies), "steps_recomputed": self.count["recomputed"],
            "largest_delta_same_devices": self.delta, "largest_relative_ce_delta_other_devices": self.relative,
            "instances_seen_twice": self.count["twice"], "instances_never_seen": self.count["never"],
            "slowest_worker_end_s": round(self.orphans, 2), "slowest_sigterm_to_exit_s": round(self.stops, 2),
            "lost": self.lost,
        }  # fmt: skip

    def expect(self, holds, what: str) -> None:
        if not holds:
            self.lost.append(what)

    def one_run(self, run_dir: Path) -> None:
        """From nothing to a complete run, with as many kills on the way as the dice give."""
        self.trained: dict[int, list[int]] = {}  # step -> instances, of the history that counts
        self.known = 0  # newest complete checkpoint of the last start
        for attempt in range(1000):
            complete = self.attempt(run_dir, attempt)
            if complete or self.lost:
                break
        if not self.lost:
            self.compare(run_dir)
            self.count["runs"] += 1

    def checkpoints(self, run_dir: Path) -> list[int]:
        names = [p.name for p in (run_dir / "checkpoints").glob("*")]
        self.expect(not any("damaged" in n for n in names), f"{run_dir}: {names}")
        return sorted(int(n) for n in names if n.isdigit())

    def attempt(self, run_dir: Path, attempt: int) -> bool:
        """One start; True if it came to the end of the run."""
        rng, logs = self.rng, run_dir.parent / "logs" / f"{run_dir.name}.{attempt}"
        topology, workers = rng.choice(self.campaign.topologies), rng.choice((0, 0, 1, 2))
        moment = rng.choices(self.moments, [WEIGHT.get(m, 1) for m in self.moments])[0]
        if self.enough() or self.known == self.steps:
            moment = "end"
        sent = rng.choices([[signal.SIGKILL], [signal.SIGTERM], [signal.SIGTERM] * 2], (6, 1, 1))[0]
        sets, env = self.sets(workers), []
        if moment == "compilation" and rng.random() < 0.5:
            sets, env = [*sets, "compilation_cache=null"], [("JAX_ENABLE_COMPILATION_CACHE", "false")]
        n, devices = topology
        before, half_before = self.checkpoints(run_dir), half_saves(run_dir)
        began = time.monotonic()
        logs.parent.mkdir(parents=True, exist_ok=True)
        if n > 1:
            processes = start(self.house, run_dir, *sets, n=n, devices=devices, env=env, logs=logs)
        else:
            logs.mkdir()
            processes = [self.house.start(run_dir, *sets, devices=devices, env=env, log=logs / "0")]
        self.running = processes
        said = [Log(logs / str(i)) for i in range(n)]
        victim = rng.randrange(n)
        with_all = n > 1 and (moment == "start-up" or rng.random() < 0.5)  # a launcher ends all of them
        self.wait_for(moment, processes, said[victim], began)
        killed = processes if with_all else [processes[victim]]
        children = set().union(*(descendants(p.pid) for p in killed))
        hit = moment != "end" and processes[victim].poll() is None
        place = said[victim].place()
        if hit:
            stop = time.monotonic()
            for s in sent:
                for p in killed:
                    p.send_signal(s)
                time.sleep(rng.uniform(0, 0.05) if len(sent) > 1 else 0)
        killed_now = hit and sent[0] == signal.SIGKILL
        orphans = seconds_until_gone(children) if killed_now else 0  # they hold the pipe that `end` reads to its end
        errors = [self.end(p) for p in processes]
        codes = [p.returncode for p in processes]
        if hit and sent[0] == signal.SIGTERM:
            self.stops = max(self.stops, time.monotonic() - stop)
        orphans = max(orphans, seconds_until_gone(children))
        self.orphans = max(self.orphans, orphans)
        self.expect(orphans < WORKER_ENDS_WITHIN, f"{run_dir}: loader workers lived on for {orphans:.0f} s")
        self.account(run_dir, before, [log.poll() for log in said], errors[0])

        dead = codes[victim] == -signal.SIGKILL
        place = said[victim].place() if dead else place  # after a SIGTERM it goes on
        after = self.checkpoints(run_dir)
        self.known = max(after, default=0)
        in_flight = bool(half_saves(run_dir) - half_before)
        self.count.update(starts=1, kills=dead, signals=len(sent) * (hit and not dead), in_flight=dead and in_flight)
        self.workers[str(workers)] += 1
        self.topologies[f"{n} x {devices}"] += 1
        self.moment[place] += dead
        print(f"{run_dir.parent.name}, run {run_dir.name}, start {attempt}: {n} x {devices}, {workers} workers, "
              f"{[s.name for s in sent] if hit else 'no signal'} aimed at {moment}, hit {place}"
              f"{', a save in flight' if in_flight else ''}, exit codes {codes}, checkpoints {after}", file=sys.stderr)  # fmt: skip
        if not hit:
            allowed = {0}
        elif sent[0] == signal.SIGKILL:
            allowed = {0, -signal.SIGKILL}
        else:  # before the handler is there the signal ends the process, in the summary it no longer has to stop
            allowed = {0, 143, -signal.SIGTERM}
        self.expect(codes[victim] in allowed, f"{run_dir}: exit codes {codes} after {sent}: {errors[victim][-2000:]}")
        self.expect(2 not in codes, f"{run_dir}: exit code 2: {errors}")
        if codes[victim] == 143:
            self.expect(re.search(r"step (\d+) is saved in", "".join(errors)), f"{run_dir}: 143, but nothing saved")
        if self.campaign.keep and before:
            self.expect(after, f"{run_dir}: no checkpoint is left of {before}")
        self.expect(self.campaign.keep or set(before) <= set(after), f"{run_dir}: {before} became {after}")
        return codes == [0] * n

    def end(self, process: subprocess.Popen) -> str:
        """What it wrote to standard error; a process that does not end is lost."""
        try:
            return process.communicate(timeout=ENDS_WITHIN)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            err = process.communicate()[1]
            self.lost.append(f"{process.args}: did not end: {err[-2000:]}")
            return err

    def wait_for(self, moment: str, processes: list[subprocess.Popen], said: Log, began: float) -> None:
        """Until the moment, and a random time more; or until a process has ended."""
        times = self.rng.randint(1, 9) if moment == "step" else self.rng.randint(1, 3)
        delay = self.rng.uniform(0, MOMENTS.get(moment, 0))
        while all(p.poll() is None for p in processes):
            at = [e["at"] for e in said.poll()]
            there = {"start-up": True, "end": False, "step": at.count("step") >= times,
                     "save": at.count("save") >= times, "evaluation": at.count("evaluation") >= times}  # fmt: skip
            if there.get(moment, moment in at):
                if moment == "compilation":
                    delay *= 1 if self.rng.random() < 0.5 else 8  # without the cache it takes seconds
                return time.sleep(delay)
            time.sleep(0.001)
            if time.monotonic() - began > 240:
                self.lost.append(f"{said.path}: never came to {moment}")
                return

    def account(self, run_dir: Path, before: list[int], entries: list[list[dict]], err: str) -> None:
        """Where this start went on, and which steps it trained on what (a process knows its own rows)."""
        newest = before[-1] if before else 0
        said = re.search(r"resuming from .*/(\d+): |already at step (\d+) |no checkpoint in", err)
        if said:
            at = int(said[1] or said[2] or 0)
            self.expect(at == newest, f"{run_dir}: {said[0]!r}, but {newest} is the newest checkpoint")
        trained: dict[int, list[int]] = {}
        for e in (e for process in entries for e in process if "step" in e):
            trained.setdefault(e["step"], []).extend(e["instances"])
        if trained:
            self.expect(min(trained) == newest + 1, f"{run_dir}: began at {min(trained)}, newest checkpoint {newest}")
            again = [s for s in self.trained if s > newest]
            self.count["recomputed"] += len(again)
            self.trained = {s: i for s, i in self.trained.items() if s <= newest} | trained

    def compare(self, run_dir: Path) -> None:
        """The complete run against the one that nothing disturbed."""
        reference = self.reference()
        source = data.open_data(load_config(str(self.house.config), "cpu", []).data)
        self.expect(
            sorted(self.trained) == list(range(1, self.steps + 1)), f"{run_dir}: trained {sorted(self.trained)}"
        )
        epochs = range(0, self.steps, source.usable // BATCH)
        for first in epochs:
            span = range(first + 1, first + source.usable // BATCH + 1)
            seen = Counter(i for s in span for i in self.trained.get(s, ()))
            expected = {int(i) for s in span for i in source.instances_at((s - 1) * BATCH)}
            self.count["twice"] += sum(n - 1 for n in seen.values())
            self.count["never"] += len(expected - seen.keys())
        self.expect(not self.count["twice"] and not self.count["never"],
                    f"{run_dir}: {self.count['twice']} instances twice, {self.count['never']} never")  # fmt: skip
        args = argparse.Namespace(a=str(reference), b=str(run_dir), steps=None, show=3, json=True)
        report = compare.exact(args)
        whole = not report["only_in_a"] and not report["only_in_b"]
        if self.campaign.exact:
            self.delta = max(self.delta, *(q["max_delta"] or 0 for q in report["quantities"].values()))
            self.expect(report["equal"], f"{run_dir}: {report['differing_quantities']}, {report['values']}")
            try:
                assert_same_checkpoint(run_dir, reference, self.steps)
            except AssertionError as e:
                self.lost.append(f"{run_dir}: the final state differs: {e}")
        else:
            ce = [[r["train/CE loss"] for r in rows(d) if "train/CE loss" in r] for d in (reference, run_dir)]
            off = max(abs(a - b) / a for a, b in zip(*ce, strict=True)) if whole else 1.0
            self.relative = max(self.relative, off)
            self.expect(off < 1e-5, f"{run_dir}: the loss is off by {off}")
        shown, due = board(run_dir), [*range(EVALUATIONS, self.steps, EVALUATIONS), self.steps]
        self.expect(
            shown["train/CE loss"] == list(range(1, self.steps + 1)), f"{run_dir}: TensorBoard {shown['train/CE loss']}"
        )
        self.expect(shown["eval/lm/all/CE loss"] == due, f"{run_dir}: TensorBoard {shown['eval/lm/all/CE loss']}")
        wanted = [self.steps] if self.campaign.keep else sorted({*range(SAVES, self.steps, SAVES), self.steps})
        self.expect(set(wanted) <= set(self.checkpoints(run_dir)), f"{run_dir}: {self.checkpoints(run_dir)}")


def add(reports: list[dict]) -> dict:
    """The sum of reports; the largest of what is a size."""
    total = {}
    for report in reports:
        for key, value in report.items():
            if isinstance(value, dict):
                total[key] = dict(Counter(total.get(key, {})) + Counter(value))
            elif key.startswith(("largest", "slowest")):
                total[key] = max(total.get(key, 0), value)
            else:
                total[key] = total.get(key, type(value)()) + value
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--campaign", action="append", choices=CAMPAIGNS, help="default: all of them")
    parser.add_argument("--kills", type=int, default=14, help="of each campaign (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="after these a campaign kills no more, it completes")
    parser.add_argument("--total", action="store_true", help="start nothing, add up the reports in FOLDER")
    args = parser.parse_args()
    path = args.folder / "reports.jsonl"
    if not args.total:
        house = House(args.folder.resolve() / "house")  # Orbax takes absolute paths only
        for name in args.campaign or CAMPAIGNS:
            report = Chaos(house, name, args.kills, args.seed, minutes=args.minutes).run()
            with open(path, "a") as f:
                f.write(json.dumps(report) + "\n")
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    total = add(reports if args.total else reports[-len(args.campaign or CAMPAIGNS) :])
    print(json.dumps(total, indent=1))
    return 1 if total["lost"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
