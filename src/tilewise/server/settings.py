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
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[!-.0-@\[-~]+")  # as browsers send it: no capitals, no path
_validate = Validator("server")


def _timeout(default: float, help: str, option: str, low: float = 0.05) -> float:
    return setting(
        default, help, low=low, high=_MAX_SECONDS, options=(option,), panel=_LIMITS, metavar="SECONDS"
    )


@documented
@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    Args:

    Raises:
        ConfigError: a value is outside its range, or two values contradict each other.
    """

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; 127.0.0.1 accepts only this machine, 0.0.0.0 all networks.",
        panel=_NETWORK,
    )
    port: int = setting(8000, "Port to listen on; 0 chooses a free one.", low=0, high=65535, panel=_NETWORK)
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
        default_text="no key is required",
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
    ssl_certfile: str | None = setting(None, "Certificate; enables TLS.", panel=_NETWORK, metavar="FILE")
    served_model_names: Sequence[str] = setting(
        (),
        "Names of the model for clients; answers have the first.",
        options=("--served-model-name",),
        panel=_TEXT,
        metavar="NAME",
        default_text="MODEL",
    )
    chat_template: str | None = setting(
        None,
        "Chat template to use instead of the model's.",
        panel=_TEXT,
        metavar="FILE",
        reader="file",
        default_text="the model's",
    )
    trust_request_chat_template: bool = setting(False, "Allow chat templates in requests.", panel=_TEXT)
    tool_call_parser: str | None = setting(
        None,
        "Format of the model's tool calls.",
        choices=(*FORMATS, "none"),
        panel=_TEXT,
        default_text="that of the model's family",
    )
    reasoning_parser: str | None = setting(
        None,
        "Format of the model's reasoning.",
        choices=(*REASONING_PARSERS, "none"),
        panel=_TEXT,
        default_text="that of the chat template",
    )
    stream_interval: int = setting(
        1, "Number of tokens per chunk of a stream.", low=1, high=_MAX, panel=_TEXT
    )
    max_logprobs: int = setting(
        20,
        "Maximum number of most likely tokens whose log probabilities a request may get at each position.",
        low=0,
        high=_MAX,
        panel=_LIMITS,
    )
    max_num_waiting: int = setting(
        256,
        "Maximum number of texts that wait while others are generated; further requests get status 429.",
        low=0,
        high=_MAX,
        panel=_LIMITS,
    )
    max_request_bytes: int = setting(
        8 << 20, "Maximum size of a body.", low=1, high=_MAX, panel=_LIMITS, reader="size", default_text="8M"
    )
    max_connections: int = setting(
        1024, "Maximum number of clients at a time.", low=1, high=_MAX, panel=_LIMITS
    )
    header_timeout_s: float = _timeout(
        10.0, "Maximum seconds until all headers of a request have arrived.", "--header-timeout"
    )
    body_timeout_s: float = _timeout(30.0, "Maximum seconds until its body has arrived.", "--body-timeout")
    send_timeout_s: float = _timeout(
        60.0, "Maximum seconds that a client may stop reading.", "--send-timeout"
    )
    request_timeout_s: float = _timeout(3600.0, "Maximum seconds for an answer.", "--request-timeout")
    shutdown_timeout_s: float = _timeout(
        30.0,
        "Maximum seconds for unfinished answers after SIGTERM or Ctrl-C.",
        "--shutdown-timeout",
        0.0,
    )
    log_requests: bool = setting(
        True,
        "Log a line per request, without its content (shown with TILEWISE_LOG=info). The option disables it.",
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
            ("api_keys", _KEY, "each of api_keys must be printable ASCII, like headers"),
            ("allowed_hosts", _HOST, "each of allowed_hosts must be a name without a port"),
            ("allowed_origins", _ORIGIN, "each of allowed_origins must be * or like https://site.example"),
        ):
            for value in getattr(self, name):
                if not form.fullmatch(value):
                    got = "another one" if name == "api_keys" else shown(value)
                    _validate.invalid("settings", rule, got, "correct it: no client could match it")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            rule, advice = "ssl_keyfile needs ssl_certfile", "set ssl_certfile"
            _validate.invalid("settings", rule, "no ssl_certfile", advice)

    def find_key(self, offered: str | None) -> str | None:
        """The cache salt that belongs to a client's API key. Empty if the server needs no key. None
        if the key is not one of this server's keys.

        All keys are compared, in constant time.

        Args:
            offered: the key that the client sent after `Bearer`; None if it sent none.
        """
        if not self.api_keys:
            return ""
        offered_digest = hashlib.sha256((offered or "").encode("utf-8", "surrogateescape")).digest()
        salt = None
        for key in self.api_keys:
            digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
            if hmac.compare_digest(offered_digest, digest):
                salt = hashlib.sha256(b"cache salt" + digest).hexdigest()
        return salt
