"""Generation with a model directory: several prompts at once, over one device and over two.

Pass a Hugging Face directory of a Llama model as the argument; without one, a small model with
random weights is made, whose texts are equal noise.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tilewise import LLM, SamplingParams, models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer
from tilewise.models import llama

PROMPTS = ["def add(a, b):", "import os", "class Stack:"]


def make_model(directory: Path) -> Path:
    """A model directory with random weights."""
    tokenizer = train_tokenizer(PROMPTS * 10, vocab_size=300)
    config = llama.LlamaConfig(tokenizer.get_vocab_size(), 64, 128, 2, 4, max_position_embeddings=128)
    rng, shapes = np.random.default_rng(0), models.parameter_shapes(config)
    weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes}
    save_pretrained(directory, config.to_dict(), models.stored_tensors(config, weights), tokenizer)
    return directory


def write(model_dir: Path, tp: int) -> list[str]:
    """The generated text after each prompt."""
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
    with LLM(model_dir, tensor_parallel_size=tp, dtype="f32") as llm:
        outputs = llm.generate(PROMPTS, params)
    return [prompt + output.outputs[0].text for prompt, output in zip(PROMPTS, outputs)]


def main() -> None:
    """Generate with one device and with two; the texts are the same."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else make_model(Path(scratch) / "model")
        one, two = write(model_dir, tp=1), write(model_dir, tp=2)
    for text in one:
        print(repr(text))
    print("one device and two devices, equal texts:", one == two)
    assert one == two


if __name__ == "__main__":
    main()
