"""One server for a module: a tiny model whose passes can be slowed, and openai-python as its client."""

from contextlib import contextmanager

import httpx
import openai
import pytest
from serving import HERMES, ScriptedModel, SlowModel, running
from tiny_models import make_tiny_opt, make_tokenizer

from flashllm.api.prompts import PromptEncoder
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.generate.templates import chat_template
from flashllm.generate.templates.renderer import Renderer
from flashllm.generate.tokenizer import Tokenizer


@pytest.fixture(autouse=True, scope="module")
def _one_renderer():
    """One process renders the templates of all servers of a module, and ends with it."""
    renderer = Renderer()
    close, renderer.close = renderer.close, lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "Renderer", lambda: renderer)
        yield
    close()


@pytest.fixture(scope="module")
def model(tiny):
    with Model.open(tiny().path(), RunConfig(threads=1, io_threads=4)) as model:
        yield SlowModel(model)


@pytest.fixture(scope="module")
def served(tiny, model):
    """(URL, worker)"""
    with running(model, tiny().path(), max_waiting=8) as served:
        yield served


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served[0], timeout=60) as http:
        yield http


@pytest.fixture
def slow(model):
    """Passes take 20 ms more during the test."""
    model.delay_s = 0.02
    yield model
    model.delay_s = 0.0
    model.runs.set()


@pytest.fixture(scope="session")
def tools_path(tmp_path_factory):
    """A model directory whose tokenizer has marks of calls and reasoning."""
    root = tmp_path_factory.mktemp("tools")
    source = make_tiny_opt(root / "hf", vocab_size=320, context=1024)
    tokenizer = make_tokenizer(300)
    special = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|im_end|>", "<think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "</think>"])
    tokenizer.save_pretrained(source)
    convert(source, root / "flash")
    return root / "flash"


@pytest.fixture(scope="module")
def scripted(tools_path):
    """A model that says what it is told to."""
    with Model.open(tools_path, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        yield ScriptedModel(model)


@pytest.fixture(scope="module")
def hermes(scripted, tools_path):
    """(URL, worker) of a server over it, which asks for the key "secret"."""
    with running(scripted, tools_path, template=HERMES, key=b"secret") as served:
        yield served


@pytest.fixture
def with_template(scripted, tools_path):
    """A context: the client of a server over it that has this chat template."""

    @contextmanager
    def serve(template, **options):
        served = running(scripted, tools_path, template=template, **options)
        with served as (url, _), httpx.Client(base_url=url, timeout=60) as http:
            yield http

    return serve


@pytest.fixture
def say(scripted, tools_path):
    """Let the next answers be a text."""
    tokenizer = Tokenizer.load(tools_path)
    end = next(iter(tokenizer.end_ids))
    return lambda text: scripted.say([*tokenizer.encode(text, add_special=False), end])


@pytest.fixture
def seen(monkeypatch):
    """Conversations' texts, as the template renders them."""
    texts = []
    render = PromptEncoder.conversation

    def noted(self, *args, **options):
        texts.append(render(self, *args, **options))
        return texts[-1]

    monkeypatch.setattr(PromptEncoder, "conversation", noted)
    return texts
