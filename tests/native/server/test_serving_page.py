"""The commands and Python of docs/serving.md run in order against the server that the page starts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native.server.served import Served, small_model

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    """The first command starts the server; curl, the client and the other commands print what the page says."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5 and blocks[0][1].startswith("tilewise serve MODEL --port 8000 ")
    (tmp_path / "keys.txt").write_text("secret\n")
    options = [str(tmp_path / word) if word == "keys.txt" else word for word in blocks[0][1].split()[5:]]
    server = Served(small_model(), *options, "--kv-cache-memory", "8M").wait_ready()
    try:
        names = {"KEY": "secret", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for language, block in blocks[1:]:
            text = block.replace("localhost:8000", f"localhost:{server.port}").replace(
                "MODEL", str(small_model())
            )
            if language == "python":
                exec(compile(text, "docs/serving.md", "exec"), {"KEY": "secret"})
            else:
                done = subprocess.run(
                    ["bash", "-euc", text], env={**os.environ, **names}, capture_output=True, cwd=tmp_path
                )
                assert done.returncode == 0, (text, done.stdout, done.stderr)
    finally:
        assert server.close() == 0
