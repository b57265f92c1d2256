"""Users choose the names of axes and labels: no stage after the strategy depends on one."""

import ast
from functools import cache

from policy.source import PACKAGE, python_files, relative, tree_of
from tilewise.kernels import KERNELS

# What reads layouts and labels as data; strategies and models are where names are given.
ROOMS = ("core/mesh.py", "core/tree.py", "graph", "ir", "optim", "plan", "runtime", "session")
COMING = {"fsdp", "pp", "cp", "ep", "stage", "seq", "experts"}


@cache
def _named_by_kernels():
    """Names of operands, integers and dims in the kernel table."""
    names = {name for spec in KERNELS.values() for name in spec.dims}
    return names | {item.name for spec in KERNELS.values() for item in (*spec.operands, *spec.ints)}


def _literals(path):
    """String literals of a file that are values: no docstrings, parts of f-strings, or integers of kernels."""
    skipped = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.Dict):  # what a kernel is given has the names of its table
            skipped.update(
                k for k in node.keys if isinstance(k, ast.Constant) and k.value in _named_by_kernels()
            )
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def _names_given():
    """Names of declared labels, and of axes that strategies map."""
    names = set(COMING)
    for path in python_files("src"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DimLabel":
                names.update(a.value for a in node.args[:1] if isinstance(a, ast.Constant))
    for node in ast.walk(tree_of(PACKAGE / "strategy" / "strategy.py")):
        if isinstance(node, ast.Dict):
            parts = [*node.keys, *node.values]
            names.update(p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))
    return {name for name in names if " " not in name}


def _offences(paths, names):
    """Literals that are one of the names, or keyword arguments with one (`dp=2`)."""
    return [
        f"{relative(path)}:{line}: {value!r}"
        for path in paths
        for line, value in _literals(path)
        if value in names or value.partition("=")[0] in names
    ]


def test_names_are_found():
    """The search finds the names of strategies and models."""
    assert {"dp", "tp", "batch", "heads", "kv_heads", "mlp", "vocab"} <= _names_given()


def test_no_stage_uses_a_name_of_an_axis_or_a_label():
    """Ops, plans and sessions use only layouts and roles; axes `a` and `b` work like any others."""
    rooms = [PACKAGE / room for room in ROOMS]
    paths = [p for p in python_files("src") if any(p == room or room in p.parents for room in rooms)]
    assert len(paths) > 60
    bad = _offences(paths, _names_given())
    assert not bad, "literals that name an axis or a label:\n" + "\n".join(bad)


def test_a_name_is_detected(tmp_path, monkeypatch):
    """The twin: a comparison with an axis, a key and a default are found; docstrings, messages and
    other words are not.
    """
    source = '"""Shards `dp`."""\nAXIS = "tp"\nif AXIS == "dp":\n    f("data", {"batch": f"{AXIS}, batch"})\n'
    path = tmp_path / "x.py"
    path.write_text(source)
    monkeypatch.setattr("policy.source.ROOT", tmp_path)
    names = {"dp", "tp", "batch"}
    assert [o.partition(":")[2] for o in _offences([path], names)] == ["2: 'tp'", "3: 'dp'", "4: 'batch'"]
