"""Logits of llama.cpp for a text, for comparing their probabilities.

Runs with a Python of its own that has `llama-cpp-python` and `numpy` (`llama_cpp_turns.py` says how to
make one), and nothing of Tilewise.

Run: llama/bin/python llama_cpp_logits.py MODEL.gguf IDS.json LOGITS.npy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    """Write logits float32 `[T, V]` of the token ids in a JSON file."""
    model, ids, logits = sys.argv[1:]
    tokens = json.loads(Path(ids).read_text())
    llama = llama_cpp.Llama(model, n_ctx=len(tokens), n_batch=len(tokens), logits_all=True, verbose=False)
    llama.eval(tokens)
    np.save(logits, llama.scores[: len(tokens)].astype(np.float32))


if __name__ == "__main__":
    main()
