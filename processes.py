"""The files of settings, read with one set of rules by every program, without jax: launch.py and compare.py start where
there is none. What the keys mean and which of them there are is checked in train.py.
"""

import difflib
import re
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent


class StrictLoader(yaml.SafeLoader):
    """YAML with numbers and booleans as people expect them: 3e-4 is a number, only true and false are booleans,
    12:30 and 017 are not secretly other numbers, and a key that stands twice is an error."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise ValueError(
                    f"{node.start_mark.name}, line {node.value[i][0].start_mark.line + 1}: key {key!r} stands twice"
                )
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.?[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first))
StrictLoader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))
StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def parse_yaml(text: str, name: str):
    try:
        loader = StrictLoader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.YAMLError as e:
        raise ValueError(f"{name}: not valid YAML: {' '.join(str(e).split())}") from e


def read_yaml(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: byte {e.start} is not UTF-8; fix: save the file as UTF-8") from e
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected a mapping of sections")
    return content


def find_config(name: str, folder: Path) -> Path:
    """`name` as given, ~ being the home folder, then in `folder`, with and without .yaml."""
    candidates = [Path(name).expanduser(), folder / name, folder / f"{name}.yaml"]
    for path in candidates:
        if path.is_file():
            return path
    have = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
    raise ValueError(f"config {name!r}: not found, looked for {', '.join(map(str, candidates))}; there are: {have}")


def run_name_fault(name) -> str | None:
    """What is wrong with run.name; None if nothing is. It becomes the name of a folder and of a workload."""
    if type(name) is str and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return None
    fix = "" if type(name) is str else "; fix: put it in quotes"
    return f"run.name: got {name!r}, expected text of letters, digits, '.', '_' and '-'{fix}"


def unknown_key(where: str, key: str, known) -> str:
    near = difflib.get_close_matches(key, [str(k) for k in known], n=1)
    return f"{where}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def parse_override(override: str) -> tuple[str, object]:
    """KEY=VALUE of --set -> (section.key, value), the value read as one of a file."""
    dotted, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set {override}: got no '=', expected section.key=value")
    return dotted, parse_yaml(text, f"--set {override}")


def set_key(tree, dotted: str, value) -> None:
    """Set `section.key` (or schedule.0.until) in the raw mapping; `build` checks it like a key of the file."""
    *parents, last = dotted.split(".")
    for i, part in enumerate(parents):
        place = ".".join(parents[: i + 1])
        key = int(part) if isinstance(tree, list) and part.isdigit() else part
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            known = tree if isinstance(tree, dict) else [str(n) for n in range(len(tree))]
            raise ValueError(unknown_key(f"--set {place}", part, known)) from None
        if not isinstance(tree, dict | list):
            raise ValueError(f"--set {dotted}: {place} is {tree!r}, it has no keys")
    if isinstance(tree, list):
        if not last.isdigit() or int(last) >= len(tree):
            raise ValueError(f"--set {dotted}: got {last}, expected an index below {len(tree)}")
        tree[int(last)] = value
    else:
        tree[last] = value
