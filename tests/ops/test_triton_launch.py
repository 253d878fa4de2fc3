"""A kernel with fixed arguments goes through Triton once for each compiled form, then past it."""

import pytest
import torch

from swa_compile.ops.triton_launch import FixedKernel


class Kernel:
    """Stands for what `triton.jit` makes; counts how it is launched."""

    def __init__(self, compiles=True):
        self.compiles, self.through, self.past = compiles, [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.through.append((grid, args, options))
            return Compiled(self, len(self.through)) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self.kernel.past.append((self.number, grid, args))


def test_the_second_launch_goes_past_triton():
    kernel = Kernel()
    launch = FixedKernel(kernel, (3, True), num_warps=2)
    a, b = torch.zeros(8), torch.ones(8)
    launch((1, 1, 1), a, None)
    launch((7, 1, 1), b, None)
    assert kernel.through == [((1, 1, 1), (a, None, 3, True), {"num_warps": 2})]
    assert kernel.past == [(1, (7, 1, 1), (b, None, 3, True))]


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.zeros(8, dtype=torch.float16), torch.zeros(8)),
        (torch.zeros(9)[1:], torch.zeros(8)),  # no wide loads from there
        (torch.zeros(8), None),
    ],
)
def test_what_decides_the_compiled_form_is_told_apart(tensors):
    kernel = Kernel()
    launch = FixedKernel(kernel, ())
    launch((1, 1, 1), torch.zeros(8), torch.zeros(8))
    launch((1, 1, 1), *tensors)
    assert len(kernel.through) == 2
    assert not kernel.past


def test_the_interpreter_has_no_compiled_form():
    kernel = Kernel(compiles=False)
    launch = FixedKernel(kernel, ())
    for _ in range(2):
        launch((1, 1, 1), torch.zeros(8))
    assert len(kernel.through) == 2
