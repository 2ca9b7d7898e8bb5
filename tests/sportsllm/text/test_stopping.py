"""Text that ends at a stop, however pieces cut it."""

import random
from collections.abc import Iterator

import pytest

from sportsllm.inference.sampling import until


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted"),
    [
        (["a b", " c"], [], "a b c"),
        (["one\n", "\ntwo"], ["\n\n"], "one"),
        (["one\n", "x\n", "\n"], ["\n\n"], "one\nx"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["stop at once"], ["stop"], ""),
        (["the en", "d of it, END"], ["END", "end"], "the "),
        (["ends with a beginning: EN"], ["END"], "ends with a beginning: EN"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], wanted: str) -> None:
    assert "".join(until(pieces, stops)) == wanted


def test_any_cut_gives_the_text_before_the_first_stop_and_no_piece_later() -> None:
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choice("ab\n") for _ in range(30))
        stops = ["".join(chance.choice("ab\n") for _ in range(chance.randint(1, 5))) for _ in range(2)]
        asked = [0]

        def pieces(text: str = text, asked: list[int] = asked) -> Iterator[str]:
            while asked[0] < len(text):
                start, asked[0] = asked[0], min(len(text), asked[0] + chance.randint(1, 4))
                yield text[start : asked[0]]

        found = "".join(until(pieces(), stops))
        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        end, place = min(complete, default=(len(text), len(text)))
        assert found == text[:place]
        assert asked[0] <= end + 3
