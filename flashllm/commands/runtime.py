"""Loads the model that the arguments describe, as a session, for the verbs that run one.

The tokenizer and the chat template are loaded before the model, so that the memory plan counts them with the libraries.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashllm.base.command_line import say
from flashllm.commands.options import run_config
from flashllm.engine.model import Model
from flashllm.generate.draft_model import opened_draft
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, Template
from flashllm.generate.speculation import speculation_of
from flashllm.generate.tokenizer import Tokenizer


@contextmanager
def open_session(
    args: argparse.Namespace, path: Path, options: SamplingOptions, *, chat: bool = False
) -> Iterator[tuple[Session, Model]]:
    """A session over the model directory `path`, and its model; both closed at the end. Shows the engine's notices.

    With `chat` turns go through the model's chat template, where it has one.
    """
    tokenizer = Tokenizer.load(path)
    template = load_template(tokenizer) if chat else None
    config = run_config(args)
    with opened_draft(path, config) as draft, Model.open(path, config, process=draft.process_nbytes) as model:
        for notice in model.notices:
            say(notice)
        speculation = speculation_of(config, model, draft.drafter)
        with Session(model, tokenizer, options, template=template, speculation=speculation) as session:
            yield session, model


def load_template(tokenizer: Tokenizer) -> Template | None:
    """The tokenizer's chat template. Where there is none, Jinja is not even imported: its memory holds neurons."""
    if not tokenizer.chat_templates:
        return None
    from flashllm.generate.chat_template import ChatTemplate

    return ChatTemplate.of(tokenizer)
