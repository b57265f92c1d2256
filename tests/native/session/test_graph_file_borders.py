"""Damaged, changed or hostile graph files: one of our errors, before anything is used."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import suppress

import numpy as np
import pytest

import tilewise as tw
from tilewise.core.errors import PlanError
from tilewise.graph.file import content as file_content
from tilewise.graph.file import decode_definition
from tilewise.ir import op as ops
from tilewise.ir.validate import graph as validating
from tilewise.nn import linear


@tw.layer
def block(graph, x, *, factor):
    table = graph.constant(np.ones((4, 8), np.float32), name="table")
    return graph.scale(graph.add(linear(graph, x, "weight", 8), table), factor)


def small():
    """A graph with every feature of files."""
    graph = tw.ComputeGraph("small")
    x = graph.input([4, 8], name="x", labels=[tw.BATCH, None], layout=("dp",))
    graph.state([4, 8], name="s")
    x = block(graph, block(graph, x, path="a", factor=2.0), path="b", factor=2.0)
    graph.output(x, "y")
    graph.loss(graph.mean(graph.silu(x)))
    return graph


@pytest.fixture
def path(tmp_path):
    small().save(tmp_path / "graph.json")
    return tmp_path / "graph.json"


def refusal(path, content=None):
    """The error of `load` for a file: one line, and no other exception."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        tw.ComputeGraph.load(path)
    words = str(caught.value)
    start = "[session.load] a graph file must be one that ComputeGraph.save wrote; got "
    assert "\n" not in words and words.startswith(start) and len(words) < 1000
    assert repr(str(path)) in words and words.endswith("; save the graph again")
    return words


def sealed(document):
    """The file of JSON content with a matching digest, as a hostile author would write it."""
    content = json.dumps(document).encode()
    with suppress(Exception):
        document["digest"] = decode_definition(content)[0].digest()
    return json.dumps(document).encode()


def edited(path, *changes):
    """The file with changed fields: (record, row, field, value or a function of the old value)."""
    document = json.loads(path.read_bytes())
    names = [name for name, _ in document["records"]]
    for record, which, field, value in changes:
        number = names.index(record)
        at = document["records"][number][1].index(field) + 1
        row = [r for r in document["rows"] if r[0] == number][which]
        row[at] = value(row[at]) if callable(value) else value
    return sealed(document)


def test_an_edit_without_effect_is_accepted(path):
    """The twin of all tests below: files rewritten by the same helper are accepted."""
    path.write_bytes(edited(path))
    assert tw.ComputeGraph.load(path).digest() == small().digest()
    path.write_bytes(edited(path, ("Graph", -1, "name", "other")))
    assert tw.ComputeGraph.load(path).name == "other"


def test_truncated_files_are_rejected(path):
    """At many lengths, and with additional bytes at the end."""
    valid = path.read_bytes()
    for end in range(0, len(valid) - 1, 97):
        refusal(path, valid[:end])
    refusal(path, valid + b"0")


def test_any_flipped_bit_is_detected(path):
    """A file that is still readable has another digest."""
    valid = path.read_bytes()
    for at in range(0, len(valid) - 1, 13):
        changed = bytearray(valid)
        changed[at] ^= 1 << at % 8
        refusal(path, bytes(changed))


def test_other_files_are_rejected(path):
    """Other formats, other versions, other kinds of files; a pickle is not loaded."""
    valid = path.read_bytes()
    cases = {
        b"": "not JSON",
        b"[]": "must have the key",
        b'{"a": 1}': "must have the key",
        b"\xef\xbb\xbf" + valid: "byte order mark",
        pickle.dumps(print): "not",
        valid.replace(b'graph":2', b'graph":3', 1): "has format 3",
        valid.replace(b'graph":2', b'graph":true', 1): "has format True",
        valid.replace(b'"digest":', b'"rows":', 1): "twice",
        valid.replace(b'"digest":', b'"more":', 1): "it must have the keys",
        valid.replace(b'"digest":"', b'"digest":"0', 1): "digest differs",
        b'{"tilewise graph":' + b"[" * 100_000: "nested too deeply",
        b'{"tilewise graph":' + b"9" * 5000: "not JSON",
        b'{"tilewise graph":2,"digest":NaN}': "not a number",
    }
    for content, words in cases.items():
        assert words in refusal(path, content), content[:60]
    path.unlink()
    assert "no such file" in refusal(path)
    os.mkfifo(path)
    assert "named pipe" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "a directory" in refusal(path)


def test_large_files_are_rejected(path, monkeypatch):
    """Bytes and values have limits, checked before any value is made; such files are not written either."""
    valid = path.read_bytes()
    monkeypatch.setattr(file_content, "MAX_VALUES", 300)
    assert "more than 300 values" in refusal(path)
    assert "more than 300 values" in refusal(path, b"[" * 1000)
    with pytest.raises(PlanError, match="at most"):
        small().save(path)
    monkeypatch.undo()
    monkeypatch.setattr(file_content, "MAX_BYTES", len(valid) - 1)
    assert "larger than" in refusal(path, valid)
    with pytest.raises(PlanError, match="at most"):
        small().save(path)


DEEP = json.loads('["t",[' * 20 + "]]" * 20)
# Rows of ops: call, call, silu, sum, scale, then the layer's linear and scale. Tensors: x, s, a table, two weights at 3
# and 5, results at 4, 6, 7, 8, 9.
EDITS = {
    "operand out of range": ([("OpNode", 4, "inputs", [99])], "refers to tensors"),
    "negative operand": ([("OpNode", 4, "inputs", [-1])], "refers to tensors"),
    "truth value as operand": ([("OpNode", 4, "inputs", [True])], "inputs of a OpNode: it must be an integer"),
    "text as operand": ([("OpNode", 4, "inputs", ["x"])], "inputs of a OpNode: it must be an integer"),
    "huge operand": ([("OpNode", 4, "inputs", [1 << 70])], "integer of 64 bits"),
    "no operand": ([("OpNode", 4, "inputs", [None])], "must be given"),
    "too many operands": ([("OpNode", 4, "inputs", lambda i: i * 2)], "takes the operands x"),
    "a cycle of one": ([("OpNode", 4, "inputs", [9])], "before their use"),
    "a cycle of two": ([("OpNode", 0, "inputs", [6, 2, 3])], "before their use"),
    "two producers": ([("OpNode", 4, "outputs", [8])], "and producer 3; op 4 makes it"),
    "an output that is given": ([("OpNode", 2, "outputs", [6])], "and producer 1; op 2 makes it"),
    "an output that is an input": ([("OpNode", 2, "outputs", [0])], "id 0 and producer None; op 2 makes it"),
    "op id": ([("OpNode", 4, "id", 9)], "dense"),
    "tensor id": ([("TensorNode", -1, "id", 3)], "id 3 and producer"),
    "producer": ([("TensorNode", -1, "producer", 0)], "and producer 0; op 1 makes it"),
    "producer out of range": ([("TensorNode", -1, "producer", 77)], "and producer 77; op 1 makes it"),
    "no producer": ([("TensorNode", 9, "producer", None)], "and producer None; op 4 makes it"),
    "no producer in a layer": ([("TensorNode", -1, "producer", None)], "and producer None; op 1 makes it"),
    "kind": ([("TensorNode", 0, "kind", "thing")], "thing 'x' differs from its declaration"),
    "result from nowhere": ([("TensorNode", -1, "kind", "input")], "a name must be printable text"),
    "unknown op": ([("OpNode", 4, "op", "explode")], "got 'explode'"),
    "another op": ([("OpNode", 4, "op", "silu")], "it has no attributes"),
    "an op with other results": ([("OpNode", 3, "op", "silu")], "op 'sum' makes f32[4, 8] (batch"),
    "call of nothing": ([("OpNode", 4, "op", "call")], "calls no template"),
    "attribute of another type": ([("OpNode", 4, "attrs", [["factor", 1]])], "has attributes of other types"),
    "infinite attribute": ([("OpNode", 4, "attrs", [["factor", ["f", "inf"]]])], "finite float"),
    "missing attribute": ([("OpNode", 4, "attrs", [])], "got 'factor' missing"),
    "attribute too deep": ([("OpNode", 4, "attrs", [["factor", DEEP]])], "with a mark"),
    "attribute that is a class": ([("OpNode", 4, "attrs", [["factor", ["k", "Popen", []]]])], "no class"),
    "phase": ([("OpNode", 4, "phase", "update")], "has only forward ops"),
    "unknown phase": ([("OpNode", 4, "phase", "x")], "has only forward ops"),
    "unprintable label": ([("OpNode", 4, "label", "a\nb")], "printable"),
    "saved tensors": ([("OpNode", 0, "attrs", lambda a: [a[0], ["saved", ["t", [0]]]])], "saves tensors"),
    "no such saved": ([("OpNode", 0, "attrs", lambda a: [a[0], ["saved", ["t", [99]]]])], "saves tensors"),
    "another layer": ([("OpNode", 0, "attrs", lambda a: [["template", "x"], a[1]])], "calls no template"),
    "an input as a weight": ([("OpNode", 0, "inputs", [0, 2, 1])], "to parameter f32[8, 8] 'weight' (-, -) packed"),
    "a state as a constant": ([("OpNode", 0, "inputs", [0, 1, 3])], "binds state f32[4, 8] 's' (-"),
    "too few bound": ([("OpNode", 0, "inputs", [0, 2])], "binds 2 tensors"),
    "negative size": ([("TensorSpec", -1, "shape", [-1])], "a size must lie in"),
    "size of nothing": ([("TensorSpec", 0, "shape", [0, 8])], "a size must lie in"),
    "huge size": ([("TensorSpec", 0, "shape", [1 << 40, 8])], "a size must lie in"),
    "huge tensor": ([("TensorSpec", 0, "shape", [1 << 39, 1 << 39])], "2**60 bytes"),
    "a shape that is text": ([("TensorSpec", 0, "shape", "48")], "must be a list"),
    "other shape of a result": ([("TensorSpec", 6, "shape", [2])], "op 'sum' makes f32[1] (-) vector, not f32[2]"),
    "other labels of a result": ([("TensorSpec", 4, "labels", [None, None])], "rows, not f32[4, 8] (-, -) rows"),
    "dtype": ([("TensorSpec", 0, "dtype", "f16")], "must be one of"),
    "other dtype": ([("TensorSpec", 0, "dtype", "i32")], "binds input"),
    "storage": ([("TensorSpec", 0, "storage", "heap")], "storage must be one of"),
    "init": ([("TensorSpec", 0, "init", "secret")], "init must be one of"),
    "init scale": ([("TensorSpec", 0, "init_scale", (2.0**100).hex())], "init_scale must lie in"),
    "empty name": ([("TensorSpec", 0, "name", "")], "a name must be printable text"),
    "name of two": ([("TensorSpec", 0, "name", "s")], "names must be unique"),
    "name of the optimizer": ([("TensorSpec", 0, "name", "optimizer.m")], "reserved for optimizers"),
    "name of the graph's own": ([("TensorSpec", 0, "name", "loss.inv_count")], "invalid form: f32[4, 8]"),
    "seed": ([("TensorSpec", 0, "name", "loss.seed")], "is reserved"),
    "tile of no rows": ([("TensorSpec", 0, "tile_hint", 0)], "tile_hint must lie in"),
    "labels": ([("TensorSpec", 0, "labels", [None])], "a label or None for each"),
    "atom": ([("DimLabel", 0, "atom", 0)], "the atom of"),
    "k_splits": ([("Graph", i, "k_splits", 0) for i in (0, 1)], "k_splits must lie in"),
    "k splits of layers": ([("Graph", 0, "k_splits", 4)], "k splits"),
    "graph name": ([("Graph", -1, "name", "")], "printable text"),
    "an output out of range": ([("Graph", -1, "outputs", [["y", 99]])], "hints and outputs must refer to tensors"),
    "an output twice": ([("Graph", -1, "outputs", [["y", 8], ["y", 7]])], "a key appears twice"),
    "an output called like a tensor": ([("Graph", -1, "outputs", lambda o: [*o, ["x", 8]])], "is taken"),
    "no constants": ([("Graph", -1, "constant_values", [])], "every constant must have a value"),
    "an array out of range": ([("Graph", -1, "constant_values", [[4, 9]])], "number of an array"),
    "hint": ([("Graph", -1, "hints", [[0, [["dp"], ["dp"]]]])], "name each mesh axis only once"),
    "hint of nothing": ([("Graph", -1, "hints", [[44, [["dp"], []]]])], "hints and outputs must refer to tensors"),
    "short hint": ([("Graph", -1, "hints", [[0, [["dp"]]]])], "the layout of tensor 0"),
    "long hint": ([("Graph", -1, "hints", [[0, [[], [], ["dp"]]]])], "one entry per dim"),
    "loss out of range": ([("Definition", 0, "loss", 99)], "its loss is tensor 99"),
    "a negative loss": ([("Definition", 0, "loss", -1)], "its loss is tensor -1"),
    "a loss that is invalid": ([("Definition", 0, "loss", 0)], "a loss must be one f32"),
    "an unnamed loss": ([("Graph", -1, "outputs", lambda o: o[:1])], "is not its output 'loss'"),
    "layer's key": ([("Template", 0, "key", "other")], "has another key"),
    "layer's arguments": ([("Template", 0, "arguments", [0, 1])], "other arguments than its tensors from outside"),
    "argument out of range": ([("Template", 0, "arguments", [0, 1, 99])], "other arguments than its tensors"),
    "layer's results": ([("Template", 0, "results", [0])], "has the outputs"),
    "a row ahead": ([("Template", 0, "graph", 10**6)], "number of an earlier Graph"),
    "a row of another class": ([("Template", 0, "graph", 0)], "number of an earlier Graph"),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_edits_are_rejected(what, path):
    """One changed field with a matching digest: the error names the fault."""
    changes, words = EDITS[what]
    assert words in refusal(path, edited(path, *changes))


def test_arrays_match_their_description(path):
    """Their base64 bytes match dtype and shape."""
    valid = json.loads(path.read_bytes())
    name, shape, text = valid["arrays"][0]
    entries = [
        [name, shape], [name, [4, 9], text], [name, shape, text + "="], [name, shape, "é"], ["f9", shape, text],
        [name, [-1, 8], text], [name, shape, 7], [name, [1 << 39] * 30, text], "f32", [name, [], ""],
    ]  # fmt: skip
    for entry in entries:
        refusal(path, sealed({**valid, "arrays": [entry]}))
    assert "constant" in refusal(path, sealed({**valid, "arrays": [["i32", shape, text]]}))
    refusal(path, sealed({**valid, "arrays": {}}))


def nested(path, depth, keys):
    """The file with nested layers: each graph has the previous one under every key."""
    document = json.loads(path.read_bytes())
    names = [name for name, _ in document["records"]]
    graph, template = names.index("Graph"), names.index("Template")
    at = 1 + document["records"][graph][1].index("templates")
    *rows, shell, outer, top, last = document["rows"]
    assert (shell[0], outer[0], top[0]) == (graph, template, graph)
    inner = len(rows)
    rows.append(shell)
    for _ in range(depth):
        operands = [[key, len(rows) + i] for i, key in enumerate(keys)]
        rows += [[template, key, inner, *outer[3:]] for key in keys]
        inner = len(rows)
        rows.append([*shell[:at], operands, *shell[at + 1 :]])
    rows.append([template, outer[1], inner, *outer[3:]])
    rows.append([*top[:at], [[outer[1], len(rows) - 1]], *top[at + 1 :]])
    rows.append([last[0], len(rows) - 1, last[2]])
    return {**document, "rows": rows}


def test_nested_layers_have_a_limit(path):
    """Any depth in a file is rejected without a RecursionError."""
    assert "deep" in refusal(path, json.dumps(nested(path, 3000, ["t"])).encode())
    path.write_bytes(sealed(nested(path_of_small(path), 60, ["t"])))
    tw.ComputeGraph.load(path)


def test_layers_are_read_once(path, monkeypatch):
    """A file in which each layer contains the previous one twice, so the first one 65,536 times."""
    names = []
    inferring = validating.results_of_call
    monkeypatch.setattr(
        validating, "results_of_call", lambda name, *call: names.append(name) or inferring(name, *call)
    )
    path.write_bytes(sealed(nested(path, 16, ["a", "b"])))
    graph = tw.ComputeGraph.load(path)
    assert len(names) == 3 + 17 * 2
    assert graph.to_mermaid().count("subgraph") == 1 + 2 * 16
    assert "too often" in refusal(path, sealed(nested(path_of_small(path), 30, ["a", "b"])))


def path_of_small(path):
    small().save(path)
    return path


def test_an_op_of_a_user_must_be_registered_before_reading(path, monkeypatch):
    """Names of ops are looked up, never imported."""
    monkeypatch.delitem(ops._OPS, "silu")
    assert "'silu'" in refusal(path)


def test_a_rejected_file_gives_no_graph(path, monkeypatch):
    """The twin of the edits: without the check of definitions, one of them would be a graph."""
    content = edited(path, ("TensorSpec", 0, "name", "loss.seed"))
    assert "is reserved" in refusal(path, content)
    monkeypatch.setattr("tilewise.session.compute_graph.require_definition", lambda definition: None)
    assert tw.ComputeGraph.load(path).has("loss.seed")
