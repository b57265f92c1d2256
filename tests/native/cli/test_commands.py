"""Commands as a shell sees them: what goes where, and what comes back."""

import re
import subprocess
import sys

import pytest

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, x):\n        self.x = x\n"


def _tilewise(*arguments, timeout=300):
    command = [sys.executable, "-c", "from tilewise.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of a few steps on a handful of small files."""
    root = tmp_path_factory.mktemp("demo")
    (root / "texts").mkdir()
    for i in range(60):
        (root / "texts" / f"module_{i}.py").write_text(TEXT.replace("a", "abcdefgh"[i % 8]) * 12)
    done = _tilewise("demo", "--steps", 6, "--out", root / "out", "--data", root / "texts")
    assert done.returncode == 0, done.stderr
    return root / "out", done.stdout


def test_demo_reports_everything(demo):
    """The demo says what it trained, wrote and measured, and that one device writes the same."""
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
        "busy at once",
        "what each step took",
    ):
        assert words in said, words
    assert re.search(r"one device writes the same \d+ tokens: yes", said)


def test_demo_leaves_its_files(demo):
    """Model, picture, metrics and timeline stand in the output directory."""
    out, _ = demo
    for name in (
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "loss.png",
        "timeline.json",
    ):
        assert (out / name).is_file(), name


def test_generate_writes_text_to_standard_output_only(demo):
    """Standard output holds the text, whatever the width; figures go to standard error."""
    out, _ = demo
    one = _tilewise("generate", out / "model", "def add(", "--max-tokens", 12)
    two = _tilewise("generate", out / "model", "def add(", "--max-tokens", 12, "--tp", 2)
    assert one.returncode == two.returncode == 0
    assert one.stdout == two.stdout and "tokens/s" not in one.stdout and "tokens/s" in one.stderr


def test_impossible_strategy_is_one_line_before_any_work(demo):
    """A width that the model cannot be cut to is one line and exit code 2."""
    out, _ = demo
    done = _tilewise("generate", out / "model", "def", "--tp", 3)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = _tilewise("demo", "--dp", 3, "--out", out)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\npath = 'nowhere'\n", "nowhere"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = 3 }\n", "power of two"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = 16 }\n", "batch"),
    ],
)
def test_impossible_training_is_one_line_before_any_work(tmp_path, text, words):
    """Data that is not there and a mesh that cannot be are one line, exit code 2, and leave nothing behind."""
    (tmp_path / "train.toml").write_text(text + f"[output]\ndirectory = '{tmp_path / 'out'}'\n")
    done = _tilewise("train", tmp_path / "train.toml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_dtype_is_one_line(demo):
    """An element type that does not exist is one line and exit code 2."""
    out, _ = demo
    done = _tilewise("generate", out / "model", "def", "--dtype", "int3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_verify_proves_a_strategy(tmp_path):
    """`verify` says that a mesh computes what one device computes."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text(TEXT * 50)
    config = tmp_path / "train.toml"
    config.write_text(
        "[model]\nvocab_size = 300\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 1\n"
        "num_attention_heads = 4\nnum_key_value_heads = 2\n[data]\npath = 'texts'\ncontext = 16\n"
        "[train]\nbatch = 4\nleaves = 4\n"
    )
    done = _tilewise("verify", config, "--mesh", "dp=2,tp=2", "--steps", 2)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr
    done = _tilewise("verify", config, "--mesh", "dp=two")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
