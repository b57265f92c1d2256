"""Programs on `comm.local` that run native kernels: all-gather + matmul and matmul + reduce-scatter of
Triton-distributed's tutorials 07 and 08, and calls of kernels by the names of their operands.
"""

import ml_dtypes
import numpy as np
import pytest

from tilewise import comm
from tilewise.core.errors import PlanError
from tilewise.kernels.isa import run_named

M, K, N, TILE = 8, 16, 12, 2  # rows per device; rows per tile
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


def random(seed, shape, dtype):
    """Numbers of one dtype."""
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY[dtype])


def matmul(out, x, w):
    """One product on the calling device."""
    comm.kernel("matmul", out=out, a=[x], w=[w], num_k_splits=1, range=[0, K])


def gather_and_multiply(x, w, whole, out, arrived, has_waits=True):
    """All-gather + matmul by tiles: each device starts with its own rows, and computes each tile when it has come."""
    me, n = comm.rank(), comm.num_ranks()
    per_device = M // TILE
    own = comm.symm_at(x, me)
    for tile in comm.tiles(per_device):
        for peer in comm.tiles(n, first=me):
            place = comm.symm_at(whole, peer).tile(me * per_device + tile, rows=TILE)
            comm.put_signal(place, own.tile(tile, rows=TILE), arrived[me * per_device + tile])
    for tile in comm.tiles(n * per_device, first=me * per_device):
        rows = whole.tile(tile, rows=TILE)
        if has_waits:
            rows = comm.consume_token(rows, comm.wait(arrived[tile]))
        matmul(out.tile(tile, rows=TILE), rows, w)


def multiply_and_scatter(x, w, partial, parts, out, arrived):
    """Matmul + reduce-scatter by tiles: each partial product goes to the device that owns its rows."""
    me, n = comm.rank(), comm.num_ranks()
    per_device = M // TILE
    for tile in comm.tiles(n * per_device, first=(me + 1) * per_device):
        matmul(partial.tile(tile, rows=TILE), x.tile(tile, rows=TILE), w)
        owner, row = tile // per_device, tile % per_device
        place = comm.symm_at(parts, owner).tile(me * per_device + row, rows=TILE)
        comm.put_signal(place, partial.tile(tile, rows=TILE), arrived[me * per_device + row])
    for tile in comm.tiles(per_device):
        signals = [arrived[device * per_device + tile] for device in range(n)]
        token = comm.wait_all(signals)
        tiles = [parts.tile(device * per_device + tile, rows=TILE) for device in range(n)]
        comm.kernel(
            "tree_add", out=out.tile(tile, rows=TILE), x=[comm.consume_token(t, token) for t in tiles]
        )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("count", [2, 4])
def test_all_gather_and_matmul(count, dtype):
    """Equal to one product of all rows, to the bit."""
    x, w = random(0, (count * M, K), dtype), random(1, (N, K), dtype)
    expected = np.zeros((count * M, N), np.float32)
    run_named("matmul", {"out": expected, "a": [x], "w": [w], "num_k_splits": 1, "range": [0, K]})

    def is_equal(delays, has_waits):
        devices = comm.local(count, delays=delays)
        shard, weight = devices.symm_tensor((M, K), dtype), devices.symm_tensor((N, K), dtype)
        whole, out = devices.symm_tensor((count * M, K), dtype), devices.symm_tensor((count * M, N))
        for device in range(count):
            shard.numpy(device)[:] = x[device * M : (device + 1) * M]
            weight.numpy(device)[:] = w
        arrived = devices.signals(count * M // TILE)
        devices.run(gather_and_multiply, shard, weight, whole, out, arrived, has_waits)
        return all(np.array_equal(out.numpy(device), expected) for device in range(count))

    assert all(is_equal(delays, has_waits=True) for delays in (None, 0, 1, 2))
    assert not all(is_equal(delays, has_waits=False) for delays in range(6))


@pytest.mark.parametrize("count", [2, 4])
def test_matmul_and_reduce_scatter(count):
    """Equal to products of all rows, added in the fixed tree, to the bit."""
    x = [random(device, (count * M, K), "f32") for device in range(count)]
    w = [random(10 + device, (N, K), "f32") for device in range(count)]
    products = [np.zeros((count * M, N), np.float32) for _ in range(count)]
    for product, rows, weight in zip(products, x, w):
        run_named("matmul", {"out": product, "a": [rows], "w": [weight], "num_k_splits": 1, "range": [0, K]})
    expected = np.zeros((count * M, N), np.float32)
    run_named("tree_add", {"out": expected, "x": products})
    for delays in (None, 0, 1, 2):
        devices = comm.local(count, delays=delays)
        shape = (count * M, N)
        partial, parts, out = (devices.symm_tensor(s) for s in (shape, shape, (M, N)))
        rows, weight = devices.symm_tensor((count * M, K)), devices.symm_tensor((N, K))
        for device in range(count):
            rows.numpy(device)[:], weight.numpy(device)[:] = x[device], w[device]
        arrived = devices.signals(count * M // TILE)
        devices.run(multiply_and_scatter, rows, weight, partial, parts, out, arrived)
        for device in range(count):
            assert np.array_equal(out.numpy(device), expected[device * M : (device + 1) * M])


def test_packed_results_are_unpacked():
    """A gradient of a weight is computed in panels, and returned as a matrix."""
    dy, x = random(0, (6, N), "f32"), random(1, (6, K), "f32")
    out = np.zeros((N, K), np.float32)
    run_named("matmul_dw", {"out": out, "dy": dy, "x": x, "split_rows": 6, "vocab_begin": 0, "padded_len": 0})
    assert np.allclose(out, dy.T @ x, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("matmull", {}, "a kernel must be one of"),
        ("copy", {"out": 0, "y": 0}, "the arguments of 'copy' are out, x; got 'y'"),
        ("copy", {"out": np.zeros((1, 2), np.float32)}, "'copy' needs the argument 'x'"),
        ("copy", {"out": np.zeros((1, 2)), "x": np.zeros((1, 2))}, "the dtypes of 'copy' are those of"),
        (
            "copy",
            {"out": np.zeros((1, 2), np.float32), "x": np.zeros((1, 2))},
            "operand 'x' must have the dtype f32",
        ),
        ("copy", {"out": 1, "x": 2}, "an operand must be a ndarray"),
        (
            "copy_pairs",
            {"dst": [np.zeros((1, 2), np.float32)], "src": []},
            "equal lengths; got 1 of 'dst', 0 of 'src'",
        ),
        (
            "matmul",
            {"out": np.zeros((1, 2), np.float32), "num_k_splits": [1], "range": []},
            "'num_k_splits' must be an integer",
        ),
    ],
)
def test_invalid_calls_of_kernels_are_refused(kernel, arguments, message):
    """Names, dtypes and lengths, as the table declares them."""
    with pytest.raises(PlanError, match=message):
        run_named(kernel, arguments)
