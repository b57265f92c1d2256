"""A graph by hand: describe, plan, look at the plan, run.

A two-layer network over a batch of vectors, spread over two devices that share the batch. Nothing is computed
while the graph is described; `explain` says what will lie where and what will move. The result is compared
with NumPy.
"""

import numpy as np

import tilewise as tw

BATCH, INNER, OUTER = 64, 32, 96


def describe() -> tw.ComputeGraph:
    """y = silu(x A^T) B^T, with the names that arrays go by later; weights are `[out, in]`."""
    graph = tw.ComputeGraph("two layers")
    x = graph.input([BATCH, INNER], dtype="f32", name="x", labels=[tw.DimLabel("batch"), None])
    a = graph.parameter([OUTER, INNER], name="a")
    b = graph.parameter([INNER, OUTER], name="b")
    hidden = graph.silu(graph.matmul(x, a, transpose_b=True))
    graph.output(graph.matmul(hidden, b, transpose_b=True), "y")
    return graph


def reference(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same in NumPy, in double precision."""
    hidden = x.astype(np.float64) @ a.T
    return (hidden / (1.0 + np.exp(-hidden))) @ b.T


def main() -> None:
    """Plan for two devices, run, compare."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, INNER), dtype=np.float32)
    weights = {
        "a": rng.standard_normal((OUTER, INNER), dtype=np.float32),
        "b": rng.standard_normal((INNER, OUTER), dtype=np.float32),
    }
    graph = describe()
    graph.set_distribution(tw.DistributionStrategy.ddp(2))
    plan = graph.plan()
    print(plan.explain())
    model = graph.instantiate(plan)
    model.load_parameters(weights)
    model.forward(x=x)
    y = model.get_tensor("y")
    model.close()
    wanted = reference(x, weights["a"], weights["b"])
    print(f"largest relative error: {np.abs(y - wanted).max() / np.abs(wanted).max():.1e}")


if __name__ == "__main__":
    main()
