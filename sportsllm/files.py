"""Reads JSON, JSONL and TOML within bounds, writes text whole or not at all, and says what is wrong in a line.

Parsed data can be walked recursively, printed and written again: no container is nested deeper than `MAX_NESTING`,
every integer fits 64 bits, and every string is valid UTF-8. Imports no large library.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sportsllm.errors import ArtifactError, ConflictError, ResourceError, SportsLLMError, UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError

Record = TypeVar("Record")
JsonObject = dict[str, Any]

ADAPTER = "adapter_config.json"
"""The file of a LoRA adapter as the library PEFT writes it."""
STATE_DIRECTORY = "state"
"""In the directory of a run that is not finished: what --resume continues from."""
MAX_BYTES = 512_000_000
MAX_NESTING = 100
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHOWN_PROBLEMS, _SHOWN_CHARACTERS = 4, 60
_MEANT = {  # what pydantic says, and what it means to someone who wrote a flag or a recipe
    "Input should": "must",
    "Input is not": "must be",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table",
    "a valid ": "a ",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
_UNBOUNDED = str(int(1e30))  # model_max_length that transformers writes for a tokenizer without a limit


def read_json(path: Path) -> JsonObject:
    """Parse a file that holds a JSON object.

    Raises:
        ArtifactError: missing, damaged, beyond the bounds, or not an object.
    """
    if not path.is_file():
        if path.parent.suffix == ".partial":
            raise unfinished(path.parent)
        file = min(path.parent.glob("*.gguf"), default=None)
        wanted = "directory of a checkpoint or an export" if file is None else f"GGUF file itself, {file}"
        raise ArtifactError(f"{path}: not found; {adapter_hint(path.parent) or f'give the {wanted}'}")
    return as_object(parse_json(_read(path), path, "write the directory again"), path)


def parse_json(text: str | bytes, where: object, advice: str = "write it again") -> Any:
    """Parse JSON of any kind; `where` names its file in errors.

    Raises:
        ArtifactError: not JSON, not UTF-8, or beyond the bounds.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(decoded, parse_int=_integer)
        _check_nesting(data)
        if _SURROGATE.search(decoded):  # half of a pair is no text
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (RecursionError, ValueError) as error:
        raise ArtifactError(f"{where}: not valid JSON ({clip(_reason(error), 200)}); {advice}") from None
    return data


def read_json_lines(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """The objects of a JSONL file with their line numbers; empty lines are skipped.

    Raises:
        ArtifactError: a line is damaged or not an object.
    """
    for number, line in enumerate(_read(path).removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield number, as_object(parse_json(line, where, "fix or delete the line"), where)


def read_toml(path: Path, error_type: type[SportsLLMError] = ArtifactError) -> JsonObject:
    """Parse a TOML file.

    Raises:
        SportsLLMError: of `error_type`: missing, damaged, or beyond the bounds.
    """
    if not path.is_file():
        raise error_type(f"{path}: {'is a directory' if path.is_dir() else 'not found'}; give a .toml file")
    try:
        data = tomllib.loads(_read(path).decode("utf-8-sig"))
        _check_nesting(data, integers=True)
    except (RecursionError, ValueError) as error:
        raise error_type(f"{path}: not valid TOML ({clip(_reason(error), 200)}); correct it") from None
    return data


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """A JSON object, indented, with a newline at the end."""
    path.write_text(json.dumps(dict(data), indent=2) + "\n", encoding="utf-8")


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, then move it there in one step. Missing folders are made.

    Raises:
        OSError: the file cannot be written; what was at `path` before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of the system that names no file, as of a write to a full disk, names `path`."""
    try:
        yield
    except OSError as error:
        if re.search("requested and .* written", str(error)):  # by numpy's tofile
            raise OSError(errno.ENOSPC, "the disk is full", str(path)) from None
        error.filename = error.filename or str(path)
        raise


def visible_files(folder: Path) -> list[Path]:
    """All files of a folder in sorted order. Hidden ones are other programs' (.git, .cache, macOS' ._name)."""
    found = [item for item in sorted(folder.rglob("*")) if item.is_file()]
    return [item for item in found if not any(part.startswith(".") for part in item.relative_to(folder).parts)]


def require_new(path: Path, option: str = "--out") -> None:
    """Refuse, before the work, to replace a file, or a folder that cannot be written.

    Raises:
        ConflictError, ResourceError: something is there, or it cannot be written.
    """
    if path.exists():
        raise ConflictError(f"{path}: exists already; choose another {option} or move it away")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResourceError(f"{path}: {folder} cannot be written ({error.strerror}); choose another {option}") from None


def require_directory(directory: Path, wanted: str) -> None:
    """Refuse a path that is no directory; `wanted` is what to give instead, such as "a checkpoint".

    Raises:
        ArtifactError: nothing is there, or a file.
    """
    if not directory.is_dir():
        if Path(f"{directory}.partial").is_dir():
            raise unfinished(Path(f"{directory}.partial"))
        problem = "is a file, not a directory" if directory.is_file() else "no such directory"
        raise ArtifactError(f"{directory}: {problem}; give {wanted}, or make it first")


def has_state(partial: Path) -> bool:
    """Whether an unfinished directory keeps a state to resume from, also if its run was killed while it saved."""
    return any((partial / name).is_dir() for name in (STATE_DIRECTORY, f"{STATE_DIRECTORY}.old"))


def unfinished(partial: Path) -> ArtifactError:
    """The error of a directory that an interrupted command left, or that one is writing."""
    again = " with --resume" if has_state(partial) else ""
    return ArtifactError(f"{partial.with_suffix('')}: not finished yet; repeat the command that makes it{again}")


def adapter_hint(directory: Path) -> str | None:
    """What to do with a LoRA adapter whose base model is elsewhere; None if the directory holds none."""
    found = (directory / ADAPTER).exists()
    return "the directory holds a LoRA adapter; merge it into its base model and give the result" if found else None


def as_object(data: object, where: object) -> JsonObject:
    """`data` itself if it is a JSON object.

    Raises:
        ArtifactError: it is anything else.
    """
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: holds a {type(data).__name__}, not a JSON object")
    return data


def validate(kind: type[Record], data: object, where: object, advice: str = "correct it") -> Record:
    """Parsed data as a typed record: a dataclass or a pydantic model. `where` names its file in errors.

    Raises:
        ArtifactError: a field is missing, unknown or of the wrong type.
    """
    from pydantic import ValidationError

    try:
        record: Record = _adapter(cast(Any, kind)).validate_python(data)
    except ValidationError as error:
        raise ArtifactError(f"{where}: {describe(error)}; {advice}") from None
    return record


@cache  # making one of a large record takes 20 ms
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def describe(error: ValidationError) -> str:
    """The first problems of a record as `field: what is wrong, not VALUE`, and the number of the others."""
    found = []
    problems = error.errors(include_url=False, include_context=False)
    for item in problems[:_SHOWN_PROBLEMS]:
        field = ".".join(map(str, item["loc"]))
        message = {"missing": "is missing", "extra_forbidden": "unknown field"}.get(item["type"])
        if message is None:
            message = clip(plain(item["msg"].removeprefix("Value error, ")), 200)
            if isinstance(item["input"], str | int | float | None):
                message += f", not {clip(repr(item['input']))}"
        found.append(f"{clip(field)}: {message}" if field else message)
    more = len(problems) - _SHOWN_PROBLEMS
    return "; ".join([*found, f"and {more} more"] if more > 0 else found)


def plain(message: str) -> str:
    """What pydantic says of a value, without its jargon."""
    message = re.sub("(Input (?:should be|is not) a valid [a-z]+)(?:,| for) .*", r"\1", message)
    for said, meant in _MEANT.items():
        message = message.replace(said, meant)
    return message


def valid_text(text: str) -> str:
    """The text itself unless it has half of a surrogate pair, which Python makes of bytes that are no UTF-8.

    Raises:
        UsageError: there is one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{clip(ascii(text))} is not valid UTF-8; correct it") from None
    return text


def clip(text: object, longest: int = _SHOWN_CHARACTERS) -> str:
    """Text for an error message: one line, and the middle of a long one left out."""
    line = " ".join(str(text).split())
    half = (longest - 3) // 2
    return line if len(line) <= longest else f"{line[:half]}...{line[-half:]}"


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        raise ArtifactError(f"{path}: larger than {MAX_BYTES / 1e6:.0f} MB; give a smaller file")
    return path.read_bytes()


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested deeper than {MAX_NESTING}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return "half a surrogate pair, which is not text" if isinstance(error, UnicodeEncodeError) else str(error)


def _integer(digits: str) -> int:
    if len(digits) > 20 and digits != _UNBOUNDED:
        raise ValueError(f"an integer of {len(digits)} digits, which does not fit 64 bits")
    return int(digits) if digits == _UNBOUNDED else _fitting(int(digits))


def _fitting(value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the integer {value} does not fit 64 bits")
    return value


def _check_nesting(data: object, integers: bool = False) -> None:
    """Refuse containers nested too deeply and, if asked, integers beyond 64 bits."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(MAX_NESTING):
        items = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        for item in items if integers else ():
            if isinstance(item, int):
                _fitting(item)
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError
