"""A served model: loads and runs in a thread, renders and encodes prompts, and makes the sequences of a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import product
from pathlib import Path
from threading import Thread

from sportsllm.console import log
from sportsllm.errors import SportsLLMError
from sportsllm.inference.sampling import Sampling, StopSearch
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
    ready = False
    problem: BaseException | None = None

    def __init__(self, name: str, directory: Path, make_engine: Callable[[], Engine]) -> None:
        self.name, self.directory, self._make_engine = name, directory, make_engine
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
            raise ApiError(400, str(error).removeprefix(f"{self.directory}: "), param="messages") from None

    def jobs(self, body: ChatRequest | CompletionRequest, deliver: Callable[[Piece], None]) -> list[Job]:
        """The sequences of a request, `n` for each prompt.

        Raises:
            ApiError: a prompt beyond the context, or a field that cannot be.
        """
        given, room, jobs = list[Prompt](), self.engine.slots.room, list[Job]()
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if isinstance(body, ChatRequest):
            prompts, top = [self.encode_chat(body.messages)], body.top_logprobs if body.logprobs else None
            stops = stops if self._renderer else [*stops, _TURN_END]
        else:
            given, native = body.prompts(), isinstance(body, NativeRequest)
            prompts = [self._encode(prompt, native) for prompt in given]
            top = None if native and not body.logprobs else body.logprobs
        for prompt in prompts:
            self._check(prompt)
        seed = secrets.randbits(32) if body.seed in (None, -1) else int(body.seed or 0)
        sampling = Sampling(body.temperature, body.top_k, body.top_p, body.repetition_penalty, seed)
        penalties, wanted = (body.presence_penalty, body.frequency_penalty), body.constraint()
        biases = body.biases(self.engine.slots.config.vocab_size, self.tokenizer.encode)
        ends = frozenset(self.tokenizer.special_ids(stops)) | (frozenset() if body.ignore_eos else self._stop_tokens)
        for number, choice in product(range(len(prompts)), range(body.n)):
            constraint, left = wanted and self._constraints.make(*wanted), room - len(prompts[number])
            job = Job(
                prompt=prompts[number],
                most=left if body.max_tokens in (None, -1) else min(left, int(body.max_tokens or 0)),
                sampler=Sampler(sampling, choice, body.min_p, *penalties, biases, constraint),
                decode=self.tokenizer.decoder(prompts[number]),
                search=StopSearch(stops),
                stop_tokens=ends,
                deliver=deliver,
                top=top,
                reuse=body.cache_prompt,
                index=len(jobs),
            )
            if isinstance(body, CompletionRequest) and body.echo:
                job.echo, text = job.top is not None, given[number]
                job.tell(text if isinstance(text, str) else self.tokenizer.decode(job.prompt))
            jobs.append(job)
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
        if not prompt:
            raise ApiError(400, "messages: the chat template makes no text of them", param="messages")
        if max(prompt) >= config.vocab_size:
            message = f"prompt: token {max(prompt)} lies outside the vocabulary of {config.vocab_size}"
            raise ApiError(400, message, param="prompt")
        if len(prompt) >= room:
            message = f"the prompt has {len(prompt)} tokens, the context is {room}; shorten it"
            raise ApiError(400, message, "exceed_context_size_error", n_prompt_tokens=len(prompt), n_ctx=room)
