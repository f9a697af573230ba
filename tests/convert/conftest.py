"""Quantised files of tiny models: made once for each module that asks for them."""

from collections.abc import Callable, Iterator

import pytest
from quantised_files import Quantised


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Quantised]]:
    """`Quantised` of a kind (of Llama) or of (kind, model_type), made on first use."""
    made: dict[tuple[object, str], Quantised] = {}

    def get(kind, model_type="llama"):
        if (kind, model_type) not in made:
            made[kind, model_type] = Quantised(tmp_path_factory.mktemp("quantised"), kind, model_type)
        return made[kind, model_type]

    yield get
    for each in made.values():
        each.remove()
