"""Exchange the gradients of DistributedDataParallel sooner.

    from stepscope.fix.ddp import tune_buckets

bucket_tuner.py tries bucket sizes while the training goes on. gradient_exchange.py spreads buckets
over several links, and exchanges once for several backward passes. remedy.py is the change
tuned-buckets. docs/reference/libraries/ddp.md has examples.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.ddp.bucket_tuner import BucketTuner as BucketTuner
    from stepscope.fix.ddp.bucket_tuner import tune_buckets as tune_buckets
    from stepscope.fix.ddp.gradient_exchange import accumulate as accumulate
    from stepscope.fix.ddp.gradient_exchange import link_groups as link_groups
    from stepscope.fix.ddp.gradient_exchange import round_robin_hook as round_robin_hook
    from stepscope.fix.ddp.gradient_exchange import set_buckets as set_buckets

_HOME = {
    "BucketTuner": "bucket_tuner",
    "tune_buckets": "bucket_tuner",
    "accumulate": "gradient_exchange",
    "link_groups": "gradient_exchange",
    "round_robin_hook": "gradient_exchange",
    "set_buckets": "gradient_exchange",
}


def __getattr__(name: str) -> Any:
    """remedy.py is read without torch; all else loads it."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
