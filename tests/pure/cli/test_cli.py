"""The command line: help texts, one line per user error, exit codes."""

import re
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from typer.main import get_command

from tilewise.__main__ import main as begin
from tilewise.cli.main import app, main
from tilewise.core import ConfigError, ResourceError


def _run(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    output = capsys.readouterr()
    return exit_.value.code, output.out, output.err


def _commands(command, path=()):
    """Every command below one, with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))


COMMANDS = dict(_commands(get_command(app)))


def test_help_does_not_break_option_names(capsys, monkeypatch):
    """Each option is on one line at 80 columns; commands that do work show an example."""
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in COMMANDS.items():
        code, out, _ = _run([*path, "--help"], capsys)
        words = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", out))
        assert code == 0 and all(len(line) <= 80 for line in out.splitlines())
        assert not any(word.endswith("-") for word in words), path
        for param in command.params:
            names = [name for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]
            assert set(names) <= words, (path, names)
        is_group = hasattr(command, "commands")
        assert is_group or f"Example: `tilewise {' '.join(path)}" in " ".join(out.split())


@pytest.mark.parametrize("arguments", [[], ["bench"], ["checkpoint"]])
def test_no_arguments_show_the_help(arguments, capsys):
    """Without a subcommand, a group prints its help on standard output."""
    code, out, err = _run(arguments, capsys)
    assert code == 0 and "Commands" in out and not err
    assert arguments or all(command in out for command in ("demo", "train", "generate", "verify"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "Missing argument"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["fly"], "No such command"),
        (["launch", "-n", "0", "train", "nowhere.toml"], "-n"),
        (["launch", "-n", "2"], "COMMAND"),
        (["launch", "-n", "2", "fly"], "No such command"),
        (["launch", "-n", "2", "launch", "-n", "2", "demo"], "must not be `launch`"),
        (["launch", "-n", "2", "train", "nowhere.toml"], "nowhere.toml"),
        (["generate", "nowhere", "hello", "--wings", "2"], "--wings"),
        (["generate", "nowhere", "hello"], "config.json"),
        (["generate", "nowhere", "hello", "--top-p", "2"], "top_p"),
        (["generate", "nowhere", "hello", "--dtype", "i32"], "--dtype"),
        (["demo", "--minutes", "soon"], "--minutes"),
        (["demo", "--minutes", "nan"], "--minutes"),
        (["demo", "--dp", "16"], "--dp"),
        (["demo", "--out", f"{__file__}/out"], "can be written to"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(arguments, words, capsys):
    """A wrong argument or a missing file is one line on standard error."""
    code, out, err = _run(arguments, capsys)
    assert code == 2 and out == ""
    assert words in err and err.startswith("tilewise: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("[x.y] a\nb"), 2),
        (ResourceError("[x.y] full"), 1),
        (OSError(5, "Input/output error"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_during_work_are_one_line(error, code, capsys, monkeypatch):
    """Errors raised by a command become one line and the exit code of their kind."""

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("tilewise.train.plan_run", lambda *_: None)
    monkeypatch.setattr("tilewise.train.load_config", lambda *_: None)
    monkeypatch.setattr("tilewise.train.run_training", fail)
    got, _, err = _run(["train", "x.toml"], capsys)
    assert got == code and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "planner"),
    [
        (["train", "x.toml"], "tilewise.train.plan_run"),
        (["verify", "x.toml", "--mesh", "dp=2"], "tilewise.train.compare_strategy"),
        (["demo"], "tilewise.cli.demo.make_plan"),
    ],
)
def test_too_large_plan_is_rejected_before_work(arguments, planner, capsys, monkeypatch):
    """A plan that does not fit the machine is the user's error: one line, exit code 2, no data read."""
    import tilewise.cli.demo

    def fail(*_args, **_options):
        raise ResourceError("[plan.memory] the plan must fit; got too much; choose smaller sizes")

    monkeypatch.setattr("tilewise.train.load_config", lambda *_: None)
    monkeypatch.setattr(planner, fail)
    monkeypatch.setattr(tilewise.cli.demo, "prepare_data", lambda *_: pytest.fail("data was read"))
    code, out, err = _run(arguments, capsys)
    assert code == 2 and out == "" and "must fit" in err and err.count("\n") == 1


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_verify_prints_its_report(is_equal, code, capsys, monkeypatch):
    """The report is on standard output; a difference is exit code 1."""
    report = SimpleNamespace(equal=is_equal, text="what was compared")
    monkeypatch.setattr("tilewise.train.load_config", lambda *_: None)
    monkeypatch.setattr("tilewise.train.compare_strategy", lambda *_, **__: report)
    assert _run(["verify", "x.toml", "--mesh", "dp=2"], capsys)[:2] == (code, "what was compared\n")


@pytest.mark.parametrize(
    ("again", "words"), [([1, 2], "the same 3 tokens: yes"), ([1, 4], "NO, please report this")]
)
def test_demo_says_whether_one_device_gives_the_same_tokens(again, words, capsys):
    """A single different token is reported."""
    from rich.console import Console

    from tilewise.cli.demo import _say_whether_equal

    several, one = ([SimpleNamespace(tokens=[7]), SimpleNamespace(tokens=ids)] for ids in ([1, 2], again))
    _say_whether_equal(several, one, Console())
    assert words in capsys.readouterr().out


def test_version(capsys):
    """`--version` prints the name and the installed version."""
    code, out, _ = _run(["--version"], capsys)
    assert code == 0 and out == f"tilewise {version('tilewise')}\n"


def test_package_runs_as_the_command():
    """`python -m tilewise` equals `tilewise`, its exit code and the name in its messages included."""
    command = [sys.executable, "-m", "tilewise", "fly"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith("tilewise: No such command 'fly'")


def test_ctrl_c_while_the_command_loads(capsys, monkeypatch):
    """It ends with one line and exit code 130, as later."""

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "tilewise.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tilewise.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        begin()
    assert ended.value.code == 130 and capsys.readouterr().err == "tilewise: interrupted\n"


def test_closed_output_is_not_an_error():
    """With standard output closed by the caller, the command still runs."""
    done = subprocess.run(
        ["/bin/sh", "-c", f"'{sys.executable}' -m tilewise --version >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_never_go_to_standard_output():
    """With standard error closed, only the exit code reports the error."""
    words = f"'{sys.executable}' -m tilewise --nonsense 2>&-"
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_commands_run_after_standard_input_was_read():
    """The error handler of the input's encoding can no longer be changed then, and need not be."""
    words = "import sys; sys.stdin.readline(); from tilewise.cli.main import main; main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", words], input="a\nb\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and "tilewise" in done.stdout


def test_error_lines_are_printable_and_short(capsys):
    """Names with escapes or of any length give one short, printable line."""
    code, _, err = _run(["generate", "x\x1b[2J\n\udcff" + "y" * 10**5, "hello"], capsys)
    assert code == 2 and err.count("\n") == 1 and len(err) < 2100 and all(c.isprintable() for c in err[:-1])
    code, _, err = _run(["generate", "many words " * 10**4, "hello"], capsys)
    assert code == 2 and len(err) < 2100 and err.split("…")[0].endswith(("many", "words"))


def test_help_imports_no_heavy_package():
    """Heavy packages are imported only by the commands that need them."""
    script = (
        "import sys\nfrom tilewise.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = "
        "{'torch', 'pydantic', 'matplotlib', 'tokenizers', 'safetensors', 'transformers', 'tilewise.train'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("arguments", "expected"), [([], (180.0, 750)), (["--minutes", "0.5"], (30.0, 0))])
def test_demo_without_a_time_does_enough_steps(arguments, expected, tmp_path, monkeypatch):
    """The default time may be exceeded on a slow machine; an explicit time is obeyed."""
    import tilewise.cli.demo as demo

    for name in ("make_plan", "_check_tensor_parallel", "prepare_data", "_describe", "_write", "show_stages"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    budgets = []
    monkeypatch.setattr(demo, "TimeBudget", lambda seconds, at_least=0: (seconds, at_least))
    monkeypatch.setattr(demo, "_train", lambda config, data, budget, *_: budgets.append(budget))
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--out", str(tmp_path / "out"), *arguments])
    assert not ended.value.code and budgets == [expected]


@pytest.mark.parametrize("name", ["model", "checkpoints"])
def test_demo_replaces_only_its_own_files(name, tmp_path, capsys):
    """A model or checkpoints that no demo left are not changed."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").touch()
    code, _, err = _run(["demo", "--steps", "1", "--out", str(tmp_path)], capsys)
    assert code == 2 and "without other programs' files" in err
    assert [path.name for path in tmp_path.rglob("*")] == [name, "precious"]
