"""Collectives keep their place and number: nothing moves above one, none is dropped or merged."""

import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from swa_compile.ops import translate_loc

LOC = torch.tensor([90, 41, -1, 77, 30])


@pytest.fixture(scope="module")
def group():
    """A gloo group of one process, through memory: no port is opened."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ids_from_a_collective_are_translated_behind_it(group, compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc, x):
        gathered = funcol.all_gather_tensor(loc, 0, group)
        return translate_loc(mapping, gathered) + translate_loc(mapping, gathered), x * 2

    (result, _), (report,) = compiled(forward, mapping, LOC, torch.ones(2))

    want = [-2 if i == -1 else 2 * int(mapping[i]) for i in LOC.tolist()]
    assert result.tolist() == want
    assert [refusal.code for refusal in report.refused] == ["IMPURE_PRODUCER"]
    assert (report.translation_nodes, report.translations_left) == (1, 1)
    assert report.collectives == ["all_gather_into_tensor(1)"]


@pytest.mark.inductor
def test_every_collective_is_kept_in_order_even_if_nobody_reads_it(
    group, compiled, make_mapping, tmp_path
):
    mapping = make_mapping()

    def forward(mapping, loc, x):
        for layer in range(3):
            funcol.all_reduce(x + layer, "sum", group)  # its result is unused
            x = funcol.all_reduce(x * translate_loc(mapping, loc), "sum", group)
        return x

    x = torch.ones(5)
    want = x
    for _ in range(3):
        want = want * torch.where(LOC < 0, -1, mapping[LOC.clamp(min=0)])
    for engine in ("swa_eager", "swa"):
        result, (report,) = compiled(
            forward, mapping, LOC, x, engine=engine, dump_dir=str(tmp_path / engine)
        )
        assert torch.equal(result, want)
        assert (report.translations_found, report.translation_nodes) == (3, 1)
        assert report.collectives == ["all_reduce(sum)"] * 6
        folder = pathlib.Path(report.dump)
        calls = [
            (folder / name).read_text().count("_c10d_functional.all_reduce.default(")
            for name in ("00-functional.py", "02-lowered.py")
        ]
        assert calls[0] == calls[1] == 6
