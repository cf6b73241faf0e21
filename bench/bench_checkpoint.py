"""Measure what checkpoints cost a run: the steps that a save overlaps, and the time from SIGTERM to a finished one.

    python bench/bench_checkpoint.py [FOLDER] [--saves 8] [--layers 8]

Starts train.py as a process on a model of about a million parameters a layer, saves every twelfth step, and sends SIGTERM
in a step after the last save. All numbers are of this one run, so that the ratios hold on a busy machine too. Prints JSON.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

from harness import House

from metrics import read_metrics
from processes import EXIT_PREEMPTED

EVERY = 12  # steps from save to save


def wait_for(holds, process) -> float:
    while not holds():
        if process.poll() is not None:
            raise SystemExit(f"train.py ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.002)
    return time.monotonic()


def measure(root: Path, saves: int, layers: int) -> dict:
    house, run_dir = House(root), root / "run"
    sizes = {"n_layers": layers, "d_model": 256, "n_heads": 8, "n_kv_heads": 8, "head_dim": 32, "d_ff": 1024}
    sets = [f"model.{key}={value}" for key, value in sizes.items()]
    sets += [f"run.checkpoint_every={EVERY}", "run.steps=100000", "run.eval_index=null", "microbatch=8"]
    process = house.start(run_dir, *sets)
    path, last = run_dir / "metrics.jsonl", saves * EVERY + EVERY // 2

    def rows() -> list[dict]:
        return [row for _, row in read_metrics(path)]

    began = wait_for(lambda: path.exists() and len(rows()) >= last, process)
    process.send_signal(signal.SIGTERM)
    before = {p.name for p in (run_dir / "checkpoints").iterdir()}

    def finished() -> set[str]:
        return {p.name for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()} - before

    complete = wait_for(finished, process) - began
    assert process.wait(timeout=120) == EXIT_PREEMPTED, process.communicate()
    ended, kept = time.monotonic() - began, rows()

    # The row of step N+1 tells how long training waited for the save of N, the row in whose step it was complete how
    # long it took; the first step and the first save (which makes threads and folders) are left out.
    blocked, overlapped, alone, began_at = [], [], [], None
    for row in kept[EVERY + 1 :]:
        seconds = 1 / row["throughput/device/BPS"]
        if "checkpoint/save_duration_s" in row:
            began_at = row["step"]
            blocked.append(seconds)
        elif began_at is not None:
            overlapped.append(seconds)
        else:
            alone.append(seconds)
        began_at = None if "checkpoint/save_async_duration_s" in row else began_at
    step = statistics.median(alone)
    size = sum(p.stat().st_size for p in (run_dir / "checkpoints" / min(finished())).rglob("*") if p.is_file())

    def of(tag: str) -> float:
        return statistics.median(row[tag] for row in kept[EVERY + 1 :] if tag in row)

    return {
        "checkpoint_MB": round(size / 1e6, 1),
        "saves": len(blocked),
        "step_s": round(step, 4),
        "save_duration_s": round(of("checkpoint/save_duration_s"), 4),
        "save_async_duration_s": round(of("checkpoint/save_async_duration_s"), 4),
        "step_with_the_save / step": round(statistics.median(blocked) / step, 2),
        "later_step_that_it_overlaps / step": round(statistics.median(overlapped) / step, 2) if overlapped else None,
        "steps_that_a_save_costs": round(
            (sum(blocked + overlapped) / step - len(blocked + overlapped)) / len(blocked), 2
        ),
        "sigterm_to_checkpoint_s": round(complete, 3),
        "sigterm_to_checkpoint / step": round(complete / step, 1),
        "sigterm_to_exit_s": round(ended, 3),
        "trained_on_after_sigterm": kept[-1]["step"] - last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="default: a temporary one")
    parser.add_argument("--saves", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(Path(folder), args.saves, args.layers), indent=1))


if __name__ == "__main__":
    main()
