"""Scores of texts and of multiple-choice tasks, as lm-eval computes them, for every variant of a masked model.

Perplexity, KL and agreement come from next-token distributions of windows; task answers from the log-likelihoods of the
choices. Knows token ids and logits, not where texts come from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from masked import MaskedModel, Variant
from samples import TextEncoder
from tasks import Item, answer_of

BATCH_TOKENS = 2048  # of one pass
LOGIT_ROWS = 256  # positions whose distributions are compared at once: each is a vocabulary in fp32


@dataclass(slots=True)
class TextScore:
    """Sums over the scored tokens of a text."""

    nll: float = 0.0
    kl: float = 0.0  # of the variant's next-token distribution from the dense one, nats
    same_top: int = 0
    tokens: int = 0

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.nll / self.tokens).exp())


def windows(ids: Sequence[int], length: int) -> torch.Tensor:
    """[n, length] consecutive windows of a token stream; a shorter rest is left out, but for a text's only window."""
    if len(ids) < length:
        return torch.tensor([list(ids)])
    count = len(ids) // length
    return torch.tensor(list(ids[: count * length])).reshape(count, length)


def score_text(
    model: MaskedModel, ids: torch.Tensor, predictor_sets: dict[str, Any], progress: Any = None
) -> dict[str, TextScore]:
    """Each set's score over windows ids [n, length]; every token of a window but its first is predicted.

    `predictor_sets`: a Variant, or a list of predictors, by name; the set "dense" must be among them, first.
    """
    scores = {name: TextScore() for name in predictor_sets}
    batch = max(1, BATCH_TOKENS // ids.shape[1])
    for first in range(0, len(ids), batch):
        rows = ids[first : first + batch]
        reference: torch.Tensor | None = None
        for name, chosen in predictor_sets.items():
            if isinstance(chosen, Variant):
                model.use(chosen)
            else:
                model.use_predictors(chosen)
            logits = model.logits(rows)[:, :-1].flatten(0, 1)
            reference = logits if reference is None else reference
            _add(scores[name], logits, reference, rows[:, 1:].flatten())
        if progress is not None:
            progress("text", min(first + batch, len(ids)) * ids.shape[1], ids.numel())
    return scores


def _add(score: TextScore, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
    for start in range(0, len(targets), LOGIT_ROWS):
        part = slice(start, start + LOGIT_ROWS)
        mine = torch.log_softmax(logits[part].float(), -1)
        theirs = torch.log_softmax(reference[part].float(), -1)
        score.nll -= float(mine.gather(1, targets[part, None]).double().sum())
        score.kl += float((theirs.exp() * (theirs - mine)).double().sum())
        score.same_top += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        score.tokens += len(targets[part])


@dataclass(slots=True)
class TaskScore:
    """Answers of one variant on one task."""

    correct: int = 0
    correct_normalised: int = 0
    chosen: list[int] = field(default_factory=list)  # by the task's own rule: the item's metric
    items: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    item: int
    choice: int
    ids: tuple[int, ...]
    scored: int  # tokens at the end


def score_items(
    model: MaskedModel, variant: Variant, items: list[Item], tokenizer: TextEncoder, context: int
) -> TaskScore:
    """Answer every item: the choice of the highest log-likelihood, per character where the task is scored so."""
    requests = sorted(_requests(items, tokenizer, context), key=lambda request: len(request.ids))
    likelihoods: list[list[float]] = [[0.0] * len(item.choices) for item in items]
    greedy = [False] * len(items)  # of the first choice
    model.use(variant)
    for batch in _batches(requests):
        longest = max(len(request.ids) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, : len(request.ids)] = torch.tensor(request.ids)  # padding comes after: causal, never seen
        logits = model.logits(ids)
        for row, request in enumerate(batch):
            end = len(request.ids)
            targets = torch.tensor(request.ids[end - request.scored :])
            scored = torch.log_softmax(logits[row, end - request.scored - 1 : end - 1].float(), -1)
            likelihoods[request.item][request.choice] = float(scored.gather(1, targets[:, None]).double().sum())
            if request.choice == 0:
                greedy[request.item] = bool((scored.argmax(-1) == targets).all())
    score = TaskScore(items=len(items))
    for item, values, said in zip(items, likelihoods, greedy, strict=True):
        answer = answer_of(item, values, greedy=said)
        score.correct += answer.right
        score.correct_normalised += answer.right_normalised
        score.chosen.append(answer.normalised if item.normalised else answer.plain)
    return score


def _requests(items: list[Item], tokenizer: TextEncoder, context: int) -> Iterator[_Request]:
    for index, item in enumerate(items):
        for choice in range(len(item.choices)):
            prompt = item.prompts[choice if len(item.prompts) > 1 else 0]
            before = tokenizer.encode(prompt)
            whole = tokenizer.encode(prompt + item.choices[choice])
            scored = max(1, len(whole) - len(before))
            yield _Request(index, choice, tuple(whole[-context:]), min(scored, len(whole) - 1, context - 1))


def _batches(requests: list[_Request]) -> Iterator[list[_Request]]:
    batch: list[_Request] = []
    for request in requests:  # ascending lengths: the last is the longest
        if batch and (len(batch) + 1) * len(request.ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch
