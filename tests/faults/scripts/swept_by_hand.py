"""The study of `random_sweep_kills.py` by Optuna and another trainer, as their guides write it.

python swept_by_hand.py lightning|transformers STUDY.db TRIALS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.toys import make_points

EPOCHS, BATCH_SIZE, EVERY = 3, 4, 4


def build(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 1))


def train_step(model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
    if model.training:
        with Path(os.environ["SWEPT_STEPS"]).open("a") as file:
            file.write(".")
    time.sleep(float(os.environ["SWEPT_SLEEP"]))
    return nn.functional.mse_loss(model(inputs), targets)


def by_lightning(trial: optuna.Trial, hidden: int, lr: float, momentum: float, clip: float) -> float:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(hidden)

        def training_step(self, batch: Any) -> Any:
            return train_step(self.net, *batch)

        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", train_step(self.net, *batch), batch_size=len(batch[0]))

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                trial.report(float(self.trainer.callback_metrics["val_loss"]), self.trainer.global_step)
                if trial.should_prune():
                    raise optuna.TrialPruned

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lr, momentum=momentum)

    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        gradient_clip_val=clip,
        val_check_interval=EVERY,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = DataLoader(make_points(32), BATCH_SIZE, shuffle=True)
    trainer.fit(Net(), training, DataLoader(make_points(16), BATCH_SIZE))
    return float(trainer.callback_metrics["val_loss"])


def by_transformers(trial: optuna.Trial, hidden: int, lr: float, momentum: float, clip: float) -> float:
    import transformers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(hidden)

        def forward(self, inputs: Any, targets: Any) -> Any:
            return {"loss": train_step(self.net, inputs, targets)}

    class Report(transformers.TrainerCallback):
        def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: Any = None, **_: Any) -> None:
            trial.report(metrics["eval_loss"], state.global_step)
            if trial.should_prune():
                raise optuna.TrialPruned

    arguments = transformers.TrainingArguments(
        f"trial-{trial.number}",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        learning_rate=lr,
        max_grad_norm=clip,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_strategy="no",
        report_to="none",
        label_names=["targets"],
        disable_tqdm=True,
        seed=1,
        use_cpu=True,
    )
    model = Net()
    points, held = (
        [{"inputs": inputs, "targets": targets} for inputs, targets in make_points(size)] for size in (32, 16)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=points, eval_dataset=held, callbacks=[Report()], optimizers=(optimizer, None)
    )
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def main() -> None:
    train = {"lightning": by_lightning, "transformers": by_transformers}[sys.argv[1]]
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{sys.argv[2]}",
        heartbeat_interval=1,
        grace_period=2,
        failed_trial_callback=optuna.storages.RetryFailedTrialCallback(),
    )
    study = optuna.create_study(
        storage=storage,
        study_name="killed",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=3),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=8),
    )

    def objective(trial: optuna.Trial) -> float:
        return train(
            trial,
            hidden=trial.suggest_categorical("hidden", [4, 8]),
            lr=trial.suggest_float("lr", 1e-3, 1.0, log=True),
            momentum=trial.suggest_float("momentum", 0.0, 0.9),
            clip=trial.suggest_categorical("clip", [1.0, 5.0]),
        )

    finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    is_spent = optuna.study.MaxTrialsCallback(int(sys.argv[3]), states=finished)
    if len(study.get_trials(deepcopy=False, states=finished)) < int(sys.argv[3]):
        study.optimize(objective, callbacks=[is_spent])


if __name__ == "__main__":
    main()
