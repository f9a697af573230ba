"""Models whose memory plan is changed, passes that are watched, and ids, logits and pages of tiny models."""

import dataclasses

import numpy as np
from arch_models import tokens

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir
from flashllm.plan.memory import Conditions, plan_memory
from flashllm.plan.resolve import resolve


def ids_of(count, seed=0):
    """So many token ids, none of them special."""
    return np.random.default_rng(seed).integers(5, 290, count).tolist()


def logits_of(directory, mode=None, process=None, **config):
    """Of a prompt, of few and of single tokens."""
    with Model.open(directory, RunConfig(mode=mode, threads=2, io_threads=4, **config), process=process) as model:
        sequence, ids = model.new_sequence(), tokens(40)
        prompt = model.step([(sequence, ids)], all_logits=True)
        return np.concatenate([prompt, *(model.step([(sequence, ids[:count])]) for count in (1, 3, 8))])


def saved_pages(sequence):
    """(its pages of each kind, what fills those of another sequence with them)"""
    kept = [[page.copy() for page in pages] for pages in sequence.save()]

    def fill(kinds):
        for pages, theirs in zip(kinds, kept, strict=True):
            for page, bytes_of in zip(pages, theirs, strict=True):
                page[:] = bytes_of

    return kept, fill


def planned(directory, config, *, loads=True, **memory):
    """The model of a directory, on a machine with room for all; `loads`: the plan may say so; `memory`: fields of its
    plan that are otherwise."""
    model_dir = ModelDir.open(directory)
    plan = resolve(config, model_dir, available=10**12, process=10**8)
    memory = dataclasses.replace(plan.memory, **memory)
    return Model(model_dir, dataclasses.replace(plan, memory=memory, loads=plan.loads and loads), config)


def memory_plan(model, manifest=None, **options):
    """The memory plan of an opened model, perhaps with another manifest, on a machine with room for all.
    `options`: fields of `Conditions`, others of `RunConfig`."""
    names = {field.name for field in dataclasses.fields(Conditions)}
    met = {name: options.pop(name) for name in names & options.keys()}
    conditions = Conditions(**{"available": 10**12, "process": 10**8, **met})
    return plan_memory(manifest or model.manifest, model.block, RunConfig(**options), conditions)


def with_rows(plan, rows, **changes):
    """The memory plan with other rows in each layer's cache, however long the context is."""
    levels = np.array([rows], np.int32)
    return dataclasses.replace(plan, levels=levels, level_pages=plan.max_pages, **changes)


class Watched:
    """A pass that calls `before` with the number of each slice, before that is computed."""

    def __init__(self, work, before):
        self._work, self._before, self._slices = work, before, 0

    def advance(self, seconds):
        self._before(self._slices)
        self._slices += 1
        return self._work.advance(seconds)

    def close(self):
        self._work.close()
