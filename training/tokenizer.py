"""The byte-level tokenizer with the family's special tokens, and a fast encoder for generated text."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

REFERENCE_DIR = Path(__file__).resolve().parent.parent / "src/qwen_nvfp4_serve/data/reference"
VOCAB_SIZE = 1024
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# The family's pre-tokenization: one digit at a time, a word with the one sign or space before it.
PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASCII_PIECES = re.compile(
    "|".join(re.escape(token) for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS)
    + r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\na-zA-Z0-9]?[a-zA-Z]+|[0-9]| ?[^\sa-zA-Z0-9]+?(?=<(?:\||/?think|/?tool_))"
    r"|(?<![^\s])<(?=\|)| ?[^\sa-zA-Z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` entries whose merges come from the given texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(PLAIN_ADDED_TOKENS)
    tokenizer.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=VOCAB_SIZE - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template beside it, not inside)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load(folder: Path = REFERENCE_DIR) -> Tokenizer:
    """The tracked tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class FastEncoder:
    """Ids of ASCII text, one dictionary look-up per word; the same ids as the tokenizer gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of the text."""
        known, ids = self._known, []
        for piece in _ASCII_PIECES.findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
            ids += found
        return ids
