"""Turning a request into the decoding state the loop works on, or refusing it with a reason.

Owns every check on a single request; knows nothing of other requests or of the loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.detokenize import IncrementalDetokenizer
from specdec.drafter import Drafter
from specdec.errors import SpecdecError
from specdec.exactness import exact_against
from specdec.grammar import GrammarCompiler
from specdec.paged_kv import head_row_bytes
from specdec.processors import RequestProcessor
from specdec.random_streams import RandomStream
from specdec.requests import Prompt, PromptEncoder
from specdec.rule_choice import choose_rule, depends_on_drafts
from specdec.sampling_params import SamplingParams
from specdec.sequence import Sequence, check_prompt
from specdec.simulated import SimulatedAcceptance
from specdec.speculation import Acceptance, SpeculationController
from specdec.verification.rules import Rule

# tokens of the prompt that the detokenizer sees, so that an answer's first token is decoded in context
PROMPT_TAIL = 8


def grammars_of(encoder: PromptEncoder, model_config: ModelConfig) -> GrammarCompiler:
    """The grammars of a target's requests."""
    return GrammarCompiler(encoder.tokenizer, model_config.vocab_size, model_config.eos_token_ids)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Limits of an engine, and what a request needs of it."""

    config: EngineConfig
    model_config: ModelConfig
    encoder: PromptEncoder
    drafter: Drafter | None
    max_model_len: int
    pool_rows: int
    rules: Mapping[str, Rule]
    grammars: GrammarCompiler
    shared_acceptance: Acceptance | None = None
    plans_ahead: bool = False

    @property
    def exact_against(self) -> str:
        """Whose plain text an exact rule leaves here (`specdec.exactness`)."""
        return exact_against(weights=self.config.weights, kv_cache_dtype=self.config.kv_cache_dtype)

    def make_sequence(self, seq_id: int, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Decoding state of a new request.

        Raises:
            SpecdecError: a prompt that cannot be decoded, or that does not fit the context or the pool.
        """
        token_ids = self.encoder.encode(prompt)
        check_prompt(token_ids, self.model_config.vocab_size, self.max_model_len)
        if params.stop and self.encoder.tokenizer is None:
            raise SpecdecError("stop strings need a tokenizer, which the target lacks; use stop_token_ids")
        self._check_ids(params)
        spec = (params.spec or self.config.spec) if self.drafter and params.speculate else None
        rule = choose_rule(params, spec, self.drafter, rules=self.rules, allow_lossy=self.config.allow_lossy)
        needs_whole_trees = spec is not None and depends_on_drafts(rule)
        behind = self._rows_behind(spec) if spec and needs_whole_trees else 0
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.model_config.eos_token_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        cost = self.drafter.relative_cost(spec) if self.drafter and spec else 0.0
        return Sequence(
            seq_id=seq_id,
            prompt_len=len(token_ids),
            token_ids=token_ids,
            params=params,
            spec=spec,
            stream=RandomStream(seed),
            max_len=self._max_len(len(token_ids), params.max_tokens, behind),
            stop_ids=frozenset(stop_ids),
            detokenizer=IncrementalDetokenizer(
                self.encoder.tokenizer, token_ids[-PROMPT_TAIL:], params.stop, params.min_tokens
            ),
            controller=SpeculationController(
                adaptive=bool(spec and spec.adaptive),
                draft_cost=cost,
                alone=needs_whole_trees,
                whole=needs_whole_trees,
                lags=self.plans_ahead,
                shared=None if needs_whole_trees else self.shared_acceptance,
            ),
            simulated=self._simulated(params, spec),
            processor=self._processor(params, len(token_ids), frozenset(stop_ids)),
            rule=rule,
            needs_whole_trees=needs_whole_trees,
            exact_against=self.exact_against,
        )

    def _simulated(self, params: SamplingParams, spec: SpecConfig | None) -> SimulatedAcceptance | None:
        """What draws accepted lengths; None as a rule, and for requests that draft nothing."""
        length = self.config.simulate_acceptance
        if length is None or spec is None:
            return None
        if params.grammar is not None:
            raise SpecdecError("simulated acceptance commits tokens that no grammar allows; drop the grammar")
        spec.check_simulated(length)
        return SimulatedAcceptance(length)

    def _processor(
        self, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int]
    ) -> RequestProcessor | None:
        """What changes the request's logits; None when nothing does."""
        if not params.changes_logits:
            return None
        bad_words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bad_words += self.encoder.encode_word(word) if isinstance(word, str) else [word]
        grammar = self.grammars.start(params.grammar, prompt_len) if params.grammar else None
        return RequestProcessor(
            params, prompt_len=prompt_len, stop_ids=stop_ids, bad_words=bad_words, grammar=grammar
        )

    def _check_ids(self, params: SamplingParams) -> None:
        """Refuse token ids outside the target's vocabulary."""
        listed = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias,
            "bad_words": [token for word in params.bad_words if not isinstance(word, str) for token in word],
        }
        for name, ids in listed.items():
            if ids and max(ids) >= self.model_config.vocab_size:
                raise SpecdecError(
                    f"{name} ({max(ids)}) must hold token ids in 0..{self.model_config.vocab_size - 1}"
                )

    def _rows_behind(self, spec: SpecConfig) -> int:
        """Rows behind the text that a step with a whole tree uses."""
        assert self.drafter is not None, "only a drafter makes trees"
        return max(spec.max_nodes, self.drafter.scratch_rows(spec))

    def _max_len(self, prompt_len: int, max_tokens: int | None, behind: int) -> int:
        """Length at which the request ends; the pool must hold it alone, and `behind` rows more."""
        room = self.pool_rows - behind
        if max_tokens is None:
            longest = min(self.max_model_len, room)
        else:
            longest = min(self.max_model_len, prompt_len + max_tokens)
        if longest > room or prompt_len >= room:
            tree = f" and trees of {behind} rows" if behind else ""
            raise SpecdecError(
                f"a prompt of {prompt_len} tokens with max_tokens ({max_tokens}){tree} does not fit the KV "
                f"pool of {self.pool_rows} tokens; raise kv_tokens or lower max_tokens"
            )
        return longest


def free_memory_bytes() -> int | None:
    """Memory that new tensors may take on this machine; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def pool_blocks(config: EngineConfig, model: ModelConfig, max_model_len: int, item_bytes: int) -> int:
    """Blocks of the KV pool: as configured, else room for every slot's longest text inside the memory limit.

    Raises:
        SpecdecError: fewer than two blocks, or more than the memory that is free.
    """
    head_bytes = head_row_bytes(model.head_dim, item_bytes, coded=config.kv_cache_dtype != "auto")
    row_bytes = 2 * model.num_layers * model.num_kv_heads * head_bytes
    tokens = config.kv_tokens
    free = free_memory_bytes() if config.device == "cpu" else None
    if tokens is None:
        # beside its text a sequence needs room for a tree
        wanted = config.max_num_seqs * (max_model_len + 64)
        limit = config.kv_memory_bytes if free is None else min(config.kv_memory_bytes, free * 9 // 10)
        tokens = min(wanted, limit // row_bytes)
    elif free is not None and tokens * row_bytes > free:
        raise SpecdecError(
            f"kv_tokens ({tokens}) needs {tokens * row_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB of it "
            f"are free: lower it to {free * 9 // 10 // row_bytes} or less, or take a smaller dtype"
        )
    blocks = -(-tokens // config.block_size)
    if blocks < 2:
        raise SpecdecError(
            f"the KV pool ({tokens} tokens) must hold at least two blocks of {config.block_size}; raise "
            "kv_tokens or kv_memory_bytes"
        )
    return blocks
