"""Every family over the pool, compiled, against transformers' own eager attention.

Each family is one test with several checks, so that it is compiled once. `make models` runs all of
them and prints the checks apart (`--model-table`); without that option it is the telling ones.
"""

import dataclasses

import torch

from swa_compile.hf import FAMILIES, HybridGenerator

from . import families, runs

# Relative to the largest logit; float32.
TOLERANCE = 1e-4


def test_every_family_that_is_trusted_without_a_self_check_is_tested():
    assert set(families.CONFIGS) == FAMILIES


def fresh(model, backend, **sizes):
    torch._dynamo.reset()
    return HybridGenerator(
        model, **{"max_tokens": 256, "max_requests": 3, "backend": backend, "chunk": 8, **sizes}
    )


def compare(family, backend, record, **sizes):
    model = families.build(family)
    assert model.config.model_type == families.VARIANTS.get(family, (family,))[0]
    generator = fresh(model, backend, **sizes)
    expected = [layer.spec.kind == "swa" for layer in generator.bridge.layers]
    assert any(expected)
    prompts = runs.prompts()
    failed = {}

    def say(check, right, figure):
        record(check, figure if right else f"**{figure}**")
        if not right:
            failed[check] = figure

    record("family", family)
    run = runs.Decoding(generator.forward, generator.pool, prompts, width=generator.width)
    with generator.collecting():
        run.run(runs.STEPS)
    error = runs.logit_error(model, run)
    say("logits, largest error", error <= TOLERANCE, f"{error:.0e}")
    error, rows = runs.cache_error(model, run)
    say("cache rows, largest error", error <= TOLERANCE and rows > 50, f"{error:.0e}")
    run.close()

    own = generator.generate([*prompts, prompts[1][:5]], runs.STEPS)
    want = [runs.generated(model, p, runs.STEPS) for p in [*prompts, prompts[1][:5]]]
    same = [a == b for a, b in zip(own, want, strict=True)]
    say("greedy tokens", all(same), "equal" if all(same) else f"{sum(same)} of {len(same)} equal")

    reports = generator.reports
    sizes_met = len(run.sizes)
    assert sizes_met >= 6 and {requests for _, requests in run.sizes} == {1, 2, 3}
    say("compilations", 1 <= len(reports) <= 2, f"{len(reports)} for {sizes_met} sizes")
    swa = sum(expected)
    stores = sum(layer.stores for layer in generator.bridge.layers)
    shared = sum(not layer.stores for layer in generator.bridge.layers if layer.spec.kind == "swa")
    # A compressor keeps tokens and entries, and finds tokens again.
    compressed = [x.compression for x in generator.bridge.layers if x.compression is not None]
    sources = sum(len(compression.sources) for compression in compressed)
    stores += 2 * sources
    found = 2 * swa - shared + 2 * sources
    right = all(
        (r.translations_found, r.translations_left, r.translation_nodes) == (found, 0, 1)
        for r in reports
    )
    nodes = {r.translation_nodes for r in reports}
    say("translations", right, f"{found} → {', '.join(map(str, sorted(nodes)))}")
    lowered = {(r.stores_lowered, r.stores_found) for r in reports}
    say("stores lowered", lowered == {(stores, stores)}, " ".join(f"{a}/{b}" for a, b in lowered))
    error = off_by_one(model)
    say("error, window − 1", error > 100 * TOLERANCE, f"{error:.0e}")
    assert not failed, failed


def off_by_one(model):
    """The error of the same comparison where every sliding layer sees one key less."""
    generator = HybridGenerator(model, max_tokens=64, max_requests=1, backend=None, chunk=1)
    run = runs.Decoding(generator.forward, generator.pool, runs.prompts((21,)), chunk=1)
    run.run(0)
    assert runs.logit_error(model, run) <= TOLERANCE
    run.close()
    narrower = {}
    for layer in generator.bridge.layers:
        if layer.spec.kind == "swa":
            spec = dataclasses.replace(layer.spec, window=layer.spec.window - 1)
            narrower[layer] = dataclasses.replace(layer, spec=spec)
    generator.bridge.layers = tuple(narrower.get(x, x) for x in generator.bridge.layers)
    run = runs.Decoding(generator.forward, generator.pool, runs.prompts((21,)), chunk=1).run(0)
    return runs.logit_error(model, run)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("--model-table", default=False)
        metafunc.parametrize("family", families.EVERY if every else sorted(families.TELLING))


def test_the_telling_families_are_families():
    assert set(families.TELLING) <= set(families.EVERY)


def test_family_computes_what_transformers_computes(family, record_property):
    compare(family, "swa_eager", record_property)
