"""What the tests of chat templates share."""

import pytest
from tiny_models import make_tokenizer

from flashllm.generate.templates.renderer import Renderer


@pytest.fixture(scope="module")
def theirs():
    """A tokenizer of transformers."""
    return make_tokenizer(300)


@pytest.fixture(scope="module")
def warm():
    """A process that renders, for templates one after the other."""
    renderer = Renderer()
    yield renderer
    renderer.close()
