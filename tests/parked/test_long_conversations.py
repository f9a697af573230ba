"""Sixteen turns of models with a recurrent state: each turn's probabilities are those of a replay that computes the
same positions as prompt and as tokens, also behind a kill and behind parking; a second turn computes what is new alone.
"""

import subprocess
import sys
from itertools import accumulate, pairwise

import numpy as np
import pytest
import talking
from arch_models import VARIANTS, Variant, make_checkpoint
from serving import answered as asked
from talking import VOCAB, Silent, message, opened, talk
from test_parked import answer as answered

from flashllm.convert.run import convert
from flashllm.generate.logprobs import logprobs_of
from flashllm.generate.session import Session
from flashllm.parked.file import identity, read_parked, write_parked
from flashllm.serve.worker import Worker

TURNS, KILLED, PARKED, CONTEXT = 16, 5, 11, 8400
HYBRIDS = {
    "delta rule": VARIANTS["qwen3_next"],
    "Mamba-2": VARIANTS["granitemoehybrid"],
    "Mamba-2 beside attention": VARIANTS["falcon_h1"],
    "latent attention": VARIANTS["kimi_linear"],
    "short convolution": VARIANTS["lfm2"],
}


@pytest.fixture(scope="module", params=HYBRIDS)
def directory(request, tmp_path_factory):
    variant = HYBRIDS[request.param]
    root = tmp_path_factory.mktemp("hybrid")
    source = make_checkpoint(
        root / "hf", Variant(variant.model_type, {**variant.config, "max_position_embeddings": CONTEXT})
    )
    convert(source, root / "model")
    return root / "model"


def test_sixteen_turns(directory, tmp_path):
    path = tmp_path / "one.kv"
    command = [sys.executable, talking.__file__, path, directory, str(KILLED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "within\n"
        child.kill()
    with opened(directory) as model, opened(directory, threads=2) as replaying:
        name, said = identity(directory, model.arithmetic), {}
        session = Session(model, Silent())
        read_parked(path, session, name)
        before = session.tokens
        for turn in range(KILLED, TURNS):
            said[turn] = talk(session, turn)
            if turn == PARKED:
                write_parked(path, session, name, {})
                session.close()
                session = Session(model, Silent())
                read_parked(path, session, name)
        session.close()
        assert before == _replayed(replaying, said, before)


def _replayed(model, said, before):
    """Checks the turns against two sequences, of prompts cut otherwise, and all but the killed process's by their
    probabilities; returns that process's tokens."""
    lengths = [*accumulate((len(message(turn)) + 3 + turn % 6 for turn in range(KILLED)), initial=0)]
    answers = {turn: before[first + len(message(turn)) : end] for turn, (first, end) in enumerate(pairwise(lengths))}
    answers |= {turn: ids for turn, (ids, _) in said.items()}
    for shift in (0, 5):
        with model.new_sequence() as sequence:
            pending = []
            for turn in range(TURNS):
                pending += message(turn)  # behind the last token of the answer before, which is computed with it
                dense = model.is_prompt(len(pending))
                size = 7 + (turn + shift) % TURNS if dense else 1
                for at in range(0, len(pending), size):
                    logits = model.step([(sequence, pending[at : at + size])], as_prompt=dense)[0]
                rows = [logits]
                rows += [model.step([(sequence, [token])])[0] for token in answers[turn][:-1]]
                assert [int(row.argmax()) for row in rows] == answers[turn]
                if turn in said:
                    found = [logprobs_of(*each, VOCAB) for each in zip(rows, answers[turn], strict=True)]
                    assert found == said[turn][1]
                pending = answers[turn][-1:]
    return [token for turn in range(KILLED) for token in (*message(turn), *answers[turn])]


@pytest.mark.parametrize("length", [150, 8000])
def test_a_second_turn_computes_what_is_new(directory, length):
    """The message, and of the answer its last token, which nothing was computed after; as a server is asked."""
    said = {"max_waiting": 1, "keep": 10**8, "on_event": lambda event: None}
    with opened(directory) as model, Worker(model, Silent(), **said) as worker:
        first = np.random.default_rng(0).integers(5, 290, length).tolist()
        reused, answer = answered(worker, first)
        assert reused == 0
        second = [*first, *answer, *message(0)]
        reused, _ = answered(worker, second)
        assert len(second) - reused == 1 + len(message(0))


def test_a_second_turn_without_the_first_ones_reasoning(directory):
    """Where a template drops an answer's first tokens, the newest state before them serves, and changes no bit."""
    said, chat = {"max_waiting": 1, "on_event": lambda event: None}, [{"role": "user", "content": "a"}]
    random, ids = np.random.default_rng(0), []
    with opened(directory) as model, Worker(model, Silent(), keep=10**8, **said) as worker:
        for length in (150, 200):
            ids += random.integers(5, 290, length).tolist()
            ((answer, _, _),) = asked(worker, [ids], kind="chat", messages=chat, count=8)
            before, ids = len(ids), ids + answer
            chat = [*chat, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
        assert answer[5] != answer[0]
        third = [*ids[:before], *answer[5:], *message(0)]
        ((found, reused, scores),) = asked(worker, [third], kind="chat", messages=chat, logprobs=5)
    assert reused == before // 64 * 64
    with opened(directory) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids[:150])], as_prompt=True)
        for token in ids[150:157]:
            model.step([(sequence, [token])])
        row = model.step([(sequence, third[157:])], as_prompt=True)[0]
        assert logprobs_of(row, found[0], 5) == scores[0]
