"""Exchange the gradients of DistributedDataParallel sooner.

    from stepscope.fix.ddp import tune_buckets

bucket_tuner.py tries bucket sizes while the training goes on, round_robin.py spreads buckets over
several links, accumulation.py exchanges once for several backward passes.
docs/reference/libraries/ddp.md has examples.
"""

from stepscope.fix.ddp.bucket_tuner import BucketTuner as BucketTuner
from stepscope.fix.ddp.bucket_tuner import tune_buckets as tune_buckets
from stepscope.fix.ddp.gradient_exchange import accumulate as accumulate
from stepscope.fix.ddp.gradient_exchange import link_groups as link_groups
from stepscope.fix.ddp.gradient_exchange import round_robin_hook as round_robin_hook
from stepscope.fix.ddp.reducer import set_buckets as set_buckets
