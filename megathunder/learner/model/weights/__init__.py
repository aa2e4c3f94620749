"""Weights between Hugging Face folders and Megatron shards: `families/` says what maps to what, this says how."""

from megathunder.learner.model.weights.transfer import (
    export_base,
    export_tensors,
    export_weights,
    import_weights,
    save_hf,
)

__all__ = ["export_base", "export_tensors", "export_weights", "import_weights", "save_hf"]
