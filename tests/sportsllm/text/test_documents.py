import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePath

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from compress.distill import distill
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.manifest import Manifest, read_manifest
from sportsllm.text import documents
from sportsllm.text.documents import (
    HELD_OUT,
    check_field,
    cut_text,
    held_out_files,
    held_out_setting,
    left_out,
    log_files,
    read_documents,
)
from sportsllm.text.split import (
    TextSplit,
    index_documents,
    known_sides,
    load_corpus,
    split_documents,
    trained_on,
    training_side,
    warn_if_trained_on,
)
from sportsllm.verbs.train import train
from tests.support.checkpoint_files import one_line


def test_every_kind_of_file_and_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.TXT").write_text("plain", encoding="utf-8")
    (tmp_path / "c.md").write_text("# marked", encoding="utf-8")
    (tmp_path / "d.jsonl").write_bytes('\ufeff{"text": "one"}\r\n\n{"text": "two", "id": 3}\r\n'.encode())
    with gzip.open(tmp_path / "e.JSONL.GZ", "wt", encoding="utf-8") as stream:
        stream.write('{"text": "zipped"}\n')
    table = pyarrow.table({"text": ["column", ""], "other": [1, 2]})
    (tmp_path / "sub").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "sub" / "f.parquet")
    (tmp_path / "ignored.png").write_bytes(b"\x89PNG")
    (tmp_path / "._b.txt").write_bytes(b"\x00\x05\x16\x07 of macOS")
    (tmp_path / "README.md").write_text("About these files", encoding="utf-8")
    assert list(read_documents([tmp_path])) == ["plain", "# marked", "one", "two", "zipped", "column"]
    compared, equal = list[int](), PurePath.__eq__
    monkeypatch.setattr(PurePath, "__eq__", lambda one, other: compared.append(1) or equal(one, other))
    log_files([tmp_path, tmp_path / "b.TXT"])
    assert len(compared) < 8, "each file is compared once, also if there are many"
    said = capsys.readouterr().err.replace("\n", " ")
    assert "reading b.TXT, c.md, d.jsonl, e.JSONL.GZ, sub/f.parquet; not reading README.md, ignored.png" in said


def test_long_plain_text_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    text = "\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(100))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    pieces = list(read_documents([tmp_path / "book.txt"]))
    assert len(pieces) > 2
    assert "\n\n".join(pieces) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", "not UTF-8 at byte 5"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "not UTF-8 at byte 25"),
        ("a.jsonl", b'{"text": "ok"}\n{oops\n', "line 2: not valid JSON"),
        ("a.jsonl", b'{"body": "ok"}\n', "line 1 has no 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
        ("a.jsonl", b'{"text": null}\n', "line 1 has no 'text' string but null; correct or delete the line"),
        ("a.txt.gz", b"not gzip", "damaged gzip"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a.parquet.gz", b"x", r"unknown type of file; use .txt, .md, .jsonl \(each also as .gz\) or .parquet"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with one_line(f"{re.escape(str(path))}.*{message}"):
        list(read_documents([path]))


def test_every_record_has_the_field_that_was_asked_for_or_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n{"text": "three"}\n', encoding="utf-8")
    assert list(read_documents([path], "body")) == ["one", "two", "three"]
    assert capsys.readouterr().err == f"{path}: reading 'text' of records without a field 'body'\n"
    with pytest.raises(ArtifactError, match="line 2 has no 'text' string; it has body, of which --text-field NAME"):
        list(read_documents([path]))


def test_a_field_that_no_record_has_is_refused_with_the_fields_that_are_there(tmp_path: Path) -> None:
    plain, rows, damaged = tmp_path / "a.txt", tmp_path / "b.parquet", tmp_path / "c.parquet"
    plain.write_text("no record", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"messages": ["one"], "source": ["two"]}), rows)
    mixed = tmp_path / "d.jsonl"
    mixed.write_text('\ufeff{"text": "one"}\n\n{"body": "two"}\n', encoding="utf-8")
    damaged.write_bytes(b"PAR1")
    for field in ("text", "body", "source"):
        check_field([plain, rows, mixed, damaged], field)
    check_field([plain], "body")
    said = "text_field=mesages: no record has such a field; the fields are messages, source, text, body; did you mean"
    with pytest.raises(UsageError, match=re.escape(f"{said} messages?")):
        check_field([plain, rows, mixed], "mesages")
    mixed.write_text('{"text": "one"}\n{oops\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"d\.jsonl: line 2: not valid JSON"):
        check_field([mixed], "body")


@pytest.mark.parametrize(("values", "kind"), [([1, 2], "int64"), ([b"one"], "binary"), ([None, ["one"]], "list")])
def test_a_column_of_another_type_is_named(values: list[object], kind: str, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), path := tmp_path / "a.parquet")
    with pytest.raises(ArtifactError, match=f"column 'text' has the type {kind}.*, not string; convert it"):
        list(read_documents([path]))


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not found"):
        list(read_documents([tmp_path / "nothing.txt"]))
    with pytest.raises(ArtifactError, match="holds no"):
        list(read_documents([tmp_path]))


def test_a_simulated_folder_is_its_training_part(tmp_path: Path) -> None:
    for name in ("train", "valid", "questions"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("a card", encoding="utf-8")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    assert list(read_documents([tmp_path])) == ["train"]


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(4_000)]
    split = split_documents(index_documents([write(tmp_path / "all.jsonl", texts)]))
    assert not set(split.train) & set(split.held_out)
    assert 0.01 < len(split.held_out) / 4_000 < 0.03  # 0.02 +- 4.5 standard deviations
    back = index_documents([write(tmp_path / "back.jsonl", texts[::-1])])
    assert set(split_documents(back).held_out) == set(split.held_out)
    draws = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64 for text in split.held_out]
    assert max(draws) < 0.02


def test_pieces_of_one_file_stay_on_one_side(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(f"book {number}: {'line ' * 300}\n\n" * 20, encoding="utf-8")
    split = load_corpus([tmp_path], [])
    books = [{text.split(":")[0] for text in side} for side in (split.train, split.held_out)]
    assert not books[0] & books[1] and len(books[0] | books[1]) == 100 and books[1]
    assert len(split.held_out) > len(books[1])  # each is cut into several pieces


def test_a_single_book_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {n}\n\n" for n in range(30_000)), encoding="utf-8")
    split = load_corpus([tmp_path / "book.txt"], [])
    assert split.held_out and "line 29999" in list(split.held_out)[-1] and "line 0\n" in next(iter(split.train))
    assert len(split.held_out) <= 0.1 * len(split.train)


def test_one_file_in_a_single_line_holds_out_its_end(tmp_path: Path) -> None:
    for words in (60_000, 2_000, 400):
        text = " ".join(f"word{n}" for n in range(words))
        (tmp_path / "line.txt").write_text(text, encoding="utf-8")
        split = load_corpus([tmp_path / "line.txt"], [])
        assert "".join([*split.train, *split.held_out]) == text or words == 60_000
        assert next(iter(split.train)).startswith("word0 ") and f"word{words - 1}" in list(split.held_out)[-1]
        assert max(map(len, split.train)) < 65_536 and not set(split.held_out) & set(training_side([tmp_path], []))
    (tmp_path / "line.txt").write_text("short", encoding="utf-8")
    with pytest.raises(ArtifactError, match="a single short document"):
        load_corpus([tmp_path / "line.txt"], [])


def test_held_out_documents_leave_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {n}" for n in range(100)]
    corpus, valid = write(tmp_path / "all.jsonl", texts), write(tmp_path / "part.jsonl", texts[:30])
    split = load_corpus([corpus], [valid])
    assert list(split.train) == texts[30:] and list(split.held_out) == texts[:30]
    assert "30 of 100 documents are held out" in capsys.readouterr().err
    assert not set(training_side([corpus], [valid])) & set(texts[:30])
    assert not set(training_side([corpus], [])) & set(load_corpus([corpus], []).held_out)
    with pytest.raises(ArtifactError, match="all of it is held out"):
        load_corpus([valid], [corpus])
    with pytest.raises(ArtifactError, match="all of it is held-out text"):
        training_side([valid], [corpus])
    with pytest.raises(ArtifactError, match="held-out text is empty"):
        load_corpus([corpus], [write(tmp_path / "none.jsonl", [])])


def test_copies_are_read_once_and_a_changed_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {n}" for n in range(100)]
    corpus = write(tmp_path / "all.jsonl", [*texts, *texts[10:20]])
    split = load_corpus([corpus], [])
    assert sorted([*split.train, *split.held_out]) == sorted(texts)
    assert "10 of 110 documents are copies of others" in capsys.readouterr().err
    for changed in ([*texts[:-1], "other"], texts[:90], [*texts, *texts]):
        write(corpus, changed)
        with pytest.raises(ArtifactError, match=f"{corpus}: (changed|shrank) while this command read"):
            list(split.train)


def test_a_sample_is_the_same_in_another_order(tmp_path: Path) -> None:
    texts = [f"text {n} " * 10 for n in range(1_000)]
    streams = [index_documents([write(tmp_path / f"{step}.jsonl", texts[::step])]) for step in (1, -1)]
    samples = [list(stream.sample(10_000)) for stream in streams]
    assert samples[0] == samples[1][::-1] and 9_900 < sum(map(len, samples[0])) <= 10_100
    assert list(streams[0].sample(10**9)) == texts and len(streams[0].sample(1)) == 1


@pytest.mark.parametrize("block", [1, 7, 20_000, 2**20])
def test_plain_text_is_cut_alike_in_blocks_of_any_size(
    block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    ends = ["\n", "\n\n", "\r\n", "\r\n\r\n", "\n\n\n\n", "\r\r\n", " "]
    lengths = rng.choice([10, 3_000, 20_000, 65_530, 65_536, 150_000], 60)
    text = "\ufeff" + "".join("é" * int(length) + ends[number % 7] for number, length in enumerate(lengths))
    (path := tmp_path / "book.txt").write_bytes(text.encode())
    monkeypatch.setattr(documents, "_BLOCK_BYTES", block)
    found = list(read_documents([path]))
    assert found == [part for part in cut_text([text]) if part.strip()] and max(map(len, found)) < 2**17
    plain = text.removeprefix("\ufeff").replace("\r\n", "\n")
    assert "".join(found).replace("\n", "") == plain.replace("\n", "")


def test_what_a_teacher_holds_out_is_not_trained_on_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {n}" for n in range(100)]
    corpus, known = write(tmp_path / "all.jsonl", texts), write(tmp_path / "known.jsonl", texts[:30])
    valid = write(tmp_path / "valid.jsonl", texts[30:40])
    Manifest(settings={"valid": [str(known)]}).write(tmp_path)
    split = load_corpus([corpus], [valid], checkpoints=[tmp_path])
    assert list(split.train) == texts[40:] and list(split.held_out) == texts[30:40]
    assert set(training_side([corpus], [], checkpoints=[tmp_path])) < set(texts[30:])
    split = load_corpus([corpus], [], checkpoints=[tmp_path])
    assert not {*split.train, *split.held_out} & set(texts[:30])
    assert f"{len(split.held_out)} of 70 documents are held out" in capsys.readouterr().err


def test_few_documents_give_one_to_choose_and_one_to_judge_by(tmp_path: Path) -> None:
    for count in range(4, 40):
        split = load_corpus([write(tmp_path / "few.jsonl", [f"text {n}" for n in range(count)])], [])
        selection, report = split.parts()
        assert selection and report and not set(selection) & set(report) and not set(split.train) & set(split.held_out)


def test_a_held_out_book_leaves_as_a_whole(tmp_path: Path) -> None:
    book = "".join(f"line {n}\n\n" for n in range(10_000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    valid = write(tmp_path / "valid.jsonl", [book])
    other = write(tmp_path / "other.jsonl", ["another text", "and another"])
    assert set(load_corpus([tmp_path / "book.txt", other], [valid]).train) == {"another text", "and another"}
    assert set(load_corpus([valid, other], [tmp_path / "book.txt"]).train) == {"another text", "and another"}
    more = write(tmp_path / "more.jsonl", texts := [f"text {n}" for n in range(10)])
    model = model_of(tmp_path / "model", first := load_corpus([more, valid], []))
    split = load_corpus([tmp_path / "book.txt", more], [], checkpoints=[model])
    assert book in first.held_out and split.train and set(split.train) < set(texts)


def test_the_text_that_chooses_is_not_the_text_that_is_reported() -> None:
    texts = [f"text {n}" for n in range(40)]
    selection, report = TextSplit(["x"], [*texts[:39], *texts]).parts()  # copies are on one side
    assert len(selection) == len(report) == 20 and set(selection) | set(report) == set(texts)
    book = "".join(f"line {n}\n\n" for n in range(10_000))
    selection, report = TextSplit(["x"], [book]).parts()
    assert selection and report and not set(selection) & set(report)
    assert TextSplit(["x"], ["short"]).parts() == (["short"], ["short"])  # nothing else is there
    assert all(TextSplit(["x"], ["a b " * 5_000 + "\n\n"]).parts())  # blank lines at the end are no half


def test_the_first_held_out_documents_come_from_all_files() -> None:
    texts = [f"first {n}" for n in range(900)] + [f"second {n}" for n in range(900)]
    for side in TextSplit(["x"], texts).parts():
        assert 20 < sum(text.startswith("second") for text in side[:100]) < 80


def test_what_checkpoints_hold_out_is_left_out_and_recorded(tmp_path: Path) -> None:
    own, theirs, further = (write(tmp_path / f"{name}.jsonl", ["text"]) for name in ("own", "theirs", "further"))
    teacher, start = tmp_path / "teacher", tmp_path / "start"
    taught = {"valid": [str(theirs), str(tmp_path / "gone.txt")]}
    started = {"valid": [str(own)], HELD_OUT: [str(own), str(theirs), str(further)]}
    for model, settings in ((teacher, taught), (start, started)):
        Manifest(settings=settings).write(model)
    assert held_out_files(teacher) == [theirs]
    assert left_out([], teacher) == (theirs,) and left_out([own], teacher, start) == (own, theirs, further)
    assert held_out_setting([], [theirs]) == {HELD_OUT: [str(theirs)]}
    assert held_out_setting([own], [own]) == {} and held_out_setting([own, theirs], [own]) == {}


def model_of(directory: Path, split: TextSplit) -> Path:
    """A directory whose manifest records the split."""
    Manifest(results={"sides": split.sides}).write(directory)
    return directory


@pytest.mark.parametrize("count", [2, 4, 60, 150])
@pytest.mark.parametrize("drawn", [0, 1])
def test_what_a_small_corpus_held_out_stays_held_out(count: int, drawn: int, tmp_path: Path) -> None:
    """Also if the hash holds out a document that the small corpus was trained on."""
    named = {text: int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) for text in map(str, range(2_000))}
    by_hash = [text for text, key in named.items() if key < 0.02 * 2**64]
    others = [text for text in named if text not in by_hash]
    small = write(tmp_path / "small.jsonl", [*by_hash[:drawn], *others[: count - drawn]])
    first = load_corpus([small], [])
    last = by_hash[:1] if count == 2 and drawn else others[: count - drawn][-len(first.held_out) :]
    assert list(first.held_out) == last and first.train
    model = model_of(tmp_path / "model", first)
    again = load_corpus([small], [], checkpoints=[model])
    assert list(again.train) == list(first.train) and list(again.held_out) == last and again.sides == first.sides
    for further in (others[1_000:1_005], others[1_000:1_400], by_hash[10:20]):
        files = [small, write(tmp_path / "further.jsonl", further)]
        split = load_corpus(files, [], checkpoints=[model])
        assert set(first.train) <= set(split.train) and set(first.held_out) <= set(split.held_out)
        assert set(split.held_out) == {*first.held_out, *(text for text in further if text in by_hash)}
        assert set(training_side(files, [], checkpoints=[model])) == set(split.train)
        valid = write(tmp_path / "valid.jsonl", ["another"])
        assert set(load_corpus(files, [valid], checkpoints=[model]).train) == {*first.train, *further}
    for read in (load_corpus, training_side):
        with pytest.raises(ArtifactError, match=r"all of it is held.out"):
            read([write(tmp_path / "held.jsonl", list(first.held_out))], [], checkpoints=[model])


@pytest.mark.parametrize("wanted", [True, False])
def test_the_end_of_a_single_file_stays_held_out(wanted: bool, tmp_path: Path) -> None:
    """Whether the hash holds out the whole file or not."""
    texts = ("".join(f"{book} {n}\n\n" for n in range(10_000)) for book in range(1_000))
    text = next(text for text in texts if (hashlib.sha256(text.encode()).digest()[0] < 5) == wanted)
    (book := tmp_path / "book.txt").write_text(text, encoding="utf-8")
    first = load_corpus([book], [])
    model, other = model_of(tmp_path / "model", first), write(tmp_path / "other.jsonl", ["another text", "and another"])
    split = load_corpus([other, book], [], checkpoints=[model])
    assert list(split.held_out) == list(first.held_out) and len(first.held_out) >= 2
    assert list(split.train) == ["another text", "and another", *first.train]


def test_a_document_that_held_out_its_end_is_left_out_among_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single, other = "word " * 1_000, [f"text {n}" for n in range(10)]
    book, files = write(tmp_path / "book.jsonl", [single]), write(tmp_path / "other.jsonl", other)
    first = load_corpus([book], [])
    model = model_of(tmp_path / "model", first)
    for corpus in ([book], [book, book]):
        again = load_corpus(corpus, [], checkpoints=[model])
        assert (again.train, again.held_out) == (first.train, first.held_out)
    capsys.readouterr()
    split = load_corpus([book, files], [], checkpoints=[model])
    assert {*split.train, *split.held_out} == set(other)
    assert "1 of 11 documents are held out and not trained on" in capsys.readouterr().err
    assert not {single} & set(training_side([book, files], [], checkpoints=[model]))


@pytest.mark.parametrize("sides", [[1], {"x": True}, {"1": "other"}, {str(2**70): True, "-1": None}])
def test_a_damaged_record_of_a_split_is_named_or_matches_nothing(sides: object, tmp_path: Path) -> None:
    Manifest(results={"sides": sides}).write(tmp_path)
    small = write(tmp_path / "small.jsonl", ["text"] * 3 + ["other"])
    if isinstance(sides, dict) and len(sides) == 2:
        assert load_corpus([small], [], checkpoints=[tmp_path]).held_out
        return
    with pytest.raises(ArtifactError, match=r"manifest.json: .*make the directory again"):
        load_corpus([small], [], checkpoints=[tmp_path])


def test_a_model_remembers_what_its_ancestors_held_out(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write(tmp_path / "small.jsonl", texts := [f"small {n} " * 30 for n in range(10)])
    further = write(tmp_path / "further.jsonl", [f"further {n} " * 30 for n in range(5)])
    parts = {"steps": 0, "sequence": 64}
    train(checkpoint, corpus=[small], out=tmp_path / "first", **parts)
    assert warn_if_trained_on(tmp_path / "first", [texts[0], "another text"]) == 1
    assert "1 of 2 documents are training text" in capsys.readouterr().err
    assert trained_on(tmp_path, texts) == 0
    train(tmp_path / "first", corpus=[small, further], out=tmp_path / "second", **parts)
    assert set(texts[-2:]) == set(load_corpus([small, further], [], checkpoints=[tmp_path / "first"]).held_out)
    quantize_checkpoint(tmp_path / "second", tmp_path / "int4", QuantizationConfig(), "rtn")
    for name in ("first", "second"):
        assert len(read_manifest(tmp_path / name).results["sides"]) == 2
        assert trained_on(tmp_path / name, texts) == 8
        assert known_sides([tmp_path / name]) == known_sides([tmp_path / "int4"])
    assert trained_on(tmp_path / "int4", texts) == 8
    distill(
        student=str(tmp_path / "second"), teacher=str(tmp_path / "first"), corpus=[further, small],
        out=tmp_path / "student", **parts,
    )  # fmt: skip
    assert trained_on(tmp_path / "student", texts) == 8
