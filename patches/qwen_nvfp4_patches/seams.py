"""The only functions that write to vLLM. Each may run twice, and each checks first what it is about to change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from qwen_nvfp4_serve.errors import UnsupportedHostError

MARK = "_qwen_nvfp4_original"
MAKER = "_qwen_nvfp4_maker"


def require_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raises UnsupportedHostError unless `function` takes exactly the parameters `names`, in order."""
    seen = tuple(inspect.signature(function).parameters)
    if seen != names:
        where = f"{function.__module__}.{function.__qualname__}"
        raise UnsupportedHostError(
            f"parameters of {where}",
            seen=", ".join(seen) or "none",
            expected=", ".join(names),
            do="Install a vLLM inside the tested window, or set PATCHES=off to run without patches",
        )


def require_attribute(owner: Any, name: str) -> Any:
    """`owner.name`, or UnsupportedHostError saying that this vLLM has none."""
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedHostError(
            f"{where}.{name}",
            seen="absent",
            expected="present in the tested window",
            do="Install a vLLM inside the tested window, or set PATCHES=off to run without patches",
        )
    return getattr(owner, name)


def add_once(items: list[type], item: type, *, first: bool = False) -> None:
    """Puts the class `item` at the end of `items`, or first, unless one of that name is there already."""
    if all(present.__name__ != item.__name__ for present in items):
        items.insert(0 if first else len(items), item)


def stock_of(function: Any) -> Any:
    """What vLLM itself had in the place of `function`, beneath everything that was put around it here."""
    while hasattr(function, MARK):
        function = getattr(function, MARK)
    return function


def replace_function(
    owner: ModuleType | type, name: str, make: Callable[[Any], Callable[..., Any]], parameters: Sequence[str]
) -> None:
    """Replaces the function `owner.name` of a module or class by `make(original)`, everywhere that vLLM has imported it
    by name.

    parameters: what vLLM's own must take, or UnsupportedHostError is raised. Modules imported later read the new one
    from `owner`. Several patches may replace one function: each is put around what is there, and `make` must not mind
    which. A function that the same `make` has replaced before is left alone.
    """
    original = require_attribute(owner, name)
    if _identity(make) in _makers(original):
        return
    require_parameters(stock_of(original), *parameters)
    replacement = make(original)
    setattr(replacement, MARK, original)
    setattr(replacement, MAKER, _identity(make))
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(replacement) if static else replacement)
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__name__", "").startswith("vllm") and vars(loaded).get(name) is original:
            setattr(loaded, name, replacement)


def _identity(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}"


def _makers(function: Any) -> Iterator[str]:
    while hasattr(function, MARK):
        yield getattr(function, MAKER)
        function = getattr(function, MARK)
