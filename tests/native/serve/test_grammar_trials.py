"""Grammars that would crash the compiling process are rejected, and later requests are answered."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tilewise.checkpoint import load_tokenizer
from tilewise.core import ConfigError
from tilewise.serve import StructuredOutputsParams
from tilewise.serve.structured import Grammars

PLAIN = StructuredOutputsParams(choice=[f"number {place}" for place in range(300)])


def references(count):
    """A schema of references, each to the next."""
    rows = {
        f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**rows, f"a{count}": {"type": "string"}}}


def rules(count):
    """A grammar whose rules each contain the previous one."""
    rows = [f'r{n}: "x{n}" r{n + 1}' for n in range(count)]
    return "\n".join(["start: r0", *rows, f'r{count}: "y"'])


@pytest.fixture(scope="module")
def grammars(model_dir):
    tokenizer = load_tokenizer(model_dir, 1 << 20)
    return Grammars(tokenizer, [0])


@pytest.mark.parametrize(
    "deep",
    [StructuredOutputsParams(json=references(3000)), StructuredOutputsParams(grammar=rules(4000))],
    ids=["references", "rules"],
)
def test_too_deep_grammars_are_rejected(grammars, deep):
    """The trial process crashes, this one does not; another process tries the next grammar."""
    with pytest.raises(ConfigError, match="nested too deeply"):
        grammars.prepare(deep)
    assert grammars.prepare(PLAIN).copy().allowed().any()


def test_large_valid_grammars_are_accepted(grammars):
    """Eighty references are within the limits; errors of large grammars are reported like those of small ones."""
    assert grammars.prepare(StructuredOutputsParams(json=references(80))).copy().allowed().any()
    wrong = "start: other\n" + "\n".join(f'unused{place}: "x"' for place in range(300))
    with pytest.raises(ConfigError, match="other"):
        grammars.prepare(StructuredOutputsParams(grammar=wrong))


def test_dead_and_late_processes_are_replaced(grammars, monkeypatch):
    """A process killed while idle costs only a restart; a deadline ends only its grammar."""
    grammars.prepare(PLAIN)
    for process in grammars._trials._idle:
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.wait()
    more = StructuredOutputsParams(choice=[f"word {place}" for place in range(300)])
    assert grammars.prepare(more).copy().allowed().any()
    monkeypatch.setattr("tilewise.serve.grammar_trial._DEADLINE_S", 0.05)
    slow = StructuredOutputsParams(choice=[f"text {place}" for place in range(20_000)])
    with pytest.raises(ConfigError, match="takes more than"):
        grammars.prepare(slow)
    monkeypatch.undo()
    last = StructuredOutputsParams(choice=[f"last {place}" for place in range(300)])
    assert grammars.prepare(last).copy().allowed().any()


@pytest.mark.slow
def test_without_a_trial_the_process_crashes(model_dir):
    """The twin: compiled directly, the same schema crashes the process."""
    program = """
import json, sys
from tilewise.checkpoint import load_tokenizer
from tilewise.serve import StructuredOutputsParams
from tilewise.serve.structured import Grammars
grammars = Grammars(load_tokenizer(sys.argv[1], 1 << 20), [0])
grammars.prepare(StructuredOutputsParams(choice=["a"]))
grammars._trials.problem = lambda source: ""
grammars.prepare(StructuredOutputsParams(json=json.load(sys.stdin)))
"""
    lines = json.dumps(references(3000))
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_dir)], input=lines, text=True, capture_output=True
    )
    assert done.returncode == -signal.SIGSEGV
