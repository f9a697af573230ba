"""Answers held to a form: by a model of a few lines; by the demo with its predictors, forced tokens together."""

import json
import re
import time

import numpy as np
import pytest
from test_session import TOKENIZER, PrefixModel

from flashllm.config import RunConfig
from flashllm.convert.named import demo_path
from flashllm.engine.model import Model
from flashllm.errors import FormError, UsageError
from flashllm.generate.grammar import Constraint, Grammars, Reasoning
from flashllm.generate.lookup import PromptLookup
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.speculation import Speculation
from flashllm.generate.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "colour", "numbers"],
    "additionalProperties": False,
}


TINY = Tokenizer(TOKENIZER.backend, special={"eos_token": "</s>"})


def grammars(tokenizer=TINY, vocab=300, **options):
    return Grammars(tokenizer.backend, tokenizer.end_ids, vocab, **options)


def answer(model, tokenizer, matcher, *, speculation=None, logprobs=None, prompt="It is", **options):
    options = SamplingOptions(**{"max_new_tokens": 120, **options})
    with Session(model, tokenizer, options, speculation=speculation) as session:
        session.choose_by(options, logprobs=logprobs, matcher=matcher)
        records = [each for each in session.stream(prompt) if isinstance(each, TokenRecord)]
    return records, session.stopped


def text_of(records):
    return "".join(record.text for record in records)


def is_valid(value):
    return (
        list(value) == ["name", "colour", "numbers"]
        and len(value["name"]) <= 8
        and value["colour"] in ("red", "green")
        and len(value["numbers"]) <= 2
        and all(type(each) is int and 0 <= each <= 99 for each in value["numbers"])
    )


class SingleSteps(PrefixModel):
    most_drafted = 0


@pytest.mark.parametrize("seed", range(8))
def test_random_answers_have_the_form(seed):
    matcher = grammars().start(Constraint.of_schema(SCHEMA))
    records, stopped = answer(SingleSteps(400), TINY, matcher, temperature=1.0, seed=seed)
    assert stopped == "stop"
    assert is_valid(json.loads(text_of(records)))


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": ["null", "integer"], "exclusiveMinimum": 1}])
def test_an_integer_has_64_bits_where_its_schema_says_nothing(schema):
    matcher = grammars().start(Constraint.of_schema({"properties": {"n": schema}}))
    written = ""
    for text in ['{"n": ', *"9" * 40]:
        ids = TINY.encode(text, add_special=False)
        if not np.isfinite(matcher.masked(np.zeros(300, np.float32))[ids[0]]):
            break
        for token in ids:
            matcher.accept(token)
        written += text
    assert written == '{"n": ' + "9" * 18
    fixed = {"enum": [{"type": "integer"}]}
    assert Constraint.of_schema(fixed).text == json.dumps(fixed)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "[a-c]{3}-[0-9]{2}", "[a-c]{3}-[0-9]{2}"),
        ("lark", 'start: "x" pair+ "y"\npair: /[ab]/ ("," | ";")', "x(?:[ab][,;])+y"),
    ],
)
def test_regular_expressions_and_grammars(kind, text, pattern):
    matcher = grammars().start(Constraint(kind, text))
    records, stopped = answer(SingleSteps(400), TINY, matcher, temperature=1.0, seed=3)
    assert stopped in ("stop", "eos")
    assert re.fullmatch(pattern, text_of(records))


def test_an_answer_may_end_where_its_form_is_complete():
    matcher = grammars().start(Constraint("regex", "a+"))
    found = {answer(SingleSteps(400), TINY, matcher.copy(), temperature=1.0, seed=seed)[1] for seed in range(5)}
    assert found == {"eos"}


@pytest.fixture(scope="module")
def demo():
    with Model.open(demo_path(), RunConfig(threads=1, io_threads=4)) as model:
        yield model, Tokenizer.load(demo_path())


class Alone:
    """A model that computes tokens one by one."""

    most_drafted = 0

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("drafts", [False, True])
def test_forced_tokens_computed_together_change_nothing(demo, sampling, drafts):
    model, tokenizer = demo
    assert model.plan.mode == "sparse"
    matcher = grammars(tokenizer, model.vocab_size).start(Constraint.of_schema(SCHEMA))
    alone, stopped = answer(Alone(model), tokenizer, matcher.copy(), logprobs=2, **sampling)
    speculation = Speculation(PromptLookup(), model.most_drafted) if drafts else None
    together, ended = answer(model, tokenizer, matcher, logprobs=2, speculation=speculation, **sampling)
    assert stopped == ended == "stop"
    assert is_valid(json.loads(text_of(together)))
    assert [(each.token_id, each.logprobs, each.text) for each in together] == [
        (each.token_id, each.logprobs, each.text) for each in alone
    ]
    widths = [each.pass_tokens for each in together]
    assert max(widths) > 2
    assert max(widths) <= model.manifest.sparse_prefill_tokens
    assert sum(map(bool, widths)) < len(together) - 4


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", '{"properties": {"a": {"items": {"type": "objec"}}}}', "/properties/a/items: Invalid type"),
        ("json", '{"$defs": {"b": {"if": {}}}, "properties": {"a": {"$ref": "#/$defs/b"}}}', "/$defs/b: Unimpl"),
        ("json", '{"$ref": "http://127.0.0.1/x"}', "does not fetch"),
        ("json", '{"$ref": "#"}', "no answer has it"),
        ("json", '{"oneOf": [{"type": "string"}, {"minLength": 2}]}', "oneOf constraints are not supported. Use anyOf"),
        ("json", "false", "JSON schema cannot be the form of an answer"),
        ("regex", "(a", "unclosed group"),
        ("lark", "start: other", "unknown name"),
        ("lark", "x" * 300_000, "more than 262144 characters"),
    ],
)
def test_what_no_answer_can_be_held_to(kind, text, says):
    with pytest.raises(UsageError) as error:
        grammars().start(Constraint.of_schema(json.loads(text)) if kind == "json" else Constraint(kind, text))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_token_that_the_model_has_no_logits_for_never_comes():
    for letter in "abcdefghij":  # at any bit of a byte
        (token,) = TINY.encode(letter, add_special=False)
        matcher = grammars().start(Constraint("regex", letter))
        assert matcher.masked(np.zeros(token + 1, np.float32)).argmax() == token
        with pytest.raises(FormError, match="no token of the model"):
            matcher.masked(np.zeros(token, np.float32))


def test_schemas_that_explode_end_soon():
    definitions = {"a0": {"type": "string"}}
    for number in range(1, 40):
        inner = {"$ref": f"#/$defs/a{number - 1}"}
        definitions[f"a{number}"] = {"oneOf": [{"allOf": [inner, {"minLength": number}]}, inner]}
    made = grammars()
    for schema in (
        {"$ref": "#/$defs/a39", "$defs": definitions},
        {"type": "string", "pattern": "(a|b)*a(a|b){200}"},
        {"type": "array", "minItems": 10**7, "items": {"type": "string", "pattern": "^([a-z]{1,500}){1,500}$"}},
        {"enum": [f"number {number}" for number in range(9000)]},
    ):
        began = time.process_time()
        try:
            matcher = made.start(Constraint.of_schema(schema))
            matcher.masked(np.zeros(300, np.float32))
        except UsageError:
            pass
        assert time.process_time() - began < 20  # a bound, not a speed: without limits it would be hours


def test_a_form_that_explodes_behind_its_beginning_ends_the_answer():
    matcher = grammars().start(Constraint("regex", "((a{99}){99}){99}"))

    def go_on():
        for _ in range(10_000):
            logits = matcher.masked(np.zeros(300, np.float32))
            matcher.accept(matcher.forced[0] if matcher.forced else int(logits.argmax()))

    with pytest.raises(FormError, match="too complex here"):
        go_on()


def test_compiled_grammars_are_kept_and_their_memory_is_asked_for(monkeypatch):
    asked = []
    made = grammars(make_room=asked.append)
    state, compiled = made._state, []
    monkeypatch.setattr(made, "_state", lambda kind, text: (compiled.append(text), state(kind, text))[1])
    for text in ("a", "a", *(f"b{number}" for number in range(20)), "a"):
        made.start(Constraint("regex", text))
    assert compiled == ["a", *(f"b{number}" for number in range(20)), "a"]
    assert len(asked) == 1
    assert asked[0] > 300 * 100


def test_memory_of_tables_that_cannot_be_made_is_given_back(monkeypatch):
    def fail(*given, **named):
        raise ValueError("no such\ntokenizer")

    asked = []
    made = grammars(make_room=asked.append)
    monkeypatch.setattr("llguidance.LLTokenizer", fail)
    for _ in range(2):
        with pytest.raises(UsageError, match="can hold answers to no form: no such tokenizer"):
            made.start(Constraint("regex", "a"))
    assert sum(asked) == 0
    assert len(asked) == 4


def test_reasoning_comes_before_the_form():
    close = TINY.encode("!", add_special=False)
    reasoning = Reasoning(decoder=TINY, close="!", close_ids=tuple(close), opened=True)
    matcher, free = grammars().start(Constraint("regex", "[ab]+"), reasoning), np.zeros(300, np.float32)
    for token_id in TINY.encode("any text, of any kind", add_special=False):
        assert np.flatnonzero(np.isinf(matcher.masked(free))).tolist() == sorted(TINY.end_ids)
        matcher.accept(token_id)
    for token_id in close:
        matcher.accept(token_id)
    allowed = [TINY.token_text(index) for index in np.flatnonzero(np.isfinite(matcher.masked(free)))]
    assert allowed
    assert all(set(text.strip()) <= set("ab") for text in allowed)


@pytest.mark.parametrize("behind", ["", "\n\n"])
def test_reasoning_has_a_budget(behind):
    close = [token for text in ("!", behind) for token in TINY.encode(text, add_special=False)]
    reasoning = Reasoning(decoder=TINY, close="!", close_ids=tuple(close), opened=True, most=3)
    matcher = grammars().start(Constraint("regex", "a"), reasoning)
    for token_id in TINY.encode("any text", add_special=False)[:3]:
        assert not matcher.forced
        matcher.accept(token_id)
    for token_id in close:
        assert matcher.forced[0] == token_id
        matcher.accept(token_id)
    assert TINY.decode(list(matcher.forced)).strip() in ("a", "")
