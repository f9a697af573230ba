"""A job: the lines of a batch file, block by block through a runner, their answers appended as each block ends.

Knows no model: a runner computes. Whatever ends a job early leaves the answers of every finished sequence in the output
file, and `--resume` goes on from there.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from flashllm.api.answers import TokenText
from flashllm.offload.jobs.answers import BAD_REQUEST, answer, failure
from flashllm.offload.jobs.blocks import equal
from flashllm.offload.jobs.lines import BatchFile, ranked
from flashllm.offload.jobs.measures import BlockMeasure, Totals
from flashllm.offload.jobs.results import Results
from flashllm.offload.jobs.sequences import Sequence as TokenSequence
from flashllm.offload.policy import Workload

_PROMPT_WEIGHT = 0.1  # of a new token's time that a prompt token takes, until a block has been measured


class BlockRunner(Protocol):
    """Runner of blocks: `flashllm.offload.runtime.run.Runner`."""

    def run(self, sequences: list[TokenSequence], progress: Callable[[int], None]) -> BlockMeasure:
        """Give every sequence logits until it is finished; `progress` is called with the block's new tokens so far."""

    def stop(self) -> None:
        """Let a `run` in another thread raise as soon as it can."""


class Job:
    """Runs the lines that have no answer yet. Another thread may read `totals`, `done_tokens` and `done_share`."""

    def __init__(
        self,
        batch: BatchFile,
        results: Results,
        *,
        blocks: Sequence[int] | int,
        model: str,
        token_text: TokenText,
    ) -> None:
        """`blocks` says how many lines go through the runner at once, in the order of `ranked`: a count for each block,
        or one for all. `model` is the name that answers carry."""
        self._batch, self._results = batch, results
        self._model, self._token_text = model, token_text
        answered = set(results.done)
        todo = [index for index in range(len(batch.lines)) if index not in answered]
        self._problems = [index for index in todo if batch.lines[index].problem is not None]
        order = ranked(batch.lines, [index for index in todo if batch.lines[index].problem is None])
        if isinstance(blocks, int):
            blocks = equal(len(order), blocks)
        if sum(blocks) != len(order):
            raise ValueError(f"blocks of {sum(blocks)} lines in all are not those of {len(order)}")
        ends = list(accumulate(blocks))
        self.blocks = [order[end - count : end] for end, count in zip(ends, blocks, strict=True)]
        self.totals = Totals()
        self._sizes = [
            (
                sum(batch.lines[index].prompt_tokens for index in block),
                sum(batch.lines[index].max_new_tokens for index in block),
            )
            for block in self.blocks
        ]
        self._block_tokens = 0  # new, of the block that runs now

    @property
    def done_tokens(self) -> int:
        return self.totals.new_tokens + self._block_tokens

    @property
    def done_share(self) -> float:
        """How much of the job is done, from 0 to 1, as if every line took all the tokens it may."""
        if not self._sizes:
            return 1.0
        done, ratio = self.totals.blocks, self._prompt_weight
        weights = [ratio * prompt_tokens + new_tokens for prompt_tokens, new_tokens in self._sizes]
        part = min(self._block_tokens / self._sizes[done][1], 1.0) * weights[done] if done < len(weights) else 0.0
        return (sum(weights[:done]) + part) / sum(weights)

    def workloads(self) -> list[tuple[int, Workload]]:
        """(sequences, their longest prompt and answer) of each block, for the cost model."""
        result = []
        for block in self.blocks:
            lines = [self._batch.lines[index] for index in block]
            prompt = max(line.prompt_tokens for line in lines)
            result.append((len(block), Workload(prompt_len=prompt, gen_len=max(line.max_new_tokens for line in lines))))
        return result

    def answer_problems(self) -> None:
        """Answer the lines that have a problem, by saying it."""
        lines = self._batch.lines
        if self._problems:
            bad = [lines[index] for index in self._problems]
            self._results.append([failure(line, BAD_REQUEST, str(line.problem)) for line in bad])
            self._problems = []

    def run(self, runner: BlockRunner) -> Totals:
        """Answer every line. Raises what the runner and the output file raise, after the finished answers are safe."""
        self.answer_problems()
        for block in self.blocks[self.totals.blocks :]:
            sequences = [self._batch.sequence(index) for index in block]
            try:
                measure = runner.run(sequences, self._progress)
            except BaseException:
                self._write([each for each in sequences if each.finished])
                raise
            self._write(sequences)
            self._block_tokens = 0
            self.totals.add(measure, len(block))
        return self.totals

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
