"""How a server is run: where it listens, who may ask, what it refuses. Checked when made, before anything starts."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.core import Border
from tilewise.core.border import shown
from tilewise.server.requests.reading import REASONING_PARSERS
from tilewise.server.requests.tool_parsers import FORMATS

__all__ = ["BACKLOG", "ServerSettings"]

BACKLOG = 512
"""Connections that wait to be accepted."""
_MOST = 1 << 31
_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_HOST = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[!-.0-@\[-~]+")  # as browsers write it: no capitals, no path
_border = Border("server")


@dataclass(frozen=True)
class ServerSettings:
    """How a server is run.

    Args:
        host: the address it binds.
        port: of it; 0 for one that is free.
        uds: the path of a Unix socket that it binds instead.
        served_model_names: what clients may call the model; the first is told back.
        api_keys: one of them must come with every request but those for `/health`; none: no key is asked for.
        allowed_hosts: names that `Host` may have besides addresses, `localhost` and `host`.
        allowed_origins: that browsers may ask from; `*` for all.
        chat_template: text of a template that is used instead of the model's.
        trust_request_chat_template: a request may bring a template of its own.
        tool_call_parser: name of the format of calls; `none`; None: as the model's family writes them.
        reasoning_parser: name of the format of thoughts; `none`; None: as the model's template has them.
        stream_interval: tokens of a chunk.
        max_logprobs: likeliest tokens that can be told at each place.
        max_num_waiting: requests that may wait beyond those that are written; more are told to come back later.
        max_request_bytes: of a body.
        max_connections: at a time.
        header_timeout_s: for all of a request's headers.
        body_timeout_s: for all of its body.
        send_timeout_s: for a client that reads none of what is there for it, or next to nothing.
        request_timeout_s: for an answer.
        shutdown_timeout_s: for answers that are being written when the server is told to end.
        ssl_keyfile: of a certificate.
        ssl_certfile: the certificate; with it the server speaks TLS.
        log_requests: a line for every request, without anything that it said.

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    stream_interval: int = 1
    max_logprobs: int = 20
    max_num_waiting: int = 256
    max_request_bytes: int = 8 << 20
    max_connections: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    shutdown_timeout_s: float = 30.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_requests: bool = True

    def __post_init__(self) -> None:
        _border.text("settings", "host", self.host)
        _border.integer("settings", "port", self.port, 0, 65535)
        for name, low in (("stream_interval", 1), ("max_logprobs", 0), ("max_num_waiting", 0)):
            _border.integer("settings", name, getattr(self, name), low, _MOST)
        for name in ("max_request_bytes", "max_connections"):
            _border.integer("settings", name, getattr(self, name), 1, _MOST)
        for name in ("header", "body", "send", "request", "shutdown"):
            least = 0.0 if name == "shutdown" else 0.05
            _border.number("settings", f"{name}_timeout_s", getattr(self, f"{name}_timeout_s"), least, 1e9)
        for name in ("served_model_names", "api_keys", "allowed_hosts", "allowed_origins"):
            for value in _border.sequence("settings", name, getattr(self, name), "texts"):
                _border.text("settings", f"each of {name}", value)
        for name, form, rule in (
            ("api_keys", _KEY, "each of api_keys must be printable ASCII, as headers are"),
            ("allowed_hosts", _HOST, "each of allowed_hosts must be a name without a port"),
            ("allowed_origins", _ORIGIN, "each of allowed_origins must be * or such as https://site.example"),
        ):
            for value in getattr(self, name):
                if not form.fullmatch(value):
                    got = "another one" if name == "api_keys" else shown(value)
                    _border.refuse("settings", rule, got, "correct it; it would let no client in")
        if self.tool_call_parser is not None:
            _border.choice("settings", "tool_call_parser", self.tool_call_parser, [*FORMATS, "none"])
        if self.reasoning_parser is not None:
            names = [*REASONING_PARSERS, "none"]
            _border.choice("settings", "reasoning_parser", self.reasoning_parser, names)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            rule, advice = "ssl_keyfile needs ssl_certfile", "name the certificate as well"
            _border.refuse("settings", rule, "it alone", advice)

    def find_key(self, given: str | None) -> str | None:
        """The salt of the key that a client gave; None where it gave none of them.

        Every key is compared, each in a time that says nothing of it.

        Args:
            given: what stands behind `Bearer`.
        """
        if not self.api_keys:
            return ""
        told = hashlib.sha256((given or "").encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.api_keys:
            digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            if hmac.compare_digest(told, digest):
                found = hashlib.sha256(b"cache salt" + digest).hexdigest()
        return found
