"""A head beside targets stored in half precision, packed or not; contracts it is served under."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.drafts.checkpoint import DraftContract, save_draft
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.engine import Engine
from specdec.provenance import folder_fingerprint
from specdec.sequence import SamplingParams

PROMPTS = [[7, 3, 9, 20, 5], [40, 41], [100, 3, 100, 3, 100, 3]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SPEC = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)


def half_target(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A copy of a tiny target stored in `dtype`."""
    shutil.copytree(source, folder)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    return folder


def random_draft(target: Path, folder: Path, *, template_hash: str = "none") -> Path:
    model = ModelConfig.from_folder(target)
    config = Eagle3Config(
        hidden_size=model.hidden_size,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope=model.rope,
        vocab_size=model.vocab_size,
        draft_vocab_size=96,
        boundaries=(1, 3),
        target_hidden_size=model.hidden_size,
        target_num_layers=model.num_layers,
    )
    tensors = load_file(target / "model.safetensors")
    vocab = DraftVocab(torch.arange(96) * 2, model.vocab_size)
    head = Eagle3Head(config, vocab, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.15 * torch.randn_like(parameter) + (parameter.dim() == 1))
    fingerprint = folder_fingerprint(target)
    contract = DraftContract(target_fingerprint=fingerprint, template_hash=template_hash, training={})
    return save_draft(folder, head, contract, dtype="float16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_and_plain_serving_propose_the_same_trees(
    tiny_llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Output rows come as the target stores them: without a cast an unpacked head cannot multiply at all."""
    target = half_target(tiny_llama, tmp_path / "target", dtype)
    draft = random_draft(target, tmp_path / "draft")
    runs = []
    for packed in (True, False):
        config = EngineConfig(kv_tokens=1024, spec=SPEC, draft_weights="fp16-packed" if packed else "plain")
        results = Engine(target, draft=draft, config=config).generate(PROMPTS, GREEDY)
        runs.append([(r.token_ids, r.stats.drafted, r.stats.accepted) for r in results])
    assert runs[0] == runs[1]
    assert all(drafted > 0 for _, drafted, _ in runs[0])


def test_a_draft_of_another_chat_template_is_served_with_a_word(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B25: the text is right either way, acceptance is not; so it is said."""
    draft = random_draft(tiny_llama, tmp_path / "draft", template_hash="0123456789abcdef")
    Engine(tiny_llama, draft=draft, config=EngineConfig(kv_tokens=512, spec=SPEC))
    assert "another chat template (0123456789ab" in caplog.text


def test_nothing_is_drafted_beyond_the_heads_context(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B39: a draft made for 32 positions beside a target of 512: text unchanged, no row past its context."""
    draft = random_draft(tiny_llama, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    plain = Engine(tiny_llama, config=EngineConfig(kv_tokens=1024)).generate(PROMPTS, params)
    results = Engine(tiny_llama, draft=draft, config=EngineConfig(kv_tokens=1024, spec=SPEC)).generate(
        PROMPTS, params
    )
    assert "made for 32 positions" in caplog.text
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    for prompt, result in zip(PROMPTS, results, strict=True):
        drafting = sum(result.stats.steps_per_depth[:1])
        assert 0 < drafting <= 32 - len(prompt)
        assert result.stats.verify_steps > drafting
