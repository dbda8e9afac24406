"""Gymnasium behind the calls of gym before 0.26: copied as gym.py beside older public scripts."""

from typing import Any

import gymnasium
from gymnasium import spaces

__all__ = ["Env", "make", "spaces"]

Env = gymnasium.Env


class _OldCalls:
    """reset() gives the observation alone, step() four values, and seed() exists."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._seed: int | None = None
        self._max_episode_steps = getattr(env.spec, "max_episode_steps", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def unwrapped(self) -> "_OldCalls":
        return _OldCalls(self._env.unwrapped)

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> Any:
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return observation

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, reward, ended, cut, info = self._env.step(action)
        return observation, float(reward), ended or cut, info


def make(name: str, **options: Any) -> _OldCalls:
    return _OldCalls(gymnasium.make(name, **options))
