"""Megatron's layout of a pipeline as text: `Et*3|(tt|)*29,m|L`.

A letter stands for a part of the model: `E` embedding, `t` a layer, `L` the head and the loss. `|`
ends a stage, `*n` repeats the letter or the group in parentheses before it, and commas and blanks
mean nothing.
"""

from __future__ import annotations

from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator, shown

__all__ = ["parse_layout"]

_MOST = 1 << 16  # letters of a layout in full
_DEEPEST = 16  # groups inside of each other
_validate = Validator("stages", LayoutError)


def parse_layout(text: str) -> tuple[int, ...]:
    """The number of layers of each virtual stage.

    Raises:
        LayoutError: the text is not a layout; or the embedding is not in the first stage, or the
            head not in the last.
    """
    plain = "".join(c for c in text if c not in ", \t")
    whole, end = _expand(plain, 0, text)
    if end < len(plain):
        _invalid(text, f"{plain[end]!r} without a beginning")
    stages = whole.split("|")
    for number, stage in enumerate(stages):
        is_first, is_last = number == 0, number == len(stages) - 1
        if stage.count("E") != is_first or (is_first and not stage.startswith("E")):
            _invalid(text, f"{stage!r} as stage {number}: the embedding E begins the first stage")
        if stage.count("L") != is_last or (is_last and not stage.endswith("L")):
            _invalid(text, f"{stage!r} as stage {number}: the head L ends the last stage")
    return tuple(stage.count("t") for stage in stages)


def _expand(text: str, at: int, whole: str, depth: int = 0) -> tuple[str, int]:
    """The text from a place on without repetitions, up to the end or a closing parenthesis."""
    parts: list[str] = []
    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            if depth == _DEEPEST:
                _invalid(whole, f"more than {_DEEPEST} groups inside of each other")
            part, at = _expand(text, at + 1, whole, depth + 1)
            if at == len(text):
                _invalid(whole, "a group without an end")
        elif text[at] in "EtL|":
            part = text[at]
        elif text[at] == "m":
            _invalid(whole, "m, a layer that predicts further tokens, which no model here has")
        else:
            _invalid(whole, f"{text[at]!r}, which is no part of a model")
        at += 1
        if at < len(text) and text[at] == "*":
            digits = len(text[at + 1 :]) - len(text[at + 1 :].lstrip("0123456789"))
            number = text[at + 1 : at + 1 + digits]
            if not 0 < digits <= 5:
                _invalid(whole, "* without a number of repetitions")
            at += 1 + digits
            part *= min(int(number), _MOST // max(len(part), 1) + 1)
        parts.append(part)
        if sum(map(len, parts)) > _MOST:
            _invalid(whole, f"more than {_MOST} parts")
    return "".join(parts), at


def _invalid(text: str, got: str) -> None:
    _validate.invalid(
        "layers", "a layout must have the form Et*3|(tt|)*4,tL", f"{got} in {shown(text)}", "correct it"
    )
