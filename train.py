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
import contextlib
import dataclasses
import difflib
import json
import os
import re
import signal
import sys
import time
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import yaml
from jax import lax
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

HERE = Path(__file__).resolve().parent
BATCH_AXES = ("data", "fsdp")  # the batch is cut over both; every row of the global batch has one place
FORMAT_VERSION = 1
EXIT_PREEMPTED, EXIT_INTERRUPTED = 143, 130


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
    remat: str | dict  # "all": save all activations; or {microbatch: "all" or list of saved names}
    scan_unroll: int
    loss_chunk: int
    loader_workers: int
    xla_flags: dict  # compiler options of the jitted step
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


SCIENCE = ("model", "data", "optim", "schedule", "loss", "run")
HARDWARE = tuple(f.name for f in dataclasses.fields(HardwareConfig))


class StrictLoader(yaml.SafeLoader):
    """YAML with numbers and booleans as people expect them: 3e-4 is a number, only true and false are booleans,
    12:30 and 017 are not secretly other numbers, and a key that stands twice is an error."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise ValueError(
                    f"{node.start_mark.name}, line {node.value[i][0].start_mark.line + 1}: key {key!r} stands twice"
                )
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.?[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first))
StrictLoader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))
StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def read_yaml(path: Path) -> dict:
    loader = StrictLoader(path.read_text())
    loader.name = str(path)
    try:
        content = loader.get_single_data()
    except yaml.YAMLError as e:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected a mapping of sections")
    return content


def find_config(name: str, folder: Path) -> Path:
    """`name` as given, then in `folder`, with and without .yaml."""
    candidates = [Path(name), folder / name, folder / f"{name}.yaml"]
    for path in candidates:
        if path.is_file():
            return path
    have = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
    raise ValueError(f"config {name!r}: not found, looked for {', '.join(map(str, candidates))}; there are: {have}")


def build(kind, value, where: str):
    """Check `value`, as YAML gave it, against the type `kind` and return it; ValueError names the place."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        # str | dict (remat) and T | None: the alternative whose kind of YAML node it is
        options = [a for a in args if a is not type(None)]
        fits = [a for a in options if isinstance(value, a) or (len(options) == 1)] if len(options) > 1 else options
        return build(fits[0] if fits else options[0], value, where)
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
        names = {dict: "a mapping", int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ValueError(f"{where}: got {value!r} ({type(value).__name__}), expected {names[kind]}")
    return value


def unknown_key(where: str, key: str, known) -> str:
    near = difflib.get_close_matches(key, [str(k) for k in known], n=1)
    return f"{where}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def set_key(tree, dotted: str, value) -> None:
    """Set `section.key` (or schedule.0.until) in the raw mapping; the key must be there already or fit the schema."""
    *parents, last = dotted.split(".")
    for i, part in enumerate(parents):
        place = ".".join(parents[: i + 1])
        key = int(part) if isinstance(tree, list) and part.isdigit() else part
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            known = tree if isinstance(tree, dict) else [str(n) for n in range(len(tree))]
            raise ValueError(unknown_key(f"--set {place}", part, known)) from None
        if not isinstance(tree, dict | list):
            raise ValueError(f"--set {dotted}: {place} is {tree!r}, it has no keys")
    if isinstance(tree, list):
        if not last.isdigit() or int(last) >= len(tree):
            raise ValueError(f"--set {dotted}: got {last}, expected an index below {len(tree)}")
        tree[int(last)] = value
    else:
        tree[last] = value


def load_config(config: str, hardware: str | None, overrides: list[str]) -> Config:
    """Read and check both files. Without `hardware` the file is chosen by the device that jax finds."""
    science = read_yaml(find_config(config, HERE / "configs"))
    machine = read_yaml(find_config(hardware or detect_hardware(), HERE / "configs" / "hardware"))
    for raw, allowed, other, kind in ((science, SCIENCE, HARDWARE, "config"), (machine, HARDWARE, SCIENCE, "hardware")):
        for key in raw:
            if key in other:
                raise ValueError(f"{key}: stands in the {kind} file, belongs in the other one (science or hardware)")
            if key not in allowed:
                raise ValueError(unknown_key(key, str(key), allowed))
    raw = science | {"hardware": machine}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override}: got no '=', expected section.key=value")
        loader = StrictLoader(text)
        loader.name = f"--set {override}"
        top = dotted.split(".")[0]
        if top not in SCIENCE + HARDWARE:
            raise ValueError(unknown_key(f"--set {dotted}", top, SCIENCE + HARDWARE))
        set_key(raw["hardware"] if top in HARDWARE else raw, dotted, loader.get_single_data())
    hints = typing.get_type_hints(Config)
    for section in SCIENCE:
        if section not in raw:
            raise ValueError(f"{section}: missing section; fix: add it to {config}")
    # Sections are built in order, so that an error names section.key without a prefix.
    result = Config(**{key: build(kind, raw[key], key) for key, kind in hints.items()})
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
        if getattr(c.run, name) < 1:
            raise ValueError(f"run.{name}: got {getattr(c.run, name)}, expected a positive number")
    for name in ("keep_checkpoints", "eval_batches"):
        if getattr(c.run, name) is not None and getattr(c.run, name) < 1:
            raise ValueError(f"run.{name}: got {getattr(c.run, name)}, expected a positive number or null")
    if c.data.global_batch * c.data.sequence_length >= 2**31:
        raise ValueError(
            f"data.global_batch: {c.data.global_batch} x {c.data.sequence_length} tokens do not fit in int32"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.run.name):
        raise ValueError(f"run.name: got {c.run.name!r}, expected letters, digits, '.', '_' and '-'")


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


def make_mesh(c: Config) -> jax.sharding.Mesh:
    """The mesh over all devices of all processes; ValueError if the model or batch cannot be cut over it."""
    sizes, n = dataclasses.asdict(c.hardware.mesh), jax.device_count()
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh: got {sizes}, expected positive sizes, one of which may be -1")
    if n % fixed or (not free and n != fixed):
        raise ValueError(f"mesh: got {sizes} for {n} devices, expected sizes whose product is {n}")
    if free:
        sizes[free[0]] = n // fixed
    model.check_mesh(c.model, sizes, c.data.sequence_length)
    rows = sizes["data"] * sizes["fsdp"]
    if c.data.global_batch % rows:
        raise ValueError(
            f"data.global_batch: got {c.data.global_batch}, expected a multiple of data x fsdp = {rows} of the mesh"
        )
    microbatch(c, c.data.global_batch // rows)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def microbatch(c: Config, local_batch: int) -> int:
    """Sequences that a device computes at once: hardware.microbatch, or its whole share where that is smaller."""
    size = min(c.hardware.microbatch, local_batch)
    if local_batch % size:
        raise ValueError(f"microbatch: got {size}, expected a divisor of the {local_batch} sequences of a device")
    return size


def execution(c: Config, size: int) -> model.Execution:
    """The hardware file's choices for micro-batches of `size`. Names saved for a larger one fit a smaller one."""
    remat = c.hardware.remat
    if isinstance(remat, dict):
        fitting = [key for key in remat if isinstance(key, int) and key >= size]
        if not fitting:
            raise ValueError(f"remat: got entries for {list(remat)} sequences, expected one for {size} or more")
        remat = remat[min(fitting)]
    if remat != "all" and not isinstance(remat, list):
        raise ValueError(f"remat: got {remat!r}, expected 'all' or a list of names of activations")
    return model.Execution(
        attention=c.hardware.attention,
        attention_block=c.hardware.attention_block,
        remat=None if remat == "all" else tuple(remat),
        scan_unroll=c.hardware.scan_unroll,
        loss_chunk=c.hardware.loss_chunk,
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


def state_shapes(c: Config, mesh):
    """ShapeDtypeStructs with shardings of (params, optimizer state): what a checkpoint is restored into."""
    params = jax.eval_shape(partial(model.init_params, c.model), 0)
    state = (params, jax.eval_shape(optimizer(c).init, params))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings(mesh, state_specs(c))
    )


def init_state(c: Config, mesh):
    """(params, optimizer state) of step 0, made where they live: no device ever holds a whole matrix."""
    params_to, state_to = shardings(mesh, state_specs(c))
    params = jax.jit(partial(model.init_params, c.model), out_shardings=params_to)(c.run.seed)
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


def compile_train_step(c: Config, mesh):
    """The jitted step: (params, opt_state, batch, step) -> (params, opt_state, metrics); the state is donated."""
    local_batch = c.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    size = microbatch(c, local_batch)
    specs, opt_specs = state_specs(c)
    step = jax.shard_map(
        partial(train_step, c=c, run=execution(c, size), size=size),
        mesh=mesh,
        in_specs=(specs, opt_specs, batch_specs(c), P()),
        out_specs=(specs, opt_specs, P()),
    )
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options(c))


def compiler_options(c: Config) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in c.hardware.xla_flags.items()
    }


# ----------------------------------------------------------------------------------------------- held-out evaluation


def evaluation_step(params, batch, c: Config, run: model.Execution, size: int):
    """Per row of the batch: (sum of CE over unmasked labels, their count), each [B], whole on every device.

    local: batch [B/(data*fsdp), S/context]. Per row, so that the result does not depend on how rows are batched.
    """
    params, batch = model.vary((params, {k: v for k, v in batch.items() if k != "filtered"}))

    def rows(piece):
        _, per_token = model.token_loss(params, piece, 0.0, c.model, run)
        ce = jnp.sum(jnp.where(piece["loss_mask"], per_token.ce_N, 0.0), axis=1)
        return ce, jnp.sum(piece["loss_mask"], axis=1, dtype=jnp.int32)

    pieces = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
    ce, count = (x.reshape(-1) for x in lax.map(rows, pieces))
    local = ce.shape[0]
    first = (lax.axis_index("data") * lax.axis_size("fsdp") + lax.axis_index("fsdp")) * local
    whole = local * lax.axis_size("data") * lax.axis_size("fsdp")

    def spread(x):  # [B/(data*fsdp)] -> [B]: every device adds its rows to zeros
        padded = lax.dynamic_update_slice(model.vary(jnp.zeros(whole, x.dtype)), x, (first,))
        on_first = jnp.where(lax.axis_index("tensor") == 0, padded, 0)  # rows are the same along tensor
        return lax.psum(on_first, model.AXES)

    return spread(ce), spread(count)


class HeldOut:
    """Held-out evaluation of one index: every instance once, token-weighted, summed in float64 in a fixed order."""

    def __init__(self, c: Config, mesh, index: str, data_root: str | None, batch: int, batches: int | None):
        self.c = dataclasses.replace(c, data=dataclasses.replace(c.data, global_batch=batch))
        self.mesh, self.rows = mesh, local_rows(mesh, self.c)
        self.batches = data.EvaluationBatches(
            index, data_root, batch, rows=self.rows, mask_token=c.data.mask_token, document_mask=c.data.document_mask,
            limit=batches,
        )  # fmt: skip
        index_of, self.domains = self.batches.source.index, self.batches.domains
        check_vocabulary(index_of, c, index)
        self.domain_of_instance = np.repeat(
            [self.domains.index(f.label) for f in index_of.files], [f.instances for f in index_of.files]
        )
        size = microbatch(self.c, batch // (mesh.shape["data"] * mesh.shape["fsdp"]))
        step = jax.shard_map(
            partial(evaluation_step, c=self.c, run=execution(self.c, size), size=size),
            mesh=mesh,
            in_specs=(param_specs(c), batch_specs(self.c)),
            out_specs=P(),
        )
        self.step = jax.jit(step, compiler_options=compiler_options(c))

    def __call__(self, params, progress: bool = False, should_stop=lambda: False) -> dict[str, dict] | None:
        """{label or "all": {"ce", "perplexity", "tokens", "instances"}}; None if `should_stop` cut it short."""
        ce, tokens = [], []  # of every instance, in the order of the index
        bar = tqdm(self.batches, total=len(self.batches), desc="evaluating", unit="batch", leave=False,
                   disable=not progress)  # fmt: skip
        for batch in bar:
            if should_stop():
                return None
            row_ce, row_tokens = self.step(params, to_device(batch, self.rows, self.mesh, self.c))
            ce.append(np.asarray(row_ce, np.float64))
            tokens.append(np.asarray(row_tokens, np.int64))
        n = min(len(self.domain_of_instance), len(ce) * self.c.data.global_batch)  # the rest is padding
        ce, tokens, domain = np.concatenate(ce)[:n], np.concatenate(tokens)[:n], self.domain_of_instance[:n]
        results = {
            label: (ce[domain == i].sum(), tokens[domain == i].sum(), np.sum(domain == i))
            for i, label in enumerate(self.domains)
        }
        results["all"] = (ce.sum(), tokens.sum(), n)
        return {
            label: {"ce": s / t, "perplexity": float(np.exp(s / t)), "tokens": int(t), "instances": int(n)}
            for label, (s, t, n) in results.items()
            if t > 0
        }


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


class Checkpoints:
    """RUN/checkpoints/N with the items params, opt_state and meta, through Orbax's CheckpointManager, asynchronously."""

    def __init__(self, folder: Path, keep: int | None):
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, save_interval_steps=1),
            item_handlers={
                "params": ocp.PyTreeCheckpointHandler(),
                "opt_state": ocp.PyTreeCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, params, opt_state, meta: dict) -> None:
        """Begin to write step `step`; a failure of the save before this one is raised here."""

        def by_layer(name, x):  # one chunk a layer, so that a layer can be read without the whole leaf
            layers = x.shape[0] if name in model.LAYER_TENSORS else 1
            if x.nbytes // layers < 2**20:  # below 1 MiB chunks cost more than they save
                return ocp.SaveArgs()
            return ocp.SaveArgs(chunk_byte_size=x.nbytes // layers, shard_axes=(0,))

        args_of = {name: by_layer(name, x) for name, x in params.items()}
        opt_args = jax.tree.map(lambda _: ocp.SaveArgs(), opt_state)._replace(mu=args_of, nu=args_of)
        saved = self.manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(params, save_args=args_of),
                opt_state=ocp.args.PyTreeSave(opt_state, save_args=opt_args),
                meta=ocp.args.JsonSave(meta),
            ),
        )
        if not saved:
            raise RunFailed(
                f"{self.folder / str(step)}: Orbax refused to save, newest step there: {self.manager.latest_step()}"
            )

    def restore_latest(self, c: Config, mesh, data_identity: dict, log):
        """(step, params, opt_state, meta) of the newest usable checkpoint, or None if there has never been one.

        A step that cannot be read is reported, renamed to N.damaged (nothing is deleted) and the one before it used.
        A step that is readable but belongs to something else is a ValueError.
        """
        damaged = sorted(self.folder.glob("*.damaged"))
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                meta = read_meta(self.folder / str(step))
                check_meta(meta, c, data_identity, self.folder / str(step), log)
                params, opt_state = self.restore_state(step, c, mesh)
            except DamagedCheckpoint as e:
                log(f"checkpoint {self.folder / str(step)} is damaged: {e}")
                damaged.append(self.set_aside(step, log))
                continue
            return step, params, opt_state, meta
        if damaged:
            raise RunFailed(
                f"{self.folder}: no usable checkpoint is left beside {', '.join(p.name for p in damaged)}; nothing was "
                "deleted; fix: restore one of them, or start again in another --run-dir"
            )
        return None

    def restore_state(self, step: int, c: Config, mesh):
        target = dict(zip(("params", "opt_state"), state_shapes(c, mesh), strict=True))
        for item, tree in target.items():
            check_tree(self.folder / str(step) / item, tree)
        args = {item: restore_args(tree) for item, tree in target.items()}
        try:
            restored = self.manager.restore(step, args=ocp.args.Composite(**args))
        except (ValueError, OSError, KeyError) as e:  # tensorstore reports damaged files as ValueError
            raise DamagedCheckpoint(first_line(e)) from e
        return restored["params"], restored["opt_state"]

    def set_aside(self, step: int, log) -> Path:
        source = self.folder / str(step)
        target = next(t for i in range(1000) if not (t := source.with_name(f"{step}.damaged{i or ''}")).exists())
        if jax.process_index() == 0:
            source.rename(target)
            log(f"renamed it to {target.name}; using the checkpoint before it")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")
        self.manager.reload()
        return target

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read."""


def first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]


def restore_args(tree):
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=args)


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


def check_tree(item_folder: Path, target) -> None:
    """The item holds exactly the leaves of `target`, with their shapes and dtypes; Orbax itself would cast silently."""
    if not item_folder.is_dir():
        raise DamagedCheckpoint(f"item {item_folder.name!r} is missing ({item_folder})")
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(item_folder).tree
    except (ValueError, OSError, KeyError) as e:
        raise DamagedCheckpoint(f"item {item_folder.name!r} cannot be read: {first_line(e)}") from e

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


def check_meta(meta: dict, c: Config, data_identity: dict, where: Path, log) -> None:
    """Refuse to resume another run; announce what is allowed to change."""
    if "opt_state" not in meta.get("items", ["opt_state"]):
        raise ValueError(
            f"{where}: holds no optimizer state; fix: start from it with --init-from and --init-state params"
        )
    for key, now in data_identity.items():
        then = meta["data"].get(key)
        if then == now:
            continue
        if key == "global_batch":
            if meta["instances_seen"] >= min(data_identity["usable"], meta["data"]["usable"]):
                raise ValueError(
                    f"{where}: data.global_batch: got {now}, expected {then}: it can change in the first epoch only"
                )
            log(
                f"data.global_batch changes from {then} to {now}; the position stays at instance {meta['instances_seen']}"
            )
        elif key != "usable":
            raise ValueError(f"{where}: data.{key}: got {now}, expected {then} as in the run; fix: use the run's own data "
                             "or another --run-dir")  # fmt: skip
    then, now = flatten(meta["config"]), flatten(science_dict(c))
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) == now.get(key) or key in ("data.global_batch", "data.index"):
            continue
        if key.startswith("model.") and key not in ("model.compute_dtype", "model.grad_reduce_dtype"):
            raise ValueError(f"{where}: {key}: got {now.get(key)}, expected {then.get(key)} as in the run")
        log(f"{key} changes from {then.get(key)} to {now.get(key)}")


def science_dict(c: Config) -> dict:
    return json.loads(json.dumps({key: value for key, value in dataclasses.asdict(c).items() if key != "hardware"}))


def flatten(tree, prefix: str = "") -> dict:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flat = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict | list) else {f"{prefix}{key}": value}
    return flat


def find_checkpoint(path: str) -> Path:
    """CKPT on a command line: RUN/checkpoints/N, or a run directory (its newest step that is complete)."""
    p = Path(path)
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
        check_tree(step_folder / item, target)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(step_folder / item, args=restore_args(target))
    except DamagedCheckpoint as e:
        raise RunFailed(f"{step_folder}: {e}") from e


def initial_state(c: Config, mesh, init_from: str | None, init_state_kind: str, log):
    """State of step 0: from the seed, or from another run's parameters (and prepared moments)."""
    if init_from is None:
        log(f"start: new parameters from seed {c.run.seed}")
        return init_state(c, mesh)
    source = find_checkpoint(init_from)
    params_target, state_target = state_shapes(c, mesh)
    params = restore_item(source, "params", params_target)
    if init_state_kind == "params":
        log(f"start: parameters of {source}, fresh moments")
        opt_specs = shardings(mesh, state_specs(c)[1])
        return params, jax.jit(optimizer(c).init, out_shardings=opt_specs)(params)
    try:
        prepared = read_meta(source).get("stage2_init", False)
    except DamagedCheckpoint as e:
        raise ValueError(f"--init-from {source}: {e}") from e
    if not prepared or not (source / "opt_state").is_dir():
        raise ValueError(
            f"--init-from {source}: no moments prepared for a new stage; fix: convert.py stage2-init, or --init-state params"
        )
    log(f"start: parameters and Adam moments of {source}")
    return params, restore_item(source, "opt_state", state_target)


# ---------------------------------------------------------------------------------------------------------- metrics


class MetricsLog:
    """metrics.jsonl and TensorBoard, every step, under the names of Ai2's dashboard. Only process 0 writes.

    Starting after step N forgets what a dead run had logged past N: the file is cut, TensorBoard is told to purge.
    """

    def __init__(self, run_dir: Path, after_step: int):
        self.enabled = jax.process_index() == 0
        if not self.enabled:
            return
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in read_lines(self.path) if json.loads(line)["step"] <= after_step]
        self.evaluated = {json.loads(line)["step"] for line in kept if '"eval/' in line}
        temporary = self.path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(kept))
        with open(temporary) as f:
            os.fsync(f.fileno())
        os.replace(temporary, self.path)
        self.file = open(self.path, "a")
        # The writer below SummaryWriter: synchronous, so that what is flushed is on disk, and it keeps tags as they are.
        (run_dir / "tensorboard").mkdir(exist_ok=True)
        self.board = EventsWriter(str(run_dir / "tensorboard" / "events"))
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

    def sync(self) -> None:
        """Everything written so far is on disk when this returns."""
        if self.enabled:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.board.flush()

    def close(self) -> None:
        if self.enabled:
            self.sync()
            self.file.close()
            self.board.close()


def read_lines(path: Path) -> list[str]:
    """Whole lines of a file; a last line without its end (a killed writer) is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def step_metrics(m: dict, step: int, seen: int, c: Config) -> dict[str, float | int]:
    """The step's numbers under Ai2's names (facts of the run; timings are added by the loop)."""
    tokens = c.data.global_batch * c.data.sequence_length
    ce = float(m["ce"])
    values = {
        "train/CE loss": ce,
        "train/PPL": float(np.exp(ce)) if ce < 10 else None,  # as OLMo-core: only where it means something
        "train/Z loss": c.loss.z_loss * float(m["z_unscaled"]),
        "train/Z loss unscaled": float(m["z_unscaled"]),
        "train/masked labels (%)": 1 - int(m["labels"]) / tokens,
        "train/masked instances (%)": int(m["filtered"]) / c.data.global_batch if c.data.repetition_filter else None,
        "optim/total grad norm": float(m["grad_norm"]),
        "optim/LR (group 0)": float(m["lr"]),
        "optim/LR (group 1)": float(m["lr"]),
        "optim/step skipped": int(m["skipped"]),
        "optim/step_skipped": int(m["skipped"]),
        "throughput/total tokens": seen * c.data.sequence_length,
        "perf/total_tokens": seen * c.data.sequence_length,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def evaluation_metrics(results: dict[str, dict]) -> dict[str, float]:
    values = {}
    for label, r in results.items():
        values |= {f"eval/lm/{label}/CE loss": r["ce"], f"eval/lm/{label}/PPL": r["perplexity"]}
    return values


def draw_curves(run_dir: Path) -> Path:
    """curves.png from metrics.jsonl: training and held-out loss, learning rate, gradient norm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in read_lines(run_dir / "metrics.jsonl")]

    def series(tag):
        points = [(r["step"], r[tag]) for r in rows if r.get(tag) is not None]
        return [list(axis) for axis in zip(*points, strict=True)] if points else [[], []]

    fig, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9, 9), height_ratios=(3, 1, 1), sharex=True, layout="constrained"
    )
    top.plot(*series("train/CE loss"), color="tab:blue", lw=0.8, label="training")
    labels = sorted({tag for r in rows for tag in r if tag.startswith("eval/lm/") and tag.endswith("/CE loss")})
    for tag, color in zip(labels, plt.cm.Dark2.colors * len(labels), strict=False):
        x, y = series(tag)
        top.plot(x, y, marker="o", ms=4, color=color, label=f"held-out {tag.split('/')[2]}: {y[-1]:.3f} at {x[-1]}")
    top.set(ylabel="cross-entropy (nats/token)", title=run_dir.name)
    top.legend()
    middle.plot(*series("optim/LR (group 0)"), color="tab:green")
    middle.set(ylabel="learning rate")
    bottom.plot(*series("optim/total grad norm"), color="tab:gray", lw=0.8)
    bottom.set(ylabel="gradient norm\n(before clipping)", xlabel="step", yscale="log")
    skipped = [r["step"] for r in rows if r.get("optim/step_skipped")]
    for i, step in enumerate(skipped):
        bottom.axvline(step, color="tab:red", lw=0.8, label="skipped step" if i == 0 else None)
    if skipped:
        bottom.legend()
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    path = run_dir / "curves.png"
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


class Progress:
    """A bar on a terminal, a line every run.log_every steps elsewhere; on standard error."""

    def __init__(self, start: int, total: int, every: int):
        self.every, self.total = every, total
        self.quiet = jax.process_index() != 0
        self.bar = None
        if sys.stderr.isatty() and not self.quiet:
            self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05)

    def log(self, message: str) -> None:
        if not self.quiet:
            tqdm.write(message, file=sys.stderr)

    def update(self, step: int, values: dict, tokens_per_second: float, seconds_a_step: float) -> None:
        left = max(self.total - step, 0) * seconds_a_step
        text = f"CE {values['train/CE loss']:.3f}  {tokens_per_second:,.0f} tok/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            self.bar.update(step - self.bar.n)
        elif step % self.every == 0 or step == self.total:
            norm, lr = values["optim/total grad norm"], values["optim/LR (group 0)"]
            self.log(f"step {step}/{self.total}  {text}  grad norm {norm:.2f}  LR {lr:.3g}  {clock(left)} left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def clock(seconds: float) -> str:
    s = int(round(seconds))
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"


def data_identity(source: "data.BatchSource") -> dict:
    c = source.config
    return {
        "fingerprint": source.index.fingerprint,
        "sequence_length": c.sequence_length,
        "order": c.order,
        "seed": c.seed,
        "global_batch": c.global_batch,
        "usable": source.usable,
    }


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "optax", "orbax-checkpoint", "grain", "numpy")}


def train(c: Config, run_dir: Path, data_root: str | None, init_from: str | None, init_state_kind: str) -> int:
    """Run to run.steps, to a signal or to a failure; returns the exit code."""
    stop = Stop()
    mesh = make_mesh(c)
    rows = local_rows(mesh, c)
    run_dir.mkdir(parents=True, exist_ok=True)
    source = data.open_data(c.data, data_root, run_dir / "order", rows=rows)
    check_vocabulary(source.index, c, c.data.index)
    held_out = None
    if c.run.eval_index is not None:
        held_out = HeldOut(c, mesh, c.run.eval_index, data_root, c.data.global_batch, c.run.eval_batches)
    names = list(model.ledger(c.model))
    first_log = Progress(0, c.run.steps, c.run.log_every)
    if first_log.bar is not None:
        first_log.bar.close()
    log = first_log.log

    checkpoints = Checkpoints(run_dir / "checkpoints", c.run.keep_checkpoints)
    identity = data_identity(source)
    restored = checkpoints.restore_latest(c, mesh, identity, log)
    if restored is None:
        log(f"no checkpoint in {checkpoints.folder}, starting at step 0")
        params, opt_state = initial_state(c, mesh, init_from, init_state_kind, log)
        start, seen = 0, 0
    else:
        start, params, opt_state, meta = restored
        seen = meta["instances_seen"]
        if init_from is not None:
            log(f"--init-from {init_from} is not used: {run_dir} holds checkpoints of its own")
        if start >= c.run.steps:
            log(f"already at step {start} of {c.run.steps}: nothing to do")
            checkpoints.close()
            if jax.process_index() == 0 and (run_dir / "summary.json").is_file():
                print((run_dir / "summary.json").read_text(), end="")
            return 0
        log(f"resuming from {checkpoints.folder / str(start)}: {seen} instances seen")
    if jax.process_index() == 0:
        resolved = yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(c))), sort_keys=False)
        (run_dir / "config.yaml").write_text(resolved)

    steps_per_epoch = source.batches_per_epoch
    tokens_a_step = c.data.global_batch * c.data.sequence_length
    log(
        f"{model.parameter_count(c.model):,} parameters, mesh {dict(mesh.shape)}, {c.data.global_batch} x "
        f"{c.data.sequence_length} = {tokens_a_step:,} tokens a step, {steps_per_epoch:,} steps an epoch"
    )
    step_fn = compile_train_step(c, mesh)
    metrics_log = MetricsLog(run_dir, start)
    progress = Progress(start, c.run.steps, c.run.log_every)
    log = progress.log
    end = seen + (c.run.steps - start) * c.data.global_batch
    batches: Iterator[dict] = data.loader(source, seen, end, workers=c.hardware.loader_workers)
    heldout_ce, saved, pending, finished_at, rates = None, start, None, None, []

    def save(step: int) -> None:
        nonlocal saved
        metrics_log.sync()
        meta = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "instances_seen": seen,
            "tokens_seen": seen * c.data.sequence_length,
            "items": ["params", "opt_state", "meta"],
            "data": identity,
            "config": science_dict(c),
            "versions": versions(),
        }
        checkpoints.save(step, params, opt_state, meta)
        saved = step

    def finish_pending() -> None:
        """Wait for the step in flight, log it, and end the run if too many in a row were not finite."""
        nonlocal pending, finished_at
        if pending is None:
            return
        step, seen_then, m, data_seconds = pending
        pending = None
        m = jax.device_get(m)
        now = time.perf_counter()
        seconds = now - finished_at if finished_at is not None else None
        finished_at = now
        values = step_metrics(m, step, seen_then, c)
        if seconds is not None:  # the first step compiles and is not timed
            rates.append(seconds)
            values["throughput/device/TPS"] = tokens_a_step / seconds / jax.device_count()
            values["throughput/device/BPS"] = 1 / seconds
            values["throughput/device/data loading (s)"] = data_seconds
            values["throughput/device/data loading (%)"] = 100 * data_seconds / seconds
        metrics_log.write(step, values)
        recent = float(np.mean(rates[-20:])) if rates else 0.0
        progress.update(step, values, tokens_a_step / recent if recent else 0.0, recent)
        streak = int(m["nonfinite_in_a_row"])
        if streak:
            leaf = int(m["first_nonfinite_gradient"])
            what = f"the gradient of {names[leaf]}" if leaf >= 0 else "the loss"
            log(f"step {step} skipped: {what} is not finite ({streak} in a row)")
        if streak >= c.optim.max_nonfinite_steps:
            metrics_log.sync()
            raise RunFailed(
                f"step {step}: {streak} non-finite steps in a row (optim.max_nonfinite_steps); parameters are those of "
                f"step {step - streak}; the last checkpoint is {checkpoints.folder / str(saved) if saved else 'none'}"
            )

    def evaluate(step: int) -> bool:
        """Held-out loss after `step`; False if a signal cut it short (it is made up for after the restart)."""
        nonlocal heldout_ce, finished_at
        results = held_out(params, progress.bar is not None, should_stop=lambda: stop.code is not None)
        if results is None:
            return False
        heldout_ce = results["all"]["ce"]
        metrics_log.write(step, evaluation_metrics(results))
        log(f"step {step}: held-out CE {heldout_ce:.4f}  " + "  ".join(
            f"{label} {r['ce']:.4f}" for label, r in results.items() if label != "all" and len(results) > 2))  # fmt: skip
        finished_at = time.perf_counter()
        return True

    try:
        with contextlib.closing(batches):
            if held_out and start and start % c.run.eval_every == 0 and start not in metrics_log.evaluated:
                evaluate(start)
            for step in range(start + 1, c.run.steps + 1):
                began = time.perf_counter()
                batch = next(batches)
                data_seconds = time.perf_counter() - began
                on_device = to_device(batch, rows, mesh, c)
                params, opt_state, m = step_fn(params, opt_state, on_device, np.int32(step))
                seen += c.data.global_batch
                finish_pending()  # of the step before: this one is computed meanwhile
                pending = (step, seen, m, data_seconds)
                last = step == c.run.steps
                leave = stop.requested(step)
                if held_out and not leave and (last or step % c.run.eval_every == 0):
                    finish_pending()
                    leave = not evaluate(step) or stop.requested(step)
                if leave or last or step % c.run.checkpoint_every == 0:
                    finish_pending()
                    save(step)
                if leave and not last:
                    checkpoints.close()
                    log(f"stopped by a signal: step {step} is saved in {checkpoints.folder / str(step)}")
                    return stop.code
        checkpoints.close()
    finally:
        progress.close()
        metrics_log.close()

    if jax.process_index() == 0:
        rows_of = [json.loads(line) for line in read_lines(run_dir / "metrics.jsonl")]
        final = next(r for r in reversed(rows_of) if "train/CE loss" in r)
        summary = {
            "step": c.run.steps,
            "ce": final["train/CE loss"],
            "heldout_ce": heldout_ce,
            "tokens": seen * c.data.sequence_length,
            "tokens_per_second": round(tokens_a_step / float(np.median(rates)), 1) if rates else None,
            "skipped_steps": sum(r.get("optim/step_skipped", 0) for r in rows_of),
            "checkpoint": str(run_dir / "checkpoints" / str(c.run.steps)),
            "curves": str(draw_curves(run_dir)),
        }
        text = json.dumps(summary, indent=1) + "\n"
        (run_dir / "summary.json").write_text(text)
        print(text, end="", flush=True)
    return 0


def dry_run(c: Config, data_root: str | None) -> None:
    """Check everything that can be checked without computing and print the plan as JSON."""
    mesh = make_mesh(c)
    local = c.data.global_batch // (mesh.shape["data"] * mesh.shape["fsdp"])
    index = data.load_index(c.data.index)
    check_vocabulary(index, c, c.data.index)
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
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, compute nothing")
    group = parser.add_argument_group("several processes")
    group.add_argument("--coordinator", metavar="HOST:PORT")
    group.add_argument("--num-processes", type=int)
    group.add_argument("--process-id", type=int)
    return parser.parse_args(argv)


def fail(message: str, code: int) -> int:
    print(f"train.py: error: {message}", file=sys.stderr)
    return code


def main(argv=None) -> int:
    args = parse_args(argv)
    several = (args.coordinator, args.num_processes, args.process_id)
    if any(x is not None for x in several):
        if any(x is None for x in several):
            return fail("--coordinator, --num-processes and --process-id: got some of them, expected all three", 2)
        jax.distributed.initialize(*several)
    try:
        c = load_config(args.config, args.hardware, args.set)
        run_dir = args.run_dir or f"runs/{c.run.name}"
        if "://" in run_dir:
            raise ValueError(f"--run-dir {run_dir}: got a URL, expected a folder; fix: mount the bucket (e.g. gcsfuse)")
        if args.init_from is None and args.init_state != "params":
            raise ValueError("--init-state adam: got no --init-from, expected a checkpoint to start from")
        if c.hardware.compilation_cache:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(c.hardware.compilation_cache))
        if args.dry_run:
            dry_run(c, args.data_root)
            return 0
        return train(c, Path(run_dir), args.data_root, args.init_from, args.init_state)
    except (ValueError, FileNotFoundError, NotADirectoryError) as e:
        # data.DataError and every refused config; what jax itself raises as ValueError is a bug and shows its trace
        if isinstance(e, data.DataError) or is_ours(e):
            return fail(first_line(e), 2)
        raise
    except RunFailed as e:
        return fail(str(e), 1)


def is_ours(e: BaseException) -> bool:
    """Whether the error was raised by this project's own code, hence is a message to the user."""
    tb = e.__traceback__
    while tb.tb_next:
        tb = tb.tb_next
    return Path(tb.tb_frame.f_code.co_filename).resolve().parent == HERE


if __name__ == "__main__":
    sys.exit(main())
