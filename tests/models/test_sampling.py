"""`Sampling.choose` and `Draws`, against NumPy in float64, token by token."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

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


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e39, 1e308])
def test_a_temperature_that_no_float32_holds_is_no_nan(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf]])
    number = torch.tensor([0.5], dtype=torch.float64)
    cold = temperature < 1
    # The third of three even parts begins at 2/3.
    assert Sampling(temperature).choose(logits, number).tolist() == [1]
    assert Sampling(temperature).choose(logits, number + 0.4).tolist() == [1 if cold else 2]


@pytest.mark.parametrize(
    "row", [[0, 0, torch.nan], [0, torch.inf, 1], [torch.inf] * 3, [-torch.inf] * 3]
)
def test_a_row_without_probabilities_has_no_token(row):
    logits = torch.zeros(20, 3)
    logits[17] = torch.tensor(row)
    numbers = torch.full((20,), 0.3, dtype=torch.float64)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        got = Sampling(temperature, top_p).choose(logits, numbers).tolist()
        assert got[17] == -1 and min(got[:17] + got[18:]) >= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_equals_the_first_come_first_however_many_there_are(dtype):
    """The logits of a large vocabulary are a few thousand numbers, which top_p cuts among."""
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 262144, generator=random) * 2).to(dtype)
    numbers = torch.rand(2, generator=random, dtype=torch.float64)
    got = Sampling(1.0, 0.9).choose(logits, numbers)
    for row in range(2):
        order = np.argsort(-logits[row].double().numpy(), kind="stable").tolist()
        token, _ = wanted(logits[row], float(numbers[row]), 1.0, 0.9)
        # Between probabilities of 1e-7 rounding may decide.
        assert abs(order.index(int(got[row])) - order.index(token)) <= 2


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_no_sum_depends_on_the_order_in_which_it_is_made(top_p):
    """On a GPU torch refuses to add floats up, where deterministic algorithms are asked for."""
    summed = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.cumsum:
                summed.append((kwargs or {}).get("dtype") or args[0].dtype)
            return function(*args, **(kwargs or {}))

    with Watch():
        Sampling(1.0, top_p).choose(torch.randn(3, 9), torch.zeros(3, dtype=torch.float64))
    assert set(summed) == {torch.int64}


def test_top_p_is_told_apart_in_more_digits_than_float32_has():
    number = torch.tensor([0.99], dtype=torch.float64)
    for top_p, token in ((0.5 - 1e-9, 0), (0.5 + 1e-9, 1)):
        assert Sampling(1.0, top_p).choose(torch.zeros(1, 2), number).tolist() == [token]


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


def test_no_two_seeds_are_one():
    """What is left of a seed in 32 or 64 bits is another's."""
    seeds = [0, -1, 2**32, -(2**32), 2**32 + 1, 2**63, 2**64, 10**30, 1_000_003]
    assert len({Draws(seed).number(0, 0) for seed in seeds}) == len(seeds)
    assert Draws(np.int64(2**62)).number(3, 1) == Draws(2**62).number(3, 1)


def test_a_seed_is_an_integer():
    for seed in (1.5, None, True, "3"):
        with pytest.raises(TypeError, match="seed is an int; got"):
            Sampling(1.0, seed=seed)


def test_numbers_are_spread_evenly_over_prompts_and_places():
    draws = Draws(0)
    numbers = np.array([[draws.number(i, j) for j in range(200)] for i in range(200)])
    for part in (numbers, numbers[:, :1], numbers[:1]):
        counts = np.histogram(part, bins=8, range=(0, 1))[0]
        mean = part.size / 8
        assert ((counts - mean) ** 2 / mean).sum() < 30  # chi-squared, 7 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02
