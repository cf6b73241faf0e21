"""tools/mixes.py."""

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import mixes
import pytest
from corpora import EOS_ID, PAD_ID, VOCABULARY, S, V, call, config, random_tokens, token_file

import data
from data import DataError

MIX = """# a mix like Ai2's
code,pre/{TOKENIZER}/code/000000.npy

web_a,pre/{TOKENIZER}/web/lang=en/part 1.npy
web_b,pre/{TOKENIZER}/web/000000.npy\r
"""


NAMES = ["pre/ai/tok/code/000000.npy", "pre/ai/tok/web/lang=en/part 1.npy", "pre/ai/tok/web/000000.npy"]


@pytest.fixture
def mix(tmp_path) -> Path:
    """A mix and its three files below tmp_path/base, the first of them 100,000 tokens."""
    (tmp_path / "mix.txt").write_bytes(MIX.encode())
    for seed, (name, n) in enumerate(zip(NAMES, (100_000, 5 * S, 3 * S + 7), strict=True)):
        token_file(tmp_path / "base" / name, random_tokens(n, seed))
    return tmp_path / "mix.txt"


def index_mix(mix: Path, base, out: Path):
    return ["mix", "--mix", mix, "--base", base, "--sequence-length", S, "--out", out, *VOCABULARY]


def test_index_of_a_mix(mix, tmp_path, capsys):
    """Another order than the mix's, labels of folders, paths that hold the place, a fingerprint that depends on it."""
    code, out, _ = call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "a/index.json"))
    index = data.load_index(tmp_path / "a/index.json")
    assert code == 0 and json.loads(out)["fingerprint"] == index.fingerprint
    assert [(f.label, f.path) for f in index.files] == list(zip(["code", "web_a", "web_b"], NAMES, strict=True))
    assert (index.tokenizer, index.vocab_size, index.eos_id, index.pad_id) == ("ai/tok", V, EOS_ID, PAD_ID)

    (tmp_path / "disk").mkdir()  # moved, and one folder of it linked to another disk
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "moved/pre/ai/tok/web").rename(tmp_path / "disk/web")
    (tmp_path / "moved/pre/ai/tok/web").symlink_to(tmp_path / "disk/web")
    assert call(capsys, *index_mix(mix, tmp_path / "moved", tmp_path / "b/index.json"))[0] == 0
    assert (tmp_path / "a/index.json").read_bytes() == (tmp_path / "b/index.json").read_bytes()
    source = data.open_data(config(str(tmp_path / "a/index.json")), tmp_path / "moved")
    assert source.index.fingerprint == index.fingerprint and len(source.batch_at(0)["tokens"]) == 4

    call(capsys, "mix", "--mix", mix, "--base", tmp_path / "moved", "--sequence-length", S, "--out",
         tmp_path / "c.json", "--tokenizer", "ai/tok")  # fmt: skip
    mixes.read_mix(mix, "allenai/dolma3-tokenizer")
    shutil.copytree(tmp_path / "moved/pre/ai/tok", tmp_path / "moved/pre/allenai/dolma3-tokenizer")
    command = ["mix", "--mix", mix, "--base", tmp_path / "moved", "--sequence-length", S, "--out", tmp_path / "d.json"]
    assert call(capsys, *command, "--tokenizer", "allenai/dolma3-tokenizer")[0] == 0
    known = data.load_index(tmp_path / "d.json")
    assert (known.vocab_size, known.eos_id, known.pad_id) == (100278, 100257, 100277)


def test_index_names_all_bad_files_of_a_mix(mix, tmp_path, capsys):
    """An empty file among 12,000 found at step 100k (case 57), or bad files found one a run."""
    (tmp_path / "base" / NAMES[0]).write_bytes(b"")
    (tmp_path / "base" / NAMES[1]).write_bytes(b"12345")
    (tmp_path / "base" / NAMES[2]).unlink()
    code, out, err = call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "index.json"))
    errors = [line for line in err.splitlines() if line.startswith("mixes.py: error: ")]
    assert code == 2 and not out and not (tmp_path / "index.json").exists()
    for line, name, message in zip(errors, NAMES, ("an empty file", "5 bytes", "no such file (missing)"), strict=True):
        assert f"{name}: got {message}" in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"web", "expected label,path"),
        (b"web,a/{TOKENIZER}/b,c.npy", "expected label,path"),
        (b"web,a/tok/b.npy", "with {TOKENIZER}"),
        (b",a/{TOKENIZER}/b.npy", "with {TOKENIZER}"),
        (b"web, a/{TOKENIZER}/b.npy", "with {TOKENIZER}"),
        (b"web,/a/{TOKENIZER}/b.npy", "relative"),
        (b"web,../{TOKENIZER}/b.npy", "relative"),
        (b"web,{TOKENIZER}/\xff.npy", "expected label,path"),
        (b"other,{TOKENIZER}/a.npy", "t/a.npy again, expected every file once; it is in line 2"),
    ],
    ids=str,
)
def test_malformed_mix(tmp_path, line, message):
    """A line that is skipped, as MaxText does, shifts every later instance; an error that does not say where."""
    (tmp_path / "mix.txt").write_bytes(b"\xef\xbb\xbf# comment\nweb,{TOKENIZER}/a.npy\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"mix\.txt, line 4: got .*{re.escape(message)}"):
        mixes.read_mix(tmp_path / "mix.txt", "t")


def test_mix_usage(mix, tmp_path, capsys):
    """A path typo, an empty mix, or a bucket that must be mounted ends in a traceback or an empty index (case 63)."""
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n\n")
    out = tmp_path / "index.json"
    for arguments, message in [
        (index_mix(tmp_path / "no.txt", tmp_path, out), "no.txt: got no such file, expected a mix"),
        (index_mix(empty, tmp_path, out), "empty.txt: got no files"),
        (index_mix(mix, "gs://bucket", out), "gs://bucket: got a URL, expected a local path; fix: mount it"),
        (index_mix(mix, "https://[host/x", out), "--base: got https://[host/x, expected http(s)://HOST"),
        (index_mix(mix, "https://host:port/x", out), "--base: got https://host:port/x, expected http(s)://HOST"),
        (index_mix(mix, "https:///x", out), "--base: got https:///x, expected http(s)://HOST"),
        ([*index_mix(mix, tmp_path / "base", out), "--tokenizer", "no/t.json"], "no/t.json: got no such file"),
        (index_mix(mix, tmp_path / "base", tmp_path), "got a folder, expected a file to write; fix: --out"),
        (["urls", "--mix", mix, "--base", tmp_path, "--tokenizer", "t"], "expected a URL"),
    ]:
        code, stdout, err = call(capsys, *arguments)
        assert code == 2 and message in err and not stdout and not out.exists(), err


def test_urls(mix, capsys):
    """Lines that a downloader misreads: a space in a URL, an escaped name in a bucket, a file under another name."""
    command = ["urls", "--mix", mix, "--tokenizer", "ai/tok", "--base"]
    escaped = [f"https://host/x/{name.replace(' ', '%20')}" for name in NAMES]
    _, out, _ = call(capsys, *command, "https://host/x/")
    assert out.splitlines() == [f"{url}\t{name}" for url, name in zip(escaped, NAMES, strict=True)]
    assert call(capsys, *command, "https://host/x", "--for", "wget")[1].splitlines() == escaped
    _, out, _ = call(capsys, *command, "https://host/x", "--for", "aria2c")
    assert out.splitlines() == [row for url, name in zip(escaped, NAMES, strict=True) for row in (url, f"  out={name}")]
    assert call(capsys, *command, "gs://bucket")[1].splitlines()[1] == f"gs://bucket/{NAMES[1]}\t{NAMES[1]}"


class Files(http.server.BaseHTTPRequestHandler):
    """Serves server.folder with Range; the first answer for a path in server.stalls stops half-way until released."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name, span = unquote(self.path).lstrip("/"), self.headers["Range"]
        self.server.log.append((name, span))
        path = self.server.folder / name
        if self.server.busy.pop(name, None) or not path.is_file():
            return self.answer(503 if path.is_file() else 404, b"")
        content = path.read_bytes()
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", span or "bytes=0-").groups()
        first, last = (int(first), last) if first else (max(0, len(content) - int(last)), "")
        body = content[first : int(last) + 1 if last else None]
        if span and not body:
            return self.answer(416, b"", f"bytes */{len(content)}")
        self.answer(206 if span else 200, body, f"bytes {first}-{first + len(body) - 1}/{len(content)}")

    def answer(self, code, body, span=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        release = self.server.stalls.pop(unquote(self.path).lstrip("/"), None)
        if release:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            release.wait(60)
            body = body[len(body) // 2 :]
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader was killed

    def log_message(self, *_):
        pass


@pytest.fixture
def server(mix):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.folder, server.log, server.busy, server.stalls = mix.parent / "base", [], {}, {}
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_index_over_http(mix, server, tmp_path, capsys, monkeypatch):
    """Sizes taken from what was fetched, so that a short file counts as whole; a busy server that ends the job."""
    monkeypatch.setattr(data, "PAUSES", (0, 0))
    server.busy[NAMES[1]] = True
    assert call(capsys, *index_mix(mix, tmp_path / "base", tmp_path / "here.json"))[0] == 0
    code, _, err = call(capsys, *index_mix(mix, server.url + "/", tmp_path / "there.json"))
    assert code == 0 and "Service Unavailable; reading it again" in err
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    (tmp_path / "base" / NAMES[0]).write_bytes(b"")
    (tmp_path / "base" / NAMES[2]).unlink()
    code, _, err = call(capsys, *index_mix(mix, server.url, tmp_path / "there.json"))
    assert code == 2 and "code/000000.npy: got an empty file" in err and "web/000000.npy: got no such file" in err


@pytest.mark.skipif(shutil.which("wget") is None, reason="needs wget, which tools/mixes.py urls prints for")
def test_wget_interrupted_and_resumed(mix, server, tmp_path, capsys):
    """A list that wget does not understand; half a file that verify takes for whole, or that is fetched from its start."""
    index = tmp_path / "got/index.json"
    assert call(capsys, *index_mix(mix, server.url, index))[0] == 0
    command = ["urls", "--mix", mix, "--tokenizer", "ai/tok", "--base", server.url, "--for", "wget"]
    (tmp_path / "list").write_text(call(capsys, *command)[1])
    code, _, err = call(capsys, "verify", index)
    assert code == 2 and err.count("(missing)") == 3 and "3 of 3 files are bad" in err

    server.stalls[NAMES[0]] = release = threading.Event()
    wget = ["wget", "-q", "-c", "-x", "-nH", "-P", tmp_path / "got", "-i", tmp_path / "list"]
    fetching, first, size = subprocess.Popen(wget), tmp_path / "got" / NAMES[0], 0
    deadline = time.monotonic() + 30
    while size < 200_000 and time.monotonic() < deadline:  # half of the file
        time.sleep(0.02)
        size = first.stat().st_size if first.exists() else 0
    fetching.kill()
    fetching.wait()
    release.set()
    code, _, err = call(capsys, "verify", index)
    assert code == 2 and err.count("(missing)") == 2
    assert f"{NAMES[0]}: got {first.stat().st_size} bytes, the index says 400000 (short)" in err

    server.log.clear()
    subprocess.run(wget, check=True, timeout=60)
    assert server.log[0] == (NAMES[0], f"bytes={size}-") and len(server.log) == 3
    assert call(capsys, "verify", index)[0] == 0
    assert [(tmp_path / "got" / n).read_bytes() for n in NAMES] == [(tmp_path / "base" / n).read_bytes() for n in NAMES]
