"""Which layers each process of a pipeline computes (paper B, section 4.4). Arithmetic only; sends nothing."""

from dataclasses import dataclass

from flashllm.errors import UsageError
from flashllm.offload.policy import Workload
from flashllm.offload.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers `first` to `end` - 1 of a model of `layers`; the embedding is the first stage's, the head the last's."""

    first: int
    end: int
    layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= self.layers:
            raise ValueError(f"a stage of layers {self.first} to {self.end} is not in a model of {self.layers}")

    @property
    def num_layers(self) -> int:
        return self.end - self.first

    @property
    def numbers(self) -> range:
        return range(self.first, self.end)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.layers


def whole(layers: int) -> Stage:
    return Stage(first=0, end=layers, layers=layers)


def split(layers: int, stages: int, *, head: float = 0.0) -> tuple[Stage, ...]:
    """The stages of which the slowest is as fast as can be: all layers cost the same, 1, and the last stage has the
    head, too.

    Of equal splits it is the one with more layers in earlier stages. UsageError where there are fewer layers than
    stages.
    """
    if stages < 1:
        raise UsageError(f"a pipeline has at least one stage, not {stages}")
    if stages > layers:
        raise UsageError(f"{layers} layers cannot be split among {stages} processes; start at most {layers}")
    counts, extra = [1] * stages, [*[0.0] * (stages - 1), head]
    for _ in range(layers - stages):  # one more to whoever has the least: optimal, as every layer costs the same
        counts[min(range(stages), key=lambda stage: counts[stage] + extra[stage])] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(Stage(first=end - count, end=end, layers=layers) for count, end in zip(counts, ends, strict=True))


def split_model(shape: ModelShape, stages: int, workload: Workload) -> tuple[Stage, ...]:
    """`split` of a model, with the head's cost as the cost model has it: its operations compared with a layer's. Every
    token of a sequence goes through the layers, only those that are followed by a new one through the head. An
    embedding is a row that is copied, and costs nothing."""
    layer = shape.layer_params * workload.positions
    head = shape.vocab * shape.hidden * workload.gen_len
    return split(shape.layers, stages, head=head / layer)
