import errno
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from sportsllm.errors import ArtifactError
from sportsllm.text import tokens
from sportsllm.text.conversations import Document
from sportsllm.text.packing import IGNORE, PackedSequences
from sportsllm.text.tokenizer import EncodedDocument, TextTokenizer, load_tokenizer
from sportsllm.text.tokens import TokenizedDocuments, tokenize
from tests.support.models import tiny_config


def documents(lengths: list[int]) -> TokenizedDocuments:
    """Document i is 0 (begin), i * 1000 + 1, ..., and every id is different otherwise."""
    rows = [np.array([0, *(i * 1000 + np.arange(1, n))], dtype=np.uint32) for i, n in enumerate(lengths)]
    return TokenizedDocuments(np.concatenate(rows), np.cumsum(lengths), sum(lengths))


def test_one_epoch_holds_every_token_once_and_targets_follow_inputs() -> None:
    packed = PackedSequences(documents([7, 30, 2, 11, 19, 5, 38]), length=8, batch_size=2, seed=3)
    assert packed.rows_per_epoch == 13  # the last token of the 112 has no target
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
    assert 0.8 * (112 - 7) < len(seen) == len(set(seen))


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


@pytest.mark.parametrize("every", [1, 2])
def test_mapped_ids_leave_memory_whichever_batches_a_process_reads(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unloads = list[int]()
    monkeypatch.setattr(TokenizedDocuments, "unload", lambda _: unloads.append(1))
    packed = PackedSequences(documents([7, 30, 2, 11, 19, 5, 40]), length=8, batch_size=2, seed=3)
    for index in range(1, 1 + 32 * every, every):
        packed.batch(index)
    assert len(unloads) == 2


def test_corpus_shorter_than_a_sequence() -> None:
    with pytest.raises(ArtifactError, match="shorter than one sequence of 64"):
        PackedSequences(documents([10, 20]), length=64, batch_size=1, seed=0)


def test_a_book_does_not_fill_batch_after_batch() -> None:
    """Two long documents: rows of both turn up from the start, where reading in order would stay in one."""
    packed = PackedSequences(documents([900, 900]), length=8, batch_size=4, seed=0)
    books = [set((packed.batch(index).tokens.flatten() // 1000).tolist()) for index in range(8)]
    assert sum(len(both) == 2 for both in books) >= 6  # by chance a batch of four is of one book in one case of eight


def test_cached_tokens_are_those_of_this_text_and_tokenizer_only(
    texts: list[str], tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, cache = load_tokenizer(tokenizer_directory, tiny_config()), tmp_path / "tokens"
    monkeypatch.setattr(tokens, "_BLOCK_BYTES", 64)  # checksums are of many blocks
    rows = [encoded.ids for encoded in words.encode_documents(texts, end=True)]
    first = tokenize(texts, words, cache)
    assert first.ids.tolist() == list(chain(*rows)) and first.ends.tolist() == np.cumsum(list(map(len, rows))).tolist()
    assert first.ids.dtype == np.uint16 and first.text_bytes == len("".join(texts).encode())
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(words, "encode_documents", lambda *_, **__: pytest.fail("tokenized again"))
        again = tokenize(texts, words, cache)
    assert (again.ids == first.ids).all() and (again.ends == first.ends).all() and again.text_bytes == first.text_bytes
    # The same letters in other documents, and damaged files, are tokenized again.
    assert len(tokenize(["".join(texts)], words, cache).ends) == 1
    assert len(list(cache.iterdir())) == 2
    whole = (ids := kept / "ids").read_bytes()
    for damaged in (whole[:100], bytes([whole[0] ^ 1]) + whole[1:], None, b""):
        ids.unlink()  # `first` still reads the old file
        if damaged is not None:
            ids.write_bytes(damaged)
        assert tokenize(texts, words, cache).ids.tolist() == list(chain(*rows))
    (kept / "tokens.json").write_text("{", encoding="utf-8")
    assert tokenize(texts, words, cache).ids.tolist() == list(chain(*rows))


@pytest.mark.parametrize("chats", [False, True])
def test_an_interrupted_run_goes_on_where_it_was(
    chats: bool, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up, or the process dies, after any of the writes; the next run has the same tokens."""
    words = load_tokenizer(tokenizer_directory, tiny_config())
    texts = [f"line {n} of the book" for n in range(40)]
    whole = tokenize(texts, words, tmp_path / "whole")
    monkeypatch.setattr(tokens, "_TOKENS_AT_ONCE", 50)

    def encoded(documents: Iterable[Document], end: bool) -> Iterator[EncodedDocument]:
        for each in TextTokenizer.encode_documents(words, documents, end):
            number = int(words.decode(each.ids).split()[1])
            yield each._replace(scored=[True] * len(each.ids)) if chats and number > 20 else each

    monkeypatch.setattr(words, "encode_documents", encoded)
    write, writes = tokens.atomic_write_text, 0

    def fail(path: Path, text: str) -> None:
        nonlocal writes
        writes += 1
        if writes % 2 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(tokens, "atomic_write_text", fail)
    for _ in range(100):
        with suppress(OSError):
            found = tokenize(texts, words, tmp_path / "cache")
            break
    assert writes > 8
    assert found.ids.tolist() == whole.ids.tolist() and found.ends.tolist() == whole.ends.tolist()
    assert found.text_bytes == whole.text_bytes
    assert (found.scored is not None and found.scored.all() and len(found.scored) == len(found.ids)) == chats
