"""A model of dummy weights, computed as its trace says: recorded or made-up activity takes the predictors' place.

Everything but that is the engine's own: reads, caches, products, and the predictors, which run for the time they take.
Of a directory without a trace the model is as it comes. Import this before the native core: the seam is in its test
build alone. Of a mixture's prompt the caches hear what the dummy routers choose, but for the last tokens.

    python bench/engine/traced.py generate MODEL [OPTION ...]

runs a command of flashllm on such a model; `traced.py protocol MODEL ...` runs bench/protocol.py, whose engines are
processes of their own.
`open_without` leaves out parts of the engine, to see what each is worth (paper A, table 2).
"""

import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import core_testing  # noqa: F401
from activity_trace import TRACE, Trace
from trace_replay import from_trace

from flashllm import _core, cli
from flashllm.commands import plan as plan_command
from flashllm.config import RunConfig
from flashllm.engine import build
from flashllm.engine import model as engine
from flashllm.engine.model import Entry, Logits, Model
from flashllm.format.model_dir import ModelDir
from flashllm.format.rows import PAGE_NBYTES
from flashllm.plan import resolve
from flashllm.plan.activity import ExpectedActivity
from flashllm.plan.resolve import Plan
from flashllm.profile.choice import open_reader
from flashllm.profile.costs import ReaderChoice

_of_shares = plan_command.expected_activity
_ENGINE = "engine"  # of a protocol
_APART = 997  # tokens of the trace, between those of sequences that share a pass
PARTS = {
    "cached": "neurons stay in memory from token to token (section 3.1)",
    "bundled": "a neuron's matrices are read as one row, not one by one (section 3.2)",
    "merged": "misses that are neighbours on flash are read in one request",
    "overlap": "hits are multiplied while misses are read",
    "prefetch": "the next layer's rows are prefetched, where something names them",
}


class TracedModel(Model):
    """`activity_source` says who names the active neurons: for records."""

    def __init__(self, directory: ModelDir, plan: Plan, config: RunConfig) -> None:
        super().__init__(directory, plan, config)
        self.activity_source = "predictors"
        self._trace: Trace | None = None
        if plan.mode != "sparse" or TRACE not in directory.manifest.files:
            return
        self._trace = Trace(directory.path / TRACE)
        self._trace.check_model(directory.architecture)
        self._window = plan.memory.window
        tokens = max(directory.manifest.sparse_prefill_tokens, self._window)
        self._activity = np.zeros((tokens, *self._trace.info.token_shape), np.uint8)
        for layer, ffn in enumerate(self.parts.native.ffns):
            if ffn is not None:
                ffn.set_trace(self._activity, layer)
        self.activity_source = f"synthetic weights, {self._trace.info.description}"
        self.notices.append(f"{self.activity_source}: times and bytes are real, the text is not")

    def step(self, entries: list[Entry], **options: Any) -> Logits:
        """As `Model.step`; of several sequences all are few tokens, or all are prompts."""
        if self._trace is not None:
            positions = [
                sequence.length + i + _APART * number
                for number, (sequence, ids) in enumerate(entries)
                for i in range(len(ids))
            ]
            if options.get("as_prompt") or any(self.is_prompt(len(ids)) for _, ids in entries):
                positions = positions[-self._window :]  # fill the caches
            for token, position in enumerate(positions[: len(self._activity)]):
                self._trace.read_into(position, self._activity[token])
        return super().step(entries, **options)

    def close(self) -> None:
        super().close()
        if self._trace is not None:
            self._trace.close()


class _Forgetful(TracedModel):
    """Its neuron caches are empty before every pass."""

    def step(self, entries: list[Entry], **options: Any) -> Logits:
        logits = super().step(entries, **options)
        for ffn in self.parts.ffns:
            ffn.forget()
        return logits


def open_without(parts: Collection[str], directory: Path, config: RunConfig) -> TracedModel:
    """A model that does without some of PARTS: one a process, as later ones do, too."""
    assert set(parts) <= set(PARTS), f"the parts are {', '.join(PARTS)}, not {parts}"
    rows = ModelDir.open(directory).manifest.rows
    if "prefetch" in parts:
        resolve._names_the_next_layer = lambda mode, model: False
    if "bundled" in parts or "merged" in parts:
        most = rows.vector_nbytes("up") if "bundled" in parts else rows.stride
        build.open_reader = partial(_open_reader, max(most, PAGE_NBYTES))
    model = (_Forgetful if "cached" in parts else TracedModel).open(directory, config)
    for ffn in model.parts.ffns:
        if "bundled" in parts:
            ffn.read_unchecked()
        if "overlap" in parts:
            ffn.wait_first()
    return model


def _open_reader(most: int, choice: ReaderChoice, *, max_request: int) -> _core.Reader:
    return open_reader(choice, max_request=min(most, max_request))


def expected_activity(model: ModelDir, plan: Plan) -> ExpectedActivity:
    """What `flashllm plan` expects of a token: by the trace, where the model has one."""
    if not (model.path / TRACE).exists():
        return _of_shares(model, plan)
    with Trace(model.path / TRACE) as trace:
        trace.check_model(model.architecture)
        return from_trace(trace, plan.memory, plan.popularity, plan.reader.max_gap)


def main(argv: list[str] | None = None) -> int:
    engine.Model = TracedModel  # type: ignore[misc]  # what is imported from here on takes it
    plan_command.expected_activity = expected_activity
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [_ENGINE]:
        import protocol_engine

        return protocol_engine.main(words[1:])
    if words[:1] == ["protocol"]:
        import protocol

        protocol.ENGINE = (sys.executable, __file__, _ENGINE)
        return protocol.main(words[1:])
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
