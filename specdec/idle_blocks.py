"""In which order idle blocks are given up: by age, pinned ones last, those of whoever pins most first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

# beyond what is needed, one unpinned block in so many is given up too: what a full pool hands out next is
# then consecutive more often, which the CPU reads faster
RESERVE_SHARE = 64


class IdleOrder:
    """Blocks that nobody uses, and the pins of any block.

    A pin is a moment until which a block is kept before unpinned ones. It never holds a block against a live
    request: pinned blocks are given up when nothing else is idle. At most `max_pinned` blocks are pinned;
    beyond, pins are dropped. Either way the owner with the most pinned blocks gives first, and of its own the
    pin that ends first: who asks for longer or for more does not push out the others.
    """

    def __init__(self, max_pinned: int) -> None:
        self.max_pinned = max_pinned
        self._unpinned: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()
        self._until: dict[int, float] = {}
        self._owner: dict[int, str | None] = {}

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    def __contains__(self, block: int) -> bool:
        return block in self._unpinned or block in self._pinned

    def blocks(self) -> Iterator[int]:
        yield from self._unpinned
        yield from self._pinned

    def num_pinned(self, now: float) -> int:
        """Blocks whose pin has not ended, used ones included."""
        return sum(until > now for until in self._until.values())

    def add(self, block: int, now: float) -> None:
        """A block has become idle."""
        if self._until.get(block, now) > now:
            self._pinned[block] = None
        else:
            self.forget_pin(block)
            self._unpinned[block] = None

    def remove(self, block: int) -> None:
        """A block is used again; its pin stays."""
        if block in self._pinned:
            del self._pinned[block]
        else:
            del self._unpinned[block]

    def forget_pin(self, block: int) -> None:
        """The block's content is no longer what was pinned."""
        self._until.pop(block, None)
        self._owner.pop(block, None)

    def pin(self, blocks: list[int], until: float, now: float, owner: str | None = None) -> None:
        """Pin blocks that are in use; a pin never gets shorter."""
        for block in blocks:
            assert block not in self, "blocks are pinned before they become idle"
            self._until[block] = max(until, self._until.get(block, until))
            self._owner[block] = owner
        self._unpin_ended(now)
        surplus = len(self._until) - self.max_pinned
        if surplus > 0:
            # of one text's blocks, which end together, the last ones lose their pins first
            position = {block: place for place, block in enumerate(blocks)}
            order = sorted(self._until, key=lambda block: (self._until[block], -position.get(block, 0)))
            self._unpin(self._fair(order, surplus))

    def take(self, count: int, now: float) -> list[int]:
        """Give up at least `count` idle blocks."""
        assert count <= len(self), f"{count} idle blocks asked for, {len(self)} there"
        self._unpin_ended(now)
        spare = min(len(self._unpinned), count + len(self._unpinned) // RESERVE_SHARE)
        taken = [self._unpinned.popitem(last=False)[0] for _ in range(spare)]
        if (missing := count - len(taken)) > 0:
            # a stable sort: of blocks whose pins end together the first to become idle, a text's end
            order = self._fair(sorted(self._pinned, key=self._until.__getitem__), missing)
            for block in order:
                del self._pinned[block]
            taken += order
        for block in taken:
            self.forget_pin(block)
        return taken

    def _fair(self, order: list[int], count: int) -> list[int]:
        """So many of the blocks in `order`, one after the other from the owner that has most left."""
        left: dict[str | None, deque[tuple[int, int]]] = {}
        for place, block in enumerate(order):
            left.setdefault(self._owner[block], deque()).append((place, block))
        chosen = []
        for _ in range(count):
            most = max(left.values(), key=lambda blocks: (len(blocks), -blocks[0][0] if blocks else 0))
            chosen.append(most.popleft()[1])
        return chosen

    def _unpin_ended(self, now: float) -> None:
        self._unpin([block for block, until in self._until.items() if until <= now])

    def _unpin(self, blocks: list[int]) -> None:
        """End pins; the idle ones among them are older than what became idle unpinned since."""
        ended = set(blocks)
        for block in ended:
            self.forget_pin(block)
        idle = [block for block in self._pinned if block in ended]
        for block in reversed(idle):
            del self._pinned[block]
            self._unpinned[block] = None
            self._unpinned.move_to_end(block, last=False)
