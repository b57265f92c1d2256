"""From start to end: loading, keys, sockets, signals, and killed processes."""

import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from native.server.served import PATIENCE_S, TALK, Served, small_model, until, usual_server
from tilewise.server.link.spawn import spawn_engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "import", "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}
ONE_BY_ONE = ("--max-num-seqs", "1")  # so that many texts take seconds, however late their end is looked for


def _is_gone(process_id):
    """Whether a process has ended."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_refused(port):
    """Whether nothing listens."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionError:
        return True
    return False


def _begin(server, body):
    """A stream whose first line has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETION, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    return connection, answer


def test_an_engine_without_a_model_ends():
    """Cleanly if the command has ended before, and with its parent."""
    spawned = spawn_engine()
    spawned.link.close()
    assert spawned.process.wait(PATIENCE_S) == 0
    spawned = spawn_engine()
    process = spawned.process
    del spawned
    gc.collect()
    assert process.returncode in (-signal.SIGKILL, 0)  # unless it was faster: its socket closes first


def _check_options(server):
    """Templates, names, origins and intervals come from the command line."""
    key = {"authorization": "Bearer one"}
    for changes, text in (({}, "own template: hello"), ({"chat_template": "{{ 6 * 7 }}"}, "42")):
        tokens = server.ask("/tokenize", {"messages": TALK, **changes}, **key)[1]["tokens"]
        assert server.ask("/detokenize", {"tokens": tokens}, **key)[1]["prompt"] == text
    assert server.get("/health", host="models.example")[0] == 200
    for origin, is_known in (("https://app.example", True), ("https://evil.example", False)):
        request = urllib.request.Request(f"{server.url}/health", headers={"origin": origin})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert (answer.headers["access-control-allow-origin"] == origin) == is_known
    asks = {"access-control-request-method": "POST", "origin": "https://app.example"}
    asks["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
    before = urllib.request.Request(f"{server.url}{CHAT}", headers=asks, method="OPTIONS")
    with urllib.request.urlopen(before, timeout=60) as answer:
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    long = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True, "return_token_ids": True}
    lines = server.ask(COMPLETION, long, **key)[1].split("\n\n")[:-2]
    sizes = [len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]) for line in lines]
    assert sum(sizes) == 20 and len(sizes) <= 6 and min(sizes[1:-1], default=5) >= 5


@pytest.mark.slow
def test_keys_loading_and_sigterm(tmp_path):
    """503 before the model is loaded; then a key opens every path and `/health` needs none; SIGTERM
    lets a stream end and accepts nothing new.
    """
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    (tmp_path / "own.jinja").write_text("own template: {{ messages[0].content }}")
    options = ["--api-key", "zero", "--api-key-file", str(tmp_path / "keys"), "--stream-interval", "5"]
    options += ["--chat-template", str(tmp_path / "own.jinja"), "--trust-request-chat-template"]
    options += ["--allowed-origins", "https://app.example", "--allowed-hosts", "models.example"]
    server = Served(small_model(), *options)
    try:
        status, reported = server.get("/health")
        assert status == 200 or (status == 503 and "loaded" in reported["error"]["message"])
        server.wait_ready()
        for key in ("zero", "one", "two"):
            assert server.get("/v1/models", authorization=f"Bearer {key}")[0] == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert server.get(path)[0] == 401
        for credentials in ("", "Bearer ", "Basic one", "one"):
            status, reported = server.get("/v1/models", authorization=credentials)
            assert status == 401 and reported["error"]["code"] == "invalid_api_key"
        body = {"prompt": list(range(3, 133)), "max_tokens": 1}
        cached = []
        for key in ("one", "two", "two"):
            reported = server.ask(COMPLETION, body, authorization=f"Bearer {key}")[1]
            cached.append(reported["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 128]  # what one key has asked is not found, nor measured, by another
        _check_options(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"content-type": "application/json", "authorization": "Bearer one"}
        connection.request("POST", COMPLETION, json.dumps(LONG), headers)
        answer = connection.getresponse()
        answer.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
        connection.close()
        assert server.wait_end() == 0
        assert "one" not in "".join(server.log).split()
    finally:
        server.close()


def test_the_engines_death_is_one_error_and_an_exit_code(tmp_path):
    """Streams end with an error event, and the server with exit code 1, for any shutdown timeout; a
    Unix socket is removed.
    """
    place = tmp_path / "socket"
    server = Served(small_model(), "--uds", str(place), "--shutdown-timeout", "1000", *ONE_BY_ONE)
    try:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(60)
        link.connect(str(place))
        connection = http.client.HTTPConnection("localhost")
        connection.sock = link

        def is_ready():
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200 or (answer.status, answer.headers["retry-after"]) == (503, "1")
            return answer.status == 200

        until(is_ready, lambda: "".join(server.log))
        engine, *_ = server.children()
        body = json.dumps({**LONG, "n": 16})
        connection.request("POST", COMPLETION, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        os.kill(engine, signal.SIGKILL)
        events = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert "engine's process must be alive" in error["message"]
        assert events[-1] == "data: [DONE]"
        assert server.wait_end() == 1 and "engine's process must not end" in "".join(server.log)
        assert not place.exists()
        link.close()
    finally:
        server.close()


@pytest.mark.slow
def test_the_http_processs_death_ends_the_engine():
    """No process of a server outlives it, even during a text."""
    server = Served(small_model(), *ONE_BY_ONE).wait_ready()
    children = server.children()
    connection, _ = _begin(server, {**LONG, "n": 16})
    server.process.kill()
    assert server.wait_end() == -signal.SIGKILL
    until(lambda: all(map(_is_gone, children)), f"of {children} not all have ended")
    connection.close()


@pytest.mark.slow
def test_models_that_cannot_be_served_are_one_line(tmp_path):
    """Mistakes in options are found before anything listens; an error of loading ends the server."""

    def run(*options):
        command = [sys.executable, "-m", "tilewise", "serve", *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(tmp_path, "--port", "0")
    assert done.returncode == 2 and "config.json" in done.stderr.splitlines()[-1]
    done = run(small_model(), "--port", "0", "--max-model-len", "1M", "--dtype", "f32")
    assert done.returncode == 2 and "max_model_len must lie in" in done.stderr.splitlines()[-1]
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        done = run(small_model(), "--port", taken.getsockname()[1])
        assert done.returncode == 1 and "address must be free" in done.stderr
    done = run(small_model(), "--port", "0", "--host", "a..b")  # not a name that a resolver is asked for
    assert done.returncode == 1 and "address must be free" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_tls(tmp_path):
    """A certificate enables https; an invalid one is rejected at once; handshakes have a deadline."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl to make a certificate")
    import ssl
    import urllib.request

    server = Served(
        small_model(), "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--header-timeout", "1"
    )
    try:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{server.url}/version", context=context, timeout=60) as answer:
            assert answer.status == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
            assert link.recv(1) == b""  # a client that begins no handshake is ended as one without headers
    finally:
        assert server.close() == 0
    wrong = [sys.executable, "-m", "tilewise", "serve", str(small_model()), "--ssl-certfile", str(key)]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "certificate" in done.stderr


@pytest.mark.slow
def test_the_shutdown_deadline_ends_answers():
    """An unfinished answer ends with an error event at the deadline; a second signal does not wait for it."""
    for signals, timeout in ((1, "0.2"), (2, "1000")):
        server = Served(small_model(), "--shutdown-timeout", timeout, *ONE_BY_ONE).wait_ready()
        streams = []
        for _ in range(40):  # most of them wait
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            body = json.dumps({**LONG, "n": 3})
            connection.request("POST", COMPLETION, body, {"content-type": "application/json"})
            streams.append(connection)
        first = streams[0].getresponse()
        reported = [first.readline()]
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            until(lambda port=server.port: _is_refused(port), "it listens still")  # the signal was heard
        reported[0] += first.read()
        with contextlib.suppress(ConnectionError):  # some may be too late for an answer
            reported += [stream.getresponse().read() for stream in streams[1:]]
        assert server.wait_end() == 0
        cut = [one for one in reported if b"an answer must end before the server shuts down" in one]
        late = [one for one in reported if b"the server is shutting down; got" in one]
        assert cut and all(one in cut or one in late or one.endswith(b"data: [DONE]\n\n") for one in reported)
        for connection in streams:
            connection.close()


def test_a_closed_stream_frees_its_blocks():
    """A chat over a connection that is closed during a text."""
    server = usual_server()
    for _ in range(4):
        connection, answer = _begin(server, {**LONG, "n": 2})
        answer.close()
        connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", CHAT, json.dumps({"messages": TALK, "n": 4}), {"content-type": "application/json"}
    )
    connection.close()
    server.wait_idle()
