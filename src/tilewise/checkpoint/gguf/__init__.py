"""GGUF files as models: reads llama.cpp's files without a converted copy.

`gguf_model` opens a file. It answers with the files that a Hugging Face directory of the same model
would have, made from the metadata, and with the weights under the family's names, quantised ones in
their own blocks.
"""

from tilewise.checkpoint.gguf.files import find_gguf, first_files
from tilewise.checkpoint.gguf.model import GgufModel, gguf_model

__all__ = ["GgufModel", "find_gguf", "first_files", "gguf_model"]
