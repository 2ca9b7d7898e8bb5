"""A model beside its base: against sums in float64 over whole rows of logits, and as `eval --against` prints it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sportsllm.inference import divergence
from sportsllm.inference.divergence import compare_documents
from sportsllm.inference.scoring import LEAST_DOCUMENTS, score_documents, wilson_interval, windows
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import TINY_VOCAB, saved, tiny_model


def moved() -> SportsLLM:
    """The tiny model with every parameter moved a little."""
    model, generator = tiny_model(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def test_equals_a_brute_force_sum(tokenizer_directory: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Document by document and window by window, all logits of a window in float64; one document is empty."""
    monkeypatch.setattr(divergence, "_LOGITS_AT_ONCE", 5 * TINY_VOCAB)  # a window is compared in parts
    own, base, words = moved(), tiny_model(max_position_embeddings=200), load_tokenizer(tokenizer_directory)
    documents = [texts[0][:1_500], "", texts[1][:100], *(text[:40] for text in texts[2:16])]
    score, found = compare_documents(TorchDecoder(own), TorchDecoder(base), words, words, documents)
    kl, agree, nats, counts = [], [], np.zeros((2, len(documents))), []
    by_document = np.zeros((2, len(documents)))
    for number, text in enumerate(documents):
        ids = [words.begin_id, *words.encode(text)]
        counts.append(len(ids) - 1)
        for start, stop, first in windows(len(ids), 128):
            with torch.inference_mode():
                q, p = (model(torch.tensor([ids[start:stop]]))[0].double().log_softmax(-1) for model in (own, base))
            for place in range(first - start - 1, stop - start - 1):
                kl.append(float((p[place].exp() * (p[place] - q[place])).sum()))
                agree.append(int(p[place].argmax()) == int(q[place].argmax()))
                target = ids[start + place + 1]
                nats[:, number] -= float(q[place, target]), float(p[place, target])
                by_document[:, number] += kl[-1], agree[-1]
    tokens, whole = sum(counts), score_documents(TorchDecoder(own), words, documents)
    assert 128 < tokens == len(kl) == score.tokens == whole.tokens and score.bytes == whole.bytes
    # Float32 logits of either model round at 1e-6 of their size; a KL of 1e-2 has that to first order.
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert found.kl_error == pytest.approx(np.std(kl, ddof=1) / math.sqrt(tokens), rel=1e-4)
    assert (found.kl_p99, found.kl_max) == pytest.approx((np.percentile(kl, 99), max(kl)), rel=1e-4)
    assert found.top1_agreement == np.mean(agree) < 1
    assert score.documents == pytest.approx(nats[0], rel=1e-5)
    assert score.documents == pytest.approx(whole.documents, rel=1e-5)
    assert found.base_perplexity == pytest.approx(math.exp(nats[1].sum() / tokens), rel=1e-5)
    assert found.perplexity_ratio == pytest.approx(math.exp((nats[0] - nats[1]).sum() / tokens), rel=1e-5)
    assert compare_documents(TorchDecoder(own), TorchDecoder(base), words, words, ["a"])[1].kl_error is None
    assert found.perplexity_ratio_interval is not None and len(documents) > LEAST_DOCUMENTS
    draws = np.random.default_rng(1).integers(0, len(documents), (4_000, len(documents)))
    lost = (nats[0] - nats[1])[draws].sum(axis=1) / np.array(counts)[draws].sum(axis=1)
    ends, width = np.exp(np.percentile(lost, [2.5, 97.5])), np.ptp(np.exp(lost))
    assert found.perplexity_ratio_interval == pytest.approx(ends, abs=0.05 * width)  # other draws
    means = by_document[:, draws].sum(axis=2) / np.array(counts)[draws].sum(axis=1)
    (least, least_alike), (most, most_alike) = np.percentile(means, [2.5, 97.5], axis=1)
    assert found.kl_interval == pytest.approx((least, most), abs=0.05 * np.ptp(means[0]))
    low, high = wilson_interval(float(np.mean(agree)), tokens)
    alike = min(low, least_alike), max(high, most_alike)
    assert found.top1_interval == pytest.approx(alike, abs=0.05 * np.ptp(means[1]))


def test_a_model_beside_itself_differs_in_nothing(tokenizer_directory: Path, texts: list[str]) -> None:
    decoder, words = TorchDecoder(tiny_model()), load_tokenizer(tokenizer_directory)
    _, found = compare_documents(decoder, decoder, words, words, texts[:2])
    assert (found.kl, found.kl_max, found.top1_agreement, found.perplexity_ratio) == (0.0, 0.0, 1.0, 1.0)
    assert found.perplexity_ratio_interval is found.kl_interval is found.top1_interval is None
    assert str(found).count("too few documents") == 3


def test_eval_compares_checkpoints_exports_and_gguf_files(
    checkpoint: Path, exported: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """The same distance whatever runs either side, up to float32 in another order and GGUF's float16."""
    other = saved(tmp_path / "moved", moved(), checkpoint)
    assert cli("export", other, "--format", "gguf", "--out", tmp_path / "gguf")[0] == 0
    gguf = next((tmp_path / "gguf").glob("*.gguf"))
    text = tmp_path / "text.jsonl"
    text.write_text(corpus_file.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")
    found = []
    for model, base in ((other, checkpoint), (other, exported), (gguf, checkpoint)):
        result = cli.result("eval", model, "--against", base, "--text", text)
        assert result["against"] == str(base) and result["context"] == 128
        found.append(result["divergence"])
    assert found[0]["kl"] > 1e-3 and found[0]["kl_max"] >= found[0]["kl_p99"] > found[0]["kl"] > found[0]["kl_error"]
    for key in ("kl", "perplexity_ratio", "top1_agreement"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-3)
        assert found[2][key] == pytest.approx(found[0][key], rel=2e-2)
    printed = cli("eval", other, "--against", checkpoint, "--text", text)[1]
    assert f"mean KL {found[0]['kl']:.6f}" in " ".join(printed.split())


def test_other_tokens_are_refused_in_a_line(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine
) -> None:
    (words := tmp_path / "words").mkdir()
    train_tokenizer(["other words entirely, and nothing of sports"] * 40, TINY_VOCAB, words)
    for name, model in (("tokenizer", tiny_model()), ("size", tiny_model(vocab_size=400))):
        saved(tmp_path / name, model, words)
    flags = ["eval", checkpoint, "--text", corpus_file, "--against"]
    cli.refuses(2, "the models' tokenizers split the text differently; KL", *flags, tmp_path / "tokenizer")
    cli.refuses(2, "the models have 384 and 400 tokens; KL compares models", *flags, tmp_path / "size")
