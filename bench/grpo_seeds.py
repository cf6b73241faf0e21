"""What GRPO does to the quick start's model, three seeds, beside as many further steps of SFT: a table and a picture.

    python bench/grpo_seeds.py --picture docs/grpo.png         after the quick start; about half an hour on two CPU cores

The task is tools/problems.py's: so many different words, each of them real. Both branches go on from one short SFT. The
problems are those of words that no training saw. Runs lie in runs/grpo_seeds and are continued if cut off.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
DATA, RUNS = Path("data/words"), Path("runs/grpo_seeds")
SEEDS, STEPS, EVERY = (0, 1, 2), 100, 20
TAGS = {name: f"eval/grpo/{name} reward" for name in ("sampled", "greedy")}


def call(program: str, *words) -> None:
    print("$ python", program, *words, flush=True)
    subprocess.run([sys.executable, str(REPO / program), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def settings(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def tune(run: Path, start: Path, steps: int, warmup: int, seed: int) -> None:
    """SFT at a constant rate: the first 120 steps, and the branch that goes on with it."""
    schedule = f"[{{until: null, kind: constant, warmup_steps: {warmup}, total_steps: {steps}, final_fraction: 1.0}}]"
    values = {"run.name": run.name, "run.steps": steps, "schedule": schedule, "run.checkpoint_every": EVERY,
              "data.index": DATA / "chat/train.json", "run.eval_index": "null", "data.sequence_length": 128,
              "data.seed": seed}  # fmt: skip
    call("train.py", "--config", "quickstart_sft.yaml", "--init-from", start, "--run-dir", run, *settings(values))


def rewards(run: Path) -> dict[int, dict[str, float]]:
    """step -> held-out rewards, of a run of grpo.py."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: {name: r[tag] for name, tag in TAGS.items()} for r in rows if TAGS["greedy"] in r}


def grpo(run: Path, start: Path, steps: int, seed: int) -> dict[int, dict[str, float]]:
    values = {"run.steps": steps, "run.seed": seed, "run.eval_every": EVERY}
    call("grpo.py", "--config", "quickstart_grpo.yaml", "--init-from", start, "--run-dir", run, *settings(values))
    return rewards(run)


def further_sft(start: Path, seed: int, at_start: dict[str, float]) -> dict[int, dict[str, float]]:
    """The same evaluation of the checkpoints of an SFT run: what grpo.py finds before its first step."""
    tune(run := RUNS / f"sft_{seed}", start, STEPS, 0, seed)
    return {0: at_start} | {
        step: grpo(RUNS / f"sft_{seed}_{step}", run / "checkpoints" / str(step), 1, 0)[0]
        for step in range(EVERY, STEPS + 1, EVERY)
    }


def picture(curves: dict[str, list[dict]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, name in zip(axes, TAGS, strict=True):
        for (label, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            steps = sorted(runs[0])
            values = 100 * np.array([[run[step][name] for step in steps] for run in runs])
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
            axis.plot(steps, values.mean(0), color=color, marker="o", markersize=3, label=label)
        axis.set(title=f"{name} completions", xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out problems solved, %")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.suptitle(f"Mean and range of {len(SEEDS)} seeds", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", default="runs/quickstart", help="the quick start's run; default: %(default)s")
    parser.add_argument("--tokenizer", default="data/quickstart/tokenizer.json", help="default: %(default)s")
    parser.add_argument("--picture", required=True)
    args = parser.parse_args()
    call("tools/problems.py", "--out", DATA)
    if not (DATA / "chat").exists():
        call("tools/chat_to_tokens.py", DATA / "sft.jsonl", "--tokenizer", args.tokenizer, "--out", DATA / "chat",
             "--held-out", 0, "--sequence-length", 128)  # fmt: skip
    tune(start := RUNS / "start", Path(args.start), 120, 6, 34521)
    by_grpo = [grpo(RUNS / f"grpo_{seed}", start, STEPS, seed) for seed in SEEDS]
    curves = {"GRPO": by_grpo, "further SFT": [further_sft(start, seed, by_grpo[0][0]) for seed in SEEDS]}
    for label, runs in curves.items():
        for name in TAGS:
            for step in (0, STEPS):
                values = [100 * run[step][name] for run in runs]
                print(
                    f"{label:12} {name:8} step {step:3}: {np.mean(values):5.1f} %  ({', '.join(f'{v:.1f}' for v in values)})"
                )
    picture(curves, args.picture)


if __name__ == "__main__":
    main()
