"""Convert: Hugging Face safetensors <-> Orbax checkpoints, and the proof that a conversion is right.

    python convert.py from-hf Olmo-3-1025-7B runs/olmo3_7b                a run directory that holds step 0
    python convert.py to-hf runs/quickstart exported --dtype bfloat16     loads in AutoModelForCausalLM
    python convert.py check runs/olmo3_7b Olmo-3-1025-7B --length 8192    block by block against transformers

The mapping (HF_NAMES) renames tensors, and transposes those whose [out, in] is not our [D, X]. RoPE needs no permutation.
Padding rows of the vocabulary are zeros on the way in and are dropped on the way out. Names and shapes are checked both
ways, but shapes that match prove nothing: `check` is the proof.

A conversion is a stream without torch. from-hf holds a layer's matrix at a time, to-hf the tensors of one output file.
Either builds in a hidden folder beside DST and renames it when it is complete, so DST is whole or absent. An existing DST
is refused, and so is one that another conversion is building. Source of the mapping: OLMo-core nn/hf/convert.py.
"""

from __future__ import annotations

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
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

import data
import model
from attention import choose_attention
from checkpoint import (
    FORMAT_VERSION,
    check_tree,
    differences,
    find_checkpoint,
    leaf_keys,
    orbax_path,
    read_meta,
    reading,
)
from config import assemble_config, build, pin_settings, science_dict, versions
from hf_config import LAYER_TYPES, expect, hf_config, model_config
from processes import (
    EXIT_PREEMPTED,
    HERE,
    RunFailed,
    add_json,
    add_verb,
    check_memory,
    check_room,
    find_config,
    first_line,
    inputs_are_checked,
    outline,
    read_yaml,
    refuse_moved_verb,
    run_command,
    say,
    sole_writer,
)
from vocabulary import HF_FILES, FoundTokenizer, find_tokenizer

# Leaf -> (Hugging Face's name; {} is the layer, whether it is transposed). A Linear weight of HF is [out, in].
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
ROWS = 4096  # of embed and lm_head are moved at once, at most
IN_FLIGHT = 2**28  # bytes handed to tensorstore and not yet on disk
DOLMA2 = data.KNOWN_TOKENIZERS["allenai/dolma2-tokenizer"]  # vocabulary, end of text, padding


# ----------------------------------------------------------------------------------------------------- plan of tensors


class Piece(NamedTuple):
    """What is moved at once: a matrix or vector of one layer, or some rows of the vocabulary."""

    leaf: str
    at: tuple[slice | int, ...]  # where it lies in our leaf, padding rows included
    shape: tuple[int, ...]  # of that place
    tensor: str  # Hugging Face's name
    rows: slice  # of the tensor's first dimension; fewer than `at` has where padding begins
    transposed: bool


def pieces(config: model.ModelConfig) -> Iterator[Piece]:
    """Everything that a model consists of, in Hugging Face's order."""
    ledger, step, real = model.ledger(config), rows_of_a_chunk(config), config.vocab_size

    def vocabulary(leaf: str) -> Iterator[Piece]:
        for first in range(0, config.padded_vocab_size, step):
            rows = slice(min(first, real), min(first + step, real))
            at = (slice(first, first + step),)
            yield Piece(leaf, at, (step, config.d_model), HF_NAMES[leaf][0], rows, False)

    yield from vocabulary("embed")
    for layer in range(config.n_layers):
        for leaf in model.LAYER_TENSORS:
            tensor, transposed = HF_NAMES[leaf]
            yield Piece(leaf, (layer,), ledger[leaf].shape[1:], tensor.format(layer), slice(None), transposed)
    yield Piece("final_norm", (), ledger["final_norm"].shape, HF_NAMES["final_norm"][0], slice(None), False)
    yield from vocabulary("lm_head")


def rows_of_a_chunk(config: model.ModelConfig) -> int:
    """The largest divisor of the padded vocabulary that ROWS allows. Orbax's chunks divide their arrays, too."""
    return max(n for n in range(1, ROWS + 1) if config.padded_vocab_size % n == 0)


def param_leaves(config: model.ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(t.shape, np.float32) for name, t in model.ledger(config).items()}


def chunk_shapes(config: model.ModelConfig) -> dict[str, tuple[int, ...]]:
    """What `pieces` moves at once of a leaf: a chunk on the disk."""
    return {piece.leaf: piece.shape for piece in pieces(config)}


def hf_shapes(config: model.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors and their shapes, in order."""
    shapes = {}
    for piece in pieces(config):
        shapes[piece.tensor] = piece.shape[::-1] if piece.transposed else piece.shape
        if piece.leaf in VOCABULARY:
            shapes[piece.tensor] = (config.vocab_size, config.d_model)
    return shapes


class CheckSums:
    """checkpoint.checksums of an item that passes by in pieces. A sum modulo 2^32 does not mind the order."""

    def __init__(self):
        self.sums = Counter()

    def add(self, leaf: str, x: np.ndarray) -> None:
        """`leaf`: as OrbaxLeaves names it, embed or mu.embed."""
        field, _, name = leaf.rpartition(".")
        name, words = f"{field and '.'}{field}['{name}']", np.ascontiguousarray(x).reshape(-1).view(np.uint32)
        self.sums[name] = (self.sums[name] + int(np.sum(words, dtype=np.uint32))) % 2**32

    def compare(self, meta: dict, where: Path, item: str = "params") -> None:
        """RunFailed if the numbers read are not those that were saved; a checkpoint without checksums passes."""
        saved = meta.get("checksums", {}).get(item)
        for name, total in self.sums.items() if saved is not None else ():
            if saved.get(name) != total:
                raise RunFailed(f"{where}: damaged: item {item!r}: {name}: got other numbers than were saved")


# ------------------------------------------------------------------------------------------------------------- from-hf


def from_hf(args) -> dict:
    """SRC -> DST/checkpoints/0/{params,meta} in fp32, and DST/hf with config.json and the tokenizer."""
    # Nothing is written before names, shapes and the name of DST are known to be good.
    orbax_path(data.local_path(args.dst))
    source = HuggingFace(args.src)
    where = str(source.folder / "config.json")
    config = model_config(source.config, where, "float32")  # the shapes, before the files' dtypes are known
    dtypes = sorted(source.check(hf_shapes(config)))
    config = dataclasses.replace(config, compute_dtype="float32" if dtypes == ["F32"] else "bfloat16")
    science = borrowed_science(args.config, source.config, config, where)
    size = 4 * model.parameter_count(config)
    with appears_whole(args.dst, size) as building:
        step_folder, sums = building / "checkpoints" / "0", CheckSums()
        (step_folder / "params").mkdir(parents=True)
        leaves = OrbaxLeaves(step_folder / "params")
        leaves.create(param_leaves(config), chunk_shapes(config))
        with progress(size, "from-hf") as bar:
            for piece in pieces(config):
                theirs, x = source.read(piece), np.zeros(piece.shape, np.float32)  # padding rows stay zeros
                x[: len(theirs)] = theirs
                sums.add(piece.leaf, x)
                leaves.write(piece.leaf, piece.at, x)
                bar.update(x.nbytes)
            leaves.flush()
        meta = {
            "format_version": FORMAT_VERSION,
            "step": 0,
            "instances_seen": 0,
            "tokens_seen": 0,
            "items": ["params", "meta"],
            "data": {"sequence_length": science["data"]["sequence_length"]},
            "config": science,
            "checksums": {"params": dict(sums.sums)},
            "source": {"format": "Hugging Face safetensors", "path": args.src, "dtypes": dtypes},
            "versions": versions(),
        }
        finish_step(step_folder, meta)
        (building / "hf").mkdir()
        for name in HF_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, building / "hf" / name)
    return {
        "checkpoint": str(data.local_path(args.dst) / "checkpoints" / "0"),
        "parameters": model.parameter_count(config, False),
        "dtypes": dtypes,
        "tensors": len(hf_shapes(config)),
        "verdict": f"written; next: python convert.py check {args.dst} {args.src}",
    }


def borrowed_science(name: str, hf: dict, config: model.ModelConfig, where: str) -> dict:
    """Science config of the imported checkpoint, so that evaluate.py can open it. The model and the sequence length are
    the file's, and no index is named. The rest is noted as in the recipe `name`; training takes none of it."""
    positions = hf.get("max_position_embeddings")
    expect(type(positions) is int, f"{where}: max_position_embeddings", positions, "a whole number")
    science = read_yaml(find_config(name, HERE / "configs"))
    science["model"] = dataclasses.asdict(config)
    science["data"] |= {"sequence_length": positions, "index": ""}
    science["run"] |= {"name": "imported", "eval_index": None}
    return science_dict(assemble_config(science, where, "cpu", []))


# --------------------------------------------------------------------------------------------------------------- to-hf


def to_hf(args) -> dict:
    """Any checkpoint -> a folder that AutoModelForCausalLM and AutoTokenizer load."""
    source = open_checkpoint(args.src)
    config, dtype = source.model, np.dtype(args.dtype)
    positions = source.meta["config"]["data"]["sequence_length"]
    if args.max_position_embeddings is not None:
        positions = args.max_position_embeddings
    for flag, number in (("--max-position-embeddings", positions), ("--max-shard-bytes", args.max_shard_bytes)):
        expect(number > 0, flag, number, "a positive number")
    carried, ids = tokenizer_files(find_tokenizer(args.tokenizer, source.folder, source.meta), config)
    shapes, sums, of_tensor = hf_shapes(config), CheckSums(), defaultdict(list)
    for piece in pieces(config):
        of_tensor[piece.tensor].append(piece)

    def exported(tensor: str) -> np.ndarray:
        out = np.empty(shapes[tensor], dtype)
        for piece in of_tensor[tensor]:
            x = source.params.read(piece.leaf, piece.at)
            sums.add(piece.leaf, x)
            bar.update(x.nbytes)
            place, x = out[piece.rows], transpose(x) if piece.transposed else x
            place[...] = narrow(x[: len(place)], dtype, tensor)  # padding rows stay here
        return out

    shards = split_shards(shapes, dtype, args.max_shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    size = dtype.itemsize * model.parameter_count(config, False)
    with appears_whole(args.dst, size) as building, progress(4 * model.parameter_count(config), "to-hf") as bar:
        for name, shard in zip(names, shards, strict=True):
            write_shard(building / name, {tensor: exported(tensor) for tensor in shard})
        sums.compare(source.meta, source.folder)
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_json(building / "model.safetensors.index.json", index)
        write_json(building / "config.json", hf_config(config, args.transformers, positions, args.dtype, ids))
        for name, content in carried.items():
            if isinstance(content, Path):
                shutil.copyfile(content, building / name)
            else:
                write_json(building / name, content)
    return {
        "checkpoint": str(source.folder),
        "path": str(data.local_path(args.dst)),
        "dtype": args.dtype,
        "files": names,
        "parameters": model.parameter_count(config, False),
        "tokenizer": sorted({*carried} - {"generation_config.json"}),
        **ids,
        "verdict": f"written; transformers loads it: AutoModelForCausalLM.from_pretrained({args.dst!r})",
    }


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


def tokenizer_files(found: FoundTokenizer, config: model.ModelConfig) -> tuple[dict[str, Path | dict], dict]:
    """(files to write beside the weights: name -> a file to copy, or content; eos_token_id and pad_token_id as Hugging
    Face has them: a number, several, or null). The ids of dolma2 go without saying for its vocabulary."""
    eos_ids, pad = found.eos_ids, found.pad_id
    if not eos_ids and config.vocab_size == DOLMA2[0]:
        eos_ids, pad = DOLMA2[1:2], DOLMA2[2]
    if found.path is None:
        say(f"no tokenizer goes with the weights: {found.why}; fix: --tokenizer")
    if not eos_ids:
        say("config.json names no end of a text; fix: --tokenizer with a folder that does")
    ids = {"eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None), "pad_token_id": pad}
    files = {name: path for name, path in found.files.items() if name != "config.json"}

    def carried(name: str, otherwise: dict) -> dict:
        return read_json(files[name]) if name in files else otherwise

    generation = carried("generation_config.json", {"_from_model_config": True})
    files["generation_config.json"] = generation | {key: value for key, value in ids.items() if value is not None}
    if found.tokenizer is not None:
        # Without this file AutoTokenizer does not know the special tokens. Without model_input_names, which the
        # tokenizer's class may not have, transformers 4 gives generate() token_type_ids, which the model refuses.
        eos, pad = (None if i is None else found.tokenizer.id_to_token(i) for i in (next(iter(eos_ids), None), pad))
        special = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": False,
        }
        names = {"model_input_names": ["input_ids", "attention_mask"]}
        files["tokenizer_config.json"] = names | carried("tokenizer_config.json", special)
    return files, ids


# --------------------------------------------------------------------------------------------------------------- check

THRESHOLDS = {"float32": (1e-3, 1e-4), "bfloat16": (0.25, 0.1)}  # of a block's difference and of the largest token KL
WRONG_YARN = ((5, 0), (5, 13))  # transformers from .. below: one rotary embedding for all layers
CHUNK = 256  # tokens whose logits exist at once
# What does not change the function that the parameters define, or is a matter of training only.
CHECK_MAY_DIFFER = ("padded_vocab_size", "mask_padded_vocab", "init_std", "compute_dtype", "grad_reduce_dtype")


def check(args) -> dict:
    """Our model against transformers: the tensors, every block and the logits, in fp32 and in bf16."""
    for flag, number in (("--threshold", args.threshold), ("--max-kl", args.max_kl)):
        expect(number is None or number >= 0, flag, number, "0 or more")
    source, hf = open_checkpoint(args.checkpoint), HuggingFace(args.hf)
    config, where = source.model, str(hf.folder / "config.json")
    theirs = model_config(hf.config, where, config.compute_dtype)
    for key, ours, other in differences(dataclasses.asdict(config), dataclasses.asdict(theirs)):
        expect(key in CHECK_MAY_DIFFER, f"{where}: {key}", other, f"{ours} as in the checkpoint")
    hf.check(hf_shapes(config))
    torch, transformers = import_reference()
    version = tuple(int(n) for n in transformers.__version__.split(".")[:2])
    if config.yarn is not None and WRONG_YARN[0] <= version < WRONG_YARN[1] and not args.without_yarn:
        raise ValueError(
            f"transformers {transformers.__version__} is known to be wrong for YaRN: it scales the sliding layers, "
            "too; fix: install 5.24 or 4.57, or pass --without-yarn: both models then run with plain RoPE, which "
            "proves every tensor and all the rest of the maths, but not the YaRN frequencies"
        )
    if args.without_yarn:
        config = dataclasses.replace(config, yarn=None)
    tokens, described = check_tokens(args, source, hf)
    inputs_are_checked()
    S = tokens.shape[1]
    if config.window >= S:
        say(f"length {S} is within the window {config.window}: sliding and full layers see the same keys")

    # The tensors first: logits alone would miss a scale that the next norm takes away again.
    result = {
        "checkpoint": str(source.folder),
        "hf": args.hf,
        "transformers": transformers.__version__,
        "tokens": described,
        "sequences": tokens.shape[0],
        "length": S,
        "yarn": config.yarn is not None,
        "tensors": compare_tensors(source, hf),
    }
    failures = []
    if different := result["tensors"]["different"]:
        failures.append(f"{len(different)} tensors differ: {', '.join(list(different)[:5])}")

    # Then every block and the logits, in each dtype.
    for dtype in [args.dtype] if args.dtype else list(THRESHOLDS):
        given = (args.threshold, args.max_kl)
        most, most_kl = (usual if x is None else x for x, usual in zip(given, THRESHOLDS[dtype], strict=True))
        config = dataclasses.replace(config, compute_dtype=dtype)
        reference = load_reference(torch, transformers, hf.folder, config, args.without_yarn)
        report = Lockstep(config, source.params, tokens).against(torch, reference)
        # `not <=`, so that a NaN fails.
        bad = next((block for block in report["blocks"] if not block["difference"] <= most), None)
        report |= {"threshold": most, "max_kl": most_kl, "first_block_that_differs": bad and bad["name"]}
        result[dtype] = report
        if bad:
            failures.append(f"{dtype}: {bad['name']} differs by {bad['difference']:.3g} (threshold {most:g})")
        if not all(kl <= most_kl for kl in (report["kl_max"], report["reverse_kl_max"])):
            kls = f"{report['kl_max']:.3g}, the other way {report['reverse_kl_max']:.3g}"
            failures.append(f"{dtype}: largest token KL {kls} (threshold {most_kl:g})")
        print_table(report, dtype)
    return result | {"failures": failures, "verdict": "different models" if failures else "same model"}


def import_reference():
    """(torch, transformers), which conversions do without."""
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
        if (fault := data.survey(path, 4)[0]) is not None:
            raise ValueError(f"--tokens: {fault}")
        ids, described = np.fromfile(path, "<u4", n), args.tokens
        expect(len(ids) == n, args.tokens, f"{len(ids)} tokens", f"{n}; fix: a smaller --length or --sequences")
    elif (hf.folder / "tokenizer.json").is_file():
        text = "\n".join(path.read_text() for path in sorted(HERE.glob("*.py")))
        ids = np.array(data.load_tokenizer(hf.folder / "tokenizer.json").encode(text, add_special_tokens=False).ids)
        ids, described = np.resize(ids, n), "this project's source text"
    else:
        ids, described = np.random.default_rng(0).integers(source.model.vocab_size, size=n), "pseudo-random ids"
        say(f"{hf.folder} holds no tokenizer.json and no --tokens were given: the ids are pseudo-random")
    expect(ids.max() < source.model.vocab_size, described, f"id {ids.max()}", f"ids below {source.model.vocab_size}")
    return ids.astype(np.int32).reshape(args.sequences, length), described


def compare_tensors(source: Checkpoint, hf: HuggingFace) -> dict:
    """Ours, rounded to the file's dtype, against the file's, bit by bit.

    Logits alone would miss a scale on wq, wk, wv, wo, w_up and w_down: a norm follows each of them.
    """
    different, compared, sums = {}, set(), CheckSums()
    with progress(4 * model.parameter_count(source.model), "tensors") as bar:
        for piece in pieces(source.model):
            ours, theirs = source.params.read(piece.leaf, piece.at), hf.read(piece)
            bar.update(ours.nbytes)
            sums.add(piece.leaf, ours)
            ours = ours[: theirs.shape[0]]
            compared.add(piece.tensor)
            with np.errstate(over="ignore"):
                rounded = ours.astype(theirs.dtype)
            if rounded.tobytes() != theirs.tobytes():
                ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
                worst = float(np.abs(ours - theirs).max() / (rms(theirs) or 1.0))
                different[piece.tensor] = max(worst, different.get(piece.tensor, 0.0))
    sums.compare(source.meta, source.folder)
    return {"identical": len(compared - set(different)), "different": different}


class Lockstep:
    """Our model, block by block, beside a running transformers model. Forward hooks hand over what its blocks put out, so
    that no more than one block of ours and one activation are held.

    Each block runs on two inputs at once: on ours (the chain that ends in our logits) and on transformers' own, which
    tells in which block a difference arises.
    """

    def __init__(self, config: model.ModelConfig, params: OrbaxLeaves, tokens_BS: np.ndarray):
        self.config, self.params, self.tokens = config, params, tokens_BS
        self.blocks, self.own, self.theirs = [], None, None
        attention, key_multiple = choose_attention("blockwise", 128, None, "cpu")
        execution = model.Execution(attention, None, scan_unroll=1, loss_chunk=CHUNK, key_multiple=key_multiple)
        auto = (jax.sharding.AxisType.Auto,) * 4
        mesh = jax.make_mesh((1, 1, 1, 1), model.AXES, devices=jax.devices()[:1], axis_types=auto)
        token = P(model.AXES)  # activations are sharded, into one part, along their first dimension

        def on_one_device(body):
            """jit of body(weights, x)."""
            varying = lambda weights, x: body(model.vary(weights), x)  # noqa: E731
            return jax.jit(jax.shard_map(varying, mesh=mesh, in_specs=(P(), token), out_specs=token))

        def block(w, x_ND, kind):
            positions_S = model.vary(jnp.arange(tokens_BS.shape[1]))
            rope, where = model.geometry(config, positions_S, None, execution)[kind]
            return model.layer(x_ND, w, rope, where, config, execution)

        def logits(w, x_ND):
            head_VD = model.gather_head(w["lm_head"], config)
            return model.head_logits(x_ND.astype(config.compute_dtype), head_VD, config)

        self.embed = on_one_device(lambda w, tokens: model.embed_tokens(w, tokens, config))
        self.block = {kind: on_one_device(partial(block, kind=kind)) for kind in set(config.pattern)}
        self.norm = on_one_device(lambda w, x_ND: model.rms_norm(x_ND, w["final_norm"], config.norm_eps))
        self.logits = on_one_device(logits)

    def step(self, theirs: np.ndarray, name: str, block, leaves, at=(), residual: bool = False) -> None:
        """Run one block of ours where transformers' has put out `theirs`, and note how they differ."""
        weights = {leaf: self.params.read(leaf, at) for leaf in leaves}
        if self.own is None:  # the embedding: both models have the same tokens
            own = same_input = np.asarray(block(weights, self.tokens), np.float32)
        else:
            both = jnp.asarray(np.concatenate([self.own, self.theirs]), self.config.compute_dtype)
            own, same_input = np.split(np.asarray(block(weights, both), np.float32), 2)
        scale = rms(theirs - self.theirs if residual else theirs) or 1.0
        self.blocks.append(
            {
                "name": name,
                "difference": rms(same_input - theirs) / scale,  # on the same input, relative to what the block adds
                "largest": float(np.abs(same_input - theirs).max()) / scale,
                "accumulated": rms(own - theirs) / (rms(theirs) or 1.0),  # of the two chains
            }
        )
        self.own, self.theirs = own, theirs

    def against(self, torch, reference) -> dict:
        """Run both models over the tokens; the report of one dtype."""
        config = self.config

        def after(module, **block):
            def hook(_, inputs, out):
                out = out[0] if isinstance(out, tuple) else out
                self.step(out.detach().float().numpy().reshape(-1, config.d_model), **block)
                bar.update()

            module.register_forward_hook(hook)

        after(reference.model.embed_tokens, name="embedding", block=self.embed, leaves=("embed",))
        for layer, module in enumerate(reference.model.layers):
            kind = config.pattern[layer % len(config.pattern)]
            name = f"block {layer} ({LAYER_TYPES[kind].replace('_', ' ')})"
            block, at = self.block[kind], (layer,)
            after(module, name=name, block=block, leaves=model.LAYER_TENSORS, at=at, residual=True)
        after(reference.model.norm, name="final norm", block=self.norm, leaves=("final_norm",))
        # On a TPU fp32 products are bf16 otherwise, and a difference would say nothing about the conversion.
        with torch.no_grad(), jax.default_matmul_precision("highest"):
            with data.progress_bar(total=config.n_layers + 2, desc=f"blocks in {config.compute_dtype}") as bar:
                reference.model(torch.from_numpy(self.tokens.astype(np.int64)), use_cache=False)
            head, chunks = {"lm_head": jnp.asarray(self.params.read("lm_head"))}, []
            for start in data.progress_bar(range(0, self.own.shape[0], CHUNK), desc="logits", unit="chunk"):
                rows = slice(start, start + CHUNK)
                ours = np.asarray(self.logits(head, jnp.asarray(self.own[rows])))[:, : config.vocab_size]
                hidden = torch.from_numpy(self.theirs[rows]).to(reference.lm_head.weight.dtype)
                chunks.append(token_metrics(ours, reference.lm_head(hidden).float().numpy()))
        per_token = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        return {
            "blocks": self.blocks,
            "kl_mean": float(per_token["kl"].mean()),
            "kl_max": float(per_token["kl"].max()),
            "reverse_kl_mean": float(per_token["reverse_kl"].mean()),
            "reverse_kl_max": float(per_token["reverse_kl"].max()),
            "logit_difference_max": float(per_token["logit"].max()),
            "top1_agreement": float(per_token["top1"].mean()),
        }


def load_reference(torch, transformers, folder: Path, config: model.ModelConfig, without_yarn: bool):
    """transformers' model of the folder; `without_yarn` with plain RoPE on all layers."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoConfig.from_pretrained(folder)
    if without_yarn:
        ids = {key: getattr(theirs, key) for key in ("eos_token_id", "pad_token_id")}
        plain = hf_config(config, 4, theirs.max_position_embeddings, config.compute_dtype, ids)
        theirs = transformers.AutoConfig.for_model(**plain)
    kinds = {"dtype": getattr(torch, config.compute_dtype), "attn_implementation": "sdpa"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=theirs, **kinds).eval()


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def token_metrics(ours_NV: np.ndarray, theirs_NV: np.ndarray) -> dict[str, np.ndarray]:
    """Per token: KL(theirs || ours) and KL(ours || theirs) in nats, largest logit difference, is the best token the same."""

    def log_probs(x):
        x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_probs(theirs_NV), log_probs(ours_NV)
    return {
        "kl": (np.exp(p) * (p - q)).sum(axis=1),
        "reverse_kl": (np.exp(q) * (q - p)).sum(axis=1),
        "logit": np.abs(ours_NV - theirs_NV).max(axis=1),
        "top1": p.argmax(axis=1) == q.argmax(axis=1),
    }


def print_table(report: dict, dtype: str) -> None:
    lines = [f"{dtype:34}{'difference':>12}{'largest':>12}{'accumulated':>13}"]
    for block in report["blocks"]:
        name, *numbers = block.values()
        lines.append("  {:32}{:12.2e}{:12.2e}{:13.2e}".format(name, *numbers))
    lines.append(
        "  token KL mean {kl_mean:.2e} max {kl_max:.2e}, the other way mean {reverse_kl_mean:.2e} max "
        "{reverse_kl_max:.2e}; logits differ by at most {logit_difference_max:.2e}; best token {top1_agreement:.2%}".format(
            **report
        )
    )
    say("\n".join(lines))


# ------------------------------------------------------------------------------------------------------ configurations


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
    """The tensors of a Hugging Face directory, in one file or in several, checked and then read in parts."""

    def __init__(self, folder: str):
        self.folder = data.local_path(folder)
        expect(self.folder.is_dir(), folder, "no directory", "a folder with config.json and safetensors files")
        self.config = read_json(self.folder / "config.json")
        index = self.folder / "model.safetensors.index.json"
        self.listed = (read_json(index).get("weight_map") or {}) if index.is_file() else {}  # tensor -> file
        self.files, self.files_of = {}, defaultdict(list)  # name -> open file; tensor -> names of the files it is in
        for path in sorted(self.folder.glob("*.safetensors")):
            try:  # pread: pages of a mapped file would count as this process's memory
                self.files[path.name] = safe_open(path, framework="np", backend="pread")
            except (SafetensorError, OSError) as e:
                raise ValueError(f"{path}: not a whole safetensors file: {first_line(e)}") from e
            for tensor in self.files[path.name].keys():
                self.files_of[tensor].append(path.name)
        found = sorted(self.files) or "no safetensors file"
        expect(
            index.is_file() or "model.safetensors" in self.files, folder, found, f"model.safetensors or {index.name}"
        )

    def slice(self, tensor: str):
        return self.files[self.files_of[tensor][0]].get_slice(tensor)

    def check(self, expected: dict[str, tuple[int, ...]]) -> set[str]:
        """Exactly these tensors with these shapes, each once and where the index says, or ValueError with the names of the
        others. Returns the dtypes met."""
        problems, dtypes = [], set()
        for tensor in sorted({*expected, *self.listed, *self.files_of}):
            there, listed = self.files_of.get(tensor, []), self.listed.get(tensor)
            if tensor not in expected:
                problems.append(f"{tensor}: unknown tensor (in {' and in '.join(there) or 'the index'})")
            elif not there:
                absent = f"; the index names {listed}, which is absent" if listed and listed not in self.files else ""
                problems.append(f"{tensor}: missing{absent}")
            elif len(there) > 1:
                problems.append(f"{tensor}: in {' and in '.join(there)}")
            elif self.listed and there != [listed]:
                problems.append(f"{tensor}: in {there[0]}, but the index says {listed or 'nothing'}")
            else:
                shape, dtype = tuple(self.slice(tensor).get_shape()), self.slice(tensor).get_dtype()
                dtypes.add(dtype)
                if shape != expected[tensor]:
                    problems.append(f"{tensor}: got shape {list(shape)}, expected {list(expected[tensor])}")
                if dtype not in DTYPES:
                    problems.append(f"{tensor}: got {dtype}, expected one of {', '.join(DTYPES)}")
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ValueError(f"{self.folder}: {'; '.join(problems[:10])}{more}")
        return dtypes

    def read(self, piece: Piece) -> np.ndarray:
        """The piece in our orientation and the file's dtype, without padding rows."""
        try:
            x = self.slice(piece.tensor)[piece.rows]
        except (SafetensorError, OSError) as e:
            where = self.folder / self.files_of[piece.tensor][0]
            raise RunFailed(f"{where}: {piece.tensor}: cannot be read: {first_line(e)}") from e
        return transpose(x) if piece.transposed else x


def transpose(x: np.ndarray, block: int = 256) -> np.ndarray:
    """x.T, contiguous, square by square: several times faster than numpy on matrices beyond the cache."""
    out = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, x.shape[0], block):
        for j in range(0, x.shape[1], block):
            out[j : j + block, i : i + block] = x[i : i + block, j : j + block].T
    return out


def write_shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file, on disk when this returns. transformers wants to be told that the format is pt."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:  # a full disk, too
        raise RunFailed(f"{path}: cannot be written: {first_line(e)}") from e
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------- Orbax on the disk


class OrbaxLeaves:
    """The leaves of an item, read and written in parts with tensorstore, in Orbax's own layout.

    Orbax lays an item out as an OCDBT key-value store that holds one zarr v2 array a leaf, and `_METADATA` that names the
    leaves. Its own `save` wants the whole model in memory: 29 GB for the 7B.
    """

    def __init__(self, item_folder: Path):
        self.folder, self.opened = orbax_path(item_folder), {}
        self.pending, self.waiting = deque(), 0  # writes under way, and their bytes
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
                self.whole = None  # before the next is read
                self.whole = leaf, array.read().result()
            return self.whole[1][at]
        except ValueError as e:
            raise RunFailed(f"{self.folder}: {leaf}: damaged: {first_line(e)}") from e

    def create(self, item, chunks: dict[str, tuple[int, ...]]) -> None:
        """The arrays of all leaves of `item` (shapes and dtypes), still empty, and _METADATA. `chunks`: see chunk_shapes."""
        tree = {}
        for path, x in jax.tree_util.tree_leaves_with_path(item):
            keys, shape = leaf_keys(path), x.shape
            leaf, chunk = ".".join(keys), chunks.get(keys[-1], shape)
            layout = {
                "shape": shape,
                "chunks": (1,) * (len(shape) - len(chunk)) + chunk,
                "dtype": np.dtype(x.dtype).str,
                "compressor": {"id": "zstd", "level": 1},
                "fill_value": None,
                "dimension_separator": ".",
            }
            spec = self.spec(leaf) | {"metadata": layout, "store_data_equal_to_fill_value": True}
            self.opened[leaf] = self.written(ts.open(spec, create=True, context=self.context))
            tree[str(keys)] = {
                "key_metadata": [{"key": key, "key_type": 2} for key in keys],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
            }
        content = {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self.folder / "_METADATA").write_text(json.dumps(content))

    def write(self, leaf: str, at, x: np.ndarray) -> None:
        """Begin to write; at most IN_FLIGHT bytes wait."""
        self.pending.append((self.open(leaf)[at].write(x), x.nbytes))
        self.waiting += x.nbytes
        self.flush(IN_FLIGHT)

    def flush(self, most: int = 0) -> None:
        """Until no more than `most` bytes wait."""
        while self.waiting > most:
            future, size = self.pending.popleft()
            self.written(future)
            self.waiting -= size

    def written(self, future):
        """The result of a write; tensorstore calls a full disk a ValueError."""
        try:
            return future.result()
        except ValueError as e:
            raise RunFailed(f"{self.folder}: cannot be written: {first_line(e)}") from e


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
    """A checkpoint, none of whose numbers are in memory."""

    folder: Path  # RUN/checkpoints/N
    meta: dict
    model: model.ModelConfig
    params: OrbaxLeaves


def open_checkpoint(path: str) -> Checkpoint:
    """A checkpoint whose params item has the leaves, shapes and dtypes that its own model config asks for."""
    folder = find_checkpoint(path)
    with reading(folder):
        meta = read_meta(folder)
        config = build(model.ModelConfig, meta["config"].get("model"), f"{folder}: model")
        check_tree(folder / "params", param_leaves(config))
    return Checkpoint(folder, meta, config, OrbaxLeaves(folder / "params"))


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
    return data.progress_bar(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True)


# -------------------------------------------------------------------------------------------------------- command line

MOVED = {
    "stage2-init": "python train.py --config stage2.yaml --init-from RUN --init-state adam, which takes parameters and "
    "moments of any checkpoint as they are"
}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    ckpt, dtypes = "a run directory (its newest step) or RUN/checkpoints/N", sorted(d.name for d in DTYPES.values())

    p = add_verb(verbs, "from-hf", "Hugging Face safetensors to an Orbax checkpoint",
                 "python convert.py from-hf Olmo-3-1025-7B runs/olmo3_7b", from_hf.__doc__)  # fmt: skip
    p.set_defaults(command=from_hf)
    p.add_argument("src", metavar="SRC", help="folder with config.json and safetensors (bf16, fp16 or fp32)")
    p.add_argument("dst", metavar="DST", help="run directory to make; must not exist")
    p.add_argument("--config", default="stage1.yaml", metavar="NAME",
                   help="recipe to note beside the model, for evaluate.py; default: stage1.yaml")  # fmt: skip

    p = add_verb(verbs, "to-hf", "a checkpoint to Hugging Face safetensors",
                 "python convert.py to-hf runs/quickstart exported --dtype bfloat16", to_hf.__doc__)  # fmt: skip
    p.set_defaults(command=to_hf)
    p.add_argument("src", metavar="SRC", help=ckpt)
    p.add_argument("dst", metavar="DST", help="folder to make; must not exist")
    p.add_argument("--dtype", choices=dtypes, default="float32", help="default: float32, as stored")
    p.add_argument("--max-shard-bytes", type=int, default=2**30, metavar="N",
                   help="of one file, which is held in memory; default: 1 GiB")  # fmt: skip
    p.add_argument("--transformers", type=int, choices=(4, 5), default=5,
                   help="config.json with rope_theta and rope_scaling alone (4) or rope_parameters, too (5, default)")  # fmt: skip
    p.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: the run's sequence length")
    p.add_argument("--tokenizer", metavar="PATH",
                   help="folder or tokenizer.json; default: what from-hf carried, or the run's index")  # fmt: skip

    p = add_verb(verbs, "check", "our model against transformers",
                 "python convert.py check runs/olmo3_7b Olmo-3-1025-7B --length 8192", check.__doc__)  # fmt: skip
    p.set_defaults(command=check)
    p.add_argument("checkpoint", metavar="CKPT", help=ckpt)
    p.add_argument("hf", metavar="HF", help="Hugging Face folder; transformers holds this model whole in memory")
    p.add_argument("--tokens", metavar="FILE", help="headless uint32; default: this project's source text, tokenised")
    p.add_argument("--length", type=int, metavar="S", help="default: the checkpoint's sequence length")
    p.add_argument("--sequences", type=int, default=1, metavar="B", help="default: 1")
    p.add_argument("--dtype", choices=sorted(THRESHOLDS), help="default: both, one after the other")
    p.add_argument("--threshold", type=float, metavar="X",
                   help="of a block's difference, relative to what it adds; default: 1e-3 in fp32, 0.25 in bf16")  # fmt: skip
    p.add_argument("--max-kl", type=float, metavar="X",
                   help="of any token, either way; default: 1e-4 in fp32, 0.1 in bf16")  # fmt: skip
    p.add_argument("--without-yarn", action="store_true", help="run both models with plain RoPE")
    for p in verbs.choices.values():
        add_json(p)
    return parser.parse_args(argv)


def main(argv=None) -> int:
    refuse_moved_verb("convert.py", argv, MOVED)
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))  # so that a half-built folder is removed
    # Nothing here needs an accelerator, and another process may hold it; JAX_PLATFORMS chooses otherwise.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))

    def command() -> None:
        pin_settings()
        result = args.command(args)
        print(json.dumps(result, indent=1) if args.json else outline(result))
        if failures := result.get("failures"):
            raise RunFailed(f"{args.checkpoint} and {args.hf} differ: {'; '.join(failures)}")

    return run_command("convert.py", command)


if __name__ == "__main__":
    sys.exit(main())
