"""Loads the model that the arguments describe, as a session, for the verbs that run one.

The tokenizer is loaded before the model, so that the memory plan counts it with the libraries; so begins the process of
the chat template, which imports what it needs while weights are read.
"""

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashllm.base.command_line import say
from flashllm.commands.options import run_config
from flashllm.engine.model import Model
from flashllm.generate.draft_model import opened_draft
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session
from flashllm.generate.speculation import speculation_of
from flashllm.generate.templates.chat_template import opened_template
from flashllm.generate.tokenizer import Tokenizer


@contextmanager
def open_session(
    args: argparse.Namespace, path: Path, options: SamplingOptions, *, chat: bool = False
) -> Iterator[tuple[Session, Model]]:
    """A session over the model directory `path`, and its model; both closed at the end. Shows the engine's notices.

    With `chat` turns go through the model's chat template, where it has one.
    """
    tokenizer = Tokenizer.load(path)
    config = run_config(args)
    with contextlib.ExitStack() as stack:
        template = stack.enter_context(opened_template(tokenizer)) if chat else None
        draft = stack.enter_context(opened_draft(path, config))
        model = stack.enter_context(Model.open(path, config, process=draft.process_nbytes))
        for notice in model.notices:
            say(notice)
        if template is not None:
            template.check()
        speculation = speculation_of(config, model, draft.drafter)
        with Session(model, tokenizer, options, template=template, speculation=speculation) as session:
            yield session, model
