"""A model's chat template: a conversation rendered as the text it was trained on. Knows no token ids.

Templates are Jinja programs that come with the weights, so they run as untrusted code: in Jinja's sandbox, with
the names that transformers gives them and no others, and with a bounded number of steps and a bounded result.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flashllm.errors import FormatError, UsageError
from flashllm.generate.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1_000_000
MAX_TEXT_CHARS = 50_000_000  # more than any context holds
MAX_STEPS = 200_000  # rounds of loops and calls of macros: a long conversation takes thousands; these take a second


class Refused(jinja2.TemplateError):
    """The template itself says that it cannot render this conversation (`raise_exception`)."""


class TooMuch(jinja2.TemplateError):
    """The template takes more steps or memory than any conversation needs."""


class ChatTemplate:
    """One template, compiled. Used by one thread at a time."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """A tokenizer's template; None where it has none. FormatError where it has several and none is "default"."""
        templates = tokenizer.chat_templates
        if not templates:
            return None
        if "default" not in templates:
            raise FormatError(
                f"{tokenizer.where}: has chat templates for {', '.join(sorted(templates))}, and no default one; "
                'rename one of them to "default" in tokenizer_config.json'
            )
        return cls(templates["default"], tokenizer.where, tokenizer.special)

    def __init__(self, source: str, where: str, tokens: Mapping[str, str] | None = None) -> None:
        """`where` names the template's file in messages; `tokens` are named special tokens, like "bos_token".

        FormatError where the template is not one.
        """
        self._where, self._tokens = where, dict(tokens or {})
        if len(source) > MAX_TEMPLATE_CHARS:
            raise FormatError(f"{where}: the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} at most")
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            _count_steps(tree, self._environment)
            self._template = self._environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise FormatError(f"{where}: the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of `messages` ({"role": …, "content": …} each), by default up to where the answer begins.

        UsageError where the template refuses the conversation, FormatError where it fails.
        """
        self._environment.steps = 0
        parts, length = [], 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            ):
                length += len(part)
                if length > MAX_TEXT_CHARS:
                    raise TooMuch(f"its text is longer than {MAX_TEXT_CHARS} characters")
                parts.append(part)
        except Refused as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except (Exception, RecursionError) as error:  # the template can raise anything that Python can
            reason = str(error) or type(error).__name__
            raise FormatError(f"{self._where}: the chat template failed: {reason}") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with transformers' names and our bounds."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.steps = 0
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # text without end, of no use in a conversation
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _make_dict,
            "namespace": _Namespace,
        }

    def count_step(self) -> str:
        """Called by the template in each round of a loop and each call of a macro; renders as nothing."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")
        return ""

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**`, refused where the result is huge."""
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise TooMuch(f"a power of {right}")
        sized = [value for value in (left, right) if hasattr(value, "__len__")]
        counts = [value for value in (left, right) if isinstance(value, int)]
        if operator == "*" and sized and counts and len(sized[0]) * counts[0] > MAX_TEXT_CHARS:
            raise TooMuch(f"a value repeated {counts[0]} times")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks answers for training: what is inside is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that Python uses for itself."""

    def __init__(*args: Any, **values: Any) -> None:  # any keyword is a name, "self" too
        self, *given = args
        for name in dict(*given, **values):
            _check_name(name)
        Namespace.__init__(self, *given, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _count_steps(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Let every loop's and macro's body begin with `count_step`."""
    loops = [node.body for node in tree.find_all(nodes.For)]
    macros = [node.body for node in tree.find_all(nodes.Macro)]
    callers = [node.body for node in tree.find_all(nodes.CallBlock)]
    for body in (*loops, *macros, *callers):
        call = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
        body.insert(0, nodes.ExprStmt(call))
    tree.set_environment(environment)


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
