"""tools/problems.py: a word is on one side, and the answers are right."""

import json

import problems

import verifiers


def test_words(tmp_path, capsys):
    """A word that is trained on and held out, or in neither file; an answer that its own verifier refuses."""
    assert problems.main(["--out", str(tmp_path / "words"), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    sides = {name: [json.loads(line) for line in (tmp_path / "words" / f"{name}.jsonl").read_text().splitlines()]
             for name in ("train", "heldout", "sft")}  # fmt: skip
    asked = {name: {p["prompt"].split()[-1].strip(".") for p in ps} for name, ps in sides.items()}
    known = verifiers.python_words()
    assert asked["train"] | asked["heldout"] == known and not asked["train"] & asked["heldout"]
    assert asked["sft"] == asked["train"] and counts["sft"] == len(asked["sft"])
    assert counts["train"] + counts["heldout"] == 4 * len(known) and 0.05 < counts["heldout"] / 4 / len(known) < 0.2
    by_prompt = {p["prompt"]: p for p in sides["train"]}
    assert all(verifiers.words(by_prompt[p["prompt"]], p["completion"]) == 1 for p in sides["sft"])
    assert {len(p["completion"].split(", ")) for p in sides["sft"]} == {1, 2, 3, 4}
