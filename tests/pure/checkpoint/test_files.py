"""Writing: the old or the new, whatever the system says; one run at a time in a directory."""

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


def test_what_the_system_refuses_is_one_error(tmp_path):
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


def test_a_directory_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    """When the last rename fails, what was moved aside comes back."""
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
    """A directory, a pipe, a link to one and no name at all are refused and stay what they are; a link to a file is
    replaced."""
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


def test_a_name_of_another_kind_is_refused(tmp_path):
    """A directory where a file shall be written, and the reverse, are errors beforehand; a link is what it leads to."""
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


def test_a_directory_is_held_by_one_run(tmp_path):
    """The second is refused with the first one's process id; a process that was killed holds nothing."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    _assert_held(tmp_path / "out", process.pid)
    process.kill()
    process.communicate()
    assert os.listdir(tmp_path / "out")  # what the dead process left is no lock
    with lock_directory(tmp_path / "out"):
        _assert_held(tmp_path / "out", os.getpid())
    with lock_directory(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path / "out") == []


def test_a_held_directory_that_stays_empty_goes(tmp_path):
    """What a refused run has made is removed; what holds anything, or was there, stays."""
    (tmp_path / "there").mkdir()
    with lock_directory(tmp_path / "there" / "a" / "b"):
        assert (tmp_path / "there" / "a" / "b").is_dir()
    assert os.listdir(tmp_path / "there") == []
    with lock_directory(tmp_path / "there"):
        pass
    with lock_directory(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert sorted(os.listdir(tmp_path)) == ["new", "there"]


def test_many_runs_at_once_go_one_by_one(tmp_path):
    """However runs come and go, two never hold a directory together."""
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


def test_a_directory_that_goes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """Another run's end removes the directory just when this one finds that it is there."""
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
    """Something else of the lock's name is not opened, written to or waited for."""
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


def test_links_that_lead_nowhere_are_no_place_for_output(tmp_path):
    """Nothing can be made over one: a run would train until its first checkpoint, and then lose it."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "good").symlink_to(tmp_path)
    for place in ("link", "link/below"):
        with pytest.raises(ConfigError, match="link is dangling"):
            check_writable(tmp_path / place)
    check_writable(tmp_path / "good" / "below")


def test_what_is_no_place_for_a_lock_is_refused(tmp_path):
    """A name that the system does not take, and what is no name, in the words of the house."""
    for place, kind in (("x" * 300, ResourceError), ("x\0y", ConfigError), (5, ConfigError)):
        with pytest.raises(kind), lock_directory(tmp_path / place if isinstance(place, str) else place):
            pass
    assert not os.listdir(tmp_path)
