"""The files that loaders read beside the graph."""

from export.layout import GRAPH_FILE, genai_config, not_opened_by
from sportsllm.models.config_records import Experts, Selection
from sportsllm.models.presets import preset
from tests.support.export_models import TINY


def test_genai_settings_name_what_the_graph_has() -> None:
    settings = genai_config(TINY.with_changes(eos_token_id=(1, 5), pad_token_id=None), "llama")
    assert settings["model"]["decoder"]["filename"] == GRAPH_FILE
    assert settings["model"]["decoder"]["inputs"]["past_key_names"] % 1 == "past_key_values.1.key"
    assert settings["model"]["eos_token_id"] == [1, 5] and "pad_token_id" not in settings["model"]
    assert settings["search"]["max_length"] == 64
    longer = genai_config(TINY.with_changes(max_position_embeddings=131_072), "llama")
    assert longer["model"]["context_length"] == 131_072
    assert longer["search"]["max_length"] == 1_024


def test_who_cannot_open_an_export_is_said() -> None:
    assert not_opened_by(TINY) is None
    own = not_opened_by(TINY.with_changes(mlp_kind="gelu"))
    assert own is not None and "onnxruntime-genai and this program can" in own
    mixtral = TINY.with_changes(mlp_kind="experts", experts=Experts(4, 2))
    assert "optimum cannot open the export" in str(not_opened_by(mixtral))
    selected = preset("tiny-1m").with_changes(attention_kind="selected", selection=Selection())
    for config, cached in (
        (preset("tiny-latent"), "latent vectors"),
        (preset("lstm-1m"), "hidden and cell vectors"),
        (selected, "selected_key, selected_value and selected_index vectors"),
    ):
        line = not_opened_by(config)
        assert line is not None and line.startswith(cached) and line.endswith("runs in this program alone")
