"""tools/text_to_tokens.py."""

import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import text_to_tokens
import zstandard
from corpora import REPO, TEXTS, VOCABULARY, S, call, random_tokens, run, token_file
from tokenizers import Tokenizer

import data
from data import DataError


def test_all_inputs_give_the_same_tokens(quickstart, inputs, tmp_path):
    """Text lost between two gzip members, changed line ends, an EOS that is missing or comes from the text itself."""
    tokenizer = quickstart[0] / "out/tokenizer.json"
    results = []
    for kind in ("txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        for workers in (1, 2) if kind == "a.jsonl" else (1,):
            out = tmp_path / f"{kind}-{workers}"
            extra = ["--workers", workers, "--shard-tokens", 100]
            done = run("tokenize", inputs / kind, "--tokenizer", tokenizer, "--out", out, *extra)
            assert done.returncode == 0, done.stderr
            shards = sorted(out.iterdir())
            assert [p.name for p in shards] == [f"part-{i:05}.npy" for i in range(len(shards))]
            sizes = [p.stat().st_size for p in shards]
            assert sizes[:-1] == [400] * (len(shards) - 1) and 0 < sizes[-1] <= 400 and len(shards) > 1
            results.append((json.loads(done.stdout), np.concatenate([np.fromfile(p, "<u4") for p in shards])))
    summary, tokens = results[0]
    for other_summary, other in results[1:]:
        np.testing.assert_array_equal(other, tokens)
        assert other_summary | {"out": 0, "files": 0} == summary | {"out": 0, "files": 0}
    assert (summary["documents"], summary["eos"], summary["empty_documents"]) == (5, 5, 1)
    assert summary["tokens"] == len(tokens) and summary["bytes"] == 4 * len(tokens)
    eos = Tokenizer.from_file(str(tokenizer)).token_to_id("<|endoftext|>")
    ends = np.flatnonzero(tokens == eos)
    assert len(ends) == 5 and ends[-1] == len(tokens) - 1
    pieces = np.split(tokens, ends + 1)[:-1]
    decode = Tokenizer.from_file(str(tokenizer)).decode
    assert [decode(p[:-1].tolist(), skip_special_tokens=False) for p in pieces] == [t for t in TEXTS if t]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', r"a\.jsonl, line 3: no text 'text'"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl, line 1: no text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not JSON"),
        ("a.txt", b"abc\xff", r"a\.txt: byte 3 is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abcdefgh"}\n', mtime=0)[:-9], r"a\.jsonl\.gz: got a truncated file"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "abcdefgh"}\n')[:-4], r"a\.jsonl\.zst: got a truncated file"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: cannot decompress"),
        ("a.txt", b"", "no text: got 1 empty documents"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1: not JSON \(maximum recursion depth"),
        ("a.csv", b"x", r"a\.csv: got another kind of file"),
    ],
)
def test_bad_text_is_refused(quickstart, tmp_path, name, content, message):
    """Half a file tokenised as if it were whole; an error without file and line."""
    (tmp_path / name).write_bytes(content)
    tokenizer = str(quickstart[0] / "out/tokenizer.json")
    arguments = [str(tmp_path / name), "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    with pytest.raises(DataError, match=message):
        text_to_tokens.tokenize(text_to_tokens.parse_args(arguments))
    assert not list(tmp_path.glob("out/part-*.npy"))


def test_what_people_have(quickstart, tmp_path, capsys):
    """Text that is passed over without a word: for its suffix, in a linked folder, packed; a file that counts twice
    because links lead to it, or links that go round in circles."""
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    plain = ["a.txt", "b.md", "c.TEXT", "d.rst", "e.markdown", "sub/f.tex"]
    lines = ["g.jsonl", "h.ndjson"]
    for number, name in enumerate([*plain, *lines]):
        content = f"text {number}" if name in plain else json.dumps({"text": f"text {number}"})
        for more, pack in (("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)):
            path = corpus / (name + more)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack(f"{content}{more}".encode() if name in plain else content.encode()))
    (corpus / "i.json.gz").write_bytes(gzip.compress(b'{"text": "i"}\n{"text": "j"}\n'))
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "k.txt").write_text("linked")
    (corpus / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(corpus)  # round in circles
    (corpus / "again").symlink_to(corpus / "sub")
    (corpus / "once_more.txt").symlink_to(corpus / "a.txt")
    (corpus / "broken.txt").symlink_to(corpus / "nothing")
    for name in ("settings.json", "page.html", "table.csv.gz", "README", ".hidden.txt", ".git/config.txt"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text("no")
    tokenizer = quickstart[0] / "out/tokenizer.json"
    command = ["tokenize", "--tokenizer", tokenizer, "--out"]
    code, out, err = call(capsys, *command, tmp_path / "all", corpus)
    assert code == 0 and json.loads(out)["documents"] == 8 * 3 + 2 + 1
    tokens = np.fromfile(tmp_path / "all/part-00000.npy", "<u4")
    texts = data.load_tokenizer(tokenizer).decode(tokens, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    expected = [f"text {n}{more}" for n in range(6) for more in ("", ".gz", ".zst")] + 3 * ["text 6", "text 7"]
    assert sorted(texts) == sorted([*expected, "i", "j", "linked"])
    (said,) = (line for line in err.splitlines() if "passed over" in line)
    assert said.startswith(f"text_to_tokens.py: {corpus}: 26 files taken, 8 passed over: ")
    for part in ("2 hidden (corpus/.git, corpus/.hidden.txt)", "1 without a suffix (corpus/README)", "1 .json (corpus/s",
                 "1 .csv.gz (corpus/table", "1 .html (", "1 broken links, or no files (corpus/broken.txt)",
                 "1 taken already (corpus/once_more.txt)"):  # fmt: skip
        assert part in said, said
    code, out, err = call(capsys, *command, tmp_path / "twice", corpus / "a.txt", corpus / "a.txt", corpus / "sub")
    assert code == 0 and json.loads(out)["files"] == 4 and "a.txt: 0 files taken, 1 passed over: 1 taken already" in err
    (tmp_path / "none").mkdir()
    (tmp_path / "none/x.pdf").touch()
    code, _, err = call(capsys, *command, tmp_path / "nothing", tmp_path / "none")
    assert code == 2 and "got no file, expected some that end in .txt, " in err and "are 1 .pdf (none/x.pdf)" in err


def test_labels_and_files_of_linked_folders(tmp_path, capsys):
    """A label that depends on where a link leads, a shard that is trained on twice because a link leads to it, or one
    that is passed over without a word."""
    token_file(tmp_path / "disk/w3/part-00000.npy", random_tokens(2 * S))
    token_file(tmp_path / "data/code/part-00000.npy", random_tokens(2 * S, 1))
    (tmp_path / "data/code/part-00001.bin").touch()
    (tmp_path / "data/web").symlink_to(tmp_path / "disk/w3")
    command = ["index", "--sequence-length", S, "--out", tmp_path / "index.json", *VOCABULARY]
    code, _, err = call(capsys, *command, tmp_path / "data")
    assert code == 0 and "data: 2 files taken, 1 passed over (code/part-00001.bin)" in err
    index = data.load_index(tmp_path / "index.json")
    assert [(f.path, f.label) for f in index.files] == [
        ("data/code/part-00000.npy", "code"),
        ("data/web/part-00000.npy", "web"),
    ]
    code, _, err = call(capsys, *command, tmp_path / "data", f"more={tmp_path / 'disk'}")
    assert code == 2 and "disk/w3/part-00000.npy: got the same file as " in err and "data/web/part-00000.npy" in err


def test_lone_surrogates(quickstart, tmp_path):
    """JSON text that is no UTF-8 ends a long run with a UnicodeEncodeError."""
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud800 b \\ud83d\\ude00"}\n')
    tokenizer = quickstart[0] / "out/tokenizer.json"
    done = run("tokenize", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert json.loads(done.stdout)["repaired_documents"] == 1
    tokens = np.fromfile(tmp_path / "out/part-00000.npy", "<u4")
    assert Tokenizer.from_file(str(tokenizer)).decode(tokens[:-1].tolist()) == "a \ufffd b \U0001f600"


def test_tokenise_keeps_what_is_there(quickstart, inputs, tmp_path):
    """Shards of an earlier run are overwritten unasked, or stay among the new ones."""
    command = ["tokenize", inputs / "a.jsonl", "--tokenizer", quickstart[0] / "out/tokenizer.json"]
    command += ["--out", tmp_path, "--label", "web"]
    assert run(*command, "--shard-tokens", 100).returncode == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "web").iterdir()}
    refused = run(*command)
    assert refused.returncode == 2 and "holds shards; fix: another --out, or --overwrite" in refused.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "web").iterdir()} == before
    for label in ("..", "a/b", "~/x"):
        refused = run(*command, "--overwrite", "--label", label)
        assert refused.returncode == 2 and f"--label: got {label}, expected the name of a folder" in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["web"]
    assert run(*command, "--overwrite").returncode == 0
    (whole,) = (tmp_path / "web").iterdir()
    assert whole.read_bytes() == b"".join(before[name] for name in sorted(before))


def test_killed_tokenise_leaves_no_shard(quickstart, tmp_path):
    """A half-written shard, or half of the shards, that look whole to `index`."""
    text = "".join(p.read_text() for p in sorted((quickstart[0] / "library").rglob("*.py")))
    with open(tmp_path / "big.jsonl", "w") as f:
        for _ in range(12):
            f.write(json.dumps({"text": text}) + "\n")
    command = [sys.executable, REPO / "tools/text_to_tokens.py", tmp_path / "big.jsonl", "--shard-tokens", "65536"]
    command += ["--tokenizer", quickstart[0] / "out/tokenizer.json", "--out", tmp_path / "out"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not len(list(tmp_path.glob("out/part-*.npy.tmp"))) > 3 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL and list(tmp_path.glob("out/*.tmp"))
    assert not list(tmp_path.glob("out/*.npy"))
    for folder in (tmp_path / "out", tmp_path):  # alone, and as a label among others
        with pytest.raises(DataError, match="out: got a folder that is being written, or whose writer was ended"):
            data.labelled_files([str(folder)])
    small = tmp_path / "small.txt"
    small.write_text("small")
    done = run("tokenize", small, *command[5:])
    assert done.returncode == 0 and [p.name for p in (tmp_path / "out").iterdir()] == ["part-00000.npy"]


LATE = """
import pathlib, sys, time
sys.path[:0] = [{repo!r}, {repo!r} + "/tools"]
import text_to_tokens
read = text_to_tokens.read_documents
def slow(*arguments):
    yield from read(*arguments)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
text_to_tokens.read_documents = slow  # a text that takes as long as the other process needs to start
sys.exit(text_to_tokens.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_two_tokenise_at_once(quickstart, tmp_path, more):
    """Two writers of one folder: the first ends with 0 and a count of tokens while its shard holds the other's text, or
    the folder ends empty."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 50)
    command = [sys.executable, "-c", LATE.format(repo=str(REPO)), tmp_path / "go", "--label", "x[1]"]
    command += ["--tokenizer", quickstart[0] / "out/tokenizer.json", "--out", tmp_path / "out", "--json", *more]
    writers = {
        name: subprocess.Popen([*map(str, command), str(tmp_path / f"{name}.txt")], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in "ab"
    }  # fmt: skip
    deadline = time.monotonic() + 60
    while all(writer.poll() is None for writer in writers.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ends = {name: (*writer.communicate(), writer.returncode) for name, writer in writers.items()}
    (loser,) = (name for name in "ab" if ends[name][2] == 1)
    (winner,) = (name for name in "ab" if ends[name][2] == 0)
    assert f"out/x[1]: is being written by process {writers[winner].pid} on " in ends[loser][1]
    assert not ends[loser][0] and "Traceback" not in ends[loser][1]
    (shard,) = (tmp_path / "out" / "x[1]").iterdir()
    tokens = np.fromfile(shard, "<u4")
    assert len(tokens) == json.loads(ends[winner][0])["tokens"]
    decode = Tokenizer.from_file(str(quickstart[0] / "out/tokenizer.json")).decode
    assert decode(tokens[:-1].tolist()) == f"the text of {winner} " * 50


def test_killed_in_the_middle_of_the_exchange(tmp_path):
    """Half of the new shards, or half of the old ones, that `index` takes for complete: killed before any one of the
    renames and removals that give a folder its new shards."""
    old, new = np.arange(100), np.arange(1000, 1090)

    def shards(folder: Path) -> list[int]:
        return [np.fromfile(path, "<u4").tolist() for _, path in data.labelled_files([str(folder)])]

    def write(tokens, folder: Path, size: int, kill_at: int = 0) -> bool:
        """Was it killed?"""
        if (child := os.fork()) == 0:
            calls = itertools.count(1)

            def counted(do):
                def call(*arguments, **keys):
                    if next(calls) == kill_at:
                        os._exit(9)
                    return do(*arguments, **keys)

                return call

            os.replace, os.unlink, text_to_tokens.open = counted(os.replace), counted(os.unlink), counted(open)
            writer = text_to_tokens.ShardWriter(folder, size)
            writer.append(tokens)
            writer.finish()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    def pieces(tokens, size: int) -> list[int]:
        return np.split(tokens, range(size, len(tokens), size)) if size else []

    for size in (20, 50, 0):  # more shards than the new ones, fewer, none
        before, after = ([piece.tolist() for piece in pieces(*which)] for which in ((old, size), (new, 30)))
        ends = []
        for kill_at in itertools.count(1):
            folder = tmp_path / "folder"
            folder.mkdir()
            for number, piece in enumerate(before):
                token_file(folder / f"part-{number:05}.npy", piece)
            killed = write(new, folder, 30, kill_at)
            try:
                found = shards(folder)
                ends.append("new" if found == after else "old" if found == before else "a mixture")
            except DataError as e:
                assert re.search("whose writer was ended; fix: run that|got no token file", str(e)), e
                ends.append("refused")
            assert not write(new, folder, 30) and shards(folder) == after  # the way out
            assert sorted(p.name for p in folder.iterdir()) == [f"part-{number:05}.npy" for number in range(3)]
            shutil.rmtree(folder)
            if not killed:
                break
        assert [end for end, _ in itertools.groupby(ends)] == ["old"] * bool(size) + ["refused", "new"], ends
        assert ends.count("refused") > len(before) + len(after)


def test_lines_longer_than_a_read(tmp_path, monkeypatch):
    """A line joined wrongly where reads end: in its middle, at its end, several lines in one read, none at the end."""
    monkeypatch.setattr(text_to_tokens, "READ_BYTES", 3)
    for whole in (b"", b"\n", b"abc\ndefghij\n\nk\nlm", b"abcdefghijkl\n", b"ab\ncd\nef\n"):
        (tmp_path / "lines").write_bytes(whole)
        with data.progress_bar(total=len(whole), disable=True) as bar:
            assert list(text_to_tokens.read_lines(tmp_path / "lines", bar)) == whole.split(b"\n")
