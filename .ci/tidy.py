"""Runs clang-tidy on the native sources that changed since they were last clean; exit status 1 when it finds anything.

A source is checked again when its command, .clang-tidy, clang-tidy itself, the source or a header of ours that it
includes, directly or not, is another than at its last clean run (build/tidy/clean). Kernel sources are compiled once
per instruction-set level; they are checked for one of them. Needs the virtual environment that `make check` makes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE, BUILD = ROOT / "native", ROOT / "build" / "tidy"
GENERATED = [BUILD / folder / "generated" for folder in ("kernels", "tiles")]
BIN = Path(sys.executable).parent
TESTS_MAY = (  # look at what was moved from, throw an int, compare floats as bytes, ask an optional that is full
    "bugprone-use-after-move bugprone-std-exception-baseclass bugprone-suspicious-memory-comparison "
    "bugprone-unchecked-optional-access bugprone-unchecked-string-to-number-conversion"
)
TIDY = [str(BIN / "clang-tidy"), "-p", str(BUILD), "--quiet", "--extra-arg=-Wno-unknown-warning-option"]


def commands() -> dict[Path, str]:
    """How each source is compiled, as CMake says; the last of several. Writes the headers that sources include and the
    build generates.
    """
    database = BUILD / "compile_commands.json"
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    lists = [NATIVE / "CMakeLists.txt", *NATIVE.glob("*/CMakeLists.txt")]
    if not database.exists() or any(path.stat().st_mtime > database.stat().st_mtime for path in lists):
        BUILD.mkdir(parents=True, exist_ok=True)
        options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DTILEWISE_BUILD_TESTS=ON", "-DTILEWISE_LEVELS=all"]
        options += ["-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"]  # each source must include what it uses
        command = ["cmake", "-S", str(NATIVE), "-B", str(BUILD), "-G", "Ninja", *options]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        database.touch()
    generate = ["cmake", "--build", str(BUILD), "--target", "kernel_declarations", "tile_functions"]
    subprocess.run(generate, env=environment, stdout=subprocess.DEVNULL, check=True)
    entries = json.loads(database.read_text(encoding="utf-8"))
    return {Path(e["file"]): e["command"] for e in entries if Path(e["file"]).is_relative_to(NATIVE)}


@cache
def includes_of(path: Path) -> frozenset[Path]:
    """Our own headers that a file names."""
    names = re.findall(r'^\s*#\s*include\s+["<]([\w/.]+)[">]', path.read_text(encoding="utf-8"), re.MULTILINE)
    headers = (folder / name for name in names for folder in (NATIVE, NATIVE / "include", *GENERATED))
    return frozenset(header for header in headers if header.is_file())


def inputs_of(source: Path) -> list[Path]:
    """A source and everything of ours that it includes."""
    seen, open_files = set(), {source}
    while open_files:
        path = open_files.pop()
        seen.add(path)
        open_files |= includes_of(path) - seen
    return sorted(seen)


def fingerprint(source: Path, command: str, version: bytes) -> str:
    """A name for all that decides what clang-tidy says about a source."""
    digest = hashlib.sha256(version + command.encode())
    for path in (ROOT / ".clang-tidy", ROOT / "native/protocols/tests/.clang-tidy", Path(__file__)):
        digest.update(path.read_bytes())
    for path in inputs_of(source):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


def find(source: Path) -> str:
    """The findings of clang-tidy in a source; empty for a clean source."""
    omitted = ",".join(f"-{name}" for name in TESTS_MAY.split()) if source.name.endswith("_test.cc") else ""
    command = [*TIDY, f"--checks={omitted}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    """Check what changed, a source per processor."""
    version = subprocess.run([TIDY[0], "--version"], capture_output=True, check=True).stdout
    clean = BUILD / "clean"
    clean.mkdir(parents=True, exist_ok=True)
    names = {source: fingerprint(source, command, version) for source, command in commands().items()}
    stamps = {source: clean / "-".join(source.relative_to(NATIVE).parts) for source in names}
    changed = [s for s in names if not stamps[s].exists() or stamps[s].read_text() != names[s]]
    print(f"clang-tidy: {len(changed)} of {len(names)} sources", flush=True)
    num_bad = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, findings in zip(changed, pool.map(find, changed), strict=True):
            if findings:
                num_bad += 1
                print(findings, flush=True)
            else:
                stamps[source].write_text(names[source])
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
