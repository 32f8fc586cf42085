"""The resolvers against vLLM's own quantization configs, for ignore lists and targets drawn at random."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from qwen_nvfp4_serve import shims
from qwen_nvfp4_serve.checkpoint.declared import resolver_for
from qwen_nvfp4_serve.checkpoint.modelopt import ALGORITHMS
from qwen_nvfp4_serve.checkpoint.naming import CLASSES, FUSED, Unit, unit_of, vllm_module
from qwen_nvfp4_serve.checkpoint.schemes import PLAIN, SplitError

pytestmark = pytest.mark.slow

PARTS = (
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    *("linear_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    *("mlp.shared_expert.down_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
)
MODULES = (
    *(f"model.language_model.layers.{layer}.{part}" for layer in (0, 1, 10, 11) for part in PARTS),
    *(f"mtp.layers.0.{part}" for part in PARTS if "linear_attn" not in part),
    *("mtp.fc", "lm_head", "model.visual.blocks.0.mlp.linear_fc1", "model.visual.blocks.0.attn.qkv"),
)
UNITS = tuple({unit.name: unit for unit in map(unit_of, MODULES)}.values())
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}


@pytest.fixture(scope="module")
def vllm_mapper() -> Any:
    """The prefixes that Qwen3_5ForConditionalGeneration maps, without importing the model."""
    shims.install()
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.model_executor.models.utils import WeightsMapper

    prefixes = {
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    }
    return WeightsMapper(orig_to_new_prefix=prefixes)


def patterns(generator: random.Random, count: int, kinds: tuple[str, ...]) -> list[str]:
    """Entries as people write them: whole names, fused names, regular expressions, globs, fragments."""

    def one() -> str:
        module, kind = generator.choice(MODULES), generator.choice(kinds)
        leaf = module.rpartition(".")[2]
        return {
            "name": module,
            "fused": unit_of(module).name,
            "regex": generator.choice(
                [f"re:.*{leaf}$", "re:.*linear_attn.*", r"re:.*layers\.1\..*", "re:.*mlp.*", "re:^mtp.*"]
            ),
            "glob": generator.choice(
                [f"{module}*", "model.visual*", "mtp*", f"*{leaf}", "model.language_model.layers.1.*"]
            ),
            "fragment": generator.choice(["lm_head", "mtp", "linear_attn", "layers.1", leaf, "visual"]),
        }[kind]

    return list(dict.fromkeys(one() for _ in range(count)))


def ours(config: dict[str, Any], unit: Unit) -> str:
    """Our label, or "split"."""
    try:
        return resolver_for({"quantization_config": config}, None, text_only=False).scheme(unit)
    except SplitError:
        return "split"


def label(scheme: dict[str, Any] | None) -> str:
    """Our label for vLLM's scheme of compressed-tensors."""
    if scheme is None:
        return PLAIN
    if scheme["weights"].num_bits == 8:
        return "FP8"
    return "NVFP4 W4A16" if scheme["input_activations"] is None else "NVFP4 W4A4"


def ct_config(generator: random.Random) -> dict[str, Any]:
    """A compressed-tensors config with one or two groups."""
    inputs = generator.choice([None, {**NVFP4, "dynamic": "local"}])
    nvfp4 = {"weights": NVFP4, "input_activations": inputs, "format": "nvfp4-pack-quantized"}
    token = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    fp8 = {"weights": FP8, "input_activations": token, "format": "float-quantized"}
    groups = {
        "group_0": {"targets": generator.choice([["Linear"], patterns(generator, 6, ("name", "regex"))]), **nvfp4}
    }
    if generator.random() < 0.5:
        groups = {"group_1": {"targets": patterns(generator, 4, ("name", "regex")), **fp8}, **groups}
    ignore = patterns(generator, generator.randint(0, 12), ("name", "name", "fused", "regex"))
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignore,
    }


@pytest.mark.parametrize("seed", range(150))
def test_compressed_tensors_random_config_resolves_as_vllm_does(vllm_mapper: Any, seed: int) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = ct_config(random.Random(seed))
    theirs = CompressedTensorsConfig.from_config(copy.deepcopy(config))
    theirs.packed_modules_mapping = {fused: list(parts) for fused, parts in FUSED.items()}
    theirs.apply_vllm_mapper(vllm_mapper)
    theirs._add_fused_moe_to_target_scheme_map()
    for unit in UNITS:
        layer = type(CLASSES[unit.leaf], (), {})()
        name = vllm_module(unit, text_only=False)
        try:
            if unit.leaf == "experts":
                found = [
                    theirs.get_scheme_dict(layer, f"{name}.0.{part}") for part in ("gate_proj", "up_proj", "down_proj")
                ]
                expected = label(found[0]) if found[0] == found[1] == found[2] else "split"
            else:
                expected = label(theirs.get_scheme_dict(layer, name))
        except ValueError:
            expected = "split"
        seen = ours(config, unit)
        # Parts with unlike targets: vLLM takes the first one's scheme and misreads the others; we call it a split.
        assert seen == expected or (seen == "split" and unit.leaf in FUSED), unit.name


def modelopt_config(generator: random.Random) -> dict[str, Any]:
    """A ModelOpt config, pure or mixed."""
    exclude = patterns(generator, generator.randint(0, 6), ("name", "glob", "glob", "fragment"))
    config: dict[str, Any] = {"quant_method": "modelopt", "ignore": exclude, "group_size": 16}
    if generator.random() < 0.4:
        return config | {"quant_algo": generator.choice(["NVFP4", "FP8"])}
    chosen = generator.sample(MODULES, generator.randint(3, len(MODULES)))
    layers = {
        generator.choice([module, unit_of(module).name]): {
            "quant_algo": generator.choice(["FP8", "NVFP4", "W4A16_NVFP4"])
        }
        for module in chosen
    }
    return config | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def modelopt_label(theirs: Any, config: dict[str, Any], unit: Unit) -> str:
    """What vLLM's ModelOpt config does with a unit, as our label."""
    name = vllm_module(unit, text_only=False)
    try:
        if theirs.is_layer_excluded(name):
            return PLAIN
        mixed = config["quant_algo"] == "MIXED_PRECISION"
        algorithm = theirs._resolve_quant_algo(name) if mixed else config["quant_algo"]
    except ValueError:
        return "split"
    if not mixed and unit.name == "mtp.fc" and algorithm == "NVFP4":
        return PLAIN
    return ALGORITHMS.get(algorithm or "", PLAIN)


@pytest.mark.parametrize("seed", range(150))
def test_modelopt_random_config_resolves_as_vllm_does(vllm_mapper: Any, seed: int) -> None:
    from vllm.model_executor.layers.quantization import modelopt

    config = modelopt_config(random.Random(seed))
    kinds = {
        "NVFP4": "ModelOptNvFp4Config",
        "FP8": "ModelOptFp8Config",
        "MIXED_PRECISION": "ModelOptMixedPrecisionConfig",
    }
    theirs = getattr(modelopt, kinds[config["quant_algo"]]).from_config(copy.deepcopy(config))
    theirs.packed_modules_mapping = {fused: list(parts) for fused, parts in FUSED.items()}
    theirs.apply_vllm_mapper(vllm_mapper)
    for unit in UNITS:
        assert ours(config, unit) == modelopt_label(theirs, config, unit), unit.name
