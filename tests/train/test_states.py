"""Target states: the teacher is the target, online and from disk."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.train.loss import Teacher
from specdec.train.sequences import TrainSequence
from specdec.train.states import StoredStates, TargetStates

BOUNDARIES = (1, 3, 4)


def _sequences(lengths: list[int]) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 200, (length,), generator=generator).tolist()
        found.append(TrainSequence(f"s{number}", tuple(ids), (False, *[True] * (length - 1))))
    return found


def _store(folder: Path, source: TargetStates) -> StoredStates:
    return StoredStates(folder, source, target_fingerprint="f", dtype="float32")


@pytest.mark.parametrize("stored", [False, True])
def test_the_teachers_law_is_the_targets(stored: bool, tiny_any_family: Path, tmp_path: Path) -> None:
    """Catches logits from the state before the final norm (speculators #313): acceptance a third lower."""
    model = load_hf_model(tiny_any_family)
    source: Any = TargetStates(model, BOUNDARIES)
    if stored:
        source = _store(tmp_path, source)
    sequences = _sequences([9, 5, 40])
    every = torch.arange(model.config.vocab_size)
    for sequence, states in zip(sequences, source.fetch(sequences), strict=True):
        ids = torch.tensor(sequence.token_ids)
        logits = model(ids[None]).logits[0, :-1]
        rows = torch.arange(len(ids) - 1)
        teacher = Teacher(states.final, states.log_norm, source.output_rows(every), states.argmax)
        law = torch.exp(teacher.logits(rows) - teacher.log_norm.unsqueeze(-1))
        assert (law - torch.softmax(logits, -1)).abs().max() < 1e-5
        assert torch.equal(states.argmax.long(), logits.argmax(-1))
        hidden = model(ids[None], output_hidden_states=True).hidden_states
        for tap, boundary in enumerate(BOUNDARIES[:2]):
            # fp16 keeps 11 bits.
            assert torch.allclose(states.taps[:, tap].float(), hidden[boundary][0, :-1], rtol=1e-3, atol=1e-4)


def test_states_do_not_depend_on_what_else_is_in_the_forward(tiny_llama: Path) -> None:
    source = TargetStates(load_hf_model(tiny_llama), BOUNDARIES)
    sequences = _sequences([17, 6, 30])
    for sequence, batched in zip(sequences, source.fetch(sequences), strict=True):
        (alone,) = source.fetch([sequence])
        assert torch.allclose(batched.final, alone.final, atol=1e-4)
        assert torch.equal(batched.argmax, alone.argmax)


def test_the_store_computes_each_text_once_and_survives_a_kill(tiny_llama: Path, tmp_path: Path) -> None:
    source, sequences = TargetStates(load_hf_model(tiny_llama), BOUNDARIES), _sequences([7, 9, 8])
    store = _store(tmp_path, source)
    first = store.fetch(sequences[:2])
    size = (store.folder / "states.bin").stat().st_size
    assert size == (6 + 8) * store.row_bytes
    assert store.missing_bytes(sequences) == 7 * store.row_bytes
    store.close()
    # a killed run: half a record without its index line, and a cut index line.
    with open(store.folder / "states.bin", "ab") as data:
        data.write(b"x" * 100)
    with open(store.folder / "index.jsonl", "a") as index:
        index.write('{"hash": "ab')
    again = _store(tmp_path, source)
    assert (again.folder / "states.bin").stat().st_size == size
    found = again.fetch(sequences)
    for old, new in zip(first, found, strict=False):
        assert torch.equal(old.taps, new.taps)
        assert torch.equal(old.final, new.final)
        assert torch.equal(old.log_norm, new.log_norm)
    (computed,) = source.fetch(sequences[2:])
    assert torch.equal(found[2].taps, computed.taps)
    again.close()


def test_other_taps_or_another_target_use_another_store(tiny_llama: Path, tmp_path: Path) -> None:
    model = load_hf_model(tiny_llama)
    stores = [
        _store(tmp_path, TargetStates(model, BOUNDARIES)),
        _store(tmp_path, TargetStates(model, (1, 2, 4))),
        StoredStates(tmp_path, TargetStates(model, BOUNDARIES), target_fingerprint="g", dtype="float32"),
    ]
    assert len({store.folder for store in stores}) == 3


def test_a_store_in_use_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    source = TargetStates(load_hf_model(tiny_llama), BOUNDARIES)
    store = _store(tmp_path, source)
    with pytest.raises(SpecdecError, match="in use"):
        _store(tmp_path, source)
    store.close()
    _store(tmp_path, source).close()


def test_a_full_disk_is_refused_before_anything_is_written(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path, TargetStates(load_hf_model(tiny_llama), BOUNDARIES))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(SpecdecError, match="GB are free"):
        store.check_disk(_sequences([50]))
    assert (store.folder / "states.bin").stat().st_size == 0


def test_a_state_outside_fp16_names_boundary_and_sequence(tiny_llama: Path) -> None:
    model = load_hf_model(tiny_llama)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1e6)
    with pytest.raises(SpecdecError, match="boundary 3 of sequence 's0'"):
        TargetStates(model, BOUNDARIES).fetch(_sequences([8]))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}),
        ("granite", {"logits_scaling": 5.0}),
    ],
)
def test_a_target_that_reshapes_its_logits_is_refused(
    family: str, settings: dict[str, Any], tiny_model_factory: Any
) -> None:
    """Its output head alone is another law, and a head trained on that would be accepted less, silently."""
    model = load_hf_model(tiny_model_factory(family, **settings))
    with pytest.raises(SpecdecError, match="caps or scales its logits"):
        TargetStates(model, BOUNDARIES)
