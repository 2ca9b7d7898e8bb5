from threading import Event

import numpy as np
import torch

from sportsllm.inference.batch_sampling import sample_texts
from sportsllm.inference.decoder import Sampling
from sportsllm.models.language_model import SportsLLM
from tests.support.models import tiny_model

PLAIN = Sampling(1.0, 0, 1.0)


def alone(model: SportsLLM, prompt: list[int], stops: list[int], uniform: np.ndarray) -> tuple[list[int], bool]:
    """Oracle: the whole text read again for each token, float64, a loop over the distribution."""
    tokens = list(prompt)
    for place in range(len(prompt), len(uniform)):
        with torch.inference_mode():
            shares = torch.softmax(model(torch.tensor([tokens]))[0, -1].double(), -1).tolist()
        token, reached = 0, shares[0]
        while reached <= uniform[place]:
            token += 1
            reached += shares[token]
        if token in stops:
            return tokens, True
        tokens.append(token)
    return tokens, False


def test_a_row_in_a_batch_of_other_lengths_equals_the_row_alone() -> None:
    model = tiny_model(4, vocab_size=64).eval()
    prompts = [[0, 5, 6], [0], [0, 7, 7, 1, 9, 3, 8, 2], [0, 3], *([[0, n] for n in range(3, 20)])]
    uniform = np.random.default_rng(0).random((len(prompts), 80))
    stops = [1]  # also inside a prompt, which does not end there
    found = sample_texts(model, prompts, stops, PLAIN, uniform)
    assert [tuple(text) for text in found] == [
        alone(model, prompt, stops, row) for prompt, row in zip(prompts, uniform, strict=True)
    ]
    assert len({len(text.tokens) for text in found}) > 5 and {text.ended for text in found} == {True, False}


def test_what_is_written_follows_the_models_probabilities() -> None:
    # One prompt, many rows: the second token drawn must be distributed as softmax(model) says.
    model = tiny_model(3, vocab_size=16).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.3)  # so that several tokens are likely, and none surely
    rows = 4_000
    uniform = np.random.default_rng(0).random((rows, 5))
    text = np.array([text.tokens for text in sample_texts(model, [[5, 5, 5]] * rows, [], PLAIN, uniform)])
    common = np.bincount(text[:, 3]).argmax()
    second = text[text[:, 3] == common, 4]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[5, 5, 5, common]]))[0, -1].double(), -1).numpy()
    counts = np.bincount(second, minlength=16)
    # Chi-squared with 15 degrees of freedom is above 45 once in ten thousand draws.
    enough = expected * len(second) > 5
    assert enough.sum() >= 4
    statistic = ((counts - expected * len(second)) ** 2 / (expected * len(second)))[enough].sum()
    assert statistic < 45


def test_a_cancelled_batch_stops_at_once() -> None:
    cancelled = Event()
    cancelled.set()
    model = tiny_model(vocab_size=16).eval()
    assert [text.tokens for text in sample_texts(model, [[0]], [], PLAIN, np.zeros((1, 9)), cancelled)] == [[0]]
