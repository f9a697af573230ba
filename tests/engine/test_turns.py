"""Whose turn it is: few tokens together, prompts by slices, nobody twice in a row beside others, nobody forgotten."""

import random

from flashllm.engine.turns import Turn, Turns


def joined(*members):
    turns = Turns()
    for member in members:
        turns.join(member)
    return turns


def test_few_tokens_share_a_pass_and_wait_briefly_for_each_other():
    turns = joined("a", "b", "c")
    turns.ask("a", prompt=False)
    turns.ask("b", prompt=False)
    assert turns.next(patient=True) == Turn(("a", "b"))  # c never had part
    turns.drop("a")
    turns.drop("b")
    turns.ask("a", prompt=False)
    turns.ask("c", prompt=False)
    assert turns.next(patient=True) is None
    assert turns.are_awaited
    assert turns.next(patient=False) == Turn(("a", "c"))
    turns.drop("a")
    turns.drop("c")
    turns.ask("a", prompt=False)
    turns.leave("c")
    assert turns.next(patient=True) == Turn(("a",))  # nobody waits for one that left


def test_prompts_take_turns_and_never_two_beside_an_answer():
    turns = joined("a", "p", "q")
    turns.ask("p", prompt=True)
    turns.ask("q", prompt=True)
    assert [turns.next(patient=True).members[0] for _ in range(4)] == ["p", "q", "p", "q"]
    seen = []
    for _ in range(6):
        turns.ask("a", prompt=False)
        for _ in range(2):
            turn = turns.next(patient=True)
            seen.append(turn.members[0])
            if not turn.is_slice:
                turns.drop("a")
    assert seen == ["a", "p", "a", "q"] * 3


def test_whoever_has_no_memory_waits_until_another_leaves():
    turns = joined("a", "p")
    turns.ask("p", prompt=True)
    turns.ask("a", prompt=False)
    assert turns.block("p")
    assert turns.next(patient=True) == Turn(("a",))
    assert not turns.block("a")  # nobody else could leave
    turns.leave("a")
    assert turns.next(patient=True) == Turn(("p",), is_slice=True)


def test_everybody_comes_to_turn():
    dice = random.Random(3)
    for _ in range(50):
        names = [f"m{n}" for n in range(dice.randint(1, 8))]
        turns, asking, waited = joined(*names), set(), dict.fromkeys(names, 0)
        for _ in range(300):
            for name in names:
                if name not in asking and dice.random() < 0.7:
                    turns.ask(name, prompt=dice.random() < 0.3)
                    asking.add(name)
            turn = turns.next(patient=dice.random() < 0.5)
            for name in asking:
                waited[name] += turn is not None
            for name in turn.members if turn is not None else ():
                waited[name] = 0
                if not turn.is_slice or dice.random() < 0.5:
                    turns.drop(name)
                    asking.discard(name)
            assert max(waited.values()) <= 2 * len(names) + 1
