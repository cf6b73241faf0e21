"""Two YAML files -> one checked Config, and what a machine makes of it: mesh, micro-batch, attention, saved activations.

    configs/<recipe>.yaml            the science: model, data, optim, schedule, loss, run. No defaults.
    configs/hardware/<machine>.yaml  how it is computed: mesh, microbatch, attention, remat, XLA flags, loader workers

The keys of the two are disjoint, so that hardware cannot change the maths. RUN/config.yaml, the record of a run, holds
both and is a config itself. Every key is checked before anything is compiled; errors name key, value and remedy.
"""

import copy
import dataclasses
import glob
import importlib.util
import json
import math
import operator
import os
import re
import sys
import types
import typing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import metadata

import jax
import numpy as np
from jax._src import hardware_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import data
import model
import optim
from attention import SplashConfig, choose_attention, rows_in_order
from processes import (
    HERE,
    find_config,
    first_line,
    parse_override,
    read_yaml,
    run_name_fault,
    say,
    set_key,
    unknown_key,
)

BATCH_AXES = ("data", "fsdp")  # the batch is sharded over both; every row of the global batch has one place


@dataclass(frozen=True)
class LossConfig:
    z_loss: float
    filtered_in_divisor: bool  # a filtered instance adds S to the divisor, as in OLMo-core

    def __post_init__(self):
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"loss.z_loss: got {self.z_loss}, expected 0 or more")


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
    sample_prompt: str | None  # continued and printed at each evaluation; null: no samples

    def __post_init__(self):
        for name in ("steps", "checkpoint_every", "log_every", "eval_every"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"run.{name}: got {getattr(self, name)}, expected 1 to 2^31 - 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"run.seed: got {self.seed}, expected 0 to 2^32 - 1")
        for name in ("keep_checkpoints", "eval_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"run.{name}: got {getattr(self, name)}, expected a positive number or null")
        if fault := run_name_fault(self.name):
            raise ValueError(fault)


@dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    context: int
    tensor: int  # one of the four may be -1: the devices that the others leave


@dataclass(frozen=True)
class HardwareConfig:
    mesh: MeshConfig
    microbatch: int  # the most sequences that a device computes at once; the rest is accumulated
    attention: str | list  # a name, or a list: load_config takes the first that can compute the recipe
    attention_block: int
    splash: SplashConfig | None  # of attention splash
    remat: str | list | dict  # "all": every activation is saved; a list: those names; or {microbatch: either of them}
    scan_unroll: int
    loss_chunk: int
    loader_workers: int
    xla_flags: dict  # compiler options of the jitted step, as jax.jit takes them
    compilation_cache: str | None

    def __post_init__(self):
        if isinstance(self.remat, str) and self.remat != "all":
            raise ValueError(f"remat: got {self.remat!r}, expected all, a list of names, or {{microbatch: names}}")
        if self.microbatch < 1:
            raise ValueError(f"microbatch: got {self.microbatch}, expected a positive number")
        if not 0 <= self.loader_workers <= 1024:
            raise ValueError(f"loader_workers: got {self.loader_workers}, expected 0 to 1024 processes")
        if "cudnn" in self.attention and self.xla_flags.get("xla_gpu_deterministic_ops") is not True:
            raise ValueError("attention: got cudnn, whose gradients differ from run to run without XLA's deterministic "
                             "operations; fix: xla_flags.xla_gpu_deterministic_ops=true")  # fmt: skip


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

    def __post_init__(self):
        """What no section can see alone."""
        optim.check_schedule(self.schedule)
        S, B = self.data.sequence_length, self.data.global_batch
        if self.model.window > S:
            raise ValueError(f"model.window: got {self.model.window}, expected at most data.sequence_length {S}")
        if B * S >= 2**31:
            raise ValueError(f"data.global_batch: {B} x {S} tokens do not fit in int32")
        if self.hardware.attention == "cudnn" and (fault := beyond_cudnn(self)):
            raise ValueError(f"attention: got cudnn, which cannot compute {fault}; fix: attention=blockwise")
        for microbatch in range(1, min(self.hardware.microbatch, B) + 1):
            make_execution(self, microbatch, "tpu")

    @property
    def tokens_a_step(self) -> int:
        return self.data.global_batch * self.data.sequence_length

    @cached_property
    def parameter_sizes(self) -> dict[str, int]:
        """Name -> number of parameters, in the order of the ledger."""
        return {name: math.prod(tensor.shape) for name, tensor in architecture(self).ledger(self.model).items()}

    @cached_property
    def parameter_uses(self) -> dict[str, float]:
        """Name -> matmuls of a token with it, for FLOPs."""
        return {name: tensor.uses for name, tensor in architecture(self).ledger(self.model).items()}

    @property
    def eval_limit(self) -> int | None:
        """Instances of one held-out evaluation of the run; None: all of them."""
        return None if self.run.eval_batches is None else self.run.eval_batches * self.data.global_batch


SCIENCE = ("model", "data", "optim", "schedule", "loss", "run")
HARDWARE = tuple(f.name for f in dataclasses.fields(HardwareConfig))


# ------------------------------------------------------------------------------------------------- from YAML to Config


def load_config(config: str, hardware: str | None, overrides: list[str]) -> Config:
    """Read and check both files. Without `hardware` the file is chosen by the device that jax finds; RUN/config.yaml
    brings its own."""
    path = find_config(config, HERE / "configs")
    return assemble_config(read_yaml(path), str(path), hardware, overrides)


def assemble_config(science: dict, name: str, hardware: str | None, overrides: list[str]) -> Config:
    """Config from the science sections that stand in `name`, a hardware file and --set overrides."""
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
    raw = copy.deepcopy(science | {"hardware": machine})  # the caller's, often a checkpoint's record, stays as it is
    for override in overrides:
        dotted, value = parse_override(override)
        top = dotted.split(".")[0]
        if top not in SCIENCE + HARDWARE:
            raise ValueError(unknown_key(f"--set {dotted}", top, SCIENCE + HARDWARE))
        set_key(raw["hardware"] if top in HARDWARE else raw, dotted, value)
    for section in SCIENCE:
        if section not in raw:
            raise ValueError(f"{section}: missing section; fix: add it to {name}")
    if isinstance(raw["run"], dict):
        raw["run"].setdefault("sample_prompt", None)  # a key that came later and changes no number: old records go on
    kinds = typing.get_type_hints(Config)
    if isinstance(raw["model"], dict) and "module" in raw["model"]:
        kinds["model"] = experiment(raw["model"]["module"]).ModelConfig
    sections = {key: build(kind, raw[key], key) for key, kind in kinds.items()}
    if isinstance(sections["hardware"].attention, list):
        attention = first_able(sections["hardware"].attention, beyond_cudnn(types.SimpleNamespace(**sections)))
        sections["hardware"] = dataclasses.replace(sections["hardware"], attention=attention)
    return Config(**sections)


def beyond_cudnn(config) -> str | None:
    """The key and value that cuDNN's attention cannot compute; None: it can compute the recipe."""
    limits = (
        ("data.document_mask", config.data.document_mask, (False,)),
        ("mesh.context", config.hardware.mesh.context, (1,)),
        ("model.compute_dtype", config.model.compute_dtype, ("bfloat16",)),
        ("model.head_dim", config.model.head_dim, range(8, 129, 8)),  # larger heads need a Hopper GPU, or a later one
    )
    return next((f"{key} {got}" for key, got, allowed in limits if got not in allowed), None)


def first_able(attentions: list, fault: str | None) -> str:
    """The first of the attentions that can compute the recipe; a line says why it is not the first of all."""
    able = [name for name in attentions if name != "cudnn" or not fault]
    if not able:
        raise ValueError(f"attention: got {attentions}, none of which can compute {fault}; fix: [cudnn, blockwise]")
    if able[0] != attentions[0]:
        say(f"attention: {able[0]}, since cudnn cannot compute {fault}")
    return able[0]


def experiment(name: str) -> types.ModuleType:
    """experiments/<name>.py, which holds the names that are asked of model.py: ModelConfig, ledger, token_loss, ..."""
    known = {path.stem: path for path in sorted((HERE / "experiments").glob("*.py"))}
    if name not in known:
        raise ValueError(f"model.module: got {name!r}, expected a file in experiments/: {', '.join(known)}")
    key = f"experiments.{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, known[name])
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


def architecture(config: Config) -> types.ModuleType:
    """What is trained: model.py, or the file in experiments/ that model.module names."""
    return experiment(config.model.module) if hasattr(config.model, "module") else model


def build(kind, value, where: str):
    """`value`, as YAML gave it, as an instance of the type `kind`; ValueError names the place."""
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


def check_length(config: Config) -> None:
    """A run ends where its learning rate does; evaluation does not mind."""
    last, number = config.schedule[-1], len(config.schedule) - 1
    if last.kind != "constant" and config.run.steps > last.total_steps:
        key = f"schedule.{number}.total_steps"
        raise ValueError(
            f"run.steps: got {config.run.steps}, expected at most {key} {last.total_steps}, where the learning rate has "
            f"come to its end; fix: a longer curve (--set {key}={config.run.steps}, on a resume with --allow schedule), "
            "or a last piece of kind constant, which has no end"
        )


def science_dict(config: Config) -> dict:
    """The science as JSON holds it: lists, no tuples."""
    return json.loads(json.dumps({key: value for key, value in asdict(config).items() if key != "hardware"}))


# ------------------------------------------------------------------------------------------------- mesh and placement


def mesh_sizes(config: Config, devices: int, batch: int | None = None) -> dict[str, int]:
    """Axis -> size over so many devices. ValueError if model or batch (default: the global one) cannot be sharded so."""
    sizes = asdict(config.hardware.mesh)
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh: got {sizes}, expected positive sizes, one of which may be -1")
    if devices % fixed or (not free and devices != fixed):
        raise ValueError(f"mesh: got {sizes} for {devices} devices, expected sizes whose product is {devices}")
    if free:
        sizes[free[0]] = devices // fixed
    architecture(config).check_mesh(config.model, sizes, config.data.sequence_length)
    rows, batch = sizes["data"] * sizes["fsdp"], batch or config.data.global_batch
    if batch % rows:
        raise ValueError(f"global batch: got {batch}, expected a multiple of data x fsdp = {rows} of the mesh")
    return sizes


def make_mesh(config: Config, batch: int | None = None, devices: list | None = None) -> jax.sharding.Mesh:
    """The mesh over `devices`; default: all devices of all processes. Axis types are Auto, as `model.vary` needs them."""
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices), batch)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


def largest_microbatch(config: Config, mesh, batch: int | None = None) -> int:
    """Sequences that a device computes at once: the largest divisor of its share that hardware.microbatch allows."""
    share = (batch or config.data.global_batch) // (mesh.shape["data"] * mesh.shape["fsdp"])
    return max(n for n in range(1, min(config.hardware.microbatch, share) + 1) if share % n == 0)


def make_execution(config: Config, microbatch: int, platform: str) -> model.Execution:
    """The hardware file's choices for micro-batches of this size. Names saved for a larger one fit a smaller one."""
    hardware, remat = config.hardware, config.hardware.remat
    if isinstance(remat, dict):
        fitting = [key for key in remat if isinstance(key, int) and key >= microbatch]
        if not fitting:
            raise ValueError(f"remat: got entries for {list(remat)} sequences, expected one for {microbatch} or more")
        remat = remat[min(fitting)]
    attention, key_multiple = choose_attention(hardware.attention, hardware.attention_block, hardware.splash, platform)
    return model.Execution(
        attention=attention,
        remat=None if remat == "all" else tuple(remat),
        scan_unroll=hardware.scan_unroll,
        loss_chunk=hardware.loss_chunk,
        key_multiple=key_multiple,
        take_rows=rows_in_order if hardware.xla_flags.get("xla_gpu_deterministic_ops") else operator.getitem,
    )


def platform_of(mesh) -> str:
    """An abstract mesh stands for the machine that the hardware file is for."""
    return "tpu" if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat[0].platform


def param_specs(config: Config) -> dict[str, P]:
    return {name: tensor.spec for name, tensor in architecture(config).ledger(config.model).items()}


def param_shapes(config: Config, mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What the params item of a checkpoint is restored into."""
    shapes = jax.eval_shape(partial(architecture(config).init_params, config.model), 0)
    return with_shardings(shapes, mesh, param_specs(config))


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def with_shardings(shapes, mesh, specs):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings(mesh, specs))


def batch_specs(config: Config) -> dict[str, P | None]:
    token = P(BATCH_AXES, "context")
    return {
        "tokens": token,
        "labels": token,
        "loss_mask": token,
        "segment_ids": token if config.data.document_mask else None,  # None: the attention leaves the comparison out
        "filtered": P(BATCH_AXES),
    }


def local_rows(mesh, batch: int) -> np.ndarray:
    """Rows of a batch that this process's devices hold, ascending. It reads these and no others."""
    places = NamedSharding(mesh, P(BATCH_AXES)).addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[place] for place in places]))


def to_device(batch: dict, mesh, config: Config, rows: int) -> dict[str, jax.Array | None]:
    """This process's rows of a batch of `rows` -> global arrays sharded over the mesh. A device receives its block alone."""

    def put(name, spec):
        if spec is None:
            return None
        shape = (rows, *batch[name].shape[1:])
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), batch[name], shape)

    return {name: put(name, spec) for name, spec in batch_specs(config).items()}


# -------------------------------------------------------------------------------------------------------- the machine


def detect_hardware() -> str:
    """Name of the hardware file for the first device."""
    kind = jax.devices()[0].device_kind
    known = {"cpu": "cpu", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v7x": "ironwood", "TPU7x": "ironwood",
             "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100", "NVIDIA H100 NVL": "h100",
             "NVIDIA H200": "h200", "NVIDIA H200 NVL": "h200", "NVIDIA GeForce RTX 4090": "rtx4090"}  # fmt: skip
    if kind not in known and jax.devices()[0].platform == "gpu":
        return "gpu"  # any other
    if kind not in known:
        raise ValueError(f"device: got kind {kind!r}, expected one of {', '.join(known)}; fix: pass --hardware NAME")
    return known[kind]


def cache_compilations(config: Config) -> None:
    if config.hardware.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(data.local_path(config.hardware.compilation_cache)))


def check_compiler_options(config: Config) -> None:
    """Compile nothing with them, before the model is compiled for minutes."""
    try:
        jax.jit(lambda: 0, compiler_options=config.hardware.xla_flags).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError) as e:  # an unknown flag; a value of another type
        raise ValueError(f"xla_flags: {first_line(e)}; fix: take the flags of the compiler that is installed") from e


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
# These change numbers, too. They belong to the machine, so they are recorded, and a change of one is said.
RECORDED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DISABLE_JIT",
            "JAX_OPTIMIZATION_LEVEL", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "JAX_ALLOW_F16_REDUCTIONS")  # fmt: skip


def pin_settings() -> None:
    """JAX's variables have no say in the numbers. To be called before the first device is asked for.

    On a machine without an accelerator libtpu, which tools/plan.py needs, is left alone: it prints a screen of errors
    where it finds no TPU."""
    devices = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
    accelerators = hardware_utils.num_available_tpu_chips_and_device_id()[0] or any(map(glob.glob, devices))
    if not jax.config.jax_platforms and importlib.util.find_spec("libtpu") and not accelerators:
        jax.config.update("jax_platforms", "cpu")
    if glob.glob("/dev/nvidia*") + glob.glob("/dev/dxg"):
        # In products of float32 cuBLAS would round to TF32's 10 bits. A user's own value stands, and is recorded.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    for name, value in PINNED.items():
        if (got := getattr(jax.config, name)) != value:
            print(f"{name.upper()}={got} would change the numbers and is not used", file=sys.stderr)
            jax.config.update(name, value)


def environment() -> dict[str, str]:
    """RECORDED, as far as it is set, without the flags that compute nothing."""
    idle = re.compile("--xla_(force_host_platform_device_count|dump)")
    words = {name: [w for w in os.environ.get(name, "").split() if not idle.match(w)] for name in RECORDED}
    return {name: " ".join(kept) for name, kept in words.items() if kept}


def versions() -> dict[str, str]:
    return {p: metadata.version(p) for p in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy")}
