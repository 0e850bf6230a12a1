"""Reading a model folder's safetensors tensor by tensor, without building the model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.errors import InputError, NotSupported

_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # in old checkpoints; the model computes it


class Checkpoint:
    """Tensors of a model folder by name, dequantised, one in memory at a time.

    `body` and `head` are the prefixes of the decoder's and the output layer's names, found by their
    ends since wrappers put the language model under different names.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        embeddings = [name for name in self._files if name.endswith("embed_tokens.weight")]
        bodies = [name.removesuffix("embed_tokens.weight") for name in embeddings]
        bodies = [body for body in bodies if any(name.startswith(f"{body}layers.0.") for name in self._files)]
        if len(bodies) != 1:
            raise InputError(f"{folder}: expected safetensors with one decoder, found {len(bodies)}")
        self.folder, self.body = folder, bodies[0]
        self.head = next((name for name in self._files if name.endswith("lm_head.weight")), None)

    def names(self, prefix: str) -> set[str]:
        """Names of the stored tensors below `prefix`."""
        return {name for name in self._files if name.startswith(prefix) and not _COMPUTED.search(name)}

    def read(self, name: str, like: Tensor, used: set[str]) -> Tensor:
        """The tensor `name` in the shape and dtype of `like`; adds to `used` what was read for it."""
        if name in self._files or f"{name}_packed" in self._files:
            value = self._dequantised(name, used)
        elif re.search(r"\.experts\.(gate_up|down)_proj$", name):  # transformers keeps experts as one tensor
            value = torch.stack([self._expert(name, number, used, like.dtype) for number in range(like.shape[0])])
        else:
            raise InputError(f"{self.folder}: no tensor {name} in its safetensors; is the download complete?")
        if value.shape != like.shape:
            raise InputError(f"{self.folder}: {name} is {list(value.shape)}, its config.json says {list(like.shape)}")
        return value.to(like.dtype)

    def _expert(self, name: str, number: int, used: set[str], dtype: torch.dtype) -> Tensor:
        stem, _, kind = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        names = [f"{stem}.{number}.{part}.weight" for part in parts]
        return torch.cat([self._dequantised(part, used).to(dtype) for part in names])

    def _raw(self, name: str, used: set[str]) -> Tensor:
        if name not in self._files:
            raise InputError(f"{self.folder}: no tensor {name} in its safetensors; is the download complete?")
        used.add(name)
        with safe_open(self._files[name], "pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
        return value

    def _dequantised(self, name: str, used: set[str]) -> Tensor:
        if f"{name}_packed" in self._files:
            packed, scale = self._raw(f"{name}_packed", used), self._raw(f"{name}_scale", used)
            return _unpack(packed, scale, self._raw(f"{name}_shape", used).tolist())
        value = self._raw(name, used)
        if f"{name}_scale_inv" in self._files:
            return _scale_blocks(value, self._raw(f"{name}_scale_inv", used))
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise NotSupported(f"{self.folder}: {name} is stored as {value.dtype} in a format that is not known here")
        return value


def _unpack(packed: Tensor, scale: Tensor, shape: list[int]) -> Tensor:
    """Symmetric integers packed into int32, lowest bits first, offset by half their range (compressed-tensors).

    packed [out, in * bits / 32], scale [out, in / group] -> [out, in].
    """
    rows, columns = shape
    bits = 32 * packed.shape[1] // columns
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    unsigned = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    signed = unsigned.reshape(rows, -1)[:, :columns] - (1 << (bits - 1))
    return signed.float() * scale.float().repeat_interleave(columns // scale.shape[1], dim=1)


def _scale_blocks(value: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """fp8 weights with one scale per 128 x 128 block (DeepSeek-V3's weight_scale_inv)."""
    rows = scale.float().repeat_interleave(block, dim=0)[: value.shape[0]]
    return value.float() * rows.repeat_interleave(block, dim=1)[:, : value.shape[1]]
