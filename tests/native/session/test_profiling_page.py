"""The program and the commands of docs/profiling.md run, and write what the page says."""

import re
from pathlib import Path

from native.train.small_run import make_config, write_texts, write_toml
from tilewise.cli.main import _run

PAGE = Path(__file__).parents[3] / "docs" / "profiling.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """The program profiles two devices; the first command traces a training."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    (program,) = (code for kind, code in blocks if kind == "python")
    exec(compile(program, "docs/profiling.md", "exec"), {"__name__": PAGE.name})
    printed = capsys.readouterr().out
    assert printed.startswith("four layers: ") and "on 2 devices with 2 workers each." in printed
    assert "Transfers took" in printed and Path("trace.html").is_file() and Path("trace.json").is_file()
    commands = [code.split()[1:] for kind, code in blocks if kind == "bash"]
    assert commands[1] == ["launch", "-n", "2", *commands[0]]
    data = {"held_out_percent": 0}
    small = make_config(write_texts(tmp_path / "texts"), tmp_path / "model", {"dp": 2}, data=data)
    write_toml(small, Path("train.toml"))
    assert _run([*commands[0][:-1], "train.steps=3"]) == 0
    assert {path.name for path in Path("trace").iterdir()} == {"trace.html", "trace.json"}
