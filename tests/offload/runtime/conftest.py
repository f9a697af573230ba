"""Tiny models of every architecture, with the answers of Hugging Face's `generate`."""

from functools import cache

import pytest
import torch
from arch_models import VARIANTS, make_checkpoint, open_model
from offload_runs import LENGTHS, NEW


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A variant's Hugging Face folder in a dtype, made once."""

    @cache
    def get(name, dtype="float32"):
        return make_checkpoint(tmp_path_factory.mktemp("offload") / "hf", VARIANTS[name], dtype=dtype)

    return get


@pytest.fixture(scope="session")
def models(checkpoint):
    """A variant's (Hugging Face folder, prompts, answers of `generate`), made once."""

    @cache
    def get(name):
        path = checkpoint(name)
        reference = open_model(path)
        generator = torch.Generator().manual_seed(7)
        prompts = [torch.randint(4, 300, (n,), generator=generator).tolist() for n in LENGTHS]
        answers = []
        for prompt in prompts:
            out = reference.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=1
            )
            answers.append(out[0, len(prompt) :].tolist())
        return path, prompts, answers

    return get
