"""The server's endpoints: OpenAI's, llama-server's helpers, metrics, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sportsllm.console import log
from sportsllm.files import clip
from sportsllm.process_memory import peak_rss_bytes
from sportsllm.serving.access import Access, refusal
from sportsllm.serving.engine import LONGEST_S, Job, Piece
from sportsllm.serving.metrics import describe_metrics
from sportsllm.serving.models import ServedModel
from sportsllm.serving.replies import Json, NativeReply, Reply, encode_json
from sportsllm.serving.requests import (
    SAMPLING,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    ModelRequest,
    NativeRequest,
    TokenizeRequest,
    openapi,
    parse_request,
)

MOST_BODY_BYTES = 2_000_000
BODY_S = 30.0
_FAILED = {
    "error": "the server's log says more",
    "timeout": f"it took over {LONGEST_S:.0f} s, waiting included; ask for fewer tokens",
    "cancelled": "the client left",
}
Answer = Callable[[Request, ServedModel, Any], Awaitable[Response]]


async def read_body(request: Request) -> bytes:
    """A request's body.

    Raises:
        ApiError: larger than the bound, or too slow.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:.0f} s") from None
    return bytes(body)


class Server:
    """The endpoints over loaded models; requests that name none of them go to the first."""

    def __init__(self, models: Sequence[ServedModel], access: Access) -> None:
        self._models, self._access = {model.name: model for model in models}, access
        self._started, self._told = time.time(), False

    def app(self) -> Any:
        """The ASGI application."""
        count = _in_worker(lambda model, body: {"input_tokens": len(model.encode_chat(body.messages))})
        posts: dict[str, tuple[type[ModelRequest], Answer]] = {
            "/v1/chat/completions": (ChatRequest, _generate),
            "/chat/completions": (ChatRequest, _generate),
            "/v1/completions": (CompletionRequest, _generate),
            "/completion": (NativeRequest, _generate),
            "/completions": (NativeRequest, _generate),
            "/v1/chat/completions/input_tokens": (Conversation, count),
            "/chat/completions/input_tokens": (Conversation, count),
            "/tokenize": (TokenizeRequest, _in_worker(_tokenize)),
            "/detokenize": (DetokenizeRequest, _in_worker(_detokenize)),
            "/apply-template": (Conversation, _in_worker(lambda model, body: {"prompt": model.render(body.messages)})),
        }
        gets = {
            "/v1/models": self._list,
            "/models": self._list,
            "/v1/models/{name:path}": self._show,
            "/health": self._health,
            "/props": self._props,
            "/slots": self._slots,
            "/metrics": self._metrics,
        }

        description = JSONResponse(openapi({path: kind for path, (kind, _) in posts.items()}, gets))
        page = Response(Path(__file__).with_name("page.html").read_bytes(), media_type="text/html")
        routes = [self._post(path, *each) for path, each in posts.items()]
        answers = {**gets, "/openapi.json": description, "/": page}
        routes += [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
        handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), refusal)
        return self._access.guard(Starlette(routes=routes, exception_handlers=handlers))

    def _post(self, path: str, kind: type[ModelRequest], answer: Answer) -> Route:
        """An endpoint that takes a record."""

        async def endpoint(request: Request) -> Response:
            body = parse_request(kind, await read_body(request))
            return await answer(request, self._find(body.model), body)

        return Route(path, endpoint, methods=["POST"])

    def _find(self, name: str) -> ServedModel:
        """The loaded model of that name, the first without a name. A single model answers to any name, as that of
        llama-server does, since many clients send a fixed name; the first such name is logged.

        Raises:
            ApiError: no such model, or it is not loaded yet.
        """
        model = self._named(name) if name and len(self._models) > 1 else next(iter(self._models.values()))
        if name not in ("", model.name) and not self._told:
            self._told = True
            log(f"a request for the model {clip(name)!r} is answered by {model.name}, the only one here")
        if not model.ready:
            raise ApiError(503, "Loading model", "unavailable_error", retry_s=1)
        return model

    def _named(self, name: str) -> ServedModel:
        if name not in self._models:
            message = f"the model {clip(name)!r} does not exist; this server has {', '.join(self._models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._models[name]

    async def _health(self, _: Request) -> Response:
        for name in self._models:
            self._find(name)
        return JSONResponse({"status": "ok"})

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_described(model) for model in self._models.values()]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(_described(self._named(request.path_params["name"])))

    async def _props(self, request: Request) -> Response:
        model = self._find(request.query_params.get("model", ""))
        slots = model.engine.slots
        defaults = {name: CompletionRequest.model_fields[name].default for name in SAMPLING}
        answer = {
            "model_alias": model.name,
            "total_slots": slots.slots,
            "default_generation_settings": {"n_ctx": slots.room, "params": defaults | {"n_predict": -1, "seed": -1}},
            "chat_template": model.template,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        return JSONResponse(answer)

    async def _slots(self, request: Request) -> Response:
        engine = self._find(request.query_params.get("model", "")).engine
        busy, slots = len(engine.running), engine.slots
        return JSONResponse([{"id": i, "n_ctx": slots.room, "is_processing": i < busy} for i in range(slots.slots)])

    async def _metrics(self, _: Request) -> Response:
        text = describe_metrics({name: model.engine for name, model in self._models.items() if model.ready})
        headers = {"Process-Start-Time-Unix": str(int(self._started))}
        return PlainTextResponse(text, 200, headers, "text/plain; version=0.0.4")


def _described(model: ServedModel) -> Json:
    entry: Json = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sportsllm-compress"}
    if model.ready:
        config = model.engine.slots.config
        context = {"n_ctx": model.engine.slots.room, "n_ctx_train": config.max_position_embeddings}
        entry["meta"] = {"n_vocab": config.vocab_size, "n_embd": config.hidden_size} | context
    return entry


def _in_worker(call: Callable[[ServedModel, Any], Json]) -> Answer:
    """An answer that a function gives in the model's thread for text."""

    async def answer(_: Request, model: ServedModel, body: Any) -> Response:
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(model.worker, call, model, body))

    return answer


def _tokenize(model: ServedModel, body: TokenizeRequest) -> Json:
    begin = [model.tokenizer.begin_id] if body.add_special else []
    tokens = begin + model.tokenizer.encode(body.content, body.parse_special)
    if body.with_pieces:
        return {"tokens": [{"id": token, "piece": model.tokenizer.piece(token)} for token in tokens]}
    return {"tokens": tokens}


def _detokenize(model: ServedModel, body: DetokenizeRequest) -> Json:
    if max(body.tokens, default=0) >= model.engine.slots.config.vocab_size:
        raise ApiError(400, "tokens: one lies outside the vocabulary", param="tokens")
    return {"content": model.tokenizer.decode(body.tokens)}


async def _generate(request: Request, model: ServedModel, body: ChatRequest | CompletionRequest) -> Response:
    pieces, loop = asyncio.Queue[Piece](), asyncio.get_running_loop()

    def deliver(piece: Piece) -> None:  # in the engine's thread
        if body.stream or piece.finish is not None:  # each wakes the loop
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

    model.engine.check_room(body.n * (len(body.prompts()) if isinstance(body, CompletionRequest) else 1))
    jobs = await loop.run_in_executor(model.worker, model.jobs, body, deliver)
    if await request.is_disconnected():  # else nobody would cancel the jobs of a stream
        raise ClientDisconnect
    model.engine.submit(jobs)
    native = isinstance(body, NativeRequest)
    reply, news = (NativeReply if native else Reply)(body, model.name, model.tokenizer), _until_end(pieces, len(jobs))
    if body.stream:
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(_events(reply, news, jobs), media_type="text/event-stream", headers=headers)
    gone = asyncio.ensure_future(request.receive())  # all that can still come is that the client leaves
    gone.add_done_callback(lambda _: _cancel(jobs))
    try:
        async for _ in news:
            pass
    finally:
        gone.cancel()
    return JSONResponse(reply.whole(jobs))


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        job.cancelled = True


async def _until_end(pieces: asyncio.Queue[Piece], jobs: int) -> AsyncIterator[Piece]:
    """The pieces of a request, until that many jobs have ended.

    Raises:
        ApiError: one of them failed.
    """
    while jobs:
        piece = await pieces.get()
        if piece.finish in _FAILED:
            raise ApiError(500, f"generation ended: {piece.finish}; {_FAILED[piece.finish]}", "server_error")
        jobs -= piece.finish is not None
        yield piece


async def _events(reply: Reply, pieces: AsyncIterator[Piece], jobs: list[Job]) -> AsyncIterator[bytes]:
    try:
        async for chunk in reply.stream(pieces, jobs):
            yield b"data: " + encode_json(chunk) + b"\n\n"
        yield reply.end_mark
    except ApiError as error:
        yield b"data: " + encode_json(error.body) + b"\n\n"
    finally:
        _cancel(jobs)
