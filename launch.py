"""Launch: what a run will ask of a machine, worked out before one is taken; then start it there and keep it going.

    python launch.py collectives --config stage1.yaml --hardware v5p --devices 512
    python launch.py plan --config stage1.yaml --hardware v5p --topology v5p:4x4x8
    python launch.py resume-until-done --config quickstart.yaml

`collectives` traces the training step of train.py for a mesh of so many devices, abstract ones: nothing is compiled
or computed and no accelerator is touched. It lists what the devices send to each other in one step and where in the
source that is asked for. A compiler may merge or overlap collectives, and it may fuse them with computation.

`plan` compiles the same step for a TPU topology with the compiler of requirements-tpu.txt, on any machine, and reads
what it planned: memory, schedule, the collectives that are left and what they hide behind; then what the run costs.

`submit` starts train.py once, `monitor` watches it, `resume-until-done` starts it again until its last step is saved:
here (--backend local) or on a cluster through the command lines of xpk and kubectl (--backend xpk). They need no jax:
what they know of a run is its exit code, its log and what is on its disk. A launcher has no state of its own; start it
again after anything.

Exit codes: 0 done; 1 failed, or the step does not fit; 2 wrong usage or config; 143 after SIGTERM, 130 after Ctrl-C,
129 when the terminal is closed.
Read first: model.py and the step of train.py, which write every collective out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import data
from config import Config, batch_specs, load_config, make_execution, mesh_sizes
from metrics import PEAK_FLOPS, flops_per_token
from processes import (
    HERE,
    Busy,
    RunFailed,
    find_config,
    first_line,
    inputs_are_checked,
    parse_override,
    read_yaml,
    run_command,
    run_name_fault,
    set_key,
    sole_writer,
)

EXIT_USAGE, EXIT_PREEMPTED, EXIT_INTERRUPTED = 2, 143, 130  # train.py's


def import_trainer() -> None:
    """What `plan` and `collectives` work with; the other verbs start at once, and where there is no jax."""
    global Jaxpr, JaxprEqn, dce_jaxpr, jax, jaxprs_in_params, jnp, mesh_utils, model, topologies, train
    import jax
    import jax.numpy as jnp
    from jax.experimental import mesh_utils, topologies
    from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
    from jax.interpreters.partial_eval import dce_jaxpr

    import model
    import train


KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",  # psum under check_vma
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "permute",
}
SENDS_NOTHING = ("axis_index", "pvary")  # primitives that name mesh axes and are computed in place
HELPERS = ("vary", "gather_weight")  # functions whose caller says more about where a collective stands


class Collective(NamedTuple):
    """What a device sends at one place of the step."""

    where: str  # the function that asks for it, and its caller
    phase: str  # forward | recomputed (for the backward pass) | backward | step: outside the derivative
    kind: str  # all-gather | reduce-scatter | all-reduce | permute
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
    of its input; an all-reduce is a reduce-scatter and an all-gather. A permute sends its operand.
    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    shards = {"all-gather": (n - 1) * n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1), "permute": n}[kind]
    return -(-operand * shards // n)


# ------------------------------------------------------------------------------------------------ the traced step


def trace_step(c: Config, mesh):
    """The training step on a mesh that may be abstract, traced from shapes alone."""
    params, opt_state = train.state_shapes(c, mesh)
    B, S = c.data.global_batch, c.data.sequence_length
    batch = {name: spec and jax.ShapeDtypeStruct((B, S), jnp.int32) for name, spec in batch_specs(c).items()}
    batch |= {"loss_mask": jax.ShapeDtypeStruct((B, S), jnp.bool_), "filtered": jax.ShapeDtypeStruct((B,), jnp.bool_)}
    return train.compile_train_step(c, mesh).trace(params, opt_state, batch, jax.ShapeDtypeStruct((), jnp.int32))


def abstract_mesh(c: Config, devices: int) -> jax.sharding.AbstractMesh:
    if devices < 1:
        raise ValueError(f"--devices: got {devices}, expected a positive number")
    sizes = mesh_sizes(c, devices)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def equations(jaxpr: Jaxpr, times: int = 1, path: tuple[JaxprEqn, ...] = ()) -> Iterator[tuple]:
    """(equation, how often it runs, itself and the equations around it, from the inside) of all levels, in order."""
    for eqn in jaxpr.eqns:
        yield eqn, times, (eqn, *path)
        often = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, often, (eqn, *path))


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that an equation names; of a plain sum the axes are numbers."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, str))


def where(path: tuple[JaxprEqn, ...]) -> str:
    """`function in caller` of model.py or train.py. A gradient stands where its forward computation does."""
    names = []
    for eqn in path:
        for frame in eqn.source_info.traceback.frames:
            name = frame.function_name.split(".")[0]  # of layer.<locals>.<dictcomp>: layer
            if frame.file_name in (model.__file__, train.__file__) and not name.startswith("_"):
                if name not in (*HELPERS, *names[-1:]):
                    names.append(name)
    return " in ".join(names[:2])


def phase(path: tuple[JaxprEqn, ...]) -> str:
    """Which pass: JAX writes its transformations into the names of equations."""
    names = "/".join(str(eqn.source_info.name_stack) for eqn in path)
    marks = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    return next((said for mark, said in marks.items() if mark in names), "step")


def collectives(c: Config, devices: int) -> list[Collective]:
    """Every collective of one training step on `devices` devices, in the order of the step, equal ones added up.

    What is traced but never used, such as a recomputation that no gradient needs, is left out, as the compiler does;
    so is a collective over a single device. Loops count as often as they run, micro-batches included. RunFailed if
    one stands where it cannot be counted. Bytes: `bytes_sent`; over several axes n is the product of their sizes.
    """
    mesh = abstract_mesh(c, devices)
    inputs_are_checked()
    jaxpr = trace_step(c, mesh).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = Counter()
    for eqn, times, path in equations(jaxpr):
        axes = tuple((axis, mesh.shape[axis]) for axis in named_axes(eqn) if mesh.shape[axis] > 1)
        name = eqn.primitive.name
        if not axes or name in SENDS_NOTHING:
            continue
        if name not in KINDS or eqn.params.get("axis_index_groups") is not None:
            raise RunFailed(f"{where(path)}: {name} over {dict(axes)}: a collective that launch.py cannot count")
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


def table(heads: tuple[str, ...], keys: list[tuple], found: list[Collective]) -> str:
    """Markdown: a row for each distinct key, with the collectives and the MB that a device sends, both a step."""
    count, sent = Counter(), Counter()
    for key, one in zip(keys, found, strict=True):
        count[key] += one.times
        sent[key] += one.sent_a_step
    lines = [heads + ("a step", "MB a step"), ("---",) * len(heads) + ("--:", "--:")]
    lines += [key + (f"{count[key]:,}", f"{mb:,.1f}" if (mb := sent[key] / 1e6) >= 0.1 else "< 0.1") for key in count]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(c: Config, devices: int, found: list[Collective]) -> str:
    """Where the collectives stand, and what goes over which axes of the mesh."""
    keys = [(one.where, one.phase, one.kind, product(one.axes), one.dtype) for one in found]
    mesh = product(tuple(mesh_sizes(c, devices).items()))
    total = sum(one.sent_a_step for one in found)
    return (
        f"{c.run.name}, one step of {c.data.global_batch} x {c.data.sequence_length} tokens on {devices} devices "
        f"({mesh}): a device sends {total / 1e9:,.1f} GB.\n\n"
        + table(("where", "pass", "kind", "over", "dtype"), keys, found)
        + "\n"
        + table(("over", "kind"), [(product(one.axes), one.kind) for one in found], found)
    )


def run_collectives(args) -> None:
    jax.config.update("jax_platforms", "cpu")  # tracing needs no accelerator, and one may be another process's
    c = load_config(args.config, args.hardware, args.set)
    found = collectives(c, args.devices)
    rows = [one._asdict() | {"axes": dict(one.axes), "sent_a_step": one.sent_a_step} for one in found]
    print(json.dumps(rows, indent=1) if args.json else report(c, args.devices, found), end="\n" if args.json else "")


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

ENVIRONMENT = {  # of the process that compiles
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache has no schedule to read
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
    "after_optimizations_before_buffer_assignment.txt": "optimising and scheduling",
    "after_optimizations.txt": "assigning buffers",
    "after_optimizations-buffer-assignment.txt": "assigning buffers",
    "after_optimizations-memory-usage-report.txt": "assigning buffers",
}
HLO, ASSIGNMENT, MEMORY = list(STAGES)[2:]
REASON = "launch.py: error: "


def parse_topology(text: str) -> tuple[str, tuple[int, ...]]:
    """v5p:4x4x8 -> ("v5p", (4, 4, 8)): chips along each axis."""
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
    if not found or found[1] not in TPUS or "0" in found.groups():
        raise ValueError(f"--topology: got {text!r}, expected KIND:XxYxZ in chips, KIND one of {', '.join(TPUS)}; "
                         "example: v5p:4x4x8")  # fmt: skip
    return found[1], tuple(int(n) for n in found.groups()[1:])


def topology_mesh(c: Config, topology: str) -> jax.sharding.Mesh:
    """The mesh over devices that only the compiler knows. ValueError if it knows no such topology."""
    kind, chips = parse_topology(topology)
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{TPUS[kind].name}:{topology.partition(':')[2]}",
            chip_config_name=TPUS[kind].chip_config, chips_per_host_bounds=(2, 2, 1), num_slices=1,
            wrap=tuple(n % 4 == 0 for n in chips),
        ).devices  # fmt: skip
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        raise ValueError(f"--topology: got {topology}, which the compiler refuses: {first_line(e)}") from e
    sizes = mesh_sizes(c, len(devices))
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices=devices, allow_split_physical_axes=True)
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=auto)


def compile_in_child(c: Config, topology: str) -> None:
    """Compile the step and print a line of JSON before and after. The parent reads dump and log, and may end this."""

    def end_with_parent():
        os.read(0, 1)  # returns when the parent has ended: it holds the other end and writes nothing
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    mesh = topology_mesh(c, topology)
    inputs_are_checked()
    print(json.dumps({"device_kind": mesh.devices.flat[0].device_kind}), flush=True)
    try:
        lowered, started = trace_step(c, mesh).lower(), time.monotonic()
        memory = lowered.compile().memory_analysis()
    except Exception as e:  # whatever compiler, kernel or JAX refuse: the parent shows the line, --keep the rest
        traceback.print_exc()
        raise RunFailed(f"{type(e).__name__}: {first_line(e)}") from e
    sizes = {f"{what}_bytes": getattr(memory, f"{what}_size_in_bytes") for what in ("argument", "output", "temp")}
    print(json.dumps({"full": {"compile_seconds": round(time.monotonic() - started, 1), **sizes}}), flush=True)


def dumped(folder: Path, ending: str) -> Path | None:
    return next(folder.glob(f"*.jit_train_step.*.{ending}"), None)


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
    command = [sys.executable, __file__, "plan", "--child", "--config", args.config, "--hardware", args.hardware]
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
    if op.kind == "all-gather-start":  # operands, outputs
        shapes = shapes[len(shapes) // 2 :]
    elif op.kind == "collective-permute-start":  # operand, output, semaphores
        shapes = shapes[1:2]
    out = sum(math.prod(map(int, filter(None, dims.split(",")))) * (int(bits or 8) // 8) for _, bits, dims in shapes)
    if kind == "all-to-all":
        return out * (n - 1) // n
    return bytes_sent(kind, {"all-gather": out // n, "reduce-scatter": out * n}.get(kind, out), n)


def computes(op: Op) -> bool:
    """Work that can hide a collective: a matmul or the attention kernel."""
    return "splash" in op.name or op.kind == "fusion" and "kOutput" in op.text and "dot_general" in op.text


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
        name = re.search(r'op_name="([^"]*)"|$', op.text)[1] or ""
        marks = {"transpose(": "backward", "(loss)": "loss", "jvp(": "forward"}
        place = next((said for mark, said in marks.items() if mark in name), "micro-batches")
        condition, below = (re.search(rf"{key}=%?([\w.-]+)", op.text)[1] for key in ("condition", "body"))
        bounds = [int(n) for one in computations[condition] for n in re.findall(r" constant\((\d+)\)", one.text)]
        loops[below] = Loop(place, times * bounds[0] if times and len(bounds) == 1 else None)
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


def cost(c: Config, kind: str, chips: int, mfu: float) -> dict:
    """Of the whole run on so many chips; `mfu` counts full-causal FLOPs, as the case study does."""
    tokens, tpu = c.data.global_batch * c.data.sequence_length, TPUS[kind]
    each = {name: flops_per_token(c, name) for name in ("full causal", "window-correct", "OLMo-core")}
    flops = {name: n * tokens for name, n in each.items()}
    seconds = flops["full causal"] / (chips * tpu.devices * PEAK_FLOPS[tpu.kind] * mfu)
    hours = seconds * c.run.steps * chips / 3600
    return {
        "flops_a_step": flops,
        "mfu": mfu,
        "mfu_window_correct": mfu * flops["window-correct"] / flops["full causal"],
        "flops_a_device_second": flops["full causal"] / (chips * tpu.devices) / seconds,
        "seconds_a_step": seconds,
        "steps": c.run.steps,
        "tokens": c.run.steps * tokens,
        "chip_hours": hours,
        "days": hours / chips / 24,
    }


def advice(c: Config, size: int, plan: dict) -> str | None:
    """What to change in the hardware file when memory is short."""
    if plan["memory"]["fits"] and not plan["scheduler"]["over_memory_limit"]:
        return None
    names = make_execution(c, size, "tpu").remat
    saved = "everything" if names is None else f"{len(names)} names: {' '.join(names)}"
    helps = [f"save less in remat (now {saved})"] if names != () else []
    helps += [f"microbatch {size // 2} instead of {size}"] if size > 1 else []
    helps += ["a larger fsdp, context or tensor axis, on more devices"]
    lost = "the step does not fit" if not plan["memory"]["fits"] else "the scheduler gave up overlap for memory"
    return f"{lost}; what helps: {'; '.join(helps)}"


def make_plan(c: Config, args, folder: Path, started: float) -> dict:
    """The plan as JSON has it, from the child's output in `folder`."""
    kind, shape = parse_topology(args.topology)
    chips = math.prod(shape)
    devices = chips * TPUS[kind].devices
    sizes = mesh_sizes(c, devices)
    rows = c.data.global_batch // (sizes["data"] * sizes["fsdp"])
    size = train.microbatch(c, rows)
    log = (folder / "log").read_text(errors="replace")
    said = {}
    for line in (folder / "stdout").read_text().splitlines():
        said |= json.loads(line) if line.startswith("{") else {}
    report, assignment, hlo = (dumped(folder, end).read_text() for end in (MEMORY, ASSIGNMENT, HLO))
    computations = parse_hlo(hlo)
    loops = find_loops(computations)
    plan = {
        "name": c.run.name,
        "topology": args.topology,
        "device_kind": said["device_kind"],
        "chips": chips,
        "devices": devices,
        "mesh": sizes,
        "sequences_a_device": rows,
        "microbatch": size,
        "tokens_a_step": c.data.global_batch * c.data.sequence_length,
        "memory": parse_memory(report, assignment, log, TPUS[kind].hbm),
        "scheduler": parse_schedule(log, loops),
        "collectives": [row._asdict() for row in compiled_collectives(computations, loops, devices)],
        "cost": cost(c, kind, chips, TPUS[kind].mfu if args.mfu is None else args.mfu),
        "full": said.get("full"),
    }
    return plan | {"advice": advice(c, size, plan), "seconds": round(time.monotonic() - started, 1)}


def markdown(rows: list[tuple], heads: tuple[str, ...]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def schedule_text(s: dict) -> tuple[str, str]:
    """What the scheduler's cycles are, and whether memory cost overlap."""
    cycles, given_up = "not in the compiler's log", "no"
    if s["cycles"] is not None:
        cycles = f"{s['cycles_without_asynchronous_calls']:.5g}"
        if s["cycles"] != s["cycles_without_asynchronous_calls"]:
            cycles += f" ({s['cycles']:.5g} with waits for SparseCore calls, whose prices are placeholders)"
        cycles += ". Ranks variants on one chip, no more: kernels and SparseCore work count 0"
    if s["over_memory_limit"]:
        given_up = f"**yes**: wanted {s['wanted_gib']} GiB, its limit is {s['scheduler_limit_gib']} GiB"
    return cycles, given_up


def collectives_table(rows: list[Compiled]) -> str:
    heads = ("loop", "runs", "kind", "in its body", "MB sent a run", "asynchronous", "behind computation")
    lines = [(one.place, "?" if one.times is None else one.times, one.kind, one.count, f"{one.bytes / 1e6:,.1f}",
              one.asynchronous, f"{one.overlapped} of {one.asynchronous}" if one.asynchronous else "-") for one in rows]  # fmt: skip
    return markdown(lines, heads)


def plan_report(p: dict) -> str:
    """The plan as two Markdown tables."""
    m, k, full = p["memory"], p["cost"], p["full"]
    flops = {name: f"{n / 1e15:.5g}" for name, n in k["flops_a_step"].items()}
    cycles, given_up = schedule_text(p["scheduler"])
    rows = [
        ("devices", f"{p['devices']} x {p['device_kind']} on {p['chips']} chips, {p['topology']}"),
        ("mesh", product(tuple(p["mesh"].items()))),
        ("sequences a device", f"{p['sequences_a_device']}, {p['microbatch']} at once"),
        ("tokens a step", f"{p['tokens_a_step']:,}"),
        ("HBM of a device", f"{m['arguments_gib']} GiB of arguments + {m['temporaries_gib']} GiB of temporaries"),
        ("fits", f"{'yes' if m['fits'] else '**no**'}: {m['total_gib']} of {m['limit_gib']} GiB"),
        ("overlap given up for memory", given_up),
        ("scheduler's cycles", cycles),
        ("PFLOP a step", f"{flops['full causal']} full causal, {flops['window-correct']} window-correct, "
                         f"{flops['OLMo-core']} as OLMo-core counts"),
        (f"at {k['mfu']:.1%} MFU, full causal", f"{k['mfu_window_correct']:.1%} window-correct, "
                 f"{k['flops_a_device_second'] / 1e12:.1f} TFLOP/s a device, {k['seconds_a_step']:.3g} s a step"),
        ("the whole run", f"{k['steps']:,} steps, {k['tokens'] / 1e12:.2f} T tokens, {k['days']:.1f} days, "
                          f"{k['chip_hours']:,.0f} chip-hours"),
        ("this took", f"{p['seconds']} s"),
    ]  # fmt: skip
    if full:
        sizes = ", ".join(f"{what} {full[f'{what}_bytes'] / 2**30:.2f}" for what in ("argument", "output", "temp"))
        rows.append(("compiled to the end", f"{full['compile_seconds']} s; GiB: {sizes}"))
    if p["advice"]:
        rows.append(("memory", p["advice"]))
    found = [Compiled(**row) for row in p["collectives"]]
    return markdown(rows, (p["name"], "planned, never run")) + "\n" + collectives_table(found)


def run_plan(args) -> int:
    started = time.monotonic()
    jax.config.update("jax_platforms", "cpu")
    c = load_config(args.config, args.hardware, args.set)
    if args.child:
        compile_in_child(c, args.topology)
        return 0
    kind, chips = parse_topology(args.topology)
    mesh_sizes(c, math.prod(chips) * TPUS[kind].devices)
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise ValueError(f"--mfu: got {args.mfu}, expected a fraction between 0 and 1, as 0.445")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("libtpu, the compiler: not installed; fix: pip install -r requirements-tpu.txt")
    with contextlib.ExitStack() as stack:
        if args.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plan_"))).resolve()
        else:
            folder = data.local_path(args.keep).resolve()
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
            if code == EXIT_USAGE:  # what only the compiler can check
                print(f"{REASON}{reason}", file=sys.stderr)
                return EXIT_USAGE
            if "RESOURCE_EXHAUSTED" not in reason or not dumped(folder, MEMORY):
                raise RunFailed(reason)
        plan = make_plan(c, args, folder, started)
    print(json.dumps(plan, indent=1) if args.json else plan_report(plan), end="\n" if args.json else "")
    return 0 if plan["memory"]["fits"] else 1


# ----------------------------------------------------------------------------------------- launching: child processes


class UsageError(ValueError):
    """Wrong flags or files; printed as one line, exit code 2."""


class LaunchFailed(RuntimeError):
    """The launcher gives up; printed as one line, exit code 1."""


class StartFailed(LaunchFailed):
    """An attempt could not be started; the next one may."""


class Unanswered(Exception):
    """kubectl, gcloud or a file system failed: nothing is known about the run, least of all that it has ended."""


SECRETS: set[str] = set()  # values that no line of ours may show
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.I)


def say(text: str) -> None:
    for secret in SECRETS:
        text = text.replace(secret, "***")
    print(text, file=sys.stderr, flush=True)


def child(command: list[str], **how) -> subprocess.Popen:
    """Start a command, without a shell. On Linux the kernel kills it when this process ends, also by kill -9.

    At once rather than with time to save: a trainer that lives on would write beside the next one, and loses nothing
    but steps that are computed again. Orders to stop in order go to this process (`end`).
    """
    parent, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def end_with_parent():
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it had ended before that
            os._exit(1)

    # A session of its own: Ctrl-C reaches this process alone, which says SIGTERM.
    how |= {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": prctl and end_with_parent}
    try:
        return subprocess.Popen(command, **how)
    except FileNotFoundError as e:
        raise UsageError(f"{command[0]}: not found; fix: install it, or put it on PATH") from e


def ask(command: list[str], seconds: float = 120) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command; 124 if it does not end in time."""
    process = child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {seconds} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1][:500]


def answer(command: list[str]) -> str:
    code, out, err = ask(command)
    if code:
        raise Unanswered(f"{command[0]} ends with {code}: {last_line(err)}")
    return out


def insist(question, args):
    """The answer to `question`, asked again while services or the network fail, for at most --stall seconds."""
    began = time.monotonic()
    while True:
        try:
            return question()
        except Unanswered as e:
            if time.monotonic() - began > args.stall:
                raise LaunchFailed(f"{e}; so for {args.stall:g} s; nothing was stopped; fix: its cause, then give the "
                                   "same command again") from e  # fmt: skip
            say(f"{e}; asking again")
        time.sleep(args.poll)


# --------------------------------------------------------------------------------------------- launching: the run


def trainer_flags(args) -> list[str]:
    """train.py's flags. All that we take are passed on: one that is not would silently be without effect.

    --alive-every: several of the trainer's signs of life fall into --stall."""
    flags = ("config", "run_dir", "hardware", "data_root", "init_from", "init_state", "local_dir")
    given = [(flag, getattr(args, flag)) for flag in flags]
    given += [(flag, value) for flag in ("set", "allow") for value in getattr(args, flag)]
    given.append(("alive_every", f"{min(60, args.stall / 4):g}"))
    return [f"--{flag.replace('_', '-')}={value}" for flag, value in given if value is not None]


def name_and_steps(config: str, overrides: list[str]) -> tuple[str, int]:
    """run.name and run.steps as train.py reads them, of a config or of RUN/config.yaml. All else is for train.py to
    check."""
    path = find_config(config, HERE / "configs")
    raw = read_yaml(path)
    for dotted, value in map(parse_override, overrides):
        if dotted.partition(".")[0] == "run":
            set_key(raw, dotted, value)
    run = raw.get("run")
    if not isinstance(run, dict) or not {"name", "steps"} <= run.keys():
        raise UsageError(f"{path}: run: got {run!r}, expected a section with name and steps")
    if fault := run_name_fault(run["name"]):
        raise UsageError(f"{path}: {fault}")
    if type(run["steps"]) is not int or run["steps"] < 1:
        raise UsageError(f"{path}: run.steps: got {run['steps']!r}, expected a positive whole number")
    return run["name"], run["steps"]


def environment(path: str | None) -> dict[str, str]:
    """Variables of an --env-file as xpk reads it: NAME=value, or NAME alone to take the value from this environment."""
    values = {}
    if path and not Path(path).is_file():
        raise UsageError(f"--env-file: {path} is not a file")
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines() if path else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parsed = re.fullmatch(r"([A-Za-z_]\w*)(?:=(.*))?", line, re.A)
        if not parsed:  # xpk would leave it out without a word
            raise UsageError(f"{path}, line {i}: expected NAME=value or NAME, from the first column on")
        name, value = parsed[1], os.environ.get(parsed[1]) if parsed[2] is None else parsed[2]
        if value is None:
            raise UsageError(f"{path}, line {i}: {name} is not set in this environment")
        if re.search(r'["\\\x00-\x1f\x7f]', value):  # xpk writes it into YAML between double quotes, as it is
            raise UsageError(f"{path}, line {i}: {name}: its value holds a double quote, a backslash or a control sign")
        if len(value) >= 6 and (parsed[2] is None or SECRET_NAME.search(name)):  # a shorter one is in every other line
            SECRETS.add(value)
        values[name] = value
    return values


def steps_on_disk(folder: Path) -> list[str]:
    """Names of what is complete there. glob would take a mount that fails for an empty folder."""
    try:
        return [name for name in os.listdir(folder) if (folder / name / "meta" / "metadata").is_file()]
    except FileNotFoundError:
        return []  # nothing is saved yet
    except OSError as e:
        raise Unanswered(f"{folder}: {e.strerror}") from e


def list_steps(url: str) -> list[str]:
    return ["gcloud", "storage", "ls", f"{url.rstrip('/')}/checkpoints/*/meta/metadata"]


def completed(run_dir: str) -> int:
    """The newest step that is complete in RUN/checkpoints, as train.py names it: N updates are done. 0: none yet."""
    if run_dir.startswith("gs://"):
        code, out, err = ask(list_steps(run_dir))
        if code and "matched no objects" not in err:
            raise Unanswered(f"gcloud ends with {code}: {last_line(err)}")
        names = [path.split("/")[-3] for path in out.split()]
    else:
        names = steps_on_disk(Path(run_dir) / "checkpoints")
    return max((int(name) for name in names if name.isdecimal()), default=0)


class State(NamedTuple):
    doing: str  # gone | waiting (for machines) | running | idle (should run, but nothing of it does) | ended
    why: str = ""
    code: int | None = None  # of an attempt that has ended


class Sign(NamedTuple):
    """A sign of life, if it differs from the one before: train.py prints a line at least every --alive-every seconds
    as long as anything advances, also while it compiles, evaluates, restores or saves."""

    checkpoint: int  # the newest complete step
    news: object  # of its log; None: it cannot be read at the moment
    step: str = "?"  # the newest one in its log


def joint_code(codes: list[int]) -> int:
    """One exit code for the processes of an attempt: 2 if one of them says so, since the others only follow it."""
    codes = [128 - code if code < 0 else code for code in codes]
    failed = [code for code in codes if code not in (0, EXIT_PREEMPTED)]
    return EXIT_USAGE if EXIT_USAGE in codes else failed[0] if failed else max(codes)


# ------------------------------------------------------------------------------------------ launching: backend local


class Local(NamedTuple):
    """An attempt on this machine."""

    processes: list[subprocess.Popen] | None  # None: those of another launcher
    log: TextIO  # of process 0


def local_commands(args) -> list[list[str]]:
    """One command a process; several meet at a free port."""
    command = [sys.executable, str(HERE / "train.py"), *trainer_flags(args)]
    if args.processes == 1:
        return [command]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        several = [f"--coordinator=127.0.0.1:{s.getsockname()[1]}", f"--num-processes={args.processes}"]
    return [[*command, *several, f"--process-id={i}"] for i in range(args.processes)]


def launcher_lock(args) -> Path:
    """What launchers lock with sole_writer. Not the run directory: that lock is their trainers', who keep apart by
    themselves those that outlive a killed launcher."""
    return Path(args.run_dir) / "launch"


@contextlib.contextmanager
def only_launcher(args) -> Iterator[None]:
    """No other launcher starts this run on this machine while this block runs."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sole_writer(launcher_lock(args), wait=1))  # a monitor takes it for a moment
        except Busy as e:
            holder = data.os_error(e).partition(";")[0]
            raise LaunchFailed(f"another launcher is at work here; fix: end it, or monitor it ({holder})") from e
        yield


def end(processes: list[subprocess.Popen], seconds: float, ask_them: bool = True) -> None:
    """SIGTERM to all, so that they save; kill -9 to what is left after `seconds`, or when a second signal comes."""
    try:
        deadline = time.monotonic() + seconds
        for process in processes if ask_them else ():
            process.terminate()
        for process in processes:
            process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        say(f"not ended after {seconds:g} s: killed")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def local_attempt(args, existing: str) -> Iterator[Local]:
    """Start the trainer's processes, or look at those of another launcher. They have ended when this block is left."""
    folder, env = Path(args.run_dir), os.environ | environment(args.env_file)
    logs = [folder / f"launch.{i}.log" for i in range(args.processes)]
    with contextlib.ExitStack() as stack:
        if existing == "look":
            if not logs[0].is_file():
                raise UsageError(f"{folder}: no launcher has been at work here")
            yield Local(None, stack.enter_context(open(logs[0])))
            return
        processes = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            logs[0].touch()
            shown = stack.enter_context(open(logs[0]))
            shown.seek(0, os.SEEK_END)
            stack.callback(local_follow, Local(processes, shown), args)
            stack.callback(end, processes, args.grace)  # the callback that is named last runs first
            for path, command in zip(logs, local_commands(args), strict=True):
                with open(path, "a") as log:
                    print(f"# {time.strftime('%F %T')} {shlex.join(command)}", file=log, flush=True)
                    streams = {"stdout": log, "stderr": subprocess.STDOUT}
                    processes.append(child(command, **streams, env=env))
        except OSError as e:  # a full disk, or no memory for another process
            raise StartFailed(f"{e.filename or folder}: {e.strerror}") from e
        yield Local(processes, shown)


def local_state(job: Local, args) -> State:
    if job.processes is None:
        if not os.access(args.run_dir, os.W_OK):
            raise LaunchFailed(f"{args.run_dir}: may not be written, so that whether a launcher is at work here cannot be "
                               "told; fix: monitor it as the user who launched it")  # fmt: skip
        try:
            with sole_writer(launcher_lock(args)):
                return State("gone", "no launcher is at work")
        except Busy:
            return State("running")
    codes = [process.poll() for process in job.processes]
    if any(codes) and None in codes:  # the others notice by a collective that fails, or by its heartbeat
        end(job.processes, LEAVE, ask_them=False)
        codes = [process.poll() for process in job.processes]
    if None in codes:
        return State("running")
    code = joint_code(codes)
    return State("ended", f"exit code {code}", code)


LEAVE = 60  # seconds; HEARTBEAT and some more


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise Unanswered(f"{path}: {e.strerror}") from e


def local_sign(args) -> Sign:
    """Process 0's log has its lines, metrics.jsonl its steps."""
    return Sign(
        completed(args.watch), [size_of(Path(args.run_dir) / name) for name in ("launch.0.log", "metrics.jsonl")]
    )


def local_follow(job: Local, args) -> None:
    if text := job.log.read():
        say(text.removesuffix("\n"))


# -------------------------------------------------------------------------------------------- launching: backend xpk


def xpk_create(args) -> list[str]:
    """The workload. `exec`, because xpk sends SIGTERM to the shell that this runs in; not every bash hands it on."""
    trainer = shlex.join(["python3", "train.py", "--distributed", *trainer_flags(args)])
    flags = {
        "cluster": args.cluster, "project": args.project, "zone": args.zone, "workload": args.workload,
        "device-type": args.device_type, "num-slices": args.slices, "priority": args.priority,
        "docker-image": args.docker_image, "termination-grace-period-seconds": f"{args.grace:.0f}",
        "env-file": args.env_file,
    }  # fmt: skip
    given = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    return ["xpk", "workload", "create", *given, *args.xpk, f"--command=exec {trainer}"]


def kubectl(args, *words: str) -> list[str]:
    """The context is named every time: somebody may change the current one within weeks."""
    return ["kubectl", f"--context={args.context}", "--namespace=default", *words]


def xpk_queries(args) -> dict[str, list[str]]:
    pods = f"--selector=xpk.google.com/workload={args.workload}"
    logs = ("logs", pods, "--container=jax-tpu", "--prefix", "--max-log-requests=1000")
    return {
        "jobset": kubectl(args, "get", "jobset", args.workload, "--ignore-not-found", "--output=json"),
        "pods": kubectl(args, "get", "pods", pods, "--output=json"),
        "tail": kubectl(args, *logs, "--timestamps", "--tail=40"),
        "follow": kubectl(args, *logs, "--tail=40", "--follow"),
        # in the foreground: it returns when the pods are gone, too, so that no old trainer is left beside a new one
        "delete": kubectl(args, "delete", "jobset", args.workload, "--ignore-not-found", "--cascade=foreground"),
    }


def xpk_state(job, args) -> State:
    """What the JobSet and its pods say. Raises Unanswered where kubectl does."""
    queries = xpk_queries(args)
    try:
        jobset = json.loads(answer(queries["jobset"]) or "null")
        pods = json.loads(answer(queries["pods"]))["items"] if jobset else []
    except (json.JSONDecodeError, KeyError) as e:
        raise Unanswered(f"kubectl: not the JSON that was expected: {e}") from e
    if jobset is None:
        return State("gone", "its JobSet is gone")
    containers = [c for pod in pods for c in pod["status"].get("containerStatuses", []) if c["name"] == "jax-tpu"]
    states = [c["state"] for c in containers]
    codes = [state["terminated"]["exitCode"] for state in states if "terminated" in state]
    terminal = jobset.get("status", {}).get("terminalState")
    if terminal == "Completed":
        return State("ended", "completed", 0)
    if terminal:
        code = joint_code([code for code in codes if code] or [1])
        return State("ended", f"{terminal.lower()}, exit code {code}" + ("" if codes else " (no pod tells)"), code)
    if jobset["spec"].get("suspend"):
        return State("waiting", "in Kueue's queue")
    refused = [state["waiting"]["reason"] for state in states if "waiting" in state]
    refused = [reason for reason in refused if reason not in ("ContainerCreating", "PodInitializing")]
    if refused:
        return State("ended", f"a pod cannot start: {refused[0]}", 1)
    phases = Counter(pod["status"]["phase"] for pod in pods)
    pending = f"{phases['Pending']} of {len(pods)} pods are pending" if phases["Pending"] else None
    if phases["Running"]:  # and do nothing until the last of them is there: that is no queue, it can be a stall
        return State("running", pending or f"{len(pods)} pods")
    return State("waiting", pending) if pending else State("idle", "no pod of it is active")


def xpk_sign(args) -> Sign:
    """The last line of process 0, behind the time that it was written at, so that no two are the same.

    There is none while a pod is not there yet, or when its machine is gone; that is no reason to ask until there is."""
    lines = ask(xpk_queries(args)["tail"])[1].splitlines()
    # Index 0 of job 0, which its name ends with: WORKLOAD-JOB-0-0-xxxxx. Another process prints only what goes wrong, and
    # may do so while all hang.
    lines = [line for line in lines if re.match(r"\[pod/\S+-0-0-\w+/", line)] or lines
    steps = re.findall(r"\bstep (\d+)", "\n".join(lines))
    return Sign(completed(args.watch), lines[-1] if lines else None, steps[-1] if steps else "?")


def xpk_follow(job, args) -> None:
    with child(xpk_queries(args)["follow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                say(line.removesuffix("\n"))
        finally:
            process.kill()


def xpk_delete(args) -> None:
    code, _, err = ask(xpk_queries(args)["delete"], seconds=args.grace + 600)
    if code:
        raise StartFailed(f"workload {args.workload} cannot be deleted: kubectl ends with {code}: {last_line(err)}")


@contextlib.contextmanager
def xpk_attempt(args, existing: str) -> Iterator[None]:
    """Submit the workload. One of that name may exist; `existing`: refuse | adopt | replace it, or only look.

    An exception leaves the workload as it is: a launcher that ends does not take a pod's work with it.
    """
    there = insist(lambda: xpk_state(None, args), args)
    adopted = existing == "look" or existing == "adopt" and there.doing not in ("gone", "ended")
    if adopted:
        say(f"workload {args.workload}: {there.doing} {there.why}: watching it")
    elif there.doing != "gone" and existing == "refuse":
        raise LaunchFailed(f"workload {args.workload} exists ({there.doing} {there.why}); fix: monitor it, "
                           "resume-until-done, or another --workload")  # fmt: skip
    else:
        if there.doing != "gone":
            xpk_delete(args)
        say(f"submitting workload {args.workload}")
        # Without --quiet and without standard input: xpk asks before it overwrites, and gets no answer.
        code, out, err = ask(xpk_create(args), seconds=1800)
        say(out + err)
        if code:
            kind = UsageError if code == EXIT_USAGE else StartFailed
            raise kind(f"xpk ends with {code}: {last_line(err or out)}")
    yield None
    if existing in ("adopt", "replace"):
        there = insist(lambda: xpk_state(None, args), args)
        if there.code != 0 and there.doing != "gone":
            say(f"last lines of workload {args.workload}:\n{ask(xpk_queries(args)['tail'])[1]}")
        if there.doing not in ("gone", "ended"):
            xpk_delete(args)  # it stalled, or lost its pods


# ---------------------------------------------------------------------------------------------- launching: the verbs


class Backend(NamedTuple):
    attempt: Callable  # (args, existing) -> context manager of a job
    state: Callable  # (job, args) -> State
    sign: Callable  # (args) -> Sign
    follow: Callable  # (job, args): shows the log


BACKENDS = {
    "local": Backend(local_attempt, local_state, local_sign, local_follow),
    "xpk": Backend(xpk_attempt, xpk_state, xpk_sign, xpk_follow),
}


def attend(job, args, follow: bool) -> tuple[int | None, str]:
    """Watch one attempt to its end: (exit code, why). The code is None if it was taken away from outside."""
    backend = BACKENDS[args.backend]
    last, sign, since, idle = None, None, time.monotonic(), 0
    while True:
        state = insist(lambda: backend.state(job, args), args)
        if state.why and state != last and state.doing not in ("gone", "ended"):
            say(f"{args.name}: {state.doing}, {state.why}")
        if follow and state.doing not in ("waiting", "idle"):
            backend.follow(job, args)
        last, idle = state, idle + 1 if state.doing == "idle" else 0
        if state.doing in ("gone", "ended") or idle == 2:  # once may be a JobSet that starts its pods again
            return state.code, state.why
        now = insist(lambda: backend.sign(args), args) if state.doing == "running" else None
        if now and sign and now.news is None:
            now = now._replace(news=sign.news, step=sign.step)
        if now is None or now != sign:  # a queue is no stall
            if now and not follow and (sign is None or (now.checkpoint, now.step) != (sign.checkpoint, sign.step)):
                say(f"{args.name}: step {now.step}, checkpoint {now.checkpoint} of {args.target}")
            sign, since = now, time.monotonic()
        elif time.monotonic() - since > args.stall:
            return 1, f"stalled: no sign of life for {args.stall:g} s"
        time.sleep(args.poll)


def run_submit(args) -> int:
    with BACKENDS[args.backend].attempt(args, "refuse") as job:
        if args.backend == "xpk":
            say(f"submitted; python launch.py monitor, with the same flags, shows workload {args.workload}")
            return 0
        code, why = attend(job, args, follow=True)
    say(f"{args.name}: {why}, step {insist(lambda: completed(args.watch), args)} of {args.target}")
    return 1 if code is None else code


def run_monitor(args) -> int:
    with BACKENDS[args.backend].attempt(args, "look") as job:
        code, why = attend(job, args, follow=True)
    step = insist(lambda: completed(args.watch), args)
    say(f"{args.name}: {why}, step {step} of {args.target}")
    return code or int(step < args.target)


def run_until_done(args) -> int:
    """Start, watch, and start again, until the last step is saved. 143 and what was taken away cost no retry."""
    began, attempts, failures, fruitless, existing = time.monotonic(), 0, 0, 0, "adopt"
    step = insist(lambda: completed(args.watch), args)
    while args.backend == "local" or step < args.target:  # here train.py says itself that it is done
        attempts, before = attempts + 1, step
        try:
            with BACKENDS[args.backend].attempt(args, existing) as job:
                code, why = attend(job, args, follow=args.backend == "local")
        except StartFailed as e:
            code, why = 1, str(e)
        step, existing = insist(lambda: completed(args.watch), args), "replace"
        if code == EXIT_USAGE:
            raise UsageError(f"attempt {attempts}: train.py refuses its config or data (exit code 2); see above")
        if code in (0, None) and step >= args.target:
            break
        if code == 0:
            raise LaunchFailed(f"train.py is done, and in {args.watch} stands step {step}, expected {args.target}; "
                               "fix: --target, or --watch")  # fmt: skip
        fruitless = 0 if step > before else fruitless + 1
        failures = 0 if step > before else failures + (code not in (None, EXIT_PREEMPTED))
        outcome = f"attempt {attempts}: {why}, step {step} of {args.target}"
        if failures > args.retries:
            raise LaunchFailed(f"{outcome}; gave up: {args.retries} retries in a row have brought no step")
        wait = min(args.backoff * 2 ** min(max(0, fruitless - 1), 60), args.max_backoff)
        budget = f" (retry {failures} of {args.retries} without a new step)" if failures else ""
        say(f"{outcome}; again in {wait:g} s{budget}")
        time.sleep(wait)
    seconds = round(time.monotonic() - began, 1)
    say(f"{args.name}: done, step {step} of {args.target}")
    print(json.dumps({"step": step, "target": args.target, "attempts": attempts, "seconds": seconds}))
    return 0


def print_commands(args) -> int:
    """--dry-run: what would be run, a line each, as a shell takes it."""
    commands = local_commands(args) if args.backend == "local" else [xpk_create(args), *xpk_queries(args).values()]
    commands += [list_steps(args.watch)] if args.watch.startswith("gs://") else []
    print("\n".join(map(shlex.join, commands)))
    return 0


NAMES = {  # what a flag may be. xpk puts these into commands of a shell, so that nothing else may pass
    "cluster": r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "project": r"([a-z][-a-z0-9.]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
    "zone": r"[a-z]+-[a-z]+[0-9]+-[a-z]",
    "workload": r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "device_type": r"[a-z0-9]+(-[a-z0-9]+)*",
    "docker_image": r"[a-z0-9][A-Za-z0-9._/:@-]*",
    "context": r"[A-Za-z0-9][A-Za-z0-9._:@/-]*",
    "xpk": r"--(storage|spot|on-demand|flex|reservation|max-restarts|scheduler|ramdisk-directory|mtc-enabled|"
           r"docker-image-pull-secret|ttl-seconds-after-finished|debug-dump-gcs|deploy-stacktrace-sidecar|"
           r"enable-debug-logs|skip-validation)(=[A-Za-z0-9._/:@,-]+)?",
}  # fmt: skip


YEAR = 365 * 86400
RANGES = {
    "target": (1, math.inf), "processes": (1, 256), "slices": (1, 1000), "retries": (0, math.inf), "poll": (0.01, YEAR),
    "stall": (0.1, YEAR), "backoff": (0, YEAR), "max_backoff": (0, YEAR), "grace": (0, YEAR),
}  # fmt: skip


def here(flag: str, path: str) -> str:
    """A path as this machine has it; UsageError of a URL."""
    try:
        return str(data.local_path(path))
    except data.DataError as e:
        raise UsageError(f"--{flag}: {e}") from e


def check_launch(args) -> None:
    """Complete the flags and refuse what is wrong with them."""
    for flag, value in vars(args).items():
        if value == "":  # as of a shell's variable that is not set
            raise UsageError(f"--{flag.replace('_', '-')}: got nothing, expected a value")
    args.name, steps = name_and_steps(args.config, args.set)
    args.target = steps if args.target is None else args.target
    xpk = args.backend == "xpk"
    if xpk and args.run_dir is None:
        raise UsageError("--run-dir: missing, expected the folder on shared storage as the pods see it")
    run_dir = here("run-dir", args.run_dir or f"runs/{args.name}")
    args.run_dir = args.run_dir if xpk else run_dir  # ~ is the pod's home there
    args.watch = run_dir if args.watch is None else args.watch
    args.watch = args.watch if args.watch.startswith("gs://") else here("watch", args.watch)
    args.env_file = args.env_file and here("env-file", args.env_file)  # xpk knows no ~
    first = {"poll": 60, "backoff": 300, "max_backoff": 3600} if xpk else {"poll": 0.5, "backoff": 1, "max_backoff": 60}
    for flag, default in first.items():
        setattr(args, flag, default if getattr(args, flag) is None else getattr(args, flag))
    for flag, (least, most) in RANGES.items():
        if not least <= getattr(args, flag) <= most:  # nan is in no range
            raise UsageError(f"--{flag.replace('_', '-')}: got {getattr(args, flag)}, expected {least} to {most}")
    values = environment(args.env_file)
    words = [*trainer_flags(args), *args.xpk]
    for name, value in values.items():
        if value in SECRETS and any(value in word for word in words):
            raise UsageError(f"the value of {name} stands in a flag; fix: read it from the environment")
    if not xpk:
        return
    args.workload = args.workload or re.sub("[^a-z0-9]+", "-", args.name.lower()).strip("-")
    if args.zone and args.project and args.context is None:  # as gcloud names it, of a regional cluster
        args.context = f"gke_{args.project}_{args.zone.rpartition('-')[0]}_{args.cluster}"
    for flag, pattern in NAMES.items():
        for value in args.xpk if flag == "xpk" else [getattr(args, flag)]:
            name = f"--{flag.replace('_', '-')}"
            if value is None:
                raise UsageError(f"{name}: missing, --backend xpk needs it")
            if not re.fullmatch(pattern, value, re.A):
                raise UsageError(f"{name}: got {value!r}, expected {pattern}")
    for word in words:  # it goes through YAML, and Kubernetes fills in $(NAME)
        if re.search(r"[\x00-\x1f\x7f]|\$\(", word):
            raise UsageError(f"{word!r}: got a control sign or '$(', which cannot be passed to a pod")
    if not args.watch.startswith("gs://") and not Path(args.watch).parent.is_dir():
        raise UsageError(f"--watch: {args.watch} is not to be seen from here; fix: the run directory as this machine "
                         "sees it, a folder or gs://BUCKET/...")  # fmt: skip


def run_launch(args) -> int:
    """A verb of the launcher, with what the user can mend as one line; what cannot be is our bug, with its traceback."""
    checked = False
    try:
        check_launch(args)
        checked = True
        if args.dry_run:
            return print_commands(args)
        alone = args.backend == "local" and args.verb != "monitor"
        with only_launcher(args) if alone else contextlib.nullcontext():
            return args.launch(args)
    except (ValueError, LaunchFailed, OSError) as e:
        if checked and isinstance(e, ValueError) and not isinstance(e, UsageError):
            raise
        say(f"launch.py: error: {data.os_error(e) if isinstance(e, OSError) else e}")
        return EXIT_USAGE if isinstance(e, ValueError) else 1


# ----------------------------------------------------------------------------------------------------- command line


def add_launch_verb(verbs, name: str, launch, about: str):
    verb = verbs.add_parser(
        name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{about[0].upper()}{about[1:]}. The three verbs take the same flags.",
        epilog=f"example: python launch.py {name} --config quickstart.yaml --set run.steps=40 --run-dir runs/short",
    )  # fmt: skip
    verb.set_defaults(run=run_launch, launch=launch)
    verb.add_argument("--backend", choices=tuple(BACKENDS), default="local", help="where; default: this machine")
    verb.add_argument("--dry-run", action="store_true", help="print the exact commands, run nothing")
    trainer = verb.add_argument_group("passed on to train.py")
    trainer.add_argument("--config", required=True, help="a file, or a name in configs/")
    trainer.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    trainer.add_argument("--run-dir", help="default: runs/<run.name>; with xpk: the folder as the pods see it")
    trainer.add_argument("--data-root")
    trainer.add_argument("--init-from", metavar="CKPT")
    trainer.add_argument("--init-state", choices=("params", "adam"))
    trainer.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    trainer.add_argument("--allow", action="append", default=[], metavar="KEY")
    trainer.add_argument("--local-dir", metavar="DIR")
    run = verb.add_argument_group("the run")
    run.add_argument(
        "--target", type=int, metavar="STEP", help="a complete step that high is success; default: run.steps"
    )
    run.add_argument("--env-file", help="variables for the trainer: NAME=value, or NAME alone to take it from here")
    run.add_argument(
        "--stall",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="without a new line in its log or a checkpoint: hung",
    )
    run.add_argument("--grace", type=float, default=300, metavar="SECONDS", help="to save in after SIGTERM")
    run.add_argument("--poll", type=float, metavar="SECONDS", help="default: 0.5, xpk: 60")
    run.add_argument("--retries", type=int, default=10, metavar="N", help="in a row that bring no step")
    run.add_argument("--backoff", type=float, metavar="SECONDS", help="before the next attempt, doubled while they "
                     "bring no step; default: 1, xpk: 300")  # fmt: skip
    run.add_argument("--max-backoff", type=float, metavar="SECONDS", help="and no more than; default: 60, xpk: 3600")
    run.add_argument("--processes", type=int, default=1, metavar="N", help="of train.py on this machine")
    xpk = verb.add_argument_group("--backend xpk")
    for flag in ("cluster", "project", "zone", "docker-image"):
        xpk.add_argument(f"--{flag}")
    xpk.add_argument("--device-type", help="as xpk names it: v5p-256, tpu7x-4x4x4")
    xpk.add_argument("--slices", type=int, default=1)
    xpk.add_argument("--priority", choices=("very-low", "low", "medium", "high", "very-high"), default="medium")
    xpk.add_argument("--workload", help="default: run.name")
    xpk.add_argument("--watch", help="the run directory as seen from here, a folder or gs://...; default: --run-dir")
    xpk.add_argument("--context", help="kubectl's; default: gke_PROJECT_REGION_CLUSTER")
    xpk.add_argument("--xpk", action="append", default=[], metavar="FLAG", help="one more flag of xpk workload create, "
                     "as in --xpk=--storage=bucket")  # fmt: skip


def add_verb(verbs, name: str, run, about: str, example: str):
    verb = verbs.add_parser(
        name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example: python launch.py {name} --config stage1.yaml --hardware v5p {example}",
    )  # fmt: skip
    verb.set_defaults(run=run)
    verb.add_argument("--config", required=True, help="a file, or a name in configs/")
    verb.add_argument("--hardware", required=True, help="a file, or a name in configs/hardware/")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    return verb


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    about = "what the devices send to each other in one training step"
    verb = add_verb(verbs, "collectives", run_collectives, about, "--devices 512")
    verb.add_argument("--devices", required=True, type=int, help="how many; the mesh of the hardware file is filled up")
    verb.add_argument("--json", action="store_true", help="the whole list, a shape a row, instead of tables")
    about = "compile the training step for a TPU topology: memory, schedule, overlap, cost"
    verb = add_verb(verbs, "plan", run_plan, about, "--topology v5p:4x4x8")
    verb.add_argument("--topology", required=True, metavar="KIND:XxYxZ", help="v5p:4x4x8 or tpu7x:4x4x4, in chips")
    verb.add_argument("--mfu", type=float, help="for the cost; default: the case study's on that chip")
    verb.add_argument("--full", action="store_true", help="compile to the end, kernels included (can take an hour)")
    verb.add_argument("--keep", metavar="DIR", help="leave the compiler's dump and log there")
    verb.add_argument("--json", action="store_true", help="JSON instead of tables")
    verb.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # the process that compiles
    add_launch_verb(verbs, "submit", run_submit, "start train.py once")
    add_launch_verb(verbs, "monitor", run_monitor, "show the log and the end of what another launcher has started")
    add_launch_verb(verbs, "resume-until-done", run_until_done, "start train.py again until its last step is saved")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    try:
        if args.run is run_launch:
            return run_launch(args)
        import_trainer()
        return run_command("launch.py", lambda: args.run(args))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    for order in (signal.SIGTERM, signal.SIGHUP):  # not without cleaning up
        if signal.getsignal(order) != signal.SIG_IGN:  # nohup
            signal.signal(order, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
