"""What serves a model: a folder of transformers, a GGUF file, an ONNX file, or a server."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accmt.addons.pretrained import find_model_class, load_pretrained
from accmt.errors import ArgumentError, ArgumentFileError, MissingPackageError, fail
from accmt.libraries.versions import require
from accmt.registry import addon
from accmt.saving.weights import ADAPTER_CONFIG

CAUSAL = "AutoModelForCausalLM"

MAX_LENGTH = 2048
"""How many tokens of a row are compared."""

_COMMAND = "accmt check --against"

_LLAMA_STOPS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s> <|endoftext|> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
"""
"""Tokens at which llama.cpp stops because of their text. Source: llama_vocab::impl::load in its src/llama-vocab.cpp."""

_PRE_TOKENIZERS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""Pre-tokenizers for which llama.cpp adds a beginning-of-sequence token if the file does not say. Source: as above."""

Messages = Sequence[Mapping[str, str]]


class Folder:
    """A folder of transformers, or an adapter with its base model; base class of all that serves a model.

    Attributes:
        do: What to do if its chat template or tokenizer is wrong.
        stop_do: What to do if a stop token is missing; "{id}" and "{ids}" stand for the token and all stop tokens.

    Raises:
        ArgumentFileError: There is no such folder.
    """

    do = "AutoTokenizer.from_pretrained(MODEL).save_pretrained(EXPORT)"
    stop_do = 'write to generation_config.json of the export: "eos_token_id": {ids}'

    def __init__(self, path: str, trained: Folder | None = None) -> None:
        require("transformers", _COMMAND)
        self.trained = trained
        if not Path(path).is_dir():
            do = "pass the folder that `accmt sft`, a Trainer or `save_pretrained` wrote"
            raise fail(ArgumentFileError, path, got="no such folder", expected="a model folder", do=do)
        self.folders = [Path(path)]
        if (Path(path) / ADAPTER_CONFIG).is_file():
            self.folders.append(Path(addon("read_base_name")(Path(path))))

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer; for an adapter without one, that of its base model; None without either."""
        from transformers import AutoTokenizer

        folder = next((folder for folder in self.folders if (folder / "tokenizer_config.json").is_file()), None)
        return folder and AutoTokenizer.from_pretrained(folder)

    @cached_property
    def model(self) -> Any:
        """The model as one of transformers, on the accelerator if there is one; None if it cannot be one."""
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        return load_pretrained(self.folders[0], CAUSAL).eval().to(device)

    @property
    def dtype(self) -> str:
        """The data type of its weights: one of torch, or a quantization such as "Q4_K"."""
        return str(self.model.dtype).removeprefix("torch.")

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        """Return the tokens of a conversation as the model gets them; None if it has no chat template.

        Args:
            messages: The conversation.
            asks: Whether the generation prompt is appended.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return None
        return self.encode(render(self.tokenizer, messages, asks=asks))

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text without those that a runtime adds; None if it has no tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.encode(text, add_special_tokens=False)

    def find_vocabulary_fault(self, tokenizer: Any) -> str | None:
        """Return how its vocabulary differs from the trained tokenizer's, apart from the tokens of strings."""

    def is_stop(self, token: int) -> bool | None:
        """Return whether generation ends at a token; None if that is not known."""
        files = [folder / name for name in ("generation_config.json", "config.json") for folder in self.folders]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            return None
        stops = json.loads(file.read_text()).get("eos_token_id")
        return token in (stops if isinstance(stops, list) else [stops])

    def log_probs(self, tokens: list[int]) -> Tensor:
        """Return log-probabilities of each token but the first: of the whole vocabulary, or only of the token.

        Shapes: [tokens - 1, vocabulary] or [tokens - 1].
        """
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens], device=self.model.device)).logits[0, :-1]
        log_probs: Tensor = logits.float().log_softmax(-1).cpu()
        return log_probs

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return its tensors; None if they cannot be read. Those of a graph have other names than in transformers."""
        return None if self.model is None else dict(self.model.state_dict())


class Onnx(Folder):
    """A causal model in an ONNX file, with what else is in its folder.

    Raises:
        ArgumentFileError: There is no such file.
        MissingPackageError: onnxruntime or onnx is not installed.
    """

    model = None

    def __init__(self, path: str, trained: Folder | None = None) -> None:
        self.file = _find_file(path, ".onnx")
        super().__init__(str(self.file.parent), trained)
        runtime = _import("onnxruntime", "onnxruntime onnx")
        self._graph = _import("onnx", "onnxruntime onnx").load(self.file).graph
        self._session = runtime.InferenceSession(self.file, providers=["CPUExecutionProvider"])

    @cached_property
    def dtype(self) -> str:
        """The data type of its logits, or the number of bits of quantized weights."""
        operators = " ".join(node.op_type for node in self._graph.node)
        if "NBits" in operators or "Quantize" in operators or "Integer" in operators:
            return "4-bit" if "NBits" in operators else "8-bit"
        kinds = {"tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}
        return kinds.get(self._session.get_outputs()[0].type, "float32")

    def log_probs(self, tokens: list[int]) -> Tensor:
        import numpy as np

        length = len(tokens)
        inputs = {"input_ids": tokens, "attention_mask": [1] * length, "position_ids": list(range(length))}
        feeds = {name: np.array([value], np.int64) for name, value in inputs.items()}
        kinds = {"tensor(bool)": np.bool_, "tensor(float16)": np.float16}
        entries = self._session.get_inputs()
        for entry in (entry for entry in entries if entry.name not in feeds):  # past keys and values: none
            shape = [1, *(size if isinstance(size, int) else 0 for size in entry.shape[1:])]
            feeds[entry.name] = np.zeros(shape, kinds.get(entry.type, np.float32))
        feeds = {entry.name: feeds[entry.name] for entry in entries}
        names = [entry.name for entry in self._session.get_outputs()]
        logits = self._session.run(["logits" if "logits" in names else names[0]], feeds)[0]
        return torch.from_numpy(logits[0, :-1].astype(np.float32)).log_softmax(-1)

    def tensors(self) -> Mapping[str, Tensor] | None:
        to_array = import_module("onnx.numpy_helper").to_array
        folder = str(self.file.parent)
        return {entry.name: torch.tensor(to_array(entry, folder)) for entry in self._graph.initializer}


class Gguf(Folder):
    """A GGUF file, run by llama.cpp if llama-cpp-python is installed, else by transformers and the trained tokenizer.

    Raises:
        ArgumentFileError: There is no such file.
        MissingPackageError: gguf is not installed.
    """

    do = "gguf-new-metadata EXPORT NEW --chat-template-file MODEL/chat_template.jinja, or convert the trained folder"
    stop_do = "gguf-set-metadata EXPORT tokenizer.ggml.eos_token_id {id}"

    def __init__(self, path: str, trained: Folder) -> None:
        self.path, self._trained = _find_file(path, ".gguf"), trained
        reader = _import("gguf", "gguf").GGUFReader(self.path)
        self._fields = {name.removeprefix("tokenizer."): field.contents() for name, field in reader.fields.items()}
        self._kind: str = min(
            (tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1), key=count_bits
        )
        self._texts: list[str] = self._fields.get("ggml.tokens", [])
        has_bos = self._fields.get("ggml.model") == "llama" or self._fields.get("ggml.pre") in _PRE_TOKENIZERS_WITH_BOS
        self._adds_bos = self._fields.get("ggml.add_bos_token", has_bos)

    @property
    def dtype(self) -> str:
        """The type with the fewest bits of its matrices."""
        floats = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return floats.get(self._kind, self._kind)

    @cached_property
    def _llama(self) -> Any:
        if find_spec("llama_cpp") is None:
            return None
        return import_module("llama_cpp").Llama(str(self.path), n_ctx=MAX_LENGTH, logits_all=True, verbose=False)

    @cached_property
    def model(self) -> Any:
        """The model as transformers reads it from the file, in 32 bits."""
        file = {"gguf_file": self.path.name, "dtype": torch.float32}
        try:
            return find_model_class(CAUSAL).from_pretrained(self.path.parent, **file).eval()
        except ValueError as error:  # an architecture that transformers does not read
            expected, do = "a file that transformers can read, or llama-cpp-python", "pip install llama-cpp-python"
            raise fail(ArgumentError, str(self.path), got=str(error), expected=expected, do=do) from error

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        template, bos = self._fields.get("chat_template"), self._text_of("bos")
        if template is None:
            return None
        special = {"bos_token": bos, "eos_token": self._text_of("eos")}
        text = render(self._trained.tokenizer, messages, asks=asks, chat_template=template, **special)
        # Some runtimes add a second one. llama.cpp does not since 2025, and if the trained tokenizer has the same two
        # sources of it (as Llama 3's), the export is faithful.
        if self._adds_bos and bos and text.startswith(bos) and _adds_bos(self._trained.tokenizer):
            text = text.removeprefix(bos)
        begin = [self._fields["ggml.bos_token_id"]] if self._adds_bos and bos else []
        return [*begin, *(self.encode(text) or ())]

    def _text_of(self, name: str) -> str:
        token = self._fields.get(f"ggml.{name}_token_id")
        return "" if token is None else self._texts[token]

    def encode(self, text: str) -> list[int] | None:
        if self._llama is None:
            return self._trained.encode(text)
        return list(self._llama.tokenize(text.encode(), add_bos=False, special=True))

    def is_stop(self, token: int) -> bool | None:
        stops = [self._fields.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return token in stops or (token < len(self._texts) and self._texts[token] in _LLAMA_STOPS.split())

    def log_probs(self, tokens: list[int]) -> Tensor:
        if self._llama is None:
            return super().log_probs(tokens)
        self._llama.reset()
        self._llama.eval(tokens)
        return torch.from_numpy(self._llama.scores[: len(tokens) - 1].copy()).log_softmax(-1)

    def find_vocabulary_fault(self, tokenizer: Any) -> str | None:
        trained = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        for token, (text, served) in enumerate(zip(trained, self._texts, strict=False)):
            if text is not None and text != served:
                return f"token {token} is {served!r}, trained {text!r}"
        if len(self._texts) < len(trained):
            return f"{len(self._texts)} tokens, trained {len(trained)}"
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges") or []
        written = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
        return "other merges" if written != self._fields.get("ggml.merges", written) else None


class Server(Folder):
    """An OpenAI-compatible server with vLLM's `/tokenize` and `prompt_logprobs`.

    Its URL may end with `/v1`, and with `#name` to choose one of several models.

    Raises:
        ArgumentError: It cannot be reached, or answers with an error.
    """

    do = "start the server with --tokenizer MODEL --chat-template MODEL/chat_template.jinja"
    stop_do = "start the server with --override-generation-config '{{\"eos_token_id\": {ids}}}'"
    dtype = "bfloat16"  # it does not say; for weights of 32 bits its default has 16

    def __init__(self, url: str, trained: Folder | None = None) -> None:
        address, _, name = url.partition("#")
        self._url, self._name = address.rstrip("/").removesuffix("/v1"), name
        models = {entry["id"]: entry for entry in self._ask("/v1/models")["data"]}
        self._name = name or next(iter(models))
        if self._name not in models:
            raise fail(ArgumentError, url, got=name, expected=f"one of {', '.join(models)}", do=f"{address}#NAME")
        self._root = str(models[self._name].get("root"))

    @cached_property
    def model(self) -> Any:
        """The model that the server loaded, if its folder is on this machine."""
        return Folder(self._root).model if Path(self._root).is_dir() else None

    def chat_tokens(self, messages: Messages, *, asks: bool) -> list[int] | None:
        return list(self._ask("/tokenize", messages=list(messages), add_generation_prompt=asks)["tokens"])

    def encode(self, text: str) -> list[int] | None:
        return list(self._ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"])

    def is_stop(self, token: int) -> bool | None:
        # The bias makes the server generate this token, whatever the model predicts.
        forced = {"logit_bias": {str(token): 100}, "max_tokens": 2, "temperature": 0}
        answer = self._ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **forced)
        return bool(answer["choices"][0]["finish_reason"] == "stop")

    def log_probs(self, tokens: list[int]) -> Tensor:
        answer = self._ask("/v1/completions", prompt=tokens, max_tokens=1, temperature=0, prompt_logprobs=1)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        return torch.tensor([row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows, strict=True)])

    def _ask(self, path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps({"model": self._name, **body}).encode() if body else None
        request = urllib.request.Request(f"{self._url}{path}", data, headers)  # noqa: S310 - the user's address
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
                return json.load(answer)
        except (OSError, ValueError) as error:
            why = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            do = "check the URL, and the log of the server; a key is read from VLLM_API_KEY"
            expected = "a server that answers like vLLM"
            raise fail(ArgumentError, f"{self._url}{path}", got=f"{error} {why}", expected=expected, do=do) from error


KINDS = {"merged": Folder, "gguf": Gguf, "onnx": Onnx, "vllm": Server}
"""What can serve a model, by the name that the command takes."""


def render(tokenizer: Any, messages: Messages, *, asks: bool, **arguments: Any) -> str:
    """Return the text of a conversation."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **arguments)
    return text


def _adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer itself begins every text with a beginning-of-sequence token."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos]


def count_bits(dtype: str) -> int:
    """Return the number of bits of a data type: "bfloat16" has 16, "Q4_K" has 4."""
    return int(re.findall(r"\d+", dtype)[0])


def _find_file(path: str, suffix: str) -> Path:
    files = sorted(Path(path).glob(f"*{suffix}")) if Path(path).is_dir() else [Path(path)]
    if len(files) != 1 or not files[0].is_file():
        expected, do = f"a file {suffix}, or a folder with one", f"pass the path of one file {suffix}"
        raise fail(ArgumentFileError, path, got="no such file, or several", expected=expected, do=do)
    return files[0]


def _import(name: str, packages: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        do = f"pip install {packages}"
        raise fail(MissingPackageError, _COMMAND, got=str(error), expected=packages, do=do) from error
