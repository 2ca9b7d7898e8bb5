from pathlib import Path

import numpy as np
import pytest

from sportsllm.errors import ArtifactError
from sportsllm.text.packing import IGNORE, PackedSequences, TokenizedDocuments, kept_tokens, tokenize
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.models import tiny_config


def documents(lengths: list[int]) -> TokenizedDocuments:
    """Document i is 0 (begin), i * 1000 + 1, ..., and every id is different otherwise."""
    rows = [np.array([0, *(i * 1000 + np.arange(1, n))], dtype=np.uint32) for i, n in enumerate(lengths)]
    return TokenizedDocuments(np.concatenate(rows), np.cumsum(lengths), sum(lengths))


def test_one_epoch_holds_every_token_once_and_targets_follow_inputs() -> None:
    packed = PackedSequences(documents([7, 30, 2, 11, 19, 5, 40]), length=8, batch_size=2, seed=3)
    seen = []
    for index in range(packed.rows_per_epoch // 2):
        batch = packed.batch(index)
        ends = np.array(batch.documents)
        assert ends[-1] == 16 and (np.diff(ends) > 0).all() and 8 in ends
        flat, targets = batch.tokens.flatten().tolist(), batch.targets.flatten().tolist()
        seen += [token for token in flat if token]
        for position, (token, target) in enumerate(zip(flat, targets, strict=True)):
            if target == IGNORE:
                assert position + 1 in batch.documents, "only a document's last token has no target"
            else:
                assert target == token + 1 if token else target % 1000 == 1
            if token == 0 and position % 8:
                assert position in batch.documents, "a begin token starts a document"
    assert len(seen) == len(set(seen))
    assert len(seen) > 0.8 * (7 + 30 + 2 + 11 + 19 + 5 + 40 - 7)


def test_a_batch_is_a_pure_function_of_seed_and_index() -> None:
    corpus = documents([7, 30, 2, 11, 19, 5, 40])
    first, second = (PackedSequences(corpus, 8, 2, seed=3) for _ in range(2))
    order = [9, 0, 4, 9, 27]
    batches = {index: first.batch(index) for index in order}
    for index in sorted(order):
        assert second.batch(index).tokens.equal(batches[index].tokens)
        assert second.batch(index).documents == batches[index].documents
    other = PackedSequences(corpus, 8, 2, seed=4)
    assert not all(other.batch(i).tokens.equal(first.batch(i).tokens) for i in range(4))
    epochs = [first.batch(0).tokens, first.batch(first.rows_per_epoch // 2).tokens]
    assert not epochs[0].equal(epochs[1])


def test_corpus_shorter_than_a_sequence() -> None:
    with pytest.raises(ArtifactError, match="shorter than one sequence of 64"):
        PackedSequences(documents([10, 20]), length=64, batch_size=1, seed=0)


def test_a_book_does_not_fill_batch_after_batch() -> None:
    """Two long documents: rows of both turn up from the start, where reading in order would stay in one."""
    packed = PackedSequences(documents([900, 900]), length=8, batch_size=4, seed=0)
    books = [set((packed.batch(index).tokens.flatten() // 1000).tolist()) for index in range(8)]
    assert sum(len(both) == 2 for both in books) >= 6  # by chance a batch of four is of one book in one case of eight


def test_kept_tokens_are_those_of_this_text_and_tokenizer_only(
    texts: list[str], tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = load_tokenizer(tokenizer_directory, tiny_config())
    plain = tokenize(texts, words)
    with kept_tokens(tmp_path / "tokens"):
        tokenize(texts, words)
        kept = list((tmp_path / "tokens").iterdir())
        encode = words.encode_documents
        monkeypatch.setattr(words, "encode_documents", lambda *_, **__: pytest.fail("tokenized again"))
        again = tokenize(texts, words)
        assert (again.ids == plain.ids).all() and (again.ends == plain.ends).all()
        assert again.text_bytes == plain.text_bytes and len(kept) == 1
        monkeypatch.setattr(words, "encode_documents", encode)
        # The same letters in other documents, and a damaged file, are tokenized again.
        assert len(tokenize(["".join(texts)], words).ends) == 1
        kept[0].write_bytes(kept[0].read_bytes()[:100])
        assert (tokenize(texts, words).ids == plain.ids).all()
    assert len(list((tmp_path / "tokens").iterdir())) == 2
    tokenize(texts[:1], words)
    assert len(list((tmp_path / "tokens").iterdir())) == 2
