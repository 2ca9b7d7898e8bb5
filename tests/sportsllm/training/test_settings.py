"""Settings that follow from the length of a run, its model and its start."""

from typing import Any

import pytest
import torch

from sportsllm.console import log_once
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import preset
from sportsllm.settings import TRAINING, parse_settings
from sportsllm.training import optimizers
from sportsllm.training.base_model import log_cost
from sportsllm.training.optimizers import rate_factor
from sportsllm.training.settings import DOCUMENTED_DROPOUT, Run, Start, TrainConfig, peak_rates, train_config

TINY, LARGE = preset("tiny-1m-deep"), preset("small")
SMALL = Run(Start.PRUNED, TINY)


@pytest.mark.parametrize("tokens", [1, 3_000, 65_536, 100_000, 204_800, 410_000, 1_000_000, 8_000_000])
def test_no_run_ends_inside_its_warm_up(tokens: int) -> None:
    config = train_config(SMALL, tokens, {})
    assert tokens <= config.steps * config.tokens_per_step < tokens + config.tokens_per_step
    assert config.warmup <= max(1, 0.06 * config.steps)
    assert 1_024 <= config.tokens_per_step <= 8_192
    if tokens >= 200 * 1_024:
        assert config.steps + 1 >= 200
    if config.steps > 1:
        assert max(rate_factor(config, step) for step in range(config.steps)) == 1.0
        assert config.steps < 5 or rate_factor(config, config.steps - 1) < 0.2


@pytest.mark.parametrize(
    ("start", "hidden", "tokens", "tokens_per_step"),
    [
        (Start.PRUNED, 96, 1_000_000, 1_024),  # 800 steps or more
        (Start.PRUNED, 96, 3_000_000, 2_048),
        (Start.PRUNED, 192, 1_000_000, 2_048),  # the least that Muon is cheap with
        (Start.PRUNED, 192, 300_000, 1_024),  # 200 steps come first
        (Start.PRUNED, 768, 1_000_000, 4_096),  # Muon is never cheap: 200 steps
        (Start.PRUNED, 576, 100_000, 512),
        (Start.RANDOM, 256, 300_000, 1_024),
        (Start.RANDOM, 768, 300_000, 1_024),  # Muon takes more than half of the time, and pays
        (Start.BARELY_TRAINED, 128, 100_000, 512),
        (Start.TRAINED, 96, 1_000_000, 4_096),
        (Start.QUANTIZED, 96, 1_000_000, 4_096),
    ],
)
def test_random_and_cut_weights_take_more_steps_where_muon_is_cheap(
    start: Start, hidden: int, tokens: int, tokens_per_step: int
) -> None:
    run, flags = Run(start, TINY.with_changes(hidden_size=hidden)), ({}, {"optimizer": "muon"})
    assert {train_config(run, tokens, each).tokens_per_step for each in flags} == {tokens_per_step}
    assert train_config(run, 100_000, {"optimizer": "adamw"}).tokens_per_step <= 1_024


@pytest.mark.parametrize("start", Start)
@pytest.mark.parametrize("model", [TINY, LARGE])
def test_the_documented_set_up_is_one_flag_away(start: Start, model: ModelConfig) -> None:
    config = train_config(Run(start, model), None, {"documented": True})
    assert config == TrainConfig()
    assert (config.steps, config.batch_size, config.accumulation, config.sequence) == (5_000, 4, 4, 512)
    assert (config.learning_rate, config.warmup, config.optimizer, config.schedule) == (3e-4, 50, "adamw", "cosine")
    assert (config.weight_decay, config.clip_norm, DOCUMENTED_DROPOUT) == (0.1, 1.0, 0.1)
    assert train_config(Run(start, model), 100_000, {"sequence": 256, "documented": True}).steps == 25


def test_everything_can_be_overridden() -> None:
    flags = {"batch_size": 3, "accumulation": 2, "sequence": 128, "learning_rate": 0.5, "optimizer": None}
    pairs = ["warmup=7", "min_lr_ratio=0", "schedule=wsd", "decay_fraction=0.5", "validate_every=2"]
    config = train_config(SMALL, 10_000, flags | parse_settings(pairs, TRAINING))
    assert (config.batch_size, config.accumulation, config.sequence) == (3, 2, 128)
    assert (config.learning_rate, config.warmup, config.min_lr_ratio, config.decay_fraction) == (0.5, 7, 0.0, 0.5)
    assert config.validate_every == 2 and config.steps == -(-10_000 // (3 * 2 * 128))
    assert train_config(Run(Start.PRUNED, LARGE), 10_000, {"sequence": 2_048}).tokens_per_step == 2_048
    assert train_config(Run(Start.RANDOM, TINY), 8_000_000, {"batch_size": 1}).accumulation == 16
    assert train_config(SMALL, 8_000_000, {"accumulation": 1}).batch_size == 4
    with pytest.raises(UsageError, match="give --steps or --tokens"):
        train_config(SMALL, 1_000, {"steps": 5})


def test_rates_follow_from_start_and_size() -> None:
    starts = [peak_rates(Run(start, TINY)) for start in Start]
    assert starts[0] == (max(rate for rate, _ in starts), max(rate for _, rate in starts))
    assert starts[-1] == (min(rate for rate, _ in starts), min(rate for _, rate in starts))
    small, large = (peak_rates(Run(Start.RANDOM, model)) for model in (TINY, LARGE))
    assert small == pytest.approx(((LARGE.parameters / TINY.parameters) ** 0.5 * large[0], large[1]), rel=0.05)
    assert peak_rates(Run(Start.TRAINED, TINY, adapters=True))[0] == pytest.approx(10 * starts[2][0], rel=0.05)
    cut = {name: train_config(SMALL, 300_000, {"optimizer": name}).learning_rate for name in ("adamw", "muon")}
    assert cut["adamw"] == pytest.approx(3 * cut["muon"], rel=0.05)  # beside Muon it is for embedding and norms
    for start, (alone, _) in zip((Start.RANDOM, Start.BARELY_TRAINED), starts, strict=False):
        new = [train_config(Run(start, TINY), None, {"steps": steps}).learning_rate for steps in (1, 200, 500, 1_000)]
        assert new == pytest.approx([ratio * 10 / 3 * alone for ratio in (5, 5, 2, 1)], rel=0.05)
        by_itself = [peak_rates(Run(start, TINY, already_trained=True), steps=n)[0] for n in (1, 50, 100, 200)]
        assert by_itself == pytest.approx([ratio * alone for ratio in (5, 4, 2, 1)], rel=0.05)
    already_trained = Run(Start.PRUNED, TINY, already_trained=True)
    assert train_config(already_trained, 300_000, {"optimizer": "adamw"}).learning_rate == cut["muon"]


def test_muon_where_it_pays() -> None:
    def at(start: Start, width: int) -> Run:
        return Run(start, LARGE.with_changes(hidden_size=width))

    pruned = Run(Start.PRUNED, LARGE)
    cheap = SMALL, at(Start.RANDOM, 768), at(Start.BARELY_TRAINED, 768)
    dear = at(Start.RANDOM, 832), at(Start.BARELY_TRAINED, 832), Run(Start.TRAINED, TINY, adapters=True)
    for runs, optimizer in ((cheap, "muon"), ((pruned, Run(Start.QUANTIZED, TINY), *dear), "adamw")):
        assert {train_config(run, 100_000, {}).optimizer for run in runs} == {optimizer}
    assert train_config(pruned, None, {}).optimizer == "muon"  # 8,192 tokens a step instead of 1,024


def test_a_warm_up_that_does_not_end_and_a_rate_of_one_optimizer_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    train_config(SMALL, 300_000, {"learning_rate": 1e-3, "warmup": 10_000})
    shown = capsys.readouterr().err.replace("\n", " ")
    assert "the run ends during warm-up" in shown and "Muon's is 0.005" in shown
    train_config(SMALL, 300_000, {"learning_rate": 1e-3, "muon_learning_rate": 0.01})
    assert "Muon's is" not in capsys.readouterr().err


def test_runs_are_validated_on_the_way_good_starts_more_often(capsys: pytest.CaptureFixture[str]) -> None:
    for start in Start:
        config = train_config(
            Run(start, TINY.with_changes(max_position_embeddings=256)), 300_000, {"optimizer": "muon"}
        )
        assert config.sequence == 256
        assert config.validate_every == -(-config.steps // (2 if start in (Start.RANDOM, Start.PRUNED) else 4))
        assert config.weight_decay == (0.0 if start in (Start.PRUNED, Start.QUANTIZED) else 0.1)
        assert config.muon_momentum == dict(zip(Start, (0.9, 0.9, 0.95, 0.93, 0.95), strict=True))[start]
        line = capsys.readouterr().err.replace("\n", " ")
        assert f"training from {start.value}" in line and f"Muon {config.muon_learning_rate:g}" in line


def test_a_precision_that_the_processor_emulates_is_said_and_timed_by_a_small_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, ones = list[int](), torch.ones

    def small(rows: int, *_: int, **kind: Any) -> torch.Tensor:
        sizes.append(rows)
        return ones(8, 8, **kind)

    monkeypatch.setattr(torch, "ones", small)
    for flags, said, size in (("avx2", 1, 256), ("avx512_fp16", 0, 1_024)):
        monkeypatch.setattr(optimizers, "cpuinfo", lambda *_, flags=flags: flags)
        log_once.cache_clear()
        for _ in range(2):
            log_cost(preset("small"), TrainConfig(steps=10**6, precision="fp16"))
        assert capsys.readouterr().err.count("no fp16 products") == said and sizes[-1] == size
        log_cost(preset("small"), TrainConfig(steps=10**6, precision="fp32"))
        assert sizes[-1] == 1_024 and "products" not in capsys.readouterr().err
