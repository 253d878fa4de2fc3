"""What a random forward is made of: whatever makes memory be shared, handed on or written in place.

A statement has a place, {F} for one, for a value of a kind, that the drawing fills.
"""

HEADS, DIM, MOST = 2, 8, 16
W = HEADS * DIM

# Kinds of values: F [N, W], H [N, HEADS, DIM], C [N, 2 W], D [2 N, W], T [W, N], V [N], S [W],
# I int64 [N] in 0..15, B bool [N, W], Z a number, X [MOST, W]; E is an F that is not written.
MAKES = {
    "F": """
        {F} + {F}.sin() ; {F} * 0.5 - {E}.cos() ; torch.tanh({E} @ {w})
        torch.addmm({S}, {F}, {w}).sin() ; {H}.flatten(1) ; {H}.reshape(-1, W) ; {T}.t()
        {T}.transpose(0, 1) ; {T}.t().contiguous() ; {C}[:, :W] ; {C}[:, W:] ; {C}[:, ::2]
        {C}.chunk(2, 1)[{two}] ; {C}.split([W, W], 1)[{two}] ; {C}.split([4, W, W - 4], 1)[1]
        {C}.unflatten(1, (2, W))[:, {two}] ; {C}.view(-1, W)[::2] ; {D}[:N] ; {D}[-N:] ; {D}[N:]
        {D}[::2] ; {D}.view(-1, 2, W)[:, {two}] ; {D}.narrow(0, 1, N) ; {D}.chunk(2)[{two}]
        {D}.unflatten(0, (2, N))[{two}] ; torch.where({B}, {E}, {F}) ; {E}.masked_fill({B}, 0.25)
        {F}.double().float() ; {F} * {V}[:, None] ; {F} + {S} ; {F} * {Z}
        {F}.sort(1, stable=True).values ; {F}.sort(0, stable=True).values
        torch.cumsum({F}, 0) / 8 ; {F}.cummax(1).values ; {F}.flip(0) ; {F}.roll(1, 0)
        {F}[{I} % N] ; {F}[{I}.clamp(max=N - 1)] ; {F}.index_select(0, {I} % N)
        torch.nn.functional.embedding({I}, {X}) ; {F}.gather(1, ({I} % W)[:, None].expand(-1, W))
        {F}.clone() ; {F}[:] ; {F}.view(-1, W) ; {F}.view(-1).view(N, W)
        torch.nn.functional.pad({F}[1:], (0, 0, 1, 0))
        torch.nn.functional.pad({F}[1:], (0, 0, 0, 1), value=0.5)
        torch.nn.functional.pad({F}[:, 1:], (1, 0), value=0.5)
        torch.nn.functional.pad({F}, (0, 0, 0, 3))[3:]
        torch.nn.functional.pad({F}, (2, 3))[:, 1 : W + 1] ; torch.zeros_like({F})
        torch.full((N, W), 0.5) ; torch.ones(N, 1).expand(N, W) * {S}
        torch.arange(N * W).view(N, W) / (N * W) ; torch.linspace(0, 1, W)[None] + {V}[:, None]
        {F}.softmax(1) ; {F}.log_softmax(0).tanh() ; torch.nn.functional.layer_norm({F}, (W,)) / 4
        {F}.sin().contiguous().as_strided((N, W), (W, 1))
        {D}.cos().contiguous().as_strided((N, W), (2 * W, 1), W)
        {C}.cos().contiguous().as_strided((N, W), (2 * W, 2), 1) ; torch.cat([{F}[:1], {F}[1:]])
        torch.cat([{F}[:2], {F}[:0], {F}[2:]]) ; torch.stack([{F}, {F}, {F}])[{three}]
        torch.stack([{F}, {F}, {E}], 1)[:, {three}] ; torch.stack([{F}, {F}]).sum(0) / 2
        torch.cat([{F}[:, :8], {E}[:, 8:]], 1) ; torch.stack([{V}] * W, 1)
        torch.hstack([{F}[:, :4], {C}[:, 3 : 3 + W - 4]]) ; {X}[:N] + {E} ; {X}[-N:] * 0.5
        {X}[1 : N + 1].clone() ; {F}.slice_scatter({F}[1:], 0, 1) ; {F}.select_scatter({S}, 0, 0)
        {F}.select_scatter({V}, 1, {three}) ; {F}.index_add(0, {I} % N, {F} * 0.1)
        {F}.index_put(({V}.argsort(),), {F})
        {F}.index_put(({I} % N,), {F} * 0.1, accumulate=True)
        {F}.scatter_reduce(0, ({I} % N)[:, None].expand(-1, W), {F}, "amax")
        {F}.index_copy(0, torch.arange(N), {F})
        {F}.contiguous().view(torch.int32).bitwise_and(-2).view(torch.float32)
        torch.einsum("nd,de->ne", {F}, {w}).tanh()
        torch.bmm({H}.transpose(0, 1), {H}.permute(1, 2, 0)).tanh().sum(2).t().repeat(1, 8) / 4
        {F}.clone(memory_format=torch.contiguous_format) ; {F}.t().clone().t()
        torch.empty_like({F}).copy_({F}) ; {F}.new_zeros(N, W).add_({V}[:, None])
        {V}[:, None].repeat(1, W) ; {F}.unbind(1)[3][:, None] + {S}
        {F}.nan_to_num().clamp(-1, 1) ; torch.complex({F}, {F}).abs().tanh()
        torch.view_as_real(torch.view_as_complex({C}.reshape(N, W, 2)) * 0.5)[:, :, 1]
    """,
    "E": """
        {F}.sin() ; {V}[:, None].expand(-1, W) ; {S}.expand(N, W) ; {Z}.expand(N, W)
        {F}[:1].expand(N, W) ; {C}.unfold(1, 2, 2)[:, :, 0]
        {F}.view(N, 1, W).expand(N, 3, W)[:, 1]
    """,
    "C": """
        torch.cat([{F}, {F}], 1) ; torch.cat([{F}, {E}], 1)
        torch.cat([{F}, {F}, {F}], 1)[:, W // 2 : -W // 2] ; torch.stack([{F}, {F}], 1).flatten(1)
        torch.stack([{F}, {F}], 2).flatten(1) ; torch.nn.functional.pad({F}, (0, W))
        torch.nn.functional.pad({F}, (W // 2, W // 2)) ; {D}.reshape(-1, 2 * W) ; {F}.repeat(1, 2)
        {F}.repeat_interleave(2, 1) ; torch.cat([{F}[:, :5], {C}[:, 5:]], 1)
        {D}.unflatten(0, (2, N)).transpose(0, 1).flatten(1) ; {C} * 0.5
        torch.tanh({F} @ torch.cat([{w}, {w}], 1))
    """,
    "D": """
        torch.cat([{F}, {F}]) ; torch.cat([{F}, {E}]) ; torch.stack([{F}, {F}]).view(-1, W)
        torch.stack([{F}, {F}], 1).view(-1, W) ; torch.nn.functional.pad({F}, (0, 0, 0, N))
        {C}.reshape(-1, W) ; {F}.repeat(2, 1) ; {D}.sin() ; {D}.flip(0)
        torch.cat([{F}[1:], {D}[: N + 1]])
    """,
    "T": """
        {F}.t() ; {F}.sin().t() ; {F}.t().contiguous() ; {w} @ {F}.t() / 4
        torch.stack([{V}] * W) ; {T} + 0.5
    """,
    "H": """
        {F}.view(-1, HEADS, DIM) ; {F}.reshape(-1, HEADS, DIM)
        {H}.transpose(1, 2).contiguous().transpose(1, 2) ; {H}[:, torch.tensor([1, 0])]
        {H}.flip(1) ; {H} * 0.5 ; {C}.reshape(-1, 2, HEADS, DIM)[:, {two}]
        {C}.view(-1, 2 * HEADS, DIM)[:, 1:3] ; {D}.view(2, -1, HEADS, DIM)[{two}]
        {H}.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    """,
    "V": """
        {F}.sum(1) / W ; {F}[:, {three}] ; {F}.amax(1) ; {F}.select(1, 2) ; {I}.float() / 16
        {I}.to(torch.float32) * 0.1 ; {F}.gather(1, ({I} % W)[:, None]).squeeze(1)
        {F}.topk(4, 1).values[:, {three}] ; {F}.unbind(1)[5] ; {B}.float().mean(1)
        {F}.std(1).tanh() ; {F}.view(-1)[::W] ; {F}.reshape(-1)[1 : N + 1] ; {T}[3]
        {V}.sort(stable=True).values ; torch.var_mean({F}, 1)[1]
    """,
    "S": """
        {F}.mean(0) ; {F}[0] ; {F}[-1] ; {X}[{three}] ; {F}.amax(0) ; self.hist[{three}]
        {T}.mean(1) ; torch.tensor([0.5] * W) ; torch.arange(W) * 0.1 ; {D}[N]
        {F}[N - 1].clone()
    """,
    "I": """
        {F}.argmax(1) ; {F}.argmin(1) ; ({I} * 3 + 1) % 16 ; {F}.topk(3, 1).indices[:, {three}]
        {F}.sort(1, stable=True).indices[:, {three}] ; {F}.max(1).indices
        translate_loc(mapping, loc) % 16 ; torch.arange(N) % 16 ; {V}.argsort() ; ({V} > 0).long()
        {I}.int().long() ; {I}.to(torch.uint8).long() ; {B}.sum(1) % 16
        torch.stack([{I}, {I}])[{two}] ; torch.cat([{I}[:1], {I}[1:]])
        torch.where({V} > 0, {I}, 3) ; (table[:, 0].long() + 1) % 16 ; torch.full((N,), 3)
        torch.bucketize({V}, self.hist[0].sort().values) % 16
    """,
    "B": """
        {F} > {E} ; {F} > 0.3 ; ({I} > 5)[:, None].expand(-1, W) ; ~{B} ; {B} & {B}
        ({F} > 0).logical_or({B}) ; torch.cat([{B}[1:], {B}[:1]])
        torch.ones(N, W, dtype=torch.bool).tril()
        torch.isin({I}, torch.tensor([1, 3, 5]))[:, None] | {B}
    """,
    "Z": """
        {F}.mean() ; {V}.max() ; {S}[3] ; torch.tensor(0.5) ; {F}.sum() / 256 ; {F}[0, 0]
        {Z} * 0.5 ; ({I}.sum() % 7) / 7 ; self.count.sum() % 5 / 5
        torch.stack([{Z}, {Z}])[{two}] ; {V}.norm().tanh() ; torch.full((), 0.25)
    """,
    "X": """
        {X} * 0.5 ; torch.cat([{S}[None]] * MOST) ; torch.stack([{S}, {S}] * 8)
        torch.zeros(MOST, W) ; torch.zeros(MOST, W).index_add(0, {I}, {F})
        torch.nn.functional.pad({F}, (0, 0, 0, MOST - N)) ; torch.cat([{F}, {X}[N:]])
        {F}.t() @ {F} / 8
    """,
}

WRITES = """
    {F}.add_({F}.sin()) ; {F}.mul_(0.5) ; {F}[:, 3] = {V} ; {F}[:, ::2] = {F}[:, ::2].cos()
    {F}[0] = {S} ; {F}[-1] = {S}.sin() ; {F}[:1] = 0.1 ; {F}[1:].mul_(0.7)
    {F}.masked_fill_({B}, 0.1) ; {F}.index_put_(({V}.argsort(),), {F}.cos())
    {F}.index_put_(({I} % N,), {F} * 0.1, accumulate=True) ; {F}.index_add_(0, {I} % N, {F} * 0.1)
    {F}.copy_({F}.cos()) ; {F}.t().add_(0.1) ; {F}.view(-1)[::3] = 0.2 ; {F}.zero_()
    {F}.clamp_(-0.5, 0.5) ; {F}.select(1, 2).add_({V}.sin())
    {F}.scatter_(1, ({I} % W)[:, None], 0.3) ; {D}[N:].add_({F}.sin()) ; {D}[:N].mul_(0.5)
    {D}[::2] = {E}.sin() ; {C}[:, ::2].mul_(0.3) ; {C}[:, W:] = {F}.sin()
    {C}.chunk(2, 1)[0].add_(0.1) ; {T}[1] = {V} ; {T}.mul_(0.9) ; {H}[:, 0] = 0.2
    {H}[:, :, 1:3].add_(0.1) ; {X}[:N].copy_({F}.sin()) ; {X}[:N] = {E} * 0.5
    {X}[-1] = {S}.sin() ; {X}.index_put_(({V}.argsort(),), {F}.cos())
    {X}.index_add_(0, {I}, {F} * 0.1) ; {X}[{I}.clamp(max=3)] += 0.1 ; {V}.add_(0.1)
    {V}[0] = {Z} ; {S}.mul_(0.9) ; self.count.add_(1) ; self.count[1] += {I}.sum()
    self.hist[1] = {S}.sin() ; self.hist.mul_(0.9) ; self.hist[2:4].copy_({F}[:2].cos())
    self.hist.copy_({X}[:4].sin()) ; {I}.add_(1).remainder_(16) ; out.copy_({E}.sin())
    out[:, :3] = {F}[:, 3:6].cos() ; out[1:] = {F}[1:].sin()
    torch.add({F}.sin(), {F}.cos(), out=out) ; {B}.logical_not_() ; vw.add_(0.1)
    base[:N].mul_(0.9) ; base[1:-1].copy_({F}.sin())
"""

RETURNS = """
    {F} ; {F} ; {F} ; {E} ; {C} ; {D} ; {T} ; {H} ; {V} ; {S} ; {I} ; {B} ; {Z} ; {X} ; {F}[1:]
    {F}.t() ; {F}[:0] ; {C}[:, 3:9] ; {F}.view(-1) ; x ; x[1:] ; y.view(-1) ; out ; vw ; base[1:3]
    ids ; ids[1:] ; self.hist ; self.hist[1] ; self.count ; N ; N + 1 ; 3.5 ; None
"""


def _split(text):
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" ; ")]


MAKES = {kind: _split(text) for kind, text in MAKES.items()}
WRITES, RETURNS = _split(WRITES), _split(RETURNS)
