"""Loads the model that the arguments describe, as a session, for the verbs that run one.

The tokenizer is loaded before the model, so that the memory plan counts it with the libraries.
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from flashllm.commands.options import say
from flashllm.generate.session import SamplingOptions, Session
from flashllm.hf.model import FlashModel


def load_tokenizer(path: Path) -> Any:
    """The model directory's tokenizer. Runs no code from the directory."""
    transformers.logging.set_verbosity(logging.ERROR)  # its advice is about options the user never gave
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


@contextmanager
def open_session(args: argparse.Namespace, path: Path, options: SamplingOptions) -> Iterator[Session]:
    """A session over the model directory `path`, closed at the end. What the engine has to say is shown."""
    tokenizer = load_tokenizer(path)
    model = FlashModel.from_pretrained(
        path,
        memory=args.memory,
        window=args.window,
        cache_policy=args.cache_policy,
        threads=args.threads,
        io_threads=args.io_threads,
        io_backend=args.io_backend,
        store=args.store,
        mode=args.mode,
        context=args.context,
        direct=not args.buffered,
        verify_checksums=not args.no_checksums,
    )
    with model.engine:
        for notice in model.engine.notices:
            say(notice)
        with Session(model, tokenizer, options) as session:
            yield session
