"""What tests of whole runs share: a corpus, a tiny recipe, ways to start train.py on them, and to read what it wrote."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import quickstart
import yaml
from jax.experimental.compilation_cache import compilation_cache as jax_compilation_cache

import compare
import convert
import data
import model
import train
from checkpoint import FORMAT_VERSION
from config import assemble_config, science_dict
from processes import HERE

REPO = HERE
SEQUENCE, VOCABULARY, BATCH, STEPS = 32, 97, 8, 16

# ------------------------------------------------------------------------------------------------ corpus and configs


def write_corpus(root: Path, split: str, instances: dict[str, int], seed: int) -> str:
    """Token files that can be learnt (next = 3 x + noise) and their index; returns the index's path."""
    rng, files = np.random.default_rng(seed), []
    for label, n in instances.items():
        tokens = np.ones(n * SEQUENCE + 5, np.uint32)
        for i in range(1, len(tokens)):
            tokens[i] = (3 * tokens[i - 1] + rng.integers(3)) % VOCABULARY
        path = root / split / label / "part-00000.npy"
        path.parent.mkdir(parents=True)
        tokens.tofile(path)
        files.append((label, path))
    index = data.build_index(files, root, SEQUENCE, tokenizer="none", vocab_size=VOCABULARY, eos_id=0)
    data.write_index(index, root / f"{split}.json")
    return str(root / f"{split}.json")


def tiny_config(root: Path) -> dict:
    """An OLMo-3-shaped model small enough to compile in seconds; dimensions that could be swapped differ."""
    return {
        "model": {
            "vocab_size": VOCABULARY, "padded_vocab_size": 128, "mask_padded_vocab": True, "n_layers": 4,
            "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "head_dim": 12, "d_ff": 40, "window": 8, "pattern": "sssf",
            "rope_theta": 500000.0, "yarn": None, "norm_eps": 1e-6, "init_std": 0.02, "compute_dtype": "float32",
            "grad_reduce_dtype": "float32",
        },
        "data": {
            "index": str(root / "train.json"), "order": "olmo_core", "seed": 34521, "sequence_length": SEQUENCE,
            "global_batch": BATCH, "repetition_filter": True, "mask_token": None, "document_mask": False,
        },
        "optim": {
            "peak_lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0,
            "skip_window": 8, "skip_sigma": 6.0, "max_nonfinite_steps": 3,
        },
        "schedule": [
            {"until": None, "kind": "cosine", "warmup_steps": 4, "total_steps": 40, "final_fraction": 0.1},
        ],
        "loss": {"z_loss": 1e-5, "filtered_in_divisor": True},
        "run": {
            "name": "tiny", "steps": STEPS, "seed": 0, "checkpoint_every": 4, "keep_checkpoints": None,
            "log_every": 4, "eval_index": str(root / "heldout.json"), "eval_every": 6, "eval_batches": None, "sample_prompt": None,
        },
    }  # fmt: skip


class House:
    """A corpus, a config and the ways to start train.py on them."""

    def __init__(self, root: Path):
        self.root, self.cache = root, root / "xla"
        if not (root / "heldout.json").exists():
            write_corpus(root, "train", {"web": 100, "code": 61}, seed=1)
            write_corpus(root, "heldout", {"web": 9, "code": 6}, seed=2)
        self.config = root / "tiny.yaml"
        self.config.write_text(yaml.safe_dump(tiny_config(root)))
        self.hooked = root / "hooked.py"
        self.hooked.write_text(HOOKED)

    def argv(self, run_dir: Path, *overrides: str, extra=()) -> list[str]:
        sets = (f"compilation_cache={self.cache}", *overrides)
        argv = ["--config", str(self.config), "--hardware", "cpu", "--run-dir", str(run_dir), "--json", *extra]
        return argv + [word for s in sets for word in ("--set", s)]

    def start(self, run_dir: Path, *overrides: str, hook=(), log=None, devices=1, extra=(), env=()) -> subprocess.Popen:
        """A process that trains; `hook` = (place, number, signal, ...); `log`: a file for what it reads and trains on."""
        env = os.environ | {
            "PYTHONPATH": str(REPO),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HOOK": json.dumps([*hook] or [None, None]),
            "LOG": str(log or ""),
            **dict(env),
        }
        script = self.hooked if hook or log else REPO / "train.py"
        command = [sys.executable, str(script), *self.argv(run_dir, *overrides, extra=extra)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, run_dir: Path, *overrides: str, expect: int = 0, **how) -> tuple[str, str]:
        """(stdout, stderr) of a process that has to end with the exit code `expect`."""
        process = self.start(run_dir, *overrides, **how)
        out, err = process.communicate(timeout=120)
        assert process.returncode == expect, err
        # When one leaf of a damaged item fails, tensorstore may print this, from C++, for reads that were in flight.
        assert "Traceback" not in err or "RuntimeError: Event loop is closed" in err
        assert "leaked" not in err, err  # what worker processes share
        return out, err


def use_devices(monkeypatch, n: int) -> None:
    """Meshes are made of the first n of conftest's eight devices."""
    devices = jax.local_devices()[:n]
    monkeypatch.setattr(jax, "devices", lambda *backend: devices)


def snapshot(folder: Path) -> dict[str, tuple]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def schedule_of(total: int):
    """Learning rate of the tiny recipe, written out: 4 steps up from 0 to 1e-2, then a cosine to 1e-3."""
    return lambda s: 1e-2 * s / 4 if s < 4 else 1e-3 + 9e-3 * (1 + np.cos(np.pi * (s - 4) / (total - 4))) / 2


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def refused(capsys, argv: list[str]) -> str:
    """The one line on standard error of a start that ends with exit code 2."""
    capsys.readouterr()
    assert train.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train.py: error: "), err
    return err


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(house, run_dir, *overrides, n=2, hooks=(), logs=None, run_dirs=None, **how):
    """n processes that train together; `hooks`: process -> hook; `logs`: a folder for one log a process."""
    several = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(n), "--process-id")
    for folder in [logs] if logs else []:
        folder.mkdir()
    return [
        house.start(
            run_dirs[i] if run_dirs else run_dir, *overrides, extra=(*several, str(i)), hook=dict(hooks).get(i, ()),
            log=logs and logs / str(i), **how,
        )
        for i in range(n)
    ]  # fmt: skip


# train.py that sends itself signals at an exact place: (place, number, signal, ...), and logs the instances it uses,
# and where it is.
HOOKED = """
import json, os, sys
import data, train

place, number, *signals = json.loads(os.environ["HOOK"])
calls, instances = 0, None


def log(**entry):
    if os.environ["LOG"]:
        with open(os.environ["LOG"], "a") as f:
            f.write(json.dumps(entry) + "\\n")


def here(where, n):
    if where == place and n == number:
        for s in signals:
            os.kill(os.getpid(), s)


compile_train_step, save = train.compile_train_step, train.Checkpoints.save


def mark(kind, name, at):
    function = getattr(kind, name)

    def marked(*args):
        log(at=at)
        return function(*args)

    setattr(kind, name, marked)


def compile_hooked(c, mesh):
    step_fn, first = compile_train_step(c, mesh), True

    def run_step(params, opt_state, batch, step):
        nonlocal first
        here("step", int(step))
        log(step=int(step), instances=instances, at="compilation" if first else "step")
        result = step_fn(params, opt_state, batch, step)
        if first:
            log(at="first step")
        first = False
        return result

    return run_step


def save_hooked(self, step, *args):
    log(at="save")
    save(self, step, *args)
    here("save", step)  # it goes on in the background


class HeldOut(train.HeldOut):
    def __init__(self, *args):
        super().__init__(*args)
        step = self.step

        def run_step(*args):
            global calls
            calls += 1
            log(at="evaluation")
            here("evaluation batch", calls)
            return step(*args)

        self.step = run_step


to_device, read = train.to_device, data.BatchSource.read


def to_device_hooked(batch, *args):
    global instances
    instances = batch["instance"].tolist()
    return to_device(batch, *args)


def read_hooked(self, instance):
    log(read=int(instance), index=self.index.fingerprint)
    return read(self, instance)


train.compile_train_step, train.Checkpoints.save, train.HeldOut = compile_hooked, save_hooked, HeldOut
train.to_device, data.BatchSource.read = to_device_hooked, read_hooked
mark(train.Checkpoints, "restore_latest", "restore")
mark(train, "initial_state", "restore")
mark(train, "summarise", "summary")
if __name__ == "__main__":
    train.exit_with(train.main())
"""


# --------------------------------------------------------------------------------------------------- what a run wrote


def steps_in(run_dir: Path) -> set[str]:
    return {p.name for p in (run_dir / "checkpoints").iterdir()}


def restore(run_dir: Path, step: int = STEPS, items=("params", "opt_state")) -> dict[str, np.ndarray]:
    """Leaves of a checkpoint as numpy arrays, by path, read without train.py."""
    leaves = {}
    for item in items:
        folder = run_dir / "checkpoints" / str(step) / item
        handler = ocp.PyTreeCheckpointHandler()
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(folder).tree)
        with ocp.Checkpointer(handler) as checkpointer:
            tree = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=args))
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            leaves[item + jax.tree_util.keystr(path)] = np.asarray(x)
    return leaves


def rows(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides; strict JSON."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{k: v for k, v in row.items() if not compare.CLOCK.match(k)} for row in parsed]


def logged(folder: Path, key: str) -> list[list]:
    """Of each process, in order: what it logged under `key`."""
    entries = [[json.loads(line) for line in p.read_text().splitlines()] for p in sorted(folder.iterdir())]
    return [[e for e in process if key in e] for process in entries]


def assert_same_checkpoint(a: Path, b: Path, step: int = STEPS) -> None:
    left, right = restore(a, step), restore(b, step)
    assert left.keys() == right.keys() and len(left) > 30
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert left[name].tobytes() == right[name].tobytes(), name


def board(run_dir: Path, name: str = "") -> dict[str, list[int]]:
    """tag -> steps, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard" / name), size_guidance={"scalars": 0}).Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_same_run(run_dir: Path, straight: Path) -> None:
    """Bit for bit: every logged number, the final state, and TensorBoard with each step once."""
    for got, expected in zip(rows(run_dir), rows(straight), strict=True):
        assert json.dumps(got) == json.dumps(expected)
    assert_same_checkpoint(run_dir, straight)
    shown = board(run_dir)
    assert shown["train/CE loss"] == list(range(1, STEPS + 1))
    assert shown["eval/lm/all/CE loss"] == shown["eval/lm/web/CE loss"] == [6, 12, STEPS]


# ------------------------------------------------------------------------------------- a model with words, untrained


@contextlib.contextmanager
def compilation_cache(folder: Path):
    """What this process compiles is compiled once, though it be jitted anew."""
    names = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        jax_compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_compilation_cache.reset_cache()


def text_checkpoint(root: Path, seed: int = 0, zero_head: bool = False, **model_keys) -> Path:
    """root/run: a checkpoint of random parameters whose tokenizer is made as the quick start's, of 600 tokens, 40 of
    the vocabulary's rows being padding. Norms are random, so that one in the wrong place cannot pass."""
    root.mkdir(exist_ok=True)
    texts = [(REPO / name).read_text() for name in ("README.md", "model.py")]
    tokenizer = quickstart.train_tokenizer(texts, 600)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokens").mkdir()
    np.array(tokenizer.encode(texts[0]).ids, np.uint32).tofile(root / "tokens" / "part-00000.npy")
    words = {"tokenizer": "tokenizer.json", "vocab_size": 600, "eos_id": 0, "pad_id": 1}
    index = data.build_index([("web", root / "tokens" / "part-00000.npy")], root, 96, **words)
    data.write_index(index, root / "train.json")
    science = tiny_config(root)
    science["model"] |= {"vocab_size": 600, "padded_vocab_size": 640, "n_kv_heads": 2, "init_std": 0.3, **model_keys}
    science["data"]["sequence_length"] = 96
    c = assemble_config(science, "test", "cpu", [])
    rng = np.random.default_rng(seed)
    params = {}
    for name, t in model.ledger(c.model).items():
        x = rng.uniform(0.5, 1.5, t.shape) if t.std is None else t.std * rng.standard_normal(t.shape)
        params[name] = np.zeros(t.shape, np.float32) if zero_head and name == "lm_head" else x.astype(np.float32)
    meta = {
        "format_version": FORMAT_VERSION, "step": 3, "instances_seen": 24, "tokens_seen": 24 * 96,
        "data": {"sequence_length": 96, "fingerprint": index.fingerprint}, "config": science_dict(c), "items": ["params", "meta"],
    }  # fmt: skip
    folder = root / "run" / "checkpoints" / "3"
    folder.mkdir(parents=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "params", args=ocp.args.PyTreeSave(params))
    convert.finish_step(folder, meta)
    return root / "run"
