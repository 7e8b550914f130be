"""Trains the demo's target and draft models on the standard library's source, in minutes on a CPU.

The target learns to predict bytes. The draft, five times cheaper, learns to predict the target:
half of its text is the library's, half was written by the target, and its loss is the divergence
from the target's distribution, which is what acceptance depends on. The weights in `examples/models`
took 1,192 and 695 steps.

    python -m examples.train                      # both, about half an hour on 2 cores
    python -m examples.train --only draft --draft-minutes 5
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.corpus import held_out_text, training_text
from examples.model import MODEL_DIR, Decoder, ModelConfig, Transformer, load_model, save_model

TARGET = ModelConfig(num_layers=12, width=64, head_dim=16, mlp_width=256)
DRAFT = ModelConfig(num_layers=2, width=64, head_dim=16, mlp_width=256)
SEED = 20240229

Loss = Callable[[Transformer, Tensor], Tensor]


class Optimizer:
    """Muon for the stacked matrices, Adam for the embedding and the gain.

    Muon (Jordan et al., 2024) takes the momentum's nearest orthogonal matrix as the step, which needs
    about half of Adam's steps here.
    """

    def __init__(self, model: Transformer, learning_rate: float = 0.02) -> None:
        self._learning_rate = learning_rate
        self._matrices = [model.qkv, model.out, model.up, model.down]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        self._adam = torch.optim.Adam(
            [model.embedding, model.final_gain], lr=learning_rate / 4, betas=(0.9, 0.95)
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at ``scale`` times the learning rate; clears the gradients."""
        for p, momentum in zip(self._matrices, self._momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 0.05)
            update = orthogonalize(torch.lerp(p.grad, momentum, 0.95))
            rows, columns = p.shape[1:]
            p.mul_(1 - 0.01 * self._learning_rate * scale)
            p.add_(update, alpha=-self._learning_rate * scale * max(1.0, columns / rows) ** 0.5)
            p.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._learning_rate / 4 * scale
        self._adam.step()
        self._adam.zero_grad()


def orthogonalize(gradients: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a stack, by five quintic Newton-Schulz steps."""
    x = gradients / (gradients.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def bits_per_byte(model: Transformer, text: np.ndarray, length: int = 384) -> float:
    """Cross-entropy on ``text`` in bits, cut into windows of ``length`` bytes."""
    windows = torch.from_numpy(text[: len(text) // length * length].reshape(-1, length).astype(np.int64))
    total = 0.0
    with torch.inference_mode():
        for batch in windows.split(16):
            total += F.cross_entropy(
                model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (windows.shape[0] * (length - 1)) / math.log(2)


def data_loss(model: Transformer, batch: Tensor) -> Tensor:
    """Cross-entropy of the next byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: Transformer,
    loss_function: Loss,
    texts: list[np.ndarray],
    *,
    minutes: float,
    max_steps: int | None,
    batch_bytes: int,
    validation: np.ndarray,
) -> None:
    """Trains until the time or the number of steps is used up; the rate falls linearly to 0.

    Windows grow from 128 to 256 and 384 bytes, since attention takes most of the time of long ones.

    Args:
        model: Trained in place.
        loss_function: Takes the model and ``[batch, length + 1]`` byte ids.
        texts: Each batch takes an equal share of windows from each of them.
        minutes: Time budget.
        max_steps: If given, ends after this many steps instead, which makes runs repeatable.
        batch_bytes: Bytes per step.
        validation: Held-out text that the log reports on.
    """
    generator = np.random.default_rng(SEED)
    optimizer = Optimizer(model)
    start = last_log = time.monotonic()
    step, running, seen = 0, 0.0, 0
    while True:
        used = time.monotonic() - start
        progress = step / max_steps if max_steps else used / (60 * minutes)
        if progress >= 1:
            break
        length = 128 if progress < 0.5 else 256 if progress < 0.8 else 384
        batch_size = batch_bytes // length
        seen += batch_size * length
        windows = []
        for i, text in enumerate(texts):
            share = batch_size * (i + 1) // len(texts) - batch_size * i // len(texts)
            offsets = generator.integers(0, len(text) - length - 1, size=share)
            windows += [text[o : o + length + 1] for o in offsets]
        batch = torch.from_numpy(np.stack(windows).astype(np.int64))
        loss = loss_function(model, batch)
        loss.backward()
        optimizer.step(min(1.0, (step + 1) / 40) * (1 - progress))
        step += 1
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if time.monotonic() - last_log > 30 or step == 1:
            last_log = time.monotonic()
            print(
                f"step {step:5d}  {used / 60:5.1f} min  {seen / 1e6:6.2f} MB  "
                f"loss {running / math.log(2):.3f} bits",
                flush=True,
            )
    print(
        f"{step} steps, {seen / 1e6:.2f} MB; "
        f"held-out files: {bits_per_byte(model, validation):.3f} bits per byte",
        flush=True,
    )


def write_text(
    target: Transformer, prompts: np.ndarray, *, rounds: int, batch_size: int, minutes: float
) -> np.ndarray:
    """Text that the target writes at temperature 0.9 after prompts from the training files.

    Args:
        target: The model that writes.
        prompts: Text that prompts are cut from.
        rounds: How many batches at most.
        batch_size: Requests of a batch.
        minutes: Time budget.

    Returns:
        All windows (prompt and continuation) end to end.
    """
    prompt_length, length = 64, 320
    generator = np.random.default_rng(SEED + 1)
    torch.manual_seed(SEED)
    decoder = Decoder(target, batch_size, length)
    start = time.monotonic()
    written = []
    for _ in range(rounds):
        offsets = generator.integers(0, len(prompts) - prompt_length, size=batch_size)
        text = torch.from_numpy(np.stack([prompts[o : o + prompt_length] for o in offsets]).astype(np.int64))
        lengths = torch.zeros(batch_size, dtype=torch.int64)
        step = text
        for position in range(prompt_length, length):
            logits = decoder.step(step, lengths).view(batch_size, -1, 256)[:, -1]
            lengths = lengths + step.shape[1]
            step = torch.multinomial(F.softmax(logits / 0.9, dim=-1), 1)
            text = torch.cat([text, step], dim=1)
            assert text.shape[1] == position + 1
        written.append(text.to(torch.uint8).numpy().reshape(-1))
        if time.monotonic() - start > 60 * minutes:
            break
    return np.concatenate(written)


def train_target(arguments: argparse.Namespace) -> None:
    """Trains and saves the target."""
    torch.manual_seed(SEED)
    model = Transformer(TARGET)
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(
        model,
        data_loss,
        [training_text()],
        minutes=arguments.target_minutes,
        max_steps=arguments.target_steps,
        batch_bytes=3072,
        validation=held_out_text(),
    )
    save_model(model, "target", arguments.out)


def train_draft(arguments: argparse.Namespace) -> None:
    """Trains and saves the draft against the saved target."""
    target = load_model("target", arguments.out)
    library = training_text()
    written = write_text(
        target, library, rounds=arguments.written_rounds, batch_size=128, minutes=arguments.draft_minutes / 3
    )
    torch.manual_seed(SEED)
    model = Transformer(DRAFT)
    print(
        f"draft: {sum(p.numel() for p in model.parameters()):,} parameters; "
        f"the target wrote {len(written) / 1e6:.2f} MB",
        flush=True,
    )

    def distance_from_target(draft: Transformer, batch: Tensor) -> Tensor:
        with torch.no_grad():
            law = F.softmax(target(batch[:, :-1]).flatten(0, 1), dim=-1)
        return F.cross_entropy(draft(batch[:, :-1]).flatten(0, 1), law)

    train(
        model,
        distance_from_target,
        [library, written],
        minutes=arguments.draft_minutes * 2 / 3,
        max_steps=arguments.draft_steps,
        batch_bytes=3072,
        validation=held_out_text(),
    )
    save_model(model, "draft", arguments.out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("target", "draft"), help="train just this one (default: both)")
    parser.add_argument(
        "--target-minutes", type=float, default=22.0, help="time for the target (default: 22)"
    )
    parser.add_argument("--draft-minutes", type=float, default=8.0, help="time for the draft (default: 8)")
    parser.add_argument("--target-steps", type=int, help="end the target after this many steps instead")
    parser.add_argument("--draft-steps", type=int, help="end the draft after this many steps instead")
    parser.add_argument(
        "--written-rounds", type=int, default=20, help="batches of text by the target (default: 20)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder for the weights")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only != "draft":
        train_target(arguments)
    if arguments.only != "target":
        train_draft(arguments)


if __name__ == "__main__":
    main()
