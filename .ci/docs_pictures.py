"""The pictures of the documentation, drawn when it is built: a graph, a loss curve, a report, the edges of a run.

Runs small programs with the installed package, for some seconds. Refuses nothing: a program that fails ends the build.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import tilewise as tw
from tilewise import models
from tilewise.models import llama
from tilewise.observe import check_graph, write_graph_svg
from tilewise.runtime import InOut, Input, Runtime
from tilewise.train import draw_loss_curve

PAGE = """# Pictures

All of them are drawn while this site is built, by `.ci/docs_pictures.py`.

## A graph

`ComputeGraph.to_mermaid()`: two linear layers and their loss, before gradients and plans. The browser draws it with
Mermaid, which it fetches; without a network the text stands here.

```mermaid
{mermaid}
```

## A loss curve

What `tilewise train` leaves as `loss.png`: {steps} steps of a small Llama that learns to count.

![Loss per step and its running mean](pictures/loss.png)

## A report of a run

What `Runtime.trace("run.html")` writes: one page without scripts from elsewhere, also [by itself](pictures/trace.html).

<iframe src="pictures/trace.html" title="Report of a traced run"
        style="width: 100%; height: 40rem; border: 1px solid"></iframe>

## A dependency graph

What `write_graph_svg` draws of the same run: each task below all that it waits for.

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
    """The page and its pictures: path in the site, content."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_loss_curve(folder / "loss.png", counting_losses(), f"loss over {STEPS} steps")
        draw_tasks(folder)
        pictures = {f"pictures/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
    return {"pictures.md": PAGE.format(mermaid=small_graph().to_mermaid(), steps=STEPS), **pictures}


def small_graph() -> tw.ComputeGraph:
    """Few enough ops to be read."""
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
    write_graph_svg(folder / "graph.svg", log.graph, check_graph(log.graph))
