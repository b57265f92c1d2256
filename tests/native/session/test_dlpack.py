"""Tensors of PyTorch and NumPy arrays go in and out without copies: every element type, strides, lifetimes."""

from __future__ import annotations

import ctypes
import gc

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import PlanError, ShapeError
from tilewise.kernels import dlpack
from tilewise.nn import linear
from tilewise.session.inputs import as_array

DTYPES = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


@st.composite
def tensors(draw):
    """A tensor with any strides that slices and transpositions give."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = int(np.prod(shape)) if shape else 1
    tensor = torch.arange(size).reshape(shape).to(draw(st.sampled_from([*DTYPES])))
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        begin, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        tensor = tensor[begin::step]
    return tensor


@given(tensors())
@settings(max_examples=100)
def test_a_tensor_goes_in_and_out_without_a_copy(tensor):
    """The same elements at the same address, as an array and as a tensor again."""
    array = as_array("run", "x", tensor)
    assert array.dtype == DTYPES[tensor.dtype] and array.shape == tuple(tensor.shape)
    assert (array.astype(np.float64) == tensor.double().numpy()).all()
    back = torch.from_dlpack(tw.to_dlpack(array))
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    if tensor.numel():
        assert array.ctypes.data == back.data_ptr() == tensor.data_ptr()


def test_a_wrong_stride_is_detected(monkeypatch):
    """The twin: the comparison sees another order of the elements."""
    monkeypatch.setattr(dlpack, "read", lambda value: (value.numpy().T, False))
    with pytest.raises(AssertionError):
        test_a_tensor_goes_in_and_out_without_a_copy.hypothesis.inner_test(torch.arange(4.0).reshape(2, 2))


def test_shared_memory_outlives_its_owner():
    """Each side keeps the memory of the other one."""
    tensor = torch.full((1000,), 3.0, dtype=torch.bfloat16)
    array = as_array("run", "x", tensor)
    del tensor
    shared = torch.from_dlpack(tw.to_dlpack(array))
    del array
    gc.collect()
    torch.full((1000,), 4.0, dtype=torch.bfloat16)
    assert (shared == 3).all()


def test_writing_is_shared_unless_the_array_is_read_only():
    """A tensor over a writable array changes it; NumPy's flag of a view is passed on."""
    array = np.zeros(4, ml_dtypes.bfloat16)
    torch.from_dlpack(tw.to_dlpack(array))[1] = 2
    assert array[1] == 2
    flags = [_flags(array)]
    array.flags.writeable = False
    assert [*flags, _flags(array)] == [0, 1]


def _flags(array):
    """The flags of DLPack's versioned structure: after the version, a context and a deleter."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = tw.to_dlpack(array).__dlpack__(max_version=(1, 0))
    return ctypes.c_uint64.from_address(address(capsule, b"dltensor_versioned") + 24).value


@pytest.mark.parametrize(
    "value,kind,words",
    [
        (torch.ones(2).to_sparse(), ShapeError, "must be an array; got tensor"),
        (torch.ones(2, device="meta"), ShapeError, "must be an array; got tensor"),
        (
            torch.ones(2, dtype=torch.float8_e4m3fn),
            PlanError,
            "bf16 or of a type of NumPy; got DLPack's type 10",
        ),
    ],
)
def test_what_cannot_be_shared_is_rejected(value, kind, words):
    """With the name of the input."""
    with pytest.raises(kind, match=words):
        as_array("run", "x", value)
    with pytest.raises(ShapeError, match="an array must be a NumPy array"):
        tw.to_dlpack(value)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_model_takes_and_gives_tensors_of_pytorch(dtype):
    """Inputs, parameters and state dicts in; outputs and rows out, at the address of the model's own memory."""
    graph = tw.ComputeGraph("tiny")
    x = graph.input([4, 8], dtype, name="x", labels=[tw.BATCH, None])
    graph.output(linear(graph, x, "w", 6), "y")
    torch_dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    weight = torch.arange(48.0).reshape(8, 6).T.to(torch_dtype) / 16
    rows = torch.eye(4, 8, dtype=torch_dtype)
    with graph.instantiate() as model:
        model.load_parameters({"w": torch.nn.Parameter(weight)})
        for run in (model.forward, lambda **inputs: model.forward_async(**inputs).wait(60)):
            run(x=rows)
            result = torch.from_dlpack(tw.to_dlpack(model.get_tensor("y", copy=False)))
            assert result.dtype == torch_dtype and torch.equal(result, weight.T[:4])
        again = torch.from_dlpack(tw.to_dlpack(model.get_tensor("y", copy=False)))
        assert again.data_ptr() == result.data_ptr()
        model.forward(x=2 * rows)
        assert torch.equal(result, 2 * weight.T[:4])  # it is the model's memory
        copy = torch.from_dlpack(tw.to_dlpack(model.get_tensor("w")))  # packed, so a new array
        assert torch.equal(copy, weight)
        model.set_tensor("w", weight.flip(0))
        assert np.array_equal(model.get_tensor("w"), as_array("test", "w", weight.flip(0)))
