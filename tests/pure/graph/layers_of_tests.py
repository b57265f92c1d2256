"""Layer functions and descriptions that other processes can import."""

import os
import time

from tilewise.core.dims import BATCH
from tilewise.graph import GraphBuilder, layer
from tilewise.nn import linear, rms_norm

WIDTH = 8


@layer
def block(graph, x, scale=None, *, width=16, power=1):
    """Norm, up, down, and a residual; `scale` is one more operand."""
    h = rms_norm(graph, x, "norm.weight", eps=1e-6)
    for i in range(power):
        h = linear(graph, linear(graph, h, f"up{i}.weight", width), f"down{i}.weight", WIDTH)
    if scale is not None:
        h = graph.add(h, scale)
    return graph.add(x, h)


@layer
def caching(graph, x, slots, *, rows):
    """A layer with a state."""
    cache = graph.state([rows, WIDTH], "f32", name="cache")
    graph.kv_write(cache, x, slots, head_dim=WIDTH, block_size=1)
    return graph.add(x, x)


@layer
def wrong(graph, x):
    """Cannot be traced."""
    return graph.add(x, graph.parameter([WIDTH, WIDTH], name="weight"))


def start(name="model"):
    """A graph with a stream `x` and an operand `scale`."""
    graph = GraphBuilder(name)
    graph.input([4, WIDTH], name="x", labels=[BATCH, None])
    graph.input([4, WIDTH], name="scale", labels=[BATCH, None])
    return graph


def describe(handle, item):
    """One block `(number, width, power, takes scale, delay)`."""
    number, width, power, scaled, delay = item
    if delay:
        time.sleep(delay)
    before = f"layers.{number - 1}" if number else "x"
    operands = (before, "scale") if scaled else (before,)
    handle.layer(block, *operands, path=f"layers.{number}", width=width, power=power)


def fail_at_seven(handle, item):
    """Fail for one item."""
    handle.layer(block, "x", path=f"layers.{item}")
    if item in (7, 9):
        raise KeyError("seven")


def die(*args):
    """End the worker."""
    os._exit(3)
