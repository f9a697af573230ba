"""Prompts, the tokens that a model generates after them, and the logits of the reference."""

import torch


def ids_of(length, *, rows=1, seed=0):
    return torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model, ids):
    return model.reference(ids).logits


def greedy(model, ids, count=12, **kwargs):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **kwargs)[
        0
    ].tolist()
