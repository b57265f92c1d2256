"""Public names: each module has `__all__`, and it is correct."""

import ast

from policy.source import PACKAGE, exported, imports_of, python_files, relative, tree_of


def _defined(path):
    """Names that a module binds at its top level."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))
    if path.name == "__init__.py":
        names.update(p.stem for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".py")
    return names


def _has_lazy_names(path):
    """Whether a module has `__getattr__`."""
    return any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree_of(path).body
    )


def test_every_module_has_all():
    """Every module and package has `__all__`."""
    bad = [
        relative(path)
        for path in python_files("src")
        if exported(path) is None and path.name != "__main__.py"
    ]
    assert not bad, "without __all__:\n" + "\n".join(bad)


def test_exported_names_exist_and_are_public():
    """`__all__` names existing public names."""
    bad = []
    for path in python_files("src"):
        names = exported(path) or []
        missing = set(names) - _defined(path)
        if missing and not _has_lazy_names(path):
            bad.append(f"{relative(path)}: {', '.join(sorted(missing))}")
        bad += [
            f"{relative(path)}: {name} is private"
            for name in names
            if name[0] == "_" and name != "__version__"
        ]
        bad += [f"{relative(path)}: {name} twice" for name in set(names) if names.count(name) > 1]
    assert not bad, "exported but not there:\n" + "\n".join(bad)


MADE_BY_THE_BUILD = ("tilewise.tile.functions", "tilewise.tensor.functions")  # exported as a whole


def test_packages_export_their_imports():
    """Names that a package's `__init__` imports from its modules are in its `__all__`."""
    bad = []
    for path in python_files("src"):
        if path.name == "__init__.py":
            inside = f"tilewise.{'.'.join(path.relative_to(PACKAGE).parts[:-1])}".rstrip(".")
            for line, module, names in imports_of(path):
                if module.startswith(inside) and module not in MADE_BY_THE_BUILD:
                    bad += [f"{relative(path)}:{line}: {n}" for n in names if n not in (exported(path) or [])]
    assert not bad, "gathered but not exported:\n" + "\n".join(bad)


def test_packages_use_only_public_names_of_others():
    """Names imported from another package are in that module's `__all__`."""
    bad = []
    for path in python_files("src"):
        mine = path.relative_to(PACKAGE).parts[0]
        for line, module, names in imports_of(path):
            if not module.startswith("tilewise.") or module.split(".")[1] in (mine, "_native"):
                continue
            target = PACKAGE.joinpath(*module.split(".")[1:])
            file = target / "__init__.py" if target.is_dir() else target.with_suffix(".py")
            offered = set(exported(file) or []) if file.is_file() else set()
            bad += [
                f"{relative(path)}:{line}: {module}.{name}"
                for name in names
                if not _is_offered(target, name, offered)
            ]
    assert not bad, "not public:\n" + "\n".join(bad)


def _is_offered(target, name, offered):
    return name in offered or (target / f"{name}.py").is_file() or (target / name).is_dir()
