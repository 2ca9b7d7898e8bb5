"""Chat templates: messages as the text that a model was trained to answer.

A template is code of the checkpoint's author. It runs in jinja2's sandbox, which reaches neither files nor Python's
internals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import read_json


def render_chat(directory: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation, up to where the model's answer begins.

    Args:
        directory: a checkpoint or an export with a template in chat_template.jinja or tokenizer_config.json.
        messages: each with `role` (system, user or assistant) and `content`.

    Raises:
        ArtifactError: there is no template, or it fails or refuses these messages.
        ModuleNotFoundError: jinja2 is not installed.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    template, settings = find_template(directory)
    if template is None:
        raise ArtifactError(
            f"{directory}: has no chat template, so the model was not trained to chat; leave --chat out"
        )
    # Hugging Face's templates are written for these settings and names.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    names = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ArtifactError(f"{directory}: its chat template fails ({problem}); leave --chat out") from None


def find_template(directory: Path) -> tuple[str | None, dict[str, Any]]:
    """The chat template of a checkpoint or an export, None without one, and what tokenizer_config.json says."""
    path, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings = read_json(path) if path.exists() else {}
    if file.exists():
        return file.read_text(encoding="utf-8"), settings
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((item.get("template") for item in found if item.get("name") == "default"), None)
    return found if isinstance(found, str) else None, settings


def _text(token: Any) -> Any:
    """A special token, which is a text or a record with its `content`."""
    return token.get("content") if isinstance(token, dict) else token
