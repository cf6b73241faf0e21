"""Ai2's mixes: lists of token files on a server, to be fetched or to be indexed where they are.

    python tools/mixes.py urls --mix mix.txt --base https://olmo-data.org --tokenizer allenai/dolma3-tokenizer --for wget
    python tools/mixes.py index --mix mix.txt --base DIR-OR-URL --tokenizer NAME --sequence-length S --out index.json

Over HTTP the index takes the size and both ends of each file from the server. Exit codes as train.py's.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import http.client
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlsplit

sys.path.append(str(Path(__file__).resolve().parent.parent))

from data import (
    EDGE_BYTES,
    DataError,
    add_index_flags,
    build_index,
    is_url,
    local_path,
    patiently,
    summarise,
    tokenizer_ids,
    write_index,
)
from processes import add_json, add_verb, run_command, sole_writer

TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}


def read_range(url: str, span: str) -> tuple[int, bytes]:
    """The size of a file on a web server, and a span of its bytes: "0-4095", or "-4096" for the last ones.

    What may pass is raised as an OSError that data.patiently tries again."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={span}", "User-Agent": "mixes.py"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.headers["Content-Length"] == "0":
                return 0, b""
            # A server that ignores Range would send the whole file, which may have gigabytes.
            if response.status != 206:
                raise DataError(f"{url}: got status {response.status}, expected 206; fix: a server that knows Range")
            return int(response.headers["Content-Range"].rpartition("/")[2]), response.read()
    except urllib.error.HTTPError as e:
        if e.code == 416:  # an empty file has no first byte
            return 0, b""
        if e.code in (404, 410):
            raise FileNotFoundError(errno.ENOENT, str(e)) from e
        raise OSError(errno.EAGAIN if e.code in TRANSIENT_STATUS else None, str(e)) from e
    except urllib.error.URLError as e:
        reason = e.reason if isinstance(e.reason, OSError) else e
        passing = isinstance(reason, TimeoutError)
        raise OSError(errno.ETIMEDOUT if passing else reason.errno, reason.strerror or str(reason)) from e
    except http.client.HTTPException as e:  # a connection that ended early
        raise ConnectionResetError(errno.ECONNRESET, f"{type(e).__name__}: {e}") from e


def read_web_edges(url: str) -> tuple[int, bytes, bytes]:
    """Size, first and last 4 KiB of a file on a web server."""

    # Two small requests a file, so that a mix of 24 TB can be indexed before it is fetched.
    def read() -> tuple[int, bytes, bytes]:
        size, head = read_range(url, f"0-{EDGE_BYTES - 1}")
        return size, head, read_range(url, f"-{EDGE_BYTES}")[1]

    return patiently(read, url)


def read_mix(path: str | os.PathLike, tokenizer: str) -> list[tuple[str, str]]:
    """(label, relative path) of a mix: lines `label,path` with {TOKENIZER} in the path, blank lines and # comments.

    As OLMo-core data/mixes/__init__.py:DataMix.build, whose mixes for OLMo 3 stand for allenai/dolma3-tokenizer."""
    path = local_path(path)
    if not path.is_file():
        raise DataError(f"{path}: got no such file, expected a mix; fix: check --mix")
    files, lines = [], {}  # name -> the line it stands in
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not (line := line.strip()) or line.startswith(b"#"):
            continue
        try:
            label, name = line.decode().split(",")
        except ValueError as e:  # another number of commas, or not UTF-8
            raise DataError(f"{path}, line {number}: got {line!r}, expected label,path") from e
        # The order of the lines is the order of the instances. A line that is misread would move all that follow, so
        # every line has to have the form of Ai2's own.
        relative = "{TOKENIZER}" in name and not name.startswith("/") and ".." not in name.split("/")
        if not label or not relative or (label, name) != (label.strip(), name.strip()):
            raise DataError(f"{path}, line {number}: got {line!r}, expected label,path: relative, with {{TOKENIZER}}")
        name = name.replace("{TOKENIZER}", tokenizer)
        if (first := lines.setdefault(name, number)) != number:
            raise DataError(f"{path}, line {number}: got {name} again, expected every file once; it is in line {first}")
        files.append((label, name))
    if not files:
        raise DataError(f"{path}: got no files, expected lines of label,path; fix: check --mix")
    return files


def join(base: str, name: str) -> str | Path:
    """A file of a mix: below a folder, or below a URL (gs:// and s3:// take names as they are, the web escaped ones)."""
    if not is_url(base):
        return local_path(base) / name
    return f"{base.rstrip('/')}/{quote(name, safe='/=+@:,') if base.startswith('http') else name}"


def urls(args: argparse.Namespace) -> str:
    """What to fetch, in the form that --for names; default: URL, tab, relative path."""
    if not is_url(args.base):
        raise DataError(f"--base: got {args.base}, expected a URL, e.g. https://olmo-data.org")
    form = {"wget": "{url}", "aria2c": "{url}\n  out={name}", None: "{url}\t{name}"}[args.form]
    names = [name for _, name in read_mix(args.mix, args.tokenizer)]
    return "\n".join(form.format(url=join(args.base, name), name=name) for name in names)


def web_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # [ without ]; a port that is no number
        return False


def index_mix(args: argparse.Namespace) -> dict:
    """An index of the files of a mix, which lie below a folder or on a web server and need not have been fetched."""
    out, base = local_path(args.out), args.base
    if out.is_dir():
        raise DataError(f"--out {out}: got a folder, expected a file to write; fix: --out {out}/NAME.json")
    web = base.startswith(("http://", "https://"))
    if web and not web_server(base):
        raise DataError(f"--base: got {base}, expected http(s)://HOST[:PORT]/PATH or a folder")
    if not web:
        local_path(base)  # refuses gs:// and the like, which can be mounted
    mix = read_mix(args.mix, args.tokenizer)
    ids = tokenizer_ids(args.tokenizer, out, args.vocab_size, args.eos_id, args.pad_id)
    files = [(args.label or label, join(base, path)) for label, path in mix]
    how = {"names": [path for _, path in mix], "read_edges": read_web_edges} if web else {}
    with sole_writer(out):
        index = build_index(files, base, args.sequence_length, **ids, dtype=args.dtype, **how)
        write_index(index, out)
    return {"index": str(out)} | summarise(index) | {"verdict": "indexed; fetch what `mixes.py urls` prints"}


def parse_args(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    p = add_verb(verbs, "urls", "What a mix needs, one URL, tab and relative path a line; or as a downloader takes it.",
                 "python tools/mixes.py urls --mix mix.txt --base https://olmo-data.org "
                 "--tokenizer allenai/dolma3-tokenizer --for wget")  # fmt: skip
    p.add_argument("--mix", required=True, help="Ai2's list: label,path with {TOKENIZER} in the path")
    p.add_argument("--base", required=True, metavar="URL", help="what the mix's paths are relative to")
    p.add_argument("--tokenizer", required=True, help="what stands for {TOKENIZER} in the paths")
    p.add_argument("--for", dest="form", choices=("wget", "aria2c"),
                   help="for  wget -c -x -nH -i -  or  aria2c -c -i -")  # fmt: skip
    p = add_verb(verbs, "index", "Make an index of the files of a mix.",
                 "python tools/mixes.py index --mix mix.txt --base https://olmo-data.org "
                 "--tokenizer allenai/dolma3-tokenizer --sequence-length 8192 --out data/stage2/index.json")  # fmt: skip
    p.add_argument("--mix", required=True, help="Ai2's list; --tokenizer stands for {TOKENIZER} in its paths")
    p.add_argument("--base", required=True, metavar="PATH-OR-URL",
                   help="where the files are: folder, mounted bucket or http(s)")  # fmt: skip
    add_index_flags(p)
    p.add_argument("--label", help="one label for all files (default: the mix's)")
    add_json(p)
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    args = parse_args(arguments)
    if args.verb == "index":
        return run_command("mixes.py", lambda: index_mix(args), args.json)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    return run_command("mixes.py", lambda: print(urls(args)))


if __name__ == "__main__":
    sys.exit(main())
