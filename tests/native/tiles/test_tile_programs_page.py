"""The Python of docs/tile_programs.md runs and prints the page's output, and the page's programs keep
to the rules that it teaches.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from native.session.printed_pages import BLOCK, differences, namespace_of
from tilewise import comm

PAGE = Path(__file__).parents[3] / "docs" / "tile_programs.md"
PROGRAMS = {  # rows of their tensors, and how many arguments are signals
    "add_left": ([8, 8], 1),
    "pipeline": ([8, 8, 8], 1),
    "short_queue": ([8, 8, 4], 2),
    "pull": ([8, 8, 8], 1),
    "two_puts": ([8, 8], 1),
    "around": ([8, 8, 8], 1),
    "there_and_back": ([8, 8], 1),
}


def test_every_block_prints_what_the_page_shows():
    """From the first copy to several processes, and the messages of wrong programs."""
    text = PAGE.read_text(encoding="utf-8")
    assert differences(PAGE.name, text) == []
    assert len(BLOCK.findall(text)) == text.count("```python") and text.count("```text") >= 15


def test_a_wrong_page_is_detected():
    """The twin: a changed value in the second block and a changed count in the third are detected."""
    text = PAGE.read_text(encoding="utf-8").partition("## Signals, waits and tokens")[0]
    for what, instead in (
        ("device 0: [2. 2. 2.]", "device 0: [1. 1. 1.]"),
        ("waits for 1, posts", "waits for 2, posts"),
    ):
        assert text.count(what) == 1
        text = text.replace(what, instead)
    assert differences(PAGE.name, text) == [2, 3]


@pytest.fixture(scope="module")
def page_names():
    """What the blocks of the page define."""
    names = namespace_of(PAGE.name)
    text = PAGE.read_text(encoding="utf-8").partition("## Kernels of your own")[0]
    with contextlib.redirect_stdout(io.StringIO()):
        for code, _ in BLOCK.findall(text):
            exec(compile(code, f"docs/{PAGE.name}", "exec"), names)
    names["group"].close()
    return names


def run_eagerly(program, rows, num_signals, delays):
    """The contents of all tensors after an eager run."""
    devices, rng = comm.local(2, delays=delays), np.random.default_rng(0)
    tensors = [devices.symm_tensor((n, 16)) for n in rows]
    for tensor in tensors:
        for device in range(2):
            tensor.numpy(device)[:] = rng.integers(-4, 5, tensor.shape)
    devices.run(program, *tensors, *(devices.signals(8) for _ in range(num_signals)))
    return [tensor.numpy(device) for tensor in tensors for device in range(2)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_is_right_in_every_order(page_names, name):
    """Late puts and signals change no result."""
    first = run_eagerly(page_names[name], *PROGRAMS[name], None)
    for delays in range(8):
        np.testing.assert_equal(run_eagerly(page_names[name], *PROGRAMS[name], delays), first)
