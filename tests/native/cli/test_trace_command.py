"""`tilewise trace`: a command or a script runs as usual, and one of its runs is shown."""

import json

import pytest

from native.train import small_run
from native.train.small_run import is_same, make_config, tilewise, weights, write_texts, write_toml
from pure.pages import Page

SCRIPT = """
import sys
import numpy as np
import tilewise as tw

graph = tw.ComputeGraph("sum")
x = graph.input([4, 32], "f32", name="x")
graph.output(graph.matmul(x, graph.parameter([32, 32], name="w")), "y")
with graph.instantiate(graph.plan()) as model:
    model.initialize(0)
    for _ in range(3):
        model.forward(x=np.ones((4, 32), np.float32))
print(sys.argv[1:], __name__)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def slices_of(path):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def small_config(texts, directory):
    """Three steps over two devices, without an evaluation."""
    return make_config(texts, directory, {"dp": 2}, steps=3, data={"held_out_percent": 0})


def require_step(out):
    """Both files must show a step of both devices."""
    slices = slices_of(out / "trace.json")
    assert {e["pid"] for e in slices} == {0, 1} and {"task", "transfer"} <= {e["cat"] for e in slices}
    assert any(e["name"] == "cross_entropy_backward" for e in slices)
    page = Page((out / "trace.html").read_text(encoding="utf-8")).text
    assert "Profile: step, run" in page and "/reduce_scatter" in page and "Critical path" in page


def test_training_is_traced(run, tmp_path, texts):
    """A step of both devices is shown; output and trained model are the same as without tracing."""
    config = write_toml(small_config(texts, tmp_path / "traced"), tmp_path / "train.toml")
    code, stdout, stderr = run("trace", "--output", tmp_path / "trace", "train", config)
    assert (code, stdout.splitlines()) == (0, [str(tmp_path / "traced" / "model")]), stderr
    assert "step 3: transfers took" in stderr and "The critical path has" in stderr
    require_step(tmp_path / "trace")
    small_run.run(small_config(texts, tmp_path / "plain"))
    assert is_same(weights(tmp_path / "plain"), weights(tmp_path / "traced"))


@pytest.mark.slow
def test_several_processes_are_traced(tmp_path, texts):
    """`launch` runs `trace`, which shows the devices of all processes."""
    config = write_toml(small_config(texts, tmp_path / "model"), tmp_path / "train.toml")
    done = tilewise("launch", "-n", 2, "trace", "--output", tmp_path / "trace", "train", config)
    assert done.returncode == 0, done.stderr
    require_step(tmp_path / "trace")


def test_a_script_is_traced(run, tmp_path):
    """It gets its arguments; its exit code is the command's, and the chosen run is shown."""
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "trace"
    code, stdout, stderr = run(
        "trace", "--run", 2, "--output", out, "run", tmp_path / "script.py", 3, "--flag"
    )
    assert (code, stdout) == (3, "['3', '--flag'] __main__\n") and "forward, run 2 of " in stderr
    assert [e["name"] for e in slices_of(out / "trace.json")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("launch", "-n", 2, "train", "x.toml"), "tilewise launch -n 2 trace COMMAND"),
        (("trace", "train"), "write `trace` once"),
        (("serve", "model"), "tilewise generate"),
        (("doctor", "--help"), "must run a program on devices"),
        (("--run", 99, "run", "SCRIPT", 0), "got 99 of "),
        (("no_such_command",), "no_such_command"),
    ],
)
def test_what_cannot_be_traced_is_refused(run, tmp_path, arguments, words):
    """The message says what to do; exit code 2, and no files."""
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [tmp_path / "script.py" if a == "SCRIPT" else a for a in arguments]
    code, _, stderr = run("trace", "--output", tmp_path / "trace", *arguments)
    assert code == 2 and words in stderr, stderr
    assert not list(tmp_path.glob("trace/*"))
