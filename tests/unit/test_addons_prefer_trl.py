"""Each loss on preferences, its gradient and its metrics equal TRL's on the same batch.

`make chat-templates` runs it, in the environment that has TRL. TRL's methods get a trainer without its constructor,
which would prepare data and a run.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accmt import DistillationModule, PreferenceModule, RewardModule
from accmt.addons.prefer import losses
from accmt.addons.prefer.module import log_probs
from tests.unit.test_addons_prefer import labeled, make_model, make_reward_model, pairs, tokenizer

trl = pytest.importorskip("trl")
CLOSE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}


def batch_of(module: Any, rows: Any) -> dict[str, Any]:
    samples = module.make_samples(rows)
    return module.collate_fn([samples[index] for index in range(len(samples))])


def of_trl(kind: Any, model: Any, reference: Any, **options: Any) -> Any:
    """A trainer of TRL that computes losses."""
    from accelerate import Accelerator
    from trl.trainer.utils import add_fused_lm_head

    trainer = object.__new__(kind)
    own = {
        "model": model,
        "ref_model": reference,
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "aux_loss_enabled": False,
        "use_weighting": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        **options,
    }
    vars(trainer).update(own)
    for one in (model, reference):
        if one is not None and hasattr(one, "lm_head"):
            add_fused_lm_head(one, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return trainer


def in_halves(rows: torch.Tensor) -> torch.Tensor:
    """All chosen answers, then all rejected ones, as TRL wants them."""
    return torch.cat(list(rows.unbind(1)))


def moved(seed: int) -> Any:
    """A model that differs from its reference, in the precision that TRL computes in."""
    model = make_model().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return model


def assert_same_gradient(model: Any, other: Any) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("loss", "theirs"), [("dpo", "sigmoid"), ("hinge", "hinge"), ("ipo", "ipo"), ("dpo_norm", "sigmoid_norm")]
)
def test_losses_with_a_reference_and_their_metrics(loss: Any, theirs: str):
    module = PreferenceModule(make_model().float(), tokenizer(), loss, beta=0.3)
    module.model = moved(1)
    batch = batch_of(module, pairs(6))
    own = module.step(batch)
    own["loss"].backward()
    model = moved(1)
    trainer = of_trl(trl.DPOTrainer, model, module.teacher, beta=0.3, loss_types=[theirs], loss_weights=[1.0])
    inputs = {
        "input_ids": in_halves(batch["input_ids"]),
        "attention_mask": in_halves(batch["attention_mask"]),
        "completion_mask": in_halves(batch["labels"] != -100).long(),
    }
    expected = trainer._compute_loss(model, inputs, False)
    expected.backward()
    torch.testing.assert_close(own["loss"], expected, **CLOSE)
    assert_same_gradient(module.model, model)
    metrics = trainer._metrics["train" if model.training else "eval"]
    for name, other in {
        "margin": "rewards/margins",
        "accuracy": "rewards/accuracies",
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "log_prob_chosen": "logps/chosen",
        "log_prob_rejected": "logps/rejected",
    }.items():
        assert float(own[name]) == pytest.approx(metrics[other][0], rel=1e-5, abs=1e-6), name


def test_label_smoothing_simpo_and_the_odds_ratio():
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (-torch.rand(32, generator=generator, dtype=torch.float64) * 4 for _ in range(2))

    def of_cpo(loss_type: str, beta: float, smoothing: float, gamma: float = 0.0) -> torch.Tensor:
        trainer = of_trl(CPOTrainer, None, None, alpha=0.0, loss_type=loss_type, beta=beta, simpo_gamma=gamma)
        trainer.label_smoothing = smoothing
        return trainer.cpo_loss(chosen, rejected)[0]

    own = losses.dpo(chosen, rejected, beta=0.3, label_smoothing=0.2)
    torch.testing.assert_close(own, of_cpo("sigmoid", 0.3, 0.2), **CLOSE)
    own = losses.simpo(chosen, rejected, beta=2.0, gamma=0.7)
    torch.testing.assert_close(own, of_cpo("simpo", 2.0, 0.0, 0.7), **CLOSE)
    # TRL's supervised term includes the prompt, and is a mean over the tokens of a batch.
    theirs = of_trl(ORPOTrainer, None, None, beta=0.2).odds_ratio_loss(chosen, rejected)[0]
    torch.testing.assert_close(losses.orpo(chosen, rejected, beta=0.2) + chosen, -theirs.double(), **CLOSE)


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_metrics_of_losses_without_a_reference(loss: Any):
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    module = PreferenceModule(moved(1), tokenizer(), loss, beta=1.5)
    batch = batch_of(module, pairs(6))
    own = module.step(batch)
    logs = log_probs(module.model(batch["input_ids"].flatten(0, 1)).logits.unflatten(0, (-1, 2)), batch)
    means = (logs.sums / logs.lengths).unbind(1)
    if loss == "simpo":
        trainer = of_trl(CPOTrainer, None, None, alpha=0.0, loss_type="simpo", beta=1.5, simpo_gamma=1.0)
        _, chosen, rejected = trainer.cpo_loss(*means)
    else:
        _, chosen, rejected, *_ = of_trl(ORPOTrainer, None, None, beta=1.5).odds_ratio_loss(*means)
    expected = {"reward_chosen": chosen, "reward_rejected": rejected, "margin": chosen - rejected}
    for name, values in {**expected, "accuracy": (chosen > rejected).float()}.items():
        assert float(own[name]) == pytest.approx(float(values.mean()), rel=1e-5, abs=1e-6), name


def test_kto_and_its_metrics():
    module = PreferenceModule(make_model().float(), tokenizer(), "kto", beta=0.3, desirable_weight=1.5)
    module.model = moved(1)
    batch = batch_of(module, labeled(6))
    own = module.step(batch)
    own["loss"].backward()
    model = moved(1)
    options = {"calculate_KL": True, "loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 1.0}
    trainer = of_trl(trl.KTOTrainer, model, module.teacher, beta=0.3, **options)
    inputs = {
        theirs + name: values[:, 0]
        for theirs, ours in (("", ""), ("KL_", "other_"))
        for name, values in {
            "input_ids": batch[f"{ours}input_ids"],
            "attention_mask": batch[f"{ours}attention_mask"],
            "completion_mask": (batch[f"{ours}labels"] != -100).long(),
        }.items()
    }
    expected = trainer._compute_loss(model, {**inputs, "label": batch["is_desirable"] > 0}, False)
    expected.backward()
    torch.testing.assert_close(own["loss"], expected, **CLOSE)
    assert_same_gradient(module.model, model)
    metric = module.make_metric("val_loss")
    found = metric.compute(*module.validation_step(batch)[metric.name])
    assert found["val_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    metrics = trainer._metrics["train" if model.training else "eval"]
    for name, other in {
        "margin": "rewards/margins",
        "reward_desirable": "rewards/chosen",
        "reward_undesirable": "rewards/rejected",
        "baseline": "kl",
    }.items():
        assert found[name] == pytest.approx(metrics[other][0], rel=1e-5, abs=1e-6), name


def test_reward_models_with_margins():
    rows = [{**row, "margin": index / 4} for index, row in enumerate(pairs(6))]
    module = RewardModule(make_reward_model().float(), tokenizer(), center=0.1)
    other = deepcopy(module.model)
    batch = batch_of(module, rows)
    own = module.step(batch)
    own["loss"].backward()
    trainer = of_trl(trl.RewardTrainer, other, None)
    trainer.args.center_rewards_coefficient = 0.1

    class WithoutMargin(torch.nn.Module):
        def forward(self, margin: Any, **inputs: Any) -> Any:
            return other(**inputs)

    inputs = {name: in_halves(batch[name]) for name in ("input_ids", "attention_mask")}
    expected = trainer.compute_loss(WithoutMargin(), {**inputs, "margin": batch["margin"]})
    expected.backward()
    torch.testing.assert_close(own["loss"], expected, **CLOSE)
    assert_same_gradient(module.model, other)
    metrics = trainer._metrics["train" if other.training else "eval"]
    for name in ("margin", "accuracy"):
        assert float(own[name]) == pytest.approx(metrics[name][0], rel=1e-5, abs=1e-6), name
    mean = float(own["reward_chosen"] + own["reward_rejected"]) / 2
    assert mean == pytest.approx(metrics["mean_reward"][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_distillation(beta: float):
    from trl.experimental.gkd import GKDTrainer

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(6)]
    teacher, other = moved(2), moved(1)
    module = DistillationModule(moved(1), tokenizer(), teacher, beta=beta, temperature=1.5)
    batch = batch_of(module, rows)
    own = module.step(batch)
    own["loss"].backward()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = [model(**inputs).logits[:, :-1] for model in (other, teacher)]
    expected = GKDTrainer.generalized_jsd_loss(*logits, batch["labels"][:, 1:], beta=beta, temperature=1.5)
    expected.backward()
    torch.testing.assert_close(own["loss"], expected, **CLOSE)
    assert_same_gradient(module.model, other)
