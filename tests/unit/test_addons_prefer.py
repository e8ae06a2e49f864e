"""Preference tuning: losses, gradients and metrics are those of one big batch, computed by hand."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from accmt import Callback, DistillationModule, PreferenceModule, RewardModule, Trainer
from accmt.addons.prefer import losses
from accmt.addons.sft.chat import IGNORED, mask_row
from accmt.errors import ArgumentError, CheckpointError, DataError, ModuleContractError
from accmt.tracking import read_history
from tests import conversations
from tests.conversations import make_tokenizer
from tests.raising import raises_at
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.toys import Stream

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.5}}
WORDS = ["the", "rain", "window", "price", "don't", "e.g.", "3.14", "yes", "no", "why"]


@cache
def tokenizer() -> Any:
    return make_tokenizer(conversations.CHATML)


def pair(index: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"{WORDS[index % 7]} {WORDS[index % 3]}?"}
    chosen = {"role": "assistant", "content": " ".join(WORDS[index % 5 : index % 5 + 1 + index % 4])}
    rejected = {"role": "assistant", "content": " ".join(WORDS[(index + 4) % 9 :][: 1 + index % 3]) + "!"}
    return {"prompt": [question], "chosen": [chosen], "rejected": [rejected]}


def pairs(number: int = 10) -> list[dict[str, Any]]:
    return [pair(index) for index in range(number)]


def labeled(number: int = 10) -> list[dict[str, Any]]:
    return [
        {"prompt": one["prompt"], "completion": one["rejected" if index % 3 else "chosen"], "label": not index % 3}
        for index, one in enumerate(pairs(number))
    ]


def make_model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **sizes)).double()


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def fit(folder: Path, data: Any, *, module: Any, hps: dict[str, Any] | None = None, val: Any = None, **settings: Any):
    own = {"seed": 1, "shuffle_train": False, "verbose": False, "dataloader_num_workers": 0, **settings}
    trainer = Trainer({**HPS, **(hps or {})}, folder, **own)
    trainer.fit(module, data, val)
    return trainer


def trained(module: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in module.model.parameters() if weight.requires_grad]


def assert_close(one: Any, other: Any, tolerance: float = 1e-7) -> None:
    for own, expected in zip(trained(one), trained(other), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=tolerance)


def by_hand(model: Any, prompt: Any, answer: Any) -> tuple[torch.Tensor, int]:
    """The log-probability of an answer, token by token, and its length."""
    masked = mask_row(tokenizer(), {"prompt": prompt, "completion": answer})
    logits = model(input_ids=torch.tensor([masked.input_ids])).logits[0].log_softmax(-1)
    targets = [at for at, label in enumerate(masked.labels) if at and label != IGNORED]
    return sum(logits[at - 1, masked.input_ids[at]] for at in targets), len(targets)


OPTIONS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "dpo_norm": {"beta": 2.0},
    "hinge": {"beta": 0.4},
    "ipo": {"beta": 0.5},
    "simpo": {"beta": 1.5, "gamma": 0.7},
    "orpo": {"beta": 0.2},
}


def loss_by_hand(name: str, model: Any, reference: Any, row: dict[str, Any]) -> torch.Tensor:
    o = OPTIONS[name]
    (w, n_w), (l, n_l) = (by_hand(model, row["prompt"], row[one]) for one in ("chosen", "rejected"))  # noqa: E741
    with torch.no_grad():
        (rw, _), (rl, _) = (by_hand(reference, row["prompt"], row[one]) for one in ("chosen", "rejected"))
    log_sigmoid = functional.logsigmoid
    match name:
        case "dpo":
            margin = o["beta"] * ((w - rw) - (l - rl))
            return -0.9 * log_sigmoid(margin) - 0.1 * log_sigmoid(-margin)
        case "dpo_norm":
            return -log_sigmoid(o["beta"] * ((w - rw) / n_w - (l - rl) / n_l))
        case "hinge":
            return (1 - o["beta"] * ((w - rw) - (l - rl))).clamp(min=0)
        case "ipo":
            return ((w - rw) / n_w - (l - rl) / n_l - 1 / (2 * o["beta"])) ** 2
        case "simpo":
            return -log_sigmoid(o["beta"] * (w / n_w - l / n_l) - o["gamma"])
        case _:
            odds = [(m / n).exp() / (1 - (m / n).exp()) for m, n in ((w, n_w), (l, n_l))]
            return -w / n_w - o["beta"] * log_sigmoid((odds[0] / odds[1]).log())


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_whole_batches_by_hand_for_any_split(tmp_path: Path, name: str):
    """Ten pairs in steps of 4, 4 and 2: as batches, accumulated, and split by tokens."""
    model, reference = make_model(), make_model()
    for start in (0, 4, 8):
        rows = pairs()[start : start + 4]
        loss = torch.stack([loss_by_hand(name, model, reference, row) for row in rows]).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.5 * weight.grad
    expected = PreferenceModule(model, tokenizer(), "simpo")
    for number, hps in enumerate(({}, {"max_micro_batch_size": 3}, {"max_tokens": 60})):
        module = PreferenceModule(make_model(), tokenizer(), name, **OPTIONS[name])
        trainer = fit(tmp_path / str(number), pairs(), module=module, hps=hps)
        assert trainer.state.global_step == 3
        assert_close(module, expected)
    start = make_model()
    assert any(
        (one - other).abs().max() > 1e-3 for one, other in zip(trained(expected), start.parameters(), strict=True)
    )


def test_metrics_are_means_over_the_whole_validation_set(tmp_path: Path):
    module = PreferenceModule(make_model(), tokenizer(), beta=0.3)
    own = {"metrics": {"margin": "max"}, "model_saving": "best_margin", "checkpoint_every": "1 epoch"}
    trainer = fit(tmp_path, pairs(), module=module, val=pairs(7), hps={"epochs": 2}, **own)
    reference, found = make_model(), []
    with torch.inference_mode():
        for row in pairs(7):
            values: list[Any] = []
            for name in ("chosen", "rejected"):
                own_log, length = by_hand(module.model, row["prompt"], row[name])
                before_log, _ = by_hand(reference, row["prompt"], row[name])
                masked = mask_row(tokenizer(), {"prompt": row["prompt"], "completion": row[name]})
                ids = torch.tensor([masked.input_ids])
                logs, before = (one(input_ids=ids).logits[0].log_softmax(-1) for one in (module.model, reference))
                at = [place - 1 for place, label in enumerate(masked.labels) if place and label != IGNORED]
                kl = (logs.exp() * (logs - before)).sum(-1)[at].mean()
                values += [0.3 * (own_log - before_log), length, kl]
            chosen, n_w, kl_w, rejected, n_l, kl_l = values
            margin = chosen - rejected
            found.append([margin, float(margin > 0), chosen, rejected, (kl_w + kl_l) / 2, n_w, n_l])
    names = ["margin", "accuracy", "reward_chosen", "reward_rejected", "kl", "length_chosen", "length_rejected"]
    for name, value in zip(names, torch.tensor(found).mean(0).tolist(), strict=True):
        assert trainer.state.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert trainer.state.metrics["kl"] > 0
    assert trainer.state.best["best_margin"] == trainer.state.metrics["margin"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("dpo", {}), ("kto", {}), ("dpo", {"mixed_precision": "bf16", "gradient_checkpointing": True})],
)
def test_a_new_adapter_switched_off_is_the_reference_as_a_copy_is(tmp_path: Path, name: Any, settings: Any):
    rows = pairs() if name == "dpo" else labeled()
    first, second = (with_lora(make_model().float() if settings else make_model()) for _ in range(2))
    start = [weight.detach().clone() for weight in first.parameters()]
    modules = [
        PreferenceModule(first, tokenizer(), name),
        PreferenceModule(second, tokenizer(), name, reference="copy"),
    ]
    assert [module.teacher is None for module in modules] == [True, False]
    for number, module in enumerate(modules):
        module.model.train()
        fit(tmp_path / str(number), rows, module=module, val=rows, **settings)
        assert all(weight.requires_grad for name, weight in module.model.named_parameters() if "lora_" in name)
    assert_close(*modules)
    assert sum(not torch.equal(one, other) for one, other in zip(start, first.parameters(), strict=True)) >= 3


def test_an_adapter_that_changes_the_model_is_copied_as_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = with_lora(make_model())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight += 0.1
    with caplog.at_level(logging.INFO, logger="accmt"):
        module = PreferenceModule(model, tokenizer())
    assert "the adapter already changes the model" in caplog.text
    trainer = fit(tmp_path, pairs(), module=module, hps={"optim": {"type": "SGD", "lr": 0.0}}, val=pairs(3))
    assert trainer.state.metrics["kl"] == pytest.approx(0, abs=1e-9)
    with raises_at(ArgumentError, 'reference="adapter"'):
        PreferenceModule(model, tokenizer(), reference="adapter")
    with raises_at(ArgumentError, 'reference="adapter"'):
        PreferenceModule(make_model(), tokenizer(), reference="adapter")


def test_other_weights_that_are_trained_beside_an_adapter_do_not_change_the_reference(tmp_path: Path):
    model = with_lora(make_model())
    model.get_input_embeddings().weight.requires_grad_(True)
    module = PreferenceModule(model, tokenizer())
    fit(tmp_path, pairs(4), module=module)
    own, theirs = (one.get_input_embeddings().weight for one in (module.model, module.teacher))
    assert torch.equal(theirs, make_model().get_input_embeddings().weight)
    assert not torch.equal(own, theirs)


def test_an_answer_that_is_certain_has_a_finite_gradient():
    chosen, rejected = (torch.tensor([value], requires_grad=True) for value in (0.0, -2.0))
    losses.orpo(chosen, rejected, beta=0.1).sum().backward()
    assert chosen.grad.tolist() == [-1.0]
    assert rejected.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_mixture_of_pairs_has_the_loss_of_each_source(tmp_path: Path, kind: str):
    module = (
        PreferenceModule(make_model(), tokenizer()) if kind == "dpo" else RewardModule(make_reward_model(), tokenizer())
    )
    sources, hps = {"one": pairs(8), "other": pairs(8)}, {"data": {"mix": {"one": 0.5, "other": 0.5}}}
    trainer = fit(tmp_path, sources, module=module, hps=hps, log_every=1)
    rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
    own = [row for row in rows if "train_loss" in row]
    assert own
    for row in own:
        assert row["train_loss"] == pytest.approx((row["train_loss__one"] + row["train_loss__other"]) / 2)


@pytest.mark.parametrize(("name", "lora"), [("dpo", False), ("dpo", True), ("kto", False), ("simpo", False)])
def test_a_run_resumes_with_equal_bits_and_keeps_the_reference(tmp_path: Path, name: Any, lora: bool):
    rows, own = labeled(11) if name == "kto" else pairs(11), {"checkpoint_every": "1 steps", "hps": {"epochs": 2}}

    def module(seed: int = 0) -> PreferenceModule:
        model = make_model(seed)
        return PreferenceModule(with_lora(model) if lora else model, tokenizer(), name)

    whole, parts = module(), module()
    fit(tmp_path / "whole", rows, module=whole, **own)
    with pytest.raises(InterruptionError):
        fit(tmp_path / "parts", rows, module=module(), callbacks=InterruptAt(4), **own)
    if not lora and name != "simpo":
        with raises_at(CheckpointError, "PreferenceModule.load_state_dict"):
            fit(tmp_path / "parts", rows, module=module(seed=5), resume=True, **own)
    fit(tmp_path / "parts", rows, module=parts, resume=True, **own)
    assert all(map(torch.equal, trained(whole), trained(parts)))


def test_weights_of_pairs_count_like_repeated_pairs(tmp_path: Path):
    weighted = [{**row, "weight": float(index % 3)} for index, row in enumerate(pairs(8))]
    repeated = [row for index, row in enumerate(pairs(8)) for _ in range(index % 3)]
    one, other = (PreferenceModule(make_model(), tokenizer()) for _ in range(2))
    fit(tmp_path / "one", weighted, module=one, hps={"batch_size": 8, "max_micro_batch_size": 2})
    fit(tmp_path / "other", repeated, module=other, hps={"batch_size": 8})
    assert_close(one, other)


def kto_by_hand(model: Any, reference: Any, rows: list[dict[str, Any]], others: list[Any]) -> torch.Tensor:
    """The loss of KTO on a whole batch; its baseline is the mean over the answers to other prompts."""

    def ratio(prompt: Any, answer: Any) -> torch.Tensor:
        with torch.no_grad():
            before = by_hand(reference, prompt, answer)[0]
        return by_hand(model, prompt, answer)[0] - before

    weights = torch.tensor([row.get("weight", 1.0) for row in rows], dtype=torch.float64)
    ratios = torch.stack([ratio(row["prompt"], other) for row, other in zip(rows, others, strict=True)])
    baseline = ((ratios * weights).sum() / weights.sum()).detach().clamp(min=0)
    assert baseline > 0.01
    lost = []
    for row in rows:
        sign, weight = (1, 2.0) if row["label"] else (-1, 0.5)
        own = ratio(row["prompt"], row["completion"])
        lost.append(weight * (1 - torch.sigmoid(sign * 0.4 * (own - baseline))))
    return (torch.stack(lost) * weights).sum() / weights.sum()


def moved(model: Any) -> Any:
    """The model, away from its reference."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


KTO = {"beta": 0.4, "desirable_weight": 2.0, "undesirable_weight": 0.5}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "accumulation of 2": {"hps": {"batch_size": 4}, "grad_accumulation_steps": 2},
    "accumulation of 4": {"hps": {"batch_size": 2}, "grad_accumulation_steps": 4},
    "micro-batches": {"hps": {"max_micro_batch_size": 3}},
    "budget": {"hps": {"max_tokens": 100}},
}


def test_steps_of_kto_are_those_of_whole_batches_by_hand_for_any_split(tmp_path: Path):
    """Thirteen rows in steps of 8 and 5; one has more weight. Dropout does not change the baseline."""
    rows = [{**row, "weight": 2.5} if index == 3 else row for index, row in enumerate(labeled(13))]
    others = [rows[(index + 1) % 13]["completion"] for index in range(13)]
    model, reference = make_model(), moved(make_model())
    for start in (0, 8):
        model.zero_grad()
        kto_by_hand(model, reference, rows[start : start + 8], others[start : start + 8]).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.5 * weight.grad
    expected = PreferenceModule(model, tokenizer(), "simpo")
    for name, split in SPLITS.items():
        module = PreferenceModule(make_model(), tokenizer(), "kto", **KTO)
        module.teacher = reference
        own = {**split, "hps": {"batch_size": 8, **split.get("hps", {})}}
        trainer = fit(tmp_path / name, rows, module=module, val=rows, **own)
        assert trainer.state.global_step == 2, name
        assert module.window_sums is None
        assert_close(module, expected)
    rewards: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    with torch.no_grad():
        for row in rows:
            ratio = [by_hand(one, row["prompt"], row["completion"])[0] for one in (model, reference)]
            rewards[row["label"]] += [0.4 * (ratio[0] - ratio[1])] * round(2 * row.get("weight", 1))
    found = trainer.state.metrics
    for name, label in (("reward_desirable", True), ("reward_undesirable", False)):
        assert found[name] == pytest.approx(float(torch.stack(rewards[label]).mean()), rel=1e-6)
    assert found["margin"] == pytest.approx(found["reward_desirable"] - found["reward_undesirable"])


@pytest.mark.parametrize("folder", [None, "reference"])
def test_results_of_kto_are_those_of_the_whole_set_for_any_batch_size(tmp_path: Path, folder: str | None):
    """Thirteen rows, of which one is not trained and one has more weight; the baseline is the mean over all."""
    rows = [{**row, "weight": 2.5} if index == 3 else row for index, row in enumerate(labeled(13))]
    others = [rows[(index + 1) % 13]["completion"] for index in range(13)]
    start, model = moved(make_model()), make_model()
    lost = kto_by_hand(model, start, rows, others)
    found: dict[str, dict[str, float]] = {}
    sizes: dict[str, dict[str, Any]] = {
        "1": {"batch_size": [4, 1]},
        "3": {"batch_size": [4, 3]},
        "8": {"batch_size": [4, 8]},
        "budget": {"max_tokens": 100},
    }
    for name, hps in sizes.items():
        kept = folder and tmp_path / folder
        module = PreferenceModule(moved(make_model()), tokenizer(), "kto", reference_folder=kept, **KTO)
        hps = {**hps, "optim": {"type": "SGD", "lr": 0.0}}
        own = {"callbacks": StartFrom(model), "metrics": {"margin": "max"}, "model_saving": "best_margin"}
        trainer = fit(tmp_path / name, rows, module=module, hps=hps, val=rows, **own)
        found[name] = trainer.state.metrics
        assert trainer.test(module, rows)["test_loss"] == pytest.approx(found[name]["val_loss"], rel=1e-6)
    assert found["8"]["val_loss"] == pytest.approx(float(lost.detach()), rel=1e-6)
    for name, metrics in found.items():
        assert metrics.keys() == found["8"].keys()
        assert "kto" not in metrics
        for metric, value in found["8"].items():
            assert metrics[metric] == pytest.approx(value, rel=1e-6), (name, metric)
    assert found["8"]["baseline"] > 0.01


def test_an_empty_answer_of_kto_is_left_out_of_the_baseline(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The row before an empty answer, which is its answer to another prompt, is trained like the others."""
    empty = {**labeled(9)[3], "completion": [{"role": "assistant", "content": ""}]}
    rows = [*labeled(3), empty, *labeled(8)[4:]]
    module = PreferenceModule(make_model(), tokenizer(), "kto", **KTO)
    module.teacher = moved(make_model())
    with caplog.at_level(logging.INFO, logger="accmt"):
        fit(tmp_path, rows, module=module, hps={"batch_size": 8}, verbose=True)
    samples = module.make_samples(rows)
    weights = [(samples[index]["weight"], samples[index]["other_weight"]) for index in range(8)]
    assert weights == [(1, 1), (1, 1), (1, 0), (0, 0), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert "of 8 rows checked: 1 with an empty answer, not trained (row 3)" in caplog.text
    [shown] = [text for record in caplog.records if "with the trained text" in (text := record.getMessage())]
    assert shown.count("⟦") == 2  # once in the explanation
    kept = [0, 1, 4, 5, 6, 7]
    padded, own = (module.sum_for_window(module.collate_fn([samples[at] for at in of])) for of in (range(8), kept))
    torch.testing.assert_close(padded, own)
    assert padded[1] == 6


class StartFrom(Callback):
    """Replaces the weights of the model when the reference is known."""

    def __init__(self, model: Any) -> None:
        self._weights = model.state_dict()

    def on_fit_start(self) -> None:
        self.module.unwrapped_model.load_state_dict(self._weights)


def test_the_baseline_of_kto_does_not_depend_on_dropout(tmp_path: Path):
    def baselines(name: str, dropout: float) -> list[float]:
        module = PreferenceModule(make_model(), tokenizer(), "kto", **KTO)
        module.teacher = moved(make_model())
        for layer in module.model.modules():
            if hasattr(layer, "attention_dropout"):
                layer.attention_dropout = dropout
        hps = {"batch_size": 2, "optim": {"type": "SGD", "lr": 0.0}}
        trainer = fit(tmp_path / name, labeled(8), module=module, hps=hps, grad_accumulation_steps=2, log_every=1)
        rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
        return [row["baseline"] for row in rows if "baseline" in row]

    without, with_dropout = baselines("without", 0.0), baselines("with", 0.5)
    assert without == with_dropout
    assert len(without) == 2
    assert max(without) > 0.01


class ValidatesWithinSteps(Callback):
    def on_after_training_step(self, outputs: Any) -> None:
        self.trainer.validate(self.module, labeled(3), verbose=False)


def test_an_evaluation_within_a_step_of_kto_keeps_its_baseline(tmp_path: Path):
    modules = [PreferenceModule(make_model(), tokenizer(), "kto", **KTO) for _ in range(2)]
    for number, module in enumerate(modules):
        module.teacher = moved(make_model())
        own = {"callbacks": ValidatesWithinSteps()} if number else {}
        fit(tmp_path / str(number), labeled(8), module=module, grad_accumulation_steps=2, **own)
    assert all(map(torch.equal, *map(trained, modules)))


def make_reward_model(labels: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer()), num_labels=labels, **sizes)
    return LlamaForSequenceClassification(config).double()


def test_a_reward_model_is_trained_with_margins_and_saved_as_a_classifier(tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    rows = [{**row, "margin": index / 4} for index, row in enumerate(pairs(6))]
    model = make_reward_model()

    def reward(row: Any, name: str, of: Any) -> torch.Tensor:
        ids = mask_row(tokenizer(), {"prompt": row["prompt"], "completion": row[name]}).input_ids
        return of(input_ids=torch.tensor([ids])).logits[0, 0]

    lost = []
    for row in rows:
        chosen, rejected = (reward(row, name, model) for name in ("chosen", "rejected"))
        lost.append(-functional.logsigmoid(chosen - rejected - row["margin"]) + 0.1 * (chosen + rejected) ** 2)
    torch.stack(lost).mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.5 * weight.grad
    module = RewardModule(make_reward_model(), tokenizer(), center=0.1)
    fit(tmp_path, rows, module=module, hps={"batch_size": 6, "max_micro_batch_size": 4}, val=rows)
    assert_close(module, RewardModule(model, tokenizer()))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.num_labels == 1
    assert loaded.config.pad_token_id is not None
    assert reward(rows[0], "chosen", loaded) == reward(rows[0], "chosen", module.model)
    for other in (make_reward_model(3), make_model()):
        with raises_at(ModuleContractError, "a reward model"):
            RewardModule(other, tokenizer())


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_distillation_is_the_mean_divergence_over_all_target_tokens(tmp_path: Path, beta: float):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(6)]
    model, teacher = make_model(), make_model(seed=3)
    total, number = torch.zeros(()), 0
    for row in rows:
        masked = mask_row(tokenizer(), row)
        at = [place - 1 for place, label in enumerate(masked.labels) if place and label != IGNORED]
        ids = torch.tensor([masked.input_ids])
        own = (model(input_ids=ids).logits[0, at] / 2).softmax(-1)
        theirs = (teacher(input_ids=ids).logits[0, at] / 2).softmax(-1).detach()
        mixture = beta * theirs + (1 - beta) * own
        if beta in (0, 1):
            one, other = (theirs, own) if beta == 0 else (own, theirs)
            total = total + (one * (one / other).log()).sum()
        else:
            total = total + beta * (theirs * (theirs / mixture).log()).sum()
            total = total + (1 - beta) * (own * (own / mixture).log()).sum()
        number += len(at)
    (total / number).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.5 * weight.grad
    module = DistillationModule(make_model(), tokenizer(), teacher, beta=beta, temperature=2.0)
    fit(tmp_path, rows, module=module, hps={"batch_size": 6, "max_tokens": 60})
    assert_close(module, PreferenceModule(model, tokenizer(), "simpo"))


def test_a_teacher_of_another_vocabulary_is_rejected(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()) + 1, **sizes))
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(4)]
    with raises_at(ModuleContractError, "distillation"):
        fit(tmp_path, rows, module=DistillationModule(make_model(), tokenizer(), other))


def test_rows_that_cannot_be_trained_are_counted_and_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    equal = {**pair(1), "rejected": pair(1)["chosen"]}
    empty = {**pair(2), "rejected": [{"role": "assistant", "content": ""}]}
    long = {**pair(3), "prompt": [{"role": "user", "content": "rain " * 60}]}
    odd = [pairs(1)[0], equal, empty, *pairs(8)[1:], long]
    one, streamed, other = (PreferenceModule(make_model(), tokenizer(), max_length=40) for _ in range(3))
    with caplog.at_level(logging.WARNING, logger="accmt"):
        fit(tmp_path / "one", odd, module=one, hps={"batch_size": 11}, verbose=True)
    [warning] = [record.getMessage() for record in caplog.records if "rows checked" in record.getMessage()]
    assert "of 11 rows checked: 1 with two equal answers, not trained (row 1)" in warning
    assert "1 with an empty answer, not trained (row 2)" in warning
    assert "1 without any token to train on (row 10: its answers start after 40 tokens)" in warning
    fit(tmp_path / "other", pairs(8), module=other, hps={"batch_size": 8})
    assert_close(one, other)
    fit(tmp_path / "stream", Stream(odd), module=streamed, hps={"batch_size": 8})
    assert_close(streamed, other)


ASSISTANT = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
USER = {"role": "user", "content": "why?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [NO]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, NO]},
        {"prompt": "why?", "chosen": [USER, ASSISTANT], "rejected": [USER, NO]},
        {"prompt": "why?", "chosen": [ASSISTANT], "rejected": [NO]},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": NO},
        {"question": "why?", "chosen": "yes", "rejected": "no"},
        {"instruction": "why?", "chosen_response": "yes", "rejected_response": "no"},
    ],
    ids=["explicit", "implicit", "ultra", "string prompt", "axolotl", "intel", "argilla"],
)
def test_the_formats_of_trl_and_axolotl_are_the_same_pair(row: dict[str, Any]):
    module = PreferenceModule(make_model(), tokenizer())
    sample = module.make_samples([row])[0]
    texts = [tokenizer().decode(ids) for ids in sample["input_ids"]]
    assert texts == [
        f"<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n{word}<|im_end|>\n" for word in ("yes", "no")
    ]
    shown = [tokenizer().decode([label for label in labels if label != IGNORED]) for labels in sample["labels"]]
    assert shown == ["yes<|im_end|>", "no<|im_end|>"]


def test_strings_and_tool_calls_are_pairs_too():
    module = PreferenceModule(make_model(), tokenizer())
    strings = {"chosen": "Q: why?\nA: yes", "rejected": "Q: why?\nA: no"}
    tools = {"prompt": [USER], "chosen": [CALL], "rejected": [NO], "tools": [TOOL]}
    for row, expected in (({"prompt": "Q: why?\nA:", "chosen": " yes", "rejected": " no"}, " yes"), (strings, " yes")):
        sample = module.make_samples([row])[0]
        text = tokenizer().decode([label for label in sample["labels"][0] if label != IGNORED])
        assert text.removesuffix(tokenizer().eos_token) == expected
    sample = module.make_samples([tools])[0]
    assert "<call>f {}</call>" in tokenizer().decode([label for label in sample["labels"][0] if label != IGNORED])
    assert "Tools:" in tokenizer().decode(sample["input_ids"][1])


@pytest.mark.parametrize(
    ("row", "got", "do"),
    [
        ({"question": "why?", "answer": "yes"}, "question, answer", 'row["question"]'),
        ({"prompt": "?", "completion": "yes", "label": True}, "completion", "loss: kto"),
        (
            {"conversations": [], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
            "dict",
            "gpt",
        ),
        ({**pair(0), "weight": -1}, '"weight": -1', ""),
        ({**pair(0), "margin": "much"}, "\"margin\": 'much'", ""),
    ],
)
def test_a_row_of_another_format_is_named_with_the_line_that_repairs_it(row: Any, got: str, do: str):
    with raises_at(DataError, "row 1 for preference tuning", got, do=do):
        PreferenceModule(make_model(), tokenizer()).make_samples([pair(0), row])


def test_rows_of_which_none_is_trained_are_an_error():
    module = PreferenceModule(make_model(), tokenizer())
    with raises_at(DataError, "preference tuning", "3 with two equal answers", "row 0, row 1, row 2"):
        module.get_train_dataloader([{**row, "rejected": row["chosen"]} for row in pairs(3)])


def test_rows_of_kto_have_both_labels():
    module = PreferenceModule(make_model(), tokenizer(), "kto")
    good = [row for row in labeled() if row["label"]]
    with raises_at(DataError, "rows for KTO", "True"):
        module.get_train_dataloader(good)
    assert len(module.get_validation_dataloader(good)) == 4
    assert set(module.get_train_dataloader({"good": good, "bad": [labeled()[1]]})) == {"good", "bad"}
    for get, what in ((module.get_validation_dataloader, "validation"), (module.get_test_dataloader, "test")):
        with pytest.raises(DataError, match=f"^{what} data 'other', row 0 for preference tuning\n"):
            get({"one": labeled(), "other": pairs()})
    with raises_at(DataError, "row 1 for preference tuning", "\"label\": 'good'"):
        module.make_samples([labeled()[0], {**labeled()[1], "label": "good"}])
    with raises_at(DataError, "row 0 for preference tuning", do='row["chosen"], "label": True'):
        module.make_samples(pairs())
    with raises_at(DataError, "rows for KTO", "stream"):
        module.make_samples(Stream(labeled()))


@pytest.mark.parametrize(
    ("options", "where", "got"),
    [
        ({"loss": "dpoo"}, "loss", "'dpoo'"),
        ({"label_smoothing": 0.5}, "label_smoothing", "0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing", "ipo"),
        ({"gama": 1.0}, "PreferenceModule", "gama"),
        ({"max_length": 1}, "PreferenceModule(max_length=...)", "1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], where: str, got: str):
    with raises_at(ArgumentError, where, got):
        PreferenceModule(make_model(), tokenizer(), **options)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("dpo", None),
        ("hinge", "reference"),
        ("orpo", None),
        ("kto", None),
        ("kto", "reference"),
        ("reward", None),
        ("distillation", None),
    ],
)
def test_packed_answers_have_the_gradient_and_metrics_of_padded_ones(tmp_path: Path, name: Any, folder: str | None):
    """Eleven rows in steps of 8 and 3; one is not trained, and one has more weight."""
    rows = labeled(11) if name == "kto" else pairs(11)
    rows[1] = {**rows[1], "weight": 0.0} if name == "kto" else {**rows[1], "rejected": rows[1]["chosen"]}
    rows[2] = {**rows[2], "weight": 2.5, "margin": 0.5}
    if name == "distillation":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    if name == "reward":  # the reward of a text is before the token that ends it, which is the padding token
        rows[3] = {"prompt": "why?", "chosen": " yes", "rejected": " no"}
    modules, values = [], []
    for number, hps in enumerate(({}, {"max_tokens": 110, "packing": True})):
        module, shapes = make_packed(name, None if folder is None else tmp_path / folder), []

        def note(_: Any, __: Any, inputs: dict[str, Any], shapes: list[Any] = shapes) -> None:
            shapes.append(tuple(inputs["input_ids"].shape))

        module.model.register_forward_pre_hook(note, with_kwargs=True)
        hps = {"batch_size": 8, **hps}
        trainer = fit(tmp_path / str(number), rows, module=module, hps=hps, val=rows[:5], log_every=1)
        logged = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
        values.append([row for row in logged if "train_loss" in row])
        modules.append(module)
    packed = [shape for shape in shapes if shape[0] == 1]
    assert len(packed) >= 4
    assert max(packed) <= (1, 110)
    assert max(packed) > (1, 80)
    assert_close(*modules, tolerance=1e-6)
    assert len(values[0]) == 2
    metrics = {
        "train_loss",
        "margin",
        "accuracy",
        "log_prob_rejected",
        "length_chosen",
        "baseline",
        "reward_chosen",
        "agreement",
    }
    for one, other in zip(*values, strict=True):
        assert len(metrics & one.keys()) >= 2
        for metric in metrics & one.keys():
            assert one[metric] == pytest.approx(other[metric], rel=1e-6, abs=1e-7), metric  # norms are in float32


def test_a_reward_model_of_an_older_kind_is_not_packed(tmp_path: Path):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"vocab_size": len(tokenizer()), "n_embd": 8, "n_layer": 1, "n_head": 2, "num_labels": 1}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    hps = {"max_tokens": 100, "packing": True}
    with (
        pytest.warns(UserWarning, match="target size"),  # by torch
        raises_at(ModuleContractError, "packing for a reward model"),
    ):
        fit(tmp_path, pairs(4), module=RewardModule(model, tokenizer()), hps=hps)


def make_packed(name: Any, folder: Path | None) -> Any:
    if name == "reward":
        return RewardModule(make_reward_model(), tokenizer(), center=0.1)
    if name == "distillation":
        return DistillationModule(make_model(), tokenizer(), make_model(seed=3))
    module = PreferenceModule(make_model(), tokenizer(), name, reference_folder=folder)
    if name == "kto" and folder is None:
        module.teacher = moved(make_model())
    return module


@pytest.mark.parametrize(("name", "lora"), [("dpo", False), ("ipo", True), ("kto", False)])
def test_log_probabilities_of_the_reference_are_computed_once(tmp_path: Path, name: Any, lora: bool):
    rows, folder = labeled(11) if name == "kto" else pairs(11), tmp_path / "reference"

    def module(**own: Any) -> PreferenceModule:
        model = make_model()
        return PreferenceModule(with_lora(model) if lora else model, tokenizer(), name, **own)

    settings = {"val": rows[:5], "hps": {"epochs": 2}}
    live, known = module(), module(reference_folder=folder)
    fit(tmp_path / "live", rows, module=live, **settings)
    trainer = fit(tmp_path / "known", rows, module=known, **settings)
    assert known.teacher is None
    assert_close(known, live, tolerance=1e-6)  # they are kept in float32 in a batch
    assert "kl" not in trainer.state.metrics
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert len(written) == 2
    calls: list[int] = []
    again = module(reference_folder=folder)
    again.model.register_forward_pre_hook(lambda *_: calls.append(1))
    again.make_samples(rows)
    assert not calls
    fit(tmp_path / "again", rows, module=again, **settings)
    assert all(map(torch.equal, trained(again), trained(known)))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == written
    if lora:  # the model without its adapter is still there
        assert len(known.make_samples(rows[:4])[0]["reference"]) == 2
    else:
        with raises_at(DataError, "reference_folder", "rows"):
            known.make_samples(rows[:4])


def test_an_interrupted_computation_of_the_reference_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accmt.addons.prefer import reference

    monkeypatch.setattr(reference, "_CHUNK", 4)
    monkeypatch.setattr(reference, "MAX_TOKENS", 1)  # a row at a time

    def compute(most: int) -> tuple[Any, int]:
        module = PreferenceModule(make_model(), tokenizer(), reference_folder=tmp_path / "reference")
        calls: list[int] = []

        def count(*_: Any) -> None:
            calls.append(1)
            if len(calls) > most:
                raise KeyboardInterrupt

        module.model.register_forward_pre_hook(count)
        try:
            return module.make_samples(pairs(11)), len(calls)
        except KeyboardInterrupt:
            return None, len(calls)

    assert compute(6) == (None, 7)  # the first file is written, and half of the second is lost
    samples, number = compute(100)
    assert number == 7
    other = PreferenceModule(make_model(), tokenizer(), reference_folder=tmp_path / "other").make_samples(pairs(11))
    assert [samples[index]["reference"] for index in range(11)] == [other[index]["reference"] for index in range(11)]


def test_log_probabilities_of_another_model_template_or_length_are_refused(tmp_path: Path):
    folder, rows = tmp_path / "reference", pairs(3)
    PreferenceModule(make_model(), tokenizer(), reference_folder=folder).make_samples(rows)
    with raises_at(DataError, "reference_folder", str(folder), "another model"):
        PreferenceModule(make_model(seed=4), tokenizer(), reference_folder=folder).make_samples(rows)
    other = make_model()
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 500.0}  # with the same weights
    with raises_at(DataError, "reference_folder", str(folder), "another model"):
        PreferenceModule(other, tokenizer(), reference_folder=folder).make_samples(rows)
    with raises_at(DataError, "reference_folder", str(folder), "max_length"):
        PreferenceModule(make_model(), tokenizer(), reference_folder=folder, max_length=50).make_samples(rows)
    PreferenceModule(make_model(), tokenizer(), reference_folder=folder).make_samples(rows[:2])  # other rows: computed
    assert len(list(folder.glob("*/*.npy"))) == 2
    with raises_at(ArgumentError, "reference_folder"):
        PreferenceModule(make_model(), tokenizer(), reference="copy", reference_folder=folder)
    with raises_at(DataError, "rows with reference_folder", "stream"):
        PreferenceModule(make_model(), tokenizer(), reference_folder=folder).make_samples(Stream(rows))


def test_the_answers_to_held_out_prompts_are_a_table_of_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from accmt.addons.report.records import read_run
    from accmt.cli.main import main

    monkeypatch.chdir(tmp_path)
    empty = {**pair(2), "rejected": [{"role": "assistant", "content": ""}]}
    modules = {"silent": PreferenceModule(make_model(), tokenizer(), "orpo")}
    modules["answering"] = PreferenceModule(make_model(), tokenizer(), "orpo")
    for name, module in modules.items():
        hps = {"epochs": 8, "optim": {"type": "AdamW", "lr": 0.02}}
        hps |= {"evaluation": {"generate": {"max_new_tokens": 8}}} if name == "answering" else {}
        options = {"val": [empty, *pairs(3)], "logging_dir": "logs", "eval_when_start": True}
        fit(tmp_path / name, pairs(), module=module, hps=hps, **options)
    assert all(map(torch.equal, *map(trained, modules.values())))
    [folder] = Path("logs/answering").iterdir()
    tables = [table.table() for table in read_run(folder).tables["generated"]]
    assert len(tables) == 9
    first, last = tables[0], tables[-1]
    assert first[0] == ["prompt", "expected", "written"]
    assert [row[:2] for row in first[1]] == [row[:2] for row in last[1]]
    assert [row[1] for row in last[1]] == [row["chosen"][0]["content"] for row in pairs(3)]
    assert [row[2] for row in first[1]] != [row[2] for row in last[1]]
    assert main(["report", str(folder), "--output", "report.html"]) == 0
    assert pairs(1)[0]["chosen"][0]["content"] in Path("report.html").read_text()


def test_a_run_of_kto_that_runs_out_of_memory_for_its_baseline_continues_with_smaller_batches(tmp_path: Path):
    module, other = (PreferenceModule(make_model(), tokenizer(), "kto", **KTO) for _ in range(2))
    reference = module.teacher = other.teacher = moved(make_model())
    most = 4

    def require_memory(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if len(inputs["input_ids"]) > most:
            raise torch.OutOfMemoryError("out of memory")

    reference.register_forward_pre_hook(require_memory, with_kwargs=True)
    trainer = fit(tmp_path / "small", labeled(8), module=module, hps={"batch_size": 8, "max_micro_batch_size": "auto"})
    assert trainer.state.global_step == 1
    most = 8
    fit(tmp_path / "large", labeled(8), module=other, hps={"batch_size": 8})
    assert_close(module, other)


def test_packed_answers_to_other_prompts_have_bounds_of_their_own():
    module = PreferenceModule(make_model(), tokenizer(), "kto")
    samples = module.make_samples(labeled(4))
    row = module.packer_class(gives_bounds=True)([samples[index] for index in range(4)])
    for begin, at in (("", 0), ("other_", 1)):
        lengths = [len(samples[index]["input_ids"][at]) for index in range(4)]
        assert row[f"{begin}answer_lengths"] == lengths
        assert row[f"{begin}cu_seq_lens_q"].tolist() == [sum(lengths[:number]) for number in range(5)]
    assert row["is_desirable"].tolist() == [1, 0, 0, 1]
