"""Examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tilewise


@pytest.mark.slow
def test_examples_in_docstrings():
    """Every `>>>` of the package; there is at least one."""
    attempted = 0
    for info in pkgutil.walk_packages(tilewise.__path__, "tilewise."):
        if "_native" in info.name:
            continue
        results = doctest.testmod(importlib.import_module(info.name))
        assert results.failed == 0, info.name
        attempted += results.attempted
    assert attempted > 0
