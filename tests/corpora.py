"""Corpora and commands that the tests of data.py and of the tools share. Sizes all differ: S 16, B 4, V 97."""

import contextlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import data
from data import DataConfig

REPO = Path(data.__file__).parent
S, V, EOS_ID, PAD_ID = 16, 97, 90, 91


def token_file(path: Path, tokens, dtype="<u4") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def make_index(folder: Path, arrays: dict, sequence_length=S, vocab_size=V, name="index.json", **more) -> str:
    """arrays: relative path -> tokens; the label is the name of the file's folder."""
    files = [(Path(path).parent.name, token_file(folder / path, tokens)) for path, tokens in arrays.items()]
    known = {"tokenizer": "none", "vocab_size": vocab_size, "eos_id": EOS_ID, "pad_id": PAD_ID}
    index = data.build_index(files, folder, sequence_length, **(known | more))
    data.write_index(index, folder / name)
    return str(folder / name)


def config(index, order="olmo_core", seed=7, sequence_length=S, global_batch=4, **more) -> DataConfig:
    rest = {"repetition_filter": False, "mask_token": None, "document_mask": False} | more
    return DataConfig(index, order, seed, sequence_length, global_batch, **rest)


def random_tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 60, n)


def assert_same(got, expected):
    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def literal_filter(tokens, max_period=13, min_times=32) -> bool:
    """OLMo-core's algorithm in plain numpy: rows of p and a padding, groups of rows that equal the row before, and what
    matches in the rows around them."""
    tokens = np.asarray(tokens, np.int64)
    for p in range(1, min(max_period, len(tokens) // 3) + 1):
        rows = np.concatenate([tokens, np.full(p - len(tokens) % p, -1)]).reshape(-1, p)
        equal = rows == np.roll(rows, 1, axis=0)
        whole = np.flatnonzero(equal.all(axis=1))
        for group in np.split(whole, np.flatnonzero(np.diff(whole) != 1) + 1) if len(whole) else ():
            first, last = group[[0, -1]]
            start = (first - 1) * p - np.argmin(equal[first - 1, ::-1])
            end = (last + 1) * p + np.argmin(equal[last + 1])
            if (end - start) // p >= max(3, min_times):
                return True
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def documents_of(index_path: Path) -> list[str]:
    index = data.load_index(index_path)
    tokenizer = Tokenizer.from_file(str(index_path.parent / index.tokenizer))
    texts = []
    for file in index.files:
        tokens = np.fromfile(index_path.parent / file.path, "<u4")
        assert tokens[-1] == index.eos_id
        pieces = np.split(tokens, np.flatnonzero(tokens == index.eos_id) + 1)[:-1]
        texts += [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]
    return texts


TEXTS = ["Hello world.\n", "def f():\r\n    return 'é 中'\n", "<|endoftext|> in a text", "", "x" * 500, "last"]


def ended(*lengths):
    """Documents of these lengths, their EOS included."""
    return [np.append(1 + (7 * n + np.arange(length - 1)) % 80, EOS_ID) for n, length in enumerate(lengths)]


VOCABULARY = ["--tokenizer", "ai/tok", "--vocab-size", V, "--eos-id", EOS_ID, "--pad-id", PAD_ID]


def call(capsys, *arguments):
    """Exit code, standard output and standard error of a verb, in this process."""
    code = main(list(map(str, arguments)))
    return code, *capsys.readouterr()


def children(pid: int) -> list[int]:
    """The worker processes that the threads of a process have spawned."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # one that has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


# What runs a step of the work on data, by the name of the step.
SCRIPTS = {
    "index": ("data.py", "index"), "verify": ("data.py", "verify"), "show": ("data.py", "show"),
    "quickstart": ("tools/quickstart.py",), "tokenize": ("tools/text_to_tokens.py",),
    "tokenizer": ("tools/dolma2_tokenizer.py",), "domains": ("tools/domains.py",), "pack": ("tools/pack.py",),
    "urls": ("tools/mixes.py", "urls"), "mix": ("tools/mixes.py", "index"), "audit": ("tools/audit.py", "epoch"),
    "order": ("tools/audit.py", "order"), "ids": ("tools/audit.py", "ids"), "headerless": ("tools/headerless.py",),
}  # fmt: skip


def main(arguments) -> int:
    """The exit code of the step's main in this process."""
    name, *arguments = arguments
    script, *verb = SCRIPTS[name]
    try:
        return importlib.import_module(Path(script).stem).main([*verb, *map(str, arguments)])
    except SystemExit as e:  # argparse, of wrong flags
        return e.code


def run(name, *arguments, **more):
    script, *verb = SCRIPTS[name]
    command = [sys.executable, str(REPO / script), *verb, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
