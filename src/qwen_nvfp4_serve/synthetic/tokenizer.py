"""A byte-level tokenizer with the family's special tokens: no merges, so every byte is a token and every token decodes.

Tokens 0..255 are the bytes themselves, then come the special tokens, then reserved ones up to the vocabulary's size.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# Special tokens in the order of the published tokenizers (Qwen3 family), and which of them are hidden from text.
_HIDDEN = (
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
_SHOWN = (
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
SPECIAL_TOKENS = _HIDDEN + _SHOWN
BYTES = 256


def token_id(token: str) -> int:
    """The id of a special token."""
    return BYTES + SPECIAL_TOKENS.index(token)


def silent_ids(vocab: int) -> list[int]:
    """Ids that a random model should not say: all but printable ASCII, the newline and the end of the turn."""
    said = {ord("\n"), token_id("<|im_end|>"), *range(0x20, 0x7F)}
    return [index for index in range(vocab) if index not in said]


def byte_characters() -> list[str]:
    """The visible character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]


def tokenizer_json(vocab: int) -> Json:
    """tokenizer.json for `vocab` tokens, in the format of the `tokenizers` library 0.2x."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    entries = {character: index for index, character in enumerate(byte_characters())}
    entries |= {f"<|reserved_{index}|>": index for index in range(BYTES + len(SPECIAL_TOKENS), vocab)}
    added = [
        {
            "id": token_id(token),
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in _HIDDEN,
        }
        for token in SPECIAL_TOKENS
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": entries | {token: token_id(token) for token in SPECIAL_TOKENS},
            "merges": [],
        },
    }


def tokenizer_config(max_position: int) -> Json:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def image_processor_config() -> Json:
    """preprocessor_config.json; the sizes are in pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def video_processor_config() -> Json:
    """video_preprocessor_config.json."""
    return image_processor_config() | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    }
