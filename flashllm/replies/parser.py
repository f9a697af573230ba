"""The parser of answers: text in pieces goes in, events come out, the same however the text is cut.

It is a routine that waits for more text where it has to, so that each rule is written once, in the text's order. Until
a call has begun the routine can go back to its mark and try another way; a mark of which no way makes a call is text.
Knows neither the model nor who is told.
"""

import codecs
import functools
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashllm.replies import written
from flashllm.replies.formats import Call, Format

MAX_HEAD = 512  # characters of a call's head, and of an argument's
_LONGEST_MARK = 64
_SPACE, _IN_STRING = re.compile(r"\s*"), re.compile(r'[^"\\]+')
_LITERAL, _BETWEEN = re.compile(r"[\w.+-]+"), re.compile(r"[\s\w:,.+-]+")  # of JSON: a word, what is no bracket
_KEY = re.compile(r'\s*"?(?P<key>[^"<>]*?)"?\s*(?:</[\w:]+>\s*)?')  # of an argument between marks
_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
_OTHERS = ("id", "type", "tool_call_id")  # that an object may have
_PROGRAMS = ("code_interpreter", "python", "ipython")  # tools that take one

Wait = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of the answer, of its reasoning, or of the arguments of a call; or that a call begins or ends."""

    kind: Literal["text", "reasoning", "call", "arguments", "end"]
    text: str = ""  # of a call that begins: the tool's name
    index: int = 0  # of the call
    id: str = ""  # that the call's result will refer to


class _Malformed(Exception):
    """The text that follows is not written in this way."""


def new_id() -> str:
    """A call's id, where the model writes none: nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _Marks:
    """Marks to look for in a text that is still growing."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = [mark for mark in marks if mark]
        self.pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")

    def unfinished(self, text: str, at: int) -> int:
        """The place behind `at` from which the text's end may begin a mark; the text's length where there is none."""
        for start in range(max(at, len(text) - _LONGEST_MARK), len(text)):
            if any(mark.startswith(text[start:]) for mark in self._marks):
                return start
        return len(text)


_marks = functools.lru_cache(maxsize=64)(_Marks)


class Parser:
    """Parses one answer: `feed` its pieces, then `finish`. Both return the events that are certain by then."""

    def __init__(
        self,
        form: Format,
        tools: Mapping[str, Any] | None = None,
        *,
        thinking: bool = False,
        one_call: bool = False,
        make_id: Callable[[], str] = new_id,
    ) -> None:
        """`tools` has the schema of the parameters of each tool that is offered; without tools, calls are text.

        `thinking`: the prompt has opened reasoning already. `one_call`: the answer is `done` with its first call.
        """
        self._tools, self._make_id = tools or {}, make_id
        self._one_call, self.done = one_call, False
        self._ways: dict[str, list[Call]] = {}
        for call in form.calls:
            if self._tools or call.body == "message":
                self._ways.setdefault(call.open, []).append(call)
        self._thinking = dict(form.thinking)
        self._section, *section_ends = form.section if self._tools and form.section else ("",)
        opens = (*self._ways, self._section, *form.dropped)
        closes = (mark for ways in self._ways.values() for way in ways for mark in way.close)
        self._ends = tuple(sorted({*section_ends, *closes} - set(self._ways), key=len, reverse=True))
        self._later, self._first = _marks(opens), _marks((*opens, *self._thinking))
        self._marks = (*opens, *self._thinking, *self._ends)
        self._all = _marks(self._marks)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer, self._at, self._ended, self._cut = "", 0, False, False
        self._at_end = False  # more was wanted than there is
        self._events: list[Event] = []
        self._said = False  # some of the answer's text
        self._before = ""  # what is text if the mark behind it is
        self._calls = 0
        self._argued = False  # the call that has begun has arguments
        self._routine: Iterator[None] = self._run(thinking)
        next(self._routine)

    def feed(self, piece: str | bytes) -> list[Event]:
        """Take a piece of the answer. Of bytes, a character may come in two."""
        self._buffer += self._decoder.decode(piece) if isinstance(piece, bytes) else piece
        return self._go_on()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Take the answer's end. `cut`: it broke off, so that the beginning of a call is not text."""
        self._buffer += self._decoder.decode(b"", final=True)
        self._ended, self._cut = True, cut
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._routine, None)
        events, self._events = self._events, []
        ends = [at for at, event in enumerate(events) if event.kind == "end"]
        if self._one_call and ends:
            self.done, self._routine = True, iter(())
            return events[: ends[0] + 1]
        return events

    # The answer as a whole.

    def _run(self, thinking: bool) -> Wait:
        behind, held, tried = thinking, "", False  # behind a mark, white space counts for nothing
        if thinking:
            yield from self._reasoning(tuple(self._thinking.values()))
        while True:
            if "" in self._ways and not tried and not self._said:
                tried = True
                start, first = self._at, (yield from self._peek())
                self._at = start
                if first and first in self._ways[""][0].starts:
                    self._before = ""
                    behind = (yield from self._call("")) or behind
            mark = yield from self._text(behind, held)
            behind, held = True, ""
            if mark is None:
                return
            if mark in self._thinking:
                yield from self._reasoning((self._thinking[mark],))
                tried = False
            elif mark == self._section:
                held = self._before + mark
            elif mark in self._ways:
                behind = yield from self._call(mark)

    def _text(self, behind: bool, held: str) -> Generator[None, None, str | None]:
        """Tell text up to a mark, and return that; None at the end. `held` is text if nothing but text follows it."""
        start, self._at_end = self._at, False
        if behind and (mark := (yield from self._next(self._all))):
            self._before = held + self._buffer[start : self._at - len(mark)]
            return mark
        if self._cut and self._at_end:  # within a mark
            return None
        if held:
            self._at = start
            self._say(held)
        while True:
            piece, found = self._piece(self._later if self._said else self._first)
            self._at += len(text := piece.rstrip())
            if text:
                self._say(text)  # from here on other marks count
            elif found:
                self._before, self._at = piece, found.end()
                return found[0]
            elif not (yield from self._more(cut=True)):
                if (rest := self._buffer[self._at :]) and not (self._cut and rest.lstrip()):
                    self._say(rest)
                return None

    def _reasoning(self, close: tuple[str, ...]) -> Wait:
        yield from self._stripped(close, lambda text: self._tell(Event("reasoning", text)))

    def _call(self, mark: str) -> Generator[None, None, bool]:
        """Read what stands behind `mark` in one of its ways. False: in none, so the mark is text."""
        before, start, self._at_end = self._before, self._at, False
        for way in self._ways[mark]:
            try:
                yield from getattr(self, f"_{way.body}")(way)
                return True
            except _Malformed:
                self._at = start
        if mark and self._cut and self._at_end:
            self._at = len(self._buffer)
        elif before + mark:
            self._say(before + mark)
        return False

    # The ways of writing a call, one for each body. Each raises _Malformed before its call begins, or never.

    def _objects(self, way: Call) -> Wait:
        count, in_list = 0, (yield from self._peek()) == "["
        self._at += in_list
        while True:
            char, start = (yield from self._peek()), self._at
            if char == "{":
                try:
                    yield from self._object(way)
                except _Malformed:
                    if count == 0:
                        raise
                    self._at = len(self._buffer) if self._cut and self._at_end else start
                    return
                count += 1
            elif count and char and char in ",;":
                self._at += 1
            else:
                break
        if count == 0:
            raise _Malformed
        self._at += in_list and char == "]"

    def _object(self, way: Call) -> Wait:
        """One object. Its arguments are told as they come, where its name has come before them."""
        name, call_id, held, begun = "", "", "", False
        self._at += 1
        try:
            while (char := (yield from self._peek())) != "}":
                start = self._at
                if char == ",":
                    self._at += 1
                    continue
                if char != '"':
                    if begun or (name and held):  # the last brace is missing
                        break
                    raise _Malformed
                key = _loaded((yield from self._value()))
                again = begun or (name and key in _NAMES) or (held and key in _ARGUMENTS)
                if key not in _OTHERS and (again or key not in (*_NAMES, *_ARGUMENTS)):
                    raise _Malformed
                if (yield from self._peek()) != ":":
                    raise _Malformed
                self._at += 1
                if key in _ARGUMENTS and name and not way.whole and (yield from self._peek()) == "{":
                    self._begin(way, name, call_id)
                    begun = True
                    yield from self._streamed()
                    continue
                yield from self._peek()
                value = yield from self._value()
                if key in _NAMES:
                    name = _loaded(value)
                elif key in _ARGUMENTS:
                    held = value or ""
                elif key == "id":
                    call_id = _loaded(value)
            self._at += char == "}"
        except _Malformed:
            if not begun:
                raise
            self._at = start
        if not begun:
            inner = _loaded(held) if held.startswith('"') else held  # JSON in a text
            self._begin(way, name, call_id)
            self._argue("{}" if inner in ("", "null") else inner)
        self._end()

    def _json(self, way: Call) -> Wait:
        head = yield from self._head(way)
        self._begin(way, head["name"], head.groupdict().get("id"))
        yield from self._streamed()
        self._end()

    def _bare(self, way: Call) -> Wait:
        head = yield from self._head(way)
        arguments = written.from_bare((yield from self._whole(way)), way.quote)
        if arguments is None:
            raise _Malformed
        self._begin(way, head["name"])
        self._argue(arguments)
        self._end()

    def _python(self, way: Call) -> Wait:
        start = self._at
        if way.head and (yield from self._head(way))["name"] not in self._tools:  # a text that begins with a bracket
            raise _Malformed
        self._at = start
        text = yield from self._whole(way)
        calls = written.from_python(text)
        program = next((name for name in _PROGRAMS if name in self._tools), None)
        if way.open and program and not (calls and all(name in self._tools for name, _ in calls)):
            calls = [(program, written.dump({"code": text.strip()}))]
        if calls is None or (way.open == "" and any(name not in self._tools for name, _ in calls)):
            raise _Malformed
        for name, arguments in calls:
            self._begin(way, name.removesuffix(".call"))
            self._argue(arguments)
            self._end()

    def _message(self, way: Call) -> Wait:
        head = yield from self._head(way)
        (mark,) = way.until
        if not way.open and not head["name"]:
            raise _Malformed
        if name := head["name"]:
            self._begin(way, name)
            self._at += len(mark)
            yield from self._stripped(way.close, self._argue)
            self._end()
            return
        self._at += len(mark)
        if head["thinking"] is not None:
            yield from self._reasoning(way.close)

    def _parameters(self, way: Call) -> Wait:
        head = yield from self._head(way)
        name = head["name"].strip()
        self._begin(way, name)
        schema = self._tools.get(name)
        declared = schema.get("properties") if isinstance(schema, Mapping) else None
        before, middle, after = way.parameter
        marks, first = _marks((before, *way.close, *self._ends)), True
        self._argue("{")
        while (mark := (yield from self._next(marks))) == before:
            start = self._at
            key = _KEY.fullmatch((yield from self._upto(middle)) or "<")
            if key is None:
                self._at = start
                break
            self._at += len(middle)
            self._argue(("" if first else ", ") + written.dump(key["key"]) + ": ")
            first = False
            types = written.types_of(declared.get(key["key"]) if isinstance(declared, Mapping) else None)
            yield from self._parameter(_marks((after, *way.close)), types)
            self._at += len(after) if self._buffer.startswith(after, self._at) else 0
        if mark and mark != before:
            self._argue("}")
        else:
            self._argue(mark)
            yield from self._stripped((*way.close, *self._ends), self._argue)  # no arguments: told as they are
        self._end()

    def _parameter(self, marks: _Marks, types: frozenset[str]) -> Wait:
        """An argument's value, up to a mark: a text as it comes, anything else when it is complete."""
        streams = "string" in types and "null" not in types
        value, begun = "", False
        if streams:
            self._argue('"')
        while True:
            text, found = self._piece(marks)
            if not begun and text:
                self._at, begun = self._at + text.startswith("\n"), True
                text = text.removeprefix("\n")
            text = text.removesuffix("\n")  # the last one is no part of the value
            self._at += len(text)
            if streams:
                self._argue(written.dump(text)[1:-1])
            else:
                value += text
            if found:
                self._at = found.start()
                self._argue('"' if streams else written.from_text(value, types))
                return
            if not (yield from self._more(cut=True)):
                self._argue(value)
                return

    # What they are made of.

    def _more(self, *, cut: bool = False) -> Generator[None, None, bool]:
        """Wait for more text; False: there is none. With `cut` what lies before is forgotten."""
        if cut:
            self._buffer, self._at = self._buffer[self._at :], 0
        if not self._ended:
            yield
            return True
        self._at_end = True
        return False

    def _piece(self, marks: _Marks) -> tuple[str, re.Match[str] | None]:
        """The text up to a mark, or to what may become one; and the mark."""
        found = marks.pattern.search(self._buffer, self._at)
        end = found.start() if found else marks.unfinished(self._buffer, self._at)
        return self._buffer[self._at : end], found

    def _peek(self) -> Generator[None, None, str]:
        """Go behind white space, and return the character there; "" at the end."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not (yield from self._more()):
                return ""

    def _next(self, marks: _Marks) -> Generator[None, None, str]:
        """Go behind white space and the mark that follows, and return that; "" where something else follows."""
        while (yield from self._peek()):
            if found := marks.pattern.match(self._buffer, self._at):
                self._at = found.end()
                return found[0]
            if marks.unfinished(self._buffer, self._at) > self._at or not (yield from self._more()):
                break
        return ""

    def _upto(self, *marks: str) -> Generator[None, None, str | None]:
        """The text up to the first of `marks`, which is left there; None where it is too long, or none comes."""
        pattern = _marks(marks).pattern
        while True:
            found = pattern.search(self._buffer, self._at)
            if found and found.start() - self._at <= MAX_HEAD:
                text, self._at = self._buffer[self._at : found.start()], found.start()
                return text
            if found or len(self._buffer) - self._at > MAX_HEAD + _LONGEST_MARK or not (yield from self._more()):
                return None

    def _head(self, way: Call) -> Generator[None, None, re.Match[str]]:
        text = yield from self._upto(*way.until)
        head = None if text is None else re.fullmatch(way.head, text.strip())
        if head is None:
            raise _Malformed
        return head

    def _whole(self, way: Call) -> Generator[None, None, str]:
        """The text up to the call's end, or to the answer's."""
        while not (found := _marks(way.close).pattern.search(self._buffer, self._at)):
            if not (yield from self._more()):
                break
        start, self._at = self._at, found.start() if found else len(self._buffer)
        return self._buffer[start : self._at]

    def _stripped(self, close: tuple[str, ...], tell: Callable[[str], None]) -> Wait:
        """Tell the text up to a mark of `close`, without the white space around it."""
        marks = _marks(close)
        yield from self._peek()
        while True:
            text, found = self._piece(marks)
            tell(text.rstrip())
            self._at += len(text.rstrip())
            if found:
                self._at = found.start() if found[0] in self._ways else found.end()
                return
            if not (yield from self._more(cut=True)):
                self._at = len(self._buffer)
                return

    def _value(self, *, tell: bool = False) -> Generator[None, None, str | None]:
        """Go behind a JSON value, and return it. _Malformed where it is none.

        With `tell` it is told instead; None where it breaks off, as far as it went.
        """
        start, depth, in_string = self._at, 0, False
        while True:
            char = self._buffer[self._at : self._at + 1]
            literal = _LITERAL.match(self._buffer, self._at) if depth == 0 else _BETWEEN.match(self._buffer, self._at)
            if char == "" or (char == "\\" and in_string and self._at + 1 == len(self._buffer)):
                if tell:
                    self._argue(self._buffer[start : self._at])
                    start = 0
                if not (yield from self._more(cut=tell)):
                    break
                continue
            if in_string:
                plain = _IN_STRING.match(self._buffer, self._at)
                self._at = plain.end() if plain else self._at + (2 if char == "\\" else 1)
                in_string = plain is not None or char == "\\"
                if in_string or depth:
                    continue
            elif char == '"' and (depth or self._at == start):
                self._at, in_string = self._at + 1, True
                continue
            elif char in "{[" and (depth or self._at == start):
                self._at, depth = self._at + 1, depth + 1
                continue
            elif char in "}]" and depth:
                self._at, depth = self._at + 1, depth - 1
                if depth:
                    continue
            elif literal:
                self._at = literal.end()
                continue
            elif depth or self._at == start:
                break
            value = self._buffer[start : self._at]
            if tell:
                self._argue(value)
            return value
        if not tell:
            raise _Malformed
        self._argue(self._buffer[start : self._at])
        return None

    # What is told.

    def _tell(self, event: Event) -> None:
        if event.text or event.kind == "end":
            self._events.append(event)

    def _say(self, text: str) -> None:
        self._said = True
        self._tell(Event("text", text))

    def _begin(self, way: Call, name: str, call_id: str | None = None) -> None:
        if not name or (name not in self._tools and not (way.open and self._tools)):
            raise _Malformed
        self._argued = False
        self._tell(Event("call", name, self._calls, call_id or self._make_id()))

    def _argue(self, text: str) -> None:
        if text:
            self._argued = True
            self._tell(Event("arguments", text, self._calls))

    def _streamed(self) -> Wait:
        """Tell arguments that are an object, or what stands in its place up to a mark."""
        if (yield from self._value(tell=True)) is None:
            yield from self._stripped(self._marks, self._argue)

    def _end(self) -> None:
        if not self._argued:
            self._argue("{}")
        self._tell(Event("end", index=self._calls))
        self._calls += 1


def _loaded(value: str | None) -> str:
    """A JSON string's text."""
    try:
        text = written.load(value or "")
    except ValueError:
        raise _Malformed from None
    if not isinstance(text, str):
        raise _Malformed
    return text
