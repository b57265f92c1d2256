"""Kernels of the task runtime: native functions by name or address, and Python callables.

This module turns what a user has (a name, a Numba cfunc, a ctypes pointer, an address, a callable)
into the runtime's id of a kernel. A runtime in two processes accepts only names, because addresses
are not valid in the other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, IntEnum

from tilewise._native.tasks import OpenRuntime
from tilewise.core.validation import Validator, shown
from tilewise.kernels.functions import address_of, require_status

__all__ = ["LATER", "Kernel", "KernelTable", "Later", "WorkerType", "type_masks"]

_validate = Validator("runtime")

SUBMITS, VIEWS = 1, 2  # flags of the C interface
MAX_NAME_BYTES = 59
MAX_PYTHON_NAMES = 256  # further callables share one name: the runtime's table of kernels is finite


class Later(Enum):
    """The type of `LATER`: what a Python kernel returns when `Runtime.task_complete` will end its task."""

    LATER = "LATER"

    def __repr__(self) -> str:
        return self.name


LATER = Later.LATER


class WorkerType(IntEnum):
    """The type of worker that a task needs. `Runtime(worker_types=...)` says which worker serves
    which types.
    """

    CUBE = 0
    VECTOR = 1
    AI_CPU = 2
    ACCELERATOR = 3


def type_masks(worker_types: Iterable[Iterable[WorkerType]]) -> list[int]:
    """Per worker, a bit for each type that it serves, from `Runtime(worker_types=...)`."""
    masks = []
    for types in worker_types:
        kinds = {
            _validate.integer("Runtime", "a worker type", kind, 0, len(WorkerType) - 1) for kind in types
        }
        masks.append(sum(1 << kind for kind in kinds))
    return masks


class Kernel:
    """A kernel of a runtime. `function` is the Python callable, or the object that keeps native
    code loaded.
    """

    __slots__ = ("function", "has_views", "id", "is_python", "name", "native")

    def __init__(
        self,
        native: OpenRuntime,
        id: int,
        name: str,
        function: object,
        is_python: bool,
        has_views: bool = False,
    ) -> None:
        self.native = native
        self.id = id
        self.name = name
        self.function = function
        self.is_python = is_python
        self.has_views = has_views

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"


class KernelTable:
    """The kernels of one runtime."""

    def __init__(self, native: OpenRuntime, is_shared: bool) -> None:
        self._native = native
        self._is_shared = is_shared
        self._by_name: dict[tuple[str, int], Kernel] = {}
        self._by_address: dict[tuple[int, int], Kernel] = {}
        self._python_ids: dict[str, int] = {}

    def find(self, kernel: object, submits: bool, name: str | None, views: bool = False) -> Kernel:
        """The kernel for a name, an address, an object that has an address, or a callable."""
        flags = (SUBMITS if submits else 0) | (VIEWS if views else 0)
        if isinstance(kernel, Kernel):
            if kernel.native is not self._native:
                _validate.invalid(
                    "kernel",
                    "a kernel must be one of this runtime's",
                    f"{kernel!r} of another",
                    "make one here",
                )
            return kernel
        if isinstance(kernel, str):
            return self._named(kernel, flags)
        if self._is_shared:
            _validate.invalid(
                "kernel",
                "with two processes a kernel must be a name that both sides' libraries export",
                shown(kernel),
                "compile it into a library",
            )
        address = address_of(kernel)
        if address is not None and 0 < address < 1 << 64:
            return self._addressed(address, kernel, flags, name)
        if address is not None or not callable(kernel):
            _validate.invalid(
                "kernel",
                "a kernel must be a name, an address, a compiled function or a callable",
                shown(kernel),
                "correct it",
            )
        if views:
            _validate.invalid(
                "kernel",
                "only native kernels have views",
                shown(kernel),
                "drop views=True: a Python kernel gets arrays",
            )
        return self._python(kernel, name)

    def _named(self, name: str, flags: int) -> Kernel:
        if (name, flags) not in self._by_name:
            id = self._native.find_kernel(name, flags)
            self._by_name[name, flags] = Kernel(self._native, id, name, None, False, bool(flags & VIEWS))
        return self._by_name[name, flags]

    def _addressed(self, address: int, kernel: object, flags: int, name: str | None) -> Kernel:
        cached = self._by_address.get((address, flags))
        if cached is None:
            require_status(_validate, kernel, 2, "int (*)(void* const* buffers, const uint64_t* scalars)")
            title = str(name or getattr(kernel, "__name__", f"kernel at {address:#x}"))
            id = self._native.add_kernel(_shortened(title), address, flags)
            cached = self._by_address[address, flags] = Kernel(
                self._native, id, title, kernel, False, bool(flags & VIEWS)
            )
        return cached

    def _python(self, function: Callable[..., object], name: str | None) -> Kernel:
        title = _shortened(str(name or getattr(function, "__qualname__", type(function).__name__)))
        if title not in self._python_ids:
            if len(self._python_ids) >= MAX_PYTHON_NAMES:
                title = "python"
            if title not in self._python_ids:
                self._python_ids[title] = self._native.add_kernel(title, 0, SUBMITS)
        return Kernel(self._native, self._python_ids[title], title, function, True)


def _shortened(name: str) -> str:
    return name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore") or "kernel"
