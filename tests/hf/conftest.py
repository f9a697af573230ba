"""Models that the tests of a module share."""

import functools
import gc
from contextlib import ExitStack

import pytest

from flashllm import FlashModel


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_ours():
    """What other modules' tests have left is not looked through by each `gc.collect` of these."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def shared(tiny):
    """`FlashModel.from_pretrained` of a tiny model by kind of predictors and dtype, each opened once in a module."""
    with ExitStack() as models:

        @functools.cache
        def get(kind="all", dtype="float32", **options):
            flash = FlashModel.from_pretrained(tiny(dtype).path(kind), threads=1, io_threads=4, **options)
            models.callback(flash.close)
            return flash

        yield get
