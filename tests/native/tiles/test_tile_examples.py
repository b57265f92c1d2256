"""The brief's programs, as examples: on two and four devices, with the bits of the planner's own
operators.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm

EXAMPLES = Path(__file__).parents[3] / "examples"
GATHERED = ["08_all_gather_matmul", "11_rank_swizzle"]
REDUCED = ["09_matmul_reduce_scatter", "10_matmul_all_reduce"]


def example(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(devices, x, w, is_contracted):
    """The planner's product, with the output dim or the contracted dim shared by the devices."""
    label = tw.DimLabel("mlp")
    graph = tw.ComputeGraph("product", k_splits=devices)
    a = graph.input([*x.shape], name="x", labels=[None, label if is_contracted else None])
    labels = [None, label] if is_contracted else [label, None]
    b = graph.parameter([*w.shape], "f32", name="w", labels=labels)
    graph.output(graph.matmul(a, b, trans_b=True), "y")
    with graph.instantiate(graph.plan({"tp": devices})) as model:
        model.load_parameters({"w": w})
        model.forward(x=x)
        assert model.plan.mesh.num_devices == devices
        return model.get_tensor("y")


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", [*GATHERED, *REDUCED])
def test_examples_have_the_bits_of_planned_operators(name, devices):
    """Equal to the planner's product on as many devices, and different if two devices are swapped."""
    module, rng = example(name), np.random.default_rng(3)
    x = rng.standard_normal((module.M, module.K), dtype=np.float32)
    w = rng.standard_normal((module.N, module.K), dtype=np.float32)
    result = module.run(devices, x, w)
    wanted = planned(devices, x, w, name in REDUCED)
    np.testing.assert_array_equal(result, wanted)
    if name in GATHERED:
        assert (module.run(devices, np.roll(x, module.M // devices, axis=0), w) != wanted).any()


@pytest.mark.parametrize("devices", [2, 4])
def test_the_example_of_a_pipeline(devices):
    """Producer and consumer, traced and eager, also with late puts and signals."""
    module = example("07_producer_consumer")
    assert module.main(devices) == 0
    for delays in (None, *range(8)):
        group = comm.local(devices, delays=delays)
        rows = module.TILES * module.ROWS
        x, y = group.symm_tensor((rows, module.COLS)), group.symm_tensor((rows, module.COLS))
        queue = group.symm_tensor((module.PLACES * module.ROWS, module.COLS))
        x.numpy(0)[:] = np.random.default_rng(0).standard_normal(x.shape)
        group.run(module.pipeline, x, y, queue, group.signals(module.PLACES), group.signals(1))
        np.testing.assert_allclose(y.numpy(1), x.numpy(0) / (1 + np.exp(-x.numpy(0))), atol=1e-6)
