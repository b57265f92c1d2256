"""Shared by tests of training: texts that no test changes, and their tokens."""

import pytest

from native.train.small_run import make_config, silent, write_texts
from tilewise.train import prepare_data


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of small Python files."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def data(texts, tmp_path_factory):
    """Their batches, for the small run's configuration."""
    return prepare_data(make_config(texts, tmp_path_factory.mktemp("none")), silent())
