"""Ray Tune's trials in arrays: the best of serial runs, though an array's process is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sweep import STEPS, alone, build, means

from stepscope.errors import UsageError
from stepscope.fix.fuse.ray_tune import TrialHost

RATES = [0.3, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001, 0.0003]
EVERY = 3


def host(folder: Path, **changes: Any) -> TrialHost:
    options: dict[str, Any] = {"width": 2, "steps": STEPS, "every": EVERY, "seed": 0, "keep": 1}
    return TrialHost(build, folder / "array-0.checkpoint", **{**options, **changes})


def follow(one: TrialHost, name: str, seen: int = 0) -> list[float]:
    losses: list[float] = []
    while True:
        report = one.next_report(name, seen + len(losses))
        if report is None:
            time.sleep(0.05)
            continue
        losses.append(report["loss"])
        if report["done"]:
            return losses


def test_trials_join_report_and_leave(tmp_path: Path) -> None:
    one = host(tmp_path)
    assert one.join("a", {"lr": 0.1})
    assert one.join("b", {"lr": 0.01})
    assert one.join("a", {"lr": 0.1}), "it is here already"
    assert not one.join("c", {"lr": 0.02})
    assert follow(one, "a") == pytest.approx(means(alone({"lr": 0.1}), EVERY), rel=1e-4)
    one.leave("a")
    assert one.join("c", {"lr": 0.02})
    assert follow(one, "b") == pytest.approx(means(alone({"lr": 0.01}), EVERY), rel=1e-4)
    assert follow(one, "c") == pytest.approx(means(alone({"lr": 0.02}), EVERY), rel=1e-4)
    one.leave("b")
    one.leave("never here")
    assert sorted(one._trials) == ["c"]
    assert (tmp_path / "a.pt").is_file()


def test_a_host_that_starts_again_gives_the_same_reports(tmp_path: Path) -> None:
    one = host(tmp_path, keep=2)
    configs = {"a": {"lr": 0.1}, "b": {"lr": 0.01}}
    assert all(one.join(name, config) for name, config in configs.items())
    for seen in range(3):  # the third round is not in the checkpoint
        while one.next_report("a", seen) is None:
            time.sleep(0.05)
    again = host(tmp_path, keep=2)
    assert sorted(again._trials) == ["a", "b"]
    for name, config in configs.items():
        assert again.join(name, config)
        expected = means(alone(config), EVERY)
        assert follow(again, name, seen=3) == pytest.approx(expected[3:], rel=1e-4)


def test_trials_that_left_after_the_checkpoint_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(tmp_path)
    assert one.join("a", {"lr": 0.1})
    assert one.join("b", {"lr": 0.01})
    assert one.next_report("a", 0)
    one.leave("a")
    again = host(tmp_path)
    assert again.next_report("b", 0)
    assert not again.join("c", {"lr": 0.02}), "they have ten seconds to ask"
    monkeypatch.setattr("stepscope.fix.fuse.ray_tune._GRACE_S", 0.0)
    assert again.join("c", {"lr": 0.02})
    assert sorted(again._trials) == ["b", "c"]
    assert again.next_report("a", 0) == {}


def test_what_a_program_raises_reaches_its_trial_alone(tmp_path: Path) -> None:
    one = host(tmp_path)
    assert one.join("a", {"lr": 0.1})
    with pytest.raises(KeyError, match="lr"):
        one.join("b", {})
    assert len(follow(one, "a")) == STEPS // EVERY


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.fix.fuse.ray_tune import ArrayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'ray\[tune\]'"):
        ArrayPool(build, folder="unused", steps=50)
    with pytest.raises(UsageError, match="width=0"):
        ArrayPool(build, folder="unused", steps=50, width=0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed")
    import logging
    import warnings

    here = str(Path(__file__).parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, runtime_env={"env_vars": {"PYTHONPATH": here}},
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


def process_of(ray: Any, actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _host: os.getpid()))
    return pid


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("search", ["tune", "optuna"])
def test_twelve_trials_end_with_the_best_of_serial_runs_though_one_array_dies(
    search: str, cluster: Any, tmp_path: Path
) -> None:
    from ray import tune

    from stepscope.fix.fuse.ray_tune import ArrayPool

    steps = 240
    pool = ArrayPool(
        build, folder=tmp_path / "arrays", arrays=2, width=3, steps=steps, every=20,
        checkpoint_every=2,
    )  # fmt: skip
    first = process_of(cluster, pool.hosts[0])
    killed: list[int] = []
    ended = threading.Event()

    def kill_in_the_middle() -> None:
        while not ended.is_set() and not killed:
            if (tmp_path / "arrays/array-0.checkpoint").exists():
                os.kill(first, signal.SIGKILL)
                killed.append(first)
            time.sleep(0.02)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    options: dict[str, Any] = {"num_samples": 1}
    space: dict[str, Any] = {"lr": tune.grid_search(RATES)}
    if search == "optuna":
        from ray.tune.search.optuna import OptunaSearch

        known = [{"lr": rate} for rate in RATES]
        space = {"lr": tune.uniform(1e-4, 1.0)}
        options = {
            "num_samples": len(RATES),
            "search_alg": OptunaSearch(metric="loss", mode="min", points_to_evaluate=known),
        }
    results = tune.Tuner(
        pool.trainable(),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", reuse_actors=True, max_concurrent_trials=6, **options
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    ended.set()
    killer.join()
    assert killed == [first]
    assert process_of(cluster, pool.hosts[0]) != first
    assert not results.errors
    serial = {rate: means(alone({"lr": rate}, steps), 20)[-1] for rate in RATES}
    ours = {result.config["lr"]: result.metrics["loss"] for result in results}
    assert ours == pytest.approx(serial, rel=1e-2, abs=1e-4)
    assert results.get_best_result().config["lr"] == min(serial, key=lambda rate: serial[rate])
