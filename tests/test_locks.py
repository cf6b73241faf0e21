"""One writer at a time: processes.sole_writer."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from corpora import REPO, alive

import processes

HOLDER = """
import os, sys, time
sys.path.insert(0, {repo!r})
import processes
with processes.sole_writer(sys.argv[1]):
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
    os.write(1, b"held\\n")
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holding(output: Path, *more):
    """Another process that is the writer of an output; it ends when a line is written to it."""
    command = [sys.executable, "-c", HOLDER.format(repo=str(REPO)), output, *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline().strip() for _ in range(1 + len(more))]
    assert "held" in lines
    process.children = [int(line) for line in lines if line != "held"]
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for child in process.children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["out", "a b[1]#2%ü*?'\"\n{}", "x" * 255, "link"])
def test_one_writer(tmp_path, name):
    """Two processes that write one output, of whatever name; a lock that another output shares, that its holder's death
    does not release, or that stays behind."""
    output = tmp_path / "new" / name
    if name == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "new").mkdir()
        output.symlink_to(tmp_path / "elsewhere")
    with holding(output) as holder:
        for _ in range(2):
            with pytest.raises(processes.Busy, match=f"is being written by process {holder.pid} on ") as caught:
                with processes.sole_writer(output):
                    raise AssertionError("two writers")
            assert caught.value.filename == os.path.realpath(output)
        with processes.sole_writer(tmp_path / "new" / "other"):
            pass
        if name == "link":
            with pytest.raises(processes.Busy), processes.sole_writer(tmp_path / "elsewhere"):
                pass
        holder.kill()
        holder.wait()
        with processes.sole_writer(output):  # also where the dead one's lock file is still there
            with pytest.raises(processes.Busy, match=f"process {os.getpid()} "), processes.sole_writer(output):
                pass
    with holding(output) as holder:
        holder.communicate("\n")
        assert holder.returncode == 0
    assert [p for p in tmp_path.rglob("*") if p != output and p.is_file()] == []


def test_holder_that_has_not_said_its_name(tmp_path):
    """Catches "another process" where the holder has the lock and is about to write who it is."""
    with open(tmp_path / ".out.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: os.pwrite(lock.fileno(), b"process 7 on here", 0)).start()
        with pytest.raises(processes.Busy, match="by process 7 on here"), processes.sole_writer(tmp_path / "out"):
            pass


def test_a_childs_copy_of_the_lock(tmp_path):
    """A forked child that keeps its dead parent's output locked, or, at its own end, lets others write its parent's."""
    with holding(tmp_path / "out", "fork") as holder:
        holder.kill()
        holder.wait()
        assert alive(holder.children[0])
        with processes.sole_writer(tmp_path / "out"):
            pass
    writer = contextlib.ExitStack()
    writer.enter_context(processes.sole_writer(tmp_path / "out"))
    if (child := os.fork()) == 0:
        writer.close()  # as an exception in the child would
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(processes.Busy), processes.sole_writer(tmp_path / "out"):
        pass
    writer.close()


def test_threads_and_a_lock_that_is_removed(tmp_path, monkeypatch):
    """A thread that may write what another thread is writing; a lock file that vanishes between two looks at it."""
    together, most, at_work = threading.Barrier(4), [], []

    def write():
        together.wait()
        with processes.sole_writer(tmp_path / "out", wait=60):
            at_work.append(1)
            most.append(len(at_work))
            time.sleep(0.01)
            at_work.pop()

    threads = [threading.Thread(target=write) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most == [1, 1, 1, 1] and not list(tmp_path.iterdir())

    flock, calls = processes.fcntl.flock, []

    def removed_before(fd, how):
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / ".out.lock").unlink()
        flock(fd, how)

    monkeypatch.setattr(processes.fcntl, "flock", removed_before)
    with processes.sole_writer(tmp_path / "out"):
        assert len(calls) == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES, errno.EROFS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys, number):
    """ "[Errno 38] Function not implemented" without a file's name, two writers after all, or an output that cannot be
    written because a lock cannot."""
    flock, opened = processes.fcntl.flock, os.open
    local, output = tmp_path / "local", tmp_path / "mounted" / "out"
    local.mkdir()
    everywhere = []

    def no_flock(fd, how):
        if everywhere or not os.readlink(f"/dev/fd/{fd}").startswith(str(local)):
            raise OSError(number, os.strerror(number))
        flock(fd, how)

    def read_only(path, *more, **keys):
        if everywhere or "mounted" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *more, **keys)

    monkeypatch.setattr(tempfile, "tempdir", str(local))
    if number in (errno.EACCES, errno.EROFS):
        monkeypatch.setattr(os, "open", read_only)
    else:
        monkeypatch.setattr(processes.fcntl, "flock", no_flock)
    with processes.sole_writer(output):
        err = capsys.readouterr().err
        assert f"mounted/.out.lock: no lock here ({os.strerror(number)}" in err and "other machines" in err
        with pytest.raises(processes.Busy, match=f"by process {os.getpid()} ") as caught, processes.sole_writer(output):
            pass
        assert caught.value.filename == str(output)
        with processes.sole_writer(tmp_path / "mounted" / "other"):
            pass
    assert not list(local.iterdir())
    everywhere.append(True)
    with pytest.raises(OSError, match=os.strerror(number)) as caught, processes.sole_writer(output):
        pass
    assert caught.value.filename.startswith(str(local)) and not isinstance(caught.value, processes.Busy)
