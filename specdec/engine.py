"""The serving loop: schedule, propose, run, verify, commit.

`Engine` owns the target, the KV pool, the scheduler and one drafter. Each request is verified by its own rule
(`specdec.rule_choice`); the rules it takes by itself are exact. Greedy and coupled text is a function of seed
and target alone, whatever was drafted; under the other rules it also depends on the drafter, and never on
batching, chunking or preemption (fp32).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from specdec.acceptance import commit_tokens, note_prompt, verify_step
from specdec.admission import Admission, grammars_of
from specdec.blocks import BlockManager
from specdec.config import EngineConfig, ModelConfig, check_shared
from specdec.cost_model import engine_costs
from specdec.device.flight import Flight
from specdec.device.pipeline import Pipeline
from specdec.device.pool_size import first_blocks, fit_pool
from specdec.device.selection import check_deterministic_trees, device_operations
from specdec.device.step import device_step
from specdec.drafter import Drafter, TapDrafter, TargetView
from specdec.engine_setup import DTYPES, load_decoder, make_drafter, make_runner
from specdec.errors import SpecdecError
from specdec.hub import resolve_target
from specdec.memory import MemoryReport, memory_report
from specdec.models.decoder import Decoder
from specdec.node_budget import NodeBudget
from specdec.pieces import PieceReader
from specdec.prefix_setup import build_prefix_cache, finish_rows, prefix_use
from specdec.proposals import propose_trees, tell_budget
from specdec.request_options import RequestOptions
from specdec.requests import GenerationResult, Prompt, PromptEncoder, StreamPiece, result_of
from specdec.runner import StepOutput
from specdec.sampling_params import one_each
from specdec.scheduler import ScheduledSequence, Scheduler
from specdec.sequence import SamplingParams, Sequence
from specdec.step_logits import StepLogits, TreeLogits
from specdec.step_times import StartTimes, StepTimes, StepWatch
from specdec.tree import DraftTree
from specdec.verification.registry import RULES
from specdec.verification.result import VerifyResult
from specdec.verification.rules import Rule


class Engine:
    """Continuous-batching text generation with speculative decoding.

    Args:
        target: a Hugging Face folder, a name that `specdec pull` knows, or another engine, whose
            weights are then shared (its KV pool is not).
        draft: None, a drafter spelling for `specdec.drafts` ("ngram", a draft folder, or
            "ngram+FOLDER"), or a drafter built by the caller from the engine's `TargetView`.
        config: sizes and speculation defaults.
        rules: verification rules of the caller's own (a judge's), which requests then name as any other.
        clock: seconds that never go back; deadlines and cache times are measured on it.

    Raises:
        SpecdecError: an unsupported or damaged target, a draft that does not belong to it, or a KV
            pool of fewer than two blocks.
    """

    def __init__(
        self,
        target: str | Path | Engine,
        draft: str | Path | Callable[[TargetView], Drafter] | None = None,
        config: EngineConfig | None = None,
        rules: Iterable[Rule] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        share: Engine | None = target if isinstance(target, Engine) else None
        self.config: EngineConfig = config or (share.config if share else EngineConfig())
        self.config.check_draft(drafts=draft is not None)
        folder: Path = share.target_folder if share else resolve_target(str(target))
        self.target_folder: Path = folder
        self.model_config = ModelConfig.from_folder(folder)
        self.max_model_len = self.model_config.served_length(self.config.max_model_len)
        dtype = DTYPES[self.config.dtype]
        self.operations = device_operations(self.config, dtype)
        self.startup = StartTimes()
        if share is not None:
            check_shared(self.config, self.max_model_len, share.config, share.max_model_len)
            self.decoder: Decoder = share.decoder
        else:
            self.decoder = load_decoder(self.config, self.model_config, folder, self.max_model_len)
        self.startup.end("target")
        num_blocks = first_blocks(self.config, self.model_config, self.max_model_len, dtype.itemsize)
        self.encoder: PromptEncoder = share.encoder if share else PromptEncoder(folder)
        self.startup.end("tokenizer")
        self.drafter = make_drafter(
            draft,
            self.config,
            self.decoder,
            self.encoder,
            self.operations,
            folder=folder,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
        )
        # asking a protocol takes longer than what a step does with the answer
        self._tap_drafter = self.drafter if isinstance(self.drafter, TapDrafter) else None
        self.startup.end("draft")
        self.runner = make_runner(
            self.config,
            self.decoder,
            self.drafter,
            self.operations,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
        )
        num_blocks, self._workspace = fit_pool(self.runner, self.drafter, self.config, self.max_model_len)
        self.device_step = device_step(self.runner, self.drafter, self.config)
        self.prefixes = build_prefix_cache(self.config, self.runner.cache, self.drafter, folder, clock)
        self.blocks = BlockManager(num_blocks, self.config.block_size, self.prefixes)
        scratch_rows = self.drafter.scratch_rows if self.drafter else lambda spec: 0
        self.budget = NodeBudget(engine_costs(self.config, self.decoder, folder, drafts=bool(self.drafter)))
        self.scheduler = Scheduler(self.config, self.blocks, scratch_rows, self.prefixes, self.budget)
        self.pipeline = Pipeline(self.scheduler, overlap=self.config.overlap)
        self.admission: Admission = Admission(
            config=self.config,
            model_config=self.model_config,
            encoder=self.encoder,
            drafter=self.drafter,
            max_model_len=self.max_model_len,
            pool_rows=num_blocks * self.config.block_size,
            shared_acceptance=self.budget.shared,
            rules={**RULES, **{rule.name: rule for rule in rules}},
            grammars=share.admission.grammars if share else grammars_of(self.encoder, self.model_config),
            plans_ahead=self.device_step is not None,
        )
        self.startup.end("pool and costs")
        self.times = StepTimes()
        # those of the last step that raised: a server ends them, since any of them may be why
        self.failed: list[Sequence] = []
        self._next_id = 0

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Generate for all prompts together; results in order.

        Prompts are strings (tokenised with the tokenizer's own special tokens), token-id lists, or
        chat message lists (rendered with the target's template).

        Raises:
            SpecdecError: a prompt that cannot be decoded; nothing is generated then.
        """
        sequences = self._add_all(prompts, params)
        try:
            while not all(seq.is_finished for seq in sequences):
                self.step()
        finally:
            self.abort(sequences)
        return [result_of(seq) for seq in sequences]

    def stream(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Iterator[StreamPiece]:
        """Like `generate`, in pieces as they are committed; closing the iterator aborts the rest."""
        sequences = self._add_all(prompts, params)
        readers = [PieceReader(seq, index) for index, seq in enumerate(sequences)]
        try:
            while readers:
                pieces = [piece for reader in readers if (piece := reader.take())]
                ended = {piece.index for piece in pieces if piece.result is not None}
                readers = [reader for reader in readers if reader.index not in ended]
                yield from pieces
                # another consumer of this engine may have stepped for us meanwhile
                if readers and not pieces:
                    self.step()
        finally:
            self.abort(sequences)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One turn of the loop over every sequence that has room; returns those that finished."""
        expired = self.scheduler.expired(self.clock())
        for seq in expired:
            seq.finish("timeout")
            seq.detokenizer.flush()
        self._leave(expired)
        flight = self.pipeline.take()
        plan = flight.live if flight is not None else self._schedule()
        if not plan:
            assert expired, "a step was asked for, but no sequence has work that fits the pool"
            return expired
        try:
            self._run(plan, flight)
            finished = [share.seq for share in plan if share.seq.is_finished]
            self._leave(finished)
        except BaseException:
            # what the step had begun is unknown: finished sequences leave, the others start over
            self.failed = [share.seq for share in plan]
            self.pipeline.drop()
            for share in plan:
                self._release_draft(share.seq)
                if share.seq.is_finished:
                    self.scheduler.remove(share.seq)
                else:
                    self.scheduler.preempt(share.seq)
            raise
        return expired + finished

    def _leave(self, finished: list[Sequence]) -> None:
        """Take finished sequences out; what they computed stays cached."""
        if self.prefixes is not None and finished:
            finish_rows(finished, self.prefixes, self.drafter, self.config.max_kv_ttl_s, self.clock())
        self._remove(finished)

    def _remove(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self.pipeline.hold(seq)
            self.scheduler.remove(seq)
            self._release_draft(seq)
        self.pipeline.settle()

    def _schedule(self) -> list[ScheduledSequence]:
        plan = self.scheduler.schedule()
        for seq in self.scheduler.preempted:
            self._release_draft(seq)
        return plan

    def _run(self, plan: list[ScheduledSequence], flight: Flight | None) -> None:
        """Propose, run, verify and commit for the scheduled sequences; `flight` if they run already."""
        watch, step = StepWatch(), self.device_step
        if flight is None and step is not None and step.runner is self.runner and step.takes(plan):
            drafts = None if step.grows(plan) else propose_trees(self.drafter, plan)
            flight = self.pipeline.launched(step.launch(plan, drafts))
        if flight is not None and step is not None:
            watch.end("propose")
            self.pipeline.follow(step)
            trees, output, results = flight.read(plan)
            self.pipeline.landed()
            watch.end("target")
            watch.end("verify")
        else:
            trees = propose_trees(self.drafter, plan)
            watch.end("propose")
            output = self.runner.run(plan, trees)
            watch.end("target")
            results = self._verify(plan, trees, output)
            watch.end("verify")
            self.runner.commit(plan, [result.accepted_nodes if result else [] for result in results])
        tell_budget(self.budget, plan, trees, results, watch.cpu if flight is None else None)
        # their states would pile up until the first draft, and nobody could share the prompt until then
        read = [share.seq for share in plan if share.is_prefill and share.seq.spec]
        for index, share in enumerate(plan):
            self._commit(share, trees[index], results[index], output, index)
        if self._tap_drafter is not None:
            self._tap_drafter.absorb([seq for seq in read if not seq.is_finished])
        if self.prefixes is not None:
            for seq in (share.seq for share in plan if not share.seq.is_finished):
                self.prefixes.index(seq)
        self.pipeline.committed()
        watch.end("commit")
        self.times.add(watch)

    def audit(self) -> None:
        """Check the KV bookkeeping: every block is free, cached, or held by as many texts as it says."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        self.blocks.audit([*(seq.block_table for seq in sequences), *self.pipeline.held_tables])
        if self.prefixes is not None:
            self.prefixes.audit(self.blocks, sequences)

    def _verify(
        self, plan: list[ScheduledSequence], trees: list[DraftTree], output: StepOutput
    ) -> list[VerifyResult | None]:
        return verify_step(plan, trees, output)

    def forget_estimates(self) -> None:
        """Speculate from here on as a new engine does: acceptance unseen, costs of passes as at the start.

        Between requests: one in the works goes by what it has seen itself.
        """
        assert not self.scheduler.running, "requests are still in the works"
        assert not self.scheduler.waiting, "requests wait to be worked on"
        self.budget.forget()

    def memory_report(self) -> MemoryReport:
        """Bytes by purpose; the largest step's workspace is measured on a card, and stated elsewhere."""
        return memory_report(self.runner, self.drafter, self.config, self.max_model_len, self._workspace)

    def add(self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None) -> Sequence:
        """Queue one request; `step` works on it.

        Raises:
            SpecdecError: a prompt that cannot be decoded.
        """
        seq = self.prepare(prompt, params, options)
        self.scheduler.add(seq)
        return seq

    def prepare(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> Sequence:
        """A request ready for the scheduler; another thread than the one that steps may make it.

        Raises:
            SpecdecError: a prompt that cannot be decoded.
        """
        seq = self.admission.make_sequence(self._next_id, prompt, params)
        if self.operations and self.drafter and seq.spec:
            check_deterministic_trees(self.config, self.drafter.makes_chains(seq.spec))
        seq.options = options or RequestOptions()
        seq.prefix_use = prefix_use(seq, self.prefixes, self.drafter)
        if seq.options.deadline_s is not None:
            seq.deadline = self.clock() + seq.options.deadline_s
        if self.prefixes is not None:
            self.prefixes.stage(seq)
        self._next_id += 1
        return seq

    def _add_all(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
    ) -> list[Sequence]:
        if isinstance(prompts, str):
            raise SpecdecError("prompts must be a list; wrap a single prompt in [...]")
        added: list[Sequence] = []
        try:
            for prompt, chosen in zip(prompts, one_each(params, len(prompts)), strict=True):
                added.append(self.add(prompt, chosen))
        except SpecdecError:
            self.abort(added)
            raise
        return added

    def _commit(
        self,
        share: ScheduledSequence,
        tree: DraftTree,
        result: VerifyResult | None,
        output: StepOutput,
        index: int,
    ) -> None:
        """Keep a sequence's new states and write its tokens down; `index` is its place in the plan."""
        seq, row, was_prefill = share.seq, output.row_start[index], share.is_prefill
        note_prompt(share, output, row)
        accepted = result.accepted_nodes if result else []
        root_row = row + share.num_rows - 1
        rows = [*range(row, root_row + 1), *(root_row + node for node in accepted)]
        states = output.states_of(index, rows) if seq.spec is not None else None
        if states is not None:
            seq.add_states(states, self.config.block_size)
        seq.num_computed += share.num_rows + len(accepted)
        if result is not None:
            logits = TreeLogits(StepLogits.of(output.logits), output.logits_start[index], tree)
            commit_tokens(seq, tree, result, logits, was_prefill=was_prefill)

    def _release_draft(self, seq: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.release(seq.seq_id)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End requests wherever they are, between two steps; finished ones stay as they are."""
        ended = list(sequences)
        for seq in ended:
            if not seq.is_finished:
                seq.finish("abort")
        self._remove(ended)
