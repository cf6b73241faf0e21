"""Conversations to token files and label masks, with Olmo 3's template: what the assistant says is learnt, the rest read.

    python tools/chat_to_tokens.py chats.jsonl --tokenizer tokenizer.json --out data/chat

    <|im_start|>system\\n...<|im_end|>\\n        only if there is one, or --system
    <|im_start|>user\\n...<|im_end|>\\n
    <|im_start|>assistant\\n...<|im_end|>\\n     learnt: the text and <|im_end|>
    <|im_start|>assistant\\n...<|endoftext|>    the last turn; learnt: the text and <|endoftext|>

Reads JSON lines, also .gz or .zst: {"messages": [{"role": ..., "content": ...}, ...]}, the list alone, "conversations"
with "from" and "value", or "prompt" and "completion"; and chatterbot-corpus's .yml, a question and its answers. Writes
OUT/train and OUT/heldout as open-instruct does (token_ids_part_0000.npy, labels_mask_part_0000.npy), with an index of
each. tools/pack.py goes on. Exit codes as train.py's.

Source: open-instruct dataset_transformation.py (template olmo_thinker) and numpy_dataset_conversion.py. What differs: words
that spell a special token stay words here; transformers would end a turn at them.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

from own_text import share_of
from quickstart import appears_whole
from text_to_tokens import PACKED, expand, read_lines

from data import (
    EOS,
    PAD,
    SEQUENCE_LENGTH,
    DataError,
    build_index,
    load_tokenizer,
    local_path,
    mask_path,
    progress_bar,
    replacing,
    write_index,
)
from processes import add_json, read_yaml, run_command, sole_writer
from vocabulary import Turns

SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in ("", *PACKED)) + (".yml",)
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "tool": "environment", "function": "environment"}
SHARD_TOKENS = 2**28  # 1 GiB of uint32, as open-instruct's chunks


# --- conversations


def read_conversations(paths: list[Path]) -> Iterator[tuple[str, list[dict]]]:
    """(where it stands, [{"role", "content"}, ...]) of each conversation."""
    with progress_bar(total=sum(p.stat().st_size for p in paths), desc="read", unit="B", unit_scale=True) as progress:
        for path in paths:
            if path.suffix == ".yml":
                for number, (question, *answers) in enumerate(read_yaml(path).get("conversations") or (), start=1):
                    for answer in answers:
                        turns = [
                            {"role": "user", "content": str(question)},
                            {"role": "assistant", "content": str(answer)},
                        ]
                        yield f"{path}, conversation {number}", turns
                progress.update(path.stat().st_size)
                continue
            for number, line in enumerate(read_lines(path, progress), start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, messages_of(line, where)


def messages_of(line: bytes, where: str) -> list[dict]:
    """The turns of one line, in any of the usual shapes."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not JSON ({e}); fix: one conversation a line") from e
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        row = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    turns = (
        row if isinstance(row, list) else isinstance(row, dict) and (row.get("messages") or row.get("conversations"))
    )
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: got no turns; fix: messages, conversations, or prompt and completion")
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: got the turn {json.dumps(turn)[:80]}, expected a role and a text")
        role = ROLES.get(role, role)
        if role not in ("system", "user", "assistant", "environment"):
            raise DataError(f"{where}: got the role {role!r}, expected system, user, assistant or environment")
        messages.append({"role": role, "content": content})
    return messages


# --- tokens


def encode(turns: Turns, eos: int, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """(token ids, which of them are learnt) of a conversation that ends with an assistant's turn."""
    ids, learnt = [], []
    for i, message in enumerate(messages):
        header = f"{message['role']}\n"
        said = turns.tokenizer.encode(header + message["content"], add_special_tokens=False)
        assistant, last = message["role"] == "assistant", i + 1 == len(messages)
        close = [eos] if assistant and last else turns.close
        ids += [turns.start, *said.ids, *close]
        # A token that holds the first letter of the text is learnt, though the header's end may be in it, too.
        learnt += [False, *(assistant and end > len(header) for _, end in said.offsets)]
        learnt += [assistant, *[False] * (len(close) - 1)]  # the closing token, and not the newline after it
    return ids, learnt


def trained_part(messages: list[dict]) -> list[dict]:
    """Without what follows the last assistant's turn, from which nothing could be learnt."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()), default=-1)
    return messages[: last + 1]


def chat_to_tokens(args: argparse.Namespace) -> dict:
    if not 0 <= args.held_out < 1:
        raise DataError(f"--held-out: got {args.held_out}, expected a share of the conversations below 1")
    paths, out = expand(args.inputs, SUFFIXES), local_path(args.out)
    tokenizer = load_tokenizer(args.tokenizer)
    turns, eos = Turns(tokenizer, args.tokenizer), tokenizer.token_to_id(EOS)
    if eos is None:
        raise DataError(f"--tokenizer {args.tokenizer}: got one without {EOS}, which ends a conversation")
    with sole_writer(out), appears_whole(out) as building:
        counts = write_splits(read_conversations(paths), partial(encode, turns, eos), building, args)
        index_splits(building, tokenizer, args)
    without = counts.pop("without an assistant's turn")
    return {"out": str(out), "splits": counts, "left_out": f"{without:,} conversations without an assistant's turn",
            "verdict": f"next: python tools/pack.py {out / 'train.json'} --out {out / 'packed'}"}  # fmt: skip


def write_splits(conversations, encode: Callable, out: Path, args: argparse.Namespace) -> dict:
    """Token files and masks of both splits. A hash of its first question decides where a conversation goes, so that no
    question is on both sides."""
    names = ("conversations", "tokens", "learnt")
    counts = {split: dict.fromkeys(names, 0) for split in ("train", "heldout")}
    waiting = {split: (array("I"), bytearray()) for split in counts}  # lists of a gigabyte of tokens would be ten
    numbers, empty = dict.fromkeys(counts, 0), 0

    def write(split: str) -> None:
        ids, learnt = waiting[split]
        if not ids:
            return
        path = out / split / f"token_ids_part_{numbers[split]:04}.npy"
        with replacing(mask_path(path)) as f:
            f.write(learnt)
        with replacing(path) as f:
            f.write(np.frombuffer(ids, np.uint32).astype("<u4"))
        counts[split]["tokens"] += len(ids)
        counts[split]["learnt"] += sum(learnt)
        waiting[split] = (array("I"), bytearray())
        numbers[split] += 1

    for _, messages in conversations:
        if not (messages := trained_part(messages)):
            empty += 1
            continue
        question = next((m["content"] for m in messages if m["role"] != "system"), "")
        if args.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": args.system}, *messages]
        split = "heldout" if share_of(question) < args.held_out else "train"
        counts[split]["conversations"] += 1
        for whole, part in zip(waiting[split], encode(messages), strict=True):
            whole.extend(part)
        if len(waiting[split][0]) >= SHARD_TOKENS:
            write(split)
    for split in counts:
        write(split)
    if not counts["train"]["conversations"]:
        raise DataError(f"{', '.join(args.inputs)}: got no conversation with an assistant's turn to train on")
    return counts | {"without an assistant's turn": empty}


def index_splits(out: Path, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """OUT/train.json and OUT/heldout.json, for the tokenizer beside them."""
    with replacing(out / "tokenizer.json") as f:
        f.write(local_path(args.tokenizer).read_bytes())
    vocabulary = {"vocab_size": max(tokenizer.get_vocab().values()) + 1, "eos_id": tokenizer.token_to_id(EOS),
                  "pad_id": tokenizer.token_to_id(PAD)}  # fmt: skip
    for split in ("train", "heldout"):
        if (out / split).is_dir():
            files = [("chat", path) for path in sorted((out / split).glob("token_ids_*.npy"))]
            index = build_index(files, out, args.sequence_length, tokenizer="tokenizer.json", **vocabulary)
            write_index(index, out / f"{split}.json")


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help=f"files that end in {', '.join(SUFFIXES)}, or folders"
    )
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json that knows the tokens of the template")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--system", metavar="TEXT", help="put before conversations that have no system message")
    parser.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="default: %(default)s")
    parser.add_argument(
        "--sequence-length", type=SEQUENCE_LENGTH, default=512, help="of the indexes; default: %(default)s"
    )
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("chat_to_tokens.py", lambda: chat_to_tokens(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
