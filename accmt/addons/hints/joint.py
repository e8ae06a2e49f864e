"""What to write here for several arguments of another trainer's that are one hyper-parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accmt.addons.hints.fine_tuning import OF_MODEL, OF_SFT, advise_model, advise_sft
from accmt.addons.hints.values import advise_value
from accmt.options.numbers import is_number


def advise_joint(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the one line for an argument and those beside it that belong into the same hyper-parameter.

    A line for each would contradict the others: `lr: 5e-5` in one, and an example of a rate in the next.

    Args:
        name: The argument.
        values: All arguments, `name` among them, with their values.

    Returns:
        The line, or None where there is no other argument for it, or a value that says nothing here.
    """
    for names, advise in _JOINT.items():
        if name in names:
            known = {each: values[each] for each in names if values.get(each) is not None}
            return advise(known) if name in known and len(known) > 1 else None
    return None


def _name_optimizer(theirs: Any) -> str | None:
    """Return the name here for a value of transformers' `optim`, or for what stands in the hyper-parameters."""
    from accmt.options.optimizer_and_scheduler_names import optimizers_of_transformers

    theirs = theirs.get("type") if isinstance(theirs, Mapping) else getattr(theirs, "value", theirs)
    return optimizers_of_transformers().get(theirs, theirs) if isinstance(theirs, str) else None


def _advise_batch_sizes(known: Mapping[str, Any]) -> str | None:
    sizes = list(known.values())
    return f"batch_size: {sizes}" if all(isinstance(size, int) for size in sizes) else None


def _advise_optimizer(known: Mapping[str, Any]) -> str | None:
    kinds = [known[name] for name in _KINDS if name in known]
    known = {name: value for name, value in known.items() if name not in _KINDS}
    if not all(map(is_number, known.values())):
        return None
    written = next((kind for kind in kinds if isinstance(kind, Mapping)), {})
    rate = known.get("learning_rate", known.get("lr", written.get("lr", "1e-4")))
    decay = known.get("weight_decay")
    if "momentum" in known:
        return _write("optim", {"type": "SGD", "lr": rate, "momentum": known["momentum"], "weight_decay": decay})
    kind = (_name_optimizer(kinds[0]) if kinds else None) or "AdamW"
    betas = [float(known.get("adam_beta1", 0.9)), float(known.get("adam_beta2", 0.999))]
    takes_betas = "Adam" in kind and ("adam_beta1" in known or "adam_beta2" in known)
    texts = {
        "type": kind,
        "lr": rate,
        "weight_decay": decay,
        "no_decay": "[bias, norm]" if decay else None,  # what transformers' Trainer, and all around it, leave out
        "betas": betas if takes_betas else None,
        "eps": known.get("adam_epsilon") if "Adam" in kind else None,
    }
    return _write("optim", texts)


def _advise_scheduler(known: Mapping[str, Any]) -> str | None:
    from accmt.options.optimizer_and_scheduler_names import schedulers_of_transformers

    theirs = known.get("lr_scheduler_type", known.get("lr_scheduler", "linear"))
    own = schedulers_of_transformers().get(getattr(theirs, "value", theirs))
    steps, ratio = known.get("warmup_steps") or 0, known.get("warmup_ratio") or 0
    if own is None or not (is_number(steps) and is_number(ratio)):
        return None
    if isinstance(steps, float) and steps < 1:  # which newer versions of transformers take for a ratio
        steps, ratio = 0, steps or ratio
    texts: dict[str, Any] = {"type": own}
    if "armup" in own:  # others have none, there too
        texts |= {"num_warmup_steps": steps} if steps else {"warmup_ratio": ratio}  # steps win there, too
    return _write("scheduler", texts)


def _advise_best(known: Mapping[str, Any]) -> str | None:
    return advise_value("metric_for_best_model", known["metric_for_best_model"])


def _write(key: str, values: Mapping[str, Any]) -> str:
    texts = [f"{name}: {value}" for name, value in values.items() if value is not None]
    return f"{key}: {{{', '.join(texts)}}}"


_KINDS = ("optim", "optimizer")

_JOINT: Mapping[tuple[str, ...], Callable[[Mapping[str, Any]], str | None]] = {
    ("per_device_train_batch_size", "per_device_eval_batch_size"): _advise_batch_sizes,
    (
        *_KINDS,
        "learning_rate",
        "lr",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "momentum",
    ): _advise_optimizer,
    ("load_best_model_at_end", "metric_for_best_model"): _advise_best,
    ("lr_scheduler_type", "lr_scheduler", "warmup_ratio", "warmup_steps"): _advise_scheduler,
    OF_MODEL: advise_model,
    OF_SFT: advise_sft,
}
