"""Loads the model that the arguments describe, as a session, for the verbs that run one."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flashllm.base.command_line import say
from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.commands.asked import explained, run_config
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import FlashError
from flashllm.format.model_dir import ModelDir
from flashllm.format.rows import measured_as
from flashllm.generate.grammar import Constraint, Grammars
from flashllm.generate.opening import opened_model
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session
from flashllm.generate.tokenizer import Tokenizer
from flashllm.plan.latency import dense_token
from flashllm.plan.resolve import resolve
from flashllm.profile.quick import WORTH_NBYTES, take_quick_profile


@contextmanager
def open_session(
    args: argparse.Namespace,
    path: Path,
    options: SamplingOptions,
    *,
    chat: bool = False,
    constraint: Constraint | None = None,
    notice: Callable[[str], None] = say,
    waiting: Callable[[str], None] = say,
) -> Iterator[tuple[Session, Model]]:
    """A session over the model directory `path`, and its model; both closed at the end.

    With `chat` turns go through the model's chat template, where it has one. The first answer has the form that
    `constraint` demands. `notice` gets the engine's notices, a line each; `waiting` what is waited for meanwhile.
    """
    tokenizer = Tokenizer.load(path)
    matcher = None
    if constraint is not None:  # before the model, so that the plan counts its memory
        grammars = Grammars(tokenizer.backend, tokenizer.end_ids, ModelDir.open(path).block.vocab_size)
        matcher = grammars.start(constraint)
    config = dataclasses.replace(run_config(args), has_form=constraint is not None)
    profile_drive(args, path, config, notice=notice, waiting=waiting)
    opened = opened_model(path, config, tokenizer, chat=chat, notice=notice, explain=explained(args))
    with (
        opened as (model, template, speculation),
        Session(model, tokenizer, options, template=template, speculation=speculation) as session,
    ):
        session.matcher = matcher
        yield session, model


def profile_drive(
    args: argparse.Namespace,
    path: Path,
    config: RunConfig,
    *,
    notice: Callable[[str], None] = say,
    waiting: Callable[[str], None] = say,
) -> None:
    """Take a quick profile, unless --no-profile says not, where the run will read neurons from flash and has no fresh
    one. `waiting` hears that it begins, `notice` why it failed. Loading the model says what is wrong with that."""
    if args.no_profile or not config.direct:
        return
    try:
        model = ModelDir.open(path)
        file = model.rows_file
        if file.stat().st_size < WORTH_NBYTES:
            return
        rows = model.manifest.rows
        encodings = {rows.encoding_of(matrix).name for matrix in rows.matrices} | {model.manifest.dtype}
        process, available = process_nbytes(), available_nbytes()
        plan = resolve(config, model, available=available, process=process)
    except (FlashError, OSError):
        return
    if dense_token(model, plan.memory, costs=None).bytes_read:
        room = min(plan.memory.limit_nbytes - process, available)
        measured = sorted({measured_as(encoding)[0] for encoding in encodings})
        if failure := take_quick_profile(file, room=room, say=waiting, encodings=measured, store=config.store):
            notice(failure)
