"""Wrong and hostile input of the command line: one line, an exit code, no traceback, nothing written."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from native.train.small_run import make_config, tilewise, write_texts, write_toml
from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer
from tilewise.models.llama import LlamaConfig

WEIGHTS = "model.safetensors"
NOT_UTF8 = os.fsdecode(b"\xff")


def save_model(directory, **changes):
    """A small model with random weights in fp32, and a context of 64."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n" * 9], vocab_size=300)
    sizes = {"max_position_embeddings": 64, "eos_token_ids": (0,), "bos_token_id": 0, "dtype": "float32"}
    config = LlamaConfig(
        tokenizer.get_vocab_size(), 32, 48, 2, 4, num_key_value_heads=2, **{**sizes, **changes}
    )
    rng = np.random.default_rng(0)
    shapes = models.parameter_shapes(config)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes}
    tensors = models.stored_tensors(config, weights)
    save_pretrained(directory, config.to_dict(), tensors, tokenizer, {"eos_token_id": 0})
    return directory


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def without_weights(whole_model, tmp_path_factory):
    """The model without its weights file."""
    directory = tmp_path_factory.mktemp("without") / "model"
    shutil.copytree(whole_model, directory, ignore=shutil.ignore_patterns(WEIGHTS))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def assert_one_error_line(result, words, code=2):
    """One line on standard error with these words, nothing on standard output, and the exit code."""
    assert result[:2] == (code, ""), result
    err = result[2]
    assert words in err and err.startswith("tilewise: ") and err.count("\n") == 1 and len(err) < 2500, err
    assert "Traceback" not in err and all(c.isprintable() for c in err[:-1])


def _json(name, **changes):
    """Change keys of a JSON file of a model directory."""

    def change(directory):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _write(name, content):
    """Replace the bytes of a file."""
    return lambda directory: (directory / name).write_bytes(content)


def _instead(name, make):
    """Replace a file by something else."""

    def change(directory):
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


def _tensors(edit):
    """Change the weights file's tensors."""

    def change(directory):
        tensors = load_file(directory / WEIGHTS)
        edit(tensors)
        save_file(tensors, directory / WEIGHTS)

    return change


def _header(edit):
    """Change the header of the weights file, as a dictionary."""

    def change(directory):
        content = (directory / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        edit(header)
        text = json.dumps(header).encode()
        (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return change


def _index(weight_map):
    """A model with an index of its weights."""

    def change(directory):
        (directory / WEIGHTS).rename(directory / "part")
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def _everything_in(part):
    layout = models.file_layout(LlamaConfig(271, 32, 48, 2, 4, num_key_value_heads=2))
    return {tensor.name: part for tensor in layout.table}


def _swap_offsets(header):
    a, b = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    header[a]["data_offsets"] = header[b]["data_offsets"]


MODELS = {  # one fault of each file; the readers' own tests have all faults
    "config: binary": (_write("config.json", bytes(range(256))), "byte 128 is not UTF-8"),
    "config: device": (_instead("config.json", lambda path: path.symlink_to("/dev/zero")), "a device"),
    "config: missing": (_instead("config.json", lambda path: None), "must hold config.json"),
    "size without end": (_json("config.json", hidden_size=10**4000), "hidden_size"),
    "size of another model": (_json("config.json", intermediate_size=64), "mlp"),
    "layers left out": (_json("config.json", num_hidden_layers=1), "num_hidden_layers"),
    "vocabulary too large": (_json("config.json", vocab_size=300), "with the 300 rows"),
    "tied head that differs": (_json("config.json", tie_word_embeddings=True), "lm_head.weight"),
    "generation: outside": (_json("generation_config.json", eos_token_id=[0, -271]), "got -271"),
    "generation: pipe": (_instead("generation_config.json", os.mkfifo), "named pipe"),
    "tokenizer config: text": (_write("tokenizer_config.json", b"text"), "tokenizer_config.json"),
    "template: pipe": (_instead("chat_template.jinja", os.mkfifo), "named pipe"),
    "tokenizer: nested": (_write("tokenizer.json", b"[" * 10**5), "tokenizer.json"),
    "tokenizer: missing": (_instead("tokenizer.json", lambda path: None), "must hold tokenizer.json"),
    "weights: text": (_write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\nsize 12\n"), "header"),
    "weights: pipe": (_instead(WEIGHTS, os.mkfifo), "named pipe"),
    "weights: missing": (_instead(WEIGHTS, lambda path: None), "no such file"),
    "weights: overlapping": (_header(_swap_offsets), "belong to no tensor"),
    "weights: a hostile name": (_header(lambda h: h.update({"\x1b[2J\n" * 9999: 3})), "\\x1b[2J"),
    "weights: one missing": (_tensors(lambda t: t.pop("model.norm.weight")), "'model.norm.weight'"),
    "index: above": (_index({"a": "../x"}), "'../x' is not the name of a file"),
    "index: nested": (_write(f"{WEIGHTS}.index.json", b"[" * 10**5), "index.json"),
}


@pytest.mark.parametrize("case", MODELS)
def test_an_invalid_model_directory_is_rejected(whole_model, tmp_path, run, case):
    """Each fault in a file of a model directory gives one line before anything is written."""
    change, words = MODELS[case]
    shutil.copytree(whole_model, tmp_path / "model")
    change(tmp_path / "model")
    assert_one_error_line(run("generate", tmp_path / "model", "def f"), words)


def test_unusual_valid_model_directories_are_accepted(whole_model, tmp_path, run):
    """The twin: links, an index, a padded vocabulary, a copied tied head and old RoPE buffers are valid."""
    _, text, _ = run("generate", whole_model, "def f", "--max-tokens", 4)
    for name, change in {
        "links": _instead(WEIGHTS, lambda path: path.symlink_to(whole_model / WEIGHTS)),
        "index": _index(_everything_in("part")),
        "frequencies": _tensors(
            lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})
        ),
        "halves": _tensors(lambda t: t.update({n: x.astype(ml_dtypes.bfloat16) for n, x in t.items()})),
    }.items():
        shutil.copytree(whole_model, tmp_path / name)
        change(tmp_path / name)
        assert run("generate", tmp_path / name, "def f", "--max-tokens", 4)[:2] == (0, text), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x" * 400], "must leave room in the context of 64 tokens; got 400"),
        (["def f\ud800"], "must be UTF-8 text; got '\\ud800' at character 5"),
        (["def", "--max-tokens", "64"], "of 64 tokens; got 1 and 64; choose at most 63"),
        (["def", "--max-tokens", "9" * 40], "max_tokens must lie in"),
        (["def", "--max-tokens", "1.5"], "--max-tokens"),
        (["def", "--tp", str(1 << 40)], "tensor_parallel_size must lie in"),
        (["def", "--top-k", "-1"], "--top-k"),
        (["def", "--seed", "9" * 40], "seed"),
        (["def", "--dtype", "float16"], "--dtype"),
        (["def", "--dtype", "\udcff"], "--dtype"),
        (["def", "--\x1b[2J\udcff"], "No such option"),
        (["def", "--min-tokens", "64", "--max-tokens", "64"], "must fit the model's context"),
        (["def", "--max-model-len", "65"], "--max-model-len must be at most the model's 64; got 65"),
        (["def", "--max-model-len", "1"], "must leave room in the context of 1 tokens"),
        (["def", "--bad-words", ""], "bad_words.0 must not be empty"),
        (["def", "--n", "3"], "n must be 1 if all texts would be equal"),
        (["def", "--load-format", "pt"], "--load-format"),
        (["def", "--prompt-file", "x"], "not both"),
        (["--prompt-file", "nowhere"], "got 'nowhere': no such file"),
        (["def", "--system", "x"], "--system needs --chat"),
        (["-", "--chat"], "--chat reads messages from standard input"),
        (["--chat", "--n", "2"], "gives one answer to each"),
        (["--chat"], "needs chat_template.jinja"),
        (["def", "more"], "extra argument"),
        ([], "Missing argument"),
    ],
)
def test_wrong_requests_are_rejected_before_weights_are_read(without_weights, run, arguments, words):
    """Invalid prompts, numbers and names give one line each."""
    assert_one_error_line(run("generate", without_weights, *arguments), words)


@pytest.mark.parametrize("directory", ["nowhere", "", "/dev/null", NOT_UTF8, "a" * 5000, "a\x1b[2J\nb"])
def test_a_path_that_is_not_a_model_directory_is_named(whole_model, run, directory):
    """A missing path, a file, a path that is too long, or one with escapes gives one harmless line."""
    for path in (directory, whole_model / "config.json"):
        assert_one_error_line(run("generate", path, "def"), "must hold config.json")


def test_spellings_of_a_dtype_are_equal(whole_model, run):
    """Every spelling, and `auto` for a model stored in it, gives the same text; bf16 gives another."""
    texts = {
        dtype: run("generate", whole_model, "def f", "--dtype", dtype)[:2]
        for dtype in ("float32", "f32", "fp32", "auto", "bfloat16")
    }
    other = texts.pop("bfloat16")
    assert len({*texts.values()}) == 1 and texts["auto"][0] == other[0] == 0 and texts["auto"] != other


def test_the_default_length_fits_a_small_context(whole_model, run):
    """Without --max-tokens a text ends with the context; all remaining tokens can be requested."""
    code, _, err = run("generate", whole_model, "def f", "--seed", 1, "--temperature", 1)
    assert code == 0 and "ended by" in err
    assert run("generate", whole_model, "def", "--max-tokens", 63)[0] == 0


def test_empty_and_blank_prompts_are_valid(whole_model, run):
    """An empty prompt, blanks and control characters are valid prompts."""
    for prompt in ("", "\n\t", "\0\x1b[2J"):
        assert run("generate", whole_model, prompt, "--max-tokens", 3)[0] == 0


CONFIGS = {  # one fault of the file itself; the reader's own tests have all
    "missing": (None, "no such file"),
    "pipe": (os.mkfifo, "named pipe"),
    "hostile key": (b'"\\u001b[2J\\n" = 1\n', "must be a known key"),
    "three devices": (
        b"[distribution]\nstrategy = 'ddp'\nmesh = { dp = 3 }\n",
        "set train.batch = 9 and train.batch_splits = 3",
    ),
    "three devices, 24": (
        b"[train]\nbatch = 24\n[distribution]\nstrategy = 'ddp'\nmesh = { dp = 3 }\n",
        "fit train.batch_splits; got 3 x 1 and 8; set train.batch_splits = 3 ",
    ),
    "more devices than rows": (b"[distribution]\nstrategy = 'ddp'\nmesh = { dp = 16 }\n", "batch"),
    "context": (
        b"[data]\ncontext = 100000\n[train]\nbatch = 64\nbatch_splits = 1\n",
        "the devices' memory must fit",
    ),
    "data: missing": (b"[data]\npath = 'nowhere'\n", "must be a file or a directory"),
    "data: empty": (b"[data]\npath = 'empty'\n", "must hold UTF-8 text"),
    "data: binary": (b"[data]\npath = 'binary'\n", "1 binary"),
    "data: pipe": (b"[data]\npath = 'pipe'\n", "must be a file or a directory"),
    "data: structured": (
        b"[data]\npath = 'chat.jsonl'\n",
        "in chat.jsonl:1; got 'messages'; set the names of fields (field_...), or type = 'chat'",
    ),
    "data: too little": (b"[data]\npath = 'little'\n", "must hold at least context + 1"),
    "output: below a file": (b"[output]\ndirectory = 'little/x'\n", "can be written to"),
    "output: too long": (b"[output]\ndirectory = '" + b"a" * 300 + b"'\n", "can be written to"),
    "output: model is a file": (b"[output]\ndirectory = 'taken'\n", "called 'model'"),
    "output: metrics is a directory": (b"[output]\ndirectory = 'taken2'\n", "called 'metrics.jsonl'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_invalid_configuration_is_rejected(tmp_path, run, case):
    """Each fault in a configuration, or in a path that it names, gives one line, and nothing is written."""
    content, words = CONFIGS[case]
    for folder in ("taken/x", "taken2/metrics.jsonl"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "taken" / "model").touch()
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "little").write_text("x")
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n' * 1000)
    if case != "pipe":
        os.mkfifo(tmp_path / "pipe")
    path = tmp_path / ("pipe" if case == "pipe" else "train.toml")
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert_one_error_line(run("train", path), words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["dp=two"], "a mesh must have the form axis=size"),
        (["dp=2 ,tp= 2"], "a mesh must have the form axis=size"),
        (["dp=2,\x1b[2J=2"], "name of an axis must be printable"),
        (["\udcff=2"], "name of an axis must be printable"),
        ([f"dp={1 << 20}"], "must lie in [1, 1024]"),
        (["xx=2"], "mesh axes are pp, dp, fsdp and tp"),
        (["dp=3"], "nodes of its tree"),
        (["tp=1024"], "nodes of its tree"),
        (["dp=2", "--steps", "0"], "--steps"),
        (["dp=2", "--steps", "9" * 40], "--steps"),
        (["dp=2", "--steps", "many"], "--steps"),
    ],
)
def test_wrong_options_of_verify_are_rejected(tmp_path, run, options, words):
    """A text that is not a valid mesh of this model, and an invalid number of steps."""
    path = write_toml(make_config(tmp_path / "nowhere", tmp_path), tmp_path / "train.toml")
    assert_one_error_line(run("verify", path, "--mesh", *options), words)


def test_invalid_arguments_of_the_demo_are_rejected(tmp_path, texts, run):
    """Invalid data, an impossible mesh, and files in the output's place give one line; nothing is written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken" / "timeline.json").mkdir(parents=True)
    (tmp_path / "taken2").mkdir()
    (tmp_path / "taken2" / "untrained").touch()
    before = sorted(tmp_path.rglob("*"))
    out = ("--out", tmp_path / "out", "--steps", 2)
    for arguments, words in (
        ((*out, "--data", tmp_path / "nowhere"), "must be a file or a directory"),
        ((*out, "--data", tmp_path / "empty"), "must hold UTF-8 text"),
        ((*out, "--dp", 3), "nodes of its tree"),
        (("--out", tmp_path / "taken", "--data", texts), "called 'timeline.json'"),
        (("--out", tmp_path / "taken2", "--data", texts), "called 'untrained'"),
    ):
        assert_one_error_line(run("demo", *arguments), words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_names_that_are_not_utf8_work(whole_model, texts, tmp_path):
    """A model directory, data and output with names that are not UTF-8: the run succeeds and prints
    its path unchanged.
    """
    shutil.copytree(whole_model, tmp_path / NOT_UTF8)
    done = tilewise("generate", tmp_path / NOT_UTF8, "def f", "--max-tokens", 3)
    assert done.returncode == 0, done.stderr
    shutil.copytree(texts, tmp_path / (NOT_UTF8 + "t"))
    config = make_config("t", "o", steps=2).model_copy()
    file = write_toml(config, tmp_path / "train.toml")
    (tmp_path / (NOT_UTF8 + "d")).mkdir()
    shutil.move(file, tmp_path / (NOT_UTF8 + "d") / "train.toml")
    shutil.copytree(texts, tmp_path / (NOT_UTF8 + "d") / "t")
    done = tilewise("train", tmp_path / (NOT_UTF8 + "d") / "train.toml", errors="surrogateescape")
    assert done.returncode == 0, done.stderr
    assert done.stdout == str(tmp_path / (NOT_UTF8 + "d") / "o" / "model") + "\n"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        pytest.param({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, marks=pytest.mark.slow),
    ],
)
def test_text_that_a_console_cannot_show_is_escaped(whole_model, run, environment):
    """A console without Unicode gets escapes instead of a traceback; the text is the same."""
    arguments = ("generate", whole_model, "def f", "--temperature", 2, "--seed", 3)
    _, text, _ = run(*arguments)
    plain = tilewise(*arguments, extra_environment=environment)
    assert plain.returncode == 0, plain.stderr
    assert not text.isascii() and plain.stdout == text.encode("ascii", "backslashreplace").decode()
