"""From a model directory to what answers: the model, its chat template and who drafts, closed in turn at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from flashllm.base.command_line import say
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.generate.draft_model import opened_draft
from flashllm.generate.speculation import Speculation, speculation_of
from flashllm.generate.templates.chat_template import ChatTemplate, opened_template
from flashllm.generate.tokenizer import Tokenizer


@contextmanager
def opened_model(
    path: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    chat: bool = True,
    notice: Callable[[str], None] = say,
    explain: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[Model, ChatTemplate | None, Speculation | None]]:
    """The model directory `path`, opened; with `chat` its template, where it has one.

    The memory plan counts what is loaded: the `tokenizer`, and the template's process, which imports what it needs
    while weights are read. `notice` gets the engine's notices, a line each, `explain` why the model is run as it is.
    Raises what `Model.open` raises.
    """
    with (
        opened_template(tokenizer) if chat else nullcontext() as template,
        opened_draft(path, config) as draft,
        Model.open(path, config, process=draft.process_nbytes) as model,
    ):
        for line in model.plan.reasons:
            explain(line)
        for line in model.notices:
            notice(line)
        if template is not None:
            template.check()
        yield model, template, speculation_of(config, model, draft.drafter)
