"""A checkpoint on one page: REPORT/report.md with its pictures, and the numbers in report.json.

    python tools/report.py runs/quickstart --steps all

The surfaces are held-out loss by label, KL against a reference, tasks, samples, and the curves of the run. Each comes from
the program that computes it, in a process of its own. What is done is on disk if a later one fails. The exit codes are
train.py's.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from checkpoint import checked_meta, find_checkpoint, run_of
from data import local_path
from metrics import draw_curves
from processes import HERE, RunFailed, add_json, check_counts, replace_file, run_command, sole_writer, table
from vocabulary import find_tokenizer

MACHINE = ("hardware", "set")
TEXTS = ("data-root", "batch", "on-training-data", *MACHINE)


def report(args) -> dict:
    """Writes the page. What is wrong about the command line is found before anything is on disk."""
    check_counts(args, "--limit", "--task-limit")
    folder = find_checkpoint(args.checkpoint)
    run_dir = run_of(folder) or folder
    out = local_path(args.out) if args.out else run_dir / "report"
    if args.include_path and not local_path(args.include_path).is_dir():
        raise ValueError(f"--include-path: got {args.include_path}, expected a folder of task yamls")
    if args.reference:
        find_checkpoint(args.reference)
    content = {"checkpoint": str(folder), "step": checked_meta(folder)["step"]}
    with sole_writer(out):
        texts = {}
        for title in ORDER:
            content[title], texts[title] = SURFACES[title](args, out)
            page = f"# {run_dir.name}, step {content['step']}\n"
            page += "".join(f"\n## {title}\n\n{texts[title]}\n" for title in SURFACES if title in texts)
            out.mkdir(parents=True, exist_ok=True)
            replace_file(out / "report.md", page)
            replace_file(out / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    return {"report": str(out / "report.md"), "numbers": str(out / "report.json")}


def run(*command: str) -> dict:
    """The JSON that a command of this project prints. Its standard error is ours."""
    command = (*command, "--json")
    done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
        raise ValueError(f"{command[0]} refuses its command line; see the line before")
    if done.returncode:
        raise RunFailed(f"{command[0]} ended with exit code {done.returncode}; see the lines before")
    return json.loads(done.stdout)


def flags(args: argparse.Namespace, *names: str) -> list[str]:
    """The flags of these names that were given, as words of a command line."""
    words = []
    for name in names:
        value = getattr(args, name.replace("-", "_"))
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(f"--{name}")
            elif item not in (None, False):
                words.append(f"--{name}={item}")
    return words


def origin(of: dict) -> str:
    known = f", {of['trained_on_files']} of them TRAINED ON" if "trained_on_files" in of else ""
    return f"{of['index']} ({of['files']} files{known}; {of['fingerprint'][:19]}; tokenizer {of['tokenizer'][:40]})"


# --- the surfaces: (numbers, text) each


def report_training(args, out: Path) -> tuple[dict, str]:
    run_dir = run_of(find_checkpoint(args.checkpoint))
    if run_dir is None or not (run_dir / "metrics.jsonl").is_file():
        return {}, "The checkpoint lies in no run directory with a metrics.jsonl."
    draw_curves(run_dir, out / "curves.png")
    return {"picture": "curves.png"}, "![training and held-out loss](curves.png)"


def report_perplexity(args, out: Path) -> tuple[dict, str]:
    """Held-out loss by label: a table of the newest step, and a picture."""
    names = ("index", "steps", "cut", "window", "stride", "tokenizer", "name", "no-record", *TEXTS)
    result = run("evaluate.py", "perplexity", args.checkpoint, *flags(args, *names))
    out.mkdir(parents=True, exist_ok=True)
    draw_evaluations(result["evaluations"], out / "heldout.png")
    newest = result["evaluations"][-1]
    columns = ("tokens", "ce", "perplexity", "bits_per_byte")
    rows = [[label, *(r[key] for key in columns)] for label, r in newest["heldout"].items()]
    head = ["label", "tokens", "cross-entropy", "perplexity", "bits per byte"]
    text = f"Step {newest['step']}, text by {result['settings']['cut']}, of {', '.join(map(origin, result['of']))}."
    return result, f"{text}\n\n{table(head, rows)}\n\n![held-out loss](heldout.png)"


def draw_evaluations(evaluations: list[dict], path: Path) -> None:
    """By label: a curve over the steps, or bars where there is one step."""
    import matplotlib  # takes a second, and not every page needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    newest = evaluations[-1]["heldout"]
    fig, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if len(evaluations) > 1:
        for label in newest:
            ce = [e["heldout"][label]["ce"] for e in evaluations]
            style = {"color": "black", "lw": 2} if label == "all" else {"lw": 1.2}
            axes.plot([e["step"] for e in evaluations], [math.nan if x is None else x for x in ce], marker="o", ms=3,
                      label=label, **style)  # fmt: skip
        axes.set(xlabel="step", ylabel="held-out cross-entropy (nats a token)")
        axes.legend()
    else:
        ce = [math.nan if r["ce"] is None else r["ce"] for r in newest.values()]
        bars = axes.barh(list(newest), ce, color=["tab:gray" if label == "all" else "tab:blue" for label in newest])
        axes.bar_label(bars, fmt="%.3f", padding=3)
        axes.set(xlabel=f"held-out cross-entropy (nats a token), step {evaluations[-1]['step']}")
        axes.margins(x=0.1)
        axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="both" if len(evaluations) > 1 else "x")
    fig.savefig(path, dpi=110)
    plt.close(fig)


def report_kl(args, out: Path) -> tuple[dict, str]:
    """KL against --reference, and its noise floor."""
    if args.reference is None:
        return {}, "No checkpoint to compare with was given (--reference)."
    index = [f"--index={args.index[0]}"] if args.index else []
    result = run("evaluate.py", "kl", args.checkpoint, args.reference, *index,
                 *flags(args, "limit", "noise-floor", *TEXTS))  # fmt: skip
    keys = ("kl", "kl_reversed", "top1_agreement")
    parts = [("", result["heldout"])]
    if "noise_floor" in result:
        parts.append(("floor: ", {"all": result["noise_floor"]["heldout"]["all"]}))
    rows = [[before + label, r["tokens"], *(r[key] for key in keys)]
            for before, part in parts for label, r in part.items()]  # fmt: skip
    text = f"A is this checkpoint, B: {args.reference}, on {origin(result['of'])}. Nats a token.\n\n"
    text += table(["label", "tokens", "KL(A,B)", "KL(B,A)", "same best token"], rows)
    if "noise_floor" in result:
        text += f"\n\nThe floor is {result['noise_floor']['what']}."
    return result, text


def report_tasks(args, out: Path) -> tuple[dict, str]:
    """Tasks of the harness: --tasks, or the case study's where --include-path has their data."""
    if args.tasks is None and args.include_path is None:
        return {}, "No tasks were asked for (--tasks, --include-path)."
    limit = [] if args.task_limit is None else [f"--limit={args.task_limit}"]
    names = flags(args, "tasks", "include-path", "tokenizer", *MACHINE)
    result = run("tools/lm_eval_adapter.py", args.checkpoint, *names, *limit)["results"][0]
    rows = []
    for name, task in result["tasks"].items():
        if (key := task["metric"]) is not None:
            metric, comma, filter_name = key.partition(",")
            rows.append([name, task["n"], key, task[key], task.get(f"{metric}_stderr{comma}{filter_name}")])
    if macro := result["macro"]:
        rows.append(["macro average", None, None, macro["value"], macro["stderr"]])
    first = "" if args.task_limit is None else f"The first {args.task_limit} documents of each task.\n\n"
    return result, first + table(["task", "documents", "metric", "value", "standard error"], rows)


def report_samples(args, out: Path) -> tuple[dict, str]:
    """Three samples; none of a run on tokens alone, which no tokenizer.json belongs to."""
    folder = find_checkpoint(args.checkpoint)
    known = find_tokenizer(args.tokenizer, folder, checked_meta(folder))
    if known.tokenizer is None or not known.eos_ids:
        return {}, f"None: no tokenizer that knows the end of a text belongs to the checkpoint. {known.why}".rstrip()
    how = ["--num=3", "--tokens=120", "--temperature=0.8", "--top-p=0.95", "--seed=0"]
    result = run("sample.py", args.checkpoint, *how, *flags(args, "prompt", "tokenizer", *MACHINE))
    # Indented text is code in Markdown, whatever the model wrote.
    texts = ["\n".join(f"    {line}" for line in (args.prompt + s["text"]).splitlines()) for s in result["samples"]]
    return result, f"Temperature 0.8, top-p 0.95, seed 0, prompt {args.prompt!r}.\n\n" + "\n\n---\n\n".join(texts)


SURFACES = {  # as on the page
    "Training": report_training,
    "Held-out text": report_perplexity,
    "Token-level KL": report_kl,
    "Tasks": report_tasks,
    "Samples": report_samples,
}
# Held-out text comes first: its program checks most of the flags, and nothing is on disk by then.
ORDER = sorted(SURFACES, key=lambda title: title != "Held-out text")


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", metavar="CKPT", help="a run directory (its newest step) or RUN/checkpoints/N")
    p.add_argument("--out", metavar="DIR", help="default: RUN/report")
    p.add_argument("--reference", metavar="B", help="checkpoint to compare with, token by token")
    p.add_argument("--tasks", metavar="NAMES", help="of lm-eval; default: case_study with --include-path, else none")
    p.add_argument("--include-path", metavar="DIR", help="folder of task yamls")
    p.add_argument("--task-limit", type=int, metavar="N", help="the first N documents of every task")
    p.add_argument("--prompt", default="", help="of the samples; default: none, the beginning of a text")
    p.add_argument("--limit", type=int, metavar="N", help="instances of the KL, spread evenly")
    p.add_argument("--noise-floor", choices=("precision", "none"), help="of the KL; default: precision")
    group = p.add_argument_group("passed on, see python evaluate.py perplexity --help")
    for name in ("index", "set"):
        group.add_argument(f"--{name}", action="append", default=[])
    group.add_argument("--cut", choices=("instances", "documents", "stream"))
    for name in ("steps", "window", "stride", "tokenizer", "name", "data-root", "batch", "hardware"):
        group.add_argument(f"--{name}")
    for name in ("no-record", "on-training-data"):
        group.add_argument(f"--{name}", action="store_true")
    add_json(p)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return run_command("report.py", lambda: report(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
