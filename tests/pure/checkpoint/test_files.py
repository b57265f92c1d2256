"""Writing: the old or the new, whatever the system says."""

import os

import pytest

from tilewise.checkpoint import check_replaceable, replace_file, replace_text
from tilewise.checkpoint.files import replace_directory
from tilewise.core import ConfigError, ResourceError


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
