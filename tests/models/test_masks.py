"""The form of a mask, measured."""

import pytest
import torch
from transformers import masking_utils

from swa_compile.hf.masks import Form, form_of


def chunked(size):
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


SLIDING = masking_utils.sliding_window_causal_mask_function
CASES = [
    (masking_utils.causal_mask_function, Form("full")),
    *((SLIDING(n), Form("sliding", n)) for n in (1, 2, 8, 1024)),
    *((chunked(n), Form("chunked", n)) for n in (2, 8, 1000)),
    (SLIDING(5000), Form("full")),  # no position that the model knows is so far away
    (masking_utils.bidirectional_mask_function, Form("not causal")),
    (masking_utils.sliding_window_bidirectional_mask_function(4), Form("not causal")),
    (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), Form("of an unknown form")),
    (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k == 3)), Form("of an unknown form")),
    (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k == 0)), Form("of an unknown form")),
]


@pytest.mark.parametrize(("mask", "form"), CASES)
def test_the_form_of_a_mask_is_what_its_rows_say(mask, form):
    assert form_of(mask, 4099) == form
