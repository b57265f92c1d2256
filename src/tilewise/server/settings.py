"""Settings of a server: its address, access control and limits. They are checked on creation,
before anything starts.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.server.requests.reading import REASONING_PARSERS
from tilewise.server.requests.tool_parsers import FORMATS
from tilewise.settings import check_settings, documented, setting

__all__ = ["BACKLOG", "ServerSettings"]

BACKLOG = 512
"""Connections that wait to be accepted."""
_MAX = 1 << 31
_MAX_SECONDS = 1e9
_NETWORK, _TEXT, _LIMITS = "Network", "Conversations", "Limits"
_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_HOST = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[!-.0-@\[-~]+")  # as browsers write it: no capitals, no path
_validate = Validator("server")


def _timeout(default: float, help: str, option: str, low: float = 0.05) -> float:
    return setting(
        default, help, low=low, high=_MAX_SECONDS, options=(option,), panel=_LIMITS, metavar="SECONDS"
    )


@documented
@dataclass(frozen=True)
class ServerSettings:
    """How a server is run.

    Args:

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; 127.0.0.1 is this machine alone, 0.0.0.0 all networks.",
        panel=_NETWORK,
    )
    port: int = setting(8000, "Port to listen on; 0 is one that is free.", low=0, high=65535, panel=_NETWORK)
    uds: str | None = setting(
        None, "Path of a Unix socket to listen on instead.", panel=_NETWORK, metavar="PATH"
    )
    api_keys: Sequence[str] = setting(
        (),
        "Keys of clients: every request must have one, except those for /health and the pages. Other users of this "
        "machine can read --api-key in the list of processes: prefer --api-key-file.",
        options=("--api-key",),
        panel=_NETWORK,
        metavar="KEY",
        default_text="no key is asked for",
    )
    allowed_hosts: Sequence[str] = setting(
        (),
        "Names that `Host` may have in requests, in addition to addresses, localhost and the value of --host.",
        panel=_NETWORK,
        metavar="NAME",
    )
    allowed_origins: Sequence[str] = setting(
        (),
        "Sites whose pages may send requests (CORS), such as https://site.example; `*` allows all.",
        panel=_NETWORK,
        metavar="ORIGIN",
        default_text="no site",
    )
    ssl_keyfile: str | None = setting(None, "Private key of the certificate.", panel=_NETWORK, metavar="FILE")
    ssl_certfile: str | None = setting(
        None, "Certificate: the server speaks TLS.", panel=_NETWORK, metavar="FILE"
    )
    served_model_names: Sequence[str] = setting(
        (),
        "Names that clients may call the model by; answers have the first.",
        options=("--served-model-name",),
        panel=_TEXT,
        metavar="NAME",
        default_text="MODEL",
    )
    chat_template: str | None = setting(
        None,
        "Chat template that is used instead of the model's own.",
        panel=_TEXT,
        metavar="FILE",
        reader="file",
        default_text="the model's",
    )
    trust_request_chat_template: bool = setting(
        False, "Requests may have a chat template of their own.", panel=_TEXT
    )
    tool_call_parser: str | None = setting(
        None,
        "Format in which the model writes calls of tools.",
        choices=(*FORMATS, "none"),
        panel=_TEXT,
        default_text="that of the model's family",
    )
    reasoning_parser: str | None = setting(
        None,
        "Format in which the model writes its reasoning.",
        choices=(*REASONING_PARSERS, "none"),
        panel=_TEXT,
        default_text="that of the chat template",
    )
    stream_interval: int = setting(1, "Tokens of each chunk of a stream.", low=1, high=_MAX, panel=_TEXT)
    max_logprobs: int = setting(
        20,
        "Largest number of most likely tokens that a request may have reported at each position.",
        low=0,
        high=_MAX,
        panel=_LIMITS,
    )
    max_num_waiting: int = setting(
        256,
        "Texts that may wait while others are written; requests beyond that are refused for now (429).",
        low=0,
        high=_MAX,
        panel=_LIMITS,
    )
    max_request_bytes: int = setting(
        8 << 20, "Size of a body.", low=1, high=_MAX, panel=_LIMITS, reader="size", default_text="8M"
    )
    max_connections: int = setting(1024, "Clients at a time.", low=1, high=_MAX, panel=_LIMITS)
    header_timeout_s: float = _timeout(10.0, "Seconds for all headers of a request.", "--header-timeout")
    body_timeout_s: float = _timeout(30.0, "Seconds for all of its body.", "--body-timeout")
    send_timeout_s: float = _timeout(60.0, "Seconds for a client that has stopped reading.", "--send-timeout")
    request_timeout_s: float = _timeout(3600.0, "Seconds for an answer.", "--request-timeout")
    shutdown_timeout_s: float = _timeout(
        30.0,
        "Seconds for answers that are not finished when SIGTERM or Ctrl-C arrives.",
        "--shutdown-timeout",
        0.0,
    )
    log_requests: bool = setting(
        True,
        "Log a line per request, without its content (shown with TILEWISE_LOG=info). The option switches this off.",
        options=("--disable-log-requests",),
        is_switched_off=True,
    )

    def __post_init__(self) -> None:
        check_settings(self, ServerSettings, _validate, "settings")
        _validate.text("settings", "host", self.host)
        for name in ("served_model_names", "api_keys", "allowed_hosts", "allowed_origins"):
            for value in _validate.sequence("settings", name, getattr(self, name), "texts"):
                _validate.text("settings", f"each of {name}", value)
        for name, form, rule in (
            ("api_keys", _KEY, "each of api_keys must be printable ASCII, as headers are"),
            ("allowed_hosts", _HOST, "each of allowed_hosts must be a name without a port"),
            ("allowed_origins", _ORIGIN, "each of allowed_origins must be * or such as https://site.example"),
        ):
            for value in getattr(self, name):
                if not form.fullmatch(value):
                    got = "another one" if name == "api_keys" else shown(value)
                    _validate.invalid("settings", rule, got, "correct it; it would let no client in")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            rule, advice = "ssl_keyfile needs ssl_certfile", "name the certificate as well"
            _validate.invalid("settings", rule, "it alone", advice)

    def find_key(self, offered: str | None) -> str | None:
        """The salt of the key that a client gave; None where it gave none of them.

        Every key is compared, each in a time that says nothing of it.

        Args:
            offered: what stands behind `Bearer`.
        """
        if not self.api_keys:
            return ""
        digest_of_given = hashlib.sha256((offered or "").encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.api_keys:
            digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            if hmac.compare_digest(digest_of_given, digest):
                found = hashlib.sha256(b"cache salt" + digest).hexdigest()
        return found
