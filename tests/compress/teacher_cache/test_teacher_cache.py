import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from compress.distillation.settings import DistillationConfig
from compress.distillation.student_loss import distillation_loss
from compress.distillation.teacher import running_teacher
from compress.teacher_cache import write
from compress.teacher_cache.batches import CachedBatches
from compress.teacher_cache.files import shard_name
from compress.teacher_cache.loss import SparseTargets, sparse_chunk
from compress.teacher_cache.read import CacheKey, TeacherCache, open_teacher_cache
from compress.teacher_cache.sparse import CODES, BitBudget, SparseProbabilities, encode, sample_sparse, threshold
from compress.teacher_cache.write import CacheRequest, bit_budget, make_teacher_cache
from sportsllm.errors import ArtifactError, ConflictError, InterruptedRun, UsageError
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.manifest import verify_directory
from sportsllm.text.documents import load_corpus
from sportsllm.text.packing import IGNORE, PackedSequences, TokenizedDocuments, tokenize
from sportsllm.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.models import TINY_VOCAB, tiny_model

DRAWS, VOCAB, SEQUENCE = 16_384, 50, 32
BUDGET = BitBudget(bits=110, id_bits=6)  # 7 coded ids beside a code for the tail
STEP = float(CODES[2] / CODES[1]) - 1  # between two codes: 4.5%


def skewed(seed: int, spread: float = 2.0, vocabulary: int = VOCAB) -> Tensor:
    return torch.softmax(spread * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)), -1)


def drawn(p_V: Tensor, budget: BitBudget = BUDGET) -> tuple[SparseProbabilities, Tensor]:
    """The same distribution stored DRAWS times, and its targets as a dense (DRAWS, V) float64 matrix."""
    everywhere = torch.ones(DRAWS, dtype=torch.bool)
    sparse = sample_sparse(p_V.expand(DRAWS, -1).clone(), everywhere, budget, np.random.default_rng(0))
    return sparse, dense(sparse, len(p_V))


def uncertainty(p_V: Tensor, t_NV: Tensor) -> Tensor:
    """How far a mean over DRAWS targets may be from p: Bernstein's inequality, passed by chance once in 1e7 ids.

    An id's target is w with probability p / w, so its variance is at most w p; w is at most twice the smallest weight
    seen, since m / floor(m / tau) < 2 tau. A code is off by less than its step.
    """
    weight, log = 2 * float(t_NV[t_NV > 0].min()), math.log(2e7)
    variance = weight * p_V + (STEP * p_V) ** 2
    return (2 * variance * log / DRAWS).sqrt() + (weight + STEP * p_V) * log / (3 * DRAWS)


def dense(sparse: SparseProbabilities, vocabulary: int) -> Tensor:
    t_NV = torch.zeros(len(sparse.id_counts), vocabulary, dtype=torch.float64)
    token_M = np.repeat(np.arange(len(t_NV)), sparse.id_counts)
    places = (torch.from_numpy(token_M), torch.from_numpy(sparse.ids))
    t_NV.index_put_(places, torch.from_numpy(sparse.weights()))
    return t_NV


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_the_mean_target_is_the_distribution(spread: float) -> None:
    p = skewed(1, spread)
    _, t_NV = drawn(p)
    assert ((t_NV.mean(0) - p).abs() <= uncertainty(p, t_NV)).all()


def test_ids_above_the_threshold_are_certain_and_others_as_likely_as_they_weigh() -> None:
    p = skewed(2)
    sparse, t_NV = drawn(p)
    tau = threshold(p.sort(descending=True).values[None, :28], BUDGET)
    heads = p >= tau
    mass = float(p[~heads].double().sum())
    count = math.floor(mass / tau)
    assert int(heads.sum()) > 2 and count > 2, "the case has both parts"
    assert (sparse.id_counts == int(heads.sum()) + count).all() and (sparse.code_counts == int(heads.sum()) + 1).all()
    assert (t_NV[:, heads] > 0).all()
    assert ((t_NV[:, heads] / p[heads] - 1).abs() <= STEP).all(), "a head keeps its own probability, to a code"
    inclusion = count * p[~heads].double() / mass
    assert float(inclusion.max()) <= 1
    found = (t_NV[:, ~heads] > 0).double().mean(0)
    assert ((found - inclusion).abs() <= 5 * (inclusion * (1 - inclusion) / DRAWS).sqrt() + 1e-6).all()
    assert ((t_NV[:, ~heads].sum(-1) / mass - 1).abs() <= STEP).all(), "drawn ids share the tail's mass, to a code"
    each = t_NV[:, ~heads].max(-1).values * count / t_NV[:, ~heads].sum(-1)
    assert each.allclose(torch.ones_like(each)), "equally, so that no id was drawn twice"
    assert (t_NV.sum(-1) - 1).abs().max() <= STEP


def test_threshold_is_the_smallest_that_fits() -> None:
    rows = torch.stack([skewed(seed, spread) for seed, spread in enumerate([0.5, 1.0, 2.0, 3.0, 4.0, 6.0])])
    tops = rows.sort(dim=-1, descending=True).values[:, :28]
    tau = threshold(tops, BUDGET)

    def bits(tau: float) -> int:
        total = 0
        for p in rows.double():
            heads, mass = int((p >= tau).sum()), float(p[p < tau].sum())
            ids = heads + (max(math.floor(mass / tau), 1) if mass > 2e-6 else 0)
            total += ids * BUDGET.id_bits + (heads + 1) * 8
        return total

    assert bits(tau) <= BUDGET.bits * len(rows) < bits(0.99 * tau)


def test_the_squared_error_is_what_theory_says() -> None:
    p = skewed(3)
    _, sampled = drawn(p)
    tau = threshold(p.sort(descending=True).values[None, :28], BUDGET)
    tail = p[p < tau].double()
    weight = float(tail.sum()) / math.floor(float(tail.sum()) / tau)
    expected = float((tail * weight - tail**2).sum())  # sum of w^2 pi (1 - pi) with w pi = p
    found = float(((sampled - p) ** 2).sum(-1).mean())
    # Codes add at most (step / 2)^2 of p^2; 16,384 draws leave the mean of such squares about 1% uncertain.
    assert found == pytest.approx(expected, rel=0.03, abs=float((STEP / 2 * p).pow(2).sum()))
    # As many draws with replacement have sum p (1 - p) / n of it (https://arxiv.org/abs/2503.16870).
    with_replacement = float((p * (1 - p)).sum()) / BUDGET.coded_ids
    assert found < 0.5 * with_replacement


def test_a_budget_for_all_ids_stores_them_all() -> None:
    p = skewed(4, 1.0)
    sparse, t_NV = drawn(p, BitBudget(bits=VOCAB * 14 + 8, id_bits=6))
    assert (sparse.id_counts == VOCAB).all()
    assert ((t_NV / p - 1).abs() <= STEP).all()
    assert ((t_NV.mean(0) / p - 1).abs() <= 5 * STEP / math.sqrt(12 * DRAWS) * 2).all()


@pytest.mark.parametrize("vocabulary", [384, 2_048, 70_000])
def test_the_budget_is_kept(vocabulary: int) -> None:
    length = 64
    rows = torch.stack([skewed(seed, 1.0 + seed % 5, vocabulary) for seed in range(length)])
    budget = bit_budget(vocabulary, length)
    assert budget.id_bits == {384: 9, 2_048: 11, 70_000: 17}[vocabulary]
    scored = torch.ones(length, dtype=torch.bool)
    scored[[0, 9]] = False
    sparse = sample_sparse(rows.clone(), scored, budget, np.random.default_rng(0))
    size = budget.id_bits / 8 * len(sparse.ids) + len(sparse.codes) + 2 * length
    assert 0.85 * 40 < size / length < 40
    assert (sparse.id_counts[[0, 9]] == 0).all() and (np.delete(sparse.id_counts, [0, 9]) > 0).all()


def test_codes_are_neighbours_and_right_on_average() -> None:
    values = np.array([0.0, 1e-6, 2.0**-16, 3e-4, 0.0371, 0.5, 0.9999, 1.0])
    codes = encode(np.tile(values, (20_000, 1)), np.random.default_rng(0))
    found = CODES[codes]
    assert (np.abs(found - values) <= np.maximum(STEP * values, 2.0**-16)).all()
    assert (found[:, [0, 2, 7]] == values[[0, 2, 7]]).all()
    np.testing.assert_array_less(np.abs(found.mean(0) - values), 5 * found.std(0) / math.sqrt(20_000) + 1e-9)


def targets_of(rows: Tensor, scored: Tensor, entropy: Tensor) -> tuple[SparseTargets, Tensor]:
    """Stored targets of some distributions; and their dense weights, float64."""
    sparse = sample_sparse(rows.clone(), scored, BUDGET, np.random.default_rng(5))
    targets = SparseTargets(
        np.concatenate([[0], np.cumsum(sparse.id_counts)]),
        torch.from_numpy(sparse.ids),
        torch.from_numpy(sparse.weights()).float(),
        entropy.float(),
    )
    return targets, dense(sparse, rows.shape[1])


@pytest.mark.parametrize(("kl_weight", "temperature"), [(1.0, 1.0), (0.9, 1.0), (1.0, 2.0), (0.7, 2.0), (0.0, 1.0)])
def test_loss_and_gradient_equal_the_naive_ones(kl_weight: float, temperature: float) -> None:
    count = 9
    rows = torch.stack([skewed(seed) for seed in range(count)])
    scored = torch.arange(count) != 4
    entropy = torch.rand(count, generator=torch.Generator().manual_seed(1)).double() * scored
    targets, t_NV = targets_of(rows, scored, entropy)
    truth = torch.where(scored, torch.arange(count) * 5, IGNORE)
    logits = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2))
    exact = logits.double().requires_grad_()
    log_s = torch.log_softmax(exact / temperature, -1)
    divergence = temperature**2 * ((t_NV * -log_s).sum() - entropy.sum())
    plain = torch.nn.functional.cross_entropy(exact, truth, reduction="sum", ignore_index=IGNORE)
    expected = kl_weight * divergence + (1 - kl_weight) * plain
    expected.backward()
    assert exact.grad is not None
    chunk_loss = sparse_chunk(targets, truth, kl_weight, temperature)
    results = [chunk_loss(start, logits[start : start + 5].clone()) for start in (0, 5)]
    # float32 sums over 50 ids against float64 ones
    assert float(results[0][0] + results[1][0]) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(torch.cat([g for _, g in results]).double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert not results[0][1][4].any()


# ---- directories ----


def make(checkpoint: Path, corpus: Path, out: Path, resume: bool = False, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "teacher": checkpoint,
        "corpus": (corpus,),
        "valid": (),
        "left_out": (),
        "tokens": 10 * SEQUENCE - 1,
        "sequence": SEQUENCE,
        "seed": 3,
        "teacher_precision": "fp32",
    }
    request = CacheRequest(**{**settings, **changes})
    return make_teacher_cache(request, out, lambda: running_teacher(checkpoint, "fp32"), resume)


def reopen(directory: Path, checkpoint: Path, text: Path, **changes: Any) -> TeacherCache:
    key = CacheKey(checkpoint, (text,), (), (), SEQUENCE, 3, TINY_VOCAB)
    return open_teacher_cache(directory, dataclasses.replace(key, **changes))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "ROWS_PER_SHARD", 4)


@pytest.fixture(scope="module")
def made(checkpoint: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows in three shards; read, never changed."""
    out = tmp_path_factory.mktemp("made") / "signals"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "ROWS_PER_SHARD", 4)
        make(checkpoint, corpus_file, out)
    return out


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


@pytest.fixture(scope="module")
def documents(checkpoint: Path, corpus_file: Path) -> TokenizedDocuments:
    return tokenize(load_corpus([corpus_file], []).train, load_tokenizer(checkpoint))


def test_a_finished_directory(made: Path, checkpoint: Path, corpus_file: Path) -> None:
    info = json.loads((made / "signals.json").read_text())
    assert info["format"] == 4 and info["rows"] == 10 and info["seed"] == 3
    assert verify_directory(made)[1] == []
    assert [path.name for path in sorted(made.glob("*.safetensors"))] == [shard_name(number) for number in range(3)]
    arrays = [load_file(made / shard_name(number)) for number in range(3)]
    assert {array["ids"].dtype for array in arrays} == {np.dtype(np.uint16)}
    # Ids of a vocabulary of 384 count 9 bits of the 40 bytes and take 16.
    size = sum(part.nbytes for array in arrays for part in array.values())
    assert size <= 40 * 16 / 9 * 10 * SEQUENCE
    again = make(checkpoint, corpus_file, made)
    assert again["cached"] and again["tokens"] == 10 * SEQUENCE and again["bytes_per_token"] > 0


def test_batches_are_the_packed_rows_over_and_over(documents: TokenizedDocuments) -> None:
    plain = PackedSequences(documents, SEQUENCE, 5, seed=3)
    batches = CachedBatches(documents, SEQUENCE, 5, 3, rows=10)
    for index in range(4):
        found, expected = batches.batch(index), plain.batch(index % 2)
        assert found.tokens.equal(expected.tokens) and found.targets.equal(expected.targets)
        assert found.documents == expected.documents and found.index == index
    assert batches.tokens_per_epoch == 10 * SEQUENCE
    wrapped = CachedBatches(documents, SEQUENCE, 4, 3, rows=10).batch(2)
    assert wrapped.tokens.equal(torch.cat([plain.batch(1).tokens[3:], plain.batch(0).tokens[:2]]))


def test_targets_do_not_depend_on_the_batch_size(
    made: Path, checkpoint: Path, corpus_file: Path, documents: TokenizedDocuments, tmp_path: Path
) -> None:
    signals = reopen(made, checkpoint, corpus_file)
    whole, half = (signals.batches(documents, size) for size in (10, 5))
    full, parts = signals.targets(whole.batch(0)), [signals.targets(half.batch(index)) for index in (0, 3)]
    for name in ("ids_M", "weights_M", "entropy_N"):
        assert getattr(full, name).equal(torch.cat([getattr(part, name) for part in parts])), name
    make(checkpoint, corpus_file, tmp_path / "one", batch_size=1)
    one = reopen(tmp_path / "one", checkpoint, corpus_file).targets(whole.batch(0))
    # Products of other shapes may round otherwise, which moves a draw by a place once in about a million.
    assert (one.starts == full.starts).all() and float((one.ids_M == full.ids_M).float().mean()) > 0.995


def test_all_ids_give_the_full_distillation_loss(
    checkpoint: Path,
    corpus_file: Path,
    documents: TokenizedDocuments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write, "BYTES_PER_TOKEN", 3 * TINY_VOCAB)
    make(checkpoint, corpus_file, tmp_path / "all", temperature=1.5)
    cache = reopen(tmp_path / "all", checkpoint, corpus_file, temperature=1.5)
    batch = cache.batches(documents, 4).batch(0)
    teacher, student = load_checkpoint(checkpoint), tiny_model(seed=5, num_hidden_layers=1)
    config = DistillationConfig(temperature=1.5)
    gradients, losses = [], []
    for loss in (distillation_loss(config, teacher), distillation_loss(config, None, cache=cache)):
        student.zero_grad()
        value = loss(student, batch)
        value.backward()  # type: ignore[no-untyped-call]
        losses.append(float(value.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]))
    # Codes are 1.8% off at random, and over hundreds of ids of 128 tokens that averages out.
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.02


def test_the_expected_gradient_is_that_of_the_full_kl() -> None:
    """Means over thousands of draws, through the loss itself; the forward KL of `compress.distillation.divergences`
    is the oracle."""
    from compress.distillation.divergences import divergence_chunk

    p = skewed(6)
    rows = p.expand(DRAWS, -1)
    entropy = torch.full((DRAWS,), float(-(p * p.log()).sum()))
    everywhere = torch.ones(DRAWS, dtype=torch.bool)
    targets, t_NV = targets_of(rows, everywhere, entropy)
    logits = skewed(7).log().expand(DRAWS, -1)
    truth = torch.zeros(DRAWS, dtype=torch.int64)
    loss, gradient = sparse_chunk(targets, truth)(0, logits.clone())
    full_loss, full_gradient = divergence_chunk(
        "forward-kl", truth, lambda start, count: rows.log()[start : start + count]
    )(0, logits.clone())
    # What a token's targets add up to is 1 within a code, which scales the student's part of the gradient.
    error = uncertainty(p, t_NV) + 5 * STEP / math.sqrt(DRAWS) * logits[0].exp()
    assert ((gradient.mean(0) - full_gradient.mean(0)).abs() <= error).all()
    spread = float((t_NV * -logits.double()).sum(-1).std())
    assert abs(float(loss - full_loss)) / DRAWS <= 5 * spread / math.sqrt(DRAWS)


def interrupt(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Ctrl-C after a number of rows."""
    left = [rows]

    def counted(*arguments: Any) -> SparseProbabilities:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return sample_sparse(*arguments)

    monkeypatch.setattr(write, "sample_sparse", counted)


def test_an_interrupted_run_goes_on_byte_for_byte(
    made: Path, checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, rows=6)
    with pytest.raises(InterruptedRun, match="after row 4 of 10"):
        make(checkpoint, corpus_file, out)
    partial = tmp_path / "out.partial"
    (partial / "signals-00001.safetensors.part").write_bytes(b"half a shard of a killed run")
    with pytest.raises(ConflictError, match="add --resume"):
        make(checkpoint, corpus_file, out)
    with pytest.raises(UsageError, match="other settings"):
        make(checkpoint, corpus_file, out, temperature=2.0, resume=True)
    interrupt(monkeypatch, rows=4)
    with pytest.raises(InterruptedRun, match="after row 8 of 10"):
        make(checkpoint, corpus_file, out, resume=True)
    interrupt(monkeypatch, rows=2)
    make(checkpoint, corpus_file, out, resume=True)
    names = ["signals.json", *(shard_name(number) for number in range(3))]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "manifest.json"])
    for name in names:
        assert (out / name).read_bytes() == (made / name).read_bytes(), name


def test_a_run_interrupted_at_once_leaves_nothing(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, rows=2)
    with pytest.raises(KeyboardInterrupt):
        make(checkpoint, corpus_file, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_damaged_finished_shard_is_not_resumed(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, rows=6)
    with pytest.raises(InterruptedRun):
        make(checkpoint, corpus_file, tmp_path / "out")
    flip(tmp_path / "out.partial" / shard_name(0))
    with pytest.raises(ArtifactError, match="start again"):
        make(checkpoint, corpus_file, tmp_path / "out", resume=True)


def flip(path: Path) -> None:
    """One bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_signals_of_another_run_are_refused(
    made: Path, checkpoint: Path, corpus_file: Path, texts: list[str], tmp_path: Path
) -> None:
    other, words = tmp_path / "other", tmp_path / "words"
    for path in (other, words):
        path.mkdir()
    save_checkpoint(other, tiny_model(seed=9), checkpoint)
    train_tokenizer(texts[:20], TINY_VOCAB, words)
    save_checkpoint(words, tiny_model(seed=9), words)
    text = tmp_path / "more.jsonl"
    text.write_text('{"text": "Extra time"}\n', encoding="utf-8")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"teacher": other}, "by another teacher"),
        ({"teacher": words}, "with another tokenizer"),
        ({"corpus": (corpus_file, text)}, "with another --corpus"),
        ({"valid": (text,)}, "with another --valid"),
        ({"left_out": (text,)}, "while other text was held out than"),
        ({"sequence": 16}, "with --sequence 32, not 16"),
        ({"temperature": 2.0}, "with --temperature 1, not 2"),
        ({"precision": "bf16"}, "by a teacher in fp32, not bf16"),
        ({"seed": 4}, "with --seed 3, not 4"),
        ({"vocab_size": 400}, "for 384 tokens, not 400"),
    ]
    for changes, message in cases:
        with pytest.raises(ArtifactError, match=message):
            reopen(made, checkpoint, corpus_file, **changes)


def test_damaged_directories_are_refused(
    copied: Path, checkpoint: Path, corpus_file: Path, documents: TokenizedDocuments
) -> None:
    info = json.loads((copied / "signals.json").read_text())
    shard = copied / shard_name(1)
    flip(shard)
    cache = reopen(copied, checkpoint, corpus_file)
    batches = cache.batches(documents, 4)
    cache.chunk_loss(batches.batch(0))
    with pytest.raises(ArtifactError, match=r"signals-00001\.safetensors: content differs"):
        cache.chunk_loss(batches.batch(1))
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match=r"signals-00001\.safetensors: \d+ bytes, manifest\.json says"):
        reopen(copied, checkpoint, corpus_file)
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"signals-00001\.safetensors: missing"):
        reopen(copied, checkpoint, corpus_file)
    for change, message in (({"format": 1}, "has format 1"), ({"rows": 0}, "damaged"), ({"k2": 1}, "damaged")):
        (copied / "signals.json").write_text(json.dumps(info | change), encoding="utf-8")
        with pytest.raises(ArtifactError, match=message):
            reopen(copied, checkpoint, corpus_file)
    with pytest.raises(ArtifactError, match=r"holds no signals\.json"):
        reopen(checkpoint, checkpoint, corpus_file)


def test_settings_out_of_range(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens": 0}, "--tokens 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"temperature": 0.0}, "--temperature 0.0"),
        ({"sequence": 4_096}, "--sequence is 4096"),
    ]
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            make(checkpoint, corpus_file, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
