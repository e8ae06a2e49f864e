"""Three scripts written for the original accmt 1.9.5.1, and what its users change here: what the errors name."""

from __future__ import annotations

import pytest

README = """
from accmt import AcceleratorModule, HyperParameters, Trainer
from accmt.metrics import Metric
from accmt.callbacks import Callback
from accmt.decorators import on_main_process
from accmt.utils import set_seed
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

set_seed(0)


class Accuracy(Metric):
    def compute(self, predictions, references):
        return {"accuracy": (predictions == references).sum() / predictions.shape[0]}


class Note(Callback):
    @on_main_process
    def on_after_training_step(self):
        pass


class Digits(AcceleratorModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, key, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(dim=-1), y)}


x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
train, val = torch.utils.data.random_split(data, [1500, 297])
trainer = Trainer(
    hps_config=HyperParameters(batch_size=[32, 64], epochs=2, optimizer="AdamW", optim_kwargs={"lr": 0.01}),
    model_path="dummy_model",
    callbacks=[Note()],
    metrics=[Accuracy("accuracy")],
    grad_accumulation_steps=2,
    resume=False,
)
trainer.register_model_saving("accuracy", saving_above=0.2)
trainer.fit(Digits(), train, val)
assert trainer.state.finished
"""

COLLATORS = r"""
import torch
from accmt import AcceleratorModule, DataCollatorForSeq2Seq, HyperParameters, Trainer, Optimizer, Scheduler
from transformers import BertTokenizer, T5Config, T5ForConditionalGeneration
from torch.utils.data import Dataset

with open("vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
tokenizer = BertTokenizer("vocab.txt")


class Reversed(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        text = " ".join("abcdefgh"[: 2 + i % 6])
        row = tokenizer(text)
        row["labels"] = row["input_ids"][::-1]
        return row, float(i)


class Seq2Seq(AcceleratorModule):
    def __init__(self):
        super().__init__()
        config = T5Config(vocab_size=13, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                          decoder_start_token_id=0)
        self.model = T5ForConditionalGeneration(config)
        self.teacher = T5ForConditionalGeneration(config)

    def training_step(self, batch):
        inputs, _ = batch
        inputs.pop("token_type_ids", None)
        output = self.model(**inputs)
        with torch.no_grad():
            target = self.teacher(**inputs)
        return output.loss + 0.1 * torch.nn.functional.mse_loss(output.logits, target.logits)

    def validation_step(self, key, batch):
        inputs, _ = batch
        inputs.pop("token_type_ids", None)
        return {"loss": self.model(**inputs).loss}


trainer = Trainer(
    hps_config=HyperParameters(
        epochs=1, batch_size=8, optimizer=Optimizer.AdamW, optim_kwargs={"lr": 1e-3},
        scheduler=Scheduler.LinearWithWarmup, scheduler_kwargs={"warmup_ratio": 0.1},
    ),
    model_path="seq2seq",
    collate_fn=DataCollatorForSeq2Seq(tokenizer),
    enable_checkpointing=False,
    cleanup_cache_every_n_steps=10,
    destroy_after_training=False,
)
trainer.fit(Seq2Seq(), Reversed(), Reversed())
assert trainer.state.finished
"""

CURRICULUM = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from accmt import AcceleratorModule, HyperParameters, Trainer
from accmt.curriculum import StepsCurriculum
from torch.utils.data import TensorDataset


class Line(AcceleratorModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 1)

    def before_eval(self):
        self.free_memory(gc_collect=True)

    def training_step(self, batch):
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def validation_step(self, key, batch):
        x, y = batch
        return {"loss": F.mse_loss(self.model(x), y)}


points = torch.randn(40, 3)
data = TensorDataset(points, points.sum(1, keepdim=True))
curriculum = StepsCurriculum()
curriculum.add(data, 10)
curriculum.add(data, -1, {"shuffle": False})
hps = HyperParameters(max_steps=15, batch_size=4, optimizer="SGD", optim_kwargs={"lr": 0.05})
trainer = Trainer(hps, "line", multiple_checkpoints=True)
trainer.fit(Line(), curriculum, data)
assert trainer.state.finished
"""

SCRIPTS = {
    "readme": (README, [("did you mean 'best_accuracy'?", '"accuracy", saving', '"best_accuracy", saving')]),
    "collators": (
        COLLATORS,
        [
            ("write Trainer(checkpoint_every=None)", "enable_checkpointing=False", "checkpoint_every=None"),
            ("torch.cuda.empty_cache() in on_update_end", "    cleanup_cache_every_n_steps=10,\n", ""),
            ("leave it out: the process group stays", "    destroy_after_training=False,\n", ""),
        ],
    ),
    "curriculum": (
        CURRICULUM,
        [
            (
                "[(300, easy), (-1, hard)]",
                'StepsCurriculum()\ncurriculum.add(data, 10)\ncurriculum.add(data, -1, {"shuffle": False})',
                "StepsCurriculum([(10, data), (-1, data)])",
            ),
            (
                'Trainer(checkpoint_options={"max_checkpoints": 3})',
                "multiple_checkpoints=True",
                'checkpoint_options={"max_checkpoints": 3}',
            ),
        ],
    ),
}
"""Each script, and its changes: the error that names it, what was there, and what is here."""


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # tokenizers, from older transformers
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_original_runs_with_the_changes_that_its_errors_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, changes = SCRIPTS[name]
    for advice, there, here in changes:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the advice tells which
            exec(compile(script, name, "exec"), {"__name__": name})  # noqa: S102
        assert advice in str(caught.value)
        assert script.count(there) == 1
        script = script.replace(there, here)
    variables = {"__name__": name}
    exec(compile(script, name, "exec"), variables)  # noqa: S102
    assert variables["trainer"].state.finished
