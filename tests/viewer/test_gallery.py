"""docs/refusals.md: every example gets its code, and prints what stands beside it."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.narrating import narrate_refusal
from swa_compile.viewer.advice import ADVICE

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEAD = "import torch\nfrom swa_compile.ops import translate_loc\n\n"
RESERVED = "ESCAPES"


def sections():
    """{code: (example, printed)} of the gallery; a reserved code has neither."""
    found = {}
    for part in (DOCS / "refusals.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"```(?:python)?\n(.*?)```", part, re.S)
        found[part.split("\n")[0]] = tuple(blocks)
    return found


def printed(code, example, tmp_path, monkeypatch):
    """What is printed of the refusals of `example`."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"{code.lower()}.py"
    file.write_text(HEAD + example)
    scope = {}
    exec(compile(file.read_text(), file.name, "exec"), scope)
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(scope["forward"], backend="swa", fullgraph=True)(
            torch.arange(8), torch.tensor([1, 2, 3, 1]), torch.ones(4)
        )
    torch._dynamo.reset()
    (report,) = reports
    lines = [line for refusal in report.refused for line in narrate_refusal(refusal)]
    return {r.code for r in report.refused}, textwrap.dedent("\n".join(lines)) + "\n"


def test_the_gallery_has_every_code_that_the_rules_and_the_advice_name():
    rules = (DOCS / "legality.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", rules, re.M))
    assert set(sections()) == named == set(ADVICE)
    assert sections()[RESERVED] == ()


@pytest.mark.parametrize("code", [code for code in sections() if code != RESERVED])
def test_an_example_gets_its_code_and_prints_what_the_gallery_says(code, tmp_path, monkeypatch):
    example, shown = sections()[code]
    codes, text = printed(code, example, tmp_path, monkeypatch)
    assert codes == {code}
    assert text == shown
    assert len(example.splitlines()) <= 10
