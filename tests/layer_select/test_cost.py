"""Computed costs of large targets hold their parts and grow as they should."""

from dataclasses import replace

from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.cost import LARGE_TARGETS, estimate_cost, peak_bytes, working_bytes

CONFIG = ScoreConfig(probe_tokens=8192)


def test_a_forward_costs_two_operations_a_weight_and_token_and_the_rest_is_added() -> None:
    for shape in LARGE_TARGETS.values():
        cost = estimate_cost(shape, CONFIG)
        assert cost.forward_flop == 2 * shape.parameters * CONFIG.tokens
        assert cost.flop > cost.forward_flop + cost.eigen_flop > cost.forward_flop
        assert cost.weight_bytes == 2 * shape.parameters
        without = estimate_cost(shape, replace(CONFIG, probe_tokens=0))
        assert without.probe_flop == 0
        assert without.seconds < cost.seconds
        lens = estimate_cost(shape, replace(CONFIG, estimators=("logit_lens_entropy",)))
        plain = estimate_cost(shape, replace(CONFIG, estimators=("matrix_entropy",)))
        head = 2 * shape.hidden_size * shape.vocab_size * CONFIG.lens_tokens * (shape.num_layers + 1)
        assert lens.estimator_flop - plain.estimator_flop == head


def test_working_memory_is_one_batch_and_does_not_grow_with_the_number_of_tokens() -> None:
    for shape in LARGE_TARGETS.values():
        few, many = (working_bytes(shape, replace(CONFIG, tokens=tokens)) for tokens in (8192, 10**6))
        assert few == many
        assert working_bytes(shape, replace(CONFIG, batch_tokens=1024)) < few
        assert working_bytes(shape, replace(CONFIG, probe_tokens=0)) < few


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 2**26 < peak_bytes() < 2**40
