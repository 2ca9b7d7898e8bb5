"""The page of the server in headless Chromium."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from sportsllm.serving.access import Access
from tests.sportsllm.serving.test_server import KEY, complete, export, served_by, start  # noqa: F401
from tests.support.browser import CHROMIUM, Browser, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
IDLE = "!document.getElementById('send').disabled"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as page:
        yield page


def texts(page: Browser) -> list[str]:
    script = "[...document.querySelectorAll('section:not([hidden]) .log')].map((each) => each.textContent)"
    return list(page.run(script))


def ask(page: Browser, text: str) -> None:
    page.run("document.getElementById('input').value = ''; document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter", "\r")


def test_two_models_answer_stop_and_leave(page: Browser, export: Path) -> None:  # noqa: F811
    first, second = start(export, name="teacher"), start(export, name="<b>student")
    with served_by(first, second) as client:
        page.open(f"{client.base_url}")
        page.wait("document.querySelectorAll('section').length === 2")
        assert page.run("[...document.querySelectorAll('h2')].map((each) => each.textContent)")[1] == "<b>student"
        page.wait("document.querySelector('[value=text]').checked")  # the model has no chat template
        page.run("document.getElementById('temperature').value = 0; document.getElementById('max_tokens').value = 24")
        ask(page, "Once upon a time")
        page.wait(IDLE)
        expected = complete(client, model="teacher")
        assert texts(page) == [f"Once upon a time{expected}"] * 2
        figures = page.wait("document.querySelector('.figures').textContent.includes('MB') && "
                            "document.querySelector('.figures').textContent")  # fmt: skip
        assert "24 tokens" in figures and "tokens/s" in figures and "0 of 5 prompt tokens cached" in figures
        page.run("document.getElementById('stop').value = ','")  # the first token
        ask(page, "Once upon a time")
        page.wait(f"{IDLE} && !document.querySelector('.figures').textContent.includes('reading')")
        assert texts(page) == ["Once upon a time"] * 2
        page.run("document.querySelector('#models input').click(); document.querySelector('[value=chat]').click()")
        page.run("document.getElementById('stop').value = ''; document.querySelectorAll('#models input')[1].click()")
        ask(page, "Nobody hears it")
        assert page.run("document.getElementById('input').value") == "Nobody hears it"
        page.run("document.querySelectorAll('#models input')[1].click()")
        page.run("document.getElementById('schema').value = JSON.stringify({const: 'yes'})")
        page.run("document.getElementById('clear').click()")
        ask(page, "Is it?")
        page.wait(IDLE)
        assert texts(page) == ['Is it?"yes"']
        page.run("document.getElementById('schema').value = ''; document.getElementById('max_tokens').value = ''")
        second.engine.slots.step_slots = slowly(second.engine.slots.step_slots)  # type: ignore[method-assign]
        ask(page, "Tell me all")
        page.wait("document.querySelector('section:not([hidden]) .log').lastChild.textContent.length > 5")
        page.press("Escape")
        page.wait(IDLE)
        page.wait("document.querySelector('section:not([hidden]) .figures').textContent.includes('stopped')")
        ask(page, "Tell me more")
        page.wait("document.querySelector('section:not([hidden]) .log').lastChild.textContent.length > 5")
        page.run("document.getElementById('clear').click()")
        page.wait(IDLE)
        assert page.run("columns[1].messages.length") == 0 and page.run("columns[1].figures.textContent") == ""
        second.engine.waiting.extend([None] * 99)  # type: ignore[list-item]
        ask(page, "Again")
        page.wait("document.querySelector('[role=alert]')?.textContent.includes('too many requests')")
        assert (
            page.run("columns[1].messages.length") % 2 == 0 and page.run("columns[1].log.lastChild.className") == "bad"
        )
        assert all(url.startswith((str(client.base_url), "data:")) for url in page.requested)
    assert [each for each in page.complaints if "429" not in each] == []
    first.stop()
    second.stop()


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return call(*arguments)

    return slow


def test_a_key_is_asked_for_and_a_missing_server_is_said(page: Browser, export: Path) -> None:  # noqa: F811
    model = start(export)
    with served_by(model, access=Access(api_key=KEY)) as client:
        page.open(f"{client.base_url}")
        page.wait("!!document.querySelector('section')")
        ask(page, "Hello")
        page.wait("document.querySelector('[role=alert]')?.textContent.includes('Invalid API Key')")
        page.run(f"document.getElementById('key').value = '{KEY}'; document.getElementById('max_tokens').value = 3")
        ask(page, "Hello")
        page.wait("document.querySelector('.figures').textContent.includes('3 tokens')")
    ask(page, "Hello")
    page.wait("document.querySelectorAll('[role=alert]').length === 2")
    model.stop()
