"""The loops beside training, as whole commands beside their peers': tasks, samples, perplexity, tokens, starts.

    python bench/bench_loops.py runs/quickstart [--part lm_eval sample ...] [--rounds 3]      after the quick start

lm_eval     200 log-likelihoods (50 questions of four answers) through the harness: our adapter, its Hugging Face backend.
sample      8 texts of 200 tokens: sample.py, transformers' generate.
perplexity  the held-out text in instances: evaluate.py perplexity, transformers in batches of 8.
tokens      30 MB of text: text_to_tokens.py, a loop that encodes text by text; and 50 MB of JSON in one line, ours alone.
start       `--help` of every program.

Both sides are processes of their own that end with their answer on the screen: imports and compilation count. They take
turns, round by round, so that a busy machine slows both. Needs requirements-dev.txt and a run of the quick start, of which
an export is made. Prints a table, whose ratios are the peer's seconds to ours, and, last, one line of JSON.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PROGRAMS = ("train.py", "data.py", "sample.py", "evaluate.py", "convert.py", "compare.py", "launch.py", "grpo.py",
            "tools/plan.py", "tools/lm_eval_adapter.py", "tools/text_to_tokens.py")  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "true"}

GENERATE = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
known = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([known("def main(").input_ids] * 8)
out = model.generate(ids, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=200, min_new_tokens=200)
print(known.batch_decode(out))
"""
PERPLEXITY = """
import sys, numpy as np, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
files = [np.fromfile(name, np.uint32).astype(np.int64) for name in sys.argv[2:]]
rows, total = torch.from_numpy(np.concatenate([x[: len(x) // 512 * 512].reshape(-1, 512) for x in files])), 0.0
with torch.no_grad():
    for part in rows.split(8):
        logits = model(part).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
print(total / (rows.shape[0] * 511))
"""
ENCODE = """
import json, sys, numpy as np, tokenizers
known, out = tokenizers.Tokenizer.from_file(sys.argv[1]), []
for line in open(sys.argv[2]):
    out += [*known.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]
np.array(out, np.uint32).tofile(sys.argv[3])
"""


def seconds(command: list, **variables) -> float:
    began = time.perf_counter()
    done = subprocess.run([str(word) for word in command], env=os.environ | OFFLINE | variables,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))[:200]}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return time.perf_counter() - began


def in_turns(ours: list, theirs: list | None, rounds: int, **variables) -> tuple[list[float], list[float]]:
    pairs = [(seconds(ours, **variables), theirs and seconds(theirs, **variables)) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs if b]


def task(folder: Path) -> str:
    """A task of the harness over this project's own prose."""
    words, rng = (REPO / "README.md").read_text().split(), random.Random(0)

    def piece(longest: int) -> str:
        start = rng.randrange(len(words) - longest)
        return " ".join(word for word in words[start : start + rng.randint(1, longest)] if word.isalpha()) or "none"

    rows = [
        {"question": piece(25), "choices": [piece(8) for _ in range(4)], "answer": rng.randrange(4)} for _ in range(50)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choices.yaml").write_text(json.dumps({
        "task": "choices", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer", "doc_to_choice": "choices",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }))  # fmt: skip
    return "choices"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="of the quick start")
    parts = ("lm_eval", "sample", "perplexity", "tokens", "start")
    parser.add_argument("--part", nargs="+", default=parts, choices=parts)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    python, run, table = sys.executable, args.run.resolve(), []

    def report(part: str, ours: list[float], theirs: list[float]) -> None:
        row = {"part": part, "ours_s": statistics.median(ours)}
        peer = "| |"
        if theirs:
            ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
            row |= {"theirs_s": statistics.median(theirs), "ratio": statistics.median(ratios)}
            peer = f"{row['theirs_s']:.1f} s | {row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        print(f"| {part} | {row['ours_s']:.1f} s | {peer}", flush=True)
        table.append(row)

    with tempfile.TemporaryDirectory() as name:
        folder, export = Path(name), Path(name) / "export"
        seconds([python, REPO / "convert.py", "to-hf", run, export])
        print("| part | ours | the peer's | peer / ours, by round |\n|---|--:|--:|--:|", flush=True)
        if "lm_eval" in args.part:
            (folder / "tasks").mkdir()
            wanted = ["--tasks", task(folder / "tasks")]
            theirs = [python, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={export},dtype=float32",
                      "--include_path", folder / "tasks", "--batch_size", 16, "--device", "cpu", *wanted]  # fmt: skip
            pairs = []
            for i in range(args.rounds):  # a cache of answers for each round
                ours = [python, REPO / "tools/lm_eval_adapter.py", run, "--include-path", folder / "tasks", "--cache",
                        folder / f"cache_{i}", *wanted]  # fmt: skip
                pairs.append((seconds(ours), seconds(theirs, HF_DATASETS_CACHE=str(folder / "datasets"))))
            report("lm_eval", *zip(*pairs, strict=True))
        if "sample" in args.part:
            ours = [python, REPO / "sample.py", run, "--prompt", "def main(", "--num", 8, "--temperature", 0.7]
            report("sample", *in_turns(ours, [python, "-c", GENERATE, export], args.rounds))
        if "perplexity" in args.part:
            ours = [python, REPO / "evaluate.py", "perplexity", run, "--no-record"]
            shards = sorted(Path("data/quickstart/heldout").rglob("*.npy"))
            report("perplexity", *in_turns(ours, [python, "-c", PERPLEXITY, export, *shards], args.rounds))
        if "tokens" in args.part:
            text = "\n".join(
                p.read_text(errors="replace") for p in sorted(Path(json.__file__).parent.parent.glob("*.py"))
            )
            texts = [text[i : i + 5000] for i in range(0, len(text), 5000)]
            lines = [json.dumps({"text": t}) + "\n" for t in texts]
            (folder / "docs.jsonl").write_text("".join(lines * (30_000_000 // sum(map(len, lines)) + 1)))
            (folder / "long.jsonl").write_text(json.dumps({"text": "a line that does not end " * 2_000_000}))
            known = export / "tokenizer.json"

            def tokens(name: str) -> list:
                return [python, REPO / "tools/text_to_tokens.py", folder / name, "--tokenizer", known, "--out", folder / "tokens",
                        "--overwrite"]  # fmt: skip

            theirs = [python, "-c", ENCODE, known, folder / "docs.jsonl", folder / "theirs.npy"]
            report("tokens", *in_turns(tokens("docs.jsonl"), theirs, args.rounds))
            report("tokens, one line", *in_turns(tokens("long.jsonl"), None, 1))
        if "start" in args.part:
            for program in PROGRAMS:
                report(f"start {program}", *in_turns([python, REPO / program, "--help"], None, args.rounds))
    print(json.dumps(table))


if __name__ == "__main__":
    main()
