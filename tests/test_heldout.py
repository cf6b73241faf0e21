"""heldout.py."""

import numpy as np
from corpora import S, assert_same, make_index, random_tokens

import heldout


def test_held_out_covers_everything_once(corpus):
    """Held-out evaluation that drops the tail, counts padding rows, or mixes up domains between hosts."""
    batches = heldout.EvaluationBatches(corpus, None, 4)
    assert len(batches) == 6 and batches.domains == ["code", "web"]
    got = list(batches)
    ids = np.concatenate([b["instance"] for b in got])
    assert ids.tolist() == [*range(23), -1]
    assert all(b["tokens"].shape == (4, S) for b in got)
    assert not got[-1]["loss_mask"][-1].any() and got[-1]["loss_mask"][0].sum() == S - 1
    assert batches.instances.tolist() == list(range(23)) and batches.domain.tolist() == [1] * 10 + [0] * 13
    halves = [list(heldout.EvaluationBatches(corpus, None, 4, rows=r)) for r in ([0, 1], [2, 3])]
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*halves, strict=True)]
    assert_same(joined, got)
    few = heldout.EvaluationBatches(corpus, None, 4, limit=6)  # spread over both files, not the first ones
    assert few.instances.tolist() == [0, 3, 7, 11, 15, 19] and few.domain.tolist() == [1, 1, 1, 0, 0, 0]
    assert np.concatenate([b["instance"] for b in few]).tolist() == [0, 3, 7, 11, 15, 19, -1, -1]
    assert len(heldout.EvaluationBatches(corpus, None, 50)) == 1  # fewer instances than a batch


def test_held_out_loss_of_what_is_learnt(tmp_path):
    """Held-out loss that counts a user's words as well, or the mask of another row."""
    learnt = np.random.default_rng(1).random(5 * S) < 0.5
    (tmp_path / "chat").mkdir()
    learnt.tofile(tmp_path / "chat/labels_mask_part.npy")
    index = make_index(tmp_path, {"chat/part.npy": random_tokens(5 * S)})
    masks = np.concatenate([batch["loss_mask"] for batch in heldout.EvaluationBatches(index, None, 3)])
    expected = np.pad(learnt.reshape(5, S)[:, 1:], ((0, 1), (0, 1)))  # the last row fills the batch up
    np.testing.assert_array_equal(masks, expected)
