"""Logging and its variable: levels by name, one handler, other words rejected."""

from __future__ import annotations

import logging

import pytest

from tilewise.core import ConfigError, get_logger
from tilewise.core.environment import read
from tilewise.core.log import configure_logging


@pytest.fixture
def root():
    """Tilewise's root logger without handlers; restored afterwards."""
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
def test_variable_sets_the_level(root, value, shown, monkeypatch, capsys):
    """Records of at least this level go to standard error, once, however often logging is configured."""
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


def test_unknown_level_is_rejected(root, monkeypatch):
    """The error names the word, and nothing is configured."""
    monkeypatch.setenv("TILEWISE_LOG", "loud")
    with pytest.raises(ConfigError, match="one of debug, info, warning, error; got 'loud'"):
        configure_logging()
    assert root.handlers == []


def test_variables_outside_the_table_are_not_read(monkeypatch):
    """The environment is read only through the table."""
    monkeypatch.setenv("TILEWISE_SECRET", "1")
    with pytest.raises(ConfigError, match="must be in `VARIABLES`; got 'TILEWISE_SECRET'"):
        read("TILEWISE_SECRET", "")
