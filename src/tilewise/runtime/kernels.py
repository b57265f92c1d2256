"""Kernels of the task runtime: native functions by name or address, and Python callables.

Owns the way from what a user has (a name, a numba cfunc, a ctypes pointer, an address, a callable) to the runtime's
id. Refuses, with two processes, everything but names: an address means nothing elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from tilewise._native.tasks import Core

__all__ = ["LATER", "Kernel", "KernelTable", "WorkerType"]

LATER = 1  # what a kernel returns when somebody will call task_complete
MAX_NAME_BYTES = 59
_FunctionPointer: type = ctypes.CFUNCTYPE(None).__mro__[1]  # the base of all of them
MAX_PYTHON_NAMES = 256  # further callables share one name: the runtime's table of kernels is finite


class WorkerType(IntEnum):
    """What kind of worker a task needs; `Runtime(worker_types=...)` says which worker serves which."""

    CUBE = 0
    VECTOR = 1
    AI_CPU = 2
    ACCELERATOR = 3


class Kernel:
    """A kernel that a runtime knows. `function` is the Python callable, or what keeps native code loaded."""

    __slots__ = ("function", "id", "is_python", "name")

    def __init__(self, id: int, name: str, function: object, is_python: bool) -> None:
        self.id = id
        self.name = name
        self.function = function
        self.is_python = is_python

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"


class KernelTable:
    """The kernels of one runtime."""

    def __init__(self, core: Core, is_shared: bool) -> None:
        self._core = core
        self._is_shared = is_shared
        self._by_name: dict[str, Kernel] = {}
        self._by_address: dict[tuple[int, bool], Kernel] = {}
        self._python_ids: dict[str, int] = {}

    def find(self, kernel: object, submits: bool, name: str | None) -> Kernel:
        """The kernel for a name, an address, something with an address, or a callable."""
        if isinstance(kernel, Kernel):
            return kernel
        if isinstance(kernel, str):
            return self._named(kernel)
        if self._is_shared:
            raise ValueError(
                "[runtime.kernel] with two processes a kernel must be a name that both sides' libraries export; got "
                f"{kernel!r}; compile it into a library"
            )
        address = _address_of(kernel)
        if address is not None and address > 0:
            return self._addressed(address, kernel, submits, name)
        if address is not None or not callable(kernel):
            raise ValueError(
                "[runtime.kernel] a kernel must be a name, an address, a compiled function or a callable; got "
                f"{kernel!r}; correct it"
            )
        return self._python(kernel, name)

    def _named(self, name: str) -> Kernel:
        if name not in self._by_name:
            self._by_name[name] = Kernel(self._core.find_kernel(name), name, None, False)
        return self._by_name[name]

    def _addressed(self, address: int, kernel: object, submits: bool, name: str | None) -> Kernel:
        known = self._by_address.get((address, submits))
        if known is None:
            title = str(name or getattr(kernel, "__name__", f"kernel at {address:#x}"))
            id = self._core.add_kernel(_shortened(title), address, submits)
            known = self._by_address[address, submits] = Kernel(id, title, kernel, False)
        return known

    def _python(self, function: Callable[..., object], name: str | None) -> Kernel:
        title = _shortened(str(name or getattr(function, "__qualname__", type(function).__name__)))
        if title not in self._python_ids:
            if len(self._python_ids) >= MAX_PYTHON_NAMES:
                title = "python"
            if title not in self._python_ids:
                self._python_ids[title] = self._core.add_kernel(title, 0, True)
        return Kernel(self._python_ids[title], title, function, True)


def _shortened(name: str) -> str:
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore") or "kernel"


def _address_of(kernel: Any) -> int | None:
    """Where native code begins; None for everything else."""
    if isinstance(kernel, int):
        return kernel
    if isinstance(kernel, _FunctionPointer):
        pointer: Any = kernel
        return ctypes.cast(pointer, ctypes.c_void_p).value or 0  # 0: a null pointer
    address = getattr(kernel, "address", None)  # numba.cfunc
    return address if isinstance(address, int) else None
