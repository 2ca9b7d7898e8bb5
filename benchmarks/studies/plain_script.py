"""Are `prune --recover` and `distill` better than the plain script that anybody can write?

    python -m benchmarks.studies.plain_script TEACHER... --work DIR --out benchmarks/results/gauntlet

The plain script: KL divergence from the teacher's logits, AdamW with warm-up and cosine, `transformers` in bfloat16
(float32 where that is emulated), at the best of three rates. It starts from the same student: the teacher cut to two
thirds, that shape with random weights, or trained on the text. It reads as many tokens, then as many as take the time
of the whole command: processor seconds of one thread, which other programs change least; the script's without the cut.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.labels import csv_text, read_csv
from benchmarks.measure.machine import machine
from sportsllm.commands import load_command
from sportsllm.console import output
from sportsllm.files import atomic_write_text
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.manifest import manifest_of
from sportsllm.inference.scoring import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.processors import set_threads
from sportsllm.text.conversations import plain_text
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.optimizers import computes_in

RATES = (4e-4, 1e-3, 3e-3)
STARTS = ("cut", "fresh", "trained")
COLUMNS = ("teacher", "start", "method", "learning_rate", "tokens", "seconds", "bits_per_byte", "over_teacher_percent",
           "processor", "date")  # fmt: skip
_SEQUENCE, _BATCH, _REPORT_TOKENS = 512, 4, 65_536
Student = tuple[Path, Callable[[Path], object]]
"""A student before its distillation, and the command that distils it into a directory."""


def train_plainly(teacher: Path, student: Path, documents: list[str], rate: float, tokens: int, out: Path) -> None:
    """Train a student by the plain script, on the whole steps of four sequences that `tokens` fill, at least one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    random.seed(0)
    frozen = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).requires_grad_(False)
    trained = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).train()
    tokenizer = load_tokenizer(teacher)
    shuffled = random.sample(documents, len(documents))
    ids = [token for text in shuffled for token in (tokenizer.begin_id, *tokenizer.encode(text))]
    sequences = [ids[at : at + _SEQUENCE] for at in range(0, len(ids) - _SEQUENCE + 1, _SEQUENCE)]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    steps, left = max(1, tokens // (_BATCH * _SEQUENCE)), list[list[int]]()
    for step in range(steps):
        while len(left) < _BATCH:
            left += random.sample(sequences, len(sequences))
        batch = torch.tensor([left.pop() for _ in range(_BATCH)])
        warm = min(1.0, (step + 1) / max(1, steps // 20))
        optimizer.param_groups[0]["lr"] = rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        with torch.autocast("cpu", torch.bfloat16, enabled=computes_in(torch.bfloat16, torch.device("cpu"))):
            wanted, found = (one(batch).logits.float().log_softmax(-1).flatten(0, 1) for one in (frozen, trained))
        loss = torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(student, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "*.jsonl"))
    trained.save_pretrained(out)
    shutil.copy(student / "config.json", out)


def student_of(teacher: Path, start: str, share: float, tokens: int, work: Path) -> Student:
    """The student of a start, made in `work`."""
    cut, made = work / "cut", work / start
    prune, distill = load_command("prune"), partial(load_command("distill"), teacher=str(teacher))
    if not cut.exists():
        prune(teacher, out=cut, params=share)
    if start == "cut":
        sizes = manifest_of(cut).results["shape"]
        same = {name: sizes[name] for name in ("hidden", "intermediate", "heads", "kv_heads", "layers")}
        return cut, lambda out: prune(teacher, out=out, recover=tokens, **same)
    if start == "fresh":
        distill(student=str(cut), start=start, steps=0, out=made)
        return made, lambda out: distill(student=str(cut), start=start, tokens=tokens, out=out)
    manifest = manifest_of(teacher)
    text = {key: list(map(Path, manifest.paths(key))) for key in ("corpus", "valid")}
    load_command("train")(model=str(cut), tokenizer=teacher, tokens=tokens, out=made, **text)
    return made, lambda out: distill(student=str(made), tokens=tokens, out=out)


def compare(teacher: Path, start: str, share: float, tokens: int, work: Path) -> list[dict[str, object]]:
    """Rows of one start: the student, the toolkit's command, and the plain script with equal tokens and equal time."""
    corpus, valid = (list(map(Path, manifest_of(teacher).paths(key))) for key in ("corpus", "valid"))
    split = load_corpus(corpus, valid, checkpoints=[teacher])

    def bits(directory: Path, part: int = 1) -> float:
        model = load_checkpoint(directory)
        decoder, tokenizer = TorchDecoder(model), load_tokenizer(directory, model.config)
        return score_documents(decoder, tokenizer, split.parts()[part], max_tokens=_REPORT_TOKENS).bits_per_byte

    def plain(rate: float, read: int) -> tuple[Path, float]:
        out, began = work / f"{start}-{rate:g}-{read}", time.process_time()
        train_plainly(teacher, student, list(map(plain_text, split.train)), rate, read, out)
        return out, time.process_time() - began

    student, command = student_of(teacher, start, share, tokens, work)
    began = time.process_time()
    command(work / f"{start}-toolkit")
    seconds = time.process_time() - began
    tried = {rate: plain(rate, tokens) for rate in RATES}
    best = min(RATES, key=lambda rate: bits(tried[rate][0], part=0))
    longer = round(tokens * seconds / tried[best][1])
    made = [
        ("not distilled", "", 0, student, 0.0),
        ("toolkit", "", tokens, work / f"{start}-toolkit", seconds),
        ("plain script, equal tokens", best, tokens, *tried[best]),
        ("plain script, equal time", best, longer, *plain(best, longer)),
    ]
    here, whole, rows = machine(), bits(teacher), []
    for method, rate, read, directory, took in made:
        found = bits(directory)
        figures = (rate, read, round(took, 2), round(found, 4), round(100 * (found / whole - 1), 2))
        line = (teacher.name, start, method, *figures, here["processor"], here["measured_at"][:10])
        rows.append(dict(zip(COLUMNS, line, strict=True)))
    return rows


def main() -> None:
    """Compare the starts of every teacher that the table lacks, print their rows and append them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teachers", type=Path, nargs="+", help="Checkpoints whose manifests name their text.")
    parser.add_argument("--work", type=Path, required=True, help="Directory of everything that is made.")
    parser.add_argument("--out", type=Path, required=True, help="Directory of plain_script.csv.")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--params", type=float, default=0.67, help="Share of the parameters that stays.")
    parser.add_argument("--tokens", type=int, default=300_000)
    given = parser.parse_args()
    set_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports for a second what every method needs
    rows: list[Mapping[str, object]] = [*read_csv(table := given.out / "plain_script.csv")]
    known = {(row["teacher"], row["start"]) for row in rows}
    for teacher, start in product(given.teachers, given.starts):
        if (teacher.name, start) not in known:
            made = compare(teacher, start, given.params, given.tokens, given.work / teacher.name)
            rows += made
            atomic_write_text(table, csv_text(COLUMNS, rows))
            output().print(*(", ".join(map(str, row.values())) for row in made), sep="\n")


if __name__ == "__main__":
    main()
