"""The parent's side of the child processes that compile grammars on trial (`serve.grammar_child`).

A child is reused while it answers. A child that misses its deadline or dies is killed, and its grammar is rejected.
"""

from __future__ import annotations

from pathlib import Path

from tilewise.processes.children import DisposableProcess, DisposableProcesses, unpack
from tilewise.serve import grammar_child

__all__ = ["GrammarTrials"]

_DEADLINE_S = 10.0
_MAX_BYTES = 1 << 16


class GrammarTrials(DisposableProcesses):
    """Compiles grammars in child processes.

    Args:
        tokenizer: content of tokenizer.json.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: str, end_ids: list[int]) -> None:
        super().__init__()
        self._tokenizer = {"tokenizer": tokenizer, "end_ids": end_ids}

    def problem(self, source: str) -> str:
        """The error of a grammar; empty if it is valid.

        Args:
            source: the grammar in llguidance's format.
        """
        with self._borrowed() as process:
            answer = process.ask({"source": source}, _DEADLINE_S, _MAX_BYTES)
            problem = None if answer is None else _parsed(answer)
            if problem is not None:
                return problem
            if process.is_late:
                return f"one that takes more than {_DEADLINE_S:g} s to compile"
            process.end()
            return "one that is nested too deeply, or takes too much memory"

    def _new_process(self) -> DisposableProcess:
        import llguidance

        directory = Path(str(llguidance.__file__)).parents[1]
        process = DisposableProcess("-c", _START, str(directory), grammar_child.__file__)
        process.send(self._tokenizer)
        return process


def _parsed(answer: bytes) -> str | None:
    try:
        problem = unpack(answer)["problem"]
    except (ValueError, TypeError, KeyError):
        return None
    return problem if isinstance(problem, str) else None


_START = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
"""Imports llguidance from the directory of this process's copy, after the standard library."""
