"""Tasks of EleutherAI's lm-evaluation-harness on a checkpoint: the adapter that makes our model one of its LMs.

    python tools/lm_eval_adapter.py runs/quickstart --tasks arc_easy,mmlu@5 --include-path data/evals --limit 100

Log-likelihoods and continuations come from the checkpoint itself, on any mesh without a context axis. The harness has the
tasks, the prompts and the metrics. Answers are kept on disk under a hash of everything that decides them, so a run that
was killed goes on. The exit codes are train.py's.

Order of the file: score_rows and Scorer (log-likelihoods), harness_model (our model as an LM of the harness), tasks and
averages, the command.
"""

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

# At the end, also where PYTHONPATH names it in front: the harness's tasks import the Hugging Face package `evaluate`, not
# the file of this project.
sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.sort(key=lambda folder: Path(folder).resolve() == Path(__file__).resolve().parent.parent)

import data
import model
from checkpoint import Opened, checksums, open_model
from config import BATCH_AXES, make_execution, pin_settings, platform_of
from processes import RunFailed, add_json, check_batch, check_counts, inputs_are_checked, run_command, say, sole_writer
from sample import Draw, Sampler, add_model_flags, continuations, needed_tokenizer, padded_length
from vocabulary import tokenizer_content

CASE_STUDY = ("mmlu@5", "hellaswag", "arc_easy", "arc_challenge", "openbookqa", "piqa", "boolq", "winogrande")
SCORED = (1, 32)  # tokens of a continuation whose logits are computed; of longer ones, all of the row's


def score_rows(params, tokens_BS, at_BC, labels_BCA, config, execution):
    """(log-probability fp32 of each label [B, C, A], likeliest token [B, C]) after the tokens at positions `at_BC`.

    local: rows sharded over (data, fsdp). No more than `loss_chunk` positions have logits at once. A labels at a position
    are those of requests that share the row.
    """
    x_ND = model.hidden_states(params, tokens_BS, None, config, execution)
    x_BCD = jnp.take_along_axis(x_ND.reshape(*tokens_BS.shape, -1), at_BC[..., None], axis=1)
    head_VD = model.gather_head(params["lm_head"], config)
    n, A = at_BC.size, labels_BCA.shape[-1]

    def body(_, inputs):
        x_CD, labels_CA = inputs
        _, lse_C, logits_CV = model.chunk_loss(x_CD, head_VD, labels_CA[:, 0], config)
        local_CA, mine_CA = model.local_labels(labels_CA, logits_CV.shape[-1])
        target_CA = jnp.where(mine_CA, jnp.take_along_axis(logits_CV, local_CA, axis=-1), 0.0)
        target_CA = lax.psum(target_CA, "tensor")  # each label lies on one device; [C, A] stays [C, A]
        peak_C = lax.pmax(jnp.max(logits_CV, axis=-1), "tensor")  # [C] stays [C]
        first_C = jnp.argmax(logits_CV, axis=-1) + lax.axis_index("tensor") * logits_CV.shape[-1]
        first_C = jnp.where(jnp.max(logits_CV, axis=-1) == peak_C, first_C, config.padded_vocab_size)
        best_C = lax.pmin(first_C, "tensor")  # of equals the smallest id; [C] stays [C]
        return None, (target_CA - lse_C[:, None], best_C)

    chunks = model.split_chunks(min(execution.loss_chunk, n), x_BCD.reshape(n, -1), labels_BCA.reshape(n, A))
    _, (logprob, best) = lax.scan(body, None, chunks)
    return logprob.reshape(-1, A)[:n].reshape(labels_BCA.shape), best.reshape(-1)[:n].reshape(at_BC.shape)


class Row(NamedTuple):
    """One forward pass: requests that differ in nothing but the last token of their continuation share it."""

    tokens: tuple[int, ...]
    requests: list[tuple[int, list[int]]]  # number of the request, its continuation

    @property
    def scored(self) -> int:
        return max(len(continuation) for _, continuation in self.requests)


class Scorer:
    """Log-likelihoods of continuations.

    A row is filled up to one of a few lengths. That happens on the right, where causality keeps it from being seen.
    `batch` rows of one shape are computed at once; the last ones are filled up with empty rows."""

    def __init__(self, opened: Opened, max_length: int, batch: int):
        self.opened, self.max_length = opened, max_length
        self.batch = batch + -batch % opened.shards
        execution = make_execution(opened.config, 1, platform_of(opened.mesh))
        body = partial(score_rows, config=opened.config.model, execution=execution)
        rows = P(BATCH_AXES)
        self.step = opened.compiled(body, (rows, rows, rows), (rows, rows))

    def rows(self, pairs) -> list[Row]:
        """pairs: (context, continuation) as token ids. What does not fit is cut off on the left of the context."""
        by_tokens = defaultdict(list)
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        if cut:
            say(f"{cut} of {len(pairs)} contexts are cut off on the left to {self.max_length} tokens")
        for i, (context, continuation) in enumerate(pairs):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise data.DataError(f"request {i}: got {len(context)} tokens of context and {len(continuation)} to score, "
                                     f"expected at least one of each and at most {self.max_length} to score; fix: a larger --max-length")  # fmt: skip
            tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
            by_tokens[tuple(tokens)].append((i, continuation))
        return [Row(tokens, requests) for tokens, requests in by_tokens.items()]

    def shape(self, row: Row) -> tuple[int, int, int]:
        """(tokens, scored positions, labels at each) that the row is filled up to."""
        splash = self.opened.config.hardware.attention == "splash"
        S = padded_length(len(row.tokens), splash)
        C = next((positions for positions in SCORED if row.scored <= positions <= S), S)
        return S, C, 4 ** math.ceil(math.log(len(row.requests), 4))

    def __call__(self, pairs, on_answer=lambda i, answer: None) -> list[tuple[float, bool]]:
        """[(log-likelihood in nats, whether greedy decoding gives the continuation)]; `on_answer` hears of each at once."""
        by_shape = defaultdict(list)
        for row in self.rows(pairs):
            by_shape[self.shape(row)].append(row)
        inputs_are_checked()
        answers = [None] * len(pairs)
        bar = data.progress_bar(total=len(pairs), desc="log-likelihoods", unit="request", leave=False)
        for shape in sorted(by_shape, reverse=True):  # the longest first: the time left is not underestimated
            for start in range(0, len(by_shape[shape]), self.batch):
                for i, answer in self.answers(by_shape[shape][start : start + self.batch], shape):
                    answers[i] = answer
                    on_answer(i, answer)
                    bar.update()
        bar.close()
        return answers

    def answers(self, rows: list[Row], shape: tuple[int, int, int]) -> Iterator[tuple[int, tuple[float, bool]]]:
        S, C, A = shape
        tokens = np.zeros((self.batch, S), np.int32)
        at = np.zeros((self.batch, C), np.int32)
        labels = np.zeros((self.batch, C, A), np.int32)
        for b, row in enumerate(rows):
            n = len(row.tokens)
            tokens[b, :n] = row.tokens
            at[b] = np.maximum(np.arange(n - C, n), 0)
            labels[b, :-1] = tokens[b, at[b, 1:]][:, None]
            labels[b, -1, : len(row.requests)] = [continuation[-1] for _, continuation in row.requests]
        logprob, best = (np.asarray(x) for x in self.step(self.opened.params, tokens, at, labels))
        for b, row in enumerate(rows):
            for a, (i, continuation) in enumerate(row.requests):
                k = len(continuation)
                greedy = np.array_equal(best[b, -k:], labels[b, -k:, a])
                score = float(np.sum(logprob[b, -k:, a], dtype=np.float64))
                if math.isnan(score):  # argmax would choose the first answer of every question
                    raise RunFailed(f"{self.opened.folder}: request {i} has the log-likelihood nan: the model's logits "
                                          "are no numbers")  # fmt: skip
                yield i, (score, greedy)


def harness_model(opened: Opened, tokenizer, eos_ids: tuple[int, ...], max_length: int, batch: int):
    """The checkpoint as lm-eval's LM: token ids as its own Hugging Face backend makes them, no BOS, EOS as the prefix.

    Rolling windows are the harness's: disjoint, but the last has as much context as fits; a text that begins with the
    prefix itself has it twice, as in the harness's Hugging Face backend.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    score, sampler, eos = Scorer(opened, max_length, batch), Sampler(opened), eos_ids[0]

    class CheckpointLM(TemplateLM):
        eot_token_id = eos

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, add_special_tokens=False).ids

        def _encode_pair(self, context, continuation):
            context_enc, continuation_enc = super()._encode_pair(context, continuation)
            if not continuation_enc:  # a token spans the joint, so that the cut leaves nothing to score
                continuation_enc = self.tok_encode(continuation)
            return context_enc or [eos], continuation_enc

        def loglikelihood(self, requests, disable_tqdm=False):
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
            def keep(i, answer):
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)

            return score([r[1:] for r in requests], keep)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in data.progress_bar(requests, desc="rolling", unit="document", leave=False):
                windows = get_rolling_token_windows(self.tok_encode(request.args[0]), eos, max_length, 1)
                scores = score([make_disjoint_window(w) for w in windows])
                totals.append(sum(logprob for logprob, _ in scores))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            texts, groups = [None] * len(requests), defaultdict(list)
            for i, request in enumerate(requests):
                groups[json.dumps(request.args[1], sort_keys=True)].append((self.tok_encode(request.args[0]), i))
            bar = data.progress_bar(total=len(requests), desc="generating", unit="request", leave=False)
            for arguments, group in groups.items():
                how = normalize_gen_kwargs(json.loads(arguments), 256)
                stops = [stop for stop in handle_stop_sequences(how["until"], tokenizer.id_to_token(eos)) if stop]
                room = max_length - how["max_gen_toks"]
                if room < 1:
                    raise data.DataError(f"max_gen_toks: got {how['max_gen_toks']}, expected less than the model's length "
                                         f"{max_length}")  # fmt: skip
                draw = Draw(how["temperature"] if how["do_sample"] else 0.0, how.get("top_k", 0), how.get("top_p", 1.0))
                group.sort(key=lambda member: -len(member[0]))
                for start in range(0, len(group), score.batch):
                    prompts, numbers = zip(*group[start : start + score.batch], strict=True)
                    prompts = [p[-room:] or [eos] for p in prompts]
                    made = continuations(
                        sampler, tokenizer, eos_ids, prompts, how["max_gen_toks"], stops, draw, numbers
                    )
                    for i, continuation in zip(numbers, made, strict=True):
                        texts[i] = continuation.text
                        self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                        bar.update()
            bar.close()
            return texts

    return CheckpointLM()


def load_tasks(names: list[str], include_path: str | None):
    """(what the harness's evaluate takes, the names to report) of NAME or FILE.yaml, each with @SHOTS or without."""
    from lm_eval.tasks import TaskManager

    specs = [name.rpartition("@")[::2] if name.rpartition("@")[1] else (name, None) for name in names]
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if any(name not in manager.all_tasks and not Path(name).is_file() for name, _ in specs):
        manager = TaskManager(include_path=include_path)  # reads 14,000 files
    loaded, reported = {"tasks": {}, "groups": {}, "group_map": {}}, []
    for name, shots in specs:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            raise ValueError(f"--tasks: got {name}, expected a file, or a task, group or tag of the harness; "
                             f"fix: {' or '.join(near) or '--include-path'}")  # fmt: skip
        if shots is not None and not shots.isdigit():
            raise ValueError(f"--tasks: got {name}@{shots}, expected NAME@SHOTS with a number of examples")
        parts = manager.load([name])
        for task_name, task in parts["tasks"].items():
            if task_name in loaded["tasks"]:
                raise ValueError(f"--tasks: got {task_name} twice, expected every task once")
            if shots is not None or task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", int(shots or 0))
            task.set_fewshot_seed(1234)  # the harness's own default
        inner = {child for children in parts.get("group_map", {}).values() for child in children}
        reported += [n for n in (*parts.get("groups", {}), *parts["tasks"]) if n not in inner]
        for part in loaded:
            loaded[part].update(parts.get(part, {}))
    return loaded, reported


def task_summary(name: str, results: dict) -> dict:
    """The harness's numbers of a task or group; `metric` is the one that averages take: acc_norm if there is one."""
    metrics = {}
    for key, value in (results.get("groups", {}).get(name) or results["results"][name]).items():
        metric, _, filter_name = key.partition(",")
        if filter_name and isinstance(value, int | float):
            metrics[metric if filter_name == "none" else key] = value
    members, n, shots = [name], 0, set()
    while members:
        member = members.pop()
        members += results.get("group_subtasks", {}).get(member, [])
        if member in results["n-samples"]:
            n += results["n-samples"][member]["effective"]
            shots.add(results["n-shot"][member])
    chosen = next((m for m in ("acc_norm", "acc", *metrics) if m in metrics and "stderr" not in m), None)
    summary = {"n": n, "shots": shots.pop() if len(shots) == 1 else sorted(shots), "metric": chosen}
    return summary | {k: v if math.isfinite(v) else None for k, v in metrics.items()}


def stderr_of(summary: dict, metric: str) -> float | None:
    name, _, filter_name = metric.partition(",")
    return summary.get(f"{name}_stderr" + (f",{filter_name}" if filter_name else ""))


def quadrature(errors) -> float | None:
    """Standard error of a sum of independent numbers."""
    errors = list(errors)
    return None if None in errors else math.sqrt(sum(e * e for e in errors))


def macro_average(tasks: dict[str, dict]) -> dict | None:
    """Mean over tasks and groups of acc_norm, or of acc where that is not defined; other metrics have no part in it."""
    scored = [t for t in tasks.values() if t["metric"] in ("acc_norm", "acc")]
    if not scored:
        return None
    error = quadrature(stderr_of(t, t["metric"]) for t in scored)
    value = sum(t[t["metric"]] for t in scored) / len(scored)
    return {"value": value, "stderr": error and error / len(scored), "tasks": len(scored)}


def differences_of_scores(ours: dict, first: dict) -> dict:
    """Of one checkpoint's results and the first's: by task, and macro; standard errors in quadrature."""
    by_task = {}
    for name, t in ours["tasks"].items():
        metric = t["metric"]
        error = quadrature((stderr_of(t, metric), stderr_of(first["tasks"][name], metric)))
        by_task[name] = {"metric": metric, "delta": t[metric] - first["tasks"][name][metric], "stderr": error}
    macro = None
    if ours["macro"] is not None:
        error = quadrature((ours["macro"]["stderr"], first["macro"]["stderr"]))
        macro = {"delta": ours["macro"]["value"] - first["macro"]["value"], "stderr": error}
    return {"tasks": by_task, "macro": macro}


def run_harness(opened: Opened, args, loaded: dict, reported: list[str]) -> dict:
    """One checkpoint on all tasks. Answers are kept on disk under what decides them: a run that was killed goes on."""
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate

    path, tokenizer, eos_ids = needed_tokenizer(args.tokenizer, opened)[:3]
    length = opened.config.data.sequence_length if args.max_length is None else args.max_length
    check_batch("--batch", args.batch, length)
    lm = harness_model(opened, tokenizer, eos_ids, length, args.batch)
    sums = opened.meta.get("checksums", {}).get("params")
    sums = sums or checksums({name: x.astype(jnp.float32) for name, x in opened.params.items()})
    decides = (sums, dataclasses.asdict(opened.config.model), tokenizer.to_str(), eos_ids, length)
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    folder = data.local_path(args.cache) if args.cache else opened.folder.parent.parent / "lm_eval"
    cache = folder / f"{opened.folder.name}.{digest}.db"
    for seed in (random.seed, np.random.seed):  # the harness draws examples of prompts from both
        seed(1234)
    with sole_writer(cache):
        cached = CachingLM(lm, str(cache))
        results = evaluate(cached, loaded, limit=args.limit, log_samples=False)
        cached.dbdict.close()
    tasks = {name: task_summary(name, results) for name in reported}
    of = {"tokenizer": tokenizer_content(path), "tokenizer_path": str(path), "eos_ids": list(eos_ids)}
    return {"checkpoint": str(opened.folder), "step": opened.meta["step"], "of": of, "tasks": tasks,
            "macro": macro_average(tasks)}  # fmt: skip


def lm_eval(args) -> dict:
    """EleutherAI's lm-evaluation-harness on one checkpoint, or on several and their differences from the first."""
    check_counts(args, "--batch", "--limit", "--max-length")
    include_path = args.include_path and data.local_path(args.include_path)
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path: got {args.include_path}, expected a folder of task yamls")
    names = [t for name in args.tasks.split(",") for t in (CASE_STUDY if name == "case_study" else (name,))]
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process, whose threads do not survive that
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval: not installed; fix: pip install -r requirements-dev.txt")
    results = []
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints as it goes
        for checkpoint in args.checkpoints:
            # Anew for each: a task draws the examples of its prompts as it goes.
            loaded, reported = load_tasks(names, include_path and str(include_path))
            results.append(run_harness(open_model(checkpoint, args.hardware, args.set), args, loaded, reported))
    for r in results[1:]:
        r["difference"] = differences_of_scores(r, results[0])
    return {"results": results}


def scores(results: list[dict]) -> str:
    """Percent and standard error of each task, with the differences from the first checkpoint in brackets."""

    def number(value, error, sign=""):
        value, error = (None if x is None else 100 * x for x in (value, error))
        return f"{value:{sign}7.2f}" + (" +- ?   " if error is None else f" +- {error:.2f}")

    lines = []
    for name, t in results[0]["tasks"].items():
        columns = []
        for r in results:
            t = r["tasks"][name]
            if t["metric"] is None:
                continue
            columns.append(number(t[t["metric"]], stderr_of(t, t["metric"])))
            if "difference" in r:
                d = r["difference"]["tasks"][name]
                columns.append(f"({number(d['delta'], d['stderr'], '+').strip()})")
        lines.append(f"{name:16} {t['n']:6} x {t['metric'] or '':9} {'  '.join(columns)}")
    if results[0]["macro"]:
        columns = [number(r["macro"]["value"], r["macro"]["stderr"]) for r in results]
        lines.append(f"{'macro average':16} {'':18} {'  '.join(columns)}")
    return "\n".join(lines)


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoints", metavar="CKPT", nargs="+",
                   help="a run directory or RUN/checkpoints/N; of more than one also the differences")  # fmt: skip
    p.add_argument("--tasks", default="case_study", metavar="NAMES",
                   help="the harness's tasks, groups or tags, or yaml files, by commas; NAME@5: five examples; default: "
                   f"case_study, which is {','.join(CASE_STUDY)}")  # fmt: skip
    p.add_argument("--include-path", metavar="DIR", help="folder of task yamls, which come before the harness's own")
    p.add_argument("--limit", type=int, metavar="N", help="the first N documents of every task")
    p.add_argument("--batch", type=int, default=16, metavar="N", help="rows at once over all devices; default: 16")
    p.add_argument("--max-length", type=int, metavar="S", help="tokens of context; default: as trained")
    p.add_argument("--cache", metavar="DIR", help="where answers are kept; default: RUN/lm_eval")
    add_model_flags(p)
    add_json(p)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)

    def command() -> dict:
        pin_settings()
        return lm_eval(args)

    return run_command("lm_eval_adapter.py", command, args.json, lambda result: scores(result["results"]))


if __name__ == "__main__":
    sys.exit(main())
