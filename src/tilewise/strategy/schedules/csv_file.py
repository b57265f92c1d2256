"""Schedules in files, in the format of `torch.distributed.pipelining`: a row per stage, a cell per
pass such as `0F0`, `2I3`, `2W3` or `1B2` (virtual stage, kind, microbatch). Empty cells are ignored.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, decode_text, read_whole
from tilewise.files.writing import replace_text
from tilewise.strategy.schedules.actions import Action

__all__ = ["parse_actions", "read_actions", "write_actions"]

_MAX_BYTES = 16 << 20
_MAX_CELLS = 1 << 20
_CELL = re.compile(r"([0-9]{1,4})([FBIW])([0-9]{1,5})")
_validate = Validator("schedule", LayoutError)


def read_actions(path: str | Path) -> tuple[tuple[str, ...], ...]:
    """The cells of a schedule's file, a row per stage.

    Raises:
        LayoutError: it cannot be read, or a cell is not a pass.
    """
    where = _validate.path("read", "path", path)
    try:
        rows = [*csv.reader(io.StringIO(decode_text(read_whole(where, _MAX_BYTES))))]
    except (Unreadable, csv.Error) as error:
        _validate.invalid(
            "read", "a schedule's file must be text", f"{str(where)!r}: {error}", "name another file"
        )
    cells = (tuple(c for cell in row if (c := cell.strip())) for row in rows)
    actions = parse_actions([row for row in cells if row])
    return tuple(tuple(map(str, own)) for own in actions)


def parse_actions(rows: Sequence[Sequence[str]]) -> tuple[tuple[Action, ...], ...]:
    """The passes that cells name.

    Raises:
        LayoutError: a cell is not a pass, or there are too many.
    """
    if not rows or sum(map(len, rows)) > _MAX_CELLS:
        _validate.invalid(
            "read", f"a schedule must have 1 to {_MAX_CELLS} passes", f"{len(rows)} rows", "correct it"
        )
    return tuple(tuple(_action(cell) for cell in row) for row in rows)


def _action(cell: object) -> Action:
    match = _CELL.fullmatch(cell) if isinstance(cell, str) else None
    if match is None:
        _validate.invalid(
            "read",
            "a cell must be a pass: virtual stage, F, B, I or W, microbatch",
            shown(cell),
            "write for example 0F0; transfers follow from the passes",
        )
    return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]


def write_actions(path: str | Path, actions: Sequence[Sequence[Action]]) -> None:
    """Write a schedule, which `torch.distributed.pipelining` can load.

    Raises:
        LayoutError: the path is not one.
        ResourceError: it cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[str(a) for a in own] for own in actions])
    replace_text(_validate.path("write", "path", path), text.getvalue())
