"""Child processes that render chat templates, as the parent sees them.

A process is reused while it answers correctly, so that a template costs a fork and not a start of Python. Each answer
has the random name of its request, so that output that an earlier template left behind is not mistaken for it. A
process that misses its deadline, dies or sends anything else is killed with its children.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.generate import template_child
from tilewise.processes.children import DisposableProcess, DisposableProcesses, unpack

__all__ = ["TemplateProcesses"]

_DEADLINE_S = 10.0
_MEMORY_BYTES = 1 << 30
_MAX_BYTES = template_child.MOST_OUTPUT * 12 + 4096  # of JSON: an escaped character takes twelve at most


class TemplateProcesses(DisposableProcesses):
    """Renders templates in child processes."""

    def render(self, template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Render a template; returns its text as `text`, or the error as `problem`.

        Args:
            template: its source.
            variables: plain values by name.
        """
        name = secrets.token_hex(16)
        limits = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(_DEADLINE_S) + 1}
        request = {"name": name, "template": template, "variables": variables, "limits": limits}
        with self._borrowed() as process:
            answer = process.ask(request, _DEADLINE_S, _MAX_BYTES)
            if process.is_late:
                return {"problem": f"it does not end within {_DEADLINE_S:g} s"}
            result = None if answer is None else _parsed(answer, name)
            if result is None:
                process.end()
        if answer is None:
            return {"problem": "it ends the process that renders it, or takes too much memory"}
        return result or {"problem": "it makes the process that renders it write something else"}

    def _new_process(self) -> DisposableProcess:
        import jinja2
        import markupsafe

        places = dict.fromkeys(str(Path(str(m.__file__)).parents[1]) for m in (jinja2, markupsafe))
        return DisposableProcess(template_child.__file__, *places)


def _parsed(answer: bytes, name: str) -> dict[str, Any] | None:
    """An answer to the request of that name; None for anything else."""
    try:
        result = unpack(answer)
    except ValueError:
        return None
    is_ours = isinstance(result, dict) and result.pop("name", None) == name
    return result if is_ours and len(result) == 1 and isinstance(result.get("text", ""), str) else None
