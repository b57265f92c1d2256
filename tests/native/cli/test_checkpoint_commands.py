"""`tilewise checkpoint inspect | verify | convert`: output, written files, and errors."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.numpy import load_file

from native.models.families import Case
from native.train.small_run import is_same, make_config, run, weights, write_texts
from pure.checkpoint.planted import planted, write_archive
from tilewise import models
from tilewise.checkpoint import (
    PartedTensor,
    TrainingState,
    lock_directory,
    open_weights,
    save_checkpoint,
    write_weights,
)
from tilewise.cli.main import _run
from tilewise.core.sizes import format_bytes
from tilewise.data import train_tokenizer
from tilewise.train import TrainConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output of a run."""
    root = tmp_path_factory.mktemp("trained")
    run(make_config(write_texts(root / "texts"), root / "out"))
    return root / "out"


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """The output of a run on four devices, with a file for each."""
    root = tmp_path_factory.mktemp("spread")
    run(make_config(write_texts(root / "texts"), root / "out", {"fsdp": 2, "tp": 2}))
    return root / "out"


@pytest.fixture
def command(capsys):
    """Runs `tilewise checkpoint` and returns exit code, output and messages."""

    def call(*arguments):
        code = _run(["checkpoint", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def _copy(trained, tmp_path):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / "step-00000006"


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-00000006"])
def test_inspect_shows_the_content_of_a_checkpoint(command, trained, place):
    """Step, configuration, tensors and bytes, for a run, its checkpoint folder, or one checkpoint."""
    code, out, _ = command("inspect", trained / place)
    assert code == 0 and "step: 6\n" in out and "  train.seed = 0\n" in out
    assert "  model.model_type = llama\n" in out and "step-00000006: valid" in out
    state = load_file(trained / "checkpoints" / "step-00000006" / "device-00000.safetensors")
    assert f"{format_bytes(sum(t.nbytes for t in state.values()))} together" in out
    assert f"{sum(not n.startswith('optimizer.') for n in state)} of the model" in out
    assert ("step-00000004" in out) == (not place.endswith("6"))


def test_verify_reads_every_byte(command, trained, tmp_path):
    """Valid checkpoints are reported as complete; a flipped bit gives exit code 1, which inspect
    does not detect.
    """
    newest = _copy(trained, tmp_path)
    code, out, _ = command("verify", tmp_path)
    assert code == 0 and out.count(": complete, ") == 2
    _flip(newest / "device-00000.safetensors")
    code, out, _ = command("verify", newest)
    assert code == 1 and "damaged: tensor " in out and "has a wrong checksum" in out
    assert command("inspect", newest)[0] == 0
    (newest / "device-00000.safetensors").write_bytes(b"")
    code, out, _ = command("inspect", tmp_path)
    assert code == 1 and "step-00000006: damaged: " in out and "step: 4\n" in out


def test_inspect_lists_the_files_of_devices(command, spread):
    """Number of devices, the mesh that wrote them, and the bytes of each file."""
    code, out, _ = command("inspect", spread)
    assert code == 0 and "devices: 4 (fsdp=2, tp=2)\n" in out
    for number in range(4):
        name = f"device-{number:05d}.safetensors"
        state = load_file(spread / "checkpoints" / "step-00000006" / name)
        size = sum(tensor.nbytes for tensor in state.values())
        assert f"  {name}: {len(state)} tensors or parts of them, {format_bytes(size)}\n" in out


def test_verify_names_the_files_that_are_damaged(command, spread, tmp_path):
    """Two damaged files, each with a tensor; a missing file is found without reading."""
    newest = _copy(spread, tmp_path)
    for number in (1, 3):
        _flip(newest / f"device-0000{number}.safetensors")
    code, out, _ = command("verify", tmp_path)
    assert code == 1 and out.count(": complete, ") == 1 and out.count("has a wrong checksum") == 2
    assert "in device-00001.safetensors" in out and "in device-00003.safetensors" in out
    (newest / "device-00002.safetensors").unlink()
    for name in ("inspect", "verify"):
        code, out, _ = command(name, newest)
        assert code == 1 and "damaged: device-00002.safetensors: " in out and "no such file" in out
    code, _, err = command("convert", newest, tmp_path / "new")
    assert code == 2 and "device-00002.safetensors" in err and not (tmp_path / "new").exists()


def test_parts_become_a_model_directory(command, spread, trained, tmp_path, monkeypatch):
    """The same model as that of one device, to the bit; one tensor at a time is in memory."""
    ids, read, most = set(), PartedTensor.read, []

    def counted(tensor):
        array = read(tensor)
        ids.add(id(array))
        most.append(len(ids))
        weakref.finalize(array, ids.discard, id(array))
        return array

    monkeypatch.setattr(PartedTensor, "read", counted)
    code, _, err = command("convert", spread, tmp_path / "new")
    assert code == 0 and not err, err
    assert is_same(_arrays(tmp_path / "new"), weights(spread)) and is_same(weights(spread), weights(trained))
    assert len(most) > 10 and {*most} == {1}


def test_a_path_without_a_checkpoint_is_rejected(command, tmp_path):
    """One line, exit code 2."""
    for arguments in (("inspect", tmp_path), ("verify", tmp_path)):
        code, _, err = command(*arguments)
        assert code == 2 and err.splitlines()[-1].startswith("tilewise: [") and str(tmp_path) in err


def test_checkpoints_of_a_running_training_can_be_inspected(command, trained, tmp_path):
    """Reading takes no lock."""
    _copy(trained, tmp_path)
    with lock_directory(tmp_path):
        assert command("verify", tmp_path)[0] == command("inspect", tmp_path)[0] == 0


def test_a_run_becomes_a_model_directory(command, trained, tmp_path):
    """The newest checkpoint with its tokenizer becomes the model that the run itself wrote."""
    code, _, err = command("convert", trained, tmp_path / "new")
    assert code == 0 and not err, err
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "new" / name).read_text()) == json.loads(
            (trained / "model" / name).read_text()
        )
    assert is_same(_arrays(tmp_path / "new"), weights(trained))
    code, _, err = command("convert", trained / "checkpoints" / "step-00000004", tmp_path / "older")
    assert code == 0, err
    assert not is_same(_arrays(tmp_path / "older"), weights(trained))
    code, _, _ = command("convert", trained, tmp_path / "one.safetensors")
    assert code == 0 and is_same(load_file(tmp_path / "one.safetensors"), weights(trained))


def _arrays(path):
    return {name: np.array(tensor) for name, tensor in open_weights(path).items()}


def test_files_have_the_names_of_the_family(command, tmp_path):
    """Transposed and fused tensors have the family's names, and transformers opens them."""
    config = make_config(write_texts(tmp_path / "texts"), tmp_path / "out", steps=1)
    model = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 4}
    run(TrainConfig.model_validate({**config.model_dump(exclude={"model"}), "model": model}))
    assert command("convert", tmp_path / "out", tmp_path / "new")[0] == 0
    assert is_same(_arrays(tmp_path / "new"), _arrays(tmp_path / "out" / "model"))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert opened.config.model_type == "gpt2"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A Qwen2 as transformers writes it, and the model itself."""
    directory = tmp_path_factory.mktemp("pretrained") / "model"
    model = Case("qwen2", "qwen2", {"num_key_value_heads": 2}).model(vocab_size=290)
    model.save_pretrained(directory)
    return directory, model


def test_a_state_dict_becomes_a_model_directory(command, pretrained, tmp_path):
    """With the configuration of a directory; also a training script's file with --part; to the bit."""
    directory, model = pretrained
    torch.save(model.state_dict(), tmp_path / "model.bin")
    torch.save({"model": model.state_dict(), "epoch": 1}, tmp_path / "train.pt")
    for source, more in (("model.bin", ()), ("train.pt", ("--part", "model"))):
        target = tmp_path / f"from-{source}"
        code, _, err = command("convert", tmp_path / source, target, "--model", directory, *more)
        assert code == 0 and "no tokenizer is written" in err, err
        mine, theirs = (models.open_weights(p, models.open(p)) for p in (target, directory))
        assert is_same(*({n: np.array(t) for n, t in w.items()} for w in (mine, theirs)))
    assert command("convert", tmp_path / "model.bin", tmp_path / "m.safetensors")[0] == 0
    assert load_file(tmp_path / "m.safetensors").keys() == model.state_dict().keys()


def _each(prefix):
    """Add a prefix to every name."""
    return lambda name: prefix + name


WRAPPED = {
    "data parallel": _each("module."),
    "compiled, then data parallel": _each("module._orig_mod."),
    "each layer compiled": lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name),
    "checkpointed activations": lambda name: re.sub(
        r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name
    ),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name.replace('model.', 'model._fsdp_wrapped_module.', 1)}",
    "part data parallel": lambda name: name.replace("model.", "model.module.", 1),
    "inside others, compiled": _each("module.trainer.model._orig_mod."),
    "without the prefix, inside": lambda name: "net." + name.removeprefix("model."),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_state_dicts_of_wrapped_models_are_converted(command, pretrained, tmp_path, name):
    """Prefixes of torch.compile, DataParallel, FSDP and enclosing modules are removed in any nesting."""
    directory, model = pretrained
    wrapped = {WRAPPED[name](key): tensor for key, tensor in model.state_dict().items()}
    if name == "data parallel":
        wrapped["n_averaged"] = torch.tensor(3)  # of AveragedModel
    torch.save(wrapped, tmp_path / "w.pt")
    code, _, err = command("convert", tmp_path / "w.pt", tmp_path / "new", "--model", directory)
    assert code == 0, err
    actual, expected = _arrays(tmp_path / "new"), _arrays(directory)
    if "without the prefix" in name:
        expected = {key.removeprefix("model."): tensor for key, tensor in expected.items()}
    actual.pop("lm_head.weight", None)
    expected.pop("lm_head.weight", None)
    assert is_same(actual, expected)
    code, _, err = command("convert", tmp_path / "w.pt", tmp_path / "one.safetensors")
    keys = " ".join(load_file(tmp_path / "one.safetensors"))
    assert code == 0 and not re.search("_orig_mod|_wrapped_module|n_averaged", keys)
    assert not keys.startswith("module.")
    write_weights(tmp_path / "new", ((key, tensor.numpy()) for key, tensor in wrapped.items() if tensor.ndim))
    assert models.open_weights(tmp_path / "new", models.open(tmp_path / "new")).keys()


def test_names_that_would_collide_are_not_unwrapped(command, pretrained, tmp_path):
    """A tensor under both names is ambiguous; another model's tensor is reported under its own name."""
    directory, model = pretrained
    state = model.state_dict()
    key = "model.norm.weight"
    for wrapped in (
        {**state, f"_orig_mod.{key}": state[key]},
        {f"a.{name}" if i else f"b.{name}": tensor for i, (name, tensor) in enumerate(state.items())},
        {"a": state[key]},
    ):
        torch.save(wrapped, tmp_path / "w.pt")
        code, _, err = command("convert", tmp_path / "w.pt", tmp_path / "new", "--model", directory)
        assert code == 2 and "[checkpoint.stored] files must hold" in err and not (tmp_path / "new").exists()


SMALL_FILES = {
    "special_tokens_map.json": '{"eos_token": "<end>"}',
    "tokenizer_config.json": '{"eos_token": "<end>", "tokenizer_class": "Qwen2Tokenizer", "padding_side": "left"}',
    "generation_config.json": '{"top_k": 7, "do_sample": true, "transformers_version": "4.0"}',
    "chat_template.jinja": "{{ messages[0].content }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "modules.json": '[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]',
    "1_Pooling/config.json": '{"pooling_mode_cls_token": true}',
    "sentence_bert_config.json": '{"max_seq_length": 20}',
}


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json", "tokenizer.model", "nothing"])
def test_the_other_files_of_a_model_are_copied(command, pretrained, trained, tmp_path, kind):
    """Tokenizer, chat templates, settings of generation and pooling byte by byte; config.json with every key."""
    directory, model = pretrained
    old = tmp_path / "old"
    old.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(config | {"_name_or_path": "somewhere"}))
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    tokenizer = {"tokenizer.json": train_tokenizer(["x = 1"], vocab_size=280).to_str()}
    files = {
        "tokenizer.json": SMALL_FILES | tokenizer,
        "vocab.json": SMALL_FILES | {"vocab.json": '{"a": 0, "b": 1, "ab": 2}', "merges.txt": "a b\n"},
        "tokenizer.model": {"tokenizer.model": "x"},
        "nothing": {},
    }[kind]
    for name, content in files.items():
        (old / name).parent.mkdir(exist_ok=True)
        (old / name).write_text(content)
    code, _, err = command("convert", old, tmp_path / "new")
    assert code == 0 and ("no tokenizer" in err) == (kind == "nothing"), err
    for name, content in files.items():
        assert (tmp_path / "new" / name).read_text() == content, name
    assert json.loads((tmp_path / "new" / "config.json").read_text())["_name_or_path"] == "somewhere"
    if kind == "tokenizer.json":  # a state dict gets them from --model; what cannot be read is named
        code, _, err = command("convert", old / "pytorch_model.bin", tmp_path / "pt", "--model", old)
        assert code == 0 and (tmp_path / "pt" / "chat_template.jinja").exists(), err
        (old / "special_tokens_map.json").unlink()
        (old / "special_tokens_map.json").mkdir()
        code, _, err = command("convert", old, tmp_path / "other")
        assert code == 2 and "special_tokens_map.json" in err and not (tmp_path / "other").exists()


def test_a_distributed_checkpoint_becomes_a_model_directory(command, pretrained, tmp_path):
    """A model that `dcp.save` wrote together with other entries."""
    directory, model = pretrained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=tmp_path / "dcp")
    args = ("convert", tmp_path / "dcp", tmp_path / "new", "--model", directory)
    code, _, err = command(*args)
    assert code == 2 and "name the part" in err and not (tmp_path / "new").exists()
    code, _, err = command(*args, "--part", "model")
    assert code == 0, err
    assert is_same(
        {n: t for n, t in _arrays(tmp_path / "new").items() if n != "lm_head.weight"},
        {n: t for n, t in _arrays(directory).items() if n != "lm_head.weight"},
    )


def test_an_unreadable_checkpoint_does_not_hide_the_others(command, trained, tmp_path, monkeypatch):
    """Each checkpoint has a line, and the exit code says that not all were read."""
    newest = _copy(trained, tmp_path / "run")
    shutil.copytree(newest, newest.with_name("step-00000001"))
    opens = os.open

    def open_others(path, *arguments, **options):
        if "step-00000001/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opens(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_others)
    for look, state in (("inspect", "valid"), ("verify", "complete")):
        code, out, _ = command(look, tmp_path / "run")
        first, *others = out.splitlines()
        assert code == 1 and "step-00000001: cannot be read: " in first and "Permission denied" in first
        assert any(line.startswith(f"{newest}: {state}") for line in others)


def test_a_target_among_the_source_checkpoints_is_rejected(command, trained, tmp_path):
    """The run would treat it as a checkpoint; nothing is written. Other places in the output are
    allowed, and so is a place next to a copied checkpoint.
    """
    newest = _copy(trained, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    for source, target in (
        (newest.parent.parent, "run/checkpoints/step-00000009"),
        (newest.parent, "link/checkpoints/new"),
        (newest, f"run/checkpoints/{newest.name}/a/new"),
        (newest, "link/checkpoints/new"),
    ):
        code, _, err = command("convert", source, tmp_path / target)
        assert code == 2 and "must not lie among the source's checkpoints" in err.splitlines()[-1], target
        assert sorted(tmp_path.rglob("*")) == before
    newest.rename(tmp_path / newest.name)
    code, _, err = command("convert", tmp_path / newest.name, tmp_path / "step-00000009")
    assert code == 2 and "must not lie among the source's checkpoints" in err.splitlines()[-1]
    for free in ("new", f"{newest.name}.safetensors"):
        assert command("convert", tmp_path / newest.name, tmp_path / free)[0] == 0
    assert command("convert", tmp_path / "run", tmp_path / "run" / "new.safetensors")[0] == 0


def test_impossible_conversions_are_rejected(command, pretrained, trained, tmp_path):
    """An existing target, no configuration, another model's configuration, a damaged source, code,
    options without effect, a directory that is not a source: one line, nothing written.
    """
    _, model = pretrained
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "there").mkdir()
    write_archive(tmp_path / "code.pt", planted(tmp_path / "ran")["reduce"])
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / ".metadata").write_bytes(planted(tmp_path / "ran")["newest protocol"])
    newest = _copy(trained, tmp_path)
    _flip(newest / "device-00000.safetensors")
    new = tmp_path / "new"
    for arguments, words in (
        ((tmp_path / "model.pt", tmp_path / "there"), "the target must not exist"),
        ((tmp_path / "model.pt", new), "needs a config.json"),
        ((tmp_path / "model.pt", new, "--model", trained / "model"), "files must hold"),
        ((tmp_path / "model.pt", new, "--model", tmp_path), "config.json"),
        ((newest, new), "has a wrong checksum"),
        ((tmp_path / "code.pt", new), "which is not part of a tensor"),
        ((tmp_path / "code", new), "which is not part of a tensor"),
        ((tmp_path / "model.pt", tmp_path / "model.pt" / "x"), "can be written to"),
        ((trained, new, "--model", tmp_path / "nothere"), "--model must be a model directory"),
        ((trained, tmp_path / "new.safetensors", "--model", trained / "model"), "remove --model"),
        ((trained, new, "--part", "model"), "--part names a state dict"),
        ((trained / "model", new), "name their file"),
        ((tmp_path / "there", new), "PyTorch"),
        ((trained, tmp_path / "new.gguf"), "made from a model directory"),
        ((trained / "model", tmp_path / "new.gguf", "--part", "model"), "without --model and --part"),
        (
            (trained / "model", tmp_path / "new.gguf", "--type", "q3_k"),
            "--type must be one of bf16, q8_0, q4_0",
        ),
        ((tmp_path / "model.pt", new, "--type", "q8_0"), "--type is the type of matrices in a GGUF file"),
    ):
        code, _, err = command("convert", *arguments)
        assert code == 2 and words in err and err.count("\n") == 1, err
    assert not [*tmp_path.glob("new*")] and not (tmp_path / "ran").exists()
    assert not list((tmp_path / "there").iterdir())


def test_a_model_directory_becomes_a_gguf_file(command, trained, tmp_path):
    """With its weights, its tokenizer and its name; bf16 by default."""
    gguf = pytest.importorskip("gguf")
    shutil.copytree(trained / "model", tmp_path / "mine")
    for name, options in (("a.gguf", ()), ("b.gguf", ("--type", "q8_0"))):
        assert command("convert", tmp_path / "mine", tmp_path / name, *options)[0] == 0
        reader = gguf.GGUFReader(tmp_path / name)
        assert reader.fields["general.name"].contents() == "mine"
        kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert (
            kinds["blk.0.attn_q.weight"] == ("Q8_0" if options else "BF16")
            and kinds["output_norm.weight"] == "F32"
        )
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        rows = next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
        assert len(tokens) == rows and tokens[0] == "<|endoftext|>"


def test_a_target_that_cannot_be_written_leaves_nothing(command, trained, tmp_path, monkeypatch):
    """A full disk gives exit code 1, one line, and no partial directory."""
    import tilewise.checkpoint.pretrained as pretrained

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrained, "write_weights", full)
    code, _, err = command("convert", trained, tmp_path / "new")
    assert code == 1 and "No space left" in err and not list(tmp_path.iterdir())


def test_numbered_parts_from_before_safetensors_are_converted(command, pretrained, tmp_path):
    """With the directory's configuration; a missing part is an error."""
    directory, model = pretrained
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(directory / "config.json", old)
    state = list(model.state_dict().items())
    names = [f"pytorch_model-0000{i + 1}-of-00002.bin" for i in range(2)]
    for i, name in enumerate(names):
        torch.save(dict(state[i::2]), old / name)
    assert command("convert", old, tmp_path / "new")[0] == 0
    mine, theirs = (models.open_weights(p, models.open(p)) for p in (tmp_path / "new", directory))
    assert is_same(*({n: np.array(t) for n, t in w.items()} for w in (mine, theirs)))
    (old / names[-1]).rename(old / "pytorch_model-00007-of-00009.bin")
    code, _, err = command("convert", old, tmp_path / "other")
    assert code == 2 and "all of its parts" in err and not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_damaged(
    command, trained, tmp_path, monkeypatch, name
):
    """It is reported as removed; exit code 0."""
    import tilewise.checkpoint as checkpoint

    older = _copy(trained, tmp_path).with_name("step-00000004")
    opened = checkpoint.open_checkpoint

    def remove_first(path):
        shutil.rmtree(older, ignore_errors=True)
        return opened(path)

    monkeypatch.setattr(checkpoint, "open_checkpoint", remove_first)
    code, out, _ = command(name, tmp_path)
    assert code == 0 and f"{older}: was removed meanwhile\n" in out
    assert f"step-00000006: {'complete' if name == 'verify' else 'valid'}" in out


def test_foreign_settings_are_printed_escaped(command, tmp_path):
    """Control characters in a checkpoint's configuration are escaped."""
    state = TrainingState(1, {"w": np.ones(2, np.float32)})
    save_checkpoint(tmp_path, state, {"a\x1b[2J": "\x1b]0;x\x07", "b": ["\x1b"]})
    code, out, _ = command("inspect", tmp_path)
    assert code == 0 and "\x1b" not in out and "\x07" not in out
    assert r"  a\x1b[2J = \x1b]0;x\x07" in out and r"  b = ['\x1b']" in out
