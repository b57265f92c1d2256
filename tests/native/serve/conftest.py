"""Shared by tests of serving: a model directory that no test changes."""

import pytest

from native.serve.serving_models import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A small seeded Llama."""
    return save_model(tmp_path_factory.mktemp("model") / "llama")
