"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
