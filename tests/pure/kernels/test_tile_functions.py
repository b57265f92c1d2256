"""native/tiles/tile_functions.py: what it makes of declarations, and conditions that it cannot translate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[3] / "native" / "tiles" / "tile_functions.py"
DECLARED = """// kernel mix  f32 bf16
//   out out[m d], sums:f32[m 1]
//   in a[m d], b?[m d]
//   in more...[m d]
//   int first, last
//   float share
//   each m
//   require 0 <= first < last and (a.cols if share_is_f32 else m) == d // 2
//   flag share_is_f32=f32(sums)
//   flops m * d
//   bytes item * m * d
void MixKernel::run() const {}
// kernel move  f32: out out, in x, 0 flops per element
//   internal only the executor moves rows
"""


def make(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run the program on one source."""
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / "mixes.cc").write_text(text, encoding="utf-8")
    command = [sys.executable, str(PROGRAM), str(folder), str(folder / "made"), "mixes"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_languages_have_the_same_call(tmp_path):
    """Inputs, outputs, integers, floats, then what may be absent; conditions become C++."""
    done = make(tmp_path, DECLARED)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "made").rglob("*.*")}
    c, cpp, rules = made["kernels.h"], made["kernels.hpp"], made["rules_table.h"]
    operands = "const pto_tile* a, const pto_tile* more, const pto_tile* out, const pto_tile* sums, uint32_t num_more"
    assert f"pto_tile_mix(PTORuntime* runtime, {operands}, int64_t first, int64_t last, double share, " in c
    assert (
        "inline void mix(const Tile& a, List<Tile> more, const Tile& out, const Tile& sums, int64_t first"
        in cpp
    )
    assert "double share, const Tile& b = {})" in cpp
    python = (tmp_path / "made" / "tile" / "functions.py").read_text()
    names = "a: Tile, more: Sequence[Tile], out: Tile, sums: Tile, *, first: int, last: int, share: float, b: Tile"
    assert f"def mix({names} | None = None) -> None:" in python
    assert "run(_MIX, (out, sums, a, b, *more), (first, last), (share,))" in python
    assert "int64_t{0} <= values.ints[0] && values.ints[0] < values.ints[1]" in rules
    assert "(values.ints[2] ? values.cols[2] : values.sizes[0]) == (values.sizes[1] / int64_t{2})" in rules
    assert "def mix(a: Matrix" in (tmp_path / "made" / "tensor" / "functions.py").read_text()
    assert all("move" not in text for text in (c, cpp, python))


def test_a_condition_that_c_cannot_compute_is_an_error(tmp_path):
    """The error names the line."""
    done = make(tmp_path, DECLARED.replace("0 <= first", "m ** 2"))
    assert (
        done.returncode == 1
        and "mixes.cc:8: error: a condition must be comparisons of integers" in done.stderr
    )
    assert not (tmp_path / "made").exists()
