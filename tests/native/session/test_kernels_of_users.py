"""A kernel of a user as an op of a graph: result and gradient, devices, and errors."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.core.errors import PlanError, ShapeError
from tilewise.nn import linear
from tilewise.session import verify_strategy

BATCH, SEQ, WIDTH = 8, 5, 12
SOURCE = """
#include <math.h>
#include <tilewise/tile_kernel.h>
static float at(const tilewise_tile* t, long r, long c) { return ((const float*)t->data)[r * t->stride + c]; }
/* out = a * exp(-s b): operands out, a, b */
int damped(const tilewise_kernel_args* k) {
  const tilewise_tile* t = k->tiles;
  for (long r = 0; r < t[0].rows; ++r)
    for (long c = 0; c < t[0].cols; ++c)
      ((float*)t[0].data)[r * t[0].stride + c] = at(t + 1, r, c) * expf(-(float)k->floats[0] * at(t + 2, r, c));
  return 0;
}
/* operands dx, dy, a, b */
int damped_da(const tilewise_kernel_args* k) {
  const tilewise_tile* t = k->tiles;
  for (long r = 0; r < t[0].rows; ++r)
    for (long c = 0; c < t[0].cols; ++c)
      ((float*)t[0].data)[r * t[0].stride + c] = at(t + 1, r, c) * expf(-(float)k->floats[0] * at(t + 3, r, c));
  return 0;
}
int damped_db(const tilewise_kernel_args* k) {
  const tilewise_tile* t = k->tiles;
  const float s = (float)k->floats[0];
  for (long r = 0; r < t[0].rows; ++r)
    for (long c = 0; c < t[0].cols; ++c)
      ((float*)t[0].data)[r * t[0].stride + c] =
          -s * at(t + 1, r, c) * at(t + 2, r, c) * expf(-s * at(t + 3, r, c));
  return 0;
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """`damped` and the kernels of its gradients: two of a library, one as a function pointer."""
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "damped.c", folder / "libdamped.so"
    source.write_text(SOURCE)
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        f"-I{tw.get_include()}",
        str(source),
        "-o",
        str(library),
        "-lm",
    ]
    subprocess.run(command, check=True, timeout=120)
    inputs = {"a": "in f32", "b": "in f32"}
    pointer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(("damped_da", ctypes.CDLL(str(library))))
    return [
        tw.tile_kernel(function, name=name, operands={**outputs, **inputs}, floats=["s"])
        for name, function, outputs in (
            ("damped", (library, "damped"), {"out": "out f32"}),
            ("damped_da", pointer, {"dx": "out f32", "dy": "in f32"}),
            ("damped_db", (library, "damped_db"), {"dx": "out f32", "dy": "in f32"}),
        )
    ]


def build(kernels, **options):
    g = tw.ComputeGraph("damped")
    x = g.input([BATCH, SEQ, WIDTH], name="x", labels=[tw.BATCH, None, None])
    a, b = (linear(g, x, n, WIDTH, out_label=tw.DimLabel("mlp")) for n in "ab")
    forward, *backward = kernels
    y = g.kernel(forward, [a, b], s=0.7, **{"backward": backward, **options})
    g.output(y, "y")
    g.loss(g.mean(y * y))
    g.optimize(tw.optim.AdamW())
    return g


DATA = {"x": np.random.default_rng(0).standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)}


def test_result_and_gradient(kernels):
    """Those of PyTorch."""
    with build(kernels).instantiate() as model:
        model.initialize(seed=0, scale=0.3)
        wa, wb = (torch.tensor(np.array(model.get_tensor(n)), requires_grad=True) for n in "ab")
        x = torch.tensor(DATA["x"])
        y = (x @ wa.T) * torch.exp(-0.7 * (x @ wb.T))
        y.square().mean().backward()
        model.forward(**DATA)
        np.testing.assert_allclose(model.get_tensor("y"), y.detach().numpy(), rtol=1e-5, atol=1e-6)
        model.backward()
        for name, weight in (("a", wa), ("b", wb)):
            np.testing.assert_allclose(
                model.get_tensor(f"{name}.grad"), weight.grad.numpy(), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"fsdp": 2}], ids=str)
def test_devices_share_its_rows(kernels, mesh):
    """Equal to one device to the bit; a kernel that computes something else is detected."""
    report = verify_strategy(build(kernels), mesh, [DATA, DATA], accumulation=2)
    assert report.equal, report.text
    swapped = [kernels[0], kernels[2], kernels[1]]
    with build(kernels).instantiate() as one, build(swapped).instantiate() as other:
        for model in (one, other):
            model.initialize(seed=0, scale=0.3)
            model.forward(**DATA)
            model.backward()
        assert not np.array_equal(one.get_tensor("a.grad"), other.get_tensor("a.grad"))


def test_wrong_calls_are_rejected(kernels):
    """Each with its rule, when the graph is defined; a missing gradient when it is planned."""
    for options, words in (
        ({"s": 1.0}, "multiple values"),
        ({"backward": kernels[:1]}, "a kernel per operand"),
        ({"backward": [kernels[0]] * 2}, "2 operands|3 operands"),
        ({"out_features": 0}, "out_features must be positive"),
        ({"factor": 1.0}, "attributes are s"),
    ):
        with pytest.raises((ShapeError, TypeError), match=words):
            build(kernels, **options)
    with pytest.raises(PlanError, match=r"pass backward= to graph\.kernel"):
        build(kernels, backward=None).plan()
