"""Pictures of dependency graphs: every task and edge is there, levels follow the edges, faults stand out."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from tilewise.observe.dependency_graph import DependencyGraph, GraphParam, GraphTask
from tilewise.observe.graph_check import check_graph
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


def svg_of(tmp_path, graph, check=None):
    write_graph_svg(tmp_path / "graph.svg", graph, check)
    return ElementTree.parse(tmp_path / "graph.svg").getroot()


def tops(svg):
    """Where each task stands, from above."""
    found = {}
    for group in svg.iter(f"{SVG}g"):
        id = int(re.match(r"task (\d+)", group.find(f"{SVG}title").text)[1])
        found[id] = float(group.find(f"{SVG}rect").get("y"))
    return found


def test_every_task_stands_below_what_it_waits_for(tmp_path):
    """Levels ascend along edges, and from a task to those that it submitted."""
    tasks = (*chain(5), GraphTask(id=9, kernel="child", domain=2))
    svg = svg_of(tmp_path, DependencyGraph(tasks))
    top = tops(svg)
    assert top[1] < top[2] < top[3] < top[4] < top[5] and top[9] > top[2]
    assert [p.get("class") for p in svg.iter(f"{SVG}path")] == ["edge"] * 4 + ["child"]


def test_faults_stand_out(tmp_path):
    """A missing edge and a false one are drawn as such, and listed on the page."""
    tasks = list(chain(3))
    tasks[1] = replace(tasks[1], producers=())
    tasks.append(GraphTask(id=4, kernel="free", producers=(3,)))
    graph = DependencyGraph(tuple(tasks))
    check = check_graph(graph)
    classes = [p.get("class") for p in svg_of(tmp_path, graph, check).iter(f"{SVG}path")]
    assert sorted(classes) == ["edge", "false", "lost"]
    write_graph_html(tmp_path / "graph.html", graph, check)
    html = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert "task 2 (&lt;k&gt;) must come after task 1" in html and "no rule asks for it" in html
    assert "<k>" not in html and "<title>Dependency graph</title>" in html


def test_a_sound_graph_says_so(tmp_path):
    """A page with a clean check says that all is ordered."""
    graph = DependencyGraph(chain(3))
    write_graph_html(tmp_path / "graph.html", graph, check_graph(graph))
    assert "Every pair of tasks that must be ordered is." in (tmp_path / "graph.html").read_text(
        encoding="utf-8"
    )


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
