"""Places of the sequences of one run: in which batch, on which tier, and in which slots their pages. No tensors.

A page is PAGE_TOKENS positions of a sequence in a layer. It is open (plain) while it fills; a full one is sealed:
packed where the cache is compressed, and moved to its tier. A sequence whose cache stays plain and in memory keeps all
its pages open, so nothing of it ever moves. The open page of any other sequence, its tail, stays in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flashllm._core import PAGE_TOKENS
from flashllm.offload.policy import Policy


def pages_of(positions: int) -> int:
    """Pages that `positions` cached positions take, the last perhaps not full."""
    return -(-positions // PAGE_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One sequence. Slots count within a layer's share of the thing they are in; a sequence's slots are consecutive."""

    tier: str  # of its cache: "g" device, "c" CPU, "d" disk
    hidden_tier: str  # of its activations
    prompt: int  # tokens
    positions: int  # cached at most
    moves: bool  # full pages are sealed and leave the open ones
    open_slot: int  # of all its pages, or of its tail
    sealed_slot: int  # on disk: in the file; else in the memory of sealed pages
    staged_slot: int  # on disk: in the buffer that loads fill
    prompt_slot: int  # where it moves: in the buffer that a prompt's pages are written to

    @property
    def on_disk(self) -> bool:
        return self.tier == "d"

    @property
    def sealed_pages(self) -> int:
        return self.positions // PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """All sequences of a run, and how many slots they need. Slots of open, sealed and disk are of one layer."""

    batches: tuple[tuple[Place, ...], ...]
    open_slots: int
    sealed_slots: int
    disk_slots: int
    staged_slots: int  # of a buffer: the largest batch's
    prompt_slots: int  # likewise


def tiers(count: int, device: float, cpu: float) -> list[str]:
    """The tier of each of `count` sequences: the first on the device, the last on disk, rounded to whole ones."""
    on_device, in_memory = round(device * count), round((device + cpu) * count)
    return ["g"] * on_device + ["c"] * (in_memory - on_device) + ["d"] * (count - in_memory)


def arrange(sequences: Sequence[tuple[int, int]], policy: Policy, *, tiers_of: str = "gcd") -> Arrangement:
    """Batches of `policy.gpu_batch` of the `sequences`, (prompt tokens, cached positions at most) each, in order.

    Only those whose cache is on one of `tiers_of` are there; a batch may then be empty.
    """
    batches: list[tuple[Place, ...]] = []
    open_slots = sealed_slots = disk_slots = most_staged = most_prompt = 0
    for first in range(0, len(sequences), policy.gpu_batch):
        batch = sequences[first : first + policy.gpu_batch]
        cache, hidden = tiers(len(batch), policy.cg, policy.cc), tiers(len(batch), policy.hg, policy.hc)
        places: list[Place] = []
        staged = prompts = 0
        for (prompt, positions), tier, hidden_tier in zip(batch, cache, hidden, strict=True):
            if tier not in tiers_of:
                continue
            moves = policy.compress_cache or tier == "d"
            place = Place(
                tier=tier,
                hidden_tier=hidden_tier,
                prompt=prompt,
                positions=positions,
                moves=moves,
                open_slot=open_slots,
                sealed_slot=disk_slots if tier == "d" else sealed_slots,
                staged_slot=staged,
                prompt_slot=prompts,
            )
            places.append(place)
            open_slots += 1 if moves else pages_of(positions)
            if moves:
                prompts += pages_of(prompt)
            if tier == "d":
                disk_slots += place.sealed_pages
                staged += place.sealed_pages
            elif moves:
                sealed_slots += place.sealed_pages
        batches.append(tuple(places))
        most_staged, most_prompt = max(most_staged, staged), max(most_prompt, prompts)
    return Arrangement(
        batches=tuple(batches),
        open_slots=open_slots,
        sealed_slots=sealed_slots,
        disk_slots=disk_slots,
        staged_slots=most_staged,
        prompt_slots=most_prompt,
    )
