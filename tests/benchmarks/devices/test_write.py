"""Device files that are written read back as the same device, or are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.devices import write
from benchmarks.devices.load import load_device
from benchmarks.devices.write import write_device
from benchmarks.predict.coefficients import resolve
from sportsllm.errors import ArtifactError
from tests.support.devices import reference_machine


def test_a_device_with_coefficients_reads_back(tmp_path: Path) -> None:
    """Names with control characters, quotes and letters beyond ASCII too: a processor's name is not the program's."""
    device = reference_machine()
    changes = {
        "coefficients": resolve(device),
        "title": 'a "chip"\x7f\\ \u00e9 \U0001f680',
        "description": "two\nlines",
    }
    device = device.model_copy(update=changes)
    path = tmp_path / "new" / "mine.toml"
    write_device(device, path, "A comment.")
    assert load_device(str(path)) == device
    assert "# A comment.\n" in path.read_text(encoding="utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["mine.toml"]


def test_a_file_that_does_not_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "read_device", lambda _: load_device("host"))
    with pytest.raises(ArtifactError, match=r"mine\.toml: not written"):
        write_device(reference_machine(), tmp_path / "mine.toml", "A comment.")
    assert not list(tmp_path.iterdir())
