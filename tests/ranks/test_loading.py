"""Weights from files: each device reads only its own slices, and its memory equals loading from arrays."""

from __future__ import annotations

import os
from functools import cache
from math import prod

import ml_dtypes
import numpy as np
import pytest
from small_llama import config, training_graph

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import (
    LazyTensor,
    PartedTensor,
    StoredTensor,
    StoredWeights,
    TrainingState,
    open_checkpoint,
    open_weights,
    save_checkpoint,
    store_parameters,
    write_weights,
)
from tilewise.checkpoint.open_file import OpenFile
from tilewise.checkpoint.shards import save_tensors
from tilewise.core import CheckpointError, PlanError
from tilewise.session import Plan, loading

MODEL = config(vocab_size=509, intermediate_size=90, tie_word_embeddings=False)  # shares of odd sizes
NORM = "layers.1.input_layernorm.weight"


def _weights(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = models.parameter_shapes(MODEL)
    return {name: (rng.standard_normal(shape) * 0.05).astype(dtype) for name, shape in shapes}


@cache
def _plan_of_decoding(dtype, axes):
    """A graph and its plan; batches are shared only in training."""
    is_training = "dp" in dict(axes)
    graph = training_graph(MODEL, dtype) if is_training else tw.ComputeGraph("llama")
    if not is_training:
        models.build_decoding_graph(graph, MODEL, 8, 1, 4, dtype)
    return graph, graph.plan(dict(axes))


def _decoding(dtype="bf16", axes=()):
    graph, plan = _plan_of_decoding(dtype, tuple(dict(axes).items()))
    return graph.instantiate(plan)


@cache
def _plan_of_training(dtype, axes):
    graph = training_graph(MODEL, dtype)
    return graph, graph.plan(dict(axes))


def _training(axes, dtype="bf16"):
    graph, plan = _plan_of_training(dtype, tuple(axes.items()))
    return graph.instantiate(plan)


def _memory(model):
    """All bytes of all parameters and masters on every device, by name and device."""
    tensors = model._tensors
    bytes_of = {}
    for name in tensors.lasting_names():
        spec = model.plan.graph.spec(tensors.ids[name])
        for device in range(model.plan.mesh.num_devices):
            sizes, _ = tensors.store._local(model.plan.shapes.on(device), spec, tensors.ids[name], 0)
            part = tensors.store._bytes(device, tensors.ids[name], 0, sizes, spec)
            bytes_of[name, device] = part.tobytes()
    return bytes_of


def _share(model, itemsize):
    """Bytes in files of each device's parts, replicated tensors included."""
    names, shapes = model.parameter_names(), model.plan.shapes
    ids = model._tensors.ids
    return [
        sum(
            prod(model._tensors.store._local(shapes.on(d), model.plan.graph.spec(ids[n]), ids[n], 0)[0])
            for n in names
        )
        * itemsize
        for d in range(model.plan.mesh.num_devices)
    ]


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"tp": 8}, {"dp": 2, "tp": 2}], ids=str)
def test_each_device_reads_its_share_once(tmp_path, axes):
    """Over all devices every byte of the files is read once, and memory equals that of arrays."""
    weights = _weights(ml_dtypes.bfloat16)
    write_weights(tmp_path, weights.items(), max_shard_bytes=50_000)
    with _decoding("bf16", axes) as model, _decoding("bf16", axes) as other:
        report = model.load_parameters(tmp_path)
        assert other.load_parameters(weights).bytes_read == (0,) * model.plan.mesh.num_devices
        assert sum(report.bytes_read) == sum(w.nbytes for w in weights.values())
        assert all(read <= share for read, share in zip(report.bytes_read, _share(model, 2)))
        assert _memory(model) == _memory(other)
        for name, weight in weights.items():  # of a master in training
            np.testing.assert_array_equal(
                model.get_tensor(name).astype(np.float32), weight.astype(np.float32)
            )


def test_part_read_by_two_devices_is_counted_twice(tmp_path, monkeypatch):
    """The twin of the counts above: every device reads the replicated norms."""
    weights = _weights(ml_dtypes.bfloat16)
    write_weights(tmp_path, weights.items())
    with _decoding("bf16", {"tp": 2}) as model:
        monkeypatch.setattr(Plan, "holder", lambda plan, tensor, device: device)
        read = model.load_parameters(tmp_path).bytes_read
        norms = sum(w.nbytes for w in weights.values() if w.ndim == 1)
        assert sum(read) == sum(w.nbytes for w in weights.values()) + norms


@pytest.mark.parametrize("target", ["f32", "bf16"])
def test_every_element_type_on_disk(tmp_path, target):
    """Rounded to nearest even, as in NumPy; masters of a trained model come from the same reading."""
    with _training({"tp": 2}, target) as model, _training({"tp": 2}, target) as other:
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
            weights = _weights(dtype)
            write_weights(tmp_path, weights.items())
            report = model.load_parameters(tmp_path)
            other.load_parameters({name: weight.astype(np.float32) for name, weight in weights.items()})
            assert _memory(model) == _memory(other), dtype
            assert sum(report.bytes_read) == sum(w.nbytes for w in weights.values())


def test_non_floating_weights_are_rejected_by_name(tmp_path):
    """Quantized weights: nothing is changed."""
    weights = _weights(np.float32)
    with _decoding() as model:
        model.initialize(1)
        before = _memory(model)
        for dtype in (np.int32, np.int8, np.bool_):
            write_weights(tmp_path, {**weights, NORM: weights[NORM].astype(dtype)}.items())
            with pytest.raises(CheckpointError, match=rf"floating-point.*{NORM}.*nothing was changed"):
                model.load_parameters(tmp_path)
        assert _memory(model) == before


@pytest.mark.parametrize("spoil", [np.nan, 3.4e38])
def test_partly_loaded_model_cannot_run(tmp_path, spoil):
    """A number that is not finite is named with its file; every call fails until other weights are loaded."""
    weights = _weights(np.float32)
    write_weights(tmp_path / "..", weights.items())
    weights[NORM][7] = spoil
    write_weights(tmp_path, weights.items())
    with _decoding("bf16", {"tp": 2}) as model:
        model.initialize(1)
        with pytest.raises(CheckpointError, match=rf"finite in bf16.*{NORM}.*model\.safetensors"):
            model.load_parameters(tmp_path)
        for call in (
            lambda: model.get_tensor(NORM),
            lambda: model.forward(tokens=np.zeros(1, np.int32)),
            model.state_dict,
            lambda: np.asarray(model.parameters()[NORM]),
            lambda: model.set_tensor(NORM, np.ones(MODEL.hidden_size)),
        ):
            with pytest.raises(PlanError, match="loaded again"):
                call()
        with pytest.raises(
            CheckpointError, match=NORM
        ):  # refused before anything is changed: still as it was
            model.load_parameters({name: weights[name] for name in weights})
        with pytest.raises(PlanError, match="loaded again"):
            model.get_tensor(NORM)
        model.load_parameters(tmp_path / "..")
        assert np.isfinite(model.get_tensor(NORM).astype(np.float32)).all()


def test_a_training_state_is_read_in_place(tmp_path):
    """Masters and optimizer states from a file onto another mesh: memory equals that of arrays."""
    before, after = {"tp": 2}, {"dp": 2, "tp": 2}
    path = tmp_path / "state.safetensors"
    with _training(before) as model:
        model.initialize(3)
        state = model.state_dict()
        rng = np.random.default_rng(1)
        state |= {n: rng.random(t.shape).astype(t.dtype) for n, t in state.items() if n != "optimizer.step"}
        state["optimizer.step"] += 7
        save_tensors(path, state)
    with _training(after) as model, _training(after) as other:
        model.load_state_dict(open_weights(path))
        other.load_state_dict(state)
        assert _memory(model) == _memory(other) and model.step_count == 7
        state_read = model.state_dict()
        assert all(state_read[name].tobytes() == tensor.tobytes() for name, tensor in state.items())
        state["norm.weight"][3] = np.nan
        save_tensors(path, state)
        with pytest.raises(CheckpointError, match=r"finite.*norm\.weight"):
            model.load_state_dict(open_weights(path))
        with pytest.raises(PlanError, match="loaded again"):
            model.state_dict()


@pytest.mark.parametrize(
    "before,after",
    [
        ({"tp": 4}, {"fsdp": 4}),
        ({"fsdp": 2, "tp": 2}, {}),
        pytest.param({"tp": 4}, {"dp": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tp": 2}, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_are_read_by_the_devices_that_hold_their_rows(tmp_path, monkeypatch, before, after):
    """From the files of one mesh onto another: every byte is read once, and memory equals that of arrays."""
    monkeypatch.setattr(loading, "_PIECE_BYTES", 1000)
    with _training(before) as model:
        model.initialize(3)
        path = save_checkpoint(tmp_path, TrainingState(0, model.copy_state(), mesh=before), {})
        state = model.state_dict()
    with _training(after) as model, _training(after) as other:
        opened, read, counts = open_checkpoint(path).tensors, OpenFile.read_into, []
        parameters = {name: opened[name] for name in model.parameter_names()}
        assert any(isinstance(tensor, PartedTensor) for tensor in parameters.values())
        monkeypatch.setattr(OpenFile, "read_into", lambda f, b, at: counts.append(len(b)) or read(f, b, at))
        report = model.load_parameters(parameters)
        assert sum(report.bytes_read) == sum(tensor.nbytes for tensor in parameters.values())
        assert all(n <= share for n, share in zip(report.bytes_read, _share(model, 4), strict=True))
        assert sum(counts) == sum(t.nbytes for t in parameters.values() if isinstance(t, PartedTensor))
        model.load_state_dict(opened)
        other.load_state_dict(state)
        assert _memory(model) == _memory(other)


def test_part_that_is_not_finite_is_named(tmp_path):
    """Detected while it is read into place, with its file; so is a file that shrinks."""
    with _training({"fsdp": 2}) as model:
        model.initialize(3)
        state = model.copy_state()
        name = "layers.1.mlp.up_proj.weight"
        state[name].parts[1].values[0, 0] = np.inf
        path = save_checkpoint(tmp_path, TrainingState(0, state, mesh={"fsdp": 2}), {})
        with pytest.raises(CheckpointError, match=rf"finite.*{name}.*device-00001\.safetensors"):
            model.load_state_dict(open_checkpoint(path).tensors)
        with pytest.raises(PlanError, match="loaded again"):
            model.copy_state()
        with (
            _training({}) as other,  # which reads rows of both files at a time
            pytest.raises(CheckpointError, match=rf"finite.*{name}.*device-00001\.safetensors"),
        ):
            other.load_state_dict(open_checkpoint(path).tensors)
        opened = open_checkpoint(path)
        os.truncate(path / "device-00001.safetensors", 4000)
        with pytest.raises(CheckpointError, match=r"device-00001\.safetensors.*shorter"):
            model.load_state_dict(opened.tensors)


def test_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    """Truncated after opening: no signal, and no run with the previous contents of memory."""
    write_weights(tmp_path, _weights(np.float32).items())
    with _decoding() as model:
        files = open_weights(tmp_path)
        os.truncate(tmp_path / "model.safetensors", 4000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*shorter"):
            model.load_parameters(files)
        with pytest.raises(PlanError, match="loaded again"):
            model.get_tensor(NORM)
        model.initialize(0)
        model.get_tensor(NORM)


def test_wrong_names_and_shapes_are_errors_before_a_byte_is_read(tmp_path, monkeypatch):
    """Missing, unexpected, of another shape: each named, nothing read."""
    monkeypatch.setattr(loading, "read_weights", lambda *_: pytest.fail("read"))
    weights = _weights(np.float32)
    changes = {
        "every entry must be present": {NORM: None},
        "nothing else": {"layers.9.norm": weights[NORM]},
        "shapes must agree": {NORM: weights[NORM][:-1]},
    }
    with _decoding() as model:
        model.initialize(1)
        before = _memory(model)
        for words, change in changes.items():
            stored = {n: w for n, w in {**weights, **change}.items() if w is not None}
            write_weights(tmp_path, stored.items())
            with pytest.raises(CheckpointError, match=words):
                model.load_parameters(tmp_path)
        assert _memory(model) == before


def test_progress_counts_bytes_to_the_end(tmp_path, monkeypatch):
    """Reported after each piece, increasing, the last with all bytes; pieces of any size leave the same memory."""
    weights = _weights(np.float32)
    write_weights(tmp_path, weights.items())
    seen = []
    with _decoding() as model, _decoding() as other:
        other.load_parameters(tmp_path)
        monkeypatch.setattr(loading, "_PIECE_BYTES", 1000)
        report = model.load_parameters(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
        assert _memory(model) == _memory(other)
    total = sum(w.nbytes for w in weights.values())
    assert [t for _, t in seen] == [total] * len(seen) and len(seen) > len(weights)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1][0] == total == sum(
        report.bytes_read
    )


def test_pages_of_large_files_are_dropped_after_reading(tmp_path, monkeypatch):
    """Each tensor's pages, once, when the last device has read its part; not where memory is free."""
    weights = _weights(np.float32)
    write_weights(tmp_path, weights.items())
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: dropped.append(call))
    with _decoding("bf16", {"tp": 2}) as model:
        model.load_parameters(tmp_path)
        assert not dropped
        monkeypatch.setattr(loading, "available_memory", lambda: 1000)
        model.load_parameters(tmp_path)
    assert sum(length for _, _, length, _ in dropped) == sum(w.nbytes for w in weights.values())
    assert {advice for *_, advice in dropped} == {os.POSIX_FADV_DONTNEED} and len(dropped) == len(weights)


def test_pages_of_parts_are_dropped_too(tmp_path, monkeypatch):
    """Each part of each tensor once, when the last device has read its rows of it."""
    with _training({"fsdp": 2}) as model:
        model.initialize(3)
        path = save_checkpoint(tmp_path, TrainingState(0, model.copy_state(), mesh={"fsdp": 2}), {})
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: dropped.append(call))
    monkeypatch.setattr(loading, "available_memory", lambda: 1000)
    with _training({"tp": 2}) as model:
        opened = open_checkpoint(path)
        model.load_state_dict(opened.tensors)
    count = next(file for file in opened.files if "optimizer.step" in file.parts)
    assert sum(length for _, _, length, _ in dropped) == opened.nbytes - count.parts["optimizer.step"].nbytes


def _fused_table(is_transposed):
    """The weights of MODEL with queries, keys and values in one tensor, gate and up in another."""
    shapes = dict(models.parameter_shapes(MODEL))
    groups = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    }
    table, fused = [], set()
    for i in range(MODEL.num_hidden_layers):
        for name, members in groups.items():
            names = [f"layers.{i}.{member}.weight" for member in members]
            fused.update(names)
            rows = tuple((n, shapes[n][0]) for n in names)
            table.append(StoredTensor(f"model.h.{i}.{name}", rows, is_transposed))
    rest = [name for name in shapes if name not in fused]
    for name in rest:
        turned = is_transposed and len(shapes[name]) == 2
        table.append(StoredTensor(f"model.{name}", ((name, shapes[name][0]),), turned))
    return table


@pytest.mark.parametrize(
    "axes,is_transposed", [({}, False), ({"tp": 2}, True), ({"tp": 4}, False), ({"dp": 2}, True)], ids=str
)
def test_fused_and_transposed_tensors_are_read_by_slices_too(tmp_path, axes, is_transposed):
    """Written by the table and read by it; every byte once, and memory equals that of arrays."""
    weights, table = _weights(np.float32), _fused_table(is_transposed)
    write_weights(tmp_path, store_parameters(table, weights), max_shard_bytes=60_000)
    files = open_weights(tmp_path)
    assert sorted(files) == sorted(entry.name for entry in table)
    with _decoding("bf16", axes) as model, _decoding("bf16", axes) as other:
        report = model.load_parameters(StoredWeights(files, table, prefix="model."))
        other.load_parameters(weights)
        assert _memory(model) == _memory(other)
        assert sum(report.bytes_read) == sum(w.nbytes for w in weights.values())
        assert all(read <= share for read, share in zip(report.bytes_read, _share(model, 4)))
        swapped = [
            StoredTensor(e.name, e.parameters[::-1], e.is_transposed) if e.name.endswith("gate_up") else e
            for e in table
        ]
        model.load_parameters(StoredWeights(files, swapped))  # a planted fault: gate and up change places
        assert _memory(model) != _memory(other)


def test_distributed_model_is_saved_tensor_by_tensor(tmp_path, monkeypatch):
    """From devices into several files and back; each tensor is fetched only after the previous one is written."""
    weights, table = _weights(ml_dtypes.bfloat16), _fused_table(False)
    with _decoding("bf16", {"tp": 2}) as model:
        model.load_parameters(weights)
        fetched = []
        lazy = {
            name: LazyTensor(t.shape, t.dtype, lambda n=name, t=t: fetched.append(n) or t.fetch())
            for name, t in model.parameters().items()
        }
        stored = dict(store_parameters(table, lazy))
        assert not fetched
        write_weights(tmp_path, stored.items(), max_shard_bytes=40_000)
        assert sorted(fetched) == sorted(weights)
        assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
        model.initialize(5)
        model.load_parameters(StoredWeights(open_weights(tmp_path), table))
        for name, weight in weights.items():
            assert model.get_tensor(name).tobytes() == weight.tobytes()


@pytest.mark.parametrize("dtype,words", [("bf16", "run as bf16: rounded"), ("f32", "run as f32: exact")])
def test_half_precision_is_a_warning(tmp_path, caplog, dtype, words):
    """Once for a model, and for no other type."""
    for stored, expected in ((np.float16, 1), (np.float32, 0)):
        caplog.clear()
        write_weights(tmp_path, models.stored_tensors(MODEL, _weights(stored)))
        with _decoding(dtype) as model:
            model.load_parameters(models.open_weights(tmp_path, MODEL))
        messages = [record.getMessage() for record in caplog.records if "float16" in record.getMessage()]
        assert len(messages) == expected and all(words in message for message in messages)
