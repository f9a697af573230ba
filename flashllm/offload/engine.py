"""`OffloadEngine`: many prompts through a model that need not fit the accelerator or memory, from Python.

The command line's jobs (`flashllm offload run`) go the same way with files at both ends.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashllm.api.fields import BadRequest
from flashllm.api.messages import Message, messages_of
from flashllm.api.prompts import Unanswerable
from flashllm.api.requests import Kind, Request, prompt_of
from flashllm.base.files import Closing
from flashllm.base.units import parse_size
from flashllm.errors import UsageError
from flashllm.generate.grammar import Constraint
from flashllm.generate.logprobs import TokenLogprobs
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.accelerators import Device
from flashllm.offload.jobs.blocks import Size, cut, equal, in_blocks
from flashllm.offload.jobs.lines import rank
from flashllm.offload.jobs.requests import own_seed
from flashllm.offload.jobs.sequences import FinishReason, sequence_of
from flashllm.offload.jobs.sequences import Sequence as TokenSequence
from flashllm.offload.launch import CACHE_BITS, LaunchOptions, prepare
from flashllm.offload.model_text import ModelText
from flashllm.offload.planner.packing import PACKED_BITS
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import Runner, sizes_of

_WINDOW = 1024  # prompts that `run` looks at together, at least: among them it finds those of like length
_WINDOW_BLOCKS = 4

_SEVERAL = "prompts are several: give one text, or one conversation, as the only item of a list"

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one prompt. `error` says why there is none, or no more: then `finish_reason` is "error"."""

    index: int  # of the prompt, from 0
    text: str = ""  # also where the model has no tokenizer
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    finish_reason: FinishReason = "error"
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class OffloadEngine(Closing):
    """A model that answers many prompts at once. A context manager; `close` frees weights, cache and scratch files.

    Weights are loaded when the first prompts come, because the policy depends on how long they are. A later call with
    more prompts, or with longer ones than memory holds, plans again. Not for several threads at once; constructor
    arguments can be pickled.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        memory: int | str | None = None,
        device: Device = "auto",
        gpu_memory: int | str | None = None,
        policy: Policy | Mapping[str, Any] | str | Path | None = None,
        compress: Iterable[str] | None = None,
        sparse_attention: float | None = None,
        cache_bits: int = CACHE_BITS[0],
        weight_bits: int = PACKED_BITS[0],
        overlap: bool | None = None,
        threads: int | None = None,
        scratch: str | Path | None = None,
    ) -> None:
        """`model` is a Hugging Face folder, a flashllm directory or a hub id. Sizes are bytes or texts like "7GB".

        `device` is the device tier: "cpu" by the native core's products, whose answers do not depend on the batch;
        "cuda" by torch, whose answers agree within the dtype's tolerance; "auto" is a GPU where torch has one.
        `gpu_memory` is its limit.

        `policy` is a `Policy`, its fields, or a file with them; None plans one. `compress` is any of "weights",
        "cache"; `sparse_attention` the share of the value cache that decoding reads (paper B, section 5). Those two
        and `overlap` are the policy's where they are None. UsageError, FormatError and UnsupportedModelError for what
        cannot be.
        """
        self._options = LaunchOptions(
            memory=_nbytes(memory),
            device=device,
            gpu_memory=_nbytes(gpu_memory),
            policy=_policy(policy),
            compress=None if compress is None else frozenset(compress),
            sparse_attention=sparse_attention,
            cache_bits=cache_bits,
            weight_bits=weight_bits,
            overlap=overlap,
            threads=threads,
            scratch=None if scratch is None else Path(scratch),
        )
        self.notices: list[str] = []  # of downloads, plans and the runtime, for people
        self._model = ModelText.load(model, say=self.notices.append)
        self._runner: Runner | None = None
        self._planned_requests = self._block_size = 0
        self._closed = False

    @property
    def policy(self) -> Policy | None:
        """The policy in use; None before the first prompts."""
        return None if self._runner is None else self._runner.policy

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        max_new_tokens: int | None = None,
        logprobs: int | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """The answers to `prompts` in their order: texts, lists of token ids, or conversations (lists of messages).

        `sampling` is one for all or one a prompt; `max_new_tokens` overrides it; the context's end ends an answer, too.
        With a JSON `schema` answers are valid by it, but for those that a limit ends. What is no prompt, or is too long
        for the context, gets an Output with an `error`. Of one sampling with a seed every prompt draws by a seed of its
        own, made of it and its index; so answers do not depend on the batch. BudgetError where the limits cannot hold a
        block.
        """
        if isinstance(prompts, str) or any(isinstance(each, Mapping) for each in prompts):  # letters, messages
            raise UsageError(_SEVERAL)
        samplings: Iterable[SamplingOptions]
        if sampling is None or isinstance(sampling, SamplingOptions):
            samplings = itertools.repeat(sampling or SamplingOptions())
        elif len(sampling) != len(prompts):
            raise UsageError(f"{len(sampling)} samplings do not go with {len(prompts)} prompts")
        else:
            samplings = sampling
        pairs = [
            (prompt, one if max_new_tokens is None else dataclasses.replace(one, max_new_tokens=max_new_tokens))
            for prompt, one in zip(prompts, samplings, strict=False)
        ]
        constraint = None if schema is None else Constraint.of_schema(dict(schema))
        return sorted(self._answers(0, pairs, logprobs, constraint), key=lambda output: output.index)

    def run(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingOptions | None = None,
        *,
        logprobs: int | None = None,
        window: int | None = None,
    ) -> Iterator[Output]:
        """The answers to a stream of prompts, as blocks end; `Output.index` says to which. Errors as of `generate`.

        `window` prompts are taken from the stream at a time (by default four blocks, and 1024 at least) and sorted into
        blocks of like length, so memory stays bounded however long the stream is.
        """
        if isinstance(prompts, str):
            raise UsageError(_SEVERAL)
        if window is not None and window < 1:
            raise UsageError(f"window must be at least 1, not {window}")
        stream, first = iter(prompts), 0
        sampling = sampling or SamplingOptions()
        while taken := list(itertools.islice(stream, window or max(_WINDOW, _WINDOW_BLOCKS * self._block_size))):
            yield from self._answers(first, [(prompt, sampling) for prompt in taken], logprobs)
            first += len(taken)

    def stop(self) -> None:
        """End the block under way: `generate` or `run`, in another thread, raises Stopped."""
        if self._runner is not None:
            self._runner.stop()

    def close(self) -> None:
        """Free everything. The engine takes no prompts any more."""
        self._closed = True
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        self._model.close()

    def _answers(
        self,
        first: int,
        pairs: Sequence[tuple[Prompt, SamplingOptions]],
        logprobs: int | None,
        constraint: Constraint | None = None,
    ) -> Iterator[Output]:
        """Answers to prompts number `first` and on, block by block."""
        if self._closed:
            raise UsageError("the engine is closed")
        sequences = []
        for index, (prompt, sampling) in enumerate(pairs, first):
            try:
                sequences.append(self._sequence(index, prompt, sampling, logprobs, constraint))
            except (BadRequest, Unanswerable) as error:
                yield Output(index=index, error=str(error))
        if not sequences:
            return
        sequences.sort(key=lambda each: rank(len(each.prompt), each.options.max_new_tokens), reverse=True)
        runner, counts = self._open(sizes_of(sequences))
        for block in in_blocks(sequences, counts):
            runner.run(block)
            yield from (_output(each) for each in block)

    def _sequence(
        self, index: int, prompt: Prompt, sampling: SamplingOptions, logprobs: int | None, constraint: Constraint | None
    ) -> TokenSequence:
        seed = None if sampling.seed is None else own_seed(sampling.seed, f"prompt-{index}")
        kind, meant = _meaning(prompt)
        request = Request(
            custom_id=f"prompt-{index}",
            kind=kind,
            prompt=meant,
            options=dataclasses.replace(sampling, seed=seed),
            max_new_given=False,  # as many as the context has room for
            logprobs=logprobs,
            constraint=constraint,
        )
        return sequence_of(self._model.encoder, request, self._model.encoder.encode(request), index)

    def _open(self, sizes: Sequence[Size]) -> tuple[Runner, Sequence[int]]:
        """A runner for sequences of these sizes, and how many of them go through it at once."""
        runner, requests = self._runner, len(sizes)
        if runner is not None:
            most = runner.policy.block_size
            if self._options.policy is not None:
                return runner, equal(requests, most)
            if requests <= max(most, self._planned_requests) and (counts := cut(sizes, most, runner.fits)):
                return runner, counts
            runner.close()
            self._runner = None
        launch = prepare(self._model.path, self._model.shape, sizes, self._options, report=self.notices.append)
        self._runner = runner = Runner(self._model.path, launch.policy, launch.options)
        self.notices += runner.notices
        self._block_size, self._planned_requests = launch.policy.block_size, requests
        return runner, launch.blocks


def _meaning(prompt: Prompt) -> tuple[Kind, str | tuple[int, ...] | tuple[Message, ...]]:
    """A prompt's kind, and the prompt as a request has it. BadRequest for what is none."""
    if isinstance(prompt, str):
        return "prompt", prompt_of(prompt)
    try:
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return "chat", messages_of([dict(each) if isinstance(each, Mapping) else each for each in items])
        # Numpy's integers are ids; True, of which `index` makes 1, is none.
        return "prompt", prompt_of([each if isinstance(each, bool) else operator.index(each) for each in items])
    except TypeError:
        raise BadRequest("a prompt must be a text, a list of token ids or a list of messages") from None


def _output(sequence: TokenSequence) -> Output:
    return Output(
        index=sequence.key,
        text=sequence.text,
        token_ids=tuple(sequence.output),
        prompt_tokens=len(sequence.prompt),
        finish_reason=sequence.finish_reason or "error",
        logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs),
        error=sequence.error,
    )


def _nbytes(size: int | str | None) -> int | None:
    return parse_size(size) if isinstance(size, str) else size


def _policy(policy: Policy | Mapping[str, Any] | str | Path | None) -> Policy | None:
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        return Policy.from_json(dict(policy))
    return Policy.load(Path(policy))
