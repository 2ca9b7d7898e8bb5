import json
from pathlib import Path

import pytest
import torch

from compress.distillation.loss import distillation_config
from compress.sample import CORPUS, read_questions, sample
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.batch_sampling import default_rows
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.settings import Start
from tests.support.models import saved, tiny_config, tiny_model
from tests.support.pages import chat_model


def test_a_model_writes_a_corpus(checkpoint: Path, tmp_path: Path) -> None:
    result = sample(checkpoint, out=tmp_path / "own", tokens=300, sequence=24, batch_size=8)
    lines = (tmp_path / "own" / CORPUS).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == result.documents and result.tokens >= 300
    assert result.bytes == sum(len(text.encode()) for text in texts)
    assert all(texts) and len(set(texts)) > len(texts) // 2
    words = load_tokenizer(checkpoint, load_config(checkpoint))
    special = words.decode([words.begin_id])
    assert not special or not any(special in text for text in texts)
    other = sample(checkpoint, out=tmp_path / "other", tokens=300, sequence=24, batch_size=8, seed=1)
    assert (tmp_path / "other" / CORPUS).read_bytes() != (tmp_path / "own" / CORPUS).read_bytes() and other.tokens
    own, both = [tmp_path / "own" / CORPUS, tmp_path / "other"], [tmp_path / "own", tmp_path / "real.jsonl"]
    (tmp_path / "manifest.json").write_text("{}")  # another program's
    weights = [distillation_config(Start.PRUNED, checkpoint, {}, text).kl_weight for text in (own, both, [])]
    assert weights == [1.0, 0.5, 0.5]  # a teacher's own text says nothing that the teacher does not


@pytest.mark.parametrize(("context", "longest"), [(128, 128), (1024, 512)])
def test_texts_are_as_long_as_trained(tokenizer_directory: Path, tmp_path: Path, context: int, longest: int) -> None:
    saved(tmp_path / "model", tiny_model(max_position_embeddings=context), tokenizer_directory)
    sample(tmp_path / "model", out=tmp_path / "own", tokens=10, batch_size=1)
    settings = json.loads((tmp_path / "own" / "manifest.json").read_text(encoding="utf-8"))["settings"]
    assert settings["length"] == longest


def test_texts_end_at_a_stop_token(checkpoint: Path, tokenizer_directory: Path, tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint)
    assert model.config.stop_token_ids
    model.head_weight.data.mul_(0.01)  # all tokens about as likely as each other
    saved(tmp_path / "flat", model, tokenizer_directory)
    flat = sample(tmp_path / "flat", out=tmp_path / "own", tokens=2_000, sequence=64, batch_size=32)
    # Every token ends a text with a chance of 2 of 384 (end and begin token): 1 - (382 / 384) ** 63 = 28% of them.
    assert 0.1 < flat.ended / flat.documents < 0.5


def test_a_seed_means_the_same_text_for_any_number_of_threads(checkpoint: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        written = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sample(checkpoint, out=tmp_path / str(threads), tokens=200, sequence=24, batch_size=4)
            written.add((tmp_path / str(threads) / CORPUS).read_bytes())
        assert len(written) == 1 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_each_text_continues_a_prompt(checkpoint: Path, corpus_file: Path, texts: list[str], tmp_path: Path) -> None:
    lines = ["The match", "Two goals in the first half, and", "Rain"]
    prompts = tmp_path / "Prompts.TXT"
    prompts.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    result = sample(
        checkpoint, out=tmp_path / "lines", tokens=200, sequence=40, temperature=0.8, top_p=0.9, prompts=prompts,
        batch_size=6, seed=1,
    )  # fmt: skip
    found = [json.loads(line)["text"] for line in (tmp_path / "lines" / CORPUS).read_text("utf-8").splitlines()]
    assert all(any(text.startswith(line) for line in lines) for text in found)
    assert all(any(text.startswith(line) for text in found[:3]) for line in lines)  # in another order, none twice
    assert len(found) == result.documents and result.tokens >= 200
    sample(checkpoint, out=tmp_path / "documents", tokens=200, sequence=40, prompts=corpus_file, batch_size=6)
    for line in (tmp_path / "documents" / CORPUS).read_text("utf-8").splitlines():
        assert json.loads(line)["text"][:8] in {text[:8] for text in texts}
    lines = [f"Match {number}: who\u2028won it, and by how many goals?" for number in range(2_000)]
    prompts.write_text("\n".join(lines), encoding="utf-8-sig")
    assert read_questions(prompts) == lines


def test_prompts_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n" + "two " * 50 + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"prompt 2 has .* tokens of a text's 20"):
        sample(checkpoint, out=tmp_path / "x", tokens=10, sequence=20, prompts=path)
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="holds no text"):
        sample(checkpoint, out=tmp_path / "x", tokens=10, sequence=20, prompts=path)
    silent = chat_model(checkpoint, tmp_path / "silent")
    with pytest.raises(ArtifactError, match="writes nothing before a user's message"):
        sample(silent, out=tmp_path / "x", tokens=10, sequence=20, chat=True)
    with pytest.raises(UsageError, match="context"):
        sample(checkpoint, out=tmp_path / "x", tokens=10, sequence=100_000)
    with pytest.raises(UsageError, match="--temperature is 0"):
        sample(checkpoint, out=tmp_path / "x", tokens=10, sequence=20, temperature=0.0)


def test_a_template_may_take_most_of_the_context(checkpoint: Path, tmp_path: Path) -> None:
    most, all_of_it = (chat_model(checkpoint, tmp_path / str(n), "~" * n + "{{ message.content }}") for n in (90, 130))
    assert sample(most, out=tmp_path / "own", tokens=10, chat=True).documents
    with pytest.raises(UsageError, match="the template takes 131 tokens of a text's 128; give a longer --sequence"):
        sample(all_of_it, out=tmp_path / "x", tokens=10, chat=True)


def test_a_batch_fits_its_cache() -> None:
    config = tiny_config()  # 2 layers, keys and values of 2 heads of 16: 512 bytes a token
    assert default_rows(config, 64, 1_000_000) == 128
    assert default_rows(config, 64, 64 * 2 * 40) == 50  # a fifth of the tokens may be lost to early ends
    assert default_rows(config, 64, 10) == 32
    assert default_rows(config, 2**20, 2**30) == 2
