"""What all HTML pages of this package have in common: the frame, the style, escaping, and the
format of times and sizes. Each page is one file.

The style follows the reader's light or dark setting. Pages have no scripts and load nothing. All
text that came from a user is escaped by `text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["STYLE", "duration", "html_page", "html_table", "kernel_classes", "plural", "text"]

NUM_COLOURS = 8

STYLE = """
:root { color-scheme: light dark; --back: #fcfcfb; --card: #ffffff; --ink: #1d2126; --soft: #646b75;
  --line: #e2e4e8; --rail: #f0f1f3; --alarm: #d1242f; --idle: #c9cdd3;
  --c0: #4477aa; --c1: #e08a2e; --c2: #4f9a57; --c3: #a5679c; --c4: #3fa7a3; --c5: #c9a227; --c6: #8f6a54;
  --c7: #d9738a; --cx: #8b929c; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --card: #1b1f25; --ink: #e6e8eb; --soft: #9aa2ad; --line: #30363e; --rail: #22272e;
    --alarm: #ff7b72; --idle: #4a515b;
    --c0: #6ea3d8; --c1: #f0a75b; --c2: #74c17c; --c3: #c893bf; --c4: #64c9c4; --c5: #e3c35a; --c6: #b8937c;
    --c7: #f09bb0; --cx: #7d858f; } }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); } .c7 { fill: var(--c7); background: var(--c7); }
.cx { fill: var(--cx); background: var(--cx); } .alarm { fill: var(--alarm); background: var(--alarm); }
.idle { fill: var(--idle); background: var(--idle); } .rail { fill: var(--rail); }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.soft { fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
"""

PAGE_STYLE = """
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 4px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
p { margin: 4px 0 10px; max-width: 80ch; } .soft { color: var(--soft); } .error { color: var(--alarm); }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 12px; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 0; }
.legend { color: var(--soft); font-size: 13px; } .legend span.entry { margin-right: 16px; white-space: nowrap; }
.scroll { overflow-x: auto; } ul { margin: 6px 0; padding-left: 20px; }
"""


def text(value: object) -> str:
    """A value as text of HTML or XML, also inside an attribute."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def duration(ns: float) -> str:
    """A time with three digits and a suitable unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}" if abs(ns) < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns:.0f} ns"


def plural(count: int, noun: str) -> str:
    """A count and its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def kernel_classes(kernels: Iterable[str]) -> dict[str, str]:
    """A colour class for each kernel. `kernels` is ordered by importance; the least important
    kernels share one colour.
    """
    return {kernel: f"c{i}" if i < NUM_COLOURS else "cx" for i, kernel in enumerate(dict.fromkeys(kernels))}


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; every cell is escaped."""
    lines = ["<table><tr>", *(f"<th>{text(cell)}</th>" for cell in head), "</tr>"]
    for row in rows:
        lines += ["<tr>", *(f"<td>{text(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])


def html_page(title: str, sections: Iterable[str]) -> str:
    """A whole page; the sections are HTML."""
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>\n<style>{STYLE}{PAGE_STYLE}</style></head>\n"
        f"<body><main><h1>{text(title)}</h1>\n{body}\n</main></body></html>\n"
    )
