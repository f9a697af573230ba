"""Weights that are in codes before the conversion: chosen by calibration, or the source's own. Knows no file format."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = Callable[[int, int], NDArray[np.uint8]]  # (first, count) -> uint8 [count, vector_nbytes]


class CodedWeights(Protocol):
    """Vectors as their encodings store them, which a conversion writes as they are."""

    def fingerprint(self) -> Any:
        """A JSON value that changes when the codes do."""

    def vectors(self, name: str) -> Vectors | None:
        """A reader of vectors of the matrix of this canonical name; None for one that has to be encoded. Of a down
        projection a vector is a neuron's column."""
