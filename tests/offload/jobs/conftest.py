"""A tiny model and what Hugging Face answers, made once."""

import pytest
import torch
from asked import CONTEXT, LENGTHS, PROMPTS
from tiny_models import make_tiny_opt
from transformers import AutoTokenizer, OPTForCausalLM


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("model") / "tiny", context=CONTEXT)


@pytest.fixture(scope="session")
def expected(tiny):
    """Ids that Hugging Face continues each prompt with, alone."""
    model, tokenizer = OPTForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)
    result = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=length, do_sample=False)[0, inputs.input_ids.shape[1] :]
        result.append(tuple(ids.tolist()))
    return result
