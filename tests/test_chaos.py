"""Kills at random moments: a short round here, the long one (56 kills) with -m slow, or as  python bench/chaos.py."""

import pytest
from chaos import CAMPAIGNS, MOMENTS, Chaos


def test_killed_at_random_moments(house):
    """Law 2 where nobody thought of it. The only checkpoint deleted before the next one is complete."""
    report = Chaos(house, "one checkpoint", kills=2, seed=0, moments=("step", "save"), steps=20).run()
    assert report["lost"] == [] and report["kills"] == 2 and report["runs_completed"] > 0, report
    assert report["largest_delta_same_devices"] == report["instances_seen_twice"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_killed_at_every_kind_of_moment(house, campaign):
    """The same with other workers, processes and devices at every start (cases 11, 21), SIGTERM once and twice."""
    report = Chaos(house, campaign, kills=14, seed=1).run()
    assert report["lost"] == [] and report["kills"] >= 14 and report["runs_completed"] > 0, report
    assert report["sigterms"] > 0 and len(report["killed_at"].keys() & MOMENTS.keys()) > 4
