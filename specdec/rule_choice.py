"""Which rule verifies a request: the one it names, or an exact one chosen by measurement.

Owns the defaults by situation and every refusal of a rule that does not fit: a lossy one that was not
allowed, a chain rule over trees, a rule of p and q over a drafter that has no q. Does not know how rules
work.
"""

from __future__ import annotations

from collections.abc import Mapping

from specdec.config import SpecConfig
from specdec.drafter import Drafter, DraftMode
from specdec.errors import RuleMismatchError, SpecdecError
from specdec.sampling_params import SamplingParams
from specdec.verification.coupled import COUPLED
from specdec.verification.greedy import GREEDY
from specdec.verification.judge import JUDGE
from specdec.verification.registry import RULES, rule_named
from specdec.verification.rules import BoundRule, Rule, bind

# sampled requests that name no rule; the acceptance of every exact rule stands in results/LOG.md
DEFAULT_FOR_CHAINS = "block"
DEFAULT_FOR_TREES = "coupled"
DEFAULT_FOR_LOOKUPS = "coupled"
# the text is then the same string with and without a drafter
DEFAULT_WITHOUT_DRAFTS = "coupled"


def choose_rule(
    params: SamplingParams,
    spec: SpecConfig | None,
    drafter: Drafter | None,
    *,
    rules: Mapping[str, Rule] = RULES,
    allow_lossy: bool,
) -> BoundRule:
    """The rule of a request, with its knobs.

    At temperature 0 every exact rule is the greedy one, which is then taken.

    Args:
        params: the request's.
        spec: how it speculates, None if it does not.
        drafter: who proposes, None for nobody.
        rules: those there are, by name.
        allow_lossy: whether rules may change the text's law.

    Raises:
        RuleMismatchError: a rule that does not fit the drafter or its trees.
        SpecdecError: a rule that is not known, not allowed, or does not fit the request.
    """
    if params.rule is None:
        if params.rule_knobs:
            raise SpecdecError(f"rule_knobs ({_knobs(params)}) belong to a rule; name it with rule")
        return bind(GREEDY if params.greedy else RULES[_default(spec, drafter)], {})
    bound = rule_named(params.rule, params.rule_knobs, rules)
    rule = bound.rule
    if not rule.is_lossless:
        _check_lossy(bound, params, allow_lossy)
    elif params.greedy:
        return bind(GREEDY, {})
    elif rule is GREEDY:
        raise SpecdecError(f"rule (greedy) needs temperature 0, not {params.temperature:g}")
    if drafter is not None and spec is not None:
        _check_drafts(rule, spec, drafter)
    return bound


def draft_mode(rule: BoundRule) -> DraftMode:
    """How the children of a node must come about for a rule to be worth most and its law to hold."""
    if rule.rule is COUPLED:
        return "coupled"
    if rule.rule.draft == "iid":
        return "iid"
    # a chain's only child, drawn without replacement, is just drawn
    return "without_replacement" if rule.rule.uses_draft_probs else "deterministic"


def depends_on_drafts(rule: BoundRule) -> bool:
    """Whether the text of a seed depends on what was drafted, so that every step must draft in full."""
    return rule.rule not in (GREEDY, COUPLED)


def _default(spec: SpecConfig | None, drafter: Drafter | None) -> str:
    if spec is None or drafter is None:
        return DEFAULT_WITHOUT_DRAFTS
    if not drafter.can_sample:
        return DEFAULT_FOR_LOOKUPS
    return DEFAULT_FOR_CHAINS if drafter.makes_chains(spec) else DEFAULT_FOR_TREES


def _check_lossy(bound: BoundRule, params: SamplingParams, allow_lossy: bool) -> None:
    if not allow_lossy:
        raise SpecdecError(
            f"rule ({bound.label}) is lossy, the text would not have the target's law; allow it with "
            "allow_lossy (--lossy), or name an exact rule"
        )
    if bound.rule is JUDGE:
        raise SpecdecError(
            "rule (judge) needs a judge, and none is built in; give the engine your own: "
            "Engine(..., rules=[specdec.verification.judge.judge_rule(judge)])"
        )
    if params.greedy:
        raise SpecdecError(
            f"rule ({bound.label}) needs a temperature above 0: at {params.temperature:g} the target's law "
            "is its best token alone, and nothing is left to relax; 1 is the target's own law"
        )


def _check_drafts(rule: Rule, spec: SpecConfig, drafter: Drafter) -> None:
    if rule.topology == "chain" and not drafter.makes_chains(spec):
        raise RuleMismatchError(
            f"rule ({rule.name}) verifies chains, but draft ({drafter.name}) with top_k ({spec.top_k}) "
            "proposes trees; use --shape chain:DEPTH with a draft of one kind, or a rule for trees: "
            f"{', '.join(_tree_rules(rule))}"
        )
    if rule.kind == "collaborative" and rule.uses_draft_probs and not drafter.can_sample:
        raise RuleMismatchError(
            f"rule ({rule.name}) verifies against the draft's law, and draft ({drafter.name}) has none; "
            "use a draft head, or a rule that needs no such law: "
            f"{', '.join(name for name, other in RULES.items() if other.kind != 'collaborative')}"
        )


def _tree_rules(like: Rule) -> list[str]:
    """Rules for trees that are exact if this one is, and lossy if this one is."""
    return [
        name
        for name, other in RULES.items()
        if other.topology == "tree" and other.is_lossless == like.is_lossless and other is not GREEDY
    ]


def _knobs(params: SamplingParams) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.rule_knobs.items())
