"""Hugging Face's config.json of an Olmo 3 model <-> ModelConfig, both ways.

What has no counterpart here is refused rather than dropped: biases, another activation, another kind of RoPE. YaRN is on
the full layers alone, which transformers writes in two forms. Source: OLMo-core nn/hf/config.py; transformers
models/olmo3/configuration_olmo3.py.
"""

from __future__ import annotations

import math

import model
from config import build

# What OLMo 3 is beside its numbers, and what it is where a file does not say.
OLMO3 = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False}
# Key of config.json -> field of ModelConfig, the same number in both.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "sliding_window": "window",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
LAYER_TYPES = {"s": "sliding_attention", "f": "full_attention"}


def expect(ok: bool, what: str, got, expected: str) -> None:
    if not ok:
        raise ValueError(f"{what}: got {got!r}, expected {expected}")


def model_config(hf: dict, where: str, compute_dtype: str) -> model.ModelConfig:
    """ModelConfig of a Hugging Face config.json; ValueError for what is not OLMo 3 or what this model cannot do."""
    for key, ours in {"model_type": "olmo3", **OLMO3, "clip_qkv": None}.items():
        got = hf.get(key, None if key == "model_type" else ours)
        allowed = got == ours or (key == "attention_dropout" and got is None)
        expect(allowed, f"{where}: {key}", got, f"{ours!r}: this is no OLMo 3 as it is implemented here")
    stated = {key: value for key, value in hf.items() if value is not None}
    stated = {"num_key_value_heads": hf.get("num_attention_heads"), "initializer_range": 0.02} | stated
    for key in FIELDS:
        expect(stated.get(key) is not None, f"{where}: {key}", None, "a value")
    raw = {field: stated[key] for key, field in FIELDS.items()}
    rope, yarn = rope_of(hf), None
    full = rope["full_attention"]
    if full["rope_type"] == "yarn":
        yarn = {
            "factor": full.get("factor"),
            "original_length": full.get("original_max_position_embeddings"),
            "beta_fast": full.get("beta_fast", 32.0),
            "beta_slow": full.get("beta_slow", 1.0),
        }
    raw |= {
        "padded_vocab_size": -(-raw["vocab_size"] // 128) * 128,
        "mask_padded_vocab": True,  # the padding rows are not HF's: outside the softmax the logits are
        "head_dim": stated.get("head_dim") or raw["d_model"] // raw["n_heads"],
        "pattern": pattern_of(hf.get("layer_types"), raw["n_layers"], where),
        "rope_theta": full["rope_theta"],
        "yarn": yarn,
        "compute_dtype": compute_dtype,
        "grad_reduce_dtype": "float32",
    }
    config = build(model.ModelConfig, raw, where)
    check_rope(rope, config, where)
    return config


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


def rope_of(hf: dict) -> dict[str, dict]:
    """RoPE by the kind of layer, as transformers 5.13 writes it, of any form of config.json. Keys that are null are left
    out."""
    kinds = LAYER_TYPES.values()
    rope = hf.get("rope_parameters")
    if rope is None:  # transformers 4
        by_kind = {"sliding_attention": {}, "full_attention": hf.get("rope_scaling") or {}}
    elif any(rope.get(kind) for kind in kinds):
        by_kind = {kind: rope.get(kind) or {} for kind in kinds}
    else:  # transformers 5.0 to 5.12: one for all layers
        by_kind = dict.fromkeys(kinds, rope)
    found = {}
    for kind, given in by_kind.items():
        given = {key: value for key, value in given.items() if value is not None}
        old_name = given.pop("type", "default")
        found[kind] = {"rope_type": old_name, "rope_theta": hf.get("rope_theta")} | given
    return found


def check_rope(rope: dict[str, dict], config: model.ModelConfig, where: str) -> None:
    """Every key that the file states is what this model computes; ValueError names the first that is not."""
    for kind, ours in hf_rope(config).items():
        ours |= {"truncate": True}  # of the range between the two betas, as transformers does unless it is told not to
        for key, got in rope[kind].items():
            same = got == ours.get(key)
            if key == "attention_factor" and key in ours:
                same = math.isclose(got, ours[key], abs_tol=1e-6)
            expected = repr(ours[key]) if key in ours else "no such key"
            hint = "OLMo 3 has one theta, and YaRN or nothing on its full layers only"
            expect(same, f"{where}: RoPE of {kind}: {key}", got, f"{expected} ({hint})")


def hf_rope(config: model.ModelConfig) -> dict[str, dict]:
    """rope_parameters of transformers 5. Floats are floats, since transformers checks types strictly."""
    plain, yarn = {"rope_type": "default", "rope_theta": float(config.rope_theta)}, {}
    if config.yarn is not None:
        yarn = {
            "rope_type": "yarn",
            "factor": float(config.yarn.factor),
            "original_max_position_embeddings": config.yarn.original_length,
            "beta_fast": float(config.yarn.beta_fast),
            "beta_slow": float(config.yarn.beta_slow),
            "attention_factor": model.rope_frequencies(config, yarn=True)[1],
        }
    return {"sliding_attention": dict(plain), "full_attention": plain | yarn}


def hf_config(config: model.ModelConfig, form: int, positions: int, dtype: str, ids: dict) -> dict:
    """config.json in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters as well).

    Form 5 keeps the old keys: 4.57 does not know rope_parameters and 5.0 to 5.12 do not know them by layer type. Both
    would take another theta without a word.
    """
    rope = hf_rope(config)
    scaling = {key: value for key, value in rope["full_attention"].items() if key != "rope_theta"}
    written = {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **OLMO3,
        **{key: getattr(config, field) for key, field in FIELDS.items()},
        "max_position_embeddings": positions,
        "layer_types": [LAYER_TYPES[kind] for kind in config.pattern] * (config.n_layers // len(config.pattern)),
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ids["eos_token_id"],
        "pad_token_id": ids["pad_token_id"],
        "rope_theta": float(config.rope_theta),
        "rope_scaling": None if config.yarn is None else scaling,
    }
    if config.head_dim * config.n_heads != config.d_model:
        written["head_dim"] = config.head_dim
    if form == 4:
        return written | {"torch_dtype": dtype, "transformers_version": "4.57.1"}
    return written | {"rope_parameters": rope, "dtype": dtype, "transformers_version": "5.24.0"}
