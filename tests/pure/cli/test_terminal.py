"""Text of models and servers is escaped for terminals."""

import io
import unicodedata

import pytest

from tilewise.cli.terminal import escaped, write_to

EVIL = "\x1b]52;c;cm0gLXJmIC8=\x07 \x1b[2J\r\x9b31m\x08\x7f\x90\u202e"


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self):
        return True


def test_control_characters_are_escaped():
    """All but newlines and tabs; text of any language and emoji are unchanged."""
    reported = escaped(EVIL)
    assert reported.startswith("\\x1b]52;c;cm0gLXJmIC8=\\x07 \\x1b[2J\\x0d\\x9b31m") and reported.endswith(
        "\\u202e"
    )
    left = {chr(code) for code in range(0x400) if escaped(chr(code)) == chr(code)}
    assert {letter for letter in left if unicodedata.category(letter) == "Cc"} == {"\n", "\t"}
    for text in ("a\tb\nc", "日本語", "שלום \u200fא", "👩\u200d👧", "\\x1b", ""):
        assert escaped(text) == text


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_only_terminals_get_escaped_text(kind):
    """A file or a pipe gets the text unchanged."""
    file = kind()
    write_to(file, EVIL)
    assert (file.getvalue() == EVIL) == (kind is io.StringIO)
