"""Child processes that render chat templates, as the parent sees them.

A process is reused while it answers correctly, so that a template costs a fork and not a start of Python. Each answer
has the random name of its request, so that output that an earlier template left behind is not mistaken for it. A
process that misses its deadline, dies or sends anything else is killed with its children.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
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
        """Render a template; returns its text as `text` and the places of its `{% generation %}` blocks as `spans`,
        or the error as `problem`.

        Args:
            template: its source.
            variables: plain values by name.
        """
        return self._ask(template, [variables])[0]

    def render_all(self, template: str, conversations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Render a template for several conversations in one child process, which is faster than one by one. If the
        process fails, each is rendered alone, so that a conversation fails only by its own fault.
        """
        results = self._ask(template, conversations)
        is_whole = len(results) == len(conversations)
        return results if is_whole else [self.render(template, each) for each in conversations]

    def _ask(self, template: str, conversations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The results of a child process, or one problem of the process."""
        name = secrets.token_hex(16)
        limits = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(_DEADLINE_S) + 1}
        request = {"name": name, "template": template, "conversations": list(conversations), "limits": limits}
        with self._borrowed() as process:
            answer = process.ask(request, _DEADLINE_S, _MAX_BYTES)
            if process.is_late:
                return [{"problem": f"it does not end within {_DEADLINE_S:g} s"}]
            results = None if answer is None else _parsed(answer, name, len(conversations))
            if results is None:
                process.end()
        if answer is None:
            return [{"problem": "it ends the process that renders it, or takes too much memory"}]
        return results or [{"problem": "it makes the process that renders it write something else"}]

    def _new_process(self) -> DisposableProcess:
        import jinja2
        import markupsafe

        places = dict.fromkeys(str(Path(str(m.__file__)).parents[1]) for m in (jinja2, markupsafe))
        return DisposableProcess(template_child.__file__, *places)


def _parsed(answer: bytes, name: str, count: int) -> list[dict[str, Any]] | None:
    """The results in an answer to the request of that name; None for anything else."""
    try:
        message = unpack(answer)
    except ValueError:
        return None
    if not (isinstance(message, dict) and message.keys() == {"name", "results"} and message["name"] == name):
        return None
    results = message["results"]
    is_valid = isinstance(results, list) and len(results) == count and all(map(_is_result, results))
    return results if is_valid else None


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict):
        return False
    if result.keys() == {"problem"}:
        return isinstance(result["problem"], str)
    if result.keys() != {"text", "spans"} or not isinstance(result["text"], str):
        return False
    spans = result["spans"]
    return isinstance(spans, list) and all(_is_span(span, len(result["text"])) for span in spans)


def _is_span(span: Any, size: int) -> bool:
    is_pair = isinstance(span, list) and len(span) == 2 and all(type(place) is int for place in span)
    return is_pair and 0 <= span[0] <= span[1] <= size
