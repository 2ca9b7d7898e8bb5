"""The front matter of model cards against PyYAML and huggingface_hub, which read it on the hub's side."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData

from sportsllm.formats.front_matter import front_matter, read_front_matter

yaml = pytest.importorskip("yaml")
HARD = [
    "apache-2.0", "owner/name", "no", "Yes", "null", "~", "1.0", "1e5", "0x1f", "2020-01-01", "a: b", "- x", "# x",
    "a #b", 'say "hi"', "it's", "trailing ", "東京", "{x}", "[y]", "*z", "&z", "!z", "|", ">", "%", "@", "`", "a\\b",
    "12:30", "y",
]  # fmt: skip


@pytest.mark.parametrize("text", HARD)
def test_yaml_reads_what_was_written(text: str, tmp_path: Path) -> None:
    block = front_matter({"license": text, "language": [text, "en"], "base_model": "", "tags": []})
    assert yaml.safe_load(block.removeprefix("---\n").removesuffix("---\n")) == {
        "license": text, "language": [text, "en"]
    }  # fmt: skip
    (tmp_path / "README.md").write_text(block + "\n# Name\n", encoding="utf-8")
    assert read_front_matter(tmp_path / "README.md") == {"license": text, "language": [text, "en"]}


def test_cards_of_the_hubs_own_library_are_read(tmp_path: Path) -> None:
    data = ModelCardData(
        license="other", license_name="it's mine: all of it", language=["en", "no"], base_model="owner/name", tags=["a"]
    )
    card = tmp_path / "README.md"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n# Name\n").save(card)
    found = read_front_matter(card)
    assert found == {key: value for key, value in data.to_dict().items() if key in found}
    assert {"license", "license_name", "language", "base_model", "tags"} <= found.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no block", {}),
        ("---\nlicense: mit\n", {}),
        ("---\nlicense: mit # ours\nlanguage: [en, 'de']\nlanguages:\n  - fr\n---\n", {
            "license": "mit", "language": ["en", "de"], "languages": ["fr"],
        }),
        ("---\nlicense:\nmodel-index:\n- name: x\n  results: []\nwidget: {text: a}\nnote: >\n  long\n---\n", {
            "model-index": ["name: x"],
        }),
    ],
)  # fmt: skip
def test_other_forms(text: str, expected: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert read_front_matter(tmp_path / "README.md") == expected
    assert read_front_matter(tmp_path / "none.md") == {}
