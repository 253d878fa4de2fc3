"""The same over NCCL, one GPU per rank."""

import pytest

from .launch import gpus, launch
from .test_data_parallel import check as check_data_parallel
from .test_tensor_parallel import SLIDING, check, check_reports, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(gpus() < 2, reason=f"needs two CUDA GPUs, and torch sees {gpus()} here"),
]
ATOL = 1e-3  # float32 through other kernels than the CPU's


@pytest.mark.parametrize("form", ["functional", "dtensor"])
@pytest.mark.parametrize("micro_pipeline", [False, True])
def test_tensor_parallel_over_nccl(tmp_path, form, micro_pipeline):
    results = launch(
        "tensor_parallel",
        2,
        tmp_path,
        timeout=300,
        device="cuda",
        form=form,
        engine="swa",
        dump_dir=str(tmp_path / "dumps"),
        layers=SLIDING,
        options={"inductor": {"_micro_pipeline_tp": micro_pipeline}, "strict": True},
        cache_dir=str(tmp_path / "cache"),
    )
    check(results, layers=SLIDING, atol=ATOL)
    check_reports(results, SLIDING)
    for got in results:
        assert got["collectives"][0]["02-lowered.py"] == watched(SLIDING)


def test_data_parallel_over_nccl_with_unlike_batches(tmp_path):
    (results,) = zip(
        *launch("data_parallel", 2, tmp_path, timeout=300, engine="swa", device="cuda"),
        strict=True,
    )
    check_data_parallel(results, atol=ATOL)
