"""Random nets that change memory between forward and backward train the same with save_memory."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the benchmarks train")

from save_memory_random import OPTIONS, outcome

COUNTED = ("same", "plain training")


@pytest.mark.filterwarnings("ignore")  # of torch, where a net is compiled in part
@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_random_net(seed: int) -> None:
    kind, words = outcome(seed, None)
    assert kind.startswith(COUNTED), words


def test_a_saver_that_changes_a_result_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: one weight is moved after training."""
    import save_memory_random

    trained = save_memory_random.Training.trained

    def moved(self: object, seed: int, options: object) -> object:
        seen, saver = trained(self, seed, options)  # type: ignore[arg-type]
        return ([*seen[:-1], seen[-1] + 1] if saver is not None else seen), saver

    monkeypatch.setattr(save_memory_random.Training, "trained", moved)
    assert outcome(0, None)[0] == "DIFFERS"
