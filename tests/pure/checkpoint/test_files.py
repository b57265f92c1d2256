"""Writing: the old or the new content, whatever the system reports; one run at a time in a directory."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewise.checkpoint import check_replaceable, check_writable, lock_directory
from tilewise.checkpoint.files import replace_directory
from tilewise.core import ConfigError, ResourceError
from tilewise.files.writing import replace_file, replace_text


def _fill(directory):
    (directory / "new").touch()


def test_system_errors_are_one_error(tmp_path):
    """Files and directories that cannot be written raise a ResourceError with the reason, and leave nothing."""

    def fail(temporary):
        (temporary / "half" if temporary.is_dir() else temporary).touch()
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "file", "old")
    replace_directory(tmp_path / "folder", _fill)
    for replace, name in ((replace_file, "file"), (replace_directory, "folder")):
        with pytest.raises(ResourceError, match=f"{name}': No space left on device"):
            replace(tmp_path / name, fail)
    with pytest.raises(ResourceError, match="No such file"):
        replace_text(tmp_path / "absent" / "file", "")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and os.listdir(tmp_path / "folder") == ["new"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_failed_replacement_restores_the_old_directory(tmp_path, monkeypatch):
    """If the last rename fails, the old directory gets its name back."""
    replace_directory(tmp_path / "folder", lambda directory: (directory / "old").touch())
    rename, calls = os.rename, []

    def failing(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ResourceError, match="Permission denied"):
        replace_directory(tmp_path / "folder", _fill)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["old"]


def test_only_files_are_replaced(tmp_path):
    """Directories, pipes, links to pipes and invalid names are rejected; a link to a file is replaced."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a pipe").symlink_to("pipe")
    for path in (*(tmp_path / name for name in ("folder", "pipe", "link to a pipe")), Path(), Path("/")):
        with pytest.raises(ResourceError, match=r"writable as a file; got .* is not a regular file"):
            replace_text(path, "new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "folder").is_dir()
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "file").read_text() == "old" and (tmp_path / "link").read_text() == "new"


def test_a_path_of_another_kind_is_rejected(tmp_path):
    """A directory in the place of a file, and the reverse, are rejected beforehand; a link counts as its target."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link", "absent"):
        check_replaceable(tmp_path / name, is_directory=False)
    for name in ("folder", "absent"):
        check_replaceable(tmp_path / name, is_directory=True)
    for name, is_directory in (("folder", False), ("pipe", False), ("file", True), ("pipe", True)):
        with pytest.raises(ConfigError, match=f"called '{name}'"):
            check_replaceable(tmp_path / name, is_directory=is_directory)


HOLD = """
import sys, time
from pathlib import Path
from tilewise.checkpoint import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def _assert_held(directory, process_id):
    words = rf"one run at a time; got '.*out', which process {process_id} writes to"
    with pytest.raises(ConfigError, match=words), lock_directory(directory):
        pass


def test_a_directory_is_locked_by_one_run(tmp_path):
    """The second is rejected with the first one's process id; a killed process locks nothing."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    _assert_held(tmp_path / "out", process.pid)
    process.kill()
    process.communicate()
    assert os.listdir(tmp_path / "out")  # the file of a dead process locks nothing
    with lock_directory(tmp_path / "out"):
        _assert_held(tmp_path / "out", os.getpid())
    with lock_directory(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path / "out") == []


def test_a_locked_directory_that_stays_empty_is_removed(tmp_path):
    """A directory that a rejected run created is removed; one with content, or an older one, stays."""
    (tmp_path / "there").mkdir()
    with lock_directory(tmp_path / "there" / "a" / "b"):
        assert (tmp_path / "there" / "a" / "b").is_dir()
    assert os.listdir(tmp_path / "there") == []
    with lock_directory(tmp_path / "there"):
        pass
    with lock_directory(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert sorted(os.listdir(tmp_path)) == ["new", "there"]


def test_concurrent_runs_are_serialized(tmp_path):
    """Two runs never lock a directory at the same time."""
    inside, most = [], []

    def enter(_):
        for _ in range(200):
            with contextlib.suppress(ConfigError), lock_directory(tmp_path / "out"):
                inside.append(None)
                time.sleep(0)  # another thread's turn
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(4)))
    assert set(most) == {1}


def test_a_directory_removed_during_its_creation_is_made_again(tmp_path, monkeypatch):
    """Another run removes the directory just when this one finds it."""
    real, calls = Path.mkdir, []

    def mkdir(path, **options):
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(path)
        real(path, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with lock_directory(tmp_path / "out"):
        assert len(calls) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="Not a directory"), lock_directory(tmp_path / "file"):
        pass


def test_a_lock_that_cannot_be_written_is_one_error(tmp_path):
    """Something else with the lock's name is not opened, written to or awaited."""
    (tmp_path / "precious").write_text("x")
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("precious", path)):
        make(tmp_path / ".tilewise-lock")
        with pytest.raises(ResourceError, match="tilewise-lock"), lock_directory(tmp_path):
            pass
        path = tmp_path / ".tilewise-lock"
        path.rmdir() if path.is_dir() else path.unlink()
    assert (tmp_path / "precious").read_text() == "x"
    with pytest.raises(ResourceError, match="No such file"), lock_directory(Path("/proc/absent/out")):
        pass


def test_dangling_links_are_rejected_as_output(tmp_path):
    """Nothing can be created over one: a run would fail at its first checkpoint."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "good").symlink_to(tmp_path)
    for place in ("link", "link/below"):
        with pytest.raises(ConfigError, match="link is dangling"):
            check_writable(tmp_path / place)
    check_writable(tmp_path / "good" / "below")


def test_invalid_lock_paths_are_rejected(tmp_path):
    """A name that the system rejects, and an invalid one, with our error."""
    for place, kind in (("x" * 300, ResourceError), ("x\0y", ConfigError), (5, ConfigError)):
        with pytest.raises(kind), lock_directory(tmp_path / place if isinstance(place, str) else place):
            pass
    assert not os.listdir(tmp_path)
