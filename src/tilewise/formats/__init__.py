"""Formats of quantised weights: how many bits a weight takes, and which number it means.

A format divides each row of a weight `[n, k]` into blocks of adjacent elements along k. A block is a
few bytes: codes of the elements, and the scales that they share. `WeightFormat.dequantise` gives the
numbers in fp32. Rounded once to bf16, they are the weight: a model with quantised weights computes
the bits of the same model with these bf16 weights (docs/numerics.md).

Files of every kind are read into these formats: GGUF has most of them as they are, and readers of
other files rearrange theirs.
"""

from tilewise.formats.weight_format import FORMATS, KERNEL_FORMATS, WeightFormat, weight_format

__all__ = ["FORMATS", "KERNEL_FORMATS", "WeightFormat", "weight_format"]
