"""Adapters against the sum of both matrices in float64, and fine-tuning from the command to the checkpoint."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.documents import read_documents
from sportsllm.text.packing import IGNORE, Batch
from sportsllm.text.split import TextSplit
from sportsllm.training.loop import language_model_loss
from sportsllm.training.lora import ALPHA, LoRALinear, add_adapters, merge_adapters
from sportsllm.training.settings import TrainConfig
from sportsllm.verbs.train import train
from tests.support.command_line import CommandLine
from tests.support.models import tiny_model
from tests.support.training import options_of

TOKENS = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(0))


def adapted(rank: int = 3, **changes: object) -> SportsLLM:
    """A tiny model whose adapters have moved: A as it starts, B random."""
    model = tiny_model(**changes)
    add_adapters(model, rank, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0.0, 0.01, generator=generator)
    return model


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}])
def test_gradients_equal_those_of_the_sum_in_float64(changes: dict[str, object]) -> None:
    model = adapted(3, **changes)
    targets = torch.cat([TOKENS[:, 1:], torch.full((2, 1), IGNORE)], dim=1)
    loss = language_model_loss(model, Batch(TOKENS, targets, (24, 48)))
    loss.backward()

    exact = {name: value.detach().double() for name, value in model.named_parameters()}
    factors = {name: exact[name].requires_grad_() for name in exact if "lora_" in name}
    plain = {name.replace(".base.", "."): value for name, value in exact.items() if name not in factors}
    for name in [name for name in factors if name.endswith("lora_a")]:
        matrix = name.removesuffix("lora_a")
        plain[f"{matrix}weight"] = plain[f"{matrix}weight"] + ALPHA / 3 * exact[f"{matrix}lora_b"] @ exact[name]
    without = tiny_model(**changes).double()  # a plain model, which test_families.py compares with `transformers`
    logits = functional_call(without, plain, (TOKENS,))
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
    expected.backward()

    assert len(factors) == 2 * 7 * 2
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in factors:
            # float32 (6e-8) through two layers of sums over up to 96 numbers.
            torch.testing.assert_close(parameter.grad.double(), factors[name].grad, rtol=1e-3, atol=1e-5)
            error = (parameter.grad.double() - factors[name].grad).norm() / factors[name].grad.norm()
            assert float(error) < 1e-5, name
        else:
            assert parameter.grad is None, name


def test_new_adapters_change_nothing_and_are_counted() -> None:
    model = tiny_model()
    with torch.inference_mode():
        before = model(TOKENS)
    add_adapters(model, 4)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS), before), "B is zero, and x + 0 is x"
    # rank * (inputs + outputs): q and o 64 + 64, k and v 64 + 32, gate, up and down 64 + 96, in two layers.
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160)
    layer = model.model.layers[1].mlp.down_proj
    assert isinstance(layer, LoRALinear) and layer.scale == ALPHA / 4
    assert 0.9 * 96**-0.5 < float(layer.lora_a.detach().abs().max()) <= 96**-0.5
    assert not torch.equal(layer.lora_a[:, :64], model.model.layers[0].mlp.up_proj.lora_a)


def test_merged_weights_are_the_sum_and_the_logits_stay() -> None:
    model = adapted()
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.inference_mode():
        before = model(TOKENS)
    merge_adapters(model)
    with torch.inference_mode():
        # The sum is rounded once a weight instead of once an output: 6e-8 of logits up to about 10, a few times.
        torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=2e-5)
    assert model.state_dict().keys() == tiny_model().state_dict().keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.named_parameters():
        if name.endswith("_proj.weight"):
            matrix = name.removesuffix("weight")
            a, b = tensors[f"{matrix}lora_a"].double(), tensors[f"{matrix}lora_b"].double()
            exact = tensors[f"{matrix}base.weight"].double() + ALPHA / 3 * b @ a
            # Rank 3: at most five roundings of 2**-24 of a number below 1.5.
            torch.testing.assert_close(value.detach().double(), exact, rtol=0, atol=5 * 1.5 * 2**-24)
            assert (value - tensors[f"{matrix}base.weight"]).abs().max() > 1e-3
        else:
            assert torch.equal(value, tensors[name]), name
    merge_adapters(model)  # nothing left to merge


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training and held-out text of another kind: instructions for cooks."""
    rng = random.Random(0)
    verbs, things = ("Chop", "Boil", "Peel", "Stir", "Fry"), ("onions", "carrots", "rice", "lentils", "apples")

    def line() -> str:
        return f"{rng.choice(verbs)} the {rng.choice(things)}, then wait {rng.randrange(2, 60)} minutes."

    folder = tmp_path_factory.mktemp("kitchen")
    for name, count in (("train", 60), ("valid", 8)):
        rows = [json.dumps({"text": " ".join(line() for _ in range(8))}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "train.jsonl", folder / "valid.jsonl"


@pytest.fixture(scope="module")
def trained(
    checkpoint: Path, corpus_file: Path, kitchen: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny checkpoint after a little training on matches."""
    out = tmp_path_factory.mktemp("trained") / "matches"
    config = TrainConfig(steps=30, batch_size=4, accumulation=1, sequence=64, learning_rate=5e-3, precision="fp32")
    train(checkpoint, corpus=[corpus_file], valid=[kitchen[1]], out=out, **options_of(config))
    return out


@pytest.mark.parametrize("lora", [False, True])
def test_fine_tuning_learns_a_new_text(
    lora: bool, trained: Path, kitchen: tuple[Path, Path], tmp_path: Path, cli: CommandLine
) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    arguments = ["train", trained, "--corpus", kitchen[0], "--valid", kitchen[1], "--out", tmp_path / "out"]
    arguments += ["--batch-size", 4, "--set", "accumulation=1", "--sequence", 64, "--set", "warmup=3", "--steps", 20]
    arguments += ["--lora-rank", 4] if lora else ["--learning-rate", 1e-3]
    result, err = cli.says(*arguments)
    assert "training from trained weights" in err and "before " in err
    assert result["trained_parameters"] == (2 * 4 * 928 if lora else result["parameters"])
    report = tmp_path / "report.jsonl"
    reported = TextSplit([], list(read_documents([kitchen[1]]))).parts()[1]
    report.write_text("".join(json.dumps({"text": text}) + "\n" for text in reported), encoding="utf-8")
    results = [cli.result("eval", directory, "--text", report) for directory in (trained, tmp_path / "out")]
    scores = [each["bits_per_byte"] for each in results]
    # Merging rounds once more; eval scores the checkpoint that was written.
    assert [result["bits_per_byte_before"], result["valid_bits_per_byte"]] == pytest.approx(scores, rel=1e-5)
    assert scores[1] < 0.9 * scores[0]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["parents"][0]["path"] == manifest["settings"]["init"] == str(trained)
    assert manifest["settings"]["lora_rank"] == (4 if lora else None)
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before, "inputs are untouched"
    assert cli.result(*arguments)["cached"] is True
    assert cli("verify", tmp_path / "out")[0] == 0


def test_no_steps_write_the_same_weights(checkpoint: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine) -> None:
    arguments = ["train", checkpoint, "--corpus", corpus_file, "--out", tmp_path / "out", "--steps", 0]
    result, err = cli.says(*arguments, "--sequence", 32)
    assert "training from" not in err
    assert result["bits_per_byte_before"] is None and result["valid_bits_per_byte"] is None
    expected, found = load_checkpoint(checkpoint).state_dict(), load_checkpoint(tmp_path / "out").state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
