"""Codes with error feedback: on the codes' own grid, closer in their products than the nearest codes."""

import numpy as np
import pytest

from flashllm.base.group_codes import GROUP_CODES
from flashllm.pack.feedback import code_columns, code_rows

RANDOM = np.random.default_rng(0)
INPUTS = (RANDOM.standard_normal((600, 24)) @ RANDOM.standard_normal((24, 320))).astype(np.float32)
INPUTS += 0.1 * RANDOM.standard_normal(INPUTS.shape).astype(np.float32)
WHOLE = [INPUTS.T @ INPUTS]
SPANS = [part.T @ part for part in (INPUTS[:, :256], INPUTS[:, 256:])]
WEIGHTS = RANDOM.standard_normal((70, 320)).astype(np.float32)


def lost(weights):
    return float(np.square(INPUTS @ (weights - WEIGHTS).T).sum())


@pytest.mark.parametrize("sums", [WHOLE, SPANS], ids=["whole", "spans"])
@pytest.mark.parametrize("name", GROUP_CODES)
def test_feedback_keeps_products_better_than_the_nearest_codes(name, sums):
    code = GROUP_CODES[name]
    rows, columns = code_rows(WEIGHTS, sums, code), code_columns(np.ascontiguousarray(WEIGHTS.T), sums, code)
    assert rows.shape == (70, code.vector_nbytes(320))
    assert columns.shape == (320, code.vector_nbytes(70))
    nearest = code.decode(code.encode(WEIGHTS), 320)
    assert lost(code.decode(rows, 320)) < 0.5 * lost(nearest)
    nearest = code.decode(code.encode(np.ascontiguousarray(WEIGHTS.T)), 70).T
    assert lost(code.decode(columns, 70).T) < 0.5 * lost(nearest)


def test_inputs_never_seen_get_the_nearest_codes():
    code, sums = GROUP_CODES["int4_32"], [np.zeros((320, 320), np.float32)]
    np.testing.assert_array_equal(code_rows(WEIGHTS, sums, code), code.encode(WEIGHTS))
    columns = np.ascontiguousarray(WEIGHTS.T)
    np.testing.assert_array_equal(code_columns(columns, sums, code), code.encode(columns))


def test_what_cannot_be_is_refused():
    code = GROUP_CODES["int4_32"]
    with pytest.raises(ValueError, match="not finite"):
        code_rows(WEIGHTS, [np.full((320, 320), np.nan, np.float32)], code)
    with pytest.raises(ValueError, match="multiples of 128"):
        code_rows(WEIGHTS, [np.eye(100, dtype=np.float32), np.eye(220, dtype=np.float32)], code)
    with pytest.raises(OverflowError, match="not finite"):
        code_columns(np.full((320, 70), np.inf, np.float32), WHOLE, code)
