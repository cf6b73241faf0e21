"""Proofs about data: an epoch holds every instance once; an order is Ai2's; every id is in the vocabulary.

    python tools/audit.py epoch data/quickstart/train.json --global-batch 8 --hosts 4,2 --workers 0,2
    python tools/audit.py order data/quickstart/train.json --order-dir runs/quickstart/order
    python tools/audit.py ids data/quickstart/train.json

Exit codes as train.py's; `epoch` ends with 1 where the proof fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import signal
import sys
import zlib
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from data import (
    GLOBAL_BATCH,
    ROOT_HELP,
    SEED,
    BatchSource,
    DataConfig,
    DataError,
    Index,
    TokenFile,
    epoch_order,
    file_fault,
    find_index,
    load_index,
    loader,
    local_path,
    number,
    olmo_core_permutation,
    open_data,
    order_path,
    progress_bar,
    read_tokens,
    summarise,
    warn,
)
from processes import add_json, add_verb, check_room, run_command
from vocabulary import EOS_WITHIN, PAD_FRACTION

SCAN_TOKENS = 2**22  # tokens that are looked at at once


def check_order(args: argparse.Namespace) -> dict:
    """Builds the order file of an epoch, or compares the one that is there with a fresh build; memory for one of them."""
    n, seed, epoch = load_index(args.index).instances, args.seed, args.epoch
    path = order_path(args.order_dir, n, seed, epoch)
    if not (was_there := path.exists()):
        check_room(path.parent, 4 * n)
    epoch_order("olmo_core", n, seed, epoch, args.order_dir)
    if was_there:
        # The file is read piece by piece beside a fresh permutation, so that memory holds one order and not two.
        fresh = olmo_core_permutation(n, seed, epoch)
        for part, cached in enumerate(read_tokens(path, np.dtype("<u4"), SCAN_TOKENS)):
            first = part * SCAN_TOKENS
            if len(bad := np.flatnonzero(cached != fresh[first : first + SCAN_TOKENS])):
                at = first + bad[0]
                got = f"got instance {cached[bad[0]]} at position {at}, expected {fresh[at]}"
                raise DataError(f"{path}: {got}; fix: delete it, it will be built again")
    done = {"order": str(path), "done": "checked" if was_there else "built"}
    return done | {"instances": n, "seed": seed, "epoch": epoch, "bytes": 4 * n}


class InstanceSource(BatchSource):
    """Which instances a batch holds, without their tokens: an epoch of 24 TB can be audited before it has been fetched."""

    def batch_at(self, position: int) -> dict:
        return {"instance": self.instances_at(position)}


def without_tokens(config: DataConfig, data_root: str | None, order_dir: str | None) -> InstanceSource:
    path = find_index(config.index, data_root)
    index = load_index(path)
    if index.instances < config.global_batch:
        raise DataError(
            f"{path}: got {index.instances} instances, expected at least one batch of {config.global_batch}"
        )
    return InstanceSource(index, path, config, path.parent, order_dir, np.arange(config.global_batch), {})


def audit(args: argparse.Namespace) -> dict:
    """How often an epoch visits every instance, counted behind `loader`, host after host, with its worker processes.

    --hosts 4,2 lets 4 hosts read the first half of the epoch and 2 the rest, as after a restart on another machine.
    Where tokens are read they are compared, by a checksum, with those of the files read from their start to their end.
    """
    index = load_index(args.index)
    config = DataConfig(args.index, args.order, args.seed, index.sequence_length, args.global_batch, False, None, False)
    whole = (without_tokens if args.no_read else open_data)(config, args.data_root, args.order_dir)
    n, B, steps = whole.instances, config.global_batch, whole.batches_per_epoch
    if min(args.hosts) < 1 or any(B % hosts for hosts in args.hosts):
        raise DataError(f"--hosts: got {args.hosts}, expected numbers of hosts that divide {B} rows")
    if not 0 <= min(args.workers) <= max(args.workers) <= 1024 or len(args.workers) > len(args.hosts):
        got = f"--workers: got {args.workers} with --hosts {args.hosts}"
        raise DataError(f"{got}, expected 0 .. {1024}, no more of them than of --hosts")
    # The epoch falls into as many parts as --hosts has numbers. A part begins at a global batch, as a restart does.
    parts = [(args.epoch - 1) * whole.usable + steps * i // len(args.hosts) * B for i in range(len(args.hosts) + 1)]
    whole.instances_at(parts[0])  # builds the order once, for all that follow
    visits, checksums = np.zeros(n, np.uint16), np.zeros(n, np.uint32)
    with progress_bar(total=steps * B, desc="audit", unit="row", unit_scale=True) as progress:
        for (start, stop), hosts, workers in zip(
            itertools.pairwise(parts), args.hosts, itertools.cycle(args.workers), strict=False
        ):
            # One host after another reads its rows of all batches in the part, through the loader that training uses.
            for rows in np.split(np.arange(B), hosts):
                host = copy.copy(whole)
                host.rows = rows
                with contextlib.closing(loader(host, start, stop, workers)) as batches:
                    for batch in batches:
                        # np.add.at counts an instance twice that stands twice in a batch; visits[...] += 1 would count
                        # it once.
                        np.add.at(visits, batch["instance"], 1)
                        for instance, tokens in zip(batch["instance"], batch.get("tokens", ()), strict=False):
                            checksums[instance] = zlib.crc32(tokens.astype(index.dtype))
                        progress.update(len(rows))
    order = epoch_order(config.order, n, config.seed, args.epoch, args.order_dir)
    # What should have been visited follows from the order alone: all but its last N mod B positions, once.
    dropped = np.asarray(order[np.arange(whole.usable, n)], np.int64)
    expected = np.ones(n, np.uint16)
    expected[dropped] = 0
    wrong = 0 if args.no_read else int(np.count_nonzero((checksums != file_checksums(whole)) & (visits > 0)))
    counts = np.bincount(visits)
    exact = bool((visits == expected).all()) and wrong == 0
    return {
        "index": args.index,
        "fingerprint": index.fingerprint,
        "instances": n,
        "epoch": args.epoch,
        "steps": steps,
        "hosts": args.hosts,
        "workers": args.workers,
        "visits": {str(times): int(counts[times]) for times in np.flatnonzero(counts)},  # of so many instances
        "contents": "not read" if args.no_read else f"{wrong} instances with other tokens than their files",
        "dropped": dropped.tolist(),
        "exact": exact,
        "verdict": f"exact: every instance once, but for the {len(dropped):,} dropped"
        if exact
        else "NOT exact: instances were missed or repeated, or have other tokens",
    }


def file_checksums(source: BatchSource) -> np.ndarray:
    """uint32 [instances]: crc32 of each instance's tokens, from reading file after file."""
    index, sums = source.index, []
    for file in progress_bar(index.files, desc="files", unit="file"):
        windows = read_tokens(source.root / file.path, np.dtype(index.dtype), index.sequence_length)
        sums += [zlib.crc32(tokens) for tokens in itertools.islice(windows, file.instances)]
    return np.array(sums, np.uint32)


def check_ids(args: argparse.Namespace) -> dict:
    """Reads every token of an index: ids, EOS and padding by file. Warns about 1M tokens (or data) without EOS and about
    more than 1 % padding."""
    index = load_index(args.index)
    root = local_path(args.data_root) if args.data_root else local_path(args.index).parent
    if faults := [f for file in index.files if (f := file_fault(root / file.path, file, index.itemsize))]:
        raise DataError("\n".join(faults))
    scans = [scan_ids(root / file.path, file, index) for file in index.files]
    if bad := [scan for scan in scans if scan["bad"]]:
        limit = f"ids are not below {index.vocab_size}, the first"
        raise DataError("\n".join(f"{root / s['file']}: {s['bad']} {limit} {s['first_bad']}" for s in bad))
    for scan in scans:
        if scan["eos"] == 0 and (scan["tokens"] >= EOS_WITHIN or sum(s["eos"] for s in scans) == 0):
            warn(f"{scan['file']}: EOS {index.eos_id} is in none of {scan['tokens']} tokens; another tokenizer?")
        if scan["pad"] > PAD_FRACTION * scan["tokens"]:
            warn(f"{scan['file']}: {scan['pad']} of {scan['tokens']} tokens are padding ({index.pad_id})")
    verdict = f"every id is below the vocabulary's {index.vocab_size:,}"
    return {"index": args.index} | summarise(index) | {"ids": scans, "verdict": verdict}


def scan_ids(path: Path, file: TokenFile, index: Index) -> dict:
    """Counts in one token file: tokens, EOS, padding, ids outside the vocabulary and where the first of them is."""
    counts = {"file": file.path, "label": file.label, "tokens": 0, "eos": 0, "pad": 0, "bad": 0, "first_bad": None}
    bar = progress_bar(desc=file.path, total=file.bytes, unit="B", unit_scale=True, leave=False)
    for tokens in read_tokens(path, np.dtype(index.dtype).newbyteorder("<"), SCAN_TOKENS):
        bad = np.flatnonzero(tokens >= index.vocab_size)
        if len(bad) and counts["first_bad"] is None:
            counts["first_bad"] = {"offset": counts["tokens"] + int(bad[0]), "id": int(tokens[bad[0]])}
        counts["bad"] += len(bad)
        counts["eos"] += int(np.count_nonzero(tokens == index.eos_id))
        counts["pad"] += 0 if index.pad_id is None else int(np.count_nonzero(tokens == index.pad_id))
        counts["tokens"] += len(tokens)
        bar.update(tokens.nbytes)
    bar.close()
    return counts


def numbers(text: str) -> list[int]:
    """4,2 -> [4, 2]"""
    return [int(part) for part in text.split(",")]


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    epoch = {"type": number(1, 2**30), "default": 1, "help": "from 1 (default: %(default)s)"}
    seed = {"type": SEED, "default": 34521, "help": "default: %(default)s, as Ai2"}

    p = add_verb(verbs, "epoch", "Prove through the loader that an epoch holds every instance once; exit 1 if it does not.",
                 "python tools/audit.py epoch data/quickstart/train.json --global-batch 8 --hosts 4,2 --workers 0,2")  # fmt: skip
    p.set_defaults(command=audit)
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--global-batch", type=GLOBAL_BATCH, required=True, help="B, in instances")
    p.add_argument("--hosts", type=numbers, default=[4], help="how many read; 4,2: another number from mid-epoch on")
    p.add_argument("--workers", type=numbers, default=[0], help="worker processes of each; 0,2: another number, too")
    p.add_argument("--epoch", **epoch)
    p.add_argument("--seed", **seed)
    p.add_argument("--order", default="olmo_core", help="olmo_core | feistel (default: %(default)s)")
    p.add_argument("--order-dir", help="where the order is cached (default: not at all)")
    p.add_argument("--no-read", action="store_true", help="count instances only; the token files need not be there")
    p.add_argument("--data-root", help=ROOT_HELP)

    p = add_verb(verbs, "order", "Build an epoch's olmo_core order ahead of a run, or check the file; exit 2 if it is bad.",
                 "python tools/audit.py order data/quickstart/train.json --order-dir runs/quickstart/order")  # fmt: skip
    p.set_defaults(command=check_order)
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--order-dir", required=True, help="where the file is; train.py looks in RUN_DIR/order")
    p.add_argument("--seed", **seed)
    p.add_argument("--epoch", **epoch)

    p = add_verb(verbs, "ids", "Read every token of an index: ids, EOS and padding by file; exit 2 names every bad file.",
                 "python tools/audit.py ids data/quickstart/train.json")  # fmt: skip
    p.set_defaults(command=check_ids)
    p.add_argument("index", metavar="INDEX")
    p.add_argument("--data-root", help=ROOT_HELP)
    for p in verbs.choices.values():
        add_json(p)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args, result = parse_args(arguments), {}

    def command() -> dict:
        nonlocal result
        result = args.command(args)
        return result

    return run_command("audit.py", command, args.json) or int(not result.get("exact", True))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # orderly, with what worker processes share
    sys.exit(main())
