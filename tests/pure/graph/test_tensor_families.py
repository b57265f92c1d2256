"""Specs of deep graphs: those that differ in a part of their names share the rest, also when pickled."""

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import layers_of_tests as own
import pytest

from pure.plans import with_update
from tilewise.core.dims import BATCH
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import ShapeError
from tilewise.graph import GraphBuilder
from tilewise.ir.graph import TensorFamily, TensorSpec


def trained(layers):
    """Equal blocks with gradients and an update."""
    builder = own.start()
    x = builder.find("x")
    for i in range(layers):
        x = own.block(builder, x, path=f"layers.{i}")
    builder.loss(builder.mean(x))
    return with_update(builder)


def test_more_layers_have_no_more_families():
    """Per tensor, only a node and, where it has a name, a spec of two fields are stored."""
    families = [{t.spec.family for t in trained(layers).tensors} for layers in (8, 16)]
    assert len(families[0]) == len(families[1])
    assert all(not hasattr(t.spec, "__dict__") for t in trained(1).tensors)
    assert TensorSpec.__slots__ == ("family", "stem")


def test_specs_that_share_nothing_are_detected(monkeypatch):
    """The twin: with a family per tensor, more layers have more of them."""
    monkeypatch.setattr(
        TensorFamily,
        "member",
        lambda self, stem: TensorSpec(
            *self.form[:3], f"{self.prefix}{stem}{self.suffix}", storage=self.storage
        ),
    )
    families = [{t.spec.family for t in trained(layers).tensors} for layers in (8, 16)]
    assert len(families[1]) > len(families[0]) + 8 * 4


def test_names_are_composed():
    """From prefix and suffix of a tensor's own part; another name has its own parts."""
    spec = TensorSpec((4, 8), "f32", name="weight", storage="packed", init="zeros", init_scale=2.0)
    member = spec.named("optimizer.exp_avg.", ".bias").member("layers.3")
    assert member.name == "optimizer.exp_avg.layers.3.bias"
    assert member != spec and replace(member, name="weight") == spec == member.renamed("weight")
    assert hash(member.renamed("weight")) == hash(spec)
    assert {f.name: getattr(member, f.name) for f in fields(spec) if f.name != "name"} == {
        f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "name"
    }
    assert "name='optimizer.exp_avg.layers.3.bias'" in repr(member)
    with pytest.raises(ShapeError):
        member.renamed("a\nb")
    for name in ("name", "shape", "family", "stem"):
        with pytest.raises(FrozenInstanceError):
            setattr(member, name, None)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_graphs_round_trip_pickle(layers):
    """A pickled graph is equal, and tensors that shared a spec still share one."""
    graph = trained(layers) if layers else GraphBuilder("empty").freeze()
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and again.templates == graph.templates
    assert len({id(t.spec) for t in again.tensors}) == len({id(t.spec) for t in graph.tensors})


def test_input_keeps_its_label():
    """A stream that counts the batch is one form for all layers."""
    assert trained(2).tensors[0].spec.labels == (BATCH, None)


def test_specs_by_purpose():
    """The two named constructors are the plain one with the arguments that they imply."""
    assert TensorSpec.parameter((4, 2), "bf16", "w", storage="packed") == TensorSpec(
        (4, 2), DTYPES["bf16"], name="w", storage="packed"
    )
    assert TensorSpec.activation((4,), "f32") == TensorSpec((4,), DTYPES["f32"])
