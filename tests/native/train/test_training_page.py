"""The configurations, Python and commands of docs/training.md run, with small sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from tilewise import LLM, models
from tilewise.checkpoint import save_pretrained
from tilewise.cli.main import _run
from tilewise.data import IGNORED, train_tokenizer
from tilewise.train import load_config

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = ["model.vocab_size=300", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1",
         "data.context=32", "train.batch=8", "optimizer.warmup_steps=1"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _write_inputs():
    """A reader's inputs: articles, conversations and a chat model."""
    texts = [f"Article {i}: one and {i} make {i + 1}, as anyone can count." for i in range(60)]
    Path("texts").mkdir()
    for i, text in enumerate(texts):
        Path(f"texts/{i}.txt").write_text(text)
    Path("articles.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [
        [
            ("system", "Count."),
            ("user", f"After {i}?"),
            ("assistant", f"{i + 1}."),
            ("user", "?"),
            ("assistant", "!"),
        ]
        for i in range(5)
    ]
    pairs = [{"prompt": f"After {i}", "chosen": " comes one", "rejected": " anyone"} for i in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) for chat in chats]
    Path("chat.jsonl").write_text("\n".join(lines) + "\n")
    special = ("[end]", "[system]", "[user]", "[assistant]")
    tokenizer = train_tokenizer(texts, 300, special_tokens=special)
    config = models.config_from_dict(
        {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": True, "eos_token_id": 0}
    )  # fmt: skip
    rng, shapes = np.random.default_rng(0), models.parameter_shapes(config)
    weights = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes}
    for name in ("base-model", "chat-model"):
        save_pretrained(name, config.to_dict(), models.stored_tensors(config, weights), tokenizer)
    Path("chat-model/chat_template.jinja").write_text(TEMPLATE)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """Every configuration trains, the loop learns only the answers, and every command succeeds."""
    monkeypatch.chdir(tmp_path)
    _write_inputs()
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    tables = [code for kind, code in blocks if kind == "toml"]
    others = []
    for code in (code for code in tables if "[output]" in code):
        (name,) = re.findall(r'^directory = "runs/(.*)"', code, re.MULTILINE)
        others += [] if name == "small" else [name]
        optimizer = next(t for t in tables if t.startswith("[optimizer]"))
        Path("train.toml" if name == "small" else f"{name}.toml").write_text(
            code + optimizer * (name == "small")
        )
    for code in (code for code in tables if code.startswith("[optimizer]")):
        Path("part.toml").write_text(code)
        load_config("part.toml")
    names: dict[str, object] = {"__name__": PAGE.name}
    for number, (kind, code) in enumerate(blocks):
        if kind == "python":
            exec(compile(code, f"docs/training.md, block {number}", "exec"), names)
    batches = names["data"].batches
    row = next(row for row in map(batches.row, range(9)) if (row[1] == 3).sum() > 1)  # two answers
    text = names["data"].tokenizer.decode(row[2][row[2] != IGNORED], skip_special_tokens=False)
    assert re.fullmatch(r"\d\.\[end\]!\[end\]", text)
    assert names["losses"][-1] < names["losses"][0]
    with LLM("tuned-model") as model:
        assert model.chat([{"role": "user", "content": "?"}])[0].prompt_token_ids
    sources = next(table for table in tables if table.startswith("[[data]]"))
    Path("sources.toml").write_text('[model]\npath = "chat-model"\n' + sources)
    assert _run(["data", "preview", "sources.toml"]) == 0
    changes = ("train.steps=2", "output.report_to=none")
    for name in others:
        words = [word for change in changes for word in ("--set", change)]
        assert _run(["train", f"{name}.toml", *words]) == 0, capsys.readouterr().err
    assert _run(["checkpoint", "merge", "base-model", "runs/adapted/adapter", "merged"]) == 0
    small = [word for setting in SMALL for word in ("--set", setting)]
    for kind, code in blocks:
        for command in code.splitlines() if not kind else ():
            words = command.partition("#")[0].replace('"', "").split()[1:]
            if words[0] == "train":
                steps = "train.steps=2" if "--resume" not in words else "train.steps=3"
                words = [word.replace("train.steps=4000", "train.steps=3") for word in words]
                words += [
                    *small,
                    "--set",
                    steps,
                    "--set",
                    "train.evaluate_every=1",
                    "--set",
                    "data.held_out_percent=20",
                ]
            assert _run(words) == 0, (command, capsys.readouterr().err)
    out = capsys.readouterr()
    assert "changed settings: train.steps = 3 instead of 2" in out.err
    assert '"held_out_loss"' in Path("runs/small/metrics.jsonl").read_text()
