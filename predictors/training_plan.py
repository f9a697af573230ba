"""What a training run will take: memory by purpose, scratch space and time, said before work begins.

Arithmetic over the model's shape, and two short measurements of this machine. BudgetError where the limit, or the free
disk, cannot hold the run.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from fit import JUDGE_TOKENS, FitOptions, LayerPredictor, fit
from passes import BATCH_TOKENS, CHUNK_NBYTES, PassShape
from recipes import AutoRanks, Recipe, auto_rank

from flashllm.budget import plan_memory
from flashllm.errors import BudgetError
from flashllm.machine import available_nbytes, process_nbytes
from flashllm.manifest import Manifest
from flashllm.model import read_config
from flashllm.units import format_size

_SLACK = 64_000_000  # between the plan and the loading of the model the process grows by its imports
_WASTE = 0.1  # of the rule for ranks, for the estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Bytes and seconds. `model` is the plan of the loaded model with its libraries, `work` the largest step's."""

    shape: PassShape
    num_layers: int
    model: int
    work: int
    scratch: int
    seconds: float
    limit: int | None

    @property
    def total_nbytes(self) -> int:
        return self.model + self.work

    @property
    def model_limit(self) -> int | None:
        """What the loaded model may take of the limit: all that training leaves."""
        return None if self.limit is None else self.limit - self.work

    def table(self) -> str:
        """What is printed before work begins."""
        shape = self.shape
        limit = "" if self.limit is None else f" of {format_size(self.limit)}"
        return (
            f"{shape.samples} samples of {shape.tokens} tokens, {self.num_layers} layers; trained on {shape.kept} "
            f"positions of each\n"
            f"memory: {format_size(self.model)} model and libraries + {format_size(self.work)} training = "
            f"{format_size(self.total_nbytes)}{limit}; scratch: {format_size(self.scratch)}; "
            f"about {_duration(self.seconds)}"
        )


def plan_training(
    directory: Path,
    manifest: Manifest,
    *,
    samples: int,
    tokens: int,
    positions: int,
    recipe: Recipe | AutoRanks,
    options: FitOptions,
    limit: int | None,
    scratch: Path,
) -> TrainingPlan:
    """The plan. BudgetError where `limit` or the disk under `scratch` is too small, with both numbers."""
    architecture, config = manifest.architecture, read_config(directory)
    itemsize = 4 if manifest.dtype == "float32" else 2
    shape = PassShape(
        samples=samples,
        tokens=tokens,
        kept=max(1, min(tokens, positions // samples)),
        d_model=architecture.d_model,
        d_ff=architecture.d_ff,
    )
    # Asked as if the machine had no end: what matters is the least the model needs.
    loaded = plan_memory(manifest, config, limit=None, available=2**60, process=process_nbytes(), context=tokens)
    ranks = [
        auto_rank(shape.d_model, _WASTE, recipe.scale)
        if isinstance(recipe, AutoRanks)
        else recipe.rank(layer, architecture.num_layers)
        for layer in range(architecture.num_layers)
    ]
    work = _work_nbytes(shape, max(1, *ranks), int(config.get("num_attention_heads", 1)), itemsize, manifest)
    plan = TrainingPlan(
        shape=shape,
        num_layers=architecture.num_layers,
        model=loaded.minimum_nbytes + _SLACK,
        work=work,
        scratch=shape.scratch_nbytes(itemsize),
        seconds=_seconds(shape, manifest, ranks, options),
        limit=limit,
    )
    if limit is not None and plan.total_nbytes > limit:
        raise BudgetError(
            f"{format_size(limit)} cannot hold this training: it needs {format_size(plan.total_nbytes)} "
            f"({format_size(plan.model)} for the model and libraries, {format_size(plan.work)} for training); use "
            f"--memory {-(-plan.total_nbytes // 10**6)}MB or more, or smaller --ranks or --tokens-per-sample"
        )
    available = available_nbytes() + process_nbytes()
    if plan.total_nbytes > available:
        raise BudgetError(
            f"this training needs {format_size(plan.total_nbytes)}, and the machine (or its control group) has "
            f"{format_size(available)}; close other programs, or use smaller --ranks or --tokens-per-sample"
        )
    free = shutil.disk_usage(scratch).free + sum(os.lstat(path).st_size for path in scratch.iterdir())
    if plan.scratch > free:
        raise BudgetError(
            f"{scratch}: {format_size(plan.scratch)} of scratch space are needed, {format_size(free)} are free; use "
            "--scratch on another disk, or fewer --samples or --positions"
        )
    return plan


def _work_nbytes(shape: PassShape, rank: int, heads: int, itemsize: int, manifest: Manifest) -> int:
    """The largest of the steps' own memory; they follow one another."""
    d_model, d_ff = shape.d_model, shape.d_ff
    block = min(manifest.stream_block_rows, d_ff) * d_model
    chunk = 2 * CHUNK_NBYTES + CHUNK_NBYTES  # the file's bytes, the inputs in fp32
    factors = rank * (d_model + d_ff)
    passing = BATCH_TOKENS * (d_model * (12 * itemsize + 16) + 2 * d_ff + shape.tokens * heads * (4 + itemsize))
    mapping = 8 * 8 * d_model * d_model + 3 * 8 * factors + 20 * block
    fitting = chunk + 1024 * d_ff * 4 * 5 + 6 * 4 * factors
    judging = chunk + JUDGE_TOKENS * d_ff * 24 + 3 * 4 * factors
    return max(passing, chunk + mapping, fitting, judging)


def _seconds(shape: PassShape, manifest: Manifest, ranks: list[int], options: FitOptions) -> float:
    """Passes at the rate of a product measured here, training at that of a step measured here."""
    d_model, d_ff, batch = shape.d_model, shape.d_ff, options.batch_tokens
    x, weight = torch.ones(256, d_model), torch.ones(min(d_ff, 4096), d_model)
    x @ weight.T
    began = time.perf_counter()
    x @ weight.T
    per_product = (time.perf_counter() - began) / (x.numel() * len(weight))
    per_token = d_model * (4 * d_model + len(manifest.architecture.matrices) * d_ff) * per_product * 1.5
    rank = max(1, sum(ranks) // len(ranks))
    start = LayerPredictor(torch.zeros(rank, d_model), torch.zeros(d_ff, rank), torch.zeros(d_ff))
    data = (torch.ones(batch, d_model), torch.zeros((batch, shape.code_nbytes), dtype=torch.uint8))
    began = time.perf_counter()
    fit(start, lambda: iter([data]), FitOptions(epochs=2, batch_tokens=batch), d_ff)
    per_step = (time.perf_counter() - began) / 2
    positions = shape.samples * shape.kept
    # Statistics, thresholds and judging cost about as much as one epoch.
    per_layer = shape.samples * shape.tokens * per_token + (options.epochs + 1) * positions / batch * per_step
    return per_layer * manifest.architecture.num_layers


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
