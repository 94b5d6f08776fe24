"""The engine in a thread of its own, behind a front that belongs to the event loop.

Owns the bound on waiting requests, the order of commands, what happens when a step fails, and the word to
everybody when the thread dies or hangs (`watchdog`). A failed step ends the requests it worked on and no
others; steps that go on failing, or bookkeeping that is no longer sound, end the thread, and the server.

A thread and not a process: torch lets other threads run while it computes, so the event loop answers during
steps; tokens, log-probabilities and metrics cross without being copied and serialised at every step; and the
two can only die together, so that no client waits on a server whose engine is gone: the system closes every
connection of a killed process at once, and whatever started the server starts both again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from specdec.engine import Engine
from specdec.requests import StreamPiece
from specdec.sequence import Sequence
from specdec.server.config import ServerConfig
from specdec.server.meters import SequenceMeter
from specdec.server.metrics import ServerMetrics
from specdec.server.problems import Problem, engine_failed
from specdec.server.tickets import Ticket
from specdec.server.watchdog import Watchdog

logger = logging.getLogger("specdec.server")

Made = TypeVar("Made")

# failing steps in a row after which no request is to blame
MAX_FAILED_STEPS = 3
_JOIN_S = 5.0


@dataclass(frozen=True)
class _Add:
    ticket: Ticket


@dataclass(frozen=True)
class _Abort:
    ticket: Ticket


class EngineLoop:
    """Front of one engine.

    Methods without a word on it are called on the event loop.

    Args:
        engine: stepped by the loop's thread alone from `start` on.
        config: bounds.
        metrics: counted into.
        on_death: called on the event loop when the thread has died.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        metrics: ServerMetrics,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.on_death = on_death
        self.capacity = engine.config.max_num_seqs + config.max_waiting
        self.outstanding = 0
        self.fault: str | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._tickets: set[Ticket] = set()
        self._commands: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        # prompts become tokens, and grammars masks, one after another beside the engine's steps
        self._admission = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec-admission")
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        # written by the thread alone
        self._num_turns = 0
        self._in_turn = False
        # of the thread alone
        self._live: dict[Ticket, list[SequenceMeter]] = {}
        self._failed_steps = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that are here and not yet running."""
        return max(0, self.outstanding - len(self.engine.scheduler.running))

    def start(self) -> None:
        """Begin to step."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self.config.step_timeout_s:
            dog = Watchdog(self.config.step_timeout_s, self._turn, self._died)
            self._watching = self._loop.create_task(dog.watch())

    def stop(self) -> None:
        """Let the thread end after the step it is in."""
        self._commands.put(None)
        if self._watching is not None:
            self._watching.cancel()
        self._admission.shutdown(wait=False, cancel_futures=True)

    def join(self) -> bool:
        """Wait a little for the thread to end: after `stop`, and when nobody awaits it any more.

        Returns:
            False when it has not ended: it hangs.
        """
        self._thread.join(0 if self._in_turn and self.fault is not None else _JOIN_S)
        return not self._thread.is_alive()

    def check_room(self, count: int = 1) -> None:
        """Refuse `count` more sequences when there is no place for them.

        Raises:
            Problem: 429 now, 400 ever, 500 for a dead engine.
        """
        if self.fault is not None:
            raise engine_failed(self.fault)
        if count > self.capacity:
            raise Problem(
                400,
                f"{count} sequences (prompts times n) were asked for; this server takes {self.capacity}",
                param="n",
                code="invalid_value",
            )
        if self.outstanding + count > self.capacity:
            self.metrics.refused("queue_full")
            raise Problem(
                429,
                f"the server is full: {self.outstanding} of {self.capacity} sequences run or wait",
                code="queue_full",
                retry_after_s=self.config.retry_after_s,
            )

    async def submit(
        self,
        make: Callable[[], list[Sequence]],
        *,
        count: int,
        num_choices: int,
        streaming: bool,
        arrived: float,
    ) -> Ticket:
        """Prepare `count` sequences (`make` runs in the admission thread) and queue them.

        Raises:
            Problem: no room, or what `make` raises.
        """
        self.check_room(count)
        self._hold(count)
        try:
            sequences = await asyncio.get_running_loop().run_in_executor(self._admission, make)
            assert len(sequences) == count, f"{count} places were kept for {len(sequences)} sequences"
            # the thread may have died meanwhile, and would not tell anybody of this one
            self.check_room(0)
        except BaseException:
            self._let_go(count)
            raise
        ticket = Ticket(
            sequences,
            streaming=streaming,
            arrived=arrived,
            max_buffered_tokens=self.config.max_buffered_tokens,
            num_choices=num_choices,
        )
        self._tickets.add(ticket)
        self._commands.put(_Add(ticket))
        return ticket

    async def beside(self, work: Callable[[], Made]) -> Made:
        """Run a tokenizer's work beside the engine, in line with the prompts of requests."""
        return await asyncio.get_running_loop().run_in_executor(self._admission, work)

    def beside_nobody(self, work: Callable[[], None]) -> None:
        """Like `beside`, for work that nobody waits for."""
        self._admission.submit(work)

    def close(self, ticket: Ticket) -> None:
        """Nobody reads it any more; what is left of it stops with the next step."""
        if ticket in self._tickets:
            self._commands.put(_Abort(ticket))

    def end_all(self, problem: Problem) -> None:
        """End every request there is."""
        for ticket in list(self._tickets):
            ticket.fail(problem)
            self.close(ticket)

    def _hold(self, count: int) -> None:
        self.outstanding += count
        self.idle.clear()

    def _let_go(self, count: int) -> None:
        self.outstanding -= count
        assert self.outstanding >= 0, "a place was given back twice"
        if self.outstanding == 0:
            self.idle.set()

    def _deliver(self, pieces: list[tuple[Ticket, StreamPiece]], over: list[Ticket]) -> None:
        for ticket, piece in pieces:
            if not ticket.put(piece):
                self.metrics.refused("slow_reader")
                ticket.fail(
                    Problem(
                        408,
                        f"the client is {self.config.max_buffered_tokens} tokens behind; read faster",
                        code="slow_reader",
                    )
                )
                self.close(ticket)
        for ticket in over:
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.discard(ticket)
            self._let_go(len(ticket.sequences))

    def _turn(self) -> int | None:
        """The number of the turn the thread is in, None while it waits for work."""
        return self._num_turns if self._in_turn else None

    def _died(self, fault: str) -> None:
        if self.fault is not None:
            return
        self.fault = fault
        for ticket in list(self._tickets):
            ticket.fail(engine_failed(fault))
            self._forget(ticket)
        self.on_death()

    # from here on: the engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
                self._num_turns += 1
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._in_turn = False
            self._tell(self._died, f"{type(error).__name__}: {error}"[:500])

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the engine's thread was started by start()"
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            self._commands.put(None)

    def _take_commands(self) -> bool:
        """Do what was asked since the last step, waiting for it when there is no work; False to stop."""
        while True:
            try:
                self._in_turn = self.engine.scheduler.has_work
                command = self._commands.get(block=not self._in_turn)
            except queue.Empty:
                return True
            self._in_turn = True
            if command is None:
                return False
            if isinstance(command, _Add):
                self._add(command.ticket)
            elif command.ticket in self._live:
                self._end(command.ticket)
                self._tell(self._forget, command.ticket)

    def _add(self, ticket: Ticket) -> None:
        self._live[ticket] = [
            SequenceMeter(
                self.metrics,
                seq,
                arrived=ticket.arrived,
                counts_prompt=index % ticket.num_choices == 0,
                marks=ticket.marks[index],
            )
            for index, seq in enumerate(ticket.sequences)
        ]
        for seq in ticket.sequences:
            self.engine.scheduler.add(seq)

    def _end(self, ticket: Ticket) -> None:
        self.engine.abort(ticket.sequences)
        for meter in self._live.pop(ticket):
            if not meter.has_ended:
                meter.end()

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            self.engine.step()
        except Exception as error:
            self._contain(error)
        else:
            self._failed_steps = 0
        self._pass_on(started, time.perf_counter())

    def _contain(self, error: Exception) -> None:
        """End the requests of a failed step.

        Raises:
            Exception: the same, when it is not theirs to end.
        """
        self._failed_steps += 1
        self.metrics.failed_step()
        victims, self.engine.failed = {id(seq) for seq in self.engine.failed}, []
        if not victims or self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        logger.error("a step failed; its requests end", exc_info=error)
        problem = engine_failed(f"{type(error).__name__} in the step that worked on this request")
        for ticket in [
            ticket for ticket in self._live if any(id(seq) in victims for seq in ticket.sequences)
        ]:
            self._end(ticket)
            self._tell(ticket.fail, problem)
            self._tell(self._forget, ticket)
        self.engine.audit()

    def _pass_on(self, started: float, now: float) -> None:
        """Hand what the step wrote to the event loop, in one call."""
        pieces: list[tuple[Ticket, StreamPiece]] = []
        over: list[Ticket] = []
        for ticket, meters in self._live.items():
            still = False
            for reader, meter in zip(ticket.readers, meters, strict=True):
                if meter.has_ended:
                    continue
                finished = reader.seq.is_finished
                meter.after_step(started, now)
                if ticket.streaming or finished:
                    piece = reader.take()
                    if piece is not None:
                        pieces.append((ticket, piece))
                if finished:
                    meter.end()
                else:
                    still = True
            if not still:
                over.append(ticket)
        for ticket in over:
            del self._live[ticket]
        if pieces or over:
            self._tell(self._deliver, pieces, over)
