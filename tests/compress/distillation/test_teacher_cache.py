import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.distillation import make_teacher_cache, teacher_cache
from compress.distillation.loss import DistillationConfig, distillation_loss
from compress.distillation.student import StudentTraining
from compress.distillation.teacher_cache import (
    DRAWS,
    TOP,
    CachedBatches,
    SparseTargets,
    TeacherCache,
    sample_sparse,
    shard_name,
    sparse_chunk,
    targets_of,
)
from sportsllm.errors import ArtifactError, InterruptedRun, UsageError
from sportsllm.files import read_json, write_json
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.manifest import verify_directory
from sportsllm.text.documents import Reading
from sportsllm.text.packing import IGNORE, PackedSequences
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from sportsllm.text.tokens import TokenizedDocuments, tokenize
from sportsllm.training.settings import TrainConfig
from tests.support.models import TINY_VOCAB, saved, tiny_config, tiny_model

SAMPLES, VOCAB, SEQUENCE = 16_384, 50, 32
HALF = 2.0**-11  # the largest relative error of a float16


def skewed(seed: int, spread: float = 2.0, vocabulary: int = VOCAB) -> Tensor:
    return torch.softmax(spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)), -1)


def stored(rows_NV: Tensor) -> tuple[SparseTargets, Tensor]:
    """The targets of some distributions, and these as a dense (N, V) float64 matrix."""
    targets = targets_of(sample_sparse(rows_NV.clone(), np.random.default_rng(0)), torch.device("cpu"))
    t_NV = torch.zeros(rows_NV.shape, dtype=torch.float64)
    return targets, t_NV.scatter_add_(1, targets.ids_NK, targets.weights_NK.double())


def uncertainty(p_V: Tensor) -> Tensor:
    """How far a mean over SAMPLES targets may be from p: Bernstein's inequality, passed by chance once in 1e7 ids.

    Of an id that is drawn n times, n is one of two neighbours of its mean p / w, so the variance of n w is at most w p.
    """
    weight, log = float(p_V.sort().values[:-TOP].sum()) / DRAWS, math.log(2e7)
    return (2 * weight * p_V * log / SAMPLES).sqrt() + weight * log / (3 * SAMPLES) + HALF * p_V


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_the_mean_target_is_the_distribution(spread: float) -> None:
    p = skewed(1, spread)
    _, t_NV = stored(p.expand(SAMPLES, -1))
    assert ((t_NV.mean(0) - p).abs() <= uncertainty(p)).all()
    assert torch.allclose(t_NV.sum(-1), torch.ones(SAMPLES).double(), atol=TOP * HALF)
    top = p.topk(TOP).indices
    assert ((t_NV[:, top] / p[top] - 1).abs() <= HALF).all(), "the largest probabilities are kept"


def test_the_squared_error_is_what_theory_says() -> None:
    p = skewed(3, 1.0)
    _, t_NV = stored(p.expand(SAMPLES, -1))
    tail = p.double().sort().values[:-TOP]
    weight = float(tail.sum()) / DRAWS
    fraction = tail / weight % 1  # an id is drawn floor(p / w) times, and once more with this probability
    expected = float((weight**2 * fraction * (1 - fraction)).sum())
    # 16,384 draws leave the mean of such squares about 1% uncertain.
    assert float(((t_NV - p) ** 2).sum(-1).mean()) == pytest.approx(expected, rel=0.03)


def test_a_small_vocabulary_is_stored_whole() -> None:
    p = skewed(4, 1.0, TOP - 2)
    _, t_NV = stored(p.expand(100, -1))
    assert ((t_NV / p - 1).abs() <= TOP * HALF).all()


@pytest.mark.parametrize("kl_weight", [1.0, 0.9, 0.0])
def test_loss_and_gradient_equal_the_naive_ones(kl_weight: float) -> None:
    count = 9
    targets, t_NV = stored(torch.stack([skewed(seed) for seed in range(count)]))
    scored = torch.arange(count) != 4
    truth = torch.where(scored, torch.arange(count) * 5, IGNORE)
    logits = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2))
    exact = logits.double().requires_grad_()
    divergences = (t_NV * -torch.log_softmax(exact, -1)).sum(-1) - targets.entropy_N
    plain = torch.nn.functional.cross_entropy(exact, truth, reduction="sum", ignore_index=IGNORE)
    expected = kl_weight * divergences[scored].sum() + (1 - kl_weight) * plain
    expected.backward()
    assert exact.grad is not None
    chunk_loss = sparse_chunk(targets, truth, kl_weight)
    results = [chunk_loss(start, logits[start : start + 5].clone()) for start in (0, 5)]
    # float32 sums over 50 ids against float64 ones
    assert float(results[0][0] + results[1][0]) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(torch.cat([g for _, g in results]).double(), exact.grad, rtol=1e-5, atol=1e-6)


# ---- directories ----


def opened(checkpoint: Path, corpus: Path, signals: Path, /, **changes: Any) -> TeacherCache:
    """A training's signals, which are made unless they are there; `changes` are of the training."""
    vocabulary = changes.pop("vocab_size", TINY_VOCAB)
    batch_size = changes.pop("batch_size", 5)
    config = TrainConfig(
        steps=10 // batch_size, accumulation=1, batch_size=batch_size, sequence=changes.pop("sequence", SEQUENCE),
        seed=changes.pop("seed", 3), precision="fp32", warmup=0,
    )  # fmt: skip
    objective = DistillationConfig(signals=signals, teacher_precision=changes.pop("teacher_precision", "fp32"))
    training = dataclasses.replace(StudentTraining(checkpoint, config, (corpus,), distillation=objective), **changes)
    cache = training.prepare(tiny_config(vocab_size=vocabulary))
    assert cache is not None
    return cache


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "ROWS_PER_SHARD", 4)


@pytest.fixture(scope="module")
def made(checkpoint: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows in three shards; read, never changed."""
    out = tmp_path_factory.mktemp("made") / "signals"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_cache, "ROWS_PER_SHARD", 4)
        opened(checkpoint, corpus_file, out)
    return out


@pytest.fixture(scope="module")
def documents(checkpoint: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizedDocuments:
    cache = tmp_path_factory.mktemp("tokens")
    return tokenize(load_corpus([corpus_file], []).train, load_tokenizer(checkpoint), cache)


def test_a_finished_directory(made: Path) -> None:
    info = read_json(made / "signals.json")
    assert info["rows"] == 10 and info["seed"] == 3
    assert verify_directory(made)[1] == []
    assert [path.name for path in sorted(made.glob("*.safetensors"))] == [shard_name(number) for number in range(3)]
    results = read_json(made / "manifest.json")["results"]
    per_token = 2 * (TOP + DRAWS) + 2 * TOP + 2
    assert per_token == 66 and per_token < results["bytes_per_token"] < per_token + 4, "headers of three shards beside"


def test_batches_are_the_packed_rows_over_and_over(documents: TokenizedDocuments) -> None:
    plain = PackedSequences(documents, SEQUENCE, 5, seed=3)
    batches = CachedBatches(documents, SEQUENCE, 5, 3, rows=10)
    for index in range(4):
        (found,), expected = batches.step(index, 1), plain.batch(index % 2)
        assert found.tokens.equal(expected.tokens) and found.targets.equal(expected.targets)
        assert found.documents == expected.documents and found.index == index
    assert batches.tokens_per_epoch == 10 * SEQUENCE
    wrapped = CachedBatches(documents, SEQUENCE, 4, 3, rows=10).batch(2)
    assert wrapped.tokens.equal(torch.cat([plain.batch(1).tokens[3:], plain.batch(0).tokens[:2]]))


def test_targets_do_not_depend_on_the_batch_size(
    made: Path, checkpoint: Path, corpus_file: Path, documents: TokenizedDocuments, tmp_path: Path
) -> None:
    signals = opened(checkpoint, corpus_file, made)
    whole, half = (signals.batches(documents, size) for size in (10, 5))
    full, parts = signals.targets(whole.batch(0)), [signals.targets(half.batch(index)) for index in (0, 3)]
    for name in ("ids_NK", "weights_NK", "entropy_N"):
        assert getattr(full, name).equal(torch.cat([getattr(part, name) for part in parts])), name
    with torch.autocast("cpu", torch.bfloat16):  # as in training
        assert signals.targets(whole.batch(0)).weights_NK.equal(full.weights_NK)
    one = opened(checkpoint, corpus_file, tmp_path / "one", batch_size=1).targets(whole.batch(0))
    # Products of other shapes may round otherwise, which moves a draw by a place once in about a million.
    assert float((one.ids_NK == full.ids_NK).float().mean()) > 0.995


def test_stored_signals_give_nearly_the_exact_loss(
    checkpoint: Path, corpus_file: Path, documents: TokenizedDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_teacher_cache, "_AT_ONCE", 13)
    cache = opened(checkpoint, corpus_file, tmp_path / "signals")
    batch = cache.batches(documents, 10).batch(0)
    teacher, student = load_checkpoint(checkpoint), tiny_model(seed=5, num_hidden_layers=1)
    config = DistillationConfig()
    exact, found = (
        float(loss(student, batch).detach())
        for loss in (distillation_loss(config, teacher), distillation_loss(config, None, cache=cache))
    )
    with torch.no_grad():
        p_NV = torch.softmax(teacher(batch.tokens, documents=batch.documents).flatten(0, 1), -1)
        log_s = torch.log_softmax(student(batch.tokens, documents=batch.documents).flatten(0, 1), -1)
    torch.testing.assert_close(cache.targets(batch).entropy_N, torch.special.entr(p_NV).sum(-1), rtol=2 * HALF, atol=0)
    tail_NV = p_NV.sort(dim=-1).values[:, :-TOP]
    # A token's loss is uncertain by at most sqrt(sum w p (log s)^2), if draws were independent; here they repel.
    variance = (tail_NV.sum(-1) / DRAWS * (p_NV * log_s.square()).sum(-1)).sum()
    assert abs(found - exact) < 5 * float(variance) ** 0.5


def interrupt(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Ctrl-C after a number of rows."""
    left = [rows]

    def counted(*arguments: Any) -> dict[str, Tensor]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return sample_sparse(*arguments)

    monkeypatch.setattr(make_teacher_cache, "sample_sparse", counted)


def test_an_interrupted_run_goes_on_byte_for_byte(
    made: Path, checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    interrupt(monkeypatch, rows=2)
    with pytest.raises(KeyboardInterrupt):
        opened(checkpoint, corpus_file, out)
    assert [path.name for path in tmp_path.iterdir()] == ["token_cache"], "interrupted at once, it leaves tokens only"
    interrupt(monkeypatch, rows=6)
    with pytest.raises(InterruptedRun, match="after row 4 of 10"):
        opened(checkpoint, corpus_file, out)
    (partial / "signals-00001.safetensors.part").write_bytes(b"half a shard of a killed run")
    with pytest.raises(UsageError, match="other settings"):
        opened(checkpoint, corpus_file, out, teacher_precision="bf16")
    interrupt(monkeypatch, rows=4)
    with pytest.raises(InterruptedRun, match="after row 8 of 10"):
        opened(checkpoint, corpus_file, out)
    (partial / shard_name(0)).write_bytes(b"damaged")
    interrupt(monkeypatch, rows=6)
    opened(checkpoint, corpus_file, out)
    names = ["signals.json", *(shard_name(number) for number in range(3))]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "manifest.json"])
    for name in names:
        assert (out / name).read_bytes() == (made / name).read_bytes(), name


def test_signals_of_another_run_are_refused(
    made: Path, checkpoint: Path, corpus_file: Path, texts: list[str], tmp_path: Path
) -> None:
    other, words = saved(tmp_path / "other", tiny_model(seed=9), checkpoint), tmp_path / "words"
    train_tokenizer(texts[:20], TINY_VOCAB, saved(words, tiny_model(seed=9)))
    text = tmp_path / "more.jsonl"
    text.write_text('{"text": "Extra time"}\n', encoding="utf-8")
    write_json(other / "manifest.json", {"format": 1, "files": {}, "settings": {"valid": [str(text)]}})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"teacher": other}, "by another teacher"),
        ({"teacher": words}, "with another tokenizer"),
        ({"corpus": (corpus_file, text)}, "with another --corpus"),
        ({"valid": (text,)}, "with another --valid"),
        ({"extra_holdouts": (other,)}, "while other text was held out than"),
        ({"sequence": 16}, "with --sequence 32, not 16"),
        ({"teacher_precision": "bf16"}, "by a teacher in fp32, not bf16"),
        ({"seed": 4}, "with --seed 3, not 4"),
        ({"reading": Reading(parse_special=True)}, "from text read with"),
        ({"vocab_size": 400}, "for 384 tokens, not 400"),
    ]
    for changes, message in cases:
        with pytest.raises(ArtifactError, match=message):
            opened(checkpoint, corpus_file, made, **changes)


def test_damaged_directories_are_refused(made: Path, checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(made, tmp_path / "copied"))
    info, shard = read_json(copied / "signals.json"), copied / shard_name(1)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"signals-00001\.safetensors: missing, or content differs"):
            opened(checkpoint, corpus_file, copied)
        shard.unlink(missing_ok=True)
    for change, message in (({"format": 1}, "has format 1"), ({"rows": 1}, "differs"), ({"rows": "x"}, "rows")):
        write_json(copied / "signals.json", info | change)
        with pytest.raises(ArtifactError, match=message):
            opened(checkpoint, corpus_file, copied)
