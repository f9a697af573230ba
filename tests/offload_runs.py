"""Runs of the throughput engine's runtime on tiny models: placements by name, and the tokens that come of them."""

from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.sequences import Sequence
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import Runner, RunOptions

LENGTHS = (1, 7, 63, 64, 65, 100, 3, 130)  # prompts, about a page and two
NEW = 20
DEVICE, CPU, DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
MIXED = (0.4, 0.3, 0.3)


def policy(weights=DEVICE, cache=DEVICE, hidden=DEVICE, **other):
    names = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")
    return Policy(**{"gpu_batch": 3, **other}, **dict(zip(names, (*weights, *cache, *hidden), strict=True)))


def sequences(prompts, new=NEW):
    """`new`: the tokens of all, or of each."""
    counts = [new] * len(prompts) if isinstance(new, int) else new
    return [
        Sequence(prompt, SamplingOptions(max_new_tokens=count), decoder=None, end_ids=frozenset())
        for prompt, count in zip(prompts, counts, strict=True)
    ]


def answers(path, prompts, scratch, chosen, new=NEW, **options):
    made = sequences(prompts, new)
    with Runner(path, chosen, RunOptions(scratch=scratch, threads=2, **options)) as runner:
        runner.run(made)
    assert not list(scratch.iterdir()), "scratch files stayed"
    return [list(sequence.output) for sequence in made]
