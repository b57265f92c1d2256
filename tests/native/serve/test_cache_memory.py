"""Memory of the KV cache: reserved when a model is loaded, allocated as texts fill it, never more
than available.
"""

import ctypes
import logging
import mmap
import subprocess
import sys

import numpy as np
import pytest

from native.serve.serving_models import load, save_model
from tilewise.core import ResourceError
from tilewise.models import BLOCK_SIZE
from tilewise.serve import LLM, SamplingParams
from tilewise.serve import engine as engine_module
from tilewise.serve.runner import Runner

CONTEXT = 1 << 17


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model with a long context: 32 MiB of keys and values in fp32 per text."""
    directory = tmp_path_factory.mktemp("long") / "model"
    return save_model(directory, max_position_embeddings=CONTEXT, num_hidden_layers=1)


def resident_bytes(memory: np.ndarray) -> int:
    """Resident bytes of a range of memory, in whole pages."""
    first = memory.ctypes.data & -mmap.PAGESIZE
    num_pages = -(-(memory.ctypes.data + len(memory) - first) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_pages_are_allocated_ahead_of_use(model_dir):
    """First as much as one call can fill, after a call as much again; the rest of the cache is not touched."""
    model = load(model_dir, max_num_seqs=1)
    runner = Runner(model.instance, model.limits)
    limits, memory = model.limits, model.instance.state_memory()
    blocks = limits.max_num_batched_tokens // BLOCK_SIZE + limits.max_num_seqs
    huge = 2 << 20  # pages of this size may be allocated as a whole
    assert (
        sum(map(len, memory)) == model.cache_bytes == CONTEXT * 2 * 2 * 16 * 4
    )  # keys and values of 2 heads of 16
    for num_blocks in (blocks, blocks + 1000):
        runner._allocate(num_blocks)
        for part in memory:
            expected = len(part) // limits.num_blocks * num_blocks
            assert expected <= resident_bytes(part) + mmap.PAGESIZE <= expected + 2 * huge + mmap.PAGESIZE
    del memory
    runner.close()
    model.close()


def test_a_cache_that_does_not_fit_is_shortened_or_rejected(model_dir, monkeypatch, caplog):
    """Shortened if no setting fixes its size, with the same text; otherwise the error names the
    settings to lower. Copies share the available memory, and none is made if not all fit.
    """
    params = SamplingParams(max_tokens=8, seed=1)

    def write(**settings):
        with LLM(model_dir, **{"dtype": "f32", "max_num_seqs": 1, **settings}) as llm:
            text = llm.generate(["import os"], params)[0].outputs[0].text
            return llm.engine.model.limits.max_context, text

    longest, text = write()
    assert longest == CONTEXT
    with load(model_dir, max_num_seqs=1, max_num_batched_tokens=256).instance as instance:
        needed = instance.plan.total_bytes
    monkeypatch.setattr(engine_module, "available_memory", lambda: needed - (16 << 20))
    with caplog.at_level(logging.WARNING, "tilewise"):
        fewer, same = write()
    assert 2048 <= fewer < CONTEXT and same == text
    assert f"{fewer} positions" in caplog.text and "--kv-cache-memory" in caplog.text
    for settings in ({"max_model_len": CONTEXT}, {"kv_cache_memory_bytes": 1 << 30}):
        with pytest.raises(ResourceError, match=r"--max-model-len.*--kv-cache-memory"):
            write(**settings)
    with pytest.raises(ResourceError, match="--max-model-len"):
        write(data_parallel_size=64)


ENDING = """
from tilewise import LLM, SamplingParams
llm = LLM({model!r})
params = SamplingParams(max_tokens=4000, ignore_eos=True)
llm.engine.submit(llm.engine.requests(["import"], params), print)
"""


def test_a_process_may_end_in_the_middle_of_a_text(model_dir):
    """Exit code 0 and nothing on standard error without `close`: no thread remains inside native code."""
    code = ENDING.format(model=str(model_dir))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
