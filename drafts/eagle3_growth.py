"""Growing an EAGLE-3 head's trees on the device, true rows first, without a word from the host.

Owns the rows of one proposal in a size class: R true rows of every sequence, then W rows a level behind the
committed ones, row d * top_k + w of the scratch for node w of level d. Growth itself is `grow_level`'s.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafts.eagle3_layer import DeviceLayer
from specdec.drafts.vocab import DraftVocab
from specdec.kernels import kernel
from specdec.kernels.device_batch import WORD_BITS, DeviceBatch
from specdec.kernels.step_records import StepClass, StepInputs, row_starts, slots_of
from specdec.kernels.tree_records import (
    GrowingTrees,
    GrownTrees,
    GrowthRaces,
    growth_capacity,
    start_trees,
)
from specdec.random_streams import Purpose


class DeviceGrowth:
    """Proposes for every sequence of a size class at once.

    Args:
        layer: the head.
        vocab: tokens the head can say.
        block_size: rows of a block.
    """

    def __init__(self, layer: DeviceLayer, vocab: DraftVocab, block_size: int) -> None:
        self._layer = layer
        self._block_size = block_size
        self._vocab_size = vocab.vocab_size
        self._vocab_ids = vocab.ids.to(layer.cache.data.device)
        backend = layer.ops.backend
        self._grow_level = kernel("grow_level", backend)
        self._prune_trees = kernel("prune_trees", backend)
        self._row_laws = kernel("row_laws", backend)
        self._row_probs = kernel("row_probs", backend)
        self._uniforms = kernel("uniforms", backend)

    def __call__(self, size: StepClass, inputs: StepInputs) -> GrownTrees:
        """The trees of a step."""
        fed_back, output = self._true_rows(size, inputs)
        trees = start_trees(
            inputs.root_token_ids, capacity=growth_capacity(size.width, size.depth), width=size.width
        )
        words = -(-size.width * max(1, size.depth - 1) // WORD_BITS)
        seen = inputs.seeds.new_zeros(size.sequences, 1, words)
        draft_probs: list[Tensor] = []
        rows = 1
        for depth in range(size.depth):
            logits = self._layer.logits(output).view(size.sequences, rows, -1)
            if size.block:
                logits, law = self._drawn(inputs, trees, logits, depth)
                draft_probs.append(law)
            trees, parent_rows = self._grow_level(
                trees,
                logits,
                inputs.limits,
                depth=depth,
                vocab_ids=self._vocab_ids,
                vocab=self._vocab_size,
                races=self._races(size, inputs, logits),
            )
            if depth + 1 == size.depth:
                break
            parent = parent_rows.long()
            own, bits = self._own_bits(size, inputs, trees, depth, words)
            seen = seen.gather(1, parent.unsqueeze(-1).expand(-1, -1, words)) | bits
            first = torch.arange(0, size.sequences * rows, rows, device=parent.device).unsqueeze(1)
            fed_back, output = self._frontier_rows(
                size, inputs, trees, depth, own, seen, fed_back[(first + parent).flatten()]
            )
            rows = size.width
        grown: GrownTrees = self._prune_trees(trees, inputs.limits, rows=size.nodes)
        if not draft_probs:
            return grown
        # node d of a chain stands at depth d
        shape = (size.sequences, size.nodes, self._vocab_size)
        wide = draft_probs[0].new_zeros(shape)
        wide[:, : size.depth, self._vocab_ids] = torch.stack(draft_probs, dim=1)
        return replace(grown, draft_probs=wide)

    def _drawn(
        self, inputs: StepInputs, trees: GrowingTrees, logits: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Draw the next node of every chain that is drawn, as `growth.DrawnGrowth` does.

        Returns:
            The logits, in these chains sure of the token that came out, and the law it was drawn from,
            float64 [B, draft vocab]; zeros for other trees, and where no token can be drawn.
        """
        laws = self._row_laws(logits[:, 0], inputs.params)
        has_law = inputs.is_block & ~laws.bad & (trees.frontier[:, 0] >= 0)
        probs = self._row_probs(logits[:, 0], laws).masked_fill(~has_law.unsqueeze(1), 0.0)
        node = torch.full_like(inputs.context_len, depth)
        coin = self._uniforms(inputs.seeds, inputs.context_len, node, purpose=int(Purpose.DRAFT), count=1)
        reached = probs.cumsum(-1)
        # the last entry becomes exactly 1, above every coin
        chosen = torch.searchsorted(reached / reached[:, -1:], coin, right=True)
        chosen = chosen.clamp(max=probs.shape[1] - 1)
        sure = torch.full_like(logits[:, 0], -torch.inf)
        sure.scatter_(1, chosen, torch.where(has_law, 0.0, -torch.inf).to(sure.dtype).unsqueeze(1))
        first = torch.where(inputs.is_block.unsqueeze(1), sure, logits[:, 0])
        return torch.cat((first.unsqueeze(1), logits[:, 1:]), dim=1), probs

    def _races(self, size: StepClass, inputs: StepInputs, logits: Tensor) -> GrowthRaces | None:
        if not size.coupled:
            return None
        rows = logits.shape[1]
        of_row = torch.arange(size.sequences, device=logits.device).repeat_interleave(
            rows, output_size=size.sequences * rows
        )
        return GrowthRaces(
            laws=self._row_laws(logits.flatten(0, 1), inputs.params.at(of_row)),
            seeds=inputs.seeds,
            roots=inputs.context_len,
            is_coupled=inputs.is_coupled,
        )

    def _true_rows(self, size: StepClass, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Make the rows whose true states are new; what the layer returns of each sequence's last one."""
        assert inputs.states is not None, "a growing step has the states of its true rows"
        rows = size.depth + 1
        row = torch.arange(rows, dtype=torch.int32, device=inputs.seeds.device)
        is_new = row < inputs.draft_new.unsqueeze(1)
        place = inputs.draft_context.unsqueeze(1) + row
        batch = DeviceBatch(
            query_start=row_starts(size.sequences, rows, row.device),
            context_len=inputs.draft_context,
            block_tables=inputs.block_tables,
            mask_words=inputs.seeds.new_zeros(size.sequences * rows, 1),
            positions=place.masked_fill(~is_new, 0).flatten(),
            slots=slots_of(inputs.block_tables, place, is_new, self._block_size).flatten(),
            block_size=self._block_size,
            chain=torch.ones_like(inputs.active),
            max_queries=rows,
        )
        features = self._layer.fuse(inputs.states.flatten(0, 1))
        fed_back, output = self._layer(features, inputs.draft_token_ids.flatten(), batch)
        last = batch.query_start[:-1].long() + (inputs.draft_new.long() - 1).clamp(min=0)
        return fed_back[last], output[last]

    def _own_bits(
        self, size: StepClass, inputs: StepInputs, trees: GrowingTrees, depth: int, words: int
    ) -> tuple[Tensor, Tensor]:
        """Scratch row of every frontier node [B, W], and its bit [B, W, words]; no bit without a node."""
        place = torch.arange(size.width, dtype=torch.int32, device=trees.frontier.device)
        own = depth * inputs.limits.top_k.unsqueeze(1) + place
        word = torch.arange(words, device=own.device)
        here = (own.unsqueeze(-1) // WORD_BITS == word) & (trees.frontier >= 0).unsqueeze(-1)
        bit = torch.ones_like(own, dtype=torch.int64) << (own % WORD_BITS).long()
        return own, bit.unsqueeze(-1).expand_as(here).masked_fill(~here, 0)

    def _frontier_rows(
        self,
        size: StepClass,
        inputs: StepInputs,
        trees: GrowingTrees,
        depth: int,
        own: Tensor,
        seen: Tensor,
        features: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on every frontier node, `features` [B * W, hidden] fed back by their parents."""
        is_node = trees.frontier >= 0
        # a node at depth d is the token at context + d, so its row's position is context + d - 1
        positions = (inputs.context_len + depth).unsqueeze(1).expand_as(own)
        rows = inputs.context_len.unsqueeze(1) + own
        batch = DeviceBatch(
            query_start=row_starts(size.sequences, size.width, own.device),
            context_len=inputs.context_len,
            block_tables=inputs.block_tables,
            mask_words=seen.flatten(0, 1),
            positions=positions.masked_fill(~is_node, 0).flatten(),
            slots=slots_of(inputs.block_tables, rows, is_node, self._block_size).flatten(),
            block_size=self._block_size,
            new_len=((depth + 1) * inputs.limits.top_k).int(),
            max_queries=size.width,
        )
        token_ids = trees.token_ids.gather(1, trees.frontier.clamp(min=0).long()).flatten()
        return self._layer(features, token_ids, batch)
