"""The hybrid KV pool: full and sliding-window slots, their mapping, and the batches over them."""

from swa_compile.kv.batch import ForwardBatch
from swa_compile.kv.invariants import check
from swa_compile.kv.layer_spec import LayerSpec
from swa_compile.kv.pool import HybridKVPool
from swa_compile.kv.slots import OutOfSlots, PoolCorrupt

__all__ = ["ForwardBatch", "HybridKVPool", "LayerSpec", "OutOfSlots", "PoolCorrupt", "check"]
