"""A plan is immutable, and looking up anything it lacks is an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace

import numpy as np
import pytest

from pure.plan.plan_bytes import make, small
from tilewise.core.errors import ConfigError, PlanError
from tilewise.core.frozen import FrozenMap
from tilewise.plan import PlanTables


def parts_of(value: object) -> Iterator[object]:
    """A record's fields and items, recursively, itself first."""
    yield value
    if is_dataclass(value):
        inside: Iterable[object] = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    else:
        inside = value if isinstance(value, tuple | list | set | frozenset) else ()
    for part in inside:
        yield from parts_of(part)


def laid_out() -> PlanTables:
    """A plan with constants, attributes, templates, hints, records and calls."""
    plan = make(mesh={"dp": 2, "tp": 2}, hints={"embed_tokens.weight": ("tp",)})
    assert plan.graph.hints and plan.layout.pending_reductions and plan.layout.calls
    return plan


def test_plan_cannot_be_changed():
    """Its digest, file and memory stay the same: mappings and arrays inside are read-only, too."""
    plan = laid_out()
    before = plan.digest()
    parts = [*parts_of(plan), *parts_of(plan.stored_parts)]
    assert not [part for part in parts if isinstance(part, list | set | bytearray)]
    mappings = {id(part): part for part in parts if isinstance(part, Mapping)}.values()
    graph, program = plan.graph, plan.program.classes[0]
    for mapping_of_plan in (
        plan.placement(0).regions,
        program.calls,
        graph.hints,
        graph.templates,
        graph.ops[0].attrs,
        graph.outputs,
    ):
        assert any(mapping_of_plan is mapping for mapping in mappings)
    for mapping in mappings:
        with pytest.raises(ConfigError, match=r"\[core.FrozenMap\] mappings of frozen records are read"):
            mapping["zz"] = 1
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    assert arrays
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert plan.digest() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("a"),
        lambda m: m.popitem(),
        lambda m: m.clear(),
        lambda m: m.update(b=1),
        lambda m: m.setdefault("b", 1),
        lambda m: m.__delitem__("a"),
        lambda m: m.__ior__({"b": 1}),
    ],
)
def test_frozen_mappings_reject_all_changes(change):
    """Every mutating method of a dictionary is rejected; copies are dictionaries."""
    mapping = FrozenMap(a=1)
    with pytest.raises(
        ConfigError, match=r"are read-only; got a change of one with 1 entries; change dict\(mapping\)"
    ):
        change(mapping)
    assert mapping == {"a": 1} == mapping.copy() and mapping | {"b": 2} == {"a": 1, "b": 2}
    assert type(mapping.copy()) is type(mapping | {}) is dict


@pytest.mark.parametrize("remade", [copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_of_a_plan_are_read_only_and_equal(remade):
    """In a pickle, too."""
    plan = small()
    plan.stored_parts  # noqa: B018  # it is kept once it is known
    other = remade(plan)
    assert other == plan and other.digest() == plan.digest() and other.stored_parts == plan.stored_parts
    assert {type(part) for part in parts_of(other) if isinstance(part, Mapping)} == {FrozenMap}
    assert not any(value.flags.writeable for value in other.graph.constant_values.values())


def test_plan_works_with_dataclass_functions():
    """`dataclasses.asdict` converts it, mappings included, and `replace` makes a changed one."""
    plan = small()
    apart = asdict(plan)
    assert apart["placements"][0]["regions"] == plan.placement(0).regions
    assert apart["program"]["classes"][0]["aliases"] == plan.program.classes[0].aliases
    assert apart["graph"]["ops"][0]["label"] == plan.graph.ops[0].label
    same = replace(plan.placement(0), regions=dict(plan.placement(0).regions))
    assert replace(plan, placements=(same,)).digest() == plan.digest()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda p, t: p.class_of("x"), r"class_of\] device must be an integer; got 'x'"),
        (lambda p, t: p.class_of(2), r"class_of\] device must lie in \[0, 1\]; got 2"),
        (lambda p, t: p.class_of(-1), r"class_of\] device must lie in"),
        (lambda p, t: p.entry(None, None), r"entry\] a tensor must be an integer; got None"),
        (lambda p, t: p.entry(0, 10**6), r"entry\] a tensor must lie in"),
        (lambda p, t: p.entry(2, t), r"class_of\] device must lie in \[0, 1\]; got 2"),
        (lambda p, t: p.entry(0, t, 1), r"entry\] part must lie in \[0, 0\]; got 1"),
        (lambda p, t: p.holder(10**6, 0), r"holder\] a tensor must lie in"),
        (lambda p, t: p.holder(t, 2), r"holder\] device must lie in \[0, 1\]; got 2"),
        (lambda p, t: p.holder(t, [0]), r"holder\] device must be an integer; got \[0\]"),
    ],
)
def test_unknown_parts_of_a_plan_are_rejected(ask, words):
    """Devices, tensors and parts by number, none counted from the end."""
    plan = small()  # of two devices
    with pytest.raises(PlanError, match=r"\[plan\." + words):
        ask(plan, plan.graph.of_kind("input")[0].id)


def test_temporary_tensor_has_no_entry():
    """A tensor made and used within a step is not visible to users."""
    plan = small()
    inner = next(t.id for t in plan.graph.tensors if t.id not in plan.outside)
    with pytest.raises(
        PlanError, match=rf"\[plan.entry\] users must be able to read or write the tensor; got {inner}, "
    ):
        plan.entry(0, inner)
