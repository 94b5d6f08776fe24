"""Equal-budget training of heads on many tap sets, or by many recipes: does a choice show in acceptance?

Owns what the arms share (target, conversations, held-out split, vocabulary, states of every boundary) and
the life of one arm: start, train, measure, record. Which sets are compared is `study_arms`, how an arm is
measured `study_measure`; the comparison of the records belongs to the command.

Arms differ in their taps, their seed and what their recipe changes: same conversations, order, vocabulary,
and, unless a recipe says otherwise, steps, start rule and per-tap norms. A record is written when an arm is
done; a killed study goes on with the arm it was at. Several processes may work on one folder: each arm is
taken by one of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.drafts.checkpoint import DraftContract, cast_head, save_draft
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model, load_tokenizer, num_decoder_layers, template_hash
from specdec.provenance import folder_fingerprint, read_json, sha256_text, write_json_atomic
from specdec.train.chat_data import load_chat_data
from specdec.train.checkpoint import FOLDER
from specdec.train.evaluate import sequence_counts
from specdec.train.head_init import head_weight
from specdec.train.head_start import choose_vocab, start_head
from specdec.train.precision import settle_dtype
from specdec.train.prepare import fill_progress
from specdec.train.sequences import TrainSequence
from specdec.train.states import StoredStates, TapSubset, TargetStates
from specdec.train.study_arms import Arm, TapSet, check_taps
from specdec.train.study_config import StudyConfig
from specdec.train.study_measure import ServedPrompts, conversation_record
from specdec.train.trainer import Trainer

SCHEMA = "specdec.study-arm/1"
RESULT_NAME = "result.json"


class Study:
    """A target, its conversations and their states, ready to train arms on.

    Args:
        target: Hugging Face folder.
        data: JSONL of the target's answers, or the spelling of a streamed set.
        out: folder of the study; a record an arm goes to `arms/`, states of all boundaries to `states/`.
        config: the budget.
        states_cache: where states are kept, if not in `out`.
        only: the one tap set of all arms; states of every boundary are kept without it.
        report: called with one line of progress.

    Raises:
        SpecdecError: too little data, or anything wrong with the folders.
    """

    def __init__(
        self,
        target: str | Path,
        data: str | Path,
        out: str | Path,
        config: StudyConfig,
        *,
        states_cache: str | Path | None = None,
        only: TapSet | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        config = replace(config, training=settle_dtype(config.training, "cpu"))
        self.config, self.out, self.report, self.target = config, Path(out), report, Path(target)
        self.model = load_hf_model(target, dtype=config.training.target_dtype)
        self.num_layers = num_decoder_layers(self.model)
        tokenizer = load_tokenizer(target)
        vocab_size = head_weight(self.model).shape[0]
        chats = load_chat_data(data, tokenizer, max_length=config.training.max_length, vocab_size=vocab_size)
        self.training, self.held_out = split(chats.sequences, config)
        self.vocab: DraftVocab = choose_vocab(
            self.training, tokenizer, self.model, vocab_size, config.training
        )
        self.contract = DraftContract(
            target_fingerprint=folder_fingerprint(target), template_hash=template_hash(tokenizer), training={}
        )
        tokens = sum(s.num_answer_tokens for s in self.training)
        report(
            f"{len(self.training)} training conversations with {tokens:,} answer tokens, "
            f"{len(self.held_out)} held out"
        )
        self.boundaries = tuple(range(self.num_layers + 1))
        if only is not None:
            check_taps(only.names[0], only.boundaries, self.num_layers)
            self.boundaries = only.boundaries
        self.states = StoredStates(
            states_cache or self.out / "states",
            TargetStates(self.model, self.boundaries),
            target_fingerprint=self.contract.target_fingerprint,
            dtype=config.training.target_dtype,
        )
        self._served: ServedPrompts | None = None

    @property
    def hash(self) -> str:
        """Identifies what every arm of the study shares; records of another budget do not mix with it."""
        shared = {
            "budget": {k: v for k, v in asdict(self.config).items() if k != "keep_heads"},
            "target": self.contract.target_fingerprint,
            "training": [s.content_hash for s in self.training],
            "held_out": [s.content_hash for s in self.held_out],
        }
        return sha256_text(json.dumps(shared, sort_keys=True))

    def fill_states(self) -> None:
        """Compute and keep the states of every boundary: minutes, once for all arms."""
        everything = [*self.training, *self.held_out]
        self.states.check_disk(everything)
        self.states.fill(everything, fill_progress(self.report))
        self.states.release()

    def run(self, arms: Sequence[Arm], until: float | None = None) -> list[dict[str, Any]]:
        """Train and measure the arms that have no record yet; returns all records that exist now.

        No arm is begun after `until`, a time of `time.monotonic`.
        """
        self.fill_states()
        for number, arm in enumerate(arms):
            folder = self.out / "arms" / arm.key
            folder.mkdir(parents=True, exist_ok=True)
            if self._record(arm) is not None:
                continue
            if until is not None and time.monotonic() > until:
                self.report(f"time is up before {arm.key}; the same command goes on")
                break
            lock = FileLock(folder / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self.report(f"{arm.key}: another process is at it")
                continue
            try:
                if self._record(arm) is None:
                    if self.config.served:
                        # a target or a prompt that cannot be served is refused before a head is trained.
                        self._serving()
                    self.report(f"arm {number + 1} of {len(arms)}: {arm.key}")
                    self._run_arm(arm, folder)
            finally:
                lock.release()
        found = [self._record(arm) for arm in arms]
        return [record for record in found if record is not None]

    def _record(self, arm: Arm) -> dict[str, Any] | None:
        path = self.out / "arms" / arm.key / RESULT_NAME
        if not path.exists():
            return None
        record = read_json(path)
        if record.get("schema") != SCHEMA or record.get("study") != self.hash:
            raise SpecdecError(
                f"--out ({self.out}): {path} is of a study with another budget or data; name another folder"
            )
        if arm.recipe is not None and record["recipe"] != arm.recipe.to_dict():
            raise SpecdecError(
                f"--out ({self.out}): {path} is of a recipe {arm.recipe.name} with other changes, "
                f"{record['recipe']['changes']}; give the recipe another name"
            )
        return record

    def _run_arm(self, arm: Arm, folder: Path) -> None:
        begun = time.monotonic()
        training = self.config.training
        training = training if arm.recipe is None else arm.recipe.applied(training)
        changes = {} if arm.recipe is None else {"recipe": arm.recipe.to_dict()}
        config = replace(training, seed=arm.seed)
        source = TapSubset(self.states, self.boundaries, arm.boundaries)
        start = start_head(self.model, arm.boundaries, self.vocab, self.training, source, config)
        head = start.head
        trainer = Trainer(
            head,
            self.training,
            source,
            config,
            folder,
            contract={"study": self.hash, "arm": arm.key} | changes,
            report=lambda line: None,
            on_evaluate=lambda step, weights: {},
        )
        trainer.resume()
        outcome = trainer.run()
        if not outcome.complete:
            raise SpecdecError(f"stopped at step {outcome.steps} of arm {arm.key}; the same command goes on")
        head.load_state_dict(trainer.served_weights())
        cast_head(head, config.save_dtype)
        offline = sequence_counts(head, source, self.held_out, self.config.chain)
        save_draft(folder, head, self.contract, dtype=config.save_dtype)
        served = self._serving().measure(folder) if self.config.served else []
        record = {
            "schema": SCHEMA,
            "study": self.hash,
            "boundaries": list(arm.boundaries),
            "seed": arm.seed,
            **changes,
            "steps": outcome.steps,
            "last_loss": outcome.last_loss,
            "train_seconds": round(outcome.seconds, 1),
            "rows_per_second": None if outcome.rows_per_second is None else round(outcome.rows_per_second, 1),
            "seconds": round(time.monotonic() - begun, 1),
            "ridge_explained": start.explained,
            "trained_weights": sum(p.numel() for p in head.parameters()),
            "offline": [
                conversation_record(sequence, counts)
                for sequence, counts in zip(self.held_out, offline, strict=True)
            ],
            "served": served,
        }
        write_json_atomic(folder / RESULT_NAME, record)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        if not self.config.keep_heads:
            (folder / "model.safetensors").unlink()
            (folder / "config.json").unlink()
        length = sum(c.committed for c in offline) / max(1, sum(c.steps for c in offline))
        self.report(f"{arm.key}: offline acceptance length {length:.3f}, {record['seconds']:.0f} s")

    def _serving(self) -> ServedPrompts:
        """The engine with plain texts of the served prompts, made on first use."""
        if self._served is None:
            self._served = ServedPrompts(
                self.target,
                self.held_out[: self.config.served],
                self.config.served_tokens,
                self.config.drafting(),
            )
        return self._served


def split(
    sequences: Sequence[TrainSequence], config: StudyConfig
) -> tuple[list[TrainSequence], list[TrainSequence]]:
    """Training conversations up to the budget, and the held-out ones, both by a hash of the id.

    Raises:
        SpecdecError: fewer conversations or answer tokens than the budget asks for.
    """
    ranked = sorted(sequences, key=lambda s: hashlib.sha256(s.id.encode()).digest())
    held_out, rest = ranked[: config.held_out], ranked[config.held_out :]
    training: list[TrainSequence] = []
    tokens = 0
    for sequence in rest:
        if tokens >= config.train_tokens:
            break
        training.append(sequence)
        tokens += sequence.num_answer_tokens
    if len(held_out) < config.held_out or tokens < config.train_tokens:
        raise SpecdecError(
            f"--data holds {len(sequences)} usable conversations; after {config.held_out} held out, {tokens} "
            f"answer tokens are left and --train-tokens asks for {config.train_tokens}; lower one of them"
        )
    return training, held_out
