"""Parts of the server: frames, the queue to the HTTP process, hosts, keys, figures, sizes, errors."""

import socket
import threading
import time

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tilewise.cli.options import size
from tilewise.core import ConfigError, TaskFailed
from tilewise.generate import served_settings
from tilewise.processes.children import HEAD, pack, unpack
from tilewise.serve import Delta, EngineStats, Logprob, SamplingParams, StructuredOutputsParams
from tilewise.server import ServerSettings
from tilewise.server.endpoints.chat import open_run, take, whole_chat
from tilewise.server.errors import of_exception, validation_error
from tilewise.server.guard import is_known_host
from tilewise.server.link.engine_process import Outbox, _frames
from tilewise.server.link.rows import delta_of, row_of
from tilewise.server.metrics import Metrics, Rates, RequestTimes
from tilewise.server.requests.bodies import ChatBody, CompletionBody
from tilewise.server.requests.conversation import Conversation, Rendered
from tilewise.server.requests.params import sampling_params
from tilewise.server.requests.reading import OutputFormat

_FIGURES = st.dictionaries(
    st.integers(0, 99),
    st.builds(Logprob, st.floats(-50, 0), st.integers(1, 99), st.text(max_size=3)),
    max_size=3,
)


@settings(max_examples=40)
@given(
    st.builds(
        Delta,
        st.integers(0, 9),
        st.integers(0, 9),
        st.none() | st.integers(0, 99),
        st.text(max_size=9),
        st.none() | st.sampled_from(["stop", "length"]),
        st.none() | st.text(max_size=3) | st.integers(0, 9),
        st.none() | _FIGURES,
        st.none() | st.lists(st.none() | _FIGURES, max_size=3),
        st.integers(0, 99),
        begun_s=st.none() | st.floats(0, 1e9),
    )
)
def test_messages_round_trip_frames(delta):
    """Text of any characters, every bit of every figure."""
    frame = pack([row_of(delta)])
    assert HEAD.unpack(frame[: HEAD.size])[0] == len(frame) - HEAD.size
    back = delta_of(unpack(frame[HEAD.size :])[0])
    assert back == delta and back.begun_s == delta.begun_s


def test_vectors_round_trip_frames():
    """To the bit."""
    vector = np.float32([1 / 3, -0.0, 3e-42, 1e38])
    back = delta_of(unpack(pack(row_of(Delta(0, 0, None, "", "stop", vector=vector)))[HEAD.size :])).vector
    assert back.tobytes() == vector.tobytes()


def test_full_queue_blocks_its_writer():
    """A slow reader blocks the engine at the bound; nothing is lost; a closed socket ends the sender."""
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours.sendall, most=4)
    put = []

    def write():
        for number in range(64):
            outbox.put("delta", number, "x" * 65536)
            put.append(number)

    def send():
        with pytest.raises(OSError):
            outbox.run()

    writer, sender = threading.Thread(target=write), threading.Thread(target=send)
    writer.start()
    sender.start()
    for _ in range(100):
        count = len(put)
        time.sleep(0.005)
        if count and count == len(put):
            break
    assert len(put) < 40  # frames in the socket, the one that is sent, and four in the queue
    left, received = b"", []
    while len(received) < 64:
        left += theirs.recv(1 << 20)
        while len(left) >= HEAD.size and len(left) >= HEAD.size + HEAD.unpack(left[: HEAD.size])[0]:
            end = HEAD.size + HEAD.unpack(left[: HEAD.size])[0]
            received += [number for _, number, _ in unpack(left[HEAD.size : end])]
            left = left[end:]
    assert received == list(range(64))
    writer.join()
    theirs.close()
    outbox.put("delta", 0, "x")
    outbox.put("delta", 1, "x")
    sender.join()
    ours.close()


@pytest.mark.slow
def test_long_messages_are_several_frames():
    """Pieces with many figures do not accumulate in one frame; none is lost, and their order is kept."""
    figures = {token: Logprob(-1.0, token + 1) for token in range(100)}
    deltas = [Delta(0, 0, number, "x", prompt_logprobs=[None, *[figures] * 40]) for number in range(20)]
    messages = [["delta", 1, delta] for delta in deltas]
    frames = [
        unpack(frame[HEAD.size :]) for frame in _frames([*messages, ["delta", 1, Delta(0, 0, 20, "y")]])
    ]
    assert [delta_of(row).token for frame in frames for _, _, row in frame] == list(range(21))
    assert (
        len(frames) > 1 and max(map(len, frames)) <= 10 and len(list(_frames([["stats", 1, {}]] * 1000))) == 1
    )


def test_allowed_hosts():
    """Addresses and own names, with a port or without."""
    names = ("localhost", "box")
    for host in ("localhost", "LOCALHOST:80", "box:1", "127.0.0.1", "10.0.0.1:80", "[::1]:8000"):
        assert is_known_host(host, names), host
    for host in (
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "box.",
        "1.2.3",
        "a:b:c",
    ):
        assert not is_known_host(host, names), host


def test_keys_and_their_salts():
    """Any one of them is accepted, each with its own salt, which is not the key; without keys all are accepted."""
    settings = ServerSettings(api_keys=("one", "two"))
    salts = {settings.find_key(key) for key in ("one", "two")}
    assert len(salts) == 2 and None not in salts and not salts & {"one", "two", ""}
    for given_key in (None, "", "on", "one ", "onetwo", "\udcff"):
        assert settings.find_key(given_key) is None
    assert ServerSettings().find_key(None) == ""


def test_settings_have_ranges():
    """Checked before anything starts."""
    for name, value in (
        ("port", 65536), ("host", ""), ("stream_interval", 0), ("max_request_bytes", 0), ("api_keys", ("",)),
        ("api_keys", ("é",)), ("api_keys", (" a",)), ("allowed_hosts", ("a:80",)), ("allowed_hosts", ("*",)),
        ("allowed_origins", ("https://a/",)), ("allowed_origins", ("a.example",)), ("allowed_origins", ("https://A",)),
        ("header_timeout_s", float("nan")), ("tool_call_parser", "x"), ("reasoning_parser", "x"), ("ssl_keyfile", "k"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            ServerSettings(**{name: value})
    ServerSettings(api_keys=("a b",), allowed_hosts=("Box.example",), allowed_origins=("*", "http://a:80"))


def test_figures_in_prometheus_format():
    """Counters, gauges and buckets with consistent sums; names of models may hold any character."""
    metrics = Metrics('a"b\\c')
    times = RequestTimes(1.0)
    metrics.read_prompt(100, 64)
    for now, scheduled in ((1.5, 1.25), (1.52, None), (1.54, None)):
        metrics.wrote_token(times, (0, 0), now, scheduled)
    metrics.finish_text(3, "stop", times)
    metrics.finish_request(0.54)
    lines = metrics.text(EngineStats(1, 2, 10, 5, 3, 4)).splitlines()
    label = 'model_name="a\\"b\\\\c"'
    for line in (
        f"vllm:num_requests_running{{{label}}} 1",
        f"vllm:num_requests_waiting{{{label}}} 2",
        f"vllm:kv_cache_usage_perc{{{label}}} 0.5",
        f"vllm:num_preemptions_total{{{label}}} 3",
        f"vllm:prompt_tokens_total{{{label}}} 100",
        f"vllm:prefix_cache_hits_total{{{label}}} 64",
        f"vllm:generation_tokens_total{{{label}}} 3",
        f'vllm:request_success_total{{{label},finished_reason="stop"}} 1',
        f'vllm:time_to_first_token_seconds_bucket{{{label},le="0.5"}} 1',
        f'vllm:inter_token_latency_seconds_bucket{{{label},le="0.025"}} 2',
        f'vllm:inter_token_latency_seconds_bucket{{{label},le="+Inf"}} 2',
        f"vllm:inter_token_latency_seconds_count{{{label}}} 2",
        f"vllm:request_queue_time_seconds_sum{{{label}}} 0.25",
        f"vllm:request_prefill_time_seconds_sum{{{label}}} 0.25",
        f"vllm:request_decode_time_seconds_sum{{{label}}} 0.04",
        f"vllm:request_inference_time_seconds_sum{{{label}}} 0.29",
        f"vllm:request_inference_time_seconds_count{{{label}}} 1",
    ):
        assert line in lines, line


def test_rates_of_the_last_two_minutes_are_kept():
    """Tokens of each whole second since the server began, also of seconds without any; no page needs to be open."""
    rates = Rates(10.2)
    assert rates.last(10.9) == []
    for now in (10.5, 11.1, 11.9, 14.0):
        rates.add(now)
    assert rates.last(14.5) == [1, 2, 0, 0] and rates.last(15.0) == [1, 2, 0, 0, 1]
    for second in range(20, 400):
        rates.add(second)
    assert rates.last(400.0) == [1] * 120 and rates.last(405.0) == [1] * 115 + [0] * 5


def test_sizes_as_people_write_them():
    """Upper case units are powers of 1024, lower case ones of 1000."""
    reported = {"2G": 2 << 30, "32K": 32 << 10, "1k": 1000, "4096": 4096, "1.5M": 3 << 19, "2GiB": 2 << 30}
    assert {text: size(text, "--option") for text in reported} == reported and size(None, "--option") is None
    for text in ("", "-1", "G", "1e9", "2X", "1 G", "9" * 20):
        with pytest.raises(typer.BadParameter):
            size(text, "--option")


def test_defects_are_not_shown_to_clients():
    """Clients get their own errors and failed kernels, nothing else."""
    assert of_exception(ConfigError("[x] a; got b; c")).status == 400
    assert of_exception(TaskFailed("[x] a; got b; c")).status == 500
    reported = of_exception(KeyError("secret of another"))
    assert reported.status == 500 and "secret" not in reported.message


def test_errors_of_a_body_are_short():
    """The field, the rule, and a shortened value."""
    for body, place in (
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "stop": ["b", "a" * 9999]}, "stop.1"),
        ({"prompt": "x", "stop": ["b", 5]}, "stop.1"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": [3, "a"]}, "prompt.1"),
        ({"prompt": ["a", 3]}, "prompt.1"),
        ({"prompt": [[1], [2, -3]]}, "prompt.1.1"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"prompt": "x", "logit_bias": {"A": "x"}}, "logit_bias.A"),
        ({}, "prompt"),
    ):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate(body)
        reported = validation_error(caught.value)
        assert reported.status == 400 and reported.param == place and len(reported.message) < 400
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [], "tool_choice": {"type": "function", "function": 7}})
    reported = validation_error(caught.value)
    assert (
        reported.param == "messages" and "should have at least 1 item; got an empty list" in reported.message
    )
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [{"role": "user"}], "tool_choice": "some"})
    assert "should be 'none', 'auto' or 'required' or an object; got 'some'" in str(
        validation_error(caught.value)
    )


def test_settings_of_a_body():
    """OpenAI's defaults, then generation_config.json, then the body."""
    defaults = served_settings({"temperature": 0.5, "top_k": 7, "max_new_tokens": 9, "eos_token_id": 1})
    talk = [{"role": "user", "content": "x"}]
    chat = sampling_params(ChatBody(messages=talk, temperature=0.1, logprobs=True, top_logprobs=2), defaults)
    assert (chat.temperature, chat.top_k, chat.max_tokens, chat.logprobs) == (0.1, 7, 9, 2)
    assert sampling_params(ChatBody(messages=talk), {}).max_tokens is None
    assert (
        sampling_params(ChatBody(messages=talk, max_completion_tokens=3, max_tokens=4), defaults).max_tokens
        == 3
    )
    text = sampling_params(CompletionBody(prompt="x", echo=True, logprobs=1, max_tokens=0), {})
    assert (text.max_tokens, text.logprobs, text.prompt_logprobs) == (1, 1, 1)
    assert sampling_params(CompletionBody(prompt="x"), {}).max_tokens == 16


def test_conversations_for_templates():
    """Parts are joined, developers are systems, arguments are objects, tools and choices are applied."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "developer", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = ChatBody.model_validate({"messages": talk, "tools": [tool], "reasoning_effort": "low"})
    conversation = Conversation.of(body)
    assert conversation.messages[0] == {"role": "system", "content": "a\nb"}
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (
        conversation.tools == [tool]
        and conversation.variables == {"reasoning_effort": "low"}
        and conversation.add_generation_prompt
    )
    assert Conversation.of(body.model_copy(update={"tool_choice": "none"})).tools is None
    goes_on = Conversation.of(body.model_copy(update={"continue_final_message": True}))
    assert goes_on.continue_final_message and not goes_on.add_generation_prompt


def test_thoughts_and_calls_are_parts_of_a_message():
    """A prompt may end within a thought; a grammar permits no thoughts."""
    params = SamplingParams(max_tokens=9)
    rendered = Rendered("user: x\nassistant: <think>\n", [1, 2, 3])
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    run = open_run(None, "m", rendered, rendered.ids, params, OutputFormat("hermes", thinks=True))
    for text in ("let me ", "see</th", "ink>\n\nOf course.", '<tool_call>{"name": "f"}</tool_call>'):
        take(run, Delta(0, 0, 7, text, num_cached_tokens=2))
    take(run, Delta(0, 0, None, "", "stop"))
    reported = whole_chat(run, body)
    (choice,) = reported["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me see", "Of course.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls" and reported["usage"]["completion_tokens"] == 4
    assert reported["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert reported["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    bound = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
    run = open_run(None, "m", rendered, rendered.ids, bound, OutputFormat(thinks=True))
    take(run, Delta(0, 0, 7, "yes", "stop"))
    assert whole_chat(run, body)["choices"][0]["message"]["content"] == "yes"
