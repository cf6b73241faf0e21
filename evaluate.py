"""Evaluate checkpoints: held-out loss. Training loss proves nothing; this does.

    python evaluate.py loss runs/quickstart
    python evaluate.py loss runs/quickstart/checkpoints/200 --index data/quickstart/heldout.json --batch 4

The model is the one that the checkpoint's own meta describes; the mesh, the restore and the held-out evaluation are
train.py's, so the number is the one that training printed. Every instance of the index counts once, weighted by its
tokens, whatever the batch size and the number of devices. Cross-entropy alone, never z-loss.
"""

import argparse
import json
import math
import sys

import train


def heldout_loss(args) -> dict:
    """Held-out CE (nats a token) and perplexity of one checkpoint, by label and over all."""
    step_folder = train.find_checkpoint(args.checkpoint)
    try:
        meta = train.read_meta(step_folder)
    except train.DamagedCheckpoint as e:
        raise train.RunFailed(f"{step_folder}: {e}") from e
    c = train.assemble_config(meta["config"], str(step_folder), args.hardware, args.set)
    batch = c.data.global_batch if args.batch is None else args.batch
    if batch < 1:
        raise ValueError(f"--batch: got {batch}, expected a positive number")
    mesh = train.make_mesh(c, batch)
    index = args.index or c.run.eval_index
    if index is None:
        raise ValueError(f"--index: missing, and the run of {step_folder} has no run.eval_index")
    limit = train.eval_limit(c) if args.index is None else None  # the run's own held-out set as the run saw it
    held_out = train.HeldOut(c, mesh, index, args.data_root, batch, limit)
    params = train.restore_item(step_folder, "params", train.param_shapes(c, mesh))
    results = held_out(params, progress=sys.stderr.isatty())
    for r in results.values():
        r |= {name: None for name in ("ce", "perplexity") if not math.isfinite(r[name])}  # JSON has neither inf nor NaN
    return {"checkpoint": str(step_folder), "step": meta["step"], "index": index, "heldout": results}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    loss = verbs.add_parser(
        "loss", help="held-out cross-entropy by label", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python evaluate.py loss runs/quickstart --index data/quickstart/heldout.json",
    )  # fmt: skip
    loss.add_argument("checkpoint", metavar="CKPT", help="a run directory (its newest step) or RUN/checkpoints/N")
    loss.add_argument("--index", help="held-out index; default: the run's run.eval_index, as in training")
    loss.add_argument("--data-root", help="folder that the index's paths start from; default: the index's own")
    loss.add_argument("--batch", type=int, help="sequences at once over all devices; default: the run's global batch")
    loss.add_argument("--hardware", help="a file, or a name in configs/hardware/; default: by the device found")
    loss.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of either file")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    return train.run_command("evaluate.py", lambda: print(json.dumps(heldout_loss(args), indent=1)))


if __name__ == "__main__":
    sys.exit(main())
