"""Evaluate checkpoints on text that was held out. Training loss proves nothing; this does.

    python evaluate.py loss runs/quickstart                              the number that training printed
    python evaluate.py perplexity runs/quickstart --index data/domains/index.json --steps all
    python evaluate.py kl runs/quickstart runs/other                     are two models the same model?

The model is the one that the checkpoint's own meta describes. The forward pass and the sums are heldout.py's.
Every token counts once, whatever the batch size and the number of devices. Cross-entropy stands alone, without z-loss.
Elsewhere: text from a checkpoint (sample.py), tasks (tools/lm_eval_adapter.py), all on one page (tools/report.py).

A text x1..xn is scored in one of three ways (--cut):
    instances   as in training: full instances of S tokens, S - 1 of them scored; the tails of files are dropped
    documents   every token of a document, the EOS behind it not, given x0 = EOS and what of the document is before it
    stream      every token of a token file, its EOS too, given x0 = EOS and what is before it
The last two look through windows of W tokens (--window), which end at W, W + T, W + 2T, ... and n (--stride T): the
window that ends at e is given x[e-W] .. x[e-1] and scores what no earlier one has. T = W is the rolling window of
lm-evaluation-harness (get_rolling_token_windows, context_len 1), T < W the strided perplexity of transformers' guide.

    cross-entropy = nats / tokens     perplexity = exp(cross-entropy)     bits per byte = nats / (ln 2 * bytes)

All three are over scored tokens; bytes are those of the text that these stand for. Byte-level BPE makes that exact:
each letter of a token is one byte of text. Special tokens (EOS, padding) are no text, 0 bytes. So bits per byte by
documents are those of the text itself, and comparable between tokenizers.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import data
import model
from checkpoint import checked_meta, differences, find_checkpoint, find_steps, restore_item, run_of
from config import Config, assemble_config, cache_compilations, make_mesh, param_shapes, pin_settings, science_dict
from heldout import HeldOut, mean_loss
from metrics import Board, evaluation_metrics
from processes import (
    add_json,
    add_verb,
    check_batch,
    check_counts,
    outline,
    refuse_moved_verb,
    replace_file,
    run_command,
    say,
    sole_writer,
)
from vocabulary import (
    FoundTokenizer,
    bytes_fault,
    bytes_of_tokens,
    comparable,
    find_tokenizer,
    index_tokenizer,
    tokenizer_content,
    training_data,
    vocabulary_of,
)

# --- what the verbs share


def resolve(args, step_folder: Path) -> tuple[dict, Config, int]:
    """(meta, config, rows at once) of a checkpoint as the command line wants it evaluated."""
    check_counts(args, "--batch")
    meta = checked_meta(step_folder)
    config = assemble_config(meta["config"], str(step_folder), args.hardware, args.set)
    batch = config.data.global_batch if args.batch is None else args.batch
    check_batch("--batch", batch, config.data.sequence_length)
    cache_compilations(config)
    return meta, config, batch


def held_out_indexes(args, config: Config, step_folder: Path) -> tuple[list[str], int | None]:
    """(paths, limit): each --index whole, or the run's own held-out set as the run saw it."""
    given = args.index or []
    given = [given] if isinstance(given, str) else given
    if not given and config.run.eval_index is None:
        raise ValueError(f"--index: missing, and the run of {step_folder} has no run.eval_index")
    paths = [str(data.find_index(path, args.data_root)) for path in given or [config.run.eval_index]]
    return paths, None if given else config.eval_limit


def finite(tree):
    """`tree` for JSON, which has neither inf nor NaN: null instead."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# --- loss


def heldout_loss(args) -> dict:
    """Held-out CE (nats a token) and perplexity of one checkpoint, by label and over all."""
    step_folder = find_checkpoint(args.checkpoint)
    meta, config, batch = resolve(args, step_folder)
    mesh = make_mesh(config, batch)
    (index,), limit = held_out_indexes(args, config, step_folder)
    trained = [training_data(step_folder, meta)]
    held_out = HeldOut(config, mesh, index, args.data_root, batch, limit, trained, args.on_training_data)
    params = restore_item(step_folder, "params", param_shapes(config, mesh))
    results = finite(held_out(params, progress=True))
    return {"checkpoint": str(step_folder), "step": meta["step"], "index": index, "of": held_out.of[0],
            "heldout": results, "verdict": told(results["all"])}  # fmt: skip


def told(loss: dict) -> str:
    """The number that everything else is about, as one sentence."""
    ce = "not finite" if loss["ce"] is None else f"{loss['ce']:.4f} nats a token"
    return f"held-out cross-entropy {ce}, over {loss['tokens']:,} tokens"


# --- perplexity


def perplexity(args) -> dict:
    """Cross-entropy, perplexity and bits per byte of the checkpoints of a run, by label."""
    # Check: one model for all steps, a text to score, a record of the same settings.
    folders = find_steps(args.checkpoint, args.steps)
    newest = folders[-1]
    meta, config, batch = resolve(args, newest)
    if args.name is not None and Path(args.name).name != args.name:
        raise ValueError(f"--name: got {args.name!r}, expected the name of a file, without folders")
    for folder in folders[:-1]:
        if resolve(args, folder)[1].model != config.model:
            raise ValueError(f"{folder}: got another model than in {newest}, expected one; fix: evaluate it by itself")
    evaluate = Perplexity(args, meta, config, batch, newest)
    run_dir, record = run_of(newest), None
    if run_dir is not None and not args.no_record:
        record = Record(run_dir, args.name or evaluate.name, evaluate.settings, evaluate.of)

    # Evaluate: a step that the record holds is not computed again, and each new one is on disk at once.
    evaluations = []
    with record.alone() if record else contextlib.nullcontext():
        for folder in folders:
            meta = checked_meta(folder)
            evaluation = record and record.known(meta)
            if evaluation:
                say(f"step {meta['step']}: evaluated before, see {record.path}")
            else:
                params = restore_item(folder, "params", param_shapes(config, evaluate.mesh))
                evaluation = {"step": meta["step"], "checksum": checksum(meta), "heldout": evaluate(params)}
                del params  # before those of the next step are read
                shown = {label: math.nan if r["ce"] is None else r["ce"] for label, r in evaluation["heldout"].items()}
                say(f"step {meta['step']}: held-out CE {', '.join(f'{label} {ce:.4f}' for label, ce in shown.items())}")
                if record:
                    record.add(evaluation)
            evaluations.append(evaluation)
    return {"checkpoint": str(newest), "record": record and str(record.path), "of": evaluate.of,
            "settings": evaluate.settings, "evaluations": evaluations,
            "verdict": told(evaluations[-1]["heldout"]["all"])}  # fmt: skip


def by_step(result: dict) -> str:
    """A result of `perplexity` for people: a row for each step and label."""
    rows = [{"step": str(evaluation["step"]), "label": label} | loss
            for evaluation in result["evaluations"] for label, loss in evaluation["heldout"].items()]  # fmt: skip
    return outline(result | {"evaluations": rows})


class Perplexity:
    """CE, perplexity and bits per byte of one model config on some indexes, for any parameters of that config."""

    def __init__(self, args, meta: dict, config: Config, batch: int, step_folder: Path):
        paths, limit = held_out_indexes(args, config, step_folder)
        indexes = [data.load_index(path) for path in paths]
        for path, index in zip(paths, indexes, strict=True):
            if (index.vocab_size, index.eos_id) != (indexes[0].vocab_size, indexes[0].eos_id):
                raise ValueError(f"--index {path}: got vocabulary and EOS {index.vocab_size}, {index.eos_id}, expected "
                                 f"{indexes[0].vocab_size}, {indexes[0].eos_id} as in {paths[0]}")  # fmt: skip
        if len({index.fingerprint for index in indexes}) < len(indexes):
            raise ValueError(f"--index: got {', '.join(paths)}, expected every index once; they hold the same data")
        window, stride = window_and_stride(args, config, indexes)
        check_batch("--window", batch, window)
        whole_texts = args.cut != "instances"
        if whole_texts and (
            masked := [p for p, i in zip(paths, indexes, strict=True) if any(f.mask_hash for f in i.files)]
        ):
            raise ValueError(
                f"--cut {args.cut}: {masked[0]} has label masks, which hold for instances; fix: --cut instances"
            )
        if whole_texts:  # how the index divides files into instances plays no part
            length, limit = indexes[0].sequence_length, None
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))

        # Every index is compared with the training data before the first is computed.
        self.mesh = make_mesh(config, batch)
        trained = [training_data(step_folder, meta)]
        self.held_out = HeldOut(
            config, self.mesh, paths[0], args.data_root, batch, limit, trained, args.on_training_data
        )
        self.batches = [self.held_out.batches]
        self.batches += [self.held_out.open(path, args.data_root, limit) for path in paths[1:]]
        self.of = self.held_out.of
        if whole_texts:
            self.of = [{key: value for key, value in of.items() if key != "instances"} for of in self.of]
            model.check_mesh(config.model, dict(self.mesh.shape), window)
            unit = self.mesh.shape["context"] * (128 if config.hardware.attention == "splash" else 16)
            self.batches = [Windows(batches.source, args.cut, window, stride, unit) for batches in self.batches]
        sizes = [token_bytes(path, index, args.tokenizer) for path, index in zip(paths, indexes, strict=True)]
        self.bytes = [row_bytes(*pair) for pair in zip(self.batches, sizes, strict=True)]

        # What decides about the numbers: the record of another setting is not continued.
        overrides = differences(meta["config"]["model"], science_dict(config)["model"])
        windows = {"window": window, "stride": stride} if whole_texts else {}
        self.name = "-".join([Path(path).stem for path in paths] + [args.cut, *map(str, windows.values())])
        self.settings = {
            "indexes": [index.fingerprint for index in indexes], "instances": limit, "cut": args.cut, **windows,
            "mask_token": config.data.mask_token, "document_mask": config.data.document_mask,
            "model_overrides": {key: now for key, _, now in overrides},
        }  # fmt: skip

    def __call__(self, params) -> dict[str, dict]:
        """{label or "all": {"ce", "perplexity", "tokens", "rows", "bits_per_byte", "bytes"}}; a label of several indexes
        is one label."""
        sums: dict[str, np.ndarray] = {}  # rows, nats, tokens, bytes
        for batches, size_of_rows in zip(self.batches, self.bytes, strict=True):
            self.held_out.batches = batches
            columns = self.held_out.by_row(params, True)
            for label, of_label in self.held_out.by_label(*columns, size_of_rows).items():
                sums[label] = sums.get(label, 0) + np.array(of_label, np.float64)
        sums["all"] = sums.pop("all")  # the last row of every table
        results = {}
        for label, (rows, nats, tokens, size) in sums.items():
            if rows > 0:
                bits = nats / (math.log(2) * size) if size > 0 else math.nan
                of_text = {"rows": int(rows), "bits_per_byte": bits, "bytes": None if np.isnan(size) else int(size)}
                results[label] = mean_loss(nats, tokens) | of_text
        return finite(results)


def window_and_stride(args, config: Config, indexes: list[data.Index]) -> tuple[int, int]:
    if args.cut == "instances" and (args.window, args.stride) != (None, None):
        raise ValueError("--window, --stride: got --cut instances, expected --cut documents or --cut stream")
    check_counts(args, "--window", "--stride")
    window = config.data.sequence_length if args.window is None else args.window
    stride = window if args.stride is None else args.stride
    longest = max(file.bytes // index.itemsize for index in indexes for file in index.files)
    # The mesh and Splash ask for round numbers, so the longest text is rounded up.
    most = max(config.data.sequence_length, 2 ** (longest - 1).bit_length())
    if window > most:
        raise ValueError(f"--window: got {window}, expected at most {most}: no text there is longer")
    if stride > window:
        raise ValueError(f"--stride: got {stride}, expected 1 to the window, {window}: no token may be left out")
    return window, stride


class Window(NamedTuple):
    """One row: the tokens x[begin] .. x[end-1] of a text are given, and x[scored_from+1] .. x[end] are scored."""

    file: int  # number of the token file in the index; -1: no text, the row fills up a batch
    text: int  # place of x1 in that file
    begin: int
    scored_from: int
    end: int


NO_WINDOW = Window(-1, 0, 0, 0, 0)
READ_TOKENS = 2**22  # of a token file, at once


class Windows:
    """Windows over whole texts, in the place of heldout.EvaluationBatches. The top of this file defines them.

    Short windows are computed in rows of half, a quarter or an eighth of the length. The choice depends on the window
    alone, so what a batch holds beside it changes nothing. The token files are held in memory.
    """

    def __init__(self, source: data.BatchSource, cut: str, window: int, stride: int, unit: int):
        """`unit`: the lengths of rows that mesh and attention can compute are multiples of it."""
        self.source, index = source, source.index
        self.domains = sorted({file.label for file in index.files})
        self.texts = [self.read(file) for file in index.files]
        windows = [
            Window(number, text, max(0, end - window), before, end)
            for number, tokens in enumerate(self.texts)
            for text, n in self.spans(tokens, cut)
            for before, end in itertools.pairwise([0, *range(window, n, stride), n])
        ]
        if not windows:
            raise ValueError(f"{source.config.index}: got no {cut} with a token, expected some")

        lengths = [window]
        while len(lengths) < 4 and lengths[-1] % (2 * unit) == 0:
            lengths.append(lengths[-1] // 2)
        rows_of: dict[int, list[Window]] = {length: [] for length in lengths}
        for w in windows:
            rows_of[min(length for length in lengths if length >= w.end - w.begin)].append(w)
        batch = source.config.global_batch
        self.batches: list[tuple[int, list[Window]]] = []  # length of its rows, the rows
        for length, rows in rows_of.items():
            rows += [NO_WINDOW] * (-len(rows) % batch)
            self.batches += [(length, rows[i : i + batch]) for i in range(0, len(rows), batch)]
        label_of = [self.domains.index(file.label) for file in index.files] + [-1]  # the last is NO_WINDOW's
        self.domain = np.array([label_of[w.file] for _, rows in self.batches for w in rows])

    def read(self, file: data.TokenFile) -> np.ndarray:
        path, dtype = self.source.root / file.path, np.dtype(self.source.index.dtype).newbyteorder("<")
        if fault := data.file_fault(path, file, dtype.itemsize):
            raise ValueError(fault)
        tokens = np.concatenate(list(data.read_tokens(path, dtype, READ_TOKENS)))
        if tokens.max() >= (size := self.source.index.vocab_size):
            bad = int(np.argmax(tokens >= size))
            raise ValueError(f"{path}: token {bad}: got id {tokens[bad]}, expected below the vocabulary size {size}")
        return tokens

    def spans(self, tokens: np.ndarray, cut: str) -> Iterator[tuple[int, int]]:
        """(place of x1, n) of every text in a token file; documents without a token are none."""
        if cut == "stream":
            yield 0, len(tokens)
            return
        eos = np.flatnonzero(tokens == self.source.index.eos_id)
        for first, end in zip([0, *(eos + 1).tolist()], [*eos.tolist(), len(tokens)], strict=True):
            if end > first:
                yield first, end - first

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict]:
        index = self.source.index
        for length, whole_batch in self.batches:
            rows = [whole_batch[row] for row in self.source.rows]
            x = np.full((len(rows), length + 1), index.eos_id, np.uint32)  # x0 is EOS; so is what fills a row up
            scored = np.zeros((len(rows), length), bool)
            for row, w in enumerate(rows):
                if w is not NO_WINDOW:
                    left = max(w.begin, 1)  # x0 is not in the file
                    x[row, left - w.begin : w.end - w.begin + 1] = self.texts[w.file][
                        w.text + left - 1 : w.text + w.end
                    ]
                    scored[row, w.scored_from - w.begin : w.end - w.begin] = True
            batch = data.finish_batch(x, np.full(len(rows), -1), index, self.source.config)
            # The last x is a label only.
            batch = {name: array[:, :length] if array.ndim == 2 else array for name, array in batch.items()}
            batch["loss_mask"] = batch["loss_mask"] & scored
            yield batch


# --- bytes of text, for bits per byte


def row_bytes(batches, sizes: np.ndarray | None) -> np.ndarray:
    """float64: for every row the bytes that its scored labels stand for; NaN where the tokenizer does not tell."""
    if sizes is None:
        return np.full(len(batches.domain), np.nan)
    rows = [np.where(batch["loss_mask"], sizes[batch["labels"]], 0).sum(axis=1, dtype=np.float64) for batch in batches]
    return np.concatenate(rows)[: len(batches.domain)]


def token_bytes(index_path: str, index: data.Index, given: str | None) -> np.ndarray | None:
    """`bytes_of_tokens` of the tokenizer that --tokenizer or the index names; None, and a line, without a proof."""
    known = index_tokenizer(index_path, index, given)
    if given is not None:
        own, other = vocabulary_of(index_path, index)["tokenizer"], tokenizer_content(known.path)
        if comparable(own, other) and own != other:
            raise ValueError(
                f"--tokenizer {known.path}: got {other}, expected the one that {index_path} was made with, {own}"
            )
    if known.tokenizer is None:
        why = f"{known.why}; fix: --tokenizer"
    elif fault := bytes_fault(known.tokenizer):
        why = f"{known.path}: {fault}"
    else:
        return bytes_of_tokens(known.tokenizer, index)
    say(f"{index_path}: bits per byte are left out: {why}")
    return None


# --- the record of a run's evaluations


def checksum(meta: dict) -> str | None:
    """Of a checkpoint's parameters, bit for bit; None if its meta holds no sums."""
    sums = meta.get("checksums", {}).get("params")
    return sums and hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


class Record:
    """RUN/evaluations/NAME.json, the evaluations of one setting by step, and the same in RUN/tensorboard/NAME."""

    def __init__(self, run_dir: Path, name: str, settings: dict, of: list[dict]):
        self.path, self.board = run_dir / "evaluations" / f"{name}.json", run_dir / "tensorboard" / name
        self.settings, self.of = settings, of
        self.read()

    def read(self) -> None:
        self.by_step: dict[int, dict] = {}
        if not self.path.is_file():
            return
        try:
            recorded = json.loads(self.path.read_text())
            settings, self.by_step = recorded["settings"], {e["step"]: e for e in recorded["evaluations"]}
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{self.path}: got no record of evaluations ({e}); fix: delete it") from e
        for key, then, now in differences(settings, self.settings):
            raise ValueError(f"{self.path}: {key}: got {now}, expected {then} as in the evaluations there; fix: another "
                             "--name, or delete that file")  # fmt: skip

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else adds to the record; what somebody has added since it was read is read again."""
        with sole_writer(self.path):
            self.read()
            yield

    def known(self, meta: dict) -> dict | None:
        """The recorded evaluation of the same parameters."""
        evaluation = self.by_step.get(meta["step"])
        same = evaluation and evaluation["checksum"] is not None and evaluation["checksum"] == checksum(meta)
        return evaluation if same else None

    def add(self, evaluation: dict) -> None:
        """Both files are written anew, so that no step stands in them twice."""
        self.by_step[evaluation["step"]] = evaluation
        evaluations = [self.by_step[step] for step in sorted(self.by_step)]
        content = {"settings": self.settings, "of": self.of, "evaluations": evaluations}
        replace_file(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        earlier = list(self.board.glob("events.*"))
        board = Board(self.board, name=f"events.{time.time_ns()}")
        for e in evaluations:
            values = evaluation_metrics(e["heldout"])
            values |= {f"eval/lm/{label}/BPB": r["bits_per_byte"] for label, r in e["heldout"].items()}
            board.write(e["step"], {tag: math.nan if value is None else value for tag, value in values.items()})
        board.close()
        for file in earlier:
            file.unlink()


# --- token-level KL

VOCABULARY_ROWS = 4096  # of the output matrix, at most so many at once


def kl(args) -> dict:
    """Token-level KL(A||B), KL(B||A) (nats a token) and top-1 agreement of two checkpoints on the same held-out text, by
    label. Beside it the noise floor: the same of A in float32 against A in bfloat16. Both models are computed in A's
    precision."""
    check_counts(args, "--limit")
    folder_a, folder_b = find_checkpoint(args.a), find_checkpoint(args.b)
    meta_a, config, batch = resolve(args, folder_a)
    meta_b, config_b, _ = resolve(args, folder_b)
    a, names = config.model, (str(folder_a), str(folder_b))
    b = dataclasses.replace(config_b.model, compute_dtype=a.compute_dtype)

    # The same id has to be the same token, and the same row of both output matrices.
    tokenizers = (find_tokenizer(None, folder_a, meta_a), find_tokenizer(None, folder_b, meta_b))
    check_same_tokens(*tokenizers, a.vocab_size, b.vocab_size, names)
    if a.padded_vocab_size != b.padded_vocab_size:
        raise ValueError(f"{names[1]}: got padded_vocab_size {b.padded_vocab_size}, expected {a.padded_vocab_size}")
    mesh = make_mesh(config, batch)
    model.check_mesh(b, dict(mesh.shape), config.data.sequence_length)
    (index,), limit = held_out_indexes(args, config, folder_a)
    trained = [training_data(folder_a, meta_a), training_data(folder_b, meta_b)]
    limit = args.limit or limit
    held_out = HeldOut(config, mesh, index, args.data_root, batch, limit, trained, args.on_training_data)

    params_a = restore_item(folder_a, "params", param_shapes(config, mesh))
    params_b = restore_item(folder_b, "params", param_shapes(dataclasses.replace(config_b, model=b), mesh))
    result = {"a": names[0], "b": names[1], "index": index, "of": held_out.of[0],
              "instances": len(held_out.batches.instances), "compute_dtype": a.compute_dtype}  # fmt: skip
    with jax.default_matmul_precision("highest"):  # where float32 is asked for, TPUs would take bfloat16
        result["heldout"] = mean_divergences(held_out, (params_a, params_b), (a, b))
        if args.noise_floor == "precision":
            in_two_ways = tuple(dataclasses.replace(a, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
            floor = mean_divergences(held_out, (params_a, params_a), in_two_ways)
            result["noise_floor"] = {"what": "A in float32 against A in bfloat16", "heldout": floor}
            lowest = floor["all"]["kl"]
            result["times_the_floor"] = result["heldout"]["all"]["kl"] / lowest if lowest else None
    return finite(result) | {"verdict": likeness(result["heldout"]["all"]["kl"], result.get("times_the_floor"))}


def likeness(kl: float, times_the_floor: float | None) -> str:
    if kl == 0:
        return "same model"
    if times_the_floor is None:
        return f"KL {kl:.4g} nats a token"
    if times_the_floor <= 1:
        return f"within noise: KL {kl:.4g} is no more than bfloat16 does to A"
    return f"different models: KL {kl:.4g} is {times_the_floor:.4g} times what bfloat16 does to A"


def check_same_tokens(a: FoundTokenizer, b: FoundTokenizer, vocab_a: int, vocab_b: int,
                      names: tuple[str, str]) -> None:  # fmt: skip
    """The same id has to be the same token in both models."""
    if vocab_a != vocab_b:
        raise ValueError(f"{names[1]}: got a vocabulary of {vocab_b}, expected {vocab_a} as in {names[0]}")
    if missing := [f"{name} ({t.why})" for name, t in zip(names, (a, b), strict=True) if t.tokenizer is None]:
        say(f"that both models have the same tokens is not checked: no tokenizer.json for {' and '.join(missing)}")
        return
    ids_a, ids_b = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
    if different := sorted(t for t in ids_a.keys() | ids_b.keys() if ids_a.get(t) != ids_b.get(t)):
        token = different[0]
        raise ValueError(f"{b.path}: {token!r}: got id {ids_b.get(token)}, expected {ids_a.get(token)} as in {a.path} "
                         f"({len(different)} tokens differ); fix: compare models of one tokenizer")  # fmt: skip


def mean_divergences(held_out: HeldOut, params, models: tuple[model.ModelConfig, model.ModelConfig]) -> dict[str, dict]:
    """{label or "all": means over tokens} of `row_divergences`."""
    specs = tuple({name: tensor.spec for name, tensor in model.ledger(m).items()} for m in models)
    held_out.step = held_out.compile(partial(row_divergences, models=models), specs)
    names = ("kl", "kl_reversed", "top1_agreement")
    columns = held_out.by_row(params, True)
    return {
        label: {name: float(x) / tokens if tokens else math.nan for name, x in zip(names, sums, strict=True)}
        | {"tokens": int(tokens)}
        for label, (n, *sums, tokens) in held_out.by_label(*columns).items()
        if n > 0
    }


def row_divergences(params, piece, config: Config, execution: model.Execution, models):
    """Per row: the three of `divergence` summed over the positions of unmasked labels, and their number, each [b].

    params, models: of A and of B. local: piece [b, S/context]."""
    tokens, segments = piece["tokens"], piece["segment_ids"]
    x_a, x_b = (model.hidden_states(p, tokens, segments, m, execution) for p, m in zip(params, models, strict=True))
    heads = [model.gather_head(p["lm_head"], m) for p, m in zip(params, models, strict=True)]
    chunks = model.split_chunks(min(execution.loss_chunk, x_a.shape[0]), x_a, x_b)
    terms = lax.map(lambda x: divergence(*x, *heads, models[0].vocab_size), tuple(chunks))  # [chunks, 3, C]
    terms = jnp.moveaxis(terms, 1, 0).reshape(3, -1)[:, : x_a.shape[0]].reshape(3, *tokens.shape)
    sums = jnp.sum(jnp.where(piece["loss_mask"], terms, 0.0), axis=2)
    return *sums, jnp.sum(piece["loss_mask"], axis=1, dtype=jnp.int32)


def divergence(x_a_CD, x_b_CD, head_a_VD, head_b_VD, vocab_size: int):
    """fp32 [3, C]: KL(A||B) and KL(B||A) in nats, and 1 where both prefer the same token.

    local: hidden states of C tokens (the widths may differ), output matrices [V/tensor, D]. Streams over the vocabulary
    twice, for the normalisers and for the sums: no more than [C, VOCABULARY_ROWS] logits of each model exist at once.
    Rows from vocab_size on are padding and no tokens, whatever the models were trained with.
    """
    V = head_a_VD.shape[0]
    R = max(n for n in range(1, min(V, VOCABULARY_ROWS) + 1) if V % n == 0)
    first_ids = model.vary(lax.axis_index("tensor") * V + jnp.arange(0, V, R))
    heads = [head.reshape(V // R, R, -1) for head in (head_a_VD, head_b_VD)]

    def logits(x_CD, head_RD, first):
        logits_CR = jnp.einsum("cd,rd->cr", x_CD, head_RD, preferred_element_type=jnp.float32)
        return jnp.where(first + jnp.arange(R) < vocab_size, logits_CR, model.MASKED)

    def normaliser(x_CD, head):  # -> logsumexp [C], best token [C]
        def body(carry, block):
            peak, total, best = carry
            logits_CR = logits(x_CD, *block)
            here = jnp.max(logits_CR, axis=1)
            best = jnp.where(here > peak, block[1] + jnp.argmax(logits_CR, axis=1), best)
            new = jnp.maximum(peak, here)
            total = total * jnp.exp(peak - new) + jnp.sum(jnp.exp(logits_CR - new[:, None]), axis=1)
            return (new, total, best), None

        C = x_CD.shape[0]
        start = model.vary((jnp.full(C, model.MASKED), jnp.zeros(C), jnp.zeros(C, first_ids.dtype)))
        (peak, total, best), _ = lax.scan(body, start, (head, first_ids))
        highest = model.vary(lax.pmax(peak, "tensor"))  # [C] stays [C]
        total = model.vary(lax.psum(total * jnp.exp(peak - highest), "tensor"))  # [C] stays [C]
        # Of equals the smallest id; devices without the highest logit have no say.
        best = lax.pmin(jnp.where(peak == highest, best, jnp.iinfo(best.dtype).max), "tensor")  # [C] stays [C]
        return highest + jnp.log(total), model.vary(best)

    (lse_a, best_a), (lse_b, best_b) = normaliser(x_a_CD, heads[0]), normaliser(x_b_CD, heads[1])

    def body(sums, block):
        head_a, head_b, first = block
        log_p = logits(x_a_CD, head_a, first) - lse_a[:, None]
        log_q = logits(x_b_CD, head_b, first) - lse_b[:, None]
        terms = jnp.stack([kl_terms(log_p, log_q), kl_terms(log_q, log_p)])
        return sums + jnp.sum(terms, axis=2), None

    sums, _ = lax.scan(body, model.vary(jnp.zeros((2, x_a_CD.shape[0]))), (*heads, first_ids))
    sums = model.vary(lax.psum(sums, "tensor"))  # [2, C] stays [2, C]
    same_best = jnp.where(jnp.isnan(lse_a + lse_b), jnp.nan, best_a == best_b)  # a model of NaN prefers no token
    return jnp.concatenate([sums, same_best[None]])


def kl_terms(log_p, log_q):
    """p log(p/q) - p + q of log-probabilities, elementwise and never negative. -inf in both is a term of 0.

    Summed over a vocabulary this is KL(p||q), since the terms -p + q add up to nothing. They make the effect of rounding
    in the two normalisers one of second order. Nearly equal models have a KL far below the 1e-6 to which fp32 knows a
    logsumexp.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    same = log_p == log_q  # also where both are -inf, whose difference is no number
    r = jnp.where(same, 0.0, log_p) - jnp.where(same, 0.0, log_q)
    # q = p exp(-r). Where r is small, p and q are never subtracted: their difference would be lost in their rounding.
    near = p * jnp.maximum(r + jnp.expm1(-jnp.clip(r, -1, 1)), 0)
    return jnp.where(jnp.abs(r) < 1, near, jnp.where(p > 0, p * r, 0.0) - p + q)


# --- the command line

MOVED = {
    "sample": "python sample.py CKPT",
    "lm-eval": "python tools/lm_eval_adapter.py CKPT",
    "lm-eval-data": "python tools/lm_eval_data.py WHEEL DIR",
    "report": "python tools/report.py CKPT",
}


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    checkpoint = "a run directory (its newest step) or RUN/checkpoints/N"

    def verb(name: str, command, about: str, example: str) -> argparse.ArgumentParser:
        p = add_verb(verbs, name, about, f"python evaluate.py {name} {example}", command.__doc__)
        p.set_defaults(command=command)
        add_json(p)
        return p

    def common(p: argparse.ArgumentParser) -> None:
        p.add_argument("--on-training-data", action="store_true",
                       help="allow an index that the model was trained on; the result says so")  # fmt: skip
        p.add_argument("--data-root", help="folder that the index's paths start from; default: the index's own")
        p.add_argument("--batch", type=int, help="sequences at once over all devices; default: the run's global batch")
        p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
        p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")

    p = verb("loss", heldout_loss, "held-out cross-entropy by label",
             "runs/quickstart --index data/quickstart/heldout.json")  # fmt: skip
    p.add_argument("checkpoint", metavar="CKPT", help=checkpoint)
    p.add_argument("--index", help="held-out index; default: the run's run.eval_index, as in training")
    common(p)

    p = verb("perplexity", perplexity, "cross-entropy, perplexity and bits per byte, by label and step",
             "runs/quickstart --cut documents --stride 256 --steps all")  # fmt: skip
    p.add_argument("checkpoint", metavar="CKPT", help=checkpoint)
    p.add_argument("--index", action="append", metavar="INDEX",
                   help="held-out index, repeatable; default: the run's run.eval_index, as in training")  # fmt: skip
    p.add_argument("--steps", metavar="LIST", help="of a run directory: 1000,2000,latest, or all; default: the newest")
    p.add_argument("--cut", choices=("instances", "documents", "stream"), default="instances",
                   help="how the text is scored, see python evaluate.py --help; default: %(default)s")  # fmt: skip
    p.add_argument("--window", type=int, metavar="W", help="most tokens given; default: the run's sequence length")
    p.add_argument("--stride", type=int, metavar="T", help="tokens scored by a window; default: W")
    p.add_argument("--tokenizer", metavar="PATH",
                   help="folder or tokenizer.json, for bits per byte; default: the index's")  # fmt: skip
    p.add_argument("--name", help="of the record in the run directory; default: by index and cut")
    p.add_argument("--no-record", action="store_true", help="print only, write nothing into the run directory")
    common(p)

    p = verb("kl", kl, "how far two models are apart, token by token", "runs/a runs/a/checkpoints/600")
    p.add_argument("a", metavar="A", help=checkpoint)
    p.add_argument("b", metavar="B", help="the same; a Hugging Face folder goes through convert.py from-hf first")
    p.add_argument("--index", help="held-out index; default: A's run.eval_index, as in training")
    p.add_argument("--limit", type=int, metavar="N", help="instances, spread evenly; default: all, or as in training")
    p.add_argument("--noise-floor", choices=("precision", "none"), default="precision",
                   help="A in float32 against A in bfloat16; default: %(default)s")  # fmt: skip
    common(p)
    return parser.parse_args(argv)


def main(argv=None) -> int:
    refuse_moved_verb("evaluate.py", argv, MOVED)
    args = parse_args(argv)

    def command() -> dict:
        pin_settings()
        return args.command(args)

    return run_command("evaluate.py", command, args.json, by_step if args.verb == "perplexity" else outline)


if __name__ == "__main__":
    sys.exit(main())
