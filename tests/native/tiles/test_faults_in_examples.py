"""Each fault that the checker knows, planted in the text of an example, is found before it runs."""

import re
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw

EXAMPLES = Path(__file__).parents[3] / "examples"
QUEUE, GATHER, REDUCE = "07_producer_consumer", "08_all_gather_matmul", "09_matmul_reduce_scatter"
FAULTS = {  # example, what is replaced, by what, and the beginning of the message's rule
    "unconsumed token": (
        QUEUE,
        "comm.consume_token(queue, token).tile",
        "queue.tile",
        "must be read after a wait for its signal",
    ),
    "unconsumed token in a loop": (
        GATHER,
        "comm.consume_token(gathered, comm.wait(ready[theirs]))",
        "(comm.wait(ready[theirs]), gathered)[1]",
        "must be read after a wait for its signal",
    ),
    "overwritten before it is read": (
        QUEUE,
        "remote = comm.consume_token(remote, comm.wait(free[0], t - PLACES + 1))",
        "comm.wait(free[0], t - PLACES + 1)",
        "must not be overwritten before its readers have acknowledged",
    ),
    "two writers": (
        GATHER,
        "remote.tile(mine, rows=ROWS)",
        "remote.tile(t, rows=ROWS)",
        "two writes of a tile must be ordered|must be read after a wait",
    ),
    "lost signal": (REDUCE, "comm.notify(ready[row], owner)", "pass", "as often as the program waits for"),
    "doubled signal": (
        REDUCE,
        "comm.notify(ready[row], owner)",
        "comm.notify(ready[row], owner, 2)",
        "posts too many|must be read after a wait for its signal",
    ),
    "too early": (REDUCE, "comm.wait(ready[row], n)", "comm.wait(ready[row], n - 1)", "read after a wait"),
    "two operators": (
        QUEUE,
        "comm.notify(free[0], me - 1)",
        'comm.notify(free[0], me - 1, op="set")',
        "only count up",
    ),
    "a cycle": (
        QUEUE,
        "comm.wait(free[0], t - PLACES + 1)",
        "comm.wait(free[0], t + 1)",
        "must not block each other",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_planted_fault_is_found(fault, devices):
    """The message has the rule and a line of the example; a race also task, tile and both devices."""
    if fault == "two writers" and devices == 2:
        pytest.skip("each tile has one writer")
    name, right, wrong, rule = FAULTS[fault]
    path = EXAMPLES / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1
    names = {"__name__": name}
    exec(compile(text.replace(right, wrong), str(path), "exec"), names)
    with pytest.raises(tw.TilewiseError) as error:
        if name == QUEUE:
            names["main"](devices)
        else:
            sizes = (names["M"], names["K"]), (names["N"], names["K"])
            names["run"](devices, *(np.zeros(size, np.float32) for size in sizes))
    message = str(error.value)
    assert re.search(rule, message, re.DOTALL) and f"{path}:" in message, message
    if "without an order" in message:
        assert len({*re.findall(r"on device (\d)", message)}) == 2 and "tile " in message
