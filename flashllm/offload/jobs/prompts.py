"""A batch file's requests as sequences of one model. Knows the model's tokenizer and sizes, not its weights."""

import dataclasses
from dataclasses import dataclass

from flashllm.api import prompts
from flashllm.api.requests import Request
from flashllm.offload.jobs.sequences import Sequence as TokenSequence
from flashllm.replies.parser import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder(prompts.PromptEncoder):
    """Turns requests into sequences of one model. `tokenizer` and `template` are None where the model has none."""

    def sequence(self, request: Request, ids: list[int], key: int, *, marks: bool = False) -> TokenSequence:
        """The request's sequence, before its first token. `ids` are those of `encode`.

        With `marks` those that `said` reads stay in its text.
        """
        reading = self.reading(request, ids) if marks else None
        decoder = self.tokenizer if reading is None else reading.decoder
        options = dataclasses.replace(request.options, max_new_tokens=self.max_new_tokens(request, len(ids)))
        end_ids = self.end_ids if self.tokenizer is None else self.tokenizer.end_ids
        return TokenSequence(ids, options, decoder=decoder, end_ids=end_ids, logprobs=request.logprobs, key=key)

    def said(self, request: Request, sequence: TokenSequence) -> list[Event]:
        """Read the answer of a sequence with marks."""
        reading = self.reading(request, sequence.prompt)
        if reading is None:
            return [Event("text", sequence.text)]
        return reading.parser.feed(sequence.text) + reading.parser.finish()
