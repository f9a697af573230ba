"""Products of coded weights with inputs in 8 and 16 bits: the rule, the same bits at every level and place."""

import itertools

import numpy as np
import pytest

from flashllm import _core
from flashllm.base.codes.carried import CARRIED_CODES, SHARED, TABLES, UNIT, WHOLE, Quantised, zero_of
from flashllm.base.group_codes import GROUP_CODES

CODES = {**GROUP_CODES, **CARRIED_CODES}
FORMS = [(name, "int8") for name in sorted(CODES)]
FORMS += [("int8_32", "int16"), ("int8_64", "int16")]
SIGNS = np.array([[1], [-1]], np.float32)
LENGTHS = (32, 33, 64, 100, 256, 300, 1024)
# What a prompt's inputs are rounded to: codes of 16 bits, a scale for 256, or as a token's are.
IN_16_BITS = {"int8_32", "int8_64", "iq1_m", "iq2_s", "iq2_xxs", "iq3_xxs", "iq4_nl", "iq4_xs", "nvfp4", "q3_k", "q6_k"}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def encoded(name, n, length, seed=0):
    """Vectors [n, length] of one in size; of codes that quantised checkpoints have, all codes of the first row are the
    lowest and all of the second the highest, or those of the largest numbers."""
    if name in GROUP_CODES:
        return GROUP_CODES[name].encode(random(n, length, seed=seed))
    code, source = CARRIED_CODES[name], np.random.default_rng(seed)
    lowest = 0 if code.form.unsigned else -zero_of(code.bits)
    highest = lowest + (1 << code.bits) - 1
    table = TABLES.get(code.form.table)
    largest = highest if table is None else np.abs(table).max()
    codes = source.integers(lowest, highest + 1, (n, length)).astype(np.int8)
    codes[0], codes[1:2] = (lowest, highest) if table is None else (table.argmax(), table.argmin())
    together = SHARED if code.form.has_factors else max(UNIT, code.form.group)
    whole = -(-length // together) * together
    scales = {}
    for part, (weights, dtype) in code.form.parts().items():
        shape = (n, whole // weights if weights != WHOLE else 1)
        if dtype == np.uint8:  # 1 at most
            least, most = (40, 57) if code.form.is_e4m3 else (122, 126)
            scales[part] = source.integers(least, most, shape).astype(dtype)
        elif dtype == np.int8:
            least, most = (0, min(64, code.largest_factor + 1)) if code.form.has_minimum else (-64, 64)
            scales[part] = source.integers(least, most, shape).astype(dtype)
            scales[part][2:4] = most - 1
        else:
            scales[part] = (source.uniform(-1, 1, shape) / (largest * (64 if code.form.has_factors else 1))).astype(
                dtype
            )
    return code.pack(Quantised(form=code.form, codes=codes, scales=scales))


def products(name, rows, x, *, level="auto", threads=1, inputs="int8", many=False):
    """[tokens, rows]; `many`: as of a prompt."""
    linear = _core.Linear(rows, None, "float32", _core.ThreadPool(threads), level, name, x.shape[1], inputs)
    out = np.empty((len(x), len(rows)), np.float32)
    linear.forward(x, out, many)
    return out


def prompts(name, rows, x, **options):
    return products(name, rows, x, many=True, **options)


def rounded(x, inputs, name):
    """What inputs [n, length] are rounded to: units of 32, each with its scale, or all with one."""
    (n, length), most = x.shape, np.iinfo(inputs).max
    units = np.zeros((n, -(-length // 32), 32), np.float64)
    units.reshape(n, -1)[:, :length] = x
    largest = np.abs(units).max(axis=(1, 2) if name == "ternary" else 2, keepdims=True)
    by = np.float32(most) / np.where(largest == 0, 1, largest).astype(np.float32)
    codes = np.rint(units.astype(np.float32) * by)
    return (codes * (largest / most)).reshape(n, -1)[:, :length]


@pytest.mark.parametrize(("name", "inputs"), FORMS)
def test_products_are_those_of_the_codes(name, inputs):
    for length in LENGTHS:
        rows = encoded(name, 21, length, seed=length)
        x = random(3, length, seed=1)
        weights = CODES[name].decode(rows, length).astype(np.float64)
        found = products(name, rows, x, inputs=inputs)
        np.testing.assert_allclose(found, rounded(x, inputs, name) @ weights.T, rtol=0, atol=2e-5 * np.sqrt(length))
        exact = products(name, rows, x, inputs="float32")
        assert np.abs(found - exact).max() < 6 / np.iinfo(inputs).max * np.sqrt(length)
        assert not np.array_equal(found, exact)


@pytest.mark.parametrize(("name", "inputs"), FORMS)
def test_bits_depend_on_no_level_no_neighbour_and_no_thread(name, inputs):
    for length in LENGTHS:
        rows = encoded(name, 21, length)
        x = random(9, length, seed=4) * np.float32(10) ** random(1, length, seed=3)  # more than use codes together
        whole = products(name, rows, x, inputs=inputs)
        for level in _core.simd_levels():
            np.testing.assert_array_equal(whole, products(name, rows, x, level=level, threads=3, inputs=inputs))
            np.testing.assert_array_equal(whole[:2], products(name, rows, x[:2], level=level, inputs=inputs))
        for i, token in ((0, 1), (7, 3), (20, 8)):
            alone = products(name, rows[i : i + 1], x[token : token + 1], inputs=inputs)
            np.testing.assert_array_equal(whole[token : token + 1, i : i + 1], alone)


@pytest.mark.parametrize(("name", "inputs"), FORMS)
def test_many_rows_have_the_bits_of_few(name, inputs):
    """A thread's share of 405 rows is 48 and more, of which a tile's lie far apart; of 21 they lie side by side."""
    rows, x = encoded(name, 405, 192), random(1, 192, seed=5)
    for level in _core.simd_levels():
        few = [products(name, rows[first : first + 21], x, level=level, inputs=inputs) for first in range(0, 405, 21)]
        whole = products(name, rows, x, level=level, inputs=inputs)
        np.testing.assert_array_equal(whole, np.concatenate(few, axis=1))


@pytest.mark.parametrize(("name", "inputs"), FORMS)
def test_the_largest_codes_and_inputs_do_not_overflow(name, inputs):
    alike = np.full((2, 256), 8, np.float32) * SIGNS
    rows = encoded(name, 2, 256) if name in CARRIED_CODES else GROUP_CODES[name].encode(alike)
    rows = np.concatenate([rows, encoded(name, 4, 256)])
    for i, byte in enumerate((0, 255, 127, 128), start=2):
        rows.view(np.uint8)[i, -32:] = byte  # codes lie last
    x = np.full((2, 256), np.iinfo(inputs).max, np.float32) * SIGNS
    weights = CODES[name].decode(rows, 256).astype(np.float64)
    exact, bound = x @ weights.T, 1e-5 * (np.abs(x) @ np.abs(weights.T))
    for level, many in itertools.product(_core.simd_levels(), (False, True)):
        found = products(name, rows, x, level=level, inputs=inputs, many=many)
        assert (np.abs(found - exact) <= bound).all()


def levels_with_codes():
    return [level for level in _core.simd_levels() if level != "scalar"]


def of_a_prompt(x, name, level):
    """The same of a prompt; what 16 bits round is within every test's tolerance."""
    is_rounded = level in levels_with_codes() and name not in IN_16_BITS
    return rounded(x, "int8", name) if is_rounded else x.astype(np.float64)


@pytest.mark.parametrize("name", sorted(CODES))
def test_a_prompt_is_multiplied_in_codes_with_the_same_bits_wherever_codes_are(name):
    for length in LENGTHS:
        rows, x = encoded(name, 21, length, seed=length), random(70, length, seed=1)
        weights = CODES[name].decode(rows, length).astype(np.float64)
        atol = (2e-4 if name in IN_16_BITS else 2e-5) * np.sqrt(length)
        for level in _core.simd_levels():
            exact = of_a_prompt(x, name, level) @ weights.T
            np.testing.assert_allclose(prompts(name, rows, x, level=level), exact, rtol=0, atol=atol)
        whole = prompts(name, rows, x)
        for level in levels_with_codes():
            np.testing.assert_array_equal(prompts(name, rows, x, level=level, threads=3), whole)
        for first, last in ((0, 1), (3, 20), (41, 70)):
            np.testing.assert_array_equal(prompts(name, rows[5:], x[first:last]), whole[first:last, 5:])
        x[3, length // 2] = np.inf
        broken = prompts(name, rows, x)
        assert not np.isfinite(broken[3]).any()
        np.testing.assert_array_equal(np.delete(broken, 3, 0), np.delete(whole, 3, 0))


def test_factors_that_would_be_no_bytes_with_their_codes_are_refused():
    code = CARRIED_CODES["q2_k"]
    scales = {name: np.ones((1, 256 // each), dtype) for name, (each, dtype) in code.form.parts().items()}
    vectors = Quantised(form=code.form, codes=np.zeros((1, 256), np.int8), scales=scales)
    code.pack(vectors)
    scales["factors"][0, 3] = 16
    with pytest.raises(ValueError, match="factors of q2_k are at most 15"):
        code.pack(vectors)


def test_inputs_that_are_rounded_already_are_multiplied_as_they_are():
    for length in LENGTHS:
        rows, x = encoded("ternary", 21, length, seed=length), rounded(random(33, length, seed=1), "int8", "ternary")
        x[::5] *= 1e3
        exact = x @ CODES["ternary"].decode(rows, length).astype(np.float64).T
        close = {"rtol": 0, "atol": 1e-6 * np.abs(x).max() * np.sqrt(length)}
        x = x.astype(np.float32)
        for level in _core.simd_levels():
            for found in (prompts, products):
                made = found("ternary", rows, x, level=level, inputs="int8")
                np.testing.assert_allclose(made, exact, **close)


@pytest.mark.parametrize("name", sorted(CODES))
def test_the_largest_codes_of_a_prompt_have_the_same_bits_wherever_codes_are(name):
    """Sums of such products are the largest that there are: tiles must round them as integers are rounded."""
    rows = encoded(name, 20, 64).copy()
    if name in CARRIED_CODES:
        rows = rows[np.repeat([0, 1], 10)]
    else:
        rows.view(np.uint8)[:10, -32:] = 0  # codes lie last
        rows.view(np.uint8)[10:, -32:] = 255
    x = np.full((18, 64), 127, np.float32)
    x[1] *= -1
    x[2:10, ::3] = random(8, 22, seed=2) * 127
    x[10:, ::3] = np.random.default_rng(2).uniform(100, 127, (8, 22))
    whole = prompts(name, rows, x, level="avx2" if "avx2" in _core.simd_levels() else "auto")
    for level in levels_with_codes():
        np.testing.assert_array_equal(prompts(name, rows, x, level=level), whole)


def test_zeros_tiny_and_broken_inputs():
    rows = GROUP_CODES["int4_32_min"].encode(random(4, 96))
    x = np.zeros((1, 96), np.float32)
    assert not products("int4_32_min", rows, x).any()
    x[:] = 1e-38
    assert np.abs(products("int4_32_min", rows, x)).max() < 1e-30
    for bad in (np.nan, np.inf, -np.inf):
        x[0, 40] = bad
        assert np.isnan(products("int4_32_min", rows, x)).all()


@pytest.mark.parametrize("name", ["int4_32", "int4_64_min", "q2_k", "q6_k", "mxfp4", "iq4_xs", "nvfp4", "iq2_s"])
def test_weights_of_other_bits_than_8_take_8_where_a_model_says_16(name):
    rows, x = encoded(name, 7, 96), random(2, 96, seed=1)
    np.testing.assert_array_equal(products(name, rows, x, inputs="int16"), products(name, rows, x, inputs="int8"))


def test_wide_weights_and_bf12_take_fp32():
    x, weight = random(1, 64), random(4, 64)
    found = [np.empty((1, 4), np.float32) for _ in range(3)]
    for out, inputs in zip(found, ("int16", "int8", "float32"), strict=True):
        linear = _core.Linear(weight, None, "float32", _core.ThreadPool(1), "auto", None, None, inputs)
        linear.forward(x, out)
    for out in found[1:]:
        np.testing.assert_array_equal(found[0], out)
    with pytest.raises(ValueError, match="inputs must be one of float32"):
        _core.Linear(weight, None, "float32", _core.ThreadPool(1), "auto", None, None, "int7")
