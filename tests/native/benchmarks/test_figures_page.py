"""The page of all benchmarks: verdicts of figures, regressions, and completeness."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import figures  # noqa: E402
import page  # noqa: E402

TIME = figures.Figure("a step", 2.0, "s", less_is_better=True, must=2.0, goal=1.0)
RATE = figures.Figure("a rate", 5.0, "tokens/s", must=8.0, peers={"another": 4.0}, limit=10.0)


@pytest.mark.parametrize(
    "value,less,verdict",
    [
        (0.9, True, "goal"),
        (1.5, True, "must"),
        (2.1, True, "missed"),
        (0.9, False, "missed"),
        (2.1, False, "goal"),
    ],
)
def test_bounds_are_kept_in_the_direction_of_the_figure(value, less, verdict):
    """A bound of a smaller-is-better figure is an upper bound, of a larger-is-better figure a lower bound."""
    bounds = (2.0, 1.0) if less else (1.0, 2.0)
    figure = figures.Figure("x", value, "s", less, *bounds)
    assert figure.verdict == verdict
    assert verdict in figure.line()


def test_a_figure_without_bounds_has_no_verdict():
    """It is not counted as missed, and its peers are still compared."""
    assert replace(TIME, must=None, goal=None).verdict == ""
    assert replace(RATE, must=None).times(4.0) == 1.25


def test_regressions_of_more_than_five_percent_are_named():
    """In both directions, also figures that are no longer measured; not skipped or improved ones."""
    before = [page.Measured("a.py", TIME), page.Measured("a.py", RATE), page.Measured("b.py", TIME)]
    now = [page.Measured("a.py", replace(TIME, value=2.09)), page.Measured("a.py", replace(RATE, value=4.77))]
    assert page.worse(now, before) == []
    now = [page.Measured("a.py", replace(TIME, value=2.11)), page.Measured("a.py", replace(RATE, value=4.7))]
    assert page.worse(now, before) == ["a.py: a step: 2.11 s, was 2", "a.py: a rate: 4.7 tokens/s, was 5"]
    assert page.worse(now[:1], before)[1:] == ["a.py: a rate: no longer measured"]


def test_the_page_has_every_figure_and_escapes_it():
    """Values, peers, verdicts and failures; names are escaped."""
    measured = [page.Measured("a.py", replace(RATE, name="<b>rate</b>", note="n & m"))]
    text = page.page("a machine", [TIME], measured, ["c.py (exit status 1)"])
    for word in (
        "&lt;b&gt;rate",
        "n &amp; m",
        "another",
        "missed",
        "c.py",
        "5 tokens/s",
        "a machine",
        "limit 10",
    ):
        assert word in text
    assert "<b>rate" not in text and "http" not in text


@pytest.mark.slow
def test_a_run_writes_both_files_and_fails_on_a_regression(tmp_path):
    """One real benchmark through the whole program; the twin compares with figures that are a
    hundred times better.
    """

    def run(*arguments, name="runtime/regions.py"):
        command = [sys.executable, BENCHMARKS / "page.py", name, "--output", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    assert run().returncode == 0
    content = json.loads((tmp_path / "figures.json").read_text())
    assert {f["name"] for f in content["figures"]} >= {"submit", "grid[i, j]"}
    assert "runtime/regions.py" in (tmp_path / "figures.html").read_text()
    for figure in content["figures"]:
        figure["value"] /= 100
    (tmp_path / "before.json").write_text(json.dumps(content))
    ended = run("--against", tmp_path / "before.json")
    assert ended.returncode == 1
    assert "worse: runtime/regions.py: submit" in ended.stdout
    refused = run("--against", tmp_path / "figures.html")
    assert refused.returncode == 1 and "needs a figures.json" in refused.stderr
    assert "choose from" in run(name="nothing.py").stderr
