"""What transformers and PEFT models need beyond plain PyTorch: building, saving, loading, gradient checkpointing.

Nothing here imports transformers or peft before a function that needs it is called.
"""

from accmt.huggingface.folder import load_model_weights, save_model, to_saved_format
from accmt.huggingface.gradient_checkpointing import enable_gradient_checkpointing
from accmt.huggingface.model_kinds import (
    advise_wrapping,
    describe_model,
    is_peft_model,
    is_transformers_model,
    reject_injected_adapters,
)
from accmt.huggingface.packing import computing_without_cache
from accmt.huggingface.pretrained import load_pretrained, load_pretrained_weights

__all__ = [
    "advise_wrapping",
    "computing_without_cache",
    "describe_model",
    "enable_gradient_checkpointing",
    "is_peft_model",
    "is_transformers_model",
    "load_model_weights",
    "load_pretrained",
    "load_pretrained_weights",
    "reject_injected_adapters",
    "save_model",
    "to_saved_format",
]
