"""A batch file's requests as sequences of one model. Knows the model's tokenizer and sizes, not its weights."""

import dataclasses
from dataclasses import dataclass

from flashllm.api import prompts
from flashllm.api.requests import Request
from flashllm.offload.jobs.sequences import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder(prompts.PromptEncoder):
    """Turns requests into sequences of one model. `tokenizer` and `template` are None where the model has none."""

    def sequence(self, request: Request, ids: list[int], key: int, *, marks: bool = False) -> TokenSequence:
        """The request's sequence, before its first token. `ids` are those of `encode`.

        With `marks` those of reasoning and calls stay in its text, for `TokenSequence.said`.
        """
        reading = self.reading(request, ids) if marks else None
        return TokenSequence(
            ids,
            dataclasses.replace(request.options, max_new_tokens=self.max_new_tokens(request, len(ids))),
            decoder=self.tokenizer if reading is None else reading.decoder,
            end_ids=self.end_ids if self.tokenizer is None else self.tokenizer.end_ids,
            logprobs=request.logprobs,
            matcher=self.matcher(request, ids),
            key=key,
            parser=None if reading is None else reading.parser,
        )
