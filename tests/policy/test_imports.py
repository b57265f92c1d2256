"""Allowed imports between packages; imports inside functions count."""

import ast
import re
from graphlib import TopologicalSorter

from policy.source import NATIVE, PACKAGE, imports_of, native_files, python_files, relative, tree_of

STAGES = (
    "core processes files settings formats ir graph strategy plan kernels comm observe runtime checkpoint "
    "session nn optim models"
)
ALLOWED = {
    "core": "",
    "processes": "core",
    "files": "core",
    "settings": "core",
    "formats": "core",  # what the bytes of quantised weights mean
    "ir": "core files formats",
    # elementwise ops are what the table of kernels says; what was watched is written as other traces are
    "graph": "core files processes formats ir kernels observe",
    "strategy": "core files ir",
    # what a kernel needs and costs stands in its table; a plan draws its own page
    "plan": "core files processes formats ir kernels observe",
    "kernels": "core formats ir",
    "comm": "core processes files ir kernels",  # programs of users run kernels
    "observe": "core files ir",  # pure functions over graphs, and over records that the runtimes hand to it
    "runtime": "core processes ir kernels comm observe",
    "tile": "runtime",  # its functions are made by the build and use `runtime.tile_calls`
    "tensor": "core kernels runtime",
    "checkpoint": "core files processes settings formats ir runtime",
    # a session completes a graph with its optimizer's update, so it knows what an optimizer is
    "session": "core files processes formats ir graph strategy plan kernels comm observe runtime checkpoint optim",
    # programs of users, which become programs of a plan or a part of one
    "tiles": "core processes ir plan kernels comm observe runtime session",
    "distributed": "core comm runtime session",  # what a worker of a group does; everything else is the leader's
    "nn": "core ir graph",
    "optim": "core ir graph kernels",  # what steps of an update compute
    # a family says how files hold its parameters; its layers may be described next to one another
    "models": "core files formats ir graph nn strategy checkpoint",
    "data": f"{STAGES}",
    "generate": f"{STAGES} data",
    "encode": f"{STAGES} generate",
    "train": f"{STAGES} data generate",
    "serve": f"{STAGES} data generate encode",
    # between HTTP and the engine; knows no graph
    "server": "core files processes settings comm distributed models checkpoint generate encode serve",
    "machine": "core kernels comm",  # which MPI there is
    "cli": f"{STAGES} tiles machine distributed data generate encode train serve server tilewise",
    "tilewise": f"{STAGES} tiles distributed serve cli",  # `python -m tilewise`
}
NATIVE_MODULE_USERS = {"kernels", "comm", "runtime"}
NATIVE_ALLOWED = {
    "base": "",
    "checker": "base",  # for tests alone
    "protocols": "base",
    "memory": "base",
    "kernels": "base protocols memory",
    "comm": "base protocols memory",
    "weights": "base kernels",
    "tiles": "base kernels tilewise",
    "tasks": "base protocols tilewise",
    "include": "tilewise",  # the public headers
    "programs": "base protocols memory kernels comm tasks tilewise",
    "bind": "base protocols memory kernels weights comm programs tilewise",
}
# Rooms of native/tasks; `tasks` stands for the files at its root.
ROOMS_ALLOWED = {
    "regions": "",
    "store": "regions",
    "order": "regions store",
    "sched": "regions store",
    "observe": "regions store sched",
    "engine": "regions store order sched observe",
    "run": "regions store order sched observe engine",
    "wait": "regions store sched observe engine run",
    "submit": "regions store order sched observe engine run wait",
    "replay": "regions store order sched engine run wait submit",
    "tasks": "store sched engine replay run wait",
    "embed": "regions store order sched observe engine run wait submit tasks",
    "api": "store order sched observe engine run wait submit replay tasks",
}
PLAN_STAGES = ("schedule", "lower", "place", "bind", "prove", "make")


def _package(path):
    """The package of a file; `tilewise` for the files at the root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "tilewise"


def _imported_packages(path):
    """Line and package of every import of Tilewise's own packages; `tilewise` is the public package."""
    for line, module, names in imports_of(path):
        if module == "tilewise":
            for name in names or ("",):
                yield line, name if name and ((PACKAGE / name).is_dir() or name == "_native") else "tilewise"
        elif module.startswith("tilewise."):
            yield line, module.split(".")[1]


def test_packages_import_only_allowed_ones():
    """The import table holds, also for imports inside functions."""
    bad = []
    for path in python_files("src"):
        me = _package(path)
        for line, other in _imported_packages(path):
            allowed = me in NATIVE_MODULE_USERS if other == "_native" else other in ALLOWED[me].split()
            if other != me and not allowed:
                bad.append(f"{relative(path)}:{line}: {me} imports {other}")
    assert not bad, "forbidden imports:\n" + "\n".join(bad)


def test_no_stage_of_planning_imports_a_later_one():
    """Files of `plan` that are no stage are shared by all, and import none but through `plan` itself."""
    later = {name: PLAN_STAGES[n + 1 :] for n, name in enumerate(PLAN_STAGES)}
    seen, bad = set(), []
    for path in python_files("src/tilewise/plan"):
        me = path.relative_to(PACKAGE / "plan").with_suffix("").parts[0]
        seen.add(me)
        for line, module, _ in imports_of(path):
            other = (module.removeprefix("tilewise.plan.").split(".") or [""])[0]
            if module.startswith("tilewise.plan.") and other in later.get(me, ()):
                bad.append(f"{relative(path)}:{line}: {me} imports {other}")
    assert not bad and {*PLAN_STAGES} <= seen, bad


def test_the_import_table_has_no_cycle():
    """Except for the public package, which has no code."""
    before = {
        name: set(allowed.split()) - {"tilewise"} for name, allowed in ALLOWED.items() if name != "tilewise"
    }
    assert next(iter(TopologicalSorter(before).static_order())) == "core"  # a circle raises CycleError


def _type_only_lines(path):
    """Lines below `if TYPE_CHECKING:`, whose imports are not executed."""
    return {
        node.lineno
        for block in ast.walk(tree_of(path))
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in block.body
    }


def test_modules_have_no_import_cycle():
    """Also by imports inside functions; imports for types do not count."""
    name_of = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_files("src")
    }
    before = {name: set() for name in name_of}
    for name, path in name_of.items():
        ignored = _type_only_lines(path)
        for line, module, names in imports_of(path):
            if line not in ignored:
                targets = {f"{module}.{n}" if f"{module}.{n}" in name_of else module for n in names} or {
                    module
                }
                before[name] |= {target for target in targets if target in name_of and target != name}
    TopologicalSorter(before).prepare()  # raises CycleError, which names the circle


def test_no_relative_imports():
    """A module has the same name everywhere."""
    bad = [
        f"{relative(p)}:{line}"
        for p in python_files("src")
        for line, module, _ in imports_of(p)
        if module[:1] == "."
    ]
    assert not bad, "relative imports:\n" + "\n".join(bad)


def test_every_package_is_in_the_table():
    """A new package needs a line in the import table."""
    unknown = [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ALLOWED]
    assert not [name for name in unknown if name != "__pycache__"]


def test_native_folders_include_only_allowed_ones():
    """base <- {protocols, memory} <- {kernels, comm, tasks} <- {tiles, programs} <- bind. Only tests include
    checker.
    """
    bad = []
    for path in native_files():
        me = path.relative_to(NATIVE).parts[0]
        allowed = NATIVE_ALLOWED[me].split() + ["checker"] * path.stem.endswith("_test")
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"([a-z]+)/', text)
            if match and match[1] != me and match[1] not in allowed:
                bad.append(f"{relative(path)}:{line}: {me} includes {match[1]}")
    assert not bad, "forbidden includes:\n" + "\n".join(bad)


def _room(parts):
    return parts[1] if len(parts) > 2 else parts[0]


def test_parts_of_the_task_runtime_include_only_allowed_ones():
    """regions <- store <- {order, sched} <- observe <- engine <- run <- wait <- submit <- replay <- {embed, api}."""
    bad = []
    for path in native_files():
        parts = path.relative_to(NATIVE).parts
        if parts[0] != "tasks" or path.stem.endswith("_test") or path.stem.startswith("testing_"):
            continue
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"(tasks/[a-z_/]+)\.h', text)
            if not match:
                continue
            me, other = _room(parts), _room(match[1].split("/"))
            if other != me and other not in ROOMS_ALLOWED[me].split():
                bad.append(f"{relative(path)}:{line}: {me} includes {other}")
    assert not bad, "forbidden includes:\n" + "\n".join(bad)


def test_every_part_of_the_task_runtime_is_in_the_table():
    """A new folder needs a line."""
    rooms = {path.name for path in (NATIVE / "tasks").iterdir() if path.is_dir()}
    assert rooms - {"tests"} == set(ROOMS_ALLOWED) - {"tasks"}


def test_only_bindings_use_python():
    """Only native/bind includes nanobind and Python headers."""
    bad = [
        relative(path)
        for path in native_files()
        if path.relative_to(NATIVE).parts[0] != "bind"
        and re.search(r"#\s*include\s+[<\"](nanobind|Python\.h)", path.read_text(encoding="utf-8"))
    ]
    assert not bad
