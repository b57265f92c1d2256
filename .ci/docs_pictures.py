"""Draws the pictures of the documentation: a graph, a loss curve, a report and the edges of a run.

Runs small programs with the installed package, for some seconds. A program that fails ends the build.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import tilewise as tw
from tilewise import models
from tilewise.models import llama
from tilewise.observe import render_graph, write_graph_svg
from tilewise.runtime import InOut, Input, Runtime
from tilewise.train import draw_loss_curve

PAGE = """# Pictures

This page shows what Tilewise can draw. `.ci/docs_pictures.py` makes every picture while the site is built.

## A graph

Two linear layers and their loss, before gradients and plans.
`tilewise inspect model.json --graph graph.html` draws a saved graph like this.

<iframe src="pictures/model_graph.html" title="A small graph"
        style="width: 100%; height: 40rem; border: 1px solid"></iframe>

`ComputeGraph.to_mermaid()` returns the same graph as text for Mermaid:

```text
{mermaid}
```

## A loss curve

`tilewise train` writes `loss.png`. This one shows {steps} steps of a small Llama that learns to count.

![Loss per step and its running mean](pictures/loss.png)

## A report of a run

`Runtime.trace("run.html")` writes a page that loads nothing from the network. It also opens
[on its own](pictures/trace.html).

<iframe src="pictures/trace.html" title="Report of a traced run"
        style="width: 100%; height: 40rem; border: 1px solid"></iframe>

## A dependency graph

`write_graph_svg` draws the same run: each task stands below the tasks that it waits for.

![Tasks and their edges](pictures/graph.svg)
"""
STEPS = 60
CONFIG = llama.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)


def make_pictures() -> dict[str, str | bytes]:
    """Content of the page and of its pictures, by path in the site."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_loss_curve(folder / "loss.png", counting_losses(), f"loss over {STEPS} steps")
        draw_tasks(folder)
        graph = small_graph()
        drawing = render_graph(graph.freeze(), f"The graph of {graph.name}", "")
        (folder / "model_graph.html").write_text(drawing, encoding="utf-8")
        pictures = {f"pictures/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
    return {"pictures.md": PAGE.format(mermaid=graph.to_mermaid(), steps=STEPS), **pictures}


def small_graph() -> tw.ComputeGraph:
    """A graph with few enough ops to read."""
    graph = tw.ComputeGraph("classifier")
    x = graph.input([8, 20], name="x")
    labels = graph.input([8], "i32", name="labels", storage="scalars")
    hidden = graph.silu(tw.nn.linear(graph, x, "hidden", 32))
    loss, _ = graph.mean_cross_entropy(tw.nn.linear(graph, hidden, "head", 10), labels)
    graph.loss(loss)
    return graph


def counting_losses() -> list[float]:
    """Sequences that count up from a random start."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, CONFIG, 8, 32, dtype="f32")
    graph.optimize(tw.optim.AdamW())
    losses = []
    with graph.instantiate(graph.plan()) as model:
        model.initialize(seed=0)
        for step in range(STEPS):
            starts = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (8, 1))
            ids = ((starts + np.arange(33)) % CONFIG.vocab_size).astype(np.int32)
            losses.append(model.step({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, lr=3e-3).loss)
    return losses


def draw_tasks(folder: Path) -> None:
    """A wavefront over a grid of tiles: each adds what its upper and left neighbours have."""
    size = 5
    with Runtime(num_workers=2) as rt:
        add = rt.kernel("sum_f32")
        grid = [[rt.register(np.ones(1 << 16, np.float32)) for _ in range(size)] for _ in range(size)]
        with rt.trace(folder / "trace.html"), rt.graph(folder / "graph.json") as log:
            for i in range(size):
                for j in range(size):
                    for near in ([grid[i - 1][j]] if i else []) + ([grid[i][j - 1]] if j else []):
                        rt.submit(add, [InOut(grid[i][j]), Input(near)], scalars=[4 << 16])
    (folder / "graph.json").unlink()
    write_graph_svg(folder / "graph.svg", log.graph)
