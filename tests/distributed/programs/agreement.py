"""What ranks agree on without a model: buckets, and whether they run the same thing."""

import platform
from unittest import mock

import torch
import torch.distributed as dist

import swa_compile
from swa_compile.distributed import RankMismatch, agree_on_bucket
from swa_compile.ops import translate_loc

SIZES = (4, 8, 16)


def main(rank):
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return {"buckets": buckets(rank, half), "identities": identities(rank, half)}


def buckets(rank, half):
    return {
        "unlike": said(agree_on_bucket, [3, 9, 0, 1][rank], [1, 2, 0, 1][rank], SIZES),
        "all idle": said(agree_on_bucket, 0, 0, SIZES),
        "own sizes for requests": said(
            agree_on_bucket, 5 + rank, rank, SIZES, request_sizes=(1, 2, 3, 64)
        ),
        "half": said(agree_on_bucket, 2 + 3 * rank, 1, SIZES, half),
        "too many": said(agree_on_bucket, 17 if rank == 2 else 1, 1, SIZES),
        "negative": said(agree_on_bucket, -1 if rank == 3 else 1, 1, SIZES),
        "other sizes": said(agree_on_bucket, 1, 1, (4, 8) if rank == 1 else SIZES),
        "afterwards": said(agree_on_bucket, 1, 1, SIZES),
    }


def identities(rank, half):
    like = reports_of(lambda m, loc: translate_loc(m, loc) + 1)
    twice = reports_of(lambda m, loc: translate_loc(m, loc) + translate_loc(m, loc))
    verify = swa_compile.verify_ranks
    found = {
        "same": said(verify, like, {"strict": True, "dump_dir": f"/anywhere/{rank}"}),
        "option": said(verify, like, {"lower_stores": rank != 3}),
        "inductor": said(verify, like, {"inductor": {"max_autotune": True} if rank == 2 else {}}),
        "report": said(verify, twice if rank in (1, 2) else like),
        "graphs": said(verify, [] if rank == 0 else like),
        "half": said(verify, like, {"strict": rank > 1}, half),
    }
    with mock.patch.object(platform, "python_version", return_value=f"3.1{rank // 2}"):
        found["version"] = said(verify)
    found["afterwards"] = said(verify)
    return found


def reports_of(forward):
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = torch.compile(forward, backend="swa_eager", fullgraph=True)
        call(torch.tensor([0, 3, 5, -1]), torch.tensor([2, 1]))
    return reports


def said(call, *args, **kwargs):
    """The result, or the error's type, message and attributes."""
    try:
        return call(*args, **kwargs)
    except (ValueError, RankMismatch) as error:
        return type(error).__name__, str(error), getattr(error, "differences", None)
