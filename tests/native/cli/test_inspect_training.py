"""`tilewise inspect train.toml`: memory by category, settings that make a run fit, FLOPs, bytes and time."""

from __future__ import annotations

import re

import pytest

from tilewise.cli.estimate import _seconds
from tilewise.plan.costs import DeviceCosts, KernelCost
from tilewise.train import check_config, find_savings, load_config, make_plan, need_per_device

PEAKS = ("--peak-tflops", 1, "--bandwidth-gbps", 100)
MODEL = """
[model]
vocab_size = 512
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
[data]
context = 64
"""


@pytest.fixture
def config(tmp_path):
    """A small configuration's file."""
    path = tmp_path / "train.toml"
    path.write_text(MODEL)
    return path


def size(text):
    """Bytes of a size in the format of `format_bytes`."""
    number, unit = text.split()
    return float(number) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def test_memory_is_that_of_the_plan_by_category(config, run):
    """Weights, gradients, optimizer state, activations and the checkpoint's copy add up to the plan's total."""
    config.write_text(MODEL + "[train]\noffload = 'optimizer'\n")
    code, out, err = run("inspect", config, *PEAKS)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    usage = make_plan(load_config(config))[1].estimate_memory_usage()[0]
    sizes = dict(re.findall(r"([a-z ]+) ([\d.]+ (?:KiB|MiB))", lines[2]))
    parts = {name.strip(): size(text) for name, text in sizes.items()}
    assert lines[0] == "parameters: 656,512 (llama), trained in bf16 on one device"
    assert lines[1].endswith(": fits") and "available on this machine" in lines[1]
    assert parts["checkpoint copy"] == pytest.approx(usage["checkpoints"], rel=0.01)
    assert parts["weights"] == pytest.approx(usage["parameters"], rel=0.01)
    assert sum(parts.values()) == pytest.approx(usage["total"], rel=0.01)
    assert "offloaded to a file of each device: 7.50 MiB" in lines[3] and "files: 7.50 MiB read" in out
    assert len(lines) == 8


def test_flops_are_those_of_the_model(config):
    """Six per weight and token plus causal attention, on one device or in total on several.
    Recomputation and a second pass over the vocabulary add theirs. Reads from peers equal the
    plan's traffic.
    """
    text = {"dtype": "f32", "batch": 8}
    for mesh, strategy, train in (
        ({}, "single", {}),
        ({"dp": 2}, "ddp", {"accumulation": 2}),
        ({"tp": 2}, "tensor_parallel", {}),
        ({"fsdp": 2}, "fsdp", {}),
        ({}, "single", {"recompute": "full"}),
    ):
        complete = load_config(config).model_dump(exclude_none=True)
        content = {
            **complete,
            "train": {**text, **train},
            "distribution": {"strategy": strategy, "mesh": mesh},
        }
        made = check_config(content, "the test")
        plan = make_plan(made)[1]
        costs = plan.costs()
        assert {*costs} == {*plan.kinds}
        cost = costs[0]
        weights = 4 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256) + 512 * 128
        tokens = 8 * 64
        expected = tokens * (6 * weights + 3 * 4 * 2 * 64 * 128)
        matrix = sum(c.flops for name, c in cost.kernels.items() if re.match("matmul|attention", name))
        matrix *= plan.mesh.num_devices
        if train.get("recompute") == "full":
            assert 1.15 * expected < matrix < 1.4 * expected
        else:
            assert expected < matrix < 1.08 * expected
        assert cost.flops >= matrix / plan.mesh.num_devices and cost.num_bytes > 12 * weights
        elements = sum(moved[0] for moved in plan.traffic().values())
        assert 4 * elements <= cost.peer_bytes <= 4.1 * elements  # sums of squares have 8 bytes


def test_time_is_that_of_what_bounds_each_kernel(config, run):
    """With fast cores, memory bounds a step; with fast memory, computation does; the parts add up."""
    for peaks, bound in (((1000, 1), "memory"), ((0.01, 1000), "compute")):
        out = run("inspect", config, "--peak-tflops", peaks[0], "--bandwidth-gbps", peaks[1])[1]
        line = re.search(rf"  {bound} bound: compute (.*), memory (.*), communication (.*)", out)
        seconds = [float(t.split()[0]) * (1 if t.endswith(" s") else 1e-3) for t in line.groups()]
        total = re.search(r"about ([\d.]+) (m?s), ([\d,]+) tokens/s", out)
        about = float(total[1]) * (1 if total[2] == "s" else 1e-3)
        assert about == pytest.approx(sum(seconds), rel=0.01, abs=1e-3)
        assert float(total[3].replace(",", "")) == pytest.approx(512 / about, rel=0.02)
        assert "(given)" in out
    both = DeviceCosts({"a": KernelCost(1, 2, 3), "b": KernelCost(10, 20, 30)})
    assert (both.flops, both.num_bytes, both.peer_bytes) == (11, 22, 33)


@pytest.mark.slow
def test_suggested_settings_make_a_run_fit(config, run, tmp_path):
    """Each setting is accepted by the command line; those said to fit do fit, others do not."""
    plan = make_plan(load_config(config))[1]
    need = plan.estimate_memory_usage()[0]["total"]
    limit = need - plan.checkpoint_bytes[0] // 2
    code, out, _ = run("inspect", config, "--device-memory", limit, *PEAKS)
    assert code == 0 and "does not fit, by" in out
    rows = re.findall(r"^ +([\d.]+ \w+) (fits|does not fit) +(--set .*)$", out, re.MULTILINE)
    assert {"output.checkpoint_in_background=false", "train.offload=optimizer"} <= {
        text.removeprefix("--set ") for _, verdict, text in rows if verdict == "fits"
    }
    assert "fsdp" in out
    assert [verdict for _, verdict, _ in rows] == sorted((v for _, v, _ in rows), reverse=True)
    for text, verdict, settings in rows:
        changed = load_config(config, [s.strip("' ") for s in settings.split("--set ")[1:]])
        savings = make_plan(changed)[1].estimate_memory_usage()[0]["total"]
        assert size(text) == pytest.approx(savings, rel=0.01) and (savings <= limit) == (verdict == "fits")
    savings = find_savings(load_config(config), need_per_device, 1, more_devices=False)
    assert not any(saving.fits for saving in savings)
    assert savings[-1].need_bytes <= min(saving.need_bytes for saving in savings)
    # the last row is all of them together
    assert len(savings[-1].settings) == sum(len(saving.settings) for saving in savings[:-1])
    out = run("inspect", config, "--device-memory", "1M", *PEAKS)[1]
    assert "use a smaller model, batch or context" in out


def test_short_times_are_in_microseconds():
    """Milliseconds are used from a tenth of a millisecond on."""
    texts = [_seconds(value) for value in (2e-6, 9.994e-4, 1e-3, 1.5)]
    assert texts == ["2.0 us", "999.4 us", "1.0 ms", "1.50 s"]
