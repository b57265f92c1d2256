"""A setting is declared once: every interface has it, with the declared type, default, range and help."""

import ast
import dataclasses
from pathlib import Path

import pytest
from typer.main import get_command

from tilewise.checkpoint.generation import _GenerationConfig
from tilewise.cli.main import app
from tilewise.cli.options import Options
from tilewise.core import ConfigError
from tilewise.serve import SamplingParams
from tilewise.server import ServerSettings
from tilewise.server.requests.bodies import ChatBody, CompletionBody, ResponseBody
from tilewise.settings import EngineSettings, Sampling, json_type, setting, settings_of

ROOT = Path(__file__).parents[3]
SAMPLING = settings_of(SamplingParams)
COMMANDS = get_command(app).commands


def option_names(command):
    """All names of a command's options."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def table(rows):
    """A Markdown table; the first row is its head."""
    head, *rest = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def option_cell(one):
    """First name of a setting's option."""
    return f"`{one.option_names[0].split('/')[0]}`" if one.on_command_line else ""


def sampling_table():
    """Every setting of `SamplingParams`."""
    rows = [("setting", "default", "range", "what it does", "`generate`", "HTTP")]
    for one in SAMPLING.values():
        http = "yes, and `/v1/responses`" if one.in_response_body else "yes" if one.in_body else ""
        rows.append((f"`{one.name}`", one.written_default, one.range_text, one.help, option_cell(one), http))
    return table(rows)


def settings_table(group):
    """Every setting of a group, with its option."""
    rows = [("setting", "default", "range", "option", "what it does")]
    for one in settings_of(group).values():
        rows.append((f"`{one.name}`", one.written_default, one.range_text, option_cell(one), one.help))
    return table(rows)


@pytest.mark.parametrize("name", SAMPLING)
def test_each_sampling_setting_is_in_every_interface(name):
    """The command line, bodies of requests, generation_config.json, the resolved form and the docstring have it."""
    one = SAMPLING[name]
    in_generate = set(one.option_names) <= option_names(COMMANDS["generate"])
    assert in_generate == one.on_command_line
    for body, has_field in (
        (CompletionBody, one.in_body),
        (ChatBody, one.in_body),
        (ResponseBody, one.in_response_body),
    ):
        if has_field:
            assert body.model_fields[name].default is None
            assert one.help in str(body.model_json_schema()["properties"][name])
    if one.in_file in ("always", "sampling"):
        assert name in _GenerationConfig.model_fields
    assert f"\n        {name}: " in SamplingParams.__doc__
    assert {*settings_of(Sampling)} <= {*SAMPLING}


@pytest.mark.parametrize("group", [SamplingParams, Sampling, EngineSettings, ServerSettings])
def test_declared_ranges_hold(group):
    """Values at the bounds of a setting are accepted, values beyond them are rejected by its name."""
    for name, one in settings_of(group).items():
        beyond = [*([one.low - 1] if one.low is not None else []), *([one.high + 1] if one.high else [])]
        beyond += [one.low] if one.is_low_excluded else []
        beyond += ["colour"] if one.choices else []
        for value in beyond:
            if value == float("inf"):
                value = float("nan")
            with pytest.raises(ConfigError, match=name):
                group(**{name: value})


@pytest.mark.parametrize(("command", "group"), [("serve", EngineSettings), ("serve", ServerSettings)])
def test_each_server_setting_has_an_option(command, group):
    """`tilewise serve` has every setting that is declared for the command line, with its help text."""
    params = {param.name: param for param in COMMANDS[command].params}
    for name, one in settings_of(group).items():
        assert (name in params) == one.on_command_line
        if name in params and name != "generation_config":  # `serve` spells this one as vLLM does
            assert params[name].help.startswith(one.help)


@pytest.mark.parametrize(
    ("page", "made"),
    [
        ("inference.md", sampling_table()),
        ("inference.md", settings_table(EngineSettings)),
        ("serving.md", settings_table(ServerSettings)),
    ],
    ids=["sampling", "engine", "server"],
)
def test_tables_of_the_documentation_match_the_declarations(page, made):
    """Rows of the pages' tables are made from the declarations; on failure the expected table is printed."""
    assert made in (ROOT / "docs" / page).read_text("utf-8"), f"docs/{page} must have this table:\n\n{made}"


def test_setting_is_named_only_where_declared_and_used():
    """No module of the command line, the server or the engine repeats the name of `min_p`, an ordinary setting."""
    named = {
        path.relative_to(ROOT / "src" / "tilewise").as_posix()
        for path in (ROOT / "src" / "tilewise").rglob("*.py")
        if "min_p" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Constant) and node.value == "min_p")
        or (isinstance(node, ast.Attribute) and node.attr == "min_p")
        or (isinstance(node, ast.arg) and node.arg == "min_p")
        or (isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "min_p")
    }
    assert named == {"settings/sampling.py"}


def test_declared_field_is_checked_and_has_an_option():
    """Declaring a field is enough: checks, options and JSON types have it."""

    @dataclasses.dataclass(frozen=True)
    class More(Sampling):
        top_a: float = setting(0.0, "A new setting.", low=0.0, high=1.0, in_body=True)

    one = settings_of(More)["top_a"]
    assert one.option_names == ("--top-a",) and one.range_text == "0 to 1"
    assert "top_a" in {parameter.name for parameter in Options(More).parameters()}
    assert json_type(one).__metadata__[0].description == "A new setting."
    with pytest.raises(ConfigError, match="top_a must lie in"):
        More(top_a=2.0)
