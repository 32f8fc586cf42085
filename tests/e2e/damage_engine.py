"""Runs as a script: `damage_engine.py BLOCK_SIZE {"case": ["folder", "damage"], …}` loads each case's checkpoint in one
process, damages vLLM's recurrent state as named ("" leaves it whole), asks what the smoke test asks, sixteen at once in
chunks of prefill, and prints a JSON line {case: [ids of wrong answers]}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from training.chat import Call, call_text

from qwen_nvfp4_serve.reference import KnownAnswer, one_of_each, read_answers

MARK = "DAMAGE "
CONTEXT, CHUNK, AT_ONCE = 4096, 512, 16


def text_of(answer: KnownAnswer) -> str:
    """All that the model writes before it stops."""
    calls = "\n".join(call_text(Call(name, dict(arguments))) for name, arguments in answer.expected.calls)
    thinking = f"{answer.expected.reasoning}\n</think>\n\n" if answer.thinks else ""
    return thinking + answer.expected.content + calls


def parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as a server hands them to a chat template."""
    calls = [dict(call["function"]) for call in message.get("tool_calls", ())]
    for call in calls:
        call["arguments"] = json.loads(call["arguments"])
    return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def others_slot(states: Any, indices: Any) -> None:
    """Every request finds the state of the one before it in the batch."""
    states[indices] = states[indices.roll(1)].clone()


def lost(states: Any, indices: Any) -> None:
    """Nothing is left of the state."""
    states[indices] = 0


def bfloat16(states: Any, indices: Any) -> None:
    """The state as a BF16 cache keeps it."""
    states[indices] = states[indices].bfloat16().to(states.dtype)


Damage = Callable[[Any, Any], None]
# damage -> what it does to the state of one token's update, of a chunk of prefill, and of the convolution's window
DAMAGES: dict[str, tuple[Damage | None, Damage | None, Damage | None]] = {
    "": (None, None, None),
    "others slot": (others_slot, None, None),
    "lost between chunks": (None, lost, None),
    "convolution lost": (None, None, lost),
    "bfloat16": (bfloat16, bfloat16, None),
}


@contextlib.contextmanager
def damaged(name: str) -> Iterator[None]:
    """vLLM's CPU operations with the damage done before each."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    step, chunk, window = DAMAGES[name]
    seams = (
        (
            module.ops,
            "fused_sigmoid_gating_delta_rule_update_cpu",
            step,
            "initial_state_source",
            "initial_state_indices",
        ),
        (module.ops, "chunk_gated_delta_rule_cpu", chunk, "initial_state", "initial_state_indices"),
        (module, "_causal_conv1d_update_cpu", window, "conv_states", "conv_state_indices"),
        (module, "causal_conv1d_update_cpu", window, "conv_state", "conv_state_indices"),
    )
    with contextlib.ExitStack() as stack:
        for owner, function, damage, states, indices in seams:
            if damage is not None:
                whole = getattr(owner, function)
                stack.callback(setattr, owner, function, whole)
                setattr(owner, function, before(whole, damage, states, indices))
        yield


def before(whole: Callable[..., Any], damage: Damage, states: str, indices: str) -> Callable[..., Any]:
    """`whole`, with the damage done to the states it is given."""

    def call(**arguments: Any) -> Any:
        damage(arguments[states], arguments[indices].long())
        return whole(**arguments)

    return call


def wrong(folder: Path, damage: str, block_size: int) -> list[str]:
    """Ids of the known answers that the engine does not give."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=str(folder),
        enforce_eager=True,
        language_model_only=True,
        kv_cache_dtype="fp8",
        enable_prefix_caching=True,
        block_size=block_size,
        max_model_len=CONTEXT,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=256 << 20,
        distributed_executor_backend="uni",
        seed=0,
    )
    answers = one_of_each(read_answers(folder), CONTEXT)
    tokenizer = engine.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [parsed(message) for message in answer.messages],
            tools=list(answer.tools) or None,
            add_generation_prompt=True,
            enable_thinking=answer.thinks,
            tokenize=False,
        )
        for answer in answers
    ]
    sampling = [
        SamplingParams(temperature=0, max_tokens=answer.body("")["max_tokens"], skip_special_tokens=False)
        for answer in answers
    ]
    with damaged(damage):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    given = [output.outputs[0].text.removesuffix("<|im_end|>") for output in outputs]
    return [answer.id for answer, text in zip(answers, given, strict=True) if text != text_of(answer)]


if __name__ == "__main__":
    block, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    print(MARK + json.dumps({case: wrong(Path(folder), damage, block) for case, (folder, damage) in cases.items()}))
