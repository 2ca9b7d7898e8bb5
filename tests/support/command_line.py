"""The command line as a person runs it, in this process."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from sportsllm.cli import main


@dataclass(frozen=True)
class CommandLine:
    """Calls give exit code, standard output and standard error."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = self.capsys.readouterr()
        return int(stop.value.code or 0), out, err

    def says(self, *arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
        """The JSON object of a command that ends with this code, and its words."""
        found, out, err = self(*arguments, "--json")
        assert found == code, err
        return dict(json.loads(out.splitlines()[-1])), err

    def result(self, *arguments: object) -> dict[str, Any]:
        return self.says(*arguments)[0]

    def refuses(self, code: int, text: str, *arguments: object) -> None:
        """The command fails with this code and one line that says why."""
        complains(self(*arguments), code, text)


def complains(result: tuple[int, str, str], code: int, text: str) -> None:
    """This exit code, and one line that holds the text."""
    assert result[0] == code, result
    lines = [line for line in result[2].splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and text in lines[0], result[2]
