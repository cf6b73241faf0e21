"""tools/problems.py: sums on one side each."""

import json

import problems


def test_sums(tmp_path, capsys):
    """A sum that is trained on and held out, or in neither file; a wrong answer."""
    assert problems.main(["--out", str(tmp_path / "sums"), "--largest", "9", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    sides = {name: [json.loads(line) for line in (tmp_path / "sums" / f"{name}.jsonl").read_text().splitlines()]
             for name in ("train", "heldout", "sft")}  # fmt: skip
    asked = {name: {p["prompt"] for p in ps} for name, ps in sides.items()}
    assert len(asked["train"] | asked["heldout"]) == 100 and not asked["train"] & asked["heldout"]
    assert counts["train"] + counts["heldout"] == 100 and 8 <= counts["heldout"] <= 35
    assert all(eval(p["prompt"].rstrip("=")) == p["answer"] for name in ("train", "heldout") for p in sides[name])
    assert [(p["prompt"], p["completion"]) for p in sides["sft"]] == [
        (p["prompt"], str(p["answer"])) for p in sides["train"]
    ]


def test_an_empty_side(tmp_path, capsys):
    assert problems.main(["--out", str(tmp_path / "sums"), "--held-out", "0"]) == 2
    assert "leaves a side empty" in capsys.readouterr().err and not (tmp_path / "sums").exists()
