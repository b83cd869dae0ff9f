"""What runs inside vLLM's own worker processes: taking over a policy's weights. Imported there by name."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file


class PolicyLoader:
    """vLLM's worker class gets these methods (``worker_extension_cls``); ``self`` is the worker."""

    model_runner: Any

    def load_policy(self, path: str) -> None:
        """Load every parameter from the safetensors file ``path``, in place, and pack it as the kernels want it.

        A bare ``model.load_weights`` would fail half way: on CPUs the packed layers have no weight left to load into.
        """
        # mapped, not read: the only copy is the one into the model
        self.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()), is_checkpoint_format=True)
