"""Batch lines with tools: a real template, tokenizer and parser; tokens by hand."""

import json

import numpy as np
import pytest
from tiny_models import make_tokenizer

from flashllm.api.prompts import PromptEncoder
from flashllm.errors import FormatError
from flashllm.generate.grammar import Grammars
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.jobs.answers import answer
from flashllm.offload.jobs.lines import BatchFile
from flashllm.replies.formats import find

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}[TOOL_CALLS]"
CALLS = '[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{"city": "Köln"}[TOOL_CALLS]now[ARGS]{}</s>'
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
def encoder():
    made = make_tokenizer(300)
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]})
    tokenizer = Tokenizer(made.backend_tokenizer, special={"eos_token": "</s>"}, chat_templates={"default": TEMPLATE})
    with ChatTemplate.of(tokenizer) as template:
        answers = find(tokenizer.says_of_answers)
        grammars = Grammars(tokenizer.backend, tokenizer.end_ids, 320)
        yield PromptEncoder(
            tokenizer=tokenizer, template=template, context=1000, vocab=320, answers=answers, grammars=grammars
        )


def asked(tmp_path, **body):
    body = {"messages": [{"role": "user", "content": "Rain?"}], "temperature": 0, **body}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    return path


def said(encoder, path):
    """The answer's choice where the model says CALLS."""
    with BatchFile.read(path, encoder, max_new_tokens=200) as batch:
        sequence = batch.sequence(0)
        for token in encoder.tokenizer.encode(CALLS, add_special=False):
            sequence.accept(np.eye(320, dtype=np.float32)[token])
        made = answer(batch, sequence, model="m", token_text=encoder.tokenizer.token_text)
    return made["response"]["body"]["choices"][0]


def test_a_line_with_tools(encoder, tmp_path):
    choice = said(encoder, asked(tmp_path, tools=[NOW]))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "Hm.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "now", "arguments": '{"city": "Köln"}'}, {"name": "now", "arguments": "{}"}]
    assert len(said(encoder, asked(tmp_path, tools=[NOW], parallel_tool_calls=False))["message"]["tool_calls"]) == 1


def test_a_line_without_tools_has_no_calls(encoder, tmp_path):
    choice = said(encoder, asked(tmp_path))
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("[TOOL_CALLS]now")
    assert "tool_calls" not in choice["message"]


def test_tools_of_a_model_whose_form_is_not_known(encoder, tmp_path):
    unknown = PromptEncoder(tokenizer=encoder.tokenizer, template=encoder.template, context=1000, vocab=320)
    with pytest.raises(FormatError, match="the form in which this model writes calls is not known"):
        BatchFile.read(asked(tmp_path, tools=[NOW]), unknown, max_new_tokens=200)


def test_a_line_that_must_call(encoder, tmp_path):
    path = asked(tmp_path, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    with BatchFile.read(path, encoder, max_new_tokens=200) as batch:
        sequence = batch.sequence(0)
        logits = np.zeros(320, np.float32)
        logits[encoder.tokenizer.encode("[TOOL_CALLS]}", add_special=False)] = 1  # neither reasoning nor arguments
        while not sequence.finished:
            sequence.accept(logits)
        made = answer(batch, sequence, model="m", token_text=encoder.tokenizer.token_text)
    choice = made["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_a_line_whose_schema_cannot_be_compiled(encoder, tmp_path):
    form = {"type": "json_schema", "json_schema": {"schema": {"items": {"type": "x"}}}}
    with pytest.raises(FormatError, match=r"line 1: response_format: .* at /items: Invalid type"):
        BatchFile.read(asked(tmp_path, response_format=form), encoder, max_new_tokens=200)
