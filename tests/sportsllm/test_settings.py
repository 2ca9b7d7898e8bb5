"""Rare settings: parsing, and the page that lists them."""

from pathlib import Path

import pytest

from sportsllm.commands import load_command
from sportsllm.errors import UsageError
from sportsllm.settings import TRAINING, parse_settings, settings_page
from tests.support.models import tiny_config

ROOT = Path(__file__).resolve().parents[2]


def test_values_get_their_types_from_texts_and_from_a_mapping() -> None:
    texts = ["warmup=7", "weight_decay=0.5", "try_rates=true", "schedule=wsd"]
    values = {"warmup": 7, "weight_decay": 0.5, "try_rates": True, "schedule": "wsd"}
    assert parse_settings(texts, TRAINING) == parse_settings(values, TRAINING) == values
    assert parse_settings(None, TRAINING) == parse_settings([], TRAINING) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup", "write warmup=VALUE"),
        ("warmpu=1", "did you mean warmup?"),
        ("speed=9", "choose one of precision, accumulation"),
        ("warmup=x", "is not a whole number"),
        ("warmup=-1", "must be at least 0"),
        ("min_lr_ratio=2", "must be 0 to 1"),
        ("clip_norm=inf", "must be finite and at least 0"),
        ("try_rates=1", "write true or false"),
        ("schedule=cosin", "did you mean cosine?"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings([text], TRAINING)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_page_is_up_to_date() -> None:
    """Made by `python -m sportsllm.settings > docs/reference/settings.md`."""
    assert (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8") == settings_page()


def test_an_integer_beyond_any_float_is_refused() -> None:
    for given in ({"weight_decay": 10**400}, {"accumulation": 10**400}, ["accumulation=1" + 400 * "0"]):
        with pytest.raises(UsageError, match="must be finite"):
            parse_settings(given, TRAINING)
    with pytest.raises(UsageError, match="must be a finite number"):
        tiny_config(rope_theta=10**400)
    with pytest.raises(UsageError, match="--learning-rate is 1"):
        load_command("train")(model="tiny-1m", learning_rate=10**400)
