"""Multi-token prediction: the model of model.py, which also learns to predict the tokens after the next one.

    h^0_i = the hidden state of model.py at position i, after its last norm
    h'^k_i = M_k [RMSNorm(h^(k-1)_i); RMSNorm(Emb(t_(i+k)))]        M_k: [D, 2D]
    h^k = layer_k(h'^k)                                              one more layer of model.py, full attention
    CE^k_i = -log softmax(lm_head RMSNorm(h^k_i))[t_(i+k+1)]
    loss = CE + z-loss + mtp_weight / depth * sum over k = 1..depth of the mean of CE^k

Embedding and head are the model's own; each depth adds a layer, M_k and three norms. After training they are left out,
or draft tokens for speculative decoding, which is not here. The gradients of CE^k reach the whole model: that is the point.

Which variant and why: that of DeepSeek-V3 (arXiv:2412.19437, section 2.2; Megatron-LM's and MaxText's too). Depth k sees
the token between, so it predicts t_(i+k+1) from t_1..t_(i+k) and keeps the causal chain. Gloeckle et al. 2024
(arXiv:2404.19737) give each distance a head of its own on h^0, side by side, and no token between. The case study's
weight, 0.1, is that of DeepSeek-V3's last 4.3 T tokens (0.3 before) and the default of Megatron-LM.

What differs from DeepSeek-V3: the layer is OLMo 3's (dense, norms behind the sub-layers), h^0 is normed once more by
model.py's last norm, and the means are over all labels of the batch, as the main loss takes them. A position counts at
depth k if it and the k positions after it have labels. As in the main loss, the end of a document ends nothing.

The next-token CE is what is logged and evaluated as before; train/mtp_ce stands beside it, the mean over depths.

Sharding: as model.py; M_k is cut over fsdp and the same along tensor. One more collective: the columns t_(i+1) that a
context shard lacks come from its neighbour on the right.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import model
from model import LAYER_TENSORS, Execution, Tensor, check_mesh, layer

__all__ = ["ModelConfig", "TokenLoss", "check_mesh", "init_params", "layer", "ledger", "reduce_gradients", "token_loss"]


@dataclass(frozen=True)
class ModelConfig(model.ModelConfig):
    module: str
    mtp_depth: int  # tokens predicted beyond the next one
    mtp_weight: float

    def __post_init__(self):
        super().__post_init__()
        if self.mtp_depth < 1:
            raise ValueError(f"model.mtp_depth: got {self.mtp_depth}, expected 1 or more; fix: model.py alone for none")
        if not 0 <= self.mtp_weight < 10:
            raise ValueError(f"model.mtp_weight: got {self.mtp_weight}, expected 0 to 10")

    @property
    def kinds(self) -> str:
        return super().kinds + "f" * self.mtp_depth


def ledger(config: ModelConfig) -> dict[str, Tensor]:
    """model.py's, whose head is used once more a depth, and what each depth adds, stacked over depths."""
    table, depth, D = model.ledger(config), config.mtp_depth, config.d_model
    table["lm_head"] = table["lm_head"]._replace(uses=1 + depth)
    more = {name: table[name]._replace(shape=(depth, *table[name].shape[1:])) for name in LAYER_TENSORS}
    norm = Tensor((depth, D), P(), None, True)
    more |= {"project": Tensor((depth, D, 2 * D), P(None, "fsdp", None), config.init_std, True)}
    more |= {"hidden_norm": norm, "embed_norm": norm, "final_norm": norm}
    return table | {f"mtp_{name}": tensor for name, tensor in more.items()}


init_params = partial(model.init_params, ledger=ledger)
reduce_gradients = partial(model.reduce_gradients, ledger=ledger)


class TokenLoss(NamedTuple):
    """As model.TokenLoss, of the next token; and the mean over depths of CE^k, 0 where it does not count. fp32 [B, S]."""

    ce_N: jax.Array
    lse_squared_N: jax.Array
    mtp_ce_N: jax.Array


def one_later(x_BS):
    """x_i -> x_(i+1) over the whole sequence, of which a device holds S positions; 0 behind its end."""
    shards = lax.axis_size("context")
    to_the_left = [(i, i - 1) for i in range(1, shards)]
    first_B1 = x_BS[:, :1]
    if shards == 1:
        next_B1 = jnp.zeros_like(first_B1)
    else:
        next_B1 = lax.ppermute(first_B1, "context", to_the_left)  # [B, 1] moves one shard to the left; the last gets 0
    return jnp.concatenate([x_BS[:, 1:], next_B1], axis=1)


def deeper(h_ND, embedded_ND, w, rope, where, config: ModelConfig, execution: Execution):
    """h^(k-1), Emb(t_(i+k)) -> h^k. `w`: the tensors of depth k, as they are sharded."""
    with jax.named_scope("mtp"):
        eps = config.norm_eps
        pair = [model.rms_norm(h_ND, w["hidden_norm"], eps), model.rms_norm(embedded_ND, w["embed_norm"], eps)]
        project_DC = model.gather_weight(w["project"], config)  # C = 2D
        x_ND = jnp.einsum("nc,dc->nd", jnp.concatenate(pair, axis=1), project_DC)
        # The slot of a full layer: what Execution.remat saves of that it saves here.
        slot = max(config.pattern.rfind("f"), 0)
        return layer(x_ND, {name: w[name] for name in LAYER_TENSORS}, rope, where, config, execution, slot)


def token_loss(params, batch, z_loss: float, config: ModelConfig, execution: Execution):
    """(sum over labels of loss_mask * (CE + z_loss * lse^2) + mtp_weight * the mean over depths of CE^k, TokenLoss [B, S]).

    local: as in model.token_loss.
    """
    tokens_BS, segments_BS = batch["tokens"], batch["segment_ids"]
    S = tokens_BS.shape[1]

    def head_loss(x_ND, labels_BS, mask_BS, z_loss):
        with jax.named_scope("loss"):
            labels_N, mask_N = labels_BS.reshape(-1), mask_BS.reshape(-1).astype(jnp.float32)
            chunk = min(execution.loss_chunk, x_ND.shape[0])
            total, per_token = model.cross_entropy(x_ND, params["lm_head"], labels_N, mask_N, z_loss, config, chunk)
        return total, *(x.reshape(tokens_BS.shape) for x in per_token)

    # What model.py computes.
    h_ND = model.hidden_states(params, tokens_BS, segments_BS, config, execution)
    total, ce_BS, lse_squared_BS = head_loss(h_ND, batch["labels"], batch["loss_mask"], z_loss)

    # At depth k a position's input is t_(i+k), the label of depth k-1, and its label is one later.
    positions_S = model.vary(lax.axis_index("context") * S + jnp.arange(S))
    rope, where = model.geometry(config, positions_S, segments_BS, execution)["f"]
    step = partial(deeper, rope=rope, where=where, config=config, execution=execution)
    step = model.recompute(step, config, execution)
    labels_BS, counts_BS = batch["labels"], batch["loss_mask"].astype(jnp.int32)
    later_BS, mtp_ce_BS, share = counts_BS, jnp.zeros_like(ce_BS), 1 / config.mtp_depth
    for k in range(config.mtp_depth):
        w = {name.removeprefix("mtp_"): x[k] for name, x in params.items() if name.startswith("mtp_")}
        embedded_ND = model.embed_tokens(params, labels_BS, config, execution.take_rows)
        h_ND = step(h_ND, embedded_ND, w)
        labels_BS, later_BS = one_later(labels_BS), one_later(later_BS)
        counts_BS = counts_BS * later_BS
        x_ND = model.rms_norm(h_ND, w["final_norm"], config.norm_eps)
        mtp_total, depth_ce_BS, _ = head_loss(x_ND, labels_BS, counts_BS, 0.0)
        total = total + config.mtp_weight * share * mtp_total
        mtp_ce_BS = mtp_ce_BS + share * jnp.where(counts_BS != 0, depth_ce_BS, 0.0)
    return total, TokenLoss(ce_BS, lse_squared_BS, mtp_ce_BS)
