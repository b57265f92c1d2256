"""Frozen parameters: what is not differentiated, and where the setting is kept."""

import numpy as np
import pytest

from tilewise.core.errors import PlanError, ShapeError
from tilewise.graph import GraphBuilder, differentiate, layer, simplify
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear

MODEL = LlamaConfig(64, 32, 64, 4, num_attention_heads=4, num_key_value_heads=2)


def differentiated(*patterns):
    graph = GraphBuilder("m")
    build_training_graph(graph, MODEL, 2, 8)
    graph.freeze_parameters(*patterns)
    frozen = simplify(graph.freeze())
    return frozen, differentiate(frozen, graph.draft.loss_id)


def ops_of_backward(made):
    """Names of the ops of the backward pass, those of each called layer included."""
    names = []
    for op in made.graph.ops:
        if op.phase == "backward":
            inside = made.graph.templates[op.attrs["template"]].graph.ops if op.op == "call" else [op]
            names += [o.op for o in inside]
    return names


def test_no_gradient_of_frozen_parameters():
    """No op computes a gradient of a frozen weight, and there is no output for it."""
    forward, made = differentiated("*_proj.weight", "embed*", "lm_head*")
    assert {*made.gradients} == {t.spec.name for t in forward.trainable()}
    assert "linear_dw" not in ops_of_backward(made)
    assert not any(name.endswith("_proj.weight.grad") for name in made.graph.outputs)


def test_layers_below_the_first_trained_one_have_no_backward_pass():
    """Layers 0 and 1 and the embedding are frozen: two layers are differentiated, the first without the
    gradient of its input."""
    _, made = differentiated("embed*", "layers.[01].*")
    labels = [op.label for op in made.graph.ops if op.op == "call" and op.phase == "backward"]
    assert labels == ["layers.3.backward", "layers.2.backward"]
    last, first = (made.graph.ops[made.layers[call][0]] for call in sorted(made.layers)[::-1])
    assert first.attrs["template"] != last.attrs["template"]
    assert not any(
        made.graph.spec(o).dtype.name == "bf16" for o in first.outputs
    )  # weights' gradients are fp32
    assert len(first.outputs) == len(last.outputs) - 1


def test_layers_that_train_other_weights_share_the_forward_template():
    """Two layers with other frozen weights have one forward and two backward templates."""
    forward, made = differentiated("layers.0.self_attn.*", "layers.1.mlp.*")
    assert len(forward.templates) == 1
    assert sum(".backward" in key for key in made.graph.templates) == 3


def test_layers_declare_frozen_parameters():
    """`trainable=False` inside a layer holds for every use of it, and a rejected call leaves nothing."""

    @layer
    def half(graph, x):
        w = graph.parameter([8, 8], name="w", trainable=False)
        return linear(graph, graph.matmul(x, w, trans_b=True), "v.weight", 8)

    graph = GraphBuilder("g")
    x = half(graph, half(graph, graph.input([4, 8], name="x"), path="a"), path="b")
    graph.output(x, "y")
    assert [t.spec.name for t in graph.freeze().trainable()] == ["a.v.weight", "b.v.weight"]
    for patterns in ((), ("c*",), ("a*", "nothing"), (3,)):
        with pytest.raises(ShapeError):
            graph.freeze_parameters(*patterns)
    with pytest.raises(ShapeError), graph.all_or_nothing():
        graph.freeze_parameters("a.*")
        graph.input([2], name="x")
    assert len(graph.freeze().frozen) == 2
    assert graph.freeze_parameters("a.*", "b.w") == ["a.w", "a.v.weight", "b.w"]
    assert GraphBuilder.thaw(graph.freeze()).freeze() == graph.freeze()


def test_a_loss_of_frozen_parameters_alone_is_an_error():
    """Nothing could be trained."""
    graph = GraphBuilder("g")
    y = linear(graph, graph.input([4, 8], name="x"), "w.weight", 8)
    graph.loss(graph.mean(graph.mul(y, y)))
    graph.freeze_parameters("w.weight")
    with pytest.raises(PlanError, match="frozen"):
        differentiate(graph.freeze(), graph.draft.loss_id)


def test_frozen_ids_must_be_parameters_in_files():
    """A graph file that freezes an input, or names a tensor twice, is rejected."""
    from dataclasses import replace

    from tilewise.files.reading import Unreadable
    from tilewise.graph.file import Definition, decode_definition, encode_definition, require_definition

    graph = GraphBuilder("g")
    graph.output(linear(graph, graph.input([4, 8], name="x"), "w.weight", 8), "y")
    graph.freeze_parameters("w.weight")
    definition = Definition(graph.freeze(), None)
    decoded, digest = decode_definition(encode_definition(definition))
    require_definition(decoded)
    assert decoded.graph == definition.graph and digest == definition.digest()
    for wrong in ((0,), (1, 1), (99,), (-1,)):
        with pytest.raises(Unreadable, match="frozen"):
            require_definition(replace_graph(definition, replace(definition.graph, frozen=wrong)))


def replace_graph(definition, graph):
    return definition._replace(graph=graph)


def test_files_without_the_field_have_no_frozen_parameters():
    """Graph files of earlier versions have no list of frozen parameters."""
    from tilewise.graph.file import Definition, decode_definition, encode_definition

    graph = GraphBuilder("g")
    graph.constant(np.zeros(3, np.float32), "c")
    content = encode_definition(Definition(graph.freeze(), None)).decode()
    older = content.replace(',"frozen"]', "]", 1)
    row = next(line for line in older.splitlines() if '"g"' in line)
    without = row.replace(",[]]", "]", 1) if row.endswith(",[]],") else row.removesuffix(",[]],") + "],"
    decoded, _ = decode_definition(older.replace(row, without).encode())
    assert decoded.graph == graph.freeze()
