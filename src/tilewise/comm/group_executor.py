"""`GroupExecutor`: the devices of a plan in several processes, with the interface of the native
executor of one process.

The leader runs this code. It allocates the memory of every device on its host, and the memory for
signals between processes, and all processes of the host map this memory. So tensors are read and
written as in one process. On every other host, the first process allocates the memory for the host
(`comm.group_memory`), and tensors are read and written over the connection.

The native executor of a process counts only for its own devices. Figures of other devices are
requested and added.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise._native.connection import Connection
from tilewise._native.programs import Executor, Program
from tilewise.comm.group_memory import executor_files, make_memory, needed_memory
from tilewise.comm.links import ClockOffset
from tilewise.comm.memory import shared_content
from tilewise.comm.peer import duplicate_watched
from tilewise.core.errors import CommError, InternalError

if TYPE_CHECKING:
    from tilewise.comm.group import Group

__all__ = ["GroupExecutor", "SpreadExecutor"]


class SpreadExecutor:
    """The executor of a plan in several processes: the native executor here, and its counterpart in
    each worker.

    Args:
        group: the processes.
        number: number by which workers identify the executor.
        processes: the process of each device.
        ends: per process, a descriptor that becomes readable when the process has ended.
        content: the plan's program, as the workers read it.
        options: options of the native executor, as in one process.
        file_directory: directory of the devices' files, on every host.
        connection: connection to processes of other hosts; None if all processes are on this host.

    Attributes:
        native: the executor of this process.
        is_closed: whether the executor is closed.

    Raises:
        ResourceError: not enough memory or descriptors.
        PeerLost, CommTimeout: a process has ended, or does not answer.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        processes: Sequence[int],
        ends: Sequence[int],
        content: bytes,
        options: Mapping[str, Any],
        file_directory: str,
        connection: Connection | None,
    ) -> None:
        self.group, self._number = group, number
        self._is_remote = [host != group.hosts[0] for host in group.hosts]
        self.processes = processes
        self.is_closed = False
        with ExitStack() as opened, ExitStack() as duplicates:

            def own(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            program = own(shared_content(content, "program"))
            needed = needed_memory(options, file_directory, group.num_processes)
            made = make_memory(needed, [group.hosts[process] == 0 for process in processes], own)
            self._ends = [-1]
            for end in ends[1:]:  # the group may end before this executor is closed
                self._ends.append(duplicate_watched(end))
                if end >= 0:
                    duplicates.callback(os.close, self._ends[-1])
            spread = {**options, "processes": list(processes)}
            is_connected = any(self._is_remote)
            self.native = Executor(
                **spread,
                **executor_files(made, len(processes)),
                **(
                    {"hosts": group.hosts, "connection": connection, "number": number} if is_connected else {}
                ),
                process=0,
                peer_files=self._ends,
            )
            duplicates.pop_all()
            try:
                files = {0: list[int | str](made)}
                for head in self._heads():  # every other host allocates the memory of its devices
                    is_own = [group.hosts[process] == group.hosts[head] for process in processes]
                    (files[group.hosts[head]],) = group.ask(number, "make", needed, is_own, only=[head])
                asked = {**spread, "content_bytes": len(content)}
                group.ask(
                    number, "open", asked, files=lambda process: [program, *files[group.hosts[process]]]
                )
            except BaseException:
                self.close()
                raise

    def _heads(self) -> list[int]:
        """The first process of every host except the leader's."""
        hosts = self.group.hosts
        return [process for process, host in enumerate(hosts) if host != 0 and hosts.index(host) == process]

    def reaches(self, device: int) -> bool:
        """Whether a device's memory is mapped here."""
        return not self._is_remote[self.processes[device]]

    def ask(self, what: str, *arguments: object, files: Sequence[int] = ()) -> list[Any]:
        """Send a request about this executor, and descriptors, to the workers."""
        return self.group.ask(
            self._number, what, *arguments, files=lambda process: files, then=self.native.call_peers
        )

    def clock_offsets(self) -> list[ClockOffset]:
        """For each worker, by how much the clock of its host is ahead of the clock of this host, and
        the error. Processes of this host use the same clock.
        """
        hosts = self.group.hosts
        measured = {hosts[head]: self.group.clock_offset(head) for head in self._heads()}
        return [measured.get(host, ClockOffset(0, 0)) for host in hosts[1:]]

    def device_hosts(self) -> list[int]:
        """Per device, the number of its host."""
        return [self.group.hosts[process] for process in self.processes]

    def close(self) -> None:
        """Stop the threads that execute tasks, in all processes."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if not self.group.is_over:
                self.ask("close")
        except (CommError, InternalError):
            pass  # workers have nothing to close: the group has ended, or they could not open the executor
        finally:
            self.native.close()
            for end in self._ends[1:]:
                if end >= 0:
                    os.close(end)


class GroupExecutor:
    """The executor that `Group.open_executor` returns. One thread at a time may use it.

    Args:
        spread_executor: the executor's processes.
    """

    def __init__(self, spread_executor: SpreadExecutor) -> None:
        self._spread_executor, self._native = spread_executor, spread_executor.native

    # ---- memory -------------------------------------------------------------------------------------------

    def buffer(self, device: int, offset: int, bytes: int) -> Any:
        """A writable uint8 array over a device's memory. The array keeps the memory alive."""
        return self._native.buffer(device, offset, bytes)

    def reaches(self, device: int) -> bool:
        """Whether `buffer` works for a device. It does not for a device on another host, whose
        memory is accessed by `move`.
        """
        return self._spread_executor.reaches(device)

    def move(self, way: str, device: int, offset: int, memory: NDArray[np.uint8]) -> None:
        """Copy bytes between `memory` and a device. For a device on this host, the bytes are in its
        file, as in the native executor. For a device on another host, they are in its memory or its
        file.
        """
        try:
            self._native.move(way, device, offset, memory)
        except CommError as error:  # a late answer must not be written to that memory
            raise self._spread_executor.group.lost(error) from None

    def allocated_bytes(self) -> list[int]:
        """Allocated bytes per device: arena, scratch, signals and task engine together."""
        return _sums([self._native.allocated_bytes(), *self._spread_executor.ask("allocated_bytes")])

    # ---- running ------------------------------------------------------------------------------------------

    def load(self, number: int, content: bytes) -> None:
        """Give the workers another program.

        Args:
            number: its number for `run`: the next one, or that of a program that it replaces. The
                program with which the executor was opened has number 0.
            content: the program, as the workers read it.

        Raises:
            PlanError: a worker rejects the program.
            PeerLost, CommTimeout: a process has ended, or does not answer.
        """
        descriptor = shared_content(content, "program")
        try:
            self._spread_executor.ask("load", number, len(content), files=[descriptor])
        finally:
            os.close(descriptor)

    def run(
        self,
        program: Program,
        symbols: Sequence[int] = (),
        name: str = "",
        meanwhile: Callable[[], object] | None = None,
        number: int = 0,
    ) -> None:
        """Run a list of calls on all devices, in all processes, and wait for its end.

        Args:
            program: the native form of a program that the workers have.
            symbols: a value for each symbol of the program.
            name: name of the list.
            meanwhile: called once, on this thread, while the devices run; its exception is raised
                at the end.
            number: the program's number in the workers (see `load`).

        Raises:
            TaskFailed: a task of any process failed.
            PeerLost, CommTimeout: a process has ended or is late. The message says which process
                and what it was doing. The group has then ended.
        """
        self._spread_executor.group.require_open()
        try:
            self._native.run(program, symbols, name, meanwhile, number)
        except CommError as error:
            raise self._spread_executor.group.lost(error) from None

    def inject(self, kind: str, device: int, label: str, index: int) -> None:
        """For tests: in the next run, the index-th task with this label on this device will
        'throw', 'stall' or 'delay'.
        """
        self._native.inject(kind, device, label, index)
        self._spread_executor.ask("inject", kind, device, label, index)

    # ---- looking inside -----------------------------------------------------------------------------------

    def trace(self, enable: bool) -> None:
        """Switch the task timeline on or off."""
        self._native.trace(enable)
        self._spread_executor.ask("trace", enable)

    def timeline(self) -> list[tuple[Any, ...]]:
        """Tasks of the last traced run, ordered by start; all times are by this process's clock."""
        return self.timeline_with_clock()[0]

    def timeline_with_clock(self) -> tuple[list[tuple[Any, ...]], int]:
        """The timeline, and the largest error in ns of a time of one host compared with a time of
        another: 0 on a single host.
        """
        rows, errors = self._native.timeline(), {0: 0}
        offsets = self._spread_executor.clock_offsets()
        hosts = self._spread_executor.group.hosts[1:]
        for part, host, (ahead_ns, error_ns) in zip(
            self._spread_executor.ask("timeline"), hosts, offsets, strict=True
        ):
            errors[host] = error_ns
            # 0 means unknown
            rows += [(*row[:4], *(time and time - ahead_ns for time in row[4:8]), *row[8:]) for row in part]
        return sorted(rows, key=lambda row: row[6]), sum(sorted(errors.values())[-2:])

    def device_hosts(self) -> list[int]:
        """Per device, the number of its host; this process's host is 0."""
        return self._spread_executor.device_hosts()

    def transfers(self) -> dict[str, list[int]]:
        """Elements read from or written to other devices' memory: label -> one count per device."""
        elements: dict[str, list[int]] = {}
        for part in (self._native.transfers(), *self._spread_executor.ask("transfers")):
            for label, counts in part.items():
                elements[label] = _sums([elements[label], counts]) if label in elements else list(counts)
        return elements

    def reset_transfers(self) -> None:
        """Set the counts of transfers to zero."""
        self._native.reset_transfers()
        self._spread_executor.ask("reset_transfers")

    def file_traffic(self) -> dict[str, int]:
        """The traffic between memory and files: bytes_read, bytes_written, and busy_ns."""
        return _added([self._native.file_traffic(), *self._spread_executor.ask("file_traffic")])

    def stats(self) -> dict[str, int]:
        """Counters: the sums of tasks and timeline_dropped over all processes, the number of runs,
        and the largest window_high_water.
        """
        parts = [self._native.stats(), *self._spread_executor.ask("stats")]
        most = {name: max(part[name] for part in parts) for name in ("runs", "window_high_water")}
        return _added(parts) | most

    # ---- end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads that execute tasks. Arrays from `buffer` stay valid."""
        self._spread_executor.close()


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows)]


def _added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}
