"""`load_parameters("model.pt")`: a state dict of PyTorch in a model, over devices too, and nothing of it is run."""

import numpy as np
import pytest
import torch

import tilewise as tw
from pure.checkpoint.planted import planted, write_archive
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
    """Of every type, transposed storage included; the product is the one with these weights."""
    weight = torch.arange(48.0).reshape(8, 6).T.to(dtype) / 16
    torch.save({"w": weight}, tmp_path / "model.pt")
    with _model(mesh) as model:
        report = model.load_parameters(str(tmp_path / "model.pt"))
        assert sum(report.bytes_read) == weight.numel() * weight.element_size()
        np.testing.assert_array_equal(model.get_tensor("w"), weight.float().numpy())
        model.forward(x=np.eye(4, 8, dtype=np.float32))
        np.testing.assert_array_equal(model.get_tensor("y"), weight.float().numpy().T[:4])


def test_a_file_that_would_run_code_changes_nothing(tmp_path):
    """It is refused by name; the weights are as before, and nothing ran."""
    with _model({}) as model:
        model.initialize(3)
        before = model.get_tensor("w")
        write_archive(tmp_path / "model.pt", planted(tmp_path / "ran")["reduce"])
        with pytest.raises(
            CheckpointError, match=r"model\.pt.*names 'posix\.system', which is no part of a tensor"
        ):
            model.load_parameters(tmp_path / "model.pt")
        assert not (tmp_path / "ran").exists()
        np.testing.assert_array_equal(model.get_tensor("w"), before)
