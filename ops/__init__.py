"""Custom operators of hybrid-attention models, registered as `torch.ops.swa.*`.

Translations (`translate_loc`, `translate_page_table`, `translate_paged_loc`) turn ids of the full
pool into ids of the sliding-window pool. Stores (`store_kv`, `store_latent`) write rows of KV
caches. `paged_attention` reads them, by the kernel that `attention_kernel` names or the best there
is; `FlashInferAttention` is one that wants a plan. Each has a reference implementation that is its
specification, a fake for tracing, and the same checks in all of them. `mark_translation` and
`mark_store` tell the passes about operators of your own.
"""

from . import prologue as _prologue  # registers what only the passes call
from . import rows as _rows
from .attention import paged_attention
from .attention_choice import attention_kernel
from .attention_flashinfer import FlashInferAttention
from .marks import mark_store, mark_translation
from .store import store_kv, store_latent
from .translate import translate_loc, translate_page_table, translate_paged_loc

__all__ = [
    "FlashInferAttention",
    "attention_kernel",
    "mark_store",
    "mark_translation",
    "paged_attention",
    "store_kv",
    "store_latent",
    "translate_loc",
    "translate_page_table",
    "translate_paged_loc",
]

del _prologue, _rows
