"""Names of element types."""

import ml_dtypes
import numpy as np
import pytest

from tilewise.core import MODEL_DTYPES, ConfigError, choose_dtype, is_float, model_dtype

SPELLINGS = {"bf16": "bf16", "bfloat16": "bf16", "f32": "f32", "float32": "f32", "fp32": "f32"}


def test_spellings_of_types():
    """The table has exactly these spellings."""
    assert {name: model_dtype(name) for name in MODEL_DTYPES} == SPELLINGS


@pytest.mark.parametrize("name", ["", "f16", "i32", "f64", "int3", "BF16", "auto"])
def test_other_types_are_rejected(name):
    """Types that models do not compute in are errors that list the supported ones."""
    with pytest.raises(ConfigError, match=f"one of bf16, f32, .*; got {name!r}"):
        model_dtype(name)
    if name != "auto":
        with pytest.raises(ConfigError, match="one of auto, bf16"):
            choose_dtype(name, "float32")


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "bf16"), ("odd", "bf16"), (None, "bf16")],
)
def test_auto_follows_the_stored_weights(stored, chosen):
    """A model's own type where it is one of the two, otherwise bf16; an explicit type takes precedence."""
    assert choose_dtype("auto", stored) == chosen
    assert choose_dtype("fp32", stored) == "f32"


def test_weights_are_floating_point():
    """Every floating type may store weights; integers and booleans may not."""
    floats = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
    assert all(is_float(np.dtype(kind)) for kind in floats)
    assert not any(
        is_float(np.dtype(kind)) for kind in (np.int8, np.uint8, np.int32, np.int64, np.bool_, np.complex64)
    )
