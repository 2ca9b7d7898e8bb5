"""Bodies of requests as typed records, their OpenAPI description, and refusals in OpenAI's shape.

Fields are OpenAI's and, beyond them, llama-server's. Unknown ones are ignored; null is as good as left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError
from pydantic.json_schema import models_json_schema

from sportsllm import __version__
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, as_object, describe, parse_json

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MOST_CHOICES, MOST_STOPS, MOST_TOP = 16, 16, 20
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasPair = Annotated[tuple[StrictInt | StrictStr, Bias], Field(strict=False)]  # JSON has no tuples
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Token = Annotated[int, Field(ge=0)]
_SEVERAL_TYPES = {  # pydantic says what is wrong with a value as each of them
    "messages": "give a list, each with a role and a content: a text, or a list of parts of type text",
    "prompt": "give a text, token ids, or a list of prompts",
    "stop": f"give a text, or a list of up to {MOST_STOPS}, each of 1 to 1,024 characters",
}
_RESPONSES = {
    "200": {"description": "The reply; with `stream`, server-sent events."},
    "default": {"description": "A refusal in OpenAI's shape: an object `error` with `message`, `type` and `param`."},
}


class ApiError(Exception):
    """A request that is refused: the status and what the body's `error` says."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **more: Any) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, more.pop("retry_s", None)
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status} | more}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, populate_by_name=True)


class ModelRequest(_Body):
    """Body of a request to a model, the first one without a name."""

    model: str = ""


class StreamOptions(_Body):
    """Whether a stream's last chunk carries the usage."""

    include_usage: bool = False


class JsonSchema(_Body):
    """A schema by name."""

    definition: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(_Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")

    def schema_of_text(self) -> dict[str, Any] | bool | None:
        """The JSON schema that it demands, by OpenAI's or llama-server's field; None for any text."""
        if self.type == "text":
            return None
        schema = self.json_schema.definition if self.json_schema is not None else self.definition
        return {"type": "object"} if schema is None else schema


class GenerationRequest(ModelRequest):
    """Fields of chats and completions. The defaults of sampling are those of `generate`."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(
        None, ge=-1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "n_predict")
    )
    temperature: float = Field(0.7, ge=0, le=100)
    top_p: float = Field(0.9, gt=0, le=1)
    top_k: int = Field(50, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = Field({}, max_length=1024)
    seed: int | None = Field(None, ge=-1, lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = Field(None, max_length=10_000)
    grammar: str | None = Field(None, max_length=10_000)
    ignore_eos: bool = False
    cache_prompt: bool = True

    def biases(self, vocab_size: int, encode: Callable[[str], list[int]]) -> dict[int, float]:
        """`logit_bias` by token id; llama-server's own requests may name texts, whose tokens are meant.

        Raises:
            ApiError: a key that is no token id.
        """
        found, by_key = dict[int, float](), isinstance(self.logit_bias, dict)
        pairs: Any = self.logit_bias.items() if by_key else self.logit_bias
        for key, value in pairs:
            is_id = bool(re.fullmatch("-?[0-9]+", key)) if by_key else isinstance(key, int)
            if (len(str(key)) > 9 or not 0 <= int(key) < vocab_size) if is_id else not isinstance(self, NativeRequest):
                raise ApiError(400, f"logit_bias: keys are token ids below {vocab_size}", param="logit_bias")
            found |= dict.fromkeys([int(key)] if is_id else encode(key), value)
        return found

    def constraint(self) -> tuple[str, Any] | None:
        """The field that says what the text must be, and its value.

        Raises:
            ApiError: more than one.
        """
        form = None if self.response_format is None else self.response_format.schema_of_text()
        given = {"response_format": form, "json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        found = {field: value for field, value in given.items() if value is not None}
        if len(found) > 1:
            raise ApiError(400, f"give {' or '.join(found)}, not both", param=min(found))
        return next(iter(found.items()), None)


class PromptObject(_Body):
    """A prompt as llama-server's multimodal models take it; only text is understood."""

    model_config = ConfigDict(extra="forbid")
    prompt_string: str


Prompt = str | Annotated[list[Token | str], Field(min_length=1)]
"""A text, or token ids and texts in turns."""


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: str | PromptObject | Annotated[list[Token | Prompt | PromptObject], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP, validation_alias=AliasChoices("logprobs", "n_probs"))
    echo: bool = False

    def prompts(self) -> list[Prompt]:
        """Each prompt.

        Raises:
            ApiError: token ids among texts and lists.
        """
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if any(isinstance(each, int) for each in given):
            if not all(isinstance(each, int | str) for each in given):
                raise ApiError(400, "prompt: give token ids and texts, or a list of prompts", param="prompt")
            return [given]  # type: ignore[list-item]
        return [each.prompt_string if isinstance(each, PromptObject) else each for each in given]  # type: ignore[misc]


class NativeRequest(CompletionRequest):
    """Body of llama-server's own `/completion`."""

    logit_bias: Annotated[dict[str, Bias] | list[BiasPair], Field(max_length=1024)] = {}  # type: ignore[assignment]
    return_tokens: bool = False
    response_fields: list[str] = []


class ContentPart(_Body):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Conversation(ModelRequest):
    """Body of `/apply-template`."""

    messages: list[Message] = Field(min_length=1)


class ChatRequest(GenerationRequest, Conversation):
    """Body of `/v1/chat/completions`."""

    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)


class TokenizeRequest(ModelRequest):
    """Body of `/tokenize`."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(ModelRequest):
    """Body of `/detokenize`."""

    tokens: list[Token]


Record = TypeVar("Record", bound=_Body)


def parse_request(kind: type[Record], data: bytes) -> Record:
    """A body as a record.

    Raises:
        ApiError: no JSON object, a field is missing or of the wrong type.
    """
    try:
        given = as_object(parse_json(data, "the body", "send a JSON object"), "the body")
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ArtifactError as error:
        raise ApiError(400, str(error)) from None
    except ValidationError as error:
        field = error.errors(include_url=False, include_context=False)[0]["loc"][:1]
        name = str(field[0]) if field else None
        text = f"{name}: {_SEVERAL_TYPES[name]}" if name in _SEVERAL_TYPES else describe(error)
        raise ApiError(400, text, param=name) from None


def openapi(posts: Mapping[str, type[BaseModel]], gets: Iterable[str]) -> JsonObject:
    """OpenAPI 3.1 of endpoints that take a record, and of others that take nothing or a model's name in their path."""
    records = [(record, "validation") for record in dict.fromkeys(posts.values())]
    references, schemas = models_json_schema(records, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths = dict[str, JsonObject]()
    for path, record in posts.items():
        body = {"content": {"application/json": {"schema": references[record, "validation"]}}, "required": True}
        paths[path] = {"post": {"requestBody": body, "responses": _RESPONSES}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    for path in gets:
        operation = {"parameters": [name] if "{" in path else [], "responses": _RESPONSES}
        paths[path.replace(":path", "")] = {"get": operation}
    info = {"title": "sportsllm-compress", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}
