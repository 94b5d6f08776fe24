"""An EAGLE-3 head's decoder layer on the processor: TorchScript passes, and a whole chain in one call.

Owns the head's weights as serving reads them: projections fused, matrices packed. The mathematics is
`eagle3`'s. A chain of greedy drafts makes some hundred small operations per token, which cost more than its
products when they are called from Python. Does not know sequences, trees or growth.

Letters: R rows of a pass, h query heads, k KV heads, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafts.eagle3 import Eagle3Head
from specdec.models.layer_loop import gated, rms, rotate, store_and_attend, store_rows
from specdec.models.layers import Linear, Storage, fits_fp16, packing_available
from specdec.models.matrices import Matrices
from specdec.models.rope import RotaryEmbedding


def head_linears(head: Eagle3Head, weights: str) -> list[Linear]:
    """The head's matrices, fused: fc, qkv, out, gate_up, down, output rows.

    Args:
        head: the loaded head.
        weights: "plain", "fp16-packed" (where exact), "bf16-packed", or "auto", which means int8: a draft's
            rounding costs no text, and its matrices are half of a pass's bytes.
    """
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    parts = [
        [head.fc.weight],
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        [attention.o_proj.weight],
        [mlp.gate_proj.weight, mlp.up_proj.weight],
        [mlp.down_proj.weight],
        [head.output_rows()],
    ]
    biases: dict[int, Tensor] = {}
    if head.config.attention_bias:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases[1] = torch.cat([projection.bias.detach().float() for projection in projections])
        biases[2] = attention.o_proj.bias.detach().float()
    linears = []
    for number, part in enumerate(parts):
        weight = torch.cat([matrix.detach().float() for matrix in part])
        storage = Storage.PLAIN
        if weights in ("auto", "int8") and packing_available(Storage.INT8) and bool(weight.isfinite().all()):
            storage = Storage.INT8
        elif weights in ("auto", "fp16-packed") and packing_available() and fits_fp16(weight):
            storage = Storage.FP16
        elif weights == "bf16-packed" and packing_available(Storage.BF16):
            storage = Storage.BF16
        linears.append(Linear(weight, biases.get(number), storage))
    return linears


class HeadLoop(Matrices):
    """The head's passes over rows in a paged cache [2, k, slots, d].

    Args:
        head: the loaded head; its tensors are copied.
        embed_tokens: the target's embeddings.
        positions: how many positions it serves.
        weights: see `head_linears`.
    """

    __constants__ = (
        *Matrices.__constants__,
        "fc_norm",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "qk_norm",
    )

    def __init__(self, head: Eagle3Head, embed_tokens: Tensor, positions: int, weights: str) -> None:
        super().__init__(head_linears(head, weights))
        config, layer = head.config, head.midlayer
        self.fc_norm, self.norm_before_fc = config.fc_norm, config.norm_before_fc
        self.norm_before_residual, self.norm_output = config.norm_before_residual, config.norm_output
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        vectors = {name: tensor.float() for name, tensor in head.state_dict().items()}
        self.qk_norm, self.turned_norms = config.qk_norm, torch.empty(0)
        if config.qk_norm:
            queries = vectors["midlayer.self_attn.q_norm.weight"].expand(config.num_heads, -1)
            keys = vectors["midlayer.self_attn.k_norm.weight"].expand(config.num_kv_heads, -1)
            self.turned_norms = torch.cat((queries, keys))
        taps = range(config.num_taps if config.fc_norm else 0)
        self.tap_norms = [vectors[f"fc_norm.{tap}.weight"] for tap in taps]
        self.flat_norm = vectors["input_norm.weight"] if config.norm_before_fc else torch.empty(0)
        self.embed_norm = layer.input_layernorm.weight.detach().float()
        self.hidden_norm = layer.hidden_norm.weight.detach().float()
        self.post_norm = layer.post_attention_layernorm.weight.detach().float()
        self.final_norm = head.norm.weight.detach().float()
        shared = config.embed == "target" and not config.projects_embeddings
        self.embed_tokens = embed_tokens if shared else head.embedding_rows().float()
        self.vocab_ids = head.vocab.ids
        rope = RotaryEmbedding(config.rope)
        self.cos, self.sin = rope.turned(positions)

    @torch.jit.export
    def fuse(self, states: Tensor) -> Tensor:
        """Features [R, hidden] of taps [R, taps, target_hidden]."""
        if self.fc_norm:
            parts: list[Tensor] = []
            for tap in range(states.size(1)):
                parts.append(rms(states.select(1, tap), self.tap_norms[tap], self.eps))
            return self.product(0, torch.cat(parts, 1))
        flat = states.flatten(1)
        if self.norm_before_fc:
            flat = rms(flat, self.flat_norm, self.eps)
        return self.product(0, flat)

    @torch.jit.export
    def feedback(self, z: Tensor) -> Tensor:
        """The feature of the next drafted row."""
        return rms(z, self.final_norm, self.eps) if self.norm_output else z

    @torch.jit.export
    def logits(self, z: Tensor) -> Tensor:
        """Draft logits [R, draft_vocab] of layer outputs."""
        return self.product(5, rms(z, self.final_norm, self.eps))

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        slots: Tensor,
        first_slot: int,
        starts: list[int],
        counts: list[int],
        first_slots: list[int],
        lengths: list[int],
        gathers: list[Tensor],
        biases: list[Tensor],
    ) -> Tensor:
        """Run the layer on rows and store their keys and values: -> [R, hidden].

        Args:
            features: fused states or fed-back features [R, hidden].
            tokens: the token after each row's.
            positions: of the rows.
            cache: [2, k, slots, d].
            slots: the rows' own.
            first_slot: the first of them if they are consecutive, else -1.
            starts: as the rest, see `specdec.models.layer_loop.AttentionLists`.
            counts: .
            first_slots: .
            lengths: .
            gathers: .
            biases: .
        """
        normed, rotated, values = self.projected(features, tokens, positions, cache.size(1))
        attended = store_and_attend(
            rotated,
            values,
            cache.select(0, 0),
            cache.select(0, 1),
            slots,
            first_slot,
            starts,
            counts,
            first_slots,
            lengths,
            gathers,
            biases,
        )
        y = (normed if self.norm_before_residual else features) + self.product(2, attended)
        return y.add_(self.product(4, gated(self.product(3, rms(y, self.post_norm, self.eps)))))

    def projected(
        self, features: Tensor, tokens: Tensor, positions: Tensor, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normed features of rows, their queries and keys turned to their positions, and their values."""
        embeds = self.embed_tokens.index_select(0, tokens).float()
        normed = rms(features, self.hidden_norm, self.eps)
        x = torch.cat([rms(embeds, self.embed_norm, self.eps), normed], 1)
        qkv = self.product(1, x).view(x.size(0), -1, self.head_dim)
        turned = qkv.size(1) - kv_heads
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        queries_keys = qkv.narrow(1, 0, turned)
        if self.qk_norm:
            queries_keys = rms(queries_keys, self.turned_norms, self.eps)
        return normed, rotate(queries_keys, cos, sin), qkv.narrow(1, turned, kv_heads)

    @torch.jit.export
    def store(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        slots: Tensor,
        first_slot: int,
    ) -> None:
        """Store keys and values of true rows: all that other rows ever read of them, the head has one layer.

        Args:
            states: taps of the rows [R, taps, target_hidden].
            tokens: as in `forward`, like the others.
            positions: .
            cache: .
            slots: .
            first_slot: .
        """
        _, rotated, values = self.projected(self.fuse(states), tokens, positions, cache.size(1))
        store_rows(rotated, values, cache.select(0, 0), cache.select(0, 1), slots, first_slot)

    @torch.jit.export
    def chains(
        self,
        z: Tensor,
        active: list[int],
        contexts: list[int],
        cache: Tensor,
        first_slots: list[int],
        tables: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Draft the most probable token again and again, for several sequences at once.

        Args:
            z: the layer output of each sequence's last true row, longest chains first.
            active: how many sequences still draft at each depth, never more than at the one before.
            contexts: true rows of each sequence.
            cache: [2, k, slots, d].
            first_slots: the slot of row 0 where a sequence's rows are consecutive, else -1.
            tables: slots of its rows where they are not, those of the chain included.

        Returns:
            Target ids and log-probabilities [depths, sequences]; what is beyond a chain's end is undefined.
        """
        ids = torch.zeros([len(active), z.size(0)], dtype=torch.int64)
        scores = torch.zeros([len(active), z.size(0)])
        nothing = torch.empty([0])
        for depth in range(len(active)):
            count = active[depth]
            normed = rms(z.narrow(0, 0, count), self.final_norm, self.eps)
            found, chosen = F.log_softmax(self.product(5, normed), -1).max(-1)
            tokens = self.vocab_ids.index_select(0, chosen)
            ids.select(0, depth).narrow(0, 0, count).copy_(tokens)
            scores.select(0, depth).narrow(0, 0, count).copy_(found)
            if depth + 1 < len(active):
                count = active[depth + 1]
                positions: list[int] = []
                slots: list[int] = []
                lengths: list[int] = []
                gathers: list[Tensor] = []
                for index in range(count):
                    row = contexts[index] + depth
                    positions.append(row)
                    lengths.append(row + 1)
                    if first_slots[index] >= 0:
                        slots.append(first_slots[index] + row)
                        gathers.append(nothing)
                    else:
                        slots.append(int(tables[index][row].item()))
                        gathers.append(tables[index].narrow(0, 0, row + 1))
                z = self.forward(
                    (normed if self.norm_output else z).narrow(0, 0, count),
                    tokens.narrow(0, 0, count),
                    torch.tensor(positions),
                    cache,
                    torch.tensor(slots),
                    slots[0] if count == 1 else -1,
                    [index for index in range(count)],  # noqa: C416  # TorchScript has no list(range())
                    [1 for _ in range(count)],
                    first_slots,
                    lengths,
                    gathers,
                    [nothing for _ in range(count)],
                )
        return ids, scores
