"""An answer's text and its end, a token at a time. Knows no model, and not how tokens are chosen."""

from typing import Literal

from flashllm.generate.detokenizer import Decoder, Detokenizer
from flashllm.generate.grammar import Matcher
from flashllm.generate.sampling import SamplingOptions

Stopped = Literal["eos", "length", "stop", "context"]


class Answer:
    """It ends with an end token, a stop string, the form that a matcher demands, the last token allowed, or the
    context."""

    def __init__(
        self,
        options: SamplingOptions,
        *,
        decoder: Decoder | None,
        end_ids: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        """`decoder` makes text of ids; None: no text, and so no stop strings. `end_ids` are ignored with
        `options.ignore_eos`."""
        self.left = options.max_new_tokens  # tokens that may still come
        self.stopped: Stopped | None = None
        self._ends = frozenset[int]() if options.ignore_eos else end_ids
        self._matcher = matcher
        self._detokenizer = None if decoder is None else Detokenizer(decoder, options.stop)

    def push(self, token_id: int, *, is_full: bool = False) -> str:
        """Add a token, which the matcher has seen; the text to show after it, and in `stopped` why it is the last.
        `is_full`: the context has no room for another."""
        self.left -= 1
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        if token_id in self._ends:
            self.stopped = "eos"
        elif self._has_stop_string() or (self._matcher is not None and self._matcher.ended):
            self.stopped = "stop"
        elif self.left == 0:
            self.stopped = "length"
        elif is_full:
            self.stopped = "context"
        if self.stopped is not None and self._detokenizer is not None:
            text += self._detokenizer.finish()
            if self._has_stop_string():
                self.stopped = "stop"  # perhaps in front of a character that stayed incomplete
        return text

    def _has_stop_string(self) -> bool:
        return self._detokenizer is not None and self._detokenizer.stopped
