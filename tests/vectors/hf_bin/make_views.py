"""Makes views.bin, views.npz, old.bin and expanded.bin of this folder.

Needs torch (made with 2.13.0); not run by the tests.
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

here = Path(__file__).parent
torch.manual_seed(0)
base = torch.randn(6, 8)
cube = torch.randn(3, 4, 5).to(torch.bfloat16)
state = OrderedDict(
    plain=base,
    transposed=base.t(),
    sliced=base[1:5, 2:8:3],
    shared_row=base[4],
    permuted=cube.permute(2, 0, 1),
    middle=cube[:, 1:3, :],
    half=torch.randn(5).half(),
    double=torch.randn(2, 2).double(),
    long=torch.arange(7),
    byte=torch.arange(9, dtype=torch.uint8).reshape(3, 3),
    flag=torch.tensor([True, False, True]),
    scalar=torch.tensor(2.5),
    empty=torch.empty(0, 4),
    one_column=torch.randn(4, 1).t(),
    parameter=torch.nn.Parameter(torch.randn(3)),
    e4m3=torch.randn(4, 4).to(torch.float8_e4m3fn),
    u16=torch.tensor([1, 2, 65535], dtype=torch.uint16),
)
state._metadata = OrderedDict({"": {"version": 1}})  # as nn.Module.state_dict() leaves it
torch.save(state, here / "views.bin")
torch.save({"a": torch.ones(1).expand(1000, 1000)}, here / "expanded.bin")
torch.save({"a": torch.ones(2)}, here / "old.bin", _use_new_zipfile_serialization=False)
whole = {k: v.detach().contiguous() for k, v in state.items()}
raw = {k: v.reshape(-1).view(torch.uint8).numpy() if v.numel() else np.empty(0, np.uint8) for k, v in whole.items()}
np.savez(here / "views.npz", **raw)
