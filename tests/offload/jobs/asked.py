"""Prompts for the tiny model of this folder's fixtures, how long their answers are, and the policy of its engine."""

from offload_host import policy_of
from tiny_models import SENTENCES

CONTEXT = 64
POLICY = policy_of("device", gpu_batch=2, num_batches=2).to_json()
PROMPTS = [*SENTENCES, "a", "The moon", "One day a girl saw the sky and the sun"]
LENGTHS = [5, 9, 1, 12, 7, 3, 12, 2]
