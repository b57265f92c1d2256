"""`Recording`: a recorded sequence of tasks that can be submitted again without running Python
code.

`Runtime.record` creates a recording. A replay submits the recorded tasks again. It may replace
buffers by other buffers of the same size, but two different buffers must stay different. Python
kernels are rejected while recording, because a recording does not contain the callable.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewise._native.tasks import OpenRuntime
from tilewise.core.validation import Validator
from tilewise.runtime.buffers import Buffer

__all__ = ["Recording"]

_validate = Validator("runtime")


class Recording:
    """Recorded tasks. They can be replayed after the `with rt.record()` block has ended."""

    def __init__(self, native: OpenRuntime) -> None:
        self._native = native
        self._id = 0

    def replay(self, bind: Mapping[Buffer, Buffer] | None = None) -> None:
        """Submit the recorded tasks again.

        Args:
            bind: recorded buffer -> the buffer that replaces it. Buffers that are not in `bind`
                stay.

        Raises:
            ConfigError: sizes differ, two recorded buffers would become one, or a buffer is no
                longer valid.
        """
        if self._id == 0:
            _validate.invalid(
                "Recording.replay",
                "a recording must have ended and not been freed",
                "one that is open or freed",
                "replay after the block, before free()",
            )
        pairs = {} if bind is None else bind
        for buffer in (buffer for pair in pairs.items() for buffer in pair):
            _validate.instance(
                "Recording.replay",
                "each key and value of bind",
                buffer,
                Buffer,
                "pass buffers, not regions or arrays",
            )
            if buffer.native is not self._native:
                _validate.invalid(
                    "Recording.replay",
                    "buffers must belong to the recording's runtime",
                    f"{buffer!r} of another",
                    "register them there",
                )
        self._native.replay(self._id, [old.handle for old in pairs], [new.handle for new in pairs.values()])

    def free(self) -> None:
        """Forget the recorded tasks."""
        freed, self._id = self._id, 0  # two threads may free it at once
        if freed == 0:
            return
        try:
            self._native.recording_free(freed)
        except BaseException:
            self._id = freed
            raise

    def _begin(self) -> None:
        self._native.record_begin()

    def _end(self) -> None:
        self._id = self._native.record_end()
