"""Models that the scripts' functions run on."""

import pytest

from flashllm.config import RunConfig
from flashllm.engine.model import Model


@pytest.fixture
def opened():
    """`Model.open` with one compute thread and few reader threads; closed at the end of the test."""
    models = []

    def open_model(path, **options):
        models.append(Model.open(path, RunConfig(**{"threads": 1, "io_threads": 4, **options})))
        return models[-1]

    yield open_model
    for model in models:
        model.close()
