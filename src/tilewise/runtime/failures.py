"""The exceptions that failed calls of the task runtime raise.

This module has the table from statuses to exceptions. It also keeps the newest 64 exceptions of
Python kernels until a thread waits for their task. Native code stores only a number in the task's
error text. The native binding calls this module.
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections import OrderedDict
from concurrent.futures import CancelledError

from tilewise.core.errors import ConfigError, InternalError, PeerLost, ResourceError, TaskFailed

__all__ = ["describe_exception", "error_of", "forget_exceptions"]

KEPT_EXCEPTIONS = 64

_SIMPLE: dict[int, type[Exception]] = {
    -1: ConfigError,
    -3: CancelledError,
    -4: TimeoutError,
    -5: ResourceError,
    -6: ResourceError,
    -7: PeerLost,
    -8: ConfigError,
}
TASK_FAILED = -2
INTERRUPTED = -9

_numbers = itertools.count(1)
_exceptions: OrderedDict[int, BaseException] = OrderedDict()


def describe_exception(error: BaseException) -> str:
    """Store a kernel's exception. Returns a text with which `error_of` finds the exception again."""
    number = next(_numbers)
    # keeps the lines, but drops the variables of its frames, such as arrays
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
        traceback.clear_frames(error.__traceback__)
    _exceptions[number] = error
    while len(_exceptions) > KEPT_EXCEPTIONS:
        _exceptions.popitem(last=False)
    return f"#{number} {type(error).__name__}: {_text_of(error)}"


def _text_of(error: BaseException) -> str:
    """The text of an exception for the native side: without lone surrogates and zeros."""
    try:
        text = str(error)
    except Exception as failure:  # an error of its `__str__` must not hide the exception
        text = f"(its text raised {type(failure).__name__})"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def forget_exceptions() -> None:
    """Drop the stored exceptions and the objects in their tracebacks."""
    _exceptions.clear()


def error_of(status: int, text: str) -> BaseException:
    """The exception for a status of the C interface and its message."""
    if status == TASK_FAILED:
        return _task_failed(text)
    if status == INTERRUPTED:
        return KeyboardInterrupt(text)
    kind = _SIMPLE.get(status)
    if kind is None:
        return InternalError(
            f"[runtime] the task runtime must return a known status; got {status}: {text}; report it"
        )
    return kind(text)


def _task_failed(text: str) -> TaskFailed:
    number = re.search(r"got '#(\d+) ", text)
    place = re.search(r"from task \d+ (?:'.*?' )?\((.*?)\) on (?:worker (\d+)|a submitter)", text)
    error = TaskFailed(
        re.sub(r"got '#\d+ ", "got '", text),
        op=place[1] if place else "",
        worker=int(place[2]) if place and place[2] else -1,
        device=0,
    )
    if number:
        error.__cause__ = _exceptions.get(int(number[1]))
    return error
