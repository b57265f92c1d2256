"""Child processes that run one module's `main`."""

import sys

from tilewise.processes.children import Spawned

MODULE = "import socket\n\ndef main(number):\n    socket.socket(fileno=number).sendall(__file__.encode())\n"


def test_child_imports_what_its_parent_imports(tmp_path, monkeypatch):
    """Of two modules of one name it runs the one first on its parent's path, not the installed one."""
    module = tmp_path / "this.py"  # the standard library has one, too
    module.write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    spawned = Spawned("this", shares_stdout=False)
    output = spawned.link.makefile("rb").read()
    spawned.end()
    assert output.decode() == str(module)
