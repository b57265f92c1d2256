"""The reader of graph files: an accepted graph can be written, read again, planned and run.

Part of the table in readers.py.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

import numpy as np

import tilewise as tw
from fuzz.mutate import mutate, mutate_json
from tilewise.core.dims import upper_bound
from tilewise.graph.file import Definition, decode_definition, encode_definition
from tilewise.nn import linear
from tilewise.observe import render_graph

MOST_BYTES = 1 << 24  # of a run


def mutate_graph(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Like `mutate_json`; usually with a correct digest, so that later checks are reached."""
    changed = (mutate if rng.random() < 0.1 else mutate_json)(rng, data, others)
    if rng.random() < 0.9:
        with suppress(Exception):
            digest = decode_definition(changed)[0].digest()
            changed = json.dumps({**json.loads(changed), "digest": digest}).encode()
    return changed


def read_graph_file(folder: Path, data: bytes) -> None:
    """An accepted graph is equal after a round trip and can be drawn and planned; it also runs if it is small."""
    file = folder / "graph.json"
    file.write_bytes(data)
    graph = tw.ComputeGraph.load(file)
    graph.save(file)
    assert tw.ComputeGraph.load(file).digest() == graph.digest()
    str(graph), graph.to_mermaid(), render_graph(graph.freeze(), graph.name)
    if graph.draft.loss_id is not None:
        graph.optimize(tw.optim.SGD())
    plan = graph.plan(workers_per_device=1)
    plan.explain()
    if plan.total_bytes > MOST_BYTES:
        return
    with graph.instantiate(plan, memory_limit_bytes=MOST_BYTES) as model:
        inputs = [
            t for t in plan.graph.of_kind("input") if not t.spec.name.startswith(("loss.", "optimizer."))
        ]
        arrays = {t.spec.name: np.zeros([upper_bound(s) for s in t.shape], np.int32) for t in inputs}
        model.step(arrays, 0.1) if "step" in plan.programs else model.forward(**arrays)


@tw.layer
def _block(graph: tw.ComputeGraph, x: tw.TensorNode, *, factor: float) -> tw.TensorNode:
    table = graph.constant(np.ones((4, 4), np.float32), name="table")
    return graph.scale(graph.add(linear(graph, x, "w", 4), table), factor)


def graphs() -> list[bytes]:
    """Graphs with layers and a loss; with a cache, a symbolic size and hints."""
    trains = tw.ComputeGraph("trains")
    x = trains.input([4, 4], name="x", labels=[tw.BATCH, None], layout=("dp",))
    for i in range(2):
        x = _block(trains, x, path=f"layers.{i}", factor=2.0)
    trains.loss(trains.mean(trains.silu(x)))
    trains.freeze_parameters("layers.0.*")
    decodes = tw.ComputeGraph("decodes")
    rows = tw.Dim("rows", 1, 8)
    ids = decodes.input([rows], "i32", name="ids", storage="scalars")
    slots = decodes.input([rows], "i32", name="slots", storage="scalars")
    table = decodes.parameter([8, 64], name="table", init_scale=0.5)
    cache = decodes.state([64, 64], name="cache")
    y = decodes.embedding(ids, table)
    decodes.output(decodes.kv_write(cache, y, slots, head_dim=64), "written")
    decodes.output(
        decodes.constrain(decodes.rms_norm(y, decodes.parameter([64], name="g")), (None, "tp")), "y"
    )
    return [_file_of(trains), _file_of(decodes)]


def _file_of(graph: tw.ComputeGraph) -> bytes:
    return encode_definition(Definition(graph.freeze(), graph.draft.loss_id))
