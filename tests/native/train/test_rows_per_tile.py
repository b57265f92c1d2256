"""The number of rows per tile affects only tasks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import models
from tilewise.core import PlanError
from tilewise.models import llama
from tilewise.session import Plan

BATCH, SEQ, BATCH_SPLITS = 16, 16, 2
CONFIG = llama.LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_graph(dtype="f32"):
    """A training step."""
    graph = tw.ComputeGraph("tiles")
    models.build_training_graph(graph, CONFIG, BATCH, SEQ, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


def train(dtype, mesh, rows, fault=False):
    """Parameters after two steps."""
    graph = make_graph(dtype)
    with graph.instantiate(graph.plan(mesh, batch_splits=BATCH_SPLITS, rows_per_tile=rows)) as model:
        model.initialize(seed=1)
        ids = np.random.default_rng(2).integers(0, 128, (BATCH, SEQ + 1), dtype=np.int32)
        if fault:
            ids[-1, 0] ^= 1
        for _ in range(2):
            model.step({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, lr=1e-2)
        return b"".join(np.ascontiguousarray(p).tobytes() for p in model.parameters().values())


@pytest.fixture(scope="module")
def expected():
    """Parameters with the default tiles on one device, by dtype."""
    return {dtype: train(dtype, {}, None) for dtype in ("f32", "bf16")}


@settings(max_examples=8)
@given(st.sampled_from(["f32", "bf16"]), st.sampled_from([{}, {"dp": 2}, {"tp": 2}]), st.integers(1, 400))
def test_tiles_change_no_bit(expected, dtype, mesh, rows):
    """On one device and on two."""
    assert train(dtype, mesh, rows) == expected[dtype]


def test_another_token_changes_the_result(expected):
    """The twin: another token in the last row, on two devices."""
    assert train("f32", {"dp": 2}, 40, fault=True) != expected["f32"]


@pytest.mark.parametrize(
    ("rows", "tile"), [(None, 128), (1, 16), (31, 16), (40, 32), (127, 64), (10**6, 128)]
)
def test_a_tile_has_whole_sequences_of_a_batch_split(rows, tile):
    """As many as fit into the rows and divide the batch split; at least one."""
    plan = make_graph().plan(batch_splits=BATCH_SPLITS, rows_per_tile=rows)
    assert plan.settings.row_tile == tile


def test_plans_store_rows_per_tile(tmp_path):
    """A loaded plan equals the saved one."""
    graph = make_graph()
    plan = graph.plan(batch_splits=BATCH_SPLITS, rows_per_tile=32)
    assert plan.digest() != graph.plan(batch_splits=BATCH_SPLITS).digest()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").digest() == plan.digest()


@pytest.mark.parametrize("rows", [0, 1.5, True, 1 << 25])
def test_invalid_rows_are_rejected(rows):
    """Before anything is planned."""
    with pytest.raises(PlanError, match="rows_per_tile"):
        make_graph().plan(rows_per_tile=rows)


def test_graphs_without_a_batch_have_no_rows_per_tile():
    """The setting would have no effect."""
    graph = tw.ComputeGraph("no batch")
    graph.output(graph.silu(graph.input([4, 4], "f32", name="x")), "y")
    with pytest.raises(PlanError, match="without a batch"):
        graph.plan(rows_per_tile=4)
