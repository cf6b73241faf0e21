"""The experiments on the quick start, at equal tokens and at equal FLOPs, over several seeds.

    python tools/quickstart.py && python bench/experiments.py --steps 700 --seeds 3

Each run is `train.py` with a seed for parameters and order of the data. All variants of one seed read the same batches, so
differences are taken seed by seed. Warm-up and the learning-rate curve keep their share of the
run. At equal FLOPs a variant takes so many steps that its FLOPs are the baseline's (metrics.flops_per_token,
window-correct). Finished runs are kept in --out and not run again. Prints a Markdown table: held-out cross-entropy of the
next token, mean (lowest to highest seed).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).resolve().parent.parent))

from config import load_config
from metrics import flops_per_token, read_metrics

REPO = Path(__file__).resolve().parent.parent
VARIANTS = {  # recipe, overrides
    "baseline": ("configs/quickstart.yaml", []),
    "heads 2 x 64": ("configs/quickstart.yaml", ["model.n_heads=2", "model.n_kv_heads=2", "model.head_dim=64"]),
    "multi-token prediction": ("experiments/mtp.yaml", []),
    "LatentMoE": ("experiments/latent_moe.yaml", []),
}
OWN = ("train/mtp_ce", "train/balance", "train/dropped")


class Result(NamedTuple):
    held_out: float
    own: dict[str, float]  # means of the last tenth of the steps


def train(variant: str, steps: int, seed: int, out: Path) -> Result:
    recipe, overrides = VARIANTS[variant]
    run_dir = out / f"{variant.replace(' ', '_')}-{steps}-{seed}"
    settings = [*overrides, f"run.steps={steps}", f"schedule.0.total_steps={steps}", f"run.seed={seed}",
                f"data.seed={34521 + seed}", f"run.eval_every={steps}", f"run.checkpoint_every={steps}",
                "run.sample_prompt=null", "run.keep_checkpoints=1", f"schedule.0.warmup_steps={round(steps * 40 / 700)}"]  # fmt: skip
    command = [sys.executable, "train.py", "--config", recipe, "--hardware", "cpu", "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(command + [word for s in settings for word in ("--set", s)], cwd=REPO, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{run_dir}: train.py ended with {done.returncode}")
    summary = json.loads((run_dir / "summary.json").read_text())
    last = [row for _, row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 0.9 * steps]
    own = {tag: [row[tag] for row in last if tag in row] for tag in OWN}
    return Result(summary["heldout_ce"], {tag: statistics.mean(x) for tag, x in own.items() if x})


def spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.4f} ({min(values):{sign}.4f} to {max(values):{sign}.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="of the baseline")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "experiments")
    args = parser.parse_args()
    configs = {name: load_config(recipe, "cpu", overrides) for name, (recipe, overrides) in VARIANTS.items()}
    flops = {name: flops_per_token(config, "window-correct") for name, config in configs.items()}
    steps = {name: round(args.steps * flops["baseline"] / n) for name, n in flops.items()}
    # Seed by seed, so that what is there after an interruption is a table of fewer seeds.
    results = {}
    for seed in range(args.seeds):
        for name in VARIANTS:
            for count in dict.fromkeys((args.steps, steps[name])):
                results[name, count, seed] = train(name, count, seed, args.out.resolve())

    def cells(name: str, count: int) -> list[str]:
        of_seeds = [results[name, count, seed].held_out for seed in range(args.seeds)]
        base = [results["baseline", args.steps, seed].held_out for seed in range(args.seeds)]
        less = [a - b for a, b in zip(of_seeds, base, strict=True)]
        return [spread(of_seeds), "" if name == "baseline" else spread(less, "+")]

    heads = ("variant", "parameters", "FLOPs a token", f"{args.steps} steps", "to the baseline", "steps of equal FLOPs",
             "held-out CE", "to the baseline", "its own numbers")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, config in configs.items():
        own = [results[name, args.steps, seed].own for seed in range(args.seeds)]
        own = ", ".join(f"{tag} {statistics.mean(o[tag] for o in own):.4f}" for tag in own[0])
        row = [name, f"{sum(config.parameter_sizes.values()):,}", f"{flops[name] / 1e6:.2f} M", *cells(name, args.steps),
               str(steps[name]), *cells(name, steps[name]), own]  # fmt: skip
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
