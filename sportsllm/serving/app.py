"""The server's endpoints: OpenAI's, llama-server's helpers, metrics, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sportsllm.process_memory import peak_rss_bytes
from sportsllm.serving.access import Access, refusal
from sportsllm.serving.engine import Engine, Job, Piece, QueueFull
from sportsllm.serving.models import ServedModel
from sportsllm.serving.openapi import describe
from sportsllm.serving.replies import Json, NativeReply, Reply, encode_json
from sportsllm.serving.requests import (
    SAMPLING,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    NativeRequest,
    TokenizeRequest,
    parse_request,
)
from sportsllm.serving.sampler import TokenScore

MOST_BODY_BYTES = 2_000_000
BODY_S = 30.0
Record = TypeVar("Record")


class Mailbox:
    """Pieces of one request's jobs, from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._pieces, self._loop = asyncio.Queue[Piece](), asyncio.get_running_loop()

    def put(self, piece: Piece) -> None:
        """In the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self, jobs: int) -> AsyncIterator[Piece]:
        """All pieces until that many jobs have ended.

        Raises:
            ApiError: one of them failed.
        """
        while jobs:
            piece = await self._pieces.get()
            if piece.finish in ("error", "timeout", "cancelled"):
                raise ApiError(500, f"generation ended: {piece.finish}", "server_error")
            jobs -= piece.finish is not None
            yield piece


def _json(data: object) -> Response:
    return Response(encode_json(data), media_type="application/json")


async def _said(response: Response, _: Request) -> Response:
    return response


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
        self._started = time.time()

    def app(self) -> Any:
        """The ASGI application."""
        chat, native = ("/v1/chat/completions", "/chat/completions"), ("/completion", "/completions")
        kinds = ((ChatRequest, chat), (CompletionRequest, ("/v1/completions",)), (NativeRequest, native))
        posts: dict[str, tuple[type[BaseModel], Any]] = {
            path: (kind, partial(self._generate, kind=kind)) for kind, paths in kinds for path in paths
        }
        posts |= {f"{path}/input_tokens": (Conversation, self._count) for path in chat}
        posts |= {"/tokenize": (TokenizeRequest, self._tokenize), "/detokenize": (DetokenizeRequest, self._detokenize)}
        posts |= {"/apply-template": (Conversation, self._apply_template)}
        gets = {"/v1/models": self._list, "/models": self._list, "/v1/models/{name:path}": self._show}
        gets |= {"/health": self._health, "/props": self._props, "/metrics": self._metrics, "/slots": self._slots}
        description = _json(describe({path: kind for path, (kind, _) in posts.items()}, gets))
        page = Response(Path(__file__).with_name("page.html").read_bytes(), media_type="text/html")
        gets |= {"/openapi.json": partial(_said, description), "/": partial(_said, page)}
        routes = [Route(path, call, methods=["POST"]) for path, (_, call) in posts.items()]
        routes += [Route(path, call) for path, call in gets.items()]
        handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), refusal)
        return self._access.guard(Starlette(routes=routes, exception_handlers=handlers))

    def _find(self, name: str) -> ServedModel:
        """The model of that name; with one model, any name is its own, as clients send what they are used to."""
        if name in self._models or (name and len(self._models) > 1):
            return self._named(name)
        return next(iter(self._models.values()))

    def _named(self, name: str) -> ServedModel:
        if name not in self._models:
            message = f"no such model; this server has {', '.join(self._models)}"
            raise ApiError(404, message, "not_found_error", param="model")
        return self._models[name]

    async def _health(self, _: Request) -> Response:
        if not all(model.ready for model in self._models.values()):
            raise ApiError(503, "Loading model", "unavailable_error", retry_s=1)
        return _json({"status": "ok"})

    async def _list(self, _: Request) -> Response:
        models = [_described(model) for model in self._models.values()]
        return _json({"object": "list", "data": models})

    async def _show(self, request: Request) -> Response:
        return _json(_described(self._named(request.path_params["name"])))

    async def _props(self, request: Request) -> Response:
        model = self._find(request.query_params.get("model", ""))
        slots = model.engine.slots
        defaults = {name: CompletionRequest.model_fields[name].default for name in SAMPLING}
        settings = {"n_ctx": slots.room, "params": defaults | {"n_predict": -1, "seed": -1}}
        answer = {"model_alias": model.name, "total_slots": slots.slots, "default_generation_settings": settings}
        return _json(answer | {"chat_template": model.template, "peak_rss_bytes": peak_rss_bytes()})

    async def _slots(self, request: Request) -> Response:
        engine = self._find(request.query_params.get("model", "")).engine
        busy = len(engine.running)
        return _json([{"id": slot, "n_ctx": engine.slots.room, "is_processing": slot < busy}
                      for slot in range(engine.slots.slots)])  # fmt: skip

    async def _metrics(self, _: Request) -> Response:
        lines, several = list[str](), len(self._models) > 1
        for name, (text, value) in METRICS.items():
            kind = "counter" if name.endswith(("_total", "_max")) else "gauge"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for model in self._models.values():
                if model.ready:
                    label = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                    label = f'{{model="{label}"}}' if several else ""
                    lines.append(f"{name}{label} {value(model.engine)}")
        headers = {"Process-Start-Time-Unix": str(int(self._started))}
        return PlainTextResponse("\n".join(lines) + "\n", 200, headers, "text/plain; version=0.0.4")

    async def _tokenize(self, request: Request) -> Response:
        body = parse_request(TokenizeRequest, await read_body(request))
        model = self._find(body.model)
        tokens = await _in_worker(model, model.tokenizer.encode, body.content, body.parse_special)
        tokens = [model.tokenizer.begin_id, *tokens] if body.add_special else tokens
        if body.with_pieces:
            return _json({"tokens": [{"id": token, "piece": model.tokenizer.piece(token)} for token in tokens]})
        return _json({"tokens": tokens})

    async def _detokenize(self, request: Request) -> Response:
        body = parse_request(DetokenizeRequest, await read_body(request))
        model = self._find(body.model)
        if max(body.tokens, default=0) >= model.engine.slots.config.vocab_size:
            raise ApiError(400, "tokens: one lies outside the vocabulary", param="tokens")
        return _json({"content": await _in_worker(model, model.tokenizer.decode, body.tokens)})

    async def _apply_template(self, request: Request) -> Response:
        body = parse_request(Conversation, await read_body(request))
        model = self._find(body.model)
        return _json({"prompt": await _in_worker(model, model.render, body.messages)})

    async def _count(self, request: Request) -> Response:
        body = parse_request(Conversation, await read_body(request))
        model = self._find(body.model)
        return _json({"input_tokens": len(await _in_worker(model, model.encode_chat, body.messages))})

    async def _generate(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        body, mailbox = parse_request(kind, await read_body(request)), Mailbox()
        model = self._find(body.model)
        reply = Reply(kind is ChatRequest, model.name, model.tokenizer)
        if isinstance(body, NativeRequest):
            reply = NativeReply(False, model.name, model.tokenizer, body=body)
        count = body.n * (len(body.prompts()) if isinstance(body, CompletionRequest) else 1)
        if count > model.engine.most_jobs:
            raise ApiError(
                400, f"the request has {count} sequences, {model.engine.most_jobs} can run and wait; send fewer"
            )
        try:
            model.engine.check_room(count)
            jobs = await _in_worker(model, model.jobs, body, mailbox.put)
            begins = model.echoed(body, jobs)
            if await request.is_disconnected():  # else nobody would cancel the jobs of a stream
                raise ClientDisconnect
            model.engine.submit(jobs)
        except QueueFull as full:
            raise ApiError(429, "too many requests wait; try again", "rate_limit_error", retry_s=full.retry_s) from None
        if body.stream:
            events = self._events(reply, model, mailbox, jobs, begins, body.stream_options.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        work = asyncio.ensure_future(self._whole(reply, mailbox, jobs, begins))
        gone = asyncio.ensure_future(request.receive())  # all that can still come is that the client leaves
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return _json(work.result())
        finally:
            model.engine.cancel(jobs)
            work.cancel()
            gone.cancel()

    @staticmethod
    async def _whole(reply: Reply, mailbox: Mailbox, jobs: list[Job], begins: list[str]) -> object:
        scores: list[list[TokenScore] | None] = [None if job.top is None else [] for job in jobs]
        async for piece in mailbox.pieces(len(jobs)):
            begins[piece.job.index] += piece.text
            if (scored := scores[piece.job.index]) is not None:
                scored += piece.scores
        return reply.whole(begins, scores, jobs)

    @staticmethod
    async def _events(
        reply: Reply, model: ServedModel, mailbox: Mailbox, jobs: list[Job], begins: list[str], usage: bool
    ) -> AsyncIterator[bytes]:
        try:
            async for chunk in reply.stream(mailbox.pieces(len(jobs)), jobs, begins, usage):
                yield b"data: " + (b"[DONE]" if chunk is None else encode_json(chunk)) + b"\n\n"
        except ApiError as error:
            yield b"data: " + encode_json(error.body) + b"\n\n"
        finally:
            model.engine.cancel(jobs)


def _counted(name: str, unit: float = 1, per: str = "") -> Callable[[Engine], float]:
    return lambda engine: engine.counts[name] * unit / (max(1, engine.counts[per]) if per else 1)


METRICS: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "llamacpp:prompt_tokens_total": ("Prompt tokens read.", _counted("prompt_tokens")),
    "llamacpp:prompt_tokens_cached_total": ("Prompt tokens from the cache.", _counted("cached_tokens")),
    "llamacpp:prompt_seconds_total": ("Time in which prompts were read.", _counted("prompt_us", 1e-6)),
    "llamacpp:prompt_tokens_seconds": ("Prompt tokens read per second.", _counted("prompt_tokens", 1e6, "prompt_us")),
    "llamacpp:tokens_predicted_total": ("Tokens generated.", _counted("generated_tokens")),
    "llamacpp:tokens_predicted_seconds_total": ("Time in which tokens were generated.", _counted("generated_us", 1e-6)),
    "llamacpp:predicted_tokens_seconds": ("Tokens per second.", _counted("generated_tokens", 1e6, "generated_us")),
    "llamacpp:n_decode_total": ("Runs of the model.", _counted("runs")),
    "llamacpp:n_busy_slots_per_decode": ("Sequences in a step.", _counted("rows", 1, "steps")),
    "llamacpp:n_tokens_max": ("Longest sequence.", _counted("longest")),
    "llamacpp:spec_decode_num_drafts_total": ("Passes that read proposed tokens.", _counted("drafts")),
    "llamacpp:spec_decode_num_draft_tokens_total": ("Tokens proposed.", _counted("draft_tokens")),
    "llamacpp:spec_decode_num_accepted_tokens_total": ("Proposed tokens kept.", _counted("lookup_tokens")),
    "llamacpp:requests_processing": ("Sequences that have a slot.", lambda engine: len(engine.running)),
    "llamacpp:requests_deferred": ("Sequences that wait for a slot.", lambda engine: len(engine.waiting)),
    "sportsllm_sequences_total": ("Sequences ended.", _counted("finished")),
    "sportsllm_refused_total": ("Sequences refused because too many waited.", _counted("refused")),
    "sportsllm_prefix_cache_bytes": ("Size of the prefix cache.", lambda engine: engine.prefixes.size_bytes),
}
"""What `/metrics` reports of each model, by llama-server's names if it has one: an explanation and the value."""


def _described(model: ServedModel) -> Json:
    entry: Json = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sportsllm-compress"}
    if model.ready:
        config = model.engine.slots.config
        context = {"n_ctx": model.engine.slots.room, "n_ctx_train": config.max_position_embeddings}
        entry["meta"] = {"n_vocab": config.vocab_size, "n_embd": config.hidden_size} | context
    return entry


async def _in_worker(model: ServedModel, call: Callable[..., Record], *arguments: Any) -> Record:
    """The result of a call in the model's thread for text."""
    return await asyncio.get_running_loop().run_in_executor(model.worker, partial(call, *arguments))
