"""A whole decoding step on the device: draft, target, choice, walk and commit, with one fetch at its end.

Owns the step's computation in a size class, its buffers and its captured graph. It is for plain decoding and
for trees verified greedily or by coupled draws, of requests whose logits nothing changes; everything else
takes the host's path (`declined` counts why) and gives the same text. Nothing inside the step reads a value
on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.device.graphs import CapturedCall
from specdec.device.packing import Arrays
from specdec.device.runner import DeviceRunner
from specdec.device.staging import FixedStaging
from specdec.device.step_packing import pack_inputs, step_class, step_inputs, unpack_line, wanted_depth
from specdec.drafter import Drafter, GrowingDrafter
from specdec.kernels import kernel
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.step_records import StepClass, StepInputs, row_starts, slots_of
from specdec.kernels.tree_records import GrownTrees, TreeRows
from specdec.runner import ModelRunner, StepOutput
from specdec.sampling import TARGET_FAULT
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree
from specdec.verification.coupled import COUPLED
from specdec.verification.greedy import GREEDY
from specdec.verification.result import VerifyResult

# each graph keeps its launches and its class's buffers; beyond so many the oldest class goes
MAX_CLASSES = 48


@dataclass
class _ClassState:
    """What one size class keeps: input buffers at fixed places, and the call that runs it."""

    staging: FixedStaging
    inputs: StepInputs
    call: Callable[[], tuple[Tensor, Tensor | None]]


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
        self.declined: Counter[str] = Counter()
        self._grower = drafter if isinstance(drafter, GrowingDrafter) else None
        backend = runner.ops.backend
        self._ops = {
            name: kernel(name, backend)
            for name in (
                "greedy_choices",
                "row_laws",
                "race_winners",
                "walk_choices",
                "tree_masks",
                "commit_path",
            )
        }
        self._classes: dict[StepClass, _ClassState] = {}

    def takes(self, plan: list[ScheduledSequence]) -> bool:
        """Whether the step verifies this plan; a plan it does not take is counted under the reason."""
        reason = next((why for share in plan if (why := _reason(share))), None)
        if reason is not None:
            self.declined[reason] += 1
        return reason is None

    def grows(self, plan: list[ScheduledSequence]) -> bool:
        """Whether the trees of a plan it takes can grow on the device."""
        if self._grower is None:
            return False
        depth = step_class(plan, None).depth
        return all(self._grower.can_grow(share.seq, depth) for share in plan if wanted_depth(share))

    @torch.inference_mode()
    def run(
        self, plan: list[ScheduledSequence], trees: list[DraftTree] | None
    ) -> tuple[list[DraftTree], StepOutput, list[VerifyResult | None]]:
        """One step; `trees` are the host's, or None to grow them. KV rows are committed when it returns."""
        size = step_class(plan, trees)
        arrays = pack_inputs(plan, trees, size)
        state = self._classes.get(size) or self._make_class(size, arrays)
        state.staging.load(arrays)
        if state.inputs.states is not None:
            self._load_states(plan, state.inputs.states)
        lines, states = state.call()
        grown, results = self._results(plan, lines.tolist(), size)
        if states is not None:
            # a captured call gives the same memory again
            states = states.clone()
            kept = [
                states[i, : 1 + len(r.accepted_nodes)] if r else states[i, :0] for i, r in enumerate(results)
            ]
        self.steps += 1
        empty = self.runner.target.cos.new_empty(0, self.runner.decoder.config.vocab_size)
        output = StepOutput(
            empty, [0] * len(plan), None, [0] * len(plan), kept if states is not None else None
        )
        return grown, output, results

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
        inputs = step_inputs(staging.views, states)

        def compute() -> tuple[Tensor, Tensor | None]:
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

    def _results(
        self, plan: list[ScheduledSequence], lines: list[list[int]], size: StepClass
    ) -> tuple[list[DraftTree], list[VerifyResult | None]]:
        trees: list[DraftTree] = []
        results: list[VerifyResult | None] = []
        for share, line in zip(plan, lines, strict=False):
            tree, result = unpack_line(line, size)
            if result is None:
                share.seq.finish("error", TARGET_FAULT)
            trees.append(tree)
            results.append(result)
        return trees, results

    def compute(self, size: StepClass, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """The step itself: lines of results int64 [B, ...], and taps of committed rows [B, D + 1, ...]."""
        trees = inputs.given
        if trees is None:
            assert self._grower is not None, "trees grow on the device where a drafter can do that"
            trees = self._grower.grow(size, inputs)
        normed, taps, positions = self._target_rows(size, inputs, trees)
        logits = self.runner.target.logits(normed)
        flat = TreeRows(
            node_start=row_starts(size.sequences, size.nodes, logits.device),
            parents=trees.parents.flatten(),
            token_ids=trees.token_ids.flatten(),
            max_nodes=size.nodes,
            max_depth=size.depth,
        )
        choices, bad = self._ops["greedy_choices"](logits)
        if size.coupled:
            of_row = torch.arange(size.sequences, device=logits.device).repeat_interleave(
                size.nodes, output_size=size.sequences * size.nodes
            )
            laws = self._ops["row_laws"](logits, inputs.params.at(of_row))
            won = self._ops["race_winners"](logits, laws, flat, inputs.seeds, positions)
            choices = torch.where(inputs.is_coupled[of_row], won, choices)
        walk = self._ops["walk_choices"](flat, choices, bad)
        self._ops["commit_path"](
            self.runner.cache.data,
            walk.accepted_nodes,
            inputs.context_len,
            inputs.block_tables,
            block_size=self.runner.cache.block_size,
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
        if taps is None:
            return lines, None
        nodes = torch.nn.functional.pad(walk.accepted_nodes.long().clamp(min=0), (1, 0))
        rows = flat.node_start[:-1].long().unsqueeze(1) + nodes
        return lines, taps[rows]

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
            slots=slots_of(inputs.block_tables, rows, is_node, self.runner.cache.block_size).flatten(),
            block_size=self.runner.cache.block_size,
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


def _reason(share: ScheduledSequence) -> str | None:
    """Why a share takes the host's path; None if it does not."""
    seq = share.seq
    if share.is_prefill or not share.reaches_root:
        return "prompt"
    if seq.rule.rule not in (GREEDY, COUPLED):
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
