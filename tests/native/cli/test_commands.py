"""Commands as a shell sees them: streams and exit codes."""

import re

import pytest

from native.train.small_run import make_config, tilewise, write_toml
from tilewise.cli.demo import ENOUGH_STEPS

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, x):\n        self.x = x\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of a few steps on a handful of small files."""
    root = tmp_path_factory.mktemp("demo")
    (root / "texts").mkdir()
    for i in range(60):
        (root / "texts" / f"module_{i}.py").write_text(TEXT.replace("a", "abcdefgh"[i % 8]) * 12)
    done = tilewise("demo", "--steps", 2, "--out", root / "out", "--data", root / "texts")
    assert done.returncode == 0, done.stderr
    return root / "out", done.stdout


def test_demo_reports_everything_and_writes_its_files(demo):
    """Training, measurements, and that one device generates the same text; model, picture and timeline."""
    out, stdout = demo
    for words in ("tokens of", "million parameters", "step 2/2", "bits per byte", "gzip -9", "xz -9e"):
        assert words in stdout, words
    for words in ("untrained", "device 1", "all devices busy", "time of each stage"):
        assert words in stdout, words
    assert re.search(r"one device generates the same \d+ tokens: yes", stdout)
    names = (
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "loss.png",
        "timeline.json",
    )
    assert all((out / name).is_file() for name in names)


@pytest.mark.soak
def test_the_minimum_steps_of_the_demo_beat_gzip(tmp_path):
    """The minimum number of steps beats gzip; fewer steps are not reported as beating it."""
    for steps, verdict in ((ENOUGH_STEPS, "the model beats gzip"), (30, "the model does not beat gzip")):
        done = tilewise("demo", "--steps", steps, "--out", tmp_path / str(steps), timeout=1800)
        assert verdict in done.stdout, done.stdout


def test_generate_writes_text_to_standard_output_only(demo):
    """Figures go to standard error."""
    done = tilewise("generate", demo[0] / "model", "def add(", "--max-tokens", 12)
    assert done.returncode == 0 and done.stdout.strip()
    assert "tokens/s" not in done.stdout and "tokens/s" in done.stderr


def test_verify_compares_a_strategy(tmp_path):
    """`verify` reports that a mesh computes the same as one device."""
    config = write_toml(make_config(tmp_path / "nowhere", tmp_path), tmp_path / "train.toml")
    done = tilewise("verify", config, "--mesh", "dp=2,tp=2", "--steps", 2)
    assert done.returncode == 0 and "equals one device to the bit" in done.stdout, done.stderr
