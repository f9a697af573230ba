"""One request on its way: its prompt, the tokens chosen so far, their text, and why it ended. Knows no batch, no model.

A sequence draws from a random state of its own, so that its answer depends on its logits and its seed alone, never on
its neighbours in a batch.
"""

import dataclasses
from array import array
from collections.abc import Sequence as Ids
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flashllm.api.prompts import PromptEncoder
from flashllm.api.requests import Request
from flashllm.errors import FlashError, UsageError
from flashllm.generate.answer import Answer, Stopped
from flashllm.generate.detokenizer import Decoder
from flashllm.generate.grammar import Matcher
from flashllm.generate.logprobs import MAX_LOGPROBS, TokenLogprobs, logprobs_of
from flashllm.generate.sampling import Sampler, SamplingOptions
from flashllm.replies.parser import Event, Parser

FinishReason = Stopped | Literal["error"]


class Sequence:
    """A prompt and its continuation. `accept` takes the logits after the last token and chooses the next one.

    It is finished at its `Answer`'s end, or after logits that are not finite: that is an error of this sequence alone,
    in `error`, and leaves its neighbours as they are.
    """

    def __init__(
        self,
        prompt: Ids[int],
        options: SamplingOptions,
        *,
        decoder: Decoder | None,
        end_ids: frozenset[int],
        logprobs: int | None = None,
        matcher: Matcher | None = None,
        key: int = 0,
        parser: Parser | None = None,
    ) -> None:
        """`prompt` are token ids, at least one. `decoder` makes text of ids; None: no text, and so no stop strings.

        `end_ids`, `matcher`: as in `Answer`. `logprobs` likeliest tokens are recorded with each chosen one; None:
        nothing is recorded. `key` is the caller's own, to know the sequence by. `parser` reads the marks that are in
        the text; None: there are none.
        """
        if not len(prompt):
            raise UsageError("the prompt has no tokens")
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise UsageError(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {logprobs}")
        if options.stop and decoder is None:
            raise UsageError("stop strings need the model's tokenizer")
        self.prompt = array("q", prompt)
        self.options, self.key = options, key
        self.output = array("q")
        self.logprobs: list[TokenLogprobs] | None = None if logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # where finish_reason is "error"
        self._parser, self._num_logprobs = parser, logprobs or 0
        self._sampler, self._matcher = Sampler(options.seed), matcher
        self._answer = Answer(options, decoder=decoder, end_ids=end_ids, matcher=matcher)
        self._pieces: list[str] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest answer. The last token never goes through the model."""
        return len(self.prompt) + self.options.max_new_tokens

    @property
    def last_token(self) -> int:
        """The token whose logits are wanted next."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def text(self) -> str:
        """The answer's text so far: whole characters, and nothing from a stop string on."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def said(self) -> list[Event]:
        """Contents of the whole answer; once."""
        if self._parser is None:
            return [Event("text", self.text)]
        return self._parser.feed(self.text) + self._parser.finish(cut=self.finish_reason == "length")

    def accept(self, logits: NDArray[np.float32]) -> None:
        """Choose the next token after `logits` (fp32 [vocab], left as they are).

        UsageError where the sequence is finished already.
        """
        if self.finished:
            raise UsageError("the sequence is finished and takes no further logits")
        context = self.prompt + self.output if self.options.repetition_penalty != 1 else ()
        try:
            token_id = self._sampler.choose(logits, context, self.options, self._matcher)
        except FlashError as error:
            self.fail(str(error))
            return
        self.output.append(token_id)
        if self.logprobs is not None:
            self.logprobs.append(logprobs_of(logits, token_id, self._num_logprobs))
        if piece := self._answer.push(token_id):
            self._pieces.append(piece)
        self.finish_reason = self._answer.stopped

    def fail(self, message: str) -> None:
        """End the sequence with an error of its own."""
        self.finish_reason, self.error = "error", message


def sequence_of(encoder: PromptEncoder, request: Request, ids: list[int], key: int, *, marks: bool = False) -> Sequence:
    """A request's sequence, before its first token. `ids` are those of `encoder.encode`.

    With `marks` those of reasoning and calls stay in its text, for `Sequence.said`.
    """
    reading = encoder.reading(request, ids) if marks else None
    return Sequence(
        ids,
        dataclasses.replace(request.options, max_new_tokens=encoder.max_new_tokens(request, len(ids))),
        decoder=encoder.tokenizer if reading is None else reading.decoder,
        end_ids=encoder.end_ids if encoder.tokenizer is None else encoder.tokenizer.end_ids,
        logprobs=request.logprobs,
        matcher=encoder.matcher(request, ids),
        key=key,
        parser=None if reading is None else reading.parser,
    )
