"""Trains a small transformer on characters with Flax, on all devices of this machine. Kill it and start it again: the losses go on exactly.

    python examples/jax/train.py
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import nebulaml.jax as nj
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CONTEXT = 64


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.SelfAttention(self.heads)(nn.LayerNorm()(x), mask)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Transformer(nn.Module):
    letters: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.letters, self.width)(tokens) + nn.Embed(CONTEXT, self.width)(jnp.arange(tokens.shape[-1]))
        for _ in range(self.layers):
            x = Block(4)(x)
        return nn.Dense(self.letters)(nn.LayerNorm()(x))


class Batches:
    """Pieces of the text in a random order, whose place get_state() and set_state() know, as those of Grain's iterators."""

    def __init__(self, text: np.ndarray, size: int) -> None:
        self._text, self._size, self._number = text, size, 0

    def __next__(self) -> np.ndarray:
        starts = np.random.default_rng(self._number).integers(0, len(self._text) - CONTEXT - 1, self._size)
        self._number += 1
        return np.stack([self._text[start : start + CONTEXT + 1] for start in starts])

    def get_state(self) -> dict[str, int]:
        return {"number": self._number}

    def set_state(self, state: dict[str, int]) -> None:
        self._number = state["number"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="a multiple of the number of devices")
    parser.add_argument("--text", type=Path, default=Path(nn.__file__), help="a text file; the source of flax.linen by default")
    parser.add_argument("--path", default="runs/jax", help="where the checkpoints go: a directory or a URL")
    parser.add_argument("--kill-at", type=int, help="SIGKILL after this step, to try it")
    chosen = parser.parse_args()

    letters, text = np.unique(np.frombuffer(chosen.text.read_bytes(), np.uint8), return_inverse=True)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = Transformer(len(letters), chosen.width, chosen.layers)

    def begin() -> TrainState:
        variables = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adamw(3e-3))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: object) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    train = jax.jit(step, donate_argnums=0, out_shardings=(everywhere, everywhere))  # a save fixes the values: donated buffers are no problem
    batches = Batches(text.astype(np.int32), chosen.batch)
    with nj.Manager(chosen.path, save_every_steps=chosen.save_every, keep_last=3) as manager:
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), jax.eval_shape(begin))
        restored = manager.restore({"state": abstract, "batches": batches})
        if restored is None:
            state = jax.jit(begin, out_shardings=everywhere)()
        else:
            state = restored.items["state"]
            print(f"resumed after step {restored.step}", flush=True)
        for number in range(int(state.step) + 1, chosen.steps + 1):
            state, loss = train(state, jax.device_put(next(batches), split))
            if number % chosen.save_every == 0 or number == chosen.kill_at:
                print(f"step {number} loss {float(loss):.6f}", flush=True)
            manager.save(number, {"state": state, "batches": batches})
            if number == chosen.kill_at:
                manager.wait(state="committed")  # a kill while the bytes are copied would lose the newest version
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.stop_requested:
                break


if __name__ == "__main__":
    main()
