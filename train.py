"""Train: configs, mesh, the training step, held-out evaluation, checkpoints, resume, metrics and the loop.

    python train.py --config quickstart.yaml
    python train.py --config stage1.yaml --hardware v5p --data-root /mnt/data --run-dir runs/stage1

A run is a pure function of its science config (configs/*.yaml) and its data; the hardware file
(configs/hardware/*.yaml) only says how it is computed. Starting in a run directory that holds checkpoints resumes it.
Directory checkpoints/N holds the state after N completed updates; metrics and evaluations of all steps up to N are on
disk before its save begins. One optimizer update is one call of the jitted, donated `train_step`, which is one
`shard_map` over (data, fsdp, context, tensor).

Exit codes: 0 done; 1 failed; 2 wrong usage, config or data; 143 preempted (SIGTERM; state saved); 130 interrupted.
Read next: model.py (what is computed), optim.py (the update), data.py (which tokens).
"""

import argparse
import asyncio
import contextlib
import copy
import dataclasses
import gc
import glob
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts
import yaml
from etils import epath
from jax import lax
from jax._src import hardware_utils
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm

import data
import model
import optim
from processes import HERE, find_config, parse_override, read_yaml, run_name_fault, set_key, unknown_key

BATCH_AXES = ("data", "fsdp")  # the batch is cut over both; every row of the global batch has one place
FORMAT_VERSION = 1
EXIT_PREEMPTED, EXIT_INTERRUPTED = 143, 130
HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead, and JAX ends the others


class RunFailed(RuntimeError):
    """The run cannot go on; printed as one line, exit code 1."""


# --------------------------------------------------------------------------------------------------------- configs


@dataclass(frozen=True)
class LossConfig:
    z_loss: float
    filtered_in_divisor: bool  # a filtered instance adds S to the divisor, as in OLMo-core


@dataclass(frozen=True)
class RunConfig:
    name: str
    steps: int  # where this run stops; where the learning-rate curve ends is schedule.total_steps
    seed: int  # of the initial parameters
    checkpoint_every: int
    keep_checkpoints: int | None  # newest N; null keeps all
    log_every: int  # steps between printed lines; metrics.jsonl and TensorBoard hold every step
    eval_index: str | None
    eval_every: int
    eval_batches: int | None  # of data.global_batch instances each; null: the whole index


@dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    context: int
    tensor: int  # one of the four may be -1: whatever the devices leave


@dataclass(frozen=True)
class HardwareConfig:
    mesh: MeshConfig
    microbatch: int  # at most so many sequences a device at once; the rest is accumulated
    attention: str
    attention_block: int
    splash: model.SplashConfig | None  # of attention splash
    remat: str | list | dict  # "all": every activation is saved; a list: those names; or {microbatch: either of them}
    scan_unroll: int
    loss_chunk: int
    loader_workers: int
    xla_flags: dict  # compiler options of the jitted step, as jax.jit takes them
    compilation_cache: str | None


@dataclass(frozen=True)
class Config:
    """One run, resolved: six sections of science, one of hardware."""

    model: model.ModelConfig
    data: data.DataConfig
    optim: optim.OptimConfig
    schedule: tuple[optim.SchedulePiece, ...]
    loss: LossConfig
    run: RunConfig
    hardware: HardwareConfig


# Sections of the two files: disjoint, so that hardware cannot change the maths.
SCIENCE = ("model", "data", "optim", "schedule", "loss", "run")
HARDWARE = tuple(f.name for f in dataclasses.fields(HardwareConfig))


def build(kind, value, where: str):
    """Check `value`, as YAML gave it, against the type `kind` and return it; ValueError names the place."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        return build(next((a for a in options if type(value) is a), options[0]), value, where)
    if dataclasses.is_dataclass(kind):
        fields = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise ValueError(f"{where}: got {value!r}, expected the keys {', '.join(fields)}")
        for key in value:
            if key not in fields:
                raise ValueError(unknown_key(f"{where}.{key}", str(key), fields))
        for key in fields:
            if key not in value:
                raise ValueError(f"{where}.{key}: missing; fix: add it (configs have no defaults)")
        return kind(**{key: build(t, value[key], f"{where}.{key}") for key, t in fields.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: got {value!r}, expected a list")
        return tuple(build(args[0], item, f"{where}.{i}") for i, item in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a mapping"}
        raise ValueError(f"{where}: got {value!r} ({type(value).__name__}), expected {names.get(kind, kind)}")
    return value


def load_config(config: str, hardware: str | None, overrides: list[str]) -> Config:
    """Read and check both files. Without `hardware` the file is chosen by the device that jax finds; RUN/config.yaml,
    the record of a run, brings its own."""
    path = find_config(config, HERE / "configs")
    return assemble_config(read_yaml(path), str(path), hardware, overrides)


def assemble_config(science: dict, name: str, hardware: str | None, overrides: list[str]) -> Config:
    """Config from the six science sections (`name`: where they come from), a hardware file and --set overrides."""
    recorded = science.get("hardware")
    science = {key: value for key, value in science.items() if key != "hardware"}
    if recorded is not None and hardware is None:
        machine = recorded
        say(f"hardware: as {name} says; --hardware takes another")
    else:
        machine = read_yaml(find_config(hardware or detect_hardware(), HERE / "configs" / "hardware"))
    if not isinstance(machine, dict):
        raise ValueError(f"{name}: hardware: got {machine!r}, expected a mapping")
    for raw, allowed, other, kind in ((science, SCIENCE, HARDWARE, "config"), (machine, HARDWARE, SCIENCE, "hardware")):
        for key in raw:
            if key in other:
                raise ValueError(f"{key}: stands in the {kind} file, belongs in the other one (science or hardware)")
            if key not in allowed:
                raise ValueError(unknown_key(key, str(key), allowed))
    raw = copy.deepcopy(science | {"hardware": machine})  # the caller's, often a checkpoint's record, stays what it is
    for override in overrides:
        dotted, value = parse_override(override)
        top = dotted.split(".")[0]
        if top not in SCIENCE + HARDWARE:
            raise ValueError(unknown_key(f"--set {dotted}", top, SCIENCE + HARDWARE))
        set_key(raw["hardware"] if top in HARDWARE else raw, dotted, value)
    for section in SCIENCE:
        if section not in raw:
            raise ValueError(f"{section}: missing section; fix: add it to {name}")
    result = Config(**{key: build(kind, raw[key], key) for key, kind in typing.get_type_hints(Config).items()})
    check_config(result)
    return result


def check_config(c: Config) -> None:
    """What no section can see alone. ValueError with both numbers."""
    optim.check_schedule(c.schedule)
    if c.model.window > c.data.sequence_length:
        raise ValueError(
            f"model.window: got {c.model.window}, expected at most data.sequence_length {c.data.sequence_length}"
        )
    for name in ("steps", "checkpoint_every", "log_every", "eval_every"):
        if not 1 <= getattr(c.run, name) < 2**31:
            raise ValueError(f"run.{name}: got {getattr(c.run, name)}, expected 1 to 2^31 - 1")
    if not 0 <= c.run.seed < 2**32:
        raise ValueError(f"run.seed: got {c.run.seed}, expected 0 to 2^32 - 1")
    for name in ("keep_checkpoints", "eval_batches"):
        if getattr(c.run, name) is not None and getattr(c.run, name) < 1:
            raise ValueError(f"run.{name}: got {getattr(c.run, name)}, expected a positive number or null")
    if isinstance(c.hardware.remat, str) and c.hardware.remat != "all":
        raise ValueError(f"remat: got {c.hardware.remat!r}, expected all, a list of names, or {{microbatch: names}}")
    if c.hardware.microbatch < 1:
        raise ValueError(f"microbatch: got {c.hardware.microbatch}, expected a positive number")
    if not 0 <= c.hardware.loader_workers <= 1024:
        raise ValueError(f"loader_workers: got {c.hardware.loader_workers}, expected 0 to 1024 processes")
    for size in range(1, min(c.hardware.microbatch, c.data.global_batch) + 1):
        execution(c, size, "tpu")
    if not 0 <= c.loss.z_loss < np.inf:
        raise ValueError(f"loss.z_loss: got {c.loss.z_loss}, expected 0 or more")
    if c.data.global_batch * c.data.sequence_length >= 2**31:
        raise ValueError(
            f"data.global_batch: {c.data.global_batch} x {c.data.sequence_length} tokens do not fit in int32"
        )
    if fault := run_name_fault(c.run.name):
        raise ValueError(fault)


def check_length(c: Config) -> None:
    """A run ends where its learning rate does; evaluation does not mind."""
    last, number = c.schedule[-1], len(c.schedule) - 1
    if last.kind != "constant" and c.run.steps > last.total_steps:
        raise ValueError(
            f"run.steps: got {c.run.steps}, expected at most schedule.{number}.total_steps {last.total_steps}, where the "
            f"learning rate has come to its end; fix: a longer curve (--set schedule.{number}.total_steps={c.run.steps}, "
            "on a resume with --allow schedule), or a last piece of kind constant, which has no end"
        )


def detect_hardware() -> str:
    """Name of the hardware file for the first device."""
    kind = jax.devices()[0].device_kind
    known = {"cpu": "cpu", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v7x": "ironwood", "TPU7x": "ironwood"}
    if jax.devices()[0].platform == "gpu":
        return "gpu"
    if kind not in known:
        raise ValueError(f"device: got kind {kind!r}, expected one of {', '.join(known)}; fix: pass --hardware NAME")
    return known[kind]


# ------------------------------------------------------------------------------------------------------------- mesh


def mesh_sizes(c: Config, n: int, batch: int | None = None) -> dict[str, int]:
    """Axis -> size over n devices; ValueError if model or batch (default: the global one) cannot be cut so."""
    sizes = asdict(c.hardware.mesh)
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh: got {sizes}, expected positive sizes, one of which may be -1")
    if n % fixed or (not free and n != fixed):
        raise ValueError(f"mesh: got {sizes} for {n} devices, expected sizes whose product is {n}")
    if free:
        sizes[free[0]] = n // fixed
    model.check_mesh(c.model, sizes, c.data.sequence_length)
    rows, batch = sizes["data"] * sizes["fsdp"], batch or c.data.global_batch
    if batch % rows:
        raise ValueError(f"global batch: got {batch}, expected a multiple of data x fsdp = {rows} of the mesh")
    return sizes


def make_mesh(c: Config, batch: int | None = None) -> jax.sharding.Mesh:
    """The mesh over all devices of all processes."""
    sizes = mesh_sizes(c, jax.device_count(), batch)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def microbatch(c: Config, local_batch: int) -> int:
    """Sequences a device computes at once: the largest divisor of its share that hardware.microbatch allows."""
    return max(n for n in range(1, min(c.hardware.microbatch, local_batch) + 1) if local_batch % n == 0)


def execution(c: Config, size: int, platform: str) -> model.Execution:
    """The hardware file's choices for micro-batches of `size`. Names saved for a larger one fit a smaller one."""
    remat = c.hardware.remat
    if isinstance(remat, dict):
        fitting = [key for key in remat if isinstance(key, int) and key >= size]
        if not fitting:
            raise ValueError(f"remat: got entries for {list(remat)} sequences, expected one for {size} or more")
        remat = remat[min(fitting)]
    return model.Execution(
        attention=c.hardware.attention,
        attention_block=c.hardware.attention_block,
        splash=c.hardware.splash,
        remat=None if remat == "all" else tuple(remat),
        scan_unroll=c.hardware.scan_unroll,
        loss_chunk=c.hardware.loss_chunk,
        interpret=platform != "tpu",
    )


def param_specs(c: Config) -> dict[str, P]:
    return {name: t.spec for name, t in model.ledger(c.model).items()}


def batch_specs(c: Config) -> dict[str, P | None]:
    token = P(BATCH_AXES, "context")
    return {
        "tokens": token,
        "labels": token,
        "loss_mask": token,
        "segment_ids": token if c.data.document_mask else None,  # None: the attention leaves the comparison out
        "filtered": P(BATCH_AXES),
    }


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def local_rows(mesh, c: Config) -> np.ndarray:
    """Rows of the global batch that this process's devices hold, ascending."""
    B = c.data.global_batch
    places = NamedSharding(mesh, P(BATCH_AXES)).addressable_devices_indices_map((B,)).values()
    return np.unique(np.concatenate([np.arange(B)[place] for place in places]))


def to_device(batch: dict, rows: np.ndarray, mesh, c: Config) -> dict[str, jax.Array | None]:
    """This process's rows -> global arrays cut over the mesh. Each device receives only its own block."""

    def put(name, spec):
        if spec is None:
            return None
        local = batch[name]
        shape = (c.data.global_batch, *local.shape[1:])

        def block(index):
            first, last, _ = index[0].indices(shape[0])
            start = np.searchsorted(rows, first)
            return local[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), block)

    return {name: put(name, spec) for name, spec in batch_specs(c).items()}


# ------------------------------------------------------------------------------------------------------------- step


def optimizer(c: Config):
    decay = {name: t.decay for name, t in model.ledger(c.model).items()}
    return optim.skip_step_adamw(c.optim, c.schedule, decay)


def state_specs(c: Config):
    """PartitionSpecs of (params, optimizer state): moments are cut as their parameters, all else is replicated."""
    specs = param_specs(c)
    state = jax.eval_shape(optimizer(c).init, jax.eval_shape(partial(model.init_params, c.model), 0))
    return specs, jax.tree.map(lambda _: P(), state)._replace(mu=specs, nu=specs)


def param_shapes(c: Config, mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What the params item of a checkpoint is restored into."""
    return with_shardings(jax.eval_shape(partial(model.init_params, c.model), 0), mesh, param_specs(c))


def state_shapes(c: Config, mesh):
    """The same for (params, optimizer state)."""
    params = param_shapes(c, mesh)
    return params, with_shardings(jax.eval_shape(optimizer(c).init, params), mesh, state_specs(c)[1])


def with_shardings(shapes, mesh, specs):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings(mesh, specs))


def init_state(c: Config, mesh):
    """(params, optimizer state) of step 0, made where they live: no device ever holds a whole matrix."""
    params_to, state_to = shardings(mesh, state_specs(c))
    params = jax.jit(partial(model.init_params, c.model), out_shardings=params_to)(np.uint32(c.run.seed))
    return params, jax.jit(optimizer(c).init, out_shardings=state_to)(params)


def gradients(params, batch, divisor, c: Config, run: model.Execution, size: int):
    """Gradients of (sum of CE + z_loss lse^2) / divisor, summed over the mesh, and this device's metric sums.

    local: batch [B/(data*fsdp), S/context]; micro-batches of `size` rows are accumulated in fp32.
    """
    params = model.vary(params)
    tensor = lax.axis_size("tensor")

    def share(params, piece):
        # This device's disjoint share of the global loss: the same tokens lie on every device along tensor.
        total, per_token = model.token_loss(params, piece, c.loss.z_loss, c.model, run)
        mask = piece["loss_mask"]
        sums = jnp.stack([jnp.sum(jnp.where(mask, x, 0.0)) for x in per_token])  # CE, lse^2
        return total / divisor / tensor, sums / tensor

    def accumulate(carry, piece):
        (_, sums), grads = jax.value_and_grad(share, has_aux=True)(params, piece)
        return jax.tree.map(jnp.add, carry, (grads, sums)), None

    batch = model.vary({name: x for name, x in batch.items() if name != "filtered"})
    pieces = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
    n = pieces["tokens"].shape[0]
    if n == 1:
        (_, sums), grads = jax.value_and_grad(share, has_aux=True)(params, batch)
    else:
        zero = model.vary((jax.tree.map(jnp.zeros_like, params), jnp.zeros(2, jnp.float32)))
        (grads, sums), _ = lax.scan(accumulate, zero, pieces)
    return model.reduce_gradients(grads, c.model), sums


def train_step(params, opt_state, batch, step, c: Config, run: model.Execution, size: int):
    """One update on one device's shard: everything between two states, with every collective in sight.

    local: params and moments as the ledger cuts them; batch [B/(data*fsdp), S/context]; step int32, 1-based.
    """
    S = c.data.sequence_length
    labels = lax.psum(jnp.sum(batch["loss_mask"], dtype=jnp.int32), (*BATCH_AXES, "context"))  # [] stays []
    filtered = lax.psum(jnp.sum(batch["filtered"], dtype=jnp.int32), BATCH_AXES)  # [] stays []
    # DIVERGENCE 7: one divisor for the whole batch. OLMo-core divides each rank's sum by that rank's own count and
    # averages, which depends on the number of ranks as soon as the counts differ (filtered or padded instances).
    divisor = labels + (filtered * S if c.loss.filtered_in_divisor else 0)
    divisor = jnp.maximum(divisor, 1).astype(jnp.float32)

    grads, sums = gradients(params, batch, divisor, c, run, size)
    ce_sum, lse_squared_sum = lax.psum(sums, model.AXES)  # [2] stays [2]
    ce, z_unscaled = ce_sum / divisor, lse_squared_sum / divisor

    specs = param_specs(c)
    squares = {}
    for name, g in grads.items():  # each gradient is summed over exactly the axes along which it is cut
        cut = tuple(axis for axis in model.AXES if axis in specs[name])
        squares[name] = lax.psum(jnp.sum(jnp.square(g)), cut)  # [] stays []
    squares = jnp.stack(list(squares.values()))
    grad_norm = jnp.sqrt(jnp.sum(squares))

    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer(c).update(grads, opt_state, params, loss=ce, grad_norm=grad_norm, step=step)
        params = optax.apply_updates(params, updates)
    broken = ~jnp.isfinite(squares)
    metrics = {
        "ce": ce,
        "z_unscaled": z_unscaled,
        "grad_norm": grad_norm,
        "lr": optim.learning_rate(c.optim, c.schedule, step),
        "skipped": opt_state.skipped,
        "nonfinite_in_a_row": opt_state.nonfinite_in_a_row,
        "first_nonfinite_gradient": jnp.where(jnp.any(broken), jnp.argmax(broken), -1),
        "labels": labels,
        "filtered": filtered,
    }
    return params, opt_state, metrics


def platform_of(mesh) -> str:
    """An abstract mesh stands for the machine that the hardware file is for."""
    return "tpu" if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat[0].platform


def compile_train_step(c: Config, mesh, check_vma: bool = True):
    """The jitted step: (params, opt_state, batch, step) -> (params, opt_state, metrics); the state is donated.

    `mesh` may be abstract: then the step can be traced and lowered, but not run.
    """
    local_batch = c.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    size = microbatch(c, local_batch)
    specs, opt_specs = state_specs(c)
    step = jax.shard_map(
        partial(train_step, c=c, run=execution(c, size, platform_of(mesh)), size=size),
        mesh=mesh,
        in_specs=(specs, opt_specs, batch_specs(c), P()),
        out_specs=(specs, opt_specs, P()),
        check_vma=check_vma and c.hardware.attention != "splash",  # the kernel has no types for it
    )
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=c.hardware.xla_flags)


def cache_compilations(c: Config) -> None:
    if c.hardware.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(data.local_path(c.hardware.compilation_cache)))


def check_compiler_options(c: Config) -> None:
    """Compile nothing with them, before the model is compiled for minutes."""
    try:
        jax.jit(lambda: 0, compiler_options=c.hardware.xla_flags).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError) as e:  # an unknown flag; a value that is none
        raise ValueError(f"xla_flags: {first_line(e)}; fix: take the flags of the compiler that is installed") from e


# ----------------------------------------------------------------------------------------------- held-out evaluation


def row_losses(params, piece, c: Config, run: model.Execution):
    """Per row: (sum of CE over unmasked labels, their count), each [b]. local: piece [b, S/context]."""
    _, per_token = model.token_loss(params, piece, 0.0, c.model, run)
    ce = jnp.sum(jnp.where(piece["loss_mask"], per_token.ce_N, 0.0), axis=1)
    return ce, jnp.sum(piece["loss_mask"], axis=1, dtype=jnp.int32)


def evaluation_step(params, batch, rows: Callable, size: int):
    """What rows(params, micro-batch) gives for each row, a tuple of [B], whole on every device.

    local: batch [B/(data*fsdp), S/context]. Per row, so that the result does not depend on how rows are batched.
    """
    params, batch = model.vary((params, {k: v for k, v in batch.items() if k != "filtered"}))
    pieces = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
    found = tuple(x.reshape(-1) for x in lax.map(partial(rows, params), pieces))
    local = found[0].shape[0]
    first = (lax.axis_index("data") * lax.axis_size("fsdp") + lax.axis_index("fsdp")) * local
    whole = local * lax.axis_size("data") * lax.axis_size("fsdp")

    def spread(x):  # [B/(data*fsdp)] -> [B]: every device adds its rows to zeros
        padded = lax.dynamic_update_slice(model.vary(jnp.zeros(whole, x.dtype)), x, (first,))
        on_first = jnp.where(lax.axis_index("tensor") == 0, padded, 0)  # rows are the same along tensor
        return lax.psum(on_first, model.AXES)

    return tuple(map(spread, found))


class HeldOut:
    """Held-out evaluation of one index: every instance once, token-weighted, summed in float64 in a fixed order.

    `batch` rows are computed at once over all devices; `limit`: so many instances, spread evenly, None for all.
    `trained` is what the models were trained on: another vocabulary is refused; so is the same data, but for
    `on_training_data` (None: where nobody can ask for it).
    """

    def __init__(self, c: Config, mesh, index: str, data_root: str | None, batch: int, limit: int | None,
                 trained: Sequence[data.TrainingData], on_training_data: bool | None = None):  # fmt: skip
        self.c = dataclasses.replace(c, data=dataclasses.replace(c.data, global_batch=batch))
        self.mesh, self.rows = mesh, local_rows(mesh, self.c)
        self.trained, self.on_training_data = trained, on_training_data
        self.of: list[dict] = []  # what each index that was opened is
        self.batches = self.open(index, data_root, limit)
        self.step = self.compile(row_losses, param_specs(c))

    def open(self, index: str, data_root: str | None, limit: int | None) -> data.EvaluationBatches:
        d = self.c.data
        batches = data.EvaluationBatches(
            index, data_root, d.global_batch, rows=self.rows, mask_token=d.mask_token, document_mask=d.document_mask,
            limit=limit,
        )  # fmt: skip
        check_vocabulary(batches.source.index, self.c, index)
        if "all" in batches.domains:
            raise ValueError(f"{index}: got the label 'all', which stands for all labels; fix: index with another one")
        self.of.append(self.check_held_out(batches))
        return batches

    def check_held_out(self, batches: data.EvaluationBatches) -> dict:
        """What the index is. It has the vocabulary of the training data, and none of its files unless that is meant."""
        path, index = batches.source.path, batches.source.index
        of = data.described(path, index) | {"instances": len(batches.instances)}
        if unknown := {key for trained in self.trained for key in trained.check_vocabulary(of)}:
            what = ", ".join(key for key in of if key in unknown)
            say(f"{path}: not compared with the training data, of which too little is known: {what}")
        if shared := max((trained.trained_on(index) for trained in self.trained), default=0):
            of["trained_on_files"] = shared
            what = f"{path}: {shared} of {len(index.files)} files are data that the model was trained on"
            if not self.on_training_data:
                flag = "" if self.on_training_data is None else ", or --on-training-data where that is meant"
                raise ValueError(f"{what}, expected held-out data; fix: another index{flag}")
            say(what)
        return of

    def compile(self, rows: Callable, specs, size: int | None = None):
        """jit of (params, cut as `specs` say, batch) -> what rows(params, micro-batch, config, execution) gives by row."""
        size = size or microbatch(
            self.c, self.c.data.global_batch // (self.mesh.shape["data"] * self.mesh.shape["fsdp"])
        )
        rows = partial(rows, c=self.c, run=execution(self.c, size, platform_of(self.mesh)))
        step = jax.shard_map(
            partial(evaluation_step, rows=rows, size=size),
            mesh=self.mesh,
            in_specs=(specs, batch_specs(self.c)),
            out_specs=P(),
            check_vma=self.c.hardware.attention != "splash",
        )
        return jax.jit(step, compiler_options=self.c.hardware.xla_flags)

    def by_row(self, params, progress: bool = False, should_stop=lambda: False) -> list[np.ndarray] | None:
        """What `step` gives, float64 [rows of all batches] each; None if `should_stop` cut it short."""
        inputs_are_checked()
        found = []
        bar = tqdm(self.batches, total=len(self.batches), desc="evaluating", unit="batch", leave=False,
                   disable=not progress)  # fmt: skip
        for batch in bar:
            if should_stop():
                return None
            rows = self.step(params, to_device(batch, self.rows, self.mesh, self.c))
            found.append([np.asarray(x, np.float64) for x in rows])
        n = len(self.batches.domain)  # the rest is padding
        found = [np.concatenate(x)[:n] for x in zip(*found, strict=True)]
        broken = np.flatnonzero(~np.isfinite(found).all(axis=0))
        if len(broken):
            label = self.batches.domains[self.batches.domain[broken[0]]]
            say(f"WARNING: {len(broken)} of {n} rows are not finite, the first is row {broken[0]} ({label}): means over them "
                "are no numbers either")  # fmt: skip
        return found

    def by_label(self, *columns: np.ndarray) -> dict[str, tuple]:
        """{label or "all": (rows, the sum of each column over them)}; a domain of -1 is padding."""
        domain = self.batches.domain
        groups = {label: domain == i for i, label in enumerate(self.batches.domains)} | {"all": domain >= 0}
        return {label: (int(here.sum()), *(x[here].sum() for x in columns)) for label, here in groups.items()}

    def __call__(self, params, progress: bool = False, should_stop=lambda: False) -> dict[str, dict] | None:
        """{label or "all": {"ce", "perplexity", "tokens", "instances"}}; None if `should_stop` cut it short."""
        found = self.by_row(params, progress, should_stop)
        return found and {
            label: mean_loss(ce, tokens) | {"instances": n}
            for label, (n, ce, tokens) in self.by_label(*found).items()
            if n > 0
        }


def mean_loss(ce: float, tokens: float) -> dict:
    """Of a summed cross-entropy; the perplexity of a run that has diverged is infinite, and null in JSON. Without a token
    there is no mean."""
    with np.errstate(over="ignore"):
        ce = float(ce) / tokens if tokens else np.nan
        return {"ce": ce, "perplexity": float(np.exp(ce)), "tokens": int(tokens)}


def eval_limit(c: Config) -> int | None:
    """Instances of one held-out evaluation of the run; None: all of them."""
    return None if c.run.eval_batches is None else c.run.eval_batches * c.data.global_batch


def check_vocabulary(index: "data.Index", c: Config, path: str) -> None:
    if index.vocab_size > c.model.vocab_size:
        raise ValueError(
            f"{path}: got vocab_size {index.vocab_size}, expected at most model.vocab_size {c.model.vocab_size}"
        )
    if index.sequence_length != c.data.sequence_length:
        raise ValueError(
            f"{path}: got sequence_length {index.sequence_length}, expected data.sequence_length "
            f"{c.data.sequence_length}; fix: build an index with --sequence-length {c.data.sequence_length}"
        )


# ------------------------------------------------------------------------------------------------------ checkpoints


class LiteralPath(type(epath.Path("/"))):
    """A folder whose own name is no pattern. Orbax finds what the processes wrote with `glob`, and epath's takes brackets
    in the name of a run for one: nothing was found, and the checkpoint stayed empty."""

    def glob(self, pattern: str):
        return map(type(self), Path(self).glob(pattern))


def orbax_path(folder: Path) -> LiteralPath:
    """The folder for Orbax and tensorstore; ValueError for the few names under which they would write elsewhere."""
    # Both drop "x/.." without looking where x leads.
    path = os.path.realpath(folder) if ".." in folder.parts else str(folder.absolute())
    for wrong, what in (
        ("\\" in path, "a backslash"),
        (re.search(r"gs:(/|$)", path), "a name that ends in gs:"),
        (re.search(r"\.__lock(/|$)", path), "a name that ends in .__lock"),
        (re.search(r"[\udc80-\udcff]", path), "a byte that is not UTF-8"),
        (re.match(r"/(gs|s3|az|hf)(/|$)", path), "a top folder that is called as a bucket: gs, s3, az, hf"),
    ):
        if wrong:
            raise ValueError(
                f"{path!r}: got {what}, expected a path that Orbax can write to; fix: another name, or a symbolic link"
            )
    return LiteralPath(path)


class Checkpoints:
    """RUN/checkpoints/N with the items params, opt_state and meta, through Orbax's CheckpointManager, asynchronously."""

    def __init__(self, folder: Path, keep: int | None):
        self.folder, written = folder.absolute(), orbax_path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            written,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, save_interval_steps=1),
            item_handlers={
                "params": self.checked("params"),
                "opt_state": self.checked("opt_state"),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )
        self.saving = {}  # item -> shapes and dtypes, of the newest save
        self.failure: Exception | None = None  # of the same, after the processes have written
        self.step: int | None = None  # of the same
        self.began: float | None = None  # while it is in flight
        self.seconds: dict[str, float] = {}  # durations, not logged yet

    def checked(self, item: str) -> ocp.PyTreeCheckpointHandler:
        """Writes an item. A save is done when all that was saved can be found: process 0 looks before the step gets its
        name, and so before an older one is deleted."""
        handler = ocp.PyTreeCheckpointHandler()
        finalize = handler.finalize

        def finalize_and_look(item_folder):
            try:
                with patient_loops():
                    finalize(item_folder)
                check_whole(Path(item_folder), self.saving[item])
            except Exception as e:
                self.failure = e
                raise

        handler.finalize = finalize_and_look
        return handler

    def save(self, step: int, params, opt_state, meta: dict) -> None:
        """Begin to write step `step`; a failure of the save before this one is raised here."""

        def by_layer(name, x):  # one chunk a layer, so that a layer can be read without the whole leaf
            if name not in model.LAYER_TENSORS:  # shard_axes would cut embed into single rows
                return ocp.SaveArgs(chunk_byte_size=2**26)
            if x.nbytes // x.shape[0] < 2**20:  # below 1 MiB chunks cost more than they save
                return ocp.SaveArgs()
            return ocp.SaveArgs(chunk_byte_size=x.nbytes // x.shape[0], shard_axes=(0,))

        args_of = {name: by_layer(name, x) for name, x in params.items()}
        opt_args = jax.tree.map(lambda _: ocp.SaveArgs(), opt_state)._replace(mu=args_of, nu=args_of)
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params, save_args=args_of),
            opt_state=ocp.args.PyTreeSave(opt_state, save_args=opt_args),
            meta=ocp.args.JsonSave(meta),
        )
        self.wait()
        self.step, self.began = step, time.perf_counter()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, opt_state))
        self.saving = dict(zip(("params", "opt_state"), shapes, strict=True))
        if not self.write(lambda: self.manager.save(step, args=items)):
            raise RunFailed(
                f"{self.folder / str(step)}: Orbax refused to save, newest step there: {self.manager.latest_step()}"
            )

    def restore_latest(self, c: Config, mesh, data_identity: dict, allow: Sequence[str] = ()):
        """(step, params, opt_state, meta) of the newest usable checkpoint, or None if there has never been one.

        A step that cannot be read is reported, renamed to N.damaged (nothing is deleted) and the one before it used.
        A step that is readable but belongs to something else is a ValueError.
        """
        damaged = sorted(self.folder.glob("*.damaged"))
        for step in sorted(self.manager.all_steps(), reverse=True):
            folder, damage = self.folder / str(step), None
            try:
                meta = read_meta(folder)
                check_meta(meta, c, data_identity, folder, allow)
                state = dict(zip(("params", "opt_state"), state_shapes(c, mesh), strict=True))
                for item in state:
                    state[item] = read_item(folder, item, state[item])
            except DamagedCheckpoint as e:
                damage = str(e)
            # Each process reads its own part: what one of them cannot read is damaged for all.
            damage = first_of_any_process(damage) or wrong_sums(meta, **state)
            if damage is None:
                return step, state["params"], state["opt_state"], meta
            say(f"checkpoint {folder} is damaged: {damage}")
            damaged.append(self.set_aside(step))
        if damaged:
            raise RunFailed(
                f"{self.folder}: no usable checkpoint is left beside {', '.join(p.name for p in damaged)}; nothing was "
                "deleted; fix: restore one of them, or start again in another --run-dir"
            )
        return None

    def set_aside(self, step: int) -> Path:
        source = self.folder / str(step)
        target = next(t for i in range(1000) if not (t := source.with_name(f"{step}.damaged{i or ''}")).exists())
        if jax.process_index() == 0:
            source.rename(target)
            say(f"renamed it to {target.name}; using the checkpoint before it")
        wait_for_processes(f"set aside {step}")
        self.manager.reload()
        return target

    def write(self, call: Callable):
        """call(), which meets what made the save in flight fail: a full disk, a folder that is gone."""
        try:
            return call()
        except Exception as e:
            raise RunFailed(
                f"{self.folder / str(self.step)}: a checkpoint could not be written: {first_line(e)}; fix: mend that and "
                "start again, it goes on from the newest complete checkpoint"
            ) from e

    def wait(self) -> None:
        """Until the save in flight is complete; its failure is raised here."""

        def finish():
            while self.manager.is_saving_in_progress():
                if self.failure:  # Orbax would wait 20 minutes for the other processes, which wait for this one
                    raise self.failure
                time.sleep(0.01)
            self.manager.wait_until_finished()

        self.write(finish)
        if self.began is not None:
            self.seconds["checkpoint/save_async_duration_s"] = time.perf_counter() - self.began
            self.began = None

    def durations(self) -> dict[str, float]:
        """Seconds of what ended since the last call, under OLMo-core's names: save is what training waited for,
        save_async what passed until the checkpoint was complete. A save that has failed is noticed here."""
        if self.failure or self.began is not None and not self.manager.is_saving_in_progress():
            self.wait()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def close(self) -> None:
        self.wait()
        self.manager.close()


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read."""


UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError)  # what Orbax raises on files that are damaged


def first_line(e: BaseException) -> str:
    text = data.os_error(e) if isinstance(e, OSError) else str(e)
    line = (text.strip().splitlines() or [type(e).__name__])[0]
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-245:]}"  # libraries put the reason last


class PatientLoop(asyncio.SelectorEventLoop):
    """Orbax closes its loop at the first leaf that cannot be read, while tensorstore still reads the others, which then
    call into a closed loop: screens of tracebacks, and now and then a crash. This one lets them end first."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def patient_loops():
    """Orbax makes its loops with asyncio.new_event_loop."""
    new_event_loop, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


def read_arrays(restore: Callable):
    """restore(), with what says that files are damaged as DamagedCheckpoint; a device out of memory stays what it is."""
    try:
        with patient_loops():
            return restore()
    except Exception as e:  # Orbax wraps what tensorstore says (a ValueError) into a bare Exception
        cause = e.__cause__ or e
        if isinstance(cause, UNREADABLE):
            raise DamagedCheckpoint(first_line(cause)) from e
        raise


@jax.jit
def bit_sums(tree):
    """For every leaf the sum of its 32-bit words modulo 2^32: exact, and therefore the same on every mesh."""

    def leaf(x):
        words = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.sum(words, dtype=jnp.uint32)

    return jax.tree.map(leaf, tree)


def checksums(tree) -> dict[str, int]:
    """Stored in meta. The array files have none of their own: a flipped bit in one is read as another number."""
    sums = jax.tree_util.tree_leaves_with_path(jax.device_get(bit_sums(tree)))
    return {jax.tree_util.keystr(path): int(x) for path, x in sums}


def wrong_sums(meta: dict, **items) -> str | None:
    """What differs from the sums in meta, the same on all processes; None if nothing does."""
    for item, tree in items.items():
        saved = meta.get("checksums", {}).get(item)  # a converted checkpoint may have none
        for name, now in checksums(tree).items() if saved is not None else ():
            if saved.get(name) != now:
                return f"item {item!r}: {name}: the numbers read are not those that were saved"
    return None


def read_item(step_folder: Path, item: str, target):
    """One item as this process's devices need it; no process waits for another."""
    check_tree(step_folder / item, target)
    args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    return read_arrays(lambda: ocp.PyTreeCheckpointHandler().restore(orbax_path(step_folder / item), args=args))


def read_meta(step_folder: Path) -> dict:
    path = step_folder / "meta" / "metadata"
    try:
        meta = json.loads(path.read_text())
        missing = {"format_version", "step", "instances_seen", "data", "config"} - set(meta)
    except (OSError, ValueError, TypeError) as e:
        raise DamagedCheckpoint(f"item 'meta' cannot be read ({path}: {first_line(e)})") from e
    if missing:
        raise DamagedCheckpoint(f"item 'meta' ({path}) lacks {', '.join(sorted(missing))}")
    if meta["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path}: got format version {meta['format_version']}, expected {FORMAT_VERSION}")
    return meta


def check_tree(item_folder: Path, target):
    """The item holds exactly the leaves of `target`, with their shapes and dtypes; Orbax itself would cast silently.
    Returns what Orbax tells of each leaf."""
    item = item_folder.name.partition(".")[0]  # in a step that is being written more follows
    if not item_folder.is_dir():
        raise DamagedCheckpoint(f"item {item!r} is missing ({item_folder})")
    try:
        with patient_loops():
            tree = ocp.PyTreeCheckpointHandler().metadata(orbax_path(item_folder)).tree
    except UNREADABLE as e:
        raise DamagedCheckpoint(f"item {item!r} cannot be read: {first_line(e)}") from e

    def leaves(tree):
        return {
            tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path): (tuple(x.shape), np.dtype(x.dtype))
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    there, wanted = leaves(tree), leaves(target)
    for name in sorted(there.keys() | wanted.keys()):
        if there.get(name) != wanted.get(name):
            raise ValueError(
                f"{item_folder}: {'.'.join(name)}: got {there.get(name, 'nothing')}, expected "
                f"{wanted.get(name, 'nothing')}; fix: use the model config that this checkpoint was made with"
            )
    return tree


def check_whole(item_folder: Path, target) -> None:
    """Besides, all chunks of all leaves are listed in it. None of them is read."""
    leaves = jax.tree.leaves(check_tree(item_folder, target))
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{orbax_path(item_folder)}/"}}
    listed = Counter(key.decode().rpartition("/")[0] for key in ts.KvStore.open(store).result().list().result())
    for leaf in leaves:
        pieces = zip(leaf.shape, leaf.storage.chunk_shape, strict=True)
        expected = math.prod(-(-size // chunk) for size, chunk in pieces) + 1  # and one that describes them
        if listed[leaf.name] != expected:
            item = item_folder.name.partition(".")[0]
            raise DamagedCheckpoint(f"item {item!r}: {leaf.name}: got {listed[leaf.name] - 1} of {expected - 1} chunks")


def check_meta(meta: dict, c: Config, data_identity: dict, where: Path, allow: Sequence[str]) -> None:
    """Refuse to resume another run. What changes the science of this one is refused unless --allow names it; what only
    steers it (run.*) may change. Both are said."""
    if "opt_state" not in meta.get("items", ["opt_state"]):
        raise ValueError(
            f"{where}: holds no optimizer state; fix: start from it with --init-from and --init-state params"
        )
    if meta.get("stage2_init"):
        raise ValueError(
            f"{where}: is the prepared start of a stage, not a run; fix: another --run-dir, with --init-from and "
            "--init-state adam"
        )
    tokens = meta["instances_seen"] * meta["data"]["sequence_length"]
    if (meta["step"], meta.get("tokens_seen")) != (int(where.name), tokens):
        raise DamagedCheckpoint(
            f"item 'meta' contradicts itself: step {meta['step']}, instances_seen {meta['instances_seen']}, tokens_seen "
            f"{meta.get('tokens_seen')}"
        )
    for key, now in data_identity.items():
        then = meta["data"].get(key)
        if then == now or key == "usable":
            continue
        if key == "vocabulary":
            check_same_vocabulary(then, now, where)
            continue
        if key == "held_out":
            if key in meta["data"]:
                say(f"the held-out data changes from {then} to {now}")
            continue
        if key != "global_batch":
            raise ValueError(f"{where}: data.{key}: got {now}, expected {then} as in the run; fix: use the run's own data "
                             "or another --run-dir")  # fmt: skip
        if meta["instances_seen"] >= min(data_identity["usable"], meta["data"]["usable"]):
            raise ValueError(
                f"{where}: data.global_batch: got {now}, expected {then}: it can change in the first epoch only"
            )
    then, now = flatten(meta["config"]), flatten(science_dict(c))
    refused = []
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) == now.get(key) or key == "data.index":  # where it lies; its fingerprint is compared above
            continue
        difference = f"{key}: got {now.get(key)}, expected {then.get(key)} as in the run"
        if key.startswith("model.") and key not in ("model.compute_dtype", "model.grad_reduce_dtype"):
            raise ValueError(f"{where}: {difference}; fix: another --run-dir")
        if key == "optim.skip_window":
            raise ValueError(
                f"{where}: {difference}; the window is a part of the state; fix: a new run with --init-from"
            )
        if key.startswith("run.") or any(f"{key}.".startswith(f"{allowed}.") for allowed in allow):
            say(f"{key} changes from {then.get(key)} to {now.get(key)}")
        else:
            refused.append(difference)
    if refused:
        keys = " ".join(f"--allow {difference.split(':')[0]}" for difference in refused)
        raise ValueError(f"{where}: {'; '.join(refused)}; fix: leave them as they were, or {keys} if it is meant")


def check_same_vocabulary(then: dict | None, now: dict, where: Path) -> None:
    """The fingerprint covers the ids; EOS decides what a document is. A tokenizer.json may come and go beside them."""
    if then is None:
        say(f"{where}: does not say which tokenizer and EOS its data has; from now on: {now}")
        return
    for key in ("vocab_size", "eos_id"):
        if then[key] != now[key]:
            raise ValueError(f"{where}: data.{key}: got {now[key]}, expected {then[key]} as in the run; fix: use the run's "
                             "own index")  # fmt: skip
    say(f"the tokenizer beside the data changes from {then['tokenizer']} to {now['tokenizer']}")


# Settings of JAX that variables such as JAX_ENABLE_X64 change, and with them the numbers of a run.
PINNED = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_default_matmul_precision": None,
    "jax_softmax_custom_jvp": False,
}
# What else does; it is part of the machine, so that it is recorded, and a change of it is said.
RECORDED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DISABLE_JIT",
            "JAX_OPTIMIZATION_LEVEL", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "JAX_ALLOW_F16_REDUCTIONS")  # fmt: skip


def pin_settings() -> None:
    """What JAX reads from the environment has no say in the numbers. On a machine without an accelerator libtpu, which
    `launch.py plan` needs, is left alone: it prints a screen of errors where it finds no TPU."""
    devices = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
    accelerators = hardware_utils.num_available_tpu_chips_and_device_id()[0] or any(map(glob.glob, devices))
    if not jax.config.jax_platforms and importlib.util.find_spec("libtpu") and not accelerators:
        jax.config.update("jax_platforms", "cpu")
    for name, value in PINNED.items():
        if getattr(jax.config, name) != value:
            print(
                f"{name.upper()}={getattr(jax.config, name)} would change the numbers and is not used", file=sys.stderr
            )
            jax.config.update(name, value)


def environment() -> dict[str, str]:
    """RECORDED, as far as it is set, without the flags that compute nothing."""
    idle = re.compile("--xla_(force_host_platform_device_count|dump)")
    words = {name: [w for w in os.environ.get(name, "").split() if not idle.match(w)] for name in RECORDED}
    return {name: " ".join(found) for name, found in words.items() if found}


def versions() -> dict[str, str]:
    return {p: metadata.version(p) for p in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy")}


def say_changes_of_machine(meta: dict) -> None:
    """Of what a checkpoint was made with, and what may change the last bits of the run's numbers from here on."""
    for then, now in ((meta.get("versions"), versions()), (meta.get("environment"), environment())):
        for name in sorted(then.keys() | now.keys()) if then is not None else ():
            if then.get(name) != now.get(name) and (then.get(name) or name in RECORDED):
                say(f"{name} changes from {then.get(name)} to {now.get(name)}")


def science_dict(c: Config) -> dict:
    return json.loads(json.dumps({key: value for key, value in asdict(c).items() if key != "hardware"}))


def flatten(tree, prefix: str = "") -> dict:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flat = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict | list) else {f"{prefix}{key}": value}
    return flat


def find_checkpoint(path: str) -> Path:
    """CKPT on a command line: RUN/checkpoints/N, or a run directory (its newest step that is complete)."""
    p = data.local_path(path)
    if (p / "params").is_dir():
        return p.absolute()
    folder = p / "checkpoints" if (p / "checkpoints").is_dir() else p
    steps = [int(s.name) for s in folder.glob("*") if s.name.isdigit() and (s / "meta" / "metadata").is_file()]
    if not steps:
        raise ValueError(f"{path}: no checkpoint found, expected a run directory or RUN/checkpoints/N")
    return (folder / str(max(steps))).absolute()


def restore_item(step_folder: Path, item: str, target):
    """One item (params or opt_state) of a checkpoint, in the shapes, dtypes and shardings of `target`."""
    try:
        meta = read_meta(step_folder)
        tree = read_item(step_folder, item, target)
        if damage := wrong_sums(meta, **{item: tree}):
            raise DamagedCheckpoint(damage)
        return tree
    except DamagedCheckpoint as e:
        raise RunFailed(f"{step_folder}: {e}") from e


# What a stage may change in its model: the precision, which rows of the softmax are padding, and YaRN for long context.
STAGE_MAY_CHANGE = ("compute_dtype", "grad_reduce_dtype", "mask_padded_vocab", "init_std", "yarn")


def check_same_model(then: dict, c: Config, where: str) -> None:
    """Parameters of another model may have the same shapes: other heads, another window, another RoPE."""
    now = science_dict(c)["model"]
    for key in then:
        if then[key] == now.get(key):
            continue
        if key not in STAGE_MAY_CHANGE:
            raise ValueError(f"{where}: model.{key}: got {now.get(key)}, expected {then[key]} as there; fix: the config "
                             "of a later stage keeps the model of the first")  # fmt: skip
        say(f"model.{key} changes from {then[key]} to {now.get(key)}")


def initial_state(c: Config, mesh, init_from: str | None, init_state_kind: str, vocabulary: dict):
    """State of step 0: from the seed, or from another run's parameters (and prepared moments). `vocabulary`: of the data."""
    if init_from is None:
        say(f"start: new parameters from seed {c.run.seed}")
        return init_state(c, mesh)
    source = find_checkpoint(init_from)
    try:
        meta = read_meta(source)
    except DamagedCheckpoint as e:
        raise ValueError(f"--init-from {source}: {e}") from e
    check_same_model(meta["config"].get("model", {}), c, f"--init-from {source}")
    for key, then in meta["data"].get("vocabulary", {}).items():
        now = vocabulary.get(key, then)
        if now != then and (key != "tokenizer" or data.comparable(then, now)):
            say(f"WARNING: --init-from {source}: was trained on data whose {key} is {then}, here it is {now}")
    params_target, state_target = state_shapes(c, mesh)
    params = restore_item(source, "params", params_target)
    if init_state_kind == "params":
        say(f"start: parameters of {source}, fresh moments")
        opt_specs = shardings(mesh, state_specs(c)[1])
        return params, jax.jit(optimizer(c).init, out_shardings=opt_specs)(params)
    if not meta.get("stage2_init") or not (source / "opt_state").is_dir():
        raise ValueError(
            f"--init-from {source}: no moments prepared for a new stage; fix: convert.py stage2-init, or --init-state params"
        )
    say(f"start: parameters and Adam moments of {source}")
    return params, restore_item(source, "opt_state", state_target)


# ---------------------------------------------------------------------------------------------------------- metrics


class MetricsLog:
    """metrics.jsonl and TensorBoard, every step, under the names of Ai2's dashboard. Only process 0 writes.

    Starting after step N forgets what a dead run had logged past N: the file is cut, TensorBoard is told to purge.
    They are written in `folder`: the run directory, or a local one from which `sync` copies them there.
    """

    def __init__(self, run_dir: Path, after_step: int, folder: Path):
        self.enabled = jax.process_index() == 0
        self.evaluated = 0  # newest step whose held-out evaluation is in the file
        if not self.enabled:
            return
        self.run_dir, self.folder, self.path = run_dir, folder, folder / "metrics.jsonl"
        if folder != run_dir:  # what a start before this one left there has been copied, or lies behind the checkpoint
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".jsonl.tmp")
        last = 0
        with open(temporary, "w") as kept:
            try:
                for line, row in read_metrics(run_dir / "metrics.jsonl"):
                    if row["step"] <= after_step:
                        kept.write(line)
                        last = max(last, row["step"])
                        self.evaluated = row["step"] if is_evaluation(row) else self.evaluated
            except ValueError as e:
                if last < after_step:
                    raise
                say(f"{e}; it lies behind the checkpoint and is left out")  # a machine that lost power wrote it in part
            if last < after_step:
                say(f"{run_dir / 'metrics.jsonl'}: holds steps up to {last}, the checkpoint those up to {after_step}: a "
                    "gap remains")  # fmt: skip
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(temporary, self.path)
        self.file = open(self.path, "a", buffering=1)  # a line is there to be read as soon as it is written
        # The writer below SummaryWriter: synchronous, so that what is flushed is on disk, and it keeps tags as they are.
        (folder / "tensorboard").mkdir(exist_ok=True)
        self.board = EventsWriter(str((folder / "tensorboard" / "events").absolute()))  # "s3:x" would be an address
        purge = after_step + 1
        self.board.write_event(Event(wall_time=time.time(), step=purge, file_version="brain.Event:2"))
        self.board.write_event(
            Event(wall_time=time.time(), step=purge, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, values: dict[str, float | int]) -> None:
        if not self.enabled:
            return
        finite = {tag: value if np.isfinite(value) else None for tag, value in values.items()}  # JSON has no NaN
        self.file.write(json.dumps({"step": step} | finite) + "\n")
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.board.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self.board.flush()

    def sync(self) -> None:
        """Everything written so far is on disk, in the run directory, when this returns."""
        if not self.enabled:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.board.flush()
        if self.folder != self.run_dir:
            for path in (self.path, *(self.folder / "tensorboard").iterdir()):
                target = self.run_dir / path.relative_to(self.folder)
                target.parent.mkdir(exist_ok=True)
                with data.replacing(target) as f, open(path, "rb") as ours:
                    shutil.copyfileobj(ours, f)

    def close(self) -> None:
        if self.enabled:
            self.sync()
            self.file.close()
            self.board.close()


def read_metrics(path: Path) -> Iterator[tuple[str, dict]]:
    """(line, its content) of every whole line; a last line without its end was left by a killed writer."""
    if path.exists():
        with open(path, errors="backslashreplace") as lines:  # which is not JSON either
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    return
                try:
                    row = json.loads(line)
                    if type(row["step"]) is not int:
                        raise TypeError("step")
                except (ValueError, TypeError, KeyError) as e:
                    raise ValueError(
                        f"{path}, line {number}: got {line[:40]!r}, expected a JSON object with a step"
                    ) from e
                yield line, row


def is_evaluation(row: dict) -> bool:
    return any(tag.startswith("eval/") for tag in row)


def tensor_sizes(c: Config) -> dict[str, int]:
    return {name: int(np.prod(t.shape)) for name, t in model.ledger(c.model).items()}


def flops_per_token(c: Config) -> int:
    """Of one update, without recomputation: 6 a weight of matmuls and, a layer, 12 H K min(window, S).

    OLMo-core nn/transformer/model.py:num_flops_per_token; embeddings and block norms count nothing."""
    weights = sum(n for name, n in tensor_sizes(c).items() if name not in ("embed", "attn_norm", "ffn_norm"))
    S, cycles = c.data.sequence_length, c.model.n_layers // len(c.model.pattern)
    keys = cycles * sum(min(c.model.window, S) if kind == "s" else S for kind in c.model.pattern)
    return 6 * weights + 12 * c.model.n_heads * c.model.head_dim * keys


# bf16 FLOP/s of one JAX device: a v5p chip; half an Ironwood chip (2,307); an H100 as OLMo-core counts it.
PEAK_FLOPS = {"TPU v5": 459e12, "TPU v5p": 459e12, "TPU v7x": 1153.5e12, "TPU7x": 1153.5e12,
              "NVIDIA H100 80GB HBM3": 989.5e12}  # fmt: skip


def model_flops_per_token(c: Config) -> dict[str, float]:
    """Of one update, in both conventions: 6 a weight of matmuls (no input embedding, no padding rows) and, a layer,
    12 H K for each key: S/2 of them in every layer ("full causal", as the case study counts), or those that are
    visible, sliding windows considered ("window-correct")."""
    m, S = c.model, c.data.sequence_length
    sizes = tensor_sizes(c)
    weights = m.vocab_size * m.d_model + sum(sizes[name] for name in sizes if name.startswith("w"))

    def visible(window: int) -> float:  # keys of an average query, its own included
        return (window * (window + 1) / 2 + (S - window) * window) / S

    cycles = m.n_layers // len(m.pattern)
    keys = {
        "full causal": m.n_layers * S / 2,
        "window-correct": cycles * sum(visible(min(m.window, S) if kind == "s" else S) for kind in m.pattern),
    }
    return {name: 6 * weights + 12 * m.n_heads * m.head_dim * n for name, n in keys.items()}


def utilisation(c: Config, tokens_per_second: float, device_kind: str) -> dict[str, float]:
    """TFLOP/s of a device that trains on so many tokens a second, and, where its peak is known, MFU in percent."""
    values, peak = {}, PEAK_FLOPS.get(device_kind)
    for name, flops in model_flops_per_token(c).items():
        values[f"throughput/device/TFLOPs ({name})"] = flops * tokens_per_second / 1e12
        if peak:
            values[f"throughput/device/MFU ({name})"] = 100 * flops * tokens_per_second / peak
    if peak:
        values["throughput/device/MFU"] = 100 * flops_per_token(c) * tokens_per_second / peak
    return values


def step_metrics(m: dict, step: int, seen: int, c: Config) -> dict[str, float | int]:
    """The step's numbers under Ai2's names (facts of the run; timings are added by the loop)."""
    tokens = c.data.global_batch * c.data.sequence_length
    sizes, total_tokens = tensor_sizes(c), seen * c.data.sequence_length
    unfiltered = (c.data.global_batch - int(m["filtered"])) * (c.data.sequence_length - 1)  # labels
    padding = 1 - int(m["labels"]) / unfiltered if c.data.mask_token is not None and unfiltered else None
    ce = float(m["ce"])
    values = {
        "train/CE loss": ce,
        "train/PPL": float(np.exp(ce)) if ce < 10 else None,  # as OLMo-core: only where it means something
        "train/Z loss": c.loss.z_loss * float(m["z_unscaled"]),
        "train/Z loss unscaled": float(m["z_unscaled"]),
        "train/masked labels (%)": 1 - int(m["labels"]) / tokens,
        "train/masked instances (%)": int(m["filtered"]) / c.data.global_batch if c.data.repetition_filter else None,
        "train/padding labels (%)": padding,  # ours: the share of data.mask_token in instances that were not filtered
        "optim/total grad norm": float(m["grad_norm"]),
        "optim/LR (group 0)": float(m["lr"]),
        "optim/LR (group 1)": float(m["lr"]),
        "optim/step skipped": int(m["skipped"]),
        "optim/step_skipped": int(m["skipped"]),
        "throughput/total tokens": total_tokens,
        "throughput/total petaflops": total_tokens * flops_per_token(c) / 1e15,
        "throughput/chinchilla multiple": total_tokens / (20 * (sum(sizes.values()) - sizes["embed"])),
        "perf/total_tokens": total_tokens,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def evaluation_metrics(results: dict[str, dict]) -> dict[str, float]:
    values = {}
    for label, r in results.items():
        values |= {f"eval/lm/{label}/CE loss": r["ce"], f"eval/lm/{label}/PPL": r["perplexity"]}
    return values


def draw_curves(run_dir: Path, path: Path | None = None) -> Path:
    """RUN/curves.png, or `path`, from metrics.jsonl: training and held-out loss, learning rate, gradient norm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    skipped = []
    curves: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for _, row in read_metrics(run_dir / "metrics.jsonl"):
        for tag in row:
            if tag in ("train/CE loss", "optim/LR (group 0)", "optim/total grad norm") or tag.startswith("eval/"):
                curves[tag][0].append(row["step"])
                curves[tag][1].append(np.nan if row[tag] is None else row[tag])
        if row.get("optim/step_skipped"):
            skipped.append(row["step"])

    fig, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9, 9), height_ratios=(3, 1, 1), sharex=True, layout="constrained"
    )
    steps, ce = map(np.asarray, curves["train/CE loss"])
    top.plot(steps, ce, color="tab:blue", lw=0.6, alpha=0.3)
    span = max(1, len(steps) // 40)
    means = [
        float(np.nanmean(ce[i : i + span])) for i in range(0, len(ce), span) if np.isfinite(ce[i : i + span]).any()
    ]
    middles = [steps[i : i + span].mean() for i in range(0, len(ce), span) if np.isfinite(ce[i : i + span]).any()]
    top.plot(middles, means, color="tab:blue", label=f"training, means of {span} steps")
    labels = sorted(tag for tag in curves if tag.startswith("eval/lm/") and tag.endswith("/CE loss"))
    for tag, color in zip(labels, plt.cm.Dark2.colors * len(labels), strict=False):
        x, y = curves[tag]
        top.plot(x, y, marker="o", ms=4, color=color, label=f"held-out {tag.split('/')[2]}: {y[-1]:.3f} at {x[-1]}")
    top.set(ylabel="cross-entropy (nats/token)", title=run_dir.name)
    top.legend()
    middle.plot(*curves["optim/LR (group 0)"], color="tab:green")
    middle.set(ylabel="learning rate")
    bottom.plot(*curves["optim/total grad norm"], color="tab:gray", lw=0.8)
    bottom.set(ylabel="gradient norm\n(before clipping)", xlabel="step", yscale="log")
    if skipped:
        height = bottom.get_xaxis_transform()  # 0 to 1 from bottom to top
        bottom.vlines(skipped, 0, 1, color="tab:red", lw=0.8, transform=height, label=f"skipped steps: {len(skipped)}")
        bottom.legend()
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    path = path or run_dir / "curves.png"
    temporary = path.with_suffix(".tmp.png")
    fig.savefig(temporary, dpi=110)
    os.replace(temporary, path)
    plt.close(fig)
    return path


# ------------------------------------------------------------------------------------------------------------- loop


class Stop:
    """SIGTERM or Ctrl-C: finish the step, save, leave. With several processes JAX's own sync point decides."""

    def __init__(self):
        self.code: int | None = None
        if jax.process_count() == 1:  # a handler set after jax.distributed.initialize would disable JAX's
            signal.signal(signal.SIGTERM, partial(self.request, EXIT_PREEMPTED))
            signal.signal(signal.SIGINT, partial(self.request, EXIT_INTERRUPTED))

    def request(self, code, *_) -> None:
        self.code = self.code or code
        if code == EXIT_INTERRUPTED:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def requested(self, step: int) -> bool:
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.code = EXIT_PREEMPTED
        return self.code is not None


said_at = 0.0  # of the last line, on time.monotonic's clock


def say(message: str) -> None:
    """A line on standard error, from process 0, that leaves a progress bar whole."""
    global said_at
    if jax.process_index() == 0:
        tqdm.write(message, file=sys.stderr)
        sys.stderr.flush()
        said_at = time.monotonic()


class Alive:
    """Says at least every `every` seconds what the run does, as long as it gets on: whoever waits for it, a launcher
    above all, can tell a long compilation or evaluation from a process that hangs, which is silent.

    What can be counted is (steps, batches); while nothing can (`busy`: a compilation, a restore, a save), the process
    gets on if it uses a twentieth of a core or moves a megabyte. Not beside a progress bar, which a person looks at.
    """

    def __init__(self, every: float):
        self.every, self.ended = every, threading.Event()
        self.now("starting", busy=True)
        if jax.process_index() == 0 and not sys.stderr.isatty():
            threading.Thread(target=self.watch, daemon=True).start()

    def now(self, what: str, busy: bool = False) -> None:
        self.what, self.busy, self.since, self.done = what, busy, time.monotonic(), 0

    def tick(self) -> None:
        """One more of what is counted is done."""
        self.done, self.busy = self.done + 1, False

    def watch(self) -> None:
        marked_at, mark, used = time.monotonic(), None, resources_used()
        while not self.ended.wait(self.every / 4):
            now = time.monotonic()
            if now - max(said_at, marked_at) < self.every:
                continue
            before, mark, spent, used = mark, (self.since, self.done), used, resources_used()
            worked = used[0] - spent[0] > 0.05 * (now - marked_at) or used[1] - spent[1] > 2**20
            marked_at = now
            if mark != before or (self.busy and worked):
                say(f"{self.what}{f', {self.done} done' if self.done else ''} ({clock(now - self.since)})")

    def close(self) -> None:
        self.ended.set()


def resources_used() -> tuple[float, int]:
    """(CPU seconds, bytes read and written) of this process so far; without Linux's /proc the first alone."""
    moved = 0
    with contextlib.suppress(OSError), open("/proc/self/io") as lines:
        moved = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return time.process_time(), moved


class Progress:
    """A bar on a terminal, a line every run.log_every steps elsewhere; on standard error. The bar begins with the first
    step that is done, so that its time left does not count the compilation."""

    def __init__(self, total: int, every: int):
        self.every, self.total, self.bar = every, total, None
        self.on_terminal = sys.stderr.isatty() and jax.process_index() == 0

    def update(self, step: int, values: dict, tokens_a_step: int, recent_seconds: list[float]) -> None:
        seconds = float(np.mean(recent_seconds)) if recent_seconds else None
        speed = f"{tokens_a_step / seconds:,.0f} tok/s" if seconds else "compiled"
        text = f"CE {values['train/CE loss']:.3f}  {speed}"
        if self.on_terminal:
            if self.bar is None:
                self.bar = tqdm(total=self.total, initial=step, unit="step", dynamic_ncols=True, smoothing=0.05)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % self.every == 0 or step == self.total:
            left = f"{clock((self.total - step) * seconds)} left" if seconds else ""
            norm, lr = values["optim/total grad norm"], values["optim/LR (group 0)"]
            say(f"step {step}/{self.total}  {text}  grad norm {norm:.2f}  LR {lr:.3g}  {left}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Skips:
    """Says which finite steps the skip rule left out: each if they are rare, else a count a minute; a streak warns."""

    def __init__(self, sigma: float):
        self.sigma, self.streak, self.unsaid, self.said_at = sigma, 0, 0, -np.inf

    def __call__(self, step: int, skipped: bool, loss: float, grad_norm: float) -> None:
        self.streak = self.streak + 1 if skipped else 0
        self.unsaid += skipped
        long_streak = self.streak >= 4 and self.streak & (self.streak - 1) == 0  # the 4th, 8th, 16th, ... in a row
        if not skipped or not (long_streak or time.monotonic() - self.said_at > 60):
            return
        more = f" ({self.unsaid} since the last such line)" if self.unsaid > 1 else ""
        warning = f"WARNING: {self.streak} steps in a row skipped: nothing is learnt; " if long_streak else ""
        say(f"{warning}step {step} skipped: CE {loss:.3f} or gradient norm {grad_norm:.2f} is more than {self.sigma:g} "
            f"standard deviations above its last values{more}")  # fmt: skip
        self.unsaid, self.said_at = 0, time.monotonic()


def clock(seconds: float) -> str:
    s = int(round(seconds))
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"


class Run:
    """One training run between two starts: its state, and what happens to it around the jitted step."""

    def __init__(self, c: Config, run_dir: Path, local_dir: Path, args: argparse.Namespace):
        self.c, self.run_dir, self.stop, self.mesh, self.profile = c, run_dir, Stop(), make_mesh(c), args.profile
        self.alive, self.allow, data_root = Alive(args.alive_every), args.allow, args.data_root
        self.local_dir = local_dir
        check_length(c)
        check_compiler_options(c)
        self.rows = local_rows(self.mesh, c)
        self.source = data.open_data(c.data, data_root, self.local_dir / "order", rows=self.rows)
        check_vocabulary(self.source.index, c, c.data.index)
        self.held_out, trained = None, data.TrainingData.of(self.source.path, self.source.index)
        if c.run.eval_index is not None:
            self.held_out = HeldOut(
                c, self.mesh, c.run.eval_index, data_root, c.data.global_batch, eval_limit(c), [trained]
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        check_shared(run_dir)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", c.run.keep_checkpoints)
        self.tokens_a_step = c.data.global_batch * c.data.sequence_length
        self.data_identity = {
            "sequence_length": c.data.sequence_length,  # before the fingerprint, which covers it
            "fingerprint": self.source.index.fingerprint,
            "order": c.data.order,
            "seed": c.data.seed,
            "global_batch": c.data.global_batch,
            "usable": self.source.usable,
            "vocabulary": trained.vocabulary,
            "held_out": self.held_out and self.held_out.of[0]["fingerprint"],
        }
        self.skips = Skips(c.optim.skip_sigma)
        self.token_check = data.TokenCheck(self.source.index, c.data.mask_token)
        self.tracing = False
        self.pending = None  # (step, instances seen, metrics on the device, seconds of loading) of the step in flight
        self.finished_at: float | None = None
        self.seconds_a_step: list[float] = []

    def begin(self, init_from: str | None, init_state_kind: str) -> bool:
        """Take the state of the newest checkpoint or of step 0; False if the run is complete already."""
        c, began = self.c, time.perf_counter()
        self.alive.now("restoring the newest checkpoint, or making the first state", busy=True)
        restored = self.checkpoints.restore_latest(c, self.mesh, self.data_identity, self.allow)
        if restored is None:
            say(f"no checkpoint in {self.checkpoints.folder}, starting at step 0")
            self.params, self.opt_state = initial_state(
                c, self.mesh, init_from, init_state_kind, self.data_identity["vocabulary"]
            )
            self.start = self.seen = 0
        else:
            self.start, self.params, self.opt_state, meta = restored
            self.seen = meta["instances_seen"]
            self.checkpoints.seconds["checkpoint/load_duration_s"] = time.perf_counter() - began
            if init_from is not None:
                say(f"--init-from {init_from} is not used: {self.run_dir} holds checkpoints of its own")
            if self.start >= c.run.steps and on_process_0(self.summarised() == self.start):
                say(f"already at step {self.start} of {c.run.steps}: nothing to do")
                return False
            say(f"resuming from {self.checkpoints.folder / str(self.start)}: {self.seen:,} instances seen")
            say_changes_of_machine(meta)
        self.saved = self.start
        if jax.process_index() == 0:
            resolved = yaml.safe_dump(json.loads(json.dumps(asdict(c))), sort_keys=False)
            replace_file(self.run_dir / "config.yaml", resolved)
        local = c.data.global_batch // (self.mesh.shape["data"] * self.mesh.shape["fsdp"])
        say(
            f"{model.parameter_count(c.model):,} parameters; mesh {dict(self.mesh.shape)}; {c.data.global_batch} x "
            f"{c.data.sequence_length} = {self.tokens_a_step:,} tokens a step, {local} sequences a device, "
            f"{microbatch(c, local)} at once; {self.source.batches_per_epoch:,} steps an epoch"
        )
        return True

    def loop(self) -> int:
        """All steps that are left; returns the exit code."""
        c = self.c
        step_fn = compile_train_step(c, self.mesh)
        self.metrics = MetricsLog(self.run_dir, self.start, self.local_dir)
        self.progress = Progress(c.run.steps, c.run.log_every)
        end = self.seen + (c.run.steps - self.start) * c.data.global_batch
        self.alive.now("reading the order of the data", busy=True)
        batches = data.loader(self.source, self.seen, end, workers=c.hardware.loader_workers)
        with contextlib.ExitStack() as at_exit:
            for thing in (self.metrics, self.progress, batches, self.checkpoints):
                at_exit.callback(thing.close)
            at_exit.callback(self.end_trace)
            at_exit.push(self.log_what_is_done)
            if on_process_0(self.evaluation_is_due(self.start) and self.metrics.evaluated < self.start):
                self.evaluate(self.start)  # a signal or a kill had cut it short
            self.alive.now("compiling the training step", busy=True)
            for step in range(self.start + 1, c.run.steps + 1):
                self.trace(step)
                began = time.perf_counter()
                batch = next(batches)
                loading = time.perf_counter() - began
                for message in self.token_check(batch["tokens"]):
                    say(message)
                inputs_are_checked()  # a launcher does not try again what fails before the first step
                on_device = to_device(batch, self.rows, self.mesh, c)
                self.params, self.opt_state, m = step_fn(self.params, self.opt_state, on_device, np.int32(step))
                self.seen += c.data.global_batch
                if step == self.start + 1:
                    self.alive.now(f"training from step {step} on")
                self.finish_pending()  # log the step before, while this one is computed
                self.pending = (step, self.seen, m, loading)
                leave = self.stop.requested(step)
                if self.evaluation_is_due(step) and not leave:
                    self.finish_pending()
                    leave = not self.evaluate(step) or self.stop.requested(step)
                if leave or step == c.run.steps or step % c.run.checkpoint_every == 0:
                    self.finish_pending()
                    self.save(step)
                if leave:
                    self.alive.now(f"writing checkpoint {step}", busy=True)
                    self.checkpoints.wait()
                    say(f"stopped by a signal: step {step} is saved in {self.checkpoints.folder / str(step)}")
                    return self.stop.code
            self.alive.now("writing the last checkpoint", busy=True)
        if jax.process_index() == 0:
            self.summarise()
        return 0

    def log_what_is_done(self, kind, *_) -> None:
        """The step in flight when something else fails is logged if it is, or soon will be, done. (A step that waits for
        a process that has ended never will be.)"""
        deadline = time.monotonic() + 10
        while kind is not None and issubclass(kind, Exception) and self.pending is not None:
            if all(x.is_ready() for x in self.pending[2].values()):
                self.finish_pending()
            elif time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def trace(self, step: int) -> None:
        """Begin or end the profile that --profile asks for: some steps after the third, which are like all later ones."""
        first = self.start + 3
        if self.profile and step == first:
            self.finish_pending()
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self.tracing = True
        elif self.tracing and step == first + self.profile:
            self.finish_pending()
            self.end_trace()

    def end_trace(self) -> None:
        """Also when the run ends before the profile does: a trace that is not ended is never written."""
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
            say(f"profile from step {self.start + 3} on in {self.run_dir / 'profile'}")

    def finish_pending(self) -> None:
        """Wait for the step in flight and log it; end the run if too many in a row were not finite."""
        if self.pending is None:
            return
        (step, seen, m, loading), self.pending = self.pending, None
        m = jax.device_get(m)
        now = time.perf_counter()
        seconds = now - self.finished_at if self.finished_at is not None else None
        self.finished_at = now
        values = step_metrics(m, step, seen, self.c) | self.checkpoints.durations()
        if seconds is None:  # the first step compiles and is not timed
            self.timed_from, self.timed_after = now, step
        else:
            self.seconds_a_step.append(seconds)
            average = (now - self.timed_from) / (step - self.timed_after)  # with evaluations and saves
            tokens_a_device = self.tokens_a_step / self.mesh.size
            values |= {
                "throughput/device/TPS": tokens_a_device / seconds,
                "throughput/device/TPS (actual avg)": tokens_a_device / average,
                "throughput/device/BPS": 1 / seconds,
                "throughput/device/BPS (actual avg)": 1 / average,
                "throughput/device/flopsPS": tokens_a_device / seconds * flops_per_token(self.c),
                "throughput/device/flopsPS (actual avg)": tokens_a_device / average * flops_per_token(self.c),
                "throughput/device/data loading (s)": loading,
                "throughput/device/data loading (%)": 100 * loading / seconds,
            }
            values |= utilisation(self.c, tokens_a_device / seconds, self.mesh.devices.flat[0].device_kind)
        self.metrics.write(step, values)
        self.progress.update(step, values, self.tokens_a_step, self.seconds_a_step[-20:])
        self.alive.tick()
        streak = int(m["nonfinite_in_a_row"])
        self.skips(step, bool(m["skipped"]) and not streak, float(m["ce"]), float(m["grad_norm"]))
        if streak:
            leaf = int(m["first_nonfinite_gradient"])
            what = f"the gradient of {list(model.ledger(self.c.model))[leaf]}" if leaf >= 0 else "the loss"
            say(f"step {step} skipped: {what} is not finite ({streak} in a row)")
        if streak >= self.c.optim.max_nonfinite_steps:
            last = self.checkpoints.folder / str(self.saved) if self.saved else "none"
            raise RunFailed(
                f"step {step}: {streak} non-finite steps in a row (optim.max_nonfinite_steps); the parameters are those "
                f"of step {step - streak}; last checkpoint: {last}"
            )

    def evaluation_is_due(self, step: int) -> bool:
        due = step > 0 and (step % self.c.run.eval_every == 0 or step == self.c.run.steps)
        return due and self.held_out is not None

    def evaluate(self, step: int) -> bool:
        """Held-out loss after `step`; False if a signal cut it short (it is made up for after the restart)."""
        began = time.perf_counter()
        self.alive.now(f"step {step}: evaluating {len(self.held_out.batches)} batches", busy=True)
        asked = itertools.count()

        def should_stop() -> bool:  # asked before each batch
            if next(asked):
                self.alive.tick()
            return self.stop.code is not None

        results = self.held_out(self.params, self.progress.on_terminal, should_stop)
        self.alive.now(f"training from step {step + 1} on")
        if results is None:
            return False
        clock_and_size = {
            "throughput/in-loop eval time (s)": time.perf_counter() - began,
            "throughput/in-loop eval batches": len(self.held_out.batches),
        }
        self.metrics.write(step, evaluation_metrics(results) | clock_and_size)
        labels = [f"{label} {r['ce']:.4f}" for label, r in results.items() if label != "all"]
        text = f"step {step}: held-out CE {results['all']['ce']:.4f}"
        say(text + (f" ({', '.join(labels)})" if len(labels) > 1 else ""))
        if self.finished_at is not None:
            self.finished_at = time.perf_counter()  # the next step's time begins here
        return True

    def save(self, step: int) -> None:
        """Begin the asynchronous save of the state after `step`; all its metrics are on disk before."""
        began = time.perf_counter()
        self.alive.now(f"saving step {step}", busy=True)
        self.metrics.sync()
        meta = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "instances_seen": self.seen,
            "tokens_seen": self.seen * self.c.data.sequence_length,
            "items": ["params", "opt_state", "meta"],
            "data": self.data_identity | {"index_path": str(self.source.path.resolve())},
            "config": science_dict(self.c),
            "checksums": {"params": checksums(self.params), "opt_state": checksums(self.opt_state)},
            "versions": versions(),
            "environment": environment(),
        }
        self.checkpoints.save(step, self.params, self.opt_state, meta)
        self.checkpoints.seconds["checkpoint/save_duration_s"] = time.perf_counter() - began
        self.alive.now(f"training from step {step + 1} on")
        self.saved = step

    def summarised(self) -> int | None:
        """The step that summary.json was written at: of a run that was extended since, an earlier one."""
        path = self.run_dir / "summary.json"
        try:
            return json.loads(path.read_text())["step"] if path.is_file() else None
        except ValueError:  # left empty by a machine that lost power: it is written again
            return None

    def summarise(self) -> None:
        """summary.json, the same on standard output, and curves.png; null is what metrics.jsonl does not tell, as when
        only the checkpoints were copied."""
        final, skipped = {}, []
        for _, row in read_metrics(self.run_dir / "metrics.jsonl"):
            final |= row
            skipped += [row["optim/step_skipped"]] if "optim/step_skipped" in row else []
        seconds = float(np.median(self.seconds_a_step)) if self.seconds_a_step else None
        summary = {
            "step": self.saved,
            "ce": final.get("train/CE loss"),
            "heldout_ce": final.get("eval/lm/all/CE loss"),
            "heldout_of": self.held_out and self.held_out.of[0],
            "tokens": self.seen * self.c.data.sequence_length,
            "tokens_per_second": round(self.tokens_a_step / seconds, 1) if seconds else None,
            "skipped_steps": sum(skipped) if skipped else None,
            **{tag: final[tag] for tag in final if re.match("throughput/device/(TFLOPs|MFU)", tag)},  # of the last step
            "checkpoint": str(self.run_dir / "checkpoints" / str(self.saved)),
            "curves": str(draw_curves(self.run_dir)) if skipped else None,
        }
        text = json.dumps(summary, indent=1) + "\n"
        replace_file(self.run_dir / "summary.json", text)
        print(text, end="", flush=True)


def train(c: Config, run_dir: Path, args: argparse.Namespace) -> int:
    """Run to run.steps, to a signal or to a failure; returns the exit code."""
    local_dir = run_dir if args.local_dir is None else data.local_path(args.local_dir) / run_dir.resolve().name
    with contextlib.ExitStack() as at_exit:
        if jax.process_index() == 0:  # a trainer that was just killed may still be ending
            for folder in dict.fromkeys((run_dir, local_dir)):
                at_exit.enter_context(data.sole_writer(folder, wait=5))
        run = Run(c, run_dir, local_dir, args)
        at_exit.callback(run.alive.close)
        if run.begin(args.init_from, args.init_state):
            return run.loop()
        if jax.process_index() == 0:
            print((run_dir / "summary.json").read_text(), end="")
        return 0


def on_process_0(value: bool) -> bool:
    """Process 0's answer, on all processes: only it reads the metrics file."""
    return bool(multihost_utils.broadcast_one_to_all(np.bool_(value))) if jax.process_count() > 1 else value


def first_of_any_process(text: str | None) -> str | None:
    """The text of the first process that has one, on all processes."""
    if jax.process_count() == 1:
        return text
    letters = np.frombuffer((text or "").encode()[:512].ljust(512, b"\0"), np.uint8)
    texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(letters))
    return next((f"process {i}: {text}" for i, text in enumerate(texts) if text), None)


def wait_for_processes(where: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def check_shared(folder: Path) -> None:
    """All processes must see the same folder: a checkpoint whose parts lie on several disks can never be read."""
    if jax.process_count() == 1:
        return
    mark = folder / f"shared.{int(multihost_utils.broadcast_one_to_all(np.int64(time.time_ns())))}"
    if jax.process_index() == 0:
        mark.touch()
    wait_for_processes(f"{mark.name} is there")
    alone = None if mark.exists() else f"{folder} is not the folder that process 0 sees"
    alone = first_of_any_process(alone)
    if jax.process_index() == 0:
        mark.unlink()
    if alone:
        raise ValueError(f"--run-dir: {alone}; fix: a folder on a file system that all processes share")


def replace_file(path: Path, text: str) -> None:
    """Atomically: a reader, or a restart after a kill, sees the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def dry_run(c: Config, data_root: str | None) -> None:
    """Check everything that can be checked without computing and print the plan as JSON."""
    check_length(c)
    mesh = make_mesh(c)
    local = c.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    check_compiler_options(c)
    source = data.open_data(c.data, data_root)  # their sizes, too
    check_vocabulary(index := source.index, c, c.data.index)
    if c.run.eval_index is not None:
        trained = data.TrainingData.of(source.path, index)
        HeldOut(c, mesh, c.run.eval_index, data_root, c.data.global_batch, eval_limit(c), [trained])
    tokens = c.data.global_batch * c.data.sequence_length
    plan = {
        "parameters": model.parameter_count(c.model),
        "mesh": dict(mesh.shape),
        "sequences_a_device": local,
        "microbatch": microbatch(c, local),
        "tokens_a_step": tokens,
        "steps": c.run.steps,
        "tokens": tokens * c.run.steps,
        "epochs": c.run.steps * c.data.global_batch / index.instances,
        "learning_rate_first_last": [optim.learning_rate(c.optim, c.schedule, s) for s in (1, c.run.steps)],
    }
    print(json.dumps(plan, indent=1))


# ----------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
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
                        help="with --init-from: fresh moments, or those that convert.py stage2-init prepared")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    parser.add_argument("--allow", action="append", default=[], metavar="KEY",
                        help="let a resumed run change this key of its science, or all of a section; repeatable")  # fmt: skip
    parser.add_argument("--local-dir", metavar="DIR", help="where RUN is a mounted bucket: a folder of this machine for the "
                        "order of the data and the log, which each save copies to RUN")  # fmt: skip
    parser.add_argument("--alive-every", type=float, default=60, metavar="SECONDS",
                        help="say so often what the run does, as long as it gets on; default: %(default)g")  # fmt: skip
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS",
                        help="trace so many steps with jax.profiler into RUN/profile (TensorBoard and XProf show it)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, compute nothing")
    group = parser.add_argument_group("several processes", "one on each host, all with the same --run-dir")
    group.add_argument("--distributed", action="store_true", help="as the cluster tells (TPU pod, Slurm, Open MPI)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="elsewhere: where process 0 listens")
    group.add_argument("--num-processes", type=int)
    group.add_argument("--process-id", type=int)
    return parser.parse_args(argv)


checking_inputs = True  # of the command that runs; see run_command


def inputs_are_checked() -> None:
    """From here on the command computes or writes: what goes wrong is no longer wrong input."""
    global checking_inputs
    checking_inputs = False


def run_command(program: str, command: Callable[[], int | None]) -> int:
    """Run a verb and turn what a person can mend into one line and an exit code, which depends on when it was met.

    While inputs are checked, a ValueError is wrong input: 2, which a launcher does not try again. After
    `inputs_are_checked`, it is 1: one line where data or a run says what is wrong with it, else a bug, which keeps its
    traceback. With several processes a collective fails when one of them has died.
    """
    global checking_inputs
    checking_inputs = True
    pin_settings()
    try:
        return command() or 0
    except (RunFailed, OSError) as e:
        print(f"{program}: error: {e if isinstance(e, RunFailed) else first_line(e)}", file=sys.stderr)
        return 1
    except ValueError as e:
        if not checking_inputs and not isinstance(e, data.DataError):
            raise
        print(f"{program}: error: {first_line(e)}", file=sys.stderr)
        return 2 if checking_inputs else 1
    except jax.errors.JaxRuntimeError as e:
        if jax.process_count() == 1:
            raise
        print(f"{program}: error: process {jax.process_index()} cannot go on: {first_line(e)}; most likely another "
              "process has ended: see its last lines, then start all again: they go on from the newest checkpoint",
              file=sys.stderr)  # fmt: skip
        return 1


def check_port(coordinator: str) -> None:
    """JAX crashes where it cannot listen."""
    port = int(coordinator.rpartition(":")[2])
    if not 0 < port < 65536:
        raise ValueError(f"--coordinator: got port {port}, expected 1 to 65535")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what only lingers from an earlier run is no hindrance
        try:
            s.bind(("", port))
        except OSError as e:
            raise RunFailed(f"--coordinator {coordinator}: port {port} cannot be listened at ({e.strerror}); fix: another "
                            "port, or end what uses it") from e  # fmt: skip


def join_processes(args) -> bool:
    """Start jax.distributed as the flags say; False if they ask for a single process."""
    named = (args.coordinator, args.num_processes, args.process_id)
    if args.distributed and named != (None, None, None):
        raise ValueError(
            "--distributed: got --coordinator, --num-processes or --process-id beside it, expected one way"
        )
    if not args.distributed:
        if named == (None, None, None):
            return False
        if None in named:
            raise ValueError("--coordinator, --num-processes, --process-id: got some, expected all three")
        if not re.fullmatch(r".+:[0-9]+", args.coordinator):
            raise ValueError(f"--coordinator: got {args.coordinator!r}, expected HOST:PORT")
        if not 0 <= args.process_id < args.num_processes:
            raise ValueError(f"--process-id: got {args.process_id}, expected 0 to {args.num_processes - 1}")
        if args.process_id == 0:
            check_port(args.coordinator)
    # Gloo greets on standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        jax.distributed.initialize(*named, heartbeat_timeout_seconds=HEARTBEAT)
    except ValueError as e:
        raise ValueError(f"--distributed: {first_line(e)}; fix: --coordinator, --num-processes, --process-id") from e
    return True


def end_process(code: int) -> None:
    """Leave at once. An orderly exit would wait for processes that wait for this one; so they notice that it is gone,
    by a collective that fails or by its heartbeat, and end as well."""
    gc.collect()  # the semaphores of the loader's workers, of which Python would say that they leak
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0 and jax.process_count() > 1:
        time.sleep(5)  # JAX's coordinator lives here; the others may still have to say why they end
    os._exit(code)


def check_flags(args: argparse.Namespace, c: Config) -> None:
    if args.init_from is None and args.init_state != "params":
        raise ValueError("--init-state adam: got no --init-from, expected a checkpoint to start from")
    if args.profile < 0:
        raise ValueError(f"--profile: got {args.profile}, expected a number of steps")
    if not 0 < args.alive_every < 1e6:
        raise ValueError(f"--alive-every: got {args.alive_every}, expected a number of seconds")
    keys = flatten(science_dict(c))
    for allowed in args.allow:
        if not any(f"{key}.".startswith(f"{allowed}.") for key in keys):
            raise ValueError(unknown_key(f"--allow {allowed}", allowed, keys))


def main(argv=None) -> int:
    args, several = parse_args(argv), False

    def command() -> int | None:
        nonlocal several
        several = join_processes(args)
        c = load_config(args.config, args.hardware, args.set)
        run_dir = data.local_path(args.run_dir or f"runs/{c.run.name}")
        orbax_path(run_dir)  # or it is refused before anything is written
        check_flags(args, c)
        cache_compilations(c)
        if args.dry_run:
            return dry_run(c, args.data_root)
        return train(c, run_dir, args)

    try:
        code = run_command("train.py", command)
    except BaseException as e:
        if not several:
            raise
        traceback.print_exc()
        code = EXIT_INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
    if several and code not in (0, EXIT_PREEMPTED):
        end_process(code)
    return code


def exit_with(code: int) -> None:
    """As sys.exit, but at once where the run has failed: an orderly exit would join Orbax's threads, and those of a save
    that could not begin wait ten minutes for it."""
    if code == 1:
        end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    exit_with(main())
