"""Triton's kernels on a CPU, for vLLM's Model Runner V2, which consists of them: Python interprets them, slowly.

Triton has the interpreter; what it lacks is a backend called ``cpu``, by which vLLM's CPU build finds out that there
is a Triton that it can use. Python imports a module of this name when it starts, so the engine processes, which vLLM
spawns, have the backend too.
"""

import os

os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_BACKEND": "cpu"}  # read when triton is imported

from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Says that there is a device, and nothing about it: nothing is compiled for it."""

    def __init__(self) -> None: ...

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)


InterpreterDriver.__abstractmethods__ = frozenset()
backends["cpu"] = Backend(BaseBackend, InterpreterDriver)
