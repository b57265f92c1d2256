"""From text to batches: corpus, tokenizer, token stream, batches by step.

All results depend only on the inputs, not on the number of devices. The package writes no files.
"""

from tilewise.data.batches import IGNORED, Batches, PaddedBatches
from tilewise.data.corpus import Corpus, TextFile, is_held_out, load_corpus, load_standard_library
from tilewise.data.masked import MaskedBatches
from tilewise.data.tokenizer import END_OF_TEXT, MASK, encode_files, special_id, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED",
    "MASK",
    "Batches",
    "Corpus",
    "MaskedBatches",
    "PaddedBatches",
    "TextFile",
    "encode_files",
    "is_held_out",
    "load_corpus",
    "load_standard_library",
    "special_id",
    "train_tokenizer",
]
