"""Tiny models with random weights, made from configurations: one list of what is served, and one of what is refused."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 20  # tokens; no multiple of a block, and shorter than the prompts
_COMMON: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Ten times the usual: the logits of a random model stand apart, so that rounding does not change the best.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GPT2_WORDS = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_MIXED = {"sliding_window": WINDOW, "layer_types": _TWO_KINDS}
_FOUR_MIXED = {"sliding_window": WINDOW, "layer_types": 2 * _TWO_KINDS, "num_hidden_layers": 4}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Multi-head latent attention: keys and values of different sizes, expanded before they are stored.
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_GEMMA_PER_LAYER = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}

# By name: what differs from the common configuration. `model_type` is the name where it is not given.
SERVED: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "codegen": {**_GPT2_WORDS, "n_ctx": 256, "rotary_dim": 4},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **_MIXED},
    "cwm": {"head_dim": 8, **_MIXED},
    "deepseek_v2": {**_LATENT, **_ROUTED},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "dots1": {**_ROUTED, **_MIXED},
    "ernie4_5": {"head_dim": 8},
    "exaone4": _MIXED,
    "exaone_moe": {**_EXPERTS, **_MIXED, "n_group": 1, "topk_group": 1},
    "flex_olmo": _EXPERTS,
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        **_MIXED,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, **_MIXED},
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        **_FOUR_MIXED,
        **_GEMMA_PER_LAYER,
        "intermediate_size": [48] * 4,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        **_FOUR_MIXED,
        **_GEMMA_PER_LAYER,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8, **_ROUTED},
    "gpt2": _GPT2_WORDS,
    "gpt_bigcode": _GPT2_WORDS,
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, **_LOCAL_EXPERTS, **_MIXED},
    "gptj": {**_GPT2_WORDS, "rotary_dim": 4},
    "granite": {},
    "granitemoe": _LOCAL_EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "llama": {},
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        **_ROUTED,
        **_MIXED,
    },
    "minicpm3": _LATENT,
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, **_LOCAL_EXPERTS},
    "ministral": {"head_dim": 16, **_MIXED},
    "ministral3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": _LOCAL_EXPERTS,
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 128,
    },
    "phimoe": {**_LOCAL_EXPERTS, "sliding_window": WINDOW},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, **_QWEN_WINDOW},
    "qwen2_window": {"model_type": "qwen2", **_QWEN_WINDOW},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS},
    "seed_oss": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {"head_dim": 16, **_MIXED},
}

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v32": {**_LATENT, **_ROUTED, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "diffllama": {},
    "doge": {},
    "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "qwen3_next": {
        "head_dim": 8,
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}

# Those of SERVED that can keep latents; each has a row more, in which it does.
WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "minicpm3")


def build_tiny(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of SERVED or REFUSED in fp32. The same seed gives the same weights."""
    given = {**_COMMON, **(SERVED[name] if name in SERVED else REFUSED[name])}
    config = AutoConfig.for_model(given.pop("model_type", name), **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # it has no annotations
        for parameter in model.parameters():
            _disturb(parameter)
    return model.eval()  # type: ignore[no-untyped-call,no-any-return] # the same


@torch.no_grad()
def _disturb(parameter: torch.nn.Parameter) -> None:
    """Norms start as ones, biases and attention sinks as zeros or as rubbish: what leaves them out would go unseen."""
    if parameter.dim() == 1:
        parameter.copy_(torch.where(parameter == 1, 1.0, 0.0) + 0.1 * torch.randn_like(parameter))
