"""tools/own_text.py: a folder of texts becomes what train.py takes."""

import json

import numpy as np
import own_text
import pytest
from corpora import documents_of

import data
from config import load_config

WORDS = "the model reads a text and writes another one after it has seen many of them before".split()


def text(seed: int, words: int = 300) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "\n"


@pytest.fixture
def call(tmp_path, capsys):
    def call(*arguments, expect=0):
        given = [str(tmp_path / "notes"), "--out", str(tmp_path / "data/mine"), "--sequence-length", "32"]
        assert own_text.main([*given, "--json", *arguments]) == expect
        out, err = capsys.readouterr()
        return err if expect else json.loads(out)

    (tmp_path / "notes/deep").mkdir(parents=True)
    return call


def test_documents_are_on_one_side(call, tmp_path):
    """A document in both splits, or in none; one that stands twice on both sides; a tokenizer trained on what is held
    out; a config that does not load, or that names another vocabulary."""
    texts = [text(seed) for seed in range(80)] + ["held out or not: \U0001f600 only here\n" * 20]
    for i, content in enumerate([*texts, texts[3], texts[5]]):
        (tmp_path / "notes" / ("deep" if i % 2 else ".") / f"{i}.md").write_text(content)
    result = call()
    out = tmp_path / "data/mine"
    sides = {split: documents_of(out / f"{split}.json") for split in ("train", "heldout")}
    assert sorted(sides["train"] + sides["heldout"]) == sorted([*texts, texts[3], texts[5]])
    assert sides["heldout"] and not set(sides["train"]) & set(sides["heldout"])
    share = sum(map(len, sides["heldout"])) / sum(map(len, texts))
    assert 0.04 <= share < 0.08
    index = data.load_index(out / "train.json")
    config = load_config(result["config"], "cpu", [])
    assert (config.model.vocab_size, config.data.sequence_length) == (index.vocab_size, 32)
    assert config.model.padded_vocab_size % 128 == 0 and config.run.name == "mine"
    assert config.run.eval_index == str(out / "heldout.json")
    assert config.run.steps == config.schedule[-1].total_steps == min(700, 4 * result["instances"]["train"] // 8)
    tokenizer = data.load_tokenizer(out / "tokenizer.json")
    assert tokenizer.get_vocab_size() == result["vocabulary"] < 4096  # as many as so few words give
    with pytest.MonkeyPatch.context() as patch:  # the split depends on the texts, not on their order or names
        patch.setattr(own_text, "expand", lambda *a: sorted((tmp_path / "notes").rglob("*.md"), reverse=True))
        other = own_text.Split(own_text.read_documents(own_text.expand(), "text", own_text.progress_bar(total=1)))
    assert all((own_text.digest(t) in other.held_out) == (t in sides["heldout"]) for t in texts)


def test_one_text_is_cut_at_its_end(call, tmp_path):
    """A single long file of which nothing is held out, or all."""
    whole = text(1, 9000)
    (tmp_path / "notes/book.txt").write_text(whole)
    assert call()["held_out"] == "the last 4% of each document"
    (start,), (end,) = (documents_of(tmp_path / f"data/mine/{split}.json") for split in ("train", "heldout"))
    assert start + end == whole and 0.039 < len(end) / len(whole) < 0.041


def test_a_tokenizer_that_is_given(call, tmp_path, quickstart):
    given = quickstart[0] / "out/tokenizer.json"
    (tmp_path / "notes/book.txt").write_text(text(1, 9000))
    assert call("--tokenizer", str(given))["vocabulary"] == 600
    assert load_config(str(tmp_path / "data/mine/mine.yaml"), "cpu", []).model.padded_vocab_size == 640


def test_bad_input_leaves_nothing(call, tmp_path):
    assert "got no file, expected some that end in .txt" in call(expect=2)
    (tmp_path / "notes/a.md").write_text("short\n")
    assert "too little text for instances of 32 tokens" in call(expect=2)
    assert not any((tmp_path / "data").glob("*mine"))
    (tmp_path / "data/mine").mkdir()
    (tmp_path / "data/mine/x").touch()
    assert "got a folder that holds something" in call(expect=2)
