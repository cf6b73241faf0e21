"""Time one training step on this CPU against transformers' Olmo3ForCausalLM + torch, and against OLMo-core's own step.

    python bench/bench_step.py [--model quickstart|d256 ...] [--rounds 5] [--set attention_block=256 ...]

Two models: the quick start's, read from configs/, and one of 12.6 million parameters (d256 L8 H8 F1024 V8192 S1024,
window 256, batch 4). All do the same work in fp32: the same random tokens, forward and backward, the loss over every
label, clipping by the global norm, AdamW. transformers with SDPA attention, no dropout, and fused AdamW where this torch
has it for the CPU; OLMo-core with its olmo3_7B config made small, its torch attention (the one that runs on a CPU) and
its SkipStepAdamW. Each has a process of its own; they take turns, round by round, so that a busy machine slows all.
Prints a table, whose ratios are ours to theirs, and, last, one line of JSON. The caller's XLA_FLAGS hold for our step:
with --xla_force_host_platform_device_count=2 and --set microbatch=1 two CPU devices share the work.
Needs requirements-dev.txt.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

import jax
import jax.numpy as jnp
import numpy as np
import parity
import torch
import transformers

import model
import train
from config import Config, load_config, make_mesh, to_device
from hf_config import hf_config

torch.set_num_threads(os.cpu_count())  # parity.py, whose tensors are tiny, has set 1

MODELS = {  # --set overrides of configs/quickstart.yaml
    "quickstart": [],
    "d256": [
        *("model.vocab_size=8192", "model.padded_vocab_size=8192", "model.n_layers=8", "model.d_model=256"),
        *("model.n_heads=8", "model.n_kv_heads=8", "model.head_dim=32", "model.d_ff=1024", "model.window=256"),
        *("data.sequence_length=1024", "data.global_batch=4"),
    ],
}


def our_step(c: Config, tokens: np.ndarray):
    """A function that takes one step with the compiled training step and returns the loss once it is done."""
    mesh = make_mesh(c)
    step = train.compile_train_step(c, mesh)
    state = list(train.init_state(c, mesh))
    B, S = tokens.shape
    labels = np.roll(tokens, -1, axis=1)
    mask = np.ones((B, S), bool)
    mask[:, -1] = False
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "segment_ids": np.zeros_like(tokens)}
    batch = to_device(batch | {"filtered": np.zeros(B, bool)}, mesh, c, B)
    count = 0

    def one() -> float:
        nonlocal count
        count += 1
        *state[:], metrics = step(*state, batch, jnp.int32(count))
        jax.block_until_ready(state)
        return float(metrics["ce"])

    return one


def transformers_step(c: Config, tokens: np.ndarray):
    """The same with transformers and torch. Their labels are shifted inside the model."""
    m = c.model
    described = hf_config(m, 5, c.data.sequence_length, "float32", {"eos_token_id": None, "pad_token_id": None})
    config = transformers.Olmo3Config(**described | {"use_cache": False, "attn_implementation": "sdpa"})
    net = transformers.Olmo3ForCausalLM(config).train()
    ours = model.parameter_count(m, padded=False)
    if sum(p.numel() for p in net.parameters()) != ours:
        raise RuntimeError(f"parameters: got {sum(p.numel() for p in net.parameters())} in torch, expected {ours}")
    o, lr = c.optim, train.optim.learning_rate(c.optim, c.schedule, 1)
    options = dict(lr=float(lr), betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)
    try:
        optimizer = torch.optim.AdamW(net.parameters(), fused=True, **options)
    except RuntimeError:
        optimizer = torch.optim.AdamW(net.parameters(), **options)
    ids = torch.from_numpy(tokens).long()

    def one() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), o.clip_norm)
        optimizer.step()
        return loss.item()

    return one


def olmo_core_step(c: Config, tokens: np.ndarray):
    """OLMo-core's own: its TransformerTrainModule, with gradients of all rows at once."""
    params = jax.tree.map(np.asarray, model.init_params(c.model, 0))
    theirs = parity.OlmoCore(c, params, microbatch=len(tokens))
    ids = torch.from_numpy(tokens).long()

    def one() -> float:
        theirs.trainer.global_step += 1
        theirs.module.zero_grads()
        theirs.module.train_batch({"input_ids": ids})
        theirs.module.optim_step()
        return theirs.metrics["CE loss"]

    return one


CONTESTANTS = {"ours": our_step, "transformers": transformers_step, "olmo_core": olmo_core_step}


def contend(who: str, c: Config) -> None:
    """One contestant, in a process of its own: for every number of steps on standard input the seconds they take."""
    shape = (c.data.global_batch, c.data.sequence_length)
    one = CONTESTANTS[who](c, np.random.default_rng(0).integers(0, c.model.vocab_size, shape).astype(np.int32))
    first_loss = [one() for _ in range(2)][0]  # compilation, warm-up
    print(json.dumps(first_loss), flush=True)
    for line in sys.stdin:
        one()  # while it waited, the machine may have taken its memory
        start = time.perf_counter()
        for _ in range(int(line)):
            one()
        print(json.dumps(time.perf_counter() - start), flush=True)


def compare(name: str, overrides: list[str], rounds: int, steps: int) -> dict:
    """Tokens/s of all, in turns; a ratio is ours / theirs, so more than 1 means that ours is faster.

    Each in its own process, as people run them: in one, the threads and the memory of one slow the others.
    """
    c = load_config("quickstart.yaml", "cpu", MODELS[name] + overrides)
    shape = (c.data.global_batch, c.data.sequence_length)
    settings = [f"--set={x}" for x in overrides]
    with contextlib.ExitStack() as stack:
        processes, first_losses = {}, {}
        for who in CONTESTANTS:
            command = [sys.executable, __file__, "--contestant", who, "--model", name, *settings]
            p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[who] = stack.enter_context(p)
            first_losses[who] = json.loads(p.stdout.readline())
        speeds = {who: [] for who in processes}
        for _ in range(rounds):
            for who, p in processes.items():
                print(steps, file=p.stdin, flush=True)
                speeds[who].append(np.prod(shape) * steps / json.loads(p.stdout.readline()))
    median = {who: statistics.median(s) for who, s in speeds.items()}
    ratios = {}
    for who in ("transformers", "olmo_core"):
        each = [a / b for a, b in zip(speeds["ours"], speeds[who], strict=True)]
        ratios[who] = {"median": statistics.median(each), "min": min(each), "max": max(each)}
    return {
        "model": name,
        "parameters": model.parameter_count(c.model),
        "batch": shape,
        "first_loss": first_losses,
        "tokens_per_second": {who: round(s) for who, s in median.items()},
        "ratio": {who: {key: round(x, 3) for key, x in r.items()} for who, r in ratios.items()},
        "settings": {key: getattr(c.hardware, key) for key in ("microbatch", "attention_block", "loss_chunk")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each side in a round")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contend(args.contestant, load_config("quickstart.yaml", "cpu", MODELS[args.model[0]] + args.set))
        return
    results = []
    print(f"{'model':<12}{'ours tok/s':>11}{'transformers':>14}{'ratio (min-max)':>20}{'OLMo-core':>11}"
          f"{'ratio (min-max)':>20}")  # fmt: skip
    for name in args.model:
        r = compare(name, args.set, args.rounds, args.steps)
        speed = r["tokens_per_second"]
        spread = {who: f"{x['median']:.2f} ({x['min']:.2f}-{x['max']:.2f})" for who, x in r["ratio"].items()}
        print(
            f"{name:<12}{speed['ours']:>11}{speed['transformers']:>14}{spread['transformers']:>20}"
            f"{speed['olmo_core']:>11}{spread['olmo_core']:>20}",
            flush=True,
        )
        results.append(r)
    versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"results": results, "cores": os.cpu_count(), "versions": versions}))


if __name__ == "__main__":
    main()
