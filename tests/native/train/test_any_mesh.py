"""A checkpoint of any mesh can be resumed on any other: loaded state and later steps are equal to the bit."""

import json
from contextlib import contextmanager

import pytest

from native.train.small_run import is_same, make_config
from tilewise.checkpoint import PartedTensor, load_checkpoint, open_checkpoint
from tilewise.checkpoint.manifest import Manifest
from tilewise.core import DeviceMesh
from tilewise.train import Trainer, make_plan

MESHES = [
    {},
    *({axis: n} for axis in ("dp", "fsdp", "tp") for n in (2, 4)),
    {"dp": 2, "fsdp": 2},
    {"dp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
    {"dp": 2, "fsdp": 2, "tp": 2},
    {"dp": 2, "fsdp": 2, "tp": 4},
]
EVERY_DAY = [MESHES[0], MESHES[3], MESHES[8]]
STOP, END = 3, 5


@contextmanager
def trainer_on(texts, data, mesh, **changes):
    config = make_config(texts, "unused", mesh, steps=END, **changes)
    with Trainer(config, data, *make_plan(config)) as trainer:
        yield trainer


def run_to(trainer, first, last):
    """Do steps up to `last`; returns the state."""
    for number in range(first, last):
        trainer.step(number)
    return trainer.instance.state_dict()


@pytest.fixture(scope="module")
def never_stopped(texts, data):
    """The state after every step of a run on one device."""
    with trainer_on(texts, data, {}) as trainer:
        return [trainer.instance.state_dict()] + [run_to(trainer, n, n + 1) for n in range(END)]


def write(texts, data, root, meshes, **changes):
    """A checkpoint after three steps on each mesh."""
    paths = []
    for number, mesh in enumerate(meshes):
        with trainer_on(texts, data, mesh, **changes) as trainer:
            trainer.run(0, lambda done, result: done < STOP - 1)
            paths.append(trainer.save(root / str(number), STOP))
    return paths


def require_all_go_on(texts, data, paths, meshes, never_stopped, last):
    for mesh in meshes:
        with trainer_on(texts, data, mesh) as trainer:
            for path in paths:
                trainer.restore(load_checkpoint(path, trainer.what_must_match()))
                assert is_same(trainer.instance.state_dict(), never_stopped[STOP]), (path, mesh)
            assert is_same(run_to(trainer, STOP, last), never_stopped[last]), mesh


def test_some_meshes_resume_on_each_other(texts, data, tmp_path, never_stopped):
    """Each of four on each of four: the state equals an uninterrupted run's, also after the next step."""
    paths = write(texts, data, tmp_path, EVERY_DAY)
    require_all_go_on(texts, data, paths, EVERY_DAY, never_stopped, STOP + 1)


@pytest.mark.slow
def test_every_mesh_resumes_on_every_other(texts, data, tmp_path, never_stopped):
    """Each of twelve on each of twelve, to the end of the run."""
    paths = write(texts, data, tmp_path, MESHES)
    require_all_go_on(texts, data, paths, MESHES, never_stopped, END)


def test_swapped_parts_are_detected(texts, data, tmp_path, never_stopped):
    """The twin: two swapped parts of a matrix, with valid checksums, give another state."""
    mesh = {"fsdp": 2}
    (path,) = write(texts, data, tmp_path, [mesh])
    manifest = json.loads((path / "checkpoint.json").read_text())
    name = "optimizer.exp_avg.layers.0.mlp.up_proj.weight"
    one, other = manifest["tensors"][name]["parts"]
    assert one["shape"] == other["shape"]
    one["begin"], other["begin"] = other["begin"], one["begin"]
    signed = Manifest.model_validate(manifest).signed()
    (path / "checkpoint.json").write_text(signed.content())
    with pytest.raises(AssertionError):
        require_all_go_on(texts, data, [path], [mesh], never_stopped, STOP)


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_key_value_heads": 4,
}  # four panels of each and more


@pytest.mark.parametrize("mesh", EVERY_DAY, ids=str)
def test_each_device_writes_its_own_part(texts, data, tmp_path, mesh):
    """A file of about equal size per device, each tensor once over all of them; a sharded matrix
    has as many parts as storage shards.
    """
    (path,) = write(texts, data, tmp_path, [mesh], model=WIDE)
    opened = open_checkpoint(path)
    assert opened.mesh == mesh and len(opened.files) == DeviceMesh(mesh).num_devices
    assert sorted(p.name for p in path.glob("*.safetensors")) == [file.name for file in opened.files]
    sizes = [file.nbytes for file in opened.files]
    assert sum(sizes) == sum(tensor.nbytes for tensor in opened.tensors.values())
    largest = max(part.nbytes for file in opened.files for part in file.parts.values())
    assert max(sizes) - min(sizes) <= largest and min(sizes) > 0.8 * max(sizes)
    weight = opened.tensors["layers.0.mlp.up_proj.weight"]
    parts = weight.parts if isinstance(weight, PartedTensor) else (weight,)
    assert len(parts) == mesh.get("fsdp", 1) * mesh.get("tp", 1)


def test_a_device_without_a_panel_writes_nothing_of_it(texts, data, tmp_path):
    """Of a matrix of two panels two of four files have a part, of one with one panel one."""
    (path,) = write(texts, data, tmp_path, [{"fsdp": 4}])
    files = open_checkpoint(path).files
    assert len(files) == 4
    for name, count in (("layers.0.mlp.up_proj.weight", 2), ("layers.0.mlp.down_proj.weight", 1)):
        assert sum(name in file.parts for file in files) == count
