"""evaluate.py: the number is the one that training printed, whatever the batch and the devices, token by token."""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import harness
import jax
import numpy as np
import pytest
from corpora import make_index, random_tokens
from harness import SEQUENCE, STEPS, VOCABULARY, use_devices
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import data
import evaluate
import model
import train
from checkpoint import check_same_run, open_model, read_meta, restore_item
from config import load_config, make_execution, make_mesh, param_shapes, param_specs
from heldout import EvaluationBatches, HeldOut
from metrics import MetricsLog, is_evaluation
from processes import HERE, sole_writer


@pytest.fixture
def verb(house, monkeypatch, capsys):
    """verb(name, *arguments) -> what `evaluate.py NAME ... --hardware cpu` prints, on one device of this process."""
    use_devices(monkeypatch, 1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the cache that the runs fill, too

    def call(*arguments, expect: int = 0):
        capsys.readouterr()
        cache = ("--set", f"compilation_cache={house.cache}")
        code = evaluate.main([*map(str, arguments), "--hardware", "cpu", *cache, "--json"])
        out, call.said = capsys.readouterr()
        assert code == expect, call.said
        return call.said if expect else json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    call.said = ""  # on standard error, at last
    yield call
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def loss(straight, verb):
    """loss(*arguments) -> what `evaluate.py loss RUN ...` prints."""
    return lambda *arguments, checkpoint=straight, expect=0: verb("loss", checkpoint, *arguments, expect=expect)


def forward_of(house, run_dir, step: int = STEPS):
    """tokens [N, S] -> float64 logits [N, S, V], dense, on one device."""
    config = load_config(str(house.config), "cpu", ["attention=dense"])
    mesh, specs = make_mesh(config), param_specs(config)
    params = restore_item(run_dir / "checkpoints" / str(step), "params", param_shapes(config, mesh))

    def logits(params, tokens):
        return model.logits(
            model.vary(params), model.vary(tokens), None, config.model, make_execution(config, 1, "cpu")
        )

    mapped = jax.shard_map(logits, mesh=mesh, in_specs=(specs, P()), out_specs=P(model.AXES), check_vma=False)
    forward = jax.jit(mapped)
    return lambda tokens: np.asarray(forward(params, tokens), np.float64)[:, :, :VOCABULARY]


def training_said(run_dir, step: int = STEPS) -> dict:
    rows = [r for r in harness.rows(run_dir) if r["step"] == step and is_evaluation(r)]
    assert len(rows) == 1
    return rows[0]


def test_the_number_that_training_printed(house, straight, loss):
    """Another mask, another forward pass, z-loss or padding: a held-out loss that is not comparable with the curve."""
    expected = training_said(straight)
    command = [sys.executable, str(HERE / "evaluate.py"), "loss", str(straight), "--json"]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    printed = json.loads(done.stdout)
    assert done.stderr == ""
    assert printed["step"] == STEPS
    for label in ("all", "web", "code"):
        assert printed["heldout"][label]["ce"] == expected[f"eval/lm/{label}/CE loss"]  # exactly
        assert printed["heldout"][label]["perplexity"] == expected[f"eval/lm/{label}/PPL"]
    assert loss(checkpoint=straight / "checkpoints" / "12")["step"] == 12
    assert loss("--set", "loss.z_loss=1.0")["heldout"] == loss()["heldout"]  # z-loss has no part in it


def test_every_token_counts_once(house, straight, loss):
    """Averages of averages, a last batch that is dropped or weighs too much, a label that is left out."""
    found = loss("--batch", "4")["heldout"]
    assert {label: r["instances"] for label, r in found.items()} == {"web": 9, "code": 6, "all": 15}
    for r in found.values():
        assert r["tokens"] == r["instances"] * (SEQUENCE - 1)
        assert r["perplexity"] == pytest.approx(np.exp(r["ce"]))
    # The same from the model's logits, one sequence at a time, in float64.
    forward = forward_of(house, straight)
    batches = EvaluationBatches(house.root / "heldout.json", None, batch=1)
    sums = {"web": [], "code": []}
    for batch, domain in zip(batches, batches.domain, strict=True):
        logits = forward(batch["tokens"])[0]
        log_z = np.log(np.exp(logits).sum(-1))
        nll = log_z[:-1] - logits[np.arange(SEQUENCE - 1), batch["tokens"][0, 1:]]
        sums[batches.domains[domain]].append(nll.sum())
    for label, instances in (("web", 9), ("code", 6)):
        assert found[label]["ce"] == pytest.approx(sum(sums[label]) / (instances * (SEQUENCE - 1)), rel=1e-6)
    everything = sum(sums["web"]) + sum(sums["code"])
    assert found["all"]["ce"] == pytest.approx(everything / (15 * (SEQUENCE - 1)), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 7, 16])
def test_independent_of_the_batch(loss, batch):
    """Rows of padding that count, or a batch that decides how instances are weighted."""
    expected, got = loss()["heldout"], loss("--batch", str(batch))["heldout"]
    for label in expected:
        assert got[label]["ce"] == pytest.approx(expected[label]["ce"], rel=1e-6)
        assert (got[label]["tokens"], got[label]["instances"]) == (
            expected[label]["tokens"], expected[label]["instances"]
        )  # fmt: skip


@pytest.mark.parametrize("mesh", ["fsdp: -1, tensor: 1, context: 1", "fsdp: 1, tensor: 2, context: -1"])
def test_independent_of_the_devices(loss, monkeypatch, mesh):
    """A row that two devices count, or none."""
    expected = loss()["heldout"]
    use_devices(monkeypatch, 4)
    got = loss("--set", f"mesh={{data: 1, {mesh}}}")["heldout"]
    for label in expected:
        assert got[label]["ce"] == pytest.approx(expected[label]["ce"], rel=1e-6)
        assert got[label]["tokens"] == expected[label]["tokens"]


def test_weighted_by_tokens(house, monkeypatch):
    """An average of averages: 100 tokens at 1.0 and 10 at 3.0 are a perplexity of 3.2603, not 7.389 or 11.40. The forward
    pass is replaced by those losses; what is left is how HeldOut adds up."""
    use_devices(monkeypatch, 1)
    config = load_config(str(house.config), "cpu", [])
    held_out = HeldOut(config, make_mesh(config), config.run.eval_index, None, 4, None, [])
    counts = iter([[10, 10, 10, 10], [10, 10, 10, 10], [10, 10, 0, 0], [0, 10, 0, 99]])  # the 16th row is padding

    def rows_of(params, batch):
        tokens = np.array(next(counts))
        last = not np.any(np.asarray(batch["loss_mask"])[3])  # only the last batch ends in padding
        return tokens * (3.0 if last else 1.0), tokens

    held_out.step = rows_of
    found = held_out(None)
    assert found["all"]["tokens"] == 110 and found["all"]["instances"] == 15
    assert found["all"]["perplexity"] == pytest.approx(3.2603, abs=1e-4)


def test_diverged_model_gives_null(loss, monkeypatch, recwarn):
    """NaN or Infinity in what should be JSON, and a warning about exp on the way."""
    call = HeldOut.__call__

    def diverged(self, *args, **how):
        tokens = np.ones(self.config.data.global_batch, int)
        self.step = lambda params, batch: (1e4 * tokens, tokens)
        return call(self, *args, **how)

    monkeypatch.setattr(HeldOut, "__call__", diverged)
    found = loss()["heldout"]
    assert found["all"] == {"ce": 1e4, "perplexity": None, "tokens": 15, "instances": 15}
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]


def test_limit_spreads_over_the_labels(house, straight, loss):
    """The first so many instances of a held-out set are all from its first file."""
    limited = loss("--set", "run.eval_batches=1", "--set", "data.global_batch=8")["heldout"]
    assert limited["all"]["instances"] == 8 and 0 < limited["code"]["instances"] < 6
    whole = loss("--set", "run.eval_batches=1", "--index", str(house.root / "heldout.json"))["heldout"]
    assert whole["all"]["instances"] == 15  # an index of one's own is read whole


def test_what_cannot_be_evaluated(house, straight, loss, tmp_path):
    """A wrong checkpoint, index or batch that gives a number all the same, or a traceback."""
    assert "no checkpoint found" in loss(checkpoint=tmp_path, expect=2)
    assert "--batch: got 0, expected a positive number" in loss("--batch", "0", expect=2)
    assert "got no such file, expected an index" in loss("--index", "nowhere.json", expect=2)
    assert "params: w_down: got ((4, 32, 40)" in loss("--set", "model.d_ff=48", expect=2)
    damaged = tmp_path / "damaged"
    shutil.copytree(straight, damaged)
    largest = max((damaged / "checkpoints" / "16" / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x10
    largest.write_bytes(content)
    (damaged / "checkpoints" / "12" / "meta" / "metadata").write_text("{")
    shutil.rmtree(damaged / "checkpoints" / "8" / "params")
    for step in (16, 12):
        err = loss(checkpoint=damaged / "checkpoints" / str(step), expect=1)
        # What tensorstore prints from C++ of reads in flight beside the damaged leaf is not ours to catch.
        assert f"checkpoints/{step}: " in err and ("Traceback" not in err or "Event loop is closed" in err)
    assert "no checkpoint found" in loss(checkpoint=damaged / "checkpoints" / "8", expect=2)


# ------------------------------------------------------------------------------------------------------------ perplexity

LENGTHS = (1, 5, 31, 32, 33, 103)  # tokens of documents: 103 = 3 * 32 + 7


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """(index, {label: document}): every document is a file and a label. An EOS ends it; but one file begins with two,
    which end documents of no token, and has none at its end."""
    root, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    texts = {f"of{n}": rng.integers(1, VOCABULARY, n) for n in LENGTHS}
    for label, x in texts.items():
        np.array([0, 0, *x] if label == "of103" else [*x, 0], np.uint32).tofile(root / f"{label}.npy")
    letters().save(str(root / "letters.json"))
    files = [(label, root / f"{label}.npy") for label in texts]
    for name, order in (("index", files), ("backwards", files[::-1])):
        index = data.build_index(order, root, 32, tokenizer="letters.json", vocab_size=VOCABULARY, eos_id=0)
        data.write_index(index, root / f"{name}.json")
    return root / "index.json", texts


def letters() -> Tokenizer:
    """Byte-level tokens 1..96 of one to three bytes; 0 is EOS. There is no room for all 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {alphabet[i] * (1 + i % 3): i for i in range(1, VOCABULARY)} | {data.EOS: 0}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([data.EOS])
    return tokenizer


def rolling_windows(x: np.ndarray, W: int):
    """(tokens given, tokens scored) of each window as lm-evaluation-harness has them: a prefix token in front of x; full
    windows, the last one moved back until it is full."""
    whole, begin = [0, *x], 0
    while begin < len(x):
        end = min(begin + W, len(x))
        yield whole[max(0, end - W) : end], list(x[begin:end])
        begin = end


def place_of(x: list, tokens: list, labels: list) -> int:
    """Where in x (x0 is EOS) the tokens stand, if the labels follow them."""
    n = len(tokens)
    places = [b for b in range(len(x) - n) if x[b : b + n] == tokens and x[b + 1 : b + n + 1] == labels]
    assert len(places) == 1, (tokens, labels)
    return places[0]


@pytest.mark.parametrize("window, stride", [(32, 32), (32, 8), (16, 5), (8, 1), (64, 64), (128, 1)])
def test_windows(documents, window, stride):
    """A token that two windows score, or none; a window that begins too late, or with what is not in its document."""
    index, texts = documents
    windows = evaluate.Windows(EvaluationBatches(index, None, 3).source, "documents", window, stride, unit=4)
    domains, seen = iter(windows.domain), {label: [] for label in texts}  # (place of a scored token, tokens before it)
    pairs = {label: [] for label in texts}
    for batch in windows:
        for tokens, labels, mask in zip(*(batch[k].tolist() for k in ("tokens", "labels", "loss_mask")), strict=True):
            if (domain := next(domains)) < 0:
                assert not any(mask)
                continue
            label, at = windows.domains[domain], np.flatnonzero(mask)
            n = at[-1] + 1
            begin = place_of([0, *texts[label]], tokens[:n], labels[:n])
            seen[label] += [(begin + i + 1, i + 1) for i in at]
            pairs[label].append((begin + n, (tokens[:n], labels[at[0] : n])))
    for label, x in texts.items():
        assert [place for place, _ in sorted(seen[label])] == list(range(1, len(x) + 1))
        assert all(given >= min(place, window - stride + 1) for place, given in seen[label])
        if stride == window:
            assert [pair for _, pair in sorted(pairs[label])] == list(rolling_windows(x.tolist(), window))


def test_stream(documents):
    """By stream every token of a file is scored, its EOS too; windows do not look beyond the file."""
    index, texts = documents
    windows = evaluate.Windows(EvaluationBatches(index, None, 4).source, "stream", 32, 12, unit=1000)
    scored = {label: [] for label in texts}
    for (_, rows), batch in zip(windows.batches, windows, strict=True):
        for window, labels, mask in zip(rows, batch["labels"], batch["loss_mask"], strict=True):
            scored[list(texts)[window.file]] += labels[mask].tolist()
    for label, x in texts.items():
        assert scored[label] == ([0, 0, *x] if label == "of103" else [*x, 0])


def test_label_masks_hold_for_instances_alone(straight, verb, tmp_path):
    """A loss of whole documents that counts what the mask leaves out."""
    (tmp_path / "chat").mkdir()
    np.ones(5 * SEQUENCE, bool).tofile(tmp_path / "chat/labels_mask_part.npy")
    index = make_index(tmp_path, {"chat/part.npy": random_tokens(5 * SEQUENCE)}, sequence_length=SEQUENCE)
    for cut in ("documents", "stream"):
        said = verb("perplexity", straight, "--index", index, "--cut", cut, "--no-record", expect=2)
        assert f"--cut {cut}: {index} has label masks, which hold for instances; fix: --cut instances" in said


def test_documents_one_by_one(house, documents, straight, verb, monkeypatch):
    """The loss of a document against the model's own logits, window by window, and its bits by its bytes."""
    index, texts = documents
    monkeypatch.setattr(evaluate, "bytes_fault", lambda tokenizer: None)  # letters() has not all of the bytes
    found = verb("perplexity", straight, "--index", index, "--cut", "documents", "--no-record")["evaluations"][0][
        "heldout"
    ]
    windows = [(label, *pair) for label, x in texts.items() for pair in rolling_windows(x.tolist(), SEQUENCE)]
    tokens = np.zeros((len(windows), SEQUENCE), np.int32)
    for row, (_, given, _) in zip(tokens, windows, strict=True):
        row[: len(given)] = given
    nats = dict.fromkeys(texts, 0.0)
    for logits, (label, given, scored) in zip(forward_of(house, straight)(tokens), windows, strict=True):
        for t, token in enumerate(scored, start=len(given) - len(scored)):
            nats[label] += np.log(np.exp(logits[t]).sum()) - logits[t, token]
    sizes = {label: sum(1 + i % 3 for i in x.tolist()) for label, x in texts.items()}
    nats["all"], sizes["all"] = sum(nats.values()), sum(sizes.values())
    assert found.keys() == nats.keys()
    for label, r in found.items():
        assert r["tokens"] == (sum(LENGTHS) if label == "all" else len(texts[label])) and r["bytes"] == sizes[label]
        assert r["ce"] == pytest.approx(nats[label] / r["tokens"], rel=1e-5)
        assert r["bits_per_byte"] == pytest.approx(nats[label] / math.log(2) / sizes[label], rel=1e-5)


def test_independent_of_batch_order_and_padding(documents, straight, verb, monkeypatch):
    """Padding that is scored or attended to, or results that depend on what else is evaluated."""
    index = documents[0]

    def nats(*arguments, index=index):
        command = ("perplexity", straight, "--index", index, "--cut", "documents", "--no-record", *arguments)
        return {label: r["ce"] * r["tokens"] for label, r in verb(*command)["evaluations"][0]["heldout"].items()}

    expected = nats("--stride", 8)
    assert nats("--stride", 8, "--batch", 5, index=index.with_name("backwards.json")) == pytest.approx(
        expected, abs=1e-4
    )
    longer = nats("--window", 112, "--batch", 1)  # one window for every document, in longer rows
    for label in ("of1", "of5", "of31", "of32"):
        assert longer[label] == pytest.approx(expected[label], abs=1e-4)
    use_devices(monkeypatch, 4)
    mesh = ("--set", "mesh={data: 1, fsdp: 2, context: 2, tensor: 1}")
    assert nats("--stride", 8, *mesh) == pytest.approx(expected, abs=1e-4)


def test_uniform_model(documents, straight, monkeypatch):
    """A document of 3 W + 7 tokens is -(3 W + 7) ln V, not that of what fits into a window."""
    use_devices(monkeypatch, 1)
    index, texts = documents
    args = argparse.Namespace(hardware="cpu", set=[], batch=2, index=[str(index)], cut="documents", window=None, stride=4,
                              data_root=None, tokenizer=None, on_training_data=False)  # fmt: skip
    folder = straight / "checkpoints" / str(STEPS)
    evaluation = evaluate.Perplexity(args, *evaluate.resolve(args, folder), folder)
    params = restore_item(folder, "params", param_shapes(evaluation.held_out.config, evaluation.mesh))
    found = evaluation(params | {"lm_head": 0 * params["lm_head"]})
    for label, x in texts.items():
        assert found[label]["ce"] * found[label]["tokens"] == pytest.approx(len(x) * math.log(VOCABULARY), rel=1e-6)


def test_no_bits_per_byte_without_a_proof(verb, tmp_path):
    """A number that is wrong, or one that is absent without a word."""
    run = harness.text_checkpoint(tmp_path / "model")
    changes = data.load_tokenizer(tmp_path / "model" / "tokenizer.json")
    changes.normalizer = normalizers.NFKC()
    changes.save(str(tmp_path / "changes.json"))
    index = tmp_path / "model" / "train.json"
    command = ("perplexity", run, "--no-record", "--cut", "documents", "--batch", 8, "--on-training-data", "--index")
    kept = verb(*command, index)["evaluations"][0]["heldout"]["all"]
    assert kept["bytes"] == len((HERE / "README.md").read_bytes())
    assert kept["bits_per_byte"] == pytest.approx(kept["ce"] * kept["tokens"] / math.log(2) / kept["bytes"])
    named = reindexed(index, "named.json", tokenizer="a-name")
    found = verb(*command, named, "--tokenizer", tmp_path / "changes.json")["evaluations"][0]["heldout"]["all"]
    assert found == kept | {"bits_per_byte": None, "bytes": None}
    assert "bits per byte are left out" in verb.said and "its normalizer (NFKC) changes the text" in verb.said
    assert verb(*command, named, "--tokenizer", tmp_path / "model")["evaluations"][0]["heldout"]["all"] == kept
    err = verb(*command, index, "--tokenizer", tmp_path / "changes.json", expect=2)
    assert "expected the one that" in err and "was made with" in err


def test_steps_and_record(house, straight, verb, tmp_path, monkeypatch):
    """Evaluations that are lost, or shown twice, when they are made again or when the run goes on; a record that mixes
    two settings; or one that disturbs what a resumed run compares."""
    run = tmp_path / "a b[1]#2%ü*?"
    shutil.copytree(straight, run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "checkpoints" not in p.parts}
    found = verb("perplexity", run, "--steps", "8,latest")
    assert [e["step"] for e in found["evaluations"]] == [8, STEPS]
    assert found["evaluations"][0]["heldout"]["web"]["bits_per_byte"] is None  # its index names no tokenizer
    assert {p: p.read_bytes() for p in before} == before
    expected = training_said(straight)
    assert found["evaluations"][1]["heldout"]["web"]["ce"] == expected["eval/lm/web/CE loss"]  # exactly
    shutil.copytree(run / "checkpoints" / "12", run / "checkpoints" / "13")  # another checkpoint, the same parameters
    with monkeypatch.context() as m:
        m.setattr(evaluate.Perplexity, "__call__", lambda self, params: pytest.fail("evaluated again"))
        again = verb("perplexity", run, "--steps", f"8,{STEPS}")
    assert again["evaluations"] == found["evaluations"]
    shutil.rmtree(run / "checkpoints" / "13")
    everything = verb("perplexity", run, "--steps", "all")["evaluations"]
    assert [e["step"] for e in everything] == [4, 8, 12, STEPS]
    assert json.loads((run / "evaluations" / "heldout-instances.json").read_text())["evaluations"] == everything
    MetricsLog(run, 8, run).close()  # what a run does that goes on at step 8
    shown = harness.board(run, "heldout-instances")
    assert shown["eval/lm/web/CE loss"] == shown["eval/lm/all/PPL"] == [4, 8, 12, STEPS]
    assert "expected latest, all or some of [4, 8, 12, 16]" in verb("perplexity", run, "--steps", "5", expect=2)
    assert "expected a run directory" in verb("perplexity", run / "checkpoints" / "8", "--steps", "8", expect=2)
    plain = verb("perplexity", run, "--name", "half", "--set", "model.compute_dtype=bfloat16")["settings"]
    assert plain["model_overrides"] == {"compute_dtype": "bfloat16"}
    other = ("--cut", "documents", "--name", "heldout-instances")
    assert "cut: got documents, expected instances" in verb("perplexity", run, *other, expect=2)
    assert "--stride: got 33, expected 1 to the window" in verb(
        "perplexity", run, "--cut", "stream", "--stride", 33, expect=2
    )
    assert "expected every index once" in verb(
        "perplexity", run, *2 * ("--index", house.root / "heldout.json"), expect=2
    )


def test_several_indexes(house, straight, documents, verb):
    """Labels of two indexes: each as by itself, and one that both have is one label."""
    held_out, training = house.root / "heldout.json", house.root / "train.json"
    both = [verb("perplexity", straight, "--no-record", "--on-training-data", *indexes)["evaluations"][0]["heldout"] for indexes in (
        ("--index", held_out), ("--index", training), ("--index", held_out, "--index", training))]  # fmt: skip
    for label in ("web", "code", "all"):
        parts = [(r[label]["ce"] * r[label]["tokens"], r[label]["tokens"]) for r in both[:2]]
        assert both[2][label]["tokens"] == parts[0][1] + parts[1][1]
        assert both[2][label]["ce"] == pytest.approx((parts[0][0] + parts[1][0]) / both[2][label]["tokens"])


def test_label_all_is_refused(documents, house):
    """A label of that name would be overwritten by the sum of all."""
    index = documents[0]
    config = load_config(str(house.config), "cpu", [])
    named = data.build_index([("all", index.with_name("of103.npy"))], index.parent, 32, tokenizer="none", vocab_size=97,
                             eos_id=0)  # fmt: skip
    data.write_index(named, index.with_name("all.json"))
    with pytest.raises(ValueError, match="got the label 'all'"):
        HeldOut(config, make_mesh(config), str(index.with_name("all.json")), None, 8, None, [])


# -------------------------------------------------------------------------------------------------------- token-level KL


def kl64(p: np.ndarray, q: np.ndarray) -> tuple:
    """KL(p||q) and KL(q||p) of logits [.., V], in float64."""
    p, q = (x - x.max(-1, keepdims=True) for x in (np.asarray(p, np.float64), np.asarray(q, np.float64)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1), (np.exp(q) * (q - p)).sum(-1)


@functools.cache
def streamed(tensor: int, vocab_size: int):
    auto = (jax.sharding.AxisType.Auto,) * 4
    mesh = jax.make_mesh((1, 1, 1, tensor), model.AXES, devices=jax.devices()[:tensor], axis_types=auto)
    specs = {"in_specs": (P(), P(), P("tensor"), P("tensor")), "out_specs": P(None, model.AXES)}
    return jax.jit(jax.shard_map(lambda *x: evaluate.divergence(*model.vary(x), vocab_size), mesh=mesh, **specs))


def divergence(a, b, tensor: int, vocab_size: int) -> np.ndarray:
    """evaluate.divergence of logits [N, V] over so many devices: the hidden state of a token is its logits, and the
    output matrix the identity."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    head = np.eye(a.shape[1], dtype=np.float32)
    return np.asarray(streamed(tensor, vocab_size)(a, b, head, head))[:, : len(a)]


def test_kl_of_known_numbers():
    """NaN where both have no chance, the two directions confused, a negative distance."""
    inf = float("inf")

    def kl(a, b):
        p, q = (np.asarray(x, np.float32) - np.float32(np.log(np.exp(x).sum())) for x in (a, b))
        return [float(np.sum(evaluate.kl_terms(*pair))) for pair in ((p, q), (q, p))]

    assert kl([1.0, 2.0, -inf], [1.5, 1.0, -inf])[0] == pytest.approx(0.257403, abs=1e-6)
    assert kl([0.0, 0, 0], [1.0, 0, 0]) == pytest.approx([0.119499, 0.123285], abs=1e-6)
    assert kl([0.0, 0, -inf], [0.0, 0, 0]) == pytest.approx([np.log(1.5), inf])
    assert kl([0.0, -200], [-200, 0.0]) == pytest.approx([200, 200])
    r = np.geomspace(1e-9, 0.9, 1000).astype(np.float32)
    assert np.all(np.asarray(evaluate.kl_terms(np.zeros_like(r), r)) >= 0)
    assert np.all(np.asarray(evaluate.kl_terms(np.zeros_like(r), -r)) >= 0)
    masked = divergence([[1.0, 2.0, 9.0, 9.0]], [[1.5, 1.0, 7.0, 9.0]], 1, vocab_size=2)[:, 0]
    assert masked == pytest.approx([0.257403, kl64([1, 2], [1.5, 1])[1], 0], abs=1e-6)


@pytest.mark.parametrize("size", [3.0, 1e-2, 1e-4, 0.0])
def test_kl_streams(monkeypatch, size):
    """A block of the vocabulary that is left out, padding that is a token, a best token of the wrong block; and nearly
    equal models, whose KL drowns in the rounding of a logsumexp when it is added up as p log(p/q)."""
    monkeypatch.setattr(evaluate, "VOCABULARY_ROWS", 8)
    rng = np.random.default_rng(0)
    a = rng.normal(0, 3, (7, 128)).astype(np.float32)
    b = a + rng.normal(0, size, a.shape).astype(np.float32)
    for tensor in (1, 8):  # of eight devices the last holds padding alone
        got = divergence(a, b, tensor, vocab_size=VOCABULARY)
        for ours, theirs in zip(got, kl64(a[:, :VOCABULARY], b[:, :VOCABULARY]), strict=False):
            assert ours == pytest.approx(theirs, rel=2e-3 if size < 1 else 1e-5, abs=1e-15)
        assert (got[2] == (a[:, :97].argmax(1) == b[:, :97].argmax(1))).all()
        assert (got[:2] >= 0).all() and (size > 0 or (got[:2] == 0).all())


def test_kl_between_checkpoints(house, straight, verb):
    """Direction, labels and masks, against the models' own logits in float64; the same model is at exactly 0, and further
    away in another precision."""
    earlier = straight / "checkpoints" / "8"
    found = verb("kl", straight, earlier)
    forward = [forward_of(house, straight, step) for step in (STEPS, 8)]
    batches = EvaluationBatches(house.root / "heldout.json", None, batch=15)
    (batch,) = list(batches)
    a, b = (f(batch["tokens"])[:, :-1] for f in forward)  # the last position has no label
    expected = [*kl64(a, b), a.argmax(-1) == b.argmax(-1)]
    for i, label in enumerate([*batches.domains, "all"]):
        rows = batches.domain == i if label != "all" else slice(None)
        for name, value in zip(("kl", "kl_reversed", "top1_agreement"), expected, strict=True):
            assert found["heldout"][label][name] == pytest.approx(value[rows].mean(), rel=1e-4)
    assert found["heldout"]["all"]["tokens"] == 15 * (SEQUENCE - 1)
    floor = found["noise_floor"]["heldout"]["all"]["kl"]
    assert 1e-8 < floor < 1e-3 and found["times_the_floor"] == pytest.approx(found["heldout"]["all"]["kl"] / floor)
    itself = verb("kl", straight, straight, "--noise-floor", "none", "--limit", 8)
    assert itself["heldout"]["all"] == {"kl": 0, "kl_reversed": 0, "top1_agreement": 1, "tokens": 8 * 31}


@pytest.mark.slow
def test_kl_on_several_devices(straight, verb, monkeypatch):
    """Rows, positions or parts of the vocabulary that two devices count, or none."""
    command = ("kl", straight, straight / "checkpoints" / "8", "--noise-floor", "none")
    expected = verb(*command)["heldout"]
    use_devices(monkeypatch, 8)
    several = verb(*command, "--set", "mesh={data: 1, fsdp: 2, context: 2, tensor: 2}")["heldout"]
    for label in expected:
        assert several[label] == pytest.approx(expected[label], rel=1e-4)


def test_kl_of_two_vocabularies(straight, verb, tmp_path):
    """Tokens that are compared although an id is another token, or no token, in the other model."""
    other = tmp_path / "other"
    shutil.copytree(straight / "checkpoints" / "8", other / "checkpoints" / "8")
    meta = other / "checkpoints" / "8" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    content["config"]["model"]["vocab_size"] = 96
    meta.write_text(json.dumps(content))
    assert "got a vocabulary of 96, expected 97" in verb("kl", straight, other, expect=2)
    content["config"]["model"]["vocab_size"] = 97
    meta.write_text(json.dumps(content))
    mine = tmp_path / "mine"
    shutil.copytree(straight / "checkpoints" / str(STEPS), mine / "checkpoints" / str(STEPS))
    for run in (mine, other):
        (run / "hf").mkdir()
        letters().save(str(run / "hf" / "tokenizer.json"))
    text = (other / "hf" / "tokenizer.json").read_text()
    swapped = text.replace(": 5,", ": 0x5,").replace(": 6,", ": 5,").replace(": 0x5,", ": 6,")
    assert swapped != text
    (other / "hf" / "tokenizer.json").write_text(swapped)
    assert "2 tokens differ" in verb("kl", mine, other, expect=2)


def test_a_hugging_face_folder_is_sent_to_the_converter(straight, verb, tmp_path):
    """Weights that are compared without their names and layout being checked, or an error that does not say what to do."""
    (tmp_path / "config.json").write_text("{}")
    assert f"fix: python convert.py from-hf {tmp_path} RUN" in verb("kl", straight, tmp_path, expect=2)


@pytest.mark.parametrize("old, new", [
    ("sample", "python sample.py"), ("lm-eval", "python tools/lm_eval_adapter.py"), ("report", "python tools/report.py"),
    ("lm-eval-data", "python tools/lm_eval_data.py"),
])  # fmt: skip
def test_verbs_that_have_moved(old, new, capsys):
    """An old command line that ends in a usage text, from which nobody learns where the verb is now."""
    with pytest.raises(SystemExit, match="2"):
        evaluate.main([old, "runs/quickstart", "--prompt", "x"])
    err = capsys.readouterr().err
    assert f"has moved; fix: {new}" in err and err.count("\n") == 1 and (HERE / new.split()[1]).is_file()


# ------------------------------------------------------------------------------------------------- what a number is of


def reindexed(index: str, name: str, files=None, **words) -> str:
    """The token files of an index, or some others, under another name, with another tokenizer, vocabulary or EOS."""
    old, path = data.load_index(index), pathlib.Path(index).with_name(name)
    files = files or [(f.label, path.parent / f.path) for f in old.files]
    words = {"tokenizer": old.tokenizer, "vocab_size": old.vocab_size, "eos_id": old.eos_id} | words
    data.write_index(data.build_index(files, path.parent, old.sequence_length, **words), path)
    return str(path)


@pytest.mark.parametrize(
    "words, fault",
    [
        ({"tokenizer": "another"}, "tokenizer: got another, expected none as in the training data"),
        ({"vocab_size": 96}, "vocab_size: got 96, expected 97"),
        ({"eos_id": 5}, "eos_id: got 5, expected 0"),
    ],
)
def test_held_out_text_of_another_tokenizer(house, straight, verb, words, fault, tmp_path, capsys):
    """A loss on ids that stand for other words than those that were trained on."""
    other = reindexed(house.root / "heldout.json", "other.json", **words)
    for command in (("loss", straight), ("perplexity", straight, "--no-record"), ("kl", straight, straight)):
        assert fault in verb(*command, "--index", other, expect=2)
    assert train.main([*house.argv(tmp_path / "run", f"run.eval_index={other}"), "--dry-run"]) == 2
    assert fault in capsys.readouterr().err
    assert train.main(house.argv(tmp_path / "run", f"run.eval_index={other}")) == 2
    assert fault in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_name_says_nothing_about_a_file(house, loss, verb):
    """A tokenizer that nobody could compare, which is taken for the same one, or for another."""
    letters().save(str(house.root / "letters.json"))
    for name in ("letters.json", "moved/letters.json"):  # there, and not there
        loss("--index", reindexed(house.root / "heldout.json", "file.json", tokenizer=name))
        assert "too little is known" in verb.said
        assert verb.said.strip().endswith(": tokenizer")  # of vocabulary and EOS enough is


def test_training_data_is_not_held_out(house, straight, verb, tmp_path, capsys, monkeypatch):
    """A loss on what was trained on that is called held-out: the index of the run, or another with one of its files, also
    where the run's own index is not there any more."""
    index = house.root / "train.json"
    web, code = (index.parent / f.path for f in data.load_index(index).files)
    held_out = [("web", index.parent / data.load_index(house.root / "heldout.json").files[0].path)]
    mixed = reindexed(index, "mixed.json", [("elsewhere", web), *held_out])
    itself = ("kl", straight, straight, "--limit", 8, "--noise-floor", "none")
    commands = [("loss", straight), ("perplexity", straight, "--no-record"), itself]
    for path, n, of in ((index, 2, 2), (mixed, 1, 2)):
        for command in commands:
            err = verb(*command, "--index", path, expect=2)
            assert f"{n} of {of} files are data that the model was trained on" in err and "--on-training-data" in err
        assert train.main(house.argv(tmp_path / "run", f"run.eval_index={path}")) == 2
        err = capsys.readouterr().err
        assert (
            f"{n} of {of} files are data" in err and "--on-training-data" not in err and not (tmp_path / "run").exists()
        )
        assert verb(*commands[0], "--index", path, "--on-training-data")["of"]["trained_on_files"] == n
    alone = tmp_path / "alone"  # nothing but the checkpoint, and an index that says where the files are
    shutil.copytree(straight / "checkpoints" / "16", alone / "checkpoints" / "16")
    meta = alone / "checkpoints" / "16" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace(str(index), str(tmp_path / "gone.json")))
    assert "2 of 2 files are data" in verb("loss", alone, "--index", index, expect=2)


def test_results_say_what_they_are_of(house, straight, verb, documents):
    """Numbers of which nobody can tell later on what text, and in what tokens."""
    index = house.root / "heldout.json"
    of = {"index": str(index), "fingerprint": data.load_index(index).fingerprint, "tokenizer": "none", "vocab_size": 97,
          "eos_id": 0, "files": 2, "labels": ["code", "web"], "instances": 15}  # fmt: skip
    assert json.loads((straight / "summary.json").read_text())["heldout_of"] == of
    assert verb("loss", straight)["of"] == of
    assert verb("kl", straight, straight, "--noise-floor", "none", "--limit", 8)["of"] == of | {"instances": 8}
    assert verb("perplexity", straight, "--no-record")["of"] == [of]
    found = verb("perplexity", straight, "--no-record", "--index", documents[0], "--cut", "documents")["of"][0]
    assert found["tokenizer"].startswith("sha256:") and "instances" not in found  # whole files


def test_checkpoints_that_do_not_say_what_they_were_trained_on(house, straight, verb, tmp_path, capsys):
    """Older checkpoints, which are refused, or taken at their word without one."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    meta = run / "checkpoints" / "16" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    del content["data"]["vocabulary"]
    meta.write_text(json.dumps(content))
    other = reindexed(house.root / "heldout.json", "eos.json", eos_id=5)
    assert "eos_id: got 5, expected 0" in verb("loss", run, "--index", other, expect=2)  # the run's index says it
    assert train.main(house.argv(run, "run.steps=17", f"run.eval_index={other}")) == 2
    assert "eos_id: got 5, expected 0" in capsys.readouterr().err
    meta.write_text(json.dumps(content).replace("train.json", "gone.json"))
    found = verb("loss", run, "--index", other)
    assert "too little is known" in verb.said and verb.said.strip().endswith(": tokenizer, vocab_size, eos_id")
    assert found["heldout"] == verb("loss", straight)["heldout"]
    meta.write_text(json.dumps(content))
    half = reindexed(house.root / "heldout.json", "half.json", [("web", house.root / "heldout/web/part-00000.npy")])
    assert train.main(house.argv(run, "run.steps=17", f"run.eval_index={half}")) == 0
    err = capsys.readouterr().err
    assert "does not say which tokenizer and EOS" in err and "the held-out data changes from sha256:" in err
    assert read_meta(run / "checkpoints" / "17")["data"]["vocabulary"]["eos_id"] == 0


def test_resume_with_another_vocabulary(house, straight, capsys):
    """The same ids, whose documents end elsewhere from now on; a run of weeks that ends because a file beside its data has
    gone."""
    folder, config = straight / "checkpoints" / str(STEPS), load_config(str(house.config), "cpu", [])
    meta = read_meta(folder)
    for key, now in (("eos_id", 5), ("vocab_size", 98)):
        other = meta["data"] | {"vocabulary": meta["data"]["vocabulary"] | {key: now}}
        with pytest.raises(ValueError, match=f"data.{key}: got {now}, expected"):
            check_same_run(meta, config, other, folder, [])
    other = meta["data"] | {"vocabulary": meta["data"]["vocabulary"] | {"tokenizer": "gone.json"}}
    check_same_run(meta, config, other, folder, [])
    assert "tokenizer beside the data changes from none to gone.json" in capsys.readouterr().err


def test_another_tokenizer_in_the_next_stage(house, straight, monkeypatch, capsys):
    """A model that goes on with ids that stand for other words, without a word."""
    config = load_config(str(house.config), "cpu", [])
    known = {"tokenizer": "none", "vocab_size": 97, "eos_id": 0}

    class FarEnough(Exception):
        """The parameters are about to be read: all that is said has been said."""

    def end(*_):
        raise FarEnough

    monkeypatch.setattr(train, "restore_item", end)
    for vocabulary, said in (
        (known, ""),
        (known | {"tokenizer": "other", "eos_id": 5}, "tokenizer is none, here it is other"),
    ):
        with pytest.raises(FarEnough):
            train.initial_state(config, make_mesh(config), str(straight), "params", vocabulary)
        err = capsys.readouterr().err
        assert said in err and ("eos_id is 0, here it is 5" in err) == bool(said) == ("WARNING" in err)


# --------------------------------------------------------------------------------------------- wrong use, and by whom


@pytest.mark.parametrize("number", ["0", "-1", str(2**31), str(10**30)])
def test_numbers_that_are_none(straight, verb, number):
    """A number that is taken for "not given", or ends in a traceback or with the memory."""
    flags = {"loss": ["--batch"], "perplexity": ["--batch", "--window", "--stride"], "kl": ["--batch", "--limit"],
             }  # fmt: skip
    for name, of_verb in flags.items():
        for flag in of_verb:
            cut = ("--cut", "stream") if flag in ("--window", "--stride") else ()
            both = (straight, straight) if name == "kl" else (straight,)
            assert f"{flag}: got {number}, expected" in verb(name, *both, flag, number, *cut, expect=2)
    assert "got --cut instances, expected" in verb("perplexity", straight, "--window", number, expect=2)


def test_more_than_there_is(straight, verb, monkeypatch):
    """Memory for rows that nothing can fill."""
    assert "--batch: got 100000000 rows of 32 tokens at once" in verb("loss", straight, "--batch", 10**8, expect=2)
    with monkeypatch.context() as m:
        m.setattr(os, "sysconf", lambda name: 100_000)  # 10 GB
        assert "--batch: got numbers that need 10.88 GB" in verb("loss", straight, "--batch", 20_000_000, expect=2)
    stream = ("--cut", "stream", "--window", 1024)
    assert "--window: got 1024, expected at most 512: no text there is longer" in verb(
        "perplexity", straight, *stream, expect=2
    )


def test_wrong_use_ends_where_the_work_begins(straight, verb, monkeypatch):
    """A bug of ours that looks like wrong usage, without a traceback, and that a launcher does not try again."""

    def bug(self, params, batch):
        return np.concatenate([])

    monkeypatch.setattr(HeldOut, "compile", lambda self, *_, **__: functools.partial(bug, self))
    for command in (("loss", straight), ("perplexity", straight, "--no-record"), ("kl", straight, straight)):
        with pytest.raises(ValueError, match="need at least one array"):
            verb(*command)


def test_what_another_is_writing(straight, verb, tmp_path, monkeypatch):
    """Two at once that write one record, of which one is lost."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    verb("perplexity", run, "--steps", "8")
    record = run / "evaluations" / "heldout-instances.json"
    with sole_writer(record):
        before = record.read_bytes()
        assert f"{record}: is being written by process {os.getpid()}" in verb("perplexity", run, expect=1)
        assert record.read_bytes() == before

    @contextlib.contextmanager
    def after_another(self):  # the other one adds a step between the checks and the work
        other = evaluate.Record(run, record.stem, json.loads(before)["settings"], [])
        other.add(other.by_step[8] | {"step": 4})
        with alone(self):
            yield

    alone = evaluate.Record.alone
    monkeypatch.setattr(evaluate.Record, "alone", after_another)
    verb("perplexity", run)
    assert [e["step"] for e in json.loads(record.read_text())["evaluations"]] == [4, 8, STEPS]


def test_nothing_is_written_into_what_was_trained(straight):
    """A --set that changes what the checkpoint says it was trained with, and with it what is looked up by it."""
    overrides = ["model.compute_dtype=bfloat16", "data.index=elsewhere", "schedule.0.warmup_steps=1"]
    args = argparse.Namespace(hardware="cpu", set=overrides, batch=None)
    meta, config, _ = evaluate.resolve(args, straight / "checkpoints" / str(STEPS))
    opened = open_model(str(straight), "cpu", ["model.compute_dtype=bfloat16"])
    assert config.data.index == "elsewhere" and opened.config.model.compute_dtype == "bfloat16"
    assert meta == opened.meta == read_meta(straight / "checkpoints" / str(STEPS))


def test_one_row_that_is_no_number(house, straight, verb, loss, monkeypatch):
    """A NaN that vanishes from a mean, or a model of NaN that agrees with itself."""
    step = HeldOut.by_row

    def broken(self, *args, **how):
        compiled, rows = self.step, iter(range(100))

        def nan_in_one(*args):
            ce, *rest = (np.asarray(x, np.float64) for x in compiled(*args))
            return np.where([next(rows) == 1 for _ in ce], np.nan, ce), *rest

        self.step = nan_in_one
        return step(self, *args, **how)

    clean = loss()["heldout"]
    monkeypatch.setattr(HeldOut, "by_row", broken)
    for found in (loss(), verb("perplexity", straight, "--no-record")["evaluations"][0]):
        found = found["heldout"]
        assert found["all"]["ce"] is None and found["web"]["ce"] is None and found["all"]["tokens"] == 465
        assert found["code"]["ce"] == clean["code"]["ce"]
        assert "1 of 15 rows are not finite, the first is row 1 (web)" in verb.said
    nan = np.full((3, 128), np.nan)
    assert np.isnan(divergence(nan, nan, 1, VOCABULARY)).all()
    assert np.isnan(divergence(nan, np.ones((3, 128)), 1, VOCABULARY)).all()


def test_labels_without_a_token(house, straight, verb):
    """A label whose every label is masked, which is not in the table at all."""
    found = verb("loss", straight, "--set", "data.mask_token=96", "--index", masked(house))["heldout"]
    assert found["one"] == {"ce": None, "perplexity": None, "tokens": 0, "instances": 2}
    assert found["all"]["tokens"] == found["web"]["tokens"] > 0


def masked(house) -> str:
    """The held-out set and a file of one token alone."""
    np.full(2 * SEQUENCE, 96, np.uint32).tofile(house.root / "one.npy")
    web = house.root / "heldout" / "web" / "part-00000.npy"
    return reindexed(house.root / "heldout.json", "masked.json", [("web", web), ("one", house.root / "one.npy")])


def test_home_folder(house, straight, verb, monkeypatch, tmp_path):
    """A folder that is called ~."""
    monkeypatch.setenv("HOME", str(house.root))
    monkeypatch.chdir(tmp_path)
    expected = verb("loss", straight)
    assert verb("loss", "~/straight", "--index", "~/heldout.json")["heldout"] == expected["heldout"]
    assert verb("kl", "~/straight", "~/straight", "--noise-floor", "none")["heldout"]["all"]["kl"] == 0
    verb("perplexity", "~/straight", "--no-record", "--steps", "8", "--data-root", "~")
    assert "expected a run directory" in verb("perplexity", "~/straight/checkpoints/8", "--steps", "8", expect=2)
    assert not list(tmp_path.iterdir())
