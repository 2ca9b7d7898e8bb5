"""Gives a base model a chat template and the special tokens that the template writes."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.files import read_json, write_json
from sportsllm.formats.checkpoint import copy_tokenizer, write_generation_config
from sportsllm.models.description import EMBEDDING, HEAD
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.chat import find_template
from sportsllm.text.tokenizer import read_tokenizer, to_json

_STEP = 32  # rows come in multiples of this, the smallest block of the integer kernels
FORMATS = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{{ bos_token or '' }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
}
"""Special tokens, the last of which ends a turn, and the template, by name."""


def check_format(checkpoint: Path | None, name: str | None, lora: bool) -> None:
    """Refuse a format that a training cannot give its model.

    Raises:
        UsageError: the name is not known, the model is new or has a template, or only adapters are trained.
    """
    if name is None:
        return
    if name not in FORMATS:
        raise UsageError(f"--chat-template {name}: use one of {', '.join(FORMATS)}")
    if checkpoint is None:
        raise UsageError(f"--chat-template {name}: give a CHECKPOINT; a model learns the language before it chats")
    if find_template(checkpoint)[0] is not None:
        raise UsageError(f"--chat-template {name}: {checkpoint} has a chat template; leave it out")
    if lora:
        raise UsageError(f"--chat-template {name}: adapters do not train the new tokens' rows; leave --lora-rank out")


@torch.no_grad()
def with_format(model: SportsLLM, checkpoint: Path, directory: Path, name: str) -> SportsLLM:
    """The model with rows for the format's new tokens; its tokenizer with the template is written to `directory`.

    New rows of embedding and head are the mean of the others, so that no new token is likelier than a usual one
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Reserved tokens fill the table up to a multiple of 32.
    The token that ends a turn also ends a text.
    """
    special, template = FORMATS[name]
    copy_tokenizer(checkpoint, directory)
    path = directory / "tokenizer.json"
    tokenizer = read_tokenizer(path, model.config.vocab_size)
    used = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    added = tokenizer.add_special_tokens(list(special))
    if (size := used + added) > model.config.vocab_size:
        free = (f"<|reserved_{number}|>" for number in count())
        fill = (token for token in free if tokenizer.token_to_id(token) is None)
        tokenizer.add_special_tokens(list(islice(fill, -size % _STEP)))
    rows = max(model.config.vocab_size, -(-size // _STEP) * _STEP)
    path.write_text(to_json(tokenizer, pretty=True), encoding="utf-8")
    end = {"eos_token": special[-1]}
    settings, names = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    write_json(settings, (read_json(settings) if settings.exists() else {}) | end | {"chat_template": template})
    if names.exists():
        write_json(names, read_json(names) | end)
    stops = dict.fromkeys([tokenizer.token_to_id(special[-1]), *model.config.stop_token_ids])
    wider = SportsLLM(model.config.with_changes(vocab_size=rows, eos_token_id=tuple(stops)))
    write_generation_config(directory, wider.config)

    def longer(table_VD: Tensor) -> Tensor:
        return torch.cat([table_VD[:used], table_VD[:used].mean(dim=0).expand(rows - used, -1)])

    state = model.state_dict()
    tables = {f"{EMBEDDING}.weight", f"{HEAD}.weight"} & state.keys()
    wider.load_state_dict(state | {table: longer(state[table]) for table in tables})
    log(f"{name}: added {added} tokens; the vocabulary has {rows:,} rows")
    return wider.eval()
