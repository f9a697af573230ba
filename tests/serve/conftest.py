"""One server for a module: a tiny model whose passes can be slowed, and openai-python as its client."""

import httpx
import openai
import pytest
from serving import SlowModel, running

from flashllm.config import RunConfig
from flashllm.engine.model import Model


@pytest.fixture(scope="module")
def model(tiny):
    with Model.open(tiny().path(), RunConfig(threads=1, io_threads=4)) as model:
        yield SlowModel(model)


@pytest.fixture(scope="module")
def served(tiny, model):
    """(URL, worker)"""
    with running(model, tiny().path(), max_waiting=8) as served:
        yield served


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served[0], timeout=60) as http:
        yield http


@pytest.fixture
def slow(model):
    """Passes take 20 ms more during the test."""
    model.delay_s = 0.02
    yield model
    model.delay_s = 0.0
    model.runs.set()
