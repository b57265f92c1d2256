"""Generation: how a token is chosen, and the ways from text to tokens and back.

Owns sampling, chat templates, detokenizing and stop strings. `tilewise.serve` runs models with them.
"""

from tilewise.generate.chat import ChatTemplate, RenderedChat
from tilewise.generate.defaults import combine_settings, served_settings
from tilewise.generate.detokenizer import Detokenizer, TextOffsets
from tilewise.generate.history import History
from tilewise.generate.prompts import check_prompt, encode_prompt, word_ids
from tilewise.generate.sampling import Batch, Sampler, choose_token
from tilewise.generate.token_bytes import TokenBytes
from tilewise.settings import Sampling

__all__ = [
    "Batch",
    "ChatTemplate",
    "Detokenizer",
    "History",
    "RenderedChat",
    "Sampler",
    "Sampling",
    "TextOffsets",
    "TokenBytes",
    "check_prompt",
    "choose_token",
    "combine_settings",
    "encode_prompt",
    "served_settings",
    "word_ids",
]
