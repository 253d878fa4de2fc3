"""`Sampling.choose` and `Draws`, against NumPy in float64, token by token."""

import numpy as np
import pytest
import torch

from swa_compile.hf import Sampling
from swa_compile.hf.draws import Draws


def wanted(logits, number, temperature, top_p):
    """The token in whose part of [0, 1) `number` falls, and how far from the part's borders."""
    scaled = logits.double().numpy() / temperature
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    tokens = np.arange(len(chances))
    if top_p < 1:
        tokens = np.argsort(-chances, kind="stable")
        sums = np.cumsum(chances[tokens])
        tokens = tokens[: 1 + np.searchsorted(sums, top_p)]
    parts = np.cumsum(chances[tokens])
    at = int(np.searchsorted(parts / parts[-1], number, side="right"))
    return int(tokens[at]), float(np.abs(parts / parts[-1] - number).min())


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
def test_a_token_is_that_in_whose_part_the_number_falls(rows, top_p, temperature):
    random = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 500, generator=random) * 3
    numbers = torch.rand(rows, generator=random, dtype=torch.float64)
    got = Sampling(temperature, top_p).choose(logits, numbers)
    assert got.dtype is torch.int64 and got.shape == (rows,)
    compared = 0
    for row in range(rows):
        token, distance = wanted(logits[row], float(numbers[row]), temperature, top_p)
        if distance > 1e-6:  # else rounding decides
            assert int(got[row]) == token
            compared += 1
    assert compared >= rows - 1


def test_the_ends_of_the_numbers_fall_on_tokens_with_a_chance():
    logits = torch.full((2, 9), -torch.inf)
    logits[:, 3], logits[:, 5] = 1.0, 0.0
    numbers = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for top_p in (1.0, 0.99):
        assert Sampling(1.0, top_p).choose(logits, numbers).tolist() == [3, 5]


def test_a_temperature_near_0_is_greedy_and_no_overflow():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -4.0, 0.0]])
    numbers = torch.tensor([0.999, 0.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert Sampling(1e-44).choose(logits.to(dtype), numbers).tolist() == [1, 0]


def test_a_row_with_nan_has_no_token():
    logits = torch.zeros(20, 4)
    logits[17, 2] = torch.nan
    numbers = torch.full((20,), 0.3, dtype=torch.float64)
    for top_p in (1.0, 0.5):
        got = Sampling(1.0, top_p).choose(logits, numbers).tolist()
        assert got[17] == -1 and min(got[:17] + got[18:]) >= 0


def test_greedy_takes_the_first_of_the_most_likely():
    assert Sampling().choose(torch.tensor([[0.0, 2.0, 2.0]]), None).tolist() == [1]


def test_a_number_is_told_by_seed_prompt_and_place_alone():
    draws = Draws(5)
    row = [draws.number(2, place) for place in range(200)]
    other = [draws.number(3, place) for place in range(200)]
    again = Draws(5)
    assert [again.number(2, place) for place in reversed(range(200))] == row[::-1]
    assert len({*row, *other, *(Draws(6).number(2, place) for place in range(200))}) == 600
    assert min(row) >= 0 and max(row) < 1
    assert abs(np.mean(row + other) - 0.5) < 0.05
