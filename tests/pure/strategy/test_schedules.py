"""Schedules of pipelines as data: files, and what is refused."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import LayoutError
from tilewise.strategy import SCHEDULES, PipelineStages, actions_for, read_actions, write_actions
from tilewise.strategy.layout_string import parse_layout
from tilewise.strategy.schedules import parse_actions
from tilewise.strategy.schedules.check import check_actions

CASES = [
    (name, stages, 2 if name == "interleaved" else 1, microbatches)
    for name in SCHEDULES
    for stages, microbatches in ((2, 4), (3, 6), (4, 4), (8, 16), (4, 12))
]


@pytest.mark.parametrize("name,stages,chunks,microbatches", CASES)
def test_schedules_can_run(name, stages, chunks, microbatches, tmp_path):
    """Every pass is there once, in order, and nothing waits for ever; a file has the same passes."""
    actions = actions_for(name, stages, chunks, microbatches)
    check_actions(actions, chunks, microbatches)
    write_actions(tmp_path / "passes.csv", actions)
    rows = read_actions(tmp_path / "passes.csv")
    assert parse_actions(rows) == actions
    of = PipelineStages(schedule=rows)
    assert (of.chunks, of.microbatches) == (chunks, microbatches)
    assert of.splits_backward == (name == "zero_bubble")
    assert actions_for(of.schedule, stages, of.chunks, microbatches) == actions


def test_cells_are_those_of_pytorch():
    """PyTorch reads what is written here, and the other way round."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for own in actions_for("zero_bubble", 2, 1, 4):
        for action in own:
            theirs = schedules._Action.from_str(str(action))
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.microbatch)
            assert str(theirs) == str(action)


def test_empty_cells_are_idle_time(tmp_path):
    """PyTorch writes them; blank lines and spaces mean nothing either."""
    (tmp_path / "a.csv").write_text("0F0, 0F1,,0B0,0B1\n\n,1F0,1B0,1F1,1B1\n")
    assert read_actions(tmp_path / "a.csv") == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


@pytest.mark.parametrize(
    "rows,message",
    [
        ([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]], "0B1 before 0B0"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "1F1 before 1F0"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], "0B0 waits for 0F0"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
         "0B0 waits for 1B0, which comes after 1F1; 1F1 waits for 0F1, which comes after 0B0"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "0F1", "1B1"]], "its own virtual stages; got 0F1 on stage 1"),
        ([["0F0", "0B0"], ["1F0"]], "1B0 or 1I0 0 times on stage 1"),
        ([["0F0", "0F0", "0B0"], ["1F0", "1B0"]], "0F0 2 times on stage 0"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], "0B0 or 0W0 0 times on stage 0"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], "0W0 waits for 0I0"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(rows, message):
    """The pair that is out of order, the passes that wait for each other, or the pass that is missing."""
    chunks = PipelineStages(schedule=rows).chunks
    microbatches = PipelineStages(schedule=rows).microbatches
    with pytest.raises(LayoutError, match=message):
        actions_for(rows, 2, chunks, microbatches)


def runs(actions):
    """Whether passes can be sorted so that each comes after what it needs: the oracle."""
    after = defaultdict(set)
    every = [a for own in actions for a in own]
    backward = {(a.stage, a.microbatch): a for a in every if a.kind in "BI"}
    forward = {(a.stage, a.microbatch): a for a in every if a.kind == "F"}
    for own in actions:
        for before, later in pairwise(own):
            after[later].add(before)
    for a in every:
        for needed in (
            forward.get((a.stage - 1, a.microbatch)) if a.kind == "F" else None,
            forward.get((a.stage, a.microbatch)) if a.kind in "BI" else None,
            backward.get((a.stage + 1, a.microbatch)) if a.kind in "BI" else None,
            backward.get((a.stage, a.microbatch)) if a.kind == "W" else None,
        ):
            if needed is not None:
                after[a].add(needed)
    done, left = set(), set(every)
    while ready := {a for a in left if after[a] <= done}:
        done |= ready
        left -= ready
    return not left


@given(st.sampled_from(CASES), st.integers(0, 1 << 30), st.integers(0, 6))
def test_exactly_what_cannot_run_is_refused(case, seed, swaps):
    """Neighbours exchanged at random: refused if an order of microbatches breaks or passes wait for each other."""
    name, stages, chunks, microbatches = case
    actions = [list(own) for own in actions_for(name, stages, chunks, microbatches)]
    dice = random.Random(seed)
    for _ in range(swaps):
        own = dice.choice(actions)
        at = dice.randrange(len(own) - 1)
        own[at : at + 2] = own[at : at + 2][::-1]
    is_ordered = all(
        [a.microbatch for a in own if a.stage == stage and a.kind in kinds] == [*range(microbatches)]
        for own in actions
        for stage in {a.stage for a in own}
        for kinds in ("F", "BI", "BW")
    )
    try:
        check_actions(actions, chunks, microbatches)
    except LayoutError:
        assert not (is_ordered and runs(actions))
    else:
        assert is_ordered and runs(actions)


@pytest.mark.parametrize(
    "content,message",
    [("0F0,0X0\n", "0X0"), ("", "0 rows"), ("0SEND_F1\n", "transfers follow"), ("\x00", "0x00|null|must be")],
)
def test_files_that_are_no_schedule_are_refused(content, message, tmp_path):
    """The cell is named."""
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(LayoutError, match=message):
        read_actions(tmp_path / "a.csv")
    with pytest.raises(LayoutError):
        read_actions(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    "text,numbers",
    [
        ("Et*3|(tt|)*2,tL", (3, 2, 2, 1)),
        ("Et*3|(tt|)*29L", (3, *[2] * 29, 0)),
        ("E|t|t|L", (0, 1, 1, 0)),
        ("EtL", (1,)),
        ("Et((t|)*2t|)*2L", (2, 1, 1, 1, 1, 1, 0)),
    ],
)
def test_megatrons_layouts(text, numbers):
    """Letters, repetitions and groups."""
    assert parse_layout(text) == numbers


@pytest.mark.parametrize(
    "text,message",
    [
        ("t|tL", "embedding E begins the first stage"),
        ("Et|t", "head L ends the last stage"),
        ("Et|EtL", "embedding E begins"),
        ("Et*|L", r"\* without a number"),
        ("E(t|L", "a group without an end"),
        ("Et)|L", "without a beginning"),
        ("Et|m|L", "predicts further tokens"),
        ("Ex|L", "no part of a model"),
        ("E(t*99999)*99999|L", "more than"),
    ],
)
def test_wrong_layouts_are_refused(text, message):
    """What is wrong is named, before anything is planned."""
    with pytest.raises(LayoutError, match=message):
        parse_layout(text)


def test_numbers_that_fit_are_named():
    """Chunks need the interleaved schedule, and groups of microbatches."""
    with pytest.raises(LayoutError, match="use 4 or 8 microbatches"):
        actions_for("interleaved", 4, 2, 6)
    with pytest.raises(LayoutError, match='choose "interleaved"'):
        PipelineStages(chunks=2)
    with pytest.raises(LayoutError, match="a row per stage; got 1 rows for 2"):
        actions_for([["0F0", "0B0"]], 2, 1, 1)
    with pytest.raises(LayoutError, match="choose one"):
        PipelineStages(layers=(1, 1), first_stage_less_layers=1)
