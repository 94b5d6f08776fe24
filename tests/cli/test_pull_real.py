"""The real SmolLM2-135M, as `make test` has pulled it."""

from pathlib import Path

import pytest


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("<|im_start|>user", ["<|im_start|>", "user"]),
        ("\n\n12. a", ["\u010a\u010a", "1", "2", ".", "\u0120a"]),
        ("x  2", ["x", "\u0120\u0120", "2"]),
    ],
)
def test_the_real_tokenizer_cuts_text_as_the_original_does(
    smollm2: Path, text: str, tokens: list[str]
) -> None:
    """The original cuts digits apart first; a conversion without that rule gives two line feeds here."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
