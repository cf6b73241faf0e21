"""The house: who imports whom, how long the four files are, and what works without jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
OURS = {path.stem: path for path in REPO.glob("*.py")}
# What each file may import of ours: those before it in this order, and of these only what is named.
ALLOWED = {
    "model": set(),
    "optim": set(),
    "data": set(),
    "attention": {"model"},
    "processes": {"data"},
    "vocabulary": {"data", "processes"},
    "metrics": {"data", "processes"},
    "scalars": {"data"},
    "config": {"model", "attention", "optim", "data", "processes"},
    "checkpoint": {"model", "data", "processes", "config"},
    "heldout": {"model", "data", "processes", "vocabulary", "config"},
    "sample": {"model", "data", "processes", "vocabulary", "config", "checkpoint"},
    "train": {
        "model",
        "optim",
        "data",
        "processes",
        "vocabulary",
        "metrics",
        "config",
        "checkpoint",
        "heldout",
        "sample",
    },  # fmt: skip
    "hf_config": {"model", "config"},
    "convert": {"model", "attention", "data", "processes", "vocabulary", "config", "checkpoint", "hf_config"},
    "evaluate": {"model", "data", "processes", "vocabulary", "metrics", "config", "checkpoint", "heldout"},
    "verifiers": set(),
    "grpo": {
        "model",
        "data",
        "processes",
        "metrics",
        "config",
        "checkpoint",
        "sample",
        "train",
        "verifiers",
        "vocabulary",
    },
    "compare": {"data", "processes", "metrics", "scalars"},
    "launch": {"data", "processes"},
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def test_imports_go_downwards():
    """An arrow back up: a file that cannot be read, or copied, without the one above it."""
    assert set(ALLOWED) == set(OURS)
    for name, path in OURS.items():
        assert imports(path) & set(OURS) <= ALLOWED[name], name
    order = list(ALLOWED)
    assert all(order.index(below) < order.index(name) for name in order for below in ALLOWED[name])


def test_no_tool_imports_evaluate():
    """lm-eval imports a package called `evaluate`, for which our file would be taken."""
    for path in (REPO / "tools").glob("*.py"):
        assert "evaluate" not in imports(path) and path.stem not in sys.stdlib_module_names, path


@pytest.mark.parametrize("name", ["data", "processes", "vocabulary", "metrics", "scalars", "compare", "launch"])
def test_no_jax(name):
    """A launcher or a comparison that takes seconds to start, or cannot start where there is no jax."""
    code = f"import sys, {name}; assert not {{'jax', 'jaxlib', 'orbax', 'grain'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


@pytest.mark.parametrize("name", ["train", "evaluate", "sample", "convert", "compare"])
def test_no_torch(name):
    """A program that imports torch and the clients of clouds before it says its first word, through tensorboardX."""
    code = f"import sys, {name}; assert not {{'torch', 'tensorboardX', 'google.cloud.storage'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_length():
    """A reference that nobody reads to its end."""
    lines = {path.stem: len(path.read_text().splitlines()) for path in [*OURS.values(), *(REPO / "tools").glob("*.py")]}
    assert sum(lines[name] for name in ("model", "optim", "data", "train")) <= 2800
    assert lines["train"] <= 800 and max(lines.values()) <= 1100
