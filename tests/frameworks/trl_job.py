"""A TRL trainer on CPU, with or without nm.attach: trains, may be killed, resumes. Prints one JSON line per step.

--kind sft, dpo, grpo; --way attach, axolotl (its plugin manager attaches), stock.
"""

import argparse
import json
import os
import signal
import sys

import datasets
import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["sft", "dpo", "grpo"], required=True)
parser.add_argument("--way", choices=["attach", "axolotl", "stock"], default="attach")
parser.add_argument("--output", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--publish", help="the weights go to this path after every second step")
args = parser.parse_args()
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Watch(TrainerCallback):
    def on_log(self, args_, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            shown = [logs["loss"], logs["grad_norm"], logs.get("reward", 0), logs.get("entropy", 0)]
            print(json.dumps({"step": state.global_step, "loss": shown}), flush=True)

    def on_step_begin(self, args_, state, control, **kwargs):
        if state.global_step == args.kill_at:  # the step's own save has returned
            os.kill(os.getpid(), signal.SIGKILL)


def tokenizer():
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*WORDS, "<pad>", "<end>", "<unk>"])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")  # noqa: S106


def trainer():
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=11, pad_token_id=10))
    model.save_pretrained(args.output + "-model")  # DPO and GRPO load their reference from where the model came
    model = GPT2LMHeadModel.from_pretrained(args.output + "-model")
    config, kind = {
        "sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer), "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
    }[args.kind]  # fmt: skip
    options = {"max_length": 32} if args.kind != "grpo" else {
        "num_generations": 2, "max_completion_length": 6, "beta": 0.1, "use_adaptive_entropy": True, "entropy_coef": 0.01,
    }  # fmt: skip
    if args.kind == "sft":
        data = datasets.Dataset.from_dict({"text": [" ".join(WORDS[(i + k) % 10] for k in range(5)) for i in range(64)]})
    else:
        rows = {"prompt": [" ".join(WORDS[(i + k) % 10] for k in range(3)) for i in range(64)]}
        rows.update(chosen=[WORDS[(i + 3) % 10] for i in range(64)], rejected=[WORDS[(i + 7) % 10] for i in range(64)])
        data = datasets.Dataset.from_dict(rows if args.kind == "dpo" else {"prompt": rows["prompt"]})
    settings = config(
        output_dir=args.output, max_steps=6, save_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        learning_rate=1e-3, disable_tqdm=True, seed=5, bf16=False, gradient_checkpointing=False, **options,
    )  # fmt: skip
    more = {"reward_funcs": lambda completions, **_: [float(len(set(text.split()))) for text in completions]} if args.kind == "grpo" else {}
    return kind(model=model, args=settings, train_dataset=data, processing_class=tokenizer(), callbacks=[Watch()], **more)


def main():
    made = trainer()
    made.remove_callback(PrinterCallback)
    if args.way == "attach":
        import nebulaml as nm

        nm.attach(made)
    elif args.way == "axolotl":
        from axolotl.integrations.base import PluginManager

        manager = PluginManager.get_instance()
        manager.register("nebulaml.integrations.axolotl.NebulaPlugin")
        manager.post_trainer_create({"nebula": {"sync_on_save": False}}, made)
    if args.publish:
        import nebulaml as nm

        made.add_callback(nm.PublishCallback(args.publish, every=2))
    made.train(resume_from_checkpoint=args.resume or None)
    if args.publish:
        with nm.Subscriber(args.publish) as subscriber:
            published = subscriber.prepare(60)
            published.commit()
            found = GPT2LMHeadModel.from_pretrained(subscriber.current).state_dict()
            equal = all(torch.equal(found[name], value) for name, value in made.model.state_dict().items())
            words = PreTrainedTokenizerFast.from_pretrained(subscriber.current).tokenize("one two")
        print(json.dumps({"published": published.step, "equal": equal, "words": words}), flush=True)
    print(json.dumps({"end": True, "files": sorted(os.listdir(args.output)), "class": type(made).__mro__[1].__name__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
