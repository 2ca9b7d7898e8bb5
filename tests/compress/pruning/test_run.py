"""Pruning from a checkpoint directory to a new one: what is written, recovered, searched, refused."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compress.cli.prune import prune
from compress.distillation.recovery import Recovery
from compress.pruning.output_selection import output_scores
from compress.pruning.plan import PruneTarget, prune_run
from compress.pruning.run import PruneConfig, PruneJob
from compress.pruning.scores import Scores, load_scores
from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.training.settings import TrainConfig
from tests.support import gelu_kind
from tests.support.models import tiny_config, tiny_model

BRIEF = TrainConfig(steps=4, batch_size=2, accumulation=1, sequence=64, learning_rate=1e-3, warmup=1)
LONGER = TrainConfig(steps=15, batch_size=4, accumulation=1, sequence=64, learning_rate=3e-3, warmup=2)
SMALLER = PruneTarget(dimensions={"intermediate": 64, "layers": 1})


@pytest.fixture
def job(checkpoint: Path, corpus_file: Path) -> PruneJob:
    """The tiny checkpoint, calibrated on four pieces of text."""
    return PruneJob(checkpoint, [corpus_file], PruneConfig(samples=4))


@pytest.fixture
def gelu() -> Iterator[str]:
    """A feed-forward of two matrices with biases."""
    with gelu_kind.registered() as name:
        yield name


def test_the_result_is_an_ordinary_checkpoint(job: PruneJob, tmp_path: Path) -> None:
    result = prune_run(job, SMALLER, tmp_path / "out")
    ours = load_checkpoint(tmp_path / "out")
    assert result["parameters"] == ours.config.parameters
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(0, 384, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=5e-5)


def test_recovery_brings_quality_back(job: PruneJob, corpus_file: Path, tmp_path: Path) -> None:
    result = prune_run(replace(job, recovery=Recovery(LONGER, (corpus_file,))), SMALLER, tmp_path / "out")
    assert result["valid_bits_per_byte"] < result["bits_per_byte_before_recovery"]


def test_another_kind_of_feed_forward_is_pruned_in_every_way(
    gelu: str, tokenizer_directory: Path, corpus_file: Path, tmp_path: Path
) -> None:
    """Neurons, hidden channels, heads and layers; refitted, recovered and written."""
    (tmp_path / "full").mkdir()
    save_checkpoint(tmp_path / "full", tiny_model(mlp_kind=gelu), tokenizer_directory)
    recovery = Recovery(LONGER, (corpus_file,))
    job = PruneJob(tmp_path / "full", [corpus_file], PruneConfig(samples=4), recovery=recovery)
    target = PruneTarget(dimensions={"hidden": 48, "intermediate": 64, "heads": 2, "kv_heads": 1, "layers": 1})
    result = prune_run(job, target, tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")
    mlp = made.model.layers[0].mlp
    assert (made.config.mlp_kind, mlp.up_proj.weight.shape, mlp.up_proj.bias.shape) == (gelu, (64, 48), (64,))
    assert result["valid_bits_per_byte"] < result["bits_per_byte_before_recovery"]


def test_quantized_input_and_empty_calibration_are_refused(job: PruneJob, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no calibration text"):
        prune_run(replace(job, calibration=[tmp_path / "empty.txt"]), SMALLER, tmp_path / "out")
    source = shutil.copytree(job.checkpoint, tmp_path / "quantized")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "sportsllm-nbits"}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is quantized; prune the unquantized"):
        prune_run(replace(job, checkpoint=source), SMALLER, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cut_of_nothing_is_refused(job: PruneJob, tmp_path: Path) -> None:
    for target in (PruneTarget(dimensions={"layers": 2}), PruneTarget(1.0)):
        with pytest.raises(UsageError, match=r"nothing is cut, the model has that shape \(hidden 64, "):
            prune_run(job, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_size_is_met(job: PruneJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = load_config(job.checkpoint)
    assert full.has_large_vocabulary
    megabytes = (full.parameters - 0.3 * full.block_parameters) * 4 / 1e6
    result = prune_run(job, PruneTarget(megabytes=megabytes), tmp_path / "out")
    weights = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0.6 * megabytes * 1e6 < weights - 8_000 < megabytes * 1e6  # 8 KB: names and offsets
    assert result["share_of_block_parameters"] <= 0.7
    share = 1 - full.block_parameters / full.parameters
    assert f"embedding and head are {share:.0%} of the parameters and stay whole" in capsys.readouterr().err


def test_key_value_heads_are_merged_where_all_query_heads_stay(job: PruneJob, tmp_path: Path) -> None:
    result = prune_run(job, PruneTarget(dimensions={"kv_heads": 1}), tmp_path / "out")
    assert result["shape"] == {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 1, "layers": 2, "head_dim": 16}
    assert load_config(tmp_path / "out").num_key_value_heads == 1
    prune_run(job, PruneTarget(dimensions={"kv_heads": 1, "head_dim": 8, "hidden": 32}), tmp_path / "smaller")
    assert load_checkpoint(tmp_path / "smaller").model.layers[0].self_attn.k_proj.weight.shape == (8, 32)


def test_saved_scores_give_the_same_cut_without_measuring(job: PruneJob, corpus_file: Path, tmp_path: Path) -> None:
    target = PruneTarget(dimensions={"intermediate": 32})
    prune_run(job, target, tmp_path / "a")
    prune_run(replace(job, scores=tmp_path / "a"), target, tmp_path / "b")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    with pytest.raises(ArtifactError, match="another shape"):
        load_scores(tmp_path / "a", tiny_config(intermediate_size=64))
    with pytest.raises(ArtifactError, match="no importance scores"):
        load_scores(corpus_file, tiny_config())


def test_a_search_leaves_finished_stages_behind(
    job: PruneJob,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = replace(job, recovery=Recovery(BRIEF, (corpus_file,)))
    target = PruneTarget(0.51, search_tokens=128, finalists=2)
    result = prune_run(job, target, tmp_path / "out")
    tried = result["search"]
    assert isinstance(tried, list) and len(tried) == 2
    assert tried[0]["bits_per_byte"] <= tried[1]["bits_per_byte"] and tried[0]["shape"] == result["shape"]
    assert len({(row["shape"]["hidden"], row["shape"]["layers"]) for row in tried}) == 2
    assert set(tried[0]) == {"shape", "loss_after_cut", "loss_after_repair", "bits_per_byte"}
    assert len([path for path in (tmp_path / "out.search").iterdir() if path.is_dir()]) == 2
    (tmp_path / "out").rename(tmp_path / "first")
    monkeypatch.setattr("compress.pruning.search.find_finalists", None)  # what was found is not sought again
    assert prune_run(job, target, tmp_path / "out")["search"] == tried
    assert "the shape was found there before" in capsys.readouterr().err
    assert prune_run(job, target, tmp_path / "out")["cached"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "out")]
    assert weights[0] == weights[1]
    more = PruneTarget(0.8, search_tokens=128, finalists=2)
    for other, wanted in ((replace(job, config=PruneConfig(samples=3)), target), (job, more)):
        with pytest.raises(ConflictError, match="with other settings or inputs"):
            prune_run(other, wanted, tmp_path / "out")


def test_a_search_measures_once_what_a_plain_cut_measures(
    job: PruneJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def scores(*arguments: Any) -> Scores:
        measured.append(1)
        return output_scores(*arguments)

    monkeypatch.setattr("compress.pruning.run.output_scores", scores)
    found = prune_run(job, PruneTarget(0.51), tmp_path / "found")
    assert len(measured) == 1
    prune_run(job, PruneTarget(dimensions=found["shape"]), tmp_path / "plain")
    for name in ("model.safetensors", "importance.safetensors"):
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_targets_that_do_not_go_together(job: PruneJob, tmp_path: Path) -> None:
    for target, message in (
        (PruneTarget(0.5, search_tokens=10), "--search needs"),
        (PruneTarget(0.5, 1.0), "not both"),
    ):
        with pytest.raises(UsageError, match=message):
            prune_run(job, target, tmp_path / "out")
    with pytest.raises(UsageError, match="--importance"):
        PruneConfig(importance="luck")
    with pytest.raises(ArtifactError, match="--samples asks for 9000"):
        prune_run(replace(job, config=PruneConfig(samples=9_000)), PruneTarget(0.5), tmp_path / "out")


def test_the_manifest_names_settings_as_flags(job: PruneJob, tmp_path: Path) -> None:
    command = {"checkpoint": job.checkpoint, "calibration": job.calibration, "intermediate": 32, "samples": 4}
    prune(**command, out=tmp_path / "out", repair=False, importance="magnitude")
    settings = read_manifest(tmp_path / "out").settings
    wanted = {"intermediate": 32, "importance": "magnitude", "repair": False, "kv_merge": "pca", "samples": 4}
    assert wanted.items() <= settings.items()
    with pytest.raises(UsageError, match="--kv-merge mean was dropped, since pca keeps more; leave --kv-merge out"):
        prune(**command, out=tmp_path / "other", kv_merge="mean")
