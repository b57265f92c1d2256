"""Runs the Python blocks of a page and compares their output with the page."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from types import ModuleType
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def namespace_of(name: str) -> dict[str, Any]:
    """A namespace for the blocks of a page, in which classes can be defined as in a module."""
    module = sys.modules[name] = ModuleType(name)
    return module.__dict__


def differences(name: str, text: str) -> list[int]:
    """Numbers of the blocks whose output differs from the text below them; they share a namespace."""
    lines, names = [], namespace_of(name)
    for number, (code, shown) in enumerate(BLOCK.findall(text), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"docs/{name}, block {number}", "exec"), names)
        if printed.getvalue() != shown:
            lines.append(number)
    return lines
