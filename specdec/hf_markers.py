"""Chat templates that mark what the model writes, in the way of transformers.

Owns the one call that gives such a mask. How chats become ids otherwise is `hf`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from specdec.errors import SpecdecError

# the tag that such templates put around what the model writes
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_marked_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[int]] | None:
    """Ids of a whole chat, and 1 where its template marks text as generated; None without such markers."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or not _GENERATION.search(template):
        return None
    try:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise SpecdecError(
            f"the chat template refused these messages: {str(error).splitlines()[0]}"
        ) from error
    return list(found["input_ids"]), list(found["assistant_masks"])
