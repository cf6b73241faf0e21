"""Measure convert.py on a checkpoint of the 7B's shape: speed, memory, and that every bit comes back.

    python bench/bench_convert.py FOLDER [--layers 32]

Writes a synthetic bf16 Hugging Face checkpoint into a new folder below FOLDER (32 layers: 14.6 GB; with what is made
of it about 75 GB in all), runs from-hf and to-hf --dtype bfloat16 as processes, compares the hash of every tensor,
deletes everything again and prints one JSON object. Peak memory is what the kernel counted for each process.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.extend([str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "tests")])

import ml_dtypes
import numpy as np
from tqdm import tqdm

import convert
import model
from config import build
from processes import HERE, read_yaml

BLOCK = 2**26  # bytes made, read or hashed at once
SHARD = 2**30  # bytes of one file, which is held in memory while it is written


def config_of(layers: int) -> tuple[dict, dict]:
    """(config.json, shapes) of the 7B with another number of layers."""
    raw = read_yaml(HERE / "configs" / "stage1.yaml")["model"] | {"n_layers": layers}
    config = build(model.ModelConfig, raw, "model")
    ids = {"eos_token_id": convert.DOLMA2[1], "pad_token_id": convert.DOLMA2[2]}
    return convert.hf_config(config, 5, 8192, "bfloat16", ids), convert.hf_shapes(config)


def random_tensor(tensor: str, shape: tuple[int, ...], bar: tqdm) -> np.ndarray:
    """bf16 numbers of the size of weights, the same ones every time."""
    rng, words = np.random.default_rng(list(tensor.encode())), np.empty(int(np.prod(shape)), np.uint16)
    for start in range(0, len(words), BLOCK // 2):
        part = words[start : start + BLOCK // 2]
        part[:] = np.frombuffer(rng.bytes(part.nbytes), np.uint16)
        part &= np.uint16(0x81FF)
        part |= np.uint16(0x3C00)  # 2**-7 .. 2**-5
        bar.update(part.nbytes)
    return words.view(ml_dtypes.bfloat16).reshape(shape)


def write_checkpoint(folder: Path, layers: int) -> dict[str, str]:
    """Returns the hash of every tensor."""
    config, shapes = config_of(layers)
    dtype, hashes = np.dtype(ml_dtypes.bfloat16), {}
    shards = convert.split_shards(shapes, dtype, SHARD)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder.mkdir(parents=True)
    size = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    with convert.progress(size, "writing") as bar:
        for name, shard in zip(names, shards, strict=True):
            tensors = {tensor: random_tensor(tensor, shapes[tensor], bar) for tensor in shard}
            for tensor, x in tensors.items():
                hashes[tensor] = hashlib.blake2b(x.reshape(-1).view(np.uint8), digest_size=16).hexdigest()
            convert.write_shard(folder / name, tensors)
    weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    convert.write_json(folder / "model.safetensors.index.json", index)
    convert.write_json(folder / "config.json", config)
    return hashes


def read_hashes(folder: Path) -> dict[str, str]:
    """Of the tensors that stand in the files, read without convert.py."""
    hashes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for tensor, entry in tqdm(header.items(), desc=path.name, disable=None):
                if tensor == "__metadata__":
                    continue
                first, end = entry["data_offsets"]
                file.seek(start + first)
                hashed = hashlib.blake2b(digest_size=16)
                while first < end:
                    chunk = file.read(min(BLOCK, end - first))
                    hashed.update(chunk)
                    first += len(chunk)
                hashes[tensor] = hashed.hexdigest()
    return hashes


def measure(arguments: list[str], moved: int) -> dict:
    """Wall time, speed over the bytes of the bf16 checkpoint and peak resident memory of one verb."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(HERE / "convert.py"), *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"convert.py {arguments[0]} failed")
    return {
        "seconds": round(seconds, 1),
        "MB_per_second": round(moved / seconds / 1e6, 1),
        "peak_GiB": round(usage.ru_maxrss / 2**20, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", help="where there is room; nothing is left there")
    parser.add_argument("--layers", type=int, default=32, help="default: 32, the 7B")
    args = parser.parse_args()
    work = Path(args.folder).absolute() / f"bench_convert.{os.getpid()}"
    try:
        # In a process of its own: what the kernel counts as the peak of a process begins with that of its parent.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            written = pool.submit(write_checkpoint, work / "hf", args.layers).result()
        size = sum(p.stat().st_size for p in (work / "hf").glob("*.safetensors"))
        result = {"layers": args.layers, "checkpoint_GB": round(size / 1e9, 2)}
        result["from_hf"] = measure(["from-hf", str(work / "hf"), str(work / "run")], size)
        orbax = sum(p.stat().st_size for p in (work / "run").rglob("*") if p.is_file())
        result["orbax_GB"] = round(orbax / 1e9, 2)
        result["to_hf"] = measure(["to-hf", str(work / "run"), str(work / "back"), "--dtype", "bfloat16"], size)
        result["tensors"] = len(written)
        result["bit_exact"] = read_hashes(work / "back") == written
        print(json.dumps(result, indent=1))
        return 0 if result["bit_exact"] else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
