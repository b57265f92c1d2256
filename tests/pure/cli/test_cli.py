"""The command line: help worth reading, one line per mistake, exit codes."""

import subprocess
import sys

import pytest

from tilewise.cli.main import main
from tilewise.core import ConfigError, ResourceError


def _run(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    output = capsys.readouterr()
    return exit_.value.code, output.out, output.err


@pytest.mark.parametrize("command", ["demo", "train", "generate", "verify"])
def test_every_command_has_help_with_an_example(command, capsys):
    """Help explains the command and shows how to call it."""
    code, out, _ = _run([command, "--help"], capsys)
    assert code == 0
    assert f"Example: tilewise {command}" in " ".join(out.split())


def test_help_lists_all_commands(capsys):
    """The program's help names its commands and where to start."""
    code, out, _ = _run(["--help"], capsys)
    assert code == 0
    assert all(command in out for command in ("demo", "train", "generate", "verify"))


def test_no_arguments_show_the_help(capsys):
    """Called without anything, it explains itself."""
    code, out, _ = _run([], capsys)
    assert code == 0 and "Commands" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "Missing argument"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["fly"], "No such command"),
        (["generate", "nowhere", "hello", "--wings", "2"], "--wings"),
        (["generate", "nowhere", "hello", "--tp", "0"], "--tp"),
        (["generate", "nowhere", "hello"], "config.json"),
        (["generate", "nowhere", "hello", "--top-p", "2"], "top_p"),
        (["demo", "--minutes", "soon"], "--minutes"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, words, capsys):
    """A wrong argument or a missing file is one line on standard error."""
    code, out, err = _run(arguments, capsys)
    assert code == 2 and out == ""
    assert words in err and err.startswith("tilewise: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("[x.y] a\nb"), 2), (ResourceError("[x.y] full"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_while_working_are_one_line(error, code, capsys, monkeypatch):
    """Errors that escape a command become one line and an exit code of their kind."""

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("tilewise.train.load_config", fail)
    got, _, err = _run(["train", "x.toml"], capsys)
    assert got == code and err.count("\n") <= 1 and "Traceback" not in err


def test_help_imports_nothing_heavy():
    """Help is quick because heavy packages are imported by the commands that need them."""
    script = (
        "import sys\nfrom tilewise.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = "
        "{'torch', 'pydantic', 'matplotlib', 'tokenizers', 'safetensors', 'transformers', 'tilewise.train'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
