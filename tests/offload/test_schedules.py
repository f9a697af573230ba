"""The zig-zag schedule loads each layer's weights once a token for a whole block; graphs are checked."""

import pytest

from flashllm.offload.planner.schedules import Action, Graph, Step, zigzag_block


def test_a_block_shares_each_load_of_a_layer():
    steps = list(zigzag_block(Graph(batches=5, tokens=2, layers=3), block=2))
    loads = [step for step in steps if step.action is Action.LOAD_WEIGHTS]
    columns = [(token, layer) for token in range(2) for layer in range(3)]
    assert loads == [Step(Action.LOAD_WEIGHTS, first, *column) for first in (0, 2, 4) for column in columns]
    computed = [(step.token, step.layer, step.batch) for step in steps if step.action is Action.COMPUTE]
    assert computed[:12] == [(*column, batch) for column in columns for batch in (0, 1)]
    assert len(computed) == 5 * 2 * 3


def test_graphs_and_blocks_are_checked():
    with pytest.raises(ValueError, match="layers"):
        Graph(batches=1, tokens=1, layers=0)
    with pytest.raises(ValueError, match="at least one batch"):
        list(zigzag_block(Graph(batches=1, tokens=1, layers=1), block=0))
