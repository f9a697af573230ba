"""Checkpoints whose tensors have the names of another module's parts: what stands before them, and what would help.

For the message where a tensor is missing. Renames nothing.
"""

from collections.abc import Collection

from flashllm.arch.tensors import ArchitectureSpec

_MAX_SHOWN = 80
_WRAPPERS = {
    "_orig_mod.": "as torch.compile names them; save the model that was compiled, model._orig_mod, with "
    "save_pretrained()",
    "base_model.model.": "as peft names them; merge the adapter into its base model (merge_and_unload) and save that",
    "module.": "as DataParallel names them; save the model within, model.module, with save_pretrained()",
}


def what_wraps(spec: ArchitectureSpec, names: Collection[str]) -> str:
    """Say what stands before a model's names in a checkpoint's `names`, and what would help: the rest of a message.

    Empty where nothing does: where the embedding has its name, or none that ends like it.
    """
    bare = spec.embedding.removeprefix(spec.base_prefix)
    if spec.embedding in names or bare in names:
        return ""
    found = sorted(name for name in names if name.endswith(f".{bare}"))
    if not found:
        return ""
    prefix = found[0].removesuffix(bare)
    if prefix.endswith(f".{spec.base_prefix}"):
        prefix = prefix.removesuffix(spec.base_prefix)
    shown = repr(prefix[:_MAX_SHOWN])
    for wrapper, help_ in _WRAPPERS.items():
        if f".{prefix}".endswith(f".{wrapper}"):
            return f": the names begin with {shown}, {help_}"
    others = sum(not name.startswith(prefix) and name != spec.head for name in names)
    if others:
        return (
            f": it is part of a larger model, whose names begin with {shown}, next to {others} other tensors; save "
            "that part on its own with transformers"
        )
    return f": all names begin with {shown}; take that from them, or save the model again without what wraps it"
