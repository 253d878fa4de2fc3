"""A transformers checkpoint in a local folder, and text for it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swa_compile.cli.errors import UsageError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Nothing is downloaded, and code that lies beside weights is not run; nor is the user asked whether
# it may, which is what transformers does where nothing is said.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def add_model_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Give `parser` --model and the options of how it is loaded and its pool is laid out."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="PATH",
        help="folder of a checkpoint, or a config.json (then the weights are random)",
    )
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (the checkpoint's)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of sampling (0)")
    parser.add_argument("--page-size", type=int, default=1, help="tokens per page (1)")


@dataclass
class Checkpoint:
    """A model, its tokenizer where there is one, and what the user has to be told of them."""

    model: Any
    tokenizer: Any = None
    weight_notices: list[str] = field(default_factory=list)
    tokenizer_notices: list[str] = field(default_factory=list)

    @property
    def notices(self) -> list[str]:
        return [*self.weight_notices, *self.tokenizer_notices]

    @classmethod
    def open(cls, path: str, dtype: str, seed: int, device: torch.device) -> Checkpoint:
        """Load the model of a folder, or make one with random weights where it has none.

        Raises:
            UsageError: nothing usable is there, or transformers is not installed.
        """
        place = Path(path)
        folder = place.parent if place.is_file() else place
        if not place.exists():
            raise UsageError(f"there is no '{path}' here; models are not downloaded")
        if not (folder / "config.json").is_file() and not place.is_file():
            raise UsageError(f"'{path}' has no config.json")
        try:
            import transformers
        except ImportError as error:
            raise UsageError(
                "transformers is not installed: pip install 'swa-compile[hf]'"
            ) from error
        kind = "auto" if dtype == "auto" else getattr(torch, dtype, None)
        if kind != "auto" and not isinstance(kind, torch.dtype):
            raise UsageError(f"--dtype {dtype} is no dtype of torch")
        transformers.utils.logging.disable_progress_bar()
        of_weights, of_tokenizer = [], []
        torch.manual_seed(seed)
        try:
            config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
            auto = _auto_class(path, config)
            if place.is_dir() and any(any(folder.glob(name)) for name in _WEIGHTS):
                model, found = auto.from_pretrained(
                    path, dtype=kind, output_loading_info=True, **_LOCAL
                )
                if missing := sorted(found["missing_keys"]):
                    of_weights.append(
                        f"{len(missing)} WEIGHTS ARE MISSING in {path} ({missing[0]}, ...): they "
                        "are RANDOM, and so is what follows"
                    )
            else:
                of_weights.append(f"NO WEIGHTS in {path}: they are RANDOM, and so is what follows")
                chosen = {} if kind == "auto" else {"dtype": kind}
                model = auto.from_config(config, trust_remote_code=False, **chosen)
            tokenizer = None
            if any((folder / name).is_file() for name in _TOKENIZER):
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
            else:
                of_tokenizer.append(f"NO TOKENIZER in {path}: prompts are token ids, or bytes")
        except UsageError:
            raise
        except Exception as error:  # whatever a damaged file makes of a reader
            raise UsageError(f"cannot load '{path}': {_first_line(error)}") from error
        return cls(model.eval().to(device), tokenizer, of_weights, of_tokenizer)

    def refuse_another_vocabulary(self, other: Checkpoint) -> None:
        """Raise where `other` is known to call tokens by other ids.

        Raises:
            UsageError: with a token that the two tokenizers have different ids for.
        """
        if self.tokenizer is None or other.tokenizer is None:
            return
        ours, theirs = self.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        for token in sorted(ours.keys() | theirs.keys()):
            if ours.get(token) != theirs.get(token):
                raise UsageError(
                    f"the draft model has another vocabulary: token {token!r} is "
                    f"{theirs.get(token)} there and {ours.get(token)} in the model"
                )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`.

        Raises:
            UsageError: it is no text, or empty, or, without a tokenizer, neither ids nor bytes of
                the model.
        """
        if not _is_text(text):
            raise UsageError(f"prompt {text!r} is no text: its bytes are not of any character")
        if self.tokenizer is not None:
            ids = list(self.tokenizer(text).input_ids)
        else:
            words = text.replace(",", " ").split()
            numbers = bool(words) and all(map(_is_number, words))
            for word in words if numbers else ():
                if not word.isdecimal():  # and a number: it would be taken for bytes in silence
                    raise UsageError(f"prompt {text!r} holds {word}, which is no token id")
            ids = [int(word) for word in words] if numbers else list(text.encode())
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if not ids:
            raise UsageError("a prompt is empty: there is nothing to continue")
        if max(ids) >= vocab:
            raise UsageError(f"prompt {text!r} holds the id {max(ids)}; the vocabulary has {vocab}")
        return ids

    def token(self, text: str) -> int:
        """The id of one token: its name in the vocabulary, or text that is one token.

        Without a tokenizer, the id itself.

        Raises:
            UsageError: it is no token, or several.
        """
        if self.tokenizer is None:
            ids = [int(text)] if text.isdecimal() else []
        elif (known := self.tokenizer.get_vocab().get(text)) is not None:
            ids = [known]
        else:
            found = self.tokenizer(text, add_special_tokens=False).input_ids
            ids = [] if self.tokenizer.unk_token_id in found else list(found)
        if len(ids) != 1:
            what = f"is {len(ids)} tokens" if ids else "is no token"
            raise UsageError(f"--stop {text!r} {what} of the model; it takes one")
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if ids[0] >= vocab:
            raise UsageError(f"--stop {text!r} is the id {ids[0]}; the vocabulary has {vocab}")
        return ids[0]

    def length_notices(self, lengths: list[int]) -> list[str]:
        """What to tell of requests of so many tokens: one may be longer than the model is for."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(lengths)
        if not isinstance(most, int) or longest <= most:
            return []
        return [f"A prompt and its new tokens may be {longest}, and the model was made for {most}"]

    def text(self) -> Text:
        """What turns a request's tokens into text."""
        return Text(self.tokenizer)


@dataclass
class Text:
    """The text of the tokens so far. Without a tokenizer it is their ids."""

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    so_far: str = ""

    def add(self, token: int, last: bool) -> str:
        """What `token` adds to the text."""
        self.ids.append(token)
        if self.tokenizer is None:
            text = " ".join(map(str, self.ids))
        else:
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            # The first bytes of a character: it comes with the next token.
            if text.endswith("\ufffd") and not last:
                return ""
        added, self.so_far = text[len(self.so_far) :], text
        return added


def _auto_class(path: str, config: Any) -> Any:
    """What transformers makes a model of `config` with.

    Raises:
        UsageError: it has no language model for it that generates.
    """
    import transformers

    # The second: language models that come with vision.
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UsageError(
        f"'{path}' is of the family '{config.model_type}', for which transformers has no causal "
        "language model"
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return any(map(str.isdigit, word))  # 'nan' is a word


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        return False
    return True


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
