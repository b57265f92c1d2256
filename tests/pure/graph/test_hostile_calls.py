"""Wrong values in any argument of any builder call: only the project's own errors, and an unchanged graph."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from pure.hostile import HOSTILE, INVALID
from tilewise.core.dims import BATCH, Dim, DimLabel
from tilewise.core.errors import TilewiseError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder, layer
from tilewise.ir.graph import TensorSpec
from tilewise.ir.show import show_graph
from tilewise.nn import layer_norm, linear, rms_norm
from tilewise.optim import SGD, AdamW, ParameterGroup
from tilewise.strategy import DistributionStrategy, ParallelismMode


@layer
def block(graph, x, *, width):
    """A layer with a weight."""
    return linear(graph, x, "w", width)


def described():
    """A graph with a tensor of every kind that calls need."""
    graph = GraphBuilder("g")
    batch = BATCH
    outside = {
        "x": graph.input([2, 4, 8], name="x", labels=[batch, None, None]),
        "rows": graph.input([4, 8], name="rows"),
        "ids": graph.input([4], "i32", name="ids", storage="scalars"),
        "positions": graph.input([2, 4], "i32", name="positions", labels=[batch, None], storage="scalars"),
        "labels": graph.input([4], "i32", name="labels", storage="scalars"),
        "one": graph.input([1], name="one", storage="vector"),
        "w": graph.parameter([8, 8], name="w"),
        "gamma": graph.parameter([8], name="gamma"),
        "cache": graph.state([128, 8], name="cache"),
        "table": graph.constant(np.zeros((16, 4), np.float32), name="table"),
        "blocks": graph.input([1, 2], "i32", name="blocks"),
        "lengths": graph.input([2], "i32", name="lengths", labels=[batch], storage="scalars"),
        "pairs": graph.input([2], name="pairs", labels=[batch], storage="scalars"),
        "images": graph.input([2, 4, 3, 3], name="images", labels=[batch, None, None, None]),
        "grid": graph.input([2, Dim("seq", 1, 4)], "i32", name="grid", storage="scalars"),
    }
    return graph, outside


CALLS = {
    "input": lambda g, t: (g.input, [[3]], {"dtype": "f32", "name": "n", "labels": [None], "storage": "rows"}),
    "parameter": lambda g, t: (
        g.parameter,
        [[3, 3]],
        {"dtype": "f32", "name": "n", "labels": [], "init": "zeros", "trainable": False},
    ),
    "state": lambda g, t: (g.state, [[3]], {"dtype": "f32", "name": "n", "labels": [], "storage": "rows"}),
    "constant": lambda g, t: (g.constant, [np.zeros(3, np.float32)], {"name": "n", "labels": (), "storage": "rows"}),
    "output": lambda g, t: (g.output, [t["x"], "out"], {}),
    "positions": lambda g, t: (g.positions, [t["grid"]], {}),
    "constrain": lambda g, t: (g.constrain, [t["x"], ("dp", None)], {}),
    "freeze_parameters": lambda g, t: (g.freeze_parameters, ["w*"], {}),
    "prefer_k_splits": lambda g, t: (g.prefer_k_splits, [12], {}),
    "op": lambda g, t: (g.op, ["scale", [t["x"]]], {"factor": 2.0}),
    "add": lambda g, t: (g.add, [t["x"], t["x"]], {}),
    "add_bias": lambda g, t: (g.add_bias, [t["x"], t["gamma"]], {}),
    "mul": lambda g, t: (g.mul, [t["x"], t["x"]], {}),
    "scale": lambda g, t: (g.scale, [t["x"], 2.0], {}),
    "silu": lambda g, t: (g.silu, [t["x"]], {}),
    "relu": lambda g, t: (g.relu, [t["x"]], {}),
    "gelu": lambda g, t: (g.gelu, [t["x"]], {"approximate": "tanh"}),
    "tanh": lambda g, t: (g.tanh, [t["x"]], {}),
    "softcap": lambda g, t: (g.softcap, [t["x"], 30.0], {}),
    "sum": lambda g, t: (g.sum, [t["x"]], {"dim": 1, "keepdim": True}),
    "mean": lambda g, t: (g.mean, [t["x"]], {"dim": (1, 2), "keepdim": False}),
    "softmax": lambda g, t: (g.softmax, [t["x"]], {"dim": 1}),
    "log_softmax": lambda g, t: (g.log_softmax, [t["x"]], {"dim": -1}),
    "sub": lambda g, t: (g.sub, [t["x"], t["gamma"]], {}),
    "div": lambda g, t: (g.div, [t["x"], t["x"]], {}),
    "maximum": lambda g, t: (g.maximum, [t["x"], t["x"]], {}),
    "minimum": lambda g, t: (g.minimum, [t["x"], t["x"]], {}),
    "greater": lambda g, t: (g.greater, [t["x"], t["x"]], {}),
    "equal": lambda g, t: (g.equal, [t["x"], t["x"]], {}),
    "where": lambda g, t: (g.where, [t["x"], t["x"], t["x"]], {}),
    "sigmoid": lambda g, t: (g.sigmoid, [t["x"]], {}),
    "exp": lambda g, t: (g.exp, [t["x"]], {}),
    "log": lambda g, t: (g.log, [t["x"]], {}),
    "sqrt": lambda g, t: (g.sqrt, [t["x"]], {}),
    "abs": lambda g, t: (g.abs, [t["x"]], {}),
    "pow": lambda g, t: (g.pow, [t["x"], 2.0], {}),
    "expand": lambda g, t: (g.expand, [t["rows"], (2, 4, 8)], {}),
    "expand_as": lambda g, t: (g.expand_as, [t["rows"], t["x"]], {}),
    "reshape": lambda g, t: (g.reshape, [t["x"], (2, 32)], {}),
    "permute": lambda g, t: (g.permute, [t["x"], (0, 2, 1)], {}),
    "transpose": lambda g, t: (g.transpose, [t["x"]], {"dim0": 1, "dim1": 2}),
    "slice": lambda g, t: (g.slice, [t["x"], 1], {"start": 1, "stop": 3}),
    "index": lambda g, t: (g.index, [t["x"], (0, slice(1, 3))], {}),
    "split": lambda g, t: (g.split, [t["x"], [1, 3]], {"dim": 1}),
    "concat": lambda g, t: (g.concat, [[t["x"], t["x"]]], {"dim": 1}),
    "pad": lambda g, t: (g.pad, [t["x"], {1: (1, 2)}], {"value": 2.0}),
    "max": lambda g, t: (g.max, [t["x"]], {"dim": 1, "keepdim": True}),
    "index_select": lambda g, t: (g.index_select, [t["x"], 1, t["ids"]], {}),
    "gather": lambda g, t: (g.gather, [t["rows"], 0, t["ids"]], {}),
    "scatter_add": lambda g, t: (g.scatter_add, [t["rows"], 0, t["ids"], t["rows"]], {}),
    "one_hot": lambda g, t: (g.one_hot, [t["ids"], 5], {}),
    "gather_batch": lambda g, t: (g.gather_batch, [t["rows"]], {}),
    "dropout": lambda g, t: (g.dropout, [t["x"], 0.5], {}),
    "sequence_log_probs": lambda g, t: (
        g.sequence_log_probs,
        [t["x"], t["positions"]],
        {"ignore_index": -100},
    ),
    "swap_pairs": lambda g, t: (g.swap_pairs, [t["pairs"]], {}),
    "mse_loss": lambda g, t: (g.mse_loss, [t["x"], t["x"]], {"reduction": "sum"}),
    "l1_loss": lambda g, t: (g.l1_loss, [t["x"], t["x"]], {"reduction": "mean"}),
    "binary_cross_entropy_with_logits": lambda g, t: (
        g.binary_cross_entropy_with_logits, [t["x"], t["x"]], {"reduction": "none"}
    ),
    "conv2d": lambda g, t: (
        g.conv2d,
        [t["images"], t["w"], t["gamma"]],
        {"kernel_size": (2, 1), "stride": 1, "padding": (1, 0), "dilation": 1},
    ),
    "conv1d": lambda g, t: (
        g.conv1d, [t["x"], t["w"], t["gamma"]], {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 1}
    ),
    "cast": lambda g, t: (g.cast, [t["x"], "bf16"], {}),
    "matmul": lambda g, t: (
        g.matmul, [t["rows"], t["w"]], {"trans_a": False, "trans_b": True, "residual": t["rows"]}
    ),
    "rms_norm": lambda g, t: (g.rms_norm, [t["x"], t["gamma"]], {"eps": 1e-5, "offset": 1.0, "head_dim": 8}),
    "layer_norm": lambda g, t: (g.layer_norm, [t["x"], t["gamma"], t["gamma"]], {"eps": 1e-5}),
    "embedding": lambda g, t: (g.embedding, [t["ids"], t["w"]], {}),
    "rope": lambda g, t: (g.rope, [t["x"], t["positions"], t["table"]], {"head_dim": 4}),
    "attention": lambda g, t: (
        g.scaled_dot_product_attention,
        [t["x"]] * 3,
        {"head_dim": 4, "causal": True, "scale": 0.5, "window": 2, "softcap": 3.0, "attn_mask": None},
    ),
    "attention_with_lengths": lambda g, t: (
        g.scaled_dot_product_attention, [t["x"]] * 3, {"head_dim": 4, "causal": False, "lengths": t["lengths"]}
    ),
    "attention_of_documents": lambda g, t: (
        g.scaled_dot_product_attention, [t["x"]] * 3, {"head_dim": 4, "causal": True, "first": t["positions"]}
    ),
    "paged_attention": lambda g, t: (
        g.paged_attention,
        [t["rows"], t["cache"], t["cache"], t["ids"], t["ids"], t["blocks"]],
        {"head_dim": 4, "block_size": 64, "scale": 0.5, "window": 2, "softcap": 3.0},
    ),
    "kv_write": lambda g, t: (
        g.kv_write, [t["cache"], t["rows"], t["ids"]], {"head_dim": 4, "block_size": 64}
    ),
    "gather_rows": lambda g, t: (g.gather_rows, [t["rows"], t["ids"]], {}),
    "cross_entropy": lambda g, t: (
        g.cross_entropy, [t["rows"], t["labels"], t["one"]], {"ignore_index": -100, "label_smoothing": 0.1}
    ),
    "mean_cross_entropy": lambda g, t: (g.mean_cross_entropy, [t["rows"], t["labels"]], {"ignore_index": -100}),
    "loss": lambda g, t: (g.loss, [g.cross_entropy(t["rows"], t["labels"], t["one"])[0]], {}),
    "find": lambda g, t: (g.find, ["x"], {}),
    "has": lambda g, t: (g.has, ["x"], {}),
    "layer": lambda g, t: (block, [g, t["x"]], {"path": "layers.0", "width": 8}),
    "linear": lambda g, t: (
        linear, [g, t["x"], "up.weight", 6], {"in_label": None, "out_label": DimLabel("mlp")}
    ),
    "nn.layer_norm": lambda g, t: (layer_norm, [g, t["x"], "norm"], {"eps": 1e-5}),
    "nn.rms_norm": lambda g, t: (rms_norm, [g, t["x"], "norm"], {"eps": 1e-5, "offset": 1.0, "head_dim": 4}),
}  # fmt: skip


NAMED = {"name": {"'name'"}, "labels": {"()", "[]"}}
POSITIVE = {"2.5", "2**70", "float32"}
NUMBERS = {"-1", "0", *POSITIVE}
DIM = {"-1", "0"}
FALSE = {"None", "0", "''", "()", "[]", "{}"}
SHAPED = {"window": {"None"}, "softcap": {"None", "2.5", "float32"}}
TAKEN: dict[str, dict[int | str, set[str]]] = {  # hostile values that are valid
    "input": NAMED,
    "parameter": {**NAMED, "init": {"None"}, "trainable": {"True"}},
    "state": NAMED,
    "constant": NAMED,
    "output": {1: {"'name'"}},
    "constrain": {1: {"()", "[]", "{}"}},  # replicated
    "op": {"factor": NUMBERS},
    "scale": {1: NUMBERS},
    "softcap": {1: {"2.5", "float32"}},
    "add": {0: NUMBERS, 1: NUMBERS},
    "sub": {0: NUMBERS, 1: NUMBERS},
    "mul": {0: NUMBERS, 1: NUMBERS},
    "div": {0: NUMBERS, 1: NUMBERS - {"0"}},
    **{call: {0: NUMBERS, 1: NUMBERS} for call in ("maximum", "minimum", "greater", "equal")},
    "where": {1: NUMBERS, 2: NUMBERS},
    "pow": {1: NUMBERS},
    "softmax": {"dim": {"-1"}},
    "log_softmax": {"dim": {"-1"}},
    "sum": {"dim": {"-1"}, "keepdim": {"True"}},
    "mean": {"dim": {"-1", "None"}, "keepdim": {"True"}},
    "max": {"dim": DIM, "keepdim": {"True"}},
    "transpose": {"dim0": {"-1"}, "dim1": {"-1"}},
    "slice": {1: {"-1"}, "start": {"0"}, "stop": {"-1", "None"}},
    "index": {1: {*DIM, "()"}},
    "concat": {"dim": DIM},
    "pad": {1: {"{}"}, "value": NUMBERS},
    "index_select": {1: DIM},
    "gather": {1: DIM},
    "scatter_add": {1: {"0"}},
    "dropout": {1: {"0"}},
    "binary_cross_entropy_with_logits": {0: NUMBERS, 1: NUMBERS},
    "mse_loss": {0: NUMBERS, 1: NUMBERS},
    "l1_loss": {0: NUMBERS, 1: NUMBERS},
    "conv2d": {2: {"None"}, "padding": {"0"}},
    "conv1d": {2: {"None"}, "padding": {"0"}},
    "matmul": {"trans_a": FALSE, "trans_b": {"True"}, "residual": {"None"}},
    "rms_norm": {"eps": POSITIVE, "offset": NUMBERS, "head_dim": {"None"}},
    "attention": {
        "head_dim": {"None"},
        "attn_mask": {"None"},
        "causal": {"True"},
        "scale": {"None", *NUMBERS},
        **SHAPED,
    },
    "attention_with_lengths": {"head_dim": {"None"}, "lengths": {"None"}},
    "attention_of_documents": {"head_dim": {"None"}, "first": {"None"}, "causal": {"True"}},
    "paged_attention": {"scale": {"None", *NUMBERS}, **SHAPED},
    "sequence_log_probs": {"ignore_index": {"-1", "0"}},
    "cross_entropy": {"ignore_index": {"-1", "0"}, "label_smoothing": {"0"}},
    "mean_cross_entropy": {"ignore_index": {"-1", "0"}},
    "has": {0: set(HOSTILE)},  # any name may be looked up
    "layer": {"path": {"'name'"}},
    "linear": {2: {"'name'"}, "in_label": {"None", "DimLabel"}, "out_label": {"None", "DimLabel"}},
    "layer_norm": {"eps": POSITIVE},
    "nn.layer_norm": {2: {"'name'"}, "eps": POSITIVE},
    "nn.rms_norm": {2: {"'name'"}, "eps": POSITIVE, "offset": NUMBERS, "head_dim": {"None"}},
}


def test_every_builder_call_is_tested():
    """A new method must be added to the table below."""
    own = {
        "op_on_ids",
        "append",
        "freeze",
        "thaw",
        "all_or_nothing",
        "has",
        "scaled_dot_product_attention",
        "kernel",  # needs native code (tests/native/session/test_kernels_of_users.py)
    }
    methods = {n for n, _ in inspect.getmembers(GraphBuilder, inspect.isfunction) if not n.startswith("_")}
    assert methods - own <= set(CALLS)


def positions_of(arguments, keywords):
    """Every argument, by position or name."""
    return [*range(len(arguments)), *keywords]


@pytest.mark.parametrize("name", CALLS)
def test_rejected_call_leaves_the_graph_unchanged(name):
    """Each argument in turn is replaced by every hostile value; accepted values are listed in the table."""
    reference, outside = described()
    function, arguments, keywords = CALLS[name](reference, outside)
    function(*arguments, **keywords)
    taken = {}
    for position in positions_of(arguments, keywords):
        if arguments and position == 0 and isinstance(arguments[0], GraphBuilder):
            continue  # another value in place of the graph leaves no graph to compare
        for label, value in HOSTILE.items():
            graph, tensors = described()
            function, args, named = CALLS[name](graph, tensors)
            before = show_graph(graph.freeze())
            if isinstance(position, int):
                args = [*args[:position], value, *args[position + 1 :]]
            else:
                named = {**named, position: value}
            try:
                function(*args, **named)
            except INVALID:
                assert show_graph(graph.freeze()) == before, (position, label)
            else:
                show_graph(graph.freeze())  # accepted values can be printed
                taken.setdefault(position, set()).add(label)
    assert taken == TAKEN.get(name, {})


def test_calls_in_the_wrong_form():
    """Too many or too few operands, unknown or missing attributes, unknown ops: each has its message."""
    graph, t = described()
    before = show_graph(graph.freeze())
    x, rows = t["x"], t["rows"]
    for wrong, words in (
        (lambda: graph.op("fly", [x]), "an op's name must be that of a registered op; got 'fly'"),
        (lambda: graph.op("scale", [], factor=1.0), "takes the operands x; got 0"),
        (lambda: graph.op("scale", [x, x], factor=1.0), "takes the operands x; got 2"),
        (lambda: graph.op("scale", [x]), "got 'factor' missing"),
        (lambda: graph.op("scale", [x], factor=1.0, speed=2), "got 'speed' unknown"),
        (lambda: graph.op("add", [x, None]), "operand b must be given"),
        (
            lambda: graph.op("linear", [rows, t["w"]], transpose=True),
            "takes the operands x0, w0, x1, w1, ..., residual, bias; got 2; pass None",
        ),
        (
            lambda: graph.op("linear", [rows, rows, None, None], transpose=True),
            "w must be a parameter with two dims",
        ),
        (
            lambda: graph.op("global_norm", [], max_norm=1.0),
            "takes the operands loss, grads0, grads1, ...; got 0",
        ),
    ):
        with pytest.raises(TilewiseError, match=words):
            wrong()
    assert show_graph(graph.freeze()) == before


def test_layer_takes_inputs_as_operands():
    """An input declared inside a layer would have no value: rejected, and nothing of the layer stays."""

    @layer
    def closed(graph, x):
        return graph.add(x, graph.input([2, 4, 8], name="inner"))

    graph, t = described()
    before = show_graph(graph.freeze())
    with pytest.raises(TilewiseError, match="operands"):
        closed(graph, t["x"], path="p")
    assert show_graph(graph.freeze()) == before


def test_layer_declares_no_outputs():
    """Nothing could read them, and a loss inside would not be the graph's."""

    @layer
    def seen(graph, x):
        return graph.output(graph.silu(x), "seen")

    @layer
    def judged(graph, x):
        graph.loss(graph.sum(x))
        return x

    graph, t = described()
    before = show_graph(graph.freeze())
    for made, name in ((seen, "seen"), (judged, "loss")):
        with pytest.raises(
            TilewiseError, match=f"must not declare outputs or a loss; got an output '{name}'"
        ):
            made(graph, t["x"], path="p")
    assert show_graph(graph.freeze()) == before


def test_call_that_fails_halfway_leaves_nothing():
    """A residual that does not fit the product; a loss whose name an output has."""
    graph, t = described()
    graph.output(graph.silu(t["x"]), "loss")
    total, square = graph.sum(t["x"]), graph.input([8, 8], name="square")
    other = graph.input([3, 8], name="other")
    before = show_graph(graph.freeze())
    for residual in (other, "x"):
        with pytest.raises(INVALID):
            graph.matmul(t["rows"], square, residual=residual)
        assert show_graph(graph.freeze()) == before
    with pytest.raises(TilewiseError, match="output names must be unique; got 'loss'"):
        graph.loss(total)
    assert graph.draft.loss_id is None and show_graph(graph.freeze()) == before


def test_numbers_beyond_fp32_are_rejected():
    """Kernels compute in fp32: such an attribute would be infinite."""
    graph, t = described()
    for factor in (1e39, -1e39, 10**400):
        with pytest.raises(TilewiseError, match=r"\[graph.scale\] factor must"):
            graph.scale(t["x"], factor)


def test_second_mean_over_labels_is_rejected():
    """The count of labels is one input that cannot be renamed; the error gives an alternative."""
    graph = GraphBuilder("g")
    x, labels = graph.input([4, 8], name="x"), graph.input([4], "i32", name="labels")
    graph.mean_cross_entropy(x, labels)
    with pytest.raises(TilewiseError, match="got a second in 'g'; use cross_entropy with your own inv_count"):
        graph.mean_cross_entropy(graph.silu(x), labels)


def test_attributes_of_equal_text_are_two_templates():
    """Equal text is not equality: each layer is traced with its own attribute."""

    class Width:
        def __init__(self, value):
            self.value = value

        def __repr__(self):
            return "Width"

    @layer
    def wide(graph, x, *, width):
        return linear(graph, x, "w", width.value)

    graph, t = described()
    sizes = [wide(graph, t["x"], path=f"p{n}", width=Width(n)).shape[-1] for n in (3, 5)]
    assert sizes == [3, 5] and len(graph.draft.templates) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dim("n", -1, 4),
        lambda: Dim("x\0y", 1, 4),
        lambda: DimLabel("n", 0),
        lambda: DeviceMesh({"dp": 2}).coordinate(2, "dp"),
        lambda: DeviceMesh({"dp": 2}).group(-1, "dp"),
        lambda: TensorSpec("ab", "f32", (), name="n"),
        lambda: TensorSpec((2, 2.5), "f32", (), name="n"),
        lambda: TensorSpec((2, -1), "f32", (), name="n"),
        lambda: TensorSpec((2, 3), "f32", (), name="n", init_scale=np.nan),
        lambda: GraphBuilder("n", k_splits=0),
        lambda: AdamW(beta1=1.0),
        lambda: AdamW(eps=0.0),
        lambda: AdamW(weight_decay=np.nan),
        lambda: AdamW(max_grad_norm=np.inf),
        lambda: SGD(momentum=1.0),
        lambda: ParameterGroup("*", lr=-1.0),
        lambda: ParameterGroup("*", changes={"eps": np.nan}),
        lambda: DistributionStrategy("hybrid", {"dp": 2}),
        lambda: DistributionStrategy(ParallelismMode.HYBRID, {"dp": 2}, {"batch": "tp"}),
        lambda: DistributionStrategy.ddp(2.5),
    ],
)
def test_silently_wrong_values_are_rejected(make):
    """Out of range, a fraction as a count, NaN, a bool as a number, text as a sequence."""
    with pytest.raises(TilewiseError):
        make()
