"""What a traced program cannot be is refused with the line of the user's file and what to write
instead; what is wrong with it is named with both devices.
"""

import inspect
import re

import pytest

import tilewise as tw
from tilewise import comm

ROWS, COLS = 4, 16


def refused(function, *, devices=2, arguments=()):
    """The message with which a program is refused."""
    with tw.DeviceGroup({"tp": devices}, memory_bytes=1 << 20, num_signals=64) as group:
        x, y = (group.symm_tensor((4 * ROWS, COLS)) for _ in range(2))
        with pytest.raises(tw.TilewiseError) as error:
            tw.tile_program(function)(x, y, group.signals(8), *arguments)
    return str(error.value)


def marked_lines(function):
    """The lines of a function that end in a comment `here`."""
    lines, first = inspect.getsourcelines(function)
    return [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# here")]


def loop_over_data(x, y, s):
    while x:  # here
        pass


def count_by_rank(x, y, s):
    for _ in range(comm.rank()):  # here
        pass


def branch_in_loop(x, y, s):
    for t in comm.tiles(4):
        if t == 0:  # here
            comm.notify(s[0], 0)


def break_in_loop(x, y, s):
    for _ in comm.tiles(4):  # here
        break


def set_a_counter(x, y, s):
    comm.notify(s[0], 1, 3, op="set")  # here


def wait_for_equality(x, y, s):
    comm.wait(s[0], 3, cmp="eq")  # here


def swap_decides(x, y, s):
    if comm.compare_swap(s[0], 0, 0, 1) == 0:  # here
        comm.notify(s[1], 0)


def add_decides(x, y, s):
    comm.fetch_add(s[0], 0)  # here


def first_decides(x, y, s):
    comm.wait_any(s[0:2])  # here


def token_leaves_loop(x, y, s):
    for t in comm.tiles(4):
        token = comm.wait(s[t])
    comm.kernel("copy", out=x, x=comm.consume_token(y, token))  # here


def rows_outside(x, y, s):
    me = comm.rank()
    comm.kernel("copy", out=x[:ROWS], x=y[me * 3 * ROWS + ROWS : me * 3 * ROWS + 2 * ROWS])  # here


def columns_outside(x, y, s):
    first = comm.rank() * COLS
    comm.kernel("copy", out=x[:, :8], x=y[:, first : first + 8])  # here


def rank_outside(x, y, s):
    comm.put(comm.symm_at(x, comm.rank() + 1), y)  # here


def signal_outside(x, y, s):
    comm.notify(s[comm.rank() * 8], 0)  # here


def shapes_differ(x, y, s):
    comm.get(x[:ROWS], comm.symm_at(y, 0)[: 2 * ROWS])  # here


def sizes_differ(x, y, s):
    comm.kernel("add", out=x[:ROWS], a=x[:ROWS], b=y[: 2 * ROWS])  # here


def unknown_kernel(x, y, s):
    comm.kernel("add_up", out=x, a=x, b=y)  # here


def beyond_the_tiles(x, y, s):
    comm.kernel("rope", out=x, x=y, table=x, head_dim=4, inverse=0)  # here


def inner_sizes_differ(x, y, s):
    comm.kernel("gemm", out=x, a=x, b=y[:ROWS], trans_a=0, trans_b=1, accumulate=0)  # here


def ranges_beyond_k(x, y, s):
    comm.kernel("matmul", out=x, a=[x], w=[y], num_k_splits=1, range=[0, COLS + 8])  # here


def unknown_axis(x, y, s):
    comm.rank("pp")  # here


def wait_inside_of_a_device(x, y, s):
    comm.notify(s[0], (comm.rank() + 1) % 2)
    comm.wait(s[0], scope="gpu")  # here


def lost_signal(x, y, s):
    if comm.rank() == 0:
        comm.notify(s[0], 1)
    else:
        comm.wait(s[0], 2)  # here


REFUSED = {
    loop_over_data: ("does not see values of tensors", "compute with kernels"),
    count_by_rank: ("must be known while the program is traced", "comm.tiles"),
    branch_in_loop: ("must not depend on the index of a tile loop", r"range\(\)"),
    break_in_loop: ("must run all its iterations", "a break"),
    set_a_counter: ("only count up", 'op="add"'),
    wait_for_equality: ("only count up", 'cmp="ge"'),
    swap_decides: ("known only while it runs", "compare_swap.*decide by rank"),
    add_decides: ("known only while it runs", "divide the work by rank"),
    first_decides: ("known only while it runs", "wait for each signal"),
    token_leaves_loop: ("inside of the tile loop of its wait", "wait again"),
    rows_outside: ("within the 16 rows", r"\[16:20\]"),
    columns_outside: ("within the 16 columns", r"\[0:24\]"),
    rank_outside: ("a rank must be between 0 and 1", "got 2"),
    signal_outside: ("a signal's index must be between 0 and 7", "got 8"),
    shapes_differ: ("one shape and dtype", r"f32\[8, 16\] into f32\[4, 16\]"),
    sizes_differ: ("must be one size|as many rows", "kernel 'add'"),
    unknown_kernel: ("must be one of the kernel table", "add_up"),
    beyond_the_tiles: ("use nothing besides their tiles", "tw.tile_kernel"),
    inner_sizes_differ: ("sizes of a product must agree", r"\[16, 16\] and \[4, 16\]"),
    ranges_beyond_k: ("must lie in 16 elements", r"\(0, 24\)"),
    unknown_axis: ("an axis must be one of tp", "pp"),
    wait_inside_of_a_device: ('scope "gpu"', 'scope="sys"'),
    lost_signal: ("as often as the program waits for", "1 posts of s\\[0\\] of device 1.* a wait for 2"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_refusal_names_the_line_and_the_way_out(function):
    """Nothing runs, and the message has file, line, rule and advice."""
    message = refused(function)
    (line,) = marked_lines(function)
    assert f"{__file__}:{line}" in message, message
    for part in REFUSED[function]:
        assert re.search(part, message, re.DOTALL), message


# ---- races and signals of programs that would run ---------------------------------------------------------


def ring(fault):
    """Each device sends two tiles to the next one through one place, and adds them up."""

    def program(x, y, s):
        me, n = comm.rank(), comm.num_ranks()
        to, source = (me + 1) % n, (me + n - 1) % n
        remote = comm.symm_at(y, to)
        for t in range(2):
            if t and fault != "acknowledgement":
                remote = comm.consume_token(remote, comm.wait(s[1], t))
            comm.put_signal(remote[:ROWS], x.tile(t, rows=ROWS), s[0])  # here
            token = comm.wait(s[0], t + (fault != "epoch" or t == 0))
            tile = y[:ROWS] if fault == "token" else comm.consume_token(y, token)[:ROWS]
            comm.kernel("add", out=x[2 * ROWS : 3 * ROWS], a=x[2 * ROWS : 3 * ROWS], b=tile)  # here
            if fault == "cycle" and t == 0:
                comm.wait(s[2])
                comm.notify(s[2], to)
            if t == 0 or fault == "doubled":
                comm.notify(s[1], source, 1 + (fault == "doubled"))

    return program


@pytest.mark.parametrize(
    "fault, rule",
    [
        ("acknowledgement", "must not be overwritten before its readers have acknowledged"),
        ("token", "must be read after a wait for its signal"),
        ("epoch", "must be read after a wait|posted as often"),
        ("doubled", "posted as often as the program waits for; got .* posts too many"),
        ("cycle", "wait"),
    ],
)
def test_planted_faults_are_found(fault, rule):
    """Each fault of a ring of three devices is found, and races name both lines and devices."""
    message = refused(ring(fault), devices=3)
    assert re.search(rule, message), message
    if "without an order" in message:
        put, add = marked_lines(ring)
        assert f"{__file__}:{put}" in message and f"{__file__}:{add}" in message
        assert len({*re.findall(r"on device (\d)", message)}) == 2
        assert re.findall(r"tile \d", message)


def test_the_ring_without_faults_runs():
    """The program into which faults are planted is accepted, and right."""
    with tw.DeviceGroup({"tp": 3}, memory_bytes=1 << 20, num_signals=64) as group:
        x, y = (group.symm_tensor((4 * ROWS, COLS)) for _ in range(2))
        for device in range(3):
            x.numpy(device)[:] = device
        tw.tile_program(ring(None))(x, y, group.signals(8))
        assert [x.numpy(device)[2 * ROWS, 0] for device in range(3)] == [0 + 4, 1 + 0, 2 + 2]
