"""The table of published models in docs/models.md is the one that its script prints."""

from __future__ import annotations

import runpy
from pathlib import Path

from tilewise import models
from tilewise.models.footprint import footprint

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "model_table.py"))


def test_table_is_what_the_script_prints():
    """Forty models, each once, of every family that generates."""
    assert "\n".join(SCRIPT["table"]()) in (ROOT / "docs" / "models.md").read_text()
    configs = {model: models.config_from_dict(fields) for _, model, fields in SCRIPT["MODELS"]}
    assert len(configs) == len(SCRIPT["MODELS"]) == 40
    generating = {name for name, family in models.FAMILIES.items() if family.encoding is None}
    assert {config.model_type for config in configs.values()} == generating


def test_a_footprint_follows_from_the_shapes():
    """Matrices have their own bits; a separate embedding is not read; fewer bits leave more room."""
    fields = dict(next(fields for _, model, fields in SCRIPT["MODELS"] if model == "Llama 3.1 8B"))
    config = models.config_from_dict(fields)
    table, matrices = 128256 * 4096, models.num_parameters(config) - 128256 * 4096 - 65 * 4096
    whole, small = footprint(config), footprint(config, matrix_bits=4.5)
    assert whole.weights == 2 * models.num_parameters(config) and whole.read == whole.weights - 2 * table
    assert small.weights == 2 * (table + 65 * 4096) + matrices * 4.5 / 8
    assert whole.per_token == 2 * 2 * 32 * 8 * 128 and whole.context == 131072
    assert whole.cached_tokens(16 * 10**9) == 0
    assert small.cached_tokens(16 * 10**9) == (16 * 10**9 - small.weights) // whole.per_token
    tied = footprint(models.config_from_dict({**fields, "tie_word_embeddings": True}))
    assert tied.read == tied.weights == whole.weights - 2 * table
