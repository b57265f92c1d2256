"""Unusual published directories: a token beyond the vocabulary, unknown fields; in every caller."""

import json

import pytest
from rich.console import Console

from native.serve.serving_models import TEXTS, save_model
from native.server.served import Served
from tilewise import LLM, SamplingParams, StructuredOutputsParams
from tilewise.cli.main import _run
from tilewise.core import ConfigError
from tilewise.train import check_config, prepare_data

EXTRA = "<image_soft_token>"
GENERATION = {"style": "baroque", "num_beams": 4, "no_repeat_ngram_size": 3}
REFUSAL = f"which is {EXTRA!r}; the model has no weights for it"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model whose tokenizer has an added token at vocab_size, with a harmless field, one that
    must be ignored by name, and an unknown generation setting; and the token's id.
    """
    directory = save_model(tmp_path_factory.mktemp("published") / "model")
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    extra = config["vocab_size"]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": extra, "content": EXTRA})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config |= {"eos_token_id": [0, extra], "note_version": "1", "num_notes": 3}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION | {"eos_token_id": [0, extra]}))
    return directory, extra


def test_llm_rejects_the_token_in_prompts_and_settings(published):
    """In any form; it is never generated; structured outputs and embeddings work."""
    directory, extra = published
    with pytest.raises(ConfigError, match=r"num_notes.*--ignore-config-field num_notes"):
        LLM(directory)
    ways = {"max_tokens": 24, "temperature": 5.0, "n": 4, "ignore_eos": True, "logprobs": 2}
    with LLM(directory, dtype="f32", ignore_config_fields=["num_notes"]) as llm:
        for prompt in (f"a {EXTRA}", [1, extra], {"prompt_token_ids": [extra]}):
            with pytest.raises(ConfigError, match=REFUSAL):
                llm.generate(prompt)
        with pytest.raises(ConfigError, match=REFUSAL):
            llm.chat([{"role": "user", "content": EXTRA}])
        for name, value in (
            ("logit_bias", {extra: 5.0}),
            ("allowed_token_ids", [1, extra]),
            ("stop_token_ids", [extra]),
        ):
            with pytest.raises(ConfigError, match=f"of {name} must lie below .*; got {extra}, {REFUSAL}"):
                llm.generate("x", SamplingParams(**{name: value}))
        (output,) = llm.generate(
            TEXTS[:1], SamplingParams(**ways, bad_words=[EXTRA], bad_words_ids=[[1, extra]])
        )
        assert all(max(text.token_ids) < extra for text in output.outputs)
        for structure in (
            {"regex": "[a-z ]{8}"},
            {"choice": [EXTRA, "other"]},
            {"json": {"type": "integer"}},
        ):
            (output,) = llm.generate(
                "x", SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(**structure))
            )
            assert max(output.outputs[0].token_ids) < extra
    with LLM(directory, dtype="f32", runner="pooling", ignore_config_fields=["num_notes"]) as llm:
        assert len(llm.encode("x")) == 1
        with pytest.raises(ConfigError, match=REFUSAL):
            llm.encode(f"a {EXTRA}")


def test_every_command_ignores_named_fields(published, tmp_path, capsys):
    """Every command that opens a model, and none without the option."""
    directory, _ = published
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("def f(x):\n    return x\n")
    (tmp_path / "asked.jsonl").write_text("")
    (tmp_path / "w.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    for words in (
        ["generate", directory, "a", "--max-tokens", 2],
        ["inspect", directory],
        ["inspect", directory, "--graph", tmp_path / "graph.html"],
        ["evaluate", directory, tmp_path / "texts"],
        ["run-batch", directory, tmp_path / "asked.jsonl", "-o", tmp_path / "out.jsonl"],
        ["bench", "latency", directory, "--num-iters", 1, "--num-iters-warmup", 0, "--output-len", 2],
        ["bench", "throughput", directory, "--num-prompts", 1, "--output-len", 2],
        ["checkpoint", "convert", tmp_path / "w.safetensors", tmp_path / "new", "--model", directory],
    ):
        command = [str(word) for word in words]
        assert _run(command) == 2 and "num_notes must be a field" in capsys.readouterr().err, command
        assert _run([*command, "--ignore-config-field", "num_notes"]) == 0, capsys.readouterr().err
    (tmp_path / "texts" / "a.txt").write_text(f"def f(x): {EXTRA}")
    for words in (
        ["evaluate", str(directory), str(tmp_path / "texts")],
        ["generate", str(directory), f"a {EXTRA}"],
        ["generate", str(directory), EXTRA, "--chat"],
    ):
        assert _run([*words, "--ignore-config-field", "num_notes"]) == 2
        assert REFUSAL in capsys.readouterr().err
    model = {"path": str(directory), "ignore_config_fields": ["num_notes"]}
    data = {"path": str(tmp_path / "texts"), "context": 8, "held_out_percent": 0}
    with pytest.raises(ConfigError, match=f"of the training data .*{REFUSAL}"):
        prepare_data(check_config({"model": model, "data": data}, "a test"), Console(quiet=True))


def test_the_server_answers_400_and_logs_each_file_once(published):
    """Prompts as text, ids, conversations. Each file has one log line for its unknown fields, one
    for end tokens beyond the vocabulary, and one per generation setting that the server does not
    apply.
    """
    directory, extra = published
    server = Served(directory, "--ignore-config-field", "num_notes").wait_ready()
    try:
        talk = [{"role": "user", "content": EXTRA}]
        for path, body in (
            ("/v1/completions", {"prompt": f"a {EXTRA}"}),
            ("/v1/completions", {"prompt": [[1], [extra]]}),
            ("/v1/chat/completions", {"messages": talk}),
            ("/v1/responses", {"input": EXTRA}),
        ):
            status, answer = server.ask(path, {"model": str(directory), "max_tokens": 2, **body})
            assert status == 400 and REFUSAL in answer["error"]["message"], answer
        body = {"prompt": "a", "logit_bias": {str(extra): 1.0}}
        status, answer = server.ask("/v1/completions", body)
        assert status == 400 and REFUSAL in answer["error"]["message"], answer
        assert server.ask("/tokenize", {"prompt": EXTRA})[1]["tokens"] == [extra]
        assert server.ask("/detokenize", {"tokens": [extra]})[1]["prompt"] == EXTRA
    finally:
        server.close()
    for words in (
        "note_version = '1'",
        "unknown fields are ignored: style",
        f"eos_token_id at or beyond vocab_size {extra} is ignored: {extra}",
        f"token ids at or beyond the model's vocab_size {extra} are ignored: {extra}",
        "num_beams is not supported",
        "no_repeat_ngram_size of generation_config.json is ignored",
    ):
        assert len([line for line in server.log if words in line]) == 1, server.log
