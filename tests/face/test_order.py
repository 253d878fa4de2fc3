"""The prologue comes first: in the generated code, and so in what an error leaves behind."""

import re
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.generated_code import late_mapping_kernels, mapping_kernels
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer

CALL = re.compile(r"^ +(?:\w+ = )?([\w.]+)\((.*)\)$", re.MULTILINE)


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_translations_and_checks_stand_ahead_of_the_first_use_of_a_cache(dynamic, tmp_path):
    """Fused with a layer, or behind something that is, one would run inside that layer."""
    config = HybridConfig(
        layers=("swa", "full") * 2, d_model=32, heads=4, kv_heads=2, head_dim=8, window=8
    )
    pool = HybridKVPool(config.layer_specs(), max_tokens=200, max_requests=4)
    model = HybridTransformer(config, pool).eval()
    requests = [pool.open() for _ in range(3)]
    batch = pool.batch({request: [1, 2, 3] for request in requests})
    before = [cache.clone() for cache in caches_of(pool)]
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        options = {"dump_dir": str(tmp_path), "strict": True}
        compiled = torch.compile(model, backend="swa", dynamic=dynamic, options=options)
        batch.out_cache_loc[4], good = pool.full_tokens + 7, batch.out_cache_loc[4].item()
        # A row beyond the full caches, which the third layer is the first to be given untranslated.
        with pytest.raises(ValueError, match="'loc'"):
            compiled(batch)
        assert all(torch.equal(a, b) for a, b in zip(caches_of(pool), before, strict=True))
        batch.out_cache_loc[4] = good
        compiled(batch)
    (report,) = reports
    assert (report.translation_nodes, report.mapping_kernels_late) == (1, 0)

    code = Path(report.dump, "03-inductor.py").read_text()
    calls = [
        (callee, args)
        for callee, args in CALL.findall(code[code.index("def call(") :])
        if "assert" not in callee and callee != "reinterpret_tensor"
    ]
    first_attention = next(i for i, (callee, _) in enumerate(calls) if "paged_attention" in callee)
    first_product = next(i for i, (callee, _) in enumerate(calls) if callee.endswith(".mm"))
    checks = [i for i, (callee, _) in enumerate(calls) if "check_ids" in callee]
    assert checks
    assert max(checks) < first_product < first_attention


def caches_of(pool):
    return [cache(i) for i in range(len(pool.layers)) for cache in (pool.k_cache, pool.v_cache)]


CODE = """
def call(self, args):
    arg0_1, arg1_1, arg2_1 = args
    assert_size_stride(arg0_1, (97, ), (1, ), 'input')
    buf0 = torch.ops.swa.check_ids.default(arg1_1, -1, 97, "loc")
    cpp_fused_translate_loc_0(buf0, arg0_1, buf1)
    cpp_fused_index_put_1(buf1, arg2_1, buf2)
    cpp_fused_translate_loc_2(buf0, arg0_1, buf3)
    return (buf3, )

def benchmark(arg0_1):
    cpp_fused_translate_loc_0(buf0, arg0_1, buf1)
"""


def test_a_mapping_read_behind_the_first_store_is_seen():
    """Of code that this torch does not write any more, so that it is there to be seen."""
    assert mapping_kernels(CODE, ["arg0_1"]) == 2
    assert late_mapping_kernels(CODE, ["arg0_1"], ["arg2_1"]) == 1
    assert late_mapping_kernels(CODE, ["arg0_1"], ["arg5_1"]) == 0
