"""A strict reader of HTML pages, which load nothing: shared by the tests of pictures and reports."""

import re
from html.parser import HTMLParser

TAGS = {  # and their attributes
    "html": {"lang"}, "head": set(), "meta": {"charset", "name", "content"}, "title": set(), "style": set(),
    "body": set(), "main": set(), "h1": set(), "h2": set(), "section": set(), "p": {"class", "id"}, "br": set(),
    "div": {"class"}, "span": {"class"}, "table": {"class"}, "tr": set(), "th": set(), "td": {"class"}, "a": {"href"},
    "details": set(), "summary": set(), "svg": {"xmlns", "viewbox", "width", "height", "style", "role"}, "g": set(),
    "rect": {"class", "x", "y", "rx", "width", "height"}, "text": {"class", "x", "y", "text-anchor"},
    "path": {"class", "d", "fill-opacity"}, "i": {"class"},
    "line": {"class", "x1", "x2", "y1", "y2"},
}  # fmt: skip


class Page(HTMLParser):
    """Known tags with known attributes, each closed in turn, and links within the page; collects texts and cells."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.words, self.rows, self.tags = [], [], [], [], [], []
        self.feed(content)
        self.close()
        assert not self.open
        assert len(set(self.ids)) == len(self.ids) and set(self.links) <= {f"#{i}" for i in self.ids}

    @property
    def text(self):
        """All texts."""
        return " ".join(self.words)

    @property
    def cells(self):
        """The texts of all cells of tables."""
        return [cell for row in self.rows for cell in row]

    def handle_starttag(self, tag, attrs):
        assert {name for name, _ in attrs} <= TAGS[tag], (tag, attrs)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url|@import|expression", data)
            return
        self.words.append(data)
        if "td" in self.open:
            self.rows[-1][-1] += data
