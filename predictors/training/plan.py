"""The needs of a training run: memory by purpose and scratch space, said before work begins.

Arithmetic over the model's shape. BudgetError where the limit, or the free disk, cannot hold the run. How long it takes
is measured by the trainer.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from flashllm.arch.spec import BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.base.processes import beside_nbytes
from flashllm.base.units import format_size
from flashllm.config import RunConfig
from flashllm.errors import BudgetError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.plan.memory import Conditions, plan_memory
from training.fit import JUDGE_TOKENS
from training.passes import CHUNK_NBYTES, PassShape
from training.recipes import AutoRanks
from training.trainer import TrainOptions

_SLACK = 64_000_000  # between the plan and the loading of the model the process grows by its imports
_WASTE = 0.1  # of the rule for ranks, for the estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Bytes. `model` is what the loaded model may take with its libraries, `work` the largest step's.

    The model gets no more than it needs: its passes are dense, and a cache of neurons would do nothing.
    """

    shape: PassShape
    ranks: list[int]  # by layer, as far as they are known before the layer is measured
    model: int
    work: int
    scratch: int
    limit: int | None

    @property
    def total_nbytes(self) -> int:
        return self.model + self.work

    def table(self) -> str:
        shape = self.shape
        limit = "" if self.limit is None else f" of {format_size(self.limit)}"
        return (
            f"{shape.samples} samples of {shape.tokens} tokens, {len(self.ranks)} layers; trained on {shape.kept} "
            f"positions of each\n"
            f"memory: {format_size(self.model)} model and libraries + {format_size(self.work)} training = "
            f"{format_size(self.total_nbytes)}{limit}; scratch: {format_size(self.scratch)}"
        )


def plan_training(
    directory: Path,
    manifest: Manifest,
    *,
    samples: int,
    tokens: int,
    positions: int,
    options: TrainOptions,
    limit: int | None,
    scratch: Path,
) -> TrainingPlan:
    """The plan. BudgetError where `limit` or the disk under `scratch` is too small, with both numbers."""
    architecture, block = manifest.architecture, ModelDir.open(directory).block
    itemsize = WEIGHT_DTYPES[manifest.dtype].itemsize
    shape = PassShape(
        samples=samples,
        tokens=tokens,
        kept=max(1, min(tokens, positions // samples)),
        d_model=architecture.d_model,
        d_ff=max(architecture.every_width),
    )
    # Asked as if the machine had no end: what matters is the least the model needs.
    process = process_nbytes() + beside_nbytes()
    endless = Conditions(available=2**60, process=process)
    loaded = plan_memory(manifest, block, RunConfig(context=tokens), endless)
    recipe = options.recipe
    ranks = [
        recipe.rank(shape.d_model, _WASTE, options.bits)
        if isinstance(recipe, AutoRanks)
        else min(recipe.rank(layer, architecture.num_layers), shape.d_model)
        for layer in range(architecture.num_layers)
    ]
    prefetch = options.prefetch_precision is not None
    work = _work_nbytes(shape, max(1, *ranks), block, manifest, prefetch=prefetch)
    plan = TrainingPlan(
        shape=shape,
        ranks=ranks,
        model=loaded.minimum_nbytes + _SLACK,
        work=work,
        scratch=shape.scratch_nbytes(itemsize, prefetch=prefetch),
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


def _work_nbytes(shape: PassShape, rank: int, block: BlockSpec, manifest: Manifest, *, prefetch: bool) -> int:
    """The largest of the steps' own memory; they follow one another."""
    d_model, d_ff = shape.d_model, shape.d_ff
    streamed = min(manifest.stream_block_rows, d_ff)
    chunk = 3 * CHUNK_NBYTES * (2 if prefetch else 1)  # the file's bytes, the inputs in fp32
    factors = rank * (d_model + d_ff)
    matrices = 13 if prefetch else 8  # of [d_model, d_model]: statistics, or a regression's beside them
    mapping = matrices * 8 * d_model * d_model + 3 * 8 * factors + 20 * streamed * d_model
    fitting = chunk + 1024 * d_ff * 4 * 5 + 8 * 4 * factors
    judging = chunk + JUDGE_TOKENS * d_ff * 24 + 3 * 4 * factors
    return max(pass_nbytes(shape, block, manifest), chunk + mapping, fitting, judging)


def pass_nbytes(shape: PassShape, block: BlockSpec, manifest: Manifest) -> int:
    """A batch through a layer, beyond what the model's own plan has for its (shorter) passes."""
    states = 4 * (12 * shape.d_model + 2 * block.query_dim + 2 * block.kv_dim)  # a token's, in fp32, copies included
    # Activations of a block of neurons: the core's, and the three copies that become codes.
    activations = 4 * (len(manifest.rows.matrices) - 1 + 3) * min(manifest.stream_block_rows, shape.d_ff)
    codes = 3 * shape.d_ff
    kv = shape.kv_positions * 2 * block.kv_dim * WEIGHT_DTYPES[manifest.dtype].itemsize
    return shape.batch_tokens * (states + activations + codes) + kv
