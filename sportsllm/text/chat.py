"""Chat templates: messages as the text that a model was trained on, or is to answer.

A template is code of the checkpoint's author. It runs in jinja2's sandbox, which reaches neither files nor Python's
internals, in a process of its own with bounds on time, steps, memory and output.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip, parse_json, read_json, valid_text

_MOST_SECONDS = 2  # of a processor, for a conversation; without such limits (Windows) the next one alone
_LONGEST_S = 120  # that a process is waited for, on a busy machine
_MOST_STEPS = 300_000  # lines of the template's code, and of filters, that run for a conversation
_MOST_CHARACTERS = 1_000_000  # or three times those of the messages
_MOST_BYTES = 1 << 30
_AT_ONCE = 200  # conversations that a process is sent before it is waited for
_BEGIN, _END = (f"\ufdd0{secrets.token_hex(8)}{side}\ufdd1" for side in "<>")  # marks that no message holds
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Mapping[str, str]]


class RenderedChat(NamedTuple):
    """A whole conversation as text, and where in it the assistant's replies are, their end tokens included."""

    text: str
    replies: list[tuple[int, int]]


def find_template(directory: Path) -> tuple[str | None, JsonObject]:
    """The chat template of a checkpoint or an export, None without one, and what tokenizer_config.json says."""
    path, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings = read_json(path) if path.exists() else {}
    if file.exists():
        try:
            return file.read_text(encoding="utf-8"), settings
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{file}: not UTF-8 at byte {error.start}; copy it again") from None
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        named = (item for item in found if isinstance(item, dict) and item.get("name") == "default")
        found = next(named, {}).get("template")
    return found if isinstance(found, str) else None, settings


def render_chats(directory: Path, chats: Sequence[Messages]) -> Iterator[str]:
    """The texts of conversations, up to where the model's answer begins.

    Args:
        directory: a checkpoint or an export with a template in chat_template.jinja or tokenizer_config.json.
        chats: of messages, each with `role` (system, user or assistant) and `content`.

    Raises:
        ArtifactError: there is no template, or it fails, exceeds the bounds or refuses these messages.
    """
    for answer in _answers(directory, chats):
        yield _text(answer, directory)


def render_conversations(
    directory: Path, conversations: Sequence[Messages], where: Sequence[str], special: Sequence[str]
) -> Iterator[RenderedChat]:
    """Whole conversations with the places of the assistant's replies.

    A template that marks them by `{% generation %}` says where they are. With others, a reply is what the template
    adds to the messages before it, from the end of its generation prompt to the last special token. `where` names the
    file and row of each conversation; `special` are spellings of the special tokens.

    Raises:
        ArtifactError: as for `render_chats`, or the places cannot be found.
    """
    for place, answer in zip(where, _answers(directory, conversations, special), strict=True):
        if "problem" in answer:
            fails = f"the chat template of {directory} fails ({clip(answer['problem'], 200)})"
            raise ArtifactError(f"{place}: {fails}; correct or delete the row")
        yield RenderedChat(answer["text"], [(begin, end) for begin, end in answer["replies"]])


def _answers(
    directory: Path, conversations: Sequence[Messages], special: Sequence[str] | None = None
) -> Iterator[JsonObject]:
    renderer, done = ChatRenderer(directory, special), 0
    try:
        while done < len(conversations):
            answers = renderer.ask(conversations[done : done + _AT_ONCE])
            yield from answers
            done += len(answers)
    finally:
        renderer.close()


def _text(answer: JsonObject, directory: Path) -> str:
    if "problem" in answer:
        problem = clip(answer["problem"], 200)
        raise ArtifactError(f"{directory}: the chat template fails ({problem}); give a plain prompt")
    return str(answer["text"])


def _header(directory: Path, special: Sequence[str] | None = None) -> JsonObject:
    """What the child process is told first."""
    template, settings = find_template(directory)
    if template is None:
        raise ArtifactError(
            f"{directory}: has no chat template, so the model was not trained to chat; give a plain prompt"
            if special is None
            else f"{directory}: has no chat template; give plain text, or give it one with train --chat-template chatml"
        )
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    absent = dict.fromkeys(("tools", "documents"))  # defined: templates ask whether they are none
    return {"template": template, "names": absent | names, "special": special, "seconds": _MOST_SECONDS}


_ROOT = Path(__file__).resolve().parents[2]
_COMMAND = [sys.executable, "-c", f"from {__name__} import _render_requests; _render_requests()"]


class ChatRenderer:
    """Renders conversations as `render_chats` does, in a child process that stays for the next one."""

    def __init__(self, directory: Path, special: Sequence[str] | None = None) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._directory, self._header = directory, _header(directory, special)

    def __getstate__(self) -> JsonObject:
        return vars(self) | {"_child": None}  # a copy starts a process of its own

    def __call__(self, messages: Messages) -> str:
        """The text up to where the model's answer begins.

        Raises:
            UsageError: a message is not valid UTF-8.
            ArtifactError: the template fails, exceeds the bounds or refuses these messages.
        """
        for message in messages:
            valid_text(message["content"])
        return _text(self.ask([messages])[0], self._directory)

    def ask(self, conversations: Sequence[Messages]) -> list[JsonObject]:
        """What the child process says of each conversation: `text` (and `replies`, given `special`), or a `problem`.

        Those after a problem are not answered. If the child ends or takes too long, only the first conversations are,
        the very first one at least.
        """
        child, lines = self._child, list[bytes]()
        requests: list[object] = [[[dict(message) for message in messages] for messages in conversations]]
        if child is None or child.poll() is not None:
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            own: dict[str, Any] = {"cwd": _ROOT, "start_new_session": True}  # Ctrl-C is for the parent, which saves
            child = self._child = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=nowhere, **own)
            requests.insert(0, self._header)
        late, began = Timer(_LONGEST_S, child.kill), time.monotonic()
        late.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            with suppress(BrokenPipeError):  # it reads all of a line before it answers
                child.stdin.writelines(json.dumps(request).encode() + b"\n" for request in requests)
                child.stdin.flush()
            for line in islice(child.stdout, len(conversations)):
                lines += [line] if line.endswith(b"\n") else []
                if line.startswith(b'{"problem"'):
                    break  # callers end here: the others may take as long, or as much memory
        finally:
            late.cancel()
            if len(lines) < len(conversations):  # its pipes close before it is seen to have ended
                self.close()
        if lines:
            return [parse_json(line, self._directory) for line in lines]
        too_long = child.returncode == -getattr(signal, "SIGXCPU", 0) or time.monotonic() - began >= _LONGEST_S
        return [{"problem": f"it takes longer than {_MOST_SECONDS} s" if too_long else "it ended its process"}]

    def close(self) -> None:
        """End the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    __del__ = close  # with a model that is dropped; else the process would wait until this one ends


def _render_requests() -> None:
    """In the child process: read a template and lines of conversations, and write a line of JSON for each of them."""
    with suppress(ImportError, ValueError, OSError):  # no such limits on Windows and, for memory, macOS
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    header, template = json.loads(sys.stdin.readline()), None

    def render(messages: Messages, prompt: bool) -> str:
        nonlocal template
        template = template or _compiled(header["template"])
        return _rendered(template, messages, {**header["names"], "add_generation_prompt": prompt})

    for messages in chain.from_iterable(map(json.loads, sys.stdin)):
        with suppress(NameError, ValueError, OSError):
            until = math.ceil(time.process_time()) + header["seconds"]
            resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        try:
            if header["special"] is None:
                output = json.dumps({"text": render(messages, True).replace(_BEGIN, "").replace(_END, "")})
            else:
                output = json.dumps(_with_replies(render, messages, header)._asdict())
        except MemoryError:
            output = json.dumps({"problem": "it needs too much memory"})
        except Exception as error:  # whatever a template can do
            output = json.dumps({"problem": str(error) or type(error).__name__})
        print(output, flush=True)


def _compiled(source: str) -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}` puts marks around what the model says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [next(marks), *body, next(marks)]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # Hugging Face's templates are written for these settings and names.
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _rendered(template: Any, messages: Messages, names: JsonObject) -> str:
    steps, parts, length = 0, list[str](), 0
    most = max(_MOST_CHARACTERS, 3 * sum(len(message["content"]) for message in messages))

    def count(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal steps
        steps += 1
        if steps > _MOST_STEPS:
            raise RuntimeError(f"it takes more than {_MOST_STEPS:,} steps")
        return count

    sys.settrace(count)
    try:
        for part in template.generate(messages=messages, **names):
            parts.append(part)
            length += len(part)
            if length > most:
                raise RuntimeError(f"it writes more than {most:,} characters")
    finally:
        sys.settrace(None)
    return "".join(parts)


def _with_replies(render: Callable[[Messages, bool], str], messages: Messages, header: JsonObject) -> RenderedChat:
    """A whole conversation and its replies, see `render_conversations`."""
    whole = render(messages, False)
    if _GENERATION.search(header["template"]):
        parts = re.split(f"{_BEGIN}|{_END}", whole)
        ends = [*accumulate(map(len, parts))]
        return RenderedChat("".join(parts), [*zip(ends[::2], ends[1::2], strict=False)])
    special, replies, read = tuple(header["special"]), list[tuple[int, int]](), 0
    for place, message in enumerate(messages):
        if message["role"] not in ("user", "assistant"):
            continue  # some templates write what the system says later, or not at all
        content = message["content"].strip()
        found = whole.find(content, read)
        after = found + len(content)
        if message["role"] == "assistant":
            if found < 0 or not content:
                found, after = _content_place(render, messages, place, whole)
            # Some templates write a turn in another way if turns follow it: its content tells where the reply is.
            before = render(messages[:place], True) if place else None
            until = render(messages[: place + 1], False)
            begin = len(before) if before is not None and whole.startswith(before) else found
            end = len(until) if whole.startswith(until) else _after_token(whole, after, special)
            if begin < 0 or end < begin:
                raise ValueError(f"reply {len(replies) + 1} does not stand unchanged in the rendered text")
            reply = whole[begin:end].rstrip()
            replies.append((begin, begin + len(reply) if reply.endswith(special) else end))
        read = max(read, after) if found >= 0 else read
    return RenderedChat(whole, replies)


def _content_place(
    render: Callable[[Messages, bool], str], messages: Messages, place: int, whole: str
) -> tuple[int, int]:
    """Begin and end of what a template writes of a message, such as a reply without its reasoning; -1 if not found."""
    marked = [*messages[:place], {**messages[place], "content": _BEGIN}, *messages[place + 1 :]]
    before, mark, after = render(marked, False).partition(_BEGIN)
    end = len(whole) - len(after) if mark and whole.endswith(after) else -1
    return len(before) if whole.startswith(before) else -1, end


def _after_token(text: str, place: int, special: Sequence[str]) -> int:
    """The end of the first special token from a place on; the place if none follows."""
    ends = [(at, at + len(token)) for token in special if (at := text.find(token, place)) >= 0]
    return -1 if place < 0 else min(ends)[1] if ends else place
