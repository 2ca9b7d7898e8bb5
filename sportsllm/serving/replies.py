"""Replies in the shape of OpenAI's API, whole or as a stream of chunks, with llama-server's timings."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

from sportsllm import __version__
from sportsllm.serving.engine import Job, Piece
from sportsllm.serving.requests import SAMPLING, NativeRequest
from sportsllm.serving.sampler import TokenScore
from sportsllm.text.tokenizer import TextTokenizer

Json = dict[str, Any]
FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
"""OpenAI's words for llama-server's, which the engine uses."""


def encode_json(data: object) -> bytes:
    """Compact JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


@dataclass
class Reply:
    """Writes the replies to one request.

    Attributes:
        chat: messages, or texts.
        model: its name.
        tokenizer: of scored tokens.
    """

    chat: bool
    model: str
    tokenizer: TextTokenizer
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"b{__version__}",
            "choices": choices,
        }

    def whole(self, texts: Sequence[str], scores: Sequence[list[TokenScore] | None], jobs: Sequence[Job]) -> Any:
        """The reply of jobs that have ended with these texts."""
        choices = []
        for job, text, scored in zip(jobs, texts, scores, strict=True):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = None if scored is None else self._scores(scored)
            choices.append(
                {"index": job.index, **content, "logprobs": logprobs, "finish_reason": FINISH[job.finish or "limit"]}
            )
        return self._head("chat.completion" if self.chat else "text_completion", choices) | figures(jobs)

    async def stream(
        self, pieces: AsyncIterator[Piece], jobs: Sequence[Job], begins: Sequence[str], usage: bool
    ) -> AsyncIterator[Json | None]:
        """The chunks of a stream, None for OpenAI's end mark."""
        for job, begin in zip(jobs, begins, strict=True):
            if self.chat or begin:
                yield self._chunk(job.index, begin or None, (), None)
        async for piece in pieces:
            if piece.text or piece.scores:
                yield self._chunk(piece.job.index, piece.text, piece.scores, None)
            if piece.finish:
                yield self._chunk(piece.job.index, None, (), FINISH[piece.finish])
        if usage:
            yield self._head("chat.completion.chunk" if self.chat else "text_completion", []) | figures(jobs)
        yield None

    def _chunk(self, index: int, text: str | None, scores: Sequence[TokenScore], finish: str | None) -> Json:
        """A chunk of the stream; without a text, the beginning or, with `finish`, the end of a choice."""
        choice: Json = {"index": index, "finish_reason": finish, "logprobs": self._scores(scores) if scores else None}
        if not self.chat:
            choice["text"] = text or ""
        elif text is not None:
            choice["delta"] = {"content": text}
        else:
            choice["delta"] = {} if finish else {"role": "assistant", "content": None}
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _scored(self, each: TokenScore) -> Json:
        top = [self._token(*pair) for pair in each.top]
        return self._token(each.token, each.log_probability) | {"top_logprobs": top}

    def _scores(self, scores: Sequence[TokenScore]) -> Json:
        if self.chat:
            return {"content": list(map(self._scored, scores))}
        pieces = [self.tokenizer.piece(each.token) for each in scores]
        likeliest = list[Json | None]()
        for each, piece in zip(scores, pieces, strict=True):
            # Of tokens with one text, halves of a character, the likeliest counts.
            pairs = [(self.tokenizer.piece(token), value) for token, value in reversed(each.top)]
            likeliest.append({piece: each.log_probability} | dict(pairs) if each.log_probability is not None else None)
        return {
            "tokens": pieces,
            "token_logprobs": [each.log_probability for each in scores],
            "top_logprobs": likeliest,
            "text_offset": [0, *accumulate(map(len, pieces))][:-1],
        }

    def _token(self, token: int, log_probability: float | None) -> Json:
        text = self.tokenizer.piece(token)
        return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": log_probability}


@dataclass
class NativeReply(Reply):
    """Writes llama-server's own replies to a `/completion`."""

    body: NativeRequest = field(kw_only=True)

    async def stream(
        self, pieces: AsyncIterator[Piece], jobs: Sequence[Job], begins: Sequence[str], usage: bool
    ) -> AsyncIterator[Json | None]:
        """The pieces, and at the end of each sequence its reply without the text."""
        async for piece in pieces:
            if piece.tokens or piece.text:
                chunk = {"index": piece.job.index, "content": piece.text, "tokens": piece.tokens, "stop": False}
                yield chunk | self._likeliest(piece.scores)
            if piece.finish:
                yield self._end(piece.job, "", ())

    def whole(self, texts: Sequence[str], scores: Sequence[list[TokenScore] | None], jobs: Sequence[Job]) -> Any:
        """One reply, or a list for several sequences."""
        found = [self._end(job, text, scored or ()) for job, text, scored in zip(jobs, texts, scores, strict=True)]
        return found[0] if len(found) == 1 else found

    def _likeliest(self, scores: Sequence[TokenScore]) -> Json:
        return {"completion_probabilities": list(map(self._scored, scores))} if scores else {}

    def _end(self, job: Job, text: str, scores: Sequence[TokenScore]) -> Json:
        body, made = self.body, job.ids[len(job.prompt) :]
        most = -1 if body.max_tokens is None else body.max_tokens
        settings = {name: getattr(body, name) for name in SAMPLING} | {"seed": job.sampler.sampling.seed}
        reply = {"index": job.index, "content": text, "tokens": made if body.return_tokens else [], "stop": True}
        reply |= {"model": self.model, "prompt": self.tokenizer.decode(job.prompt, special=True)}
        reply |= {"tokens_evaluated": len(job.prompt), "tokens_predicted": job.generated, "tokens_cached": job.cached}
        reply |= {"stop_type": job.finish, "truncated": job.finish == "limit" and job.generated != most}
        reply |= {"has_new_line": "\n" in self.tokenizer.decode(made), "timings": figures([job])["timings"]}
        reply |= {"generation_settings": settings | {"n_predict": most}} | self._likeliest(scores)
        wanted = {name: name.split("/") for name in body.response_fields}
        return {name: reduce(_item, path, reply) for name, path in wanted.items()} or reply


def _item(data: Any, name: str) -> Any:
    return data.get(name) if isinstance(data, dict) else None


def figures(jobs: Sequence[Job]) -> Json:
    """`usage` of a request, in which choices share their prompt, and `timings` of its first sequence."""
    prompts = {id(job.prompt): job for job in jobs}.values()
    prompt, made = sum(len(job.prompt) for job in prompts), sum(job.generated for job in jobs)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    cached = {"prompt_tokens_details": {"cached_tokens": sum(job.cached for job in prompts)}}
    job = jobs[0]
    read, read_ms, made_ms = len(job.prompt) - job.cached, job.read_s * 1e3, job.decode_s * 1e3
    timings = {"cache_n": job.cached, "prompt_n": read, "prompt_ms": read_ms} | _rates("prompt", read, read_ms)
    timings |= {"predicted_n": job.generated, "predicted_ms": made_ms}
    timings |= _rates("predicted", job.generated - 1, made_ms)  # the prompt's pass gives the first
    return {"usage": usage | cached, "timings": timings}


def _rates(name: str, tokens: int, milliseconds: float) -> Json:
    return {
        f"{name}_per_token_ms": milliseconds / tokens if tokens > 0 else 0.0,
        f"{name}_per_second": max(0, tokens) / max(milliseconds, 1e-3) * 1e3,
    }
