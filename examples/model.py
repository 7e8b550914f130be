"""A small byte-level transformer, once for training and once for decoding with a KV cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MODEL_DIR = Path(__file__).resolve().parent / "models"
VOCAB_SIZE = 256

#: CPU matrix products work on blocks of this many rows and take other kernels, whose sums round
#: differently, for what is left over.
ROW_BLOCK = 4


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model; stored beside its weights as JSON."""

    num_layers: int
    width: int
    num_heads: int = 4
    head_dim: int = 24
    mlp_width: int = 384
    max_length: int = 384

    @property
    def qkv_width(self) -> int:
        """Columns of the projection to all query heads, one key and one value."""
        return (self.num_heads + 2) * self.head_dim


class Transformer(nn.Module):
    """Decoder-only: LayerNorm, rotary positions, one key/value head, squared ReLU, tied embeddings.

    The matrices of all layers are stacked, so that there is one parameter of each kind.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layers, width, heads_width = config.num_layers, config.width, config.num_heads * config.head_dim
        self.embedding = nn.Parameter(torch.randn(VOCAB_SIZE, width) * 0.05)
        self.final_gain = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.randn(layers, width, config.qkv_width) * width**-0.5)
        self.out = nn.Parameter(torch.zeros(layers, heads_width, width))
        self.up = nn.Parameter(torch.randn(layers, width, config.mlp_width) * width**-0.5)
        self.down = nn.Parameter(torch.zeros(layers, config.mlp_width, width))
        self.register_buffer("rotations", rotation_table(config), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits ``[batch, length, 256]`` of every next byte, for training and as the reference."""
        config = self.config
        batch, length = token_ids.shape
        rotations = self.rotations[:length]
        x = F.embedding(token_ids, self.embedding)
        for qkv, out, up, down in zip(
            self.qkv.unbind(), self.out.unbind(), self.up.unbind(), self.down.unbind(), strict=True
        ):
            h = F.layer_norm(x, (config.width,)) @ qkv
            h = rotate(h, rotations).view(batch, length, config.num_heads + 2, config.head_dim)
            q, k, v = h.transpose(1, 2).split((config.num_heads, 1, 1), dim=1)
            attended = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
            x = x + attended.transpose(1, 2).reshape(batch, length, -1) @ out
            h = F.layer_norm(x, (config.width,)) @ up
            x = x + F.relu(h).square() @ down
        return F.layer_norm(x, (config.width,)) @ (self.embedding * self.final_gain).T


def rotation_table(config: ModelConfig) -> Tensor:
    """Complex factors ``[max_length, qkv_width / 2]``: rotary for queries and key, 1 for the value."""
    half = config.head_dim // 2
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(config.max_length, dtype=torch.float64), frequencies)
    rotary = torch.polar(torch.ones_like(angles), angles).repeat(1, config.num_heads + 1)
    return torch.cat([rotary, torch.ones_like(rotary[:, :half])], dim=1).to(torch.complex64)


def rotate(qkv: Tensor, rotations: Tensor) -> Tensor:
    """Applies rotary positions to rows of queries, key and value in one product."""
    pairs = torch.view_as_complex(qkv.view(*qkv.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).view(qkv.shape)


class Decoder:
    """One model, its KV cache, and steps of any width over ragged requests.

    The cache has one row per request and position. A step writes the rows of the tokens that it is
    given at ``lengths`` and beyond, and a query sees no row past its own position; so rejected drafts
    are rolled back by passing the shorter length next time.

    The logits of a token are the same bits however wide its step is, so that greedy text does not
    depend on the drafts. Every matrix product has a multiple of ``ROW_BLOCK`` rows, with which a row's
    sums do not depend on the number of rows; in attention this holds because the query heads share
    one key and are rows of one product. Attention runs over the whole capacity in every step, so
    that its sums have the same length. Seen with torch's MKL build on AVX2; where a CPU's products
    round otherwise, greedy text still agrees unless two logits are within some 1e-6 of each other.

    Args:
        model: Its weights, as float32.
        batch: Number of requests.
        capacity: Positions of each request, at most the model's ``max_length``.
    """

    def __init__(self, model: Transformer, batch: int, capacity: int) -> None:
        config = model.config
        if capacity > config.max_length:
            raise ValueError(f"capacity: {capacity} positions, the model has {config.max_length}")
        self.config, self.batch, self.capacity = config, batch, capacity
        self._layers = [
            tuple(matrix.detach().contiguous() for matrix in layer)
            for layer in zip(model.qkv, model.out, model.up, model.down, strict=True)
        ]
        self._embedding = model.embedding.detach()
        self._head = (model.embedding * model.final_gain).detach().T.contiguous()
        self._rotations = model.rotations
        hidden = torch.full((capacity, capacity), -torch.inf).triu(1)
        self._mask = hidden.repeat(1, config.num_heads)
        cache = torch.zeros(config.num_layers, batch, 1, capacity, 2 * config.head_dim)
        self._caches = [
            (layer.view(batch * capacity, -1), *layer.split(config.head_dim, dim=3)) for layer in cache
        ]
        self._starts = torch.arange(batch).unsqueeze(1) * capacity

    @torch.inference_mode()
    def step(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Feeds some tokens to every request.

        Args:
            token_ids: ``[batch, width]`` int64; what pads a request with fewer tokens does not matter.
            lengths: ``[batch]`` int64, positions of each request that are in the cache already.

        Returns:
            Logits ``[batch * width, 256]`` of the byte that follows each token.
        """
        width = padded_width = token_ids.shape[1]
        while self.batch * padded_width % ROW_BLOCK:
            padded_width += 1
        if padded_width == width:
            return self._step(token_ids, lengths)
        logits = self._step(F.pad(token_ids, (0, padded_width - width)), lengths)
        return logits.view(self.batch, padded_width, VOCAB_SIZE)[:, :width].flatten(0, 1)

    def _step(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        config, batch, capacity = self.config, self.batch, self.capacity
        width, heads, head_dim = token_ids.shape[1], config.num_heads, config.head_dim
        positions = (lengths.unsqueeze(1) + torch.arange(width)).clamp_(max=capacity - 1)
        rows = (self._starts + positions).flatten()
        positions = positions.flatten()
        rotations = self._rotations.index_select(0, positions)
        mask = self._mask.index_select(0, positions).view(batch, 1, width * heads, capacity)
        x = self._embedding.index_select(0, token_ids.flatten())
        for (qkv, out, up, down), (cache, k, v) in zip(self._layers, self._caches, strict=True):
            h = rotate(F.layer_norm(x, (config.width,)) @ qkv, rotations).view(-1, heads + 2, head_dim)
            cache.index_copy_(0, rows, h[:, heads:].reshape(-1, 2 * head_dim))
            q = h[:, :heads].reshape(batch, 1, width * heads, head_dim)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = torch.addmm(x, attended.view(-1, heads * head_dim), out)
            h = (F.layer_norm(x, (config.width,)) @ up).relu_().square_()
            x = torch.addmm(x, h, down)
        return F.layer_norm(x, (config.width,)) @ self._head


def save_model(model: Transformer, name: str, folder: Path = MODEL_DIR) -> None:
    """Writes ``name``.safetensors (float16) and ``name``.json (the sizes)."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.detach().half().contiguous() for key, value in model.named_parameters()},
        folder / f"{name}.safetensors",
    )
    (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=2) + "\n")


def load_model(name: str, folder: Path = MODEL_DIR) -> Transformer:
    """Reads what ``save_model`` wrote, as float32.

    Raises:
        FileNotFoundError: The weights are not there.
    """
    weights, sizes = folder / f"{name}.safetensors", folder / f"{name}.json"
    if not (weights.is_file() and sizes.is_file()):
        raise FileNotFoundError(
            f"{weights} is missing: check it out, or train it with `python -m examples.train --out {folder}`"
        )
    model = Transformer(ModelConfig(**json.loads(sizes.read_text())))
    model.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
    return model.requires_grad_(False).eval()
