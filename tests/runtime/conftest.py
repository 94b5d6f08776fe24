"""A small engine without tensors, whose rows say what they hold, for tests of the host's logic.

Row k of a text holds the text up to token k, its draft row the text up to token k+1; whatever reads a row
checks that, and whatever writes one checks that nobody else holds its block. A forgotten salt, a stale block,
a row of an unverified token in the index: each shows as a row that says something else.
"""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

from specdec.blocks import BlockManager
from specdec.cold_tiers import ColdTiers, HostTier
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import TapDrafter
from specdec.prefix_cache import NO_DRAFT, PrefixCache
from specdec.prefix_setup import finish_rows
from specdec.random_streams import RandomStream
from specdec.request_options import RequestOptions
from specdec.sampling_params import SamplingParams
from specdec.scheduler import ScheduledSequence, Scheduler
from specdec.sequence import PrefixUse, Sequence

SIZE = 4  # rows of a block
VOCAB = 3  # few tokens and short prompts, so that texts often begin alike
SCRATCH = 3
SPEC = SpecConfig(max_depth=3, max_nodes=5)

Tag = tuple[str | None, tuple[int, ...]]


class Storage:
    """Rows as tags: what text, of which tenant, made them."""

    def __init__(self, num_blocks: int) -> None:
        self.target: list[list[Tag | None]] = [[None] * SIZE for _ in range(num_blocks)]
        self.draft: list[list[Tag | None]] = [[None] * SIZE for _ in range(num_blocks)]
        self.vault: list[tuple[list[Tag | None], list[Tag | None]]] = []

    def copy(self, source: int, target: int) -> None:
        self.target[target], self.draft[target] = list(self.target[source]), list(self.draft[source])

    def read(self, block: int) -> torch.Tensor:
        self.vault.append((list(self.target[block]), list(self.draft[block])))
        return torch.tensor([len(self.vault) - 1])

    def write(self, block: int, rows: torch.Tensor) -> bool:
        target, draft = self.vault[int(rows)]
        self.target[block], self.draft[block] = list(target), list(draft)
        return True


class Controller:
    """Drafts or not, as the schedule says."""

    def __init__(self) -> None:
        self.nodes = SPEC.max_nodes

    def max_nodes(self, spec: SpecConfig, batch: int = 1) -> int:
        return self.nodes


class FakeDrafter:
    """Draft rows from pending states, with what `TapDrafter` promises."""

    name, boundaries, can_sample, fingerprint = "fake", (1,), False, "fake"

    def __init__(self, host: Host) -> None:
        self.host = host

    # not None: what a protocol names as a method must not be None to count as one
    makes_chains = relative_cost = scratch_rows = propose = release = caches = cast(Any, int)

    def absorb(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if seq.num_computed > seq.draft_computed:
                self.host.catch_up(seq)


def following(text: tuple[int, ...]) -> int:
    """The token after a text; much like the one before, so that texts meet again."""
    return (text[-1] + (len(text) % 5 == 0) + sum(text[-3:]) // 4) % VOCAB


class Host:
    """A small engine without tensors."""

    following = staticmethod(following)

    def __init__(self, num_blocks: int, cached: bool, cold_blocks: int, budget: int, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.storage = Storage(num_blocks)
        self.drafter = FakeDrafter(self)
        assert isinstance(cast(Any, self.drafter), TapDrafter), "or finished texts would keep no draft rows"
        tiers = ColdTiers([HostTier(16 * cold_blocks)]) if cold_blocks else None
        self.prefixes = (
            PrefixCache(SIZE, self.storage, clock=lambda: self.now, max_pinned=num_blocks // 2, tiers=tiers)
            if cached
            else None
        )
        config = EngineConfig(block_size=SIZE, max_num_seqs=4, max_batch_tokens=budget)
        self.blocks = BlockManager(num_blocks, SIZE, self.prefixes)
        self.scheduler = Scheduler(config, self.blocks, lambda spec: SCRATCH, self.prefixes)
        self.open: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.waits: dict[int, int] = {}
        self.next_id = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        use: PrefixUse = "target",
        whole: bool = False,
        **options: Any,
    ) -> Sequence:
        behind = max(SPEC.max_nodes, SCRATCH) if whole else 0
        room = self.blocks.num_blocks * SIZE - behind
        seq = Sequence(
            seq_id=self.next_id,
            prompt_len=len(prompt),
            token_ids=list(prompt),
            params=SamplingParams(),
            spec=SPEC,
            stream=RandomStream(0),
            max_len=min(len(prompt) + max_tokens, room),
            stop_ids=frozenset(),
            detokenizer=cast(Any, None),
            controller=cast(Any, Controller()),
            rule=cast(Any, None),
            needs_whole_trees=whole,
            options=RequestOptions(**options),
        )
        seq.prefix_use = use if self.prefixes is not None else "none"
        if seq.options.deadline_s is not None:
            seq.deadline = self.now + seq.options.deadline_s
        self.next_id += 1
        self.open.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        expired = self.scheduler.expired(self.now)
        for seq in expired:
            seq.finish("timeout")
        self.leave(expired)
        for seq in self.open:
            cast(Controller, seq.controller).nodes = self.rng.choice([0, 2, SPEC.max_nodes])
        plan = self.scheduler.schedule()
        assert plan or expired or not self.scheduler.has_work, "work, but no progress"
        rows = sum(share.num_rows + share.max_nodes for share in plan)
        whole = any(share.seq.needs_whole_trees for share in plan[:1])
        assert rows <= self.scheduler.config.max_batch_tokens or whole, "the step is over its budget"
        for share in plan:
            self.compute(share)
        for share in plan:
            if self.prefixes is not None and not share.seq.is_finished:
                self.prefixes.index(share.seq)
        self.leave([share.seq for share in plan if share.seq.is_finished])

    def leave(self, seqs: list[Sequence]) -> None:
        if self.prefixes is not None and seqs:
            finish_rows(seqs, self.prefixes, cast(Any, self.drafter), 50.0, self.now)
        for seq in seqs:
            self.scheduler.remove(seq)
            self.open.remove(seq)
            self.finished.append(seq)

    def fail(self, seq: Sequence) -> None:
        """Its logits were no numbers, so that its rows are not to be trusted."""
        seq.finish("error")
        self.leave([seq])

    def break_step(self) -> None:
        """A step raised: what it was about starts over."""
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)

    def abort(self, seq: Sequence) -> None:
        seq.finish("abort")
        self.scheduler.remove(seq)
        self.open.remove(seq)

    def compute(self, share: ScheduledSequence) -> None:
        """Read all rows before, write the new ones, accept part of a chain of right drafts."""
        seq, first = share.seq, share.seq.num_computed
        was_prefill = share.is_prefill
        for row in range(first):
            assert self.at(self.storage.target, seq, row) == self.tag(seq, row + 1), "a stale target row"
        for row in range(first, first + share.num_rows):
            self.put(self.storage.target, seq, row, self.tag(seq, row + 1))
        accepted = 0
        if share.max_nodes and not was_prefill:
            self.catch_up(seq)
            for row in range(seq.draft_computed):
                if seq.prefix_use == "draft":
                    assert self.at(self.storage.draft, seq, row) == self.tag(seq, row + 2), (
                        "a stale draft row"
                    )
            behind = len(seq.token_ids) + SCRATCH if seq.prefix_use == "draft" else 0
            for row in range(len(seq.token_ids) - 1, behind):
                self.put(self.storage.draft, seq, row, None)
            # nodes are verified in rows behind the root; those accepted are moved up to it
            for row in range(first + 1, first + 1 + share.max_nodes):
                self.put(self.storage.target, seq, row, None)
            accepted = self.rng.randrange(min(share.max_nodes, SPEC.max_depth) + 1)
        reaches_root = share.reaches_root
        text = list(seq.token_ids)
        if reaches_root:
            for _ in range(accepted + 1):
                text.append(following(tuple(text)))
        for row in range(first + share.num_rows, first + share.num_rows + accepted):
            self.put(self.storage.target, seq, row, (seq.options.cache_salt, tuple(text[: row + 1])))
        count = share.num_rows + accepted
        states = [
            hash((seq.options.cache_salt, tuple(text[: row + 1]))) for row in range(first, first + count)
        ]
        if seq.prefix_use == "draft":
            seq.add_states(torch.tensor(states)[:, None], SIZE)
        seq.num_computed += count
        for token in text[len(seq.token_ids) :]:
            seq.token_ids.append(token)
            if seq.remaining_tokens() <= 0 or self.rng.random() < 0.03:
                seq.finish("length")
                break

    def catch_up(self, seq: Sequence) -> None:
        """Make the draft rows whose states are pending."""
        if seq.prefix_use != "draft":
            return
        pending = torch.cat(seq.pending_states)[:, 0].tolist()
        for offset, row in enumerate(range(seq.draft_computed, seq.num_computed)):
            assert pending[offset] == hash(self.tag(seq, row + 1)), "a state of another row"
            self.put(self.storage.draft, seq, row, self.tag(seq, row + 2))
        seq.draft_computed, seq.pending_states = seq.num_computed, []

    def tag(self, seq: Sequence, length: int) -> Tag:
        assert length <= len(seq.token_ids), "a row of a token that is not there"
        return seq.options.cache_salt, tuple(seq.token_ids[:length])

    def at(self, rows: list[list[Tag | None]], seq: Sequence, row: int) -> Tag | None:
        return rows[seq.block_table[row // SIZE]][row % SIZE]

    def put(self, rows: list[list[Tag | None]], seq: Sequence, row: int, tag: Tag | None) -> None:
        block = seq.block_table[row // SIZE]
        assert self.blocks.users(block) == 1, "a shared block is written"
        rows[block][row % SIZE] = tag

    def audit(self) -> None:
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        self.blocks.audit([seq.block_table for seq in sequences])
        if self.prefixes is None:
            return
        self.prefixes.audit(self.blocks, sequences)
        for block, entry in self.prefixes._index.entries.items():
            with_draft = entry.key[1] != NO_DRAFT
            for offset in range(len(entry.tokens)):
                target, draft = self.storage.target[block][offset], self.storage.draft[block][offset]
                assert target is not None, "an indexed row was never verified"
                assert target[1][-1] == entry.tokens[offset], "an indexed row holds another token"
                after = [*entry.tokens[1:], entry.key[1]][offset]
                assert not with_draft or (draft and draft == (target[0], (*target[1], after)))

    def drain(self, limit: int = 3000) -> None:
        while self.scheduler.has_work:
            self.step()
            self.audit()
            limit -= 1
            assert limit, "a request starves"
        assert self.blocks.num_free == self.blocks.num_blocks


@pytest.fixture(scope="session")
def schedule_host() -> type[Host]:
    """The small engine: add, step, abort, audit, drain."""
    return Host
