"""The wire formats for tensors on a device: by torch, with the same bits as the native core's on the CPU.

The functions have the arguments of `_core.wire_encode` and `_core.wire_decode`, which say what they do;
csrc/reduce/wire.hpp defines the formats.
"""

from __future__ import annotations

import torch

from unicomm.comms.operations.wire import WireFormat

Tensor = torch.Tensor

_MASK = 0xFFFFFFFF
_INFINITE, _NAN_SCALE = 0x7F800000, 255
_BLOCKS = {WireFormat.INT8: 32, WireFormat.MXFP8: 32, WireFormat.FLOAT8_E4M3FN: 128}


def wire_encode(
    out: Tensor,
    input: Tensor,
    format: WireFormat,
    factor: float = 1.0,
    stochastic: bool = False,
    key: int = 0,
    residual: Tensor | None = None,
    first: int = 0,
) -> None:
    values = input.reshape(-1).float()
    if residual is not None:
        values = values + residual
    _encode(out, values * factor, format, _random(values, key, first) if stochastic else None)
    if residual is not None:
        wire_decode(residual, out, format)
        lost = values - (residual if factor == 1.0 else residual / factor)
        residual.copy_(torch.where(lost.isfinite(), lost, 0.0))


def _encode(out: Tensor, values: Tensor, format: WireFormat, random: Tensor | None) -> None:
    if format is WireFormat.BFLOAT16:
        if random is not None:
            bits = values.view(torch.int32)
            finite = (bits & 0x7FFFFFFF) < _INFINITE
            bits = torch.where(finite, (bits + (random >> 16).int()) & -0x10000, bits)
            values = bits.view(torch.float32)
        out.view(torch.bfloat16).copy_(values)
        return
    count, block = values.numel(), _BLOCKS[format]
    blocks = _in_blocks(values, block)
    greatest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1)
    if format is WireFormat.INT8:
        scale = ((greatest + (0x7FFFFF - 0x7E0000)) >> 23).clamp(6, 254)
        inverse = _power(260 - scale)
    else:
        scale = (((greatest + (0x7FFFFF - 0x600000)) >> 23) - 8).clamp(0, 254)
        inverse = _power(254 - scale)
    lost = greatest >= _INFINITE
    scaled = torch.where(lost[:, None], 0.0, blocks * inverse[:, None])
    noise = None if random is None else _in_blocks(random, block)
    codes = (_int8 if format is WireFormat.INT8 else _e4m3)(scaled, noise)
    out[:count] = codes.reshape(-1)[:count]
    out[count:] = torch.where(lost, _NAN_SCALE, scale).to(torch.uint8)


def wire_decode(out: Tensor, input: Tensor, format: WireFormat, add: bool = False) -> None:
    flat = out.view(-1)
    count = flat.numel()
    if format is WireFormat.BFLOAT16:
        values = input.view(torch.bfloat16).float()
    else:
        codes, scale = _in_blocks(input[:count], _BLOCKS[format]), input[count:].int()
        if format is WireFormat.INT8:
            elements, factor = codes.view(torch.int8).float(), _power(scale - 6)
        else:
            elements, factor = codes.view(torch.float8_e4m3fn).float(), _power(scale)
        factor = torch.where(scale == _NAN_SCALE, torch.nan, factor)
        values = (elements * factor[:, None]).reshape(-1)[:count]
    if add:
        flat.add_(values)
    else:
        flat.copy_(values)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def _power(biased: Tensor) -> Tensor:
    """Returns 2 to the power of `biased` - 127, which is at least -127."""
    return torch.where(biased > 0, biased << 23, 0x400000).int().view(torch.float32)


def _random(values: Tensor, key: int, first: int) -> Tensor:
    """Returns 32 random bits for each element, as the core does."""
    x = (torch.arange(first, first + values.numel(), device=values.device) & _MASK) ^ (key & _MASK)
    x ^= x >> 16
    x = _times(x, 0x7FEB352D)
    x ^= x >> 15
    x = (x + (key >> 32)) & _MASK
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Returns the lower 32 bits of products; by halves, which do not overflow."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _MASK


def _fraction(random: Tensor) -> Tensor:
    return (random >> 16).float() * 2.0**-16


def _int8(values: Tensor, random: Tensor | None) -> Tensor:
    values = values.clamp(-127.0, 127.0)
    if random is None:
        return values.round().to(torch.int8).view(torch.uint8)
    return ((values + _fraction(random) + 128.0).int() - 128).to(torch.int8).view(torch.uint8)


def _e4m3(values: Tensor, random: Tensor | None) -> Tensor:
    if random is None:
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (120 << 23) + (random >> 12).int()) >> 20
    steps = (magnitude.view(torch.float32) * 512.0 + _fraction(random)).clamp(max=8.0).int()
    code = torch.where(magnitude < (121 << 23), steps, normal)
    return (code | (bits >> 24 & 0x80)).to(torch.uint8)
