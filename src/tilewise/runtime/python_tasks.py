"""Python callables as kernels: an object that runs the callable of a task.

The object keeps the callable, the parameters and the scalars of one submitted task until the task
has run. The callable gets one array per parameter (inputs are read-only), then the scalars. It must
return None or `LATER`. Any other value fails the task, as an exception does, because a number could
be meant as a status or as a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise._native.tasks import OpenRuntime, Param, addresses, note_interrupt
from tilewise.core.validation import Validator, shown
from tilewise.runtime.failures import describe_exception
from tilewise.runtime.kernels import LATER
from tilewise.runtime.params import Mode, NewOutput

__all__ = ["PythonTask"]

_validate = Validator("runtime")

PTO_LATER = 1  # the status of a kernel that returned `LATER`


class PythonTask:
    """One submission of a Python kernel."""

    __slots__ = ("_function", "_native", "_params", "_scalars")

    def __init__(
        self,
        native: OpenRuntime,
        function: Callable[..., object],
        params: Sequence[Param],
        scalars: Sequence[Any],
    ) -> None:
        self._native = native
        self._function: Callable[..., object] | None = function
        self._params = tuple(params)
        self._scalars = tuple(scalars)

    def run(self, buffers: int) -> int | str:
        """Run the callable. The runtime calls this with the addresses of the parameters. Returns a
        status, or a text that says why the task failed.
        """
        function, params, scalars = self._function, self._params, self._scalars
        self._function, self._params, self._scalars = None, (), ()
        assert function is not None
        try:
            places = addresses(buffers, len(params))
            result = function(*(self._array(p, a) for p, a in zip(params, places)), *scalars)
            if result is not None and result is not LATER:
                _validate.invalid(
                    "kernel",
                    "a Python kernel must return None, or LATER",
                    shown(result),
                    "write results into its arrays",
                )
        except BaseException as error:  # also SystemExit: a worker thread is not the place to end a program
            if isinstance(error, KeyboardInterrupt):
                note_interrupt()  # on the main thread, this also interrupts the wait that ran the task
            function, params = None, ()  # the exception's traceback refers to this frame
            return describe_exception(error)
        return 0 if result is None else PTO_LATER

    def _array(self, param: Param, address: int) -> Any:
        target: Any = param.target
        if isinstance(target, NewOutput):
            memory: Any = self._native.view(address, target.num_bytes)
            return memory.view(target.dtype).reshape(target.shape)
        if param.mode == Mode.NO_DEP and not hasattr(target, "array"):
            return target
        if param.mode == Mode.REDUCE:
            return target.view_at(address)
        array = target.array
        if param.mode == Mode.INPUT:
            array = array.view()
            array.flags.writeable = False
        return array
