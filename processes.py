"""One job of one or several processes: settings files, locks, who speaks, how processes agree and how they leave.

No jax at import, because launch.py and compare.py start where there is none. Functions that need jax import it; a
program that never imports jax is a job of one process. What the keys of a settings file mean is checked in config.py.

Exit codes: 0 done; 1 failed; 2 wrong usage, config or data; 143 preempted (SIGTERM); 130 interrupted (Ctrl-C).
"""

import argparse
import contextlib
import difflib
import errno
import fcntl
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.constructor import DuplicateKeyError
from tqdm import tqdm

import data

HERE = Path(__file__).resolve().parent
EXIT_PREEMPTED, EXIT_INTERRUPTED = 143, 130
HEARTBEAT = 30  # seconds without a sign of life after which JAX takes a process for dead and ends the others


class RunFailed(RuntimeError):
    """The command cannot go on. It is printed as one line; the exit code is 1."""


# ----------------------------------------------------------------------------------------------------- settings files


def parse_yaml(text: str, name: str):
    """YAML 1.2: 3e-4 is a number, off and 12:30 are text, 017 is 17. A key that stands twice is a ValueError."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as e:
        key = re.search(r'duplicate key "(.*?)"', e.problem)
        raise ValueError(f"{name}, line {e.problem_mark.line + 1}: key {key and key[1]!r} stands twice") from e
    except YAMLError as e:
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


def write_yaml(content: dict, path: Path) -> None:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    with data.replacing(path) as f:
        yaml.dump(content, f)


def find_config(name: str, folder: Path) -> Path:
    """The file `name` as given, ~ being the home folder; else below `folder`, with or without .yaml."""
    candidates = [Path(name).expanduser(), folder / name, folder / f"{name}.yaml"]
    for path in candidates:
        if path.is_file():
            return path
    have = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
    raise ValueError(f"config {name!r}: not found, looked for {', '.join(map(str, candidates))}; there are: {have}")


def run_name_fault(name) -> str | None:
    """Why run.name cannot be used; None if it can. It becomes the name of a folder and of a workload."""
    if type(name) is str and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return None
    fix = "" if type(name) is str else "; fix: put it in quotes"
    return f"run.name: got {name!r}, expected text of letters, digits, '.', '_' and '-'{fix}"


def unknown_key(where: str, key: str, known) -> str:
    near = difflib.get_close_matches(key, [str(k) for k in known], n=1)
    return f"{where}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def parse_override(override: str) -> tuple[str, object]:
    """KEY=VALUE of --set -> (section.key, value). The value is read as a file's would be."""
    dotted, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set {override}: got no '=', expected section.key=value")
    return dotted, parse_yaml(text, f"--set {override}")


def flatten(tree, prefix: str = "") -> dict:
    """{"schedule.0.until": ...} of nested dicts and lists."""
    flat = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict | list) else {f"{prefix}{key}": value}
    return flat


def set_key(tree, dotted: str, value) -> None:
    """Set `section.key` (or schedule.0.until) in the raw mapping. config.py checks it like a key of the file."""
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
        last = int(last)
    tree[last] = value


# ------------------------------------------------------------------------------------------------------ command lines


def add_verb(verbs, name: str, about: str, example: str, description: str | None = None) -> argparse.ArgumentParser:
    """A sub-parser whose --help ends with an example that runs."""
    return verbs.add_parser(
        name,
        help=about,
        description=description or about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def refuse_moved_verb(program: str, arguments: list[str] | None, moved: dict[str, str]) -> None:
    """Exit code 2 and the new command, where the first argument is a verb that has moved to another file."""
    verb = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    if verb in moved:
        print(f"{program}: error: the verb {verb!r} has moved; fix: {moved[verb]}", file=sys.stderr)
        sys.exit(2)


checking_inputs = True  # of the command that runs; see run_command


def inputs_are_checked() -> None:
    """From here on the command computes or writes. What goes wrong is no longer wrong input."""
    global checking_inputs
    checking_inputs = False


def run_command(program: str, command: Callable[[], dict | int | None], as_json: bool = False, people=None) -> int:
    """Run a command and return its exit code. A dict that it returns is printed: as `people(result)`, by default an
    outline, or all of it as JSON.

    The exit code of an error depends on when it was met. While inputs are checked a ValueError is wrong input: one line
    and 2, which a launcher does not try again. After `inputs_are_checked` it is 1: one line where the data or the run
    says what is wrong with it, else a bug, which keeps its traceback.
    """
    global checking_inputs
    checking_inputs = True
    try:
        result = command()
        if isinstance(result, dict):
            print(json.dumps(result, indent=1) if as_json else (people or outline)(result))
            return 0
        return result or 0
    except (RunFailed, OSError) as e:
        return report_error(program, e, 1)
    except ValueError as e:
        if not checking_inputs and not isinstance(e, data.DataError):
            raise
        return report_error(program, e, 2 if checking_inputs else 1)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as e:
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(e, jax.errors.JaxRuntimeError) or jax.process_count() == 1:
            raise
        # A collective fails in every process when one of them has died.
        print(f"{program}: error: process {jax.process_index()} cannot go on: {first_line(e)}", file=sys.stderr)
        print("most likely another process has ended: see its last lines, then start all again: they go on from the "
              "newest checkpoint", file=sys.stderr)  # fmt: skip
        return 1


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the whole result as JSON, for programs")


FOR_PROGRAMS = ("of", "settings", "checksum")  # parts of a result that only --json shows


def outline(result: dict) -> str:
    """A result for people: a line a value, a table where several things have the same values, the verdict last."""
    width = max((len(name) for name, x in result.items() if not isinstance(x, dict | list)), default=0)
    lines = []
    for name, value in result.items():
        parts = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        if name in (*FOR_PROGRAMS, "verdict"):
            continue
        if parts and all(isinstance(part, dict) for part in parts):
            columns = [c for c, x in parts[0].items() if not isinstance(x, dict | list) and c not in FOR_PROGRAMS]
            cells = [[part.get(c) for c in columns] for part in parts]
            if isinstance(value, dict):
                columns, cells = [name, *columns], [[key, *row] for key, row in zip(value, cells, strict=True)]
            lines += ["", table(columns, cells), ""]
        elif isinstance(value, dict) and any(isinstance(part, dict | list) for part in parts):
            lines += ["", f"{name}:", *(f"  {line}" for line in outline(value).splitlines()), ""]
        else:
            lines.append(f"{name.replace('_', ' '):{width}}  {shown(value)}")
    text = "\n".join([*lines, str(result["verdict"])] if "verdict" in result else lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def shown(x) -> str:
    """Numbers with five digits, hashes by their beginning, of a list the first eight."""
    if isinstance(x, dict):
        return ", ".join(f"{name} {shown(value)}" for name, value in x.items()) or "none"
    if isinstance(x, list | tuple):
        return ", ".join(map(shown, x[:8])) + (f", ... {len(x):,} in all" if len(x) > 8 else "") or "none"
    if x is None or isinstance(x, bool):
        return {None: "-", True: "yes", False: "no"}[x]
    if isinstance(x, int):
        return f"{x:,}"
    return f"{x:.5g}" if isinstance(x, float) else re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b", r"\1...", str(x))


def table(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Markdown, with its columns aligned: numbers to the right."""
    rows = list(rows)
    cells = [[shown(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(head))]
    rule = [
        "-" * (width - 1) + (":" if r else "-") if width > 1 else "-" for width, r in zip(widths, right, strict=True)
    ]
    lines = [[f"{x:>{w}}" if r else f"{x:{w}}" for x, w, r in zip(line, widths, right, strict=True)]
             for line in (head, *cells)]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def report_error(program: str, e: Exception, code: int) -> int:
    """The lines of a data error, one for each file; the first line of what a library says."""
    lines = str(e).split("\n") if isinstance(e, data.DataError | RunFailed) else [first_line(e)]
    for line in lines:
        print(f"{program}: error: {line}", file=sys.stderr)
    return code


def first_line(e: BaseException) -> str:
    text = data.os_error(e) if isinstance(e, OSError) else str(e)
    line = (text.strip().splitlines() or [type(e).__name__])[0]
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-245:]}"  # libraries put the reason last


def exit_with(code: int) -> None:
    """As sys.exit, but at once where the run has failed. An orderly exit would join Orbax's threads, and those of a save
    that could not begin wait ten minutes for it."""
    if code == 1:
        end_process(code)
    sys.exit(code)


def end_process(code: int) -> None:
    """Leave at once. An orderly exit would wait for processes that wait for this one. They notice that it is gone, by a
    collective that fails or by its heartbeat, and end as well."""
    gc.collect()  # the semaphores of the loader's workers, of which Python would say that they leak
    sys.stdout.flush()
    sys.stderr.flush()
    if speaks() and process_count() > 1:
        time.sleep(5)  # JAX's coordinator lives in process 0; the others may still have to say why they end
    os._exit(code)


# -------------------------------------------------------------------------------------------------- writers of a file


class Busy(OSError):
    """Another process is writing this output at the moment. That may pass: exit code 1, never 2."""


# The errors of open and flock where a lock file cannot be made, or where the file system has no locks.
NO_LOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS,
           errno.ENAMETOOLONG}  # fmt: skip
WARNED = set()  # locks that cannot be had
HELD = set()  # descriptors of the locks of this process: a forked child would hold them on after its parent's death
os.register_at_fork(after_in_child=lambda: [os.close(HELD.pop()) for _ in range(len(HELD))])


@contextlib.contextmanager
def sole_writer(output: str | os.PathLike, wait: float = 0) -> Iterator[None]:
    """Nobody else writes `output`, a file or a folder, while this block runs; Busy if somebody does after `wait` seconds.

    The lock is .NAME.lock beside the output, so that the output itself may still be absent. The kernel lets go of it
    when the process dies, also by kill -9; a lock file that was left behind is taken over. Where there are no locks, a
    lock in this machine's temporary folder stands for it, and a line says that other machines are not noticed."""
    path = Path(os.path.realpath(data.local_path(output)))
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.lock"
    try:
        fd = take_lock(lock, path, wait)
    except OSError as e:
        if isinstance(e, Busy) or e.errno not in NO_LOCK:
            raise
        instead = Path(tempfile.gettempdir())
        if lock not in WARNED:  # a process may ask for one lock again and again
            say(f"WARNING: {lock}: no lock here ({e.strerror}); one in {instead} stands for it: other machines are not "
                "noticed")  # fmt: skip
            WARNED.add(lock)
        lock = instead / f"olmo-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.lock"
        fd = take_lock(lock, path, wait)
    HELD.add(fd)
    try:
        yield
    finally:
        if fd in HELD:  # not in a forked child
            try:
                lock.unlink(missing_ok=True)  # while it is held: see take_lock
            finally:
                HELD.remove(fd)
                os.close(fd)


def take_lock(lock: Path, output: Path, wait: float) -> int:
    """The open, locked file; who holds it stands in it."""
    deadline, removed = time.monotonic() + wait, 0
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(fd, lock):  # else its holder removed it on leaving
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {socket.gethostname()} ({Path(sys.argv[0]).name})".encode())
                return fd
            if (removed := removed + 1) == 1000:
                raise OSError(errno.ENOLCK, "the lock file is another one at each look")
        except BlockingIOError:
            holder = os.pread(fd, 500, 0).decode(errors="replace")
            if time.monotonic() > deadline + (0 if holder else 2):  # it writes its name once it has the lock
                os.close(fd)
                reason = f"is being written by {holder or 'another process'}; fix: wait until it has ended, or write elsewhere"
                raise Busy(errno.EBUSY, reason, str(output)) from None
            time.sleep(0.05)
        except OSError as e:
            os.close(fd)
            raise OSError(e.errno, f"{e.strerror}, so that {output} cannot be locked", str(lock)) from e
        os.close(fd)


def same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def replace_file(path: Path, text: str) -> None:
    """Atomically: a reader, or a restart after a kill, sees the old or the new content."""
    with data.replacing(path) as f:
        f.write(text.encode())


def check_room(folder: str | os.PathLike, needed: int) -> None:
    """OSError (exit code 1) if the file system of a folder, which may be absent still, has less than `needed` bytes."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if (free := shutil.disk_usage(existing).free) < needed:
        reason = f"needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; fix: make room, or write elsewhere"
        raise OSError(errno.ENOSPC, reason, str(folder))


def check_memory(what: str, needed: int, available: int | None = None) -> None:
    """DataError if `needed` bytes are more than there are; default: than this machine has. Allocating them would be a
    traceback or, since memory is promised before it is used, the end of this process or of another."""
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise data.DataError(
            f"{what}: got numbers that need {needed / 1e9:.2f} GB of memory, expected at most the {available / 1e9:.2f} "
            "GB of this machine; fix: smaller ones"
        )


def check_counts(args: argparse.Namespace, *flags: str) -> None:
    """Each of these flags that is given counts something, in an int32."""
    for flag in flags:
        number = getattr(args, flag[2:].replace("-", "_"))
        if number is not None and not 0 < number < 2**31:
            raise ValueError(f"{flag}: got {number}, expected a positive number below 2^31")


def check_batch(flag: str, rows: int, length: int) -> None:
    """Tokens are counted in int32 within a batch. They lie in memory with labels, segments and mask: 17 bytes a token."""
    if rows * length >= 2**31:
        raise ValueError(f"{flag}: got {rows} rows of {length} tokens at once, expected fewer than 2^31 tokens; fix: "
                         "a smaller --batch")  # fmt: skip
    check_memory(flag, 17 * rows * length)


# ---------------------------------------------------------------------------------------------------- who speaks, when


def process_count() -> int:
    jax = sys.modules.get("jax")
    return 1 if jax is None else jax.process_count()


def speaks() -> bool:
    """Whether this is process 0, which speaks and writes for all."""
    jax = sys.modules.get("jax")
    return jax is None or jax.process_index() == 0


said_at = 0.0  # when the last line was said, on time.monotonic's clock


def say(message: str) -> None:
    """A line on standard error, from process 0, that leaves a progress bar whole."""
    global said_at
    if speaks():
        tqdm.write(message, file=sys.stderr)
        sys.stderr.flush()
        said_at = time.monotonic()


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    return tqdm.format_interval(round(seconds))


class Alive:
    """Says at least every `every` seconds what the run does, as long as it gets on. Whoever waits for the run, a launcher
    above all, can then tell a long compilation or evaluation from a process that hangs, which is silent.

    Steps and batches are counted. While nothing can be counted (`busy`: a compilation, a restore, a save), the process
    gets on if it uses a twentieth of a core or moves a megabyte. A person looks at a progress bar instead.
    """

    def __init__(self, every: float):
        self.every, self.ended = every, threading.Event()
        self.now("starting", busy=True)
        if speaks() and not sys.stderr.isatty():
            threading.Thread(target=self.watch, daemon=True).start()

    def now(self, activity: str, busy: bool = False) -> None:
        self.activity, self.busy, self.since, self.done = activity, busy, time.monotonic(), 0

    def tick(self) -> None:
        """One more step or batch is done."""
        self.done, self.busy = self.done + 1, False

    def watch(self) -> None:
        marked_at, mark, used = time.monotonic(), None, resources_used()
        while not self.ended.wait(self.every / 4):
            now = time.monotonic()
            if now - max(said_at, marked_at) < self.every:
                continue
            before, mark, spent, used = mark, (self.since, self.done), used, resources_used()
            worked = used[0] - spent[0] > 0.05 * (now - marked_at) or used[1] - spent[1] > 2**20
            marked_at = now
            if mark != before or (self.busy and worked):
                say(f"{self.activity}{f', {self.done} done' if self.done else ''} ({clock(now - self.since)})")

    def close(self) -> None:
        self.ended.set()


def resources_used() -> tuple[float, int]:
    """(CPU seconds, bytes read and written) of this process so far; without Linux's /proc the first alone."""
    moved = 0
    with contextlib.suppress(OSError), open("/proc/self/io") as lines:
        moved = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return time.process_time(), moved


# ------------------------------------------------------------------------------------- several processes: join, agree


def join_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None, distributed: bool
) -> bool:
    """Start jax.distributed as the flags say; False if they ask for a single process."""
    import jax

    named = (coordinator, num_processes, process_id)
    if distributed and named != (None, None, None):
        raise ValueError(
            "--distributed: got --coordinator, --num-processes or --process-id beside it, expected one way"
        )
    if not distributed:
        if named == (None, None, None):
            return False
        if None in named:
            raise ValueError("--coordinator, --num-processes, --process-id: got some, expected all three")
        if not re.fullmatch(r".+:[0-9]+", coordinator):
            raise ValueError(f"--coordinator: got {coordinator!r}, expected HOST:PORT")
        if not 0 <= process_id < num_processes:
            raise ValueError(f"--process-id: got {process_id}, expected 0 to {num_processes - 1}")
        if process_id == 0:
            check_port(coordinator)
    # Gloo greets on standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        jax.distributed.initialize(*named, heartbeat_timeout_seconds=HEARTBEAT)
    except ValueError as e:
        raise ValueError(f"--distributed: {first_line(e)}; fix: --coordinator, --num-processes, --process-id") from e
    return True


def check_port(coordinator: str) -> None:
    """JAX crashes where it cannot listen."""
    port = int(coordinator.rpartition(":")[2])
    if not 0 < port < 65536:
        raise ValueError(f"--coordinator: got port {port}, expected 1 to 65535")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that only lingers from an earlier run is free
        try:
            s.bind(("", port))
        except OSError as e:
            raise RunFailed(f"--coordinator {coordinator}: port {port} cannot be listened at ({e.strerror}); fix: another "
                            "port, or end the process that uses it") from e  # fmt: skip


def multihost():
    """What lets processes agree; jax is imported by now."""
    from jax.experimental import multihost_utils

    return multihost_utils


class Stop:
    """SIGTERM or Ctrl-C: finish the step, save, leave. With several processes JAX's own sync point decides."""

    def __init__(self):
        self.code: int | None = None
        if process_count() == 1:  # a handler set after jax.distributed.initialize would disable JAX's
            signal.signal(signal.SIGTERM, partial(self.request, EXIT_PREEMPTED))
            signal.signal(signal.SIGINT, partial(self.request, EXIT_INTERRUPTED))

    def request(self, code, *_) -> None:
        self.code = self.code or code
        if code == EXIT_INTERRUPTED:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def requested(self, step: int) -> bool:
        if process_count() > 1 and multihost().reached_preemption_sync_point(step):
            self.code = EXIT_PREEMPTED
        return self.code is not None


def on_process_0(value: bool) -> bool:
    """Process 0's answer, in all processes: it alone reads the metrics file."""
    if process_count() == 1:
        return value
    return bool(multihost().broadcast_one_to_all(np.bool_(value)))


def first_of_any_process(text: str | None) -> str | None:
    """The text of the first process that has one, in all processes."""
    if process_count() == 1:
        return text
    letters = np.frombuffer((text or "").encode()[:512].ljust(512, b"\0"), np.uint8)
    texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost().process_allgather(letters))
    return next((f"process {i}: {text}" for i, text in enumerate(texts) if text), None)


def wait_for_processes(where: str) -> None:
    if process_count() > 1:
        multihost().sync_global_devices(where)


def check_shared(folder: Path) -> None:
    """All processes see the same folder; else ValueError. A checkpoint in parts on several disks could never be read."""
    if process_count() == 1:
        return
    mark = folder / f"shared.{int(multihost().broadcast_one_to_all(np.int64(time.time_ns())))}"
    if speaks():
        mark.touch()
    wait_for_processes(f"{mark.name} is there")
    alone = None if mark.exists() else f"{folder} is not the folder that process 0 sees"
    alone = first_of_any_process(alone)
    if speaks():
        mark.unlink()
    if alone:
        raise ValueError(f"--run-dir: {alone}; fix: a folder on a file system that all processes share")
