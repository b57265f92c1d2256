"""A worker of a process group: it answers requests of the leader, and runs some devices of the
plans that the leader opens.

The main thread reads the socket. Every opened executor has its own thread, which is inside native
code except while it answers. The worker exits when its socket closes or the leader's process ends,
whatever it is doing.

Everything that the leader sends is checked where it is used. `comm.memory` checks memory. A program
is checked by its digest, by the types of its records, and by `Program.finish`, which rejects what
kernels or signals cannot handle.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from tilewise.comm.channel import Channel, Message
from tilewise.comm.facts import own_command, own_facts, own_host
from tilewise.comm.group_memory import executor_files, make_memory
from tilewise.comm.links import compute
from tilewise.comm.memory import read_content, require_memory
from tilewise.comm.mpi_channel import MpiChannel
from tilewise.comm.peer import row_of_error, watched
from tilewise.comm.world import World
from tilewise.core import configure_logging
from tilewise.core.errors import LOST, CommError, CommTimeout, InternalError, TilewiseError
from tilewise.runtime import Executor, Program, group_bytes
from tilewise.session.assemble import read_program

__all__ = ["main", "serve_world"]

_BEAT_S = 1.0
"""How often the leader hears that this process is alive while it waits for an answer."""


class Worker:
    """A worker process.

    Args:
        channel: the channel to the leader.
        world: the processes that a launcher started; None if the leader started this process.
    """

    def __init__(self, channel: Channel | MpiChannel, world: World | None = None) -> None:
        self._channel, self._world = channel, world
        self._sending, self._leaving = threading.Lock(), threading.Lock()
        self._unanswered: set[int] = set()
        self._boxes: dict[int, queue.SimpleQueue[tuple[Message, list[int]]]] = {}
        self._process = -1 if world is None else world.rank
        self._ends, self._hosts = list[int](), list[int]()
        self._made: dict[int, list[int]] = {}

    def run(self) -> None:
        """Serve until the leader says that all work is done.

        Raises:
            PeerLost: the leader has ended.
        """
        self._send(_own_hello())
        begin, self._ends = self._channel.receive()
        if begin.get("what") == "end":  # the leader has refused one of its workers, or itself
            return
        self._process, self._hosts = begin["process"], begin["hosts"]
        if self._world is not None:
            own = self._hosts[self._process]
            for pid, host in zip(begin["pids"], self._hosts, strict=True):
                self._ends.append(watched(pid) if host == own else -1)
        self._channel.watch(self._ends[0])
        while True:
            try:
                message, files = self._channel.receive(_BEAT_S if self._unanswered else None)
            except CommTimeout:
                self._send({"beat": True})
                continue
            if message["what"] == "end":
                return
            self._unanswered.add(message["id"])
            if message["what"] == "close":
                self._drop(message["executor"])
            if message["what"] == "compute":
                self._answer(message, partial(compute, *message["arguments"]))
            elif message["what"] == "clock":
                self._answer(message, time.monotonic_ns)
            elif message["what"] == "make":
                self._answer(message, partial(self._make, message))
            elif message["what"] == "open":
                box = self._boxes[message["executor"]] = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(message, files, box), daemon=True).start()
            elif message["executor"] in self._boxes:
                self._boxes[message["executor"]].put((message, files))
            else:
                self._answer(message, partial(_refuse, message["executor"]))

    def _send(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)

    def _answer(self, message: Message, made: Callable[[], Any]) -> bool:
        """Answer a request. Returns whether there was no error."""
        try:
            answer: Message = {"answer": made()}
        except Exception as error:
            answer = {"error": row_of_error(error)}
        self._send({"id": message["id"], **answer})
        self._unanswered.discard(message["id"])
        return "answer" in answer

    def _serve(
        self, message: Message, files: Sequence[int], box: queue.SimpleQueue[tuple[Message, list[int]]]
    ) -> None:
        """Serve one executor, until it is closed."""
        try:
            opened: list[tuple[Executor, Program]] = []
            if not self._answer(message, partial(self._open, message, files, opened)):
                return
            ((executor, program),) = opened
            programs = [program]
            questions = _questions_for(executor)
            while True:
                executor.serve(programs)
                message, files = box.get()
                if message["what"] == "load":
                    self._answer(message, partial(_load, message, files, programs))
                    continue
                self._answer(message, partial(questions[message["what"]], *message["arguments"]))
                if message["what"] == "close":
                    del self._boxes[message["executor"]]
                    return
        except CommError as error:
            self.leave(error)
        except BaseException as error:
            self.say(error)
            os._exit(1)  # the leader notices that

    def leave(self, error: CommError) -> NoReturn:
        """Exit because the leader, or the connection, is lost. A process of a launcher prints the
        reason itself.
        """
        self._leaving.acquire()  # several threads hear of it; the first says so
        if self._world is None:
            os._exit(0)
        self._world.give_up(str(error))
        self.say(error)
        os._exit(LOST)

    def say(self, error: BaseException) -> None:
        """Print an error as one line; for a defect of Tilewise, print its traceback too."""
        if not isinstance(error, TilewiseError):
            traceback.print_exception(error)
        whose = "a worker" if self._process < 0 else f"process {self._process}"
        print(f"tilewise: {whose}: {error}", file=sys.stderr, flush=True)

    def _open(self, message: Message, files: Sequence[int], opened: list[tuple[Executor, Program]]) -> None:
        (options,) = message["arguments"]
        try:
            content, *made = files
            program = read_program(read_content(content, options.pop("content_bytes")))
            shared = executor_files(made, options["num_devices"])
            require_memory(shared["group_file"], group_bytes(len(self._ends)))
            for arena, size in zip(shared["arena_files"], options["arena_bytes"], strict=True):
                if arena >= 0:
                    require_memory(arena, size)
            ends = [-1 if number == self._process else end for number, end in enumerate(self._ends)]
            connected: dict[str, Any] = {}
            if self._world is not None and len(set(self._hosts)) > 1:
                connection = self._world.native.connection
                connected = {"hosts": self._hosts, "connection": connection, "number": message["executor"]}
            executor = Executor(
                **options,
                **shared,
                **connected,
                process=self._process,
                peer_files=ends,
            )
            opened.append((executor, program))
        except BaseException:
            del self._boxes[message["executor"]]  # before it is said: the next question is refused
            raise
        finally:
            for file in files:
                if file >= 0:
                    os.close(file)

    def _make(self, message: Message) -> list[str]:
        """Allocate the memory of this host's devices, and return its paths. This process keeps the
        memory until the executor is closed.
        """
        needed, is_own = message["arguments"]
        descriptors = self._made.setdefault(message["executor"], [])

        def own(descriptor: int) -> int:
            descriptors.append(descriptor)
            return descriptor

        made = make_memory(needed, is_own, own)
        return [f"/proc/{os.getpid()}/fd/{file}" if file >= 0 else "" for file in made]

    def _drop(self, executor: object) -> None:
        """Close the memory of an executor."""
        for file in self._made.pop(executor, ()):  # type: ignore[call-overload]
            os.close(file)


def _load(message: Message, files: Sequence[int], programs: list[Program]) -> None:
    """Read a program that the leader sent, and give it its number: it replaces another, or is a new one."""
    try:
        (number, num_bytes), (content,) = message["arguments"], files
        programs[number : number + 1] = [read_program(read_content(content, num_bytes))]
    finally:
        for file in files:
            os.close(file)


def _own_hello() -> Message:
    """The facts that the leader compares, or why this process cannot determine them."""
    try:
        return {**own_facts(), **own_command(), "pid": os.getpid(), "host": own_host()}
    except Exception as error:
        return {"error": row_of_error(error)}


def _refuse(executor: object) -> NoReturn:
    raise InternalError(
        f"[distributed.worker] an executor must be open to be asked; got {executor!r}; report it"
    )


def _questions_for(executor: Executor) -> dict[str, Callable[..., Any]]:
    """The requests that a leader may send, and their handlers."""
    return {
        "allocated_bytes": executor.allocated_bytes,
        "close": executor.close,
        "file_traffic": executor.file_traffic,
        "inject": executor.inject,
        "reset_transfers": executor.reset_transfers,
        "stats": executor.stats,
        "timeline": executor.timeline,
        "trace": executor.trace,
        "transfers": executor.transfers,
    }


def main(descriptor: int) -> None:
    """The main function of a worker.

    Args:
        descriptor: descriptor of the worker's socket.
    """
    _run(Worker(Channel.of(descriptor, "the leader")))
    os._exit(1)  # threads may be in the middle of a run


def serve_world(world: World) -> NoReturn:
    """Serve as a process that a launcher started, until the end.

    Args:
        world: the processes that the launcher started.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the leader, whose end ends this process
        signal.signal(number, signal.SIG_IGN)
    is_done = _run(Worker(MpiChannel(world.native, 0, "the leader"), world))
    if not is_done:
        os._exit(1)
    world.leave()
    sys.stderr.flush()
    # Not os._exit: MPICH takes leave of its mpiexec in a function that it has registered for the end of the process,
    # and an mpiexec that has not heard of it ends the leader, whose exit code and last output are lost. Nor SystemExit,
    # which the user's program could catch.
    ctypes.CDLL(None).exit(0)
    raise AssertionError("exit does not return")


def _run(worker: Worker) -> bool:
    """Serve the leader. Returns whether the leader said that all work is done."""
    configure_logging()
    try:
        worker.run()
    except CommError as error:
        worker.leave(error)
    except BaseException as error:
        worker.say(error)
        return False
    return True
