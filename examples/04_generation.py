"""Generation: write with a model directory, several prompts at once, over one device and over two.

Give a Hugging Face directory of a Llama model as the argument; without one, a small model with random weights
is made, whose text is noise but equal noise. Pieces come as they are written; here they are put together per
prompt.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer
from tilewise.generate import Generator, Sampling
from tilewise.models import llama

PROMPTS = ["def add(a, b):", "import os", "class Stack:"]


def make_model(directory: Path) -> Path:
    """A model directory with random weights."""
    tokenizer = train_tokenizer(PROMPTS * 10, vocab_size=300)
    config = llama.LlamaConfig(tokenizer.get_vocab_size(), 64, 128, 2, 4, 2, max_position_embeddings=128)
    rng = np.random.default_rng(0)
    shapes = models.parameter_shapes(config)
    weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes}
    tensors = models.stored_tensors(config, weights)
    save_pretrained(directory, config.to_dict(), tensors, tokenizer)
    return directory


def write(model_dir: Path, tp: int) -> list[str]:
    """What the model writes after each prompt."""
    texts = list(PROMPTS)
    with Generator(model_dir, tp=tp, dtype="f32", max_sequences=len(PROMPTS)) as generator:
        for piece in generator.generate(
            PROMPTS, Sampling(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
        ):
            texts[piece.sequence] += piece.text
    return texts


def main() -> None:
    """Write with one device and with two; the texts are the same."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else make_model(Path(scratch) / "model")
        one, two = write(model_dir, tp=1), write(model_dir, tp=2)
    for text in one:
        print(repr(text))
    print("one device and two devices, equal texts:", one == two)
    assert one == two


if __name__ == "__main__":
    main()
