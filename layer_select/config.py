"""Settings of layer selection: every default with its reason, nothing else.

Free of torch, so that the command line can show the defaults at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.engine_limits import require_engine
from specdec.errors import SpecdecError
from specdec.layer_select.terms import Term, parse_objective

# HSIC_1 divides by n (n - 1) (n - 2) (n - 3): fewer rows have no unbiased estimate.
MIN_ROWS = 4
SEARCHES = ("auto", "exhaustive", "mmr", "kdpp", "facility")
# subsets an exhaustive search may hold: K = 4 of 80 boundaries, K = 5 of 49. A second, and 100 MiB.
EXHAUSTIVE_LIMIT = 2_000_000
# the ridge probe solves a system for each subset: K = 3 of 37 boundaries, minutes.
EXHAUSTIVE_LIMIT_PROBE = 10_000
# far past where diversity decides alone; beyond it the difference in informativeness is rounding.
MAX_DIVERSITY_WEIGHT = 1e6
# e^(theta z) of the richest of a hundred boundaries (z below 10) stays a double.
MAX_DPP_WEIGHT = 50.0
# the probe's streams take the seed times 2^32.
MAX_SEED = 2**31 - 1


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise SpecdecError(f"{name} ({value}) must be at least {low}")


def _between(name: str, value: float, high: float) -> None:
    if not 0 <= value <= high:
        raise SpecdecError(f"{name} ({value}) must be a finite number in 0..{high:g}")


def _require_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise SpecdecError(f"seed ({seed}) must be in 0..{MAX_SEED}")


# every listed estimator but the logit lens, whose head is rows x hidden x vocabulary at every boundary.
DEFAULT_ESTIMATORS = (
    "matrix_entropy",
    "renyi_2",
    "effective_rank",
    "effective_rank_roy_vetterli",
    "dataset_entropy",
    "dataset_renyi_2",
    "histogram_entropy",
    "gaussian_entropy",
    "channel_entropy",
    "channel_softmax_entropy",
)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """How boundaries are measured.

    Attributes:
        tokens: Token positions to measure. 32,768 keeps a 135M target under three minutes on two cores.
        max_text_tokens: Longer texts are cut here; the Gram spectrum of a text costs this cubed.
        batch_tokens: Positions held in memory at once, at every boundary; also the unit of resampling, so a
            run of the default size has 16 units.
        cka_rows: Rows of one CKA minibatch. The debiased estimate does not depend on it, the biased one does
            (it tends to 1 as rows fall below the width); a Gram costs this squared.
        drop_first: Positions dropped at the start of each text: the attention sink, whose massive activation
            would dominate the trace of every middle layer's Gram (arXiv:2502.02013).
        center: Subtract the mean state of a text before its Gram, as Matrix-Entropy and Diff-eRank do.
        row_normalize: Scale every state to unit length, for the estimators and for CKA. On, because the draft
            head reads its taps through a norm each, and because unscaled states rank boundaries by their
            growing length.
        estimators: Names in `entropy.ESTIMATORS`, or `all`. The logit lens is left out unless asked for.
        lens_tokens: Positions the logit lens reads over the whole pass, spread over the batches; 1,024 leave
            a standard error of about 0.06 nats.
        histogram_coordinates: Coordinates the histogram reads; its mean over 256 moves little with more.
        dataset_texts: Texts whose mean state the dataset-level entropies read, the first ones.
        probe_tokens: Positions the ridge probe is fitted on, spread over the batches; 0 leaves it out. 8,192
            are eight for each of the 1,024 inputs that three taps and the token have.
        probe_dims: Dimensions each boundary's states are projected to for the probe; its sums hold this
            times the number of boundaries, squared.
        probe_heldout: Positions the probe is judged on. 512 leave a standard error of about 0.003 between
            two subsets on the same positions.
        seed: Seed of the order of texts, of the rows of CKA minibatches and of every subsample.
    """

    tokens: int = 32768
    max_text_tokens: int = 512
    batch_tokens: int = 2048
    cka_rows: int = 512
    drop_first: int = 1
    center: bool = True
    row_normalize: bool = True
    estimators: tuple[str, ...] = DEFAULT_ESTIMATORS
    lens_tokens: int = 1024
    histogram_coordinates: int = 256
    dataset_texts: int = 512
    probe_tokens: int = 0
    probe_dims: int = 256
    probe_heldout: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("tokens", self.tokens, MIN_ROWS)
        _at_least("max_text_tokens", self.max_text_tokens, MIN_ROWS + self.drop_first)
        _at_least("batch_tokens", self.batch_tokens, MIN_ROWS)
        _at_least("cka_rows", self.cka_rows, 2 * MIN_ROWS)
        _at_least("drop_first", self.drop_first, 0)
        _at_least("lens_tokens", self.lens_tokens, 1)
        _at_least("histogram_coordinates", self.histogram_coordinates, 1)
        _at_least("dataset_texts", self.dataset_texts, 1)
        _at_least("probe_tokens", self.probe_tokens, 0)
        _at_least("probe_dims", self.probe_dims, 1)
        _at_least("probe_heldout", self.probe_heldout, MIN_ROWS)
        _require_seed(self.seed)
        if not self.estimators:
            raise SpecdecError("estimators () must name at least one; use matrix_entropy or all")


@dataclass(frozen=True, kw_only=True)
class ChooseConfig:
    """How boundaries are chosen from their scores.

    Attributes:
        num_layers: Boundaries to choose, K. Three as in EAGLE-3; 3 to 5 is worth 3-5 % (2602.06036).
        objective: What is maximised, spelled as in `terms`.
        estimator: Name of the informativeness estimator that `entropy` stands for.
        diversity_weight: lambda, the weight of mean pairwise CKA against mean z-scored informativeness. On
            SmolLM2-135M (16k tokens) the choice is the same from 1.6 to 3.5, while 1 takes two neighbours of
            CKA 0.98; not fitted to acceptance.
        search: One of SEARCHES. `auto` is exhaustive where that is feasible and `mmr` otherwise.
        dpp_weight: theta of the k-DPP kernel diag(e^(theta I / 2)) R diag(e^(theta I / 2)); 1 lets one
            standard deviation of informativeness count as one nat of log-determinant.
        min_gap: Smallest distance between chosen boundaries.
        allowed: Boundaries that may be chosen. None is 1..N: boundary 0 is the token embedding, which the
            draft head is given anyway, so a tap there adds nothing.
        forced: Boundaries every choice holds.
        forbidden: Boundaries no choice holds.
        engine: Serving engine whose limits hold as well, one of `engine_limits.ENGINES`; None for no limit.
        num_runners_up: Next best subsets to report.
        resamples: Bootstrap resamples of calibration batches; 0 leaves stability out.
        size_draws: Random sub-samples of each calibration size.
        seed: Seed of the bootstrap and of every other draw.
    """

    num_layers: int = 3
    objective: str = "entropy+cka"
    estimator: str = "matrix_entropy"
    diversity_weight: float = 2.0
    search: str = "auto"
    dpp_weight: float = 1.0
    min_gap: int = 1
    allowed: tuple[int, ...] | None = None
    forced: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()
    engine: str | None = None
    num_runners_up: int = 10
    resamples: int = 200
    size_draws: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("num_layers", self.num_layers, 1)
        _at_least("min_gap", self.min_gap, 1)
        _at_least("num_runners_up", self.num_runners_up, 0)
        _at_least("resamples", self.resamples, 0)
        _at_least("size_draws", self.size_draws, 1)
        _between("diversity_weight", self.diversity_weight, MAX_DIVERSITY_WEIGHT)
        _between("dpp_weight", self.dpp_weight, MAX_DPP_WEIGHT)
        _require_seed(self.seed)
        if self.search not in SEARCHES:
            raise SpecdecError(f"search ({self.search}) must be one of {', '.join(SEARCHES)}")
        if self.engine is not None:
            require_engine(self.engine)
        parse_objective(self.objective, self.estimator)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The objective, read."""
        return parse_objective(self.objective, self.estimator)
