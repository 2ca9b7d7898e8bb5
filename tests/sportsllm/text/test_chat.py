"""Chat templates against those of `transformers`."""

import os
import shutil
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import pytest
import transformers

from sportsllm.errors import ArtifactError
from sportsllm.text import chat
from sportsllm.text.chat import ChatRenderer, Messages, render_chats
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.checkpoint_files import edit_json

CHATML = """{%- if not messages -%}
    {{ raise_exception('nothing was said') }}
{%- endif %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ bos_token }}system: be brief
    {% endif %}
{{ '<turn>' + message['role'] + '\n' + message['content'] | trim + eos_token + '\n' }}
{% endfor %}
{{ messages[0] | tojson }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
{% if tools is not none or documents is not none %}You have tools.{% endif %}
{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"""
MESSAGES = [
    {"role": "user", "content": " Who won the “Cup”? "},
    {"role": "assistant", "content": "They did."},
    {"role": "user", "content": "<b>When?</b>"},
]


def with_template(source: Path, target: Path, template: object) -> Path:
    shutil.copytree(source, target)
    edit_json(target / "tokenizer_config.json", chat_template=template)
    return target


@pytest.mark.parametrize("messages", [MESSAGES, [{"role": "system", "content": "Be kind."}, *MESSAGES]])
def test_texts_are_those_of_transformers(
    messages: list[dict[str, str]], tokenizer_directory: Path, tmp_path: Path
) -> None:
    directory = with_template(tokenizer_directory, tmp_path / "model", CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    text = next(render_chats(directory, [messages]))
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = load_tokenizer(directory).encode(text, special=True)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert {0, 1} & set(ids) and not {0, 1} & set(load_tokenizer(directory).encode(text))


def test_a_template_in_its_own_file_or_by_name(tokenizer_directory: Path, tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes {{ messages[0].content }}"}]
    directory = with_template(tokenizer_directory, tmp_path / "model", named)
    assert next(render_chats(directory, [MESSAGES[2:]])) == "yes <b>When?</b>"
    (directory / "chat_template.jinja").write_text("file {{ messages | length }}", encoding="utf-8")
    assert next(render_chats(directory, [MESSAGES])) == "file 3"


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "has no chat template"),
        ([{"name": "tools", "template": "x"}], "has no chat template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "chat template fails"),
        ("{{ messages[0].content + 1 }}", "chat template fails"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% include '/etc/hostname' %}", "chat template fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages | tojson(indent=10 ** 10) }}", "too much memory"),
        ("{{ 'x' * 10 ** 10 }}", "too much memory"),
        ("{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2, "it takes more than 300,000 steps"),
        ("{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}", "it writes more than 1,000,000 characters"),
    ],
)
def test_templates_that_fail_reach_out_or_do_not_end(
    template: object, message: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    directory = with_template(tokenizer_directory, tmp_path / "model", template)
    with pytest.raises(ArtifactError, match=message) as caught:
        next(render_chats(directory, [MESSAGES]))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_long_conversations_are_sent_before_answers_are_read(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than both pipes hold, in one wait a batch."""
    directory = with_template(tokenizer_directory, tmp_path / "model", "{{ messages[0].content }}")
    monkeypatch.setattr(chat, "Timer", timer := Mock(wraps=chat.Timer))
    texts = [f"{number}" + "x" * 20_000 for number in range(chat._AT_ONCE + 3)]
    assert list(render_chats(directory, [[{"role": "user", "content": text}] for text in texts])) == texts
    assert timer.call_count == 2


def renderer_of(source: Path, folder: Path, otherwise: str) -> tuple[ChatRenderer, *tuple[Messages, ...]]:
    """A renderer of the first message, and three conversations; the second one's text is an expression instead."""
    template = f"{{{{ {otherwise} if messages[0].content == 'long' else messages[0].content }}}}"
    conversations = ([{"role": "user", "content": text}] for text in ("first", "long", "läst"))
    return ChatRenderer(with_template(source, folder / "model", template)), *conversations


def test_conversations_after_a_problem_are_not_answered(tokenizer_directory: Path, tmp_path: Path) -> None:
    renderer, first, long, last = renderer_of(tokenizer_directory, tmp_path, "raise_exception('no')")
    assert renderer.ask([first, long, last, long]) == [{"text": "first"}, {"problem": "no"}]
    assert renderer.ask([last]) == [{"text": "läst"}]
    child = renderer._child
    with pytest.raises(ArtifactError, match=r"/model: the chat template fails \(no\); give a plain prompt"):
        renderer(long)
    assert renderer(first) == "first" and child is not None and renderer._child is child
    assert deepcopy(renderer)._child is None
    # Ctrl-C is for the parent alone: a training that it interrupts saves its state, and blames no row.
    assert os.getpgid(child.pid) != os.getpgid(0)
    child.kill()
    child.poll = lambda: None  # type: ignore[method-assign]  # its pipes close before it is seen to have ended
    with pytest.raises(ArtifactError, match="fails"):
        renderer(last)
    assert renderer(last) == "läst"
    renderer.close()
    answers, child = renderer.ask([last]), renderer._child
    del renderer  # ends the process too
    assert answers == [{"text": "läst"}] and child is not None and child.returncode is not None


def test_a_child_that_ends_has_answered_the_first_conversations(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_MOST_SECONDS", 1)
    renderer, first, long, last = renderer_of(tokenizer_directory, tmp_path, "7 ** (7 ** (8 + messages | length))")
    assert renderer.ask([first, long, last]) == [{"text": "first"}]
    assert renderer.ask([long, last]) == [{"problem": "it takes longer than 1 s"}]
    assert renderer.ask([last, first]) == [{"text": "läst"}, {"text": "first"}]
    renderer.close()
