"""Text in, batches out: corpus, tokenizer, token stream, batches by step.

Everything is deterministic in its inputs and independent of the number of devices. Owns no files it writes
to.
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
