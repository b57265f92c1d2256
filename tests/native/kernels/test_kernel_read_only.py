"""No kernel writes to an operand that the table calls `in`: concurrent tasks read the same tile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_checks import every_level

from tilewise.kernels import KERNELS

PROGRAM = Path(__file__).with_name("table_calls.py")
NAMES = [name for spec in KERNELS.values() for name in spec.names]


def run_calls(calls):
    """(exit status, last line) of a process that runs these calls; the last line names the call that killed it."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=json.dumps(calls), capture_output=True, text=True, timeout=300
    )
    assert done.returncode <= 0, done.stderr[-2000:]
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


@every_level
def test_inputs_are_not_written(isa):
    """Every kernel and dtype with all inputs on read-only pages."""
    status, last = run_calls([(name, isa, None) for name in NAMES])
    if status == 0:
        assert last == "all returned"
        return
    name = last.split()[0]
    spec = next(s for s in KERNELS.values() if name in s.names)
    reads = sorted({o.name for o in spec.operands if o.role == "in"})
    written = [o for o in reads if run_calls([(name, isa, o)])[0] < 0]
    pytest.fail(f"{name} at level {isa} writes {written}, which the table calls read-only")


@pytest.mark.parametrize(
    "name,operand", [("silu_f32", "out"), ("split_tree_f32", "out"), ("update_bf16", "master")]
)
def test_a_write_is_detected(name, operand):
    """The twin: a written operand on such a page kills the process, which has named the call."""
    status, last = run_calls([(name, "", operand)])
    assert status < 0 and last == f"{name}  {operand}"
