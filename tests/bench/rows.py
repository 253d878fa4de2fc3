"""Records made by hand: what a run on a GPU would have written."""

from swa_compile.bench.record import Record
from swa_compile.bench.timing import summary

ABOUT = {
    "swa_compile": "0.1.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.0",
    "device": "Abacus 9000",
    "cuda": "13.0",
    "date": "2026-01-01 00:00 UTC",
    "options": {},
}

# Milliseconds of a step, by variant.
TIMES = {
    "eager": 4.0,
    "eager-hoisted": 3.0,
    "inductor": 1.25,
    "inductor-aten": 1.0,
    "inductor-hoisted": 1.1,
    "inductor-piecewise": 3.0,
    "swa": 1.0,
    "swa-piecewise": 1.05,
}


def timed(ms, jitter=0.01):
    return summary([ms * (1 + jitter * (i - 2)) for i in range(5)])


def step_row(batch=64, **times):
    variants = {}
    for name, ms in {**TIMES, **times}.items():
        letter = {"inductor-hoisted": "e"}.get(name, "x")
        if ms is None:
            variants[name] = {"letter": letter, "status": "wrong", "reason": "layer 3 | row 7"}
            continue
        variants[name] = {
            "letter": letter,
            "status": "ok",
            "prepare_s": 3.0,
            "gpu_ms": timed(ms),
            "wall_ms": timed(ms + 0.01),
            "kernels": {
                "launches": 48 if name == "swa" else 60,
                "us": 900.0,
                "kinds": {
                    "gemm": {"launches": 20, "us": 500.0},
                    "generated": {"launches": 28, "us": 400.0},
                },
                "names": {},
            },
        }
    if "report" not in variants["swa"]:
        variants["swa"]["report"] = {
            "cache_copies": 0,
            "mapping_kernels": 1,
            "mapping_kernels_late": 0,
        }
    return {
        "config": "ref24",
        "layers": 4,
        "batch": batch,
        "window": 128,
        "context": 128,
        "dtype": "bfloat16",
        "runs": 5,
        "variants": variants,
    }


def record(**rows):
    made = Record(dict(ABOUT))
    made.rows = rows
    return made
