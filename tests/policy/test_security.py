"""The promises of SECURITY.md: files are data, and the network is not used."""

import ast
import re

from policy.source import imports_of, native_files, python_files, relative, tree_of

UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "yaml"}
NETWORK = {"socket", "socketserver", "ssl", "http", "urllib", "ftplib", "xmlrpc", "requests", "httpx", "aiohttp",
           "multiprocessing", "huggingface_hub"}  # fmt: skip
PROGRAMS = {"subprocess", "pty"}
# The few modules that may, each for what SECURITY.md says of it.
MAY = {
    "src/tilewise/checkpoint/hub.py": {"huggingface_hub"},
    "src/tilewise/processes/workers.py": {"multiprocessing"},  # children of this process, and pipes to them
    "src/tilewise/cli/build_mpi.py": {"subprocess"},  # mpicc, and this Python to load what it has built
    "src/tilewise/processes/children.py": {
        "socket",
        "subprocess",
    },  # children of this Python, and a pair of sockets to each
    # mpiexec, where `tilewise launch --hosts` asks for it; what that starts, which knows its host's name and starts the
    # command that it is given
    "src/tilewise/cli/launch/over_mpi.py": {"subprocess"},
    "src/tilewise/cli/launch/stand_in.py": {"socket", "subprocess"},
    "src/tilewise/comm/channel.py": {"socket"},  # the other end of such a pair; no address, no port
    # the server: listens, and talks to the engine's process
    "src/tilewise/server/run.py": {"socket", "ssl"},
    "src/tilewise/server/lifecycle.py": {"socket", "ssl"},
    "src/tilewise/server/link/engine_process.py": {"socket"},
    "src/tilewise/server/guard.py": {"socket"},  # the name of this machine
    # requests to the server of `tilewise bench serve`; urllib to read its address
    "src/tilewise/server/load/target.py": {"ssl", "urllib"},
}
EVALUATES = {"eval", "exec", "compile", "__import__"}


def _called(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_own = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("re",)
            yield node.lineno, name, is_own


def test_no_unpickling_connections_or_programs():
    """No module that executes its input, opens connections or starts programs is imported, except
    where this file lists it.
    """
    refused = UNPICKLES | NETWORK | PROGRAMS
    bad = [
        f"{relative(path)}:{line}: {module}"
        for path in python_files("src")
        for line, module, _ in imports_of(path)
        if module.split(".")[0] in refused - MAY.get(relative(path), set())
    ]
    assert not bad


def test_nothing_is_evaluated():
    """No eval, exec or compile, and no array is loaded from a pickle."""
    bad = [
        f"{relative(path)}:{line}: {name}"
        for path in python_files("src")
        for line, name, is_own in _called(path)
        if (name in EVALUATES and not is_own) or name in ("from_pickle", "read_pickle")
    ]
    bad += [
        relative(path)
        for path in python_files("src")
        if "allow_pickle=True" in path.read_text(encoding="utf-8")
    ]
    assert not bad


def test_native_code_uses_no_network():
    """No native source includes socket headers."""
    pattern = re.compile(r"#\s*include\s+<(sys/socket|netinet/\w+|arpa/inet|netdb)\.h>")
    assert not [relative(path) for path in native_files() if pattern.search(path.read_text(encoding="utf-8"))]
