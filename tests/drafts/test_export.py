"""Exports: bit-equal through every format, naming the layers the head reads; refusals with a way out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.config import RopeConfig
from specdec.drafts.checkpoint import StoredDraft
from specdec.drafts.export import make_export, with_shared_rows, write_export
from specdec.drafts.export_serving import serve_command, serving_text
from specdec.drafts.foreign import read_foreign
from specdec.drafts.format_ids import nested_boundaries, nested_ids
from specdec.drafts.formats import FORMATS
from specdec.drafts.target_facts import TargetFacts
from specdec.drafts.variants import VARIANTS
from specdec.engine_limits import engine_limit
from specdec.errors import SpecdecError
from specdec.models.rope import RotaryEmbedding

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "exports.json"
WRITE_GOLDEN = "SPECDEC_WRITE_GOLDEN=1 python -m pytest tests/drafts/test_export.py -k golden"
# our head adds up in another order than the reference
FP32_TOLERANCE = 2e-5
EAGLE_31 = {"fc_norm": True, "norm_output": True}
OWN_WIDTH = {"hidden_size": 20, "embed": "own", "lm_head": "own"}
# name: format, and what the head is
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "vllm-3.1-four-taps": ("vllm", {**EAGLE_31, "boundaries": (0, 3, 6, 8)}),
    "vllm-bias-own-rows": ("vllm", {"attention_bias": True, "lm_head": "own"}),
    "vllm-full-vocabulary": ("vllm", {"draft_vocab_size": 40}),
    "vllm-qk-norm": ("vllm", {"qk_norm": True, **EAGLE_31}),
    "vllm-own-embeddings": ("vllm", {"embed": "own"}),
    "vllm-own-width": ("vllm", OWN_WIDTH),
    "sglang": ("sglang", {}),
    "sglang-3.1-one-tap": ("sglang", {**EAGLE_31, "boundaries": (7,)}),
    "speculators": ("speculators", {}),
    "speculators-all-flags": (
        "speculators",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "attention_bias": True},
    ),
    "speculators-qk-norm-own-embeddings": ("speculators", {"embed": "own", "qk_norm": True, **EAGLE_31}),
    "eagle": ("eagle", {}),
    "eagle-own-width": ("eagle", OWN_WIDTH),
    "eagle-full-vocabulary": ("eagle", {"draft_vocab_size": 40, "lm_head": "own"}),
}


def passed_on(draft: StoredDraft, name: str, target: TargetFacts, folder: Path) -> StoredDraft:
    """The draft after an export to a format and an import from it."""
    form = FORMATS[name]
    write_export(folder, make_export(draft, form, target), draft, form, target, {})
    return read_foreign(folder, form, target, draft.contract.template_hash).draft


def assert_same_bits(found: StoredDraft, expected: StoredDraft) -> None:
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("settings", [{}, {"lm_head": "own"}, {"draft_vocab_size": 40}])
def test_a_head_passes_through_all_four_formats_bit_by_bit(
    dtype: str, settings: dict[str, Any], make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    """Catches a cast on the way, rows lost or added, and ids that drift by one at each step."""
    draft = original = make_stored(dtype, **settings)
    for name in ("vllm", "sglang", "speculators", "eagle"):
        draft = passed_on(draft, name, facts, tmp_path / name)
        assert_same_bits(draft, original)


@pytest.mark.parametrize("case", CASES)
def test_each_format_gives_back_what_it_was_given(
    case: str, make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    name, settings = CASES[case]
    draft = make_stored(**settings)
    assert_same_bits(passed_on(draft, name, facts, tmp_path / "out"), draft)


@pytest.mark.parametrize("case", CASES)
def test_each_engine_computes_the_logits_of_our_head(
    case: str,
    make_stored: Any,
    facts: TargetFacts,
    engine_logits: Callable[[Path, str], Tensor],
    our_logits: Callable[[StoredDraft], Tensor],
    tmp_path: Path,
) -> None:
    """Catches a wrong layer id, flag, id map or rotary base: nothing else reports one (faults B01, B14)."""
    name, settings = CASES[case]
    draft = make_stored(**settings)
    passed_on(draft, name, facts, tmp_path / "out")
    found, ours = engine_logits(tmp_path / "out", name), our_logits(draft)
    assert torch.equal(found.isinf(), ours.isinf())
    finite = ~ours.isinf()
    torch.testing.assert_close(found[finite], ours[finite], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


def test_all_four_exports_of_one_head_compute_identical_logits(
    make_stored: Any, facts: TargetFacts, engine_logits: Callable[[Path, str], Tensor], tmp_path: Path
) -> None:
    draft = make_stored(
        rope=RopeConfig(
            rope_type="linear", theta=10000.0, head_dim=6, max_position_embeddings=512, params={"factor": 4.0}
        )
    )
    for name in FORMATS:
        passed_on(draft, name, facts, tmp_path / name)
    first, *others = (engine_logits(tmp_path / name, name) for name in FORMATS)
    assert all(torch.equal(first, other) for other in others)


def test_exports_have_the_golden_names_shapes_and_config(
    make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    """Catches a renamed tensor or key: engines skip what they do not know (faults B12, B18)."""
    found = {}
    for case, (name, settings) in CASES.items():
        export = make_export(make_stored(**settings), FORMATS[name], facts)
        tensors = {
            key: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for key, tensor in sorted(export.tensors.items())
        }
        found[case] = {"config": export.config, "tensors": tensors}
    if os.environ.get("SPECDEC_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps({"made_by": WRITE_GOLDEN, "exports": found}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())["exports"]
    assert found.keys() == golden.keys()
    for case, export in found.items():
        assert json.loads(json.dumps(export)) == golden[case], case


@pytest.mark.parametrize("case", CASES)
def test_no_export_leaves_to_a_reader_what_readers_disagree_about(
    case: str, make_stored: Any, facts: TargetFacts
) -> None:
    name, settings = CASES[case]
    draft = make_stored(**settings)
    config: dict[str, Any] = dict(make_export(draft, FORMATS[name], facts).config)
    inner = config.get("transformer_layer_config", config)
    for flag in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"):
        assert config[flag] is getattr(draft.config, flag)
    assert config["num_aux_hidden_states"] == len(draft.config.boundaries)
    assert inner["rope_theta"] == inner["rope_parameters"]["rope_theta"] == 12345.0
    assert config["tie_word_embeddings"] is False
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gpt_oss", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "gemma3_text"]
)
def test_ids_of_every_family_are_read_as_the_boundaries_they_were_written_for(model_type: str) -> None:
    """Catches the blanket + 1 on families that read ids as boundaries (sglang#25454, fault B01)."""
    depth = 9
    allowed = engine_limit("sglang", depth, model_type).boundaries
    for count in (1, 2, 3):
        for boundaries in itertools.combinations(allowed, count):
            ids = nested_ids(boundaries, depth, model_type)
            assert tuple(nested_boundaries(ids, depth, model_type)) == boundaries


def test_ids_are_spelled_as_each_engine_of_36_layers_reads_them() -> None:
    default = (2, 18, 33)
    assert nested_ids(default, 36, "llama") == [1, 17, 32]
    assert nested_ids(default, 36, "deepseek_v3") == [2, 18, 33]
    assert nested_ids(default, 36, "gpt_oss") == [1, 17, 32]
    assert nested_ids((24, 30, 36), 36, "gpt_oss") == [24, 30, 36]


@pytest.mark.parametrize(
    ("name", "settings", "reason", "way_out"),
    [
        ("sglang", {"boundaries": (2, 4, 8)}, "boundary 8 of .* neither", "--to vllm"),
        ("sglang", {"boundaries": (0, 4, 5)}, "boundary 0 of", "--to vllm or speculators"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual", "--to vllm or speculators"),
        ("sglang", {"attention_bias": True}, "attention_bias", "--to vllm or speculators"),
        ("sglang", {"qk_norm": True}, "qk_norm", "--to vllm or speculators"),
        ("sglang", {"embed": "own"}, "embed .own. is overwritten", "--to vllm or speculators or eagle"),
        ("sglang", OWN_WIDTH, "embed .own. is overwritten", "--to vllm or eagle"),
        ("speculators", OWN_WIDTH, "hidden_size .not the target's. is impossible", "--to vllm or eagle"),
        ("eagle", {"qk_norm": True}, "qk_norm", "--to vllm or speculators"),
        ("eagle", {"attention_bias": True}, "attention_bias", "--to vllm or speculators"),
        (
            "speculators",
            {"boundaries": (2, 4, 5, 6)},
            "serves 3 taps and this head reads 4",
            "--to vllm or sglang",
        ),
        ("speculators", {"boundaries": (2, 4, 8)}, "boundary 8", "--to vllm"),
        ("eagle", {"boundaries": (2, 4)}, "serves 3 taps and this head reads 2", "--to vllm or sglang"),
        (
            "eagle",
            {"boundaries": (2, 4, 6)},
            "boundary 6 .* exactly 2, N // 2 and N - 3",
            "--to vllm or sglang",
        ),
        ("eagle", {"fc_norm": True}, "fc_norm", "--to vllm or sglang or speculators"),
        ("eagle", {"norm_output": True}, "norm_output", "--to vllm"),
        ("eagle", {"norm_before_fc": True}, "norm_before_fc", "--to vllm"),
        (
            "eagle",
            {
                "rope": RopeConfig(
                    rope_type="yarn",
                    theta=1e4,
                    head_dim=6,
                    max_position_embeddings=512,
                    params={"factor": 2.0},
                )
            },
            "rope_type .yarn.",
            "--to vllm",
        ),
        (
            "eagle",
            {
                "rope": RopeConfig(
                    rope_type="linear",
                    theta=5e4,
                    head_dim=6,
                    max_position_embeddings=512,
                    params={"factor": 2.0},
                )
            },
            "rope_theta .50000. is ignored",
            "--to vllm",
        ),
    ],
)
def test_what_an_engine_cannot_represent_is_refused_with_the_reason_and_a_way_out(
    name: str, settings: dict[str, Any], reason: str, way_out: str, make_stored: Any, facts: TargetFacts
) -> None:
    with pytest.raises(SpecdecError, match=rf"--to {name} .*{reason}.*export it {way_out}"):
        make_export(make_stored(**settings), FORMATS[name], facts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_size": 20, "lm_head": "own"}, "embed_proj .*--embed own"),
        ({"hidden_size": 20, "embed": "own"}, "out_proj .*--lm-head own"),
    ],
)
def test_projections_of_our_own_go_nowhere(
    name: str, settings: dict[str, Any], reason: str, make_stored: Any, facts: TargetFacts
) -> None:
    if name in ("sglang", "speculators"):
        reason = "hidden_size|embed"
    with pytest.raises(SpecdecError, match=rf"--to {name} .*{reason}.*serve it with specdec serve"):
        make_export(make_stored(**settings), FORMATS[name], facts)


def test_every_variant_has_a_case_in_each_format_that_holds_it(make_stored: Any) -> None:
    held = {name: set() for name in VARIANTS}
    for form, settings in CASES.values():
        config = make_stored(**settings).config
        for name, variant in VARIANTS.items():
            if variant.present(config):
                held[name].add(form)
    for name, variant in VARIANTS.items():
        assert held[name] <= variant.formats
        assert bool(held[name]) == bool(variant.formats), name


def test_families_of_sglang_have_limits_of_their_own(make_stored: Any, facts: TargetFacts) -> None:
    with pytest.raises(SpecdecError, match=r"boundary 1 .*deepseek_v3 reads a first id of 1 as boundary 2"):
        make_export(
            make_stored(boundaries=(1, 4, 5)), FORMATS["sglang"], replace(facts, model_type="deepseek_v3")
        )
    last = make_stored(boundaries=(2, 4, 8))
    config = make_export(last, FORMATS["sglang"], replace(facts, model_type="gpt_oss")).config
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]


def test_a_target_too_shallow_for_the_repository_is_refused(make_stored: Any, facts: TargetFacts) -> None:
    draft = make_stored(target_num_layers=5, boundaries=(2, 3, 4))
    with pytest.raises(SpecdecError, match="no three boundaries of 5 layers"):
        make_export(draft, FORMATS["eagle"], replace(facts, num_layers=5))


def test_another_target_is_refused(make_stored: Any, facts: TargetFacts) -> None:
    with pytest.raises(SpecdecError, match="another target"):
        make_export(make_stored(), FORMATS["vllm"], replace(facts, fingerprint="0" * 64))


def test_shared_output_rows_are_written_out_and_recognised_again(
    make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    """Catches a random output head in the engine (sglang#27908, fault B13), and rows stored twice here."""
    draft = make_stored()
    back = passed_on(draft, "vllm", facts, tmp_path / "out")
    rows = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, facts.lm_head[[0, 3, 4, 9, 12, 39]])
    assert back.config.lm_head == "target_rows"
    own = make_stored("bfloat16", lm_head="own")
    copied = replace(own, tensors={**own.tensors, "lm_head.weight": rows})
    assert_same_bits(passed_on(copied, "vllm", facts, tmp_path / "copied"), with_shared_rows(copied, facts))


@pytest.mark.parametrize("name", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize(
    ("rope_type", "params"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        ),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
    ],
)
def test_rotary_parameters_survive_every_format(
    name: str, rope_type: str, params: dict[str, Any], make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    """Catches rope_scaling dropped or theta read at one place only (fault B14)."""
    rope = RopeConfig(
        rope_type=rope_type, theta=54321.0, head_dim=6, max_position_embeddings=8192, params=params
    )
    back = passed_on(make_stored(rope=rope), name, facts, tmp_path / "out")
    assert back.config.rope == rope
    positions = torch.tensor([0, 63, 5000])
    for found, source in zip(
        RotaryEmbedding(back.config.rope).cos_sin(positions, 5001),
        RotaryEmbedding(rope).cos_sin(positions, 5001),
        strict=True,
    ):
        assert torch.equal(found, source)


def test_a_folder_that_holds_something_is_left_alone(
    make_stored: Any, facts: TargetFacts, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(SpecdecError, match="already exists"):
        passed_on(make_stored(), "vllm", facts, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_serve_commands_are_the_engines_own(make_stored: Any, facts: TargetFacts) -> None:
    commands = {name: serve_command(form, "my draft", facts) for name, form in FORMATS.items()}
    assert commands["vllm"] == (
        "vllm serve org/target --speculative-config "
        """'{"method": "eagle3", "model": "my draft", "num_speculative_tokens": 3}'"""
    )
    assert commands["speculators"] == commands["vllm"]
    assert commands["sglang"] == (
        "python -m sglang.launch_server --model-path org/target --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path 'my draft' --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    )
    assert "ea_model_path='my draft', use_eagle3=True" in commands["eagle"]


def test_the_text_beside_an_export_says_what_was_checked_and_what_is_refused(
    make_stored: Any, facts: TargetFacts
) -> None:
    text = serving_text(make_stored(boundaries=(2, 4, 8)), FORMATS["vllm"], "out", facts)
    assert serve_command(FORMATS["vllm"], "out", facts) in text
    assert "vLLM 0.33.0" in text
    assert "`--to sglang`: refused: boundary 8" in text
    assert "boundaries [2, 4, 8]" in text
