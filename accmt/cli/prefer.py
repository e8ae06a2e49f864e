"""Tune a model on preferences, train a reward model, or distill a teacher, as described by one YAML file.

Its section `model` defines the model, adapter and quantization, and its section `prefer` the data and the loss: dpo,
dpo_norm, hinge, ipo, simpo, orpo, kto, reward or distillation. transformers can load the output folder, or PEFT if
there is an adapter; --merge also writes the full model to OUTPUT/merged.
On several processes: accmt launch -N 2 prefer hps.yaml OUTPUT. Exit code: 0, or 2 for invalid options or data.
"""

from __future__ import annotations

import argparse

from accmt.cli.sft import add_row_arguments, train_on_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_row_arguments(parser, "prefer")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.prefer.distillation import DistillationModule
    from accmt.addons.prefer.module import PreferenceModule
    from accmt.addons.prefer.reward import RewardModule
    from accmt.addons.prefer.section import DISTILLATION, REWARD

    modules = {REWARD: RewardModule, DISTILLATION: DistillationModule}
    return train_on_rows(options, "prefer", lambda section: modules.get(section.loss, PreferenceModule))
