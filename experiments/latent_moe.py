"""LatentMoE: the feed-forward of model.py becomes a shared expert and many small experts that work in a narrower space.

    y = SwiGLU_shared(x) + W_out sum over the top k experts e of x of  g_e SwiGLU_e(W_in x)         W_in: D -> U < D
    p = softmax(W_router x)        g_e = p_e / sum of p over the top k

Router and shared expert see the whole width D; only what is routed is narrow. Both what is sent and an expert's weights
shrink by D/U, and this is spent on D/U times as many experts, of which a token takes D/U times as many.

Source: Elango et al. 2026, NVIDIA, "LatentMoE: Toward Optimal Accuracy per FLOP and Parameter in Mixture of Experts"
(arXiv:2601.18089); Nemotron 3 Super and Ultra are built so (arXiv:2512.20856). Which variant and why: l-MoE_acc, which
raises the experts and the choices of a token; l-MoE_eff keeps the choices. The paper recommends the former, and D/U = 4.

What differs from Nemotron 3: SwiGLU as in model.py, not squared ReLU; a softmax router, weights that sum to 1; a loss for
balance and no bias on the scores, since such a bias is a state beside the parameters. All layers are alike. Attention,
norms (behind the sub-layer, over shared and routed experts together), embedding and head are model.py's.

Balance, DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, eq. 17 to 20), of each layer, over a sequence of T tokens:

    balance = sum over experts e of f_e P_e     f_e = X / (k T) * tokens that chose e     P_e = mean of p_e    (1: balanced)
    loss = CE + z-loss + balance_weight * mean over labels of the sum over layers of balance

It is logged as train/balance (mean over layers), apart from CE. A sequence is never split over batches, so the loss does
not depend on mesh or micro-batch, as one over "the local batch" would.

Capacity: not dropless. Tokens are taken in groups of `group` neighbours of one sequence. Of each group an expert takes the
first Q = ceil(capacity * group * k / X) tokens that chose it; of later ones this expert's part is left out (train/dropped:
the share of choices). Shapes are static and no device can be flooded. Groups do not depend on the mesh, and a token's place
depends on earlier tokens alone, so that the model stays causal. capacity = X / k drops nothing.

Sharding: experts over fsdp, X / fsdp whole ones on each device; they never move. Their width M is cut over tensor. One
all_to_all over fsdp takes tokens to their experts, one takes the results back.

Dimensions beside model.py's: X experts, J = k choices, U latent width, M width of an expert, Z groups, Q places of an
expert in a group, Y = Z*Q places of an expert for the tokens of one device.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import model
from model import LAYER_TENSORS, Execution, Tensor, save_as, vary

__all__ = ["ModelConfig", "TokenLoss", "check_mesh", "init_params", "ledger", "reduce_gradients", "token_loss"]


@dataclass(frozen=True)
class ModelConfig(model.ModelConfig):
    """d_ff is the width of the shared expert."""

    module: str
    n_experts: int
    top_k: int
    d_latent: int
    d_expert: int
    group: int  # tokens
    capacity: float  # places of an expert over its fair share of a group
    balance_weight: float

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_experts", "d_latent", "d_expert", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: got {getattr(self, name)}, expected a positive number")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"model.top_k: got {self.top_k}, expected 1 to n_experts {self.n_experts}")
        if not 0 < self.capacity < math.inf or not 0 <= self.balance_weight < math.inf:
            raise ValueError(f"model.capacity, balance_weight: got {self.capacity}, {self.balance_weight}, expected above 0, "
                             "0 or more")  # fmt: skip

    @property
    def places(self) -> int:
        """Q: of an expert in a group."""
        return min(math.ceil(self.capacity * self.group * self.top_k / self.n_experts), self.group)


def ledger(config: ModelConfig) -> dict[str, Tensor]:
    """model.py's, and per layer: router, the two latent projections, and the experts, cut by expert and not by width."""
    L, D, std = config.n_layers, config.d_model, config.init_std
    X, U, M = config.n_experts, config.d_latent, config.d_expert
    expert = Tensor((L, X, U, M), P(None, "fsdp", None, "tensor"), std, True, uses=config.top_k / X)
    return model.ledger(config) | {
        "w_router": Tensor((L, D, X), P(None, "fsdp", None), std, True),
        "w_latent_in": Tensor((L, D, U), P(None, "fsdp", None), std, True),
        "w_latent_out": Tensor((L, D, U), P(None, "fsdp", None), std, True),
        "expert_gate": expert,
        "expert_up": expert,
        "expert_down": expert,
    }


EXPERTS = ("expert_gate", "expert_up", "expert_down")
OWN = ("w_router", "w_latent_in", "w_latent_out", *EXPERTS)
init_params = partial(model.init_params, ledger=ledger)
reduce_gradients = partial(model.reduce_gradients, ledger=ledger)


def check_mesh(config: ModelConfig, sizes: dict[str, int], sequence_length: int) -> None:
    model.check_mesh(config, sizes, sequence_length)
    for name, size, axis in (("n_experts", config.n_experts, "fsdp"), ("d_expert", config.d_expert, "tensor")):
        if size % sizes[axis]:
            raise ValueError(f"model.{name}: got {size}, expected a multiple of the mesh's {axis} size {sizes[axis]}")
    if (sequence_length // sizes["context"]) % config.group:
        raise ValueError(f"model.group: got {config.group}, expected a divisor of the {sequence_length} tokens of a sequence "
                         f"over the mesh's context size {sizes['context']}")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the experts


class Routes(NamedTuple):
    """Where each choice of each token goes."""

    weight_NJ: jax.Array  # g, fp32
    fits_NJ: jax.Array  # bool; False: dropped
    place_NJ: jax.Array  # in [X * Y], expert by expert; X * Y: nowhere
    chosen_NX: jax.Array  # bool
    probs_NX: jax.Array  # p, fp32


def route(x_ND, w_router, config: ModelConfig) -> Routes:
    """The top k experts of each token, and its place among the tokens that they take."""
    N, X, Q = x_ND.shape[0], config.n_experts, config.places
    Z = N // config.group
    probs_NX = jax.nn.softmax(jnp.einsum("nd,dx->nx", x_ND, w_router, preferred_element_type=jnp.float32), axis=-1)
    weight_NJ, expert_NJ = lax.top_k(probs_NX, config.top_k)
    weight_NJ = weight_NJ / jnp.sum(weight_NJ, axis=-1, keepdims=True)
    chosen_NX = jnp.any(expert_NJ[:, :, None] == jnp.arange(X), axis=1)
    # An expert's queue in a group: how many earlier tokens of the group chose it.
    chosen_ZX = chosen_NX.reshape(Z, config.group, X).astype(jnp.int32)
    queue_NX = (jnp.cumsum(chosen_ZX, axis=1) - chosen_ZX).reshape(N, X)
    queue_NJ = jnp.take_along_axis(queue_NX, expert_NJ, axis=1)
    group_N1 = jnp.arange(N)[:, None] // config.group
    fits_NJ = queue_NJ < Q
    place_NJ = jnp.where(fits_NJ, (expert_NJ * Z + group_N1) * Q + queue_NJ, X * Z * Q)
    return Routes(weight_NJ, fits_NJ, place_NJ, chosen_NX, probs_NX)


def experts(x_ND, w, routes: Routes, config: ModelConfig, slot: int):
    """The routed part of the feed-forward, [N, D]. `w`: a layer's tensors, the experts' as they are sharded."""
    with jax.named_scope("experts"):
        X, Y = config.n_experts, x_ND.shape[0] // config.group * config.places
        latent_NU = x_ND @ w["w_latent_in"]
        # A token is copied to each of its places. Places that no token has hold zeros; what is behind the end is dropped.
        sent_PU = vary(jnp.zeros((X * Y, config.d_latent), latent_NU.dtype))
        sent_PU = sent_PU.at[routes.place_NJ].set(latent_NU[:, None, :], mode="drop")
        sent_XYU = sent_PU.reshape(X, Y, -1)
        at_XYU = lax.all_to_all(sent_XYU, "fsdp", 0, 1, tiled=True)  # [X, Y, U] -> [X/fsdp, fsdp*Y, U]: to the experts
        gate = save_as("gate", slot, jnp.einsum("xyu,xum->xym", at_XYU, w["expert_gate"]))
        up = save_as("up", slot, jnp.einsum("xyu,xum->xym", at_XYU, w["expert_up"]))
        out_XYU = jnp.einsum("xym,xum->xyu", model.swiglu(gate, up), w["expert_down"])
        back_XYU = lax.all_to_all(
            out_XYU, "fsdp", 1, 0, tiled=True
        )  # [X/fsdp, fsdp*Y, U] -> [X, Y, U]: to their tokens
        of_NJU = back_XYU.reshape(X * Y, -1).at[routes.place_NJ].get(mode="fill", fill_value=0)
        sum_NU = jnp.einsum("nj,nju->nu", routes.weight_NJ, of_NJU, preferred_element_type=jnp.float32)
        sum_NU = vary(lax.psum(sum_NU.astype(x_ND.dtype), "tensor"))  # M summed; [N, U] stays [N, U]
        return jnp.einsum("nu,du->nd", sum_NU, w["w_latent_out"])


def balance(routes: Routes, S: int, config: ModelConfig):
    """sum over experts of f_e P_e of each row, [B]; every context shard has the row's."""
    chosen_BX, probs_BX = (jnp.sum(x.reshape(-1, S, config.n_experts).astype(jnp.float32), axis=1)
                           for x in (routes.chosen_NX, routes.probs_NX))  # fmt: skip
    chosen_BX, probs_BX = vary(lax.psum((chosen_BX, probs_BX), "context"))  # [B, X] stays [B, X], of the whole row
    T = S * lax.axis_size("context")
    return jnp.sum(config.n_experts / (config.top_k * T) * chosen_BX * probs_BX / T, axis=-1)


# -------------------------------------------------------------------------------------------------------- the whole model


def layer(x_ND, w, rope, where, config: ModelConfig, execution: Execution, slot: int):
    """model.layer with experts: (x_ND, (balance [B], share of the choices dropped [N]))."""
    table = ledger(config)
    whole = {name: x for name, x in w.items() if name not in EXPERTS and "fsdp" in table[name].spec}
    # A device has whole experts, which are cast and not gathered.
    w = w | {name: model.gather_weight(x, config) for name, x in whole.items()}
    w |= {name: w[name].astype(config.compute_dtype) for name in EXPERTS}

    x_ND = save_as("x", slot, x_ND)
    attn_ND = model.attention_block(x_ND, w, rope, where, config, execution, slot, model.attend)
    x_ND = x_ND + model.rms_norm(attn_ND, w["attn_norm"], config.norm_eps)
    routes = route(x_ND, w["w_router"], config)
    # Under the same name as the shared part: if the sum is saved, its parts are not.
    ffn_ND = save_as("ffn_out", slot, model.feed_forward_block(x_ND, w, slot) + experts(x_ND, w, routes, config, slot))
    kept = balance(routes, where.places.q_pos.shape[0], config), jnp.mean(~routes.fits_NJ, axis=1)
    return x_ND + model.rms_norm(ffn_ND, w["ffn_norm"], config.norm_eps), kept


def hidden_states(params, tokens_BS, segments_BS, config: ModelConfig, execution: Execution):
    """(final hidden states [N, D], balance [B] and share dropped [N], both means over layers)."""
    S = tokens_BS.shape[1]
    positions_S = vary(lax.axis_index("context") * S + jnp.arange(S))
    of_kind = model.geometry(config, positions_S, segments_BS, execution)

    def apply(x_ND, w, slot, kind, _):
        return layer(x_ND, w, *of_kind[kind], config, execution, slot)

    wrap = partial(model.recompute, config=config, execution=execution, prevent_cse=False)
    x_ND = model.embed_tokens(params, tokens_BS, config, execution.take_rows)
    x_ND, kept = model.scan_layers(params, x_ND, apply, config, unroll=execution.scan_unroll, wrap=wrap,
                                   tensors=LAYER_TENSORS + OWN)  # fmt: skip
    # Of each slot a stack over cycles.
    balance_B, dropped_N = (jnp.mean(jnp.concatenate(x), axis=0) for x in zip(*kept, strict=True))
    return model.rms_norm(x_ND, params["final_norm"], config.norm_eps), balance_B, dropped_N


class TokenLoss(NamedTuple):
    """As model.TokenLoss; the balance of the token's sequence, and the share of its choices that were dropped. fp32 [B, S]."""

    ce_N: jax.Array
    lse_squared_N: jax.Array
    balance_N: jax.Array
    dropped_N: jax.Array


def token_loss(params, batch, z_loss: float, config: ModelConfig, execution: Execution):
    """(sum over labels of loss_mask * (CE + z_loss * lse^2 + balance_weight * the layers' balance), TokenLoss [B, S]).

    local: as in model.token_loss.
    """
    shape = batch["tokens"].shape
    x_ND, balance_B, dropped_N = hidden_states(params, batch["tokens"], batch["segment_ids"], config, execution)
    with jax.named_scope("loss"):
        labels_N, mask_N = batch["labels"].reshape(-1), batch["loss_mask"].reshape(-1).astype(jnp.float32)
        chunk = min(execution.loss_chunk, x_ND.shape[0])
        total, (ce_N, lse_squared_N) = model.cross_entropy(
            x_ND, params["lm_head"], labels_N, mask_N, z_loss, config, chunk
        )
        # A row counts by its labels, so that one that is filtered does not.
        balance_BS = jnp.broadcast_to(balance_B[:, None], shape)
        total = total + config.balance_weight * config.n_layers * jnp.sum(mask_N.reshape(shape) * balance_BS)
    ce_BS, lse_squared_BS, dropped_BS = (x.reshape(shape) for x in (ce_N, lse_squared_N, dropped_N))
    return total, TokenLoss(ce_BS, lse_squared_BS, balance_BS, dropped_BS)
