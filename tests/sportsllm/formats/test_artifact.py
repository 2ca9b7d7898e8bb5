import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, Stage, finished_manifest, output_directory, run_stage
from sportsllm.formats.manifest import Parent, digest, directory_bytes, read_manifest, verify_directory


def make(out: Path, stage: Stage, text: str = "content") -> None:
    with output_directory(out, stage) as partial:
        (partial / "file.txt").write_text(text, encoding="utf-8")
        stage.results["size"] = len(text)


def test_finished_directory_has_a_manifest_that_verifies(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("input", encoding="utf-8")
    make(tmp_path / "out", Stage("train", {"steps": 1}, [source], seed=3))
    manifest = read_manifest(tmp_path / "out")
    assert manifest.command == "train" and manifest.seed == 3 and manifest.results == {"size": 7}
    assert manifest.parents == (Parent(str(source), digest(source)),)
    assert verify_directory(tmp_path / "out") == (1, [])
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert run_stage(tmp_path / "run", Stage("data simulate", {}), lambda _: {}).keys() >= {"seconds", "size_bytes"}


def test_same_inputs_are_up_to_date_and_others_conflict(tmp_path: Path) -> None:
    make(tmp_path / "out", Stage("train", {"steps": 1}))
    make(tmp_path / "cut", Stage("prune", {"recover": {"steps": 1, "sequence": 8}}))
    with pytest.raises(ConflictError, match=r"\(recover steps 1, not 2\)"):
        finished_manifest(tmp_path / "cut", Stage("prune", {"recover": {"steps": 2, "sequence": 8}}))
    assert finished_manifest(tmp_path / "out", Stage("train", {"steps": 1})) is not None
    assert finished_manifest(tmp_path / "free", Stage("train", {"steps": 1})) is None
    with pytest.raises(ConflictError, match=r"other settings or inputs \(steps 1, not 2; seed None, not 3\)"):
        finished_manifest(tmp_path / "out", Stage("train", {"steps": 2}, seed=3))
    with pytest.raises(ConflictError, match="the content of an input"):
        finished_manifest(tmp_path / "out", Stage("train", {"steps": 1}, [tmp_path / "out"]))
    with pytest.raises(ConflictError, match="not made by this command"):
        finished_manifest(tmp_path, Stage("train", {}))
    with pytest.raises(UsageError, match="name a new directory"):
        finished_manifest(Path(), Stage("train", {}))
    file = tmp_path / "out" / "file.txt"
    for damage, found in ((lambda: file.write_bytes(b""), "0 bytes instead of"), (file.unlink, "missing")):
        damage()
        with pytest.raises(ArtifactError, match=rf"file\.txt: {found}.*, move .*out away"):
            finished_manifest(tmp_path / "out", Stage("train", {"steps": 1}))


def test_a_changed_input_changes_the_fingerprint_and_a_group_does_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make(source, Stage("train", {}), "one")
    before = Stage("prune", {}, [source]).fingerprint()
    other = tmp_path / "other"
    make(other, Stage("train", {}), "two")
    assert Stage("prune", {}, [other]).fingerprint() != before
    assert Stage("data sample", {}, [source]).fingerprint() == Stage("sample", {}, [source]).fingerprint()
    (cloned := tmp_path / "cloned" / ".git").mkdir(parents=True)
    empty = digest(cloned.parent)
    (cloned / "index").write_text("x", encoding="utf-8")
    assert digest(cloned.parent) == empty


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), output_directory(tmp_path / "out", Stage("train", {})) as partial:
        (partial / "half").write_text("x", encoding="utf-8")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_saved_state_survives_and_needs_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stage = tmp_path / "out", Stage("train", {})
    with pytest.raises(RuntimeError), output_directory(out, stage, resume=True) as partial:
        assert "no interrupted run to resume; starting from the beginning" in capsys.readouterr().err.replace("\n", " ")
        (partial / STATE_DIRECTORY).mkdir()
        (partial / STATE_DIRECTORY / "state.json").write_text(json.dumps(stage.identity()))
        (partial / "state.new").mkdir()  # the disk is full while it saves
        raise RuntimeError
    assert [path.name for path in partial.iterdir()] == [STATE_DIRECTORY]
    with pytest.raises(ConflictError, match="add --resume"), output_directory(out, stage):
        pass
    with pytest.raises(UsageError, match=r"other settings or inputs \(command train, not distill; steps None, not 8\)"):
        run_stage(out, Stage("distill", {"steps": 8}), Mock(), resume=True)
    run_stage(out, stage, lambda _: {}, resume=True)
    assert not (out / STATE_DIRECTORY).exists() and verify_directory(out)[1] == []


def test_a_result_is_kept_if_something_appears_in_its_place(tmp_path: Path) -> None:
    with (
        pytest.raises(ConflictError, match="appeared during the run; the result is in"),
        output_directory(tmp_path / "out", Stage("train", {})) as partial,
    ):
        (partial / "result").write_text("x", encoding="utf-8")
        (tmp_path / "out").write_text("mine", encoding="utf-8")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine" and verify_directory(partial) == (1, [])


def test_another_run_holds_the_output(tmp_path: Path) -> None:
    with FileLock(tmp_path / "out.partial.lock"), pytest.raises(ConflictError, match="another run"):
        run_stage(tmp_path / "out", Stage("train", {}), Mock())


def test_a_run_that_ends_leaves_the_lock_of_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, release = FileLock(tmp_path / "out.partial.lock"), FileLock.release
    with monkeypatch.context() as patched, output_directory(tmp_path / "out", Stage("train", {})):
        patched.setattr(FileLock, "release", lambda own: (release(own), lock.acquire(timeout=0)))
    assert Path(lock.lock_file).exists()
    lock.release()


def test_verify_finds_every_kind_of_damage(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output_directory(out, Stage("train", {})) as partial:
        for name in ("flipped", "short", "gone"):
            (partial / name).write_text("content", encoding="utf-8")
    for name, text in (("flipped", "Content"), ("short", "con"), ("added", "x"), (".another-program's", "x")):
        (out / name).write_text(text, encoding="utf-8")
    (out / "gone").unlink()
    found = [problem[:16] for problem in verify_directory(out)[1]]
    assert found == ["flipped: content", "gone: missing", "short: 3 bytes, ", "added: not in th"]


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99, "files": {}}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="newer version"):
        read_manifest(tmp_path)


def test_a_run_killed_while_it_saved_keeps_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, stage, partial = tmp_path / "out", Stage("train", {}), tmp_path / "out.partial"
    for name in ("state.old", "state.new"):
        (partial / name).mkdir(parents=True)
        (partial / name / "which").write_text(name, encoding="utf-8")
    for name in ("manifest.json", "manifest.json.partial"):  # killed while it finished
        (partial / name).write_text("{}", encoding="utf-8")
    with pytest.raises(RuntimeError), output_directory(out, stage, resume=True) as found:
        assert (found / STATE_DIRECTORY / "which").read_text() == "state.old" and not (found / "state.new").exists()
        (found / STATE_DIRECTORY).rename(found / "state.old")  # interrupted between the renames of a save
        raise RuntimeError
    with pytest.raises(KeyboardInterrupt), output_directory(out, stage, resume=True) as found:
        (found / STATE_DIRECTORY / "which").rename(found / "result")
        monkeypatch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))  # of the state, at the end
    assert verify_directory(out) == (1, []) and (out / "result").exists()


def test_an_input_that_goes_away_during_the_run_loses_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("input", encoding="utf-8")
    stage = Stage("train", {}, [source])
    assert finished_manifest(tmp_path / "out", stage) is None
    stage.fingerprint()
    with output_directory(tmp_path / "out", stage) as partial:
        (partial / "result").write_text("x", encoding="utf-8")
        expected = digest(source)
        source.unlink()
    assert read_manifest(tmp_path / "out").parents[0].sha256 == expected


def test_other_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()  # published checkpoints often carry further forms of themselves there
    (tmp_path / "onnx" / "model_q4.onnx").write_bytes(b"0" * 70)
    assert directory_bytes(tmp_path) == 70
    for name in ("model", "importance"):  # the scores of `prune`
        (tmp_path / f"{name}.safetensors").write_bytes(b"0" * 30)
    assert directory_bytes(tmp_path) == 30
