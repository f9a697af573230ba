"""The grammar (Lark, as llguidance reads it) of an answer that calls tools in its family's form, or is JSON."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashllm.replies.formats import Call, Format, Held
from flashllm.replies.written import bounded, dump, types_of

_PLACES = re.compile("NAME|ARGUMENTS|NUMBER|TEXT|KEY|VALUE")
_SAID = {"type", "title", "description", "default", "examples", "deprecated", "$schema", "additionalProperties"}
_DEFINITIONS = ("$defs", "definitions")
Schema = Mapping[str, Any]


def held_by(form: Format | None, special: Mapping[str, int]) -> Held | None:
    """How calls are written where an answer is held to them; None: this form's cannot be."""
    ways = () if form is None else form.held
    return next((each for each in ways if all(mark in special for mark in each.needs)), None)


def grammar_of(
    form: Format | None,
    special: Mapping[str, int],
    *,
    written: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    one_call: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls one of `tools`, or several; or that is JSON by `schema`, where there is one.

    `special` are the tokens that no text is made of, `written` says how JSON is. ValueError where calls cannot be held.
    """
    rules, starts = _Rules(special, written), []
    rules.lines.append(f"REASONING: /(.|\\n)*/\nNUMBER: /{0 if one_call else '[0-9]{1,2}'}/")
    if schema is not None:
        starts.append(rules.add(f"{rules.text(form.answer if form else '')} {rules.json(schema)}"))
    if tools:
        way = held_by(form, special)
        if form is None or way is None:
            raise ValueError("the form of its calls has marks of its own")
        calls = []
        for tool in tools:
            name, given = tool["function"]["name"], {"type": "object", **tool["function"]["parameters"]}
            try:
                arguments = rules.arguments(given, way, form.calls[0]) if way.parameter else rules.json(given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            calls.append(rules.add(rules.text(way.call, NAME=name, ARGUMENTS=arguments)))
        call = rules.add(" | ".join(calls))
        many = "" if one_call or way.between is None else f"({rules.text(way.between)} {call})*"
        starts.append(rules.add(f"{rules.text(way.before)} {call} {many} {rules.text(way.behind)}"))
    lead = "" if form is None or not form.lead else f"({rules.text(form.lead)})? "
    return "\n".join((f"start: {lead}({' | '.join(starts)})", *rules.lines))


class _Rules:
    """The rules of a grammar, as they are made."""

    def __init__(self, special: Mapping[str, int], written: Mapping[str, Any]) -> None:
        self._special, self._written = special, written
        self.lines: list[str] = []

    def add(self, body: str, attribute: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {body}")
        return name

    def json(self, schema: Schema) -> str:
        return self.add(f"%json {dump({**bounded(schema), 'x-guidance': dict(self._written)})}")

    def text(self, text: str, **places: str) -> str:
        """A text: NAME and KEY in it are filled in, others are rules' names; special tokens go by their ids."""
        special = self._special
        marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
        parts = re.split("(" + "|".join([_PLACES.pattern, *map(re.escape, marks)]) + ")", text)
        made, plain = [], ""
        for part in [*parts, None]:
            if part is not None and part not in special and (part in ("NAME", "KEY") or not _PLACES.fullmatch(part)):
                plain += places.get(part, part)
                continue
            if plain:
                made.append(dump(plain))
                plain = ""
            if part is not None:
                other = {"TEXT": "REASONING", **places}.get(part, part)
                made.append(f"<[{special[part]}]>" if part in special else other)
        return " ".join(made)

    def arguments(self, schema: Schema, way: Held, call: Call) -> str:
        """Arguments that are written one by one, in the schema's order; one that is not required may be left out.

        ValueError for what the marks around them cannot be held to.
        """
        _check(schema, ("properties", "required", *_DEFINITIONS))
        properties, required = schema.get("properties", {}), schema.get("required", [])
        shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
        first, later = '""', '""'
        for key in reversed(properties):
            before, _, behind = way.parameter.partition("VALUE")
            value = self._bare(properties[key], way, call) if call.quote else None
            value = value or self._between(properties[key], shared, behind, call)
            one = f"{self.text(before, KEY=key)} {value}"
            without = ("", "") if key in required else (f" | {first}", f" | {later}")
            first, later = (
                self.add(f"{one} {later}{without[0]}"),
                self.add(f"{dump(way.joined)} {one} {later}{without[1]}"),
            )
        return first

    def _between(self, schema: Any, shared: Schema, behind: str, call: Call) -> str:
        """A value as it stands before its mark: a text as it is, anything else as JSON."""
        if "string" not in types_of(schema):
            return f"{self.json({**shared, **schema})} {self.text(behind)}"
        if (texts := _choices(schema)) is not None:
            words = [each if isinstance(each, str) else dump(each) for each in texts]
            return f"({' | '.join(map(dump, words))}) {self.text(behind)}"
        _check(schema, ("anyOf", "oneOf"))
        space, mark, rest = behind.partition(call.parameter[2])
        return f"{self._upto(mark, space, call.close)} {self.text(rest)}"

    def _bare(self, schema: Any, way: Held, call: Call) -> str:
        """A value without quotes around names, and with marks around texts."""
        kinds = types_of(schema)
        if (chosen := _choices(schema)) is not None:
            words = [
                f"{call.quote}{each}{call.quote}" if isinstance(each, str) else dump(each)
                for each in chosen
                if not isinstance(each, dict | list)
            ]
            return f"({' | '.join(map(self.text, words))})"
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return self.json(schema)
        if kinds == {"string"}:
            _check(schema)
            return f"{self.text(call.quote)} {self._upto(call.quote)}"
        if kinds == {"object"} and "properties" in schema:
            return f'"{{" {self.arguments(schema, way, call)} "}}"'
        if kinds == {"array"} and "items" in schema:
            _check(schema, ("items",))
            item = self._bare(schema["items"], way, call)
            return f'"[" ({item} ("," {item})*)? "]"'
        raise ValueError("one of its arguments may be of any kind, and is not written as JSON")

    def _upto(self, mark: str, space: str = "", others: Iterable[str] = ()) -> str:
        """Any text, `space`, and `mark`, which is not in the text, nor are `others`."""
        token = mark in self._special
        barred = [each for each in (*others, *([mark] if token or space else [])) if each]
        body = f"/(.|\\n)*{_pattern(space)}/"
        if barred:  # also in plain characters
            body += f" & ~/(.|\\n)*({'|'.join(map(_pattern, barred))})(.|\\n)*/"
        if not token:
            return self.add(body, f"[suffix={dump(mark)}]")
        self.lines.append(f"TEXT_{len(self.lines)}: {body}")
        return f"TEXT_{len(self.lines) - 1} {self.text(mark)}"


def _pattern(text: str) -> str:
    """A regular expression, between slashes, that is `text`."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _choices(schema: Any) -> Sequence[Any] | None:
    """The values that a schema lists; None: it lists none."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) and found else None


def _check(schema: Schema, known: Iterable[str] = ()) -> None:
    """ValueError where `schema` says what is not known here."""
    for name in schema:
        if name not in _SAID and name not in known:
            raise ValueError(f"its schema has {name!r}, and is not written as JSON")
