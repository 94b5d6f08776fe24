"""A trained head moved to other boundaries of its target: all is kept but the fusion, which is fitted anew.

Owns the fit. Knows nothing of the loop or of files. The layer after the fusion knows what to do with the old
feature g = fc(taps), so the new fusion is the ridge regression of g on the new taps; training goes on from
there. What the new taps know and the old ones did not is left for training to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.errors import SpecdecError
from specdec.layer_select.ridge import ridge_solve
from specdec.train.sequences import TrainSequence
from specdec.train.states import TapSubset, TargetStates

# rows of the fit: ten for each input of a head with five taps and hidden 1,024
FIT_ROWS = 50_000
FIT_SEQUENCES = 16


@torch.no_grad()
def move_head(
    head: Eagle3Head,
    boundaries: tuple[int, ...],
    model: Any,
    target_lm_head: Tensor,
    sequences: Sequence[TrainSequence],
) -> tuple[Eagle3Head, float]:
    """A copy of `head` that reads `boundaries`.

    Args:
        head: the trained head.
        boundaries: its new taps, ascending; their number may differ.
        model: the Hugging Face target.
        target_lm_head: the target's output head [vocab, hidden].
        sequences: conversations whose states the fusion is fitted on.

    Returns:
        The head, and the share of the old feature's variance that the new taps explain on the fitted rows.
    """
    old = head.config.boundaries
    moved = Eagle3Head(
        replace(head.config, boundaries=boundaries), head.vocab, head.target_embed, target_lm_head
    ).to(head.fc.weight.dtype)
    kept = {
        name: tensor
        for name, tensor in head.state_dict().items()
        if not name.startswith(("fc", "input_norm"))
    }
    missing = set(moved.load_state_dict(kept, strict=False).missing_keys)
    assert all(name.startswith(("fc", "input_norm")) for name in missing), "only the fusion may be new"
    both = tuple(sorted({*old, *boundaries}))
    source = TargetStates(model, both)
    before, after = TapSubset(source, both, old), TapSubset(source, both, boundaries)
    width = moved.fc.in_features
    gram, cross = torch.zeros(width, width), torch.zeros(width, moved.fc.out_features)
    total, square, rows = torch.zeros(moved.fc.out_features), 0.0, 0
    for low in range(0, len(sequences), FIT_SEQUENCES):
        group = sequences[low : low + FIT_SEQUENCES]
        states = source.fetch(group)
        # the first position is a sink in many targets
        x = torch.cat([moved.tap_rows(after.view(item).taps[1:].float()) for item in states])
        y = torch.cat([head.fuse(before.view(item).taps[1:].float()) for item in states])
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
        total += y.sum(0)
        square += float(y.pow(2).sum())
        rows += len(x)
        if rows >= FIT_ROWS:
            break
    if rows < 2:
        raise SpecdecError(
            f"a head cannot be moved to boundaries {list(boundaries)} on {rows} tokens of data"
        )
    weights = ridge_solve(gram, cross)
    moved.fc.weight.copy_(weights.T)
    left = square - 2 * float((weights * cross).sum()) + float((weights * (gram @ weights)).sum())
    return moved, 1.0 - left / (square - float(total.pow(2).sum()) / rows)
