"""launch.py: the collectives of a training step are these and no others, and the compiled program has the same."""

import json
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from jax import lax

import launch
import model
import train
from launch import Collective

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
        rows.append(row(where, "forward", "all-gather", axes, "bfloat16", (V // tensor, D // n), 1))
        rows.append(row(where, "backward", "reduce-scatter", axes, "float32", (V // tensor, D), 1))
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
    found = launch.collectives(train.load_config("stage1", "v5p", []), 512)
    data, fsdp, both = (("data", 4),), (("fsdp", 128),), (("data", 4), ("fsdp", 128))
    expected = [
        *weights(fsdp, tensor=1),
        summed(data, (V, D // 128), 2),  # embed lm_head
        summed(data, (L, D // 128, D), 4),  # wq wk wv wo
        summed(data, (L, D // 128, F), 3),  # w_gate w_up w_down
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
    assert over_fsdp == 127 * (8 * L * layer + 6 * 2 * V * D) // 128 == 56_297_259_008


def test_65536_tokens_over_context_and_tensor():
    """A halo of more than window - 1 keys (and one, to fill the kernel's tile), keys of a sliding layer gathered, queries exchanged whole, outputs exchanged
    again that were saved, a sum over tensor too many, statistics of QK-norm over one shard's heads."""
    sets = ["data.sequence_length=65536", "data.global_batch=64", "mesh={data: 1, fsdp: 16, context: 8, tensor: 2}"]
    found = launch.collectives(train.load_config("stage1", "v5p", sets), 256)
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
        summed((context,), (V // 2, D // 16), 2),
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
        c = train.load_config("stage1", "v5p", [f"data.global_batch={batch}", f"microbatch={microbatch}"])
        by_axes = defaultdict(Counter)
        for one in launch.collectives(c, devices):
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
    c = train.load_config(recipe, machine, sets)
    found = launch.collectives(c, devices)
    largest = max(math.prod(t.shape) for t in model.ledger(c.model).values()) / train.mesh_sizes(c, devices)["fsdp"]
    for one in found:
        if one.kind == "all-gather":
            assert one.dtype == "bfloat16" or one.dtype == "int32" and dict(one.axes).keys() == {"context"}
        if "data" in dict(one.axes):
            assert one.kind == "all-reduce" and one.where in ("reduce_gradients in gradients", "train_step")
        if one.kind == "all-reduce" and one.dtype == "float32":
            assert math.prod(one.shape) <= largest


def test_remat_all_gathers_weights_again():
    """Gathered weights that are saved with everything else: then all layers are whole at once."""
    c = train.load_config("stage1", "cpu", [*TINY])
    assert c.hardware.remat == "all"
    gathers = [one for one in launch.collectives(c, 8) if one.where == "layer in hidden_states"]
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
        ((2, 4, 1, 1), ["remat=[x, q, k, v, context, attn_out, ffn_out]"], {}),
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
    c = train.load_config("stage1", "cpu", [*TINY, *sets, f"mesh={json.dumps(mesh)}"])
    traced, more = Counter(), Counter()
    for one in launch.collectives(c, 8):
        groups = () if one.kind == "permute" else devices_over(mesh, dict(one.axes))
        traced[one.kind, one.dtype, math.prod(one.shape), groups] += one.times
    compiled = compiled_collectives(launch.trace_step(c, train.make_mesh(c)).lower().compile().as_text())
    assert not compiled - traced
    for (kind, _, elements, _), times in (traced - compiled).items():
        more[kind, elements] += times
    assert more == hoisted


# ------------------------------------------------------------------------------------------------ the command line


STAGE1 = ("collectives", "--config", "stage1.yaml", "--hardware", "v5p", "--devices")


def test_bytes():
    """A formula that is off by the number of devices, or by two."""
    got = [launch.bytes_sent(kind, 1000, 4) for kind in ("all-gather", "reduce-scatter", "all-reduce", "permute")]
    assert got == [3000, 750, 1500, 1000]
    assert launch.bytes_sent("all-reduce", 4, 512) == 8  # rounded up


def test_tables_and_json_say_the_same(capsys):
    """A total that leaves rows out, MB that are MiB, JSON that a program cannot read."""
    assert launch.main([*STAGE1, "512", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert launch.main([*STAGE1, "512"]) == 0
    out = capsys.readouterr().out
    assert "| layer in hidden_states | forward | all-gather | fsdp 128 | bfloat16 | 224 | 12,850.8 |" in out
    sums = [r for r in out.split("\n\n")[2].splitlines() if "---" not in r][1:]
    assert sum(int(r.split(" | ")[2].replace(",", "")) for r in sums) == sum(r["times"] for r in rows) == 702
    sent = sum(r["sent_a_step"] for r in rows)
    assert sent == sum(r["times"] * r["sent"] for r in rows) and f"a device sends {sent / 1e9:.1f} GB" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("0",), "--devices: got 0, expected a positive number"),
        (("3",), "'fsdp': 128, 'context': 1, 'tensor': 1} for 3 devices, expected sizes whose product is 3"),
        (("640",), "global batch: got 512, expected a multiple of data x fsdp = 640"),
        (("512", "--set", "model.d_modle=1"), "model.d_modle: unknown key; did you mean 'd_model'?"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, named):
    assert launch.main([*STAGE1, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("launch.py: error: ") and named in err


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
    with pytest.raises(train.RunFailed, match=re.escape(named)):
        launch.collectives(train.load_config("stage1", "cpu", list(TINY)), 8)
