"""Seeded mutations of a tile program: parts of an exchange, tensors of one shape, or devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tilewise.ir.program import (
    COPIES,
    Access,
    Instruction,
    LoweredTemplate,
    NumberLike,
    TensorEntry,
    TileProgram,
)

Chosen = tuple[int, int, int]  # class, template, instruction
Change = Callable[[random.Random, TileProgram], tuple[str, TileProgram] | None]

_TRIES = 200


def mutate(seed: int, program: TileProgram) -> tuple[str, TileProgram]:
    """A mutant and a description of the mutation."""
    dice = random.Random(seed)
    for _ in range(_TRIES):
        made = dice.choice(CHANGES)(dice, program)
        if made is not None and made[1] != program:
            return made
    raise AssertionError("no mutation fits the program")


def with_instructions(
    program: TileProgram, class_id: int, number: int, instructions: tuple[Instruction, ...]
) -> TileProgram:
    of = program.classes[class_id]
    template = replace(of.templates[number], instructions=instructions)
    return with_template(program, class_id, number, template)


def with_template(program: TileProgram, class_id: int, number: int, template: LoweredTemplate) -> TileProgram:
    of = program.classes[class_id]
    templates = (*of.templates[:number], template, *of.templates[number + 1 :])
    classes = list(program.classes)
    classes[class_id] = replace(of, templates=templates)
    return replace(program, classes=tuple(classes))


def _pick(
    dice: random.Random, program: TileProgram, wanted: Callable[[Instruction], object]
) -> Chosen | None:
    class_id = dice.randrange(len(program.classes))
    choices = [
        (class_id, t, i)
        for t, template in enumerate(program.classes[class_id].templates)
        for i, instruction in enumerate(template.instructions)
        if wanted(instruction)
    ]
    return dice.choice(choices) if choices else None


def _changed(program: TileProgram, at: Chosen, **fields: object) -> TileProgram:
    instructions = list(program.classes[at[0]].templates[at[1]].instructions)
    instructions[at[2]] = replace(instructions[at[2]], **fields)  # type: ignore[arg-type]
    return with_instructions(program, at[0], at[1], tuple(instructions))


def _shifted(dice: random.Random, number: NumberLike) -> NumberLike:
    by = dice.choice([-1, 1, 2])
    return number + by if isinstance(number, int) else number._replace(constant=number.constant + by)


def _other_member(dice: random.Random, program: TileProgram, item):  # type: ignore[no-untyped-def]
    """The item with another device group or member that every device has."""
    groups = [len(t) for t in program.devices[0].groups]
    group = dice.choice([item.group, dice.randrange(len(groups))])
    return item._replace(group=group, member=dice.randrange(groups[group]))


def change_list(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """A wait or a post dropped, doubled, redirected or given another signal, or two that swap their signals."""
    name = dice.choice(["waits", "notifies"])
    at = _pick(dice, program, lambda i: getattr(i, name))
    if at is None:
        return None
    instruction = program.classes[at[0]].templates[at[1]].instructions[at[2]]
    items = list(getattr(instruction, name))
    n = dice.randrange(len(items))
    how = dice.choice(["drop", "double", "redirect", "signal", "increment", "swap", "slot", "per_index"])
    if how == "drop":
        del items[n]
    elif how == "double":
        items.insert(n, items[n])
    elif how == "redirect":
        items[n] = _other_member(dice, program, items[n])
    elif how == "signal":
        items[n] = items[n]._replace(signal_base=_shifted(dice, items[n].signal_base))
    elif how == "increment":
        if name == "notifies":
            return None
        items[n] = items[n]._replace(increment=dice.choice([0, 2]))
    elif how == "slot":
        items[n] = items[n]._replace(slot=dice.randrange(len(program.classes[at[0]].templates[at[1]].slots)))
    elif how == "per_index":
        items[n] = items[n]._replace(per_index=not items[n].per_index)
    else:
        m = dice.randrange(len(items))
        items[n], items[m] = (
            items[n]._replace(signal_base=items[m].signal_base),
            items[m]._replace(signal_base=items[n].signal_base),
        )
    return f"{how} {name} {n} of {instruction.label}", _changed(program, at, **{name: tuple(items)})


def change_operand(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """A peer's operand dropped, doubled, redirected, of another slot or part, or two swapped."""
    at = _pick(dice, program, lambda i: i.label[:9] != "broadcast" and any(o.group >= 0 for o in i.operands))
    if at is None:
        return None
    instruction = program.classes[at[0]].templates[at[1]].instructions[at[2]]
    operands = list(instruction.operands)
    peers = [i for i, o in enumerate(operands) if o.group >= 0]
    n, m = dice.choice(peers), dice.choice(peers)
    how = dice.choice(["own", "redirect", "copy", "swap", "slot", "part", "out"])
    if how == "own":
        operands[n] = operands[n]._replace(group=-1)
    elif how == "redirect":
        operands[n] = _other_member(dice, program, operands[n])
    elif how == "copy":
        operands[n] = operands[m]
    elif how == "swap":
        operands[n], operands[m] = operands[m], operands[n]
    elif how == "slot":
        operands[n] = operands[n]._replace(
            slot=dice.randrange(len(program.classes[at[0]].templates[at[1]].slots))
        )
    else:
        if how == "out":
            n = next(i for i, o in enumerate(operands) if (o.access | o.role) & Access.OUT)
        operands[n] = operands[n]._replace(part=_shifted(dice, operands[n].part))
    return f"{how} operand {n} of {instruction.label}", _changed(program, at, operands=tuple(operands))


def change_instruction(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """An acknowledgement, reduction or gather dropped, doubled or moved, in one class or in all."""

    def wanted(i: Instruction) -> object:
        return i.label[:9] != "broadcast" and (not i.kernel or any(o.group >= 0 for o in i.operands))

    at = _pick(dice, program, wanted)
    if at is None:
        return None
    label = program.classes[at[0]].templates[at[1]].instructions[at[2]].label
    how, everywhere = dice.choice(["drop", "drop", "double", "move"]), dice.random() < 0.5
    distance = dice.choice([-3, -2, -1, 1, 2, 3])
    for class_id in range(len(program.classes)) if everywhere else [at[0]]:
        instructions = list(program.classes[class_id].templates[at[1]].instructions)
        if at[2] >= len(instructions) or instructions[at[2]].label != label:
            continue
        taken = instructions.pop(at[2])
        if how == "double":
            instructions[at[2] : at[2]] = [taken, replace(taken)]
        elif how == "move":
            instructions.insert(max(0, at[2] + distance), taken)
        program = with_instructions(program, class_id, at[1], tuple(instructions))
    return f"{how} {label}" + (" everywhere" if everywhere else ""), program


def change_template(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """Signals of a template that begin elsewhere in one class, or a reduction dropped or reversed."""
    class_id = dice.randrange(len(program.classes))
    choices = [i for i, t in enumerate(program.classes[class_id].templates) if t.num_signals]
    if not choices:
        return None
    number = dice.choice(choices)
    template = program.classes[class_id].templates[number]
    reductions = [c for c in template.collectives if c.kind not in COPIES]
    if dice.random() < 0.5 or not reductions:
        first = max(0, template.first_signal + dice.choice([-2, -1, 1, 2]))
        name, template = "first_signal", replace(template, first_signal=first)
    else:
        taken = dice.choice(reductions)
        records = [c for c in template.collectives if c is not taken]
        if dice.random() < 0.5:
            records.append(taken._replace(source=taken.target, target=taken.source))
        name, template = "reduction", replace(template, collectives=tuple(records))
    return f"{name} of {template.name}", with_template(program, class_id, number, template)


def change_numbers(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """A number of a call, such as the credits that a ring waits for, or the use that they belong to."""
    class_id = dice.randrange(len(program.classes))
    of = program.classes[class_id]
    name = dice.choice(list(of.calls))
    choices = [i for i, call in enumerate(of.calls[name]) if call.numbers]
    if not choices:
        return None
    at = dice.choice(choices)
    numbers = list(of.calls[name][at].numbers)
    n = dice.randrange(len(numbers))
    numbers[n] = dice.choice([0, 1, 2, numbers[n] + 1, max(0, numbers[n] - 1)])
    calls = list(of.calls[name])
    calls[at] = replace(calls[at], numbers=tuple(numbers))
    classes = list(program.classes)
    classes[class_id] = replace(of, calls={**of.calls, name: tuple(calls)})
    return f"number {n} of call {at} of {name}", replace(program, classes=tuple(classes))


def _form(entry: TensorEntry) -> TensorEntry:
    """An entry without the fields that distinguish entries of one shape."""
    return entry._replace(key=(), offset=0, first_handle=0)


def change_call(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    """Two tensors of one shape in a call, or two calls of one template, are exchanged."""
    class_id, everywhere = dice.randrange(len(program.classes)), dice.random() < 0.5
    of = program.classes[class_id]
    name = dice.choice([n for n in of.calls if of.calls[n] and n != "broadcast"])
    calls = list(of.calls[name])
    n, m = dice.randrange(len(calls)), dice.randrange(len(calls))
    if calls[n].template == calls[m].template and n != m:
        what = f"calls {n} and {m}"
        calls[n], calls[m] = calls[m], calls[n]
    else:
        binding = list(calls[n].binding)
        forms = [_form(of.entries[e]) for e in binding]
        a = dice.randrange(len(binding))
        alike = [b for b, form in enumerate(forms) if form == forms[a] and binding[b] != binding[a]]
        if not alike:
            return None
        b = dice.choice(alike)
        binding[a], binding[b] = binding[b], binding[a]
        calls[n] = replace(calls[n], binding=tuple(binding))
        what = f"slots {a} and {b} of call {n}"
    changed = [
        replace(c, calls={**c.calls, name: tuple(calls)}) if everywhere or c is of else c
        for c in program.classes
    ]
    return f"{what} of {name!r} exchanged", replace(program, classes=tuple(changed))


def change_devices(dice: random.Random, program: TileProgram) -> tuple[str, TileProgram] | None:
    devices = list(program.devices)
    n, m = dice.randrange(len(devices)), dice.randrange(len(devices))
    devices[n], devices[m] = devices[m], devices[n]
    return f"devices {n} and {m} exchanged", replace(program, devices=tuple(devices))


CHANGES: list[Change] = [
    change_list,
    change_list,
    change_operand,
    change_instruction,
    change_template,
    change_numbers,
    change_call,
    change_devices,
]
