"""Average checkpoints: two runs of stage 2, or the last checkpoints of stage 3, become one model.

    python tools/average.py runs/stage2_32b runs/stage2_32b_ingredient2 --moments --out runs/stage2_32b_average
    python tools/average.py runs/stage3_32b/checkpoints/{10000,11000,11921} --out runs/olmo3_32b

Every number becomes (x1 + x2 + ... + xn) / n, summed in fp32 in the order given. DST is a run directory that holds step 0,
which every command opens; its meta names the sources. Adam's moments are averaged with --moments, for a next stage that
starts with --init-state adam. It is no run itself, so training does not resume it.

The sources are streams: a layer's matrix is in memory at a time, never a model. Sources: OLMo-core
scripts/merge_core_checkpoints.py; official/OLMo3/OLMo-3-1025-32B.csv says which checkpoints Ai2 averages.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

import model
from checkpoint import FORMAT_VERSION, check_tree, differences, reading, run_of
from config import assemble_config, pin_settings, versions
from convert import (
    Checkpoint,
    CheckSums,
    OrbaxLeaves,
    appears_whole,
    chunk_shapes,
    finish_step,
    open_checkpoint,
    param_leaves,
    pieces,
    progress,
)
from data import local_path
from processes import EXIT_PREEMPTED, add_json, run_command
from train import optimizer
from vocabulary import comparable


def check_sources(paths: list[str], sources: list[Checkpoint]) -> None:
    """ValueError unless they are several checkpoints of one model and one vocabulary."""
    if len(sources) < 2:
        raise ValueError(f"CKPT: got {len(sources)} checkpoint, expected two or more; fix: name those to average")
    first = sources[0]
    for i, (path, source) in enumerate(zip(paths, sources, strict=True)):
        if source.folder in [other.folder for other in sources[:i]]:
            raise ValueError(f"{path}: got {source.folder} twice, expected different checkpoints; fix: name each once")
        for key, then, now in differences(first.meta["config"]["model"], source.meta["config"]["model"]):
            raise ValueError(f"{path}: model.{key}: got {now}, expected {then} as in {paths[0]}; fix: average checkpoints "
                             "of one model")  # fmt: skip
        theirs = source.meta["data"].get("vocabulary", {})
        for key, then in first.meta["data"].get("vocabulary", {}).items():
            now = theirs.get(key, then)
            if now != then and (key != "tokenizer" or comparable(then, now)):
                raise ValueError(f"{path}: vocabulary: {key}: got {now}, expected {then} as in {paths[0]}; fix: average "
                                 "checkpoints of one tokenizer")  # fmt: skip


def optimizer_leaves(source: Checkpoint, path: str):
    """Shapes and dtypes of a checkpoint's optimizer state, which is there. ValueError if it is not."""
    if not (source.folder / "opt_state").is_dir():
        raise ValueError(f"{path}: got no optimizer state, expected moments; fix: leave --moments out")
    config = assemble_config(source.meta["config"], str(source.folder), "cpu", [])
    leaves = jax.eval_shape(optimizer(config).init, param_leaves(source.model))
    with reading(source.folder):
        check_tree(source.folder / "opt_state", leaves)
    return leaves


class Mean:
    """One item of the average, made from the same item of the sources."""

    def __init__(self, item: str, sources: list[Checkpoint], target: Path, leaves):
        self.item, self.sources = item, sources
        target.mkdir(parents=True)
        self.read = [OrbaxLeaves(source.folder / item) for source in sources]
        self.sums_read, self.sums = [CheckSums() for _ in sources], CheckSums()
        self.target = OrbaxLeaves(target)
        self.target.create(leaves, chunk_shapes(sources[0].model))

    def add(self, prefix: str, bar) -> None:
        """The leaves that begin with `prefix`: a whole tree like the parameters."""
        for piece in pieces(self.sources[0].model):
            leaf, total = prefix + piece.leaf, None
            for leaves, sums in zip(self.read, self.sums_read, strict=True):
                x = leaves.read(leaf, piece.at)
                sums.add(leaf, x)
                total = x if total is None else total + x
            mean = total / np.float32(len(self.sources))
            self.sums.add(leaf, mean)
            self.target.write(leaf, piece.at, mean)
            bar.update(mean.nbytes)

    def finish(self) -> dict[str, int]:
        """Wait for the writes; the sums of what was written. RunFailed if a source held other numbers than it had saved."""
        for source, sums in zip(self.sources, self.sums_read, strict=True):
            sums.compare(source.meta, source.folder, self.item)
        self.target.flush()
        return dict(self.sums.sums)


def average_moments(sources: list[Checkpoint], target: Path, leaves, bar) -> dict[str, int]:
    """Both moments and Adam's count are averaged. The skip rule's window is empty, as at the start of any run."""
    mean = Mean("opt_state", sources, target, leaves)
    for prefix in ("mu.", "nu."):
        mean.add(prefix, bar)
    count = np.int32(round(np.mean([leaves.read("count") for leaves in mean.read], dtype=np.float64)))
    rest = {
        name: np.zeros(x.shape, x.dtype) for name, x in leaves._asdict().items() if name not in ("mu", "nu", "count")
    }
    for name, x in (rest | {"count": count}).items():
        mean.target.write(name, (), np.asarray(x))
    return mean.finish() | {f".{name}": 0 for name in rest} | {".count": int(count)}


def average(args: argparse.Namespace) -> dict:
    sources = [open_checkpoint(path) for path in args.checkpoints]
    check_sources(args.checkpoints, sources)
    first, moments = sources[0], None
    for path, source in zip(args.checkpoints, sources, strict=True) if args.moments else ():
        state = optimizer_leaves(source, path)
        moments = moments or state  # windows may differ in length; that of the first is noted in the config
    size = 4 * model.parameter_count(first.model) * (3 if args.moments else 1)
    with appears_whole(args.out, size) as building, progress(size, "average") as bar:
        step_folder = building / "checkpoints" / "0"
        params = Mean("params", sources, step_folder / "params", param_leaves(first.model))
        params.add("", bar)
        sums = {"params": params.finish()}
        if moments is not None:
            sums["opt_state"] = average_moments(sources, step_folder / "opt_state", moments, bar)
        left_out = ("checksums", "versions", "environment", "items", "format_version")
        finish_step(step_folder, {
            "format_version": FORMAT_VERSION, "step": 0, "instances_seen": 0, "tokens_seen": 0,
            "items": [*sums, "meta"], "data": first.meta["data"], "config": first.meta["config"], "checksums": sums,
            "averaged": [{"path": str(source.folder)} | {k: v for k, v in source.meta.items() if k not in left_out}
                         for source in sources],
            "versions": versions(),
        })  # fmt: skip
        if (tokenizer := run_of(first.folder)) and (tokenizer / "hf").is_dir():  # that of an import travels
            shutil.copytree(tokenizer / "hf", building / "hf")
    return {
        "checkpoint": str(local_path(args.out) / "checkpoints" / "0"),
        "parameters": model.parameter_count(first.model, False),
        "averaged": [{"path": str(s.folder), "run": s.meta["config"]["run"]["name"], "step": s.meta["step"]} for s in sources],
        "moments": args.moments,
        "verdict": f"written; next: python evaluate.py loss {args.out}",
    }  # fmt: skip


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoints", metavar="CKPT", nargs="+", help="a run directory (its newest step) or RUN/checkpoints/N"
    )
    parser.add_argument("--out", required=True, metavar="DST", help="run directory to make; must not exist")
    parser.add_argument("--moments", action="store_true", help="average Adam's moments, too: three times the size")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PREEMPTED))  # so that a half-built folder is removed
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, and another process may hold it

    def command() -> dict:
        pin_settings()
        return average(args)

    return run_command("average.py", command, args.json)


if __name__ == "__main__":
    sys.exit(main())
