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
    done = tilewise("demo", "--steps", 6, "--out", root / "out", "--data", root / "texts")
    assert done.returncode == 0, done.stderr
    return root / "out", done.stdout


def test_demo_reports_everything(demo):
    """The demo reports training, files and measurements, and that one device generates the same text."""
    _, said = demo
    for words in (
        "tokens of",
        "million parameters",
        "step 6/6",
        "bits per byte",
        "gzip -9",
        "xz -9e",
        "untrained",
        "device 1",
        "all devices busy",
        "time of each stage",
    ):
        assert words in said, words
    assert re.search(r"one device generates the same \d+ tokens: yes", said)


def test_demo_writes_its_files(demo):
    """Model, picture, metrics and timeline are in the output directory."""
    out, _ = demo
    for name in (
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "loss.png",
        "timeline.json",
    ):
        assert (out / name).is_file(), name


@pytest.mark.soak
def test_the_minimum_steps_of_the_demo_beat_gzip(tmp_path):
    """The minimum number of steps beats gzip; fewer steps are not reported as beating it."""
    for steps, verdict in ((ENOUGH_STEPS, "the model beats gzip"), (30, "the model does not beat gzip")):
        done = tilewise("demo", "--steps", steps, "--out", tmp_path / str(steps), timeout=1800)
        assert verdict in done.stdout, done.stdout


def test_generate_writes_text_to_standard_output_only(demo):
    """Standard output has only the text, independent of the terminal's width; figures go to standard error."""
    out, _ = demo
    one = tilewise("generate", out / "model", "def add(", "--max-tokens", 12)
    two = tilewise("generate", out / "model", "def add(", "--max-tokens", 12, "--tp", 2)
    assert one.returncode == two.returncode == 0
    assert one.stdout == two.stdout and one.stdout.strip()
    assert "tokens/s" not in one.stdout and "tokens/s" in one.stderr


def test_impossible_strategy_is_one_line_before_any_work(demo):
    """A tensor-parallel width that does not divide the model gives one line and exit code 2."""
    out, _ = demo
    done = tilewise("generate", out / "model", "def", "--tp", 3)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = tilewise("demo", "--dp", 3, "--out", out)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\npath = 'nowhere'\n", "nowhere"),
        (
            "[distribution]\nstrategy = 'ddp'\nmesh = { dp = 3 }\n",
            "set train.batch = 9 and train.batch_splits = 3",
        ),
        (
            "[train]\nbatch = 24\n[distribution]\nstrategy = 'ddp'\nmesh = { dp = 3 }\n",
            "fit train.batch_splits; got 3 x 1 and 8; set train.batch_splits = 3 ",
        ),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = 16 }\n", "batch"),
    ],
)
def test_impossible_training_is_one_line_before_any_work(tmp_path, text, words):
    """Missing data and an impossible mesh give one line and exit code 2, and write nothing."""
    (tmp_path / "train.toml").write_text(text + f"[output]\ndirectory = '{tmp_path / 'out'}'\n")
    done = tilewise("train", tmp_path / "train.toml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int3", "i32", "f64"])
def test_wrong_dtype_is_one_line(demo, dtype):
    """An unsupported dtype gives one line and exit code 2."""
    out, _ = demo
    done = tilewise("generate", out / "model", "def", "--dtype", dtype)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--dtype" in done.stderr


def test_unusable_output_is_one_line_before_any_work(tmp_path):
    """An output directory that cannot be created is rejected before data is read."""
    (tmp_path / "file").write_text("")
    config = make_config(tmp_path / "nowhere", tmp_path / "file" / "out")
    done = tilewise("train", write_toml(config, tmp_path / "train.toml"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "can be written to" in done.stderr


def test_a_too_long_prompt_is_rejected_before_weights_are_read(demo, tmp_path):
    """The prompt's length is checked with config.json and the tokenizer only."""
    out, _ = demo
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((out / "model" / name).read_bytes())
    done = tilewise("generate", tmp_path, "x = 1\n" * 500)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "must leave room" in done.stderr


def test_verify_compares_a_strategy(tmp_path):
    """`verify` reports that a mesh computes the same as one device."""
    config = write_toml(make_config(tmp_path / "nowhere", tmp_path), tmp_path / "train.toml")
    done = tilewise("verify", config, "--mesh", "dp=2,tp=2", "--steps", 2)
    assert done.returncode == 0 and "equals one device to the bit" in done.stdout, done.stderr
    done = tilewise("verify", config, "--mesh", "dp=two")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
