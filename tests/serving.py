"""A server over a loaded model, in threads of this process, for real clients."""

import threading
import time
from contextlib import contextmanager

from flashllm.api.requests import Request
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve.opening import ServerOptions, app_of
from flashllm.serve.server import Server, listen, url
from flashllm.serve.worker import Began, Chosen, Ended, Finished, Job

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# With tools, calls and reasoning, in the manner of Hermes.
HERMES = """{%- if tools %}T{% for tool in tools %}{{ tool | tojson }}{% endfor %};{% endif %}
{%- for m in messages %}{{ m.role }}:
{%- if m.role == 'tool' %}<{{ m.name }}/{{ m.tool_call_id }}>{% endif %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{%- if call.function.arguments is mapping %}{{ call.function.arguments.items() | list }}{% endif %}
{{- call.function | tojson }}</tool_call>{% endfor %};{% endfor %}
{%- if add_generation_prompt %}assistant:
{%- if enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>
{% endif %}{% endif %}"""


class SlowModel:
    """A model whose passes take `delay_s` longer, so that there is something to wait for and to stop."""

    def __init__(self, model, delay_s=0.0):
        self._model, self.delay_s = model, delay_s
        self.passes = []  # new tokens of each
        self.fault = None  # raised by the next pass
        self.runs = threading.Event()  # while it is not set, passes wait
        self.runs.set()

    def __getattr__(self, name):
        return getattr(self._model, name)

    def step(self, entries, **options):
        self.passes.append(len(entries[0][1]))
        time.sleep(self.delay_s)
        self.runs.wait()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return self._model.step(entries, **options)

    def begin(self, entries, **options):
        return Whole(lambda: self.step(entries, **options))


class Whole:
    """A pass that never waits."""

    def __init__(self, step):
        self._step = step

    def advance(self, seconds):
        return self._step()

    def close(self):
        pass


class ScriptedModel(SlowModel):
    """A model that answers with the tokens it is told to `say`, whatever the prompt is."""

    def say(self, ids):
        self._answer, self._at, self._goes_on_at = list(ids), 0, None

    def step(self, entries, **options):
        ((sequence, ids),) = entries
        width = 1 + options.get("drafted", 0)
        self._at = self._at + width if sequence.length == self._goes_on_at and len(ids) == width else 0
        logits = super().step(entries, **options)
        self._goes_on_at = sequence.length
        for back in range(1, width + 1):
            logits[-back] = 0
            logits[-back, self._answer[max(0, min(self._at + 1 - back, len(self._answer) - 1))]] = 10
        return logits


@contextmanager
def running(model, path, *, template=TEMPLATE, speculation=None, parking=None, **options):
    """Serve `model`, loaded from `path`: (URL, worker). `template`: one, several by name, or None."""
    tokenizer = Tokenizer.load(path)
    given = {"default": template} if isinstance(template, str) else template
    tokenizer.chat_templates, tokenizer.where = given or {}, "here"
    turns = ChatTemplate.of(tokenizer)
    given = ServerOptions(**{"name": "tiny", "parallel": 1, **options})
    more = {"speculation": speculation, "parking": parking}
    with app_of(model, tokenizer, turns, given, limit=10**9, **more) as (app, worker):
        sock = listen("127.0.0.1", 0)
        server = Server(app, stopping=worker.cancel_all)
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield url(sock), worker
        finally:
            server.stop()
            thread.join()
            sock.close()
            if turns is not None:
                turns.close()


def answered(worker, prompts, *, kind="completion", messages=(), count=4, logprobs=None):
    """(token ids, reused tokens, log probabilities) of each prompt, as the server's worker answers it."""
    events, done = [], threading.Event()

    def deliver(event):
        events.append(event)
        if isinstance(event, Finished):
            done.set()

    options = SamplingOptions(max_new_tokens=count, ignore_eos=True)
    requests = [
        Request(
            custom_id="",
            kind=kind,
            prompt=tuple(messages) or tuple(ids),
            options=options,
            max_new_given=True,
            logprobs=logprobs,
        )
        for ids in prompts
    ]
    worker.submit(Job(prompts=list(zip(requests, prompts, strict=True)), deliver=deliver))
    assert done.wait(20)
    assert events[-1] == Finished()
    found = []
    for index in range(len(prompts)):
        mine = [event for event in events if not isinstance(event, Finished) and event.index == index]
        assert isinstance(mine[-1], Ended)
        tokens = [event.record for event in mine if isinstance(event, Chosen)]
        reused = next(event.record.reused_tokens for event in mine if isinstance(event, Began))
        found.append(([token.token_id for token in tokens], reused, [token.logprobs for token in tokens]))
    return found
