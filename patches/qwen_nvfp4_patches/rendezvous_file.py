"""The file through which vLLM's processes find each other lies in the folder of their sockets.

vLLM puts it into the temporary folder and leaves it there when it is killed; the folder of the sockets is removed by
whoever started the server, however that ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen_nvfp4_patches import seams
from qwen_nvfp4_patches.patch import Need, Patch

NAME = "get_file_store_init_method"
PARAMETERS = ()
SCHEME = "file://"


def beside_the_sockets(original: Any) -> Any:
    """get_file_store_init_method whose file keeps its name and lies in VLLM_RPC_BASE_PATH."""

    def get_file_store_init_method() -> str:
        from vllm import envs

        return f"{SCHEME}{envs.VLLM_RPC_BASE_PATH}/{Path(original()).name}"

    return get_file_store_init_method


def _needed() -> Need:
    from vllm import envs
    from vllm.utils import network_utils

    if not hasattr(network_utils, NAME):
        return Need(False, "this vLLM has no such file")
    stock = seams.stock_of(getattr(network_utils, NAME))
    if Path(stock().removeprefix(SCHEME)).parent == Path(envs.VLLM_RPC_BASE_PATH):
        return Need(False, "the file lies with the sockets already")
    return Need(True, "vLLM leaves a file in the temporary folder when it is killed")


def _apply() -> None:
    from vllm.utils import network_utils

    seams.replace_function(network_utils, NAME, beside_the_sockets, PARAMETERS)


PATCH = Patch(
    name="rendezvous-file",
    platform=None,
    changes="get_file_store_init_method puts its file into VLLM_RPC_BASE_PATH, where the sockets lie",
    why="every server that is killed leaves a file `vllm_dist_…` in the temporary folder",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/utils/network_utils.py",
    remove_when="vLLM puts the file into VLLM_RPC_BASE_PATH by itself",
    needed=_needed,
    apply=_apply,
)
