"""A plan never changes, and says so where it is asked for what it has not."""

from __future__ import annotations

import copy
import pickle

import pytest

from pure.plan.plan_bytes import make, small
from tilewise.core.errors import PlanError


def test_mappings_of_a_plan_are_read_only():
    """Its digest, its file and its memory stay what they were."""
    plan = small()
    before = plan.digest()
    program = plan.program.classes[0]
    for mapping in (plan.regions, plan.outside, plan.overhead, plan.homes, program.calls, program.aliases):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["zz"] = 1
    assert plan.digest() == before


@pytest.mark.parametrize("remade", [copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_of_a_plan_are_read_only_and_equal(remade):
    """In a pickle, too: read-only mappings have none of their own."""
    plan = small()
    plan.homes  # noqa: B018  # it is kept once it is known
    other = remade(plan)
    assert other == plan and other.digest() == plan.digest() and other.homes == plan.homes
    for mapping in (other.regions, other.homes, other.program.classes[0].calls):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["zz"] = 1


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
def test_what_a_plan_has_not_is_refused(ask, words):
    """Devices, tensors and parts by numbers of its own, none counted from the end."""
    plan = make(mesh={"dp": 2})
    with pytest.raises(PlanError, match=r"\[plan\." + words):
        ask(plan, plan.graph.of_kind("input")[0].id)


def test_a_tensor_of_the_devices_alone_has_no_entry():
    """What is made and used up within a step is nowhere for users."""
    plan = small()
    inner = next(t.id for t in plan.graph.tensors if t.id not in plan.outside)
    with pytest.raises(PlanError, match=rf"\[plan.entry\] users read or write the tensor; got {inner}, "):
        plan.entry(0, inner)
