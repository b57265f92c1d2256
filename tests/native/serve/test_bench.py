"""`tilewise bench`: figures follow from recorded times, and every request is generated in full."""

import json

import pytest

from native.serve.serving_models import TEXTS
from tilewise.cli.main import _run
from tilewise.core import ConfigError
from tilewise.serve import Engine, SamplingParams
from tilewise.serve.measure import (
    Times,
    latency_figures,
    measure,
    random_prompts,
    read_prompts,
    throughput_figures,
)


def test_figures_of_known_times():
    """Two requests, one with two texts, with round times."""
    times = [Times(10, 1.0, [[1.5, 1.6, 1.8]], 1.8), Times(20, 1.0, [[2.0], [3.0, 3.5]], 3.5)]
    figures = throughput_figures(times)
    assert figures["elapsed_time"] == 2.5 and figures["num_requests"] == 2
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"], figures["total_num_tokens"]) == (
        30,
        6,
        36,
    )
    assert figures["requests_per_second"] == 0.8 and figures["output_tokens_per_second"] == 2.4
    assert figures["ttft_ms"]["percentiles"]["50"] == pytest.approx(1000)
    assert figures["itl_ms"]["mean"] == pytest.approx((100 + 200 + 500) / 3)
    figures = latency_figures([times, times[:1]])
    assert figures["latencies"] == pytest.approx([2.5, 0.8]) and figures["avg_latency"] == pytest.approx(1.65)
    assert figures["percentiles"]["50"] == pytest.approx(1.65)


def test_recorded_times_are_consistent(model_dir):
    """All requested tokens are reported in order, after the request and before its end."""
    with Engine(model_dir, dtype="f32", max_num_seqs=4) as engine:
        ended = []
        params = SamplingParams(max_tokens=7, ignore_eos=True, n=2)
        times = measure(engine, random_prompts(6, 9, 200, seed=1), params, lambda: ended.append(1))
        assert len(ended) == 6 and [one.num_prompt for one in times] == [9] * 6
        for one in times:
            assert [len(text) for text in one.texts] == [7, 7]
            assert all(
                [one.submitted, *text, one.ended] == sorted([one.submitted, *text, one.ended])
                for text in one.texts
            )
        with pytest.raises(ConfigError, match="leave room"):
            measure(engine, [[1] * 10_000], params)


def test_random_prompts_share_a_prefix():
    """Equal for a seed, with a common beginning; another seed gives others."""
    prompts = random_prompts(3, 5, 50, seed=2, prefix_length=4)
    again, other = (random_prompts(3, 5, 50, seed=seed, prefix_length=4) for seed in (2, 3))
    assert prompts == again != other
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1 and len({*map(tuple, prompts)}) == 3
    assert all(len(prompt) == 9 for prompt in prompts)


def test_prompts_of_files():
    """ShareGPT's list, whose empty conversations are skipped, and lines of JSON."""
    talks = [{"conversations": []}, {"conversations": [{"from": "human", "value": "a"}]}, {"prompt": "b"}]
    assert read_prompts(json.dumps(talks), 9) == [("a", None), ("b", None)]
    lines = "\n".join(json.dumps({"prompt": text, "output_len": 5}) for text in "xyz")
    assert read_prompts('{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}', 9) == [
        ("a\u2028b", None),
        ("c", None),
    ]
    assert read_prompts(lines, 2) == [("x", 5), ("y", 5)]


def test_invalid_files_are_rejected():
    """With the reason."""
    for text in ("", "{", "[]", '["a"]', '{"prompt": "x", "output_len": 0}', '[{"conversations": 1}]'):
        with pytest.raises(ConfigError, match=r"\[serve.bench\]"):
            read_prompts(text, 9)


def test_throughput_of_a_file(model_dir, tmp_path, capsys):
    """Figures on standard output and as JSON, and a picture."""
    data, out, picture = tmp_path / "data.jsonl", tmp_path / "new" / "t.json", tmp_path / "t.svg"
    data.write_text("\n".join(json.dumps({"prompt": text, "output_len": 6}) for text in TEXTS))
    command = [
        "bench",
        "throughput",
        str(model_dir),
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(data),
    ]
    command += ["--dp", "2", "--speculative-config", '{"num_speculative_tokens": 3}']
    assert _run([*command, "--dtype", "f32", "--output-json", str(out), "--picture", str(picture)]) == 0
    figures, output = json.loads(out.read_text()), capsys.readouterr().out
    assert figures["num_output_tokens"] == 18 and "Total num output tokens: 18" in output
    assert f"{figures['requests_per_second']:.2f} requests/s" in output and "Inter-token latency" in output
    assert picture.read_text().lstrip().startswith("<?xml")


def test_latency_of_a_batch(model_dir, tmp_path, capsys):
    """The requested number of rounds; weights may be random."""
    out = tmp_path / "l.json"
    sizes = ["--input-len", "5", "--output-len", "4", "--batch-size", "2", "--num-iters", "3"]
    options = [*sizes, "--num-iters-warmup", "1", "--load-format", "dummy", "--output-json", str(out)]
    assert _run(["bench", "latency", str(model_dir), *options]) == 0
    figures, output = json.loads(out.read_text()), capsys.readouterr().out
    assert len(figures["latencies"]) == 3 and min(figures["latencies"]) > 0
    assert f"Avg latency: {figures['avg_latency']:.4f} seconds" in output and "99% percentile" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--batch-size", "0"], "batch-size"),
        (["latency", "--picture", "x.pdf"], ".png or .svg"),
        (["throughput", "--dataset-name", "sonnet"], "not one of random, sharegpt"),
        (["throughput", "--dataset-path", "x"], "--dataset-path needs"),
        (
            ["throughput", "--dataset-name", "sharegpt", "--dataset-path", "/nothing/there"],
            "must be a JSON file",
        ),
        (["latency", "--input-len", "100000"], "max_context"),
        (["latency", "--speculative-config", "{"], "it must be JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_before_any_work(model_dir, arguments, words, capsys):
    """One line and exit code 2."""
    assert _run(["bench", arguments[0], str(model_dir), *arguments[1:]]) == 2
    output = capsys.readouterr().err
    assert words in output and output.count("\n") == 1
