from pathlib import Path

import pytest
import torch
import transformers

from compress.distillation.recovery import Recovery
from compress.pruning.plan import Plan, prune_line
from compress.pruning.run import Cut, prune_stage, target_shape
from compress.pruning.scores import importance_scores, load_scores, magnitude_scores, random_scores
from compress.pruning.search import rounds_to
from compress.pruning.shapes import Shape, candidate_shapes, shape_for_share, share_for_megabytes
from compress.pruning.slicing import kept_layers, prune
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.models.presets import preset
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.loop import TrainConfig
from tests.support.models import tiny_config, tiny_model


def samples(count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (2, 20), generator=g) for _ in range(count)]


FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"qk_norm": True},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_the_full_shape_changes_no_logit(changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    pruned = prune(model, importance_scores(model, samples()), Shape.of(model.config))
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.equal(pruned(tokens), model(tokens))


def test_scores_equal_a_loop_over_samples() -> None:
    """The formula written out sample by sample, in float64, from the model's own intermediate values."""
    model = tiny_model()
    scores = importance_scores(model, samples())
    caught: dict[str, list[torch.Tensor]] = {"norm": [], "neuron": [], "head": [], "in": [], "out": []}
    block = model.model.layers[1]
    norms = [m for n, m in model.named_modules() if n.endswith(("layernorm", "model.norm"))]
    assert len(norms) == 5
    totals = {"hidden": [torch.zeros(64, dtype=torch.float64) for _ in norms]}
    neuron, head = torch.zeros(96, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    cosine, count = 0.0, 0
    hooks = [block.mlp.down_proj.register_forward_pre_hook(lambda m, a: caught["neuron"].append(a[0]))]
    hooks += [block.self_attn.o_proj.register_forward_pre_hook(lambda m, a: caught["head"].append(a[0]))]
    hooks += [block.register_forward_hook(lambda m, a, o: caught["in"].append(a[0]) or caught["out"].append(o))]
    hooks += [norm.register_forward_hook(lambda m, a, o: caught["norm"].append(o)) for norm in norms]
    with torch.inference_mode():
        for batch in samples():
            for row in batch:
                for values in caught.values():
                    values.clear()
                model.hidden(row[None])
                for total, output in zip(totals["hidden"], caught["norm"], strict=True):
                    total += output[0].double().abs().mean(0) ** 2
                neuron += caught["neuron"][0][0].double().abs().mean(0) ** 2
                head += caught["head"][0][0].double().view(20, 4, 16).norm(dim=-1).mean(0) ** 2
                pairs = zip(caught["in"][0][0].double(), caught["out"][0][0].double(), strict=True)
                for x, y in pairs:
                    cosine += float(x @ y / (x.norm() * y.norm()))
                    count += 1
    for hook in hooks:
        hook.remove()
    # named_modules and execution visit the norms in the same order.
    expected = sum(total.sqrt() for total in totals["hidden"])
    assert torch.allclose(scores.hidden.double(), expected, rtol=1e-5)
    assert torch.allclose(scores.intermediate[1].double(), neuron.sqrt(), rtol=1e-5)
    assert torch.allclose(scores.heads[1].double(), head.sqrt(), rtol=1e-5)
    assert float(scores.layer_distance[1, 2]) == pytest.approx(1 - cosine / count, abs=1e-5)


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_dead_units_are_cut_without_a_trace(changes: dict[str, object]) -> None:
    """Neurons and heads that write nothing score lowest; cutting exactly those leaves the logits alone."""
    model = tiny_model(**changes)
    dead_neurons, dead_heads = torch.arange(0, 96, 3), torch.tensor([1, 2])  # one head in each group
    with torch.no_grad():
        for block in model.model.layers:
            for name in ("gate_proj", "up_proj"):
                module = getattr(block.mlp, name)
                module.weight[dead_neurons] = 0
                if module.bias is not None:
                    module.bias[dead_neurons] = 0
    scores = importance_scores(model, samples())
    for layer in range(2):
        assert set(torch.argsort(scores.intermediate[layer])[:32].tolist()) == set(dead_neurons.tolist())
        scores.heads[layer][dead_heads] = 0
        with torch.no_grad():
            columns = (dead_heads[:, None] * 16 + torch.arange(16)).flatten()
            model.model.layers[layer].self_attn.o_proj.weight[:, columns] = 0
    pruned = prune(model, scores, Shape(hidden=64, intermediate=64, heads=2, kv_heads=2, layers=2))
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.allclose(pruned(tokens), model(tokens), atol=1e-4, rtol=1e-5)


def test_hidden_channels_are_sliced_the_same_everywhere() -> None:
    model = tiny_model()
    scores = importance_scores(model, samples())
    pruned = prune(model, scores, Shape(hidden=32, intermediate=96, heads=4, kv_heads=2, layers=2))
    keep = torch.sort(torch.argsort(scores.hidden, descending=True)[:32]).values
    assert torch.equal(pruned.model.embed_tokens.weight, model.model.embed_tokens.weight[:, keep])
    assert torch.equal(pruned.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight[keep])
    assert torch.equal(
        pruned.model.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight[:, keep]
    )
    assert pruned.config.parameters == sum(p.numel() for p in pruned.parameters())


def test_a_layer_that_does_nothing_is_the_one_dropped() -> None:
    model = tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        for module in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            module.weight.zero_()
    scores = importance_scores(model, samples())
    keep, tried = kept_layers(model, scores, 3, samples())
    assert keep == [0, 1, 3] and len(tried) == 3
    pruned = prune(model, scores, Shape.of(model.config).__class__(64, 96, 4, 2, 3), keep)
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.allclose(pruned(tokens), model(tokens), atol=1e-5)
    assert len(model.model.layers) == 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(65, 96, 4, 2, 2), "--hidden is 65"),
        (Shape(64, 0, 4, 2, 2), "--intermediate is 0"),
        (Shape(64, 96, 3, 2, 2), "breaks the grouping"),
        (Shape(64, 96, 6, 4, 2), "--heads is 6"),
        (Shape(64, 96, 4, 2, 0), "--layers is 0"),
    ],
)
def test_impossible_shapes(shape: Shape, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape.applied_to(tiny_config())


@pytest.mark.parametrize("share", [0.75, 0.5, 1 / 3])
@pytest.mark.parametrize("name", ["tiny-1m", "tiny-5m", "small"])
def test_share_is_met_and_shapes_fit_the_kernels(name: str, share: float) -> None:
    config = preset(name)
    shape = shape_for_share(config, share)
    found = shape.applied_to(config).block_parameters / config.block_parameters
    assert 0.85 * share < found <= share
    assert shape.hidden % 32 == 0 and shape.intermediate % 32 == 0 and shape.layers == config.num_hidden_layers
    assert shape.heads * config.num_key_value_heads == shape.kv_heads * config.num_attention_heads


def test_share_and_dimensions_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="not both"):
        target_shape(tiny_config(), 0.5, None, {"hidden": 32})
    with pytest.raises(UsageError, match="say how small"):
        target_shape(tiny_config(), None, None, {"hidden": None})
    with pytest.raises(UsageError, match="at most 1"):
        shape_for_share(tiny_config(), 1.5)


def stage(checkpoint: Path, out: Path, calibration: Path, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "checkpoint": checkpoint,
        "out": out,
        "shape": Shape(hidden=64, intermediate=64, heads=4, kv_heads=2, layers=1),
        "how": Cut(samples=4),
        "calibration": [calibration],
    }
    return prune_stage(**{**settings, **changes})  # type: ignore[arg-type]


def test_the_stage_writes_an_ordinary_checkpoint(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    result = stage(checkpoint, tmp_path / "out", corpus_file)
    ours = load_checkpoint(tmp_path / "out")
    assert result["parameters"] == ours.config.parameters
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=5e-5)


def test_recovery_brings_quality_back(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    config = TrainConfig(steps=15, batch_size=4, accumulation=1, sequence=64, learning_rate=3e-3, warmup=2)
    result = stage(checkpoint, tmp_path / "out", corpus_file, recovery=Recovery(config, (corpus_file,)))
    assert result["valid_bits_per_byte"] < result["bits_per_byte_before_recovery"]


def test_quantized_input_and_empty_calibration_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no calibration text"):
        stage(checkpoint, tmp_path / "out", empty)
    assert not (tmp_path / "out").exists()


def test_calibration_files_take_turns(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the home side scores " * 400, encoding="utf-8")
    (tmp_path / "two.txt").write_text("a late goal " * 8, encoding="utf-8")
    config, words = load_config(checkpoint), load_tokenizer(checkpoint)
    found = calibration_samples([tmp_path / "one.txt", tmp_path / "two.txt"], words, config, 4, 32)
    texts = [words.decode(piece[0].tolist()) for piece in found]
    assert ["late" in text for text in texts[:2]] == [False, True] and len(found) == 4
    assert all(piece.shape[1] <= 32 for piece in found)


def line(checkpoint: Path, out: Path, calibration: Path, plan: Plan, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "checkpoint": checkpoint,
        "out": out,
        "plan": plan,
        "how": Cut(samples=4),
        "calibration": [calibration],
        "scores": None,
        "recovery": None,
        "resume": False,
    }
    return prune_line(**{**settings, **changes})  # type: ignore[arg-type]


BRIEF = TrainConfig(steps=4, batch_size=2, accumulation=1, sequence=64, learning_rate=1e-3, warmup=1)


def test_a_file_size_is_met(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    full = load_checkpoint(checkpoint).config
    fixed, blocks = full.parameters - full.block_parameters, full.block_parameters
    megabytes = (fixed + 0.7 * blocks) * 4 / 1e6
    assert share_for_megabytes(full, megabytes) == pytest.approx(0.7)
    result = line(checkpoint, tmp_path / "out", corpus_file, Plan(None, megabytes, {}))
    weights = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0.6 * megabytes * 1e6 < weights - 8_000 < megabytes * 1e6  # 8 KB: names and offsets
    assert result["share_of_block_parameters"] <= 0.7
    with pytest.raises(UsageError, match="embedding and head alone"):
        share_for_megabytes(full, 0.001)
    with pytest.raises(UsageError, match="already"):
        share_for_megabytes(full, 1_000)


def test_every_candidate_meets_the_share_and_no_larger_ffn_fits() -> None:
    config = preset("tiny-1m")
    shapes = candidate_shapes(config, 0.6)
    assert len(shapes) > 5 and len({shape.layers for shape in shapes}) > 1
    for shape in shapes:
        size = shape.applied_to(config).block_parameters / config.block_parameters
        assert size <= 0.6 and (size >= 0.57 or shape.intermediate < config.intermediate_size)
        if shape.intermediate < config.intermediate_size:
            wider = Shape(shape.hidden, shape.intermediate + 32, shape.heads, shape.kv_heads, shape.layers)
            assert wider.applied_to(config).block_parameters > 0.6 * config.block_parameters


def test_key_value_heads_are_merged_where_all_query_heads_stay(
    checkpoint: Path, corpus_file: Path, tmp_path: Path
) -> None:
    result = line(checkpoint, tmp_path / "out", corpus_file, Plan(None, None, {"kv_heads": 1}))
    assert result["shape"] == {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 1, "layers": 2}
    assert load_checkpoint(tmp_path / "out").config.num_key_value_heads == 1


def test_saved_scores_give_the_same_cut_without_measuring(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    plan = Plan(None, None, {"intermediate": 32})
    line(checkpoint, tmp_path / "a", corpus_file, plan)
    line(checkpoint, tmp_path / "b", corpus_file, plan, scores=tmp_path / "a")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    with pytest.raises(ArtifactError, match="another shape"):
        load_scores(tmp_path / "a", tiny_config(intermediate_size=64))
    with pytest.raises(ArtifactError, match="no importance scores"):
        load_scores(corpus_file, tiny_config())


@torch.no_grad()
def test_magnitude_is_the_norm_of_what_a_unit_owns() -> None:
    model = tiny_model()
    scores = magnitude_scores(model)
    block = model.model.layers[1]
    owned = [block.mlp.gate_proj.weight[5], block.mlp.up_proj.weight[5], block.mlp.down_proj.weight[:, 5]]
    assert float(scores.intermediate[1][5]) == pytest.approx(float(torch.cat(owned).norm()), rel=1e-5)
    owned = [block.self_attn.q_proj.weight[32:48].flatten(), block.self_attn.o_proj.weight[:, 32:48].flatten()]
    assert float(scores.heads[1][2]) == pytest.approx(float(torch.cat(owned).norm()), rel=1e-5)
    owned = [model.model.embed_tokens.weight[:, 7]]
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                inwards = name.endswith(("o_proj", "down_proj"))
                owned.append(module.weight[7] if inwards else module.weight[:, 7])
    assert float(scores.hidden[7]) == pytest.approx(float(torch.cat(owned).norm()), rel=1e-5)
    assert torch.equal(random_scores(model.config, 1).hidden, random_scores(model.config, 1).hidden)
    assert not torch.equal(random_scores(model.config, 1).hidden, random_scores(model.config, 2).hidden)


def test_rounds_go_down_in_equal_ratios() -> None:
    config = preset("small")
    goal = Shape(hidden=384, intermediate=512, heads=6, kv_heads=6, layers=6)
    first, last = rounds_to(config, goal, 2)
    assert last == goal and rounds_to(config, goal, 1) == [goal]
    assert (first.hidden, first.intermediate) == (544, 1_024)  # 768 / sqrt(2) = 543.1 and 2048 / 2, snapped up
    assert first.kv_heads == first.heads == 9 and first.layers == 9
    merged = Shape(hidden=768, intermediate=1_024, heads=12, kv_heads=4, layers=12)
    assert rounds_to(config, merged, 2)[0].kv_heads == 12  # merged in the last round


def test_rounds_and_search_leave_finished_stages_behind(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    plan = Plan(0.51, None, {}, search_tokens=128, finalists=2)
    result = line(checkpoint, tmp_path / "out", corpus_file, plan, recovery=Recovery(BRIEF, (corpus_file,)))
    tried = result["search"]
    assert isinstance(tried, list) and len(tried) == 2
    assert tried[0]["bits_per_byte"] <= tried[1]["bits_per_byte"] and tried[0]["shape"] == result["shape"]
    assert len({(row["shape"]["hidden"], row["shape"]["layers"]) for row in tried}) == 2
    plan_of_two, recovery = Plan(None, None, {"intermediate": 32}, 2), Recovery(BRIEF, (corpus_file,))
    rounded = line(checkpoint, tmp_path / "rounds", corpus_file, plan_of_two, recovery=recovery)
    assert load_config(tmp_path / "rounds.round1").intermediate_size == 64  # 96 / sqrt(3) = 55.4, snapped up
    assert rounded["steps"] == 2  # half of the four in each round
    assert len(list((tmp_path / "out.search").iterdir())) == 2
    again = line(checkpoint, tmp_path / "out", corpus_file, plan, recovery=Recovery(BRIEF, (corpus_file,)))
    assert again["cached"]


def test_plans_that_do_not_go_together(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    for plan, message in (
        (Plan(0.5, None, {}, rounds=2), "--recover"),
        (Plan(0.5, None, {}, search_tokens=10), "--search needs"),
        (Plan(0.5, 1.0, {}), "not both"),
    ):
        with pytest.raises(UsageError, match=message):
            line(checkpoint, tmp_path / "out", corpus_file, plan)
    with pytest.raises(UsageError, match="--importance"):
        Cut(importance="luck")
    with pytest.raises(ArtifactError, match="--samples asks for 9000"):
        line(checkpoint, tmp_path / "out", corpus_file, Plan(0.5, None, {}), how=Cut(samples=9_000))
