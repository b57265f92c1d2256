"""docs/distributed.md cannot rot: its Python prints what stands below it, its commands run and print the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from native.session.printed_pages import BLOCK, differences

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_every_block_prints_what_the_page_shows():
    """Equal results over two processes, devices of three, and the loss of one."""
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "instead", "block"),
    [("2 processes, equal", "2 processes, DIFFERENT", 1), ("[0, 0, 0, 1", "[0, 0, 1, 1", 2)],
)
def test_a_page_that_says_something_else_is_noticed(what, instead, block):
    """The twin: another word or number below a block is found, and at that block."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(what) == 1
    assert differences(PAGE.name, text.replace(what, instead)) == [block]


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    """`verify` says that all is equal; a model is trained, and writes, over two processes."""
    text = PAGE.read_text(encoding="utf-8")
    (configuration,) = re.findall(r"^```toml\n# train.toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.toml").write_text(configuration)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            f"def f{number}(x):\n    return x + {number}\n" * 40
        )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    blocks = COMMANDS.findall(text)
    assert len(blocks) == 3
    for block, printed in blocks:
        done = subprocess.run(
            ["bash", "-euc", block], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        if printed:
            assert done.stdout == printed
