"""Evaluate checkpoints on text that was held out. Training loss proves nothing; this does.

    python evaluate.py loss runs/quickstart                              the number that training printed
    python evaluate.py perplexity runs/quickstart --index data/domains/index.json --steps all
    python evaluate.py kl runs/quickstart runs/other                     are two models the same model?
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
import copy
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import operator
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

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

import data
import model
import train

# ------------------------------------------------------------------------------------------------ checkpoints and JSON


def checkpoint_meta(step_folder: Path) -> dict:
    try:
        return train.read_meta(step_folder)
    except train.DamagedCheckpoint as e:
        raise train.RunFailed(f"{step_folder}: {e}") from e


def find_steps(path: str, steps: str | None) -> list[Path]:
    """The checkpoints that --steps names: 'all', or a list of steps and 'latest'; the newest without it."""
    newest = train.find_checkpoint(path)
    if steps is None:
        return [newest]
    if newest == Path(path).absolute():
        raise ValueError(f"--steps: got the checkpoint {path}, expected a run directory")
    there = {
        int(p.name): p for p in newest.parent.iterdir() if p.name.isdigit() and (p / "meta" / "metadata").is_file()
    }
    if steps == "all":
        return [there[step] for step in sorted(there)]
    wanted = [newest.name if word == "latest" else word for word in steps.split(",")]
    if absent := [word for word in wanted if not word.isdigit() or int(word) not in there]:
        raise ValueError(f"--steps: got {', '.join(absent)}, expected latest, all or some of {sorted(there)}")
    return [there[step] for step in sorted(set(map(int, wanted)))]


def run_of(step_folder: Path) -> Path | None:
    """RUN of RUN/checkpoints/N."""
    return step_folder.parent.parent if step_folder.parent.name == "checkpoints" else None


def resolve(args, step_folder: Path) -> tuple[dict, train.Config, int]:
    """(meta, config, rows at once) of a checkpoint as the command line wants it evaluated."""
    meta = checkpoint_meta(step_folder)
    as_trained = copy.deepcopy(meta["config"])  # --set is written into it
    c = train.assemble_config(as_trained, str(step_folder), args.hardware, args.set)
    batch = c.data.global_batch if args.batch is None else args.batch
    if batch < 1:
        raise ValueError(f"--batch: got {batch}, expected a positive number")
    train.cache_compilations(c)
    return meta, c, batch


def held_out_index(args, c: train.Config, step_folder: Path) -> tuple[list[str], int | None]:
    """(indexes, limit): --index whole, or the run's own held-out set as the run saw it."""
    given = getattr(args, "index", None) or []
    given = [given] if isinstance(given, str) else given
    if given:
        return given, None
    if c.run.eval_index is None:
        raise ValueError(f"--index: missing, and the run of {step_folder} has no run.eval_index")
    return [c.run.eval_index], train.eval_limit(c)


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
    step_folder = train.find_checkpoint(args.checkpoint)
    meta, c, batch = resolve(args, step_folder)
    mesh = train.make_mesh(c, batch)
    (index,), limit = held_out_index(args, c, step_folder)
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, limit)
    params = train.restore_item(step_folder, "params", train.param_shapes(c, mesh))
    results = held_out(params, progress=sys.stderr.isatty())
    return {"checkpoint": str(step_folder), "step": meta["step"], "index": index, "heldout": finite(results)}


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


def bytes_of_tokens(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray | None:
    """int64 [vocab_size]: bytes of text that each token stands for, 0 for special tokens; None if not byte-level BPE."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    added = tokenizer.get_added_tokens_decoder()
    letters, sizes = set(pre_tokenizers.ByteLevel.alphabet()), np.zeros(vocab_size, np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i >= vocab_size:
            raise ValueError(f"tokenizer: got the token {token!r} with id {i}, expected ids below {vocab_size}; fix: "
                             "--tokenizer with the one that made the index")  # fmt: skip
        if i in added:
            sizes[i] = 0 if added[i].special else len(added[i].content.encode())
        elif set(token) <= letters:
            sizes[i] = len(token)
        else:
            return None
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
    """`bytes_of_tokens` of the tokenizer that --tokenizer or the index names; None, and a line, if there is none."""
    path = Path(given) if given else data.local_path(index_path).parent / index.tokenizer
    if not given and not path.is_file():
        why = f"no tokenizer.json for {index.tokenizer!r}; fix: --tokenizer"
    elif (sizes := bytes_of_tokens(data.load_tokenizer(path), index.vocab_size)) is None:
        why = f"{path} is no byte-level BPE"
    else:
        return sizes
    train.say(f"{index_path}: bits per byte are left out: {why}")
    return None


def window_and_stride(args, c: train.Config) -> tuple[int, int]:
    if args.cut == "instances" and (args.window or args.stride):
        raise ValueError("--window, --stride: got --cut instances, expected --cut documents or --cut stream")
    window = c.data.sequence_length if args.window is None else args.window
    stride = window if args.stride is None else args.stride
    if not 1 <= stride <= window:
        raise ValueError(f"--stride: got {stride}, expected 1 to the window, {window}: no token may be left out")
    return window, stride


class Perplexity:
    """CE, perplexity and bits per byte of one model config on some indexes, for any parameters of that config."""

    def __init__(self, args, meta: dict, c: train.Config, batch: int, step_folder: Path):
        paths, limit = held_out_index(args, c, step_folder)
        indexes = [data.load_index(path) for path in paths]
        for path, index in zip(paths, indexes, strict=True):
            if (index.vocab_size, index.eos_id) != (indexes[0].vocab_size, indexes[0].eos_id):
                raise ValueError(f"--index {path}: got vocabulary and EOS {index.vocab_size}, {index.eos_id}, expected "
                                 f"{indexes[0].vocab_size}, {indexes[0].eos_id} as in {paths[0]}")  # fmt: skip
        if len({index.fingerprint for index in indexes}) < len(indexes):
            raise ValueError(f"--index: got {', '.join(paths)}, expected every index once; they hold the same data")
        window, stride = window_and_stride(args, c)
        if args.cut != "instances":  # how the index cuts plays no part
            length, limit = indexes[0].sequence_length, None
            c = dataclasses.replace(c, data=dataclasses.replace(c.data, sequence_length=length))
        self.mesh = train.make_mesh(c, batch)
        self.held_out = train.HeldOut(c, self.mesh, paths[0], args.data_root, batch, limit)
        self.batches = [self.held_out.batches]
        self.batches += [self.held_out.open(path, args.data_root, limit) for path in paths[1:]]
        if args.cut != "instances":
            model.check_mesh(c.model, dict(self.mesh.shape), window)
            unit = self.mesh.shape["context"] * (128 if c.hardware.attention == "splash" else 16)
            self.batches = [Windows(b.source, args.cut, window, stride, unit) for b in self.batches]
        sizes = [token_bytes(path, index, args.tokenizer) for path, index in zip(paths, indexes, strict=True)]
        self.bytes = [row_bytes(*pair) for pair in zip(self.batches, sizes, strict=True)]
        then, now = (train.flatten(m) for m in (meta["config"]["model"], train.science_dict(c)["model"]))
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
            if tokens > 0:
                bits = ce / (math.log(2) * size) if size > 0 else math.nan
                counted = {"rows": int(rows), "bits_per_byte": bits, "bytes": None if np.isnan(size) else int(size)}
                results[label] = train.mean_loss(ce, tokens) | counted
        return finite(results)


def perplexity(args) -> dict:
    """Held-out CE, perplexity and bits per byte by label, of one checkpoint or of many; kept in RUN/evaluations/NAME.json
    and in the run's TensorBoard (as its run NAME), where a resumed training does not touch them."""
    folders = find_steps(args.checkpoint, args.steps)
    meta, c, batch = resolve(args, folders[-1])
    evaluate = Perplexity(args, meta, c, batch, folders[-1])
    run, record = run_of(folders[-1]), None
    if run is not None and not args.no_record:
        record = Record(run, args.name or evaluate.name, evaluate.settings)
    evaluations = []
    for folder in folders:
        meta, c_now, _ = resolve(args, folder)
        if c_now.model != c.model:
            raise ValueError(
                f"{folder}: got another model than in {folders[-1]}, expected one; fix: evaluate it by itself"
            )
        found = record and record.known(meta)
        if found:
            train.say(f"step {meta['step']}: evaluated before, see {record.path}")
        else:
            params = train.restore_item(folder, "params", train.param_shapes(c, evaluate.mesh))
            found = {"step": meta["step"], "checksum": checksum(meta), "heldout": evaluate(params)}
            del params
            text = ", ".join(f"{label} {r['ce'] or math.nan:.4f}" for label, r in found["heldout"].items())
            train.say(f"step {meta['step']}: held-out CE {text}")
            if record:
                record.add(found)
        evaluations.append(found)
    return {"checkpoint": str(folders[-1]), "record": record and str(record.path), "settings": evaluate.settings,
            "evaluations": evaluations}  # fmt: skip


def checksum(meta: dict) -> str | None:
    """Of a checkpoint's parameters, bit for bit; None if it has none."""
    sums = meta.get("checksums", {}).get("params")
    return sums and hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


class Record:
    """RUN/evaluations/NAME.json, the evaluations of one setting by step, and the same in RUN/tensorboard/NAME."""

    def __init__(self, run_dir: Path, name: str, settings: dict):
        self.path, self.board = run_dir / "evaluations" / f"{name}.json", run_dir / "tensorboard" / name
        self.settings, self.by_step = settings, {}
        if self.path.is_file():
            try:
                there = json.loads(self.path.read_text())
                there, self.by_step = there["settings"], {e["step"]: e for e in there["evaluations"]}
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"{self.path}: got no record of evaluations ({e}); fix: delete it") from e
            then, now = (train.flatten(s) for s in (there, settings))
            for key in sorted(then.keys() | now.keys()):
                if then.get(key) != now.get(key):
                    raise ValueError(f"{self.path}: {key}: got {now.get(key)}, expected {then.get(key)} as in the evaluations "
                                     "there; fix: another --name, or delete that file")  # fmt: skip

    def known(self, meta: dict) -> dict | None:
        """What was found for the same parameters before."""
        found = self.by_step.get(meta["step"])
        return found if found and found["checksum"] is not None and found["checksum"] == checksum(meta) else None

    def add(self, found: dict) -> None:
        """Both are written anew, so that no step stands in them twice."""
        self.by_step[found["step"]] = found
        evaluations = [self.by_step[step] for step in sorted(self.by_step)]
        self.path.parent.mkdir(exist_ok=True)
        content = {"settings": self.settings, "evaluations": evaluations}
        train.replace_file(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        self.board.mkdir(parents=True, exist_ok=True)
        before = list(self.board.glob("events.*"))
        writer = EventsWriter(str(self.board / f"events.{time.time_ns()}"))
        for e in evaluations:
            values = train.evaluation_metrics(e["heldout"])
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
    return jnp.concatenate([sums, (best_a == best_b).astype(jnp.float32)[None]])


def row_divergences(params, piece, c: train.Config, run: model.Execution, models, hidden_b: bool = False):
    """Per row: the four of `divergence` summed over unmasked labels' positions, and how many those are, each [b].

    params: (A's, B's); with hidden_b (A's, final hidden states [b, S, D] that another program computed for B with the
    output matrix of A). models: ModelConfig of A and B."""
    a, b = params
    tokens, segments = piece["tokens"], piece["segment_ids"]

    def head(params, m):
        return model.gather_weight(params["lm_head"], 1, m.compute_dtype, m.grad_reduce_dtype)

    x_a = model.hidden_states(a, tokens, segments, models[0], run)
    x_b = (
        b.reshape(x_a.shape).astype(x_a.dtype) if hidden_b else model.hidden_states(b, tokens, segments, models[1], run)
    )
    heads = head(a, models[0]), head(a if hidden_b else b, models[1])
    chunks = model.split_chunks(min(run.loss_chunk, x_a.shape[0]), x_a, x_b)
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
        label: {name: float(x / tokens) for name, x in zip(names, sums, strict=True)} | {"tokens": int(tokens)}
        for label, (_, *sums, tokens) in held_out.by_label(*columns).items()
        if tokens > 0
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


def tokenizer_of(folder: Path, meta: dict | None) -> Path | None:
    """The tokenizer.json of a Hugging Face folder, of a checkpoint that came from one, or of its run's index."""
    if meta is None:
        found = folder / "tokenizer.json"
    else:
        found = (run_of(folder) or folder) / "hf" / "tokenizer.json"
        index = Path(meta["config"]["data"]["index"])
        if not found.is_file() and index.is_file():
            found = index.parent / data.load_index(index).tokenizer
    return found if found.is_file() else None


def check_same_tokens(a: Path | None, b: Path | None, vocab_a: int, vocab_b: int, names: tuple[str, str]) -> None:
    """The same id has to be the same token in both models."""
    if vocab_a != vocab_b:
        raise ValueError(f"{names[1]}: got a vocabulary of {vocab_b}, expected {vocab_a} as in {names[0]}")
    if a is None or b is None:
        missing = " and ".join(name for name, path in zip(names, (a, b), strict=True) if path is None)
        train.say(f"no tokenizer.json found for {missing}: that both models have the same tokens is not checked")
        return
    ours, theirs = (data.load_tokenizer(path).get_vocab() for path in (a, b))
    if different := sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)):
        t = different[0]
        raise ValueError(f"{b}: {t!r}: got id {theirs.get(t)}, expected {ours.get(t)} as in {a} ({len(different)} tokens "
                         "differ); fix: compare models of one tokenizer")  # fmt: skip


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
    spec = P(train.BATCH_AXES, "context")
    local = held_out.c.data.global_batch // (held_out.mesh.shape["data"] * held_out.mesh.shape["fsdp"])
    rows = partial(row_divergences, models=(m, m), hidden_b=True)
    compiled = held_out.compile(rows, ({name: t.spec for name, t in model.ledger(m).items()}, spec), size=local)

    def step(params, batch):
        tokens = torch.from_numpy(np.asarray(batch["tokens"]).astype(np.int64))
        with torch.no_grad():
            hidden = reference(tokens, use_cache=False).last_hidden_state.float().numpy()
        return compiled((params, jax.device_put(hidden, NamedSharding(held_out.mesh, spec))), batch)

    return step


def second_model(args, c: train.Config):
    """(folder, meta, ModelConfig, mesh -> parameters) of B: a checkpoint, or a Hugging Face folder, which has no meta."""
    if (Path(args.b) / "config.json").is_file():
        import convert

        hf = convert.HuggingFace(args.b)
        m = convert.model_config(hf.config, str(hf.folder / "config.json"), c.model.compute_dtype)
        hf.check(convert.hf_shapes(m))
        if m.vocab_size == c.model.vocab_size:
            m = dataclasses.replace(m, padded_vocab_size=c.model.padded_vocab_size)
        return hf.folder, None, m, lambda mesh: hf_params(hf, m, mesh)
    folder = train.find_checkpoint(args.b)
    meta, theirs, _ = resolve(args, folder)
    theirs = dataclasses.replace(theirs, model=dataclasses.replace(theirs.model, compute_dtype=c.model.compute_dtype))
    load = partial(train.restore_item, folder, "params")
    return folder, meta, theirs.model, lambda mesh: load(train.param_shapes(theirs, mesh))


def kl(args) -> dict:
    """Token-level KL(A||B), KL(B||A), Jensen-Shannon (nats a token) and top-1 agreement of two models on the same held-out
    text, by label; beside it the noise floor, the same of one model computed in two ways. Both models are computed in A's
    precision. B is a checkpoint or a Hugging Face folder, whose tensors are read into this project's own forward pass."""
    folder_a = train.find_checkpoint(args.a)
    meta_a, c, batch = resolve(args, folder_a)
    folder_b, meta_b, m_b, load_b = second_model(args, c)
    m_a, names = c.model, (str(folder_a), str(folder_b))
    fault = f"{args.b} is no Hugging Face folder" if meta_b else transformers_fault(m_b, c.data.document_mask)
    floor = args.noise_floor or ("precision" if fault else "transformers")
    if floor == "transformers" and fault:
        raise ValueError(f"--noise-floor transformers: {fault}")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit: got {args.limit}, expected a positive number")
    tokenizers = tokenizer_of(folder_a, meta_a), tokenizer_of(folder_b, meta_b)
    check_same_tokens(*tokenizers, m_a.vocab_size, m_b.vocab_size, names)
    if m_a.padded_vocab_size != m_b.padded_vocab_size:
        raise ValueError(f"{names[1]}: got padded_vocab_size {m_b.padded_vocab_size}, expected {m_a.padded_vocab_size}")
    mesh = train.make_mesh(c, batch)
    model.check_mesh(m_b, dict(mesh.shape), c.data.sequence_length)
    (index,), limit = held_out_index(args, c, folder_a)
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, args.limit or limit)
    params_a = train.restore_item(folder_a, "params", train.param_shapes(c, mesh))
    params_b = load_b(mesh)
    result = {"a": names[0], "b": names[1], "index": index, "instances": len(held_out.batches.instances),
              "compute_dtype": m_a.compute_dtype}  # fmt: skip
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


# ---------------------------------------------------------------------------------------------------------------- report


def table(head: list[str], rows: list[list]) -> str:
    def text(x) -> str:
        return "-" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = [head, ["---"] * len(head), *([text(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report_perplexity(args, out: Path) -> tuple[dict, str]:
    """Held-out loss by label: a table of the newest step, and a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = perplexity(args)
    evaluations = found["evaluations"]
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
    fig.savefig(out / "heldout.png", dpi=110)
    plt.close(fig)
    columns = ("tokens", "ce", "perplexity", "bits_per_byte")
    rows = [[label, *(r[key] for key in columns)] for label, r in newest.items()]
    head = ["label", "tokens", "cross-entropy", "perplexity", "bits per byte"]
    cut = found["settings"]["cut"]
    return (
        found,
        f"Step {evaluations[-1]['step']}, text by {cut}.\n\n{table(head, rows)}\n\n![held-out loss](heldout.png)",
    )


def report_kl(args, out: Path) -> tuple[dict, str]:
    """KL against --reference, or against this checkpoint's own export to Hugging Face's form."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        if args.reference is None:
            import convert

            exported = Path(folder) / "hf"
            convert.to_hf(convert.parse_args(["to-hf", args.checkpoint, str(exported)]))
        given = args.index[0] if args.index else None
        both = {"a": args.checkpoint, "b": args.reference or str(exported), "index": given}
        found = kl(argparse.Namespace(**vars(args) | both))
    found["b"] = args.reference or "this checkpoint, exported by convert.py to-hf"
    keys = ("kl", "kl_reversed", "jensen_shannon", "top1_agreement")
    parts = [("", found["heldout"])]
    if "noise_floor" in found:
        parts.append(("floor: ", {"all": found["noise_floor"]["heldout"]["all"]}))
    rows = [
        [before + label, r["tokens"], *(r[key] for key in keys)] for before, part in parts for label, r in part.items()
    ]
    text = f"A is this checkpoint, B: {found['b']}. Nats a token.\n\n"
    text += table(["label", "tokens", "KL(A,B)", "KL(B,A)", "Jensen-Shannon", "same best token"], rows)
    if "noise_floor" in found:
        text += f"\n\nThe floor is {found['noise_floor']['what']}."
    return found, text


def report_curves(args, out: Path) -> tuple[dict, str]:
    run = run_of(train.find_checkpoint(args.checkpoint))
    if run is None or not (run / "metrics.jsonl").is_file():
        return {}, "The checkpoint lies in no run directory with a metrics.jsonl."
    shutil.copyfile(train.draw_curves(run), out / "curves.png")
    return {"picture": "curves.png"}, "![training and held-out loss](curves.png)"


SURFACES = {"Held-out text": report_perplexity, "Token-level KL": report_kl, "Training": report_curves}


def report(args) -> dict:
    """One page on a checkpoint, REPORT/report.md with its pictures, and the numbers in report.json: held-out loss by label,
    KL against a reference and its noise floor, and the curves of the run. What is done is on disk if the rest fails."""
    folder = train.find_checkpoint(args.checkpoint)
    out = data.local_path(args.out) if args.out else (run_of(folder) or folder) / "report"
    out.mkdir(parents=True, exist_ok=True)
    content = {"checkpoint": str(folder), "step": checkpoint_meta(folder)["step"]}
    page = f"# {(run_of(folder) or folder).name}, step {content['step']}\n"
    for title, surface in SURFACES.items():
        content[title], text = surface(args, out)
        page += f"\n## {title}\n\n{text}\n"
        train.replace_file(out / "report.md", page)
        train.replace_file(out / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
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

    def texts(p):
        p.add_argument("--index", action="append", metavar="INDEX",
                       help="held-out index, repeatable; default: the run's run.eval_index, as in training")  # fmt: skip
        p.add_argument(
            "--steps", metavar="LIST", help="of a run directory: 1000,2000,latest, or all; default: the newest"
        )
        p.add_argument("--cut", choices=("instances", "documents", "stream"), default="instances",
                       help="how the text is scored, see python evaluate.py --help; default: %(default)s")  # fmt: skip
        p.add_argument(
            "--window", type=int, metavar="W", help="tokens given at most; default: the run's sequence length"
        )
        p.add_argument("--stride", type=int, metavar="T", help="tokens scored by a window; default: W")
        p.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json for bits per byte; default: the index's own")
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
    floors(p)
    common(p)

    p = verb("report", report, "all of it, on one page", "runs/quickstart --steps all")
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("--reference", metavar="B", help="checkpoint or Hugging Face folder; default: CKPT itself, exported")
    p.add_argument("--out", metavar="DIR", help="default: RUN/report")
    texts(p)
    floors(p)
    common(p)
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return train.run_command("evaluate.py", lambda: print(json.dumps(args.command(args), indent=1)))


if __name__ == "__main__":
    sys.exit(main())
