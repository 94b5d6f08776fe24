"""From a target's logits to those a request's token is chosen from, at any place of its text.

Owns the order, which is vLLM's: grammar mask, allowed ids, bad words, min_tokens, logit bias, the request's
own processors, then repetition, frequency and presence penalties. Temperature and filters come behind
(`specdec.sampling`). Every step is a function of the text before the place: the committed tokens and the
drafted ones on the way to it. A token is therefore chosen from the same logits whether it was drafted or
not, and greedy text, and with coupled draws sampled text, is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.constraints import TokenConstraints
from specdec.errors import BadLogitsError
from specdec.grammar import GrammarLimitError, GrammarState
from specdec.penalties import TokenCounts, has_penalties, penalise
from specdec.sampling import TARGET_FAULT, LogitRows
from specdec.sampling_params import LogitsProcessor, SamplingParams
from specdec.tree import DraftTree, path_to


class RequestProcessor:
    """Everything between the target's logits and a request's law, temperature and filters excepted.

    Args:
        params: the request's.
        prompt_len: tokens of its text that are prompt.
        stop_ids: ids that end it.
        bad_words: token sequences, texts already encoded.
        grammar: where its answer stands, None without a grammar.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_len: int,
        stop_ids: frozenset[int],
        bad_words: Iterable[tuple[int, ...]] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self._params = params
        self._prompt_len = prompt_len
        self._stop_ids = stop_ids
        self._constraints = TokenConstraints(params, bad_words, stop_ids)
        self._grammar = grammar
        self._counts: TokenCounts | None = None

    def process(self, logits: Tensor, token_ids: list[int], path: list[int]) -> Tensor:
        """Logits of the token that follows a drafted path.

        Behind an end token, and behind a path the grammar does not hold, nothing is ever written; the logits
        come back as they are.

        Args:
            logits: `[vocab]`, not written to.
            token_ids: committed tokens, prompt first.
            path: drafted tokens behind them.

        Returns:
            float32 `[vocab]`.

        Raises:
            BadLogitsError: nothing is left to choose from, or a processor of the request failed.
        """
        row = logits.float()
        if not bool(row.amax().isfinite()):
            raise BadLogitsError(TARGET_FAULT)
        if not self._stop_ids.isdisjoint(path):
            return row
        row = row.clone()
        if self._grammar is not None:
            try:
                allowed = self._grammar.allowed(token_ids, path)
            except GrammarLimitError as error:
                raise BadLogitsError(str(error)) from error
            if allowed is None:
                return row
            row.masked_fill_(~allowed.to(row.device), float("-inf"))
        num_output = len(token_ids) - self._prompt_len + len(path)
        tail = [*token_ids[max(self._prompt_len, len(token_ids) - self._constraints.context_len) :], *path]
        row = self._constraints.apply(row, tail, num_output)
        if self._params.logits_processors:
            # a processor may forbid more; what is forbidden before it stays so
            forbidden = row == float("-inf")
            for processor in self._params.logits_processors:
                row = _call(processor, [*token_ids, *path], row)
            row = row.masked_fill(forbidden, float("-inf"))
        if has_penalties(self._params):
            if self._counts is None:
                self._counts = TokenCounts(len(row), self._prompt_len, row.device)
            row = penalise(row, self._params, *self._counts.at(token_ids, path))
        if not bool(row.amax().isfinite()):
            raise BadLogitsError(
                f"no token can be chosen as output token {num_output + 1}: the request's own constraints or "
                "processors leave none"
            )
        return row


def _call(processor: LogitsProcessor, token_ids: list[int], row: Tensor) -> Tensor:
    """Call a user's processor; what it raises or returns wrongly is that request's end, and no other's."""
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        out = processor(token_ids, row)
    except Exception as error:
        raise BadLogitsError(f"logits processor ({name}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(out, Tensor) or out.shape != row.shape:
        what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BadLogitsError(f"logits processor ({name}) returned {what}; it must return [{len(row)}] logits")
    return out.to(device=row.device, dtype=torch.float32)


class NodeLogits:
    """Processed logits of a tree's nodes, each made when it is first asked for.

    Args:
        logits: the target's rows `[vocab]` by node.
        tree: whose nodes they are.
        token_ids: committed tokens; the last is the tree's root.
        processor: the request's.
    """

    def __init__(
        self, logits: LogitRows, tree: DraftTree, token_ids: list[int], processor: RequestProcessor
    ) -> None:
        self._logits = logits
        self._tree = tree
        self._token_ids = token_ids
        self._processor = processor
        self._made: dict[int, Tensor] = {}

    def __getitem__(self, node: int) -> Tensor:
        """Logits after `node`, float32 `[vocab]`.

        Raises:
            BadLogitsError: as `RequestProcessor.process`.
        """
        if node not in self._made:
            path = self._tree.tokens_of(path_to(self._tree.parents, node)[1:])
            self._made[node] = self._processor.process(self._logits[node], self._token_ids, path)
        return self._made[node]
