"""Every path of the server, compared with `LLM` and with OpenAI's and vLLM's documentation."""

import http.client
import json

import pytest

from native.serve.serving_models import TEXTS
from native.server.served import TALK, Served, small_model, usual_server
from tilewise import LLM, SamplingParams
from tilewise.data import train_tokenizer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server():
    return usual_server()


@pytest.fixture(scope="module")
def llm():
    with LLM(small_model(), dtype="f32", max_num_seqs=8) as llm:
        yield llm


def test_small_pages(server):
    """Model names, version, health, and errors of unknown paths and methods."""
    assert server.get("/health") == (200, {"status": "ok"})
    assert "version" in server.get("/version")[1]
    (listed,) = server.get("/v1/models")[1]["data"]
    assert server.get("/v1/models/small")[1] == listed
    assert listed["id"] == "small" and listed["object"] == "model" and listed["max_model_len"] == 256
    status, reported = server.get("/v1/models/large")
    assert status == 404 and reported["error"]["code"] == "model_not_found"
    for path, code in (("/nothing", 404), ("/v1/completions", 405)):
        status, reported = server.get(path)
        assert status == code and set(reported["error"]) == {"message", "type", "param", "code"}


def test_completions_equal_llm(server, llm):
    """Texts, ids, lists of either, several texts each, stop strings: the same as without HTTP."""
    ways = {"max_tokens": 12, "seed": 3, "temperature": 0.9, "n": 2}
    prompts = [TEXTS[0], TEXTS[2]]
    status, reported = server.ask(COMPLETION, {"model": "small", "prompt": prompts, "logprobs": 2, **ways})
    assert status == 200 and reported["object"] == "text_completion" and reported["id"].startswith("cmpl-")
    expected = llm.generate(prompts, SamplingParams(**ways, logprobs=2))
    texts = [text for output in expected for text in output.outputs]
    assert [choice["index"] for choice in reported["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(reported["choices"], texts):
        assert choice["text"] == text.text and choice["finish_reason"] == text.finish_reason
        figures = [candidates[token].logprob for token, candidates in zip(text.token_ids, text.logprobs)]
        assert choice["logprobs"]["token_logprobs"] == figures
    ids = [output.prompt_token_ids for output in expected]
    again = server.ask(COMPLETION, {"prompt": ids, **ways})[1]
    assert [choice["text"] for choice in again["choices"]] == [text.text for text in texts]
    assert again["usage"]["prompt_tokens"] == sum(map(len, ids))
    one = server.ask(COMPLETION, {"prompt": ids[0], **ways, "n": 1, "return_token_ids": True})[1]
    assert one["choices"][0]["token_ids"] == texts[0].token_ids
    letter = texts[0].text[3]
    stopped = server.ask(COMPLETION, {"prompt": ids[0], **ways, "n": 1, "stop": [letter]})[1]["choices"][0]
    assert stopped["text"] == texts[0].text[: texts[0].text.index(letter)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", letter)


def test_echo_scores_a_prompt_for_lm_eval(server, llm):
    """`echo` with `logprobs` reports the prompt's tokens; with `max_tokens` 0, only those."""
    (output,) = llm.generate(
        TEXTS[0], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    )
    fields = {
        "prompt": [output.prompt_token_ids],
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    for most in (0, 1):
        reported = server.ask(COMPLETION, {**fields, "max_tokens": most})[1]
        (choice,) = reported["choices"]
        figures = choice["logprobs"]
        size = len(output.prompt_token_ids) + most
        assert {len(figures[name]) for name in figures} == {size}
        assert reported["usage"]["completion_tokens"] == most
        assert figures["token_logprobs"][0] is None and figures["top_logprobs"][0] is None
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
        expected = [candidates[token].logprob for token, candidates in scored]
        assert figures["token_logprobs"][1 : len(expected) + 1] == expected
        assert figures["text_offset"][0] == 0 and "".join(figures["tokens"]).startswith(TEXTS[0])
        assert choice["text"].startswith(TEXTS[0])
    fields |= {"prompt": TEXTS[0], "truncate_prompt_tokens": 2, "max_tokens": 0}
    (cut,) = server.ask(COMPLETION, fields)[1]["choices"]
    assert cut["text"] == "".join(cut["logprobs"]["tokens"]) and TEXTS[0].endswith(cut["text"])


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_joined_streams_equal_whole_answers(server, path):
    """Text, log probabilities, reasons and usage are the same; the first chunk of a chat has the
    role, the last line is DONE.
    """
    fields = {"max_tokens": 9, "seed": 5, "n": 2, "return_token_ids": True}
    fields |= (
        {"messages": TALK, "logprobs": True, "top_logprobs": 2} if path == CHAT else {"prompt": "import"}
    )
    full = server.ask(path, fields)[1]
    lines = server.chunks(path, {**fields, "stream_options": {"include_usage": True}})
    assert lines[-1] == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    assert last["choices"] == []
    assert last["usage"] | {"prompt_tokens_details": 0} == full["usage"] | {"prompt_tokens_details": 0}
    assert {chunk["usage"] for chunk in chunks} == {None} and len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(full["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert [token for c in own for token in c.get("token_ids", [])] == choice["token_ids"]
        first = own[0] if path == COMPLETION else chunks[0]
        assert first["prompt_token_ids"] == (choice if path == COMPLETION else full)["prompt_token_ids"]
        if path == CHAT:
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
            figures = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert figures == choice["logprobs"]["content"] and len(figures[0]["top_logprobs"]) == 2
        else:
            assert "".join(c["text"] for c in own) == choice["text"]


def test_numbers_that_mean_no_limit(server, llm):
    """As clients of vLLM, llama.cpp and OpenAI send them: any seed, no limit of tokens, as much of
    a prompt as fits, only the most likely token.
    """
    long = {"prompt": [5] * 300, "truncate_prompt_tokens": -1, "ignore_eos": True}
    for path, prompt in ((COMPLETION, {"prompt": [5] * 250}), (CHAT, {"messages": TALK})):
        reported = server.ask(path, {**prompt, "max_tokens": -1, "seed": -1, "ignore_eos": True})[1]
        assert reported["usage"]["total_tokens"] == 256
        assert reported["choices"][0]["finish_reason"] == "length"
    for most, read in ((6, 250), (-1, 255), (400, 1)):
        for prompt in ({}, {"prompt": "def f(x): return " * 10000}):
            usage = server.ask(COMPLETION, {**long, **prompt, "max_tokens": most})[1]["usage"]
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (read, 256)
    texts = {server.ask(COMPLETION, {"prompt": "x", "seed": -1})[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    (likeliest,) = llm.generate("x", SamplingParams(temperature=0))
    reported = server.ask(COMPLETION, {"prompt": "x", "top_p": 0, "temperature": 2.0})[1]
    assert reported["choices"][0]["text"] == likeliest.outputs[0].text


def test_a_chat_equals_llm(server, llm):
    """Template, text parts and defaults as in `LLM.chat`; without a limit, the text continues to
    the end of the context.
    """
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=None, seed=1))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    reported = server.ask(CHAT, {"messages": parts, "seed": 1, "model": "small"})[1]
    (choice,) = reported["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.outputs[0].text, "refusal": None}
    assert reported["usage"]["total_tokens"] <= 256
    assert choice["finish_reason"] == output.outputs[0].finish_reason
    begun = [*TALK, {"role": "assistant", "content": "def f(x):"}]
    tokens = server.ask("/tokenize", {"messages": begun, "continue_final_message": True})[1]["tokens"]
    assert server.ask("/detokenize", {"tokens": tokens})[1]["prompt"].endswith("assistant: def f(x):")


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m"]}},
    "required": ["size"],
    "additionalProperties": False,
}


def test_formats_and_calls_follow_their_schemas(server):
    """JSON schemas, JSON objects, required calls and named calls, whole and as streams."""
    usual = {"messages": TALK, "seed": 2, "max_tokens": 120}
    for form in (
        {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "schema": SCHEMA},
    ):
        text = server.ask(CHAT, {**usual, "response_format": form})[1]["choices"][0]["message"]["content"]
        assert json.loads(text)["size"] in ("s", "m")
    tool = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
    for choice, reason in (
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "order"}}, "stop"),
    ):
        fields = {**usual, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        (reported,) = server.ask(CHAT, fields)[1]["choices"]
        (call,) = reported["message"]["tool_calls"]
        assert reported["finish_reason"] == reason and reported["message"]["content"] is None
        assert call["function"]["name"] == "order" and call["id"].startswith("call_")
        assert json.loads(call["function"]["arguments"])["size"] in ("s", "m")
        deltas = [json.loads(line)["choices"][0]["delta"] for line in server.chunks(CHAT, fields)[:-1]]
        pieces = [one for delta in deltas for one in delta.get("tool_calls", [])]
        assert pieces[0]["function"]["name"] == "order"
        arguments = "".join(piece["function"]["arguments"] for piece in pieces)
        assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    cut = {**usual, "tools": [tool], "tool_choice": "required", "max_tokens": 3}
    (reported,) = server.ask(CHAT, cut)[1]["choices"]
    assert (
        reported["finish_reason"] == "length" and not reported["message"]["content"]
    )  # no text of the unfinished list


@pytest.mark.slow
def test_parallel_tool_calls_false_gives_one_call():
    """Calls after the first are removed, whole and as a stream; text after it is not."""
    model = Served(small_model(), "--tool-call-parser", "hermes").wait_ready()
    one = '<tool_call>\\{"name": "f", "arguments": \\{"a": [0-9]\\}\\}</tool_call>'
    fields = {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}], "seed": 1}
    fields |= {"structured_outputs": {"regex": f"{one}{one}end"}}
    try:
        for are_many, count in ((True, 2), (False, 1)):
            body = {**fields, "parallel_tool_calls": are_many}
            (reported,) = model.ask(CHAT, body)[1]["choices"]
            assert len(reported["message"]["tool_calls"]) == count and reported["message"]["content"] == "end"
            deltas = [json.loads(line)["choices"][0]["delta"] for line in model.chunks(CHAT, body)[:-1]]
            places = {call["index"] for delta in deltas for call in delta.get("tool_calls", [])}
            assert places == set(range(count))
            assert "".join(delta.get("content") or "" for delta in deltas) == "end"
    finally:
        assert model.close() == 0


def test_special_tokens_of_the_tokenizer_are_added_on_request():
    """A rendered conversation has only those of its template, unless `add_special_tokens` is set."""
    from tokenizers.processors import TemplateProcessing

    from tilewise.checkpoint import load_tokenizer
    from tilewise.server.requests.bodies import ChatBody, TokenizeBody
    from tilewise.server.requests.conversation import Conversation, Renderer

    tokenizer = load_tokenizer(str(small_model()), 1 << 16)
    name = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 0)])
    renderer = Renderer(small_model(), tokenizer)
    for kind in (ChatBody, TokenizeBody):
        bodies = [kind(messages=TALK, add_special_tokens=adds) for adds in (None, False, True)]
        usual, without, added = (renderer.render(Conversation.of(body)).ids for body in bodies)
        assert usual == without and added == [0, *usual]


def test_tool_calls_and_results_in_a_conversation(server):
    """Arguments are text, even if `max_tokens` has cut them; calls without a name are rejected."""
    call = {"id": "c1", "type": "function", "function": {"name": "order", "arguments": '{"size": "s"}'}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
    assert server.ask(CHAT, {"messages": talk, "max_tokens": 2})[0] == 200
    talk[1]["tool_calls"][0]["function"]["arguments"] = '{"size": "'
    assert server.ask(CHAT, {"messages": talk, "max_tokens": 2})[0] == 200
    del talk[1]["tool_calls"][0]["function"]["name"]
    status, reported = server.ask(CHAT, {"messages": talk, "max_tokens": 2})
    assert status == 400 and "messages.1.tool_calls.0.function.name" in reported["error"]["message"]


def test_tokenize_and_detokenize(server, llm):
    """The tokenizer's ids, and their text."""
    reported = server.ask("/tokenize", {"prompt": TEXTS[0], "return_token_strs": True})[1]
    assert reported["tokens"] == llm.get_tokenizer().encode(TEXTS[0]).ids and reported["max_model_len"] == 256
    assert reported["count"] == len(reported["tokens"]) == len(reported["token_strs"])
    assert server.ask("/detokenize", {"tokens": reported["tokens"]})[1] == {"prompt": TEXTS[0]}


def test_responses_without_state(server):
    """Text and calls; the events in order give the response object of the whole answer."""
    fields = {"input": "hello", "instructions": "be brief", "max_output_tokens": 8, "seed": 1}
    full = server.ask("/v1/responses", fields)[1]
    assert full["object"] == "response" and full["status"] in ("completed", "incomplete")
    (message,) = full["output"]
    events = [json.loads(line) for line in server.chunks("/v1/responses", fields)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == f"response.{full['status']}"
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == message["content"][0]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]
    events = [json.loads(line) for line in server.chunks("/v1/responses", {**fields, "top_logprobs": 1})]
    figures = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]
    flat = [entry for reported in figures for entry in reported]
    assert flat and done["logprobs"][: len(flat)] == flat
    assert len(done["logprobs"]) == full["usage"]["output_tokens"]
    tool = {"type": "function", "name": "order", "parameters": SCHEMA}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a shirt"}]}]
    called = server.ask(
        "/v1/responses", {"input": items, "tools": [tool], "tool_choice": "required", "seed": 1}
    )[1]
    assert called["output"][0]["type"] == "function_call" and called["output"][0]["name"] == "order"
    items += [called["output"][0], {"type": "function_call_output", "call_id": "x", "output": "done"}]
    assert server.ask("/v1/responses", {"input": items, "max_output_tokens": 3})[0] == 200


def test_metrics_count_work(server):
    """Tokens read, generated and found in the cache, texts by reason, times in buckets."""
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total")
    before = {name: server.metric(name) for name in names}
    fields = {"prompt": list(range(3, 133)), "max_tokens": 4, "ignore_eos": True, "cache_salt": "figures"}
    for _ in range(2):
        assert server.ask(COMPLETION, fields)[0] == 200
    after = {name: server.metric(name) - before[name] for name in names}
    assert list(after.values()) == [260, 8, 128]
    text = server.get("/metrics")[1]
    assert 'vllm:request_success_total{model_name="small",finished_reason="length"}' in text
    assert 'vllm:time_to_first_token_seconds_bucket{model_name="small",le="+Inf"}' in text
    server.wait_idle()


def test_aborted_texts_are_counted(server):
    """Each of a request's texts once, with its tokens so far."""

    def read():
        text = server.get("/metrics")[1]
        (line,) = (one for one in text.splitlines() if "success" in one and 'finished_reason="abort"' in one)
        names = (
            "generation_tokens_total",
            "request_generation_tokens_sum",
            "request_generation_tokens_count",
        )
        return [float(line.split()[-1]), *map(server.metric, names)]

    before = read()
    long = {"prompt": "x", "n": 3, "max_tokens": 240, "ignore_eos": True, "stream": True, "logprobs": 20}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETION, json.dumps(long), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    answer.close()
    connection.close()
    server.wait_idle()
    aborted, written, counted, ended = (new - old for new, old in zip(read(), before))
    assert (aborted, ended) == (3, 3) and written == counted < 720


@pytest.mark.slow
def test_times_of_texts_add_up(server):
    """For more texts than run at a time: each is counted once, the time to the first token is queue
    plus prefill, and inference is prefill plus decode.
    """
    parts = ("queue", "prefill", "decode", "inference")
    names = [f"request_{part}_time_seconds" for part in parts]
    names += ["time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds"]

    def read():
        return [[server.metric(f"{name}_{kind}") for kind in ("sum", "count")] for name in names]

    before = read()
    body = {"prompt": [[5, number] for number in range(12)], "max_tokens": 9, "ignore_eos": True}
    server.ask(COMPLETION, body)
    grown = [[new - old for new, old in zip(now, first)] for now, first in zip(read(), before)]
    queue, prefill, decode, inference, first, full, between = (seconds for seconds, _ in grown)
    assert [count for _, count in grown] == [12, 12, 12, 12, 12, 1, 12 * 8]
    assert queue + prefill == pytest.approx(first) and prefill + decode == pytest.approx(inference)
    assert between == pytest.approx(decode) and min(queue, prefill, decode) > 0
    assert inference < 12 * full


def test_embeddings():
    """Of length one, shortened on request, as numbers and as base64; a pooling model generates no text."""
    server = Served(small_model(), "--runner", "pooling", "--max-num-seqs", "4").wait_ready()
    try:
        fields = {"input": [TEXTS[0], "import"], "model": str(small_model())}
        reported = server.ask("/v1/embeddings", fields)[1]
        vectors = [entry["embedding"] for entry in reported["data"]]
        with LLM(small_model(), dtype="f32", runner="pooling") as encoder:
            expected = encoder.encode(fields["input"])[1].outputs.data
        length = float((expected.astype(float) ** 2).sum()) ** 0.5
        assert vectors[1] == pytest.approx((expected / length).tolist(), rel=1e-6)
        short = server.ask("/v1/embeddings", {**fields, "dimensions": 8})[1]["data"][0]["embedding"]
        assert len(short) == 8 and sum(x * x for x in short) == pytest.approx(1)
        assert server.ask("/v1/embeddings", {**fields, "dimensions": 65})[0] == 400
        assert server.ask(COMPLETION, {"prompt": "x"})[0] == 400
        import numpy as np
        import openai

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        same = client.embeddings.create(**fields)  # asks for base64
        assert np.array_equal(np.float32(same.data[0].embedding), np.float32(vectors[0]))
    finally:
        assert server.close() == 0


@pytest.mark.slow
def test_an_encoder_needs_no_runner_option(tmp_path):
    """Its vectors equal `LLM.encode`'s, many texts at a time; requests for text and settings of
    generation are rejected.
    """
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=290, max_position_embeddings=48, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    train_tokenizer(["ab" * 20], vocab_size=290).save(str(tmp_path / "tokenizer.json"))
    texts = ["abab", "a b", "b" * 20]
    server = Served(tmp_path, "--max-num-seqs", "2").wait_ready()
    try:
        reported = server.ask("/v1/embeddings", {"input": texts})[1]["data"]
        with LLM(tmp_path, dtype="f32", runner="pooling", max_num_seqs=2) as encoder:
            expected = [output.outputs.data.tolist() for output in encoder.encode(texts)]
        assert [entry["embedding"] for entry in reported] == expected
        assert server.ask("/v1/embeddings", {"input": "a " * 60})[0] == 400
        assert server.ask(CHAT, {"messages": TALK})[0] == 400
    finally:
        assert server.close() == 0
    for option in (("--max-model-len", "8"), ("--data-parallel-size", "2"), ("--kv-cache-memory", "1G")):
        rejected = Served(tmp_path, *option)  # the option would have no effect
        assert rejected.wait_end() == 2 and "a setting of an encoder must be" in rejected.log[-1]
