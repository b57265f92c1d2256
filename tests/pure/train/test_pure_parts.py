"""The parts of training that need no model: schedule, windows, metrics, the live line."""

import io
import math
import os

import numpy as np
import pytest
from rich.console import Console

from tilewise.core import ConfigError, ResourceError
from tilewise.data import TextFile, train_tokenizer
from tilewise.train import progress
from tilewise.train.evaluation import IGNORED, compress_files, score_files, sliding_windows
from tilewise.train.metrics import MetricsFile, draw_loss_curve, read_metrics
from tilewise.train.progress import StepProgress, describe_step, format_duration
from tilewise.train.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_schedules_after_the_warm_up(schedule, rates):
    """A constant rate stays; a linear and a cosine one reach the floor at the last step."""
    rates_of_steps = [learning_rate(step, 6, 1.0, 2, 0.1, schedule) for step in range(6)]
    assert rates_of_steps == pytest.approx(rates)


@pytest.mark.parametrize(
    ("steps", "warmup", "rates"),
    [
        (1, 0, [1.0]),
        (1, 5, [0.2]),
        (3, 3, [1 / 3, 2 / 3, 1.0]),
        (2, 0, [1.0, 0.1]),
        (3, 1, [1.0, 1.0, 0.1]),
        (4, 2, [0.5, 1.0, 1.0, 0.1]),
    ],
)
def test_schedule_of_short_runs(steps, warmup, rates):
    """No run is too short for the schedule: it rises in the warm-up, then falls to the floor of 0.1."""
    rates_of_steps = [learning_rate(step, steps, 1.0, warmup, 0.1) for step in range(steps)]
    assert rates_of_steps == pytest.approx(rates)


@pytest.mark.parametrize("context", [1, 2, 3, 8])
def test_windows_score_each_token_once(context):
    """Every token is a label exactly once, predicted from the tokens that precede it in a window."""
    for length in (*range(1, 20), 100, 101):
        ids = list(range(1, length + 1))
        tokens, labels = sliding_windows(ids, context, start=0)
        scored = labels != IGNORED
        assert sorted(labels[scored]) == ids and scored.any(axis=1).all()
        np.testing.assert_array_equal(tokens[scored] + 1, labels[scored])
        assert (np.argmax(scored[1:], axis=1) >= context // 2).all()


@pytest.mark.parametrize("context", [0, 1.5, 1 << 70])
def test_windows_check_their_size(context):
    """An invalid size is rejected by its name."""
    with pytest.raises(ConfigError, match="context must"):
        sliding_windows([1, 2, 3], context, start=0)


class Guessing:
    """A model for which every token of 512 is equally likely, and that records its calls."""

    def __init__(self):
        self.scored, self.shapes = [], []

    def forward(self, tokens, labels):
        self.scored.append(int((labels != IGNORED).sum()))
        assert (labels[:, -1] != IGNORED).any()
        self.shapes.append(tokens.shape)

    def get_tensor(self, name):
        return {"loss": np.array([math.log(512)], np.float32)}[name]


def test_uniform_model_needs_nine_bits_per_token():
    """Every token and each file's end count once, over the bytes of all files; the last batch is filled up."""
    tokenizer = train_tokenizer(["a"], vocab_size=300)
    files = [TextFile("a.txt", "\N{EURO SIGN}" * 21), TextFile("b.txt", "b" * 5)]
    tokens = sum(len(tokenizer.encode(file.text).ids) + 1 for file in files)
    model, shown = Guessing(), []
    score = score_files(
        model, tokenizer, files, 4, 16, start=0, end=0, show=lambda *counts: shown.append(counts)
    )
    assert score.bits_per_byte == pytest.approx(9 * tokens / (63 + 5), rel=1e-6)
    assert score.num_tokens == tokens and score.perplexity == pytest.approx(512, rel=1e-6)
    assert sum(model.scored) == tokens and shown == [(4, 8), (8, 8)]
    assert all(batch == 4 and width <= 16 for batch, width in model.shapes)
    short = Guessing()
    score_files(short, tokenizer, files[1:], 2, 16, start=0, end=0)
    assert short.shapes == [(2, 6)]  # five letters and the end, no wider than that


def test_compressors_profit_from_joining():
    """Equal files cost less when joined; the figure is bits per byte."""
    files = [TextFile(f"{i}.py", "def f(x):\n    return x + 1\n" * 20) for i in range(5)]
    report = compress_files(files)
    assert 0 < report.gzip_joined < report.gzip_each < 8
    assert 0 < report.xz_joined < report.xz_each < 8


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    """Later lines and a half-written last one."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(5):
        metrics.add(step=step, loss=1.0 / (step + 1))
    metrics.close()
    path.write_text(path.read_text() + '{"step": 5, "lo')
    MetricsFile(path, first_step=3).close()
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]
    assert read_metrics(tmp_path / "absent") == []


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n",
        b'{"step": "0", "loss": 1}\n',
        b'{"loss": 1}\n',
        b'{"step": 0, "loss": NaN}\n',
        b'{"step": 0, "loss": 1, "grad_norm": 1' + b"0" * 400 + b"}\n",
        b'{"step": 0, "step": 1, "loss": 1}\n',
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"\n",
    ],
    ids=lambda line: repr(line[:60]),
)
def test_damaged_line_ends_the_metrics_with_a_warning(tmp_path, line, caplog):
    """A run continues with any metrics file; a warning counts dropped lines, except half a line at the end."""
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0, "loss": 1.5}\n'
    path.write_bytes(good + good.replace(b"0", b"1") + line + good)
    assert [entry["step"] for entry in read_metrics(path)] == [0, 1]
    assert ["line 3" in record.getMessage() for record in caplog.records] == (
        [True] if len(line) < 1000 else []
    )
    MetricsFile(path, first_step=1).close()
    assert path.read_bytes() == good


def test_metrics_path_must_be_a_file(tmp_path):
    """Another kind of path is one error and is not waited for; so is a disk that is full at half a line."""
    for make in (os.mkdir, os.mkfifo):
        make(tmp_path / f"{make.__name__}.jsonl")
        with pytest.raises(ConfigError, match="must be a readable file"):
            read_metrics(tmp_path / f"{make.__name__}.jsonl")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")

    class Full:
        def write(self, line):
            return len(line) // 2

    metrics._file = Full()
    with pytest.raises(ResourceError, match=r"metrics\.jsonl': No space left"):
        metrics.add(step=0, loss=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_hold_finite_numbers_only(tmp_path, value):
    """Numbers that JSON lacks are rejected and leave no line."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        metrics.add(step=0, loss=value)
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_loss_curve_is_a_picture(tmp_path):
    """The curve is a PNG file."""
    path = tmp_path / "loss.png"
    losses = [math.exp(-step / 20) for step in range(100)]
    draw_loss_curve(path, losses, "loss")
    plain = path.read_bytes()
    draw_loss_curve(path, losses, "loss", [(10, 0.7), (20, 0.5)])
    assert plain[:8] == b"\x89PNG\r\n\x1a\n" and path.read_bytes() != plain


def test_log_has_a_line_every_ten_seconds(monkeypatch):
    """Without a terminal: the first step, one in ten seconds, the last; with average speed and remaining time."""
    clock, lines = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with StepProgress(Console(file=lines, width=120), 30, 10) as shown:
        for step in range(10, 30):
            clock[0] += 3.0
            shown.step_done(step, 1.5, 100)
    assert lines.getvalue().splitlines() == [
        "step 11/30  loss 1.500  33 tokens/s  0:57 left",
        "step 15/30  loss 1.500  33 tokens/s  0:45 left",
        "step 19/30  loss 1.500  33 tokens/s  0:33 left",
        "step 23/30  loss 1.500  33 tokens/s  0:21 left",
        "step 27/30  loss 1.500  33 tokens/s  0:09 left",
        "step 30/30  loss 1.500  33 tokens/s  0:00 left",
    ]


def test_live_line_has_loss_speed_and_time():
    """In one line."""
    line = describe_step(10, 100, 3.14159, 12345.6, 125)
    assert line == "step 10/100  loss 3.142  12,346 tokens/s  2:05 left"
    assert "loss 3.142  held-out loss 2.718  12,346" in describe_step(10, 100, 3.14159, 12345.6, 125, 2.71828)
    assert format_duration(3661) == "1:01:01"
