"""Ten steps over a mesh equal one device to the bit, over pairs of everything that a user can choose.

K splits and tensor parallelism, data parallelism, microbatches, workers, dtype, tied weights, KV heads and lengths: a
seeded choice of combinations in which every pair of values occurs, some every day and all in `test-slow`; the whole
product in `soak`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from small_llama import batches, change_first, config, drop_partial

import tilewise as tw
from pure.pairwise import Case, pairwise_cases
from tilewise import models
from tilewise.models import llama
from tilewise.session import verify_strategy

STEPS, MAX_DEVICES = 10, 12
CHOICES = {
    "k_splits_and_tp": [(8, 1), (8, 2), (8, 4), (8, 8), (12, 1), (12, 3)],
    "dp": [1, 2, 3, 4, 5, 6],
    "microbatches": [1, 2, 3, 4, 5],
    "workers": [1, 2, 3],
    "dtype": ["f32", "bf16"],
    "tied": [True, False],
    "kv_heads": [8, 4, 2],
    "length": [8, 21, 70],
}


def devices(case: Case) -> int:
    return case[0][1] * case[1]  # type: ignore[index, operator]


def is_allowed(case: Case) -> bool:
    """Whether the rules allow a case, and whether it has few enough threads for small machines."""
    (_, tp), _, _, workers, _, _, kv_heads, _ = case  # type: ignore[misc]
    is_small = devices(case) <= MAX_DEVICES and devices(case) * workers <= 2 * MAX_DEVICES  # type: ignore[operator]
    return is_small and (tp != 3 or kv_heads == 8)  # three devices cannot share 2 or 4 KV heads


def training(case: Case) -> tuple[llama.LlamaConfig, tw.ComputeGraph, dict[str, int], int]:
    """Model, graph, mesh and batch splits: as many as devices times microbatches, or twice."""
    (k_splits, tp), dp, microbatches, _, dtype, tied, kv_heads, length = case
    model = config(
        tie_word_embeddings=tied,
        num_key_value_heads=kv_heads,
        hidden_size=32,
        intermediate_size=48,
        head_dim=4,
        num_hidden_layers=1,
        vocab_size=512,
    )
    batch_splits = dp * microbatches * (2 if dp * microbatches <= 4 else 1)
    graph = tw.ComputeGraph("llama", k_splits=k_splits)
    models.build_training_graph(graph, model, batch_splits, length, dtype)
    graph.optimize(tw.optim.AdamW())
    mesh = {name: n for name, n in (("dp", dp), ("tp", tp)) if n > 1}
    return model, graph, mesh, batch_splits


@cache
def pairwise() -> list[Case]:
    """Few cases with every pair of values that the rules allow."""
    return pairwise_cases(CHOICES, is_allowed)


def compare(case: Case, **options: object) -> tuple[bool, str]:
    model, graph, mesh, batch_splits = training(case)
    length, microbatches, workers = case[7], case[2], case[3]

    def change(plan: tw.Plan) -> tw.Plan:
        settings = replace(plan.settings, workers_per_device=workers)  # type: ignore[arg-type]
        return options.get("change", lambda p: p)(replace(plan, settings=settings))  # type: ignore[operator]

    report = verify_strategy(
        graph,
        mesh,
        batches(model, STEPS, batch_splits, length),  # type: ignore[arg-type]
        batch_splits=batch_splits,
        accumulation=microbatches,  # type: ignore[arg-type]
        change=change,
    )
    return report.equal, report.text


def named(case: Case) -> str:
    (k_splits, tp), dp, microbatches, workers, dtype, tied, kv_heads, length = case
    words = f"C{k_splits}-tp{tp}-dp{dp}-m{microbatches}-w{workers}-{dtype}-kv{kv_heads}-s{length}"
    return f"{words}-tied" if tied else words


@pytest.mark.parametrize("case", pairwise()[:8], ids=named)
def test_best_cases_equal_one_device(case):
    """Eight cases hold about half of all pairs."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise()[8:], ids=named)
def test_all_pairs_equal_one_device(case):
    """With the everyday ones, every pair of values."""
    equal, text = compare(case)
    assert equal, text


@pytest.mark.soak
def test_whole_product_equals_one_device():
    """Every combination on at most twelve devices that the rules allow."""
    compared = 0
    for case in product(*CHOICES.values()):
        if is_allowed(case):
            equal, text = compare(case)
            assert equal, f"{named(case)}: {text}"
            compared += 1
    print(f"{compared} combinations")
    assert compared > 1000


def test_fault_in_any_pair_is_detected():
    """With a part of the wrong device, the same comparison fails."""
    case = ((8, 2), 3, 1, 1, "f32", True, 8, 8)
    assert compare(case)[0]
    for label in (
        "linear_dw:mlp.up_proj.weight",
        "rms_norm_backward:norm.weight",
        "linear_dw:embed_tokens.weight",
    ):
        assert not compare(case, change=change_first(f"{label}/reduce_scatter", drop_partial))[0], label
