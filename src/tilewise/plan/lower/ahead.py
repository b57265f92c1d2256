"""Templates that other processes lower while this one still completes the graph.

What a template is lowered to depends on itself, on what it saves, on its layout and on the devices' sizes. On one
device that runs all of the batch at once, all of this is known as soon as gradients are: what a plan has to do in one
process (updates, proofs, layouts) then costs the others no time. A plan asks for what it needs, and is given what was
lowered ahead only if it is just that; so nothing but time depends on what was foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from tilewise.core.workers import ENOUGH, Shared, WorkerPool
from tilewise.ir.graph import Template
from tilewise.ir.layout import GraphLayout
from tilewise.ir.op import import_ops, modules_of_ops
from tilewise.plan.lower import LoweredVariant, LoweringTask, lower_variant
from tilewise.plan.shapes import LocalShapes

__all__ = ["LoweredAhead", "lower_apart"]

Foreseen = tuple[Template, tuple[int, ...], GraphLayout]
"""A template, what its calls save, its layout."""


class LoweredAhead:
    """What processes are lowering, of templates that a plan is going to need; use with `with`.

    An error leaves nothing behind: what was begun is given up, and the pool works on.

    Args:
        pool: that lowers; its other calls wait until `take` or the end.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._stack = ExitStack()
        self._shapes: LocalShapes | None = None
        self._tasks: list[LoweringTask] = []
        self._shared: Shared[LoweredVariant | None] | None = None

    def __enter__(self) -> LoweredAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        self._pool.forget()  # what workers keep of the graph is needed no more

    def begin(self, foreseen: Sequence[Foreseen], shapes: LocalShapes) -> None:
        """Have the others begin, if there is enough to do for them.

        Args:
            foreseen: each once; those first that are taken first.
            shapes: of the one device, in one microbatch.
        """
        tasks = [LoweringTask.of_template(*one) for one in foreseen]
        modules = modules_of_ops({op.op for task in tasks for op in task.ops})
        if modules is None or len(tasks) < ENOUGH:
            return
        self._tasks, self._shapes = tasks, shapes
        sizes = bare(shapes)
        calls = [(modules, task, sizes) for task in tasks]
        about = [task.graph for task in tasks]
        self._shared = self._stack.enter_context(self._pool.begin(_lower_or_leave, calls, about=about))

    def find(self, tasks: Sequence[LoweringTask], shapes: LocalShapes) -> dict[int, int]:
        """Which tasks of a plan are lowered ahead: position among them -> number here. Where it is none, all that was
        begun is given up."""
        if self._shared is None:
            return {}
        known = {(id(task.graph), task.name, task.kept): i for i, task in enumerate(self._tasks)}
        found = {}
        for position, task in enumerate(tasks) if shapes == self._shapes else ():
            number = known.get((id(task.graph), task.name, task.kept))
            # ops that are late run in the last microbatch, the only one: which these are makes no difference
            if number is not None and replace(task, late_ops=frozenset()) == self._tasks[number]:
                found[position] = number
        if not found:
            self._shared = None
            self._stack.close()
        return found

    def take(self) -> Iterator[LoweredVariant | None]:
        """All of it in order, one by one: what is done with one is done while others lower the next. None for what
        could not be lowered, with a reason that comes again where it is lowered in its turn. Then the pool is free."""
        assert self._shared is not None
        with self._stack:
            shared, self._shared = self._shared, None
            yield from shared.in_order()


def bare(shapes: LocalShapes) -> LocalShapes:
    """Without what has been worked out for it, which is a lot to send."""
    return replace(shapes)


def lower_apart(modules: Sequence[str], task: LoweringTask, shapes: LocalShapes) -> LoweredVariant:
    """As `lower_variant`, in another process."""
    import_ops(modules)
    return lower_variant(task, shapes)


def _lower_or_leave(modules: Sequence[str], task: LoweringTask, shapes: LocalShapes) -> LoweredVariant | None:
    """The same; None where that raises."""
    try:
        return lower_apart(modules, task, shapes)
    except Exception:
        return None
