"""The child process that renders chat templates, because templates come from untrusted models and clients.

Reads JSON objects, each after its length, from standard input (`template`, `conversations`, `limits`, `name`). A fork
of the process answers each on standard output (`name` and `results`; a result is `text` and `spans`, or `problem`): so
no template shares a process with another, and only the first waits for imports. A fork that fails ends the whole
process. Imports only the standard library and jinja2, and runs as a file, so that it starts quickly. The parent kills
the process at a deadline; a fork limits its own memory and output before it reads the template.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

__all__ = ["HEAD", "MOST_OUTPUT", "main", "problem_of", "render"]

HEAD = struct.Struct(">I")
MOST_OUTPUT = 1 << 22  # characters


class _TooLong(Exception):
    pass


def render(template: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """A template's text, as transformers renders it, and the first and last (exclusive) characters of its
    `{% generation %}` blocks.
    """
    compiled = _compiled(template)
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    compiled.environment.rendered = blocks, spans
    size = 0
    for block in compiled.generate(**variables):
        size += len(block)
        if size > MOST_OUTPUT:
            raise _TooLong
        blocks.append(block)
    return "".join(blocks), spans


@lru_cache(maxsize=1)  # the conversations of one request have the same template
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def problem_of(template: str, variables: dict[str, Any]) -> dict[str, Any]:
    """A template's text with its spans, or the error, as the parent process receives it."""
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    try:
        text, spans = render(template, variables)
        text.encode("utf-8")
        return {"text": text, "spans": spans}
    except _TooLong:
        return {"problem": f"it writes more than {MOST_OUTPUT} characters"}
    except MemoryError:
        return {"problem": "it takes too much memory"}
    except RecursionError:
        return {"problem": "it recurses too deeply"}
    except SecurityError as error:
        return {"problem": f"it is not allowed in templates: {error}"}
    except TemplateSyntaxError as error:
        return {"problem": f"line {error.lineno}: {error.message}"}
    except TemplateError as error:
        return {"problem": f"it raises: {error.message}"}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _environment() -> Any:
    """The environment of templates, as in transformers."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the model writes. It does not change the text; its place in the text is
        recorded.
        """

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body", [])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            text = caller()
            environment: Any = self.environment
            blocks, spans = environment.rendered  # so far, by `render`
            begin = sum(map(len, blocks))
            spans.append((begin, begin + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):
        """Rejects names of Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = Namespace
    return environment


class _Dict:
    """`dict(...)` of templates; the class itself would give access to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names of a namespace must not begin with '_'; got {name!r}")


def _raise(message: object) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit memory and CPU time; forbid files and processes."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Render templates until standard input ends."""
    sys.path += sys.argv[1:]
    _environment()  # imports its modules before files are limited
    while head := _read(HEAD.size):
        payload = _read(HEAD.unpack(head)[0])
        child = os.fork()
        if child == 0:
            _answer(payload)
        if os.waitpid(child, 0)[1] != 0:  # the answer may be written in part, so no other can follow
            os._exit(1)


def _answer(payload: bytes) -> None:
    """Render and exit; the status is zero only if the whole answer was written."""
    try:
        os.close(0)  # the next message is for the next fork
        request = json.loads(payload)
        _limit(request["limits"]["memory_bytes"], request["limits"]["cpu_s"])
        results = [problem_of(request["template"], variables) for variables in request["conversations"]]
        body = json.dumps({"name": request["name"], "results": results}).encode()
        unsent = memoryview(HEAD.pack(len(body)) + body)
        while unsent:
            unsent = unsent[os.write(1, unsent) :]
        os._exit(0)
    finally:
        os._exit(1)


def _read(size: int) -> bytes:
    """Exactly this many bytes of standard input; empty at its end."""
    content = b""
    while len(content) < size:
        piece = os.read(0, size - len(content))
        if not piece:
            return b""
        content += piece
    return content


if __name__ == "__main__":
    main()
