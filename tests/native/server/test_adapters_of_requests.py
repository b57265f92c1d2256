"""Adapters over HTTP: requests name them as their model."""

import json

import numpy as np
import pytest

from native.server.served import TALK, Served, small_model
from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig, save_adapter
from tilewise.cli.main import _run

PROMPT = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter with values that change every text."""
    path, config = tmp_path_factory.mktemp("adapter") / "pirate", models.open(small_model())
    layout, rng = (
        models.lora_layout(config, LoraConfig(r=4, target_modules="all-linear")),
        np.random.default_rng(0),
    )
    values = {n: rng.normal(0, 0.2, shape).astype(np.float32) for n, shape in layout.shapes.items()}
    save_adapter(path, layout.files(str(small_model())), layout.stored(values))
    return path


@pytest.mark.slow
def test_requests_name_an_adapter_as_their_model(adapter):
    """It is listed, answers every kind of request for text, and other names are those of the model or errors."""
    server = Served(small_model(), "--served-model-name", "small", "--lora", f"pirate={adapter}")
    try:
        server.wait_ready()
        listed = {one["id"]: one["parent"] for one in server.get("/v1/models")[1]["data"]}
        assert listed == {"small": None, "pirate": "small"}
        assert server.get("/v1/models/pirate")[1]["id"] == "pirate"
        texts = {}
        for name in ("small", "pirate"):
            status, body = server.ask("/v1/completions", {**PROMPT, "model": name})
            assert status == 200 and body["model"] == name
            texts[name] = body["choices"][0]["text"]
            chunks = server.chunks("/v1/completions", {**PROMPT, "model": name})
            parts = [json.loads(one)["choices"][0]["text"] for one in chunks if one != "[DONE]"]
            assert "".join(parts) == texts[name]
        assert texts["small"] != texts["pirate"]
        chat = {"messages": TALK, "max_tokens": 8, "temperature": 0}
        chats = [server.ask("/v1/chat/completions", {**chat, "model": name})[1] for name in texts]
        assert len({one["choices"][0]["message"]["content"] for one in chats}) == 2
        responses = [server.ask("/v1/responses", {"input": "hello", "max_output_tokens": 8, "temperature": 0,
                                                  "model": name})[1] for name in texts]  # fmt: skip
        assert [one["model"] for one in responses] == ["small", "pirate"]
        status, body = server.ask("/v1/completions", {**PROMPT, "model": "poet"})
        assert status == 404 and "small, pirate" in body["error"]["message"]
    finally:
        server.close()


@pytest.mark.slow
def test_commands_take_an_adapter(adapter, tmp_path, capsys):
    """`generate` and `evaluate` with `--lora` give the results of the merged model."""
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 8)
    base, named = str(small_model()), ["--lora", f"pirate={adapter}", "--dtype", "f32"]
    assert _run(["checkpoint", "merge", base, str(adapter), str(tmp_path / "merged")]) == 0
    way = ["--max-tokens", "8", "--temperature", "0"]
    outputs = []
    for model, more in (
        (base, named),
        (str(tmp_path / "merged"), ["--dtype", "f32"]),
        (base, ["--dtype", "f32"]),
    ):
        capsys.readouterr()
        assert _run(["generate", model, "def f(x):", *way, *more]) == 0
        text = capsys.readouterr().out
        assert _run(["evaluate", model, str(tmp_path / "text.txt"), *more]) == 0
        outputs.append((text, float(capsys.readouterr().out.split()[1].rstrip(","))))
    (text, perplexity), (merged_text, merged), (_, plain) = outputs
    assert text == merged_text and perplexity == pytest.approx(merged, rel=1e-5) != pytest.approx(
        plain, rel=1e-2
    )
    assert _run(["evaluate", base, str(tmp_path / "text.txt"), *named, "--lora", f"b={adapter}"]) != 0
    assert _run(["generate", base, "x", *named, "--lora", f"b={adapter}"]) != 0
