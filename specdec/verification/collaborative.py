"""Collaborative rules: lenience, interpolation, fuzzy, mentored, Cactus; cascades are in `cascades.py`.

Owns their declarations; the laws and their sources are in `lossy_laws.py`. All say p's token where the two
models agree, and differ in what they let the draft change. Lenience is the only one whose knob is the
overshoot ceiling.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.divergence import js_divergence, kl_divergence, total_variation
from specdec.random_streams import UniformSource
from specdec.tree import DraftTree
from specdec.verification import lossy_laws
from specdec.verification.laws import Law
from specdec.verification.replaced import bounded_at, collaborative_rule, verify_against
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import Knob, Knobs, Rule, choice_knob

_DIVERGENCES = {"js": js_divergence, "kl": kl_divergence, "tv": total_variation}


def _lenience(name: str, law: Callable[[Law, Law, float], Law], recovery: str) -> Rule:
    return collaborative_rule(
        name=name,
        law=lambda p, q, knobs: law(p, q, knobs["lenience"]),
        knobs=(
            Knob(
                name="lenience",
                default=0.4,
                low=0.0,
                high=1.0,
                low_open=True,
                meaning="1/lenience is how many times as often as the target a token may be said; 1 is exact",
            ),
        ),
        neutral={"lenience": 1.0},
        overshoot_bound=lambda knobs: 1.0 / knobs["lenience"],
        sentence="No token is said more than 1/lenience times as often as the target would, and below that "
        f"the draft decides; a rejected token gives way to {recovery}.",
    )


LENIENCE = _lenience(
    "lenience", lossy_laws.lenient, "what the target says more often than the draft, norm((p - q)+)"
)
LENIENCE_SCALED = _lenience(
    "lenience-scaled", lossy_laws.lenient_scaled, "what the target says beyond a share of q, norm((p - l q)+)"
)
LENIENCE_FLOOR = _lenience(
    "lenience-floor",
    lossy_laws.lenient_floor,
    "what the draft says much too rarely, up to one common multiple of p",
)

INTERPOLATION = collaborative_rule(
    name="interpolation",
    law=lambda p, q, knobs: lossy_laws.interpolated(p, q, knobs["weight"]),
    knobs=(
        Knob(
            name="weight",
            default=0.5,
            low=0.0,
            high=1.0,
            meaning="weight of the target in the mixture; 1 is exact",
        ),
    ),
    neutral={"weight": 1.0},
    sentence="The text has the law of a mixture, weight times the target and the rest the draft: an ensemble "
    "of the two models rather than the target.",
)

FUZZY = collaborative_rule(
    name="fuzzy",
    law=lambda p, q, knobs: lossy_laws.fuzzy(
        p, q, knobs["threshold"], list(_DIVERGENCES.values())[int(knobs["divergence"])]
    ),
    knobs=(
        Knob(
            name="threshold",
            default=0.1,
            low=0.0,
            high=100.0,
            meaning="divergence, in nats for js and kl, below which the draft's law is taken; 0 is exact",
        ),
        choice_knob(
            name="divergence",
            default="js",
            choices=tuple(_DIVERGENCES),
            meaning="how the two laws are compared; kl is that of the draft's law to the target's",
        ),
    ),
    neutral={"threshold": 0.0},
    sentence="Where the two laws are nearer than the threshold the draft's own token stands, elsewhere the "
    "text has the target's law.",
)

MENTORED = collaborative_rule(
    name="mentored",
    law=lambda p, q, knobs: lossy_laws.mentored(p, q, knobs["budget"]),
    knobs=(
        Knob(
            name="budget",
            default=0.1,
            low=0.0,
            high=100.0,
            meaning="how far, KL in nats, each token's law may be from the target's; 0 is exact",
        ),
    ),
    neutral={"budget": 0.0},
    sentence="Each token's law stays within the KL budget of the target's, and of all such laws it is the "
    "one that accepts the draft most often.",
)


def _verify_cactus(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int, knobs: Knobs
) -> VerifyResult:
    """Verify each drafted token of a chain against a law of its own."""
    assert tree.is_chain, "cactus lifts the one drafted token; whoever binds it refuses trees"
    delta = knobs["delta"]
    return verify_against(
        tree,
        target_probs,
        stream,
        position,
        lambda p, q, token: lossy_laws.cactus_proposal(p, token, delta),
    )


_CACTUS_KNOBS = (
    Knob(
        name="delta",
        default=0.1,
        low=0.0,
        high=100.0,
        meaning="how much the drafted token's probability is lifted before it is tested; 0 is exact",
    ),
)
CACTUS = Rule(
    name="cactus",
    kind="collaborative",
    topology="chain",
    draft="sampled",
    knobs=_CACTUS_KNOBS,
    emitted_law=lambda p, q, knobs: lossy_laws.cactus(p, q, knobs["delta"]),
    overshoot_bound=bounded_at({"delta": 0.0}, _CACTUS_KNOBS),
    neutral={"delta": 0.0},
    sentence="Whatever token was drafted is first made likelier, by sqrt(2 delta p (1 - p)), and then tested "
    "as if the target had said so; the law that comes out depends on the draft.",
    verify=_verify_cactus,
)

COLLABORATIVE: tuple[Rule, ...] = (
    LENIENCE,
    LENIENCE_SCALED,
    LENIENCE_FLOOR,
    INTERPOLATION,
    FUZZY,
    MENTORED,
    CACTUS,
)
