"""Train: the optimizer step as one shard_map, held-out evaluation, exact resume, and the loop around them.

    python train.py --config quickstart.yaml
    python train.py --config stage1.yaml --hardware v5p --data-root /mnt/data --run-dir runs/stage1

A run is a pure function of its science config (configs/*.yaml) and its data. The hardware file (configs/hardware/*.yaml)
only says how it is computed. Starting in a run directory that holds checkpoints resumes it. Directory checkpoints/N
holds the state after N completed updates. Metrics and evaluations up to N are on disk before its save begins; an evaluation
that a signal cuts off is computed at the next start.

Exit codes: 0 done; 1 failed; 2 wrong usage, config or data; 143 preempted (SIGTERM; state saved); 130 interrupted.
Read before: model.py (what is computed), optim.py (the update), data.py (which tokens).
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import data
import model
import optim
from checkpoint import (
    FORMAT_VERSION,
    Checkpoints,
    check_same_model,
    check_same_run,
    checksums,
    find_checkpoint,
    orbax_path,
    read_meta,
    reading,
    restore_item,
    say_changes_of_machine,
)
from config import (
    BATCH_AXES,
    Config,
    architecture,
    batch_specs,
    cache_compilations,
    check_compiler_options,
    check_length,
    environment,
    largest_microbatch,
    load_config,
    local_rows,
    make_execution,
    make_mesh,
    param_shapes,
    param_specs,
    pin_settings,
    platform_of,
    science_dict,
    shardings,
    to_device,
    versions,
    with_shardings,
)
from heldout import HeldOut, check_index
from metrics import MetricsLog, Progress, StepLog, evaluation_metrics, read_summary, summarise, summary_text
from processes import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    Alive,
    Stop,
    add_json,
    check_shared,
    end_process,
    exit_with,
    flatten,
    inputs_are_checked,
    join_processes,
    on_process_0,
    run_command,
    say,
    sole_writer,
    speaks,
    unknown_key,
    write_yaml,
)
from sample import run_samples
from vocabulary import TokenCheck, TrainingData, comparable


class State(NamedTuple):
    """A run between two updates."""

    params: dict[str, jax.Array]  # fp32, sharded as model.ledger says
    opt_state: optim.SkipStepState
    step: int  # updates done, skipped ones included
    instances_seen: int  # position in the data


# ----------------------------------------------------------------------------------------------------------- the loop


def train(config: Config, run_dir: Path, args: argparse.Namespace) -> int:
    """Run to run.steps, to a signal or to a failure; returns the exit code."""
    local_dir = run_dir if args.local_dir is None else data.local_path(args.local_dir) / run_dir.resolve().name
    B, last_step = config.data.global_batch, config.run.steps
    with contextlib.ExitStack() as at_exit:
        # One writer a run. A trainer that was just killed may still be ending.
        if speaks():
            for folder in dict.fromkeys((run_dir, local_dir)):
                at_exit.enter_context(sole_writer(folder, wait=5))
        # Signs of life while nothing else prints, for the launcher; signals noted, to be heeded between two steps.
        alive, stop = Alive(args.alive_every), Stop()
        at_exit.callback(alive.close)

        # Check everything that can be checked before something is written or compiled.
        check_length(config)
        mesh = make_mesh(config)
        check_compiler_options(config)
        source, held_out, identity = open_data(config, mesh, args.data_root, local_dir / "order")
        run_dir.mkdir(parents=True, exist_ok=True)
        check_shared(run_dir)
        checkpoints = Checkpoints(run_dir / "checkpoints", config.run.keep_checkpoints)

        # Restore the newest checkpoint, or begin at step 0.
        alive.now("restoring the newest checkpoint, or making the first state", busy=True)
        state = restored = restore(config, mesh, checkpoints, identity, args.allow)
        if state is None:
            say(f"no checkpoint in {checkpoints.folder}, starting at step 0")
            state = initial_state(config, mesh, args.init_from, args.init_state, identity["vocabulary"])
        elif args.init_from is not None:
            say(f"--init-from {args.init_from} is not used: {run_dir} holds checkpoints of its own")
        # Only process 0 knows log and summary. on_process_0 gives all its answer, or some would wait in a collective.
        if state.step >= last_step and on_process_0(read_summary(run_dir).get("step") == state.step):
            say(f"already at step {state.step} of {last_step}: nothing to do")
            if speaks():
                print_summary(read_summary(run_dir), args.json)
            return 0
        if restored:
            say(f"resuming from {checkpoints.folder / str(state.step)}: {state.instances_seen:,} instances seen")
        if speaks():
            write_yaml(json.loads(json.dumps(asdict(config))), run_dir / "config.yaml")
        say_plan(config, mesh, source)

        # What the loop uses, and how it is closed, the last first, however the loop ends.
        start = state.step
        step_fn = compile_train_step(config, mesh)
        log, progress = MetricsLog(run_dir, start, local_dir), Progress(last_step, config.run.log_every)
        alive.now("reading the order of the data", busy=True)
        end = state.instances_seen + (last_step - start) * B
        batches = data.loader(source, state.instances_seen, end, workers=config.hardware.loader_workers)
        step_log = StepLog(config, log, progress, alive, checkpoints, mesh.size, mesh.devices.flat[0].device_kind)
        profile = Profile(run_dir / "profile", start + 3, args.profile)  # the first steps are not like later ones
        for thing in (log, progress, batches, checkpoints, profile):
            at_exit.callback(thing.close)
        at_exit.push(step_log.log_what_is_done)
        token_check = TokenCheck(source.index, config.data.mask_token)
        sample = run_samples(config, mesh, source.path, source.index)

        def evaluate(step: int) -> bool:
            """Held-out loss after `step`; False if a signal interrupted it. The next start makes up for it."""
            alive.now(f"step {step}: evaluating {len(held_out.batches)} batches", busy=True)
            done = log_held_out(held_out, state.params, step, log, progress.on_terminal, alive, stop)
            if done and sample:
                say(f"step {step}: {sample(state.params)}")
            step_log.skip_time()
            alive.now(f"training from step {step + 1} on")
            return done

        def evaluation_is_due(step: int) -> bool:
            due = step > 0 and (step % config.run.eval_every == 0 or step == last_step)
            return due and held_out is not None

        # A signal or a kill had cut off the evaluation of the step that is restored. If one does so again, nothing is lost.
        if on_process_0(evaluation_is_due(start) and log.evaluated < start) and not evaluate(start):
            say(f"stopped by a signal: step {start} is saved in {checkpoints.folder / str(start)}")
            return stop.code
        alive.now("compiling the training step", busy=True)
        for step in range(start + 1, last_step + 1):
            # Load this process's rows of the batch, which depends on the position alone, and look at their tokens.
            profile.before(step, step_log.flush)
            began = time.perf_counter()
            batch = next(batches)
            loading = time.perf_counter() - began
            for message in token_check(batch["tokens"]):
                say(message)
            inputs_are_checked()  # a launcher does not try again what fails before the first step

            # Step: the call returns before the device has computed anything. `instance` stays on the host, and so do
            # segment ids without data.document_mask.
            on_device = to_device(batch, mesh, config, B)
            params, opt_state, numbers = step_fn(state.params, state.opt_state, on_device, np.int32(step))
            state = State(params, opt_state, step, state.instances_seen + B)
            if step == start + 1:
                alive.now(f"training from step {step} on")

            # Log the step before, while this one is computed. Ends the run after optim.max_nonfinite_steps, before a save.
            step_log.put(step, state.instances_seen, numbers, loading)

            # Evaluate, before the save, so that a checkpoint is ahead of its evaluation only where a signal came between.
            # Several processes agree on a signal in `requested`; until then none of them leaves an evaluation.
            leave = stop.requested(step)
            if evaluation_is_due(step) and not leave:
                step_log.flush()
                leave = not evaluate(step) or stop.requested(step)

            # Save, asynchronously, with the metrics of all steps on disk before.
            if leave or step == last_step or step % config.run.checkpoint_every == 0:
                step_log.flush()
                alive.now(f"saving step {step}", busy=True)
                began = time.perf_counter()
                log.sync()
                checkpoints.save(step, params, opt_state, checkpoint_meta(config, state, identity, source))
                checkpoints.seconds["checkpoint/save_duration_s"] = time.perf_counter() - began
                alive.now(f"training from step {step + 1} on")

            # Stop, with the step saved, where a signal asked for it.
            if leave:
                alive.now(f"writing checkpoint {step}", busy=True)
                checkpoints.wait()
                say(f"stopped by a signal: step {step} is saved in {checkpoints.folder / str(step)}")
                return stop.code
        alive.now("writing the last checkpoint", busy=True)
        checkpoints.wait()
        log.sync()
        progress.close()
        if speaks():
            # With several processes there is no `sample`: one alone could not compute it.
            text, of = sample and sample(state.params), held_out and held_out.of[0]
            summary = summarise(run_dir, state, config, of, step_log.seconds_a_step, text)
            if summary["curves"]:
                log.board.write_picture(state.step, "curves", Path(summary["curves"]))
            print_summary(summary, args.json)
    return 0


def print_summary(summary: dict, as_json: bool) -> None:
    print(json.dumps(summary, indent=1) if as_json else summary_text(summary), flush=True)


def open_data(config: Config, mesh, data_root: str | None, order_dir: Path):
    """(source of the batches, held-out evaluation or None, what a checkpoint keeps of both)."""
    rows = local_rows(mesh, config.data.global_batch)
    source = data.open_data(config.data, data_root, order_dir, rows=rows)
    check_index(source.index, config, config.data.index)
    held_out, trained = None, TrainingData.of(source.path, source.index)
    if config.run.eval_index is not None:
        batch = config.data.global_batch
        held_out = HeldOut(config, mesh, config.run.eval_index, data_root, batch, config.eval_limit, [trained])
    identity = {
        "sequence_length": config.data.sequence_length,  # before the fingerprint, which covers it
        "fingerprint": source.index.fingerprint,
        "order": config.data.order,
        "seed": config.data.seed,
        "global_batch": config.data.global_batch,
        "usable": source.usable,
        "vocabulary": trained.vocabulary,
        "held_out": held_out and held_out.of[0]["fingerprint"],
    }
    return source, held_out, identity


def restore(config: Config, mesh, checkpoints: Checkpoints, identity: dict, allow: Sequence[str]) -> State | None:
    began = time.perf_counter()
    targets = dict(zip(("params", "opt_state"), state_shapes(config, mesh), strict=True))
    restored = checkpoints.restore_latest(
        targets, lambda meta, folder: check_same_run(meta, config, identity, folder, allow)
    )
    if restored is None:
        return None
    params, opt_state, meta = restored
    checkpoints.seconds["checkpoint/load_duration_s"] = time.perf_counter() - began
    say_changes_of_machine(meta)
    return State(params, opt_state, meta["step"], meta["instances_seen"])


def initial_state(config: Config, mesh, init_from: str | None, init_state_kind: str, vocabulary: dict) -> State:
    """State of step 0: from the seed, or from another run's parameters and, with "adam", its moments and Adam's count.
    The skip rule's window begins empty. `vocabulary`: of the data."""
    if init_from is None:
        say(f"start: new parameters from seed {config.run.seed}")
        return State(*init_state(config, mesh), 0, 0)
    source = find_checkpoint(init_from)
    with reading(source):
        meta = read_meta(source)
    check_same_model(meta["config"].get("model", {}), config, f"--init-from {source}")
    for key, then in meta["data"].get("vocabulary", {}).items():
        now = vocabulary.get(key, then)
        if now != then and (key != "tokenizer" or comparable(then, now)):
            say(f"WARNING: --init-from {source}: was trained on data whose {key} is {then}, here it is {now}")
    params = restore_item(source, "params", param_shapes(config, mesh))
    if init_state_kind == "params":
        say(f"start: parameters of {source}, fresh moments")
        fresh = jax.jit(optimizer(config).init, out_shardings=shardings(mesh, state_specs(config)[1]))(params)
        return State(params, fresh, 0, 0)
    if not (source / "opt_state").is_dir():
        raise ValueError(f"--init-from {source}: holds no moments; fix: --init-state params")
    then = meta["config"]["optim"]["skip_window"]  # of another length, perhaps, than this run's
    of_source = dataclasses.replace(config, optim=dataclasses.replace(config.optim, skip_window=then))
    opt_state = restore_item(source, "opt_state", state_shapes(of_source, mesh)[1])
    say(f"start: parameters and Adam moments of {source}")
    return State(params, opt_state._replace(**empty_window(config, mesh, params)), 0, 0)


def empty_window(config: Config, mesh, params) -> dict[str, jax.Array]:
    """What a new run's optimizer state holds besides moments and Adam's count, which are not made."""

    def rest(params):
        state = optimizer(config).init(params)._asdict()
        return {name: x for name, x in state.items() if name not in ("count", "mu", "nu")}

    return jax.jit(rest, out_shardings=NamedSharding(mesh, P()))(params)


def say_plan(config: Config, mesh, source: data.BatchSource) -> None:
    S, B = config.data.sequence_length, config.data.global_batch
    share = B // (mesh.shape["data"] * mesh.shape["fsdp"])
    say(
        f"{sum(config.parameter_sizes.values()):,} parameters; mesh {dict(mesh.shape)}; {B} x {S} = "
        f"{config.tokens_a_step:,} tokens a step, {share} sequences a device, {largest_microbatch(config, mesh)} at once; "
        f"{source.batches_per_epoch:,} steps an epoch"
    )


def checkpoint_meta(config: Config, state: State, identity: dict, source: data.BatchSource) -> dict:
    return {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "instances_seen": state.instances_seen,
        "tokens_seen": state.instances_seen * config.data.sequence_length,
        "items": ["params", "opt_state", "meta"],
        "data": identity | {"index_path": str(source.path.resolve())},
        "config": science_dict(config),
        "checksums": {"params": checksums(state.params), "opt_state": checksums(state.opt_state)},
        "versions": versions(),
        "environment": environment(),
    }


class Profile:
    """What --profile asks for: a trace of so many steps from `first` on, in RUN/profile."""

    def __init__(self, folder: Path, first: int, steps: int):
        self.folder, self.first, self.steps, self.tracing = folder, first, steps, False

    def before(self, step: int, finish: Callable[[], None]) -> None:
        if self.steps and step == self.first:
            finish()
            # The tracer of Python's functions hooks every thread that starts. Where something listens to Python's audit
            # events (filelock does), such a thread may die before it has begun, with a part of a checkpoint.
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self.tracing = True
        elif self.tracing and step == self.first + self.steps:
            finish()
            self.close()

    def close(self) -> None:
        """Also when the run ends before the profile does: a trace that is not ended is never written."""
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
            say(f"profile from step {self.first} on in {self.folder}")


# ----------------------------------------------------------------------------------------------------------- the step


def compile_train_step(config: Config, mesh, check_vma: bool = True):
    """The jitted step: (params, opt_state, batch, step) -> (params, opt_state, metrics). The state is donated.

    `mesh` may be abstract: then the step can be traced and lowered, but not run.
    """
    microbatch = largest_microbatch(config, mesh)
    execution = make_execution(config, microbatch, platform_of(mesh))
    specs, opt_specs = state_specs(config)
    step = jax.shard_map(
        partial(train_step, config=config, execution=execution, microbatch=microbatch),
        mesh=mesh,
        in_specs=(specs, opt_specs, batch_specs(config), P()),
        out_specs=(specs, opt_specs, P()),
        check_vma=check_vma and config.hardware.attention != "splash",  # the kernel has no types for it
    )
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=config.hardware.xla_flags)


def train_step(params, opt_state, batch, step, config: Config, execution: model.Execution, microbatch: int):
    """One update on one device's shard: everything between two states, with every collective in sight.

    local: params and moments as the ledger shards them; batch [B/(data*fsdp), S/context]; step int32, 1-based.
    """
    # One divisor for the loss of the whole batch.
    S = config.data.sequence_length
    # "counted" tells which labels there are where the loss mask holds weights (grpo.py).
    counted = batch.get("counted", batch["loss_mask"])
    labels = lax.psum(jnp.sum(counted, dtype=jnp.int32), (*BATCH_AXES, "context"))  # [] stays []
    filtered = lax.psum(jnp.sum(batch["filtered"], dtype=jnp.int32), BATCH_AXES)  # [] stays []
    # DIVERGENCE 7: one divisor for the whole batch. OLMo-core divides each rank's sum by that rank's own count and
    # averages. With filtered or padded instances the counts differ, and its loss depends on the number of ranks.
    divisor = labels + (filtered * S if config.loss.filtered_in_divisor else 0)
    divisor = jnp.maximum(divisor, 1).astype(jnp.float32)

    # Gradients, summed over the mesh, and the sums that are only reported.
    grads, sums = gradients(params, batch, divisor, config, execution, microbatch)
    ce_sum, lse_squared_sum, *more = lax.psum(sums, model.AXES)  # [2] stays [2]; an experiment has more
    ce, z_unscaled = ce_sum / divisor, lse_squared_sum / divisor

    # The global norm: each gradient is summed over exactly the axes along which it is sharded.
    specs, squares = param_specs(config), {}
    for name, g in grads.items():
        squares[name] = lax.psum(jnp.sum(jnp.square(g)), model.axes_of(specs[name]))  # [] stays []
    squares = jnp.stack(list(squares.values()))
    grad_norm = jnp.sqrt(jnp.sum(squares))

    # The update is elementwise, so it runs on the shards as they are.
    with jax.named_scope("optimizer"):
        update = optimizer(config).update
        updates, opt_state = update(grads, opt_state, params, loss=ce, grad_norm=grad_norm, step=step)
        params = optax.apply_updates(params, updates)
    broken = ~jnp.isfinite(squares)
    metrics = {
        "ce": ce,
        "z_unscaled": z_unscaled,  # the mean of lse^2, before z_loss
        "grad_norm": grad_norm,
        "lr": optim.learning_rate(config.optim, config.schedule, step),
        "skipped": opt_state.skipped,
        "nonfinite_in_a_row": opt_state.nonfinite_in_a_row,
        "first_nonfinite_gradient": jnp.where(jnp.any(broken), jnp.argmax(broken), -1),
        "labels": labels,
        "filtered": filtered,
    }
    names = architecture(config).TokenLoss._fields[2:]
    metrics |= {f"train/{name.removesuffix('_N')}": x / divisor for name, x in zip(names, more, strict=True)}
    return params, opt_state, metrics


def gradients(params, batch, divisor, config: Config, execution: model.Execution, microbatch: int):
    """Gradients of (sum of CE + z_loss lse^2) / divisor, summed over the mesh, and this device's share of the sums of CE
    and lse^2, which add up over the mesh.

    local: batch [B/(data*fsdp), S/context]; micro-batches of so many rows are accumulated in fp32.
    """
    params, code = model.vary(params), architecture(config)
    tensor = lax.axis_size("tensor")

    def share(params, piece):
        # This device's disjoint share of the global loss: the same tokens lie on every device along tensor.
        total, per_token = code.token_loss(params, piece, config.loss.z_loss, config.model, execution)
        mask = piece.get("counted", piece["loss_mask"])
        sums = jnp.stack([jnp.sum(jnp.where(mask, x, 0.0)) for x in per_token])  # CE, lse^2
        return total / divisor / tensor, sums / tensor

    def accumulate(carry, piece):
        (_, sums), grads = jax.value_and_grad(share, has_aux=True)(params, piece)
        return jax.tree.map(jnp.add, carry, (grads, sums)), None

    batch = model.vary({name: x for name, x in batch.items() if name != "filtered"})
    pieces = jax.tree.map(lambda x: x.reshape(-1, microbatch, *x.shape[1:]), batch)
    if pieces["tokens"].shape[0] == 1:
        (_, sums), grads = jax.value_and_grad(share, has_aux=True)(params, batch)
    else:
        n = len(code.TokenLoss._fields)
        zero = model.vary((jax.tree.map(jnp.zeros_like, params), jnp.zeros(n, jnp.float32)))
        (grads, sums), _ = lax.scan(accumulate, zero, pieces)
    return code.reduce_gradients(grads, config.model), sums


def optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    decay = {name: tensor.decay for name, tensor in architecture(config).ledger(config.model).items()}
    return optim.skip_step_adamw(config.optim, config.schedule, decay)


def state_specs(config: Config) -> tuple[dict[str, P], Any]:
    """PartitionSpecs of (params, optimizer state). Moments are sharded as their parameters, all else is replicated."""
    specs = param_specs(config)
    params = jax.eval_shape(partial(architecture(config).init_params, config.model), 0)
    state = jax.eval_shape(optimizer(config).init, params)
    return specs, jax.tree.map(lambda _: P(), state)._replace(mu=specs, nu=specs)


def state_shapes(config: Config, mesh):
    """What (params, opt_state) of a checkpoint are restored into."""
    params = param_shapes(config, mesh)
    return params, with_shardings(jax.eval_shape(optimizer(config).init, params), mesh, state_specs(config)[1])


def init_state(config: Config, mesh):
    """(params, optimizer state) of step 0, made where they live: no device ever holds a whole matrix."""
    params_to, state_to = shardings(mesh, state_specs(config))
    init = jax.jit(partial(architecture(config).init_params, config.model), out_shardings=params_to)
    params = init(np.uint32(config.run.seed))
    return params, jax.jit(optimizer(config).init, out_shardings=state_to)(params)


def log_held_out(held_out: HeldOut, params, step: int, log: MetricsLog, bar: bool, alive: Alive, stop: Stop) -> bool:
    """Evaluate, write and say the held-out loss after `step`; False if a signal interrupted it."""
    began, asked = time.perf_counter(), itertools.count()

    def should_stop() -> bool:  # asked before each batch
        if next(asked):
            alive.tick()
        return stop.code is not None

    results = held_out(params, bar, should_stop)
    if results is None:
        return False
    took = {
        "throughput/in-loop eval time (s)": time.perf_counter() - began,
        "throughput/in-loop eval batches": len(held_out.batches),
    }
    log.write(step, evaluation_metrics(results) | took)
    labels = [f"{label} {r['ce']:.4f}" for label, r in results.items() if label != "all"]
    text = f"step {step}: held-out CE {results['all']['ce']:.4f}"
    say(text + (f" ({', '.join(labels)})" if len(labels) > 1 else ""))
    return True


# ------------------------------------------------------------------------------------------------------- command line


def dry_run(config: Config, data_root: str | None) -> dict:
    """Check everything that can be checked without computing; the plan."""
    check_length(config)
    mesh = make_mesh(config)
    check_compiler_options(config)
    source, _, _ = open_data(config, mesh, data_root, None)
    steps, tokens = config.run.steps, config.tokens_a_step
    return {
        "parameters": sum(config.parameter_sizes.values()),
        "mesh": dict(mesh.shape),
        "sequences_a_device": config.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"]),
        "microbatch": largest_microbatch(config, mesh),
        "tokens_a_step": tokens,
        "steps": steps,
        "tokens": tokens * steps,
        "epochs": steps * config.data.global_batch / source.index.instances,
        "learning_rate_first_last": [optim.learning_rate(config.optim, config.schedule, s) for s in (1, steps)],
    }


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python train.py --config quickstart.yaml --set run.steps=100 --set optim.peak_lr=3e-4",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="a file, or a name in configs/")
    parser.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    parser.add_argument("--run-dir", help="default: runs/<run.name>")
    parser.add_argument("--data-root", help="folder that the index's paths start from; default: the index's own")
    parser.add_argument("--init-from", metavar="CKPT", help="start at step 0 from another run's parameters")
    parser.add_argument("--init-state", choices=("params", "adam"), default="params",
                        help="with --init-from: fresh moments, or the other run's")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    parser.add_argument("--allow", action="append", default=[], metavar="KEY",
                        help="let a resumed run change this key of its science, or all of a section; repeatable")  # fmt: skip
    parser.add_argument("--local-dir", metavar="DIR", help="where RUN is a mounted bucket: a folder of this machine for the "
                        "order of the data and the log, which each save copies to RUN")  # fmt: skip
    parser.add_argument("--alive-every", type=float, default=60, metavar="SECONDS",
                        help="say at least this often that the run gets on; default: %(default)g")  # fmt: skip
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS",
                        help="trace this many steps with jax.profiler into RUN/profile (TensorBoard and XProf show it)")  # fmt: skip
    add_json(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, compute nothing")
    group = parser.add_argument_group("several processes", "one on each host, all with the same --run-dir")
    group.add_argument("--distributed", action="store_true", help="as the cluster tells (TPU pod, Slurm, Open MPI)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="elsewhere: where process 0 listens")
    group.add_argument("--num-processes", type=int)
    group.add_argument("--process-id", type=int)
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace, config: Config) -> None:
    if args.init_from is None and args.init_state != "params":
        raise ValueError("--init-state adam: got no --init-from, expected a checkpoint to start from")
    if args.profile < 0:
        raise ValueError(f"--profile: got {args.profile}, expected a number of steps")
    if not 0 < args.alive_every < 1e6:
        raise ValueError(f"--alive-every: got {args.alive_every}, expected a number of seconds")
    keys = flatten(science_dict(config))
    for allowed in args.allow:
        if not any(f"{key}.".startswith(f"{allowed}.") for key in keys):
            raise ValueError(unknown_key(f"--allow {allowed}", allowed, keys))


def main(argv=None) -> int:
    args, several = parse_args(argv), False

    def command() -> int | dict:
        nonlocal several
        pin_settings()
        several = join_processes(args.coordinator, args.num_processes, args.process_id, args.distributed)
        config = load_config(args.config, args.hardware, args.set)
        run_dir = data.local_path(args.run_dir or f"runs/{config.run.name}")
        orbax_path(run_dir)  # or it is refused before anything is written
        check_flags(args, config)
        cache_compilations(config)
        return dry_run(config, args.data_root) if args.dry_run else train(config, run_dir, args)

    try:
        code = run_command("train.py", command, args.json)
    except BaseException as e:
        if not several:
            raise
        traceback.print_exc()
        code = EXIT_INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
    if several and code not in (0, EXIT_PREEMPTED):
        end_process(code)
    return code


if __name__ == "__main__":
    exit_with(main())
