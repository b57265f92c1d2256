"""A brute-force symbolic run of a tile program: the memory's content after any order of tasks.

Every word of every arena has a number. A task computes the numbers that it writes from those that
it reads and from its identity. Tasks run in a random order that handles and signals allow. Programs
that give equal numbers in all orders compute equal values.
"""

from __future__ import annotations

import random

import numpy as np

from support.task_order import happens_before
from tilewise.ir.program import Access, TileProgram
from tilewise.session.assemble import native_program

_WORD = 2  # bytes of the smallest element


def final_memory(program: TileProgram, name: str, words: int, lasting: int, seed: int) -> list[bytes]:
    """The first `lasting` bytes of every arena after one run of a list in a random order, and its file."""
    native = native_program(program, ())
    devices = [native.tasks(d, [], name) for d in range(len(program.devices))]
    before = happens_before(devices)
    memory = [np.arange(words, dtype=np.uint64) + np.uint64(d << 40) for d in range(len(devices))]
    views = [_by_task(t["views"]) for t in devices]
    for task in _random_order(before, random.Random(seed)):
        device = next(d for d in range(len(devices)) if task < before.first[d + 1])
        number = task - before.first[device]
        _, template, position, index, _ = devices[device]["tasks"][number].tolist()
        of = program.classes[program.devices[device].class_id]
        instruction = of.templates[template].instructions[position]
        used = views[device].get(number, [])
        if not instruction.kernel:
            continue
        read = [_cells(memory, v).tobytes() for v in used if v[6] & Access.IN]
        ints = [
            i if isinstance(i, int) else (i, program.devices[device].numbers[i.which])
            for i in instruction.ints
        ]
        made = hash((instruction.kernel, instruction.label, index, str(ints), *read))
        for v in used:
            if v[6] & Access.OUT:
                cells = _cells(memory, v)
                salt = hash((made, v[0])) & ((1 << 63) - 1)
                cells[...] = np.arange(cells.size, dtype=np.uint64).reshape(cells.shape) + np.uint64(salt)
    begins = (program.classes[device.class_id].file_begin // _WORD for device in program.devices)
    return [m[: lasting // _WORD].tobytes() + m[begin:].tobytes() for m, begin in zip(memory, begins)]


def _by_task(views: np.ndarray) -> dict[int, list[list[int]]]:
    accesses: dict[int, list[list[int]]] = {}
    for task, *view in views.tolist():
        accesses.setdefault(task, []).append(view)
    return accesses


def _cells(memory: list[np.ndarray], view: list[int]) -> np.ndarray:
    _, owner, begin, end, rows, stride, _ = view
    first, width = begin // _WORD, (end - begin - (rows - 1) * stride) // _WORD
    step = memory[owner].strides[0]
    return np.lib.stride_tricks.as_strided(
        memory[owner][first:], (rows, width), (stride // _WORD * step, step)
    )


def _random_order(before, dice: random.Random) -> list[int]:  # type: ignore[no-untyped-def]
    """All tasks, each after those that precede it."""
    missing = dict(zip(before.order, before.masks))
    followers: dict[int, list[int]] = {}
    counts = {}
    for task in before.order:
        mask, direct = missing[task], 0
        while mask:  # the nearest of those before it stand for those before them
            place = mask.bit_length() - 1
            earlier = before.order[place]
            followers.setdefault(earlier, []).append(task)
            mask &= ~(before.masks[place] | 1 << place)
            direct += 1
        counts[task] = direct
    ready, order = [t for t in before.order if counts[t] == 0], []
    while ready:
        task = ready.pop(dice.randrange(len(ready)))
        order.append(task)
        for follower in followers.get(task, ()):
            counts[follower] -= 1
            if counts[follower] == 0:
                ready.append(follower)
    return order
