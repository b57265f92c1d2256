"""`tilewise inspect --graph` and `--plan`: what they draw, and their errors before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tilewise as tw
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear

ROOT = Path(__file__).parents[3]
CONFIG = LlamaConfig(128, 32, 32, 36, 4, num_key_value_heads=2, max_position_embeddings=1 << 17)
BERT = {
    "model_type": "bert",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@pytest.fixture
def model(tmp_path):
    """A directory without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return tmp_path / "model"


def test_the_decoding_graph_of_a_model_is_drawn(model, run, tmp_path):
    """From its directory and from its config.json, without weights; in both formats."""
    page, chart = tmp_path / "a.html", tmp_path / "b.mmd"
    code, out, err = run("inspect", model, "--graph", page)
    assert (code, out, err) == (0, f"{page}\n", "")
    assert run("inspect", model / "config.json", "--graph", chart)[0] == 0
    for file, dots in ((page, "…"), (chart, "#8230;")):
        content = file.read_text(encoding="utf-8")
        assert f"layers.0 {dots} layers.34" in content and "layers.35" in content
        assert "attention_paged" in content
    assert "The graph of llama" in page.read_text(encoding="utf-8")
    assert sorted(os.listdir(tmp_path)) == ["a.html", "b.mmd", "model"]


def test_the_encoding_graph_of_an_encoder_is_drawn(model, run, tmp_path):
    """It has lengths instead of a cache."""
    (model / "config.json").write_text(json.dumps(BERT))
    assert run("inspect", model, "--graph", tmp_path / "a.mmd")[0] == 0
    chart = (tmp_path / "a.mmd").read_text(encoding="utf-8")
    assert "lengths: i32[16]" in chart and "encoder_layer" in chart and "kv_write" not in chart


def test_the_training_graph_of_a_configuration_is_drawn(run, tmp_path):
    """The example's graph with its loss, before gradients."""
    of_step = ("inspect", ROOT / "examples" / "train.toml", "--graph", tmp_path / "a.mmd")
    assert run(*of_step, "--set", "model.num_hidden_layers=0")[0] == 2
    assert run(*of_step)[0] == 0
    chart = (tmp_path / "a.mmd").read_text(encoding="utf-8")
    assert "cross_entropy" in chart and "decoder_layer" in chart and "gradient" not in chart


def test_a_plan_is_drawn(run, tmp_path):
    """For a training configuration, even if it does not fit this machine's memory; together with
    the graph if requested.
    """
    graph, page = tmp_path / "a.mmd", tmp_path / "b.html"
    code, out, err = run("inspect", ROOT / "examples" / "train.toml", "--graph", graph, "--plan", page)
    assert (code, out, err) == (0, f"{graph}\n{page}\n", "")
    assert "layers.5.backward, microbatch 0" in page.read_text(encoding="utf-8")
    huge = tmp_path / "huge.toml"
    sizes = {
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
    }
    huge.write_text("[model]\n" + "".join(f"{name} = {size}\n" for name, size in sizes.items()))
    assert run("inspect", huge, "--plan", page)[0] == 0
    assert "layers.125.backward, microbatch 0" in page.read_text(encoding="utf-8")


def test_a_saved_graph_is_drawn(run, tmp_path):
    """Its names are escaped."""
    graph = tw.ComputeGraph("<b>")
    graph.output(linear(graph, graph.input([4, 8], name="<i>"), "w", 8), "y")
    graph.save(tmp_path / "graph.json")
    assert run("inspect", tmp_path / "graph.json", "--graph", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "&lt;i&gt;" in page and "<i>" not in page and "<b>" not in page


@pytest.mark.parametrize(
    ("option", "source", "file", "code", "words"),
    [
        ("--graph", "model", "a.svg", 2, "must end in .html or .mmd"),
        ("--graph", "model", "none/a.html", 1, "must be written completely"),
        ("--graph", "model", "model/dir.html", 1, "not a regular file"),
        ("--graph", "nothing", "a.html", 2, "config.json"),
        ("--graph", "broken.toml", "a.html", 2, "broken.toml"),
        ("--graph", "graph.json", "a.html", 2, "a graph file must be one"),
        ("--plan", "model", "a.html", 2, "must be a file that ends in .toml"),
        ("--plan", "nothing.toml", "a.html", 2, "nothing.toml"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(option, source, file, code, words, model, run, tmp_path):
    """A wrong format, a wrong place, a missing or invalid source; a model has no plan."""
    (model / "dir.html").mkdir()
    (tmp_path / "broken.toml").write_text("[model]\nlayers = ")
    (tmp_path / "graph.json").write_text("{}")
    before = sorted(os.listdir(tmp_path))
    result = run("inspect", tmp_path / source, option, tmp_path / file)
    assert result[0] == code and result[1] == "" and words in result[2] and result[2].count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before
