"""OpenAI's own client against the server: plain, streaming and asynchronous."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai", reason="needs the package openai")

import openai

from sportsllm.serving.access import Access
from tests.sportsllm.serving.test_server import KEY, ONCE, complete, export, served_by, start  # noqa: F401

MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def test_plain_streaming_and_asynchronous(export: Path) -> None:  # noqa: F811
    model = start(export)
    with served_by(model, access=Access(api_key=KEY)) as http:
        url = f"{http.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            assert [each.id for each in client.models.list()] == ["stories"]
            assert client.models.retrieve("stories").id == "stories"
            http.headers["Authorization"] = f"Bearer {KEY}"
            text = complete(http)
            whole = client.completions.create(model="stories", **ONCE)
            assert whole.choices[0].text == text and whole.usage.completion_tokens == 24
            chunks = client.completions.create(model="stories", stream=True, **ONCE)
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
            settings = {"model": "stories", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
            chat = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2, n=2)
            first, second = (choice.message.content for choice in chat.choices)
            assert first == second and len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
            stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
            *parts, last = list(stream)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == first
            assert last.usage.completion_tokens == 12
            with pytest.raises(openai.BadRequestError, match="temperature") as error:
                client.completions.create(model="stories", prompt="x", temperature=-1)
            assert error.value.param == "temperature"
        with openai.OpenAI(base_url=url, api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model="stories", **ONCE)

        async def several() -> list[str]:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
                tasks = [client.chat.completions.create(**settings, stream=True) for _ in range(5)]
                streams = await asyncio.gather(*tasks)
                return ["".join([part.choices[0].delta.content or "" async for part in each]) for each in streams]

        assert asyncio.run(several()) == [first] * 5
    model.stop()
