"""How long a run takes to find out whether its model keeps packed documents apart.

    PYTHONPATH=. python tests/benchmarks/bench_packing.py

Prints milliseconds of one thread, of a model that does and of one that does not, both of the size of MiniLM.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from accmt.addons.packing_check import PackedCall, try_packing

SIZES: dict[str, Any] = {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
REPEATS = 5


def main() -> None:
    torch.set_num_threads(1)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=1024, tie_word_embeddings=True))
    for model in (llama, BertForMaskedLM(BertConfig(**SIZES, intermediate_size=1536))):
        times = []
        for _ in range(REPEATS):
            begun = time.thread_time()
            verdict = try_packing(model, PackedCall(model, {}))
            times.append(1e3 * (time.thread_time() - begun))
        parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
        result = "keeps documents apart" if verdict.is_isolated else "mixes documents"
        print(f"{type(model).__name__} of {parameters:.0f} M parameters {result}: {statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()
