"""A checkpoint seen with another context and rotary scaling. Imports no large library."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sportsllm.errors import SportsLLMError
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.json_files import read_json
from sportsllm.formats.manifest import MANIFEST, read_manifest
from sportsllm.models.config import ModelConfig


@contextmanager
def checkpoint_with(checkpoint: Path, config: ModelConfig) -> Iterator[Path]:
    """A directory of links to a checkpoint's files, whose config.json has the context and rotary scaling of `config`.

    It is `checkpoint` itself where nothing differs, and gone afterwards where it is not. Errors name `checkpoint`.

    Args:
        config: the checkpoint's, but for `max_position_embeddings` and `rope_scaling`.
    """
    if config == load_config(checkpoint):
        yield checkpoint
        return
    data = read_json(checkpoint / "config.json")
    data.pop("rope_parameters", None)  # transformers 5 keeps theta and scaling there
    scaling = config.rope_scaling
    data |= {
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else scaling.fields_used(),
    }
    if config.rope_local_theta is not None:
        data["rope_local_base_freq"] = config.rope_local_theta
    with tempfile.TemporaryDirectory() as folder:
        view = Path(folder) / checkpoint.resolve().name
        view.mkdir()
        changed = {"config.json": data}
        if (checkpoint / MANIFEST).exists():
            manifest = read_manifest(checkpoint)
            manifest["files"].pop("config.json", None)  # its size is another
            changed[MANIFEST] = manifest
        for path in checkpoint.resolve().iterdir():
            if path.name not in changed:
                (view / path.name).symlink_to(path)
        for name, content in changed.items():
            (view / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        try:
            yield view
        except SportsLLMError as error:
            raise type(error)(str(error).replace(str(view), str(checkpoint))) from None
