"""The primitives of tile programs: how devices exchange tiles and signals.

A program is a Python function that every device runs (SPMD). Inside it, these functions act for the
device that calls them. They are modelled on OpenSHMEM and Triton-distributed, and act in one of two
ways, which the current interpreter decides:

    local(n).run(program, ...)   every call happens at once, on one thread per device (`comm.local`)
    @tile_program                the function is traced once; the calls become instructions of a plan

Three kinds of objects go through a program. A *symmetric tensor* exists on every device with the
same shape; a program's argument stands for the copy of the device that runs it, and `symm_at` gives
the copy of another device. A *signal* is a 64-bit integer that exists on every device; other devices
post it (`notify`), and the device itself waits for it. A *token* is the result of a wait.

Arguments are validated here where both interpreters agree, and otherwise in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tilewise.core.errors import PlanError, ShapeError
from tilewise.core.tree import share_of
from tilewise.core.validation import Validator, shown

if TYPE_CHECKING:
    from tilewise.kernels.user import TileKernel

__all__ = [
    "Interpreter",
    "SymmetricTensor",
    "Token",
    "active_interpreter",
    "barrier",
    "compare_swap",
    "consume_token",
    "current_interpreter",
    "fence",
    "fetch_add",
    "get",
    "interpreting",
    "kernel",
    "matmul",
    "notify",
    "num_ranks",
    "put",
    "put_signal",
    "quiet",
    "rank",
    "symm_at",
    "tiles",
    "wait",
    "wait_all",
    "wait_any",
    "wait_some",
]

_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
"""How a wait may compare the signal (left) with the expected value (right)."""

_OPERATORS = ("set", "add")
_validate = Validator("comm", PlanError)
_SCOPES = ("gpu", "sys")

Signal = Any  # one signal, an element of `signals(n)`
Signals = Any  # several signals: `signals(n)`, or a slice of it
Token = Any
"""What a wait returns, for `consume_token`."""


class SymmetricTensor(Protocol):
    """One device's copy of a symmetric tensor, or rows of it. Indices are rows only."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""

    @property
    def dtype(self) -> str:
        """Element type, for example `f32`."""

    def __getitem__(self, rows: slice) -> SymmetricTensor:
        """The rows `x[begin:end]`; no step."""

    def tile(self, index: int, *, rows: int) -> SymmetricTensor:
        """The rows `x[index * rows : (index + 1) * rows]`."""


_Tensor = TypeVar("_Tensor", bound=SymmetricTensor)


class Interpreter(Protocol):
    """What carries out the primitives for the device that calls them.

    Each method is called by the function of the same name, with all arguments, after the checks
    that stand in this module.
    """

    def rank(self, axis: str | None) -> int: ...

    def num_ranks(self, axis: str | None) -> int: ...

    def symm_at(self, tensor: Any, rank: int, axis: str | None) -> Any: ...

    def put(self, dst: Any, src: Any) -> None: ...

    def get(self, dst: Any, src: Any) -> None: ...

    def put_signal(self, dst: Any, src: Any, signal: Signal, value: int, op: str) -> None: ...

    def notify(
        self, signal: Signal, rank: int, value: int, op: str, scope: str, axis: str | None
    ) -> None: ...

    def wait_all(
        self, signals: Signal | Signals, value: Any, cmp: str, scope: str, timeout: float | None
    ) -> Token: ...

    def wait_any(
        self, signals: Signals, value: Any, cmp: str, scope: str, skip: Iterable[int], timeout: float | None
    ) -> tuple[int, Token]: ...

    def wait_some(
        self, signals: Signals, value: Any, cmp: str, scope: str, skip: Iterable[int], timeout: float | None
    ) -> tuple[list[int], Token]: ...

    def consume_token(self, tensor: Any, token: Token) -> Any: ...

    def fence(self) -> None: ...

    def quiet(self) -> None: ...

    def fetch_add(self, signal: Signal, rank: int, value: int) -> int: ...

    def compare_swap(self, signal: Signal, rank: int, expected: int, value: int) -> int: ...

    def barrier(self) -> None: ...

    def kernel(self, name: str, arguments: dict[str, Any]) -> None: ...

    def tiles(self, count: int, first: int) -> Iterable[int]: ...


_interpreter: ContextVar[Interpreter | None] = ContextVar("tilewise_interpreter", default=None)


@contextmanager
def interpreting(interpreter: Interpreter) -> Iterator[None]:
    """In this block and thread, `interpreter` carries out the primitives."""
    before = _interpreter.set(interpreter)
    try:
        yield
    finally:
        _interpreter.reset(before)


def active_interpreter() -> Interpreter | None:
    """What carries out the primitives in this thread; None outside of programs."""
    return _interpreter.get()


def current_interpreter(primitive: str) -> Interpreter:
    """What carries out the primitives in this thread.

    Args:
        primitive: name of the called function, for the message.

    Raises:
        PlanError: no program runs in this thread.
    """
    interpreter = _interpreter.get()
    if interpreter is None:
        raise PlanError(
            f"[comm.{primitive}] a primitive must be called by a program; got a call outside of one; call it in a "
            "function that tw.comm.local(n).run(...) runs or that @tw.tile_program decorates"
        )
    return interpreter


def rank(axis: str | None = None) -> int:
    """The position of the calling device.

    Args:
        axis: an axis of the mesh; None for the number among all devices.

    Returns:
        A number from 0; in a traced program, a symbol that index arithmetic accepts.

    Raises:
        PlanError: the mesh has no such axis.
    """
    return current_interpreter("rank").rank(axis)


def num_ranks(axis: str | None = None) -> int:
    """The number of devices.

    Args:
        axis: an axis of the mesh; None for all devices.

    Raises:
        PlanError: the mesh has no such axis.
    """
    return current_interpreter("num_ranks").num_ranks(axis)


def symm_at(tensor: _Tensor, rank: int, axis: str | None = None) -> _Tensor:
    """The copy of a symmetric tensor on another device: the same rows of the same allocation.

    The address differs between devices; only the place in the symmetric memory is the same.

    Args:
        tensor: the calling device's copy, or rows of it.
        rank: number of the other device; the own number is allowed.
        axis: the axis of the mesh along which devices are numbered; None for all devices.

    Raises:
        PlanError: there is no such device or axis.
    """
    copy: _Tensor = current_interpreter("symm_at").symm_at(tensor, rank, axis)
    return copy


def put(dst: SymmetricTensor, src: Any) -> None:
    """Copy into the memory of another device.

    `src` may be overwritten when the call returns. The data arrive later, in any order with other
    puts and notifies, until the caller calls `fence` (order) or `quiet` (completion). To tell the
    other device that the data have arrived, use `put_signal`, or call `fence` and then `notify`.

    Args:
        dst: a copy of a symmetric tensor, from `symm_at`.
        src: the calling device's tensor, or rows of it, with the shape and dtype of `dst`.

    Raises:
        ShapeError: shapes or dtypes differ.
    """
    current_interpreter("put").put(dst, src)


def get(dst: SymmetricTensor, src: SymmetricTensor) -> None:
    """Copy from the memory of another device. The data have arrived when the call returns.

    Args:
        dst: the calling device's tensor, or rows of it.
        src: a copy of a symmetric tensor with the shape and dtype of `dst`, from `symm_at`.

    Raises:
        ShapeError: shapes or dtypes differ.
    """
    current_interpreter("get").get(dst, src)


def put_signal(dst: SymmetricTensor, src: Any, signal: Signal, value: int = 1, *, op: str = "add") -> None:
    """Copy into the memory of another device, then post a signal there.

    A device that sees the signal's new value also sees the data of this put. It need not see the
    data of other puts, not even of earlier ones. So if several puts add to one signal, its value says
    how many have arrived, but not which: use a signal for each, or call `fence` between them.

    Args:
        dst: a copy of a symmetric tensor, from `symm_at`. The signal is posted on its device.
        src: the calling device's tensor, or rows of it, with the shape and dtype of `dst`.
        signal: the signal to post.
        value: what is added, or the new value.
        op: `add` or `set`. A signal is used with one operator only.

    Raises:
        ShapeError: shapes or dtypes differ.
        PlanError: the operator is invalid, or differs from the signal's earlier one.
    """
    _validate.choice("put_signal", "op", op, _OPERATORS)
    current_interpreter("put_signal").put_signal(dst, src, signal, value, op)


def notify(
    signal: Signal,
    rank: int,
    value: int = 1,
    *,
    op: str = "add",
    axis: str | None = None,
    scope: str = "sys",
    semantic: str = "release",
) -> None:
    """Post a signal of a device.

    A device that sees the new value also sees what the calling device has written to its own memory
    before; in a tile loop of a traced program, what the loop's iteration has written. Data of earlier
    puts are included only after `fence` or `quiet`.

    Args:
        signal: the signal to post.
        rank: number of the device whose signal is posted; the own number is allowed.
        value: what is added, or the new value.
        op: `add` or `set`. A signal is used with one operator only.
        axis: as in `symm_at`.
        scope: `sys`, or `gpu` if the device posts its own signal.
        semantic: `release`.

    Raises:
        PlanError: an argument is invalid, or the operator differs from the signal's earlier one.
    """
    _validate.choice("notify", "op", op, _OPERATORS)
    _validate.choice("notify", "scope", scope, _SCOPES)
    if semantic != "release":
        raise PlanError(
            f'[comm.notify] semantic must be "release"; got {shown(semantic)}; a notify releases what was written '
            "before it, and the other device's wait acquires it"
        )
    current_interpreter("notify").notify(signal, rank, value, op, scope, axis)


def wait(
    signal: Signal | Signals,
    value: int | Sequence[int] = 1,
    *,
    cmp: str = "ge",
    scope: str = "sys",
    semantic: str = "acquire",
    timeout: float | None = None,
) -> Token:
    """Wait until a signal of the calling device, or each of several signals, has reached a value.

    Pass the token to `consume_token` together with each tensor whose data the signal announces.

    Args:
        signal: one signal, or several.
        value: the expected value; for several signals also one value per signal.
        cmp: comparison of the signal with `value`: `eq`, `ne`, `gt`, `ge`, `lt` or `le`. `eq` misses
            a value that other devices overwrite before the waiting device looks. A traced program
            has only `ge`.
        scope: `sys`, or `gpu` if only the device itself posts the signal.
        semantic: `acquire`.
        timeout: seconds; None for the limit of the devices.

    Raises:
        PlanError: an argument is invalid.
        CommTimeout: the value did not arrive in time.
        CommError: all devices wait, so the value can never arrive.
    """
    _validate_wait("wait", cmp, scope, semantic)
    return current_interpreter("wait").wait_all(signal, value, cmp, scope, timeout)


def wait_all(
    signals: Signals,
    value: int | Sequence[int] = 1,
    *,
    cmp: str = "ge",
    scope: str = "sys",
    semantic: str = "acquire",
    timeout: float | None = None,
) -> Token:
    """Wait until each of several signals has reached a value. The same as `wait` with several signals."""
    _validate_wait("wait_all", cmp, scope, semantic)
    return current_interpreter("wait_all").wait_all(signals, value, cmp, scope, timeout)


def wait_any(
    signals: Signals,
    value: int | Sequence[int] = 1,
    *,
    cmp: str = "ge",
    scope: str = "sys",
    semantic: str = "acquire",
    skip: Iterable[int] = (),
    timeout: float | None = None,
) -> tuple[int, Token]:
    """Wait until one of several signals has reached a value.

    Args:
        signals: the signals.
        value: as in `wait`.
        cmp: as in `wait`.
        scope: as in `wait`.
        semantic: as in `wait`.
        timeout: as in `wait`.
        skip: indices of signals to ignore, for example those that earlier calls returned.

    Returns:
        The index of a signal that has reached its value, and the token of the wait for it.

    Raises:
        PlanError: an argument is invalid, or all signals are skipped.
        CommTimeout, CommError: as in `wait`.
    """
    _validate_wait("wait_any", cmp, scope, semantic)
    return current_interpreter("wait_any").wait_any(signals, value, cmp, scope, skip, timeout)


def wait_some(
    signals: Signals,
    value: int | Sequence[int] = 1,
    *,
    cmp: str = "ge",
    scope: str = "sys",
    semantic: str = "acquire",
    skip: Iterable[int] = (),
    timeout: float | None = None,
) -> tuple[list[int], Token]:
    """Wait until at least one of several signals has reached a value.

    Args:
        signals: the signals.
        value: as in `wait`.
        cmp: as in `wait`.
        scope: as in `wait`.
        semantic: as in `wait`.
        timeout: as in `wait`.
        skip: indices of signals to ignore, for example those that earlier calls returned.

    Returns:
        The indices of all signals that have reached their values, and the token of the wait for them.

    Raises:
        PlanError: an argument is invalid, or all signals are skipped.
        CommTimeout, CommError: as in `wait`.
    """
    _validate_wait("wait_some", cmp, scope, semantic)
    return current_interpreter("wait_some").wait_some(signals, value, cmp, scope, skip, timeout)


def consume_token(tensor: _Tensor, token: Token) -> _Tensor:
    """The tensor, to be read after a wait.

    A compiler or a tracer may move a read that does not depend on the wait. Reading the result of
    this function depends on it.

    Args:
        tensor: the tensor whose data the awaited signal announces: the calling device's copy, the
            copy of another device, or rows of one.
        token: what the wait returned.

    Raises:
        PlanError: `token` is no token of a wait of the calling device.
    """
    result: _Tensor = current_interpreter("consume_token").consume_token(tensor, token)
    return result


def fence() -> None:
    """Order the calling device's puts and notifies: those before this call arrive at a device before
    those after it. Different devices are not ordered with one another; `quiet` does that.
    """
    current_interpreter("fence").fence()


def quiet() -> None:
    """Complete the calling device's puts and notifies: all have arrived when the call returns."""
    current_interpreter("quiet").quiet()


def fetch_add(signal: Signal, rank: int, value: int = 1) -> int:
    """Add to a signal of a device, atomically. Not possible in a traced program.

    Args:
        signal: the signal, whose operator is `add`.
        rank: number of the device.
        value: what is added.

    Returns:
        The value before the addition.

    Raises:
        PlanError: there is no such device, or the signal's operator is another one.
    """
    return current_interpreter("fetch_add").fetch_add(signal, rank, value)


def compare_swap(signal: Signal, rank: int, expected: int, value: int) -> int:
    """Set a signal of a device to `value` if it is `expected`, atomically. Not possible in a traced
    program.

    Args:
        signal: the signal, which is changed by this function only.
        rank: number of the device.
        expected: the value that the signal must have.
        value: the new value.

    Returns:
        The value before the call. The signal was set if this equals `expected`.

    Raises:
        PlanError: there is no such device, or the signal is also used with `set` or `add`.
    """
    return current_interpreter("compare_swap").compare_swap(signal, rank, expected, value)


def barrier() -> None:
    """Complete the calling device's puts and notifies, and wait until every device has called it.

    Raises:
        CommTimeout: a device did not arrive in time.
        CommError: a device has ended, or waits for something else, so it can never arrive.
    """
    current_interpreter("barrier").barrier()


def kernel(kernel: str | TileKernel, /, **arguments: Any) -> None:
    """Run a kernel on tiles.

    Args:
        kernel: a kernel of the table (`kernels.table`) without its dtype, for example `matmul`, or a
            kernel of your own (`tw.tile_kernel`).
        arguments: operands and attributes of the kernel, by the names in the table. An operand is a
            tensor or rows of one, None if it is absent, or a list if the kernel declares a list.

    Raises:
        PlanError: there is no such kernel, or it has other operands or attributes.
        ShapeError: the operands' shapes or dtypes do not fit.
    """
    name = kernel if isinstance(kernel, str) else kernel.name
    current_interpreter("kernel").kernel(name, arguments)


def matmul(out: SymmetricTensor, x: SymmetricTensor, w: SymmetricTensor, *, k_splits: int = 1) -> None:
    """`out = x · wᵀ`, by the kernel `matmul` if `w` is packed, otherwise by `gemm`.

    Shapes: M rows, K contracted, N columns.

    Args:
        out: `[M, N]`; f32, or the dtype of `x`.
        x: `[M, K]`, f32 or bf16.
        w: `[N, K]`, with the dtype of `x`.
        k_splits: parts of K whose products are added as a tree, as `ComputeGraph(k_splits=...)` does
            for a labelled dim; `w` must be packed if there are several.

    Raises:
        ShapeError: shapes or dtypes do not fit, or `k_splits` is out of range or needs a packed `w`.
    """
    k, is_packed = x.shape[-1], getattr(w, "is_packed", False)
    if not is_packed and k_splits == 1:
        kernel("gemm", out=out, a=x, b=w, trans_a=0, trans_b=1, accumulate=0)
        return
    if not is_packed or not 1 <= k_splits <= k:
        raise ShapeError(
            f"[comm.matmul] k_splits must be 1 to K, and several need a packed w; got {k_splits} for K = {k}; choose "
            "another number"
        )
    ranges = [end for c in range(k_splits) for end in share_of(k, k_splits, c)]
    kernel("matmul", out=out, a=[x], w=[w], num_k_splits=k_splits, range=ranges)


def tiles(count: int, *, first: int = 0) -> Iterable[int]:
    """A loop over tiles: `for t in tiles(8):`.

    Args:
        count: the number of tiles.
        first: the tile to start with, so that a device can begin with tiles of its own (rank
            swizzle): first, first + 1, ..., count - 1, 0, ..., first - 1. Taken modulo `count`.
    """
    return current_interpreter("tiles").tiles(count, first)


def _validate_wait(primitive: str, cmp: str, scope: str, semantic: str) -> None:
    _validate.choice(primitive, "cmp", cmp, _COMPARISONS)
    _validate.choice(primitive, "scope", scope, _SCOPES)
    if semantic != "acquire":
        raise PlanError(
            f'[comm.{primitive}] semantic must be "acquire"; got {shown(semantic)}; a wait acquires what the other '
            "device's notify released"
        )
