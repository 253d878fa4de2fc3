"""transformers models, tensor parallel: rows and logits of transformers' own eager attention."""

import pytest
import torch

from .launch import launch_once
from .oracle import close
from .programs import steps

pytest.importorskip("transformers", reason="needs transformers (the extra `hf`)")

from .programs import hf_families

FAMILIES = ("gemma3", "mistral")
RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    dumps = str(tmp_path_factory.mktemp("transformers"))
    return launch_once(
        tmp_path_factory, "hf_tensor_parallel", RANKS, families=FAMILIES, dump_dir=dumps
    )


def sequences():
    """The tokens of each request after each step."""
    so_far = {i: [] for i in range(3)}
    for step in steps.steps():
        for i, ids in step.items():
            so_far[i] = so_far[i] + ids
        yield {i: so_far[i] for i in step}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_logits_and_rows_of_the_whole_model(results, family):
    model = hf_families.whole_model(family)
    wanted = [
        torch.stack([hf_families.whole_sequence(model, ids)[0] for ids in after.values()])
        for after in sequences()
    ]
    last = {}
    for after in sequences():
        last |= after
    for rank in range(RANKS):
        got = results[rank][family]
        close(got["logits"], wanted)
        compared = 0
        for row, tokens in enumerate(last.values()):
            _, layers = hf_families.whole_sequence(model, tokens)
            for layer, (keys, values) in enumerate(layers):
                sliding = hf_families.SLIDES[family][layer]
                first = max(len(tokens) - hf_families.WINDOW, 0) if sliding else 0
                slots = got["req_to_token"][row, first : len(tokens)].long()
                slots = got["mapping"][slots] if sliding else slots
                assert (slots > 0).all()
                for cache, whole in zip(got["rows"][layer], (keys, values), strict=True):
                    ours = cache[slots]
                    theirs = whole[rank : rank + 1, first:].transpose(0, 1)
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
                    compared += len(slots)
        kept = {True: hf_families.WINDOW, False: steps.WIDTH}
        assert compared == 2 * sum(
            min(len(tokens), kept[slides])
            for tokens in last.values()
            for slides in hf_families.SLIDES[family]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_one_node_per_rank_and_two_all_reduces_per_layer(results, family):
    sliding = sum(hf_families.SLIDES[family])
    for rank in range(RANKS):
        got = results[rank][family]
        (report,) = got["reports"]
        assert (report["translations_found"], report["translation_nodes"]) == (2 * sliding, 1)
        assert (report["translations_left"], report["stores_lowered"]) == (0, 2)
        (stages,) = got["collectives"]
        assert all(found == ["all_reduce"] * 4 for found in stages.values()), stages
