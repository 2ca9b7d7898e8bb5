"""Conversations: documents of messages, which a model's chat template turns into text and tokens.

A record holds `messages` (`role`, `content`), `conversations` (`from`, `value`), or `prompt` and `completion`, and may
have a `system` message beside them. A message may have `reasoning_content`, and the `weight` 0: it is not learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip

_NOT_READ = ("tool_calls", "tools", "images", "videos", "audios")
FIELDS = ("messages", "conversations", "prompt", "completion", "system", *_NOT_READ)
"""Fields of a record that holds a conversation; those at the end are refused."""
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's names


@dataclass(frozen=True)
class Conversation:
    """Messages as pairs of role and content.

    Attributes:
        where: the file and row, for errors.
        reasoning: `reasoning_content` by the message's number.
        unlearned: numbers of the assistant's turns, counted alone, that are not learned.
    """

    messages: tuple[tuple[str, str], ...]
    where: str = field(default="", compare=False)
    reasoning: tuple[tuple[int, str], ...] = ()
    unlearned: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The contents alone, one paragraph each."""
        return "\n\n".join(content for _, content in self.messages)

    @property
    def replies(self) -> str:
        """The contents of the assistant's turns that are learned."""
        known = dict(self.reasoning)
        said = [known.get(n, "") + content for n, (role, content) in enumerate(self.messages) if role == "assistant"]
        return "".join(content for number, content in enumerate(said) if number not in self.unlearned)

    def records(self) -> list[dict[str, str]]:
        """Messages in the form that templates read."""
        found = [{"role": role, "content": content} for role, content in self.messages]
        for number, text in self.reasoning:
            found[number]["reasoning_content"] = text
        return found

    def __str__(self) -> str:
        """JSON that differs for different conversations, to compare them by."""
        more = [part for part in (self.reasoning, self.unlearned) if part]
        return json.dumps([self.messages, *more] if more else self.messages, ensure_ascii=False)


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
        items = [*_messages(record, "prompt", where, "user"), *_messages(record, "completion", where, "assistant")]
    else:
        items = _messages(record, named, where)
    _refuse_other_kinds(record, where)
    if (system := record.get("system")) and items[0].role == "system":
        raise ArtifactError(f"{where} has two system messages, of which {named!r} has one; delete one of them")
    items = [*(_messages(record, "system", where, "system") if system else []), *items]
    replies = [item for item in items if item.role == "assistant"]
    return Conversation(
        tuple((item.role, item.content) for item in items),
        where,
        tuple((number, item.reasoning) for number, item in enumerate(items) if item.reasoning),
        tuple(number for number, item in enumerate(replies) if not item.learned),
    )


class _Message(NamedTuple):
    role: str
    content: str
    reasoning: str = ""
    learned: bool = True


def _messages(record: Mapping[str, object], name: str, where: str, role: str = "") -> list[_Message]:
    """The messages in a field; a text is one message of `role`, if that is given."""
    value = record[name]
    if isinstance(value, str) and role:
        return [_Message(role, value)]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ArtifactError(f"{where}: {name!r} holds no list of messages; correct or delete the row")
    return [_message(item, f"{where}: message {number} of {name!r}") for number, item in enumerate(value, start=1)]


def _message(item: JsonObject, where: str) -> _Message:
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
    reasoning, weight = item.get("reasoning_content") or "", item.get("weight")
    if not isinstance(reasoning, str):
        raise ArtifactError(f"{where} has reasoning_content that is not a string; correct or delete the row")
    if weight not in (None, 0, 1):
        raise ArtifactError(f"{where} has the weight {clip(repr(weight))}; use 0 or 1")
    return _Message(role, "".join(map(str, texts)), reasoning, weight != 0)


def _refuse_other_kinds(record: Mapping[str, object], where: str) -> None:
    found = next((name for name in _NOT_READ if record.get(name)), None)
    if found is not None:
        raise ArtifactError(f"{where} has {found!r}; only messages of text are read, delete the row")
