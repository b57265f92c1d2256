"""`LLM`: outputs with vLLM's names, ends of texts, and reports about them."""

import json

import numpy as np
import pytest

from native.serve.serving_models import CHAT_TEMPLATE, MAX_CONTEXT, TEXTS, save_model
from tilewise import LLM, SamplingParams
from tilewise.core import ConfigError
from tilewise.core.progress import Progress
from tilewise.generate import encode_prompt
from tilewise.serve import core as core_module
from tilewise.serve import llm as llm_module

GREEDY = SamplingParams(max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, dtype="f32", max_num_seqs=4) as made:
        yield made


def test_use_tqdm_shows_finished_prompts(llm, monkeypatch):
    """Only if it is set."""
    seen = []

    class Seen(Progress):
        def _ended(self, phase):
            seen.append((phase.name, phase.done, phase.total))

    monkeypatch.setattr(llm_module, "ProgressTracker", Seen)
    llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert seen == []
    llm.generate(TEXTS, GREEDY)
    assert seen == [("prompts", len(TEXTS), len(TEXTS))]
    with pytest.raises(ConfigError, match="use_tqdm"):
        llm.generate(TEXTS, GREEDY, use_tqdm=1)


def test_an_error_in_assembling_outputs_reaches_the_caller(llm):
    """It occurs on the engine's thread, and the caller must not wait forever."""

    class Broken:
        def add(self, delta):
            raise KeyError("broken")

    requests = llm.engine.requests([TEXTS[0]], GREEDY)
    with pytest.raises(KeyError, match="broken"):
        list(llm.engine.outputs(requests, [Broken()]))
    assert _first(llm, TEXTS[0], GREEDY).finish_reason == "length"


def _first(llm, prompt, params):
    (output,) = llm.generate([prompt], params)
    return output.outputs[0]


def test_a_list_of_prompts(llm):
    """Outputs in the prompts' order, for more prompts than run at a time, in every form of a prompt."""
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    prompts = [TEXTS[0], ids[1], {"prompt": TEXTS[2]}, {"prompt_token_ids": ids[0], "cache_salt": "mine"}] * 2
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == [TEXTS[0], None, TEXTS[2], None] * 2
    assert [output.prompt_token_ids for output in outputs] == [ids[0], ids[1], ids[2], ids[0]] * 2
    assert all(output.finished and output.outputs[0].finished() for output in outputs)
    assert len({output.request_id for output in outputs}) == 8
    texts = [output.outputs[0].text for output in outputs]
    assert texts[:4] == texts[4:] and texts[0] == texts[3]
    for output in outputs:
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert [o.outputs for o in llm.generate(TEXTS[0], GREEDY)] == [outputs[0].outputs]
    assert [o.outputs for o in llm.generate(ids[0], GREEDY)] == [outputs[0].outputs]
    for array in (np.array(ids[0]), list(np.array(ids[0]))):
        assert [o.outputs for o in llm.generate(array, GREEDY)] == [outputs[0].outputs]
    assert llm.generate([], GREEDY) == []


def test_settings_for_each_prompt(llm):
    """Their number is checked."""
    ways = [GREEDY, SamplingParams(max_tokens=3, temperature=1.0, seed=1, n=2, ignore_eos=True)]
    first, second = llm.generate(TEXTS[:2], ways)
    assert len(first.outputs) == 1 and [len(o.token_ids) for o in second.outputs] == [3, 3]
    assert [o.index for o in second.outputs] == [0, 1]
    with pytest.raises(ConfigError, match="one for all prompts or one per prompt"):
        llm.generate(TEXTS[:2], ways[:1])


def test_a_cached_prefix_changes_nothing(model_dir):
    """The second time all complete blocks of the prompt are found; with another salt or without the cache, none."""
    ids = np.random.default_rng(2).integers(1, 250, 150).tolist()
    with LLM(model_dir, dtype="f32") as llm:
        first, again, salted = (
            llm.generate([prompt], GREEDY)[0]
            for prompt in (ids, ids, {"prompt_token_ids": ids, "cache_salt": "other"})
        )
    assert [o.num_cached_tokens for o in (first, again, salted)] == [0, 128, 0]
    assert first.outputs == again.outputs == salted.outputs
    with LLM(model_dir, dtype="f32", enable_prefix_caching=False) as llm:
        outputs = [llm.generate([ids], GREEDY)[0] for _ in range(2)]
        assert [o.num_cached_tokens for o in outputs] == [0, 0] and outputs[0].outputs == first.outputs


def test_a_conversation(llm, model_dir):
    """One and several, as their template's text."""
    talk = [{"role": "user", "content": "hello"}]
    assert "assistant:" in CHAT_TEMPLATE
    text = "user: hello\nassistant:"
    ids = encode_prompt(llm.get_tokenizer(), text, add_special_tokens=False)
    (wanted,) = llm.generate([ids], GREEDY)
    (one,) = llm.chat(talk, GREEDY)
    assert one.outputs == wanted.outputs and one.prompt_token_ids == ids
    assert [o.outputs for o in llm.chat([talk, talk], GREEDY)] == [wanted.outputs] * 2


def test_texts_end_at_the_limits(llm):
    """max_tokens, or the context without another limit."""
    assert _first(llm, TEXTS[0], SamplingParams(max_tokens=5, ignore_eos=True)).finish_reason == "length"
    (output,) = llm.generate(TEXTS[:1], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == MAX_CONTEXT
    assert output.outputs[0].finish_reason == "length"


def test_stop_tokens_of_model_and_request(llm, model_dir, tmp_path):
    """Both end a text as its last token, which is not shown; a request's own is the stop_reason,
    also with ignore_eos.
    """
    plain = _first(llm, TEXTS[0], GREEDY)
    end = plain.token_ids[4]
    first = plain.token_ids.index(end)
    for ignore_eos in (False, True):
        way = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[end], ignore_eos=ignore_eos)
        completion = _first(llm, TEXTS[0], way)
        assert completion.token_ids == plain.token_ids[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", end)
        assert completion.text == llm.get_tokenizer().decode(plain.token_ids[:first])
    directory = save_model(tmp_path / "ends")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    with LLM(directory, dtype="f32") as other:
        completion = _first(other, TEXTS[0], GREEDY)
        assert completion.token_ids == plain.token_ids[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert _first(other, TEXTS[0], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)) == plain
        later = SamplingParams(max_tokens=20, temperature=0, min_tokens=12)
        assert end not in _first(other, TEXTS[0], later).token_ids[:12]


def test_stop_strings(llm):
    """The text ends before or after the string; the string is the stop_reason."""
    text = _first(llm, TEXTS[0], GREEDY).text
    stop = text[5:8]
    at = text.find(stop)
    for is_included in (False, True):
        way = SamplingParams(max_tokens=20, temperature=0, stop=stop, include_stop_str_in_output=is_included)
        completion = _first(llm, TEXTS[0], way)
        assert completion.text == text[: at + 3 if is_included else at]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_an_incomplete_character_at_the_end_is_shown(llm, monkeypatch):
    """Its bytes come at the end, as U+FFFD."""
    first = llm.get_tokenizer().encode("🚀").ids[0]  # one byte of four
    monkeypatch.setattr(core_module.Batch, "sample", lambda self, logits, rows, _: [first] * len(rows))
    completion = _first(llm, "a", SamplingParams(max_tokens=1))
    assert (completion.text, completion.finish_reason) == ("\ufffd", "length")


def test_without_detokenizing(llm):
    """The tokens are the same."""
    plain, bare = (
        _first(llm, TEXTS[0], SamplingParams(max_tokens=9, temperature=0, detokenize=wanted))
        for wanted in (True, False)
    )
    assert bare.token_ids == plain.token_ids and bare.text == "" != plain.text


def test_logprobs_of_texts(llm):
    """For every token and the most likely ones; their sum; none without a request; greedy tokens have rank 1."""
    plain = _first(llm, TEXTS[0], GREEDY)
    assert plain.logprobs is None and plain.cumulative_logprob is None
    completion = _first(llm, TEXTS[0], SamplingParams(max_tokens=20, temperature=0, logprobs=3))
    assert completion.token_ids == plain.token_ids and len(completion.logprobs) == len(completion.token_ids)
    total = 0.0
    for token, figures in zip(completion.token_ids, completion.logprobs):
        assert len(figures) == 3 and figures[token].rank == 1
        assert figures[token].decoded_token == llm.get_tokenizer().decode([token])
        total += figures[token].logprob
    assert completion.cumulative_logprob == total < 0
    (output_of_ids,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=0))
    sums = [sum(np.exp(f.logprob) for f in output_of_ids.outputs[0].logprobs[0].values())]
    assert sums == pytest.approx([1.0]) and len(output_of_ids.prompt_logprobs) == 3
    assert [list(figures) for figures in output_of_ids.prompt_logprobs[1:]] == [[6], [7]]


def test_generation_config_has_the_defaults(llm, tmp_path):
    """generation_config.json's settings apply to requests without their own."""
    directory = save_model(tmp_path / "set")
    file = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "max_new_tokens": 4, "repetition_penalty": 1.5}
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, **file}))
    with LLM(directory, dtype="f32") as own:
        expected = SamplingParams(temperature=0.5, top_k=7, top_p=0.8, max_tokens=4, repetition_penalty=1.5)
        assert own.get_default_sampling_params() == expected
        assert len(own.generate("a")[0].outputs[0].token_ids) <= 4
    assert llm.get_default_sampling_params() == SamplingParams()
