"""Small seeded Llamas and steps, and faults to plant in their plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

import tilewise as tw
from tilewise import models
from tilewise.ir.program import Instruction, TileProgram
from tilewise.models import llama
from tilewise.session import Plan

BATCH, SEQ = 16, 32


def config(**changes: object) -> llama.LlamaConfig:
    """Two layers, eight query heads, four KV heads; every dim is large enough for eight devices."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return llama.LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def training_graph(
    model: llama.LlamaConfig, dtype: str, batch: int = BATCH, seq: int = SEQ
) -> tw.ComputeGraph:
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, model, batch, seq, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


def batches(
    model: models.ModelConfig, steps: int, batch: int = BATCH, seq: int = SEQ
) -> list[Mapping[str, np.ndarray]]:
    """Random tokens; some labels are not counted."""
    generator = np.random.default_rng(7)
    result = []
    for _ in range(steps):
        t = generator.integers(0, model.vocab_size, (batch, seq + 1)).astype(np.int32)
        labels = np.where(generator.random((batch, seq)) < 0.1, -100, t[:, 1:]).astype(np.int32)
        result.append({"tokens": t[:, :-1], "labels": labels})
    return result


def templates_of(plan: Plan, device: int, program: str = "step") -> list[int]:
    """Numbers of the templates that a device's program uses, in order of first use."""
    return list(dict.fromkeys(call.template for call in plan.class_of(device).calls[program]))


def change_first(
    label: str,
    change: Callable[[Instruction], Instruction],
    device: int = 0,
    program: str = "step",
    kernel: str | None = None,
) -> Callable[[Plan], Plan]:
    """Applies `change` to the first such instruction of one device (-1: the last) whose label contains `label`."""

    def apply(plan: Plan) -> Plan:
        at = device % plan.mesh.num_devices
        of = plan.class_of(at)
        places = (
            (t, i)
            for t in templates_of(plan, at, program)
            for i, instruction in enumerate(of.templates[t].instructions)
            if label in instruction.label and kernel in (None, instruction.kernel)
        )
        place_of_first = next(places, None)
        assert place_of_first is not None, f"no instruction is labelled {label!r}"
        number, place = place_of_first
        listed = list(of.templates[number].instructions)
        listed[place] = change(listed[place])
        template = replace(of.templates[number], instructions=tuple(listed))
        templates = (*of.templates[:number], template, *of.templates[number + 1 :])
        classes, devices = list(plan.program.classes), list(plan.program.devices)
        if sum(d.class_id == devices[at].class_id for d in devices) > 1:  # now alone in a class of its own
            devices[at] = replace(devices[at], class_id=len(classes))
            classes.append(of)
        classes[devices[at].class_id] = replace(of, templates=templates)
        return replace(plan, program=TileProgram(tuple(classes), tuple(devices)))

    return apply


def change_where(
    is_changed: Callable[[Instruction], bool], change: Callable[[Instruction], Instruction]
) -> Callable[[Plan], Plan]:
    """A fault in all such instructions, on every device."""

    def apply(plan: Plan) -> Plan:
        classes = []
        for of in plan.program.classes:
            templates = [
                replace(t, instructions=tuple(change(i) if is_changed(i) else i for i in t.instructions))
                for t in of.templates
            ]
            classes.append(replace(of, templates=tuple(templates)))
        return replace(plan, program=replace(plan.program, classes=tuple(classes)))

    return apply


def change_every(label: str, change: Callable[[Instruction], Instruction]) -> Callable[[Plan], Plan]:
    """The same fault in all instructions with that label, on every device."""
    return change_where(lambda instruction: instruction.label == label, change)


def drop_partial(instruction: Instruction) -> Instruction:
    """One partial value is counted twice, in place of another."""
    operands = list(instruction.operands)
    partial_values = [i for i, o in enumerate(operands) if o.group >= 0]
    operands[partial_values[0]] = operands[partial_values[1]]
    return replace(instruction, operands=tuple(operands))


def swap_partials(instruction: Instruction) -> Instruction:
    """Two partial values change places in the tree."""
    operands = list(instruction.operands)
    operands[3], operands[4] = operands[4], operands[3]
    return replace(instruction, operands=tuple(operands))


def merge_splits(instruction: Instruction) -> Instruction:
    """The first two k splits are summed as one: another order of the same additions."""
    first, terms, k_splits, *ranges = instruction.ints
    assert terms == 1 and k_splits > 1 and ranges[1] == ranges[2]
    ints = (first, 1, k_splits, ranges[0], ranges[3], ranges[3], ranges[3], *ranges[4:])
    return replace(instruction, ints=ints)


def halve_batch_splits(instruction: Instruction) -> Instruction:
    """A batch split is halved: the tree over tokens gets another shape."""
    return replace(instruction, ints=(instruction.ints[0] // 2, *instruction.ints[1:]))


def skip(instruction: Instruction) -> Instruction:
    return replace(instruction, kernel="")
