"""What token ids stand for: the tokenizer of an index, of a checkpoint or of a Hugging Face folder, and its special ids.

Ids of another vocabulary are other words, and files that a model was trained on are not held out. So every checkpoint
keeps what its ids stand for, and whoever evaluates one compares. No jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers

from data import (
    CL100K_PATTERN,
    EOS,
    KNOWN_TOKENIZERS,
    PAD,
    TURN,
    TURN_END,
    DataError,
    Index,
    load_index,
    load_tokenizer,
    local_path,
)
from processes import HERE

# What travels with the weights of a model: beside them in a Hugging Face folder, in RUN/hf of an imported checkpoint.
HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip


class FoundTokenizer(NamedTuple):
    """The tokenizer of a model or of an index, and its special ids."""

    path: Path | None  # of the tokenizer.json; None: there is none, and `why` says where it was looked for
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]  # a text ends at any of them; a text begins after the first. Empty: nothing names one
    pad_id: int | None
    files: dict[str, Path]  # of HF_FILES, those that belong to it
    why: str


def find_tokenizer(given: str | None, step_folder: Path, meta: dict) -> FoundTokenizer:
    """The tokenizer of the checkpoint RUN/checkpoints/N: `given` (--tokenizer), else what convert.py from-hf carried
    into RUN/hf, else that of the index that the run was trained on. Every command finds it here."""
    index_path, index, why = index_of_run(meta)
    vocab_size, carried = meta["config"]["model"]["vocab_size"], step_folder.parent.parent / "hf"
    found = FoundTokenizer(None, None, (), None, {}, why)
    if given is not None:
        return read_tokenizer(given, vocab_size, index)
    if step_folder.parent.name == "checkpoints" and carried.is_dir():
        found = read_tokenizer(carried, vocab_size, needed=False)
        found = found._replace(why="; ".join(reason for reason in (found.why, why) if reason))
    if found.path is None and index is not None:
        return index_tokenizer(index_path, index, None, vocab_size)
    return found


class Turns:
    """Turns of a conversation as tokens of one tokenizer, by Olmo 3's template; tools/chat_to_tokens.py has it in full."""

    def __init__(self, tokenizer: Tokenizer, path):
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # words that spell a special token stay words, and end no turn
        self.start, self.end = map(tokenizer.token_to_id, (TURN, TURN_END))
        if self.start is None or self.end is None:
            fix = "one that has them, as allenai/dolma3-tokenizer, or that tools/quickstart.py or own_text.py makes"
            raise DataError(f"{path}: got a tokenizer without {TURN} and {TURN_END}, expected both; fix: {fix}")
        self.close = [self.end, *tokenizer.encode("\n", add_special_tokens=False).ids]

    def opened(self, role: str, text: str) -> list[int]:
        return [self.start, *self.tokenizer.encode(f"{role}\n{text}", add_special_tokens=False).ids]

    def closed(self, role: str, text: str) -> list[int]:
        return [*self.opened(role, text), *self.close]


def index_tokenizer(
    index_path: str | os.PathLike, index: Index, given: str | None, vocab_size: int | None = None
) -> FoundTokenizer:
    """`given` (--tokenizer), or the tokenizer that made the index. The special ids are the index's."""
    if given is not None:
        return read_tokenizer(given, index.vocab_size, index)
    path = local_path(index_path).parent / index.tokenizer
    found = FoundTokenizer(None, None, (index.eos_id,), index.pad_id, {}, f"no tokenizer.json for {index.tokenizer!r}")
    if path.is_file():
        found = found._replace(path=path, tokenizer=load_tokenizer(path), files={"tokenizer.json": path}, why="")
    return checked(found, vocab_size or index.vocab_size, index_path)


def read_tokenizer(
    where: str | os.PathLike, vocab_size: int, index: Index | None = None, needed: bool = True
) -> FoundTokenizer:
    """Of a tokenizer.json, or of a Hugging Face folder, which may do without one unless it is `needed`. The end of a
    text is what generation_config.json or config.json there names, else what the run's `index` names, else EOS."""
    where = local_path(where)
    folder, files = where.parent, {"tokenizer.json": where}
    if where.is_dir():
        folder, files = where, {name: where / name for name in HF_FILES if (where / name).is_file()}
    path = files.get("tokenizer.json", where / "tokenizer.json" if needed else None)
    tokenizer = None if path is None else load_tokenizer(path)
    generation, config = (read_ids(folder / f"{kind}.json") for kind in ("generation_config", "config"))
    # config.json's end of a text, the one of pretraining, comes first.
    eos_ids, pad_ids = sorted(generation[0] or config[0], key=lambda i: i not in config[0]), generation[1] or config[1]
    if not eos_ids:
        ids = (None, None) if tokenizer is None else map(tokenizer.token_to_id, (EOS, PAD))
        ids = ids if index is None else (index.eos_id, index.pad_id)
        eos_ids, pad_ids = ([] if i is None else [i] for i in ids)
    why = f"{where}: got no tokenizer.json in this folder" if path is None else ""
    found = FoundTokenizer(path, tokenizer, tuple(eos_ids), next(iter(pad_ids), None), files, why)
    return checked(found, vocab_size, path or where)


def read_ids(path: Path) -> list[list[int]]:
    """eos_token_id and pad_token_id of a config.json or generation_config.json: a number each, a list, or nothing."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        ids = [content.get(name) for name in ("eos_token_id", "pad_token_id")]
    except (ValueError, AttributeError) as e:
        raise DataError(f"{path}: not a JSON object ({e})") from e
    ids = [[] if i is None else i if isinstance(i, list) else [i] for i in ids]
    if odd := [i for of_name in ids for i in of_name if type(i) is not int]:
        raise DataError(f"{path}: eos_token_id, pad_token_id: got {odd[0]!r}, expected token ids")
    return ids


def checked(found: FoundTokenizer, vocab_size: int, where: str | os.PathLike) -> FoundTokenizer:
    """The tokenizer gives ids of the model alone, and knows what ends a text."""
    fix = "fix: --tokenizer with the model's own"
    known = range(vocab_size) if found.tokenizer is None else set(found.tokenizer.get_vocab().values())
    if max(known) >= vocab_size:
        raise DataError(f"{where}: got ids up to {max(known)}, expected ids below the model's {vocab_size}; {fix}")
    if unknown := [i for i in found.eos_ids if i not in known]:
        raise DataError(
            f"{where}: got {unknown[0]} as the end of a text, expected an id that the tokenizer knows; {fix}"
        )
    return found


# --- bytes of text that tokens stand for


def bytes_of_tokens(tokenizer: Tokenizer, index: Index) -> np.ndarray:
    """int64 [vocab_size]: bytes of text that each token stands for, if there is no `bytes_fault`. Special tokens, EOS and
    padding are no text: 0."""
    added = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(index.vocab_size, np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i >= index.vocab_size:
            raise ValueError(f"tokenizer: got the token {token!r} with id {i}, expected ids below {index.vocab_size}; fix: "
                             "--tokenizer with the one that made the index")  # fmt: skip
        special = i in (index.eos_id, index.pad_id) or i in added and added[i].special
        sizes[i] = 0 if special else len(added[i].content.encode()) if i in added else len(token)
    return sizes


def bytes_fault(tokenizer: Tokenizer) -> str | None:
    """Why the letters of its tokens might not be the bytes of a text, one for one; None where they have to be.

    The way from text to tokens is proven, from the parts of the tokenizer. Decoding tokens and encoding the text again
    would prove nothing: a normaliser leaves alone the text that it has changed once."""
    spec, letters = json.loads(tokenizer.to_str()), set(pre_tokenizers.ByteLevel.alphabet())
    steps, bpe = steps_of(spec["pre_tokenizer"]), spec["model"]
    if changing := [step["type"] for step in steps_of(spec["normalizer"])]:
        return f"its normalizer ({', '.join(changing)}) changes the text"
    if changing := [step["type"] for step in steps if not keeps_bytes(step)]:
        return f"its pre-tokenizer ({', '.join(changing)}) adds to the text or leaves some of it out"
    byte_level = bpe["type"] == "BPE" and isinstance(tokenizer.decoder, decoders.ByteLevel)
    if not byte_level or [step["type"] for step in steps].count("ByteLevel") != 1:
        return "it is no byte-level BPE"
    if bpe.get("continuing_subword_prefix") or bpe.get("end_of_word_suffix"):
        return "its tokens are marked by where they stand in a word"
    if missing := letters - bpe["vocab"].keys():
        return f"{len(missing)} of the 256 bytes are no tokens: it leaves them out of a text"
    added = {token["content"] for token in spec["added_tokens"]}
    if odd := next((token for token in bpe["vocab"] if token not in added and not letters.issuperset(token)), None):
        return f"its token {odd!r} is not spelt in bytes"
    if odd := next((token for token in spec["added_tokens"] if token["lstrip"] or token["rstrip"]), None):
        return f"its token {odd['content']!r} takes the spaces beside it"
    return None


def steps_of(part: dict | None) -> list[dict]:
    """The steps of a normalizer or a pre-tokenizer in a tokenizer.json, one after another."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part.get("pretokenizers", part.get("normalizers")) for step in steps_of(inner)]


# Patterns one of whose alternatives matches wherever in a text it is tried, so that what it leaves out is nothing.
WHOLE_PATTERNS = ({"Regex": CL100K_PATTERN},)


def keeps_bytes(step: dict) -> bool:
    """Whether a step between a text and its tokens divides the text and does nothing else."""
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Split":
            return step["behavior"] != "Removed" or step["invert"] and step["pattern"] in WHOLE_PATTERNS
        case "Punctuation":
            return step["behavior"] != "Removed"
    return step["type"] == "Digits"


# --- what ids stand for, as a checkpoint keeps it and as two data sets compare it

EOS_WITHIN = 1_000_000  # a warning if this many tokens hold no EOS
PAD_FRACTION = 0.01  # ... or more padding than this
# Of Ai2's own tokenizer.json, see `tokenizer_content`.
DOLMA2_CONTENT = "sha256:5fe714d85dd4f5bed5b275859304740d58a31dab3688eded9da05abec76ded7b"


def tokenizer_content(path: Path) -> str:
    """sha256 of what decides about ids in a tokenizer.json; of Ai2's own the name. Another spacing makes no other
    tokenizer; neither do truncation, padding and dropout, which `load_tokenizer` switches off."""
    content = path.read_bytes()
    try:
        spec = json.loads(content)
        bpe = {k: v for k, v in spec["model"].items() if k != "dropout" and not (v is None or v is False or v == "")}
        merges = [m if isinstance(m, str) else " ".join(m) for m in bpe.get("merges", ())]  # of old and of new files
        parts = {key: spec.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer")}
        content = json.dumps(parts | {"model": bpe | {"merges": merges}}, sort_keys=True).encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # another kind of file: its bytes stand for it
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    return next(iter(KNOWN_TOKENIZERS)) if digest == DOLMA2_CONTENT else digest


def vocabulary_of(path: str | os.PathLike, index: Index) -> dict:
    """What the ids of an index stand for: the tokenizer by the content of the file that the index leads to, else by
    name, the vocabulary size and EOS. It is kept in every checkpoint."""
    file, tokenizer = local_path(path).parent / index.tokenizer, index.tokenizer
    if file.is_file():
        tokenizer = tokenizer_content(file)
    elif tokenizer in KNOWN_TOKENIZERS:  # one under two names
        tokenizer = next(iter(KNOWN_TOKENIZERS))
    return {"tokenizer": tokenizer, "vocab_size": index.vocab_size, "eos_id": index.eos_id}


def comparable(*tokenizers: str | None) -> bool:
    """A name says nothing about a content; of a tokenizer.json that is not beside its index nothing is known."""
    if any(t is None or t.endswith(".json") for t in tokenizers):
        return False
    return len({t.startswith("sha256:") for t in tokenizers}) == 1


@dataclass(frozen=True)
class TrainingData:
    """What a model was trained on, as far as it is known: held-out data is compared with it."""

    vocabulary: dict  # see `vocabulary_of`; what is not known is not in it
    fingerprint: str | None = None
    files: frozenset[tuple[int, str]] = frozenset()  # sizes and edge hashes; none if the index is not there any more

    @classmethod
    def of(cls, path: str | os.PathLike, index: Index) -> TrainingData:
        return cls(
            vocabulary_of(path, index), index.fingerprint, frozenset((f.bytes, f.edge_hash) for f in index.files)
        )

    def trained_on(self, index: Index) -> int:
        """How many files of an index the model was trained on."""
        if index.fingerprint == self.fingerprint:
            return len(index.files)
        return sum((f.bytes, f.edge_hash) in self.files for f in index.files)

    def check_vocabulary(self, of: dict) -> list[str]:
        """What of the vocabulary of an index, see `described`, cannot be compared; DataError if it is another one."""
        unknown = []
        for key in ("tokenizer", "vocab_size", "eos_id"):
            got, expected = of[key], self.vocabulary.get(key)
            if expected is None or key == "tokenizer" and not comparable(got, expected):
                unknown.append(key)
            elif got != expected:
                raise DataError(f"{of['index']}: {key}: got {got}, expected {expected} as in the training data; fix: "
                                "tokenize and index this text as that was")  # fmt: skip
        return unknown


def described(path: str | os.PathLike, index: Index) -> dict:
    """What a number is a number of, for those who read it later."""
    return {
        "index": str(path),
        "fingerprint": index.fingerprint,
        **vocabulary_of(path, index),
        "files": len(index.files),
        "labels": sorted({f.label for f in index.files}),
        "instances": index.instances,
    }


def index_of_run(meta: dict) -> tuple[Path | None, Index | None, str]:
    """The index that a checkpoint was trained on: where its meta says it was, or at the config's path from the current
    folder or from this file's. One of another fingerprint is another corpus, whose ids may mean other words; then it is
    (None, None, why)."""
    if (wanted := meta["data"].get("fingerprint")) is None:  # imported; its config is a recipe's, index and all
        return None, None, "no index belongs to the checkpoint, which was trained on none here"
    named = Path(os.path.expanduser(meta["config"]["data"]["index"]))
    places = [Path(meta["data"].get("index_path", named)), named.absolute(), HERE / named]
    others = ""
    for path in dict.fromkeys(place for place in places if place.is_file()):
        try:
            index = load_index(path)
        except DataError as e:
            others += f"; {e}"
            continue
        if index.fingerprint == wanted:
            return path, index, ""
        others += f"; {path} is another corpus (fingerprint {index.fingerprint}, the run's is {wanted})"
    return None, None, "no index of the run among " + ", ".join(dict.fromkeys(map(str, places))) + others


def training_data(step_folder: Path, meta: dict) -> TrainingData:
    """What the parameters were trained on, as far as a checkpoint tells.

    The index that it names; of an imported one also the tokenizer that came with it; of an average all indices."""
    path, index, _ = index_of_run(meta)
    if index is not None:
        known = TrainingData.of(path, index)
    else:
        known = TrainingData({}, meta["data"].get("fingerprint"))
        if "fingerprint" not in meta["data"] and (found := find_tokenizer(None, step_folder, meta)).path is not None:
            known = TrainingData({"tokenizer": tokenizer_content(found.path)})
    for source in meta.get("averaged", ()):
        known = dataclasses.replace(known, files=known.files | training_data(step_folder, source).files)
    return dataclasses.replace(known, vocabulary=known.vocabulary | meta["data"].get("vocabulary", {}))


class TokenCheck:
    """Looks at the tokens a run begins with, and says once what is odd about the first million: no EOS, padding."""

    def __init__(self, index: Index, mask_token: int | None):
        self.index, self.mask_token, self.tokens, self.eos, self.pad = index, mask_token, 0, 0, 0

    def __call__(self, tokens: np.ndarray) -> list[str]:
        if self.tokens >= EOS_WITHIN:
            return []
        eos_id, pad_id = self.index.eos_id, self.index.pad_id
        self.tokens += tokens.size
        self.eos += np.count_nonzero(tokens == eos_id)
        self.pad += 0 if pad_id is None else np.count_nonzero(tokens == pad_id)
        messages, first = [], f"the first {self.tokens:,} tokens"
        if self.tokens >= EOS_WITHIN and self.eos == 0:
            messages.append(f"WARNING: EOS {eos_id} is in none of {first}; another tokenizer?")
        if self.tokens >= EOS_WITHIN and self.pad > PAD_FRACTION * self.tokens:
            share = f"{self.pad / self.tokens:.1%} of {first} are padding ({pad_id})"
            masked = pad_id == self.mask_token
            messages.append(f"{share}, without loss" if masked else f"WARNING: {share}; fix: data.mask_token={pad_id}")
        return messages
