"""All-gather + matmul on two hosts, one device each, over a link on which transfer takes as long as the products.

The hosts are network namespaces of this machine, joined by a switch (tests/support/hosts.py), so they
share its cores. They reach each other through MPICH (`pip install mpich`). Part `hosts` of run.py
measures here, in this order:

1. the products of the shape with all data present; each host's sending rate is then limited so that
   plain TCP sockets need as long for the bytes that the all-gather puts;
2. those sockets: both hosts send and receive at the same time, after a pause in which the limiter's
   burst has refilled. Gives the transfer's time, and the processor time of a host for it. (The system
   does a part of TCP's work in interrupts, which it charges to no process, so this is less than all.);
3. the programs of examples 08 (puts) and 11 (reads in place), a program that reads with a few tiles in
   flight, example 08 with all tiles gathered before the first product (plain), the products and the
   transfers alone, in turns.

Messages from one process to another stay in order. So a request, a signal or a confirmation arrives only
after all tiles that the same process has sent before. If all tiles are sent at once, it waits for the
whole transfer; with a few tiles in flight, only for those.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # hosts to try
from figures import Figure, show
from operators import Example, Sizes
from turns import Times, take_turns

import tilewise as tw
from support.hosts import Hosts, missing
from tilewise import comm

NAMES = "all-gather + matmul", "rank swizzle"
FEW, NUM_SLOTS = "few tiles in flight", 4
SIZES = Sizes(m=1024, k=2048, n=2048, rows=32)
MUST, GOAL = 1.25, 1.1
PORT, EXCHANGES, PAUSE_S = 4321, 12, 0.01
CHUNK = 1 << 18
PATIENCE_S = 60.0


# ---- plain sockets ---------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Seconds in which a host sends and receives so many bytes, and of processor time for that."""

    wall_s: float
    processor_s: float


def exchange(connection: socket.socket, num_bytes: int) -> Exchange:
    """Send and receive at the same time, several times. Returns medians."""
    data, memory = bytes(num_bytes), bytearray(CHUNK)
    rows = []
    for _ in range(EXCHANGES):
        time.sleep(PAUSE_S)
        connection.sendall(b"!")  # both begin together
        connection.recv(1)
        began, used = time.perf_counter(), time.process_time()
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        left = num_bytes
        while left:
            left -= connection.recv_into(memory, min(left, CHUNK))
        sender.join()
        rows.append(Exchange(time.perf_counter() - began, time.process_time() - used))
    return Exchange(*(statistics.median(column) for column in zip(*rows)))


@contextmanager
def connected(server: str) -> Iterator[socket.socket]:
    """A connection to a server; with an empty name, the server's side."""
    if not server:
        with socket.create_server(("", PORT)) as listening:
            connection = listening.accept()[0]
    else:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                connection = socket.create_connection((server, PORT), PATIENCE_S)
                break
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def exchange_between(hosts: Hosts, num_bytes: int) -> Exchange:
    """Means over both hosts."""
    command = [sys.executable, __file__, "--exchange", str(num_bytes)]
    servers = ["", hosts.addresses[0]]
    running = [
        hosts.start(hosts.inside(name, [*command, "--server", server]))
        for name, server in zip(hosts.names, servers)
    ]
    said = [process.communicate(timeout=PATIENCE_S) for process in running]
    for process, (_, err) in zip(running, said):
        if process.returncode:
            sys.exit(f"a socket's side has failed: {err}")
    return Exchange(*(statistics.mean(column) for column in zip(*(json.loads(out) for out, _ in said))))


# ---- programs --------------------------------------------------------------------------------------------


@tw.tile_program
def plain(x: Any, gathered: Any, w: Any, out: Any, ready: Any, rows: int) -> None:
    """As example 08, but products begin when all tiles have arrived."""
    me = comm.rank()
    tiles = x.shape[0] // rows
    remote = comm.symm_at(gathered, 1 - me)
    for t in comm.tiles(tiles):
        mine = me * tiles + t
        comm.put_signal(remote.tile(mine, rows=rows), x.tile(t, rows=rows), ready[0])
    token = comm.wait(ready[0], tiles)
    own, theirs = comm.consume_token(x, token), comm.consume_token(gathered, token)
    for t in comm.tiles(tiles):
        comm.matmul(out.tile(me * tiles + t, rows=rows), own.tile(t, rows=rows), w)
    for t in comm.tiles(tiles):
        number = (1 - me) * tiles + t
        comm.matmul(out.tile(number, rows=rows), theirs.tile(number, rows=rows), w)


@tw.tile_program
def few_in_flight(x: Any, gathered: Any, w: Any, out: Any, rows: int) -> None:
    """Each device reads the other's tiles into a few slots, each when the product before has left it."""
    me = comm.rank()
    tiles = x.shape[0] // rows
    remote = comm.symm_at(x, 1 - me)
    for t in range(tiles):
        slot = gathered.tile(t % NUM_SLOTS, rows=rows)
        comm.get(slot, remote.tile(t, rows=rows))
        comm.matmul(out.tile(me * tiles + t, rows=rows), x.tile(t, rows=rows), w)
        comm.matmul(out.tile((1 - me) * tiles + t, rows=rows), slot, w)


def be_leader(seconds: float, is_alone: bool) -> None:
    """Measure in both processes of the group, and print the seconds of each turn."""
    with ExitStack() as opened:
        opened.enter_context(tw.ProcessGroup())
        example = Example(NAMES[0], SIZES, opened)
        calls = {"products": example.calls["products"]}
        wanted = example.result_of(calls["products"])
        if not is_alone:
            calls["copies"] = example.calls["copies"]
            calls["plain"] = lambda: plain(*example.arguments, SIZES.rows)
            calls |= {name: example.also(name) for name in NAMES}
            calls[FEW] = lambda: few_in_flight(*example.arguments[:-1], SIZES.rows)
            for name in ("plain", *NAMES, FEW):
                if not np.array_equal(example.result_of(calls[name]), wanted):
                    sys.exit(f"{name}: the program must have the bits of the products alone; it has others")
        times = take_turns(calls, time.monotonic() + seconds)
        print(json.dumps({"bytes": example.copied_bytes, "times": times}))
        if not is_alone:
            print(json.dumps({name: example.group.trace(calls[name]).summary() for name in (*NAMES, FEW)}))


def run_on(hosts: Hosts, seconds: float, *options: str) -> list[Any]:
    """What the leader prints."""
    words = [sys.executable, __file__, "--lead", str(seconds), *options]
    done = hosts.run(words, timeout_s=seconds + PATIENCE_S)
    if done.returncode:
        sys.exit(f"two hosts: {done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- the comparison --------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, ends_at: float) -> None:
    """Shape the link, and compare."""
    reason = missing()
    if reason:
        print(f"hosts is left out: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, Hosts(folder) as hosts:
        (alone,) = run_on(hosts, 2.0, "--alone")
        products_s = statistics.median(alone["times"]["products"])
        rate = alone["bytes"] / products_s
        for _ in range(2):  # the first time shows what headers and waiting add
            hosts.shape(f"{rate * 8:.0f}bit")
            tcp = exchange_between(hosts, alone["bytes"])
            rate *= tcp.wall_s / products_s
        measured, profiles = run_on(hosts, max(3.0, ends_at - time.monotonic()))
        show_hosts(measured["times"], measured["bytes"], tcp, profiles)


def show_hosts(times: Times, num_bytes: int, tcp: Exchange, profiles: dict[str, list[str]]) -> None:
    """The examples over their bound in each turn, with plain next to them."""
    ms = {name: statistics.median(of) * 1e3 for name, of in times.items()}
    print(
        f"  products {ms['products']:.1f} ms; {num_bytes / 2**20:.0f} MiB each way: by sockets {tcp.wall_s * 1e3:.1f} "
        f"ms with {tcp.processor_s * 1e3:.1f} ms of a processor, by put {ms['copies']:.1f} ms; "
        f"{len(times['products'])} turns"
    )
    larger = [max(s, tcp.wall_s) for s in times["products"]]

    def over(name: str, added_s: float) -> float:
        return statistics.median(s / (bound + added_s) for s, bound in zip(times[name], larger))

    peers = {"plain": over("plain", tcp.processor_s)}
    for name in (*NAMES, FEW):
        must, goal = (None, None) if name == NAMES[1] else (MUST, GOAL)
        note = (
            f"{ms[name]:.1f} ms, plain {ms['plain']:.1f}; {over(name, 0):.2f} and {over('plain', 0):.2f} of "
            "max(products, transfer)"
        )
        value = over(name, tcp.processor_s)
        what = f"{name}, two hosts: over max + TCP"
        figure = Figure(what, value, "x", True, must, goal, limit=1, peers=peers, note=note)
        show(figure)
        if figure.verdict == "missed":
            for line in profiles[name]:
                print(f"  {line}")


def main() -> None:
    """Be one of two hosts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lead", type=float, metavar="SECONDS", help="measure programs for so long")
    parser.add_argument("--alone", action="store_true", help="only the products")
    parser.add_argument("--exchange", type=int, metavar="BYTES", help="by plain sockets")
    parser.add_argument("--server", default="", help="address of the other side; empty to wait for it")
    options = parser.parse_args()
    if options.exchange:
        with connected(options.server) as connection:
            print(json.dumps(exchange(connection, options.exchange)))
    elif options.lead:
        be_leader(options.lead, options.alone)
    else:
        parser.error("run run.py --only hosts")


if __name__ == "__main__":
    main()
