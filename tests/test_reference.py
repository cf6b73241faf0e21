"""Model, loss, training, optimizer, data, learning rate and skip rule against OLMo-core's own code; see parity.py.

Each test runs one comparison of parity.py and holds it to its tolerance; both sides of one kind are computed once.
"""

from importlib import resources

import mixes
import numpy as np
import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_core.data import DataMix, TokenizerName
from olmo_core.data.utils import find_periodic_sequences

import data

pytestmark = pytest.mark.reference


def check(comparison: parity.Comparison) -> None:
    assert comparison.difference <= comparison.tolerance, comparison


def test_every_comparison_is_asserted():
    """Catches a comparison that stands in the printed table and that no test holds to its tolerance."""
    assert {f"test_{compare.__name__}" for compare in parity.COMPARISONS} <= globals().keys()


# ------------------------------------------------------------------------------------------------------------- model


def test_model_logits():
    """Catches any architecture that is not OLMo 3: a norm before its sub-layer, QK-norm per head or after RoPE, a
    window one off, another layer pattern, eps or theta, gate and up swapped, interleaved RoPE, a tied or biased head.
    """
    check(parity.model_logits())


def test_model_logits_yarn():
    """Catches YaRN on the sliding layers too (as several Hugging Face versions had it), its factor on cos or sin
    alone or left out, and a wrong ramp.
    """
    check(parity.model_logits_yarn())
    assert parity.compare_logits(parity.replace(parity.YARN, factor=4.0), parity.YARN) > 1e-3  # it can be seen


def test_recipe_of_7b():
    """Catches a number of the 7B recipe (sizes, window, theta, eps, which layers slide, padding) that is not Ai2's."""
    check(parity.recipe_of_7b())


def test_recipe_of_32b():
    """Catches a number of the 32B recipe that is not Ai2's: key heads, the layers that slide, d_ff by OLMo-core's rule."""
    check(parity.recipe_of_32b())


def test_model_logits_32b():
    """Catches query heads that meet another key head than OLMo-core's: five of them share one in the 32B."""
    check(parity.model_logits_32b())


def test_initial_weights():
    """Catches another std, a cut elsewhere than at 3 std, depth or width scaling, norms that do not start at one."""
    check(parity.initial_weights())


# -------------------------------------------------------------------------------------------------------------- loss


def test_loss_labels():
    """Catches labels that are not shifted, a last position or a filtered row that counts, and a shift that wraps."""
    check(parity.loss_labels())


def test_loss_cross_entropy():
    """Catches another divisor than OLMo-core's: 45 labels + 16 for the filtered instance (not 45, 60 or 64), a
    mean of micro-batch means, z-loss inside the reported CE, and padding rows left out of the softmax.
    """
    check(parity.loss_cross_entropy())
    assert parity.loss_pair()["divisor"] == 45 + 16


def test_loss_z():
    """Catches a z-loss over 97 instead of 104 rows, over masked positions, or with another divisor than the CE's."""
    check(parity.loss_z())


def test_loss_gradients():
    """Catches a backward pass that is not the gradient of CE + 1e-5 lse^2, in whichever tensor."""
    check(parity.loss_gradients())


# ---------------------------------------------------------------------------------------------------------- training


def test_training_ce():
    """Catches anything that drifts: batches of another order, a learning rate one step late, decay in the wrong place,
    clipping after the moments, bias correction that counts skipped steps; over 200 steps, two epochs.
    """
    check(parity.training_ce())
    ce = parity.training().ce
    assert ce[0].min() > 4 and ce[-10:].max() < 1.2  # it learns: agreement at the start's loss would prove little


def test_training_grad_norm():
    """Catches a norm after clipping, a norm without some tensor, and gradients that only the norm would show."""
    check(parity.training_grad_norm())
    norms = parity.training().grad_norm
    assert (norms > 1).any() and (norms < 1).any()  # clipped and not


def test_training_windows():
    """Catches a skip rule that is fed CE with z-loss, or the norm after clipping, which hardly ever shows in a step."""
    check(parity.training_windows())


def test_training_params():
    """Catches a tensor that trains otherwise, also one that hardly changes the loss (norms, the embedding's decay)."""
    check(parity.training_params())


def test_training_skips():
    """Catches a spike that one side alone skips, a skip elsewhere, and an instance that one side alone filters."""
    check(parity.training_skips())
    t = parity.training()
    assert [np.flatnonzero(side).tolist() for side in t.skipped.T] == [[parity.SPIKE - 1]] * 2
    assert t.filtered.sum(axis=0) * 8 == pytest.approx([10, 10])  # five instances in each of two epochs
    np.testing.assert_allclose(t.lr[:, 0], t.lr[:, 1], rtol=5e-7)


# --------------------------------------------------------------------------------------------------------- optimizer


def test_optimizer_moments():
    """Catches moments of unclipped gradients, swapped betas, 1 - beta rounded otherwise, a skipped step that enters."""
    check(parity.optimizer_moments())


def test_optimizer_params():
    """Catches eps inside the root or before the bias correction, decay after the update or not times the learning
    rate, and a bias correction that is one step off or counts the skipped update.
    """
    check(parity.optimizer_params())


def test_optimizer_moments_compiled():
    """Catches a compiled update that is more than contracted roundings away from the written one."""
    check(parity.optimizer_moments_compiled())


def test_optimizer_params_compiled():
    """The same for the parameters."""
    check(parity.optimizer_params_compiled())


def test_optimizer_groups():
    """Catches decay on the embedding, none on norms or head, and a spike that only one side skips."""
    check(parity.optimizer_groups())


# -------------------------------------------------------------------------------------------------------------- data


def test_data_batches():
    """Catches another order, rows of a batch in another order, instances across files, a tail that is not dropped, a
    last partial batch, and an epoch that starts elsewhere.
    """
    check(parity.data_batches())
    assert parity.data_pair()["batches"] > 100


def test_data_order():
    """Catches order files that OLMo-core could not share (name, dtype, content), epochs counted from 0, seed and epoch
    mixed otherwise, and a change of OLMo-core's own order against the vectors recorded in parity.py.
    """
    check(parity.data_order())


def test_data_fingerprint():
    """Catches a fingerprint by which one could not tell that a run of OLMo-core used the same data."""
    check(parity.data_fingerprint())


def test_packed_batches():
    """Catches files grouped in another order, another document in an instance or in another place there, tokens after
    the last EOS, a long document cut elsewhere, padding with a label or in the last document's segment, a label at EOS
    that is masked, and a filter that overlooks padding.
    """
    check(parity.packed_batches())
    assert parity.packed_pair()["instances"] > 500 and parity.packed_pair()["filtered"] > 10


def test_packed_fingerprint():
    """Catches a fingerprint by which one could not tell that a run of OLMo-core packed the same files."""
    check(parity.packed_fingerprint())


def test_repetition_filter():
    """Catches 31 or 33 for 32 repetitions, periods to 12 or 14, spans that are cut at a row of the period or at the end
    of the instance, and a span found across the end.
    """
    check(parity.repetition_filter())
    n, filtered, _ = parity.filter_pair()
    assert 0.1 * n < filtered < 0.9 * n


def test_mixes():
    """Catches a file of OLMo 3's lists that is skipped, moved, or has another label or path: all later instances move."""
    lists = {mix: f"{mix}.txt" for mix in DataMix if mix.value.endswith(("-official", "-100B")) or "longmino" in mix}
    counts = {}
    for mix, name in lists.items():
        with resources.as_file(resources.files("olmo_core") / "data/mixes" / name) as path:
            files = mixes.read_mix(path, "allenai/dolma3-tokenizer")
        paths, labels = mix.build("base", TokenizerName.dolma2)
        assert files == [(label, path.removeprefix("base/")) for label, path in zip(labels, paths, strict=True)]
        counts[mix.value] = len(files)
    assert counts["OLMo-mix-0625-official"] == 1016 and counts["OLMo-midtraining-mix-0625-100B"] == 11933
    assert len(counts) == 7


repetitions = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=14), st.sampled_from([29, 31, 32]), st.sampled_from([-1, 0, 1, 7])
)


@settings(max_examples=400, deadline=None)
@given(st.lists(repetitions | st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.just(1), st.just(0))))
def test_repetition_filter_on_any_input(pieces):
    """Catches a shortcut that is not OLMo-core's decision: repetitions about as long as the limit, that run into each
    other, hold shorter periods or start anywhere; and one that mixes up the rows of a batch.
    """
    parts = [np.resize(pattern, max(0, len(pattern) * times + extra)) for pattern, times, extra in pieces]
    tokens = np.concatenate([*parts, [9]]).astype(np.uint32)
    found = find_periodic_sequences(tokens.astype(np.int64), max_period=13)
    theirs = any(sequence.times >= 32 for sequence in found)
    batch = np.stack([np.arange(len(tokens)), tokens, np.zeros(len(tokens)), tokens])
    assert data.repetition_filtered(tokens) == theirs
    assert data.repetition_filtered(batch).tolist() == [False, theirs, len(tokens) >= 32, theirs]


# ------------------------------------------------------------------------------------------- learning rate and skips


def test_learning_rate_float64():
    """Catches a curve that is a step early or late, ends elsewhere, or passes from one piece to the next elsewhere."""
    check(parity.learning_rate_float64())


def test_learning_rate_float32():
    """Catches fp32 that loses digits where the curve is flat or near zero, after a million steps."""
    check(parity.learning_rate_float32())


def test_skip_rule():
    """Catches a rule that starts a step early or late, is two-sided, takes < for <=, a biased deviation, or a window of
    127 or 129 values, counts the current value in, or leaves skipped values out.
    """
    check(parity.skip_rule())
    assert parity.skip_pair()[1] > 50
