"""An error is one line, whatever was typed."""

from __future__ import annotations

import pytest

from qwen_nvfp4_serve.errors import SEEN_CHARS, QwenNvfp4Error


def test_sentence_names_what_is_known_in_order() -> None:
    error = QwenNvfp4Error("PORT", seen="0", expected="1 to 65535", do="Set PORT=8000.")
    assert str(error) == "PORT: seen 0, expected 1 to 65535. Set PORT=8000."
    assert str(QwenNvfp4Error("PORT")) == "PORT"


@pytest.mark.parametrize(("length", "cut"), [(SEEN_CHARS, False), (SEEN_CHARS + 1, True), (5000, True)])
def test_sentence_long_value_is_cut_with_an_end_mark(length: int, cut: bool) -> None:
    error = QwenNvfp4Error("MODEL", seen="x" * length)
    assert len(str(error)) == len("MODEL: seen ") + SEEN_CHARS
    assert str(error).endswith("…") is cut
    assert error.seen == "x" * length


def test_sentence_control_characters_are_escaped() -> None:
    error = QwenNvfp4Error("a\0", seen="b\n\x1b[31m", expected="é …", do="d\r\udcff")
    assert str(error) == "a\\x00: seen b\\n\\x1b[31m, expected é …. d\\r\\udcff"


def test_str_ends_with_the_output_of_another_program_whole() -> None:
    error = QwenNvfp4Error("compiling x", output="y" * 500 + "\nz")
    assert str(error) == "compiling x\n" + "y" * 500 + "\nz"
    assert error.sentence() == "compiling x"
