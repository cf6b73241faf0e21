"""tests/stored/tunix_grpo.npz: gradients of google-tunix's `grpo_loss_fn`, for tests/test_grpo.py.

    python -m venv tunix && tunix/bin/pip install google-tunix==0.1.7 "safetensors<0.8"
    JAX_PLATFORMS=cpu tunix/bin/python bench/tunix_fixture.py tests/stored/tunix_grpo.npz

An environment of its own: tunix wants an older safetensors than this project. The policy is an embedding and a head,
so that nothing but the objective is compared. Inputs are random: old log-probabilities that are off by 0.4, completions
of several lengths, advantages of both signs, with and without the cap of 2 on pi_old / pi_sampler.
"""

import dataclasses
import sys

import jax
import numpy as np
from flax import nnx
from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

PROMPTS, PROMPT, COMPLETION, VOCABULARY, WIDTH, CAP = 6, 5, 9, 24, 8, 2.0


@dataclasses.dataclass(kw_only=True)
class Clip(GRPOConfig):
    epsilon_high: float = 0.272
    temperature: float = 1.0


class Policy(nnx.Module):
    def __init__(self, embed, head):
        self.embed, self.head = nnx.Param(embed), nnx.Param(head)

    def __call__(self, tokens, positions, cache, attention_mask):
        return self.embed[...][tokens] @ self.head[...].T, None


def main(path: str) -> None:
    rng = np.random.default_rng(0)
    embed, head = rng.normal(size=(2, VOCABULARY, WIDTH)).astype(np.float32)
    tokens = rng.integers(1, VOCABULARY, (PROMPTS, PROMPT + COMPLETION)).astype(np.int32)  # 0 would be padding
    mask = np.arange(COMPLETION) < rng.integers(2, COMPLETION + 1, (PROMPTS, 1))
    logits = embed[tokens[:, PROMPT - 1 : -1]] @ head.T
    new = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[:, PROMPT:, None], axis=2)[..., 0]
    old = (new + 0.4 * rng.normal(size=new.shape)).astype(np.float32)
    sampler = (old + 0.6 * rng.normal(size=new.shape)).astype(np.float32)
    advantages = rng.normal(size=PROMPTS).astype(np.float32)
    stored = {"embed": embed, "head": head, "tokens": tokens, "mask": mask, "old": old, "sampler": sampler,
              "advantages": advantages, "cap": np.float32(CAP)}  # fmt: skip
    config = Clip(beta=0.0, epsilon=0.2, loss_agg_mode="token-mean")
    for name, weights in (("plain", None), ("capped", np.minimum(np.exp(old - sampler), CAP))):
        example = TrainExample(prompt_ids=tokens[:, :PROMPT], prompt_mask=np.ones((PROMPTS, PROMPT), bool),
                               completion_ids=tokens[:, PROMPT:], completion_mask=mask, advantages=advantages,
                               ref_per_token_logps=None, old_per_token_logps=old, sampler_is_weights=weights)  # fmt: skip

        def loss(policy, example=example):
            return algo_core.grpo_loss_fn(policy, example, config, pad_id=0, eos_id=VOCABULARY)

        (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(Policy(embed, head))
        stored |= {f"{name}_embed": grads["embed"][...], f"{name}_head": grads["head"][...]}
        print(f"{name}: loss {float(value):.6f}, clipped {float(aux['pg_clipfrac']):.3f}")
    np.savez_compressed(path, **{key: np.asarray(value) for key, value in stored.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
