"""A whole decoding step on the device: draft, target, choice, walk and commit, with one fetch at its end.

Owns the step's computation in a size class, its buffers and its captured graph. It is for plain decoding
and for trees verified greedily, by coupled draws, against the target alone, or by blocks, of requests whose
logits nothing changes; everything else takes the host's path (`declined` counts why) and gives the same text.
Nothing inside the step reads a value on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.device.flight import Fetch, Flight
from specdec.device.graphs import CapturedCall
from specdec.device.packing import Arrays
from specdec.device.runner import DeviceRunner
from specdec.device.staging import FixedStaging
from specdec.device.step_packing import pack_inputs, step_class, step_inputs, wanted_depth
from specdec.device.step_walks import StepWalks
from specdec.drafter import Drafter, GrowingDrafter
from specdec.kernels import kernel
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.step_records import (
    StepClass,
    StepInputs,
    after_carry,
    carry_of,
    row_starts,
    slots_of,
)
from specdec.kernels.tree_records import GrownTrees, TreeRows
from specdec.runner import ModelRunner
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree
from specdec.verification.block import BLOCK
from specdec.verification.coupled import COUPLED
from specdec.verification.greedy import GREEDY
from specdec.verification.target_only import TARGET_ONLY

# each graph keeps its launches and its class's buffers; beyond so many the oldest class goes
MAX_CLASSES = 48


@dataclass
class _ClassState:
    """What one size class keeps: input buffers at fixed places, and the call that runs it."""

    staging: FixedStaging
    inputs: StepInputs
    call: Callable[[], tuple[Tensor, Tensor, Tensor | None]]


class DeviceStep:
    """Runs decoding steps of a `DeviceRunner`.

    Args:
        runner: whose target, pool and kernels are used.
        drafter: of the engine; trees grow on the device if it can do that.
        graphs: whether steps are captured as CUDA graphs.
    """

    def __init__(self, runner: DeviceRunner, drafter: Drafter | None, *, graphs: bool) -> None:
        self.runner = runner
        self.graphs = graphs
        self.steps = 0
        self._block_size = runner.cache.block_size
        self.declined: Counter[str] = Counter()
        self.grower = drafter if isinstance(drafter, GrowingDrafter) else None
        backend = runner.ops.backend
        self._walks = StepWalks(backend)
        self._ops = {name: kernel(name, backend) for name in ("tree_masks", "commit_path")}
        self._classes: dict[StepClass, _ClassState] = {}

    def takes(self, plan: list[ScheduledSequence]) -> bool:
        """Whether the step verifies this plan; a plan it does not take is counted under the reason."""
        reason = next((why for share in plan if (why := _reason(share))), None)
        if reason is None and any(_is_drawn(share) for share in plan) and not self.grows(plan):
            reason = "trees drawn by the host"
        if reason is not None:
            self.declined[reason] += 1
        return reason is None

    def grows(self, plan: list[ScheduledSequence]) -> bool:
        """Whether the trees of a plan it takes can grow on the device."""
        if self.grower is None:
            return False
        depth = step_class(plan, None, self._block_size).depth
        return all(self.grower.can_grow(share.seq, depth) for share in plan if wanted_depth(share))

    @torch.inference_mode()
    def launch(self, plan: list[ScheduledSequence], trees: list[DraftTree] | None) -> Flight:
        """Begin a step; `trees` are the host's, or None to grow them. It commits the KV rows of its paths."""
        size = step_class(plan, trees, self._block_size)
        arrays = pack_inputs(plan, trees, size)
        state = self._load(size, arrays)
        if state.inputs.states is not None:
            self._load_states(plan, state.inputs.states)
        return self._start(plan, size, state, is_ahead=False)

    @torch.inference_mode()
    def launch_after(
        self, flight: Flight, plan: list[ScheduledSequence], source: list[int], gained: list[int]
    ) -> Flight:
        """Begin the step after one that was not read; nothing else may have been launched in between.

        Args:
            flight: the step before.
            plan: shares of sequences of that step, their tables extended by what it may commit.
            source: the places of these in `flight.plan`.
            gained: tokens that each of these may get from that step.
        """
        size = step_class(plan, None, self._block_size, gained)
        state = self._load(size, pack_inputs(plan, None, size, source))
        rows, inputs = state.staging.views["source"], state.inputs
        width = min(inputs.carry.shape[1], flight.carry.shape[1])
        inputs.carry[:, :width] = flight.carry.index_select(0, rows)[:, :width]
        if inputs.states is not None:
            assert flight.states is not None, "who drafts from taps has those of the step before"
            count = min(inputs.states.shape[1], flight.states.shape[1])
            inputs.states[:, :count] = flight.states.index_select(0, rows)[:, :count]
        return self._start(plan, size, state, is_ahead=True)

    def _load(self, size: StepClass, arrays: Arrays) -> _ClassState:
        state = self._classes.get(size) or self._make_class(size, arrays)
        state.staging.load(arrays)
        return state

    def _start(
        self, plan: list[ScheduledSequence], size: StepClass, state: _ClassState, *, is_ahead: bool
    ) -> Flight:
        lines, carry, states = state.call()
        self.steps += 1
        return Flight(
            plan=plan,
            size=size,
            fetch=Fetch(lines),
            carry=carry,
            # a captured call gives the same memory again
            states=None if states is None else states.clone(),
            is_ahead=is_ahead,
        )

    def _make_class(self, size: StepClass, arrays: Arrays) -> _ClassState:
        while len(self._classes) >= MAX_CLASSES:
            self._classes.pop(next(iter(self._classes)))
        device = torch.device(self.runner.decoder.device)
        staging = FixedStaging(arrays, device)
        states = None
        if size.width:
            hidden = self.runner.decoder.config.hidden_size
            shape = (size.sequences, size.depth + 1, len(self.runner.boundaries), hidden)
            states = torch.zeros(shape, dtype=self.runner.decoder.dtype, device=device)
        carry = torch.zeros((size.sequences, size.depth + 3), dtype=torch.int64, device=device)
        inputs = step_inputs(staging.views, states, carry)

        def compute() -> tuple[Tensor, Tensor, Tensor | None]:
            return self.compute(size, inputs)

        self._classes[size] = _ClassState(staging, inputs, CapturedCall(compute) if self.graphs else compute)
        return self._classes[size]

    def _load_states(self, plan: list[ScheduledSequence], states: Tensor) -> None:
        for index, share in enumerate(plan):
            if wanted_depth(share):
                seq = share.seq
                pending = (
                    seq.pending_states[0] if len(seq.pending_states) == 1 else torch.cat(seq.pending_states)
                )
                new = seq.num_computed - seq.draft_computed
                states[index, :new].copy_(pending[:new])
                seq.pending_states = []
                seq.draft_computed = seq.num_computed

    def compute(self, size: StepClass, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """The step itself: lines of results [B, ...], the carry, taps of committed rows [B, D + 1, ...]."""
        inputs = after_carry(inputs)
        trees = inputs.given
        if trees is None:
            assert self.grower is not None, "trees grow on the device where a drafter can do that"
            trees = self.grower.grow(size, inputs)
        normed, taps, positions = self._target_rows(size, inputs, trees)
        logits = self.runner.target.logits(normed)
        flat = TreeRows(
            node_start=row_starts(size.sequences, size.nodes, logits.device),
            parents=trees.parents.flatten(),
            token_ids=trees.token_ids.flatten(),
            max_nodes=size.nodes,
            max_depth=size.depth,
        )
        walk = self._walks(size, inputs, flat, logits, positions, trees.draft_probs)
        for part in self.runner.cache.parts:
            self._ops["commit_path"](
                part,
                walk.accepted_nodes,
                inputs.context_len,
                inputs.block_tables,
                block_size=self._block_size,
            )
        numbers = (walk.num_accepted, walk.next_token_ids, walk.is_bonus, walk.failed, trees.num_nodes)
        lines = torch.cat(
            (
                torch.stack([number.long() for number in numbers], dim=1),
                walk.accepted_nodes.long(),
                trees.token_ids,
                trees.parents.long(),
            ),
            dim=1,
        )
        carry = carry_of(trees, walk)
        if taps is None:
            return lines, carry, None
        nodes = torch.nn.functional.pad(walk.accepted_nodes.long().clamp(min=0), (1, 0))
        rows = flat.node_start[:-1].long().unsqueeze(1) + nodes
        return lines, carry, taps[rows]

    def _target_rows(
        self, size: StepClass, inputs: StepInputs, trees: GrownTrees
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run the target on every node; also the nodes' positions [B * N]."""
        depths, seen = self._ops["tree_masks"](trees.parents, max_depth=size.depth)
        node = torch.arange(size.nodes, dtype=torch.int32, device=depths.device)
        is_node = (node < trees.num_nodes.unsqueeze(1)) & inputs.active.unsqueeze(1)
        rows = inputs.context_len.unsqueeze(1) + node
        positions = (inputs.context_len.unsqueeze(1) + depths).masked_fill(~is_node, 0).flatten().int()
        batch = DeviceBatch(
            query_start=row_starts(size.sequences, size.nodes, depths.device),
            context_len=inputs.context_len,
            block_tables=inputs.block_tables,
            mask_words=seen.flatten(0, 1),
            positions=positions,
            slots=slots_of(inputs.block_tables, rows, is_node, self._block_size).flatten(),
            block_size=self._block_size,
            max_queries=size.nodes,
        )
        normed, taps = self.runner.target(trees.token_ids.flatten(), batch)
        return normed, taps, positions


def device_step(runner: ModelRunner, drafter: Drafter | None, config: EngineConfig) -> DeviceStep | None:
    """The decoding step of an engine; None on the processor's own path."""
    if not isinstance(runner, DeviceRunner):
        return None
    captures = config.cuda_graphs and config.device != "cpu" and runner.ops.backend == "triton"
    return DeviceStep(runner, drafter, graphs=captures)


def _is_drawn(share: ScheduledSequence) -> bool:
    """Whether a share's tree comes with the laws that its nodes were drawn from."""
    return share.seq.rule.rule is BLOCK and wanted_depth(share) > 0


def _reason(share: ScheduledSequence) -> str | None:
    """Why a share takes the host's path; None if it does not."""
    seq = share.seq
    if share.is_prefill or not share.reaches_root:
        return "prompt"
    if seq.rule.rule not in (GREEDY, COUPLED, BLOCK, TARGET_ONLY):
        return f"rule {seq.rule.rule.name}"
    if seq.processor is not None:
        return "changed logits"
    if seq.params.logprobs is not None:
        return "logprobs"
    if seq.params.typical_p < 1.0:
        return "typical_p"
    if seq.simulated is not None:
        return "simulated acceptance"
    return None
