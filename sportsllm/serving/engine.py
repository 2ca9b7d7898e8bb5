"""The scheduler: sequences that wait, read their prompts and are decoded together over one loaded model.

A thread runs the model. Between two steps new sequences join and finished or abandoned ones leave; prompts are read in
chunks between the steps, one at a time, so that running streams go on. (Continuous batching:
https://www.usenix.org/conference/osdi22/presentation/yu)
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Lock
from typing import NamedTuple, Protocol

import numpy as np

from sportsllm.inference.decoder import Logits, log_softmax
from sportsllm.inference.lookup import Draft, DraftLookup, PromptLookup
from sportsllm.inference.sampling import StopSearch
from sportsllm.models.config import ModelConfig
from sportsllm.serving.prefixes import Array, Prefix, PrefixCache
from sportsllm.serving.requests import ApiError
from sportsllm.serving.sampler import Sampler, TokenScore, score_token

STEP_ROWS = 16
"""Sequences decoded in one run. The kernels give up to 16 the logits of one alone."""
PROMPT_CHUNK = 64
"""Tokens of a prompt read between two steps of others: 5% slower than the runtime's 128, half the pause."""
LONGEST_S = 600.0
"""Until a sequence is given up, waiting included."""


class Slots(Protocol):
    """A model whose cache has a slot for each running sequence; see `export.runtime.slots.SlotDecoder`."""

    config: ModelConfig
    slots: int
    room: int
    prefill_chunk: int
    exact_rows: int
    recurrent: bool

    def length(self, slot: int) -> int: ...
    def clear(self, slot: int) -> None: ...
    def read_slot(self, slot: int, tokens: Sequence[int], every: bool = False) -> Logits: ...
    def step_slots(self, first: int, tokens: Sequence[int]) -> Logits: ...
    def view(self, slot: int) -> list[Array]: ...
    def restore(self, slot: int, saved: Sequence[Array], length: int) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def move(self, source: int, target: int) -> None: ...


class Piece(NamedTuple):
    """News of a sequence: text, scores of new tokens, why it ended, if it did, and the new tokens."""

    job: Job
    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    finish: str | None = None
    tokens: tuple[int, ...] = ()


@dataclass(eq=False)
class Job:
    """A sequence to generate.

    Attributes:
        prompt, most: token ids, and the number of tokens to generate.
        sampler, decode, search, stop_tokens: choose the next token, make text of it, and look for its end.
        deliver: called in the engine's thread.
        top: most likely tokens whose log probabilities are wanted too; None without log probabilities.
        echo: scores of the prompt's tokens are wanted too.
        reuse: the prompt's beginning may be taken from the prefix cache.
        index: number of the choice in its request.
        cancelled: set to give it up; it leaves before the next step.
        ids, cached: the prompt and the tokens so far, and how many were in the cache.
        arrived, began, first, ended: when it was queued, got a slot, had read its prompt, and ended.
        finish: `eos`, `word` or `limit` as llama-server has it; `error`, `timeout` or `cancelled`.
        said: all that was delivered.
    """

    prompt: list[int]
    most: int
    sampler: Sampler
    decode: Callable[[int], str]
    search: StopSearch
    stop_tokens: frozenset[int]
    deliver: Callable[[Piece], None]
    top: int | None = None
    echo: bool = False
    reuse: bool = True
    index: int = 0
    cancelled: bool = False
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    finish: str | None = None
    said: list[Piece] = field(default_factory=list)
    told: int = 0  # of `ids`, those delivered
    lookup: PromptLookup | None = None
    before: Logits | None = None  # log probabilities after the last chunk of an echoed prompt

    def __post_init__(self) -> None:
        self.ids, self.told = list(self.prompt), len(self.prompt)

    def tell(self, text: str = "", scores: tuple[TokenScore, ...] = (), finish: str | None = None) -> None:
        """Deliver a piece, the last one if it says how the sequence ends."""
        tokens, self.told = tuple(self.ids[self.told :]), len(self.ids)
        if finish is not None:
            self.ended, self.finish = time.perf_counter(), finish
        self.said.append(Piece(self, text, scores, finish, tokens))
        self.deliver(self.said[-1])

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return len(self.ids) - len(self.prompt)


class Engine:
    """Runs the jobs of one model.

    Args:
        slots: the model.
        cache_bytes: bound of the prefix cache.
        most_waiting: jobs that may wait for a slot.
        turn: held while the model runs, so that several models take turns.
        draft: a smaller model whose choices are proposed to a sequence that runs alone.
    """

    def __init__(
        self, slots: Slots, cache_bytes: int, most_waiting: int, turn: Lock, draft: Draft | None = None
    ) -> None:
        self._lookup = PromptLookup if draft is None else partial(DraftLookup, draft, slots.room)
        self.slots, self.prefixes = slots, PrefixCache(cache_bytes, slots.recurrent)
        self.counts, self._most_jobs = Counter[str](), most_waiting + slots.slots
        self.waiting, self.running = deque[Job](), list[Job]()  # a running job's place is its slot
        self._ready = 0  # the first ones, which have read their prompts; at most one more is reading
        self._turn, self._news, self._closed = turn, Condition(), False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of a request, all or none."""
        with self._news:
            self.check_room(len(jobs))
            self.waiting.extend(jobs)
            self._news.notify()

    def check_room(self, jobs: int) -> None:
        """Refuse the jobs of a request for which there is no room.

        Raises:
            ApiError: too many wait, or there are more than can ever run and wait.
        """
        if jobs > self._most_jobs:
            raise ApiError(400, f"the request has {jobs} sequences, {self._most_jobs} can run and wait; send fewer")
        if len(self.waiting) + len(self.running) + jobs > self._most_jobs:
            self.counts["refused"] += jobs
            busy_us = self.counts["prompt_us"] + self.counts["generated_us"]
            mean_s = busy_us / 1e6 / max(1, self.counts["finished"])
            retry_s = min(60, max(1, round(mean_s * len(self.waiting))))
            raise ApiError(429, "too many requests are waiting; try again", "rate_limit_error", retry_s=retry_s)

    def close(self) -> None:
        """Let `run` return."""
        with self._news:
            self._closed = True
            self._news.notify()

    def run(self) -> None:
        """Work until `close`; whatever goes wrong ends the running jobs alone."""
        while not self._closed:
            if not (self.running or self.waiting):
                with self._news:
                    self._news.wait_for(lambda: self._closed or self.waiting)
                continue
            try:
                self._advance()
            except BaseException:  # panics of libraries in Rust are no Exceptions
                traceback.print_exc()
                for job in self.running:
                    job.tell(finish="error")
                self.running, self._ready = [], 0

    def _advance(self) -> None:
        """Let jobs leave and join, then read a chunk of a prompt and decode a token of each running job."""
        jobs, late = [*self.running], time.perf_counter() - LONGEST_S
        if self.waiting:
            with self._news:
                jobs += self.waiting
        for job in jobs:
            if job.cancelled or job.arrived < late:
                self._end(job, "cancelled" if job.cancelled else "timeout")
        if self.waiting and len(self.running) == self._ready < self.slots.slots:
            self._join()
        if self._ready < len(self.running):
            self._read_prompt(self.running[self._ready])
        if self._ready == 1 and self.slots.exact_rows > 1:
            self._step_alone(self.running[0])
        else:
            self._step()

    def _join(self) -> None:
        """Give the job that has waited longest a slot, with the longest beginning of its prompt that is cached."""
        with self._news:
            self.running.append(job := self.waiting.popleft())
        job.began, slot = time.perf_counter(), self._ready
        self.slots.clear(slot)
        if job.echo or not job.reuse:
            return
        running = [
            Prefix(np.array(other.ids[: self.slots.length(place)], dtype=np.int64), self.slots.view(place))
            for place, other in enumerate(self.running[:slot])
        ]
        job.cached, arrays = self.prefixes.find(np.array(job.prompt[:-1], dtype=np.int64), running)
        if job.cached:
            self.slots.restore(slot, arrays, job.cached)
            self.counts["cached_tokens"] += job.cached

    def _read_prompt(self, job: Job) -> None:
        # Chunks end where the runtime's end, and none is so short that other kernels read it than the whole prompt's:
        # the logits are those of a prompt that is read alone.
        slot, whole, read = self._ready, self.slots.prefill_chunk, self.slots.length(self._ready)
        left = min(len(job.prompt), (read // whole + 1) * whole) - read
        size = left if not self._ready or left <= PROMPT_CHUNK + STEP_ROWS else PROMPT_CHUNK
        chunk = job.prompt[read : read + size]
        with self._turn:
            began = time.perf_counter()
            logits_TV = self.slots.read_slot(slot, chunk, job.echo)
            self._count("prompt", began)
        if job.echo:
            job.tell("", self._prompt_scores(job, chunk, logits_TV))
        self.counts["prompt_tokens"] += len(chunk)
        if read + len(chunk) == len(job.prompt):
            job.first = time.perf_counter()
            self._ready += 1
            if (finish := self._take(job, logits_TV[-1])) is not None:
                self._end(job, finish)

    @staticmethod
    def _prompt_scores(job: Job, chunk: Sequence[int], logits_TV: Logits) -> tuple[TokenScore, ...]:
        """Scores of a chunk's tokens: the first needs the logits before it, which the chunk before has left."""
        scored, top = log_softmax(logits_TV), job.top or 0
        first = TokenScore(chunk[0], None, []) if job.before is None else score_token(job.before, chunk[0], top)
        job.before = scored[-1].copy()
        return first, *(score_token(row, token, top) for row, token in zip(scored[:-1], chunk[1:], strict=True))

    def _count(self, what: str, began: float, rows: int = 0) -> None:
        """Count a run of the model for some rows that are decoded, or for a prompt."""
        self.counts[what + "_us"] += round((time.perf_counter() - began) * 1e6)
        self.counts["runs"] += 1
        self.counts["rows"] += rows
        self.counts["steps"] += rows > 0

    def _step(self) -> None:
        """Decode a token of each job that has read its prompt."""
        ended = list[tuple[Job, str]]()
        for first in range(0, self._ready, STEP_ROWS):
            jobs = self.running[first : min(first + STEP_ROWS, self._ready)]
            with self._turn:
                began = time.perf_counter()
                logits_BV = self.slots.step_slots(first, [job.ids[-1] for job in jobs])
                self._count("generated", began, len(jobs))
            for job, logits_V in zip(jobs, logits_BV, strict=True):
                if (finish := self._take(job, logits_V)) is not None:
                    ended.append((job, finish))
        for job, finish in ended:
            self._end(job, finish)

    def _step_alone(self, job: Job) -> None:
        """Decode a token of the only job, or more if it repeats earlier text."""
        job.lookup = lookup = job.lookup or self._lookup(job.ids)
        lookup.extend(job.ids[len(lookup) :])
        with self._turn:
            began = time.perf_counter()
            proposed = lookup.propose(min(self.slots.exact_rows, job.most - job.generated) - 1)
            tokens = [job.ids[-1], *proposed]
            logits_TV = self.slots.read_slot(0, tokens, True) if proposed else self.slots.step_slots(0, tokens)
            lookup.read(len(proposed))
            self._count("generated", began, 1)
        for place, logits_V in enumerate(logits_TV):
            finish = self._take(job, logits_V)
            if finish is not None or proposed[place : place + 1] != job.ids[-1:]:
                break
        if proposed:
            lookup.learn(len(proposed), place)
            self.slots.truncate(0, len(job.ids) - 1)
            self.counts["drafts"] += 1
            self.counts["draft_tokens"] += len(proposed)
            self.counts["lookup_tokens"] += place
        if finish is not None:
            self._end(job, finish)

    def _take(self, job: Job, logits_V: Logits) -> str | None:
        """Choose a job's next token and deliver its text; returns why the job ends, if it does."""
        try:
            if job.generated == job.most:
                return "limit"
            token = job.sampler.choose(logits_V, job.ids)
            if token in job.stop_tokens:
                return "eos"
            job.ids.append(token)
            self.counts["generated_tokens"] += 1
            text, stopped = job.search.push(job.decode(token))
            scores = () if job.top is None else (score_token(log_softmax(logits_V), token, job.top),)
            if text or scores:
                job.tell(text, scores)
            if stopped:
                job.search.held = ""
                return "word"
            return "eos" if job.sampler.complete else "limit" if job.generated == job.most else None
        except BaseException:  # of a constraint or the tokenizer, which may panic; other jobs go on
            traceback.print_exc()
            return "error"

    def _end(self, job: Job, finish: str) -> None:
        """End a job: keep what its slot holds, and let the last one move into the slot."""
        if job in self.running:
            slot, last = self.running.index(job), self._ready - 1
            if job.reuse and (held := self.slots.length(slot)):
                self.prefixes.keep(job.ids[:held], self.slots.view(slot))
            if slot <= last:
                if slot < last:
                    self._move(last, slot)
                if len(self.running) > self._ready:  # the one that reads its prompt
                    self._move(self._ready, last)
                self._ready = last
            self.running.pop()
            self.counts["finished"] += 1
            self.counts["longest"] = max(self.counts["longest"], len(job.ids))
        else:
            with self._news:
                self.waiting.remove(job)
        job.tell(job.search.held, finish=finish)

    def _move(self, source: int, target: int) -> None:
        self.slots.move(source, target)
        self.running[target] = self.running[source]
