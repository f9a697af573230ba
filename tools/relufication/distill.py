"""Distillation: the student's FFNs are trained so that its next-token distributions are the unmodified model's.

The loss is KL(teacher || student) per token. Thresholds follow the wanted quantile of each batch slowly, and stay from
0. A run is decided by its recipe, the models and the rows: stopped at any step and resumed from its state, it goes on
to the same bytes on the same machine, with the same threads.
"""

import os
import pickle  # nosec B403 - its error alone
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from flashllm.base.files import fsync_directory
from flashllm.errors import FormatError, UsageError
from relufication.refit import threshold_of
from relufication.student import FFN
from relufication.text import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings that decide the result besides the models and the text."""

    model: str  # SHA-256 of the unmodified model's config, and of its weight files' names and sizes
    text: str  # of the rows' tokens
    share: float  # of zeros
    length: int  # tokens of a row
    batch: int  # rows of a step
    tokens: int  # after which the learning rate has fallen to a tenth
    learning_rate: float
    calibration: int  # rows, the first of the text
    refit: bool
    precision: str  # of the products of a step: float32, or bfloat16 under autocast; weights stay fp32
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.tokens // (self.length * self.batch)


class Training:
    """The optimizer of a student's FFNs, and its state on disk."""

    WARMUP = 20  # steps
    FOLLOW = 0.05  # of the way to a batch's quantile, each step

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel, ffns: list[FFN], recipe: Recipe) -> None:
        self._teacher, self._student, self._ffns, self.recipe = teacher, student, ffns, recipe
        self.step, self.table = 0, list[dict[str, Any]]()
        self.replanned: list[dict[str, int]] = []  # the step at which its tokens were changed, and those before
        self._weights = [value for ffn in ffns for value in ffn.parameters()]
        self._optimizer = torch.optim.AdamW(self._weights, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    @property
    def tokens(self) -> int:
        return self.step * self.recipe.batch * self.recipe.length

    def learning_rate(self) -> float:
        """Rate of the next step: a warm-up, then a line down to a tenth."""
        left = max(0.0, 1 - self.step / max(self.recipe.steps, 1))
        return self.recipe.learning_rate * min(1.0, (self.step + 1) / self.WARMUP) * (0.1 + 0.9 * left)

    def train(self, rows: Rows) -> float:
        """One step; the loss, in nats a token. FormatError where it is not finite."""
        first = self.recipe.calibration + self.step * self.recipe.batch
        ids = torch.stack([torch.from_numpy(rows[first + i]).long() for i in range(self.recipe.batch)])
        ids = ids.to(self._weights[0].device)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
        with torch.no_grad(), self._products(ids.device):
            wanted = F.log_softmax(self._teacher(ids, use_cache=False).logits.float().flatten(0, 1), -1)
        with watched(self._ffns), self._products(ids.device):
            found = F.log_softmax(self._student(ids, use_cache=False).logits.float().flatten(0, 1), -1)
            seen = [ffn.activation.seen for ffn in self._ffns]
        loss = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        value = loss.item()
        if not value < float("inf"):
            raise FormatError(f"the loss of step {self.step} is {value}; try a lower --learning-rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for ffn, gate in zip(self._ffns, seen, strict=True):
            goal = threshold_of(gate, self.recipe.share)
            ffn.activation.threshold += self.FOLLOW * (goal - ffn.activation.threshold)
        self.step += 1
        return value

    def _products(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.recipe.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.recipe.precision))

    def save(self, path: Path) -> None:
        """Writes the state whole, or leaves the one before."""
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(
                {
                    "recipe": asdict(self.recipe),
                    "step": self.step,
                    "table": self.table,
                    "replanned": self.replanned,
                    "thresholds": [ffn.activation.threshold for ffn in self._ffns],
                    "weights": [value.detach() for value in self._weights],
                    "optimizer": self._optimizer.state_dict(),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_directory(path.parent)

    def load(self, path: Path) -> None:
        """Goes on from a state. FormatError for a damaged one, UsageError for one of another recipe. One of other
        tokens alone is gone on from, where it has not seen more than are wanted now."""
        try:
            state = torch.load(path, map_location=self._weights[0].device, weights_only=True)
            made_with = state["recipe"]
        except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            raise FormatError(f"{path}: is damaged; remove it to begin again") from error
        other = [key for key, value in asdict(self.recipe).items() if made_with.get(key) != value]
        seen = state["step"] * self.recipe.batch * self.recipe.length
        if other == ["tokens"] and seen > self.recipe.tokens:
            raise UsageError(f"{path} has seen {seen} tokens; --tokens must be at least as many")
        if other and other != ["tokens"]:
            raise UsageError(f"{path} is of a run with another {', '.join(other)}; choose another --work, or remove it")
        for mine, saved in zip(self._weights, state["weights"], strict=True):
            mine.data.copy_(saved)
        for ffn, threshold in zip(self._ffns, state["thresholds"], strict=True):
            ffn.activation.threshold = threshold
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.table = state["step"], state["table"]
        self.replanned = state.get("replanned", [])
        if other:
            self.replanned.append({"step": self.step, "tokens": made_with["tokens"]})


@contextmanager
def watched(ffns: list[FFN]) -> Iterator[None]:
    """Within it, activations keep the values they last saw."""
    for ffn in ffns:
        ffn.activation.watched = True
    try:
        yield
    finally:
        for ffn in ffns:
            ffn.activation.watched, ffn.activation.seen = False, None


class Judge:
    """Compares a student with the unmodified model on windows of text [windows, tokens] that nothing is trained on."""

    def __init__(self, teacher: PreTrainedModel, windows: torch.Tensor) -> None:
        self._windows = windows
        self.teacher_perplexity, self._choices = self._read(teacher, lambda: None)

    @torch.no_grad()
    def _read(self, model: PreTrainedModel, after: Callable[[], None]) -> tuple[float, list[torch.Tensor]]:
        loss, count, choices = 0.0, 0, []
        for window in self._windows:
            logits = model(window[None], use_cache=False).logits[0].float()
            loss += F.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
            count += len(window) - 1
            choices.append(logits.argmax(-1))
            after()
        return float(torch.tensor(loss / count, dtype=torch.float64).exp()), choices

    def judge(self, student: PreTrainedModel, ffns: list[FFN]) -> dict[str, float]:
        """Perplexity, the share of positions whose likeliest token is the unmodified model's, and the share of FFN
        values that are zero: of all, and of the layers with the least and the most."""
        zeros = torch.zeros(len(ffns), dtype=torch.float64)

        def count() -> None:
            for index, ffn in enumerate(ffns):
                zeros[index] += (ffn.activation.seen <= ffn.activation.threshold).double().mean().item()

        with watched(ffns):
            perplexity, choices = self._read(student, count)
        same = [(mine == other).double().mean().item() for mine, other in zip(choices, self._choices, strict=True)]
        zeros /= len(self._windows)
        return {
            "perplexity": perplexity,
            "agreement": sum(same) / len(same),
            "zeros": zeros.mean().item(),
            "least_zeros": zeros.min().item(),
            "most_zeros": zeros.max().item(),
        }
