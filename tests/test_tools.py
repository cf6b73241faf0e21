"""What all commands on data have in common: one writer, numbers, full disks, the home folder, old verbs."""

import functools
import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import dolma2_tokenizer
import pytest
from corpora import REPO, SCRIPTS, call, random_tokens, run, token_file

import data
import processes


def test_every_verb_that_writes_has_one_writer(quickstart, inputs, packages, tmp_path, monkeypatch, capsys):
    """A verb that writes what another process is writing: each then ends with what the other has left."""
    tokenizer, index = quickstart[0] / "out/tokenizer.json", quickstart[0] / "out/heldout.json"
    (tmp_path / "ranks.tiktoken").write_bytes(b"IQ== 0\nIg== 1\n")
    (tmp_path / "book.txt").write_text("the text of a book and its end\n" * 200)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "what is a model", "completion": "one that has been trained"}\n')
    monkeypatch.setattr(dolma2_tokenizer, "CL100K_SHA256", hashlib.sha256(b"IQ== 0\nIg== 1\n").hexdigest())
    verbs = {
        "tokenize": ["tokenize", inputs / "a.jsonl", "--tokenizer", tokenizer],
        "pack": ["pack", index],
        "domains": ["domains", packages, "--tokenizer", tokenizer, "--sequence-length", 2],
        "quickstart": ["quickstart", "--library", quickstart[0] / "library", "--vocab-size", 300],
        "tokenizer": ["tokenizer", tmp_path / "ranks.tiktoken"],
        "own_text": ["own_text", tmp_path / "book.txt", "--sequence-length", 8],
        "chat_to_tokens": ["chat_to_tokens", tmp_path / "chats.jsonl", "--tokenizer", tokenizer, "--sequence-length", 8,
                           "--held-out", 0],
        "problems": ["problems"],
    }  # fmt: skip
    for verb, arguments in verbs.items():
        out = tmp_path / verb
        with processes.sole_writer(out):
            code, stdout, err = call(capsys, *arguments, "--out", out)
            assert code == 1 and not stdout and f"{verb}: is being written by process {os.getpid()} on" in err
            assert err.count(".py: error") == 1 and not out.exists(), err
        assert call(capsys, *arguments, "--out", out)[0] == 0 and out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*verbs, "ranks.tiktoken", "chats.jsonl", "book.txt"])
    with processes.sole_writer(tmp_path / "quickstart"):  # one that is complete is not written
        assert call(capsys, *verbs["quickstart"], "--out", tmp_path / "quickstart")[0] == 0


@pytest.mark.parametrize("value", [-1, 0, 2**31, 10**30])
def test_numbers_that_nobody_means(corpus, quickstart, packages, tmp_path, value, capsys):
    """A traceback of numpy's, Grain's or the tokenizer's for a number on the command line, an allocation without end, a
    row or a worker that is quietly left out."""
    (tmp_path / "a.txt").write_text("text")
    tokenizer, library = quickstart[0] / "out/tokenizer.json", quickstart[0] / "library/json"
    batch = ["--global-batch", 4]
    verbs = {
        "quickstart --vocab-size --sequence-length": ["--library", library, "--vocab-size", 300, "--sequence-length", 8],
        "tokenize --shard-tokens --workers": [tmp_path / "a.txt", "--tokenizer", tokenizer],
        "domains --sequence-length": [packages, "--tokenizer", tokenizer],
        "index --sequence-length --vocab-size --eos-id --pad-id": [
            Path(corpus).parent, "--root", Path(corpus).parent, "--tokenizer", "x", "--vocab-size", 97, "--eos-id", 1,
            "--sequence-length", 8],
        "order --seed --epoch": [corpus, "--order-dir", tmp_path],
        "audit --global-batch --seed --epoch": [corpus, *batch, "--no-read"],
        "pack --sequence-length --workers --group-size": [quickstart[0] / "out/heldout.json", "--workers", 1],
        "show --step --global-batch --rows --seed": [corpus, "--step", 1, *batch],
    }  # fmt: skip
    fine = {"--seed": {0, 2**31}, "--pad-id": {0}, "--eos-id": {0}, "--group-size": {2**31}, "--shard-tokens": {2**31},
            "--step": {2**31}, "--vocab-size": {2**31}}  # fmt: skip
    for verb, arguments in verbs.items():
        name, *flags = verb.split()
        for number, flag in enumerate(flags):
            out = tmp_path / f"{name}{number}"
            more = ["--out", out] if name in ("quickstart", "tokenize", "domains", "index", "pack") else []
            code, stdout, err = call(capsys, name, *arguments, *more, flag, value)
            good = value in fine.get(flag, ()) and (name, flag) != ("quickstart", "--vocab-size")
            assert code == (0 if good else 2), (name, flag, err)
            assert good or (f"got {value}" in err or "no instances" in err) and not stdout, (name, flag, err)
    assert call(capsys, "order", corpus, "--order-dir", tmp_path, "--seed", 2**63 - 1)[0] == 0


def test_the_home_folder(quickstart, inputs, packages, tmp_path, monkeypatch, capsys):
    """--out=~/x, which a shell leaves alone, makes a folder called "~"; any other path with ~ is not found."""
    home, here = tmp_path / "home", tmp_path / "here"
    shutil.copytree(quickstart[0] / "out", home / "out")
    shutil.copytree(inputs, home / "inputs")
    shutil.copytree(packages, home / "packages")
    (home / "ranks.tiktoken").write_bytes(b"IQ== 0\nIg== 1\n")
    token_file(home / "base/t/a.npy", random_tokens(64))
    (home / "mix.txt").write_text("web,{TOKENIZER}/a.npy\n")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "book.txt").write_text("the text of a book and its end\n" * 200)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "what is a model", "completion": "one that has been trained"}\n')
    monkeypatch.setattr(dolma2_tokenizer, "CL100K_SHA256", hashlib.sha256(b"IQ== 0\nIg== 1\n").hexdigest())
    tokenizer, length, batch = "--tokenizer=~/out/tokenizer.json", "--sequence-length=64", "--global-batch=4"
    index = "~/out/heldout.json"
    for number, line in enumerate([
        f"quickstart --out=~/new --library={quickstart[0] / 'library/json'} --vocab-size=300 --sequence-length=8",
        f"tokenize ~/inputs/a.jsonl {tokenizer} --out=~/made/tokens",
        f"domains ~/packages {tokenizer} --out=~/made/domains --sequence-length=2",
        "tokenizer ~/ranks.tiktoken --out=~/made/tokenizer.json",
        "urls --mix=~/mix.txt --base=https://host --tokenizer=t",
        f"index code=~/out/train/code ~/out/train/docs --root=~/out {tokenizer} {length} --out=~/made/index.json",
        f"mix --mix=~/mix.txt --base=~/base --tokenizer=t --vocab-size=97 --eos-id=0 {length} --out=~/made/mix.json",
        "verify ~/made/index.json --data-root=~/out",
        f"order {index} --order-dir=~/made/order",
        f"audit {index} {batch} --order-dir=~/made/order --data-root=~/out --hosts=1",
        f"pack {index} --out=~/made/packed --data-root=~/out --workers=1",
        f"show {index} --step=1 {batch} --order-dir=~/made/order --data-root=~/out {tokenizer}",
    ]):  # fmt: skip
        code, _, err = call(capsys, *line.split())
        assert code == 0, (number, line, err)
    assert not list(here.iterdir())
    assert data.load_index("~/made/index.json").tokenizer == "../out/tokenizer.json"
    code, _, err = call(capsys, "verify", "~nobody-of-this-name/index.json")
    assert code == 2 and "~nobody-of-this-name/index.json: got the home folder of nobody" in err


def test_a_full_disk(quickstart, inputs, packages, tmp_path):
    """ "No space left on device" without a file's name, a traceback, exit 2, or half a file under its own name. The
    kernel refuses to let any file grow beyond a limit, as a full disk does."""
    tokenizer, index = quickstart[0] / "out/tokenizer.json", quickstart[0] / "out/train.json"
    verbs = {
        "tokenize": ("part-00000.npy", 128, [inputs / "a.jsonl", "--tokenizer", tokenizer]),
        "pack --workers 1": ("group-00000.npy", 2**14, [index]),
        "pack --workers 2 --group-size 1": ("group-0000", 2**14, [index]),
        "order": ("_v1.npy", 4096, [index]),
        "index": ("out", 256, [quickstart[0] / "out/train", "--root", quickstart[0], "--tokenizer", tokenizer,
                               "--sequence-length", 64]),
        "quickstart": ("tokenizer.json", 4096, ["--library", quickstart[0] / "library/json", "--vocab-size", 300,
                                                "--sequence-length", 8]),
        "domains": ("part-00000.npy", 128, [packages, "--tokenizer", tokenizer, "--sequence-length", 2]),
    }  # fmt: skip
    for number, (verb, (name, limit, arguments)) in enumerate(verbs.items()):
        folder = tmp_path / str(number)
        where = ["--order-dir", folder] if verb == "order" else ["--out", folder / "out"]
        limits = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        done = run(*verb.split(), *arguments, *where, preexec_fn=limits)
        assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr, (verb, done.stderr)
        (line,) = (line for line in done.stderr.splitlines() if "error" in line)
        assert re.fullmatch(rf"[a-z_]+\.py: error: {folder}/[^:]*{name}[^:]*: File too large", line), (verb, line)
        left = [p for p in folder.rglob("*") if p.is_file()]
        assert not [p for p in left if p.suffix == ".tmp"]
        assert not [p for p in left if not any((above / data.INCOMPLETE).exists() for above in p.parents)], (verb, left)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_from_another_folder(name, tmp_path):
    """A tool that starts in the project's folder only, or whose help lacks an example that names it."""
    script, *verb = SCRIPTS[name]
    done = run(name, "--help", cwd=tmp_path)
    assert done.returncode == 0 and f"python {' '.join([script, *verb])}" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


PACKAGE = """
import pathlib, runpy, sys
sys.argv = [{script!r}, "--help"]
sys.path.insert(0, str(pathlib.Path({script!r}).parent))  # as `python SCRIPT` does
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit:
    import evaluate
    assert evaluate.__file__.startswith({package!r}), evaluate.__file__
"""


@pytest.mark.parametrize("script", sorted({script for script, *_ in SCRIPTS.values() if script.startswith("tools/")}))
def test_our_evaluate_does_not_hide_the_package(script, tmp_path):
    """The project's folder in front of the packages: lm-eval's `import evaluate` then finds our evaluate.py."""
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate/__init__.py").touch()
    code = PACKAGE.format(script=str(REPO / script), package=str(tmp_path))
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("old", data.MOVED)
def test_old_verbs_name_the_new_command(old):
    """A script of last month that ends with "invalid choice", or is sent to a command that there is not."""
    verb, *flags = old.split()
    done = subprocess.run([sys.executable, REPO / "data.py", verb, "x", *flags], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    script, *new_verb = done.stderr.partition("fix: python ")[2].partition(", see its --help")[0].split()
    assert (script, *new_verb) in SCRIPTS.values()
