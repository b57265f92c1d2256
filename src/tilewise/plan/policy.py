"""Applies an execution policy to calls and instructions: pure functions from names to hints.

An op is matched by its label, a layer by the label of its call, a template by the name of its
function. Nothing here changes an operand, an order or a signal, so a policy changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, nearest, shown
from tilewise.ir.policy import ExecutionPolicy
from tilewise.ir.program import NO_HINTS, Call, Instruction, LoweredTemplate, TaskHints

if TYPE_CHECKING:
    from tilewise.plan.schedule import Segment
    from tilewise.plan.tables import PlanTables

__all__ = [
    "Entry",
    "PolicyRules",
    "layer_of",
    "matched_names",
    "names_of_op",
    "require_workers",
    "show_hints",
    "template_name",
]

_BACKWARD = ".backward"
_WILDCARDS = "*?["
_validate = Validator("plan", PlanError)


class Entry(NamedTuple):
    """A line of a policy: a pattern, and what it states for the tasks that it matches."""

    pattern: str
    hints: TaskHints

    def matches(self, names: Iterable[str]) -> bool:
        """Whether one of the names fits the pattern."""
        return any(name == self.pattern or fnmatchcase(name, self.pattern) for name in names)

    @property
    def rank(self) -> tuple[bool, int]:
        """How specific the pattern is: names first, then by the number of plain characters."""
        plain = sum(c not in _WILDCARDS for c in self.pattern)
        return plain == len(self.pattern), plain


def layer_of(label: str) -> str:
    """The label of a layer, from that of its call in the forward or backward pass."""
    return label.partition(_BACKWARD)[0]


def template_name(key: str) -> str:
    """The name of a layer's function, without its module and without `backward`."""
    return key.partition(_BACKWARD)[0].rpartition(".")[2]


def names_of_op(label: str) -> tuple[str, ...]:
    """The names of an op, from the label of one of its instructions: exchanges add their kind."""
    return label, label.partition("/")[0]


class PolicyRules:
    """A policy's entries and defaults for one plan.

    Args:
        policy: the policy, whose placement is decided (not `auto`).
        num_workers: workers per device.
    """

    def __init__(self, policy: ExecutionPolicy, num_workers: int) -> None:
        self.policy = policy
        stated: dict[str, TaskHints] = {p: TaskHints(workers) for p, workers in policy.workers.items()}
        for pattern, own in policy.hints.items():
            workers = () if own.target_worker is None else (own.target_worker,)
            hints = TaskHints(workers, priority=own.priority or None)
            stated[pattern] = stated[pattern].over(hints) if pattern in stated else hints
        self.entries = [Entry(pattern, hints) for pattern, hints in reversed(stated.items())]
        # sorting is stable, so the last of equally specific ones comes first
        self.entries.sort(key=lambda entry: entry.rank, reverse=True)
        preferred = policy.preferred_workers
        if not preferred and policy.placement == "affinity" and num_workers > 1:
            preferred = tuple(range(num_workers))
        self.default = TaskHints(preferred, is_preference=bool(preferred))
        self._calls: dict[tuple[str, str], TaskHints] = {}
        self._matched: set[str] = set()
        self._names: set[str] = set()

    def matching(self, names: Sequence[str]) -> Iterator[Entry]:
        """The entries that match one of the names, the most specific first."""
        return (entry for entry in self.entries if entry.matches(names))

    def of_op(self, label: str) -> TaskHints:
        """What entries state for the op of an instruction."""
        return self._stated(names_of_op(label))

    def of_layer(self, label: str, key: str) -> TaskHints:
        """What entries state for a layer, from the label of its call and the key of its template, and
        the defaults of the policy.
        """
        names = layer_of(label), template_name(key)
        hints = self._calls.get(names)
        if hints is None:
            layer = self._stated((names[0],))
            hints = self._calls[names] = layer.over(self._stated((names[1], key))).over(self.default)
        return hints

    def _stated(self, names: Sequence[str]) -> TaskHints:
        hints = NO_HINTS
        self._names.update(names)
        for entry in self.matching(names):
            self._matched.add(entry.pattern)
            hints = hints.over(entry.hints)
        return hints

    def source_of(self, op_label: str, layer: tuple[str, str] | None) -> str:
        """Which worker runs the tasks of an op, and why, in words.

        Args:
            op_label: the label of one of its instructions.
            layer: the label and the template's key of the layer that it is in; None for a root op.
        """
        kinds = [names_of_op(op_label)]
        if layer is not None:
            kinds += [(layer_of(layer[0]),), (template_name(layer[1]), layer[1])]
        for names in kinds:
            for entry in self.matching(names):
                if entry.hints.workers:
                    return f"{show_hints(entry.hints)}, by the policy's entry {entry.pattern!r}"
        if self.default.workers:
            reason = "preferred_workers" if self.policy.preferred_workers else "placement affinity"
            return f"{show_hints(self.default)}, by the policy's {reason}"
        return f"any worker of the device ({self.policy.placement})"

    def placed(self, call: Call, segment: Segment) -> Call:
        """A call with its hints."""
        if not self.entries and self.default == NO_HINTS:
            return call
        op = segment.call
        hints = self.default if op is None else self.of_layer(op.label, op.attrs["template"])
        return replace(call, hints=hints) if hints != call.hints else call

    def hinted(self, template: LoweredTemplate) -> LoweredTemplate:
        """A template whose instructions have the hints of their ops, and the base priority."""
        if not self.entries and self.policy.base_priority == 0:
            return template
        instructions = tuple(self._hinted(i) for i in template.instructions)
        return replace(template, instructions=instructions)

    def _hinted(self, instruction: Instruction) -> Instruction:
        hints = self.of_op(instruction.label)
        priority = instruction.priority or self.policy.base_priority
        if hints == instruction.hints and priority == instruction.priority:
            return instruction
        return replace(instruction, hints=hints, priority=priority)

    def require_matches(self) -> None:
        """Reject a policy with a pattern that has matched nothing. Called after all calls and templates.

        Raises:
            PlanError: names the pattern.
        """
        for entry in self.entries:
            if entry.pattern in self._matched:
                continue
            closest = nearest(entry.pattern, self._names)
            _validate.invalid(
                "policy",
                "a pattern of the policy must match a layer, a template or an op",
                f"{entry.pattern!r}, which matches none",
                f"did you mean {closest!r}?" if closest else "see the labels in print(graph.complete())",
            )


def show_hints(hints: TaskHints) -> str:
    """Workers and priority in words."""
    workers = ", ".join(map(str, hints.workers))
    one = "worker" if len(hints.workers) == 1 else "workers"
    words = [f"{'prefers ' if hints.is_preference else ''}{one} {workers}"] if workers else []
    words += [f"priority {hints.priority}"] if hints.priority is not None else []
    return ", ".join(words)


def matched_names(plan: PlanTables, rules: PolicyRules) -> dict[Entry, dict[str, list[str]]]:
    """Per entry, the ops, layers and templates that it matches."""
    matched: dict[Entry, dict[str, dict[str, None]]] = {entry: {} for entry in rules.entries}

    def note(kind: str, names: Sequence[str]) -> None:
        for entry in rules.matching(names) if rules.entries else ():
            matched[entry].setdefault(kind, {})[names[-1]] = None

    for of in plan.program.classes:
        for template in of.templates:
            for instruction in template.instructions:
                note("op", names_of_op(instruction.label))
    for op in plan.graph.ops:
        if op.op == "call":
            note("layer", (layer_of(op.label),))
            note("template", (op.attrs["template"], template_name(op.attrs["template"])))
    return {entry: {kind: [*names] for kind, names in kinds.items()} for entry, kinds in matched.items()}


def require_workers(policy: ExecutionPolicy, num_workers: int) -> None:
    """Reject a policy that names workers that a device does not have.

    Raises:
        PlanError: names the worker and where the policy names it.
    """
    for where, workers in _named_workers(policy).items():
        for worker in workers:
            if worker >= num_workers:
                _validate.invalid(
                    "policy",
                    f"a worker must be one of a device's {num_workers}",
                    f"worker {worker} in {shown(where)}",
                    "count from 0, or plan with more workers_per_device",
                )


def _named_workers(policy: ExecutionPolicy) -> Mapping[str, tuple[int, ...]]:
    named = {"preferred_workers": policy.preferred_workers, **policy.workers}
    targets = {p: h.target_worker for p, h in policy.hints.items()}
    return {**named, **{p: (worker,) for p, worker in targets.items() if worker is not None}}
