"""Every family over every strategy equals one device to the bit, in training and in decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_families import FAMILIES, batches, small
from small_llama import change_first, drop_partial

import tilewise as tw
from tilewise import models
from tilewise.core import ShapeError
from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy

BATCH, SEQ = 8, 24
WRITERS = [family for family in FAMILIES if family != "bert"]
every_family = pytest.mark.parametrize("family", FAMILIES)


def training_graph(family: str, dtype: str) -> tw.ComputeGraph:
    graph = tw.ComputeGraph(family)
    models.build_training_graph(graph, small(family), BATCH, SEQ, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


def assert_equal(family: str, dtype: str, axes: dict[str, int], accumulation: int, steps: int) -> None:
    steps_data = batches(small(family), steps, BATCH, SEQ)
    graph = training_graph(family, dtype)
    report = verify_strategy(graph, DeviceMesh(axes), steps_data, accumulation=accumulation)
    assert report.equal, report.text


@every_family
def test_training_equals_one_device(family):
    """Over data and tensor parallelism together."""
    assert_equal(family, "bf16", {"dp": 2, "tp": 2}, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@every_family
def test_training_equals_one_device_over_all_strategies(family, axes, dtype):
    """Two and four devices; four are more than there are KV heads."""
    assert_equal(family, dtype, axes, 1, 3)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "olmo2"])
def test_planted_fault_is_detected(family):
    """A dropped partial of a norm's gain or of a projection is detected in every kind of layer, and
    so are another device's heads in front of a norm over all heads.
    """
    place = {"qwen3": "head_sum/reduce_scatter", "gpt2": "mlp.down_proj.weight/reduce_scatter"}
    place["olmo2"] = "all_gather:rms_norm:self_attn.q_norm.weight/all_gather"
    change = change_first(place.get(family, "self_attn.o_proj.weight/reduce_scatter"), drop_partial, -1)
    steps_data = batches(small(family), 1, BATCH, SEQ)
    report = verify_strategy(training_graph(family, "f32"), DeviceMesh({"tp": 2}), steps_data, change=change)
    assert not report.equal


def logits(family: str, dtype: str, tp: int, parts: list[int], kv_cache_dtype: str = "auto") -> np.ndarray:
    """Of a text's last token, which is read in chunks: a model of random weights."""
    config, count = small(family), sum(parts)
    if kv_cache_dtype == "int8":
        with pytest.raises(ShapeError, match="a head size that is a multiple of 4"):
            models.build_decoding_graph(tw.ComputeGraph(family), config, 1, 1, 1, kv_cache_dtype="int8")
        config = replace(config, head_dim=8)
    graph = tw.ComputeGraph(family)
    cache = {"context": count, "kv_cache_dtype": kv_cache_dtype}
    models.build_decoding_graph(graph, config, max(parts), 1, 1, dtype, **cache)
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, count).astype(np.int32)
    with graph.instantiate(graph.plan({"tp": tp})) as model:
        model.initialize(3, 0.1)
        first = 0
        for part in parts:
            places = np.arange(first, first + part, dtype=np.int32)
            model.forward(
                tokens=tokens[places],
                positions=places,
                slots=places,
                sequence=np.zeros(part, np.int32),
                block_table=np.zeros((1, 1), np.int32),
                rows=np.array([part - 1], np.int32),
            )
            first += part
        return np.array(model.get_tensor("logits"))


@pytest.mark.parametrize(
    "family,dtype,cache",
    [
        *((family, "bf16", "auto") for family in WRITERS),
        *(("llama", "f32", "auto"), ("gemma2", "f32", "auto")),
        *(("llama", "bf16", "int8"), ("gemma2", "f32", "int8")),
    ],
)
def test_logits_do_not_depend_on_devices_or_k_splits(family, dtype, cache):
    """One, two and four devices; read whole, in chunks, and token by token."""
    expected = logits(family, dtype, 1, [20], cache)
    for tp, parts in ((2, [17, 1, 1, 1]), (4, [7, 7, 6])):
        logits_in_parts = logits(family, dtype, tp, parts, cache)
        assert np.array_equal(expected.view(np.uint8), logits_in_parts.view(np.uint8)), (tp, parts)


def test_logits_of_a_shorter_text_differ():
    """The twin."""
    whole = logits("llama", "bf16", 1, [20])
    assert not np.array_equal(whole, logits("llama", "bf16", 1, [19]))
