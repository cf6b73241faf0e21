"""plan.py: the collectives of a training step are these and no others, compiled too; plans."""

import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plan as plan_tool
import pytest
from jax import lax
from plan import Collective

import model
from config import load_config, make_mesh, mesh_sizes
from processes import RunFailed, sole_writer

BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
L, D, F, V = 32, 4096, 11008, 100352  # of the 7B model; all heads together are D wide, too
PASSES = ("forward", "recomputed", "backward")


def row(where, phase, kind, axes, dtype, shape, times) -> Collective:
    """The bytes by the textbook: (n-1)/n of what is whole at one end, twice that for an all-reduce."""
    n, operand = math.prod(size for _, size in axes), math.prod(shape) * BYTES[dtype]
    whole = operand * n if kind == "all-gather" else operand
    sent = {"permute": operand, "all-reduce": 2 * whole * (n - 1) / n}.get(kind, whole * (n - 1) / n)
    return Collective(where, phase, kind, axes, dtype, shape, times, math.ceil(sent))


def weights(axes, tensor: int) -> list[Collective]:
    """bf16 gathers over fsdp, a layer's again for the backward pass, and fp32 reduce-scatters, each of a matrix."""
    embed, layer, head = "embed_tokens in hidden_states", "layer in hidden_states", "token_loss in gradients"
    n, rows = axes[0][1], []
    for where in (embed, head):
        rows.append(row(where, "forward", "all-gather", axes, "bfloat16", (1, V // tensor // n, D), 1))
        rows.append(row(where, "backward", "reduce-scatter", axes, "float32", (n, V // tensor // n, D), 1))
    for width, matrices in ((D // tensor, 4), (F // tensor, 3)):
        for phase in ("forward", "recomputed"):
            rows.append(row(layer, phase, "all-gather", axes, "bfloat16", (D // n, width), L * matrices))
        rows.append(row(layer, "backward", "reduce-scatter", axes, "float32", (D, width), L * matrices))
    return rows


def summed(axes, shape, times) -> Collective:
    return row("reduce_gradients in gradients", "step", "all-reduce", axes, "float32", shape, times)


def scalars(axes, dtype, shape, times) -> Collective:
    return row("train_step", "step", "all-reduce", axes, dtype, shape, times)


def test_stage1_on_512_devices():
    """A weight that is gathered once more, or not again for the backward pass (then all of them are held), or in fp32;
    a gradient that is summed in bf16, once a layer or over one axis more: whatever is not written here."""
    found = plan_tool.collectives(load_config("stage1", "v5p", []), 512)
    data, fsdp, both = (("data", 8),), (("fsdp", 64),), (("data", 8), ("fsdp", 64))
    expected = [
        *weights(fsdp, tensor=1),
        summed(data, (V // 64, D), 2),  # embed lm_head
        summed(data, (L, D // 64, D), 4),  # wq wk wv wo
        summed(data, (L, D // 64, F), 3),  # w_gate w_up w_down
        summed(both, (L, D), 4),  # q_norm k_norm attn_norm ffn_norm
        summed(both, (D,), 1),  # final_norm
        scalars(both, "int32", (), 2),  # labels; filtered instances
        scalars(both, "float32", (2,), 1),  # sums of CE and of lse^2
        scalars(fsdp, "float32", (), 9),  # squares of the gradient, one for each matrix of the ledger
    ]
    assert sorted(found) == sorted(expected)
    # Of a parameter in a layer 2 bytes are gathered twice and 4 are reduced; in embed and lm_head gathered once.
    layer = 4 * D * D + 3 * D * F
    over_fsdp = sum(one.sent_a_step for one in found if one.axes == fsdp and one.shape)
    assert over_fsdp == 63 * (8 * L * layer + 6 * 2 * V * D) // 64 == 55853973504


def test_65536_tokens_over_context_and_tensor():
    """A halo of more than window - 1 keys (and one, to fill the kernel's tile), keys of a sliding layer gathered, queries exchanged whole, outputs exchanged
    again that were saved, a sum over tensor too many, statistics of QK-norm over one shard's heads."""
    sets = ["data.sequence_length=65536", "data.global_batch=64", "mesh={data: 1, fsdp: 16, context: 8, tensor: 2}"]
    found = plan_tool.collectives(load_config("stage1", "v5p", sets), 256)
    fsdp, context, tensor = ("fsdp", 16), ("context", 8), ("tensor", 2)
    B, S, H, K = 4, 65536 // 8, 32 // 2, 128  # on one device
    halo, half, shard, whole = (B, 4096, H, K), (B, S // 2, H, K), (B, S, H, K), (B, 8 * S, H, K)
    sliding, full, N = 24, 8, B * S

    def permute(where, phase, shape, times):
        return row(where, phase, "permute", (context,), "bfloat16", shape, times)

    def over_tensor(where, phase, dtype, shape, times):
        return row(where, phase, "all-reduce", (tensor,), dtype, shape, times)

    expected = [
        *weights((fsdp,), tensor=2),
        *(permute("with_halo in attend", phase, halo, 2 * sliding) for phase in PASSES),  # K, V
        permute("swap_with_mirror in attend", "forward", half, 2 * full),  # queries, outputs
        permute("swap_with_mirror in attend", "recomputed", half, 2 * full),  # the kernel's outputs are saved, before
        permute("swap_with_mirror in attend", "backward", half, 2 * full),
        *(
            row("gather_sequence in attend", phase, "all-gather", (context,), "bfloat16", shard, 2 * full)  # K, V
            for phase in ("forward", "recomputed")
        ),
        row("gather_sequence in attend", "backward", "reduce-scatter", (context,), "bfloat16", whole, 2 * full),
        *(
            over_tensor("rms_norm_over_tensor in attention_block", phase, "float32", (N, 1), 2 * L)  # Q, K
            for phase in PASSES
        ),
        *(
            over_tensor(where, phase, "bfloat16", (N, D), times)  # saved, so not summed again
            for phase in ("forward", "backward")
            for where, times in (
                ("embed_tokens in hidden_states", 1),
                ("attention_block in layer", L),
                ("feed_forward_block in layer", L),
            )
        ),
        over_tensor("chunk_loss in token_loss", "forward", "float32", (2048,), 3 * N // 2048),  # peak, sum, target
        over_tensor("token_loss in gradients", "backward", "float32", (), 1),  # cotangent of the loss
        summed((context,), (V // 2 // 16, D), 2),
        summed((context,), (L, D // 16, D // 2), 4),
        summed((context,), (L, D // 16, F // 2), 3),
        summed((fsdp, context), (L, D // 2), 2),  # q_norm k_norm
        summed((fsdp, context, tensor), (L, D), 2),  # attn_norm ffn_norm
        summed((fsdp, context, tensor), (D,), 1),
        scalars((fsdp, context), "int32", (), 1),  # labels
        scalars((fsdp,), "int32", (), 1),  # filtered instances: a whole row each
        scalars((fsdp, context, tensor), "float32", (2,), 1),
        scalars((fsdp, tensor), "float32", (), 9),
        scalars((tensor,), "float32", (), 2),  # squares of q_norm and k_norm
    ]
    assert sorted(found) == sorted(expected)


def test_replicas_and_micro_batches():
    """Gradients summed over data once a micro-batch, weights gathered over data, a gather that depends on replicas."""

    def times(devices: int, batch: int, microbatch: int) -> dict[tuple, Counter]:
        c = load_config("stage1", "v5p", [f"data.global_batch={batch}", f"microbatch={microbatch}"])
        by_axes = defaultdict(Counter)
        for one in plan_tool.collectives(c, devices):
            by_axes[tuple(dict(one.axes))][one._replace(times=0)] += one.times
        return by_axes

    one_piece, replicas, pieces = times(512, 1024, 2), times(1024, 2048, 2), times(512, 1024, 1)
    assert replicas["fsdp",] == one_piece["fsdp",]
    for axes in (("data",), ("data", "fsdp")):
        assert pieces[axes] == one_piece[axes]
    for key, n in one_piece["fsdp",].items():  # all but the squares of the gradients is done for each micro-batch
        assert pieces["fsdp",][key] == n * (1 if key.where == "train_step" else 2)


@pytest.mark.parametrize(
    ("recipe", "machine", "devices", "sets"),
    [
        ("stage1_ai2", "ironwood", 256, []),
        ("stage2", "v5p", 256, ["mesh={data: 2, fsdp: 32, context: 2, tensor: 2}", "data.document_mask=true"]),
    ],
)
def test_what_no_recipe_may_send(recipe, machine, devices, sets):
    """fp32 weights on the wire, a whole matrix that every device sums, activations or weights over data."""
    c = load_config(recipe, machine, sets)
    found = plan_tool.collectives(c, devices)
    largest = max(math.prod(t.shape) for t in model.ledger(c.model).values()) / mesh_sizes(c, devices)["fsdp"]
    for one in found:
        if one.kind == "all-gather":
            assert one.dtype == "bfloat16" or one.dtype == "int32" and dict(one.axes).keys() == {"context"}
        if "data" in dict(one.axes):
            assert one.kind == "all-reduce" and one.where in ("reduce_gradients in gradients", "train_step")
        if one.kind == "all-reduce" and one.dtype == "float32":
            assert math.prod(one.shape) <= largest


def test_remat_all_gathers_weights_again():
    """Gathered weights that are saved with everything else: then all layers are whole at once."""
    c = load_config("stage1", "cpu", [*TINY])
    assert c.hardware.remat == "all"
    gathers = [one for one in plan_tool.collectives(c, 8) if one.where == "layer in hidden_states"]
    times = {phase: sum(one.times for one in gathers if one.phase == phase) for phase in PASSES}
    assert times == {"forward": 7 * 4, "recomputed": 7 * 4, "backward": 7 * 4}


# ------------------------------------------------------------------------------------------- the compiled program


def devices_over(sizes: dict[str, int], axes) -> tuple:
    """The groups of devices that a collective over `axes` joins."""
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    last = [list(sizes).index(axis) for axis in axes]
    groups = np.moveaxis(ids, last, range(-len(last), 0)).reshape(-1, math.prod(sizes[axis] for axis in axes))
    return tuple(sorted(map(tuple, groups.tolist())))


def compiled_collectives(hlo: str) -> Counter:
    """{(kind, dtype, elements of an operand, groups of devices): times a step}; loops as often as XLA says they run."""
    bodies, found = {}, Counter()
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*{$", line):
            body = bodies["entry" if head[1] else head[2]] = []
        elif line.startswith("  "):
            body.append(line)

    def run(name: str, times: int) -> None:
        for line in bodies[name]:
            trips = re.search(r'"known_trip_count":{"n":"(\d+)"', line)
            assert trips or " while(" not in line, line
            for inner in re.findall(r"(?:to_apply|calls|body)=%?([\w.-]+)", line):
                run(inner, times * int(trips[1]) if trips else times)
            if op := re.search(r" = (.*) (all-gather|reduce-scatter|all-reduce|collective-permute)\(", line):
                groups = re.search(r"replica_groups={{(.*?)}}", line)
                groups = [tuple(map(int, g.split(","))) for g in groups[1].split("},{")] if groups else []
                n = len(groups[0]) if groups else 0
                for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", op[1]):  # several when XLA has combined them
                    elements = math.prod(map(int, filter(None, shape.split(","))))
                    elements = {"all-gather": elements // max(n, 1), "reduce-scatter": elements * n}.get(
                        op[2], elements
                    )
                    if n != 1:
                        kind = op[2].removeprefix("collective-")
                        found[kind, {"f32": "float32", "s32": "int32"}[dtype], elements, tuple(sorted(groups))] += times

    run("entry", 1)
    return found


TINY = (
    "model.vocab_size=97", "model.padded_vocab_size=128", "model.n_layers=4", "model.d_model=48", "model.n_heads=4",
    "model.n_kv_heads=4", "model.head_dim=10", "model.d_ff=56", "model.window=8", "model.pattern=sf",
    "model.compute_dtype=float32", "data.sequence_length=32", "data.global_batch=16", "attention=dense",
    "loss_chunk=12", "xla_flags={xla_backend_optimization_level: 0}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "sets", "hoisted"),
    [
        ((2, 4, 1, 1), ["remat=[x, q, k, v, heads_out, attn_out, ffn_out]"], {}),
        (
            (1, 2, 2, 2),
            ["remat=[x]", "microbatch=4"],
            {("all-gather", 64 * 24): 2, ("permute", 16 // 2): 1, ("all-reduce", 1): 1},
        ),
        (
            (1, 2, 4, 1),
            ["model.pattern=s", "model.window=12", "data.document_mask=true", "microbatch=2"],
            {("all-gather", 128 * 24): 2 * 3},
        ),
    ],
    ids=["data 2, fsdp 4", "fsdp 2, context 2, tensor 2", "fsdp 2, context 4"],
)
def test_compiled_program_has_the_same(sizes, sets, hoisted):
    """A recomputation that is counted and never runs (or the reverse), loops counted wrongly, axes that are not those
    which the name says; in the last case also an exchange of query positions, which sliding layers do not need.

    Kind, dtype, elements, groups of devices and number are equal in XLA's program for the CPU. What differs: 1. XLA
    takes out of the loop over micro-batches what is the same in all of them: the gathers of embed and lm_head (not of
    the layers, which are a loop of their own), the positions of exchanged queries, the loss's own gradient. Counted
    here is what the code asks for. 2. A sum over one device is still an operation. 3. In bf16 (not tested) the CPU's
    compiler sends fp32. Shapes are not compared: XLA may drop dimensions of size 1. It combines nothing here; where it
    does, the parts of the tuple are counted.
    """
    mesh = dict(zip(model.AXES, sizes, strict=True))
    c = load_config("stage1", "cpu", [*TINY, *sets, "scan_unroll=1", f"mesh={json.dumps(mesh)}"])
    traced, more = Counter(), Counter()
    for one in plan_tool.collectives(c, 8):
        groups = () if one.kind == "permute" else devices_over(mesh, dict(one.axes))
        traced[one.kind, one.dtype, math.prod(one.shape), groups] += one.times
    compiled = compiled_collectives(plan_tool.trace_step(c, make_mesh(c)).lower().compile().as_text())
    assert not compiled - traced
    for (kind, _, elements, _), times in (traced - compiled).items():
        more[kind, elements] += times
    assert more == hoisted


# ------------------------------------------------------------------------------------------------ the command line


STAGE1 = ("collectives", "--config", "stage1.yaml", "--hardware", "v5p", "--devices")


def test_bytes():
    """A formula that is off by the number of devices, or by two."""
    got = [plan_tool.bytes_sent(kind, 1000, 4) for kind in ("all-gather", "reduce-scatter", "all-reduce", "permute")]
    assert got == [3000, 750, 1500, 1000]
    assert plan_tool.bytes_sent("all-reduce", 4, 512) == 8  # rounded up


def test_tables_and_json_say_the_same(capsys):
    """A total that leaves rows out, MB that are MiB, JSON that a program cannot read."""
    assert plan_tool.main([*STAGE1, "512", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert plan_tool.main([*STAGE1, "512"]) == 0
    out = capsys.readouterr().out
    assert "| layer in hidden_states | forward | all-gather | fsdp 64 | bfloat16 | 224 | 12,749.6 |" in out
    sums = [r for r in out.split("\n\n")[2].splitlines() if "---" not in r][1:]
    assert sum(int(r.split(" | ")[2].replace(",", "")) for r in sums) == sum(r["times"] for r in rows) == 702
    sent = sum(r["sent_a_step"] for r in rows)
    assert sent == sum(r["times"] * r["sent"] for r in rows) and f"a device sends {sent / 1e9:.1f} GB" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("0",), "--devices: got 0, expected a positive number"),
        (("3",), "'fsdp': 64, 'context': 1, 'tensor': 1} for 3 devices, expected sizes whose product is 3"),
        (("1" + "0" * 30,), "global batch: got 512"),
        (("640",), "global batch: got 512, expected a multiple of data x fsdp = 640"),
        (("512", "--set", "model.d_modle=1"), "model.d_modle: unknown key; did you mean 'd_model'?"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, named):
    assert plan_tool.main([*STAGE1, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("plan.py: error: ") and named in err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda x: lax.cond(x[0] > 0, lambda x: model.vary(lax.psum(x, "fsdp")), lambda x: x, x),
            "psum_invariant in a branch",
        ),
        (
            lambda x: lax.while_loop(lambda x: x[0] > 0, lambda x: model.vary(lax.psum(x, "fsdp")), x),
            "of unknown length",
        ),
        (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all_to_all over {'fsdp': 8}"),
    ],
    ids=["branch", "loop", "unknown"],
)
def test_what_cannot_be_counted_is_an_error(monkeypatch, change, named):
    """A collective that the list leaves out, or counts once, because its number is known only while running."""
    reduce_gradients = model.reduce_gradients

    def changed(grads, config):
        return reduce_gradients(grads | {"final_norm": change(grads["final_norm"])}, config)

    monkeypatch.setattr(model, "reduce_gradients", changed)
    monkeypatch.delitem(plan_tool.KINDS, "all_to_all")  # as if this one were new to the list
    with pytest.raises(RunFailed, match=re.escape(named)):
        plan_tool.collectives(load_config("stage1", "cpu", list(TINY)), 8)


# ---------------------------------------------------------------------------------------------- plan: the compiler

PLAN = ("compile", "--config", "stage1.yaml", "--hardware")
SMALL = (
    "model.vocab_size=1000", "model.padded_vocab_size=1024", "model.n_layers=4", "model.d_model=256", "model.n_heads=2",
    "model.n_kv_heads=2", "model.d_ff=768", "model.window=256", "model.pattern=sf", "data.sequence_length=512",
    "data.global_batch=16", "mesh={data: -1, fsdp: 4, context: 1, tensor: 1}", "loss_chunk=512",
    "splash={block: 128, block_backward: 128, q_layout: seq_minor, k_layout: seq_minor, v_layout: head_dim_minor}",
)  # fmt: skip
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, has no wheel for this machine"
)


def plan_arguments(machine: str, topology: str, *more: str, sets=SMALL) -> list[str]:
    return [*PLAN, machine, "--topology", topology, *more, *(word for one in sets for word in ("--set", one))]


def sent(rows, kinds) -> int:
    """Bytes that a device sends in one step."""
    return sum(row["times"] * row["bytes"] for row in rows if row["kind"] in kinds)


@needs_libtpu
@pytest.mark.parametrize(("machine", "topology", "devices"), [("v5p", "v5p:2x2x1", 4), ("ironwood", "tpu7x:2x2x1", 8)])
def test_plan_of_a_small_model(capsys, machine, topology, devices):
    """A step that the TPU's compiler or the Splash kernel refuses; gathers of weights that the compiled step repeats,
    drops, or no longer hides; a report that reads an old format of the compiler's files."""
    assert plan_tool.main(plan_arguments(machine, topology, "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    kind = topology.partition(":")[0]
    assert (plan["devices"], plan["chips"]) == (devices, 4) and plan["device_kind"] == plan_tool.TPUS[kind].kind
    assert plan["mesh"] == {"data": devices // 4, "fsdp": 4, "context": 1, "tensor": 1}
    assert plan["sequences_a_device"] == plan["microbatch"] == 16 // devices
    memory, c = plan["memory"], load_config("stage1", machine, list(SMALL))
    state = 12 * model.parameter_count(c.model) / 4 / 2**30
    assert state <= memory["arguments_gib"] + 0.005 <= state * 1.1 + 0.01
    assert memory["fits"] and memory["total_gib"] == pytest.approx(memory["arguments_gib"] + memory["temporaries_gib"])
    schedule = plan["scheduler"]
    assert not schedule["over_memory_limit"] and plan["advice"] is None and 1e5 < schedule["cycles"] < 1e11
    # Every SparseCore call waits for 1e9 cycles by its placeholder price; the work itself is far cheaper.
    assert 1e5 < schedule["cycles_without_asynchronous_calls"] < 1e9

    rows = plan["collectives"]
    found = plan_tool.collectives(c, devices)
    gathers = [one for one in found if one.kind == "all-gather"]
    scatters = [one for one in found if one.kind == "reduce-scatter"]
    assert sent(rows, ["all-gather"]) == sum(one.sent_a_step for one in gathers)
    assert sum(r["times"] * r["count"] for r in rows if r["kind"] == "all-gather") == sum(one.times for one in gathers)
    # A reduce-scatter may become an all-reduce, of twice the bytes, and a slice.
    scattered = sum(one.sent_a_step for one in scatters)
    assert scattered <= sent(rows, ["reduce-scatter", "all-reduce"]) < 3 * scattered
    loops = {r["place"]: r for r in rows if r["kind"] == "all-gather"}
    assert loops.keys() == {"outside", "forward", "backward"} and loops["outside"]["times"] == 1
    for place in ("forward", "backward"):  # two cycles of two layers, seven matrices each
        row = loops[place]
        assert (row["times"], row["count"]) == (2, 14)
        assert 10 <= row["overlapped"] <= row["asynchronous"] <= 14


@pytest.mark.gpu_plan
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs requirements-gpu.txt")
@pytest.mark.parametrize(("machine", "kernels"), [("h100", {"fmhaSoftmax", "fmhaSoftmaxBackward"}), ("gpu", set())])
def test_plan_of_a_small_model_on_gpus(capsys, tmp_path, machine, kernels):
    """A step that the GPU's compiler refuses; cuDNN's forward kernel run again in the backward pass; products that go to
    untuned Triton kernels; an embedding whose gradient is added up by atomics; gathers that are repeated or dropped."""
    kept = ("--keep", str(tmp_path / "kept"), "--mfu", "0.4", "--json")
    assert plan_tool.main(plan_arguments(machine, "h100:4", *kept)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["devices"], plan["chips"], plan["device_kind"]) == (4, 4, plan_tool.GPUS["h100"].kind)
    c = load_config("stage1", machine, list(SMALL))
    memory, state = plan["memory"], 12 * model.parameter_count(c.model) / 4 / 2**30
    assert state <= memory["arguments_gib"] + 0.005 <= state * 1.1 + 0.01
    assert memory["fits"] and memory["limit_gib"] == plan_tool.GPUS["h100"].hbm and plan["scheduler"] is None

    lines = next((tmp_path / "kept").glob("*gpu_after_optimizations.txt")).read_text().splitlines()
    assert {name for line in lines for name in re.findall(r'custom_call_target="__cudnn\$(\w+)"', line)} == kernels
    assert not [line for line in lines if '$fmhaSoftmax"' in line and "rematted_computation" in line]
    assert not [line for line in lines if re.search(r'"kind":"__triton\w*gemm', line)]
    assert any("__cublas$" in line for line in lines)
    assert all("unique_indices=true" in line for line in lines if " scatter(" in line)
    rows = plan["collectives"]
    gathers = [one for one in plan_tool.collectives(c, 4) if one.kind == "all-gather"]
    assert sent(rows, ["all-gather"]) == sum(one.sent_a_step for one in gathers)
    scatters = [one for one in plan_tool.collectives(c, 4) if one.kind == "reduce-scatter"]
    assert sent(rows, ["reduce-scatter"]) == sum(one.sent_a_step for one in scatters)


@needs_libtpu
@pytest.mark.slow
def test_plan_to_the_end(capsys, tmp_path):
    """Kernels that only the code generation refuses; --keep that keeps nothing; micro-batches counted once."""
    more = ("--full", "--json", "--mfu", "0.5", "--keep", str(tmp_path / "kept"))
    assert plan_tool.main(plan_arguments("v5p", "v5p:2x2x1", *more, sets=[*SMALL, "microbatch=2"])) == 0
    plan = json.loads(capsys.readouterr().out)
    memory, full, log = plan["memory"], plan["full"], (tmp_path / "kept" / "log").read_text()
    assert full["compile_seconds"] > 0 and plan["cost"]["mfu"] == 0.5
    reserved, program, arguments = (
        float(re.search(rf"^    {what} +([\d.]+)M", log, re.M)[1]) for what in ("reserved", "program", "arguments")
    )
    assert full["hbm_gib"] == pytest.approx((reserved + program + arguments) / 1024, abs=0.01)
    assert (
        memory["total_gib"] <= full["hbm_gib"] <= memory["total_gib"] + 0.5
    )  # what the runtime reserves, and the code
    assert 1 < full["vmem_mib"] <= 64
    assert list((tmp_path / "kept").glob("*.after_optimizations.txt"))
    assert {r["place"]: r["times"] for r in plan["collectives"]} == {
        "outside": 1, "micro-batches": 2, "forward": 4, "backward": 4,
    }  # fmt: skip
    assert plan["scheduler"]["cycles"] > 1e5
    assert plan_tool.main(plan_arguments("v5p", "v5p:2x2x1", "--keep", str(tmp_path / "kept"))) == 2
    assert "is there and not an empty folder" in capsys.readouterr().err


MODULE = """HloModule jit_train_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[64,32]) -> f32[8,32] {
  ROOT %reduce-scatter.9 = f32[8,32]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[4,8]<=[32], to_apply=%add
}

%called (p: f32[64,32]) -> f32[8,32] {
  ROOT %call.1 = f32[8,32]{1,0:T(8,128)} call(%p), to_apply=%wrapped
}

%begun (p: bf16[8,32]) -> (bf16[8,32], bf16[32,32]) {
  %all-gather.1 = bf16[1,32,32]{2,1,0:T(8,128)(2,1)} all-gather(%p), channel_id=6, replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %custom-call.1 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) custom-call(%p, %all-gather.1)
}

%async_collective_fusion.7 (p: bf16[32,32]) -> bf16[32,32] {
  ROOT %all-gather.2 = bf16[1,32,32]{2,1,0} all-gather(%p), channel_id=6, replica_groups={{0,1,2,3}}
}

%forward (state: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %x = bf16[8,32]{1,0} get-tuple-element(%state), index=1
  %async-collective-start = (bf16[8,32]{1,0}, /*index=1*/bf16[32,32]{1,0}) fusion(%x), kind=kCustom, calls=%begun
  %gte.1 = bf16[32,32]{1,0} get-tuple-element(%async-collective-start), index=1
  %fusion.5 = bf16[32,32] fusion(%g), kind=kOutput, calls=%async_collective_fusion.7, metadata={op_name="dot_general"}
  %async-collective-done = bf16[32,32]{1,0} fusion(%fusion.5), kind=kCustom, calls=%begun
  %async-collective-start.1 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) fusion(%x), kind=kCustom, calls=%begun
  %mul_fusion = bf16[32,32]{1,0} fusion(%gte.1), kind=kOutput, calls=%add, metadata={op_name="f/mul"}
  %async-collective-done.1 = bf16[32,32]{1,0} fusion(%gte.1), kind=kCustom, calls=%begun
  %copy-start.1 = (bf16[8,32]{1,0}, bf16[8,32]{1,0}, u32[]) copy-start(%x)
  ROOT %tuple.1 = (s32[], bf16[8,32]{1,0}) tuple(%i, %x)
}

%backward (state: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %reduce-scatter.3.call-start = ((f32[64,32]{1,0}), f32[8,32]{1,0}) async-start(%g), calls=%called
  %splash_mha_dq.1 = bf16[8,32]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %reduce-scatter.3.call-done = f32[8,32]{1,0} async-done(%reduce-scatter.3.call-start)
  %all-gather-start.4 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %all-gather-done.4 = bf16[32,32]{1,0} all-gather-done(%all-gather-start.4)
  ROOT %tuple.2 = (s32[], bf16[8,32]{1,0}) tuple(%i, %x)
}

%condition (state: (s32[], bf16[8,32])) -> pred[] {
  %constant.8 = s32[]{:T(128)} constant(8), metadata={op_name="jit(train_step)/shard_map"}
  ROOT %lt = pred[] compare(%i, %constant.8), direction=LT
}

%unknown (state: (s32[], bf16[8,32])) -> pred[] {
  ROOT %lt.1 = pred[] compare(%i, %n), direction=LT
}

%twice (state: (s32[], bf16[8,32])) -> pred[] {
  %constant.2 = s32[] constant(2)
  ROOT %lt.2 = pred[] compare(%i, %constant.2), direction=LT
}

%pieces (state: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %while.1 = (s32[]) while(%state), condition=%condition, body=%forward, metadata={op_name="f/while/body/jvp()/while"}
  ROOT %while.2 = (s32[]) while(%i), condition=%unknown, body=%backward, metadata={op_name="f/transpose(jvp())/while"}
}

ENTRY %main.1_spmd (p: bf16[8,32]) -> bf16[8,32] {
  %while.3 = (s32[]) while(%init), condition=%twice, body=%pieces, metadata={op_name="f/while"}
  %all-reduce.5 = (f32[16]{0}, pred[3]{0}, /*index=2*/f32[]) all-reduce(%a, %b, %d), replica_groups={}, to_apply=%add
  ROOT %collective-permute.1 = bf16[8,32]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
"""


def test_compiled_collectives_are_found():
    """A collective behind two calls, or one that a chain of fusions carries, counted not at all or many times; a copy
    counted; work that hides nothing (a fusion without a matmul); bytes of the wrong end; a loop inside a loop."""
    computations = plan_tool.parse_hlo(MODULE)
    loops = plan_tool.find_loops(computations)
    assert loops == {
        "pieces": ("micro-batches", 2), "forward": ("forward", 16), "backward": ("backward", None),
    }  # fmt: skip
    gather, scatter = 8 * 32 * 2 * 3, 64 * 32 * 4 * 7 // 8
    assert [tuple(row) for row in plan_tool.compiled_collectives(computations, loops, devices=32)] == [
        ("outside", 1, "all-reduce", 1, math.ceil((64 + 3 + 4) * 2 * 31 / 32), 0, 0),
        ("outside", 1, "permute", 1, 8 * 32 * 2, 0, 0),
        ("forward", 16, "all-gather", 2, 2 * gather, 2, 1),
        ("backward", None, "all-gather", 1, gather, 1, 0),
        ("backward", None, "reduce-scatter", 1, scatter, 1, 1),
    ]


GPU_MODULE = """HloModule jit_train_step, is_scheduled=true

%body (state: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %all-gather-start.1 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, metadata={op_name="jit(f)/transpose(jvp())/while/body/gather"}
  %custom-call.2 = (bf16[8,32]{1,0}, s8[16]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %all-gather-done.1 = bf16[32,32]{1,0} all-gather-done(%all-gather-start.1)
  %reduce-scatter-start = ((f32[32,32]{1,0}, f32[64,32]{1,0}), (f32[8,32]{1,0}, f32[16,32]{1,0})) reduce-scatter-start(%a, %b), replica_groups=[2,4]<=[8]
  %wrapped = f32[8,32]{1,0} fusion(%a), kind=kLoop, calls=%loop_fusion
  %reduce-scatter-done = (f32[8,32]{1,0}, f32[16,32]{1,0}) reduce-scatter-done(%reduce-scatter-start)
  ROOT %tuple.1 = (s32[], bf16[8,32]) tuple(%i, %x)
}

%condition (state: (s32[], bf16[8,32])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: bf16[8,32]) -> bf16[8,32] {
  %while.1 = (s32[], bf16[8,32]{1,0}) while(%init), condition=%condition, body=%body, metadata={scheduling_name="while.1"}, backend_config={"known_trip_count":{"n":"7"}}
}
"""  # noqa: E501


def test_compiled_collectives_of_a_gpu():
    """Operands of a combined reduce-scatter counted with its results; a loop without a name or a bound that is not
    counted; a collective that a loop fusion is said to hide, or that cuBLAS is not."""
    computations = plan_tool.parse_hlo(GPU_MODULE)
    loops = plan_tool.find_loops(computations)
    assert loops == {"body": ("backward", 7)}
    assert [tuple(row) for row in plan_tool.compiled_collectives(computations, loops, devices=8)] == [
        ("backward", 7, "all-gather", 1, 8 * 32 * 2 * 3, 1, 1),
        ("backward", 7, "reduce-scatter", 1, (32 + 64) * 32 * 4 * 3 // 4, 1, 0),
    ]


SCHEDULED = """I1 scheduler] Statistics {when} scheduling:
I1 scheduler] For computation: {name}, module jit_{module}(0)
I1 scheduler] Total wasted cycles: 3e+09
I1 scheduler] Wasted cycles for all-gather: 1e+09
I1 scheduler] Wasted cycles for asynchronous call: {waiting}
I1 scheduler] Total cycles: {cycles}
I1 scheduler] Memory pressure peak (bytes): 93259781952
"""
OVER = (
    "I1 LatencyHidingScheduler current memory usage: 101346269184 bytes, does not fit in initial limit: 96884173312. "
    "Setting the new limit to 87195755980\n"
)


def scheduled(name, cycles, waiting=0, when="after", module="train_step") -> str:
    return SCHEDULED.format(name=name, cycles=cycles, waiting=waiting, when=when, module=module)


def test_schedule_is_read():
    """Cycles from before the scheduling, of a loop or of another program; the first of two attempts; placeholders."""
    loops = {"body": plan_tool.Loop("forward", 8), "pieces": plan_tool.Loop("micro-batches", 2)}
    log = scheduled("body", "4e+09") + scheduled("main.1_spmd", "3e+10") + scheduled("main.1_spmd", 9, when="before")
    read = plan_tool.parse_schedule(log, loops)
    assert read["cycles"] == read["cycles_without_asynchronous_calls"] == 3e10 and not read["over_memory_limit"]
    again = log + OVER + scheduled("body", "5e+09") + scheduled("main.1_spmd", "3.5e+10", waiting="2.5e+10")
    read = plan_tool.parse_schedule(again + scheduled("main.1", 1, module="stage"), loops)
    assert read["cycles"] == 3.5e10 and read["cycles_without_asynchronous_calls"] == 1e10
    assert (read["over_memory_limit"], read["wanted_gib"], read["scheduler_limit_gib"]) == (True, 94.39, 90.23)
    only_loops = plan_tool.parse_schedule(scheduled("body", 7) + scheduled("pieces", 100, waiting=10), loops)
    assert (only_loops["cycles"], only_loops["cycles_without_asynchronous_calls"]) == (200, 180)
    assert plan_tool.parse_schedule("", loops)["cycles"] is None


def test_memory_is_read():
    """VMEM counted as HBM, donated state counted twice, a limit that the compiler corrects."""
    report = "Memory Space: default (color=0)\nTotal bytes: 94540593216 (88.05GiB)\n  x\nMemory Space: vmem (color=1)\n"
    report += "Total bytes: 4128768 (3.94MiB)\n"
    assignment = f"""BufferAssignment:
allocation 0: size 32, thread-local:
allocation 1: size {2**30}, parameter 8, shape |f32[32,32,11008]| at ShapeIndex {{}}, maybe-live-out:
 value: <17375 param.92 @0> (size=45088768,offset=0): f32[32,32,11008]{{2,1,0:T(8,128)}}
allocation 2: size {2**29}, parameter 3, shape |s32[4,8192]| at ShapeIndex {{}}:
allocation 3: size {2**29}, color 2, parameter 4, shape |s32[]| at ShapeIndex {{}}:
allocation 538: size 93980295456, preallocated-temp:
"""
    read = plan_tool.parse_memory(report, assignment, "", 95.0)
    assert read == {
        "arguments_gib": 1.5, "temporaries_gib": 86.55, "total_gib": 88.05, "limit_gib": 95.0, "fits": True,
    }  # fmt: skip
    log = "E1 Ran out of memory in memory space hbm. Used 88.05G of 87.50G hbm. Exceeded hbm capacity by 0.55G."
    read = plan_tool.parse_memory(report, assignment, log, 95.0)
    assert read["limit_gib"] == 87.5 and not read["fits"]


def test_last_count_is_read():
    """Kilobytes read as gigabytes; the host's count for the HBM's; a compiler that counts neither."""
    log = "XLA::TPU program VMEM usage: 60.47M / 64.00M\nTotal hbm usage >= 86.77G:\n    program  85.24G\nTotal host usage >= 0B:\n"
    assert plan_tool.parse_last_count(log) == {"hbm_gib": 86.77, "vmem_mib": 60.47}
    log = "XLA::TPU program VMEM usage: 512.0K / 64.00M\nTotal hbm usage >= 369.97M:\n"
    assert plan_tool.parse_last_count(log) == {"hbm_gib": 0.36, "vmem_mib": 0.5}
    assert plan_tool.parse_last_count("") == {}


def test_advice():
    """A report that says what is wrong and not what to change, or that suggests half of one sequence."""
    c = load_config("stage1", "v5p", ["remat=[x, q, k, v]"])
    fits, over = {"fits": True}, {"over_memory_limit": True}
    assert plan_tool.advice(c, 4, {"memory": fits, "scheduler": {"over_memory_limit": False}}) is None
    text = plan_tool.advice(c, 4, {"memory": fits, "scheduler": over})
    assert "gave up overlap" in text and "4 names: x q k v" in text and "microbatch 2 instead of 4" in text
    text = plan_tool.advice(c, 1, {"memory": {"fits": False}, "scheduler": over})
    assert "does not fit" in text and "microbatch" not in text


# -------------------------------------------------------------------------------------------------- plan: the cost


@pytest.mark.parametrize(
    ("recipe", "kind", "chips", "mfu", "expected"),
    [
        ("stage1", "tpu7x", 64, 0.445, {"seconds_a_step": 3.05, "chip_hours": 77_000}),
        ("stage1", "tpu7x", 256, 0.445, {"seconds_a_step": 0.76, "chip_hours": 77_000, "days": 12.5}),
        ("stage1", "tpu7x", 256, 0.30, {"chip_hours": 113_000}),
        ("stage2", "v5p", 128, 0.574, {"chip_hours": 5_000, "days": 39 / 24, "flops_a_device_second": 263e12}),
    ],
)  # fmt: skip
def test_cost_of_the_case_study(recipe, kind, chips, mfu, expected):
    """Two devices of an Ironwood chip counted as one or four, hours of devices, days of one chip."""
    cost = plan_tool.cost(load_config(recipe, "v5p", []), kind, chips, mfu)
    for name, value in expected.items():
        assert cost[name] == pytest.approx(value, rel=0.01), name
    assert cost["tokens"] == pytest.approx({"stage1": 5.93e12, "stage2": 1e11}[recipe], rel=1e-3)


def test_flops_of_the_case_study():
    """A window that is ignored, or halved twice; a vocabulary with its padding; the embedding counted."""
    flops = plan_tool.cost(load_config("stage1", "ironwood", []), "tpu7x", 64, 0.445)["flops_a_step"]
    a_second = {name: n / 128 / 3.05 for name, n in flops.items()}
    assert round(a_second["full causal"] / 1e12, 1) == 513.1
    assert round(100 * a_second["full causal"] / 1153.5e12, 1) == 44.5
    assert round(100 * a_second["window-correct"] / 1153.5e12, 1) == 43.4
    assert flops["OLMo-core"] / (512 * 8192) == pytest.approx(4.9377e10, rel=1e-5)


# -------------------------------------------------------------------------------------------- plan: what goes wrong


@pytest.mark.parametrize(
    ("topology", "more", "named"),
    [
        ("v4:2x2x1", (), "--topology: got 'v4:2x2x1', expected KIND:XxYxZ in chips, KIND one of v5p, tpu7x"),
        ("v5p:2x2", (), "--topology: got 'v5p:2x2'"),
        ("h100:2x2x2", (), "or KIND:N, KIND one of h100, h200, rtx4090"),
        ("h100:0", (), "--topology: got 'h100:0'"),
        ("h100:64", (), "--mfu: missing, expected the fraction of its peak at which a h100 works"),
        ("v5p:4x4x4", ("--set", "mesh.data=2"), "for 64 devices, expected sizes whose product is 64"),
        ("v5p:4x4x8", ("--mfu", "44.5"), "--mfu: got 44.5, expected a fraction"),
        ("v5p:4x4x8", ("--mfu", "nan"), "--mfu: got nan, expected a fraction"),
        ("v5p:99999999x9999999x99999999", (), "devices, expected sizes whose product is"),
    ],
)
def test_bad_plan_is_one_line(capsys, topology, more, named):
    """A mistake that shows only after the compiler has been started."""
    assert plan_tool.main([*PLAN, "v5p", "--topology", topology, *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("plan.py: error: ") and named in err


def test_where_a_plan_is_kept(capsys, monkeypatch, tmp_path):
    """Two compilers that dump into one folder; a folder called "~"; a file that is in the way shown as a traceback."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(plan_tool.importlib.util, "find_spec", lambda name: True)
    (tmp_path / "kept").mkdir()
    with sole_writer(tmp_path / "kept"):
        assert plan_tool.main(plan_arguments("v5p", "v5p:2x2x1", "--keep", "~/kept")) == 1
    assert f"{tmp_path / 'kept'}: is being written by process" in capsys.readouterr().err
    (tmp_path / "kept" / "there").touch()
    for name in ("kept", "kept/there"):
        assert plan_tool.main(plan_arguments("v5p", "v5p:2x2x1", "--keep", f"~/{name}")) == 2
        err = capsys.readouterr().err
        assert f"--keep: ~/{name} is there and not an empty folder" in err and err.count("\n") == 1


@pytest.mark.parametrize(("verb", "function"), [("collectives", "equations"), ("compile", "make_plan")])
def test_a_bug_of_ours_is_no_wrong_usage(monkeypatch, verb, function):
    """A mistake in this program that ends as one line and exit code 2, as if the user had made it."""
    compiled = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(plan_tool.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(plan_tool, "compiling", lambda args, folder: contextlib.nullcontext(compiled))
    monkeypatch.setattr(plan_tool, "wait_for_plan", lambda *args: None)
    monkeypatch.setattr(plan_tool, function, lambda *args: dict(zip("ab", "a", strict=True)))
    argv = [verb, "--config", "stage1.yaml", "--hardware", "v5p"]
    with pytest.raises(ValueError, match="zip"):
        plan_tool.main([*argv, *(("--devices", "512") if verb == "collectives" else ("--topology", "v5p:4x4x8"))])


def test_without_the_compiler(capsys, monkeypatch):
    """A traceback out of JAX's search for plug-ins."""
    monkeypatch.setattr(plan_tool.importlib.util, "find_spec", lambda name: None)
    assert plan_tool.main(plan_arguments("v5p", "v5p:2x2x1")) == 2
    assert "libtpu, the compiler: not installed; fix: pip install -r requirements-tpu.txt" in capsys.readouterr().err
    assert plan_tool.main(plan_arguments("h100", "h100:4", "--mfu", "0.4")) == 2
    assert "compiler: not installed; fix: pip install -r requirements-gpu.txt" in capsys.readouterr().err


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "sets", "code", "named"),
    [
        ("v5p:2x3x1", ["mesh.fsdp=2", "data.global_batch=12"], 2, "v5p:2x3x1, which the compiler refuses"),
        ("v5p:2x2x1", ["xla_flags={xla_tpu_no_such_flag: true}"], 1, "xla_tpu_no_such_flag"),
        ("v5p:2x2x1", ["splash.block=384"], 1, "384"),
    ],
    ids=["topology", "flag", "kernel"],
)
def test_what_the_compiler_refuses_is_one_line(capsys, topology, sets, code, named):
    """The reason lost in 600 lines of the compiler's log, or exit code 0 with a report of nothing."""
    assert plan_tool.main(plan_arguments("v5p", topology, sets=[*SMALL, *sets])) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("plan.py: error: ") and named in err


def test_reason_of_a_crash():
    """The last line of a stack dump instead of the check that failed."""
    log = "I1129 start\nF1129 22:55:35.1 77 a.cc:1] Check failed: x == y\nE1129 22:55 RAW: Raising signal 6\n"
    assert plan_tool.why_it_failed(log).endswith("a.cc:1] Check failed: x == y")
    assert plan_tool.why_it_failed(log + "plan.py: error: RuntimeError: no\n") == "RuntimeError: no"
    assert plan_tool.why_it_failed("") == "it printed nothing"


@needs_libtpu
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_child_ends_with_its_parent(tmp_path, sent):
    """A compiler that goes on for an hour on two cores after Ctrl-C, or after the parent was killed; files left."""
    env = os.environ | {"TMPDIR": str(tmp_path)}  # tempfile's
    command = [sys.executable, plan_tool.__file__, *plan_arguments("v5p", "v5p:2x2x1", "--full")]
    parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = None
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("plan_*/*jit_train_step*.before_optimizations.txt")):  # it is in the compiler, in C++
        assert parent.poll() is None and time.monotonic() < deadline, parent.communicate()
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        child = int(children[0]) if children else child
        time.sleep(0.05)
    parent.send_signal(sent)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[sent]
    assert "Traceback" not in err
    deadline = time.monotonic() + 5  # left alone it would go on for longer
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sent == signal.SIGKILL or not list(tmp_path.glob("plan_*"))
