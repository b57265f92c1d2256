"""The dependency graph as JSON, and the offline check against naive edges and planted faults."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pure.observe.boxes import BUFFER_BYTES, byte_set, regions
from support.graph_check import BLOCK, check_graph
from tilewise.core.errors import ConfigError
from tilewise.observe.dependency_graph import (
    MODES,
    DependencyGraph,
    GraphParam,
    GraphRegion,
    GraphTask,
    read_graph,
    write_graph,
)


def task(id, *params, **fields):
    """A task on whole buffers (mode, buffer) or regions (mode, buffer, region)."""
    made = tuple(GraphParam(mode, buffer, BUFFER_BYTES, *region) for mode, buffer, *region in params)
    return GraphTask(id=id, kernel=f"k{id}", params=made, **fields)


def graph(*tasks):
    return DependencyGraph(tuple(tasks))


def has_conflict(a, b):
    """Whether two parameters must be ordered, from their sets of bytes."""
    if a.buffer != b.buffer or "no_dep" in (a.mode, b.mode):
        return False
    if a.mode == b.mode and a.mode in ("input", "commute", "reduce"):
        return False
    return bool(byte_set(a.region) & byte_set(b.region))


def with_naive_edges(tasks):
    """A reference scheduler: an edge for every conflicting pair and every explicit one."""
    done = []
    for later in tasks:
        producers = [
            e.id
            for e in done
            if e.id in later.after
            or (e.domain == later.domain and any(has_conflict(a, b) for a in e.params for b in later.params))
        ]
        done.append(replace(later, producers=tuple(producers)))
    return DependencyGraph(tuple(done))


@st.composite
def programs(draw):
    """Tasks on three buffers with all modes, some submitted by earlier tasks, some with explicit edges."""
    tasks = []
    for id in range(1, draw(st.integers(2, 14)) + 1):
        params = tuple(
            GraphParam(draw(st.sampled_from(MODES)), draw(st.integers(1, 3)), BUFFER_BYTES, draw(regions()))
            for _ in range(draw(st.integers(0, 3)))
        )
        domain = draw(st.sampled_from([0, 0, 0, *(t.id for t in tasks if t.domain == 0)][:5]))
        peers = [t.id for t in tasks if t.domain == domain]
        after = draw(st.lists(st.sampled_from(peers), max_size=1)) if peers else []
        tasks.append(GraphTask(id=id, kernel="k", domain=domain, params=params, after=tuple(after)))
    return tasks


@given(programs())
@settings(max_examples=150)
@pytest.mark.slow
def test_edges_between_all_conflicting_pairs_pass(program):
    """The check finds neither missing nor false edges where a naive scheduler made all of them."""
    assert check_graph(with_naive_edges(program)) == check_graph(graph())


@given(programs(), st.data())
@settings(max_examples=150)
@pytest.mark.slow
def test_every_lost_edge_is_named_once(program, data):
    """Of the naive edges one that no path replaces is lost: the check names that pair and no other."""
    full = with_naive_edges(program)
    edges = [(p, t.id) for t in full.tasks for p in t.producers]
    direct = [edge for edge in edges if not is_covered(full, edges, edge)]
    assume(direct)
    lost = data.draw(st.sampled_from(direct))
    tasks = [replace(t, producers=tuple(p for p in t.producers if (p, t.id) != lost)) for t in full.tasks]
    assert check_graph(graph(*tasks)).missing == (lost,)


@given(programs())
@settings(max_examples=150)
@pytest.mark.slow
def test_without_edges_all_needed_ones_are_missing(program):
    """Where the runtime made no edge, the check names exactly the pairs that no chain of other pairs implies."""
    full = with_naive_edges(program)
    edges = [(p, t.id) for t in full.tasks for p in t.producers]
    needed = {edge for edge in edges if not is_covered(full, edges, edge)}
    assert set(check_graph(graph(*program)).missing) == needed


def is_covered(full, edges, edge):
    """Whether another path leads along an edge; a task ends after those that it submitted."""
    inside = {t.id: t.domain for t in full.tasks}
    steps = [e for e in edges if e != edge]
    reached, front = set(), [edge[0]]
    while front:
        at = front.pop()
        if at not in reached:
            reached.add(at)
            front += [b for a, b in steps if a == at] + [inside[at]] * (inside[at] != 0)
    return edge[1] in reached


@given(programs(), st.data())
@settings(max_examples=40)
def test_every_false_edge_is_named(program, data):
    """An edge between two tasks that have no conflict is reported as a warning, not as an error."""
    full = with_naive_edges(program)
    free = [
        (a.id, b.id)
        for place, b in enumerate(full.tasks)
        for a in full.tasks[:place]
        if a.id not in b.producers
        and a.domain == b.domain
        and not any(p.mode == q.mode == "reduce" for p in a.params for q in b.params)
    ]
    assume(free)
    added = data.draw(st.sampled_from(free))
    tasks = [replace(t, producers=(*t.producers, added[0])) if t.id == added[1] else t for t in full.tasks]
    result = check_graph(graph(*tasks))
    assert (result.missing, result.unneeded) == ((), (added,))


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ("output", "input", "read-after-write"),
        ("inout", "output", "write-after-write"),
        ("input", "inout", "write-after-read"),
        ("commute", "input", "read-after-commute"),
    ],
)
def test_a_missing_edge_says_which_rule_and_buffer(first, second, rule):
    """The sentence names both tasks, the rule and the buffer."""
    (error,) = check_graph(graph(task(1, (first, 7)), task(2, (second, 7)))).errors
    assert error == f"task 2 (k2) must come after task 1 (k1) ({rule} of buffer 7), and nothing orders them"


@pytest.mark.parametrize("mode", ["input", "commute", "reduce", "no_dep"])
def test_accesses_of_one_kind_need_no_order(mode):
    """Readers, commuting tasks, partials of one reduction and untracked parameters are free among themselves."""
    assert check_graph(graph(task(1, (mode, 1)), task(2, (mode, 1)))).missing == ()


def test_a_reduction_may_be_combined_in_turn():
    """An edge between two partials is no false dependency, one between two commuting tasks is."""
    reduced = graph(task(1, ("reduce", 1)), task(2, ("reduce", 1), producers=(1,)))
    commuting = graph(task(1, ("commute", 1)), task(2, ("commute", 1), producers=(1,)))
    assert check_graph(reduced).unneeded == ()
    assert check_graph(commuting).unneeded == ((1, 2),)


def test_an_input_waits_for_all_its_writers():
    """A reader of the whole buffer needs an edge from each of two writers of halves."""
    halves = [GraphRegion(0, (32,), (1,)), GraphRegion(32, (32,), (1,))]
    tasks = [task(1, ("output", 1, halves[0])), task(2, ("output", 1, halves[1]))]
    assert check_graph(graph(*tasks, task(3, ("input", 1), producers=(2,)))).missing == ((1, 3),)


def test_neighbouring_tiles_are_apart():
    """Two tiles of one matrix whose address ranges interleave share no byte."""
    left, right = GraphRegion(0, (4, 8), (16, 1)), GraphRegion(8, (4, 8), (16, 1))
    assert check_graph(graph(task(1, ("output", 1, left)), task(2, ("output", 1, right)))).missing == ()


def test_time_orders_tasks_without_an_edge():
    """A task that ended before the other was submitted needs no edge; an unknown end proves nothing."""
    later = task(2, ("input", 1), submit_ns=20)
    assert check_graph(graph(task(1, ("output", 1), end_ns=20), later)).missing == ()
    assert check_graph(graph(task(1, ("output", 1), end_ns=21), later)).missing == ((1, 2),)
    assert check_graph(graph(task(1, ("output", 1), end_ns=0), later)).missing == ((1, 2),)


def test_a_parent_ends_after_its_children():
    """What follows a child is reached through its parent; tasks of different domains have no rule between them."""
    child = task(3, ("inout", 9), domain=2, producers=(1,), after=(1,))
    tasks = [
        task(1, ("output", 1)),
        task(2, ("inout", 9)),
        child,
        task(4, ("input", 1), ("input", 9), producers=(2,)),
    ]
    assert check_graph(graph(*tasks)) == check_graph(graph())


def test_a_child_begins_after_its_parent():
    """What a parent waited for, its children need not wait for again."""
    late = task(3, ("inout", 9), domain=2, after=(1,))
    assert check_graph(graph(task(1), task(2, ("inout", 9), producers=(1,)), late)).missing == ()
    assert check_graph(graph(task(1), task(2, ("inout", 9)), late)).missing == ((1, 3),)


def test_a_cycle_is_reported():
    """An edge against the order of submission makes a cycle with the required one; each task in it is named once."""
    tasks = [task(8), task(9), task(1, ("output", 1), producers=(2,)), task(2, ("input", 1)), task(3)]
    (error,) = check_graph(graph(*tasks)).errors
    assert error.startswith("these tasks wait for each other, against their order of submission: ")
    assert sorted(error.split(": ")[1].split(", ")) == ["task 1 (k1)", "task 2 (k2)"]


def test_edges_from_outside_the_recording_are_counted():
    """A producer that was submitted before the recording began is not judged."""
    assert check_graph(graph(task(2, ("input", 1), producers=(1,)))).num_outside == 1


def test_long_chains_are_searched_in_blocks():
    """A chain longer than one block of the search: its one gap is found, and nothing else."""
    tasks = [
        task(i, ("inout", 1), producers=(i - 1,) if i not in (1, BLOCK + 9) else ())
        for i in range(1, BLOCK + 20)
    ]
    assert check_graph(graph(*tasks)).missing == ((BLOCK + 8, BLOCK + 9),)


@given(programs())
@settings(max_examples=25)
def test_a_graph_survives_its_file(tmp_path_factory, program):
    """What is written is read again, and is JSON of version 1."""
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    full = with_naive_edges(program)
    write_graph(path, full)
    assert read_graph(path) == full
    assert json.loads(path.read_text())["version"] == 1


GOOD = {
    "id": 1,
    "kernel": "k",
    "submitter": 0,
    "scope": 1,
    "depth": 1,
    "domain": 0,
    "params": [],
    "after": [],
    "producers": [],
    "submit_ns": 1,
    "end_ns": 2,
}
PARAM = {"mode": "input", "buffer": 1, "bytes": 8, "region": None}


def with_region(**region):
    """The file of one task that reads a region of 8 bytes."""
    return json.dumps({"version": 1, "tasks": [GOOD | {"params": [PARAM | {"region": region}]}]})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "version"),
        (json.dumps({"version": 2, "tasks": []}), "version"),
        (json.dumps({"version": 1}), "list of tasks"),
        (json.dumps({"version": 1, "tasks": [GOOD, GOOD]}), "unique"),
        (json.dumps({"version": 1, "tasks": [{"id": 1}]}), r"tasks\.0\.kernel"),
        ('{"version": 1, "version": 1, "tasks": []}', "twice"),
        (json.dumps({"version": 1, "tasks": [GOOD | {"end_ns": 1 << 64}]}), "less than"),
        (with_region(offset=1, size=[8], stride=[1]), "to byte 9"),
        (with_region(offset=0, size=[1 << 61, 1 << 61], stride=[1 << 61, 1]), "lies in its buffer"),
        (with_region(offset=0, size=[], stride=[]), "at least 1 item"),
        (with_region(offset=0, size=[1], stride=[0]), "greater than or equal to 1"),
        (json.dumps({"version": 1, "tasks": [GOOD | {"params": [PARAM | {"mode": "read"}]}]}), "read"),
        (json.dumps({"version": 1, "tasks": [GOOD | {"submit_ns": -1}]}), "-1"),
        (with_region(offset=0, size=[1], stride=[]), "as many sizes as strides"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, what):
    """What does not follow the format raises, and says what is wrong."""
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_graph(path)


def test_regions_of_too_many_runs_are_refused():
    """Boxes of different strides are compared run by run: memory for their runs has a limit, which is said."""
    rows, columns = GraphRegion(0, (1 << 30, 4), (8, 1)), GraphRegion(0, (1 << 29, 4), (16, 1))
    num_bytes = 1 << 33
    wide = [
        GraphTask(id=1, kernel="k", params=(GraphParam("output", 1, num_bytes, rows),)),
        GraphTask(id=2, kernel="k", params=(GraphParam("output", 1, num_bytes, columns),)),
    ]
    with pytest.raises(ConfigError, match="at most 4194304 runs"):
        check_graph(graph(*wide))
