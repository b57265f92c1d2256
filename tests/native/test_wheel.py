"""The wheel of `make wheel`: its platform tags, and its use in an environment with only its dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(400))
CONFIG = """
[model]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
path = "texts"
context = 32
[train]
steps = 4
[output]
directory = "out"
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel for this Python; `make test-slow` builds it first."""
    wheels = list((ROOT / "dist").glob("tilewise-*.whl"))
    if not wheels:
        pytest.skip("needs a wheel in dist: make wheel")
    (path,) = wheels
    return path


def test_the_name_says_manylinux_and_the_stable_abi(wheel):
    """The platform tag is auditwheel's; from Python 3.12 on, one wheel serves all later versions."""
    tags = parse_wheel_filename(wheel.name)[3]
    assert any(re.match(r"manylinux_2_\d+_", tag.platform) for tag in tags)
    assert not any(tag.platform.startswith("linux_") for tag in tags)
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    expected = ("cp312", "abi3") if sys.version_info >= (3, 12) else (own, own)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {expected}


def test_the_wheel_works_without_a_compiler(wheel, tmp_path):
    """pip installs the wheel, all kernel levels of this machine are present, a model is trained and
    generates text.
    """
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"module_{i}.py").write_text(TEXT)
    (tmp_path / "train.toml").write_text(CONFIG)
    bin_folder = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)

    def call(*command: object) -> str:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST"))
        }
        environment |= {"PATH": str(bin_folder), "CC": "missing-compiler", "CXX": "missing-compiler"}
        done = subprocess.run(
            [str(bin_folder / str(command[0])), *map(str, command[1:])],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    call("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    levels = (
        "from tilewise.kernels import isa; print(isa.isa_missing(), isa.isa_in_use() == isa.isa_levels()[-1])"
    )
    assert call("python", "-c", levels).strip() == "[] True"
    call("tilewise", "train", "train.toml")
    assert call("tilewise", "generate", "out/model", "def ", "--max-tokens", 8) not in ("", "\n")
