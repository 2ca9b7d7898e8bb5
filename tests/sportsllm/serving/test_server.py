"""The server over a tiny export: what it answers, what it refuses, and that company changes nothing."""

import asyncio
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.model import LoadedModel

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx
import uvicorn
from starlette.requests import ClientDisconnect

from export.runtime.slots import SlotDecoder
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import Logits, open_draft
from sportsllm.inference.sampling import Sampling
from sportsllm.serving import access as access_module
from sportsllm.serving import app as app_module
from sportsllm.serving import engine as engine_module
from sportsllm.serving.access import Access, TimedProtocol
from sportsllm.serving.app import Server
from sportsllm.serving.engine import Engine
from sportsllm.serving.models import ServedModel
from sportsllm.serving.prefixes import PrefixCache
from sportsllm.serving.requests import ApiError, CompletionRequest, parse_request
from sportsllm.serving.sampler import Sampler
from tests.support.command_line import CommandLine
from tests.support.models import STORIES

ONCE = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
KEY = "secret"
SCOPE = {"type": "http", "method": "POST", "path": "/completion", "query_string": b"", "headers": [(b"host", b"[::1]")]}


@pytest.fixture(scope="session")
def export(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as ONNX."""
    out = tmp_path_factory.mktemp("serve") / "stories"
    sportsllm.export(stories, out=out)
    return out


@pytest.fixture(scope="session")
def loaded(export: Path) -> LoadedModel:
    return sportsllm.load(export, threads=1)


@pytest.fixture(scope="module")
def served(export: Path) -> Iterator[ServedModel]:
    model = start(export)
    yield model
    model.stop()


@pytest.fixture(scope="module")
def client(served: ServedModel) -> Iterator[httpx.Client]:
    with served_by(served) as client:
        yield client


def start(
    export: Path, slots: int = 4, waiting: int = 64, cache_bytes: int = 10**7, name: str = "stories"
) -> ServedModel:
    model = ServedModel(name, export, lambda: Engine(SlotDecoder(export, slots, None, 1), cache_bytes, waiting, Lock()))
    model.start(lambda: None)
    assert comes(lambda: model.ready, 30) and model.problem is None
    return model


def comes(state: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not state() and time.monotonic() < deadline:
        time.sleep(0.01)
    return state()


@contextmanager
def served_by(*models: ServedModel, access: Access = Access(), idle_s: int = 60) -> Iterator[httpx.Client]:  # noqa: B008
    """A client of a server in this process."""
    limits = {"timeout_graceful_shutdown": 2, "timeout_keep_alive": idle_s}
    app = Server(models, access).app()
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning", http=TimedProtocol, **limits)
    server, listening = uvicorn.Server(config), config.bind_socket()
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    with httpx.Client(base_url=f"http://localhost:{listening.getsockname()[1]}", timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join()


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def complete(client: httpx.Client, **body: Any) -> str:
    return str(post(client, "/v1/completions", **ONCE | body)["choices"][0]["text"])


def events(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = client.post(path, json={**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refusal(client: httpx.Client, status: int, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return dict(reply.json()["error"])


def test_text_is_that_of_generate(client: httpx.Client, loaded: LoadedModel) -> None:
    for prompt in ("Once upon a time", "The ball", " ".join(["Tim ran home."] * 30)):
        expected = "".join(loaded.generate(prompt, max_new_tokens=24, temperature=0))
        assert complete(client, prompt=prompt) == expected
        ids = [loaded.tokenizer.begin_id, *loaded.tokenizer.encode(prompt)]
        assert complete(client, prompt=ids) == expected
    sampled = "".join(loaded.generate("Once", max_new_tokens=24, temperature=1.1, top_k=0, top_p=0.95, seed=7))
    fields = {"temperature": 1.1, "top_k": 0, "top_p": 0.95, "seed": 7}
    assert complete(client, prompt="Once", **fields) == sampled


def test_a_stream_is_the_whole(client: httpx.Client) -> None:
    body = {**ONCE, "n": 2, "temperature": 1, "seed": 3, "logprobs": 2, "cache_prompt": False}  # which rounds otherwise
    whole = post(client, "/v1/completions", **body)
    chunks = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 48
    assert {each["usage"] for each in chunks[:-1]} == {None}
    for index in (0, 1):
        mine = [each["choices"][0] for each in chunks[:-1] if each["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == whole["choices"][index]["text"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]
        for name, values in whole["choices"][index]["logprobs"].items():
            assert values == [value for each in mine if each["logprobs"] for value in each["logprobs"][name]], name
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]


def test_chat_by_chatml_without_a_template(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Book"}, {"role": "user", "content": [{"type": "text", "text": "Hey"}]}]
    rendered = "<|im_start|>system\nBook<|im_end|>\n<|im_start|>user\nHey<|im_end|>\n<|im_start|>assistant\n"
    assert post(client, "/apply-template", messages=messages) == {"prompt": rendered}
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 12, "logprobs": True, "top_logprobs": 3}
    whole = post(client, "/v1/chat/completions", **body)
    message, scores = whole["choices"][0]["message"], whole["choices"][0]["logprobs"]["content"]
    text = complete(client, prompt=rendered, max_tokens=12)
    assert message == {"role": "assistant", "content": text, "refusal": None}
    assert whole["usage"]["prompt_tokens"] == 69 and len(scores) == 12  # as llama.cpp's tests count them
    assert all(len(each["top_logprobs"]) == 3 and each["logprob"] <= 0 for each in scores)
    first, *rest = events(client, "/v1/chat/completions", **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in rest) == message["content"]


@pytest.fixture(scope="module")
def packed(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as ONNX in INT4, which calls kernels, with a float16 cache."""
    out = tmp_path_factory.mktemp("packed")
    quantize_checkpoint(stories, out / "int4", QuantizationConfig(), "rtn")
    sportsllm.export(out / "int4", out=out / "onnx", kv_cache="fp16")
    return out / "onnx"


@pytest.mark.parametrize("fixture", ["export", "packed"])
def test_requests_at_once_get_what_they_get_alone(fixture: str, request: pytest.FixtureRequest) -> None:
    """Ragged prompts, more requests than slots, some abandoned on the way."""
    directory = request.getfixturevalue(fixture)
    served, loaded = start(directory), sportsllm.load(directory, threads=1)
    prompts = [" ".join(["One day a cat saw a bird."] * (1 + number % 7)) + f" {number}" for number in range(24)]

    async def ask(there: httpx.AsyncClient, number: int) -> str:
        body = {**ONCE, "prompt": prompts[number], "max_tokens": 5 + 3 * (number % 6), "cache_prompt": number % 2 == 0}
        request = asyncio.create_task(there.post("/v1/completions", json=body))
        if number % 3 == 0:
            await asyncio.sleep(0.01)
            request.cancel()
            return ""
        return str((await request).json()["choices"][0]["text"])

    async def everybody() -> list[str]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as there:
            return await asyncio.gather(*(ask(there, number) for number in range(24)))

    with served_by(served) as client:
        texts = asyncio.run(everybody())
    for number, text in enumerate(texts):
        if number % 3:
            tokens = 5 + 3 * (number % 6)
            expected = "".join(loaded.generate(prompts[number], max_new_tokens=tokens, temperature=0))
            assert text == expected, number
    assert is_idle(served.engine, 10)
    served.stop()


def is_idle(engine: Engine, within_s: float = 0) -> bool:
    return comes(lambda: not engine.running and not engine.waiting, within_s)


def test_a_sequence_that_fails_ends_alone(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, expected = Sampler.choose, complete(client, max_tokens=60)

    def fail(self: Sampler, logits_V: Logits, seen: Sequence[int]) -> int:
        if self.sampling.seed == 13 and len(seen) > 20:
            raise BaseException
        return choose(self, logits_V, seen)

    monkeypatch.setattr(Sampler, "choose", fail)
    bodies = ({**ONCE, "max_tokens": 60, "seed": seed} for seed in (1, 13))
    with ThreadPoolExecutor() as pool:
        well, failed = pool.map(lambda body: client.post("/v1/completions", json=body), bodies)
    assert well.json()["choices"][0]["text"] == expected == complete(client, max_tokens=60)
    assert failed.status_code == 500 and "error" in failed.json()["error"]["message"]


def ask_and_leave(served: ServedModel, body: dict[str, Any], leaves: Callable[[], bool]) -> None:
    """A client whose connection ends as soon as `leaves` says so."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        while not messages and not leaves():
            await asyncio.sleep(0.001)
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    asyncio.run(Server([served], Access()).app()(SCOPE, receive, send))


def test_a_client_that_left_before_its_turn_starts_nothing(served: ServedModel) -> None:
    before = served.engine.counts["prompt_tokens"]
    with suppress(ClientDisconnect):
        ask_and_leave(served, {**ONCE, "max_tokens": 400, "stream": True}, lambda: True)
    assert is_idle(served.engine) and served.engine.counts["prompt_tokens"] == before


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Sampler.choose

    def later(self: Sampler, logits_V: Logits, seen: Sequence[int]) -> int:
        time.sleep(0.002)
        return choose(self, logits_V, seen)

    monkeypatch.setattr(Sampler, "choose", later)


LONG = {**ONCE, "max_tokens": 400, "ignore_eos": True, "n": 6}  # four run and two wait


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(served: ServedModel, stream: bool) -> None:
    engine, before = served.engine, served.engine.counts["generated_tokens"]
    ask_and_leave(served, LONG | {"stream": stream}, lambda: len(engine.running) == 4)
    assert is_idle(engine, 30)
    assert 0 < engine.counts["generated_tokens"] - before < 4 * 400


@pytest.mark.usefixtures("_slow")
def test_sequences_that_take_too_long_end(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LONGEST_S", 0.1)
    failed = client.post("/v1/completions", json=LONG)
    assert failed.status_code == 500 and "timeout; it took" in failed.json()["error"]["message"]


def test_shared_beginnings_are_read_once_within_a_bound(export: Path) -> None:
    model, long = start(export, cache_bytes=400_000), " ".join(["Tom had a red ball."] * 20)
    with served_by(model) as client:
        first = post(client, "/v1/completions", **ONCE | {"prompt": long})
        again = post(client, "/v1/completions", **ONCE | {"prompt": f"{long} Then"})
        assert again["timings"]["cache_n"] == first["usage"]["prompt_tokens"]
        assert first["timings"]["cache_n"] == 0 and again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        for word in ("Cat", "Dog", "Fox"):
            complete(client, prompt=f"{word} {long}")
            assert 0 < model.engine.prefixes.size_bytes <= 400_000
        several = post(client, "/v1/completions", **ONCE | {"prompt": f"Bird {long}", "n": 3, "temperature": 1})
        assert model.engine.counts["cached_tokens"] > 3 * 100 and len(several["choices"]) == 3
        assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 1  # what the first has read is not old
    model.stop()


def test_stops_biases_penalties_and_constraints(client: httpx.Client, loaded: LoadedModel) -> None:
    text = complete(client)
    stop = text[10:14]
    reply = post(client, "/v1/completions", **ONCE | {"stop": ["never", stop]})["choices"][0]
    assert reply["text"] == text[: text.index(stop)] and reply["finish_reason"] == "stop"
    token = loaded.tokenizer.encode("z")[-1]
    assert set(complete(client, logit_bias={str(token): 100}).replace(" ", "")) == {"z"}
    special = post(client, "/v1/completions", **ONCE | {"stop": "<s>", "logit_bias": {"1": 100}})["choices"][0]
    assert special["finish_reason"] == "stop"
    assert complete(client, repetition_penalty=5) != text
    pytest.importorskip("llguidance")
    assert complete(client, regex="[0-9]{2}:[0-9]{2}")[2] == ":"
    schema = {"type": "object", "properties": {"goals": {"enum": [1, 2, 3]}}, "required": ["goals"]}
    closed = schema | {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": closed}}
    assert set(json.loads(complete(client, response_format=wanted))) == {"goals"}
    assert complete(client, response_format={"type": "json_object"}).startswith("{")
    assert complete(client, json_schema={"const": [1, 2]}) == "[1,2]" and complete(client, json_schema=True)
    assert refusal(client, 400, **ONCE, json_schema=False)["param"] == "json_schema"
    assert "regex" in refusal(client, 400, **ONCE | {"regex": "("})["param"]
    assert refusal(client, 400, **ONCE | {"json_schema": {"type": "hiccup"}})["param"] == "json_schema"
    both = refusal(client, 400, **ONCE, json_schema=schema, response_format=wanted)["message"]
    assert "response_format or json_schema, not both" in both
    assert set(json.loads(complete(client, response_format={"type": "text"}, json_schema=closed))) == {"goals"}
    for beyond in ({"regex": "(?:a|aa|aaa){500}b"}, {"json_schema": {"anyOf": [{"$ref": "#"}]}}):
        assert "error" in refusal(client, 500, **ONCE | beyond)["message"]
    assert complete(client, regex="a{1,3}") in ("a", "aa", "aaa")


def test_echo_scores_the_prompt(client: httpx.Client, loaded: LoadedModel) -> None:
    ids = [loaded.tokenizer.begin_id, *loaded.tokenizer.encode(" ".join(["The dog sat on the mat."] * 25))]
    body = {"prompt": [ids, ids[:9]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    for choice, row in zip(post(client, "/v1/completions", **body)["choices"], (ids, ids[:9]), strict=True):
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is None and len(scores["tokens"]) == len(row) + 1
        tokens, offsets = ["", "The", *scores["tokens"][2:]], scores["text_offset"]  # a text starts without a space
        assert all(map(choice["text"].startswith, [token.replace("<s>", "") for token in tokens], offsets))
        (expected,) = loaded.decoder.score([row])
        np.testing.assert_allclose(scores["token_logprobs"][1:-1], expected, atol=1e-4)
        assert all(max(top.values()) <= 0 for top in scores["top_logprobs"][1:])


def test_llama_servers_own_completion(client: httpx.Client, loaded: LoadedModel) -> None:
    """See llama_cpp.py for llama.cpp's own tests."""
    body, text = {"prompt": ONCE["prompt"], "n_predict": 24, "temperature": 0, "seed": 5}, complete(client)
    whole = post(client, "/completion", **body, return_tokens=True, n_probs=2)
    assert whole["content"] == text and whole["stop_type"] == "limit" and whole["prompt"] == "<s> Once upon a time"
    assert loaded.tokenizer.decode(whole["tokens"]).strip() == text.strip() and not whole["truncated"]
    assert [each["id"] for each in whole["completion_probabilities"]] == whole["tokens"]
    assert whole["generation_settings"]["seed"] == 5 and whole["timings"]["predicted_n"] == 24
    lines = client.post("/completion", json={**body, "stream": True}).text.strip().split("\n\n")
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(each["content"] for each in pieces) == text and last["stop"] and last["content"] == ""
    assert [token for each in pieces for token in each["tokens"]] == whole["tokens"]
    wanted = ["content", "generation_settings/n_predict", "a/b"]
    fields = post(client, "/completion", **body, response_fields=wanted)
    assert fields == dict(zip(wanted, (text, 24, None), strict=True))
    ids = [1, *loaded.tokenizer.encode("Once upon a time")]
    mixed = [ids[:2], [*ids[:2], "upon a time"], {"prompt_string": "Once"}, "Once"]
    several = client.post("/completion", json=body | {"prompt": mixed}).json()
    assert [each["tokens_evaluated"] for each in several[1:]] == [len(ids), 2, 2]
    assert post(client, "/completion", **body | {"prompt": [*ids[:2], "upon a time"]})["content"] == text
    for wrong in ({"prompt_string": "a", "multimodal_data": []}, [1, [2]]):
        assert refusal(client, 400, "/completion", prompt=wrong)["param"] == "prompt"
    assert refusal(client, 400, prompt=[])["message"] == "prompt: give a text, token ids, or a list of prompts"
    assert "stop: give a text, or a list of up to 16" in refusal(client, 400, **ONCE, stop="")["message"]
    for letter in "z5":
        biased = post(client, "/completion", **body, logit_bias=[[letter, 100]])["content"]
        assert set(biased.replace(" ", "")) == {letter}
    for bias in ([["z", 100, 3]], [[[1], 5]], [[-1, 5]], [[10**12, 5]], [[True, 5]]):
        assert refusal(client, 400, "/completion", **body, logit_bias=bias)["param"] == "logit_bias"
    spelled = {**body, "prompt": f"<s>{ONCE['prompt']}"}  # as a template begins
    assert post(client, "/completion", **spelled)["tokens_evaluated"] == whole["tokens_evaluated"] == len(ids)
    assert complete(client, prompt=spelled["prompt"]) != text
    assert client.get("/slots").json()[3] == {"id": 3, "n_ctx": 512, "is_processing": False}
    messages = [{"role": "user", "content": "Hi"}]
    count = post(client, "/chat/completions/input_tokens", messages=messages)["input_tokens"]
    assert count == post(client, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    pytest.importorskip("llguidance")
    assert complete(client, grammar='root ::= "a"{5}') == "aaaaa"
    assert refusal(client, 400, **ONCE, grammar="root ::= (")["param"] == "grammar"
    assert "not both" in refusal(client, 400, **ONCE, grammar="x", regex="y")["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "hot"}, "temperature"), ({"temperature": float("1e9")}, "temperature"), ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"), ({"max_tokens": 1.5}, "max_tokens"), ({"stop": [""]}, "stop"), ({"stop": 3}, "stop"),
        ({"prompt": []}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [512]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e39}}, "logit_bias"), ({"repetition_penalty": 1e-42}, "repetition_penalty"),
        ({"stop": ["x" * 2000]}, "stop"), ({"response_format": {"type": "sound"}}, "response_format"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(client, 400, **ONCE | change)
    assert error["param"] == param and error["type"] == "invalid_request_error" and param in error["message"]
    assert complete(client, nonsense=1, user="x", temperature=0, top_k=None)


def test_refusals(served: ServedModel, client: httpx.Client, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="the chat template makes no text"):
        served._check([])
    error = refusal(client, 400, prompt=[1] * 600)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512) and "600" in error["message"]
    for body in (b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b"\xff", b'{"prompt": NaN}', b"[" * 100_000):
        assert client.post("/v1/completions", content=body).status_code == 400, body[:20]
    for messages in (None, "text", [123], [{}], [{"role": 1}], [{"role": "user", "content": 1}], []):
        said = refusal(client, 400, "/v1/chat/completions", messages=messages)["message"]
        assert messages is None or said.endswith("a content: a text, or a list of parts of type text")
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    assert access_module.refusal(None, ValueError()).headers["Connection"] == "close"
    monkeypatch.setattr(app_module, "MOST_BODY_BYTES", 1000)
    refusal(client, 413, prompt="a" * 2000)
    model = start(export, slots=1, waiting=1)
    monkeypatch.setattr(model, "jobs", lambda *_: pytest.fail("made more sequences than may wait"))
    monkeypatch.setattr(model.engine, "waiting", [None])
    with served_by(model) as full:
        assert "3 sequences, 2 can" in refusal(full, 400, **ONCE, n=3)["message"]
        reply = full.post("/v1/completions", json={**ONCE, "n": 2})
    assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1
    model.stop()


def test_silent_connections_end(served: ServedModel) -> None:
    """Those that say nothing, a part of a head, or nothing after a reply; a request that runs stays."""
    with served_by(served, idle_s=1) as client:
        address, began = (client.base_url.host, client.base_url.port), time.monotonic()
        head, body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", json.dumps({**ONCE, "max_tokens": 400})
        sent = ["", head, f"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n{head}"]
        silent = [socket.create_connection(address, timeout=5) for _ in sent]
        for connection, data in zip(silent, sent, strict=True):
            connection.sendall(data.encode())
        running = socket.create_connection(address, timeout=20)
        running.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.6)
        for connection in silent[1:]:
            connection.sendall(b"X-A: b\r\n")  # does not extend the time
        assert [connection.recv(4096)[:15] for connection in silent] == [b"", b"", b"HTTP/1.1 200 OK"]
        assert silent[2].recv(4096) == b"" and 0.9 < time.monotonic() - began < 3
        running.sendall(body.encode())
        assert running.recv(4096).startswith(b"HTTP/1.1 200 OK")
        for connection in [*silent, running]:
            connection.close()


def test_connections_beyond_the_bound_are_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "MOST_CONNECTIONS", 1)
    assert client.get("/health").status_code == 200
    with httpx.Client(base_url=client.base_url) as other:
        reply = other.post("/v1/completions", json=ONCE)
    assert reply.status_code == 503 and reply.headers["Retry-After"] == "1" and reply.headers["Connection"] == "close"
    assert reply.json()["error"]["type"] == "unavailable_error"
    assert client.get("/health").status_code == 200


def test_strangers_are_kept_out(served: ServedModel) -> None:
    friend, key, path = {"Origin": "http://friend.example"}, "schlüssel", "/v1/completions"
    right = {"Authorization": f"Bearer {key}".encode()}
    with served_by(served, access=Access(api_key=key, origins=(friend["Origin"],))) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "ü".encode()}):
            reply = client.post(path, json=ONCE, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        assert client.post(path, json=ONCE, headers={"X-Api-Key": key.encode()}).status_code == 200
        for public in ("/", "/health", "/v1/models"):
            assert client.get(public).status_code == 200
        for headers in ({"Host": "evil.example"}, {"Host": ""}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
            assert client.post(path, json=ONCE, headers=right | headers).status_code == 403
        own = {"Origin": str(client.base_url).rstrip("/")}
        assert client.post(path, json=ONCE, headers=right | own).status_code == 200
        reply = client.options(path, headers=friend)
        assert reply.status_code == 200 and reply.headers["Access-Control-Allow-Origin"] == friend["Origin"]
        assert client.post(path, json=ONCE, headers=right | friend).headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Origin" not in client.get("/health").headers


def test_a_client_that_never_reads_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.body"})

    async def never(*_: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(access_module, "STALLED_S", 0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(Access().guard(answer)(SCOPE, never, never))


@pytest.mark.parametrize("status", [200, 503])
def test_requests_of_a_server_that_closes_are_told(status: int) -> None:
    """uvicorn cancels those that run: in the middle of a stream, or before a reply."""
    sent = list[dict[str, Any]]()

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        if status == 200:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Access().guard(answer)(SCOPE, send, send))
    assert sent[0]["status"] == status and b'"the server is closing"' in sent[-1]["body"]


def test_helpers_and_several_models(
    served: ServedModel, client: httpx.Client, export: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = post(client, "/tokenize", content="What is 🤗?", add_special=True)["tokens"]
    assert tokens[0] == 1 and post(client, "/detokenize", tokens=tokens)["content"].strip() == "What is 🤗?"
    pieces = post(client, "/tokenize", content="a ball", with_pieces=True)["tokens"]
    assert "".join(each["piece"] for each in pieces) == " a ball"
    for name in ("stories", "gpt-4", "gpt-5"):
        assert post(client, "/v1/completions", **ONCE, model=name)["model"] == "stories"
    said = [line for line in capfd.readouterr().err.splitlines() if "a request for the model" in line]
    assert said == ["a request for the model 'gpt-4' is answered by stories, the only one here"]
    other = start(export, name='o"ther')
    with served_by(served, other) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["stories", 'o"ther']
        assert client.get("/v1/models/stories").json()["meta"]["n_ctx"] == 512
        assert client.get("/props").json()["total_slots"] == 4
        assert post(client, "/v1/completions", **ONCE, model='o"ther')["model"] == 'o"ther'
        error = refusal(client, 404, **ONCE, model="gpt-4")
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
        assert error["message"] == "the model 'gpt-4' does not exist; this server has stories, o\"ther"
        assert r'sportsllm_sequences_total{model="o\"ther"} 1' in client.get("/metrics").text
    other.stop()


def test_endpoints_are_described(client: httpx.Client) -> None:
    told = client.get("/openapi.json").json()
    body = told["paths"]["/completion"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = told["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["prompt"] and schema["properties"]["temperature"]["minimum"] == 0
    assert told["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    for path in told["paths"]:  # all are there
        assert "{" in path or client.head(path).status_code in (200, 405), path


def test_health_says_when_the_model_is_there(export: Path) -> None:
    model = ServedModel("slow", export, lambda: Engine(SlotDecoder(export, 1, None, 1), 0, 1, Lock()))
    with served_by(model) as client:
        assert client.get("/health").status_code == client.post("/v1/completions", json=ONCE).status_code == 503
        assert client.get("/v1/models").status_code == 200
    model.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(number: signal.Signals, export: Path, cli: CommandLine) -> None:
    command = [sys.executable, "-m", "sportsllm.cli", "serve", str(export), "--port", "0", "--threads", "1", "--json"]
    if number == signal.SIGTERM:  # as a function, without the program's own handler
        call = f"sportsllm.serve([{str(export)!r}], port=0, threads=1).to_json()"
        ends = "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
        command = [sys.executable, "-c", f"import json, signal, sportsllm; print(json.dumps({call})); {ends}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("serving"))
    url = line.split()[3].rstrip(";")
    with httpx.Client(base_url=url, timeout=60) as client:
        while client.get("/health").status_code != 200:  # the port is open before the server is announced
            time.sleep(0.05)
        cli.refuses(5, "is in use", "serve", export, "--port", client.base_url.port)
        with client.stream("POST", "/v1/completions", json={**ONCE, "max_tokens": 400, "stream": True}) as reply:
            next(reply.iter_lines())
            began = time.monotonic()
            process.send_signal(number)
            out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and json.loads(out)["models"] == ["stories"] and time.monotonic() - began < 5


def test_exports_that_cannot_be_served_are_refused(export: Path, cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "stories").mkdir()
    cli.refuses(2, "two exports", "serve", export, tmp_path / "stories")

    async def cell() -> None:
        sportsllm.serve([export], port=0)

    with pytest.raises(UsageError, match="in another thread"):
        asyncio.run(cell())
    cli.refuses(2, "native kernels, and neither selected tokens nor an LSTM", "generate", export, "--draft", export)
    cli.refuses(2, "not an export", "serve", export, "--draft", STORIES, "--port", 0)
    config = load_config(export)
    larger: Any = SimpleNamespace(exact_rows=8, config=dataclasses.replace(config, vocab_size=config.vocab_size + 8))
    with pytest.raises(UsageError, match="vocabulary has 512 rows"):
        open_draft(export, export, larger)
    cli.refuses(2, "more than the context of", "serve", export, "--context", 100_000, "--port", 0)
    for file in ("model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "stories" / file).write_bytes((export / file).read_bytes())
    cli.refuses(3, "model.onnx.data: not found", "serve", tmp_path / "stories", "--port", 0)


def test_the_prefix_cache_forgets_what_was_used_first_and_makes_room_before_it_copies() -> None:
    cache, sizes = PrefixCache(1_000, whole=False), list[int]()

    class Watched(np.ndarray[Any, Any]):
        def copy(self, *_: Any) -> Any:
            sizes.append(self.nbytes + sum(array.nbytes for each in cache._kept for array in each.arrays))
            return np.array(self)

    def keep(*ids: int, size_bytes: int = 400) -> list[list[int]]:
        cache.keep(ids, [np.zeros(size_bytes, np.uint8).view(Watched)])
        return [each.ids.tolist() for each in cache._kept]

    assert [keep(number) for number in range(4)][-1] == [[2], [3]]
    assert sizes == [400, 800, 800, 800] and cache.size_bytes == 800
    assert cache.find(np.array([2, 5]))[0] == 1 and keep(4, 5) == [[2], [4, 5]]
    assert keep(4, 5, 6) == keep(4, 5) == keep(9, size_bytes=1_001) == [[2], [4, 5, 6]]  # known, and too large
    cache = PrefixCache(1_000, whole=True)
    assert keep(1) == [[1]] and keep(1, 2, 3) == [[1], [1, 2, 3]]  # a state cannot be cut to a shorter text
    assert cache.find(np.array([1, 2, 4]))[0] == 1 and cache.find(np.array([1, 2, 3, 4]))[0] == 3


def test_penalties_and_the_least_probability_by_hand() -> None:
    """A token loses presence + frequency * times. At temperature 2 the half of the largest is 2 * log(2) below it."""
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    penalized = Sampler(Sampling(0), presence=0.5, frequency=0.3, bias={2: -1.0})
    assert [penalized.choose(logits, []) for _ in range(5)] == [0, 0, 1, 0, 0] and logits.tolist() == [2, 1, 0]
    assert Sampler(Sampling(0), bias={0: -0.5}).choose(logits, []) == 0  # added, not put in its place
    samplers = (Sampler(Sampling(2.0, 0, 1.0, seed=seed), min_p=0.5) for seed in range(50))
    assert {sampler.choose(logits, []) for sampler in samplers} == {0, 1}


def test_a_request_becomes_a_sequence(served: ServedModel) -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "min_p": 0.25, "cache_prompt": False, "seed": 7}
    body = parse_request(CompletionRequest, json.dumps({"prompt": "Once", "max_tokens": 10**6, **fields}).encode())
    (job,) = served.jobs(body, lambda _: None)
    sampler = job.sampler
    assert (sampler.presence, sampler.frequency, sampler.min_p, sampler.sampling.seed) == (0.5, 1.5, 0.25, 7)
    assert not job.reuse and job.most == 512 - len(job.prompt)  # the context's end
