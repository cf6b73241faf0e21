"""Text from a checkpoint: prefill, decode with a cache of keys and values, and the choice of the next token.

    python sample.py runs/quickstart --prompt "def main(" --temperature 0.7 --num 3
    python sample.py runs/quickstart_sft --chat                          a model that was tuned on conversations

`prefill` reads a prompt at once and keeps the keys and values of every layer. `decode` adds one token a row. `choose`
draws the next token from the logits. `Sampler` compiles the three and yields tokens; `continuations` ends their texts.

Rows of different lengths are computed together, on any mesh without a context axis. A row's tokens depend on the seed,
its number and its own text alone. The file does not import train.py, so that training may print samples.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import data
import model
from checkpoint import Opened, open_model
from config import BATCH_AXES, Config, make_execution, pin_settings, platform_of
from processes import check_counts, check_memory, inputs_are_checked, run_command, say
from vocabulary import FoundTokenizer, Turns, find_tokenizer, index_tokenizer

RUN_SAMPLE_TOKENS = 80  # of a sample while a run trains

# --- the model, one token after another


def prefill(params, tokens_BS, length_B, cache_length: int, config, execution):
    """(logits [B, V] after each row's `length_B` tokens, cache). local: tokens [B/(data*fsdp), S], right-padded.

    Causality keeps the padding from being seen. `cache_length`: the tokens that a row may have in the end.
    """
    B, S = tokens_BS.shape
    of_kind = model.geometry(config, jnp.arange(S), None, execution)

    def attention(kind, q, k, v, _):
        T = min(config.window, cache_length) if kind == "s" else cache_length
        held_BT11 = jnp.clip(held_positions(length_B - 1, T), 0, S - 1)[:, :, None, None]
        kept = tuple(jnp.take_along_axis(x, held_BT11, axis=1) for x in (k, v))  # [B, S, G, K] -> [B, T, G, K]
        return model.attend(q, k, v, of_kind[kind][1], execution, 0), kept

    x_ND, cache = cached_layers(params, tokens_BS, of_kind, None, attention, config, execution)
    x_BD = x_ND.reshape(B, S, -1)[jnp.arange(B), length_B - 1]
    return whole_logits(params, x_BD, config), cache


def decode(params, cache, token_B, position_B, config, execution):
    """(logits [B, V] after one more token a row, which stands at `position_B`, cache)."""
    B = token_B.shape[0]
    zero_S = jnp.zeros(1, jnp.int32)
    anywhere = model.Where(model.Places(zero_S, zero_S, None, None), None, 0)  # `attention` below has its own
    # cos and sin of each row's own position, [B, 1, 1, K/2]
    of_kind = {kind: (model.rope_tables(config, position_B[:, None], kind), anywhere) for kind in "sf"}

    def attention(_, q, k, v, kept):
        T = kept[0].shape[1]
        rows = jnp.arange(B)
        k_BTGK, v_BTGK = (old.at[rows, position_B % T].set(x[:, 0]) for old, x in zip(kept, (k, v), strict=True))
        # All that the cache holds may be seen. Its empty places are told apart as another document.
        held_BT = (held_positions(position_B, T) >= 0).astype(jnp.int32)
        places = model.Places(zero_S, jnp.zeros(T, jnp.int32), jnp.ones((B, 1), jnp.int32), held_BT)
        return model.dense_attention(q, k_BTGK, v_BTGK, model.Where(places, None, 0), 0), (k_BTGK, v_BTGK)

    x_BD, cache = cached_layers(params, token_B[:, None], of_kind, cache, attention, config, execution)
    return whole_logits(params, x_BD, config), cache


def held_positions(last_B, length: int):
    """[B, length]: the position that each place of a cache holds when the newest is `last_B`; negative: none yet.

    Position p lies in place p mod length. A sliding layer's cache is as long as its window: what falls out of it is
    overwritten. A full layer's cache is as long as the text may become.
    """
    return last_B[:, None] - (last_B[:, None] - jnp.arange(length)) % length


def cached_layers(params, tokens_BS, of_kind, cache, attention: Callable, config, execution):
    """(hidden states after the last norm [B*S, D], what `attention` keeps of every layer).

    `attention(kind, q, k, v, kept)` -> (heads [B, S, H, K], kept) takes the place of model.attend. `of_kind` is as
    model.geometry gives it. Everything else is the model's own layer.
    """

    def apply(x_ND, w, slot, kind, kept):
        def attend(q, k, v, *_):
            nonlocal kept
            heads, kept = attention(kind, q, k, v, kept)
            return heads

        x_ND = model.layer(x_ND, w, *of_kind[kind], config, execution, slot, attend)
        return x_ND, kept

    x_ND = model.embed_tokens(params, tokens_BS, config)
    x_ND, cache = model.scan_layers(params, x_ND, apply, config, cache)
    return model.rms_norm(x_ND, params["final_norm"], config.norm_eps), cache


def whole_logits(params, x_BD, config):
    """fp32 logits of the whole vocabulary on every device, [B, V]."""
    logits_BV = model.head_logits(x_BD, model.gather_head(params["lm_head"], config), config)
    return lax.all_gather(logits_BV, "tensor", axis=1, tiled=True)  # [B, V/tensor] -> [B, V]


# --- the choice of a token


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


# --- tokens and texts


class Sampler:
    """Tokens from a checkpoint, one after another, with a cache of keys and values."""

    def __init__(self, opened: Opened):
        config, self.opened = opened.config, opened
        execution = make_execution(config, 1, platform_of(opened.mesh))
        rows, cached = P(BATCH_AXES), P(None, BATCH_AXES, None, "tensor", None)  # of the cache: cycles, B, T, G, K
        cache_specs = [(cached, cached)] * len(config.model.pattern)
        draw = (rows, P())  # numbers of the rows; temperature, top_k, top_p, seed

        def first(cache_length, params, tokens_BS, length_B, number_B, how):
            logits_BV, cache = prefill(params, tokens_BS, length_B, cache_length, config.model, execution)
            return *self.next(logits_BV, length_B, number_B, how), cache

        def more(params, cache, token_B, position_B, number_B, how):
            logits_BV, cache = decode(params, cache, token_B, position_B, config.model, execution)
            return *self.next(logits_BV, position_B + 1, number_B, how), cache

        @lru_cache  # a program for each length of the cache
        def first_of(cache_length):
            return opened.compiled(
                partial(first, cache_length), (P(BATCH_AXES, None), rows, *draw), (rows, rows, cache_specs)
            )

        self.first_of = first_of
        # The cache is donated: decoding writes into it in place.
        self.more = opened.compiled(more, (cache_specs, rows, rows, *draw), (rows, rows, cache_specs), donated=(1,))

    @staticmethod
    def next(logits_BV, position_B, number_B, how):
        """(token, its log-probability at temperature 1) of each row."""
        temperature, top_k, top_p, seed = how
        key = jax.random.key(seed, impl="threefry2x32")
        keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(key, n), p))(number_B, position_B)
        token_B = choose(logits_BV, keys, temperature, top_k, top_p)
        return token_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV), token_B[:, None], axis=1)[:, 0]

    def check_memory(self, rows: int, length: int) -> None:
        """DataError if logits and cached keys and values of so many rows, this long at the end, fit into no memory."""
        config = self.opened.config.model
        cycle = sum(min(config.window, length) if kind == "s" else length for kind in config.pattern)
        tokens = cycle * (config.n_layers // len(config.pattern))  # of a row, over all layers
        cached = 2 * tokens * config.n_kv_heads * config.head_dim * jnp.dtype(config.compute_dtype).itemsize
        # A process can ask its own devices only. A CPU does not say; then it is what the machine has.
        ours = [d for d in self.opened.mesh.devices.flat if d.process_index == jax.process_index()]
        available = sum((d.memory_stats() or {}).get("bytes_limit", 0) for d in ours) or None
        check_memory("--num, --tokens", rows * (cached + 4 * config.vocab_size), available)

    def __call__(
        self, prompts: list[list[int]], max_tokens: int, draw: Draw, numbers=None, log_probs: list | None = None
    ) -> Iterator[np.ndarray]:
        """Yields the next token of every row, [rows], at most `max_tokens` times.

        `numbers`: the draws of a row depend on its number; default: its place. `log_probs`: a list that gets the
        log-probabilities of the tokens, at temperature 1."""
        n, splash = len(prompts), self.opened.config.hardware.attention == "splash"
        fill = -n % self.opened.shards  # rows that make the number divisible over the mesh
        lengths = np.array([len(p) for p in prompts] + [1] * fill, np.int32)
        numbers = np.pad(np.arange(n) if numbers is None else numbers, (0, fill)).astype(np.uint32)
        tokens = np.zeros((n + fill, padded_length(lengths.max(), splash)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        length = padded_length(lengths.max() + max_tokens)
        how = (np.float32(draw.temperature), np.int32(draw.top_k), np.float32(draw.top_p), np.uint32(draw.seed))
        log_probs = [] if log_probs is None else log_probs
        token, log_prob, cache = self.first_of(length)(self.opened.params, tokens, lengths, numbers, how)
        for i in range(max_tokens):
            log_probs.append(np.asarray(log_prob)[:n])
            yield np.asarray(token)[:n]
            if i + 1 < max_tokens:
                token, log_prob, cache = self.more(self.opened.params, cache, token, lengths + i, numbers, how)


def padded_length(n: int, splash: bool = False) -> int:
    """The next of 32, 48, 64, 96, 128, ...: few shapes to compile, at most half of a row wasted."""
    size = 32
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size + -size % 128 if splash else size


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


class Continuation(NamedTuple):
    tokens: list[int]  # without the end-of-text token
    text: str  # up to the stop
    stopped_by: str | None  # the stop, or the end-of-text token; None: the number of tokens


def continuations(sampler: Callable, tokenizer, eos_ids: Sequence[int], prompts: Sequence[list[int]], max_tokens: int,
                  stops: Sequence[str], draw: Draw, numbers=None) -> list[Continuation]:  # fmt: skip
    """Every prompt (token ids) continued until a stop, any of the ends of a text or `max_tokens`."""
    # A stop ends in the newest token, so as many tokens as it has bytes are all that can hold it.
    tail = max((len(stop.encode()) for stop in stops), default=0)
    tokens, stopped_by = [[] for _ in prompts], [None] * len(prompts)
    for newest in sampler(prompts, max_tokens, draw, numbers):
        for i, token in enumerate(newest):
            if stopped_by[i] is None and token in eos_ids:
                stopped_by[i] = tokenizer.id_to_token(int(token))
            elif stopped_by[i] is None:
                tokens[i].append(int(token))
                text = tokenizer.decode(tokens[i][-tail:]) if tail else ""
                stopped_by[i] = next((stop for stop in stops if stop in text), None)
        if None not in stopped_by:
            break
    texts = [tokenizer.decode(ids) for ids in tokens]
    for stop in stops:
        texts = [text.split(stop)[0] for text in texts]
    return [Continuation(*parts) for parts in zip(tokens, texts, stopped_by, strict=True)]


# --- while a run trains


def run_samples(config: Config, mesh, index_path, index: data.Index) -> Callable[[dict], str] | None:
    """params -> run.sample_prompt and its continuation. None, and a line, where this run cannot draw one.

    The draw is the same each time, so that two samples differ by what was learnt between them."""
    if config.run.sample_prompt is None:
        return None
    known = index_tokenizer(index_path, index, None)
    for unable, why in (
        (jax.process_count() > 1, "several processes train"),
        (mesh.shape["context"] > 1, "the mesh cuts sequences (context)"),
        (known.tokenizer is None, known.why),
    ):
        if unable:
            say(f"run.sample_prompt is not used: {why}")
            return None
    prompt = known.tokenizer.encode(config.run.sample_prompt, add_special_tokens=False).ids or [known.eos_ids[0]]
    sampler = Sampler(Opened(None, {}, config, mesh, None))

    def sample(params) -> str:
        sampler.opened = sampler.opened._replace(params=params)
        draw = Draw(temperature=0.8, top_p=0.95)
        (drawn,) = continuations(sampler, known.tokenizer, known.eos_ids, [prompt], RUN_SAMPLE_TOKENS, [], draw)
        return config.run.sample_prompt + drawn.text

    return sample


# --- the command


def draw_samples(args) -> dict:
    draw = Draw(args.temperature, args.top_k, args.top_p, args.seed).check()
    check_counts(args, "--tokens", "--num")
    if "" in args.stop:
        raise ValueError("--stop: got an empty text, expected one that ends a sample")
    # Python hands over bytes of the command line that are no UTF-8 as lone surrogates.
    if any(0xD800 <= ord(letter) < 0xE000 for letter in "".join([args.prompt, *args.stop])):
        raise ValueError("--prompt, --stop: got bytes that are no UTF-8, expected text")
    opened = open_model(args.checkpoint, args.hardware, args.set)
    known = needed_tokenizer(args.tokenizer, opened)
    # Without a prompt a text begins, which it does after the end of another one.
    prompt = known.tokenizer.encode(args.prompt, add_special_tokens=False).ids or [known.eos_ids[0]]
    sampler = Sampler(opened)
    sampler.check_memory(args.num, len(prompt) + args.tokens)
    inputs_are_checked()
    if len(prompt) + args.tokens > (trained := opened.config.data.sequence_length):
        say(f"{len(prompt)} + {args.tokens} tokens: the model was trained on {trained}, and may not go beyond well")
    drawn = continuations(sampler, known.tokenizer, known.eos_ids, [prompt] * args.num, args.tokens, args.stop, draw)
    samples = [{"text": c.text, "tokens": c.tokens, "stopped_by": c.stopped_by} for c in drawn]
    return {"checkpoint": str(opened.folder), "step": opened.meta["step"], "prompt": args.prompt, "samples": samples}


def sample(args) -> dict | None:
    """Samples as text, or with --json as text, token ids and what ended them."""
    drawn = draw_samples(args)
    if args.json:
        return drawn
    print(f"\n{'-' * 40}\n".join(args.prompt + s["text"] for s in drawn["samples"]))


def chat(args) -> None:
    """A conversation at the terminal, or of the lines of standard input, by Olmo 3's template. The model's turn ends with
    its closing token."""
    draw = Draw(args.temperature, args.top_k, args.top_p, args.seed).check()
    check_counts(args, "--tokens")
    opened = open_model(args.checkpoint, args.hardware, args.set)
    known = needed_tokenizer(args.tokenizer, opened)
    turns, sampler = Turns(known.tokenizer, known.path), Sampler(opened)
    inputs_are_checked()
    ids = turns.closed("system", args.prompt) if args.prompt else []
    while True:
        print("> " if sys.stdin.isatty() else "", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        ids += [*turns.closed("user", line.rstrip("\n")), *turns.opened("assistant", "")]
        ends = (*known.eos_ids, turns.end)
        (answer,) = continuations(sampler, known.tokenizer, ends, [ids], args.tokens, args.stop, draw)
        print(answer.text, flush=True)
        ids += [*answer.tokens, *turns.close]


def add_model_flags(p: argparse.ArgumentParser) -> None:
    """What opens a checkpoint; lm_eval_adapter.py takes the same."""
    p.add_argument("--tokenizer", metavar="PATH",
                   help="folder or tokenizer.json; default: what from-hf carried, or the run's index")  # fmt: skip
    p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", metavar="CKPT", help="a run directory (its newest step) or RUN/checkpoints/N")
    p.add_argument("--prompt", default="", help="default: none, the beginning of a text")
    p.add_argument("--tokens", type=int, default=200, metavar="N", help="the most tokens of a sample; default: 200")
    p.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: the likeliest token; default: 1")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only; default: all")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P",
                   help="of the fewest likeliest tokens that reach probability P; default: all")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, metavar="N",
                   help="0 to 2^32 - 1; default: 0; sample i is the same whatever --num")  # fmt: skip
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sample; repeatable")
    p.add_argument("--num", type=int, default=1, metavar="N", help="samples, at once; default: 1")
    p.add_argument(
        "--chat", action="store_true", help="a conversation: a line is a turn; --prompt is the system message"
    )
    p.add_argument("--json", action="store_true", help="text, token ids and what ended them, for programs")
    add_model_flags(p)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)

    def command() -> dict | None:
        pin_settings()
        return chat(args) if args.chat else sample(args)

    return run_command("sample.py", command, args.json)


if __name__ == "__main__":
    sys.exit(main())
