"""The BERT of examples/bert, trained with Lightning; the only change for Nebula is NebulaCallback in the place of ModelCheckpoint.

The corpus and the tokenizer are made from the docstrings of Python's own library.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import nebulaml as nm
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling

LENGTH = 64


def found_lines():
    lines = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                lines += [line for line in text.split("\n\n") if len(line) > 40]
    return lines


class Bert(pl.LightningModule):
    def __init__(self, vocabulary):
        super().__init__()
        self.save_hyperparameters()
        self.bert = BertForMaskedLM(
            BertConfig(vocab_size=vocabulary, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
        )

    def training_step(self, batch, index):
        return self.bert(**batch).loss

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_step % 10 == 0:
            print(f"step {self.global_step} loss {outputs['loss'].item():.6f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="runs/bert-lightning", help="the directory of Lightning's files")
    parser.add_argument("--storage", help="where Nebula's versions go: also an object store; PATH/nebula without it")
    parser.add_argument("--data", help="a text file, one passage a line; Python's docstrings without it")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    lines = Path(arguments.data).read_text().splitlines() if arguments.data else found_lines()
    folder = Path(arguments.path)
    folder.mkdir(parents=True, exist_ok=True)
    trainer_of_words = BertWordPieceTokenizer()
    trainer_of_words.train_from_iterator(lines, vocab_size=2000, show_progress=False)
    trainer_of_words.save_model(str(folder))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    encoded = [{"input_ids": ids} for ids in tokenizer(lines, truncation=True, max_length=LENGTH)["input_ids"]]
    loader = torch.utils.data.DataLoader(encoded, batch_size=16, collate_fn=DataCollatorForLanguageModeling(tokenizer))

    pl.seed_everything(0, verbose=False)
    saver = nm.NebulaCallback(
        dirpath=folder / "checkpoints", filename="{step}", every_n_train_steps=arguments.save_every, save_top_k=-1, save_last=True,
        config_params={"persistent_storage_path": arguments.storage or folder / "nebula", "persistent_time_interval": 0, "keep_last": 2},
    )  # fmt: skip
    trainer = pl.Trainer(
        max_steps=arguments.steps, callbacks=[saver], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    newest = nm.get_latest_checkpoint()
    if newest is not None:
        print(f"resumed after step {newest.step}", flush=True)
    trainer.fit(Bert(len(tokenizer)), loader, ckpt_path="last" if newest else None)


if __name__ == "__main__":
    main()
