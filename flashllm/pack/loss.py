"""The loss of a model just converted, on the first tokens of a text: garbage shows before anybody talks with it.

Losses as parts of a uniform guess's: SmolLM2-135M 0.38, the demo 0.50, random weights 1. SmolLM2 with a wrong rotary
base has 0.56 at 100, which is not found, and 0.84 at 10, which is.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.score import mean_surprise, perplexity_of, piece_tokens, read_text

TOKENS = 128
GARBAGE = 0.75  # of the loss of a uniform guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The mean negative log-likelihood of a token, not always finite; `tokens` of the text were computed."""

    mean: float
    tokens: int
    vocab_size: int

    @property
    def is_garbage(self) -> bool:
        return not self.mean <= GARBAGE * math.log(self.vocab_size)  # NaN is

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.mean)


def measure_loss(directory: Path, text: Path, *, memory: int | None = None) -> Loss:
    """Run the first tokens of `text` as one prompt, densely, so that what does not fit in memory is read once.

    `memory`: the limit, as of `RunConfig`. Errors as of `read_text`, `Tokenizer.load` and `Model.open`.
    """
    block = ModelDir.open(directory).block
    tokens = max(2, min(TOKENS, block.context, piece_tokens(block.vocab_size)))
    ids = Tokenizer.load(directory).encode(read_text(text))[:tokens]
    with Model.open(directory, RunConfig(memory=memory, context=tokens, mode="dense")) as model:
        return Loss(mean=mean_surprise(model, [ids]), tokens=len(ids), vocab_size=model.vocab_size)
