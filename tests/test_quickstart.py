"""tools/quickstart.py."""

import json

import quickstart as quickstart_tool
from corpora import call, documents_of, run

import data
import heldout


def test_quickstart_holds_out_whole_files(quickstart):
    """Text that stands in training and held-out data; lost or doubled text; a tokenizer that does not round-trip."""
    folder, _, summary = quickstart
    corpus = quickstart_tool.read_library(folder / "library")
    sides = {split: sorted(t for texts in corpus[split].values() for t in texts if t) for split in corpus}
    for split in ("train", "heldout"):
        assert sorted(documents_of(folder / "out" / f"{split}.json")) == sides[split]
        assert data.load_index(folder / "out" / f"{split}.json").instances == summary[split]["instances"] > 0
    assert sides["heldout"] and not set(sides["train"]) & set(sides["heldout"])
    paths = [p for p in (folder / "library").rglob("*.py") if not quickstart_tool.SKIPPED_FOLDERS & set(p.parts)]
    assert len(corpus["train"]["code"]) + len(corpus["heldout"]["code"]) == len(paths)
    assert heldout.EvaluationBatches(folder / "out/heldout.json", None, 4).domains == ["code", "docs"]


def test_quickstart_is_idempotent_and_deterministic(quickstart, tmp_path):
    """A second run builds again, or differs; other settings are ignored; a damaged result is called complete."""
    folder, arguments, summary = quickstart
    before = (folder / "out/train.json").stat().st_mtime_ns
    again = run(*arguments)
    assert again.returncode == 0 and "complete already" in again.stderr and json.loads(again.stdout) == summary
    assert (folder / "out/train.json").stat().st_mtime_ns == before
    other = run(*arguments[:-1], 32)
    assert other.returncode == 2 and "'sequence_length': 64" in other.stderr
    fresh = json.loads(run(*[tmp_path / "out" if a == folder / "out" else a for a in arguments]).stdout)
    assert fresh["train"] == summary["train"] and fresh["heldout"] == summary["heldout"]
    tokenizers = [(where / "tokenizer.json").read_bytes() for where in (folder / "out", tmp_path / "out")]
    assert tokenizers[0] == tokenizers[1] and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out/train/docs/part-00000.npy").unlink()
    damaged = run(*[tmp_path / "out" if a == folder / "out" else a for a in arguments])
    assert damaged.returncode == 2 and "part-00000.npy: got no such file" in damaged.stderr


def test_docstrings_are_cut_out_once():
    """Text that stands in both domains, or code that is lost with a docstring."""
    source = (
        '"""Module."""\nimport os\n\n\nclass A:\n    """Two\n    lines: é."""\n\n    x = """kept"""\n\n'
        '    def f(self): "kept too"\n\n    async def g(self):\n        """G."""\n        return 1  # after\n'
    )
    code, docs = quickstart_tool.split_docstrings(source)
    assert docs == "Module.\n\nTwo\nlines: é.\n\nG."
    kept = source.replace('"""Module."""\n', "").replace('    """Two\n    lines: é."""\n', "")
    assert code == kept.replace('        """G."""\n', "")


def test_what_quickstart_reads(tmp_path, capsys):
    """A typo in --library that trains a tokenizer on nothing; a traceback for a file that is no Python, or one that is
    passed over without a word."""
    command = ["quickstart", "--out", tmp_path / "out", "--vocab-size", 280, "--sequence-length", 8, "--library"]
    code, _, err = call(capsys, *command, tmp_path / "no")
    assert code == 2 and "no: got no .py file, expected a folder of them; fix: check --library" in err
    library = tmp_path / "library"
    library.mkdir()
    for number in range(60):  # so that some are held out
        (library / f"fine{number}.py").write_text(f'"""Number {number}."""\nx = {number}\n')
    for name, content in {
        "null": b"x = '\0'",
        "latin": b"# \xe9",
        "deep": b"1" + b"+1" * 9999,
        "wrong": b"x =",
    }.items():
        (library / f"{name}.py").write_bytes(content)
    code, _, err = call(capsys, *command, library)
    assert code == 0 and "passed over 4 of 64 files, no Python: deep.py, latin.py, null.py" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["library", "out"]
