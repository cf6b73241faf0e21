"""vocabulary.py."""

import dataclasses
import json

import numpy as np
import pytest
import quickstart as quickstart_tool
from corpora import EOS_ID, PAD_ID, call
from tokenizers import Tokenizer, models, pre_tokenizers

import data
import vocabulary


def byte_level() -> dict:
    return json.loads(quickstart_tool.train_tokenizer(["the cat and the hat and the bat"] * 9, 270).to_str())


def word_piece() -> dict:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "<|endoftext|>": 1, "the": 2, "c": 3, "##at": 4}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return json.loads(made.to_str())


def unigram() -> dict:
    pieces = ["<unk>", "<|endoftext|>", "t", "h", "e", "the", "a", "at", " ", "c", "cat"]
    return json.loads(Tokenizer(models.Unigram([(p, -1.0 - n / 9) for n, p in enumerate(pieces)], 0, False)).to_str())


@pytest.mark.parametrize("make", [byte_level, word_piece, unigram])
def test_settings_in_a_tokenizer_json(make, tmp_path, capsys):
    """Truncation, padding or dropout that a tokenizer.json asks for: text that is cut, padding that is trained on, other
    tokens at each call. They act in every method of the library but encode_batch_fast."""
    text, settings = "the cat the cat the cat", make()
    plain = Tokenizer.from_str(json.dumps(settings)).encode(text).ids
    settings["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    settings["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                           "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    if make is byte_level:
        settings["model"]["dropout"] = 0.5
    if make is unigram:
        settings["model"] |= {"alpha": 0.1, "nbest_size": 9}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    assert Tokenizer.from_file(str(path)).encode(text).ids != plain
    tokenizer = data.load_tokenizer(path)
    for _ in range(20):
        assert tokenizer.encode(text).ids == tokenizer.encode_batch([text, "the"])[0].ids == plain
    (tmp_path / "a.txt").write_text(text)
    written = set()
    for out in range(5):
        assert call(capsys, "tokenize", tmp_path / "a.txt", "--tokenizer", path, "--out", tmp_path / str(out))[0] == 0
        written.add((tmp_path / str(out) / "part-00000.npy").read_bytes())
    eos = tokenizer.token_to_id("<|endoftext|>")
    assert written == {np.array([*plain, eos], "<u4").tobytes()}


def test_first_tokens_are_looked_at(corpus, monkeypatch):
    """No EOS, or padding that nothing masks, in the tokens that training begins with (OLMo #757); said at every step."""
    monkeypatch.setattr(vocabulary, "EOS_WITHIN", 100)
    index = data.load_index(corpus)
    padded = np.where(np.arange(64).reshape(4, 16) % 16, 5, PAD_ID)
    check = vocabulary.TokenCheck(index, None)
    assert check(padded) == []
    assert check(padded) == [
        "WARNING: EOS 90 is in none of the first 128 tokens; another tokenizer?",
        "WARNING: 6.2% of the first 128 tokens are padding (91); fix: data.mask_token=91",
    ]
    assert check(padded) == []
    padded[0, 5] = EOS_ID
    check = vocabulary.TokenCheck(index, PAD_ID)
    assert check(np.tile(padded, 2)) == ["6.2% of the first 128 tokens are padding (91), without loss"]
    assert vocabulary.TokenCheck(dataclasses.replace(index, pad_id=None), None)(np.full(200, EOS_ID)) == []
