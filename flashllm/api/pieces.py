"""A long text as token ids, a piece at a time: the ids of the whole, in the memory of a piece, and no more than wanted.

Tokenising takes more than a hundred bytes for each of the text's, so a text is cut into pieces. Each begins inside the
one before; where both have the same two tokens one after the other, the ids of the second follow those of the first.
That they are the whole's has two reasons:

- A pre-tokenizer reads from left to right, and no further ahead than the next word. Words well before a piece's end are
  the whole's, and a piece that begins with such a word goes on like the whole.
- A word longer than a piece (to SentencePiece's BPE a whole text is one) is cut where two tokens meet. A merge sees two
  neighbours and nothing else, so ids are BPE's exactly if each two neighbours are what BPE makes of their own text; and
  those of both pieces are.

Knows no model and no request.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

PIECE_CHARS = 2048  # some milliseconds, in which Python does nothing else
_MOST_CHARS = 4 * PIECE_CHARS  # of a piece, where a shorter one cannot be cut
_WHOLE_CHARS = 32 * PIECE_CHARS  # of a text, where the tokenizer is one whose texts cannot be
_MARGIN = 256  # characters at a piece's end that the next one has too
_END = 64  # of those, whose ids may depend on what follows
_WORDS_AHEAD = 3  # words at a piece's end that may: two, and one that is cut
_SHIFTS = 128  # places tried in a long word: repeated tokens meet again after their length
_COMPOSED = 4  # bytes for each that Unicode's composed form leaves: three, of Korean
# A word may reach over a run of these or not, as the run ends: spaces before a line's end, capitals before others.
_RUN = re.compile(r"\s+|[A-Z]+")
_LOOKS_BACK = re.compile(r"\(\?<|\(\?=|\\[bBAGZz]|(?<![\[\\])\^|(?<!\\)\$$")
_WIDE = (*range(0x800, 0xD800, 0x800), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x10000))
_EVERY_BYTE = "".join(map(chr, (*range(0x800), *_WIDE)))  # that UTF-8 has
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts")  # they may leave all text


class TooLong(Exception):
    """A text that this tokenizer must be given whole, and that is too long for that."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Ids of `text[start:end]`, and some of what was glued to it; spans are places in the text."""

    start: int
    end: int
    lead: str  # glued before it
    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    words: Sequence[int]
    last_word: int  # the one that reaches `end`

    def meet(self, index: int) -> bool:
        """True where token `index` and the one before it meet between two characters."""
        return index > 0 and self.spans[index][0] >= self.spans[index - 1][1]


class _Runs:
    """A text, and the run of characters that a piece of it ended in."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._run = 0, 0  # looked through once, not for each of its pieces

    def closing(self, end: int) -> str:
        """How the run that is cut at `end` goes on, without its middle."""
        if not self._run[0] < end <= self._run[1]:
            run = _RUN.match(self.text, end - 1)
            self._run = (end - 1, end) if run is None else run.span()
        stop = self._run[1]
        if stop <= end:
            return ""
        line = next((mark for mark in "\n\r" if self.text.find(mark, end, stop) >= 0), "")
        return line + self.text[stop - 1 : stop + _END // 4]


class Pieces:
    """Tokenises texts of any length by a loaded tokenizer. Used by one thread at a time."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._whole = backend
        self._added = backend.get_added_tokens_decoder()
        self._normalizers, self._splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        self._is_bpe = isinstance(backend.model, tokenizers.models.BPE)
        # The same tokenizer but for its post-processor, which adds tokens and moves places.
        self._bare = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._bare.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._bare.pre_tokenizer = backend.pre_tokenizer
        in_order = [token for _, token in sorted(self._added.items())]
        for special, tokens in itertools.groupby(in_order, lambda token: token.special):  # each call costs them all
            (self._bare.add_special_tokens if special else self._bare.add_tokens)(list(tokens))
        plain, whole = self._bare.encode("a").ids, backend.encode("a").ids
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        self._before, self._after = whole[:at], whole[at + len(plain) :]
        self._strips = any(token.lstrip for token in self._added.values())
        self._margin = _MARGIN + max((len(token.content) for token in self._added.values()), default=0)
        self._can_cut = (
            [*self._before, *plain, *self._after] == whole
            and str(self._bare.get_added_tokens_decoder()) == str(self._added)
            and not any(token.single_word for token in self._added.values())
            and not any(part["type"] in ("Strip", "BertNormalizer") for part in self._normalizers)
            and not any(_LOOKS_BACK.search(_regex(part)) for part in self._splitters)
        )

    @cached_property
    def _sizes(self) -> tuple[int, bytes] | None:
        """The most bytes of a text that a token stands for, and the bytes that none does; None where texts may shrink
        without a bound."""
        strips = any(token.lstrip or token.rstrip for token in self._added.values())
        kept = all(part["type"] in _KEEPING and part.get("behavior") != "Removed" for part in self._splitters)
        shrinking = [part for part in self._normalizers if not _grows(part)]
        if strips or not kept or not self._is_bpe or any(part["type"] != "NFC" for part in shrinking):
            return None
        model, by_bytes = self._whole.model, any(part["type"] == "ByteLevel" for part in self._splitters)
        dropped = b""
        if by_bytes:
            level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            ((letters, _),) = level.pre_tokenize_str(_EVERY_BYTE)
            pairs = zip(_EVERY_BYTE.encode(), letters, strict=True)
            dropped = bytes({byte for byte, letter in pairs if model.token_to_id(letter) is None})
        elif not model.byte_fallback or any(model.token_to_id(f"<0x{n:02X}>") is None for n in range(256)):
            return None
        if dropped and model.unk_token is not None:
            return None  # one unknown token may stand for many
        longest = 4  # of a character
        for index in range(self._whole.get_vocab_size()):
            token = self._whole.id_to_token(index) or ""
            longest = max(longest, len(token) if by_bytes and index not in self._added else len(token.encode()))
        return longest * (_COMPOSED if shrinking else 1), dropped

    def least(self, text: str) -> int:
        """As many tokens as `text` has at least; 0 where that cannot be told."""
        if len(text) <= PIECE_CHARS or self._sizes is None:
            return 0
        longest, dropped = self._sizes
        parts = (text[start : start + _MOST_CHARS] for start in range(0, len(text), _MOST_CHARS))
        return -(-sum(len(part.encode().translate(None, dropped)) for part in parts) // longest)

    def encode(
        self, text: str, *, add_special: bool = True, most: int | None = None
    ) -> Generator[None, None, list[int]]:
        """Ids of `text`, in steps that take the time and the memory of a piece.

        Of more than `most` ids some may be missing, but there are more than `most`. TooLong where it cannot be cut.
        """
        size = PIECE_CHARS if self._can_cut else _WHOLE_CHARS
        if len(text) <= size:
            return list(self._whole.encode(text, add_special_tokens=add_special).ids)
        while self._can_cut and size <= _MOST_CHARS:
            ids = yield from self._cut(text, size, most)
            if ids is not None:
                return [*self._before, *ids, *self._after] if add_special else ids
            size *= 2
        what, most = ("a word", _MOST_CHARS) if self._can_cut else ("a text", _WHOLE_CHARS)
        raise TooLong(f"this model's tokenizer cannot take {what} of more than {most} characters")

    def _cut(self, text: str, size: int, most: int | None) -> Generator[None, None, list[int] | None]:
        """Ids of `text` by pieces of `size` characters; None where one does not go on in the next."""
        ids: list[int] = []
        runs = _Runs(text)
        piece, first, shift = self._piece(runs, 0, size), 0, 0
        while piece.end < len(text):
            yield
            for start, lead, moved in self._starts(text, piece, first, shift):
                # A short one tells whether the two meet.
                probe = self._piece(runs, start, piece.end - start, lead)
                if self._meeting(piece, first, probe) is not None:
                    shift = moved
                    break
            else:
                return None
            following = self._piece(runs, start, size, lead)
            found = self._meeting(piece, first, following)
            if found is None:
                return None
            ids += piece.ids[first : found[0]]
            piece, first = following, found[1]
            if most is not None and len(ids) > most:
                return ids
        return [*ids, *piece.ids[first:]]

    def _piece(self, runs: "_Runs", start: int, size: int, lead: str = "") -> _Piece:
        end = min(len(runs.text), start + size)
        made = self._bare.encode(f"{lead}{runs.text[start:end]}{runs.closing(end)}", add_special_tokens=False)
        back = start - len(lead)
        spans = [(left + back, right + back) for left, right in made.offsets]
        words = [word or 0 for word in made.word_ids]  # every token is of a word: nothing is added to the text's own
        within = [word for word, (left, _) in zip(words, spans, strict=True) if left < end]
        return _Piece(start, end, lead, made.ids, spans, words, within[-1] if within else 0)

    def _starts(self, text: str, piece: _Piece, first: int, shift: int) -> Iterator[tuple[int, str, int]]:
        """Places where the piece after `piece`, its tokens used from `first` on, may begin, and what is glued to it:
        with a word, or where the piece's end is one word, within that, by a shift that is told. `shift` goes first."""
        spans, words = piece.spans, piece.words
        if first >= len(spans):
            return
        least = spans[first][0] + (piece.end - spans[first][0]) // 4
        margin = max(self._margin, (piece.end - piece.start) // 8)  # for longer tokens, in longer pieces
        places = [
            index
            for index in range(first + 1, len(spans))
            if least < spans[index][0] <= piece.end - margin
            and piece.meet(index)
            and self._begins(text[spans[index][0]])
        ]
        for index in reversed(places):
            if words[index] != words[index - 1] and piece.last_word - words[index] > _WORDS_AHEAD:
                yield spans[index][0], "", shift
                break
        if not places or not self._is_bpe:
            return
        # What the word began with, and a small letter in it: they say how it may go on.
        lead, start = "", spans[places[-1]][0]
        if self._splitters:
            word = words[places[-1]]
            begin = spans[words.index(word)][0]
            small = piece.lead[2:] if word == words[0] else ""
            small = next((each for each in reversed(text[max(begin, piece.start) : start]) if each.islower()), small)
            lead = (piece.lead[:2] if word == words[0] and piece.lead else text[begin : begin + 2]) + small
        for moved in (shift, *range(min(_SHIFTS, piece.end - 2 * _END - start))):
            if self._begins(text[start + moved]):
                yield start + moved, lead, moved

    def _begins(self, char: str) -> bool:
        """True where a text may be cut before `char`: it is composed with nothing before it, and no token takes it."""
        marks = unicodedata.category(char).startswith("M") or "\u1100" <= char <= "\u11ff"
        return not marks and not (self._strips and char.isspace())

    def _meeting(self, piece: _Piece, first: int, following: _Piece) -> tuple[int, int] | None:
        """(tokens of `piece`, of `following`) before the first two that both have; None without such."""
        places = {}
        for index in range(first + 1, len(piece.ids)):
            ahead = piece.last_word - piece.words[index]
            sure = ahead >= _WORDS_AHEAD or (self._is_bpe and ahead == 0)
            if sure and piece.meet(index) and piece.spans[index][1] <= piece.end - _END:
                places[piece.spans[index]] = index
        for index in range(1, len(following.ids)):
            at = places.get(following.spans[index])
            if following.spans[index - 1][0] >= following.start and following.meet(index) and at is not None:
                same = slice(index - 1, index + 1), slice(at - 1, at + 1)
                if (following.ids[same[0]], following.spans[same[0]]) == (piece.ids[same[1]], piece.spans[same[1]]):
                    return at, index
        return None


def _parts(component: Any) -> list[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json describes them."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    parts: list[Mapping[str, Any]] = []
    pending = [described]
    while pending:
        part = pending.pop()
        inner = part.get("normalizers", part.get("pretokenizers"))
        if inner is None:
            parts.append(part)
        else:
            pending += inner
    return parts


def _regex(part: Mapping[str, Any]) -> str:
    pattern = part.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""


def _grows(part: Mapping[str, Any]) -> bool:
    """True for a normalizer that takes no byte away."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return bool(part["type"] == "Prepend")
