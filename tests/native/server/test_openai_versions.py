"""The other major version of the `openai` client (2.x or 3.x) behaves like the installed one."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_other_client_version_passes(tmp_path):
    """All tests of the client pass with it; skipped if it cannot be installed."""
    other = {"2": "3", "3": "2"}[version("openai").split(".")[0]]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), f"openai=={other}.*"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"openai {other}.x cannot be installed here: {done.stderr.strip()[-200:]}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    show_version = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    reported = subprocess.run(show_version, env=environment, capture_output=True, text=True, check=True)
    assert reported.stdout.startswith(f"{other}.")
    files = [str(HERE / f"test_openai_{name}.py") for name in ("client", "retries")]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-m", "not soak"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
