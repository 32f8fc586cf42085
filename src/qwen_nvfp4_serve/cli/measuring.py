"""What `bench` and `quality` make of their common options: the folder, the server, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwen_nvfp4_serve.errors import UsageError

if TYPE_CHECKING:
    from qwen_nvfp4_serve.smoke import Server


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of an option like `0,4096`. Raises UsageError naming the option."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(option, seen=repr(text), expected="numbers with commas between") from None


def new_folder(out: Path | None, file: str) -> Path:
    """The folder of --out, which must be named, writable and without an earlier result `file`; or UsageError."""
    from qwen_nvfp4_serve.bench.files import writing

    if out is None:
        raise UsageError("--out", seen="nothing", expected="a folder for the result", do="Add --out DIR.")
    with writing(out):
        if (out / file).exists():
            expected = "a folder without one"
            raise UsageError(f"--out {out}", seen=f"a {file}", expected=expected, do="Name another folder.")
    return out


def reach(base_url: str, env_file: Path | None, *, api_key: str | None = None, model: str | None = None) -> Server:
    """The server of --base-url, else the one that the settings serve, with their key unless one is given ('' for none).

    Raises UsageError for a URL that may hide a secret, an --env-file that is not there or a model that is not served,
    and QwenNvfp4Error when nothing answers.
    """
    from qwen_nvfp4_serve.cli.defaults import settings_of
    from qwen_nvfp4_serve.smoke import connect

    if any(mark in base_url for mark in "@?#"):  # what such a URL may hide would stay in the result
        expected = "a URL without user, password, ? and #"
        do = "Give the server's key as VLLM_API_KEY, in the environment or the settings."
        raise UsageError("--base-url", seen="a URL with one of them", expected=expected, do=do)
    settings = settings_of(env_file)
    kept = settings.vllm_api_key.get_secret_value() if settings.vllm_api_key else None
    key = kept if api_key is None else api_key
    return connect(base_url or f"http://127.0.0.1:{settings.port}/v1", key, model)
