"""A worker of a group: answers the leader's questions, and has devices of the plans that the leader opens.

The main thread reads the socket; every opened executor has a thread of its own, which is inside native code but for
answers. The process ends with the leader, whatever it is doing: when the socket does, or the leader's process.

What the leader sends is checked where it is used: memory by `comm.memory`, a program by its digest, its records' types
and `Program.finish`, which refuses what kernels or the network of signals could not take.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from tilewise.comm.channel import Channel, Message
from tilewise.comm.facts import own_facts
from tilewise.comm.memory import read_content, require_memory
from tilewise.comm.peer import row_of_error
from tilewise.core import configure_logging
from tilewise.core.errors import CommError, CommTimeout, InternalError
from tilewise.runtime import Executor, Program, team_bytes
from tilewise.session.assemble import read_program

__all__ = ["main"]

_BEAT_S = 1.0
"""How often the leader hears that this process is alive while it waits for an answer."""


class Worker:
    """This process.

    Args:
        channel: to the leader.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._unanswered: set[int] = set()
        self._boxes: dict[int, queue.SimpleQueue[Message]] = {}
        self._process, self._ends = -1, list[int]()

    def run(self) -> None:
        """Until the leader is gone.

        Raises:
            PeerLost: it is.
        """
        self._send({**own_facts(), "pid": os.getpid()})
        begin, self._ends = self._channel.receive()
        self._process = begin["process"]
        self._channel.watch(self._ends[0])
        while True:
            try:
                message, files = self._channel.receive(_BEAT_S if self._unanswered else None)
            except CommTimeout:
                self._send({"beat": True})
                continue
            self._unanswered.add(message["id"])
            if message["what"] == "open":
                box = self._boxes[message["executor"]] = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(message, files, box), daemon=True).start()
            elif message["executor"] in self._boxes:
                self._boxes[message["executor"]].put(message)
            else:
                self._answer(message, partial(_refuse, message["executor"]))

    def _send(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)

    def _answer(self, message: Message, made: Callable[[], Any]) -> bool:
        """Answer a question; whether there was no error."""
        try:
            answer: Message = {"answer": made()}
        except Exception as error:
            answer = {"error": row_of_error(error)}
        self._send({"id": message["id"], **answer})
        self._unanswered.discard(message["id"])
        return "answer" in answer

    def _serve(self, message: Message, files: Sequence[int], box: queue.SimpleQueue[Message]) -> None:
        """One executor, from its opening to its end."""
        try:
            opened: list[tuple[Executor, Program]] = []
            if not self._answer(message, partial(self._open, message, files, opened)):
                return
            ((executor, program),) = opened
            questions = _questions_for(executor)
            while True:
                executor.serve(program)
                message = box.get()
                self._answer(message, partial(questions[message["what"]], *message["given"]))
                if message["what"] == "close":
                    del self._boxes[message["executor"]]
                    return
        except CommError:
            os._exit(0)  # the leader is gone
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the leader notices that

    def _open(self, message: Message, files: Sequence[int], opened: list[tuple[Executor, Program]]) -> None:
        (options,) = message["given"]
        try:
            content, team, *memory = files
            arenas, spills = memory[: options["num_devices"]], memory[options["num_devices"] :]
            program = read_program(read_content(content, options.pop("content_bytes")))
            require_memory(team, team_bytes(len(self._ends)))
            for arena, size in zip(arenas, options["arena_bytes"], strict=True):
                require_memory(arena, size)
            ends = [-1 if number == self._process else end for number, end in enumerate(self._ends)]
            executor = Executor(
                **options,
                process=self._process,
                team_file=team,
                arena_files=arenas,
                spill_files=spills,
                peer_files=ends,
            )
            opened.append((executor, program))
        except BaseException:
            del self._boxes[message["executor"]]  # before it is said: the next question is refused
            raise
        finally:
            for file in files:
                os.close(file)


def _refuse(executor: object) -> NoReturn:
    raise InternalError(
        f"[distributed.worker] an executor must be open to be asked; got {executor!r}; report it"
    )


def _questions_for(executor: Executor) -> dict[str, Callable[..., Any]]:
    """What a leader may ask, and what answers it."""
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
    """A worker's process, from its start to the leader's end.

    Args:
        descriptor: of its socket.
    """
    configure_logging()
    try:
        Worker(Channel.of(descriptor, "the leader")).run()
    except CommError:
        os._exit(0)  # the leader is gone
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # threads may be in the middle of a run
