"""The server: one model over HTTP, with OpenAI's API and vLLM's names.

A server has two processes: the HTTP process talks to clients, and the engine's process runs the
model. This package has the HTTP process and the link between the two: bodies of requests and
answers, streams, access control, limits, and the shutdown of both processes. `answer_lines` answers
files of the same bodies without HTTP.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.server.batch_file import answer_lines
    from tilewise.server.run import serve
    from tilewise.server.settings import ServerSettings

__all__ = ["ServerSettings", "answer_lines", "serve"]

_MODULES = {
    "ServerSettings": "tilewise.server.settings",
    "answer_lines": "tilewise.server.batch_file",
    "serve": "tilewise.server.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is used, because the engine's process does not
    need HTTP.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
