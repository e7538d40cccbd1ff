"""A small transformers.Trainer job on CPU: trains, may be killed, resumes. Prints one JSON line per step on rank 0."""

import argparse
import json
import os
import signal
import sys
import time

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=["attach", "mixin", "stock", "subclass"], default="attach")
parser.add_argument("--output", required=True)
parser.add_argument("--persist")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--limit", type=int)
parser.add_argument("--best", action="store_true")
parser.add_argument("--metric", choices=["better", "worse"], help="the best model is noted, and not loaded; worse: the first one is it")
parser.add_argument("--only-model", action="store_true")
parser.add_argument("--resume", nargs="?", const=True)
parser.add_argument("--hide", metavar="NAME", help="the other ranks have listed directories before this one was there")
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--term-at", type=int, default=-1)
parser.add_argument("--jit", action="store_true")
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--lose", type=int, default=-1, help="the step whose checkpoint Nebula cannot take")
parser.add_argument("--publish", metavar="PATH", help="publish the weights there after every step but the first")
parser.add_argument("--peft", action="store_true", help="train an adapter")
parser.add_argument("--fsdp", action="store_true", help="FSDP version 2 on the CPU")
parser.add_argument("--each-node", action="store_true", help="transformers is to save on each node")
parser.add_argument("--reader", action="store_true", help="a callback that reads each checkpoint in on_save")
parser.add_argument("--ends", action="store_true", help="each rank writes down what it ended with")
parser.add_argument("--deepspeed", type=int, metavar="STAGE", help="through DeepSpeed; with --persist its JSON has a nebula section")
args = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
if args.hide and rank:
    listed = os.listdir
    os.listdir = lambda *where: [name for name in listed(*where) if name != args.hide]


def say(**line):
    if rank == 0:
        print(json.dumps(line), flush=True)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    def on_log(self, args_, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            say(step=state.global_step, loss=logs["loss"])

    def on_step_end(self, args_, state, control, **kwargs):
        if state.global_step == args.fail_at:
            raise RuntimeError("the user's own error")
        if state.global_step == args.term_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    def on_step_begin(self, args_, state, control, **kwargs):
        if state.global_step == args.kill_at:  # the step's own save has returned
            time.sleep(0.3 if os.environ.get("WORLD_SIZE", "1") != "1" else 0)
            os.kill(os.getpid(), signal.SIGKILL)


class Reader(TrainerCallback):
    """A user's callback that reads the checkpoint that was just saved, for example to evaluate, upload or convert it."""

    def on_save(self, args_, state, control, model=None, **kwargs):
        folder = os.path.join(args_.output_dir, f"checkpoint-{state.global_step}")
        if rank == 0:
            found = GPT2LMHeadModel.from_pretrained(folder).state_dict()
            mine = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
            say(read=state.global_step, equal=all(torch.equal(found[name], value) for name, value in mine.items()))


def is_adapter(model, directory):
    """Whether PEFT loads the model's adapter from there, which training has changed."""
    import peft

    base = GPT2LMHeadModel.from_pretrained(args.output + "-base")
    found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, directory))
    mine = peft.get_peft_model_state_dict(model)
    changed = any(value.any() for name, value in mine.items() if "lora_B" in name)  # they begin as zeros
    return bool(changed) and found.keys() == mine.keys() and all(torch.equal(found[name], value) for name, value in mine.items())


def read_published(model):
    """Says what a follower has at the end, and whether it is what the model has."""
    import nebulaml as nm

    mine = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}
    with nm.Subscriber(args.publish) as subscriber:
        published = subscriber.prepare(60)
        published.commit()
        if args.peft:
            say(published=published.step, equal=is_adapter(model, subscriber.current), files=sorted(os.listdir(subscriber.current)))
            return
        found = GPT2LMHeadModel.from_pretrained(subscriber.current).state_dict()
        equal = all(torch.equal(found[name.removeprefix("module.")], value) for name, value in mine.items())
        if rank == 0:
            say(published=published.step, equal=equal)


class Own(Trainer):
    """A trainer that overrides private hooks and writes its own files, as trl's trainers do."""

    def _save_checkpoint(self, model, trial):
        self.own_calls = getattr(self, "own_calls", 0) + 1
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        with open(os.path.join(output_dir, "own.txt"), "w") as file:
            file.write(str(self.state.global_step))


def total(value):
    """Returns the sum of a tensor. All ranks call it: of a DTensor each has a part."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).double().sum().item()


def lose(tag):
    from nebulaml.checkpoint import Checkpoint
    from nebulaml.errors import NebulaUnavailable

    plain = Checkpoint._open

    def refuse(checkpoint):
        if checkpoint.tag == tag:
            raise NebulaUnavailable("no agent for this one")
        return plain(checkpoint)

    Checkpoint._open = refuse


def shard(trainer):
    """Makes accelerate use FSDP version 2: without a device it leaves its plugin out, and trains as DDP."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    for state in (trainer.accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def deepspeed_configuration():
    """Returns a configuration like a user's JSON, with additions only to run on a CPU."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    configuration = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.deepspeed, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
    }
    if args.persist:
        import nebulaml.deepspeed  # noqa: F401

        configuration["nebula"] = {"enabled": True, "persistent_storage_path": args.persist, "persistent_time_interval": 0}
    return configuration


def main():
    options = {}
    if args.best:
        options = {
            "eval_strategy": "steps",
            "eval_steps": args.every,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        }
    if args.metric:
        options |= {"eval_strategy": "steps", "eval_steps": args.every, "metric_for_best_model": "eval_loss"}
        options["greater_is_better"] = args.metric == "worse"
    if args.only_model:
        options["save_only_model"] = True
    if args.deepspeed is not None:
        options["deepspeed"] = deepspeed_configuration()
    if args.fsdp:
        options |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}}
    if args.jit:
        options["enable_jit_checkpoint"] = True
    training = TrainingArguments(
        output_dir=args.output, max_steps=args.steps, save_steps=args.every, save_total_limit=args.limit, logging_steps=1,
        logging_nan_inf_filter=False, per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3, disable_tqdm=True,
        learning_rate=1e-3, save_on_each_node=args.each_node, **options,
    )  # fmt: skip
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    if args.peft:
        import peft

        model.save_pretrained(args.output + "-base")  # PEFT looks there for the base model
        model = GPT2LMHeadModel.from_pretrained(args.output + "-base")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    kind = Trainer
    if args.way == "mixin":
        import nebulaml as nm

        class Mixed(nm.NebulaTrainerMixin, Trainer):
            pass

        kind = Mixed
    if args.way == "subclass":
        kind = Own
    trainer = kind(
        model=model,
        args=training,
        train_dataset=Data(),
        eval_dataset=torch.utils.data.Subset(Data(), range(8)),
        callbacks=[Watch(), *([Reader()] if args.reader else [])],
    )
    if args.fsdp:
        shard(trainer)
    if args.way in ("attach", "subclass"):
        import nebulaml as nm

        if args.persist:
            nm.init(args.persist, 0)
        if args.lose >= 0:
            lose(f"checkpoint-{args.lose}")
        assert nm.attach(trainer) is trainer and isinstance(trainer, kind)
    if args.publish:
        import nebulaml as nm

        trainer.add_callback(nm.PublishCallback(args.publish, every=3))
    trainer.remove_callback(transformers.PrinterCallback)  # the lines of this job are its output
    try:
        trainer.train(resume_from_checkpoint=args.resume)
    except RuntimeError as error:
        say(error=str(error))
    if args.publish:
        read_published(trainer.model)
    sums = {name: total(value) for name, value in trainer.model.state_dict().items()}
    if args.ends:
        with open(os.path.join(args.output, f"end-{rank}.json"), "w") as file:
            json.dump({"best": trainer.state.best_model_checkpoint, "weights": sums}, file)
    if rank == 0:
        names = sorted(name for name in os.listdir(args.output) if name.startswith("checkpoint"))
        newest = max(names, key=lambda name: int(name.split("-")[1])) if names else None
        whole = newest and args.deepspeed != 3 and not args.fsdp  # whose weights lie in pieces
        loaded = GPT2LMHeadModel.from_pretrained(os.path.join(args.output, newest)) if whole else None
        say(
            end=True, weights=sums, names=names, best=trainer.state.best_model_checkpoint, step=trainer.state.global_step,
            loaded=loaded and {name: value.double().sum().item() for name, value in loaded.state_dict().items()},
            version=transformers.__version__,
        )  # fmt: skip
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
