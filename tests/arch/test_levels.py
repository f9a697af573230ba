"""Models of mixers with states, and one of latent attention, at every level of instructions: the scalar level's logits.

What differs is what a fused multiplication does not round.
"""

import numpy as np
import pytest
from arch_models import tokens

from flashllm import _core

NAMES = ("qwen3_next", "qwen3_next dense layers", "kimi_linear", "nemotron_h", "lfm2", "youtu")


def logits(model):
    """Of a prompt over the edge of a page, and of the tokens behind it one by one."""
    ids = tokens(80)
    with model.new_sequence() as sequence:
        found = [model.step([(sequence, ids[:70])], all_logits=True)]
        found += [model.step([(sequence, [token])]) for token in ids[70:]]
    return np.concatenate(found)


@pytest.mark.parametrize("simd", _core.simd_levels()[1:])
@pytest.mark.parametrize("name", NAMES)
def test_every_level_has_the_logits_of_the_scalar_one(variant_of, opened, name, simd):
    expected, found = (logits(opened(variant_of(name)[1], mode="dense", simd=level)) for level in ("scalar", simd))
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert not np.array_equal(found, expected)  # another level has computed them
