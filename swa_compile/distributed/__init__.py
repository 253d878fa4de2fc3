"""Several ranks: one bucket for all of them, and the proof that they run the same thing.

Compiled forwards hold their collectives like any other operator; nothing here is needed for that.
Both functions are collectives of their own and are called outside of compiled code.
"""

from swa_compile.distributed.buckets import Bucket, agree_on_bucket
from swa_compile.distributed.identity import RankMismatch, verify_ranks

__all__ = ["Bucket", "RankMismatch", "agree_on_bucket", "verify_ranks"]
