"""GRPO as Olmo 3 ran it: prompts, rollouts, a verifier, advantages, and the training step of train.py with weights.

    python grpo.py --config quickstart_grpo.yaml --init-from runs/quickstart_sft

One step, of P prompts with a group of G completions each:

    A = r - mean of the group's rewards                                    no division by a deviation
    rho = pi(token) / pi_old(token)                                        pi_old: before the step's first mini-batch
    J = 1/N sum over completion tokens of  min(rho A, clip(rho, 1 - low, 1 + high) A) min(pi_old / pi_sampler, cap)

There is no KL term and no reference model. N counts the tokens of the whole mini-batch. The gradient of J is that of a
cross-entropy whose token has the weight A rho min(pi_old / pi_sampler, cap), and 0 where the clip holds. So the update is
train.train_step with weights as its loss mask. Groups whose rewards are all equal teach nothing: others are drawn in
their place (active sampling). A completion that is cut off has no EOS; one that ends learns its EOS.

A step is a pure function of (seed, step, state), so a resumed run is the same to the bit. Exit codes as train.py's.
Completions may come from an engine of their own, a function that `grpo.engine` names:

    engine(params, prompts, response_tokens, temperature, seed) -> (completions, log_probs)

Prompts and completions are lists of token ids; a completion holds its EOS if it came to one. Log-probabilities are the
engine's own, a number a token. Temperature 0 asks for the likeliest completion.

Source: the Olmo 3 report (arXiv:2512.13961), section 4.4.1 and table 49. Not here: DPO before it, asynchronous rollouts,
several processes.
"""

import argparse
import dataclasses
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import data
import model
import train
from checkpoint import (
    FORMAT_VERSION,
    Checkpoints,
    Opened,
    checksums,
    differences,
    find_checkpoint,
    read_meta,
    reading,
)
from config import (
    BATCH_AXES,
    Config,
    architecture,
    assemble_config,
    batch_specs,
    build,
    cache_compilations,
    environment,
    largest_microbatch,
    make_execution,
    make_mesh,
    param_specs,
    pin_settings,
    platform_of,
    science_dict,
    to_device,
    versions,
)
from metrics import MetricsLog
from processes import (
    HERE,
    RunFailed,
    Stop,
    add_json,
    find_config,
    inputs_are_checked,
    outline,
    parse_override,
    read_yaml,
    run_command,
    say,
    set_key,
    sole_writer,
    write_yaml,
)
from sample import Draw, Sampler, needed_tokenizer
from vocabulary import Turns


@dataclass(frozen=True)
class GrpoConfig:
    """The section `grpo:` of a recipe. data.global_batch is a mini-batch of completions."""

    problems: str  # JSON lines with "prompt" and what the verifier needs
    heldout_problems: str
    verifier: str  # module:function, see verifiers.py
    group: int  # completions of a prompt
    mini_batches: int  # updates a step
    response_tokens: int  # of a completion, at most; the rest of data.sequence_length is for the prompt
    clip_low: float
    clip_high: float
    importance_cap: float | None  # of pi_old / pi_sampler; null: that factor is left out
    rounds: int  # of active sampling, at most; then fewer groups are trained on
    engine: str | None  # module:function that completes prompts; null: the sampler of sample.py

    def __post_init__(self):
        for name in ("group", "mini_batches", "response_tokens", "rounds"):
            if getattr(self, name) < (2 if name == "group" else 1):
                raise ValueError(
                    f"grpo.{name}: got {getattr(self, name)}, expected {2 if name == 'group' else 1} or more"
                )
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise ValueError(
                f"grpo.clip_low, clip_high: got {self.clip_low}, {self.clip_high}, expected 0 to 1, above 0"
            )


# --- the algorithm


def advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """fp32 [P, G]: each reward less its group's mean; exactly 0 where all of a group are equal."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    equal = (rewards_PG == rewards_PG[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0, rewards_PG - rewards_PG.mean(axis=1, keepdims=True)).astype(np.float32)


def token_weights(new, old, sampler, advantage, counted, c: GrpoConfig) -> tuple[np.ndarray, np.ndarray]:
    """(weights, which tokens the clip holds back), [B, S], from log-probabilities [B, S] and advantages [B, 1].

    Where min(rho A, clip(rho) A) takes the clipped term, it is constant and its gradient 0."""
    rho = np.exp(new - old)
    clipped = counted & np.where(advantage > 0, rho > 1 + c.clip_high, rho < 1 - c.clip_low) & (advantage != 0)
    factor = 1.0 if c.importance_cap is None else np.minimum(np.exp(old - sampler), c.importance_cap)
    weights = np.where(counted & ~clipped, advantage * rho * factor, 0)
    return weights.astype(np.float32), clipped


class Rollout(NamedTuple):
    """Completions of some prompts, each row a prompt and one completion."""

    prompts: list[list[int]]
    completions: list[list[int]]  # with their EOS, if they came to it
    log_probs: list[list[float]]  # of the sampler, for each token of a completion
    rewards: np.ndarray  # [B]

    def take(self, rows) -> "Rollout":
        lists = ([x[i] for i in rows] for x in (self.prompts, self.completions, self.log_probs))
        return Rollout(*lists, self.rewards[rows])

    def batch(self, S: int, advantage_B: np.ndarray) -> dict[str, np.ndarray]:
        """What the training step reads, [B, S]: the label of a position is the token after it."""
        B = len(self.prompts)
        tokens, labels = np.zeros((B, S), np.int32), np.zeros((B, S), np.int32)
        counted, sampler = np.zeros((B, S), bool), np.zeros((B, S), np.float32)
        for row, (prompt, completion, log_probs) in enumerate(
            zip(self.prompts, self.completions, self.log_probs, strict=True)
        ):
            text = [*prompt, *completion]
            tokens[row, : len(text)] = text
            labels[row, : len(text) - 1] = text[1:]
            learnt = slice(len(prompt) - 1, len(text) - 1)
            counted[row, learnt], sampler[row, learnt] = True, log_probs
        return {"tokens": tokens, "labels": labels, "counted": counted, "sampler": sampler,
                "segment_ids": np.zeros((B, S), np.int32), "filtered": np.zeros(B, bool),
                "advantage": advantage_B[:, None]}  # fmt: skip


# --- the model on a mesh


class Policy:
    """Rollouts, log-probabilities and updates of one model."""

    def __init__(self, config: Config, grpo: GrpoConfig, mesh, tokenizer, eos: int, engine: Callable | None):
        self.config, self.grpo, self.mesh, self.tokenizer, self.eos = config, grpo, mesh, tokenizer, eos
        self.engine = engine
        self.sampler = Sampler(Opened(None, {}, config, mesh, None))
        microbatch = largest_microbatch(config, mesh)
        execution = make_execution(config, microbatch, platform_of(mesh))
        specs, opt_specs = train.state_specs(config)
        weighted = batch_specs(config) | {"counted": P(BATCH_AXES, "context")}
        options = {"compiler_options": config.hardware.xla_flags}
        step = partial(train.train_step, config=config, execution=execution, microbatch=microbatch)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, opt_specs, weighted, P()), out_specs=(specs, opt_specs, P())
        )
        self.step = jax.jit(step, donate_argnums=(0, 1), **options)
        score = partial(log_probs, config=config, execution=execution, microbatch=microbatch)
        score = jax.shard_map(score, mesh=mesh, in_specs=(param_specs(config), batch_specs(config)),
                              out_specs=P(BATCH_AXES, "context"), check_vma=False)  # fmt: skip
        self.score = jax.jit(score, **options)

    def complete(self, params, prompts: list[list[int]], draw: Draw, numbers=None) -> tuple[list, list]:
        """(completions with their EOS, their log-probabilities)."""
        if self.engine is not None:
            found = self.engine(params, prompts, self.grpo.response_tokens, draw.temperature, draw.seed)
            check_completions(*found, len(prompts), self.grpo.response_tokens, self.config.model.vocab_size, self.eos)
            return found
        self.sampler.opened = self.sampler.opened._replace(params=params)
        completions, scores, kept = [[] for _ in prompts], [[] for _ in prompts], []
        for newest in self.sampler(prompts, self.grpo.response_tokens, draw, numbers, kept):
            going = [i for i, c in enumerate(completions) if not c or c[-1] != self.eos]
            for i in going:
                completions[i].append(int(newest[i]))
                scores[i].append(float(kept[-1][i]))
            if all(c[-1] == self.eos for c in completions):
                break
        return completions, scores

    def text(self, completion: list[int]) -> str:
        return self.tokenizer.decode([token for token in completion if token != self.eos])

    def on_device(self, batch: dict, weights: np.ndarray) -> dict:
        batch = batch | {"loss_mask": weights}
        placed = to_device(batch, self.mesh, self.config, len(weights))
        counted = jax.device_put(batch["counted"], jax.sharding.NamedSharding(self.mesh, P(BATCH_AXES, "context")))
        return placed | {"counted": counted}

    def log_probs(self, params, batch: dict) -> np.ndarray:
        placed = self.on_device(batch, batch["counted"].astype(np.float32))
        return np.asarray(self.score(params, {name: x for name, x in placed.items() if name != "counted"}))


def check_completions(completions, log_probs, prompts: int, most: int, vocab_size: int, eos: int) -> None:
    """RunFailed unless an engine has kept its promises: else a wrong token or number would be trained on in silence."""
    if not len(completions) == len(log_probs) == prompts:
        raise RunFailed(
            f"grpo.engine: got {len(completions)} completions and {len(log_probs)} log-probabilities, expected {prompts}"
        )
    for row, (tokens, scores) in enumerate(zip(completions, log_probs, strict=True)):
        if not 1 <= len(tokens) <= most or eos in tokens[:-1] or not all(0 <= t < vocab_size for t in tokens):
            raise RunFailed(
                f"grpo.engine: completion {row}: got {len(tokens)} tokens {tokens[:8]}..., expected 1 to {most} ids below "
                f"{vocab_size} that end at the first {eos}"
            )
        if len(scores) != len(tokens) or not all(-np.inf < x <= 1e-3 for x in scores):
            raise RunFailed(
                f"grpo.engine: completion {row}: got log-probabilities {scores[:8]}..., expected {len(tokens)} numbers <= 0"
            )


def log_probs(params, batch, config: Config, execution: model.Execution, microbatch: int):
    """fp32 [B, S]: of every label. local: batch [B/(data*fsdp), S/context]."""
    params, batch = model.vary((params, {name: x for name, x in batch.items() if name != "filtered"}))
    pieces = jax.tree.map(lambda x: x.reshape(-1, microbatch, *x.shape[1:]), batch)
    ce = lax.map(lambda piece: model.token_loss(params, piece, 0.0, config.model, execution)[1].ce_N, pieces)
    return -ce.reshape(batch["tokens"].shape)


# --- one step


def rollout(policy: Policy, params, problems: list[dict], prompts: list[list[int]], verify: Callable, seed):
    """(groups of completions for as many prompts as a step takes, what to log of them). In several rounds: groups
    without a signal are replaced."""
    c = policy.grpo
    wanted = policy.config.data.global_batch * c.mini_batches // c.group
    with_signal, without, drawn = [], [], []
    for number in range(c.rounds):
        rng = np.random.default_rng([*seed, number])
        rows = np.repeat(rng.choice(len(problems), wanted, replace=len(problems) < wanted), c.group)
        draw = Draw(temperature=1.0, seed=int(rng.integers(2**32)))
        asked = [prompts[i] for i in rows]
        completions, scores = policy.complete(params, asked, draw)
        rewards = np.array([verify(problems[i], policy.text(x)) for i, x in zip(rows, completions, strict=True)])
        drawn.append(Rollout(asked, completions, scores, rewards))
        for group in np.split(np.arange(len(rows)), wanted):
            (with_signal if np.ptp(rewards[group]) else without).append(drawn[-1].take(group))
        if len(with_signal) >= wanted:
            break
    # Where signals are too few, groups without any fill the batch up: their weights are 0.
    groups = (with_signal + without)[:wanted]
    whole = Rollout(*(sum((getattr(r, name) for r in groups), []) for name in Rollout._fields[:3]),
                    np.concatenate([r.rewards for r in groups]))  # fmt: skip
    first = drawn[0]
    return whole, {
        "grpo/reward": float(first.rewards.mean()),
        "grpo/groups without signal": len(without) / (len(with_signal) + len(without)),
        "grpo/completion tokens": float(np.mean([len(x) for x in first.completions])),
        "grpo/cut off": float(np.mean([x[-1] != policy.eos for x in first.completions])),
        "grpo/entropy": -float(np.mean(np.concatenate(first.log_probs))),  # an estimate: minus the mean log-probability
    }


def update(policy: Policy, params, opt_state, whole: Rollout, step: int, first_update: int):
    """The mini-batches of a step -> (params, opt_state, metrics). No update where no group has a signal."""
    c, S = policy.grpo, policy.config.data.sequence_length
    advantage = advantages(whole.rewards.reshape(-1, c.group)).reshape(-1)
    if not advantage.any():
        return params, opt_state, {"grpo/updates": 0}
    rows = np.random.default_rng([policy.config.run.seed, step, 1 << 20]).permutation(len(advantage))
    parts = np.split(rows, c.mini_batches)
    batches = [whole.take(part).batch(S, advantage[part]) for part in parts]
    olds = [policy.log_probs(params, batch) for batch in batches]
    said, clipped_share, mismatch = [], [], []
    for k, (batch, old) in enumerate(zip(batches, olds, strict=True)):
        new = old if k == 0 else policy.log_probs(params, batch)
        counted = batch["counted"]
        weights, clipped = token_weights(new, old, batch["sampler"], batch["advantage"], counted, c)
        clipped_share.append(clipped.sum() / counted.sum())
        mismatch.append(np.abs(old - batch["sampler"])[counted].max())
        if weights.any():
            number = np.int32(first_update + k)
            params, opt_state, metrics = policy.step(params, opt_state, policy.on_device(batch, weights), number)
            said.append({name: float(metrics[name]) for name in ("grad_norm", "lr", "skipped")})
            if (n := int(metrics["nonfinite_in_a_row"])) >= policy.config.optim.max_nonfinite_steps:
                raise RunFailed(
                    f"step {step}: loss or gradient is not finite for {n} updates in a row; fix: lower optim.peak_lr"
                )
    return params, opt_state, {
        "grpo/updates": len(said),
        "grpo/clipped share": float(np.mean(clipped_share)),
        "grpo/sampler mismatch": float(np.max(mismatch)),
        "optim/total grad norm": float(np.mean([m["grad_norm"] for m in said])),
        "optim/LR (group 0)": said[-1]["lr"],
        "optim/step_skipped": int(sum(m["skipped"] for m in said)),
    }  # fmt: skip


def accuracy(policy: Policy, params, problems: list[dict], prompts: list[list[int]], verify: Callable) -> dict:
    """Mean reward on held-out problems: the likeliest completion, and one drawn at temperature 1."""
    found = {}
    for name, draw in (("greedy", Draw()), ("sampled", Draw(temperature=1.0, seed=0))):
        rewards = []
        for i in range(0, len(prompts), rows := policy.config.data.global_batch):
            part = prompts[i : i + rows]
            whole = part + [part[-1]] * (rows - len(part))  # one shape to compile
            completions, _ = policy.complete(params, whole, draw, np.arange(i, i + rows))
            rewards += [verify(p, policy.text(c)) for p, c in zip(problems[i : i + rows], completions, strict=False)]
        found[f"eval/grpo/{name} reward"] = float(np.mean(rewards))
    return found


# --- the loop


def read_problems(path: str) -> list[dict]:
    if not (file := data.local_path(path)).is_file():
        raise ValueError(f"{path}: got no such file, expected JSON lines; fix: check the path")
    problems = []
    with open(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                problem = json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}: not JSON ({e}); fix: one problem a line") from e
            if not isinstance(problem, dict) or not isinstance(problem.get("prompt"), str):
                raise ValueError(f"{path}, line {number}: got no text 'prompt'; fix: add it")
            problems.append(problem)
    if not problems:
        raise ValueError(f"{path}: got no problem, expected JSON lines")
    return problems


def find_function(key: str, name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(f"{key}: got {name!r} ({e}), expected module:function, as verifiers:arithmetic") from e


def load_recipe(path: str, hardware: str | None, overrides: list[str]) -> tuple[Config, GrpoConfig]:
    raw = read_yaml(file := find_config(path, HERE / "configs"))
    own = [o for o in overrides if o.startswith("grpo.")]
    for override in own:
        set_key(raw, *parse_override(override))
    if "grpo" not in raw:
        raise ValueError(f"{file}: grpo: missing section; fix: a recipe for grpo.py, as quickstart_grpo.yaml")
    grpo = build(GrpoConfig, raw.pop("grpo"), "grpo")
    config = assemble_config(raw, str(file), hardware, [o for o in overrides if o not in own])
    rows = config.data.global_batch * grpo.mini_batches
    for wrong, fault in (
        (architecture(config) is not model, "model.module: expected none, since rollouts are model.py's"),
        (config.loss.z_loss != 0, "loss.z_loss: expected 0, since a weight may be negative"),
        (config.data.document_mask or config.data.repetition_filter, "data: expected no document mask and no filter"),
        (rows % grpo.group, f"data.global_batch: got {rows} completions a step, expected groups of {grpo.group}"),
        (grpo.response_tokens >= config.data.sequence_length, "grpo.response_tokens: no room is left for a prompt"),
        (config.hardware.mesh.context != 1, "mesh: expected context 1"),
        (jax.process_count() > 1, "several processes: not here"),
    ):
        if wrong:
            raise ValueError(fault)
    return config, grpo


def train_grpo(args: argparse.Namespace) -> dict | int:
    config, grpo = load_recipe(args.config, args.hardware, args.set)
    verify, mesh = find_function("grpo.verifier", grpo.verifier), make_mesh(config)
    engine = None if grpo.engine is None else find_function("grpo.engine", grpo.engine)
    cache_compilations(config)
    run_dir = data.local_path(args.run_dir or f"runs/{config.run.name}")
    problems = {split: read_problems(path) for split, path in
                (("train", grpo.problems), ("heldout", grpo.heldout_problems))}  # fmt: skip
    source = find_checkpoint(args.init_from)
    with reading(source):
        source_meta = read_meta(source)
    known = needed_tokenizer(args.tokenizer, Opened(source, source_meta, config, mesh, None))
    most = config.data.sequence_length - grpo.response_tokens
    turns = Turns(known.tokenizer, known.path)
    prompts = {split: [turns.closed("user", p["prompt"]) + turns.opened("assistant", "") for p in ps]
               for split, ps in problems.items()}  # fmt: skip
    if (longest := max(len(p) for ps in prompts.values() for p in ps)) > most:
        raise ValueError(f"grpo.problems: got a prompt of {longest} tokens, expected at most {most}")
    record = {"config": science_dict(config), "grpo": dataclasses.asdict(grpo)}
    with sole_writer(run_dir, wait=5):
        stop = Stop()
        run_dir.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(run_dir / "checkpoints", config.run.keep_checkpoints)
        restored = checkpoints.restore_latest(
            dict(zip(("params", "opt_state"), train.state_shapes(config, mesh), strict=True)),
            lambda meta, folder: check_same_recipe(meta, record, folder),
        )
        if restored is None:
            params, opt_state, *_ = train.initial_state(config, mesh, args.init_from, "params", {})
            start = updates = 0
        else:
            params, opt_state, meta = restored
            start, updates = meta["step"], meta["updates"]
            say(f"resuming from {checkpoints.folder / str(start)}")
        whole = dataclasses.asdict(config) | {"grpo": dataclasses.asdict(grpo)}
        write_yaml(json.loads(json.dumps(whole)), run_dir / "config.yaml")
        inputs_are_checked()
        for name, path in known.files.items():  # no index leads to it: the run carries it, as an imported one does
            (run_dir / "hf").mkdir(exist_ok=True)
            shutil.copyfile(path, run_dir / "hf" / name)
        policy = Policy(config, grpo, mesh, known.tokenizer, known.eos_ids[0], engine)
        log = MetricsLog(run_dir, start if restored else -1, run_dir)

        def evaluate(step: int) -> dict:
            found = accuracy(policy, params, problems["heldout"], prompts["heldout"], verify)
            log.write(step, found)
            say(f"step {step}: held-out reward {found['eval/grpo/greedy reward']:.4f} greedy, "
                f"{found['eval/grpo/sampled reward']:.4f} sampled")  # fmt: skip
            return found

        due = restored is None or start % config.run.eval_every == 0 or start == config.run.steps
        if due and (restored is None or log.evaluated < start):  # a signal or a kill had come before it
            evaluate(start)
        for step in range(start + 1, config.run.steps + 1):
            whole, said = rollout(policy, params, problems["train"], prompts["train"], verify, (config.run.seed, step))
            params, opt_state, numbers = update(policy, params, opt_state, whole, step, updates + 1)
            updates += numbers["grpo/updates"]
            log.write(step, said | numbers)
            if step % config.run.log_every == 0:
                say(f"step {step}/{config.run.steps}  reward {said['grpo/reward']:.3f}  {said['grpo/completion tokens']:.1f} "
                    f"tokens  without signal {said['grpo/groups without signal']:.0%}")  # fmt: skip
            last = step == config.run.steps
            leave = stop.requested(step)
            if (step % config.run.eval_every == 0 or last) and not leave:
                evaluate(step)
            if last or leave or step % config.run.checkpoint_every == 0:
                log.sync()
                sums = {"params": checksums(params), "opt_state": checksums(opt_state)}
                checkpoints.save(step, params, opt_state, source_meta | {
                    "format_version": FORMAT_VERSION, "step": step, "updates": updates, "instances_seen": 0,
                    "tokens_seen": 0, "items": ["params", "opt_state", "meta"], "checksums": sums, **record,
                    "versions": versions(), "environment": environment(),
                })  # fmt: skip
            if leave:
                checkpoints.close()
                say(f"stopped by a signal: step {step} is saved")
                return stop.code
        checkpoints.close()
        log.close()
    return {"steps": config.run.steps, "updates": updates, "run": str(run_dir),
            "verdict": f"next: python sample.py {run_dir} --chat"}  # fmt: skip


# Keys that steer a run and change no number of it.
MAY_CHANGE = {f"config.{key}" for key in ("run.steps", "run.log_every", "run.keep_checkpoints", "run.sample_prompt")}


def check_same_recipe(meta: dict, record: dict, folder: Path) -> None:
    """Refuse to go on with another recipe, or in the folder of a run of train.py."""
    if "grpo" not in meta:
        raise ValueError(f"{folder}: is of a run of train.py; fix: another --run-dir")
    for key, then, now in differences({name: meta[name] for name in record}, record):
        if key not in MAY_CHANGE:
            raise ValueError(f"{folder}: {key}: got {now}, expected {then} as in the run; fix: another --run-dir")


def parse_args(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", required=True, help="a file, or a name in configs/, with a section grpo")
    p.add_argument("--init-from", required=True, metavar="CKPT", help="a model that was tuned on conversations")
    p.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    p.add_argument("--run-dir", help="default: runs/<run.name>")
    p.add_argument("--tokenizer", metavar="PATH", help="folder or tokenizer.json; default: the checkpoint's")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    add_json(p)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)

    def command() -> dict | int:
        pin_settings()
        return train_grpo(args)

    return run_command("grpo.py", command, args.json, outline)


if __name__ == "__main__":
    sys.exit(main())
