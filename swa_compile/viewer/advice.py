"""What an author can do about each refusal, in one place for page, terminal and documents."""

from __future__ import annotations

ADVICE: dict[str, str] = {
    "MAPPING_WRITTEN": "Edit the mapping (and the ids) between forwards, not inside one.",
    "LOC_FROM_ACTIVATIONS": "Compute the ids from index inputs: positions, tables, lengths.",
    "MAPPING_FROM_ACTIVATIONS": "Hand the mapping in as an int64 input.",
    "IMPURE_PRODUCER": "Compute the operand ahead of the forward and hand it in; if it comes from "
    "a translation operator of yours, mark it with swa_compile.mark_translation.",
    "IN_SUBGRAPH": "Translate ahead of the branch, loop or region, and hand the result in.",
    "ESCAPES": "Return a copy of the translated value.",
}
