"""Records of exchanges: those of real plans pass their checks, and every changed record is found."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from pure.plans import plan_graph, with_update
from tilewise.core.dims import BATCH, DimLabel
from tilewise.core.errors import InternalError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder
from tilewise.ir.program import COPIES
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear
from tilewise.plan.collectives.arrays import FlatArray, array_program
from tilewise.plan.collectives.checks import CHECKS, check_collective

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
)
MESHES = (
    ({"dp": 2, "tp": 4}, 1, 8),
    ({"dp": 2}, 3, 6),  # devices share each microbatch
    ({"fsdp": 2, "tp": 2}, 1, 8),
    ({"dp": 2, "fsdp": 2}, 2, 8),
    ({"pp": 2}, 2, 8),
)
MLP = DimLabel("mlp")
COLUMNS = ("all_gather_columns", "gather")  # differ only in which devices get the result


@pytest.fixture(scope="module")
def checks():
    """The arguments of every check while four steps and collectives on arrays are planned."""
    every = []
    with mock.patch("tilewise.plan.lower.variants.check_collective", lambda *args: every.append(args)):
        for axes, accumulation, batch in MESHES:
            builder = GraphBuilder("llama")
            build_training_graph(builder, CONFIG, batch, 8, "f32")
            plan_graph(with_update(builder), axes, accumulation, batch_splits=batch)
        builder = GraphBuilder("in_shards")
        x = builder.input([8, 64], name="x", labels=[BATCH, None])
        hidden = linear(builder, x, "up", 64, out_label=MLP)
        y = builder.constrain(linear(builder, hidden, "down", 64, in_label=MLP), ("dp", "tp"))
        builder.output(y, "y")
        builder.output(linear(builder, y, "head", 64), "z")  # of all columns
        plan_graph(builder.freeze(), {"dp": 2, "tp": 2})
    with mock.patch("tilewise.plan.collectives.arrays.check_collective", lambda *args: every.append(args)):
        x, y, z = (FlatArray(elements, "f32", 4096 * n) for n, elements in enumerate((12, 24, 12)))
        halves, quarters = (
            ((0, 12), (12, 24)),
            ((0, 6), (0, 6), (6, 12), (0, 6), (0, 6), (6, 12), (6, 12), (6, 12)),
        )
        for mesh in (DeviceMesh({"tp": 2}), DeviceMesh({"dp": 2, "tp": 2})):
            array_program(mesh, "array", "all_reduce", ("tp",), x, x, combine="min")
            array_program(mesh, "array", "all_gather_batch", ("tp",), x, y, parts=halves)
            array_program(mesh, "array", "reduce_scatter_rows", ("tp",), y, x, combine="sum", parts=halves)
            array_program(mesh, "array", "all_to_all", ("tp",), x, z, parts=quarters)
    return every


def changes(dice, record):
    """Changed records that no layout allows."""
    yield record._replace(axes=(*record.axes, "other"))
    yield record._replace(axes=record.axes[1:])
    same = {record.kind, *(COLUMNS if record.kind in COLUMNS else ())}
    yield record._replace(
        kind=dice.choice([kind for kind in CHECKS if kind not in same and kind != "tile_program"])
    )
    if record.kind not in COPIES:
        yield record._replace(number=record.number + 1)
        yield record._replace(partial="other")
        yield record._replace(stack=-1 if record.stack >= 0 else record.target)
        yield record._replace(microbatch=-1 if record.microbatch >= 0 else 0)
    elif record.target >= 0:
        yield record._replace(tensors=record.tensors[::-1])
    if len({*record.parts}) > 1:
        at = dice.randrange(len(record.parts) - 1)
        first, second = record.parts[at : at + 2]
        if first != second:
            if record.kind != "all_to_all":  # which may copy any rows to any rows
                yield record._replace(parts=(*record.parts[:at], second, first, *record.parts[at + 2 :]))
            yield record._replace(parts=(*record.parts[:at], *record.parts[at + 1 :]))
            moved = (second[0] + 1, second[1])
            yield record._replace(parts=(*record.parts[: at + 1], moved, *record.parts[at + 2 :]))
    if record.parts:
        *rest, (begin, end) = record.parts
        if record.target >= 0:
            yield record._replace(parts=(*rest, (begin, end + 1)))


def is_found(record, of):
    """Whether a check rejects a record."""
    try:
        check_collective(record, *of)
    except InternalError as error:
        assert str(error).startswith("[plan.collectives] ")
        return True
    return False


def test_every_changed_record_is_found(checks):
    """Devices, kind, pending reduction, stack and parts; the original passes."""
    seen, count, dice = set(), 0, random.Random(0)
    for record, *of in checks:
        check_collective(record, *of)
        seen.add(record.kind)
        for changed in changes(dice, record):
            if changed != record:
                assert is_found(changed, of), changed
                count += 1
    # programs need the native module: tests/native/tiles/test_programs_in_graphs.py
    assert seen == {*CHECKS} - {"tile_program"} and count > 500
