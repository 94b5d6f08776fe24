"""Other weight formats turned into a Hugging Face folder of safetensors.

Owns the choice of the stored dtype: fp16 for quantised, fp16 and fp32 sources, so that a packed fp16 path
computes with exactly the stored weights; bf16 stays bf16; weights that fp16 cannot hold stay fp32. Owns the
checks that a model file is whole. Knows nothing of names, networks or the cache: it reads one place and
writes another.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.provenance import read_json, read_safetensors_header, write_json_atomic

Say = Callable[[str], None]

FLOAT16_MAX = 65504.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# where a folder happened to lie when somebody saved it; says nothing about the model
_MACHINE_KEYS = {
    "config.json": ("_name_or_path", "_model_name_or_path"),
    "tokenizer_config.json": ("name_or_path", "is_local", "local_files_only"),
}
# what a safetensors file may hold for us to use it as it is, and the name of that dtype in config.json
_READY_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
# GGUF names of tokenizers that cut every digit apart before GPT-2's pattern (llama.cpp, llama-vocab.cpp);
# transformers reads their files with GPT-2's pattern alone, which joins "\n\n1" and "  2" otherwise
_DIGITS_APART = frozenset({"codeshell", "command-r", "exaone", "minerva", "refact", "smollm", "starcoder"})
_GPT2_PATTERN = frozenset({"gpt-2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe"})
_SPECIAL_FIELDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TOKENIZER_FIELDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", *_SPECIAL_FIELDS.values())
_READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, RuntimeError, OSError, NotImplementedError)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors shards of a folder, complete by its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing or not names:
            raise SpecdecError(
                f"{index} lists {', '.join(missing) or 'no file'}, which {folder} lacks; pull it again"
            )
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def stored_dtypes(folder: Path) -> set[str]:
    """Safetensors names of the dtypes in a folder's shards; checks that no shard is cut off."""
    tables = [read_safetensors_header(shard)[0] for shard in weight_files(folder)]
    return {entry["dtype"] for table in tables for entry in table.values()}


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that is no whole Hugging Face model, naming the file that is wrong."""
    if not (folder / "config.json").exists():
        raise SpecdecError(
            f"{folder} holds no config.json; name a Hugging Face model folder (config.json, safetensors, "
            "tokenizer)"
        )
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise SpecdecError(
            f"{folder / 'config.json'} names no model_type; it is no Hugging Face model folder"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise SpecdecError(
            f"{folder} is quantised ({method}); specdec reads fp16, bf16 and fp32 folders and .gguf files: "
            "give the unquantised model or a .gguf of it"
        )
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise SpecdecError(
            f"{folder} holds no tokenizer (one of {', '.join(_TOKENIZER_FILES)}); copy it there"
        )
    if not stored_dtypes(folder) and not list(folder.glob("*.bin")):
        raise SpecdecError(f"{folder} holds no weights (.safetensors); the folder is not complete")


def is_ready(folder: Path) -> bool:
    """Whether a checked folder can be used as it is: safetensors, and all weights fp16 or all bf16."""
    dtypes = stored_dtypes(folder)
    return len(dtypes) == 1 and dtypes <= set(_READY_DTYPES)


@dataclass(frozen=True, kw_only=True)
class GgufFacts:
    """What a GGUF says of itself that decides the conversion.

    Attributes:
        types: Type names of its matrices.
        tokenizer: Kind of its tokenizer; ``gpt2`` is byte-level BPE.
        pre_tokenizer: Name of the way text is cut before the merges, null if the file gives none.
        special_ids: Ids of the special tokens, by transformers' name for each.
    """

    types: frozenset[str]
    tokenizer: str | None
    pre_tokenizer: str | None
    special_ids: dict[str, int]


def check_gguf(path: Path) -> GgufFacts:
    """Check that a file is a whole GGUF and read what decides its conversion."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SpecdecError(f"reading {path} needs the package gguf; install it: pip install gguf") from error
    with open(path, "rb") as handle:
        if handle.read(4) != b"GGUF":
            raise SpecdecError(f"{path} is no GGUF file (it does not start with 'GGUF'); give another file")
    size = path.stat().st_size
    try:
        reader = GGUFReader(path)
        tensors = reader.tensors
        named = {name: field.contents() for name, field in reader.fields.items() if name in _TOKENIZER_FIELDS}
        cut = any(tensor.data_offset + tensor.n_bytes > size for tensor in tensors)
    except _READ_ERRORS as error:
        raise SpecdecError(
            f"{path} is truncated or damaged (its tables do not read); fetch it again"
        ) from error
    if cut or not tensors:
        raise SpecdecError(f"{path} is truncated: {size} bytes do not hold all its tensors; fetch it again")
    return GgufFacts(
        types=frozenset(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1),
        tokenizer=named.get("tokenizer.ggml.model"),
        pre_tokenizer=named.get("tokenizer.ggml.pre"),
        special_ids={token: int(named[field]) for token, field in _SPECIAL_FIELDS.items() if field in named},
    )


def convert_gguf(path: Path, out: Path, say: Say) -> None:
    """Write a Hugging Face folder (weights, tokenizer, chat template) from a GGUF file."""
    facts = check_gguf(path)
    say(f"converting {path.name} ({', '.join(sorted(facts.types))})")
    _convert_with_transformers(path.parent, out, say, gguf_file=path.name, facts=facts)


def convert_folder(folder: Path, out: Path, say: Say) -> None:
    """Write a checked folder anew as fp16 safetensors (bf16 stays, fp32 stays where fp16 is too small)."""
    if not weight_files(folder):
        _convert_with_transformers(folder, out, say, gguf_file=None, facts=None)
        return
    foreign = stored_dtypes(folder) - {"F16", "BF16", "F32", "F64"}
    if foreign:
        raise SpecdecError(
            f"{folder} stores weights as {', '.join(sorted(foreign))}; use fp16, bf16 or fp32 weights"
        )
    _convert_shards(folder, out, say)


def _convert_shards(folder: Path, out: Path, say: Say) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shards = weight_files(folder)
    largest = max(_largest_weight(load_file(shard), shard) for shard in shards)
    dtype = _choose_dtype(largest, folder.name, say)
    out.mkdir(parents=True, exist_ok=True)
    for item in sorted(folder.iterdir()):
        if item.is_file() and item.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(item, out / item.name)
    total = 0
    for shard in shards:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(shard).items()}
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.exists():
        write_json_atomic(index, {**read_json(index), "metadata": {"total_size": total}})
    config = {**read_json(out / "config.json"), "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    write_json_atomic(out / "config.json", config)
    assert dtype in (torch.float16, torch.float32), "bf16 folders are used as they are"


def _convert_with_transformers(
    folder: Path, out: Path, say: Say, *, gguf_file: str | None, facts: GgufFacts | None
) -> None:
    import torch
    import transformers

    origin = folder / gguf_file if gguf_file else folder
    source: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
    except _READ_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SpecdecError(
            f"{origin}: transformers {transformers.__version__} cannot read it: {reason}"
        ) from error
    largest = _largest_weight(dict(model.requires_grad_(False).named_parameters()), origin)
    if facts is not None and "BF16" in facts.types and facts.types <= {"BF16", "F32"}:
        dtype = torch.bfloat16
    else:
        dtype = _choose_dtype(largest, origin.name, say)
    # loading a GGUF leaves a quantiser behind in some transformers versions, which would be saved and asked
    # for again, though the weights are plain numbers by now
    quantiser = getattr(model, "hf_quantizer", None)
    if quantiser is not None:
        quantiser.remove_quantization_config(model)
    model.to(dtype).save_pretrained(out)
    if facts is not None:
        _mend_tokenizer(tokenizer, facts, origin.name, say)
    tokenizer.save_pretrained(out)


def _mend_tokenizer(tokenizer: Any, facts: GgufFacts, name: str, say: Say) -> None:
    """Set what the file says of its tokenizer and some versions of transformers do not read."""
    from tokenizers import decoders, pre_tokenizers

    for token, token_id in facts.special_ids.items():
        # 5.17 names its default tokens here, which ends answers at another token than the file says
        setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(token_id))
    if facts.tokenizer != "gpt2":
        return
    core = tokenizer.backend_tokenizer
    # byte-level text is the bytes of its tokens; 5.17 tidies spaces before punctuation away
    core.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    if facts.pre_tokenizer in _DIGITS_APART:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif (
        isinstance(core.pre_tokenizer, pre_tokenizers.ByteLevel) and facts.pre_tokenizer not in _GPT2_PATTERN
    ):
        say(
            f"{name} cuts text by the rule '{facts.pre_tokenizer}', which is not known here; "
            "GPT-2's is used, so some prompts may become other tokens than the original's"
        )


def _largest_weight(tensors: dict[str, Any], origin: Path) -> float:
    largest = 0.0
    for name, tensor in tensors.items():
        value = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not value < float("inf"):
            raise SpecdecError(
                f"{origin} holds a weight that is no finite number (in {name}); the file is damaged"
            )
        largest = max(largest, value)
    return largest


def _choose_dtype(largest: float, name: str, say: Say) -> Any:
    import torch

    if largest <= FLOAT16_MAX:
        return torch.float16
    say(
        f"{name} is kept in float32: a weight of {largest:.4g} is beyond float16's {FLOAT16_MAX:g}, fp32 path"
    )
    return torch.float32


def strip_machine_keys(folder: Path) -> None:
    """Take out of a folder's JSON files where it used to lie."""
    for name, keys in _MACHINE_KEYS.items():
        path = folder / name
        if path.exists():
            values = read_json(path)
            kept = {key: value for key, value in values.items() if key not in keys}
            if kept != values:
                path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
