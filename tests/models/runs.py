"""A model run over its pool, step by step, beside transformers' own eager attention."""

import copy
import math

import torch

from swa_compile.kv import check

# Past the window of 8, past one chunk of prefill, and shorter than both.
LENGTHS = (21, 13, 3)
STEPS = 40


def prompts(lengths=LENGTHS, vocab=90):
    random = torch.Generator().manual_seed(2)
    return [torch.randint(3, vocab, (n,), generator=random).tolist() for n in lengths]


@torch.no_grad()
def eager_logits(model, tokens):
    """Logits `[T, vocab]` of the whole sequence at once, by the model's own eager attention."""
    assert model.config._attn_implementation == "eager"
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def rope_by_length(model):
    """Whether RoPE goes by length: "longrope" or "dynamic"; None for other RoPE."""
    text = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    return next((kind for kind in ("longrope", "dynamic") if f"'{kind}'" in text), None)


@torch.no_grad()
def eager_rows(model, sequence, start):
    """Logits after `start` tokens of `sequence`, after `start + 1`, ... by eager attention.

    With `longrope` one length's keys are not another's, so each step is a forward of all its
    tokens. With `dynamic` RoPE the keys stay as they were made, so the steps go over a cache; the
    model keeps the longest length that it has met, so a copy is asked.
    """
    kind = rope_by_length(model)
    if kind == "longrope":
        steps = range(start, len(sequence) + 1)
        return torch.stack([eager_logits(model, sequence[:n])[-1] for n in steps])
    if kind == "dynamic":
        return over_a_cache(model, sequence, start)[0]
    return eager_logits(model, sequence)[start - 1 :]


@torch.no_grad()
def over_a_cache(model, sequence, start):
    """Logits as `eager_rows` and the cache, `start` tokens at once and the others one by one."""
    from transformers import DynamicCache

    fresh, cache = copy.deepcopy(model), DynamicCache(config=model.config)
    rows = []
    for piece in [sequence[:start], *([token] for token in sequence[start:])]:
        at = cache.get_seq_length()
        positions = torch.arange(at, at + len(piece))[None]
        ids = torch.tensor([piece])
        out = fresh(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows), cache


def generated(model, prompt, count):
    """New tokens of `model.generate`."""
    kind = rope_by_length(model)
    fresh = copy.deepcopy(model) if kind == "dynamic" else model
    ids = torch.tensor([prompt])
    # Past the border of longrope `generate` drops its cache and goes on with one token, as if
    # there had been no others (transformers 5.17); without a cache it computes all of them.
    out = fresh.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        use_cache=kind != "longrope",
    )
    return out[0, len(prompt) :].tolist()


def poison(pool):
    """NaN in every row that no live token owns: free, evicted, unwritten, and the sink's.

    A compressed entry is live while the last token of its group is.
    """
    size = pool.page_size
    owned = {"full": set(), "swa": set()}
    for request in pool._ledger.requests.values():
        for kind, pages, first in (
            ("full", request.full_pages, 0),
            ("swa", request.swa_pages, request.evicted * size),
        ):
            for position in range(first, request.length if pages else 0):
                page = pages[position // size - first // size]
                owned[kind].add(page * size + position % size)
    for i, spec in enumerate(pool.layers):
        live = set(owned.get(spec.kind, ()))
        if spec.ratio is not None:
            live |= {entry_row(pool, i, request, n) for request, n in every_entry(pool, spec.ratio)}
        for cache in (pool.k_cache(i), pool.v_cache(i)):
            dead = torch.ones(cache.shape[0], dtype=torch.bool)
            dead[list(live)] = False
            cache[dead] = float("nan")


def every_entry(pool, ratio):
    """Request and number of each entry that there is."""
    for request in pool._ledger.requests.values():
        yield from ((request, n) for n in range(request.length // ratio))


def entry_row(pool, cache, request, number):
    """The row of an entry: its group's last full slot, among so many slots as share one."""
    size, ratio = pool.page_size, pool.layers[cache].ratio
    last = number * ratio + ratio - 1
    slot = request.full_pages[last // size] * size + last % size
    shared = math.gcd(ratio, size)
    rows = (pool.full_tokens + size) // shared
    return pool.k_cache(cache).shape[0] - rows + slot // shared


class Decoding:
    """Requests that join, are prefilled in chunks, decode greedily, and are compared.

    Attributes:
        sequences: prompt and new tokens of each request.
        logits: of each request, from its whole prompt on, a row per step.
        sizes: (tokens, requests) of each forward.
    """

    def __init__(self, forward, pool, all_prompts, chunk=8, width=None):
        self.forward, self.pool, self.chunk = forward, pool, chunk
        self.bridge = forward.bridge
        self.begun = [0] * len(all_prompts)
        self.width = width or pool.max_context // pool.page_size
        self.sequences = [list(prompt) for prompt in all_prompts]
        self.starts = [len(prompt) for prompt in all_prompts]
        self.logits = [[] for _ in all_prompts]
        self.rows = [None] * len(all_prompts)
        self.sizes = set()

    def step(self, members):
        """One forward of the requests `members`: their next chunk or their next token."""
        pieces = []
        for i in members:
            length, border = len(self.sequences[i]), self.bridge.adaptation.restart_at
            outgrown = border is not None and self.begun[i] <= border < length
            if self.rows[i] is not None and outgrown:
                self.pool.close(self.rows[i])
                self.rows[i] = None
            if self.rows[i] is None:
                self.rows[i], self.begun[i] = self.pool.open(), length
            sent = self.pool.length(self.rows[i])
            most = self.pool.piece_bound(self.rows[i]) or self.chunk
            pieces.append(self.sequences[i][sent : sent + min(most, self.chunk)])
        poison(self.pool)
        pairs = [(self.rows[i], ids) for i, ids in zip(members, pieces, strict=True)]
        lengths = [len(self.sequences[i]) for i in members]
        batch = self.bridge.batch(self.pool, pairs, lengths, width=self.width)
        poison(self.pool)  # what this batch has evicted, and its unwritten rows
        self.sizes.add((len(batch.input_ids), len(pairs)))
        logits = self.forward(batch)
        for row, i in enumerate(members):
            if self.pool.length(self.rows[i]) == len(self.sequences[i]):
                self.logits[i].append(logits[row])
                self.sequences[i].append(int(logits[row].argmax()))

    def run(self, steps):
        """All requests, each to `steps` decode steps; they join and leave one by one."""
        n, turn = len(self.sequences), 0
        while any(len(rows) <= steps for rows in self.logits):
            members = [i for i in range(n) if len(self.logits[i]) <= steps and turn >= 2 * i]
            # Now and then a request is left out, so that every number of requests is met.
            if turn % 5 == 4:
                members = members[: 1 + turn % n]
            self.step(members)
            turn += 1
        check(self.pool)
        return self

    def close(self):
        for row in self.rows:
            self.pool.close(row)


def logit_error(model, run):
    """Largest difference from eager attention over all steps, relative to the largest logit."""
    worst = 0.0
    for sequence, start, rows in zip(run.sequences, run.starts, run.logits, strict=True):
        want = eager_rows(model, sequence[:-1], start)
        got = torch.stack(rows)
        assert got.shape == want.shape
        error = float((got - want).abs().max() / want.abs().max())
        worst = max(worst, error) if error == error else float("inf")
    return worst


@torch.no_grad()
def cache_error(model, run):
    """Largest relative difference of a live cache row from what transformers' cache holds.

    Returns:
        The difference, and the number of rows compared.
    """
    from transformers import DynamicCache

    worst, compared = 0.0, 0
    pool = run.pool
    for row, sequence, start in zip(run.rows, run.sequences, run.starts, strict=True):
        sent = pool.length(row)
        if rope_by_length(model) == "dynamic":
            theirs = over_a_cache(model, sequence[:sent], start)[1]
        else:
            theirs = DynamicCache(config=model.config)
            model(input_ids=torch.tensor([sequence[:sent]]), past_key_values=theirs, use_cache=True)
        own = [layer for layer in run.bridge.layers if layer.stores]
        assert len(theirs.layers) >= len(own)
        for i, spec in enumerate(pool.layers[: len(own)]):
            keys, values = theirs.layers[i].keys[0], theirs.layers[i].values[0]
            first = pool._ledger.requests[row].evicted * pool.page_size if spec.kind == "swa" else 0
            count = min(keys.shape[1], sent - first)
            slots = pool.req_to_token[row, sent - count : sent].long()
            if spec.kind == "swa":
                slots = pool.full_to_swa_index_mapping[slots]
            assert count and int(slots.min()) >= pool.page_size  # none is the sink's
            for cache, rows in ((pool.k_cache(i), keys), (pool.v_cache(i), values)):
                want = rows[:, -count:].transpose(0, 1)
                error = float((cache[slots] - want).abs().max() / want.abs().max())
                worst = max(worst, error) if error == error else float("inf")
            compared += count
            if own[i].compression is not None:
                for got, want in compressed_rows(pool, row, own[i].compression, theirs.layers[i]):
                    error = float((got - want).abs().max() / want.abs().max())
                    worst = max(worst, error) if error == error else float("inf")
                    compared += len(want)
    return worst, compared


def compressed_rows(pool, row, compression, theirs):
    """Entries, and keys and gates of tokens whose group is not whole, with transformers'."""
    request = pool._ledger.requests[row]
    for name, source in compression.sources.items():
        entries = theirs.compressed_kv[name]
        count = request.length // compression.ratio
        assert theirs.entry_count[name] == count
        if count:
            slots = [entry_row(pool, source.entries, request, n) for n in range(count)]
            yield pool.k_cache(source.entries)[slots].squeeze(1), entries.reshape(count, -1)
        waiting = request.length % compression.ratio
        if waiting:
            slots = pool.req_to_token[row, request.length - waiting : request.length].long()
            slots = pool.full_to_swa_index_mapping[slots]
            yield pool.k_cache(source.tokens)[slots].squeeze(1), theirs.buffer_kv[name][0]
            yield pool.v_cache(source.tokens)[slots].squeeze(1), theirs.buffer_gate[name][0]
