"""`OffloadEngine` over a tiny real model: the answers of Hugging Face's `generate`, whatever the batches."""

import json

import pytest
import torch
from asked import CONTEXT, LENGTHS, POLICY, PROMPTS

from flashllm import OffloadEngine
from flashllm.errors import BudgetError, FormatError, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload import launch
from flashllm.offload.accelerators import choose_accelerator


def engine(tiny, tmp_path, **options):
    return OffloadEngine(tiny, scratch=tmp_path / "scratch", **({"policy": POLICY} | options))


def samplings(**options):
    return [SamplingOptions(max_new_tokens=length, **options) for length in LENGTHS]


def test_greedy_answers_are_those_of_hugging_face(tiny, tmp_path, expected):
    with engine(tiny, tmp_path) as one:
        outputs = one.generate(PROMPTS, samplings())
        assert [output.token_ids for output in outputs] == expected
        assert [output.index for output in outputs] == list(range(len(PROMPTS)))
        assert all(output.text == one._model.encoder.tokenizer.decode(output.token_ids) for output in outputs)
        ids = [one._model.encoder.tokenizer.encode(prompt) for prompt in PROMPTS]
        assert [output.token_ids for output in one.generate(ids, samplings())] == expected


@pytest.mark.parametrize("batches", [(1, 1), (3, 1), (8, 4)])
def test_answers_do_not_depend_on_the_batch(tiny, tmp_path, batches):
    def answers(gpu_batch, num_batches):
        policy = POLICY | {"gpu_batch": gpu_batch, "num_batches": num_batches}
        with engine(tiny, tmp_path, policy=policy) as one:
            options = samplings(temperature=0.8, top_p=0.9, seed=4)
            return [(output.token_ids, output.logprobs) for output in one.generate(PROMPTS, options, logprobs=3)]

    assert answers(*batches) == answers(2, 2)


def test_a_stream_is_answered_window_by_window(tiny, tmp_path, expected):
    taken = []

    def stream():
        for index, prompt in enumerate(PROMPTS):
            taken.append(index)
            yield prompt

    with engine(tiny, tmp_path) as one:
        outputs = one.run(stream(), SamplingOptions(max_new_tokens=2), window=3)
        first = next(outputs)
        assert taken == [0, 1, 2]
        rest = list(outputs)
    assert sorted(output.index for output in (first, *rest)) == list(range(len(PROMPTS)))
    for output in (first, *rest):
        shared = min(2, LENGTHS[output.index])
        assert output.token_ids[:shared] == expected[output.index][:shared]


def test_a_policy_is_planned_from_the_prompts(tiny, tmp_path, expected):
    with engine(tiny, tmp_path, policy=None, memory="6GB") as one:
        assert one.policy is None
        assert one.generate(PROMPTS[:1], max_new_tokens=LENGTHS[0])[0].token_ids == expected[0]
        assert one.policy.block_size >= 1
        assert [output.token_ids for output in one.generate(PROMPTS, samplings())] == expected  # planned again
    assert any("planned a policy from typical figures" in notice for notice in one.notices)


@pytest.mark.parametrize("policy", [None, POLICY], ids=["planned", "given"])
def test_an_accelerator_gives_the_same_answers(tiny, tmp_path, expected, policy, monkeypatch):
    """The device tier by torch, on its "cpu": planned for, opened and used as a GPU would be."""
    monkeypatch.setattr(launch, "choose_accelerator", lambda device: "cpu")
    monkeypatch.setattr(launch, "free_nbytes", lambda accelerator: 10**9)
    with engine(tiny, tmp_path, policy=policy, memory="4GB") as one:
        assert [output.token_ids for output in one.generate(PROMPTS, samplings())] == expected
        assert one._runner.options.accelerator == "cpu"
    with (
        engine(tiny, tmp_path, policy=policy, memory="4GB", gpu_memory="100kB") as one,
        pytest.raises(BudgetError, match=r"device memory|accelerator's memory"),
    ):
        one.generate(PROMPTS, samplings())


def test_a_gpu_that_is_not_there_is_refused(tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with engine(tiny, tmp_path, device="cuda") as one, pytest.raises(UsageError, match=r"cuda.*use --device cpu"):
        one.generate(PROMPTS[:1])
    with pytest.raises(UsageError, match="--device"):
        engine(tiny, tmp_path, device="tpu")
    for device in ("cpu", "auto"):
        assert choose_accelerator(device) is None


def test_a_prompt_that_is_too_long_fails_alone_and_the_contexts_end_ends_an_answer(tiny, tmp_path, expected):
    with engine(tiny, tmp_path) as one:
        outputs = one.generate([[5] * CONTEXT, PROMPTS[2], "", [300]], max_new_tokens=1)
        (output,) = one.generate([[5] * (CONTEXT - 3)], SamplingOptions(max_new_tokens=100, ignore_eos=True))
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "error"]
    assert "64 tokens" in outputs[0].error
    assert "vocabulary of 300" in outputs[3].error
    assert outputs[1].token_ids == expected[2]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5, -1], "token ids"),
        ([5.9, True], "token ids"),
        ([5, True], "token ids"),
        (["a"], "token ids"),
        ([], "token ids"),
        (None, "token ids"),
        ([{"content": "hi"}], "role must be one of"),
        ([{"role": "user", "content": "hi"}, "there"], r"messages[1] must be an object"),
    ],
)
def test_what_is_no_prompt_fails_alone(tiny, tmp_path, expected, prompt, said):
    with engine(tiny, tmp_path) as one:
        bad, good = one.generate([prompt, PROMPTS[2]], max_new_tokens=1)
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert said in bad.error
    assert good.token_ids == expected[2][:1]


def test_a_stream_is_of_prompts(tiny, tmp_path):
    with engine(tiny, tmp_path) as one:
        with pytest.raises(UsageError, match="the only item of a list"):
            next(one.run("abc"))
        assert "a text, a list of token ids or" in next(one.run([{"role": "user", "content": "hi"}])).error


def test_limits_and_arguments(tiny, tmp_path):
    with engine(tiny, tmp_path, policy=None, memory="1MB") as one, pytest.raises(BudgetError, match="nothing is left"):
        one.generate(["a"])
    with pytest.raises(UsageError, match="--compress"):
        engine(tiny, tmp_path, compress=["all"])
    with pytest.raises(UsageError, match="cache_bits"):
        engine(tiny, tmp_path, cache_bits=5)
    with pytest.raises(FormatError, match="gpu_batch"):
        engine(tiny, tmp_path, policy={"gpu_batches": 1})
    with pytest.raises(UsageError):
        OffloadEngine(tmp_path / "nothing")
    with engine(tiny, tmp_path) as one:
        with pytest.raises(UsageError, match="2 samplings do not go with 1 prompts"):
            one.generate(["a"], [SamplingOptions(), SamplingOptions()])
        assert one.generate([]) == []
        for alone in ("a text", [{"role": "user", "content": "a message"}]):
            with pytest.raises(UsageError, match="the only item of a list"):
                one.generate(alone)
    with pytest.raises(UsageError, match="closed"):
        one.generate(["a"])


def test_answers_are_held_to_a_schema(tiny, tmp_path):
    schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 2}
    valid = {json.dumps(each) for each in (["yes"], ["no"], *([a, b] for a in ("yes", "no") for b in ("yes", "no")))}
    with engine(tiny, tmp_path) as one:
        outputs = one.generate(PROMPTS[:4], SamplingOptions(temperature=1.0, seed=3), max_new_tokens=40, schema=schema)
        assert {output.finish_reason for output in outputs} == {"stop"}
        assert {output.text for output in outputs} <= valid
        assert "/items: Invalid type" in one.generate(PROMPTS[:1], schema={"items": {"type": "x"}})[0].error
