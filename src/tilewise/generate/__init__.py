"""Generation: from a model directory and prompts to text, as it comes.

Owns sampling, the pages of the KV cache and the way back from tokens to text. The model is a decoding graph;
this package calls its `forward`.
"""

from tilewise.generate.blocks import BLOCK_SIZE, BlockTable
from tilewise.generate.detokenizer import Detokenizer
from tilewise.generate.generator import Generator, Piece
from tilewise.generate.sampling import Sampling, pick_token

__all__ = ["BLOCK_SIZE", "BlockTable", "Detokenizer", "Generator", "Piece", "Sampling", "pick_token"]
