"""Shared by tests of the command line: runs a command in this process."""

import pytest

from tilewise.cli.main import _run


@pytest.fixture
def run(capsys):
    """Run a command line in this process; returns its exit code, standard output and standard error."""

    def call(*arguments):
        code = _run([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call
