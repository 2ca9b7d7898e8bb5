"""A base model from text: what its training takes, its start, and the training on next tokens.

It starts from random weights and a new tokenizer, or from a checkpoint, which may get a chat template and the special
tokens that the template writes.
"""

from __future__ import annotations

import time
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor

from sportsllm import processes
from sportsllm.console import duration, log
from sportsllm.errors import UsageError
from sportsllm.files import JsonObject, read_json, write_json
from sportsllm.formats.artifact import Stage
from sportsllm.formats.checkpoint import copy_tokenizer, load_checkpoint, save_checkpoint, write_generation_config
from sportsllm.formats.huggingface import checkpoint_with
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, described_shape
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.memory import active_matrix_parameters
from sportsllm.models.training_memory import TrainingStep, training_memory
from sportsllm.processors import training_device
from sportsllm.text.chat import find_template
from sportsllm.text.conversations import plain_text
from sportsllm.text.packing import PackedSequences
from sportsllm.text.split import DocumentStream, TextSplit
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer, read_tokenizer, to_json
from sportsllm.text.tokenizer_training import train_tokenizer
from sportsllm.text.tokens import token_cache, tokenize
from sportsllm.training.loop import language_model_loss, resolve_precision, train_model, training_record
from sportsllm.training.lora import add_adapters, merge_adapters
from sportsllm.training.optimizers import computes_in
from sportsllm.training.rate_trial import choose_rates
from sportsllm.training.settings import TrainConfig, fit_vocabulary
from sportsllm.training.sharding import place
from sportsllm.training.state import validation

_SHORT_S = 120.0  # a shorter run needs no warning
_REACHED = 0.4  # of the speed of large products; 0.21 to 0.57 were measured (docs/results/training.md)
_MUON_COST = 3.0  # Muon takes this many times channels / tokens of a step of the products' time
_SIZE, _TIMED_S = 1_024, 0.05
_TOKENIZER_CHARACTERS = 100_000_000  # of text that a tokenizer is trained on


def log_cost(model: ModelConfig, config: TrainConfig) -> None:
    """Log how long a run of more than two minutes will take, and the memory of a step, of each process if several run.

    All processes time a product at once. Stages of a pipeline wait for each other.
    """
    count = processes.count()
    stages = config.pipeline if count > 1 else 1
    among = config.tensor_parallel if config.shard and count > 1 else stages  # processes with the same sequences
    tokens = config.steps * config.tokens_per_step
    device = training_device(quiet=True)
    busy = count * config.accumulation / (config.accumulation + stages - 1)
    muon = _MUON_COST * model.hidden_size / config.tokens_per_step if config.optimizer == "muon" else 0.0
    seconds = training_seconds(model, tokens, config.precision) * (1 + muon) / busy
    if seconds < _SHORT_S:
        return
    step = TrainingStep(
        min(config.batch_size, max(1, config.batch_size * config.accumulation * among // count)),
        config.sequence,
        {None: "fp32", torch.float16: "fp16"}.get(resolve_precision(config.precision, device), "bf16"),
        config.optimizer,
        config.optimizer_bits,
        "cpu" if device.type == "cpu" else "gpu",
        config.checkpoint_activations,
        shards=count if config.shard else 1,
        tensor_parallel=among if config.shard else 1,
        stages=stages,
    )
    memory = f"{training_memory(model, step).total / 1e9:.1f} GB of memory{' in each process' * (count > 1)}"
    log(
        f"{tokens:,} tokens through {model.parameters:,} parameters: about {duration(seconds)} here, and {memory}; "
        "`plan --training` plans other devices, fewer --tokens take less"
    )


def training_seconds(model: ModelConfig, tokens: float, precision: str = "auto", forwards: int = 3) -> float:
    """Predicted time of a training here; one with a teacher of the model's size takes 4 `forwards`.

    A forward pass has two FLOPs a token for each parameter that it is multiplied by, a backward pass twice as many
    (https://arxiv.org/abs/2001.08361). Their speed is a share of that of a matrix product, timed for a moment.
    """
    device = training_device(quiet=True)
    dtype = resolve_precision(precision, device) or torch.float32
    parameters = active_matrix_parameters(model) + model.vocab_size * model.hidden_size
    return 2 * forwards * parameters * tokens / (_REACHED * _flops_per_s(device, dtype))


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The speed of a large matrix product."""
    size = _SIZE if computes_in(dtype, device) else _SIZE // 4  # a large product takes a minute if it is emulated
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])  # the first product is slow, and reading a value waits for a GPU
    products, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < _TIMED_S:
        float((matrix @ matrix)[0, 0])
        products += 1
    return 2 * size**3 * products / taken


def new_model(
    model: str,
    shape: ModelConfig,
    texts: TextSplit,
    config: TrainConfig,
    directory: Path,
    source: Path | None,
    digits: str,
) -> SportsLLM:
    """A model with random weights, for the tokenizer of `source` or a new one, which is written."""
    if source is not None:
        copy_tokenizer(source, directory)
    elif not (directory / "tokenizer.json").exists():
        sample = texts.train.sample(_TOKENIZER_CHARACTERS) if isinstance(texts.train, DocumentStream) else texts.train
        some = f" on {len(sample):,} of {len(texts.train):,} documents" if len(sample) < len(texts.train) else ""
        log(f"training a tokenizer of {shape.vocab_size:,} entries{some}")
        train_tokenizer(map(plain_text, sample), shape.vocab_size, directory, digits)
    tokenizer = load_tokenizer(directory)
    shape = fit_vocabulary(shape, tokenizer.vocab_size, model).with_changes(
        bos_token_id=tokenizer.begin_id, eos_token_id=tokenizer.end_id, pad_token_id=tokenizer.pad_id
    )
    log(f"{model}: {described_shape(shape)}")
    made = SportsLLM(shape)
    made.initialize(config.seed)
    return made


def load_start(
    checkpoint: Path, shape: ModelConfig, lora_rank: int | None, seed: int, chat_template: str | None, directory: Path
) -> tuple[SportsLLM, Path]:
    """The checkpoint's model, with adapters or a chat format if asked for, and the directory with its tokenizer."""
    with checkpoint_with(checkpoint, shape) as source:
        model = load_checkpoint(source)
    if lora_rank is not None:
        add_adapters(model, lora_rank, seed)
    if chat_template is None:
        return model, checkpoint
    return with_format(model, checkpoint, directory, chat_template), directory


def train_base_model(
    model: SportsLLM,
    tokenizer: TextTokenizer,
    texts: TextSplit,
    config: TrainConfig,
    out: Path,
    directory: Path,
    stage: Stage,
    source: Path,
    resume: bool,
) -> JsonObject:
    """Minimise next-token cross-entropy, and write the checkpoint; `source` has the tokenizer's files."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    place(model, training_device(), config.shard, config.tensor_parallel, config.pipeline)
    documents = tokenize(texts.train, tokenizer, token_cache(out))
    batches = PackedSequences(documents, config.sequence, config.batch_size, config.seed)
    scored = validation(texts, tokenizer, config, keep_start="init" in stage.settings)
    if config.try_rates and scored is not None:
        config = choose_rates(model, batches, language_model_loss, config, directory, scored.selection)
    result = train_model(
        model,
        batches,
        language_model_loss,
        config,
        directory,
        validation=scored,
        identity=stage.identity(),
        resume=resume,
        description=str(stage.settings.get("init") or stage.settings["model"]),
    )
    if stage.settings.get("lora_rank"):
        merge_adapters(model)
    save_checkpoint(directory, model, None if source == directory else source)
    return {**training_record(result, model, batches), "trained_parameters": trained, "sides": texts.sides}


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
