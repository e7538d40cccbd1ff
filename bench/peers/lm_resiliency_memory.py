"""lm-resiliency's checkpoints in memory (GEMINI), each version flushed to the node's disk as well."""

from __future__ import annotations

from ..peer import Peer, State, own_environment


class LmResiliency(Peer):
    title = "lm-resiliency (GEMINI)"
    python = own_environment("lm-resiliency")
    packages = ("lm-resiliency",)

    def prepare(self) -> None:
        from lm_resiliency import checkpointing

        self.module = checkpointing

    def open(self) -> None:
        # By its interval it would flush the version before the newest one. Here every version is flushed right after its save.
        config = self.module.InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(self.folder / "disk"), run_id="bench", pin_memory=False
        )
        self.manager = self.module.InMemoryCheckpointManager(config)

    def save(self, tag: str, state: State) -> None:
        step = int(tag.removeprefix("step"))
        self.manager.save(state, step)
        self.manager.maybe_wait()
        self.manager.flush_to_disk(step)

    def wait_durable(self, tag: str) -> None:
        self.manager._disk.wait()

    def load(self, tag: str, sizes: dict[str, int]) -> State:
        found = self.manager.load(step=int(tag.removeprefix("step")))
        if found is None:
            raise RuntimeError(f"{tag} is not there")
        return found[0]

    def close(self) -> None:
        self.manager.close()


PEER = LmResiliency
