"""Made-up activity with the statistics of paper A: popular and rare neurons, some of them in groups that fire together.

Layer l of L has mean activity m = 0.06 + 0.08 l / (L - 1). A neuron's popularity p is drawn from Beta(1.5 m, 1.5 (1 -
m)). 30 % of the neurons belong to random groups of 16, which share one uniform draw a token; the others have their
own. A neuron is active where the draw is below its p, and a third of the active fire. At m = 0.10 that gives the
figures of paper A, section 3.1: 10 % a token, 24 % over five tokens, 2.4 % new at a window of four.

The prefetch set of a layer is its active set with a given recall and precision, errors spread evenly. Parts of one
seed share popularity and groups and nothing else, so that one can be learned from and the other judged on.
"""

import argparse
from pathlib import Path

import numpy as np
from activity_trace import Bits, Stream, TraceInfo, TraceWriter, pack_bits
from numpy.typing import NDArray

PARTS = {"learn": 1, "judge": 2}
GROUP_SIZE = 16
GROUPED_SHARE = 0.3
FIRING_SHARE = 1 / 3


class LayerActivity:
    """One layer's neurons and the draws of its tokens."""

    def __init__(
        self, layer: int, num_layers: int, num_neurons: int, *, seed: int, part: str, firing: float = FIRING_SHARE
    ) -> None:
        self._firing = firing
        mean = 0.06 + 0.08 * layer / max(1, num_layers - 1)
        fixed = np.random.default_rng([seed, layer, 0])
        self.popularity = fixed.beta(1.5 * mean, 1.5 * (1 - mean), num_neurons)
        grouped = int(GROUPED_SHARE * num_neurons) // GROUP_SIZE * GROUP_SIZE
        # Which draw each neuron uses: the grouped share one of the first, the others have one of their own.
        self.draw_of = np.empty(num_neurons, np.int64)
        order = fixed.permutation(num_neurons)
        num_groups = grouped // GROUP_SIZE
        self.draw_of[order[:grouped]] = np.arange(grouped) // GROUP_SIZE
        self.draw_of[order[grouped:]] = num_groups + np.arange(num_neurons - grouped)
        self._num_draws = num_groups + num_neurons - grouped
        self._random = np.random.default_rng([seed, layer, PARTS[part]])

    def next_token(self, recall: float, precision: float) -> NDArray[np.bool_]:
        """Masks [3, num_neurons] in the order of `Stream`."""
        active = self._random.random(self._num_draws)[self.draw_of] < self.popularity
        firing = active & (self._random.random(len(active)) < self._firing)
        wrong = recall * active.sum() * (1 / precision - 1) / max(1, (~active).sum()) if recall else 0.0
        chance = self._random.random(len(active))
        return np.stack([active, firing, np.where(active, chance < recall, chance < wrong)])


def write_synthetic_trace(
    path: Path,
    *,
    layers: int,
    neurons: int,
    tokens: int,
    part: str,
    recall: float,
    precision: float,
    seed: int = 0,
    firing: float = FIRING_SHARE,
) -> tuple[str, int]:
    """Write a trace; its SHA-256 and size. `recall` and `precision` are those of the prefetch set, `firing` the share
    of the active neurons that fire."""
    info = TraceInfo(
        num_tokens=tokens,
        num_layers=layers,
        num_neurons=neurons,
        synthetic=True,
        description=f"synthetic trace, seed {seed}, part {part}, prefetch: recall {recall}, precision {precision}",
    )
    activities = [LayerActivity(layer, layers, neurons, seed=seed, part=part, firing=firing) for layer in range(layers)]
    with TraceWriter(path, info) as writer:
        for _ in range(tokens):
            token: Bits = np.stack([pack_bits(activity.next_token(recall, precision)) for activity in activities])
            token[0, Stream.PREFETCH] = 0  # nothing comes before the first layer
            writer.append(token)
        return writer.finish()


def add_prefetch_arguments(parser: argparse.ArgumentParser) -> None:
    """`--early-recall` and `--early-precision`; measured on the demo: bench/cache/results/early_prediction.json."""
    parser.add_argument(
        "--early-recall", type=float, default=0.89, help="share of a layer's active neurons in its prefetch set"
    )
    parser.add_argument("--early-precision", type=float, default=0.80, help="share of the prefetch set that is active")
