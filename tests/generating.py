"""Prompts, and the tokens that a model generates after them."""

import torch


def ids_of(length, *, rows=1, seed=0):
    return torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids, count=12, **kwargs):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **kwargs)[
        0
    ].tolist()
