"""Token ids to text while they are generated: characters stay whole, stop strings never show. Knows no model."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Decoder of ids into text, special tokens left out: `flashllm.generate.tokenizer.Tokenizer`."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Turns ids into text, a token at a time. Text is returned once no later token can change it."""

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._start, self._shown_until = 0, 0  # ids from _start on are decoded; before _shown_until they are shown
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; the text that no later token can change, beyond what was returned before."""
        self._ids.append(token_id)
        shown = self._decode(self._start, self._shown_until)
        whole = self._decode(self._start, len(self._ids))
        if whole.endswith("\ufffd") or len(whole) < len(shown):  # in the middle of a character
            return ""
        piece = whole[len(shown) :]
        if piece.strip(" "):  # vocabularies that mark spaces drop the one before the first text they decode
            self._start = self._shown_until
        self._shown_until = len(self._ids)
        return self._release(piece)

    def finish(self) -> str:
        """End the text; what was held back."""
        if self.stopped:
            return ""
        shown = self._decode(self._start, self._shown_until)
        rest = self._decode(self._start, len(self._ids))[len(shown) :]
        self._shown_until = len(self._ids)
        text = self._release(rest)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end])

    def _release(self, piece: str) -> str:
        text, self._held = self._held + piece, ""
        ends = [text.index(stop) for stop in self._stop if stop in text]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text
