"""Time one training step on a GPU against transformers' Olmo3ForCausalLM with torch's SDPA and torch.compile.

    python bench/bench_gpu.py [--model quickstart 1b] [--rounds 5] [--steps 5] [--seconds 280] [--set KEY=VALUE ...]

Two models: the quick start's, and one of 1.0 billion parameters (stage 1 at half its width, 12 layers, one sequence of
8,192 tokens). Both sides compute in bf16 from fp32 weights and do the same work: the same random tokens, forward and
backward, the loss over every label, clipping by the global norm, fused AdamW. Ours runs as its hardware file says, with
sums in one order; torch runs as it comes, compiled. Each side has a process of its own on one GPU. They take turns,
round by round, so that whatever slows the machine slows both.

Compiling and all rounds end within --seconds; what is not measured by then is null. Prints a table, whose ratio is ours
to theirs, and, last, one line of JSON. Without a GPU it runs on the CPU, which --model tiny is for: that shows that it
works, and no speed. Needs requirements-gpu.txt, torch and transformers; on a 24 GB card only the first model fits twice.
"""

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
BF16 = "model.compute_dtype=bfloat16"
MODELS = {  # a recipe and its overrides
    "quickstart": ("quickstart.yaml", [BF16]),
    "1b": ("stage1.yaml", [
        *("model.n_layers=12", "model.d_model=2048", "model.n_heads=16", "model.n_kv_heads=16", "model.d_ff=5504"),
        "data.global_batch=1",
    ]),
    "tiny": ("quickstart.yaml", [
        *(BF16, "model.d_model=64", "model.d_ff=96", "model.window=32", "data.sequence_length=64", "data.global_batch=2"),
        *("model.vocab_size=512", "model.padded_vocab_size=512"),
    ]),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- one side's process


def our_step(c, tokens):
    """(a step that returns the loss, the device's kind, its peak memory in GiB or None)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import train
    from config import make_mesh, to_device

    device = jax.devices()[0]
    mesh = make_mesh(c, devices=[device])
    step, state, count = train.compile_train_step(c, mesh), list(train.init_state(c, mesh)), 0
    mask = np.ones(tokens.shape, bool)
    mask[:, -1] = False
    batch = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, 1),
        "loss_mask": mask,
        "segment_ids": np.zeros_like(tokens),
    }
    batch = to_device(batch | {"filtered": np.zeros(len(tokens), bool)}, mesh, c, len(tokens))

    def one() -> float:
        nonlocal count
        count += 1
        *state[:], metrics = step(*state, batch, jnp.int32(count))
        jax.block_until_ready(state)
        return float(metrics["ce"])

    return one, device.device_kind, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30 or None


def torch_step(c, tokens):
    """The same with transformers and torch. Their labels are shifted inside the model."""
    import torch
    import transformers

    import optim
    from hf_config import hf_config

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    described = hf_config(c.model, 5, c.data.sequence_length, "float32", {"eos_token_id": None, "pad_token_id": None})
    config = transformers.Olmo3Config(**described | {"use_cache": False, "attn_implementation": "sdpa"})
    with device:
        net = transformers.Olmo3ForCausalLM(config).train()
    compiled, o = torch.compile(net), c.optim
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=float(optim.learning_rate(o, c.schedule, 1)), betas=(o.beta1, o.beta2), eps=o.eps,
        weight_decay=o.weight_decay, fused=True,
    )  # fmt: skip
    ids = torch.from_numpy(tokens).long().to(device)

    def one() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), o.clip_norm)
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        return loss.item()

    kind = torch.cuda.get_device_name() if gpu else "cpu"
    return one, kind, lambda: torch.cuda.max_memory_allocated() / 2**30 if gpu else None


SIDES = {"ours": our_step, "torch": torch_step}


def contend(side: str, name: str, overrides: list[str]) -> None:
    """For every number of steps on standard input a line of JSON: the seconds that they take, and the peak memory."""
    answers = os.fdopen(os.dup(1), "w")  # libraries may print; standard output is for answers
    os.dup2(2, 1)
    if side == "torch":  # our files leave the GPU to torch
        os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np

    from config import detect_hardware, load_config
    from metrics import flops_per_token

    recipe, sets = MODELS[name]
    c = load_config(recipe, detect_hardware(), sets + overrides)
    B, S = c.data.global_batch, c.data.sequence_length
    one, kind, memory = SIDES[side](
        c, np.random.default_rng(0).integers(0, c.model.vocab_size, (B, S)).astype(np.int32)
    )
    first_loss = [one() for _ in range(3)][0]  # compilation, warm-up
    ready = {
        "first_loss": first_loss,
        "device": kind,
        "batch": [B, S],
        "parameters": sum(c.parameter_sizes.values()),
        "flops_a_step": B * S * flops_per_token(c, "window-correct"),
    }
    ready["attention"] = c.hardware.attention if side == "ours" else "sdpa, compiled"
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            one()
        print(json.dumps([time.perf_counter() - start, memory()]), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------------ taking turns


def answer(process: subprocess.Popen, deadline: float):
    """The next line of a side; None if it does not come in time, or never will."""
    readable, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
    line = process.stdout.readline() if readable else ""
    return json.loads(line) if line else None


def compare(name: str, overrides: list[str], rounds: int, steps: int, deadline: float) -> dict:
    """Tokens/s of both, in turns, until the rounds or the time are over."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # two processes share the memory
    with contextlib.ExitStack() as stack:
        processes = {}
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--model", name, *(f"--set={x}" for x in overrides)]
            p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            processes[side] = stack.enter_context(p)
            stack.callback(p.kill)
        ready = {side: answer(p, deadline) for side, p in processes.items()}
        result = {"model": name, "ready": ready, "tokens_per_second": None, "ratio": None}
        seconds, peak = {side: [] for side in SIDES}, {}
        while all(ready.values()) and len(seconds["ours"]) < rounds:
            turn = {}
            for side, p in processes.items():
                print(steps, file=p.stdin, flush=True)
                turn[side] = answer(p, deadline)
            if None in turn.values():
                break
            for side, (taken, memory) in turn.items():
                seconds[side].append(taken / steps)
                peak[side] = memory
    if seconds["ours"]:
        B, S = ready["ours"]["batch"]
        median = {side: statistics.median(each) for side, each in seconds.items()}
        ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
        result |= {
            "rounds": len(ratios),
            "tokens_per_second": {side: round(B * S / s) for side, s in median.items()},
            "tflops": {side: round(ready["ours"]["flops_a_step"] / s / 1e12, 2) for side, s in median.items()},
            "peak_gib": peak,
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["quickstart", "1b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of each side in a round")
    parser.add_argument("--seconds", type=float, default=280, help="for everything")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key of ours")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return contend(args.side, args.model[0], args.set)
    from importlib import metadata

    began, results = time.monotonic(), []
    print(f"{'model':<12}{'ours tok/s':>12}{'torch tok/s':>12}{'ratio (min-max)':>20}{'GiB, ours and torch':>22}")
    for i, name in enumerate(args.model):
        left = began + args.seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(args.model) - i)
        results.append(r := compare(name, args.set, args.rounds, args.steps, deadline))
        if r["ratio"] is None:
            print(f"{name:<12}  not measured: {', '.join(s for s, x in r['ready'].items() if not x) or 'no time'}")
            continue
        speed, x, peak = r["tokens_per_second"], r["ratio"], [f"{g:.1f}" if g else "-" for g in r["peak_gib"].values()]
        spread = f"{x['median']:.2f} ({x['min']:.2f}-{x['max']:.2f})"
        print(f"{name:<12}{speed['ours']:>12,}{speed['torch']:>12,}{spread:>20}{' and '.join(peak):>22}", flush=True)
    versions = {package: metadata.version(package) for package in ("jax", "torch", "transformers")}
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"results": results, "seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
