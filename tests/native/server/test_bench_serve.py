"""`tilewise bench serve` against a real server."""

import json

import pytest

from native.server.served import Served, small_model, usual_server
from tilewise.cli.main import _run


def bench(*options):
    server = usual_server()
    return _run(["bench", "serve", "--base-url", server.url, *map(str, options)])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_request_is_generated_in_full(backend, tmp_path, capsys):
    """The server's count of tokens equals the requested one; figures are printed and written."""
    server, file = usual_server(), tmp_path / "figures.json"
    before = server.metric("generation_tokens_total")
    lengths = ("--random-input-len", 8, "--random-output-len", 6, "--num-warmups", 1)
    options = (
        "--tokenizer",
        small_model(),
        "--num-prompts",
        5,
        "--max-concurrency",
        2,
        "--output-json",
        file,
    )
    assert bench("--backend", backend, *lengths, *options, "--metric-percentiles", "50,99") == 0
    report = json.loads(file.read_text())
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (5, 0, 30)
    assert server.metric("generation_tokens_total") - before == 36
    assert report["max_concurrent_requests"] == 2 and report["p99_ttft_ms"] >= report["p50_ttft_ms"] > 0
    if backend == "openai":
        assert report["total_input_tokens"] == 40
    out = capsys.readouterr().out
    assert "Successful requests:" in out and "P99 TTFT (ms):" in out


def test_prompts_of_a_file(tmp_path, capsys):
    """Texts and lengths come from the file; arrivals follow the rate."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"import {n}", "output_len": 3 + n}) + "\n" for n in range(4))
    )
    options = ("--dataset-name", "sharegpt", "--dataset-path", file, "--ignore-eos", "--num-warmups", 0)
    assert bench(*options, "--request-rate", 50) == 0
    assert "Total generated tokens:" in capsys.readouterr().out


@pytest.mark.slow
def test_a_key_and_headers_are_sent(tmp_path, capsys):
    """A server with keys is measured only with one."""
    server = Served(small_model(), "--served-model-name", "small", "--api-key", "a-secret")
    try:
        server.wait_ready()
        (file := tmp_path / "key").write_text("a-secret\n")
        lengths = ("--num-prompts", 2, "--random-input-len", 4, "--random-output-len", 2)
        args = [
            "bench",
            "serve",
            "--base-url",
            server.url,
            *map(str, ("--tokenizer", small_model(), *lengths)),
        ]
        assert _run(args) != 0
        assert "status 401" in capsys.readouterr().err
        assert _run([*args, "--api-key-file", str(file)]) == 0
        assert _run([*args, "--header", "Authorization=Bearer a-secret"]) == 0
    finally:
        server.close()


def test_impossible_measurements_are_rejected(capsys):
    """No server, model or tokenizer, invalid settings: an error before requests are sent."""
    assert _run(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) != 0
    assert bench("--model", "another") != 0
    assert bench("--tokenizer", "/nowhere") != 0
    assert bench("--request-rate", "0") != 0 and bench("--backend", "vllm") != 0
    assert bench("--tokenizer", small_model(), "--random-input-len", 5000) != 0
    err = capsys.readouterr().err
    for words in (
        "must answer at",
        "choose from small",
        "pass --tokenizer",
        "above 0",
        "openai-chat",
        "reduce the length",
    ):
        assert words in err
    for header in ("no-value", "name=\x7f"):
        assert bench("--header", header) != 0
        assert "a header must have a name and a value" in capsys.readouterr().err
