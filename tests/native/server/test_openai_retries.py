"""The `openai` client with failures: lost connections and failing answers."""

import contextlib
import socket
import threading

import openai
import pytest

from native.server.served import TALK, usual_server

ASKED = {"model": "small", "messages": TALK, "max_completion_tokens": 8, "seed": 4}
BOMB = {
    "type": "object",
    "properties": {"first": {"type": "boolean"}, "then": {"type": "string", "pattern": "^c(a{1000}){1000}$"}},
    "required": ["first", "then"],
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Make retries without a Retry-After header immediate."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@contextlib.contextmanager
def lossy(port, lost):
    """A proxy to a server that cuts connections after this many bytes of the answer each (None:
    never). Gives the address, and the remaining entries of `lost`.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source, sink, most):
        with contextlib.suppress(OSError):
            while (most is None or most > 0) and (piece := source.recv(1 << 16 if most is None else most)):
                sink.sendall(piece)
                most = None if most is None else most - len(piece)
        for link in (source, sink):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                most = lost.pop(0) if lost else None
                far = socket.create_connection(("127.0.0.1", port))
                for ends in ((near, far, None), (far, near, most)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_lost_connections_are_retried():
    """Twice without a byte, then within the head: the third try succeeds; without further tries,
    the client raises its error.
    """
    server = usual_server()
    lost = [0, 20, None]
    with (
        lossy(server.port, lost) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=2) as client,
    ):
        reported = client.chat.completions.create(**ASKED)
        assert reported.choices[0].finish_reason and not lost
        lost[:] = [0]
        hasty = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with hasty, pytest.raises(openai.APIConnectionError):
            hasty.chat.completions.create(**ASKED)
    server.wait_idle()


def test_a_connection_lost_within_a_stream_is_an_error_and_frees_its_blocks():
    """The client reports an incomplete answer; the server stops generating."""
    server = usual_server()
    with lossy(server.port, [900]) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        errors = []
        with pytest.raises(Exception, match=r"(?i)peer closed|incomplete|disconnected|connection"):
            for chunk in client.completions.create(
                model="small", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            ):
                errors.append(chunk)
        assert errors
    server.wait_idle()


def test_a_failed_response_is_reported():
    """A stream of `/v1/responses` ends with `response.failed`, which has the response and its
    error; a whole one raises the client's exception for its status.
    """
    with openai.OpenAI(base_url=f"{usual_server().url}/v1", api_key="none", max_retries=0) as client:
        form = {"type": "json_schema", "name": "bomb", "schema": BOMB}
        fields = {"model": "small", "input": "hello", "text": {"format": form}}
        extra = {"seed": 1}
        events = list(client.responses.create(**fields, stream=True, extra_body=extra))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.id == events[0].response.id
        assert last.response.error.code == "invalid_prompt"
        assert "limits of work" in last.response.error.message
        with pytest.raises(openai.BadRequestError, match="limits of work"):
            client.responses.create(**fields, extra_body=extra)
    usual_server().wait_idle()
