"""A long run of random requests through captured graphs; see `tests.decoding.soak`."""

from pathlib import Path

from tests.decoding.soak import draw_known, load_soaked, soak


def test_two_thousand_requests(tmp_path: Path) -> None:
    """J2, K2, K3: each ends as it does alone and without graphs; nothing is compiled anew or runs off a graph."""
    known = draw_known(load_soaked(tmp_path, device="cuda", mode="eager"), 300, seed=3)
    runner = load_soaked(tmp_path, device="cuda", mode="graph")
    found = soak(runner, known, requests=2000, seed=3)
    stats = runner.stats
    assert stats.recompiles == stats.eager_fallbacks == 0
    assert stats.graph_hits > 0 < stats.embeds_graph_hits
    assert stats.graph_hits + stats.embeds_graph_hits == found.steps
    assert min(found.cancelled, found.preemptions, found.evictions, found.cached_tokens) > 0


def test_either_path_may_be_captured_anew(tmp_path: Path) -> None:
    """K4: while the other's graphs stay, and after both are gone."""
    known = draw_known(load_soaked(tmp_path, device="cuda", mode="eager"), 60, seed=4)
    runner = load_soaked(tmp_path, device="cuda", mode="graph")
    for turn, paths in enumerate([(), ("embeds",), ("ids",), ("embeds", "ids"), ("ids", "embeds")]):
        assert runner.graphs is not None
        for path in paths:
            runner.graphs.drop(path)
        runner.engine = runner.make_engine()
        soak(runner, known, requests=60, seed=turn)
    assert runner.stats.recompiles == runner.stats.eager_fallbacks == 0
