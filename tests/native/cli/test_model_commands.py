"""`tilewise inspect`, `evaluate` and `encode` with models written by transformers."""

from __future__ import annotations

import io
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from native.models.families import Case
from tilewise import LLM
from tilewise.core import ConfigError
from tilewise.data import train_tokenizer
from tilewise.encode import Encoder, Pooling

TEXTS = ["def f(x):", "class A: pass", "x", "import os, sys\nprint(os.path.join('a', 'b'))"]


def modules_file(*paths, order=(0, 1)):
    """A modules.json with a Transformer and a Pooling module."""
    kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling")]
    return json.dumps([{"path": paths[i], "type": kinds[i]} for i in order])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x\n" * 9, *TEXTS], vocab_size=290)


@pytest.fixture(scope="module")
def writer(tmp_path_factory, tokenizer):
    """A Qwen2 with a tokenizer, and the model itself."""
    directory = tmp_path_factory.mktemp("writer") / "model"
    model = Case("qwen2", "qwen2", {"bos_token_id": 0, "num_key_value_heads": 2}).model(vocab_size=290)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory, model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, tokenizer):
    """A BERT with a tokenizer in the layout of sentence-transformers, and the model itself."""
    directory = tmp_path_factory.mktemp("encoder") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=290, max_position_embeddings=48, **sizes)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return directory, model


def test_inspect(writer, encoder, run):
    """Architecture, parameters, bytes, KV cache and bounds."""
    directory, model = writer
    code, out, _ = run("inspect", directory)
    assert code == 0
    assert "architecture: Qwen2ForCausalLM" in out
    assert f"parameters: {model.num_parameters():,} " in out
    assert "KV cache per token: bf16 256 bytes, f32 512 bytes" in out  # 2 layers x 2 x 2 heads of 16
    assert "bf16: fits" in out and "tokens/s" in out


def test_inspect_of_a_configuration_alone(writer, encoder, run, tmp_path):
    """Without weights, parameters are counted from config.json; memory and peaks can be set."""
    for directory, model in (writer, encoder):
        alone = tmp_path / model.config.model_type
        alone.mkdir()
        shutil.copy(directory / "config.json", alone)
        options = ("--device-memory", "64M", "--peak-tflops", 2, "--bandwidth-gbps", 100)
        code, out, err = run("inspect", alone, *options)
        assert (code, err) == (0, "") and "no weights here" in out
        assert "reads 100.0 GB/s from memory" in out and "2000 GFLOP/s" in out
        if model is writer[1]:
            assert f"parameters: {model.num_parameters():,} " in out
            assert "memory of the device: 64.00 MiB" in out and "memory available on this" not in out
            assert "bf16: fits" in out
        assert run("inspect", alone / "config.json", *options)[1] == out
    broken = copied(writer[0], tmp_path / "broken")
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert run("inspect", broken)[0] == 2  # there are weights, which cannot be read
    assert run("inspect", alone, "--device-memory", "much")[0] == 2
    large = json.loads((writer[0] / "config.json").read_text()) | {"vocab_size": 200_000}
    (tmp_path / "config.json").write_text(json.dumps(large))
    assert (
        "f32: does not fit"
        in run("inspect", tmp_path / "config.json", "--device-memory", "1M", *options[2:])[1]
    )
    code, _, err = run("inspect", alone, "--device-memory", "64")
    assert code == 2 and "add a unit, such as 64G" in err
    assert "memory available on this machine: " in run("inspect", writer[0], *options[2:])[1]


def test_inspect_of_an_encoder_shows_its_stored_weights(encoder, run, tmp_path):
    """The class in config.json and the stored parameters, with or without the head."""
    directory, model = encoder
    code, out, _ = run("inspect", directory)
    assert code == 0 and "architecture: BertModel (bert), without the head" in out and "KV cache" not in out
    num_used = sum(p.numel() for name, p in model.named_parameters() if "pooler" not in name)
    assert f"parameters: {num_used:,} " in out
    unnamed = copied(directory, tmp_path / "unnamed")
    content = json.loads((unnamed / "config.json").read_text())
    (unnamed / "config.json").write_text(json.dumps({**content, "architectures": None}))
    assert "architecture: bert, without the head" in run("inspect", unnamed)[1]
    masked = transformers.BertForMaskedLM(model.config)
    masked.save_pretrained(tmp_path / "masked")
    out = run("inspect", tmp_path / "masked")[1]
    assert "architecture: BertForMaskedLM (bert)\n" in out
    assert f"parameters: {masked.num_parameters():,} " in out
    (unnamed / "model.safetensors").write_bytes(b"short")
    code, out, err = run("inspect", unnamed)
    assert (code, out) == (2, "") and "model.safetensors" in err


def test_evaluate_agrees_with_transformers(writer, run, tmp_path, tokenizer):
    """Perplexity and bits per byte of files that fit a window; the same over two devices."""
    directory, model = writer
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i}.py").write_text(text)
    nats = count = 0
    for text in TEXTS:
        ids = torch.tensor([[0, *tokenizer.encode(text).ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    assert run("evaluate", directory, tmp_path / "texts", "--context", 1)[0] == 0
    code, out, err = run("evaluate", directory, tmp_path / "texts", "--dtype", "f32")
    assert code == 0 and f"{count} tokens" in err
    words = out.replace(",", "").split()
    assert float(words[1]) == pytest.approx(math.exp(nats / count), rel=1e-4)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert float(words[2]) == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    assert run("evaluate", directory, tmp_path / "texts", "--dtype", "f32", "--tp", 2)[1] == out


def test_evaluate_rejects_before_work(writer, encoder, run, tmp_path):
    """A context beyond the model's, a model that does not generate, missing data."""
    assert run("evaluate", writer[0], "stdlib", "--context", 257)[0] == 2
    assert "[1, 256], the model's context; got 0" in run("evaluate", writer[0], "stdlib", "--context", 0)[2]
    assert "needs a model that generates text" in run("evaluate", encoder[0], "stdlib")[2]
    assert run("evaluate", writer[0], tmp_path / "nowhere")[0] == 2


def their_vectors(model, tokenizer, pool):
    """Vectors of the texts one by one, scaled to length one."""
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
        vector = pool(hidden)
        vectors.append(vector / np.linalg.norm(vector))
    return np.array(vectors)


@pytest.mark.parametrize("mode", ["auto", "cls"])
def test_encode_agrees_with_transformers(encoder, run, tmp_path, tokenizer, mode):
    """Vectors by the files' pooling and of the first token; alone, in a batch and over two devices
    with the same bits, in a file whose folder is created.
    """
    directory, model = encoder
    expected = their_vectors(model, tokenizer, (lambda h: h.mean(0)) if mode == "auto" else (lambda h: h[0]))
    code, out, _ = run("encode", directory, *TEXTS, "--pooling", mode)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    vectors = np.array([line["embedding"] for line in lines], np.float32)
    assert np.abs(vectors - expected).max() <= 1e-5
    file = tmp_path / "new" / "folder" / "vectors.npy"
    assert run("encode", directory, *TEXTS, "--pooling", mode, "--out", file, "--tp", 2, "--batch", 1)[0] == 0
    assert np.array_equal(np.load(file), vectors)


def test_encoders_do_not_generate(encoder, run, tmp_path):
    """Every generating command, and an engine, rejects an encoder in one line before any work."""
    words = "this needs a model that generates text; got a BertForMaskedLM, which only encodes; use tilewise encode"
    (tmp_path / "asked").write_text("{}\n")
    for command in (
        ("generate", encoder[0], "x"),
        ("run-batch", encoder[0], tmp_path / "asked", "-o", tmp_path / "answers"),
        ("bench", "latency", encoder[0], "--input-len", 4, "--output-len", 4),
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, "") and words in err
    with pytest.raises(ConfigError, match=words):
        LLM(encoder[0])
    assert not (tmp_path / "answers").exists()


def test_threads_share_an_encoder(encoder):
    """Each thread gets the same vectors as a single thread would."""
    with Encoder(encoder[0]) as shared:
        alone = [shared.encode([text]) for text in TEXTS]
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            vectors = list(pool.map(lambda i: shared.encode([TEXTS[i % len(TEXTS)]]), range(100)))
    assert all(np.array_equal(vector, alone[i % len(TEXTS)]) for i, vector in enumerate(vectors))


def test_llm_encodes_with_encoders(encoder, tokenizer):
    """Texts, ids and dictionaries give the vectors of the command; unsupported settings are rejected."""
    with Encoder(encoder[0]) as own:
        expected = own.encode(TEXTS)
    with LLM(encoder[0], runner="pooling", dtype="f32", max_num_seqs=2) as llm:
        ids = [tokenizer.encode(text).ids for text in TEXTS]
        for prompts in (TEXTS, ids, [{"prompt": text} for text in TEXTS]):
            outputs = llm.encode(prompts)
            assert [output.prompt_token_ids for output in outputs] == ids
            assert np.array_equal(np.array([output.outputs.data for output in outputs]), expected)
        assert np.array_equal(llm.encode(TEXTS[0])[0].outputs.data, expected[0])
        for call in (lambda: llm.generate("x"), lambda: llm.engine):
            with pytest.raises(ConfigError, match="needs a model that generates text"):
                call()
        for wrong in ([[10**6]], [[]], [{"text": "x"}], [b"x"], ["x" * 9999]):
            with pytest.raises(ConfigError):
                llm.encode(wrong)
    with pytest.raises(ConfigError, match="a setting of an encoder"):
        LLM(encoder[0], runner="pooling", max_model_len=8)


def test_encode_reads_lines(encoder, run, monkeypatch):
    """Without arguments, lines of standard input; empty lines are skipped; no text at all and
    invalid text are errors.
    """
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))
    assert len(run("encode", encoder[0])[1].splitlines()) == 2
    for nothing in (io.StringIO("\n"), None):  # None: the caller has closed it
        monkeypatch.setattr("sys.stdin", nothing)
        code, _, err = run("encode", encoder[0])
        assert code == 2 and "there must be texts" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), encoding="utf-8"))
    code, _, err = run("encode", encoder[0])
    assert code == 2 and "a prompt must be UTF-8 text" in err


def copied(source, target):
    """A copy of a model directory for changes."""
    shutil.copytree(source, target)
    return target


def test_max_seq_length_limits_texts(encoder, run, tmp_path, tokenizer):
    """max_seq_length of sentence_bert_config.json is the context; unsupported fields are rejected by name."""
    directory = copied(encoder[0], tmp_path / "model")
    file = directory / "sentence_bert_config.json"
    text = "def f(x):\n    return x\n" * 2
    assert 8 < len(tokenizer.encode(text).ids) <= 48
    complete = run("encode", directory, text)[1]
    file.write_text('{"max_seq_length": 8, "do_lower_case": false}')
    code, _, err = run("encode", directory, text)
    assert code == 2 and "must fit the context of 8 tokens" in err
    code, cut, _ = run("encode", directory, text, "--truncate")
    assert code == 0 and cut != complete
    for content, words in (
        ('{"do_lower_case": true}', "do_lower_case"),
        ('{"max_seq_length": 0}', "max_seq_length"),
    ):
        file.write_text(content)
        code, _, err = run("encode", directory, text)
        assert code == 2 and words in err and file.name in err


def test_results_that_are_not_finite_are_an_error(encoder, writer, run, tmp_path):
    """Finite weights whose products overflow: one line, exit code 1, no vector and no perplexity."""
    (tmp_path / "x.py").write_text("def f(x):")
    for source, arguments in ((encoder[0], ["x"]), (writer[0], [tmp_path / "x.py"])):
        directory = copied(source, tmp_path / source.parent.name)
        tensors = safetensors.numpy.load_file(directory / "model.safetensors")
        huge = {name: np.full_like(t, 1e30) if "norm" in name.lower() else t for name, t in tensors.items()}
        safetensors.numpy.save_file(huge, directory / "model.safetensors")
        code, out, err = run("encode" if source == encoder[0] else "evaluate", directory, *arguments)
        assert (code, out) == (1, "") and "must be finite" in err


def test_encode_rejects_before_work(encoder, writer, run, tmp_path):
    """Too long texts without --truncate, generating models, invalid poolings, unsupported modules."""
    long = "def f(x): " * 40
    code, out, err = run("encode", encoder[0], long)
    assert (code, out) == (2, "") and "must fit the context of 48" in err
    assert run("encode", encoder[0], long, "--truncate")[0] == 0
    assert "encoding needs an encoder" in run("encode", writer[0], "x")[2]
    assert "--pooling must be" in run("encode", encoder[0], "x", "--pooling", "max")[2]
    assert run("encode", encoder[0], "x", "--out", tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", "{}", "valid array"),
        ("modules.json", '[{"path": "", "type": "sentence_transformers.models.Dense"}]', "Dense"),
        ("modules.json", modules_file("", "../x"), "'../x'"),
        ("modules.json", modules_file("", "a" * 5000), "must name folders next to it"),
        ("modules.json", modules_file("0_Transformer", "1_Pooling"), "got '0_Transformer'"),
        ("modules.json", modules_file("", "1_Pooling", order=(1, 0)), "in this order"),
        ("modules.json", modules_file("", "1_Pooling", order=(0,) + (1,) * 20000), "larger than"),
        ("modules.json", '[{"path": "\\ud800", "type": "x"}]', "not JSON"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "max_tokens"),
        ("1_Pooling/config.json", "{}", "got none"),
    ],
)
def test_invalid_pooling_settings_are_rejected(encoder, run, tmp_path, name, content, words):
    """One line each that names the file, before any work."""
    directory = copied(encoder[0], tmp_path / "model")
    (directory / name).write_text(content)
    code, out, err = run("encode", directory, "x")
    assert (code, out) == (2, "") and words in err and name.split("/")[-1] in err and len(err) < 600


def test_pooling_needs_rows_of_numbers():
    """Texts, integers and other shapes are rejected."""
    assert Pooling("cls").pool(np.ones((2, 3), np.float16)).tolist() == [1.0] * 3
    for wrong in ([["a"]], [[1]], [1.0], [[[1.0]]]):
        with pytest.raises(ConfigError, match="rows of floating-point numbers"):
            Pooling().pool(np.array(wrong))
