"""Several sequences over one loaded model, in turn and from several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from export.graph.builder import GraphForm
from export.graph.decoder import write_graph
from export.runtime import decoder as runtime
from export.runtime.decoder import OnnxDecoder
from sportsllm.inference.decoder import Logits
from tests.support.export_models import measured_scales, save, tiny_model

ROOM = 80


@pytest.fixture(scope="module", params=["shared cache", "growing cache", "INT8 cache"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxDecoder:
    model, directory = tiny_model(max_position_embeddings=ROOM), tmp_path_factory.mktemp("export")
    scales = measured_scales(model, [torch.tensor(draw(60))]) if request.param == "INT8 cache" else None
    operators = "standard" if request.param == "growing cache" else "onnx"
    write_graph(save(directory, model), directory, GraphForm(operators, scales=scales))
    return runtime.open(directory, threads=1)


def draw(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, length).tolist() for length in lengths]


def greedy(decoder: OnnxDecoder, prompt: list[int], steps: int) -> Iterator[tuple[int, Logits]]:
    logits = decoder.prefill([prompt], max_length=ROOM)
    for _ in range(steps):
        token = int(np.argmax(logits))
        yield token, logits
        logits = decoder.step([token])


def test_interleaved_sequences_equal_separate_ones(decoder: OnnxDecoder) -> None:
    prompts = draw(60, 40, 7)  # long and short pieces
    alone = [list(greedy(decoder, prompt, 15)) for prompt in prompts]
    turns = zip(*(greedy(decoder.fork(), prompt, 15) for prompt in prompts), strict=True)
    for place, turn in enumerate(turns):
        for row, (token, logits) in enumerate(turn):
            assert token == alone[row][place][0]
            np.testing.assert_array_equal(logits, alone[row][place][1])
    assert len({tuple(token for token, _ in row) for row in alone}) == 3, "they differ, so none read another's cache"


def test_a_fork_goes_on_from_what_was_read(decoder: OnnxDecoder) -> None:
    beginnings, tails = draw(40, 12), ([9, 8], [7, 6])
    decoder.prefill(beginnings, max_length=ROOM)
    expected = [decoder.step(pair) for pair in zip(*tails, strict=True)]
    decoder.prefill(beginnings, max_length=ROOM)
    branch = decoder.fork()
    decoder.step([1, 2])  # neither reads the other's
    np.testing.assert_array_equal(branch.step([9, 7]), expected[0])
    decoder.prefill(beginnings[:1], max_length=ROOM)
    np.testing.assert_array_equal(branch.step([8, 6]), expected[1])
    # What it holds is known to itself alone, so that it reuses its own.
    longer = [[*row, *tail, 5] for row, tail in zip(beginnings, tails, strict=True)]
    fresh = decoder.prefill(longer, max_length=ROOM)
    reused = branch.prefill(longer, max_length=ROOM, reuse=True)
    np.testing.assert_allclose(reused, fresh, atol=1e-4, rtol=0)  # float32 in another order of additions


def test_forks_run_in_threads(decoder: OnnxDecoder) -> None:
    prompts = draw(60, 61, 40, 33)
    expected = [[logits for _, logits in greedy(decoder, prompt, 5)] for prompt in prompts]

    def work(prompt: list[int]) -> list[list[Logits]]:
        one = decoder.fork()
        return [[logits for _, logits in greedy(one, prompt, 5)] for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        for want, found in zip(expected, pool.map(work, prompts), strict=True):
            for again in found:
                np.testing.assert_array_equal(again, want)
