"""Damaged, changed or hostile plan files: one TilewiseError of one line, before anything is used."""

from __future__ import annotations

import json
import os
import re

import pytest

from pure.plan.plan_bytes import edited, packed, parts, place, sealed, set_field, small, small_file
from tilewise.core.errors import PlanError
from tilewise.ir import op as ops
from tilewise.ir.file.fields import RENAMED, RENAMED_VALUES
from tilewise.ir.op import op_named
from tilewise.plan import Plan
from tilewise.plan.file import content as file_content


def refusal(path, content=None):
    """The error of `Plan.load` for a file; it is one line, and nothing else is raised."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    words = str(caught.value)
    assert "\n" not in words and words.startswith(
        "[plan.load] a plan file must be one that Plan.save wrote; got "
    )
    assert repr(str(path)) in words and words.endswith("; plan again")
    return words


@pytest.fixture
def path(tmp_path):
    """The path of the file."""
    return tmp_path / "step.plan"


def test_truncated_files_are_rejected(path):
    """At any of the first hundreds of bytes, and at many of the others."""
    content = small_file()
    for end in [*range(0, 200, 7), *range(200, len(content), 4001), len(content) - 1]:
        refusal(path, content[:end])
    refusal(path, content + b"\0")


def test_any_changed_bit_is_detected(path):
    """The digest covers everything after the first line, and the line has one form."""
    content = small_file()
    for at in [*range(0, 100, 3), *range(100, len(content), 5003)]:
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        refusal(path, bytes(changed))


def test_other_files_are_rejected(path):
    """A missing file, a directory, a pipe, other formats."""
    assert "no such file" in refusal(path)
    path.mkdir()
    assert "a directory" in refusal(path)
    path.rmdir()
    os.mkfifo(path)
    assert "a named pipe" in refusal(path)
    path.unlink()
    for other in (b"", b"PK\x03\x04" + b"\0" * 100, b"\x80\x05N.", b"{}", b"\xef\xbb\xbf" + small_file()):
        assert "does not begin with the line of a plan" in refusal(path, other)


def test_file_of_a_later_version_is_named(path):
    """Another format number, and records with other fields, are reported as another version."""
    body = small_file()[small_file().index(b"\n") + 1 :]
    assert "it has format 3, and this version of Tilewise reads 2" in refusal(path, sealed(body, 3))

    def more(document):
        number, _ = place(document, "PlanSettings", "seq")
        document["records"][number][1].append("speed")

    assert "a PlanSettings must have the fields" in refusal(path, edited(more))
    assert "there is no record class 'Popen'" in refusal(
        path, edited(lambda document: document["records"][0].__setitem__(0, "Popen"))
    )


def test_too_large_files_are_not_read(path, monkeypatch):
    """A file above the limit is rejected before it is read; such a plan is not written."""
    path.write_bytes(small_file())
    monkeypatch.setattr(file_content, "MAX_BYTES", len(small_file()) - 1)
    assert "larger than" in refusal(path)
    with pytest.raises(PlanError, match="at most"):
        small().save(path)


def test_false_sizes_are_rejected(path):
    """Lengths and shapes beyond the file, and arrays without a description."""
    rows, arrays = parts(small_file())
    text = json.dumps(rows).encode()
    assert "its rows should take" in refusal(path, sealed((1 << 62).to_bytes(8, "little") + text))
    assert "its arrays end" in refusal(path, packed(text, arrays + b"\0"))
    assert "should end at byte" in refusal(path, packed(text, arrays[:-1]))
    for entry in (
        ["f32", [1 << 39]],
        ["f32", [-1]],
        ["f32", [True]],
        ["O", [1]],
        ["f32", [0] * 33],
        [],
        None,
    ):
        refusal(path, edited(lambda document, e=entry: document["arrays"].__setitem__(0, e)))


def test_ambiguous_json_is_rejected(path):
    """Duplicate keys, NaN, unlimited nesting and numbers, invalid texts."""
    rows, arrays = parts(small_file())
    text = json.dumps(rows)
    twice = text.replace('"arrays"', '"records": [], "arrays"')
    assert "appears twice" in refusal(path, packed(twice.encode(), arrays))
    for odd in ("NaN", "Infinity", "1e999", "[" * 200_000, "9" * 5000, '"\\ud800"', "\xff"):
        changed = text.replace('"rows": [', f'"rows": [{odd}, ', 1)
        refusal(path, packed(changed.encode("latin-1"), arrays))


def below_zero(was):
    """An optimizer whose first setting is -1."""
    mark, name, ((first, _), *others) = was
    return [mark, name, [[first, ["f", "-0x1.0000000000000p+0"]], *others]]


def other_rate(was):
    """The same optimizer with its first float 0.5."""
    mark, name, ((first, _), *others) = was
    return [mark, name, [[first, ["f", "0x1.0000000000000p-1"]], *others]]


def no_reductions(content):
    """No template declares that it completes a value."""
    number, at = place(content, "LoweredTemplate", "reductions")
    for row in content["rows"]:
        if row[0] == number:
            row[at] = []


def forged_update(at, value):
    """Changes one integer of every update: settings and steps from the front, the rest from the end."""

    def change(document):
        number, kernel = place(document, "Instruction", "kernel")
        _, ints = place(document, "Instruction", "ints")
        updates = [r for r in document["rows"] if r[0] == number and r[kernel].startswith("update")]
        assert updates
        for row in updates:
            row[ints] = [*row[ints]]
            row[ints][at] = value

    return change


def forged_rule(at, value):
    """The same for a graph's op, whose optimizer is left out, alone."""

    def change(document):
        set_field("Plan", "optimizer", None)(document)
        number, op = place(document, "OpNode", "op")
        _, attrs = place(document, "OpNode", "attrs")
        for row in [r for r in document["rows"] if r[0] == number and r[op] == "update"]:
            steps = dict(row[attrs])["steps"]
            steps[1][at] = value

    return change


FIELDS = {
    "a truth value for a number": (set_field("Plan", "num_signals", True), "integer of 64 bits"),
    "a float for a number": (set_field("Plan", "num_signals", 1.5), "integer of 64 bits"),
    "a number beyond 64 bits": (set_field("Plan", "num_signals", 1 << 64), "integer of 64 bits"),
    "a negative count": (set_field("Plan", "num_signals", -1), "counts must lie in"),
    "a row that comes later": (set_field("Template", "graph", 10**6), "number of an earlier Graph"),
    "a row of another class": (set_field("Plan", "graph", 0), "number of an earlier Graph"),
    "itself": (set_field("GraphLayout", "calls", [[0, -1]]), "number of an earlier GraphLayout"),
    "a key twice": (set_field("Graph", "outputs", [["a", 0], ["a", 0]]), "appears twice"),
    "no list": (set_field("Plan", "kinds", {"0": 0}), "must be a list"),
    "text that shows nothing": (set_field("Graph", "name", "a\nb"), "printable text"),
    "no element type": (set_field("TensorSpec", "dtype", "f8"), "must be one of f32"),
    "a shape out of range": (set_field("TensorSpec", "shape", [1 << 60]), "must lie in"),
    "decimal floats": (set_field("TensorSpec", "init_scale", "1.0"), "in hexadecimal"),
    "floats without end": (set_field("TensorSpec", "init_scale", "inf"), "in hexadecimal"),
    "too many devices": (set_field("DeviceMesh", "sizes", [1 << 20, 1]), "row"),
    "an axis twice": (set_field("DeviceMesh", "names", ["dp", "dp"]), "row"),
    "an optimizer of another name": (
        set_field("Plan", "optimizer", lambda was: ["k", "os.system", was[2]]),
        "there is no class 'os.system' here",
    ),
    "settings of another optimizer": (
        set_field("Plan", "optimizer", lambda was: ["k", "Lion", was[2]]),
        "a Lion must have the settings",
    ),
    "settings out of range": (
        set_field("Plan", "optimizer", below_zero),
        "must lie in",
    ),
    "another optimizer": (
        set_field("Plan", "optimizer", ["k", "Optimizer", []]),
        "Optimizer",
    ),
    "another of its settings": (
        set_field("Plan", "optimizer", other_rate),
        "AdamW does not fit its graph: another update of",
    ),
    "what is no optimizer": (set_field("Plan", "optimizer", ["t", []]), "is no optimizer"),
    "an op that is not defined": (set_field("OpNode", "op", "conv9"), "got 'conv9'"),
    "an attribute of another type": (
        set_field("OpNode", "attrs", [["head_dim", ["f", "0x1.0000000000000p+3"]]]),
        "attributes",
    ),
    "a tensor that is not there": (set_field("OpNode", "inputs", [10**9]), "refers to tensors that"),
    "another result": (set_field("TensorNode", "id", 7), "tensor 0 of"),
    "a layout on no axis": (set_field("GraphLayout", "compute", lambda was: [[["xx"]], *was[1:]]), "has the layout"),
    "a missing layout": (set_field("GraphLayout", "storage", lambda was: was[1:]), "its layout"),
    "other settings": (set_field("PlanSettings", "row_tile", 1), "planning would choose"),
    "workers without end": (set_field("PlanSettings", "workers_per_device", 1 << 40), "workers"),
    "microbatches without end": (set_field("PlanSettings", "accumulation", 1 << 40), "microbatches must lie in"),
    "k splits without end": (set_field("Graph", "k_splits", 1 << 40, -1), "k splits"),
    "an entry outside of the arena": (set_field("TensorEntry", "offset", 1 << 40), "ends at byte"),
    "an entry before it": (set_field("TensorEntry", "offset", -64), "sizes out of range"),
    "an entry of other columns": (set_field("TensorEntry", "cols", 3), "as 3 for kernel 'embedding'"),
    "handles out of range": (set_field("TensorEntry", "first_handle", 1 << 30), "handles of"),
    "a loop of no rows": (set_field("TensorEntry", "tile_rows", 0), "sizes out of range"),
    "a number of no source": (set_field("Number", "source", 9), "depends on"),
    "a device of another class": (set_field("DeviceBinding", "class_id", 1), "in the classes that planning"),
    "a peer that is not there": (set_field("SharedInts", "items", [0, 5]), "no device group"),
    "a member that is not there": (
        set_field("DeviceBinding", "numbers", lambda was: [n + 7 for n in was], -1),
        "a device has no member",
    ),
    "a device group that is not there": (set_field("Notify", "group", 3), "a device has no member"),
    "signals without end": (set_field("Notify", "signal_base", 1 << 62), "out of range"),
    "signals beyond the plan's": (set_field("Notify", "signal_base", 1 << 20), "signals of"),
    "fewer signals than are raised": (set_field("Plan", "num_signals", lambda was: was // 2), "signals of"),
    "a slot that is not there": (set_field("Operand", "slot", 10**6, -1), "refers to other slots"),
    "a kernel that is not there": (set_field("Instruction", "kernel", "execute"), "got 'execute'"),
    "a call of no template": (set_field("Call", "template", 99), "refers to template 99"),
    "a call that binds less": (set_field("Call", "binding", [0], -1), "binds other slots"),
    "operands in another order": (set_field("Instruction", "operands", lambda was: was[::-1]), ""),
    "integers that are missing": (set_field("Instruction", "ints", []), ""),
    "an update by steps of no kind": (forged_update(3, 99), "step 0 is of kind 99"),
    "an update by steps below the first kind": (forged_update(3, -1), "step 0 is of kind -1"),
    "an update with values that come later": (forged_update(4, 1000), "step 0 takes values [1000"),
    "an update with values before the first": (forged_update(5, -7), "step 0 takes values"),
    "an update that leaves no value": (forged_update(-1, 10**6), "it leaves values"),
    "an update of tensors that are not panels": (forged_update(0, 1), "treats tensors as packed"),
    "an update of neither panels nor rows": (forged_update(0, 2), "treats tensors as packed"),
    "a rule by steps of no kind": (forged_rule(0, 99), "is of kind 99"),
    "less memory for workers than kernels take": (set_field("Plan", "scratch_bytes", 1 << 20), "bytes of scratch"),
    "no calls": (set_field("DeviceClass", "calls", []), "no calls"),
    "missing reductions": (no_reductions, "completed"),
    "another pending reduction": (set_field("PendingReduction", "leaf_ranges", [[[0, 1], [1, 4]]]), ""),
    "no entries for users": (set_field("Plan", "outside", []), "tensors from outside"),
    "arenas without end": (set_field("Plan", "regions", [["lasting", 1 << 62]]), "regions"),
    "memory below nothing": (
        set_field("Plan", "regions", [["lasting", -1], ["activations", 0], ["temporaries", 0], ["files", 0]]),
        "memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FIELDS)
def test_changed_fields_are_rejected(what, path):
    """A file with a change and a matching digest is an error that names the mismatch."""
    change, words = FIELDS[what]
    message = refusal(path, edited(change))
    assert words in message, message


def with_old_names(content):
    """Rename records, fields and values to the names in files of earlier versions."""
    for (record, field), values in RENAMED_VALUES.items():
        if record in (name for name, _ in content["records"]):
            number, at = place(content, record, field)
            old = {new: name for name, new in values.items()}
            for row in content["rows"]:
                if row[0] == number:
                    row[at] = old.get(row[at], row[at])
    names = {new: old for old, new in RENAMED.items() if "." not in old}
    fields = {(*old.split("."),): new for old, new in RENAMED.items() if "." in old}
    of_one = {(record, new): old for (record, old), new in fields.items()}
    content["records"] = [
        [names.get(record, record), [of_one.get((record, f), names.get(f, f)) for f in own]]
        for record, own in content["records"]
    ]


def test_files_of_earlier_versions_are_read(path):
    """Every renamed record, field and value is read under its old name as under its new one."""
    content = edited(with_old_names)
    assert content != small_file() and b"leaves" in content
    path.write_bytes(content)
    assert Plan.load(path).digest() == small().digest()


UNUSED = {  # fields that no lookup, size or count uses
    "Number.which",  # of a constant
    "TensorEntry.tile_rows",  # a tile larger than its tensor is the whole tensor
    "Slot.level", "Buffer.first", "Buffer.last", "TempSpec.cols", "TempSpec.tile_rows", "TempSpec.max_bytes",
    "TempSpec.op",  # used only in planning
}  # fmt: skip


def test_every_number_is_checked(path):
    """With any number in the rows larger than all others, the file is rejected, or nothing depends on it."""
    document, arrays = parts(small_file())
    unused = set()
    for number, (name, fields) in enumerate(document["records"]):
        rows = [row for row in document["rows"] if row[0] == number]
        for at, field in enumerate(fields, 1):
            row = next((r for r in rows if type(r[at]) is int), None)
            if row is None:
                continue
            was, row[at] = row[at], (1 << 41) + 1
            path.write_bytes(packed(json.dumps(document).encode(), arrays))
            row[at] = was
            try:
                Plan.load(path)
            except PlanError as error:
                assert "\n" not in str(error)
            else:
                unused.add(f"{name}.{field}")
    assert unused == UNUSED, unused ^ UNUSED


def test_exponential_calls_of_templates_are_rejected(path):
    """Forty layouts that each call the previous one twice would be walked a trillion times."""

    def doubled(document):
        graphs, layouts = (
            place(document, name, "name" if name == "Graph" else "calls")[0]
            for name in ("Graph", "GraphLayout")
        )
        template = place(document, "Template", "key")[0]
        names = dict(document["records"])
        graph = next(r for r in document["rows"] if r[0] == graphs)
        base, rows = document["rows"][:-1], []
        last = len(base)
        empty = [graphs, *graph[1:]]
        at = {f: i for i, f in enumerate(names["Graph"], 1)}
        op = place(document, "OpNode", "op")[0]
        rows.append(empty)
        for depth in range(40):
            inner = last + len(rows) - 1
            rows.append(
                [
                    template,
                    *(
                        {"key": "t", "graph": inner, "arguments": [], "results": []}[f]
                        for f in names["Template"]
                    ),
                ]
            )
            call = {"id": 0, "op": "call", "inputs": [], "outputs": [], "phase": "forward", "label": "c"}
            call["attrs"] = [["template", "t"], ["saved", ["t", []]]]
            first = len(rows)
            for i in range(2):
                rows.append([op, *({**call, "id": i}[f] for f in names["OpNode"])])
            outer = list(empty)
            outer[at["name"]], outer[at["ops"]] = f"g{depth}", [last + first, last + first + 1]
            outer[at["tensors"]], outer[at["outputs"]] = [], []
            outer[at["constant_values"]], outer[at["hints"]] = [], []
            outer[at["templates"]] = [["t", last + first - 1]]
            rows.append(outer)
        plan = list(document["rows"][-1])
        plan[1 + list(names["Plan"]).index("graph")] = last + len(rows) - 1
        document["rows"] = [*base, *rows, plan]
        assert layouts != graphs

    assert "call each other too often" in refusal(path, edited(doubled))


def test_user_s_op_must_be_defined_where_a_plan_is_read(path, monkeypatch):
    """A file names ops; it imports nothing. The error names the missing op."""
    small().save(path)
    assert Plan.load(path).digest() == small().digest()
    monkeypatch.delitem(ops._OPS, op_named("rope").name)
    assert re.search(r"ops must be registered before use; got 'rope'", refusal(path))
