"""A tokenizer of letters and a runner whose logits are a function of the tokens so far: jobs without a model."""

import dataclasses
import hashlib

import numpy as np

from flashllm.api.prompts import PromptEncoder
from flashllm.errors import FormatError

VOCAB = 64
END = 1
CONTEXT = 128
ALPHABET = "\x00\x01 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:!?<>|é"


class Letters:
    """A token a letter; 1 ends an answer."""

    end_ids = frozenset({END})

    def encode(self, text, *, add_special=True):
        return [0] * add_special + [max(ALPHABET.find(letter), 2) for letter in text]

    def decode(self, ids):
        return "".join(ALPHABET[each] for each in ids if each > 1)


class Turns:
    """A chat template, without tools."""

    def takes(self, name):
        return False

    def render(self, messages, *, add_generation_prompt=True, tools=(), values=None):
        if messages[0]["content"] == "break":
            raise FormatError("the chat template failed")
        return (
            "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>" * add_generation_prompt
        )


ENCODER = PromptEncoder(tokenizer=Letters(), template=Turns(), context=CONTEXT, vocab=VOCAB)


def logits_after(ids):
    """Logits [VOCAB] that only the tokens decide."""
    digest = hashlib.sha256(np.asarray(ids, np.int64).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).normal(0, 2, VOCAB).astype(np.float32)


@dataclasses.dataclass
class Measured:
    prefill_s: float = 0.25
    decode_s: float = 0.5
    busy: dict = dataclasses.field(default_factory=lambda: {"compute": 0.5})
    tiers: dict = dataclasses.field(default_factory=lambda: {"device": 1, "cpu": 2, "disk": 3, "scratch": 3})
    bytes_read: int = 100
    bytes_written: int = 10
    new_tokens: int = 0
    prompt_tokens: int = 0


class Interrupted(Exception):
    """Raised by a runner that was told to end after some steps."""


class Runner:
    """Runs a block, a token of every sequence a step; `end_after` steps in all it raises Interrupted."""

    context, vocab = CONTEXT, VOCAB

    def __init__(self, end_after=None):
        self.blocks = []
        self._steps_left = end_after

    def run(self, sequences, progress):
        self.blocks.append([(len(one.prompt), one.options.max_new_tokens) for one in sequences])
        new = 0
        while open_ones := [one for one in sequences if not one.finished]:
            if self._steps_left == 0:
                raise Interrupted
            if self._steps_left is not None:
                self._steps_left -= 1
            for one in open_ones:
                one.accept(logits_after([*one.prompt, *one.output]))
                new += 1
            progress(new)
        return Measured(new_tokens=new, prompt_tokens=sum(len(one.prompt) for one in sequences))
