"""Synthetic text: samples from a model, to calibrate and recover it where its training text is missing.

The samples come from the distribution that a recovered student has to learn (data-free distillation with generated
text: LLM-QAT, https://arxiv.org/abs/2305.17888). Shape suffixes: B texts, P tokens of a prompt.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sportsllm.console import progress_bar, say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.attention import KVCache
from sportsllm.models.hf_config import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.setup import training_device

CORPUS = "corpus.jsonl"


@torch.inference_mode()
def sample_continuations(model: SportsLLM, prompts_BP: Tensor, new_tokens: int, generator: torch.Generator) -> Tensor:
    """Prompts with `new_tokens` sampled from the model at temperature 1 behind each, (B, P + new_tokens).

    Args:
        model: in evaluation mode.
        prompts_BP: on the model's device.
        generator: on the CPU, so that a seed means the same on every device.
    """
    count, width = prompts_BP.shape
    cache = KVCache(model.config, count, width + new_tokens, device=prompts_BP.device)
    read, written = prompts_BP, [prompts_BP]
    for _ in range(new_tokens):
        logits = model.logits(model.hidden(read, cache=cache)[:, -1])
        chosen = torch.multinomial(torch.softmax(logits.float().cpu(), dim=-1), 1, generator=generator)
        read = chosen.to(prompts_BP.device)
        written.append(read)
    return torch.cat(written, dim=1)


def write_corpus(
    *, checkpoint: Path, out: Path, tokens: int, length: int | None = None, batch_size: int = 64, seed: int = 0
) -> dict[str, Any]:
    """Sample texts from a checkpoint at temperature 1, each from the begin token to a stop token or `length`.

    Args:
        checkpoint: unquantized.
        out: directory to make; holds corpus.jsonl, one `{"text": ...}` a line.
        tokens: write at least this many.
        length: most tokens of a text; the context if None.
        batch_size: texts written side by side.
        seed: of the draws.

    Returns:
        documents, tokens, bytes, ended (texts that the model ended itself), seconds and tokens_per_s.

    Raises:
        UsageError: a length beyond the context.
        ArtifactError: quantized, or the model ends every text at once.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; sample from the unquantized checkpoint")
    config = load_config(checkpoint)
    longest = config.max_position_embeddings if length is None else length
    if longest > config.max_position_embeddings:
        raise UsageError(f"--sequence is {length}; the model's context is {config.max_position_embeddings}")
    settings = {"checkpoint": str(checkpoint), "tokens": tokens, "length": longest, "batch_size": batch_size}

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        model = load_checkpoint(checkpoint).to(training_device())
        words = load_tokenizer(checkpoint, config)
        stops = {*config.stop_token_ids, words.begin_id}
        generator = torch.Generator().manual_seed(seed)
        begin = torch.full((batch_size, 1), words.begin_id, device=model.head_weight.device)
        counts = {"documents": 0, "tokens": 0, "bytes": 0, "ended": 0}
        with (directory / CORPUS).open("w", encoding="utf-8") as file, progress_bar("sample", tokens) as bar:
            while counts["tokens"] < tokens:
                before = counts["tokens"]
                for row in sample_continuations(model, begin, longest - 1, generator)[:, 1:].tolist():
                    end = next((place for place, token in enumerate(row) if token in stops), len(row))
                    text = words.decode(row[:end])
                    if not text.strip():
                        continue
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    counts["documents"] += 1
                    counts["tokens"] += end
                    counts["bytes"] += len(text.encode())
                    counts["ended"] += end < len(row)
                if counts["tokens"] == before:
                    raise ArtifactError(
                        f"{checkpoint}: the model produced only empty texts; check the checkpoint and its tokenizer"
                    )
                bar.advance(min(counts["tokens"], tokens) - before)
        if not counts["ended"]:
            say(f"no text ended within {longest} tokens: all are cut off")
        seconds = time.perf_counter() - started
        return {**counts, "seconds": seconds, "tokens_per_s": counts["tokens"] / seconds}

    return run_stage(out, Stage("sample", settings, [checkpoint], seed=seed), make)
