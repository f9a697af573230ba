"""Answers that must have a form: JSON by a schema, a regular expression, a grammar. Compiled and matched by llguidance.

A grammar is compiled once for a tokenizer; each answer has a `Matcher` of its own. Where a grammar leaves but one text,
that text's tokens are chosen whatever the logits are, so a pass may compute several of them. Reasoning comes before the
form: until its end any token may come, or so many. Knows no model. llguidance is loaded with the first form: its 4 MB,
and its tables' hundreds of bytes for each token of the vocabulary, are not for runs without one.
"""

import copy
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from flashllm.base.text import one_line
from flashllm.errors import FormError, UsageError
from flashllm.generate.detokenizer import Decoder
from flashllm.replies.written import bounded

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# JSON is written in one line: a small model given the choice writes white space without end.
WRITTEN: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT = 8  # compiled grammars
MOST_CHARS = 1 << 18  # of a schema or a grammar: larger ones compile for seconds
_TOKEN_NBYTES, _GRAMMAR_NBYTES = 800, 4 << 20  # memory: of each token of the vocabulary; of a compiled grammar
_TRIED = 200  # parts of a schema that are tried, to find what is wrong
_INNER_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_INNER_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_INNER = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_MARK_TOKENS = 16  # the end of reasoning is within so many
# What eight logits lose, by the byte that says which of them may come: np.where takes two to eighteen times as long.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LESS = np.where(_BITS, np.float32(0), np.float32(np.inf))

Kind = Literal["json", "regex", "lark"]
_NAMES: dict[Kind, str] = {"json": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have: a JSON schema, a regular expression or a Lark grammar, as `text`."""

    kind: Kind
    text: str

    @classmethod
    def of_schema(cls, schema: Any) -> "Constraint":
        """JSON that is valid by `schema`. UsageError where that is no schema."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise UsageError("the schema must be a JSON object")
        schema = {name: value for name, value in schema.items() if name != "x-guidance"}  # the compiler's options
        try:
            text = json.dumps(bounded(schema), ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"the schema cannot be written as JSON: {error}") from None
        return cls("json", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How a model reasons before its answer."""

    decoder: Decoder  # which shows the marks
    close: str  # the mark behind it
    close_ids: tuple[int, ...]  # tokens that end it where it becomes too long
    opened: bool  # the prompt has opened it
    open_id: int | None = None  # the token that opens it, as the answer's first
    most: int | None = None  # tokens of it; None: any number


class Matcher:
    """One answer's way through a grammar, which it is told token by token (`accept`). FormError where it is lost."""

    def __init__(
        self, state: "LLMatcher | None", vocab: int, end_ids: Sequence[int], reasoning: Reasoning | None = None
    ) -> None:
        """`state`: of the grammar's start; None: nothing but the reasoning is bounded. `end_ids` end an answer."""
        self._state, self._reasoning, self._end_ids = state, reasoning, list(end_ids)
        self._hold_bits(4 * -(-vocab // 32))
        self._thinking = reasoning is not None and reasoning.opened
        self._may_open = reasoning is not None and not reasoning.opened and reasoning.open_id is not None
        self._thought: list[int] = []
        self.forced: deque[int] = deque()  # tokens that come next, whatever the logits are
        self.ended = False  # nothing can follow
        self._look_ahead()

    @property
    def is_whole(self) -> bool:
        """True where the answer may end here."""
        return self.ended or self._state is None or self._state.is_accepting()

    def copy(self) -> "Matcher":
        """A matcher that goes on from here by itself."""
        other = copy.copy(self)
        other._state = None if self._state is None else self._state.deep_copy()
        other._thought, other.forced = [*self._thought], self.forced.copy()
        other._hold_bits(self._bits.nbytes)
        return other

    def _hold_bits(self, nbytes: int) -> None:
        # Behind a pass nothing is in the processor's caches, and what a call of numpy takes counts.
        self._bits = np.empty(nbytes, np.uint8)
        self._bits_address = self._bits.ctypes.data

    def masked(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """`logits` [vocab], with -inf for the tokens that may not come."""
        if self._state is None:
            return logits
        if self._thinking:  # what must come has not begun
            masked = logits.copy()
            masked[self._end_ids] = -np.inf
            return masked
        self._state.unsafe_compute_mask_ptr(self._bits_address, self._bits.nbytes)
        self._check()
        if self._may_open and self._reasoning is not None and self._reasoning.open_id is not None:
            self._bits[self._reasoning.open_id >> 3] |= 1 << (self._reasoning.open_id & 7)
        bits = self._bits[: -(-len(logits) // 8)]
        bits[-1] &= 0xFF >> -len(logits) % 8  # the tokenizer may know tokens that the model has no logits for
        if not bits.tobytes().strip(b"\0"):
            raise FormError("no token of the model goes on as the answer's form demands")
        less = _LESS.take(bits, axis=0).reshape(-1)[: len(logits)]
        return np.subtract(logits, less, out=less)

    def accept(self, token_id: int) -> None:
        """Go on by a token that `forced` or `masked` lets come."""
        if self.forced:
            self.forced.popleft()
        may_open, self._may_open = self._may_open, False
        if may_open and self._reasoning is not None and token_id == self._reasoning.open_id:
            self._thinking = True
        elif self._thinking and self._reasoning is not None:
            self._thought.append(token_id)
            thought = self._reasoning.decoder.decode(self._thought[-_MARK_TOKENS:])
            # The tokens that end it belong to it, also those behind the mark: the form begins after them.
            self._thinking = bool(self.forced) or self._reasoning.close not in thought
        elif self._state is not None:
            self._state.consume_token(token_id)
            self.ended = self._state.is_stopped()
            self._check()
        if not self.forced and not self.ended:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Find the tokens that must come next."""
        if self._thinking and self._reasoning is not None:
            if self._reasoning.most is not None and len(self._thought) >= self._reasoning.most:
                self.forced.extend(self._reasoning.close_ids)
        elif self._state is not None and not self._may_open:
            self.forced.extend(self._state.compute_ff_tokens())

    def _check(self) -> None:
        if self._state is not None and self._state.is_error():
            raise FormError(f"the answer's form is too complex here: {one_line(self._state.get_error())}")


class Grammars:
    """Compiles constraints for one tokenizer, and keeps those used last. Its tables are made at the first. Not for
    several threads at once."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_ids: Iterable[int],
        vocab: int,
        *,
        make_room: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """`vocab`: the model's. `make_room` is told of bytes before they are taken, and may raise BudgetError; negative
        ones are given back."""
        self._backend, self._end_ids = backend, sorted(end_ids)
        self.vocab = vocab
        self._make_room = make_room
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def marks(self) -> dict[str, int]:
        """The tokens that no text is made of, which a grammar names by their ids."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if self._tables().is_special_token(index)}

    def start(self, constraint: Constraint, reasoning: Reasoning | None = None) -> Matcher:
        """A matcher of `constraint`. UsageError that says what is wrong in it, and where; BudgetError."""
        state = self._compiled.pop(constraint, None) or self._compile(constraint)
        self._compiled[constraint] = state
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return Matcher(state.deep_copy(), self.vocab, self._end_ids, reasoning)

    def _compile(self, constraint: Constraint) -> "LLMatcher":
        refused = f"{_NAMES[constraint.kind]} cannot be the form of an answer"
        if len(constraint.text) > MOST_CHARS:
            raise UsageError(f"{refused}: it has more than {MOST_CHARS} characters")
        state = self._state(constraint.kind, constraint.text)
        if error := state.get_error():
            said = one_line(error).replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
            raise UsageError(f"{refused}{self._place(constraint, error)}: {said}")
        try:
            Matcher(state.deep_copy(), self.vocab, self._end_ids).masked(np.zeros(self.vocab, np.float32))
        except FormError:
            raise UsageError(f"{refused}: no answer has it, or it is too complex") from None
        return state

    def _state(self, kind: Kind, text: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        match kind:
            case "json":
                made = LLMatcher.grammar_from_json_schema(json.dumps({**json.loads(text), "x-guidance": WRITTEN}))
            case "regex":
                made = LLMatcher.grammar_from_regex(text)
            case "lark":
                made = LLMatcher.grammar_from_lark(text)
        # An explosion was refused within 0.1 s and 20 MB where it was tried: fuel counts the automaton's expressions.
        limits = LLParserLimits(
            max_lexer_states=20_000,
            max_grammar_size=100_000,
            initial_lexer_fuel=100_000,
            step_lexer_fuel=50_000,
            verbose_errors=False,
        )
        return LLMatcher(self._tables(), made, log_level=0, limits=limits)

    def _tables(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            vocab = max(self.vocab, self._backend.get_vocab_size(with_added_tokens=True))
            nbytes = _TOKEN_NBYTES * vocab + _KEPT * _GRAMMAR_NBYTES
            self._make_room(nbytes)
            try:
                self._tokenizer = LLTokenizer(self._backend.to_str(), n_vocab=vocab, eos_token=self._end_ids or None)
            except ValueError as error:
                self._make_room(-nbytes)
                raise UsageError(
                    f"this model's tokenizer can hold answers to no form: {one_line(str(error))}"
                ) from None
            self.vocab = vocab
        return self._tokenizer

    def _place(self, constraint: Constraint, error: str) -> str:
        """JSON pointer to the innermost part of a schema that fails in the same way."""
        if constraint.kind != "json":
            return ""
        whole = json.loads(constraint.text)
        shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
        place, tried, level = "", 0, list(_parts(whole))
        while level and tried < _TRIED:
            name, part = level.pop(0)
            tried += 1
            if isinstance(part, dict) and self._state("json", json.dumps({**shared, **part})).get_error() == error:
                place, level = place + name, list(_parts(part))
        return f", at {place}" if place else ""


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of the schemas right inside `schema`."""
    if not isinstance(schema, Mapping):
        return
    for name in _INNER_MAPS:
        if isinstance(inner := schema.get(name), Mapping):
            yield from ((f"/{name}/{key}", each) for key, each in inner.items())
    for name in _INNER_LISTS:
        if isinstance(inner := schema.get(name), Sequence):
            yield from ((f"/{name}/{at}", each) for at, each in enumerate(inner))
    yield from ((f"/{name}", schema[name]) for name in _INNER if name in schema)
