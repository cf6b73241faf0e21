"""Launch: what a run will ask of a machine, worked out before one is taken.

    python launch.py collectives --config stage1.yaml --hardware v5p --devices 512

`collectives` traces the training step of train.py for a mesh of so many devices, abstract ones: nothing is compiled
or computed and no accelerator is touched. It lists what the devices send to each other in one step and where in the
source that is asked for. A compiler may merge or overlap collectives, and it may fuse them with computation.

Exit codes: 0 done; 1 failed; 2 wrong usage or config.
Read first: model.py and the step of train.py, which write every collective out.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
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


def trace_step(c: train.Config, mesh):
    """The training step on a mesh that may be abstract, traced from shapes alone."""
    params, opt_state = train.state_shapes(c, mesh)
    B, S = c.data.global_batch, c.data.sequence_length
    batch = {name: spec and jax.ShapeDtypeStruct((B, S), jnp.int32) for name, spec in train.batch_specs(c).items()}
    batch |= {"loss_mask": jax.ShapeDtypeStruct((B, S), jnp.bool_), "filtered": jax.ShapeDtypeStruct((B,), jnp.bool_)}
    return train.compile_train_step(c, mesh).trace(params, opt_state, batch, jax.ShapeDtypeStruct((), jnp.int32))


def abstract_mesh(c: train.Config, devices: int) -> jax.sharding.AbstractMesh:
    if devices < 1:
        raise ValueError(f"--devices: got {devices}, expected a positive number")
    sizes = train.mesh_sizes(c, devices)
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


def collectives(c: train.Config, devices: int) -> list[Collective]:
    """Every collective of one training step on `devices` devices, in the order of the step, equal ones added up.

    What is traced but never used, such as a recomputation that no gradient needs, is left out, as the compiler does;
    so is a collective over a single device. Loops count as often as they run, micro-batches included. RunFailed if
    one stands where it cannot be counted. Bytes: `bytes_sent`; over several axes n is the product of their sizes.
    """
    mesh = abstract_mesh(c, devices)
    jaxpr = trace_step(c, mesh).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = Counter()
    for eqn, times, path in equations(jaxpr):
        axes = tuple((axis, mesh.shape[axis]) for axis in named_axes(eqn) if mesh.shape[axis] > 1)
        name = eqn.primitive.name
        if not axes or name in SENDS_NOTHING:
            continue
        if name not in KINDS or eqn.params.get("axis_index_groups") is not None:
            raise train.RunFailed(f"{where(path)}: {name} over {dict(axes)}: a collective that launch.py cannot count")
        if any(around.primitive.name in ("cond", "while") for around in path):
            raise train.RunFailed(f"{where(path)}: {name} in a branch or a loop of unknown length: cannot be counted")
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


def report(c: train.Config, devices: int, found: list[Collective]) -> str:
    """Where the collectives stand, and what goes over which axes of the mesh."""
    keys = [(one.where, one.phase, one.kind, product(one.axes), one.dtype) for one in found]
    mesh = product(tuple(train.mesh_sizes(c, devices).items()))
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
    c = train.load_config(args.config, args.hardware, args.set)
    found = collectives(c, args.devices)
    rows = [one._asdict() | {"axes": dict(one.axes), "sent_a_step": one.sent_a_step} for one in found]
    print(json.dumps(rows, indent=1) if args.json else report(c, args.devices, found), end="\n" if args.json else "")


# ----------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser(
        "collectives", help="what the devices send to each other in one training step",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python launch.py collectives --config stage1.yaml --hardware v5p --devices 512",
    )  # fmt: skip
    verb.set_defaults(run=run_collectives)
    verb.add_argument("--config", required=True, help="a file, or a name in configs/")
    verb.add_argument("--hardware", required=True, help="a file, or a name in configs/hardware/")
    verb.add_argument("--devices", required=True, type=int, help="how many; the mesh of the hardware file is filled up")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    verb.add_argument("--json", action="store_true", help="the whole list, a shape a row, instead of tables")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return train.run_command("launch.py", lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
