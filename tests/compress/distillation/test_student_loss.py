"""What a student is taught: every objective against naive float64 code, and through the command's own function."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.cli.distill import distill as command
from compress.distillation.divergences import KLWeight
from compress.distillation.hidden_states import HiddenMatching, attach
from compress.distillation.on_policy import is_on_policy, prompts, write, written_batch
from compress.distillation.recovery import Recovery
from compress.distillation.run import distill
from compress.distillation.settings import Objective, chosen_kl_weight, parse_teachers
from compress.distillation.student_loss import guided_loss, train_student
from compress.pruning.run import Cut, _mapped, prune_stage
from compress.pruning.shapes import Shape
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import read_manifest
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.text.packing import IGNORE, Batch, tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer, train_tokenizer
from sportsllm.training.loop import TrainConfig
from sportsllm.training.lora import Adapters
from tests.support.models import tiny_model

CONFIG = TrainConfig(steps=3, batch_size=2, accumulation=1, sequence=32, precision="fp32", warmup=0)
FP32 = Objective(teacher_precision="fp32")
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def batch(index: int = 0) -> Batch:
    tokens = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(1))
    targets[0, 9] = IGNORE
    return Batch(tokens, targets, (10, 24, 48), index)


def log_probabilities(model: SportsLLM, of: Batch) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(of.tokens, documents=of.documents).double(), -1)


def naive(teachers: list[tuple[SportsLLM, float]], student: SportsLLM, of: Batch, weight: float) -> float:
    """weight * KL from the mixture of the teachers' probabilities, the rest cross-entropy; all logits, in float64."""
    log_s = log_probabilities(student, of)
    total = sum(share for _, share in teachers)
    p = torch.stack([share / total * log_probabilities(model, of).exp() for model, share in teachers]).sum(0)
    entropy = -log_s.gather(-1, of.targets.clamp(min=0)[..., None])[..., 0]
    losses = weight * (p * (p.log() - log_s)).sum(-1) + (1 - weight) * entropy
    return float((losses * (of.targets != IGNORE)).sum())


def test_several_teachers_are_mixed_by_weight_and_the_kl_weight_moves() -> None:
    teachers = [(tiny_model(0), 0.75), (tiny_model(1), 0.25)]
    student = tiny_model(3, **SMALL)
    objective = Objective(kl_weight=KLWeight(0.2, 0.8))
    loss = guided_loss(objective, teachers, batches=5)
    for index, weight in ((0, 0.2), (2, 0.5), (4, 0.8)):
        # Logits in float32: about 1e-6 of the largest, and of their exponentials.
        assert float(loss(student, batch(index)).detach()) == pytest.approx(
            naive(teachers, student, batch(), weight), rel=1e-5
        )


def test_matching_adds_its_share_and_reaches_the_projections() -> None:
    teacher, student = tiny_model(0), tiny_model(3, **SMALL)
    plain = guided_loss(FP32, [(teacher, 1.0)], 1)(student, batch())
    both = dataclasses.replace(FP32, hidden_weight=0.5, attention_weight=0.25)
    module = HiddenMatching(student.config, teacher.config)
    states: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.no_grad():
        for model, found in zip((student, teacher), states, strict=True):
            model.hidden(batch().tokens, batch().documents, states=found)
        hidden = float(module(*states, batch().targets))
    only_attention = guided_loss(dataclasses.replace(both, hidden_weight=0.0), [(teacher, 1.0)], 1)
    relations = float((only_attention(student, batch()) - plain).detach())
    assert relations > 0.0  # `tests/test_matching.py` holds it to a naive one
    attach(student, module)
    total = guided_loss(both, [(teacher, 1.0)], 1)(student, batch())
    assert float(total.detach()) == pytest.approx(float(plain.detach()) + 0.5 * hidden + relations, rel=1e-5)
    total.backward()
    assert all(projection.grad is not None for projection in module.projections)


def test_plain_cross_entropy_runs_no_teacher() -> None:
    objective = Objective(kl_weight=KLWeight(0.0, 0.0))
    assert not objective.asks_the_teacher and FP32.asks_the_teacher
    student = tiny_model(3)
    loss = guided_loss(objective, [], 1)(student, batch())
    assert float(loss.detach()) == pytest.approx(naive([(student, 1.0)], student, batch(), 0.0), rel=1e-5)


def test_the_student_writes_its_share_of_the_batches() -> None:
    chosen = [is_on_policy(0.25, seed=7, index=index) for index in range(2_000)]
    # Binomial: the standard deviation of the share is 0.0097.
    assert abs(sum(chosen) / 2_000 - 0.25) < 0.04
    assert chosen == [is_on_policy(0.25, seed=7, index=index) for index in range(2_000)]
    assert not any(is_on_policy(0.0, 7, index) for index in range(100))
    assert all(is_on_policy(1.0, 7, index) for index in range(100))


def test_prompts_are_the_longest_documents_starts() -> None:
    found = prompts(batch(), new_tokens=8, context=64)
    assert torch.equal(found, torch.stack([batch().tokens[0, 10:24], batch().tokens[1, :14]]))
    assert prompts(batch(), new_tokens=20, context=64).shape == (2, 4)
    with pytest.raises(UsageError, match="--on-policy-tokens 24 leaves no room"):
        prompts(batch(), new_tokens=24, context=64)


def test_what_is_written_follows_the_students_probabilities() -> None:
    # One prompt, many rows: the second token drawn must be distributed as softmax(student) says.
    student = tiny_model(3, vocab_size=16)
    with torch.no_grad():
        student.model.embed_tokens.weight.mul_(0.3)  # so that several tokens are likely, and none surely
    rows = 4_000
    text = write(student, torch.full((rows, 3), 5), 2, torch.Generator().manual_seed(0))
    first = text[:, 3]
    common = int(first.mode().values)
    second = text[first == common, 4]
    with torch.no_grad():
        expected = torch.softmax(student(torch.tensor([[5, 5, 5, common]]))[0, -1], -1)
    counts = torch.bincount(second, minlength=16)
    # Chi-squared with 15 degrees of freedom is above 45 once in ten thousand draws.
    enough = expected * len(second) > 5
    assert enough.sum() >= 4
    statistic = ((counts - expected * len(second)) ** 2 / (expected * len(second)))[enough].sum()
    assert statistic < 45


def test_only_what_was_written_is_scored_up_to_its_end() -> None:
    student = tiny_model(3)
    written = written_batch(student, batch(), 8, seed=1, end_id=None)
    width = written.tokens.shape[1] - 7
    assert (written.targets[:, : width - 1] == IGNORE).all() and (written.targets[:, width - 1 :] != IGNORE).all()
    assert torch.equal(written.targets[:, width - 1 : -1], written.tokens[:, width:])
    assert written.documents == (written.tokens.shape[1], 2 * written.tokens.shape[1])
    again = written_batch(student, batch(), 8, seed=1, end_id=int(written.targets[0, width + 1]))
    assert torch.equal(again.tokens, written.tokens)
    place = written.targets[0, width - 1 :].tolist().index(int(written.targets[0, width + 1]))
    assert (again.targets[0, width - 1 : width + place] != IGNORE).all()
    assert (again.targets[0, width + place :] == IGNORE).all()
    assert not torch.equal(written_batch(student, batch(1), 8, 1, None).tokens, written.tokens)


def test_an_on_policy_batch_weighs_as_the_one_it_replaces() -> None:
    teacher, student = tiny_model(0), tiny_model(3, **SMALL)
    objective = dataclasses.replace(FP32, divergence="reverse-kl", on_policy=1.0, on_policy_tokens=8)
    value = float(guided_loss(objective, [(teacher, 1.0)], 1, seed=4)(student, batch()).detach())
    written = written_batch(student, batch(), 8, seed=4, end_id=None)
    log_s, log_t = log_probabilities(student, written), log_probabilities(teacher, written)
    scored = written.targets != IGNORE
    mean = float(((log_s.exp() * (log_s - log_t)).sum(-1) * scored).sum() / scored.sum())
    assert value == pytest.approx(47 * mean, rel=1e-5)  # 48 tokens, one of them ignored


def run(teacher: Path, student: str, out: Path, corpus: Path, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "teacher": teacher, "student": student, "init": None, "corpus": [corpus], "valid": [], "out": out,
        "config": CONFIG, "objective": FP32,
    }  # fmt: skip
    return distill(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def student(tokenizer_directory: Path, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "student", tiny_model(seed=5, num_hidden_layers=1), _made(tokenizer_directory, tmp_path))
    return tmp_path / "student"


def _made(tokenizer_directory: Path, tmp_path: Path) -> Path:
    (tmp_path / "student").mkdir()
    return tokenizer_directory


def test_every_way_leaves_an_ordinary_checkpoint(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    weights = load_checkpoint(student).state_dict()
    ways: dict[str, dict[str, object]] = {
        "matched": {"objective": dataclasses.replace(FP32, hidden_weight=0.1, attention_weight=0.1)},
        "own-words": {"objective": dataclasses.replace(FP32, on_policy=1.0, on_policy_tokens=4, divergence="js")},
        "mixed": {"objective": dataclasses.replace(FP32, teachers=((checkpoint, 0.5),))},
        "lora": {"adapters": Adapters(2)},
        "stored": {"objective": dataclasses.replace(FP32, signals=tmp_path / "signals")},
    }
    for name, changes in ways.items():
        run(checkpoint, str(student), tmp_path / name, corpus_file, **changes)
        found = load_checkpoint(tmp_path / name).state_dict()
        assert found.keys() == weights.keys()
        moved = [key for key in weights if not torch.equal(found[key], weights[key])]
        frozen = {key for key in weights if "norm" in key or "embed" in key} if name == "lora" else set()
        assert moved and not frozen & set(moved), name
    settings = read_manifest(tmp_path / "mixed")["settings"]
    assert settings["teachers"] == [[str(checkpoint), 1 / 1.5], [str(checkpoint), 0.5 / 1.5]]
    assert read_manifest(tmp_path / "lora")["settings"]["lora"]["rank"] == 2


def test_signals_are_made_once_and_serve_pruning_too(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    objective = dataclasses.replace(FP32, signals=tmp_path / "signals")
    run(checkpoint, str(student), tmp_path / "one", corpus_file, objective=objective)
    made = (tmp_path / "signals" / "signals.json").stat().st_mtime_ns
    recovery = Recovery(CONFIG, (corpus_file,), objective=objective)
    shape = Shape(hidden=64, intermediate=64, heads=4, kv_heads=2, layers=1)
    result = prune_stage(
        checkpoint=checkpoint, out=tmp_path / "two", shape=shape, how=Cut(samples=2), calibration=[corpus_file],
        recovery=recovery,
    )  # fmt: skip
    assert result["steps"] == CONFIG.steps
    assert (tmp_path / "signals" / "signals.json").stat().st_mtime_ns == made
    with pytest.raises(ArtifactError, match="another --corpus"):
        other = tmp_path / "other.txt"
        other.write_text(corpus_file.read_text(encoding="utf-8") + "\nmore\n", encoding="utf-8")
        run(checkpoint, str(student), tmp_path / "three", other, objective=objective)
    assert not (tmp_path / "three").exists()


def test_recovery_matches_what_each_kept_layer_reads() -> None:
    objective = dataclasses.replace(FP32, hidden_weight=1.0)
    recovery = Recovery(CONFIG, (), objective=objective)
    assert _mapped(recovery, [0, 3, 4], 5).layer_map == "0:0,1:3,2:4,3:5"
    own = dataclasses.replace(objective, layer_map="3:5")
    assert _mapped(dataclasses.replace(recovery, objective=own), [0, 3, 4], 5) is own
    assert _mapped(dataclasses.replace(recovery, teacher=Path("other")), [0, 3, 4], 5) is objective
    assert _mapped(dataclasses.replace(recovery, objective=FP32), [0, 3, 4], 5) is FP32


def test_a_fresh_start_takes_the_shape_alone(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    result = run(checkpoint, str(student), tmp_path / "fresh", corpus_file, fresh=True)
    assert result["parameters"] == load_config(student).parameters and "bits_per_byte_before" not in result
    assert read_manifest(tmp_path / "fresh")["settings"]["start"] == "fresh"
    with pytest.raises(UsageError, match="makes its own weights"):
        run(checkpoint, "tiny-300k", tmp_path / "x", corpus_file, fresh=True, init=checkpoint)


def test_the_trained_model_has_no_helpers(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    words = load_tokenizer(checkpoint)
    texts = load_corpus([corpus_file], [])
    objective = dataclasses.replace(FP32, hidden_weight=0.1)
    student = tiny_model(3, **SMALL)
    directory = tmp_path / "run"
    directory.mkdir()
    trained, result, _ = train_student(
        student, teacher=checkpoint, objective=objective, texts=texts,
        documents=tokenize(texts.train, words), tokenizer=words, config=CONFIG,
        directory=directory, identity="x", resume=False, description="test",
    )  # fmt: skip
    assert result.steps == 3 and not hasattr(trained, "matching")


def test_adapters_and_matching_need_what_they_work_on(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--lora-rank adapts weights"):
        run(checkpoint, "tiny-300k", tmp_path / "out", corpus_file, adapters=Adapters(2))
    far = dataclasses.replace(FP32, hidden_weight=1.0, layer_map="0:0,9:1")
    with pytest.raises(UsageError, match="--layer-map has 9:1"):
        run(checkpoint, str(student), tmp_path / "out", corpus_file, objective=far)
    odd = dataclasses.replace(FP32, attention_weight=1.0, relation_heads=7)
    with pytest.raises(UsageError, match="--relation-heads 7"):
        run(checkpoint, str(student), tmp_path / "out", corpus_file, objective=odd)
    missing = dataclasses.replace(FP32, teachers=((tmp_path / "nobody", 1.0),))
    with pytest.raises(ArtifactError, match="--extra-teacher"):
        run(checkpoint, str(student), tmp_path / "out", corpus_file, objective=missing)
    assert not list(tmp_path.glob("out*"))


def test_another_tokenizers_teacher_cannot_be_mixed(
    checkpoint: Path, student: Path, texts: list[str], corpus_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    train_tokenizer(texts[:20], 384, other)
    save_checkpoint(other, tiny_model(1))
    with pytest.raises(ArtifactError, match="its tokenizer differs"):
        objective = dataclasses.replace(FP32, teachers=((other, 1.0),))
        run(checkpoint, str(student), tmp_path / "out", corpus_file, objective=objective)


def test_defaults_and_texts_of_flags() -> None:
    assert chosen_kl_weight(None, fresh=True) == KLWeight(0.9, 0.9)
    assert chosen_kl_weight(None, fresh=False) == KLWeight(0.5, 0.5)
    assert chosen_kl_weight("0.5:1", fresh=True) == KLWeight(0.5, 1.0)
    assert parse_teachers(["a=0.5", "b"]) == ((Path("a"), 0.5), (Path("b"), 1.0))


def test_the_command_takes_all_of_it(checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path) -> None:
    result = command(
        teacher=str(checkpoint), student=str(student), corpus=[corpus_file], out=tmp_path / "out",
        kl_weight="0.5:1", divergence="skew-kl", mix=0.2, teacher_precision="fp32", hidden_weight=0.1,
        layer_map="0:0,1:2", steps=2, batch_size=2, accumulation=1, sequence=32, lora_rank=2,
    )  # fmt: skip
    settings = read_manifest(tmp_path / "out")["settings"]
    assert result["steps"] == 2
    assert (settings["kl_weight"], settings["divergence"], settings["mix"]) == ("0.5:1", "skew-kl", 0.2)
    assert settings["learning_rate"] == pytest.approx(3e-3)  # adapters take ten times the rate
