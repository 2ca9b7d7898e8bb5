"""The check of a GPU, run on the CPU with tiny shapes: all of the line, and the CPU agrees with itself."""

from pathlib import Path

import pytest

from benchmarks.labels import read_csv
from benchmarks.studies.gpu_check import COLUMNS, main, peak_flops_per_s

TINY = {"model": "tiny-300k", "student": "tiny-300k", "steps": 2, "batch_size": 2, "sequence": 64, "samples": 2}


@pytest.mark.slow
def test_the_cpu_agrees_with_itself(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert main(given, TINY | {"megabytes": 0.02}, {"tiny-300k": (2, 5), "tiny-1m": (1, 5)}, 64) == 0
    (table,) = (tmp_path / "out").glob("*.csv")
    rows = read_csv(table)
    assert tuple(rows[0]) == COLUMNS
    compared, measured = [row for row in rows if row["bound"]], [row for row in rows if row["tokens_per_s"]]
    parts = ["train", "distill", "prune", "quantize", "quantize, codes that differ", "eval"]
    assert [row["part"] for row in compared] == parts and {row["difference"] for row in compared} == {"0"}
    assert len(measured) == 2 and all(float(row["tokens_per_s"]) > 0 for row in measured)


def test_peaks_are_those_of_the_described_cards() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3") == peak_flops_per_s("NVIDIA H200") == 989.4e12
    assert peak_flops_per_s("NVIDIA GeForce RTX 3060") is not None
    others = ("AMD EPYC 9B14", "NVIDIA GeForce RTX 3060 Ti", "NVIDIA H100 PCIe")
    assert list(map(peak_flops_per_s, others)) == [None, None, None]
