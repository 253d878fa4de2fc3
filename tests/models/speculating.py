"""Draft models, and a watch over both pools of a speculative run."""

import copy

import torch

from swa_compile.kv import check

from . import families, runs


def draft_for(model, kind):
    """A draft model for `model`.

    small: a random one of the same family with half the layers. noisy: the target with noise on
    its weights, which is right now and then. itself: the target. adversary: never right, since it
    proposes what the target finds least likely.
    """
    if kind == "itself":
        return model
    if kind == "small":
        kinds = families.CONFIGS[model.config.model_type].get("layer_types")
        changes = {"layer_types": kinds[:2]} if kinds else {}
        settings = {**changes, "num_hidden_layers": 2}
        settings["sliding_window"] = model.config.sliding_window
        return families.build(model.config.model_type, **settings)
    draft = copy.deepcopy(model)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        if kind == "adversary":
            draft.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
        else:
            for weight in draft.parameters():
                if weight.dim() >= 2:
                    weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random)
    return draft


def transformers_tokens(model, prompt, count, **settings):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **settings
    )
    return out[0, len(prompt) :].tolist()


class Watch:
    """Poisons what no live token owns, and keeps the live rows of both pools, round by round.

    Before a batch, and after each rollback, all rows that no live token owns are filled with NaN:
    free, evicted, rejected, and the sink's. A batch's own rows are still so when the forward
    begins, so a row that is read before it is written shows as well.

    Attributes:
        forwards: batches of the target.
        evicted: the most that a request had evicted when it was extended by drafts.
        rows: (prompt, pool, tokens at the time, cache, positions, K and V rows).
    """

    def __init__(self, ours):
        self.ours, self.scheduler = ours, None
        self.forwards, self.evicted, self.rows = 0, 0, []
        self.most_rows = 0
        made = ours._empty_scheduler

        def scheduler():
            self.scheduler = made()
            return self.scheduler

        ours._empty_scheduler = scheduler
        self._around(ours.pool, "target")
        self._around(ours.draft.pool, "draft")

    def _around(self, pool, name):
        batch, truncate = pool.batch, pool.truncate

        def watched_batch(pieces, **sizes):
            self._keep(pool, name)
            runs.poison(pool)
            made = batch(pieces, **sizes)
            runs.poison(pool)
            check(pool)
            self.forwards += name == "target"
            return made

        def watched_truncate(lengths):
            truncate(lengths)
            runs.poison(pool)
            check(pool)

        pool.batch, pool.truncate = watched_batch, watched_truncate

    def _keep(self, pool, name):
        for sequence in self.scheduler.running:
            row = sequence.row if name == "target" else sequence.draft_row
            length = pool.length(row)
            known = len(sequence.prompt) + len(sequence.new)
            if name == "target":
                assert length == (known - 1 if sequence.new else sequence.sent)
            else:
                assert length <= known - bool(sequence.new)
            self.evicted = max(
                self.evicted, pool._ledger.requests[row].evicted * bool(sequence.new)
            )
            for cache, spec in enumerate(pool.layers):
                state = pool._ledger.requests[row]
                first = state.evicted * pool.page_size if spec.kind == "swa" else 0
                slots = pool.req_to_token[row, first:length].long()
                if spec.kind == "swa":
                    slots = pool.full_to_swa_index_mapping[slots]
                assert not length or (slots >= pool.page_size).all()
                pair = [pool.k_cache(cache)[slots].clone(), pool.v_cache(cache)[slots].clone()]
                self.rows.append((sequence.index, name, cache, first, length, pair))

    def error(self, prompts, results):
        """Largest relative difference of a row that was kept from transformers' own cache."""
        worst, theirs = 0.0, {}
        for index, name, cache, first, length, pair in self.rows:
            if (index, name) not in theirs:
                model = (self.ours if name == "target" else self.ours.draft).bridge.model
                theirs[index, name] = _whole_cache(model, [*prompts[index], *results[index]])
            for got, whole in zip(pair, theirs[index, name][cache], strict=True):
                want = whole[first:length]
                if not got.numel():
                    continue
                error = float((got - want).abs().max() / want.abs().max())
                worst = max(worst, error) if error == error else float("inf")
        return worst


@torch.no_grad()
def _whole_cache(model, tokens):
    """K and V `[T, H, D]` of every cache, nothing of it cut off by windows."""
    from transformers import DynamicCache

    cache = DynamicCache()  # without a configuration it keeps every token in every layer
    model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    pairs = [[x[0].transpose(0, 1) for x in (layer.keys, layer.values)] for layer in cache.layers]
    assert all(len(rows) == len(tokens) for pair in pairs for rows in pair)
    return pairs
