"""A served model: loads and runs in a thread, renders and encodes prompts, and makes the sequences of a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import cast

from sportsllm.console import log
from sportsllm.errors import SportsLLMError
from sportsllm.inference.sampling import StopSearch
from sportsllm.serving.engine import Engine, Job, Piece
from sportsllm.serving.requests import ApiError, ChatRequest, CompletionRequest, Message, NativeRequest, Prompt
from sportsllm.serving.sampler import Constraints, Sampler
from sportsllm.text.chat import ChatRenderer, find_template
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

_TURN_END = "<|im_end|>"  # ChatML, which llama-server too writes for models without a template


class ServedModel:
    """An export behind the server.

    Args:
        name, directory: what requests call it, and where it is.
        make_engine: loads it.

    Attributes:
        created, template: when it was made, and its chat template.
        ready, engine, tokenizer: whether it is loaded; what runs its sequences, and its tokenizer, when it is.
        problem: why it could not be loaded.
        worker: a thread for templates and the tokenizer, which block for as long as a text is long.
    """

    engine: Engine
    tokenizer: TextTokenizer

    def __init__(self, name: str, directory: Path, make_engine: Callable[[], Engine]) -> None:
        self.name, self.directory, self._make_engine = name, directory, make_engine
        self.ready, self.problem = False, cast(BaseException | None, None)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=f"text of {name}")
        self.created = int((directory / "config.json").stat().st_mtime)
        self.template = find_template(directory)[0]
        self._renderer = None if self.template is None else ChatRenderer(directory)
        if self._renderer is None:
            log(f"{name} has no chat template; using ChatML")

    def start(self, failed: Callable[[], None]) -> None:
        """Load and run the model in a thread of its own; `failed` is called there if it cannot be loaded."""
        self._thread = Thread(target=self._run, args=(failed,), name=f"model {self.name}", daemon=True)
        self._thread.start()

    def _run(self, failed: Callable[[], None]) -> None:
        try:
            self.engine = self._make_engine()
            self.tokenizer = load_tokenizer(self.directory, self.engine.slots.config)
            self.ready = True
        except BaseException as error:
            self.problem = error
            failed()
            return
        self.engine.run()

    def stop(self) -> None:
        """End the model's thread and the template's process."""
        if self.ready:
            self.engine.close()
            self._thread.join(5)
        self.worker.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            self._renderer.close()

    @cached_property
    def _stop_tokens(self) -> frozenset[int]:
        return frozenset([*self.engine.slots.config.stop_token_ids, *self.tokenizer.turn_ends])

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.engine.slots.config, sorted(self._stop_tokens))

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation by the chat template, up to where the answer begins.

        Raises:
            ApiError: the template refuses it.
        """
        plain = [message.plain() for message in messages]
        if self._renderer is None:
            turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}{_TURN_END}\n" for each in plain)
            return f"{turns}<|im_start|>assistant\n"
        try:
            return self._renderer(plain)
        except SportsLLMError as error:
            raise ApiError(400, str(error), param="messages") from None

    def jobs(self, body: ChatRequest | CompletionRequest, deliver: Callable[[Piece], None]) -> list[Job]:
        """The sequences of a request, `n` for each prompt.

        Raises:
            ApiError: a prompt beyond the context, or a field that cannot be.
        """
        native, seed = isinstance(body, NativeRequest), body.seed
        if seed is None or seed == -1:
            seed = secrets.randbits(32)
        if isinstance(body, ChatRequest):
            prompts = [self.encode_chat(body.messages)]
        else:
            prompts = [self._encode(prompt, special=native) for prompt in body.prompts()]
        for prompt in prompts:
            self._check(prompt)
        jobs = [self._job(body, prompt, seed, choice, deliver) for prompt in prompts for choice in range(body.n)]
        for index, job in enumerate(jobs):
            job.index = index
            if isinstance(body, CompletionRequest) and body.echo:
                given = body.prompts()[index // body.n]
                job.echo = job.top is not None
                job.tell(given if isinstance(given, str) else self.tokenizer.decode(job.prompt))
        return jobs

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation's tokens; see `render`."""
        begin = [self.tokenizer.begin_id] if self._renderer is None else []
        return begin + self.tokenizer.encode(self.render(messages), special=True)

    def _encode(self, prompt: Prompt, special: bool) -> list[int]:
        """A prompt's tokens; `special` is for llama-server's clients, who send what `/apply-template` has written."""
        parts, begin, ids = [prompt] if isinstance(prompt, str) else prompt, self.tokenizer.begin_id, list[int]()
        for part in parts:
            ids += self.tokenizer.encode(part, special) if isinstance(part, str) else [part]
        return [begin, *ids] if isinstance(parts[0], str) and ids[:1] != [begin] else ids

    def _check(self, prompt: Sequence[int]) -> None:
        config, room = self.engine.slots.config, self.engine.slots.room
        if max(prompt) >= config.vocab_size:
            message = f"prompt: token {max(prompt)} lies outside the vocabulary of {config.vocab_size}"
            raise ApiError(400, message, param="prompt")
        if len(prompt) >= room:
            message = f"the prompt has {len(prompt)} tokens, the context is {room}; shorten it"
            numbers = {"n_prompt_tokens": len(prompt), "n_ctx": room}
            raise ApiError(400, message, "exceed_context_size_error", **numbers)

    def _job(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        seed: int,
        choice: int,
        deliver: Callable[[Piece], None],
    ) -> Job:
        constraint, stops, slots = None, body.stops(), self.engine.slots
        for field, given in body.constraints().items():
            try:
                constraint = self._constraints.make(field, given)
            except SportsLLMError as error:
                raise ApiError(400, str(error), param=field) from None
        if isinstance(body, ChatRequest) and self._renderer is None:
            stops = [*stops, _TURN_END]
        if isinstance(body, ChatRequest):
            top = body.top_logprobs if body.logprobs else None
        else:
            top = None if isinstance(body, NativeRequest) and not body.logprobs else body.logprobs
        room, penalties = slots.room - len(prompt), (body.presence_penalty, body.frequency_penalty)
        biases = body.biases(slots.config.vocab_size, self.tokenizer.encode)
        return Job(
            prompt=prompt,
            most=room if body.max_tokens in (None, -1) else min(room, int(body.max_tokens or 0)),
            sampler=Sampler(body.sampling(seed), choice, body.min_p, *penalties, biases, constraint),
            decode=self.tokenizer.decoder(prompt),
            search=StopSearch(stops),
            stop_tokens=frozenset() if body.ignore_eos else self._stop_tokens,
            deliver=deliver,
            top=top,
            reuse=body.cache_prompt,
        )
