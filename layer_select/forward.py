"""Forward passes over calibration texts: which texts share one, and what of their states is kept.

Owns grouping and padding. Does not know what is estimated from the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, input_device, run_decoder
from specdec.layer_select.config import MIN_ROWS
from specdec.layer_select.texts import CalibrationText

# texts share one padded forward while the shortest has this part of the longest's length.
MIN_LENGTH_RATIO = 0.75
# domains with less than half a batch are measured together under this name.
MIXED_DOMAIN = "mixed"


def calibration_batches(
    texts: Sequence[CalibrationText], batch_tokens: int
) -> list[tuple[str, list[CalibrationText]]]:
    """Texts in batches of about `batch_tokens` measured positions, each of one domain, none much smaller."""
    if sum(text.num_kept for text in texts) < MIN_ROWS or any(text.num_kept < 1 for text in texts):
        raise SpecdecError(
            f"calibration needs at least {MIN_ROWS} measured tokens; give more or longer texts"
        )
    by_domain: dict[str, list[CalibrationText]] = {}
    for text in texts:
        by_domain.setdefault(text.domain, []).append(text)
    small = [
        domain
        for domain, group in by_domain.items()
        if sum(text.num_kept for text in group) < batch_tokens / 2
    ]
    if len(by_domain) > 1 and small:
        together = [text for domain in small for text in by_domain.pop(domain)]
        by_domain[MIXED_DOMAIN if len(small) > 1 else small[0]] = together
    batches = [
        (domain, batch) for domain, group in by_domain.items() for batch in _batches(group, batch_tokens)
    ]
    # too few rows for HSIC_1: such a domain can only be measured with another.
    if len(batches) > 1 and sum(text.num_kept for text in batches[-1][1]) < MIN_ROWS:
        _, tail = batches.pop()
        batches[-1] = (MIXED_DOMAIN, batches[-1][1] + tail)
    return batches


def _batches(texts: Sequence[CalibrationText], batch_tokens: int) -> list[list[CalibrationText]]:
    """Consecutive texts in groups of about `batch_tokens` measured positions."""
    groups: list[list[CalibrationText]] = [[]]
    size = 0
    for text in texts:
        if groups[-1] and size + text.num_kept > batch_tokens:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += text.num_kept
    # a small last group would be a resampling unit, and a CKA minibatch, unlike the others.
    if len(groups) > 1 and size < batch_tokens / 2:
        tail = groups.pop()
        groups[-1].extend(tail)
    return groups


def kept_states(model: Any, tap: BoundaryTap, texts: Sequence[CalibrationText]) -> list[Tensor]:
    """Measured states of each text, `[boundaries, kept, hidden]`, at least fp32, on one device."""
    kept: dict[int, Tensor] = {}
    device = input_device(model)
    for group in _similar_lengths(texts):
        longest = max(len(texts[index].token_ids) for index in group)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(group):
            length = len(texts[index].token_ids)
            ids[row, :length] = torch.tensor(texts[index].token_ids)
            mask[row, :length] = 1
        run_decoder(model, ids.to(device), mask.to(device) if len(group) > 1 else None)
        for row, index in enumerate(group):
            kept_slice = slice(texts[index].first_kept, len(texts[index].token_ids))
            per_boundary = [tap.states[b][row, kept_slice].to(device) for b in tap.boundaries]
            stacked = torch.stack(per_boundary)
            kept[index] = stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked
    return [kept[index] for index in range(len(texts))]


def _similar_lengths(texts: Sequence[CalibrationText]) -> Iterator[list[int]]:
    """Indices of texts, longest first, in groups of similar length: padding is wasted work."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index].token_ids))
    group: list[int] = []
    for index in order:
        length = len(texts[index].token_ids)
        if group and length < MIN_LENGTH_RATIO * len(texts[group[0]].token_ids):
            yield group
            group = []
        group.append(index)
    yield group
