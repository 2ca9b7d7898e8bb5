"""The files that loaders read beside the graph."""

from export.loader_files import genai_config
from export.paths import GRAPH_FILE
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
