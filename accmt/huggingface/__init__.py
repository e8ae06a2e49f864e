"""What a run needs to know of transformers and PEFT models: their kinds, saving and loading.

Nothing here imports transformers or peft before a function needs it.
"""

from accmt.huggingface.folder import load_model_weights as load_model_weights
from accmt.huggingface.folder import save_model as save_model
from accmt.huggingface.folder import to_saved_format as to_saved_format
from accmt.huggingface.folder import try_model_files as try_model_files
from accmt.huggingface.model_kinds import advise_wrapping as advise_wrapping
from accmt.huggingface.model_kinds import is_peft_model as is_peft_model
from accmt.huggingface.model_kinds import is_transformers_model as is_transformers_model
from accmt.huggingface.model_kinds import reject_injected_adapters as reject_injected_adapters
from accmt.huggingface.model_kinds import require_library as require_library
