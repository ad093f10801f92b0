"""Everything of a model that its owner may look at, to compare before and after it was used."""

import copy
from typing import Any

import torch

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return attributes, hooks, modes and configurations of all modules, and all weights' data.

    Two such states are equal where nothing changed; weights are compared by place, version and sum.
    """
    record: dict[str, Any] = {}
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        record[name] = (
            {key: id(value) for key, value in vars(module).items() if key != "training"},
            module.training,
            [len(getattr(module, hooks)) for hooks in _HOOKS],
            copy.deepcopy(vars(config)) if config is not None else None,
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        known = tensor.data_ptr(), tensor._version, tensor.requires_grad, tensor.grad is None
        record[f"{name} (tensor)"] = (*known, float(tensor.detach().double().sum()))
    return record
