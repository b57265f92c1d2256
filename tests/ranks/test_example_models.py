"""The models of the examples: loss and gradients of PyTorch, the bits of one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from small_llama import change_first, halve_batch_splits

import tilewise as tw
from support.torch_examples import EXAMPLES
from tilewise.session import verify_strategy

FOLDER = Path(__file__).parents[2] / "examples"
every_example = pytest.mark.parametrize("name", EXAMPLES)


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every_example
def test_loss_and_gradients_are_those_of_pytorch(name):
    """1e-4 in fp32, relative to the largest element of a gradient."""
    module = example(name)
    data = module.batch(3)
    with module.build().instantiate() as model:
        model.initialize(seed=1, scale=0.2)
        parameters = {
            n: torch.tensor(np.array(model.get_tensor(n)), requires_grad=True)
            for n in model.parameter_names()
        }
        tensors = {
            n: torch.tensor(v).long() if v.dtype == np.int32 else torch.tensor(v) for n, v in data.items()
        }
        expected = EXAMPLES[name](parameters, tensors)
        expected.backward()
        model.forward(**data)
        assert abs(model.get_tensor("loss")[0] - expected.item()) <= 1e-4 * abs(expected.item())
        model.backward()
        for n, parameter in parameters.items():
            difference = np.abs(model.get_tensor(f"{n}.grad") - parameter.grad.numpy()).max()
            assert difference <= 1e-4 * max(np.abs(parameter.grad.numpy()).max(), 1e-3), n


def verify(name, mesh, **options):
    module = example(name)
    graph = module.build()
    graph.optimize(tw.optim.AdamW())
    return verify_strategy(graph, mesh, [module.batch(0), module.batch(1)], **options)


@every_example
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"fsdp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_every_strategy_equals_one_device(name, mesh):
    """Two steps: losses, gradients, parameters and moments, to the bit."""
    report = verify(name, mesh, accumulation=1 if name == "16_two_towers" else 2)
    assert report.equal, report.text


def test_a_fault_is_detected():
    """The twin: a batch split that is halved on one device changes bits."""
    fault = change_first("", halve_batch_splits, -1, kernel="matmul_dw_f32")
    assert not verify("15_encoder_decoder", {"dp": 2}, change=fault).equal
