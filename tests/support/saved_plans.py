"""Plans in separate processes: `python saved_plans.py make|load FOLDER` prints their results,
as JSON.

`make` plans, saves and runs; `load` plans only for the digest, and runs the plans of the folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks.small_llama import batches, config, training_graph
from tilewise import ComputeGraph, DistributionStrategy, GraphInstance, Plan, models

MODEL = config(num_hidden_layers=2)
NAMES = ("training", "training_dp2tp2", "generation", "generation_tp2")


def make(name: str) -> Plan:
    if name.startswith("training"):
        mesh = {"dp": 2, "tp": 2} if name.endswith("dp2tp2") else {}
        return training_graph(MODEL, "f32").plan(
            mesh, accumulation=2 if mesh else 1, batch_splits=8, workers_per_device=1
        )
    graph = ComputeGraph("decoding")
    models.build_decoding_graph(graph, MODEL, 16, 2, 2, "f32")
    if name.endswith("tp2"):
        graph.set_distribution(DistributionStrategy.tensor_parallel(2))
    return graph.plan(workers_per_device=1)


def run(name: str, plan: Plan) -> str:
    """Digest of all results of a run: losses and states of three steps, or logits of a prompt and of new tokens."""
    digest = hashlib.sha256()
    with GraphInstance(plan) as model:
        model.initialize(seed=3)
        if name.startswith("training"):
            for batch in batches(MODEL, 3):
                result = model.step(batch, 1e-2)
                digest.update(np.array([result.loss, result.grad_norm]).tobytes())
            for value in model.state_dict().values():
                digest.update(value.tobytes())
            return digest.hexdigest()
        tokens = list(range(5, 12))
        for first, last in ((0, 5), (5, 6), (6, 7)):
            span = np.arange(first, last, dtype=np.int32)
            inputs = {"tokens": np.array(tokens[first:last], np.int32), "positions": span, "slots": span}
            inputs |= {"sequence": np.zeros_like(span), "rows": np.array([last - first - 1], np.int32)}
            model.forward(block_table=np.array([[0, 1]], np.int32), **inputs)
            digest.update(model.get_tensor("logits").tobytes())
    return digest.hexdigest()


def main() -> None:
    task, folder = sys.argv[1], Path(sys.argv[2])
    results = {}
    for name in NAMES:
        path = folder / f"{name}.plan"
        plan = make(name)
        digest = plan.digest()
        if task == "make":
            plan.save(path)
        else:
            plan = Plan.load(path)
            assert plan.digest() == digest
        results[name] = [digest, run(name, plan)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
