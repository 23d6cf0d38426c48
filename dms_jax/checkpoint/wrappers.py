"""Strip the prefixes that wrappers of a model leave in the names of its tensors.

    _orig_mod.model.layers.0.mlp.up_proj.weight          torch.compile, of the model
    model.layers.0._orig_mod.mlp.up_proj.weight          torch.compile, layer by layer
    module.model.layers.0.mlp.up_proj.weight             DataParallel
    base_model.model.model.layers.0.mlp.up_proj.weight   PEFT, after merging
    layers.0.mlp.up_proj.weight                          the model without its head

In each case the parameter is model.layers.0.mlp.up_proj.weight. A prefix is stripped only if every
tensor has it and the remaining names are a model's, so nothing is guessed.
"""

from collections.abc import Collection

from dms_jax.errors import CheckpointError, plain

_WITHIN = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_IN_FRONT = ("module.", "base_model.")
_ROOTS = ("model.", "lm_head.")
_LANGUAGE = {"language_model.": "", "model.language_model.": "model."}
_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")
_HEADLESS = ("embed_tokens.", "layers.", "norm.")


def parameter_names(stored: Collection[str]) -> dict[str, str]:
    """The parameter name of each tensor: parameter name -> stored name.

    Raises:
      CheckpointError: two tensors have the same name after stripping.
    """
    names = {name: _without(name) for name in stored}
    while prefix := _common(names.values()):
        names = {name: short.removeprefix(prefix) for name, short in names.items()}
    if names and all(short.startswith((*_HEADLESS, "lm_head.")) for short in names.values()):
        heads = ("lm_head.",)
        names = {n: s if s.startswith(heads) else f"model.{s}" for n, s in names.items()}
    found: dict[str, str] = {}
    for name, short in names.items():
        if short in found:
            raise CheckpointError(
                f"the tensors {plain(found[short])} and {plain(name)} are both {plain(short)} "
                "without the prefixes of PyTorch's wrappers: keep one of them"
            )
        found[short] = name
    return found


def language_names(stored: Collection[str]) -> dict[str, str]:
    """The tensors of the language part of a model that reads images: name -> stored name."""
    found = {}
    for name in stored:
        if name.removeprefix("model.").startswith(_IMAGES):
            continue
        prefix = next((each for each in _LANGUAGE if name.startswith(each)), "")
        found[_LANGUAGE.get(prefix, "") + name.removeprefix(prefix)] = name
    return found


def _without(name: str) -> str:
    for part in _WITHIN:
        name = name.replace(part, "")
    return name


def _common(names: Collection[str]) -> str | None:
    """The first component of all names, if a wrapper added it."""
    first = next(iter(names), "").partition(".")
    prefix = first[0] + "."
    if not first[2] or not all(name.startswith(prefix) for name in names):
        return None
    left = [name.removeprefix(prefix) for name in names]
    known = prefix in _IN_FRONT or all(name.startswith(_ROOTS) for name in left)
    return prefix if known and all(left) else None
