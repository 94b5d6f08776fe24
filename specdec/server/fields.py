"""The fields of requests: names, types and which are known.

Owns the request models and the list of fields that may be sent and have no effect. Ranges of sampling are the
runtime's (`SamplingParams`); meaning is `requests_made`'s. A field that is not known is refused, since it may
change what the client means; null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# what clients send for their own or their provider's books: no effect on the text here, or anywhere
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# what an assistant message of an earlier response carries and no template reads
IGNORED_MESSAGE_FIELDS = frozenset({"annotations", "audio", "function_call", "name", "refusal"})

TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
Number = float  # a whole number is one too


class Fields(BaseModel):
    """Unknown fields and wrong types are refused: "1" is no number and 1 is no truth."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class SpeculativeFields(Fields):
    """How this request speculates; further keys are the knobs of the rule it names.

    `token_kinds` changes nothing but the response: each choice then says of each token how it came.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    enabled: bool | None = None
    max_depth: int | None = None
    top_k: int | None = None
    max_nodes: int | None = None
    adaptive: bool | None = None
    verification: str | None = None
    token_kinds: bool | None = None


class StreamOptions(Fields):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Fields):
    """OpenAI's `response_format.json_schema`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GeneratingFields(Fields):
    """What both generating endpoints take: OpenAI's fields, vLLM's, and our own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # the only value each of these may have here; anything else is refused by name
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    # of the machine, not of the text
    priority: int | None = None
    timeout: Number | None = None
    deadline_s: Number | None = None
    kv_ttl_s: Number | None = None
    cache_salt: str | None = None
    speculative: SpeculativeFields | None = None


class CompletionFields(GeneratingFields):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None


class TextPart(Fields):
    """A piece of a message; other kinds than text are refused by name."""

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """Name and arguments of a call."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call an assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Fields):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionFields(Fields):
    """A function a model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool a model may call."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Fields):
    """A tool by name."""

    name: str


class NamedTool(Fields):
    """`tool_choice` that names the one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatFields(GeneratingFields):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] | None = Field(default=None, max_length=16)
    modalities: list[Literal["text"]] | None = None
    add_special_tokens: Literal[False] | None = None


class TokenizeFields(Fields):
    """`POST /tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    chat_template_kwargs: dict[str, str | bool | int | float] | None = Field(default=None, max_length=16)
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds = Field(max_length=1 << 20)
