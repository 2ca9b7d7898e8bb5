"""How fast a preset trains here, and what share of a plain matrix product's speed that is.

    python -m benchmarks.studies.train_speed tiny-1m tiny-5m small --batch-size 4 --sequence 512
    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=3000 python -m benchmarks.studies.train_speed tiny-1m --parallel-batches 1 2

Medians of steps of the model and bursts of the product in turns in one process, so that a machine whose speed drifts
changes both. Several `--parallel-batches` take turns too, with steps of as many batches as the largest. The variables
are those that the command line sets for its threads.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.flops import training_flops_per_token
from benchmarks.studies.processes import add_integers, flag_parser
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from sportsllm.process_memory import peak_rss_bytes
from sportsllm.text.packing import PackedSequences, TokenizedDocuments
from sportsllm.training.loop import language_model_loss, resolve_precision, train_model
from sportsllm.training.settings import TrainConfig


def random_documents(vocab_size: int, tokens: int, seed: int = 0) -> TokenizedDocuments:
    """Documents of 100 to 900 random tokens, at least `tokens` in all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(100, 900, size=tokens // 100 + 2)
    ids = rng.integers(3, vocab_size, size=int(lengths.sum())).astype(np.uint32)
    return TokenizedDocuments(ids, np.cumsum(lengths), 4 * int(lengths.sum()))


def matmul_flops(dtype: torch.dtype, size: int = 1024, rows: int = 4096, seconds: float = 0.3) -> float:
    """Floating-point operations a second of one plain product, (rows, size) by (size, size)."""
    a, b = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        a @ b
        count += 1
    return count * 2 * rows * size * size / (time.perf_counter() - started)


def measure(name: str, rounds: int, parallel_batches: Sequence[int], **asked: Any) -> list[dict[str, Any]]:
    """Tokens a second of one preset, and its share of a product's speed: medians over `rounds`, for each number of
    batches computed side by side. `asked` are further settings of `TrainConfig`."""
    shape, batch_size, sequence = preset(name), asked["batch_size"], asked["sequence"]
    accumulation = max(parallel_batches)
    data = random_documents(shape.vocab_size, 4 * accumulation * batch_size * sequence)
    batches = PackedSequences(data, sequence, batch_size, seed=0)
    model = SportsLLM(shape)
    model.initialize(0)
    dtype = resolve_precision(asked["precision"], torch.device("cpu")) or torch.float32
    rates: dict[int, list[float]] = {count: [] for count in parallel_batches}
    products = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first warms up
            for count in rates:
                # A run of one step; the optimizer's state is made again, as in the first step of any run.
                config = TrainConfig(**asked, steps=1, accumulation=accumulation, parallel_batches=count)
                result = train_model(model, batches, language_model_loss, config, Path(folder), description=name)
                if number:
                    rates[count].append(result.tokens_per_s)
            products.append(matmul_flops(dtype))
    product = statistics.median(products)
    flops = training_flops_per_token(shape, min(round(len(data.ids) / len(data.ends)), sequence))
    return [
        {
            "model": name,
            "parameters": shape.parameters,
            "batch_size": batch_size,
            "accumulation": accumulation,
            "parallel_batches": count,
            "sequence": sequence,
            "precision": str(dtype).removeprefix("torch."),
            "optimizer": asked["optimizer"],
            "tokens_per_s": round(rate, 1),
            "tokens_per_s_range": [round(min(found), 1), round(max(found), 1)],
            "matmul_gflops": round(product / 1e9, 1),
            "share_of_matmul": round(rate * flops / product, 3),
            "peak_rss_bytes": peak_rss_bytes(),
        }
        for count, found in rates.items()
        for rate in [statistics.median(found)]
    ]


def main() -> None:
    """Measure the presets named on the command line, one JSON object a line and number of parallel batches."""
    parser = flag_parser(__doc__)
    parser.add_argument("models", metavar="PRESET", nargs="+", help="Presets to train.")
    lengths = {"batch_size": (4, "Sequences of one batch."), "sequence": (512, "Tokens of one sequence.")}
    add_integers(parser, **lengths, rounds=(5, "Timed rounds."), threads=(2, "CPU threads."))
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16 or fp16. [default: %(default)s]")
    parser.add_argument("--optimizer", default="adamw", help="adamw or muon. [default: %(default)s]")
    parser.add_argument(
        "--parallel-batches", type=int, nargs="+", default=[1], help="Batches computed side by side. [default: 1]"
    )
    settings = vars(parser.parse_args())
    torch.set_num_threads(settings.pop("threads"))
    for name in settings.pop("models"):
        for figures in measure(name, **settings):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
