"""Bad input to every command: one line that says what to do, and the documented exit code."""

from pathlib import Path

import pytest

from sportsllm.commands import COMMANDS
from sportsllm.errors import ArtifactError, ConflictError, ResourceError, UsageError
from tests.support.command_line import CommandLine

USAGE, ARTIFACT, CONFLICT = UsageError.exit_code, ArtifactError.exit_code, ConflictError.exit_code
MISSING, MODEL, TEXT, TAKEN, NEW = "{missing}", "{model}", "{text}", "{taken}", "{new}"
LONGEST = 400
CASES: list[tuple[str, int, str]] = [
    # missing paths
    (f"train --model tiny-300k --corpus {MISSING} --out {NEW}", ARTIFACT, "missing"),
    (f"train {MISSING} --corpus {TEXT} --out {NEW}", ARTIFACT, "missing"),
    (f"distill --teacher {MISSING} --student tiny-1m --out {NEW}", ARTIFACT, "missing"),
    (f"distill --teacher {MODEL} --student {MISSING} --out {NEW}", USAGE, "missing"),
    (f"prune {MISSING} --params 0.5 --out {NEW}", ARTIFACT, "missing"),
    (f"quantize {MISSING} --out {NEW}", ARTIFACT, "missing"),
    (f"export {MISSING} --out {NEW}", ARTIFACT, "missing"),
    (f"generate {MISSING}", ARTIFACT, "missing"),
    (f"serve {MISSING}", ARTIFACT, "missing"),
    (f"eval {MISSING} --text {TEXT}", ARTIFACT, "missing"),
    (f"eval {MODEL} --text {MISSING}", ARTIFACT, "missing"),
    (f"eval {MODEL} --text {TEXT} --against {MISSING}", ARTIFACT, "missing"),
    (f"bench {MISSING}", ARTIFACT, "missing"),
    (f"fit --teacher {MISSING} --target raspberry-pi-5 --out {NEW}", ARTIFACT, "missing"),
    (f"plan {MISSING}", USAGE, "missing"),
    (f"inspect {MISSING}", USAGE, "missing"),
    (f"report {MISSING}", USAGE, "missing"),
    (f"run {MISSING}.toml", USAGE, "missing.toml: not found"),
    (f"verify {MISSING}", ARTIFACT, "missing"),
    (f"data tokens {MISSING} {TEXT}", ARTIFACT, "missing"),
    (f"data sample {MISSING} --out {NEW}", ARTIFACT, "missing"),
    # wrong types
    (f"train --steps many --corpus {TEXT}", USAGE, "--steps"),
    (f"train --tokens 10x --corpus {TEXT}", USAGE, "10x"),
    (f"generate {MODEL} --temperature hot", USAGE, "--temperature"),
    (f"bench {MODEL} --set rounds=0", USAGE, "rounds=0"),
    (f"bench {MODEL} --provider webgpu --against genai", USAGE, "--against measures all runtimes on the CPU"),
    ("plan small --tokens many", USAGE, "many"),
    ("data simulate --megabytes lots", USAGE, "--megabytes"),
    ("data simulate --megabytes inf", USAGE, "--megabytes is inf; give a finite number"),
    ("devices calibrate --rounds 0 --out x.toml", USAGE, "--rounds"),
    # unknown names, with the nearest one
    ("trian", USAGE, "Did you mean 'train'"),
    ("simulate --out x", USAGE, "no command 'simulate'; did you mean data simulate?"),
    ("train --modle small", USAGE, "did you mean --model"),
    (f"eval {MODEL} --quite", USAGE, "did you mean --quiet?"),
    (f"train --model smal --corpus {TEXT} --out {NEW}", USAGE, "did you mean small?"),
    (f"train --model huge --corpus {TEXT} --out {NEW}", USAGE, "choose one of small, small-32k"),
    (f"bench {MODEL} --target raspberry-pi-6", USAGE, "did you mean raspberry-pi-5?"),
    ("inspect smalll", USAGE, "is no directory and no shape; did you mean small?"),
    ("devices show raspbery-pi-5", USAGE, "did you mean raspberry-pi-5?"),
    (f"quantize {MODEL} --out {NEW} --method gptqq", USAGE, "choose one of rtn, mse, balance, gptq"),
    (f"export {MODEL} --out {NEW} --format onxn", USAGE, "onnx"),
    (f"export {MODEL} --out {NEW} --dtype q4_k_m", USAGE, "it needs --format gguf"),
    (f"export {MODEL} --out {NEW} --format gguf --dtype bf16", USAGE, "--dtype 'bf16'"),
    (f"distill --teacher {MODEL} --student {MODEL} --kl-weight often", USAGE, "--kl-weight: must be a number"),
    (f"prune {MODEL} --out {NEW} --params 0.5 --set try_rates=maybe --calibration {TEXT}", USAGE, "true or false"),
    (f"distill --teacher {MODEL} --set kl_weight=1", USAGE, "use the option --kl-weight instead"),
    (f"train {MODEL} --steps 1 --learning-rate -1", USAGE, "--learning-rate is -1.0; it must be above 0"),
    # values of the wrong size, by the name that was typed
    (f"generate {MODEL} --top-p 3", USAGE, "--top-p is 3.0; it must be in (0, 1]"),
    (f"train --model tiny-300k --vocab-size 99 --corpus {TEXT} --out {NEW}", USAGE, "--vocab-size is 99; 256 bytes"),
    (f"train --model tiny-300k --set kv_heads=3 --corpus {TEXT}", USAGE, "--set kv_heads=3: heads 2 is not"),
    (f"train --model tiny-300k --batch-size 1.5 --corpus {TEXT}", USAGE, "--batch-size: must be a whole number ("),
    ("plan small --set group_size=48", USAGE, "--set group_size is 48; use one of 16, 32"),
    ("plan small --set cache_tokens=5000", USAGE, "--set cache_tokens=5000 is more than the context"),
    (f"eval {MODEL} --text {TEXT} --text-field txet", USAGE, "no record has such a field; the fields are text; did"),
    # options of another command, and directories of another kind
    (f"export {MODEL} --out {NEW} --bits 4", USAGE, "no option --bits; quantize has it"),
    (f"eval {MODEL} --corpus {TEXT}", USAGE, "no option --corpus; train, distill and prune have it"),
    (f"eval {MODEL} --text {TEXT} --loss-on all", USAGE, "no option --loss-on; write --set loss_on=VALUE"),
    (f"eval {MODEL} --text {TEXT} --text-field", USAGE, "--text-field needs the name"),
    (f"generate {MODEL} --text-field body", USAGE, "--text-field is for train, distill"),
    ("--loss-on all", USAGE, "no option --loss-on (see sportsllm-compress --help)"),
    (f"plan {MODEL} --file-mb 60", USAGE, "no option --file-mb; write --limit file_mb=VALUE"),
    (f"serve {MODEL}", ARTIFACT, "not an export"),
    (f"verify {TAKEN}", ARTIFACT, "only finished output has one"),
    (f"report {TAKEN}", ARTIFACT, "holds no model"),
    # options that exclude each other
    (f"train --model tiny-300k --corpus {TEXT} --out {NEW} --steps 1 --tokens 5", USAGE, "--tokens"),
    (f"prune {MODEL} --out {NEW} --params 1 --size-mb 1 --layers 1 --calibration {TEXT}", USAGE, "--layers, not both"),
    (f"quantize {MODEL} --out {NEW} --bits 4 --size-mb 1 --set bits_per_weight=5", USAGE, "not both"),
    (f"quantize {MODEL} --out {NEW} --method rtn --qad 1k --corpus {TEXT} --calibration {TEXT}", USAGE, "rtn uses no"),
    (f"quantize {MODEL} --out {NEW} --method rtn --valid {TEXT}", USAGE, "--valid: --method rtn reads no text"),
    (f"quantize {MODEL} --out {NEW} --qad 1k --corpus {TEXT} --set sequence=999", USAGE, "sequence=999 is longer"),
    (f"quantize {MODEL} --out {NEW} --qad 1k --corpus {TEXT} --set signals=x --set kl_weight=0", USAGE, "leave one of"),
    (f"quantize {MODEL} --out {NEW} --qad 1k", USAGE, "no training text is known; give --corpus"),
    (f"prune {MODEL} --out {NEW} --layers 1 --set finalists=2 --seed 1", USAGE, "--recover: --set finalists, --seed;"),
    (f"quantize {MODEL} --out {NEW} --seed 1", USAGE, "options of --qad: --seed; add"),
    (f"prune {MODEL} --out {NEW} --layers 1 --set scores={TEXT} --calibration {TEXT}", ARTIFACT, "no importance score"),
    (f"quantize {MODEL} --out {NEW} --device cuda", USAGE, "--device cuda: this PyTorch finds no CUDA GPU"),
    (f"export {MODEL} --out {NEW} --format gguf --kv-cache int8", USAGE, "--kv-cache"),
    # nothing asked for
    (f"prune {MODEL} --out {NEW} --calibration {TEXT}", USAGE, "say how small: --params"),
    (f"eval {MODEL}", USAGE, "--text"),
    (f"train --model tiny-300k --corpus {TEXT} --valid= --out {NEW}", USAGE, "--valid: the path is empty"),
    (f"eval {MODEL} --against {MODEL} --questions {TEXT}", USAGE, "--text"),
    # the output is there already
    (f"quantize {MODEL} --out {TAKEN} --method rtn", CONFLICT, "taken"),
    (f"prune {MODEL} --out {TAKEN} --intermediate 32 --calibration {TEXT}", CONFLICT, "taken"),
    (f"export {MODEL} --out {TAKEN}", CONFLICT, "taken"),
    (f"train --model tiny-300k --corpus {TEXT} --out {TAKEN}", CONFLICT, "taken"),
    (f"distill --teacher {MODEL} --student {MODEL} --corpus {TEXT} --out {TAKEN}", CONFLICT, "taken"),
    (f"data simulate --out {TAKEN}", CONFLICT, "taken"),
    (f"data sample {MODEL} --out {TAKEN}", CONFLICT, "taken"),
    (f"data sample {MODEL} --out {NEW} --chat", USAGE, "leave --chat out"),
    (f"report {MODEL} --out {TEXT}.html", CONFLICT, "exists already; choose another --out or move it away"),
    (f"bench {TAKEN} --out /proc/b.json", ResourceError.exit_code, "/proc cannot be written"),  # by nobody
]


@pytest.mark.parametrize(("line", "code", "named"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_ends_in_one_line(
    line: str,
    code: int,
    named: str,
    cli: CommandLine,
    checkpoint: Path,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    corpus_file.with_name(f"{corpus_file.name}.html").touch()
    places = {"missing": "missing", "model": checkpoint, "text": corpus_file, "taken": "taken", "new": "new"}
    found, out, err = cli(*(word.format(**places) for word in line.split()))
    errors = [text for text in err.splitlines() if text.startswith("error: ")]
    assert found == code, err
    assert len(errors) == 1 and named in errors[0] and len(errors[0]) <= LONGEST, err
    assert "Traceback" not in err and not out.strip()
    assert code == CONFLICT or ("training from" not in err and "calibration on" not in err), "refused first"
    assert not (tmp_path / "new").exists()


def test_every_command_has_a_case() -> None:
    tried = {line.partition(" -")[0] for line, _, _ in CASES}
    assert [name for name in COMMANDS if not any(line.startswith(name) for line in tried)] == ["devices list"]


@pytest.mark.parametrize(
    "verb", ["train", "prune", "quantize", "export", "data sample", "distill --teacher . --student"]
)
def test_an_export_is_no_checkpoint(verb: str, cli: CommandLine, exported: Path, tmp_path: Path) -> None:
    cli.refuses(ARTIFACT, "is an export; give the checkpoint", *verb.split(), exported, "--out", tmp_path / "new")
