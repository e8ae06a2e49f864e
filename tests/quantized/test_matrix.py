"""Whatever trains also resumes: weights in every precision, trained whole, in parts or by adapters, by every optimizer.

These are the cells of the table in docs/fine-tuning.md. `make quantized` runs them, with bitsandbytes and torchao.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from accmt import AcceleratorModule, Trainer
from accmt.errors import ModuleContractError, WeightsError
from tests.resume.unbroken import InterruptAt, InterruptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching:UserWarning"),  # torch, of torchao's tensors
    pytest.mark.filterwarnings("ignore:Merge lora module to:UserWarning"),  # peft: rounding, which a test bounds
    pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),  # torch, when inductor compiles
]

PRECISIONS = ("fp32", "bf16", "int8", "nf4", "torchao int8")
TRAINED = ("full", "frozen parts", "LoRA")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "lr": 1e-3, "fused": False},
    "AdamW, fused": {"type": "AdamW", "lr": 1e-3, "fused": True},
    "SGD": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
    "Adafactor": {"type": "Adafactor", "lr": 1e-3},
    "Muon + AdamW": {"type": "AdamW", "lr": 1e-3, "groups": [{"kind": "matrix", "type": "Muon", "lr": 0.01}]},
    "bitsandbytes 8 bit": {"type": "bitsandbytes.optim.AdamW8bit", "lr": 1e-3},
    "torchao 8 bit": {"type": "torchao.optim.AdamW8bit", "lr": 1e-4},
    "torchao 4 bit": {"type": "torchao.optim.AdamW4bit", "lr": 1e-4},
    "torchao fp8": {"type": "torchao.optim.AdamWFp8", "lr": 1e-4},
}
LOW_BIT = ("bitsandbytes 8 bit", "torchao 8 bit", "torchao 4 bit", "torchao fp8")
QUANTIZED = ("int8", "nf4", "torchao int8")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torchao compiles its steps with g++")


def list_cells() -> list[Any]:
    """Return the cells of the table; two thirds are slow tests, and each value is in one of the others, too."""
    cells = []
    for number, (precision, trained) in enumerate(itertools.product(PRECISIONS, TRAINED)):
        if (precision in QUANTIZED and trained == "full") or (precision, trained) == ("torchao int8", "frozen parts"):
            continue
        for position, optimizer in enumerate(OPTIMIZERS):
            marks = [NEEDS_COMPILER] if "torchao" in optimizer else []
            if (number + position) % 3:
                marks.append(pytest.mark.slow)
            cells.append(pytest.param(precision, trained, optimizer, marks=marks))
    return cells


class Texts(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (22, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Model(AcceleratorModule):
    def __init__(self, base: Path, precision: str, trained: str) -> None:
        self.model = load(base, precision)
        if trained == "LoRA":
            self.model = with_adapter(self.model, precision)
        elif trained == "frozen parts":
            self.model.requires_grad_(requires_grad=False)
            for part in (self.model.lm_head, self.model.model.norm):
                part.requires_grad_(requires_grad=True)

    def step(self, batch: Any) -> Any:
        return self.model(**batch).loss


def load(base: Path, precision: str) -> Any:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=quantization(precision))


def quantization(precision: str) -> Any:
    if precision == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if precision == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return None


def with_adapter(model: Any, precision: str) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if precision in QUANTIZED:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(3)
    # Low-bit optimizers keep the state of fewer than 4096 values in float32: these have as many.
    config = LoraConfig(task_type="CAUSAL_LM", r=64, lora_dropout=0.2, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    return folder


def fit(path: str, module: AcceleratorModule, optim: dict[str, Any], *callbacks: Any, **settings: Any) -> Trainer:
    hps = {"epochs": 2, "batch_size": 4, "optim": optim, "scheduler": "CosineAnnealingLR"}
    own = {"checkpoint_every": "2 steps", "model_saving": ["best_valid_loss", "last"], "seed": 3}
    trainer = Trainer(hps, path, callbacks=callbacks, verbose=False, **own, **settings)
    with contextlib.suppress(InterruptionError):
        trainer.fit(module, Texts(), Texts())
    return trainer


def trained_weights(module: AcceleratorModule) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.model.named_parameters() if p.requires_grad}


def loaded_again(base: Path, folder: Path, precision: str, trained: str) -> Any:
    """Load what was saved in transformers or PEFT."""
    if trained != "LoRA":
        return AutoModelForCausalLM.from_pretrained(folder)
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base, precision), folder)


@pytest.mark.parametrize(("precision", "trained", "optimizer"), list_cells())
def test_a_cell_trains_resumes_with_equal_bits_and_loads(
    base: Path, precision: str, trained: str, optimizer: str
) -> None:
    def make() -> Model:
        return Model(base, precision, trained)

    before, whole, resumed = trained_weights(make()), make(), make()
    fit("out/whole", whole, OPTIMIZERS[optimizer])
    fit("out/parts", make(), OPTIMIZERS[optimizer], InterruptAt(7))  # after an evaluation
    trainer = fit("out/parts", resumed, OPTIMIZERS[optimizer], resume=True)
    assert has_low_bit_state(trainer) == (optimizer in LOW_BIT)
    expected = trained_weights(whole)
    assert any(not torch.equal(weight, before[name]) for name, weight in expected.items())
    assert not [name for name, weight in trained_weights(resumed).items() if not torch.equal(weight, expected[name])]
    again = loaded_again(base, Path("out/parts/last"), precision, trained)
    found = dict(again.named_parameters())
    assert not [name for name, weight in expected.items() if not torch.equal(found[name], weight)]


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_quantized_weights_are_not_trained_whole(base: Path, precision: str) -> None:
    with pytest.raises(ModuleContractError, match=r"quantized weights, which have no gradients"):
        fit("out/m", Model(base, precision, "full"), OPTIMIZERS["AdamW"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_adapter_is_merged_where_the_weights_can_take_it(base: Path, precision: str) -> None:
    module = Model(base, precision, "LoRA")
    fit("out/m", module, OPTIMIZERS["AdamW"])
    inputs = {"input_ids": Texts().tokens[:2]}
    module.model.eval()
    merged = loaded_again(base, Path("out/m/last"), precision, "LoRA").merge_and_unload()
    with torch.no_grad():
        expected, found = module.model(**inputs).logits.float(), merged(**inputs).logits.float()
    rounding = {"fp32": 1e-5, "bf16": 3e-2, "int8": 1e-1, "nf4": 3e-1, "torchao int8": 1e-1}[precision]
    assert (found - expected).abs().max() <= rounding * expected.abs().max()


def torchao_module(base: Path, **model: Any) -> AcceleratorModule:
    torch.manual_seed(3)
    section = {"path": str(base), "type": "AutoModelForCausalLM", "quantization": "torchao:Int8WeightOnlyConfig"}
    return AcceleratorModule.from_hps({"epochs": 1, "batch_size": 1, "optim": "SGD", "model": {**section, **model}})


@pytest.mark.parametrize("model", [{}, {"freeze": ["layers", "embed"]}], ids=["full", "frozen parts"])
def test_without_an_adapter_torchaos_weights_are_refused_before_the_first_step(
    base: Path, model: dict[str, Any]
) -> None:
    module = torchao_module(base, **model)
    before = trained_weights(module)
    with pytest.raises(WeightsError, match="which wraps other tensors"):
        fit("out/m", module, OPTIMIZERS["AdamW"])
    assert module.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trained_weights(module).items())


STATE_SIZES = {"bitsandbytes 8 bit": 0.27, "torchao 8 bit": 0.27, "torchao 4 bit": 0.14, "torchao fp8": 0.26}


@pytest.mark.parametrize(
    "optimizer", [pytest.param(one, marks=[NEEDS_COMPILER] if "torchao" in one else []) for one in LOW_BIT]
)
def test_the_state_of_low_bit_optimizers_takes_a_part_of_adamws(optimizer: str) -> None:
    class Wide(Model):
        def __init__(self) -> None:
            sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def bytes_of_state(optim: dict[str, Any]) -> int:
        return sum(part.nbytes for part in parts_of_state(fit("out/m", Wide(), optim, resume=False)))

    ratio = bytes_of_state(OPTIMIZERS[optimizer]) / bytes_of_state(OPTIMIZERS["AdamW"])
    assert ratio == pytest.approx(STATE_SIZES[optimizer], abs=0.006)


def parts_of_state(trainer: Trainer) -> list[torch.Tensor]:
    """Return the plain tensors that the optimizer's state is made of."""
    from accmt.checkpoint.state_dicts import plain_parts

    values = (value for state in trainer.run.stepper.optimizer.state.values() for value in state.values())
    return [part for value in values if isinstance(value, torch.Tensor) for part in plain_parts(value)]


def has_low_bit_state(trainer: Trainer) -> bool:
    return any(part.element_size() == 1 for part in parts_of_state(trainer))
