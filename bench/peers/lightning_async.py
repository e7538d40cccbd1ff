"""Lightning's AsyncCheckpointIO around its TorchCheckpointIO, as the Trainer calls it."""

from __future__ import annotations

from ..peer import Peer, State, own_environment


class LightningAsync(Peer):
    title = "Lightning AsyncCheckpointIO"
    python = own_environment("lightning")
    packages = ("lightning",)
    durable = False

    def prepare(self) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, tag: str, state: State) -> None:
        self.io.save_checkpoint(state, self.folder / f"{tag}.ckpt")

    def wait_durable(self, tag: str) -> None:
        self.io.teardown()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        return self.io.load_checkpoint(self.folder / f"{tag}.ckpt", weights_only=True)

    def close(self) -> None:
        self.io.teardown()


PEER = LightningAsync
