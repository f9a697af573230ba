"""How layers are split into stages, and the order of a stage's steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashllm.errors import UsageError
from flashllm.offload.pipeline.place import Place
from flashllm.offload.planner.schedules import Action, schedule
from flashllm.offload.policy import Workload
from flashllm.offload.shape import load_shape
from flashllm.offload.stages import Stage, split, split_model, whole


def test_equal_layers_are_split_equally():
    assert [stage.num_layers for stage in split(32, 4)] == [8, 8, 8, 8]
    assert [stage.num_layers for stage in split(7, 3)] == [3, 2, 2]
    assert split(5, 1) == (whole(5),)


def test_the_head_is_paid_in_layers():
    assert [stage.num_layers for stage in split(12, 4, head=3)] == [4, 4, 3, 1]


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 10))
def test_no_layer_could_move_for_the_better(layers, stages, head):
    if stages > layers:
        with pytest.raises(UsageError, match="split among"):
            split(layers, stages)
        return
    parts = split(layers, stages, head=head)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].is_last
    costs = [part.num_layers + head * part.is_last for part in parts]
    slowest = costs.index(max(costs))
    if parts[slowest].num_layers > 1:
        assert max(costs) <= min(costs) + 1 + 1e-9


def test_a_model_s_head_weighs_more_where_answers_are_long():
    shape = load_shape("opt-1.3b")
    long, short = (split_model(shape, 2, Workload(prompt_len=p, gen_len=g)) for p, g in ((1, 512), (512, 1)))
    assert long[-1].num_layers < short[-1].num_layers == 12


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_a_stage_s_order_is_possible(batches, tokens, layers, group):
    steps = list(schedule(batches=batches, tokens=tokens, layers=layers, group=group))
    loads = [step for step in steps if step.action is Action.LOAD_WEIGHTS]
    assert len(loads) == tokens * layers * -(-batches // group)
    done = dict.fromkeys(range(batches), 0)
    for step in steps:
        if step.action is Action.LOAD_WEIGHTS:
            loaded = step.layer
        elif step.action is Action.COMPUTE:
            assert loaded == step.layer
            assert done[step.batch] == step.token * layers + step.layer
            done[step.batch] += 1
    assert set(done.values()) == {tokens * layers}


def test_a_group_leaves_before_the_next_begins():
    steps = list(schedule(batches=4, tokens=1, layers=2, group=2))
    computed = [(step.batch, step.layer) for step in steps if step.action is Action.COMPUTE]
    assert computed == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_stages_and_places_are_checked():
    with pytest.raises(ValueError, match="not in a model"):
        Stage(first=2, end=2, layers=4)
    assert Place.from_torchrun({}) is None
    assert Place.from_torchrun({"WORLD_SIZE": "1", "RANK": "0"}) is None
    place = Place.from_torchrun({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2"})
    assert (place.is_last, place.next, place.previous, place.local) == (True, 0, 2, 2)
    for bad in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "x"}, {"WORLD_SIZE": "2", "RANK": "2"}):
        with pytest.raises(UsageError):
            Place.from_torchrun(bad)
