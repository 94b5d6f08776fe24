"""A study on a tiny target: equal arms, resumed arm by arm, measured as the engine serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.hf import final_norm, load_hf_model
from specdec.layer_select.references import reference_subsets
from specdec.train import study
from specdec.train.config import TrainConfig
from specdec.train.evaluate import offline_acceptance, sequence_counts
from specdec.train.head_init import final_norm_weight
from specdec.train.head_start import choose_vocab, start_head
from specdec.train.states import StoredStates, TapSubset, TargetStates
from specdec.train.study import Study
from specdec.train.study_arms import Arm, order_arms, plan_tap_sets, random_taps, recipe_arms
from specdec.train.study_config import StudyConfig
from specdec.train.study_recipes import parse_recipe

TRAINING = TrainConfig(
    draft_vocab_size=64, unroll=2, batch_rows=64, steps=3, compute_dtype="float32", eval_sequences=0
)
CONFIG = StudyConfig(
    train_tokens=60, held_out=4, served=3, served_tokens=10, chain=2, training=TRAINING, keep_heads=True
)


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny target to random prompts."""
    model = load_hf_model(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    with open(path, "w") as file:
        for number in range(12):
            prompt = torch.randint(0, 200, (1, 6), generator=generator)
            text = model.generate(prompt, max_new_tokens=14, do_sample=False, eos_token_id=None)[0].tolist()
            record = {"id": f"p{number}", "prompt_token_ids": text[:6], "response_token_ids": text[6:]}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture
def start(tiny_llama: Path, answers: Path, tmp_path: Path) -> Callable[..., Study]:
    def make(config: StudyConfig = CONFIG, **options: Any) -> Study:
        return Study(tiny_llama, answers, tmp_path / "study", config, **options)

    return make


def test_an_arm_is_trained_once_and_its_record_is_kept(start: Callable[..., Study]) -> None:
    arms = [Arm(boundaries=(1, 3), seed=0), Arm(boundaries=(2, 4), seed=0)]
    first = start().run(arms)
    assert [tuple(record["boundaries"]) for record in first] == [(1, 3), (2, 4)]
    said: list[str] = []
    assert start(report=said.append).run(arms) == first
    assert not any(line.startswith("arm ") for line in said), "a finished arm must not be trained again"


def test_arms_of_one_seed_see_the_same_text_and_differ_in_what_they_reach(
    start: Callable[..., Study],
) -> None:
    low, high = start().run([Arm(boundaries=(1,), seed=0), Arm(boundaries=(4,), seed=0)])
    assert [one["rows"] for one in low["offline"]] == [one["rows"] for one in high["offline"]]
    assert [one["id"] for one in low["offline"]] == [one["id"] for one in high["offline"]]
    assert [one["overlap"] for one in low["offline"]] != [one["overlap"] for one in high["offline"]]


def test_served_prompts_repeat_the_plain_text_and_the_offline_count(start: Callable[..., Study]) -> None:
    """Of whole answers the engine takes exactly the steps that were counted offline."""
    work = start(replace(CONFIG, served_tokens=14))
    (record,) = work.run([Arm(boundaries=(1, 3, 4), seed=0)])
    assert len(record["served"]) == 3
    assert all(one["identical"] for one in record["served"])
    for offline, served in zip(record["offline"], record["served"], strict=False):
        assert offline["id"] == served["id"]
        assert (offline["verify_steps"], offline["committed"]) == (
            served["verify_steps"],
            served["committed"],
        )


def test_a_target_that_cannot_be_served_is_refused_before_a_head_is_trained(
    start: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise SpecdecError("not served")

    monkeypatch.setattr(study, "ServedPrompts", refuse)
    monkeypatch.setattr(study, "Trainer", lambda *_, **__: pytest.fail("a head was trained"))
    with pytest.raises(SpecdecError, match="not served"):
        start().run([Arm(boundaries=(2,), seed=0)])


def test_a_gemma_target_is_studied(
    tiny_model_factory: Callable[..., Path], answers: Path, tmp_path: Path
) -> None:
    """Its norms store the difference from 1: taken as the weight itself, a head starts from NaN."""
    target = tiny_model_factory("gemma3_text")
    work = Study(target, answers, tmp_path / "gemma", replace(CONFIG, served=0))
    (record,) = work.run([Arm(boundaries=(1, 3), seed=0)])
    assert record["last_loss"] > 0
    norm = final_norm(work.model)
    state = torch.randn(1, 1, norm.weight.numel())
    unit = state * state.square().mean().rsqrt()
    torch.testing.assert_close(norm(state), unit * final_norm_weight(work.model))


def test_records_of_another_budget_are_refused(start: Callable[..., Study]) -> None:
    arms = [Arm(boundaries=(2,), seed=0)]
    start().run(arms)
    with pytest.raises(SpecdecError, match="another budget"):
        start(replace(CONFIG, train_tokens=70)).run(arms)


def test_an_average_of_weights_is_what_is_measured(start: Callable[..., Study]) -> None:
    """An average that keeps all of its first value is the start: not the weights that were trained."""
    recipes = [parse_recipe("still:ema=0.999999"), parse_recipe("none:learning_rate=1e-9")]
    base, still, none = start().run(recipe_arms((2, 4), recipes, 1))
    overlaps = [[one["overlap"] for one in record["offline"]] for record in (base, still, none)]
    assert overlaps[1] == overlaps[2] != overlaps[0]


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a:loss=lk-mix,ema=0.99", {"loss": "lk-mix", "ema": 0.99}),
        ("a-b+2:unroll=1,self_attending=false,init=random", {"unroll": 1, "self_attending": False}),
        ("x:distill_top_k=none", {"distill_top_k": None}),
    ],
)
def test_a_recipe_reads_its_options_in_their_kinds(text: str, changes: dict[str, Any]) -> None:
    found = dict(parse_recipe(text).changes)
    assert {name: found[name] for name in changes} == changes
    assert all(type(found[name]) is type(value) for name, value in changes.items())


def test_no_arm_begins_after_the_time_is_up(start: Callable[..., Study]) -> None:
    assert start().run([Arm(boundaries=(2,), seed=0)], until=0.0) == []


def test_more_data_than_there_is_is_refused(start: Callable[..., Study]) -> None:
    with pytest.raises(SpecdecError, match="--train-tokens asks for 1000"):
        start(replace(CONFIG, train_tokens=1000))


def test_a_study_without_tap_norms_is_refused() -> None:
    with pytest.raises(SpecdecError, match="fc_norm"):
        StudyConfig(training=replace(TRAINING, fc_norm=False, init="random"))


def test_training_and_held_out_conversations_are_apart(start: Callable[..., Study]) -> None:
    work = start()
    assert not {s.id for s in work.training} & {s.id for s in work.held_out}


def test_a_subset_of_stored_taps_is_what_the_target_gives_at_those_boundaries(
    start: Callable[..., Study],
) -> None:
    work = start()
    work.fill_states()
    view = TapSubset(work.states, work.boundaries, (1, 4))
    wanted = TargetStates(work.model, (1, 4)).fetch(work.held_out)
    for ours, theirs in zip(view.fetch(work.held_out), wanted, strict=True):
        torch.testing.assert_close(ours.taps.float(), theirs.taps.float(), rtol=2e-3, atol=2e-3)
        assert torch.equal(ours.argmax, theirs.argmax)


def test_a_released_store_can_be_opened_by_another_run(tiny_llama: Path, tmp_path: Path) -> None:
    model = load_hf_model(tiny_llama)

    def store() -> StoredStates:
        return StoredStates(tmp_path, TargetStates(model, (1,)), target_fingerprint="x", dtype="float32")

    first = store()
    with pytest.raises(SpecdecError, match="in use by another run"):
        store()
    first.release()
    store().close()


def test_counts_of_conversations_add_up_to_the_whole(
    start: Callable[..., Study], tiny_tokenizer: Any
) -> None:
    work = start()
    work.fill_states()
    source = TapSubset(work.states, work.boundaries, (1, 3))
    vocab = choose_vocab(work.training, tiny_tokenizer, work.model, work.model.config.vocab_size, TRAINING)
    head = start_head(work.model, (1, 3), vocab, work.training, source, TRAINING).head
    whole = offline_acceptance(head, source, work.held_out, 3)
    single = sequence_counts(head, source, work.held_out, 3)
    assert sum(counts.steps for counts in single) == whole.verify_steps
    assert sum(counts.committed for counts in single) == whole.committed
    assert whole.overlap == pytest.approx(
        sum(counts.overlap[0] for counts in single) / sum(counts.rows[0] for counts in single)
    )


@pytest.mark.parametrize("num_layers", range(1, 13))
@pytest.mark.parametrize("count", [1, 3, 5])
def test_planned_sets_fit_every_target(num_layers: int, count: int) -> None:
    if count > num_layers:
        with pytest.raises(SpecdecError, match=f"--k \\({count}\\)"):
            plan_tap_sets(num_layers, [count], [], random_draws=4, random_seed=0)
        return
    for taps in plan_tap_sets(num_layers, [count], [], random_draws=4, random_seed=0):
        assert len(set(taps.boundaries)) == count
        assert list(taps.boundaries) == sorted(taps.boundaries)
        assert all(0 <= boundary <= num_layers for boundary in taps.boundaries)


def test_a_set_that_two_rules_arrive_at_is_trained_once() -> None:
    default = reference_subsets(30, 3)["default"]
    sets = plan_tap_sets(30, [3], [("mine", default)], random_draws=0, random_seed=0)
    (found,) = (taps for taps in sets if taps.boundaries == default)
    assert found.names[:2] == ("mine", "default")


def test_random_sets_are_different_and_repeat_by_seed() -> None:
    drawn = random_taps(30, 3, 20, 1)
    assert len(set(drawn)) == 20
    assert drawn == random_taps(30, 3, 20, 1)
    assert random_taps(3, 3, 20, 1) == [(1, 2, 3)]


def test_every_set_gets_its_first_seed_before_any_gets_a_second() -> None:
    sets = plan_tap_sets(30, [3, 1], [], random_draws=2, random_seed=0)
    arms = order_arms(sets, {3: 2, 1: 1})
    assert [arm.seed for arm in arms] == [0] * len(sets) + [1] * sum(len(s.boundaries) == 3 for s in sets)


@pytest.mark.parametrize("boundaries", [(), (1, 1), (0, 31)])
def test_impossible_sets_are_refused_by_name(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(SpecdecError, match="--layers mine"):
        plan_tap_sets(30, [3], [("mine", boundaries)], random_draws=0, random_seed=0)
