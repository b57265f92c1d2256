"""Hostile clients: every answer is an error body with the right status, and no resources remain in use."""

import contextlib
import http.client
import json
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from native.serve.test_grammar_trials import references
from native.server.served import TALK, Served, children_of, small_model, usual_server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_JSON = b"content-type: application/json\r\n"
SOAK_S = 3600


@pytest.fixture(scope="module")
def server():
    return usual_server()


def _raw(server, data, then_wait=True):
    """All bytes of the answer until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
        link.sendall(data)
        content = b""
        while then_wait and (piece := link.recv(1 << 16)):
            content += piece
        return content


def _post(body, headers=_JSON, host=b"localhost", path=b"/v1/completions", close=b"connection: close\r\n"):
    size = b"content-length: %d\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + headers + size + close + b"\r\n" + body


def _parts(answer):
    """Status and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def _error(answer, status):
    code, body = _parts(answer)
    assert code == status, answer[:300]
    reported = json.loads(body)["error"]
    assert set(reported) == {"message", "type", "param", "code"} and reported["message"] and reported["type"]
    return reported


def _deep(count):
    return b'{"prompt": "x", "metadata": ' + b'{"a":' * count + b"1" + b"}" * count + b"}"


def test_invalid_requests(server):
    """No HTTP, no JSON, no object, too deep, too large, other content types, other hosts."""
    _error(_raw(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"), 400)
    _error(_raw(server, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20000), 400)
    _error(_raw(server, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n"), 400)
    for body in (b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"n": NaN}'):
        _error(_raw(server, _post(body)), 400)
    _error(_raw(server, _post(b'{"n": ' + b"9" * 5000 + b"}")), 400)
    for depth in (100, 5000, 200_000):
        assert "deep" in _error(_raw(server, _post(_deep(depth))), 400)["message"] or depth > 100
    _error(_raw(server, _post(b"{}", headers=b"content-type: text/plain\r\n")), 415)
    _error(_raw(server, _post(b"{}", headers=b"")), 415)
    huge = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + _JSON
    _error(_raw(server, huge + b"content-length: 99999999999\r\n\r\n{"), 413)
    for host in (b"evil.example", b"localhost.evil.example:80", b"127.0.0.1.evil.example", b""):
        _error(_raw(server, _post(b"{}", host=host)), 403)
    old = b"%s %s HTTP/1.0\r\n\r\n"  # as balancers ask, without a host
    assert _parts(_raw(server, old % (b"GET", b"/health")))[0] == 200
    assert _parts(_raw(server, b"GET /health HTTP/1.0\r\nHost:\r\n\r\n"))[0] == 200
    _error(_raw(server, old % (b"GET", b"/v1/models")), 403)
    for host in (b"localhost:1", b"127.0.0.1:7", b"[::1]:80", b"192.168.1.7"):
        _error(_raw(server, _post(b"{}", host=host)), 400)


def test_invalid_requests_do_not_fill_the_log(server):
    """Requests of other protocols and invalid ones; an upgrade to an unknown protocol is ignored."""
    before = len(server.log)
    upgrade = (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"
    )
    for _ in range(5):
        assert _parts(_raw(server, upgrade))[0] == 200
        _error(_raw(server, b"\x16\x03\x01\r\n\r\n"), 400)
    time.sleep(0.2)
    assert server.log[before:] == []


def test_endless_bodies_are_rejected(server):
    """A chunked body without end is rejected at the limit."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(b"POST /tokenize HTTP/1.1\r\nhost: a\r\n".replace(b" a", b" localhost") + _JSON)
        link.sendall(b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(1000):
                link.sendall(chunk)
        except OSError:
            pass
        else:
            raise AssertionError("64 MiB were taken")


def test_bodies_of_millions_of_values_do_not_delay_others(server):
    """Each is rejected at once, whatever its values; no client waits meanwhile."""
    for path, begin, one, end in (
        (b"/v1/completions", b'{"prompt": [', b"1,", b"1]}"),
        (b"/v1/completions", b'{"prompt": [', b"[],", b"[]]}"),
        (b"/v1/completions", b'{"prompt": "x", "stop_token_ids": [', b"-1,", b"1]}"),
        (b"/v1/completions", b'{"prompt": "x", "metadata": {"a": [', b"{},", b"1]}}"),
        (b"/v1/embeddings", b'{"input": [', b"[1],", b"[1]]}"),
        (b"/v1/chat/completions", b'{"documents": [', b"1,", b'1], "messages": []}'),
    ):
        begun = time.monotonic()
        _error(_raw(server, _post(begin + one * (8_000_000 // len(one)) + end, path=path)), 400)
        assert time.monotonic() - begun < 4, (path, begin, one)
    fields = b",".join(b'"%d": 1' % number for number in range(2000))
    assert "1,024 fields" in _error(_raw(server, _post(b'{"prompt": "x",' + fields + b"}")), 400)["message"]
    biases = b",".join(b'"%d": 1' % number for number in range(70_000))
    reported = _error(_raw(server, _post(b'{"prompt": "x", "logit_bias": {' + biases + b"}}")), 400)
    assert reported["param"] == "logit_bias"


WRONG = [
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "n": 10**6}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": ["x"] * 1000, "n": 100}, "n"),
    ({"prompt": [[1, "x"]]}, "prompt.0.1"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x" * 10**6}, "prompt"),
    ({"prompt": "x", "stop": ["y"] * 65}, "stop"),
    ({"prompt": "x", "stop": ["y", ""]}, "stop.1"),
    ({"prompt": "x", "stop": "y" * 1025}, "stop"),
    ({"prompt": "x", "stop": "\ud800"}, "stop"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": [[5] * 250] * 250, "echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
    ({"prompt": ["x"] * 16, "n": 128, "logprobs": 20, "max_tokens": 256}, "logprobs"),
    ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "n": 2, "temperature": 0}, "n"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    ({"prompt": "x", "structured_outputs": {"regex": "(("}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "(a*)*(a{1000}){1000}b"}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"json": {"$ref": "http://127.0.0.1:9/x"}}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"json": references(3000)}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": 3}, "structured_outputs"),
    (
        {"prompt": "x", "response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
        "response_format",
    ),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_object", "schema": "x"}}, "response_format"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "seed": 1 << 63}, "seed"),
    ({"prompt": "x", "logit_bias": {"999999": 1.0}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
]
WRONG_TALKS = [
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages.0.content.0.text"),
    ({"messages": TALK, "chat_template": "{{ 7 * 7 }}"}, "chat_template"),
    ({"messages": TALK, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": TALK, "max_tokens": 0}, "max_tokens"),
    (
        {"messages": [*TALK, {"role": "user", "content": [{"type": "text", "text": "x"}, 7]}]},
        "messages.1.content.1",
    ),
    ({"messages": TALK, "tool_choice": {"type": "function", "function": 7}}, "tool_choice.function"),
    ({"messages": TALK, "tool_choice": "required"}, "tool_choice"),
    ({"messages": TALK, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"messages": TALK, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": TALK, "guided_json": {"type": "object"}}, "guided_json"),
    ({"messages": TALK, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": TALK, "ebnf": 'root ::= "a"'}, "ebnf"),
]


WRONG_RESPONSES = [
    ({"input": [{"type": "reasoning", "content": 7}]}, "input.0.content"),
    ({"input": [{"type": "reasoning", "content": [{"text": 7}]}]}, "input.0.content.0.text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": []}]}, None),
    ({"input": [{"type": ["message"]}]}, "input"),
    ({"input": [{"role": 7, "content": "x"}]}, "messages.0.role"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "truncation": "sometimes"}, "truncation"),
]


def test_wrong_fields_are_named(server):
    """Status 400, with the name of the wrong field."""
    for path, cases in ((COMPLETION, WRONG), (CHAT, WRONG_TALKS), ("/v1/responses", WRONG_RESPONSES)):
        for body, param in cases:  # streams, so that a check after the first chunk would be found
            status, reported = server.ask(path, {"stream": True, **body})
            assert status == 400 and reported["error"]["param"] == param, (str(body)[:200], reported)
        assert server.ask(path, cases[0][0])[0] == 400
    for path, usual in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": TALK})):
        for fields, rule in (
            ({"stream_options": {}}, "stream_options needs stream"),
            ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs cannot be streamed"),
        ):
            status, reported = server.ask(path, {**usual, **fields})
            assert status == 400 and rule in reported["error"]["message"]
    status, reported = server.ask(COMPLETION, {"prompt": "x", "model": "other"})
    assert (status, reported["error"]["code"]) == (404, "model_not_found")
    server.wait_idle()


@pytest.mark.slow
def test_costly_grammars_do_not_delay_others(server):
    """While four grammars compile for seconds, a stream continues to its end, and plain requests are answered."""

    def ask(number):
        texts = {
            f"{place}": {"type": "string", "pattern": f"^[a-z]{{1,{place % 9 + 1}}}$"} for place in range(8)
        }
        fields = {f"{number}.{place}": {"type": "object", "properties": texts} for place in range(400)}
        body = {"prompt": "x", "structured_outputs": {"json": {"properties": fields}}, "max_tokens": 4}
        return server.ask(COMPLETION, body)[0]

    with ThreadPoolExecutor(4) as clients:
        costly = [clients.submit(ask, number) for number in range(4)]
        long = {"prompt": "x", "max_tokens": 240, "ignore_eos": True}
        assert server.chunks(COMPLETION, long)[-1] == "[DONE]"
        for _ in range(3):
            assert server.ask(COMPLETION, {"prompt": "x", "max_tokens": 4})[0] == 200
        assert not all(one.done() for one in costly)
        # 400 on a busy machine, which may find them too costly
        assert {one.result() for one in costly} <= {200, 400}
    server.wait_idle()


def test_a_message_is_not_a_template(server):
    """Braces of a message are text; unknown fields are ignored."""
    talk = [{"role": "user", "content": "{{ 7 * 7 }}{% raise %}"}]
    reported = server.ask("/tokenize", {"messages": talk, "colour": "blue"})
    assert (
        "{{ 7 * 7 }}{% raise %}" in server.ask("/detokenize", {"tokens": reported[1]["tokens"]})[1]["prompt"]
    )


def _open_files(process_id):
    return len(os.listdir(f"/proc/{process_id}/fd"))


def _sockets(process_id):
    """Sockets that a process has open. Others may close while they are counted."""
    count, places = 0, Path(f"/proc/{process_id}/fd")
    for one in os.listdir(places):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(places / one).startswith("socket:")
    return count


def _threads(process_id):
    return len(os.listdir(f"/proc/{process_id}/task"))


def _mutated(body, rng):
    """The mutated bytes of a body."""
    kind = rng.randrange(6)
    if kind == 0:
        text = json.dumps(body).encode()
        place = rng.randrange(len(text))
        return text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :]
    if kind == 1:
        text = json.dumps(body).encode()
        return text[: rng.randrange(len(text))]
    values = [None, True, -1, 0, 1 << 40, 1e308, "", "x" * 300, [], [[]], {}, {"a": []}, ["x"], [1]]
    name = rng.choice([*body, "prompt", "stop", "logit_bias", "structured_outputs", "stream_options", "seed"])
    return json.dumps({**body, name: rng.choice(values)}).encode()


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_MANY = [f"word {number}" for number in range(300)]


def _play(server, count, seed):
    """Send mutated requests; some clients leave before the answer."""
    rng = random.Random(seed)
    right = [
        ("/v1/completions", {"prompt": "import", "max_tokens": 3, "n": 2, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 3, "stream": True}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": True}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[a-f]{1,9}"}, "stream": True}),
        ("/v1/chat/completions", {"messages": TALK, "tools": [_TOOL], "tool_choice": "required", "n": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 40, "stream": True, "seed": 1}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": _MANY}, "seed": 2}),
    ]
    for _ in range(count):
        path, body = rng.choice(right)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", path, _mutated(body, rng), {"content-type": "application/json"})
        if rng.random() < 0.2:
            connection.close()
            continue
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status in (200, 400, 404, 429), content
        if answer.status != 200:
            assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
        connection.close()


def _resources(server):
    """Open files and threads of both processes when idle. Thread pools need not be full yet, nor
    the pools of processes that render templates and compile grammars, each with two pipes.
    """
    server.wait_idle()
    engine, *renderers = server.children()
    trials = children_of(engine)
    assert (
        len(renderers) <= 4 and len(trials) <= 2
    )  # as many as there are threads for prompts, and for grammars
    files = _open_files(server.process.pid) - 2 * len(renderers), _open_files(engine) - 2 * len(trials)
    return [
        (count, max(_threads(one), 14))
        for count, one in zip(files, (server.process.pid, engine), strict=True)
    ]


def _require_no_leak(server, before):
    for _ in range(200):
        current = _resources(server)
        if all(new <= old for pair, first in zip(current, before) for new, old in zip(pair, first)):
            return
        time.sleep(0.02)
    raise AssertionError((current, before))


def test_mutated_requests_leak_nothing(server):
    """Forty random ones: no crash, error bodies, and no more blocks, files or threads than before."""
    _play(server, 10, seed=0)  # so that what is made only once exists
    before = _resources(server)
    _play(server, 40, seed=1)
    _require_no_leak(server, before)


@pytest.mark.slow
def test_a_thousand_mutated_requests_leak_nothing(server):
    """The same with a thousand, and memory."""
    _play(server, 300, seed=2)
    before = _resources(server)

    def memory():
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0])

    used = memory()
    _play(server, 1000, seed=3)
    _require_no_leak(server, before)
    assert memory() < used + (32 << 10)


@pytest.mark.soak
def test_an_hour_of_mixed_load_in_constant_memory(server, capsys):
    """Clients that stay and clients that leave, mutated requests: files, threads, blocks and memory
    of both processes are those of the first minute; the test prints them.
    """

    def memory():
        processes = [server.process.pid, server.children()[0]]
        texts = [Path(f"/proc/{one}/status").read_text() for one in processes]
        return [int(text.split("VmRSS:")[1].split()[0]) for text in texts]

    def play(seconds, seed):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            seed += 1
            with ThreadPoolExecutor(4) as clients:
                list(clients.map(partial(_play, server, 50), range(4 * seed, 4 * seed + 4)))

    def figures():
        (files, threads), (engine_files, engine_threads) = _resources(server)
        http_kb, engine_kb = memory()
        usage, texts = server.metric("kv_cache_usage_perc"), server.metric("request_generation_tokens_count")
        return (
            f"{texts:.0f} texts, {usage:.0%} of blocks; HTTP process: {files} files, {threads} threads, {http_kb} kB; "
            f"engine: {engine_files} files, {engine_threads} threads, {engine_kb} kB"
        )

    play(SOAK_S / 60, 1000)
    before, used, first = _resources(server), memory(), figures()
    play(SOAK_S, 2000)
    _require_no_leak(server, before)
    with capsys.disabled():
        print(f"\nafter {SOAK_S / 60:g} s: {first}\nafter {SOAK_S:g} s more: {figures()}")
    assert all(new < old + (32 << 10) for new, old in zip(memory(), used))


STRICT = """
import json, sys
from tilewise.server import ServerSettings, serve
serve(sys.argv[1], ServerSettings(port=0, **json.loads(sys.argv[2])), {"dtype": "f32", "max_num_seqs": 2},
      on_listening=lambda address: print("listening on " + address, file=sys.stderr, flush=True))
"""


@pytest.mark.slow
def test_slow_senders_and_full_queues():
    """Headers and bodies that do not arrive are ended, too many connections and texts are rejected,
    too long answers end with an error.
    """
    settings = {
        "header_timeout_s": 0.3,
        "body_timeout_s": 0.3,
        "request_timeout_s": 0.2,
        "max_connections": 6,
        "max_num_waiting": 2,
        "max_request_bytes": 2048,
        "max_logprobs": 2,
    }
    server = Served(small_model(), script=STRICT, settings=settings).wait_ready()
    try:
        assert _raw(server, b"POST /v1/comp") == b""
        assert _raw(server, b"") == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
            with contextlib.suppress(OSError):
                for _ in range(1000):  # headers without end, a byte at a time
                    link.sendall(b"G")
                    time.sleep(0.01)
                raise AssertionError("a request of a thousand bytes took its time")
            link.close()
        half = _post(b"{}", close=b"")[:-1]
        _error(_raw(server, half.replace(b"content-length", b"connection: close\r\ncontent-length")), 408)
        links = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(12)]
        assert all(link.recv(1) == b"" for link in links)
        for link in links:
            link.close()
        assert server.ask(COMPLETION, {"prompt": "x" * 2048})[0] == 413
        for count, status in ((2, 200), (3, 400)):
            assert server.ask(COMPLETION, {"prompt": "x", "logprobs": count, "max_tokens": 1})[0] == status
        body = {"prompt": ["a"] * 3, "n": 2, "max_tokens": 250, "ignore_eos": True}
        status, reported = server.ask(COMPLETION, body)
        assert status == 200 or (status == 504 and reported["error"]["type"] == "timeout_error"), reported
        long = {"prompt": "a", "n": 4, "max_tokens": 250, "ignore_eos": True, "stream": True}
        one = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        one.request("POST", COMPLETION, json.dumps(long), {"content-type": "application/json"})
        answer = one.getresponse()
        answer.readline()
        two = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        two.request("POST", COMPLETION, json.dumps(long), {"content-type": "application/json"})
        rejected = two.getresponse()
        assert (rejected.status, rejected.headers["retry-after"]) == (429, "1")
        assert json.loads(rejected.read())["error"]["type"] == "rate_limit_error"
        assert answer.read().endswith(b"data: [DONE]\n\n")
        one.close()
        two.close()
        server.wait_idle()
    finally:
        assert server.close() == 0


@pytest.mark.slow
def test_more_clients_than_descriptors():
    """There is a descriptor for every allowed connection; if the system allows fewer, clients wait,
    the log stays short, and the server recovers when they leave.
    """
    for hard, is_enough in ((4096, True), (64, False)):
        script = (
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard})); {STRICT.strip()}"
        )
        server = Served(
            small_model(), script=script, settings={"max_connections": 200, "header_timeout_s": 3}
        )
        try:
            server.wait_ready()
            links = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(150)]
            links[-1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            links[-1].settimeout(1)
            with contextlib.nullcontext() if is_enough else pytest.raises(TimeoutError):
                assert links[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
            for link in links:
                link.close()
            assert server.get("/health")[0] == 200
            assert sum("open more files" in line for line in server.log) == (not is_enough)
            assert len(server.log) < 10, server.log[:20]
        finally:
            assert server.close() == 0


@pytest.mark.slow
def test_clients_that_stop_reading_are_disconnected(tmp_path):
    """During an answer and after it, nothing waits for a client that does not read."""
    settings = {"send_timeout_s": 0.3, "uds": str(tmp_path / "socket")}
    server = Served(small_model(), script=STRICT, settings=settings)

    def ask(path, body):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(60)
        link.connect(settings["uds"])
        link.sendall(_post(json.dumps(body).encode(), path=path.encode()))
        return link

    def read(link):
        content = b""
        with contextlib.suppress(ConnectionError), link:
            while piece := link.recv(1 << 16):
                content += piece
        return content

    try:
        for _ in range(1000):
            link = socket.socket(socket.AF_UNIX)
            link.connect(settings["uds"])
            link.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if _parts(read(link))[0] == 200:
                break
            time.sleep(0.02)
        read(ask("/detokenize", {"tokens": [5]}))
        before = _sockets(server.process.pid)
        complete = read(ask("/detokenize", {"tokens": [5] * 1000}))
        assert _parts(complete)[0] == 200
        counts = range(100_000, 320_000, 20_000)  # bytes: all that the system holds for a client, and more
        links = [ask("/detokenize", {"tokens": [5] * count}) for count in (*counts, 1 << 20)]
        long = {"prompt": "x", "n": 8, "max_tokens": 250, "ignore_eos": True, "stream": True, "logprobs": 20}
        links.append(ask(COMPLETION, long))
        for _ in range(1000):
            if _sockets(server.process.pid) <= before:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("a client that reads nothing is waited for")
        assert len(read(links[-2])) < 1 << 20
        for link in links:
            link.close()
    finally:
        assert server.close() == 0
