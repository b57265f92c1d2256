"""Our declaration of MPI's standard ABI compared with the header of a library that has it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = ROOT / "native" / "comm" / "mpi" / "abi" / "mpi.h"
THEIRS = Path(sys.prefix) / "include" / "mpi_abi.h"
HANDLES = (
    "MPI_COMM_NULL",
    "MPI_COMM_WORLD",
    "MPI_COMM_SELF",
    "MPI_ERRORS_RETURN",
    "MPI_REQUEST_NULL",
    "MPI_BYTE",
)
FIELDS = ("MPI_SOURCE", "MPI_TAG", "MPI_ERROR", "MPI_internal")

pytestmark = pytest.mark.skipif(
    not THEIRS.is_file() or shutil.which("cc") is None,
    reason="needs MPICH's mpi_abi.h (pip install mpich) and a C compiler",
)


def _numbers(text):
    """Names and values of the header's enumeration."""
    (body,) = re.findall(r"^enum \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\s*(MPI_\w+) = (-?\d+),?$", body, re.MULTILINE)


def _functions(text):
    """Every function of the header, as its name and a pointer declaration."""
    return re.findall(r"^int (MPI_\w+)\(([^;]*)\);", text, re.MULTILINE)


def _program(text):
    """A C program that compiles only if the library's header agrees with ours on values, layout and functions."""
    handles = [re.search(rf"^#define {name} (.+)$", text, re.MULTILINE)[1] for name in HANDLES]
    lines = ["#include <mpi_abi.h>", "#include <stddef.h>", "#include <stdint.h>"]
    for name, value in zip(HANDLES, handles):
        lines.append(f'_Static_assert((intptr_t)({name}) == (intptr_t)({value}), "{name}");')
    for name, value in _numbers(text):
        lines.append(f'_Static_assert({name} == {value}, "{name}");')
    lines.append('_Static_assert((intptr_t)MPI_STATUS_IGNORE == 0, "MPI_STATUS_IGNORE");')
    (status,) = re.findall(r"^typedef struct \{\n(.*?)\} MPI_Status;", text, re.MULTILINE | re.DOTALL)
    lines.append(f"typedef struct {{ {status} }} Status;")
    lines.append('_Static_assert(sizeof(Status) == sizeof(MPI_Status), "size of MPI_Status");')
    for field in FIELDS:
        lines.append(
            f'_Static_assert(offsetof(Status, {field}) == offsetof(MPI_Status, {field}), "{field} of MPI_Status");'
        )
    for name, arguments in _functions(text):
        lines.append(f"static int (*const our_{name})({arguments}) = {name};")
    return "\n".join([*lines, "int main(void) { return 0; }", ""])


def _compile(tmp_path, text):
    source = tmp_path / "compare.c"
    source.write_text(_program(text), encoding="utf-8")
    command = ["cc", "-std=c11", "-Werror", "-Wno-unused", "-fsyntax-only", f"-I{THEIRS.parent}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_our_header_agrees_with_that_of_a_library(tmp_path):
    """Handles, numbers, the layout of a status and all functions are equal."""
    text = OURS.read_text(encoding="utf-8")
    assert len(_numbers(text)) == 7 and len(_functions(text)) == 19
    assert set(re.findall(r"^#define (MPI_\w+) ", text, re.MULTILINE)) == {*HANDLES, "MPI_STATUS_IGNORE"}
    done = _compile(tmp_path, text)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("(MPI_Comm)0x101", "(MPI_Comm)0x102", "MPI_COMM_WORLD"),
        ("MPI_TAG_UB = 501", "MPI_TAG_UB = 502", "MPI_TAG_UB"),
        ("int MPI_internal[5]", "int MPI_internal[4]", "MPI_Status"),
        ("int MPI_TAG;\n  int MPI_ERROR;", "int MPI_ERROR;\n  int MPI_TAG;", "MPI_TAG of MPI_Status"),
        ("MPI_Finalized(int* flag)", "MPI_Finalized(void)", "our_MPI_Finalized"),
    ],
)
def test_a_different_header_is_detected(tmp_path, right, wrong, named):
    """The compiler names a planted difference in a constant, the layout or a function."""
    text = OURS.read_text(encoding="utf-8")
    assert text.count(right) == 1
    done = _compile(tmp_path, text.replace(right, wrong))
    assert done.returncode != 0 and named in done.stderr
