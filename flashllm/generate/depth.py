"""How many tokens to draft for the next pass: as many as pay, by what passes took and drafts were worth so far.

A pass over n tokens that yields E of them is worth E passes over one. With a_j, the share of drafts whose j-th token
was right where those before it were, k drafted tokens yield E(k) = 1 + a_1 + a_1 a_2 + ... tokens (Leviathan et al.
2023, section 3.1, with a share for each place), and cost T(k + 1) and their drafting; the best k has the highest value
E(k) T(1) / cost. An account of what drafting lost so far keeps trials cheap whatever the estimates say. Plain
arithmetic; changes when tokens come, never which.
"""

from collections.abc import Sequence

_LEAST_GAIN = 1.02  # below, a draft is not worth its risk
_JUDGED = 16.0  # drafts that an average remembers
_PRIOR_DRAFTS = 2.0  # that what was expected of a place counts like
_TIMED = 8.0  # passes
_PRIOR_SLOPE = 0.5  # a further token's share of a pass, before one was measured
_PLAIN_EVERY = 64  # passes: a plain one is measured again
_PROBE_EVERY = 16  # drafts: one is deeper than the best, or is made although none pays
_LOSS_SHARE = 0.01  # of all time, that drafts may lose
_CREDIT_PASSES = 1.0  # plain ones, that drafts may lose before there is much time to share
_SAVED_PASSES = 4.0  # of what was gained, that may be lost again
_FIRST_PLAIN = 3  # passes measured before the first draft


class DepthGate:
    """Decides from measured times and judged drafts. Times are in seconds, of any clock."""

    def __init__(self, most: int, priors: Sequence[float]) -> None:
        """`priors`: for each kind of draft, the share of its tokens expected to be right before any was judged."""
        self.most = most
        self._priors = priors
        self._right = [[0.0] * most for _ in priors]  # by place, of those judged
        self._judged = [[0.0] * most for _ in priors]  # drafts an average stands for
        self._seconds: dict[int, float] = {}  # by tokens of a pass
        self._passes: dict[int, int] = {}
        self._drafting_s = 0.0  # a drafted token
        self._all_s, self._lost_s = 0.0, 0.0
        self._since_plain, self._offers = 0, 0

    def choose(self, kind: int, available: int) -> int:
        """How many of the `available` tokens of a draft of this kind to verify; 0: none."""
        available = min(available, self.most)
        if available < 1 or self._passes.get(1, 0) < _FIRST_PLAIN or self._since_plain >= _PLAIN_EVERY:
            return 0
        self._offers += 1
        probes = self._offers % _PROBE_EVERY == 0
        worth = [depth for depth in range(1, available + 1) if self.value(kind, depth) > _LEAST_GAIN]
        best = max(worth, key=lambda depth: self.value(kind, depth), default=0)
        if probes:
            best = min(best + 1, available)
        while best and not self._affordable(best):
            best -= 1
        return best if probes or best in worth else 0

    def value(self, kind: int, depth: int) -> float:
        """Tokens that a pass with `depth` drafted ones is expected to yield in the time of a plain one."""
        expected = chance = 1.0
        share = self._priors[kind]
        for right, judged in zip(self._right[kind][:depth], self._judged[kind], strict=False):
            # A place is expected to be as good as the one before, until drafts that came so far say otherwise.
            share = (_PRIOR_DRAFTS * share + judged * right) / (_PRIOR_DRAFTS + judged)
            chance *= share
            expected += chance
        return expected * self.seconds(1) / (self.seconds(depth + 1) + depth * self._drafting_s)

    def seconds(self, tokens: int) -> float:
        """A pass over so many tokens: measured, or along a line through what was."""
        if tokens in self._seconds:
            return self._seconds[tokens]
        return self.seconds(1) * (1.0 + (tokens - 1) * self._slope()) if 1 in self._seconds else 0.0

    def passed(self, tokens: int, seconds: float, drafting_s: float = 0.0) -> None:
        """A pass over so many tokens took `seconds`, after `drafting_s` of drafting all but one."""
        count = self._passes.get(tokens, 0) + 1
        self._passes[tokens] = count
        before = self._seconds.get(tokens, seconds)
        # A single pass that something else held up says little.
        counted = min(seconds, 3.0 * before) if count > 3 else seconds
        self._seconds[tokens] = before + (counted - before) / min(count, _TIMED)
        self._all_s += seconds + drafting_s
        self._since_plain = 0 if tokens == 1 else self._since_plain + 1
        if tokens > 1:
            each = drafting_s / (tokens - 1)
            self._drafting_s += (each - self._drafting_s) / _TIMED
            self._lost_s += seconds + drafting_s

    def judged(self, kind: int, accepted: int, rejected: bool) -> None:
        """Count the last draft: its first `accepted` tokens were right; with `rejected` the next one was wrong."""
        self._lost_s -= (accepted + 1) * self.seconds(1)
        self._lost_s = max(self._lost_s, -_SAVED_PASSES * self.seconds(1))
        for place in range(min(accepted + rejected, self.most)):
            count = min(self._judged[kind][place] + 1.0, _JUDGED)
            self._judged[kind][place] = count
            self._right[kind][place] += ((1.0 if place < accepted else 0.0) - self._right[kind][place]) / count

    def _affordable(self, depth: int) -> bool:
        """True where drafts may lose what this one does if all of it is wrong."""
        plain = self.seconds(1)
        worst = self.seconds(depth + 1) + depth * self._drafting_s - plain
        return self._lost_s + worst <= _LOSS_SHARE * self._all_s + _CREDIT_PASSES * plain

    def _slope(self) -> float:
        """A further token's share of a plain pass: least squares through the passes measured, and the prior."""
        products, squares = _PRIOR_SLOPE, 1.0
        for tokens, seconds in self._seconds.items():
            more = tokens - 1
            products += more * (seconds / self._seconds[1] - 1.0)
            squares += more * more
        return max(0.0, products / squares)
