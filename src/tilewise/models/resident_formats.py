"""Which weights of a quantised model stay in their formats in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tilewise.core import PartialBlocks, get_logger
from tilewise.formats import FORMATS

__all__ = ["formats_in_training", "plan_in_formats"]

T = TypeVar("T")
# Weights that read one tensor. Its gradient is one product with all of them, so they are quantised together or not.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def formats_in_training(formats: Mapping[str, str], trained: frozenset[str]) -> dict[str, str]:
    """The formats that weights keep while adapters are trained.

    Args:
        formats: of the quantised weights, by name.
        trained: names of parameters that are trained themselves, in bf16.
    """
    frozen = {name: form for name, form in formats.items() if name not in trained}

    def is_complete(name: str) -> bool:
        for group in _TOGETHER:
            for member in group:
                if f".{member}." in name:
                    return all(name.replace(member, other) in frozen for other in group)
        return True

    return {name: form for name, form in frozen.items() if is_complete(name)}


def plan_in_formats(
    formats: Mapping[str, str], plan: Callable[[Mapping[str, str]], T], *, is_grouped: bool = False
) -> tuple[T, Mapping[str, str]]:
    """Plan a model whose weights keep their formats. Weights whose blocks devices cannot share are
    expanded to bf16, with a warning.

    Args:
        formats: of the quantised weights, by name.
        plan: makes the plan with weights in some formats; it may raise `PartialBlocks`.
        is_grouped: products are grouped. Then weights of 4 bits are not expanded, because that would change results.

    Returns:
        The result of `plan`, and the formats that are left.

    Raises:
        PartialBlocks: a weight with grouped products whose blocks devices cannot share.
    """
    while True:
        try:
            return plan(formats), formats
        except PartialBlocks as error:
            alike = [name for name in formats if f".{name}".endswith(f".{error.parameter}")]
            if is_grouped and any(FORMATS[formats[name]].has_grouped_product for name in alike):
                raise PartialBlocks(f"{error}, or quantized_matmul exact", error.parameter) from None
            get_logger("models").warning(
                "%d quantised weights like %s are expanded to bf16, because the devices cannot hold whole blocks of "
                "%d elements each",
                len(alike),
                alike[0],
                FORMATS[formats[alike[0]]].block,
            )
            formats = {name: form for name, form in formats.items() if name not in alike}
