"""Chat templates: what one may be, and may not do. What the usual ones render is in test_templates_apart.py."""

import datetime

import pytest
from chat_templates import FAMILIES

from flashllm.errors import FormatError, UsageError
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer

ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content.strip() }}{% endfor %}"
)

USER = {"role": "user", "content": ' Hello <b>there</b> & é "you"\n'}


def test_the_conversation_is_left_as_it_was(warm):
    messages = [dict(USER)]
    template = ChatTemplate("{% set _ = messages.append(1) %}{{ messages | length }}", "here", renderer=warm)
    assert [template.render(messages) for _ in range(2)] == ["2", "2"]  # a list may grow, of a copy
    assert messages == [USER]


def test_json_is_read(warm):
    """Which transformers has no filter for."""
    source = "{% for a, b in messages[0].content | fromjson | items %}{{ a }}={{ b }}{% endfor %}"
    template = ChatTemplate(source, "here", renderer=warm)
    assert template.render([{"role": "user", "content": '{"é": [1, null]}'}]) == "é=[1, None]"
    with pytest.raises(FormatError, match="here: the chat template failed: Expecting value"):
        template.render([{"role": "user", "content": "no"}])


def test_the_date_is_todays(warm):
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", "here", renderer=warm).render([])
    assert before <= text <= datetime.datetime.now().strftime("%Y-%m-%d")


def test_a_refusal_is_the_templates_own_words(warm):
    template = ChatTemplate(ALTERNATING, "here", {"bos_token": "<s>"}, renderer=warm)
    with pytest.raises(UsageError, match="refuses this conversation: roles must alternate"):
        template.render([USER, USER])
    assert template.render([USER]).startswith("<s>Hello")  # and it goes on


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ part.text }}{% endfor %};{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}?{% endfor %}{% endif %};{% endfor %}",
    ],
)
def test_templates_of_models_for_pictures_lose_no_text(source, warm):
    """Some take a message's parts alone."""
    template = ChatTemplate(source, "here", renderer=warm)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert template.render(messages) == "user:hi;assistant:yes;"
    for_tools = ChatTemplate("{{ messages[0].content }}", "here", for_tools=source, renderer=warm)
    assert for_tools.render(messages) == "hi"
    assert for_tools.render(messages, tools=[{"function": {"name": "now"}}]) == "user:hi;assistant:yes;"
    assert messages[0]["content"] == "hi"


@pytest.mark.parametrize(
    "broken", ["{% for m in", "{{ 1 + }}", "{% frobnicate %}", "{% generation %}never ended", "{{ a | no_filter }}"]
)
def test_a_template_that_is_none_is_a_format_error(warm, broken):
    with pytest.raises(FormatError, match="dir: the chat template is not valid"):
        ChatTemplate(broken, "dir", renderer=warm).check()


def test_a_huge_template_is_refused():
    with pytest.raises(FormatError, match="1000001 characters"):
        ChatTemplate(" " * 1_000_001, "dir")


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.fromkeys.__globals__['json'] }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='system') }}",
        "{% set ns = namespace(__class__='x') %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ nothing.here }}",
        "{{ 1 // 0 }}",
        "{{ lipsum(n=1) }}",
    ],
)
def test_what_a_template_must_not_do_is_a_format_error(warm, hostile):
    template = ChatTemplate(hostile, "dir", renderer=warm)
    with pytest.raises(FormatError, match=r"dir: the chat template failed: .+"):
        template.render([dict(USER)])


@pytest.mark.parametrize("hidden", ["messages.__class__", "strftime_now.__code__", "'{0.__class__}'.format(messages)"])
def test_what_python_keeps_for_itself_is_not_shown(warm, hidden):
    assert ChatTemplate(f"{{{{ {hidden} }}}}", "dir", renderer=warm).render([dict(USER)]) == ""


def test_a_long_conversation_is_far_from_the_bounds(warm):
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 50} for i in range(2001)]
    for name in ("mistral", "qwen-3", "gpt-oss"):
        template = ChatTemplate(FAMILIES[name], "dir", {"bos_token": "<s>", "eos_token": "</s>"}, renderer=warm)
        assert template.render(messages).count("word") == 50 * 2001


def test_of_several_templates_the_default_is_taken(theirs):
    def of(templates):
        return ChatTemplate.of(Tokenizer(theirs.backend_tokenizer, chat_templates=templates, where="dir"))

    assert of({}) is None
    assert of({"rag": "no", "default": "yes"}).render([]) == "yes"
    with pytest.raises(FormatError, match="dir: has chat templates for rag, tool_use, and no default one"):
        of({"tool_use": "a", "rag": "b"})
