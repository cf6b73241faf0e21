"""grpo.py: the gradient is the objective's, the sampler's log-probabilities are the model's, a resume is exact."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import harness
import jax
import numpy as np
import pytest
import test_model
import yaml
from harness import REPO, use_devices

import convert
import grpo
import sample
import verifiers
from checkpoint import read_meta

SETTINGS = grpo.GrpoConfig("", "", "verifiers:exact", group=4, mini_batches=1, response_tokens=6, clip_low=0.2,
                           clip_high=0.272, importance_cap=None, rounds=2, engine=None)  # fmt: skip


def test_advantages():
    """A deviation that is divided by; rounding that makes a signal of equal rewards."""
    found = grpo.advantages(np.array([[0.1, 0.1, 0.1], [0, 1, 0]]))
    assert not found[0].any()
    np.testing.assert_allclose(found[1], [-1 / 3, 2 / 3, -1 / 3], rtol=1e-6)


@pytest.mark.parametrize("cap", [None, 1.1])
def test_the_gradient_is_that_of_the_objective(cap):
    """The clip on the wrong side, a ratio or cap that is differentiated through, a weight of the next token: against
    the objective written out in torch, on transformers' model, with old log-probabilities that are off."""
    torch = pytest.importorskip("torch")
    c = replace(test_model.CONFIG, yarn=None)
    params, batch = test_model.random_params(c), test_model.random_batch(c, 16, 20)
    rng = np.random.default_rng(3)
    counted, advantage = batch["loss_mask"], rng.normal(size=(16, 1)).astype(np.float32)
    hf = test_model.hf_model(c, params)
    logits = hf(torch.from_numpy(batch["tokens"]).long()).logits
    new = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(batch["labels"]).long()[..., None])[..., 0]
    old = new.detach().numpy() + rng.normal(size=new.shape).astype(np.float32) * 0.4
    sampler = old + rng.normal(size=new.shape).astype(np.float32) * 0.2
    settings = replace(SETTINGS, importance_cap=cap)

    rho, A = torch.exp(new - torch.from_numpy(old)), torch.from_numpy(advantage)
    held = torch.clamp(rho, 1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(rho * A, held * A)
    if cap is not None:
        objective = objective * torch.from_numpy(np.minimum(np.exp(old - sampler), cap))
    mask = torch.from_numpy(counted)
    (-(objective * mask).sum() / mask.sum()).backward()

    weights, clipped = grpo.token_weights(new.detach().numpy(), old, sampler, advantage, counted, settings)
    assert 0.1 < clipped.sum() / counted.sum() < 0.6
    weighted = batch | {"loss_mask": weights}
    function = test_model.loss_function(c, test_model.BLOCKWISE, (1, 1, 1, 1), False, 0.0)
    _, _, grads = jax.tree.map(np.asarray, function(params, weighted, np.float32(counted.sum())))
    theirs = {name: p.grad.numpy() for name, p in hf.named_parameters()}
    for name, ours, transposed in test_model.hf_tensors(c, grads):
        assert test_model.difference(ours, theirs[name].T if transposed else theirs[name]) < 2e-5, name


@pytest.mark.parametrize(("name", "cap"), [("plain", None), ("capped", 2.0)])
def test_the_gradient_is_google_tunix_own(name, cap):
    """An objective that is not the field's: gradients that google-tunix computed (bench/tunix_fixture.py)."""
    stored = np.load(Path(__file__).parent / "stored" / "tunix_grpo.npz")
    counted, tokens = stored["mask"], stored["tokens"]
    B, T = counted.shape
    before = tokens[:, -T - 1 : -1]  # the token that each one of a completion follows
    config = replace(test_model.CONFIG, vocab_size=24, padded_vocab_size=24, d_model=8)
    x, labels = stored["embed"][before.reshape(-1)], tokens[:, -T:].reshape(-1)

    def run(weights):
        return test_model.chunked(config, x, stored["head"], labels, weights.reshape(-1), 0.0, 7)

    new = -run(counted.astype(np.float32))[1].reshape(B, T)
    advantage = stored["advantages"][:, None]
    settings = replace(SETTINGS, importance_cap=cap)
    weights, clipped = grpo.token_weights(new, stored["old"], stored["sampler"], advantage, counted, settings)
    _, _, _, dx, dhead = run(weights)
    dembed = np.zeros_like(stored["embed"])
    np.add.at(dembed, before.reshape(-1), dx)
    N = counted.sum()
    assert clipped.sum() / N == pytest.approx(0.325, abs=1e-3)
    assert test_model.difference(dembed / N, stored[f"{name}_embed"]) < 3e-6
    assert test_model.difference(dhead / N, stored[f"{name}_head"]) < 3e-6


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2)], ids=str)
def test_weights_on_every_mesh(shape):
    """A weight that another device's token gets, or a negative one that is clamped on the way."""
    c = test_model.CONFIG
    params, batch = test_model.random_params(c), test_model.random_batch(c, 8, 20)
    weights = np.random.default_rng(4).normal(size=(8, 20)).astype(np.float32) * batch["loss_mask"]
    weighted = batch | {"loss_mask": weights}
    found = [
        jax.tree.map(
            np.asarray,
            test_model.loss_function(c, test_model.BLOCKWISE, s, False, 0.0)(params, weighted, np.float32(90)),
        )
        for s in ((1, 1, 1, 1), shape)
    ]
    (loss, _, grads), (loss2, _, grads2) = found
    assert loss2 == pytest.approx(loss, rel=1e-5) and test_model.worst(grads2, grads)[0] < 3e-5


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Programs are compiled once for all tests."""
    folder = tmp_path_factory.mktemp("xla")
    with harness.compilation_cache(folder):
        yield folder


@pytest.fixture
def place(tmp_path, monkeypatch, cache):
    """A tiny model with a tokenizer, problems, and a recipe; grpo.main on one device."""
    use_devices(monkeypatch, 1)
    run = harness.text_checkpoint(tmp_path / "model")
    recipe = harness.tiny_config(tmp_path)
    recipe["model"] |= {"vocab_size": 600, "padded_vocab_size": 640, "n_kv_heads": 2, "init_std": 0.3}
    recipe["data"] |= {"index": "", "sequence_length": 48, "global_batch": 8, "repetition_filter": False}
    recipe["optim"]["peak_lr"] = 1e-3
    recipe["schedule"] = [
        {"until": None, "kind": "constant", "warmup_steps": 0, "total_steps": 9, "final_fraction": 1.0}
    ]
    recipe["loss"] = {"z_loss": 0.0, "filtered_in_divisor": False}
    recipe["run"] |= {"name": "tiny_grpo", "steps": 4, "checkpoint_every": 2, "eval_index": None, "eval_every": 2}
    problems = [{"prompt": f"{i} + {i} =", "answer": 2 * i} for i in range(9)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    recipe["grpo"] = {
        "problems": str(tmp_path / "train.jsonl"), "heldout_problems": str(tmp_path / "heldout.jsonl"),
        "verifier": "test_grpo:vowels", "group": 4, "mini_batches": 1, "response_tokens": 6, "clip_low": 0.2,
        "clip_high": 0.272, "importance_cap": 2.0, "rounds": 2, "engine": None,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def words(name, *sets):
        fixed = ["--config", str(tmp_path / "recipe.yaml"), "--hardware", "cpu", "--init-from", str(run), "--run-dir",
                 str(tmp_path / name), "--set", f"compilation_cache={cache}"]  # fmt: skip
        return [*fixed, *(w for s in sets for w in ("--set", s))]

    def call(name, *sets, expect=0):
        assert grpo.main(words(name, *sets)) == expect
        return tmp_path / name

    call.words = words
    return call


def vowels(problem: dict, completion: str) -> float:
    """A reward that a model of random weights sometimes gets."""
    return sum(letter in "aeiou" for letter in completion) / 10


def constant(problem: dict, completion: str) -> float:
    return 0.5


def sums(run_dir, step: int) -> dict:
    return read_meta(run_dir / "checkpoints" / str(step))["checksums"]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((), id="one", marks=pytest.mark.slow),  # killed below, too
        pytest.param(("grpo.mini_batches=2", "data.global_batch=4"), id="two mini-batches"),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(place, sets):
    """Prompts, draws or counters that depend on what was run before; a sampler that draws from other probabilities than
    those that are trained."""
    straight = place("straight", *sets)
    halves = place("halves", *sets, "run.steps=2")
    assert sums(halves, 2) == sums(straight, 2)
    place("halves", *sets)
    assert sums(halves, 4) == sums(straight, 4) != sums(straight, 2)
    rows = harness.rows(straight)
    assert harness.rows(halves) == rows
    steps = [r for r in rows if "grpo/reward" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4] and all(r["grpo/updates"] == 1 + len(sets) // 2 for r in steps)
    assert max(r["grpo/sampler mismatch"] for r in steps) < 1e-4 and 0 < steps[0]["grpo/reward"] < 1
    assert [r["step"] for r in rows if "eval/grpo/greedy reward" in r] == [0, 2, 4]
    assert any(r["grpo/clipped share"] > 0 for r in steps) == bool(sets)  # with one mini-batch the ratio is 1


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_stopped_and_started_again(place, tmp_path, sent, code):
    """Law 2 for GRPO: what a kill -9 between two saves loses, what a metrics file holds twice, an evaluation that a
    signal has cut off."""
    straight = place("straight")
    words = place.words("killed", "run.log_every=1")
    path = os.pathsep.join(str(REPO / folder) for folder in (".", "tests", "tools", "bench"))  # of the verifier
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    process = subprocess.Popen(
        [sys.executable, str(REPO / "grpo.py"), *words], env=env, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:  # step 3 is done, the save of step 2 is complete or not
        if line.startswith("step 3/"):
            break
    process.send_signal(sent)
    process.communicate()
    assert process.returncode == code
    place("killed")
    assert sums(tmp_path / "killed", 4) == sums(straight, 4)
    assert harness.rows(tmp_path / "killed") == harness.rows(straight)


def test_without_a_signal_nothing_changes(place):
    """An optimizer step of zero gradients, which moves parameters by their moments and decay."""
    run = place("run", "grpo.verifier=test_grpo:constant", "run.steps=2", "run.checkpoint_every=1")
    assert sums(run, 1) == sums(run, 2)
    steps = [r for r in harness.rows(run) if "grpo/reward" in r]
    assert all(r["grpo/updates"] == 0 and r["grpo/groups without signal"] == 1 for r in steps)


def test_what_it_leaves_is_a_checkpoint_like_any_other(place, tmp_path, capsys, monkeypatch):
    """A run whose model no other command opens, and the next command that it prints itself."""
    run = place("run", "run.steps=1")
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed == f"next: python sample.py {run} --chat"
    monkeypatch.setattr("sys.stdin", io.StringIO("3 + 3 =\n"))
    assert sample.main([str(run), "--hardware", "cpu", "--chat", "--tokens", "3", "--temperature", "0"]) == 0
    assert convert.main(["to-hf", str(run), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/model.safetensors").is_file()
    place("run", "grpo.clip_low=0.1", expect=2)
    assert "grpo.clip_low: got 0.1, expected 0.2 as in the run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is of a run of train.py"):
        grpo.check_same_recipe({"config": {}}, {"config": {}, "grpo": {}}, run)


def test_on_a_mesh(place, monkeypatch):
    """Rows that lie on another device than their rewards; a step whose numbers depend on the machine (law 3)."""
    one = harness.rows(place("one", "run.steps=2"))
    use_devices(monkeypatch, 4)
    four = harness.rows(place("four", "run.steps=2", "mesh={data: 1, fsdp: 2, context: 1, tensor: 2}"))
    assert [r["step"] for r in one] == [r["step"] for r in four]
    for a, b in zip(one, four, strict=True):
        for tag in a.keys() - {"grpo/sampler mismatch"}:
            assert b[tag] == pytest.approx(a[tag], rel=1e-4), tag


def test_an_engine_takes_the_place_of_the_sampler(place, tmp_path, capsys, monkeypatch):
    """A seam that no other engine's completions go through: the sampler's own, called from outside, give the same run;
    and completions that cannot be trained on as they are."""
    own = place("own", "run.steps=2")
    policies = []
    whole = grpo.Policy.__init__

    def remember(self, *a):
        whole(self, *a)
        policies.append(self)

    def outer(params, prompts, response_tokens, temperature, seed):
        policy = policies[-1]
        policy.engine = None
        found = policy.complete(params, prompts, sample.Draw(temperature=temperature, seed=seed))
        policy.engine = outer
        return found

    monkeypatch.setattr(grpo.Policy, "__init__", remember)
    monkeypatch.setattr(sys.modules[__name__], "engine", outer, raising=False)
    outside = place("outside", "run.steps=2", "grpo.engine=test_grpo:engine")
    assert sums(outside, 2) == sums(own, 2)


@pytest.mark.parametrize(
    ("completions", "log_probs", "says"),
    [
        ([[5, 3]], [[-1.0, -2.0]], None),
        ([[5, 3], [4]], [[-1.0, -2.0]], "got 2 completions and 1 log-probabilities, expected 1"),
        ([[]], [[]], "completion 0: got 0 tokens"),
        ([[5, 3, 5]], [[-1.0, -2.0, -1.0]], "that end at the first 3"),
        ([[5, 99]], [[-1.0, -2.0]], "ids below 50"),
        ([[5, 5]], [[-1.0, float("nan")]], "expected 2 numbers <= 0"),
        ([[5, 5]], [[-1.0]], "expected 2 numbers <= 0"),
        ([[5, 5]], [[0.4, 0.2]], "expected 2 numbers <= 0"),  # probabilities
    ],
)
def test_what_an_engine_may_not_return(completions, log_probs, says):
    """Completions of another engine that would be trained on though they are not what the step takes them for."""
    if says is None:
        return grpo.check_completions(completions, log_probs, 1, 4, 50, 3)
    with pytest.raises(grpo.RunFailed, match=says):
        grpo.check_completions(completions, log_probs, 1, 4, 50, 3)


def test_updates_that_are_not_finite_end_the_run(place, capsys, monkeypatch):
    """A policy that has diverged and is rolled out for days."""
    monkeypatch.setattr(
        grpo, "token_weights", lambda *a: (np.full(a[4].shape, np.nan, np.float32) * a[4], a[4] & False)
    )
    run = place("run", "optim.max_nonfinite_steps=2", expect=1)
    assert "is not finite for 2 updates in a row" in capsys.readouterr().err
    assert [r["step"] for r in harness.rows(run) if "grpo/reward" in r] == [1]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.verifier=verifiers:nothing", "expected module:function, as verifiers:arithmetic"),
        ("grpo.group=1", "grpo.group: got 1, expected 2 or more"),
        ("grpo.group=3", "got 8 completions a step, expected groups of 3"),
        ("loss.z_loss=1e-5", "loss.z_loss: expected 0"),
        ("grpo.response_tokens=40", "got a prompt of"),
        ("grpo.problems=nowhere.jsonl", "nowhere.jsonl: got no such file"),
    ],
)
def test_bad_recipes(place, capsys, override, says):
    place("run", override, expect=2)
    assert says in capsys.readouterr().err


def test_verifiers():
    sum_ = {"prompt": "2 + 2 =", "answer": 4}
    assert verifiers.exact(sum_, " 4\n") == 1 and verifiers.exact(sum_, "4.") == 0
    assert verifiers.arithmetic(sum_, "2 + 2 is 4!") == 1 and verifiers.arithmetic(sum_, "4 or 5") == 0
    assert verifiers.arithmetic(sum_, "none") == 0
    asked = {"prompt": "Write 2 words after able.", "words": 2}
    assert verifiers.words(asked, "class, module") == 1 and verifiers.words(asked, " class, module\n") == 1
    assert not any(verifiers.words(asked, t) for t in ("class, class", "class", "class, mdule", "class module", ""))
    code = {"prompt": "def f(x):\n"}
    assert verifiers.parses_as_python(code, "    return x\n") == 1 and verifiers.parses_as_python(code, "return x") == 0


def test_reasoning_gym():
    """Another call than the package's own verifiers take."""
    gym = pytest.importorskip("reasoning_gym")
    entry = next(iter(gym.create_dataset("chain_sum", size=1, seed=1)))
    problem = {"prompt": entry["question"], "task": "chain_sum", "entry": json.loads(json.dumps(entry))}
    assert verifiers.reasoning_gym(problem, entry["answer"]) == 1 and verifiers.reasoning_gym(problem, "none") < 0.1
