"""Every Python of this machine from 3.10 on: the package is built, installed and used in a new
environment with only its dependencies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINORS = range(10, 15)
HEADS = "import json, sys; print(json.dumps([sys.version_info[1], sys.executable]))"
TESTS = ("pytest", "hypothesis")
pytestmark = pytest.mark.soak


def interpreter(minor: int) -> str | None:
    """A working Python 3.`minor`, on PATH or through a version manager's shim."""
    name = f"python3.{minor}"
    candidates = [name]
    shim = shutil.which(name)
    if shim:
        interpreters = sorted(Path(shim).parents[1].glob(f"versions/3.{minor}.*/bin/{name}"))
        candidates += [str(path) for path in interpreters]
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", HEADS], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        version, path = json.loads(done.stdout)
        if version == minor:
            return str(path)
    return None


def call(*command: str, cwd: Path, minutes: int = 15) -> None:
    """Run a command outside this process's environment; its output is the failure's message."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST"))
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60 * minutes, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("minor", MINORS)
def test_package_builds_and_runs(minor, tmp_path):
    """pip builds and installs the tree; tests without heavy dependencies, and the examples, pass."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"needs Python 3.{minor} (python3.{minor} on PATH, or installed by a version manager)")
    call(python, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    own = str(tmp_path / "venv" / "bin" / "python")
    options = ["--quiet", "--disable-pip-version-check", f"--config-settings=build-dir={tmp_path / 'build'}"]
    call(own, "-m", "pip", "install", *options, str(ROOT), cwd=tmp_path, minutes=30)
    for example in sorted((ROOT / "examples").glob("[0-9]*.py")):
        call(own, str(example), cwd=tmp_path)
    call(own, "-m", "pip", "install", *options[:2], *TESTS, cwd=tmp_path)
    call(own, "-m", "pytest", "-p", "no:cacheprovider", "tests/pure", "-m", "not slow and not soak", cwd=ROOT)
