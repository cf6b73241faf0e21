"""Plan: what a run will ask of a machine, worked out before one is taken.

    python tools/plan.py collectives --config stage1.yaml --hardware v5p --devices 512
    python tools/plan.py compile --config stage1.yaml --hardware v5p --topology v5p:4x4x8
    python tools/plan.py compile --config stage1.yaml --hardware h100 --topology h100:64 --mfu 0.4

`collectives` traces the training step for a mesh of abstract devices: nothing is compiled or computed and no accelerator
is touched. It lists what the devices send to each other in one step and where in the source that is asked for. A compiler
may merge or overlap collectives, and it may fuse them with computation.

`compile` compiles the same step for TPUs or GPUs with the compiler of requirements-tpu.txt or requirements-gpu.txt, on any
machine, and reads what it planned: memory, schedule (TPU), the collectives that are left and what they hide behind; then
what the run costs.

Exit codes: 0 done; 1 failed, or the step does not fit; 2 wrong usage or config.
Read first: model.py and the step of train.py, which write every collective out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

sys.path.append(str(Path(__file__).resolve().parent.parent))

from gpu_targets import GPUS, gpu_grid

import model
import train
from config import Config, batch_specs, largest_microbatch, load_config, make_execution, mesh_sizes, pin_settings
from data import local_path
from metrics import PEAK_FLOPS, flops_per_token
from processes import HERE, RunFailed, add_verb, first_line, inputs_are_checked, run_command, sole_writer

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",  # psum under check_vma
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}
SENDS_NOTHING = ("axis_index", "pvary")  # primitives that name mesh axes and are computed in place
# Functions whose callers say more about where a collective stands.
HELPERS = ("vary", "gather_weight", "gather_head", "gather_vocabulary", "apply", "scan_layers", "loss_by_chunks")
EXPERIMENTS = HERE / "experiments"


class Collective(NamedTuple):
    """What a device sends at one place of the step."""

    where: str  # the function that asks for it, and its caller
    phase: str  # forward | recomputed (for the backward pass) | backward | step: outside the derivative
    kind: str  # all-gather | reduce-scatter | all-reduce | permute | all-to-all
    axes: tuple[tuple[str, int], ...]  # mesh axes and their sizes; those of size 1 are left out
    dtype: str
    shape: tuple[int, ...]  # of one device's operand
    times: int  # a step
    sent: int  # bytes that a device sends each time

    @property
    def sent_a_step(self) -> int:
        return self.times * self.sent


def bytes_sent(kind: str, operand: int, n: int) -> int:
    """Bytes that one of n devices sends, rounded up, when each brings `operand` bytes; the fewest possible.

    Ring algorithms: an all-gather passes on n-1 shards, each 1/n of its output; a reduce-scatter n-1 shards, each 1/n
    of its input; an all-reduce is a reduce-scatter and an all-gather. A permute sends its operand, an all-to-all what
    of it is for others.
    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    shards = {"all-gather": (n - 1) * n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1), "permute": n,
              "all-to-all": n - 1}[kind]  # fmt: skip
    return -(-operand * shards // n)


# ------------------------------------------------------------------------------------------------ the traced step


def trace_step(config: Config, mesh):
    """The training step on a mesh that may be abstract, traced from shapes alone."""
    params, opt_state = train.state_shapes(config, mesh)
    B, S = config.data.global_batch, config.data.sequence_length
    batch = {name: spec and jax.ShapeDtypeStruct((B, S), jnp.int32) for name, spec in batch_specs(config).items()}
    batch |= {"loss_mask": jax.ShapeDtypeStruct((B, S), jnp.bool_), "filtered": jax.ShapeDtypeStruct((B,), jnp.bool_)}
    return train.compile_train_step(config, mesh).trace(params, opt_state, batch, jax.ShapeDtypeStruct((), jnp.int32))


def abstract_mesh(config: Config, devices: int) -> jax.sharding.AbstractMesh:
    if devices < 1:
        raise ValueError(f"--devices: got {devices}, expected a positive number")
    sizes = mesh_sizes(config, devices)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def equations(jaxpr: Jaxpr, times: int = 1, path: tuple[JaxprEqn, ...] = ()) -> Iterator[tuple]:
    """(equation, how often it runs, itself and the equations around it, from the inside) of all levels, in order."""
    for eqn in jaxpr.eqns:
        yield eqn, times, (eqn, *path)
        often = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, often, (eqn, *path))


def step_equations(config: Config, mesh) -> Iterator[tuple]:
    """`equations` of a training step, without those that nothing uses: the compiler leaves them out, too."""
    jaxpr = trace_step(config, mesh).jaxpr.jaxpr
    return equations(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that an equation names; of a plain sum the axes are numbers."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, str))


def where(path: tuple[JaxprEqn, ...]) -> str:
    """`function in caller` of model.py, train.py or experiments/. A gradient stands where its forward computation does."""
    names = []
    for eqn in path:
        for frame in eqn.source_info.traceback.frames:
            name = frame.function_name.split(".")[0]  # of layer.<locals>.<dictcomp>: layer
            ours = frame.file_name in (model.__file__, train.__file__) or Path(frame.file_name).parent == EXPERIMENTS
            if ours and not name.startswith("_"):
                if name not in (*HELPERS, *names[-1:]):
                    names.append(name)
    return " in ".join(names[:2])


def phase(path: tuple[JaxprEqn, ...]) -> str:
    """Which pass: JAX writes its transformations into the names of equations."""
    names = "/".join(str(eqn.source_info.name_stack) for eqn in path)
    marks = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    return next((said for mark, said in marks.items() if mark in names), "step")


def collectives(config: Config, devices: int) -> list[Collective]:
    """Every collective of one training step on `devices` devices, in the order of the step, equal ones added up.

    What is traced but never used, such as a recomputation that no gradient needs, is left out, as the compiler does;
    so is a collective over a single device. Loops count as often as they run, micro-batches included. RunFailed if
    one stands where it cannot be counted. Bytes: `bytes_sent`; over several axes n is the product of their sizes.
    """
    mesh = abstract_mesh(config, devices)
    inputs_are_checked()
    found = Counter()
    for eqn, times, path in step_equations(config, mesh):
        axes = tuple((axis, mesh.shape[axis]) for axis in named_axes(eqn) if mesh.shape[axis] > 1)
        name = eqn.primitive.name
        if not axes or name in SENDS_NOTHING:
            continue
        if name not in KINDS or eqn.params.get("axis_index_groups") is not None:
            raise RunFailed(f"{where(path)}: {name} over {dict(axes)}: a collective that plan.py cannot count")
        if any(around.primitive.name in ("cond", "while") for around in path):
            raise RunFailed(f"{where(path)}: {name} in a branch or a loop of unknown length: cannot be counted")
        for x in eqn.invars:
            sent = bytes_sent(KINDS[name], x.aval.size * x.aval.dtype.itemsize, math.prod(dict(axes).values()))
            place = (where(path), phase(path), KINDS[name], axes)
            found[Collective(*place, x.aval.dtype.name, x.aval.shape, 0, sent)] += times
    return [one._replace(times=times) for one, times in found.items()]


# ------------------------------------------------------------------------------------------------------ the report


def product(axes: tuple[tuple[str, int], ...]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes)


def markdown(rows: list[tuple], heads: tuple[str, ...], numbers: int = 0) -> str:
    """A table, of which the last `numbers` columns stand to the right."""
    rule = ("---",) * (len(heads) - numbers) + ("--:",) * numbers
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (heads, rule, *rows))


def sums(heads: tuple[str, ...], keys: list[tuple], listed: list[Collective]) -> str:
    """A row for each distinct key, with the collectives and the MB that a device sends, both a step."""
    count, sent = Counter(), Counter()
    for key, collective in zip(keys, listed, strict=True):
        count[key] += collective.times
        sent[key] += collective.sent_a_step
    rows = [(*key, f"{count[key]:,}", f"{mb:,.1f}" if (mb := sent[key] / 1e6) >= 0.1 else "< 0.1") for key in count]
    return markdown(rows, (*heads, "a step", "MB a step"), numbers=2)


def report(config: Config, devices: int, found: list[Collective]) -> str:
    """Where the collectives stand, and what goes over which axes of the mesh."""
    keys = [(one.where, one.phase, one.kind, product(one.axes), one.dtype) for one in found]
    mesh = product(tuple(mesh_sizes(config, devices).items()))
    total = sum(one.sent_a_step for one in found)
    return (
        f"{config.run.name}, one step of {config.data.global_batch} x {config.data.sequence_length} tokens on {devices} devices "
        f"({mesh}): a device sends {total / 1e9:,.1f} GB.\n\n"
        + sums(("where", "pass", "kind", "over", "dtype"), keys, found)
        + "\n"
        + sums(("over", "kind"), [(product(one.axes), one.kind) for one in found], found)
    )


def run_collectives(args) -> None:
    pin_settings()
    jax.config.update("jax_platforms", "cpu")  # tracing needs no accelerator, and one may be another process's
    config = load_config(args.config, args.hardware, args.set)
    found = collectives(config, args.devices)
    rows = [one._asdict() | {"axes": dict(one.axes), "sent_a_step": one.sent_a_step} for one in found]
    print(
        json.dumps(rows, indent=1) if args.json else report(config, args.devices, found), end="\n" if args.json else ""
    )


# ------------------------------------------------------------------------------------- plan: the step, compiled


class Tpu(NamedTuple):
    """A generation of TPUs."""

    name: str  # libtpu's, of a topology
    chip_config: str
    devices: int  # JAX devices a chip
    kind: str  # JAX's, of a device
    hbm: float  # GiB that a program may fill on a device
    mfu: float  # that the case study measured, by full-causal FLOPs


TPUS = {
    "v5p": Tpu("v5", "megacore", 1, "TPU v5", 95.74, 0.574),
    "tpu7x": Tpu("tpu7x", "default", 2, "TPU7x", 96.0, 0.445),  # Ironwood
}
CHIPS = TPUS | GPUS

ENVIRONMENT = {  # of the process that compiles
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache has no schedule to read
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no driver whose version could be asked
    "TPU_ACCELERATOR_TYPE": "",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "0",
    "TPU_STDERR_LOG_LEVEL": "0",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TPU_VMODULE": "latency_hiding_scheduler=1",
}
DUMP = "--xla_dump_to={} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_train_step"
# Files of the dump, in the order in which XLA writes them, and what it does until then.
STAGES = {
    "before_optimizations.txt": "tracing the step",
    "after_optimizations.txt": "optimising and scheduling",
    "after_optimizations-buffer-assignment.txt": "assigning buffers",
    "after_optimizations-memory-usage-report.txt": "assigning buffers",
}
HLO, ASSIGNMENT, MEMORY = list(STAGES)[1:]
REASON = "plan.py: error: "


def parse_topology(text: str) -> tuple[str, tuple[int, ...]]:
    """v5p:4x4x8 -> ("v5p", (4, 4, 8)): chips along each axis; h100:64 -> ("h100", (64,))."""
    kind, _, sizes = text.partition(":")
    pattern = r"\d+x\d+x\d+" if kind in TPUS else r"\d+"
    if kind not in CHIPS or not re.fullmatch(pattern, sizes) or "0" in sizes.split("x"):
        raise ValueError(f"--topology: got {text!r}, expected KIND:XxYxZ in chips, KIND one of {', '.join(TPUS)}, or "
                         f"KIND:N, KIND one of {', '.join(GPUS)}; example: v5p:4x4x8")  # fmt: skip
    return kind, tuple(map(int, sizes.split("x")))


def topology_mesh(config: Config, topology: str) -> jax.sharding.Mesh:
    """The mesh over devices that only the compiler knows. ValueError if it knows no such topology."""
    kind, chips = parse_topology(topology)
    chip = CHIPS[kind]
    if kind in GPUS:
        asked = {
            "platform": "cuda",
            "topology_name": kind,
            "topology": gpu_grid(*chips),
            "target_config": chip.target(),
        }
    else:
        asked = {
            "platform": "tpu", "topology_name": f"{chip.name}:{topology.partition(':')[2]}",
            "chip_config_name": chip.chip_config, "chips_per_host_bounds": (2, 2, 1), "num_slices": 1,
            "wrap": tuple(n % 4 == 0 for n in chips),
        }  # fmt: skip
    try:
        devices = topologies.get_topology_desc(**asked).devices
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        raise ValueError(f"--topology: got {topology}, which the compiler refuses: {first_line(e)}") from e
    sizes = mesh_sizes(config, len(devices))
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices=devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=auto)


def compile_in_child(config: Config, topology: str) -> None:
    """Compile the step and print a line of JSON before and after. The parent reads dump and log, and may end this."""

    def end_with_parent():
        os.read(0, 1)  # returns when the parent has ended: it holds the other end and writes nothing
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    mesh = topology_mesh(config, topology)
    inputs_are_checked()
    print(json.dumps({"device_kind": mesh.devices.flat[0].device_kind}), flush=True)
    try:
        lowered, started = trace_step(config, mesh).lower(), time.monotonic()
        lowered.compile()
    except Exception as e:  # whatever compiler, kernel or JAX refuse: the parent shows the line, --keep the rest
        traceback.print_exc()
        raise RunFailed(f"{type(e).__name__}: {first_line(e)}") from e
    print(json.dumps({"full": {"compile_seconds": round(time.monotonic() - started, 1)}}), flush=True)


def dumped(folder: Path, ending: str) -> Path | None:
    return next(folder.glob(f"*.jit_train_step.*{ending}"), None)


def wait_for_plan(process: subprocess.Popen, folder: Path, topology: str, full: bool) -> None:
    """Until the dump holds what the report reads (the code that is generated after that takes far longer)."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)

    started, size = time.monotonic(), 0
    while process.poll() is None:
        doing = next((doing for end, doing in STAGES.items() if not dumped(folder, end)), "generating code")
        show(f"{topology}: {doing}, {time.monotonic() - started:.0f} s")
        last, size = size, doing == "generating code" and dumped(folder, MEMORY).stat().st_size
        if size and size == last and not full:
            break
        time.sleep(0.3)
    show("")


@contextlib.contextmanager
def compiling(args, folder: Path):
    """The process that compiles; it has ended, whatever happens, when this block is left."""
    command = [sys.executable, __file__, "compile", "--child", "--config", args.config, "--hardware", args.hardware]
    command += ["--topology", args.topology, *(word for override in args.set for word in ("--set", override))]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DUMP.format(folder)}"
    env = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags, "TPU_LOG_DIR": str(folder)}
    with open(folder / "stdout", "w") as out, open(folder / "log", "w") as log:
        streams = {"stdin": subprocess.PIPE, "stdout": out, "stderr": log}
        process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()


def why_it_failed(log: str) -> str:
    """The line that says it: our own, else a fatal one of the compiler's, else the last."""
    lines = [line for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    own = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)]
    fatal = [line for line in lines if re.match(r"F\d{4} |Fatal|.*Check failed", line)]
    return (own or fatal[:1] or lines)[-1][:500]


# --------------------------------------------------------------------------- plan: what the compiler wrote down


def parse_memory(report: str, assignment: str, log: str, capacity: float) -> dict:
    """GiB of a device's HBM. Donated state counts once, as argument. `capacity` unless the compiler says another."""
    total = int(re.search(r"\(color=0\)\s+Total bytes: (\d+)", report)[1])
    arguments = re.findall(r"^allocation \d+: size (\d+), parameter ", assignment, re.M)
    arguments = sum(map(int, arguments))
    said = re.search(r"Used \S+ of ([\d.]+)G hbm", log)
    limit = float(said[1]) if said else capacity
    gib = {"arguments": arguments, "temporaries": total - arguments, "total": total}
    gib = {f"{name}_gib": round(n / 2**30, 2) for name, n in gib.items()}
    return gib | {"limit_gib": limit, "fits": total / 2**30 <= limit}


def parse_last_count(log: str) -> dict:
    """What a TPU's compiler counts once it has generated the code: GiB of HBM, what the runtime reserves and the program
    itself included, and MiB of a core's VMEM. Nothing if it counted neither, as for GPUs.

    JAX's memory_analysis() counts fragmentation of the temporaries on top, a third of them in the 7B.
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    said = {
        "hbm_gib": (r"Total hbm usage >= ([\d.]+)([KMG])", 2**30),
        "vmem_mib": (r"VMEM usage: ([\d.]+)([KMG])", 2**20),
    }
    found = {name: (re.search(pattern, log), unit) for name, (pattern, unit) in said.items()}
    return {name: round(float(m[1]) * units[m[2]] / unit, 2) for name, (m, unit) in found.items() if m}


def parse_schedule(log: str, loops: dict[str, Loop]) -> dict:
    """Cycles of the whole step by the latency-hiding scheduler's prices, after scheduling.

    Asynchronous SparseCore calls (all collectives of a tpu7x) have placeholder prices, so what is spent waiting for
    them is given apart. If memory was over the scheduler's own limit it started again, with less overlap. It leaves
    out a main computation that has nothing to overlap: then the outermost loop stands for the step.
    """
    after = r"Statistics after scheduling:.*?For computation: ([\w.-]+), module jit_train_step(.*?)Memory pressure peak"
    blocks, cycles, waiting = re.findall(after, log, re.S), None, 0
    if blocks:
        name, block = blocks[-1]  # inner ones come first
        times = loops[name].times if name in loops else 1
        cycles = times and times * float(re.search(r"Total cycles: (\S+)", block)[1])
        waiting = times and times * float(re.search(r"Wasted cycles for asynchronous call: (\S+)", block)[1])
    over = re.search(r"current memory usage: (\d+) bytes, does not fit in initial limit: (\d+)", log)
    return {
        "cycles": cycles,
        "cycles_without_asynchronous_calls": cycles and cycles - waiting,
        "over_memory_limit": bool(over),
        "wanted_gib": over and round(int(over[1]) / 2**30, 2),
        "scheduler_limit_gib": over and round(int(over[2]) / 2**30, 2),
    }


class Op(NamedTuple):
    """An instruction of the compiled program."""

    name: str
    type: str
    kind: str
    text: str


def parse_hlo(text: str) -> dict[str, list[Op]]:
    """Computation -> its instructions as they are scheduled; the main one is called ENTRY."""
    computations, body = {}, []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*{$", line):
            body = computations["ENTRY" if head[1] else head[2]] = []
        elif op := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\(", line):
            body.append(Op(op[1], op[2], op[3], line))
    return computations


COMPILED = {  # instructions of HLO
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "collective-permute": "permute",
    "all-to-all": "all-to-all",
}


def collective_in(op: Op, computations: dict) -> Op | None:
    """The collective that an instruction is, or that it wraps."""
    if op.kind.removesuffix("-start") in COMPILED:
        return op
    called = re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", op.text)
    inner = (collective_in(one, computations) for name in called for one in computations.get(name, ()))
    return next(filter(None, inner), None)


def sent_by(op: Op, devices: int) -> int:
    """Bytes that a device sends in a compiled collective, as `bytes_sent` counts them."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", op.text)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", op.text)
    n = len(listed[1].split(",")) if listed else int(counted[1]) if counted else devices
    kind = COMPILED[op.kind.removesuffix("-start")]
    shapes = re.findall(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]", op.type)
    if op.kind in ("all-gather-start", "reduce-scatter-start"):  # operands, outputs
        shapes = shapes[len(shapes) // 2 :]
    elif op.kind == "collective-permute-start":  # operand, output, semaphores
        shapes = shapes[1:2]
    out = sum(math.prod(map(int, filter(None, dims.split(",")))) * (int(bits or 8) // 8) for _, bits, dims in shapes)
    if kind == "all-to-all":
        return out * (n - 1) // n
    return bytes_sent(kind, {"all-gather": out // n, "reduce-scatter": out * n}.get(kind, out), n)


def computes(op: Op) -> bool:
    """Work that can hide a collective: a matmul or the attention kernel. On a GPU they are calls of cuBLAS, cuDNN, Triton."""
    called = re.search(r'custom_call_target="__cu(?:blas|dnn)\$|"kind":"__triton_\w*gemm', op.text)
    return (
        bool(called) or "splash" in op.name or op.kind == "fusion" and "kOutput" in op.text and "dot_general" in op.text
    )


class Compiled(NamedTuple):
    """Collectives of one kind in one loop of the compiled program."""

    place: str  # forward | loss | backward | micro-batches, or outside of all loops
    times: int | None  # that the body runs in a step; None: not known
    kind: str
    count: int  # in the body
    bytes: int  # that a device sends each time the body runs
    asynchronous: int  # have a start and a done
    overlapped: int  # of these have computation in between


def scheduled_collectives(computations: dict, body: list[Op], devices: int) -> list[tuple[str, int, bool, bool]]:
    """(kind, bytes, asynchronous, overlapped) of each collective in a body, nested loops left out.

    Asynchronous are X-start ... X-done, a wrapped one (async-start, tpu7x), and a chain of fusions of which some carry
    it beside a matmul (async-collective-start, v5p): in the chain it stands once a fusion, and counts once.
    """
    found, started = {}, {}
    for i, op in enumerate(body):
        if op.kind == "while":
            continue
        inside = collective_in(op, computations)
        done = "-done" in op.name or op.kind.endswith("-done")
        if inside and not done and ("-start" in op.name or op.kind.endswith("-start")):
            started[op.name] = i
        elif done:
            operands = re.findall(r"%([\w.-]+)", op.text.partition(" = ")[2])
            name = next((n for n in (op.name.replace("-done", "-start"), *operands) if n in started), None)
            if name:
                found[name] = found[name][:3] + (any(map(computes, body[started[name] + 1 : i])),)
            continue
        elif not inside or "calls=%async_collective_fusion" in op.text:  # the latter: a link of a chain
            continue
        kind = COMPILED[inside.kind.removesuffix("-start")]
        found[op.name] = kind, sent_by(inside, devices), op.name in started, False
    return list(found.values())


class Loop(NamedTuple):
    place: str  # forward | loss | backward | micro-batches
    times: int | None  # that its body runs in a step; None: not known


def find_loops(computations: dict[str, list[Op]], body: str = "ENTRY", times: int | None = 1) -> dict[str, Loop]:
    """Name of the body -> what loop it is, of all loops under `body`, which runs so often."""
    loops = {}
    for op in (op for op in computations[body] if op.kind == "while"):
        condition, below = (re.search(rf"{key}=%?([\w.-]+)", op.text)[1] for key in ("condition", "body"))
        # A loop whose collectives were moved on by a turn (on a GPU) has lost its name; its instructions have theirs.
        names = re.findall(r'op_name="([^"]*)"', op.text)
        names += [n for one in computations[below] for n in re.findall(r'op_name="([^"]*/while)/body', one.text)]
        name = next(iter(names), "")
        marks = {"transpose(": "backward", "(loss)": "loss", "jvp(": "forward"}
        place = next((said for mark, said in marks.items() if mark in name), "micro-batches")
        known = re.findall(r'"known_trip_count":{"n":"(\d+)"', op.text)  # a GPU's compiler says it
        bounds = known or [n for one in computations[condition] for n in re.findall(r" constant\((\d+)\)", one.text)]
        loops[below] = Loop(place, times * int(bounds[0]) if times and len(bounds) == 1 else None)
        loops |= find_loops(computations, below, loops[below].times)
    return loops


def compiled_collectives(computations: dict[str, list[Op]], loops: dict[str, Loop], devices: int) -> list[Compiled]:
    """Those of the main computation and of every loop under it, by kind."""
    rows = []
    for name, loop in ({"ENTRY": Loop("outside", 1)} | loops).items():
        found = scheduled_collectives(computations, computations[name], devices)
        for kind in sorted({one[0] for one in found}):
            _, sent, asynchronous, overlapped = zip(*(one for one in found if one[0] == kind), strict=True)
            rows.append(Compiled(*loop, kind, len(sent), sum(sent), sum(asynchronous), sum(overlapped)))
    return rows


# ------------------------------------------------------------------------------------------ plan: what it costs


def cost(config: Config, kind: str, chips: int, mfu: float) -> dict:
    """Of the whole run on so many chips; `mfu` counts full-causal FLOPs, as the case study does."""
    tokens, chip = config.data.global_batch * config.data.sequence_length, CHIPS[kind]
    flops = {name: tokens * flops_per_token(config, name) for name in ("full causal", "window-correct", "OLMo-core")}
    seconds = flops["full causal"] / (chips * chip.devices * PEAK_FLOPS[chip.kind] * mfu)
    hours = seconds * config.run.steps * chips / 3600
    return {
        "flops_a_step": flops,
        "mfu": mfu,
        "mfu_window_correct": mfu * flops["window-correct"] / flops["full causal"],
        "flops_a_device_second": flops["full causal"] / (chips * chip.devices) / seconds,
        "seconds_a_step": seconds,
        "steps": config.run.steps,
        "tokens": config.run.steps * tokens,
        "chip_hours": hours,
        "days": hours / chips / 24,
    }


def advice(config: Config, size: int, plan: dict) -> str | None:
    """What to change in the hardware file when memory is short."""
    if plan["memory"]["fits"] and not (plan["scheduler"] and plan["scheduler"]["over_memory_limit"]):
        return None
    names = make_execution(config, size, "tpu").remat
    saved = "everything" if names is None else f"{len(names)} names: {' '.join(names)}"
    helps = [f"save less in remat (now {saved})"] if names != () else []
    helps += [f"microbatch {size // 2} instead of {size}"] if size > 1 else []
    helps += ["a larger fsdp, context or tensor axis, on more devices"]
    lost = "the step does not fit" if not plan["memory"]["fits"] else "the scheduler gave up overlap for memory"
    return f"{lost}; what helps: {'; '.join(helps)}"


def make_plan(config: Config, args, folder: Path, started: float) -> dict:
    """The plan as JSON has it, from the child's output in `folder`."""
    kind, shape = parse_topology(args.topology)
    chips = math.prod(shape)
    devices = chips * CHIPS[kind].devices
    sizes = mesh_sizes(config, devices)
    rows = config.data.global_batch // (sizes["data"] * sizes["fsdp"])
    size = largest_microbatch(config, abstract_mesh(config, devices))
    log = (folder / "log").read_text(errors="replace")
    said = {}
    for line in (folder / "stdout").read_text().splitlines():
        said |= json.loads(line) if line.startswith("{") else {}
    report, assignment, hlo = (dumped(folder, end).read_text() for end in (MEMORY, ASSIGNMENT, HLO))
    computations = parse_hlo(hlo)
    loops = find_loops(computations)
    plan = {
        "name": config.run.name,
        "topology": args.topology,
        "device_kind": said["device_kind"],
        "chips": chips,
        "devices": devices,
        "mesh": sizes,
        "sequences_a_device": rows,
        "microbatch": size,
        "tokens_a_step": config.data.global_batch * config.data.sequence_length,
        "memory": parse_memory(report, assignment, log, CHIPS[kind].hbm),
        "scheduler": parse_schedule(log, loops) if kind in TPUS else None,  # a GPU's prints none
        "collectives": [row._asdict() for row in compiled_collectives(computations, loops, devices)],
        "cost": cost(config, kind, chips, CHIPS[kind].mfu if args.mfu is None else args.mfu),
        "full": said["full"] | parse_last_count(log) if "full" in said else None,
    }
    return plan | {"advice": advice(config, size, plan), "seconds": round(time.monotonic() - started, 1)}


def schedule_rows(s: dict) -> list[tuple[str, str]]:
    """What the scheduler's cycles are, and whether memory cost overlap."""
    cycles, given_up = "not in the compiler's log", "no"
    if s["cycles"] is not None:
        cycles = f"{s['cycles_without_asynchronous_calls']:.5g}"
        if s["cycles"] != s["cycles_without_asynchronous_calls"]:
            cycles += f" ({s['cycles']:.5g} with waits for SparseCore calls, whose prices are placeholders)"
        cycles += ". Ranks variants on one chip, no more: kernels and SparseCore work count 0"
    if s["over_memory_limit"]:
        given_up = f"**yes**: wanted {s['wanted_gib']} GiB, its limit is {s['scheduler_limit_gib']} GiB"
    return [("overlap given up for memory", given_up), ("scheduler's cycles", cycles)]


def collectives_table(rows: list[Compiled]) -> str:
    heads = ("loop", "runs", "kind", "in its body", "MB sent a run", "asynchronous", "behind computation")
    lines = [(one.place, "?" if one.times is None else one.times, one.kind, one.count, f"{one.bytes / 1e6:,.1f}",
              one.asynchronous, f"{one.overlapped} of {one.asynchronous}" if one.asynchronous else "-") for one in rows]  # fmt: skip
    return markdown(lines, heads)


def plan_report(p: dict) -> str:
    """The plan as two Markdown tables."""
    m, k, full = p["memory"], p["cost"], p["full"]
    flops = {name: f"{n / 1e15:.5g}" for name, n in k["flops_a_step"].items()}
    rows = [
        ("devices", f"{p['devices']} x {p['device_kind']} on {p['chips']} chips, {p['topology']}"),
        ("mesh", product(tuple(p["mesh"].items()))),
        ("sequences a device", f"{p['sequences_a_device']}, {p['microbatch']} at once"),
        ("tokens a step", f"{p['tokens_a_step']:,}"),
        ("HBM of a device", f"{m['arguments_gib']} GiB of arguments + {m['temporaries_gib']} GiB of temporaries"),
        ("fits", f"{'yes' if m['fits'] else '**no**'}: {m['total_gib']} of {m['limit_gib']} GiB"),
        *(schedule_rows(p["scheduler"]) if p["scheduler"] else ()),
        ("PFLOP a step", f"{flops['full causal']} full causal, {flops['window-correct']} window-correct, "
                         f"{flops['OLMo-core']} as OLMo-core counts"),
        (f"at {k['mfu']:.1%} MFU, full causal", f"{k['mfu_window_correct']:.1%} window-correct, "
                 f"{k['flops_a_device_second'] / 1e12:.1f} TFLOP/s a device, {k['seconds_a_step']:.3g} s a step"),
        ("the whole run", f"{k['steps']:,} steps, {k['tokens'] / 1e12:.2f} T tokens, {k['days']:.1f} days, "
                          f"{k['chip_hours']:,.0f} chip-hours"),
        ("this took", f"{p['seconds']} s"),
    ]  # fmt: skip
    if full:
        counted = f"; {full['hbm_gib']} GiB of HBM, {full['vmem_mib']} MiB of VMEM" if "hbm_gib" in full else ""
        rows.append(("compiled to the end", f"{full['compile_seconds']} s{counted}"))
    if p["advice"]:
        rows.append(("memory", p["advice"]))
    found = [Compiled(**row) for row in p["collectives"]]
    return markdown(rows, (p["name"], "planned, never run")) + "\n" + collectives_table(found)


def run_plan(args) -> int:
    started = time.monotonic()
    pin_settings()
    jax.config.update("jax_platforms", "cpu")
    config = load_config(args.config, args.hardware, args.set)
    if args.child:
        compile_in_child(config, args.topology)
        return 0
    kind, chips = parse_topology(args.topology)
    mesh_sizes(config, math.prod(chips) * CHIPS[kind].devices)
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise ValueError(f"--mfu: got {args.mfu}, expected a fraction between 0 and 1, as 0.445")
    if args.mfu is None and CHIPS[kind].mfu is None:
        raise ValueError(
            f"--mfu: missing, expected the fraction of its peak at which a {kind} works; it was not measured"
        )
    compilers = ("libtpu",) if kind in TPUS else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(map(importlib.util.find_spec, compilers)):
        fix = f"pip install -r requirements-{'tpu' if kind in TPUS else 'gpu'}.txt"
        raise ValueError(f"{compilers[0]}, the compiler: not installed; fix: {fix}")
    with contextlib.ExitStack() as stack:
        if args.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plan_"))).resolve()
        else:
            folder = local_path(args.keep).resolve()
            stack.enter_context(sole_writer(folder))
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise ValueError(f"--keep: {args.keep} is there and not an empty folder; fix: name a new one")
        inputs_are_checked()
        folder.mkdir(parents=True, exist_ok=True)
        with compiling(args, folder) as process:
            wait_for_plan(process, folder, args.topology, args.full)
            code = process.poll()
        if code:  # of a step that is too large the dump says how much too large
            reason = why_it_failed((folder / "log").read_text(errors="replace"))
            if code == 2:  # what only the compiler can check
                print(f"{REASON}{reason}", file=sys.stderr)
                return 2
            if "RESOURCE_EXHAUSTED" not in reason or not dumped(folder, MEMORY):
                raise RunFailed(reason)
        plan = make_plan(config, args, folder, started)
    print(json.dumps(plan, indent=1) if args.json else plan_report(plan), end="\n" if args.json else "")
    return 0 if plan["memory"]["fits"] else 1


# ----------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, run, about: str, example: str) -> argparse.ArgumentParser:
        p = add_verb(verbs, name, about, f"python tools/plan.py {name} --config stage1.yaml --hardware v5p {example}")
        p.set_defaults(run=run)
        p.add_argument("--config", required=True, help="a file, or a name in configs/")
        p.add_argument("--hardware", required=True, help="a file, or a name in configs/hardware/")
        p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
        p.add_argument("--json", action="store_true", help="JSON instead of tables")
        return p

    p = verb(
        "collectives", run_collectives, "What the devices send to each other in one training step.", "--devices 512"
    )
    p.add_argument("--devices", required=True, type=int, help="how many; the mesh of the hardware file is filled up")
    p = verb("compile", run_plan, "Compile the step for TPUs or GPUs: memory, schedule, overlap, cost.",
             "--topology v5p:4x4x8")  # fmt: skip
    p.add_argument(
        "--topology", required=True, metavar="KIND:XxYxZ", help="v5p:4x4x8 or tpu7x:4x4x4, in chips; h100:64"
    )
    p.add_argument("--mfu", type=float, help="for the cost; default: the case study's on that TPU")
    p.add_argument("--full", action="store_true", help="compile to the end, kernels included (can take an hour)")
    p.add_argument("--keep", metavar="DIR", help="leave the compiler's dump and log there")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # the process that compiles
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return run_command("plan.py", lambda: args.run(args))


if __name__ == "__main__":
    for order in (signal.SIGTERM, signal.SIGHUP):  # not without cleaning up
        if signal.getsignal(order) != signal.SIG_IGN:  # nohup
            signal.signal(order, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
