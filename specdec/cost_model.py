"""What a target pass costs by its rows on this machine: measured at the start, kept in the user's cache.

Owns the measurement, its file, and when it is taken again. A step decides by the table
(`specdec.speculation`) and never by a clock. Times are the thread's own processor time, which the load of
other programs moves little.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch

from specdec.attention import SequenceAttention, causal_mask
from specdec.config import EngineConfig, ModelConfig
from specdec.live_costs import LiveCosts
from specdec.models.decoder import Decoder, ForwardBatch
from specdec.paged_kv import PagedKVCache
from specdec.provenance import cache_home, folder_fingerprint
from specdec.speculation import CONTEXT, FIXED_COSTS, CostTable

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
# how much longer a context the cost of context is taken from, and with how many rows of one sequence
FURTHER, FURTHER_ROWS = 256, 8
# sequences of one row each, from which the cost of a sequence is taken
SEQUENCES = 4
# part of a one-row pass that reading the `CONTEXT` tokens behind it may take
MOST_READING = 0.5
REPEATS = 9
# processor time; a target that takes longer keeps the table that comes with the program
BUDGET_SECONDS = 3.0
MAX_AGE_SECONDS = 14 * 24 * 3600.0
OTHER_COSTS = ("per_context", "per_sequence", "sequence_context", "head_share")


def cost_key(decoder: Decoder, fingerprint: str) -> str:
    """Name of the table of a target on this machine with this many threads."""
    parts = (
        *(platform.node(), platform.machine(), platform.processor(), torch.__version__),
        *(torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())),
        *(fingerprint, str(decoder.dtype), str(decoder.num_packed), str(decoder.storage)),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def engine_costs(config: EngineConfig, decoder: Decoder, folder: Path, *, drafts: bool) -> LiveCosts:
    """The costs an engine's adaptive policy goes by; measured ones are kept right by the steps' times.

    Args:
        config: says whether it is to be measured; only the processor's own path is.
        decoder: the target's weights.
        folder: of the target.
        drafts: whether anybody will ask.
    """
    on_processor = (config.device, config.kernels) == ("cpu", "auto")
    if not drafts or not on_processor or config.pass_costs == "fixed":
        return LiveCosts(FIXED_COSTS, learns=False)
    return LiveCosts(target_costs(decoder, folder))


def target_costs(decoder: Decoder, folder: Path) -> CostTable:
    """The costs of a target on this processor: from the cache, else measured and put there."""
    path = cache_home() / "costs" / f"{cost_key(decoder, folder_fingerprint(folder))}.json"
    if (kept := _read(path)) is not None:
        logger.info("pass costs from %s", path)
        return kept
    measured = measure_costs(decoder)
    if measured is None:
        logger.info("a pass takes too long to be measured: pass costs of the program")
        return FIXED_COSTS
    _write(path, measured)
    return measured


@torch.inference_mode()
def measure_costs(decoder: Decoder, budget: float = BUDGET_SECONDS) -> CostTable | None:
    """Time passes over 1 to 64 rows, interleaved, the best of a few; None beyond the budget."""
    config = decoder.config
    cache = PagedKVCache(
        num_layers=config.num_layers,
        num_blocks=max(CONTEXT + ROWS[-1], SEQUENCES * (CONTEXT + FURTHER + 16)) // 16,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
    )
    started = time.thread_time()
    # the loop's first runs compile it
    for rows in (1, 2, 1):
        _seconds(decoder, cache, rows)
        if time.thread_time() - started > budget:
            return None
    best = dict.fromkeys(ROWS, float("inf"))
    further = several = several_further = float("inf")
    for repeat in range(REPEATS):
        for rows in ROWS:
            best[rows] = min(best[rows], _seconds(decoder, cache, rows))
            if repeat == 0 and time.thread_time() - started > budget:
                return None
        far = CONTEXT + FURTHER
        further = min(further, _seconds(decoder, cache, FURTHER_ROWS, context=far))
        several = min(several, _seconds(decoder, cache, 1, SEQUENCES))
        several_further = min(several_further, _seconds(decoder, cache, 1, SEQUENCES, context=far))
        if time.thread_time() - started > budget:
            break
    points: list[tuple[int, float]] = []
    for rows in ROWS:
        # more rows never cost less: what says so is noise
        points.append((rows, max(best[rows] / best[1], points[-1][1] if points else 1.0)))
    # a token of context costs a sequence so much once, and each of its rows a little more
    one = max(0.0, further - best[FURTHER_ROWS]) / best[1] / FURTHER
    each = max(0.0, several_further - several) / best[1] / (FURTHER * SEQUENCES)
    # reading a context is but a part of the pass behind it, and of what one more sequence takes: what says
    # otherwise is noise, and would give short texts passes that take no time
    each = min(each, MOST_READING / CONTEXT)
    per_context = min(each, max(0.0, one - each) / (FURTHER_ROWS - 1))
    sequence = max(0.0, several - best[SEQUENCES]) / best[1] / (SEQUENCES - 1)
    return CostTable(
        tuple(points),
        per_context=per_context,
        per_sequence=max(sequence, each * CONTEXT),
        sequence_context=each - per_context,
        head_share=head_share(config),
    )


def head_share(config: ModelConfig) -> float:
    """The output head's part of a row's multiplications."""
    hidden, heads = config.hidden_size, config.head_dim * (config.num_heads + config.num_kv_heads)
    head = hidden * config.vocab_size
    return head / (head + config.num_layers * hidden * (2 * heads + 3 * config.intermediate_size))


def _seconds(
    decoder: Decoder, cache: PagedKVCache, rows: int, sequences: int = 1, *, context: int = CONTEXT
) -> float:
    """Processor seconds of a pass over chains of `rows` behind contexts, with logits of every row."""
    entries, slots, positions = [], [], list(range(context, context + rows))
    for number in range(sequences):
        first = number * (context + 16)
        every = torch.arange(first, first + context + rows)
        slots.append(every[context:])
        entries.append(
            SequenceAttention(
                query_start=number * rows,
                num_queries=rows,
                context_len=context,
                num_new=rows,
                # several sequences' blocks lie among each other
                slots=slice(first, first + context + rows) if sequences == 1 else every,
                mask=causal_mask(rows),
                query_positions=positions,
                new_positions=positions,
            )
        )
    taken = rows * sequences
    padded = -(-taken // decoder.row_multiple) * decoder.row_multiple
    batch = ForwardBatch(
        token_ids=torch.zeros(padded, dtype=torch.int64),
        positions=torch.tensor(positions * sequences + [0] * (padded - taken)),
        longest=context + rows,
        slots=torch.cat(slots),
        attention=entries,
        first_slot=context if sequences == 1 else None,
    )
    started = time.thread_time()
    hidden, _ = decoder.forward(batch, cache, ())
    decoder.logits(hidden)
    return time.thread_time() - started


def _read(path: Path) -> CostTable | None:
    """A table that is there, whole and not too old."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        points = tuple((int(rows), float(cost)) for rows, cost in kept["points"])
        others = {name: float(kept[name]) for name in OTHER_COSTS}
        if not 0 <= time.time() - float(kept["time"]) < MAX_AGE_SECONDS or points[0] != (1, 1.0):
            return None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # a memo, not a record: without it the costs are measured again
    return CostTable(points, **others)


def _write(path: Path, table: CostTable) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"time": time.time(), **asdict(table)}), encoding="utf-8")
        part.replace(path)
    except OSError:
        return  # nowhere to keep it: the next start measures again
