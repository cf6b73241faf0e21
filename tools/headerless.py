"""Token ids with a .npy header, or of another width, to headerless uint32. The old file is kept as FILE.orig.

    python tools/headerless.py part-0.npy
    python tools/headerless.py ids.bin --from int64

Ids that do not fit are refused, and nothing is written. Exit codes as train.py's.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from data import NPY_MAGIC, DataError, local_path, replacing
from processes import add_json, inputs_are_checked, run_command, sole_writer


def rewrite(args: argparse.Namespace) -> dict:
    path = local_path(args.file)
    old, dtype = path.with_name(path.name + ".orig"), np.dtype(args.to).newbyteorder("<")
    with open(path, "rb") as f:
        header = f.read(len(NPY_MAGIC)) == NPY_MAGIC
    if not header and args.source is None:
        raise DataError(f"{path}: got no .npy header; fix: say what its ids are, e.g. --from int64")
    with sole_writer(path):
        if old.exists():
            raise DataError(f"{old}: got a file that is there already, expected none; fix: move it away")
        try:
            ids = np.load(path) if header else np.fromfile(path, np.dtype(args.source).newbyteorder("<"))
        except (ValueError, EOFError) as e:
            raise DataError(f"{path}: cannot be read ({e}); fix: write the file again") from e
        if ids.dtype.kind not in "iu":
            raise DataError(f"{path}: got {ids.dtype}, expected integers; fix: tokenise the text again")
        if ids.size == 0 or ids.min() < 0 or ids.max() > np.iinfo(dtype).max:
            got = "no ids" if ids.size == 0 else f"ids {ids.min()} .. {ids.max()}"
            raise DataError(
                f"{path}: got {got}, expected 0 .. {np.iinfo(dtype).max}; fix: another --to, or write it again"
            )
        inputs_are_checked()
        with replacing(path.with_name(path.name + ".new")) as f:
            f.write(np.ascontiguousarray(ids.reshape(-1), dtype))
        # The new file is whole before the old one is renamed. Killed between the two renames, both still exist.
        os.rename(path, old)
        os.rename(f"{path}.new", path)
    return {"out": str(path), "kept": str(old), "tokens": int(ids.size)}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--from", dest="source", choices=("int32", "uint16", "int64", "uint64"),
                        help="type of the ids where no header says it")  # fmt: skip
    parser.add_argument("--to", choices=("uint32", "uint16"), default="uint32", help="default: %(default)s")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("headerless.py", lambda: rewrite(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
