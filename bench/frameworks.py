"""Blocked time of a framework's own save call, with Nebula and as it comes, in one process: ``python bench/frameworks.py NAME``.

NAME: lightning or hf, run with that framework's Python. About 500 MB of state; every tensor is changed after each save, as
training does. The first save of each kind is left out: it pays for memory that later ones use again. One JSON line.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import torch

WIDTH, LAYERS, SAVES = 2048, 10, 4  # 10 * 2048 * 2048 * 4 bytes * (weights + two moments of Adam) = 503 MB


def net():
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def timed(save, change):
    """Seconds that each call takes; nothing else runs meanwhile but what the save itself left to do."""
    taken = []
    for step in range(SAVES + 1):
        start = time.perf_counter()
        save(step)
        taken.append(time.perf_counter() - start)
        change()
    return statistics.median(taken[1:])


def lightning(directory):
    pl = importlib.import_module("lightning.pytorch")
    import nebulaml as nm

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    def run(io):
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=[io] if io else [],
        )  # fmt: skip
        model = Module()
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2, WIDTH), batch_size=2))
        name = "nebula" if io else "stock"

        def change():
            if io:
                nm.flush_persistence()  # a training step takes longer than this
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)

        return timed(lambda step: trainer.save_checkpoint(os.path.join(directory, name, f"{step}.ckpt")), change)

    nm.init(os.path.join(directory, "persist"), 0, 2)
    return run(None), run(nm.NebulaCheckpointIO())


def hf(directory):
    import nebulaml as nm
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = net()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x, labels=None):
            return {"loss": self.net(x).square().mean()}

    data = [{"x": torch.randn(WIDTH), "labels": 0} for _ in range(4)]

    def run(attached):
        name = "nebula" if attached else "stock"
        training = TrainingArguments(
            output_dir=os.path.join(directory, name), max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=Model(PretrainedConfig()), args=training, train_dataset=data)
        if attached:
            nm.attach(trainer)
        trainer.train()

        def save(step):
            trainer.state.global_step = step + 1
            trainer._save_checkpoint(trainer.model, None)

        def change():
            if attached:
                nm.flush_persistence()
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.add_(1)

        return timed(save, change)

    nm.init(os.path.join(directory, "persist"), 0, 2)
    return run(False), run(True)


def main() -> int:
    name = sys.argv[1]
    directory = tempfile.mkdtemp(prefix="nebula-frameworks-", dir=sys.argv[2] if len(sys.argv) > 2 else None)
    try:
        stock, nebula = {"lightning": lightning, "hf": hf}[name](directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"framework": name, "stock_s": stock, "nebula_s": nebula, "ratio": stock / nebula}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
