"""Gemma 3's text model in the files of models with images (`Gemma3ForConditionalGeneration`): where
its tensors are, and the names of the vision model's tensors, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["INSIDE", "VISION"]

INSIDE: Mapping[str, str] = {"model.language_model.": "model.", "language_model.": ""}
"""Prefixes of the text model's tensors in these files, and what stands for each in the files of text
models. transformers writes the first since version 4.52; Google's files have the second."""
VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..+"
"""A regular expression for the names of the vision model's tensors."""
