"""Text in, batches out: corpus, tokenizer, token stream, batches by step.

Everything is deterministic in its inputs and independent of the number of devices. Owns no files it writes
to.
"""

from tilewise.data.batches import IGNORED, Batches, PaddedBatches
from tilewise.data.corpus import Corpus, TextFile, is_held_out, load_corpus, load_standard_library
from tilewise.data.tokenizer import END_OF_TEXT, encode_files, end_of_text_id, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED",
    "Batches",
    "Corpus",
    "PaddedBatches",
    "TextFile",
    "encode_files",
    "end_of_text_id",
    "is_held_out",
    "load_corpus",
    "load_standard_library",
    "train_tokenizer",
]
