"""Pipeline parallel: stage-local layers and caches, each stage hoists what it has."""

import pytest

from swa_compile.models.pipeline_parallel import stage_layers

from .launch import launch_once
from .oracle import close, same_rows, whole_run

LAYERS = ("swa", "swa", "full", "swa", "full")
STAGES = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_once(tmp_path_factory, "pipeline_parallel", STAGES, layers=LAYERS)


def test_stages_write_the_rows_of_their_own_layers(results):
    """Row B18: cache 0 of the last stage is the last layer's."""
    logits, rows, _ = whole_run(layers=LAYERS)
    close(results[-1]["out"], logits)
    assert [list(got["own"]) for got in results] == [[0, 1], [2], [3], [4]]
    for got in results:
        same_rows(got["rows"], [rows[i] for i in got["own"]])


def test_each_stage_hoists_its_own_layers_and_one_without_sliding_layers_says_so(results):
    for got in results:
        sliding = sum(LAYERS[i] == "swa" for i in got["own"])
        (report,) = got["reports"]
        assert report["translations_found"] == 2 * sliding
        assert report["translation_nodes"] == min(sliding, 1)
        assert report["stores_lowered"] == len(got["own"])
        head = got["summaries"][0].splitlines()[0]
        assert head.startswith(f"{2 * sliding} translations -> {min(sliding, 1)} node"), head
    assert "0 distinct values" in results[1]["summaries"][0]


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (8, 4), (24, 7), (3, 3)])
def test_stages_cover_every_layer_once_and_differ_by_one_at_most(layers, stages):
    found = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [i for own in found for i in own] == list(range(layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers are too few for 4 stages"):
        stage_layers(3, 0, 4)
