"""What one sequence adds to the metrics, step by step.

Owns the arithmetic of latencies (as vLLM's bench defines them, tokens counted and not chunks) and the
differences of the sequence's own counts, so that the counters are the sums of what responses report. Runs in
the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.sequence import Sequence
from specdec.server.metrics import ServerMetrics


@dataclass
class Marks:
    """Moments of one sequence, on `time.perf_counter`; written in the engine's thread, read by anybody."""

    begun: float | None = None
    first: float | None = None
    last: float | None = None


class SequenceMeter:
    """Counts one sequence.

    Args:
        metrics: counted into.
        seq: the sequence, not yet begun.
        arrived: when its request came, on `time.perf_counter`.
        counts_prompt: whether it stands for its prompt in `prompt_tokens` (the first choice does).
        marks: filled in.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        seq: Sequence,
        *,
        arrived: float,
        counts_prompt: bool,
        marks: Marks,
    ) -> None:
        self._marks = marks
        self._metrics = metrics
        self._seq = seq
        self._arrived = arrived
        self._counts_prompt = counts_prompt
        self._spec = metrics.speculation_of(seq.rule.rule.name, lossy=not seq.rule.rule.is_lossless)
        self._tokens = 0
        self._first: float | None = None
        self._last = arrived
        self._begun = False
        self.has_ended = False
        self._seen = (0, 0, 0, 0, 0)
        self._seen_per_depth: list[int] = []

    def after_step(self, started: float, now: float) -> None:
        """Count what a step did for it; the step ran from `started` to `now`."""
        seq = self._seq
        if not self._begun and (seq.num_computed or seq.num_output):
            self._begun = True
            self._marks.begun = started
            self._metrics.queue_time.observe(started - self._arrived)
        new = seq.num_output - self._tokens
        if new:
            if self._first is None:
                self._first = self._marks.first = now
                self._metrics.time_to_first_token.observe(now - self._arrived)
                if self._counts_prompt:
                    self._metrics.prompt_tokens.inc(seq.prompt_len)
            else:
                for _ in range(new):
                    self._metrics.inter_token.observe((now - self._last) / new)
            self._last = self._marks.last = now
            self._tokens += new
            self._metrics.generation_tokens.inc(new)
            self._count_speculation()

    def end(self) -> None:
        """Count its end, whatever it was."""
        seq = self._seq
        self.has_ended = True
        self._metrics.ended(seq.finish_reason or "abort")
        if self._first is None:
            return
        self._metrics.request_generation_tokens.observe(self._tokens)
        if self._counts_prompt:
            self._metrics.request_prompt_tokens.observe(seq.prompt_len)
        self._metrics.end_to_end.observe(self._last - self._arrived)
        if self._tokens > 1:
            self._metrics.time_per_output_token.observe((self._last - self._first) / (self._tokens - 1))

    def _count_speculation(self) -> None:
        stats = self._seq.stats
        drafts = stats.steps_per_depth[0] if stats.steps_per_depth else 0
        now = (stats.verify_steps, drafts, stats.drafted, stats.accepted, stats.committed)
        if now == self._seen:
            return
        for counter, value, before in zip(self._spec.counters, now, self._seen, strict=True):
            counter.inc(value - before)
        self._seen = now
        for depth, value in enumerate(stats.accepted_per_depth):
            before = self._seen_per_depth[depth] if depth < len(self._seen_per_depth) else 0
            if value > before:
                self._spec.at_depth(depth).inc(value - before)
        self._seen_per_depth = list(stats.accepted_per_depth)
