"""Arguments of meshes and their methods."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.core.errors import LayoutError, PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.strategy import DistributionStrategy, check_offload

MESH = DeviceMesh({"dp": 2, "tp": 3})
ODD = [["dp"], None]


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize(
    "ask",
    [MESH.size, *(lambda *axes, ask=ask: ask(0, *axes) for ask in (MESH.coordinate, MESH.first, MESH.group))],
)
def test_axes_are_names(ask, odd):
    """A list is not accepted as a name, also after a valid one."""
    for axes in ((odd,), ("dp", odd)):
        with pytest.raises(LayoutError, match=r"\[core.mesh\] axes must be names; got .*; pass "):
            ask(*axes)


def test_absent_axes_count_one_device():
    """So that strategies may name axes of other meshes."""
    assert MESH.size("tp", "cp") == 3 and MESH.coordinate(4, "cp", "tp") == 1 and MESH.group(4, "cp") == [4]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_labels_are_strings(odd):
    """Axes of a label are looked up by its name."""
    with pytest.raises(LayoutError, match=r"\[strategy.axes_for\] a label must be a name; got "):
        DistributionStrategy.ddp(2).axes_for(odd)


@pytest.mark.parametrize("odd", [{"optimizer": 1}, b"optimizer"], ids=str)
def test_offload_is_a_list_of_names(odd):
    """Or one name, or a set of them; an array without dims is neither."""
    with pytest.raises(PlanError, match=r"\[plan.plan\] offload must be a sequence of optimizer, "):
        check_offload(odd)
    assert (
        check_offload({"optimizer"}) == check_offload("optimizer") == check_offload(np.array(["optimizer"]))
    )
    assert check_offload("none") == frozenset()
