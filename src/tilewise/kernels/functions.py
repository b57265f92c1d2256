"""Native functions that users pass: function pointers of ctypes, Numba cfuncs, addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from tilewise.core.validation import Validator, shown

__all__ = ["address_of", "is_function_pointer", "require_status"]

_FunctionPointer: type = ctypes.CFUNCTYPE(None).__mro__[1]  # the base of all function pointers
# types of a status: codes of ctypes, names of numba
_STATUS_CODES, _STATUS_TYPES = ("iIlLqQ", ("int32", "uint32", "int64", "uint64"))
_NEEDS_INTERPRETER = 4  # a flag of ctypes: the function needs the GIL, which native kernels do not hold


def is_function_pointer(function: object) -> bool:
    """Whether a value is a function pointer of ctypes."""
    return isinstance(function, _FunctionPointer)


def address_of(function: Any) -> int | None:
    """The address of native code; None if `function` is not native code."""
    if isinstance(function, int):
        return -1 if isinstance(function, bool) else function
    if isinstance(function, _FunctionPointer):
        pointer: Any = function
        return ctypes.cast(pointer, ctypes.c_void_p).value or 0  # 0: a null pointer
    address = getattr(function, "address", None)  # numba.cfunc
    return address if isinstance(address, int) else None


def require_status(validate: Validator, function: Any, most_arguments: int, signature: str) -> None:
    """Reject compiled functions that do not return a status. Otherwise it would be arbitrary
    whether their tasks fail.

    Args:
        most_arguments: the number of arguments with which it is called.
        signature: what it must be, for the message.
    """
    own = getattr(function, "_sig", None)  # numba.cfunc
    if isinstance(function, _FunctionPointer):
        pointer: Any = function
        result = getattr(pointer.restype, "_type_", "?") if pointer.restype is not None else "v"
        is_status = result in _STATUS_CODES and not pointer._flags_ & _NEEDS_INTERPRETER
        num_arguments = len(pointer.argtypes or ())
    elif own is not None:
        is_status = str(own.return_type) in _STATUS_TYPES
        num_arguments = len(own.args)
    else:
        return
    if not is_status or num_arguments > most_arguments:
        validate.invalid(
            "kernel",
            f"a compiled kernel must be {signature}",
            f"{shown(own if own is not None else function)}",
            "return a status of 32 or 64 bits, 0 for success",
        )
