"""A job: the lines of a batch file, block by block through a runner, their answers appended as each block ends.

Knows no model: a runner computes. Whatever ends a job early leaves the answers of every finished sequence in the output
file, and `--resume` goes on from there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from flashllm.api.answers import TokenText
from flashllm.offload.jobs.answers import BAD_REQUEST, answer, failure
from flashllm.offload.jobs.blocks import Size, in_blocks
from flashllm.offload.jobs.lines import BatchFile, ranked
from flashllm.offload.jobs.measures import BlockMeasure, Totals
from flashllm.offload.jobs.results import Results
from flashllm.offload.jobs.sequences import Sequence as TokenSequence

_PROMPT_WEIGHT = 0.1  # of a new token's time that a prompt token takes, until a block has been measured


class BlockRunner(Protocol):
    """Runner of blocks: `flashllm.offload.runtime.run.Runner`."""

    def run(self, sequences: list[TokenSequence], progress: Callable[[int], None]) -> BlockMeasure:
        """Give every sequence logits until it is finished; `progress` is called with the block's new tokens so far."""


class Job:
    """Runs the lines that have no answer yet. Another thread may read `totals`, `done_tokens` and `done_share`."""

    def __init__(self, batch: BatchFile, results: Results, *, model: str, token_text: TokenText) -> None:
        """`model` is the name that answers carry."""
        self._batch, self._results = batch, results
        self._model, self._token_text = model, token_text
        answered = set(results.done)
        todo = [index for index in range(len(batch.lines)) if index not in answered]
        self._problems = [index for index in todo if batch.lines[index].problem is not None]
        self._order = ranked(batch.lines, [index for index in todo if batch.lines[index].problem is None])
        self.blocks: list[Sequence[int]] = []  # indices of lines; none before `run`
        self._tokens: list[tuple[int, int]] = []  # of each block: its prompts', and new ones at most
        self.totals = Totals()
        self._block_tokens = 0  # new, of the block that runs now

    @property
    def sizes(self) -> list[Size]:
        """Those of the lines to compute, in the order in which they fill blocks."""
        return [self._batch.lines[index].size for index in self._order]

    @property
    def done_tokens(self) -> int:
        return self.totals.new_tokens + self._block_tokens

    @property
    def done_share(self) -> float:
        """How much of the job is done, from 0 to 1, as if every line took all the tokens it may."""
        if not self._tokens:
            return 0.0
        done, ratio = self.totals.blocks, self._prompt_weight
        weights = [ratio * prompt_tokens + new_tokens for prompt_tokens, new_tokens in self._tokens]
        part = min(self._block_tokens / self._tokens[done][1], 1.0) * weights[done] if done < len(weights) else 0.0
        return (sum(weights[:done]) + part) / sum(weights)

    def answer_problems(self) -> None:
        """Answer the lines that have a problem, by saying it."""
        lines = self._batch.lines
        if self._problems:
            bad = [lines[index] for index in self._problems]
            self._results.append([failure(line, BAD_REQUEST, str(line.problem)) for line in bad])
            self._problems = []

    def run(self, runner: BlockRunner, blocks: Sequence[int]) -> None:
        """Answer every line that can be computed, so many at once: a count for each block, in the order of `sizes`.

        Raises what the runner and the output file raise, after the finished answers are safe.
        """
        lines = self._batch.lines
        self.blocks = list(in_blocks(self._order, blocks))
        self._tokens = [
            (sum(lines[index].prompt_tokens for index in block), sum(lines[index].max_new_tokens for index in block))
            for block in self.blocks
        ]
        for block in self.blocks:
            sequences = [self._batch.sequence(index) for index in block]
            try:
                measure = runner.run(sequences, self._progress)
            except BaseException:
                self._write([each for each in sequences if each.finished])
                raise
            self._write(sequences)
            self._block_tokens = 0
            self.totals.add(measure, len(block))

    def _progress(self, new_tokens: int) -> None:
        self._block_tokens = new_tokens

    def _write(self, sequences: Sequence[TokenSequence]) -> None:
        if sequences:
            self._results.append(
                [answer(self._batch, each, model=self._model, token_text=self._token_text) for each in sequences]
            )

    @property
    def _prompt_weight(self) -> float:
        """Time of a prompt token ÷ that of a new one, as measured so far."""
        totals = self.totals
        if not (totals.prompt_tokens and totals.new_tokens and totals.decode_s > 0):
            return _PROMPT_WEIGHT
        return totals.prefill_s / totals.prompt_tokens * totals.new_tokens / totals.decode_s
