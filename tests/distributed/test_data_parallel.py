"""Data parallel: ranks of unlike N, one of them idle, run one padded size and hang nowhere."""

import pytest

from .launch import launch
from .oracle import close, same_rows
from .programs import steps
from .programs.data_parallel import SIZES, own_steps

LAYERS = 3
SLIDING = ("swa",)  # Inductor compiles each kernel with a C++ compiler


def check(results, layers=steps.CONFIG.layers, atol=1e-5):
    """Each rank's requests against the whole model on one process that knows no others."""
    for rank, got in enumerate(results):
        config = steps.HybridConfig(**{**vars(steps.CONFIG), "layers": layers})
        model, pool = steps.whole_model(config=config)
        wanted = steps.run(model, pool, own_steps(rank)) if any(own_steps(rank)) else None
        if wanted is None:
            assert all(step.shape == (0, 61) for step in got["logits"])
            for k_cache, v_cache in got["rows"]:
                assert not k_cache[1:].any() and not v_cache[1:].any(), "an idle rank wrote rows"
        else:
            close(got["logits"], wanted, 2 * atol)
            same_rows(got["rows"], steps.rows(pool), atol)


def test_four_ranks_agree_pad_run_and_trim_with_one_idle(tmp_path):
    """Rows A5, A7, B56, B57: and each rank compiles while the next has not even begun."""
    results = [
        result
        for (result,) in launch(
            "data_parallel", 4, tmp_path, turns=True, dump_dir=str(tmp_path / "dumps")
        )
    ]
    check(results)
    counts = [[sum(map(len, step.values())) for step in own_steps(rank)] for rank in range(4)]
    assert 0 in counts[3] and not any(counts[2])
    for got in results:
        assert [bucket.rank_tokens for bucket in got["buckets"]] == list(zip(*counts, strict=True))
        assert [bucket.tokens for bucket in got["buckets"]] == [
            min(size for size in SIZES if size >= max(step)) for step in zip(*counts, strict=True)
        ]
        assert got["compilations"] == 1
        (report,) = got["reports"]
        assert (report["translations_found"], report["translation_nodes"]) == (4, 1)
        (stages,) = got["collectives"]
        wanted = ["all_gather_into_tensor", "reduce_scatter_tensor"] * LAYERS
        assert all(found == wanted for found in stages.values()), stages


@pytest.mark.inductor
def test_a_rank_with_a_warm_compile_cache_and_one_without_do_not_hang(tmp_path):
    """Rank 1 loses its cache between two runs: it compiles while rank 0 is in the forward."""
    warm, empty = str(tmp_path / "warm"), str(tmp_path / "empty")
    caches = [[warm, warm], [warm, empty]]
    runs = launch(
        "data_parallel",
        2,
        tmp_path,
        timeout=400,
        engine="swa",
        caches=caches,
        layers=SLIDING,
    )
    check([run[0] for run in runs], SLIDING)
    check([run[1] for run in runs], SLIDING)
    second = [run[1]["reports"] for run in runs]
    assert [[report["from_cache"] for report in reports] for reports in second] == [[True], [False]]
