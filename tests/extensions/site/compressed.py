"""An engine: data parallelism whose gradients travel between processes in 16 bits."""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from accmt.engine.data_parallel import DataParallel


class Compressed(DataParallel):
    """Halves what each optimizer step sends."""

    def wrap(self, optimizer, **options) -> None:
        super().wrap(optimizer, **options)
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, fp16_compress_hook)
