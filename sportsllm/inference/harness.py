"""Tasks of lm-evaluation-harness, for checkpoints and exports alike: log-likelihoods and generated text.

Every text is read from the begin token, as `sportsllm.inference.scoring` reads it. Source:
https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lm_eval.api.task
import lm_eval.evaluator
import numpy as np
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.files import clip
from sportsllm.inference.decoder import Decoder, require_finite
from sportsllm.inference.sampling import Sampling, generate, until
from sportsllm.inference.scoring import ROWS_AT_ONCE, TaskScore, score_documents
from sportsllm.text.tokenizer import TextTokenizer


class HarnessModel(LM):  # type: ignore[misc]
    """A model as the harness asks it.

    Args:
        greedy: names of the tasks that ask whether a continuation is the likeliest one, which takes its logits.
        chat: whether requests are written by the chat template, with its special tokens.
    """

    def __init__(self, decoder: Decoder, tokenizer: TextTokenizer, greedy: Collection[str], chat: bool) -> None:
        super().__init__()
        self._decoder, self._tokenizer, self._greedy, self._chat = decoder, tokenizer, greedy, chat
        self._context = decoder.config.max_position_embeddings

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each continuation given its context; and of `greedy` tasks whether it is the likeliest."""
        rows, counts = [], []
        for context, continuation in (request.args for request in requests):
            before, row = self._ids(context.rstrip()), self._ids(context + continuation)
            counts.append(max(0, len(row) - len(before)))
            if counts[-1] >= self._context:
                raise UsageError(f"a continuation has {counts[-1]:,} tokens, the context {self._context:,}; skip it")
            rows.append(self._end(row, self._context))
        found = []
        with progress_bar("requests", len(rows)) as bar:
            for begin in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(begin, begin + ROWS_AT_ONCE)
                scores = self._decoder.score(rows[part])
                for request, row, count, score in zip(requests[part], rows[part], counts[part], scores, strict=True):
                    likeliest = request.task_name in self._greedy
                    if likeliest:
                        best = np.concatenate([each.argmax(axis=-1) for each in self._decoder.stream_logits(row[:-1])])
                        likeliest = bool((best[len(best) - count :] == row[len(row) - count :]).all())
                    found.append((float(score[len(score) - count :].sum()), likeliest))
                    require_finite(found[-1][0])
                bar.advance(len(scores))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of whole documents, in the windows of `score_documents`."""
        texts = [request.args[0] for request in requests]
        return [-nats for nats in score_documents(self._decoder, self._tokenizer, texts).documents]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Text up to one of the request's stops or the end of the turn."""
        stops = [*self._decoder.config.stop_token_ids, *(self._tokenizer.turn_ends if self._chat else [])]
        found = list[str]()
        with progress_bar("requests", len(requests)) as bar:
            for context, given in (request.args for request in requests):
                settings = normalize_gen_kwargs(given)
                new, temperature = settings["max_gen_toks"], float(settings.get("temperature") or 0.0)
                if new >= self._context:
                    raise UsageError(f"a task asks for {new:,} new tokens, the context has {self._context:,}; skip it")
                begin = self._end(self._ids(context), self._context - new)
                limits = int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0)
                sampling = Sampling(temperature, *limits, seed=len(found))  # repeated requests differ
                texts = [stop for stop in settings["until"] if stop]
                ends = [*stops, *self._tokenizer.special_ids(texts)]
                tokens = self._tokenizer.decode_stream(begin, generate(self._decoder, begin, new, sampling, ends))
                found.append("".join(until(tokens, texts)))
                bar.advance()
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the answer begins."""
        return self._tokenizer.render_chat(chat_history)

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's records."""
        return str(self._tokenizer.directory)

    def _ids(self, text: str) -> list[int]:
        """Tokens from the begin token, which a chat template writes itself."""
        ids = self._tokenizer.encode(text, special=self._chat)
        return ids if self._chat and ids else [self._tokenizer.begin_id, *ids]

    def _end(self, row: list[int], room: int) -> list[int]:
        """The first token and the last ones, `room` tokens in all."""
        return [row[0], *row[max(1, len(row) - room + 1) :]]


def run_tasks(
    decoder: Decoder, tokenizer: TextTokenizer, names: Sequence[str], settings: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, tuple[TaskScore, list[float]]]:
    """Scores of tasks and of groups by name, and of tasks their first metric for each document.

    Args:
        names: of the harness's own tasks, or YAML files of tasks.
        settings: `sportsllm.settings.TASKS`.

    Raises:
        UsageError: no such task, or one that cannot be loaded, for example since there is no hub.
    """
    for name in filter(Path.is_file, map(Path, names)):
        if re.search(r"^task: *(\[|$)", name.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            raise UsageError(f"--tasks {name}: is a group, which the harness loads by name; give its tasks' files")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    defaults = not all(name.endswith((".yaml", ".yml")) for name in names)
    try:
        manager = TaskManager(include_defaults=defaults)
        loaded = manager.load(list(names))
    except Exception as problem:  # of any library that reads tasks and data sets
        raise UsageError(
            f"--tasks {' '.join(names)}: cannot be loaded ({clip(str(problem) or repr(problem), 250)})"
        ) from None
    tasks, children = loaded["tasks"], {name for each in loaded["group_map"].values() for name in each}
    whole = [each for name, each in (tasks | loaded["groups"]).items() if name not in children]
    metrics = {name: list(task.aggregation()) for name, task in tasks.items()}
    greedy = [n for n in tasks if tasks[n].OUTPUT_TYPE == "loglikelihood" or "exact_match" in metrics[n]]
    chat, most = bool(settings.get("task_chat")), settings.get("task_documents")
    model = HarnessModel(decoder, tokenizer, greedy, chat)
    lm_eval.evaluator.get_git_commit_hash = lambda: None  # it runs git, which complains outside a repository
    lm_eval.api.task.tqdm = lambda items, **_: items  # bars that know no terminal
    found = lm_eval.evaluator.simple_evaluate(
        model, tasks=whole, limit=most, apply_chat_template=chat, task_manager=manager
    )
    scores = dict[str, tuple[TaskScore, list[float]]]()
    for name in [*tasks, *found.get("groups", ())]:
        figures, samples, shown = found["results"][name], found["samples"].get(name, []), {}
        samples = [each for each in samples if each["filter"] == samples[0]["filter"]]
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{filtered}")
                label = metric if filtered == "none" else f"{metric} ({filtered})"
                shown[label] = (float(value), error if isinstance(error, float) else None)
        first = metrics[name][0] if name in metrics else next(iter(shown)).partition(" ")[0]
        label = next(each for each in shown if each.partition(" ")[0] == first)
        values = [float(each[first]) for each in samples if isinstance(each.get(first), int | float)]
        documents, shots = len(samples) or int(figures["sample_len"]), int(found["n-shot"].get(name, 0))
        scores[name] = TaskScore(label, *shown[label], shown, documents, shots), values
    return scores
