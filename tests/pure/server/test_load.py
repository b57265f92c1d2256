"""Load generation: requests arrive as configured, and figures follow from their times."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core import ConfigError
from tilewise.server.load import Load, LoadRequest, LoadResult, Target, load_figures, play, require_answer

LOAD = Load("/v1/completions", "m")
EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\ndata: [DONE]\n\n',
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def answered(answer, count=1, load=LOAD):
    """Results of requests to a server with these answers, and the requests it received."""
    seen = []

    async def serve(reader, writer):
        seen_head = await reader.readuntil(b"\r\n\r\n")
        length = int(seen_head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append((seen_head, await reader.readexactly(length), time.perf_counter()))
        await answer(writer)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        target = Target(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {"authorization": "Bearer k"}
        )
        async with server:
            return await play(target, load, [LoadRequest("p", 1, 5)] * count)

    return asyncio.run(run()), seen


async def whole(writer):
    """Two pieces of text, then their usage, split in the middle of events."""
    data = HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
    for begin in range(0, len(data), 37):
        writer.write(data[begin : begin + 37])
        await writer.drain()
        await asyncio.sleep(0.001)


def test_answer_is_read_however_it_is_split():
    """Pieces, their times, the server's own counts; the key and the request arrive."""
    (played,), ((head, body, _),) = answered(whole)
    assert (played.error, played.num_prompt, played.num_new, len(played.delta_times)) == ("", 3, 5, 2)
    assert played.submitted < played.delta_times[0] < played.delta_times[1] <= played.ended
    assert b"authorization: Bearer k" in head and b'"max_tokens": 5' in body


@pytest.mark.parametrize(
    "data,words",
    [
        (
            b'HTTP/1.1 429 No\r\ncontent-length: 32\r\n\r\n{"error":{"message":"too many"}}',
            "status 429: too many",
        ),
        (HEAD + chunk(b'data: {"error":{"message":"it broke"}}\n\n'), "it broke"),
        (HEAD + chunk(b"data: nonsense\n\n"), "is not JSON"),
        (HEAD + chunk(b'data: {"choices": 7}\n\n'), "unexpected form"),
        (HEAD + chunk(EVENTS[0])[:20], "incomplete"),
        (HEAD + b"0\r\n\r\n", "no text"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP"),
    ],
)
def test_failed_request_is_an_error_of_its_own(data, words):
    """Any response of a server affects only that request."""

    async def answer(writer):
        writer.write(data)
        await writer.drain()

    (played,), _ = answered(answer)
    assert words in played.error
    assert load_figures([played], [99])["failed"] == 1


def test_concurrency_is_limited():
    """The limit holds; without it all arrive at once."""
    most = now = 0

    async def slow(writer):
        nonlocal most, now
        most, now = max(most, now + 1), now + 1
        await asyncio.sleep(0.03)
        now -= 1
        await whole(writer)

    played, _ = answered(slow, 6, Load("/v1/completions", "m", max_concurrency=2))
    assert most == 2 and not any(one.error for one in played)
    assert load_figures(played, [50])["max_concurrent_requests"] == 2
    answered(slow, 6)
    assert most == 6


@given(
    count=st.integers(1, 200),
    rate=st.floats(0.1, 1000),
    burstiness=st.sampled_from([0.1, 0.5, 1.0, 4.0]),
    seed=st.integers(0, 9),
)
def test_arrivals_keep_their_rate(count, rate, burstiness, seed):
    """As many waits as requests, none before the first, in total the rate; the same for a seed."""
    load = Load("/v1/completions", "m", rate, burstiness, seed=seed)
    waits = list(load.waits(count))
    assert len(waits) == count and waits[0] == 0 and min(waits) >= 0
    assert sum(waits) == pytest.approx((count - 1) / rate)
    assert waits == list(load.waits(count))


def test_figures_of_known_times():
    """Times that can be added by hand; failed requests are in no metric."""
    played = [
        LoadResult(10, 1.0, [1.5, 1.7, 2.1], 4, 2.2),
        LoadResult(20, 1.5, [2.0], 1, 2.0),
        LoadResult(5, 1.0, [], 0, 9.0, "broken"),
    ]
    figures = load_figures(played, [50, 99])
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, ["broken"])
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["duration"]) == (
        30,
        5,
        8.0,
    )
    assert figures["mean_ttft_ms"] == pytest.approx(500) and figures["p50_itl_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx(200) and figures["median_e2el_ms"] == pytest.approx(850)
    assert figures["request_throughput"] == 0.25


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:80", "ftp://x", "http://", "http://x:y", "http://x:99999"),
        *("http://a..b", f"http://{'a' * 64}", "http://x/a b", "http://x/ü", "http://ü", "http://x/\udcff"),
    ],
)
def test_invalid_servers_are_rejected(url):
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="address"):
        Target(url)
    with pytest.raises(ConfigError, match="printable"):
        Target("http://x", {"authorization": "Bearer a\r\nhost: y"})


def test_unreachable_server_is_one_error():
    """It has the address."""
    with pytest.raises(ConfigError, match=r"a server must answer at 'http://127\.0\.0\.1:9'"):
        asyncio.run(require_answer(Target("http://127.0.0.1:9"), None))
