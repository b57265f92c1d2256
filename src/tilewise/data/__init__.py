"""From files to batches: records and texts, tokenizer, examples and token streams, batches by step.

All results depend only on the inputs, not on the number of devices. The package writes no files.
"""

from tilewise.data.batches import Batches
from tilewise.data.corpus import Corpus, TextFile, is_held_out, load_corpus, load_standard_library
from tilewise.data.examples import IGNORED, ExampleCounts, ExampleList, Examples
from tilewise.data.masked import MaskedBatches
from tilewise.data.pairs import PairBatches, PairedExamples
from tilewise.data.records import Record, read_records, record_files
from tilewise.data.sequences import (
    PackedExamples,
    PaddedExamples,
    Sequences,
    TextDocuments,
    TextWindows,
)
from tilewise.data.tokenizer import END_OF_TEXT, MASK, encode_files, special_id, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED",
    "MASK",
    "Batches",
    "Corpus",
    "ExampleCounts",
    "ExampleList",
    "Examples",
    "MaskedBatches",
    "PackedExamples",
    "PaddedExamples",
    "PairBatches",
    "PairedExamples",
    "Record",
    "Sequences",
    "TextDocuments",
    "TextFile",
    "TextWindows",
    "encode_files",
    "is_held_out",
    "load_corpus",
    "load_standard_library",
    "read_records",
    "record_files",
    "special_id",
    "train_tokenizer",
]
