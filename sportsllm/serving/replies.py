"""Replies in the shape of OpenAI's API, whole or as a stream of chunks, with llama-server's timings."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sportsllm import __version__
from sportsllm.serving.engine import Job, Piece
from sportsllm.serving.requests import SAMPLING, ChatRequest
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
        body: the request.
        model: its name.
        tokenizer: of scored tokens.
    """

    body: Any
    model: str
    tokenizer: TextTokenizer
    end_mark = b"data: [DONE]\n\n"  # of a stream

    def __post_init__(self) -> None:
        self._chat, self._created = isinstance(self.body, ChatRequest), int(time.time())
        # Of each choice: the characters of its text so far, and what decodes its next token.
        self._offsets, self._decoders = Counter[int](), dict[int, Callable[[int], str]]()
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"

    def _head(self, kind: str, choices: list[Json]) -> Json:
        head = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"b{__version__}",
            "choices": choices,
        }
        return head | {"usage": None} if self.body.stream_options.include_usage else head

    def whole(self, jobs: Sequence[Job]) -> Any:
        """The reply of jobs that have ended."""
        choices = []
        for job in jobs:
            text = text_of(job)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._chat else {"text": text}
            logprobs = None if job.top is None else self._scores(job, scores_of(job))
            finish = FINISH[job.finish or "limit"]
            choices.append({"index": job.index, **content, "logprobs": logprobs, "finish_reason": finish})
        return self._head("chat.completion" if self._chat else "text_completion", choices) | figures(jobs)

    async def stream(self, pieces: AsyncIterator[Piece], jobs: Sequence[Job]) -> AsyncIterator[Json]:
        """The chunks of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        for job in jobs if self._chat else ():
            yield self._head(kind, [self._choice(job, {"role": "assistant", "content": None})])
        async for piece in pieces:
            if piece.text or piece.scores:
                yield self._head(kind, [self._choice(piece.job, {"content": piece.text}, piece.scores)])
            if piece.finish:
                yield self._head(kind, [self._choice(piece.job, {}, finish=FINISH[piece.finish])])
        if self.body.stream_options.include_usage:
            yield self._head(kind, []) | figures(jobs)

    def _choice(self, job: Job, delta: Json, scores: Sequence[TokenScore] = (), finish: str | None = None) -> Json:
        content = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        logprobs = self._scores(job, scores) if scores else None
        return {"index": job.index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _scored(self, each: TokenScore) -> Json:
        top = [self._token(*pair) for pair in each.top]
        return self._token(each.token, each.log_probability) | {"top_logprobs": top}

    def _scores(self, job: Job, scores: Sequence[TokenScore]) -> Json:
        if self._chat:
            return {"content": list(map(self._scored, scores))}
        pieces = [self.tokenizer.piece(each.token) for each in scores]
        likeliest = list[Json | None]()
        for each, piece in zip(scores, pieces, strict=True):
            # Of tokens with one text, halves of a character, the likeliest counts.
            pairs = [(self.tokenizer.piece(token), value) for token, value in reversed(each.top)]
            likeliest.append({piece: each.log_probability} | dict(pairs) if each.log_probability is not None else None)
        if job.index not in self._decoders:
            self._decoders[job.index] = self.tokenizer.decoder([] if job.echo else job.prompt)
        sizes = (len(self._decoders[job.index](each.token)) for each in scores)  # in the text; the begin token has none
        *offsets, self._offsets[job.index] = accumulate(sizes, initial=self._offsets[job.index])
        return {
            "tokens": pieces,
            "token_logprobs": [each.log_probability for each in scores],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _token(self, token: int, log_probability: float | None) -> Json:
        text, data = self.tokenizer.piece(token), self.tokenizer.piece_bytes(token)
        return {"id": token, "token": text, "bytes": list(data), "logprob": log_probability}


class NativeReply(Reply):
    """Writes llama-server's own replies to a `/completion`."""

    end_mark = b""

    async def stream(self, pieces: AsyncIterator[Piece], jobs: Sequence[Job]) -> AsyncIterator[Json]:
        """The pieces, and at the end of each sequence its reply without the text."""
        async for piece in pieces:
            if piece.tokens or piece.text:
                chunk = {"index": piece.job.index, "content": piece.text, "tokens": piece.tokens, "stop": False}
                yield chunk | self._likeliest(piece.scores)
            if piece.finish:
                yield self._end(piece.job, "", ())

    def whole(self, jobs: Sequence[Job]) -> Any:
        """One reply, or a list for several sequences."""
        found = [self._end(job, text_of(job), scores_of(job)) for job in jobs]
        return found[0] if len(found) == 1 else found

    def _likeliest(self, scores: Sequence[TokenScore]) -> Json:
        return {"completion_probabilities": list(map(self._scored, scores))} if scores else {}

    def _end(self, job: Job, text: str, scores: Sequence[TokenScore]) -> Json:
        body, made = self.body, job.ids[len(job.prompt) :]
        most = -1 if body.max_tokens is None else body.max_tokens
        settings = {name: getattr(body, name) for name in SAMPLING}
        settings |= {"seed": job.sampler.sampling.seed, "n_predict": most}
        reply = {
            "index": job.index,
            "content": text,
            "tokens": made if body.return_tokens else [],
            "stop": True,
            "model": self.model,
            "prompt": self.tokenizer.decode(job.prompt, special=True),
            "tokens_evaluated": len(job.prompt),
            "tokens_predicted": job.generated,
            "tokens_cached": job.cached,
            "stop_type": job.finish,
            "truncated": job.finish == "limit" and job.generated != most,
            "has_new_line": "\n" in self.tokenizer.decode(made),
            "timings": timings(job),
            "generation_settings": settings,
        } | self._likeliest(scores)
        return {path: _item(reply, path) for path in body.response_fields} or reply


def _item(data: Any, path: str) -> Any:
    """A value by its path, such as `timings/prompt_n`; None if there is none."""
    for name in path.split("/"):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def text_of(job: Job) -> str:
    """All that a job has delivered."""
    return "".join(piece.text for piece in job.said)


def scores_of(job: Job) -> list[TokenScore]:
    """Those of all that a job has delivered."""
    return [score for piece in job.said for score in piece.scores]


def figures(jobs: Sequence[Job]) -> Json:
    """`usage` of a request, in which choices share their prompt, and `timings` of its first sequence."""
    prompts = {id(job.prompt): job for job in reversed(jobs)}.values()  # the first of each reads it
    prompt, made = sum(len(job.prompt) for job in prompts), sum(job.generated for job in jobs)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    cached = {"prompt_tokens_details": {"cached_tokens": sum(job.cached for job in prompts)}}
    return {"usage": usage | cached, "timings": timings(jobs[0])}


def timings(job: Job) -> Json:
    """llama-server's figures of a sequence that has ended. The prompt's pass gives the first token."""
    read, decoded = len(job.prompt) - job.cached, max(0, job.generated - 1)
    read_ms, decoded_ms = (job.first - job.began) * 1e3, (job.ended - job.first) * 1e3
    return {
        "cache_n": job.cached,
        "prompt_n": read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": read_ms / read,
        "prompt_per_second": read / max(read_ms, 1e-3) * 1e3,
        "predicted_n": job.generated,
        "predicted_ms": decoded_ms,
        "predicted_per_token_ms": decoded_ms / decoded if decoded else 0.0,
        "predicted_per_second": decoded / max(decoded_ms, 1e-3) * 1e3,
    }
