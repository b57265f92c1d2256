"""The program that tries large grammars out, in a process of its own: a grammar may come from anywhere.

llguidance works through references one within another on the stack, and its end would be that of the whole process: a
schema of a thousand references that each lead to the next is enough. So what is large is compiled here first, on a
stack that is smaller than that of any thread which does it in earnest, in bounded memory; the parent ends it when its
time is over. Reads JSON objects behind their length from standard input, a tokenizer and then sources, and answers each
source with what is wrong with it. Imports the standard library and llguidance only, and is run as a file, so that it
starts quickly.
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
_STACK_BYTES = 1 << 20  # threads of programs have 2 MiB at least
_MEMORY_BYTES = 4 << 30
_MOST_REASON = 1 << 13  # characters; the parent process shortens them for people
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # some 0.1 s at most, where an expression is worked out at its first use
    step_lexer_fuel=50_000,  # a few milliseconds
    step_max_items=20_000,
    verbose_errors=False,
)


def make_tokenizer(text: str, end_ids: list[int]) -> LLTokenizer:
    """A tokenizer as llguidance wants it.

    Args:
        text: of tokenizer.json.
        end_ids: tokens that end a text.
    """
    return LLTokenizer(text, eos_token=end_ids)


def compile_grammar(tokenizer: LLTokenizer, source: str) -> tuple[LLMatcher, str]:
    """A grammar at its beginning, and the reason why it cannot be used: llguidance's text of several lines, empty for a
    grammar that can.

    Args:
        tokenizer: whose tokens it follows.
        source: as llguidance reads it.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    # the costly mask, here and not in a step
    mask = b"" if matcher.is_error() else matcher.compute_logit_bias()
    if not matcher.is_error() and any(mask):
        return matcher, ""
    why = str(matcher.get_error()).strip()[:_MOST_REASON]
    if not why or why.startswith("NoExtension"):  # llguidance's name for it
        why = "one that no text follows"
    return matcher, why


def _try_out(tokenizer: LLTokenizer, source: str) -> str:
    """What is wrong with a grammar."""
    found: list[str] = []

    def work() -> None:
        matcher, why = compile_grammar(tokenizer, source)
        if not why:
            matcher.deep_copy().compute_logit_bias()
        found.append(why)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0] if found else "more than llguidance can hold"


def _read() -> Any:
    head = sys.stdin.buffer.read(HEAD.size)
    if len(head) < HEAD.size:
        sys.exit()
    return json.loads(sys.stdin.buffer.read(HEAD.unpack(head)[0]))


def main() -> None:
    """Until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    given = _read()
    tokenizer = make_tokenizer(given["tokenizer"], given["end_ids"])
    while True:
        answer = json.dumps({"problem": _try_out(tokenizer, _read()["source"])}).encode()
        sys.stdout.buffer.write(HEAD.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
