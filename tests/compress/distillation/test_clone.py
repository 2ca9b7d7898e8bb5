import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from compress.distillation.clone import clone_loss, clone_student, merge_clone, with_clone_loss
from compress.distillation.projections import rotary_channels
from compress.distillation.student_loss import distillation_loss
from compress.pruning.scores import importance_scores
from compress.pruning.shapes import Shape
from compress.pruning.slicing import prune
from sportsllm.errors import ArtifactError, InterruptedRun, UsageError
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import inverse_frequencies
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.text.packing import IGNORE, Batch, PackedSequences, tokenize
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.loop import TrainConfig, language_model_loss, train_model
from tests.support.models import tiny_config, tiny_model

FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"qk_norm": True},
    {"attention_bias": True},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
]
CUT = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
# As far from its student as preset `large` is from `small`: other depth, width, heads and head_dim.
LARGE = {"hidden_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 12}
SMALL = LARGE | {"hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


def samples(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (2, 40), generator=generator) for _ in range(count)]


def batch() -> Batch:
    tokens, targets = samples(2)
    targets[0, 9] = IGNORE
    return Batch(tokens, targets, (10, 40, 80))


def jolted(student: SportsLLM) -> SportsLLM:
    """Projections moved off their start, as training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return student


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_selection_starts_as_the_pruned_model(changes: dict[str, object]) -> None:
    teacher = tiny_model(num_hidden_layers=3, **changes)
    config = teacher.config.with_changes(**CUT, num_hidden_layers=2)
    scores = importance_scores(teacher, samples())
    clone = clone_student(teacher, config, layer_map=[0, 2], scores=scores)
    pruned = prune(teacher, scores, Shape.of(config), [0, 2])
    with torch.inference_mode():
        # A product with ones and zeros is exact.
        assert torch.equal(clone(samples()[0]), pruned(samples()[0]))


@pytest.mark.parametrize("init", ["select", "pca"])
@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_a_clone_of_the_full_shape_is_the_teacher(init: str, changes: dict[str, object]) -> None:
    teacher = tiny_model(**changes)
    clone = clone_student(teacher, teacher.config, init=init, samples=samples())
    with torch.inference_mode():
        assert torch.equal(clone(samples()[0]), teacher(samples()[0]))
    trained = {name.removesuffix(".parametrizations.weight.original0") for name, _ in clone.named_parameters()}
    assert {name for name, module in teacher.named_modules() if name.endswith(("proj", "embed_tokens", "lm_head"))} <= (
        trained
    ), "every matrix can learn"


@pytest.mark.parametrize("tied", [True, False])
def test_pca_finds_the_small_model_inside_a_large_one(tied: bool) -> None:
    """A teacher of 64 channels whose stream stays in a hidden 48-dimensional space, behind uneven norm weights.

    RMSNorm's mean over more channels makes its output sqrt(64 / 48) larger; the reading matrices take that back.
    """
    inner = tiny_model(hidden_size=48, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(64, 48, generator=generator)).Q
    old = inner.state_dict()
    if tied:  # a tied head leaves the last norm's weights no matrix to hide in
        old["model.norm.weight"].fill_(1.3)
    norms = {name: 0.5 + torch.rand(64, generator=generator) for name in old if name.endswith("norm.weight")}
    if tied:
        norms["model.norm.weight"].fill_(1.3 * math.sqrt(48 / 64))
    state: dict[str, Tensor] = dict(norms)
    for name, tensor in old.items():
        block, module = name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0], name.split(".")[-2]
        half = "input" if module in ("q_proj", "k_proj", "v_proj") else "post_attention"
        norm = "model.norm.weight" if module == "lm_head" else f"{block}.{half}_layernorm.weight"
        if module in ("o_proj", "down_proj"):
            state[name] = basis @ tensor
        elif module == "embed_tokens":
            state[name] = tensor @ basis.T
        elif name not in norms:
            state[name] = math.sqrt(48 / 64) * (tensor * old[norm]) @ basis.T / norms[norm]
    teacher = SportsLLM(inner.config.with_changes(hidden_size=64)).eval()
    teacher.load_state_dict(state)
    clone = clone_student(teacher, inner.config, init="pca", samples=samples(6))
    with torch.inference_mode():
        assert float((teacher(samples()[0]) - inner(samples()[0])).abs().max()) < 1e-3, "the test's own construction"
        # Float32 rounding through two layers, and eps, which weighs 64 / 48 more in the smaller model.
        torch.testing.assert_close(clone(samples()[0]), teacher(samples()[0]), rtol=0, atol=1e-3)


def test_least_squares_against_a_solver_over_the_tokens() -> None:
    """down_proj's P_in is the ridge regression of all neurons on the kept ones, solved in float64 by rows."""
    teacher = tiny_model()
    config = teacher.config.with_changes(intermediate_size=64)
    scores = importance_scores(teacher, samples())
    clone = clone_student(teacher, config, init="pca", scores=scores, samples=samples())
    rows: list[Tensor] = []
    handle = teacher.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _m, args: rows.append(args[0]))
    with torch.no_grad():
        for tokens in samples():
            teacher(tokens)
    handle.remove()
    x = torch.cat([row.flatten(0, 1) for row in rows]).double()
    kept = torch.topk(scores.intermediate[1], 64).indices.sort().values
    ridge = math.sqrt(1e-3 * float(x[:, kept].square().sum(0).mean()))
    chosen = torch.zeros(96, 64, dtype=torch.float64)
    chosen[kept, torch.arange(64)] = 1.0
    left = torch.cat([x[:, kept], ridge * torch.eye(64, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(left, torch.cat([x, ridge * chosen.T])).solution.T
    got = clone.model.layers[1].mlp.down_proj.parametrizations.weight.original1
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)  # moments are float32 products


def test_the_tied_norm_against_a_solver_over_the_tokens() -> None:
    """Its weights n minimise |E Q diag(n) y - E diag(g) x|^2 over tokens and vocabulary."""
    teacher = tiny_model()
    config = teacher.config.with_changes(hidden_size=48)
    clone = clone_student(teacher, config, init="pca", samples=samples())
    stream: list[Tensor] = []
    with torch.no_grad():
        for tokens in samples():
            states: list[Tensor] = []
            teacher.hidden(tokens, states=states)
            stream.append(states[-1].flatten(0, 1))
    x = torch.cat(stream).double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    embedding = teacher.model.embed_tokens.weight.detach().double()
    basis = clone.model.embed_tokens.parametrizations.weight.original0.detach().double()
    y = x @ basis
    y = y / y.square().mean().sqrt()
    head = embedding @ basis
    columns = torch.einsum("vs,ns->nvs", head, y).flatten(0, 1)
    target = (x * teacher.model.norm.weight.detach()) @ embedding.T
    wanted = torch.linalg.lstsq(columns, target.flatten()[:, None]).solution[:, 0]
    # The solver has no ridge of 0.1%.
    torch.testing.assert_close(clone.model.norm.weight.detach().double(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("teacher_dim", "student_dim"), [(96, 64), (12, 8), (16, 10), (64, 64)])
def test_rotary_pairs_are_the_nearest_in_frequency(teacher_dim: int, student_dim: int) -> None:
    large, small = (
        np.log(inverse_frequencies(tiny_config(head_dim=size)).astype(np.float64))
        for size in (teacher_dim, student_dim)
    )
    first, second = rotary_channels(teacher_dim, student_dim).chunk(2)
    assert torch.equal(second, first + teacher_dim // 2) and len(set(first.tolist())) == student_dim // 2
    distance = np.abs(small[:, None] - large[None, :])
    # The table is float32: about 1e-7 relative, so 1e-6 in the logarithm.
    assert np.allclose(distance[np.arange(student_dim // 2), first.numpy()], distance.min(axis=1), atol=1e-6)


def test_worked_example_of_rotary_pairs() -> None:
    # Pair j of 4 turns like pair 1.5 j of 6: 0, 1.5 (a tie, the faster), 3, 4.5 (a tie).
    assert rotary_channels(12, 8).tolist() == [0, 1, 3, 4, 6, 7, 9, 10]


@pytest.mark.parametrize("changes", [*FAMILIES, LARGE], ids=str)
def test_merging_changes_nothing_and_leaves_a_plain_model(changes: dict[str, object], tmp_path: Path) -> None:
    teacher = tiny_model(**changes)
    config = tiny_config(**SMALL) if changes == LARGE else teacher.config.with_changes(**CUT)
    clone = jolted(clone_student(teacher, config, init="pca", samples=samples()))
    merged = merge_clone(clone)
    assert list(merged.state_dict()) == list(SportsLLM(config).state_dict())
    assert not any(parametrize.is_parametrized(module) for module in merged.modules())
    save_checkpoint(tmp_path, merged)
    with torch.inference_mode():
        logits = clone(samples()[0])
        # The same products in the same order; a thousandth of the logits' size is room for another kernel.
        for model in (merged, load_checkpoint(tmp_path)):
            torch.testing.assert_close(model(samples()[0]), logits, rtol=0, atol=1e-3 * float(logits.abs().max()))


def test_gradients_of_the_projections_in_float64() -> None:
    """dL/dP_in = W^T P_out G and dL/dP_out = W P_in G^T, where G is an ordinary student's gradient."""
    teacher = tiny_model(**LARGE)
    clone = jolted(clone_student(teacher, tiny_config(**SMALL), samples=samples()))
    with_clone_loss(language_model_loss, teacher, 0.0)(clone, batch()).backward()
    plain = merge_clone(clone)
    language_model_loss(plain, batch()).backward()
    expected: dict[int, Tensor] = {}
    parameters: dict[int, Tensor] = {}
    for name, module in clone.named_modules():
        if not parametrize.is_parametrized(module, "weight"):
            continue
        weight = module.parametrizations.weight
        sides = list(weight._parameters.values())
        matrix, gradient = weight[0].teacher.double(), plain.get_submodule(name).weight.grad.double()
        out = sides[0].double() if weight[0].sides[0] else torch.eye(len(matrix), dtype=torch.float64)
        into = sides[-1].double() if weight[0].sides[1] else torch.eye(matrix.shape[1], dtype=torch.float64)
        both = {}
        if weight[0].sides[0]:
            both[id(sides[0])] = matrix @ into @ gradient.T
        if weight[0].sides[1]:
            both[id(sides[-1])] = matrix.T @ out @ gradient
        for key, value in both.items():
            expected[key] = expected.get(key, 0) + value  # gate and up share theirs
        parameters |= {id(side): side for side in sides}
    assert len(parameters) == 1 + 2 * 13
    for key, parameter in parameters.items():
        scale = float(expected[key].detach().abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected[key], rtol=0, atol=1e-4 * scale)  # float32 sums


def test_no_two_projections_share_memory_but_those_of_gate_and_up() -> None:
    teacher = tiny_model()
    clone = clone_student(teacher, teacher.config.with_changes(**CUT), samples=samples())
    frozen = {parameter.data_ptr() for parameter in teacher.parameters()}
    addresses = [parameter.data_ptr() for parameter in clone.parameters()]
    assert len(addresses) == len(set(addresses)) and not frozen & set(addresses)
    for layer in clone.model.layers:
        gate, up = (part.parametrizations.weight for part in (layer.mlp.gate_proj, layer.mlp.up_proj))
        assert gate.original0 is up.original0 and gate.original1 is not up.original1


def test_the_state_holds_no_teacher_matrix_and_loads_again() -> None:
    teacher = tiny_model(**LARGE)
    make = {"init": "pca", "samples": samples()}
    clone = jolted(clone_student(teacher, tiny_config(**SMALL), **make))
    state = clone.state_dict()
    ours = {parameter.data_ptr() for parameter in clone.parameters()}
    assert {tensor.data_ptr() for tensor in state.values()} == ours
    assert not any("teacher" in name for name in state)
    again = clone_student(teacher, tiny_config(**SMALL), **make)
    again.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    with torch.inference_mode():
        assert torch.equal(again(samples()[0]), clone(samples()[0]))


def naive_distance(clone: SportsLLM, teacher: SportsLLM, data: Batch, layers: list[int]) -> float:
    """Token by token in float64, from values caught in one forward pass of each model."""
    outputs: dict[tuple[str, str], Tensor] = {}
    handles = []
    for role, model in (("student", clone), ("teacher", teacher)):
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                key = (role, name)
                handles.append(module.register_forward_hook(lambda _m, _a, y, key=key: outputs.update({key: y[None]})))
    with torch.no_grad():
        clone.hidden(data.tokens, data.documents)
        teacher.hidden(data.tokens, data.documents)
    for handle in handles:
        handle.remove()
    distances = []
    for (role, name), made in outputs.items():
        if role == "student":
            number = int(name.split(".")[2])
            source = name.replace(f"layers.{number}.", f"layers.{layers[number]}.")
            weight = clone.get_submodule(name).parametrizations.weight
            pairs = zip(made[0].flatten(0, 1), outputs["teacher", source][0].flatten(0, 1), strict=True)
            total = 0.0
            for position, (y, t) in enumerate(pairs):
                if int(data.targets.flatten()[position]) != IGNORE:
                    wanted = t.double() @ weight.original0.detach().double() if weight[0].sides[0] else t.double()
                    total += float(((y.double() - wanted) ** 2).sum() / (wanted**2).sum())
            distances.append(total)
    assert len(distances) == 14
    return sum(distances) / 14


def test_clone_loss_equals_a_loop_over_tokens_and_adds_up() -> None:
    teacher = tiny_model(**LARGE)
    clone = clone_student(teacher, tiny_config(**SMALL), layer_map=[1, 2], init="pca", samples=samples())
    jolted(clone)
    whole = float(clone_loss(clone, teacher, batch()).detach())
    assert whole == pytest.approx(naive_distance(clone, teacher, batch(), [1, 2]), rel=1e-4)  # float32 activations
    tokens, targets = batch().tokens, batch().targets
    rows = [Batch(tokens[:1], targets[:1], (10, 40)), Batch(tokens[1:], targets[1:], (40,))]
    assert whole == pytest.approx(sum(float(clone_loss(clone, teacher, row).detach()) for row in rows), rel=1e-4)


def test_clone_loss_is_nothing_for_the_teacher_itself() -> None:
    teacher = tiny_model()
    clone = clone_student(teacher, teacher.config, samples=samples())
    assert float(clone_loss(clone, teacher, batch()).detach()) == 0.0


@pytest.mark.parametrize("stored", [False, True], ids=["teacher runs in the loss", "stored signals"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_clone_loss_joins_another_loss(stored: bool, checkpointed: bool) -> None:
    teacher = tiny_model(**LARGE).requires_grad_(False)
    base = language_model_loss if stored else distillation_loss(teacher, 1.0, 1.0)
    gradients, values = [], []
    for joined in (True, False):
        clone = jolted(clone_student(teacher, tiny_config(**SMALL), samples=samples())).train()
        clone.checkpoint_activations = checkpointed and joined
        if joined:
            loss = with_clone_loss(base, teacher, 0.5)(clone, batch())
        else:
            loss = base(clone, batch()) + 0.5 * clone_loss(clone, teacher, batch())
        loss.backward()
        values.append(float(loss.detach()))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in clone.parameters()]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    # One backward pass instead of two added up: rounding only.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("init", ["select", "pca"])
def test_another_head_dim_and_depth_trains_and_resumes(
    init: str, tokenizer_directory: Path, texts: list[str], tmp_path: Path
) -> None:
    teacher = tiny_model(**LARGE).requires_grad_(False)
    batches = PackedSequences(tokenize(texts, load_tokenizer(tokenizer_directory)), 32, 4, seed=0)
    config = TrainConfig(
        steps=10, batch_size=4, accumulation=1, sequence=32, precision="fp32", warmup=1, learning_rate=1e-2
    )
    loss = with_clone_loss(distillation_loss(teacher, 1.0, 1.0), teacher, 0.1)
    data, calls = batches.batch(1_000), 0

    def fresh() -> SportsLLM:
        calibration = [batches.batch(number).tokens for number in range(4)]
        return clone_student(teacher, tiny_config(**SMALL), init=init, samples=calibration)

    def loss_on_data(student: SportsLLM) -> float:
        with torch.no_grad():
            return float(loss(student, data))

    def interrupted_in_step_4(student: SportsLLM, part: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(student, part)

    whole = fresh()
    before = loss_on_data(whole)
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    train_model(whole, batches, loss, config, tmp_path / "whole")
    assert loss_on_data(whole) < 0.9 * before
    with pytest.raises(InterruptedRun):
        train_model(fresh(), batches, interrupted_in_step_4, config, tmp_path / "halves")
    resumed = fresh()
    train_model(resumed, batches, loss, config, tmp_path / "halves", resume=True)
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))


REFUSED = [
    ({"hidden_size": 80}, {}, UsageError, "hidden_size is 80"),
    ({"num_hidden_layers": 3}, {}, UsageError, "num_hidden_layers is 3"),
    ({"head_dim": 32}, {}, UsageError, "head_dim is 32"),
    ({"qk_norm": True}, {}, UsageError, "qk_norm is True"),
    ({"rope_theta": 5e5}, {}, UsageError, "rope_theta"),
    ({"tie_word_embeddings": False}, {}, UsageError, "tie_word_embeddings"),
    ({"num_key_value_heads": 1}, {}, UsageError, "merge the teacher's key/value heads"),
    ({"vocab_size": 380}, {}, ArtifactError, "380 tokens"),
    ({"num_hidden_layers": 1}, {"layer_map": [2]}, UsageError, "layer map"),
    ({"num_hidden_layers": 1}, {"layer_map": [0, 1]}, UsageError, "layer map"),
    ({}, {"layer_map": [1, 0]}, UsageError, "layer map"),
    ({}, {"layer_map": [1, 1]}, UsageError, "layer map"),
    ({}, {"init": "svd"}, UsageError, "'svd' is not known"),
    ({}, {"samples": []}, UsageError, "samples or scores"),
    ({}, {"init": "pca", "samples": []}, UsageError, "give samples"),
]


@pytest.mark.parametrize(("changes", "settings", "error", "words"), REFUSED)
def test_refusals(changes: dict, settings: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        clone_student(tiny_model(), tiny_config(**changes), **{"samples": samples(1), **settings})
    assert "\n" not in str(caught.value)


def test_a_quantized_or_half_precision_teacher_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    from compress.quantization.packed_checkpoint import Precision
    from compress.quantization.run import quantize

    quantize(checkpoint=checkpoint, out=tmp_path / "q", precision=Precision())
    half = tiny_model()
    half.model.to(torch.bfloat16)
    for teacher in (load_checkpoint(tmp_path / "q"), half):
        with pytest.raises(ArtifactError, match="not a float32 matrix"):
            clone_student(teacher, tiny_config(), samples=samples(1))


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="clone loss is -1"):
        with_clone_loss(language_model_loss, tiny_model(), -1.0)
