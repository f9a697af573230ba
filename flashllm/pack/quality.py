"""The loss of a model of fewer bits: its perplexity on a text, and that of the checkpoint it was converted from.

The source runs a layer at a time, in its own dtype; the model as it will run, densely.
"""

import gc
from pathlib import Path

from flashllm.base.files import Progress
from flashllm.base.machine import num_cores
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.install import change_manifest
from flashllm.format.manifest import Manifest
from flashllm.format.manifest_values import Quality
from flashllm.format.model_dir import ModelDir
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.pack.layers import Calibration
from flashllm.pack.score import Windows, check_finite, perplexity, perplexity_of, read_text, split_windows, surprise


def measure_quality(src: Path, directory: Path, text: Path, *, progress: Progress | None = None) -> Manifest:
    """Compare the model directory with the checkpoint `src` on every other window of `text`; its new manifest.

    FlashError where either computes no finite loss; errors as `Tokenizer.load`, `split_windows`, `open_weights` and
    `Model.open`.
    """
    ids = Tokenizer.load(directory).encode(read_text(text), add_special=False)
    _, scored = split_windows(ids, ModelDir.open(directory).block.context)
    source = source_perplexity(src, scored, text.name, progress=progress)
    gc.collect()  # a layer and the head of the source
    with Model.open(directory, RunConfig(mode="dense")) as model:
        found = perplexity(model, scored)
    check_finite(text, source, found)
    quality = Quality(
        perplexity=found,
        source_perplexity=source,
        scored_tokens=sum(len(window) - 1 for window in scored),
        text=text.name,
    )
    return change_manifest(directory, quality=quality)


def source_perplexity(src: Path, windows: Windows, name: str, *, progress: Progress | None = None) -> float:
    """The perplexity of every token but each window's first; all windows are equally long."""
    total = 0.0
    with open_weights(src) as source:
        states = Calibration(source, windows, threads=num_cores())
        for number in range(source.num_layers):
            states.advance(states.read(number))
            if progress is not None:
                progress(name, number + 1, source.num_layers)
        for logits, window in zip(states.logits(), windows, strict=True):
            total += surprise(logits[:-1], window[1:])
    return perplexity_of(total / sum(len(window) - 1 for window in windows))
