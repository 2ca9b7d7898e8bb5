"""The drawing as a picture: nothing overlaps, every word fits, and all figures are there."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.pictures.blocks import Drawing, describe_model
from benchmarks.pictures.drawing import draw_model
from sportsllm.formats.huggingface.config import config_from_hf
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix
from sportsllm.models.presets import PLANNED, PRESETS
from tests.support import families
from tests.support.models import tiny_config

MODELS: dict[str, ModelConfig] = PRESETS | PLANNED
MODELS |= {name: config_from_hf(json.loads(c.to_json_string())) for name, c in families.CONFIGS.items()}
BOXES = ("matrix", "norm", "table", "activation", "scores", "cache")
NARROW, WIDE = 0.42, 1.1
"""Widths of i and m in DejaVu Sans Bold, one of the widest fonts that a page falls back to, in em; others are 0.72."""
Box = tuple[float, float, float, float]


def elements(svg: str) -> tuple[ElementTree.Element, list[tuple[str, Box]], list[tuple[str, str, float, float, str]]]:
    """The picture, its rectangles by class (left, top, right, bottom), and its texts (words, class, x, y, anchor)."""
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    rects = []
    for rect in root.iter(f"{space}rect"):
        if rect.get("class") == "page":
            continue
        x, y, width, height = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        rects.append((rect.get("class", ""), (x, y, x + width, y + height)))
    texts = [
        (text.text or "", text.get("class", ""), float(text.get("x", "nan")), float(text.get("y", "nan")),
         text.get("text-anchor", "start"))
        for text in root.iter(f"{space}text")
    ]  # fmt: skip
    return root, rects, texts


def extent(words: str, cls: str, x: float, anchor: str) -> tuple[float, float]:
    """Left and right of a line of text in a wide font."""
    size = {"title": 20, "head": 15, "half": 14, "name": 13}.get(cls, 12)
    weight = 1.0 if cls in ("title", "head", "half", "name") else 0.9
    ems = sum(NARROW if c in "ijlft.,:|()[]' " else WIDE if c in "mwMW" else 0.72 for c in words)
    width = ems * size * weight
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return left, left + width


@pytest.mark.parametrize("name", MODELS)
def test_boxes_do_not_overlap_and_hold_their_words(name: str) -> None:
    check_places(draw_model(describe_model(MODELS[name]), name))


def check_places(svg: str) -> None:
    root, rects, texts = elements(svg)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = [box for cls, box in rects if cls in BOXES]
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    for _, box in rects:
        assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height
    held = 0
    for words, cls, x, y, anchor in texts:
        left, right = extent(words, cls, x, anchor)
        assert left >= 0 and right <= width and 0 < y < height, words
        for box in boxes:
            if box[0] < x < box[2] and box[1] < y < box[3] and anchor == "middle":
                held += 1
                assert box[0] < left and right < box[2], f"{words} sticks out"
    assert held > 2 * (len(boxes) - 5)  # a name and a shape in each box that is not of the legend
    lines = [(words, extent(words, cls, x, anchor), y) for words, cls, x, y, anchor in texts]
    for one, other in combinations(lines, 2):
        if abs(one[2] - other[2]) < 11 and words_differ(one, other):
            assert one[1][1] <= other[1][0] or other[1][1] <= one[1][0], (one[0], other[0])


def words_differ(one: tuple[str, tuple[float, float], float], other: tuple[str, tuple[float, float], float]) -> bool:
    return one is not other and "+" not in (one[0], other[0])


def test_every_figure_is_in_the_picture() -> None:
    _, _, texts = elements(draw_model(describe_model(PRESETS["latent-moe"]), "latent-moe"))
    said = [words for words, *_ in texts]
    for words in (
        "64,886,784 parameters, 6 layers, residual stream of 384; T tokens",
        "9,790,400 parameters each, 58,742,400 together",
        "9,455,616 parameters, 2,377,728 for a token",
        "1,181,568 each, 9,452,544 together",
        "kept for later tokens: latent 144",
        "then q_a_layernorm: 64",
        "experts, 8 alike",
        "T \u00d7 2 \u00d7 1,536",
        "layers 0\u20135, drawn once",
        "\u2192 logits: T \u00d7 16,000",
    ):
        assert words in said, words


def test_layers_with_other_parts_are_drawn_beside_each_other() -> None:
    """As a model would be whose layers are not all of one kind."""
    dense, mixed = (describe_model(PRESETS[name]).blocks[0] for name in ("tiny-1m", "tiny-experts"))
    blocks = (replace(dense, layers=(0,)), replace(mixed, layers=(1, 2, 4)), replace(dense, layers=(3,)))
    whole = describe_model(PRESETS["tiny-1m"])
    _, _, texts = elements(draw_model(Drawing(128, whole.before, blocks, whole.after, 1), "mixed"))
    heads = [words for words, cls, *_ in texts if cls == "head" and words.startswith("layer")]
    assert heads == ["layer 0", "layers 1\u20132, 4, drawn once", "layer 3"]


def test_names_cannot_break_out_of_the_picture() -> None:
    svg = draw_model(describe_model(PRESETS["tiny-1m"]), '</text><script>alert("&")</script>')
    assert "<script" not in svg and elements(svg)[2][0][0] == '</text><script>alert("&")</script>'


class _Wide(Kind):
    """Many matrices that read the norm, then many groups that are not alike."""

    def matrices(self, config: Any) -> tuple[Matrix, ...]:
        hidden = config.hidden_size
        read = [Matrix(f"read_number_{i}", 8 + i, hidden, "inner", HIDDEN, HIDDEN) for i in range(15)]
        made = [Matrix(f"group_{i}.made", hidden, 8 + i, HIDDEN, "inner", f"inner_{i}", True) for i in range(11)]
        return (*read, *made)

    def tensors(self, config: Any) -> tuple[Matrix | Activation, ...]:
        read, made = self.matrices(config)[:15], self.matrices(config)[15:]
        return (*read, Activation("inner", (15, 8)), *made)

    def forward(self, half: Any, x_BTD: Any, rope: Any, documents: Any, cache: Any) -> Any:
        raise AssertionError("it is drawn alone")


def test_a_row_that_is_too_wide_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEED_FORWARD, "wide", _Wide())
    svg = draw_model(describe_model(tiny_config(mlp_kind="wide")), "wide")
    check_places(svg)
    assert float(elements(svg)[0].get("width", "nan")) < 1_300
    assert sum(words.startswith("read_number") for words, *_ in elements(svg)[2]) == 15
