"""The chat and status pages: files next to this one, sent unchanged.

The pages load nothing from elsewhere and need no build step. Their content security policy allows a
browser to run only these scripts and to connect only to this server, and forbids showing the page
in a frame of another page. Text from models and users is inserted as text, never as markup.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.types import Receive, Scope, Send

__all__ = ["POLICY", "Asset", "assets"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGES = {"/": "index.html", "/status": "status.html"}


class Asset:
    """A file of a page.

    Args:
        name: name of the file.
    """

    def __init__(self, name: str) -> None:
        self._content = files(__name__).joinpath(name).read_bytes()
        headers = {
            "content-type": f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8",
            "content-length": str(len(self._content)),
            "content-security-policy": POLICY,
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        content = b"" if scope["method"] == "HEAD" else self._content
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})


def assets() -> dict[str, Asset]:
    """The files by their paths on the server."""
    names = [entry.name for entry in files(__name__).iterdir()]
    static = {f"/static/{name}": name for name in names if name.endswith((".css", ".js"))}
    return {path: Asset(name) for path, name in {**_PAGES, **static}.items()}
