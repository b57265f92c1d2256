"""`make check` runs clang-tidy on changed sources: a source is checked again when any of its headers changes."""

import importlib.util

import pytest

from policy.source import NATIVE, ROOT


@pytest.fixture
def tidy():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("tidy", ROOT / ".ci" / "tidy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inputs_are_followed_through_headers(tidy):
    """The inputs of a kernel's source include the headers of its headers."""
    inputs = tidy.inputs_of(NATIVE / "kernels" / "matmul.cc")
    assert {NATIVE / "kernels" / name for name in ("matmul.cc", "product.h", "simd.h", "kernel.h")} <= set(
        inputs
    )


def test_a_changed_header_changes_its_sources(tidy, tmp_path, monkeypatch):
    """A header that is included by a header, the command and clang-tidy's version count."""
    monkeypatch.setattr(tidy, "NATIVE", tmp_path)
    (tmp_path / "a.cc").write_text('#include "b.h"\n')
    (tmp_path / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "c.h").write_text("int first;\n")
    before = tidy.fingerprint(tmp_path / "a.cc", "c++", b"1")
    assert tidy.fingerprint(tmp_path / "a.cc", "c++", b"1") == before
    assert tidy.fingerprint(tmp_path / "a.cc", "c++ -O3", b"1") != before
    assert tidy.fingerprint(tmp_path / "a.cc", "c++", b"2") != before
    (tmp_path / "c.h").write_text("int second;\n")
    assert tidy.fingerprint(tmp_path / "a.cc", "c++", b"1") != before
