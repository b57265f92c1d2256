"""A script for several processes that a launcher has started: comparisons that tests of `tests/ranks` own, by name.

`python run_comparisons.py NAME...` under mpiexec. Every name ends with the number of devices that it has. The first
process runs them under an open group and writes a line of JSON for each: its name, whether it held, and what it said.
"""

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import tilewise as tw
from tilewise.comm import active_group

__all__ = ["COMPARISONS"]

SHARDED = ("reduce", "reshard", "prefetch", "workers", "dtype", "tied", "recompute", "offload")
"""What a case of `test_sharded_state` says after its mesh and its microbatches."""


def trains(dtype, axes, accumulation=1):
    import test_strategies_equal

    test_strategies_equal.test_training_equals_one_device(dtype, axes, accumulation)


def pipelines(*case):
    import test_pipelines

    equal, text = test_pipelines.compare(case)
    assert equal, text


def finds(label, fault, axes):
    import small_llama
    import test_strategies_equal

    test_strategies_equal.test_planted_faults_are_detected("f32", axes, 1, label, getattr(small_llama, fault))


def finds_on_the_last(label, fault, axes):
    """A fault on a device of the last process alone is detected."""
    import test_strategies_equal

    change = getattr(test_strategies_equal, fault)
    test_strategies_equal.test_different_replicas_are_detected(axes, label, change)


def sharded(mesh, microbatches=1, fault="", **changes):
    """Whether a run whose state is cut equals one device; with a fault it must not."""
    import small_llama
    import test_sharded_state

    import tilewise.strategy.offload as offload

    offload._LEAST_BYTES = 256  # as in the tests that own the cases
    defaults = {"reduce": "microbatch", "reshard": True, "prefetch": 1, "workers": 1, "dtype": "f32"}
    defaults |= {"tied": False, "recompute": "none", "offload": "none"} | changes
    case = (mesh, microbatches, *(defaults[name] for name in SHARDED))
    change = (lambda plan: plan) if not fault else small_llama.change_first(*given_fault(fault))
    equal, text = test_sharded_state.compare(case, change)
    assert equal == (not fault), text


def given_fault(name):
    """A fault in parts of storage shards, with arguments of `change_first`."""
    import small_llama

    return "linear_dw:mlp.up_proj.weight/reduce_scatter", getattr(small_llama, name)


def writes(family, tp):
    import test_families

    for dtype in ("f32", "bf16"):
        expected = test_families.logits(family, dtype, 1, [20])
        for parts in ([20], [17, 1, 1, 1]):
            assert expected.tobytes() == test_families.logits(family, dtype, tp, parts).tobytes(), (
                dtype,
                parts,
            )


def texts(tp, dtype, fault=""):
    """Tokens, texts and log probabilities of the engine equal those of one device to the bit, or not with a fault."""
    import small_llama

    from native.serve.serving_models import save_model

    plan = tw.ComputeGraph.plan
    change = small_llama.change_first(
        "o_proj.weight/reduce_scatter", getattr(small_llama, fault or "skip"), -1, "forward"
    )

    def plan_with_fault(graph, *args, **named):
        made = plan(graph, *args, **named)
        return change(made) if made.mesh.num_devices > 1 else made

    with TemporaryDirectory() as folder:
        directory = save_model(Path(folder, "model"))
        alone = written(directory, 1, dtype)
        with mock.patch.object(tw.ComputeGraph, "plan", plan_with_fault if fault else plan):
            together = written(directory, tp, dtype)
    assert (together == alone) == (not fault), (together, alone)


def written(directory, tp, dtype):
    """A model's output: greedy after a prompt of two chunks, two sampled texts after a short one."""
    from tilewise.serve import LLM, SamplingParams

    prompts = [[number % 250 + 1 for number in range(150)], "def f(x):"]
    ways = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, logprobs=2, ignore_eos=True),
    ]
    with LLM(directory, tensor_parallel_size=tp, dtype=dtype, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, ways, use_tqdm=False)
    rows = []
    for output in outputs:
        rows += [(row.text, row.token_ids, bits_of(row.logprobs)) for row in output.outputs]
        rows.append(bits_of(output.prompt_logprobs))
    assert sum(len(row[1]) for row in rows if len(row) == 3) == 36
    return rows


def bits_of(logprobs):
    """Of each token: every candidate's id, rank and the bits of its log probability."""
    return [
        None if of is None else [(token, of[token].rank, of[token].logprob.hex()) for token in of]
        for of in logprobs or []
    ]


def counts(axes):
    """Transfers of all processes equal the plan's, and its bytes are allocated."""
    import test_counts

    test_counts.test_counted_transfers_equal_the_plan(axes)
    test_counts.test_planned_bytes_are_allocated_bytes(axes, "bf16")


def fetched(graph, plan, batch):
    with graph.instantiate(plan) as running:
        running.initialize(0)
        executor = running._executor
        before = executor.stats()["bytes_fetched"]
        running.step(batch, 1e-3)
        return executor.stats()["bytes_fetched"] - before


def hosts_of(plan):
    """Per device of a plan, the host of its process."""
    group = active_group()
    return [group.hosts[process] for process in group.processes_of(plan.mesh.num_devices)]


def fetches(axes, dtype, **changes):
    """Bytes that tasks have fetched from other hosts equal the plan's reads there."""
    import small_llama

    model = small_llama.config(**changes)
    graph = small_llama.training_graph(model, dtype)
    plan = graph.plan(axes)
    require_bytes(graph, plan, small_llama.batches(model, 1)[0])


def fetches_shards(dtype, **changes):
    """The same for state that is cut over two devices."""
    import small_llama
    import test_sharded_state

    model = test_sharded_state.model_of(**changes)
    graph = test_sharded_state.graph_of(model, 4, dtype)
    graph.set_distribution(tw.DistributionStrategy.fsdp(2))
    batch = small_llama.batches(model, 1, 4, test_sharded_state.SEQ)[0]
    require_bytes(graph, graph.plan(batch_splits=4), batch)


def require_bytes(graph, plan, batch):
    """Fetched bytes equal the plan's; none where all processes are on one host."""
    from support.connection_bytes import planned_bytes

    hosts = hosts_of(plan)
    num_bytes, planned = fetched(graph, plan, batch), planned_bytes(plan, hosts)
    assert num_bytes == planned and (num_bytes > 0) == (len(set(hosts)) > 1), (num_bytes, planned)


def misses_bytes():
    """A part that is not fetched is missing in the count of bytes."""
    import small_llama
    import test_strategies_equal

    from support.connection_bytes import planned_bytes

    model = small_llama.config()
    graph = small_llama.training_graph(model, "f32")
    plan = graph.plan({"dp": 2})
    label = "mlp.up_proj.weight/all_gather"
    changed = small_llama.change_first(label, test_strategies_equal.gather_own, -1)(plan)
    num_bytes = fetched(graph, changed, small_llama.batches(model, 1)[0])
    planned = planned_bytes(plan, hosts_of(plan))
    assert num_bytes < planned or planned == 0, (num_bytes, planned)


def resumes(axes, saved):
    """A state that was saved on one mesh continues over another, as on one device."""
    import small_llama

    model = small_llama.config()
    data = small_llama.batches(model, 4)
    states = []
    for first, then in (({}, {}), (saved, axes)):
        graph = small_llama.training_graph(model, "bf16")
        with graph.instantiate(graph.plan(first)) as running:
            running.initialize(0)
            for batch in data[:2]:
                running.step(batch, 1e-3)
            state = running.state_dict()
        with graph.instantiate(graph.plan(then)) as running:
            running.load_state_dict(state)
            for batch in data[2:]:
                running.step(batch, 1e-3)
            states.append(running.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.tobytes() == states[1][name].tobytes(), name


PARTIAL_VALUES = "linear_dw:mlp.up_proj.weight/reduce_scatter"
COMPARISONS = {
    "dp f32 2": partial(trains, "f32", {"dp": 2}),
    "dp bf16 accumulated 2": partial(trains, "bf16", {"dp": 2}, 4),
    "tp f32 2": partial(trains, "f32", {"tp": 2}),
    "tp bf16 2": partial(trains, "bf16", {"tp": 2}),
    "tp f32 4": partial(trains, "f32", {"tp": 4}),
    "tp bf16 accumulated 4": partial(trains, "bf16", {"tp": 4}, 4),
    "dp bf16 4": partial(trains, "bf16", {"dp": 4}),
    "dp tp f32 4": partial(trains, "f32", {"dp": 2, "tp": 2}),
    "dp tp bf16 accumulated 4": partial(trains, "bf16", {"dp": 2, "tp": 2}, 4),
    "fsdp f32 2": partial(sharded, (1, 2, 1)),
    "fsdp bf16 step 2": partial(sharded, (1, 2, 1), 2, reduce="step", dtype="bf16", workers=2),
    "fsdp offloaded optimizer 2": partial(sharded, (1, 2, 1), 2, offload="optimizer", dtype="bf16"),
    "fsdp offloaded parameters 2": partial(sharded, (1, 2, 1), 1, offload="parameters"),
    "fsdp offloaded activations 2": partial(sharded, (1, 2, 1), 1, offload="activations", recompute="full"),
    "fsdp f32 3": partial(sharded, (1, 3, 1), 2, prefetch=3),
    "fsdp bf16 4": partial(sharded, (1, 4, 1), 2, dtype="bf16", reshard=False),
    "dp fsdp offloaded 4": partial(sharded, (2, 2, 1), 2, offload="optimizer", reduce="step"),
    "fsdp tp offloaded 4": partial(sharded, (1, 2, 2), 1, offload="parameters", tied=True),
    "writing 2": partial(writes, "qwen3", 2),
    "writing 4": partial(writes, "gemma2", 4),
    "texts f32 2": partial(texts, 2, "f32"),
    "texts bf16 2": partial(texts, 2, "bf16"),
    "texts bf16 4": partial(texts, 4, "bf16"),
    "texts with a dropped partial 2": partial(texts, 2, "f32", "drop_partial"),
    "resumed 2": partial(resumes, {"tp": 2}, {"dp": 2}),
    "resumed 4": partial(resumes, {"dp": 2, "tp": 2}, {"tp": 4}),
    "counts dp 2": partial(counts, {"dp": 2}),
    "counts tp 4": partial(counts, {"tp": 4}),
    "counts dp tp 4": partial(counts, {"dp": 2, "tp": 2}),
    "bytes dp f32 2": partial(fetches, {"dp": 2}, "f32"),
    "bytes tp bf16 2": partial(fetches, {"tp": 2}, "bf16"),
    "bytes of odd sizes 2": partial(fetches, {"tp": 2}, "f32", vocab_size=330, intermediate_size=100),
    "bytes fsdp bf16 2": partial(fetches_shards, "bf16"),
    "bytes fsdp of odd sizes 2": partial(fetches_shards, "f32", vocab_size=450, intermediate_size=200),
    "bytes of a part that is not fetched 2": misses_bytes,
    "bytes dp tp bf16 4": partial(fetches, {"dp": 2, "tp": 2}, "bf16"),
    "bytes tp f32 4": partial(fetches, {"tp": 4}, "f32"),
    "pp bf16 2": partial(pipelines, "1f1b", 2, (), "zero 3", 4, "none", "none", True, "bf16"),
    "pp zero bubble fsdp f32 4": partial(
        pipelines, "zero_bubble", 2, ("fsdp", 2), "zero 3", 4, "none", "none", True, "f32"
    ),
    "dropped partial 2": partial(finds, PARTIAL_VALUES, "drop_partial", {"dp": 2}),
    "swapped partial values 4": partial(finds, "o_proj.weight/reduce_scatter", "swap_partials", {"tp": 4}),
    "swapped partial values of dp 4": partial(finds, PARTIAL_VALUES, "swap_partials", {"dp": 4}),
    "own part kept 2": partial(finds_on_the_last, "mlp.up_proj.weight/all_gather", "gather_own", {"dp": 2}),
    "part skipped 4": partial(finds_on_the_last, "mlp.up_proj.weight/all_gather", "skip", {"dp": 4}),
    "dropped partial of fsdp 3": partial(sharded, (1, 3, 1), fault="drop_partial"),
}


def run(name):
    """One of them: whether it held, and its message."""
    try:
        COMPARISONS[name]()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def main():
    """All the named ones, in this order."""
    with tw.ProcessGroup() as group:
        tests = Path(__file__).parents[1]
        sys.path[:0] = [str(tests), str(tests / "ranks")]
        group.start()
        for name in sys.argv[1:]:
            passed, text = run(name)
            reported = {"name": name, "passed": passed, "text": text, "hosts": group.hosts}
            print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    main()
