"""lm-eval's local-completions scores continuations over HTTP like the engine."""

import pytest

from native.server.served import small_model, usual_server
from tilewise import LLM, SamplingParams

PAIRS = [("def f(x):", "\n    return"), ("class Stack:", "\n    pass"), ("import", "class Stack")]


@pytest.mark.slow
def test_continuations_are_scored():
    """The sum of log probabilities of a continuation's tokens, and whether each was the most likely."""
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    scorer = completions.LocalCompletionsAPI(
        base_url=f"{usual_server().url}/v1/completions",
        model="small",
        tokenizer=str(small_model()),
        tokenizer_backend="huggingface",
        max_length=256,
        batch_size=2,
    )
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    scores = scorer.loglikelihood(requests)
    with LLM(small_model(), dtype="f32") as llm:
        for (before, after), (score, is_greedy) in zip(PAIRS, scores):
            encode = llm.get_tokenizer().encode
            ids, count = encode(before + after).ids, len(encode(before).ids)
            (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
            figures = [output.prompt_logprobs[place][ids[place]] for place in range(count, len(ids))]
            assert score == pytest.approx(sum(figure.logprob for figure in figures), abs=1e-5)
            assert is_greedy == all(figure.rank == 1 for figure in figures)
