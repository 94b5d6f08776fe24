"""Prompts of requests as token ids.

Owns the order of checks: a text that is certainly too long is refused before it is cut into tokens.
Everything here runs beside the engine, one call at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.errors import SpecdecError
from specdec.hf import render_chat
from specdec.requests import PromptEncoder
from specdec.server.fields import Message, Tool
from specdec.server.problems import bad_field
from specdec.server.token_text import TokenText
from specdec.server.tool_calls import template_messages, with_tool_prompt

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict", "chat_template"}
    | {"conversation", "continue_final_message", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class Prompts:
    """Makes token ids of what requests hold.

    Args:
        encoder: a tokenizer that nobody else uses.
        tokens: shows its tokens; here for their longest.
        max_model_len: the context.
    """

    def __init__(self, encoder: PromptEncoder, tokens: TokenText, max_model_len: int) -> None:
        self._encoder = encoder
        self._tokens = tokens
        self._max_model_len = max_model_len
        source = encoder.tokenizer.chat_template if encoder.tokenizer is not None else None
        text = source if isinstance(source, str) else " ".join((source or {}).values())
        self._knows_tools = "tools" in text
        self._knows_calls = "tool_calls" in text

    def of_completion(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Ids of each prompt.

        Raises:
            SpecdecError: a text without tokenizer, or longer than any that fits.
        """
        return [self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    def of_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a chat, through the target's template.

        Raises:
            Problem: a message that cannot be rendered.
            SpecdecError: no template, or a chat longer than any that fits.
        """
        reserved = _RESERVED & (variables or {}).keys()
        if reserved:
            name = min(reserved)
            raise bad_field(
                "chat_template_kwargs", f"chat_template_kwargs ({name}) is not the template's to set"
            )
        turns = template_messages(messages, knows_calls=self._knows_calls)
        self._check_length(sum(len(turn["content"]) for turn in turns))
        if tools and not self._knows_tools:
            turns = with_tool_prompt(turns, tools)
        listed = [tool.model_dump(exclude_none=True) for tool in tools] if self._knows_tools else []
        if self._encoder.tokenizer is None:
            raise SpecdecError(
                "chat needs a tokenizer, which the target lacks; send token ids as a completion"
            )
        try:
            return render_chat(
                self._encoder.tokenizer,
                turns,
                add_generation_prompt=add_generation_prompt,
                tools=listed or None,
                variables=variables,
            )
        except SpecdecError:
            raise
        # a template is a program of the model's, fed with the client's values: whatever it raises is about
        # those
        except Exception as error:
            text = f"the chat template refused these messages: {type(error).__name__}: {error}"
            raise bad_field("messages", text[:300]) from error

    def of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text, with or without the tokenizer's own special tokens."""
        if add_special_tokens:
            return self._encode(text)
        self._check_length(len(text))
        return list(self._need().encode(text, add_special_tokens=False))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out.

        Raises:
            SpecdecError: an id that no token has.
        """
        tokenizer = self._need()
        size = len(tokenizer)
        if token_ids and max(token_ids) >= size:
            raise SpecdecError(f"tokens ({max(token_ids)}) must be ids in 0..{size - 1}")
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _encode(self, text: str) -> list[int]:
        self._check_length(len(text))
        return self._encoder.encode(text)

    def _check_length(self, characters: int) -> None:
        longest = self._tokens.longest * self._max_model_len
        if characters > longest > 0:
            raise SpecdecError(
                f"prompt ({characters} characters) must be shorter than the context ({self._max_model_len} "
                f"tokens of at most {self._tokens.longest} characters)"
            )

    def _need(self) -> Any:
        if self._encoder.tokenizer is None:
            raise SpecdecError("the target has no tokenizer")
        return self._encoder.tokenizer
