"""However many threads begin to train at the same time, one is the rank."""

from __future__ import annotations

from threading import Barrier, Thread

from stepscope.measure.session.session import TrainingClaim


def test_one_of_many_threads_has_it() -> None:
    for _ in range(50):
        claim, together, winners = TrainingClaim(), Barrier(8), []

        def ask(claim: TrainingClaim = claim, together: Barrier = together) -> None:
            together.wait()
            if claim.take():
                winners.append(claim.take())  # noqa: B023

        threads = [Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert winners == [True]


def test_what_was_no_training_gives_it_back() -> None:
    claim = TrainingClaim()
    other = Thread(target=claim.take)
    other.start()
    other.join()
    assert not claim.take()
    claim.release()
    assert claim.take()
