"""Steps that are timed in turns."""

from __future__ import annotations

import torch

from swa_compile.bench.timing import interleaved

CPU = torch.device("cpu")


def test_every_step_is_timed_in_every_round_and_none_always_behind_the_same_other():
    called: list[str] = []
    names = ("a", "b", "c", "d")
    steps = {name: lambda name=name: called.append(name) for name in names}

    samples = interleaved(steps, 30, CPU)

    rounds = [called[i : i + 4] for i in range(0, len(called), 4)]
    assert len(rounds) == 30
    assert all(sorted(turn) == list(names) for turn in rounds)
    for name in names:
        assert len(samples[name]["wall"]) == 30
        ahead = {turn[turn.index(name) - 1] for turn in rounds if turn[0] != name}
        assert ahead == set(names) - {name}


def test_the_order_is_the_same_in_every_run():
    orders = []
    for _ in range(2):
        called: list[str] = []
        interleaved(
            {name: lambda name=name, called=called: called.append(name) for name in "abcd"}, 10, CPU
        )
        orders.append(called)
    assert orders[0] == orders[1]
