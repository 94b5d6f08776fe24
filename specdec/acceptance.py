"""The verify-and-commit half of a step: what each sequence's tree commits, and writing it down.

Each request's own rule decides (`specdec.rule_choice`). A request whose parameters change the logits has each
node's row processed with that node's own path as history, when the rule asks for it; greedy requests without
such parameters share one argmax over all rows of the step.
"""

from __future__ import annotations

from torch import Tensor

from specdec.errors import BadLogitsError
from specdec.logprobs import token_logprobs
from specdec.processors import NodeLogits
from specdec.runner import StepOutput
from specdec.sampling import TARGET_FAULT, LazyChoices, LazyProbs, LogitRows, greedy_tokens
from specdec.scheduler import ScheduledSequence
from specdec.sequence import Sequence
from specdec.tree import DraftTree, chain_tree
from specdec.verification.greedy import GREEDY, verify_greedy
from specdec.verification.result import VerifyResult


def verify_step(
    plan: list[ScheduledSequence], trees: list[DraftTree], output: StepOutput
) -> list[VerifyResult | None]:
    """What each sequence commits; None for a chunk that stops short of the root, or a failed request.

    Logits no token can be chosen from (NaN, +inf, nothing but -inf) at a node the walk visits end
    their own sequence with an error, and no other.
    """
    argmax, bad = greedy_tokens(output.logits) if output.logits.shape[0] else ([], [])
    results: list[VerifyResult | None] = []
    for share, tree, start in zip(plan, trees, output.logits_start, strict=True):
        result = None
        if start >= 0:
            rows = slice(start, start + tree.num_nodes)
            try:
                result = _verify(share.seq, tree, argmax[rows], bad[rows], output.logits[rows])
            except BadLogitsError as error:
                share.seq.finish("error", str(error))
        results.append(result)
    return results


def _verify(
    seq: Sequence, tree: DraftTree, argmax: list[int], bad: list[bool], logits: Tensor
) -> VerifyResult:
    """Walk one tree.

    Where the walk meets a row no token can be chosen from, the root alone is verified: one token, as in plain
    decoding, which may end the text before that row.
    """
    try:
        return _walk(seq, tree, argmax, bad, logits)
    except BadLogitsError:
        if tree.num_drafted == 0:
            raise
        return _walk(seq, chain_tree(tree.token_ids[0], []), argmax, bad, logits)


def _walk(seq: Sequence, tree: DraftTree, argmax: list[int], bad: list[bool], logits: Tensor) -> VerifyResult:
    rows: LogitRows = logits
    if seq.processor is not None:
        rows = NodeLogits(logits, tree, seq.token_ids, seq.processor)
    if seq.rule.rule is GREEDY:
        choices = argmax if seq.processor is None else LazyChoices(rows, tree.num_nodes)
        result = verify_greedy(tree, choices)
    else:
        result = seq.rule.verify(tree, LazyProbs(rows, seq.params), seq.stream, len(seq.token_ids) - 1)
    if any(bad[node] for node in (0, *result.accepted_nodes)):
        raise BadLogitsError(TARGET_FAULT)
    return result


def commit_tokens(
    seq: Sequence, tree: DraftTree, result: VerifyResult, node_logits: Tensor, *, was_prefill: bool
) -> None:
    """Add a step's tokens to a sequence, up to the first that ends it.

    Args:
        seq: the sequence; its cached rows are counted already.
        tree: what was verified.
        result: what it commits.
        node_logits: the target's logits of the tree's nodes `[nodes, vocab]`.
        was_prefill: whether the step read prompt tokens; such a step is not a verify step.
    """
    tokens = [*tree.tokens_of(result.accepted_nodes), result.next_token_id]
    if seq.params.logprobs is not None:
        rows = node_logits[[0, *result.accepted_nodes]]
        logprobs = token_logprobs(rows, tokens, seq.params.logprobs)
    committed = 0
    for token in tokens:
        seq.token_ids.append(token)
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
        seq.controller.record(tree.num_drafted, committed)
