"""`Model`: a loaded model, and the one call that runs tokens through it.

A pass takes the new tokens of several sequences. Sequences with at most K0 new tokens each (the manifest's
`sparse_prefill_tokens`) compute the neurons that the mode names; longer prompts compute all of them, in products of
many tokens (design contract 2). With `RunConfig.prompts` "sparse" there is no K0: prompts are computed as the mode
computes single tokens. What a sequence gets never depends on what else is in the pass.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, Unpack

from flashllm import _core
from flashllm.base.files import Closing
from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.base.processes import OneProcess, beside_nbytes
from flashllm.config import MOST_TOGETHER, RunConfig
from flashllm.engine.build import Parts, build
from flashllm.engine.group_limit import FreeMemory, GroupLimit
from flashllm.engine.meter import Meter
from flashllm.engine.passes import Entry, Ids, Logits, Observer, Pass, StepOptions
from flashllm.engine.state import SequenceState, StateMemory
from flashllm.errors import UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.plan.memory import TORCH_GROWTH, state_shape
from flashllm.plan.resolve import Plan, resolve


class Model(OneProcess, Closing):
    """A model in memory, as far as it fits; a context manager. One thread at a time computes, others wait.

    A forked child cannot use it: every call but `close`, which does nothing there, raises UsageError.
    """

    def __init__(self, directory: ModelDir, plan: Plan, config: RunConfig) -> None:
        """Load `directory` as `plan` says. Raises FlashIOError, FormatError, ChecksumError."""
        super().__init__()
        self.directory, self.plan, self.config = directory, plan, config
        self.meter = Meter()
        self._parts: Parts | None = build(directory, plan, config, self.meter.native)
        self.notices = self._parts.notices
        self.reader, self.direct_io = self._parts.reader, self._parts.file.direct
        shape = state_shape(directory.manifest, directory.block, plan.memory.context, config.cache_bits)
        self._memory = StateMemory(plan.memory, self._parts.caches, _core.StatePool(shape))
        self._memory_limit = self._asked_limit = plan.memory.limit_nbytes
        self._group = GroupLimit()
        self._free = FreeMemory() if config.follows else None
        self._progress: Callable[[int, int], None] | None = None
        self._drafting: SequenceState | None = None  # whose drafted tokens are neither accepted nor rejected

    @classmethod
    def open(cls, path: Path, config: RunConfig | None = None, *, process: int | None = None) -> Self:
        """Load the model directory `path`. `process`: bytes that the rest of the process will hold; None: holds now.

        Raises UsageError, BudgetError, FormatError, ChecksumError, FlashIOError, UnsupportedModelError: each says what
        to do.
        """
        config = config if config is not None else RunConfig()
        directory = ModelDir.open(path)
        now = process_nbytes() + (TORCH_GROWTH if "torch" in sys.modules else 0)
        process = max(process or 0, now) + beside_nbytes()
        plan = resolve(config, directory, available=max(0, available_nbytes() - (process - now)), process=process)
        return cls(directory, plan, config)

    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        return self.plan.memory.context

    @property
    def manifest(self) -> Manifest:
        return self.directory.manifest

    def is_prompt(self, tokens: int) -> bool:
        """True where so many new tokens of a sequence are computed as a prompt's: where they are more than K0."""
        return tokens > self._few_tokens

    @property
    def _few_tokens(self) -> int:
        """K0."""
        return sys.maxsize if self.config.prompts == "sparse" else self.manifest.sparse_prefill_tokens

    @property
    def memory_limit(self) -> int:
        """Bytes that the process keeps to: the plan's limit, or what `keep_to` said since."""
        return self._memory_limit

    def keep_to(self, limit_nbytes: int) -> None:
        """Lower the memory limit, or raise it again up to the plan's: the neuron caches give memory back, or get it. A
        pass under way is finished first. BudgetError where so little cannot hold the model and its sequences; nothing
        has changed then. A control group's limit that falls does the same at the next pass, and raises the same."""
        self.check_process()
        with self._memory.lock:
            asked = min(limit_nbytes, self.plan.memory.limit_nbytes)
            self._set_limit(min(asked, self._group.lowered() or asked))
            self._asked_limit = asked

    def _set_limit(self, nbytes: int) -> None:
        if nbytes != self._memory_limit:
            self._memory.keep_to(nbytes)
            self._memory_limit = nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes that all sequences hold; what they share counts once."""
        return self._memory.pool.nbytes

    @property
    def arithmetic(self) -> str:
        """Choices that decide bits, with the model and the tokens: the mode, whether prompts are computed as it does,
        the bits of keys and values."""
        prompts = ", prompts too" if self.config.prompts == "sparse" else ""
        cache = f", cache in {self.config.cache_bits} bits" if self.config.cache_bits else ""
        return self.plan.mode + prompts + cache

    @property
    def most_drafted(self) -> int:
        """Guessed tokens that a pass may verify: with the certain one before them they are few. None where layers keep
        a state: that of the tokens before a wrong guess would be gone."""
        if self.directory.block.recurrent:
            return 0
        return max(0, min(self._few_tokens, MOST_TOGETHER, self.plan.memory.prompt_tokens) - 1)

    @property
    def vocab_size(self) -> int:
        """Ids are smaller than this."""
        return self.directory.block.vocab_size

    @property
    def parts(self) -> Parts:
        """The parts of the model: for measurements and for predictors' training. UsageError once it is closed."""
        self.check_process()
        if self._parts is None:
            raise UsageError("the model is closed; load it again")
        return self._parts

    def new_sequence(self) -> SequenceState:
        """An empty sequence. Its memory is taken as its tokens come."""
        self._memory.check_open()
        return SequenceState(self._memory)

    def step(self, entries: Sequence[Entry], **options: Unpack[StepOptions]) -> Logits:
        """Run new tokens: each entry is a sequence and the ids that follow what it holds. Returns logits, fp32 [tokens
        wanted, vocab], of the entries one after the other: after each one's last token, or after every token with
        `all_logits`. Where it raises (Cancelled, ContextFull, FlashIOError, ChecksumError, FormatError, UsageError,
        KeyboardInterrupt), every sequence holds what it held before.

        With `as_prompt`, or an `observer`, every pass is a prompt's, however few its tokens: a prompt in pieces gets
        the bits of one (with sparse prompts it does anyway). The last `drafted` ids of a pass of one sequence are
        guesses, at most `most_drafted`: the neuron caches learn from them when `accept` says which were right.
        """
        self.check_process()  # before the lock, which another thread may hold for ever in a forked child
        with self._memory.lock, self.begin(entries, **options) as one:
            logits = one.advance()
        assert logits is not None
        return logits

    def begin(
        self,
        entries: Sequence[Entry],
        *,
        all_logits: bool = False,
        as_prompt: bool = False,
        observer: Observer | None = None,
        drafted: int = 0,
    ) -> Pass:
        """As `step`, of which nothing is computed yet: the pass goes on by its `advance`, and others may in between.

        Its memory is claimed. A long prompt reads each layer once, however often it waits; what others read by the same
        stream of rows in between (longer prompts, layers that every token reads) may cost it the few blocks that were
        on their way.
        """
        parts = self.parts
        if observer is not None and self.manifest.architecture.experts:
            raise UsageError(
                f"{self.directory.path}: what a mixture of experts computes cannot be observed: no predictors are "
                "trained for it and no traces recorded; its router names the neurons"
            )
        if drafted and (len(entries) != 1 or as_prompt or observer is not None or drafted > self.most_drafted):
            raise UsageError(f"drafted tokens are at most {self.most_drafted}, of a sequence that has the pass alone")
        entries = [(sequence, self._checked(ids)) for sequence, ids in entries]
        as_prompt = (as_prompt and self.config.prompts == "dense") or observer is not None
        many = [index for index, (_, ids) in enumerate(entries) if as_prompt or self.is_prompt(len(ids))]
        if len({sequence.number for sequence, _ in entries}) != len(entries):
            raise UsageError("a sequence is twice in a pass")
        few = sorted(set(range(len(entries))) - set(many))
        groups = [(kind, indices) for kind, indices in ((self.plan.mode, few), ("prompt", many)) if indices]
        with self._memory.lock:
            for sequence, _ in entries:
                sequence.check_free()
            asked = self._asked_limit
            if self._free is not None:  # no pass fails for it: what the pass needs stays
                asked = self._free.limit(self._memory_limit, asked)
                asked = max(asked, self._memory.least_limit([len(ids) for _, ids in entries]))
            self._set_limit(min(asked, self._group.lowered() or asked))
            prompts = [entries[index] for index in many]
            claimed, stretches = self._claim(entries, sum(len(ids) for _, ids in prompts))
            expanded, nbytes = self._claim_expanded(prompts, claimed)
            claimed += nbytes
            self._drafting = entries[0][0] if drafted else None

            def make(kind: str, mine: Sequence[Entry]) -> _core.Pass:
                return _core.Pass(
                    parts.native,
                    [(seq.native, ids) for seq, ids in mine],
                    kind,
                    all_logits,
                    observer,
                    drafted,
                    stretches,
                    self._progress if kind == "prompt" else None,
                    expanded,
                )

            return Pass(entries, groups, make, memory=self._memory, claimed=claimed, all_logits=all_logits)

    def accept(self, sequence: SequenceState, count: int) -> None:
        """Accept the first `count` of the tokens drafted in the last step, which was of `sequence`. After another step
        it is too late, and nothing happens. The caller cuts the sequence."""
        with self._memory.lock:
            if self._drafting is sequence and self._parts is not None:
                self._drafting = None
                self._parts.native.accept(count)

    def _claim(self, entries: Sequence[Entry], tokens: int) -> tuple[int, int]:
        """Claim the memory of a pass, of whose new tokens so many are prompts': its bytes, and in how many stretches
        those go: in as few as the neuron caches can lend memory for. Each stretch reads what is not in memory once, and
        multiplies an expert with all of its tokens."""
        plan = self.plan.memory
        parts = -(-tokens // plan.prompt_tokens)
        added = sum(sequence.nbytes_to_add(len(ids)) for sequence, ids in entries)
        reads = parts > 1 and self.reads_prompts
        stretches = 1 if reads or self.manifest.architecture.experts else parts
        alone = self._memory.passes == 0
        while stretches < parts:
            stretch = plan.longest_stretch(tokens, stretches)
            of_stretch = sum(sequence.nbytes_to_add(len(ids), stretch) for sequence, ids in entries)
            lent = plan.lent_nbytes(stretch, alone=alone) + of_stretch - added
            if self._memory.can_lend(lent, added, rows=reads):
                self._memory.claim(added + lent)
                return added + lent, stretches
            stretches *= 2
        if parts:
            added += plan.lent_nbytes(min(tokens, plan.prompt_tokens), alone=alone)
        self._memory.claim(added)
        return added, parts

    def _claim_expanded(self, prompts: Sequence[Entry], claimed: int) -> tuple[int, int]:
        """Heads of latent attention whose keys and values of all positions a pass holds at once, so that they are made
        once a stretch: all, or as many as the neuron caches can lend memory for; and its bytes, claimed with the
        `claimed` ones."""
        plan = self.plan.memory
        lengths = [sequence.length + len(ids) for sequence, ids in prompts if sequence.prompted == sequence.length]
        heads, alone = plan.expanded_heads, self._memory.passes == 0
        if not heads or not lengths:
            return 0, 0
        while heads > 1:
            nbytes = plan.expansion_nbytes(max(lengths), heads)
            if self._memory.can_lend(nbytes, claimed, rows=True):
                self._memory.claim(claimed + nbytes)
                return heads, nbytes
            heads //= 2
        nbytes = 0 if alone else plan.expansion_nbytes(max(lengths), 1)
        self._memory.claim(claimed + nbytes)
        return 1, nbytes

    @property
    def reads_prompts(self) -> bool:
        """False where every row that a prompt reads stays in memory: its parts read nothing twice."""
        if self.parts.ffns and (not self.manifest.architecture.experts or self.plan.memory.cache_policy == "window"):
            return True
        held = sum(cache.capacity for cache in self.parts.caches)
        return held < sum(layout.num_rows for layout in self.manifest.layouts)

    def _checked(self, ids: Ids) -> list[int]:
        ids = [int(token) for token in ids]
        if not ids:
            raise UsageError("every sequence of a pass needs a new token")
        foreign = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if foreign is not None:
            raise UsageError(f"token id {foreign} is not in the model's vocabulary of {self.vocab_size}")
        return ids

    def watch(self, progress: Callable[[int, int], None] | None) -> None:
        """From now on `progress(done, total)` is called a few times a second while prompts are computed, by the thread
        that does: parts of a pass that have left a layer, and how many are to, over all layers. None: nobody is."""
        self._progress = progress

    def cancel(self, on: bool = True) -> None:
        """From any thread: a long pass under way raises Cancelled between two layers, and later ones do.
        `cancel(False)` takes it back. Passes of few tokens are not looked at: they are short."""
        if self._parts is not None and not self.in_child:
            self._parts.native.cancel(on)

    def close(self) -> None:
        """Wait for reads under way and release threads, files and memory. The model cannot be used afterwards."""
        if self.in_child:
            return
        with self._memory.lock:
            parts, self._parts = self._parts, None
            if parts is None:
                return
            self._memory.close()
            parts.native.interrupt()
