"""Checkpoints of several devices: a file each, and errors name the file."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pure.checkpoint.test_boxes import cut
from tilewise.checkpoint import (
    Box,
    DamagedCheckpoint,
    FinishedModel,
    PartedTensor,
    TensorPart,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    open_checkpoint,
    save_checkpoint,
)
from tilewise.checkpoint import device_files as device_files
from tilewise.checkpoint.concurrent_files import run_concurrently
from tilewise.checkpoint.manifest import Manifest
from tilewise.core import CheckpointError, ResourceError

CONFIG = {"layers": 6}
MESH = {"fsdp": 2, "tp": 2}


def state(step, seed=0):
    """The state of four devices: rows of two matrices, a vector of the third, the step count of the first."""
    rng = np.random.default_rng([seed, step])
    tensors = {"optimizer.step": np.array([step])}
    for name in ("v", "w"):
        array = rng.standard_normal((8, 6)).astype(np.float32)
        parts = [TensorPart(Box((2 * d, 0), (2, 6)), array[2 * d : 2 * d + 2], d) for d in range(4)]
        tensors[name] = PartedTensor((8, 6), array.dtype, tuple(parts))
    norm = TensorPart(Box((0,), (6,)), rng.standard_normal(6).astype(np.float32), 2)
    tensors["norm"] = PartedTensor((6,), norm.values.dtype, (norm,))
    return TrainingState(step, tensors, mesh=MESH)


def bytes_of(tensors):
    return {name: np.asarray(tensor).tobytes() for name, tensor in tensors.items()}


def test_each_device_has_a_file(tmp_path):
    """It has the device's parts under the tensors' names; whole tensors are restored from all files."""
    path = save_checkpoint(tmp_path, state(3), CONFIG)
    assert sorted(os.listdir(path)) == ["checkpoint.json", *(f"device-{d:05d}.safetensors" for d in range(4))]
    third = load_file(path / "device-00002.safetensors")
    assert sorted(third) == ["norm", "v", "w"]
    assert third["w"].tobytes() == np.asarray(state(3).tensors["w"])[4:6].tobytes()
    loaded = load_checkpoint(path, CONFIG)
    assert (loaded.step, loaded.mesh) == (3, MESH)
    assert bytes_of(loaded.tensors) == bytes_of(state(3).tensors)
    opened = open_checkpoint(path)
    assert [file.name for file in opened.files] == sorted(os.listdir(path))[1:]
    assert opened.nbytes == sum(file.nbytes for file in opened.files) == 2 * 8 * 6 * 4 + 6 * 4 + 8


def test_a_loaded_state_can_be_saved_again(tmp_path):
    """Parts stay on their devices, and the second load is equal."""
    path = save_checkpoint(tmp_path / "one", state(3), CONFIG)
    again = save_checkpoint(tmp_path / "two", load_checkpoint(path, CONFIG), CONFIG)
    assert bytes_of(load_checkpoint(again, CONFIG).tensors) == bytes_of(state(3).tensors)
    assert device(path, 3).read_bytes() == device(again, 3).read_bytes()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_partition_over_any_devices_is_restored(tmp_path_factory, data):
    """Tensors in random pieces, at most one per device: the loaded state equals the saved one, to the bit."""
    folder, tensors = tmp_path_factory.mktemp("cuts"), {}
    for name in ("a", "b", "c"):
        shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
        array = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
        boxes = data.draw(st.permutations(cut(data.draw, Box.whole(shape), 3)))
        devices = data.draw(st.permutations(range(8)))
        parts = [
            TensorPart(box, np.array(array[box.slices]), d) for box, d in zip(boxes, devices, strict=False)
        ]
        tensors[name] = PartedTensor(shape, array.dtype, tuple(parts))
    path = save_checkpoint(folder, TrainingState(1, tensors, mesh={"dp": 8}), CONFIG)
    restored = load_checkpoint(path, CONFIG).tensors
    assert bytes_of(restored) == bytes_of(tensors)
    assert all(restored[n].shape == t.shape and restored[n].dtype == t.dtype for n, t in tensors.items())
    shutil.rmtree(folder)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 8
    file.write_bytes(content)


def exchange(file, other):
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def retyped(file):
    save_file({name: tensor.astype(np.float16) for name, tensor in load_file(file).items()}, file)


def device(path, number):
    return path / f"device-{number:05d}.safetensors"


LOST = {
    "missing": (lambda p: device(p, 1).unlink(), "device-00001.safetensors: .*no such file"),
    "truncated": (lambda p: os.truncate(device(p, 3), 300), r"device-00003.safetensors: .*the file has 300"),
    "flipped bit": (
        lambda p: flip(device(p, 2)),
        r"tensor '\w+' in device-00002.safetensors has a wrong checksum",
    ),
    "exchanged": (
        lambda p: exchange(device(p, 1), device(p, 3)),
        "tensor 'v' in device-00001.safetensors has a wrong .*tensor 'v' in device-00003.safetensors has a wrong",
    ),
    "another's": (
        lambda p: shutil.copy(device(p, 2), device(p, 1)),
        "device-00001.safetensors differs from the manifest: tensor 'norm' is not in the manifest",
    ),
    "of another step": (
        lambda p: shutil.copy(device(p.with_name("step-00000001"), 1), device(p, 1)),
        "tensor 'v' in device-00001.safetensors has a wrong checksum",
    ),
    "of another type": (
        lambda p: retyped(device(p, 1)),
        r"device-00001.safetensors differs from the manifest.*tensor 'v' is F16 \[2, 6\] instead of F32 \[2, 6\]",
    ),
    "all": (lambda p: [device(p, d).unlink() for d in range(4)], "device-00002.*; and 1 more files"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_damaged_file_is_named_and_an_older_checkpoint_used(tmp_path, name):
    """Each kind of damage of a device's file is reported with its name."""
    damage, words = LOST[name]
    save_checkpoint(tmp_path, state(1), CONFIG)
    newer = save_checkpoint(tmp_path, state(2), CONFIG)
    damage(newer)
    with pytest.raises(DamagedCheckpoint, match=words) as caught:
        load_checkpoint(newer, CONFIG)
    assert "\n" not in str(caught.value)
    if name in ("missing", "truncated"):  # checksums are not read when checkpoints are listed
        assert latest_checkpoint(tmp_path).name == "step-00000001"
    reported = []
    path, loaded = load_latest(tmp_path, CONFIG, reported.append)
    assert path.name == "step-00000001" and bytes_of(loaded.tensors) == bytes_of(state(1).tensors)
    assert len(reported) == 1 and "device-0000" in reported[0]
    assert device_files.damages(open_checkpoint(path).files, lambda num_bytes: None) is None


def change(path, edit):
    """Edit the manifest and correct its digest."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    edit(manifest)
    (path / "checkpoint.json").write_text(Manifest.model_validate(manifest).signed().content())


def set_part(tensor, number, **changes):
    return lambda manifest: manifest["tensors"][tensor]["parts"][number].update(changes)


LIES = {
    "hole": (
        lambda m: m["tensors"]["w"]["parts"].pop(2),
        "tensor 'w' in device-00000.*12 of 48 elements are missing",
    ),
    "overlap": (
        set_part("w", 1, begin=[1, 0]),
        "tensor 'w' in device-00000.safetensors, device-00001.safe.*overlap",
    ),
    "outside": (
        set_part("w", 3, begin=[7, 0]),
        r"tensor 'w' in device-00003.*\[2, 6\] at \[7, 0\] lies outside",
    ),
    "another type": (lambda m: m["tensors"]["w"].update(dtype="F16"), r"tensor 'w' is F32 .* instead of F16"),
    "a type that is invalid": (lambda m: m["tensors"]["w"].update(dtype="F7"), "instead of F7"),
    "one device twice": (set_part("w", 1, device=0), "tensor 'w' must be of different devices"),
    "more devices": (lambda m: m.update(devices=5), "device-00004.safetensors: .*no such file"),
    "exchanged places": (
        set_part("w", 1, sha256="0" * 64),
        "'w' in device-00001.safetensors has a wrong checksum",
    ),
    "other dims": (set_part("norm", 0, begin=[0, 0]), "tensor 'norm' in device-00002"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_wrong_manifest_is_rejected(tmp_path, name):
    """Parts that do not cover their tensor, or differ from the files, with valid checksums."""
    edit, words = LIES[name]
    path = save_checkpoint(tmp_path, state(2), CONFIG)
    change(path, edit)
    with pytest.raises(DamagedCheckpoint, match=words) as caught:
        load_checkpoint(path, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_given", [0, 1])
def test_work_is_done_without_further_threads(num_given, monkeypatch):
    """The system starts no further thread, or none."""
    start, started, done = threading.Thread.start, [], []

    def start_some(thread):
        if len(started) == num_given:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    run_concurrently([partial(done.append, i) for i in range(5)])
    assert sorted(done) == [*range(5)] and len(started) == num_given


def test_a_count_of_steps_is_one_number(tmp_path):
    """A file may claim to be as large as memory; it is not read for the comparison."""
    path = save_checkpoint(tmp_path, TrainingState(2, {"w": np.zeros(8)}), CONFIG)
    num_bytes = 1 << 40
    entry = {"dtype": "I64", "shape": [num_bytes // 8], "data_offsets": [0, num_bytes]}
    header = json.dumps({"optimizer.step": entry}).encode()
    with (path / "device-00000.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    part = {"device": 0, "begin": [0], "shape": entry["shape"], "sha256": "0" * 64}
    record = {"dtype": "I64", "shape": entry["shape"], "parts": [part]}
    change(path, lambda m: m.update(tensors={"optimizer.step": record}))
    with pytest.raises(DamagedCheckpoint, match=r"whose state counts steps in a tensor of \[137438953472\]"):
        open_checkpoint(path)


def test_an_older_format_is_named(tmp_path):
    """A checkpoint of the previous format, which had one file, is rejected by its version number."""
    path, sha256 = save_checkpoint(tmp_path, state(2), CONFIG), "0" * 64
    manifest = {"version": 3, "step": 2, "config": CONFIG, "tokenizer": None, "digest": sha256}
    manifest["tensors"] = {"w": {"dtype": "F32", "shape": [8, 6], "sha256": sha256}}
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match=r"must be of format 4, which this version .*; got 3"):
        load_checkpoint(path, CONFIG)


def parts(*pieces):
    return PartedTensor((4,), np.dtype(np.float32), tuple(pieces))


def half(begin, device, dtype=np.float32):
    return TensorPart(Box((begin,), (2,)), np.zeros(2, dtype), device)


@pytest.mark.parametrize(
    "tensor",
    [
        parts(half(0, 0)),
        parts(half(0, 0), half(1, 1)),
        parts(half(0, 0), half(2, 0)),
        parts(half(0, 0), half(2, 2)),
        parts(half(0, 0), half(2, 1, np.float16)),
        parts(half(0, 0), TensorPart(Box((2,), (2,)), np.zeros(3, np.float32), 1)),
    ],
    ids=["hole", "overlap", "one device", "no device", "type", "size"],
)
def test_parts_that_do_not_cover_are_not_saved(tmp_path, tensor):
    """Rejected before anything is written."""
    with pytest.raises(CheckpointError, match="parts of a tensor are of different devices among 2"):
        save_checkpoint(tmp_path, TrainingState(1, {"w": tensor}, mesh={"dp": 2}), CONFIG)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mesh", [{"dp": 0}, {"a": 1024, "b": 1024}, {"dp": 2.0}], ids=str)
def test_invalid_meshes_are_not_saved(tmp_path, mesh):
    """Rejected before anything is written."""
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, TrainingState(1, {}, mesh=mesh), CONFIG)
    assert not list(tmp_path.iterdir())


def test_files_are_written_concurrently(tmp_path, monkeypatch):
    """On two cores two files are written at once; an error in one stops the others, and nothing remains."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    both, save = threading.Barrier(2, timeout=60), device_files.save_tensors

    def together(path, tensors):
        if path.name < "device-00002":
            both.wait()
        save(path, tensors)

    monkeypatch.setattr(device_files, "save_tensors", together)
    path = save_checkpoint(tmp_path, state(1), CONFIG)
    assert bytes_of(load_checkpoint(path, CONFIG).tensors) == bytes_of(state(1).tensors)

    def full(path, tensors):
        if path.name == "device-00001.safetensors":
            raise OSError(28, "No space left on device")
        save(path, tensors)

    monkeypatch.setattr(device_files, "save_tensors", full)
    with pytest.raises(ResourceError, match=r"step-00000002.*No space left"):
        save_checkpoint(tmp_path, state(2), CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_work_runs_once_and_stops_at_an_error(monkeypatch):
    """Each piece once; after an error of one thread no other starts a piece, and the caller gets the error."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    done = []
    run_concurrently([partial(done.append, i) for i in range(50)])
    assert sorted(done) == list(range(50))
    run_concurrently([])
    done.clear()

    def fail():
        raise ZeroDivisionError

    def slowly():
        time.sleep(0.01)
        done.append(0)

    with pytest.raises(ZeroDivisionError):
        run_concurrently([fail, *[slowly] * 100])
    assert len(done) < 100


UNFINISHED = """
import sys, threading, time
from tilewise.checkpoint import concurrent_files
from tilewise.checkpoint.concurrent_files import run_concurrently
concurrent_files.EXIT_PATIENCE_S = 0.1
threading.Thread(target=run_concurrently, args=([lambda: time.sleep(1000)] * 3,), daemon=True).start()
time.sleep(0.1)
"""


def test_threads_do_not_delay_the_end_of_a_process():
    """A hanging background writer is abandoned after a short while."""
    subprocess.run([sys.executable, "-c", UNFINISHED], check=True, timeout=60)


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pure.checkpoint.test_device_files import CONFIG, state
from tilewise.checkpoint import save_checkpoint
print("ready", flush=True)
for step in range(int(sys.argv[3]), 10**9):
    save_checkpoint(sys.argv[2], state(step), CONFIG)
"""


@pytest.mark.slow
def test_a_killed_writer_of_several_files_leaves_a_complete_checkpoint(tmp_path):
    """SIGKILL while four files are written: all files are of one step or all of another; steps never decrease."""
    rng, reached, tests = np.random.default_rng(0), 0, os.path.join(os.path.dirname(__file__), "..", "..")
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, tests, str(tmp_path), str(reached + 1)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        while not (latest := latest_checkpoint(tmp_path)) or latest.name <= f"step-{reached:08d}":
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.04))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        _, loaded = load_latest(tmp_path, CONFIG, lambda text: pytest.fail(text))
        assert loaded.step > reached
        assert bytes_of(loaded.tensors) == bytes_of(state(loaded.step).tensors)
        reached = loaded.step
    save_checkpoint(tmp_path, state(reached + 1), CONFIG)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["checkpoint.json", "device-00002.safetensors", "model/tokenizer.json"])
def test_an_unreadable_file_is_not_damage(tmp_path, monkeypatch, name):
    """The error has the system's reason; no older checkpoint is used instead, and none is removed."""
    for step in (1, 2):
        save_checkpoint(
            tmp_path, replace(state(step), model=FinishedModel({"tokenizer.json": b"{}"})), CONFIG
        )
    opens = os.open

    def open_others(path, *arguments, **options):
        if str(path).endswith(f"step-00000002/{name}"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opens(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_others)
    for look in (
        lambda: load_checkpoint(tmp_path / "step-00000002", CONFIG),
        lambda: load_latest(tmp_path, CONFIG, pytest.fail),
        lambda: open_checkpoint(tmp_path / "step-00000002").verify(),
    ):
        with pytest.raises(ResourceError, match=f"{name}: Permission denied; check its permissions"):
            look()
    save_checkpoint(tmp_path, state(3), CONFIG, keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000003"]


SHORT_OF_FILES = """
import os, resource, sys
import numpy as np
from tilewise.checkpoint import Box, PartedTensor, TensorPart, TrainingState, latest_checkpoint, save_checkpoint
from tilewise.core import ResourceError

root, count = sys.argv[1], 64

def state(step):
    parts = tuple(TensorPart(Box((i, 0), (1, 4)), np.full((1, 4), i, np.float32), i) for i in range(count))
    tensors = {"w": PartedTensor((count, 4), np.dtype(np.float32), parts), "optimizer.step": np.array([step])}
    return TrainingState(step, tensors, None, {"dp": count})

save_checkpoint(root, state(1), {"a": 1}, keep_last=3)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
save_checkpoint(root, state(2), {"a": 1}, keep_last=3)
try:
    latest_checkpoint(root)
except ResourceError as error:
    print(error)
print(sorted(os.listdir(root)))
"""


def test_a_checkpoint_is_not_damaged_if_no_file_can_be_opened(tmp_path):
    """With more devices than descriptors an older checkpoint stays; it was once removed as incomplete."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_FILES, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "['step-00000001', 'step-00000002']" in done.stdout
    assert "raise the limit of open files" in done.stdout
