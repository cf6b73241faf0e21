"""Convert: Hugging Face safetensors <-> Orbax checkpoints, the proof that a conversion is right, and stage 2's start.

    python convert.py from-hf Olmo-3-1025-7B runs/olmo3_7b                       a run directory that holds step 0
    python convert.py to-hf runs/quickstart exported --dtype bfloat16            loads in AutoModelForCausalLM
    python convert.py check runs/olmo3_7b Olmo-3-1025-7B --length 8192           block by block against transformers
    python convert.py stage2-init runs/stage1/checkpoints/1414078 runs/warm      parameters and moments, step 0

Conversions are streams: one block of one tensor is in memory at a time, from file to file, without torch. What they
write is built in a hidden folder beside DST and renamed when it is complete, so DST is whole or not there; an existing
DST is refused, and so is one that another conversion is building. Names and shapes are checked both ways, but shapes
that match prove nothing: `check` is the proof.

The mapping (HF_NAMES) is renaming, plus a transpose where HF's [out, in] is not our [D, X]; no permutation for RoPE.
Padding rows of the vocabulary are zeros on the way in and are dropped on the way out.

A params item as Orbax lays it out (and as `OrbaxLeaves` reads and writes it): an OCDBT key-value store that holds one
zarr v2 array a leaf, and `_METADATA` that names the leaves. Source of the mapping: OLMo-core nn/hf/convert.py.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import data
import model
from checkpoint import FORMAT_VERSION, DamagedCheckpoint, check_tree, find_checkpoint, orbax_path, read_meta
from config import assemble_config, build, science_dict
from processes import (
    EXIT_PREEMPTED,
    HERE,
    RunFailed,
    check_memory,
    check_room,
    find_config,
    first_line,
    inputs_are_checked,
    read_yaml,
    run_command,
    say,
    sole_writer,
)
from vocabulary import HF_FILES, FoundTokenizer, find_tokenizer

# Leaf -> (Hugging Face name; {} is the layer, transposed). HF's Linear weights are [out, in].
HF_NAMES = {
    "embed": ("model.embed_tokens.weight", False),
    "wq": ("model.layers.{}.self_attn.q_proj.weight", True),
    "wk": ("model.layers.{}.self_attn.k_proj.weight", True),
    "wv": ("model.layers.{}.self_attn.v_proj.weight", True),
    "wo": ("model.layers.{}.self_attn.o_proj.weight", False),
    "q_norm": ("model.layers.{}.self_attn.q_norm.weight", False),
    "k_norm": ("model.layers.{}.self_attn.k_norm.weight", False),
    "attn_norm": ("model.layers.{}.post_attention_layernorm.weight", False),
    "w_gate": ("model.layers.{}.mlp.gate_proj.weight", True),
    "w_up": ("model.layers.{}.mlp.up_proj.weight", True),
    "w_down": ("model.layers.{}.mlp.down_proj.weight", False),
    "ffn_norm": ("model.layers.{}.post_feedforward_layernorm.weight", False),
    "final_norm": ("model.norm.weight", False),
    "lm_head": ("lm_head.weight", False),
}
VOCABULARY = ("embed", "lm_head")  # leaves whose rows are tokens
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
LAYER_TYPES = {"s": "sliding_attention", "f": "full_attention"}
ROWS = 4096  # at most so many rows of embed and lm_head are one chunk and in memory at once
IN_FLIGHT = 2**28  # bytes handed to tensorstore and not yet on disk
DOLMA2 = data.KNOWN_TOKENIZERS["allenai/dolma2-tokenizer"]  # vocabulary, end of text, padding


def expect(ok: bool, what: str, got, expected: str) -> None:
    if not ok:
        raise ValueError(f"{what}: got {got!r}, expected {expected}")


# ----------------------------------------------------------------------------------------------------- plan of tensors


class Piece(NamedTuple):
    """What is moved at once: a matrix or vector of one layer, or some rows of the vocabulary."""

    leaf: str
    at: tuple[slice | int, ...]  # where it lies in our leaf, padding rows included
    shape: tuple[int, ...]  # of that place
    tensor: str  # Hugging Face's name
    rows: slice  # of the tensor's first dimension; shorter than `at` where padding begins
    transposed: bool


def pieces(m: model.ModelConfig) -> Iterator[Piece]:
    """Everything that a model consists of, in Hugging Face's order."""
    ledger, step = model.ledger(m), rows_of_a_chunk(m)

    def vocabulary(leaf: str) -> Iterator[Piece]:
        for a in range(0, m.padded_vocab_size, step):
            rows = slice(min(a, m.vocab_size), min(a + step, m.vocab_size))
            yield Piece(leaf, (slice(a, a + step),), (step, m.d_model), HF_NAMES[leaf][0], rows, False)

    yield from vocabulary("embed")
    for i in range(m.n_layers):
        for leaf in model.LAYER_TENSORS:
            tensor, transposed = HF_NAMES[leaf]
            yield Piece(leaf, (i,), ledger[leaf].shape[1:], tensor.format(i), slice(None), transposed)
    yield Piece("final_norm", (), ledger["final_norm"].shape, HF_NAMES["final_norm"][0], slice(None), False)
    yield from vocabulary("lm_head")


def rows_of_a_chunk(m: model.ModelConfig) -> int:
    """The largest divisor of the padded vocabulary that ROWS allows; Orbax's chunks divide their arrays, too."""
    return max(n for n in range(1, ROWS + 1) if m.padded_vocab_size % n == 0)


def chunk_shape(m: model.ModelConfig, leaf: str) -> tuple[int, ...]:
    shape = model.ledger(m)[leaf].shape
    if leaf in VOCABULARY:
        return rows_of_a_chunk(m), *shape[1:]
    return (1, *shape[1:]) if leaf in model.LAYER_TENSORS else shape


def hf_shapes(m: model.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors and their shapes, in order."""
    shapes = {}
    for p in pieces(m):
        shapes[p.tensor] = p.shape[::-1] if p.transposed else p.shape
        if p.leaf in VOCABULARY:
            shapes[p.tensor] = (m.vocab_size, m.d_model)
    return shapes


class CheckSums:
    """bit_sums of leaves that pass by in pieces: the sum of the 32-bit words modulo 2^32."""

    def __init__(self):
        self.sums = Counter()

    def add(self, key: str, x: np.ndarray) -> None:
        """`key` as jax.tree_util.keystr names the leaf."""
        words = x.astype(np.uint32) if x.dtype == np.bool_ else np.ascontiguousarray(x).reshape(-1).view(np.uint32)
        self.sums[key] = (self.sums[key] + int(np.sum(words, dtype=np.uint32))) % 2**32

    def compare(self, meta: dict, item: str, where: Path) -> None:
        """RunFailed if what was read is not what was saved; a checkpoint without checksums passes."""
        for name, saved in meta.get("checksums", {}).get(item, {}).items():
            if self.sums[name] != saved:
                raise RunFailed(
                    f"{where}: damaged: item {item!r}: {name}: the numbers read are not those that were saved"
                )


# ------------------------------------------------------------------------------------------------------ configurations


def model_config(hf: dict, where: str, compute_dtype: str) -> model.ModelConfig:
    """ModelConfig of a Hugging Face config.json; ValueError for what is not OLMo 3 or what this model cannot do."""

    def need(key: str):
        expect(hf.get(key) is not None, f"{where}: {key}", None, "a value")
        return hf[key]

    def only(key: str, default, allowed: tuple):
        got = hf.get(key, default)
        expect(got in allowed, f"{where}: {key}", got, f"{allowed[0]!r}: this is no OLMo 3 as it is implemented here")

    only("model_type", None, ("olmo3",))
    only("hidden_act", "silu", ("silu",))
    only("attention_bias", False, (False,))
    only("tie_word_embeddings", False, (False,))
    only("attention_dropout", 0.0, (0, None))
    only("clip_qkv", None, (None,))
    heads, width, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    theta, yarn = rope_of(hf, where)
    vocabulary = need("vocab_size")
    raw = {
        "vocab_size": vocabulary,
        "padded_vocab_size": -(-vocabulary // 128) * 128,
        "mask_padded_vocab": True,  # the padding rows are not HF's: outside the softmax the logits are
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or width // heads,
        "d_ff": need("intermediate_size"),
        "window": need("sliding_window"),
        "pattern": pattern_of(hf.get("layer_types"), layers, where),
        "rope_theta": theta,
        "yarn": yarn,
        "norm_eps": need("rms_norm_eps"),
        "init_std": hf.get("initializer_range", 0.02),
        "compute_dtype": compute_dtype,
        "grad_reduce_dtype": "float32",
    }
    return build(model.ModelConfig, raw, where)


def pattern_of(layer_types: list | None, layers: int, where: str) -> str:
    """One letter a layer of the cycle. OLMo 3's cycles are some sliding layers and one full layer behind them."""
    if layer_types is None:  # transformers' own default
        return "sssf"
    letters = {name: letter for letter, name in LAYER_TYPES.items()}
    unknown = sorted(set(layer_types) - set(letters))
    expect(not unknown, f"{where}: layer_types", unknown, " or ".join(letters))
    expect(len(layer_types) == layers, f"{where}: layer_types", len(layer_types), f"{layers} entries, one a layer")
    whole = "".join(letters[name] for name in layer_types)
    cycle = whole[: whole.find("f") + 1] or "s"
    repeats = whole == cycle * (layers // len(cycle))
    expect(repeats, f"{where}: layer_types", whole, "sliding layers and a full one, over and over, as sssfsssf")
    return cycle


def rope_of(hf: dict, where: str) -> tuple[float, dict | None]:
    """(theta, YaRN of the full layers or None) from `rope_parameters` (transformers 5) or `rope_theta` (4)."""
    rope = hf.get("rope_parameters")
    if rope is None:
        expect(hf.get("rope_theta") is not None, f"{where}: rope_theta", None, "a value, or rope_parameters")
        theta = hf["rope_theta"]
        sliding, full = {"rope_type": "default"}, dict(hf.get("rope_scaling") or {"rope_type": "default"})
    else:
        by_type = {name: rope.get(name) for name in LAYER_TYPES.values()}
        if not any(by_type.values()):  # transformers 5.0 to 5.12: one for all layers
            by_type = dict.fromkeys(by_type, rope)
        sliding, full = (dict(by_type[name] or {}) for name in LAYER_TYPES.values())
        thetas = {r.pop("rope_theta", hf.get("rope_theta")) for r in (sliding, full)}
        expect(len(thetas) == 1 and None not in thetas, f"{where}: rope_theta", sorted(map(str, thetas)), "one number")
        theta = thetas.pop()
    kinds = [r.pop("rope_type", None) or r.pop("type", None) or "default" for r in (sliding, full)]
    full.pop("type", None)
    expect(kinds[0] == "default" and not sliding, f"{where}: RoPE of the sliding layers", kinds[0],
           "'default': OLMo 3 scales the full layers only (transformers 5.0 to 5.12 wrote one for all)")  # fmt: skip
    if kinds[1] == "default":
        expect(not full, f"{where}: RoPE of the full layers", full, "no scaling with rope_type 'default'")
        return float(theta), None
    expect(kinds[1] == "yarn", f"{where}: RoPE of the full layers", kinds[1], "'default' or 'yarn'")
    expect("factor" in full and "original_max_position_embeddings" in full, f"{where}: YaRN", sorted(full),
           "factor and original_max_position_embeddings")  # fmt: skip
    yarn = {
        "factor": full.pop("factor"),
        "original_length": full.pop("original_max_position_embeddings"),
        "beta_fast": full.pop("beta_fast", None) or 32.0,
        "beta_slow": full.pop("beta_slow", None) or 1.0,
    }
    attention, rule = full.pop("attention_factor", None), 0.1 * math.log(yarn["factor"]) + 1
    expect(attention is None or abs(attention - rule) < 1e-6, f"{where}: YaRN attention_factor", attention, f"{rule}")
    expect(full.pop("truncate", True) is True, f"{where}: YaRN truncate", False, "true")
    left = {key: value for key, value in full.items() if value is not None}
    expect(not left, f"{where}: YaRN", left, "no further keys")
    return float(theta), yarn


def hf_config(m: model.ModelConfig, form: int, positions: int, dtype: str, ids: dict) -> dict:
    """config.json in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters as well).

    Form 5 keeps the old keys: 4.57 does not know rope_parameters and 5.0 to 5.12 do not know them by layer type; both
    would take another theta without a word. Floats are floats, since types are checked strictly.
    """
    config = {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": m.vocab_size,
        "hidden_size": m.d_model,
        "intermediate_size": m.d_ff,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.n_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "sliding_window": m.window,
        "layer_types": [LAYER_TYPES[letter] for letter in m.pattern] * (m.n_layers // len(m.pattern)),
        "rms_norm_eps": float(m.norm_eps),
        "initializer_range": float(m.init_std),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ids["eos_token_id"],
        "pad_token_id": ids["pad_token_id"],
    }
    if m.head_dim * m.n_heads != m.d_model:
        config["head_dim"] = m.head_dim
    yarn = None
    if m.yarn is not None:
        yarn = {
            "rope_type": "yarn",
            "factor": float(m.yarn.factor),
            "original_max_position_embeddings": m.yarn.original_length,
            "beta_fast": float(m.yarn.beta_fast),
            "beta_slow": float(m.yarn.beta_slow),
            "attention_factor": 0.1 * math.log(m.yarn.factor) + 1,
        }
    theta = float(m.rope_theta)
    config |= {"rope_theta": theta, "rope_scaling": yarn}
    if form == 4:
        return config | {"torch_dtype": dtype, "transformers_version": "4.57.1"}
    plain = {"rope_type": "default", "rope_theta": theta}
    rope = {"sliding_attention": plain, "full_attention": plain if yarn is None else yarn | {"rope_theta": theta}}
    return config | {"rope_parameters": rope, "dtype": dtype, "transformers_version": "5.24.0"}


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read as JSON: {first_line(e)}") from e
    expect(isinstance(content, dict), str(path), type(content).__name__, "an object")
    return content


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------------- safetensors


class HuggingFace:
    """The tensors of a Hugging Face directory, single or sharded, checked against each other and then read in parts."""

    def __init__(self, folder: str):
        self.folder = data.local_path(folder)
        expect(self.folder.is_dir(), folder, "no directory", "a folder with config.json and safetensors files")
        self.config = read_json(self.folder / "config.json")
        self.handles = {}  # shard -> open file
        self.shard_of: dict[str, str] = {}
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        present = {p.name for p in self.folder.glob("*.safetensors")}
        listed: dict[str, str] = {}
        if index.is_file():
            listed = read_json(index).get("weight_map") or {}
            shards = sorted(set(listed.values()))
        else:
            expect(single.is_file(), folder, sorted(present) or "no safetensors file", f"{single.name} or {index.name}")
            shards = [single.name]
        problems = [f"{s}: listed in {index.name} but absent" for s in shards if s not in present]
        problems += [f"{s}: not listed in {index.name}" for s in sorted(present - set(shards))]
        for shard in (s for s in shards if s in present):
            for name in self.open(shard).keys():
                if name in self.shard_of:
                    problems.append(f"{name}: in {self.shard_of[name]} and in {shard}")
                elif listed and listed.get(name) != shard:
                    problems.append(f"{name}: in {shard}, but {index.name} says {listed.get(name, 'nothing')}")
                self.shard_of[name] = shard
        problems += [
            f"{n}: listed for {s} but not there" for n, s in listed.items() if s in present and n not in self.shard_of
        ]
        self.refuse(problems)

    def open(self, shard: str):
        if shard not in self.handles:
            try:  # pread: pages of a mapped file would count as this process's memory
                self.handles[shard] = safe_open(self.folder / shard, framework="np", backend="pread")
            except (SafetensorError, OSError) as e:
                raise ValueError(f"{self.folder / shard}: not a whole safetensors file: {first_line(e)}") from e
        return self.handles[shard]

    def refuse(self, problems: list[str]) -> None:
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ValueError(f"{self.folder}: {'; '.join(problems[:10])}{more}")

    def slice(self, name: str):
        return self.open(self.shard_of[name]).get_slice(name)

    def check(self, expected: dict[str, tuple[int, ...]]) -> set[str]:
        """Exactly these tensors with these shapes, or ValueError with their names; returns the dtypes met."""
        problems = [f"{name}: missing" for name in expected if name not in self.shard_of]
        problems += [f"{name}: unknown tensor" for name in sorted(self.shard_of) if name not in expected]
        dtypes = set()
        for name, shape in expected.items():
            if name in self.shard_of:
                got, dtype = tuple(self.slice(name).get_shape()), self.slice(name).get_dtype()
                dtypes.add(dtype)
                if got != shape:
                    problems.append(f"{name}: got shape {list(got)}, expected {list(shape)}")
                if dtype not in DTYPES:
                    problems.append(f"{name}: got {dtype}, expected one of {', '.join(DTYPES)}")
        self.refuse(problems)
        return dtypes

    def read(self, p: Piece) -> np.ndarray:
        """The piece in our orientation and the file's dtype, without padding rows."""
        try:
            x = self.slice(p.tensor)[p.rows]
        except (SafetensorError, OSError) as e:
            where = self.folder / self.shard_of[p.tensor]
            raise RunFailed(f"{where}: {p.tensor}: cannot be read: {first_line(e)}") from e
        return transpose(x) if p.transposed else x


def transpose(x: np.ndarray, block: int = 256) -> np.ndarray:
    """x.T, contiguous, square by square: several times faster than numpy on matrices beyond the cache."""
    out = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, x.shape[0], block):
        for j in range(0, x.shape[1], block):
            out[j : j + block, i : i + block] = x[i : i + block, j : j + block].T
    return out


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], dtype: np.dtype, parts: Iterator[np.ndarray]) -> None:
    """One safetensors file: length of the header (u64), JSON header, the tensors' bytes in order. `parts` are those
    bytes in any cutting; the library's own writer wants all of a file's tensors in memory."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for part in parts:
            file.write(np.ascontiguousarray(part).view(np.uint8).data)
        assert file.tell() - start == offset
        file.flush()
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------- Orbax on the disk


class OrbaxLeaves:
    """The leaves of one item of a checkpoint, read and written in parts with tensorstore, in Orbax's own layout."""

    def __init__(self, item_folder: Path):
        self.folder, self.opened, self.pending, self.waiting = orbax_path(item_folder), {}, [], 0
        self.whole: tuple[str, np.ndarray] | None = None  # the leaf read last, if it had to be read whole
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def spec(self, leaf: str) -> dict:
        store = {"driver": "file", "path": f"{self.folder}/"}
        return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": store, "path": f"{leaf}/"}}

    def open(self, leaf: str):
        if leaf not in self.opened:
            try:
                self.opened[leaf] = ts.open(self.spec(leaf), open=True, context=self.context).result()
            except ValueError as e:
                raise RunFailed(f"{self.folder}: {leaf}: cannot be read: {first_line(e)}") from e
        return self.opened[leaf]

    def read(self, leaf: str, at=()) -> np.ndarray:
        """A chunk with more rows than are asked for (embed, saved on a large mesh) is decoded once, not every time."""
        try:
            array = self.open(leaf)
            rows = at[0].stop - at[0].start if at and isinstance(at[0], slice) else 1
            if not at or array.chunk_layout.read_chunk.shape[0] <= rows:
                return array[at].read().result()
            if self.whole is None or self.whole[0] != leaf:
                self.whole = None
                self.whole = leaf, array.read().result()
            return self.whole[1][at]
        except ValueError as e:
            raise RunFailed(f"{self.folder}: {leaf}: damaged: {first_line(e)}") from e

    def create(self, leaf: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        layout = {
            "shape": shape,
            "chunks": chunks,
            "dtype": "<f4",
            "compressor": {"id": "zstd", "level": 1},
            "fill_value": None,
            "dimension_separator": ".",
        }
        spec = self.spec(leaf) | {"metadata": layout, "store_data_equal_to_fill_value": True}
        self.opened[leaf] = self.written(ts.open(spec, create=True, context=self.context))

    def write(self, leaf: str, at, x: np.ndarray) -> None:
        """Begin to write; at most IN_FLIGHT bytes wait."""
        self.pending.append((self.open(leaf)[at].write(x), x.nbytes))
        self.waiting += x.nbytes
        while self.waiting > IN_FLIGHT:
            self.finish_one()

    def finish_one(self) -> None:
        future, n = self.pending.pop(0)
        self.written(future)
        self.waiting -= n

    def written(self, future):
        """The result of a write; tensorstore calls a full disk a ValueError."""
        try:
            return future.result()
        except ValueError as e:
            raise RunFailed(f"{self.folder}: cannot be written: {first_line(e)}") from e

    def flush(self) -> None:
        while self.pending:
            self.finish_one()

    def write_metadata(self, shapes: dict[str, tuple[int, ...]]) -> None:
        tree = {
            f"('{leaf}',)": {
                "key_metadata": [{"key": leaf, "key_type": 2}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
            }
            for leaf, shape in sorted(shapes.items())
        }
        content = {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self.folder / "_METADATA").write_text(json.dumps(content))


def finish_step(step_folder: Path, meta: dict) -> None:
    """The meta item and what Orbax leaves beside the items of a complete step."""
    (step_folder / "meta").mkdir()
    (step_folder / "meta" / "metadata").write_text(json.dumps(meta))
    handler = "orbax.checkpoint._src.handlers.{0}_checkpoint_handler.{1}CheckpointHandler"
    handlers = {item: handler.format("pytree", "PyTree") for item in meta["items"]}
    content = {
        "item_handlers": handlers | {"meta": handler.format("json", "Json")},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": time.time_ns(),
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    (step_folder / "_CHECKPOINT_METADATA").write_text(json.dumps(content))
    for folder in (*(step_folder / item for item in meta["items"]), step_folder):
        (folder / "commit_success.txt").write_text(f"Checkpoint commit was successful to {folder.name}")


class Checkpoint(NamedTuple):
    folder: Path  # RUN/checkpoints/N
    meta: dict
    model: model.ModelConfig
    params: OrbaxLeaves

    @property
    def carried(self) -> Path:
        return self.folder.parent.parent / "hf"


def open_checkpoint(path: str) -> Checkpoint:
    """A checkpoint whose params item has the leaves, shapes and dtypes that its own model config asks for."""
    folder = find_checkpoint(path)
    try:
        meta = read_meta(folder)
        m = build(model.ModelConfig, meta["config"].get("model"), f"{folder}: model")
        target = {name: jax.ShapeDtypeStruct(t.shape, np.float32) for name, t in model.ledger(m).items()}
        check_tree(folder / "params", target)
    except DamagedCheckpoint as e:
        raise RunFailed(f"{folder}: {e}") from e
    return Checkpoint(folder, meta, m, OrbaxLeaves(folder / "params"))


@contextlib.contextmanager
def appears_whole(path: str, size: int) -> Iterator[Path]:
    """A hidden folder beside `path` to build `size` bytes in: renamed to it at the end, removed if anything goes wrong.
    Nobody else builds `path` meanwhile, so that what a killed conversion left can be removed, too."""
    dst = data.local_path(path).absolute()
    with sole_writer(dst):
        expect(not dst.exists() and not dst.is_symlink(), path, "something that exists", "a name that is still free")
        for left in dst.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(dst.name)}\.[0-9]+\.tmp", left.name):
                say(f"{left}: left by a conversion that was killed; removing it")
                shutil.rmtree(left)
        check_room(dst, size)
        inputs_are_checked()
        building = dst.with_name(f".{dst.name}.{os.getpid()}.tmp")
        try:
            building.mkdir()
            yield building
            os.rename(building, dst)
        except OSError as e:  # a write or a flush does not say of which file
            if e.filename is None:
                raise OSError(e.errno, e.strerror or str(e), str(dst)) from e
            raise
        finally:
            for _ in range(100):  # writes that were under way may still add a file
                if building.exists():
                    shutil.rmtree(building, ignore_errors=True)
                    time.sleep(0.02)


def progress(total: int, what: str) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None, dynamic_ncols=True)


def versions() -> dict[str, str]:
    return {p: metadata.version(p) for p in ("jax", "orbax-checkpoint", "tensorstore", "safetensors", "numpy")}


# ------------------------------------------------------------------------------------------------------------- from-hf


def from_hf(args) -> dict:
    """SRC -> DST/checkpoints/0/{params,meta} in fp32, and DST/hf with config.json and the tokenizer."""
    orbax_path(data.local_path(args.dst))  # or it is refused before anything is written
    source = HuggingFace(args.src)
    where = str(source.folder / "config.json")
    m = model_config(source.config, where, "float32")  # the shapes, before the files' dtypes are known
    dtypes = sorted(source.check(hf_shapes(m)))
    m = dataclasses.replace(m, compute_dtype="float32" if dtypes == ["F32"] else "bfloat16")
    config = borrowed_config(args.config, source.config, m, where)
    with appears_whole(args.dst, 4 * model.parameter_count(m)) as building:
        step_folder, sums = building / "checkpoints" / "0", CheckSums()
        (step_folder / "params").mkdir(parents=True)
        leaves = OrbaxLeaves(step_folder / "params")
        for leaf, t in model.ledger(m).items():
            leaves.create(leaf, t.shape, chunk_shape(m, leaf))
        with progress(4 * model.parameter_count(m), "from-hf") as bar:
            for p in pieces(m):
                x = source.read(p).astype(np.float32)
                if x.shape != p.shape:  # padding rows
                    x = np.concatenate([x, np.zeros((p.shape[0] - x.shape[0], *p.shape[1:]), np.float32)])
                sums.add(f"['{p.leaf}']", x)
                leaves.write(p.leaf, p.at, x)
                bar.update(x.nbytes)
            leaves.flush()
        leaves.write_metadata({leaf: t.shape for leaf, t in model.ledger(m).items()})
        meta = {
            "format_version": FORMAT_VERSION,
            "step": 0,
            "instances_seen": 0,
            "tokens_seen": 0,
            "items": ["params", "meta"],
            "data": {"sequence_length": config["data"]["sequence_length"]},
            "config": config,
            "checksums": {"params": dict(sums.sums)},
            "source": {"format": "Hugging Face safetensors", "path": args.src, "dtypes": dtypes},
            "versions": versions(),
        }
        finish_step(step_folder, meta)
        (building / "hf").mkdir()
        for name in HF_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, building / "hf" / name)
    made = str(data.local_path(args.dst) / "checkpoints" / "0")
    return {"checkpoint": made, "parameters": model.parameter_count(m, False), "dtypes": dtypes,
            "tensors": len(hf_shapes(m))}  # fmt: skip


def borrowed_config(name: str, hf: dict, m: model.ModelConfig, where: str) -> dict:
    """Science config of the imported checkpoint, so that evaluate.py can open it: the model and the sequence length are
    the file's, no index is named, everything else is noted as in the recipe `name`. Training takes none of it."""
    positions = hf.get("max_position_embeddings")
    expect(type(positions) is int, f"{where}: max_position_embeddings", positions, "a whole number")
    science = read_yaml(find_config(name, HERE / "configs"))
    science["model"] = json.loads(json.dumps(dataclasses.asdict(m)))
    science["data"] |= {"sequence_length": positions, "index": ""}
    science["run"] |= {"name": "imported", "eval_index": None}
    return science_dict(assemble_config(science, where, "cpu", []))


# --------------------------------------------------------------------------------------------------------------- to-hf


def to_hf(args) -> dict:
    """Any checkpoint -> a folder that AutoModelForCausalLM and AutoTokenizer load."""
    source = open_checkpoint(args.src)
    m, dtype = source.model, DTYPES[CODES[args.dtype]]
    positions = source.meta["config"]["data"]["sequence_length"]
    if args.max_position_embeddings is not None:
        positions = args.max_position_embeddings
    for flag, number in (("--max-position-embeddings", positions), ("--max-shard-bytes", args.max_shard_bytes)):
        expect(number > 0, flag, number, "a positive number")
    carried, ids = tokenizer_files(find_tokenizer(args.tokenizer, source.folder, source.meta), m)
    shapes, sums = hf_shapes(m), CheckSums()
    shards = split_shards(shapes, dtype, args.max_shard_bytes)
    by_tensor: dict[str, list[Piece]] = {}
    for p in pieces(m):
        by_tensor.setdefault(p.tensor, []).append(p)

    def parts(tensors) -> Iterator[np.ndarray]:
        for p in (p for tensor in tensors for p in by_tensor[tensor]):
            x = source.params.read(p.leaf, p.at)
            sums.add(f"['{p.leaf}']", x)
            bar.update(x.nbytes)
            if p.leaf in VOCABULARY:
                x = x[: p.rows.stop - p.rows.start]  # padding rows stay here
            yield narrow(transpose(x) if p.transposed else x, dtype, p.tensor)

    size = dtype.itemsize * model.parameter_count(m, False)
    with appears_whole(args.dst, size) as building, progress(4 * model.parameter_count(m), "to-hf") as bar:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            write_shard(building / name, {t: shapes[t] for t in shard}, dtype, parts(shard))
        sums.compare(source.meta, "params", source.folder)
        if len(shards) > 1:
            weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_json(building / "model.safetensors.index.json", index)
        write_json(building / "config.json", hf_config(m, args.transformers, positions, args.dtype, ids))
        for name, content in carried.items():
            if isinstance(content, Path):
                shutil.copyfile(content, building / name)
            else:
                write_json(building / name, content)
    return {"checkpoint": str(source.folder), "path": str(data.local_path(args.dst)), "dtype": args.dtype,
            "files": names, "parameters": model.parameter_count(m, False),
            "tokenizer": sorted({*carried} - {"generation_config.json"}), **ids}  # fmt: skip


def narrow(x: np.ndarray, dtype: np.dtype, tensor: str) -> np.ndarray:
    """To the nearest number of the dtype, ties to even; RunFailed where a finite number would become infinite."""
    if dtype == x.dtype:
        return x
    with np.errstate(over="ignore"):
        y = x.astype(dtype)
    if np.any(np.isinf(y) & np.isfinite(x)):
        raise RunFailed(f"{tensor}: {np.abs(x).max()} does not fit in {dtype.name}; fix: another --dtype")
    return y


def split_shards(shapes: dict[str, tuple[int, ...]], dtype: np.dtype, most: int) -> list[list[str]]:
    """Tensors in order, each shard as full as `most` bytes allow; a larger tensor has a shard of its own."""
    shards, room = [[]], most
    for tensor, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= size
    return shards


def tokenizer_files(found: FoundTokenizer, m: model.ModelConfig) -> tuple[dict[str, Path | dict], dict]:
    """(files to write beside the weights: name -> a file to copy, or content; eos_token_id and pad_token_id as Hugging
    Face has them: a number, several, or null). The ids of dolma2 go without saying for its vocabulary."""
    eos_ids, pad = found.eos_ids, found.pad_id
    if not eos_ids and m.vocab_size == DOLMA2[0]:
        eos_ids, pad = DOLMA2[1:2], DOLMA2[2]
    if found.path is None:
        say(f"no tokenizer goes with the weights: {found.why}; fix: --tokenizer")
    if not eos_ids:
        say("config.json names no end of a text; fix: --tokenizer with a folder that does")
    ids = {"eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None), "pad_token_id": pad}
    files = dict(found.files)
    files.pop("config.json", None)

    def carried(name: str, otherwise: dict) -> dict:
        return read_json(files[name]) if name in files else otherwise

    generation = carried("generation_config.json", {"_from_model_config": True})
    files["generation_config.json"] = generation | {key: value for key, value in ids.items() if value is not None}
    if found.tokenizer is not None:
        # Without this file AutoTokenizer does not know the special tokens. Without the names, which its class may not
        # have, transformers 4 gives generate() token_type_ids, which the model refuses.
        eos, pad = (None if i is None else found.tokenizer.id_to_token(i) for i in (next(iter(eos_ids), None), pad))
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad,
                   "clean_up_tokenization_spaces": False}  # fmt: skip
        names = {"model_input_names": ["input_ids", "attention_mask"]}
        files["tokenizer_config.json"] = names | carried("tokenizer_config.json", special)
    return files, ids


# --------------------------------------------------------------------------------------------------------------- check

THRESHOLDS = {"float32": (1e-3, 1e-4), "bfloat16": (0.25, 0.1)}  # of a block's difference and of the largest token KL
WRONG_YARN = ((5, 0), (5, 13))  # transformers from .. below: one rotary embedding for all layers
CHUNK = 256  # tokens whose logits exist at once


def check(args) -> dict:
    """Our model against transformers: the tensors, every block and the logits, in fp32 and in bf16."""
    for flag, number in (("--threshold", args.threshold), ("--max-kl", args.max_kl)):
        expect(number is None or number >= 0, flag, number, "0 or more")
    source, hf = open_checkpoint(args.checkpoint), HuggingFace(args.hf)
    m, where = source.model, str(hf.folder / "config.json")
    same_architecture(m, model_config(hf.config, where, m.compute_dtype), where)
    hf.check(hf_shapes(m))
    torch, transformers = import_reference()
    version = tuple(int(n) for n in transformers.__version__.split(".")[:2])
    if m.yarn is not None and WRONG_YARN[0] <= version < WRONG_YARN[1] and not args.without_yarn:
        raise ValueError(
            f"transformers {transformers.__version__} is known to be wrong for YaRN: it scales the sliding layers, "
            "too; fix: install 5.24 or 4.57, or pass --without-yarn: both models then run with plain RoPE, which "
            "proves every tensor and all the rest of the maths, but not the YaRN frequencies"
        )
    if args.without_yarn:
        m = dataclasses.replace(m, yarn=None)
    tokens, what = check_tokens(args, source, hf)
    inputs_are_checked()
    if tokens.shape[1] <= m.window:
        say(f"length {tokens.shape[1]} is within the window {m.window}: sliding and full layers see the same keys")
    result = {"checkpoint": str(source.folder), "hf": args.hf, "transformers": transformers.__version__, "tokens": what,
              "sequences": tokens.shape[0], "length": tokens.shape[1], "yarn": m.yarn is not None,
              "tensors": compare_tensors(source, hf)}  # fmt: skip
    failures = []
    if result["tensors"]["different"]:
        worst = result["tensors"]["different"]
        failures.append(f"{len(worst)} tensors differ: {', '.join(list(worst)[:5])}")
    for dtype in [args.dtype] if args.dtype else list(THRESHOLDS):
        given = (args.threshold, args.max_kl)
        block, kl = (x if x is not None else default for x, default in zip(given, THRESHOLDS[dtype], strict=True))
        run = Lockstep(dataclasses.replace(m, compute_dtype=dtype), source.params, tokens)
        result[dtype] = report = run.against(torch, transformers, hf.folder, dtype, args.without_yarn)
        report |= {"threshold": block, "max_kl": kl}
        bad = next((b for b in report["blocks"] if not b["difference"] <= block), None)
        report["first_block_that_differs"] = bad and bad["name"]
        if bad:
            failures.append(f"{dtype}: {bad['name']} differs by {bad['difference']:.3g} (threshold {block:g})")
        if not report["kl_max"] <= kl:
            failures.append(f"{dtype}: largest token KL {report['kl_max']:.3g} (threshold {kl:g})")
        print_table(report, dtype)
    return result | {"failures": failures}


def same_architecture(m: model.ModelConfig, other: model.ModelConfig, where: str) -> None:
    free = ("padded_vocab_size", "mask_padded_vocab", "init_std", "compute_dtype", "grad_reduce_dtype")
    for field in dataclasses.fields(m):
        ours, theirs = getattr(m, field.name), getattr(other, field.name)
        expect(field.name in free or ours == theirs, f"{where}: {field.name}", theirs, f"{ours} as in the checkpoint")


def import_reference():
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as e:
        raise ValueError(f"check: {e}; fix: pip install -r requirements-dev.txt") from e


def check_tokens(args, source: Checkpoint, hf: HuggingFace) -> tuple[np.ndarray, str]:
    """int32 [B, S], and where the ids come from."""
    length = source.meta["config"]["data"]["sequence_length"] if args.length is None else args.length
    expect(length >= 2 and args.sequences >= 1, "--length, --sequences", (length, args.sequences), "2 and 1 or more")
    n = length * args.sequences
    check_memory("--length, --sequences", 16 * n * source.model.d_model)  # activations of both models, fp32
    if args.tokens:
        path = data.local_path(args.tokens)
        fault = data.survey(path, 4)[0]
        if fault is not None:
            raise ValueError(f"--tokens: {fault}")
        ids, what = np.fromfile(path, "<u4", n), args.tokens
        expect(len(ids) == n, args.tokens, f"{len(ids)} tokens", f"{n}; fix: a smaller --length or --sequences")
    elif (hf.folder / "tokenizer.json").is_file():
        text = "\n".join(path.read_text() for path in sorted(HERE.glob("*.py")))
        ids = np.array(data.load_tokenizer(hf.folder / "tokenizer.json").encode(text, add_special_tokens=False).ids)
        ids, what = np.resize(ids, n), "this project's source text"
    else:
        ids, what = np.random.default_rng(0).integers(source.model.vocab_size, size=n), "pseudo-random ids"
        say(f"{hf.folder} holds no tokenizer.json and no --tokens were given: the ids are pseudo-random")
    expect(ids.max() < source.model.vocab_size, what, f"id {ids.max()}", f"ids below {source.model.vocab_size}")
    return ids.astype(np.int32).reshape(args.sequences, length), what


def compare_tensors(source: Checkpoint, hf: HuggingFace) -> dict:
    """Ours, rounded to the file's dtype, against the file's, bit by bit.

    Logits alone would miss a scale on wq, wk, wv, wo, w_up and w_down: a norm follows each of them.
    """
    different, same, sums = {}, set(), CheckSums()
    with progress(4 * model.parameter_count(source.model), "tensors") as bar:
        for p in pieces(source.model):
            ours, theirs = source.params.read(p.leaf, p.at), hf.read(p)
            bar.update(ours.nbytes)
            sums.add(f"['{p.leaf}']", ours)
            ours = ours[: theirs.shape[0]]
            same.add(p.tensor)
            with np.errstate(over="ignore"):
                rounded = ours.astype(theirs.dtype)
            if rounded.tobytes() != theirs.tobytes():
                scale = np.sqrt(np.mean(np.square(theirs.astype(np.float64)))) or 1.0
                worst = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max() / scale)
                different[p.tensor] = max(worst, different.get(p.tensor, 0.0))
    sums.compare(source.meta, "params", source.folder)
    return {"identical": len(same - set(different)), "different": different}


class Lockstep:
    """Our model, block by block, beside a running transformers model: forward hooks hand over what its blocks put out,
    so that no more than one block of ours and one activation are held.

    Each block runs on two inputs at once: on ours (the chain that ends in our logits) and on transformers' own, which
    tells in which block a difference arises.
    """

    def __init__(self, m: model.ModelConfig, params: OrbaxLeaves, tokens_BS: np.ndarray):
        self.m, self.params, self.tokens = m, params, tokens_BS
        self.blocks, self.own, self.theirs = [], None, None
        execution = model.Execution(
            attention="blockwise", attention_block=128, splash=None, remat=None, scan_unroll=1, loss_chunk=CHUNK
        )
        auto = (jax.sharding.AxisType.Auto,) * 4
        mesh = jax.make_mesh((1, 1, 1, 1), model.AXES, devices=jax.devices()[:1], axis_types=auto)
        S, token = tokens_BS.shape[1], P(model.AXES)

        def on_one_device(body):
            """jit of body(weights, x): x and the result are cut (into one) along their first dimension."""
            mapped = jax.shard_map(
                lambda w, x: body(model.vary(w), x), mesh=mesh, in_specs=(P(), token), out_specs=token
            )
            return jax.jit(mapped)

        def block(w, x_ND, kind):
            positions_S = model.vary(jnp.arange(S))
            rope = model.rope_tables(m, positions_S, yarn=kind == "f" and m.yarn is not None)
            window = m.window if kind == "s" and m.window < S else None
            return model.layer(x_ND, w, rope, model.locate(positions_S, None, window, execution), m, execution)

        def logits(w, x_ND):
            x_ND = x_ND.astype(m.compute_dtype)
            head_VD = model.gather_weight(w["lm_head"], 1, m.compute_dtype, m.grad_reduce_dtype)
            out_NV = jnp.einsum("nd,vd->nv", x_ND, head_VD, preferred_element_type=jnp.float32)
            return model.mask_padded_vocab(out_NV, m)

        self.embed = on_one_device(lambda w, tokens: model.embed_tokens(w, tokens, m))
        self.block = {kind: on_one_device(partial(block, kind=kind)) for kind in set(m.pattern)}
        self.norm = on_one_device(lambda w, x_ND: model.rms_norm(x_ND, w["final_norm"], m.norm_eps))
        self.logits = on_one_device(logits)

    def record(self, name: str, own, same_input, theirs, before) -> None:
        """`difference`: on the same input, relative to what the block adds to it; `accumulated`: of the two chains."""
        own, same_input, theirs = (np.asarray(x, np.float32) for x in (own, same_input, theirs))
        added = theirs if before is None else theirs - np.asarray(before, np.float32)
        scale = rms(added) or 1.0
        self.blocks.append({
            "name": name,
            "difference": rms(same_input - theirs) / scale,
            "largest": float(np.abs(same_input - theirs).max()) / scale,
            "accumulated": rms(own - theirs) / (rms(theirs) or 1.0),
        })  # fmt: skip
        self.own, self.theirs = own, theirs

    def step(self, name: str, f, weights: dict, theirs, residual: bool) -> None:
        n = self.own.shape[0]
        both = jnp.asarray(np.concatenate([self.own, self.theirs]), self.m.compute_dtype)
        out = np.asarray(f(weights, both), np.float32)
        self.record(name, out[:n], out[n:], theirs, self.theirs if residual else None)

    def layer_weights(self, i: int) -> dict[str, np.ndarray]:
        return {name: self.params.read(name, (i,)) for name in model.LAYER_TENSORS}

    def against(self, torch, transformers, folder: Path, dtype: str, without_yarn: bool) -> dict:
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(folder)
        if without_yarn:
            ids = {key: getattr(config, key) for key in ("eos_token_id", "pad_token_id")}
            plain = hf_config(self.m, 4, config.max_position_embeddings, dtype, ids)
            config = transformers.AutoConfig.for_model(**plain)
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        base, m = reference.model, self.m

        def after(module, call):
            def hook(_, inputs, out):
                out = out[0] if isinstance(out, tuple) else out
                call(out.detach().float().numpy().reshape(-1, m.d_model))

            module.register_forward_hook(hook)

        def after_embed(theirs):
            ours = self.embed({"embed": self.params.read("embed")}, self.tokens)
            self.record("embedding", ours, ours, theirs, None)

        def after_layer(i, theirs):
            kind = m.pattern[i % len(m.pattern)]
            name = f"block {i} ({LAYER_TYPES[kind].replace('_', ' ')})"
            self.step(name, self.block[kind], self.layer_weights(i), theirs, residual=True)
            bar.update()

        after(base.embed_tokens, after_embed)
        for i, module in enumerate(base.layers):
            after(module, partial(after_layer, i))
        norm = {"final_norm": self.params.read("final_norm")}
        after(base.norm, lambda theirs: self.step("final norm", self.norm, norm, theirs, residual=False))
        with torch.no_grad(), jax.default_matmul_precision("highest"):
            with tqdm(total=m.n_layers, desc=f"blocks in {dtype}", unit="block", disable=None) as bar:
                base(torch.from_numpy(self.tokens.astype(np.int64)), use_cache=False)
            head, metrics = {"lm_head": jnp.asarray(self.params.read("lm_head"))}, []
            for start in tqdm(range(0, self.own.shape[0], CHUNK), desc="logits", unit="chunk", disable=None):
                rows = slice(start, start + CHUNK)
                ours = np.asarray(self.logits(head, jnp.asarray(self.own[rows])))[:, : m.vocab_size]
                hidden = torch.from_numpy(self.theirs[rows]).to(reference.lm_head.weight.dtype)
                metrics.append(token_metrics(ours, reference.lm_head(hidden).float().numpy()))
        per_token = {key: np.concatenate([x[key] for x in metrics]) for key in metrics[0]}
        return {
            "blocks": self.blocks,
            "kl_mean": float(per_token["kl"].mean()),
            "kl_max": float(per_token["kl"].max()),
            "logit_difference_max": float(per_token["logit"].max()),
            "top1_agreement": float(per_token["top1"].mean()),
            "top10_overlap": float(per_token["top10"].mean()),
            "rank_agreement": float(per_token["rank"].mean()),
        }


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def token_metrics(ours_NV: np.ndarray, theirs_NV: np.ndarray) -> dict[str, np.ndarray]:
    """Per token: KL(theirs || ours) in nats, largest logit difference, is the best token the same, and of the ten best
    the share in common and the share at the same rank."""

    def log_probs(x):
        x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_probs(theirs_NV), log_probs(ours_NV)
    best_p, best_q = ten_best(p), ten_best(q)
    return {
        "kl": (np.exp(p) * (p - q)).sum(axis=1),
        "logit": np.abs(ours_NV - theirs_NV).max(axis=1),
        "top1": best_p[:, 0] == best_q[:, 0],
        "top10": (best_p[:, :, None] == best_q[:, None, :]).any(axis=2).mean(axis=1),
        "rank": (best_p == best_q).mean(axis=1),
    }


def ten_best(x_NV: np.ndarray) -> np.ndarray:
    """int [N, 10], best first."""
    ten = np.argpartition(-x_NV, 9, axis=1)[:, :10]
    order = np.argsort(-np.take_along_axis(x_NV, ten, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ten, order, axis=1)


def print_table(report: dict, dtype: str) -> None:
    lines = [f"{dtype:34}{'difference':>12}{'largest':>12}{'accumulated':>13}"]
    for b in report["blocks"]:
        lines.append(f"  {b['name']:32}{b['difference']:12.2e}{b['largest']:12.2e}{b['accumulated']:13.2e}")
    lines.append(
        f"  token KL mean {report['kl_mean']:.2e} max {report['kl_max']:.2e}; logits differ by at most "
        f"{report['logit_difference_max']:.2e}; best token {report['top1_agreement']:.2%}, ten best "
        f"{report['top10_overlap']:.2%}, same rank {report['rank_agreement']:.2%}"
    )
    say("\n".join(lines))


# --------------------------------------------------------------------------------------------------------- stage2-init

RESET = ("losses", "grad_norms", "recorded", "nonfinite_in_a_row", "skipped")  # the skip rule's memory


def stage2_init(args) -> dict:
    """Parameters, both moments and Adam's count of SRC at step 0 of DST, with an empty skip-step window.

    The two items are copied file by file (so bit for bit, whatever mesh wrote them), read once and compared with SRC's
    checksums; then the five small leaves are overwritten.
    """
    orbax_path(data.local_path(args.dst))  # or it is refused before anything is written
    source = open_checkpoint(args.src)
    if not (source.folder / "opt_state").is_dir():
        raise ValueError(
            f"{source.folder}: holds no optimizer state, expected both moments; fix: take a checkpoint that train.py "
            "saved, or start with train.py --init-from and --init-state params"
        )
    files = [f for item in ("params", "opt_state") for f in (source.folder / item).rglob("*") if f.is_file()]
    size = sum(f.stat().st_size for f in files)
    with appears_whole(args.dst, size) as building:
        step_folder = building / "checkpoints" / "0"
        with progress(size, "copying") as bar:
            for f in files:
                to = step_folder / f.relative_to(source.folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(f, to)
                bar.update(f.stat().st_size)
        params, state = OrbaxLeaves(step_folder / "params"), OrbaxLeaves(step_folder / "opt_state")
        verify_copy(source, params, state)
        for leaf in RESET:
            state.write(leaf, (), np.zeros_like(state.read(leaf)))
        state.flush()
        meta = source.meta | {
            "step": 0,
            "instances_seen": 0,
            "tokens_seen": 0,
            "items": ["params", "opt_state", "meta"],
            "stage2_init": True,
            "source": {"format": "checkpoint", "path": str(source.folder), "step": source.meta["step"]},
            "versions": versions(),
        }
        if "opt_state" in meta.get("checksums", {}):
            zeros = {f".{leaf}": 0 for leaf in RESET}
            meta["checksums"] = meta["checksums"] | {"opt_state": meta["checksums"]["opt_state"] | zeros}
        finish_step(step_folder, meta)
        count = int(state.read("count"))
        if source.carried.is_dir():
            shutil.copytree(source.carried, building / "hf")
    return {
        "checkpoint": str(data.local_path(args.dst) / "checkpoints" / "0"),
        "from_step": source.meta["step"],
        "count": count,
    }


def verify_copy(source: Checkpoint, params: OrbaxLeaves, state: OrbaxLeaves) -> None:
    """Every number of the copy can be read and is what was saved."""
    of_params, of_state, m = CheckSums(), CheckSums(), source.model
    with progress(12 * model.parameter_count(m), "verifying") as bar:
        for sums, leaves, leaf, key in (
            (of_params, params, "{}", "['{}']"),
            (of_state, state, "mu.{}", ".mu['{}']"),
            (of_state, state, "nu.{}", ".nu['{}']"),
        ):
            for p in pieces(m):
                x = leaves.read(leaf.format(p.leaf), p.at)
                sums.add(key.format(p.leaf), x)
                bar.update(x.nbytes)
    for leaf in ("count", *RESET):
        of_state.add(f".{leaf}", state.read(leaf))
    of_params.compare(source.meta, "params", source.folder)
    of_state.compare(source.meta, "opt_state", source.folder)


# -------------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, command, what: str, example: str):
        p = verbs.add_parser(
            name, help=what, description=command.__doc__, epilog=f"example: python convert.py {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        p.set_defaults(command=command)
        return p

    ckpt, new = "a run directory (its newest step) or RUN/checkpoints/N", "run directory to make; must not exist"
    p = verb("from-hf", from_hf, "Hugging Face safetensors to an Orbax checkpoint", "Olmo-3-1025-7B runs/olmo3_7b")
    p.add_argument("src", metavar="SRC", help="folder with config.json and safetensors (bf16, fp16 or fp32)")
    p.add_argument("dst", metavar="DST", help=new)
    p.add_argument("--config", default="stage1.yaml", metavar="NAME",
                   help="recipe to note beside the model, for evaluate.py; default: stage1.yaml")  # fmt: skip

    p = verb("to-hf", to_hf, "a checkpoint to Hugging Face safetensors", "runs/quickstart exported --dtype bfloat16")
    p.add_argument("src", metavar="SRC", help=ckpt)
    p.add_argument("dst", metavar="DST", help="folder to make; must not exist")
    p.add_argument("--dtype", choices=sorted(CODES), default="float32", help="default: float32, as stored")
    p.add_argument("--max-shard-bytes", type=int, default=2**30, metavar="N", help="default: 1 GiB")
    p.add_argument("--transformers", type=int, choices=(4, 5), default=5,
                   help="config.json with rope_theta and rope_scaling alone (4) or rope_parameters, too (5, default)")  # fmt: skip
    p.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: the run's sequence length")
    p.add_argument("--tokenizer", metavar="PATH",
                   help="folder or tokenizer.json; default: what from-hf carried, or the run's index")  # fmt: skip

    p = verb("check", check, "our model against transformers", "runs/olmo3_7b Olmo-3-1025-7B --length 8192")
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("hf", metavar="HF", help="Hugging Face folder; transformers holds this model whole in memory")
    p.add_argument("--tokens", metavar="FILE", help="headless uint32; default: this project's source text, tokenised")
    p.add_argument("--length", type=int, metavar="S", help="default: the checkpoint's sequence length")
    p.add_argument("--sequences", type=int, default=1, metavar="B", help="default: 1")
    p.add_argument("--dtype", choices=sorted(THRESHOLDS), help="default: both, one after the other")
    p.add_argument("--threshold", type=float, metavar="X",
                   help="of a block's difference, relative to what it adds; default: 1e-3 in fp32, 0.25 in bf16")  # fmt: skip
    p.add_argument("--max-kl", type=float, metavar="X", help="of any token; default: 1e-4 in fp32, 0.1 in bf16")
    p.add_argument("--without-yarn", action="store_true", help="run both models with plain RoPE")

    p = verb("stage2-init", stage2_init, "parameters and Adam moments as the start of the next stage",
             "runs/stage1 runs/warm\n"
             "then:    python train.py --config stage2.yaml --init-from runs/warm --init-state adam")  # fmt: skip
    p.add_argument("src", metavar="SRC", help=ckpt)
    p.add_argument("dst", metavar="DST", help=new)
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))  # so that a half-built folder is removed
    # Nothing here needs an accelerator, and another process may hold it; JAX_PLATFORMS chooses otherwise.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))

    def command() -> int:
        result = args.command(args)
        print(json.dumps(result, indent=1))
        failures = result.get("failures")
        if failures:
            raise RunFailed(f"{args.checkpoint} and {args.hf} differ: {'; '.join(failures)}")
        return 0

    return run_command("convert.py", command)


if __name__ == "__main__":
    sys.exit(main())
