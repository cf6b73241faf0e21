"""The recipes in configs/ load, hold the published numbers, and share no key with the hardware files."""

import dataclasses
import json

import pytest

import grpo
import model
import optim
from checkpoint import check_same_model
from config import HARDWARE, SCIENCE, load_config, make_execution, science_dict
from processes import HERE

ALL = sorted(p.stem for p in (HERE / "configs").glob("*.yaml"))
RECIPES = [name for name in ALL if "grpo" not in name]  # the others have a section that train.py does not take
MACHINES = sorted(p.stem for p in (HERE / "configs" / "hardware").glob("*.yaml"))


def load(recipe, machine="cpu", *overrides):
    return load_config(recipe, machine, list(overrides))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_with_every_machine(recipe, machine):
    """A recipe or hardware file that a key was forgotten in, or whose remat does not fit its micro-batches."""
    c = load(recipe, machine)
    for size in range(1, c.hardware.microbatch + 1):
        make_execution(c, size, "tpu")


@pytest.mark.parametrize("recipe", sorted(set(ALL) - set(RECIPES)))
def test_recipes_of_grpo(recipe):
    """Table 49 of the report mistyped, or a recipe that grpo.py refuses."""
    config, g = grpo.load_recipe(recipe, "cpu", [])
    assert (g.group, g.mini_batches, g.clip_low, g.clip_high, g.importance_cap) == (8, 1, 0.2, 0.272, None)
    if recipe == "grpo_think":
        assert (config.optim.peak_lr, config.run.steps, config.data.global_batch) == (1e-6, 1400, 64 * 8)
        assert (config.data.sequence_length, g.response_tokens) == (2048 + 32768, 32768)
        check_same_model(science_dict(load("sft_think"))["model"], config, recipe)
    with pytest.raises(ValueError, match="grpo: unknown key"):
        load(recipe)


def test_recipes_of_fine_tuning():
    """Table 47 of the report mistyped (sequence, batch, rates, tokens)."""
    for name, lr, tokens in (("sft_think", 5e-5, 45.4e9), ("sft_instruct", 8e-5, 3.4e9)):
        c = load(name)
        assert (c.data.sequence_length, c.tokens_a_step, c.optim.peak_lr) == (32768, 1_048_576, lr)
        assert c.tokens_a_step * c.run.steps == pytest.approx(tokens, rel=1e-3)
        assert (c.optim.weight_decay, c.loss.z_loss, c.run.seed, c.data.seed) == (0.0, 0.0, 33333, 34521)
        (piece,) = c.schedule
        assert (piece.kind, piece.warmup_steps, piece.final_fraction) == ("linear", round(0.03 * c.run.steps), 0.0)
        assert c.data.document_mask and c.model.yarn.factor == 8.0
        check_same_model(science_dict(load("stage3"))["model"], c, name)


def test_recipes_and_machines_are_all_here():
    assert {"quickstart", "stage1", "stage1_ai2", "stage2", "stage3"} <= set(RECIPES)
    assert {"cpu", "gpu", "h100", "h200", "rtx4090", "v5p", "ironwood"} <= set(MACHINES)


@pytest.mark.parametrize("machine", ["gpu", "h100", "h200", "rtx4090"])
def test_gpus_add_up_in_one_order(machine):
    """Law 2: a file for GPUs whose embedding's gradient is added up by atomics; products left to kernels that are timed
    at every start or, untimed, are slow; cuDNN's forward kernel run twice."""
    hardware = load("stage1", machine).hardware
    flags = hardware.xla_flags
    assert flags["xla_gpu_deterministic_ops"] is True and flags["xla_gpu_enable_triton_gemm"] is False
    for size in range(1, hardware.microbatch + 1):
        assert {"heads_out", "lse"} <= set(make_execution(load("stage1", machine), size, "gpu").remat)


def test_science_and_hardware_have_disjoint_keys():
    """Law 3: a key that stands in both files could change the maths with the machine."""
    assert not set(SCIENCE) & set(HARDWARE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_tpu_generation_is_another_hardware_file(recipe):
    """A change of machine in the middle of a run that needs a change of the recipe, too: all science stays the same."""
    assert len({json.dumps(science_dict(load(recipe, machine))) for machine in MACHINES}) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [("stage1", "stage2"), ("stage1_ai2", "stage2"), ("stage2", "stage3"), ("quickstart", "quickstart_stage2"),
     ("quickstart_stage2", "quickstart_stage3"), ("stage1_32b", "stage2_32b"), ("stage2_32b", "stage3_32b")],
)  # fmt: skip
def test_every_stage_takes_over_the_one_before(before, after):
    """A recipe whose model is no longer the one that its parameters come from."""
    check_same_model(science_dict(load(before))["model"], load(after), before)


@pytest.mark.parametrize("recipe", ["stage1", "stage1_ai2", "stage2", "stage3"])
def test_7b_parameter_count(recipe):
    """A dimension mistyped in a 7B recipe."""
    c = load(recipe)
    assert model.parameter_count(c.model, padded=False) == 7_298_011_136
    assert model.parameter_count(c.model) == 7_298_617_344


@pytest.mark.parametrize("recipe", ["stage1_32b", "stage2_32b", "stage3_32b"])
def test_32b_parameter_count(recipe):
    """A dimension mistyped in a 32B recipe, key and value heads above all: they are a fifth of the queries'."""
    c = load(recipe)
    assert model.parameter_count(c.model) == 32_234_279_936
    assert model.parameter_count(c.model, padded=False) == 32_233_522_176


@pytest.mark.parametrize(
    ("recipe", "step", "expected"),
    [
        ("stage1", 1, 1.5e-7),
        ("stage1", 1000, 1.5e-4),
        ("stage1", 2000, 3.0e-4),
        ("stage1", 597_046, 1.979988e-4),
        ("stage1", 708_039, 1.65e-4),
        ("stage1", 1_414_078, 3.0e-5),
        ("stage1", 2_000_000, 3.0e-5),
        ("stage1_ai2", 1, 1.5e-7),
        ("stage1_ai2", 100_000, 2.9550768e-4),
        ("stage1_ai2", 596_047, 1.6535619e-4),
        ("stage1_ai2", 597_046, 1.6500018e-4),
        ("stage1_ai2", 1_000_000, 8.983e-5),
        ("stage1_ai2", 1_413_814, 3.932527e-5),
        ("stage2", 1, 2.07119185e-4),
        ("stage2", 47_683, 4.34e-9),
        ("stage2", 47_684, 0.0),
        ("stage3", 1, 1.0356176e-6),
        ("stage3", 200, 2.0712352850360292e-4),
        ("stage3", 11_920, 1.7671148e-8),
        ("stage3", 11_921, 0.0),
        ("stage1_32b", 2000, 6.0e-4),
        ("stage1_32b", 656_000, 6.6942655e-5),
        ("stage1_32b", 679_000, 6.210e-5),  # the report's figure 4
        ("stage2_32b", 1, 2.07114841e-4),
        ("stage2_32b", 23_842, 0.0),
        ("stage3_32b", 200, 2.071235285e-4),
        ("stage3_32b", 11_921, 0.0),
    ],
)
def test_learning_rates_of_the_recipes(recipe, step, expected):
    """A recipe whose curve is not the published one (facts checked against OLMo-core's schedulers)."""
    c = load(recipe)
    got = optim.learning_rate(c.optim, c.schedule, step)
    assert got == pytest.approx(
        expected, rel=1e-3 if expected < 1e-7 else 1e-4 if step in (679_000, 1_000_000) else 1e-6
    )


def test_token_counts_of_the_recipes():
    """A global batch or a number of steps that is off: 5.93T, 5,929,965,715,456, 100.0B and 50.0B tokens."""
    tokens = {r: (c := load(r)).run.steps * c.data.global_batch * c.data.sequence_length for r in RECIPES}
    assert tokens["stage1"] == 1_414_078 * 512 * 8192
    assert tokens["stage1_ai2"] == 5_929_965_715_456
    assert 100e9 <= tokens["stage2"] < 100e9 + 256 * 8192
    assert 50e9 <= tokens["stage3"] < 50e9 + 64 * 65536  # the official script's copy says 5T
    assert tokens["stage1_32b"] == 5_502_926_848_000
    assert 100e9 <= tokens["stage2_32b"] < 100e9 + 512 * 8192
    assert 100e9 <= tokens["stage3_32b"] < 100e9 + 128 * 65536


def test_long_context_recipe():
    """Stage 3 without document masks, padding that is trained on, a YaRN that is not Ai2's; anything else that changes
    from stage 2 but what must."""
    c, before = load("stage3"), load("stage2")
    assert (c.model.yarn.factor, c.model.yarn.original_length) == (8.0, before.data.sequence_length)
    assert (c.model.yarn.beta_fast, c.model.yarn.beta_slow) == (32.0, 1.0)
    assert dataclasses.replace(c.model, yarn=None) == before.model
    assert c.data.document_mask and c.data.mask_token == 100277 and not c.data.repetition_filter
    assert (c.data.seed, c.data.sequence_length, c.data.global_batch) == (34521, 65536, 64)
    assert c.optim == before.optim and c.loss == before.loss


def test_recipes_of_32b():
    """A 32B recipe with something of the 7B's or of the case study's: no filter, masked padding rows, other seeds."""
    stages = [load(f"stage{i}_32b") for i in (1, 2, 3)]
    assert [c.data.global_batch for c in stages] == [1024, 512, 128]
    assert [c.data.seed for c in stages] == [34521, 42069, 34521]
    assert [c.optim.peak_lr for c in stages] == [6e-4, 0.0002071235285, 0.0002071235285]
    for c in stages:
        assert c.data.repetition_filter and c.loss.filtered_in_divisor and not c.model.mask_padded_vocab
        assert dataclasses.replace(c.model, yarn=None) == stages[0].model
    assert stages[2].model.yarn == load("stage3").model.yarn
    assert [c.data.document_mask for c in stages] == [False, False, True]
    # Ai2 averages the checkpoints of these steps.
    assert stages[2].run.steps == 11_921 and stages[2].run.checkpoint_every == 1000


@pytest.mark.parametrize(
    "recipe", ["stage1", "stage1_ai2", "stage2", "stage3", "stage1_32b", "stage2_32b", "stage3_32b"]
)
def test_optimizer_of_ai2s_recipes(recipe):
    """The numbers that all of Ai2's stages share."""
    o = load(recipe).optim
    assert (o.beta1, o.beta2, o.eps, o.weight_decay, o.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert (o.skip_window, o.skip_sigma) == (128, 6.0)
    assert load(recipe).loss.z_loss == 1e-5
