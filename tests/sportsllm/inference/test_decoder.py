import math
import random
from itertools import accumulate, pairwise
from threading import Event

import numpy as np
import pytest
import torch

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.inference.batch_sampling import sample_texts
from sportsllm.inference.sampling import Sampling, draw, draw_token, generate, penalize, probabilities, until
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from tests.support.models import tiny_model

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], dtype=np.float32))


def test_sampling_agrees_with_transformers_filters() -> None:
    from transformers.generation import logits_process as peer

    rng = np.random.default_rng(0)
    logits = rng.normal(size=200).astype(np.float32) * 3
    logits += 0.5 - logits.max()  # only the largest is positive
    seen = np.argsort(-logits)[[0, 2, 2, 1]].tolist()
    scores = torch.from_numpy(logits)[None]
    for step in (
        peer.RepetitionPenaltyLogitsProcessor(1.3),
        peer.TemperatureLogitsWarper(0.7),
        peer.TopKLogitsWarper(50),
        peer.TopPLogitsWarper(0.9),
    ):
        scores = step(torch.tensor([seen]), scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    assert probabilities(penalize(logits, seen, 1.3), Sampling(0.7, 50, 0.9)) == pytest.approx(expected, abs=1e-5)


def test_rows_are_filtered_like_one_alone() -> None:
    logits = np.random.default_rng(0).normal(size=(7, 60)).astype(np.float32) * 3
    for sampling in (Sampling(0.7, 5, 0.9), Sampling(1.3, 0, 0.5), Sampling(1.0, 9, 1.0)):
        alone = np.stack([probabilities(row, sampling) for row in logits])
        assert np.array_equal(probabilities(logits, sampling), alone)
    for sampling in (Sampling(1.0, 0, 0.5), Sampling(1.0, 4, 0.5)):  # of equal ones the first two, and no third
        assert probabilities(np.zeros(4, np.float32), sampling).tolist() == [0.5, 0.5, 0, 0]


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    # Oracle: token v for every number from P(ids < v) up to P(ids <= v), in exact float64 sums.
    logits = np.random.default_rng(1).normal(size=400).astype(np.float32) * 4
    exact = [math.exp(float(value)) for value in logits]
    total = math.fsum(exact)
    edges = np.array([math.fsum(exact[:v]) / total for v in range(401)])
    width = np.diff(edges)
    inside = np.concatenate([edges[:-1] + share * width for share in (1e-3, 0.5, 1 - 1e-3)])
    drawn = draw(np.tile(logits, (1200, 1)), Sampling(1.0, 0, 1.0), inside)
    clear = np.tile(width > 1e-12, 3)  # float64 sums of 400 terms err by 1e-14
    assert clear.sum() > 1100 and np.array_equal(drawn[clear], np.tile(np.arange(400), 3)[clear])
    certain = np.array([[0.0, 0.0, -np.inf]], dtype=np.float32)
    for row, uniform in ((certain, np.nextafter(1.0, 0.0)), (certain[:, ::-1], 0.0)):  # never what has no chance
        assert draw(row, Sampling(1.0, 0, 1.0), np.array([uniform])) == [1]


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(), Sampling(1.0, 0, 1.0)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(value: float, sampling: Sampling) -> None:
    many = np.random.default_rng(0).normal(size=5_000).astype(np.float32)
    for logits in (LOGITS * value, *(np.append(most, np.float32(value)) for most in (LOGITS, many))):
        with pytest.raises(ArtifactError, match="logits are not finite"):
            draw(logits[None], sampling, np.array([0.5]))
        with pytest.raises(ArtifactError, match="logits are not finite"):
            draw_token(logits, sampling, 0.5)


def test_greedy_generation_equals_the_uncached_argmax() -> None:
    model = tiny_model()
    prompt = [0, 50, 60]
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    ours = list(generate(TorchDecoder(model), prompt, 12, Sampling(temperature=0)))
    assert ours == ids[3:]
    stop = ours[5]
    assert list(generate(TorchDecoder(model), prompt, 12, Sampling(temperature=0), [stop])) == ours[: ours.index(stop)]


def test_context_is_the_limit() -> None:
    decoder = TorchDecoder(tiny_model())
    with pytest.raises(UsageError, match="call prefill first"):
        decoder.step([1])
    assert len(list(generate(decoder, [0] * 120, 100, Sampling(temperature=0)))) == 8
    with pytest.raises(UsageError, match="context is 128"):
        list(generate(decoder, [0] * 128, 1, Sampling()))


def test_any_cut_gives_the_text_before_the_first_stop_and_no_piece_later() -> None:
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choice("ab\n") for _ in range(30))
        stops = ["".join(chance.choice("ab\n") for _ in range(chance.randint(1, 5))) for _ in range(2)]
        cuts = [0, *accumulate(chance.randint(1, 4) for _ in text)]
        pieces = iter([text[start:stop] for start, stop in pairwise(cuts)])
        found = "".join(until(pieces, stops))
        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        end, place = min(complete, default=(len(text), len(text)))
        assert found == text[:place]
        assert len(text) - sum(map(len, pieces)) <= end + 3
    assert "".join(until(["ends with a beginning: x"], ["x" * 10**7])) == "ends with a beginning: x"  # at once


PLAIN = Sampling(1.0, 0, 1.0)


def alone(
    model: SportsLLM, found: list[int], prompt: list[int], stops: list[int], uniform: np.ndarray
) -> tuple[list[int], bool]:
    """Oracle: what each draw gives after the beginning of `found`, by float64 loops over the distributions."""
    with torch.inference_mode():
        shares_TV = torch.softmax(model(torch.tensor([found]))[0].double(), -1).tolist()
    tokens = list(prompt)
    for place in range(len(prompt), len(uniform)):
        shares = shares_TV[place - 1]
        token, reached = 0, shares[0]
        while reached <= uniform[place]:
            token += 1
            reached += shares[token]
        if token in stops:
            return tokens, True
        tokens.append(token)
    return tokens, False


def test_sequences_of_one_length_are_decoded_as_a_batch() -> None:
    """Lengths may differ; each sequence gets the logits of the whole text read at once."""
    model = tiny_model()
    decoder = TorchDecoder(model)
    rows = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    logits = decoder.prefill(rows, max_length=8)
    for new in ([10, 11, 12, 13], [14, 15, 16, 17]):
        logits = decoder.step(new)
        rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([row]))[:, -1] for row in rows])
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)


def test_a_row_in_a_batch_of_other_lengths_equals_the_row_alone() -> None:
    model = tiny_model(4, vocab_size=64).eval()
    prompts = [[0, 5, 6], [0], [0, 7, 7, 1, 9, 3, 8, 2], [0, 3], *([[0, n] for n in range(3, 20)])]
    uniform = np.random.default_rng(0).random((len(prompts), 80))
    stops = [1]  # also inside a prompt, which does not end there
    found = sample_texts(model, prompts, stops, PLAIN, uniform)
    for text, prompt, row in zip(found, prompts, uniform, strict=True):
        assert tuple(text) == alone(model, text.tokens, prompt, stops, row)
    assert len({len(text.tokens) for text in found}) > 5 and {text.ended for text in found} == {True, False}


def test_a_cancelled_batch_stops_at_once() -> None:
    cancelled = Event()
    cancelled.set()
    model = tiny_model(vocab_size=16).eval()
    assert [text.tokens for text in sample_texts(model, [[0]], [], PLAIN, np.zeros((1, 9)), cancelled)] == [[0]]


@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_a_draw_of_few_logits_is_that_of_the_whole_distribution(spread: float) -> None:
    rng = np.random.default_rng(3)
    for number in range(60):
        logits = (rng.standard_normal(5000 + number) * spread).astype(np.float32)
        if number % 3 == 0:
            logits[rng.random(len(logits)) < 0.99] = -np.inf  # as a constraint leaves them
        if number % 4 == 0:
            logits = np.round(logits)  # ties
        sampling, value = Sampling(0.8, (1, 40, 700)[number % 3], (0.9, 1.0)[number % 2]), rng.random()
        cumulative = np.cumsum(probabilities(logits, sampling))
        assert draw_token(logits, sampling, value) == np.searchsorted(cumulative, value * cumulative[-1], "right")
