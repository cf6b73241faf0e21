"""OLMo 3's own tokenizer.json (dolma2), byte for byte, from the ranks of cl100k_base.

    python tools/dolma2_tokenizer.py cl100k_base.tiktoken --out data/dolma2/tokenizer.json

Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))

from text_to_tokens import expand, read_bytes

from data import CL100K_PATTERN, EOS, PAD, DataError, local_path, replacing
from processes import add_json, run_command, sole_writer

# dolma2 is cl100k_base, which ends at id 100255, and these; the second list is no special tokens, but part of the text.
DOLMA2_SPECIAL = {
    "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
    "<|im_start|>": 100264, "<|im_end|>": 100265, "<|endofprompt|>": 100276, "<|pad|>": 100277,
}  # fmt: skip
DOLMA2_ADDED = {
    "|||PHONE_NUMBER|||": 100261, "|||EMAIL_ADDRESS|||": 100262, "|||IP_ADDRESS|||": 100263,
    "<|extra_id_0|>": 100256, **{f"<|extra_id_{i}|>": 100265 + i for i in range(1, 11)},
}  # fmt: skip
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"


def last_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """For each token of several bytes, by rank, the two that tiktoken joins last to make it. tiktoken keeps ranks alone
    and joins the pair of the lowest rank; a tokenizer.json wants the pairs."""
    for token in sorted(ranks, key=ranks.get):
        parts = [token[i : i + 1] for i in range(len(token))]
        # Join neighbours as tiktoken does, the pair of the lowest rank first, until two are left.
        while len(parts) > 2:
            joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            i = joined.index(min(joined))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def dolma2_tokenizer(ranks: dict[bytes, int]) -> bytes:
    """OLMo 3's tokenizer.json, as Ai2's packages hold it, byte for byte, from the ranks of cl100k_base."""
    # How byte-level BPE spells bytes: printable ones as themselves, the others as the letters from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {b: chr(b) for b in sorted(printable)}
    letters |= {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - printable))}

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    added = sorted((DOLMA2_SPECIAL | DOLMA2_ADDED).items(), key=lambda item: item[1])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": CL100K_PATTERN}, "behavior": "Removed", "invert": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t} | plain | {"special": t in DOLMA2_SPECIAL} for t, i in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {spell(token): ranks[token] for token in sorted(ranks, key=ranks.get)} | dict(added),
            "merges": [f"{spell(a)} {spell(b)}" for a, b in last_merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def make_tokenizer(args: argparse.Namespace) -> dict:
    out = local_path(args.out)
    if out.is_dir():
        raise DataError(f"--out {out}: got a folder, expected a file to write; fix: --out {out}/tokenizer.json")
    with tqdm(disable=True) as progress:
        content = b"".join(read_bytes(expand([args.ranks], (".tiktoken", ".tiktoken.gz"))[0], progress))
    if (sha256 := hashlib.sha256(content).hexdigest()) != CL100K_SHA256:
        raise DataError(f"{args.ranks}: got sha256 {sha256}, expected cl100k_base's {CL100K_SHA256}; fix: another file")
    # Each line of the file: a token in base64, a blank, its rank. The rank is its id.
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    tokenizer = dolma2_tokenizer(ranks)
    with sole_writer(out), replacing(out) as f:
        f.write(tokenizer)
    known = {"vocab_size": len(ranks) + len(DOLMA2_SPECIAL | DOLMA2_ADDED), "eos_id": DOLMA2_SPECIAL[EOS]}
    return {"out": args.out} | known | {"pad_id": DOLMA2_SPECIAL[PAD], "sha256": hashlib.sha256(tokenizer).hexdigest()}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", metavar="RANKS", help="cl100k_base.tiktoken, or that with .gz")
    parser.add_argument("--out", required=True, help="the tokenizer.json to write")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("dolma2_tokenizer.py", lambda: make_tokenizer(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
