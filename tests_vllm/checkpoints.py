"""Small Llama-like checkpoints, made on the spot, whose drafts agree with the target for a reason.

The target's next token depends on its last token and, through attention, on those before it. Every weight is
drawn from a fixed seed. Token ids are the prompts; there is no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

VOCAB_SIZE = 256
HIDDEN_SIZE = 64
HEAD_SIZE = 32
NUM_HEADS = HIDDEN_SIZE // HEAD_SIZE
INTERMEDIATE_SIZE = 128
NUM_LAYERS = 2
#: The standard deviation of the target's logits.
LOGIT_SCALE = 3.0
#: What a layer adds to the residual stream, where the embedding counts as 1.
LAYER_SCALES = (0.5, 0.2)


def _layer(generator: torch.Generator, scale: float) -> dict[str, Tensor]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    return {
        "input_layernorm.weight": torch.ones(HIDDEN_SIZE),
        "self_attn.q_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE, 2.0),
        "self_attn.k_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE, 2.0),
        "self_attn.v_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE),
        "self_attn.o_proj.weight": matrix(HIDDEN_SIZE, HIDDEN_SIZE, scale),
        "post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
        "mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE, scale),
    }


def _embedding(generator: torch.Generator) -> Tensor:
    """Rows of root mean square 1: the norm in front of the first layer leaves them as they are."""
    rows = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return rows / rows.square().mean(dim=1, keepdim=True).sqrt()


def target_weights() -> dict[str, Tensor]:
    """The target."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        "model.embed_tokens.weight": _embedding(generator),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
    }
    for index, scale in enumerate(LAYER_SCALES):
        for name, weight in _layer(generator, scale).items():
            weights[f"model.layers.{index}.{name}"] = weight
    head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    weights["lm_head.weight"] = head * (LOGIT_SCALE / HIDDEN_SIZE**0.5)
    return weights


def perturbed(weights: dict[str, Tensor], noise: float) -> dict[str, Tensor]:
    """The weights with relative noise on every matrix: a draft model that is often right."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: weight
        if weight.ndim == 1
        else weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def eagle_weights(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """An EAGLE head that is the target without its last layer.

    Its projection passes the embedding on and drops the target's hidden state; its layer is the target's
    first, over a KV cache of its own. So it agrees with the target as far as the second layer lets it, and
    only while its positions, slots and token ids are right.
    """
    weights = {
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "fc.weight": torch.cat([torch.eye(HIDDEN_SIZE), torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)], dim=1),
    }
    for name, weight in target.items():
        # The head's first layer has no norm in front; the embedding needs none.
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            weights[name.removeprefix("model.")] = weight.clone()
    return weights


def likely_text(num_tokens: int) -> list[int]:
    """A prompt of pieces that the target may well go on with: something to look up n-grams in."""
    weights = target_weights()
    likely_next = (weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T).argmax(dim=1).tolist()
    text: list[int] = []
    start = 0
    while len(text) < num_tokens:
        token = start
        for _ in range(4):
            text.append(token)
            token = likely_next[token]
        start = (start + 37) % VOCAB_SIZE
    return text[:num_tokens]


def write(folder: Path, weights: dict[str, Tensor], num_layers: int, architecture: str) -> Path:
    """Writes a checkpoint that vLLM loads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


def write_all(folder: Path) -> dict[str, str]:
    """Writes every checkpoint below ``folder``; their paths by name."""
    target = target_weights()
    llama, eagle = "LlamaForCausalLM", "EagleLlamaForCausalLM"
    paths = {
        "target": write(folder / "target", target, NUM_LAYERS, llama),
        "draft": write(folder / "draft", perturbed(target, 0.1), NUM_LAYERS, llama),
        "eagle": write(folder / "eagle", eagle_weights(target), 1, eagle),
    }
    return {name: str(path) for name, path in paths.items()}
