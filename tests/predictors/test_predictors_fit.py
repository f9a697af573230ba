import numpy as np
import pytest
import torch
from training.fit import (
    FitOptions,
    LayerPredictor,
    LogitCounts,
    UnpackCodes,
    count_logits,
    fires,
    fit,
    input_statistics,
    judge,
    pack_codes,
    weighted_loss,
)
from training.prefetch_start import linear_start
from training.recipes import RECIPES, AutoRanks, Recipe, auto_rank, parse_ranks

from flashllm.convert.untrained.svd import low_rank_predictor

D_MODEL, D_FF = 24, 70


@pytest.fixture
def layer():
    """Inputs of low effective dimension, a sparse layer over them, and its codes in chunks."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn((6, D_MODEL), generator=generator)
    x = torch.randn((3000, 6), generator=generator) @ basis + 0.3 * torch.randn((3000, D_MODEL), generator=generator)
    matrix = torch.randn((D_FF, D_MODEL), generator=generator) / D_MODEL**0.5
    bias = torch.full((D_FF,), -2.0)
    matrix[::2] *= 4.0  # large, and never firing: a truncated SVD spends its rank on them, training does not
    bias[::2] = -60.0
    codes = (x @ matrix.T + bias > 0).to(torch.uint8).numpy()

    def chunks(first=0, end=2000):
        for start in range(first, end, 700):
            stop = min(start + 700, end)
            yield x[start:stop], torch.from_numpy(pack_codes(codes[start:stop]))

    return matrix, bias, codes, chunks


def start_of(layer, rank):
    matrix, bias, _, chunks = layer
    low = low_rank_predictor(lambda: iter([matrix.numpy()]), bias.numpy(), input_statistics(chunks), rank)
    return LayerPredictor.from_low_rank(low)


@pytest.mark.parametrize("d_ff", [1, 3, 4, 5, 70])
def test_codes_survive_packing(d_ff):
    codes = np.random.default_rng(0).integers(0, 4, (9, d_ff)).astype(np.uint8)
    packed = torch.from_numpy(pack_codes(codes))
    assert packed.shape == (9, -(-d_ff // 4))
    assert torch.equal(UnpackCodes(d_ff, (0, 1, 2, 3))(packed), torch.from_numpy(codes).float())
    assert torch.equal(fires(d_ff)(packed), torch.from_numpy(codes > 0))


def test_codes_have_fixed_bits():
    assert pack_codes(np.array([[1, 2, 3, 0, 1]], dtype=np.uint8)).tolist() == [[0b00111001, 0b00000001]]


def test_thresholds_find_the_recall_asked_for_and_no_more(layer):
    predictor, codes, chunks = start_of(layer, 4), layer[2][:2000], layer[3]
    counts = count_logits(predictor, chunks, D_FF)
    assert int(counts.firing.sum()) == int(codes.sum())
    logits = torch.cat([predictor.logits(x) for x, _ in chunks()])
    for recall in (0.5, 0.9, 0.99):
        threshold = counts.threshold_for(recall)
        found = (logits > threshold).numpy()
        measured = (found & (codes > 0)).sum() / codes.sum()
        assert recall <= measured < recall + 0.01
        assert counts.density_at(threshold) == pytest.approx((measured, found.mean()), abs=2e-4)


def test_a_layer_that_never_fires_predicts_nothing():
    x = torch.randn(50, D_MODEL)
    chunk = (x, torch.zeros((50, D_FF // 4 + 1), dtype=torch.uint8))
    predictor = LayerPredictor(torch.randn(2, D_MODEL), torch.randn(D_FF, 2), torch.zeros(D_FF))
    predictor.threshold = count_logits(predictor, lambda: iter([chunk]), D_FF).threshold_for(0.9)
    assert judge(predictor, lambda: iter([chunk]), D_FF).predicted_share == 0.0


def test_training_beats_the_truncated_svd_on_positions_not_seen(layer):
    chunks = layer[3]
    start = start_of(layer, 3).stored(16)
    trained, _ = fit(start, chunks, FitOptions(epochs=12, batch_tokens=100, learning_rate=2e-2), D_FF)
    shares = []
    for predictor in (start, trained):
        predictor.threshold = count_logits(predictor, lambda: chunks(1500, 2000), D_FF).threshold_for(0.95)
        shares.append(judge(predictor, lambda: chunks(2000, 3000), D_FF).predicted_share)
    assert shares[1] < 0.97 * shares[0]


def test_training_is_reproducible_and_leaves_its_start_alone(layer):
    start, chunks = start_of(layer, 3), layer[3]
    before = start.b.clone()
    first, second = (fit(start, chunks, FitOptions(epochs=2, batch_tokens=64, seed=1), D_FF)[0] for _ in range(2))
    other, _ = fit(start, chunks, FitOptions(epochs=2, batch_tokens=64, seed=2), D_FF)
    assert torch.equal(first.a, second.a)
    assert torch.equal(first.b, second.b)
    assert torch.equal(first.bias, second.bias)
    assert not torch.equal(first.b, other.b)
    assert torch.equal(start.b, before)


def test_training_stops_where_other_text_gets_worse(layer):
    """Sixty positions are learnt by heart: the best epoch is what comes back."""
    start, chunks = start_of(layer, 3), layer[3]

    def few():
        return chunks(0, 60)

    def held():
        return chunks(2000, 3000)

    options = FitOptions(epochs=300, batch_tokens=20, learning_rate=1e-2)
    stopped, losses = fit(start, few, options, D_FF, held)
    assert 2 <= len(losses) < 300
    assert losses[-1] > min(losses) == losses[-2]
    assert weighted_loss(stopped, held, options, D_FF) == pytest.approx(min(losses))
    gentle, falling = fit(start, chunks, FitOptions(epochs=3, batch_tokens=200, learning_rate=3e-3), D_FF, held)
    assert falling == sorted(falling, reverse=True)
    assert weighted_loss(gentle, held, options, D_FF) == pytest.approx(falling[-1])


def test_a_threshold_for_precision_names_as_much_as_it_may(layer):
    predictor, codes, chunks = start_of(layer, 4), layer[2][:2000], layer[3]
    counts = count_logits(predictor, chunks, D_FF)
    logits = torch.cat([predictor.logits(x) for x, _ in chunks()]).numpy()
    for precision in (0.3, 0.6, 0.9):
        threshold = counts.threshold_for_precision(precision)
        named = logits > threshold
        assert (codes > 0)[named].mean() >= precision - 1e-3
        lower = logits > threshold - 0.05 * logits.std()
        assert (codes > 0)[lower].mean() < precision + 1e-3
    assert counts.threshold_for_precision(0.0) < logits.min()


def test_a_threshold_no_precision_can_be_had_by_names_nothing():
    counts = LogitCounts()
    counts.add(torch.tensor([[1.0, 2.0]]), torch.tensor([[False, False]]))
    assert counts.threshold_for_precision(0.5) == float("inf")


def test_the_linear_start_predicts_a_layer_from_an_earlier_input(layer):
    """The earlier input is the layer's own, turned and noisy: least squares turns it back."""
    matrix, bias, codes, chunks = layer
    generator = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn((D_MODEL, D_MODEL), generator=generator))[0]
    pairs = []
    for x, _ in chunks(0, 3000):
        pairs.append((x @ turn + 1.0 + 0.05 * torch.randn(x.shape, generator=generator), x))
    start = linear_start(lambda: iter([matrix.numpy()]), bias.numpy(), lambda: iter(pairs[:-2]), 8)
    firing = torch.from_numpy(codes[len(codes) - sum(len(x) for _, x in pairs[-2:]) :] > 0)
    before = torch.cat([earlier for earlier, _ in pairs[-2:]])
    counts = LogitCounts()
    counts.add(start.logits(before), firing)
    assert counts.density_at(counts.threshold_for(0.9))[1] < 2 * float(firing.float().mean())
    counts = LogitCounts()
    counts.add(start_of(layer, 8).logits(before), firing)  # the layer's own predictor sees only noise there
    assert counts.density_at(counts.threshold_for(0.9))[1] > 3 * float(firing.float().mean())


def test_the_gradient_is_that_of_the_weighted_cross_entropy(layer):
    """One AdamW step of the written-out gradient against torch's own."""
    start, chunks = start_of(layer, 3), layer[3]
    x, packed = next(chunks())
    options = FitOptions(epochs=1, batch_tokens=len(x), learning_rate=1e-2)
    mine, _ = fit(start, lambda: iter([(x, packed)]), options, D_FF)
    parameters = [start.a.clone(), start.b * 1.7, start.bias * 1.7]
    for parameter in parameters:
        parameter.requires_grad_()
    a, b, bias = parameters
    weights = UnpackCodes(D_FF, options.code_weights)(packed)
    logits = (x @ a.T) @ b.T + bias
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, (weights > 0).float(), weight=torch.where(weights > 0, weights, torch.ones(())), reduction="sum"
    )
    (loss / len(x)).backward()
    torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.99)).step()
    torch.testing.assert_close(mine.bias, bias.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.b, b.detach(), rtol=1e-4, atol=1e-5)
    assert float((mine.b - start.b * 1.7).abs().max()) > 5e-3


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("opt-6.7b", (0, 27, 28, 31), (128, 128, 1024, 1024)),
        ("falcon-7b", (0, 28), (256, 1152)),
        ("persimmon-8b", (31, 32, 35), (256, 1152, 1152)),
        (
            "phi-2",
            (0, 7, 8, 11, 12, 19, 20, 23, 24, 27, 28, 31),
            (160, 160, 480, 480, 800, 800, 480, 480, 160, 160, 0, 0),
        ),
        ("llama-2-7b-fatrelu", (13, 14, 17, 18), (256, 1024, 1024, 256)),
    ],
)
def test_recipes_are_the_papers(name, layers, expected):
    recipe = RECIPES[name]
    assert tuple(recipe.rank(layer, recipe.num_layers) for layer in layers) == expected


def test_ranks_can_be_written_in_four_ways():
    assert parse_ranks("AUTO") == AutoRanks()
    assert parse_ranks("auto*0.5") == AutoRanks(scale=0.5)
    assert parse_ranks("opt-6.7b") is RECIPES["opt-6.7b"]
    custom = parse_ranks("128:1024x4")
    assert isinstance(custom, Recipe)
    assert [custom.rank(layer, 10) for layer in (0, 5, 6, 9)] == [128, 128, 1024, 1024]


@pytest.mark.parametrize("text", ["", "0", "-4", "12:", "12:5", "12:0x4", "AUTO*0", "AUTO2", "opt", "1.5"])
def test_other_ranks_are_refused(text):
    with pytest.raises(ValueError, match="--ranks must be"):
        parse_ranks(text)


def test_auto_ranks_grow_with_what_is_named_in_vain_and_stay_below_the_width():
    assert (auto_rank(256, 0.01), auto_rank(4096, 0.01)) == (28, 108)
    assert auto_rank(256, 0.01) < auto_rank(256, 0.1) <= auto_rank(256, 0.5) < 256
    assert auto_rank(8, 0.5, scale=100) == 8
