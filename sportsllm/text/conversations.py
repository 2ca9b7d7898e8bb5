"""Conversations: documents of messages, which a model's chat template turns into text and tokens.

A record holds `messages` (`role`, `content`), `conversations` (`from`, `value`), or `prompt` and `completion`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip

_NOT_READ = ("tool_calls", "tools", "images", "videos", "audios")
FIELDS = ("messages", "conversations", "prompt", "completion", *_NOT_READ)
"""Fields of a record that holds a conversation; those at the end are refused."""
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's names


@dataclass(frozen=True)
class Conversation:
    """Messages as pairs of role and content; `where` names the file and row for errors."""

    messages: tuple[tuple[str, str], ...]
    where: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The contents alone, one paragraph each."""
        return "\n\n".join(content for _, content in self.messages)

    @property
    def replies(self) -> str:
        """The contents of the assistant's turns."""
        return "".join(content for role, content in self.messages if role == "assistant")

    def records(self) -> list[dict[str, str]]:
        """Messages in the form that templates read."""
        return [{"role": role, "content": content} for role, content in self.messages]

    def __str__(self) -> str:
        """JSON that differs for different conversations, to compare them by."""
        return json.dumps(self.messages, ensure_ascii=False)


Document = str | Conversation


def plain_text(document: Document) -> str:
    """The text of a document; of a conversation its contents, without a template's tokens."""
    return document if isinstance(document, str) else document.text


def chat_field(record: Mapping[str, object]) -> str | None:
    """The first field of a record's conversation; None if it holds none."""
    forms = (FIELDS[:1], FIELDS[1:2], FIELDS[2:4])
    return next((form[0] for form in forms if all(record.get(name) is not None for name in form)), None)


def read_conversation(record: Mapping[str, object], where: str) -> Conversation | None:
    """The conversation of a record; None if the record has none of `FIELDS`.

    Raises:
        ArtifactError: messages of another form, an unknown role, or contents that are not text.
    """
    named = chat_field(record)
    if named is None:
        return None
    if named == "prompt":
        messages = [*_messages(record, "prompt", where, "user"), *_messages(record, "completion", where, "assistant")]
    else:
        messages = _messages(record, named, where)
    _refuse_other_kinds(record, where)
    return Conversation(tuple(messages), where)


def _messages(record: Mapping[str, object], name: str, where: str, role: str = "") -> list[tuple[str, str]]:
    """The messages in a field; a text is one message of `role`, if that is given."""
    value = record[name]
    if isinstance(value, str) and role:
        return [(role, value)]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ArtifactError(f"{where}: {name!r} holds no list of messages; correct or delete the row")
    return [_message(item, f"{where}: message {number} of {name!r}") for number, item in enumerate(value, start=1)]


def _message(item: JsonObject, where: str) -> tuple[str, str]:
    name = item.get("role") or item.get("from")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ArtifactError(f"{where} has the role {clip(repr(name))}; use one of {', '.join(_ROLES)}")
    _refuse_other_kinds(item, where)
    content = item.get("content", item.get("value"))
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    if others := [part for part in texts if not isinstance(part, str)]:
        kind = others[0].get("type") if isinstance(others[0], dict) else others[0]
        raise ArtifactError(f"{where} has content of the kind {clip(repr(kind))}; only text is read, delete the row")
    return role, "".join(map(str, texts))


def _refuse_other_kinds(record: Mapping[str, object], where: str) -> None:
    found = next((name for name in _NOT_READ if record.get(name)), None)
    if found is not None:
        raise ArtifactError(f"{where} has {found!r}; only messages of text are read, delete the row")
