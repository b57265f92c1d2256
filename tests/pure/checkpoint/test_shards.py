"""Writing weights: one tensor in memory at a time, files that safetensors reads, and no partial files."""

import json
import os
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tilewise.checkpoint import LazyTensor, open_weights, save_pretrained, write_weights
from tilewise.core import CheckpointError, ResourceError


def _tensors():
    rng = np.random.default_rng(0)
    return {
        "odd": np.arange(3, dtype=np.uint8),
        "b": rng.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
        "half": rng.standard_normal(7).astype(np.float16),
        "a": rng.standard_normal((6, 4)).astype(np.float32)[:, ::2],
        "scalar": np.array(2.5),
        "none": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
    }


def test_safetensors_reads_our_files(tmp_path):
    """All element types, strided views, scalars and empty tensors; aligned, with transformers' metadata."""
    write_weights(tmp_path, _tensors().items())
    path = tmp_path / "model.safetensors"
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    for name, tensor in _tensors().items():
        assert bytes(tensors[name]["data"]) == tensor.tobytes() and tensors[name]["shape"] == list(
            tensor.shape
        )
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in open_weights(tmp_path).items():
        assert tensor.begin % _tensors()[name].dtype.itemsize == 0


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Each tensor is fetched when it is written and released before the next."""
    alive, most = [], []

    def fetch(i):
        array = np.full(100, i, np.float32)
        most.append(1 + sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(array))
        return array

    tensors = [(f"t{i}", LazyTensor((100,), np.dtype(np.float32), lambda i=i: fetch(i))) for i in range(7)]
    write_weights(tmp_path, iter(tensors), max_shard_bytes=1000)
    assert len(most) == 7 and max(most) == 1
    assert [open_weights(tmp_path)[f"t{i}"][0:1] for i in range(7)] == list(range(7))


def test_files_are_split_by_size(tmp_path):
    """Neighbours share a file while they fit; a larger tensor has its own; the index counts all bytes."""
    sizes = [10, 10, 10, 40, 5]
    tensors = [(f"t{i}", np.full(n, i, np.uint8)) for i, n in enumerate(sizes)]
    save_pretrained(tmp_path / "m", {}, tensors, max_shard_bytes=20)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = [index["weight_map"][f"t{i}"] for i in range(5)]
    assert files == [f"model-0000{n}-of-00004.safetensors" for n in (1, 1, 2, 3, 4)]
    assert index["metadata"] == {"total_size": 75}
    assert {name: t.read()[0] for name, t in open_weights(tmp_path / "m").items()} == {
        f"t{i}": i for i in range(5)
    }


@pytest.mark.slow
def test_transformers_opens_several_files(tmp_path):
    """The index and names are those that transformers writes itself."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    theirs = transformers.LlamaForCausalLM(config)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    save_pretrained(tmp_path / "m", json.loads(config.to_json_string()), state.items(), max_shard_bytes=2000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    tensors = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert all(np.array_equal(tensors[name].numpy(), tensor) for name, tensor in state.items())


@pytest.mark.parametrize("max_shard_bytes", [1 << 20, 50])
def test_tensor_that_cannot_be_fetched_leaves_no_files(tmp_path, max_shard_bytes):
    """After an error, or a tensor that differs from its description, the old files are intact."""
    write_weights(tmp_path, [("old", np.ones(3))])

    def fail():
        raise CheckpointError("gone")

    good = ("w", np.ones(20, np.float32))
    for bad in (fail, lambda: np.ones((2, 10), np.float32), lambda: np.ones(20)):
        with pytest.raises(CheckpointError, match=r"gone|match its description"):
            write_weights(
                tmp_path, [good, ("bad", LazyTensor((20,), np.dtype(np.float32), bad))], max_shard_bytes
            )
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(open_weights(tmp_path)) == {"old"}


READ_ONLY = """
import os, sys
import numpy as np
from tilewise.checkpoint import save_pretrained, write_weights
from tilewise.core import ResourceError
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)
for call in (lambda: write_weights(".", [("w", np.ones(3))]),
             lambda: write_weights(".", [("w", np.ones(3)), ("v", np.ones(3))], 1),
             lambda: save_pretrained("model", {}, [("w", np.ones(3))])):
    try:
        call()
    except ResourceError as error:
        print(error)
"""


def test_unwritable_directory_is_one_error(tmp_path):
    """A ResourceError with the file and the system's reason; no file is left."""
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, place], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("Permission denied" in line for line in lines)
    assert (
        "'model.safetensors'" in lines[0] and "model-00001-of-00001" not in lines[1] and "'model'" in lines[2]
    )
    assert not list(place.iterdir())


def test_name_of_a_directory_is_rejected(tmp_path):
    """The directory is not removed."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ResourceError, match="not a regular file"):
        write_weights(tmp_path, [("w", np.ones(3))])
    assert os.listdir(tmp_path) == ["model.safetensors"]


FULL_DISK = """
import os, resource, sys
import numpy as np
from tilewise.checkpoint import LazyTensor, open_weights, save_pretrained, write_weights
from tilewise.core import ResourceError
os.chdir(sys.argv[1])
write_weights(".", [("old", np.ones(3))])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
kind = np.dtype(np.float32)
tensors = [(f"w{i}", LazyTensor((1 << 13,), kind, lambda: np.ones(1 << 13, np.float32))) for i in range(4)]
for call in (lambda: write_weights(".", tensors), lambda: write_weights(".", tensors, 1 << 16),
             lambda: save_pretrained("model", {}, tensors)):
    try:
        call()
    except ResourceError as error:
        print(error)
    assert os.listdir() == ["model.safetensors"], os.listdir()
    assert set(open_weights(".")) == {"old"}
write_weights(".", tensors, 1 << 15)  # files that fit are written
assert len(open_weights(".")) == 4
"""


def test_full_disk_is_one_error_and_leaves_no_files(tmp_path):
    """128 KiB of weights where a file holds 64 KiB: a ResourceError with the file and the reason, three ways."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("File too large" in line for line in lines)
    assert "'model.safetensors'" in lines[0] and "'model-00001-of-00002.safetensors'" in lines[1]
    assert "model.safetensors'" in lines[2]
