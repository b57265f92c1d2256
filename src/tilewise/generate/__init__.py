"""Generation: from a model directory and prompts to text, as it comes.

Owns sampling, the pages of the KV cache and the ways from text to tokens and back. The model is a decoding graph;
this package calls its `forward`.
"""

from tilewise.generate.blocks import BlockTable
from tilewise.generate.chat import ChatTemplate
from tilewise.generate.defaults import combine_settings
from tilewise.generate.detokenizer import Detokenizer
from tilewise.generate.generator import Generator, Piece
from tilewise.generate.history import History
from tilewise.generate.prompts import check_prompt, encode_prompt, word_ids
from tilewise.generate.sampling import Sampling, pick_token

__all__ = [
    "BlockTable",
    "ChatTemplate",
    "Detokenizer",
    "Generator",
    "History",
    "Piece",
    "Sampling",
    "check_prompt",
    "combine_settings",
    "encode_prompt",
    "pick_token",
    "word_ids",
]
