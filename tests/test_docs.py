"""README.md and docs/: commands that parse, links that lead somewhere. docs/run.py runs the commands themselves."""

import importlib
import importlib.util
import re
import shlex
import sys

import pytest
from harness import REPO, text_checkpoint

import convert

spec = importlib.util.spec_from_file_location("docs_run", REPO / "docs/run.py")
docs_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_run)

TEXTS = {name: docs_run.page_path(name).read_text() for name in docs_run.PAGES if docs_run.page_path(name).is_file()}


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each `python FILE.py ...`, in fenced blocks and between backticks."""
    found = []
    for name, text in TEXTS.items():
        lines = [line for block in docs_run.blocks(name) for line in block.splitlines()]
        lines += re.findall(r"`(python [\w/]+\.py [^`]*)`", " ".join(text.split()))
        for line in lines:
            line = re.sub(r"\$\(.*?\)(?=[\s\"'/]|$)", "X", line.replace("\\$", "$"))
            for part in re.findall(r"python ([\w/]+\.py(?: .*?)??)(?= (?:&&?|\|\|?|>) |;| &$|$)", line):
                if " ..." not in part:  # a pattern, not a command
                    found.append((name, shlex.split(part)))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_commands_parse(page, words, monkeypatch, capsys):
    """A command that names a file, verb or flag that has gone or is spelt otherwise."""
    script = REPO / words[0]
    assert script.is_file(), words
    if script.parent.name in ("bench", "docs"):
        return
    monkeypatch.syspath_prepend(str(script.parent))
    module = importlib.import_module(script.stem)
    parse = getattr(module, "parse_args", None) or module.parse
    if len(words) > 1 and words[1] in getattr(module, "MOVED", {}):
        pytest.fail(f"{words[1]} has moved")
    try:
        parse(words[1:])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_the_snippet(tmp_path, capsys):
    """An export that transformers does not load as the page says."""
    run = text_checkpoint(tmp_path / "model")
    assert convert.main(["to-hf", str(run), str(tmp_path / "exported")]) == 0
    (snippet,) = re.findall(r"^```python\n(.*?)^```", TEXTS["faq"], re.M | re.S)
    capsys.readouterr()
    exec(snippet.replace("runs/for_transformers", str(tmp_path / "exported")), {})
    assert capsys.readouterr().out.startswith("def main(")


def test_claims_name_tests():
    """A promise whose test has been renamed or deleted."""
    for row in TEXTS["claims"].splitlines():
        file = None
        for name, test in re.findall(r"`(?:(test_\w+\.py))?(?:::(test_\w+))?`", row.replace("tests/", "")):
            file = name or file
            if file:
                text = (REPO / "tests" / file).read_text()
                assert not test or f"def {test}(" in text, f"{file}::{test}"


def test_lines_of_the_tree():
    """A tree whose numbers are of another year."""
    for row in re.findall(r"^\|.*\.py`.*\|$", TEXTS["README"], re.M):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 5 and cells[2]:
            lines = sum(len((REPO / name).read_text().splitlines()) for name in re.findall(r"`([\w/]+\.py)`", cells[1]))
            assert int(cells[2].replace(",", "")) == pytest.approx(lines, rel=0.05), cells[1]


def test_links():
    """A link to a page, picture or heading that is not there; a page that no other page leads to."""
    linked = set()
    for name, text in TEXTS.items():
        folder = docs_run.page_path(name).parent
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (folder / target).exists(), f"{name}: {target}"
                linked.add((folder / target).resolve())
    pages = {path.resolve() for path in (REPO / "docs").glob("*.md")}
    assert pages <= linked, pages - linked
    assert {path.stem for path in pages} == set(TEXTS) - {"README"}, "docs/run.py does not know a page"


def test_readme_is_short():
    """A front door of 9,000 words."""
    assert len(TEXTS["README"].splitlines()) <= 200


def test_what_is_left_out_is_there():
    """A reason that no block needs any more, which could hide one that fails."""
    everything = "\n".join(block for name in TEXTS for block in docs_run.blocks(name))
    assert [part for part in docs_run.LEFT_OUT if part not in everything] == []
    assert sys.executable  # docs/run.py runs its commands with it
