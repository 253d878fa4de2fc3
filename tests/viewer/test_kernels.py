"""What is read from Inductor's code, on code written by hand in its manner."""

from swa_compile.generated_code import pieces_and_operators
from swa_compile.viewer.kernels import kernel_calls

ONE_PIECE = """
from torch._inductor import async_compile
cpp_fused_index_0 = async_compile.cpp_pybinding(['const int64_t*'], r'''
    call(arg0_1);
''')
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (97, ), (1, ))
        buf0 = empty_strided_cpu((5, ), (1, ), torch.int64)
        # Topologically Sorted Source Nodes: [translate_loc], Original ATen: [aten.index]
        cpp_fused_index_0(arg0_1, arg1_1, buf0)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        extern_kernels.mm(arg10_1, buf0, out=buf1)
        buf2 = torch.ops.swa.paged_attention.default(buf1, arg1_1)
        triton_poi_fused_add_3.run(buf2, arg0_1, 5, stream=stream0)
        return (buf2, )

def benchmark_compiled_module(times=10, repeat=10):
    fn = lambda: call([arg0_1])
    print_performance(fn, times=times, repeat=repeat)
"""

PIECES = """
def partition_0(args):
    triton_poi_fused_0.run(arg0_1, stream=stream0)
    return (buf0, )

def partition_1(args):
    extern_kernels.mm(buf0, buf1, out=buf2)
    return (buf2, )

class Runner:
    def call(self, args):
        partition0_args = [arg0_1]
        (buf0,) = self.partitions[0](partition0_args)
        buf1 = torch.ops.swa.paged_attention.default(buf0)
        (buf2,) = self.partitions[1](partition1_args)
        return (buf2, )
"""


def test_calls_are_kernels_and_nothing_else():
    assert [(k["name"], k["kind"]) for k in kernel_calls(ONE_PIECE)] == [
        ("cpp_fused_index_0", "generated"),
        ("extern_kernels.mm", "library"),
        ("torch.ops.swa.paged_attention.default", "operator"),
        ("triton_poi_fused_add_3", "generated"),
    ]


def test_kernels_that_are_given_the_mapping_are_marked_by_whole_names():
    marked = [k["name"] for k in kernel_calls(ONE_PIECE, ["arg0_1"]) if k["mapping"]]
    assert marked == ["cpp_fused_index_0", "triton_poi_fused_add_3"]
    assert not any(k["mapping"] for k in kernel_calls(ONE_PIECE, ["arg0"]))


def test_a_kernel_has_the_line_of_its_call_and_the_nodes_of_the_comment_above():
    first, second, third, _ = kernel_calls(ONE_PIECE)
    assert ONE_PIECE.splitlines()[first["line"] - 1].strip().startswith("cpp_fused_index_0(arg0_1")
    assert (first["nodes"], second["nodes"], third["nodes"]) == ("translate_loc", "linear", "")


def test_partitions_are_told_apart_and_ordered():
    assert [(k["name"], k["partition"]) for k in kernel_calls(PIECES)] == [
        ("triton_poi_fused_0", 0),
        ("extern_kernels.mm", 1),
        ("torch.ops.swa.paged_attention.default", None),
    ]
    assert pieces_and_operators(PIECES) == [0, "swa.paged_attention.default", 1]
    assert pieces_and_operators(ONE_PIECE) == []
