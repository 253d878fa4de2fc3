"""Which kernel computes a call: the default, what asks for another, and why one cannot."""

import threading
from contextlib import nullcontext

import pytest
import torch

from swa_compile import ops
from swa_compile.ops import attention_choice, attention_flashinfer, attention_varlen
from swa_compile.ops.attention_choice import KERNELS, VARIABLE, attention_kernel, choose
from swa_compile.ops.attention_reference import Keys


class Recorder:
    """A kernel that notes its calls and answers with ones."""

    name = "recorder"

    def __init__(self, missing=None, refusal=None):
        self.calls = 0
        self.missing = lambda device: missing
        self.refusal = lambda q, keys: refusal

    def run(self, q, keys, seq_lens, cu_seqlens_q, out):
        self.calls += 1
        out.fill_(1.0)


def call(**changes):
    """Arguments of one decode call: 2 requests of 3 tokens, pages of one token."""
    args = {
        "q": torch.randn(2, 4, 64),
        "k_cache": torch.randn(8, 2, 64),
        "v_cache": torch.randn(8, 2, 64),
        "page_table": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 3], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
    }
    return args | changes


def keys_of(args, window=None, softcap=0.0, sinks=None, page_size=1):
    caches = args["k_cache"], args["v_cache"], args["page_table"]
    return args["q"], Keys(*caches, page_size, window, 0.125, softcap, sinks)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_default_on_a_cpu_is_sdpa_and_the_reference_where_sdpa_has_no_softcap():
    assert choose(*keys_of(call())).name == "sdpa"
    assert choose(*keys_of(call(), softcap=5.0)).name == "reference"


def test_default_on_a_gpu_is_triton_and_what_it_refuses_goes_on():
    pytest.importorskip("triton")
    with torch.device("meta"):
        args = call()

    class OnGpu:
        """Says it is on a GPU; the choice looks at metadata alone."""

        def __init__(self, tensor):
            self.tensor, self.device, self.is_cuda = tensor, torch.device("cuda", 0), False

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    moved = {name: OnGpu(tensor) for name, tensor in args.items()}
    assert choose(*keys_of(moved)).name == "triton"
    assert choose(*keys_of(moved, softcap=5.0, window=3)).name == "triton"
    wide = {name: OnGpu(args[name].double()) for name in ("q", "k_cache", "v_cache")}
    assert choose(*keys_of(moved | wide)).name == "sdpa"


def test_block_overrides_variable_overrides_default(monkeypatch):
    outer, inner = Recorder(), Recorder()
    monkeypatch.setitem(KERNELS, "recorder", outer)
    monkeypatch.setenv(VARIABLE, "recorder")
    assert (ops.paged_attention(**call()) == 1).all()
    with attention_kernel(inner):
        ops.paged_attention(**call())
        with attention_kernel("reference"):
            assert not (ops.paged_attention(**call()) == 1).all()
        ops.paged_attention(**call())
    ops.paged_attention(**call())
    assert (outer.calls, inner.calls) == (2, 2)


def test_block_ends_with_an_error_in_it_and_holds_for_its_own_thread():
    recorder = Recorder()

    def fail():
        thread = threading.Thread(target=lambda: ops.paged_attention(**call()))
        thread.start()
        thread.join()
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), attention_kernel(recorder):
        fail()
    ops.paged_attention(**call())
    assert recorder.calls == 0


def test_compiled_code_follows_the_block_it_is_called_in():
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(ops.paged_attention, backend="aot_eager", fullgraph=True)
    compiled(**call())
    with attention_kernel(recorder):
        assert (compiled(**call()) == 1).all()
    assert recorder.calls == 1


@pytest.mark.parametrize("source", ["attention_kernel", VARIABLE])
def test_what_was_asked_for_and_cannot_is_an_error_with_the_reason(source, monkeypatch):
    def asked(name):
        monkeypatch.setenv(VARIABLE, name)
        return attention_kernel(name) if source == "attention_kernel" else nullcontext()

    start = "^swa::paged_attention: kernel 'sdpa', asked for by {}, cannot compute this call: {}$"
    with (
        asked("sdpa"),
        pytest.raises(ValueError, match=start.format(source, "softcap 2.0; it has none")),
    ):
        ops.paged_attention(**call(), softcap=2.0)
    with (
        asked("varlen"),
        pytest.raises(ValueError, match=f"kernel 'varlen', asked for by {source}"),
    ):
        ops.paged_attention(**call())
    message = f"^{source}: there is no kernel 'cudnn', only triton, flashinfer, varlen, sdpa, ref"
    with pytest.raises(ValueError, match=message), asked("cudnn"):
        ops.paged_attention(**call())


def test_missing_comes_before_refusal():
    kernel = Recorder(missing="no such card", refusal="not this call")
    with attention_kernel(kernel), pytest.raises(ValueError, match=r"cannot .*: no such card$"):
        ops.paged_attention(**call())


def test_flashinfer_without_a_plan_names_what_to_do():
    reason = KERNELS["flashinfer"].refusal(*keys_of(call()))
    assert "FlashInferAttention" in reason


def varlen_cases():
    half = {name: call()[name].half() for name in ("q", "k_cache", "v_cache")}
    fits = call(**half)
    yield None, fits, {"page_size": 256}
    yield None, fits, {"page_size": 512, "window": 4, "sinks": torch.zeros(4)}
    yield "page_size 64; FlashAttention 2 takes multiples of 256", fits, {"page_size": 64}
    yield "softcap 3.0; it has none", fits, {"page_size": 256, "softcap": 3.0}
    yield "q is float32; it takes float16 and bfloat16", call(), {"page_size": 256}
    float8 = half["k_cache"].to(torch.float8_e5m2)
    message = "k_cache is float8_e5m2; it takes q's dtype alone"
    yield message, call(**half | {"k_cache": float8}), {"page_size": 256}
    table = call()["page_table"]
    message = "page_table is int64; it takes int32"
    yield message, call(**half, page_table=table.long()), {"page_size": 256}
    message = "page_table is strided; it takes dense rows"
    yield message, call(**half, page_table=table.t().contiguous().t()), {"page_size": 256}
    narrow = half | {"v_cache": half["v_cache"][..., :32]}
    message = "head dimensions 64 and 32; it takes equal ones, multiples of 8 up to 256"
    yield message, call(**narrow), {"page_size": 256}


@pytest.mark.parametrize(("reason", "args", "options"), list(varlen_cases()))
def test_varlen_says_what_it_cannot_compute(reason, args, options):
    if attention_varlen.missing(torch.device("cpu")) != "it needs an NVIDIA GPU":
        pytest.skip("this torch has no varlen_attn with a block table")
    assert attention_varlen.refusal(*keys_of(args, **options)) == reason


def test_flashinfer_says_what_it_cannot_compute():
    half = {name: call()[name].half() for name in ("q", "k_cache", "v_cache")}
    refusal = attention_flashinfer.refusal
    assert refusal(*keys_of(call(**half), window=3, softcap=1.0, sinks=torch.zeros(4))) is None
    float8 = {name: half[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    assert refusal(*keys_of(call(**half | float8))) is None
    assert refusal(*keys_of(call())) == "q is float32; it takes float16 and bfloat16"
    one = half | {"k_cache": float8["k_cache"]}
    assert refusal(*keys_of(call(**one))) == "k_cache and v_cache differ in dtype"
    narrow = {name: tensor[..., :32] for name, tensor in half.items()}
    assert "head dimensions 32 and 32" in refusal(*keys_of(call(**narrow)))
    stacked = torch.stack([half["k_cache"], half["v_cache"]], 1)
    mixed = half | {"k_cache": stacked[:, 0]}
    assert "the same strides" in refusal(*keys_of(call(**mixed)))


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flashinfer_that_cannot_run_is_an_error_where_it_is_made(monkeypatch, installed, device):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(attention_flashinfer, "missing", attention_flashinfer.missing.__wrapped__)
    why = "NVIDIA GPU" if installed else "not installed"
    with pytest.raises(RuntimeError, match=f"^FlashInferAttention: .*{why}"):
        ops.FlashInferAttention(tokens=1, requests=1, pages=1, device=device)


@pytest.mark.parametrize("name", ["page_table", "seq_lens", "cu_seqlens_q"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.uint32])
@pytest.mark.parametrize(
    "kernel", ["sdpa", "reference", Recorder()], ids=["sdpa", "reference", "own"]
)
def test_wrong_index_dtype_is_an_error_at_the_op_whatever_the_kernel(name, dtype, kernel):
    args = call()
    args[name] = args[name].to(dtype)
    wrong = str(dtype).removeprefix("torch.")
    message = f"^swa::paged_attention: argument '{name}' must be int32 or int64, got {wrong}$"
    with attention_kernel(kernel), pytest.raises(TypeError, match=message):
        ops.paged_attention(**args)
    if isinstance(kernel, Recorder):
        assert not kernel.calls


def test_every_default_is_a_kernel_that_can_be_asked_for():
    assert {kernel.name for kernel in attention_choice._BY_DEFAULT} <= set(KERNELS)
