"""Time and memory of the data path at stage 1's size: orders, repetition filter, loader.

    python bench/bench_data.py [--part order filter loader] [--instances 724000000] [--folder FOLDER]

order   of 724 million instances: OLMo-core's, built and written once and opened by a second process; Grain's index
        shuffle; and MaxText's way, the whole permutation as uint64 in each process. Each in a process of its own.
filter  instances of 8,192 tokens decided in a second, in batches of 64, beside OLMo-core's algorithm in plain numpy.
loader  batches of 64 x 8,192 tokens from page cache, handed over by 0, 1 or 2 workers.

Needs 6 GB in FOLDER (default: the folder for temporary files), 12 GiB of memory for MaxText's order, ten minutes and
requirements-dev.txt. Prints a table and, last, one line of JSON.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

from corpora import literal_filter

import data

B, S, VOCABULARY, FILES, FILE_TOKENS = 64, 8192, 100278, 8, 2**23
TABLE = []


def report(part: str, case: str, measured: str, **numbers) -> None:
    print(f"| {part} | {case} | {measured} |", flush=True)
    TABLE.append({"part": part, "case": case} | numbers)


# ------------------------------------------------------------------------------------------------------------- orders


def maxtext_order(n: int) -> np.ndarray:
    """As MaxText's OlmoIndexSampler makes it, for the whole epoch, in every process."""
    return np.random.default_rng(34522).permutation(n).astype(np.uint64, copy=False)


def order_child(kind: str, n: int, folder: str) -> None:
    """In a process of its own: gets the order, looks up a batch of 512, prints seconds and the peak of its memory."""
    began = time.perf_counter()
    order = maxtext_order(n) if kind == "maxtext" else data.epoch_order(kind, n, 34521, 1, folder)
    ready = time.perf_counter()
    order[np.arange(512) + n // 2]
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"ready_s": ready - began, "batch_s": done - ready, "peak_bytes": peak}))


def bench_orders(n: int, folder: Path) -> None:
    cases = {
        "olmo_core, built and written, once a machine": "olmo_core",
        "olmo_core, opened by every other process (pages are shared)": "olmo_core",
        "feistel, in every process": "feistel",
        "MaxText's: all of it as uint64, in every process": "maxtext",
    }
    for case, kind in cases.items():
        command = [sys.executable, __file__, "--child", kind, str(n), str(folder / "order")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            report(f"order of {n:,}", case, f"failed with {done.returncode}: out of memory?", failed=done.returncode)
            continue
        r = json.loads(done.stdout)
        what = f"{r['ready_s']:.2f} s, peak {r['peak_bytes'] / 2**30:.2f} GiB; 512 look-ups {1e3 * r['batch_s']:.2f} ms"
        report(f"order of {n:,}", case, what, **r)


# ------------------------------------------------------------------------------------------------------------- filter


def near_misses(rng: np.random.Generator) -> np.ndarray:
    """[S]: patterns of 1 to 13 tokens, 24 to 31 times each, one after another: much to look at, nothing to filter."""
    parts, length = [], 0
    while length < S:
        period = int(rng.integers(1, 14))
        parts.append(np.resize(rng.integers(0, VOCABULARY, period), period * int(rng.integers(24, 32))))
        length += len(parts[-1])
    return np.concatenate(parts)[:S]


def source_bytes() -> np.ndarray:
    """[B * S]: the bytes of Python source, a token each: indented text, which repeats more than words do."""
    content = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    return np.frombuffer(content, np.uint8)[: B * S]


def seconds(call, at_least: float = 2.0) -> float:
    """Of one call: the fastest of those that fit in the time, five at least."""
    times = []
    while len(times) < 5 or sum(times) < at_least:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def bench_filter() -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "random": rng.integers(0, VOCABULARY, (B, S)),
        "bytes of Python source": source_bytes().reshape(B, S),
        "repetitive, none filtered": np.stack([near_misses(rng) for _ in range(B)]),
        "constant": np.full((B, S), 7),
    }
    for kind, tokens in kinds.items():
        tokens = tokens.astype(np.int32)
        expected = [literal_filter(row) for row in tokens]
        if data.repetition_filtered(tokens).tolist() != expected:
            raise RuntimeError(f"{kind}: the two filters decide differently")
        ours = B / seconds(lambda tokens=tokens: data.repetition_filtered(tokens))
        plain = 4 / seconds(lambda tokens=tokens: [literal_filter(row) for row in tokens[:4]])
        what = f"{ours:,.0f} instances/s; plain numpy {plain:,.0f}; {ours / plain:.1f} times"
        report("filter", f"{kind} ({sum(expected)} of {B} filtered)", what, ours=ours, plain=plain)


# ------------------------------------------------------------------------------------------------------------- loader


def bench_loader(folder: Path) -> None:
    rng, files = np.random.default_rng(1), []
    for i in range(FILES):
        path = folder / f"{i}.npy"
        rng.integers(0, VOCABULARY, FILE_TOKENS).astype("<u4").tofile(path)
        files.append(("random", path))
    index = data.build_index(files, folder, S, tokenizer="none", vocab_size=VOCABULARY, eos_id=100257)
    data.write_index(index, folder / "index.json")
    for filtered in (False, True):
        config = data.DataConfig(str(folder / "index.json"), "olmo_core", 34521, S, B, filtered, None, False)
        source = data.open_data(config)
        instances = source.instances_at(0)
        tokens = np.stack([source.read(i) for i in instances])
        reading = seconds(lambda source=source, ids=instances: np.stack([source.read(i) for i in ids]))
        finish = seconds(lambda t=tokens, i=instances, c=config: data.finish_batch(t, i, index, c))
        on = "with the filter" if filtered else "without"
        what = f"{1e3 * reading:.2f} ms reading and checking, {1e3 * finish:.2f} ms the rest"
        report("a batch of 64 x 8,192", on, what, read_s=reading, finish_s=finish)
        for workers in (0, 1, 2):
            steps = 400
            epochs = -(-(steps + 20) // source.batches_per_epoch)
            stop = epochs * source.usable
            with contextlib.closing(data.loader(source, 0, stop, workers)) as batches:
                for _ in range(20):  # until the workers run
                    next(batches)
                began = time.perf_counter()
                for _ in range(steps):
                    next(batches)
                speed = steps * B * S / (time.perf_counter() - began)
            case = f"{on}, {workers} worker{'' if workers == 1 else 's'}"
            report("loader", case, f"{speed / 1e6:.0f} million tokens/s", tokens_per_second=speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", nargs="+", choices=("order", "filter", "loader"), default=["order", "filter", "loader"]
    )
    parser.add_argument("--instances", type=int, default=724_000_000)
    parser.add_argument("--folder", help="where token files and the order are put while it runs")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, n, folder = args.child
        return order_child(kind, int(n), folder)
    print("| part | case | measured |\n| --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if "order" in args.part:
            bench_orders(args.instances, Path(folder))
        if "filter" in args.part:
            bench_filter()
        if "loader" in args.part:
            bench_loader(Path(folder))
    print(json.dumps({"results": TABLE, "cores": os.cpu_count(), "numpy": np.__version__}))


if __name__ == "__main__":
    main()
