"""Pictures of dependency graphs: every task and edge is there, levels follow the edges."""

import re
from xml.etree import ElementTree

from tilewise.observe.dependency_graph import DependencyGraph, GraphParam, GraphTask
from tilewise.observe.graph_picture import MAX_DRAWN, write_graph_html, write_graph_svg

SVG = "{http://www.w3.org/2000/svg}"


def chain(length, **fields):
    """Tasks that write one buffer in turn."""
    params = (GraphParam("inout", 1, 64),)
    return tuple(
        GraphTask(
            id=i, kernel="<k>", params=params, producers=(i - 1,) if i > 1 else (), scope=i % 3, **fields
        )
        for i in range(1, length + 1)
    )


def svg_of(tmp_path, graph):
    write_graph_svg(tmp_path / "graph.svg", graph)
    return ElementTree.parse(tmp_path / "graph.svg").getroot()


def tops(svg):
    """Where each task stands, from above."""
    tops_by_task = {}
    for group in svg.iter(f"{SVG}g"):
        id = int(re.match(r"task (\d+)", group.find(f"{SVG}title").text)[1])
        tops_by_task[id] = float(group.find(f"{SVG}rect").get("y"))
    return tops_by_task


def test_every_task_stands_below_what_it_waits_for(tmp_path):
    """Levels ascend along edges, and from a task to those that it submitted."""
    tasks = (*chain(5), GraphTask(id=9, kernel="child", domain=2))
    svg = svg_of(tmp_path, DependencyGraph(tasks))
    top = tops(svg)
    assert top[1] < top[2] < top[3] < top[4] < top[5] and top[9] > top[2]
    assert [p.get("class") for p in svg.iter(f"{SVG}path")] == ["edge"] * 4 + ["child"]


def test_names_are_escaped_on_the_page(tmp_path):
    """The page has the title and no raw markup from names of kernels."""
    write_graph_html(tmp_path / "graph.html", DependencyGraph(chain(3)))
    html = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert "&lt;k&gt;" in html and "<k>" not in html and "<title>Dependency graph</title>" in html


def test_large_graphs_are_counted_instead(tmp_path):
    """Beyond the limit the page says why it has no picture, and counts tasks by kernel."""
    graph = DependencyGraph(chain(MAX_DRAWN + 1))
    words = [t.text for t in svg_of(tmp_path, graph).iter(f"{SVG}text")]
    assert "at most 500 tasks, and this graph has 501" in words[0] and words[1] == "<k>: 501"
    write_graph_html(tmp_path / "graph.html", graph)
    assert "at most 500 tasks" in (tmp_path / "graph.html").read_text(encoding="utf-8")


def test_an_empty_graph_has_a_picture(tmp_path):
    """No tasks: an empty drawing, not a failure."""
    assert tops(svg_of(tmp_path, DependencyGraph(()))) == {}


def test_wide_levels_are_broken_into_lines(tmp_path):
    """A hundred independent tasks do not make one endless line."""
    tasks = tuple(GraphTask(id=i, kernel="k") for i in range(1, 101))
    svg = svg_of(tmp_path, DependencyGraph(tasks))
    assert len(set(tops(svg).values())) == 5 and float(svg.get("width")) < 4000
