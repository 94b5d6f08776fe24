"""Shared fixtures: tiny random models on disk, a tiny byte-level tokenizer, seeds, a cache of their own.

Everything is made here from seeds; nothing is downloaded. The tokenizer deliberately carries the traps of
real ones: a post-processor that adds BOS (a template with its own BOS would get two), merges (a cut text
does not re-tokenise alike), two end tokens (EOS and end-of-turn) and a separate padding token.
"""

import os

import torch

# the Triton interpreter must be chosen before any kernel is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|eot|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|unk|>",
)
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("\u0120", "the"),
    ("e", "r"),
    ("o", "n"),
    ("\u0120", "a"),
]
VOCAB_SIZE = 256 + len(MERGES) + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{{ message['content'] }}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Any:
    """Make the byte-level tokenizer: 256 bytes, eight merges, eight special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    bos = core.token_to_id("<|bos|>")
    core.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", bos)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE, "the tiny vocabulary and its tokenizer must agree"
    return tokenizer


def build_model(family: str, seed: int, overrides: dict[str, Any]) -> Any:
    """Make a random model whose norms and biases are random too, so that forgetting one shows."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = build_tokenizer()
    eos, eot = tokenizer.convert_tokens_to_ids(["<|eos|>", "<|eot|>"])
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,  # on purpose not hidden_size / num_attention_heads
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # wide enough that the best token leads clearly
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "mistral":
        settings["sliding_window"] = 32
    settings.update(overrides)
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[eos, eot], pad_token_id=tokenizer.pad_token_id
    )
    return model


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """The tokenizer that every tiny model shares."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call with (family, seed=0, **config overrides): folder of a tiny saved model, made once a session."""
    root = tmp_path_factory.mktemp("tiny-models")
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = json.dumps([family, seed, overrides], sort_keys=True)
        if key not in made:
            folder = root / f"{family}-{len(made)}"
            build_model(family, seed, overrides).save_pretrained(folder)
            build_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model_factory: Callable[..., Path]) -> Path:
    """Folder of the default tiny Llama: 4 layers, hidden 64, 4 heads over 2 KV heads, head_dim 24."""
    return tiny_model_factory("llama")


@pytest.fixture(scope="session", params=FAMILIES)
def tiny_any_family(request: pytest.FixtureRequest, tiny_model_factory: Callable[..., Path]) -> Path:
    """Folder of one tiny model of each family in turn; Mistral's sliding window is 32."""
    return tiny_model_factory(request.param)


@pytest.fixture(scope="session")
def random_draft() -> Callable[..., Path]:
    """Call with (target, folder, seed=0, config overrides): an EAGLE-3 head of random weights, saved."""
    from safetensors.torch import load_file

    from specdec.config import ModelConfig
    from specdec.drafts.checkpoint import DraftContract, save_draft
    from specdec.drafts.config import Eagle3Config
    from specdec.drafts.eagle3 import Eagle3Head
    from specdec.drafts.vocab import DraftVocab
    from specdec.provenance import folder_fingerprint

    def make(target: Path, folder: Path, seed: int = 0, **overrides: Any) -> Path:
        model = ModelConfig.from_folder(target)
        config = Eagle3Config(
            hidden_size=model.hidden_size,
            intermediate_size=80,
            num_heads=4,
            num_kv_heads=2,
            head_dim=model.head_dim,
            rms_norm_eps=1e-5,
            rope=model.rope,
            vocab_size=model.vocab_size,
            draft_vocab_size=96,
            boundaries=(1, 3, 4),
            target_hidden_size=model.hidden_size,
            target_num_layers=model.num_layers,
        )
        config = replace(config, **overrides)
        tensors = load_file(target / "model.safetensors")
        vocab = DraftVocab(torch.arange(96), model.vocab_size)
        head = Eagle3Head(config, vocab, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.15 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
        fingerprint = folder_fingerprint(target)
        contract = DraftContract(target_fingerprint=fingerprint, template_hash="none", training={})
        return save_draft(folder, head, contract, dtype="float16")

    return make


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _fair_share_of_threads() -> None:
    """Test processes side by side (`make test`) divide the cores; threads beyond them would wait in turn."""
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))


@pytest.fixture
def several_threads() -> Iterator[None]:
    """At least two threads inside operations, for tests of what may depend on how they divide the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("specdec-home")


@pytest.fixture(autouse=True)
def _cache_of_our_own(
    request: pytest.FixtureRequest, _session_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep tests out of the user's cache; only the real model is read from there."""
    if request.node.get_closest_marker("real_model") is None:
        monkeypatch.setenv("SPECDEC_HOME", str(_session_home))


@pytest.fixture
def specdec_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty specdec cache for one test."""
    home = tmp_path / "specdec-home"
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    return home


@pytest.fixture
def smollm2(request: pytest.FixtureRequest) -> Path:
    """Folder of the real SmolLM2-135M, which `make test` has pulled; for tests marked real_model."""
    from specdec.errors import SpecdecError
    from specdec.hub import resolve_target

    assert request.node.get_closest_marker("real_model"), "mark tests of the real model as real_model"
    try:
        return resolve_target("smollm2-135m")
    except SpecdecError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def valid_record() -> Callable[[dict[str, Any]], None]:
    """Call with a record: a jsonschema.ValidationError unless it follows the schema that it names."""
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    folder = Path(__file__).resolve().parents[1] / "cli" / "schemas"
    schemas = [json.loads(path.read_text()) for path in sorted(folder.glob("*.schema.json"))]
    registry: Any = Registry().with_resources(
        [(schema["$id"], Resource.from_contents(schema)) for schema in schemas]
    )
    validators = {schema["$id"]: Draft202012Validator(schema, registry=registry) for schema in schemas}

    def check(record: dict[str, Any]) -> None:
        validators[record["schema"]].validate(record)

    return check
