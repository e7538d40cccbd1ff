"""A framework's own save call with overlap=True, on the fake device of tests/python: it returns before anything is copied, and the saved
values are those before the optimizer's next step. Arguments: a directory, and "hf", "lightning" or "deepspeed"."""

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import nebulaml as nm
import torch
from fake_device import SGD, Device
from nebulaml.tensors import device

directory, name = sys.argv[1:]
LARGE = 700  # squared: more than device.SMALL_BYTES
fake = Device()
device.use(fake)


def on_device(parameters):
    for parameter in parameters:
        fake.put(parameter.data)


def hf():
    import transformers
    from safetensors.torch import load_file

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = torch.nn.Linear(LARGE, LARGE, bias=False)
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x, labels=None):
            return {"loss": self.net(x).square().mean()}

    model = Model(transformers.PretrainedConfig())
    optimizer = SGD(model.parameters(), fake)
    training = transformers.TrainingArguments(output_dir=directory, max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    data = [{"x": torch.ones(LARGE), "labels": 0}] * 4
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = transformers.Trainer(model=model, args=training, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.remove_callback(transformers.PrinterCallback)
    nm.attach(trainer, overlap=True)
    trainer.train()
    fake.synchronize()
    on_device(model.parameters())

    def read():
        return load_file(os.path.join(directory, "checkpoint-1", "model.safetensors"))["net.weight"]

    return model.net.weight, lambda: trainer._save_checkpoint(model, None), lambda: trainer.optimizer.step(), read


def lightning():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(LARGE, LARGE, bias=False)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return SGD(self.parameters(), fake)

    saver = nm.NebulaCallback(dirpath=directory, save_top_k=0, overlap=True, config_params={"persistent_storage_path": directory + "-persist"})
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, callbacks=[saver], enable_progress_bar=False, enable_model_summary=False
    )
    model = Module()
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, LARGE)))
    fake.synchronize()
    on_device(model.parameters())
    path = os.path.join(directory, "one.ckpt")

    def read():
        return torch.load(path, weights_only=False)["state_dict"]["net.weight"]

    def save():  # as Trainer.save_checkpoint in a fit; after the fit that waits until the file is there
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), path)

    return model.net.weight, save, lambda: trainer.optimizers[0].step(), read


def deepspeed():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(LARGE, LARGE, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=SGD(model.parameters(), fake), config=config)
    nm.init(directory, 0)
    nm.attach(engine, overlap=True)
    weight = engine.module.weight
    on_device([weight])

    def read():
        path = os.path.join(directory, "global_step1", "mp_rank_00_model_states.pt")
        return torch.load(path, weights_only=False)["module"]["weight"]

    return weight, lambda: engine.save_checkpoint(directory + "-save", tag="global_step1"), lambda: engine.optimizer.step(), read


weight, save, step, read = {"hf": hf, "lightning": lightning, "deepspeed": deepspeed}[name]()
wanted = weight.detach().clone()
fake.hold_up()
last_resort = threading.Timer(20, fake.let_go)  # a save that waits for its copies is to fail, not to hang
last_resort.start()
save()
assert fake.ended == 0, "the save waited for the copy"
step()
last_resort.cancel()
fake.let_go()
assert nm.flush_persistence(timeout=60)
fake.synchronize()
assert torch.equal(weight, wanted - 1), "the step did not come"
assert torch.equal(read(), wanted), "what is saved is not what was there"
print('{"end": true}', flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
