"""What the server counts of the records that its worker hands on."""

import dataclasses

from flashllm.engine.meter import StepTimes
from flashllm.generate.session import PrefillRecord, TokenRecord
from flashllm.serve.metrics import Metrics
from flashllm.serve.worker import Began, Chosen

ZEROS = StepTimes(**{field.name: 0 for field in dataclasses.fields(StepTimes)})


def counted(metrics):
    lines = [line.split() for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_drafted_tokens_are_counted_and_those_that_were_right():
    metrics = Metrics(waiting=lambda: 0, kept=lambda: 0, memory=lambda: 0, memory_limit=0)
    for _ in range(2):
        metrics.see(Began(0, PrefillRecord(tokens=3, reused_tokens=1, dense=False, times=ZEROS)))
        # The first token is the prompt's. Then a pass with three drafted ones, two of them right, and a plain one.
        for at, (pass_tokens, rejected) in enumerate(((0, 0), (4, 0), (0, 0), (0, 0), (1, 512))):
            times = dataclasses.replace(ZEROS, rejected_bytes=rejected, behind_bytes=3)
            record = TokenRecord(token_id=5, text="a", times=times, pass_tokens=pass_tokens)
            metrics.see(Chosen(0, record, is_first=at == 0))
    values = counted(metrics)
    assert values["flashllm_generated_tokens_total"] == 10
    assert values["flashllm_drafted_tokens_total"] == 6
    assert values["flashllm_accepted_tokens_total"] == 4
    assert values["flashllm_rejected_bytes_total"] == 1024
    assert values["flashllm_behind_bytes_total"] == 30
    assert values["flashllm_read_bytes_total"] == 0
    assert values["flashllm_prompt_tokens_total"] == 6
