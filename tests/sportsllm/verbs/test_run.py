import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sportsllm.errors import ArtifactError, ConflictError, InterruptedRun, UsageError
from sportsllm.verbs.run import _fingerprint, load_recipe, run
from tests.support.forked import program
from tests.support.training import interrupted_in_step

ROOT = Path(__file__).resolve().parents[3]
GOOD = """
name = "two"
[[stage]]
name = "corpus"
command = "data simulate"
megabytes = 0.1
questions = 10
[[stage]]
name = "model"
command = "train"
model = "tiny-300k"
vocab_size = 300
corpus = ["@corpus/train.jsonl"]
valid = ["@corpus/valid.jsonl"]
steps = 1
batch_size = 1
set = { accumulation = 1 }
sequence = 32
[[stage]]
name = "score"
command = "eval"
directory = "@model"
text = ["@corpus/valid.jsonl"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8-sig")  # with a byte-order mark, as some editors write it
    return path


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    assert load_recipe(recipe).stages


def test_counts_are_written_as_on_the_command_line(tmp_path: Path) -> None:
    recipe = GOOD.replace("steps = 1\n", 'tokens = "2k"\n')
    assert load_recipe(write(tmp_path, recipe)).stages[1].settings["tokens"] == 2_000
    with pytest.raises(UsageError, match="setting 'tokens': '2x' is not a whole number of 1 or more"):
        load_recipe(write(tmp_path, recipe.replace("2k", "2x")))


def test_stages_run_once_are_kept_and_told_apart_when_changed(tmp_path: Path) -> None:
    path, out = write(tmp_path, GOOD), tmp_path / "out"
    assert [row.name for row in run(path, out, only="corpus").stages] == ["corpus"]
    with pytest.raises(UsageError, match="--only nowhere"):
        run(path, out, only="nowhere")
    assert [row.cached for row in run(path, out).stages] == [True, False, False]
    assert [row.cached for row in run(path, out).stages] == [True, True, True]
    assert json.loads((out / "score.json").read_text(encoding="utf-8"))["bits_per_byte"] > 0
    with pytest.raises(ConflictError, match=r"stage .model.: .*other settings") as caught:
        run(write(tmp_path, GOOD.replace("steps = 1", "steps = 2")), out)
    assert f"type: rm -r {out / 'model'};" in str(caught.value)  # `score` is computed again as it is
    with pytest.raises(ConflictError, match=r"made by 'data simulate' with other .*") as caught:
        run(write(tmp_path, GOOD.replace("questions = 10", "questions = 11")), out)
    command = str(caught.value).partition("type: ")[2].partition(";")[0]
    assert command == f"rm -r {out / 'corpus'} {out / 'model'}"
    named = GOOD.replace("@corpus", str(out / "corpus")).replace('"@model"', f'"{out / "model"}"')
    named = named.replace('command = "train"', f'command = "train"\nout = "{out / "model"}"')
    assert [stage.needs for stage in load_recipe(write(tmp_path, named), out).stages] == [
        (), ("corpus",), ("corpus", "model")
    ]  # fmt: skip
    subprocess.run(command, shell=True, check=True)
    assert [row.cached for row in run(path, out).stages] == [False, False, False]
    pages = 'name = "look"\ncommand = "inspect"\nmodel = "@model"\n[[stage]]\nname = "page"\ncommand = "report"\n'
    paged = write(tmp_path, f'{GOOD}[[stage]]\n{pages}directories = ["@model"]\n')
    (page := out / "page.html").write_text("an earlier page", encoding="utf-8")
    assert [row.out for row in run(paged, out).stages[-2:]] == [str(out / "look.html"), str(page)]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_file_behind_a_name_counts_and_a_text_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peer = tmp_path / "peer"
    peer.write_text("one", encoding="utf-8")
    settings = {"peer_directory": [f"genai={peer}"], "prompt": "The match " * 100}
    before, stopped = _fingerprint("bench", settings), _fingerprint("generate", {"stop": ["."]})
    assert _fingerprint("bench", settings) == before
    peer.write_text("two", encoding="utf-8")
    assert _fingerprint("bench", settings) != before
    assert _fingerprint("generate", {"stop": ["."]}) == stopped


def test_all_errors_at_once(tmp_path: Path) -> None:
    text = """
speed = 3
[[stage]]
name = "A b"
command = "train"
model = "small"
stepz = 4
[[stage]]
name = "b"
command = "teleport"
optional = "no"
[[stage]]
name = "c"
command = "eval"
directory = "@later"
threads = "many"
[[stage]]
name = "later"
command = "data simulate"
megabytes = 0
seed = -1
[[stage]]
name = "d"
command = "train"
corpus = [""]
steps = -4
"""
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path, text))
    message = str(caught.value)
    for part in ("'speed'", "stage 1", "'stepz'", "'teleport'", "'@later' names no earlier stage", "'threads'"):
        assert part in message, part
    for part in ("optional must be true or false", "'megabytes'", "'seed'", "'steps'", "'corpus': the path is empty"):
        assert part in message, part
    assert "\n" not in message


def test_out_is_the_folder_of_all_stages(tmp_path: Path) -> None:
    text = """
[[stage]]
name = "first"
command = "data sample"
checkpoint = "@out/elsewhere"
"""
    recipe = load_recipe(write(tmp_path, text), tmp_path / "there")
    assert recipe.stages[0].settings["checkpoint"] == tmp_path / "there" / "elsewhere"
    for folder in ("@out", tmp_path / "there"):
        reads = f'{text}[[stage]]\nname = "all"\ncommand = "data tokens"\ntokenizer = "small"\nfiles = "{folder}"\n'
        assert load_recipe(write(tmp_path, reads), tmp_path / "there").stages[1].needs == ("first",)
    with pytest.raises(UsageError, match="the name is not free"):
        load_recipe(write(tmp_path, text.replace("first", "out")))


def test_a_failing_stage_is_named_and_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no"):
        load_recipe(write(tmp_path, "name = 'x'"))
    text = '[[stage]]\nname = "a"\ncommand = "verify"\ndirectory = "nowhere"\n'
    with pytest.raises(ArtifactError, match="stage 'a': nowhere"):
        run(write(tmp_path, text), tmp_path / "out")


@pytest.mark.parametrize("state", ["state", "state.old"])
def test_an_interrupted_stage_is_taken_up_again(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD.replace("steps = 1", "steps = 2"))
    with interrupted_in_step(1), pytest.raises(InterruptedRun, match=r"'model': interrupted; run .*again to continue$"):
        run(path, tmp_path / "out")
    partial = tmp_path / "out" / "model.partial"
    (partial / "state").rename(partial / state)  # as if killed between the two renames of a save
    result = run(path, tmp_path / "out")
    assert [row.cached for row in result.stages] == [True, False, False]
    assert "continuing the interrupted run" in capsys.readouterr().err


def test_a_list_may_be_written_as_its_only_item(tmp_path: Path) -> None:
    recipe = GOOD.replace('["@corpus/train.jsonl"]', '"@corpus/train.jsonl"')
    recipe += '[[stage]]\nname = "fits"\ncommand = "fit"\nteacher = "@model"\ntarget = "host"\nvocab_size = 260\n'
    stages = load_recipe(write(tmp_path, recipe + "limit = { file_mb = 1 }\n"), tmp_path).stages
    assert stages[1].settings["corpus"] == [tmp_path / "corpus" / "train.jsonl"] and stages[1].needs == ("corpus",)
    assert stages[3].settings["vocab_size"] == [260] and stages[3].settings["limit"] == {"file_mb": 1}


def test_defaults_fill_in(tmp_path: Path) -> None:
    text = GOOD.replace("steps = 1\n", "").replace('"two"\n', '"two"\n[defaults.train]\nsteps = 3\nseed = 5\n')
    _, model, score = load_recipe(write(tmp_path, text)).stages
    assert model.settings["steps"] == 3 and model.settings["seed"] == 5 and "seed" not in score.settings
    with pytest.raises(UsageError, match=r"defaults.fly"):
        load_recipe(write(tmp_path, "[defaults.fly]\nx = 1\n" + GOOD.replace('name = "two"\n', "")))


FAKE_SBATCH = """#!/bin/bash
# Runs the jobs of an array at once, here.
echo "$@" >> "$(dirname "$0")/calls"
for option in "$@"; do case "$option" in --array=0-*) last="${option#--array=0-}";; esac; done
job=$(cat)
for ((task = 0; task <= last; task++)); do SLURM_ARRAY_TASK_ID=$task bash -c "$job" >&2 & done
wait
echo "17;cluster"
"""
BRANCHES = f"""{GOOD}
[[stage]]
name = "other"
command = "data simulate"
megabytes = 0.1
"""


def test_a_recipe_runs_as_arrays_of_slurm_jobs_and_a_lost_stage_alone_runs_again(tmp_path: Path) -> None:
    path, out, script = write(tmp_path, BRANCHES), tmp_path / "$out `1`", tmp_path / "jobs.sh"
    written = run(path, out, slurm=script)
    assert not written.stages and not out.exists()
    text, command = script.read_text(encoding="utf-8"), f"{sys.executable} -m sportsllm.cli run"
    assert text.count(command) == 1
    script.write_text(text.replace(command, f"{program(tmp_path / 'program')} run"), encoding="utf-8")
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(FAKE_SBATCH, encoding="utf-8")
    sbatch.chmod(0o755)
    environment = os.environ | {"PATH": f"{sbatch.parent}:{os.environ['PATH']}"}

    def submit() -> dict[str, int]:
        subprocess.run(["bash", script, "--time=1:00"], env=environment, check=True, capture_output=True)
        return {name: (out / name / "manifest.json").stat().st_mtime_ns for name in ("corpus", "other", "model")}

    first = submit()
    calls = (sbatch.parent / "calls").read_text(encoding="utf-8").splitlines()
    assert ["--array=0-1" in calls[0], "--dependency=afterany:17" in calls[0]] == [True, False]
    assert all(option in calls[1] for option in ("--array=0-0", "--dependency=afterany:17", "--time=1:00"))
    shutil.rmtree(out / "other")
    second = submit()
    assert {name for name in first if first[name] != second[name]} == {"other"}
    with pytest.raises(ConflictError, match="another --slurm FILE"):
        run(path, out, slurm=script)
