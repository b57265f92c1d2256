"""The examples of docs/distributed.md run and print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from native.session.printed_pages import BLOCK, differences
from support.hosts import missing

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_every_block_prints_what_the_page_shows():
    """Equal results over two processes, three devices, and the loss of one."""
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "instead", "block"),
    [("2 processes, equal", "2 processes, DIFFERENT", 1), ("[0, 0, 0, 1", "[0, 0, 1, 1", 2)],
)
def test_a_wrong_page_is_detected(what, instead, block):
    """The twin: a changed word or number in an output is detected, with its block."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(what) == 1
    assert differences(PAGE.name, text.replace(what, instead)) == [block]


def prepare(folder):
    """Prepares the folder of the page's commands; returns those that run here and those that run on hosts."""
    text = PAGE.read_text(encoding="utf-8")
    (configuration,) = re.findall(r"^```toml\n# train.toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (folder / "train.toml").write_text(configuration)
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    blocks = COMMANDS.findall(text)
    return [block for block in blocks if "node1" not in block[0]], [
        block for block in blocks if "node1" in block[0]
    ]


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    """`verify` reports equality; a model is trained and generates over two processes."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    blocks, _ = prepare(tmp_path)
    assert len(blocks) == 3
    for block, printed in blocks:
        done = subprocess.run(
            ["bash", "-euc", block], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        if printed:
            assert done.stdout == printed


@pytest.mark.slow
def test_the_recipe_for_two_hosts_on_one_machine_runs(tmp_path):
    """With names and addresses that no other run uses."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    prepare(tmp_path)
    (recipe,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    own = f"tw{os.getpid()}n"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euc", recipe.replace("node$i", own + "$i").replace("node${", own + "${")]
    command[-1] = command[-1].replace("node1", own + "1").replace("node2", own + "2")
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    finally:
        for number in (1, 2):
            subprocess.run(["ip", "netns", "del", f"{own}{number}"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dp=2 equals one device to the bit")


@pytest.mark.slow
def test_every_command_for_hosts_runs(tmp_path, two_hosts):
    """The same commands with the hosts of this machine, reached by a stand-in for ssh."""
    folder = Path(sys.executable).parent
    path = f"{folder}:{os.environ['PATH']}"
    _, blocks = prepare(tmp_path)
    assert len(blocks) == 2
    for block, printed in blocks:
        line = block.replace("node1,node2", ",".join(two_hosts.names))
        line = line.replace("launch -n 2", f"launch -n 2 --launcher-exec {two_hosts.launcher}")
        line = line.replace("mpiexec", f"mpiexec -launcher ssh -launcher-exec {two_hosts.launcher}")
        line = line.replace(
            "tilewise train", f"{folder}/tilewise train"
        )  # mpiexec looks for it next to itself
        words = two_hosts.inside(two_hosts.names[0], ["bash", "-euc", f"PATH={path}; {line}"])
        process = two_hosts.start(words, cwd=tmp_path)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, (block, out, err)
        if printed:
            assert out == printed
