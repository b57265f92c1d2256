"""`load_parameters("model.pt")`: a state dict of PyTorch, also over devices; nothing in it is executed."""

import numpy as np
import pytest
import torch

import tilewise as tw
from pure.checkpoint.chunks import BOXES, WHOLE, write_chunks
from pure.checkpoint.planted import planted, write_archive
from tilewise.checkpoint import open_distributed
from tilewise.core import CheckpointError
from tilewise.nn import linear


def _model(mesh):
    graph = tw.ComputeGraph("tiny")
    x = graph.input([4, 8], "f32", name="x", labels=[tw.BATCH, None])
    graph.output(linear(graph, x, "w", 6), "y")
    return graph.instantiate(graph.plan(mesh))


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_state_dict_is_loaded(tmp_path, mesh, dtype):
    """Of every dtype, with transposed storage; the product uses these weights."""
    weight = torch.arange(48.0).reshape(8, 6).T.to(dtype) / 16
    torch.save({"w": weight}, tmp_path / "model.pt")
    with _model(mesh) as model:
        report = model.load_parameters(str(tmp_path / "model.pt"))
        assert sum(report.bytes_read) == weight.numel() * weight.element_size()
        np.testing.assert_array_equal(model.get_tensor("w"), weight.float().numpy())
        model.forward(x=np.eye(4, 8, dtype=np.float32))
        np.testing.assert_array_equal(model.get_tensor("y"), weight.float().numpy().T[:4])


def _boxes_model(mesh):
    graph = tw.ComputeGraph("boxes")
    x = graph.input([4, 10], "f32", name="x", labels=[tw.BATCH, None])
    graph.output(linear(graph, x, "w", 7), "y")
    return graph.instantiate(graph.plan(mesh))


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("boxes", [BOXES, [((0, 0), (7, 10))]], ids=["chunks", "whole"])
def test_a_distributed_checkpoint_is_loaded(tmp_path, mesh, boxes):
    """A directory of PyTorch's processes, and a part of one; in chunks and whole."""
    write_chunks(tmp_path / "d", boxes)
    with _boxes_model(mesh) as model:
        for source in (tmp_path / "d", str(tmp_path / "d"), open_distributed(tmp_path / "d", "model")):
            model.initialize(3)
            report = model.load_parameters(source)
            assert sum(report.bytes_read) == WHOLE.numpy().nbytes
            np.testing.assert_array_equal(model.get_tensor("w"), WHOLE.numpy())


@pytest.mark.parametrize("kind", ["state dict", "chunks", "whole"])
def test_damage_is_found_before_any_change(tmp_path, kind):
    """A flipped bit: the error names tensor and file, and the weights are unchanged."""
    if kind == "state dict":
        torch.save({"w": WHOLE.clone()}, tmp_path / "model.pt")
        source = damaged = tmp_path / "model.pt"
    else:
        write_chunks(tmp_path / "d", BOXES if kind == "chunks" else [((0, 0), (7, 10))])
        source, damaged = tmp_path / "d", tmp_path / "d" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[content.index(WHOLE[0, :6].numpy().tobytes()) + 1] ^= 1
    damaged.write_bytes(content)
    with _boxes_model({}) as model:
        model.initialize(3)
        before = model.get_tensor("w")
        with pytest.raises(CheckpointError, match=rf"CRC-32 .* for '(model\.)?w' in '.*{damaged.name}'"):
            model.load_parameters(source)
        np.testing.assert_array_equal(model.get_tensor("w"), before)


def test_a_file_with_code_is_rejected(tmp_path):
    """By name; the weights are unchanged, and nothing was executed."""
    with _model({}) as model:
        model.initialize(3)
        before = model.get_tensor("w")
        write_archive(tmp_path / "model.pt", planted(tmp_path / "ran")["reduce"])
        with pytest.raises(
            CheckpointError, match=r"model\.pt.*names 'posix\.system', which is not part of a tensor"
        ):
            model.load_parameters(tmp_path / "model.pt")
        assert not (tmp_path / "ran").exists()
        np.testing.assert_array_equal(model.get_tensor("w"), before)
