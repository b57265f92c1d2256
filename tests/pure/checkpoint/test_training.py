"""Training checkpoints: complete or absent, whatever happens to the writer."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.checkpoint import (
    Box,
    ConfigChange,
    DamagedCheckpoint,
    FinishedModel,
    OtherConfiguration,
    PartedTensor,
    TensorPart,
    TrainingState,
    check_writable,
    has_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    open_checkpoint,
    save_checkpoint,
)
from tilewise.core import CheckpointError, ConfigError, ResourceError

CONFIG = {"layers": 6, "optimizer": {"lr": 0.1, "eps": 1e-8}}


def _state(step):
    return TrainingState(step, {"w": np.full((3, 2), step, np.float32), "optimizer.step": np.array([step])})


def test_only_the_latest_are_kept(tmp_path):
    """Older checkpoints are removed when newer ones are complete."""
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, _state(step), CONFIG, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000010"]


def test_every_difference_is_named(tmp_path):
    """Changed, new and absent settings are listed with both values; the order of keys does not matter."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    assert latest_checkpoint(tmp_path) == path
    assert load_checkpoint(path, {"optimizer": {"eps": 1e-8, "lr": 0.1}, "layers": 6}).step == 1
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, {"layers": 6, "optimizer": {"lr": 0.2, "beta1": 0.9}})
    for words in (
        "optimizer.lr = 0.2 instead of 0.1",
        "optimizer.beta1 = 0.9 instead of nothing",
        "optimizer.eps = nothing instead of 1e-08",
    ):
        assert words in str(caught.value)
    assert "layers" not in str(caught.value)


def test_allowed_differences_are_recorded(tmp_path):
    """They are appended to the state's history, which the file's digest covers."""
    path = save_checkpoint(tmp_path, _state(1), {"train": {"leaves": 4}})  # of an earlier version
    assert load_checkpoint(path, {"train": {"batch_splits": 4}}).step == 1
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    assert "changes" not in json.loads((path / "checkpoint.json").read_text())
    other = {"layers": 6, "optimizer": {"lr": 0.2, "eps": 1e-8}}
    with pytest.raises(OtherConfiguration, match=r"got optimizer\.lr = 0\.2 instead of 0\.1") as caught:
        load_checkpoint(path, other, may_change=["layers"])
    first = ConfigChange(step=1, key="optimizer.lr", old=0.1, new=0.2)
    assert caught.value.changes == (first,)
    state = load_checkpoint(path, other, may_change=["optimizer.lr"])
    assert state.changes == (first,)
    path = save_checkpoint(tmp_path, replace(_state(2), changes=state.changes), other)
    assert load_checkpoint(path, other).changes == (first,)
    again = {**other, "layers": 7}
    _, state = load_latest(tmp_path, again, print, may_change=["layers"])
    assert state.changes == (first, ConfigChange(step=2, key="layers", old=6, new=7))
    file = path / "checkpoint.json"
    file.write_text(file.read_text().replace('"new": 0.2', '"new": 0.3'))
    with pytest.raises(DamagedCheckpoint, match="its digest is wrong"):
        open_checkpoint(path)


def test_unwritable_directory_is_rejected(tmp_path):
    """A file at its path is an error before any work; a missing directory is accepted and not yet created."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper", tmp_path / ("long" * 100)):
        with pytest.raises(ConfigError, match="can be written to"):
            check_writable(place)
    check_writable(tmp_path / "new" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _set_meta(path, **changes):
    meta = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**meta, **changes}))


def _flip(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


DAMAGES = [
    (lambda path: _flip(path / "device-00000.safetensors"), "has a wrong checksum"),
    (lambda path: _set_meta(path, step=9), "its digest is wrong"),
    (lambda path: _set_meta(path, step=-1), "step"),
    (lambda path: _set_meta(path, step=10**40), "its digest is wrong"),
    (lambda path: _set_meta(path, version=2), "version"),
    (lambda path: _set_meta(path, tensors={}), "its digest is wrong"),
    (lambda path: _set_meta(path, tensors={"w": 3}), "tensors.w"),
    (lambda path: _set_meta(path, colour=1), "colour"),
    (lambda path: (path / "checkpoint.json").write_text("[" * 10**6), "not JSON"),
    (lambda path: (path / "checkpoint.json").write_bytes(b"\xff"), "not JSON"),
    (lambda path: (path / "checkpoint.json").unlink(), "no such file"),
    (lambda path: _replace(path / "checkpoint.json", os.mkdir), "a directory"),
    (lambda path: _replace(path / "device-00000.safetensors", os.mkfifo), "named pipe"),
    (lambda path: _replace(path, lambda place: place.touch()), "Not a directory"),
]


def _replace(path, make):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_any_damage_is_detected(tmp_path, damage, words):
    """A changed tensor, an edited or missing manifest: rejected; the older checkpoint is used, with a warning."""
    for step in (1, 2):
        state = _state(step)
        tensors = {**state.tensors, "v": np.full((3, 2), 7, np.float32)}
        newer = save_checkpoint(tmp_path, TrainingState(step, tensors), CONFIG)
    damage(newer)
    with pytest.raises(DamagedCheckpoint, match="must be complete and unchanged") as caught:
        load_checkpoint(newer, CONFIG)
    assert words in caught.value.reason and "\n" not in str(caught.value)
    reported = []
    path, state = load_latest(tmp_path, CONFIG, reported.append)
    assert path.name == "step-00000001" and state.step == 1 and (np.asarray(state.tensors["w"]) == 1).all()
    assert (
        len(reported) == 1
        and reported[0].startswith("checkpoint step-00000002 is damaged (")
        and words in reported[0]
    )
    assert reported[0].endswith("; resuming from step-00000001 instead")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: _flip(file), "tokenizer.json has a wrong checksum"),
        (lambda file: file.unlink(), "tokenizer.json: no such file"),
        (lambda file: _replace(file, os.mkfifo), "named pipe"),
    ],
)
def test_files_of_the_model_are_kept_and_verified(tmp_path, damage, words):
    """Their bytes are in model/ and are verified; other files make another checkpoint."""
    files = {"tokenizer.json": b'{"model": 1}', "1_Pooling/config.json": b"{}"}
    state = TrainingState(1, _state(1).tensors, FinishedModel(files, {"w": "BF16"}))
    path = save_checkpoint(tmp_path, state, CONFIG)
    assert open_checkpoint(path).read_model() == state.model
    before = (path / "model" / "tokenizer.json").stat().st_ino
    save_checkpoint(tmp_path, state, CONFIG)
    assert (path / "model" / "tokenizer.json").stat().st_ino == before
    save_checkpoint(
        tmp_path, TrainingState(1, state.tensors, FinishedModel({"tokenizer.json": b"{}"})), CONFIG
    )
    assert (path / "model" / "tokenizer.json").read_bytes() == b"{}"
    damage(path / "model" / "tokenizer.json")
    with pytest.raises(DamagedCheckpoint, match=words):
        load_checkpoint(path, CONFIG)


@pytest.mark.parametrize(
    "model",
    [
        FinishedModel({"../x": b""}),
        FinishedModel({"/x": b""}),
        FinishedModel({"a//b": b""}),
        FinishedModel({"x": "text"}),
        FinishedModel({}, {"w": "I32"}),
        FinishedModel({}, {"w": "half"}),
        b"{}",
    ],
    ids=str,
)
def test_files_outside_the_directory_are_not_saved(tmp_path, model):
    """Names stay inside model/, and weights are numbers; nothing is written otherwise."""
    with pytest.raises(CheckpointError, match=r"\[checkpoint.save_checkpoint\]"):
        save_checkpoint(tmp_path, TrainingState(1, _state(1).tensors, model), CONFIG)
    assert not list(tmp_path.iterdir())


def test_earlier_checkpoint_has_a_tokenizer_next_to_it(tmp_path):
    """It has the digest that it was saved with, and its tokenizer is verified."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    (path / "tokenizer.json").write_bytes(b"{}")
    content = json.loads((path / "checkpoint.json").read_text())
    content |= {"tokenizer": hashlib.sha256(b"{}").hexdigest()}
    assert "model" not in content  # the key is new
    signed = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    content["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(content))
    assert load_checkpoint(path, CONFIG).step == 1 and open_checkpoint(path).read_model() is None
    (path / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(DamagedCheckpoint, match=r"tokenizer\.json has a wrong checksum"):
        load_checkpoint(path, CONFIG)


def test_renamed_directory_is_rejected(tmp_path):
    """The numbers in the name, the metadata and the optimizer's state must be equal."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    path.rename(tmp_path / "step-00000099")
    with pytest.raises(CheckpointError, match="needs a complete checkpoint; got step-00000099 is damaged"):
        load_latest(tmp_path, CONFIG, print)
    with pytest.raises(CheckpointError, match="must equal the step it is saved as"):
        save_checkpoint(tmp_path, TrainingState(3, _state(2).tensors), CONFIG)


def test_damaged_later_checkpoint_removes_no_good_one(tmp_path):
    """Pruning counts complete checkpoints before the new one; a later damaged one stays until it is replaced."""
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, _state(step), CONFIG, keep_last=3)
    _flip(tmp_path / "step-00000003" / "device-00000.safetensors")
    (tmp_path / "step-00000001" / "checkpoint.json").unlink()
    assert load_latest(tmp_path, CONFIG, lambda text: None)[1].step == 2
    save_checkpoint(tmp_path, TrainingState(2, _state(2).tensors), CONFIG, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    save_checkpoint(tmp_path, _state(3), CONFIG, keep_last=2)
    assert load_latest(tmp_path, CONFIG, lambda text: pytest.fail(text))[1].step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    """Of three to keep, a damaged one is removed and an older complete one stays."""
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, _state(step), CONFIG, keep_last=4)
    (tmp_path / "step-00000002" / "checkpoint.json").unlink()
    save_checkpoint(tmp_path, _state(4), CONFIG, keep_last=3)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "3", "4"]


def test_complete_checkpoint_is_not_rewritten(tmp_path):
    """Saving the same content keeps the files; other content of that step replaces them."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    before = (path / "device-00000.safetensors").stat().st_ino
    save_checkpoint(tmp_path, _state(1), CONFIG)
    assert (path / "device-00000.safetensors").stat().st_ino == before
    save_checkpoint(tmp_path, _state(1), {**CONFIG, "layers": 7})
    assert (path / "device-00000.safetensors").stat().st_ino != before
    assert load_checkpoint(path, {**CONFIG, "layers": 7}).step == 1


def test_other_directory_names_are_ignored(tmp_path):
    """Other names, non-ASCII digits and too many digits are not checkpoints."""
    for name in ("step-1", "step-00000001x", f"step-{'9' * 40}", "step-٠٠٠٠٠٠٠١"):
        (tmp_path / name).mkdir()
    for directory in (tmp_path, tmp_path / "absent"):
        assert not has_checkpoints(directory) and latest_checkpoint(directory) is None
    save_checkpoint(tmp_path, _state(1), CONFIG, keep_last=1)
    assert len(list(tmp_path.iterdir())) == 5


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63)


@settings(max_examples=8)
@given(
    st.dictionaries(
        st.text(max_size=5), NUMBERS | st.text(max_size=5) | st.dictionaries(st.text(max_size=3), NUMBERS)
    )
)
def test_any_configuration_round_trips(tmp_path_factory, config):
    """Whatever numbers a configuration has, its checkpoint is complete and of that configuration."""
    directory = tmp_path_factory.mktemp("any")
    tensors = {"w": np.ones((0, 2), np.float32), "x": np.array([1.5], ml_dtypes.bfloat16)}
    path = save_checkpoint(directory, TrainingState(3, tensors), config)
    assert load_checkpoint(path, config).tensors["x"].read().tolist() == [1.5]
    shutil.rmtree(directory)


@settings(max_examples=60)
@given(st.data())
def test_any_changed_byte_is_detected(tmp_path_factory, data):
    """With any byte of any file changed, the checkpoint is rejected or gives exactly what was saved."""
    path = tmp_path_factory.getbasetemp() / "changed" / "step-00000005"
    if not path.exists():
        save_checkpoint(path.parent, _state(5), CONFIG)
    file = path / data.draw(st.sampled_from(["checkpoint.json", "device-00000.safetensors"]))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    file.write_bytes(
        content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    )
    try:
        state = load_checkpoint(path, CONFIG)
        assert state.step == 5
        assert {name: np.asarray(tensor).tobytes() for name, tensor in state.tensors.items()} == {
            name: tensor.tobytes() for name, tensor in _state(5).tensors.items()
        }
    except DamagedCheckpoint:
        pass
    finally:
        file.write_bytes(content)


FULL_DISK = """
import resource, sys
import numpy as np
from tilewise.checkpoint import TrainingState, save_checkpoint
from tilewise.core import ResourceError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    save_checkpoint(sys.argv[1], TrainingState(2, {"w": np.ones(1 << 16, np.float32)}), {})
except ResourceError as error:
    print(error)
"""


def test_full_disk_keeps_the_previous_checkpoint(tmp_path):
    """A failed write is one error; the older checkpoint is complete, with no partial files next to it."""
    save_checkpoint(tmp_path, _state(1), CONFIG)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True
    )
    assert (
        "step-00000002': " in done.stdout and "File too large" in done.stdout and done.stdout.count("\n") == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_latest(tmp_path, CONFIG, lambda text: pytest.fail(text))[1].step == 1
    with pytest.raises(ResourceError, match="Not a directory"):
        save_checkpoint(tmp_path / "step-00000001" / "checkpoint.json" / "x", _state(1), CONFIG)


WHOLE = np.ones((2, 2), np.float32)
DEEP = json.loads('{"a":' * 250 + "1" + "}" * 250)


@pytest.mark.parametrize(
    ("tensors", "config", "mesh"),
    [
        ({"__metadata__": WHOLE}, {}, {}),
        ({"\ud800": WHOLE}, {}, {}),
        ({"w": np.zeros((1,) * 33, np.float32)}, {}, {}),
        ({"w": np.zeros((0, 1 << 61, 2), np.uint8)}, {}, {}),
        ({"w": WHOLE}, {"a": "\ud800"}, {}),
        ({"w": WHOLE}, {"\ud800": 1}, {}),
        ({"w": WHOLE}, DEEP, {}),
        ({"w": WHOLE}, {"a": 10**5000}, {}),
        ({"w": WHOLE}, {}, {"\ud800": 1}),
    ],
    ids=["reserved", "name", "dims", "size", "value", "key", "deep", "long", "axis"],
)
def test_unreadable_state_is_rejected_before_writing(tmp_path, tensors, config, mesh):
    """Nothing is written or removed."""
    older = save_checkpoint(tmp_path, _state(1), CONFIG)
    with pytest.raises(CheckpointError, match=r"\[checkpoint.save_checkpoint\]"):
        save_checkpoint(tmp_path, TrainingState(2, tensors, mesh=mesh), config, keep_last=1)
    assert os.listdir(tmp_path) == [older.name] and load_checkpoint(older, CONFIG).step == 1


def _parted(box=((0, 0), (2, 2)), **changes):
    part = {"box": Box(*box), "values": WHOLE, "device": 0}
    tensor = {"shape": (2, 2), "dtype": WHOLE.dtype}
    part |= {name: value for name, value in changes.items() if name in part}
    tensor |= {name: value for name, value in changes.items() if name in tensor}
    return PartedTensor(**tensor, parts=changes.get("parts", (TensorPart(**part),)))


@pytest.mark.parametrize(
    "changes",
    [{"parts": (3,)}, {"shape": (2.0, 2)}, {"dtype": "f4"}, {"values": [1]}, {"box": ((0, 0), [2, 2])},
     {"device": 2**70}],
    ids=str,
)  # fmt: skip
def test_mismatched_parts_are_rejected(tmp_path, changes):
    """Boxes when they are made, tensors in parts when they are saved."""
    with pytest.raises(CheckpointError, match=r"\[checkpoint\."):
        save_checkpoint(tmp_path, TrainingState(1, {"w": _parted(**changes)}), {})
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path, TrainingState(1, {"w": _parted()}), {})


def test_errors_show_rejected_values(tmp_path):
    """An array by its type and shape; parts of two devices without a mesh by what is missing."""
    with pytest.raises(CheckpointError, match=r"got complex128 \[2\] for 'w'; convert it"):
        save_checkpoint(tmp_path, TrainingState(1, {"w": np.ones(2, np.complex128)}), {})
    parts = tuple(TensorPart(Box((0, i), (2, 1)), WHOLE[:, i : i + 1], i) for i in range(2))
    with pytest.raises(CheckpointError, match="give the state the axes of that model's mesh"):
        save_checkpoint(tmp_path, TrainingState(1, {"w": _parted(parts=parts)}), {})
    save_checkpoint(tmp_path, TrainingState(1, {"w": _parted(parts=parts)}, mesh={"dp": 2}), {})


def test_numpy_integers_are_accepted_in_meshes(tmp_path):
    """A mesh whose sizes come from an array is written like any other; files are readable by the same users."""
    path = save_checkpoint(tmp_path, TrainingState(1, {"w": WHOLE}, None, {"dp": np.int64(2)}), {})
    assert open_checkpoint(path).mesh == {"dp": 2}
    (path / "other").touch()
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_foreign_text_in_differences_is_printable(tmp_path):
    """Neither a key nor a value of a checkpoint sends control characters to the terminal."""
    path = save_checkpoint(tmp_path, _state(1), {"a\x1b[2J": "\x1b]0;x\x07"})
    with pytest.raises(CheckpointError, match="instead of") as caught:
        load_checkpoint(path, {})
    assert str(caught.value).isprintable() and r"\x1b]0;x\x07" in str(caught.value)


def test_older_checkpoint_that_is_a_link_is_unlinked(tmp_path):
    """The link is removed, its target stays."""
    real, root = tmp_path / "real", tmp_path / "root"
    real.mkdir()
    root.mkdir()
    (real / "precious").touch()
    (root / "step-00000001").symlink_to(real)
    path = save_checkpoint(root, _state(2), CONFIG, keep_last=1)
    assert os.listdir(root) == [path.name] and (real / "precious").exists()


NO_DESCRIPTOR = """
import os, resource, sys
import numpy as np
from tilewise.checkpoint import TrainingState, has_checkpoints, latest_checkpoint, load_latest, save_checkpoint
from tilewise.core import ResourceError

root, state = sys.argv[1], TrainingState(2, {"w": np.ones(2)})
calls = (
    lambda: has_checkpoints(root),
    lambda: latest_checkpoint(root),
    lambda: load_latest(root, {}, print),
    lambda: save_checkpoint(root, state, {}),
)
free = os.open(root, os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
for call in calls:
    try:
        print("returned", call())
    except ResourceError as error:
        print(error)
"""


def test_unlistable_directory_is_not_empty(tmp_path):
    """Otherwise a new run would begin where checkpoints exist."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    words = [sys.executable, "-c", NO_DESCRIPTOR, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("Too many open files; " in line for line in lines), lines
    assert os.listdir(tmp_path) == [path.name]
