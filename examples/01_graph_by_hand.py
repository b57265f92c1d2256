"""A graph by hand: describe, plan, look at the plan, run.

A two-layer network over a batch of vectors, spread over two devices that share the batch. Nothing
is computed while the graph is described: `explain` lists in advance the memory and transfers, `why`
explains one tensor. The result is compared with NumPy, and the exit code says whether they agree.
"""

import sys

import numpy as np

import tilewise as tw

BATCH, INNER, OUTER = 64, 32, 96


def describe() -> tw.ComputeGraph:
    """y = silu(x A^T) B^T, with the names of the arrays to pass; weights are `[out, in]`."""
    graph = tw.ComputeGraph("two layers")
    x = graph.input([BATCH, INNER], "f32", name="x", labels=[tw.BATCH, None])
    a = graph.parameter([OUTER, INNER], name="a")
    b = graph.parameter([INNER, OUTER], name="b")
    hidden = graph.silu(graph.matmul(x, a, trans_b=True))
    graph.output(graph.matmul(hidden, b, trans_b=True), "y")
    return graph


def reference(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same in NumPy, in double precision."""
    hidden = x.astype(np.float64) @ a.T
    return (hidden / (1.0 + np.exp(-hidden))) @ b.T


def main() -> int:
    """Plan for two devices, run, compare."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, INNER), dtype=np.float32)
    a = rng.standard_normal((OUTER, INNER), dtype=np.float32)
    b = rng.standard_normal((INNER, OUTER), dtype=np.float32)
    graph = describe()
    print(graph)
    plan = graph.plan({"dp": 2})
    print(plan.explain())
    print(plan.why("x"))
    with graph.instantiate(plan) as model:
        model.load_parameters({"a": a, "b": b})
        model.forward(x=x)
        y = model.get_tensor("y")
    wanted = reference(x, a, b)
    error = float(np.abs(y - wanted).max() / np.abs(wanted).max())
    print(f"largest difference from NumPy: {error:.1e} of the largest element")
    return 0 if error < 2e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
