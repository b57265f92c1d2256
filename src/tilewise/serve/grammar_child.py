"""The child process that compiles large grammars on trial, because grammars come from untrusted clients.

llguidance resolves nested references recursively, and a stack overflow would end the whole process;
a schema with a chain of a thousand references is enough. So large grammars are compiled here first,
in bounded memory and on a smaller stack than any thread of the parent has. The parent kills the
child at a deadline. The child reads JSON objects, each after its length, from standard input: a
tokenizer, then grammars. It answers each grammar with its error. It imports only the standard
library and llguidance, and runs as a file, so that it starts quickly.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["HEAD", "compile_grammar", "main", "make_tokenizer"]

HEAD = struct.Struct(">I")
_STACK_BYTES = 1 << 20  # threads of the parent have at least 2 MiB
_MEMORY_BYTES = 4 << 30
_MAX_ERROR = 1 << 13  # characters; the parent process shortens the text
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # about 0.1 s at most, when an expression is first used
    step_lexer_fuel=50_000,  # a few milliseconds
    step_max_items=20_000,
    verbose_errors=False,
)


def make_tokenizer(text: str, end_ids: list[int]) -> LLTokenizer:
    """A tokenizer for llguidance.

    Args:
        text: content of tokenizer.json.
        end_ids: tokens that end a text.
    """
    return LLTokenizer(text, eos_token=end_ids)


def compile_grammar(tokenizer: LLTokenizer, source: str) -> tuple[LLMatcher, str]:
    """Compile a grammar. Returns the grammar in its initial state, and llguidance's error message,
    which is empty if the grammar is valid.

    Args:
        tokenizer: tokenizer of the model.
        source: the grammar in llguidance's format.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    # compute the first mask, which is slow, here and not in a step of the engine
    mask = b"" if matcher.is_error() else matcher.compute_logit_bias()
    if not matcher.is_error() and any(mask):
        return matcher, ""
    error = str(matcher.get_error()).strip()[:_MAX_ERROR]
    if not error or error.startswith("NoExtension"):  # llguidance's error for an empty language
        error = "one that matches no text"
    return matcher, error


def _compile_on_trial(tokenizer: LLTokenizer, source: str) -> str:
    """The error of a grammar; empty if it is valid."""
    errors: list[str] = []

    def work() -> None:
        matcher, error = compile_grammar(tokenizer, source)
        if not error:
            matcher.deep_copy().compute_logit_bias()
        errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0] if errors else "one that is nested too deeply"


def _read() -> Any:
    head = sys.stdin.buffer.read(HEAD.size)
    if len(head) < HEAD.size:
        sys.exit()
    return json.loads(sys.stdin.buffer.read(HEAD.unpack(head)[0]))


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    first = _read()
    tokenizer = make_tokenizer(first["tokenizer"], first["end_ids"])
    while True:
        answer = json.dumps({"problem": _compile_on_trial(tokenizer, _read()["source"])}).encode()
        sys.stdout.buffer.write(HEAD.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
