"""The form of pages: line widths, the length of docs/decisions.md, and forbidden constructions."""

import re
from textwrap import dedent

from policy.source import ROOT, relative

PROSE, CODE, DECISIONS = 100, 80, 5000
UNBROKEN = {"ini", "dockerfile"}  # a line of these formats is one command, and tests read them line by line
OPENINGS = "What of|Where none|Of which|That is what"
RIDDLES = [
    (re.compile(rf"(?:^|[.!?:;]\s+|[*(|]\s*)(?:{OPENINGS})\b"), "a sentence that names no subject"),
    (
        re.compile(r"\b(?:who" + r"ever|some" + r"body|no" + r"body|any" + r"body)\b", re.IGNORECASE),
        "no actor",
    ),
    (re.compile(r"\b(?:is|are) none(?: for\b|:)"), "'none' for 'invalid'"),
]


def pages():
    """The hand-written pages of the site."""
    return [
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "CHANGELOG")),
    ]


def mistakes(text):
    """The faults of a page, with line numbers."""
    problems, language = [], None
    prose = []  # text outside code, one entry for each line, so that sentences may go over lines
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            language = line.strip()[3:] if language is None else None
            prose.append("")
        elif language is not None:
            prose.append("")
            if len(line) > CODE and language not in UNBROKEN:
                problems.append((number, f"code of {len(line)} columns"))
        else:
            prose.append(re.sub(r"`[^`]*`", "`", line))
            if len(line) > PROSE and not line.startswith("|"):
                problems.append((number, f"prose of {len(line)} columns"))
    whole = "\n".join(prose)
    for pattern, what in RIDDLES:
        problems += [
            (whole.count("\n", 0, m.end()) + 1, f"{what}: {m[0].strip()!r}") for m in pattern.finditer(whole)
        ]
    return sorted(problems)


def test_pages_have_valid_form():
    """No wide lines and no forbidden constructions."""
    problems = [
        f"{relative(page)}:{n}: {what}" for page in pages() for n, what in mistakes(page.read_text("utf-8"))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_decisions_stay_short():
    """docs/decisions.md has a maximum number of words."""
    assert len((ROOT / "docs" / "decisions.md").read_text("utf-8").split()) <= DECISIONS


def test_planted_faults_are_found():
    """The twin: each rule finds its fault at its line; tables, unit files and code are exempt."""
    bad = dedent(f"""\
        # Page
        {"word " * 21}
        It ends.
        {"What"} of a task that fails? Names that {"are"} none: `x`.
        Ask {"some"}body.
        ```python
        {"x" * 81}
        ```
        """)
    assert [number for number, _ in mistakes(bad)] == [2, 4, 4, 5, 7]
    assert (
        mistakes(f"| {'word ' * 30}|\n\n```ini\n{'x' * 99}\n```\n\n`{'Some'}body` and {'none'} at all.\n")
        == []
    )


def test_search_box_works_from_a_file():
    """The site has its search index as a script, and replaces web workers by a script of this repository."""
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.search(r"^  - search\n  - offline\b", menu, re.MULTILINE)
    (script,) = re.findall(r"polyfills: \[assets/([\w.-]+)\]", menu)
    assert "iframe-worker" in script  # the plugin adds one from the network unless a name has this
    assert (ROOT / ".ci" / script).is_file()
