"""tools/tour.py: the pictures are drawn, and show what they say."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import tour

import model


def test_pictures(tmp_path):
    """A picture that is missing, blank, or so large that nobody's page loads it."""
    assert tour.main(["--out", str(tmp_path / "out")]) == 0
    for name in tour.PICTURES:
        path = tmp_path / "out" / f"{name}.png"
        pixels = plt.imread(path)
        assert pixels.shape[1] > 800 and pixels.std() > 0.05 and path.stat().st_size < 120_000, name
    assert len(list((tmp_path / "out").iterdir())) == len(tour.PICTURES)


def test_a_file_in_the_way(tmp_path, capsys):
    (tmp_path / "out").touch()
    assert tour.main(["--out", str(tmp_path / "out")]) == 2
    assert "got a file, expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("window", [6, None])
def test_keys(window):
    """A mask that is drawn by another rule; a pair that no shard computes, or one that two do."""
    n = tour.S
    brute = np.array([[k <= q and (window is None or q - k < window) for k in range(n)] for q in range(n)])
    np.testing.assert_array_equal(tour.keys_of(window), brute)
    owner = tour.context_keys_of(window)
    np.testing.assert_array_equal(owner >= 0, brute)
    work = np.bincount(owner[owner >= 0], minlength=tour.SHARDS)
    assert window is not None or work.max() - work.min() == 0  # the full layer's is dealt out evenly


def test_documents():
    documents = np.repeat([0, 1], [9, tour.S - 9])
    mask = tour.keys_of(None, documents)
    assert mask.sum() == 9 * 10 // 2 + (tour.S - 9) * (tour.S - 8) // 2


def test_order():
    """Repeats that are not marked, or marked where there are none; MaxText's fault modelled otherwise than measured."""
    ours, theirs = tour.order_of(), tour.double_sharded_of()
    assert not tour.repeats_of(ours).any()
    seen = set()
    by_hand = [[i in seen or seen.add(i) is not None for i in row] for row in theirs.tolist()]
    np.testing.assert_array_equal(tour.repeats_of(theirs), by_hand)
    assert 0.1 < tour.repeats_of(theirs).mean() < 0.3


def test_a_layers_traffic():
    """A weight under another one's bar, or a gather that is not there."""
    forward, backward = tour.layer_of()
    table = {name: t.shape[1:] for name, t in model.ledger(tour.load_config("stage1", "v5p", []).model).items()}
    gathered = {e.what: e for e in forward if e.kind == "all-gather"}
    scattered = {e.what: e for e in backward if e.kind == "reduce-scatter"}
    assert gathered.keys() == scattered.keys() == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
    for name, (rows, columns) in ((name, table[name]) for name in gathered):
        assert gathered[name].shape == (rows // 32, columns // 2)
        assert gathered[name].size == pytest.approx(rows * columns / 2 * 2 * 31 / 32 / 1e6)  # bf16, over 32 devices
        assert scattered[name].shape == (rows, columns // 2)
        assert scattered[name].size == pytest.approx(2 * gathered[name].size)  # fp32
    assert [e.what for e in forward if e.kind == "all-reduce"] == ["attention_block", "feed_forward_block"]


def test_skips():
    """A band that is not the rule's, a spike that is drawn as skipped and was not."""
    r = tour.skip_of()
    assert np.flatnonzero(r["skipped"]).tolist() == [tour.SPIKE]
    before = r["loss"][tour.SPIKE - 32 : tour.SPIKE].astype(np.float64)
    assert r["highest"][tour.SPIKE] == pytest.approx(before.mean() + 6 * before.std(ddof=1), abs=2e-3)
    assert r["loss"][tour.SECOND] < r["highest"][tour.SECOND]
