"""sample.py sample: the text is transformers' and the draws are those asked for, whatever the batch and the mesh."""

import io
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from harness import REPO, use_devices

import convert
import data
import sample
import vocabulary
from checkpoint import open_model
from config import make_execution

YARN = {"factor": 2.0, "original_length": 48, "beta_fast": 32.0, "beta_slow": 1.0}
LENGTHS = (1, 5, 8, 9, 23)  # of prompts: shorter than the window of 8, as long, longer


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    with harness.compilation_cache(tmp_path_factory.mktemp("xla")):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return harness.text_checkpoint(tmp_path_factory.mktemp("sample") / "model", yarn=YARN)


@pytest.fixture(scope="module")
def sampler(run):
    """On one device; compiled once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        return sample.Sampler(open_model(str(run), "cpu", []))


def prompts():
    rng = np.random.default_rng(0)
    return [[int(t) for t in rng.integers(2, 600, n)] for n in LENGTHS]


GREEDY = sample.Draw()


def tokens_of(sampler, prompts, n, draw=GREEDY, numbers=None):
    return np.stack(list(sampler(prompts, n, draw, numbers)), axis=1)


def test_greedy_is_transformers(run, sampler, monkeypatch):
    """A cache that loses a key or keeps one beyond the window, a position off by one, padding that is seen, YaRN on
    the wrong layers: in prompts of all lengths at once, continued far past the window, on one device and on four."""
    assert convert.main(["to-hf", str(run), str(run.parent / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(run.parent / "hf"))
    expected = []
    for prompt in prompts():
        how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        expected.append(theirs.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].numpy())
    np.testing.assert_array_equal(tokens_of(sampler, prompts(), 40), expected)
    assert len({tuple(row[20:]) for row in expected}) == len(LENGTHS)  # they have not all come to the same end
    use_devices(monkeypatch, 4)
    four = open_model(str(run), "cpu", ["mesh={data: 1, fsdp: 2, context: 1, tensor: 2}"])
    np.testing.assert_array_equal(tokens_of(sample.Sampler(four), prompts(), 40), expected)


def test_sliding_layers_keep_their_window_alone(sampler):
    """A cache of the whole text for every layer: right, and four times too large."""
    made, opened = [], sampler.opened
    execution = make_execution(opened.config, 1, "cpu")

    def body(params, tokens):
        _, cache = sample.prefill(params, tokens, jnp.array([20]), 64, opened.config.model, execution)
        made.extend(k.shape for k, _ in cache)
        return tokens

    rows = jax.sharding.PartitionSpec(("data", "fsdp"))
    jax.eval_shape(opened.compiled(body, (rows,), rows), opened.params, jnp.zeros((1, 32), jnp.int32))
    window, full = (1, 1, 8, 2, 12), (1, 1, 64, 2, 12)  # cycles, rows, slots, key heads, their dimension
    assert made == [window, window, window, full]
    np.testing.assert_array_equal(sample.held_positions(jnp.array([2, 9]), 4), [[0, 1, 2, -1], [8, 9, 6, 7]])


def frequencies(logits, n=20_000, **how):
    draw = sample.Draw(**how)
    keys = jax.random.split(jax.random.key(1), n)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    drawn = sample.choose(rows, keys, jnp.float32(draw.temperature), jnp.int32(draw.top_k), jnp.float32(draw.top_p))
    return np.bincount(drawn, minlength=len(logits)) / n


@pytest.mark.parametrize(
    "how, expected",
    [
        ({"temperature": 1.0}, [0.2, 0.5, 0.05, 0.25]),
        ({"temperature": 0.5}, np.square([0.2, 0.5, 0.05, 0.25]) / 0.355),
        ({"temperature": 1.0, "top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"temperature": 1.0, "top_p": 0.75}, [0, 2 / 3, 0, 1 / 3]),
        ({"temperature": 1.0, "top_p": 0.76}, [0.2 / 0.95, 0.5 / 0.95, 0, 0.25 / 0.95]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.79}, [0.2 / 0.95, 0.5 / 0.95, 0, 0.25 / 0.95]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.78}, [0, 2 / 3, 0, 1 / 3]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_draws(how, expected):
    """Another distribution than asked for: top-p of what top-k has left, in the order transformers has; one token is
    left at least; what is cut off is never drawn."""
    found = frequencies(np.log([0.2, 0.5, 0.05, 0.25]), **how)
    assert np.all((found == 0) == (np.asarray(expected) == 0))
    assert found == pytest.approx(expected, abs=0.015)  # four standard errors


def test_a_sample_depends_on_seed_and_number_alone(sampler):
    """Samples that change with those beside them, or are all the same."""
    draw, prompt = sample.Draw(1.0, 0, 0.9, seed=7), [prompts()[4]] * 5
    five = tokens_of(sampler, prompt, 12, draw)
    assert len({tuple(row) for row in five}) == 5
    np.testing.assert_array_equal(tokens_of(sampler, prompt, 12, draw, numbers=[4, 0, 3, 2, 1]), five[[4, 0, 3, 2, 1]])
    others = [prompts()[2]] * 2 + prompt[2:]
    np.testing.assert_array_equal(tokens_of(sampler, others, 12, draw)[2:], five[2:])
    assert not np.any(np.all(tokens_of(sampler, prompt, 12, draw._replace(seed=8)) == five, axis=1))


def test_stops(sampler):
    """A stop that is not seen because tokens do not end where it does; text that keeps it; tokens after the end."""
    tokenizer = sample.needed_tokenizer(None, sampler.opened).tokenizer
    ids = tokenizer.encode("one two\nthree.\n\nfour").ids

    def continued(*stops, eos=(0,), upto=100):
        def scripted(prompts, n, draw, numbers):
            return (np.array([t, 5]) for t in ids[:n])

        return sample.continuations(scripted, tokenizer, eos, [[1], [1]], upto, list(stops), GREEDY)[0]

    assert continued()._asdict() == {"tokens": ids, "text": "one two\nthree.\n\nfour", "stopped_by": None}
    assert continued("hree.\n\nf").text == "one two\nt" and continued("hree.\n\nf").stopped_by == "hree.\n\nf"
    assert continued("four", "two").text == "one " and len(continued("two").tokens) < len(ids)
    ended = continued("four", eos=(5, ids[3]))
    assert ended.tokens == ids[:3] and ended.stopped_by == tokenizer.id_to_token(ids[3])
    assert len(continued(upto=2).tokens) == 2


def test_command_line(run, sampler, monkeypatch, capsys):
    """Bad numbers that give text all the same; JSON that is not what was drawn; a limit passed in silence."""
    use_devices(monkeypatch, 1)
    monkeypatch.setenv("HOME", str(run))
    tokenizer = sample.needed_tokenizer(None, sampler.opened).tokenizer

    def call(*arguments, expect=0):
        assert sample.main([str(run), "--hardware", "cpu", *arguments]) == expect
        return capsys.readouterr()

    out, err = call("--prompt", "The model", "--tokens", "100", "--num", "2", "--json", "--temperature", "0")
    found = json.loads(out)
    prompt = tokenizer.encode("The model").ids
    expected = sample.continuations(sampler, tokenizer, (0,), [prompt] * 5, 100, [], GREEDY)[0]
    assert "the model was trained on 96" in err and found["step"] == 3
    assert [s["tokens"] for s in found["samples"]] == [expected.tokens] * 2
    assert [s["text"] for s in found["samples"]] == [expected.text] * 2
    made = [sample.Continuation([5], " is", None), sample.Continuation([6], " was", None)]
    monkeypatch.setattr(sample, "continuations", lambda *args: made)
    assert call("--prompt", "The model").out == f"The model is\n{'-' * 40}\nThe model was\n"
    assert "The model" in call("--prompt", "The model", "--seed", str(2**32 - 1), "--top-k", str(2**31 - 1)).out
    for arguments, words in (
        (["--temperature", "-1"], "--temperature: got -1.0"),
        (["--temperature", "inf"], "--temperature: got inf"),
        (["--temperature", "nan"], "--temperature: got nan"),
        (["--temperature", "1e-300"], "--temperature: got 1e-300"),
        (["--top-k", "-3"], "--top-k: got -3"),
        (["--top-k", str(2**31)], "--top-k: got 2147483648"),
        (["--top-p", "0"], "--top-p: got 0.0"),
        (["--top-p", "nan"], "--top-p: got nan"),
        (["--seed", "-1"], "--seed: got -1, expected 0 to 2^32 - 1"),
        (["--seed", str(2**32)], "--seed: got 4294967296"),
        (["--tokens", "0"], "--tokens: got 0"),
        (["--tokens", str(2**31)], "--tokens: got 2147483648"),
        (["--tokens", str(2**31 - 1)], "--tokens: got numbers that need"),  # a cache of all the text's keys and values
        (["--num", "0"], "--num: got 0"),
        (["--num", str(10**30)], "--num: got 1000"),
        (["--num", str(2**31 - 1)], "--num, --tokens: got numbers that need"),
        (["--prompt", "\udcff"], "--prompt, --stop: got bytes"),  # as Python hands over bytes that are no UTF-8
        (["--stop", "\udcff"], "--prompt, --stop: got bytes"),
        (["--tokenizer", "~/none"], f"{run}/none: got no such file"),
        (["--stop", ""], "--stop: got an empty text"),
        (["--tokenizer", "nowhere.json"], "nowhere.json: got no such file"),
        (["--set", "mesh={data: 1, fsdp: 1, context: -1, tensor: 1}"], None),
    ):
        if words is None:
            use_devices(monkeypatch, 4)
            words = "mesh: got context 4, expected 1"
        err = call(*arguments, expect=2).err
        assert words in err and "expected" in err and err.count("\n") == 1
    os.rename(run.parent / "train.json", run.parent / "elsewhere.json")
    use_devices(monkeypatch, 1)
    assert "--tokenizer: missing" in call(expect=2).err
    os.rename(run.parent / "elsewhere.json", run.parent / "train.json")


def test_an_error_of_our_own_is_no_wrong_usage(run, monkeypatch):
    """A bug in the middle of sampling that ends as one line and exit code 2, which says that the user is wrong."""

    def bug(*_):
        raise ValueError("zip() argument 2 is shorter than argument 1")

    use_devices(monkeypatch, 1)
    monkeypatch.setattr(sample.Sampler, "__call__", bug)
    with pytest.raises(ValueError, match="zip"):
        sample.main([str(run), "--hardware", "cpu"])


def test_a_model_with_several_ends_of_a_text(run, tmp_path, monkeypatch, capsys):
    """A text that goes on past the second of them: the first token that the model draws is made one of them."""
    use_devices(monkeypatch, 1)
    prompt = ["--prompt", "The model", "--temperature", "0", "--tokens", "5", "--json"]
    asked = [str(run), "--hardware", "cpu", *prompt]
    sample.main(asked)
    (free,) = json.loads(capsys.readouterr().out)["samples"]
    end = free["tokens"][2]
    before = free["tokens"][: free["tokens"].index(end)]  # a small model repeats itself
    shutil.copyfile(run.parent / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    sample.main([*asked, "--tokenizer", str(tmp_path)])
    (ended,) = json.loads(capsys.readouterr().out)["samples"]
    tokenizer = data.load_tokenizer(tmp_path / "tokenizer.json")
    assert ended["tokens"] == before and ended["stopped_by"] == tokenizer.id_to_token(end)


def test_programs_are_kept(run, tmp_path):
    """A hardware file's folder for compiled programs that only the trainer uses: every start compiles anew."""
    with harness.compilation_cache(tmp_path / "other"):
        opened = open_model(str(run), "cpu", [f"compilation_cache={tmp_path / 'kept'}"])
        next(sample.Sampler(opened)([[5, 6]], 1, sample.Draw()))
    assert any((tmp_path / "kept").iterdir())


def test_sampling_does_not_load_the_trainer():
    """An import of train.py, which may then not print samples."""
    code = "import sys, sample; sys.exit(len({'train', 'evaluate', 'convert'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120
    )
    assert done.returncode == 0


def test_samples_while_a_run_trains(run, monkeypatch):
    """A text of other parameters than the newest; one that depends on what was drawn before; samples that a run which
    cannot draw them is ended by."""
    use_devices(monkeypatch, 1)
    opened = open_model(str(run), "cpu", [])
    path, index = run.parent / "train.json", data.load_index(run.parent / "train.json")
    config = replace(opened.config, run=replace(opened.config.run, sample_prompt="The model"))
    draw = sample.run_samples(config, opened.mesh, path, index)
    first, other = draw(opened.params), draw({name: 0.5 * x for name, x in opened.params.items()})
    assert first == draw(opened.params) and first != other and first.startswith("The model") and len(first) > 20
    known = sample.needed_tokenizer(None, opened)
    prompt = known.tokenizer.encode("The model", add_special_tokens=False).ids
    (expected,) = sample.continuations(
        sample.Sampler(opened), known.tokenizer, known.eos_ids, [prompt], sample.RUN_SAMPLE_TOKENS, [],
        sample.Draw(temperature=0.8, top_p=0.95),
    )  # fmt: skip
    assert first == "The model" + expected.text
    assert sample.run_samples(opened.config, opened.mesh, path, index) is None


@pytest.mark.parametrize("why", ["no tokenizer.json for 'none'", "several processes train", "the mesh cuts sequences"])
def test_a_run_without_samples(run, monkeypatch, capsys, why):
    """An error, or silence, where a prompt is set and no text can be drawn."""
    config = open_model(str(run), "cpu", []).config
    config = replace(config, run=replace(config.run, sample_prompt="The model"))
    index = data.load_index(run.parent / "train.json")
    if "tokenizer" in why:
        index = types.SimpleNamespace(tokenizer="none", vocab_size=600, eos_id=0, pad_id=1)
    if "processes" in why:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = jax.make_mesh((1, 1, 2 if "mesh" in why else 1, 1), ("data", "fsdp", "context", "tensor"))
    assert sample.run_samples(config, mesh, run.parent / "train.json", index) is None
    assert f"run.sample_prompt is not used: {why}" in capsys.readouterr().err


def test_chat(run, tmp_path, monkeypatch, capsys):
    """A turn that does not end with its closing token, or the next one that does not see it; words that spell a token
    of the template and so end the user's turn."""
    use_devices(monkeypatch, 1)
    asked, answers = [], iter([[40, 41], [42]])

    def continuations(sampler, tokenizer, eos_ids, prompts, *rest):
        asked.append((list(prompts[0]), eos_ids))
        tokens = next(answers)
        return [sample.Continuation(tokens, tokenizer.decode(tokens), data.TURN_END)]

    monkeypatch.setattr(sample, "continuations", continuations)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello {data.TURN_END}\nand?\n"))
    assert sample.main([str(run), "--hardware", "cpu", "--chat", "--prompt", "Be kind."]) == 0
    tokenizer = data.load_tokenizer(run.parent / "tokenizer.json")
    assert capsys.readouterr().out == f"{tokenizer.decode([40, 41])}\n{tokenizer.decode([42])}\n"
    template = vocabulary.Turns(data.load_tokenizer(run.parent / "tokenizer.json"), "t")
    header = template.opened("assistant", "")
    before = template.closed("system", "Be kind.") + template.closed("user", f"hello {data.TURN_END}") + header
    assert before.count(template.end) == 2
    (first, ends), (second, _) = asked
    assert first == before and template.end in ends
    assert second == [*before, 40, 41, *template.close, *template.closed("user", "and?"), *header]
