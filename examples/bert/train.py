"""Masked-language-model pretraining of a small BERT with Hugging Face's Trainer; one line adds Nebula.

The corpus and the tokenizer are made from the docstrings of Python's own library.
"""

import argparse
import ast
import os
import sysconfig
from pathlib import Path

import nebulaml as nm
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

LENGTH = 64


def found_lines():
    lines = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                lines += [line for line in text.split("\n\n") if len(line) > 40]
    return lines


class Profile(TrainerCallback):
    """Runs torch.profiler around one save."""

    def __init__(self, folder, first_save):
        self.track = nm.profiler_track(folder)
        plan = torch.profiler.schedule(wait=max(first_save - 3, 0), warmup=1, active=4, repeat=1)
        self.profiler = torch.profiler.profile(schedule=plan, on_trace_ready=self.track)

    def on_train_begin(self, *_, **__):
        self.profiler.start()

    def on_step_begin(self, *_, **__):  # the save of a step comes after its end
        self.profiler.step()

    def on_train_end(self, *_, **__):
        self.profiler.stop()
        nm.flush_persistence()
        self.track.update()


parser = argparse.ArgumentParser()
parser.add_argument("--path", default="runs/bert", help="the Trainer's output_dir")
parser.add_argument("--data", help="a text file, one passage a line; Python's docstrings without it")
parser.add_argument("--deepspeed", help="DeepSpeed's JSON, with or without a nebula section")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--tensorboard", help="folder for TensorBoard")
parser.add_argument("--profile", help="folder for a trace of the four steps around the first save, with Nebula's track in it")
arguments = parser.parse_args()

if arguments.deepspeed:
    import nebulaml.deepspeed  # noqa: F401  the nebula section of the JSON, also after DeepSpeed 0.19.6
if arguments.tensorboard:
    os.environ["TENSORBOARD_LOGGING_DIR"] = arguments.tensorboard
options = TrainingArguments(
    output_dir=arguments.path, max_steps=arguments.steps, save_steps=arguments.save_every, logging_steps=10,
    per_device_train_batch_size=16, learning_rate=1e-3, save_total_limit=2, deepspeed=arguments.deepspeed, disable_tqdm=True,
    report_to=["tensorboard"] if arguments.tensorboard else [], use_cpu=not torch.cuda.is_available(),
    average_tokens_across_devices=False,  # BERT's loss is a mean already
)  # fmt: skip
lines = Path(arguments.data).read_text().splitlines() if arguments.data else found_lines()
folder = Path(arguments.path)
with options.main_process_first(local=False):  # rank 0 writes the vocabulary, and the others read it
    if options.process_index == 0:
        folder.mkdir(parents=True, exist_ok=True)
        trainer_of_words = BertWordPieceTokenizer()
        trainer_of_words.train_from_iterator(lines, vocab_size=2000, show_progress=False)
        trainer_of_words.save_model(str(folder))
tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
encoded = tokenizer(lines, truncation=True, max_length=LENGTH)["input_ids"]
set_seed(0)
model = BertForMaskedLM(
    BertConfig(vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
)
trainer = Trainer(
    model=model,
    args=options,
    train_dataset=[{"input_ids": torch.tensor(ids)} for ids in encoded],
    data_collator=DataCollatorForLanguageModeling(tokenizer),
)
if not arguments.deepspeed:
    nm.attach(trainer)
if arguments.profile:
    trainer.add_callback(Profile(arguments.profile, arguments.save_every))
last = get_last_checkpoint(arguments.path)
print(f"resuming from {Path(last).name}" if last else "starting", flush=True)
trainer.train(resume_from_checkpoint=last)
