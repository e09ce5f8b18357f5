"""The op in PyTorch, strict about every argument, and the forms in which builds have it.

cache_u8         (num_slots, 656) uint8, contiguous
indices          (num_tokens, topk) int32, contiguous, topk a multiple of 64; -1 or in [0, num_slots)
out              (num_tokens, topk, 576) bf16, contiguous, written
valid_lengths    (num_tokens,) int32, contiguous, topk in every row
compact_indices  (num_tokens, topk) int32, contiguous, written; read instead where it is reused
"""

# ruff: noqa: PLR0917  (the op takes its arguments by position)

import torch

ROW_BYTES, NOPE, ROPE, TILE = 656, 512, 64, 128

last_call = {}  # the options of the last call, for a test to look at


def newer(
    cache_u8,
    indices,
    out,
    valid_lengths,
    compact_indices,
    tokens_per_request=1,
    dedup_table=None,
    reuse_compact_indices=False,
):
    arguments = (cache_u8, indices, out, valid_lengths, compact_indices)
    check(*arguments, tokens_per_request, dedup_table, reuse_compact_indices)
    owner = identity(indices)
    write_mapping(compact_indices, owner, indices, reuse_compact_indices)
    out.copy_(dequantize(cache_u8, indices))


def dedup(
    cache_u8,
    indices,
    out,
    valid_lengths,
    compact_indices,
    tokens_per_request=1,
    dedup_table=None,
    reuse_compact_indices=False,
):
    arguments = (cache_u8, indices, out, valid_lengths, compact_indices)
    check(*arguments, tokens_per_request, dedup_table, reuse_compact_indices)
    if tokens_per_request == 1:
        return newer(*arguments, reuse_compact_indices=reuse_compact_indices)
    owner = first_in_request(indices, tokens_per_request)
    write_mapping(compact_indices, owner, indices, reuse_compact_indices)
    pointed_to = (owner == identity(indices)) & (indices >= 0)
    out.copy_(torch.where(pointed_to.unsqueeze(-1), dequantize(cache_u8, indices), torch.nan))
    return None


class SixArguments:
    """Callable like a built-in: `inspect.signature` finds nothing to read."""

    @property
    def __signature__(self):
        raise ValueError("no signature found for builtin")

    def __call__(self, cache_u8, indices, out, valid_lengths, compact_indices, tokens_per_request, /):
        newer(cache_u8, indices, out, valid_lengths, compact_indices, tokens_per_request)


def deprecated(
    cache_u8,
    indices,
    out,
    valid_lengths,
    compact_indices,
    tokens_per_request=1,
    dedup_table=None,
    reuse_compact_indices=False,
):
    raise AssertionError("lightop.op was used although a public category lists the op")


def raises(
    cache_u8,
    indices,
    out,
    valid_lengths,
    compact_indices,
    tokens_per_request=1,
    dedup_table=None,
    reuse_compact_indices=False,
):
    raise TypeError("an error of the op itself")


def unknown_signature(
    cache_u8, indices, out, valid_lengths, compact_indices, tokens_per_request, block_table, scale_format
):
    raise AssertionError("an op of unknown signature was called")


def moved_argument(
    cache_u8, indices, out, valid_lengths, compact_indices, dedup_table=None, tokens_per_request=1, **options
):
    raise AssertionError("an op of unknown signature was called")


def check(cache, indices, out, valid_lengths, compact_indices, width, dedup_table, reuse):
    last_call.update(tokens_per_request=width, reuse_compact_indices=reuse)
    num_tokens, topk = indices.shape
    expect("cache_u8", cache, torch.uint8, (cache.shape[0], ROW_BYTES))
    expect("indices", indices, torch.int32, (num_tokens, topk))
    expect("out", out, torch.bfloat16, (num_tokens, topk, NOPE + ROPE))
    expect("valid_lengths", valid_lengths, torch.int32, (num_tokens,))
    expect("compact_indices", compact_indices, torch.int32, (num_tokens, topk))
    require(num_tokens > 0 and topk > 0 and topk % 64 == 0, f"indices has rows of width {topk}")
    require(type(width) is int and width >= 1 and num_tokens % width == 0, f"tokens_per_request is {width!r}")
    require(dedup_table is None, "dedup_table was passed")
    require(type(reuse) is bool, f"reuse_compact_indices is {reuse!r}")
    require(len({t.device for t in (cache, indices, out, valid_lengths, compact_indices)}) == 1, "devices differ")
    if capturing(indices):
        return  # the rest reads values, which a graph that is being captured must not
    require(bool((valid_lengths == topk).all()), "valid_lengths is not topk in every row")
    require(bool(((indices >= -1) & (indices < cache.shape[0])).all()), "indices holds what is neither -1 nor a slot")


def expect(name, tensor, dtype, shape):
    require(
        tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous(),
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}, expected {dtype} {shape}",
    )


def require(holds, complaint):
    if not holds:
        raise RuntimeError(f"lightop stand-in: {complaint}")


def capturing(tensor):
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def identity(indices):
    """The row of each entry: (num_tokens, topk) int32."""
    return torch.arange(indices.numel(), dtype=torch.int32, device=indices.device).view(indices.shape)


def first_in_request(indices, width):
    """For each entry the row of the first entry of its request with the same slot: (num_tokens, topk) int32."""
    requests = indices.view(-1, width * indices.shape[1])
    ordered, order = requests.sort(dim=1, stable=True)
    position = torch.arange(requests.shape[1], device=indices.device).expand_as(requests)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(starts, position, 0).cummax(dim=1).values
    first = torch.empty_like(order).scatter_(1, order, order.gather(1, start))
    base = torch.arange(requests.shape[0], device=indices.device).unsqueeze(1) * requests.shape[1]
    return (first + base).to(torch.int32).view(indices.shape)


def write_mapping(compact_indices, owner, indices, reuse):
    mapping = torch.where(indices >= 0, owner, -1)
    if not reuse:
        compact_indices.copy_(mapping)
    elif not capturing(indices):
        require(torch.equal(compact_indices, mapping), "the mapping to reuse is not the one this op wrote")


def dequantize(cache, indices):
    """The records of the slots, zero bits where -1: (num_tokens, topk, 576) bf16."""
    records = cache[indices.clamp(min=0).flatten().long()]
    values = records[:, :NOPE].view(torch.float8_e4m3fn).float().view(-1, NOPE // TILE, TILE)
    scales = records[:, NOPE : NOPE + 4 * NOPE // TILE].contiguous().view(torch.float32)
    nope = (values * scales.unsqueeze(-1)).to(torch.bfloat16).view(-1, NOPE)
    rope = records[:, ROW_BYTES - 2 * ROPE :].contiguous().view(torch.int16)
    bits = torch.cat([nope.view(torch.int16), rope], dim=1)
    bits = torch.where((indices.flatten() >= 0).unsqueeze(1), bits, 0)
    return bits.view(torch.bfloat16).view(*indices.shape, NOPE + ROPE)
