"""Chat templates: the same text as transformers renders, in a sandbox, with an end."""

import datetime

import pytest
from tiny_models import make_tokenizer

from flashllm.errors import FormatError, UsageError
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}"""

INST = """{%- if messages[0]['role'] == 'system' -%}
    {%- set rest = messages[1:] -%}
    {%- set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' -%}
{%- else -%}
    {%- set rest = messages -%}
    {%- set system = '' -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate user/assistant/user/...') }}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + message['content'].strip() + ' [/INST]' }}
    {%- else -%}
        {{ ' ' ~ message['content'] | trim ~ ' ' ~ eos_token }}
    {%- endif -%}
{%- endfor -%}"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(first=true, shown=0) %}
{%- set date = strftime_now("%d %b %Y") %}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{{- header("system") }}Today: {{ date }}
{%- for message in messages %}
    {%- if message.role == "system" and not ns.first %}{% continue %}{% endif %}
    {%- if loop.index0 > 7 %}{% break %}{% endif %}
    {%- set ns.first = false %}{% set ns.shown = ns.shown + 1 %}
    {{- header(message.role) + message.content | trim }}<|eot_id|>
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{%- if add_generation_prompt %}
    {{- header("assistant") }}
{%- endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

MARKED = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- generation -%}A({{ m.content }}){{ eos_token }}{%- endgeneration -%}
{%- else -%}{{ m | tojson }}{{ dict(a=1, b=m.content[:2]) | tojson }}{{ m.content.split(' ') | join('/') | upper }}
{%- endif -%}
{%- endfor -%}{{ '' if x is defined else '!' }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"""

TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS, "zephyr": ZEPHYR, "marked": MARKED}
USER = {"role": "user", "content": ' Hello <b>there</b> & é "you"\n'}
CONVERSATIONS = {
    "one turn": [USER],
    "with a system": [{"role": "system", "content": "Be brief."}, USER],
    "several turns": [
        {"role": "system", "content": "Be\nbrief."},
        USER,
        {"role": "assistant", "content": "Hi! "},
        {"role": "user", "content": "日本 🙂 {{ 1 + 1 }} {% raise %}"},
    ],
}


@pytest.fixture(scope="module")
def theirs():
    return make_tokenizer(300)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_text_and_the_ids_are_those_of_transformers(theirs, template, conversation, add_generation_prompt):
    given = {"chat_template": TEMPLATES[template], "add_generation_prompt": add_generation_prompt}
    messages = CONVERSATIONS[conversation]
    ours = Tokenizer(theirs.backend_tokenizer, special=theirs.special_tokens_map)
    rendered = ChatTemplate(TEMPLATES[template], "here", ours.special).render(
        messages, add_generation_prompt=add_generation_prompt
    )
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, **given)
    ids = theirs.apply_chat_template(messages, tokenize=True, **given)["input_ids"]
    assert ours.encode(rendered, add_special=False) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_conversation_is_left_as_it_was():
    messages = [dict(USER)]
    assert ChatTemplate("{{ messages | length }}", "here").render(messages) == "1"
    assert messages == [USER]


def test_the_date_is_todays():
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", "here").render([])
    assert before <= text <= datetime.datetime.now().strftime("%Y-%m-%d")


def test_a_refusal_is_the_templates_own_words():
    template = ChatTemplate(INST, "here", {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(UsageError, match="refuses this conversation: roles must alternate"):
        template.render([USER, USER])
    assert template.render([USER]).startswith("<s>[INST] Hello")  # and it goes on


@pytest.mark.parametrize(
    "broken", ["{% for m in", "{{ 1 + }}", "{% frobnicate %}", "{% generation %}never ended", "{{ a | no_filter }}"]
)
def test_a_template_that_is_none_is_a_format_error(broken):
    with pytest.raises(FormatError, match="dir: the chat template is not valid"):
        ChatTemplate(broken, "dir").check()


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
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
        "{{ messages.append(1) }}",
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
def test_what_a_template_must_not_do_is_a_format_error(hostile):
    template = ChatTemplate(hostile, "dir")
    with pytest.raises(FormatError, match=r"dir: the chat template failed: .+"):
        template.render([dict(USER)])


@pytest.mark.parametrize("hidden", ["messages.__class__", "strftime_now.__code__", "'{0.__class__}'.format(messages)"])
def test_what_python_keeps_for_itself_is_not_shown(hidden):
    assert ChatTemplate(f"{{{{ {hidden} }}}}", "dir").render([dict(USER)]) == ""


def test_a_long_conversation_is_far_from_the_bounds():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 50} for i in range(2001)]
    for template in TEMPLATES.values():
        text = ChatTemplate(template, "dir", {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)
        assert text.count("word") in (50 * 2001, 50 * 8, 150 * 1001 + 50 * 1000)


def test_of_several_templates_the_default_is_taken(theirs):
    def of(templates):
        return ChatTemplate.of(Tokenizer(theirs.backend_tokenizer, chat_templates=templates, where="dir"))

    assert of({}) is None
    assert of({"rag": "no", "default": "yes"}).render([]) == "yes"
    with pytest.raises(FormatError, match="dir: has chat templates for rag, tool_use, and no default one"):
        of({"tool_use": "a", "rag": "b"})
