"""The words that a report ends with."""

from benchmarks.report.inputs import StageSummary
from benchmarks.report.markdown import stage_table
from benchmarks.report.savings import savings_line
from benchmarks.report.scores import Scored, commonest
from sportsllm.formats.manifest import Manifest


def stage(name: str, size: int, bits: float | None, ms: float, text: str = "a") -> StageSummary:
    bench = {"tpot_ms": {"512": {"p50": ms}}, "peak_rss_bytes": 80_000_000, "bits_per_byte": bits}
    bench |= {"text": [f"{text}.jsonl"], "text_digests": [text]}
    return StageSummary(name, "export", name, size_bytes=size, bits_per_byte=bits, bench=bench)


def test_first_and_last_measured_stage_are_compared() -> None:
    stages = [stage("teacher", 4_000_000, 0.8, 0.3), StageSummary("student", "distill", "x")]
    assert savings_line(stages) is None
    line = savings_line([*stages, stage("small", 600_000, 0.82, 0.15)])
    assert line is not None and line.startswith("small against teacher: 15% of the file (0.6")
    assert "tokens a second" not in line and "100% of the peak memory" in line  # speeds of two runs are no ratio
    assert line.endswith("2.5% more bits per byte (0.8200 against 0.8000)")


def test_what_is_not_known_is_left_out() -> None:
    line = savings_line([stage("teacher", 4_000_000, None, 0.3), stage("small", 1_000_000, 0.5, 0.3)])
    assert line is not None and "bits per byte" not in line and "25% of the file" in line


def test_qualities_of_different_texts_are_not_compared() -> None:
    """Neither in words nor silently in the table."""
    one, other = stage("teacher", 4_000_000, 0.8, 0.3), stage("small", 600_000, 0.5, 0.15, text="b")
    line = savings_line([one, other])
    assert line is not None and "15% of the file" in line and "bits per byte" not in line
    trained = StageSummary(
        "x", "train", "x", bits_per_byte=0.9, manifest=Manifest(settings={"valid": ["d/held_out.txt"]})
    )
    assert stage_table([one, one]).caption == ""
    assert stage_table([one, trained, other, one]).caption == (
        "Bits per byte are of 3 texts and compare only within one (1, 4: a.jsonl, by bench; 2: half of what is "
        "held out of held_out.txt; 3: b.jsonl, by bench)."
    )
    assert Scored.of(StageSummary("x", "train", "x")) is None
    assert commonest([None, Scored.of(trained), Scored.of(one)]) == Scored.of(one)
    assert commonest([Scored.of(trained), Scored.of(one), Scored.of(trained)]) == Scored.of(trained)
    assert commonest([None]) is None
