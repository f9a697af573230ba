"""A conversation of tokens with a model, and a process that holds one: it parks after every turn, and waits within one.

python tests/talking.py FILE MODEL TURNS
"""

import sys
from pathlib import Path

import numpy as np

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.parked.file import identity, write_parked

VOCAB = 300


class Silent:
    """Texts are nothing here."""

    end_ids = frozenset()

    def encode(self, text, *, add_special=True):
        return []

    def decode(self, ids):
        return ""


class Letters:
    """A token is a letter."""

    end_ids = frozenset()

    def decode(self, ids):
        return "".join(chr(65 + each) for each in ids)


def message(turn):
    """A prompt of up to 40 tokens, or a few, which are computed as tokens."""
    count = 3 if turn % 5 == 4 else 9 + turn * 11 % 32
    return np.random.default_rng(turn).integers(5, 290, count).tolist()


def talk(session, turn):
    """The answer: (ids, log probabilities of all tokens where each was chosen)."""
    session.choose_by(SamplingOptions(max_new_tokens=3 + turn % 6, ignore_eos=True, temperature=0), logprobs=VOCAB)
    records = [each for each in session.stream_ids(message(turn)) if isinstance(each, TokenRecord)]
    return [each.token_id for each in records], [each.logprobs for each in records]


def opened(directory, **options):
    return Model.open(directory, RunConfig(**{"threads": 1, "io_threads": 2, **options}))


def main(path, directory, turns):
    with opened(Path(directory)) as model, Session(model, Silent()) as session:
        for turn in range(int(turns)):
            talk(session, turn)
            write_parked(Path(path), session, identity(Path(directory), model.arithmetic), {})
        for count, _ in enumerate(session.stream_ids(message(int(turns)))):
            if count == 2:
                print("within", flush=True)
                sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
