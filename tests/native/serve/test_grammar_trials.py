"""Grammars that would end the process that compiles them are refused, and what comes after them is answered."""

import json
import os
import signal
import subprocess
import sys

import pytest

from native.serve.serving_models import save_model
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
    """A grammar whose rules are each part of the one before."""
    rows = [f'r{n}: "x{n}" r{n + 1}' for n in range(count)]
    return "\n".join(["start: r0", *rows, f'r{count}: "y"'])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def grammars(model_dir):
    tokenizer = load_tokenizer(model_dir, 1 << 20)
    return Grammars(tokenizer, [0])


@pytest.mark.parametrize(
    "deep",
    [StructuredOutputsParams(json=references(3000)), StructuredOutputsParams(grammar=rules(4000))],
    ids=["references", "rules"],
)
def test_what_leads_too_deep_is_refused(grammars, deep):
    """The process that tries it out ends, this one does not; the next grammar is tried out in another."""
    with pytest.raises(ConfigError, match="nested too deeply"):
        grammars.prepare(deep)
    assert grammars.prepare(PLAIN).copy().allowed().any()


def test_what_is_large_and_harmless_is_followed(grammars):
    """Eighty references are within the limits; mistakes of large grammars are said as those of small ones."""
    assert grammars.prepare(StructuredOutputsParams(json=references(80))).copy().allowed().any()
    wrong = "start: other\n" + "\n".join(f'unused{place}: "x"' for place in range(300))
    with pytest.raises(ConfigError, match="other"):
        grammars.prepare(StructuredOutputsParams(grammar=wrong))


def test_processes_that_die_or_are_late_are_replaced(grammars, monkeypatch):
    """One that was killed while it waited costs nothing but a start; one that takes too long ends its grammar alone."""
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
def test_without_a_trial_the_process_ends(model_dir):
    """The planted fault: compiled at once, the same schema is the end of a process."""
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
    given = json.dumps(references(3000))
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_dir)], input=given, text=True, capture_output=True
    )
    assert done.returncode == -signal.SIGSEGV
