"""The training model computes what transformers' own Qwen3.5 classes compute."""

import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# The torchvision built for CUDA does not import beside CPU torch; transformers only needs it for images.
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from training.config import DENSE, MOE, ModelConfig  # noqa: E402
from training.export import text_config  # noqa: E402
from training.model import ReferenceModel, Rows, initialize, rotary  # noqa: E402


def rows_of(tokens: torch.Tensor, document: torch.Tensor) -> Rows:
    cos, sin = rotary(tokens.shape[1], tokens.device, torch.float32)
    return Rows(tokens, document, cos, sin)


def peer_of(config: ModelConfig, model: ReferenceModel) -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    settings = text_config(config) | {"dtype": "float32"}
    peer = (
        Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**settings))
        if config.experts
        else Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    )
    state = {
        name if name.startswith("lm_head") else f"model.{name}": tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }
    peer.load_state_dict(state)
    return peer.eval()


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_trunk_one_document_equals_transformers(config: ModelConfig) -> None:
    model = ReferenceModel(config)
    initialize(model, 1)
    tokens = torch.randint(0, config.vocab, (2, 128), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden, _ = model.trunk(rows_of(tokens, torch.zeros_like(tokens)))
        logits = model.lm_head(hidden)
        expected = peer_of(config, model)(input_ids=tokens).logits
    assert (logits - expected).norm() / expected.norm() < 1e-4


def test_trunk_packed_documents_equal_each_alone() -> None:
    model = ReferenceModel(MOE)
    initialize(model, 3)
    tokens = torch.randint(0, MOE.vocab, (1, 192), generator=torch.Generator().manual_seed(4))
    document = torch.zeros_like(tokens)
    document[:, 50:] = 1
    document[:, 130:] = 2
    with torch.no_grad():
        packed, _ = model.trunk(rows_of(tokens, document))
        for start, end in ((0, 50), (50, 130), (130, 192)):
            alone = torch.nn.functional.pad(tokens[:, start:end], (0, -(end - start) % 64))
            lone, _ = model.trunk(rows_of(alone, torch.zeros_like(alone)))
            assert (packed[:, start:end] - lone[:, : end - start]).abs().max() < 1e-3


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_parameters_in_nvfp4_fit_the_budget(config: ModelConfig) -> None:
    from training.export import is_quantized

    sizes = {True: 0, False: 0}
    for name, parameter in ReferenceModel(config).named_parameters():
        sizes[is_quantized(name)] += parameter.numel()
    assert sizes[True] * 0.5625 + sizes[False] * 2 < 10e6
