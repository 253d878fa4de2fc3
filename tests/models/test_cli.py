"""`swa-compile generate` and `explain`: local folders, with and without weights and tokenizer."""

import json
import re
import shutil

import pytest
import torch

import swa_compile.cli
from swa_compile.cli.checkpoint import Checkpoint

from . import families

TEXT = "ab cab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer of a letter per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("checkpoint")
    families.build("mistral").save_pretrained(path)
    # Letters from id 3 on: `generate` of transformers takes id 0 for padding.
    vocab = {chr(32 + i): 3 + i for i in range(families.VOCAB - 4)}
    vocab["<unk>"] = families.VOCAB - 1
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(path)
    return path


def generate(*arguments):
    return swa_compile.cli.main(["generate", "--device", "cpu", *map(str, arguments)])


def test_a_checkpoint_continues_a_text_as_transformers_does(folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code = generate(
        *("--model", folder, "--prompt", TEXT, "--max-new-tokens", 20, "--backend", "swa_eager")
    )
    out = capsys.readouterr().out
    assert code == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert ids.shape == (1, 6)
    model = AutoModelForCausalLM.from_pretrained(folder)
    want = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 6:]
    assert out.splitlines()[0] == tokenizer.decode(want, skip_special_tokens=True)
    assert "RANDOM" not in out
    assert re.search(r"translations per forward +8 -> 1 node", out)
    assert re.search(r"KV stores lowered +4 of 4", out)
    assert re.search(r"tokens +20, [\d.]+ per second", out)
    # 26 tokens and one of slack; 4 layers of 2 heads of K and V of 16 dimensions, float32.
    row = 4 * 2 * 2 * 16 * 4
    swa = min(27, 2 * families.WINDOW)
    assert f"{(swa + 1) * row / 1024:.4g} KiB for 27 tokens" in out
    assert re.search(rf"if every layer kept all +{28 * row / 1024:.4g} KiB", out)
    assert f"{27 / swa:.2f} times those of a full-only pool" in out


def test_a_stop_token_ends_the_text_as_it_does_in_transformers(folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    free = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 6:].tolist()
    end = free[4]
    want = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=end)[0, 6:]
    assert len(want) <= 5
    common = ("--model", folder, "--prompt", TEXT, "--max-new-tokens", 20, "--backend", "eager")
    never = next(i for i in range(3, 60) if i not in free)
    stops = ("--stop", tokenizer.decode([never]), "--stop", tokenizer.decode([end]))
    assert generate(*common, *stops) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == tokenizer.decode(want, skip_special_tokens=True)
    assert re.search(rf"tokens +{len(want)}\b", out)


def test_logits_that_are_no_numbers_end_the_command_in_one_line(tmp_path, capsys):
    model = families.build("mistral")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    model.save_pretrained(tmp_path)
    for draft in ([], ["--draft", tmp_path]):
        code = generate("--model", tmp_path, "--prompt", "5 6", *draft, "--backend", "eager")
        error = capsys.readouterr().err
        assert code == 1
        assert "the logits after the tokens of prompt 0 hold NaN" in error
        assert "Traceback" not in error


def test_a_draft_changes_the_speed_and_not_the_text(folder, tmp_path, capsys):
    arguments = ("--model", folder, "--prompt", TEXT, "--max-new-tokens", 20)
    assert generate(*arguments, "--backend", "eager") == 0
    want = capsys.readouterr().out.splitlines()[0]
    draft = ("--draft", folder, "--draft-tokens", 3)
    assert generate(*arguments, *draft, "--backend", "swa_eager") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == want
    # One token by the prompt; 19 by 4 rounds of 4 and one of 3.
    assert re.search(r"draft tokens accepted +14 of 14 \(100%\)", out)
    assert re.search(r"mean acceptance length +3\.80 tokens", out)
    assert re.search(r"^ *translations per forward +8 -> 1 node", out, re.MULTILINE)
    assert re.search(r"draft: translations per forward +8 and 24 -> 1 node", out)
    assert re.search(r"draft: pool +[\d.]+ KiB for 27 tokens", out)
    # A configuration alone proposes at random.
    random = families.build("mistral", num_hidden_layers=1, sliding_window=3)
    random.config.save_pretrained(tmp_path)
    assert generate(*arguments, "--draft", tmp_path, "--backend", "eager") == 0
    out = capsys.readouterr().out
    assert f"NO WEIGHTS in {tmp_path}" in out and "NO TOKENIZER" not in out
    assert want in out.splitlines()


def test_a_draft_whose_tokenizer_has_other_ids_is_one_line(folder, tmp_path, capsys):
    from transformers import AutoTokenizer

    families.build("mistral", num_hidden_layers=1).config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    saved = (tmp_path / "tokenizer.json").read_text()
    assert '"a": 68' in saved and '"b": 69' in saved
    swapped = saved.replace('"a": 68', '"a": 69').replace('"b": 69', '"b": 68')
    (tmp_path / "tokenizer.json").write_text(swapped)
    arguments = ("--model", folder, "--prompt", TEXT, "--backend", "eager")
    assert generate(*arguments, "--draft", tmp_path) == 2
    error = capsys.readouterr().err
    assert "another vocabulary: token 'a' is 69 there and 68 in the model" in error
    assert error.count("\n") == 1


def test_a_configuration_alone_gives_random_weights_and_says_so(tmp_path, capsys):
    config = families.build("gemma3_text").config
    config.vocab_size = 256
    config.save_pretrained(tmp_path)
    arguments = ("--prompt", "7 8 9", "--prompt", "hé", "--max-new-tokens", 3, "--seed", 5)
    assert generate("--model", tmp_path / "config.json", *arguments, "--backend", "eager") == 0
    out = capsys.readouterr().out
    assert "NO WEIGHTS" in out and "RANDOM" in out and "NO TOKENIZER" in out
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    for index, prompt in enumerate(([7, 8, 9], list("hé".encode()))):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        ids = " ".join(str(i) for i in want[0, len(prompt) :].tolist())
        assert f"[{index}] {ids}\n" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "1"], "there is no 'MODEL' here; models are not downloaded"),
        (["--prompt", "1", "--page-size", "0"], "--page-size is at least 1; got 0"),
        (["--prompt", "1", "--draft-tokens", "0"], "--draft-tokens is at least 1; got 0"),
        (["--prompt", "1", "--draft-tokens", "3"], "a --draft proposes, and there is none"),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, tmp_path, capsys):
    path = tmp_path / "none"
    assert generate("--model", path, *arguments) == 2
    error = capsys.readouterr().err
    assert words.replace("MODEL", str(path)) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "ab", "--max-tokens", "10"], "the pool has 10"),
        (["--prompt", "ab", "--dtype", "float33"], "--dtype float33 is no dtype"),
        (["--prompt", "ab", "--stop", "ab"], "--stop 'ab' is 2 tokens of the model; it takes one"),
        (["--prompt", "ab", "--stop", "é"], "--stop 'é' is no token of the model; it takes one"),
        (["--prompt", "ab", "--stop", ""], "--stop '' is no token of the model; it takes one"),
        (["--prompt", "ab", "--top-p", "2"], "top_p is above 0 and at most 1; got 2.0"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_one_line(arguments, words, folder, capsys):
    assert generate("--model", folder, *arguments, "--backend", "eager") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_weights_that_a_checkpoint_lacks_are_told_of(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    arguments = ("--prompt", TEXT, "--max-new-tokens", 2, "--backend", "eager")
    assert generate("--model", tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    # Four projections of attention, three of the MLP and two norms.
    assert f"9 WEIGHTS ARE MISSING in {tmp_path} (model.layers.4." in out and "RANDOM" in out
    drawn = []
    for seed in (5, 5, 6):
        model = Checkpoint.open(str(tmp_path), "auto", seed, torch.device("cpu")).model
        drawn.append(model.model.layers[4].mlp.up_proj.weight)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert generate("--model", folder, *arguments) == 0
    assert "MISSING" not in capsys.readouterr().out


def test_a_request_beyond_what_the_model_was_made_for_is_told_of(folder, tmp_path, capsys):
    config = families.build("mistral", max_position_embeddings=8).config
    config.save_pretrained(tmp_path)
    arguments = ("--model", tmp_path, "--prompt", "1 2 3", "--backend", "eager")
    assert generate(*arguments, "--max-new-tokens", 6) == 0
    assert "may be 9, and the model was made for 8" in capsys.readouterr().out
    assert generate(*arguments, "--max-new-tokens", 5) == 0
    assert "made for" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("model.safetensors", "\x00" * 4),
        ("config.json", "{"),
        ("config.json", '{"model_type": "none of these"}'),
    ],
)
def test_a_damaged_checkpoint_is_one_line(name, content, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    assert generate("--model", tmp_path, "--prompt", TEXT) == 2
    error = capsys.readouterr().err
    assert f"cannot load '{tmp_path}': " in error and error.count("\n") == 1


def test_a_family_without_a_causal_language_model_is_one_line(tmp_path, capsys):
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    assert generate("--model", tmp_path, "--prompt", "1") == 2
    error = capsys.readouterr().err
    assert "is of the family 't5', for which transformers has no causal" in error
    assert error.count("\n") == 1


def test_numbers_that_are_no_ids_are_not_taken_for_bytes_in_silence(tmp_path, capsys):
    families.build("mistral", vocab_size=256).config.save_pretrained(tmp_path)
    arguments = ("--model", tmp_path, "--max-new-tokens", 1, "--backend", "eager")
    for prompt, word in (("1 -2 3", "-2"), ("1.5", "1.5"), ("7, 1e3", "1e3")):
        assert generate(*arguments, "--prompt", prompt) == 2
        error = capsys.readouterr().err
        assert f"holds {word}, which is no token id" in error and error.count("\n") == 1
    for prompt in ("1 -2 x", "nan", "7, 8"):
        assert generate(*arguments, "--prompt", prompt) == 0
    capsys.readouterr()
    assert generate(*arguments, "--prompt", "\udcff") == 2  # a byte that is not UTF-8
    assert "is no text" in capsys.readouterr().err


def test_an_unsupported_model_is_one_line(tmp_path, capsys):
    families.build("doge").config.save_pretrained(tmp_path)
    assert generate("--model", tmp_path, "--prompt", "1 2") == 2
    error = capsys.readouterr().err
    assert "doge (DogeForCausalLM): its layers add a learned mask" in error
    assert error.count("\n") == 1
    families.build("mistral").config.save_pretrained(model := tmp_path / "mistral")
    assert generate("--model", model, "--draft", tmp_path, "--prompt", "1 2") == 2
    error = capsys.readouterr().err
    assert "as a draft model: doge (DogeForCausalLM)" in error and error.count("\n") == 1


def test_code_of_a_folder_is_neither_run_nor_asked_about(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("the user was asked"))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert generate("--model", tmp_path, "--prompt", "1 2") == 2
    error = capsys.readouterr().err
    assert "cannot load" in error and "custom code" in error and error.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_configuration_is_one_line(tmp_path, capsys):
    assert generate("--model", tmp_path, "--prompt", "1 2") == 2
    assert "has no config.json" in capsys.readouterr().err


def explain(*arguments):
    return swa_compile.cli.main(["explain", "--device", "cpu", *map(str, arguments)])


def test_a_checkpoint_is_explained_as_a_factory_is(folder, capsys):
    assert explain("--model", folder, "--prompt", TEXT, "--prompt", "c", "--strict") == 0
    out = capsys.readouterr().out
    assert "1 graph, 0 graph breaks" in out
    assert "8 translations -> 1 node; 4 of 4 stores lowered" in out
    assert re.search(r"4 calls in the layers +batch\.full_to_swa_index_mapping\[", out)
    assert re.search(r" 0  buffers of a KV cache's size", out)


@pytest.mark.parametrize("option", ["--prompt", "--dtype", "--seed", "--page-size", "--device"])
def test_what_a_factory_decides_is_not_taken_and_ignored(option, capsys):
    value = {"--seed": "3", "--page-size": "4", "--device": "cpu"}.get(option, "float32")
    assert swa_compile.cli.main(["explain", "json:loads", option, value]) == 2
    error = capsys.readouterr().err
    assert f"{option} is for a --model" in error and error.count("\n") == 1


def test_a_configuration_alone_is_explained_and_json_is_all_there_is(tmp_path, capsys):
    families.build("gemma3_text").config.save_pretrained(tmp_path)
    assert explain("--model", tmp_path / "config.json", "--json", "--page-size", 4) == 0
    report = json.loads(capsys.readouterr().out)
    [graph] = report["graphs"]
    assert (graph["translations_found"], graph["translation_nodes"]) == (4, 1)
    assert (graph["stores_found"], graph["stores_lowered"]) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "wants MODULE:FACTORY or --model PATH"),
        (["json:loads", "--model", "FOLDER"], "and not both"),
        (["json:loads", "--prompt", "a"], "--prompt is for a --model"),
        (["--model", "nowhere"], "there is no 'nowhere' here"),
        (["--model", "FOLDER", "--page-size", "0"], "page_size is an int of at least 1; got 0"),
        (["--model", "FOLDER", "--prompt", ""], "a prompt is empty"),
        (["--model", "DOGE"], "doge (DogeForCausalLM): its layers add a learned mask"),
    ],
)
def test_what_cannot_be_explained_is_one_line(arguments, words, folder, tmp_path, capsys):
    families.build("doge").config.save_pretrained(tmp_path)
    places = {"FOLDER": folder, "DOGE": tmp_path}
    assert explain(*(places.get(argument, argument) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_pool_of_gemma_3s_windows_holds_three_times_the_tokens(tmp_path, capsys):
    config = families.build("gemma3_text", num_hidden_layers=6, layer_types=None).config
    config.sliding_window = 1024
    assert [kind[:4] for kind in config.layer_types] == ["slid"] * 5 + ["full"]
    config.save_pretrained(tmp_path)
    arguments = ("--prompt", "1 2 3", "--max-new-tokens", 1, "--backend", "eager")
    sizes = ("--max-tokens", 16 * 1024, "--max-requests", 1)
    assert generate("--model", tmp_path, *arguments, *sizes) == 0
    found = re.search(r"tokens per byte +([\d.]+) times those", capsys.readouterr().out)
    # Five layers keep two windows: what is seen, and a chunk of a prompt that goes in.
    want = 6 * 16 * 1024 / (16 * 1024 + 5 * 2 * 1024)
    assert float(found[1]) == pytest.approx(want, abs=0.01) and want > 3
