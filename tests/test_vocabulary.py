"""vocabulary.py: which tokenizer, which ids, and how many bytes a token stands for."""

import dataclasses
import functools
import json
import types

import dolma2_tokenizer
import numpy as np
import pytest
import quickstart as quickstart_tool
from corpora import EOS_ID, PAD_ID, call
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

import data
import vocabulary
from vocabulary import bytes_fault, bytes_of_tokens, comparable, tokenizer_content, vocabulary_of


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


def test_tokenizers_are_told_apart_by_what_they_say(tmp_path, monkeypatch):
    """A copy with other spacing, or with padding stored in it, that is taken for another tokenizer; one merge that is not
    seen; the names of Ai2's tokenizer taken for two."""
    tokenizer = quickstart_tool.train_tokenizer(["one two one two three"], 264)
    tokenizer.save(str(tmp_path / "a.json"), pretty=False)
    spec = json.loads((tmp_path / "a.json").read_text())
    merges = [" ".join(m) if isinstance(m, list) else m.split(" ") for m in spec["model"]["merges"]]
    other_form = spec | {"model": spec["model"] | {"merges": merges, "dropout": 0.1, "ignore_merges": None}}
    tokenizer.enable_padding(length=512)
    tokenizer.enable_truncation(8)
    tokenizer.save(str(tmp_path / "b.json"))
    (tmp_path / "c.json").write_text(json.dumps(other_form, indent=2))
    spec["model"]["merges"] = spec["model"]["merges"][::-1]
    (tmp_path / "d.json").write_text(json.dumps(spec))
    (tmp_path / "e.json").write_text("no tokenizer")
    a, b, c, d, e = (tokenizer_content(tmp_path / f"{x}.json") for x in "abcde")
    assert a == b == c and len({a, d, e}) == 3
    monkeypatch.setattr(vocabulary, "DOLMA2_CONTENT", a)  # as of Ai2's own file
    named = types.SimpleNamespace(tokenizer="allenai/dolma3-tokenizer", vocab_size=264, eos_id=0)
    there = types.SimpleNamespace(tokenizer="c.json", vocab_size=264, eos_id=0)
    assert vocabulary_of(tmp_path / "x", named) == vocabulary_of(tmp_path / "x", there)
    assert not comparable(a, "allenai/dolma2-tokenizer") and not comparable("x.json", "x.json")


NASTY = ("  déjà vu ﬁn 🦙 naïve\u2028日本語 \x00\x7f e\u0301 don't 12,345 \ufeff½ ＡＢＣ İ \t\r\n\n  x<|endoftext|> "
         "|||IP_ADDRESS||| End ")  # fmt: skip


def quick_start(**parts) -> Tokenizer:
    """The quick start's tokenizer, with some other parts."""
    tokenizer = quickstart_tool.train_tokenizer([NASTY], 280)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(["|||IP_ADDRESS|||"])
    return tokenizer


def edited(*path, value) -> Tokenizer:
    said = json.loads(quick_start().to_str())
    place = functools.reduce(lambda tree, key: tree[key], path[:-1], said)
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return Tokenizer.from_str(json.dumps(said))


def dolma2() -> Tokenizer:
    """OLMo 3's own, with two merges."""
    ranks = {bytes([b]): b for b in range(256)} | {b"nd": 256, "é".encode(): 257}
    return Tokenizer.from_str(dolma2_tokenizer.dolma2_tokenizer(ranks).decode())


def in_order(*steps):
    return pre_tokenizers.Sequence(list(steps))


def text_and_counted(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """Bytes of a text, and of its tokens as `tokenize` writes them, with EOS and padding."""
    tokenizer.encode_special_tokens = True
    eos = tokenizer.token_to_id(data.EOS)
    index = types.SimpleNamespace(vocab_size=100_300, eos_id=eos, pad_id=None)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special]
    return len(text.encode()), int(bytes_of_tokens(tokenizer, index)[[*ids, eos, *special]].sum())


CUT = Regex(r"\p{N}{1,3}|\s+")
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    "tokenizer",
    [
        quick_start(),
        edited("added_tokens", value=[]),  # EOS and padding are tokens as others
        dolma2(),
        *(quick_start(pre_tokenizer=in_order(pre_tokenizers.Split(CUT, how, invert), LEVEL)) for invert in (True, False)
          for how in ("isolated", "merged_with_previous", "merged_with_next", "contiguous")),
        quick_start(pre_tokenizer=in_order(pre_tokenizers.Digits(True), pre_tokenizers.Punctuation(), LEVEL)),
        quick_start(pre_tokenizer=in_order(in_order(pre_tokenizers.Digits()), LEVEL), normalizer=normalizers.Sequence([])),
    ],
)  # fmt: skip
def test_bytes_of_tokens(tokenizer):
    """Bytes that are guessed from decoded text: a token that is a part of a letter decodes to U+FFFD, which is three. No
    bits per byte for a tokenizer that keeps every byte, OLMo 3's own among them."""
    assert bytes_fault(tokenizer) is None
    rng = np.random.default_rng(0)
    anything = "".join(chr(c) for c in rng.integers(0, 0x110000, 5000) if not 0xD800 <= c < 0xE000)
    spaces = "".join(map(chr, rng.choice([32, 9, 10, 13, 39, 0x85, 0x2028, 48, 65, 0x301, 0x4E2D], 2000)))
    for text in (NASTY, NASTY * 60, NASTY.strip(), anything, spaces, " ", ""):
        size, counted = text_and_counted(tokenizer, text)
        assert counted == size
    with pytest.raises(ValueError, match="expected ids below 270"):
        bytes_of_tokens(tokenizer, types.SimpleNamespace(vocab_size=270, eos_id=0, pad_id=1))


@pytest.mark.parametrize(
    "tokenizer, fault",
    [
        (quick_start(normalizer=normalizers.NFKC()), "its normalizer (NFKC) changes the text"),
        (quick_start(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "StripAccents"),
        (quick_start(normalizer=normalizers.Lowercase()), "its normalizer (Lowercase)"),
        (quick_start(normalizer=normalizers.Prepend("▁")), "its normalizer (Prepend)"),
        (quick_start(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "its pre-tokenizer (ByteLevel)"),
        (quick_start(pre_tokenizer=in_order(pre_tokenizers.Split(CUT, "removed"), LEVEL)), "its pre-tokenizer (Split)"),
        (quick_start(pre_tokenizer=in_order(pre_tokenizers.Split(CUT, "removed", True), LEVEL)), "(Split)"),
        (quick_start(pre_tokenizer=in_order(pre_tokenizers.Punctuation("removed"), LEVEL)), "(Punctuation)"),
        (quick_start(pre_tokenizer=in_order(pre_tokenizers.Whitespace(), LEVEL)), "(Whitespace)"),
        (quick_start(pre_tokenizer=in_order(pre_tokenizers.Metaspace(), LEVEL)), "(Metaspace)"),
        (quick_start(pre_tokenizer=in_order(LEVEL, LEVEL)), "no byte-level BPE"),
        (quick_start(pre_tokenizer=pre_tokenizers.Digits()), "no byte-level BPE"),
        (edited("model", "vocab", value=lambda words: {"zz" if w == "Ā" else w: i for w, i in words.items()}),
         "1 of the 256 bytes are no tokens"),
        (edited("added_tokens", 4, value=lambda token: token | {"lstrip": True}), "takes the spaces beside it"),
    ],
)  # fmt: skip
def test_tokenizers_that_do_not_keep_the_bytes(tokenizer, fault):
    """Bits per byte of a text of 12,190 bytes that are counted as 10,690, 11,590 or 12,490: what a normaliser, a space in
    front or a pre-tokenizer changes is changed when it is counted, too, and decoding does not bring it back."""
    assert fault in bytes_fault(tokenizer)
    size, counted = text_and_counted(tokenizer, NASTY.strip())
    assert counted != size  # the fault is one


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
