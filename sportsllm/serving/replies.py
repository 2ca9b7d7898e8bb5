"""Replies in the shape of OpenAI's API, whole or as a stream of chunks, with llama-server's timings."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from sportsllm import __version__
from sportsllm.serving.engine import Job
from sportsllm.serving.sampler import TokenScore
from sportsllm.text.tokenizer import TextTokenizer

Json = dict[str, Any]


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

    def whole(self, texts: Sequence[str], scores: Sequence[list[TokenScore] | None], jobs: Sequence[Job]) -> Json:
        """The reply of jobs that have ended with these texts."""
        choices = []
        for job, text, scored in zip(jobs, texts, scores, strict=True):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = None if scored is None else self._scores(scored)
            choices.append({"index": job.index, **content, "logprobs": logprobs, "finish_reason": job.finish})
        return self._head("chat.completion" if self.chat else "text_completion", choices) | figures(jobs)

    def chunk(self, index: int, text: str | None, scores: Sequence[TokenScore], finish: str | None) -> Json:
        """A chunk of the stream; without a text, the beginning or, with `finish`, the end of a choice."""
        choice: Json = {"index": index, "finish_reason": finish, "logprobs": self._scores(scores) if scores else None}
        if not self.chat:
            choice["text"] = text or ""
        elif text is not None:
            choice["delta"] = {"content": text}
        else:
            choice["delta"] = {} if finish else {"role": "assistant", "content": None}
        return self._head("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def usage_chunk(self, jobs: Sequence[Job]) -> Json:
        """The last chunk of a stream that asked for its usage."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion", []) | figures(jobs)

    def _scores(self, scores: Sequence[TokenScore]) -> Json:
        if self.chat:
            tokens = [self._token(each.token, each.log_probability) for each in scores]
            tops = [[self._token(*pair) for pair in each.top] for each in scores]
            return {"content": [token | {"top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]}
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


def figures(jobs: Sequence[Job]) -> Json:
    """`usage` of a request, in which choices share their prompt, and `timings` of its first sequence."""
    prompts = {id(job.prompt): job for job in jobs}.values()
    prompt, made = sum(len(job.prompt) for job in prompts), sum(job.generated for job in jobs)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    cached = {"prompt_tokens_details": {"cached_tokens": sum(job.cached for job in prompts)}}
    job = jobs[0]
    read, read_ms, made_ms = len(job.prompt) - job.cached, job.read_s * 1e3, job.decode_s * 1e3
    timings = {"cache_n": job.cached, "prompt_n": read, "prompt_ms": read_ms} | _rates("prompt", read, read_ms)
    timings |= {"predicted_n": job.generated, "predicted_ms": made_ms} | _rates("predicted", job.generated, made_ms)
    return {"usage": usage | cached, "timings": timings}


def _rates(name: str, tokens: int, milliseconds: float) -> Json:
    return {
        f"{name}_per_token_ms": milliseconds / max(1, tokens),
        f"{name}_per_second": tokens / max(milliseconds, 1e-3) * 1e3,
    }
