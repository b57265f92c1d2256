"""The child process that renders chat templates, because templates come from untrusted models and clients.

Reads JSON objects, each after its length, from standard input (`template`, `variables`, `limits`, `name`). A fork of
the process answers each on standard output (`name`, and `text` or `problem`): so no template shares a process with
another, and only the first waits for imports. A fork that fails ends the whole process. Imports only the standard
library and jinja2, and runs as a file, so that it starts quickly. The parent kills the process at a deadline; a fork
limits its own memory and output before it reads the template.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from datetime import datetime
from typing import Any

__all__ = ["HEAD", "MOST_OUTPUT", "main", "problem_of", "render"]

HEAD = struct.Struct(">I")
MOST_OUTPUT = 1 << 22  # characters


class _TooLong(Exception):
    pass


def render(template: str, variables: dict[str, Any]) -> str:
    """A template's text, as transformers renders it."""
    found: list[str] = []
    size = 0
    for block in _environment().from_string(template).generate(**variables):
        size += len(block)
        if size > MOST_OUTPUT:
            raise _TooLong
        found.append(block)
    return "".join(found)


def problem_of(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """A template's text, or the error, as the parent process receives it."""
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    try:
        text = render(template, variables)
        text.encode("utf-8")
        return {"text": text}
    except _TooLong:
        return {"problem": f"it writes more than {MOST_OUTPUT} characters"}
    except MemoryError:
        return {"problem": "it takes too much memory"}
    except RecursionError:
        return {"problem": "it calls itself without end"}
    except SecurityError as error:
        return {"problem": f"it does what templates may not: {error}"}
    except TemplateSyntaxError as error:
        return {"problem": f"line {error.lineno}: {error.message}"}
    except TemplateError as error:
        return {"problem": f"it says: {error.message}"}
    except Exception as error:  # whatever the template makes Python do
        return {"problem": f"{type(error).__name__}: {error}"}


def _environment() -> Any:
    """What templates may use: as in transformers, whose authors' templates these are."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the model said; it changes nothing of the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_say", [])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _say(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Without names that lead into Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            given = dict(*args, **kwargs)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

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
    """`dict(...)` of templates; the class itself would lead into Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name like {name!r}")


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
    """No more memory and time than given, no files, no processes."""
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def main() -> None:
    """Templates, until standard input ends."""
    sys.path += sys.argv[1:]
    _environment()  # imports what it needs, before files are limited
    while head := _read(HEAD.size):
        payload = _read(HEAD.unpack(head)[0])
        child = os.fork()
        if child == 0:
            _answer(payload)
        if os.waitpid(child, 0)[1] != 0:  # part of an answer may be written; no other can follow it
            os._exit(1)


def _answer(payload: bytes) -> None:
    """Render, and end: with zero only where the whole answer was written."""
    try:
        os.close(0)  # what comes next is for the next one
        given = json.loads(payload)
        _limit(given["limits"]["memory_bytes"], given["limits"]["cpu_s"])
        result = {"name": given["name"], **problem_of(given["template"], given["variables"])}
        body = json.dumps(result).encode()
        left = memoryview(HEAD.pack(len(body)) + body)
        while left:
            left = left[os.write(1, left) :]
        os._exit(0)
    finally:
        os._exit(1)


def _read(size: int) -> bytes:
    """So many bytes of standard input, and none more; empty at its end."""
    found = b""
    while len(found) < size:
        piece = os.read(0, size - len(found))
        if not piece:
            return b""
        found += piece
    return found


if __name__ == "__main__":
    main()
