"""Simulated acceptance: how many drafted tokens a step keeps is drawn, not decided by the target.

For measuring speed where no draft (or no target) has been trained: a step drafts, verifies and commits as
ever, and in the end the length of the accepted path is taken from the request's random stream. The text
means nothing, so nothing that was decoded so may be called lossless. Engines have the like
(`rejection_sample_method: synthetic` in vLLM, `SGLANG_SIMULATE_ACC_LEN`,
`TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`).

Arithmetic. With every depth accepted with probability a, independently, given the one above, a path of g
drafted tokens commits E[tau] = 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a) tokens (Leviathan et al., arXiv
2211.17192, equation 1). E[tau] grows from 1 (a = 0) to g + 1 (a = 1), so each tau in that range has one a.
The path is the first of the tree's longest ones; a is solved for its own depth, so a step near the end of a
text, or a tree that grew shallow, keeps the expectation while it can, and accepts all it has where tau is
out of its reach. The numbers of one request are spread evenly (a seeded start, then steps of the
golden ratio), so that the mean of a short run is near tau as well.

Owns the draw and its arithmetic; does not know where it is asked for (`EngineConfig.simulate_acceptance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from specdec.random_streams import Purpose, RandomStream
from specdec.tree import DraftTree, path_to
from specdec.verification.result import VerifyResult

# halvings of [0, 1]: beyond these a double does not change
_HALVINGS = 60
# steps of this size spread evenly over a circle, however many there are
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def expected_length(rate: float, depth: int) -> float:
    """Expected tokens of a step over a path of `depth` drafted tokens, each accepted at `rate`."""
    return sum(rate**power for power in range(depth + 1))


@lru_cache(maxsize=4096)
def acceptance_rate_for(length: float, depth: int) -> float:
    """The rate at which `expected_length` is `length`; 1 where the path is too short for it."""
    if length >= depth + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, depth) < length else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Draws accepted lengths with an expectation of `length` committed tokens a step."""

    length: float

    @property
    def label(self) -> str:
        """What stands in the place of a rule's name."""
        return f"simulated acceptance of {self.length:g}"

    def replaced(
        self, tree: DraftTree, result: VerifyResult, stream: RandomStream, step: int
    ) -> VerifyResult:
        """The result of a step with its accepted path drawn; its next token stays.

        Args:
            tree: what was verified.
            result: what the rule said.
            stream: the request's random numbers.
            step: verify steps of the request before this one.
        """
        depth = tree.max_depth
        if depth == 0:
            return result
        rate = acceptance_rate_for(self.length, depth)
        # in [0, 1): rate 1 takes every depth, rate 0 none; d or more of them are taken with rate ** d
        coin = (stream.uniform(0, Purpose.SIMULATED)[0] + step * _GOLDEN_RATIO) % 1.0
        accepted = sum(coin < rate**reached for reached in range(1, depth + 1))
        path = path_to(tree.parents, tree.depths.index(depth))[1:]
        return VerifyResult(
            accepted_nodes=path[:accepted],
            next_token_id=result.next_token_id,
            next_kind="bonus" if accepted == depth else "recovered",
        )
