"""The log and its variable: levels by name, one handler, a refusal for other words."""

from __future__ import annotations

import logging

import pytest

from tilewise.core import ConfigError, get_logger
from tilewise.core.environment import read
from tilewise.core.log import configure_logging


@pytest.fixture
def root():
    """Tilewise's root logger without handlers; put back afterwards."""
    logger = logging.getLogger("tilewise")
    before, level = logger.handlers[:], logger.level
    logger.handlers[:] = []
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ["warning", "error"]), ("", ["warning", "error"]), ("DEBUG", ["debug", "info", "warning", "error"]),
     ("info", ["info", "warning", "error"]), ("error", ["error"])],
)  # fmt: skip
def test_the_variable_names_the_level(root, value, shown, monkeypatch, capsys):
    """What is as grave as the level or graver goes to standard error, once, however often it is configured."""
    if value is None:
        monkeypatch.delenv("TILEWISE_LOG", raising=False)
    else:
        monkeypatch.setenv("TILEWISE_LOG", value)
    configure_logging()
    configure_logging()
    for level in ("debug", "info", "warning", "error"):
        getattr(get_logger("train"), level)("said")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [f"{level.upper()} tilewise.train: said" for level in shown]


def test_another_level_is_refused(root, monkeypatch):
    """A word that is no level is named, and nothing is configured."""
    monkeypatch.setenv("TILEWISE_LOG", "loud")
    with pytest.raises(ConfigError, match="one of debug, info, warning, error; got 'loud'"):
        configure_logging()
    assert root.handlers == []


def test_a_variable_that_stands_in_no_table_is_not_read(monkeypatch):
    """The environment is read through the table alone."""
    monkeypatch.setenv("TILEWISE_SECRET", "1")
    with pytest.raises(ConfigError, match="must be in `VARIABLES`; got 'TILEWISE_SECRET'"):
        read("TILEWISE_SECRET", "")
