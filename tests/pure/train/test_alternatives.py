"""What `tilewise tune` may change: only settings without effect on results, each once, and as lines of a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.train import TrainConfig, alternatives, load_config
from tilewise.train.alternatives import (
    as_toml,
    describe_settings,
    larger_and_smaller_tiles,
    memory_ladder,
    other_meshes,
    with_more_microbatches,
)


def make(**sections):
    """A configuration of these sections."""
    return TrainConfig.model_validate(sections)


def meshes(config):
    """Mesh and workers of all alternatives."""
    return [(c.distribution.mesh, c.distribution.workers_per_device) for c in other_meshes(config)]


def test_meshes_divide_the_machine_s_cores(monkeypatch):
    """One device, and every axis in every width that is a power of two; workers are left to the plan."""
    monkeypatch.setattr(alternatives, "num_cores", lambda: 5)
    of_one = [{}, *({axis: width} for width in (2, 4) for axis in ("dp", "fsdp", "tp", "pp"))]
    assert meshes(make()) == [(mesh, None) for mesh in of_one]
    own = {"dp": 2, "tp": 2}
    assert meshes(make(distribution={"strategy": "hybrid", "mesh": own})) == [(own, None)] + [
        (mesh, None) for mesh in of_one
    ]


def test_meshes_keep_the_workers_of_the_file(monkeypatch):
    """A file with six of a machine's cores gets no more."""
    monkeypatch.setattr(alternatives, "num_cores", lambda: 64)
    config = make(distribution={"strategy": "ddp", "mesh": {"dp": 2}, "workers_per_device": 3})
    found_meshes = meshes(config)
    assert found_meshes[:2] == [({"dp": 2}, 3), ({}, 6)]
    assert all((workers or 0) * max(mesh.values(), default=1) <= 6 for mesh, workers in found_meshes)
    assert len(found_meshes) == len({str(f) for f in found_meshes}) == 9


def test_sharding_settings_are_tried_only_where_state_is_sharded():
    """Other axes do not use them."""
    own = {"strategy": "fsdp", "mesh": {"fsdp": 4}, "prefetch": 3, "workers_per_device": 1}
    prefetches = {
        str(c.distribution.mesh): c.distribution.prefetch for c in other_meshes(make(distribution=own))
    }
    assert (
        prefetches["{'fsdp': 4}"] == prefetches["{'fsdp': 2}"] == 3
        and prefetches["{'tp': 2}"] == prefetches["{}"] == 1
    )


def test_a_pipeline_s_settings_are_tried_with_its_own_mesh_only(monkeypatch):
    """Other numbers of stages have the default schedule and microbatches that fit it; sharding keeps its
    settings.
    """
    monkeypatch.setattr(alternatives, "num_cores", lambda: 4)
    own = {"strategy": "hybrid", "mesh": {"pp": 2, "fsdp": 2}, "schedule": "interleaved"}
    others = [*other_meshes(make(distribution={**own, "reshard_after_forward": False}))]
    assert {"pp": 4} in [c.distribution.mesh for c in others]
    for config in others:
        of = config.distribution
        assert (of.schedule == "interleaved") == (of.mesh == own["mesh"])
        assert of.reshard_after_forward == ("fsdp" not in of.mesh)


def test_memory_savings_are_ordered_by_cost():
    """Saving nothing comes first, recomputing everything last; the file's own are among them."""
    config = make(train={"batch_splits": 4, "accumulation": 3, "recompute": ["layers.0"]})
    rungs = [(c.train.recompute, c.train.accumulation) for c in memory_ladder(config)]
    assert rungs[:4] == [("none", 1), ("selective", 1), ("none", 2), ("none", 3)]
    assert rungs.index(("selective", 1)) < rungs.index(("none", 4)) < rungs.index(("full", 1))
    assert rungs[-1] == (("layers.0",), 4) and len(rungs) == len({*rungs}) == 16


def test_tiles_are_whole_sequences_of_a_batch_split():
    """One sequence, two, four; never more than a batch split has."""
    config = make(train={"batch": 24, "batch_splits": 4}, data={"context": 64})
    assert [c.train.rows_per_tile for c in larger_and_smaller_tiles(config)] == [64, 128, 256]
    long = make(train={"batch": 64, "batch_splits": 4}, data={"context": 3000})
    assert [c.train.rows_per_tile for c in larger_and_smaller_tiles(long)] == [3000]


@given(
    st.sampled_from([{}, {"dp": 2}, {"fsdp": 3}, {"tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}]),
    st.none() | st.integers(1, 255),
    st.integers(1, 64),
    st.sampled_from(["none", "full"]) | st.lists(st.sampled_from(["layers.*", "a[0-3]/b", "é"]), min_size=1),
    st.integers(1, 1 << 20),
)
def test_printed_lines_are_the_settings(tmp_path_factory, mesh, workers, accumulation, recompute, rows):
    """A file with them has exactly the found settings, and the same result."""
    strategy = {(): "single", ("dp",): "ddp", ("fsdp",): "fsdp", ("tp",): "tensor_parallel"}
    own = {"strategy": strategy.get(tuple(mesh), "hybrid"), "mesh": mesh, "workers_per_device": workers}
    train = {"accumulation": accumulation, "recompute": recompute, "rows_per_tile": rows}
    config = make(distribution=own, train=train)
    path = tmp_path_factory.mktemp("lines") / "train.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    again = load_config(path).model_copy(update={"output": config.output})  # relative to the file
    assert again == config and describe_settings(again) == describe_settings(config)


@pytest.mark.parametrize("find", [other_meshes, memory_ladder, larger_and_smaller_tiles])
def test_alternatives_can_resume_each_other(find):
    """All continue from each other's checkpoints."""
    config = make(train={"batch": 16, "batch_splits": 8}, distribution={"strategy": "ddp", "mesh": {"dp": 2}})
    for other in [*find(config), with_more_microbatches(config)]:
        assert other.what_must_match() == config.what_must_match()
        assert TrainConfig.model_validate(other.model_dump()) == other  # still valid in a file
