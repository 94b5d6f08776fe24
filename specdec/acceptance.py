"""The verify-and-commit half of a step: what each sequence's tree commits, and writing it down.

Each request's own rule decides (`specdec.rule_choice`). A request whose parameters change the logits has each
node's row processed with that node's own path as history, when the rule asks for it; greedy requests without
such parameters walk together, so that the output head multiplies only the rows they visit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.errors import BadLogitsError
from specdec.logprobs import token_logprobs
from specdec.processors import NodeLogits
from specdec.runner import StepOutput
from specdec.sampling import TARGET_FAULT, LazyChoices, LazyProbs, LogitRows
from specdec.scheduler import ScheduledSequence
from specdec.sequence import Sequence
from specdec.step_logits import StepLogits, TreeLogits
from specdec.tree import DraftTree
from specdec.verification.greedy import GREEDY, verify_greedy
from specdec.verification.result import TokenKind, VerifyResult

# of a prompt at once: logits of a long one would take gigabytes
PROMPT_ROWS = 64


def verify_step(
    plan: list[ScheduledSequence], trees: list[DraftTree], output: StepOutput
) -> list[VerifyResult | None]:
    """What each sequence commits; None for a chunk that stops short of the root, or a failed request.

    Logits no token can be chosen from (NaN, +inf, nothing but -inf) at a node the walk visits end
    their own sequence with an error, and no other.
    """
    logits = StepLogits.of(output.logits)
    logits.walk_greedily(
        [
            (start, tree)
            for share, tree, start in zip(plan, trees, output.logits_start, strict=True)
            if start >= 0 and share.seq.rule.rule is GREEDY and share.seq.processor is None
        ]
    )
    results: list[VerifyResult | None] = []
    for share, tree, start in zip(plan, trees, output.logits_start, strict=True):
        result = None
        if start >= 0:
            rows = TreeLogits(logits, start, tree)
            try:
                result = _verify(share.seq, tree, rows)
                if share.seq.simulated is not None:
                    step = share.seq.stats.verify_steps
                    result = share.seq.simulated.replaced(tree, result, share.seq.stream, step)
                    # a walk that accepted these nodes would have asked for their rows
                    logits.compute([start + node for node in result.accepted_nodes])
            except BadLogitsError as error:
                share.seq.finish("error", str(error))
        results.append(result)
    return results


Row = TypeVar("Row")
Row_co = TypeVar("Row_co", covariant=True)


class _Rows(Protocol[Row_co]):
    def __getitem__(self, node: int, /) -> Row_co: ...


class _StandIns(Generic[Row]):
    """Laws or choices by node, with a stand-in after nodes that leave no token to choose.

    A rule has to end its walk. What it accepts down to such a node has the target's law whatever law stands
    after it, so any will do; `faults` holds the nodes that were asked for and had none.
    """

    def __init__(self, rows: _Rows[Row], instead: Callable[[], Row]) -> None:
        self._rows = rows
        self._instead = instead
        self.faults: dict[int, BadLogitsError] = {}

    def __getitem__(self, node: int, /) -> Row:
        try:
            return self._rows[node]
        except BadLogitsError as error:
            self.faults.setdefault(node, error)
            return self._instead()


def _first_token_law(logits: Tensor) -> Tensor:
    law = logits.new_zeros(logits.shape[-1], dtype=torch.float64)
    law[0] = 1.0
    return law


def _verify(seq: Sequence, tree: DraftTree, logits: TreeLogits) -> VerifyResult:
    """Walk one tree.

    Where the accepted path meets a row no token can be chosen from, the step ends with the token before that
    row, as plain decoding would commit it; the next step finds the row at its root, unless the text ended.

    Raises:
        BadLogitsError: the root's row is such a row.
    """
    rows: LogitRows = logits
    if seq.processor is not None:
        rows = NodeLogits(logits, tree, seq.token_ids, seq.processor)
    faults: dict[int, BadLogitsError] = {}
    if seq.rule.rule is GREEDY and seq.processor is None:
        result = verify_greedy(tree, logits.choices)
    elif seq.rule.rule is GREEDY:
        choices = _StandIns(LazyChoices(rows, tree.num_nodes), int)
        result, faults = verify_greedy(tree, choices), choices.faults
    else:
        laws = _StandIns(LazyProbs(rows, seq.params), lambda: _first_token_law(logits[0]))
        result = seq.rule.verify(tree, laws, seq.stream, len(seq.token_ids) - 1)
        faults = laws.faults
    for depth, node in enumerate((0, *result.accepted_nodes)):
        if not logits.is_bad(node) and node not in faults:
            continue
        if node == 0:
            raise faults.get(0, BadLogitsError(TARGET_FAULT))
        return VerifyResult(
            accepted_nodes=result.accepted_nodes[: depth - 1],
            next_token_id=tree.token_ids[node],
            next_kind="recovered",
        )
    return result


def note_prompt(share: ScheduledSequence, output: StepOutput, row: int) -> None:
    """Add what a pass says of the prompt tokens behind its rows, where that is asked for.

    Args:
        share: its rows are not counted yet.
        output: of the pass.
        row: its first row in the batch.
    """
    seq, num_top = share.seq, share.seq.params.prompt_logprobs
    if num_top is None or not share.is_prefill:
        return
    assert output.row_logits is not None, "a pass over a prompt keeps the states of its rows"
    # a request that gave way reads its prompt again
    first = max(seq.num_computed, len(seq.prompt_logprobs)) + 1
    end = min(seq.num_computed + share.num_rows + 1, seq.prompt_len)
    for start in range(first, end, PROMPT_ROWS):
        places = range(start, min(start + PROMPT_ROWS, end))
        logits = output.row_logits([row + place - 1 - seq.num_computed for place in places])
        seq.prompt_logprobs += token_logprobs(logits, [seq.token_ids[place] for place in places], num_top)


def commit_tokens(
    seq: Sequence, tree: DraftTree, result: VerifyResult, logits: TreeLogits, *, was_prefill: bool
) -> None:
    """Add a step's tokens to a sequence, up to the first that ends it.

    Args:
        seq: the sequence; its cached rows are counted already.
        tree: what was verified.
        result: what it commits.
        logits: the target's, by node.
        was_prefill: whether the step read prompt tokens; such a step is not a verify step.
    """
    tokens = [*tree.tokens_of(result.accepted_nodes), result.next_token_id]
    if seq.params.logprobs is not None:
        rows = torch.stack([logits[node] for node in (0, *result.accepted_nodes)])
        logprobs = token_logprobs(rows, tokens, seq.params.logprobs)
    kinds: list[TokenKind] = ["accepted"] * len(result.accepted_nodes)
    kinds.append(result.next_kind if tree.num_drafted else "plain")
    committed = 0
    for token in tokens:
        seq.token_ids.append(token)
        seq.token_kinds.append(kinds[committed])
        if seq.params.logprobs is not None:
            seq.logprobs.append(logprobs[committed])
        committed += 1
        # a stop wins over the length limit when both fall on the same token
        if seq.detokenizer.push(token) or token in seq.stop_ids:
            seq.finish("stop")
            break
        if seq.remaining_tokens() <= 0:
            seq.finish("length")
            break
    if seq.is_finished:
        seq.detokenizer.flush()
    if not was_prefill:
        seq.stats.record_step(tree.drafted_per_depth, tree.num_drafted, len(result.accepted_nodes), committed)
        seq.controller.record(tree.drafted_per_depth, len(result.accepted_nodes))
