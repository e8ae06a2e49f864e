# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train on 1, 2, 4 or 8 processes, or on some and then others, and get the same weights bit for bit; takes seconds.

    python examples/same_bits.py
    torchrun --nproc-per-node 2 examples/same_bits.py
    torchrun --nproc-per-node 4 examples/same_bits.py --until 60 && python examples/same_bits.py  # resumed on one

The last line is a digest of the trained weights. The network and the data are those of `digits.py`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from digits import DigitClassifier, build_datasets

from accmt import Trainer, set_seed
from accmt.metrics import Accuracy


def main() -> None:
    """Train up to a step, and print a digest of the weights."""
    parser = argparse.ArgumentParser(description="Train a network on digits with the same bits on any machine.")
    parser.add_argument("--output", type=Path, default=Path("out/same_bits"), help="folder of the saved model")
    parser.add_argument("--until", type=int, default=120, help="the optimizer step at which to stop")
    parser.add_argument("--limit", type=int, help="use so many images of each part, for a quick try")
    options = parser.parse_args()
    set_seed(0)  # the network starts with random weights
    trainer = Trainer(
        hps_config={"hps": {"max_steps": options.until, "batch_size": 32, "optim": {"type": "AdamW", "lr": 3e-3}}},
        model_path=options.output,
        model_saving="last",
        metrics=[Accuracy()],
        same_bits=8,  # each batch of 32 samples is computed in 8 units of 4
        seed=0,
        resume="auto",
        ledger=True,
    )
    module = DigitClassifier()
    trainer.fit(module, *build_datasets(options.limit))
    if trainer.is_main:
        content = b"".join(weight.numpy().tobytes() for weight in module.model.state_dict().values())
        digest = hashlib.md5(content, usedforsecurity=False)
        print(f"weights at step {options.until}: {digest.hexdigest()}")


if __name__ == "__main__":
    main()
