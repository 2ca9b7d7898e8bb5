"""Chat templates: messages as the text that a model was trained to answer.

A template is code of the checkpoint's author. It runs in jinja2's sandbox, which reaches neither files nor Python's
internals, in a process of its own with bounds on time, steps, memory and output.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip, parse_json

_MOST_SECONDS = 5.0
_MOST_STEPS = 300_000  # lines of the template's code, and of filters, that run for a conversation
_MOST_CHARACTERS = 1_000_000
_MOST_BYTES = 1 << 30


def render_chat(directory: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation, up to where the model's answer begins.

    Args:
        directory: a checkpoint or an export with a template in chat_template.jinja or tokenizer_config.json.
        messages: each with `role` (system, user or assistant) and `content`.

    Raises:
        ArtifactError: there is no template, or it fails, exceeds the bounds or refuses these messages.
        ModuleNotFoundError: jinja2 is not installed.
    """
    from sportsllm.text.tokenizer import find_template  # not in the child process, which starts fast without it

    template, settings = find_template(directory)
    if template is None:
        raise ArtifactError(
            f"{directory}: has no chat template, so the model was not trained to chat; leave --chat out"
        )
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError("jinja2", name="jinja2")
    names = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
    request = {"template": template, "names": names, "messages": [dict(each) for each in messages]}
    command = [sys.executable, "-c", f"from {__name__} import _render_requests; _render_requests()"]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=_MOST_SECONDS, cwd=root
        )
        answer = parse_json(done.stdout, directory) if done.returncode == 0 else {"problem": "it ended its process"}
    except subprocess.TimeoutExpired:
        answer = {"problem": f"it takes longer than {_MOST_SECONDS:.0f} s"}
    if "problem" in answer:
        raise ArtifactError(f"{directory}: its chat template fails ({clip(answer['problem'], 200)}); leave --chat out")
    return str(answer["text"])


def _text(token: object) -> object:
    """A special token, which is a text or a record with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _render_requests() -> None:
    """In the child process: read a request from standard input, and write the text or a problem as JSON."""
    with suppress(ImportError, ValueError, OSError):  # no such limits on Windows and, for memory, macOS
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    request = json.load(sys.stdin)
    try:
        output = json.dumps({"text": _rendered(request, request["messages"])})
    except MemoryError:
        output = json.dumps({"problem": "it needs too much memory"})
    except Exception as error:  # whatever a template can do
        output = json.dumps({"problem": str(error) or type(error).__name__})
    sys.stdout.write(output)


def _rendered(request: JsonObject, messages: Sequence[JsonObject]) -> str:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    steps = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal steps
        steps += 1
        if steps > _MOST_STEPS:
            raise TemplateError(f"it takes more than {_MOST_STEPS:,} steps")
        return count

    # Hugging Face's templates are written for these settings and names.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    template, parts, length = environment.from_string(request["template"]), [], 0
    sys.settrace(count)
    try:
        for part in template.generate(messages=messages, add_generation_prompt=True, **request["names"]):
            parts.append(part)
            length += len(part)
            if length > _MOST_CHARACTERS:
                raise TemplateError(f"it writes more than {_MOST_CHARACTERS:,} characters")
    finally:
        sys.settrace(None)
    return "".join(parts)
