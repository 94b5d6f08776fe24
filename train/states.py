"""Target states for training: computed online, or kept in an append-only store on disk.

Owns the one forward that yields taps, the normed final state, and the target's own choice at every row, and
the store of its results. Knows nothing of losses or heads. The stored final state is AFTER the final norm, so
that the output head applies to it directly (the state before it gives a plausible but wrong teacher).

Taps are fp16 in memory and on disk, the final state fp32: the teacher's law must be the target's to 1e-5.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specdec.errors import SpecdecError, writing
from specdec.hf import BoundaryTap, final_norm, num_decoder_layers, output_head, run_decoder
from specdec.layer_select.readout import Readout
from specdec.provenance import sha256_text, write_text_atomic
from specdec.train.batching import SequenceStates
from specdec.train.sequences import TrainSequence

# padded tokens of one target forward; larger gains nothing on a CPU and costs memory.
FORWARD_TOKENS = 4096
# rows of one block of full-vocabulary logits.
LOGIT_ROWS = 256
# sequences between two lines of progress when a store is filled.
FILL_SEQUENCES = 32


class StateSource(Protocol):
    """Where the states of training sequences come from."""

    @property
    def computes(self) -> bool:
        """Whether every `fetch` runs the target."""
        ...

    def fetch(self, sequences: Sequence[TrainSequence]) -> list[SequenceStates]:
        """States of each sequence, in order."""
        ...

    def output_rows(self, ids: Tensor) -> Tensor:
        """The target's output rows [len(ids), hidden], fp32."""
        ...


class TargetStates:
    """Computes states with a Hugging Face target, many sequences to a forward.

    Right padding needs no mask under causal attention: no real token sees a pad.
    """

    def __init__(self, model: Any, boundaries: Sequence[int]) -> None:
        self.model = model
        self.boundaries = tuple(boundaries)
        self.num_layers = num_decoder_layers(model)
        self._norm = final_norm(model)
        self._head = output_head(model)
        weight = self._head.weight
        assert isinstance(weight, Tensor), "an output head carries a weight tensor"
        self._weight = weight.detach()
        self._require_plain_logits()

    @property
    def computes(self) -> bool:
        """Every `fetch` runs the target."""
        return True

    def _require_plain_logits(self) -> None:
        """Refuse a target that caps or scales its logits: the teacher here is its output head alone."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, self.hidden_size, generator=generator).to(self._weight)
        with torch.no_grad():
            alone = self._head(rows).float()
        whole = Readout(self.model).logits_of_features(rows)
        if not torch.allclose(alone, whole, rtol=1e-2, atol=1e-3 * float(alone.abs().max())):
            raise SpecdecError(
                f"target ({type(self.model).__name__}) caps or scales its logits after the head; drafts "
                "cannot be trained for it (layer selection works)"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the target's states."""
        return self._weight.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a store: fp16 taps, fp32 final state, int32 choice, fp32 log-sum-exp."""
        return self.hidden_size * (2 * len(self.boundaries) + 4) + 8

    def fetch(self, sequences: Sequence[TrainSequence]) -> list[SequenceStates]:
        """States of each sequence, in order."""
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
        found: dict[int, SequenceStates] = {}
        group: list[int] = []
        for index in order:
            if group and (len(group) + 1) * len(sequences[index].token_ids) > FORWARD_TOKENS:
                found |= self._forward(sequences, group)
                group = []
            group.append(index)
        if group:
            found |= self._forward(sequences, group)
        return [found[index] for index in range(len(sequences))]

    def output_rows(self, ids: Tensor) -> Tensor:
        """The target's output rows [len(ids), hidden], fp32."""
        return self._weight[ids.to(self._weight.device)].float().cpu()

    @torch.no_grad()
    def _forward(self, sequences: Sequence[TrainSequence], group: list[int]) -> dict[int, SequenceStates]:
        device = self._weight.device
        longest = max(len(sequences[index].token_ids) for index in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, index in enumerate(group):
            ids[row, : len(sequences[index].token_ids)] = torch.tensor(sequences[index].token_ids)
        wanted = tuple(sorted({*self.boundaries, self.num_layers}))
        with BoundaryTap(self.model, wanted) as tap:
            run_decoder(self.model, ids.to(device))
        found = {}
        for row, index in enumerate(group):
            sequence = sequences[index]
            rows = len(sequence.token_ids) - 1
            taps = torch.stack([tap.states[b][row, :rows].cpu() for b in self.boundaries], dim=1).half()
            if not bool(torch.isfinite(taps).all()):
                worst = self.boundaries[int((~torch.isfinite(taps)).flatten(2).any(2).any(0).nonzero()[0])]
                raise SpecdecError(
                    f"target state at boundary {worst} of sequence {sequence.id!r} is not finite in fp16; "
                    "choose other boundaries with --layers"
                )
            final = self._norm(tap.states[self.num_layers][row, :rows].to(device))
            argmax, log_norm = self._choices(final)
            found[index] = SequenceStates(taps, final.float().cpu(), argmax.cpu(), log_norm.cpu())
        return found

    def _choices(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """First choice [rows] and log-sum-exp [rows] of the logits, in blocks of rows."""
        argmax, log_norm = [], []
        for block in final.split(LOGIT_ROWS):
            logits = self._head(block).float()
            argmax.append(logits.argmax(-1).to(torch.int32))
            log_norm.append(torch.logsumexp(logits, -1))
        return torch.cat(argmax), torch.cat(log_norm)


@dataclass(frozen=True)
class _Entry:
    offset: int
    rows: int


class StoredStates:
    """An append-only file of states keyed by token content, filled on first use.

    A record is written before its index line, so a killed run leaves at most a tail that the next one cuts
    off. More data later only adds records. One writer at a time; a store that does not `writes` reads what
    another process of the same run has filled.
    """

    def __init__(
        self,
        folder: str | Path,
        source: TargetStates,
        *,
        target_fingerprint: str,
        dtype: str,
        writes: bool = True,
    ) -> None:
        self.source = source
        self.num_taps, self.hidden = len(source.boundaries), source.hidden_size
        contract = {
            "schema": "specdec.states/1",
            "target_fingerprint": target_fingerprint,
            "boundaries": list(source.boundaries),
            "target_dtype": dtype,
            "taps": "float16",
            "final": "float32, after the final norm",
        }
        self.folder = Path(folder) / sha256_text(json.dumps(contract, sort_keys=True))[:16]
        self._index: dict[str, _Entry] = {}
        self._lock = FileLock(self.folder / "lock")
        if not writes:
            self._read_index(repair=False)
            self._data: IO[bytes] = open(self.folder / "states.bin", "rb")  # noqa: SIM115
            self._lines = open(self.folder / "index.jsonl", encoding="utf-8")  # noqa: SIM115
            return
        with writing(f"--states-cache ({folder})"):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "contract.json").write_text(json.dumps(contract, indent=2) + "\n")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise SpecdecError(
                f"--states-cache ({folder}) is in use by another run; wait or name another"
            ) from error
        end = self._read_index()
        # both files stay open as long as the store.
        self._data = open(self.folder / "states.bin", "a+b")  # noqa: SIM115
        self._data.truncate(end)
        self._lines = open(self.folder / "index.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    @property
    def computes(self) -> bool:
        """What is stored is read."""
        return False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk."""
        return self.source.row_bytes

    def _read_index(self, *, repair: bool = True) -> int:
        path = self.folder / "index.jsonl"
        end = 0
        if not path.exists():
            return end
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            # only the last line of a killed run can be cut short; nothing after it counts.
            try:
                item = json.loads(line)
            except json.JSONDecodeError:
                break
            self._index[item["hash"]] = _Entry(item["offset"], item["rows"])
            end = max(end, item["offset"] + item["rows"] * self.row_bytes)
            kept.append(line)
        if repair:
            write_text_atomic(path, "".join(line + "\n" for line in kept))
        return end

    def missing_bytes(self, sequences: Sequence[TrainSequence]) -> int:
        """Bytes the store will grow by to hold all of `sequences`."""
        unknown = [s for s in sequences if s.content_hash not in self._index]
        return sum(len(s.token_ids) - 1 for s in unknown) * self.row_bytes

    def check_disk(self, sequences: Sequence[TrainSequence]) -> int:
        """Refuse before writing when the disk lacks room; return the bytes to be written."""
        needed, free = self.missing_bytes(sequences), shutil.disk_usage(self.folder).free
        if needed > free:
            raise SpecdecError(
                f"--states-cache needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on "
                f"{self.folder}; "
                "free space, or use --states-cache online"
            )
        return needed

    def fill(self, sequences: Sequence[TrainSequence], progress: Callable[[int, int], None]) -> None:
        """Compute what is missing, in groups of like length; `progress` gets tokens done and to do."""
        unknown = list({s.content_hash: s for s in sequences if s.content_hash not in self._index}.values())
        unknown.sort(key=lambda sequence: len(sequence.token_ids))
        total, done = sum(len(sequence.token_ids) for sequence in unknown), 0
        for low in range(0, len(unknown), FILL_SEQUENCES):
            group = unknown[low : low + FILL_SEQUENCES]
            self._compute(group)
            done += sum(len(sequence.token_ids) for sequence in group)
            progress(done, total)

    def _compute(self, sequences: Sequence[TrainSequence]) -> None:
        assert self._lock.is_locked, "a released store has all the states its run will ask for"
        found = self.source.fetch(sequences)
        try:
            with writing(f"--states-cache ({self.folder})"):
                for sequence, states in zip(sequences, found, strict=True):
                    self._append(sequence.content_hash, states)
                self._lines.flush()
        except SpecdecError:
            # closing tries the failed write once more
            for file in (self._data, self._lines):
                with suppress(OSError):
                    file.close()
            self._lock.release()
            raise

    def fetch(self, sequences: Sequence[TrainSequence]) -> list[SequenceStates]:
        """States of each sequence, in order; unknown ones are computed and kept."""
        unknown = {s.content_hash: s for s in sequences if s.content_hash not in self._index}
        if unknown:
            self._compute(list(unknown.values()))
        return [self._read(self._index[s.content_hash]) for s in sequences]

    def output_rows(self, ids: Tensor) -> Tensor:
        """The target's output rows [len(ids), hidden], fp32."""
        return self.source.output_rows(ids)

    def _append(self, key: str, states: SequenceStates) -> None:
        offset, rows = self._data.seek(0, 2), len(states.argmax)
        for tensor in (states.taps, states.final, states.argmax, states.log_norm):
            self._data.write(tensor.contiguous().numpy().tobytes())
        self._data.flush()
        self._index[key] = _Entry(offset, rows)
        self._lines.write(json.dumps({"hash": key, "offset": offset, "rows": rows}) + "\n")

    def _read(self, entry: _Entry) -> SequenceStates:
        rows, hidden = entry.rows, self.hidden
        self._data.seek(entry.offset)
        raw = self._data.read(rows * self.row_bytes)
        assert len(raw) == rows * self.row_bytes, "an indexed record must be complete"
        cut = np.cumsum(
            [0, rows * self.num_taps * hidden * 2, rows * hidden * 4, rows * 4, rows * 4]
        ).tolist()
        kinds = (np.float16, np.float32, np.int32, np.float32)
        parts = [
            torch.from_numpy(np.frombuffer(raw[low:high], dtype=kind).copy())
            for low, high, kind in zip(cut, cut[1:], kinds, strict=False)
        ]
        return SequenceStates(
            parts[0].view(rows, self.num_taps, hidden), parts[1].view(rows, hidden), *parts[2:]
        )

    def release(self) -> None:
        """Let other runs use the store while this one only reads: no state may be missing any more."""
        self._lines.flush()
        self._lock.release()

    def close(self) -> None:
        """Give the store to the next run."""
        self._data.close()
        self._lines.close()
        self._lock.release()


class TapSubset:
    """A view of stored states with fewer taps: one store of every boundary serves every set of taps.

    Args:
        source: states with taps at `boundaries`.
        boundaries: what `source` holds, in its order.
        wanted: the taps to show, each one of `boundaries`.
    """

    def __init__(self, source: StateSource, boundaries: Sequence[int], wanted: Sequence[int]) -> None:
        self.source = source
        self.columns = [tuple(boundaries).index(boundary) for boundary in wanted]

    @property
    def computes(self) -> bool:
        """As the states it shows."""
        return self.source.computes

    def fetch(self, sequences: Sequence[TrainSequence]) -> list[SequenceStates]:
        """States of each sequence, in order."""
        return [self.view(states) for states in self.source.fetch(sequences)]

    def view(self, states: SequenceStates) -> SequenceStates:
        """The same states with the wanted taps alone."""
        return replace(states, taps=states.taps[:, self.columns])

    def output_rows(self, ids: Tensor) -> Tensor:
        """The target's output rows [len(ids), hidden], fp32."""
        return self.source.output_rows(ids)
