"""Calls in pieces become lists of launches where that is all of them, and only there."""

import pytest
import torch

import swa_compile
from swa_compile.addresses import Placement
from swa_compile.generated_code import calls_around_pieces
from swa_compile.ops.attention_choice import KERNELS, attention_kernel

from .test_compiled import LAYERS, Forward, agree, decode, extend

ATTENTION = "swa.paged_attention.default"
CODE = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        s77 = arg1_1
        if not (s77 >= 0):
            raise RuntimeError('s77 >= 0')
        assert_size_stride(arg0_1, (s77, 8), (8, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            partition0_args = [arg0_1, s77]
            (buf0, buf1) = self.partitions[0](partition0_args)
            del partition0_args
            buf2 = torch.ops.swa.paged_attention.default(reinterpret_tensor(buf0, (s77, 8), (8, 1), 0), buf1, scale=None)
            buf3 = buf2
            assert_alignment(buf3, 16, 'torch.ops.swa.paged_attention.default')
            {more}
            partition1_args = [buf3, s77]
            (buf4,) = self.partitions[1](partition1_args)
        return (buf4, )

runner = Runner(partitions=[partition_0, partition_1])


def partition_0(args):
    pass


    def partition_1(args):
        pass
"""  # noqa: E501


def test_code_that_hands_tensors_around_is_known_whole():
    calls = calls_around_pieces(CODE.replace("{more}", "stream0 = get_raw_stream(0)"))
    assert calls == [0, ATTENTION, 1]
    calls = calls_around_pieces(CODE.replace("{more}", "torch.ops.mine.log.default(buf3)"))
    assert calls == [0, ATTENTION, "mine.log.default", 1]
    for more in ("arg4_1 = copy_if_misaligned(arg4_1)", "assert_size_stride_grouped(buf3, buf2)"):
        assert calls_around_pieces(CODE.replace("{more}", more)) == [0, ATTENTION, 1]
    more = "assert_tensor_metadata(buf3, (s77, 8), (8, 1), torch.float32, 'an operator')"  # 2.14
    assert calls_around_pieces(CODE.replace("{more}", more)) == [0, ATTENTION, 1]


@pytest.mark.parametrize(
    "statement",
    [
        "triton_poi_fused_0.run(buf3, 8, stream=stream0)",
        "buf5 = empty_strided_cuda((8, ), (1, ), torch.float32)",
        "u0 = buf3.item()",
        "buf5 = buf3[0]",
        "buf3[0] = 1",
        "extern_kernels.mm(buf3, buf3, out=buf3)",
        "for i in range(3): pass",
        "if s77 > 4: buf3 = buf2",
        "aten.mul_.Tensor(buf3, 2)",
    ],
)
def test_code_that_does_more_is_not(statement):
    assert calls_around_pieces(CODE.replace("{more}", statement)) is None


def test_code_of_another_form_is_not():
    assert calls_around_pieces("") is None
    assert calls_around_pieces("def call(args):\n    return args") is None
    assert calls_around_pieces("def partition_0(args:\n") is None
    assert calls_around_pieces("def partition_0(args):\n    pass\nclass Runner:\n    pass") is None


class Counting:
    """An attention kernel of a user's: the reference, counted."""

    name = "counting"

    def __init__(self):
        self.runs = 0

    def missing(self, device):
        return None

    def refusal(self, q, keys):
        return None

    def run(self, *args):
        self.runs += 1
        KERNELS["reference"].run(*args)


@pytest.mark.inductor
def test_an_override_of_the_attention_holds_for_calls_that_are_repeated(on_cpu):
    model, reference = Forward(), Forward()
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": "piecewise"})
    with swa_compile.collect() as reports:
        agree(model, compiled, reference, [extend(4, seed) for seed in range(4)])
        captures = reports[0].captures
        assert (captures.replays, captures.direct_replays) == (3, 2)

        mine, other = Counting(), Counting()
        with attention_kernel(mine):
            agree(model, compiled, reference, [extend(4, seed) for seed in (5, 6)])
        assert mine.runs == 2 * 2 * LAYERS  # ours, and the reference's
        assert captures.direct_replays == 2
        agree(model, compiled, reference, [extend(4, 7)])
        assert mine.runs == 2 * 2 * LAYERS

        with attention_kernel(other):  # another size is recorded under the override
            agree(model, compiled, reference, [decode(8, seed) for seed in range(4)])
        assert other.runs == 4 * 2 * LAYERS
        assert captures.direct_replays == 2  # a bucket that somebody chose for has the long way


@pytest.mark.inductor
@pytest.mark.parametrize("offset", [0, 1])
def test_lengths_that_are_not_aligned_are_read_at_every_call(on_cpu, offset):
    """On a GPU Inductor copies them ahead of its code, which a list of launches leaves out."""
    model, reference = Forward(), Forward()
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": "piecewise"})
    held = decode(4, 0)
    packed = torch.zeros(16, dtype=torch.int32)
    held[4] = packed[offset : offset + 4]
    with swa_compile.collect() as reports:
        for seed in range(5):
            for mine, new in zip(held, decode(4, seed), strict=True):
                mine.copy_(new)
            held[4][seed % 4] = 1
            agree(model, compiled, reference, [held])
    direct = reports[0].captures.direct_replays
    assert direct == 0 if offset else direct > 0


def test_inputs_that_inductor_would_copy_are_seen():
    base = torch.zeros(64, dtype=torch.int32)
    assert Placement({0: base, 1: base[4:]}, {}).aligned()
    assert not Placement({0: base, 1: base[1:]}, {}).aligned()
    assert Placement({0: base}, {1: base[1:]}).aligned()  # a buffer of its own
