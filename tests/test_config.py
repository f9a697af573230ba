"""`RunConfig`: what cannot be is refused where it is written down, in the words of the command line."""

import pytest
from scripts import run_python

from flashllm.config import MAX_THREADS, RunConfig
from flashllm.errors import UsageError


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"memory": 0}, "--memory must be at least 1, not 0"),
        ({"memory": "7GB"}, "--memory must be a whole number of bytes, not '7GB'"),
        ({"memory": 7e9}, "--memory must be a whole number"),
        ({"context": -1}, "--context must be at least 1"),
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"window": True}, "window must be a whole number"),
        ({"threads": 0}, "--threads must be at least 1"),
        ({"threads": MAX_THREADS + 1}, "--threads must be at most 1024"),
        ({"io_threads": 0}, "io_threads must be at least 1"),
        ({"io_backend": "aio"}, "io_backend must be one of threads, io_uring, not 'aio'"),
        ({"mode": "spares"}, "--mode must be one of sparse, oracle, dense, not 'spares'"),
        ({"cache_bits": 5}, "--cache-bits must be one of 8, 4, not 5"),
        ({"cache_policy": "lru"}, "cache_policy must be one of frequency, window, not 'lru'"),
        ({"speculate": "twice"}, "--speculate must be one of off, lookup, not 'twice'"),
        ({"store": "profiles.json"}, "--store must be a path"),
        ({"direct": 1}, "direct must be True or False, not 1"),
        ({"simd": 2}, "simd must be a level's name or auto, not 2"),
        ({"prompts": "exact"}, "prompts must be one of dense, sparse, not 'exact'"),
        ({"threads": 2.0}, "--threads must be a whole number"),
        ({"mode": []}, "--mode must be one of"),
        ({"speculate": 3}, "--speculate must be"),
        ({"cache_policy": b"window"}, "cache_policy must be one of"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(field, message):
    RunConfig(threads=MAX_THREADS)
    with pytest.raises(UsageError, match=message):
        RunConfig(**field)


def test_it_costs_nothing_to_import():
    code = "import sys, flashllm.config; print(sorted({'numpy', 'torch', 'flashllm._core'} & set(sys.modules)))"
    assert run_python("-c", code).stdout.strip() == "[]"
