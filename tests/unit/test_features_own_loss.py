"""A step that returns a transformers model's own loss is weighed by the target tokens, without a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from accmt import AcceleratorModule, Callback, SFTModule
from accmt.addons.loss_targets import count_targets, kind_of_targets
from accmt.addons.made_modules import HuggingFaceModule
from accmt.errors import ModuleContractError
from tests.conversations import make_tokenizer
from tests.raising import raises_at
from tests.toys import make_trainer

LENGTHS = (3, 12, 5, 9, 2, 11, 7, 4)


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def make_rows() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(1, 20, (12,))
        is_there = torch.arange(12) < length
        rows.append({"input_ids": ids, "attention_mask": is_there.long(), "labels": ids.masked_fill(~is_there, -100)})
    return rows


class Own(AcceleratorModule):
    """Returns the loss that the model computes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def step(self, batch: Any) -> Any:
        return self.model(**batch).loss


class InADict(Own):
    def step(self, batch: Any) -> Any:
        return {"loss": super().step(batch), "samples": torch.tensor(float(len(batch["input_ids"])))}


class InATuple(Own):
    def step(self, batch: Any) -> Any:
        return self.model(**batch, return_dict=False)[0]


class Inside(Own):
    """Has the model in a network of its own."""

    class Network(torch.nn.Module):
        def __init__(self, part: Any) -> None:
            super().__init__()
            self.part = part

        def forward(self, **batch: Any) -> torch.Tensor:
            return self.part(**batch).loss

    def __init__(self, model: Any) -> None:
        self.model = self.Network(model)

    def step(self, batch: Any) -> Any:
        return self.model(**batch)


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, *_: Any) -> None:
        model = self.trainer.run.unwrapped_model
        self.seen.append(gradient_of(model))


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Supervised(SFTModule):
    """Takes the rows as they are."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, make_tokenizer())
        self.collate_fn = None

    def make_samples(self, rows: Any) -> Any:
        return rows


def of_plain_torch(rows: list[dict[str, torch.Tensor]], model: Any = None) -> tuple[torch.Tensor, float]:
    model = make_model() if model is None else model
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    loss = model(**batch).loss
    loss.backward()
    return gradient_of(model), loss.item()


def train(
    module: AcceleratorModule, *, batch_size: int = 2, rows: Any = None, **settings: Any
) -> tuple[Any, list[torch.Tensor]]:
    gradients = Gradients()
    hps = {"epochs": 1, "batch_size": batch_size, "optim": {"type": "SGD", "lr": 1e-30}}
    settings = {"model_saving": None, "callbacks": [gradients], "grad_accumulation_steps": 4, **settings}
    trainer = make_trainer(hps, **settings)
    rows = make_rows() if rows is None else rows
    trainer.fit(module, rows, rows)
    return trainer, gradients.seen


def make_speech(rng: torch.Generator) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    sizes = {"hidden_size": 8, "encoder_layers": 1, "decoder_layers": 1, "speech_decoder_prenet_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 2, "vocab_size": 9}
    ffn = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "speech_decoder_prenet_units": 8, "speaker_embedding_dim": 2}
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "positional_dropout"), 0.0)
    none = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "speech_decoder_prenet_dropout": 0.0}
    config = transformers.SpeechT5Config(
        **sizes, **heads, **ffn, **off, **none, use_guided_attention_loss=False, speech_decoder_postnet_layers=0
    )
    rows = []
    for length in LENGTHS:
        spectrogram = torch.randn(12, 2, generator=rng).masked_fill((torch.arange(12) >= length)[:, None], -100.0)
        rows.append({"input_ids": torch.arange(3, 7), "labels": spectrogram, "speaker_embeddings": torch.ones(2)})
    return transformers.SpeechT5ForTextToSpeech(config), rows


def make_series(rng: torch.Generator, width: int = 1) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    kind = {"prediction_length": 12, "lags_sequence": [1], "num_time_features": 1, "scaling": None, "input_size": width}
    config = transformers.TimeSeriesTransformerConfig(**sizes, **kind, dropout=0.0, attention_dropout=0.0)
    config.activation_dropout = config.encoder_layerdrop = config.decoder_layerdrop = 0.0
    rows = []
    for length in LENGTHS:
        shape = (12,) if width == 1 else (12, width)
        past, future = torch.randn(13, *shape[1:], generator=rng), torch.randn(shape, generator=rng)
        is_there = (torch.arange(12) < length).float()
        mask = is_there if width == 1 else torch.stack([is_there, torch.ones(12)], -1)
        row = {"past_values": past, "past_observed_mask": torch.ones_like(past), "future_values": future}
        row |= {"past_time_features": torch.ones(13, 1), "future_time_features": torch.ones(12, 1)}
        rows.append({**row, "future_observed_mask": mask})
    return transformers.TimeSeriesTransformerForPrediction(config), rows


OTHER_TARGETS = {
    "target frames": make_speech,
    "observed values": make_series,
    "observed values of two series": partial(make_series, width=2),
}


@pytest.mark.parametrize("kind", [Own, HuggingFaceModule])
@pytest.mark.parametrize("targets", OTHER_TARGETS)
def test_frames_and_observed_values_are_counted(kind: Any, targets: str, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[Any, list[dict[str, torch.Tensor]]]:
        torch.manual_seed(0)
        return OTHER_TARGETS[targets](torch.Generator().manual_seed(1))

    model, rows = make()
    gradient, loss = of_plain_torch(rows, model)
    trainer, seen = train(kind(make()[0]), rows=rows, verbose=True)
    assert (seen[0] - gradient).norm() <= 2e-6 * gradient.norm()
    assert trainer.state.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)
    said = f"unchanged: each batch is weighted by its {targets.removesuffix(' of two series')}"
    assert (said in caplog.text) == (kind is Own)


SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGES = {**SMALL, "image_size": 8, "patch_size": 4}
MASKED = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()


def make_text_inputs() -> dict[str, torch.Tensor]:
    rows = make_rows()[:4]
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}


def replaced() -> tuple[Any, dict[str, torch.Tensor], str]:
    batch = make_text_inputs()
    labels = batch["input_ids"] % 2  # at padding, too
    model = transformers.ElectraForPreTraining(transformers.ElectraConfig(vocab_size=20, embedding_size=8, **SMALL))
    torch.nn.init.normal_(model.discriminator_predictions.dense_prediction.weight)
    return model, {**batch, "labels": labels}, "real tokens"


def cut_off() -> tuple[Any, dict[str, torch.Tensor], str]:
    answers = torch.tensor([3, 512, 5, 1])
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=20, **SMALL))
    torch.nn.init.normal_(model.qa_outputs.weight)
    return model, {**make_text_inputs(), "start_positions": answers, "end_positions": answers}, "answers"


def patches() -> tuple[Any, dict[str, torch.Tensor], str]:
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**IMAGES, encoder_stride=4))
    return (
        model,
        {"pixel_values": pixels * torch.arange(1, 5)[:, None, None, None], "bool_masked_pos": MASKED},
        "masked patches",
    )


@pytest.mark.parametrize("make", [replaced, cut_off, patches])
def test_the_weighted_mean_of_two_batches_is_the_loss_of_both(make: Any) -> None:
    torch.manual_seed(0)
    model, batch, targets = make()
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(2), slice(2, 4))]
    with torch.no_grad():
        whole, losses = model(**batch).loss, torch.stack([model(**half).loss for half in halves])
    assert kind_of_targets(model, batch) == targets
    weights = torch.stack([count_targets(model, half) for half in halves])
    assert weights[0] != weights[1]
    assert (losses * weights).sum() / weights.sum() == pytest.approx(whole.item(), rel=1e-5)
    assert losses.mean() != pytest.approx(whole.item(), rel=1e-4)


def sentences() -> tuple[Any, dict[str, torch.Tensor]]:
    batch = make_text_inputs()
    labels = {"labels": batch["input_ids"], "next_sentence_label": torch.tensor([0, 1, 0, 1])}
    return transformers.BertForPreTraining(transformers.BertConfig(vocab_size=20, **SMALL)), {**batch, **labels}


def frames() -> tuple[Any, dict[str, torch.Tensor]]:
    convolutions = {"conv_dim": (4,), "conv_stride": (4,), "conv_kernel": (4,), "num_feat_extract_layers": 1}
    codes = {"num_codevectors_per_group": 4, "codevector_dim": 8, "proj_codevector_dim": 8, "num_negatives": 2}
    sizes = {name: value for name, value in SMALL.items() if "prob" not in name}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**convolutions, **codes, **sizes, **places, ctc_loss_reduction="mean")
    mask = torch.arange(10).repeat(4, 1) % 2 == 0
    negatives = torch.zeros(4, 10, 2, dtype=torch.long)
    inputs = {"input_values": torch.randn(4, 40), "mask_time_indices": mask, "sampled_negative_indices": negatives}
    return transformers.Wav2Vec2ForPreTraining(config), inputs


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (sentences, "adds a mean over sentences to a mean over tokens"),
        (frames, "is a sum over masked frames: it grows with the batch.*mask_time_indices.sum"),
    ],
)
def test_a_loss_that_no_weight_fits_is_named(make: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make()
    rows = [{name: value[row] for name, value in batch.items()} for row in range(4)]
    train(Own(model), rows=rows, verbose=True)
    assert re.search(said, caplog.text)


def test_a_loss_that_adds_a_mean_over_other_things_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, rows = make_speech(torch.Generator().manual_seed(1))
    model.config.use_guided_attention_loss = True
    rows = [{**row, "attention_mask": torch.ones(4, dtype=torch.long)} for row in rows]
    train(Own(model), rows=rows, verbose=True)
    assert "SpeechT5ForTextToSpeech adds guided attention" in caplog.text
    assert "use_guided_attention_loss = False" in caplog.text


WHOLE, REGIONS = {"compile": {"backend": "eager"}}, {"compile": {"backend": "eager", "regional": True}}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what the compiler looks at
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in (Own, InADict, InATuple, Inside)),
        *(pytest.param(kind, WHOLE, marks=pytest.mark.slow) for kind in (Own, InADict, InATuple)),
        *(pytest.param(kind, REGIONS, marks=pytest.mark.slow) for kind in (Own, Inside)),
    ],
)
def test_a_window_has_the_gradient_and_the_loss_of_one_big_batch(kind: type[Own], settings: dict[str, Any]) -> None:
    torch.compiler.reset()
    gradient, loss = of_plain_torch(make_rows())
    trainer, seen = train(kind(make_model()), **settings)
    assert len(seen) == 1
    assert (seen[0] - gradient).norm() <= 1e-6 * gradient.norm()
    assert trainer.state.metrics["val_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", [HuggingFaceModule, Supervised, Own])
@pytest.mark.parametrize("adapter", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_a_window_through_a_trained_prompt_has_the_gradient_of_one_big_batch(kind: Any, adapter: Any) -> None:
    def make() -> Any:
        model = make_model()
        torch.manual_seed(2)
        return get_peft_model(model, adapter(task_type="CAUSAL_LM", num_virtual_tokens=3))

    gradient, loss = of_plain_torch(make_rows(), make())
    trainer, seen = train(kind(make()))
    assert (seen[0] - gradient).norm() <= 2e-6 * gradient.norm()
    assert trainer.state.metrics["val_loss"] == pytest.approx(loss, rel=1e-6)


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "encoder_ffn_dim": 16}
BART |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
VISION = {name: size for name, size in SIZES.items() if name != "vocab_size"} | {"image_size": 8, "patch_size": 4}
KINDS: dict[str, Callable[[], Any]] = {
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)),
    "tokens": lambda: transformers.BertForTokenClassification(
        transformers.BertConfig(**SIZES, **NO_DROPOUT, num_labels=20)
    ),
    "sequence to sequence": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "decoder of labels as they are": lambda: transformers.BartForCausalLM(transformers.BartConfig(**BART)),
    "XLNet": lambda: transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=16, dropout=0.0)
    ),
    "images and text": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**SIZES),
            vision_config=transformers.CLIPVisionConfig(**VISION | {"num_hidden_layers": 2}),
            image_token_index=0,
        )
    ),
}


@pytest.mark.parametrize("module", [Own, HuggingFaceModule])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_has_the_gradient_of_one_big_batch_with_every_kind_of_loss_over_tokens(module: Any, kind: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return KINDS[kind]()

    gradient, loss = of_plain_torch(make_rows(), make().train())
    trainer, seen = train(module(make()))
    assert (seen[0] - gradient).norm() <= 2e-6 * gradient.norm()
    assert trainer.state.metrics["val_loss"] == pytest.approx(loss, rel=1e-6)


def test_the_loss_of_pixels_is_weighed_by_those_that_have_a_class() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        one = {"depths": [1], "sr_ratios": [1], "hidden_sizes": [8], "num_attention_heads": [1], "mlp_ratios": [2]}
        config = transformers.SegformerConfig(num_encoder_blocks=1, patch_sizes=[3], strides=[2], **one, num_labels=3)
        return transformers.SegformerForSemanticSegmentation(config)

    rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": torch.randint(0, 3, (8, 8))} for _ in range(8)]
    for number, row in enumerate(rows):
        row["labels"][number:] = 255
    with torch.no_grad():
        loss = make().eval()(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss.item()
    for module in (Own, HuggingFaceModule):
        trainer = make_trainer({"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 1e-30}}, model_saving=None)
        assert trainer.validate(module(make()), rows)["val_loss"] == pytest.approx(loss, rel=1e-6)


def test_a_loss_that_is_a_sum_is_named_with_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    convolutions = {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10]}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(vocab_size=20, **sizes, **convolutions, **positions, apply_spec_augment=False)
    rows = [{"input_values": torch.rand(400), "labels": torch.randint(1, 20, (4,))} for _ in range(4)]
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 1e-30}}
    for reduction in ("mean", "sum"):
        config.ctc_loss_reduction = reduction
        make_trainer(hps, model_saving=None).fit(HuggingFaceModule(transformers.Wav2Vec2ForCTC(config)), rows)
        assert ("set model.config.ctc_loss_reduction = 'mean'" in caplog.text) == (reduction == "sum")


class Further(Own):
    """Computes further with the model's loss after the first batch; or always."""

    def __init__(self, model: Any, *, first: int) -> None:
        self.model, self.first, self.count = model, first, 0

    def training_step(self, batch: Any) -> Any:
        self.count += 1
        loss = self.model(**batch).loss
        return loss * 1.0 if self.count > self.first else loss

    def validation_step(self, batch: Any) -> Any:
        return self.model(**batch).loss * 1.0


class Weighed(Own):
    def step(self, batch: Any) -> Any:
        return {"loss": self.model(**batch).loss, "weight": 1}


def test_a_loss_that_is_computed_further_weighs_samples_from_the_first_batch_on() -> None:
    _, computed = train(Further(make_model(), first=0))
    _, weighed = train(Weighed(make_model()))  # batches of two samples each
    assert torch.allclose(computed[0], weighed[0], rtol=1e-6)
    gradient, _ = of_plain_torch(make_rows())
    assert (computed[0] - gradient).norm() > 1e-2 * gradient.norm()


def test_a_run_that_weighs_target_tokens_keeps_to_them() -> None:
    gradient, _ = of_plain_torch(make_rows())
    _, seen = train(Further(make_model(), first=1))
    assert (seen[0] - gradient).norm() <= 1e-6 * gradient.norm()


def test_what_a_step_returns_beside_its_loss_weighs_samples() -> None:
    rows = make_rows()[:3]
    gradients = Gradients()
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 1e-30}}
    trainer = make_trainer(hps, model_saving=None, callbacks=[gradients])
    trainer.fit(InADict(make_model()), rows, rows)
    assert trainer.state.metrics["samples"] == pytest.approx((2 * 2 + 1) / 3)
    assert trainer.state.metrics["val_loss"] == pytest.approx(of_plain_torch(rows)[1], rel=1e-6)


@pytest.mark.parametrize("kind", [Own, Inside])
def test_an_evaluation_without_training_weighs_so_too(kind: type[Own]) -> None:
    trainer = make_trainer({"batch_size": 3})
    found = trainer.validate(kind(make_model()), make_rows())["val_loss"]
    assert found == pytest.approx(of_plain_torch(make_rows())[1], rel=1e-6)


def test_a_loss_over_a_number_of_items_that_the_step_names_is_no_mean_over_tokens() -> None:
    class Named(Own):
        def step(self, batch: Any) -> Any:
            return self.model(**batch, num_items_in_batch=len(batch["labels"])).loss

    _, seen = train(Named(make_model()), grad_accumulation_steps=1, batch_size=8)
    _, halves = train(Named(make_model()), grad_accumulation_steps=2, batch_size=4)
    assert torch.allclose(seen[0], halves[0], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_hooks_are_gone_after_the_run() -> None:
    torch.compiler.reset()
    model = make_model()
    train(Own(model))
    assert not model._forward_hooks
    train(Own(model), compile={"backend": "eager"})
    assert model._compiled_call_impl.__name__ != "call"


def test_no_loss_or_graph_is_kept_where_steps_say_what_they_weigh() -> None:
    import gc

    class Losses(Callback):
        alive: list[int] = []

        def on_update_end(self, *_: Any) -> None:
            gc.collect()
            self.alive.append(
                sum(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in gc.get_objects())
            )

    losses = Losses()
    hps = {"epochs": 2, "batch_size": 1, "optim": {"type": "SGD", "lr": 1e-30}}
    make_trainer(hps, model_saving=None, callbacks=[losses]).fit(Weighed(make_model()), make_rows())
    assert losses.alive[-1] <= losses.alive[1]


@pytest.mark.parametrize(
    ("kind", "accumulation", "is_said"), [(Own, 4, False), (Further, 4, True), (Further, 1, False)]
)
def test_what_to_return_is_said_where_nobody_knows(
    kind: Any, accumulation: int, is_said: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    module = kind(make_model()) if kind is Own else kind(make_model(), first=0)
    train(module, grad_accumulation_steps=accumulation, verbose=True)
    printed = caplog.text + "".join(capsys.readouterr())
    assert ('"weight": (labels != -100).sum()' in printed) == is_said
    assert ("each batch is weighted by its target tokens" in printed) == (kind is Own)


def test_a_batch_for_which_no_model_is_called_is_not_weighed_by_the_one_before() -> None:
    class Without(Own):
        count = 0

        def training_step(self, batch: Any) -> Any:
            self.count += 1
            return self.model.lm_head.weight.mean() if self.count == 2 else self.model(**batch).loss

    with raises_at(ModuleContractError, "training_step"):
        train(Without(make_model()))


@pytest.mark.parametrize(("accumulation", "coefficient"), [(2, 0.1), (1, 0.1), (2, 0.0)])
def test_the_share_of_a_load_balancing_term_is_told_where_a_batch_has_parts(accumulation, coefficient, caplog):
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = transformers.MixtralConfig(
        **sizes, **heads, output_router_logits=True, router_aux_loss_coef=coefficient, use_cache=False
    )
    torch.manual_seed(0)
    module = Own(transformers.MixtralForCausalLM(config))
    make_trainer({"batch_size": 2}, grad_accumulation_steps=accumulation).fit(module, make_rows())
    is_told = accumulation > 1 and coefficient > 0
    assert caplog.text.count("the loss of MixtralForCausalLM has a load-balancing term (") == is_told
    assert ("(0.0% of it)" in caplog.text) is False
