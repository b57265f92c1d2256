# ruff: noqa: UP031, UP036, RUF005
"""Says in plain words what this machine lacks for building Tilewise; silent when nothing is.

Runs before anything is installed, on whatever Python `make` found, so it uses nothing newer than Python 3.6
and nothing but the standard library. Checks: Python >= 3.10 with headers and venv, a C++20 compiler.
"""

# An old Python must be able to run this file, which then reports that it is too old.

import os
import subprocess
import sys
import sysconfig
import tempfile

PROGRAM = "#include <bit>\n#include <concepts>\n#include <span>\nint main() { return std::popcount(0u); }\n"


def python_problem():
    """What is wrong with this Python; an empty string when nothing is."""
    if sys.version_info < (3, 10):
        version = "%d.%d" % sys.version_info[:2]
        return (
            "Python 3.10 or newer is needed; got %s. Install one and run `make PYTHON=python3.12 ...`."
            % version
        )
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return (
            "Python's headers are needed; got no %s. Install them: `apt install python3-dev` "
            "(Debian, Ubuntu), "
            "`dnf install python3-devel` (Fedora)." % header
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "Python's venv is needed; got none. Install it: `apt install python3-venv` (Debian, Ubuntu)."
    return ""


def compiler_problem():
    """What is wrong with the C++ compiler; an empty string when nothing is."""
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "probe.cc")
        with open(source, "w") as file:
            file.write(PROGRAM)
        command = compiler.split() + ["-std=c++20", source, "-o", os.path.join(directory, "probe")]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError:
            done = None
    if done is None or done.returncode != 0:
        return (
            "A C++20 compiler is needed (g++ 11 or newer, clang 14 or newer); `%s` is not one. "
            "Install one: `apt install "
            "g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora); another one is chosen with "
            "`make CXX=...`." % compiler
        )
    return ""


if __name__ == "__main__":
    problems = [problem for problem in (python_problem(), compiler_problem()) if problem]
    for problem in problems:
        print("tilewise: " + problem, file=sys.stderr)
    sys.exit(1 if problems else 0)
