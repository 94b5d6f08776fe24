"""Overlap: a decoding step is launched before the host has read the one before it.

What step n commits stays on the device and is where step n + 1 begins (`step_records.after_carry`); the
host extends block tables by the most that n can commit, launches n + 1, and then reads n, commits its tokens,
looks for ends and makes the stream's pieces while the device works. Text is the same as without overlap: a
share of n + 1 is what the scheduler would have given it, limits that depend on the tokens of n are taken on
the device, and where that cannot be, n + 1 waits for n (`declined` counts why).

A sequence that ends in step n, or between steps, has a result in n + 1 that nobody reads, and its blocks are
given back once n + 1 is done. Rows enter the prefix cache by tokens the host has read, so never by those.

Owns what is in flight and the blocks it holds. Does not know how a step computes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from specdec.blocks import BlockManager
from specdec.device.flight import Flight
from specdec.device.step import DeviceStep
from specdec.device.step_packing import most_accepted, step_class
from specdec.scheduler import PROMPT_PART, ScheduledSequence, Scheduler
from specdec.sequence import Sequence


class Pipeline:
    """Steps in flight of one engine: at most one that is being read, and one launched ahead.

    Args:
        scheduler: of the engine.
        overlap: whether anything is launched ahead.

    Attributes:
        steps_ahead: steps launched ahead.
        declined: steps read before the next one was launched, by reason.
    """

    def __init__(self, scheduler: Scheduler, *, overlap: bool) -> None:
        self._scheduler = scheduler
        self._blocks: BlockManager = scheduler.blocks
        self._overlap = overlap
        self._read_next: Flight | None = None
        self._ahead: Flight | None = None
        self._held: list[list[int]] = []
        self.steps_ahead = 0
        self.declined: Counter[str] = Counter()

    @property
    def held_tables(self) -> list[list[int]]:
        """Blocks that a step in flight still writes to, of sequences that are gone."""
        return self._held

    def take(self) -> Flight | None:
        """The step to be read next, if one was launched ahead and any of its sequences still wants it."""
        self._drop_unwanted()
        self._read_next, self._ahead = self._ahead, None
        return self._read_next

    def launched(self, flight: Flight) -> Flight:
        """Remember a step that was not launched ahead and is to be read."""
        self._read_next = flight
        return flight

    def follow(self, step: DeviceStep) -> None:
        """Launch the step after the one that is to be read, where that can be."""
        flight = self._read_next
        if not self._overlap or flight is None:
            return
        shares = self._next_shares(step, flight)
        if isinstance(shares, str):
            self.declined[shares] += 1
            return
        place = {share.seq.seq_id: index for index, share in enumerate(flight.plan)}
        source = [place[share.seq.seq_id] for share in shares]
        self._ahead = step.launch_after(flight, shares, source, _gained(flight, shares))
        self.steps_ahead += 1

    def landed(self) -> None:
        """The step that was to be read is done: its sequences that are gone give their blocks back."""
        flight, self._read_next = self._read_next, None
        self._release()
        if flight is not None and flight.is_ahead and self._ahead is None:
            for share in flight.live:
                self._trim(share)

    def committed(self) -> None:
        """The host has what the step ahead began with: true rows of the draft were made from it."""
        for share in self._ahead.live if self._ahead else ():
            if share.max_nodes:
                share.seq.pending_states = []
                share.seq.draft_computed = share.seq.num_computed

    def hold(self, seq: Sequence) -> None:
        """Keep the blocks of a sequence that ends until the step ahead has written to them."""
        if self._ahead is not None and any(share.seq is seq for share in self._ahead.plan):
            self._held.append(seq.block_table)
            seq.block_table = []

    def drop(self) -> None:
        """Wait for whatever is in flight and forget it."""
        for flight in (self._read_next, self._ahead):
            if flight is not None:
                # a device that failed says so in every call from now on; here only the books are closed
                with suppress(RuntimeError):
                    flight.fetch.wait()
        self._read_next = self._ahead = None
        self._release()

    def _drop_unwanted(self) -> None:
        if self._ahead is not None and not self._ahead.live:
            self._ahead.fetch.wait()
            self._ahead = None
            self._release()

    def settle(self) -> None:
        """Between steps: nothing stays in flight for sequences that are all gone."""
        self._drop_unwanted()

    def _release(self) -> None:
        for table in self._held:
            self._blocks.release(table)
        self._held = []

    def _trim(self, share: ScheduledSequence) -> None:
        """Give back what was taken for tokens that were not committed; the step's own rows stay."""
        table = share.seq.block_table
        keep = self._blocks.blocks_for(self._scheduler.rows(share.seq, share.max_nodes))
        spare = table[keep:]
        del table[keep:]
        self._blocks.release(spare)

    def _next_shares(self, step: DeviceStep, flight: Flight) -> list[ScheduledSequence] | str:
        """Shares of the step after `flight`, their tables extended; or why it has to wait."""
        scheduler, live = self._scheduler, flight.live
        if scheduler.has_room_for_waiting:
            return "a request waits"
        if {seq.seq_id for seq in scheduler.running} != {share.seq.seq_id for share in live}:
            return "sequences outside the step"
        # every step commits a token
        going = [share for share in live if share.seq.remaining_tokens() > 1]
        if not going:
            return "texts end"
        budget = scheduler.config.max_batch_tokens
        room = (budget - budget // PROMPT_PART) // len(going) - 1
        shares: list[ScheduledSequence] = []
        for share in going:
            share.seq.controller.settle()
        shared = scheduler.shared_nodes([share.seq for share in going])
        for share in going:
            nodes = scheduler.wanted_nodes(share.seq, budget, shared)
            if nodes > room:
                return "token budget"
            shares.append(ScheduledSequence(share.seq, 1, nodes))
        return self._draft_fault(step, flight, shares) or self._extend(flight, shares)

    def _draft_fault(self, step: DeviceStep, flight: Flight, shares: list[ScheduledSequence]) -> str | None:
        """Why the step's trees cannot grow on the device after the one before; None if they can."""
        drafting = [share for share in shares if share.max_nodes]
        if not drafting:
            return None
        if step.grower is None:
            return "drafts of the host"
        # who did not draft in the step before has older true rows to make
        if any(share.seq.draft_computed != share.seq.num_computed for share in drafting):
            return "draft rows to be made"
        gained = _gained(flight, drafting)
        depth = step_class(drafting, None, self._blocks.block_size, gained).depth
        lengths = [
            len(share.seq.token_ids) + more + depth for share, more in zip(drafting, gained, strict=True)
        ]
        return None if all(map(step.grower.can_grow_to, lengths)) else "context of the draft"

    def _extend(self, flight: Flight, shares: list[ScheduledSequence]) -> list[ScheduledSequence] | str:
        """Extend the tables by what a step can commit at most and the next one needs behind it."""
        rows: list[int] = []
        for share, more in zip(shares, _gained(flight, shares), strict=True):
            seq = share.seq
            behind = self._scheduler.rows(seq, share.max_nodes) - len(seq.token_ids)
            rows.append(min(len(seq.token_ids) + more, seq.max_len) + behind)
        missing = sum(
            max(0, self._blocks.blocks_for(count) - len(share.seq.block_table))
            for count, share in zip(rows, shares, strict=True)
        )
        if missing > self._blocks.num_free:
            return "pool"
        for count, share in zip(rows, shares, strict=True):
            self._blocks.extend(share.seq.block_table, count)
        return shares


def _gained(flight: Flight, shares: list[ScheduledSequence]) -> list[int]:
    """Tokens that the sequences of some shares get from a step at most."""
    most = {share.seq.seq_id: 1 + most_accepted(share) for share in flight.plan}
    return [most[share.seq.seq_id] for share in shares]
