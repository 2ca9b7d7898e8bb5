"""The server's OpenAPI description, made from the records of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sportsllm import __version__
from sportsllm.serving.replies import Json

_RESPONSES = {
    "200": {"description": "The reply; with `stream`, server-sent events."},
    "default": {"description": "A refusal in OpenAI's shape: an object `error` with `message`, `type` and `param`."},
}


def describe(posts: Mapping[str, type[BaseModel]], gets: Iterable[str]) -> Json:
    """OpenAPI 3.1 of endpoints that take a record, and of others that take nothing or a model's name in their path."""
    records = [(record, "validation") for record in dict.fromkeys(posts.values())]
    references, schemas = models_json_schema(records, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths = dict[str, Json]()
    for path, record in posts.items():
        body = {"content": {"application/json": {"schema": references[record, "validation"]}}, "required": True}
        paths[path] = {"post": {"requestBody": body, "responses": _RESPONSES}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    for path in gets:
        operation = {"parameters": [name] if "{" in path else [], "responses": _RESPONSES}
        paths[path.replace(":path", "")] = {"get": operation}
    info = {"title": "sportsllm-compress", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}
