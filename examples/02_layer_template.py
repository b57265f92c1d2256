"""A layer template: written once, traced once, sharded once, used many times.

`@tw.layer` marks a function of the graph. Its first call is traced; every later call with the same shapes only records
which parameters it uses, named below the path of the call. The same stack runs on one device and on two that share
every layer's inner dim (`mlp`, tensor parallelism): the results are equal to the bit, and the exit code says so.
"""

import sys

import numpy as np

import tilewise as tw
from tilewise.ir.counts import counts
from tilewise.nn import linear, rms_norm

ROWS, WIDTH, INNER, DEPTH = 16, 64, 192, 6
MLP = tw.DimLabel("mlp")


@tw.layer
def block(graph, x, *, inner):
    """x + W2 silu(W1 norm(x)): W1 gives, W2 contracts the dim that may be sharded."""
    hidden = linear(graph, rms_norm(graph, x, "norm.weight", eps=1e-5), "up.weight", inner, out_label=MLP)
    return graph.add(x, linear(graph, graph.silu(hidden), "down.weight", WIDTH, in_label=MLP))


def describe() -> tw.ComputeGraph:
    """All blocks, one after the other."""
    graph = tw.ComputeGraph("stack")
    x = graph.input([ROWS, WIDTH], "f32", name="x")
    for i in range(DEPTH):
        x = block(graph, x, path=f"layers.{i}", inner=INNER)
    graph.output(x, "y")
    return graph


def run(axes: dict[str, int], x: np.ndarray) -> np.ndarray:
    """The stack's result on a mesh, with weights that depend on their names alone."""
    counts.reset()
    graph = describe()
    with graph.instantiate(graph.plan(axes)) as model:
        model.initialize(seed=0)
        model.reset_transfers()
        model.forward(x=x)
        moved = sum(sum(v) for v in model.transfers().values())
        print(f"{axes or 'one device'}: {DEPTH} layers, {counts.traced} traced; {moved} elements moved")
        return model.get_tensor("y")


def main() -> int:
    """Run on one device and on two, compare bits."""
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    same = run({}, x).tobytes() == run({"tp": 2}, x).tobytes()
    print("one device and two devices, equal to the bit:", same)
    return 0 if same and counts.traced == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
