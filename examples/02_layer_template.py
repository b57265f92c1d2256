"""A layer template: written once, traced once, used many times.

`@tw.layer` marks a function of the graph. Its first call is traced; every later call with the same shapes
only records which parameters it uses, so a graph with a thousand layers is described as quickly as its layers
can be named.
"""

import time

import numpy as np

import tilewise as tw

WIDTH, DEPTH = 64, 1000


@tw.layer
def block(graph, x):
    """x + silu(norm(x) W^T): a residual block. Parameters are named below the path of the call."""
    gain = graph.parameter([WIDTH], name="norm.weight")
    weight = graph.parameter([WIDTH, WIDTH], name="proj.weight")
    hidden = graph.matmul(graph.rms_norm(x, gain, eps=1e-5), weight, transpose_b=True)
    return graph.add(x, graph.silu(hidden))


def describe(depth: int) -> tw.ComputeGraph:
    """`depth` blocks, one after the other."""
    graph = tw.ComputeGraph("stack")
    x = graph.input([16, WIDTH], dtype="f32", name="x")
    for i in range(depth):
        x = block(graph, x, path=f"layers.{i}")
    graph.output(x, "y")
    return graph


def main() -> None:
    """Describe a thousand layers; run four."""
    started = time.perf_counter()
    describe(DEPTH)
    print(f"{DEPTH} layers described in {(time.perf_counter() - started) * 1e3:.0f} ms")
    graph = describe(4)
    model = graph.instantiate(graph.plan())
    model.initialize(seed=0)
    model.forward(x=np.ones((16, WIDTH), np.float32))
    print("parameters:", ", ".join(model.parameter_names()[:4]), "...")
    print("y[0, :4] =", model.get_tensor("y")[0, :4])
    model.close()


if __name__ == "__main__":
    main()
