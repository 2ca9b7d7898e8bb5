"""Prompt lookup over native kernels: the same tokens, in fewer passes."""

import dataclasses
import shutil
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import pytest

from benchmarks.measure.worker import LEAST_STEPS, measure_texts
from export.kernels import library as built
from export.runtime.decoder import OnnxDecoder
from export.runtime.slots import SlotDecoder
from sportsllm.inference import lookup
from sportsllm.inference import sampling as sampling_module
from sportsllm.inference.lookup import DraftLookup, PromptLookup
from sportsllm.inference.sampling import Sampling, StopSearch, generate
from sportsllm.serving.engine import Engine, Job
from sportsllm.serving.sampler import Sampler
from tests.support.export_models import TINY, Exports

PATTERN = [5, 9, 2, 7, 7, 1, 3]
SETTINGS: list[dict[str, Any]] = [
    {"bits": 4, "asymmetric": True},
    {"bits": 8, "block": 64, "cache": "int8"},
    {"bits": 4, "cache": "fp16", "head_dim": 8, "qk_norm": True},
]


@pytest.fixture(autouse=True)
def _always(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels from the tests' own build, and proposals whatever they cost."""
    monkeypatch.setattr(built, "HERE", library.parent)
    monkeypatch.setattr(PromptLookup, "_cost", lambda self, rows: 1.0)


@pytest.mark.parametrize(("settings", "temperature"), [*zip(SETTINGS, (0, 0.3, 0.3), strict=True)])
def test_tokens_are_the_same_in_fewer_passes(
    settings: dict[str, Any], temperature: float, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = OnnxDecoder(exports(**settings).directory, 1, kernels="native")
    assert decoder.exact_rows == 8
    made = list[PromptLookup]()
    monkeypatch.setattr(sampling_module, "PromptLookup", lambda ids: made.append(PromptLookup(ids)) or made[-1])
    for prompt in (PATTERN * 4, [1, 2, 3]):
        for length in (1, 2, 40, 200):
            sampling = Sampling(temperature, top_k=5, seed=1)
            ours = list(generate(decoder, prompt, length, sampling))
            decoder.exact_rows = 1
            assert list(generate(decoder, prompt, length, sampling)) == ours
            decoder.exact_rows = 8
    assert sum(each.accepted for each in made) > 20
    full = list(generate(decoder, [1, 2, 3], 10**6, Sampling(0)))
    assert len(full) == decoder.config.max_position_embeddings - 3


def test_a_draft_proposes_and_the_tokens_are_the_same(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token for every seed, so the distribution is the same, too."""
    decoder = OnnxDecoder(exports(**SETTINGS[0]).directory, 1, kernels="native")
    alike = OnnxDecoder(exports(**SETTINGS[0]).directory, 1, kernels="portable")
    other = OnnxDecoder(exports(bits=8, asymmetric=True).directory, 1)
    other.config = dataclasses.replace(other.config, max_position_embeddings=50)  # proposes nothing beyond
    made = list[DraftLookup]()
    monkeypatch.setattr(sampling_module, "DraftLookup", lambda *given: made.append(DraftLookup(*given)) or made[-1])
    for seed in range(12):
        sampling, length = Sampling(0.4 * (seed % 3), top_k=5, seed=seed), (3, 30, 90, 1)[seed % 4]
        for draft in (alike, other):
            ours = list(generate(decoder, [1, 2, seed], length, sampling, draft=draft))
            decoder.exact_rows = 1
            assert list(generate(decoder, [1, 2, seed], length, sampling, draft=draft)) == ours
            decoder.exact_rows = 8
    greedy = list(generate(decoder, [9, 8, 7], 60, Sampling(0), draft=alike))
    assert made[-1].passes < 30 and made[-1].accepted > 30 and len(greedy) == 60
    monkeypatch.setattr(DraftLookup, "_cost", lambda self, rows: 1e-9)  # any draft costs more
    calls, prefill = list[int](), alike.prefill
    monkeypatch.setattr(alike, "prefill", lambda *given, **more: calls.append(1) or prefill(*given, **more))
    list(generate(decoder, [9, 8, 7], 60, Sampling(0), draft=alike))
    assert calls == [1]


def test_a_draft_reads_a_prompt_in_chunks_between_tokens(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = OnnxDecoder(exports(**SETTINGS[0]).directory, 1, kernels="native")
    draft = OnnxDecoder(exports(**SETTINGS[0]).directory, 1, kernels="portable")
    draft.prefill_chunk, widths, run = 16, list[int](), draft._run
    monkeypatch.setattr(draft, "_run", lambda *given, **more: widths.append(given[2].shape[1]) or run(*given, **more))
    before, prompt = list[int](), np.random.default_rng(0).permutation(90).tolist()
    varied = Sampling(1.5, top_k=0, top_p=1.0)  # repeats nothing
    for _ in generate(decoder, prompt, 20, varied, draft=draft):
        before.append(sum(widths))
    assert before[-1] > 90 and max(widths) == 16
    assert max(np.diff([read for read in before if read <= 90])) == 16
    widths.clear()
    list(generate(decoder, [*prompt[:-1], 95], 20, varied, draft=draft))
    assert sum(widths) < 60  # the beginning was held


@pytest.mark.parametrize(("settings", "with_draft"), [*zip(SETTINGS, (True, False, True), strict=True)])
def test_the_same_in_slots(with_draft: bool, settings: dict[str, Any], exports: Exports) -> None:
    directory = exports(**settings).directory
    decoder, draft = OnnxDecoder(directory, 1), OnnxDecoder(directory, 1, kernels="portable") if with_draft else None
    engine = Engine(SlotDecoder(directory, 2, None, 1), 10**6, 9, Lock(), draft)
    thread = Thread(target=engine.run)
    thread.start()
    stop = frozenset(list(generate(decoder, PATTERN * 4, 60, Sampling(0)))[50:51])
    for seed in (0, 1):
        for stops in (frozenset[int](), stop):
            sampling = Sampling(0.3 * seed, top_k=5, seed=seed)
            job = Job(PATTERN * 4, 60, Sampler(sampling), str, StopSearch([]), stops, lambda _: None)
            engine.submit([job])
            while job.finish is None:
                time.sleep(0.001)
            decoder.exact_rows = 1
            assert job.ids[28:] == list(generate(decoder, PATTERN * 4, 60, sampling, list(stops)))
    assert engine.counts["lookup_tokens"] > 20
    engine.close()
    thread.join()


def test_other_graphs_read_token_by_token(exports: Exports) -> None:
    """Their operators round several tokens in another way than one."""
    assert OnnxDecoder(exports(bits=4).directory, 1, kernels="portable").exact_rows == 1
    assert OnnxDecoder(exports().directory, 1).exact_rows == 1


def test_proposals_follow_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    clock, cost = [0.0], {1: 1.0, 2: 1.3, 4: 2.0, 8: 3.5}
    monkeypatch.setattr(lookup.time, "perf_counter", lambda: clock[0])

    def widths(accepted: float, rounds: int = 60) -> list[int]:
        text, found = PromptLookup(PATTERN * 3), []
        for _ in range(rounds):
            proposed = text.propose(7)
            assert proposed == (PATTERN * 2)[: len(proposed)]
            clock[0] += cost[len(proposed) + 1]
            text.read(len(proposed))
            text.learn(len(proposed), round(accepted * len(proposed)))
            found.append(len(proposed) + 1)
        return found

    assert widths(1.0)[-1] == 8
    assert sum(width == 1 for width in widths(0.0)) > 45
    cost |= dict.fromkeys((2, 4, 8), 9.0)
    assert widths(1.0)[-1] == 1


def test_a_draft_is_asked_as_often_as_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the pass that the others are compared with was slow."""
    monkeypatch.undo()
    clock = [0.0]
    monkeypatch.setattr("sportsllm.inference.lookup.time.perf_counter", lambda: clock[0])

    class Constant:
        config = dataclasses.replace(TINY, max_position_embeddings=10**4)
        prefill_chunk = 128

        def held(self, text: Any) -> int:
            return len(text) - 1

        def prefill(self, rows: Any, max_length: int | None = None, reuse: bool = False) -> Any:
            return self.step([rows[0][-1]])

        def step(self, tokens: Any) -> Any:
            clock[0] += 0.001
            return np.eye(1, 4)

    def width(accepted: int) -> float:
        text, widths = DraftLookup(Constant(), 10**4, range(50)), list[int]()
        for _ in range(60):
            proposed = len(text.propose(7))
            clock[0] += 0.01 * {1: 1.0, 2: 1.3, 4: 2.0, 8: 3.5}[proposed + 1] * (1 if widths else 3)
            text.read(proposed)
            text.learn(proposed, accepted * proposed)
            text.extend(range(len(text), len(text) + 1 + accepted * proposed))
            widths.append(proposed + 1)
        return sum(widths[-20:]) / 20

    assert width(1) == 8 and width(0) < 1.3


@pytest.mark.parametrize("context", [2, 2 * LEAST_STEPS])
def test_bench_writes_no_text_in_a_context_without_room(
    context: int, exports: Exports, stories: Path, tmp_path: Path
) -> None:
    exports(bits=4, vocab_size=512, max_position_embeddings=context).copy_to(tmp_path)
    shutil.copy(stories / "tokenizer.json", tmp_path)
    assert measure_texts({"directory": str(tmp_path), "threads": 1, "seed": 0})["texts"] == {}


def test_bench_writes_kinds_of_text_with_and_without_lookup(exports: Exports, stories: Path, tmp_path: Path) -> None:
    exports(bits=4, vocab_size=512).copy_to(tmp_path)
    shutil.copy(stories / "tokenizer.json", tmp_path)
    asked = {"directory": str(tmp_path), "threads": 1, "seed": 0, "seconds_per_text": 0.0, "longest_text_s": 60.0}
    found = measure_texts(asked)["texts"]
    assert list(found) == ["copying", "match reports", "open text"]
    for text in found.values():
        assert 0 <= text["accepted"] <= text["proposed"] and text["tokens_per_s"] > 0 < text["plain_tokens_per_s"]
        assert text["tokens"] / text["tokens_per_pass"] == pytest.approx(text["tokens"] - text["accepted"])
    slow = measure_texts(asked | {"longest_text_s": 0.0})["texts"].values()
    assert {text["tokens"] for text in slow} == {LEAST_STEPS - 1}, "a slow model writes shorter texts"
    assert found["copying"]["tokens_per_pass"] > max(4, found["match reports"]["tokens_per_pass"])
